"""An exit code 0 that hides a failure fails the attempt, or makes the success suspicious."""

import json
from typing import Any

import pytest
from worlds import World, digits

from ddpjob_cli.describe import ending
from ddpjob_core.findings import trained_alone
from ddpjob_operator.failures import termination_message
from ddpjob_operator.job.status import find_condition

PIPE = {"command": ["bash", "-c", "ddprun train.py | tee log"]}
FALLBACK = {"command": ["bash", "-c", "ddprun train.py || torchrun train.py"]}
TRACE = 'Traceback (most recent call last):\n  File "/app/train.py", line 3, in <module>\n    main()\n'
TABLE = f"{TRACE}torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n{'=' * 60}\ntrain.py FAILED\n"
BOOM = "RuntimeError: boom"


def told(**values: Any) -> str:
    return json.dumps({"ddpjob": 1, **values})


def by_agent(**values: Any) -> str:
    """Return a termination message of ddprun about a failed rank, changed by `values`."""
    return told(**{"rank": 0, "exitCode": 1, "exception": BOOM, "where": "train.py:3", "failed": True} | values)


def ended(message: str, other: str = "", **container: Any) -> World:
    """Return a job both of whose pods ended with 0 and these termination messages."""
    world = digits(container=PIPE | container, backoffLimit=1).running()
    return world.exits(0, 0, message=message).exits(1, 0, message=other).settle()


def condition(world: World) -> tuple[str, str] | None:
    found = find_condition(world.status, "Suspicious")
    return None if found is None else (found.status, found.reason)


def reasons_of(world: World) -> list[str]:
    return [event.reason for event in world.events if event.type == "Warning"]


# ---------------------------------------------------------------- certain


def test_a_failure_that_ddprun_has_reported_is_one_although_the_command_ended_with_0() -> None:
    """A failure that ddprun has reported must count although the command ended with 0, as in `ddprun … | tee log`."""
    world = ended(by_agent(), told(exitCode=75, ended=True, failed=True))
    assert (world.status.state, world.status.attempt) == ("Restarting", 2)
    failure = world.status.last_failure
    assert (failure.rank, failure.exit_code, failure.exception, failure.where) == (0, 1, BOOM, "train.py:3")
    assert (failure.failure_class, failure.charged_to, failure.reason) == ("application", "application", "Error")
    line = "rank 0 (pod digits-1-0, node node-0) ended with exit code 1 in train.py:3 (RuntimeError: boom), although"
    assert world.status.failures[-1].message == f"{line} the command ended with 0"


def test_it_is_charged_to_the_backoff_limit_as_any_failure() -> None:
    world = ended(by_agent())
    world.after(30).running().exits(0, 0, message=by_agent()).exits(1, 0).settle()
    assert (world.status.state, world.status.reason) == ("Failed", "BackoffLimitExceeded")


def test_one_node_is_enough_while_the_other_still_runs() -> None:
    """A failure of one node must fail the attempt at once, because the other node's ranks wait for ever."""
    world = digits(container=PIPE).running().exits(0, 0, message=by_agent()).settle()
    assert (world.status.state, world.status.completed_nodes) == ("Restarting", "")


@pytest.mark.parametrize(
    "message",
    [
        told(rank=1, exitCode=1, exception=BOOM),  # the library writes this
        told(rank=1, exitCode=139, signal="SIGSEGV", exception=""),
        told(exitCode=75, failed=True),  # an agent that lost its connection
        told(exitCode=75, resumable=True, preflight=True, badNodes=[1], exception="node 1 is slow"),
    ],
)
def test_what_was_recorded_in_the_attempt_counts_whoever_has_written_it(message: str) -> None:
    assert ended(message).status.attempt == 2


@pytest.mark.parametrize(
    "message",
    [
        told(exitCode=75, resumable=True, step=41),  # from `timeout 1h torchrun train.py || true`
        told(exitCode=143, signal="SIGTERM", failed=False),  # ddprun itself was ended by a signal
        told(exitCode=130, signal="SIGINT", exception="KeyboardInterrupt"),
        told(agent={"restarts": {"application": 1}}, ended=True),  # the agent restarted its rank, which recovered
        told(exitCode=0),
        "said by the script itself",
        '{"ddpjob": 1, "exitCode": "many"}',
        '{"ddpjob": 2, "exitCode": 1}',
        '{"ddpjob": 1, "exitCode": 1',
    ],
)
def test_a_rank_that_was_asked_to_stop_and_what_is_no_failure_fail_nothing(message: str) -> None:
    """Stopped ranks and successes must not count as failures, or the whole training would run again."""
    world = ended(message)
    assert (world.status.state, condition(world)) == ("Succeeded", None)


def test_a_launcher_that_may_have_run_since_decides_by_its_exit_code() -> None:
    """In `ddprun a.py || torchrun a.py` the exit code must decide, because torchrun leaves no message."""
    assert ended(by_agent(), **FALLBACK).status.state == "Succeeded"


def test_where_the_shell_loses_that_exit_code_as_well_the_success_is_suspicious() -> None:
    command = ["bash", "-c", "(ddprun train.py || torchrun train.py) | tee log"]
    world = ended(by_agent(), command=command)
    assert (world.status.state, condition(world)) == ("Succeeded", ("True", "FailureInLog"))


# ---------------------------------------------------------------- suspicious


def test_what_agents_find_makes_the_success_suspicious() -> None:
    """A success must be suspicious if agents report that each rank trained alone."""
    found = {"reason": "NoProcessGroup", "message": "2 ranks, and none has formed a process group"}
    message = told(findings=[found, {"reason": "no word"}, 7])
    world = ended(message, message)
    assert world.status.state == "Succeeded"
    assert [(f.reason, f.message) for f in world.status.findings] == [("NoProcessGroup", found["message"])]
    assert condition(world) == ("True", "NoProcessGroup")
    assert reasons_of(world).count("NoProcessGroup") == 1
    assert world.status.message == f"all 2 nodes completed, but suspicious: {found['message']}"
    first, second = ending.succeeded("digits", world.status, 8).splitlines()
    assert (first, second) == ("✔ digits Succeeded in 8s", f"⚠ but suspicious: {found['message']}")


def test_a_rank_that_reports_that_it_trained_alone_makes_the_success_suspicious_once() -> None:
    """A rank's own report must make the success suspicious, because torchrun cannot see that ranks train alone."""
    by_ddprun = told(findings=[trained_alone(2)._asdict()])
    for message in ("", by_ddprun):
        world = digits().running().reports_step(9, world_size=2, alone=True, final=True)
        world.exits(0, 0, message=message).exits(1, 0).settle()
        assert (world.status.state, condition(world)) == ("Succeeded", ("True", "NoProcessGroup"))
        assert reasons_of(world).count("NoProcessGroup") == 1


def test_nodes_that_each_formed_a_group_make_the_success_suspicious() -> None:
    """Nodes with a group each must make the success suspicious, as after `torchrun --standalone` in the image."""
    for size, reasons in ((4, []), (2, ["NoProcessGroup"]), (1, [])):  # size 1: a parent that spawns ranks reports it
        world = digits(nprocPerNode=2).running().reports_step(9, world_size=size)
        world.exits(0, 0).exits(1, 0).settle()
        assert [found.reason for found in world.status.findings] == reasons


def test_a_launcher_without_the_jobs_variables_makes_the_success_suspicious() -> None:
    sudo = {"command": ["sudo", "torchrun", "train.py"]}
    assert condition(ended("", **sudo)) == ("True", "LauncherOption")
    world = digits(container=sudo).running().reports_step(9, world_size=2)  # sudo may have kept the variables
    assert condition(world.exits(0, 0).exits(1, 0).settle()) is None


def test_a_finding_outlives_the_pod_that_tells_it_and_not_its_attempt() -> None:
    message = told(findings=[{"reason": "ReplicasDiffer", "message": "layer1.weight differs"}])
    world = digits().running().exits(0, 0, message=message).settle()
    world.vanishes(0)
    world.exits(1, 3).settle()
    assert (world.status.attempt, world.status.findings) == (2, [])
    assert condition(world) == ("False", "NotSuspicious")


def test_findings_of_many_nodes_are_one_line() -> None:
    messages = [told(findings=[{"reason": "ReplicasDiffer", "message": f"rank {n} differs"}]) for n in range(2)]
    line = ending.succeeded("digits", ended(*messages).status, 8).splitlines()[1]
    assert line == "⚠ but suspicious: rank 0 differs (and 1 more like it)"


@pytest.mark.parametrize(
    ("log", "trusted", "is_found"),
    [
        (TABLE, None, True),
        (TABLE + "done\n", None, True),
        (TABLE, True, False),  # as after `torchrun a.py || torchrun b.py`
        (f"[rank1]: {BOOM}\n".join([TRACE.replace("Trace", "[rank1]: Trace"), ""]), None, True),
        (TRACE + BOOM + "\n", True, True),  # the script calls traceback.print_exc() and ends
        (TRACE + BOOM + "\nepoch 2 loss 0.1\n", None, False),  # the script handled it and continued
        (TRACE + BOOM + "\n[W1122 16:20:01.1 ProcessGroupNCCL.cpp:138] was not called\n", True, True),
        (TRACE + "KeyboardInterrupt\n", None, False),
        ("Exception ignored in: <function f>\n" + TRACE + BOOM + "\n", None, False),
        ("Exception ignored in atexit callback: <function save>\n" + TRACE + BOOM + "\n", True, True),
        (f'x | ERROR |\n{TRACE.replace("  File", "> File")}    └ <function main>\n\n{BOOM}\n', True, True),  # loguru
        (f"╭── Traceback (most recent call last) ──╮\n│ train.py:3 in main │\n╰────╯\n{BOOM}\n", True, True),  # rich
        (f"Exception in thread Thread-1 (fill):\n{TRACE}{BOOM}\nepoch 2 loss 0.1\n", True, True),
        (f"[rank0]: Exception in thread Thread-1:\n{TRACE}{BOOM}\nepoch 2 loss 0.1\n", True, True),
        (f"Exception in thread Thread-3:\n{TRACE.replace('/app', '/usr/lib/python3.12')}{BOOM}\ndone\n", True, False),
        (f"Process SpawnProcess-1:\n{TRACE}{BOOM}\nepoch 2 loss 0.1\n", True, True),
        (f"Process Process-2:\n{TRACE}KeyboardInterrupt\ndone\n", True, False),
        ("epoch 1 loss 0.3\n", None, False),
        ("", None, False),
    ],
)  # fmt: skip
def test_a_log_makes_a_success_suspicious_if_a_launcher_reports_it_or_nothing_follows(log, trusted, is_found):
    found = list(termination_message.findings(log, trusted=trusted))
    assert [f.reason for f in found] == (["FailureInLog"] if is_found else [])


@pytest.mark.parametrize(
    ("log", "reasons"),
    [
        (f"{TRACE}{BOOM}\ndone\n", ["ExitCodeLost"]),
        (f"epoch 1\n{TRACE}{BOOM}\ndone\n", ["ExitCodeLost"]),
        (f"{TRACE}{BOOM}\n", ["FailureInLog"]),
        (f"Exception ignored in: <function f>\n{TRACE}{BOOM}\ndone\n", []),
        (f"{TRACE}KeyboardInterrupt\ndone\n", []),
        ("epoch 1\n", []),
    ],
)
def test_any_traceback_counts_if_the_shell_hides_how_the_ranks_ended(log: str, reasons: list[str]) -> None:
    """Any traceback must count if a shell hides the exit code: in `python train.py; echo done` output follows it."""
    assert [one.reason for one in termination_message.findings(log, trusted=False)] == reasons


def test_the_shell_that_loses_an_exit_code_is_warned_of_when_the_job_starts() -> None:
    """A shell that loses the exit code must cause a warning Event at the start, for jobs applied with kubectl."""
    assert "ExitCodeLost" in reasons_of(digits(container=PIPE).started())
    assert "ExitCodeLost" not in reasons_of(digits().started())
