"""Mistakes in a pod template that otherwise only an API server finds, named with their field before a job is sent."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from worlds import manifest

import pod_types as tool
from ddpjob_cli.commands import sources
from ddpjob_cli.manifest.yamlfile import InputError
from ddpjob_operator.job import pod_types, template, validation

TRAINER = "spec.template.spec.containers[0]"


def refused(**container: Any) -> list[str]:
    """Return the problems that the operator reports, because every API server refuses them."""
    return [str(p).removeprefix(f"{TRAINER}.") for p in validation.parse(manifest(container=container))[1]]


@pytest.mark.parametrize(
    ("container", "sentence"),
    [
        ({"ports": [{"containerPort": -5}]}, "ports[0].containerPort: must be a port from 1 to 65535, is -5"),
        ({"ports": [{"containerPort": "80"}]}, 'ports[0].containerPort: must be a whole number, is "80"'),
        ({"ports": [{"name": "http"}]}, "ports[0]: needs containerPort"),
        ({"resources": {"limits": {"cpu": "lots"}}}, 'resources.limits.cpu: must be a quantity such as 2, 500m or 4Gi, is "lots"'),  # noqa: E501
        ({"resources": {"requests": {"memory": "-4Gi"}}}, 'resources.requests.memory: must not be negative, is "-4Gi"'),
        ({"resources": {"limits": {"cpu": True}}}, "resources.limits.cpu: must be a quantity such as 2, 500m or 4Gi, is true"),  # noqa: E501
        ({"volumeMounts": [{"name": "data"}]}, "volumeMounts[0]: needs mountPath"),
        ({"stdin": "yes"}, 'stdin: must be true or false, is "yes"'),
        ({"image": 5}, "image: must be text, is 5. Put it into quotes."),
        ({"image": True}, "image: must be text, is true. Put it into quotes: YAML reads y, yes, on and true as true."),
        ({"securityContext": {"runAsUser": "root"}}, 'securityContext.runAsUser: must be a whole number, is "root"'),
        ({"livenessProbe": {"httpGet": {"port": [1]}}}, "livenessProbe.httpGet.port: must be a whole number or a name, is a list"),  # noqa: E501
        ({"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s"}}}]}, "env[0].valueFrom.secretKeyRef: needs key"),  # noqa: E501
        ({"lifecycle": "x"}, 'lifecycle: must be a mapping, is "x"'),
        ({"envFrom": {}}, "envFrom: must be a list, is a mapping"),
    ],
)  # fmt: skip
def test_a_value_that_no_api_server_accepts_is_named_with_its_field(container: dict[str, Any], sentence: str) -> None:
    """A wrong value must be named. Otherwise the job is accepted, and its pods are refused minutes later."""
    assert refused(**container) == [sentence]


@pytest.mark.parametrize(
    "container",
    [
        {"resources": {"limits": {"cpu": 0.5, "memory": "1.5Gi", "nvidia.com/gpu": 8, "x": "2e3"}}},
        {"resources": {"limits": None}, "env": None, "livenessProbe": None},
        {"ports": [{"containerPort": 80, "hostPort": 0}], "readinessProbe": {"tcpSocket": {"port": "http"}}},
        {"securityContext": {"runAsUser": 1000.0}},
        {"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]},
    ],
)
def test_a_value_that_an_api_server_accepts_is_accepted(container: dict[str, Any]) -> None:
    assert refused(**container) == []
    assert list(validation.strict(validation.parse(manifest(container=container))[0].spec)) == []


@pytest.fixture
def loaded(tmp_path: Path):
    """Return a function that reports what the command line finds in a job's file."""

    def load(pod: dict[str, Any] | None = None, **container: Any) -> list[str]:
        body = manifest(container=container)
        body["spec"]["template"]["spec"] |= pod or {}
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump(body))
        try:
            sources.load(sources.Source(str(path)))
        except InputError as error:
            lines = path.read_text().splitlines()
            return [_with_its_line(line, lines) for line in str(error).splitlines()]
        return []

    return load


def _with_its_line(text: str, lines: list[str]) -> str:
    """Return `the line of the file | the sentence` for a report, without the path."""
    _, number, rest = text.split(":", 2)
    return f"{lines[int(number) - 1].strip(' -')} | {rest.split('[0].')[-1].split('template.spec.')[-1].strip()}"


def test_a_misspelled_field_is_named_at_any_depth_with_its_line(loaded) -> None:
    """A misspelled field such as `valeu` must be named at any depth, because users rely on the check."""
    assert loaded(env=[{"name": "A", "valeu": "b"}]) == ["valeu: b | valeu: unknown field; did you mean value?"]
    assert loaded(resources={"limit": {"cpu": 1}})[0].endswith("limit: unknown field; did you mean limits?")
    assert loaded(volumeMounts=[{"name": "v", "mountpath": "/x"}], pod={"volumes": [{"name": "v"}]})[0].endswith(
        "needs mountPath"
    )
    assert loaded({"restartpolicy": "Never"})[0].endswith("unknown field; did you mean restartPolicy?")


def test_a_mounted_volume_that_the_pod_does_not_have_is_named(loaded) -> None:
    volumes = {"volumes": [{"name": "data", "emptyDir": {}}]}
    assert loaded(volumes, volumeMounts=[{"name": "data", "mountPath": "/d"}]) == []
    (line,) = loaded(volumes, volumeMounts=[{"name": "dta", "mountPath": "/d"}])
    assert line.endswith('name: the pod has no volume "dta"; did you mean "data"?')


def test_a_value_outside_an_enumeration_is_named_with_the_allowed_ones(loaded) -> None:
    (line,) = loaded(imagePullPolicy="Allways")
    assert line.endswith('imagePullPolicy: must be one of Always, IfNotPresent, Never, is "Allways"')


def test_an_unknown_field_that_resembles_no_known_one_is_left_to_a_newer_api_server(loaded) -> None:
    assert loaded(quantumEntanglement=True) == []
    assert loaded(restartPolicyRulesOfTomorrow=[]) == [], "a longer name is a new field, and no typo"


def test_the_operator_refuses_no_unknown_field() -> None:
    """A newer cluster may have new fields, so the operator must not refuse an unknown field."""
    assert refused(env=[{"name": "A", "valeu": "b"}], imagePullPolicy="Sometimes") == []


def test_a_wrong_template_value_does_not_stop_pods_of_a_running_job_from_being_created() -> None:
    """A less strict operator accepted the running job, so its missing pods must still be created."""
    (problem,) = validation.parse(manifest(container={"stdin": "yes"}))[1]
    assert not problem.unreadable


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["spec", "containers", "env", "name", "resources", "limits", "cpu", "ports", "port", "x", "metadata"]),  # noqa: E501
        inner, max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(["spec", "metadata", "x"]), JSON))
def test_any_template_is_compared_without_a_traceback(body: dict[str, Any]) -> None:
    assert all(d.message for d in template.deviations(body))


def test_the_types_match_the_openapi_description() -> None:
    """The list of types must match the OpenAPI description. Otherwise a new field would be reported as a typo."""
    written = Path(pod_types.__file__).read_text(encoding="utf-8")
    assert written == tool.to_python(), "run `make generate`"
    assert len(written) < 100_000
