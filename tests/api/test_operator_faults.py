"""The operator with an API server that fails in many ways: jobs still end correctly, without hot loops or needless
writes. A proxy counts requests and breaks those that a test chooses. Needs kubectl and KUBECONFIG of any cluster."""

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from clusters import MERGE, Namespace, Operator, job, kubectl, until
from faulty_api import FaultyApi, Seen

from ddpjob_operator.kube.api.access import RIGHTS
from ddpjob_operator.kube.watch.reflector import HEALTHY_SECONDS

PODS = ["digits-1-0", "digits-1-1"]
# Upper limits for the number of each kind of request in a test; a loop without a wait sends hundreds.
REQUESTS_MAX = 80
REQUESTS_A_SECOND_MAX = 1.5


@pytest.fixture(autouse=True)
def _no_hot_loop(api: FaultyApi) -> Iterator[None]:
    began = time.monotonic()
    yield
    limit = max(REQUESTS_MAX, REQUESTS_A_SECOND_MAX * (time.monotonic() - began))
    for what, count in api.requests().items():
        if "selfsubject" not in what:
            assert count < limit, f"{count} x {what}"


def passes(seconds: float) -> None:
    """Wait this many seconds. The caller then checks that nothing has happened."""
    end = time.monotonic() + seconds
    until(lambda: time.monotonic() > end, "time passes", seconds + 5)


def runs_to_its_end(namespace: Namespace) -> None:
    """Let the job run to its end, and check that its two pods stay the same."""
    namespace.has_pods(*PODS, seconds=60)
    uids = namespace.uids()
    namespace.runs(*PODS)
    namespace.reaches("Running", seconds=60)
    for pod in PODS:
        namespace.exits(pod)
    namespace.reaches("Succeeded", seconds=60)
    assert namespace.uids() == uids


# ------------------------------------------------------------------------------------------------ writes that fail

REFUSALS = {
    "the status is answered with 429": ("update ddpjobs/status", 429, {"Retry-After": "1"}, 3),
    "a pod is answered with 429": ("create pods", 429, {"Retry-After": "1"}, 4),
    "the Service is answered with 503": ("create services", 503, {"Retry-After": "1"}, 4),
    "the status is answered with 500": ("update ddpjobs/status", 500, {}, 3),
    "a pod is answered with 500": ("create pods", 500, {}, 5),
    "the Service is answered with 504": ("create services", 504, {}, 3),
    "a longer wait is asked for than one request may last": ("create pods", 429, {"Retry-After": "12"}, 1),
}


@pytest.mark.parametrize(("what", "status", "headers", "times"), REFUSALS.values(), ids=REFUSALS)
def test_a_job_starts_despite_initial_faults(namespace, operator, what, status, headers, times):
    began = time.monotonic()
    fault = namespace.api.break_(what, status, headers=headers, times=times)
    namespace.apply(job())
    runs_to_its_end(namespace)
    assert fault.happened == times
    wait = float(headers.get("Retry-After", 0))
    assert time.monotonic() - began >= wait, "the server's wait is honoured"


@pytest.mark.parametrize("what", ["create services", "create pods", "update ddpjobs/status", "delete pods"])
def test_a_lost_answer_does_no_harm(namespace: Namespace, operator: Operator, what: str) -> None:
    fault = namespace.api.break_(what, lost=True)
    namespace.apply(job())
    namespace.has_pods(*PODS)
    namespace.runs(*PODS)
    namespace.reaches("Running")
    uids = namespace.uids()
    namespace.kubectl("patch", "ddp", "digits", "--type=merge", "-p", '{"spec": {"suspend": true}}')
    namespace.reaches("Suspended")
    until(lambda: not namespace.pods(), "the pods are deleted")
    assert sorted(uids) == PODS, "none was made twice"
    assert fault.happened == 1
    assert namespace.events().count("Suspended") <= 1


def test_a_job_that_others_change_all_the_time_still_reaches_its_end(namespace: Namespace, operator: Operator) -> None:
    changes = 0

    def change(_: Seen) -> bool:
        nonlocal changes
        if changes < 3:
            changes += 1
            label = {"metadata": {"labels": {"changed": str(changes)}}}
            kubectl("patch", "ddp", "digits", "-n", namespace.name, "--type=merge", f"-p={label}".replace("'", '"'))
        return False

    # The proxy calls `change` between the operator's read and its write, and then passes the write on.
    namespace.api.break_("update ddpjobs/status", 500, where=change)
    namespace.apply(job())
    runs_to_its_end(namespace)
    assert changes == 3
    assert (namespace.job() or {})["metadata"]["labels"] == {"changed": "3"}


def test_a_job_replaced_between_read_and_write_is_not_overwritten(namespace: Namespace, operator: Operator) -> None:
    old_pods = namespace.start()
    old = (namespace.job() or {})["metadata"]["uid"]
    namespace.api.break_("update ddpjobs/status", 409, reason="Conflict", times=2)
    namespace.kubectl("replace", "--force", "-f", "-", stdin=job())
    until(lambda: (namespace.job() or {}).get("metadata", {}).get("uid") not in (None, old), "it is another job")
    until(lambda: namespace.status().get("attempt") == 1, "it starts with attempt 1")
    namespace.has_pods(*PODS)
    until(lambda: set(namespace.uids().values()).isdisjoint(old_pods.values()), "its pods are new")
    runs_to_its_end(namespace)


# ------------------------------------------------------------------------------------------------ watches that fail


def test_changes_while_watches_are_closed_are_noticed(namespace: Namespace, operator: Operator) -> None:
    namespace.start(backoffLimit=0)
    for _ in range(5):
        namespace.api.close_watches()
        passes(0.2)
    namespace.exits("digits-1-1", 1)
    assert "rank 1" in namespace.reaches("Failed")


@pytest.mark.parametrize("resource", ["pods", "services", "ddpjobs"])
def test_after_410_the_operator_lists_again(namespace: Namespace, operator: Operator, resource: str) -> None:
    namespace.start()
    lists = namespace.api.requests()[f"list {resource}"]
    assert namespace.api.close_watches(resource, gone=True) == 1
    until(lambda: namespace.api.requests()[f"list {resource}"] > lists, "it lists again")
    for pod in PODS:
        namespace.exits(pod)
    namespace.reaches("Succeeded")


HTML = "<html><body><h1>502 Bad Gateway</h1></body></html>"
ANSWERS: dict[str, dict[str, Any]] = {
    "410": {"status": 410, "reason": "Expired"},
    "410 that is no Status": {"status": 410, "text": HTML},
    "429": {"status": 429},
    "500": {"status": 500},
    "502 as HTML": {"status": 502, "text": HTML},
    "HTML": {"text": HTML},
    "JSON of something else": {"body": {"kind": "Something"}},
    "half an answer": {"cut": True},
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_a_wrong_answer_to_a_list_or_watch_is_retried_within_seconds(namespace, operator, answer):
    namespace.start()
    for verb in ("watch", "list"):
        for resource in ("ddpjobs", "pods", "services"):
            namespace.api.break_(f"{verb} {resource}", **answer)
    began = time.monotonic()
    namespace.api.close_watches()
    wanted = ("watch ddpjobs", "watch pods", "watch services")
    # Break two watches each. After a 410 the operator also needs a second list.
    until(lambda: all(namespace.api.requests(since=began)[what] > 1 for what in wanted), "all is watched again", 20)
    print(f"{answer}: watched again after {time.monotonic() - began:.1f} s")
    namespace.api.mend()
    namespace.apply(job("after"))
    namespace.has_pods("after-1-0", "after-1-1", seconds=20)
    namespace.exits("digits-1-0")
    namespace.exits("digits-1-1")
    namespace.reaches("Succeeded")
    assert operator.process.poll() is None


def test_a_proxy_that_breaks_every_third_request_fails_no_job(namespace: Namespace, operator: Operator) -> None:
    """If a proxy breaks every third request, no job may fail, and the operator must neither exit nor stop."""
    count, answers = 0, itertools.cycle(ANSWERS.values())

    def third(_: Seen) -> bool:
        nonlocal count
        count += 1
        if count % 3 == 0:
            vars(fault).update({"status": 0, "text": "", "body": None, "cut": False, **next(answers)})
        return count % 3 == 0

    fault = namespace.api.break_("", times=float("inf"), where=third)
    names = [f"job-{number}" for number in range(3)]
    for name in names:
        namespace.apply(job(name))
        namespace.has_pods(f"{name}-1-0", f"{name}-1-1")
        namespace.api.close_watches()
    for name in names:
        namespace.runs(f"{name}-1-0", f"{name}-1-1")
        namespace.exits(f"{name}-1-0")
        namespace.exits(f"{name}-1-1")
    for name in names:
        namespace.reaches("Succeeded", name=name)
        assert namespace.status(name)["attempt"] == 1
    assert fault.happened > 10
    assert operator.process.poll() is None


def test_a_pod_that_completed_before_its_peers_were_created_is_not_run_again(namespace, operators):
    first = operators(namespace.name).watches()
    names: list[str] = []

    def second(seen: Seen) -> bool:
        names.append(seen.name)
        return len(names) > 1

    fault = namespace.api.break_("create pods", 500, times=float("inf"), where=second)
    namespace.apply(job(backoffLimit=0))
    namespace.has_pods("digits-1-0")
    until(lambda: fault.happened, "it tries to make the second pod")
    namespace.exits("digits-1-0")
    first.kill()
    namespace.api.mend()
    operators(namespace.name).watches()
    namespace.has_pods("digits-1-1")
    namespace.exits("digits-1-1")
    namespace.reaches("Succeeded")
    assert namespace.status()["attempt"] == 1
    assert sorted(namespace.uids()) == PODS


def test_a_job_deleted_while_no_watch_is_open_leaves_nothing(namespace: Namespace, operator: Operator) -> None:
    namespace.start()
    for what in ("watch ddpjobs", "watch pods", "list pods", "list ddpjobs"):
        namespace.api.break_(what, 503, times=float("inf"))
    namespace.api.close_watches()
    namespace.kubectl("delete", "ddp", "digits", "--wait=false")
    until(lambda: namespace.job() is None and not namespace.pods(), "it is gone")
    mended = time.monotonic()
    namespace.api.mend()
    namespace.api.close_watches(gone=True)
    watches = {"watch pods", "watch ddpjobs"}
    until(lambda: watches <= set(namespace.api.requests(since=mended)), "all are watched again", 60)
    passes(4)
    began = time.monotonic()
    passes(3)
    assert namespace.api.writes(since=began) == []
    namespace.apply(job())
    namespace.has_pods(*PODS)


LOST = {
    "a pod that has completed": ("pods", "MODIFIED", lambda o: o["status"].get("phase") == "Succeeded"),
    "a pod that runs": ("pods", "MODIFIED", lambda o: o["status"].get("phase") == "Running"),
    "a job that is new": ("ddpjobs", "ADDED", lambda o: True),
}


@pytest.mark.parametrize(("resource", "kind", "where"), LOST.values(), ids=LOST)
def test_a_lost_event_is_found_and_the_job_ends(namespace, operators, resource, kind, where):
    """A watch event that a proxy has lost must be found, or the job keeps its GPUs for ever."""
    namespace.api.watch_seconds = HEALTHY_SECONDS + 1
    operators(namespace.name, constants={"LIST_AGAIN_SECONDS": 1.0}).watches()
    lost = namespace.api.lose_event(resource, kind, where)
    namespace.apply(job())
    runs_to_its_end(namespace)
    assert lost.happened == 1


def test_a_temporarily_unavailable_api_server_costs_nothing(namespace: Namespace, operator: Operator) -> None:
    uids = namespace.start()
    verbs = ("list", "watch", "get")
    for what in [f"{verb} {kind}" for verb in verbs for kind in ("pods", "services", "ddpjobs")]:
        namespace.api.break_(what, 503, times=float("inf"))
    namespace.api.break_("update ddpjobs/status", 503, times=float("inf"))
    namespace.api.close_watches()
    namespace.exits("digits-1-0")
    passes(8)
    assert operator.process.poll() is None
    namespace.api.mend()
    namespace.exits("digits-1-1")
    namespace.reaches("Succeeded", seconds=60)
    assert namespace.uids() == uids


def test_an_old_list_makes_no_pod_look_deleted(namespace, operators, api):
    first = operators(namespace.name).watches()
    old = api.call("GET", f"/api/v1/namespaces/{namespace.name}/pods?labelSelector=training.ddpjob.io/job")
    assert old["items"] == []
    uids = namespace.start()
    # The server answers with an old list: first to a running operator, then to a new one.
    fault = api.break_("list pods", body=old, times=1)
    api.close_watches("pods", gone=True)
    until(lambda: fault.happened, "it lists")
    passes(2)
    first.stop()
    began = time.monotonic()
    fault = api.break_("list pods", body=old, times=1)
    operators(namespace.name).watches()
    assert fault.happened
    passes(2)
    writes = [w for w in api.writes(since=began) if "selfsubject" not in w]
    assert writes == []
    assert namespace.uids() == uids
    assert namespace.status()["state"] == "Running"


# ------------------------------------------------------------------------------------------------ rights and logins


def test_a_rotated_token_is_read_again(namespace: Namespace, operators: Callable[..., Operator]) -> None:
    account(namespace, "operator")
    first, second = (namespace.kubectl("create", "token", "operator", "--duration=1h").strip() for _ in range(2))
    operator = operators(namespace.name, token=first).watches()
    # As with a kubelet, the file gets the new token before the old one expires.
    operator.log_in_as(second)
    every = ("create", "update", "list", "watch", "get")
    for what in [f"{verb} {kind}" for verb in every for kind in ("pods", "services", "ddpjobs", "ddpjobs/status")]:
        namespace.api.break_(what, 401, times=float("inf"), where=lambda seen: seen.token == first)
    namespace.api.close_watches()
    namespace.apply(job())
    runs_to_its_end(namespace)
    assert namespace.api.seen[-1].token == second


def test_refused_credentials_are_retried_at_a_slow_pace(namespace: Namespace, operator: Operator) -> None:
    verbs, kinds = ("list", "watch", "get", "update", "create"), ("pods", "services", "ddpjobs", "ddpjobs/status")
    for what in [f"{verb} {kind}" for verb in verbs for kind in kinds]:
        namespace.api.break_(what, 401, times=float("inf"))
    namespace.api.close_watches()
    namespace.apply(job())
    began = time.monotonic()
    passes(12)
    assert sum(namespace.api.requests(since=began).values()) < 60
    namespace.api.mend()
    runs_to_its_end(namespace)


def account(namespace: Namespace, name: str, *, without: tuple[str, str] = ("", "")) -> None:
    """Create a service account with the operator's rights in the namespace. without: (verb, resource) to leave out."""
    rules = []
    for right in RIGHTS:
        verbs = [verb for verb in right.verbs if (verb, right.resource) != without]
        rules += [{"apiGroups": [right.group], "resources": [right.resource], "verbs": verbs}] if verbs else []
    of_role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace.name}
    rbac = "rbac.authorization.k8s.io/v1"
    items = [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}},
        {"apiVersion": rbac, "kind": "Role", "metadata": {"name": name}, "rules": rules},
        {
            "apiVersion": rbac,
            "kind": "RoleBinding",
            "metadata": {"name": name},
            "roleRef": of_role,
            "subjects": [subject],
        },
    ]
    namespace.kubectl("apply", "-f", "-", stdin={"apiVersion": "v1", "kind": "List", "items": items})


def test_the_listed_rights_in_one_namespace_suffice(namespace: Namespace, operators: Callable[..., Operator]) -> None:
    account(namespace, "operator")
    token = namespace.kubectl("create", "token", "operator").strip()
    operator = operators(namespace.name, token=token).watches()
    namespace.apply(job(ttlSecondsAfterFinished=0))
    namespace.has_pods(*PODS)
    namespace.runs(*PODS)
    namespace.reaches("Running")
    for pod in PODS:
        namespace.exits(pod)
    until(lambda: namespace.job() is None, "it is deleted by its TTL")
    until(lambda: namespace.events().count("AllNodesCompleted") == 1, "and said so")
    assert "WARNING" not in operator.log


MISSING = [
    ("create", "pods"),
    ("list", "pods"),
    ("watch", "services"),
    ("update", "ddpjobs/status"),
    ("list", "ddpjobs"),
    ("watch", "ddpjobs"),
    ("create", "events"),
]


@pytest.mark.parametrize(("verb", "resource"), MISSING, ids=[f"{v} {r}" for v, r in MISSING])
def test_a_missing_right_is_logged_and_the_job_runs_once_it_is_granted(namespace, operators, verb, resource):
    account(namespace, "operator", without=(verb, resource))
    operator = operators(namespace.name, token=namespace.kubectl("create", "token", "operator").strip())
    namespace.apply(job())

    def says_so() -> bool:
        lines = [line for line in operator.log.splitlines() if verb in line and resource.partition("/")[0] in line]
        return any("may not" in line or "cannot" in line for line in lines)

    until(says_so, f"its log names {verb} {resource}")
    passes(3)
    assert operator.process.poll() is None
    assert len(operator.log.splitlines()) < 25
    account(namespace, "operator")
    runs_to_its_end(namespace)


def test_a_namespace_without_rights_delays_no_other(namespace: Namespace, operators: Callable[..., Operator]) -> None:
    account(namespace, "operator")
    token = namespace.kubectl("create", "token", "operator").strip()
    operator = operators("kube-system", namespace.name, token=token)
    namespace.apply(job())
    runs_to_its_end(namespace)
    assert "DDPJobs in kube-system cannot be listed" in operator.log


def test_the_operator_waits_for_a_removed_crd_to_return(namespace: Namespace, operator: Operator) -> None:
    namespace.start()
    namespace.api.break_("list ddpjobs", 404, reason="NotFound", times=float("inf"))
    namespace.api.close_watches("ddpjobs", gone=True)
    until(lambda: "ddpjobs in" in operator.log and "404 NotFound" in operator.log, "it says so")
    assert operator.log.count("404 NotFound") == 1
    namespace.api.mend()
    for pod in PODS:
        namespace.exits(pod)
    namespace.reaches("Succeeded")
    namespace.apply(job("after"))
    namespace.has_pods("after-1-0")
    assert operator.process.poll() is None


def test_the_operator_waits_for_a_missing_crd_and_tells_how_to_install_it(namespace, operators):
    namespace.api.break_("list ddpjobs", 404, reason="NotFound", times=float("inf"))
    operator = operators(namespace.name)
    until(lambda: "is not installed: kubectl apply -f " in operator.log, "it says so")
    passes(4)
    assert operator.log.count("is not installed") == 1
    assert operator.process.poll() is None
    namespace.apply(job())
    namespace.api.mend()
    runs_to_its_end(namespace)


# ------------------------------------------------------------------------------------------------ at rest


def test_fifty_idle_running_jobs_cost_no_write(namespace: Namespace, operator: Operator) -> None:
    names = [f"job-{i}" for i in range(50)]
    items = [job(name, nodes=1) for name in names]
    namespace.kubectl("create", "-f", "-", stdin={"apiVersion": "v1", "kind": "List", "items": items})
    namespace.has_pods(*(f"{name}-1-0" for name in names), seconds=60)
    namespace.runs(*(f"{name}-1-0" for name in names))
    for name in names:
        namespace.reaches("Running", name=name)
    namespace.api.close_watches()
    passes(8)  # so that the last events of the start are written, and the watches are open
    began, cpu = time.monotonic(), operator.cpu_seconds
    passes(30)
    assert namespace.api.writes(since=began) == []
    assert sum(namespace.api.requests(since=began).values()) <= 10
    assert operator.cpu_seconds - cpu < 0.5
    namespace.api.seen.clear()  # the 50 creates of the start would count as a hot loop
    path = f"{namespace.jobs_path}/job-0"
    namespace.api.call("PATCH", path, {"metadata": {"labels": {"a": "b"}}}, MERGE)
    passes(2)
    assert namespace.api.writes() == [], "a label is nothing to write about"
