"""A template with any value at any place is either refused with the name of the field, or made into a pod."""

import copy
import cProfile
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from worlds import manifest

from ddpjob_operator.job import launcher, validation, variables
from ddpjob_operator.pods import build

Path = tuple[Any, ...]

VALUES = [None, 0, -1, 1.5, True, "", "x", 10**30, [], [None], [1], ["x"], [{}], [[]], {}, {"x": None}, {"x": 1}]
TRAINER = {
    "command": ["torchrun", "--nproc-per-node=2", "train.py"],
    "args": ["a"],
    "env": [{"name": "A", "value": "b"}, {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
    "envFrom": [{"configMapRef": {"name": "c"}}],
    "resources": {"limits": {"nvidia.com/gpu": 2, "memory": "1Gi", "cpu": "2"}, "requests": {"cpu": "1"}},
    "volumeMounts": [{"name": "v", "mountPath": "/v"}],
    "ports": [{"containerPort": 1, "name": "p"}],
    "workingDir": "/w",
    "terminationMessagePolicy": "File",
}
TERM = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}], "matchExpressions": []}
POD = {
    "volumes": [{"name": "v", "emptyDir": {}}, {"name": "w", "hostPath": {"path": "/w"}}],
    "initContainers": [{"name": "i", "image": "x", "command": ["x"], "env": [{"name": "q", "value": "1"}]}],
    "affinity": {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [TERM]}},
        "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "x"}]},
    },
    "terminationGracePeriodSeconds": 5,
    "hostNetwork": True,
    "dnsPolicy": "Default",
    "enableServiceLinks": True,
    "restartPolicy": "Never",
}


def whole() -> dict[str, Any]:
    raw = manifest(container=copy.deepcopy(TRAINER))
    raw["spec"]["template"]["metadata"] = {"labels": {"a": "b"}, "annotations": {"c": "d"}}
    raw["spec"]["template"]["spec"].update(copy.deepcopy(POD))
    return raw


def places(value: Any, path: Path) -> Iterator[Path]:
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, one in inside:
        yield from places(one, (*path, name))


def with_value(path: Path, value: Any) -> dict[str, Any]:
    raw: Any = whole()
    inside = raw
    for part in path[:-1]:
        inside = inside[part]
    inside[path[-1]] = copy.deepcopy(value)
    return raw  # type: ignore[no-any-return]


PLACES = list(places(whole()["spec"]["template"], ("spec", "template")))


@pytest.mark.parametrize("path", PLACES, ids=validation.dotted)
def test_any_value_in_a_template_is_refused_by_its_field_or_made_into_a_pod(path: Path) -> None:
    """Any value in a template must be refused by its field, or be made into a pod. Otherwise the job stands still, and
    the operator's log has a traceback at each reconcile."""
    for value in VALUES:
        job, problems = validation.parse(with_value(path, value))
        if problems:
            assert all(str(problem).startswith("spec.template") for problem in problems), problems
            continue
        body = build.pod(job, 1, 1, avoid=["node-1"], replacement=1)
        build.in_users_words("spec.containers[0].env[99]: unknown", body, job)
        list(launcher.warnings(job.spec))
        variables.overridden(job.spec.template)
        list(launcher.warnings(job.spec))


def _calls(run: Callable[[], object]) -> int:
    """Return the number of function calls, which does not depend on the machine's load."""
    profile = cProfile.Profile()
    profile.runcall(run)
    return sum(entry.callcount for entry in profile.getstats())


HOSTILE_WORDS = ("'\"$(", "\n", "torchrun x | tee y; ", "(", "--nnodes ", "exec ", "if ", "<<E\n", "`", "a && ", "/")


@pytest.mark.parametrize("word", HOSTILE_WORDS)
def test_a_script_of_250_kb_takes_linear_time(word: str) -> None:
    """A script of 250 kB must take linear time: quadratic time would block both operators for half a minute."""
    began = time.process_time()
    read, _ = validation.parse(manifest(container={"command": ["bash", "-c", word * (240_000 // len(word))]}))
    launcher.warnings(read.spec)
    assert time.process_time() - began < 5, "0.1 s; an expression that is quadratic in the text takes 30 s and more"


@pytest.mark.parametrize("kind", ["volumes", "fields of the pod", "fields of the container", "words"])
def test_names_that_nearly_match_each_other_cost_a_bounded_number_of_comparisons(kind: str) -> None:
    """Names that nearly match must cost a bounded number of comparisons, for example 900 volumes and 900 mounts."""
    draw = random.Random(4)
    names = ["".join(draw.choices("ab", k=60)) for _ in range(900)]
    fields = {"".join(draw.sample("activeDeadlineSeconds", 21)): 1 for _ in range(900)}
    container: dict[str, Any] = (
        {"command": ["torchrun", *(f"--nproc{name}" for name in names)]} if kind == "words" else {}
    )
    raw = manifest(container=container)
    pod = raw["spec"]["template"]["spec"]
    if kind == "volumes":
        pod["volumes"] = [{"name": name, "emptyDir": {}} for name in names]
        pod["containers"][0]["volumeMounts"] = [{"name": f"c{name}", "mountPath": "/x"} for name in names]
    elif kind != "words":
        (pod if kind == "fields of the pod" else pod["containers"][0]).update(fields)
    assert _calls(lambda: validation.parse(raw)) < 150_000
