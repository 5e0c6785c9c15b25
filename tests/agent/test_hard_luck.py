"""Failures of the machine under an agent: no free process, a full disk, a rank that SIGKILL cannot end. The job
continues or ends with the real reason, and the script is not blamed."""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from agents import Launcher, finish
from free_port import free_port
from shell import eventually

from ddpjob import own_files
from ddprun import ending, logs, node, processes
from ddprun.heartbeats import Heartbeats
from ddprun.options import parse

LEFT = json.dumps({"application": 3, "infrastructure": 100, "stall": 10})
LOST_AFTER = "restart 1: node 1 is lost, and a new pod has replaced it"
UP = 'open("up-" + os.environ["RANK"] + "-" + os.environ["TORCHELASTIC_RESTART_COUNT"], "w").close()'
WAITS = 'while not os.path.exists("enough"): time.sleep(0.01)'


def is_up(launcher: Launcher, rank: int, life: int = 0) -> bool:
    return (launcher.folder / f"up-{rank}-{life}").exists()


class Pair:
    """The agents of two nodes, for which an operator creates new pods."""

    def __init__(self, launcher: Launcher, script: str, *words: object, module: str = "ddprun") -> None:
        self.launcher = launcher
        self._words = [*words, launcher.script(script)]
        self._group = ["--nnodes", 2, "--master-port", free_port(), "--rdzv-id", launcher.mark, "--no-preload"]
        self.agents = [self.start(node, module=module) for node in (0, 1)]
        eventually(lambda: is_up(launcher, 0) and is_up(launcher, 1))

    def start(self, node: int, replacement: int = 0, **env: str) -> subprocess.Popen[str]:
        """Start a pod of the node."""
        own = {"DDPJOB_REPLACEMENT": str(replacement), "DDPJOB_RESTARTS_LEFT": LEFT, "NODE": str(node)}
        own["DDPJOB_TERMINATION_LOG"] = str(self.launcher.folder / f"termination-{node}")
        return self.launcher.ddprun(*self._group, "--node-rank", node, *self._words, **own, **env)

    def message(self, node: int) -> Any:
        """Return the termination message of the pod of a node."""
        with contextlib.suppress(FileNotFoundError):
            return json.loads((self.launcher.folder / f"termination-{node}").read_text())
        return None


# ---- failures that stopping the ranks causes ---------------------------------------------------------------

RAISES_WHEN_TOLD = f"""
import os, signal, time
from ddpjob.reporting import termination
def told(*_): raise RuntimeError("DataLoader worker exited unexpectedly")
signal.signal(signal.SIGTERM, told)
termination.install()
{UP}
{WAITS}
"""


def test_a_complaint_of_a_stopped_rank_is_not_the_cause_of_the_failure(launcher: Launcher) -> None:
    """If ranks only lost their peer because a pod was preempted, backoffLimit must not count this as a failure."""
    pair = Pair(launcher, RAISES_WHEN_TOLD)
    pair.agents[1].kill()
    pair.agents[1].communicate()
    pair.agents[1] = pair.start(1, 1)
    eventually(lambda: is_up(launcher, 0, 1) and is_up(launcher, 1, 1))
    (launcher.folder / "enough").touch()
    done = [finish(agent) for agent in pair.agents]
    assert [d.returncode for d in done] == [0, 0]
    assert LOST_AFTER in done[0].stderr
    assert pair.message(0) is None, "it has charged nothing"
    launcher.forget_killed()


IGNORES_SIGTERM = f"""
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: open("told", "w").close())
{UP}
time.sleep(1000)
"""


def test_a_sigterm_during_a_stop_does_not_make_our_own_kill_the_cause(launcher: Launcher) -> None:
    pair = Pair(launcher, IGNORES_SIGTERM, "--shutdown-timeout=1")
    pair.agents[1].kill()
    pair.agents[1].communicate()
    eventually((launcher.folder / "told").exists)
    pair.agents[0].terminate()  # during the 0.1 s between SIGTERM and SIGKILL to the ranks
    done = finish(pair.agents[0])
    assert "charged to application" not in done.stderr
    assert "agent" not in (pair.message(0) or {}), "it has charged nothing"
    launcher.forget_killed()


def test_a_group_that_is_stopped_later_does_not_report_a_failure_it_recovered_from(launcher: Launcher) -> None:
    """A group that gets SIGTERM must not be blamed for a failure from which it has already recovered."""
    script = launcher.script(f"import os\n{UP}\nraise SystemExit(3)")
    often = LEFT.replace("}", ', "inARow": 7}')  # after seven failures in a row, the next restart waits a minute
    agent = launcher.ddprun("--no-preload", script, DDPJOB_RESTARTS_LEFT=often)
    eventually(lambda: is_up(launcher, 0) and not psutil.Process(agent.pid).children())
    agent.terminate()
    done = finish(agent)
    assert done.returncode == 143
    message = json.loads((launcher.folder / "termination.json").read_text())
    assert set(message) == {"ddpjob", "agent"}, "what it has charged, and no failure"


def test_pressing_ctrl_c_twice_ends_the_job_and_ranks_that_ignore_it(launcher: Launcher) -> None:
    script = f"import os, signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n{UP}\ntime.sleep(1000)"
    agent = launcher.ddprun("--no-preload", launcher.script(script))
    eventually(lambda: is_up(launcher, 0))
    agent.send_signal(signal.SIGINT)
    eventually(lambda: _signals_are_read(agent.pid))
    agent.send_signal(signal.SIGINT)
    assert finish(agent, 20).returncode == 137


def _signals_are_read(pid: int) -> bool:
    """True if no signal is pending and the agent waits in its poll."""
    status = Path(f"/proc/{pid}/status").read_text()
    return "ShdPnd:\t0000000000000000" in status and "State:\tS" in status


TELLS_AT_EXIT = """
import atexit
from ddpjob.reporting import termination
atexit.register(lambda: termination.tell(OSError("the last snapshot was not written")))
"""


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_rank_that_reports_an_error_and_exits_with_0_has_succeeded(launcher: Launcher, nodes: int) -> None:
    """A rank that reports an error and exits with 0 must count as succeeded, or its agent waits for ever."""
    script = launcher.script(TELLS_AT_EXIT)
    agents = launcher.nodes(nodes, "--no-preload", script)
    assert [finish(agent, 20).returncode for agent in agents] == [0] * nodes


# ---- ranks that cannot be ended ----------------------------------------------------------------------------

# The ranks of node 1 cannot be ended, as if they waited in the kernel.
HELD = """
import os
from ddprun import ending, main, node, processes
if os.environ["NODE"] == "1":
    ending.HELD_SECONDS = node.LINGERING_SECONDS = 0.5
    processes.send = lambda *_: None
main()
"""
FAILS_ON_NODE_0 = f"""
import os, time
{UP}
while os.environ["RANK"] == "0" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.path.exists("up-1-0"): raise SystemExit(3)
{WAITS}
"""


def test_a_rank_that_survives_sigkill_costs_its_pod_and_not_the_job(launcher: Launcher) -> None:
    """A rank that survives SIGKILL must cost its pod and not the job, and a message must say so."""
    launcher.script(HELD, "held.py")
    pair = Pair(launcher, FAILS_ON_NODE_0, module="held")
    done = finish(pair.agents[1], 20)
    assert done.returncode == 75
    assert "a rank does not end after SIGKILL" in done.stderr
    assert not (pair.message(1) or {}).get("ended"), "this pod alone is replaced"
    pair.agents[1] = pair.start(1, 1)
    eventually(lambda: is_up(launcher, 0, 1) and is_up(launcher, 1, 1))
    (launcher.folder / "enough").touch()
    assert [finish(agent).returncode for agent in pair.agents] == [0, 0]


def test_the_minute_after_sigkill_does_not_count_while_agent_and_rank_are_suspended(tmp_path: Path) -> None:
    options = parse([f"--log-dir={tmp_path}", "train.py"], {})  # words after the script are its own arguments
    agent = node.LocalRanks(options, {}, logs.LogFolder(options), None)
    rank = agent._pids[0] = processes.start(["sleep", "1000"], {})
    try:
        agent.stop(signal.SIGTERM, 0.1, now=0.0)
        agent.tick(1000.0)
        assert not agent.ending.outlives_sigkill(1000.1)
        assert agent.ending.outlives_sigkill(1000.1 + ending.HELD_SECONDS)
    finally:
        os.waitpid(rank, 0)


# ---- exhausted resources -----------------------------------------------------------------------------------

# The n-th fork fails, as if a cgroup allowed no more processes.
NO_FORK = """
import errno, os
count, fork = 0, os.fork
def failing():
    global count
    count += 1
    if str(count) in os.environ["FAILS"].split(","):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    return fork()
os.fork = failing
from ddprun import main
main()
"""


def refuse(*_: object) -> Any:
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


@pytest.mark.parametrize(("words", "files"), [([], 4), (["--duplicate-stdout-filters=loss"], 3)])
def test_a_failed_start_of_heartbeats_or_log_tails_leaks_no_descriptor(monkeypatch, tmp_path, words, files):
    """A failed start must leak no descriptor, because it is retried. With filters each tail has two files."""
    folder = logs.LogFolder(parse(["--nproc=3", "--tee=3", *words, "--log-dir", str(tmp_path), "train.py"], {}))
    before, opened, really_open = os.listdir("/proc/self/fd"), [], os.open

    def open_some(*args: Any, **more: Any) -> int:
        opened.append(args if len(opened) < files else refuse())
        return really_open(*args, **more)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pipe", refuse)
        patched.setattr(os, "open", open_some)
        with contextlib.suppress(BlockingIOError):
            Heartbeats(1)
        with contextlib.suppress(BlockingIOError):
            folder.prepare("0", range(3))
    folder.copy_last()
    assert len(opened) == files
    assert os.listdir("/proc/self/fd") == before


def folder_with_tail(tmp_path: Path, printed: int, *log_dir: str) -> tuple[logs.LogFolder, int]:
    """Return the log folder of a rank that has printed this many bytes, and the pipe from which its console reads."""
    (tmp_path / "printed").write_bytes(b"x" * 99 + b"\n" + b"x" * (printed - 100))
    folder = logs.LogFolder(parse(["--tee=3", *log_dir, "train.py"], {}))
    console, write_end = os.pipe()
    folder.tails = [logs._Tail(str(tmp_path / "printed"), b"", write_end, "", [])]
    return folder, console


def test_a_slow_console_still_gets_the_end_of_the_output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A slow console must get the last lines of the output, because they explain why a rank has failed."""
    monkeypatch.setattr(logs, "LAST_LINES_SECONDS", 0.3)
    folder, console = folder_with_tail(tmp_path, 1 << 20, "--log-dir", str(tmp_path / "logs"))
    seen = bytearray()

    def read() -> None:
        while len(seen) < 1 << 20:
            time.sleep(0.02)
            seen.extend(os.read(console, 1 << 14))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    assert folder.copy_last()
    reader.join(10)
    assert len(seen) == 1 << 20


@pytest.mark.parametrize("log_dir", ["logs", "", os.devnull])
def test_a_console_that_nobody_reads_is_not_waited_for_and_the_rest_is_in_the_named_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log_dir: str
) -> None:
    """If a message names the folder with the rest of the output, ddprun must not remove this folder."""
    monkeypatch.setattr(logs, "LAST_LINES_SECONDS", 0.3)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    folder, _ = folder_with_tail(tmp_path, 1 << 20, *(["--log-dir", log_dir] if log_dir else []))
    began = time.monotonic()
    assert not folder.copy_last()
    assert time.monotonic() - began < 5
    said = folder.rest
    folder.remove()
    is_lost = log_dir == os.devnull
    assert said == ("lost, because --log-dir is /dev/null" if is_lost else f"only in {folder.path}")
    assert os.path.exists(folder.path) != is_lost


@pytest.mark.parametrize("fails", ["1", "2", "1,2"])
def test_a_rank_that_cannot_be_forked_is_started_later_without_a_charge(launcher: Launcher, fails: str) -> None:
    launcher.script(NO_FORK, "nofork.py")
    agent = launcher.ddprun("--no-preload", "--nproc=2", launcher.script("pass"), module="nofork", FAILS=fails)
    done = finish(agent)
    assert done.returncode == 0
    assert "not started" in done.stderr
    assert "charged to infrastructure" in done.stderr


def test_a_report_that_cannot_be_forked_does_not_end_the_training(launcher: Launcher) -> None:
    """A report that cannot be forked must not end the training. Fork 1 starts the rank; forks 2 to 4 fail."""
    launcher.script(NO_FORK, "nofork.py")
    script = launcher.script(
        'import os, sys, time\nif os.environ["TORCHELASTIC_RESTART_COUNT"] == "0": sys.exit(3)\ntime.sleep(1)'
    )
    where = {"DDPJOB_STATUS_URL": "http://127.0.0.1:9/v1/status", "FAILS": "2,3,4"}
    done = finish(launcher.ddprun("--no-preload", script, module="nofork", **where))
    assert done.returncode == 0
    assert "no process for it: Resource temporarily unavailable" in done.stderr


def test_without_a_process_for_the_fork_server_ranks_start_without_it(launcher: Launcher) -> None:
    launcher.script(NO_FORK, "nofork.py")
    done = finish(launcher.ddprun("--preload=json", launcher.script("pass"), module="nofork", FAILS="1"))
    assert done.returncode == 0
    assert "no fork server: " in done.stderr


# The first allocation of shared memory for heartbeats fails, as if no file descriptor were left.
NO_MEMORY = """
import errno, os
make = os.memfd_create
def refuse(name, *flags):
    if name != "ddprun-beats":
        return make(name, *flags)
    os.memfd_create = make
    raise OSError(errno.EMFILE, "Too many open files")
os.memfd_create = refuse
from ddprun import main
main()
"""


def test_without_a_descriptor_for_the_watchdog_ranks_start_later(launcher: Launcher) -> None:
    launcher.script(NO_MEMORY, "nomemory.py")
    done = finish(launcher.ddprun("--no-preload", launcher.script("pass"), module="nomemory"))
    assert done.returncode == 0
    assert "not started: [Errno 24] Too many open files" in done.stderr
    assert "charged to infrastructure" in done.stderr


def test_without_a_free_port_node_0_gives_up_without_a_charge(launcher: Launcher) -> None:
    launcher.script(
        """
        import errno
        from ddprun import main, ports
        def refuse(): raise OSError(errno.EMFILE, "Too many open files")
        ports.hold = refuse
        main()
        """,
        "noport.py",
    )
    script = launcher.script("pass")
    group = ["--nnodes=2", f"--master-port={free_port()}", f"--rdzv-id={launcher.mark}", "--no-preload"]
    agents = [launcher.ddprun(*group, "--node-rank", k, script, module="noport") for k in (0, 1)]
    done = finish(agents[0])
    agents[1].terminate()
    finish(agents[1])
    assert done.returncode == 75
    assert "no port for rank 0" in done.stderr


def test_an_emptied_folder_is_created_again(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import os, shutil
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            (folder,) = os.listdir(os.environ["TMPDIR"])
            shutil.rmtree(os.path.join(os.environ["TMPDIR"], folder))
            raise SystemExit(3)
        """
    )
    assert launcher.done("--no-preload", "--tee=3", script).returncode == 0


def test_a_full_disk_loses_only_the_filtered_copy_of_the_output(tmp_path, monkeypatch):
    source, console = tmp_path / "rank.log", tmp_path / "console"
    really_open = own_files.open_file
    full = {str(tmp_path / "filtered"): "/dev/full"}
    monkeypatch.setattr(
        own_files,
        "open_file",
        lambda path, flags, *more: os.open(full[path], flags) if path in full else really_open(path, flags, *more),
    )
    source.write_text("loss 1\nloss 2\n")
    with console.open("w") as out:
        tail = logs._Tail(str(source), b"[0]:", out.fileno(), str(tmp_path / "filtered"), [b"loss"])
        assert tail.copy(last=True)
        tail.close()
    assert console.read_text() == "[0]:loss 1\n[0]:loss 2\n"


def test_many_lines_are_copied_in_parts_between_which_signals_are_handled(tmp_path: Path) -> None:
    source = tmp_path / "rank.log"
    source.write_bytes(b"x" * 99 + b"\n" * (logs.CHUNK * logs.CHUNKS_MAX))
    with open(os.devnull, "w") as out:
        tail = logs._Tail(str(source), b"", out.fileno(), "", [])
        turns = [tail.copy(chunks=logs.CHUNKS_MAX) for _ in range(2)]
        tail.close()
    assert turns == [None, True], "not all, all"


# ---- time limits, streams and messages ---------------------------------------------------------------------


def test_waits_of_more_than_a_month_are_split(launcher: Launcher) -> None:
    """A wait of more than a month must be split, because poll() accepts at most 24 days."""
    script = launcher.script(IGNORES_SIGTERM.replace("time.sleep(1000)", WAITS))
    agent = launcher.ddprun("--no-preload", "--shutdown-timeout=3000000", script)
    eventually(lambda: is_up(launcher, 0))
    agent.terminate()
    eventually(lambda: _signals_are_read(agent.pid))
    (launcher.folder / "enough").touch()
    assert finish(agent).returncode == 0


def test_an_empty_tmpdir_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", "")
    made: list[str] = []
    monkeypatch.setattr(os, "makedirs", lambda path, **_: made.append(path))
    monkeypatch.setattr(os, "mkdir", lambda *_: None)
    logs.LogFolder(parse(["train.py"], {}))
    assert made == ["/tmp"]


@pytest.mark.parametrize("start", ["--no-preload", "--preload=json"])
@pytest.mark.parametrize("closed", [">&- 2>&-", "<&- >&- 2>&-"])
def test_a_job_without_standard_streams_exits_with_its_own_code(launcher: Launcher, start: str, closed: str) -> None:
    """A job without stdin, stdout and stderr must exit with its own code. No socket may be used as stdout."""
    command = [sys.executable, "-m", "ddprun", start, str(launcher.script("print('trains', flush=True)"))]
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", *command]
    assert subprocess.run(command, cwd=launcher.folder, env=launcher.env, check=False, timeout=60).returncode == 0


def test_invalid_numbers_in_the_message_of_a_rank_do_not_end_the_leader(launcher: Launcher) -> None:
    script = """
    import json, os
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        words = {"rank": 1, "exitCode": 3, "step": 1e999, "time": 1e999, "exception": "\\u20ac" * 5000}
        open(os.environ["DDPJOB_TERMINATION_LOG"], "w").write(json.dumps(words))
        raise SystemExit(3)
    """
    agents = launcher.nodes(2, "--no-preload", launcher.script(script))
    done = [finish(agent, 40) for agent in agents]
    assert [d.returncode for d in done] == [0, 0]
