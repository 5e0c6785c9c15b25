"""Draw docs/pictures/elastic.svg from two real runs: `make pictures`.

Both train the digits network on four local nodes. In one of them nodes are killed, node 0 too, and come back. The
picture shows the mean loss over all ranks at the same steps of both runs, and the number of nodes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs/pictures/elastic.svg"
TRAIN = """
import sys, time
sys.path.insert(0, sys.argv[1])
import torch, torch.distributed as dist, torch.nn.functional as F
import ddpjob
from digits import DigitsNet, load_data

EPOCHS = 16
with ddpjob.init() as world:
    images, labels, *_ = load_data(world.device)
    torch.manual_seed(7)
    model = world.wrap(DigitsNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler = ddpjob.GlobalBatchSampler(len(images), global_batch=64, seed=7)
    snapshot = ddpjob.Snapshot("snapshots", world)
    step = snapshot.load(model=model, optimizer=optimizer, sampler=sampler)
    for epoch in range(sampler.current_epoch, EPOCHS):
        for batch in sampler.epoch(epoch):
            optimizer.zero_grad()
            loss = ddpjob.accumulate(
                model, batch, 64, lambda own: F.cross_entropy(model(images[own]), labels[own], reduction="sum")
            )
            optimizer.step()
            step += 1
            dist.all_reduce(loss)
            mean = loss / world.world_size
            ddpjob.progress(step=step, total=EPOCHS * len(sampler), loss=mean, nodes=world.world_size)
            if world.is_main:
                print("mean", step, world.world_size, mean.item(), flush=True)
            time.sleep(0.1)
            if ddpjob.should_stop(step):
                snapshot.save(step, model=model, optimizer=optimizer, sampler=sampler)
                raise ddpjob.Stopped(step)
    snapshot.close()
"""
FAULTS = ["node=2,at=15s", "node=3,at=15s", "node=0,at=26s", "node=1,at=36s"]
LEFT, WIDTH, LOSS_TOP, LOSS_HEIGHT, NODES_TOP, NODES_HEIGHT = 60, 700, 40, 170, 240, 60
LOSS_MAX, NODES = 2.5, 4


def means(folder: Path, *faults: str) -> dict[int, tuple[int, float]]:
    """Run the training. Return the number of nodes and the mean loss of each step."""
    (folder / "train.py").write_text(TRAIN)
    words = [sys.executable, "-m", "ddpjob_cli", "run", "--nodes", f"1:{NODES}", *(f"--fail={f}" for f in faults)]
    own = {"XDG_STATE_HOME": str(folder / "state")}
    done = subprocess.run(
        [*words, "train.py", str(ROOT / "trainer/examples")],
        cwd=folder,
        env=os.environ | own,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    print(done.stdout.splitlines()[-1])
    found: dict[int, tuple[int, float]] = {}
    for line in done.stdout.splitlines():
        words = line.split()
        if words[1:2] == ["mean"]:
            step = int(words[2])
            if step in found:
                sys.exit(f"step {step} was trained twice")
            found[step] = int(words[3]), float(words[4])
    return found


def main() -> None:
    """Run both trainings and draw the picture."""
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        calm, elastic = means(Path(one)), means(Path(other), *FAULTS)
    if set(calm) != set(elastic):
        sys.exit(f"steps are missing: {sorted(set(calm) ^ set(elastic))}")
    apart = max(abs(calm[step][1] - elastic[step][1]) for step in calm)
    last = max(calm)
    x = {step: LEFT + WIDTH * step / last for step in calm}

    def line(losses: dict[int, tuple[int, float]], style: str) -> str:
        points = " ".join(
            f"{x[step]:.1f},{LOSS_TOP + LOSS_HEIGHT * (1 - min(loss, LOSS_MAX) / LOSS_MAX):.1f}"
            for step, (_, loss) in sorted(losses.items())
        )
        return f'<polyline points="{points}" fill="none" {style}/>'

    steps = " ".join(
        f"{x[step] - WIDTH / last:.1f},{height:.1f} {x[step]:.1f},{height:.1f}"
        for step, (nodes, _) in sorted(elastic.items())
        for height in [NODES_TOP + NODES_HEIGHT * (1 - nodes / NODES)]
    )
    title = (
        "The loss of a training whose nodes are killed and come back, and of one that is not disturbed: the same curve"
    )
    text = [
        (
            LEFT,
            22,
            f"mean loss: undisturbed (wide), and with {len(FAULTS)} killed nodes (narrow); at most {apart:.0e} apart",
        ),
        (LEFT, NODES_TOP - 10, "nodes that train"),
        (LEFT, NODES_TOP + NODES_HEIGHT + 24, f"{last} steps, none lost, none repeated"),
        (20, LOSS_TOP + 12, f"{LOSS_MAX}"),
        (20, LOSS_TOP + LOSS_HEIGHT, "0"),
        (20, NODES_TOP + 12, f"{NODES}"),
        (20, NODES_TOP + NODES_HEIGHT, "0"),
    ]
    body = [
        f'<svg role="img" aria-label="{title}" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 340" '
        'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="14">',
        '<rect width="800" height="340" rx="8" fill="#0d1117"/>',
        line(calm, 'stroke="#58a6ff" stroke-opacity="0.45" stroke-width="7"'),
        line(elastic, 'stroke="#e6edf3" stroke-width="1.5"'),
        f'<polyline points="{steps}" fill="none" stroke="#3fb950" stroke-width="2"/>',
        *(f'<text x="{left}" y="{top}" fill="#b1bac4">{words}</text>' for left, top, words in text),
        "</svg>",
    ]
    PICTURE.write_text("\n".join(body) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
