"""Any process may be killed at any moment: the job ends with the same result as without kills."""

import contextlib
import random
import subprocess
import time

import psutil
import pytest
from agents import Launcher
from free_port import free_port

# At each step rank 0 sums what all ranks send, like an all_reduce. A rank that loses a peer fails.
TRAIN = """
import os, socket, struct, sys, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])

def take(peer):
    data = b""
    while len(data) < 8:
        part = peer.recv(8 - len(data))
        if not part: sys.exit("peer lost")
        data += part
    return struct.unpack("q", data)[0]

def connect():
    while True:
        try: return socket.create_connection(where, timeout=30)
        except ConnectionRefusedError: time.sleep(0.01)

peers = []
if rank == 0:
    server = socket.create_server(("", where[1]), reuse_port=False)
    for _ in range(size - 1):
        peer, _ = server.accept()
        peers.append(peer)
else:
    peers.append(connect())
total = 0
for step in range(60):
    if rank == 0:
        total += step + sum(take(peer) for peer in peers)
        for peer in peers: peer.sendall(struct.pack("q", total))
    else:
        peers[0].sendall(struct.pack("q", rank * step))
        total = take(peers[0])
    time.sleep(0.01)
open(f"result-{rank}", "w").write(str(total))
"""
RESULT = sum(step + sum(rank * step for rank in range(4)) for step in range(60))
SECONDS_MAX = 100
LEFT = '{"application": 100, "infrastructure": 100, "stall": 100}'


class Pod:
    """An agent that is replaced after it has ended. With an operator each pod of a node has its own number."""

    def __init__(self, launcher: Launcher, words: list[object], *, operator: bool) -> None:
        self._launcher, self._words, self._operator = launcher, words, operator
        self._replacement = -1
        self.told = False
        self.start()

    def start(self) -> None:
        self._replacement += 1
        self.told = False
        own = {"DDPJOB_RESTARTS_LEFT": LEFT, "DDPJOB_REPLACEMENT": str(self._replacement)} if self._operator else {}
        self.agent = self._launcher.ddprun(*self._words, **own)

    @property
    def succeeded(self) -> bool:
        """True if the agent ended with 0 and got no SIGTERM, so that all its ranks ended with 0."""
        return self.agent.poll() == 0 and not self.told

    def tell(self) -> None:
        """Send SIGTERM to the agent, as when its node is drained."""
        self.told = True
        self.agent.terminate()


@pytest.mark.parametrize(("seed", "operator"), [(1, False), (3, True)], ids=lambda value: str(value))
def test_a_job_ends_with_its_result_whatever_process_is_killed(launcher: Launcher, seed: int, operator: bool) -> None:
    chance = random.Random(seed)
    script = launcher.script(TRAIN)
    group = ["--nnodes", 2, "--master-port", free_port(), "--rdzv-id", launcher.mark, "--max-restarts", 100]
    words = [[*group, "--node-rank", k, "--nproc", 2, "--preload=json", script] for k in range(2)]
    pods = [Pod(launcher, its, operator=operator) for its in words]
    story: list[str] = []
    kills, began, next_kill = 4, time.monotonic(), time.monotonic() + chance.uniform(0, 1)
    try:
        # If one agent ends with 0, all ranks have succeeded.
        # So the other agent, even if it is killed later, is not replaced.
        while not any(pod.succeeded for pod in pods):
            assert time.monotonic() < began + SECONDS_MAX, f"seed {seed}: it hangs after {story}"
            for k, pod in enumerate(pods):
                if pod.agent.poll() is not None and not pod.succeeded:
                    story.append(f"node {k} replaced after {pod.agent.returncode}")
                    pod.agent.communicate()
                    pod.start()
            if kills and time.monotonic() > next_kill and (alive := launcher.marked()):
                story.append(strike(chance, pods if operator else [], alive))
                kills, next_kill = kills - 1, time.monotonic() + chance.uniform(0, 1.5)
            time.sleep(0.01)
    finally:
        for pod in pods:
            pod.agent.terminate()
            pod.agent.communicate()
    for folder in (launcher.folder / "tmp").iterdir():  # a killed process cannot clean up
        subprocess.run(["rm", "-r", folder], check=True)
    assert [(launcher.folder / f"result-{rank}").read_text() for rank in range(4)] == [str(RESULT)] * 4, story


def strike(chance: random.Random, told: list[Pod], alive: list[psutil.Process]) -> str:
    """Kill a random process, or stop one of these pods' agents; return a description."""
    if told and chance.random() < 0.25:
        k = chance.randrange(len(told))
        told[k].tell()
        return f"tell node {k}"
    victim = chance.choice(sorted(alive, key=lambda p: p.pid))
    what = f"kill {said(victim)}"
    kill(victim)
    return what


def said(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()[1:4])
    except psutil.Error:
        return "ended"


def kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()
