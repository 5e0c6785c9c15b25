"""Elastic jobs train with minNodes to nodes pods, accept pods that start later, and restart as a group."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from worlds import World, digits, job, manifest

from ddpjob_cli.commands import options
from ddpjob_cli.manifest import yamlfile
from ddpjob_core.failures import Failure
from ddpjob_core.members import Members
from ddpjob_operator.job import api, launcher, validation
from ddpjob_operator.kube.settings import OperatorSettings
from ddpjob_operator.observed.cluster import Container
from ddpjob_operator.observed.reports import AgentCounts, AgentReport
from ddpjob_operator.plan import leadership
from ddpjob_operator.plan.actions import CreatePod, Settings
from ddpjob_operator.pods import agent_environment, build, environment, naming
from ddprun.core.appointment import Appointment


def elastic(**spec: Any) -> World:
    return digits(**{"nodes": 3, "minNodes": 2, **spec})


def variables(what: api.DDPJob, place: int = 0) -> dict[str, str]:
    return environment.environment(what, 1, place, naming.endpoint(what, 1))


def problems(command: list[str], **spec: Any) -> list[str]:
    return [str(p) for p in validation.parse(manifest(container={"command": command}, **spec))[1]]


# ---------------------------------------------------------------- what torchrun is told


def test_torchrun_gets_the_range_and_the_rendezvous_address() -> None:
    """torchrun must get is_host. Without it, torchrun compares host names: two nodes or none may open the store."""
    what = job(nodes=3, minNodes=2)
    first, second = variables(what), variables(what, 1)
    assert first["PET_NNODES"] == "2:3"
    assert first["PET_RDZV_BACKEND"] == "c10d"
    assert first["PET_RDZV_ENDPOINT"] == second["PET_RDZV_ENDPOINT"] == str(naming.endpoint(what, 1))
    limits = "join_timeout=900,read_timeout=900"
    assert (first["PET_RDZV_CONF"], second["PET_RDZV_CONF"]) == (f"is_host=1,{limits}", f"is_host=0,{limits}")
    assert first["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert first["PET_MAX_RESTARTS"] == "3"
    assert "RANK" not in first


def test_a_command_that_names_only_the_range_gets_the_rest_from_the_job() -> None:
    """PyTorch's tutorials and Kubeflow's elasticPolicy set only the range, so the job must add the rendezvous."""
    what = job(nodes=4, container={"command": ["torchrun", "--nnodes=1:4", "train.py"]})
    assert what.spec.facts.min_nodes == 1
    assert variables(what)["PET_RDZV_BACKEND"] == "c10d"


@pytest.mark.parametrize(
    ("command", "spec", "text"),
    [
        (["python", "x.py"], {"nodes": 2, "minNodes": 1}, "spec.minNodes: this command cannot train with a changing"),
        (["torchrun", "--standalone", "x.py"], {"nodes": 2, "minNodes": 1}, "--standalone is for one node"),
        (["torchrun", "--nnodes=2", "x.py"], {"nodes": 2, "minNodes": 1}, "--nnodes=2 contradicts spec.minNodes: 1"),
        (["torchrun", "--nnodes=1:2", "x.py"], {"nodes": 3, "minNodes": 1}, "--nnodes=1:2 contradicts spec.nodes: 3"),
    ],
)
def test_contradictions_to_an_elastic_job_are_refused_with_the_fix(command: list[str], spec: Any, text: str) -> None:
    """A command that contradicts minNodes must be refused: the job would wait in vain, or each node train alone."""
    assert any(text in problem for problem in problems(command, **spec)), problems(command, **spec)


def test_one_node_may_be_elastic_because_a_job_may_be_scaled_down_to_one() -> None:
    """A job with minNodes: 1 must accept `kubectl scale --replicas 1`."""
    assert problems(["torchrun", "x.py"], nodes=1, minNodes=1) == []
    assert variables(job(nodes=1, minNodes=1))["PET_NNODES"] == "1:1"


def test_more_nodes_in_the_command_than_in_the_job_get_a_warning() -> None:
    what = job(nodes=2, container={"command": ["torchrun", "--nnodes=1:4", "train.py"]})
    assert any("(torchrun's last call)" in note for note in launcher.warnings(what.spec))


# ---------------------------------------------------------------- under ddprun


DDPRUN = {"command": ["ddprun", "train.py"]}


def test_ddprun_is_told_the_range_and_which_node_it_is() -> None:
    """ddprun must get the range and its node's number, because nodes keep their numbers and only ranks get new ones."""
    second = variables(job(nodes=3, minNodes=2, container=DDPRUN), 1)
    assert (second["PET_NNODES"], second["PET_NODE_RANK"]) == ("2:3", "1")
    assert not second.keys() & {"PET_RDZV_BACKEND", "PET_RDZV_CONF", "PET_MAX_RESTARTS", "RANK"}


def test_a_range_in_the_command_of_ddprun_makes_the_job_elastic() -> None:
    what = job(nodes=3, container={"command": ["ddprun", "--nnodes=2:3", "x.py"]})
    assert what.spec.facts.min_nodes == 2


def trains_under_ddprun(nodes: int = 3, *, agents_ask: bool = True, **spec: Any) -> World:
    """Return a job whose nodes train for a minute, at step 40."""
    world = elastic(container=DDPRUN, nodes=nodes, **spec)
    world.agents_ask = agents_ask
    world.running().after(60).reports_step(40).settle()
    assert world.status.reason == "AllNodesRun"
    return world


def test_the_others_go_on_while_a_lost_pod_of_ddprun_is_replaced() -> None:
    """The job must stay Running while a lost pod is replaced, because its other ranks train."""
    world = trains_under_ddprun()
    since = world.status.state_time, world.status.running_time
    world.vanishes(1)
    world.step()
    assert world.status.state == "Running"
    assert "digits-1-1-r1 takes its place, the others go on (not charged to backoffLimit" in world.status.message
    world.settle()
    assert (world.status.reason, world.status.attempt) == ("EnoughNodesRun", 1)
    assert world.status.message == "2 of 3 nodes are running, attempt 1; waiting for node 1"
    assert (world.status.display.nodes, world.status.restarts.application) == ("2/3", 0)
    assert [event.reason for event in world.events][-2:] == ["Replacing", "EnoughNodesRun"]
    world.runs(1).settle()
    assert (world.status.reason, world.status.attempt) == ("AllNodesRun", 1)
    assert (world.status.state_time, world.status.running_time) == since
    world.after(60).exits(0).exits(1).exits(2).settle()
    assert world.status.state == "Succeeded"
    goodput = world.status.goodput
    assert (goodput.starting_seconds, goodput.productive_seconds, goodput.restarting_seconds) == (60, 60, 0)


def test_the_event_names_all_pods_that_replace_lost_ones() -> None:
    world = trains_under_ddprun(nodes=4)
    world.vanishes(1).vanishes(2).step()
    assert "digits-1-1-r1, digits-1-2-r1 replace the lost pods, the others go on" in world.status.message


def test_a_lost_node_is_deleted_and_replaced_while_the_others_go_on() -> None:
    world = trains_under_ddprun().node_lost(2).after(31).settle()
    assert (world.status.reason, world.status.last_failure.reason) == ("EnoughNodesRun", "NodeLost")
    assert world.names() == ["digits-1-0", "digits-1-1", "digits-1-2-r1"]


def test_the_others_go_on_while_a_pod_is_being_deleted() -> None:
    """The other nodes must count as training while a deleted pod saves, which may take an hour."""
    world = trains_under_ddprun().deleted_first(2).settle()
    assert (world.status.state, world.status.reason) == ("Running", "EnoughNodesRun")
    assert world.status.message == "2 of 3 nodes are running, attempt 1; digits-1-2 on node-2 is stopping"
    assert world.names() == ["digits-1-0", "digits-1-1", "digits-1-2"], "two agents would fight for one place"
    world.stops(2).settle()
    assert (world.status.attempt, world.names()[-1]) == (1, "digits-1-2-r1")
    assert (world.status.restarts.infrastructure, world.status.restarts.application) == (1, 0)


@pytest.mark.parametrize("lost", [0, 2])
def test_the_others_go_on_while_the_sidecar_of_a_lost_pod_still_runs(lost: int) -> None:
    world = trains_under_ddprun().exits(lost, 137, phase="Running").settle()
    assert (world.status.state, world.status.attempt) == ("Running", 1)
    assert world.status.leader == api.JobLeader(term=1 if lost else 2, place=0 if lost else 1)
    assert world.pods[f"digits-1-{lost}"].deletion_requested_at is not None, "nobody else ends the sidecar"
    world.stops(lost).settle().runs(lost).settle()
    assert (world.status.reason, world.status.attempt) == ("AllNodesRun", 1)
    assert f"digits-1-{lost}-r1" in world.names()


def test_fewer_than_minNodes_do_not_count_as_running_while_the_sidecar_of_a_lost_pod_still_runs() -> None:
    world = trains_under_ddprun(nodes=2, minNodes=2).exits(0, 137, phase="Running").settle()
    assert (world.status.state, world.status.attempt) == ("Restarting", 1)
    assert world.status.message.endswith("waiting for digits-1-0 on node-0 to stop")
    world.stops_all().settle().runs(0).settle()
    assert (world.status.reason, world.status.attempt) == ("AllNodesRun", 1)


@pytest.mark.parametrize(("code", "init"), [(137, ""), (2, ""), (1, "copy")])
def test_a_pod_that_fails_again_and_again_does_not_end_the_job_of_the_others(code: int, init: str) -> None:
    """A flapping pod must not use up backoffLimit: nobody waits for it, and the leader restarts failed ranks itself."""
    world = trains_under_ddprun()
    for number in range(1, 8):
        world.after(11).reports_step(40 + number)
        world._change(2, phase="Failed", trainer=Container("ended", "Error", exit_code=code, init=init))
        world.settle().after(11).settle().runs(2).settle()
        assert (world.status.state, world.status.replacements) == ("Running", {"2": number})
    assert (world.status.restarts.application, world.status.restarts.infrastructure) == (0, 7)


def test_a_pod_is_replaced_again_after_ten_seconds_although_the_cluster_clock_is_an_hour_ahead() -> None:
    world = trains_under_ddprun().vanishes(2).settle().runs(2)
    name = "digits-1-2-r1"
    bound = world.pods[name]
    world.pods[name] = replace(bound, scheduled_at=world.now + dt.timedelta(hours=1), bound_since=world.now)
    world.settle().exits(2, 137).settle().after(11).settle()
    assert "digits-1-2-r2" in world.names()


def test_reports_of_the_others_count_before_and_after_a_loss_is_seen() -> None:
    """Agents restart ranks before the operator sees the loss. Their progress must not freeze until the next start."""
    world = trains_under_ddprun().after(5)
    resumed: dict[str, Any] = {"generation": 1, "resumed_step": 41, "resumed_from": "the memory"}
    world.reports_step(43, **resumed).settle().vanishes(1).settle().after(10).reports_step(48, **resumed).settle()
    assert (world.status.progress.step, world.status.goodput.lost_steps) == (48, 0)
    assert world.status.goodput.restarting_seconds == 0


def test_a_pod_that_joins_nodes_that_train_wants_no_pre_flight() -> None:
    """A pod that joins training nodes must skip the pre-flight, for which all ranks would have to stop."""
    world = trains_under_ddprun()
    for _ in range(3):
        world.after(60).evicted(2, "Evicted").settle()
        pod = build.pod(world.job, 1, 2, replacement=1)
        assert "DDPJOB_PREFLIGHT" not in {entry["name"] for entry in pod["spec"]["containers"][0]["env"]}
        world.runs(2).settle()


def test_too_few_that_are_left_wait_for_the_replacement() -> None:
    world = elastic(container=DDPRUN).started().runs(0, 1).after(31).settle().vanishes(1).settle()
    assert (world.status.state, world.status.attempt, world.status.replacements) == ("Restarting", 1, {"1": 1})
    assert any("digits-1-1-r1 takes its place, the other node waits" in event.message for event in world.events)


def test_if_no_agent_asks_who_leads_the_others_wait_for_a_new_node_0() -> None:
    """Agents that cannot reach the status receiver must wait for node 0: they would not learn of a new leader."""
    world = trains_under_ddprun(agents_ask=False).vanishes(0).settle()
    assert (world.status.state, world.status.attempt, world.status.replacements) == ("Restarting", 1, {"0": 1})
    assert any("digits-1-0-r1 takes its place, the other 2 nodes wait" in event.message for event in world.events)
    assert world.runs(0).settle().status.reason == "AllNodesRun"


def test_an_operator_without_a_receiver_appoints_no_leader_although_agents_have_asked_before() -> None:
    """Pods that are made while progress is off never ask. They would follow node 0 in a second group for ever."""
    world = trains_under_ddprun()
    world.agents_ask, world.settings = False, Settings(answers_agents=False)
    world.vanishes(0).settle()
    assert (world.status.state, world.status.leader) == ("Restarting", api.JobLeader(term=1))
    assert world.runs(0).settle().status.reason == "AllNodesRun"


@pytest.mark.parametrize("lost", [0, 1])
def test_an_operator_without_a_receiver_restarts_all_nodes_if_another_node_than_0_has_led(lost: int) -> None:
    """New pods could not learn who leads: they would follow node 0, and wait for it or train in a second group."""
    world = trains_under_ddprun().vanishes(0).settle().runs(0).after(60).settle()
    assert world.status.leader == api.JobLeader(term=2, place=1)
    world.agents_ask, world.settings = False, Settings(answers_agents=False)
    world.vanishes(lost).settle().stops_all().settle()
    assert (world.status.attempt, world.status.leader) == (2, None)
    assert world.after(60).running().status.reason == "AllNodesRun"


@pytest.mark.parametrize("url", ["", "http://ddpjob-status.ddpjob.svc:8081/v1/progress"])
def test_agents_can_ask_an_operator_that_has_a_url_for_reports(url: str) -> None:
    assert OperatorSettings.read({"DDPJOB_STATUS_URL": url}).rules.answers_agents is bool(url)


def told(world: World) -> dict[str, Any] | None:
    pod = world.pods.get(leadership.pod_name(world.job))
    if pod is not None and pod.trainer.state == "running":
        pod = replace(pod, address=f"10.0.0.{pod.place}")
    return leadership.answer(world.job, pod, 29400)


def test_the_others_go_on_without_node_0_because_the_first_of_them_leads() -> None:
    world = trains_under_ddprun()
    answer = told(world)
    assert answer is not None
    assert (answer["term"], answer["place"], answer["host"]) == (1, 0, "10.0.0.0")
    world.vanishes(0).settle()
    assert (world.status.state, world.status.reason) == ("Running", "EnoughNodesRun")
    assert world.status.leader == api.JobLeader(term=2, place=1)
    answer = told(world)
    assert answer is not None
    assert (answer["term"], answer["place"], answer["host"]) == (2, 1, "10.0.0.1")
    assert (answer["left"]["application"], answer["left"]["infrastructure"]) == (3, 99)
    world.runs(0).settle().vanishes(0).settle()
    assert world.status.leader == api.JobLeader(term=2, place=1), "node 0 leads no more"
    world.runs(0).settle().vanishes(1).settle()
    assert world.status.leader == api.JobLeader(term=3, place=2)


def test_a_new_leader_is_told_the_generations_that_the_job_has_had() -> None:
    """A new leader must learn how many generations the job had. With a lower number, its ranks would count as older."""
    world = trains_under_ddprun().after(5).reports_step(43, generation=4).settle().vanishes(0).settle()
    answer = told(world)
    assert answer is not None
    assert answer["left"]["generations"] == 5
    world.change(suspend=True).settle().stops_all().settle().change(suspend=False).settle().runs(0, 1, 2).settle()
    answer = told(world)
    assert answer is not None
    assert answer["left"]["generations"] == 0, "a new attempt counts from 0"


def test_a_leader_that_is_lost_before_agents_ask_a_new_operator_is_followed_by_one_of_a_later_term() -> None:
    """Each new leader must have a later term, because two agents that lead in one term cannot be distinguished."""
    world = trains_under_ddprun(minNodes=1).vanishes(0).settle()
    world.agents_ask = False
    world.vanishes(1).settle()
    assert world.status.leader == api.JobLeader(term=3, place=2)


def test_a_new_operator_that_nobody_has_asked_yet_appoints_a_leader_for_the_lost_node_0() -> None:
    """Agents without a leader ask each second, so a new operator may see the loss before the first question."""
    world = trains_under_ddprun()
    world.agents_ask = False
    world.vanishes(0).settle()
    assert (world.status.state, world.status.leader) == ("Running", api.JobLeader(term=2, place=1))


def test_a_node_0_that_led_and_was_lost_while_no_operator_was_watching_is_followed_by_one_of_another_name() -> None:
    """A second pod of the same name would lead in the same term, and its restart would be charged to the training."""
    world = elastic(container=DDPRUN, nodes=3).started()
    assert world.status.started == set(), "the operator stops before it sees a pod run"
    world.runs(0, 1).vanishes(0).settle()
    assert "digits-1-0" not in world.pods
    assert "digits-1-0-r1" in world.pods
    assert world.status.restarts.application == 0


def test_a_replacement_of_no_place_in_the_status_does_not_end_the_plan() -> None:
    """The keys of status.replacements are free, and a plan that raises never decides anything for this job."""
    world = elastic(container=DDPRUN, nodes=3).started()
    world.job = replace(world.job, status=replace(world.job.status, replacements={"x": 1}))
    assert world.runs(0, 1).vanishes(0).settle().status.replacements["0"] == 1


def test_a_new_leader_waits_for_no_node_that_was_lost_with_the_last_leader() -> None:
    """A new leader must not wait for lost nodes: all ranks stand still for these 5 s."""
    answer = told(trains_under_ddprun(nodes=4, minNodes=1).vanishes(0).vanishes(2).settle())
    assert answer is not None
    assert Appointment.read(json.dumps(answer).encode()).survivors(Members((0, 1, 2, 3))) == {1, 3}


def test_a_new_leader_waits_a_moment_for_the_spare_that_takes_the_place_of_the_last_leader() -> None:
    """Otherwise the spare would join only after its snooze, and stop all ranks once more."""
    answer = told(trains_under_ddprun(nodes=2, minNodes=1, spares=1).vanishes(0).settle())
    leader = Appointment.read(json.dumps(answer).encode())
    assert (leader.survivors(Members((0, 1))), leader.survivors(Members((0, 1)), has_spares=True)) == ({1}, {1, 2})
    assert leader.survivors(Members(), has_spares=True) == set(), "a new pod does not know who trained"


def test_nobody_is_told_to_follow_a_pod_that_does_not_run() -> None:
    world = trains_under_ddprun(nodes=2, minNodes=1).vanishes(0).vanishes(1).settle()
    assert world.status.state == "Restarting"
    assert told(world) is None
    world.runs(0, 1).settle()
    assert told(world) is not None


def one_restart(turn: int) -> AgentReport:
    """Return the report of a leader that has restarted the ranks once."""
    counts = AgentCounts(application=1, in_a_row=1, charged_in_a_row=1)
    failure = Failure(rank=1, node_rank=1, exit_code=7, failure_class="application", charged_to="application")
    return AgentReport(replacement=turn, restarts=counts, failures=[failure])


def test_restarts_in_place_of_two_leaders_are_all_counted() -> None:
    world = trains_under_ddprun()
    world.agent_reports(one_restart(0)).settle().vanishes(0).settle().agent_reports(one_restart(2)).settle()
    assert world.status.restarts.application == 2


def test_a_new_attempt_begins_with_node_0() -> None:
    world = trains_under_ddprun().vanishes(0).settle().change(suspend=True).settle().stops_all().settle()
    world.change(suspend=False).settle()
    assert (world.status.attempt, world.status.leader) == (2, api.JobLeader(term=1))


def test_a_smaller_number_of_nodes_stops_only_the_nodes_above_it() -> None:
    world = trains_under_ddprun(nodes=4, minNodes=1).change(nodes=2).settle()
    assert (world.status.state, world.status.attempt) == ("Running", 1)
    assert "Rescaled" in [event.reason for event in world.events]
    stopping = [pod.place for pod in world.pods.values() if pod.deletion_requested_at is not None]
    assert stopping == [2, 3]
    world.stops(2, 75).stops(3, 75).settle()
    assert (world.names(), world.status.message) == (
        ["digits-1-0", "digits-1-1"],
        "2 of 2 nodes are running, attempt 1",
    )
    assert world.status.restarts is None or world.status.restarts.infrastructure == 0
    world.exits(0).exits(1).settle()
    assert world.status.state == "Succeeded"


def test_a_larger_number_of_nodes_adds_pods_and_stops_none() -> None:
    world = trains_under_ddprun(nodes=2, minNodes=1).change(nodes=4).settle()
    assert (world.status.state, world.status.attempt) == ("Running", 1)
    assert world.names() == ["digits-1-0", "digits-1-1", "digits-1-2", "digits-1-3"]
    assert all(pod.deletion_requested_at is None for pod in world.pods.values())
    assert world.runs(2, 3).settle().status.reason == "AllNodesRun"


def test_a_job_that_grows_again_makes_new_pods_for_the_places_that_it_had_left() -> None:
    world = trains_under_ddprun(nodes=3, minNodes=1).change(nodes=2).settle().change(nodes=3).settle()
    assert "digits-1-2-r1" not in world.names(), "the old pod is still ending"
    world.stops(2, 75).settle()
    assert world.names()[-1] == "digits-1-2-r1"
    assert world.runs(2).settle().status.reason == "AllNodesRun"


def led_by_node_2() -> World:
    world = trains_under_ddprun(nodes=3, minNodes=1).vanishes(0).vanishes(1).settle()
    assert world.status.leader is not None
    assert world.status.leader.place == 2
    return world


def test_the_status_of_a_job_that_grows_again_names_the_pods_that_still_leave() -> None:
    world = trains_under_ddprun(minNodes=1).change(nodes=1).settle().change(nodes=3).settle()
    assert world.status.reason == "EnoughNodesRun"
    assert world.status.message == "1 of 3 nodes are running, attempt 1; waiting for 2 pods to stop"


def test_a_job_does_not_wait_for_a_lost_pod_that_comes_back_after_another_pod_has_taken_its_place() -> None:
    """A finalizer may keep the lost pod until its node is ready again."""
    world = trains_under_ddprun()
    lost = world.pods["digits-1-2"]
    world.node_lost(2).after(31).settle().runs(2).settle()
    assert world.status.reason == "AllNodesRun"
    assert world.nodes is not None
    del world.nodes[lost.node]
    world.pods[lost.name] = lost
    world.settle()
    assert world.pods[lost.name].deletion_requested_at is not None
    assert world.status.reason == "AllNodesRun"


def test_the_lead_moves_from_a_node_above_the_smaller_number_after_its_ranks_have_saved() -> None:
    """The lead must move only after the ranks have saved, because an appointment ends all ranks at once."""
    world = led_by_node_2().runs(0, 1).settle().change(nodes=2).settle()
    before = world.status.leader
    assert before is not None
    assert before.place == 2
    world.stops(2, 75).settle()
    assert world.status.leader == api.JobLeader(term=before.term + 1, place=0)
    assert world.status.state == "Running"
    answer = told(world)
    assert answer is not None
    leader = Appointment.read(json.dumps(answer).encode())
    assert leader.survivors(Members((2, 0, 1, 3))) == {0, 1}, "the new leader waits for no pod that was scaled away"


def test_a_job_that_grows_again_waits_for_the_leader_that_it_had_left() -> None:
    """The pod of the former leader must end first. Otherwise the next pod at its place would lead in the same term."""
    world = led_by_node_2().runs(0, 1).settle().change(nodes=2).settle().change(nodes=3).settle()
    before = world.status.leader
    assert before is not None
    world.stops(2, 75).settle()
    assert world.status.leader == api.JobLeader(term=before.term + 1, place=0)
    assert (world.status.state, world.names()[-1]) == ("Running", "digits-1-2-r1")


def test_a_leader_that_reports_a_restart_while_it_leaves_does_not_count_as_started_later() -> None:
    """If the job grows again, the next pod of the place must not count as vanished, which would restart all."""
    world = led_by_node_2().runs(0, 1).settle().change(nodes=2).settle().agent_reports(one_restart(2)).settle()
    world.stops(2, 75).settle().change(nodes=3).settle()
    assert (world.status.state, world.status.attempt, world.names()[-1]) == ("Running", 1, "digits-1-2-r1")


def test_the_next_leader_is_at_a_place_that_the_job_still_has() -> None:
    world = led_by_node_2().change(nodes=2).settle().stops(2, 75).settle()
    assert world.status.leader is not None
    assert world.status.leader.place == 0
    assert told(world) is None
    world.runs(0, 1).settle()
    assert told(world) is not None


def test_a_smaller_job_whose_nodes_have_all_left_has_startDeadlineSeconds_for_the_others() -> None:
    """The time must not count from the attempt's start: all pods would be deleted at once, also those that save."""
    world = trains_under_ddprun(minNodes=1, startDeadlineSeconds=30).vanishes(0).vanishes(1).settle().change(nodes=2)
    world.settle().after(20).stops(2, 75).settle().runs(0, 1).settle()
    assert (world.status.attempt, world.status.reason) == (1, "AllNodesRun")


def test_a_node_whose_ranks_were_in_the_group_leads_rather_than_one_that_has_just_come() -> None:
    """A node whose ranks were in the group must lead: a newcomer has no state, and knows no generation's number."""
    world = trains_under_ddprun(minNodes=1).vanishes(1).settle().runs(1).settle().vanishes(0).settle()
    assert world.status.leader is not None
    assert world.status.leader.place == 2


def test_a_lost_leader_is_replaced_while_a_pod_that_was_scaled_away_still_saves() -> None:
    world = trains_under_ddprun(nodes=4, minNodes=1).change(nodes=3).settle().change(nodes=4).settle()
    assert "digits-1-3-r1" not in world.names()
    world.vanishes(0).settle()
    assert world.status.leader is not None
    assert (world.status.leader.place, world.status.state, world.names()[0]) == (1, "Running", "digits-1-0-r1")


def test_a_pod_that_was_scaled_away_and_still_saves_keeps_the_job_from_being_suspended() -> None:
    world = trains_under_ddprun(minNodes=1).change(nodes=2).settle().change(suspend=True).settle().stops(0).stops(1)
    assert not world.settle().is_true("Suspended")
    assert world.stops(2, 75).settle().is_true("Suspended")


def test_the_pods_of_a_job_with_an_appointed_leader_ask_first() -> None:
    """Pods of a job with an appointed leader must ask who leads: a new pod of node 0 would lead a second group."""
    world = trains_under_ddprun()
    assert "DDPJOB_LEADER_APPOINTED" not in agent_environment.environment(world.job, 1)
    world.vanishes(0).settle()
    assert agent_environment.environment(world.job, 1)["DDPJOB_LEADER_APPOINTED"] == "1"


def test_a_pod_that_fails_again_and_again_is_not_created_without_a_pause() -> None:
    """A pod that a kubelet rejects again and again must wait before each try, although the other nodes make steps."""
    world, made = trains_under_ddprun(), 0
    for step in range(60):
        world.after(1).reports_step(41 + step).settle()
        if world._pod(1).live:
            made += 1
            world.runs(1).settle().evicted(1, "UnexpectedAdmissionError").settle()
    assert world.status.state == "Running"
    assert made <= 7
    assert world.status.progress.step > 90, "a pause does not hide the others' progress"


def test_a_pod_that_fails_for_lack_of_memory_is_charged_and_ends_the_job_at_its_limit() -> None:
    world = trains_under_ddprun(backoffLimit=1).exits(1, 137, reason="OOMKilled").settle()
    assert (world.status.state, world.status.restarts.application) == ("Running", 1)
    world.after(60).runs(1).settle().exits(1, 137, reason="OOMKilled").restarted()
    assert (world.status.state, world.status.reason) == ("Failed", "BackoffLimitExceeded")


def test_restarts_in_place_do_not_count_a_node_that_never_came_as_started() -> None:
    """A node whose pod was never created must not count as started, or the job would wait for its completion."""
    world = elastic(container=DDPRUN).started().runs(0, 1).after(31).settle()
    world.agent_reports(one_restart(0)).settle().vanishes(2).settle()
    assert (world.status.started_nodes, world.names()[-1]) == ("0-1", "digits-1-2")
    assert world.exits(0).exits(1).settle().status.state == "Succeeded"


def trained(members: str) -> str:
    """Return the last message of node 0's agent after these nodes have trained to the end."""
    return json.dumps({"ddpjob": 1, "ended": True, "agent": {"replacement": 0, "generation": 1, "members": members}})


def test_a_pod_that_still_waits_to_join_when_the_group_has_ended_is_deleted_and_fails_nobody() -> None:
    """A pod that still waits to join must be deleted when the group has ended. It must not fail the job."""
    world = elastic(container=DDPRUN).started().runs(0, 1).after(31).settle().after(60).runs(2).settle()
    world.exits(0, message=trained("0-1")).settle()
    assert world.status.state == "Running", "node 1 has not ended"
    world.exits(1).settle()
    assert (world.status.state, world.status.message) == ("Succeeded", "2 of 3 nodes trained and completed")
    assert world.status.display.nodes == "2/3"
    assert world.stops_all().names() == ["digits-1-0", "digits-1-1"]


def test_a_pod_that_only_waited_may_end_in_any_way_after_the_group_has_ended() -> None:
    for code in (0, 75, 137):
        world = elastic(container=DDPRUN).started().runs(0, 1).after(31).settle().after(60).runs(2).settle()
        world.exits(0, message=trained("0-1")).exits(2, code).settle()
        assert (world.status.state, world.status.attempt) == ("Running", 1)
        world.exits(1).settle()
        assert (world.status.state, world.status.display.nodes) == ("Succeeded", "2/3")


def test_members_that_did_not_complete_are_not_left_out() -> None:
    world = trains_under_ddprun().exits(0, message=trained("0-2")).exits(1).settle().node_lost(2).after(31).settle()
    assert world.status.state == "Restarting"


def test_a_job_that_was_scaled_down_while_its_training_ended_ends() -> None:
    """The job must end if a user takes away a node that has trained before the operator sees that all have completed:
    fewer than minNodes of those that trained are left, and the node that only waited ends, too."""
    world = trains_under_ddprun().change(nodes=2).settle()
    world.exits(0, message=trained("0,2")).exits(1).settle()
    assert world.status.state == "Succeeded"


def test_an_agent_that_ends_with_0_after_its_ranks_failed_for_torchrun_is_no_used_budget() -> None:
    """An agent's exit must not count all restarts as used: ddprun reports each restart, unlike torchrun."""
    world = trains_under_ddprun(backoffLimit=3)
    message = json.dumps({"ddpjob": 1, "ended": True, "rank": 0, "exitCode": 1, "exception": "ValueError: x"})
    world.exits(0, 1, message=message).exits(1, 75).exits(2, 75).restarted()
    assert (world.status.attempt, world.status.restarts.application) == (2, 1)


# ---------------------------------------------------------------- spares


def trains_with_a_spare() -> World:
    world = digits(container=DDPRUN, nodes=3, spares=1).running().after(60).reports_step(40).settle()
    assert world.status.message == "3 of 3 nodes are running and 1 spare, attempt 1"
    assert (world.status.reason, world.status.display.nodes) == ("AllNodesRun", "3/3"), "kubectl scale shows this too"
    return world


def test_a_spare_is_one_more_pod_whose_agent_knows_how_many_wait() -> None:
    world = trains_with_a_spare()
    assert world.names() == ["digits-1-0", "digits-1-1", "digits-1-2", "digits-1-3"]
    last = variables(world.job, 3) | agent_environment.environment(world.job, 0)
    assert (last["PET_NNODES"], last["PET_NODE_RANK"], last["DDPJOB_SPARES"]) == ("3:4", "3", "1")
    assert (last["DDPJOB_WORLD_SIZE"], world.job.spec.facts.min_nodes) == ("3", 3)


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_a_lost_node_or_spare_is_replaced_while_the_others_go_on(lost: int) -> None:
    world = trains_with_a_spare().vanishes(lost).settle()
    assert (world.status.state, world.status.reason) == ("Running", "EnoughNodesRun")
    assert (world.status.nodes, world.status.restarts.application) == (api.Nodes(total=3, ready=3), 0)
    assert world.status.message == f"3 of 3 nodes are running, attempt 1; waiting for node {lost}"
    assert world.runs(lost).settle().status.reason == "AllNodesRun"


def test_a_mistake_on_a_spare_alone_does_not_fail_the_job() -> None:
    """A mistake that all pods make is permanent. One node trains, so one pod is not all."""
    world = digits(container=DDPRUN, nodes=1, spares=1).running()
    world.exits(1, 1, message="Traceback (most recent call last):\nFileNotFoundError: data").settle()
    assert (world.status.state, world.status.replacements) == ("Running", {"1": 1})


def test_a_spare_does_not_hold_a_success_and_is_deleted_at_the_end() -> None:
    world = trains_with_a_spare().exits(0, message=trained("0-2")).exits(1).exits(2).settle()
    assert (world.status.state, world.status.message) == ("Succeeded", "all 3 nodes completed")
    assert world.stops_all().names() == ["digits-1-0", "digits-1-1", "digits-1-2"]


@pytest.mark.parametrize("place", [1, 3])
def test_a_spare_that_took_a_lost_place_counts_and_the_new_pod_does_not(place: int) -> None:
    world = trains_with_a_spare().vanishes(1).settle().runs(1).settle()
    world.exits(0, message=trained("0,2-3")).exits(2).settle()
    assert world.status.state == "Running"
    assert (world.exits(place).settle().status.state == "Succeeded") is (place == 3)


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("torchrun x.py", "spec.spares: needs ddprun"),
        ("ddprun --nnodes=2:3 x.py", "--nnodes=2:3 contradicts spec.spares: 1"),
    ],
)
def test_spares_that_could_not_help_are_refused_with_the_fix(command: str, text: str) -> None:
    found = problems(command.split(), nodes=2, spares=1)
    assert any(text in problem for problem in found), found


# ---------------------------------------------------------------- who is needed


def test_the_group_trains_with_minNodes_and_shows_what_the_others_wait_for() -> None:
    """If one of eight GPUs is missing, the job must train with seven and show what the other node waits for."""
    world = elastic().started().runs(0, 1).unschedulable(2, "0/3 nodes are available: 1 Insufficient nvidia.com/gpu")
    world.settle()
    assert (world.status.state, world.status.reason) == ("Running", "EnoughNodesRun")
    assert world.status.message.startswith("2 of 3 nodes are running, attempt 1; Unschedulable: 1 of 3 pods: 0/3 nodes")
    assert world.status.display.nodes == "2/3"


def test_pods_that_start_within_the_last_call_of_torchrun_are_waited_for() -> None:
    """Pods that start within torchrun's last call are waited for, so that one Event has the final number of nodes."""
    world = elastic().started().runs(0, 1).after(29).settle()
    assert (world.status.state, world.status.message) == ("Starting", "waiting for node 2")
    assert world.after(1).settle().status.state == "Running"


def test_fewer_than_minNodes_or_a_group_without_node_0_does_not_count_as_training() -> None:
    """A group without node 0, whose torchrun has the store, or with fewer than minNodes does not train."""
    assert elastic().started().runs(0).settle().status.state == "Starting"
    assert elastic().started().runs(1, 2).settle().status.state == "Starting"


def test_a_late_node_joins_without_a_restart() -> None:
    world = elastic().started().runs(0, 1).after(31).settle().after(600).settle()
    assert world.status.state == "Running"
    assert world.status.message == "2 of 3 nodes are running, attempt 1; waiting for node 2"
    world.runs(2).settle()
    assert (world.status.state, world.status.reason, world.status.attempt) == ("Running", "AllNodesRun", 1)
    assert world.status.started_nodes == "0-2"


def test_a_lost_pod_restarts_the_group_with_the_remaining_pods() -> None:
    """All pods must restart after a loss: a pod that joined a running rendezvous hung or failed in 6 of 12 trials."""
    world = elastic().running().exits(1, code=137).restarted()
    assert world.status.attempt == 2
    assert world.runs(0, 2).settle().status.state == "Restarting"
    assert world.after(31).settle().status.message == "2 of 3 nodes are running, attempt 2; waiting for node 1"


def test_a_pod_that_never_ran_may_be_deleted_without_a_restart() -> None:
    world = elastic().started().runs(0, 1).after(31).settle().vanishes(2).settle()
    assert (world.status.attempt, world.status.state) == (1, "Running")
    assert "digits-1-2" in world.pods


def test_a_quota_that_refuses_the_last_pod_does_not_stop_the_others() -> None:
    from ddpjob_operator.observed.cluster import Refusal

    world = elastic().started().runs(0, 1).after(31).settle().vanishes(2)
    world.refusals.append(Refusal("Pod", "digits-1-2", "exceeded quota: gpus", world.after(0).now.replace(year=2032)))
    world.settle()
    assert (world.status.state, world.status.reason) == ("Running", "EnoughNodesRun")
    assert "digits-1-2 was refused: exceeded quota: gpus" in world.status.message


def test_the_job_succeeds_when_all_nodes_that_trained_have_completed() -> None:
    """The pod that still waits to join must not keep the job running, because its group has ended."""
    world = elastic().started().runs(0, 1).after(31).settle().exits(0).exits(1).settle()
    assert (world.status.state, world.status.reason) == ("Succeeded", "AllNodesCompleted")
    assert world.status.message == "2 of 3 nodes trained and completed"
    assert "digits-1-2" not in world.stops_all().pods


def test_a_node_that_starts_after_the_end_of_training_does_not_fail_the_job() -> None:
    """A node that starts after the end must not fail the job, although its torchrun finds no store and exits with 1."""
    world = (
        elastic().started().runs(0, 1).after(31).settle().exits(0).settle().runs(2).settle().exits(2, code=1).settle()
    )
    assert world.status.state == "Running"
    assert world.exits(1).settle().status.state == "Succeeded"


NO_STORE = (
    "Traceback (most recent call last):\n"
    "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has failed.\n"
)
CLOSED = "torch.distributed.elastic.rendezvous.api.RendezvousClosedError\n"
NO_ANSWER = "torch.distributed.DistNetworkError: The client socket has timed out while trying to connect\n"
OWN = "Traceback (most recent call last):\nValueError: no such shard: 7\n"


def ended_beside_a_node_that_came(seconds_before: float, *, reported: bool = False, **spec: Any) -> World:
    """Return a world where nodes 0 and 1 trained and completed. Node 2 started `seconds_before` their completion."""
    world = elastic(**spec).started().runs(0, 1).after(31).settle().after(3600).settle()
    world.runs(2).settle()
    if reported:
        world.reports_step(5, rank=2, node_rank=2, phase="train")
    world.after(seconds_before).settle().exits(0).settle().exits(1).settle()
    assert (world.status.state, world.status.attempt, world.status.started_nodes) == ("Running", 1, "0-2")
    return world


@pytest.mark.parametrize("message", [NO_STORE, CLOSED, NO_ANSWER, ""], ids=["no store", "closed", "no answer", "mute"])
def test_a_node_still_importing_at_the_end_of_training_does_not_fail_the_job(message: str) -> None:
    """A node that was still importing when training ended must not cause a failure or a new training."""
    world = ended_beside_a_node_that_came(5).after(60).exits(2, 1, message=message).settle()
    assert (world.status.state, world.status.message) == ("Succeeded", "2 of 3 nodes trained and completed")
    assert world.status.last_failure is None


def test_a_late_node_does_not_fail_the_job_while_others_train_or_after_its_pod_is_gone() -> None:
    """The job must not fail while the other nodes are still completing, or after the late node's pod is gone."""
    world = elastic(nodes=4).started().runs(0, 1, 3).after(31).settle().after(3600).runs(2).settle().after(5)
    world.exits(0).exits(1).settle().exits(2, 1, message=CLOSED).settle()
    assert (world.status.state, world.status.started_nodes) == ("Running", "0-1,3")
    assert world.vanishes(2).settle().status.state == "Running"
    assert world.exits(3).settle().status.state == "Succeeded"


def test_a_late_node_is_recognized_by_its_container_start_and_not_by_its_binding() -> None:
    """The start of the container must decide if the node was late, because its image may take long to pull."""
    world = elastic().started().runs(0, 1).waits(2, "ContainerCreating").after(31).settle().after(3600).settle()
    got_its_node = world.now - dt.timedelta(seconds=3631)
    world.runs(2).settle().after(5).exits(0).exits(1).settle()
    started_at = world.now - dt.timedelta(seconds=5)
    world.exits(2, 1, message=NO_STORE)
    pod = world.pods["digits-1-2"]
    end = replace(pod.trainer, started_at=started_at)
    world.pods["digits-1-2"] = replace(pod, scheduled_at=got_its_node, trainer=end)
    assert world.settle().status.state == "Succeeded"


@pytest.mark.parametrize(
    ("seconds_before", "message", "reported"),
    [(5, OWN, False), (5, "no such option\n", False), (5, NO_STORE, True), (1000, NO_STORE, False), (90, "", False)],
    ids=["its own exception", "its own words", "it has trained", "it came long before", "mute, and long before"],
)
def test_a_node_that_may_have_trained_must_complete_too(seconds_before: float, message: str, reported: bool) -> None:
    """If a node may have trained, its failure must cause a restart. A wrong result must not count as a success."""
    world = ended_beside_a_node_that_came(seconds_before, reported=reported)
    world.exits(2, 1, message=message).settle()
    assert (world.status.state, world.status.attempt) in (("Failed", 1), ("Restarting", 2))


@pytest.mark.parametrize("message", [CLOSED, ""])
def test_a_node_that_started_with_the_others_must_complete_too(message: str) -> None:
    """If all nodes started together and the last one fails, the job must not count as succeeded."""
    world = elastic().started().runs(0, 1).after(12).runs(2).settle().after(20)
    world.exits(0).exits(1).settle().exits(2, 1, message=message).settle()
    assert world.status.state in ("Failed", "Restarting")


def test_a_node_that_failed_before_the_others_completed_is_not_ignored() -> None:
    """A node that failed before the others completed must be the cause, because it may have stopped them."""
    world = elastic().started().runs(0, 1).after(31).settle().after(3600).runs(2).settle().after(5)
    world.exits(2, 1, message=CLOSED).step()
    world.exits(0).exits(1).settle()
    assert world.status.state == "Restarting"


def test_startDeadlineSeconds_is_met_by_minNodes() -> None:
    world = elastic(startDeadlineSeconds=60).started().runs(0, 1).after(31).settle().after(61).settle()
    assert world.status.state == "Running"
    late = elastic(startDeadlineSeconds=60).started().runs(0).settle().after(61).settle()
    assert late.status.reason == "StartBackOff"


# ---------------------------------------------------------------- what a failure costs


def test_an_exception_fails_the_job_because_torchrun_has_used_all_its_restarts() -> None:
    """An exception must fail the job: torchrun has used all restarts, and three more attempts would be ten runs."""
    world = elastic(backoffLimit=3).running()
    world = (
        world.exits(1, code=1, message="ValueError: no such shard: 7\n").exits(0, code=1).exits(2, code=1).restarted()
    )
    assert (world.status.state, world.status.reason) == ("Failed", "BackoffLimitExceeded")
    assert "gave up after 3 restarts (backoffLimit: 3)" in world.status.message


@pytest.mark.parametrize(
    "container",
    [
        {"command": ["torchrun", "--max-restarts=1", "train.py"]},
        {"command": ["torchrun", "train.py"], "env": [{"name": "PET_MAX_RESTARTS", "value": "1"}]},
    ],
)
def test_a_torchrun_with_fewer_restarts_set_by_the_user_has_used_only_those(container: dict[str, Any]) -> None:
    """A user's --max_restarts 1, as in Kubeflow's elastic jobs, must not count as three restarts."""
    world = World(job(container=container, nodes=2, minNodes=1, backoffLimit=3)).running()
    world.exits(1, code=1, message="ValueError: no such shard").restarted()
    assert (world.status.state, world.status.attempt) == ("Restarting", 2)
    assert world.status.restarts.application == 2, "its own, and the new attempt"


def test_a_lost_node_is_not_charged_and_torchrun_keeps_its_restarts() -> None:
    world = elastic(backoffLimit=3).running().node_lost(1).after(120).settle().after(120).restarted()
    assert world.status.attempt == 2
    assert world.status.restarts.application == 0
    body = build.pod(world.job, 2, 0)
    env = {e["name"]: e["value"] for e in body["spec"]["containers"][0]["env"]}
    assert env["PET_MAX_RESTARTS"] == "3"


# ---------------------------------------------------------------- scale


@pytest.mark.parametrize("nodes", [2, 5])
def test_scaling_restarts_the_group_of_torchrun_with_the_new_number_and_is_not_charged(nodes: int) -> None:
    """torchrun accepts no more nodes than its maximum, so scaling must restart all pods. No budget may count this."""
    world = elastic().running().change(nodes=nodes).settle()
    assert (world.status.state, world.status.reason) == ("Restarting", "WaitingForOldPods")
    assert all(p.deletion_requested_at is not None for p in world.pods.values())
    world.stops_all().settle()
    assert world.names() == [f"digits-2-{place}" for place in range(nodes)]
    world.runs(*range(nodes)).settle()
    assert (world.status.state, world.status.attempt) == ("Running", 2)
    assert world.status.nodes == api.Nodes(total=nodes, ready=nodes)
    assert world.status.restarts.total == 0
    assert any(e.reason == "Rescaled" for e in world.events)


def test_scaling_a_job_with_completed_nodes_does_not_repeat_the_training() -> None:
    """The last node is only saving when the job is scaled. The complete training must not be repeated."""
    world = elastic(minNodes=1).running().exits(0).exits(1).settle().change(nodes=4).settle()
    assert (world.status.state, world.status.attempt, world.names()) == (
        "Running",
        1,
        [f"digits-1-{n}" for n in range(3)],
    )
    assert world.exits(2).settle().status.state == "Succeeded"


def test_scaling_during_a_start_back_off_does_not_end_the_back_off() -> None:
    """Scaling must not end a back-off. Otherwise each step of an autoscaler would make all pods, with no free nodes."""
    world = elastic(startDeadlineSeconds=60).started().after(61).settle().stops_all().settle()
    again = world.status.attempt_time
    assert (world.status.reason, world.names()) == ("StartBackOff", [])
    world.change(nodes=2).settle()
    assert again is not None
    assert (world.status.attempt, world.status.attempt_time, world.status.start_retries) == (3, again, 1)
    assert world.status.message.endswith(f"start again as attempt 3 at {again:%H:%M:%S} UTC")
    assert world.names() == []
    world.after((again - world.now).total_seconds()).settle()
    assert world.names() == ["digits-3-0", "digits-3-1"]


def test_a_scale_below_minNodes_that_bypassed_the_api_server_changes_nothing() -> None:
    world = elastic().running()
    parsed, world.problems = validation.parse(manifest(nodes=1, minNodes=2))
    world.change(nodes=parsed.spec.nodes).settle()
    assert (world.status.state, world.status.attempt) == ("Running", 1)


def test_a_resumed_job_takes_the_current_number_of_nodes() -> None:
    world = elastic().running().change(suspend=True).settle().stops_all().settle()
    assert world.status.state == "Suspended"
    world.change(suspend=False, nodes=2).settle()
    assert world.names() == ["digits-2-0", "digits-2-1"]


def test_a_static_job_keeps_its_number_of_nodes() -> None:
    """The status of a static job must have no copy of spec.nodes, which cannot change while the job is running."""
    assert digits().running().status.attempt_nodes is None


@pytest.mark.parametrize(
    ("given", "least", "most"), [("1:3", 1, 3), ("2:2", 2, 2), ("4", None, 4)], ids=["range", "equal", "number"]
)
def test_nodes_on_the_command_line_may_be_a_range(given: str, least: int | None, most: int, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(manifest()))
    _, read = options.applied(yamlfile.read_job(str(file), None), given, (), ())
    assert (read.spec.min_nodes, read.spec.nodes) == (least, most)


def test_an_invalid_range_is_refused_by_the_option(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(manifest()))
    with pytest.raises(yamlfile.InputError, match="minNodes"):
        options.applied(yamlfile.read_job(str(file), None), "3:1", (), ())


def test_the_pod_of_node_0_is_created_before_the_others() -> None:
    """Node 0's pod must be created first: a pod on the only free node would wait for node 0 in vain."""
    world = elastic()
    made = [[a.place for a in world.step().actions if isinstance(a, CreatePod)] for _ in range(4)]
    assert [places for places in made if places] == [[0], [1, 2]]
