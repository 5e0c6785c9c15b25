"""The screen of a local run: a live table on a terminal, plain lines elsewhere.

The nodes' output goes to stdout and everything else to stderr, so that a pipe gets only what the training printed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddpjob_operator.describe.progress import pace_parts, step_parts
from ddpjob_operator.failures.redaction import clean
from ddpjob_operator.job import api, reasons, topology, wording
from ddpjob_operator.local.cluster import LocalPod
from ddpjob_operator.plan.actions import Event

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

PLAIN_SECONDS = 5.0  # between two progress lines where there is no terminal
LIVE_SECONDS = 0.5  # between two drawings of the table: what a person can follow, at under 1 % of a CPU
LINES_A_DRAWING = 200  # more lines than that between two drawings cannot be read on a terminal; the file has them
_QUIET = (reasons.CREATING_PODS.name, reasons.STARTING_TRAINERS.name)


class OutputClosedError(Exception):
    """The reader of stdout has closed it: `ddpjob run … | head`."""


class PlainScreen:
    """Lines: the nodes' output with their prefix, events as they come, progress now and then."""

    def __init__(self, job: api.DDPJob) -> None:
        self.job = job
        self._next = 0.0
        self._drawn = api.Status()

    def start(self) -> None:
        """Show the title."""
        self.note(title(self.job))

    def note(self, text: str) -> None:
        """Show a sentence about the run, which may quote a program or a file."""
        print(clean(text), file=sys.stderr, flush=True)

    def log(self, pod: LocalPod, lines: Sequence[str]) -> None:
        """Show lines that a node printed. Raises OutputClosedError when the reader is gone."""
        prefix = prefix_of(self.job, pod)
        try:
            sys.stdout.write("".join(f"{prefix}{line}\n" for line in lines))
            sys.stdout.flush()
        except BrokenPipeError:
            # Python flushes stdout once more when it exits; that would end in a second message about the same pipe.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            raise OutputClosedError from None

    def event(self, event: Event) -> None:
        """Show a change of state, except for steps that take no time locally."""
        if event.reason not in _QUIET:
            mark = "! " if event.type == "Warning" else ""
            self.note(f"{mark}{event.reason}: {event.message}")

    def draw(self, status: api.Status, pods: Sequence[LocalPod]) -> None:
        """Show the present state, if it is due."""
        if self.due_in(status) == 0.0:
            self._drawn, self._next = status, time.monotonic() + PLAIN_SECONDS
            self.note(progress_line(status))

    def due_in(self, status: api.Status) -> float | None:
        """Seconds until draw() has something to show, 0.0 for now; None while it has nothing."""
        if status.state != "Running" or status.progress is None or status.progress == self._drawn.progress:
            return None
        return max(0.0, self._next - time.monotonic())

    def close(self) -> None:
        """Nothing to give back."""


class LiveScreen(PlainScreen):
    """A table at the bottom of the terminal, redrawn in place; the nodes' lines scroll above it."""

    def __init__(self, job: api.DDPJob) -> None:
        super().__init__(job)
        from rich.console import Console
        from rich.live import Live

        self._console = Console(stderr=True)
        self._live: Live = Live(console=self._console, auto_refresh=False, transient=True, vertical_overflow="crop")
        self._pending: list[str] = []
        self._hidden = 0
        self._last = ""

    def start(self) -> None:
        """Show the title and the table."""
        self.note(title(self.job))
        self._live.start()

    def note(self, text: str) -> None:
        """Show a sentence above the table."""
        self._flush()
        self._console.print(clean(text), markup=False, highlight=False, soft_wrap=True)

    def log(self, pod: LocalPod, lines: Sequence[str]) -> None:
        """Take lines that a node printed; the next drawing shows them."""
        prefix = prefix_of(self.job, pod)
        room = LINES_A_DRAWING - len(self._pending)
        self._pending += [prefix + line for line in lines[: max(0, room)]]
        if hidden := max(0, len(lines) - max(0, room)):
            self._hidden, self._last = self._hidden + hidden, str(pod.log.path)

    def draw(self, status: api.Status, pods: Sequence[LocalPod]) -> None:
        """Show what came since the last drawing, and the table below it."""
        if self.due_in(status) == 0.0:
            self._drawn, self._next = status, time.monotonic() + LIVE_SECONDS
            self._flush()
            self._live.update(table(self.job, status, pods, self._console.width), refresh=True)

    def due_in(self, status: api.Status) -> float | None:
        """Seconds until the table or the lines above it are to be drawn again."""
        if status == self._drawn and not self._pending and not self._hidden:
            return None
        return max(0.0, self._next - time.monotonic())

    def close(self) -> None:
        """Remove the table."""
        self._flush()
        self._live.stop()

    def _flush(self) -> None:
        from rich.text import Text

        if self._hidden:
            self._pending.append(f"… {self._hidden:,} lines more in {self._last}")
        if self._pending:
            # One print for all: each costs a redraw of the table.
            self._console.print(Text.from_ansi("\n".join(self._pending)), soft_wrap=True)
        self._pending, self._hidden = [], 0


def screen(job: api.DDPJob, plain: bool) -> PlainScreen:
    """The table where both stdout and stderr are a terminal that can redraw lines, else plain lines."""
    terminal = sys.stdout.isatty() and sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    return PlainScreen(job) if plain or not terminal else LiveScreen(job)


def title(job: api.DDPJob) -> str:
    """digits · 2 nodes × 1 process · gloo"""
    nodes = wording.count(job.spec.nodes, "node")
    processes = wording.count(topology.nproc_per_node(job.spec), "process")
    return f"{job.metadata.name} · {nodes} × {processes} · {topology.backend(job.spec)}"


def prefix_of(job: api.DDPJob, pod: LocalPod) -> str:
    """[node:rank] where the node is one rank, else [node]: which of its processes printed a line is not known."""
    rank = topology.rank_of_place(job.spec, pod.place)
    return f"[{pod.place}] " if rank is None else f"[{pod.place}:{rank}] "


def progress_line(status: api.Status) -> str:
    """Running  step 312/1125  28 %  24s left  5,210 samples/s  loss 0.412"""
    parts = [status.state or "", *step_parts(status), *pace_parts(status)]
    return "  ".join(part for part in parts if part)


def table(job: api.DDPJob, status: api.Status, pods: Sequence[LocalPod], width: int) -> RenderableType:
    """State, progress bar and figures, then a line for each node; cut to the width, never wrapped."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    styles = {"Running": "green", "Failing": "red", "Failed": "red", "Succeeded": "green"}
    style = styles.get(status.state or "", "yellow")
    head = Text(no_wrap=True, overflow="ellipsis")
    head.append(f"{status.state or 'Pending'}", style=f"bold {style}")
    head.append("  " + ("  ".join(step_parts(status)) or status.message))
    rows: list[RenderableType] = [head]
    if pace := "  ".join(pace_parts(status)):
        rows.append(Text(pace, no_wrap=True, overflow="ellipsis"))
    if status.progress is not None and status.progress.percent is not None:
        bar = Table.grid()  # a bar by itself does not end its line
        bar.add_row(ProgressBar(total=100, completed=status.progress.percent, width=min(60, width)))
        rows.append(bar)
    cells = [node_cells(job, pod) for pod in sorted(pods, key=lambda p: p.place)[:16]]
    # Aligned by hand: a grid would cut every cell of a narrow terminal a little, and none could be read.
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width)
        rows.append(Text(line.rstrip(), no_wrap=True, overflow="ellipsis"))
    if len(pods) > 16:
        rows.append(Text(f"  and {len(pods) - 16} nodes more"))
    return Group(*rows)


def node_cells(job: api.DDPJob, pod: LocalPod) -> list[str]:
    """node 1 | rank 1 | Running | step 312 | pid 4313; the step where the node reports"""
    nproc = topology.nproc_per_node(job.spec)
    own = topology.members(job.spec).ranks(pod.place, nproc)
    ranks = f"rank {own[0]}" if nproc == 1 else f"ranks {own[0]}-{own[-1]}"
    if not topology.ranks_follow_nodes(job.spec):
        ranks = f"{nproc} of {topology.world_size(job.spec)} ranks"
    state = {"waiting": "Starting", "running": "Running"}.get(pod.trainer.state)
    if state is None:
        state = "Completed" if pod.trainer.exit_code == 0 else f"Failed ({pod.trainer.exit_code})"
    if pod.deletion_requested_at and pod.live:
        state = "Stopping"
    step = "" if pod.step is None else f"step {pod.step}"
    return [f"  node {pod.place}", ranks, state, step, f"pid {pod.pid}" if pod.pid else ""]
