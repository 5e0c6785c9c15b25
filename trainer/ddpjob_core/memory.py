"""The memory in which a training's state outlives its ranks: the layout, and the rules for which contents count.

One anonymous file per agent (`ddprun/memory.py` owns it, `in_memory/memory.py` in the ranks writes it):

    page 0                  cells of 8 bytes for the node, NODE_CELLS
    page 1 + local rank     cells of that rank, RANK_CELLS
    slots of each rank      SECTION_BYTES each, with its small objects: at its last two boundaries, before the next
                            step, and at its last three copies
    the area                the complete state; a surviving rank writes it after a failure
    the other area          used only if the state is copied (`copies.py`). The areas are written alternately, also
                            after a failure, so that an interrupted write leaves the previous state intact

The cell that marks data as complete is written last, and is 0 until then. So partial data are ignored. A boundary is a
call of `should_stop(step)`, `keep` or `save` in the script: there the state of that step is complete.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal, NamedTuple

PAGE_BYTES = 4096
SLOTS = 6
EARLY = 2
"""The third slot: random states and buffers before the optimizer's step."""
COPY_SLOTS = range(3, SLOTS)
"""Three slots, because a rank may reach the next copy before the writer reports that the last one is complete."""
AREAS = 2
OTHER_AREA_OFFSET = 1 << 46
"""Distance between the areas. It costs addresses only: the file uses memory only for pages that were written."""
SECTION_BYTES = 64 << 20
"""Reserved addresses, not memory: a slot uses memory only for pages that were written."""

EVERY_MAX = 1 << 20
"""Stands for an unknown number of steps between two copies, if the script's calls decide when a copy is made."""
EVERY_SAVED = EVERY_MAX + 1
"""The same for a copy made for `save` without a folder: it may lack random states of ranks that had not called it."""
(GENERATION, SINCE, PROVEN, COPIES, MISCOUNTED, FURTHEST, WROTE, FIRST_AREA) = range(8)
RESERVED, AREA_STEP, AREA_GENERATION, AREA_LOADS, AREA_BYTES, AREA_SUM, AREA_ASSUMED, AREA_EVERY, AREA_CELLS = range(9)
NODE_CELLS = FIRST_AREA + AREAS * AREA_CELLS
"""Cells of the node.

GENERATION      of the ranks that are running here; only they write
SINCE           first generation from which on the node has taken part in each one
PROVEN          1 + the generation whose ranks have proved that nothing large changes between a boundary and the next
                step; 0: none. One rank's proof is enough, because equal sums show that all ranks hold the same
COPIES          CHANGED: a rank has seen that parameters change between a boundary and the next step, so the state is
                copied; PLACED: in addition, `should_stop` finds the same state as `save`; SHOWN: `keep` does;
                MISPLACED: neither does
MISCOUNTED      1: `should_stop` and `save` count differently, so no state is kept until `save` has passed it
FURTHEST        highest CLOCK on the node of the rank that failed, sent by the agent there; 0: not known
WROTE           grows with each piece that a survivor writes; the agent waits while it grows

Cells of each area, from FIRST_AREA on (`area_cell`).

RESERVED        bytes of the area that are reserved
AREA_STEP       step of the state in the area, written last; 0: there is none
AREA_GENERATION generation that wrote the state
AREA_LOADS      number of times that the state was loaded without a new step after it
AREA_BYTES, AREA_SUM  length of the state, and the sum of its bits
AREA_ASSUMED    1: the state is assumed (see Held)
AREA_EVERY      maximum number of steps until the next copy; 0: the state was written after a failure
"""
CHANGED, PLACED, MISPLACED, SHOWN = 1, 2, 3, 4

PID, CLOCK, ANSWER, PROOF_STEP, PROOF_GENERATION, PROOF_SUM, FIRST_SLOT = range(7)
SLOT_STEP, SLOT_GENERATION, SLOT_BYTES = range(3)
MARK_STEP, MARK_GENERATION, MARK_BEFORE = range(FIRST_SLOT + 3 * SLOTS, FIRST_SLOT + 3 * SLOTS + 3)
LOADED_STEP, LOADED_FROM, LOADED_BY, LOOSE, RANK_CELLS = range(MARK_BEFORE + 1, MARK_BEFORE + 6)
"""Cells of a rank.

PID             of the process that takes part; 0: none
CLOCK           2 × step at a boundary, 1 more after the next optimizer.step(); it only grows within a generation
ANSWER          after a failure, one of the answers below
PROOF_STEP, PROOF_GENERATION, PROOF_SUM  of a boundary; the sum of the bits of parameters and optimizer state
SLOT_STEP, SLOT_GENERATION, SLOT_BYTES  of each slot; SLOT_STEP is written last, and 0 if the slot is empty
MARK_STEP, MARK_GENERATION, MARK_BEFORE  its last two boundaries, if the rank does not write a slot at each boundary
LOADED_STEP, LOADED_FROM, LOADED_BY  a loaded step, the generation that wrote the state, and the last generation that
                loaded it. A rank that dies while loading leaves the slots of LOADED_FROM, which are of the same state
LOOSE           step of its last boundary, if the rank then draws random numbers or changes something else that a folder
                would have; else 0
"""
NONE, SAVED, UNABLE = range(3)

LOADS_MAX = 3
"""A state that was loaded this often without a new step is not loaded again, because it may cause the failures."""
LOADS_ASSUMED_MAX = 1
"""LOADS_MAX for an assumed state: if it lacks an object that the script needs, the script fails at once."""
SECONDS_LEAST, BYTES_A_SECOND = 0.5, 500e6
SECONDS_MORE = 10.0
"""Added for ranks that are held up while they write, because they get no processor or wait for a disk."""
MARGIN = 1.1
SLACK = 1.05
"""Factor for the size of an area: optimizers create a parameter's state when it first has a gradient."""


PROVE_EVERY, PROVE_BYTES = 128, 4 << 20
"""Steps between two proofs for a state of up to PROVE_BYTES. A proof shows that nothing large changes between a
boundary and the next step. It reads the whole state twice, so larger states are proved less often.
"""


class Version(NamedTuple):
    """Identifies a state. A larger version is newer: a later generation resumed from the newest state at its start."""

    attempt: int
    generation: int
    """`numbered`, as in all cells and records."""
    step: int


def numbered(turn: int, generation: int) -> int:
    """Return the number of a generation in the attempt. turn: number of its leader, see `Agent.turn`.

    Two leaders may count the same generation: an old leader that is cut off counts on, and a new one may not know the
    last generation. The later leader's is newer: a snapshot folder refuses the old one's writes too.
    """
    return (turn << 32) + generation


def is_next(generation: int, before: int) -> bool:
    """True if the generation is the next one after `before`, perhaps under another leader."""
    return generation % (1 << 32) == before % (1 << 32) + 1


class Held(NamedTuple):
    """A complete state in the memory of a rank's node."""

    version: Version
    loads: int
    size: int
    """In bytes."""
    total: int
    """Checksum of the state, equal on all nodes that have it."""
    assumed: bool = False
    """True if it contains the objects passed to `load`, because the script has not called `save` yet."""
    every: int = 0
    """For a copy: the maximum number of steps until the next one; 0 if it was written after a failure."""


class Proof(NamedTuple):
    """Sum of a rank's parameters at a step; equal sums prove that the ranks are replicas."""

    generation: int
    step: int
    total: int


class Mark(NamedTuple):
    """Steps of a rank's last two boundaries (calls of should_stop, keep or save) since all ranks were started."""

    generation: int
    step: int
    before: int


class FoundState(NamedTuple):
    """The newest complete state, and the ranks whose nodes have it."""

    held: Held
    ranks: tuple[int, ...]


def newest(
    held: Sequence[Held | None],
    present: Version,
    proofs: Sequence[Proof | None] = (),
    marks: Sequence[Mark | None] = (),
) -> FoundState | str:
    """Return the newest complete state in the nodes' memory; otherwise the reason, or "" if no node has a state.

    present: version of the generation that loads, with step 0; only older states are from this job's past. marks: last
    boundaries of each rank. Ranks step together, so they are at most one boundary apart, unless they count steps
    differently. Then the step of the state is unknown.
    """
    known = _that_count(held, present)
    if not any(known):
        return ""
    best = max((one for one in known if one is not None), key=lambda one: one.version)
    ranks = tuple(rank for rank, one in enumerate(known) if one is not None and one.version == best.version)
    if len({(held[rank].size, held[rank].total) for rank in ranks}) > 1:  # type: ignore[union-attr]
        return f"the nodes of ranks {', '.join(map(str, ranks))} hold different states of step {best.version.step}"
    if (differ := _not_replicas(proofs)) is not None:
        return f"rank {differ} did not hold the same parameters as the others"
    for rank, mark in enumerate(marks):
        if mark is not None and _is_apart(mark, best):
            return f"the state is of step {best.version.step}, and rank {rank} was at step {mark.step}"
    most = LOADS_ASSUMED_MAX if best.assumed else LOADS_MAX
    version = best.version
    stepped = (mark.generation >= version.generation and mark.step > version.step for mark in marks if mark is not None)
    if best.loads >= most and not any(stepped):
        return f"step {best.version.step} was loaded before, and no step after it is known"
    return FoundState(best, ranks)


def _that_count(held: Sequence[Held | None], present: Version) -> list[Held | None]:
    """Return the states that may be loaded, by rank. An assumed state (the objects passed to `load`) is left out if a
    rank of the same generation has saved: the assumed state may lack objects of that save."""
    past = [one if one is not None and one.version < present else None for one in held]
    named = {one.version[:2] for one in past if one is not None and not one.assumed}
    return [None if one is not None and one.assumed and one.version[:2] in named else one for one in past]


def _is_apart(mark: Mark, held: Held) -> bool:
    """True if this rank is too many steps away from the state, because it counts steps differently.

    A rank may be up to two copies ahead of the state: the next copy may have been interrupted.
    """
    if mark.generation != held.version.generation:
        return False
    ahead, stride = mark.step - held.version.step, max(1, mark.step - mark.before)
    if held.every >= EVERY_MAX and ahead < 0:
        return False  # only saved states are copied, and the last save may be any number of steps ago
    return not -stride <= ahead <= stride + 2 * held.every


def _not_replicas(proofs: Sequence[Proof | None]) -> int | None:
    """Return a rank whose checksum differs from another rank's for the same step and generation; None if all are
    equal."""
    seen: dict[tuple[int, int], int] = {}
    for rank, proof in enumerate(proofs):
        if proof is not None and seen.setdefault((proof.generation, proof.step), proof.total) != proof.total:
            return rank
    return None


class Left(NamedTuple):
    """Hashes of the small objects that a rank has left in memory at its last boundaries."""

    own: bool
    """True if the rank has its own small state of the loaded step; otherwise it takes another rank's."""
    boundaries: dict[int, dict[str, Any]]
    """By step: hashes of its small objects and of a sample of parameters, and what `Places` knows of that step."""
    early: Collection[str] = ()
    """Names of small objects in its slot EARLY: its own ones are not lost."""


SAMPLE, OBJECTS, NAMED, MOVED, KNOWN, LATER, AFTER = "sample", "objects", "named", "moved", "known", "later", "after"
ASSUMED = "assumed"
"""NAMED: who recorded the objects: 0 should_stop(), 1 keep(), 2 save(). KNOWN: names of objects that are equal on all
ranks by their nature. LATER: names of random states and buffers that the rank is known to change after a boundary.
AFTER: those that it has changed for the first time between its gradients and this boundary. ASSUMED: True if the rank
has not called keep() or save() yet, so that the objects are those of load()."""


def mixed_up(rows: Sequence[Left], step: int, *, resized: bool = False) -> str:
    """Return why ranks cannot continue from the objects that they have left in memory; "" if they can.

    A rank whose own objects are lost takes another rank's, which must be proved equal. All objects must come from the
    same call (should_stop, keep or save). resized: the number of ranks has changed, so all take others' objects.
    """
    common = {number for row in rows for number in row.boundaries}
    for number in sorted(common):
        found = {rank: row.boundaries[number] for rank, row in enumerate(rows) if number in row.boundaries}
        samples = {rank: one[SAMPLE] for rank, one in found.items() if one[SAMPLE]}
        if len(set(samples.values())) > 1:
            return f"ranks {_listed(samples)} did not hold the same parameters at step {number}"
    present = [row.boundaries[step] for row in rows if row.own and step in row.boundaries]
    # hashes of earlier boundaries, for ranks that were lost before their boundary of this step
    late = [one for row in rows if not row.own for one in row.boundaries.values()]
    of_0 = rows[0].boundaries.values()  # scripts that save on rank 0 only have ASSUMED on the other ranks for ever
    if not rows[0].own and of_0 and all(one[ASSUMED] for one in of_0) and not all(one[ASSUMED] for one in present):
        return f"rank 0 was lost before its first keep() or save(), and others had called it at step {step}"
    missed = {name for one in present for name in one[LATER] if late and name in one[MOVED]}
    if late and (after := {name for one in present for name in one[AFTER]}):
        return f"{min(after)} changed after the gradients of step {step}, and a rank was lost before that change"
    if missed := missed.union(*(one[LATER] for one in late)):
        return f"{min(missed)} may change after should_stop({step}), and a rank was lost before that change"
    if name := _of_two_moments(present):
        return f"{name} changed between should_stop({step}) and save({step}), and not all ranks had reached that save"
    for rank, row in enumerate(rows):
        gone = _names(row.boundaries.values()) - _names(present) if present and not row.own else ()
        if (resized or not row.own) and (name := _unproved(rank, rows) or min(gone, default="")):
            why = "the number of ranks has changed" if row.own else f"that of rank {rank} is lost"
            return f"{name}: each rank may have its own, and {why}"
    return ""


def _of_two_moments(present: Sequence[dict[str, Any]]) -> str:
    """Return an object that changed between should_stop() or keep() and save(), if ranks have recorded it at different
    calls; "" if there is none. A rank that calls only save() does not see such a change.
    """
    if len({one[NAMED] for one in present}) < 2:
        return ""
    changed, known = ({name for one in present for name in one[key]} for key in (MOVED, KNOWN))
    differ = [name for name in changed | known if _differs(name, present)]
    return min([*differ, *(changed - _names(present))], default="")


def _names(found: Iterable[dict[str, Any]]) -> set[str]:
    return {name for one in found for name in one[OBJECTS]}


def _differs(name: str, found: Sequence[dict[str, Any]]) -> bool:
    return len({one[OBJECTS][name] for one in found if name in one[OBJECTS]}) > 1


def _unproved(rank: int, rows: Sequence[Left]) -> str:
    """Return the name of an object that may differ between this rank and others; "" if there is none."""
    steps = {number for row in rows for number in row.boundaries}
    all_found = [one for row in rows for one in row.boundaries.values()]
    known = {name for one in all_found for name in one[KNOWN]}
    known -= {name for one in all_found for name in one[OBJECTS] if name not in one[KNOWN]}
    for name in sorted(_names(all_found).difference(rows[rank].early)):
        found = [[row.boundaries[number] for row in rows if number in row.boundaries] for number in steps]
        if any(_differs(name, one) for one in found):
            return name
        was_there = any(
            number in rows[rank].boundaries and sum(number in row.boundaries for row in rows) > 1 for number in steps
        )
        if name not in known and not was_there:
            return name
    return ""


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


def last_known(marks: Sequence[Mark | None], present: Version) -> int:
    """Return the last step that a rank of an earlier generation has recorded; 0 if there is none."""
    past = [mark[:2] for mark in marks if mark is not None and mark.generation < present.generation]
    return max(past, default=(0, 0))[1]


def leads_to(early: Version | None, boundaries: Sequence[Version | None], version: Version) -> bool:
    """True if the slot EARLY of a rank belongs to the step that made this version.

    early: version in that slot. Its step is the rank's last boundary + 1; the real step of the next boundary is not
    known yet. boundaries: those for which the rank has left a slot. Other ranks are at most one boundary ahead.
    """
    if early is None or early[:2] != version[:2] or early.step > version.step:
        return False
    return not any(one is not None and one[:2] == early[:2] and one.step >= early.step for one in boundaries)


def is_newer(folder: Version | None, held: Held) -> bool:
    """True if a restart loads the state in the folder, and not the state in memory.

    If a rank has saved, an assumed state is not used, because it may lack saved objects. folder: None if the folder
    belongs to another job or to an unknown one.
    """
    if folder is None:
        return False
    return folder > held.version or (held.assumed and folder[:2] == held.version[:2])


def proves_again(step: int, size: int) -> bool:
    """True if ranks checksum their state after this step, to prove that only optimizers change it. size: its bytes."""
    every = PROVE_EVERY << max(0, (size // PROVE_BYTES).bit_length())
    return step % every == 0


def is_clean(clock: int) -> bool:
    """True if the optimizer has not stepped since the last boundary."""
    return clock > 0 and clock % 2 == 0


def step_of(clock: int) -> int:
    """Return the step of the last boundary."""
    return clock // 2


def turn(own: int, living: Sequence[int], gone: Sequence[int] = ()) -> Literal["write", "wait", "stay"]:
    """Decide if a rank whose last step is complete writes its state, or waits for a newer state.

    stay: not decided yet. The rank does not begin its next step, and calls this again.

    own: clock of this rank. living: clocks of ranks of its node that have not answered. gone: clocks of killed ranks,
    and FURTHEST. If another rank has passed a boundary, this rank has the gradients to reach it too, because they were
    summed over all ranks. A rank within its optimizer's step does not show that: the step may still need all ranks (a
    closure that runs backward, a loss that is summed over them). While such a rank is alive, it may reach the boundary.
    """
    if any(passed(other) > own for other in (*living, *gone)):
        return "wait"
    return "stay" if any(other > own for other in living) else "write"


def passed(clock: int) -> int:
    """Return the clock of the last boundary of a rank with this clock."""
    return clock - clock % 2


def next_boundary(clock: int) -> int:
    """Return the step of the rank's complete state; of its next one if the rank is within its optimizer's step."""
    return (clock + 1) // 2


def is_there(held: Held | None, version: Version, *, assumed: bool) -> bool:
    """True if a node already has a state that is as good as the one that a rank would write.

    Within a generation a saved state outranks an assumed one; otherwise the newer one counts. assumed: True if the
    rank's own state is an assumed one.
    """
    if held is None or held.version[:2] != version[:2] or held.assumed == assumed:
        return held is not None and held.version >= version
    return assumed


def limit_seconds(size: int) -> float:
    """Return the seconds that a rank may take to write `size` bytes, or a piece of them."""
    return SECONDS_LEAST + max(0, size) / BYTES_A_SECOND


def longest_seconds(size: int) -> float:
    """Return the seconds that ranks may take to write `size` bytes if they write slowly but steadily."""
    return 4 * limit_seconds(size) + SECONDS_MORE


def is_waited_for(clock: int, whole: int, seconds: float, still: float, size: int, is_held_up: bool) -> bool:
    """True if the agent waits for a rank that has not answered, before it ends the ranks of its node.

    clock: of the rank, or of a boundary that another rank has passed and this rank may reach. whole: step of the
    complete state of this generation; 0 if there is none. seconds: since ranks were asked to write. still: seconds
    since the last piece was written. size: of the state, in bytes. is_held_up: the rank has a thread that is running,
    or is waiting for a processor or a disk.
    """
    if whole and clock <= 2 * whole:
        return False  # the rank's state is in memory already
    limit = limit_seconds(size)
    return seconds < longest_seconds(size) and (still < limit or is_held_up)


def area_bytes(size: int) -> int:
    """Return the bytes of an area for a state of `size` bytes."""
    return int(size * SLACK)


def missing(size: int, reserved: Sequence[int], areas: int) -> int:
    """Return the bytes to reserve for areas. areas: 1 if only survivors write the state, AREAS if it is copied."""
    return sum(max(0, size - has) for has in reserved[:areas])


def needed(size: int) -> int:
    """Return the bytes that must be free before `size` bytes are reserved."""
    return int(size * MARGIN)


def fits(size: int, limit: int | None, used: int, free: int | None) -> bool:
    """True if an area of this size fits; all in bytes. limit: of the container; free: on the machine; None: unknown."""
    return (limit is None or used + needed(size) <= limit) and (free is None or needed(size) <= free)


def area_cell(area: int, cell: int) -> int:
    """Return the index of an area's cell, RESERVED to AREA_EVERY, among the cells of the node."""
    return FIRST_AREA + area * AREA_CELLS + cell


def slot_cell(slot: int, cell: int) -> int:
    """Return the index of SLOT_STEP, SLOT_GENERATION or SLOT_BYTES of a slot among the cells of its rank."""
    return FIRST_SLOT + 3 * slot + cell


def slot_offset(local_rank: int, slot: int, ranks: int) -> int:
    """Return the offset of a rank's slot, in bytes. ranks: number of ranks of the node."""
    return layout(ranks)[0] + (local_rank * SLOTS + slot) * SECTION_BYTES


def layout(ranks: int) -> tuple[int, int]:
    """Return the offsets of the slots and of the area, in bytes. ranks: number of ranks of the node."""
    slots = (1 + ranks) * PAGE_BYTES
    return slots, slots + ranks * SLOTS * SECTION_BYTES
