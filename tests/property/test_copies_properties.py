"""When the state is copied and which copy is overwritten, for any plans. tests/simulation/test_memory.py kills ranks
between any two actions."""

from hypothesis import given
from hypothesis import strategies as st

from ddpjob_core import copies, memory
from ddpjob_core.copies import CopyPlan, CopySchedule
from ddpjob_core.memory import FoundState, Held, Mark, Version, newest

VERSIONS = st.builds(Version, st.just(1), st.integers(0, 3), st.integers(1, 20))
SECONDS = st.floats(1e-6, 1e3)


@given(SECONDS, SECONDS)
def test_copies_take_their_share_of_time_and_are_as_frequent_as_it_allows(copy: float, step: float) -> None:
    """Copies must be as frequent as COST_MAX allows: fewer copies lose more steps, more copies slow down training."""
    every = copies.every(copy, step)
    assert every & (every - 1) == 0
    assert copy <= copies.COST_MAX * every * step or every == copies.EVERY_MAX
    assert every == 1 or copy > copies.COST_MAX * (every // 2) * step


@given(st.integers(0, 20), st.integers(0, 20), st.floats(0, 1))
def test_copies_that_took_too_much_time_become_rarer_and_others_do_not(wanted: int, present: int, share: float) -> None:
    """Copies that took too much time must become rarer, even if a single measurement on a busy machine is low."""
    every = copies.corrected(1 << wanted, 1 << present, share)
    assert every >= 1 << wanted
    assert every > 1 << present or share <= copies.COST_MAX or every == copies.EVERY_MAX
    assert every == 1 << wanted or share > copies.COST_MAX / 2


@given(st.data(), st.integers(1, 7))
def test_all_ranks_copy_at_the_same_steps_whatever_plans_rank_0_makes(data: st.DataObject, gap: int) -> None:
    """All ranks must copy at the same steps: a rank that misses a copy has no random states for this step."""
    rank_0, other, told = CopySchedule(), CopySchedule(), list[CopyPlan]()
    is_late = data.draw(st.booleans())  # True if the other rank sees each plan one step late
    for step in range(gap, 60 * gap, gap):
        before = len(told)
        rank_0.boundary(step, None)
        rank_0.begin_next()
        if rank_0.next is None and data.draw(st.integers(0, 4)) == 0:
            first = copies.first_of_next(step, step - gap, rank_0.every)
            assert first > step, "the other ranks may have passed this one"
            told.append(CopyPlan(first, data.draw(st.sampled_from([1, 2, 8, 32]))))
            rank_0.announce(told[-1])
        other.boundary(step, None)
        if other.looks and other.announced < (before if is_late else len(told)):
            other.announce(told[other.announced])
        other.begin_next()
        due = [each.plan is not None and each.is_due(each.plan, step) for each in (rank_0, other)]
        assert due[0] == due[1]


@given(st.tuples(*[st.none() | st.builds(Held, VERSIONS, st.just(0), st.just(1), st.just(1))] * memory.AREAS))
def test_a_copy_never_overwrites_the_newest_state(held: tuple[Held | None, ...]) -> None:
    """A copy must never overwrite the newest state, because a copy that is cut off would leave none."""
    area = copies.area_for(held)
    whole = [one.version for one in held if one is not None]
    assert held[area] is None or whole.count(held[area].version) > 1 or held[area].version != max(whole)  # type: ignore[union-attr]


@given(st.lists(st.none() | VERSIONS, min_size=3, max_size=3), st.none() | VERSIONS, st.none() | VERSIONS)
def test_random_states_of_the_newest_state_are_never_overwritten(versions, held, loaded):
    """Random states of the newest state must never be overwritten, or a rank draws other numbers after a restart."""
    slot = copies.slot_for(versions, held, loaded)
    newest = max((version for version in (held, loaded) if version is not None), default=None)
    assert versions[slot] is None or versions[slot] != newest or set(versions) == {newest}
    assert versions[slot] is None or None not in versions, "an empty one first"


@given(st.builds(CopyPlan, st.integers(0, 10**9), st.integers(1, 1 << 20), st.booleans(), st.booleans()))
def test_the_other_ranks_read_the_plan_that_rank_0_wrote(plan: CopyPlan) -> None:
    """The other ranks must read the plan for copies exactly as rank 0 wrote it, or they would copy at other steps."""
    assert copies.plan_of(plan.as_text()) == plan


@given(st.integers(0, 5), st.integers(0, 400), st.integers(1, 9))
def test_ranks_may_be_far_beyond_a_copy_but_not_beyond_the_next_two(power: int, ahead: int, gap: int) -> None:
    """A rank may be at most two copies ahead of the loaded copy. A rank further ahead counts micro-batches as steps."""
    held, mark = Held(Version(1, 0, 500), 0, 1, 1, every=1 << power), Mark(0, 500 + ahead, 500 + ahead - gap)
    assert isinstance(newest([held], Version(1, 1, 0), (), [mark]), FoundState) is (ahead <= gap + 2 * (1 << power))
