"""There is one root cause of bounded size, whatever pods report at their end and in whatever order."""

import datetime as dt
import json
from typing import Any, get_args

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st
from worlds import START

from ddpjob_core import rules
from ddpjob_core.members import Members
from ddpjob_operator.failures import log_lines, root_cause, sentences, termination_message
from ddpjob_operator.failures.redaction import mask
from ddpjob_operator.job import api
from ddpjob_operator.observed.cluster import Container, Pod

LINES = [
    "Traceback (most recent call last):",
    "ValueError: no such shard",
    "[rank1]: RuntimeError: [gloo/x] Connection closed by peer",
    "During handling of the above exception, another exception occurred:",
    "Failures:",
    "Root Cause (first observed failure):",
    "[0]:",
    "  rank      : 3 (local_rank: 1)",
    "  exitcode  : -9 (pid: 7)",
    "  traceback : Traceback (most recent call last):",
    "  | ExceptionGroup: x (1 sub-exception)",
    "====================",
    "password=hunter2",
    "terminate called after throwing an instance of 'x'",
    "  what():  y",
    "ncclSystemError: z",
    "torch.distributed.elastic.SignalException: Process 7 got signal: 15",
]
logs = st.lists(st.sampled_from(LINES) | st.text(max_size=30), max_size=20).map("\n".join)
values: Any = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
names = st.sampled_from("rank exitCode signal exception step time resumable symptom traceback x".split())
messages = st.dictionaries(names, values, max_size=6).map(lambda d: json.dumps({"ddpjob": 1, **d}))
texts = logs | messages | st.text(st.characters(), max_size=60) | st.builds(str.__add__, messages, logs)
times = st.none() | st.integers(-5, 60).map(lambda s: START + dt.timedelta(seconds=s))
words = st.sampled_from(["", "Error", "OOMKilled", "StartError", "Completed", "Unknown"])
pod_words = st.sampled_from(["", "Evicted", "NodeLost", "UnexpectedAdmissionError"])
codes = st.none() | st.sampled_from([0, 1, 3, 75, 126, 127, 128, 134, 137, 139, 143, 255])
pods = st.builds(
    Pod,
    name=st.sampled_from(["a-1-0", "a-1-1", "a-1-2"]),
    uid=st.text(max_size=2),
    owner_uid=st.just("job"),
    attempt=st.just(1),
    place=st.integers(0, 3),
    reason=pod_words,
    message=st.text(max_size=10),
    disruption=st.sampled_from(["", "PreemptionByScheduler", "Other"]),
    deletion_requested_at=times,
    trainer=st.builds(
        Container, st.just("ended"), reason=words, message=texts, exit_code=codes, ended_at=times
    ),
)  # fmt: skip
firsts = st.builds(
    api.JobFailure,
    attempt=st.just(1),
    node_rank=st.integers(0, 3),
    pod=st.sampled_from(["a-1-0", "a-1-1", "a-1-9"]),
    reason=st.sampled_from(
        ["", "Error", "Stalled", "NodeLost", "PodGone", "StoppedFromOutside", "PeerLost", "Resumable", "OOMKilled",
         "PreemptionByScheduler", "Other", "CreateContainerConfigError", "Evicted"]
    ),
    exit_code=codes,
    exception=st.sampled_from(["", "ValueError: x", "RuntimeError: Connection closed by peer", "ImportError: y"]),
    time=times.filter(bool),
)  # fmt: skip
NOW = START + dt.timedelta(seconds=90)


CONTEXT = root_cause.Context(1, Members(range(9)), lambda place: place or None, NOW)


@given(firsts, st.lists(pods, max_size=4), st.booleans(), st.none() | st.integers(1, 4))
def test_any_end_of_an_attempt_has_a_cause_and_a_class(first, ended, stepped, nodes):
    failure, found = root_cause.settle(CONTEXT, first, ended, stepped=stepped, nodes=nodes)
    assert found in get_args(rules.Class)
    assert failure.failure_class == first.failure_class, "the class is given once failurePolicy has been applied"
    assert len(failure.log_tail.encode()) <= log_lines.TAIL_MAX
    assert len(failure.exception) <= root_cause.EXCEPTION_MAX
    assert msgspec.json.decode(msgspec.json.encode(failure), type=api.JobFailure) == failure, "the server takes it"
    assert sentences.sentence(failure).startswith(("rank ", "node "))
    assert sentences.short(failure)
    assert not (root_cause.blames_node(failure) and found != "infrastructure")


@given(firsts, st.lists(pods, max_size=4), st.randoms(use_true_random=False))
def test_the_cause_does_not_depend_on_the_order_of_the_pods(first, ended, random):
    distinct = list({p.place: p for p in ended}.values())
    shuffled = random.sample(distinct, len(distinct))
    a, b = (root_cause.settle(CONTEXT, first, some, stepped=False) for some in (distinct, shuffled))
    assert a == b


@given(firsts, st.lists(pods, max_size=4), st.integers(1, 4))
def test_a_recorded_cause_is_charged_equally_after_its_pods_are_gone(first, ended, nodes):
    failure, found = root_cause.settle(CONTEXT, first, ended, stepped=True, nodes=nodes)
    assert root_cause.settle(CONTEXT, failure, [], stepped=True, nodes=nodes) == (failure, found)


@given(st.lists(pods, min_size=1, max_size=4))
def test_the_first_sign_of_a_failure_is_from_one_of_the_pods(ended: list[Pod]) -> None:
    failure = root_cause.root_cause(CONTEXT, ended)
    assert failure.pod in {p.name for p in ended}


@given(st.text(st.characters(), max_size=300) | texts)
def test_any_text_is_accepted_as_a_termination_message(text: str) -> None:
    report = termination_message.read(text)
    report.log.encode()
    assert report.failure.exit_code is None or 0 < report.failure.exit_code <= 255 or report.failure.exit_code > 128
    assert "\x1b" not in report.log + report.failure.exception


secrets = st.sampled_from(
    ["password=", "token: ", "Bearer ", "api_key='", "://a:b@", "https://", "hf_", "-----BEGIN PRIVATE KEY-----",
     "-----END PRIVATE KEY-----", "AKIAIOSFODNN7EXAMPLE", "abcdefgh12345678", "abcdefghijklmnopqrstuvwxyz", "eyJ", "\n",
     " ", '"', "'", "=", "@", "***", "--secret "]
)  # fmt: skip


@given(st.lists(secrets | st.text(max_size=8), max_size=12).map("".join))
@example("password=" + "x" * 5000)
@example("token=abcdefgh12345678***")
@example("https://https://://a:b@")
@example("https://" * 6 + "://a:b@")
def test_masking_twice_equals_masking_once(text: str) -> None:
    assert mask(mask(text)) == mask(text)


@given(st.lists(secrets | st.text(max_size=80), max_size=40).map("".join), st.integers(0, 3000))
def test_a_log_tail_is_never_longer_than_its_limit(text: str, more: int) -> None:
    assert len(log_lines.tail(text + "é" * more).encode()) <= log_lines.TAIL_MAX
