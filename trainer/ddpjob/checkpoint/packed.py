"""A state as bytes in shared memory: the tensors as they lie, and a pickle of the rest. `memory.py` uses it.

torch.save is for files that are kept: it needs a millisecond for the smallest state, and a checksum and a copy for a
large one. The bytes are read by the same version of everything, in the same pod or from a peer of the same group, and
nothing but plain values is unpickled.
"""

import bisect
import collections
import ctypes
import functools
import io
import itertools
import mmap
import os
import pickle
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ddpjob.checkpoint import crew
from ddpjob.checkpoint.state_dicts import NESTED_MAX, not_whole
from ddpjob.errors import StateError

_TENSOR = "\0ddpjob tensor"  # (this, its number) stands for a tensor
_ALIGNED = 64
SMALL_BYTES = 1 << 16
_LEAVES = frozenset({int, float, bool, str, bytes, type(None)})
_HEAD = 16  # length of the pickle, length of everything
_BUFFERS_MAX = 512  # the kernel takes 1,024 in a call
_PIECE_BYTES = 1 << 30  # and 2 GiB
_HUGE_BYTES = 4 << 20
_UNREADABLE = TypeError, ValueError, AttributeError, RuntimeError, OSError
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE: give the process these pages now
_PLAIN = {("collections", "OrderedDict"), ("collections", "Counter"), ("torch", "Size"), ("torch", "device")}


class Layout(NamedTuple):
    """Where a tensor's bytes are, after the pickle."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    size: int


class Packed(NamedTuple):
    """A state that can be written: the tensors are the live ones."""

    head: bytes
    layouts: Sequence[Layout]
    tensors: Sequence[Any]
    """Or bytes, in the place of a tensor of bytes."""
    size: int
    """Bytes, of everything."""


def pack(value: Any) -> Packed:
    """The value's bytes, without a copy of its tensors. Raises StateError for what has no plain bytes."""
    tensors: list[torch.Tensor] = []
    numbers: dict[Any, int] = {}  # tied weights are one tensor
    skeleton = _skeleton(value, tensors, numbers, 0)
    layouts: list[Layout] = []
    end = 0
    for tensor in tensors:
        end = -(-end // _ALIGNED) * _ALIGNED
        size = tensor.numel() * tensor.element_size()
        layouts.append(Layout(tensor.dtype, tuple(tensor.shape), tensor.stride(), end, size))
        end += size
    return _with_head(skeleton, layouts, tensors, end)


def pack_plain(value: Any) -> Packed:
    """The same of a value that has no tensors, and is known to have plain parts."""
    return _with_head(value, [], [], 0)


def _with_head(skeleton: Any, layouts: list[Layout], tensors: list[torch.Tensor], end: int) -> Packed:
    body = pickle.dumps((skeleton, [tuple(layout) for layout in layouts]), protocol=5)
    start = -(-(_HEAD + len(body)) // _ALIGNED) * _ALIGNED
    lengths = len(body).to_bytes(8, "little"), (start + end).to_bytes(8, "little")
    head = b"".join((*lengths, body, b"\0" * (start - _HEAD - len(body))))
    return Packed(head, layouts, tensors, start + end)


def places(packed: Packed, memory: torch.Tensor) -> list[torch.Tensor]:
    """Where the bytes of each tensor belong in this memory, which begins with the head."""
    start = len(packed.head)
    return [memory[start + layout.offset :][: layout.size] for layout in packed.layouts]


def write(descriptor: int, offset: int, packed: Packed) -> None:
    """Write it there. Raises OSError, with ENOSPC where not all of it was written."""
    if not packed.tensors and os.pwrite(descriptor, packed.head, offset) == len(packed.head):
        return
    _transfer(_views(packed), offset, lambda buffers, at: os.pwritev(descriptor, buffers, at))


class Parts:
    """The same bytes, of which any part can be written by itself. The tensors are the live ones."""

    def __init__(self, packed: Packed) -> None:
        self._packed = packed  # what lives as long as the views
        self._views = [memoryview(view).cast("B") for view in _views(packed) if len(view)]
        self._starts = [0, *itertools.accumulate(map(len, self._views))]

    def write(self, descriptor: int, offset: int, begin: int, end: int) -> None:
        """Write the bytes from `begin` to `end` to where they belong in what begins at `offset`. Raises OSError."""
        _transfer(self._part(begin, end), offset + begin, lambda buffers, at: os.pwritev(descriptor, buffers, at))

    def copy(self, memory: mmap.mmap, begin: int, end: int) -> bool:
        """The same to where all of it belongs at the beginning of this memory; False: the kernel does not give the
        process all pages at once (before Linux 5.14), and one by one they take longer than `write`.

        Of several threads that write to one file each waits for the others; these do not.
        """
        target = _address(memory)
        first = begin // mmap.PAGESIZE * mmap.PAGESIZE
        if _libc().madvise(ctypes.c_void_p(target + first), ctypes.c_size_t(end - first), _POPULATE_WRITE) != 0:
            return False
        for view in self._part(begin, end):
            if view.readonly:  # the pickle, and what is between two tensors
                memory[begin : begin + len(view)] = view.tobytes()
            else:
                ctypes.memmove(target + begin, _address(view), len(view))
            begin += len(view)
        return True

    def _part(self, begin: int, end: int) -> list[memoryview]:
        first = bisect.bisect_right(self._starts, begin) - 1
        part = []
        for start, view in zip(self._starts[first:-1], self._views[first:], strict=True):
            if start >= end:
                break
            part.append(view[max(0, begin - start) : end - start])
        return part


def _views(packed: Packed) -> list[Any]:
    """The memory of all of it, one after the other."""
    views: list[Any] = [packed.head]
    end = 0
    for layout, tensor in zip(packed.layouts, packed.tensors, strict=True):
        views.append(b"\0" * (layout.offset - end))
        views.append(_bytes_of(tensor))
        end = layout.offset + layout.size
    return views


def as_bytes(packed: Packed) -> bytes:
    """What `write` writes, for a peer."""
    data = bytearray(packed.size)
    view = memoryview(data)
    start = len(packed.head)
    view[:start] = packed.head
    for layout, tensor in zip(packed.layouts, packed.tensors, strict=True):
        view[start + layout.offset :][: layout.size] = memoryview(_bytes_of(tensor)).cast("B")
    return bytes(data)


def is_laid_out(tensor: Any, layout: Layout) -> bool:
    """Whether what was packed so can be packed so again, with the same head."""
    return (
        type(tensor) is torch.Tensor
        and tensor.is_cpu
        and tensor.dtype is layout.dtype
        and tensor.layout is torch.strided
        and tensor.shape == layout.shape
        and tensor.stride() == layout.stride
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
    )


def copy(memory: Any, offset: int, packed: Packed, *, head: bool) -> None:
    """Write it there, where memory is mapped. head: too, because it is not there already."""
    start = offset + len(packed.head)
    if head:
        memory[offset:start] = packed.head
    for layout, tensor in zip(packed.layouts, packed.tensors, strict=True):
        begin = start + layout.offset
        memory[begin : begin + layout.size] = _bytes_of(tensor)


def read_all(descriptor: int, offset: int, size: int) -> list[Any]:
    """What was written there, one after the other. Raises StateError for anything else."""
    if size <= 0:
        raise StateError("the memory does not have what it should")
    found = []
    while size > 0:
        own = int.from_bytes(os.pread(descriptor, _HEAD, offset)[8:], "little")
        found.append(read(descriptor, offset, own if _HEAD <= own <= size else size))
        offset, size = offset + own, size - own
    return found


def read(descriptor: int, offset: int, size: int) -> Any:
    """What was written there, with tensors of its own. Raises StateError for anything else."""

    def made(layout: Layout, at: int) -> torch.Tensor:
        tensor = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="cpu")
        _transfer([_bytes_of(tensor)], offset + at, lambda buffers, place: os.preadv(descriptor, buffers, place))
        return tensor

    head = os.pread(descriptor, _HEAD, offset)
    length = int.from_bytes(head[:8], "little")
    if len(head) < _HEAD or int.from_bytes(head[8:], "little") != size or _HEAD + length > size:
        raise StateError("the memory does not have what it should")
    return _unpacked(os.pread(descriptor, length, offset + _HEAD), made)


def in_place(memory: torch.Tensor) -> Any:
    """The same of these bytes, whose memory its tensors share. Raises StateError."""

    def made(layout: Layout, at: int) -> torch.Tensor:
        if at + layout.size > len(memory):
            raise ValueError("a tensor ends after the memory")
        part = memory[at : at + layout.size].view(layout.dtype)
        return torch.as_strided(part, layout.shape, layout.stride, part.storage_offset())

    head = bytes(memory[:_HEAD].tolist())
    length = int.from_bytes(head[:8], "little")
    if len(head) < _HEAD or int.from_bytes(head[8:], "little") != len(memory) or _HEAD + length > len(memory):
        raise StateError("the memory does not have what it should")
    return _unpacked(memory[_HEAD : _HEAD + length].numpy().tobytes(), made)


def own(value: Any, threads: int = 1) -> Any:
    """The same value with memory of its own, on the CPU as it is."""
    tensors: list[torch.Tensor] = []
    skeleton = _skeleton(value, tensors, {}, 0)
    copies = [_empty(t.dtype, t.shape, t.stride()) for t in tensors]
    work = [
        (copy.data_ptr() + begin, tensor.data_ptr() + begin, end - begin)
        for copy, tensor in zip(copies, tensors, strict=True)
        for begin, end in crew.pieces(tensor.numel() * tensor.element_size())
    ]
    crew.each(lambda piece: ctypes.memmove(*piece), work, threads)  # both are one run of bytes, in the same order
    return _filled(skeleton, copies)


def reserved(size: int) -> torch.Tensor:
    """So many bytes of memory, of any content."""
    return _empty(torch.uint8, (size,), (1,))


def _empty(dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """In huge pages where the kernel has them: to get a gigabyte in pages of 4 kB takes longer than to fill it."""
    tensor = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
    begin, size = tensor.data_ptr(), tensor.untyped_storage().nbytes()
    if size >= _HUGE_BYTES:
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(begin + size - first), mmap.MADV_HUGEPAGE)
    return tensor


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def total(tensors: Sequence[torch.Tensor], threads: int = 1) -> int:
    """A sum of their bits, below 2^63: as 64-bit numbers, and of small tensors, of which there are many, a checksum.

    threads: more than one for tensors on the CPU only.
    """
    small, large = 0, []
    for tensor in tensors:
        if tensor.numel() * tensor.element_size() < SMALL_BYTES:
            on_host = tensor.cpu()  # has a name because it must live as long as its memory is read
            small = zlib.crc32(_bytes_of(on_host), small)
        else:
            large.append(tensor)
    return (small + sum(value * (2 * i + 1) for i, value in enumerate(_sums(large, threads)))) % (1 << 63)


def _sums(tensors: Sequence[torch.Tensor], threads: int) -> list[int]:
    threads //= torch.get_num_threads()  # where torch has several, a sum is made by all of them
    if threads <= 1:
        values: list[int] = torch.stack([_sum(flat_bytes(t)).cpu() for t in tensors]).tolist() if tensors else []
        return values
    flat = [flat_bytes(tensor) for tensor in tensors]
    work = [
        (number, bytes_[begin:end]) for number, bytes_ in enumerate(flat) for begin, end in crew.pieces(len(bytes_))
    ]
    sums = [0] * len(tensors)
    for (number, _), value in zip(work, crew.each(lambda piece: int(_sum(piece[1])), work, threads), strict=True):
        sums[number] += value
    return sums


def tensors_of(value: Any) -> list[torch.Tensor]:
    """All tensors of it, tied ones once."""
    found: list[torch.Tensor] = []
    _skeleton(value, found, {}, 0)
    return found


def _skeleton(value: Any, tensors: list[torch.Tensor], numbers: dict[Any, int], depth: int) -> Any:
    """The value with marks in place of tensors."""
    kind = type(value)
    if kind in _LEAVES:
        return value
    if depth > NESTED_MAX:
        raise StateError(f"a state is nested deeper than {NESTED_MAX}")
    if isinstance(value, torch.Tensor):
        return (_TENSOR, _number(value, tensors, numbers))
    if kind in (dict, collections.OrderedDict, collections.Counter):
        items = {key: _skeleton(item, tensors, numbers, depth + 1) for key, item in value.items()}
        return items if kind is dict else kind(items)
    if kind in (list, tuple, torch.Size):
        inner = [_skeleton(item, tensors, numbers, depth + 1) for item in value]
        return inner if kind is list else tuple(inner)
    return value


def _number(tensor: torch.Tensor, tensors: list[torch.Tensor], numbers: dict[Any, int]) -> int:
    if wrong := not_whole(tensor):
        raise StateError(f"{wrong} cannot be kept in memory")
    if tensor.device.type not in ("cpu", "cuda"):
        raise StateError(f"a tensor on {tensor.device} cannot be kept in memory")
    tensor = tensor.detach()
    if not is_one_run(tensor):
        tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor.resolve_conj().resolve_neg()
        tensor = tensor.contiguous()
    key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
    if tensor.numel() and key in numbers:
        return numbers[key]
    numbers[key] = len(tensors)
    tensors.append(tensor)
    return numbers[key]


def is_one_run(tensor: torch.Tensor) -> bool:
    """True if the bits of this tensor are one run of bytes in its storage."""
    return tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg()) and _is_dense(tensor)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its values are one run of bytes in its storage, in whatever order (channels_last is)."""
    if tensor.is_contiguous():
        return True
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return reach == tensor.numel() and 0 not in tensor.stride()


def _address(buffer: Any) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _bytes_of(tensor: Any) -> Any:
    """Its memory, to read from or to write into; the tensor must outlive it. Raises StateError for one on a device."""
    if type(tensor) is bytes:
        return tensor
    if tensor.device.type != "cpu":
        raise StateError(f"a tensor on {tensor.device} cannot be kept in memory by the processor alone")
    size = tensor.numel() * tensor.element_size()
    return (ctypes.c_char * size).from_address(tensor.data_ptr()) if size else bytearray()


def _transfer(parts: Sequence[Any], offset: int, call: Callable[[Sequence[Any], int], int]) -> None:
    """All parts, one after the other, at most so many and so long in a call."""
    views = [piece for part in parts for piece in _pieces(memoryview(part).cast("B"))]
    first = 0
    while first < len(views):
        last, size = first, 0
        while last < len(views) and last - first < _BUFFERS_MAX and size + len(views[last]) <= _PIECE_BYTES:
            size += len(views[last])
            last += 1
        done = call(views[first:last], offset)
        if done != size:
            raise OSError(28, f"{done} of {size} bytes were transferred")
        offset, first = offset + size, last


def _pieces(view: memoryview) -> list[memoryview]:
    return [view[at : at + _PIECE_BYTES] for at in range(0, len(view), _PIECE_BYTES)]


def _unpacked(body: bytes, made: Callable[[Layout, int], torch.Tensor]) -> Any:
    """made: a tensor of what is written at that place."""
    try:
        skeleton, layouts = _Plain(io.BytesIO(body)).load()
        start = -(-(_HEAD + len(body)) // _ALIGNED) * _ALIGNED
        tensors = [made(layout, start + layout.offset) for layout in itertools.starmap(Layout, layouts)]
        return _filled(skeleton, tensors)
    except (pickle.UnpicklingError, EOFError, IndexError, *_UNREADABLE) as error:
        raise StateError(f"what is in memory cannot be read: {type(error).__name__}: {error}") from error


def _filled(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    kind = type(value)
    if kind is tuple and len(value) == 2 and value[0] == _TENSOR:
        return tensors[value[1]]
    if kind in (dict, collections.OrderedDict, collections.Counter):
        items = {key: _filled(item, tensors) for key, item in value.items()}
        return items if kind is dict else kind(items)
    if kind in (list, tuple):
        return kind(_filled(item, tensors) for item in value)
    return value


class _Plain(pickle.Unpickler):
    """Values, and the few types that `state_dicts.copied` lets through."""

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(torch, name, None) if module == "torch" else None
        if (module, name) in _PLAIN:
            return getattr(torch if module == "torch" else collections, name)
        if isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is no plain value")


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor as they lie, on its device: the same memory."""
    return torch.as_strided(tensor, (tensor.numel(),), (1,)).view(torch.uint8)


def _sum(flat: torch.Tensor) -> torch.Tensor:
    """Of a dense tensor's bits."""
    if flat.storage_offset() % 8:  # torch reads words only where they begin at a multiple of their size
        flat = flat.clone()
    rest = len(flat) % 8
    if not rest:  # mostly; each call of torch takes the interpreter's lock once more from the thread that trains
        return flat.view(torch.int64).sum()
    return flat[:-rest].view(torch.int64).sum() + flat[-rest:].sum()
