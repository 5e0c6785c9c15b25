"""The operator is upgraded to another image or other settings while jobs are running."""

import json
import os
from typing import Any

import pytest
from clusters import kubectl, until
from pods import OPERATOR_IMAGE, RELEASE, ROOT, Space, helm, job

pytestmark = [pytest.mark.alone, pytest.mark.timeout(600)]  # includes two upgrades
# The image of the upgrade. By default it is the installed image, and only the settings change.
NEXT_IMAGE = os.environ.get("DDPJOB_NEXT_OPERATOR_IMAGE", OPERATOR_IMAGE)
WAITS = """
import pathlib, time
while not pathlib.Path("/tmp/go").exists(): time.sleep(0.2)
"""


def variables(pod: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in pod["spec"]["containers"][0]["env"]}


def operators(namespace: str) -> set[str]:
    """Return the names of the operator's pods."""
    return set(
        kubectl("-n", namespace, "get", "pods", "-l", "app.kubernetes.io/name=ddpjob-operator", "-o", "name").split()
    )


def test_a_newer_operator_keeps_running_pods_that_it_would_build_differently(space: Space, operator: str) -> None:
    space.kubectl("apply", "-f", "-", stdin=job("lasting", WAITS))
    space.reaches("lasting", "Running")
    before = space.pods("lasting")
    uids = {name: pod["metadata"]["uid"] for name, pod in before.items()}
    old = operators(operator)
    repository, _, tag = NEXT_IMAGE.rpartition(":")
    # The upgrade also changes the address for reports, which only new pods may get.
    url = "http://reports.invalid/other"
    chart = [RELEASE, str(ROOT / "charts/ddpjob-operator"), "--namespace", operator, "--reuse-values", "--wait"]
    image = ["--set", f"image.repository={repository}", "--set-string", f"image.tag={tag}"]
    try:
        helm("upgrade", *chart, "--timeout", "120s", *image, "--set", f"progress.url={url}")
        deployments = json.loads(kubectl("-n", operator, "get", "deployments", "-o", "json"))["items"]
        assert {d["spec"]["template"]["spec"]["containers"][0]["image"] for d in deployments} == {NEXT_IMAGE}
        # Helm waits only for the new pods. The last old pod, which may lead, is stopped afterwards.
        until(lambda: not old & operators(operator), "the old operators are gone", 60)
        space.kubectl("apply", "-f", "-", stdin=job("later", "pass", nodes=1))
        space.reaches("later", "Succeeded")
        (later,) = space.pods("later").values()
        assert variables(later)["DDPJOB_STATUS_URL"] == url, "the new operator builds other pods"
        assert {variables(pod)["DDPJOB_STATUS_URL"] for pod in before.values()} != {url}

        assert space.status("lasting")["state"] == "Running"
        for name in before:
            space.kubectl("exec", name, "--", "touch", "/tmp/go")
        space.reaches("lasting", "Succeeded")
        assert {name: pod["metadata"]["uid"] for name, pod in space.pods("lasting").items()} == uids
        assert (space.status("lasting")["attempt"], space.status("lasting")["completedNodes"]) == (1, "0-1")
    finally:
        helm("rollback", RELEASE, "--namespace", operator, "--wait", "--timeout", "120s")
        until(lambda: OPERATOR_IMAGE in kubectl("-n", operator, "get", "deployments", "-o", "yaml"), "it is as before")
