"""The operator's log names each decision about a job and its reason, for administrators who read it a day later."""

import asyncio
import json
import logging
import re
import sys

import pytest
from slow_server import SlowServer, Town, play
from worlds import World, digits

from ddpjob_operator.job import api
from ddpjob_operator.kube.api.client import ApiError
from ddpjob_operator.kube.log import JsonLines
from ddpjob_operator.kube.settings import OperatorSettings
from ddpjob_operator.kube.work import decisions
from ddpjob_operator.plan.actions import Plan


def plans(world: World) -> list[tuple[api.DDPJob, Plan]]:
    """Plan and act until nothing changes; return each job with its plan."""
    made: list[tuple[api.DDPJob, Plan]] = []
    while not made or made[-1][1].status is not None or made[-1][1].actions:
        assert len(made) < 10, made
        made.append((world.job, world.step()))
    return made


def told(world: World) -> list[str]:
    """Let the operator act until nothing changes; return the log lines of its decisions."""
    return [line.text for job, todo in plans(world) for line in decisions.lines(job, todo)]


def test_a_job_that_starts_and_runs_has_two_lines() -> None:
    """Each job must have a start line and a running line in the log, for an administrator who reads it later."""
    world = digits()
    assert told(world) == ["default/digits attempt 1: Pending, CreatingPods: attempt 1: creating 2 of 2 pods"]
    assert told(world.runs(0, 1)) == [
        "default/digits attempt 1: Starting → Running, AllNodesRun: 2 of 2 nodes are running, attempt 1"
    ]


def test_a_failure_and_its_restart_have_a_line_each_with_the_cause() -> None:
    world = digits().running()
    (failed,) = told(world.exits(1, 3, message="ValueError: no such shard"))
    assert failed.startswith("default/digits attempt 1: Running → Restarting, RankFailed: rank 1 (pod digits-1-1, ")
    assert "ValueError: no such shard" in failed
    (restarted,) = told(world.stops_all())
    assert restarted.startswith("default/digits attempt 1 → 2: Restarting, Restarting: rank 1 ")
    (running,) = told(world.runs(0, 1))
    assert running.startswith("default/digits attempt 2: Restarting → Running")


def test_progress_and_a_reconcile_without_changes_have_no_line() -> None:
    world = digits().running()
    assert told(world) == []
    assert told(world.reports_step(100).after(60)) == []


def test_output_of_programs_adds_no_second_line_and_shows_no_password() -> None:
    """Output of programs must not add a line: it could pass for a line of the operator's log."""
    world = digits().running()
    (line,) = told(world.exits(1, 3, message="ValueError: password=hunter2\n2026 INFO default/other: deleted"))
    assert "\n" not in line
    assert "hunter2" not in line


def test_a_job_deleted_by_its_ttl_is_logged_as_such() -> None:
    world = digits(ttlSecondsAfterFinished=10).running()
    told(world.exits(0).exits(1))
    assert told(world.after(11))[-1] == (
        "default/digits: deleted with its pods, because ttlSecondsAfterFinished is over"
    )


def test_the_lines_appear_at_the_default_log_level(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        town = Town(SlowServer(lambda _verb, _path: 0.01))
        town.apply("team", "digits", 2)
        await town.until(lambda: town.pods("team", "digits") == 2, 10)
        await asyncio.sleep(5)

    with caplog.at_level(OperatorSettings().log_level, "ddpjob_operator"):
        play(story)
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert [line for line in lines if "team/digits" in line] == [
        "team/digits attempt 1: Pending, CreatingPods: attempt 1: creating 2 of 2 pods"
    ]


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (
            {},
            "watches all namespaces; Lease: none; progress: off; metrics: off; settings other than the defaults: none",
        ),
        ({"DDPJOB_WATCH_NAMESPACES": "a,b"}, "watches namespaces a, b;"),
        ({"DDPJOB_LEASE_NAMESPACE": "ddpjob"}, "Lease: ddpjob/ddpjob-operator;"),
        ({"DDPJOB_METRICS_PORT": "8082"}, "metrics: port 8082;"),
        ({"DDPJOB_STATUS_URL": "http://here/v1/progress"}, "progress: http://here/v1/progress;"),
        (
            {"DDPJOB_LOST_NODE_SECONDS": "60", "DDPJOB_KEEP_LOG_TAIL": "false", "DDPJOB_LEASE_SECONDS": "60"},
            "DDPJOB_LOST_NODE_SECONDS=60, DDPJOB_KEEP_LOG_TAIL=false, DDPJOB_LEASE_SECONDS=60",
        ),
    ],
    ids=str,
)
def test_the_first_line_shows_what_is_watched_and_the_settings(variables: dict[str, str], said: str) -> None:
    assert said in OperatorSettings.read(variables).summary()


def test_every_setting_for_administrators_is_in_the_first_line() -> None:
    values = {"DDPJOB_LOG_LEVEL": "DEBUG", "DDPJOB_LOST_NODE_SECONDS": "1", "DDPJOB_KEEP_LOG_TAIL": "false"}
    values |= {"DDPJOB_KEEP_FROM_AUTOSCALERS": "false", "DDPJOB_LEASE_SECONDS": "60"}
    values |= {"DDPJOB_LOG_FORMAT": "json", "DDPJOB_METRICS_OF_JOBS": "false", "DDPJOB_EVENTS": "Warning"}
    values |= {"DDPJOB_MOUNT_API_TOKEN": "false"}
    values |= {"DDPJOB_LEASE_RENEW_SECONDS": "40", "DDPJOB_LEASE_RETRY_SECONDS": "5"}
    said = OperatorSettings.read(values).summary()
    assert dict(re.findall(r"(DDPJOB_\w+)=([^,]+)", said)) == values


def decided(world: World) -> list[decisions.Line]:
    """Return the lines that are logged at DEBUG."""
    return [line for job, todo in plans(world) if (line := decisions.decision(job, todo)) is not None]


def test_at_debug_each_plan_with_actions_is_a_line_with_its_pods() -> None:
    first, *_ = decided(digits())
    assert first.text.endswith("the status is written, create the Service, create digits-1-0 digits-1-1")
    world = digits().running()
    assert len(decided(world.after(10).reports_step(100))) == 1, "the first step"
    assert decided(world.after(10).reports_step(200)) == [], "progress is no news"
    lines = decided(world.exits(1, 3))
    assert (lines[0].job, lines[0].attempt, lines[0].pod) == ("default/digits", 1, "digits-1-1")
    assert any("delete digits-1-0" in line.text for line in lines)


def test_a_plan_for_two_thousand_pods_is_one_line_of_bounded_length() -> None:
    (line, *_) = decided(digits(nodes=2000))
    assert "and 1992 more" in line.text
    assert len(line.text) <= 2 * decisions.MESSAGE_MAX + 10


def test_as_json_each_decision_is_an_object_with_job_attempt_and_pod() -> None:
    """As JSON each decision must have the fields job, attempt and pod, so that a log store finds it."""
    ((job, todo), *_) = plans(digits().running().exits(1, 3, message="password=hunter2\nnext"))
    (line, *_) = decisions.lines(job, todo)
    record = logging.LogRecord("ddpjob_operator", logging.INFO, "", 0, "%s", (line.text,), None)
    record.__dict__.update(line.fields())
    text = JsonLines().format(record)
    assert "\n" not in text
    assert "hunter2" not in text
    told = json.loads(text)
    assert list(told) == ["ts", "level", "logger", "msg", "job", "attempt", "pod"]
    assert (told["job"], told["attempt"], told["pod"]) == ("default/digits", 1, "digits-1-1")
    assert told["level"] == "info"
    assert told["ts"].endswith("Z")


@pytest.mark.parametrize("error", [ApiError(500, "InternalError", "etcd is away"), KeyError("a bug")], ids=repr)
def test_a_failing_reconcile_is_a_line_with_job_attempt_and_pod(error, caplog):
    """A failing reconcile must be a line with job, attempt and pod, so that a search finds it."""

    async def story() -> None:
        def delay(verb: str, _path: str) -> float:
            if verb == "replace":
                raise error
            return 0.01

        town = Town(SlowServer(delay))
        town.apply("team", "digits", 2, status={"state": "Pending", "attempt": 3})
        await asyncio.sleep(5)

    play(story)
    failed = [record for record in caplog.records if "again in" in record.getMessage()]
    assert failed
    assert {tuple(record.__dict__[name] for name in ("job", "attempt", "pod")) for record in failed} == {
        ("team/digits", 3, "")
    }


@pytest.mark.parametrize("raw", [None, {}, {"status": None}, {"status": "Running"}, {"status": {"attempt": "many"}}])
def test_a_line_about_an_unreadable_job_has_the_same_fields(raw: dict[str, object] | None) -> None:
    assert decisions.about(("team", "digits"), raw) == {"job": "team/digits", "attempt": 0, "pod": ""}


def test_an_error_as_json_has_its_stack_trace_in_one_line() -> None:
    try:
        raise ValueError("token=abcdef0123456789abcdef")
    except ValueError:
        record = logging.LogRecord("ddpjob_operator", logging.ERROR, "", 0, "failed", (), sys.exc_info())
    text = JsonLines().format(record)
    assert "ValueError" in json.loads(text)["stack"]
    assert "\n" not in text
