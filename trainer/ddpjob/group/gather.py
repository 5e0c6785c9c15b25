"""The values of all ranks on every rank, without pickle: for `replicas` and `preflight`.

Here and elsewhere in the library tensors name their device, because a script may have set another default one.
"""

import torch
import torch.distributed as dist


def device_for(group: dist.ProcessGroup | None, wanted: torch.device | None = None) -> torch.device:
    """Where a tensor must be for the collectives of this group: the CPU where it can, which all ranks decide alike.

    A group of nccl alone takes tensors of a GPU only: the wanted one, else this process's current one.
    """
    backends = str(dist.get_backend_config(group))  # "cpu:gloo,cuda:nccl" where there are two
    if "gloo" in backends or "mpi" in backends:
        return torch.device("cpu")
    return wanted if wanted is not None and wanted.type != "cpu" else torch.device("cuda", torch.cuda.current_device())


def numbers(own: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """One row a rank, on the CPU. `own` is one-dimensional, and as long and of the same type on all ranks."""
    on_device = own.to(device_for(group, own.device))
    rows = [torch.empty_like(on_device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, on_device, group=group)
    return torch.stack(rows).cpu()


def texts(own: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """One text a rank, of any lengths."""
    body = torch.frombuffer(bytearray(own.encode("utf-8", "replace") + b"\0"), dtype=torch.uint8)
    lengths = numbers(torch.tensor([len(body)], device="cpu"), group).flatten().tolist()
    padded = torch.nn.functional.pad(body, (0, max(lengths) - len(body)))
    rows = numbers(padded, group)
    return [bytes(row[: length - 1].tolist()).decode() for row, length in zip(rows, lengths, strict=True)]
