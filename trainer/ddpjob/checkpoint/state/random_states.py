"""Read and restore the random states of a process, for `Snapshot` and for the state in memory."""

import array
import ctypes
import hashlib
import random
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ddpjob import process

_WORDS, _WORD_BYTES = 624, 4  # size of a Mersenne Twister's state; in memory its position follows the state
_Bytes = ctypes.c_char * ((_WORDS + 1) * _WORD_BYTES)


class _Seen(NamedTuple):
    """State of a Mersenne Twister at the last call of `compact`."""

    generator: Any  # a reference, so that the memory at the generator's address stays valid
    memory: Any
    raw: bytes
    """Content of the memory; b"" if it was not what the generator's own method returned."""
    state: Any


_torch = b""
_python = _numpy = _Seen(None, None, b"", None)


def current() -> dict[str, Any]:
    """Return the states of Python, numpy (if imported), torch and this rank's CUDA device, as values for a file."""
    return expanded(compact())


def compact() -> dict[str, Any]:
    """Return the random states as bytes, in a tenth of the time of `current`, because they are written at each step.

    If a generator was not used, its state is the same object as before, so comparing and hashing it costs nothing.
    """
    global _torch
    now = torch.default_generator.get_state()
    raw: bytes = (ctypes.c_char * now.numel()).from_address(now.data_ptr()).raw
    if raw != _torch:
        _torch = raw
    state: dict[str, Any] = {"python": _compact_python(), "torch": _torch}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = bytes(torch.cuda.get_rng_state().tolist())  # 16 bytes in host memory: no wait for the GPU
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = _compact_numpy(numpy.random)
    return state


def _compact_python() -> Any:
    """Return the state of Python's generator.

    random.getstate() makes 625 integers, which takes longer than everything else here. So it is called once, to check
    that CPython has the position and the words directly after the object's header. Later they are read there.
    """
    global _python
    seen, own = _python, getattr(random.getstate, "__self__", None)
    if seen.raw and own is seen.generator:
        raw, gauss = seen.memory.raw, own.gauss_next
        if raw != seen.raw or gauss != seen.state[2]:
            _python = seen._replace(raw=raw, state=(seen.state[0], raw[_WORD_BYTES:] + raw[:_WORD_BYTES], gauss))
        return _python.state
    version, numbers, gauss = random.getstate()
    words = array.array("I", numbers).tobytes()
    memory = _Bytes.from_address(id(own) + object.__basicsize__) if type(own) is random.Random else None
    raw = b"" if memory is None else memory.raw
    is_as_known = raw == words[-_WORD_BYTES:] + words[:-_WORD_BYTES]
    _python = _Seen(own, memory, raw if is_as_known else b"", (version, words, gauss))
    return _python.state


def _compact_numpy(generator: Any) -> Any:
    """Return the state of numpy's global generator.

    get_state() takes as long as everything else here, and few scripts draw from numpy. So it is not called while the
    generator's bytes are unchanged, unless a second normal value is cached: the cache is not among these bytes.
    """
    global _numpy
    seen, memory, raw = _numpy, None, b""
    try:
        bits = generator.get_bit_generator()
    except AttributeError:  # numpy before 1.24
        bits = None
    if bits is not None and bits is seen.generator and seen.raw:
        memory, raw = seen.memory, seen.memory.raw
        if raw == seen.raw and not seen.state[3]:
            return seen.state
    elif type(bits).__name__ == "MT19937":
        memory = _Bytes.from_address(bits.ctypes.state_address)  # numpy's documented address for C programs
        raw = memory.raw
    name, keys, position, has_gauss, cached = generator.get_state()
    state = (name, keys.tobytes(), int(position), int(has_gauss), float(cached))
    is_as_known = name == "MT19937" and raw == state[1] + state[2].to_bytes(_WORD_BYTES, sys.byteorder)
    _numpy = _Seen(bits, memory, raw if is_as_known else b"", state)
    return state


def mark(state: Mapping[str, Any]) -> int:
    """Return a hash of the result of `compact`."""
    return hash(tuple(state.values()))


def expanded(state: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the result of `compact` to that of `current`. torch's random state may already be a tensor."""
    version, words, gauss = state["python"]
    full: dict[str, Any] = {
        "python": (version, tuple(array.array("I", words)), gauss),
        "torch": _as_tensor(state["torch"]),
    }
    if "cuda" in state:
        full["cuda"] = _as_tensor(state["cuda"])
    if "numpy" in state:
        name, keys, *rest = state["numpy"]
        full["numpy"] = (name, array.array("I", keys).tolist(), *rest)
    return full


def _as_tensor(state: Any) -> torch.Tensor:
    return state if isinstance(state, torch.Tensor) else torch.frombuffer(bytearray(state), dtype=torch.uint8)


def restore(document: Mapping[str, Any], rank: int, world_size: int) -> None:
    """Restore this rank's random states; seed the rank if they are missing or the number of ranks has changed."""
    own = document["rng"].get(rank) if document["world_size"] == world_size else None
    if own is None:
        seed(document["rng"][0], document["step"], rank)
    else:
        set_to(own)


def set_to(own: Mapping[str, Any]) -> None:
    """Set all generators to a result of `current`."""
    random.setstate(own["python"])
    torch.set_rng_state(own["torch"])
    if "cuda" in own and torch.cuda.is_available():
        torch.cuda.set_rng_state(own["cuda"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in own:
        numpy.random.set_state(own["numpy"])


def continue_from_here() -> None:
    """Record the present random states. A sampler that resumes within an epoch restores them at its first batch.

    iter(DataLoader) draws a seed, even without workers. A training without a restart draws it only at the beginning of
    the epoch. Nothing is restored after the next optimizer step.
    """
    state, now = current(), process.current.optimizer_steps

    def restore_again() -> None:
        if process.current.optimizer_steps == now:
            set_to(state)

    process.current.continue_random = restore_again


def seed(of_rank_0: Mapping[str, Any], step: int, rank: int) -> None:
    """Seed all generators. Every resume from the same file uses the same seed; each rank and step has its own seed."""
    sha256 = hashlib.sha256(of_rank_0["torch"].numpy().tobytes())
    sha256.update(f"{step}/{rank}".encode())
    number = int.from_bytes(sha256.digest()[:4], "big")  # numpy accepts at most 32 bits
    random.seed(number)
    torch.manual_seed(number)  # also seeds CUDA
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(number)
