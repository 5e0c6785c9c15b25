"""Convert a state to bytes in shared memory: plain values as a pickle, tensors one after the other behind the pickle.

Why not torch.save: it takes at least a millisecond, copies a large state and computes its checksum. Its files can be
read by other versions; these bytes are read only by the same version, in the same pod or by a peer of the same group.

Flow: `pack` describes a value without copying its tensors, `write` copies the tensors to shared memory, `in_place`
returns tensors that use the shared memory, and `own` copies tensors from there. `total` is the checksum.

Security: a pickle can run any code, so only plain values and the types in `find_class` are unpickled.

Drawbacks: the format has no version. Tensors from `in_place` change when the shared memory is written again.
"""

import collections
import contextlib
import ctypes
import functools
import io
import itertools
import mmap
import os
import pickle
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ddpjob.checkpoint.state.state_dicts import NESTED_MAX, not_whole
from ddpjob.errors import StateError

_TENSOR = "\0ddpjob tensor"  # the tuple (_TENSOR, index) replaces a tensor
_ALIGNED = 64
SMALL_BYTES = 1 << 16
PIECE_BYTES = 16 << 20
"""Size of one copy. A writer reports progress after each piece."""
THREADS_MAX = 8
"""More threads would only wait for memory bandwidth."""
WORTH_BYTES = 32 << 20
"""Below this, starting threads takes longer than the copy."""
_LEAVES = frozenset({int, float, bool, str, bytes, type(None)})
_HEAD = 16  # bytes of two integers: the length of the pickle, and of the whole state
_HUGE_BYTES = 4 << 20
_SPARE_BYTES = 1 << 20  # larger buffers are not kept
_UNREADABLE = (
    pickle.UnpicklingError, EOFError, IndexError, TypeError, ValueError, AttributeError, RuntimeError, OSError
)  # fmt: skip
_PLAIN = {("collections", "OrderedDict"), ("collections", "Counter"), ("torch", "Size"), ("torch", "device")}


# ---- small values ------------------------------------------------------------------------------------------


def dumps(value: Any) -> bytes:
    """Return a small value and its tensors as bytes. Raises StateError for a value of an unsupported type."""
    try:
        pickler, buffer = _spare.pop()
    except IndexError:
        buffer = io.BytesIO()
        pickler = _Pickler(buffer, protocol=5)
    buffer.seek(0)
    try:
        pickler.dump(value)
    except RecursionError:
        raise StateError(f"a state is nested deeper than {NESTED_MAX}") from None
    buffer.truncate()
    data = buffer.getvalue()
    pickler.clear_memo()  # otherwise it keeps the value alive
    if len(data) <= _SPARE_BYTES:
        _spare.append((pickler, buffer))
    return data


_spare: list[tuple["_Pickler", io.BytesIO]] = []
"""A pickler that is not in use, with its buffer: new ones for each value take five times as long."""


def loads(data: Any) -> Any:
    """Return the value that `dumps` converted to these bytes. Raises StateError for bytes that `dumps` did not make."""
    try:
        return _Plain(io.BytesIO(data)).load()
    except _UNREADABLE as error:
        raise _not_readable(error) from error


class _Pickler(pickle.Pickler):
    """Pickle plain values, and tensors on the CPU as their bytes."""

    def reducer_override(self, value: Any) -> Any:
        """Called by pickle for everything except plain Python values."""
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        tensor = _one_run(value)
        return tensor_of, (tensor.dtype, tuple(tensor.shape), tensor.stride(), bytes(_bytes_of(tensor)))


def tensor_of(dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], data: bytes) -> torch.Tensor:
    """Return a tensor that has these bytes."""
    tensor = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
    if len(data) != tensor.numel() * tensor.element_size():
        raise ValueError("a tensor does not have as many bytes as it needs")
    ctypes.memmove(tensor.data_ptr(), data, len(data))
    return tensor


class _Plain(pickle.Unpickler):
    """Unpickle plain values, and the few types that `state_dicts.copied` accepts."""

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(torch, name, None) if module == "torch" else None
        if (module, name) == (__name__, tensor_of.__name__):
            return tensor_of
        if (module, name) in _PLAIN:
            return getattr(torch if module == "torch" else collections, name)
        if isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is not a plain value")


def _not_readable(error: Exception) -> StateError:
    return StateError(f"what is in memory cannot be read: {type(error).__name__}: {error}")


# ---- the large state -----------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """Position of a tensor's bytes after the pickle."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    size: int


class Packed(NamedTuple):
    """A state to write. Its tensors are those of the training, not copies."""

    head: bytes
    layouts: Sequence[Layout]
    tensors: Sequence[torch.Tensor]
    size: int
    """Bytes of the head and all tensors."""


def pack(value: Any) -> Packed:
    """Describe a value without copying its tensors. Raises StateError for a value of an unsupported type."""
    tensors: list[torch.Tensor] = []
    numbers: dict[Any, int] = {}  # number of each tensor, because tied weights are written once
    skeleton = _skeleton(value, tensors, numbers, 0)
    layouts: list[Layout] = []
    end = 0
    for tensor in tensors:
        end = -(-end // _ALIGNED) * _ALIGNED
        size = tensor.numel() * tensor.element_size()
        layouts.append(Layout(tensor.dtype, tuple(tensor.shape), tensor.stride(), end, size))
        end += size
    body = pickle.dumps((skeleton, [tuple(layout) for layout in layouts]), protocol=5)
    start = -(-(_HEAD + len(body)) // _ALIGNED) * _ALIGNED
    lengths = len(body).to_bytes(8, "little"), (start + end).to_bytes(8, "little")
    head = b"".join((*lengths, body, b"\0" * (start - _HEAD - len(body))))
    return Packed(head, layouts, tensors, start + end)


def places(packed: Packed, memory: torch.Tensor) -> list[torch.Tensor]:
    """Return for each tensor its part of this memory, which begins with the pickle."""
    start = len(packed.head)
    return [memory[start + layout.offset :][: layout.size] for layout in packed.layouts]


def write(packed: Packed, memory: torch.Tensor, threads: int = 1, report: Callable[[], object] = lambda: None) -> None:
    """Copy the state to this memory. report: called after each piece of 16 MiB."""
    head = torch.frombuffer(bytearray(packed.head), dtype=torch.uint8)
    sources = [flat_bytes(tensor) for tensor in packed.tensors]
    with torch_threads(threads):
        for target, source in zip([memory[: len(head)], *places(packed, memory)], [head, *sources], strict=True):
            for begin in range(0, len(source), PIECE_BYTES):
                copy_piece(target[begin : begin + PIECE_BYTES], source[begin : begin + PIECE_BYTES])
                report()


def copy_piece(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy bytes from source to target."""
    target.copy_(source)


def in_place(memory: torch.Tensor) -> Any:
    """Return the value that `write` has written to this memory. Its tensors are views of this memory. Raises StateError
    if the memory contains anything else."""

    def made(layout: Layout) -> torch.Tensor:
        at = start + layout.offset
        if at + layout.size > len(memory):
            raise ValueError("a tensor ends after the memory")
        part = memory[at : at + layout.size].view(layout.dtype)
        return torch.as_strided(part, layout.shape, layout.stride, part.storage_offset())

    head = bytes(memory[:_HEAD].tolist())
    length = int.from_bytes(head[:8], "little")
    if len(head) < _HEAD or int.from_bytes(head[8:], "little") != len(memory) or _HEAD + length > len(memory):
        raise StateError("the memory does not have what it should")
    start = -(-(_HEAD + length) // _ALIGNED) * _ALIGNED
    try:
        skeleton, layouts = _Plain(io.BytesIO(memory[_HEAD : _HEAD + length].numpy().tobytes())).load()
        return _filled(skeleton, [made(layout) for layout in itertools.starmap(Layout, layouts)])
    except _UNREADABLE as error:
        raise _not_readable(error) from error


def own(value: Any, threads: int = 1) -> Any:
    """Return a copy of the value, on the CPU, that shares no memory with it."""
    tensors: list[torch.Tensor] = []
    skeleton = _skeleton(value, tensors, {}, 0)
    copies = [_empty(t.dtype, t.shape, t.stride()) for t in tensors]
    with torch_threads(threads):
        for copy, tensor in zip(copies, tensors, strict=True):
            flat_bytes(copy).copy_(flat_bytes(tensor))  # both tensors are contiguous bytes in the same order
    return _filled(skeleton, copies)


def reserved(size: int) -> torch.Tensor:
    """Return uninitialized memory of this many bytes."""
    return _empty(torch.uint8, (size,), (1,))


def _empty(dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """Allocate a tensor, in huge pages if the kernel has them: with 4 kB pages, allocating a gigabyte takes longer than
    filling it."""
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
    """Return a checksum below 2^63: the sum of large tensors as 64-bit numbers, plus a crc32 of all small tensors."""
    small, large = 0, []
    for tensor in tensors:
        if tensor.numel() * tensor.element_size() < SMALL_BYTES:
            on_host = tensor.cpu()  # kept in a variable, so that the memory is not freed while it is read
            small = zlib.crc32(_bytes_of(on_host), small)
        else:
            large.append(tensor)
    with torch_threads(threads):
        sums: list[int] = torch.stack([_sum(flat_bytes(t)).cpu() for t in large]).tolist() if large else []
    return (small + sum(value * (2 * i + 1) for i, value in enumerate(sums))) % (1 << 63)


def threads(processes: int, size: int) -> int:
    """Return how many threads to use for `size` bytes if `processes` processes of this machine do so together."""
    if size < WORTH_BYTES:
        return 1
    return max(1, min(THREADS_MAX, len(os.sched_getaffinity(0)) // max(1, processes)))


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use this many threads. Most ranks have one thread (OMP_NUM_THREADS=1, as under torchrun), but other CPU
    cores of the node are idle while a state is loaded, or written after a failure."""
    before = torch.get_num_threads()
    if count <= before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return all tensors in the value; tied tensors once."""
    found: list[torch.Tensor] = []
    _skeleton(value, found, {}, 0)
    return found


def _skeleton(value: Any, tensors: list[torch.Tensor], numbers: dict[Any, int], depth: int) -> Any:
    """Return the value with placeholders for its tensors, which are appended to `tensors`."""
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


def _number(tensor: torch.Tensor, tensors: list[torch.Tensor], numbers: dict[Any, int]) -> int:
    tensor = _one_run(tensor)
    key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
    if tensor.numel() and key in numbers:
        return numbers[key]
    numbers[key] = len(tensors)
    tensors.append(tensor)
    return numbers[key]


def _one_run(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor if its bytes are one range of its storage, else a contiguous copy. Raises StateError."""
    if wrong := not_whole(tensor):
        raise StateError(f"{wrong} cannot be kept in memory")
    if tensor.device.type not in ("cpu", "cuda"):
        raise StateError(f"a tensor on {tensor.device} cannot be kept in memory")
    tensor = tensor.detach()
    if not is_one_run(tensor):
        tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor.resolve_conj().resolve_neg()
        tensor = tensor.contiguous()
    return tensor


def is_one_run(tensor: torch.Tensor) -> bool:
    """True if the tensor's bytes are one range of its storage, in any order (as in channels_last)."""
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return False
    if tensor.is_contiguous():
        return True
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return reach == tensor.numel() and 0 not in tensor.stride()


def _bytes_of(tensor: torch.Tensor) -> Any:
    """Return the tensor's memory as bytes to read; the tensor must outlive them. Raises StateError for a GPU tensor."""
    if tensor.device.type != "cpu":
        raise StateError(f"a tensor on {tensor.device} cannot be kept in memory by the processor alone")
    size = tensor.numel() * tensor.element_size()
    return (ctypes.c_char * size).from_address(tensor.data_ptr()) if size else b""


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a dense tensor's bytes in the order of its memory, on its device."""
    return torch.as_strided(tensor, (tensor.numel(),), (1,)).view(torch.uint8)


def _sum(flat: torch.Tensor) -> torch.Tensor:
    """Sum a dense tensor's bytes as 64-bit numbers."""
    if flat.storage_offset() % 8:  # torch views bytes as int64 only at a multiple of 8
        flat = flat.clone()
    rest = len(flat) % 8
    if not rest:  # the usual case, returned early: each torch call takes the GIL from the training thread
        return flat.view(torch.int64).sum()
    return flat[:-rest].view(torch.int64).sum() + flat[-rest:].sum()
