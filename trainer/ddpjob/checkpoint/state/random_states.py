"""The random generators of a process, as a value that is saved, and back. `Snapshot` and the memory use it."""

import array
import ctypes
import hashlib
import random
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ddpjob import process

_WORDS, _WORD_BYTES = 624, 4  # of the Mersenne Twister, before its position
_Bytes = ctypes.c_char * ((_WORDS + 1) * _WORD_BYTES)


class _Seen(NamedTuple):
    """A generator as it was when it was asked last."""

    generator: Any  # its memory is read while it is here
    memory: Any
    raw: bytes
    """What lay there; b"" where that has not proved to be the state."""
    state: Any


_torch = b""
_python: tuple[Any, Any] = (None, None)
_numpy = _Seen(None, None, b"", None)


def current() -> dict[str, Any]:
    """Of Python, numpy where it is imported, torch and this rank's CUDA device, as values that can be saved."""
    return expanded(compact())


def compact() -> dict[str, Any]:
    """The same as bytes, in a tenth of the time, for what is written at each step.

    Each is the very object that it was while nothing was drawn, and so is compared and hashed at no cost.
    """
    global _torch
    now = torch.default_generator.get_state()
    raw: bytes = (ctypes.c_char * now.numel()).from_address(now.data_ptr()).raw
    if raw != _torch:
        _torch = raw
    state: dict[str, Any] = {"python": _compact_python(), "torch": _torch}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = bytes(torch.cuda.get_rng_state().tolist())  # 16 bytes that the host has
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = _compact_numpy(numpy.random)
    return state


def _compact_python() -> Any:
    """Of Python's global generator. To compare all of its 624 words takes as long as to read them: each draw moves the
    position, and eight words are others once the generator has gone through all of them."""
    global _python
    version, words, gauss = random.getstate()
    mark = version, words[:8], words[-1], gauss
    if mark != _python[0]:
        _python = mark, (version, array.array("I", words).tobytes(), gauss)
    return _python[1]


def _compact_numpy(generator: Any) -> Any:
    """Of numpy's global generator. Its get_state takes as long as all else together, and few scripts draw from it: it
    is not called while the generator's bytes are as they were.

    A second value of the normal distribution that was drawn with the first is not among these bytes, and it is only
    there after they have changed.
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
        memory = _Bytes.from_address(bits.ctypes.state_address)  # which numpy gives to C programs
        raw = memory.raw
    name, keys, position, has_gauss, cached = generator.get_state()
    state = (name, keys.tobytes(), int(position), int(has_gauss), float(cached))
    is_as_known = name == "MT19937" and raw == state[1] + state[2].to_bytes(_WORD_BYTES, sys.byteorder)
    _numpy = _Seen(bits, memory, raw if is_as_known else b"", state)
    return state


def mark(state: Mapping[str, Any]) -> int:
    """A number of what `compact` returns, another one for another state."""
    return hash(tuple(state.values()))


def expanded(state: Mapping[str, Any]) -> dict[str, Any]:
    """What `current` would have returned where `compact` did; from a slot, torch's is a tensor already."""
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
    """This rank's own, where the document has it and there are as many ranks, else seeded from rank 0's."""
    own = document["rng"].get(rank) if document["world_size"] == world_size else None
    if own is None:
        seed(document["rng"][0], document["step"], rank)
    else:
        set_to(own)


def set_to(own: Mapping[str, Any]) -> None:
    """All generators to what `current` has returned."""
    random.setstate(own["python"])
    torch.set_rng_state(own["torch"])
    if "cuda" in own and torch.cuda.is_available():
        torch.cuda.set_rng_state(own["cuda"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in own:
        numpy.random.set_state(own["numpy"])


def continue_from_here() -> None:
    """Let a sampler that resumes within an epoch set the generators to their present states at its first batch.

    Each iter(DataLoader) draws a seed for its workers, also without any. The undisturbed training drew that at the
    beginning of the epoch, and not once more here. From the next optimizer step on the sampler changes nothing.
    """
    state, now = current(), process.current.optimizer_steps

    def restore_again() -> None:
        if process.current.optimizer_steps == now:
            set_to(state)

    process.current.continue_random = restore_again


def seed(of_rank_0: Mapping[str, Any], step: int, rank: int) -> None:
    """The seed differs between ranks and steps, and is the same for every resume from the same file."""
    sha256 = hashlib.sha256(of_rank_0["torch"].numpy().tobytes())
    sha256.update(f"{step}/{rank}".encode())
    number = int.from_bytes(sha256.digest()[:4], "big")  # numpy takes 32 bits
    random.seed(number)
    torch.manual_seed(number)  # CUDA too
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(number)
