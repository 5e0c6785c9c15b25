"""Files, lines and answers of any form yield their content or the documented error, in bounded time and memory."""

import contextlib
import json
import socket
import time
from typing import Any

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st
from worlds import START, manifest

from ddpjob_operator.job import api, validation
from ddpjob_operator.kube.api import bounded_json
from ddpjob_operator.observed import kubeflow
from ddpjob_operator.observed.cluster import Observed
from ddpjob_operator.observed.reports import BadReportError, read_report
from ddpjob_operator.plan.plan import plan
from ddprun.wire import Link, Refused

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12)
ANY: Any = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
STATUS = st.sampled_from([field.encode_name for field in msgspec.structs.fields(api.Status)])


@given(st.dictionaries(STATUS, ANY, max_size=4))
@example({"attempt": 2**62})
@example({"attempt": 1, "startTime": "9999-12-31T23:59:59Z", "state": "Running"})
@example({"attempt": 1, "attemptTime": "2031-03-05T07:11:13", "state": "Starting"})
@example({"startedNodes": ",".join(f"{n}00000-{n}99998" for n in range(1, 2000)), "attempt": 1, "state": "Running"})
def test_a_job_with_any_status_is_planned_or_left_alone(status: dict[str, Any]) -> None:
    raw = bounded_json.job(
        json.loads(json.dumps(manifest(activeDeadlineSeconds=10, startDeadlineSeconds=10))) | {"status": status}
    )
    job, problems = validation.parse(raw)
    begun = time.process_time()
    todo = plan(job, Observed(service=True, nodes={}), START, problems=problems)
    assert time.process_time() - begun < 1.0
    if todo.status is not None:
        msgspec.json.encode(todo.status)


REPORT = st.dictionaries(
    st.sampled_from(
        "step totalSteps etaSeconds samplesPerSecond worldSize rank metrics resumedFrom limitNeeded x".split()
    ),
    SCALARS | st.dictionaries(st.text(max_size=70), SCALARS, max_size=20),
)


@given(
    st.binary(max_size=200)
    | REPORT.map(lambda fields: json.dumps(fields).encode())
    | ANY.map(lambda value: json.dumps({"trainerStatus": value, "step": value}).encode())
)
@example(b'{"trainerStatus": ' + b"[" * 5000)
@example(b"[" * 8000)
@example(b'{"step": 1, "metrics": {"a": "\\ud800"}}')
@example(b'{"step": 1, "metrics": {"a": "\xff"}}')
@example(b'{"step": -1}')
@example(b'{"step": 1, "samplesPerSecond": 1e300}')
def test_any_report_is_read_within_bounds_in_both_protocols_or_refused(body: bytes) -> None:
    with contextlib.suppress(BadReportError):
        report = read_report(body, START)
        assert 0 <= report.step < 2**53
        assert len(report.metrics) <= 16
    with contextlib.suppress(BadReportError):
        kubeflow.read_body(body, START, None)


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
