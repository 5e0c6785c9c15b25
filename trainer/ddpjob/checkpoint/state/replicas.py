"""`check_replicas(model)`: check that all ranks hold the same bits. DDP relies on it, but PyTorch does not check it.

Every rank sums the bits of each tensor, and only the sums are sent: 8 bytes per tensor. All ranks get the same result,
so all raise the same error, and none is left waiting in a collective.
"""

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpjob.checkpoint.state.state_dicts import described, not_whole, sharded, unwrapped
from ddpjob.errors import ReplicasDifferError, StateError
from ddpjob.group import gather

WORDS_AT_ONCE = 1 << 18  # 32-bit words summed at once; words and weights fit into a processor's cache
_RANKS_NAMED_MAX = 8
_REMEDY = (
    "Common causes: weights or a seed that depend on the rank, a change outside of DDP's backward pass, faulty memory. "
    "Continue from a snapshot, or from one rank's state on all of them."
)
_REMEDY_BUFFER = (
    "A BatchNorm's statistics are each rank's own until the next forward pass: use SyncBatchNorm, or buffers=False."
)


class _Tensor(NamedTuple):
    kind: str
    name: str
    tensor: torch.Tensor

    def describe(self) -> str:
        """Return for example "parameter fc.weight (float32 [10, 64])"."""
        return f"{self.kind} {self.name} ({described(self.tensor)})"


@torch.no_grad()
def check_replicas(model: Any, *, buffers: bool = True) -> None:
    """Raise ReplicasDifferError, on every rank, unless all ranks hold the same bits. Call it on every rank.

    model    a module, in DistributedDataParallel or not; or an optimizer, or what a state_dict() gives (its tensors
             are compared, its plain numbers are not).
    buffers  also compare a module's buffers. BatchNorm's running statistics differ between ranks after each step, by
             DDP's design: it broadcasts rank 0's before the next forward pass.

    The error names the first tensor that differs, parameters first, and the ranks that differ from the majority. If no
    value has a majority, as always with two ranks, rank 0 is the reference. Without a group, or alone in one, it does
    nothing. Raises StateError on every rank if each rank holds a part of the model (FSDP, DTensor), or if a tensor has
    no plain bits (a subclass, quantized, on the meta device).
    """
    group = model.process_group if isinstance(model, DistributedDataParallel) else None
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    ranks = dist.get_process_group_ranks(group) if group is not None else list(range(dist.get_world_size()))
    layout, sums, error = _read(model, buffers)
    text = json.dumps(layout)
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
    if len(set(gather.numbers(torch.tensor([digest], device="cpu"), group).flatten().tolist())) > 1:
        _compare_layouts([json.loads(other) for other in gather.texts(text, group)], ranks)
    if error is not None:  # all ranks raise the same error, because _compare_layouts found no difference
        raise error
    if layout:
        _compare_sums(layout, gather.numbers(sums, group).view(len(ranks), len(layout)), ranks)


def _read(model: Any, buffers: bool) -> tuple[list[str], torch.Tensor, Exception | None]:
    """Return descriptions and sums of this rank's tensors, and the error if they cannot be read. An error is not raised
    here, because the other ranks would wait for this one in the collective."""
    try:
        found = list(_tensors(model, buffers))
        _refuse(model, found)
        layout = [each.describe() for each in found]
        sums = [bit_sum(each.tensor) for each in found]
        device = next((s.device for s in sums if s.device.type != "cpu"), torch.device("cpu"))
        return layout, torch.stack([s.to(device) for s in sums]) if sums else torch.zeros(0, device="cpu"), None
    except Exception as error:
        return (
            [f"tensors that cannot be read: {type(error).__name__}: {error}"[:300]],
            torch.zeros(1, device="cpu"),
            error,
        )


def _refuse(model: Any, found: Sequence[_Tensor]) -> None:
    """Raise StateError for tensors that cannot be compared, before any of them is used: an operation on a DTensor waits
    for the other ranks."""
    if problem := sharded(model):
        raise StateError(f"check_replicas: {problem}")
    for each in found:
        if wrong := not_whole(each.tensor):
            raise StateError(f"check_replicas: {each.name}: {wrong} cannot be compared bit by bit.")


def _tensors(model: Any, buffers: bool) -> Iterator[_Tensor]:
    model = unwrapped(model)
    if isinstance(model, torch.nn.Module):
        yield from (_Tensor("parameter", name, tensor) for name, tensor in model.named_parameters())
        if buffers:
            yield from (_Tensor("buffer", name, tensor) for name, tensor in model.named_buffers())
    else:
        yield from _in_containers("", model.state_dict() if hasattr(model, "state_dict") else model)


def _in_containers(path: str, value: Any) -> Iterator[_Tensor]:
    if isinstance(value, torch.Tensor):
        yield _Tensor("tensor", path, value)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _in_containers(f"{path}.{key}" if path else str(key), inner)
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _in_containers(f"{path}[{index}]", inner)
    elif not path:
        raise TypeError(f"check_replicas takes a module, an optimizer or a state_dict, not {type(value).__name__}")


# ---- sums of bits ------------------------------------------------------------------------------------------


def bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a weighted sum of the bits. A changed word always changes it, several with probability 1 - 2^-32.

    Each 32-bit word has a random odd weight, and the sum is modulo 2^64. Plain sums of rows and columns cost less, but
    miss changes that cancel out in each row and column.
    """
    words = _words(tensor)
    columns, rows = _weights(0, tensor.device), _weights(1, tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, piece in enumerate(torch.split(words, WORDS_AT_ONCE)):
        total += piece.long().mul_(columns[: len(piece)]).sum() * rows[number]
    return total


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of any tensor as 32-bit words, padded with zeros."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if len(plain) % 4 or plain.storage_offset() % 4:  # torch views bytes as words only at a multiple of 4
        plain = torch.nn.functional.pad(plain, (0, -len(plain) % 4)).clone()
    return plain.view(torch.int32)


@functools.cache
def _weights(seed: int, device: torch.device) -> torch.Tensor:
    """Return random weights, the same on every rank; odd, so that a change of a single word always changes the sum."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-(2**62), 2**62, (WORDS_AT_ONCE,), generator=generator, device="cpu") * 2 + 1).to(device)


# ---- who differs -------------------------------------------------------------------------------------------


def _compare_layouts(layouts: list[list[str]], ranks: Sequence[int]) -> None:
    """Raise ReplicasDifferError for the first position at which ranks have tensors of different name or shape."""
    for place in range(max(map(len, layouts))):
        kinds = [rank[place] if place < len(rank) else "no further tensor" for rank in layouts]
        right, alike, different = _vote(kinds)
        if different:
            raise ReplicasDifferError(
                f"tensor {place} is not the same on all ranks: {_names(ranks, different, 'has', 'have')} "
                f"{kinds[different[0]]}, {_names(ranks, alike, 'has', 'have')} {right}. All "
                f"ranks must make the same model, in the same order.",
                tensor=next((name for text in (right, *kinds) if (name := _name(text))), ""),
                ranks=[ranks[i] for i in different],
            )


def _compare_sums(layout: list[str], sums: torch.Tensor, ranks: Sequence[int]) -> None:
    """Raise ReplicasDifferError for the first tensor whose bits differ."""
    bad = [i for i in range(len(layout)) if bool((sums[:, i] != sums[0, i]).any())]
    if not bad:
        return
    values = sums[:, bad[0]].tolist()
    _, alike, different = _vote(values)
    first = layout[bad[0]]
    reference = " (no value has most ranks: rank 0 is the reference)" if 2 * len(alike) <= len(values) else ""
    raise ReplicasDifferError(
        f"{first} is not the same on all ranks: {_names(ranks, different, 'differs', 'differ')} from "
        f"{_names(ranks, alike)}{reference}. "
        f"{len(bad)} of {len(layout)} tensors {'differs' if len(bad) == 1 else 'differ'}. "
        f"{_REMEDY_BUFFER if first.startswith('buffer') else _REMEDY}",
        tensor=_name(first),
        ranks=[ranks[i] for i in different],
    )


def _vote(values: Sequence[Hashable]) -> tuple[Any, list[int], list[int]]:
    """Return the value that more than half have, else the first value, and the indices with and without it."""
    value, count = Counter(values).most_common(1)[0]
    right = value if 2 * count > len(values) else values[0]
    alike = [i for i, value in enumerate(values) if value == right]
    return right, alike, [i for i in range(len(values)) if i not in alike]


def _names(ranks: Sequence[int], some: list[int], does: str = "", do: str = "") -> str:
    """Return for example "rank 3 differs" or "ranks 0, 1, 2 differ"."""
    verb = does if len(some) == 1 else do
    named = ", ".join(str(ranks[i]) for i in some[:_RANKS_NAMED_MAX])
    more = f" and {len(some) - _RANKS_NAMED_MAX} more" if len(some) > _RANKS_NAMED_MAX else ""
    return f"{'rank' if len(some) == 1 else 'ranks'} {named}{more} {verb}".rstrip()


def _name(described: str) -> str:
    """Return fc.weight for "parameter fc.weight (float32 [10, 64])"; "" if the text describes no tensor."""
    kind, _, rest = described.partition(" ")
    return rest.rpartition(" (")[0] if kind in ("parameter", "buffer", "tensor") else ""
