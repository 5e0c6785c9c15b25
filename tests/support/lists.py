"""A list that an API server gives, taken into a copy as the operator does it."""

from __future__ import annotations

from typing import Any

from ddpjob_operator.kube.watch.listing import place_of


def taken(sink: Any, raws: list[Any], version: int, *scope: Any) -> None:
    """All of the list is put, and what it does not name goes. scope: what was listed."""
    for raw in raws:
        sink.put(raw)
    sink.retain({place_of(raw) for raw in raws}, version, *scope)
