"""A small CNN learns scikit-learn's 1,797 handwritten digits with DistributedDataParallel; test accuracy 0.99.

    python trainer/examples/digits.py                            # one process
    torchrun --nproc-per-node 2 trainer/examples/digits.py       # two processes
    ddpjob run examples/digits.yaml                              # two nodes, as local processes

The result depends on the seed and the options, not on the number of processes: every rank starts from the same
weights, a step takes the same global batch for any number of ranks, and no layer mixes the samples of one
rank (no BatchNorm) or draws random numbers (no dropout). Only the order of float additions differs.
"""

import argparse
import hashlib
import json
import math
import os
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name in PyTorch scripts
from sklearn.datasets import load_digits
from torch import Tensor, nn

import ddpjob

WARMUP_STEPS = 20


def count(text: str) -> int:
    """Parse an option's integer. Refuse values below 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A small CNN on scikit-learn's handwritten digits.")
    parser.add_argument("--epochs", type=count, default=25, help="passes over the training set (default %(default)s)")
    parser.add_argument("--global-batch", type=count, default=32, help="samples per step of all ranks (%(default)s)")
    parser.add_argument("--lr", type=float, default=0.1, help="highest learning rate (%(default)s)")
    parser.add_argument("--seed", type=int, default=7, help="first weights and order of the samples (%(default)s)")
    parser.add_argument("--snapshot", metavar="FOLDER", help="save the training state here, continue from what is here")
    parser.add_argument("--snapshot-every", type=count, default=50, metavar="N", help="steps (%(default)s)")
    parser.add_argument("--save-model", metavar="FILE", help="rank 0 writes the trained weights here")
    return parser.parse_args(argv)


class DigitsNet(nn.Module):
    """Three convolutions over 8 × 8 pixels, 58,314 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, kernel_size=3, padding=1), nn.GELU(),
            nn.Conv2d(32, 64, kernel_size=3, padding=1), nn.GELU(), nn.AvgPool2d(2),
            nn.Conv2d(64, 64, kernel_size=3, padding=1), nn.GELU(), nn.AvgPool2d(2),
            nn.Flatten(), nn.Linear(64 * 2 * 2, 10),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)  # type: ignore[no-any-return]


def load_data(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return 1,440 images for training and 357 for testing; the same ones for every seed, so results are comparable."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32, device=device).unsqueeze(1) / 8 - 1  # -1 to 1
    labels = torch.tensor(digits.target, device=device)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).to(device)
    train, test = order[:1440], order[1440:]
    return images[train], labels[train], images[test], labels[test]


def learning_rate(highest: float, step: int, total: int) -> float:
    """Return the learning rate of a step: it rises, then falls along a cosine. So snapshots need not contain it."""
    return highest * min(1.0, (step + 1) / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * step / total))


@torch.no_grad()
def accuracy_of(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    right = int((model(images).argmax(dim=1) == labels).sum())
    return round(right / len(labels), 6)


def tell_the_end(model: nn.Module, steps: int, accuracy: float, world_size: int) -> None:
    """Report and print the result, with a hash of the weights' bits that is equal if two trainings are equal."""
    weights = b"".join(parameter.detach().cpu().numpy().tobytes() for parameter in model.parameters())
    sha256 = hashlib.sha256(weights).hexdigest()
    ddpjob.progress(step=steps, total=steps, accuracy=accuracy, params=sha256[:12])
    done = {"event": "done", "steps": steps, "accuracy": accuracy, "world_size": world_size, "params_sha256": sha256}
    print(json.dumps(done), flush=True)


def main(argv: Sequence[str] | None = None) -> None:  # noqa: C901 - one story, read from top to bottom
    args = options(argv)
    # More threads than cores would slow the ranks down, and the number of threads changes the last bits of a sum.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
    torch.backends.cudnn.deterministic = True

    with ddpjob.init() as world:
        images, labels, test_images, test_labels = load_data(world.device)
        torch.manual_seed(args.seed)
        net = DigitsNet()
        model = world.wrap(net)  # moves the network to this rank's device
        optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
        sampler = ddpjob.GlobalBatchSampler(len(images), global_batch=args.global_batch, seed=args.seed)

        def summed_loss(indices: list[int]) -> Tensor:
            return F.cross_entropy(model(images[indices]), labels[indices], reduction="sum")

        step = 0
        metrics: dict[str, Tensor | float] = {}
        total = args.epochs * len(sampler)
        snapshot = ddpjob.Snapshot(args.snapshot, world) if args.snapshot else None
        if snapshot:
            step = snapshot.load(model=model, optimizer=optimizer, sampler=sampler)

        for epoch in range(sampler.current_epoch, args.epochs):
            for batch in sampler.epoch(epoch):
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(args.lr, step, total)
                optimizer.zero_grad()
                loss = ddpjob.accumulate(model, batch, sampler.global_batch, summed_loss)
                optimizer.step()
                step += 1
                metrics["loss"] = loss  # for this rank's samples; close to the mean over all ranks
                ddpjob.progress(step=step, total=total, samples=args.global_batch, **metrics)
                stop = snapshot and step < total and ddpjob.should_stop(step)  # on SIGTERM: all ranks at the same step
                if snapshot and (stop or step % args.snapshot_every == 0 or step == total):
                    snapshot.save(step, model=model, optimizer=optimizer, sampler=sampler)
                if stop:
                    raise ddpjob.Stopped(step)
            if world.is_main:
                metrics["accuracy"] = accuracy_of(net, test_images, test_labels)
                print(f"epoch {epoch + 1} accuracy {metrics['accuracy']:.3f}", flush=True)

        if snapshot:
            snapshot.close()
        if world.is_main:
            tell_the_end(net, step, accuracy_of(net, test_images, test_labels), world.world_size)
            if args.save_model:
                torch.save(net.state_dict(), args.save_model)


if __name__ == "__main__":
    main()
