"""A stop reaches training processes first and their children afterwards. In the other order nothing is saved."""

import signal
import subprocess
import sys
import time

import pytest
from agents import Launcher, finish

STARTS = pytest.mark.parametrize("start", ["--no-preload", "--preload=json"])

# The helper behaves like a DataLoader worker at a stop: the rank fails if the helper ends first.
RANK_WITH_A_HELPER = """
import os, signal, subprocess, sys, time
HELPER = '''
import os, signal, sys, time
def end(*_):
    print("helper ends", flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, end)
os.write(1, b"ready" + bytes([10]))  # print() could be interrupted by the handler
time.sleep(100)
'''
helper = subprocess.Popen([sys.executable, "-c", HELPER])
def save(*_):
    time.sleep(0.3)
    print("saved" if helper.poll() is None else "lost its helper", flush=True)
    os._exit(75)
signal.signal(signal.SIGTERM, save)
while True: time.sleep(0.05)
"""


@STARTS
def test_processes_started_by_a_rank_get_sigterm_only_after_it_has_ended(launcher: Launcher, start: str) -> None:
    """Processes that a rank has started must get SIGTERM only after its end: a DataLoader raises if a worker ends."""
    done = told_to_stop(launcher.ddprun(start, launcher.script(RANK_WITH_A_HELPER)))
    assert (done.stdout, done.returncode) == ("saved\nhelper ends\n", 75)


def test_each_rank_of_a_node_is_signalled_without_its_helpers(launcher: Launcher) -> None:
    done = told_to_stop(launcher.ddprun("--no-preload", "--nproc", 2, launcher.script(RANK_WITH_A_HELPER)), ready=2)
    assert done.stdout.splitlines() == ["saved"] * 2 + ["helper ends"] * 2


def test_helpers_end_after_their_rank_if_another_rank_fails(launcher: Launcher) -> None:
    script = launcher.script(
        "import os, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    while not os.path.exists('go'): time.sleep(0.01)\n"
        "    raise SystemExit(3)\n" + RANK_WITH_A_HELPER
    )
    agent = launcher.ddprun("--no-preload", "--nproc", 2, "--max-restarts", 0, script, DDPJOB_RESTART_GRACE="20")
    wait_for(agent, "ready")
    (launcher.folder / "go").touch()
    assert finish(agent).stdout.splitlines() == ["saved", "helper ends"]


IGNORES = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(100)"
LEAVES_A_HELPER = f"""
import os, signal, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {IGNORES!r}], start_new_session=len(sys.argv) > 1)
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), os._exit(75)))
while True: time.sleep(0.05)
"""


@pytest.mark.parametrize("session", [[], ["daemon"]])
def test_a_helper_that_outlives_its_rank_is_killed_after_the_grace(launcher: Launcher, session: list[str]) -> None:
    """A helper that outlives its rank, such as an upload, must be killed when the grace period is over."""
    agent = launcher.ddprun("--no-preload", launcher.script(LEAVES_A_HELPER), *session, PET_SHUTDOWN_TIMEOUT="3")
    wait_for(agent, "ready")
    began = time.monotonic()
    agent.terminate()
    done = finish(agent)
    assert (done.stdout, done.returncode) == ("saved\n", 75)
    assert time.monotonic() - began > 2.9
    assert "the ranks have ended, but processes that they started have not (python" in done.stderr


def test_a_second_ctrl_c_does_not_wait_for_a_helper(launcher: Launcher) -> None:
    script = """
import os, signal, subprocess, sys, time
HELPER = '''
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
sys.stdin.read()
print("the rank has ended", flush=True)
time.sleep(100)
'''
signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
helper = subprocess.Popen([sys.executable, "-c", HELPER], stdin=subprocess.PIPE)
while True: time.sleep(0.05)
"""
    agent = launcher.ddprun("--no-preload", launcher.script(script))
    wait_for(agent, "ready")
    agent.terminate()
    wait_for(agent, "the rank has ended")
    agent.send_signal(signal.SIGINT)
    assert finish(agent, 15).returncode == 75


TRAINS = """
import os, signal, sys, time
def save(*_):
    time.sleep(0.3)
    for _ in range(50): print("saved", flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, save)
os.write(1, b"ready" + bytes([10]))  # print() could be interrupted by the handler
while True: time.sleep(0.05)
"""


@pytest.mark.parametrize("words", ["{0}; true", "({0}; true) | cat", "sh -c '{0}; true' & wait", "exec {0}"])
def test_a_python_process_below_a_shell_gets_the_signal_at_once_and_its_grace(launcher: Launcher, words: str) -> None:
    """Below a shell, which ends by the signal, a Python process must get it at once and its full grace period, and the
    reader of its output must go on."""
    launcher.script(TRAINS)
    agent = launcher.ddprun("--no-python", "sh", "-c", words.format(f"{sys.executable} -u train.py"))
    done = told_to_stop(agent)
    assert done.stdout == "saved\n" * 50


def test_a_shell_without_python_gets_the_signal_with_all_its_children(launcher: Launcher) -> None:
    agent = launcher.ddprun("--no-python", "sh", "-c", "echo ready; sleep 1000; true")
    assert told_to_stop(agent, seconds=15).returncode == 143


SPAWNS = """
import multiprocessing, os, signal, time
def train():
    import ddpjob
    def save(*_):
        time.sleep(0.3)
        print("saved", flush=True)
        os._exit(75)
    signal.signal(signal.SIGTERM, save)
    ddpjob.progress(step=1)
    os.write(1, b"ready" + bytes([10]))  # print() could be interrupted by the handler
    while True: time.sleep(0.05)
if __name__ == "__main__":
    children = [multiprocessing.get_context("spawn").Process(target=train) for _ in range(2)]
    for child in children: child.start()
    for child in children: child.join()
    print("parent ends", flush=True)
"""


def test_training_processes_started_by_a_rank_get_the_signal_at_once_and_it_waits_for_them(launcher):
    done = told_to_stop(launcher.ddprun("--no-preload", launcher.script(SPAWNS)), ready=2)
    assert (done.stdout, done.returncode) == ("saved\nsaved\nparent ends\n", 0)


def told_to_stop(
    agent: subprocess.Popen[str], *, ready: int = 1, seconds: float = 60
) -> subprocess.CompletedProcess[str]:
    """Stop the agent as soon as this many processes are ready; return its later output."""
    for _ in range(ready):
        wait_for(agent, "ready")
    agent.terminate()
    return finish(agent, seconds)


def wait_for(agent: subprocess.Popen[str], line: str) -> None:
    assert agent.stdout.readline() == f"{line}\n"
