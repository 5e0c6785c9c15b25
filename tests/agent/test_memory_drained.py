"""One pod gets SIGTERM and the other pods stay: all ranks end after the same step, and must not lose their state."""

import json
import subprocess

from agents import Launcher, finish
from free_port import free_port
from shell import eventually

LEFT = json.dumps({"application": 3, "infrastructure": 100, "stall": 10, "inARow": 0, "chargedInARow": 0})

TRAIN = """
import os, time
import torch
import ddpjob

with ddpjob.init() as world:
    torch.manual_seed(7)
    model = world.wrap(torch.nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    snapshot = ddpjob.Snapshot()
    objects = dict(model=model, optimizer=optimizer)
    step = snapshot.load(**objects)
    if world.is_main:
        print("BEGIN", step, flush=True)
    while step < 20 or not os.path.exists("enough"):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).square().sum().backward()
        optimizer.step()
        step += 1
        stop = ddpjob.should_stop(step)
        if stop or step == 10:
            snapshot.save(step, **objects)
        if stop:
            print("STOPPED", step, flush=True)
            raise ddpjob.Stopped(step)
        if step == 20:
            open(f"up-{os.environ['DDPJOB_GENERATION']}-{world.rank}", "w").close()
        time.sleep(0.005)  # so that steps are not made faster than the test looks
"""


def test_a_job_without_a_folder_continues_where_it_stopped_after_one_pod_was_drained(launcher: Launcher) -> None:
    group = ["--nnodes", 2, "--master-port", free_port(), "--rdzv-id", launcher.mark]

    def start(node: int, replacement: int = 0) -> subprocess.Popen[str]:
        log = str(launcher.folder / f"termination-{node}-{replacement}.json")
        own = {"DDPJOB_REPLACEMENT": str(replacement), "DDPJOB_TERMINATION_LOG": log, "OMP_NUM_THREADS": "1"}
        return launcher.warm(*group, "--node-rank", node, launcher.script(TRAIN), DDPJOB_RESTARTS_LEFT=LEFT, **own)

    agents = [start(0), start(1)]
    eventually(lambda: len(list(launcher.folder.glob("up-0-*"))) == 2, 60)
    agents[1].terminate()
    told = finish(agents[1])
    assert told.returncode == 75, told.stderr
    (launcher.folder / "enough").touch()
    agents[1] = start(1, 1)
    done = [finish(agent) for agent in agents]
    said = done[0].stdout.split("\n")
    (stopped,) = {line.split()[1] for line in [*said, *told.stdout.split("\n")] if line.startswith("STOPPED")}
    assert [line.split()[1] for line in said if line.startswith("BEGIN")] == ["0", stopped], done[0].stderr
    assert [d.returncode for d in done] == [0, 0], done[0].stderr
