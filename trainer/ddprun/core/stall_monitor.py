"""Decide from heartbeats whether the ranks of one node are stalled. Pure; times are seconds of the monotonic clock.

In: a `Heartbeat` per rank from `watch_ranks.py`, which keeps one `HeartbeatTracker` per rank.
Out: one `StallReport` per node, which the leader combines for the group.

The rules are the operator's (`observed.stall`) and the limits come from `stall_limits.py`. Only a whole group stalls.
If some ranks report steps, ranks that show only collectives are ignored. The agent reads heartbeats from shared memory,
so no message can be lost. But the agent may be suspended together with its ranks, so all clocks start again after a gap
in its own reads.

The cost: a script without the library shows only its collectives, so the start of its training is a guess
(LOOKS_UNTIL_TRAINING).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from ddpjob_core.stall_limits import Learned, Limit, Phase, learn, limit

LOOK_SECONDS = 1.0
GAP_SECONDS = 3.0
STILL_SECONDS = 5.0  # a rank that used no CPU for this long counts as blocked in a collective
# Levels, by what shows the progress of a rank: steps, or only collectives if the script does not use the library.
BY_COLLECTIVES, BY_START, BY_STEPS = 1, 2, 3
# A script without the library does not report its start. It counts as training after this many reads with progress.
# With fewer reads the collectives of DDP's constructor would count as training, and a long first step as a stall.
LOOKS_UNTIL_TRAINING = 5


class Heartbeat(NamedTuple):
    """The values that a rank writes into its heartbeat page."""

    pid: int
    """0 if the rank has reported nothing yet."""
    phase: Phase | Literal[""]
    step: int
    collectives: int
    over: bool = False
    """True if the rank needs no other rank: it left its group, or its script or the others' have ended."""
    completed: bool = False
    """True if a collective of the default group has completed."""


class HeartbeatTracker(NamedTuple):
    """The progress of a rank."""

    level: int
    phase: Phase
    mark: int
    """The step, or the number of collectives begun."""
    advanced_at: float
    measured: bool
    """False if the first read fell in the middle of a step, so the step's duration is unknown."""
    learned: Learned
    moves: int
    """Number of reads that found progress."""
    completed: bool = False
    """True if a collective has completed: the user's limit then applies even before the first step."""

    def limit(self, timeout: float | None) -> Limit:
        """Return how many seconds the rank may make no progress. timeout: stall.timeoutSeconds if set."""
        has_begun = self.completed and timeout and self.phase == "start"
        return limit("train" if has_begun else self.phase, self.mark, self.learned, timeout)


class StallReport(NamedTuple):
    """The progress of all ranks of a node together."""

    level: int
    """0 if no rank sends heartbeats."""
    stalled: bool
    """True if every rank that shows the most (steps, else collectives) has exceeded its limit."""
    seconds: float
    """Seconds since the last progress of any of these ranks."""
    phase: Phase
    still: bool = False
    """True if no rank has used the CPU for STILL_SECONDS."""


NOTHING = StallReport(0, False, 0.0, "start")


def update(pace: HeartbeatTracker | None, beat: Heartbeat, now: float) -> HeartbeatTracker | None:
    """Return the tracker after this heartbeat was read; None until the rank reports something."""
    level, phase, mark = _where(pace, beat)
    if level == 0:
        return None
    if pace is None or pace.level != level:
        learned = Learned() if pace is None else pace.learned
        return HeartbeatTracker(level, phase, mark, now, phase == "start", learned, 0, beat.completed)
    if (pace.phase, pace.mark) == (phase, mark):
        return pace._replace(completed=beat.completed)
    steps, seconds = mark - pace.mark, now - pace.advanced_at
    learned = learn(pace.learned, pace.phase, pace.mark, steps, seconds, measured=pace.measured)
    return HeartbeatTracker(level, phase, mark, now, True, learned, pace.moves + 1, beat.completed)


def restart_clocks(trackers: Mapping[int, HeartbeatTracker], now: float) -> dict[int, HeartbeatTracker]:
    """Return the trackers with their clocks at 0. Used after a gap: ranks may have been suspended with the agent."""
    return {rank: pace._replace(advanced_at=now, measured=False) for rank, pace in trackers.items()}


def stall_report(trackers: Mapping[int, HeartbeatTracker], timeout: float | None, now: float) -> StallReport:
    """Combine these trackers into the report of the node."""
    level = max((pace.level for pace in trackers.values()), default=0)
    counting = [pace for pace in trackers.values() if pace.level == level]
    if not counting:
        return NOTHING
    stalled = all(now - pace.advanced_at > pace.limit(timeout).allowed for pace in counting)
    slowest = max(counting, key=lambda pace: pace.advanced_at)
    return StallReport(level, stalled, now - slowest.advanced_at, slowest.phase)


def _where(pace: HeartbeatTracker | None, beat: Heartbeat) -> tuple[int, Phase, int]:
    if beat.phase == "start":
        return BY_START, "start", beat.collectives
    if beat.phase:
        return BY_STEPS, beat.phase, beat.step
    if beat.collectives == 0 and not beat.over:
        return 0, "start", 0
    begun = beat.over or (pace is not None and pace.moves + (beat.collectives != pace.mark) >= LOOKS_UNTIL_TRAINING)
    return BY_COLLECTIVES, "train" if begun else "start", max(beat.collectives, int(beat.over))
