"""Make the table at the bottom of the terminal, as rich's Text, from a status and measurements. No I/O, no clock."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ddpjob_cli.describe import figures
from ddpjob_cli.describe.progress import metric_parts, step_parts
from ddpjob_cli.local.run_files.history import STEP_SECONDS, History
from ddpjob_cli.local.run_files.series import Series
from ddpjob_operator.failures.redaction import clean
from ddpjob_operator.job import api, wording
from ddpjob_operator.job.status import present_progress, ranks_since

NODES_MAX = 16
OTHER_ROWS = 5
"""Rows of a typical table besides those of the nodes."""
SPARK_WIDTH = 20
IMPORT_SECONDS = 60.0
"""After this time without a report, assume that a script has done its imports and reports no steps."""
NO_STEPS = "no step reported so far; ddpjob.progress(step=i) would show pace, time left and hangs"
RECENT_SECONDS = 20.0
TREND = 0.1
"""A change of the time per step is shown if it is at least this share."""


@dataclass(frozen=True)
class Usage:
    cpu_percent: float
    """100 is one core."""
    memory_bytes: int
    """Resident memory of all processes; shared memory is counted once for each."""
    gpu_percent: float | None = None
    """Mean of the node's GPUs; None if it has none."""
    gpu_bytes: int = 0


@dataclass(frozen=True)
class NodeRow:
    place: int
    ranks: str
    state: str
    step: int | None = None
    pids: tuple[int, ...] = ()
    """Pids of the ranks if known, else of the first process."""
    usage: Usage | None = None


@dataclass(frozen=True)
class RunMoment:
    """Everything that one drawing of the table needs, for example history and time."""

    job: api.DDPJob
    history: History
    started: dt.datetime
    now: dt.datetime
    initialized: dt.datetime | None = None
    """When a rank of this attempt that has made no step yet began to report; None if there is none."""
    reports: bool = True
    """True if the script may report steps."""

    @property
    def status(self) -> api.Status:
        return self.job.status


def view(moment: RunMoment, nodes: Sequence[NodeRow], width: int, height: int) -> Group:
    """Return the table for a terminal; rich wraps its lines."""
    status, progress = moment.status, present_progress(moment.status)
    rows: list[RenderableType] = [_head(moment)]
    if progress is not None:
        rows += [_line(text) for text in ["  ".join(_pace(moment))] if text]
        if progress.percent is not None:
            done = width * progress.percent // 100
            rows.append(Text.assemble(("━" * done, "green"), ("─" * (width - done), "dim")))
    if advice := hint(moment):
        rows.append(_line(advice, "dim"))
    if nodes:
        rows.append(_nodes(nodes, width, max(0, min(height - OTHER_ROWS, NODES_MAX + 1))))
    if status.save_failed:
        saved = status.progress.saved_step if status.progress is not None else None
        last = f"last saved at step {saved}" if saved else "nothing is saved"
        rows.append(_line(f"✖ {last}: {status.save_failed}", "red"))
    # Leave out the newest failure until its cause is settled: its rank may only have been stopped.
    for failure in (status.failures[:-1] if status.is_broken else status.failures)[-1:]:
        rows.append(_line(f"✖ attempt {failure.attempt}: {failure.message}", "red"))
    return Group(*rows)


def shown_state(moment: RunMoment) -> str:
    """Return the state. Until the first step, Starting replaces Running, unless the script seems to report no steps."""
    state = moment.status.state or "Pending"
    return "Starting" if state == "Running" and _waits_for_step(moment) and not _is_unreported(moment) else state


def activity(moment: RunMoment) -> str:
    """Return what the job waits for before its first step, such as `importing, 6s`; "" while the ranks are training."""
    status = moment.status
    since = ranks_since(status) if status.running_time is None else status.running_time
    if status.state != "Running":
        message = "" if status.state in ("Starting", None) else status.message
        what = message or "starting the nodes"
        return f"{what}, {_seconds(status.state_time, moment.now)}" if status.state != "Failing" else what
    if not _waits_for_step(moment):
        return ""
    if moment.initialized is not None:
        return f"waiting for the first step, {_seconds(moment.initialized, moment.now)}"
    if _is_unreported(moment):
        return ""
    later = [t for t in (since, ranks_since(status)) if t is not None]
    return f"importing, {_seconds(max(later, default=moment.started), moment.now)}"


def hint(moment: RunMoment) -> str:
    """Return advice if the script has reported no step within IMPORT_SECONDS; else ""."""
    late = _waits_for_step(moment) and _waited_seconds(moment) >= IMPORT_SECONDS
    return NO_STEPS if late and _is_unreported(moment) else ""


def summary(moment: RunMoment) -> str:
    """Return a plain line: Running step 312/1125 28 % 24s left 5,210 samples/s loss 0.412"""
    progress = present_progress(moment.status)
    if progress is None:
        doing = activity(moment) or f"elapsed {_seconds(moment.started, moment.now)}"
        return f"{shown_state(moment)}, attempt {moment.status.attempt}: {doing}"
    return "  ".join([shown_state(moment), *step_parts(moment.status), *_rate(moment), *metric_parts(progress)])


def trend(series: Series, since: float = 0.0) -> tuple[float, float | None] | None:
    """Return the recent seconds per step, and their change (0.12: 12 % longer); None if unknown. since: skip earlier
    points, in seconds from the start of the run."""
    points = [p for p in series.points if p.time > since]
    if not points:
        return None
    last = points[-1].time
    recent = [p.mean for p in points if p.time > last - RECENT_SECONDS][-40:]
    before = [p.mean for p in points if last - 6 * RECENT_SECONDS < p.time <= last - RECENT_SECONDS]
    now = sum(recent) / len(recent)
    if len(recent) < 3 or len(before) < 3:
        return now, None
    earlier = sum(before) / len(before)
    return now, now / earlier - 1 if earlier else None


def ranks_text(job: api.DDPJob, place: int) -> str:
    """Return for example `rank 1` or `ranks 2-3`; `2 of 4 ranks` if the rendezvous assigns the ranks."""
    nproc = job.spec.facts.nproc_per_node
    own = job.spec.members.ranks(place, nproc)
    if not job.spec.facts.ranks_follow_nodes:
        return f"{nproc} of {job.spec.world_size} ranks"
    return f"rank {own[0]}" if nproc == 1 else f"ranks {own[0]}-{own[-1]}"


def _waits_for_step(moment: RunMoment) -> bool:
    return moment.status.state == "Running" and present_progress(moment.status) is None


def _is_unreported(moment: RunMoment) -> bool:
    silent = moment.initialized is None and moment.status.furthest_step is None and moment.status.progress is None
    return silent and (not moment.reports or _waited_seconds(moment) >= IMPORT_SECONDS)


def _waited_seconds(moment: RunMoment) -> float:
    since = moment.status.running_time or moment.status.state_time or moment.started
    return (moment.now - since).total_seconds()


def _seconds(since: dt.datetime | None, now: dt.datetime) -> str:
    return wording.duration(0 if since is None else (now - since).total_seconds())


def _head(moment: RunMoment) -> Text:
    status, state = moment.status, shown_state(moment)
    style = {"Running": "bold green", "Failing": "bold red", "Failed": "bold red"}.get(state, "bold yellow")
    doing, attempt = activity(moment), f"attempt {status.attempt}"
    parts = [f"{attempt}: {doing}"] if doing else [*step_parts(status), attempt]
    if status.restarts and status.restarts.total:
        parts.append(wording.count(status.restarts.total, "restart"))
    head = _line("  ".join([state, *parts, f"elapsed {_seconds(moment.started, moment.now)}"]))
    head.stylize(style, 0, len(state))
    return head


def _pace(moment: RunMoment) -> list[str]:
    """Return the training speed, and the metrics, with a curve for the loss."""
    series = moment.history.series
    curve = next((name for name in ("loss", *sorted(series)) if "loss" in name.lower() and name in series), None)
    metrics = metric_parts(moment.status.progress) if moment.status.progress else []
    for i, text in enumerate(metrics):
        if curve is not None and text.startswith(f"{curve} "):
            metrics[i] += f" {figures.spark([point.mean for point in series[curve].points], SPARK_WIDTH)}".rstrip()
    return [*_rate(moment), *metrics]


def _rate(moment: RunMoment) -> list[str]:
    """Return for example `210 ms/step, 12 % slower` and `5,210 samples/s`."""
    parts, since = [], ranks_since(moment.status)
    begun = 0.0 if since is None else (since - moment.started).total_seconds()
    series = moment.history.series.get(STEP_SECONDS, Series())
    step = moment.status.progress.step if moment.status.progress else 0
    was_restarted = bool(series.points) and step < series.points[-1].step  # the failure may be reported later
    if not was_restarted and (found := trend(series, begun)):
        seconds, change = found
        word = "" if change is None or abs(change) < TREND else f", {abs(change):.0%}".replace("%", " % ")
        parts.append(figures.step_time(seconds) + word + ("slower" if (change or 0) > 0 else "faster") * bool(word))
    rate = moment.status.progress.samples_per_second if moment.status.progress else None
    return parts if rate is None else [*parts, f"{rate:,.0f} samples/s"]


def _nodes(nodes: Sequence[NodeRow], width: int, room: int) -> RenderableType:
    """Return a row per node. Columns on the right, and the last nodes, are left out if there is no room."""
    shown = list(nodes) if len(nodes) <= room else list(nodes)[: max(0, room - 1)]
    columns = [column for column in zip(*map(_cells, shown), strict=True) if any(column)]
    while len(columns) > 2 and sum(max(map(cell_len, column)) + 2 for column in columns) > width:
        columns.pop()
    grid = Table.grid(padding=(0, 2, 0, 0))
    for _ in columns:
        grid.add_column(no_wrap=True)
    for row in zip(*columns, strict=True):
        grid.add_row(*map(_line, row))
    left_out = len(nodes) - len(shown)
    return Group(grid, _line(f"  and {left_out} nodes more", "dim")) if left_out else grid


def _cells(node: NodeRow) -> list[str]:
    """Return cells by importance: node 1 | rank 1 | Running | step 312 | pid 4313 | CPU 98 % | 1.2 GB | GPU 87 %."""
    pids = " ".join(map(str, node.pids[:2])) + (" …" if len(node.pids) > 2 else "")
    cells = [
        f"  node {node.place}",
        node.ranks,
        node.state,
        "" if node.step is None else f"step {node.step}",
        f"pid{'s' * (len(node.pids) > 1)} {pids}" if node.pids else "",
    ]
    if (use := node.usage) is None:
        return [*cells, "", "", ""]
    gpu = "" if use.gpu_percent is None else f"GPU {use.gpu_percent:3.0f} % {figures.size(use.gpu_bytes)}"
    return [*cells, f"CPU {use.cpu_percent:3.0f} %", f"{figures.size(use.memory_bytes):>6}", gpu]


def _line(text: str, style: str = "") -> Text:
    """Return text without control characters. The text wraps, even if the rows around it do not."""
    return Text(" ".join(clean(text).splitlines()), style, no_wrap=False, overflow="fold")
