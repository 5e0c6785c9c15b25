"""A training that gets SIGTERM stops on all ranks after the same step, or on none, and never counts as completed."""

import itertools
import json
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ddpjob
from ddpjob import process
from ddpjob.group import join, stop
from ddpjob_core import heartbeat

RESUMABLE = 75


@pytest.fixture
def steps(tmp_path: Path) -> "Steps":
    return Steps(tmp_path)


class Steps:
    """Files with which ranks report to the test, and wait for each other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def note(self, name: str, value: object = "") -> None:
        (self.folder / f".{name}").write_text(str(value))
        (self.folder / f".{name}").rename(self.folder / name)

    def wait_for(self, name: str) -> str:
        wait_until((self.folder / name).exists)
        return (self.folder / name).read_text()

    def stopped(self) -> list[int]:
        return [int(path.read_text()) for path in sorted(self.folder.glob("stopped-*"))]


def wait_until(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def sigterm(pid: int | str | None = None) -> None:
    os.kill(int(pid or os.getpid()), signal.SIGTERM)


def test_all_ranks_stop_after_the_same_step_if_one_of_three_gets_sigterm_at_any_moment(end_ranks, steps, meeting_file):
    told, at = random.randrange(3), random.randrange(1, 60)

    def body(rank: int) -> None:
        with ddpjob.init(init_method=meeting_file, rank=rank, world_size=3):
            for step in range(1, 10_000):
                if (rank, step) == (told, at):
                    sigterm()
                dist.all_reduce(torch.ones(1))
                if ddpjob.should_stop(step):
                    steps.note(f"stopped-{rank}", step)
                    raise ddpjob.Stopped(step)

    outcomes = end_ranks(body, 3)
    if at == 1:  # before the first should_stop() SIGTERM kills the process
        assert outcomes[told].exit_code == -signal.SIGTERM
        return
    assert [outcome.exit_code for outcome in outcomes] == [RESUMABLE] * 3, (told, at, outcomes)
    assert len(set(steps.stopped())) == 1, (told, at, steps.stopped())
    assert steps.stopped()[0] >= at


def test_ranks_that_do_not_wait_for_each_other_stop_after_the_same_step_too(end_ranks, steps, meeting_file):
    """Ranks without collectives drift apart. If the slowest rank gets SIGTERM, it must catch up with the fastest."""

    def body(rank: int) -> None:
        with ddpjob.init(init_method=meeting_file, rank=rank, world_size=3):
            for step in range(1, 10_000):
                time.sleep(0.001 * (rank + 1))
                if (rank, step) == (0, 60):
                    steps.note("ahead")
                if (rank, step) == (2, 40):
                    steps.wait_for("ahead")
                    sigterm()
                if ddpjob.should_stop(step):
                    steps.note(f"stopped-{rank}", step)
                    raise ddpjob.Stopped(step)

    assert [outcome.exit_code for outcome in end_ranks(body, 3)] == [RESUMABLE] * 3
    assert len(set(steps.stopped())) == 1, steps.stopped()
    assert steps.stopped()[0] > 41, "the fast ranks were further when they heard of it"


def test_all_ranks_stop_after_one_step_if_all_get_sigterm_at_once_and_again(end_ranks, steps, meeting_file):
    def body(rank: int) -> None:
        with ddpjob.init(init_method=meeting_file, rank=rank, world_size=2):
            for step in range(1, 10_000):
                dist.all_reduce(torch.ones(1))
                if step > 20:
                    sigterm()
                if ddpjob.should_stop(step):
                    steps.note(f"stopped-{rank}", step)
                    raise ddpjob.Stopped(step)

    assert [outcome.exit_code for outcome in end_ranks(body, 2)] == [RESUMABLE] * 2
    assert len(set(steps.stopped())) == 1


def test_a_rank_blocked_in_a_collective_handles_the_signal_and_answers(end_ranks, steps, meeting_file):
    """A rank that is blocked in a collective must answer at once. Rank 0 joins the collective only after this answer,
    so both would wait for ever with a Python signal handler, which runs only after the collective."""

    def body(rank: int) -> None:
        with ddpjob.init(init_method=meeting_file, rank=rank, world_size=2):
            assert not ddpjob.should_stop(1)
            if rank == 1:
                steps.note("pid", os.getpid())
                dist.all_reduce(torch.ones(1))
            else:
                sigterm(steps.wait_for("pid"))
                wait_until(process.current.agreement.decided.is_set)  # rank 1 agrees in another thread
                dist.all_reduce(torch.ones(1))
            assert ddpjob.should_stop(2)
            raise ddpjob.Stopped(2)

    assert [outcome.exit_code for outcome in end_ranks(body, 2)] == [RESUMABLE] * 2


def test_the_others_finish_too_if_a_rank_has_already_finished(end_ranks, steps, meeting_file):
    def body(rank: int) -> None:
        with ddpjob.init(init_method=meeting_file, rank=rank, world_size=2) as world:
            for step in range(1, 11):
                dist.all_reduce(torch.ones(1))
                assert not ddpjob.should_stop(step)
            if rank == 1:
                agreement = process.current.agreement
                steps.wait_for("left-0")
                sigterm()
                wait_until(agreement.decided.is_set)
                assert not ddpjob.should_stop(11)
            else:
                wait = join.wait_for_others
                join.wait_for_others = lambda *a: [steps.note("left-0"), wait(*a)]
                world.close()

    assert [(outcome.exit_code, outcome.error) for outcome in end_ranks(body, 2)] == [(0, "")] * 2


@pytest.mark.parametrize("knows", [False, True], ids=["after the time to agree", "at once if its agent has said so"])
def test_a_group_that_has_lost_a_rank_ends_on_sigterm_before_its_grace_is_over(end_ranks, steps, meeting_file, knows):
    def body(rank: int) -> None:
        stop.AGREE_SECONDS = 60 if knows else 0.3
        ddpjob.init(init_method=meeting_file, rank=rank, world_size=2)
        assert not ddpjob.should_stop(1)
        if rank == 1:
            steps.wait_for("joined")
            steps.note("going")
            os._exit(9)
        steps.note("joined")
        steps.wait_for("going")
        process.current.cells[heartbeat.FAILED] = knows
        sigterm()
        wait_until(lambda: False)

    begin = time.monotonic()
    outcomes = end_ranks(body, 2)
    assert outcomes[0].exit_code == 128 + signal.SIGTERM
    assert time.monotonic() - begin < 20


def test_a_rank_that_waits_for_the_agreement_of_a_lost_one_gives_up_with_a_symptom(end_ranks, steps, meeting_file):
    from ddpjob_core import rules

    def body(rank: int) -> None:
        world = ddpjob.init(init_method=meeting_file, rank=rank, world_size=2, timeout_step_seconds=0.5)
        assert not ddpjob.should_stop(1)
        if rank == 1:
            steps.wait_for("joined")
            steps.note("going")
            os._exit(9)
        steps.note("joined")
        steps.wait_for("going")
        store = join.store_of(world)
        store.set("stop/asked", "1")
        store.add("stop/seen", 1)  # as if rank 1 had seen the request and was then lost
        wait_until(lambda: process.current.agreement.promised)
        ddpjob.should_stop(2)

    error = end_ranks(body, 2)[0].error
    assert error.startswith("RendezvousError: rank 0")
    assert rules.is_symptom(error)


def test_a_stopped_rank_stays_until_rank_0_has_written(end_ranks, steps, meeting_file, monkeypatch):
    """A stopped rank must stay until rank 0 has saved: torchrun kills a node 30 s after the first rank's end."""
    monkeypatch.setattr(join, "CLOSE_SECONDS", 0.0)

    def body(rank: int) -> None:
        sync = os.fsync
        os.fsync = lambda descriptor: [time.sleep(0.5), sync(descriptor)]
        try:
            with ddpjob.init(init_method=meeting_file, rank=rank, world_size=2):
                snapshot = ddpjob.Snapshot(steps.folder / "s")
                assert not ddpjob.should_stop(1)
                sigterm()
                step = next(step for step in itertools.count(2) if ddpjob.should_stop(step))
                snapshot.save(step, weights=torch.ones(1))
                raise ddpjob.Stopped(step)
        finally:
            assert list((steps.folder / "s").glob("step-*"))

    assert [(o.exit_code, o.error) for o in end_ranks(body, 2)] == [(RESUMABLE, "Stopped: 75")] * 2


def test_a_rank_that_exits_by_sys_exit_75_waits_for_nobody(end_ranks, steps, meeting_file, monkeypatch):
    """A stopped rank that calls sys.exit(75) must end without waiting for the other ranks."""
    monkeypatch.setattr(join, "END_SECONDS", 20.0)  # longer than any delay on this machine

    def body(rank: int) -> None:
        with ddpjob.init(init_method=meeting_file, rank=rank, world_size=2):
            assert not ddpjob.should_stop(1)
            sigterm()
            next(step for step in itertools.count(2) if ddpjob.should_stop(step))
            if rank == 1:
                process.at_exit_of_child(lambda: steps.note("ended"), 1)
            else:
                steps.wait_for("ended")
            raise SystemExit(RESUMABLE)

    assert [outcome.exit_code for outcome in end_ranks(body, 2)] == [RESUMABLE] * 2


def test_a_stopped_rank_that_waits_for_a_lost_one_ends_on_the_next_sigterm(end_ranks, meeting_file):
    def once_more() -> None:
        wait_until(lambda: process.current.agreement is None)  # the rank is leaving and waits for the lost rank
        sigterm()

    def body(rank: int) -> None:
        with ddpjob.init(init_method=meeting_file, rank=rank, world_size=2):
            for step in range(1, 10_000):
                dist.all_reduce(torch.ones(1))
                if (rank, step) == (0, 10):
                    sigterm()
                if ddpjob.should_stop(step):
                    if rank == 1:
                        os._exit(9)
                    threading.Thread(target=once_more).start()
                    raise ddpjob.Stopped(step)

    assert [outcome.exit_code for outcome in end_ranks(body, 2, limit_seconds=30)] == [RESUMABLE, 9]


def test_data_loader_workers_that_ignore_sigterm_survive_the_group_signal_of_torchrun(steps):
    def body() -> None:
        os.setpgid(0, 0)
        loader = torch.utils.data.DataLoader(range(100_000), num_workers=1, worker_init_fn=ddpjob.ignore_sigterm)
        for step, _ in enumerate(loader, 1):
            if step == 3:
                steps.note("up")
            if ddpjob.should_stop(step):
                raise ddpjob.Stopped(step)

    process = multiprocessing.get_context("fork").Process(target=body)
    process.start()
    steps.wait_for("up")
    os.killpg(process.pid, signal.SIGTERM)
    process.join(30)
    assert process.exitcode == RESUMABLE


# ---- one process, without torch ------------------------------------------------------------------------------------


ALONE = """
import sys, time, ddpjob
for step in range(1, 10_000):
    ddpjob.progress(step)
    if ddpjob.should_stop(step):
        {then}
    if step == 3:
        print("three", flush=True)
    time.sleep(0.002)
print("complete")
"""


@pytest.mark.parametrize("then", ["raise ddpjob.Stopped(step)", "break", "sys.exit(0)", "sys.exit()"])
def test_a_stopped_training_never_exits_with_0_however_its_script_continues(start_script, tmp_path, then):
    log = tmp_path / "log"
    process = start_script(ALONE.format(then=then), DDPJOB_TERMINATION_LOG=log)
    assert process.stdout.readline() == "three\n"
    process.terminate()
    out, err = process.communicate(timeout=30)
    assert process.returncode == RESUMABLE
    assert ("complete" in out) == (then == "break"), "what was printed must not be lost"
    assert ("End the script by `raise ddpjob.Stopped" in err) == (then != "raise ddpjob.Stopped(step)"), err
    told = json.loads(log.read_text())
    assert (told["resumable"], told["exitCode"]) == (True, RESUMABLE)
    assert told["step"] > 3


def test_a_training_that_raises_during_a_stop_has_failed(start_script, tmp_path):
    log = tmp_path / "log"
    process = start_script(ALONE.format(then="raise OSError('disk full')"), DDPJOB_TERMINATION_LOG=log)
    assert process.stdout.readline() == "three\n"
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 1
    assert json.loads(log.read_text())["exception"] == "OSError: disk full"


def test_a_signal_handler_of_the_script_is_left_alone(start_script):
    script = (
        "import os, signal, sys, time, ddpjob\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "ddpjob.should_stop(1)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "time.sleep(30)\n"
    )
    process = start_script(script)
    process.communicate(timeout=30)
    assert process.returncode == 7


def test_a_process_forked_by_a_rank_ends_on_sigterm_and_its_parent_does_not_notice(start_script):
    """A SIGTERM to a forked child must end the child, as a DataLoader ends its workers, and not stop the training."""
    script = (
        "import os, signal, sys, time, ddpjob\n"
        "ddpjob.should_stop(1)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    time.sleep(30)\n"
        "    os._exit(0)\n"
        "os.kill(child, signal.SIGTERM)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM\n"
        "time.sleep(1)\n"
        "assert not ddpjob.should_stop(2)\n"
    )
    # Python 3.12 and newer warn of a fork in a process with threads. Every rank has threads.
    process = start_script(script, PYTHONWARNINGS="ignore::DeprecationWarning")
    assert process.communicate(timeout=30)[1] == ""
    assert process.returncode == 0


def test_a_script_that_never_calls_should_stop_ends_on_sigterm_as_usual(start_script):
    process = start_script("import time, ddpjob\nddpjob.progress(1)\nprint('up', flush=True)\ntime.sleep(30)\n")
    assert process.stdout.readline() == "up\n"
    process.terminate()
    assert process.wait(30) == -signal.SIGTERM
