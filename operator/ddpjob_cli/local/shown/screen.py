"""The screen of a local run. The nodes' output goes to stdout and everything else to stderr, so that pipes work."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from ddpjob_cli.describe.terminal import for_terminal
from ddpjob_cli.local.processes.cluster import LocalPod
from ddpjob_cli.local.shown import table
from ddpjob_cli.local.shown.usage import SeenUsage, Usages
from ddpjob_operator.failures.redaction import clean
from ddpjob_operator.job import api, reasons, wording
from ddpjob_operator.job.status import present_progress, ranks_since
from ddpjob_operator.plan.actions import Event

if TYPE_CHECKING:
    from rich.live import Live

PLAIN_SECONDS = 5.0  # seconds between two progress lines without a terminal
WAIT_SECONDS = 10.0  # seconds before the first line about a wait; doubled after each line
LIVE_SECONDS = 0.5  # seconds between two drawings of the table: 2 nodes cost 0.6 % of a CPU, 16 nodes 3 %
TICK_SECONDS = 1.0  # seconds after which the table is drawn again without a change, because it shows times
LINES_A_DRAWING = 200  # nobody can read more lines between two drawings; the log has all lines
_QUIET = (reasons.CREATING_PODS.name, reasons.STARTING_TRAINERS.name, reasons.QUEUE_NOT_SERVED.name)


class OutputClosedError(Exception):
    """The reader of stdout has closed it: `ddpjob run … | head`."""


class PlainScreen:
    """Shows plain lines: the nodes' output, events, progress; less if a debugger uses the terminal (is_quiet).
    spawns: the script starts the ranks itself."""

    def __init__(self, job: api.DDPJob, *, is_quiet: bool = False, spawns: bool = False) -> None:
        self.job = job
        self._spawns = spawns
        self.is_quiet = is_quiet
        self._next = 0.0
        self._drawn = api.Status()
        self._waiting: tuple[object, ...] = ()
        self._pause = WAIT_SECONDS
        self._is_advised = False
        self._bars: dict[str, str] = {}

    def note(self, text: str) -> None:
        """Show a sentence about the run, which may quote a program or a file."""
        with _whoever_reads():
            print(clean(text), file=sys.stderr, flush=True)

    def log(self, pod: LocalPod, lines: Sequence[str]) -> None:
        """Show lines that a node printed. Raise OutputClosedError if the reader of stdout has closed it."""
        if self.is_quiet:
            return
        prefix = self._prefix(pod)
        shown = for_terminal if sys.stdout.isatty() else str
        try:
            sys.stdout.write("".join(f"{prefix}{shown(line)}\n" for line in lines))
            sys.stdout.flush()
        except BrokenPipeError:
            # Redirect stdout: Python's flush at the exit would print a second error about the closed pipe.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            raise OutputClosedError from None
        except BlockingIOError:
            raise  # if the pipe has a reader again, Python writes the rest at the exit
        except OSError:
            _forget_unwritten()
            raise

    def _prefix(self, pod: LocalPod) -> str:
        """Return [node:rank] if the node has one rank, else [node], because the rank that printed is unknown."""
        rank = None if self._spawns else self.job.spec.rank_of_place(pod.place)
        return f"[{pod.place}] " if rank is None else f"[{pod.place}:{rank}] "

    def event(self, event: Event) -> None:
        """Show a change of state, unless it is instant in a local run or concerns only a cluster."""
        if event.reason not in _QUIET:
            mark = "! " if event.type == "Warning" else ""
            self.note(f"{mark}{event.message}")

    def draw(self, moment: table.RunMoment, pods: Sequence[LocalPod]) -> None:
        """Show the current state if it is time to draw."""
        status = moment.status
        wait = (status.state, status.attempt, status.reason) if present_progress(status) is None else ()
        if wait != self._waiting:
            self._waiting, self._pause = wait, WAIT_SECONDS
            self._next = time.monotonic() + (WAIT_SECONDS if wait else 0.0)
        if PlainScreen.due_in(self, status) == 0.0:
            self._drawn = status
            self._pause *= 2 if wait else 1
            self._next = time.monotonic() + (self._pause if wait else PLAIN_SECONDS)
            self.note(table.summary(moment))
            if (advice := table.hint(moment)) and not self._is_advised:
                self._is_advised = True
                self.note(advice)
            if wait:
                # Show changed progress bars here, because a bar ends its line only when it is complete.
                for pod in present_pods(pods):
                    if pod.live and (bar := pod.log.bar) and bar != self._bars.get(pod.name):
                        self._bars[pod.name] = bar
                        self.log(pod, [bar])

    def due_in(self, status: api.Status) -> float | None:
        """Return the seconds until draw() has something to show; None if it has nothing to show."""
        if self.is_quiet or status.state not in ("Starting", "Running"):
            return None
        if present_progress(status) is not None and status.progress == self._drawn.progress:
            return None
        return max(0.0, self._next - time.monotonic())

    @contextlib.contextmanager
    def nobody_types(self) -> Iterator[None]:
        """Within this `with` block, show the nodes' output even if a debugger uses the terminal."""
        before, self.is_quiet = self.is_quiet, False
        yield
        self.is_quiet = before

    def pause(self) -> None:
        """Tell the user how to continue, before Ctrl-Z stops this process."""
        self.note("stopped; the training continues until its output buffer is full: fg shows it again, bg lets it run")

    def close(self) -> None:
        pass


class LiveScreen(PlainScreen):
    """Shows a table at the bottom of the terminal, above which the nodes' lines scroll; plain lines if another
    process group has the terminal (`ddpjob run … &`). groups: our own process groups."""

    def __init__(self, job: api.DDPJob, groups: frozenset[int], *, spawns: bool = False) -> None:
        super().__init__(job, spawns=spawns)
        from rich.console import Console

        self._console = Console(stderr=True)
        self._live: Live | None = None
        """None while no table is shown."""
        self._groups = groups
        self._usages = Usages()
        self._pending: list[str] = []
        self._hidden = 0
        self._last = ""
        self._table_at = 0.0
        self._in_table = api.Status()

    def note(self, text: str) -> None:
        """Print a sentence above the table."""
        with _whoever_reads(), self._console:
            self._flush()
            self._console.print(clean(text), markup=False, highlight=False, soft_wrap=True)

    def log(self, pod: LocalPod, lines: Sequence[str]) -> None:
        """Keep lines that a node printed for the next drawing."""
        prefix = self._prefix(pod)
        room = LINES_A_DRAWING - len(self._pending)
        self._pending += [prefix + for_terminal(line) for line in lines[: max(0, room)]]
        if hidden := max(0, len(lines) - max(0, room)):
            self._hidden, self._last = self._hidden + hidden, str(pod.log.path)

    def draw(self, moment: table.RunMoment, pods: Sequence[LocalPod]) -> None:
        """Show the lines that came after the last drawing, and the table below them."""
        if self.due_in(moment.status) != 0.0:
            return
        self._in_table, self._table_at = moment.status, time.monotonic()
        if not has_terminal(self._groups):
            self._leave()
            super().draw(moment, pods)
            return
        from rich.live import Live

        present = present_pods(pods)
        self._usages.look({pod.node.pid: pod.gpus for pod in present if pod.live})
        nodes = [node_of(self.job, moment.status, pod, self._usages.seen.get(pod.node.pid)) for pod in present]
        nodes = [dataclasses.replace(node, ranks="") for node in nodes] if self._spawns else nodes
        with _whoever_reads(), self._console:  # the console buffers the output for a single write
            self._flush()
            if self._live is None:
                # No automatic refresh: its thread could draw after the shell has taken the terminal back.
                self._live = Live(console=self._console, auto_refresh=False, transient=True, vertical_overflow="crop")
                self._live.start()
            width, height = self._console.size
            self._live.update(table.view(moment, nodes, width - 1, height - 2), refresh=True)

    def due_in(self, status: api.Status) -> float | None:
        """Return the seconds until the table or the lines above it must be drawn."""
        new = status != self._in_table or self._pending or self._hidden
        return max(0.0, self._table_at + (LIVE_SECONDS if new else TICK_SECONDS) - time.monotonic())

    def pause(self) -> None:
        super().pause()
        self._leave()

    def close(self) -> None:
        self._leave()
        self._usages.close()

    def _leave(self) -> None:
        with _whoever_reads():
            self._flush()
            if self._live is not None:
                self._live.stop()
                self._live = None

    def _flush(self) -> None:
        from rich.text import Text

        if self._hidden:
            self._pending.append(f"… {wording.count(self._hidden, 'line')} more in {self._last}")
        if self._pending:
            # Print all at once, because each print redraws the table.
            self._console.print(Text.from_ansi("\n".join(self._pending)), soft_wrap=True)
        self._pending, self._hidden = [], 0


def has_terminal(groups: Collection[int]) -> bool:
    """True if one of these process groups is in the foreground of the terminal on stderr."""
    try:
        return os.tcgetpgrp(2) in groups
    except OSError:  # stderr is not our controlling terminal, so no process group of our session uses it
        return True


@contextlib.contextmanager
def _whoever_reads() -> Iterator[None]:
    """Ignore write errors, so that training continues without output. For example, Ctrl-C also ends the `tee` in
    `ddpjob run … 2>&1 | tee log`, but the nodes still need time to save."""
    try:
        yield
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # to /dev/null, or Python's flush at exit would fail


def _forget_unwritten() -> None:
    """Drop output that a full disk refused. Otherwise Python would flush it at the exit, fail, and exit with 120."""
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    sys.stdout.flush()
    os.dup2(kept, 1)
    os.close(kept)
    os.close(nowhere)


def screen(
    job: api.DDPJob, plain: bool, group: int | None = None, *, is_quiet: bool = False, spawns: bool = False
) -> PlainScreen:
    """Return a LiveScreen if stdout and stderr are terminals that can redraw lines, else a PlainScreen. group: process
    group in which the command was started, if this process has another. is_quiet: a debugger uses the terminal."""
    terminal = sys.stdout.isatty() and sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    if plain or is_quiet or not terminal:
        return PlainScreen(job, is_quiet=is_quiet, spawns=spawns)
    return LiveScreen(job, frozenset({os.getpgrp()} if group is None else {os.getpgrp(), group}), spawns=spawns)


def title(job: api.DDPJob, defaults: str, *, spawns: bool = False) -> str:
    """Return for example `digits · 2 nodes × 1 process · gloo`, followed by `defaults`."""
    processes = wording.count(job.spec.facts.nproc_per_node, "process")
    shape = f"{wording.count(job.spec.nodes, 'node')} × {'processes of the script' if spawns else processes}"
    return " · ".join(filter(None, (job.metadata.name, shape, job.spec.facts.backend, defaults)))


def present_pods(pods: Sequence[LocalPod]) -> list[LocalPod]:
    """Return the newest pod of each node in the newest attempt. All other pods have ended, or will end soon."""
    newest = max((pod.attempt for pod in pods), default=0)
    by_place: dict[int, LocalPod] = {}
    for pod in sorted(pods, key=lambda p: p.replacement):
        if pod.attempt == newest:
            by_place[pod.place] = pod
    return [by_place[place] for place in sorted(by_place)]


def node_of(job: api.DDPJob, status: api.Status, pod: LocalPod, seen: SeenUsage | None) -> table.NodeRow:
    """Return the table's row for a pod."""
    since = ranks_since(status)
    is_stale = since is not None and pod.step_at is not None and pod.step_at < since
    pids = seen.pids if seen is not None and seen.pids else (pod.pid,) if pod.pid else ()
    return table.NodeRow(
        place=pod.place,
        ranks=table.ranks_text(job, pod.place),
        state=_state(status, pod),
        step=pod.step if pod.live and not is_stale else None,
        pids=pids if pod.live else (),
        usage=seen.usage if seen is not None and pod.live else None,
    )


def _state(status: api.Status, pod: LocalPod) -> str:
    if pod.live:
        return "Stopping" if pod.deletion_requested_at else "Running" if pod.pid else "Starting"
    failure = status.last_failure
    if failure is not None and failure.pod == pod.name and not status.is_broken:
        # Show the rank's signal or exit code, because the launcher's exit code does not show how the rank failed.
        return f"Failed ({failure.signal or failure.exit_code or failure.reason})"
    if pod.trainer.exit_code == 0:
        return "Completed"
    return "Stopped" if pod.deletion_requested_at else f"Failed ({pod.trainer.exit_code})"
