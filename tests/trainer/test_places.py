"""`Places` learns where in its loop a script changes small values, such as a learning rate."""

import torch

from ddpjob.checkpoint.in_memory.places import KEPT, MARKED, Places
from ddpjob.checkpoint.state.alike import digest, same
from ddpjob_core.memory import AFTER, ASSUMED, KNOWN, LATER, MOVED, NAMED, OBJECTS, SAMPLE, Left, mixed_up


def test_a_change_between_should_stop_and_save_is_named_and_the_mark_alone_stops_counting() -> None:
    """A scheduler that is stepped between should_stop() and save() must be reported, and a state at should_stop() alone
    must not be used: a restart would repeat or skip the change."""
    places = Places()
    places.boundary({"scheduler": 1}, MARKED)
    assert places.named({"scheduler": 2}) == {"scheduler"}
    assert places.unsettled({"scheduler": 3}) == [], "what save() has named counts whatever follows"
    places.step({"scheduler": 2})
    places.boundary({"scheduler": 2}, MARKED)
    assert not places.is_settled([])
    assert places.unsettled({"scheduler": 3}) == ["scheduler"]


def test_a_change_at_the_top_of_the_loop_is_trusted_after_a_save_has_shown_it() -> None:
    """A learning rate set at the top of the loop must not prevent the use of memory after the first save."""
    places = Places()
    places.boundary({"optimizer": 1}, MARKED)
    assert places.step({"optimizer": 2}) == {"optimizer"}
    places.boundary({"optimizer": 2}, MARKED)
    assert places.named({"optimizer": 2}) == set()
    assert places.step({"optimizer": 3}) == set()
    places.boundary({"optimizer": 3}, MARKED)
    assert places.unsettled({"optimizer": 4}) == []


def test_values_are_compared_by_their_bits() -> None:
    """Values must be compared by their bits: NaN differs from itself, and `==` of tensors gives no bool."""
    one, other = {"a": float("nan"), "b": torch.zeros(3)}, {"a": float("nan"), "b": torch.zeros(3)}
    assert same(one, other)
    assert not same(one, {**other, "b": torch.ones(3)})
    assert digest(torch.zeros(2, dtype=torch.complex64)) != digest(torch.zeros(4))


def test_a_learning_rate_set_at_each_step_is_trusted_from_the_second_step_on() -> None:
    """A learning rate set at each step must not prevent the use of memory before the first save."""
    places = Places()
    for step in range(3):
        places.boundary({"optimizer": step}, MARKED)
        assert places.step({"optimizer": step + 1}, ["optimizer"]) == set()
        assert places.loose == ({"optimizer"} if step == 0 else set())


def test_a_learning_rate_that_changes_rarely_is_named_at_the_next_step() -> None:
    """A learning rate that changes at one step only must be reported: a restart might not repeat the change."""
    places = Places()
    places.boundary({"optimizer": 1}, MARKED)
    assert places.step({"optimizer": 2}, ["optimizer"]) == set()
    places.boundary({"optimizer": 2}, MARKED)
    assert places.step({"optimizer": 2}, ["optimizer"]) == {"optimizer"}
    places.boundary({"optimizer": 2}, MARKED)
    assert places.unsettled({"optimizer": 3}) == ["optimizer"]


def test_a_scheduler_stepped_after_keep_is_named_and_memory_alone_is_not_trusted() -> None:
    """A scheduler that is stepped after keep() must be reported, because memory has the old learning rate."""
    places = Places()
    places.boundary({"scheduler": 1}, KEPT)
    assert places.unsettled({"scheduler": 2}) == ["scheduler"]
    assert places.step({"scheduler": 2}) == {"scheduler"}
    places.boundary({"scheduler": 2}, KEPT)
    assert not places.is_settled([])
    assert places.step({"scheduler": 3}) == set()
    assert places.loose == {"scheduler"}


def test_a_scheduler_stepped_before_keep_or_shown_by_a_save_is_trusted() -> None:
    places = Places()
    for step in range(3):
        places.boundary({"before": step, "top": step}, KEPT)
        if step == 1:
            assert places.named({"before": step, "top": step}) == set()
            places.step({"before": step, "top": step + 1})
        else:
            places.step({"before": step, "top": step + bool(step)})
    places.boundary({"before": 3, "top": 3}, KEPT)
    assert places.is_settled(["before"])
    assert places.unsettled({"before": 3, "top": 4}) == []


def test_a_rank_lost_before_the_mark_does_not_use_later_changes_of_others() -> None:
    """If an evaluation after should_stop() draws random numbers, a restart must not mix them with the older random
    states of a lost rank."""

    def left(*moved: str, later: tuple[str, ...] = ()) -> dict[str, object]:
        found = {SAMPLE: 1, NAMED: 2, MOVED: list(moved), KNOWN: ["sampler"], OBJECTS: {"sampler": "2"}}
        return found | {LATER: list(later), AFTER: [], ASSUMED: False}

    draws, said = ("random numbers",), "random numbers may change after should_stop(20), and a rank was lost before"
    before, evaluated = Left(False, {19: left()}), Left(True, {20: left("best", *draws, later=draws)})
    assert mixed_up([Left(True, {20: left("sampler", "best", later=draws)}), before], 20) == ""
    assert mixed_up([evaluated, before], 20).startswith(said)
    alone = Left(False, {19: left(later=draws)})  # random numbers may change on the lost rank only
    assert mixed_up([Left(True, {20: left("sampler")}), alone], 20).startswith(said)
    of_another_node = Left(False, {})
    assert mixed_up([evaluated, of_another_node], 20) == ""


def test_a_rank_that_calls_only_save_is_not_mixed_with_one_that_has_not_reached_it() -> None:
    """A rank that does not call should_stop() cannot see that a scheduler is stepped between that call and save()."""

    def left(named: int, scheduler: str) -> Left:
        found = {SAMPLE: 1, NAMED: named, MOVED: [], KNOWN: ["scheduler"], LATER: [], AFTER: [], ASSUMED: False}
        return Left(True, {20: found | {OBJECTS: {"scheduler": scheduler, "metric": str(named)}}})

    assert mixed_up([left(0, "1"), left(2, "1")], 20) == ""
    assert mixed_up([left(0, "1"), left(2, "2")], 20).startswith("scheduler changed between should_stop(20) and save")


def test_a_rank_that_has_never_saved_does_not_get_what_another_rank_has_saved() -> None:
    """Only rank 0 may save a history. If it is lost before its first save(), the others cannot know of the history."""

    def left(own: bool, step: int, assumed: bool) -> Left:
        found = {SAMPLE: 1, NAMED: 2, MOVED: [], KNOWN: [], LATER: [], AFTER: [], OBJECTS: {}}
        return Left(own, {step: found | {ASSUMED: assumed}})

    saved, lost = left(True, 10, False), left(False, 9, True)
    assert mixed_up([lost, saved], 10).startswith("rank 0 was lost before its first keep() or save(), and others had")
    assert mixed_up([saved, lost], 10) == "", "rank 0 may be the only one that saves"
    assert mixed_up([left(False, 9, False), saved], 10) == ""
    assert mixed_up([lost, left(True, 10, True)], 10) == ""


def test_what_ranks_have_of_their_own_is_refused_by_name_when_their_number_changes() -> None:
    def left(reader: str) -> Left:
        found = {
            SAMPLE: 1,
            NAMED: 2,
            MOVED: [],
            KNOWN: ["sampler"],
            LATER: [],
            AFTER: [],
            ASSUMED: False,
            OBJECTS: {"sampler": "2", "reader": reader},
        }
        return Left(True, {20: found})

    assert mixed_up([left("a"), left("b")], 20) == ""
    changed = "reader: each rank may have its own, and the number of ranks has changed"
    assert mixed_up([left("a"), left("b")], 20, resized=True) == changed
    assert mixed_up([left("a"), left("a")], 20, resized=True) == ""
    assert mixed_up([left("a"), left("a"), Left(False, {})], 20, resized=True).endswith("and that of rank 2 is lost")
