"""The next generation starts and no old rank survives, whatever a script, a foreign process or a clock does."""

import contextlib
import json
import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from agents import Launcher, finish
from free_port import free_port
from shell import eventually, lives

from ddpjob.reporting import termination

STARTS = pytest.mark.parametrize("start", ["--no-preload", "--preload=json"])

# In the first generation rank 1 fails after rank 0 has run the tested code; the second generation succeeds.
FAILS_ONCE = """
import os, signal, subprocess, sys, time
life, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
def wait_for(name):
    while not os.path.exists(name): time.sleep(0.01)
def fail_when_ready(*names):
    if rank == "1":
        for name in names or ["ready"]: wait_for(name)
        os.kill(os.getpid(), signal.SIGKILL)
def forever():
    open("ready", "w").close()
    while True: time.sleep(1000)
"""


@STARTS
def test_children_in_their_own_sessions_that_ignore_signals_do_not_survive_a_restart(launcher, start):
    """Children in their own sessions must not survive a restart: they would hold memory, GPUs or ports."""
    script = launcher.script(
        FAILS_ONCE
        + """
import multiprocessing
def child():
    for number in (1, 2, 13, 15): signal.signal(number, signal.SIG_IGN)
    os.setsid()
    open(f"child-{os.getpid()}", "w").close()
    while True: time.sleep(1000)
if __name__ == "__main__":
    if life == "0":
        fail_when_ready()
        multiprocessing.set_start_method("spawn")
        multiprocessing.Process(target=child).start()    # with a process of its own that tracks resources
        multiprocessing.get_context("fork").Process(target=child).start()
        if os.fork() == 0:
            if os.fork() == 0: child()                   # an orphan, as a daemon makes itself one
            os._exit(0)
        while len([n for n in os.listdir() if n.startswith("child-")]) < 3: time.sleep(0.01)
        forever()
    alive = [n for n in os.listdir() if n.startswith("child-") and os.path.exists("/proc/" + n[6:])]
    os.write(1, f"{len(alive)} alive\\n".encode())
"""
    )
    done = launcher.done(start, "--nproc", 2, "--max-restarts", 1, script)
    assert (done.returncode, done.stdout) == (0, "0 alive\n" * 2), done.stderr
    assert len(list(launcher.folder.glob("child-*"))) == 3


def test_a_pipe_in_place_of_an_output_file_of_a_rank_does_not_block_its_agent(launcher: Launcher) -> None:
    """A pipe in place of a rank's output file must not block the agent, although open() waits for its other end."""
    script = launcher.script("""
import glob, os, sys
path = os.environ["TORCHELASTIC_ERROR_FILE"]
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    for name in (path, *glob.glob(os.path.join(os.path.dirname(path), "..", "*"))):
        if not os.path.isdir(name):
            if os.path.exists(name): os.unlink(name)
            os.mkfifo(name)
    sys.exit(3)
""")
    done = launcher.done("--no-preload", "--nproc", 1, "--max-restarts", 1, script)
    assert done.returncode == 0, done.stderr


@STARTS
def test_a_rank_that_blocks_every_signal_is_killed(launcher: Launcher, start: str) -> None:
    script = launcher.script(
        FAILS_ONCE
        + """
if life == "0":
    fail_when_ready()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    forever()
blocked, handler = signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.getsignal(signal.SIGTERM)
os.write(1, f"{blocked} {handler is signal.SIG_DFL}\\n".encode())   # the next one is not born deaf
"""
    )
    done = launcher.done(start, "--nproc", 2, "--max-restarts", 1, script)
    assert (done.returncode, done.stdout) == (0, "set() True\n" * 2), done.stderr


@STARTS
@pytest.mark.parametrize(("grace", "saved"), [("20", True), ("", False)])
def test_ranks_get_the_configured_grace_when_another_rank_fails(launcher, start, grace, saved):
    """When another rank fails, ranks must get the configured grace period, in which a SIGTERM handler may save."""
    script = launcher.script(
        """
import os, pathlib, signal, sys, time
def save(*_):
    time.sleep(1)
    pathlib.Path("saved").touch()
    sys.exit(0)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "0":
        signal.signal(signal.SIGTERM, save)
        pathlib.Path("ready").touch()
        while True: time.sleep(1)
    while not os.path.exists("ready"): time.sleep(0.01)
    sys.exit(3)
"""
    )
    done = launcher.done(start, "--nproc", 2, script, DDPJOB_RESTART_GRACE=grace)
    assert done.returncode == 0, done.stderr
    assert (launcher.folder / "saved").exists() is saved


def test_a_preloaded_module_that_starts_cuda_is_refused_and_every_rank_is_a_new_process(launcher: Launcher) -> None:
    """A preloaded module that starts CUDA must be refused: in a fork of such a process CUDA does not work."""
    launcher.script("class cuda:\n    is_initialized = staticmethod(lambda: True)", "torch.py")
    script = launcher.script(
        FAILS_ONCE
        + """
if life == "0":
    fail_when_ready()
    forever()
os.write(1, f"{'torch' in sys.modules}\\n".encode())
"""
    )
    done = launcher.done("--preload=torch", "--nproc", 2, "--max-restarts", 1, script)
    assert (done.returncode, done.stdout) == (0, "False\n" * 2)
    assert done.stderr.count("has initialised CUDA, and a forked process cannot use it") == 1, "said, and once"


@pytest.mark.parametrize("way", ["--log-dir", "TMPDIR"])
def test_the_error_about_an_unwritable_folder_names_the_fix(launcher: Launcher, way: str) -> None:
    """A read-only root without an emptyDir must give an error with the fix, not a traceback of ddprun."""
    script, nowhere = launcher.script("print('runs')"), "/proc/nowhere"
    words, env = (["--log-dir", nowhere], {}) if way == "--log-dir" else ([], {"TMPDIR": nowhere})
    done = launcher.done("--no-preload", *words, script, **env)
    assert done.returncode == 2
    assert re.search("no folder for the ranks' files: /proc/nowhere.*Name one: --log-dir, or TMPDIR", done.stderr)
    assert "Traceback" not in done.stderr


# ---- output ------------------------------------------------------------------------------------------------

WRITES = """
import resource
def write(count):
    began = time.monotonic()
    for i in range(count): sys.stdout.write(f"{life} {rank} {i}\\n")
    sys.stdout.flush()
    open(f"rate-{life}-{rank}", "w").write(str(count / (time.monotonic() - began)))
"""
LINES = 30_000


def test_no_line_is_lost_at_ten_thousand_lines_per_second_and_rank(launcher):
    script = launcher.script(
        FAILS_ONCE
        + WRITES
        + f"""
write({LINES})
if life == "0":
    open(f"ready-{{rank}}", "w").close()
    fail_when_ready("ready-0", "ready-1")
    forever()
wait_for("enough")
"""
    )
    agent = launcher.ddprun("--preload=json", "--nproc", 2, "--tee", "3", "--max-restarts", 1, script)
    with console_of(agent, launcher.folder / "console") as console:
        eventually(lambda: console.read_bytes().count(b"\n") == 4 * LINES)
        most = peak_mib(agent.pid)
        (launcher.folder / "enough").touch()
        assert agent.wait(60) == 0
    assert min(float(path.read_text()) for path in launcher.folder.glob("rate-*")) > 10_000
    lines = console.read_text().splitlines()
    for life in "01":
        for rank in "01":
            header = f"[default{rank}]:{life} {rank} "
            assert [line for line in lines if line.startswith(header)] == [f"{header}{i}" for i in range(LINES)]
    assert most < 30, "MiB: the file is the buffer, and not the agent"


def test_a_progress_bar_without_line_ends_is_shown_and_takes_no_memory(launcher: Launcher) -> None:
    """A progress bar that writes no newline for days must be shown, and memory must not grow."""
    script = launcher.script(
        """
        import os, sys, time
        for i in range(20_000): sys.stdout.write(f"\\r{i:6} of many")
        sys.stdout.flush()
        while not os.path.exists("seen"): time.sleep(0.01)
        for _ in range(80): sys.stdout.write("." * 100_000)
        sys.stdout.flush()
        while not os.path.exists("enough"): time.sleep(0.01)
        """
    )
    agent = launcher.ddprun("--preload=json", "--tee", "1", script)
    with console_of(agent, launcher.folder / "console") as console:
        eventually(lambda: b"19998 of many" in console.read_bytes())
        (launcher.folder / "seen").touch()
        eventually(lambda: console.stat().st_size > 8_000_000)
        most = peak_mib(agent.pid)
        (launcher.folder / "enough").touch()
        assert agent.wait(60) == 0
    text = console.read_text()
    assert (text.count("."), text.count("of many")) == (8_000_000, 20_000)
    assert most < 30, "MiB: 16 of them Python"


@contextlib.contextmanager
def console_of(agent: subprocess.Popen[str], path: Path) -> Iterator[Path]:
    """Yield the console's file. `cat` copies the agent's output into the file continuously, like a kubelet."""
    with path.open("wb") as file:
        reader = subprocess.Popen(["cat"], stdin=agent.stdout, stdout=file)
    try:
        yield path
    finally:
        agent.terminate()
        agent.wait()
        reader.wait()
        agent.communicate()


def peak_mib(pid: int) -> float:
    """Return the peak memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024


# ---- foreign connections -----------------------------------------------------------------------------------

TRAIN = (
    FAILS_ONCE
    + """
open(f"there-{life}-{rank}", "w").close()
for other in "01": wait_for(f"there-{life}-{other}")
if rank == "0": open(f"up-{life}", "w").close()  # so whoever sees it may stop an agent: both have started
if life in ("0", "1", "2"):
    if rank == "1":
        wait_for(f"fail-{life}")
        os.kill(os.getpid(), signal.SIGKILL)
    while True: time.sleep(1000)
"""
)


def test_foreign_clients_that_hold_all_connections_do_not_lock_out_agents_of_the_job(launcher: Launcher) -> None:
    first, second = group(launcher, launcher.script(FAILS_ONCE), launcher.mark)
    leader = launcher.ddprun(*first)
    full, enough = threading.Event(), threading.Event()
    holder = threading.Thread(target=hold_all_places, args=(int(first[3]), full, enough))
    holder.start()
    try:
        assert full.wait(30)
        done = [finish(launcher.ddprun(*second)), finish(leader)]
    finally:
        enough.set()
        holder.join()
    assert [d.returncode for d in done] == [0, 0]


def hold_all_places(port: int, full: threading.Event, enough: threading.Event) -> None:
    """Hold a hundred silent connections. Reopen those that are closed."""
    held: list[socket.socket] = []
    while not enough.wait(0.02):
        for old in [old for old in held if is_closed(old)]:
            full.set()
            old.close()
            held.remove(old)
        while len(held) < 100:
            try:
                held.append(socket.create_connection(("127.0.0.1", port), timeout=1))
            except OSError:  # node 0 is not listening yet, or has already ended
                break
            held[-1].setblocking(False)
    for old in held:
        old.close()


def is_closed(connection: socket.socket) -> bool:
    """True if the other end has closed this connection."""
    try:
        return not connection.recv(4096)
    except BlockingIOError:
        return False
    except OSError:
        return True


def group(launcher: Launcher, script: Path, run_id: str, port: int = 0) -> Iterator[list[object]]:
    """Return ddprun's arguments for each of two nodes."""
    port = port or free_port()
    for node in range(2):
        meet = ["--nnodes", 2, "--master-port", port, "--rdzv-id", run_id, "--node-rank", node]
        yield [*meet, "--preload=json", "--max-restarts", 3, script]


# ---- clocks ------------------------------------------------------------------------------------------------

JUMPING = """
import itertools, os, time
jumps = itertools.cycle([0.0, 4e9, -5.0, 1.0, 86400.0 * 400])
time.time = lambda: next(jumps)   # what NTP, a resumed machine or a bad battery makes of it
from ddprun import main
main()
"""


@pytest.mark.parametrize("jumps", [[0], [0, 1]])
def test_clock_jumps_neither_delay_nor_lose_anything(launcher: Launcher, jumps: list[int]) -> None:
    """Jumps of a node's clock must not matter, because all times are measured by the monotonic clock of one node."""
    launcher.script(JUMPING, "jumping.py")
    words = list(group(launcher, launcher.script(TRAIN), launcher.mark))
    modules = ["jumping" if node in jumps else "ddprun" for node in range(2)]
    agents = [launcher.ddprun(*its, module=module) for its, module in zip(words, modules, strict=True)]
    for life in range(3):
        eventually((launcher.folder / f"up-{life}").exists)
        (launcher.folder / f"fail-{life}").touch()
    done = [finish(agent) for agent in agents]
    assert [d.returncode for d in done] == [0, 0], done[0].stderr
    waits = [line.rpartition("waiting ")[2] for line in done[0].stderr.splitlines() if "charged to" in line]
    assert waits == ["0 s", "1 s", "2 s"], "as with a clock that goes right"


def test_suspended_agents_with_a_rank_that_died_meanwhile_restart_all_ranks(launcher: Launcher) -> None:
    """Agents that were suspended while a rank died must restart all ranks, although the other node seems silent."""
    words = list(group(launcher, launcher.script(TRAIN.replace('("0", "1", "2")', '("0",)')), launcher.mark))
    agents = [launcher.ddprun(*its) for its in words]
    eventually((launcher.folder / "up-0").exists)
    for agent in agents:
        psutil.Process(agent.pid).suspend()
    (launcher.folder / "fail-0").touch()
    eventually(lambda: not all(lives(p) for agent in agents for p in psutil.Process(agent.pid).children()))
    for agent in agents:
        psutil.Process(agent.pid).resume()
    assert [finish(agent).returncode for agent in agents] == [0, 0]


@pytest.mark.parametrize(
    "held",
    ["threading.Thread(target=time.sleep, args=(900,))", "multiprocessing.Process(target=time.sleep, args=(900,))"],
)
@pytest.mark.parametrize("end", ["raise RuntimeError('boom')", "sys.exit('RuntimeError: boom')"])
def test_a_rank_whose_script_has_failed_ends_although_something_holds_it(launcher, monkeypatch, held, end):
    """A failed rank must end although a thread or process holds it at its exit. The others would wait 30 minutes."""
    monkeypatch.setattr(termination, "EXIT_SECONDS", 0.5)
    # The fork that runs this agent lacks the function with which multiprocessing joins its processes.
    imports = "import atexit, multiprocessing.util, sys, threading, time"
    joins = "atexit.register(multiprocessing.util._exit_function)"
    script = launcher.script(f"{imports}\n{joins}\n{held}.start()\n{end}\n")
    agent = launcher.warm("--max-restarts", 0, script)
    assert "Timeout (0:00:00.500000)!" in agent.communicate(timeout=60)[1]  # the printed stack shows the reason
    assert agent.returncode == 1
    assert "RuntimeError: boom" in json.loads((launcher.folder / "termination.json").read_text())["exception"]
