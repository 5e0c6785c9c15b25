r"""Text from programs, kubelets and attackers reaches a status, an Event or a terminal without control characters and
credentials. Otherwise a termination message with `\u001b[2J` could clear a reader's screen and write its own "State:
Succeeded", and a status could show passwords."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from worlds import START, World, digits, job

from ddpjob_cli.describe.progress import metric_parts
from ddpjob_cli.local.shown.screen import PlainScreen
from ddpjob_core.failures import Failure
from ddpjob_operator.failures import termination_message
from ddpjob_operator.failures.redaction import clean
from ddpjob_operator.job import api
from ddpjob_operator.observed.cluster import Refusal
from ddpjob_operator.observed.reports import AgentCounts, AgentReport, Report, read_report
from ddpjob_operator.plan.actions import Event
from ddpjob_operator.pods import naming

EVIL = "\x1b[2J\x1b[1;1H\x1b]0;owned\x07 State: Succeeded\u202e\nState: Succeeded hf_abcdefghijklmnopqrstuvwxyz"
PIECES = st.lists(
    st.sampled_from(["\x1b[2J", "\x1b]0;x\x07", "\x9b1m", "\u202e", "\n", "password=hunter22", "\\u001b[2J", "\ud800"])
    | st.text(max_size=8),
    max_size=12,
).map("".join)


def texts(value: Any) -> Iterator[str]:
    """Yield all strings in a document."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield key
            yield from texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from texts(one)


def is_clean(world: World) -> None:
    status = msgspec.to_builtins(world.job.status)
    for text in (*texts(status), *(event.message for event in world.events)):
        assert clean(text) == text
        assert "hunter22" not in text
        assert "hf_abc" not in text
        text.encode()


def ways(text: str) -> Iterator[World]:
    """Yield a world for each way by which outside text gets into a status."""
    yield digits().running().exits(0, 1, message=text)
    yield digits().running().exits(0, 1, message=json.dumps({"ddpjob": 1, "rank": 0, "exitCode": 1, "exception": text}))
    yield digits().running().exits(0, 1, message=json.dumps({"ddpjob": 1, "traceback": text}) + "\n" + text)
    yield digits().running().exits(0, 128, reason="StartError", message=text)
    yield digits().running().exits(1, 1, reason=text[:50], message="x")
    waiting = digits().settle()
    waiting.refusals = [Refusal("Pod", "digits-1-0", text, START)]
    yield waiting
    told = digits().running()
    report = Report(step=4, attempt=1, metrics={text[:60]: text[:60]}, received_at=told.now)
    told.reports = {0: report}
    yield told
    agents = World(job(container={"command": ["ddprun", "train.py"]})).running()
    failure = Failure(
        rank=0,
        node_rank=0,
        exception=text[:300],
        signal=text[:16],
        failure_class="application",
        charged_to="application",
    )
    agents.agent = AgentReport(restarts=AgentCounts(application=1), failures=[failure])
    yield agents


@settings(max_examples=settings.default.max_examples // 4)
@given(PIECES)
def test_no_status_and_no_event_contains_terminal_control_characters(text: str) -> None:
    for world in ways(text):
        for _ in range(4):
            world.step()
        is_clean(world)


def test_the_tested_paths_do_show_the_text() -> None:
    shown = 0
    for world in ways(EVIL):
        for _ in range(4):
            world.step()
        is_clean(world)
        shown += "State: Succeeded" in json.dumps(msgspec.to_builtins(world.job.status))
    assert shown >= 6, "else this file proves nothing"


def test_an_escape_sequence_decoded_from_json_is_removed() -> None:
    report = termination_message.read(json.dumps({"ddpjob": 1, "exitCode": 1, "exception": EVIL, "traceback": EVIL}))
    assert "\x1b" not in report.failure.exception + report.log


def test_a_shown_status_is_stable() -> None:
    """Showing a shown status must not change it, or the operator writes it again at each reconcile."""
    world = digits().running().exits(0, 1, message=f"ValueError: {EVIL}")
    world.settle()
    assert world.plan().status is None


def test_names_for_machines_stay_unchanged() -> None:
    """A job's name must not be masked although it looks like a credential, because tools find the job by its name."""
    world = World(job("sk-abcdefghijklmnopqrstuvwxyz")).running().exits(0, 1, message="x")
    world.settle()
    status = world.job.status
    assert status.selector == naming.selector(world.job)
    assert status.last_failure.pod == "sk-abcdefghijklmnopqrstuvwxyz-1-0"


def test_metrics_are_clean_when_a_local_run_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    world = digits().running()
    report = read_report(json.dumps({"step": 1, "metrics": {"loss": "\x1b[2J0.4\n1"}}).encode(), world.now)
    world.reports = {0: replace(report, attempt=1)}
    world.step()
    progress = world.job.status.progress
    assert progress is not None
    assert metric_parts(progress) == ["loss 0.4 1"]


def test_messages_of_the_local_run_are_clean(capsys: pytest.CaptureFixture[str]) -> None:
    screen = PlainScreen(digits().job)
    screen.note(f"trainer.yaml: {EVIL}")
    screen.event(Event("Warning", "RankFailed", EVIL))
    told = capsys.readouterr().err
    assert "\x1b" not in told
    assert "\u202e" not in told


def test_the_log_of_a_failure_keeps_its_lines() -> None:
    world = digits().running().exits(0, 1, message="one\n\x1b[31mtwo\x1b[0m\nValueError: no shard")
    world.settle()
    failure = world.job.status.last_failure or api.JobFailure(attempt=0, node_rank=0, time=START)
    assert failure.log_tail == "one\ntwo\nValueError: no shard"
