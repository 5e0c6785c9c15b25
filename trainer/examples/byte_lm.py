"""A small GPT learns to continue the Python documentation that comes with the interpreter, byte by byte.

    python trainer/examples/byte_lm.py                           # one process
    torchrun --nproc-per-node 2 trainer/examples/byte_lm.py      # two processes
    ddpjob run examples/byte_lm.yaml                             # two nodes, as local processes

The defaults are for two CPU cores. To load a GPU, use for example:
    --layers 6 --width 384 --heads 6 --context 256 --global-batch 64 --epochs 12 --lr 1e-3

The result depends on the seed and the options, not on the number of processes: every rank starts from the same
weights, a step takes the same global batch for any number of ranks, and nothing draws random numbers
(no dropout). Only the order of float additions differs.
"""

import argparse
import hashlib
import json
import math
import os
from collections.abc import Sequence
from pydoc_data.topics import topics
from time import perf_counter

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name in PyTorch scripts
from torch import Tensor, nn

import ddpjob

BYTES = 256  # size of the vocabulary: one token per byte value, so no tokenizer is needed
WARMUP_STEPS = 50


def count(text: str) -> int:
    """Parse an option's integer. Refuse values below 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A small byte-level GPT on the Python documentation.")
    parser.add_argument("--epochs", type=count, default=4, help="passes over the training text (default %(default)s)")
    parser.add_argument("--global-batch", type=count, default=32, help="windows per step of all ranks (%(default)s)")
    parser.add_argument("--micro-batch", type=count, help="windows at once per rank, where memory is short (all)")
    parser.add_argument("--context", type=count, default=64, help="bytes per window (%(default)s)")
    parser.add_argument("--layers", type=count, default=2, help="(%(default)s)")
    parser.add_argument("--width", type=count, default=96, help="(%(default)s)")
    parser.add_argument("--heads", type=count, default=4, help="(%(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="highest learning rate (%(default)s)")
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, help="bf16 autocast (on a GPU only)")
    parser.add_argument("--seed", type=int, default=7, help="first weights and order of the windows (%(default)s)")
    parser.add_argument("--snapshot", metavar="FOLDER", help="save the training state here, continue from what is here")
    parser.add_argument("--snapshot-every", type=count, default=50, metavar="N", help="steps (%(default)s)")
    parser.add_argument("--save-model", metavar="FILE", help="rank 0 writes the trained weights here")
    return parser.parse_args(argv)


class Block(nn.Module):
    """Causal self-attention, then an MLP of two layers at each position."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        # No bias, so that the result does not depend on the number of processes.
        # A bias of the keys has no effect, and its gradient is rounding noise, which Adam scales up.
        # After 204 steps, parameters of 1 and 3 processes differed by 1.6e-4 of their norm with a bias, 3e-7 without.
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        windows, context, width = x.shape
        heads = self.query_key_value(self.norm_attention(x)).view(windows, context, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(windows, context, width))
        return x + self.mlp(self.norm_mlp(x))  # type: ignore[no-any-return]


class ByteGPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.byte, self.position = nn.Embedding(BYTES, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, BYTES, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.byte(text) + self.position.weight)))  # type: ignore[no-any-return]


def load_windows(context: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the text as windows of context + 1 bytes, the last one as target only: 90 % to train, the end to test."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, context + 1, context).to(device).long()
    train = len(windows) * 9 // 10
    return windows[:train], windows[train:]


def learning_rate(highest: float, step: int, total: int) -> float:
    """Return the learning rate of a step: it rises, then falls along a cosine. So snapshots need not contain it."""
    return highest * min(1.0, (step + 1) / WARMUP_STEPS) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / total)))


def loss_of(model: nn.Module, text: Tensor, bf16: bool) -> Tensor:
    """Return the mean loss over the bytes of a window, summed over all windows."""
    with torch.autocast(text.device.type, dtype=torch.bfloat16, enabled=bf16):
        logits = model(text[:, :-1])
    return F.cross_entropy(logits.float().transpose(1, 2), text[:, 1:], reduction="sum") / (text.shape[1] - 1)


@torch.no_grad()
def held_out_loss(model: nn.Module, windows: Tensor, batch: int, bf16: bool) -> float:
    losses = [float(loss_of(model, text, bf16)) for text in torch.split(windows, batch)]
    return round(sum(losses) / len(windows), 6)


def tell_the_end(model: nn.Module, steps: int, loss: float, world_size: int) -> None:
    """Report and print the result, with a hash of the weights' bits that is equal if two trainings are equal."""
    weights = b"".join(parameter.detach().cpu().numpy().tobytes() for parameter in model.parameters())
    sha256 = hashlib.sha256(weights).hexdigest()
    ddpjob.progress(step=steps, total=steps, loss=loss, params=sha256[:12])
    done = {"event": "done", "steps": steps, "loss": loss, "world_size": world_size, "params_sha256": sha256}
    print(json.dumps(done), flush=True)


def main(argv: Sequence[str] | None = None) -> None:  # noqa: C901 - one story, read from top to bottom
    args = options(argv)
    # More threads than cores would slow the ranks down, and the number of threads changes the last bits of a sum.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))

    with ddpjob.init() as world:
        windows, held_out = load_windows(args.context, world.device)
        torch.manual_seed(args.seed)
        net = ByteGPT(args.layers, args.width, args.heads, args.context)
        model = world.wrap(net)  # moves the network to this rank's device
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
        sampler = ddpjob.GlobalBatchSampler(
            len(windows), global_batch=args.global_batch, seed=args.seed, micro_batch=args.micro_batch
        )
        bf16 = world.device.type == "cuda" if args.bf16 is None else args.bf16

        def summed_loss(indices: list[int]) -> Tensor:
            return loss_of(model, windows[indices], bf16)

        step = 0
        metrics: dict[str, Tensor | float] = {}
        total = args.epochs * len(sampler)
        snapshot = ddpjob.Snapshot(args.snapshot, world) if args.snapshot else None
        if snapshot:
            step = snapshot.load(model=model, optimizer=optimizer, sampler=sampler)
        if world.is_main:
            parameters = sum(parameter.numel() for parameter in net.parameters())
            print(f"{parameters:,} parameters, {len(windows):,} windows, world size {world.world_size}, rank 0 on "
                  f"{world.device}, {'bf16 autocast' if bf16 else 'fp32'}", flush=True)  # fmt: skip

        for epoch in range(sampler.current_epoch, args.epochs):
            began_at, began = step, perf_counter()
            for batch in sampler.epoch(epoch):
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(args.lr, step, total)
                optimizer.zero_grad()
                loss = ddpjob.accumulate(model, batch, sampler.global_batch, summed_loss)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                step += 1
                metrics["loss"] = loss  # for this rank's samples; close to the mean over all ranks
                ddpjob.progress(step=step, total=total, samples=args.global_batch, **metrics)
                stop = snapshot and step < total and ddpjob.should_stop(step)  # on SIGTERM: all ranks at the same step
                if snapshot and (stop or step % args.snapshot_every == 0 or step == total):
                    snapshot.save(step, model=model, optimizer=optimizer, sampler=sampler)
                if stop:
                    raise ddpjob.Stopped(step)
            if world.is_main and step > began_at:
                float(metrics["loss"])  # waits for the last step, because a GPU runs asynchronously
                speed = (step - began_at) * args.global_batch * args.context / (perf_counter() - began)
                with ddpjob.pause("evaluate"):  # otherwise a long evaluation would count as a stall
                    metrics["held_out_loss"] = held_out_loss(net, held_out, args.global_batch, bf16)
                print(f"epoch {epoch + 1} loss {metrics['held_out_loss']:.3f}, {speed:,.0f} tokens/s", flush=True)

        if snapshot:
            snapshot.close()
        if world.is_main:
            tell_the_end(net, step, held_out_loss(net, held_out, args.global_batch, bf16), world.world_size)
            if args.save_model:
                torch.save(net.state_dict(), args.save_model)


if __name__ == "__main__":
    main()
