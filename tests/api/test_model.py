"""The simulation's model of an API server and a real one: the same requests get the same codes and effects."""

import copy
import json
import urllib.error
from collections.abc import Callable
from typing import Any

import pytest
from clusters import JOBS, Namespace, until
from clusters import job as manifest
from faulty_api import FaultyApi
from model_api import ModelApi
from virtual_time import START, VirtualLoop

from ddpjob_operator.job import api as types

Answer = tuple[int, dict[str, Any]]
Ask = Callable[..., Answer]
# No scheduler handles these pods, as in the model. The default scheduler would mark them as unschedulable.
# A write of that scheduler right before a DELETE would make the API server answer with 409.
POD = {"containers": [{"name": "trainer", "image": "busybox"}], "schedulerName": "nobody"}


class Server:
    """The model or the real server. `ask(method, path, body)` replaces {} in the path by a namespace of the test."""

    def __init__(self, request: Ask, namespace: str) -> None:
        self._request, self._namespace = request, namespace

    def ask(self, method: str, path: str, body: object = None) -> Answer:
        return self._request(method, path.format(self._namespace), body)

    def make(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        code, made = self.ask("POST", path, body)
        assert code == 201, made
        return made


def real(api: FaultyApi, namespace: Namespace) -> Server:
    def request(method: str, path: str, body: object) -> Answer:
        try:
            answer = api.call(method, path, body)
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())
        return 201 if method == "POST" else 200, answer

    return Server(request, namespace.name)


def modelled() -> Server:
    loop = VirtualLoop()
    model = ModelApi(loop.time, lambda: START)

    def request(method: str, path: str, body: Any) -> Answer:
        path, _, query = path.partition("?")
        answer = model.request(method, path, dict([query.split("=", 1)]) if query else {}, body)
        return copy.deepcopy(answer)  # a copy, as if the answer came through a socket

    loop.close()
    return Server(request, "default")


PODS, SERVICES = "/api/v1/namespaces/{}/pods", "/api/v1/namespaces/{}/services"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/{}/leases"


def pod(name: str = "one", **metadata: Any) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **metadata}, "spec": POD}


def lease(holder: str, **metadata: Any) -> dict[str, Any]:
    about = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "one", **metadata}}
    return {**about, "spec": {"holderIdentity": holder, "leaseDurationSeconds": 15}}


def said(answer: Answer) -> tuple[int, str]:
    """Return code and reason of an answer; no decision depends on its other fields."""
    return answer[0], str(answer[1].get("reason", "")) if answer[0] >= 400 else ""


def create_twice(s: Server) -> Any:
    return [said(s.ask("POST", PODS, pod())) for _ in range(2)]


def ask_for_what_is_not_there(s: Server) -> Any:
    calls = (("GET", None), ("DELETE", {}))
    return [said(s.ask(method, f"{path}/none", body)) for path in (PODS, JOBS, LEASES) for method, body in calls]


def names_in_an_error(s: Server) -> Any:
    return [s.ask("GET", f"{path}/none")[1]["message"] for path in (PODS, SERVICES, JOBS, LEASES)]


def delete_with_a_wrong_uid(s: Server) -> Any:
    s.make(PODS, pod())
    wrong = {"preconditions": {"uid": "00000000-0000-4000-8000-999999999999"}}
    return said(s.ask("DELETE", f"{PODS}/one", wrong)), said(s.ask("GET", f"{PODS}/one"))


def delete_with_an_old_version(s: Server) -> Any:
    uid = s.make(PODS, pod())["metadata"]["uid"]
    old = {"preconditions": {"uid": uid, "resourceVersion": "1"}, "gracePeriodSeconds": 0}
    return said(s.ask("DELETE", f"{PODS}/one", old)), said(s.ask("GET", f"{PODS}/one"))


def delete_a_pod_without_a_node_with_grace(s: Server) -> Any:
    uid = s.make(PODS, pod())["metadata"]["uid"]
    options = {"preconditions": {"uid": uid}, "gracePeriodSeconds": 30}
    code, answer = s.ask("DELETE", f"{PODS}/one", options)
    leaves_later = bool(answer["metadata"].get("deletionGracePeriodSeconds"))
    return code, answer["kind"] == "Pod", leaves_later, said(s.ask("GET", f"{PODS}/one"))


def delete_a_pod_with_a_finalizer(s: Server) -> Any:
    s.make(PODS, pod(finalizers=["ddpjob.test/wait"]))
    code, answer = s.ask("DELETE", f"{PODS}/one", {"gracePeriodSeconds": 30})
    asked = "deletionTimestamp" in answer["metadata"]
    released: Any = (409, "Conflict")
    for _ in range(5):  # the real server's scheduler may write the pod at the same time
        _, there = s.ask("GET", f"{PODS}/one")
        there["metadata"]["finalizers"] = []
        released = said(s.ask("PUT", f"{PODS}/one", there))
        if released != (409, "Conflict"):
            break
    return code, asked, released, said(s.ask("GET", f"{PODS}/one"))


def the_status_is_apart(s: Server) -> Any:
    """A create drops the status, a PUT of the job does not change it, and a PUT of the status changes nothing else."""
    made = s.make(JOBS, {**manifest(), "status": {"state": "Failed"}})
    first = made.get("status")
    code, with_status = s.ask("PUT", f"{JOBS}/digits/status", {**made, "spec": {**made["spec"], "suspend": True},
                                                               "status": {"state": "Running"}})  # fmt: skip
    spec_kept = with_status["spec"] == made["spec"] and with_status["metadata"]["generation"] == 1
    changed = {**with_status, "spec": {**with_status["spec"], "suspend": True}, "status": {"state": "Failed"}}
    _, with_spec = s.ask("PUT", f"{JOBS}/digits", changed)
    now = with_spec["status"], with_spec["spec"]["suspend"], with_spec["metadata"]["generation"]
    return first, code, spec_kept, now


def stale_puts(s: Server) -> Any:
    made = s.make(JOBS, manifest())
    s.ask("PUT", f"{JOBS}/digits/status", {**made, "status": {"state": "Running"}})
    stale = s.ask("PUT", f"{JOBS}/digits/status", {**made, "status": {"state": "Failed"}})
    _, now = s.ask("GET", f"{JOBS}/digits")
    conflicts = {**now, "metadata": {**now["metadata"], "uid": "00000000-0000-4000-8000-999999999999"}}
    other = s.ask("PUT", f"{JOBS}/digits/status", conflicts)
    metadata = {k: v for k, v in now["metadata"].items() if k != "resourceVersion"}
    without = s.ask("PUT", f"{JOBS}/digits/status", {**now, "metadata": metadata})
    return said(stale), said(other), said(without)


def a_put_that_changes_nothing(s: Server) -> Any:
    made = s.make(JOBS, manifest())
    _, one = s.ask("PUT", f"{JOBS}/digits/status", {**made, "status": {"state": "Running"}})
    _, two = s.ask("PUT", f"{JOBS}/digits/status", {**one, "status": {"state": "Running"}})
    return one["metadata"]["resourceVersion"] == two["metadata"]["resourceVersion"]


def the_version_of_a_list(s: Server) -> Any:
    made = s.make(SERVICES, {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "one", "labels": {"a": "b"}},
                             "spec": {"clusterIP": "None", "selector": {"a": "b"}}})  # fmt: skip
    found = []
    for labels in ("a", "a=b", "a=c", "c"):
        _, page = s.ask("GET", f"{SERVICES}?labelSelector={labels}")
        newer = int(page["metadata"]["resourceVersion"]) >= int(made["metadata"]["resourceVersion"])
        found.append(([item["metadata"]["name"] for item in page["items"]], newer))
    return found


def versions_grow_with_each_write_of_any_kind(s: Server) -> Any:
    made = [s.make(PODS, pod("one")), s.make(LEASES, lease("a")), s.make(PODS, pod("two"))]
    code, gone = s.ask("DELETE", f"{PODS}/one", {})
    assert code == 200, gone
    versions = [int(raw["metadata"]["resourceVersion"]) for raw in made]
    return versions == sorted(set(versions)), int(gone["metadata"]["resourceVersion"]) >= versions[0]


def two_take_a_lease(s: Server) -> Any:
    made = s.make(LEASES, lease("a"))
    version = made["metadata"]["resourceVersion"]
    puts = [said(s.ask("PUT", f"{LEASES}/one", lease(who, resourceVersion=version))) for who in ("b", "c")]
    return puts, s.ask("GET", f"{LEASES}/one")[1]["spec"]["holderIdentity"]


def deleting_a_job(s: Server) -> Any:
    uid = s.make(JOBS, manifest())["metadata"]["uid"]
    options = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
    return s.ask("DELETE", f"{JOBS}/digits", options)[1]["kind"], said(s.ask("GET", f"{JOBS}/digits"))


STORIES = (
    create_twice,
    ask_for_what_is_not_there,
    names_in_an_error,
    delete_with_a_wrong_uid,
    delete_with_an_old_version,
    delete_a_pod_without_a_node_with_grace,
    delete_a_pod_with_a_finalizer,
    the_status_is_apart,
    stale_puts,
    a_put_that_changes_nothing,
    the_version_of_a_list,
    versions_grow_with_each_write_of_any_kind,
    two_take_a_lease,
    deleting_a_job,
)


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_the_model_answers_like_the_real_api_server(story, api, namespace):
    assert story(modelled()) == story(real(api, namespace))


def test_an_orphan_of_a_job_is_collected_with_its_own_grace(api: FaultyApi, namespace: Namespace) -> None:
    """A dependant must be deleted after its owner, with its own grace period, in the model as in Kubernetes."""
    server = real(api, namespace)
    uid = server.make(JOBS, manifest())["metadata"]["uid"]
    owner = {"apiVersion": types.API_VERSION, "kind": types.KIND, "name": "digits", "uid": uid, "controller": True}
    server.make(PODS, pod(ownerReferences=[owner]))
    server.ask("DELETE", f"{JOBS}/digits", {"propagationPolicy": "Background"})
    until(lambda: server.ask("GET", f"{PODS}/one")[0] == 404, "the pod has gone after its job")
