"""One Event per fact, with correct text: users read Events first, and often nothing else."""

import pytest
from msgspec.structs import replace
from worlds import START, digits

from ddpjob_core import rules
from ddpjob_operator.failures import root_cause, sentences
from ddpjob_operator.failures.sentences import shortened
from ddpjob_operator.job import api

KNOWN = ("NodeLost", "Evicted", "SupervisorLost", rules.POD_DEADLINE, root_cause.CONFIG_ERROR, root_cause.STOPPED)

GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.5]:7"


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_failure_of_all_ranks_causes_one_warning(nodes: int) -> None:
    """A failure of all ranks must cause one Event: RankFailed and Restarting would have the same text."""
    world = digits(nodes=nodes).running()
    before = len(world.events)
    for rank in range(nodes):
        world.exits(rank, code=3, message="ValueError: no such shard")
    world.settle()
    (sent,) = [e for e in world.events[before:] if "no such shard" in e.message]
    assert (sent.type, sent.reason) == ("Warning", "Restarting")
    assert "waiting for the other ranks before deciding the cause" not in sent.message


def test_a_failure_of_one_of_several_ranks_is_reported_at_once_and_its_restart_adds_no_warning() -> None:
    world = digits().running().exits(1, code=3).restarted()
    sent = [(e.type, e.reason) for e in world.events if e.reason in ("RankFailed", "Restarting")]
    assert sent == [("Warning", "RankFailed"), ("Normal", "Restarting")]


def test_a_failure_that_ends_a_job_of_one_node_causes_one_event() -> None:
    world = digits(nodes=1, backoffLimit=0).running()
    before = len(world.events)
    world.exits(0, code=1).settle()
    assert [e.reason for e in world.events[before:]] == ["BackoffLimitExceeded"]
    assert world.status.message.endswith("; backoffLimit: 0 allows no restart")


@pytest.mark.parametrize("reports", [True, False])
def test_trained_steps_count_for_an_attempt_even_if_none_of_them_remain(reports: bool) -> None:
    """Trained steps must count even if a restart repeats all of them. Otherwise a failed start may end the job."""
    world = digits(nodes=1).running()
    if reports:
        world.reports_step(1).settle()
    world.after(80).exits(0, code=1).settle()
    assert world.status.attempt == 2
    assert world.status.goodput is not None
    spent = world.status.goodput
    assert (spent.productive_seconds, spent.unreported_seconds) == ((80, 0) if reports else (0, 80))


def test_failures_in_a_row_exclude_uncharged_ones() -> None:
    """Failures in a row must not include uncharged ones: three failures and two preemptions are not "5 failures"."""
    world = digits(nodes=1, backoffLimit=9).running().reports_step(5).settle()
    world.exits(0, code=1).settle()
    for code in (143, 143, 1, 1, 1):
        world.after(400).settle()
        world.runs(0).settle().exits(0, code=code).settle()
    assert world.status.reason == "NoProgress"
    assert "; 3 charged failures in a row without a new step" in world.status.message


@pytest.mark.parametrize("reason", [*root_cause.DISRUPTIONS, *sorted(rules.LOST_CONTAINER), *KNOWN])
def test_the_restarting_message_gives_the_reason_of_the_restart_in_words(reason: str) -> None:
    """The message must name the reason in words: `after DeletionByPodGC on rank 0` does not mention a taint."""
    failure = api.JobFailure(attempt=1, rank=0, node_rank=0, pod="a-1-0", node="n1", reason=reason, time=START)
    failure = replace(failure, exit_code=137, signal="SIGKILL")
    assert reason not in sentences.short(failure)
    assert "SIGKILL" not in sentences.short(failure)


def test_a_pod_that_was_collected_with_its_node_is_a_lost_node() -> None:
    world = digits().running()
    gone = {"phase": "Failed", "disruption": "DeletionByPodGC", "reason": "", "node": "node-1"}
    world._change(1, **gone).settle()
    assert world.status.reason == "NodeLost"
    world.restarted()
    assert world.status.message.startswith("after node node-1 lost: ")


def test_a_passed_deadline_causes_one_event() -> None:
    world = digits(activeDeadlineSeconds=60).running().after(60).settle().stops_all().settle()
    assert world.status.state == "Failed"
    assert [event.reason for event in world.events].count("DeadlineExceeded") == 1


@pytest.mark.parametrize(("run", "words"), [((1,), "waiting for nodes 0, 2"), ((0, 1), "waiting for node 2")])
def test_the_message_uses_the_plural_for_several_nodes(run: tuple[int, ...], words: str) -> None:
    world = digits(nodes=3).started().runs(*run).settle()
    assert world.status.message == f"{len(run)} of 3 nodes are running; {words}"


@pytest.mark.parametrize(
    ("text", "short"),
    [
        (f"RuntimeError: {GLOO}", "RuntimeError: Connection closed by peer [10.0.0.5]:7"),
        ("lost its peers (x. GLHF! 🏖️); restarting all 2 nodes", "lost its peers (x.); restarting all 2 nodes"),
        ("FileNotFoundError: [Errno 2] '/data/a/b.pt'", "FileNotFoundError: [Errno 2] '/data/a/b.pt'"),
        ("ValueError: bad entry [1:2] in /x/y.cc:5", "ValueError: bad entry [1:2] in /x/y.cc:5"),
    ],
)
def test_an_event_omits_the_path_where_torch_was_built(text: str, short: str) -> None:
    assert shortened(text) == short


def test_the_status_keeps_every_word_that_an_event_omits() -> None:
    world = digits(nodes=1).running().exits(0, code=3, message=f"ValueError: {GLOO}").settle()
    assert GLOO in world.status.last_failure.exception
    shown = [world.status.message, world.status.failures[-1].message, *(e.message for e in world.events)]
    assert "pair.cc" not in "".join(shown)
