"""Environment variables of a trainer, equal in the cluster and in a local run."""

from __future__ import annotations

from ddpjob_operator.job import api, budgets
from ddpjob_operator.job.podspec import cpus, mappings
from ddpjob_operator.pods.naming import Endpoint

TERMINATION_LOG = "DDPJOB_TERMINATION_LOG"
JOIN_SECONDS = 900
"""The longest that the torchrun of an elastic job waits for its group. Without minNodes it is torch's default, 600 s
(_default_timeout_seconds, torch/distributed/elastic/rendezvous/static_tcp_rendezvous.py, torch 2.13)."""
# Variables that torchrun and ddprun always set in the ranks.
OF_RANKS = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def environment(job: api.DDPJob, attempt: int, place: int, rendezvous: Endpoint) -> dict[str, str]:
    """Return the variables of a pod; the user's own have priority. place: its number. rendezvous: address of rank 0."""
    nproc, node_rank = job.spec.facts.nproc_per_node, job.spec.members.node_rank(place)
    facts = job.spec.facts
    least = facts.min_nodes
    # torchrun numbers the nodes of an elastic job itself; a node of ddprun keeps its number.
    is_numbered = least is None or facts.restarts_in_place
    # Set RANK and WORLD_SIZE for scripts without a launcher, and only if a node has one process.
    # If nodes had several processes, the imagenet example would be wrong: it multiplies WORLD_SIZE by its GPUs.
    size = str(job.spec.nodes)
    single_process = {"RANK": str(node_rank), "WORLD_SIZE": size, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    every = {
        **_rendezvous(job, node_rank, nproc, rendezvous),
        **(single_process if nproc == 1 and least is None else {}),
        **_torchrun(job, attempt, node_rank if is_numbered else None, nproc, rendezvous),
        **({} if least is None else {"PET_NNODES": f"{least}:{job.spec.pods}"}),
        **({} if is_numbered else _elastic(job, node_rank, rendezvous)),
        "DDPJOB_NAME": job.metadata.name,
        "DDPJOB_NAMESPACE": job.metadata.namespace,
        "DDPJOB_UID": job.metadata.uid,
        "DDPJOB_ATTEMPT": str(attempt),
        "DDPJOB_BACKEND": job.spec.facts.backend,
        TERMINATION_LOG: job.spec.facts.termination_log,
        **_threads(cpus(job.spec.template), nproc),
        "PYTHONUNBUFFERED": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
    }
    left_out = _read_by_nobody(job.spec, nproc)
    return {name: value for name, value in every.items() if name not in left_out}


def _read_by_nobody(spec: api.Spec, nproc: int) -> set[str]:
    """Return variables that the trainer's program does not read and its container does not mention.

    Each variable costs the API server 0.3 ms of CPU (bench/job_cost.py). A Python file gets all of them: it may start
    torchrun, and without PET_… each node would train alone, and succeed.
    """
    facts = spec.facts
    if not facts.is_launcher_alone:
        return set()
    defaults = {"PET_MAX_RESTARTS"} if facts.min_nodes is None or facts.restarts_in_place else set()
    defaults |= {"PET_NPROC_PER_NODE"} if nproc == 1 else set()
    return (OF_RANKS | defaults) - facts.mentioned


def _threads(limit: int | None, nproc: int) -> dict[str, str]:
    """Set OMP_NUM_THREADS by the pod's CPU limit, which torch does not know. Without a limit, do as torchrun does:
    with several processes one thread each, while a single process may use all cores."""
    return {} if limit is None and nproc == 1 else {"OMP_NUM_THREADS": str(max(1, (limit or 1) // nproc))}


def user_environment(container: dict[str, object]) -> list[dict[str, object]]:
    """Return the `env` entries of a container that have a name."""
    return [e for e in mappings(container, "env") if isinstance(e.get("name"), str)]


def _rendezvous(job: api.DDPJob, node_rank: int, nproc: int, rendezvous: Endpoint) -> dict[str, str]:
    return {
        "MASTER_ADDR": rendezvous.host,
        "MASTER_PORT": str(rendezvous.port),
        "NNODES": str(job.spec.nodes),
        "NODE_RANK": str(node_rank),
        "NPROC_PER_NODE": str(nproc),
        "DDPJOB_WORLD_SIZE": str(job.spec.world_size),
    }


def _torchrun(job: api.DDPJob, attempt: int, node_rank: int | None, nproc: int, rendezvous: Endpoint) -> dict[str, str]:
    """Return torchrun's options. node_rank: None if torchrun numbers the nodes, because it would warn about one."""
    return {
        "PET_NNODES": str(job.spec.nodes),
        "PET_NPROC_PER_NODE": str(nproc),
        **({} if node_rank is None else {"PET_NODE_RANK": str(node_rank)}),
        "PET_MASTER_ADDR": rendezvous.host,
        "PET_MASTER_PORT": str(rendezvous.port),
        # torch prefixes its store with the run id, so an older attempt's process may reach the port but cannot join.
        "PET_RDZV_ID": f"{job.metadata.uid}-{attempt}",
        "PET_MAX_RESTARTS": "0",
        "PET_SHUTDOWN_TIMEOUT": str(job.spec.facts.shutdown_timeout_seconds),
    }


def _elastic(job: api.DDPJob, node_rank: int, rendezvous: Endpoint) -> dict[str, str]:
    """Return the settings with which torchrun starts with fewer nodes than all, and lets further nodes join."""
    return {
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": str(rendezvous),
        # is_host is explicit, because torchrun would otherwise guess it from its host's names.
        # The timeouts are those of the static rendezvous: with 60 s a node would fail while node 0 pulls its image.
        "PET_RDZV_CONF": f"is_host={int(node_rank == 0)},join_timeout={JOIN_SECONDS},read_timeout={JOIN_SECONDS}",
        # A joining node makes torchrun restart all ranks in their pods.
        # Restarted gloo ranks (torch 2.13) with a shared store would read old addresses (docs/dev/upstream.md).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # When a node joins, ranks end. A torchrun that has not noticed the join yet spends a restart on their end.
        "PET_MAX_RESTARTS": str(budgets.application_left(job.spec, job.status)),
    }
