"""A group whose number of nodes changes: what node 0's agent decides, without processes, sockets or a clock."""

import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
from changing_group import Wrong, walk
from leads import failure, start, taken

from ddpjob_core.budget import Budget, Grant
from ddpjob_core.failures import RESUMABLE_EXIT_CODE as RESUMABLE
from ddpjob_core.members import Members
from ddprun.core import charges, connected, leader_state, newcomers
from ddprun.core.leader_state import EndOrder, LeaderState, Stop

JOIN_SECONDS, LAST_CALL, SNOOZE = 600.0, 30.0, 30.0
T0 = 7.25
WALKS = 300


def group(least: int, most: int, *here: int, restarts: int = 3, **more: Any) -> LeaderState:
    """Return a group of `least` to `most` nodes in which the nodes `here` are connected."""
    budget = Budget(restarts, restarts, restarts, restarts)
    waits = {"last_call_seconds": LAST_CALL, "snooze_seconds": SNOOZE, **more}
    found = LeaderState(Members(range(most)), budget, JOIN_SECONDS, T0, least=least, **waits)
    for place in here:
        found.joined(place, T0)
    return found


def running(least: int, most: int, *here: int, **more: Any) -> LeaderState:
    """Return a group in which these nodes train."""
    found = group(least, most, *here, **more)
    found.tick(T0 + LAST_CALL)
    assert taken(found) == [start(found, 0)]
    assert found.members == here
    return found


def stops(found: LeaderState, at: float, *, patient: bool) -> None:
    """Let all ranks end that node 0 has ordered to stop."""
    (order,) = taken(found)
    assert isinstance(order, Stop)
    assert order.patient is patient
    for place in order.nodes:
        found.stopped(place, [], at)


def test_a_node_of_an_earlier_leader_joins_after_its_snooze_and_its_generations_count() -> None:
    """A node with a higher generation must wait like any other: the state of an earlier leader is never newer."""
    more: Any = {"least": 1, "leader": 1, "turn": 2, "snooze_seconds": 30}
    found = LeaderState(Members(range(3)), Budget(3, 3, 3, 3), JOIN_SECONDS, T0, **more)
    found.joined(1, T0)
    found.tick(T0)
    assert taken(found) == [start(found, 0)]
    found.joined(2, T0 + 5, generation=7)
    assert taken(found) == []
    found.tick(T0 + 35)
    (stop,) = taken(found)
    assert isinstance(stop, Stop)
    assert (stop.generation, stop.patient) == (0, True)
    found.stopped(1, [], T0 + 36)
    assert taken(found) == [start(found, 8)]
    assert found.members == (1, 2)


def test_a_leader_that_was_in_no_group_begins_above_the_generations_that_the_operator_knows() -> None:
    """A new leader must begin above all known generations: reports and states of a lower one would count as older."""
    found = LeaderState(Members(range(3)), Budget(3, 3, 3, 3), JOIN_SECONDS, T0, least=1, leader=1, turn=2)
    found.joined(1, T0, grant=Grant(3, 99, 10, generations=6))
    found.joined(2, T0, grant=Grant(3, 99, 10, generations=2))
    found.tick(T0)
    assert taken(found) == [start(found, 6)]


def test_it_starts_at_once_with_all_nodes_and_after_a_last_call_with_enough() -> None:
    """A group must start at once with all nodes, and with enough nodes after a last call: later ones interrupt it."""
    assert taken(all_here := group(2, 3, 0, 1, 2)) == [start(all_here, 0)]
    found = group(2, 4, 0, 1)
    assert taken(found) == []
    found.joined(2, T0 + 20)
    assert found.deadline == T0 + 20 + LAST_CALL
    found.tick(T0 + 20 + LAST_CALL)
    assert taken(found) == [start(found, 0)]
    assert found.members == (0, 1, 2)


def test_a_node_that_comes_and_goes_does_not_prolong_the_last_call() -> None:
    found = group(1, 3, 0, 1)
    for second in range(1, 30, 5):
        found.lost(1, T0 + second)
        found.joined(1, T0 + second + 1)
    assert found.deadline == T0 + LAST_CALL


def test_fewer_than_the_smallest_number_wait_and_then_end_as_infrastructure() -> None:
    found = group(3, 4, 0, 1)
    found.tick(T0 + JOIN_SECONDS)
    (order,) = taken(found)
    assert (order.code, order.failure) == (RESUMABLE, None)
    assert order.why == "nodes 2, 3 did not connect within 600 s; at least 3 are needed"


@pytest.mark.parametrize("has_operator", [True, False])
def test_a_lost_node_is_not_waited_for_and_costs_nothing(has_operator: bool) -> None:
    found = running(2, 4, 0, 1, 2, 3, has_operator=has_operator)
    found.reached(10)
    found.lost(1, T0 + 100)
    stops(found, T0 + 100, patient=False)
    assert taken(found) == [start(found, 1)]
    assert (found.members, found.said) == ((0, 2, 3), "node 1 is lost")
    assert (found.charges.restarts, found.charges.failures) == (0, [])


def test_a_hundred_lost_nodes_with_steps_in_between_cost_no_restart_and_no_wait() -> None:
    """Lost nodes must not count against `--max-restarts`, which is for failures of ranks, as with torchrun."""
    found, at = running(1, 2, 0, 1, snooze_seconds=0, restarts=0), T0
    for number in range(1, 200, 2):
        at += 6
        found.reached(number)
        found.lost(1, at)
        stops(found, at, patient=False)
        assert taken(found) == [start(found, number)]
        found.joined(1, at)
        found.tick(at)
        stops(found, at, patient=True)
        assert taken(found) == [start(found, number + 1)]
        assert found.members == (0, 1)
    assert found.charges.restarts == 0


def test_nodes_that_are_lost_a_hundred_times_without_a_step_end_the_job() -> None:
    found = running(1, 2, 0, 1, snooze_seconds=0)
    found.reached(1)
    for _ in range(102):
        found.lost(1, T0)
        stops(found, T0, patient=False)
        (order,) = taken(found)
        if isinstance(order, EndOrder):
            break
        found.joined(1, T0)
        found.tick(T0)
        stops(found, T0, patient=True)
        taken(found)
    assert (order.code, order.failure.vanished) == (RESUMABLE, True)


def test_a_rank_that_fails_is_charged_also_where_another_node_is_lost() -> None:
    found = running(1, 3, 0, 1, 2)
    found.failed(2, [failure(2, 9)], T0 + 100)
    taken(found)
    found.lost(1, T0 + 100)
    found.stopped(0, [], T0 + 100)
    found.stopped(2, [failure(2, 9)], T0 + 100)
    assert found.charges.counts["application"] == 1


def test_a_spare_takes_the_place_of_a_lost_node_at_once_and_stops_nobody() -> None:
    found = running(3, 4, 0, 1, 2, spares=1, snooze_seconds=SNOOZE)
    found.joined(3, T0 + 50)
    assert (found.deadline, found.joins_in(3, T0 + 60)) == (None, None)
    found.lost(1, T0 + 100)
    stops(found, T0 + 100, patient=False)
    assert taken(found) == [start(found, 1)]
    assert (found.members, found.charges.restarts) == ((0, 2, 3), 0)
    found.joined(1, T0 + 200, 0, 1)
    assert (taken(found), found.deadline) == ([], None), "the next spare"
    found.lost(1, T0 + 300)
    assert (taken(found), found.state) == ([], "running")


@pytest.mark.parametrize(
    ("replacement", "is_ready", "members"), [(1, False, (0, 2)), (1, True, (0, 1)), (0, True, (0, 1))]
)
def test_a_spare_gives_way_only_to_a_node_whose_ranks_would_start_at_once(
    replacement: int, is_ready: bool, members: tuple[int, ...]
) -> None:
    """A new pod that still imports torch must not make all ranks wait. The same pod must get its place back, because
    it has its ranks' state in memory."""
    found = running(2, 3, 0, 1, spares=1)
    found.joined(2, T0 + 50)
    found.lost(1, T0 + 100)
    found.joined(1, T0 + 101, 0, replacement, is_ready=is_ready)
    stops(found, T0 + 102, patient=False)
    assert found.members == members


def test_nobody_waits_for_a_spare_at_the_start() -> None:
    found = group(3, 4, 0, 3, spares=1)
    found.joined(2, T0 + 1)
    assert taken(found) == [start(found, 0)]
    assert found.members == (0, 2, 3)


def test_too_few_that_are_left_wait_for_another_and_for_no_last_call_of_those_that_stayed() -> None:
    found = running(2, 3, 0, 1, 2, has_operator=True)
    for place in (1, 2):
        found.lost(place, T0 + 100)
    stops(found, T0 + 100, patient=False)
    assert (taken(found), found.state) == ([], "gathering")
    found.joined(2, T0 + 110, 0, 1)
    assert found.deadline == T0 + 110 + LAST_CALL
    found.joined(1, T0 + 120, 0, 1)
    assert taken(found) == [start(found, 1)]


def test_a_node_that_comes_joins_after_a_snooze_at_a_step_on_which_all_agree() -> None:
    found = running(1, 3, 0, 1)
    found.joined(2, T0 + 100)
    assert found.joins_in(2, T0 + 110) == SNOOZE - 10
    assert found.deadline == T0 + 100 + SNOOZE
    found.tick(T0 + 100 + SNOOZE - 0.1)
    assert taken(found) == []
    found.tick(T0 + 100 + SNOOZE)
    stops(found, T0 + 131, patient=True)
    assert taken(found) == [start(found, 1)]
    assert (found.members, found.said, found.charges.restarts) == ((0, 1, 2), "node 2 joined", 0)


def test_a_node_that_still_imports_torch_stops_nobody() -> None:
    """A node that still imports torch must not stop the group: all others would wait up to ten seconds for it."""
    found = running(1, 3, 0, 1)
    found.joined(2, T0 + 100, is_ready=False)
    assert (found.joins_in(2, T0 + 105), found.deadline) == (SNOOZE, None)
    found.ready(2, T0 + 110)
    assert found.deadline == T0 + 110 + SNOOZE


def test_no_rank_waits_for_a_node_that_still_imports_torch_if_enough_others_can_go_on() -> None:
    """On a slow node the import takes minutes. If another node is lost meanwhile, all ranks would wait for it."""
    found = running(2, 4, 0, 1, 2)
    found.joined(3, T0 + 100, is_ready=False)
    found.lost(1, T0 + 101)
    stops(found, T0 + 101, patient=False)
    assert taken(found) == [start(found, 1)]
    assert found.members == (0, 2)
    found.ready(3, T0 + 160)
    assert found.deadline == T0 + 160 + SNOOZE
    found.joined(1, T0 + 161, 0, 1, is_ready=False)
    found.lost(2, T0 + 162)
    stops(found, T0 + 162, patient=False)
    assert (taken(found), found.members) == ([start(found, 2)], (0, 3)), "the new pod of a former member imports, too"
    found.lost(3, T0 + 163)
    stops(found, T0 + 163, patient=False)
    assert found.members == (0, 1), "at least two train"


def test_nodes_that_come_together_stop_the_others_once_when_all_have_imported_torch() -> None:
    found = running(1, 5, 0, 1)
    found.joined(2, T0 + 100)
    found.joined(3, T0 + 101, is_ready=False)
    assert found.deadline == T0 + 100 + SNOOZE + newcomers.IMPORT_SECONDS, "the import may hang"
    found.ready(3, T0 + 131)
    assert found.deadline == T0 + 100 + SNOOZE
    found.tick(T0 + 131)
    stops(found, T0 + 131, patient=True)
    assert found.members == (0, 1, 2, 3)


def test_whoever_is_here_when_the_ranks_have_stopped_takes_part() -> None:
    found = running(1, 4, 0, 1)
    found.joined(3, T0 + 100)
    found.failed(0, [failure()], T0 + 101)
    found.joined(2, T0 + 101)
    stops(found, T0 + 101, patient=False)
    assert found.members == (0, 1, 2, 3)


def test_a_node_that_comes_and_goes_interrupts_less_and_less_often() -> None:
    found, at, waits = running(1, 2, 0, snooze_seconds=SNOOZE), T0 + 100, []
    for _ in range(5):
        found.joined(1, at)
        waits.append(found.joins_in(1, at))
        assert found.deadline is not None
        at = found.deadline
        found.tick(at)
        stops(found, at, patient=True)
        taken(found)
        found.lost(1, at + 5)
        stops(found, at + 5, patient=False)
        taken(found)
        at += 5
    assert waits == [30, 60, 120, 240, 480]
    found.joined(1, at + newcomers.STABLE_SECONDS)
    assert found.joins_in(1, at + newcomers.STABLE_SECONDS) == SNOOZE


def test_nobody_joins_a_training_that_is_about_to_end() -> None:
    found = running(1, 3, 0, 1)
    found.finished(1, T0 + 100)
    found.joined(2, T0 + 100)
    assert found.deadline is None
    found.finished(0, T0 + 200)
    assert taken(found) == [EndOrder(0, None, "all ranks have ended")]


def test_a_training_that_ends_while_it_is_stopped_for_another_node_has_ended() -> None:
    """A group that has finished must not start again for a node that joins: without a resume it would train twice."""
    found = running(1, 3, 0, 1)
    found.joined(2, T0 + 100)
    found.tick(T0 + 100 + SNOOZE)
    for place in (0, 1):
        found.finished(place, T0 + 131)
    stops(found, T0 + 131, patient=True)
    assert taken(found) == [EndOrder(0, None, "all ranks have ended")]


def test_what_happens_to_a_node_that_only_waits_changes_nothing() -> None:
    found = running(1, 4, 0, 1)
    for place, happens in ((2, found.lost), (3, found.termination_requested)):
        found.joined(place, T0 + 100)
        happens(place, T0 + 110)
    found.lost(3, T0 + 110)
    assert (taken(found), found.deadline) == ([], None)
    found.failed(0, [failure()], T0 + 120)
    assert taken(found) == [Stop(frozenset({0, 1}), 0, patient=False)]


@pytest.mark.parametrize("has_operator", [True, False])
def test_a_node_that_is_told_to_stop_leaves_and_the_others_go_on(has_operator: bool) -> None:
    found = running(1, 3, 0, 1, 2, has_operator=has_operator)
    found.termination_requested(1, T0 + 100)
    found.failed(1, [failure(1, RESUMABLE)], T0 + 100)
    assert taken(found) == [Stop(frozenset({0, 1, 2}), 0, patient=True)]
    found.lost(1, T0 + 100)
    for place in (0, 2):
        found.stopped(place, [failure(place, RESUMABLE)], T0 + 101)
    assert taken(found) == [start(found, 1)]
    assert (found.members, found.charges.restarts) == ((0, 2), 0)


@pytest.mark.parametrize("lost", [1, 2], ids=["it was killed at the end of its grace period", "another node died"])
def test_ranks_do_not_try_to_agree_with_a_lost_node_although_a_node_was_told_to_stop(lost: int) -> None:
    """Ranks that cannot agree end without their state. If they are stopped at once, their state stays in memory."""
    found = running(1, 3, 0, 1, 2, has_operator=True)
    found.termination_requested(1, T0 + 100)
    found.lost(lost, T0 + 130)
    stops(found, T0 + 131, patient=False)
    assert taken(found) == [start(found, 1)]
    assert found.charges.restarts == 0, "the operator charges the lost pod"


def test_a_node_that_finished_after_it_was_told_to_stop_lets_the_others_save() -> None:
    found = running(1, 3, 0, 1, 2, has_operator=True)
    found.termination_requested(1, T0 + 100)
    found.finished(1, T0 + 101)
    found.orders.clear()
    found.lost(1, T0 + 101)
    stops(found, T0 + 102, patient=True)


def test_node_0_that_is_told_to_stop_without_an_operator_ends_all() -> None:
    found = running(1, 2, 0, 1)
    found.termination_requested(0, T0 + 100)
    found.failed(0, [failure(0, RESUMABLE)], T0 + 100)
    stops(found, T0 + 100, patient=True)
    assert taken(found) == [EndOrder(RESUMABLE, None, "told to stop")]


# ---- walks ---------------------------------------------------------------------------------------------------


def test_whatever_happens_the_rules_hold() -> None:
    walks = [walk(seed) for seed in range(WALKS)]
    assert sum(walk.shrinks for walk in walks) > WALKS / 2
    assert sum(walk.growths for walk in walks) > WALKS / 2


@pytest.mark.long  # slow; the fast test above, with fewer random walks, also finds each of these bugs
def test_whatever_happens_in_20_000_walks_the_rules_hold() -> None:
    for seed in range(20_000):
        walk(seed)


LEADER, CONNECTED, CHARGES, NEWCOMERS = leader_state, connected, charges, newcomers
PRESENT = "Members(sorted(chosen[: self.size], key=lambda place: (place != leader, place)))"
STOPPING = "self._stopping = self.nodes.here.intersection(self.members)"
CHARGE = "return self._charge(Failure(exit_code=75, vanished=True, node_rank=0), now)"
ENTER = 'self._enter("stopping", now, None)'
BUGS: dict[str, tuple[types.ModuleType, str, str]] = {
    "all start, also those that are not here": (CONNECTED, PRESENT, "self.places"),
    "one fewer than the smallest number start": (
        LEADER,
        "here) >= self.nodes.least:",
        "here) >= self.nodes.least - 1:",
    ),
    "ranks that end are not waited for": (LEADER, STOPPING, "self._stopping = set()"),
    "nodes that wait are ordered to stop": (LEADER, STOPPING, "self._stopping = set(self.nodes.here)"),
    "a node that leaves takes part": (
        LEADER,
        "for place in self._terminations.leaving & self.nodes.here:",
        "for place in ():",
    ),
    "a lost node that only waited stops all": (LEADER, "if node not in self.members:\n            return None", ""),
    "a spare starts": (CONNECTED, "chosen[: self.size]", "chosen"),
    "a spare is waited for": (CONNECTED, "here >= self.size or", "here == len(self.places) or"),
    "a spare stops all": (LEADER, " or self.is_full:\n            return None", ":\n            return None"),
    "a spare takes the place of a node that is here": (CONNECTED, "*members, *sorted", "*sorted"),
    "ranks wait for a node that imports torch": (
        CONNECTED,
        "ready + rest[: max(0, self.least - len(ready))]",
        "ready + rest",
    ),
    "nobody ever joins": (LEADER, 'if self.state != "running" or', "if True or"),
    "ranks are killed for a node that joins": (LEADER, "self._stop([], now, patient=True)", "self._stop([], now)"),
    "a node that joined is charged": (LEADER, "self.said = self._current.reruns\n", f"{CHARGE}\n"),
    "a lost node is charged": (CHARGES, "history._replace(infrastructure=spent)", "history"),
    "each start has a last call": (CONNECTED, "self._calls = False", "self._calls = True"),
    "generations are not counted": (
        LEADER,
        "self._begun) + 1",
        "self._begun) + (self.generation < 3)",
    ),
    "a node that joins stops all again and again": (LEADER, ENTER, ENTER.replace('"stopping"', "self.state")),
    "one finished node is enough": (
        LEADER,
        "if self._current.finished.issuperset(self.members)",
        "if self._current.finished",
    ),
    "no snooze": (NEWCOMERS, "now + self._snoozes[place])\n\n    def is", "now)\n\n    def is"),
    "a snooze that does not double": (NEWCOMERS, "2 ** self._departures(place, now)", "1"),
    "a snooze for ever": (NEWCOMERS, "now + self._snoozes[place])\n\n    def is", "now + 1e5)\n\n    def is"),
}


@pytest.fixture
def changed(request: pytest.FixtureRequest) -> Iterator[types.ModuleType]:
    """Return a module of LeaderState with a bug. No file changes."""
    module, old, new = request.param
    names = {"Newcomers": newcomers, "Connected": connected, "Charges": charges, "LeaderState": leader_state}
    made: dict[str, Any] = {}
    for name, part in names.items():
        found = mutant(part, old, new) if part is module else mutant(part, "", "")
        found.__dict__.update(made)
        made[name] = found.__dict__[name]
    yield found
    sys.modules.pop("mutant")


def mutant(module: types.ModuleType, old: str, new: str) -> types.ModuleType:
    source = inspect.getsource(module)
    assert old in source
    sys.modules["mutant"] = made = types.ModuleType("mutant")  # dataclasses needs the module in sys.modules
    exec(compile(source.replace(old, new) if old else source, "mutant", "exec"), made.__dict__)
    return made


def walk_all(module: types.ModuleType) -> None:
    for seed in range(WALKS):
        walk(seed, module)


@pytest.mark.parametrize("changed", [pytest.param(bug, id=name) for name, bug in BUGS.items()], indirect=True)
def test_a_bug_made_on_purpose_is_found(changed: types.ModuleType) -> None:
    with pytest.raises(Wrong):
        walk_all(changed)
