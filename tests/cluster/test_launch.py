"""Ten ways to launch, on real pods: the same files as in local runs, and the same parameters at the end."""

import re
from typing import Any

import pytest
import yaml
from pods import ROOT, TRAINER_IMAGE, Space

SECONDS_MAX = 150  # six processes import torch
ONE_PROCESS_PER_NODE = "plain"
# `make test` runs only recipes that are different in pods: who starts the ranks, and where they meet.
BY_DAY = "torchrun", "spawn-nodes", "init-tcp"
AT_NIGHT = (
    "torchrun-c10d",
    "launch-dash",
    "plain-options",
    "torchrun-standalone",
    "launch-underscore",
    "ddprun",
    "process-list",
)


@pytest.fixture(scope="module")
def params(jobs: Space, all_with_torch: None) -> str:
    """Return the parameters with which all ways must end."""
    return trained(jobs, ONE_PROCESS_PER_NODE).removesuffix(" world 2")


@pytest.mark.timeout(6 * SECONDS_MAX)  # other tests that import torch may run first
@pytest.mark.parametrize("name", [*BY_DAY, *(pytest.param(name, marks=pytest.mark.long) for name in AT_NIGHT)])
def test_a_launch_recipe_trains_in_one_world_on_pods_and_ends_with_the_same_parameters(jobs, params, name):
    spec = note(name)["spec"]
    assert trained(jobs, name) == f"{params} world {spec['nodes'] * spec.get('nprocPerNode', 1)}"


def trained(jobs: Space, name: str) -> str:
    """Return what rank 0 has printed about its parameters."""
    jobs.kubectl("apply", "-f", "-", stdin=restricted(note(name)))
    status = jobs.ends(name, SECONDS_MAX)
    assert status["state"] == "Succeeded", status
    logs = "".join(jobs.kubectl("logs", pod) for pod in jobs.pods(name))
    (found,) = set(re.findall(r"^PARAMS .*$", logs, re.MULTILINE))
    return str(found)


def note(name: str) -> dict[str, Any]:
    body: dict[str, Any] = yaml.safe_load((ROOT / f"examples/notes/{name}.yaml").read_text())
    return body


def restricted(body: dict[str, Any]) -> dict[str, Any]:
    """Add the fields that PodSecurity "restricted" requires; the example files omit them."""
    pod = body["spec"]["template"]["spec"]
    pod["securityContext"] = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    for container in pod["containers"]:
        container["image"] = TRAINER_IMAGE
        container["securityContext"] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    return body
