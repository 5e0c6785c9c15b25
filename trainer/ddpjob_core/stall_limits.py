"""How long a rank may make no step: learned from the job's own steps, or set.

One place for the operator, which gets reports (`observed.stall`), and for the agent in the pod, which reads the
heartbeats (`ddprun/core/stall_monitor.py`): standard library only, no clock. Seconds are differences of either clock.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Phase = Literal["start", "train", "save", "evaluate"]

# Before the first step and in a declared pause little is known: a script may count epochs as its steps.
START_SECONDS = PAUSE_SECONDS = 1800.0
TRAIN_SECONDS = 300.0
MEDIANS, LONGEST = 10, 3  # a step may take 10 median steps, or 3 times the longest that one has ever taken
# The first time that more is needed than was expected. In training: torch's default time-out of a process group, for
# a group whose ranks wait longer than that for each other ends by itself.
UNSEEN_START_SECONDS = UNSEEN_PAUSE_SECONDS = 10_800.0
UNSEEN_TRAIN_SECONDS = 1800.0
STEPS_REMEMBERED = 9

DOES_NOT: dict[Phase, str] = {
    "start": "has made no step",
    "train": "has made no step",
    "save": "has been saving",
    "evaluate": "has been evaluating",
}


class Survived(NamedTuple):
    """The times without a step that a rank has survived."""

    longest_seconds: float = 0.0
    surprised: bool = False
    """Whether one of them was longer than expected then."""


class Learned(NamedTuple):
    """What the steps of a rank have taught so far."""

    step_seconds: tuple[float, ...] = ()
    """What the last steps took, the newest last; steps between two observations share the time."""
    steps: Survived = Survived()
    pauses: Survived = Survived()


class Limit(NamedTuple):
    """expected: more than that is worth a warning. allowed: more than that is a stall. Both in seconds."""

    expected: float
    allowed: float


def limit(phase: Phase, step: int, learned: Learned, timeout: float | None) -> Limit:
    """How long a rank may make no step where it is now. timeout: stall.timeoutSeconds where it is set."""
    seconds = timeout or _step_seconds(learned)
    if phase in ("save", "evaluate"):
        expected = max(PAUSE_SECONDS, LONGEST * seconds, LONGEST * learned.pauses.longest_seconds)
        unseen, surprised = UNSEEN_PAUSE_SECONDS, learned.pauses.surprised
    elif phase == "start" or step == 0 or not (timeout or learned.step_seconds):
        # Until a step has been measured nothing is known, at any step: the observer may be new, and the job old.
        expected, unseen, surprised = max(START_SECONDS, seconds), UNSEEN_START_SECONDS, False
    else:
        expected, unseen, surprised = seconds, UNSEEN_TRAIN_SECONDS, learned.steps.surprised
    return Limit(expected, expected if timeout or surprised else max(unseen, 2 * expected))


def learn(learned: Learned, phase: Phase, step: int, made: int, seconds: float, *, measured: bool) -> Learned:
    """What the end of a time without a step teaches.

    phase, step: where the rank was for those seconds. made: the steps that it is further now. measured: whether the
    begin of that time was seen.
    """
    expected = limit(phase, step, learned, None).expected
    if phase in ("save", "evaluate"):
        return learned._replace(pauses=_survived(learned.pauses, seconds, expected))
    if phase == "train":
        learned = learned._replace(steps=_survived(learned.steps, seconds, expected))
    if not measured or made <= 0:
        return learned
    # From the begin to the first steps it is one step: a resumed job starts at 0 and reports 1041 next.
    each = seconds if phase == "start" else seconds / made
    return learned._replace(step_seconds=(*learned.step_seconds, each)[-STEPS_REMEMBERED:])


def _survived(before: Survived, seconds: float, expected: float) -> Survived:
    return Survived(max(before.longest_seconds, seconds), before.surprised or seconds > expected)


def _step_seconds(learned: Learned) -> float:
    """What a step may take, by what is known of the steps before."""
    # Of two, the lower: the first is the slow one, with compilation in it.
    median = sorted(learned.step_seconds)[(len(learned.step_seconds) - 1) // 2] if learned.step_seconds else 0.0
    return max(TRAIN_SECONDS, MEDIANS * median, LONGEST * learned.steps.longest_seconds)
