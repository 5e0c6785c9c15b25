"""The usual CNN on MNIST with DistributedDataParallel, from the four files of the data set in a folder.

    torchrun --nproc-per-node 2 trainer/examples/mnist.py --data /data/mnist
    ddpjob run examples/mnist.yaml                               # two nodes, as local processes

It never downloads, because all ranks would do so at once. trainer/examples/README.md describes where to put the files.
They may be gzip or plain, and are read and checked before the rendezvous, so that a damaged file fails within seconds.

The result depends on the seed and the options, not on the number of processes, as in digits.py.
"""

import argparse
import gzip
import hashlib
import json
import math
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name in PyTorch scripts
from torch import Tensor, nn

import ddpjob

WARMUP_STEPS = 20
MEAN, DEVIATION = 0.1307, 0.3081  # of MNIST's pixels, scaled to 0 … 1
IMAGES, LABELS = 0x0803, 0x0801  # first four bytes of an IDX file: 0, 0, type (8: bytes), number of dimensions
# Bytes and MD5 of the files as Yann LeCun published them.
KNOWN = {
    "train-images-idx3-ubyte": (9_912_422, "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
    "train-labels-idx1-ubyte": (28_881, "d53e105ee54ea40749a09fcbcd1e9432"),
    "t10k-images-idx3-ubyte": (1_648_877, "9fb629c4189551a2d022fa330f9573f3"),
    "t10k-labels-idx1-ubyte": (4_542, "ec29112dd5afa0611ce80d1b7f02629c"),
}


class DataError(Exception):
    """A file is missing or damaged. The message has its name, the problem, and the fix."""


# ---- the data ----------------------------------------------------------------------------------------------


def load_data(folder: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images (uint8, n × 28 × 28) and labels (int64), first for training, then for testing. Raises DataError."""
    return *load_set(folder, "train"), *load_set(folder, "t10k")


def load_set(folder: str, name: str) -> tuple[Tensor, Tensor]:
    images_file = find(folder, f"{name}-images-idx3-ubyte")
    labels_file = find(folder, f"{name}-labels-idx1-ubyte")
    images, labels = read_idx(images_file, IMAGES), read_idx(labels_file, LABELS).long()
    if images.shape[1:] != (28, 28):
        raise DataError(f"{images_file}: images of {images.shape[1]} × {images.shape[2]} pixels, must be 28 × 28.")
    if len(images) != len(labels):
        raise DataError(f"{labels_file}: {len(labels):,} labels for {len(images):,} images. Take both from one set.")
    if len(labels) == 0 or int(labels.max()) > 9:
        what = f"a label {int(labels.max())}, and there are ten digits" if len(labels) else "no label"
        raise DataError(f"{labels_file}: has {what}. Is it of another data set?")
    return images, labels


def find(folder: str, name: str) -> Path:
    for path in (Path(folder, name + ".gz"), Path(folder, name)):
        if path.is_file():
            return path
    raise DataError(
        f"{folder}: there is no {name} and no {name}.gz. This script does not download: put the four files of MNIST "
        f"there (trainer/examples/README.md says how), and name the folder by --data."
    )


def read_idx(path: Path, magic: int) -> Tensor:
    """Return the bytes of an IDX file, plain or gzip, in the shape that it names."""
    content = path.read_bytes()
    check_sum(path, content)
    if content[:2] == b"\x1f\x8b":  # gzip, whatever the file's name
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path}: the gzip data is damaged or cut short ({error}). Copy it again.") from None
    dimensions = magic & 0xFF
    header = 4 + 4 * dimensions
    if content[:4] != struct.pack(">I", magic):
        kind = "images" if magic == IMAGES else "labels"
        raise DataError(
            f"{path}: begins with {content[:8]!r}, and an IDX file of {kind} with {struct.pack('>I', magic)!r}. "
            f"It is another file, perhaps the web page of a failed download: get it again."
        )
    if len(content) < header:
        raise DataError(f"{path}: has {len(content)} bytes, the header alone needs {header}. Copy it again.")
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    wanted, there = math.prod(shape), len(content) - header
    if there != wanted:
        how = "cut short" if there < wanted else "too long"
        raise DataError(
            f"{path}: {how}: its header announces {' × '.join(map(str, shape))} = {wanted:,} bytes, and {there:,} "
            f"follow. Copy it again."
        )
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)[header:].view(shape)


def check_sum(path: Path, content: bytes) -> None:
    """Raise DataError if a file has the published length but another checksum. Other lengths may be Fashion-MNIST."""
    size, md5 = KNOWN[path.name.removesuffix(".gz")]
    if len(content) == size and (found := hashlib.md5(content, usedforsecurity=False).hexdigest()) != md5:
        raise DataError(f"{path}: as long as MNIST's file, but its MD5 is {found}, not {md5}. Copy it again.")


# ---- the training ------------------------------------------------------------------------------------------


def count(text: str) -> int:
    """Parse an option's integer. Refuse values below 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The usual CNN on MNIST.")
    parser.add_argument("--data", default="/data/mnist", help="folder of the four files (default %(default)s)")
    parser.add_argument("--epochs", type=count, default=5, help="passes over the training set (%(default)s)")
    parser.add_argument("--global-batch", type=count, default=64, help="samples per step of all ranks (%(default)s)")
    parser.add_argument("--lr", type=float, default=0.05, help="highest learning rate (%(default)s)")
    parser.add_argument("--seed", type=int, default=7, help="first weights and order of the samples (%(default)s)")
    parser.add_argument("--snapshot", metavar="FOLDER", help="save the training state here, continue from what is here")
    parser.add_argument("--snapshot-every", type=count, default=200, metavar="N", help="steps (%(default)s)")
    parser.add_argument("--save-model", metavar="FILE", help="rank 0 writes the trained weights here")
    return parser.parse_args(argv)


class Net(nn.Module):
    """Two convolutions, two linear layers: 215,370 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, kernel_size=5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(32 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        return self.layers((images.unsqueeze(1).float() / 255 - MEAN) / DEVIATION)  # type: ignore[no-any-return]


def learning_rate(highest: float, step: int, total: int) -> float:
    """Return the learning rate of a step: it rises, then falls along a cosine. So snapshots need not contain it."""
    return highest * min(1.0, (step + 1) / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * step / total))


@torch.no_grad()
def accuracy_of(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    pairs = zip(torch.split(images, 500), torch.split(labels, 500), strict=True)
    right = sum(int((model(some).argmax(dim=1) == theirs).sum()) for some, theirs in pairs)
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
    data = load_data(args.data)  # before the rendezvous, so that no rank waits for a rank without data

    with ddpjob.init() as world:
        images, labels, test_images, test_labels = (part.to(world.device) for part in data)
        torch.manual_seed(args.seed)
        net = Net()
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
        if world.is_main:
            print(f"{len(images):,} images to train on, {len(test_images):,} to test with", flush=True)

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
                with ddpjob.pause("evaluate"):  # otherwise a long evaluation would count as a stall
                    metrics["accuracy"] = accuracy_of(net, test_images, test_labels)
                print(f"epoch {epoch + 1} accuracy {metrics['accuracy']:.4f}", flush=True)

        if snapshot:
            snapshot.close()
        if world.is_main:
            tell_the_end(net, step, accuracy_of(net, test_images, test_labels), world.world_size)
            if args.save_model:
                torch.save(net.state_dict(), args.save_model)


if __name__ == "__main__":
    main()
