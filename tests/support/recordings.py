"""What an operator leaves in a cluster at certain moments of a job: the stored DDPJob, and its pods.
`PYTHONPATH=tests/support python tests/support/recordings.py` prints this for the present sources.
tests/unit/data/recordings contains the output of earlier operators."""

import datetime as dt
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import yaml
from worlds import World, job

from ddpjob_operator.pods import build

ROOT = Path(__file__).parents[2]
GRACE = dt.timedelta(seconds=30)
DDPRUN = {"command": ["ddprun", "train.py"]}


def _restarting() -> World:
    return World(job()).running().reports_step(40).settle().exits(1, code=1, message="no space left").settle()


MOMENTS: dict[str, Callable[[], World]] = {
    "pods are created": lambda: World(job()).started(),
    "one trainer runs": lambda: World(job()).started().runs(0).settle(),
    "no node for a pod": lambda: World(job()).started().runs(0).unschedulable(1, "0/4 nodes are available").settle(),
    "running": lambda: World(job()).running().reports_step(40).settle(),
    "running, ddprun": lambda: World(job(container=DDPRUN)).running().reports_step(40).settle(),
    "running, elastic": lambda: World(job(nodes=4, minNodes=2)).running().settle(),
    "restarting": _restarting,
    "second attempt": lambda: _restarting().restarted().running(),
    "a pod is replaced": lambda: World(job(container=DDPRUN)).running().vanishes(1).settle(),
    "suspending": lambda: World(job()).running().change(suspend=True).settle(),
    "suspended": lambda: World(job()).running().change(suspend=True).settle().stops_all().settle(),
    "start is backed off": lambda: World(job(startDeadlineSeconds=60)).started().after(61).settle(),
    "one node completed": lambda: World(job()).running().exits(1).settle(),
    "succeeded": lambda: World(job()).running().exits(0).exits(1).settle(),
    "failed": lambda: World(job(backoffLimit=0)).running().exits(1, code=1).restarted(),
}


def with_defaults(value: Any, schema: dict[str, Any]) -> Any:
    """Return a copy with the defaults of the CRD, as the API server stores it."""
    if not isinstance(value, dict):
        return value
    fields: dict[str, Any] = schema.get("properties", {})
    value = {name: one["default"] for name, one in fields.items() if "default" in one} | value
    return {name: with_defaults(one, fields.get(name, {})) for name, one in value.items()}


def record() -> dict[str, Any]:
    """Return {"job": …, "pods": […]} by moment, in the JSON of the API server."""
    (crd,) = (ROOT / "charts" / "ddpjob-operator" / "crds").glob("*.yaml")
    schema = yaml.safe_load(crd.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    recorded = {}
    for moment, lead_to in MOMENTS.items():
        world = lead_to()
        stored = with_defaults(json.loads(msgspec.json.encode(world.job)), schema)
        stored |= {"apiVersion": "training.ddpjob.io/v1alpha1", "kind": "DDPJob"}
        recorded[moment] = {"job": stored, "pods": [_pod(world, one) for one in world.pods.values()]}
    return recorded


def _pod(world: World, seen: Any) -> dict[str, Any]:
    body = json.loads(json.dumps(build.pod(world.job, seen.attempt, seen.place, replacement=seen.replacement)))
    body["metadata"] |= {"uid": seen.uid, "creationTimestamp": _text(world.now)}
    if seen.deletion_requested_at is not None:
        body["metadata"] |= {"deletionTimestamp": _text(world.now + GRACE), "deletionGracePeriodSeconds": 30}
    if seen.deadline_set:
        body["spec"]["activeDeadlineSeconds"] = 1
    if seen.node:
        body["spec"]["nodeName"] = seen.node
    states = {"running": "running", "ended": "terminated", "waiting": "waiting"}
    how = {"running": {}, "ended": {"exitCode": seen.trainer.exit_code, "reason": "Completed"}, "waiting": {}}
    conditions = (
        [{"type": "PodScheduled", "status": "True", "lastTransitionTime": _text(world.now)}] if seen.node else []
    )
    if seen.unschedulable:
        why = {"reason": "Unschedulable", "message": seen.unschedulable, "lastTransitionTime": _text(world.now)}
        conditions = [{"type": "PodScheduled", "status": "False"} | why]
    container = {"name": "trainer", "ready": seen.trainer.ready, "restartCount": 0, "image": "", "imageID": ""}
    container["state"] = {states[seen.trainer.state]: how[seen.trainer.state]}
    body["status"] = {"phase": seen.phase, "conditions": conditions, "containerStatuses": [container]}
    return body


def _text(at: dt.datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


if __name__ == "__main__":
    lines = [f"{json.dumps(moment)}: {json.dumps(found, sort_keys=True)}" for moment, found in record().items()]
    sys.stdout.write("{\n" + ",\n".join(lines) + "\n}\n")
