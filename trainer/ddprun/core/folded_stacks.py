"""Print the stacks of a node's ranks as one text, in which ranks at the same place share one stack. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ddpjob_core.members import Members

PROGRAM = "ddprun: "
BEGIN, END, NONE = "stacks of ", "end of the stacks", "no stacks: "
PIDS_MAX = 8
LINES_MAX = 60


class RankStack(NamedTuple):
    """The stack of one rank, or why the rank has not answered."""

    rank: int
    pid: int
    step: int = 0
    answer: Mapping[str, Any] | None = None
    state: str = ""
    """State of a process that does not answer."""
    stack: Sequence[str] = ()
    """Calls of a rank that does not answer, as faulthandler or py-spy sees them."""


def text(ranks: Sequence[RankStack]) -> str:
    """Return the stacks of these ranks as one text, without a newline at the end."""
    lines = [f"{BEGIN}{_named([r.rank for r in ranks])}, innermost call first:"]
    groups: dict[object, list[RankStack]] = {}
    for one in sorted(ranks):
        groups.setdefault(_key(one), []).append(one)
    for group in groups.values():
        first, name = group[0], _named([r.rank for r in group])
        if first.answer is None:
            pids = ", ".join(str(r.pid) for r in group[:PIDS_MAX]) + (", …" if len(group) > PIDS_MAX else "")
            state = f": {first.state}" if first.state else ":"
            lines.append(f"  {name} (process{'es' * (len(group) > 1)} {pids}){state}")
            lines += [f"    {line}" for line in first.stack[:LINES_MAX]]
            continue
        at = ", ".join(filter(None, (_steps(group), _collective(first.answer))))
        lines.append(f"  {name}{': ' + at if at else ':'}")
        lines += [f"    {line}" for line in _stack(first.answer)] or ["    no Python frame"]
    return "\n".join(lines)


def _key(one: RankStack) -> object:
    if one.answer is None:
        return one.state, *one.stack
    return (*_stack(one.answer), _collective(one.answer))


def _stack(answer: Mapping[str, Any]) -> list[str]:
    stack = answer.get("stack")
    return [str(line)[:200] for line in stack[:LINES_MAX]] if isinstance(stack, list) else []


def _steps(group: Sequence[RankStack]) -> str:
    steps = sorted({r.step for r in group if r.step > 0})
    if not steps:
        return ""
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def _collective(answer: Mapping[str, Any]) -> str:
    """Return for example `in collective 25 (all_reduce)`."""
    number, op = answer.get("sequence"), answer.get("op")
    if not isinstance(number, int) or number <= 0:
        return ""
    return f"{'has ended' if answer.get('done') is True else 'in'} collective {number} ({str(op)[:40]})"


def _named(ranks: Iterable[int]) -> str:
    """Return for example `rank 3` or `ranks 0-2, 5`."""
    listed = Members(sorted(ranks))
    return f"rank{'s' * (len(listed) != 1)} {listed.text.replace(',', ', ')}"


def printed(log: str) -> list[str]:
    """Return the complete stack texts in a log, without the prefix `ddprun: ` and without lines that ranks printed."""
    found: list[str] = []
    lines: list[str] | None = None
    for line in log.splitlines():
        said = line.removeprefix(PROGRAM) if line.startswith(PROGRAM) else None
        if said is not None and said.startswith(BEGIN):
            lines = [said]
        elif said is not None and said.startswith(NONE):
            found.append(said)
        elif said == END and lines is not None:
            found.append("\n".join(lines))
            lines = None
        elif lines is not None and line.startswith("  "):
            lines.append(line)
    return found


def of_rank(text: str, rank: int) -> str:
    """Return the part of a stack text that is about one rank; "" if the text does not mention the rank."""
    parts = re.split(r"\n(?=  ranks? )", text)[1:]
    return next((part for part in parts if rank in _ranks(part)), "")


def _ranks(part: str) -> set[int]:
    match = re.match(r"  ranks? ([\d, -]+)", part)
    return set(Members.read(match[1].replace(" ", ""))) if match else set()
