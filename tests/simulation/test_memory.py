"""Simulated jobs whose ranks keep their state in memory, with or without a folder. Injected bugs must be found."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
from model_area import Area, Place
from model_copies import Copying
from model_rescue import Rescues
from scenario import memory_scenario
from simulate import failing, report, shrink
from simulation import simulate

from ddpjob_core import copies, memory
from ddpjob_core.memory import FoundState, Held, Version
from ddpjob_operator.plan import transitions

pytestmark = pytest.mark.timeout(900)  # CPU bound: a busy machine needs longer
BY_DAY, BLOCK = 15, 125
LONG = range(0, 1000, BLOCK)
MUTANT_SEEDS_MAX = 2000
Mutant = Callable[[], contextlib.AbstractContextManager[Any]]


def check(seeds: range) -> None:
    bad = failing(seeds, memory_scenario)
    assert not bad, report(shrink(min(bad, key=lambda outcome: len(outcome.taken)), memory_scenario))


def test_each_generation_begins_with_the_newest_complete_state() -> None:
    """Each generation must begin with the newest complete state: not with an older one, nor with a mixture of two."""
    check(range(BY_DAY))


# Seeds that once broke a rule, with the reason.
ONCE_WRONG = {
    # A state that causes a failure would make three more attempts fail if ranks loaded that state again.
    "after three loads of a state the folder counts and not a state a step before": 701221,
    # An operator that has lost its Lease drops reports. Agents repeat them, unless they are killed.
    "what an operator heard before it lost its lease is not known to it afterwards": 106677,
    # The agent of a pod from an ended attempt would get the complete budget of restarts again.
    "a new operator with an old list of jobs makes no pods of an attempt that is over": 210391,
    # The operator confirmed a report, and the agent was killed before it could repeat the report.
    "what an agent says before an operator has reconciled its job is counted": 411378,
    # The next leader knew no generation, but its rank found a newer generation in the folder.
    "a pod that was never seen to run is replaced and not made again once its ranks have started again": 1003942,
    # Neither pod knew a generation, but the folder had a newer one.
    "a pod that was made again unseen and a replacement do not begin together": 2008217,
    # Two operators of the model had one name and shared a Lease. One wrote a report of the previous generation.
    "an operator that crashes while it stops has one successor": 721310,
    # Both pods begin with generation 0, so it is unknown which of them has saved. Memory may lack values of the folder.
    "a pod that is made again goes on from what the first one saved and not from what it assumes": 720003,
    # lostSteps was 144, but only 131 steps were repeated: users would overestimate the cost of a failure.
    "a failure whose clock is ahead of the next ranks first step counts no step twice": 721701,
    # The pod's name was free while its container was running, so two attempts trained in one folder.
    "a forced delete that is carried out when the node is back is refused": 701187,
    # The next attempt began at once, without the final reports of the last pods.
    "what an agent has charged counts also where its job is resumed while its pods stop": 920684,
    # A new group started before the old pods were deleted.
    "a job that resumes without a lost node starts when the pods of that node are deleted": 1003759,
}


@pytest.mark.parametrize("seed", ONCE_WRONG.values(), ids=ONCE_WRONG)
def test_a_memory_seed_that_failed_once_stays_fixed(seed: int) -> None:
    outcome = simulate(memory_scenario(seed))
    assert not outcome.wrong, report(outcome)


@pytest.mark.long
@pytest.mark.parametrize("first", LONG)
def test_a_thousand_more_memory_seeds_are_correct(first: int) -> None:
    check(range(BY_DAY + first, BY_DAY + first + BLOCK))


def a_part_is_missing() -> contextlib.AbstractContextManager[Any]:
    """Injected bug: a state counts as complete before its first part is written."""

    def begin(_: Area, place: Place, held: Held) -> None:
        place.held = held

    return mock.patch.object(Area, "begin", begin)


@contextlib.contextmanager
def old_memory_accepted() -> Iterator[None]:
    """Injected bug: the generation of a state is ignored, so the state with the highest step is used."""
    newest, is_newer = memory.newest, memory.is_newer

    def of_any(held: Sequence[Held | None], present: Version, *more: Any) -> FoundState | str:
        flat = [one and one._replace(version=one.version._replace(generation=0)) for one in held]
        found = newest(flat, present._replace(generation=1), *more)
        if isinstance(found, str):
            return found
        true = held[found.ranks[0]]
        assert true is not None
        return FoundState(true, found.ranks)

    def by_step(folder: Version | None, held: Held) -> bool:
        return folder is not None and is_newer(folder._replace(attempt=1, generation=0),
                                               held._replace(version=Version(1, 0, held.version.step)))  # fmt: skip

    with mock.patch.object(memory, "newest", of_any), mock.patch.object(memory, "is_newer", by_step):
        yield


def written_while_dirty() -> contextlib.AbstractContextManager[Any]:
    """Injected bug: a rank inside its optimizer's step writes its state."""
    return mock.patch.object(memory, "is_clean", lambda clock: clock > 0)


def memory_beats_the_folder() -> contextlib.AbstractContextManager[Any]:
    """Injected bug: memory is used even if the folder has a newer state."""
    return mock.patch.object(memory, "is_newer", return_value=False)


def assumed_beats_what_was_saved() -> contextlib.AbstractContextManager[Any]:
    """Injected bug: a state that was only passed to `load` counts as much as a state that another rank has saved."""
    newest = memory.newest

    def all_alike(held: Sequence[Held | None], *more: Any) -> FoundState | str:
        return newest([one and one._replace(assumed=False) for one in held], *more)

    return mock.patch.object(memory, "newest", all_alike)


def lost_steps_from_the_last_save() -> contextlib.AbstractContextManager[Any]:
    """Injected bug: ranks always count as repeating everything since the last save."""
    with_lost = transitions._with_lost_steps

    def from_the_folder(status: Any, report: Any) -> Any:
        return with_lost(status, transitions.replace(report, resumed_step=report.saved_step or 0))

    return mock.patch.object(transitions, "_with_lost_steps", from_the_folder)


def a_copy_that_counts_before_its_step() -> contextlib.AbstractContextManager[Any]:
    """Injected bug: a copy is valid as soon as it is written, although a rank may not have completed its step."""
    close = Copying._close

    def at_once(copying: Copying) -> None:
        close(copying)
        copying.count()

    return mock.patch.object(Copying, "_close", at_once)


def a_copy_over_the_newer_area() -> contextlib.AbstractContextManager[Any]:
    """Injected bug: a copy overwrites the newer area. If the copy is cut off, only an older state is left."""
    area_for = copies.area_for
    return mock.patch.object(copies, "area_for", lambda held: memory.AREAS - 1 - area_for(held))


def the_folder_beats_a_newer_copy() -> contextlib.AbstractContextManager[Any]:
    """Injected bug: ranks load a checkpoint from the folder although a copy in memory is newer."""
    return mock.patch.object(memory, "is_newer", lambda folder, held: folder is not None)


def a_copy_over_its_random_states() -> contextlib.AbstractContextManager[Any]:
    """Injected bug: a rank overwrites its random states of the previous copy before the next copy is valid."""
    return mock.patch.object(copies, "slot_for", return_value=0)


def copies_that_are_not_made() -> contextlib.AbstractContextManager[Any]:
    """Injected bug: the second copy is never due."""
    return mock.patch.object(copies, "is_due", lambda plan, step, before: before < plan.first <= step)


def saves_expected_at_the_pace_of_copies() -> contextlib.AbstractContextManager[Any]:
    """Injected bug: copies made only at `save` get the limit of regular copies, although ranks may be far ahead."""
    return mock.patch.object(copies.CopyPlan, "next_within", property(lambda plan: plan.every))


def two_ranks_that_write_at_once() -> contextlib.AbstractContextManager[Any]:
    """Injected bug: without a lock, the parts of a state come from two ranks, which may be at different steps."""
    return mock.patch.object(Rescues, "_is_alone", return_value=True)


def a_copy_that_counts_without_the_other_ranks() -> contextlib.AbstractContextManager[Any]:
    """Injected bug: after a failure a copy is used although some ranks have not written their random states."""
    return mock.patch.object(Area, "all_have_copied", return_value=True)


def two_slots_for_copies() -> contextlib.AbstractContextManager[Any]:
    """Injected bug: a rank overwrites its random states of a copy before the writer has completed this copy."""
    slot_for = copies.slot_for
    return mock.patch.object(copies, "slot_for", lambda versions, *known: slot_for(versions[:2], *known))


# The first seed that finds each bug, as in test_mutants.py.
SEEDS: dict[Mutant, int] = {
    a_part_is_missing: 0,
    old_memory_accepted: 26,
    written_while_dirty: 92,
    memory_beats_the_folder: 8,
    assumed_beats_what_was_saved: 41,
    lost_steps_from_the_last_save: 0,
    a_copy_that_counts_before_its_step: 110,
    a_copy_over_the_newer_area: 8,
    the_folder_beats_a_newer_copy: 0,
    a_copy_over_its_random_states: 110,
    copies_that_are_not_made: 8,
    saves_expected_at_the_pace_of_copies: 21,
    two_ranks_that_write_at_once: 92,
    a_copy_that_counts_without_the_other_ranks: 286,
    two_slots_for_copies: 1303,
}


@pytest.mark.parametrize("mutant", SEEDS, ids=lambda mutant: mutant.__name__)
def test_a_deliberate_bug_of_the_memory_is_found(mutant: Mutant) -> None:
    with mutant():
        for seed in (SEEDS[mutant], *range(MUTANT_SEEDS_MAX)):
            found = simulate(memory_scenario(seed))
            if found.wrong:
                break
        else:
            pytest.fail(f"not found in {MUTANT_SEEDS_MAX} seeds")
    if seed != SEEDS[mutant]:
        warnings.warn(f"{mutant.__name__} is now found by seed {seed}: change SEEDS", stacklevel=2)
    # The same faults without the bug do no harm, so the test has found the bug.
    fixed = simulate(memory_scenario(seed), found.taken)
    assert not fixed.wrong, fixed.wrong
