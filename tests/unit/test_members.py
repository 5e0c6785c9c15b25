"""Ranks and node ranks follow from the members of a generation, never from the numbers of their pods."""

import pytest

from ddpjob_core.members import Members

LATER = Members((0, 2, 5))  # the pods with the numbers 1, 3 and 4 are not in the list
REORDERED = Members((3, 1))


def test_node_ranks_have_no_gaps_even_if_places_do() -> None:
    assert [LATER.node_rank(place) for place in (0, 2, 5)] == [0, 1, 2]
    assert [LATER.place(node_rank) for node_rank in range(3)] == [0, 2, 5]


def test_the_leader_is_the_place_of_node_rank_0_even_if_it_is_not_the_lowest() -> None:
    assert (LATER.leader, REORDERED.leader) == (0, 3)
    assert (REORDERED.node_rank(3), REORDERED.node_rank(1)) == (0, 1)


def test_ranks_are_numbered_through_the_members_in_order() -> None:
    assert [list(LATER.ranks(place, 2)) for place in LATER] == [[0, 1], [2, 3], [4, 5]]
    assert [list(REORDERED.ranks(place, 4)) for place in REORDERED] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (LATER.world_size(2), REORDERED.world_size(4)) == (6, 8)


@pytest.mark.parametrize("members", [LATER, REORDERED, Members(range(3))])
@pytest.mark.parametrize("nproc", [1, 3])
def test_every_rank_runs_at_the_place_that_has_it(members: Members, nproc: int) -> None:
    for rank in range(members.world_size(nproc)):
        place = members.place_of_rank(rank, nproc)
        assert place is not None
        assert rank in members.ranks(place, nproc)


def test_a_place_that_is_not_a_member_has_no_node_rank_and_no_ranks() -> None:
    for asked in (lambda: LATER.node_rank(1), lambda: LATER.ranks(1, 2)):
        with pytest.raises(ValueError, match="not in tuple"):
            asked()


@pytest.mark.parametrize("number", [-1, 3, None])
def test_an_unassigned_node_rank_has_no_place(number: int | None) -> None:
    """Rank -1 ("no rank" in reports) must have no place. As an index it would give the last member."""
    assert LATER.place(number) is None
    assert LATER.place_of_rank(6 if number is None else 2 * number, 2) is None


@pytest.mark.parametrize(
    ("members", "text"),
    [(LATER, "0,2,5"), (REORDERED, "3,1"), (Members((2, 3, 4, 0, 1)), "2-4,0-1"), (Members(range(99_999)), "0-99998")],
)
def test_agents_send_members_as_ranges_in_their_order(members: Members, text: str) -> None:
    assert members.text == text
    assert Members.read(text) == members


@pytest.mark.parametrize("text", ["", "a", "1,,2"])
def test_a_malformed_list_of_ranges_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="int"):
        Members.read(text)
