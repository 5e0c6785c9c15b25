"""Which nodes of the cluster are not ready, where we may read nodes at all."""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
from collections.abc import Callable, Mapping, Set
from typing import Any

from ddpjob_operator.kube import observe
from ddpjob_operator.kube.store import Place
from ddpjob_operator.observed import Node
from ddpjob_operator.times import Clock

Raw = Mapping[str, Any]
_LOGGER = logging.getLogger(__name__)
READY = Node(ready=True)
# When so many are not heard it is the control plane that does not hear; their trainers go on. The node controller
# thinks the same and evicts nothing then (its unhealthy-zone-threshold is 0.55, and at least three nodes).
DISRUPTED_SHARE, DISRUPTED_NODES = 0.55, 3


class Nodes:
    """`changed(name)` is called when a node is no longer, or again, ready. Ready ones cost nothing: there are many.

    Since when is counted by our own clock, from when we first saw it: another machine's may be minutes off.
    """

    def __init__(self, changed: Callable[[str], None], now: Callable[[], dt.datetime]) -> None:
        self._changed = changed
        self._now = now
        self._clock = Clock()
        self._names: set[str] = set()
        self._not_ready: dict[str, Node] = {}
        self._listed = False
        self._said = False

    def seen(self) -> dict[str, Node] | None:
        """Those that are not ready, by name; None while they were never listed: nothing is known then.

        Empty while most are not ready at once: then none of them counts as lost.
        """
        if not self._listed:
            return None
        self._keep_time()
        return {} if self.disrupted else self._not_ready

    def _keep_time(self) -> None:
        """Our clock was perhaps set back: a node is not lost later for it."""
        if by := self._clock.set_back(self._now()):
            self._not_ready = {n: Node(False, node.since and node.since + by) for n, node in self._not_ready.items()}

    @property
    def disrupted(self) -> bool:
        """Whether most nodes are not ready."""
        count = len(self._not_ready)
        return count >= DISRUPTED_NODES and count >= DISRUPTED_SHARE * len(self._names)

    def put(self, raw: Raw) -> None:
        """A node as it is."""
        self._names.add(raw["metadata"]["name"])
        name, ready = raw["metadata"]["name"], observe.is_ready(raw)
        self._set(name, READY if ready else self._not_ready.get(name) or Node(ready=False, since=self._now()))

    def remove(self, namespace: str, name: str, uid: str) -> None:
        """A node is gone; the cluster itself then removes its pods."""
        self._names.discard(name)
        self._set(name, READY)

    def one_look(self) -> contextlib.AbstractContextManager[None]:
        """Nothing is kept of the order in which nodes were seen."""
        return contextlib.nullcontext()

    def retain(self, named: Set[Place], list_version: int, namespace: str = "") -> None:
        """The end of a list: all that it named was put."""
        self._listed = True
        for name in self._names - {name for _, name in named}:
            self.remove("", name, "")

    def _set(self, name: str, node: Node) -> None:
        if node == self._not_ready.get(name, READY):
            return
        was = self.disrupted
        # A new mapping: a plan may still read the old one.
        others = {n: known for n, known in self._not_ready.items() if n != name}
        self._not_ready = others if node.ready else {**others, name: node}
        for changed in self._not_ready if was and not self.disrupted else ():
            self._changed(changed)
        self._changed(name)
        self._say()

    def _say(self) -> None:
        if self.disrupted != self._said:
            self._said = self.disrupted
            if self._said:
                text = "%d of %d nodes are not ready at once: none of them counts as lost until most are again"
                _LOGGER.warning(text, len(self._not_ready), len(self._names))
            else:
                _LOGGER.info("most nodes are ready again")
