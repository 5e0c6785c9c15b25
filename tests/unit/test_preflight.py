"""The pre-flight measures the nodes of a job before training. These tests check when it runs."""

import datetime as dt

import pytest

from ddpjob_operator.job import api, launcher
from ddpjob_operator.pods.agent_environment import wants_preflight

NOW = dt.datetime(2026, 11, 21, tzinfo=dt.timezone.utc)


def after(*classes: str) -> api.Status:
    return api.Status(
        failures=[api.FailureLine(attempt=i, message="", failure_class=c, time=NOW) for i, c in enumerate(classes)]
    )


@pytest.mark.parametrize(
    ("preflight", "nodes", "failures", "wanted"),
    [
        ("Never", 2, ["infrastructure"] * 3, False),
        ("Always", 2, [], True),
        ("OnRestart", 2, [], False),
        ("OnRestart", 2, ["infrastructure"], False),
        ("OnRestart", 2, ["infrastructure", "infrastructure"], True),
        ("OnRestart", 2, ["infrastructure", "infrastructure", "application"], False),
        ("OnRestart", 2, ["application", "infrastructure", "infrastructure"], True),
        ("OnRestart", 1, ["infrastructure", "infrastructure"], False),  # a single node cannot be compared with others
    ],
)
def test_preflight_on_restart_runs_after_two_infrastructure_failures_in_a_row(preflight, nodes, failures, wanted):
    assert wants_preflight(api.Spec(nodes=nodes, preflight=preflight), after(*failures)) is wanted


@pytest.mark.parametrize(
    ("command", "warned"),
    [(["ddprun", "train.py"], False), (["torchrun", "train.py"], True), (["python", "train.py"], True)],
)
def test_preflight_always_gives_a_warning_if_no_launcher_runs_it(command, warned):
    template = {"spec": {"containers": [{"name": "trainer", "image": "x", "command": command}]}}
    said = launcher.warnings(api.Spec(preflight="Always", template=template))
    assert bool(said) is warned
    assert not launcher.warnings(api.Spec(template=template))
    assert all(text.startswith("preflight: Always") for text in said)
