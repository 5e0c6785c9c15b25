"""What a plain word or number in YAML is: as kubectl reads it (sigs.k8s.io/yaml, YAML 1.1 with parts of 1.2).

PyYAML differs where it hurts: 1e-4 is a text there and a number in the cluster, which refuses it as an argument;
1:30:00 is 5400 there and a text in the cluster; `y` and `08` are texts there and true and 8 in the cluster. Pure.
"""

from __future__ import annotations

import re
from typing import Any

TAG = "tag:yaml.org,2002:"
_BOOLS = {
    word: value for value, words in ((True, "y yes true on"), (False, "n no false off")) for word in words.split()
}
_NULLS = ("", "~", "null", "Null", "NULL")
_INT = re.compile(r"([-+]?)(0[bB][01]+|0[oO]?[0-7]+|0[xX][0-9a-fA-F]+|0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NO_JSON = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_WHOLE_MAX = 10**21  # up to here JSON writes 2.0 as 2, and a count may be given as 2e0


def tag_of(plain: str) -> str:
    """The tag of a scalar that stands there without quotes and without a tag."""
    if plain in _NULLS:
        return f"{TAG}null"
    if plain == "<<":
        return f"{TAG}merge"
    if _bool(plain) is not None:
        return f"{TAG}bool"
    digits = _digits(plain)
    if _INT.fullmatch(digits):
        return f"{TAG}int"
    return f"{TAG}float" if _FLOAT.fullmatch(digits) or _NO_JSON.fullmatch(plain) else f"{TAG}str"


def represent(dumper: Any, text: str) -> Any:
    """A text for a PyYAML dumper (add_representer), in quotes where kubectl would read another value: y, 1e-3."""
    return dumper.represent_scalar(f"{TAG}str", text, style=None if tag_of(text) == f"{TAG}str" else "'")


def number(text: str) -> int | float:
    """Raises ValueError for what is none, and for what JSON does not have."""
    digits = _digits(text)
    if match := _INT.fullmatch(digits):
        return int(match[1] + re.sub(r"^0(?=[0-7]+\Z)", "0o", match[2]), 0)  # octal, as Python writes it
    if not _FLOAT.fullmatch(digits):
        raise ValueError(text)
    value = float(digits)
    if abs(value) == float("inf"):
        raise ValueError(text)
    return int(value) if value.is_integer() and abs(value) < _WHOLE_MAX else value


def boolean(text: str) -> bool:
    """Raises ValueError for what is neither."""
    value = _bool(text)
    if value is None:
        raise ValueError(text)
    return value


def _bool(text: str) -> bool | None:
    """yes, Yes and YES; not yEs."""
    return _BOOLS.get(text.lower()) if text in (text.lower(), text.upper(), text.capitalize()) else None


def _digits(text: str) -> str:
    """1_000 is 1000; _1 is a text."""
    return text.replace("_", "") if text[:1].isdigit() or text[:1] in ("+", "-") else text
