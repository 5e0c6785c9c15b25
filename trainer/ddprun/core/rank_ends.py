"""Check the results that ranks record at their end, to find suspicious runs that ended with 0.

Each rank writes a file for its agent (`reporting/rank_end.py`): whether it formed a process group, and checksums of its
DDP modules. Agents send this to node 0 when their ranks have ended.

A difference at the end alone proves nothing: a rank may save averaged weights, load its best checkpoint, or prune. So
ranks also record a checksum of their parameters at some backward passes and at the last ones, because DDP needs equal
parameters there. Replicas are reported only if they differed there and at the end.

Pure. Malformed input counts as unknown, and nothing unknown is reported.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ddpjob_core.findings import FINDINGS_MAX, REPLICAS_DIFFER, NamedFinding, hidden_failure, trained_alone

SUM_CHARACTERS = 8
MESSAGE_BYTES_MAX = 48 * 1024  # a line between two agents is at most 64 KiB
NAME_CHARACTERS_MAX, HARDWARE_CHARACTERS_MAX, RANKS_SHOWN = 60, 32, 4


class ModuleEnd(NamedTuple):
    """A DDP module at the end of one rank, or of several ranks of a node if their modules are identical."""

    ranks: tuple[int, ...]
    group: str
    """Ranks of the module's process group, as text."""
    number: int
    """Number of the module in its group, from 0, in order of construction."""
    digest: str
    """Digest of parameter names and shapes; only modules with equal digests are compared."""
    sums: str
    """SUM_CHARACTERS per parameter."""
    dtypes: tuple[str, ...]
    """One per parameter, or a single one for all."""
    passes: Mapping[tuple[int, int], str]
    """(backward passes made, collectives begun in its group) -> checksum of the parameters then."""
    hardware: str
    names: tuple[str, ...] = ()
    """Names of the module's parameters; empty if another module with this digest has them."""


class NodeEnd(NamedTuple):
    """The results of the ranks of one node."""

    alone: bool = False
    """True if every rank has trained, and no rank formed a process group with another."""
    modules: tuple[ModuleEnd, ...] = ()
    hidden: tuple[int, str, str] | None = None
    """Rank, place and exception of the first failure that an exit with 0 has hidden."""


def node_end(written: Mapping[int, Any]) -> NodeEnd:
    """Combine the results of a node's ranks. written: by rank, the JSON of its file; None if there is none."""
    alone, modules, hidden = bool(written), dict[tuple[Any, ...], ModuleEnd](), None
    for rank, document in sorted(written.items()):
        if not isinstance(document, Mapping):
            alone = False
            continue
        alone = alone and document.get("alone") is True
        found = document.get("hidden")
        hidden = hidden or _hidden([rank, *found] if isinstance(found, list) else None)
        for module in _modules(document.get("modules"), (rank,)):
            same = (*module[1:6], tuple(module.passes.items()), module.hardware)
            known = modules.get(same)
            modules[same] = module if known is None else known._replace(ranks=(*known.ranks, rank))
    return NodeEnd(alone, tuple(modules.values()), hidden)


def as_message(end: NodeEnd) -> dict[str, Any]:
    """Return the results as a message of one line, with as many modules and then parameter names as fit."""
    message: dict[str, Any] = {"alone": end.alone, "modules": [], "hidden": end.hidden}
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
    """Return the results of a node from its agent's message."""
    if not isinstance(message, Mapping):
        return NodeEnd()
    hidden = _hidden(message.get("hidden"))
    return NodeEnd(message.get("alone") is True, tuple(_modules(message.get("modules"), None)), hidden)


def findings(ends: Iterable[NodeEnd], world_size: int) -> list[NamedFinding]:
    """Return reasons to doubt the success of all ranks."""
    ends = list(ends)
    if hidden := min((end.hidden for end in ends if end.hidden is not None), default=None):
        return [hidden_failure(*hidden)]
    if world_size > 1 and ends and all(end.alone for end in ends):
        return [trained_alone(world_size)]
    groups: dict[tuple[str, int, str], list[ModuleEnd]] = {}
    for module in (module for end in ends for module in end.modules):
        groups.setdefault((module.group, module.number, module.digest), []).append(module)
    found = (_difference(sorted(modules, key=lambda module: module.ranks)) for modules in groups.values())
    return [finding for finding in found if finding is not None][:FINDINGS_MAX]


def _difference(modules: Sequence[ModuleEnd]) -> NamedFinding | None:
    """Compare one module on all ranks with that of the first rank. Return None if there is no proved difference."""
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
    """Return the first backward pass that both recorded with different parameters; None if there is none.

    The last common pass is ignored if one rank made more passes. A rank may make a pass alone, for example to evaluate
    averaged weights, and record it under the key of the other ranks' next pass.
    """
    both = one.passes.keys() & other.passes.keys()
    if both and not max(both) == max(one.passes) == max(other.passes):
        both = both - {max(both)}
    return min((key[0] for key in both if one.passes[key] != other.passes[key]), default=None)


def _first_parameter(one: ModuleEnd, other: ModuleEnd) -> int:
    """Return the index of the first parameter that differs between two ranks."""
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
    """Return a text that names the processors or GPUs if they differ, because they may round differently; else ""."""
    other = next((module for module in drifted if module.hardware != first.hardware), None)
    if other is None or not first.hardware or not other.hardware:
        return ""
    one, two = (module.hardware[:HARDWARE_CHARACTERS_MAX].strip() for module in (first, other))
    return f"; rank {first.ranks[0]} ran on {one}, rank {other.ranks[0]} on {two}"


def _ranks(ranks: Sequence[int]) -> str:
    """Return for example `rank 1`, `ranks 1 and 2`, or `ranks 1, 2, 3, 4 and 3 others`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    hidden = len(ranks) - RANKS_SHOWN
    *shown, last = [*map(str, ranks)] if hidden <= 0 else [*map(str, ranks[:RANKS_SHOWN]), f"{hidden} others"]
    return f"ranks {', '.join(shown)} and {last}"


def _hidden(written: Any) -> tuple[int, str, str] | None:
    is_whole = isinstance(written, list | tuple) and [*map(type, written)] == [int, str, str]
    return (written[0], written[1], written[2]) if is_whole else None


def _modules(written: Any, ranks: tuple[int, ...] | None) -> list[ModuleEnd]:
    """Return the well-formed modules of a file or message. ranks: of all modules; None if each names its own."""
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
