"""Observed facts about a pod are kept, because the kubelet's later reports about a deleted pod contain less."""

import datetime as dt
from typing import Any

import pytest
from worlds import START, World, digits

from ddpjob_operator.kube.watch import observe
from ddpjob_operator.kube.watch.store import Store
from ddpjob_operator.observed import facts
from ddpjob_operator.observed.cluster import Container, Pod

Raw = dict[str, Any]


def stamp(seconds: float) -> str:
    return (START + dt.timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def seen(*stories: tuple[Raw, Raw]) -> Pod:
    """Return the pod that the operator's store holds after a watch has shown these (status, metadata) in order."""
    store: Store[Pod] = Store(observe.pod, lambda _: ("team", "digits"), lambda *_: None, facts.merge)
    for version, (status, metadata) in enumerate(stories, start=1):
        status = dict(status)
        state = status.pop("state", {"waiting": {}})
        store.put(
            {
                "metadata": {"name": "digits-1-0", "uid": "u", "resourceVersion": str(version), **metadata},
                "spec": {"containers": [{"name": "trainer"}], "nodeName": "gpu-7"},
                "status": {"containerStatuses": [{"name": "trainer", "state": state}], **status},
            }
        )
    return store.of(("team", "digits"))[0]


def exited(code: int, at: float, **more: Any) -> Raw:
    ended = {"exitCode": code, "reason": "Error" if code else "Completed", "startedAt": stamp(0)}
    return {"state": {"terminated": ended | {"finishedAt": stamp(at)}}, **more}


RUNNING: Raw = {"phase": "Running", "state": {"running": {"startedAt": stamp(0)}}}
ASKED = {"deletionTimestamp": stamp(20), "deletionGracePeriodSeconds": 10}
LAST = {"deletionTimestamp": stamp(14), "deletionGracePeriodSeconds": 0}


@pytest.mark.parametrize("clock", [-10, 0, 10])
def test_the_last_delete_of_the_kubelet_does_not_change_the_time_of_the_stop_request(clock: int) -> None:
    """A kubelet's last delete must not move the time of our stop request, or a stopped peer would be blamed."""
    ended = exited(143, 13 + clock, phase="Running")
    pod = seen((RUNNING, {}), (RUNNING, ASKED), (ended, ASKED), (ended, LAST))
    assert pod.deleted_first
    assert pod.deletion_requested_at == START + dt.timedelta(seconds=10)


REASONS = (
    "Evicted DeadlineExceeded Preempting NodeShutdown Terminated Shutdown OutOfcpu OutOfmemory NodeLost "
    "UnexpectedAdmissionError NodeAffinity SomethingNew".split()
)


DISRUPTIONS = ("TerminationByKubelet", "EvictionByEvictionAPI", "PreemptionByScheduler", "New")


@pytest.mark.parametrize(
    "why",
    [
        *({"reason": reason} for reason in REASONS),
        *({"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": word}]} for word in DISRUPTIONS),
    ],
)
def test_exit_0_is_no_success_if_the_pod_has_a_failure_reason_or_is_disrupted(why: Raw) -> None:
    """Exit code 0 is no success if the pod has a failure reason: many scripts save and exit with 0 at SIGTERM."""
    pod = seen((RUNNING, {}), (exited(0, 12, phase="Failed", **why), {}))
    assert (pod.has_completed, pod.has_failed) == (False, True)


def test_exit_0_counts_as_success_only_once_the_phase_confirms_it() -> None:
    """Exit code 0 must count as success only when the phase confirms it, because a node shutdown shows in the phase."""
    ended, shut = exited(0, 12, phase="Running"), exited(0, 12, phase="Failed", reason="Terminated")
    between = seen((RUNNING, {}), (ended, {}))
    assert (between.has_completed, between.has_failed, between.live) == (False, False, True)
    assert seen((RUNNING, {}), (ended, {}), (shut, {})).has_failed
    assert seen((RUNNING, {}), (ended, {}), (ended, ASKED), (shut, ASKED)).has_failed, "also if we stop it in between"
    assert seen((RUNNING, {}), (ended, {}), (exited(0, 12, phase="Succeeded"), {})).has_completed


def test_a_pod_remembers_that_its_node_did_not_report_for_a_while() -> None:
    """A pod must be remembered as one whose node was silent, because its ranks may report lost peers much later."""

    def conditions(ready: str, **reason: str) -> Raw:
        listed = [{"type": "Ready", "status": ready, **reason}, {"type": "ContainersReady", "status": "True"}]
        return {"conditions": listed}

    at = {"lastTransitionTime": stamp(30)}
    silent, well = ({**RUNNING, **conditions("False", **at)}, {}), ({**RUNNING, **conditions("True", **at)}, {})
    assert not seen(well, well).was_silent
    assert seen(well, silent, well, (exited(1, 900, phase="Failed"), {})).was_silent
    gate = ({**RUNNING, **conditions("False", **at, reason="ReadinessGatesNotReady")}, {})
    assert not seen(well, gate, well).was_silent, "its kubelet says so itself"


def test_a_failing_sidecar_does_not_undo_the_success_of_the_trainer() -> None:
    """A trainer that ended with 0 must count as completed, although a failing sidecar makes the pod's phase Failed."""
    assert seen((RUNNING, {}), (exited(0, 12, phase="Failed"), {})).has_completed


def test_a_trainer_recorded_as_completed_stays_completed_if_its_pod_is_evicted_later() -> None:
    """The completed rank must not be trained again by a group whose other ranks have completed."""
    world = digits().running().exits(0, phase="Running").after(60).settle()
    assert world.status.completed_nodes == "0"
    world.evicted(0, "Evicted").settle().exits(1).settle()
    assert world.status.state == "Succeeded"


def test_a_container_that_cannot_be_found_keeps_its_recorded_exit() -> None:
    """A recorded exit code 3 must not become a lost node when the kubelet no longer finds the container."""
    unknown = {"exitCode": 137, "reason": "ContainerStatusUnknown", "message": "could not be located"}
    pod = seen((RUNNING, {}), (exited(3, 5, phase="Failed"), {}), ({"state": {"terminated": unknown}}, ASKED))
    assert (pod.trainer.exit_code, pod.trainer.reason) == (3, "Error")


def test_a_container_that_was_never_created_cannot_be_lost() -> None:
    unknown = {"exitCode": 137, "reason": "ContainerStatusUnknown", "startedAt": None, "finishedAt": None}
    never = seen(({"phase": "Pending"}, {}), ({"phase": "Failed", "state": {"terminated": unknown}}, ASKED))
    lost = seen((RUNNING, {}), ({"phase": "Failed", "state": {"terminated": unknown}}, {}))
    assert (never.trainer.ran, lost.trainer.ran) == (False, True)


def never_configured(world: World) -> World:
    world.settle()
    for rank in range(world.job.spec.nodes):
        world.waits(rank, "CreateContainerConfigError", 'configmap "missing" not found')
    return world.settle().after(601).settle()


def forgotten(world: World, rank: int, phase: str) -> None:
    """Change a pod as a real kubelet does if it no longer finds the container of a deleted pod."""
    text = "The container could not be located when the pod was terminated"
    unknown = Container("ended", "ContainerStatusUnknown", text, exit_code=137, ran=False)
    world._change(rank, phase=phase, trainer=unknown)


@pytest.mark.parametrize("nodes", [1, 2, 3])
@pytest.mark.parametrize("phase", ["Pending", "Failed"])
def test_a_missing_configmap_fails_the_job_whatever_the_kubelet_reports_afterwards(nodes: int, phase: str) -> None:
    """A missing ConfigMap must fail the job. A later report of the kubelet must not turn it into endless restarts."""
    world = never_configured(digits(nodes=nodes))
    for rank in range(nodes):
        forgotten(world, rank, phase)
    world.settle()
    failure = world.status.last_failure
    assert (world.status.state, world.status.reason) == ("Failed", "PermanentFailure"), world.status.message
    assert (failure.reason, failure.failure_class) == ("CreateContainerConfigError", "permanent")
    assert 'configmap "missing" not found' in world.status.message


def test_the_time_limit_of_the_pod_itself_is_charged_to_the_user() -> None:
    """The pod's own deadline must count against backoffLimit: the next pod has the same one."""
    for code in (0, 137, 143):
        world = digits(nodes=1, backoffLimit=1).running()
        world._change(0, reason="DeadlineExceeded").exits(0, code, phase="Failed").settle()
        failure = world.status.last_failure
        assert (failure.failure_class, failure.charged_to) == ("application", "application"), world.status.message
        assert "the activeDeadlineSeconds of the pod's template" in world.status.failures[-1].message
