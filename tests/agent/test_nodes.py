"""Several nodes on loopback start together, fail together, and wait for each other. The scripts do not use torch."""

import json
import os
import signal
import socket
import subprocess
import time
from typing import Any

import psutil
import pytest
from agents import Launcher, finish
from free_port import free_port
from shell import eventually, hears

from ddprun.core.charges import REPEATS
from ddprun.wire import Link, job_key

LEFT = '{"application": 3, "infrastructure": 99, "stall": 10}'  # as set by an operator
# Each rank records its start and waits until all ranks of its generation have started.
TRAIN = """
import os, signal, sys, time
life, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], int(os.environ["RANK"])
def here(): return [n for n in os.listdir(".") if n.startswith(f"up-{life}-")]
open(f"up-{life}-{rank}-{os.environ['MASTER_PORT']}-{os.getpid()}", "w").close()
while len(here()) < int(os.environ["WORLD_SIZE"]): time.sleep(0.01)
"""


def starts(launcher: Launcher) -> dict[str, list[tuple[int, int, int]]]:
    """Return (rank, port, pid) of each started rank, by generation."""
    found: dict[str, list[tuple[int, int, int]]] = {}
    for name in sorted(p.name for p in launcher.folder.glob("up-*")):
        _, life, rank, port, pid = name.split("-")
        found.setdefault(life, []).append((int(rank), int(port), int(pid)))
    return found


def up(launcher: Launcher, life: str, ranks: int) -> list[tuple[int, int, int]]:
    """Return the ranks of a generation as soon as all have started."""
    return eventually(lambda: (its := starts(launcher).get(life, [])) and len(its) == ranks and its)


def codes(agents: list[subprocess.Popen[str]]) -> list[int]:
    return [finish(agent).returncode for agent in agents]


def message(launcher: Launcher, node: int) -> Any:
    path = launcher.folder / f"termination-{node}.json"
    return json.loads(path.read_text()) if path.exists() else None


def test_all_ranks_start_together_and_the_job_ends_when_all_have(launcher: Launcher) -> None:
    script = launcher.script(
        TRAIN + "sys.stdout.write(os.environ['GROUP_RANK'] + ' ' + os.environ['LOCAL_RANK'] + '\\n')"
    )
    agents = launcher.nodes(3, "--no-preload", "--nproc", 2, script)
    done = [finish(agent) for agent in agents]
    assert [d.returncode for d in done] == [0, 0, 0]
    assert [sorted(d.stdout.split("\n")) for d in done] == [["", f"{n} 0", f"{n} 1"] for n in range(3)]
    (life,) = starts(launcher).values()
    assert [rank for rank, _, _ in life] == list(range(6))
    assert len({port for _, port, _ in life}) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--preload=json", "trian.py"], "no file trian.py in "),
        (["--no-preload", "trian.py"], "no file trian.py in "),
        (["--no-preload", "-m", "trian"], "no module trian in "),
        (["--preload=json", "-m", "trian"], "no module trian in "),
    ],
)
def test_a_script_missing_on_all_nodes_is_reported_and_not_retried(launcher, words, said):
    """A typo in the script's name must not cost all restarts. The failure must name the missing script, because
    `ended with exit code 2` is ambiguous."""
    launcher.script("print('imported')")
    done = [finish(agent) for agent in launcher.nodes(2, "--max-restarts", 3, *words, DDPJOB_RESTARTS_LEFT=LEFT)]
    assert min(d.returncode for d in done) in (1, 2)
    told = [told for node in range(2) if (told := (message(launcher, node) or {}).get("exception", ""))]
    assert told
    assert all(said in text and text.startswith("ddprun: there is no ") for text in told)
    assert done[0].stderr.count("ddprun: restart ") == 0, done[0].stderr
    assert f"; {REPEATS}\n" in done[0].stderr


@pytest.mark.parametrize("start", ["--no-preload", "--preload=json"])
def test_a_module_missing_on_one_node_is_left_to_the_operator_which_uses_another_node(launcher, start):
    launcher.script("import time\ntime.sleep(100)")
    (launcher.folder / "empty").mkdir()
    words = list(group(launcher, 2, start, "-m", "train"))
    has = launcher.ddprun(*words[0], DDPJOB_RESTARTS_LEFT=LEFT)
    launcher.folder = launcher.folder / "empty"
    lacks = launcher.ddprun(*words[1], DDPJOB_RESTARTS_LEFT=LEFT)
    assert "; another node may have the program" in finish(has).stderr
    finish(lacks)


@pytest.mark.parametrize("start", ["--no-preload", "--preload=json"])
@pytest.mark.parametrize("guilty", [0, 3])
def test_a_rank_killed_on_any_node_restarts_all_ranks_on_a_new_port(launcher, start, guilty):
    script = launcher.script(
        TRAIN
        + f"""
if life < "2":
    if rank == {guilty}: os.kill(os.getpid(), 9)
    time.sleep(1000)
"""
    )
    assert codes(launcher.nodes(2, start, "--nproc", 2, script)) == [0, 0]
    lives = starts(launcher)
    assert {life: [rank for rank, _, _ in its] for life, its in lives.items()} == {key: [0, 1, 2, 3] for key in "012"}
    ports = {life: {port for _, port, _ in its} for life, its in lives.items()}
    assert all(len(its) == 1 for its in ports.values())
    assert ports["0"] != ports["1"] != ports["2"]


def test_only_the_guilty_node_has_the_exit_code_and_message_when_the_budget_is_used_up(launcher: Launcher) -> None:
    """Only the failed rank's node may have its exit code; the other nodes, which are not to blame, exit with 75."""
    script = launcher.script(TRAIN + "if rank == 2: sys.exit(9)\ntime.sleep(1000)")
    agents = [
        launcher.ddprun(*words, DDPJOB_TERMINATION_LOG=str(launcher.folder / f"termination-{node}.json"))
        for node, words in enumerate(group(launcher, 2, "--no-preload", "--nproc", 2, "--max-restarts", 1, script))
    ]
    assert codes(agents) == [75, 9]
    assert list(starts(launcher)) == ["0", "1"]
    assert "rank" not in message(launcher, 0)
    assert {k: message(launcher, 1)[k] for k in ("rank", "exitCode")} == {"rank": 2, "exitCode": 9}


def test_node_0_may_start_last(launcher: Launcher) -> None:
    script = launcher.script(TRAIN)
    first, second = group(launcher, 2, "--no-preload", script)
    follower = launcher.ddprun(*second)
    eventually(lambda: hears(follower.pid))
    time.sleep(0.5)  # the follower connects meanwhile, and is refused
    leader = launcher.ddprun(*first)
    done = [finish(leader), finish(follower)]
    assert [d.returncode for d in done] == [0, 0]
    assert done[1].stderr == "", "a pod that is a little earlier says nothing"


# Node 0, whose pod is new, imports slowly; the other node has done its imports.
IMPORTS = """
import os, time
if os.environ["NODE"] != "0":
    open("imported", "w").close()
else:
    while not os.path.exists("imported"): time.sleep(0.01)
    for _ in range(HUNDREDTHS):
        time.sleep(0.01)
    open("done", "w").write(str(time.monotonic()))
"""


def test_no_rank_connects_to_rank_0_while_node_0_is_still_importing_torch(launcher: Launcher) -> None:
    """No rank may connect to rank 0 while node 0 imports torch, because torch retries only after up to a second."""
    launcher.script(IMPORTS.replace("HUNDREDTHS", "70"), "slow.py")
    script = launcher.script(
        "import time; began = time.monotonic()\n" + TRAIN + "open(f'began-{rank}', 'w').write(str(began))"
    )
    assert codes(launcher.nodes(2, "--preload=slow", script)) == [0, 0]
    done, *began = [float((launcher.folder / name).read_text()) for name in ("done", "began-0", "began-1")]
    assert min(began) > done
    assert max(began) < done + 10


class Met:
    """Node 1, played by this test. Node 0 has accepted its connection and waits for its greeting."""

    def __init__(self, launcher: Launcher, port: int, replacement: int) -> None:
        connection = eventually(lambda: connected(port))
        connection.recv(1, socket.MSG_PEEK)
        about = {"nodes": 2, "least": 2, "nproc": 1, "generation": -1, "term": 1, "replacement": replacement}
        self._link = Link(connection, job_key(launcher.mark, {}), node=1, about=about)
        self._said: list[dict[str, Any]] = []

    def greets(self) -> None:
        self._said.extend(self._link.receive())

    def hears(self, word: str) -> Any:
        """Return the next message of node 0 that has this key; skip other messages."""
        return eventually(lambda: self._said.extend(self._link.receive()) or self._take(word))

    def _take(self, word: str) -> Any:
        return next((said[word] for said in self._said if word in said), None)

    def close(self) -> None:
        self._link.close()


def connected(port: int) -> socket.socket | None:
    try:
        return socket.create_connection(("127.0.0.1", port), 20)
    except ConnectionRefusedError:
        return None


@pytest.mark.parametrize("closes", ["later", "at the same moment"])
def test_a_pod_that_joins_while_node_0_imports_does_not_start_a_stopped_generation(launcher, closes):
    """The ranks of a pod that joins late must not start in a generation that no other node runs."""
    launcher.script(IMPORTS.replace("HUNDREDTHS", "0"), "slow.py")
    first, _ = group(launcher, 2, "--preload=slow", launcher.script(TRAIN))
    leader = launcher.ddprun(*first, NODE="0")
    lost, new = (Met(launcher, int(first[3]), replacement) for replacement in (0, 1))
    lost.greets()
    lost.hears("welcome")
    leader.send_signal(signal.SIGSTOP)  # so that node 0 reads both connections at the same time
    os.waitid(os.P_PID, leader.pid, os.WSTOPPED | os.WNOWAIT)
    if closes == "at the same moment":
        lost.close()
    new.greets()
    leader.send_signal(signal.SIGCONT)
    new.hears("welcome")
    (launcher.folder / "imported").touch()
    assert new.hears("start")["generation"] == 1
    lost.close()
    new.close()
    leader.terminate()
    finish(leader)


def test_an_unresolved_host_name_is_waited_for_and_sigterm_is_handled_meanwhile(launcher: Launcher) -> None:
    script = launcher.script(TRAIN)
    words = ["--nnodes", 2, "--node-rank", 1, "--master-addr", "no-such-name.invalid", "--no-preload", script]
    agent = launcher.ddprun(*words)
    eventually(lambda: hears(agent.pid))
    time.sleep(0.5)  # time to connect
    agent.terminate()
    done = finish(agent, 25)
    assert (done.returncode, done.stderr) == (143, "")


@pytest.mark.parametrize("node", [0, 1])
def test_nodes_that_do_not_join_in_time_leave_the_job_to_the_operator(launcher: Launcher, node: int) -> None:
    words = list(group(launcher, 2, "--rdzv-conf", "timeout=1", "--no-preload", launcher.script(TRAIN)))
    done = finish(launcher.ddprun(*words[node]))
    assert done.returncode == 75
    assert ("nodes 1 did not connect within 1 s" if node == 0 else "node 0 at 127.0.0.1:") in done.stderr


def test_a_node_whose_finished_ranks_are_to_start_again_does_not_end_with_0_if_the_leader_is_lost(
    launcher: Launcher,
) -> None:
    """Exit code 0 would tell the operator that this node has completed its training."""
    script = launcher.script(TRAIN + "if rank == 0: time.sleep(0.3); sys.exit(9)")
    words = group(launcher, 2, "--rdzv-conf", "timeout=3", "--no-preload", script)
    leader, follower = (launcher.ddprun(*its) for its in words)
    pids = [pid for _, _, pid in up(launcher, "1", 2)]
    eventually(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    time.sleep(0.2)  # time to stop the generation; the back-off takes 1 s
    leader.kill()
    leader.communicate()
    assert list(starts(launcher)) == ["0", "1"], "the leader was lost in the back-off"
    assert finish(follower).returncode == 75
    launcher.forget_killed()


@pytest.mark.parametrize("lost", [0, 1])
def test_if_an_agent_is_lost_the_others_stop_and_continue_with_its_replacement(launcher: Launcher, lost: int) -> None:
    script = launcher.script(TRAIN + "if not os.path.exists('replaced'): time.sleep(1000)")
    words = list(group(launcher, 3, "--no-preload", script))
    agents = [launcher.ddprun(*its) for its in words]
    before = up(launcher, "0", 3)
    for path in launcher.folder.glob("up-0-*"):
        path.unlink()
    agents[lost].kill()
    agents[lost].communicate()
    eventually(lambda: not any(psutil.pid_exists(pid) for _, _, pid in before))
    assert all(agent.poll() is None for k, agent in enumerate(agents) if k != lost), "they wait for the replacement"
    (launcher.folder / "replaced").touch()
    agents[lost] = launcher.ddprun(*words[lost])
    assert codes(agents) == [0, 0, 0]
    (life,) = starts(launcher).values()
    assert list(starts(launcher)) == ["1"], "its number is new, also where the leader is"
    if lost != 0:  # a new leader does not know the old port
        assert {port for _, port, _ in life}.isdisjoint({port for _, port, _ in before})
    launcher.forget_killed()


def test_ranks_of_all_nodes_may_save_when_one_node_is_stopped(launcher: Launcher) -> None:
    """Ranks of all nodes must be able to save when one node is stopped. Ranks on the other nodes end with 75."""
    script = launcher.script(
        TRAIN
        + """
def asked(*_):
    open("asked", "w").close()
signal.signal(signal.SIGTERM, asked)
open(f"listening-{rank}", "w").close()
while not os.path.exists("asked"): time.sleep(0.01)
time.sleep(0.3 * rank)   # they do not end at the same moment
open(f"saved-{rank}", "w").close()
sys.exit(75)
"""
    )
    agents = launcher.nodes(3, "--no-preload", script)
    eventually(lambda: len(list(launcher.folder.glob("listening-*"))) == 3)
    agents[1].terminate()
    assert codes(agents) == [75, 75, 75]
    assert len(list(launcher.folder.glob("saved-*"))) == 3
    assert list(starts(launcher)) == ["0"], "no generation follows"


def test_foreign_clients_and_agents_of_other_jobs_do_not_disturb_the_job(launcher: Launcher) -> None:
    script = launcher.script(TRAIN + "while not os.path.exists('enough'): time.sleep(0.01)")
    first, second = group(launcher, 2, "--no-preload", script)
    port = int(first[3])
    leader = launcher.ddprun(*first)
    other = launcher.ddprun(*[word if word != launcher.mark else "another" for word in second])
    eventually(lambda: can_connect(port))
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
    for stranger in strangers[:50]:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(2000))
    follower = launcher.ddprun(*second)
    up(launcher, "0", 2)
    (launcher.folder / "enough").touch()
    assert codes([leader, follower]) == [0, 0]
    assert other.poll() is None
    other.terminate()
    assert finish(other).returncode == 143
    for stranger in strangers:
        stranger.close()


def test_nodes_of_different_sizes_get_an_error_about_it(launcher: Launcher) -> None:
    first, second = group(launcher, 2, "--rdzv-conf", "timeout=5", "--no-preload", "--nproc", 1, launcher.script(TRAIN))
    agents = [launcher.ddprun(*first), launcher.ddprun(*second, PET_NPROC_PER_NODE="2")]
    assert codes(agents) == [0, 0]  # the option has priority over the variable, so both nodes have 1 rank
    wrong = [word if word != 1 or i != len(second) - 2 else 2 for i, word in enumerate(second)]
    leader, follower = launcher.ddprun(*first), launcher.ddprun(*wrong)
    done = finish(leader)
    assert done.returncode == 75
    assert "node 1 has --nnodes, --nproc-per-node (2, 2), but this node (2, 1)" in done.stderr
    follower.send_signal(signal.SIGTERM)
    finish(follower)


def test_a_port_in_use_leaves_the_job_to_the_operator_which_takes_another(launcher: Launcher) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        first, _ = group(launcher, 2, "--no-preload", launcher.script(TRAIN))
        done = finish(launcher.ddprun(*[word if i != 3 else port for i, word in enumerate(first)]))
    assert done.returncode == 75
    assert f"port {port}" in done.stderr


def group(launcher: Launcher, count: int, *words: object) -> Any:
    """Return ddprun's arguments for each node."""
    port = free_port()
    for k in range(count):
        yield ["--nnodes", count, "--master-port", port, "--rdzv-id", launcher.mark, "--node-rank", k, *words]


def can_connect(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
