"""Progress, metrics and restarts of a job as short texts."""

from __future__ import annotations

from ddpjob_cli.describe import figures
from ddpjob_operator.job import api, wording

_SHOWN_METRICS = ("loss", "accuracy", "params")
_MEMORY = "the memory "  # status.resumedFrom begins with this if the state came from the memory of pods


def step_parts(status: api.Status) -> list[str]:
    """Return for example `step 312/1125`, `28 %` and `24s left`, short enough for a narrow terminal."""
    progress = status.progress
    if progress is None:
        return []
    total = f"/{progress.total_steps}" if progress.total_steps else ""
    parts = [f"step {progress.step}{total}"]
    if progress.percent is not None:
        parts.append(f"{progress.percent} %")
    counts_down = status.display is None or status.display.eta  # the operator sets eta to "" while rank 0 is silent
    if progress.eta_seconds is not None and status.state == "Running" and counts_down:
        parts.append(f"{wording.duration(progress.eta_seconds)} left")
    return parts


def pace_parts(status: api.Status) -> list[str]:
    """Return speed and metrics, for example `5,210 samples/s` and `loss 0.412`."""
    progress = status.progress
    if progress is None:
        return []
    pace = [] if progress.samples_per_second is None else [f"{progress.samples_per_second:,.0f} samples/s"]
    return [*pace, *metric_parts(progress)]


def metric_parts(progress: api.Progress) -> list[str]:
    """Return up to four rounded metrics, common ones first. A loss is marked as rank 0's, because ranks differ."""
    order = [*(m for m in _SHOWN_METRICS if m in progress.metrics), *sorted(progress.metrics)]
    whose = " (rank 0)" if (progress.world_size or 1) > 1 else ""
    return [
        f"{name} {figures.metric(progress.metrics[name])}{whose if 'loss' in name.lower() else ''}"
        for name in dict.fromkeys(order)
    ][:4]


def resumed_parts(status: api.Status) -> list[str]:
    """Return for example `resumed at step 1125 from /ckpt`; [] if the ranks loaded no state."""
    if status.resumed_step is None:
        return []
    return [f"resumed at step {status.resumed_step}{f' from {status.resumed_from}' if status.resumed_from else ''}"]


def restart_parts(status: api.Status) -> list[str]:
    """Return `1 restart, 20 steps repeated`; `no step repeated` only after a restart from memory with the last step."""
    total = status.restarts.total if status.restarts else 0
    if not total:
        return []
    lost = status.goodput.lost_steps if status.goodput else 0
    none = ", no step repeated" if status.resumed_from.startswith(_MEMORY) else ""
    repeated = f", {wording.count(lost, 'step')} repeated" if lost else none
    return [f"{wording.count(total, 'restart')}{repeated}"]
