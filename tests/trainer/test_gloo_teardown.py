"""A rank that has done its work ends with 0, whatever threads of torch and of the library are still busy then."""

from __future__ import annotations

import ctypes
import hashlib
import json
import subprocess
import sys
import threading
import time
import types
from typing import Any

import pytest

from ddpjob.group import gloo_teardown

PR_SET_NAME = 15


def settle(wait_for_work: bool = True) -> None:
    gloo_teardown.settle(failed=not wait_for_work, seconds_max=30)


def test_it_is_quiet_when_nothing_was_seen_twice_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = iter([True, False, True, False, False])
    monkeypatch.setattr(gloo_teardown, "threads_run", lambda: next(seen))
    settle()
    assert list(seen) == []


def test_a_thread_of_gloo_that_computes_is_waited_for_and_another_one_is_not() -> None:
    ended = []

    def work(name: bytes, rounds: int) -> None:
        ctypes.CDLL(None).prctl(PR_SET_NAME, name, 0, 0, 0)
        begun.wait()
        hashlib.pbkdf2_hmac("sha512", b"", b"", rounds)  # without the interpreter's lock
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


def test_where_no_threads_can_be_listed_none_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On macOS a training ends as it does without the library."""
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
def test_a_collective_that_nobody_waited_for_is_seen_in_the_recorder(
    monkeypatch: pytest.MonkeyPatch, entries: list[dict[str, Any]], busy: bool
) -> None:
    recorder = types.SimpleNamespace(_dump_fr_trace_json=lambda **_: json.dumps({"entries": entries}))
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", recorder)  # type: ignore[arg-type]
    assert gloo_teardown.has_work() is busy


def test_without_a_recorder_the_threads_are_all_that_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", types.ModuleType("older"))
    assert gloo_teardown.has_work() is False


def test_what_never_ends_is_not_waited_for_longer_than_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_teardown, "has_work", lambda: True)
    gloo_teardown.settle(failed=False, seconds_max=0.05)
    gloo_teardown.settle(failed=True, seconds_max=30)  # returns


# Three ranks, one after the other, whose watchdog is in C++ all the time: each call stays there for 20 ms, without the
# lock of the interpreter.
ENDS = """
import datetime, os, torch.distributed as dist
from ddpjob.reporting import watchdog
from ddpjob.core.heartbeat import PAGE_BYTES
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


def test_the_watchdogs_thread_does_not_abort_a_rank_that_ends() -> None:
    """It comes back from C++ when the interpreter has ended. With a call of 5 us four times a second it is one rank of
    some thousands, SIGABRT after all its work."""
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == f"{[0] * 3}\n", done.stderr
