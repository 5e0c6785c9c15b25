"""A rank that has finished must exit with 0, even while threads of torch or of the library are busy."""

import ctypes
import gc
import glob
import hashlib
import json
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from script_ends import finish

import ddpjob
from ddpjob.group import gloo_teardown, join
from ddprun import forkserver

PR_SET_NAME = 15


def settle(wait_for_work: bool = True) -> None:
    gloo_teardown.settle(failed=not wait_for_work, seconds_max=30)


def test_the_wait_ends_when_no_running_thread_was_seen_twice_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = iter([True, False, True, False, False])
    monkeypatch.setattr(gloo_teardown, "threads_run", lambda: next(seen))
    settle()
    assert list(seen) == []


def test_only_a_computing_thread_of_gloo_is_waited_for() -> None:
    ended = []

    def work(name: bytes, rounds: int) -> None:
        ctypes.CDLL(None).prctl(PR_SET_NAME, name, 0, 0, 0)
        begun.wait()
        hashlib.pbkdf2_hmac("sha512", b"", b"", rounds)  # this call releases the interpreter lock
        ended.append(name)

    begun = threading.Barrier(3)
    mine = {b"pt_gloo_runloop": 300_000, b"pt_data_loader": 3_000_000}
    threads = [threading.Thread(target=work, args=each) for each in mine.items()]
    for thread in threads:
        thread.start()
    begun.wait()
    settle()
    assert ended == [b"pt_gloo_runloop"]
    for thread in threads:
        thread.join()


def test_no_thread_is_waited_for_if_threads_cannot_be_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If threads cannot be listed, as on macOS, the end of a rank must wait for no thread."""
    monkeypatch.setattr(gloo_teardown.os, "listdir", missing)
    begun = time.monotonic()
    settle(wait_for_work=False)
    assert time.monotonic() - begun < 20, "of the 30 s that it may take"


def missing(path: str) -> list[str]:
    raise FileNotFoundError(path)


def entry(name: str, retired: bool) -> dict[str, Any]:
    return {"profiling_name": name, "retired": retired, "state": "scheduled"}


@pytest.mark.parametrize(
    ("entries", "busy"),
    [
        ([entry("gloo:all_reduce", True), entry("gloo:broadcast", False)], True),
        ([entry("gloo:all_reduce", True)], False),
        ([entry("nccl:all_reduce", False)], False),
        ([{"another": "torch"}], False),
        ([], False),
    ],
)
def test_a_collective_that_nobody_waited_for_is_found_in_the_flight_recorder(monkeypatch, entries, busy):
    recorder = types.SimpleNamespace(_dump_fr_trace_json=lambda **_: json.dumps({"entries": entries}))
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", recorder)  # type: ignore[arg-type]
    assert gloo_teardown.has_work() is busy


def test_without_a_flight_recorder_only_the_threads_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", types.ModuleType("older"))
    assert gloo_teardown.has_work() is False


def test_the_wait_for_endless_work_ends_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_teardown, "has_work", lambda: True)
    gloo_teardown.settle(failed=False, seconds_max=0.05)
    gloo_teardown.settle(failed=True, seconds_max=30)  # returns although work is pending: the rank has failed


# Three ranks run one after the other. Their watchdogs call C++ for 20 ms at a time without the interpreter lock.
ENDS = """
import datetime, os, torch.distributed as dist
from ddpjob.reporting import watchdog
from ddpjob_core.heartbeat import PAGE_BYTES
store, moment = dist.HashStore(), datetime.timedelta(milliseconds=20)
watchdog.POLL_SECONDS, watchdog.collectives_begun = 0, lambda: store.wait(["never"], moment)
codes = []
for _ in range(3):
    pid = os.fork()
    if pid == 0:
        memory, (_, bell) = os.memfd_create("beats"), os.pipe()
        os.ftruncate(memory, PAGE_BYTES)
        os.environ["DDPJOB_BEATS"] = f"{os.getpid()}:{memory}:{bell}:0"
        watchdog.begin()
        break
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
else:
    print(codes)
"""


def test_the_thread_of_the_watchdog_does_not_abort_an_ending_rank() -> None:
    """The watchdog's thread must not abort an ending rank. If the thread returned from C++ after the interpreter's end,
    one rank in several thousand would end with SIGABRT."""
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == f"{[0] * 3}\n", done.stderr


# ---- protection of a rank's end: without any single one, 6 to 40 % of all jobs abort or hang -----------------------


def as_ddprun_runs_a_script_without_the_library() -> None:
    forkserver.prepare_groups()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def keep_gloo_busy(found: Path) -> None:
    """Compute in a thread without the interpreter lock, as gloo's threads do, then take the lock to write the file
    `found`. The file is missing if the interpreter ended before."""

    def work() -> None:
        ctypes.CDLL(None).prctl(PR_SET_NAME, b"pt_gloo_runloop", 0, 0, 0)
        hashlib.pbkdf2_hmac("sha512", b"", b"", 300_000)  # 0.25 s: still running when the group is closed
        found.write_text("in the group" if dist.is_initialized() else "after the group")

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while thread.is_alive() and not gloo_teardown.threads_run():
        time.sleep(0.001)


def closed(found: Path) -> None:
    with ddpjob.init(backend="gloo"):
        keep_gloo_busy(found)
    assert found.exists(), "close() has waited"


def left_to_the_exit(found: Path) -> None:
    ddpjob.init(backend="gloo")
    keep_gloo_busy(found)


def left_after_an_error(found: Path) -> None:
    with ddpjob.init(backend="gloo"):
        keep_gloo_busy(found)
        raise ValueError


def without_the_library(found: Path) -> None:
    as_ddprun_runs_a_script_without_the_library()
    keep_gloo_busy(found)


def without_the_library_after_an_error(found: Path) -> None:
    without_the_library(found)
    raise ValueError


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the time limit for gloo's threads so high that a slow machine does not reach it."""
    monkeypatch.setattr(gloo_teardown, "SETTLE_SECONDS", 60.0)
    monkeypatch.setattr(gloo_teardown, "SETTLE_AFTER_ERROR_SECONDS", 60.0)
    monkeypatch.setattr(join, "END_SECONDS", 60.0)


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (closed, 0),
        (left_to_the_exit, 0),
        (left_after_an_error, 1),
        (without_the_library, 0),
        (without_the_library_after_an_error, 1),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_rank_leaves_the_group_and_exits_only_when_the_threads_of_gloo_are_idle(patient, tmp_path, script, code):
    """A rank must leave the group and exit only when gloo's threads are idle. A thread that takes the interpreter lock
    later aborts the finished rank, or makes it hang."""
    found = tmp_path / "found"
    ended = finish(lambda _: script(found), 1)
    assert ended[0][0] == code
    assert found.exists(), "the rank has ended while a thread of gloo was at work"
    assert found.read_text() == "in the group"


def test_a_multiprocessing_child_that_only_exits_waits_for_the_threads_of_gloo_too(patient, run_ranks, tmp_path):
    """A child of multiprocessing must wait for gloo's threads, too, although it calls no atexit functions."""
    found = tmp_path / "found"
    run_ranks(lambda _: left_to_the_exit(found), 1)
    assert found.exists(), "the rank has ended while a thread of gloo was at work"


def threads_of_gloo() -> int:
    return sum(Path(path).read_text().startswith("pt_gloo") for path in glob.glob("/proc/self/task/*/comm"))


def a_group_of_the_library() -> None:
    ddpjob.init(backend="gloo").close()


def a_group_of_the_script_that_the_library_joins() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ddpjob.init().close()


def groups_without_the_library() -> None:
    as_ddprun_runs_a_script_without_the_library()
    dist.new_group([0])
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("make_and_leave", "groups"),
    [
        (a_group_of_the_library, 1),
        (a_group_of_the_script_that_the_library_joins, 1),
        (groups_without_the_library, 2),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_group_that_was_left_is_never_destroyed(run_ranks, make_and_leave, groups):
    """A group must never be destroyed, because its destructor would make one job in eight hang."""

    def body(_: int) -> int:
        make_and_leave()
        gc.collect()
        return threads_of_gloo()

    assert run_ranks(body, 1) == [2 * groups]
