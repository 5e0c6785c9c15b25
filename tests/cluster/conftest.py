"""The operator as a user installs it: by Helm, from its image, in a cluster that really runs pods.

Any cluster with two nodes will do. It must have the images, or be able to pull them:

    DDPJOB_OPERATOR_IMAGE   default ddpjob-operator:0.1.0
    DDPJOB_TRAINER_IMAGE    default ddpjob-trainer
    DDPJOB_NEXT_OPERATOR_IMAGE    to upgrade the operator; default the same image with other settings

Some tests break the cluster on purpose. They need commands for this cluster, and are skipped without them:

    DDPJOB_TEST_API_STOP, DDPJOB_TEST_API_START    stop and start the API server
    DDPJOB_TEST_NODE    gets `kill|stop|start|cut|join NODE`: power loss, a kubelet that halts, the repair of both,
                        the network cable out and in"""

import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from clusters import CRD, kubectl, skip_without_cluster, until
from pods import OPERATOR_IMAGE, RELEASE, ROOT, Gate, Space, helm
from shared import made_once, one_at_a_time

# Enough for a slow kubelet on a busy machine.
# After an outage of the API server a kubelet may return 35 s later, and its node is not ready for 15 s more.
LOST_NODE_SECONDS = 25
_MENDED_BY = {"kill": "start", "stop": "start", "cut": "join"}


@pytest.fixture(scope="session")
def nodes() -> list[str]:
    """Return the nodes that can run pods: no simulated nodes, and no control plane of kind."""
    skip_without_cluster()
    if not shutil.which("helm"):
        pytest.skip("helm is not on the PATH")
    items = json.loads(kubectl("get", "nodes", "-o", "json"))["items"]
    real = [
        n["metadata"]["name"]
        for n in items
        if "kwok.x-k8s.io/node" not in n["metadata"].get("annotations", {})
        and not any(t["key"] == "node-role.kubernetes.io/control-plane" for t in n["spec"].get("taints", ()))
    ]
    if len(real) < 2:
        pytest.skip(f"these tests want two nodes that run pods, the cluster has {len(real)}")
    return real


@pytest.fixture(scope="session")
def operator(nodes: list[str]) -> Iterator[str]:
    """Install the operator by Helm, and yield its namespace."""

    def install() -> dict[str, Any]:
        had_crd = "NotFound" not in kubectl("get", "-f", str(CRD), check=False)
        made = {"namespace": Space("ddpjob-system").name, "had CRD": had_crd}
        repository, _, tag = OPERATOR_IMAGE.rpartition(":")
        image = ["--set", f"image.repository={repository}", "--set-string", f"image.tag={tag}"]
        quick = ["--set", f"lostNodeSeconds={LOST_NODE_SECONDS}"]
        chart = [str(ROOT / "charts/ddpjob-operator"), "--namespace", made["namespace"]]
        try:
            helm("install", RELEASE, *chart, "--wait", "--timeout", "120s", *image, *quick)
        except BaseException:
            remove(made)
            raise
        return made

    def remove(made: dict[str, Any]) -> None:
        logs = ["logs", "-l", "app.kubernetes.io/name=ddpjob-operator", "--tail=200"]
        print(kubectl("-n", made["namespace"], *logs, check=False))
        helm("uninstall", RELEASE, "--namespace", made["namespace"], "--ignore-not-found")
        kubectl("delete", "namespace", made["namespace"], "--wait=false", "--ignore-not-found", check=False)
        if not made["had CRD"]:
            kubectl("delete", "-f", str(CRD), "--ignore-not-found", check=False)

    with made_once("operator", install, remove) as made:
        yield made["namespace"]


@pytest.fixture
def space(operator: str) -> Iterator[Space]:
    """Yield a namespace for the jobs of one test, and remove it afterwards."""
    made = Space("ddpjob-jobs")
    try:
        yield made
    finally:
        made.kubectl("delete", "ddp", "--all", "--wait=false", check=False)
        made.remove()


@pytest.fixture(scope="module")
def jobs(operator: str) -> Iterator[Space]:
    """Yield a namespace for jobs that run side by side for several tests. At the end no object may be left."""
    made = Space("ddpjob-jobs")
    try:
        yield made
        made.leaves_nothing()
    finally:
        made.remove()


@pytest.fixture
def gate(jobs: Space, nodes: list[str]) -> Iterator[Gate]:
    """Yield a gate that is open. Without it, a new pod may be there before the others have noticed that one is lost."""
    made = Gate(jobs, nodes)
    try:
        made.set("open")
        yield made
    finally:
        made.remove()


@pytest.fixture
def with_torch() -> Iterator[None]:
    """Let only one test at a time import torch in pods: two at once take longer, because each uses all CPUs of a small
    machine."""
    with one_at_a_time("torch"):
        yield


@pytest.fixture(scope="module")
def all_with_torch() -> Iterator[None]:
    """Like `with_torch`, from the first test that uses it to the end of its file."""
    with one_at_a_time("torch"):
        yield


@pytest.fixture
def take_api_server_away(nodes: list[str]) -> Iterator[Callable[[float], None]]:
    """Yield a function: `take_api_server_away(20)` stops the API server for 20 s. At the end wait for the nodes,
    because pods bound to a node that is not ready may be lost. Kubelets return up to a minute after the API server."""
    stop, start = (os.environ.get(f"DDPJOB_TEST_API_{what}", "") for what in ("STOP", "START"))
    if not stop or not start:
        pytest.skip("DDPJOB_TEST_API_STOP and DDPJOB_TEST_API_START do not say how to take the API server away")

    def away(seconds: float) -> None:
        subprocess.run(shlex.split(stop), check=True, capture_output=True)
        time.sleep(seconds)  # the length of the outage is what is tested
        subprocess.run(shlex.split(start), check=True, capture_output=True)
        until(lambda: kubectl("get", "--raw", "/readyz", check=False).strip() == "ok", "the API server is back", 120)

    yield away
    all_take_pods(nodes)


def all_take_pods(nodes: list[str]) -> None:
    """Wait until all nodes accept pods: a node that is ready again keeps its taints for a moment, and all pods of the
    next test would go to the other node."""

    def they_do() -> bool:
        found = json.loads(kubectl("get", "nodes", *nodes, "-o", "json"))["items"]
        ready = [c["status"] for n in found for c in n["status"]["conditions"] if c["type"] == "Ready"]
        return ready == ["True"] * len(nodes) and not any(n["spec"].get("taints") for n in found)

    until(they_do, "all nodes are ready again and have no taint", 120, every=0.5)


@pytest.fixture
def break_node(nodes: list[str]) -> Iterator[Callable[[str, str], None]]:
    """Yield a function: `("cut", node)` cuts a node off, `("join", node)` repairs it, as does the end of the test."""
    command = os.environ.get("DDPJOB_TEST_NODE", "")
    if not command:
        pytest.skip("DDPJOB_TEST_NODE does not say how to break a node")
    broken: dict[str, str] = {}

    def do(how: str, node: str) -> None:
        subprocess.run([*shlex.split(command), how, node], check=True, capture_output=True, timeout=120)
        if how in _MENDED_BY:
            broken[node] = _MENDED_BY[how]
        else:
            broken.pop(node, None)
            kubectl("wait", "--for=condition=Ready", f"node/{node}", "--timeout=150s")

    try:
        yield do
    finally:
        for node, how in list(broken.items()):
            do(how, node)
        all_take_pods(nodes)
