"""Counts, times, durations and values as messages show them, and names as Kubernetes accepts them."""

from __future__ import annotations

import datetime as dt
import re
import unicodedata
from collections.abc import Mapping

NAME_MAX = 40


def duration(seconds: float) -> str:
    """Return a duration as kubectl writes ages: 24s, 12m5s, 3h10m or 2d4h."""
    whole = max(0, round(seconds))
    for big, small, names in ((86400, 3600, "dh"), (3600, 60, "hm"), (60, 1, "ms")):
        if whole >= big:
            rest = whole % big // small
            return f"{whole // big}{names[0]}" + (f"{rest}{names[1]}" if rest else "")
    return f"{whole}s"


def clock(time: dt.datetime) -> str:
    """Return a time without its date, for example 08:04:28 UTC."""
    return f"{time.astimezone(dt.timezone.utc):%H:%M:%S} UTC"


def count(number: int, thing: str) -> str:
    """Return a number with its noun: 1 node, 2 nodes or 3,000 processes."""
    plural = "" if number == 1 else "es" if thing.endswith("s") else "s"
    return f"{number:,} {thing}{plural}"


def running(ready: int, total: int) -> str:
    return f"{ready} of {count(total, 'node')} {'is' if total == 1 else 'are'} running"


def quoted(value: object) -> str:
    """Return the advice to quote a value if it should be text, but YAML has read a boolean or a number; else ""."""
    if isinstance(value, bool):
        words = "y, yes, on and true" if value else "n, no, off and false"
        return f". Put it into quotes: YAML reads {words} as {say(value)}."
    return ". Put it into quotes." if isinstance(value, int | float) else ""


def say(value: object) -> str:
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value[:60]}"' + ("…" if len(value) > 60 else "")
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    return str(value)[:60]


def name_of(script: str) -> str:
    """Return a Kubernetes name: train for src/train.py, the module src.train and ./train.sh."""
    stem = re.sub(r"\.(?:py|sh)$", "", script)
    stem = stem.rstrip("/").rpartition("/")[2] if stem != script or "/" in script else script.rpartition(".")[2]
    ascii_only = unicodedata.normalize("NFKD", stem).encode("ascii", "ignore").decode()
    name = re.sub(r"[^a-z0-9]+", "-", ascii_only.lower()).strip("-")[:NAME_MAX].strip("-")
    return name if name[:1].isalpha() else f"job-{name}".strip("-")
