"""Under ddprun only a lost pod is replaced. The other pods stay, with torch imported, and wait for the new one."""

import datetime as dt
import json
from typing import Any

import pytest
from msgspec.structs import replace
from worlds import World, digits

from ddpjob_core.failures import Failure
from ddpjob_operator.observed.reports import AgentCounts, AgentReport
from ddpjob_operator.plan.actions import CreatePod, DeletePod
from ddpjob_operator.pods import build

DDPRUN = {"command": ["ddprun", "train.py"]}


def trained(**spec: object) -> World:
    """Return a job of three nodes under ddprun."""
    return digits(container=DDPRUN, **{"nodes": 3, **spec}).running()


def words(world: World) -> list[str]:
    return [event.reason for event in world.events]


def ended(**more: object) -> str:
    """Return the termination message of an agent after the agents have ended the group."""
    return json.dumps({"ddpjob": 1, "ended": True, **more})


@pytest.mark.parametrize("rank", [0, 1], ids=["node 0, which leads", "another"])
def test_only_the_pod_of_a_killed_agent_is_replaced(rank: int) -> None:
    world = trained().exits(rank, code=137).settle()
    others = {f"digits-1-{r}" for r in range(3)} - {f"digits-1-{rank}"}
    assert all(world.pods[name].deletion_requested_at is None for name in others), "they keep their fork servers warm"
    assert f"digits-1-{rank}-r1" in world.names(), "a name is used once"
    assert (world.status.attempt, world.status.replacements) == (1, {str(rank): 1})
    assert "takes its place, the other 2 nodes wait (restart 1 of 3)" in world.status.message or (
        "after SIGKILL" in world.status.message
    )
    world.runs(rank).settle()
    assert (world.status.state, world.status.reason) == ("Running", "AllNodesRun")
    assert words(world)[-3:] == ["RankFailed", "Replacing", "AllNodesRun"]


def test_a_pod_whose_sidecar_outlives_its_killed_agent_is_replaced_too() -> None:
    """A sidecar (a service mesh, a log shipper) runs on, and the pod must not count as one whose agent waits."""
    world = trained().exits(1, code=137, phase="Running").settle()
    deleted = [name for name, pod in world.pods.items() if pod.deletion_requested_at is not None]
    assert deleted == ["digits-1-1"]
    assert (world.status.attempt, world.status.replacements) == (1, {"1": 1})
    world.stops_all().settle().runs(1).settle()
    assert (world.names(), world.status.reason) == (["digits-1-0", "digits-1-1-r1", "digits-1-2"], "AllNodesRun")


def test_under_torchrun_all_pods_of_the_group_are_recreated() -> None:
    world = digits(nodes=3).running().exits(1, code=137).restarted()
    assert (world.status.attempt, world.status.replacements) == (2, {})


def test_nodes_lost_one_after_the_other_are_not_all_replaced_within_one_attempt() -> None:
    world = digits(container=DDPRUN, nodes=2).running().node_lost(1).after(31).settle()
    assert (world.status.attempt, world.status.replacements) == (1, {"1": 1})
    world.nodes = {}  # so that the new pod is on another node
    world.runs(1).settle().node_lost(0).after(31).restarted()
    assert world.status.attempt == 2, "where they are both may train on, and only a new attempt keeps them from harm"


def test_losing_the_last_of_the_original_pods_starts_a_new_attempt() -> None:
    world = digits(container=DDPRUN, nodes=2).running().exits(1, code=137).settle().runs(1).settle()
    assert world.status.replacements == {"1": 1}
    world.exits(0, code=137).restarted()
    assert world.status.attempt == 2, "nobody who waits is known to have been in the last group"


def test_a_new_attempt_starts_if_the_waiting_pods_were_never_seen_running() -> None:
    """A new attempt must start if no waiting pod was seen running: agents would begin with generation 0 again."""
    world = digits(container=DDPRUN, nodes=2).settle().runs(1).settle().exits(1, code=137).restarted()
    assert (world.status.attempt, world.status.replacements) == (2, {})
    world = digits(container=DDPRUN, nodes=3).settle().runs(1, 2).settle().exits(1, code=137).settle()
    assert (world.status.attempt, world.status.replacements) == (1, {"1": 1}), "the pod of node 2 has waited for all"


def test_a_replacement_that_has_trained_waits_for_the_next_replacement() -> None:
    """A replacement must wait for the next one, or each second loss costs the steps since the last save."""
    world = digits(container=DDPRUN, nodes=2).running().exits(1, code=137).settle().runs(1).settle()
    world.reports_step(12, rank=1, node_rank=1, generation=1, replacement=1).settle()
    world.exits(0, code=137).settle()
    assert (world.status.attempt, world.status.replacements) == (1, {"0": 1, "1": 1})


@pytest.mark.parametrize("of", [{"replacement": 0}, {"replacement": 2}, {"replacement": 1, "node_rank": 0}])
def test_a_report_about_other_ranks_does_not_count_for_the_pod_in_their_place(of: dict[str, int]) -> None:
    world = digits(container=DDPRUN, nodes=2).running().exits(1, code=137).settle().runs(1).settle()
    world.reports_step(12, **{"rank": 1, "node_rank": 1, **of}).settle()
    world.exits(0, code=137).restarted()
    assert world.status.attempt == 2


def test_the_pod_of_a_lost_node_is_replaced_elsewhere_and_its_object_is_deleted() -> None:
    world = trained().node_lost(1).after(31).settle()
    assert "digits-1-1" not in world.names(), "it would answer to the rank's name"
    assert "digits-1-1-r1" in world.names()
    assert (world.status.last_failure.reason, world.status.last_failure.failure_class) == ("NodeLost", "infrastructure")
    assert (world.status.restarts.infrastructure, world.status.restarts.application) == (1, 0)


def test_a_pod_that_is_being_deleted_gets_its_grace_before_it_is_replaced() -> None:
    world = trained().deleted_first(2).settle()
    assert "digits-1-2 on node-2 still stopping, the other nodes wait" in world.status.message
    assert len(world.pods) == 3, "two agents of one node would fight for its place"
    world.stops(2).settle()
    assert "digits-1-2-r1" in world.names()
    assert world.status.attempt == 1


def test_a_replacement_that_fails_is_replaced_again() -> None:
    world = trained().exits(1, code=137).settle().runs(1).settle().exits(1, code=137).settle()
    assert "digits-1-1-r2" not in world.names(), "the second in a row waits"
    world.after(2).settle()
    assert "digits-1-1-r2" in world.names()
    assert [f.message.split(" (")[0] for f in world.status.failures] == ["rank 1", "rank 1"]
    assert world.status.restarts.total == 2


def test_agents_that_end_together_cause_a_new_attempt() -> None:
    world = trained(backoffLimit=2)
    world.exits(1, code=3, message=ended(rank=1, exitCode=3, exception="ValueError: x"))
    world.exits(0, code=75, message=ended()).exits(2, code=75, message=ended()).settle()
    assert (world.status.attempt, world.status.replacements) == (2, {})


def test_the_first_agent_that_ends_with_its_group_causes_a_new_attempt() -> None:
    world = trained().exits(1, code=3, message=ended(rank=1, exitCode=3)).restarted()
    assert world.status.attempt == 2, "the others are about to end as well"


def test_the_job_fails_and_all_pods_stop_when_the_budget_is_used_up() -> None:
    world = trained(backoffLimit=0).exits(1, code=137).restarted()
    assert (world.status.state, world.status.reason) == ("Failed", "BackoffLimitExceeded")


def test_a_job_of_one_node_has_no_agent_that_waits() -> None:
    world = digits(container=DDPRUN, nodes=1).running().exits(0, code=137).settle()
    assert world.status.attempt == 2


def test_a_job_with_a_completed_node_restarts_as_a_whole() -> None:
    world = trained().exits(2).settle().exits(1, code=137).restarted()
    assert world.status.attempt == 2, "the agent of the node that completed is not there to join"


def test_a_replacement_that_finds_no_node_in_time_releases_all_pods() -> None:
    world = trained(startDeadlineSeconds=60).exits(1, code=137).settle().after(61).settle()
    assert world.status.reason == "StartBackOff" or world.status.state == "Pending"
    assert all(pod.deletion_requested_at is not None for pod in world.pods.values() if pod.live)


def test_a_status_from_before_the_replacement_counts_as_outdated() -> None:
    world = trained()
    before = world.job
    world.exits(1, code=137).settle()
    world.job = before
    assert world.plan().actions == ()
    assert world.plan().status is None


def test_steps_made_before_a_replacement_are_counted_as_lost() -> None:
    world = trained().reports_step(100).settle().after(1).exits(1, code=137).settle().runs(1).settle()
    world.after(20).reports_step(91).settle()
    assert (world.status.goodput.lost_steps, world.status.furthest_step) == (10, 100)


def test_a_node_clock_that_is_ahead_counts_no_step_twice() -> None:
    """A node clock that is ahead must not count lost steps twice: the failure then seems later than the next step."""
    world = trained().reports_step(100).settle().after(9).exits(1, code=137).after(-8).settle().runs(1).settle()
    world.after(2).reports_step(91, generation=1, resumed_step=90).settle()
    world.after(1).reports_step(91, generation=2, resumed_step=90).settle()
    assert world.status.goodput.lost_steps == 10 + 1


@pytest.mark.parametrize("microseconds", [0, 400_000])
def test_a_report_in_the_second_of_a_replacement_belongs_to_the_old_ranks(microseconds: int) -> None:
    """A report in the second of a replacement must belong to the old ranks: a status has only whole seconds."""
    world = trained().reports_step(100, resumed_step=90, resumed_from="/ckpt")
    at = world.now + dt.timedelta(microseconds=microseconds)
    world.reports[0] = replace(world.reports[0], received_at=at)
    world.settle().exits(1, code=137).settle().runs(1).settle()
    assert (world.status.first_step_time, world.status.resumed_step) == (None, None)
    resumed: dict[str, Any] = {"resumed_step": 100, "resumed_from": "the memory", "generation": 1}
    world.after(5).reports_step(100, phase="start", **resumed).settle().after(5).reports_step(103, **resumed).settle()
    assert (world.status.goodput.lost_steps, world.status.first_step_time) == (0, world.now)


def test_a_suspended_job_stops_all_pods_and_resumes_with_new_names() -> None:
    world = trained().exits(1, code=137).settle().runs(1).settle()
    world.change(suspend=True).settle().stops_all().settle().change(suspend=False).settle()
    assert (world.status.attempt, world.status.replacements) == (2, {})
    assert {"digits-2-0", "digits-2-1", "digits-2-2"} <= set(world.names())


# ---------------------------------------------------------------- restarts in place


def charged(application: int = 0, *, infrastructure: int = 0, replacement: int = 0, in_a_row: int = 1) -> AgentReport:
    failures = [
        Failure(
            rank=2,
            node_rank=2,
            exit_code=137,
            signal="SIGKILL",
            step=41,
            failure_class="application",
            charged_to="application",
        )
    ]
    counts = AgentCounts(
        application=application, infrastructure=infrastructure, in_a_row=in_a_row, charged_in_a_row=in_a_row
    )
    return AgentReport(replacement=replacement, generation=application, restarts=counts, failures=failures)


def counted(world: World) -> tuple[int, int]:
    restarts = world.status.restarts
    assert restarts.total == restarts.application + restarts.infrastructure + restarts.stall
    return restarts.application, restarts.infrastructure


def test_a_restart_in_place_is_counted_reported_and_named_while_the_job_keeps_running() -> None:
    world = trained()
    world.agent_reports(charged(1)).settle()
    assert (world.status.state, world.status.attempt, counted(world)) == ("Running", 1, (1, 0))
    failure = world.status.last_failure
    assert (failure.rank, failure.pod, failure.signal, failure.step) == (2, "digits-1-2", "SIGKILL", 41)
    assert (failure.failure_class, failure.charged_to) == ("application", "application")
    assert world.events[-1].reason == "RestartedInPlace"
    assert "rank 2 (pod digits-1-2, node node-2) was killed by SIGKILL at step 41" in world.events[-1].message
    assert "restarted in place 1 time" in world.status.message


def test_a_restart_in_place_reported_late_is_charged_to_the_attempt_before_the_resume() -> None:
    world = trained().change(suspend=True).settle().stops_all().settle()
    world.agent = charged(1)
    world.change(suspend=False).settle()
    assert (world.status.attempt, counted(world)) == (2, (1, 0))


@pytest.mark.parametrize("how", ["report", "last word"])
def test_charges_while_the_pods_of_a_resumed_job_are_still_stopping_count(how: str) -> None:
    """Restarts that agents report while old pods stop must count, or each resume allows further restarts in place."""
    world = trained().change(suspend=True).settle().change(suspend=False).settle()
    if how == "report":
        world.agent_reports(charged(1)).settle()
    else:
        counts = {"application": 1, "infrastructure": 0, "stall": 0, "inARow": 1, "chargedInARow": 1}
        agent = {"replacement": 0, "generation": 1, "restarts": counts}
        world.exits(0, code=143, message=json.dumps({"ddpjob": 1, "agent": agent})).settle()
    assert (world.status.attempt, counted(world)) == (1, (1, 0))
    world.stops_all().settle()
    assert (world.status.attempt, counted(world)) == (2, (1, 0))


def test_a_restart_in_place_with_only_complaints_blames_no_rank_and_shows_that_it_was_free() -> None:
    """A restart after lost peers alone must blame no rank, and be shown as one that is not charged."""
    world = trained()
    agent = charged(infrastructure=1)
    lost = "RuntimeError: [gloo/tcp/pair.cc:547] Connection closed by peer [10.0.0.4]:4711"
    failure = agent.failures[0]._replace(
        exit_code=1,
        signal="",
        failure_class="infrastructure",
        charged_to="infrastructure",
        exception=lost,
        symptom=True,
    )
    world.agent_reports(replace(agent, failures=[failure])).settle()
    event = world.events[-1]
    assert event.reason == "RestartedInPlace"
    assert event.message.startswith("rank 2 (pod digits-1-2, node node-2) lost its peers at step 41 (RuntimeError: ")
    assert "and ddprun names the rank (not charged to backoffLimit); restarted all ranks in place" in event.message
    world.agent_reports(charged(1)).settle()
    assert "not charged" not in world.events[-1].message


LOST = "RuntimeError: [gloo/tcp/pair.cc:547] Connection closed by peer [10.0.0.4]:4711"
TAKEN = "torch.distributed.DistNetworkError: The server socket has failed to listen, port: 4711, EADDRINUSE"


@pytest.mark.parametrize(
    ("known", "reason"),
    [
        ({"symptom": True, "exception": "c10::DistBackendError: words that no list holds"}, "PeerLost"),
        ({"symptom": True, "exception": LOST, "failure_class": "application"}, "PeerLost"),
        ({"symptom": True, "exception": TAKEN}, "PeerLost"),
        ({"symptom": False, "exception": LOST}, "Error"),
        ({"symptom": True, "unstarted": True, "exception": "OSError: [Errno 11] no process left"}, "Error"),
        ({"early": True, "exit_code": 0, "exception": "ended with exit code 0 while rank 1 waited"}, "EndedEarly"),
        ({"stalled": True, "exit_code": 75, "failure_class": "stall", "exception": "made no step"}, "Stalled"),
        ({"rank": None, "symptom": True, "exception": LOST}, "ConnectionLost"),
    ],
)
def test_the_cause_known_to_an_agent_counts_more_than_the_exception_text(known: dict[str, Any], reason: str) -> None:
    """The cause that an agent knows must outweigh the exception's text, which differs by backend and release."""
    world = trained()
    agent = charged(infrastructure=1)
    failure = agent.failures[0]._replace(**{"exit_code": 1, "signal": "", "failure_class": "infrastructure", **known})
    world.agent_reports(replace(agent, failures=[failure._replace(charged_to="infrastructure")])).settle()
    assert world.status.last_failure.reason == reason


def test_a_repeated_report_is_not_charged_again_and_only_new_restarts_count() -> None:
    world = trained()
    for agent, expected in [(charged(2), 2), (charged(2), 2), (charged(1), 2), (charged(3), 3)]:
        world.agent_reports(agent).settle()
        assert counted(world) == (expected, 0)
    world.agent = None  # a new operator, which has received no report yet
    world.settle()
    assert counted(world) == (3, 0)


def test_the_agent_that_replaces_node_0_counts_from_zero() -> None:
    world = trained(backoffLimit=9)
    world.agent_reports(charged(2)).settle().exits(0, code=137).settle().after(400).settle().runs(0).settle()
    assert counted(world) == (3, 0), "two in place, and the pod"
    world.agent_reports(charged(1, replacement=1)).settle()
    assert counted(world) == (4, 0)
    assert words(world).count("RestartedInPlace") == 2
    assert "restarted in place 3 times" in world.status.message, "of the attempt, not of an agent"
    world.agent = charged(2)  # a late report of an earlier agent
    world.settle()
    assert counted(world) == (4, 0)


@pytest.mark.parametrize("place", [0, 2], ids=["node 0, which leads", "another"])
def test_a_pod_whose_ranks_have_restarted_is_not_recreated_under_its_name(place: int) -> None:
    """A pod whose ranks have restarted must not be created again under its name: its agent would begin with generation
    0 again."""
    world = digits(container=DDPRUN, nodes=3).started()
    world.agent = charged(1)  # before the watch has shown the pods as running
    world.settle().vanishes(place).settle().after(2).settle()
    assert f"digits-1-{place}" not in world.names()
    assert f"digits-1-{place}-r1" in world.names()


def test_a_late_report_of_a_restart_does_not_count_for_a_replacement_pod() -> None:
    """A late report of a restart must not mark a replacement pod as started: its absence would count as a loss."""
    world = trained().exits(2, code=137).settle()
    assert "2" in world.status.replacements
    world.agent_reports(charged(1)).settle()
    assert world.status.started_nodes == "0-1"


def test_reports_from_before_a_suspension_are_not_counted_again_after_it() -> None:
    world = trained()
    world.agent_reports(charged(1)).settle().change(suspend=True).settle().stops_all().settle()
    world.change(suspend=False).step()
    assert (world.status.attempt, counted(world)) == (2, (1, 0))


def test_restarts_in_the_last_message_of_an_agent_without_a_receiver_are_counted() -> None:
    world = trained(backoffLimit=2)
    counts = {"application": 2, "infrastructure": 0, "stall": 0, "inARow": 2, "chargedInARow": 2}
    last = ended(rank=0, exitCode=9, agent={"replacement": 0, "generation": 2, "restarts": counts})
    world.exits(0, code=9, message=last).restarted()
    assert (world.status.state, world.status.reason) == ("Failed", "BackoffLimitExceeded")
    assert counted(world) == (2, 0)


def test_reports_about_an_older_failure_do_not_settle_the_current_one() -> None:
    world = trained().deleted_first(1).settle()
    world.agent_reports(charged(1)).settle()
    assert world.status.last_failure.pod == "digits-1-1"
    assert world.events[-1].message == "restarted all ranks in place (restart 1)"
    assert counted(world) == (1, 0)
    world.stops(1).settle()
    assert world.status.replacements == {"1": 1}
    assert counted(world) == (1, 1)


def test_a_stall_is_handled_by_the_agent_first_and_by_the_operator_if_no_agent_finds_it() -> None:
    world = trained(stall={"timeoutSeconds": 60})
    for _ in range(14):
        world.reports_step(7).after(5).settle()
    assert world.status.state == "Running", "its agent finds it within a second, and starts the ranks again in place"
    for _ in range(12):
        world.reports_step(7).after(5).settle()
    assert world.status.last_failure.reason == "Stalled"


def test_a_stall_beyond_the_budget_of_the_agent_is_a_stall_for_the_operator_too() -> None:
    world = trained()
    counts = {"application": 0, "infrastructure": 0, "stall": 10, "inARow": 10, "chargedInARow": 10}
    agent = {"replacement": 0, "generation": 10, "restarts": counts}
    why = "made no step for 300 s: rank 1 stands at collective 41"
    world.exits(0, code=75, message=ended(agent=agent)).exits(2, code=75, message=ended())
    world.exits(1, code=75, message=ended(rank=1, exitCode=75, exception=why, stalled=True)).settle()
    assert (world.status.state, world.status.reason) == ("Failed", "TooManyStalls")
    failure = world.status.last_failure
    assert (failure.reason, failure.failure_class, failure.rank) == ("Stalled", "stall", 1)
    assert why in world.status.message


# ---------------------------------------------------------------- what a pod gets in its environment


def variables(world: World, rank: int = 0, replacement: int = 0) -> dict[str, str]:
    pod = build.pod(world.job, 1, rank, replacement=replacement)
    return {e["name"]: e["value"] for e in pod["spec"]["containers"][0]["env"]}


def test_a_new_pod_gets_the_remaining_budgets() -> None:
    world = trained(backoffLimit=5, stall={"timeoutSeconds": 90})
    world.agent_reports(charged(2, in_a_row=2)).settle().exits(1, code=137).settle()
    env = variables(world, rank=1, replacement=1)
    assert json.loads(env["DDPJOB_RESTARTS_LEFT"]) == {
        "application": 2,
        "infrastructure": 100,
        "stall": 10,
        "inARow": 3,
        "chargedInARow": 3,
        "peersLost": 0,
        "step": 0,
        "replaced": 1,
        "generations": 0,
        "known": {"replacement": 0, "application": 2, "infrastructure": 0, "stall": 0},
    }
    assert (env["DDPJOB_REPLACEMENT"], env["DDPJOB_STALL_TIMEOUT"]) == ("1", "90")
    assert "DDPJOB_RESTART_GRACE" not in env, "unset it is 0.1 s in place"


def test_agents_get_the_restart_grace_set_by_the_user() -> None:
    """Agents must get the restart grace period that the user has set, for ranks that save in a SIGTERM handler."""
    world = trained(restartGraceSeconds=20).settle().exits(1, code=137).settle()
    assert variables(world, rank=1, replacement=1)["DDPJOB_RESTART_GRACE"] == "20"


def test_steps_that_agents_already_counted_are_no_new_progress_for_the_operator() -> None:
    """Steps that agents have counted must not count again as progress: a bad checkpoint may be tried 3 times, not 9."""
    world = trained(backoffLimit=9).reports_step(100).settle()
    world.agent_reports(charged(3, in_a_row=3)).settle()
    assert world.status.furthest_step == 100
    assert json.loads(variables(world, rank=1)["DDPJOB_RESTARTS_LEFT"])["step"] == 100
    for rank in range(3):
        world.exits(rank, code=1 if rank == 2 else 75, message=ended())
    world.settle().after(400).settle()
    assert (world.status.state, world.status.reason) == ("Failed", "NoProgress")


def test_a_pod_gets_the_failure_policy_rules_of_the_user() -> None:
    rules = [{"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [3, 2]}}]
    env = variables(trained(failurePolicy={"rules": rules}))
    assert json.loads(env["DDPJOB_FAILURE_POLICY"]) == [{"action": "FailJob", "codes": [2, 3], "notIn": True}]


def test_other_launchers_get_no_variables_about_restarts_in_place() -> None:
    assert not [name for name in variables(digits()) if name.startswith("DDPJOB_RE")]


def test_only_the_latest_logs_of_many_replacements_are_kept() -> None:
    world = trained(backoffLimit=20)
    for step in range(6):
        world.reports_step(10 * (step + 1)).settle()
        world.exits(1, code=137).settle().after(400).settle().runs(1).settle()
    assert [n for n in world.names() if n.startswith("digits-1-1")] == [
        "digits-1-1-r4",
        "digits-1-1-r5",
        "digits-1-1-r6",
    ]


def test_a_replacement_is_created_only_after_it_is_in_the_status() -> None:
    world = trained().exits(1, code=137)
    while not world.status.replacements:
        todo = world.step()
        assert not [a for a in todo.actions if isinstance(a, (CreatePod, DeletePod))]
    assert [a for a in world.step().actions if isinstance(a, CreatePod)] == [CreatePod(1, 1, (), 1)]


# ---------------------------------------------------------------- pre-flight


def test_a_node_that_fails_the_pre_flight_is_avoided_at_once_without_a_charge() -> None:
    slow = "pre-flight: node 2 is slow: 1.1 GB/s to its peers where the median is 9.8 GB/s"
    world = trained()
    world.exits(0, code=75, message=ended(exitCode=75, exception=slow, resumable=True, badNodes=[2], preflight=True))
    world.exits(1, code=75, message=ended()).exits(2, code=75, message=ended())
    made = [a for _ in range(5) for a in world.step().actions if isinstance(a, CreatePod)]
    assert [(a.attempt, a.avoid) for a in made] == [(2, ("node-2",))] * 3
    assert counted(world) == (0, 1)
    assert [a.node for a in world.status.avoided_nodes] == ["node-2"]
    failure = world.status.last_failure
    assert (failure.reason, failure.failure_class, failure.rank) == ("PreflightFailed", "infrastructure", None)
    assert f"did not begin to train ({slow})" in world.status.failures[-1].message


def test_avoidance_by_the_pre_flight_is_lifted_too_and_the_pre_flight_does_not_repeat_meanwhile() -> None:
    """An avoidance after a pre-flight must end, and no new pre-flight may reject the same node again meanwhile."""
    world = trained()
    world.exits(0, code=75, message=ended(exitCode=75, exception="slow", resumable=True, badNodes=[2], preflight=True))
    world.exits(1, code=75, message=ended()).exits(2, code=75, message=ended()).settle().settle()
    world.unschedulable(2, "0/3 nodes are available").runs(0, 1).settle()
    assert "node node-2 is avoided until" in world.status.message
    assert "(the pre-flight found it bad)" in world.status.message
    world.after(60).restarted().stops_all().settle()
    assert world.names()[-3:] == ["digits-3-0", "digits-3-1", "digits-3-2"]
    assert "DDPJOB_PREFLIGHT" not in variables(world)
    world.change(preflight="Always")
    assert "DDPJOB_PREFLIGHT" not in variables(world)


def test_a_single_pod_is_recreated_without_avoidance_while_the_other_agents_wait() -> None:
    """A single pod must be created again without avoidance while the other agents wait with the state in memory."""
    world = trained()
    for _ in range(2):
        world.node_lost(1).after(30).settle().settle()
        world.nodes = {}
        world.after(20).settle()
        pod = world._pod(1)
        if not world.status.avoided_nodes:
            world.runs(1).settle()
    assert pod.name == "digits-1-1-r2"
    world.unschedulable(1, "0/3 nodes are available").settle().after(60)
    todo = world.step()
    assert todo.status.message.endswith("pods fit on no other node; pod digits-1-1-r2 is created again")
    world.settle().stops_all().settle()
    assert world.names() == ["digits-1-0", "digits-1-1-r3", "digits-1-2"]
    world.runs(1).settle()
    assert (world.status.state, world.status.attempt) == ("Running", 1)


def test_after_two_infrastructure_failures_new_pods_run_the_pre_flight_first() -> None:
    world = digits(container=DDPRUN, nodes=2).running()
    assert "DDPJOB_PREFLIGHT" not in variables(world)
    for attempt in (1, 2):
        assert world.status.attempt == attempt
        world.evicted(0, "Evicted").evicted(1, "Evicted").settle().after(10).settle().runs(0, 1).settle()
    assert variables(world)["DDPJOB_PREFLIGHT"] == "1"


# ---------------------------------------------------------------- the state in memory


def test_after_an_out_of_memory_kill_pods_keep_no_state_in_memory_until_the_job_is_resumed() -> None:
    """After an out-of-memory kill, pods must keep no state in memory, which counts against the same limit."""
    world = digits(container=DDPRUN, nodes=2).running()
    assert "DDPJOB_OUT_OF_MEMORY" not in variables(world)
    world.exits(1, code=137, reason="OOMKilled").settle().after(10).settle().runs(0, 1).settle()
    assert variables(world)["DDPJOB_OUT_OF_MEMORY"] == "1"
    world.evicted(0, "Evicted").evicted(1, "Evicted").settle().after(10).settle().runs(0, 1).settle()
    assert variables(world)["DDPJOB_OUT_OF_MEMORY"] == "1", "another failure since then does not change it"
    world.change(suspend=True).restarted().after(60).change(suspend=False).settle()
    assert world.status.attempt > 1
    assert "DDPJOB_OUT_OF_MEMORY" not in variables(world)


def test_an_out_of_memory_kill_on_a_node_whose_clock_is_behind_counts_too() -> None:
    """An out-of-memory kill on a node whose clock is behind must count, although it seems older than the job."""
    world = digits(container=DDPRUN, nodes=2).running()
    world.after(-600).exits(1, code=137, reason="OOMKilled").after(600)
    world.settle().after(10).settle().runs(0, 1).settle()
    assert variables(world)["DDPJOB_OUT_OF_MEMORY"] == "1"
    world.change(suspend=True).restarted().after(60).change(suspend=False).settle()
    assert "DDPJOB_OUT_OF_MEMORY" not in variables(world)


def test_a_suspension_stops_nodes_that_wait_for_a_slowly_ending_pod() -> None:
    """A suspension must stop nodes that wait for a slowly ending pod, because no replacement is needed any more."""
    world = trained().deleted_first(2).settle().change(suspend=True).settle()
    assert all(pod.deletion_requested_at is not None for pod in world.pods.values())
    world.stops_all().settle()
    assert world.status.state == "Suspended"
    assert world.status.restarts.infrastructure == 1
