"""Choose OMP_NUM_THREADS of a local run: the job's, else the caller's, else 1 if several ranks share this machine."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from ddpjob_operator.job import api, podspec
from ddpjob_operator.pods import build

_NAME = "OMP_NUM_THREADS"


def set_threads(job: api.DDPJob, environ: Mapping[str, str]) -> api.DDPJob:
    """Add OMP_NUM_THREADS if the job has none: the caller's, else 1 if nodes of one rank share this machine."""
    spec = job.spec
    is_alone = spec.world_size == 1 or podspec.cpus(spec.template) is not None
    value = environ.get(_NAME) or ("" if is_alone or spec.facts.nproc_per_node > 1 else "1")
    template = msgspec.to_builtins(spec.template)
    trainer = podspec.trainer_container(template)
    if not value or trainer is None or any(e.get("name") == _NAME for e in podspec.mappings(trainer, "env")):
        return job
    trainer["env"] = [{"name": _NAME, "value": value.replace("$", "$$")}, *(trainer.get("env") or [])]
    return replace(job, spec=replace(spec, template=template))


def chosen(job: api.DDPJob, environ: Mapping[str, str]) -> str:
    """Return OMP_NUM_THREADS=1, as text, if it was added and neither the job nor the caller set it; else ""."""
    trainer = podspec.trainer_container(job.spec.template)
    if environ.get(_NAME) or trainer is None or any(e.get("name") == _NAME for e in podspec.mappings(trainer, "env")):
        return ""
    made = podspec.trainer_container(build.pod(set_threads(job, environ), 1, 0)) or {}
    return next((f"{_NAME}={e.get('value')}" for e in podspec.mappings(made, "env") if e.get("name") == _NAME), "")
