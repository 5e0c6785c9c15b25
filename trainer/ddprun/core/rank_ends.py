"""What the ranks of a group leave behind at their end, and what it proves of a run that ended with 0.

Each rank writes a file for its agent (`reporting/rank_end.py`): whether it has formed a process group, and checksums of
its DDP modules. An agent sends what its node has to node 0, together with the news that its ranks have ended.

A difference at the end proves nothing alone: a rank may save averaged weights, load its best checkpoint, or prune.
Therefore a rank also notes a number over its parameters at some of its backward passes, the last ones among them, where
DDP needs all ranks to have the same. Only replicas that differed there, and differ at the end, are reported.

Pure. Whatever is malformed counts as unknown, and what is unknown is not reported.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ddpjob_core.findings import FINDINGS_MAX, NO_PROCESS_GROUP, REPLICAS_DIFFER, NamedFinding

SUM_CHARACTERS = 8
MESSAGE_BYTES_MAX = 48 * 1024  # a line between two agents has 64 KiB
NAME_CHARACTERS_MAX, HARDWARE_CHARACTERS_MAX, RANKS_SHOWN = 60, 32, 4


class ModuleEnd(NamedTuple):
    """A DDP module at the end of a rank, and of all other ranks of its node that left the very same."""

    ranks: tuple[int, ...]
    group: str
    """The ranks of its process group, as text."""
    number: int
    """Counts the modules of that group from 0, in the order in which they were made."""
    digest: str
    """Of the names and shapes of its parameters: modules of another digest are not compared."""
    sums: str
    """SUM_CHARACTERS for each parameter."""
    dtypes: tuple[str, ...]
    """Of each parameter; one alone if it is that of all."""
    passes: Mapping[tuple[int, int], str]
    """(backward passes made, collectives begun in its group) -> a number over the parameters then."""
    hardware: str
    names: tuple[str, ...] = ()
    """Of its parameters; may be left out if another module of the digest has them."""


class NodeEnd(NamedTuple):
    """What the ranks of one node left behind."""

    alone: bool = False
    """True if every rank has trained, and none has formed a process group of several ranks."""
    modules: tuple[ModuleEnd, ...] = ()


def node_end(written: Mapping[int, Any]) -> NodeEnd:
    """Return what the ranks of a node left: by rank, the JSON of its file, or None."""
    alone, modules = bool(written), dict[tuple[Any, ...], ModuleEnd]()
    for rank, document in sorted(written.items()):
        if not isinstance(document, Mapping):
            alone = False
            continue
        alone = alone and document.get("alone") is True
        for module in _modules(document.get("modules"), (rank,)):
            same = (*module[1:6], tuple(module.passes.items()), module.hardware)
            known = modules.get(same)
            modules[same] = module if known is None else known._replace(ranks=(*known.ranks, rank))
    return NodeEnd(alone, tuple(modules.values()))


def as_message(end: NodeEnd) -> dict[str, Any]:
    """Return it for another agent, as much of it as fits into a line: the first modules, and names last."""
    message: dict[str, Any] = {"alone": end.alone, "modules": []}
    left, named = MESSAGE_BYTES_MAX, set[str]()
    for module in end.modules:
        passes = [[*key, number] for key, number in module.passes.items()]
        sent = {**module._asdict(), "passes": passes, "names": []}
        left -= len(json.dumps(sent))
        if left < 0:
            break
        message["modules"].append(sent)
    for module, sent in zip(end.modules, message["modules"], strict=False):
        names = len(json.dumps(module.names))
        if module.digest not in named and names <= left:
            left -= names
            named.add(module.digest)
            sent["names"] = module.names
    return message


def of_message(message: Any) -> NodeEnd:
    """Return what another agent has sent."""
    if not isinstance(message, Mapping):
        return NodeEnd()
    return NodeEnd(message.get("alone") is True, tuple(_modules(message.get("modules"), None)))


def findings(ends: Iterable[NodeEnd], world_size: int) -> list[NamedFinding]:
    """Return what makes the success of all ranks suspicious."""
    ends = list(ends)
    if world_size > 1 and ends and all(end.alone for end in ends):
        text = f"{world_size} ranks ran and none has formed a process group with another: each has trained alone, with"
        text += " a model of its own. Call init_process_group, or give the script the option with which it calls it"
        return [NamedFinding(NO_PROCESS_GROUP, text)]
    groups: dict[tuple[str, int, str], list[ModuleEnd]] = {}
    for module in (module for end in ends for module in end.modules):
        groups.setdefault((module.group, module.number, module.digest), []).append(module)
    found = (_difference(sorted(modules, key=lambda module: module.ranks)) for modules in groups.values())
    return [finding for finding in found if finding is not None][:FINDINGS_MAX]


def _difference(modules: Sequence[ModuleEnd]) -> NamedFinding | None:
    """Compare one module between its ranks; the first rank is the one that the others are compared with."""
    first, *others = modules
    drifted = [other for other in others if _differ(first, other) and _first_pass_apart(first, other) is not None]
    if not drifted:
        return None
    index = min(_first_parameter(first, other) for other in drifted)
    names = next((module.names for module in modules if module.names), ())
    name = names[index] if index < len(names) else f"parameter {index}"
    ranks = sorted(rank for other in drifted for rank in other.ranks)
    apart = min(number for other in drifted if (number := _first_pass_apart(first, other)) is not None)
    text = f"{_ranks(ranks)} ended with other parameters than rank {first.ranks[0]}: "
    name = name if len(name) <= NAME_CHARACTERS_MAX else f"…{name[1 - NAME_CHARACTERS_MAX :]}"
    text += f"{name} is the first that differs{_dtypes(first, drifted[0], index)}; "
    return NamedFinding(REPLICAS_DIFFER, f"{text}{_why(apart)}{_hardware(first, drifted)}")


def _why(apart: int) -> str:
    if apart == 1:
        return "they differed before the first step, e.g. a checkpoint was loaded on one rank after DDP(...)"
    return "the replicas were not kept in step, e.g. every backward ran in no_sync()"


def _differ(one: ModuleEnd, other: ModuleEnd) -> bool:
    return (one.sums, one.dtypes) != (other.sums, other.dtypes)


def _first_pass_apart(one: ModuleEnd, other: ModuleEnd) -> int | None:
    """The first backward pass that both have noted, and that began with other parameters; None: there is none.

    The last pass that both have noted is none if either made more: a rank that makes passes alone, to evaluate averaged
    weights, has the same numbers at its first one as the others at their next one.
    """
    both = one.passes.keys() & other.passes.keys()
    if both and not max(both) == max(one.passes) == max(other.passes):
        both = both - {max(both)}
    return min((key[0] for key in both if one.passes[key] != other.passes[key]), default=None)


def _first_parameter(one: ModuleEnd, other: ModuleEnd) -> int:
    """The index of the first that differs."""
    length = len(one.sums) // SUM_CHARACTERS
    for index in range(length):
        at = slice(index * SUM_CHARACTERS, (index + 1) * SUM_CHARACTERS)
        if one.sums[at] != other.sums[at] or _dtype(one, index) != _dtype(other, index):
            return index
    return length


def _dtype(module: ModuleEnd, index: int) -> str:
    return module.dtypes[index] if index < len(module.dtypes) else "".join(module.dtypes[:1])


def _dtypes(first: ModuleEnd, other: ModuleEnd, index: int) -> str:
    one, two = _dtype(first, index), _dtype(other, index)
    return "" if one == two else f" ({two} where rank {first.ranks[0]} has {one})"


def _hardware(first: ModuleEnd, drifted: Sequence[ModuleEnd]) -> str:
    """Another processor may round in another way."""
    other = next((module for module in drifted if module.hardware != first.hardware), None)
    if other is None or not first.hardware or not other.hardware:
        return ""
    one, two = (module.hardware[:HARDWARE_CHARACTERS_MAX].strip() for module in (first, other))
    return f"; rank {first.ranks[0]} ran on {one}, rank {other.ranks[0]} on {two}"


def _ranks(ranks: Sequence[int]) -> str:
    """rank 1; ranks 1 and 2; ranks 1, 2, 3, 4 and 3 others"""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    hidden = len(ranks) - RANKS_SHOWN
    *shown, last = [*map(str, ranks)] if hidden <= 0 else [*map(str, ranks[:RANKS_SHOWN]), f"{hidden} others"]
    return f"ranks {', '.join(shown)} and {last}"


def _modules(written: Any, ranks: tuple[int, ...] | None) -> list[ModuleEnd]:
    """Read those that are well-formed. ranks: those of the file; None: as each module has them."""
    read = [_module(one, ranks) for one in written] if isinstance(written, list) else []
    return [module for module in read if module is not None]


def _module(written: Any, ranks: tuple[int, ...] | None) -> ModuleEnd | None:
    try:
        return ModuleEnd(
            ranks or (int(written["ranks"][0]), *map(int, written["ranks"][1:])),
            str(written["group"]),
            int(written["number"]),
            str(written["digest"]),
            str(written["sums"]),
            tuple(map(str, written["dtypes"])),
            {(int(passes), int(collectives)): str(number) for passes, collectives, number in written["passes"]},
            str(written["hardware"]),
            tuple(map(str, written["names"])),
        )
    except (KeyError, TypeError, ValueError, IndexError, OverflowError):
        return None
