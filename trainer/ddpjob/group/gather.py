"""Collect the values of all ranks on every rank, without pickle, for `replicas` and `preflight`.

Tensors name their device throughout the library, because a script may have set another default.
"""

import torch
import torch.distributed as dist

PIECE_BYTES = 64 << 20


def device_for(group: dist.ProcessGroup | None, wanted: torch.device | None = None) -> torch.device:
    """Return the device for tensors in this group's collectives: the CPU if possible. All ranks get the same kind.

    A group with nccl only takes GPU tensors: the wanted GPU, else this process's current one.
    """
    backends = str(dist.get_backend_config(group))  # for example "cpu:gloo,cuda:nccl" if the group has two backends
    if "gloo" in backends or "mpi" in backends:
        return torch.device("cpu")
    return wanted if wanted is not None and wanted.type != "cpu" else torch.device("cuda", torch.cuda.current_device())


def numbers(own: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return one row per rank, on the CPU. `own` is one-dimensional, with equal length and type on all ranks."""
    on_device = own.to(device_for(group, own.device))
    rows = [torch.empty_like(on_device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, on_device, group=group)
    return torch.stack(rows).cpu()


def texts(own: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """Return one text per rank, of any length."""
    body = torch.frombuffer(bytearray(own.encode("utf-8", "replace") + b"\0"), dtype=torch.uint8)
    lengths = numbers(torch.tensor([len(body)], device="cpu"), group).flatten().tolist()
    padded = torch.nn.functional.pad(body, (0, max(lengths) - len(body)))
    rows = numbers(padded, group)
    return [bytes(row[: length - 1].tolist()).decode() for row, length in zip(rows, lengths, strict=True)]


def broadcast(memory: torch.Tensor, source: int, *, is_written: bool) -> None:
    """Send the bytes of rank `source` to all ranks, in pieces, so that a large state needs no second copy on the GPU.

    is_written: True if this rank stores the bytes in `memory`; False if it has them already.
    """
    for piece in torch.split(memory, PIECE_BYTES):
        sent = piece if is_written or dist.get_rank() == source else torch.empty_like(piece)
        on_device = sent.to(device_for(None))
        dist.broadcast(on_device, src=source)
        if is_written:
            piece.copy_(on_device)
