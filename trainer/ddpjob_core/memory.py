"""The memory in which the state of a training outlives its ranks: its layout, and which of what is there counts.

One file without a name for each agent (`ddprun/memory.py` owns it, `in_memory/memory.py` in the ranks writes it):

    page 0                  cells of 8 bytes for the node, NODE_CELLS
    page 1 + local rank     cells of that rank, RANK_CELLS
    SECTION_BYTES a slot    of each rank, what is small: at its last two boundaries, before the next step, at its last
                            three copies
    the area                the whole state, written after a failure by one of the surviving ranks
    the other area          only where the state is copied (`copies.py`): the two are written in turns, after a failure
                            too, so that what is cut short leaves the one before it

A cell that says that something is whole is written last. Who was in the middle of writing has left a 0 there: what is
not whole does not exist.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

PAGE_BYTES = 4096
SLOTS = 6
EARLY = 2
"""The third slot: random states and buffers as they are before the optimizer's step."""
COPY_SLOTS = range(3, SLOTS)
"""Three, because a rank may be at the next copy before the writer has said that the last one is whole."""
AREAS = 2
OTHER_AREA_OFFSET = 1 << 46
"""From one area to the other: addresses in a file that takes memory only where it is written."""
SECTION_BYTES = 64 << 20
"""Reserved addresses, not memory: a slot takes what is written into it."""

EVERY_MAX = 1 << 20
"""Steps between two copies: of those that a script names, nobody knows."""
(GENERATION, PROVEN, COPIES, MISCOUNTED, FURTHEST, WROTE, FIRST_AREA) = range(7)
RESERVED, AREA_STEP, AREA_GENERATION, AREA_LOADS, AREA_BYTES, AREA_SUM, AREA_ASSUMED, AREA_EVERY, AREA_CELLS = range(9)
NODE_CELLS = FIRST_AREA + AREAS * AREA_CELLS
"""Of the node.

GENERATION      of the ranks that run here: no others write
PROVEN          the generation in which ranks have proved that nothing large changes between a boundary and the next
                step, and one more; 0: none. Each rank of it proves that, because its sum shows that it holds the same
COPIES          CHANGED: a rank has seen that parameters change between a boundary and the next step, so the state is
                copied; PLACED: and that `should_stop` finds the same as `save`
MISCOUNTED      1: `should_stop` counts otherwise than `save`, so nothing is kept before `save` has named it
FURTHEST        the CLOCK at the furthest boundary that was passed on the node of the rank that failed, as its agent
                tells the others; 0: none was told
WROTE           grows with each piece that a survivor writes: the agent waits while it does

Of each area, from FIRST_AREA on (`area_cell`).

RESERVED        bytes of the area that are reserved
AREA_STEP       of the state in the area, written last; 0: none
AREA_GENERATION, AREA_LOADS, AREA_BYTES, AREA_SUM, AREA_ASSUMED  of that state: who wrote it, how often it was loaded
                without a new step after it, its length, the sum of its bits, and whether it is assumed (Held)
AREA_EVERY      how many steps later the next copy was due at most; 0: it was written after a failure
"""
CHANGED, PLACED = 1, 2

PID, CLOCK, ANSWER, PROOF_GENERATION, PROOF_STEP, PROOF_SUM, FIRST_SLOT = range(7)
SLOT_STEP, SLOT_GENERATION, SLOT_BYTES = range(3)
MARK_GENERATION, MARK_STEP, MARK_BEFORE = range(FIRST_SLOT + 3 * SLOTS, FIRST_SLOT + 3 * SLOTS + 3)
LOADED_STEP, LOADED_FROM, LOADED_BY, LOOSE, RANK_CELLS = range(MARK_BEFORE + 1, MARK_BEFORE + 6)
"""Of a rank.

PID             of the process that takes part; 0: none
CLOCK           2 × step at a boundary, one more from the next optimizer.step() on; it only grows in a generation
ANSWER          after a failure, one of the answers below
PROOF_GENERATION, PROOF_STEP, PROOF_SUM  the sum of the bits of parameters and optimizer state at that boundary
SLOT_STEP, SLOT_GENERATION, SLOT_BYTES  of each slot; SLOT_STEP is written last, 0: nothing is there
MARK_GENERATION, MARK_STEP, MARK_BEFORE  its last boundary and the one before, where it writes no slot at each
LOADED_STEP, LOADED_FROM, LOADED_BY  of a step that was loaded: the generation whose state it was, and the last one that
                has loaded it. A rank that died while it loaded has left the slots of the first one, of the same state
LOOSE           the step of its last boundary if the rank draws random numbers after it that a folder would have; 0: not
"""
NONE, SAVED, UNABLE = range(3)

LOADS_MAX = 3
"""A state that was loaded so often, and no step followed, is not loaded again: what it leads to may be in it."""
LOADS_ASSUMED_MAX = 1
"""The same for a state that is assumed: the script may need more than that, and then fails at once."""
SECONDS_LEAST, BYTES_A_SECOND = 0.5, 500e6
SECONDS_MORE = 10.0
"""Besides, for ranks that write, or would, but get no processor or wait for a disk."""
MARGIN = 1.1
SLACK = 1.05
"""Of an area: optimizers make the state of a parameter when it first has a gradient."""


PROVE_EVERY, PROVE_BYTES = 128, 4 << 20
"""Steps between two proofs that nothing large changes between a boundary and the next step, for a state of so many
bytes: a proof reads all of it twice. A larger state is proved more rarely, so that a step pays the same."""


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
    every: int = 0
    """It is a copy, and the next one was due so many steps later at most; 0: it was written after a failure."""


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


class FoundState(NamedTuple):
    """The newest whole state, and the ranks whose nodes have it."""

    held: Held
    ranks: tuple[int, ...]


def newest(
    held: Sequence[Held | None],
    present: Version,
    proofs: Sequence[Proof | None] = (),
    marks: Sequence[Mark | None] = (),
) -> FoundState | str:
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
        if mark is not None and _is_apart(mark, best):
            return f"the state is of step {best.version.step}, and rank {rank} was at step {mark.step}"
    most = LOADS_ASSUMED_MAX if best.assumed else LOADS_MAX
    if best.loads >= most and not any(mark is not None and _follows(mark, best.version) for mark in marks):
        return f"step {best.version.step} was loaded before, and no step after it is known"
    return FoundState(best, ranks)


def _that_count(held: Sequence[Held | None], present: Version) -> list[Held | None]:
    """By rank. Where a rank has saved, what another one of its generation assumes may be less than what was saved."""
    past = [one if one is not None and one.version < present else None for one in held]
    named = {one.version[:2] for one in past if one is not None and not one.assumed}
    return [None if one is not None and one.assumed and one.version[:2] in named else one for one in past]


def _is_apart(mark: Mark, held: Held) -> bool:
    """Whether a rank of that generation counts otherwise. After a copy it goes on to the next one, or the one after
    that, where the next is cut short."""
    if mark.generation != held.version.generation:
        return False
    ahead, stride = mark.step - held.version.step, max(1, mark.step - mark.before)
    if held.every >= EVERY_MAX and ahead < 0:
        return False  # its last save may be as far back as the script likes
    return not -stride <= ahead <= stride + 2 * held.every


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


class Left(NamedTuple):
    """What one rank has left of its last boundaries, in hashes."""

    own: bool
    """It has its small state of the step that is loaded; else it takes what others have."""
    boundaries: dict[int, dict[str, Any]]
    """By step: hashes of its small objects and of a sample of parameters, and what `Places` knows of that moment."""


SAMPLE, OBJECTS, NAMED, MOVED, KNOWN = "sample", "objects", "named", "moved", "known"
"""KNOWN: names of objects that are the same on all ranks by what they are."""


def mixed_up(rows: Sequence[Left], step: int) -> str:
    """Why ranks cannot go on from what they have left, "" if they can: a rank whose own state is lost takes another
    one's, which must be proved to be the same, and no two ranks may have left different moments of the step."""
    common = {number for row in rows for number in row.boundaries}
    for number in sorted(common):
        found = {rank: row.boundaries[number] for rank, row in enumerate(rows) if number in row.boundaries}
        samples = {rank: one[SAMPLE] for rank, one in found.items() if one[SAMPLE]}
        if len(set(samples.values())) > 1:
            return f"ranks {_listed(samples)} did not hold the same parameters at step {number}"
    present = [row.boundaries[step] for row in rows if row.own and step in row.boundaries]
    if name := _of_two_moments(present):
        return f"{name} changed between should_stop({step}) and save({step}), and not all ranks had come to that"
    for rank, row in enumerate(rows):
        if not row.own and (name := _unproved(rank, rows)):
            return f"{name}: each rank may have its own, and that of rank {rank} is lost"
    return ""


def _of_two_moments(present: Sequence[dict[str, Any]]) -> str:
    """The first object that some ranks have left as should_stop found it, and others as save() did."""
    if len({one[NAMED] for one in present}) < 2:
        return ""
    names = sorted({name for one in present for name in one[MOVED]})
    return next((name for name in names if _differs(name, present) or name not in present[0][OBJECTS]), "")


def _differs(name: str, found: Sequence[dict[str, Any]]) -> bool:
    return len({one[OBJECTS][name] for one in found if name in one[OBJECTS]}) > 1


def _unproved(rank: int, rows: Sequence[Left]) -> str:
    """The first object that is not known to be the same on this rank as on others; "" if there is none."""
    steps = {number for row in rows for number in row.boundaries}
    names: set[str] = {name for row in rows for one in row.boundaries.values() for name in one[OBJECTS]}
    known = {name for row in rows for one in row.boundaries.values() for name in one[KNOWN]}
    for name in sorted(names):
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
    """The last step at which a rank of an earlier generation was, as far as one has noted it; 0: none."""
    past = [mark[:2] for mark in marks if mark is not None and mark.generation < present.generation]
    return max(past, default=(0, 0))[1]


def leads_to(early: Version | None, boundaries: Sequence[Version | None], version: Version) -> bool:
    """Whether what a rank has written before its optimizer's step is of the step that made this state.

    early: with the number after that of the rank's last boundary; how far the next one is from it, the script decides.
    boundaries: those of which the rank has left something. Others are one further at most.
    """
    if early is None or early[:2] != version[:2] or early.step > version.step:
        return False
    return not any(one is not None and one[:2] == early[:2] and one.step >= early.step for one in boundaries)


def is_newer(folder: Version | None, held: Held) -> bool:
    """Whether the folder's state counts, and not the memory's; None: it is of another job, or nobody knows of whom.

    Where one rank has saved, what another one assumes is no longer needed, and may be less than what was saved.
    """
    if folder is None:
        return False
    return folder > held.version or (held.assumed and folder[:2] == held.version[:2])


def proves_again(step: int, size: int) -> bool:
    """Whether ranks prove at this boundary that nothing large changes before the next step: all at the same steps."""
    every = PROVE_EVERY << max(0, (size // PROVE_BYTES).bit_length())
    return step % every == 0


def is_clean(clock: int) -> bool:
    """Whether nothing has changed parameters and optimizer state since the boundary."""
    return clock > 0 and clock % 2 == 0


def step_of(clock: int) -> int:
    """Of the last boundary."""
    return clock // 2


def turn(own: int, living: Sequence[int], gone: Sequence[int] = ()) -> Literal["write", "wait", "stay"]:
    """Whether a clean rank writes its state, or waits for a newer one; stay: and does not begin its next step.

    own, living: the clocks of the ranks of its node that have not answered. gone: of those that were killed, and
    FURTHEST. One that has passed a boundary had what this rank needs to come there too: gradients that were summed over
    all ranks. One that is within its optimizer's step shows nothing of the kind: a closure runs backward there, or the
    script sums the loss over all ranks before it marks the boundary. One that lives may still come to it.
    """
    if any(passed(other) > own for other in (*living, *gone)):
        return "wait"
    return "stay" if any(other > own for other in living) else "write"


def passed(clock: int) -> int:
    """The clock at the last boundary."""
    return clock - clock % 2


def next_boundary(clock: int) -> int:
    """The step at whose end a rank has the next clean state, or has it now."""
    return (clock + 1) // 2


def is_there(held: Held | None, version: Version, *, assumed: bool) -> bool:
    """Whether a node already holds what a rank would write: as new, or what a rank of its generation has saved, which
    counts before what another one assumes. assumed: whether the rank assumes it."""
    if held is None or held.version[:2] != version[:2] or held.assumed == assumed:
        return held is not None and held.version >= version
    return assumed


def limit_seconds(size: int) -> float:
    """How long a rank may take to write a state of so many bytes, or a piece of it."""
    return SECONDS_LEAST + max(0, size) / BYTES_A_SECOND


def longest_seconds(size: int) -> float:
    """How long they may take where they come on, but slowly."""
    return 4 * limit_seconds(size) + SECONDS_MORE


def is_waited_for(clock: int, whole: int, seconds: float, still: float, size: int, is_held_up: bool) -> bool:
    """Whether the agent waits for a rank that has not answered, before it ends the ranks of its node.

    clock: of the rank, or at a boundary that another one has passed: so far this one may come. whole: the step of the
    state that this generation has left whole; 0: none. seconds: since ranks were asked to write. still: seconds since a
    piece was written last. size: of the state, in bytes. is_held_up: whether the rank has a thread that would run.
    """
    if whole and clock <= 2 * whole:
        return False  # what it holds is there
    limit = limit_seconds(size)
    return seconds < longest_seconds(size) and (still < limit or is_held_up)


def area_bytes(size: int) -> int:
    """What an area for a state of so many bytes takes."""
    return int(size * SLACK)


def missing(size: int, reserved: Sequence[int], areas: int) -> int:
    """How many bytes so many areas of that size take beside what each has already: one where survivors write the state,
    AREAS where it is copied."""
    return sum(max(0, size - has) for has in reserved[:areas])


def needed(size: int) -> int:
    """How many bytes must be free for so many."""
    return int(size * MARGIN)


def fits(size: int, limit: int | None, used: int, free: int | None) -> bool:
    """Whether an area of that size has room; all in bytes. limit: of the container, free: of the machine; or None."""
    return (limit is None or used + needed(size) <= limit) and (free is None or needed(size) <= free)


def area_cell(area: int, cell: int) -> int:
    """Where RESERVED to AREA_EVERY of an area are among the cells of the node."""
    return FIRST_AREA + area * AREA_CELLS + cell


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
