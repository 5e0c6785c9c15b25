"""Spares are ranks of the next generation, forked while the present one trains, so that a restart needs no fork."""

import json
import os
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from agents import Launcher
from script_facts import FACTS, differences

from ddprun import forkserver, options, processes, spares
from ddprun.preload import ForkServer

WAIT = '''
import os, signal, sys, time

def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(pid) for pid in file.read().split()]

def commands(pids):
    return {pid: open(f"/proc/{pid}/cmdline").read() for pid in pids}

def spares(ranks):
    """The pids of as many, once they wait: forked by the server, and children of the agent that are no ranks."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        server, *others = children(os.getppid())
        if len(others) == 2 * ranks and not children(server):
            return [pid for pid in others if pid not in others[:ranks]]
        time.sleep(0.02)
    raise AssertionError(f"no spares: {commands(children(os.getppid()))}")

def together(ranks):
    """Go on once as many have come so far."""
    open(f"here-{os.environ['RANK']}", "w").close()
    while not all(os.path.exists(f"here-{rank}") for rank in range(ranks)):
        time.sleep(0.02)

first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
'''


def test_a_restart_uses_the_waiting_spare_ranks(launcher: Launcher) -> None:
    launcher.script(WAIT, "waits.py")
    script = launcher.script(
        """
        from waits import *
        if first:
            with open("spares", "a") as file:
                file.write(" ".join(map(str, spares(2))) + " ")
            together(2)
            sys.exit(3)
        os.write(1, f"{os.getpid()} {os.environ['RANK']} {os.environ['LOCAL_RANK']}\\n".encode())
        """
    )
    done = launcher.done("--preload=json", "--nproc-per-node=2", script)
    assert done.returncode == 0, done.stderr
    waited = set((launcher.folder / "spares").read_text().split())
    ranks = sorted(line.split()[1:] for line in done.stdout.splitlines())
    assert ranks == [["0", "0"], ["1", "1"]], "each is told what it is"
    assert {line.split()[0] for line in done.stdout.splitlines()} == waited, "a restart would wait for forks"


def test_everything_visible_to_a_script_in_a_spare_is_as_in_a_new_process(launcher: Launcher) -> None:
    launcher.script(WAIT, "waits.py")
    launcher.script(FACTS, "train.py")
    found: dict[str, Any] = {}
    for start in ("--preload=json,decimal", "--no-preload"):
        script = launcher.script(
            FACTS.replace(
                'if __name__ == "__main__":',
                'if __name__ == "__main__":\n'
                '    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":\n'
                '        if "--wait" in sys.argv:\n'
                "            import waits; waits.spares(1)\n"
                "        sys.exit(3)",
            )
        )
        path = launcher.folder / "facts.json"
        done = launcher.done(start, script, "--wait" if "json" in start else "--do-not", FACTS=str(path))
        assert done.returncode == 0, done.stderr
        found[start] = json.loads(path.read_text()) | {"argv": [], "orig_argv": []}
    forked, fresh = found.values()
    assert differences(forked, fresh) == {}


def test_killed_spares_are_forked_again(launcher: Launcher) -> None:
    launcher.script(WAIT, "waits.py")
    script = launcher.script(
        """
        from waits import *
        if first:
            killed = spares(2)
            together(2)
            if os.environ["RANK"] == "0":
                for pid in killed:
                    os.kill(pid, signal.SIGKILL)
                while set(killed) & set(children(os.getppid())):
                    time.sleep(0.02)
                sys.exit(3)
            time.sleep(60)
        os.write(1, b"again\\n")
        """
    )
    done = launcher.done("--preload=json", "--nproc-per-node=2", script)
    assert (done.returncode, done.stdout) == (0, "again\nagain\n"), done.stderr


def test_leftovers_of_ranks_are_killed_and_spares_are_not(launcher: Launcher) -> None:
    launcher.script(WAIT, "waits.py")
    script = launcher.script(
        """
        from waits import *
        if first:
            waiting = spares(1)
            if not os.fork():
                os.setsid()
                time.sleep(60)
            sys.exit(3)
        os.write(1, f"{len(children(os.getppid()))}\\n".encode())
        """
    )
    done = launcher.done("--preload=json", script)
    assert (done.returncode, done.stdout) == (0, "2\n"), "the server and the rank, and nothing else"


def test_spares_end_with_the_fork_server(launcher: Launcher) -> None:
    launcher.script(WAIT, "waits.py")
    script = launcher.script(
        """
        from waits import *
        waiting = spares(2)
        together(2)
        if os.environ["RANK"] == "0":
            os.kill(children(os.getppid())[0], signal.SIGKILL)
        end = time.monotonic() + 30
        while (left := set(waiting) & set(children(os.getppid()))) and time.monotonic() < end:
            time.sleep(0.02)
        os.write(1, f"left: {left}\\n".encode())
        """
    )
    done = launcher.done("--preload=json", "--nproc-per-node=2", script)
    assert done.stdout == "left: set()\nleft: set()\n", "they would wait for as long as the job runs"


# ---- the agent's side ------------------------------------------------------------------------------------------


class Played:
    """A fork server played by this test, connected to a real agent's ForkServer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.socket: socket.socket

        def start(argv: Sequence[str], environ: Mapping[str, str], *, keep: Sequence[int]) -> int:
            self.socket = socket.socket(fileno=os.dup(keep[0]))
            return 4711

        monkeypatch.setattr(processes, "start", start)
        self.agent = ForkServer(options.parse([str(folder / "train.py")], {}), {})
        self.asked()
        self.says(ready=True, failed={})
        self.agent.hear()

    def asked(self) -> list[Any]:
        """Return the requests that the agent has sent so far."""
        lines = b""
        while processes.readable(self.socket.fileno(), 0):
            lines += self.socket.recv(1 << 16)
        return [json.loads(line) for line in lines.splitlines()]

    def says(self, **message: Any) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Played]:
    played = Played(monkeypatch, tmp_path)
    yield played
    played.socket.close()
    played.agent.close()


SPARE = {"spare": True}
LIVES = os.getpid()


def test_spares_are_forked_one_after_the_other_and_no_more_than_needed(played: Played) -> None:
    other = os.posix_spawnp("sleep", ["sleep", "60"], os.environ)
    played.agent.fork_spares(2)
    assert played.asked() == [SPARE]
    played.says(pid=LIVES)
    played.agent.hear()
    assert played.asked() == [SPARE]
    played.says(pid=other)
    played.agent.hear()
    played.agent.fork_spares(2)
    os.kill(other, signal.SIGKILL)
    os.waitpid(other, 0)
    assert (played.asked(), played.agent.spares) == ([], {LIVES, other})


def test_a_killed_spare_is_not_replaced_in_the_same_generation(played: Played) -> None:
    played.agent.fork_spares(2)
    for _ in range(2):
        assert played.asked() == [SPARE]
        played.says(pid=LIVES)
        played.agent.hear()
        played.agent.spares.discard(LIVES)
    assert played.asked() == []


def test_a_fork_with_an_error_does_not_become_a_second_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork with an error must not become a second server, which would read the agent's orders."""
    me = os.getpid()
    agent, its = socket.socketpair()
    with agent, its:

        def fork_rank(_agent_pid: int, _of_rank: tuple[int, ...] = ()) -> int:
            pid = os.fork()
            if pid == 0:
                raise BrokenPipeError(32, "Broken pipe")
            return pid

        monkeypatch.setattr(forkserver, "fork_rank", fork_rank)
        run = forkserver.serve(its, me, {"run": "script"}, forkserver.Spares(lambda: None))
        if os.getpid() != me:
            os._exit(99)
        said = json.loads(agent.recv(100))
        assert (run, os.waitstatus_to_exitcode(os.waitpid(said["pid"], 0)[1])) == (None, 1)


# ---- memory and processes for spares ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "used", "fits"), [("max", 900, True), ("1024", 100, True), ("1024", 700, False), ("8", 4, False)]
)
def test_spares_do_not_take_the_last_processes_of_a_container(tmp_path, limit, used, fits):
    (tmp_path / "own").write_text("0::/\n")
    (tmp_path / "pids.max").write_text(f"{limit}\n")
    (tmp_path / "pids.current").write_text(f"{used}\n")
    assert spares.has_room(8, str(tmp_path), str(tmp_path / "own")) == fits


def test_spares_do_not_take_the_last_memory_of_a_container(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/\n")
    (tmp_path / "memory.max").write_text(f"{2 << 30}\n")
    (tmp_path / "memory.current").write_text(f"{(2 << 30) - (64 << 20)}\n")
    (tmp_path / "memory.stat").write_text("inactive_file 0\n")
    assert not spares.has_room(8, str(tmp_path), str(tmp_path / "own"))
    (tmp_path / "memory.current").write_text(f"{1 << 30}\n")
    assert spares.has_room(8, str(tmp_path), str(tmp_path / "own"))


def test_a_restart_during_a_fork_matches_the_answers_in_order(played: Played) -> None:
    """During a fork, answers must be matched in order: a spare's pid must not be taken for a rank's."""
    played.agent.fork_spares(2)
    played.says(pid=LIVES)
    played.says(pid=12)
    assert played.agent.start({"run": "script"}) == 12
    assert played.asked() == [SPARE, {"run": "script"}], "no other one while ranks start"
    played.says(pid=LIVES)
    assert played.agent.start({"run": "script"}) == LIVES
    assert played.agent.spares == set(), "it is a rank now, and ends with the others"


def test_a_spare_that_cannot_be_forked_is_skipped(played: Played) -> None:
    """If a process limit prevents a spare, the agent must keep its fork server, which the next restart needs."""
    played.agent.fork_spares(2)
    played.says(error="BlockingIOError: [Errno 11] Resource temporarily unavailable")
    played.agent.hear()
    assert (played.agent.ready, played.agent.refused, played.asked()) == (True, "", [SPARE])
