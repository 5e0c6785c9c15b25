"""What a number, a time, a text and a document from outside may be: each is bounded here, where it is read.

Whoever may create a pod, a DDPJob or a report writes what the operator reads, and the API server bounds little of it.
Python has no largest number, but its dates end in the year 9999, and a list of so many items as a pod says is memory.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping

import msgspec

from ddpjob_core import findings, members

# Ten years: longer is a typing error, and a date beyond the year 9999 is none.
SECONDS_MAX = 315_360_000
# What JSON carries without loss in every language; a sum of two still fits the 64 bits of the API server.
COUNT_MAX = 2**53 - 1
# Kubernetes is made for clusters of 5,000 nodes. A plan takes 50 µs for each node, and a tenant may write any number.
NODES_MAX = 10_000
# A pod speaks for so many ranks at most.
NPROC_MAX = members.NPROC_MAX
# Attempts and replacements in labels. A restart a second for 30 years is fewer.
TURNS_MAX = 10**9
# Restarts in place in the life of one agent; each takes longer than a second.
IN_PLACE_MAX = 10**6
# A kubelet keeps 4 kB of a termination message; a status that somebody else writes has no such limit.
TEXT_MAX = 16_384
# A name, a word or an exception's line in a status: the operator writes at most 500 characters.
STATUS_TEXT_MAX = 1_024
# metav1.Condition's own limit.
CONDITION_MAX = 32_768
# Every second one of NODES_MAX nodes is the longest that `ranges.text` writes: 25 kB.
RANGES_LENGTH_MAX = 65_536
# Lists of a status: the operator keeps at most 100 items.
STATUS_ITEMS_MAX = 128
# A sentence of a report, and that sentence with what to do about it.
SENTENCE_MAX = 300
ADVICE_MAX = 600
FINDINGS_MAX = findings.FINDINGS_MAX
# Why a gang was chosen, or cannot be had: the API server's own sentence may be in it.
WHY_MAX = 500
# A pod template has some hundred values, and is nested about 15 levels deep.
SPEC_VALUES_MAX = 10_000
SPEC_TEXT_MAX = 262_144
DEPTH_MAX = 64
# The time that an API server (1.36) takes for a pod grows with the square of the pod's mistakes: 1.6 s of CPU for 1,500
# tolerations with two each. The operator sends a tenant's pods under its own name: they compete with its Lease there.
ITEMS_MAX = 512

# Ten years before and after these are still dates.
TIME_FIRST = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
TIME_LAST = dt.datetime(9000, 1, 1, tzinfo=dt.timezone.utc)
_BEYOND_DATES = re.compile(r"\d{5,20}-")


class UnreadableError(ValueError):
    """An object from outside that cannot be read; the text says which and why."""


TOO_LARGE = "tooLarge"
"""The key of what stands in the place of a value that is not kept: {"tooLarge": why}. It survives JSON."""


def integer(value: object, first: int, last: int) -> int | None:
    """A whole number within bounds; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and first <= value <= last else None


def number(text: object, last: int) -> int:
    """The number that a label holds; -1 where it holds none up to `last`."""
    if not isinstance(text, str) or len(text) > 20 or not (text.isascii() and text.isdecimal()):
        return -1
    return int(text) if int(text) <= last else -1


def seconds(value: object) -> int:
    """A duration, at least 0 and at most ten years; 0 where none is said."""
    return max(0, min(value, SECONDS_MAX)) if isinstance(value, int) and not isinstance(value, bool) else 0


def time(text: object) -> dt.datetime | None:
    """A time as the API server writes it, within the years that can be reckoned with; None where it is none."""
    if not isinstance(text, str):
        return None
    if _BEYOND_DATES.match(text):
        return TIME_LAST
    try:
        return moment(dt.datetime.fromisoformat(text.replace("Z", "+00:00")))
    except (ValueError, OverflowError):
        return None


def moment(at: dt.datetime) -> dt.datetime:
    """A time with a zone, within the years that can be reckoned with."""
    at = at.replace(tzinfo=dt.timezone.utc) if at.tzinfo is None else at
    return min(max(at, TIME_FIRST), TIME_LAST)


def text(value: object, length: int = TEXT_MAX) -> str:
    """A text, its end where it is too long: the cause stands in the last lines. Empty where it is none."""
    return value[-length:] if isinstance(value, str) else ""


def document(value: object) -> str:
    """Why a spec is too large to be kept; empty: it is not. Walks no further than its bounds, and never recurses."""
    values, length, items = 0, 0, 0
    level: list[object] = [value]
    for _ in range(DEPTH_MAX):
        below: list[object] = []
        for one in level:
            values += 1
            length += len(one) if isinstance(one, str) else 0
            items += sum(isinstance(item, dict) for item in one) if isinstance(one, list) else 0
            below += _inside(one)
            if values + len(below) > SPEC_VALUES_MAX:
                return f"holds more than {SPEC_VALUES_MAX} values. Move what the script reads into a ConfigMap."
        if items > ITEMS_MAX:
            what = "holds more than {} items in its lists (env, volumeMounts, tolerations and all others)"
            return f"{what.format(ITEMS_MAX)}. Move variables into a ConfigMap, and name it in envFrom."
        if length > SPEC_TEXT_MAX:
            return f"holds more than {SPEC_TEXT_MAX} characters. Move what the script reads into a ConfigMap."
        if not below:
            return ""
        level = below
    return f"is nested deeper than {DEPTH_MAX} levels. A pod template is nested about 15 levels deep."


def too_large(why: str) -> dict[str, str]:
    """What stands in the place of a value that is not kept."""
    return {TOO_LARGE: why}


def refused(value: object) -> str:
    """Why a value is not kept; empty where it is."""
    why = value.get(TOO_LARGE) if isinstance(value, Mapping) and len(value) == 1 else None
    return why if isinstance(why, str) else document(value)


def _inside(value: object) -> list[object]:
    if isinstance(value, str):
        return []
    if isinstance(value, (dict, Mapping)):  # dict first: Mapping alone costs as much as all the rest
        return [*value, *value.values()] if len(value) <= SPEC_VALUES_MAX else [None] * (SPEC_VALUES_MAX + 1)
    return value[: SPEC_VALUES_MAX + 1] if isinstance(value, list) else []


# msgspec's own errors, and those it lets through: text that is no UTF-8, and thousands of brackets.
NOT_READABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
