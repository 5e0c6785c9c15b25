"""What a DDPJob tells about the script that it runs, and the mistakes in the YAML itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ddpjob_operator.check import command
from ddpjob_operator.check.rule import Job
from ddpjob_operator.check.starting import DEPRECATED
from ddpjob_operator.job import api, launcher, topology
from ddpjob_operator.job.podspec import command_path, gpus, mounts, trainer_container

FieldPath = tuple[str | int, ...]


def known(job: api.DDPJob) -> Job:
    """The context in which the job's script is checked."""
    template = job.spec.template
    words = launcher.command_of(template)
    by, started = launcher.find(words), command.read(words)
    return Job(
        nodes=job.spec.nodes,
        nproc=topology.nproc_per_node(job.spec),
        gpus=_gpus(template),
        backend=topology.backend(job.spec),
        launcher=by.name if by else started.launcher,
        launcher_options=dict(by.options) if by else {},
        words=started.words,
        mounts=mounts(template),
        known=True,
    )


def mistakes(job: api.DDPJob) -> Iterator[tuple[FieldPath, str, str]]:
    """(field, rule, message) of what is wrong in the YAML itself and yet a valid job."""
    template = job.spec.template
    by = launcher.in_template(template)
    if by and by.name in ("torch.distributed.launch", "launch.py"):
        yield command_path(template), "launch-deprecated", DEPRECATED
    if job.spec.backend == "nccl" and _gpus(template) == 0:
        yield (
            ("spec", "backend"),
            "nccl-without-gpu",
            "nccl needs a GPU in each process, and the trainer's resources.limits have none; add nvidia.com/gpu, or "
            "use gloo",
        )


def _gpus(template: Mapping[str, Any]) -> int | None:
    """GPUs of a pod; None where resource claims may bring some."""
    resources = (trainer_container(template) or {}).get("resources")
    claimed = isinstance(resources, Mapping) and resources.get("claims")
    return None if claimed else gpus(template)
