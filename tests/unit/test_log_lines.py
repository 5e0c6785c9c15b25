"""The message quotes a script that refuses its options or says why it stops. An exit code alone explains nothing."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import digits

from ddpjob_core.members import Members
from ddpjob_operator.failures import log_lines, root_cause, sentences

DATA = Path(__file__).parent / "data/logs"
ARGPARSE = "train.py: error: the following arguments are required: --data"
DDPRUN = "ddprun: error: --max-restarts: 'x' is not a number."
USAGE = "usage: train.py [-h] --data DATA\n"
TYPER = """Usage: train.py [OPTIONS]
Try 'train.py --help' for help.
\u256d\u2500 Error \u2500\u2500\u2500\u2500\u2500\u2500\u2500\u256e
\u2502 Missing option '--data'. \u2502
\u2570\u2500\u2500\u2500\u2500\u2500\u2500\u2500\u2500\u2500\u2500\u256f
"""
CLICK = "Usage: train.py [OPTIONS]\nTry 'train.py --help' for help.\n\nError: Missing option '--data'.\n"

FAREWELLS = [
    "[rank0]:[W1119 12:00:00.012 ProcessGroupNCCL.cpp:1250] Warning: WARNING: process group has NOT been destroyed",
    "[W1119 12:00:00.123456789 socket.cpp:752] [c10d] The client socket has failed",
    "/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: 1 leaked semaphore\n  warnings.warn(",
    "Exception ignored in: <function Loader.__del__ at 0x7f1>\nTraceback (most recent call last):\n"
    '  File "t.py", line 3, in __del__\n    assert self._pid\nAssertionError: can only test a child process',
    "wandb: Synced 5 W&B file(s)\nwandb: Find logs at: ./wandb/run",
    "\nSet the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.",
    "srun: error: node-1: task 1: Exited with exit code 1",
    "[2024-01-01 00:00:00,000] [ERROR] [launch.py:325:sigkill_handler] ['t.py'] exits with return code = 1",
]


@pytest.mark.parametrize(
    ("log", "code", "said"),
    [
        (USAGE + ARGPARSE + "\n", 2, ARGPARSE),
        (ARGPARSE, 2, ARGPARSE),
        ((DATA / "argparse.log").read_text(), 2, ARGPARSE),
        ("[rank1]: " + ARGPARSE + "\n[default0]:" + ARGPARSE, 2, ARGPARSE),
        ("train.py fit: error: argument --lr: invalid float value: 'x'\n", 2, None),
        ("python -m pkg.train: error: unrecognized arguments: --local-rank=0\n", 2, None),
        (ARGPARSE + "\nsys:1: ResourceWarning: unclosed file\n", 2, ARGPARSE),
        (CLICK, 2, "Error: Missing option '--data'."),
        (TYPER, 2, "Error: Missing option '--data'."),
        ("Error: not click's\n", 2, "last line: Error: not click's"),
        ("reading\nthe folder /data is empty\n", 1, "last line: the folder /data is empty"),
        ((DATA / "sys-exit.log").read_text(), 1, "last line: the folder /data is empty"),
        ("sh: 1: trian.py: not found\n", 127, "last line: sh: 1: trian.py: not found"),
        ("the last words\n=========\n\n", 1, "last line: the last words"),
        ("epoch 3 loss 0.51\n", 7, ""),
        ("epoch 3 loss 0.51\n", 0, ""),
        ("epoch 3 loss 0.51\n", 137, ""),
        ("epoch 3 loss 0.51\n", None, ""),
        ("ddprun: rank 1 ended with exit code 1\n", 1, ""),
        ("ddprun: error: --max-restarts: 'x' is not a number.\n(ddprun --help has all options)\n", 2, DDPRUN),
        ("", 1, ""),
        *((f"no data\n{after}\n", 1, "last line: no data") for after in FAREWELLS),
        (
            "Usage: t.py [OPTIONS]\n╭─ Error ─╮\n│ No such option: --lrr │\n╰────╯\n",
            2,
            "Error: No such option: --lrr",
        ),
        ("loading\n    Segments: 3\n", 1, "last line: Segments: 3"),
        ("it is 12:30: a DeprecationWarning: no\n", 1, "last line: it is 12:30: a DeprecationWarning: no"),
    ],
)
def test_the_last_message_of_a_program_that_gives_up_is_found(log: str, code: int | None, said: str | None) -> None:
    assert log_lines.of(log, code) == (log.strip() if said is None else said)


@pytest.mark.parametrize(("name", "said"), [("argparse", ARGPARSE), ("sys-exit", "the folder /data is empty")])
def test_the_log_tail_that_a_kubelet_keeps_of_torchrun_still_contains_the_last_message(name: str, said: str) -> None:
    log = (DATA / f"{name}.log").read_text()
    assert log_lines.of(log[-2048:], 2 if name == "argparse" else 1).removeprefix(log_lines.LAST_LINE) == said


@pytest.mark.parametrize("kept", [700, 1000, 1500])
@pytest.mark.parametrize("name", ["argparse", "sys-exit", "exit-3", "sigkill"])
def test_remains_of_the_torchrun_report_are_not_the_last_message_of_a_rank(name: str, kept: int) -> None:
    assert log_lines.of((DATA / f"{name}.log").read_text()[-kept:], 1) == ""


@pytest.mark.parametrize("prefix", ["[rank0]: ", "[default0]:[rank0]: "])
def test_the_last_exception_of_another_rank_is_not_the_message_of_this_one(prefix: str) -> None:
    """Rank 1's message must be its own last line, such as sys.exit("no data"), and not rank 0's exception."""
    log = f"data folder is empty\n{prefix}RuntimeError: Connection closed by peer [127.0.0.1]:56017\n"
    assert log_lines.of(log, 1, rank=1) == "last line: data folder is empty"
    assert log_lines.of(log, 1, rank=0) == "last line: RuntimeError: Connection closed by peer [127.0.0.1]:56017"
    assert log_lines.of(log, 1) == log_lines.of(log, 1, rank=0), "where the rank is not known"


def test_the_status_quotes_the_message_of_argparse() -> None:
    world = digits(backoffLimit=0).running().exits(1, code=2, message=USAGE + ARGPARSE).restarted()
    assert f"ended with exit code 2 ({ARGPARSE})" in world.status.message


def test_the_status_quotes_the_message_passed_to_sys_exit() -> None:
    world = digits(backoffLimit=0).running().exits(1, code=1, message="the folder /data is empty").restarted()
    assert "ended with exit code 1 (last line: the folder /data is empty)" in world.status.message


def test_the_last_line_of_a_rank_does_not_outweigh_an_exception_of_another() -> None:
    """A rank that ended because its peer was gone must not be named for the peer's exception."""
    world = (
        digits()
        .running()
        .exits(0, code=1, message="epoch 3")
        .after(5)
        .exits(1, code=1, message="ValueError: no such shard")
    )
    world.restarted()
    assert world.status.last_failure.rank == 1


def test_the_last_line_of_a_stopped_rank_does_not_explain_its_own_failure() -> None:
    world = digits().running().exits(1, code=1).settle()
    world.exits(0, code=1, message="stopping as I was told").settle()
    assert world.status.last_failure.rank == 1


def test_last_lines_stay_out_of_the_status_if_logs_do() -> None:
    world = digits(backoffLimit=0).running().exits(1, code=1, message="patient 4711 has no image")
    context = root_cause.Context(1, Members(range(2)), int, world.now, keep_log_tail=False)
    found = root_cause.root_cause(context, list(world.pods.values())[1:])
    assert "4711" not in sentences.sentence(found)


def test_a_password_in_a_last_line_is_masked() -> None:
    world = digits(backoffLimit=0).running().exits(1, code=1, message="cannot log in: password=hunter2").restarted()
    assert "hunter2" not in world.status.message


@given(st.text(), st.sampled_from([0, 1, 2, 126, 127, 137, None]))
def test_any_log_gives_at_most_one_short_line(log: str, code: int | None) -> None:
    assert len(log_lines.of(log, code).splitlines()) <= 1
