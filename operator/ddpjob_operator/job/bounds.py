"""Bounds for every number, time, text and document from outside, because the API server bounds little."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping

import msgspec

from ddpjob_core import findings, members

# Ten years. Anything longer is a typing error, and dates after the year 9999 cannot be computed.
SECONDS_MAX = 315_360_000
# Every JSON reader keeps a number of this size exactly, and a sum of two still fits into the API server's 64 bits.
COUNT_MAX = 2**53 - 1
# Kubernetes is made for clusters of 5,000 nodes. A plan takes 50 µs for each node, and a tenant may write any number.
NODES_MAX = 10_000
# Ranks (processes) of one pod.
NPROC_MAX = members.NPROC_MAX
# The largest attempt number or replacement number, also in labels: more than one restart per second for 30 years.
TURNS_MAX = 10**9
# Limit of restarts in place in a report of an agent. A restart takes over a second, so no real count gets this large.
IN_PLACE_MAX = 10**6
# A kubelet keeps 4 kB of a termination message, but anybody with access can write a longer one into a status.
TEXT_MAX = 16_384
# Characters of names, single words and exception lines in a status; the operator writes at most 500.
STATUS_TEXT_MAX = 1_024
# Characters of a condition's message, as in metav1.Condition.
CONDITION_MAX = 32_768
# Characters of `ranges.text`; the longest text, for all even numbers up to NODES_MAX, has 25 kB.
RANGES_LENGTH_MAX = 65_536
# Items of a list in a status; the operator keeps at most 100.
STATUS_ITEMS_MAX = 128
# Characters of a sentence in a report: without, and with, the advice that follows the sentence.
SENTENCE_MAX = 300
ADVICE_MAX = 600
FINDINGS_MAX = findings.FINDINGS_MAX
# Characters of the reason for a gang's kind, which may quote the API server.
WHY_MAX = 500
# A pod template has a few hundred values, and is nested about 15 levels deep.
SPEC_VALUES_MAX = 10_000
SPEC_TEXT_MAX = 262_144
DEPTH_MAX = 64
# An API server (1.36) needs time quadratic in a pod's mistakes: 1.6 s of CPU for 1,500 tolerations with two each.
# While the API server is busy with a pod full of mistakes, the operator's requests for the Lease would have to wait.
ITEMS_MAX = 512

# Times are limited to this range, so that SECONDS_MAX can be added or subtracted.
TIME_FIRST = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
TIME_LAST = dt.datetime(9000, 1, 1, tzinfo=dt.timezone.utc)
_BEYOND_DATES = re.compile(r"\d{5,20}-")


class UnreadableError(ValueError):
    """An object from outside that cannot be read; the text names it and the reason."""


TOO_LARGE = "tooLarge"  # key of the mapping that replaces a value that was too large: {"tooLarge": why}


def integer(value: object, first: int, last: int) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and first <= value <= last else None


def number(text: object, last: int) -> int:
    """Return the number in a label; -1 if it is no number or above `last`."""
    if not isinstance(text, str) or len(text) > 20 or not (text.isascii() and text.isdecimal()):
        return -1
    return int(text) if int(text) <= last else -1


def count(text: object) -> int:
    return number(text, COUNT_MAX)


def seconds(value: object) -> int:
    return max(0, min(value, SECONDS_MAX)) if isinstance(value, int) and not isinstance(value, bool) else 0


def time(text: object) -> dt.datetime | None:
    """Parse a timestamp in the API server's format, clamped to TIME_FIRST to TIME_LAST; None for any other text."""
    if not isinstance(text, str):
        return None
    if _BEYOND_DATES.match(text):
        return TIME_LAST
    try:
        return moment(dt.datetime.fromisoformat(text.replace("Z", "+00:00")))
    except (ValueError, OverflowError):
        return None


def moment(at: dt.datetime) -> dt.datetime:
    at = at.replace(tzinfo=dt.timezone.utc) if at.tzinfo is None else at
    return min(max(at, TIME_FIRST), TIME_LAST)


def text(value: object, length: int = TEXT_MAX) -> str:
    """Return a text; only its end if it is too long, because the last lines name the cause; "" for anything else."""
    return value[-length:] if isinstance(value, str) else ""


def document(value: object) -> str:
    """Return why a spec is too large to keep; "" if it is not. Does not recurse, and stops at the bounds."""
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
    return {TOO_LARGE: why}


def refused(value: object) -> str:
    why = value.get(TOO_LARGE) if isinstance(value, Mapping) and len(value) == 1 else None
    return why if isinstance(why, str) else document(value)


def _inside(value: object) -> list[object]:
    if isinstance(value, str):
        return []
    if isinstance(value, (dict, Mapping)):  # dict first, because the check of Mapping doubles the time
        return [*value, *value.values()] if len(value) <= SPEC_VALUES_MAX else [None] * (SPEC_VALUES_MAX + 1)
    return value[: SPEC_VALUES_MAX + 1] if isinstance(value, list) else []


# msgspec's own errors, and errors that it lets through: invalid UTF-8, and thousands of nested brackets.
NOT_READABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
