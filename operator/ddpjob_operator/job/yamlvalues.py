"""Plain YAML scalars as kubectl reads them (sigs.k8s.io/yaml, YAML 1.1 with parts of 1.2). PyYAML differs: it reads
1e-4, `y` and `08` as texts and 1:30:00 as 5400, but in the cluster `y` is true and `08` is 8. Pure."""

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
_WHOLE_MAX = 10**21  # below this Go's JSON encoder writes 2.0 and 2e0 as 2, so both are accepted as integers


def tag_of(plain: str) -> str:
    """Return the tag that YAML implies for a plain scalar (without quotes and without a tag)."""
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
    """Represent a text for a PyYAML dumper (add_representer), in quotes if kubectl would read it as another value."""
    return dumper.represent_scalar(f"{TAG}str", text, style=None if tag_of(text) == f"{TAG}str" else "'")


def number(text: str) -> int | float:
    """Return the number. Raise ValueError for anything else, and for numbers that JSON does not have."""
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
    value = _bool(text)
    if value is None:
        raise ValueError(text)
    return value


def _bool(text: str) -> bool | None:
    """Return the boolean of yes, Yes or YES; None for other spellings such as yEs."""
    return _BOOLS.get(text.lower()) if text in (text.lower(), text.upper(), text.capitalize()) else None


def _digits(text: str) -> str:
    """Remove underscores from a number: 1_000 becomes 1000, but _1 stays a text."""
    return text.replace("_", "") if text[:1].isdigit() or text[:1] in ("+", "-") else text
