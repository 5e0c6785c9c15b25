"""The memory in which the state of a training outlives its ranks: its layout, and which of what is there counts.

One file without a name for each agent (`agent/memory.py` owns it, `checkpoint/memory.py` in the ranks writes it):

    page 0                  cells of 8 bytes for the node, NODE_CELLS
    page 1 + local rank     cells of that rank, RANK_CELLS
    SECTION_BYTES a slot    three slots a rank: what is small, at its last two boundaries, and before the next step
    the area                the whole state, written by a surviving rank after a failure

A cell that says that something is whole is written last. Who was in the middle of writing has left a 0 there: what is
not whole does not exist.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

PAGE_BYTES = 4096
SLOTS = 3
EARLY = 2
"""The third slot: random states and buffers as they are before the optimizer's step."""
SECTION_BYTES = 64 << 20
"""Reserved addresses, not memory: a slot takes what is written into it."""

GENERATION, RESERVED, PROVEN, AREA_STEP, AREA_GENERATION, AREA_LOADS, AREA_BYTES, AREA_SUM, AREA_ASSUMED = range(9)
NODE_CELLS = 9
"""Of the node.

GENERATION      of the ranks that run here: no others write
RESERVED        bytes of the area that are reserved
PROVEN          1: ranks have proved that nothing large changes between a boundary and the next step
AREA_STEP       of the state in the area, written last; 0: none
AREA_GENERATION, AREA_LOADS, AREA_BYTES, AREA_SUM, AREA_ASSUMED  of that state: who wrote it, how often it was loaded
                without a new step after it, its length, the sum of its bits, and whether it is assumed (Held)
"""

PID, CLOCK, ANSWER, PROOF_GENERATION, PROOF_STEP, PROOF_SUM, FIRST_SLOT = range(7)
SLOT_STEP, SLOT_GENERATION, SLOT_BYTES = range(3)
RANK_CELLS = FIRST_SLOT + 3 * SLOTS
"""Of a rank.

PID             of the process that takes part; 0: none
CLOCK           2 × step at a boundary, one more from the next optimizer.step() on; it only grows in a generation
ANSWER          after a failure, one of the answers below
PROOF_GENERATION, PROOF_STEP, PROOF_SUM  the sum of the bits of parameters and optimizer state at that boundary
SLOT_STEP, SLOT_GENERATION, SLOT_BYTES  of each slot; SLOT_STEP is written last, 0: nothing is there
"""
NONE, SAVED, UNABLE = range(3)

LOADS_MAX = 3
"""A state that was loaded so often, and no step followed, is not loaded again: what it leads to may be in it."""
LOADS_ASSUMED_MAX = 1
"""The same for a state that is assumed: the script may need more than that, and then fails at once."""
SECONDS_LEAST, BYTES_A_SECOND = 0.5, 500e6
MARGIN = 1.1


class Version(NamedTuple):
    """Whose state it is; ordered: a later generation went on from what counted when it began."""

    attempt: int
    generation: int
    step: int


class Held(NamedTuple):
    """A whole state in the memory of one rank's node."""

    version: Version
    loads: int
    size: int
    """Bytes."""
    total: int
    """The sum of its bits, the same on all holders."""
    assumed: bool = False
    """It has what `load` named, because `save` had named nothing yet."""


class Proof(NamedTuple):
    """What the parameters of one rank summed to, at a step."""

    generation: int
    step: int
    total: int


class Mark(NamedTuple):
    """The last boundary of one rank, and the one before it in the same generation."""

    generation: int
    step: int
    before: int


class Found(NamedTuple):
    """The newest whole state, and the ranks whose nodes have it."""

    held: Held
    ranks: tuple[int, ...]


def newest(
    held: Sequence[Held | None],
    present: Version,
    proofs: Sequence[Proof | None] = (),
    marks: Sequence[Mark | None] = (),
) -> Found | str:
    """The newest whole state among what the ranks' nodes hold, by rank; else why there is none, "" where nothing is.

    present: of the generation that loads, with step 0. A state that is not older than it is none of this job's past.
    marks: the last boundaries of each rank. Ranks step together, so they are at most one boundary apart; where they are
    not, they count differently, and nobody knows which step it is.
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
        if mark is not None and _is_apart(mark, best.version):
            return f"the state is of step {best.version.step}, and rank {rank} was at step {mark.step}"
    most = LOADS_ASSUMED_MAX if best.assumed else LOADS_MAX
    if best.loads >= most and not any(mark is not None and _follows(mark, best.version) for mark in marks):
        return f"step {best.version.step} was loaded before, and no step after it is known"
    return Found(best, ranks)


def _that_count(held: Sequence[Held | None], present: Version) -> list[Held | None]:
    """By rank. Where a rank has saved, what another one of its generation assumes may be less than what was saved."""
    past = [one if one is not None and one.version < present else None for one in held]
    named = {one.version[:2] for one in past if one is not None and not one.assumed}
    return [None if one is not None and one.assumed and one.version[:2] in named else one for one in past]


def _is_apart(mark: Mark, version: Version) -> bool:
    """Whether a rank of that generation counts otherwise."""
    if mark.generation != version.generation:
        return False
    return abs(mark.step - version.step) > max(1, mark.step - mark.before)


def _follows(mark: Mark, version: Version) -> bool:
    """Whether that rank has made a step after it."""
    return mark.generation >= version.generation and mark.step > version.step


def _not_replicas(proofs: Sequence[Proof | None]) -> int | None:
    """A rank that held something else than another one at the same step of the same generation."""
    seen: dict[tuple[int, int], int] = {}
    for rank, proof in enumerate(proofs):
        if proof is not None and seen.setdefault((proof.generation, proof.step), proof.total) != proof.total:
            return rank
    return None


def is_newer(folder: Version | None, held: Held) -> bool:
    """Whether the folder's state counts, and not the memory's; None: it is of another job, or nobody knows of whom.

    Where one rank has saved, what another one assumes is no longer needed, and may be less than what was saved.
    """
    if folder is None:
        return False
    return folder > held.version or (held.assumed and folder[:2] == held.version[:2])


def is_clean(clock: int) -> bool:
    """Whether nothing has changed parameters and optimizer state since the boundary."""
    return clock > 0 and clock % 2 == 0


def step_of(clock: int) -> int:
    """Of the last boundary."""
    return clock // 2


def turn(own: int, others: Sequence[int]) -> Literal["write", "wait"]:
    """Whether a clean rank writes its state, or another one of its node is, or soon will be, a step further.

    own, others: the clocks of the ranks that live. A rank within its optimizer's step comes to the next boundary
    without any other rank.
    """
    return "wait" if any(other > own for other in others) else "write"


def is_there(held: Held | None, version: Version, *, assumed: bool) -> bool:
    """Whether a node already holds what a rank would write: as new, or what a rank of its generation has saved, which
    counts before what another one assumes. assumed: whether the rank assumes it."""
    if held is None or held.version[:2] != version[:2] or held.assumed == assumed:
        return held is not None and held.version >= version
    return assumed


def limit_seconds(size: int) -> float:
    """How long the ranks of a node may take to write a state of so many bytes."""
    return SECONDS_LEAST + max(0, size) / BYTES_A_SECOND


def fits(size: int, limit: int | None, used: int, free: int | None) -> bool:
    """Whether an area of that size has room; all in bytes. limit: of the container, free: of the machine; or None."""
    needed = int(size * MARGIN)
    return (limit is None or used + needed <= limit) and (free is None or needed <= free)


def slot_cell(slot: int, cell: int) -> int:
    """Where SLOT_STEP, SLOT_GENERATION or SLOT_BYTES of a slot is among the cells of its rank."""
    return FIRST_SLOT + 3 * slot + cell


def slot_offset(local_rank: int, slot: int, ranks: int) -> int:
    """Where a slot of a rank is, in bytes; ranks: of the node."""
    return layout(ranks)[0] + (local_rank * SLOTS + slot) * SECTION_BYTES


def layout(ranks: int) -> tuple[int, int]:
    """Where the slots begin, and where the area does, in bytes."""
    slots = (1 + ranks) * PAGE_BYTES
    return slots, slots + ranks * SLOTS * SECTION_BYTES
