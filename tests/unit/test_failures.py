"""Ranks, agents and operator write and read the same Failure, whose size is bounded."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpjob_core import failures, rules
from ddpjob_core.failures import Failure, Precedence, root_cause
from ddpjob_operator.failures import termination_message

CRASH = Failure(3, exit_code=139, signal="SIGSEGV", step=41, time=1796000000.5)
FULL = Failure(
    3, 1, 1, "SIGSEGV", "ValueError: x", 41, 1796000000.5, True, True, True, True, True, True, True, (1, 2), "trace",
    "application", "stall", waited_in=40,
)  # fmt: skip


@pytest.mark.parametrize("failure", [Failure(), CRASH, FULL, Failure(0, exit_code=0, early=True)], ids=str)
def test_a_written_failure_is_read_back_completely(failure: Failure) -> None:
    assert Failure.from_dict(json.loads(json.dumps(failure.as_dict()))) == failure


def test_every_field_has_a_key_except_those_that_only_kubernetes_knows() -> None:
    of_pod = {"container_reason", "pod_reason", "pod_message", "disruption", "deletion_requested"}
    assert {name for name, _ in failures._KEYS.values()} == set(Failure._fields) - of_pod


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rank", -1), ("rank", True), ("rank", 2**31), ("rank", "3"), ("nodeRank", 1.0), ("exitCode", 256),
        ("exitCode", -65), ("step", float("inf")), ("step", 2**53), ("time", float("nan")), ("time", -1),
        ("exception", ["x"]), ("signal", 9), ("symptom", 1), ("resumable", "yes"), ("badNodes", 1),
        ("badNodes", [True]), ("badNodes", list(range(65))), ("class", {}),
    ],
)  # fmt: skip
def test_a_failure_with_an_invalid_value_is_refused_by_its_key(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=key):
        Failure.from_dict({"rank": 1, key: value})


@given(st.none() | st.integers() | st.lists(st.integers()) | st.dictionaries(st.sampled_from(sorted(failures._KEYS)),
       st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers())))  # fmt: skip
def test_any_written_failure_is_read_within_bounds_or_refused(written: Any) -> None:
    try:
        failure = Failure.from_dict(written)
    except ValueError:
        return
    assert len(json.dumps(failure.brief().as_dict())) < 8192
    assert isinstance(failure.precedence, Precedence)
    assert rules.classify(failure)


def test_long_texts_are_cut() -> None:
    failure = Failure.from_dict({"exception": "x" * 10_000, "signal": "y" * 100})
    assert (len(failure.exception), len(failure.signal)) == (failures.EXCEPTION_MAX, 16)
    assert len(failure.brief().exception) == failures.BRIEF_MAX


def test_a_long_message_is_cut_between_words_and_keeps_its_last_sentence() -> None:
    text = "RuntimeError: " + "a long explanation of how this came about " * 12 + "is there. The parameters are 4 and 5"
    short = failures.abridged(text, failures.BRIEF_MAX)
    assert short.startswith("RuntimeError: a long explanation")
    assert short.endswith(" … The parameters are 4 and 5")
    assert len(short) <= failures.BRIEF_MAX
    assert failures.abridged("word " * 100, 300).endswith("word …")
    assert failures.abridged(short, failures.BRIEF_MAX) == short


@given(st.text("ab .;", max_size=900))
def test_cutting_a_text_twice_equals_cutting_it_once(text: str) -> None:
    """A text that is cut again must stay the same, so that an exception has one text in reports and logs."""
    once = failures.abridged(text, failures.BRIEF_MAX)
    assert failures.abridged(failures.abridged(text, failures.EXCEPTION_MAX), failures.BRIEF_MAX) == once


UNUSED = (
    "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. This error "
    "indicates that your module has parameters that were not used in producing loss. You can enable unused parameter "
    "detection by passing the keyword argument `find_unused_parameters=True` to `DistributedDataParallel`, and by \n"
    "making sure all `forward` function outputs participate in calculating loss. \n"
    "Parameter indices which did not receive grad for rank 0: 4 5\n"
    " In addition, you can set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL"
)


def test_the_ddp_error_about_unused_parameters_names_them() -> None:
    """The text must name the unused parameters, which follow 700 characters of torch's advice."""
    said = (
        "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. "
        "Parameter indices which did not receive grad for rank 0: 4 5"
    )
    assert failures.first_line(UNUSED) == said
    trace = 'Traceback (most recent call last):\n  File "/app/train.py", line 12, in <module>\n'
    log = "".join(f"[rank0]: {line}\n" for line in (trace + UNUSED).splitlines())
    assert termination_message.read(log).failure.exception == said


@pytest.mark.parametrize(
    ("failure", "precedence"),
    [
        (Failure(0, exit_code=137, exception=failures.KILLED_BY_KERNEL), "KERNEL"),
        (Failure(1, exit_code=75, resumable=True, bad_nodes=(1,)), "NODE"),
        (CRASH, "OWN"),
        (Failure(0, exit_code=75, stalled=True), "OWN"),
        (Failure(0, exit_code=1), "UNKNOWN"),
        (Failure(0, exit_code=134), "UNKNOWN"),
        (Failure(node_rank=1, vanished=True), "RESUMABLE"),
        (Failure(0, exit_code=75, resumable=True), "RESUMABLE"),
        (Failure(0, exit_code=1, exception="RuntimeError: Connection closed by peer", symptom=True), "SYMPTOM"),
    ],
    ids=str,
)
def test_evidence_of_a_process_decides_its_rank_as_a_cause(failure: Failure, precedence: str) -> None:
    assert failure.precedence.name == precedence


def test_the_cause_among_equal_failures_is_the_first_observed() -> None:
    later, symptom = Failure(0, exit_code=3), Failure(9, symptom=True)
    assert root_cause([symptom, CRASH, later]) is CRASH
    assert root_cause([symptom, later, CRASH]) is later


@pytest.mark.parametrize(
    ("number", "name"),
    [(9, "SIGKILL"), (10, "SIGUSR1"), (34, "SIGRTMIN"), (40, "SIGRTMIN+6"), (33, "SIG33"), (99, "SIG99")],
)
def test_a_signal_has_one_name_even_if_python_has_no_name_for_it(number: int, name: str) -> None:
    """Signal 40 has no name in Python. It must have the same name in an agent and in a local run."""
    assert failures.signal_name(number) == name
