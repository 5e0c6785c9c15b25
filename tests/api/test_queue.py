"""Jobs in the queues of Kueue: only a real Kueue shows when it admits, evicts, and counts quota as given back.

Needs Kueue with `DDPJob.v1alpha1.training.ddpjob.io` under integrations.externalFrameworks, and no node that runs the
pods: the tests set when a pod is running and ends. Kueue's integration of pods must be on for namespaces with the label
kueue=managed.

Some tests are skipped without these: DDPJOB_TEST_KUEUE, a command that stops or starts Kueue when `stop` or `start` is
appended; DDPJOB_TEST_KUEUE_WAITS, the seconds after which Kueue evicts a job that is not running (waitForPodsReady);
DDPJOB_TEST_KUEUE_MANAGES_ALL=1 for manageJobsWithoutQueueName; Kueue's visibility API."""

import os
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest
from clusters import Operator, job, until
from queues import GPUS, QUEUE_LABEL, TAINT, Queue

pytestmark = pytest.mark.alone
WORKLOAD = "workloads.kueue.x-k8s.io/digits"  # the full name, because Kubernetes may serve its own kind Workload


@pytest.fixture
def kueue() -> Iterator[Callable[[str], None]]:
    """Yield a function that stops Kueue ("stop") and starts it again ("start")."""
    command = shlex.split(os.environ.get("DDPJOB_TEST_KUEUE", ""))
    if not command:
        pytest.skip("DDPJOB_TEST_KUEUE names no command that stops and starts Kueue")

    def do(what: str) -> None:
        subprocess.run([*command, what], check=True, timeout=120, stdout=subprocess.DEVNULL)

    yield do
    do("start")


def test_pods_are_created_when_the_job_is_admitted_and_on_the_nodes_of_its_quota(queue: Queue) -> None:
    queue.submit()
    queue.runs()
    assert queue.has("PodsReady") == "Started"
    for pod in queue.namespace.pods():
        assert pod["spec"]["nodeSelector"]["pool"] == "spot"
        assert TAINT in pod["spec"]["tolerations"]
        assert not pod["spec"].get("schedulingGates"), "Kueue's webhook leaves them alone"
    gang = queue.namespace.status()["gang"]
    assert (gang["kind"], gang["why"]) == ("kueue", f"the label {QUEUE_LABEL} names a queue")
    queue.counts(4)
    queue.namespace.exits("digits-1-0")
    queue.namespace.exits("digits-1-1")
    queue.namespace.reaches("Succeeded")
    assert queue.has("Finished") == "Succeeded"
    until(lambda: queue.used() == 0, "the quota is free")


def test_spec_gang_kueue_without_a_label_means_the_queue_default(queue: Queue) -> None:
    queue.submit(queue="", gang="kueue")
    queue.runs()
    assert queue.workload()["spec"]["queueName"] == "default"


def test_quota_is_kept_during_a_restart_while_another_job_waits_for_it(queue: Queue) -> None:
    """A restart must keep the job's quota, although another job waits for it."""
    queue.submit(gpus=4)
    queue.runs()
    queue.submit("other", gpus=4)
    message = queue.namespace.reaches("Pending", "WaitingForAdmission", name="other")
    until(lambda: "insufficient unused quota" in queue.namespace.status("other")["message"], f"why: {message}")
    uid = queue.workload()["metadata"]["uid"]
    for attempt in (1, 2):
        queue.namespace.exits(f"digits-{attempt}-1", 1, "a bug")
        until(lambda: queue.namespace.status().get("attempt") == attempt + 1, "the next attempt begins", 60)  # noqa: B023
        queue.runs(attempt=attempt + 1)
        queue.counts(GPUS)
    assert (queue.workload()["metadata"]["uid"], queue.has("PodsReady")) == (uid, "Recovered")
    assert not any(name.startswith("other-") for name in queue.namespace.pod_names())


def test_a_suspended_job_releases_its_quota_when_its_pods_have_ended(queue: Queue) -> None:
    queue.submit(gpus=4)
    queue.runs()
    queue.submit("other", gpus=4)
    queue.namespace.reaches("Pending", "WaitingForAdmission", name="other")
    queue.namespace.bind("digits-1-0")
    queue.namespace.hold("digits-1-0")
    queue.namespace.kubectl("patch", "ddp", "digits", "--type=merge", "-p", '{"spec": {"suspend": true}}')
    until(lambda: "digits-1-1" not in queue.namespace.pod_names(), "one pod has stopped")
    assert queue.workload()["status"].get("admission"), "the other pod still stops"
    queue.counts(GPUS)
    queue.namespace.release("digits-1-0")
    queue.runs("other")
    queue.namespace.kubectl("patch", "ddp", "digits", "--type=merge", "-p", '{"spec": {"suspend": false}}')
    queue.namespace.reaches("Suspended", "WaitingForAdmission")
    queue.namespace.kubectl("delete", "ddp", "other")
    queue.runs(attempt=2)


def test_a_preemption_stops_the_job_once_and_it_resumes_when_there_is_room(queue: Queue) -> None:
    """A preemption must stop the job once, with its full grace period, and the job must resume when there is room."""
    queue.submit(gpus=4, priority="low")
    queue.runs()
    queue.namespace.bind("digits-1-0", "digits-1-1")
    queue.namespace.hold("digits-1-0", "digits-1-1")
    queue.submit("urgent", gpus=4, priority="high")
    message = queue.namespace.reaches("Suspended", "Evicted")
    assert "reempted to accommodate a workload" in message
    pods = until(
        lambda: [p for p in queue.namespace.pods() if p["metadata"].get("deletionTimestamp")], "its pods are stopped"
    )
    assert {p["metadata"]["deletionGracePeriodSeconds"] for p in pods} <= {0, 30}, "never less than the pod's own"
    time.sleep(2)  # Kueue admits within two seconds, so a quota that is given back too early would show
    assert not any(name.startswith("urgent-") for name in queue.namespace.pod_names())
    queue.namespace.release("digits-1-0", "digits-1-1")
    queue.runs("urgent")
    assert queue.has("Requeued") == "Preempted"
    queue.namespace.reaches("Suspended", "WaitingForAdmission")
    queue.namespace.kubectl("delete", "ddp", "urgent")
    queue.runs(attempt=2)
    assert queue.namespace.status()["restarts"]["total"] == 0
    assert queue.namespace.events().count("Evicted") == 1


def test_a_missing_queue_is_named(queue: Queue) -> None:
    queue.submit(queue="mian")
    queue.namespace.reaches("Pending", "WaitingForAdmission")
    until(lambda: "LocalQueue mian doesn't exist" in queue.namespace.status()["message"], "Kueue's own sentence")
    assert queue.namespace.pods() == []


def test_a_job_in_a_missing_queue_runs_once_its_label_names_an_existing_one(queue: Queue) -> None:
    """A job in a missing queue must run once its label is corrected, without a new job."""
    queue.submit(queue="mian")
    until(lambda: "LocalQueue mian doesn't exist" in queue.namespace.status().get("message", ""), "Kueue's sentence")
    queue.namespace.kubectl("label", "--overwrite", "ddp", "digits", f"{QUEUE_LABEL}=main")
    queue.runs()
    assert queue.workload()["spec"]["queueName"] == "main"


def test_a_job_larger_than_its_queue_gets_a_message_about_it(queue: Queue) -> None:
    queue.submit(gpus=GPUS)
    queue.namespace.reaches("Pending", "WaitingForAdmission")
    until(lambda: "maximum capacity" in queue.namespace.status()["message"], "Kueue's own sentence")


def test_deleting_a_workload_by_hand_is_an_eviction(queue: Queue) -> None:
    """A Workload that is deleted by hand must count as an eviction, because Kueue gives its quota to other jobs."""
    queue.submit()
    queue.runs()
    uid = queue.workload()["metadata"]["uid"]
    queue.namespace.kubectl("delete", WORKLOAD)
    queue.runs(attempt=2)
    assert queue.workload()["metadata"]["uid"] != uid
    queue.counts(4)


def test_a_deactivated_workload_stops_the_job_until_it_is_active_again(queue: Queue) -> None:
    queue.submit()
    queue.runs()
    queue.namespace.kubectl("patch", WORKLOAD, "--type=merge", "-p", '{"spec": {"active": false}}')
    queue.namespace.reaches("Suspended", "WaitingForAdmission")
    until(lambda: queue.used() == 0, "the quota is free")
    queue.namespace.kubectl("patch", WORKLOAD, "--type=merge", "-p", '{"spec": {"active": true}}')
    queue.runs(attempt=2)


def test_an_admission_withdrawn_during_the_start_releases_the_quota_without_a_charge(queue: Queue) -> None:
    """An admission that is withdrawn during the start must release the quota, and charge nothing."""
    queue.submit(gpus=4)
    queue.namespace.has_pods("digits-1-0", "digits-1-1")
    queue.namespace.kubectl("patch", WORKLOAD, "--type=merge", "-p", '{"spec": {"active": false}}')
    queue.namespace.reaches("Suspended", "WaitingForAdmission")
    until(lambda: queue.used() == 0 and queue.namespace.pods() == [], "pods and quota are gone")
    queue.namespace.kubectl("patch", WORKLOAD, "--type=merge", "-p", '{"spec": {"active": true}}')
    queue.runs(attempt=2)
    restarts = queue.namespace.status().get("restarts") or {}
    assert restarts.get("total", 0) == 0


def test_an_elastic_job_runs_with_as_many_nodes_as_its_quota_allows(queue: Queue) -> None:
    queue.submit(gpus=1, nodes=12, minNodes=4)
    queue.runs(nodes=GPUS)
    assert len(queue.namespace.pods()) == GPUS
    queue.counts(GPUS)


def test_an_elastic_ddprun_job_grows_and_shrinks_with_its_quota_while_its_nodes_train(queue: Queue) -> None:
    """An elastic job must use the quota that becomes free and give back what others need, without a new attempt."""

    def pods(nodes: int) -> None:
        names = {f"digits-1-{place}" for place in range(nodes)}
        until(lambda: {n.partition("-r")[0] for n in queue.namespace.pod_names() if "digits" in n} == names, str(names))
        queue.namespace.runs(*(n for n in queue.namespace.pod_names() if "digits" in n))

    queue.submit("other", gpus=2, priority="low")
    queue.runs("other")
    queue.submit(gpus=1, nodes=8, minNodes=2, launcher="ddprun", priority="low")
    queue.runs(nodes=4)
    why = "waiting in the queue for 4 more nodes: couldn't assign flavors"
    until(lambda: why in queue.namespace.status()["message"], "Kueue's own sentence")
    queue.namespace.kubectl("delete", "ddp", "other")
    pods(8)
    queue.counts(8)
    assert queue.has("PodsReady", name="digits.2") == "Started"
    queue.submit("urgent", gpus=2, priority="high")
    queue.runs("urgent")
    pods(4)
    queue.counts(8)
    queue.namespace.kubectl("scale", "ddp", "digits", "--replicas=3")
    pods(3)
    queue.counts(7)
    until(lambda: len(queue.all()) == 2, "the request for more nodes is withdrawn")
    queue.namespace.kubectl("delete", "ddp", "urgent")
    queue.counts(3)
    queue.namespace.kubectl("scale", "ddp", "digits", "--replicas=5")
    pods(5)
    queue.counts(5)
    status = queue.namespace.status()
    assert (status["state"], status["attempt"], status["restarts"]["total"]) == ("Running", 1, 0)
    queue.namespace.kubectl("patch", "ddp", "digits", "--type=merge", "-p", '{"spec": {"suspend": true}}')
    until(lambda: queue.used() == 0 and queue.all() == [], "the whole quota is free")


def test_a_resource_that_the_queue_does_not_cover_is_named(queue: Queue) -> None:
    resources = {"limits": {"nvidia.com/gpu": 1, "example.com/fpga": 1}}
    body = job(container={"resources": resources})
    body["metadata"]["labels"] = {QUEUE_LABEL: "main"}
    queue.namespace.apply(body)
    queue.namespace.reaches("Pending", "WaitingForAdmission")
    until(lambda: "example.com/fpga" in queue.namespace.status()["message"], "Kueue's own sentence")
    assert queue.namespace.pods() == []


def test_a_missing_topology_is_reported_and_no_pod_is_created(queue: Queue) -> None:
    queue.submit(topologyKey="ddpjob.test/nobody-has-it")
    queue.namespace.reaches("Pending", "WaitingForAdmission")
    until(lambda: "opology" in queue.namespace.status()["message"], "Kueue's own sentence")
    assert queue.namespace.pods() == []


def test_if_kueue_manages_all_pods_of_a_namespace_it_leaves_those_of_a_queued_job_alone(queue: Queue) -> None:
    """If Kueue manages all pods of a namespace, it must leave pods of a queued job alone, or they would queue twice."""
    queue.namespace.kubectl("label", "namespace", queue.namespace.name, "kueue=managed")
    queue.submit()
    queue.runs()
    assert not any(pod["spec"].get("schedulingGates") for pod in queue.namespace.pods())
    assert [w["metadata"]["name"] for w in queue.all()] == ["digits"]


def test_a_job_without_the_label_gets_a_message_with_the_fix_if_kueue_queues_each_pod(queue: Queue) -> None:
    """If Kueue queues each pod of a job without a label, the job's message must name the fix."""
    if os.environ.get("DDPJOB_TEST_KUEUE_MANAGES_ALL"):
        pytest.skip("DDPJOB_TEST_KUEUE_MANAGES_ALL is set: this Kueue leaves the pods of a DDPJob alone")
    queue.namespace.kubectl("label", "namespace", queue.namespace.name, "kueue=managed")
    queue.submit(queue="", gpus=GPUS)
    queue.namespace.has_pods("digits-1-0", "digits-1-1")
    helps = f"label the job with {QUEUE_LABEL} to queue it as a whole"
    until(lambda: helps in queue.namespace.status().get("message", ""), "what helps")
    assert len(queue.all()) == 2, "each pod has a Workload of its own"


def test_if_kueue_manages_jobs_without_a_queue_a_job_without_the_label_runs_outside_all_quota(
    queue: Queue,
) -> None:
    """manageJobsWithoutQueueName holds back only jobs of Kueue's own kinds, so a DDPJob without the label must run
    outside all quota."""
    if not os.environ.get("DDPJOB_TEST_KUEUE_MANAGES_ALL"):
        pytest.skip("DDPJOB_TEST_KUEUE_MANAGES_ALL is not set: this Kueue has no manageJobsWithoutQueueName")
    queue.namespace.kubectl("label", "namespace", queue.namespace.name, "kueue=managed")
    queue.submit(queue="", gpus=GPUS)
    queue.runs()
    assert not any(pod["spec"].get("schedulingGates") for pod in queue.namespace.pods())
    assert (queue.all(), queue.used()) == ([], 0)


def test_while_kueue_is_down_new_jobs_wait_and_running_jobs_are_not_disturbed(
    queue: Queue, kueue: Callable[[str], None]
) -> None:
    """While Kueue is down, running jobs must go on, and a restart, a new job and a finished job must recover later."""
    queue.submit(gpus=4)
    queue.runs()
    assert queue.has("PodsReady") == "Started"
    kueue("stop")
    queue.namespace.exits("digits-1-1", 1, "a bug")
    until(lambda: queue.namespace.status().get("attempt") == 2, "the next attempt needs no admission", 60)
    queue.runs(attempt=2)
    queue.submit("new", gpus=4)
    queue.namespace.reaches("Pending", "WaitingForAdmission", name="new")
    until(lambda: "failed calling webhook" in queue.namespace.status("new")["message"], "what the API server says")
    assert not any(name.startswith("new-") for name in queue.namespace.pod_names())
    queue.namespace.exits("digits-2-0")
    queue.namespace.exits("digits-2-1")
    queue.namespace.reaches("Succeeded")
    kueue("start")
    until(lambda: "new-1-1" in queue.namespace.pod_names(), "the new job is admitted", 120)
    queue.runs("new")
    assert queue.has("Finished") == "Succeeded"
    until(lambda: queue.used() == GPUS, "the quota of the job that has ended is free, and that of the new one is not")


def test_a_job_that_does_not_run_in_time_is_evicted_and_queues_again(queue: Queue) -> None:
    """With waitForPodsReady, a job whose pods cannot start must be evicted, and queue again."""
    seconds = float(os.environ.get("DDPJOB_TEST_KUEUE_WAITS", "0"))
    if not seconds:
        pytest.skip("DDPJOB_TEST_KUEUE_WAITS is not set: this Kueue does not wait for pods to be ready")
    queue.submit(gpus=4)
    queue.namespace.has_pods("digits-1-0", "digits-1-1")
    queue.namespace.runs("digits-1-0")
    message = queue.namespace.reaches("Suspended", seconds=seconds + 60)
    assert "PodsReady" in message or queue.namespace.events().count("Evicted") == 1
    # Kueue queues the job again after a minute (requeuingStrategy.backoffBaseSeconds).
    queue.namespace.has_pods("digits-2-0", "digits-2-1", seconds=120)
    queue.runs(attempt=2)
    assert queue.has("PodsReady") in ("Started", "Recovered")
    assert queue.namespace.status()["restarts"]["total"] == 0
    time.sleep(seconds + 2)  # by then Kueue would have evicted the job again if it did not accept PodsReady
    assert queue.namespace.status()["state"] == "Running"


def test_waiting_jobs_show_their_position_in_the_queue(unwatched: Queue, operators: Callable[..., Operator]) -> None:
    """Waiting jobs must show their position, which comes from Kueue's visibility API, a separate API server."""
    if unwatched.namespace.api.find("/apis/visibility.kueue.x-k8s.io") is None:
        pytest.skip("this API server serves no visibility.kueue.x-k8s.io: Kueue tells no places")
    operators(unwatched.namespace.name, DDPJOB_GANGS="kueue", DDPJOB_QUEUE_PLACES="true").watches()
    unwatched.submit(gpus=4)
    unwatched.runs()
    places = {"second": "position 1: ", "third": "position 2: "}
    for name in places:
        unwatched.submit(name, gpus=4)
        unwatched.namespace.reaches("Pending", "WaitingForAdmission", name=name)
    # The operator may have requested the positions when only one job was waiting; it asks again after a minute.
    for name, place in places.items():
        until(lambda: place in unwatched.namespace.status(name)["message"], f"the place of {name}", 100)  # noqa: B023
    assert "insufficient unused quota" in unwatched.namespace.status("second")["message"]


def test_one_of_two_operators_requests_an_admission_and_the_other_keeps_it_after_its_death(
    unwatched: Queue, operators: Callable[..., Operator]
) -> None:
    """One of two operators must request an admission, and its successor keep it: two would hold quota twice."""
    name, started = unwatched.namespace.name, []
    for number in range(2):
        lease = {"DDPJOB_LEASE_SECONDS": "4", "DDPJOB_LEASE_RENEW_SECONDS": "2.5", "DDPJOB_LEASE_RETRY_SECONDS": "0.4"}
        who = {"DDPJOB_LEASE_NAMESPACE": name, "DDPJOB_POD_NAME": f"operator-{number}"}
        started.append(operators(name, DDPJOB_GANGS="kueue", **lease, **who).watches())
    unwatched.submit(gpus=4)
    unwatched.runs()
    uid = unwatched.workload()["metadata"]["uid"]
    started[0].kill()
    unwatched.namespace.exits("digits-1-1", 1, "a bug")
    until(lambda: unwatched.namespace.status().get("attempt") == 2, "the other one restarts the job", 60)
    unwatched.runs(attempt=2)
    assert (unwatched.workload()["metadata"]["uid"], unwatched.has("PodsReady")) == (uid, "Recovered")
    assert unwatched.used() == GPUS
