"""Limits for the time that a rank may make no step: learned from the job's own steps, or set by the user.

Shared by the operator, which gets reports (`observed.stall`), and the agent, which reads heartbeats
(`ddprun/core/stall_monitor.py`). Standard library only, no clock: the callers pass differences in seconds.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Phase = Literal["start", "train", "save", "evaluate"]

# Seconds; long, because imports and pauses take unknown times, and the first step may be a whole epoch.
START_SECONDS = PAUSE_SECONDS = 1800.0
TRAIN_SECONDS = 300.0
MEDIANS, LONGEST = 10, 3  # a step may take 10 median steps, or 3 times the longest step so far
# Limits in seconds, by phase, until a rank has once made a step after waiting longer than expected.
# In training the limit is torch's default timeout of a group: ranks that wait longer for others end by themselves.
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
    """Longest times without a step after which the rank made a step again."""

    longest_seconds: float = 0.0
    surprised: bool = False
    """True if one of these times was longer than expected."""


class Learned(NamedTuple):
    """Durations learned from the steps of a rank so far."""

    step_seconds: tuple[float, ...] = ()
    """Durations of the last steps, newest last; steps between two observations share the time."""
    steps: Survived = Survived()
    pauses: Survived = Survived()


class Limit(NamedTuple):
    """Limits in seconds. expected: a longer time causes a warning. allowed: a longer time is a stall."""

    expected: float
    allowed: float


def limit(phase: Phase, step: int, learned: Learned, timeout: float | None) -> Limit:
    """Return how long a rank may make no step in its present phase. timeout: stall.timeoutSeconds if set."""
    seconds = timeout or _step_seconds(learned)
    if phase in ("save", "evaluate"):
        expected = max(PAUSE_SECONDS, LONGEST * seconds, LONGEST * learned.pauses.longest_seconds)
        unseen, surprised = UNSEEN_PAUSE_SECONDS, learned.pauses.surprised
    elif phase == "start" or step == 0 or not (timeout or learned.step_seconds):
        # No step was measured yet, whatever the step number is: the observer may have started after the job.
        expected, unseen, surprised = max(START_SECONDS, seconds), UNSEEN_START_SECONDS, False
    else:
        expected, unseen, surprised = seconds, UNSEEN_TRAIN_SECONDS, learned.steps.surprised
    return Limit(expected, expected if timeout or surprised else max(unseen, 2 * expected))


def learn(learned: Learned, phase: Phase, step: int, made: int, seconds: float, *, measured: bool) -> Learned:
    """Return the durations learned from a rank, updated because it has made a step again.

    seconds: time without a step. measured: True if seen in full. phase, step: during that time. made: steps after it.
    """
    expected = limit(phase, step, learned, None).expected
    if phase in ("save", "evaluate"):
        return learned._replace(pauses=_survived(learned.pauses, seconds, expected))
    if phase == "train":
        learned = learned._replace(steps=_survived(learned.steps, seconds, expected))
    if not measured or made <= 0:
        return learned
    # The time until the first report counts as one step, because a resumed job may report step 0 and then 1041.
    each = seconds if phase == "start" else seconds / made
    return learned._replace(step_seconds=(*learned.step_seconds, each)[-STEPS_REMEMBERED:])


def _survived(before: Survived, seconds: float, expected: float) -> Survived:
    return Survived(max(before.longest_seconds, seconds), before.surprised or seconds > expected)


def _step_seconds(learned: Learned) -> float:
    """Return how long a step may take, judging by earlier steps."""
    # Use the shorter of two steps, because the first includes compilation.
    median = sorted(learned.step_seconds)[(len(learned.step_seconds) - 1) // 2] if learned.step_seconds else 0.0
    return max(TRAIN_SECONDS, MEDIANS * median, LONGEST * learned.steps.longest_seconds)
