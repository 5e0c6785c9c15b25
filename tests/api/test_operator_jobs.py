"""What users of a cluster see through kubectl, from `apply` to the end of a job, and when something is wrong.

Needs kubectl and KUBECONFIG of any cluster. Each test has a namespace and an operator process of its own."""

import time
from typing import Any

import pytest
from clusters import Namespace, Operator, job, until
from faulty_api import FaultyApi

from ddpjob_operator.job import api as types


def test_a_job_runs_to_its_end_and_kubectl_shows_its_progress(namespace: Namespace, operator: Operator) -> None:
    uids = namespace.start()
    row = namespace.kubectl("get", "ddp", "digits").splitlines()[1].split()
    assert row[:3] == ["digits", "Running", "2/2"]
    namespace.exits("digits-1-0")
    namespace.exits("digits-1-1")
    assert "condition met" in namespace.kubectl("wait", "--for=condition=Complete", "ddp/digits", "--timeout=20s")
    assert namespace.shown(".status.state") == "Succeeded"
    assert namespace.uids() == uids, "a pod that ended stays for kubectl logs"
    assert "all 2 nodes completed" in namespace.kubectl("describe", "ddp", "digits")


def test_a_job_owns_its_pods_and_gets_no_finalizer_and_no_annotation(namespace: Namespace, operator: Operator) -> None:
    namespace.start()
    found = namespace.job()
    assert "finalizers" not in found["metadata"]
    assert "annotations" not in found["metadata"]
    namespace.kubectl("delete", "ddp", "digits")
    until(lambda: not namespace.pods(), "the pods go with their job")
    service = f"/api/v1/namespaces/{namespace.name}/services/digits"
    until(lambda: namespace.api.find(service) is None, "the Service goes with its job")


def test_a_failed_rank_fails_the_job_with_its_cause_and_stops_the_others(namespace, operator):
    namespace.start(backoffLimit=0)
    namespace.exits("digits-1-1", 3, "Traceback\nValueError: no such shard")
    message = namespace.reaches("Failed", "BackoffLimitExceeded")
    assert "rank 1 (pod digits-1-1) ended with exit code 3 (ValueError: no such shard)" in message
    assert namespace.pod_names() == ["digits-1-1"], "the other pod is stopped, the guilty one stays for its log"
    assert namespace.shown(".status.lastFailure.exitCode") == "3"


BAD = {
    "a wrong type": (
        job(container={"stdin": "yes"}),
        'spec.template.spec.containers[0].stdin: must be true or false, is "yes"',
    ),
    "options that contradict the job": (job(container={"command": ["torchrun", "--standalone", "a.py"]}), "standalone"),
}


@pytest.mark.parametrize(("body", "why"), BAD.values(), ids=BAD)
def test_an_invalid_spec_gives_a_condition_with_the_reason_and_no_pods(namespace, operator, body, why):
    namespace.apply(body)
    assert why in namespace.reaches("Pending", "InvalidSpec")
    conditions = {c["type"]: c for c in namespace.status()["conditions"]}
    assert conditions["Accepted"]["status"] == "False"
    assert why in conditions["Accepted"]["message"]
    assert namespace.pods() == []
    until(lambda: namespace.events() == ["InvalidSpec"], "one event says so")


def test_a_job_starts_once_its_spec_is_fixed(namespace: Namespace, operator: Operator) -> None:
    wrong = {"container": {"stdin": "yes"}}
    namespace.apply(job(**wrong))
    namespace.reaches("Pending", "InvalidSpec")
    namespace.apply(job(**wrong, suspend=True))  # suspended, because the CRD allows changes of a template only then
    namespace.apply(job())
    namespace.has_pods("digits-1-0", "digits-1-1")
    conditions = {c["type"]: c["status"] for c in namespace.status()["conditions"]}
    assert conditions["Accepted"] == "True"


def test_an_unreadable_status_stops_everything_but_is_not_lost(namespace: Namespace, operator: Operator) -> None:
    """An unreadable status must stop all actions for the job: with one unknown field, it may have succeeded already."""
    namespace.start()
    namespace.exits("digits-1-0")
    namespace.exits("digits-1-1")
    namespace.reaches("Succeeded")
    odd = '{"status": {"furthestStep": 7, "goodput": {"lostSteps": -1}}}'
    namespace.kubectl("patch", "ddp", "digits", "--subresource=status", "--type=merge", "-p", odd)

    def accepted() -> dict[str, Any]:
        return next(c for c in namespace.status()["conditions"] if c["type"] == "Accepted")

    until(lambda: accepted()["reason"] == "UnreadableStatus", "the condition says so")
    assert accepted()["message"].startswith("status.goodput.lostSteps: ")
    until(lambda: namespace.events()[-1:] == ["UnreadableStatus"], "an event says so")
    namespace.kubectl("annotate", "ddp", "digits", "looked=again")
    status = namespace.status()
    assert (status["state"], status["attempt"], status["furthestStep"]) == ("Succeeded", 1, 7)
    assert namespace.pod_names() == ["digits-1-0", "digits-1-1"]
    mended = '{"status": {"goodput": {"lostSteps": 0}}}'
    namespace.kubectl("patch", "ddp", "digits", "--subresource=status", "--type=merge", "-p", mended)
    until(lambda: accepted()["status"] == "True", "it is accepted again")
    assert (namespace.status()["state"], namespace.status()["attempt"]) == ("Succeeded", 1)


def test_the_nodes_of_a_suspended_job_change_when_its_last_pod_has_ended(namespace, operator):
    """spec.nodes of a suspended job must change only after its last pod has ended: old ranks hold the volume."""
    namespace.start()
    namespace.bind("digits-1-0", "digits-1-1")
    namespace.hold("digits-1-0", "digits-1-1")
    namespace.kubectl("patch", "ddp", "digits", "--type=merge", "-p", '{"spec": {"suspend": true}}')
    assert "2 pods still stopping" in namespace.reaches("Suspended", "Suspending")
    refused = namespace.kubectl("scale", "ddp", "digits", "--replicas=1", check=False)
    assert "changes only while the job is suspended and stopped" in refused
    namespace.release("digits-1-0", "digits-1-1")
    namespace.kubectl("wait", "--for=condition=Suspended", "ddp/digits", "--timeout=30s")
    namespace.kubectl("scale", "ddp", "digits", "--replicas=1")


def test_a_pod_whose_label_was_removed_gets_it_back_and_the_group_continues(namespace, operator):
    """A pod whose label was removed must get it back, although the watch reports the pod as deleted."""
    uids = namespace.start()
    namespace.kubectl("label", "pod", "digits-1-0", "training.ddpjob.io/job-")

    def label() -> str:
        return namespace.kubectl("get", "pod", "digits-1-0", "-o", "jsonpath={.metadata.labels}")

    until(lambda: '"training.ddpjob.io/job":"digits"' in label(), "it has its label again")
    namespace.exits("digits-1-0")
    namespace.exits("digits-1-1")
    namespace.reaches("Succeeded")
    assert namespace.uids() == uids


def test_pods_left_by_cascade_orphan_block_the_next_job_of_that_name(namespace: Namespace, operator: Operator) -> None:
    """The message must name the old pods that block a job: if users delete only the Service, two groups train."""
    namespace.start()
    namespace.kubectl("delete", "ddp", "digits", "--cascade=orphan")
    namespace.kubectl("delete", "service", "digits")
    namespace.apply(job())
    assert "a Pod named digits-1-0 and 1 more is not this job's" in namespace.reaches("Pending", "NameTaken")
    namespace.kubectl("delete", "pod", "digits-1-0", "digits-1-1", "--force")
    namespace.has_pods("digits-1-0", "digits-1-1")


# ------------------------------------------------------------------------------------------------ refused creates


def test_a_typo_deep_in_the_template_is_refused_with_the_message_of_the_server(namespace, operator):
    namespace.apply(job(container={"resources": {"limit": {"cpu": "1"}}}))
    message = namespace.reaches("Pending", "CreateRefused")
    assert "digits-1-0 was refused: " in message
    assert 'unknown field "spec.template.spec.containers[0].resources.limit"' in message
    assert namespace.pods() == []


def test_a_quota_of_one_pod_is_reported_once_and_a_higher_one_starts_the_job(namespace, operator):
    quota = {"metadata": {"name": "one-pod"}, "spec": {"hard": {"pods": "1"}}}
    path = f"/api/v1/namespaces/{namespace.name}/resourcequotas/one-pod"
    namespace.create("resourcequotas", quota)
    until(lambda: namespace.api.call("GET", path).get("status", {}).get("hard"), "the quota is counted")
    namespace.apply(job())
    message = namespace.reaches("Pending", "CreateRefused")
    assert "digits-1-1 was refused: " in message
    assert "exceeded quota: one-pod" in message
    refused = namespace.api.requests()["create pods"]
    until(lambda: namespace.api.requests()["create pods"] >= refused + 2, "it is tried again")
    assert namespace.status()["reason"] == "CreateRefused", "a further try changes no word"
    until(lambda: namespace.events().count("CreateRefused") == 1, "one event says so")
    writes = [w for w in namespace.api.writes() if "ddpjobs/status" in w]
    assert len(writes) <= 3, "a further try writes no status"
    namespace.api.call("DELETE", path)
    namespace.has_pods("digits-1-0", "digits-1-1")


def test_a_pod_security_refusal_is_reported_in_the_words_of_the_server(api: FaultyApi, operators: Any) -> None:
    restricted = Namespace(api)
    try:
        restricted.make(**{"pod-security.kubernetes.io/enforce": "restricted"})
        operators(restricted.name).watches()
        restricted.apply(job(container={"securityContext": {"runAsUser": 0}}))
        message = restricted.reaches("Pending", "CreateRefused")
        assert 'violates PodSecurity "restricted:latest"' in message
        assert restricted.pods() == []
        assert restricted.api.requests()["create pods"] <= 2, "the second pod is not tried in vain"
    finally:
        restricted.remove()


# ------------------------------------------------------------------------------------------------ names that are taken


def test_a_deleted_and_reapplied_job_waits_for_its_old_pods(namespace: Namespace, operator: Operator) -> None:
    old = namespace.start()
    namespace.hold("digits-1-0")
    namespace.kubectl("delete", "ddp", "digits", "--wait=false")
    namespace.apply(job())
    namespace.reaches("Pending", "WaitingForDeletedJob")
    why = "pod digits-1-0 of the deleted job of this name"  # later the message names other objects
    until(lambda: why in namespace.status().get("message", ""), "it names the pod that stays")
    namespace.release("digits-1-0")
    namespace.has_pods("digits-1-0", "digits-1-1")
    until(lambda: set(namespace.uids().values()).isdisjoint(old.values()), "all pods are new")
    namespace.runs("digits-1-0", "digits-1-1")
    namespace.reaches("Running")
    service = namespace.api.call("GET", f"/api/v1/namespaces/{namespace.name}/services/digits")
    assert service["metadata"]["ownerReferences"][0]["uid"] == (namespace.job() or {})["metadata"]["uid"]


def test_kubectl_replace_force_starts_the_job_from_the_beginning(namespace: Namespace, operator: Operator) -> None:
    old = namespace.start()
    namespace.kubectl("replace", "--force", "-f", "-", stdin=job())
    names = ["digits-1-0", "digits-1-1"]
    until(lambda: sorted(namespace.uids()) == names and namespace.uids() != old, "there are new pods")
    until(lambda: set(namespace.uids().values()).isdisjoint(old.values()), "all of them are new")
    namespace.runs(*names)
    namespace.reaches("Running")


@pytest.mark.parametrize("kind", ["Pod", "Service"])
def test_a_foreign_object_is_never_touched_and_the_job_continues_when_it_is_gone(namespace, operator, kind):
    plural, name = ("pods", "digits-1-1") if kind == "Pod" else ("services", "digits")
    spec = job()["spec"]["template"]["spec"] if kind == "Pod" else {"ports": [{"port": 80}]}
    made = namespace.create(plural, {"metadata": {"name": name}, "spec": spec})
    namespace.apply(job())
    message = namespace.reaches("Pending", "NameTaken")
    assert f"a {kind} named {name} is not this job's. Delete it, or give the job another name" in message
    path = f"/api/v1/namespaces/{namespace.name}/{plural}/{name}"
    assert namespace.api.call("GET", path)["metadata"]["uid"] == made["metadata"]["uid"]
    namespace.kubectl("delete", kind.lower(), name)
    namespace.has_pods("digits-1-0", "digits-1-1")
    namespace.runs("digits-1-0", "digits-1-1")
    namespace.reaches("Running")


# ------------------------------------------------------------------------------------------------ a job's life


def test_suspend_stops_the_pods_and_resume_starts_a_new_attempt(namespace: Namespace, operator: Operator) -> None:
    namespace.start()
    assert namespace.shown(".status.startTime")
    namespace.kubectl("patch", "ddp", "digits", "--type=merge", "-p", '{"spec": {"suspend": true}}')
    assert "condition met" in namespace.kubectl("wait", "--for=condition=Suspended", "ddp/digits", "--timeout=20s")
    until(lambda: not namespace.pods(), "the pods are deleted")
    assert namespace.shown(".status.startTime") == "", "the clock of activeDeadlineSeconds starts anew"
    namespace.kubectl("patch", "ddp", "digits", "--type=merge", "-p", '{"spec": {"suspend": false}}')
    namespace.has_pods("digits-2-0", "digits-2-1")
    assert namespace.shown(".status.attempt") == "2"
    assert namespace.shown(".status.startTime")


def test_a_job_with_ttl_is_deleted_with_its_pods_when_it_has_finished(namespace: Namespace, operator: Operator) -> None:
    namespace.start(nodes=1, ttlSecondsAfterFinished=10)
    namespace.exits("digits-1-0")
    namespace.reaches("Succeeded")
    until(lambda: namespace.job() is None, "the job is gone")
    until(lambda: not namespace.pods(), "its pod is gone")


def test_a_job_past_its_deadline_fails_without_any_other_event(namespace: Namespace, operator: Operator) -> None:
    namespace.start(activeDeadlineSeconds=15)
    namespace.reaches("Failing", "DeadlineExceeded")

    def deadlines() -> dict[str, int | None]:
        return {p["metadata"]["name"]: p["spec"].get("activeDeadlineSeconds") for p in namespace.pods()}

    until(lambda: deadlines() == {"digits-1-0": 1}, "the pods are stopped, but for the one whose log is kept")
    namespace.exits("digits-1-0", 143, "waiting for data")
    assert "activeDeadlineSeconds: 15" in namespace.reaches("Failed", "DeadlineExceeded")
    assert "waiting for data" in namespace.status()["lastFailure"]["logTail"]


def test_a_succeeded_pod_that_someone_deletes_does_no_harm(namespace: Namespace, operator: Operator) -> None:
    namespace.start()
    namespace.exits("digits-1-0")
    until(lambda: namespace.status().get("completedNodes") == "0", "the completed rank is recorded")
    namespace.kubectl("delete", "pod", "digits-1-0")
    namespace.exits("digits-1-1")
    namespace.reaches("Succeeded")
    assert namespace.pod_names() == ["digits-1-1"]


def test_a_running_pod_that_someone_deletes_restarts_the_group_and_is_not_charged(namespace, operator):
    namespace.start()
    namespace.kubectl("delete", "pod", "digits-1-0")
    namespace.has_pods("digits-2-0", "digits-2-1")
    until(lambda: namespace.pod_names() == ["digits-2-0", "digits-2-1"], "the group has started anew")
    assert namespace.shown(".status.lastFailure.pod") == "digits-1-0"
    assert namespace.shown(".status.restarts.infrastructure") == "1"


def test_a_job_deleted_during_its_creation_leaves_nothing(namespace: Namespace, operator: Operator) -> None:
    namespace.apply(job(nodes=30))
    namespace.has_pods("digits-1-0")
    namespace.kubectl("delete", "ddp", "digits", "--wait=false")
    until(lambda: not namespace.pods() and namespace.job() is None, "all is gone")
    assert namespace.pods() == []


def test_a_restarted_operator_changes_nothing(namespace, operator, operators):
    uids = namespace.start()
    operator.kill()
    began = time.monotonic()
    operators(namespace.name).watches()
    namespace.exits("digits-1-0")
    until(lambda: namespace.status().get("completedNodes") == "0", "the new operator goes on")
    writes = [w for w in namespace.api.writes(since=began) if "selfsubject" not in w]
    assert writes == [f"update ddpjobs/status {namespace.name}/digits"]
    assert namespace.uids() == uids


def test_an_operator_that_was_down_while_a_pod_failed_notices_it(namespace, operator, operators):
    namespace.start(backoffLimit=0)
    operator.stop()
    namespace.exits("digits-1-1", 1)
    operators(namespace.name).watches()
    assert "rank 1" in namespace.reaches("Failed", "BackoffLimitExceeded")


def test_deleting_a_namespace_with_a_running_job_costs_the_operator_nothing(namespace, operator):
    namespace.start()
    namespace.kubectl("delete", "namespace", namespace.name, "--wait=false")
    path = f"/api/v1/namespaces/{namespace.name}"
    until(lambda: namespace.api.find(path) is None, "the namespace is gone", 60)
    began = time.monotonic()
    until(lambda: time.monotonic() > began + 3, "a while passes")
    assert sum(namespace.api.requests(since=began).values()) < 10
    assert operator.process.poll() is None


def test_a_job_in_an_unwatched_namespace_stays_untouched(namespace: Namespace, operators: Any) -> None:
    other = Namespace(namespace.api)
    try:
        other.make()
        operators(namespace.name).watches()
        other.apply(job())
        namespace.start()
        assert other.status() == {}
        assert other.pods() == []
    finally:
        other.remove()


def test_one_operator_serves_several_namespaces(namespace: Namespace, operators: Any) -> None:
    other = Namespace(namespace.api)
    try:
        other.make()
        operators(namespace.name, other.name).watches(2)
        namespace.start()
        other.start()
    finally:
        other.remove()


def test_a_job_of_another_controller_stays_untouched(namespace: Namespace, operator: Operator) -> None:
    namespace.apply(job("others", managedBy="kueue.x-k8s.io/multikueue"))
    namespace.start()
    assert namespace.status("others") == {}


def test_two_hundred_jobs_at_once_all_start(namespace: Namespace, operator: Operator) -> None:
    names = [f"job-{i}" for i in range(200)]
    namespace.kubectl("create", "-f", "-", stdin={"apiVersion": "v1", "kind": "List", "items": [job(n) for n in names]})
    wanted = {f"{name}-1-{rank}" for name in names for rank in (0, 1)}
    until(lambda: wanted <= set(namespace.pod_names()), "all 400 pods are there", 90, every=0.5)
    assert namespace.api.requests()["create pods"] == 400, "none is tried twice"
    until(
        lambda: {j["status"].get("reason") for j in namespace.jobs() if "status" in j} == {"Unschedulable"},
        "all jobs say what they wait for",
        60,
        every=0.5,
    )
    # One request for all of them may take longer than its time limit.
    namespace.kubectl("delete", types.PLURAL, "--all", "--wait=false")
    until(lambda: not namespace.pod_names(), "all pods are gone", 90, every=0.5)
