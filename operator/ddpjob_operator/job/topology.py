"""The ranks of a job and their nodes, as far as the spec determines them."""

from __future__ import annotations

import functools

from ddpjob_core.members import Members
from ddpjob_operator.job import api, bounds, launcher
from ddpjob_operator.job.podspec import grace_seconds


def nproc_per_node(spec: api.Spec) -> int:
    """Return processes per node: the spec's number; for auto the command's number, else the number of GPUs, else 1."""
    if spec.nproc_per_node != "auto":
        return spec.nproc_per_node
    return min(bounds.NPROC_MAX, launcher.facts(spec).nproc_per_node or max(1, launcher.facts(spec).gpus))


def world_size(spec: api.Spec) -> int:
    return members(spec).world_size(nproc_per_node(spec))


def members(spec: api.Spec) -> Members:
    """Return the places of the job (the numbers in its pods' names), in order. Only this translates between places
    (pods, startedNodes, completedNodes and replacements in a status) and node ranks (reports, failures)."""
    return _of(spec.nodes)


@functools.lru_cache(maxsize=16)
def _of(nodes: int) -> Members:
    # Cached, because a plan calls this once for each node, which would take quadratic time.
    return Members(range(nodes))


def ranks_follow_nodes(spec: api.Spec) -> bool:
    """True if node k has the ranks from k × nproc on, unlike under torchrun's dynamic rendezvous."""
    started = launcher.facts(spec).launcher
    if launcher.facts(spec).min_nodes is not None:
        return False
    return started is None or started.launcher == "ddprun" or started.options.get("rdzv_backend", "static") == "static"


def all_have_dns_names(spec: api.Spec) -> bool:
    """True if every node has a DNS name, not only node 0. With a dynamic rendezvous, torchrun may give all ranks the
    name of any node as MASTER_ADDR (torch 2.13, elastic/rendezvous/api.py)."""
    if spec.dns != "auto":
        return spec.dns == "all"
    return not (ranks_follow_nodes(spec) or launcher.facts(spec).restarts_in_place)


def not_its_rank(spec: api.Spec, rank: int, node_rank: int | None) -> str:
    """Return why the pod of a node may not report for a rank; "" if it may. node_rank None: the reporter is unknown."""
    nproc, world = nproc_per_node(spec), world_size(spec)
    if rank >= world:
        return f"rank: {rank} is not one of the job's {world} ranks (nodes x nprocPerNode)"
    if node_rank is not None and ranks_follow_nodes(spec) and rank // nproc != node_rank:
        return f"rank: {rank} is not of node {node_rank}, which has {nproc} from {node_rank * nproc} on (nprocPerNode)"
    return ""


def rank_of_place(spec: api.Spec, place: int) -> int | None:
    """Return the rank of a pod's only process; None if the pod has several processes or the rank is unknown."""
    return members(spec).node_rank(place) if nproc_per_node(spec) == 1 and ranks_follow_nodes(spec) else None


def backend(spec: api.Spec) -> str:
    if spec.backend != "auto":
        return spec.backend
    return "nccl" if launcher.facts(spec).gpus else "gloo"


def shutdown_timeout_seconds(spec: api.Spec) -> int:
    """Return for how many seconds torchrun waits for its workers after SIGTERM: the grace period, minus time to
    report. A negative value crashes torchrun (docs/dev/upstream.md, launchers)."""
    return max(1, grace_seconds(spec.template) - 5)


def termination_log(spec: api.Spec) -> str:
    """Return the file to which a trainer may write why it ended. The kubelet creates and reads it."""
    path = launcher.facts(spec).trainer.get("terminationMessagePath")
    return path if isinstance(path, str) and path else "/dev/termination-log"
