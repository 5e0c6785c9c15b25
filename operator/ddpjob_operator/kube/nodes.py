"""Which nodes of the cluster are not ready, where we may read nodes at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddpjob_operator.kube import observe
from ddpjob_operator.observed import Node

Raw = Mapping[str, Any]


class Nodes:
    """`changed(name)` is called when a node is no longer, or again, ready. Ready ones cost nothing: there are many."""

    def __init__(self, changed: Callable[[str], None]) -> None:
        self._changed = changed
        self._not_ready: dict[str, Node] = {}
        self._listed = False

    def seen(self) -> dict[str, Node] | None:
        """Those that are not ready, by name; None while they were never listed: nothing is known then."""
        return self._not_ready if self._listed else None

    def put(self, raw: Raw) -> None:
        """A node as it is."""
        self._set(raw["metadata"]["name"], observe.node(raw))

    def remove(self, namespace: str, name: str, uid: str) -> None:
        """A node is gone; the cluster itself then removes its pods."""
        self._set(name, Node(ready=True))

    def replace(self, raws: Sequence[Raw], list_version: int, namespace: str = "") -> None:
        """What a list says."""
        self._listed = True
        for name in self._not_ready.keys() - {raw["metadata"]["name"] for raw in raws}:
            self._set(name, Node(ready=True))
        for raw in raws:
            self.put(raw)

    def _set(self, name: str, node: Node) -> None:
        if node == self._not_ready.get(name, Node(ready=True)):
            return
        # A new mapping: a plan may still read the old one.
        others = {n: known for n, known in self._not_ready.items() if n != name}
        self._not_ready = others if node.ready else {**others, name: node}
        self._changed(name)
