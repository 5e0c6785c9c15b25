"""Load the newest state that any node has in memory. A rank that has lost the state gets it from another rank.

All ranks must call `find` and then `fetch`, because both use collectives. If one rank has an error, all ranks load from
the folder. If one rank lacks the state, `fetch` broadcasts to all ranks, also to those that have it.
"""

import contextlib
import json
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ddpjob import process
from ddpjob.checkpoint.in_memory.kept import BUFFERS, merged
from ddpjob.checkpoint.in_memory.shared import Shared, write_record
from ddpjob.checkpoint.in_memory.slots import PLACE
from ddpjob.checkpoint.state import packed, random_states
from ddpjob.checkpoint.state.alike import digest
from ddpjob.checkpoint.state.state_dicts import misfit, unwrapped
from ddpjob.errors import StateError
from ddpjob.group import gather
from ddpjob_core import memory
from ddpjob_core.memory import FoundState, Held, Mark, Proof, Version

_NUMBERS = int, float, bool, str, type(None)
_KEYS = memory.NAMED, memory.MOVED, memory.LATER, memory.AFTER, memory.ASSUMED


def find(shared: Shared | None, rank: int, world_size: int, present: Version) -> FoundState | None:
    """Describe the newest complete state in memory; all ranks get the same answer. shared: None if this node has no
    shared memory.

    Nodes also agree on COPIES (parameters change after the end of a step), because all ranks copy at the same steps.
    Rank 0's node has priority, because rank 0 may be the only one that calls save. A node that lacks the loaded state
    copies PROVEN (only optimizers change parameters) from a node that has it, so that its ranks repeat no proof.
    """
    own: list[Any] = [None, None, None, 0, 0, 0]
    if shared is not None:
        node = (shared.node[cell] for cell in (memory.COPIES, memory.PROVEN, memory.MISCOUNTED))
        own = [shared.held(), shared.proof(), shared.mark(), *node]
    states, sums, steps, copies, proven, miscounted = zip(*_exchanged(own, world_size), strict=True)
    held = [one and Held(Version(*one[0]), *one[1:]) for one in states]
    proofs, marks = [one and Proof(*one) for one in sums], [one and Mark(*one) for one in steps]
    if shared is not None:
        shared.node[memory.COPIES] = copies[0] or max(copies)
        shared.node[memory.MISCOUNTED] = max(miscounted)
    found = memory.newest(held, present, proofs, marks)
    if isinstance(found, FoundState):
        if shared is not None and rank not in found.ranks:
            shared.node[memory.PROVEN] = max(proven[holder] for holder in found.ranks)
        return found
    if found and rank == 0:
        process.log(f"the state in memory is not used: {found}")
    elif rank == 0 and (last := memory.last_known(marks, present)):
        process.log(f"no rank has left the state of step {last} in memory")
    return None


class Fetched(NamedTuple):
    """A state that was loaded from memory."""

    state: dict[str, Any]
    """Loaded values, by the names that were passed to `save`."""
    by_value: bool
    """True if the script saved plain values, which belong to no object."""
    seeded: list[int]
    """Ranks that were seeded, because their random states are lost."""
    resized: bool
    """True if the number of ranks has changed, so all ranks are seeded."""


class _Numbering(NamedTuple):
    """Which former rank's slots each present rank uses after a restart, also if the number of ranks has changed."""

    of: list[tuple[int, int]]
    """For each present rank: the former rank that wrote its slots, and the number of ranks at that time."""
    counts: list[bool]
    former: int
    """Number of ranks when the used slots were written."""

    @property
    def resized(self) -> bool:
        """True if the number of ranks has changed, so no present rank continues a former one."""
        return self.former != len(self.of)


def _numbering(of: list[tuple[int, int]]) -> _Numbering:
    """of: for each present rank, the former rank that wrote its slots and the number of ranks then; (rank, 0) if its
    slots are empty."""
    now = len(of)
    if any(size == now for _, size in of) or not any(size for _, size in of):
        return _Numbering(of, [each == (rank, now) for rank, each in enumerate(of)], now)
    former = max(size for _, size in of)
    return _Numbering(of, [size == former for _, size in of], former)


def fetch(
    shared: Shared | None,
    found: FoundState,
    rank: int,
    world_size: int,
    objects: Mapping[str, Any],
    names_in_folder: Callable[[], Iterable[str]],
) -> Fetched | None:
    """Return the found state; None on all ranks if one of them cannot use it. Restores this rank's random states. Seeds
    the rank if its random states are lost, or if the number of ranks has changed.

    names_in_folder: called on rank 0 if nothing is left of what it kept, because rank 0 may save more than the others.
    """
    version = found.held.version
    own, early, boundaries, numbering = _that_count(shared, found.held, rank, world_size)
    rng = None if numbering.resized else (own or early or {"rng": None})["rng"]
    made, gives_up = (own or early or {"made": 0})["made"], (own or early or {"gives_up": False})["gives_up"]
    rows = _exchanged([own is not None, early is not None, rng is not None, made, gives_up], world_size)
    trouble = [why] if (why := _why_not_early(rows, version.step)) else []
    has_early = own is None and early is not None and not numbering.resized
    lefts = _of_all(memory.Left(own is not None, boundaries, [*_flat(early["small"])] if has_early else ()), numbering)
    if why := memory.mixed_up(lefts, version.step, resized=numbering.resized):
        trouble.append(why)
    source = next((number for number, row in enumerate(rows) if row[0]), None)
    # Random states that rank 0 gives up, too, are named in its log. A rank that takes over slots of another is seeded.
    is_named = (early is not None and rows[0][4]) or found.held.every > memory.EVERY_MAX
    has_left = shared is not None and shared.has_left(version)
    was_here = shared is not None and (rank in found.ranks or (shared.was_here(version) and not found.held.every))
    lacks = numbering.counts[rank] and not is_named if has_left else was_here
    if why := _why_not_random(shared, version, own, source, lacks=lacks and rng is None and not numbering.resized):
        trouble.append(why)
    large = _tried(trouble, lambda: _large(shared, found, rank, world_size))
    on_device = {} if large is None else large.pop(BUFFERS, {})  # copies from a GPU have buffers among the large values
    if own is not None:
        own["small"] |= on_device
    first: Any = None if source is None else _tried(trouble, lambda: _from_rank(own, source, rank, world_size))
    of_0 = _tried(trouble, lambda: _from_rank(own or early, 0, rank, world_size)) if source and any(rows[0]) else None
    if numbering.resized:
        own = early = None
    names = {*objects, *names_in_folder()} if rank == 0 and not lefts[0].boundaries else objects.keys()
    state = _tried(trouble, lambda: _checked(large, _small(own, early, first, of_0), found, objects, names))
    troubled = [number for number, row in enumerate(_exchanged(bool(trouble), world_size)) if row]
    if troubled:
        if shared is not None:
            shared.cells[memory.LOADED_STEP] = 0
        if rank == troubled[0]:
            process.log(f"step {version.step} in memory is not used: rank {rank}: {trouble[0]}")
        return None
    if rng is not None:
        random_states.set_to(random_states.expanded(rng))
    else:
        random_states.seed(random_states.expanded(first["rng"]), version.step, rank)
    seeded = [number for number, row in enumerate(rows) if not row[2]]
    return Fetched(state, first["by_value"], seeded, numbering.resized)


def _why_not_early(rows: list[list[Any]], step: int) -> str:
    """Return why a rank's slot EARLY is not of the step that the others have completed; "" if it is. A rank that calls
    should_stop() less often than the others has written it again in a later step."""
    made = [row[3] for row in rows if row[0]]
    late = [rank for rank, row in enumerate(rows) if row[1] and not row[0] and made and row[3] >= min(made) > 0]
    return f"rank {late[0]} does not call should_stop() after each step, as others do after step {step}" if late else ""


def _why_not_random(shared: Shared | None, version: Version, own: Any, source: int | None, *, lacks: bool) -> str:
    """Return why the state cannot be used without the lost random states; "" if it can be used.

    own: values of this rank's slot. source: first rank that has written a slot. lacks: True if this rank should have
    written its random states, but has not.
    """
    if shared is not None and own is not None and shared.cells[memory.LOOSE] == version.step:
        return (
            f"the script may have drawn random numbers, or changed something, after should_stop({version.step}), so "
            f"what memory has of this rank is out of date"
        )
    if source is None:
        return (
            "steps were made after it, and all ranks were lost before one had written its state; the random states of "
            "this step are gone"
        )
    return (
        "this rank has not written its random states of this step: it was lost before, draws random numbers after its "
        "gradients, or does not call should_stop(), keep() or save() after each step"
        if lacks
        else ""
    )


def _small(own: Any, early: Any, first: Any, of_0: Any) -> dict[str, Any]:
    """Return this rank's buffers and settings. If they are lost, return those of the first rank that still has its own.

    Buffers then come from rank 0, like DistributedDataParallel's broadcast, except those that this rank's forward pass
    has changed. Raise StateError if the rank had other buffers than rank 0, and has lost them.
    """
    small: dict[str, Any] = {**(first if own is None else own)["small"]}
    place = small.pop(PLACE, {"of_0": [], "own": [], "models": []})
    if own is None:
        left = {} if early is None else early["small"]
        if lost := [name for name in place["own"] if small.get(name) and not left.get(name)]:
            raise StateError(
                f"{', '.join(lost)}: each rank had buffers of its own, and those of this rank are lost, because it was "
                f"killed before it called should_stop, keep or save, or because the number of ranks has changed"
            )
        for others, names in (({} if of_0 is None else of_0["small"], place["of_0"]), (left, place["models"])):
            small |= {name: {**small[name], **others[name]} for name in names if name in others}
    return small


def _tried(trouble: list[str], work: Callable[[], Any]) -> Any:
    """Return work(); None after an error, which is added to `trouble`: all ranks must know it before one raises. After
    an earlier error work() is called, too, because the other ranks wait for it."""
    try:
        found = work()
    except (StateError, OSError, KeyError, TypeError) as error:
        trouble.append(str(error) or type(error).__name__)
    return None if trouble else found


def _checked(
    large: Any, small: Any, found: FoundState, objects: Mapping[str, Any], names: Collection[str]
) -> dict[str, Any]:
    state = merged(large, small)
    threads = packed.threads(process.number("LOCAL_WORLD_SIZE", 1), found.held.size)
    if packed.total(packed.tensors_of(large), threads) != found.held.total:
        raise StateError("its checksum differs from the one that was written")
    if missing := sorted(set(names) - state.keys()):
        raise StateError(f"it has no {', '.join(missing)}")
    if problem := misfit(objects, state):
        raise StateError(problem)
    return {
        name: packed.own(value, threads) if name in large and not _is_copied_from(objects.get(name)) else value
        for name, value in state.items()
    }


def _that_count(
    shared: Shared | None, held: Held, rank: int, world_size: int
) -> tuple[Any, Any, dict[int, Any], _Numbering]:
    """Return the values of this rank's slot and of EARLY, hashes of its slots by step, and whose slots a restart uses.
    The values are None, and there are no hashes, if another rank wrote these slots. EARLY does not belong to a copy."""
    own, early, version = _slots(shared, held.version)
    early = None if held.every else early
    boundaries: dict[int, Any] = {}
    of = (own or early or {"of": (rank, 0)})["of"]
    for slot in (*range(memory.EARLY), *memory.COPY_SLOTS):
        if shared is None:
            break
        at = shared.slot_version(slot)
        with contextlib.suppress(StateError, OSError, KeyError):
            value = shared.read_slot(slot) if at is not None and at[:2] == version[:2] else None
            if at is not None and value is not None:
                boundaries[at.step], of = _in_hashes(value["small"]), value["of"]
    numbering = _numbering([(each[0], each[1]) for each in _exchanged(of, world_size)])
    return (own, early, boundaries, numbering) if numbering.counts[rank] else (None, None, {}, numbering)


def _of_all(own: memory.Left, numbering: _Numbering) -> list[memory.Left]:
    """Return what each rank has left in its slots, by the rank's number in the former group."""
    exchanged = _exchanged([own.own, list(own.boundaries.items()), list(own.early)], len(numbering.of))
    rows = [memory.Left(is_own, dict(found), early) for is_own, found, early in exchanged]
    if not numbering.resized:
        return rows
    left = {of[0]: row for of, row, counts in zip(numbering.of, rows, numbering.counts, strict=True) if counts}
    return [left.get(former, memory.Left(False, {})) for former in range(numbering.former)]


def _in_hashes(small: dict[str, Any]) -> dict[str, Any]:
    """Hash the small values of a boundary, to compare ranks. Left out: buffers of models in DistributedDataParallel,
    and numbers such as the last loss, which may differ between ranks."""
    place = small.pop(PLACE)
    wrapped = {*place["of_0"], *place["own"]}
    buffers = _flat({name: small[name] for name in place["models"] if name in small and name not in wrapped})
    others = {name: value for name, value in small.items() if name not in place["models"]}
    digests = {name: digest(value) for name, value in {**others, **buffers}.items() if not isinstance(value, _NUMBERS)}
    return {
        **{key: place[key] for key in _KEYS},
        memory.SAMPLE: zlib.crc32(place[memory.SAMPLE]),
        memory.KNOWN: [*place[memory.KNOWN], *(buffers.keys() - place["varied"])],
        memory.OBJECTS: digests,
    }


def _flat(small: Mapping[str, Any]) -> dict[str, Any]:
    """Return the buffers of these models, each under one name."""
    of_models = {name: its for name, its in small.items() if isinstance(its, dict)}
    return {f"{key} of {name}": value for name, its in of_models.items() for key, value in its.items()}


def _is_copied_from(target: Any) -> bool:
    """True if this object copies the tensors in `load_state_dict`, like torch's modules
    (torch/nn/modules/module.py:2495). Then the caller need not copy them first.

    An optimizer on a CPU uses the given tensors (torch/optim/optimizer.py:801: `.to()` returns the same tensor). The
    next write to shared memory would change them. Seen with torch 2.13.0.
    """
    model = unwrapped(target)
    return (
        isinstance(model, torch.nn.Module)
        and getattr(model.load_state_dict, "__func__", None) is torch.nn.Module.load_state_dict
        and all(
            str(getattr(module._load_from_state_dict, "__module__", "")).startswith("torch.nn.modules.")
            and not module._load_state_dict_pre_hooks
            and not module._load_state_dict_post_hooks
            for module in model.modules()
        )
    )


def _slots(shared: Shared | None, version: Version) -> tuple[Any, Any, Version]:
    """Return the values of this rank's slot of that version, those of EARLY before that step, and the version of both.

    If the rank died before it wrote a slot, the slot of an earlier generation that loaded this state is used as EARLY.
    """
    if shared is None:
        return None, None, version
    found = _left(shared, version)
    step, first, last = (shared.cells[cell] for cell in (memory.LOADED_STEP, memory.LOADED_FROM, memory.LOADED_BY))
    if found == (None, None) and step == version.step and first < version.generation <= last:
        version = version._replace(generation=first)
        own, early = _left(shared, version)
        found = None, own or early
    if found != (None, None):
        write_record(shared.cells, memory.LOADED_STEP, version.step, version.generation, shared.generation)
    return *found, version


def _left(shared: Shared, version: Version) -> tuple[Any, Any]:
    """Return the values of this rank's slot of that version, and those of EARLY before that step. None for a slot that
    is empty or has another version."""
    boundaries = [shared.slot_version(slot) for slot in range(memory.EARLY)]
    own = [slot for slot in (*range(memory.EARLY), *memory.COPY_SLOTS) if shared.slot_version(slot) == version]
    early = [memory.EARLY] if memory.leads_to(shared.slot_version(memory.EARLY), boundaries, version) else []
    found: list[Any] = []
    for slots in (own, early):
        value = None
        for slot in slots:
            with contextlib.suppress(StateError, OSError):
                value = shared.read_slot(slot)
        found.append(value)
    return found[0], found[1]


def _exchanged(own: Any, world_size: int) -> list[Any]:
    """Exchange a JSON value between all ranks; return all values, by rank."""
    text = json.dumps(own)
    return [json.loads(row) for row in (gather.texts(text) if world_size > 1 else [text])]


def _large(shared: Shared | None, found: FoundState, rank: int, world_size: int) -> Any:
    """Return parameters and optimizer state. If a rank lacks them, the first rank that has them broadcasts them;
    otherwise they are not copied. Collective: every rank calls it. Raises StateError."""
    size, source = found.held.size, found.ranks[0]
    own: torch.Tensor | None = None
    if rank in found.ranks:
        assert shared is not None, "it was found here"
        with contextlib.suppress(OSError):
            own = shared.newest(size)
    if len(found.ranks) < world_size:
        if rank == source and own is None:
            own = torch.zeros(size, dtype=torch.uint8, device="cpu")  # an invalid state, which all ranks will reject
        memory = packed.reserved(size) if own is None else own
        gather.broadcast(memory, source, is_written=own is None)
        return packed.in_place(memory)
    if own is None:
        raise StateError("it cannot be read")
    return packed.in_place(own)


def _from_rank(value: Any, source: int, rank: int, world_size: int) -> Any:
    """Return a value that rank `source` broadcasts."""
    if world_size == 1:
        return value
    body = packed.dumps(value) if rank == source else b""
    size = _exchanged(len(body), world_size)[source]
    memory = torch.frombuffer(bytearray(body) if rank == source else bytearray(size), dtype=torch.uint8)
    gather.broadcast(memory, source, is_written=rank != source)
    return packed.loads(memory.numpy().tobytes())
