"""Compare small values: one object at two moments, or the objects of one name on several ranks."""

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

import torch


def same(one: Any, other: Any) -> bool:
    """True if both values are the same; tensors are compared bit by bit."""
    try:
        if bool(one == other):
            return True
    except (RuntimeError, ValueError, TypeError):  # `==` of tensors with several values gives no bool
        pass
    return digest(one) == digest(other)  # NaN is not equal to itself


def moved(before: Mapping[str, Any], now: Mapping[str, Any], but: Collection[str] = ()) -> set[str]:
    """Return the names that are in both mappings, but not in the third one, and have different values."""
    return {
        name
        for name, value in now.items()
        if name in before and name not in but and not (before[name] is value or same(before[name], value))
    }


def digest(value: Any) -> str:
    """Return a hash of a plain value; ranks with the same value get the same hash."""
    hasher = hashlib.blake2b(digest_size=8)
    _feed(hasher, value)
    return hasher.hexdigest()


def _feed(hasher: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        tensor = value.detach().to("cpu").to_dense() if value.layout is not torch.strided else value.detach().to("cpu")
        hasher.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        plain = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
        if len(plain):
            hasher.update(plain.view(torch.uint8).numpy())
    elif isinstance(value, Mapping):
        hasher.update(f"{{{len(value)}".encode())
        for key, item in value.items():
            hasher.update(repr(key).encode())
            _feed(hasher, item)
    elif isinstance(value, list | tuple):
        hasher.update(f"{type(value).__name__}{len(value)}".encode())
        for item in value:
            _feed(hasher, item)
    else:
        hasher.update(f"{value!r};".encode())
