"""What stands at the bottom of the terminal during a local run: a status and what was measured in, lines out.

Pure: no clock, no terminal. A line is a list of spans, text with a style; none is longer than the width.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, chop_cells, set_cell_size

from ddpjob_cli.describe import figures
from ddpjob_cli.describe.progress import metric_parts, step_parts
from ddpjob_cli.local.kept.history import STEP_SECONDS, History
from ddpjob_cli.local.kept.series import Series
from ddpjob_operator.failures.redaction import clean
from ddpjob_operator.job import api, topology, wording
from ddpjob_operator.job.status import present_progress, ranks_since

Span = tuple[str, str]
Line = list[Span]
NODES_MAX = 16
FAILURE_ROWS = 4
SPARK_WIDTH = 20
IMPORT_SECONDS = 60.0
"""After that long without a report a script is taken for one that reports no steps, and not for one that imports."""
NO_STEPS = "no step reported so far; ddpjob.progress(step=i) would show pace, time left and hangs"
RECENT_SECONDS = 20.0
TREND = 0.1
"""A step that takes so much longer, or shorter, than before is worth a word."""


@dataclass(frozen=True)
class Usage:
    """What the processes of a node use."""

    cpu_percent: float
    """100 is one core."""
    memory_bytes: int
    """Resident; what processes share is counted for each."""
    gpu_percent: float | None = None
    """The mean of its GPUs; None where it has none."""
    gpu_bytes: int = 0


@dataclass(frozen=True)
class NodeRow:
    """A node in the present attempt."""

    place: int
    ranks: str
    state: str
    step: int | None = None
    pids: tuple[int, ...] = ()
    """Of the ranks where they are known, else of the first process."""
    usage: Usage | None = None


@dataclass(frozen=True)
class RunMoment:
    """A run at a time."""

    job: api.DDPJob
    status: api.Status
    history: History
    started: dt.datetime
    now: dt.datetime
    initialized: dt.datetime | None = None
    """Since when the ranks of the present attempt report without a step; None while none does."""
    reports: bool = True
    """True if the script may report steps."""


def lines(moment: RunMoment, nodes: Sequence[NodeRow], width: int, height: int) -> list[Line]:
    """The table, at most `height` lines of at most `width` columns."""
    width = max(1, width)
    rows = [*_flow(_head(moment), width, 2)]
    if figures_ := _pace(moment):
        rows += _flow(figures_, width, 2)
    progress = present_progress(moment.status)
    if progress is not None and progress.percent is not None:
        done = width * progress.percent // 100
        rows.append([("━" * done, "green"), ("─" * (width - done), "dim")])
    if advice := hint(moment):
        rows.append([(_cut(advice, width), "dim")])
    failure = [*_save_failed(moment.status, width), *_failure(moment.status, width)]
    room = max(0, height - len(rows) - len(failure))
    return [*rows, *_nodes(nodes, width, min(room, NODES_MAX + 1)), *failure][: max(1, height)]


def shown_state(moment: RunMoment) -> str:
    """The state; Starting until the ranks make a step, where they are known to report steps, or only just began."""
    state = moment.status.state or "Pending"
    return "Starting" if state == "Running" and _waits_for_step(moment) and not _is_unreported(moment) else state


def activity(moment: RunMoment) -> str:
    """What is waited for and since when, before the first step: importing, 6s; empty while the ranks train."""
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
    """Return what a script that reports no steps lacks, once it has had time to; "" before, and if it reports them."""
    late = _waits_for_step(moment) and _waited_seconds(moment) >= IMPORT_SECONDS
    return NO_STEPS if late and _is_unreported(moment) else ""


def summary(moment: RunMoment) -> str:
    """The state in one plain line: Running  step 312/1125  28 %  24s left  5,210 samples/s  loss 0.412"""
    if present_progress(moment.status) is None:
        doing = activity(moment) or f"elapsed {_seconds(moment.started, moment.now)}"
        return f"{shown_state(moment)}, attempt {moment.status.attempt}: {doing}"
    return "  ".join([shown_state(moment), *step_parts(moment.status), *_rate(moment), *_metrics(moment)])


def trend(series: Series, since: float = 0.0) -> tuple[float, float | None] | None:
    """Return the seconds of a step of late, and how much longer (0.12) it takes than before; None if it is not known.

    since: seconds since the run began; earlier points are those of ranks that have ended.
    """
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
    """rank 1, ranks 2-3; the number of them where the rendezvous decides which."""
    nproc = topology.nproc_per_node(job.spec)
    own = topology.members(job.spec).ranks(place, nproc)
    if not topology.ranks_follow_nodes(job.spec):
        return f"{nproc} of {topology.world_size(job.spec)} ranks"
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


def _head(moment: RunMoment) -> Line:
    status, state = moment.status, shown_state(moment)
    style = {"Running": "bold green", "Failing": "bold red", "Failed": "bold red"}.get(state, "bold yellow")
    elapsed = f"elapsed {_seconds(moment.started, moment.now)}"
    restarts = status.restarts.total if status.restarts else 0
    of_run = [*([wording.count(restarts, "restart")] if restarts else []), elapsed]
    doing = activity(moment)
    if doing:
        return _plain([f"attempt {status.attempt}: {doing}", *of_run], (state, style))
    return _plain([*step_parts(status), f"attempt {status.attempt}", *of_run], (state, style))


def _pace(moment: RunMoment) -> Line:
    if present_progress(moment.status) is None:
        return []
    parts = _plain(_rate(moment))
    curve = next((n for n in ("loss", *sorted(moment.history.series)) if _is_loss(n, moment.history)), None)
    for text in _metrics(moment):
        parts.append((text, ""))
        if curve is not None and text.startswith(f"{curve} "):
            values = [point.mean for point in moment.history.series[curve].points]
            parts[-1] = (f"{text} {figures.spark(values, SPARK_WIDTH)}".rstrip(), "")
    return parts


def _rate(moment: RunMoment) -> list[str]:
    """210 ms/step, 12 % slower; 5,210 samples/s"""
    parts, since = [], ranks_since(moment.status)
    begun = 0.0 if since is None else (since - moment.started).total_seconds()
    if found := trend(moment.history.series.get(STEP_SECONDS, Series()), begun):
        seconds, change = found
        word = "" if change is None or abs(change) < TREND else f", {_change(change)}"
        parts.append(figures.step_time(seconds) + word)
    rate = moment.status.progress.samples_per_second if moment.status.progress else None
    return parts if rate is None else [*parts, f"{rate:,.0f} samples/s"]


def _change(change: float) -> str:
    return f"{abs(change):.0%} {'slower' if change > 0 else 'faster'}".replace("%", " %")


def _metrics(moment: RunMoment) -> list[str]:
    return metric_parts(moment.status.progress) if moment.status.progress else []


def _is_loss(name: str, history: History) -> bool:
    return "loss" in name.lower() and name in history.series


def _failure(status: api.Status, width: int) -> list[Line]:
    """The last failure, which stays until the end."""
    if not status.failures:
        return []
    last = status.failures[-1]
    return _wrapped(f"✖ attempt {last.attempt}: {last.message}", width)


def _save_failed(status: api.Status, width: int) -> list[Line]:
    """That saves fail, with the step from which a restart would go on."""
    if not status.save_failed:
        return []
    saved = status.progress.saved_step if status.progress is not None else None
    last = f"last saved at step {saved}" if saved else "nothing is saved"
    return _wrapped(f"✖ {last}: {status.save_failed}", width)


def _nodes(nodes: Sequence[NodeRow], width: int, room: int) -> list[Line]:
    """A line for each node, in columns; those on the right are left out where there is no room for them."""
    shown = list(nodes) if len(nodes) <= room else list(nodes)[: max(0, room - 1)]
    cells = [_cells(node) for node in shown]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    while len([w for w in widths if w]) > 2 and sum(w + 2 for w in widths if w) > width:
        widths.pop()
    rows: list[Line] = []
    for row in cells:
        texts = (cell.ljust(size) for cell, size in zip(row, widths, strict=False) if size)
        rows.append([(_cut("  ".join(["", *texts]).rstrip(), width), "")])
    if len(shown) < len(nodes) and room:
        rows.append([(_cut(f"  and {len(nodes) - len(shown)} nodes more", width), "dim")])
    return rows


def _cells(node: NodeRow) -> list[str]:
    """node 1 | rank 1 | Running | step 312 | pid 4313 | CPU 98 % | 1.2 GB | GPU 87 % 12 GB, by what matters most."""
    pids = " ".join(map(str, node.pids[:2])) + (" …" if len(node.pids) > 2 else "")
    use = node.usage
    gpu = (
        "" if use is None or use.gpu_percent is None else f"GPU {use.gpu_percent:3.0f} % {figures.size(use.gpu_bytes)}"
    )
    return [
        f"node {node.place}",
        node.ranks,
        node.state,
        "" if node.step is None else f"step {node.step}",
        f"pid{'s' * (len(node.pids) > 1)} {pids}" if node.pids else "",
        "" if use is None else f"CPU {use.cpu_percent:3.0f} %",
        "" if use is None else f"{figures.size(use.memory_bytes):>6}",
        gpu,
    ]


def _plain(texts: Iterable[str], *first: Span) -> Line:
    return [*first, *((text, "") for text in texts)]


def _flow(parts: Line, width: int, rows_max: int) -> list[Line]:
    """Parts in lines, two spaces between them; a part is cut only where it does not fit into a line of its own."""
    rows: list[Line] = [[]]
    used = 0
    for text, style in parts:
        text = _cut(_one_line(text), width)
        gap = 2 if rows[-1] else 0
        if used + gap + cell_len(text) > width:
            if len(rows) == rows_max:
                break
            rows.append([])
            used = gap = 0
        rows[-1] += [("  ", "")] * bool(gap) + [(text, style)]
        used += gap + cell_len(text)
    return rows


def _wrapped(text: str, width: int) -> list[Line]:
    """What went wrong, in at most FAILURE_ROWS lines: its cause stands at the end."""
    rows, rest = list[str](), _one_line(text)
    while cell_len(rest) > width and len(rows) < FAILURE_ROWS - 1:
        row = chop_cells(rest, width)[0]
        row = row.rpartition(" ")[0] or row
        rows.append(row)
        rest = rest[len(row) :].lstrip()
    return [[(row, "red")] for row in (*rows, _cut(rest, width))]


def _one_line(text: str) -> str:
    return " ".join(clean(text).split())


def _cut(text: str, width: int) -> str:
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, width - 1).rstrip() + "…" if width > 1 else "…"
