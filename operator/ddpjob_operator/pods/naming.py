"""Names, labels, DNS names and ports of a job's objects, equal in cluster and local run."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

from ddpjob_operator.job import api

LABEL_JOB = f"{api.GROUP}/job"
LABEL_ATTEMPT = f"{api.GROUP}/attempt"
LABEL_RANK = f"{api.GROUP}/rank"
LABEL_REPLACEMENT = f"{api.GROUP}/replacement"
LABEL_TRAINER = f"{api.GROUP}/trainer"
"""Name of the trainer if it is not `trainer` but the template's first container. Webhooks put their containers first
(Linkerd's proxy, the sidecar of GKE's Cloud Storage FUSE).
"""
LABELS = frozenset((LABEL_JOB, LABEL_ATTEMPT, LABEL_RANK, LABEL_REPLACEMENT, LABEL_TRAINER))

# The ports are outside the NodePort range (30000-32767), and below ports that scripts often hard-code (29400, 29500).
# The ports are also outside the ephemeral range (32768-60999), which the kernel uses for outgoing connections.
PORT_FIRST, PORT_LAST = 20000, 29399
PORTS_AVOIDED = frozenset({23456, 25000})  # lower ports that scripts hard-code


@dataclass(frozen=True)
class Endpoint:
    """The address of the rendezvous, served by rank 0."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def labels(job: api.DDPJob) -> dict[str, str]:
    """Return the labels that select the objects of a job."""
    return {LABEL_JOB: job.metadata.name}


def selector(job: api.DDPJob) -> str:
    return ",".join(f"{k}={v}" for k, v in labels(job).items())


def pod_name(job: api.DDPJob, attempt: int, place: int, replacement: int = 0) -> str:
    """Return the name of a pod. The name has the attempt, so that a pod of an old attempt is never taken for a new one.

    digits-1-3-r2 is the second replacement of digits-1-3. The r distinguishes it from pods of a job named digits-1.
    """
    name = f"{job.metadata.name}-{attempt}-{place}"
    return f"{name}-r{replacement}" if replacement else name


def replacement(status: api.Status, place: int) -> int:
    """Return how often the pod with this number was replaced alone in the current attempt."""
    return status.replacements.get(str(place), 0) if status.replacements else 0


def present_pod_name(job: api.DDPJob, status: api.Status, place: int) -> str:
    return pod_name(job, status.attempt, place, replacement(status, place))


def hostname(job: api.DDPJob, place: int) -> str:
    """Return the host name of the pod with this number, equal in every attempt."""
    return f"{job.metadata.name}-{place}"


def endpoint(job: api.DDPJob, attempt: int) -> Endpoint:
    """Return the address of rank 0 in a cluster.

    The port depends on uid and attempt even if each pod has its own network. A process that survives on a lost node
    still resolves the stable DNS name, and must not reach the store of a newer attempt.
    """
    name = job.metadata.name
    return Endpoint(
        f"{hostname(job, job.spec.members.leader)}.{name}.{job.metadata.namespace}",
        port(job.metadata.uid, attempt),
    )


@functools.lru_cache(maxsize=256)
def port(uid: str, attempt: int) -> int:
    """Return a port for rank 0 that differs between jobs and between attempts."""
    span = PORT_LAST - PORT_FIRST + 1
    offset = int.from_bytes(hashlib.sha256(uid.encode()).digest()[:4], "big")
    # 7 is coprime to the span: the attempts of a job use all ports before one repeats.
    candidates = (PORT_FIRST + (offset + 7 * attempt + extra) % span for extra in range(span))
    return next(p for p in candidates if p not in PORTS_AVOIDED)
