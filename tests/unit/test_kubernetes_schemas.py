"""Every object sent to an API server, checked against the strict schemas of each supported Kubernetes version. The
schemas of kubernetes-validate refuse unknown fields and wrong types. They cannot tell what an API server checks in its
code, such as name lengths; tests/api checks that with the version it gets."""

import functools
from typing import Any

import kubernetes_validate
import pytest
from kubernetes_validate import utils
from worlds import START, job

from ddpjob_cli.client import code, pack
from ddpjob_operator.gangs import kueue, native
from ddpjob_operator.kube import lease
from ddpjob_operator.kube.work import events
from ddpjob_operator.plan.actions import Event
from ddpjob_operator.pods import build

SUPPORTED = [f"1.{minor}" for minor in range(29, 38)]
GPUS = {"resources": {"limits": {"nvidia.com/gpu": 8, "memory": "64Gi"}}}
ALL_OF_A_TEMPLATE = {
    "metadata": {"labels": {"team": "a"}, "annotations": {"note": "b"}},
    "spec": {
        "terminationGracePeriodSeconds": 0,
        "hostNetwork": True,
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        "initContainers": [{"name": "fetch", "image": "busybox", "command": ["true"]}],
        "containers": [
            {"name": "trainer", "image": "ddpjob-trainer", "command": ["ddprun", "train.py"], "env": [{"name": "A"}]},
            {"name": "sidecar", "image": "busybox", "volumeMounts": [{"name": "data", "mountPath": "/data"}]},
        ],
        "volumes": [{"name": "data", "emptyDir": {}}],
    },
}


@pytest.fixture(autouse=True, scope="module")
def read_once(module_patch: pytest.MonkeyPatch) -> None:
    """Read each schema once: a schema takes 20 ms, and each test needs several."""
    module_patch.setattr(utils, "schema_contents", functools.cache(utils.schema_contents))


@pytest.fixture(scope="module")
def module_patch() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def pods() -> dict[str, dict[str, Any]]:
    reporting = build.Reporting("http://ddpjob-operator.ddpjob:8080/v1/report")
    jobs = {
        "torchrun": job(),
        "ddprun": job(container={"command": ["ddprun", "train.py"]}),
        "GPUs": job(container=GPUS, nprocPerNode=8),
        "elastic": job(nodes=4, minNodes=2),
        "all of a template": job(template=ALL_OF_A_TEMPLATE),
    }
    made = {f"pod, {name}": build.pod(one, 3, 1, None, reporting, ["node-a"], 2) for name, one in jobs.items()}
    made["pod in a queue"] = build.pod(job(), 1, 0)
    kueue.ADAPTER.pod(made["pod in a queue"], job(), 1)
    return made


def gangs(version: str) -> dict[str, dict[str, Any]]:
    """Return a gang's PodGroup and one of its pods, for each API version that both Kubernetes and the adapter have."""
    served = {"1.36": {"v1alpha2"}, "1.37": {"v1beta1", "v1alpha3"}}.get(version, set())
    assert served <= set(native.ADAPTER.versions)
    placed = job(nodes=4, topologyKey="topology.kubernetes.io/rack")
    pod = build.pod(placed, 1, 0)
    native.ADAPTER.pod(pod, placed, 1)
    groups = {one: native.body(placed, 1, f"{native.ADAPTER.group}/{one}") for one in served}
    return groups | ({"pod in a gang": pod} if served else {})


def others() -> dict[str, dict[str, Any]]:
    durations = lease.Durations()
    held = lease.claim(None, "ddpjob-operator", "pod-a", durations, START)
    archive = pack.Archive(b"archive", 1)
    with_code = code.into({"spec": {"template": job().spec.template}}, archive)
    return {
        "Service": build.service(job()),
        "Lease, held": held,
        "Lease, freed": lease.freed(held, START),
        "Event": events.body(job().metadata, Event("Normal", "Accepted", "valid"), START, "pod-a", "1"),
        "ConfigMap with code": code.config_map(archive),
        "pod that unpacks code": build.pod(job(template=with_code["spec"]["template"]), 1, 0),
    }


def refusal(body: dict[str, Any], version: str) -> str:
    """Return the schema's objection to an object; "" if there is none."""
    try:
        kubernetes_validate.validate(body, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{'.'.join(map(str, error.path))}: {error.message}"
    return ""


@pytest.mark.parametrize("version", SUPPORTED)
def test_objects_written_by_operator_and_client_match_the_kubernetes_schemas(version: str) -> None:
    """Every object that is written must match the schemas: Kubernetes drops an unknown field or refuses the object."""
    bodies = pods() | others() | gangs(version)
    refused = {name: why for name, body in bodies.items() if (why := refusal(body, version))}
    assert refused == {}


def test_the_schemas_refuse_an_unknown_field() -> None:
    """The schemas must refuse an unknown field, or the test above could never fail."""
    body = build.service(job())
    body["spec"]["headless"] = True
    assert "headless" in refusal(body, SUPPORTED[0])
