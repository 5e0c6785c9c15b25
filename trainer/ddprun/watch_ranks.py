"""The watchdog of one node: reads the heartbeats of its ranks, reports their progress, and requests their positions.

It reads once a second, from the first heartbeat on. `core/stall_monitor.py` evaluates this node, and node 0 decides for
all nodes (`core/stall_rules.py`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ddpjob import threads
from ddpjob_core.heartbeat import LOUD, QUIET
from ddprun import processes
from ddprun.core import deadlock, idle, stall_monitor
from ddprun.core.deadlock import Position
from ddprun.core.stall_monitor import Heartbeat, HeartbeatTracker, StallReport
from ddprun.heartbeats import Heartbeats
from ddprun.node import say
from ddprun.stacks import StacksQuestion, write_stacks

if TYPE_CHECKING:
    from ddprun.agent import Agent

SIGNAL_SECONDS = 0.6  # seconds to answer; then the rank gets a signal whose handler works without the GIL
ANSWER_SECONDS = 1.0
QUIET_SECONDS = 1.5  # seconds to answer if stacks are not logged; torch's flight recorder is read for up to 0.5 s
IDLE_MAX = 0.01  # share of a CPU; the watchdog's own thread uses a tenth of that
SIGNAL_PAUSE_SECONDS = 0.02  # seconds between signals to two ranks, because their stacks go to one console


class Watching:
    """Watches one generation at a time."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.timeout = agent.options.stall_seconds
        self._beats: Heartbeats | None = None
        self._paces: dict[int, HeartbeatTracker] = {}
        self._reported: StallReport | None = None
        self._over = False  # True if all ranks of another node have ended with 0
        self._cpu: dict[int, tuple[float, float]] = {}  # by rank: when its stall began, and its CPU seconds by then
        self._still: dict[
            int, tuple[str, float]
        ] = {}  # by rank: context switch counts, and the time of their last change
        self._quiet = False  # True if the ranks must not log their answers to the last request
        self._looked_at = 0.0
        self._look_at: float | None = None  # None: there is no heartbeat yet
        self._signals: list[int] = []  # ranks that get a signal if they do not answer within SIGNAL_SECONDS
        self._signal_at: float | None = None
        self._answer_at: float | None = None
        self._stacks = StacksQuestion(agent)
        self._idle = idle.IdleClock()
        self._idle_at: float | None = None

    @property
    def deadline(self) -> float | None:
        """Time of the next call of `tick`; None if none is due."""
        times = (self._look_at, self._signal_at, self._answer_at, self._idle_at, self._stacks.deadline)
        return min((at for at in times if at is not None), default=None)

    def begin(self, beats: Heartbeats) -> None:
        """Forget the last generation, and watch the heartbeats of a new one."""
        self._beats = beats
        self._paces, self._reported, self._over, self._cpu, self._still = {}, None, False, {}, {}
        self._idle = idle.IdleClock()
        self._idle_at = None if self.timeout == 0 else time.monotonic()
        self._agent.watch(beats.notify_read, self._read_notification)

    def end(self) -> None:
        """Stop watching, because the ranks have ended or will be ended."""
        if self._beats is not None:
            self._agent.unwatch(self._beats.notify_read)
        self._stacks.end()
        self._beats = self._look_at = self._signal_at = self._answer_at = self._idle_at = None

    def tick(self, now: float) -> None:
        if self._look_at is not None and now >= self._look_at:
            self._look(now)
        if self._signal_at is not None and now >= self._signal_at:
            self._signal_next(now)
        if self._answer_at is not None and now >= self._answer_at:
            self._answer(now)
        if self._idle_at is not None and now >= self._idle_at:
            self._look_for_idle(now)
        self._stacks.tick(now, is_free=self._answer_at is None)

    def ask_stacks(self, now: float) -> None:
        """Print the folded stacks of this node's ranks."""
        self._stacks.ask(self._beats, now)

    def _look_for_idle(self, now: float) -> None:
        assert self._beats is not None, "only beats are looked at"
        node, options = self._agent.node, self._agent.options
        self._idle_at = now + idle.LOOK_SECONDS
        beats = {rank: self._beats.of(rank) for rank in node.running_ranks}
        is_paused = any(beat.phase in ("save", "evaluate") for beat in beats.values())
        parent_of = processes.parents() if beats and not is_paused else {}
        cpu = {rank: cpu_seconds(node.pid(rank), parent_of) for rank in beats if not is_paused}
        found = self._idle.look(now, cpu, self._mark(beats))
        if found:
            name = self._agent.environ.get("DDPJOB_NAME")
            whose = f" of node {options.place}" if options.nodes > 1 else ""
            how = f"ddpjob stacks {name}" if name else f"kill -QUIT {os.getpid()}"
            say(idle.sentence(found, self._idle.seconds, whose, how))

    def _mark(self, beats: Mapping[int, Heartbeat]) -> tuple[tuple[int, int], ...] | None:
        """Return the ranks' progress once all have made several steps; None before, because first steps are long."""
        paces = self._paces.values()
        enough = all(pace.phase == "train" and pace.moves >= stall_monitor.LOOKS_UNTIL_TRAINING for pace in paces)
        if not paces or not enough or any(beat.over for beat in beats.values()):
            return None
        return tuple((beat.step, beat.collectives) for _, beat in sorted(beats.items()))

    def others_have_ended(self) -> None:
        """Record that all ranks of a node have ended with 0, so ranks here do not wait for others any more."""
        self._over = True

    def ask(self, now: float, *, quiet: bool = False) -> None:
        """Request stacks and last collectives. Every rank writes them to its log; its answer goes to node 0.

        quiet: ranks log nothing, and answer only in which collective they wait.
        """
        if self._beats is None:
            return
        self._beats.ask(kind=QUIET if quiet else LOUD)
        self._quiet, self._signal_at, self._answer_at = quiet, None, now + QUIET_SECONDS
        if not quiet:
            self._signals = sorted(self._agent.node.running_ranks)
            self._signal_at, self._answer_at = now + SIGNAL_SECONDS, now + ANSWER_SECONDS

    def _read_notification(self) -> None:
        assert self._beats is not None, "only an open pipe is read"
        if not self._beats.announced:
            return
        if self._look_at is None and self.timeout != 0:
            self._looked_at = self._look_at = time.monotonic()

    def _look(self, now: float) -> None:
        assert self._beats is not None, "only beats are looked at"
        over = self._over or self._agent.node.ended_well is not None
        found = {rank: self._beats.of(rank) for rank in self._agent.node.running_ranks}
        beats = {rank: beat._replace(over=beat.over or over) for rank, beat in found.items()}
        # Check the training process, because a rank that is a shell script outlives its Python process.
        seen = {rank: beat for rank, beat in beats.items() if beat.pid > 0 and os.path.exists(f"/proc/{beat.pid}")}
        # Clocks start again after a gap, or if a rank has ended: the others may now wait for something else.
        if now - self._looked_at > stall_monitor.GAP_SECONDS or self._paces.keys() - seen.keys():
            self._paces = stall_monitor.restart_clocks(self._paces, now)
            self._still = {}
        self._looked_at, self._look_at = now, now + stall_monitor.LOOK_SECONDS
        folded = {rank: stall_monitor.update(self._paces.get(rank), beat, now) for rank, beat in seen.items()}
        self._paces = {rank: pace for rank, pace in folded.items() if pace is not None}
        self._note_cpu(beats)
        report = self._report(beats, now)
        if self._reported is None or _news(report) != _news(self._reported):
            self._reported = report
            self._agent.group.stood(report, now)

    def _report(self, beats: Mapping[int, Heartbeat], now: float) -> StallReport:
        runs = {rank: threads.times_run(beat.pid) for rank, beat in beats.items()}
        self._still = {
            rank: known if (known := self._still.get(rank)) is not None and known[0] == times else (times, now)
            for rank, times in runs.items()
            if times
        }
        enough = all(now - since >= stall_monitor.STILL_SECONDS for _, since in self._still.values())
        still = enough and bool(runs) and self._still.keys() == runs.keys()
        return stall_monitor.stall_report(self._paces, self.timeout, now)._replace(still=still)

    def _note_cpu(self, beats: Mapping[int, Heartbeat]) -> None:
        """Record the CPU seconds of ranks at the start of a stall, if they will be needed."""
        self._cpu = {
            rank: known
            if (known := self._cpu.get(rank)) is not None and known[0] == pace.advanced_at
            else (pace.advanced_at, cpu_seconds(beats[rank].pid))
            for rank, pace in self._paces.items()
            if beats[rank].over
        }

    def _is_idle(self, local_rank: int, now: float) -> bool:
        known = self._cpu.get(local_rank)
        if known is None or self._beats is None:
            return False
        since, before = known
        return cpu_seconds(self._beats.of(local_rank).pid) - before < IDLE_MAX * (now - since)

    def _signal_next(self, now: float) -> None:
        assert self._beats is not None, "only ranks that may beat are asked"
        self._signal_at = None
        while self._signals:
            rank = self._signals.pop(0)
            if self._beats.answer(rank) is None and write_stacks(self._beats.of(rank).pid):
                self._signal_at = now + SIGNAL_PAUSE_SECONDS
                return

    def _answer(self, now: float) -> None:
        assert self._beats is not None, "only ranks that may beat are asked"
        self._answer_at = self._signal_at = None
        self._look(now)  # look again, because ranks may have made progress after the request
        if self._beats is None:
            return None  # the connection to node 0 was lost meanwhile
        running = sorted(self._agent.node.running_ranks)
        if self._quiet:
            assert self._reported is not None, "it was looked at just now"
            return self._agent.group.answered(self._reported, [*map(self._waiting, running), *self._ended()], now)
        # Ranks without heartbeats cannot answer; they are not to blame if other ranks have heartbeats.
        beating = [rank for rank in running if self._beats.of(rank).pid]
        positions = [self._position(rank)._replace(idle=self._is_idle(rank, now)) for rank in beating or running]
        report = stall_monitor.stall_report(self._paces, self.timeout, now)
        self._paces, self._reported = stall_monitor.restart_clocks(self._paces, now), report._replace(stalled=False)
        return self._agent.group.answered(report, positions, now)

    def _waiting(self, local_rank: int) -> Position:
        """Return in which collective a rank waits; unknown if it has run after the request, or has not answered."""
        assert self._beats is not None, "a rank that runs has a page"
        rank, step, answer = self._agent.node.rank(local_rank), self._beats.of(local_rank).step, None
        if self._reported is not None and self._reported.still:
            answer = self._beats.answer(local_rank)
        return waiting(rank, step, answer)

    def _ended(self) -> list[Position]:
        """Return the ranks that have ended with 0. (After any other exit code the whole group ends.)"""
        assert self._beats is not None, "their pages are read"
        node, options = self._agent.node, self._agent.options
        ended = sorted(set(range(options.nproc)) - node.running_ranks)
        return [Position(node.rank(rank), ended_after=self._beats.begun_by(rank)) for rank in ended]

    def _position(self, local_rank: int) -> Position:
        assert self._beats is not None, "a rank that runs has a page"
        rank = self._agent.node.rank(local_rank)
        beat = self._beats.of(local_rank)
        return position(rank, beat.step, self._beats.answer(local_rank), over=beat.over)


def _news(report: StallReport) -> tuple[int, bool, bool]:
    return report.level, report.stalled, report.still


def waiting(rank: int, step: int, answer: Mapping[str, Any] | None) -> Position:
    """Parse a rank's answer about the collective in which it waits; an invalid answer counts as none."""
    try:
        waits = None if answer is None else deadlock.waits_of(answer.get("waits"))
    except (AttributeError, KeyError, TypeError, ValueError):
        waits = None
    return Position(rank, step, where=str((answer or {}).get("where", ""))[:120], waits=waits)


def cpu_seconds(pid: int, parent_of: Mapping[int, int] | None = None) -> float:
    """Return the CPU seconds of a process and its descendants, ended ones included. parent_of: of all processes."""
    pids = {pid, *processes.descendants(pid, parent_of)}
    ticks = (int(field) for one in pids for field in processes.stat(one)[11:15])  # utime, stime, cutime, cstime
    return sum(ticks) / os.sysconf("SC_CLK_TCK")


def position(rank: int, step: int, answer: Mapping[str, Any] | None, *, over: bool = False) -> Position:
    """Parse a rank's position from its answer. over: True if its heartbeat says OVER. Raise TypeError or ValueError."""
    if answer is None:
        return Position(rank, step, answers=False, apart=over)
    sequence, op, where = int(answer.get("sequence", 0)), str(answer.get("op", "")), str(answer.get("where", ""))
    done, apart, shape = answer.get("done", True) is True, answer.get("apart") is True, str(answer.get("shape", ""))
    return Position(rank, step, sequence, op[:40], done, where[:120], apart=apart, shape=shape[:60])
