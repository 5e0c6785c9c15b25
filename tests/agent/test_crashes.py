"""If a rank is killed by its own signal, the job reports the line of the script."""

import json
from pathlib import Path

import pytest
from agents import Launcher

# C++ that aborts in its own thread, which Python does not know, as in gloo and NCCL.
ABORTS_IN_C = """
import ctypes, time
libc = ctypes.CDLL(None)
def wait(*thread):
    libc.pthread_create(*thread); time.sleep(60)
wait(ctypes.byref(ctypes.c_ulong()), None, ctypes.cast(libc.abort, ctypes.c_void_p), None)
"""
SEGFAULTS = """
import ctypes, os, time
def inner():
    ctypes.string_at(0)
if os.environ["RANK"] == "1":
    inner()
time.sleep(60)
"""


def message(launcher: Launcher) -> dict[str, object]:
    found: dict[str, object] = json.loads((launcher.folder / "termination.json").read_text())
    return found


def test_a_segmentation_fault_is_reported_with_its_line_and_stack(launcher: Launcher) -> None:
    """A segmentation fault must be reported with line and stack: torchrun only names the signal."""
    script = launcher.script(SEGFAULTS)
    done = launcher.done("--preload=json", "--nproc=2", "--max-restarts=0", script)
    assert "ddprun: rank 1 was killed by SIGSEGV in train.py:4; no restarts left (--max-restarts 0)\n" in done.stderr
    header = "ddprun: calls of rank 1 when SIGSEGV killed it, the most recent last:\n"
    calls = f'  File "{script}", line 6, in <module>\n  File "{script}", line 4, in inner\n'
    assert header + calls in done.stderr
    assert message(launcher)["where"] == "train.py:4"
    assert done.returncode == 139


def test_an_abort_in_a_cpp_thread_is_reported_with_the_current_line_of_the_script(launcher: Launcher) -> None:
    done = launcher.done("--preload=json", "--max-restarts=0", launcher.script(ABORTS_IN_C))
    assert "ddprun: rank 0 was killed by SIGABRT in train.py:5; no restarts left (--max-restarts 0)\n" in done.stderr


@pytest.mark.parametrize("tee", ["--tee=3", "--redirects=3"])
def test_the_stack_of_a_crash_is_in_the_stderr_of_the_rank_and_leaves_no_other_file(launcher, tee):
    logs = launcher.folder / "logs"
    done = launcher.done("--preload=json", "--max-restarts=0", "--log-dir", logs, tee, launcher.script(ABORTS_IN_C))
    [run] = logs.iterdir()
    assert "line 5, in wait\n" in (run / "attempt_0/0/stderr.log").read_text()
    assert ("line 5, in wait\n" in done.stderr) == tee.startswith("--tee"), "as every line of the rank"
    assert files(run) == ["attempt_0/0/stderr.log", "attempt_0/0/stdout.log"]


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_script_keeps_its_own_faulthandler(launcher: Launcher) -> None:
    script = launcher.script("import faulthandler\nfaulthandler.enable()\n" + ABORTS_IN_C)
    done = launcher.done("--preload=json", "--max-restarts=0", script)
    assert "Fatal Python error: Aborted" in done.stderr
    assert "ddprun: rank 0 was killed by SIGABRT; no restarts" in done.stderr


def test_a_crashing_child_does_not_count_as_the_rank(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import ctypes, os, signal
        pid = os.fork()
        if pid == 0:
            ctypes.string_at(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGSEGV
        os.kill(os.getpid(), signal.SIGUSR2)
        """
    )
    done = launcher.done("--preload=json", "--max-restarts=0", script)
    assert "ddprun: rank 0 was killed by SIGUSR2; no restarts left (--max-restarts 0)\n" in done.stderr
    assert "most recent" not in done.stderr


def test_a_crash_writes_into_no_file_of_a_script_that_closed_all_descriptors(launcher: Launcher) -> None:
    """A crash must not write into a script's file: one opened after all descriptors were closed may have its number."""
    script = launcher.script(
        """
        import os, signal
        os.closerange(3, 256)
        files = [open("checkpoint", "w") for _ in range(20)]
        os.kill(os.getpid(), signal.SIGABRT)
        """
    )
    launcher.done("--preload=json", "--max-restarts=0", script)
    assert (launcher.folder / "checkpoint").read_text() == ""


def test_lines_of_ranks_that_print_at_the_same_time_do_not_mix(launcher: Launcher) -> None:
    """Lines of ranks that print at the same time must not mix, although under `python -u` a print is two writes."""
    script = launcher.script(
        """
        import os, sys
        for i in range(2000):
            print("rank", os.environ["RANK"], "step", i)
            print("rank", os.environ["RANK"], "warns", i, file=sys.stderr)
        """
    )
    done = launcher.done("--preload=json", "--nproc=4", script)
    for text, word in ((done.stdout, "step"), (done.stderr, "warns")):
        expected = sorted(f"rank {rank} {word} {i}" for rank in range(4) for i in range(2000))
        assert sorted(text.splitlines()) == expected
