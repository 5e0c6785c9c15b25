"""The supervisor of a local node ends everything that the node started, and reports exactly how it ended. Tests find
survivors in /proc by a unique value in their environment, and trust no pid that the tested code reports."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from shell import eventually

from ddpjob_cli.local.processes import node as node_module
from ddpjob_cli.local.processes.node import End, NodeProcess
from ddprun.processes import become_subreaper

PYTHON = [sys.executable, "-I", "-S", "-c"]
TAG = "DDPJOB_TEST_TREE"
BOUND_SECONDS = 15.0  # on an idle machine each test takes less than a second

# A launcher worse than torchrun: two workers in their own sessions, orphaned by a second fork, ignore SIGTERM.
# This launcher exits with 1 when one of its workers has ended.
LAUNCHER = """
import os, select, signal
def worker(number):
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            os.write(1, b"worker%d %d\\n" % (number, os.getpid()))
            signal.pause()
        os._exit(0)
    os.wait()
    os.close(write_end)
    return read_end
if os.fork() == 0:
    signal.pause()
workers = [worker(0), worker(1)]
os.write(1, b"launcher %d\\n" % os.getpid())
select.select(workers, [], [])
raise SystemExit(1)
"""


def alive(tag: str) -> set[int]:
    """Return processes with `tag` in their environment; a zombie has no environment."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if tag.encode() in path.read_bytes():
                found.add(int(path.parent.name))
    return found


@pytest.fixture
def tag() -> Iterator[str]:
    name = uuid.uuid4().hex
    yield name
    for pid in alive(name):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Watch:
    """Follows a node to its end: collects its output and its supervisor's reports."""

    def __init__(self, node: NodeProcess) -> None:
        self.node, self.printed = node, b""
        self.selector = selectors.DefaultSelector()
        self.selector.register(node.output, selectors.EVENT_READ)
        self.selector.register(node.report, selectors.EVENT_READ)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + BOUND_SECONDS
        while not condition():
            ready = self.selector.select(max(0, deadline - time.monotonic()))
            assert ready, f"nothing more came; printed {self.printed!r}, ended {self.node.end}"
            for key, _ in ready:
                self.take(key.fd)

    def take(self, fd: int) -> None:
        if fd == self.node.output:
            data = os.read(fd, 65536)
            self.printed += data
            if not data:
                self.selector.unregister(fd)
        else:
            self.node.handle_report()
            if self.node.end is not None:
                self.selector.unregister(fd)

    def until_printed(self, text: bytes) -> None:
        self.until(lambda: text in self.printed)

    def until_end(self) -> End:
        self.until(lambda: not self.selector.get_map())
        self.selector.close()
        assert self.node.end is not None
        return self.node.end


@pytest.fixture
def started() -> Iterator[Start]:
    watches: list[Watch] = []

    def start(argv: list[str], *, cwd: str = "/", grace_seconds: float = 5, env: dict[str, str] | None = None) -> Watch:
        node = NodeProcess(1, argv, {"PATH": os.environ["PATH"], **(env or {})}, cwd, grace_seconds)
        watches.append(Watch(node))
        return watches[-1]

    yield start
    for watch in watches:
        watch.node.close()


Start = Callable[..., Watch]


# Nothing survives


def test_a_helper_that_outlives_the_trainer_is_ended_before_the_end_is_reported(started: Start, tag: str) -> None:
    watch = started(["sh", "-c", "setsid sleep 1000 & exit 0"], env={TAG: tag})
    watch.until(lambda: watch.node.end is not None)
    assert not alive(tag), "the next attempt would start beside a process of this one"
    assert watch.until_end().code == 0


def test_a_trainer_dies_with_its_supervisor_immediately(started: Start, tag: str) -> None:
    watch = started(["sleep", "1000"], env={TAG: tag})
    watch.until(lambda: watch.node.trainer_pid is not None)
    os.kill(watch.node.pid, signal.SIGKILL)
    eventually(lambda: not alive(tag), BOUND_SECONDS)  # a runner that dies now would leave the trainer behind


def test_closing_a_node_kills_its_remaining_processes(tag: str) -> None:
    node = NodeProcess(1, [*PYTHON, LAUNCHER], {"PATH": os.environ["PATH"], TAG: tag}, "/", 5)
    Watch(node).until_printed(b"launcher")
    node.close()
    assert not alive(tag)


# Stopping


def test_a_stop_lets_the_trainer_save_and_exit_and_is_reported_as_requested(started: Start) -> None:
    script = """
import signal, sys
signal.signal(15, lambda *_: (print("saved"), sys.exit(0)))
print("up", flush=True)
signal.pause()
"""
    watch = started([*PYTHON, script])
    watch.until_printed(b"up")
    watch.node.stop(BOUND_SECONDS)
    end = watch.until_end()
    assert (end.code, end.ended_first) == (0, False)
    assert watch.printed == b"up\nsaved\n"


def test_sigterm_is_sent_only_to_the_first_process_as_by_the_kubelet(started: Start) -> None:
    script = """
import os, signal
if os.fork() == 0:
    signal.signal(15, lambda *_: os.write(1, b"the worker was signalled"))
    os.write(1, b"up"); signal.pause(); signal.pause()
signal.signal(15, lambda *_: os._exit(0))
signal.pause()
"""
    watch = started([*PYTHON, script])
    watch.until_printed(b"up")
    watch.node.stop(BOUND_SECONDS)
    assert not watch.until_end().ended_first
    assert watch.printed == b"up"


IGNORES_SIGTERM = "import signal; signal.signal(15, signal.SIG_IGN); print('up', flush=True); signal.pause()"


@pytest.mark.parametrize("graces", [[0.05], [600, 0.05], [0.05, 600], [600, 0]], ids=str)
def test_a_trainer_that_ignores_sigterm_is_killed_after_the_shortest_given_grace(started, graces):
    watch = started([*PYTHON, IGNORES_SIGTERM])
    watch.until_printed(b"up")
    for grace_seconds in graces:
        watch.node.stop(grace_seconds)
    end = watch.until_end()
    assert (end.code, end.ended_first) == (137, False)


def test_sigterm_to_the_supervisor_stops_the_node_with_the_configured_grace(started: Start) -> None:
    watch = started([*PYTHON, IGNORES_SIGTERM], grace_seconds=0.05)
    watch.until_printed(b"up")
    os.kill(watch.node.pid, signal.SIGTERM)
    end = watch.until_end()
    assert (end.code, end.ended_first) == (137, False)


def test_a_stop_after_the_end_does_not_turn_a_success_into_a_stop(started: Start) -> None:
    watch = started(["true"])
    end = watch.until_end()
    watch.node.stop(1)
    assert watch.node.end == end
    assert (end.code, end.ended_first) == (0, True)


# The end, reported exactly


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 0", 0), ("exit 255", 255), ("ulimit -c 0; kill -SEGV $$", 139), ("kill -TERM 0", 143)],
)
def test_the_reported_exit_code_or_signal_is_that_of_the_trainer(started: Start, script: str, code: int) -> None:
    before = time.time()
    watch = started(["sh", "-c", script])
    end = watch.until_end()
    assert (end.code, end.reason, end.ended_first) == (code, "Error" if code else "Completed", True)
    assert before <= end.time <= time.time()


NO_INTERPRETER = "the file is there: the program in its #! line is not"


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    (tmp_path / "plain.py").write_text("print('not executable')\n")
    for name, first_line in {"lost.sh": "#!/no/such/interpreter\n", "bare.sh": "echo a shell would run this\n"}.items():
        (tmp_path / name).write_text(first_line)
        (tmp_path / name).chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("argv", "code", "sentence"),
    [
        (["trainn.py"], 127, "trainn.py: No such file or directory"),
        (["./no/train.py"], 127, "./no/train.py: No such file or directory"),
        (["./plain.py"], 126, "./plain.py: Permission denied"),
        (["./lost.sh"], 127, f"./lost.sh: No such file or directory ({NO_INTERPRETER})"),
        (["./bare.sh"], 126, "./bare.sh: Exec format error"),
        (["true", "x" * 200_000], 126, "true: Argument list too long"),
        (["true", "nul\0byte"], 126, "embedded null byte"),
    ],
    ids=["missing", "missing with a folder", "not executable", "no interpreter", "no #! line", "too long", "NUL"],
)
def test_a_command_that_cannot_start_is_reported_with_the_exit_code_of_a_shell_and_its_name(
    started: Start, programs: Path, argv: list[str], code: int, sentence: str
) -> None:
    watch = started(argv, cwd=str(programs))
    watch.until(lambda: not watch.selector.get_map())
    assert (watch.node.end.reason, watch.node.end.code, watch.node.end.message) == ("StartError", code, sentence)
    assert watch.node.trainer_pid is None


def test_a_missing_working_folder_is_named(started: Start) -> None:
    end = started(["true"], cwd="/no/such/folder").until_end()
    assert (end.code, end.message) == (127, "/no/such/folder: No such file or directory")


def test_an_error_in_the_supervisor_ends_the_node_and_its_traceback_is_in_the_log(started, tag, monkeypatch):
    program = "from ddpjob_cli.local.processes import supervisor; supervisor.Supervisor.stop = None; supervisor.main()"
    monkeypatch.setattr(node_module, "SUPERVISOR", program)
    watch = started([*PYTHON, LAUNCHER], env={TAG: tag})
    watch.until_printed(b"launcher")
    watch.node.stop(600)
    watch.until(lambda: not watch.selector.get_map())
    assert watch.node.end.message.startswith("the supervisor of node 1 ended with code 1 before its trainer did")
    assert b"'NoneType' object is not callable" in watch.printed
    assert not alive(tag)


# The trainer's environment


def test_the_trainer_has_only_three_descriptors(started: Start) -> None:
    script = """
import os
fds = [fd for fd in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + fd)]
print(sorted(fds), os.readlink("/proc/self/fd/0"), os.readlink("/proc/self/fd/1") == os.readlink("/proc/self/fd/2"))
"""
    watch = started([*PYTHON, script])
    watch.until_end()
    assert watch.printed == b"['0', '1', '2'] /dev/null True\n"


def test_the_trainer_leads_its_own_session_so_that_kill_0_spares_the_supervisor(started):
    watch = started([*PYTHON, "import os; print(os.getsid(0) == os.getpgid(0) == os.getpid())"])
    watch.until_end()
    assert watch.printed == b"True\n"


def test_the_trainer_starts_with_default_signals_even_if_the_runner_blocks_or_ignores_some(started: Start) -> None:
    hup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1])
    try:
        watch = started(["cat", "/proc/self/status"])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGHUP, hup)
    watch.until_end()
    signals = [line.split()[1] for line in watch.printed.decode().splitlines() if line[:6] in ("SigBlk", "SigIgn")]
    # Signals 32 and 33 belong to the C library and keep the value that the test process has inherited.
    others = [int(value, 16) & ~(1 << 31 | 1 << 32) for value in signals]
    assert others == [0, 0], "blocked or ignored: the trainer would be deaf to its stop"


def test_the_environment_is_only_that_of_the_order_whatever_its_size_and_bytes(started: Start) -> None:
    env = {f"BIG{number}": "x" * 100_000 for number in range(4)} | {"BYTES": "caf\udce9 \N{SNOWMAN}"}
    watch = started(["env", "-0"], env=env)
    watch.until_end()
    found = dict(entry.split(b"=", 1) for entry in watch.printed.split(b"\0") if entry)
    wanted = {**env, "PATH": os.environ["PATH"]}
    assert found == {os.fsencode(name): os.fsencode(value) for name, value in wanted.items()}


def test_a_program_is_searched_in_the_path_of_the_order_and_a_relative_one_in_its_folder(started, tmp_path):
    (tmp_path / "train").symlink_to("/bin/pwd")
    watch = started(["train"], cwd=str(tmp_path), env={"PATH": f"/no/such:{tmp_path}"})
    assert watch.until_end().code == 0
    assert watch.printed.decode().strip() == str(tmp_path)


def test_stdout_and_stderr_keep_their_order(started: Start) -> None:
    watch = started([*PYTHON, "import os\nfor i in range(200): os.write(1 + i % 2, b'%d ' % i)"])
    watch.until_end()
    assert watch.printed.split() == [b"%d" % i for i in range(200)]


def test_the_supervisor_sleeps_while_the_trainer_is_working(started: Start) -> None:
    watch = started(["sh", "-c", "sleep 0.1; echo up; sleep 0.5; echo worked; exec sleep 1000"])
    watch.until_printed(b"up")
    eventually(lambda: "(sleeping)" in Path(f"/proc/{watch.node.pid}/status").read_text(), BOUND_SECONDS)
    before = switches(watch.node.pid)
    watch.until_printed(b"worked")
    assert switches(watch.node.pid) - before <= 1, "a supervisor that wakes by itself takes CPU from the training"


def switches(pid: int) -> int:
    """Return how often a process has gone to sleep (its voluntary context switches)."""
    line = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("voluntary_ctxt"))
    return int(line.split()[1])


def test_an_operating_system_other_than_linux_is_refused_with_the_alternative(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(OSError, match=r"needs Linux, this is darwin.*Run it in a Linux container"):
        become_subreaper()
