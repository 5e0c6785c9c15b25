"""`check_replicas(model)`: do all ranks still hold the same bits? DDP promises it, and nothing in PyTorch looks.

Every rank sums the bits of each tensor, and only the sums travel: 8 bytes a tensor. What is found is the same on all
ranks, so all raise the same error, and none is left waiting in a collective.
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

WORDS_AT_ONCE = 1 << 18  # with their weights they stay in a processor's cache
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
        """parameter fc.weight (float32 [10, 64])"""
        return f"{self.kind} {self.name} ({described(self.tensor)})"


@torch.no_grad()
def check_replicas(model: Any, *, buffers: bool = True) -> None:
    """Raise ReplicasDifferError, on every rank, unless all ranks hold the same bits. Call it on every rank.

    model    a module, in DistributedDataParallel or not; or an optimizer, or what a state_dict() gives (its tensors
             are compared, its plain numbers are not).
    buffers  whether a module's buffers count. BatchNorm's running statistics differ between ranks after each step, by
             DDP's design: rank 0's are sent to all before the next one.

    The error names the first tensor that differs, parameters first, and the ranks that differ from what most ranks
    hold. Where no value has most ranks (with two ranks always), rank 0 is what the others are compared with.
    Alone, or without a group, it does nothing. A model whose ranks hold parts of it (FSDP, DTensor), and a tensor whose
    bits are not plain (a subclass, quantized, on the meta device) is a StateError on every rank.
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
    if error is not None:  # the same on all ranks, or it would have been a layout of its own
        raise error
    if layout:
        _compare_sums(layout, gather.numbers(sums, group).view(len(ranks), len(layout)), ranks)


def _read(model: Any, buffers: bool) -> tuple[list[str], torch.Tensor, Exception | None]:
    """What this rank holds; or that it cannot be read, because the other ranks would wait for this one in vain."""
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
    """Before any of them is touched: an operation on a DTensor waits for the other ranks."""
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
    """A number that changes with any change of the bits: of one word for certain, else but for one in 2^32.

    Each 32-bit word has a random odd weight, and the sum is modulo 2^64. Sums of rows and columns alone cost less and
    miss every change that adds up to nothing in each row and column, as signs and four words in a rectangle do.
    """
    words = _words(tensor)
    columns, rows = _weights(0, tensor.device), _weights(1, tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, piece in enumerate(torch.split(words, WORDS_AT_ONCE)):
        total += piece.long().mul_(columns[: len(piece)]).sum() * rows[number]
    return total


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of any tensor as 32-bit words, filled up with zeros."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if len(plain) % 4 or plain.storage_offset() % 4:  # torch reads words only where they begin at a multiple of 4 bytes
        plain = torch.nn.functional.pad(plain, (0, -len(plain) % 4)).clone()
    return plain.view(torch.int32)


@functools.cache
def _weights(seed: int, device: torch.device) -> torch.Tensor:
    """Random odd numbers, the same on every rank: odd, so that no single word that changed is lost."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-(2**62), 2**62, (WORDS_AT_ONCE,), generator=generator, device="cpu") * 2 + 1).to(device)


# ---- who differs -------------------------------------------------------------------------------------------


def _compare_layouts(layouts: list[list[str]], ranks: Sequence[int]) -> None:
    """Raise for the first place where ranks do not have the same kind of tensor."""
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
    """Raise for the first tensor whose bits differ."""
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
    """What more than half hold, else what the first holds; who does, and who does not."""
    value, count = Counter(values).most_common(1)[0]
    right = value if 2 * count > len(values) else values[0]
    alike = [i for i, value in enumerate(values) if value == right]
    return right, alike, [i for i in range(len(values)) if i not in alike]


def _names(ranks: Sequence[int], some: list[int], does: str = "", do: str = "") -> str:
    """rank 3 differs; ranks 0, 1, 2 differ"""
    verb = does if len(some) == 1 else do
    named = ", ".join(str(ranks[i]) for i in some[:_RANKS_NAMED_MAX])
    more = f" and {len(some) - _RANKS_NAMED_MAX} more" if len(some) > _RANKS_NAMED_MAX else ""
    return f"{'rank' if len(some) == 1 else 'ranks'} {named}{more} {verb}".rstrip()


def _name(described: str) -> str:
    """fc.weight, of "parameter fc.weight (float32 [10, 64])"; nothing of what is not a tensor."""
    kind, _, rest = described.partition(" ")
    return rest.rpartition(" (")[0] if kind in ("parameter", "buffer", "tensor") else ""
