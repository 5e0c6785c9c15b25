"""The random generators of a process, as a value that is saved, and back. `Snapshot` and the memory use it."""

import array
import ctypes
import hashlib
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

_python: tuple[bytes, Any] = (b"", None)  # the bytes of Python's generator where they lie, and the state that it gave
_numpy: tuple[bytes, Any] = (b"", None)  # the bytes of numpy's generator where they lie, and the state that it gave
_FIELDS = object.__basicsize__  # where the fields of an object of C begin, after what each object has
_WORDS, _WORD_BYTES = 624, 4  # of the Mersenne Twister, before its position


def current() -> dict[str, Any]:
    """Of Python, numpy where it is imported, torch and this rank's CUDA device, as values that can be saved."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = (name, keys.tolist(), int(position), int(has_gauss), float(cached))
    return state


def compact() -> dict[str, Any]:
    """The same as bytes, in a tenth of the time, for what is written at each step."""
    of_torch = torch.get_rng_state()
    state: dict[str, Any] = {
        "python": _compact_python(),
        "torch": ctypes.string_at(of_torch.data_ptr(), of_torch.numel()),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = bytes(torch.cuda.get_rng_state().tolist())  # 16 bytes that the host has
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = _compact_numpy(numpy.random)
    return state


def _compact_python() -> Any:
    """Of Python's global generator. Its getstate makes 625 numbers, and most scripts draw none of them: it is not
    called while the bytes are as they were at which the object's own fields begin, if they have proved to be its state.

    A second value of the normal distribution that was drawn with the first is an attribute of the object.
    """
    global _python
    generator = getattr(random.getstate, "__self__", None)
    raw = b""
    if type(generator) is random.Random and random.Random.__basicsize__ >= _FIELDS + (_WORDS + 1) * _WORD_BYTES:
        raw = ctypes.string_at(id(generator) + _FIELDS, (_WORDS + 1) * _WORD_BYTES)
    seen, state = _python
    if raw and raw == seen:
        return (*state, generator.gauss_next)  # type: ignore[union-attr]
    version, words, gauss = random.getstate()
    state = version, array.array("I", words).tobytes()
    is_as_known = raw == words[-1].to_bytes(_WORD_BYTES, sys.byteorder) + state[1][:-_WORD_BYTES]
    _python = (raw if is_as_known else b"", state)
    return (*state, gauss)


def _compact_numpy(generator: Any) -> Any:
    """Of numpy's global generator. Its get_state takes as long as all else together, and few scripts draw from it: it
    is not called while the generator's bytes are as they were.

    A second value of the normal distribution that was drawn with the first is not among these bytes, and it is only
    there after they have changed.
    """
    global _numpy
    raw = _raw(generator)
    seen, state = _numpy
    if raw and raw == seen and not state[3]:
        return state
    name, keys, position, has_gauss, cached = generator.get_state()
    state = (name, keys.tobytes(), int(position), int(has_gauss), float(cached))
    is_as_known = name == "MT19937" and raw == state[1] + state[2].to_bytes(_WORD_BYTES, sys.byteorder)
    _numpy = (raw if is_as_known else b"", state)
    return state


def _raw(generator: Any) -> bytes:
    """The bytes of the generator, by the address that numpy gives to C programs; b"" where it has another one."""
    try:
        bits = generator.get_bit_generator()
        if type(bits).__name__ != "MT19937":
            return b""
        return ctypes.string_at(bits.ctypes.state_address, (_WORDS + 1) * _WORD_BYTES)
    except AttributeError:  # numpy before 1.24
        return b""


def expanded(state: Mapping[str, Any]) -> dict[str, Any]:
    """What `current` would have returned where `compact` did."""
    version, words, gauss = state["python"]
    full: dict[str, Any] = {
        "python": (version, tuple(array.array("I", words)), gauss),
        "torch": torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8),
    }
    if "cuda" in state:
        full["cuda"] = torch.frombuffer(bytearray(state["cuda"]), dtype=torch.uint8)
    if "numpy" in state:
        name, keys, *rest = state["numpy"]
        full["numpy"] = (name, array.array("I", keys).tolist(), *rest)
    return full


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
