"""ddprun ends everything that its ranks have started, and no process that was running before it."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
from agents import SECONDS_MAX, Launcher
from shell import eventually

STARTS = pytest.mark.parametrize("start", ["--no-preload", "--preload=json"])


class Beside:
    """An entry point `something & exec ddprun …`: its background process, whose pid it records, is ddprun's sibling."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.processes: list[subprocess.Popen[str]] = []

    def start(
        self, siblings: str, *words: object, prefix: tuple[str, ...] = (), python: str = sys.executable
    ) -> subprocess.Popen[str]:
        ddprun = " ".join([python, "-m", "ddprun", *map(str, words)])
        started = subprocess.Popen(
            [*prefix, "sh", "-c", f"{siblings}\nexec {ddprun}"],
            cwd=self.launcher.folder,
            env=self.launcher.env,
            stdin=subprocess.DEVNULL,
            stdout=(self.launcher.folder / "out").open("w"),  # not a pipe, because siblings would hold it open
            stderr=(self.launcher.folder / "err").open("w"),
            text=True,
        )
        self.processes.append(started)
        return started

    def pid(self, name: str) -> int:
        path = self.launcher.folder / name
        eventually(lambda: path.exists() and path.read_text().endswith("\n"))
        return int(path.read_text())

    def lives(self, name: str) -> bool:
        try:
            return psutil.Process(self.pid(name)).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    @property
    def err(self) -> str:
        return (self.launcher.folder / "err").read_text()


@pytest.fixture
def beside(launcher: Launcher) -> Iterator[Beside]:
    found = Beside(launcher)
    yield found
    for process in found.processes:
        process.kill()
        process.wait()
    for pid_file in launcher.folder.glob("*.pid"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid_file.read_text()), signal.SIGKILL)
    eventually(lambda: not launcher.marked())


def forget_what_kill_9_leaves(launcher: Launcher) -> None:
    """Remove the folders that killed agents have left, because the fixture checks that none is left."""
    for folder in (launcher.folder / "tmp").glob("ddprun_*"):
        shutil.rmtree(folder)


FAILS_ONCE = """
    import os, pathlib, signal, time
    def alive(name):
        try: os.kill(int(pathlib.Path(name).read_text()), 0); return True
        except OSError: return False
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        {before}
        raise SystemExit(3)
    {after}
"""


@STARTS
def test_a_process_running_before_survives_a_restart_and_the_end(beside, launcher, start):
    """A process that was running before, as in `tensorboard & exec ddprun …`, must survive restarts and the end."""
    script = launcher.script(FAILS_ONCE.format(before="pass", after="assert alive('sibling.pid')"))
    run = beside.start("sleep 1000 &\necho $! > sibling.pid", start, "--nproc", 2, script)
    assert run.wait(SECONDS_MAX) == 0, beside.err
    assert beside.lives("sibling.pid")


@STARTS
def test_later_children_of_a_process_running_before_survive_too(beside: Beside, launcher: Launcher, start: str) -> None:
    """Later children of such a process, such as tensorboard's data server, must survive, too."""
    sibling = """
        (until test -e go; do sleep 0.02; done
         sleep 1000 & echo $! > child.pid
         (env -i setsid sleep 1000 & echo $! > orphan.pid)
         exec sleep 1000) &
        echo $! > sibling.pid"""
    script = launcher.script(
        FAILS_ONCE.format(
            before="open('go', 'w').close()\n        while not os.path.exists('orphan.pid'): time.sleep(0.02)",
            after="assert alive('sibling.pid') and alive('child.pid') and alive('orphan.pid')",
        )
    )
    run = beside.start(sibling, start, script)
    assert run.wait(SECONDS_MAX) == 0, beside.err
    assert all(beside.lives(f"{name}.pid") for name in ("sibling", "child", "orphan"))


@STARTS
@pytest.mark.parametrize("siblings", ["true", "sleep 1000 & echo $! > sibling.pid"], ids=["alone", "beside"])
def test_under_nohup_a_closed_terminal_stops_nothing(beside, launcher, start, siblings):
    """A training started with `nohup ddprun … &` must continue after logout."""
    script = launcher.script(
        """
        import os, time
        open("up", "w").close()
        while not os.path.exists("go"): time.sleep(0.02)
        time.sleep(0.3)  # in which the signal would end it
        """
    )
    run = beside.start(f"{siblings}\ntrap '' HUP", start, script)
    eventually((launcher.folder / "up").exists)
    run.send_signal(signal.SIGHUP)
    (launcher.folder / "go").touch()
    assert run.wait(SECONDS_MAX) == 0, beside.err


@STARTS
@pytest.mark.parametrize("siblings", ["true", "sleep 1000 & echo $! > sibling.pid"], ids=["alone", "beside"])
def test_a_daemon_of_a_rank_is_ended_before_the_next_generation_however_it_hides(beside, launcher, start, siblings):
    """A daemon of a rank must end before the next generation, however it hides: it could overwrite the checkpoint."""
    daemon = (
        "import subprocess, sys\n        subprocess.run(['sh', '-c', "
        "'(env -i setsid setsid sleep 1000 & echo $! > daemon.txt)'], check=True)"
    )
    script = launcher.script(FAILS_ONCE.format(before=daemon, after="assert not alive('daemon.txt')"))
    run = beside.start(siblings, start, script)
    assert run.wait(SECONDS_MAX) == 0, beside.err


def test_the_started_process_forwards_signals_and_exits_with_the_code(beside: Beside, launcher: Launcher) -> None:
    """A signal such as a kubelet's SIGTERM must reach the ranks, and ddprun must exit with their code."""
    script = launcher.script(
        """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), open("saved", "w").close(), sys.exit(75)))
        open("ready", "w").close()
        time.sleep(1000)
        """
    )
    run = beside.start("sleep 1000 &\necho $! > sibling.pid", "--no-preload", script)
    eventually((launcher.folder / "ready").exists)
    run.send_signal(signal.SIGTERM)
    assert run.wait(SECONDS_MAX) == 75
    assert (launcher.folder / "saved").exists()
    assert beside.lives("sibling.pid")


@pytest.mark.parametrize("siblings", ["true", "sleep 1000 & echo $! > sibling.pid"], ids=["alone", "beside"])
def test_ddprun_exits_with_its_ranks_even_if_its_parent_ignores_sigchld(beside, launcher, siblings):
    """ddprun must exit with its ranks even if SIGCHLD is ignored: the kernel then reports no ended children."""
    script = launcher.script("open('trained', 'w')")
    # Python ignores SIGCHLD here, because `trap '' CHLD` has no effect in sh.
    ignores = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    python = f"{sys.executable} -c '{ignores}; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])'"
    started = beside.start(siblings, "--no-preload", script, python=python)
    assert started.wait(SECONDS_MAX) == 0, beside.err
    assert (launcher.folder / "trained").exists()


def test_ranks_get_one_ctrl_c_at_a_terminal_only_once(beside: Beside, launcher: Launcher) -> None:
    """At a terminal, ranks must get one Ctrl-C only once: a second SIGINT would interrupt their save."""
    script = launcher.script(
        """
        import signal, sys, time
        signal.signal(signal.SIGINT, lambda *_: (time.sleep(0.5), open("saved", "w").close(), sys.exit(75)))
        open("ready", "w").close()
        time.sleep(1000)
        """
    )
    run = beside.start("setsid sleep 1000 &\necho $! > sibling.pid", "--no-preload", script, prefix=("setsid",))
    eventually((launcher.folder / "ready").exists)
    os.killpg(os.getpgid(run.pid), signal.SIGINT)
    assert run.wait(SECONDS_MAX) == 75
    assert (launcher.folder / "saved").exists()


def test_kill_9_of_the_started_process_ends_the_ranks(beside: Beside, launcher: Launcher) -> None:
    """If the started process gets SIGKILL, its ranks must end and not continue to train unnoticed."""
    script = launcher.script("import os, time; open('rank.txt', 'w').write(f'{os.getpid()}\\n'); time.sleep(1000)")
    run = beside.start("sleep 1000 &\necho $! > sibling.pid", "--no-preload", script)
    rank = beside.pid("rank.txt")
    run.kill()
    run.wait()
    eventually(lambda: not psutil.pid_exists(rank) or psutil.Process(rank).status() == psutil.STATUS_ZOMBIE)
    assert beside.lives("sibling.pid")
    forget_what_kill_9_leaves(launcher)


def test_a_killed_agent_is_reported_by_its_signal(beside: Beside, launcher: Launcher) -> None:
    """A pod whose agent was killed for its memory must not count as completed."""
    script = launcher.script("import time; open('ready', 'w').close(); time.sleep(1000)")
    run = beside.start("sleep 1000 &\necho $! > sibling.pid", "--no-preload", script)
    eventually((launcher.folder / "ready").exists)
    agent = next(p for p in psutil.Process(run.pid).children() if p.name() != "sleep")
    agent.kill()
    assert run.wait(SECONDS_MAX) == 137
    forget_what_kill_9_leaves(launcher)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make a PID namespace everywhere")
def test_as_pid_1_of_a_container_ddprun_spares_processes_started_by_exec(beside: Beside, launcher: Launcher) -> None:
    """As PID 1, ddprun must spare processes of `kubectl exec`, such as `sh -c 'py-spy record … &'`, which become its
    children."""
    namespace = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    script = launcher.script(
        FAILS_ONCE.format(
            before="open('go', 'w').close()\n        while not os.path.exists('orphan'): time.sleep(0.02)",
            after="assert os.getppid() != 1 and alive('orphan'); open('seen', 'w').close()",
        )
    )
    run = beside.start("true", "--no-preload", script, prefix=namespace)
    eventually((launcher.folder / "go").exists)
    (first,) = psutil.Process(run.pid).children()
    enter = ["nsenter", f"--target={first.pid}", "--pid", "--mount"]
    subprocess.run(
        [*enter, "sh", "-c", f"cd {launcher.folder}; (sleep 1000 & echo $! > part); mv part orphan"], check=True
    )
    assert run.wait(SECONDS_MAX) == 0, beside.err
    assert (launcher.folder / "seen").exists()


def test_ddprun_stays_one_process_if_no_other_process_was_running(launcher: Launcher) -> None:
    """ddprun must stay one process if no other process was running: a second one would cost memory in each pod."""
    script = launcher.script("import time; open('ready', 'w').close(); time.sleep(1000)")
    run = launcher.ddprun("--no-preload", script)
    eventually((launcher.folder / "ready").exists)
    below = psutil.Process(run.pid).children(recursive=True)
    assert len(below) == 1
    run.send_signal(signal.SIGTERM)
    run.communicate(timeout=SECONDS_MAX)
