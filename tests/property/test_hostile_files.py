"""Files, lines and answers of any form yield their content or the documented error, in bounded time and memory."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from worlds import START, manifest

from ddpjob_cli.manifest.yamlfile import InputError, read_job
from ddpjob_operator.job import api, validation
from ddpjob_operator.kube.api import reading
from ddpjob_operator.observed import kubeflow
from ddpjob_operator.observed.cluster import Observed
from ddpjob_operator.observed.reports import BadReportError, read_report
from ddpjob_operator.plan.plan import plan
from ddprun.wire import Link, Refused

FAST = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12)
ANY: Any = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
SPEC = st.sampled_from([field.encode_name for field in msgspec.structs.fields(api.Spec)])
STATUS = st.sampled_from([field.encode_name for field in msgspec.structs.fields(api.Status)])
YAML = st.lists(
    st.sampled_from(
        "kind: DDPJob\n|spec:\n|  nodes: |- |&a |*a|<<: |!!python/object:os.system |{|}|[|]|\n|? |%YAML 9.9\n|---\n|"
        "\t|\x00|0x|1e999|2031-99-99".split("|")
    )
    | st.text(max_size=6),
    max_size=25,
).map("".join)


@FAST
@given(st.binary(max_size=60) | YAML.map(lambda text: text.encode("utf-8", "replace")))
@example(b"a: &a [*a]")
@example(b"[" * 5000)
@example(b"kind: DDPJob\nspec: " + b"{a: " * 500 + b"1" + b"}" * 500)
def test_any_file_is_a_job_or_an_error_that_names_the_file(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "job.yaml"
    file.write_bytes(content)
    try:
        document = read_job(str(file))
    except InputError as error:
        told = str(error)
    else:
        _, problems = validation.parse(document.data)
        told = str(document.error(problems)) if problems else str(file)
    assert str(file) in told


@FAST
@given(st.dictionaries(SPEC, ANY, max_size=4))
def test_any_fields_of_a_spec_are_read_or_named(tmp_path: Path, fields: dict[str, Any]) -> None:
    body = manifest()
    body["spec"] |= fields
    job, problems = validation.parse(body)
    for problem in problems:
        assert str(problem).startswith("spec")
    plan(job, Observed(service=True, nodes={}), START, problems=problems)


@FAST
@given(st.dictionaries(STATUS, ANY, max_size=4))
@example({"attempt": 2**62})
@example({"attempt": 1, "startTime": "9999-12-31T23:59:59Z", "state": "Running"})
@example({"attempt": 1, "attemptTime": "2031-03-05T07:11:13", "state": "Starting"})
@example({"startedNodes": ",".join(f"{n}00000-{n}99998" for n in range(1, 2000)), "attempt": 1, "state": "Running"})
def test_a_job_with_any_status_is_planned_or_left_alone(status: dict[str, Any]) -> None:
    raw = reading.job(
        json.loads(json.dumps(manifest(activeDeadlineSeconds=10, startDeadlineSeconds=10))) | {"status": status}
    )
    job, problems = validation.parse(raw)
    begun = time.process_time()
    todo = plan(job, Observed(service=True, nodes={}), START, problems=problems)
    assert time.process_time() - begun < 1.0
    if todo.status is not None:
        msgspec.json.encode(todo.status)


@FAST
@given(st.binary(max_size=200) | ANY.map(lambda value: json.dumps({"trainerStatus": value, "step": value}).encode()))
@example(b'{"trainerStatus": ' + b"[" * 5000)
@example(b'{"step": 1, "metrics": {"a": "\\ud800"}}')
def test_any_report_is_read_in_both_protocols_or_refused(body: bytes) -> None:
    with contextlib.suppress(BadReportError):
        read_report(body, START)
    with contextlib.suppress(BadReportError):
        kubeflow.read_body(body, START, None)


@FAST
@given(st.binary(max_size=300) | ANY.map(lambda value: json.dumps(value).encode()))
@example(b'{"ddprun": 1, "nonce": "x"}\n' + b"[" * 5000 + b"\n")
@example(b'{"ddprun": 1, "nonce": ' + b"9" * 900 + b"}\n")
@example(b'{"ddprun": 1, "nonce": "\\ud800"}\n')
@example(b'x {"node": 1, "nonce": "\\ud800"}\n')
@example(b'x {"node": ' + b"9" * 900 + b', "nonce": ""}\n')
def test_any_line_between_agents_is_read_or_refused(data: bytes) -> None:
    for node in (None, 1):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            link = Link(ours, b"key", node=node)
            theirs.sendall(data + b"\n")
            theirs.shutdown(socket.SHUT_WR)
            with contextlib.suppress(Refused):
                for _ in range(5):
                    link.receive()


@pytest.mark.parametrize("depth", [10, 20, 30])
def test_multiplying_aliases_are_refused_at_once(tmp_path: Path, depth: int) -> None:
    """A file whose aliases expand to 10^9 values must be refused within milliseconds."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, depth)]
    file = tmp_path / "bomb.yaml"
    file.write_text("kind: DDPJob\nspec:\n" + "".join(f"  {line}\n" for line in lines))
    begun = time.process_time()
    with contextlib.suppress(InputError):
        validation.parse(read_job(str(file)).data)
    assert time.process_time() - begun < 5.0
