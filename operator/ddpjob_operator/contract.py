"""The environment contract: the names, labels, addresses and variables that a trainer meets, in every shell.

Used by `build.py` for pods, and through those pods by the local run: both shells give byte-equal names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ddpjob_operator import api, bounds, launcher
from ddpjob_operator.podspec import cpus, gpus, grace_seconds, trainer_container

LABEL_JOB = f"{api.GROUP}/job"
LABEL_ATTEMPT = f"{api.GROUP}/attempt"
LABEL_RANK = f"{api.GROUP}/rank"
LABEL_REPLACEMENT = f"{api.GROUP}/replacement"
TERMINATION_LOG = "DDPJOB_TERMINATION_LOG"

# Outside the ephemeral range (32768-60999) and the NodePort range (30000-32767), so that the kernel never gives the
# port to an outgoing connection; without those that scripts in the wild hard-code (12355, 29500, 8888 lie outside).
PORT_FIRST, PORT_LAST = 20000, 29399
PORTS_AVOIDED = frozenset({23456, 25000, 29400, 29500, 12355, 8888})

# Every second one of 99,999 nodes is the longest that `ranges` writes.
RANGES_LENGTH_MAX = 300_000

BREAKS_RENDEZVOUS = frozenset(
    "MASTER_ADDR MASTER_PORT NNODES NODE_RANK NPROC_PER_NODE RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE "
    "DDPJOB_WORLD_SIZE PET_NNODES PET_NPROC_PER_NODE PET_NODE_RANK PET_MASTER_ADDR PET_MASTER_PORT PET_RDZV_ID "
    "PET_RDZV_BACKEND PET_RDZV_ENDPOINT PET_RDZV_CONF PET_STANDALONE PET_MAX_RESTARTS".split()
)


@dataclass(frozen=True)
class Endpoint:
    """Where the other ranks meet rank 0."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def labels(job: api.DDPJob) -> dict[str, str]:
    """The labels by which `kubectl get pods -l` finds the objects of a job."""
    return {LABEL_JOB: job.metadata.name}


def selector(job: api.DDPJob) -> str:
    """The label selector of the job's pods."""
    return ",".join(f"{k}={v}" for k, v in labels(job).items())


def pod_name(job: api.DDPJob, attempt: int, rank: int, replacement: int = 0) -> str:
    """The pod's name says the attempt, so that no pod of an old attempt is ever taken for a new one.

    digits-1-3-r2 is the second that has replaced digits-1-3 alone. The r keeps it apart from the pods of a job that is
    named digits-1.
    """
    name = f"{job.metadata.name}-{attempt}-{rank}"
    return f"{name}-r{replacement}" if replacement else name


def replacement(status: api.Status, rank: int) -> int:
    """Which pod of a rank in the present attempt is the one that counts."""
    return status.replacements.get(str(rank), 0)


def present_pod_name(job: api.DDPJob, status: api.Status, rank: int) -> str:
    """The name of the pod that counts of a rank."""
    return pod_name(job, status.attempt, rank, replacement(status, rank))


def hostname(job: api.DDPJob, rank: int) -> str:
    """The DNS name of a rank is the same in every attempt."""
    return f"{job.metadata.name}-{rank}"


def endpoint(job: api.DDPJob, attempt: int) -> Endpoint:
    """The address of rank 0 in a cluster.

    The port depends on uid and attempt also where each pod has a network of its own: a process that survives on a
    lost node still resolves the stable DNS name, and must not reach the store of a newer attempt.
    """
    name = job.metadata.name
    return Endpoint(f"{hostname(job, 0)}.{name}.{job.metadata.namespace}", port(job.metadata.uid, attempt))


def port(uid: str, attempt: int) -> int:
    """A port for rank 0 that differs between jobs and between the attempts of a job."""
    span = PORT_LAST - PORT_FIRST + 1
    offset = int.from_bytes(hashlib.sha256(uid.encode()).digest()[:4], "big")
    # 7 is prime to the span: the attempts of a job walk through all ports before one comes again.
    candidates = (PORT_FIRST + (offset + 7 * attempt + extra) % span for extra in range(span))
    return next(p for p in candidates if p not in PORTS_AVOIDED)


def nproc_per_node(spec: api.Spec) -> int:
    """Processes per node: the number in the spec; for auto what the command says, else its GPUs, else 1."""
    if spec.nproc_per_node != "auto":
        return spec.nproc_per_node
    return min(bounds.NPROC_MAX, launcher.nproc_per_node(spec.template) or max(1, gpus(spec.template)))


def world_size(spec: api.Spec) -> int:
    """Ranks of the whole job."""
    return spec.nodes * nproc_per_node(spec)


def ranks_follow_nodes(spec: api.Spec) -> bool:
    """Whether node k has the ranks from k × nproc on. Under a dynamic rendezvous (c10d, etcd) torchrun numbers the
    nodes as they come, and says that it ignores the node rank."""
    found = launcher.find(launcher.command_of(spec.template))
    return found is None or found.name == "ddprun" or found.options.get("rdzv_backend", "static") == "static"


def not_its_rank(spec: api.Spec, rank: int, node_rank: int | None) -> str:
    """Why the pod of a node may not speak for a rank; empty: it may. node_rank None: who speaks is not known."""
    nproc, world = nproc_per_node(spec), world_size(spec)
    if rank >= world:
        return f"rank: {rank} is none of the job's {world} ranks (nodes x nprocPerNode)"
    if node_rank is not None and ranks_follow_nodes(spec) and rank // nproc != node_rank:
        return f"rank: {rank} is not of node {node_rank}, which has {nproc} from {node_rank * nproc} on (nprocPerNode)"
    return ""


def rank_of_node(spec: api.Spec, node_rank: int) -> int | None:
    """The rank of a node's only process; None where it has several, or which it is cannot be known."""
    return node_rank if nproc_per_node(spec) == 1 and ranks_follow_nodes(spec) else None


def backend(spec: api.Spec) -> str:
    """The torch.distributed backend: auto is nccl for jobs with GPUs, else gloo."""
    if spec.backend != "auto":
        return spec.backend
    return "nccl" if gpus(spec.template) else "gloo"


def shutdown_timeout_seconds(spec: api.Spec) -> int:
    """How long torchrun waits for its workers after SIGTERM: within the grace period, with time left to report.

    At least 1: a negative value crashes torchrun (docs/measured.md, launchers).
    """
    return max(1, grace_seconds(spec.template) - 5)


def termination_log(spec: api.Spec) -> str:
    """Where a trainer may say why it ended; the kubelet makes the file and reads it."""
    path = (trainer_container(spec.template) or {}).get("terminationMessagePath")
    return path if isinstance(path, str) and path else "/dev/termination-log"


def environment(job: api.DDPJob, attempt: int, rank: int, meet: Endpoint) -> dict[str, str]:
    """The variables of node `rank` in `attempt`, where all ranks meet at `meet`. The user's own come on top."""
    nproc = nproc_per_node(job.spec)
    return {
        **_rendezvous(job, rank, nproc, meet),
        **(_single_process(job, rank) if nproc == 1 else {}),
        **_torchrun(job, attempt, rank, nproc, meet),
        "DDPJOB_NAME": job.metadata.name,
        "DDPJOB_NAMESPACE": job.metadata.namespace,
        "DDPJOB_UID": job.metadata.uid,
        "DDPJOB_ATTEMPT": str(attempt),
        "DDPJOB_BACKEND": backend(job.spec),
        TERMINATION_LOG: termination_log(job.spec),
        # Results differ by the number of threads (docs/measured.md, results), so it is never left to the machine.
        "OMP_NUM_THREADS": str(max(1, (cpus(job.spec.template) or 1) // nproc)),
        "PYTHONUNBUFFERED": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
    }


def overridden(job: api.DDPJob) -> list[str]:
    """The variables that the user's template sets and that all ranks need to meet: they win, and are named."""
    trainer = trainer_container(job.spec.template) or {}
    return sorted({e["name"] for e in user_environment(trainer) if e["name"] in BREAKS_RENDEZVOUS})


def user_environment(container: dict[str, object]) -> list[dict[str, object]]:
    """The `env` entries of a container that have a name."""
    env = container.get("env")
    return [e for e in env if isinstance(e, dict) and isinstance(e.get("name"), str)] if isinstance(env, list) else []


def ranges(numbers: Iterable[int]) -> str:
    """0-5,8: as batch/v1 Job writes its completedIndexes."""
    spans: list[list[int]] = []
    for n in sorted(set(numbers)):
        if spans and spans[-1][1] == n - 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def numbers(text: str) -> frozenset[int]:
    """The inverse of `ranges`; a damaged part counts as nothing, for a status may come from anywhere."""
    found: set[int] = set()
    for part in text[:RANGES_LENGTH_MAX].split(","):
        first, _, last = part.partition("-")
        span = bounds.number(first, bounds.NODES_MAX), bounds.number(last or first, bounds.NODES_MAX)
        if -1 not in span:
            found.update(range(span[0], span[1] + 1))
    return frozenset(found)


def _rendezvous(job: api.DDPJob, rank: int, nproc: int, meet: Endpoint) -> dict[str, str]:
    return {
        "MASTER_ADDR": meet.host,
        "MASTER_PORT": str(meet.port),
        "NNODES": str(job.spec.nodes),
        "NODE_RANK": str(rank),
        "NPROC_PER_NODE": str(nproc),
        "DDPJOB_WORLD_SIZE": str(job.spec.nodes * nproc),
    }


def _single_process(job: api.DDPJob, rank: int) -> dict[str, str]:
    """For scripts without a launcher. Only where a node has one process: with more they mislead those that start
    their own (the imagenet example multiplies WORLD_SIZE by its GPUs)."""
    return {"RANK": str(rank), "WORLD_SIZE": str(job.spec.nodes), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def _torchrun(job: api.DDPJob, attempt: int, rank: int, nproc: int, meet: Endpoint) -> dict[str, str]:
    return {
        "PET_NNODES": str(job.spec.nodes),
        "PET_NPROC_PER_NODE": str(nproc),
        "PET_NODE_RANK": str(rank),
        "PET_MASTER_ADDR": meet.host,
        "PET_MASTER_PORT": str(meet.port),
        # torch prefixes its store with the run id: a process of an older attempt can reach the port and still not join.
        "PET_RDZV_ID": f"{job.metadata.uid}-{attempt}",
        "PET_MAX_RESTARTS": "0",
        "PET_SHUTDOWN_TIMEOUT": str(shutdown_timeout_seconds(job.spec)),
    }


def list_ranks(node_ranks: Sequence[int]) -> str:
    """`1, 4-7` for messages."""
    return ranges(node_ranks).replace(",", ", ")
