"""A rank writes a termination message, so that users can read the cause of a failure after the pod is gone."""

import contextlib
import fcntl
import json
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing

import ddpjob
from ddpjob.reporting import termination

PEER_IS_GONE = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:25853"


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "termination-log"
    path.touch()  # the kubelet creates this file, too
    monkeypatch.setenv("DDPJOB_TERMINATION_LOG", str(path))
    return path


def message(log: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(log.read_bytes())
    return found


def raised(error: BaseException) -> BaseException:
    with contextlib.suppress(type(error)):
        raise error
    return error


# ---- ways in which a process ends ----------------------------------------------------------------------------------


def test_an_exception_is_reported_with_rank_step_and_traceback_and_the_scripts_hook_still_runs(log, start_script):
    script = (
        "import sys, ddpjob\n"
        "sys.excepthook = lambda *what: print('the script\\'s own hook', *what[1].args)\n"
        "ddpjob.progress(41, loss=0.5)\n"
        "def read_shard():\n"
        "    raise ValueError('no such shard: 7\\nlook again')\n"
        "read_shard()\n"
    )
    began = time.time()
    process = start_script(script, DDPJOB_TERMINATION_LOG=log, RANK=3, WORLD_SIZE=4)
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (1, "the script's own hook no such shard: 7\nlook again\n")
    told = message(log)
    assert "in read_shard" in told.pop("traceback")
    assert began < told.pop("time") < time.time()
    assert told.pop("parent") == os.getpid()
    assert told == {
        "ddpjob": 1, "rank": 3, "exitCode": 1, "signal": "", "exception": "ValueError: no such shard: 7", "step": 41,
        "resumable": False,
    }  # fmt: skip


@pytest.mark.parametrize("step", ["'epoch 3'", "None", "float('nan')", "float('inf')", "[1]"])
def test_a_step_that_is_no_number_is_left_out_and_the_failure_is_reported(log, start_script, step):
    """A step that is no number is left out of the message, because the cause of the failure must be written anyway."""
    process = start_script(
        f"import ddpjob\nddpjob.progress(step={step})\nraise ValueError('no shard')\n", DDPJOB_TERMINATION_LOG=log
    )
    process.communicate(timeout=30)
    assert process.returncode == 1
    assert (message(log)["exception"], message(log)["step"]) == ("ValueError: no shard", 0)


def test_exceptions_in_a_thread_or_a_forked_helper_leave_no_message_if_the_script_ends_well(log, start_script):
    script = (
        "import os, sys, threading, ddpjob\n"
        "ddpjob.progress(1)\n"
        "def fail():\n"
        "    raise ValueError\n"
        "thread = threading.Thread(target=fail)\n"
        "thread.start()\n"
        "thread.join()\n"
        "if os.fork() == 0:\n"
        "    fail()\n"
        "os.wait()\n"
        "sys.exit(0)\n"
    )
    process = start_script(script, DDPJOB_TERMINATION_LOG=log)
    assert process.communicate(timeout=30)[1].count("Traceback") == 2
    assert process.returncode == 0
    assert log.read_bytes() == b""


def test_ctrl_c_is_reported_as_sigint(log, start_script):
    # Under `make test &` SIGINT is ignored, which child processes inherit.
    handles = "import os, signal, ddpjob\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    script = handles + "ddpjob.progress(1)\nos.kill(os.getpid(), 2)\n"
    start_script(script, DDPJOB_TERMINATION_LOG=log).communicate(timeout=30)
    assert (message(log)["signal"], message(log)["exitCode"]) == ("SIGINT", 130)


def test_a_child_of_multiprocessing_reports_its_exception_although_it_runs_no_hook(log, capfd):
    def body(rank: int) -> None:
        ddpjob.init()
        ddpjob.progress(7)
        raise KeyError("shard")

    child = multiprocessing.get_context("fork").Process(target=body, args=(0,))
    child.start()
    child.join(30)
    assert message(log)["exception"] == "KeyError: 'shard'"
    assert message(log)["step"] == 7


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_child_that_imports_the_library_itself_tells_before_it_leaves_its_peers(log, start_script, method):
    """A child that imports the library must report its failure before it leaves the group, which may take too long."""
    script = (
        "import multiprocessing, os\n"
        "def rank():\n"
        "    import ddpjob\n"
        "    ddpjob.progress(1)\n"
        "    def leave(): print(os.path.getsize(os.environ['DDPJOB_TERMINATION_LOG']), flush=True)\n"
        "    ddpjob.process.at_exit(leave, 10)\n"
        "    raise ValueError('boom')\n"
        "if __name__ == '__main__':\n"
        f"    child = multiprocessing.get_context({method!r}).Process(target=rank)\n"
        "    child.start()\n"
        "    child.join()\n"
    )
    written, _ = start_script(script, DDPJOB_TERMINATION_LOG=log).communicate(timeout=30)
    assert message(log)["exception"] == "ValueError: boom"
    assert int(written.split()[0]) == log.stat().st_size


def test_a_child_of_torchs_spawn_tells_what_was_raised_and_not_the_exit_that_follows(log, end_ranks):
    def body(rank: int) -> None:
        ddpjob.progress(7)
        if rank == 1:
            raise ValueError("boom")

    with pytest.raises(torch.multiprocessing.ProcessRaisedException):
        torch.multiprocessing.start_processes(body, nprocs=2, start_method="fork")
    assert (message(log)["exception"], message(log)["exitCode"]) == ("ValueError: boom", 1)


def test_an_exit_code_within_init_is_reported_although_the_hook_does_not_get_it(log, end_ranks):
    def body(rank: int) -> None:
        with ddpjob.init():
            sys.exit(3)

    assert end_ranks(body, 1)[0].exit_code == 3
    assert (message(log)["exception"], message(log)["exitCode"]) == ("SystemExit: 3", 3)


def test_under_torchrun_the_worker_that_failed_first_is_reported(log, tmp_path, free_port):
    script, gone = tmp_path / "train.py", tmp_path / "gone"
    # Both workers raise before one of them exits, because torchrun ends the second worker when the first has failed.
    script.write_text(
        "import atexit, os, pathlib, sys, time, ddpjob\n"
        f"gone = pathlib.Path({str(gone)!r})\n"
        "def wait_for_the_other():\n"
        "    gone.touch()\n"
        "    until = time.monotonic() + 60\n"
        "    while not os.path.getsize(os.environ['DDPJOB_TERMINATION_LOG']) and time.monotonic() < until:\n"
        "        time.sleep(0.01)\n"
        "ddpjob.progress(9)\n"
        "if os.environ['RANK'] == '0':\n"
        "    atexit.register(wait_for_the_other)\n"
        f"    raise RuntimeError({PEER_IS_GONE!r})\n"
        "while not gone.exists():\n"
        "    time.sleep(0.01)\n"
        "raise ValueError('the reason')\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port}"]
    environ = {**os.environ, "PYTHONPATH": str(Path(ddpjob.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, str(script)], env=environ, capture_output=True, timeout=120, check=False)
    assert done.returncode == 1
    assert (message(log)["rank"], message(log)["exception"]) == (1, "ValueError: the reason")


# ---- which message stays -------------------------------------------------------------------------------------------


FAILURE, SYMPTOM = ValueError("the reason"), RuntimeError(PEER_IS_GONE)
WRAPPED = RuntimeError("training failed")
WRAPPED.__cause__ = SYMPTOM
STOPPED = None


@pytest.mark.parametrize(
    ("first", "second", "stays"),
    [
        (FAILURE, TypeError("later"), "first"),
        (FAILURE, SYMPTOM, "first"),
        (FAILURE, STOPPED, "first"),
        (SYMPTOM, FAILURE, "second"),
        (WRAPPED, FAILURE, "second"),
        (SYMPTOM, STOPPED, "second"),
        (STOPPED, WRAPPED, "first"),
        (STOPPED, FAILURE, "second"),
    ],
)
def test_the_first_failure_is_kept_and_replaces_an_error_about_a_lost_peer(log, first, second, stays):
    wrote = []
    for error in (first, second):
        termination.tell_stopped(12) if error is STOPPED else termination.tell(raised(error))
        wrote.append(log.read_bytes())
    assert (wrote[0] == wrote[1]) == (stays == "first")
    kept = first if stays == "first" else second
    if kept is STOPPED:
        assert (message(log)["resumable"], message(log)["step"], message(log)["exitCode"]) == (True, 12, 75)
    else:
        assert message(log)["exception"] == f"{type(kept).__name__}: {kept}"


@pytest.mark.parametrize("error", [SYMPTOM, WRAPPED])
def test_a_rank_that_only_lost_a_peer_writes_no_message(log, error):
    """A rank that only lost a peer must write no message: only then the kubelet uses the end of the log."""
    termination.tell(raised(error))
    assert log.read_bytes() == b""


def test_the_signal_that_killed_a_data_loader_worker_is_reported(log):
    """The signal that killed a DataLoader worker must be reported, because torch says only `exited unexpectedly`."""
    error = RuntimeError("DataLoader worker (pid(s) 2032) exited unexpectedly")
    error.__cause__ = RuntimeError("DataLoader worker (pid 2032) is killed by signal: Killed. ")
    termination.tell(error)
    assert message(log)["exception"] == "RuntimeError: DataLoader worker (pid 2032) is killed by signal: Killed."
    assert message(log)["traceback"].endswith("exited unexpectedly\n")


QUOTES = (
    "Caught {kind} in DataLoader worker process 1.\nOriginal Traceback (most recent call last):\n"
    '  File "/app/data.py", line 7, in __getitem__\n    raise x\n{said}\n'
)


@pytest.mark.parametrize(
    "error",
    [
        ValueError(QUOTES.format(kind="ValueError", said="ValueError: no such shard: 7")),
        torch.multiprocessing.ProcessRaisedException(
            "\n\n-- Process 1 terminated with the following error:\nTraceback (most recent call last):\n"
            '  File "/app/data.py", line 7, in work\n    read(7)\nValueError: no such shard: 7\n',
            1,
            4711,
        ),
    ],
    ids=["DataLoader", "spawn"],
)
def test_an_exception_in_a_child_process_is_reported_without_its_wrapper(log, error):
    """An exception in a DataLoader worker must be reported without the wrapper `Caught … in DataLoader worker`."""
    termination.tell(raised(error))
    assert message(log)["exception"] == "ValueError: no such shard: 7"


def test_a_network_error_in_a_data_loader_worker_is_no_lost_peer(log):
    """A RuntimeError of the script about a refused connection, raised in a DataLoader worker, is not a lost peer."""
    said = (
        "ConnectionRefusedError: [Errno 111] Connection refused\n\nThe above exception was the direct cause of the "
        "following exception:\n\nTraceback (most recent call last):\n"
        '  File "/app/data.py", line 9, in read\n    raise y from x\nRuntimeError: cannot read shard 7'
    )
    termination.tell(raised(RuntimeError(QUOTES.format(kind="RuntimeError", said=said))))
    assert message(log)["exception"] == "RuntimeError: cannot read shard 7"


class GroupError(Exception):
    """Exception like ExceptionGroup of Python 3.11 and of the package exceptiongroup."""

    def __init__(self, text, exceptions):
        super().__init__(text)
        self.exceptions = exceptions

    def __str__(self):
        return f"{self.args[0]} ({len(self.exceptions)} sub-exceptions)"


@pytest.mark.parametrize(
    "inner", [GroupError("reads", (ValueError("no such shard: 7"),)), ValueError("no such shard: 7")]
)
def test_an_exception_group_is_reported_by_the_exception_that_is_no_lost_peer(log, inner):
    """Of an exception group the inner exception is reported, because the group's own message names no cause."""
    termination.tell(raised(GroupError("unhandled errors in a TaskGroup", (inner, RuntimeError(PEER_IS_GONE)))))
    assert message(log)["exception"] == "ValueError: no such shard: 7"


def test_an_exception_group_that_contains_only_lost_peers_writes_no_message(log):
    termination.tell(raised(GroupError("unhandled errors in a TaskGroup", (RuntimeError(PEER_IS_GONE),))))
    assert log.read_bytes() == b""


def test_a_message_of_the_script_is_kept_and_an_incomplete_one_is_replaced(log):
    log.write_text("out of disk, said the script")
    termination.tell(raised(FAILURE))
    assert log.read_text() == "out of disk, said the script"
    log.write_text('{"ddpjob": 1, "rank": 0, "exception": "Val' + "x" * 9000)
    termination.tell(raised(FAILURE))
    assert message(log)["exception"] == "ValueError: the reason"


def test_ranks_that_fail_at_the_same_moment_leave_one_complete_message(log, end_ranks):
    start = time.time() + 0.5

    def body(rank: int) -> None:
        while time.time() < start:
            pass
        for _ in range(50):
            os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), "8"
            termination.tell(raised(ValueError(f"rank {rank} " + "x" * 400 * rank)))

    assert {outcome.exit_code for outcome in end_ranks(body, 4)} == {0}
    assert message(log)["exception"].startswith(f"ValueError: rank {message(log)['rank']}")


# ---- any input -----------------------------------------------------------------------------------------------------


class Hostile(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def deep(depth: int) -> None:
    deep(depth + 1)


def recursion() -> BaseException:
    try:
        deep(0)
    except RecursionError as error:
        return error
    raise AssertionError


def chain() -> BaseException:
    error: BaseException | None = None
    for number in range(200):
        following = ValueError(f"link {number}")
        following.__cause__ = error
        error = following
    error.__cause__.__cause__.__cause__ = error  # type: ignore[union-attr]
    return error  # type: ignore[return-value]


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x" * 1_000_000),
        ValueError("漢" * 5_000),
        ValueError("𝄞" * 5_000),
        ValueError("\x00\x1b" * 5_000),
        ValueError('"\\' * 5_000),
        ValueError("\ud800" * 5_000),
        ValueError("\n" * 5_000),
        ValueError(b"\xff" * 5_000),
        type("漢" * 3_000, (Exception,), {})("x"),
        Hostile(),
        SystemExit("a text " * 1000),
        SyntaxError("bad", ("x.py", 1, 1, "x" * 9000, 1, 2)),
        recursion(),
        chain(),
    ],
    ids=lambda error: type(error).__name__[:20],
)
def test_the_message_is_json_of_at_most_4096_bytes_for_any_exception(log, error):
    termination.tell(raised(error))
    assert 100 < len(log.read_bytes()) <= 4096
    told = message(log)
    assert (told["exitCode"], told["rank"]) == (1, 0)
    assert told["exception"]


def test_a_long_traceback_is_cut_to_its_last_complete_lines(log):
    error = raised(ValueError("\n".join(f"line {number}" for number in range(2000))))
    termination.tell(error)
    told, whole = message(log)["traceback"], "".join(traceback.format_exception(error))
    assert whole.endswith("\n" + told)
    assert len(log.read_bytes()) > 3900


@pytest.mark.parametrize("place", ["nowhere/log", "", ".", "fifo", "read-only", "/dev/full", "/proc/self/mem"])
def test_a_file_that_cannot_be_written_raises_no_error(monkeypatch, tmp_path, place):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    Path("read-only").touch(0o444)
    monkeypatch.setenv("DDPJOB_TERMINATION_LOG", place)
    termination.tell(raised(FAILURE))
    termination.tell_stopped(3)


def test_a_lock_that_is_never_released_delays_the_end_only_briefly(log):
    with open(log) as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        begin = time.monotonic()
        termination.tell(raised(FAILURE))
        assert time.monotonic() - begin < 10
    assert log.read_bytes() == b""


def test_without_a_termination_log_the_excepthook_is_unchanged(start_script):
    script = "import sys, ddpjob\nhook = sys.excepthook\nddpjob.progress(1)\nassert sys.excepthook is hook\n"
    process = start_script(script)
    assert process.communicate(timeout=30) == ("", "")


# ---- several launchers in one container ----------------------------------------------------------------------------

FAILS = "import ddpjob\nddpjob.progress(1)\nraise ValueError('boom')\n"
WORKS = "import ddpjob\nddpjob.progress(1)\n"


def ends(start_script: Any, script: str, **environ: Any) -> int:
    process = start_script(script, **environ)
    process.communicate(timeout=30)
    return int(process.returncode)


def test_a_rank_that_starts_later_removes_the_failure_of_an_earlier_launcher(log, start_script):
    """A rank of a later launcher must remove the message of an earlier one, as in `torchrun a.py || torchrun b.py`."""
    assert ends(start_script, FAILS, DDPJOB_TERMINATION_LOG=log, RANK=1, WORLD_SIZE=2) == 1
    assert message(log)["rank"] == 1
    assert ends(start_script, WORKS, DDPJOB_TERMINATION_LOG=log, RANK=0, WORLD_SIZE=2) == 0
    assert log.read_bytes() == b""


def test_a_rank_of_the_same_launcher_keeps_the_failure_of_another_rank(log, start_script, tmp_path):
    """A rank that starts late must not remove the message of another rank of the same launcher."""
    go = tmp_path / "go"
    waits = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
    slow = start_script(waits + WORKS, DDPJOB_TERMINATION_LOG=log, RANK=0, WORLD_SIZE=2)
    assert ends(start_script, FAILS, DDPJOB_TERMINATION_LOG=log, RANK=1, WORLD_SIZE=2) == 1
    go.touch()
    slow.communicate(timeout=30)
    assert (slow.returncode, message(log)["rank"]) == (0, 1)


def test_the_children_of_a_second_spawn_remove_the_failure_of_the_first(log, start_script):
    """The ranks of a second spawn must remove the message of the first, because the parent has handled that failure."""
    script = (
        "import multiprocessing, ddpjob\n"
        "def rank(fails):\n"
        "    ddpjob.progress(1)\n"
        "    if fails: raise ValueError('boom')\n"
        "if __name__ == '__main__':\n"
        "    for fails in (True, FAILS_AGAIN):\n"
        "        child = multiprocessing.get_context('fork').Process(target=rank, args=(fails,))\n"
        "        child.start()\n"
        "        child.join()\n"
    )
    assert ends(start_script, script.replace("FAILS_AGAIN", "False"), DDPJOB_TERMINATION_LOG=log) == 0
    assert log.read_bytes() == b""
    assert ends(start_script, script.replace("FAILS_AGAIN", "True"), DDPJOB_TERMINATION_LOG=log) == 0
    assert message(log)["exception"] == "ValueError: boom"


def test_a_parent_that_continues_by_itself_removes_the_failure_of_its_children(log, start_script):
    """A parent that trains without its failed children must remove their message."""
    script = (
        "import multiprocessing, ddpjob\n"
        "def rank():\n"
        "    ddpjob.progress(1)\n"
        "    raise ValueError('boom')\n"
        "if __name__ == '__main__':\n"
        "    child = multiprocessing.get_context('fork').Process(target=rank)\n"
        "    child.start()\n"
        "    child.join()\n"
        "    ddpjob.progress(1)\n"
    )
    assert ends(start_script, script, DDPJOB_TERMINATION_LOG=log) == 0
    assert log.read_bytes() == b""


def test_a_message_of_the_script_is_kept_at_a_start(log, start_script):
    log.write_text("my own words")
    assert ends(start_script, WORKS, DDPJOB_TERMINATION_LOG=log) == 0
    assert log.read_text() == "my own words"
