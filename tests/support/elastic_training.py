"""A training whose result is the same for any number of nodes, and an undisturbed run of it."""

import json
import os
from pathlib import Path

import warm

# A linear model with small batches. It learns slowly, so that there is time for the faults.
SCRIPT = """
import json, os, sys, time, torch, ddpjob
folder, seconds, total = sys.argv[1], float(sys.argv[2]), 600
with ddpjob.init("gloo") as world:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(256, 8, generator=generator)
    y = x @ torch.randn(8, 1, generator=generator)
    torch.manual_seed(2)
    net = torch.nn.Linear(8, 1)
    model = world.wrap(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002)  # far from its end after all steps, so that each counts
    sampler = ddpjob.GlobalBatchSampler(len(x), global_batch=16, seed=3)
    snapshot = ddpjob.Snapshot(folder, world)
    step = snapshot.load(model=model, optimizer=optimizer, sampler=sampler)
    print("begins after step", step, "with", world.world_size, flush=True)
    loss_of = lambda i: torch.nn.functional.mse_loss(model(x[i]), y[i], reduction="sum")
    while step < total:
        for batch in sampler.epoch(sampler.current_epoch):
            optimizer.zero_grad()
            ddpjob.accumulate(model, batch, sampler.global_batch, loss_of)
            optimizer.step()
            step += 1
            ddpjob.progress(step=step, total=total)
            stop = ddpjob.should_stop(step)
            if stop or step % 10 == 0:
                snapshot.save(step, model=model, optimizer=optimizer, sampler=sampler)
            if stop:
                raise ddpjob.Stopped(step)
            time.sleep(seconds)
            if step == total:
                break
    snapshot.close()
    if world.is_main:
        print("RESULT", json.dumps([p.flatten().tolist() for p in net.parameters()]), flush=True)
"""


def alone(folder: Path) -> list[float]:
    """Return the result of one undisturbed process."""
    (folder / "alone.py").write_text(SCRIPT)
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("DDPJOB", "KUBE"))}
    process = warm.start("alone", [str(folder / "snapshots"), "0"], cwd=folder, env=environ)
    return result("".join(process.communicate(timeout=200)))


def result(log: str) -> list[float]:
    lines = [line.partition("RESULT ")[2] for line in log.splitlines() if "RESULT " in line]
    assert lines, log
    return [value for part in json.loads(lines[-1]) for value in part]
