"""The CRD on a real API server: which jobs it accepts, which it refuses, and with what message. Needs kubectl and
KUBECONFIG of any cluster, which needs no nodes and no operator. Creates a namespace and removes it, and removes the CRD
if it was not there before."""

import contextlib
import copy
import json
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from clusters import CRD, installed_crd, skip_without_cluster

CONTAINER = {"name": "trainer", "image": "busybox", "command": ["torchrun", "train.py"]}
JOB = {
    "apiVersion": "training.ddpjob.io/v1alpha1",
    "kind": "DDPJob",
    "metadata": {"name": "digits"},
    "spec": {"nodes": 2, "template": {"spec": {"containers": [CONTAINER]}}},
}
UNSET = object()
STOP_FIRST = "changes only while the job is suspended and stopped. Set spec.suspend to true"


class Cluster:
    """A namespace in which the test runs kubectl."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace

    def try_(self, *arguments: str, stdin: object = None) -> tuple[int, str]:
        """Return the exit code, and stdout and stderr as one text."""
        done = subprocess.run(
            ["kubectl", f"--namespace={self.namespace}", "--request-timeout=20s", *arguments],
            input=None if stdin is None else json.dumps(stdin),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        return done.returncode, done.stdout

    def __call__(self, *arguments: str, stdin: object = None) -> str:
        code, output = self.try_(*arguments, stdin=stdin)
        assert code == 0, f"kubectl {' '.join(arguments)}: {output}"
        return output

    def create(self, body: dict[str, Any]) -> str:
        """Create the job under a new name, and return that name."""
        body = copy.deepcopy(body)
        body["metadata"]["name"] = name = f"job-{uuid.uuid4().hex[:8]}"
        self("create", "-f", "-", stdin=body)
        return name

    def spec(self, name: str) -> dict[str, Any]:
        """Return the spec as it is stored."""
        return json.loads(self("get", "ddp", name, "-o", "json"))["spec"]

    def patch(self, name: str, *operations: tuple[str, str, object]) -> tuple[int, str]:
        """Send a JSON patch of (op, path, value)."""
        body = [{"op": op, "path": path, "value": value} for op, path, value in operations]
        return self.try_("patch", "ddp", name, "--type=json", "-p", json.dumps(body))

    def set_status(self, name: str, **status: object) -> None:
        """Write a status as the operator would."""
        self("patch", "ddp", name, "--subresource=status", "--type=merge", "-p", json.dumps({"status": status}))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    skip_without_cluster()
    kubectl = Cluster(f"ddpjob-test-{uuid.uuid4().hex[:8]}")
    with installed_crd():
        try:
            kubectl("create", "namespace", kubectl.namespace)
            yield kubectl
        finally:
            # Delete jobs first: without the CRD, the deletion of the namespace waits for objects that it cannot list.
            kubectl.try_("delete", "ddp", "--all", "--wait=false")
            kubectl.try_("delete", "namespace", kubectl.namespace, "--wait=false", "--ignore-not-found")


def job(name: str = "digits", **spec: object) -> dict[str, Any]:
    """Return the plain job with other fields in its spec."""
    body = copy.deepcopy(JOB)
    body["metadata"] = {"name": name}
    merged = {**JOB["spec"], **spec}  # type: ignore[dict-item]
    body["spec"] = copy.deepcopy({k: v for k, v in merged.items() if v is not UNSET})
    return body


def with_container(**fields: object) -> dict[str, Any]:
    """Return the plain job with other fields in its container."""
    return job(template={"spec": {"containers": [{**CONTAINER, **fields}]}})


EVERYTHING = job(
    nodes=4,
    nprocPerNode=8,
    backend="nccl",
    suspend=True,
    backoffLimit=3,
    backoffWindowSeconds=3600,
    restartGraceSeconds=0,
    activeDeadlineSeconds=86400,
    startDeadlineSeconds=1800,
    ttlSecondsAfterFinished=0,
    cleanPodPolicy="All",
    onePodPerNode=False,
    failurePolicy={"rules": [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [78]}}]},
    stall={"timeoutSeconds": 900},
    managedBy="kueue.x-k8s.io/multikueue",
)

ACCEPTED = {
    "a template alone": job(nodes=UNSET),
    "every field set that is there yet": EVERYTHING,
    "nprocPerNode: auto": job(nprocPerNode="auto"),
    "onePodPerNode: true": job(onePodPerNode=True),
    "onePodPerNode: auto": job(onePodPerNode="auto"),
    "a name of 57 characters": job(name="a" * 57),
    "all ways to write a quantity": with_container(
        resources={"limits": {"cpu": 0.5, "memory": "1.5Gi", "nvidia.com/gpu": 8}, "requests": {"cpu": "500m"}}
    ),
    "null in a template, as Helm leaves it": with_container(
        env=None, args=None, resources={"limits": None, "requests": {"cpu": None}}, volumeMounts=None
    ),
    "an empty variable, and one from elsewhere": with_container(
        env=[{"name": "A"}, {"name": "B", "value": None}, {"name": "C", "valueFrom": {"newIn2030": {"key": "x"}}}]
    ),
    "null, which is unset": job(nprocPerNode=None, onePodPerNode=None, stall=None, failurePolicy=None),
}


@pytest.mark.parametrize("body", ACCEPTED.values(), ids=ACCEPTED)
def test_a_valid_job_is_accepted(cluster: Cluster, body: dict[str, Any]) -> None:
    cluster("create", "--dry-run=server", "-f", "-", stdin=body)


REFUSED = {
    "nodes: 0": (job(nodes=0), "spec.nodes: ", "greater than or equal to 1"),
    "nodes: two": (job(nodes="two"), "spec.nodes: ", "must be of type integer"),
    "nodes that a scale cannot say": (job(nodes=5_000_000_000), "int32", "spec.nodes"),
    "nprocPerNode: 0": (job(nprocPerNode=0), "spec.nprocPerNode: ", "must be auto or a whole number from 1 to 1024."),
    "a number in quotes": (job(nprocPerNode="4"), "spec.nprocPerNode: ", "must be auto or a whole number"),
    "nprocPerNode: gpu": (job(nprocPerNode="gpu"), "spec.nprocPerNode: ", "must be auto or a whole number"),
    "nprocPerNode: 1.5": (job(nprocPerNode=1.5), "spec.nprocPerNode: ", "must be of type integer,string"),
    "backend: mpi": (job(backend="mpi"), "spec.backend: ", "no published wheel has it. Use gloo (CPU) or nccl (GPU)."),
    "backend: tpu": (job(backend="tpu"), "spec.backend: ", 'supported values: "auto", "gloo"'),
    "minNodes over nodes": (job(minNodes=3), "spec.minNodes: ", "must be at most spec.nodes. Lower minNodes"),
    "minNodes over the default of nodes": (
        job(nodes=UNSET, minNodes=2),
        "spec.minNodes: ",
        "must be at most spec.nodes",
    ),
    "gang: volcano": (job(gang="volcano"), "spec.gang: ", 'supported values: "auto", "kueue"'),
    "topologyKey: a rack": (job(topologyKey="a rack"), "spec.topologyKey: ", "must be the key of a node label"),
    "topologyKey without a gang": (job(topologyKey="rack", gang="none"), "spec.gang: ", "topologyKey needs a gang"),
    "minNodes: 0": (job(minNodes=0), "spec.minNodes: ", "greater than or equal to 1"),
    "suspend: later": (job(suspend="later"), "spec.suspend: ", "must be of type boolean"),
    "backoffLimit: -1": (job(backoffLimit=-1), "spec.backoffLimit: ", "greater than or equal to 0"),
    "a deadline of 0": (job(activeDeadlineSeconds=0), "spec.activeDeadlineSeconds: ", "greater than or equal to 1"),
    "cleanPodPolicy: Never": (job(cleanPodPolicy="Never"), "spec.cleanPodPolicy: ", '"All", "None", "Running"'),
    "onePodPerNode in quotes": (job(onePodPerNode="true"), "spec.onePodPerNode: ", '"true", "false", "auto"'),
    "onePodPerNode: {}": (job(onePodPerNode={}), "spec.onePodPerNode: ", "supported values"),
    "exit code 0 as a failure": (
        job(failurePolicy={"rules": [{"onExitCodes": {"values": [0]}}]}),
        "spec.failurePolicy.rules[0].onExitCodes.values[0]: ",
        "greater than or equal to 1",
    ),
    "managedBy of 64 characters": (job(managedBy="a" * 64), "spec.managedBy: ", "Too long"),
    "no spec": ({**JOB, "spec": None}, "spec: ", "Required value"),
    "no template": (job(template=UNSET), "spec.template: ", "Required value"),
    "a template without spec": (job(template={}), "spec.template.spec: ", "Required value"),
    "no containers": (job(template={"spec": {}}), "spec.template.spec.containers: ", "Required value"),
    "an empty list of containers": (
        job(template={"spec": {"containers": []}}),
        "spec.template.spec.containers: ",
        "1 items",
    ),
    "a container without name": (
        job(template={"spec": {"containers": [{"image": "busybox"}]}}),
        "spec.template.spec.containers[0].name: ",
        "Required value",
    ),
    "a container without image": (
        job(template={"spec": {"containers": [{"name": "trainer"}]}}),
        "spec.template.spec.containers[0].image: ",
        "Required value",
    ),
    "two containers of one name": (
        job(template={"spec": {"containers": [CONTAINER, CONTAINER]}}),
        "spec.template.spec.containers: ",
        "two containers have the same name. Give each a name of its own.",
    ),
    "a container's name with capitals": (with_container(name="Trainer"), "containers[0].name: ", "should match"),
    "a typo in a variable": (
        with_container(env=[{"name": "A", "valeu": "b"}]),
        "unknown field",
        '"spec.template.spec.containers[0].env[0].valeu"',
    ),
    "a variable that is a number": (
        with_container(env=[{"name": "A", "value": 1}]),
        "spec.template.spec.containers[0].env[0].value: ",
        "must be of type string",
    ),
    "a variable without a name": (with_container(env=[{"value": "x"}]), "env[0].name: ", "Required value"),
    "a variable's name with =": (with_container(env=[{"name": "A=1"}]), "env[0].name: ", "should match"),
    "a quantity that is none": (
        with_container(resources={"limits": {"cpu": "lots"}}),
        "spec.template.spec.containers[0].resources.limits.cpu: ",
        "should match",
    ),
    "a command that is a word": (
        with_container(command="torchrun"),
        "containers[0].command: ",
        "must be of type array",
    ),
    "an init container without image": (
        job(template={"spec": {"containers": [CONTAINER], "initContainers": [{"name": "init"}]}}),
        "spec.template.spec.initContainers[0].image: ",
        "Required value",
    ),
    "a container that is a word": (
        job(template={"spec": {"containers": ["busybox"]}}),
        "spec.template.spec.containers[0]: ",
        "must be of type object",
    ),
    "a label that is a number": (
        job(template={"metadata": {"labels": {"run": 7}}, **JOB["spec"]["template"]}),  # type: ignore[index]
        "spec.template.metadata.labels.run: ",
        "must be of type string",
    ),
    "a misspelled field": (job(node=2), "unknown field", '"spec.node"'),
    "a name of 58 characters": (job(name="a" * 58), "metadata.name: ", "must have at most 57 characters"),
    "a name that starts with a digit": (job(name="2nd"), "metadata.name: ", "starting with a letter"),
    "a name with a dot": (job(name="a.b"), "metadata.name: ", "it also names a Service"),
}


@pytest.mark.parametrize(("body", "where", "why"), REFUSED.values(), ids=REFUSED)
def test_an_invalid_job_is_refused_with_the_field_and_the_reason(cluster, body, where, why):
    code, output = cluster.try_("create", "--dry-run=server", "-f", "-", stdin=body)
    assert code != 0, "the API server accepted it"
    assert where in output
    assert why in output


def test_only_nodes_gets_a_default_that_is_stored(cluster: Cluster) -> None:
    body = job(nodes=UNSET)
    assert cluster.spec(cluster.create(body)) == {"nodes": 1, **body["spec"]}


def test_a_template_is_stored_completely_including_unknown_fields(cluster: Cluster) -> None:
    body = with_container(newIn2030={"deep": [1, {"er": True}]}, resources={"limits": {"nvidia.com/gpu": 8}})
    body["spec"]["template"]["spec"] |= {"alsoNew": "x", "tolerations": [{"operator": "Exists"}]}
    body["spec"]["template"]["metadata"] = {"labels": {"team": "vision"}, "creationTimestamp": None}
    stored = cluster.spec(cluster.create(body))["template"]
    assert stored["spec"] == body["spec"]["template"]["spec"]
    assert stored["metadata"]["labels"] == {"team": "vision"}


# ------------------------------------------------------------------------------------------------ changes

TRAINER = "/spec/template/spec/containers/0"
CHANGES: dict[str, tuple[tuple[str, str, object], ...]] = {
    "nodes": (("replace", "/spec/nodes", 3),),
    "nprocPerNode, set": (("add", "/spec/nprocPerNode", 2),),
    "a field of the template's container": (("replace", f"{TRAINER}/image", "busybox:2"),),
    "a value deep in the template": (("replace", f"{TRAINER}/resources/limits/cpu", "2"),),
    "a field deep in the template, for another": (
        ("remove", f"{TRAINER}/resources/limits", None),
        ("add", f"{TRAINER}/resources/requests", {"cpu": "1"}),
    ),
    "a field of the container, for another": (
        ("remove", f"{TRAINER}/command", None),
        ("add", f"{TRAINER}/args", ["torchrun", "train.py"]),
    ),
    "a field of the container, for one that Kubernetes does not know yet": (
        ("remove", f"{TRAINER}/command", None),
        ("add", f"{TRAINER}/newIn2030", 1),
    ),
    "a field that Kubernetes does not know yet": (("replace", f"{TRAINER}/futureField", 2),),
    "a new field that Kubernetes does not know yet": (("add", f"{TRAINER}/newIn2030", 1),),
    "a field of the pod, for another": (
        ("remove", "/spec/template/spec/tolerations", None),
        ("add", "/spec/template/spec/nodeSelector", {"a": "b"}),
    ),
    "a label of the pods": (("replace", "/spec/template/metadata/labels/team", "speech"),),
    "labels for annotations": (
        ("remove", "/spec/template/metadata/labels", None),
        ("add", "/spec/template/metadata/annotations", {"team": "vision"}),
    ),
    "a container more": (("add", "/spec/template/spec/containers/1", {"name": "sidecar", "image": "busybox"}),),
}


def changeable(**spec: object) -> dict[str, Any]:
    """Return a job whose template has fields of every kind: labels, tolerations, an unknown field and nulls."""
    body = with_container(resources={"limits": {"cpu": "1"}}, futureField=1, volumeMounts=None)
    body["spec"]["template"]["metadata"] = {"labels": {"team": "vision"}}
    body["spec"]["template"]["spec"] |= {"tolerations": [{"operator": "Exists"}], "volumes": None}
    body["spec"] |= spec
    return body


@pytest.fixture(scope="module")
def running(cluster: Cluster) -> str:
    return cluster.create(changeable())


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_fields_that_affect_running_pods_cannot_be_changed(cluster, running, change):
    code, output = cluster.patch(running, *change)
    assert code != 0, "the API server took the change"
    assert STOP_FIRST in output


def test_fields_that_affect_running_pods_cannot_be_changed_with_the_status(cluster: Cluster) -> None:
    """A user who sends a status with a spec must not be able to change the template of a running job: its rule is
    skipped if the status differs, as in the operator's writes."""
    name = cluster.create(changeable())
    image, states = ("replace", f"{TRAINER}/image", "busybox:2"), ({"message": "m"}, {"progress": {"step": 1}}, {})
    code, output = cluster.patch(name, ("add", "/status", {"message": "m"}), image)
    assert STOP_FIRST in output, (code, output)
    for status in ({"message": "n", "progress": {"step": 2, "updated": "2030-01-01T00:00:00Z"}}, {"message": None}):
        cluster.set_status(name, state="Running", startTime="2030-01-01T00:00:00Z", **status)
        for sent in states:
            code, output = cluster.patch(name, ("replace", "/status", sent), image)
            assert STOP_FIRST in output, (code, output)
        assert STOP_FIRST in cluster.patch(name, ("remove", "/status", None), image)[1]
    both = {"spec": {"template": {"spec": {"tolerations": None}}}, "status": {"message": "with a spec"}}
    cluster("patch", "ddp", name, "--subresource=status", "--type=merge", "-p", json.dumps(both))
    assert "tolerations" in cluster.spec(name)["template"]["spec"]
    assert cluster("get", "ddp", name, "-o", "jsonpath={.status.message}") == "with a spec"


def test_an_elastic_job_is_scaled_while_running_but_not_below_minNodes(cluster: Cluster) -> None:
    """An elastic job must be scaled by the scale subresource, as kubectl does, but not below minNodes."""
    name = cluster.create(changeable(minNodes=1))
    cluster.set_status(name, state="Running", startTime="2030-01-01T00:00:00Z")
    cluster("scale", "ddp", name, "--replicas", "3")
    code, output = cluster.try_("scale", "ddp", name, "--replicas", "0")
    assert code != 0, output
    code, output = cluster.patch(name, ("replace", "/spec/minNodes", 2))
    assert code != 0
    assert STOP_FIRST in output


def test_one_update_cannot_suspend_and_change_a_job(cluster: Cluster, running: str) -> None:
    code, output = cluster.patch(running, ("add", "/spec/suspend", True), ("replace", "/spec/nodes", 3))
    assert code != 0
    assert "spec.nodes: " in output
    assert STOP_FIRST in output


def test_every_field_of_a_job_created_suspended_may_change(cluster: Cluster) -> None:
    name = cluster.create(changeable(suspend=True))
    for change in CHANGES.values():
        code, output = cluster.try_("patch", "ddp", name, "--dry-run=server", "--type=json", "-p", _json_patch(change))
        assert code == 0, output


def test_a_change_is_refused_until_the_suspension_is_recorded(cluster: Cluster) -> None:
    name = cluster.create(changeable())
    cluster.set_status(name, state="Running", startTime="2030-01-01T00:00:00Z")
    cluster("patch", "ddp", name, "--type=merge", "-p", '{"spec": {"suspend": true}}')
    code, output = cluster.patch(name, ("replace", "/spec/nodes", 3))
    assert code != 0
    assert "wait for the condition Suspended" in output
    cluster.set_status(name, state="Suspended", startTime=None)
    assert cluster.patch(name, ("replace", "/spec/nodes", 3))[0] == 0


def test_one_update_may_change_and_resume_a_job(cluster: Cluster) -> None:
    name = cluster.create(changeable(suspend=True))
    code, output = cluster.patch(name, ("replace", "/spec/suspend", False), ("replace", "/spec/nodes", 3))
    assert code == 0, output


HARMLESS: dict[str, tuple[tuple[str, str, object], ...]] = {
    "the default of nprocPerNode, written out": (("add", "/spec/nprocPerNode", "auto"),),
    "a deadline": (("add", "/spec/activeDeadlineSeconds", 60),),
    "cleanPodPolicy": (("add", "/spec/cleanPodPolicy", "All"),),
    "a label of the job": (("add", "/metadata/labels", {"a": "b"}),),
    "suspend": (("add", "/spec/suspend", True),),
}


@pytest.mark.parametrize("change", HARMLESS.values(), ids=HARMLESS)
def test_fields_that_do_not_affect_pods_may_change_at_any_time(cluster, running, change):
    code, output = cluster.try_("patch", "ddp", running, "--dry-run=server", "--type=json", "-p", _json_patch(change))
    assert code == 0, output


@pytest.mark.parametrize("suspend", [False, True])
@pytest.mark.parametrize("before", ["", "kueue.x-k8s.io/multikueue"])
def test_no_controller_can_take_over_an_existing_job(cluster: Cluster, before: str, suspend: bool) -> None:
    name = cluster.create(changeable(suspend=suspend, **({"managedBy": before} if before else {})))
    for operation in (("add", "/spec/managedBy", "kueue"), *((("remove", "/spec/managedBy", None),) if before else ())):
        code, output = cluster.patch(name, operation)
        assert code != 0, "the API server took the change"
        assert "spec.managedBy: " in output
        assert "cannot be changed" in output


@pytest.mark.alone
def test_a_job_with_a_field_of_an_older_crd_can_be_suspended(cluster: Cluster) -> None:
    old = json.loads(cluster("get", "crd", "ddpjobs.training.ddpjob.io", "-o", "json"))
    old["metadata"] = {"name": old["metadata"]["name"]}
    fields = old["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    fields["gang"]["enum"].append("volcano")
    try:
        cluster("replace", "-f", "-", stdin=old)
        name = until(lambda: cluster.create(job(gang="volcano")))
    finally:
        cluster("apply", "--server-side", "--force-conflicts", "-f", str(CRD))
    until(lambda: _refuses(cluster, job(gang="volcano")))
    code, output = cluster.patch(name, ("add", "/spec/suspend", True))
    assert code == 0, output
    cluster.set_status(name, state="Suspended")
    assert cluster.patch(name, ("replace", "/spec/gang", "slurm"))[0] != 0


def _refuses(cluster: Cluster, body: dict[str, Any]) -> None:
    code, output = cluster.try_("create", "--dry-run=server", "-f", "-", stdin=body)
    assert code != 0, "the API server still has the old CRD"
    assert "Unsupported value" in output


def until(what: Callable[[], Any]) -> Any:
    """Call `what` until it succeeds, because an API server uses a new CRD only after seconds."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with contextlib.suppress(AssertionError):
            return what()
        time.sleep(0.2)
    return what()


def _json_patch(change: tuple[tuple[str, str, object], ...]) -> str:
    return json.dumps([{"op": op, "path": path, "value": value} for op, path, value in change])


# ------------------------------------------------------------------------------------------------ what kubectl shows


def test_scale_sets_the_nodes_of_a_suspended_job(cluster: Cluster) -> None:
    name = cluster.create(job(nodes=UNSET, suspend=True))
    cluster("scale", "ddp", name, "--replicas=3")
    assert cluster.spec(name)["nodes"] == 3
    code, output = cluster.try_("scale", "ddp", name, "--replicas=0")
    assert code != 0
    assert "greater than or equal to 1" in output


def test_scale_explains_why_a_running_job_keeps_its_nodes(cluster: Cluster) -> None:
    name = cluster.create(job())
    code, output = cluster.try_("scale", "ddp", name, "--replicas=3")
    assert code != 0
    assert STOP_FIRST in output
    assert cluster.spec(name)["nodes"] == 2


def test_the_scale_subresource_counts_the_ready_nodes(cluster: Cluster) -> None:
    name = cluster.create(job())
    cluster.set_status(name, nodes={"total": 2, "ready": 1}, selector=f"training.ddpjob.io/job={name}")
    path = f"/apis/training.ddpjob.io/v1alpha1/namespaces/{cluster.namespace}/ddpjobs/{name}/scale"
    scale = json.loads(cluster("get", "--raw", path))
    assert scale["spec"] == {"replicas": 2}
    assert scale["status"] == {"replicas": 1, "selector": f"training.ddpjob.io/job={name}"}


def test_get_shows_the_progress_of_a_job(cluster: Cluster) -> None:
    name = cluster.create(job())
    cluster.set_status(
        name,
        state="Running",
        reason="AllNodesRun",
        message="2 of 2 nodes are running, attempt 1",
        attempt=1,
        restarts={"application": 0, "infrastructure": 1, "stall": 0, "total": 1},
        display={"nodes": "2/2", "step": "312/1125", "progress": "28%", "eta": "3h10m", "restarts": "1 infrastructure"},
    )
    head, row = cluster("get", "ddp", name).splitlines()
    assert head.split() == ["NAME", "STATE", "NODES", "RESTARTS", "STEP", "PROGRESS", "ETA", "AGE"]
    assert row.split()[:7] == [name, "Running", "2/2", "1", "312/1125", "28%", "3h10m"]
    wide, row = cluster("get", "ddp", name, "-o", "wide").splitlines()
    assert wide.split() == [*head.split(), "ATTEMPT", "CHARGED-TO", "REASON", "MESSAGE"]
    assert row.endswith("1         1 infrastructure   AllNodesRun   2 of 2 nodes are running, attempt 1")


def test_get_shows_a_job_before_its_first_reconcile(cluster: Cluster) -> None:
    name = cluster.create(job())
    assert cluster("get", "ddp", name).splitlines()[1].split()[0] == name


def test_jobs_can_be_listed_by_state_and_reason(cluster: Cluster) -> None:
    """Jobs must be listed by state and reason, which needs selectable fields in the CRD."""
    server = json.loads(cluster("version", "-o", "json"))["serverVersion"]
    if int(server["minor"].rstrip("+")) < 31:
        pytest.skip("the API server selects by fields of a CRD from Kubernetes 1.31 on")
    failed, runs = cluster.create(job("fails")), cluster.create(job("runs"))
    cluster.set_status(failed, state="Failed", reason="NoProgress")
    cluster.set_status(runs, state="Running", reason="NoProgress")
    listed = ("get", "ddp", "-o", "name", "--field-selector")
    kind = "ddpjob.training.ddpjob.io"
    shown = cluster(*listed, "status.state=Failed").split()
    assert f"{kind}/{failed}" in shown
    assert f"{kind}/{runs}" not in shown
    assert {f"{kind}/{failed}", f"{kind}/{runs}"} <= set(cluster(*listed, "status.reason=NoProgress").split())


def test_get_all_shows_the_job_of_each_pod(cluster: Cluster) -> None:
    name = cluster.create(job())
    assert f"ddpjob.training.ddpjob.io/{name}" in cluster("get", "all")


def test_wait_for_complete_works_as_for_a_batch_job(cluster: Cluster) -> None:
    name = cluster.create(job())
    done = {"type": "Complete", "status": "True", "reason": "AllNodesCompleted", "message": ""}
    cluster.set_status(name, conditions=[{**done, "lastTransitionTime": "2030-01-01T00:00:00Z"}])
    assert "condition met" in cluster("wait", "--for=condition=Complete", "ddp", name, "--timeout=5s")


def test_wait_for_the_completion_time_ends_for_a_failed_job_too(cluster: Cluster) -> None:
    """A wait for completionTime must end for a failed job, too; the condition Complete would never come."""
    name = cluster.create(job())
    until_over = ("wait", "--for=jsonpath={.status.completionTime}", "ddp", name)
    assert "timed out" in cluster.try_(*until_over, "--timeout=1s")[1]
    cluster.set_status(name, state="Failed", completionTime="2030-01-01T00:00:00Z")
    assert "condition met" in cluster(*until_over, "--timeout=5s")


def test_a_newer_operator_may_write_a_state_unknown_to_this_crd(cluster: Cluster) -> None:
    name = cluster.create(job())
    cluster.set_status(name, state="Resizing", attempt=-1, message="x" * 10_000)
    assert cluster("get", "ddp", name, "-o", "jsonpath={.status.state}") == "Resizing"


def test_a_spec_cannot_be_written_with_the_status(cluster: Cluster) -> None:
    name = cluster.create(job())
    both = json.dumps({"spec": {"suspend": True}, "status": {"state": "Running"}})
    cluster("patch", "ddp", name, "--subresource=status", "--type=merge", "-p", both)
    assert "suspend" not in cluster.spec(name)


def test_explain_describes_each_field(cluster: Cluster) -> None:
    explained = " ".join(cluster("explain", "ddpjob.spec").split())
    assert "Unset: 10, or the pod's grace period if shorter; 0.1 if ddprun" in explained
    assert "Default: Running." in explained
    assert "readinessProbe" in cluster("explain", "ddpjob.spec.template.spec.containers")
