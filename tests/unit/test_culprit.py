"""The pod of a stalled rank is ended in a way that keeps its log, which alone explains a hang."""

import asyncio
from typing import Any

import pytest
from worlds import World, digits, job

from ddpjob_operator.kube.api.client import ApiError
from ddpjob_operator.kube.api.runtime import SYSTEM
from ddpjob_operator.kube.work.executor import Executor
from ddpjob_operator.kube.work.job_state import JobState
from ddpjob_operator.observed.cluster import Container
from ddpjob_operator.plan.actions import DeletePod, EndPod, Plan
from ddpjob_operator.plan.settlement import GRACE_SECONDS_MAX, KUBELET_SECONDS

LOG = "step 60\nwaiting for shard-7 of the data set"


def stalled(**spec: Any) -> tuple[World, Plan]:
    """Return a job whose rank 0 has made no step for too long, and the plan after the stall was recorded."""
    world = digits(stall={"timeoutSeconds": 300}, **spec).running().reports_step(60)
    for _ in range(31):
        world.after(10).reports_step(60)
    world.step()
    assert (world.status.reason, world.status.last_failure.reason) == ("Stalled", "Stalled")  # type: ignore[union-attr]
    return world, world.step()


def ended(world: World, *, log: str = LOG, exit_code: int = 143) -> World:
    """Let the kubelet end the pod by its activeDeadlineSeconds."""
    end = Container("ended", "Error", log, exit_code=exit_code, ended_at=world.now)
    return world._change(0, phase="Failed", reason="DeadlineExceeded", trainer=end)


def ends(todo: Plan) -> list[tuple[str, str]]:
    return [(type(a).__name__, a.name) for a in todo.actions if isinstance(a, (EndPod, DeletePod))]


def test_the_hanging_pod_is_ended_and_kept_and_its_peers_are_deleted() -> None:
    """The hanging pod must stay for `kubectl logs`, because only its output explains the hang."""
    world, todo = stalled()
    assert ends(todo) == [("DeletePod", "digits-1-1"), ("EndPod", "digits-1-0")]
    world.settle()
    assert world.pods["digits-1-0"].deadline_set
    ended(world).stops(1).settle()
    assert "digits-1-0" in world.pods, "with its log, for as many attempts as the pods of any failure"
    assert world.status.attempt == 2


@pytest.mark.parametrize(("processes", "rank", "who"), [(1, 0, "rank 0"), (8, None, "node 0")])
def test_a_hang_names_the_node_because_only_its_first_rank_reports(processes: int, rank: int | None, who: str) -> None:
    """Only the node's first rank reports, so nobody knows which rank hangs. The message must name the node instead."""
    world, _ = stalled(nprocPerNode=processes)
    failure = world.status.last_failure
    assert (failure.rank, failure.node_rank) == (rank, 0)
    assert world.status.message.startswith(f"{who} (pod digits-1-0, node node-0) has made no step for 5m")


def test_the_log_tail_of_the_hanging_pod_is_in_the_status() -> None:
    world, _ = stalled()
    ended(world.settle()).stops(1).settle()
    failure = world.status.last_failure
    assert (failure.reason, failure.failure_class, failure.charged_to) == ("Stalled", "stall", "stall")
    assert failure.log_tail == LOG
    assert failure.exit_code is None, "143 is what we made of it"


def test_the_log_is_waited_for_if_the_kubelet_reports_the_deadline_before_the_container_end() -> None:
    """The log of the hang must be waited for, and shown instead of the kubelet's message about the deadline."""
    world, _ = stalled()
    world.settle()
    why = Container("ended", "DeadlineExceeded", "Pod was active on the node longer than the specified deadline")
    world._change(0, phase="Failed", reason="DeadlineExceeded", trainer=why).stops(1).settle()
    assert world.status.attempt == 1
    ended(world).settle()
    assert (world.status.attempt, world.status.last_failure.log_tail) == (2, LOG)  # type: ignore[union-attr]


def test_the_log_tail_is_kept_even_if_the_pod_disappears() -> None:
    """The end of the log must be kept even if the pod disappears: it is read when the watch shows the pod's end."""
    world, _ = stalled()
    ended(world.settle()).stops(1)
    world.deleted_pods.append(world.pods.pop("digits-1-0"))
    world.settle()
    assert world.status.last_failure.log_tail == LOG  # type: ignore[union-attr]


def test_there_is_no_log_tail_if_log_tails_are_switched_off() -> None:
    world, _ = stalled()
    world.settings = type(world.settings)(keep_log_tail=False)
    ended(world.settle()).stops(1).settle()
    assert world.status.last_failure.log_tail == ""  # type: ignore[union-attr]


@pytest.mark.parametrize("grace", [5, 30, 3600])
def test_an_unresponsive_kubelet_or_process_delays_the_job_only_a_minute(grace: int) -> None:
    template = {"spec": {"containers": job().spec.template["spec"]["containers"]}}
    template["spec"]["terminationGracePeriodSeconds"] = grace
    world, _ = stalled(template=template)
    world.settle().stops(1).settle()
    until = world.status.last_failure.time  # type: ignore[union-attr]
    patience = min(grace, GRACE_SECONDS_MAX) + KUBELET_SECONDS
    world.now = until
    assert ends(world.after(patience - 1).step()) == []
    assert ends(world.after(1).step()) == [("DeletePod", "digits-1-0")]
    world.stops(0).settle()
    assert world.status.attempt == 2


def test_a_pod_that_somebody_else_deletes_meanwhile_is_not_ended_again() -> None:
    world, _ = stalled()
    world.settle()._change(0, deletion_requested_at=world.now)
    assert ends(world.step()) == []
    world.stops_all().settle()
    assert world.status.attempt == 2


@pytest.mark.parametrize("code", [403, 404, 409, 422])
def test_a_hanging_pod_is_deleted_if_the_server_forbids_its_end(code: int, caplog: pytest.LogCaptureFixture) -> None:
    """If a role, as in an older chart, forbids a patch of the pod, the pod must be deleted and the job restarted."""

    class Server:
        asked: list[str]

        async def patch(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
            assert body == {"metadata": {"uid": "u"}, "spec": {"activeDeadlineSeconds": 1}}
            raise ApiError(code, "No", "no")

        async def delete(self, path: str, options: dict[str, Any]) -> dict[str, Any]:
            self.asked = [path, options["preconditions"]["uid"], options["gracePeriodSeconds"]]
            return {"kind": "Status"}

    class Nothing:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: None

    server, caches = Server(), Nothing()
    caches.pods = Nothing()  # type: ignore[attr-defined]
    executor = Executor(server, caches, Nothing(), Nothing(), SYSTEM)  # type: ignore[arg-type]
    with caplog.at_level("INFO", "ddpjob_operator"):
        asyncio.run(executor.execute(job(), Plan(actions=(EndPod("digits-1-0", "u", 10),)), JobState("u")))
    assert server.asked == ["/api/v1/namespaces/default/pods/digits-1-0", "u", 10]
    about = [(r.__dict__["job"], r.__dict__["pod"]) for r in caplog.records if "cannot be ended" in r.getMessage()]
    assert about == [("default/digits", "digits-1-0")], "whose log is gone, for a log store"


def test_a_clock_that_is_set_back_does_not_keep_an_unresponsive_pod() -> None:
    """A clock that is set back must not keep a hanging pod, and with it the job's GPUs, for the time of the jump."""
    world, _ = stalled()
    world.settle().stops(1).after(-3600).settle()
    again = world.plan().requeue_at
    assert (again - world.now).total_seconds() <= GRACE_SECONDS_MAX + KUBELET_SECONDS
    world.now = again
    assert ends(world.step()) == [("DeletePod", "digits-1-0")]
