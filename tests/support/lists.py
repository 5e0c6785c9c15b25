"""Puts a list from an API server into a cache, as the operator does."""

from typing import Any

from ddpjob_operator.kube.watch.listing import place_of


def taken(sink: Any, raws: list[Any], version: int, *scope: Any) -> None:
    """Put all objects of the list, and remove others from the cache. scope: what was listed."""
    with sink.one_observation(*scope) as unlisted:
        for raw in raws:
            sink.put(raw)
    sink.drop(unlisted - {place_of(raw) for raw in raws}, version)
