"""The choice among states in memory, for any nodes. tests/simulation/test_memory.py simulates whole jobs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpjob_core import memory
from ddpjob_core.memory import LOADS_ASSUMED_MAX, LOADS_MAX, FoundState, Held, Mark, Proof, Version, newest

VERSIONS = st.builds(Version, st.integers(1, 3), st.integers(0, 4), st.integers(1, 9))
HELD = st.builds(Held, VERSIONS, st.integers(0, LOADS_MAX + 1), st.integers(1, 3), st.integers(0, 2), st.booleans())
PRESENT = st.builds(Version, st.integers(1, 3), st.integers(0, 5), st.just(0))
NODES = st.lists(st.none() | HELD, min_size=1, max_size=5)


@given(NODES, PRESENT)
def test_a_found_state_is_complete_on_every_named_rank_and_none_of_earlier_generations_is_newer(nodes, present):
    """A found state must be complete on every named rank, and the newest: all ranks load the same step."""
    found = newest(nodes, present)
    if not isinstance(found, FoundState):
        return
    assert found.ranks, "somebody has it"
    for rank, held in enumerate(nodes):
        if rank in found.ranks:
            assert (held.version, held.size, held.total) == (found.held.version, found.held.size, found.held.total)
        elif held is not None:
            is_less = held.assumed and held.version >= found.held.version
            assert held.version < found.held.version or held.version >= present or is_less
    assert found.held.version < present


@given(NODES, PRESENT)
def test_no_state_of_this_or_a_later_generation_is_loaded(nodes: list[Held | None], present: Version) -> None:
    """No state of a later generation may be loaded: its processes belong to another job or another leader."""
    late = [None if held is None or held.version < present else held for held in nodes]
    assert newest(late, present) == ""


@given(HELD, st.integers(2, 5), st.data())
def test_contradicting_holders_are_not_believed(held: Held, ranks: int, data: st.DataObject) -> None:
    """Holders that contradict each other must not be believed: one node's faulty memory must not decide for all."""
    nodes: list[Held | None] = [held] * ranks
    wrong = data.draw(st.integers(0, ranks - 1))
    nodes[wrong] = held._replace(total=held.total + 1)
    assert isinstance(newest(nodes, Version(9, 9, 0)), str)


@given(
    st.lists(st.none() | st.builds(Mark, st.integers(0, 3), st.integers(1, 9), st.integers(0, 8)), max_size=5),
    st.integers(0, 3),
)
def test_the_lost_step_is_the_last_one_of_the_previous_ranks(marks: list[Mark | None], generation: int) -> None:
    """The lost step must be the last one of the newest earlier generation. Steps of the present one are not lost."""
    last = memory.last_known(marks, Version(1, generation, 0))
    before = [mark for mark in marks if mark is not None and mark.generation < generation]
    newest_of_them = max((mark.generation for mark in before), default=0)
    assert last == max((mark.step for mark in before if mark.generation == newest_of_them), default=0)


@given(st.lists(st.none() | st.builds(Proof, st.integers(0, 1), st.integers(1, 2), st.integers(0, 1)), max_size=5))
def test_ranks_that_were_no_replicas_do_not_load_the_state_of_another(proofs: list[Proof | None]) -> None:
    """Ranks that are no replicas must not load another's state, because each may train its own model."""
    held = Held(Version(1, 0, 5), 0, 1, 1)
    differ = any(
        one is not None and other is not None and one[:2] == other[:2] and one.total != other.total
        for one in proofs
        for other in proofs
    )
    assert isinstance(newest([held], Version(1, 1, 0), proofs), FoundState) is not differ


@given(st.lists(st.none() | st.builds(Mark, st.integers(0, 1), st.integers(5, 9), st.integers(1, 4)), max_size=4))
def test_ranks_that_count_steps_differently_resume_from_the_folder(marks: list[Mark | None]) -> None:
    """If one rank counts micro-batches as steps, memory must not be used: its step numbers have another meaning."""
    held = Held(Version(1, 0, 5), 0, 1, 1)
    apart = any(
        mark is not None and mark.generation == 0 and mark.step - 5 > max(1, mark.step - mark.before) for mark in marks
    )
    assert isinstance(newest([held], Version(1, 1, 0), (), marks), str) is apart


@given(st.integers(1, 50), st.integers(1, 9), st.sampled_from([-1, 0, 1]))
def test_ranks_one_boundary_apart_count_as_being_at_the_same_step(every: int, boundary: int, behind: int) -> None:
    """Ranks that are one boundary (such as a call of should_stop()) apart must count as at the same step."""
    step, own = every * (boundary + 1), every * (boundary + 1 + behind)
    mark = Mark(0, own, own - every)
    assert isinstance(newest([Held(Version(1, 0, step), 0, 1, 1)], Version(1, 1, 0), (), [mark]), FoundState)


def test_a_state_after_which_no_step_was_made_is_given_up() -> None:
    """A state must be given up if its loads lead to no further step: the state itself may cause the failures."""
    held = Held(Version(1, 0, 5), LOADS_MAX, 1, 1)
    assert isinstance(newest([held], Version(1, 9, 0)), str)
    assert isinstance(newest([held._replace(loads=LOADS_MAX - 1)], Version(1, 9, 0)), FoundState)
    assumed = held._replace(loads=LOADS_ASSUMED_MAX - 1, assumed=True)
    assert isinstance(newest([assumed], Version(1, 9, 0)), FoundState)
    assert isinstance(newest([assumed._replace(loads=LOADS_ASSUMED_MAX)], Version(1, 9, 0)), str)


@pytest.mark.parametrize("step", [9, 10], ids=["at the same step", "a step further"])
def test_values_saved_by_one_rank_override_those_assumed_by_another(step: int) -> None:
    """If only rank 0 passes values to `save`, other nodes have fewer values of the same generation. The state must
    still count."""
    named = Held(Version(1, 0, 9), 0, 301, 7)
    assumed = Held(Version(1, 0, step), 0, 300, 8, assumed=True)
    assert newest([assumed, named], Version(1, 1, 0)) == FoundState(named, (1,))
    later = assumed._replace(version=Version(1, 1, 10))
    assert newest([later, named], Version(1, 2, 0)) == FoundState(later, (0,)), (
        "the next generation went on from what was saved"
    )


def test_a_state_after_which_steps_were_made_is_not_given_up() -> None:
    """A state from which training has made further steps must not be given up, because it did not cause the failure."""
    held, present = Held(Version(1, 0, 5), LOADS_MAX, 1, 1), Version(1, 9, 0)
    assert isinstance(newest([held], present, (), [Mark(8, 7, 6)]), FoundState)
    assert isinstance(newest([held], present, (), [None, Mark(0, 6, 5)]), FoundState), "another rank has made it"
    assert isinstance(newest([held], present, (), [Mark(0, 5, 4)]), str)
    assert isinstance(newest([held], present, (), [None]), str)


@given(st.none() | VERSIONS, HELD)
def test_the_folder_counts_only_if_its_generation_or_step_is_later(folder: Version | None, own: Held) -> None:
    """The folder must count only if its generation or step is later: a later generation continued the training."""
    own = own._replace(assumed=False)
    assert memory.is_newer(folder, own) is (folder is not None and folder > own.version)


@given(VERSIONS, HELD)
def test_a_saved_state_of_a_generation_overrides_an_assumed_one(folder: Version, own: Held) -> None:
    """A saved state must override one that was only passed to load(): load() may not get all values of the script."""
    own = own._replace(assumed=True)
    saved_in_it = (folder.attempt, folder.generation) >= (own.version.attempt, own.version.generation)
    assert memory.is_newer(folder, own) is saved_in_it


@given(st.integers(0, 20), st.lists(st.integers(0, 20), max_size=4))
def test_the_furthest_rank_never_waits(own: int, others: list[int]) -> None:
    """The furthest rank must never wait, or two ranks could wait for each other until the time-out."""
    clocks = [own, *others]
    waiting = [memory.turn(clock, clocks[:i] + clocks[i + 1 :]) for i, clock in enumerate(clocks)]
    assert waiting[clocks.index(max(clocks))] == "write"


@given(st.integers(0, 20), st.lists(st.integers(0, 20), max_size=4), st.lists(st.integers(0, 20), max_size=4))
def test_a_rank_continues_only_to_a_boundary_that_another_has_passed(own, living, gone):
    """A rank must continue only to a boundary that another has passed. A further step may need a lost rank, would never
    end, and lose the state."""
    turn = memory.turn(own, living, gone)
    assert (turn == "wait") is any(2 * (clock // 2) > own for clock in (*living, *gone))
    assert turn != "stay" or any(clock > own for clock in living), "of those that are gone none comes to a boundary"


def test_each_memory_area_has_its_own_cells() -> None:
    """Each memory area must have its own cells (step, size …), or a copy would get the description of another state."""
    cells = [memory.area_cell(area, cell) for area in range(memory.AREAS) for cell in range(memory.AREA_CELLS)]
    assert len(set(cells)) == len(cells)
    assert min(cells) > memory.WROTE
    assert max(cells) < memory.NODE_CELLS <= memory.PAGE_BYTES // 8


@given(st.integers(0, 1 << 40), st.none() | st.integers(0, 1 << 41), st.integers(0, 1 << 40))
def test_a_state_that_fits_does_not_raise_the_limit(size: int, limit: int | None, used: int) -> None:
    """A state that fits must not exceed the container's memory limit, at which the kernel kills the container."""
    assert not memory.fits(size, limit, used, None) or limit is None or used + size <= limit
    assert memory.fits(size, None, used, None)


def test_no_part_of_the_memory_layout_overlaps_another() -> None:
    """No part of the memory layout may overlap another, or two ranks overwrite each other's slots."""
    for ranks in (1, 2, 8):
        slots = [memory.slot_offset(rank, slot, ranks) for rank in range(ranks) for slot in range(memory.SLOTS)]
        ends = [(1 + ranks) * memory.PAGE_BYTES, *(offset + memory.SECTION_BYTES for offset in slots)]
        assert all(begin >= end for begin, end in zip([*slots, memory.layout(ranks)[1]], ends, strict=True))
    last = memory.slot_cell(memory.SLOTS - 1, memory.SLOT_BYTES)
    assert last < memory.RANK_CELLS <= memory.PAGE_BYTES // 8


@pytest.mark.parametrize(
    ("early", "boundaries", "version", "is_of_it"),
    [
        ((1, 9), [(1, 7), (1, 8)], (1, 9), True),
        ((1, 9), [(1, 4), (1, 8)], (1, 12), True),  # the script counts micro-batches
        ((1, 9), [(1, 4), (1, 12)], (1, 16), False),  # no rank wrote anything in the step after 12
        ((1, 9), [(1, 7), (1, 8)], (1, 8), False),
        ((0, 9), [(1, 8), (0, 8)], (1, 9), False),
        (None, [(1, 8), None], (1, 9), False),
    ],
)
def test_random_states_written_within_a_step_belong_to_the_boundary_of_the_others(early, boundaries, version, is_of_it):
    """Random states written within a step must belong to the others' boundary: older ones would be drawn again."""

    def of(pair: tuple[int, int] | None) -> Version | None:
        return None if pair is None else Version(1, *pair)

    assert memory.leads_to(of(early), [of(one) for one in boundaries], Version(1, *version)) is is_of_it
