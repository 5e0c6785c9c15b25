"""The cause is the failure that explains the others. One sentence names it, and it counts against the right budget."""

import datetime as dt
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from worlds import START

from ddpjob_core import failure_policy, rules
from ddpjob_core.members import Members
from ddpjob_operator.failures import log_lines, root_cause, sentences
from ddpjob_operator.job import api
from ddpjob_operator.observed.cluster import Container, Pod

DATA = Path(__file__).parent / "data/logs"
SHARD = "Traceback (most recent call last):\n  ...\nValueError: no such shard: 7\n"
PEER = "RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:4242"


def at(seconds: float) -> dt.datetime:
    return START + dt.timedelta(seconds=seconds)


CONTEXT = root_cause.Context(1, Members(range(9)), int, at(60))


def pod(rank: int, code: int | None = 1, said: str = "", seconds: float = 10, **more: Any) -> Pod:
    """Return a pod that ended `seconds` after the start. The kubelet's times are whole seconds."""
    word = more.pop("word", "Completed" if code == 0 else "Error")
    ended = Container("ended", word, said, False, code, at(seconds).replace(microsecond=0))
    about = {"job": "bert", "node": f"gpu-0{rank}", "phase": "Failed"}
    base = Pod(f"bert-1-{rank}", f"uid-{rank}", "job", 1, rank, **about, trainer=ended)
    return msgspec.structs.replace(base, **more)


def told(what: Pod, seconds: float = 5) -> Pod:
    return msgspec.structs.replace(what, deletion_requested_at=at(seconds))


def library(**fields: Any) -> str:
    return json.dumps({"ddpjob": 1, **fields})


def table(name: str) -> str:
    return (DATA / f"{name}.log").read_text()


def first_sign(*pods: Pod) -> api.JobFailure:
    return root_cause.root_cause(CONTEXT, pods)


def settled(*pods: Pod, first: api.JobFailure | None = None, **more: Any) -> tuple[api.JobFailure, rules.Class]:
    first = first or first_sign(*pods)
    of_context = {key: more.pop(key) for key in ("torchrun", "keep_log_tail") if key in more}
    context = replace(CONTEXT, **of_context)
    return root_cause.settle(context, first, pods, **{"stepped": True, "nodes": 3, **more})


def recorded(rank: int, reason: str, seconds: float = 20, **more: Any) -> api.JobFailure:
    name, node = f"bert-1-{rank}", f"gpu-0{rank}"
    return api.JobFailure(
        attempt=1, rank=rank, node_rank=rank, pod=name, node=node, reason=reason, time=at(seconds), **more
    )


@dataclass(frozen=True)
class Case:
    pods: tuple[Pod, ...]
    cause: int
    """The node's rank."""
    found: rules.Class
    first: api.JobFailure | None = None


CASES = {
    "an exception explains the peer that complained before it, by a clock that is late": Case(
        (pod(0, said=PEER, seconds=8), pod(1, said=SHARD, seconds=11)), 1, "application"
    ),
    "an out-of-memory kill explains an exception that came before it": Case(
        (pod(0, said=SHARD, seconds=2), pod(1, 137, word="OOMKilled", seconds=30)), 1, "outOfMemory"
    ),
    "a node's eviction explains an exception, for what it ended may say anything": Case(
        (pod(0, said=SHARD), pod(1, None, reason="Evicted", message="The node was low on resource: memory.")),
        1,
        "infrastructure",
    ),
    "a pod beyond its own limit of disk is its own fault": Case(
        (
            pod(0, None, reason="Evicted", message="Pod exceeded its local ephemeral storage limit 1Gi"),
            pod(1, said=PEER),
        ),
        0,
        "application",
    ),
    "a preempted pod explains its peers, though it took half a minute to end": Case(
        (pod(0, seconds=6), pod(1, 143, seconds=35, disruption="PreemptionByScheduler", deletion_requested_at=at(5))),
        1,
        "infrastructure",
    ),
    "a pod that was preempted long after a failure does not explain it": Case(
        (pod(0, said=SHARD, seconds=6), pod(1, 143, disruption="PreemptionByScheduler", deletion_requested_at=at(30))),
        0,
        "application",
    ),
    "a pod that someone deleted explains the exit code 1 of a peer a second before, by its node's clock": Case(
        (pod(0, seconds=4), told(pod(1, 143, seconds=5), 5)), 1, "infrastructure"
    ),
    "a pod that someone deleted long after a failure does not explain it": Case(
        (pod(0, 3, seconds=4), told(pod(1, 143, seconds=20), 19)), 0, "application"
    ),
    "a pod that was deleted from outside stays the cause when the operator has stopped the others": Case(
        (told(pod(0, seconds=9), 8), told(pod(1, 0, seconds=6), 5), pod(2, seconds=7)),
        1,
        "infrastructure",
        recorded(1, "StoppedFromOutside", 5.1),
    ),
    "a pod that was deleted seconds before the first sign was told by someone else": Case(
        (pod(0, said="", seconds=10), told(pod(1, 143, seconds=12), 5)), 1, "infrastructure"
    ),
    "what the operator stopped is not the cause of what it was stopped for": Case(
        (pod(0, 3, seconds=4), told(pod(1, 143, seconds=6), 5), told(pod(2, 137, seconds=15), 5)),
        0,
        "application",
        recorded(0, "Error", 4, exit_code=3),
    ),
    "a rank that failed while its torchrun waited for the others is the cause, though told to stop meanwhile": Case(
        (pod(0, said=PEER, seconds=4), told(pod(1, said=table("record"), seconds=30), 5)),
        1,
        "application",
        recorded(0, "Error", 4, exit_code=1, exception=PEER),
    ),
    "a lost node explains its peers, whatever they said and however late it is known": Case(
        (pod(0, said="", seconds=4), pod(2, said=PEER, seconds=5)), 1, "infrastructure", recorded(1, "NodeLost", 50)
    ),
    "a pod that vanished explains its peers": Case(
        (pod(0, said=PEER), pod(2, 1)), 1, "infrastructure", recorded(1, "PodGone")
    ),
    "a container that a restarted node has lost explains its peers": Case(
        (pod(0, said=SHARD), pod(1, 255, word="Unknown", seconds=50)), 1, "infrastructure"
    ),
    "a disruption of a kind that nobody knows yet is one": Case(
        (pod(0, 1),),
        1,
        "infrastructure",
        recorded(1, "PreemptedByQueue", evidence=api.Evidence(precedence="NODE", disruption="PreemptedByQueue")),
    ),
    "only complaints about peers are nobody's fault": Case((pod(0, said=PEER), pod(1, said=PEER)), 0, "infrastructure"),
    "a database that refuses a connection is not a lost peer": Case(
        (pod(0, said="ConnectionRefusedError: [Errno 111] Connection refused"), pod(1, said=PEER)), 0, "application"
    ),
    "an exit code that is not 1 counts before one that is": Case(
        (pod(0, 1, seconds=3), pod(1, 3, seconds=9)), 1, "application"
    ),
    "an abort counts after an exception, for it follows a lost peer as well": Case(
        (pod(0, 134, seconds=3), pod(1, said=SHARD, seconds=9)), 1, "application"
    ),
    "a container that was struck down after one of its ranks had complained is not a symptom": Case(
        (pod(0, said=PEER, seconds=3), pod(1, 139, said=PEER, seconds=9)), 1, "application"
    ),
    "a signal counts as much as an exception": Case(
        (pod(0, 139, seconds=3), pod(1, said=SHARD, seconds=9)), 0, "application"
    ),
    "among equals the earlier, by the library's clock where the kubelet's is too coarse": Case(
        (
            pod(0, said=library(exception="OSError: b", time=at(10.9).timestamp())),
            pod(1, said=library(exception="OSError: a", time=at(10.2).timestamp())),
        ),
        1,
        "application",
    ),
    "among equals in one second the lower rank, so that the order of the pods does not matter": Case(
        (pod(2, 3), pod(1, 3)), 1, "application"
    ),
    "a time that a message makes up is not believed": Case(
        (pod(0, said=library(exception="OSError: b", time=1.0), seconds=9), pod(1, 3, seconds=4)), 1, "application"
    ),
    "ranks that stopped at an agreed step lead to the one that was told": Case(
        (pod(0, 75, said=library(resumable=True, step=41)), told(pod(1, 0, seconds=12), 5)), 1, "infrastructure"
    ),
    "ranks that stopped at an agreed step are no failure, also where nobody is known to have been told": Case(
        (pod(0, 75), pod(1, 1, said=library(resumable=True, step=41))), 0, "infrastructure"
    ),
    "a failure is the cause of a stop at an agreed step": Case((pod(0, 75), pod(1, 139)), 1, "application"),
    "torchrun that was told to stop, on a pod that was not, ended from outside": Case(
        (pod(0, said=table("sigterm-to-torchrun")),), 0, "infrastructure"
    ),
    "a container that one node could not start may start on another": Case(
        (pod(0, 128, word="StartError"),), 0, "infrastructure"
    ),
    "a program that is no longer there in the middle of the training is the script's": Case(
        (pod(0, 127),), 0, "application"
    ),
    "a ConfigMap that is gone after the job has trained may come back": Case(
        (), 1, "infrastructure", recorded(1, "CreateContainerConfigError")
    ),
    "a stall stays one, whatever the ranks say when they are stopped for it": Case(
        (told(pod(0, said=SHARD, seconds=30), 20),), 1, "stall", recorded(1, "Stalled")
    ),
    "a failure whose pod is gone stays as recorded": Case(
        (told(pod(0, 143, seconds=8), 6),), 1, "application", recorded(1, "Error", 5, exit_code=3)
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_cause_is_the_failure_that_explains_the_others(case: Case) -> None:
    failure, found = settled(*case.pods, first=case.first)
    assert (failure.node_rank, found) == (case.cause, case.found), sentences.sentence(failure)
    again = settled(*reversed(case.pods), first=case.first)
    assert again == (failure, found), "the order of the pods changes nothing"


@pytest.mark.parametrize("ahead", [-3600, 3600])
def test_a_failure_on_a_node_whose_clock_is_an_hour_off_gets_a_time_between_the_binding_and_now(ahead: int) -> None:
    """The failure must not seem older than its pod: failures of a node within the last hour make a job avoid it."""
    wrong = pod(1, 3, seconds=10 + ahead, scheduled_at=at(5), said=library(time=at(9 + ahead).timestamp()))
    assert first_sign(wrong).time.replace(microsecond=0) == (at(5) if ahead < 0 else CONTEXT.now)


@pytest.mark.parametrize(
    ("reason", "found"),
    [
        *dict.fromkeys(("NodeLost", "PodGone", "Evicted", "OutOfcpu", "Unknown", "EvictionByEvictionAPI",
                        "StoppedFromOutside", "PreflightFailed", "ConnectionLost"), "infrastructure").items(),
        ("OOMKilled", "outOfMemory"), ("DeadlineExceeded", "application"), ("Error", "application"),
        ("PreemptedByQueue", "application"), ("", "application"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("evidence", [None, api.Evidence(precedence="OF_A_NEWER_OPERATOR")])
def test_without_evidence_the_reason_decides_and_an_unknown_reason_is_charged(reason, found, evidence):
    """An unknown reason, as from an older operator's status, must be charged, or the job may restart for ever."""
    failure = recorded(1, reason, exit_code=3, evidence=evidence)
    assert settled(first=failure)[1] == found
    assert rules.from_outside(root_cause.read_back(failure)) == (found == "infrastructure")


def test_the_evidence_is_read_back_and_not_rebuilt_from_the_reason() -> None:
    """The evidence must be read back, and not be derived from the reason, whose words depend on the runtime."""
    evidence = api.Evidence(precedence="OWN", raised=True, container_reason="Error")
    failure = recorded(1, "Evicted", exit_code=3, exception="ValueError: x", evidence=evidence)
    read = msgspec.json.decode(msgspec.json.encode(failure), type=api.JobFailure)
    assert (settled(first=read)[1], rules.from_outside(root_cause.read_back(read))) == ("application", False)


def test_the_first_recorded_failure_is_shown_with_the_end_of_its_pod() -> None:
    deleted = told(pod(1, 0, said=library(step=41, resumable=True), seconds=9), 5)
    failure, _ = settled(deleted, pod(0, said=PEER), first=recorded(1, "StoppedFromOutside", 5))
    assert (failure.reason, failure.exit_code, failure.step) == ("StoppedFromOutside", 0, 41)


@pytest.mark.parametrize(
    ("said", "found", "reason"),
    [
        ({"exitCode": 0, "exception": "ended with exit code 0 while rank 1 still waited", "early": True},
         "application", root_cause.ENDED_EARLY),
        ({"exception": "has made no step for 30 s", "stalled": True}, "stall", root_cause.STALLED),
    ],
    ids=["early", "stalled"],
)  # fmt: skip
def test_the_cause_that_the_agents_agreed_on_counts_even_if_node_0_ends_last(said, found, reason):
    """The cause on which the agents agreed must count even if node 0 ends last, stopped by the operator."""
    leader = pod(0, 1 if found == "application" else 75, library(rank=0, ended=True, **said), seconds=11)
    peer = pod(1, 75, library(ended=True))
    cause, its_class = settled(told(leader, 10.5), peer, first=first_sign(peer))
    assert (cause.rank, cause.pod, cause.reason, its_class) == (0, "bert-1-0", reason, found)


def test_a_kill_that_the_agents_agreed_on_is_the_cause_even_if_node_0_ends_first() -> None:
    """A kill on which the agents agreed must be the cause even if the operator was stopping node 0's pod just then.
    Otherwise it would not be charged."""
    first = pod(0, 75, library(ended=True))
    agreed = library(rank=1, exitCode=137, signal="SIGKILL", ended=True, **{"class": "application"})
    cause, its_class = settled(first, told(pod(1, 137, agreed, seconds=11), 10.5), first=first_sign(first), nodes=2)
    assert (cause.rank, cause.signal, its_class) == (1, "SIGKILL", "application")


def test_an_import_error_on_all_nodes_before_the_first_step_is_permanent() -> None:
    pods = [pod(rank, said="ModuleNotFoundError: No module named 'timm'") for rank in range(3)]
    assert settled(*pods, stepped=False)[1] == "permanent"
    assert settled(*pods, stepped=True)[1] == "application", "an import in the middle may work the next time"
    assert settled(*pods, stepped=False, trained=True)[1] == "infrastructure", "it was there when the job trained"
    assert settled(*pods[:2], stepped=False)[1] == "infrastructure", "the third node might have it"
    assert settled(pods[0], pods[1], pod(2, said=PEER), stepped=False)[1] == "infrastructure"
    assert settled(pods[0], stepped=False, nodes=1)[1] == "permanent"


MISTAKE = (
    'Traceback (most recent call last):\n  File "/app/train.py", line 41, in <module>\n    main()\n'
    '  File "/usr/lib/python3.11/site-packages/torch/nn/linear.py", line 9, in forward\n    return f(x)\n'
    "AttributeError: 'Tensor' object has no attribute 'backwrd'\n"
)


def test_a_mistake_on_every_node_before_the_first_step_is_permanent() -> None:
    """A mistake on every node before the first step must end the job, and not cost four attempts."""
    pods = [pod(rank, said=MISTAKE) for rank in range(2)]
    assert settled(*pods, nodes=2, stepped=False)[1] == "permanent"
    assert settled(*pods, nodes=2, stepped=False, trained=True)[1] == "application", (
        "the job has trained, so the same lines have worked"
    )
    assert settled(*pods, nodes=3, stepped=False)[1] == "application", "the third node has not made it"
    assert settled(pods[0], pod(1, said=SHARD), nodes=2, stepped=False)[1] == "application", "two nodes, two exceptions"
    passing = MISTAKE.replace("AttributeError: 'Tensor' object has no", "ConnectionError: data server has no")
    assert settled(*(pod(rank, said=passing) for rank in range(2)), nodes=2, stepped=False)[1] == "application"
    chosen = [pod(rank, 3, said=MISTAKE) for rank in range(2)]
    assert settled(*chosen, nodes=2, stepped=False)[1] == "application", "who ends with 3 means something by it"


OPTION = "usage: train.py [-h] [--lr LR]\ntrain.py: error: unrecognized arguments: --lrr 1\n"


def test_options_that_every_node_refuses_are_not_retried() -> None:
    """Options that every node refuses, such as `--lrr 1`, must not be tried again."""
    pods = [pod(rank, 2, said=OPTION) for rank in range(2)]
    failure, found = settled(*pods, nodes=2, stepped=False)
    assert (failure.exception, found) == ("train.py: error: unrecognized arguments: --lrr 1", "permanent")
    stopped = told(pod(1, 143, said=OPTION, seconds=11), 10.5)
    assert settled(pods[0], stopped, first=first_sign(pods[0]), nodes=2, stepped=False)[1] == "permanent"
    assert settled(*pods, nodes=2, stepped=False, trained=True)[1] == "application", (
        "the job has trained with these options"
    )
    assert settled(*pods, nodes=3, stepped=False)[1] == "application", "the third node has not refused them"
    bare = [pod(rank, 2, said="loading\n") for rank in range(2)]
    assert settled(*bare, nodes=2, stepped=False)[1] == "application", "a bare exit code may mean anything"
    chosen = [pod(rank, 3, said=OPTION) for rank in range(2)]
    assert settled(*chosen, nodes=2, stepped=False)[1] == "application", "argparse ends with 2"


@pytest.mark.parametrize("launcher", ["ddprun", "torchrun"])
def test_options_that_the_launcher_refuses_are_not_retried_even_if_only_one_node_got_so_far(launcher):
    """Options that the launcher refuses must not be tried again, even if only one node has refused them so far."""
    said = f"{launcher}: error: --max-restarts: 'x' is not a number.\n(ddprun --help has all options)\n"
    failure, found = settled(pod(0, 2, said=said), nodes=2, stepped=False)
    assert (failure.exception, found) == (said.splitlines()[0], "permanent")


def test_a_mistake_counts_for_a_node_that_was_stopped_right_after_it() -> None:
    """A mistake must count for a node that was stopped right after it, although its exit code shows only SIGTERM."""
    stopped = told(pod(1, 143, said=MISTAKE + "SignalException: Process 7 got signal: 15\n", seconds=11), 10.5)
    failed = pod(0, said=MISTAKE)
    assert settled(failed, stopped, first=first_sign(failed), nodes=2, stepped=False)[1] == "permanent"


def test_a_failure_names_the_line_of_the_script_and_not_of_a_library() -> None:
    failure, _ = settled(pod(0, said=MISTAKE))
    assert failure.where == "train.py:41"
    assert "ended with exit code 1 in train.py:41 (AttributeError: " in sentences.sentence(failure)
    by_library = library(rank=0, exitCode=1, exception="ValueError: x", traceback=MISTAKE)
    assert settled(pod(0, said=by_library))[0].where == "train.py:41"


UNEVEN: dict[str, Any] = {"steps": {0: 20, 1: 20}, "torchrun": True}
SAVED = library(rank=1, exitCode=75, exception="ddpjob.Stopped: saved at step 20")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (137, "rank 1 done"),
        (1, table("sigterm-to-torchrun-at-its-end")),
        (143, table("store-gone-at-torchruns-end")),
        (0, ""),
    ],
)
def test_a_torchrun_that_only_waited_for_other_nodes_had_a_rank_that_ended_early(code: int, said: str) -> None:
    """A torchrun that waited for other nodes after its ranks ended with 0 must count as a rank that ended early, even
    if it gets a SIGTERM or ends with 0 because node 0's store is gone."""
    complaint = pod(0, said=PEER)
    failure, found = settled(told(pod(1, code, said=said), 11), complaint, first=first_sign(complaint), **UNEVEN)
    assert (failure.rank, failure.exit_code, found) == (1, 0, "application")
    assert "ended with exit code 0 after step 20 while rank 0 was in step 21" in sentences.sentence(failure)
    assert settled(first=failure)[1] == found, "also when its pods are gone"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        pytest.param(137, "Received 15 death signal", id="its ranks did not end within the grace"),
        pytest.param(137, SAVED, id="a rank saved, and another one did not end within the grace"),
        pytest.param(0, "", id="it ended well, and node 0's torchrun was stopped too"),
    ],
)
def test_a_pod_that_the_operator_stopped_did_not_end_early(code: int, said: str) -> None:
    complaint, leader = pod(2, said=PEER), told(pod(0, 137, said="Received 15 death signal"), 11)
    stopped = told(pod(1, code, said=said), 11)
    failure, found = settled(leader, stopped, complaint, first=first_sign(complaint), **UNEVEN)
    assert (failure.reason, found) == (root_cause.PEER_LOST, "infrastructure")


def test_a_pod_whose_container_never_ran_did_not_end_early() -> None:
    """The kubelet reports 137 also for a container that it never started, for example of a pod on a cut node."""
    complaint, stopped = pod(0, said=PEER), told(pod(1, 137), 11)
    stopped = msgspec.structs.replace(stopped, trainer=msgspec.structs.replace(stopped.trainer, ran=False))
    failure, found = settled(stopped, complaint, first=first_sign(complaint), **UNEVEN)
    assert (failure.reason, found) == (root_cause.PEER_LOST, "infrastructure")


def test_a_pod_that_exited_with_0_is_not_blamed_before_its_kubelet_gives_the_reason() -> None:
    """A pod that exited with 0 must not be blamed before its kubelet gives the reason: an evicted trainer ends with 0,
    and its phase follows later."""
    complaint, ended = pod(1, said=PEER), told(pod(0, 0), 11)
    waits = msgspec.structs.replace(ended, phase="Running")
    known: dict[str, Any] = {"steps": {0: 20, 1: 20}, "torchrun": True}
    meanwhile, _ = settled(complaint, waits, first=first_sign(complaint), **known)
    assert meanwhile.reason == root_cause.PEER_LOST
    evicted = msgspec.structs.replace(ended, reason="Evicted")
    assert settled(complaint, evicted, first=meanwhile, **known)[1] == "infrastructure"


@pytest.mark.parametrize("code", [126, 127])
def test_a_command_that_no_node_can_start_is_permanent_if_the_job_has_never_trained(code: int) -> None:
    pods = [pod(rank, code) for rank in range(3)]
    assert settled(*pods, stepped=False)[1] == "permanent"
    assert settled(*pods, stepped=False, trained=True)[1] == "infrastructure"
    assert settled(*pods[:2], pod(2, 75), stepped=False)[1] == "infrastructure"
    agreed = library(rank=0, exitCode=code, ended=True, **{"class": "permanent"})
    assert settled(pod(0, code, said=agreed), pod(1, 75), pod(2, 75), stepped=False)[1] == "permanent"


@pytest.mark.parametrize(
    "line",
    [
        "/usr/bin/python3.11: can't open file '/nonexistent.py': [Errno 2] No such file or directory",
        "python: can't open file '/work/train.py': [Errno 13] Permission denied",
        "exec /usr/local/bin/torchrun: exec format error",
        "standard_init_linux.go:228: exec user process caused: exec format error",
        "/usr/bin/python: No module named train",
        "/usr/bin/python: can't find '__main__' module in '/work'",
        "ddprun: there is no file trian.py in /work; did you mean train.py?",
        "ddprun: there is no module trian in /work, nor is one installed in /usr/bin/python",
    ],
)
def test_the_message_of_the_interpreter_about_a_missing_script_is_the_cause(line: str) -> None:
    """Python's message about a missing script must be the cause: `ended with exit code 2` does not name it."""
    said = library(exitCode=2, exception=line) if line.startswith("ddprun") else f"{line}\n{line}"
    failure, found = settled(*(pod(rank, 2, said=said) for rank in range(3)), stepped=False)
    assert (failure.exception, found) == (line, "permanent")
    assert line in sentences.sentence(failure)


def test_a_job_of_one_node_has_no_peers_to_blame() -> None:
    assert settled(pod(0, said=PEER), nodes=1)[1] == "application", "it would restart for ever"


def test_the_exit_code_of_the_guilty_rank_is_known_under_plain_torchrun() -> None:
    failure, found = settled(pod(1, said=table("exit-3")), first=None)
    assert failure.exit_code == 3, "failurePolicy speaks of it; the container ended with 1"
    fail_job = [failure_policy.PolicyRule("FailJob", frozenset({3}))]
    assert rules.with_policy(found, failure.exit_code, fail_job) == "permanent"


@pytest.mark.parametrize(
    ("failure", "text", "short"),
    [
        (
            recorded(37, "Error", exit_code=139, signal="SIGSEGV", step=12840),
            "rank 37 (pod bert-1-37, node gpu-037) was killed by SIGSEGV at step 12840",
            "SIGSEGV on rank 37",
        ),
        (
            recorded(1, "Error", exit_code=3, exception="ValueError: no such shard"),
            "rank 1 (pod bert-1-1, node gpu-01) ended with exit code 3 (ValueError: no such shard)",
            "exit code 3 on rank 1",
        ),
        (
            recorded(1, "Error", exit_code=137, signal="SIGKILL"),
            "rank 1 (pod bert-1-1, node gpu-01) was killed by SIGKILL (no out-of-memory kill was reported)",
            "SIGKILL on rank 1",
        ),
        (
            recorded(5, "OOMKilled", exit_code=137, signal="SIGKILL", step=7),
            "rank 5 (pod bert-1-5, node gpu-05) was killed at step 7 because it used more memory than its limit "
            "(OOMKilled)",
            "OOMKilled on rank 5",
        ),
        (
            recorded(1, "PeerLost", exit_code=1, exception="RuntimeError: Connection closed by peer"),
            "rank 1 (pod bert-1-1, node gpu-01) lost its peers (RuntimeError: Connection closed by peer); no rank "
            "failed first: often the ranks have different numbers of batches, and ddprun names the rank",
            "rank 1 lost its peers",
        ),
        (
            recorded(1, "PeerLost", exit_code=1, exception="torch.distributed.RendezvousTimeoutError"),
            "rank 1 (pod bert-1-1, node gpu-01) waited for the other nodes until its timeout "
            "(torch.distributed.RendezvousTimeoutError); no rank failed first: one has not started, or a launcher does "
            "not have the job's address and PET_NNODES (--standalone)",
            "rank 1 lost its peers",
        ),
        (
            recorded(1, "PeerLost", exit_code=1, exception="RuntimeError: Timed out waiting 8000ms for recv operation"),
            "rank 1 (pod bert-1-1, node gpu-01) waited for another rank until its timeout (RuntimeError: Timed out "
            "waiting 8000ms for recv operation); no rank failed first: one hangs, is slower than "
            "that, or does not call the same collectives",
            "a timeout of rank 1",
        ),
        (
            recorded(1, "Evicted", exception="The node was low on resource: memory."),
            "rank 1 (pod bert-1-1, node gpu-01) was evicted by the kubelet (The node was low on resource: memory.)",
            "eviction of bert-1-1",
        ),
        (
            recorded(1, "PreemptionByScheduler", exit_code=143, step=9),
            "rank 1 (pod bert-1-1, node gpu-01) was preempted by a pod of higher priority at step 9",
            "preemption of bert-1-1",
        ),
        (
            recorded(1, "NodeLost"),
            "rank 1 (pod bert-1-1, node gpu-01) was lost with its node",
            "node gpu-01 lost",
        ),
        (
            recorded(1, "StoppedFromOutside", exit_code=143),
            "rank 1 (pod bert-1-1, node gpu-01) was stopped from outside (exit code 143): the pod was deleted, or its "
            "node drained",
            "bert-1-1 was stopped from outside",
        ),
        (
            recorded(1, "Resumable", exit_code=75, step=41),
            "rank 1 (pod bert-1-1, node gpu-01) stopped cleanly (exit code 75) because a rank was told to stop at "
            "step 41",
            "a stop from outside",
        ),
        (
            recorded(1, "CreateContainerConfigError", exception='configmap "x" not found'),
            "rank 1 (pod bert-1-1, node gpu-01) failed (CreateContainerConfigError): configmap \"x\" not found",
            "a missing ConfigMap or Secret of bert-1-1",
        ),
        (
            recorded(1, "StartError", exit_code=128, exception='exec: "trochrun": executable file not found in $PATH'),
            'rank 1 (pod bert-1-1, node gpu-01) could not be started: exec: "trochrun": executable file not found '
            "in $PATH",
            "exit code 128 on rank 1",
        ),
    ],
)  # fmt: skip
def test_a_failure_message_has_rank_place_error_and_step(failure: api.JobFailure, text: str, short: str) -> None:
    assert sentences.sentence(failure) == text
    assert sentences.short(failure) == short


def test_a_node_is_avoided_only_for_a_fault_of_the_node_itself() -> None:
    blamed = [
        recorded(1, "NodeLost", failure_class="infrastructure"),
        recorded(1, "Error", failure_class="infrastructure", exception="RuntimeError: CUDA error: GPU is lost"),
        recorded(1, "TopologyAffinityError", failure_class="infrastructure"),
        recorded(1, "StartError", failure_class="infrastructure", exit_code=128),
        recorded(1, "Error", failure_class="infrastructure", exit_code=127),
        recorded(1, "Error", failure_class="infrastructure", exception="ImportError: libcuda.so.1: cannot open"),
    ]
    innocent = [
        *(
            recorded(1, word, failure_class="infrastructure")
            for word in ("EvictionByEvictionAPI", "Evicted", "PodGone", "TaintToleration", "PreemptionByScheduler")
        ),
        recorded(1, "Error", exit_code=1, failure_class="application"),
        recorded(1, "CreateContainerConfigError", failure_class="infrastructure"),
    ]
    assert [f for f in (*blamed, *innocent) if root_cause.blames_node(f)] == blamed


def test_the_log_tail_is_the_last_2_kb_without_credentials_and_can_be_off() -> None:
    answer = "ddpjob-answer-0123456789abcdef:error:0:0/1:gAWVXw==\n"
    log = "password=hunter2\n" + "step ä\n" * 400 + answer + "HF_TOKEN=hf_0123456789012345678901234567\nthe end\n"
    failure = first_sign(pod(0, said=log))
    assert len(failure.log_tail.encode()) <= 2048
    assert failure.log_tail.startswith("step ä\n"), "half a line may be half a credential"
    assert failure.log_tail.endswith("step ä\nHF_TOKEN=***\nthe end"), "without what comes back for a program"
    assert root_cause.root_cause(replace(CONTEXT, keep_log_tail=False), [pod(0, said=log)]).log_tail == ""
    assert settled(pod(0, said=log), keep_log_tail=False)[0].log_tail == ""


def test_a_line_that_the_kubelet_cut_is_omitted() -> None:
    log = ("0123secret-of-someone\n" + "x" * 3000)[: 2048 - 4] + "\nend"
    assert len(log) == 2048
    assert "secret-of-someone" not in log_lines.tail(log)


def test_the_exception_line_has_no_credentials() -> None:
    said = "RuntimeError: cannot reach postgres://train:hunter2@db/x, api_key=AbC123456789"
    failure = first_sign(pod(0, said=said))
    assert failure.exception == "RuntimeError: cannot reach postgres://train:***@db/x, api_key=***"


def test_lines_of_the_training_are_distinguished_from_those_of_torchrun() -> None:
    assert log_lines.of_training("python: can't open file 'nofile.py'\n\n" + table("exit-3")) == [
        "python: can't open file 'nofile.py'"
    ]


@pytest.mark.parametrize(
    ("before", "report"),
    [
        ("", "E1122 16:19:47.568000 27043 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1)"),
        ("", "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: 1) local_rank: 0 (pid: 7)"),
        ("I1122 16:19:40.1 7 torch/distributed/elastic/agent/server/api.py:871] starting workers\n", ""),
        ("WARNING:torch.distributed.run:\n*****\n", ""),
    ],
    ids=["2.13", "2.0", "LOGLEVEL=INFO", "2.0 at the start"],
)
def test_the_report_of_torchrun_begins_at_the_same_line_for_display_and_for_the_last_line(before, report):
    """torchrun's report must begin at the same line for `describe` and for the message, or one of them shows it and the
    other does not."""
    log = f"{before}no data\n{report}\n"
    assert log_lines.of_training(log)[-1] == "no data"
    assert log_lines.of(log, 1) == "last line: no data"
