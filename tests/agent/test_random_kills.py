"""Any process, at any moment: the job ends, with the result that it would have had."""

from __future__ import annotations

import contextlib
import random
import subprocess
import time

import psutil
import pytest
from agents import Launcher, free_port

# Rank 0 sums what all ranks send it at each step, as a group would; who loses a peer fails, as in a collective.
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


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_whatever_is_killed_the_job_ends_with_its_result(launcher: Launcher, seed: int) -> None:
    chance = random.Random(seed)
    script = launcher.script(TRAIN)
    port = free_port()
    group = ["--nnodes", 2, "--master-port", port, "--rdzv-id", launcher.mark, "--max-restarts", 100]
    words = [[*group, "--node-rank", k, "--nproc", 2, "--preload=json", script] for k in range(2)]
    agents = [launcher.ddprun(*its) for its in words]
    story: list[str] = []
    kills, began, next_kill = 4, time.monotonic(), time.monotonic() + chance.uniform(0, 1)
    try:
        # One that ends with 0 knows that all ranks have: the other may be killed after that, and needs no successor.
        while not any(agent.poll() == 0 for agent in agents):
            assert time.monotonic() < began + SECONDS_MAX, f"seed {seed}: it hangs after {story}"
            for k, agent in enumerate(agents):
                if agent.poll() not in (None, 0):
                    story.append(f"node {k} replaced after {agent.returncode}")
                    agent.communicate()
                    agents[k] = launcher.ddprun(*words[k])
            if kills and time.monotonic() > next_kill and (alive := launcher.marked()):
                victim = chance.choice(sorted(alive, key=lambda p: p.pid))
                story.append(f"kill {said(victim)}")
                kill(victim)
                kills, next_kill = kills - 1, time.monotonic() + chance.uniform(0, 1.5)
            time.sleep(0.01)
    finally:
        for agent in agents:
            agent.terminate()
            agent.communicate()
    for folder in (launcher.folder / "tmp").iterdir():  # who is killed cannot clean up
        subprocess.run(["rm", "-r", folder], check=True)
    assert [(launcher.folder / f"result-{rank}").read_text() for rank in range(4)] == [str(RESULT)] * 4, story


def said(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()[1:4])
    except psutil.Error:
        return "ended"


def kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()
