"""Jobs and pods that operators of earlier commits left in a cluster, under the present operator.
tests/unit/data/recordings has a file for each commit, written there by tests/support/recordings.py."""

import datetime as dt
import functools
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from msgspec.structs import replace
from worlds import World

from ddpjob_operator.job import validation
from ddpjob_operator.job.status import TERMINAL
from ddpjob_operator.kube.api import bounded_json
from ddpjob_operator.kube.watch import observe
from ddpjob_operator.plan.actions import CreatePod, DeletePod, EndPod

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "data" / "recordings"
FOUND = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
RECORDED = [(commit, moment) for commit, moments in FOUND.items() for moment in moments]
HEALTHY = {"pods are created", "one trainer runs", "running", "running, ddprun", "running, elastic", "second attempt"}
LATER = dt.timedelta(seconds=10)


def taken_over(commit: str, moment: str) -> World:
    """Return the recorded job and its pods as an upgraded operator finds them."""
    recorded = FOUND[commit][moment]
    raw: dict[str, Any] = bounded_json.job(bounded_json.stored_job(json.dumps(recorded["job"]).encode()))
    job, problems = validation.parse(raw, hints=False)
    assert problems == []
    world = World(replace(job, metadata=validation.stored_metadata(raw), status=validation.stored_status(raw)))
    times = [c.last_transition_time for c in world.status.conditions if c.last_transition_time]
    world.now = max(times) + LATER
    world.service = True
    world.pods = {pod.name: pod for pod in map(observe.pod, recorded["pods"])}
    return world


@functools.cache
def schema() -> dict[str, Any]:
    """Return the CRD's schema, read once because its YAML takes half a second."""
    (path,) = (ROOT / "charts" / "ddpjob-operator" / "crds").glob("*.yaml")
    (version,) = yaml.safe_load(path.read_text())["spec"]["versions"]
    return _closed({"properties": version["schema"]["openAPIV3Schema"]["properties"]})


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema, changed to refuse the fields that the API server would drop silently."""
    if fields := schema.get("properties"):
        keeps = schema.get("x-kubernetes-preserve-unknown-fields", False)
        return schema | {"properties": {k: _closed(v) for k, v in fields.items()}, "additionalProperties": keeps}
    return schema | {name: _closed(schema[name]) for name in ("items", "additionalProperties") if name in schema}


@pytest.mark.parametrize(("commit", "moment"), RECORDED)
def test_the_current_crd_has_every_field_of_the_stored_objects(commit: str, moment: str) -> None:
    """The current CRD must have every field of the stored objects: the next write drops any other field."""
    stored = FOUND[commit][moment]["job"]
    jsonschema.validate({name: stored[name] for name in ("spec", "status")}, schema())


@pytest.mark.parametrize(("commit", "moment"), [one for one in RECORDED if one[1] in HEALTHY])
def test_an_upgrade_neither_stops_nor_creates_pods_of_a_healthy_job(commit: str, moment: str) -> None:
    world = taken_over(commit, moment)
    state, attempt, names = world.status.state, world.status.attempt, world.names()
    done = [action for _ in range(3) for action in world.step().actions]
    assert [action for action in done if isinstance(action, (CreatePod, DeletePod, EndPod))] == []
    assert (world.status.state, world.status.attempt, world.names()) == (state, attempt, names)
    assert not world.events


@pytest.mark.parametrize(("commit", "moment"), RECORDED)
def test_a_job_that_was_running_at_an_upgrade_reaches_its_end(commit: str, moment: str) -> None:
    """A job that was running at an upgrade must reach its end: fields keep their meaning in a new operator."""
    world = taken_over(commit, moment)
    before = world.status
    if before.state in TERMINAL:
        world.step()
        assert (world.status.state, world.status.last_failure) == (before.state, before.last_failure)
        return
    if world.job.spec.suspend:
        world.change(suspend=False)
    for _ in range(5):
        world.settle().stops_all().settle().after(60)
        waiting = [pod.place for pod in world.pods.values() if pod.live and pod.trainer.state == "waiting"]
        world.runs(*waiting).settle()
    assert (world.status.state, world.status.completed_nodes) == ("Running", before.completed_nodes)
    assert world.status.restarts.total == before.restarts.total + (moment == "restarting"), "that one is charged later"
    for place in [pod.place for pod in world.pods.values() if pod.trainer.state == "running"]:
        world.exits(place).settle()
    assert world.status.state == "Succeeded"
