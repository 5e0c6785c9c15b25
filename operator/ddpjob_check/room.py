"""Whether a pod has room for the state in memory (docs/memory.md), by the rule by which the library reserves it."""

from __future__ import annotations

from ddpjob_core import memory
from ddpjob_operator.job import api, launcher, topology
from ddpjob_operator.job.podspec import limits, quantity

STATE_BYTES = 12
"""Of a parameter in float32: itself, and the two moments of Adam."""
RANK_BYTES = STATE_BYTES + 4
"""What a rank on the CPU holds of it: its gradient too."""
MIB = 1 << 20


def too_small(job: api.DDPJob, parameters: int, gpus: int | None) -> str:
    """What is wrong with the memory limit of a job under ddprun whose model has so many parameters; empty: nothing that
    is certain. gpus: of a pod; None: not known."""
    limit, by = limits(job.spec.template).get("memory"), launcher.facts(job.spec).launcher
    if limit is None or by is None or by.launcher != "ddprun":
        return ""
    nproc = topology.nproc_per_node(job.spec)
    by_cadence = bool(gpus) or topology.world_size(job.spec) == 1
    areas = memory.AREAS if by_cadence else 1
    least = memory.needed(areas * memory.area_bytes(STATE_BYTES * parameters))
    least += nproc * RANK_BYTES * parameters if gpus == 0 else 0
    if quantity(limit) >= least:
        return ""
    copies = "two copies of its state" if by_cadence else "its state"
    ranks = f" beside {nproc} x {_mib(RANK_BYTES * parameters)} of the training itself" if gpus == 0 else ""
    return (
        f"{limit} is too small for {copies} in memory: {parameters:,} parameters with Adam in float32 take "
        f"{_mib(STATE_BYTES * parameters)}{ranks}; set it to {_mib(least)} or more, "
        "or a restart goes on from the folder"
    )


def _mib(size: int) -> str:
    return f"{-(-size // MIB)}Mi"
