"""Whether the ranks of one node are stalled: what their heartbeats prove. `watch_ranks.py` reads them.

The rules are the operator's (`observed.stall`), the limits the same (`stall_limits.py`): the group is stalled, not
a rank, so a rank that never says a step does not count where another one does. Here a rank is seen, not heard of, so
its silence is no question; a gap in our own looks is: then all clocks start again, because the ranks may have been held
as we were.

Pure. Times are seconds of the agent's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from ddpjob_core.stall_limits import Learned, Limit, Phase, learn, limit

LOOK_SECONDS = 1.0
GAP_SECONDS = 3.0
STILL_SECONDS = 5.0  # a rank that waits in a collective is not run by the kernel until that ends
# By what a rank is seen to get on. A rank without the library is known by its collectives alone.
BY_COLLECTIVES, BY_START, BY_STEPS = 1, 2, 3
# A script without the library cannot say that it has begun to train. DDP's construction has collectives too, and then
# the first step is compiled.
LOOKS_UNTIL_TRAINING = 5


class Heartbeat(NamedTuple):
    """What a rank says."""

    pid: int
    """0: nothing yet."""
    phase: Phase | Literal[""]
    step: int
    collectives: int
    over: bool = False
    """Whether it needs no other rank any more: its group is left, its script has ended, or theirs have."""
    completed: bool = False
    """Whether a collective of its default group has completed."""


class HeartbeatTracker(NamedTuple):
    """How a rank gets on."""

    level: int
    phase: Phase
    mark: int
    """The step, or the collectives begun."""
    advanced_at: float
    measured: bool
    """Whether it was seen to come here; else the look that saw it first was in the middle of a step."""
    learned: Learned
    moves: int
    """How many looks saw it get on."""
    completed: bool = False
    """Whether a collective has completed: then the limit that the user has set holds, also before the first step."""

    def limit(self, timeout: float | None) -> Limit:
        """How long it may stand where it is."""
        has_begun = self.completed and timeout and self.phase == "start"
        return limit("train" if has_begun else self.phase, self.mark, self.learned, timeout)


class StallReport(NamedTuple):
    """What a node says of its ranks together."""

    level: int
    """0: no rank beats."""
    stalled: bool
    """Whether each of those that count has made no progress for longer than it may."""
    seconds: float
    """For how long all of them do."""
    phase: Phase
    still: bool = False
    """Whether none of its ranks has run for STILL_SECONDS."""


NOTHING = StallReport(0, False, 0.0, "start")


def update(pace: HeartbeatTracker | None, beat: Heartbeat, now: float) -> HeartbeatTracker | None:
    """The pace of a rank after a look; None as long as it says nothing."""
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
    """The trackers after a gap in our looks: who stood, may have been held."""
    return {rank: pace._replace(advanced_at=now, measured=False) for rank, pace in trackers.items()}


def stall_report(trackers: Mapping[int, HeartbeatTracker], timeout: float | None, now: float) -> StallReport:
    """What these trackers prove."""
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
