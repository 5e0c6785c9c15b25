"""Write docs/reference.md from the same types, rules and reasons that the operator and the CRD use."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect as types

from ddpjob_operator.job import api, crd, validation
from ddpjob_operator.job.wording import say

INTRO = f"""\
<!-- Written from api.py by `python tools/reference_page.py`. Change the types, then run it again. -->
# DDPJob reference

`apiVersion: {api.API_VERSION}`, `kind: {api.KIND}`, short name `ddp`. `kubectl explain ddpjob.spec` says the
same. Times are in UTC, durations whole seconds. A field that is not set, or null, has its default.
"""

STATUS = """\
## status

Written by the operator, and by `ddpjob run --status FILE`; nothing else writes it. A missing field is not known yet,
or does not apply.
"""

REASONS = """\
`status.reason` and the events say why in one word; [messages.md](messages.md) lists them all.
"""


def to_markdown() -> str:
    """Return docs/reference.md."""
    spec = table(("Field", "Type", "Default", "Meaning"), _fields(api.Spec, "", with_default=True))
    status = table(("Field", "Type", "Meaning"), _fields(api.Status, "", with_default=False))
    rules = "".join(wrapped(f"- {line}", "  ") for line in _rules())
    return "\n".join((INTRO, "## spec\n", spec, "### Rules\n", rules, STATUS, status, _columns(), REASONS))


def _fields(owner: type[msgspec.Struct], prefix: str, *, with_default: bool) -> Iterator[tuple[str, ...]]:
    """Yield a row for each field, followed by the rows of the fields in it."""
    for name, field in crd.fields(owner).items():
        kind = _without_none(field.type)
        path = f"{prefix}{name}"
        default = (_default(owner, field),) if with_default else ()
        yield (f"`{path}`", _say(kind), *default, escaped(crd.meaning(owner, field)))
        inner, dot = (kind.item_type, "[].") if isinstance(kind, types.ListType) else (kind, ".")
        if isinstance(inner, types.StructType):
            yield from _fields(inner.cls, path + dot, with_default=with_default)


def _default(owner: type, field: types.Field) -> str:
    if crd.is_required(owner, field):
        return "required"
    value = crd.default(field)
    return "unset" if value is None else f"`{say(value).strip(chr(34))}`"


def _without_none(kind: types.Type) -> types.Type:
    if not isinstance(kind, types.UnionType):
        return kind
    rest = tuple(t for t in kind.types if not isinstance(t, types.NoneType))
    return rest[0] if len(rest) == 1 else types.UnionType(rest)


def _say(kind: types.Type) -> str:
    """Describe a type in words."""
    if isinstance(kind, types.UnionType):
        words_first = sorted(kind.types, key=lambda t: not isinstance(t, types.LiteralType))
        return ", ".join(_say(t) for t in words_first)
    if isinstance(kind, types.LiteralType):
        return ", ".join(f"`{v}`" for v in kind.values)
    if isinstance(kind, types.ListType):
        return f"list of: {_say(kind.item_type)}"
    if isinstance(kind, types.IntType):
        return f"whole number{_between(kind.ge, kind.le)}"
    if isinstance(kind, types.StrType) and kind.max_length is not None:
        return f"text, at most {kind.max_length:,} characters"
    return _WORDS[type(kind)]


_WORDS: dict[type[types.Type], str] = {
    types.BoolType: "`true`, `false`",
    types.FloatType: "number",
    types.StrType: "text",
    types.DateTimeType: "time",
    types.DictType: "mapping",
    types.StructType: "mapping",
}


def _between(low: Any, high: Any) -> str:
    if high is not None:
        return f" {low or 0}–{high}"
    return "" if low is None else f" ≥ {low}"


def _rules() -> Iterator[str]:
    """Yield the rules that types cannot express, in the words of the API server's errors."""
    for _, message in crd.NAME_RULES:
        yield f"`metadata.name` {escaped(message)}"
    for rule in validation.RULES:
        yield f"`spec.{rule.field}`: {escaped(rule.message)}"
    *first, last = (f"`spec.{name}`" for name in crd.UNCHANGED)
    yield f"{', '.join(first)} and {last}: each {escaped(crd.STOP_FIRST)}"


def _columns() -> str:
    shown = ", ".join(name for name, _, _, wide in crd.COLUMNS if not wide)
    more = ", ".join(name for name, _, _, wide in crd.COLUMNS if wide)
    return wrapped(f"`kubectl get ddp` shows {shown}; `-o wide` also {more}.")


def wrapped(text: str, indent: str = "") -> str:
    """Wrap a paragraph at 120 columns; the lines after the first begin with the indent."""
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) + "\n"


def table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def escaped(text: str) -> str:
    """Escape text for a cell: a bar would end the cell, and browsers would read `<job>` as a tag."""
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.stdout.write(to_markdown())
