"""Which nodes of the cluster are not ready, where we may read nodes at all."""

from __future__ import annotations

import dataclasses
import datetime as dt
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddpjob_operator.kube import observe
from ddpjob_operator.observed import Node

Raw = Mapping[str, Any]
_LOGGER = logging.getLogger(__name__)
READY = Node(ready=True)
# When so many are not heard it is the control plane that does not hear; their trainers go on. The node controller
# thinks the same and evicts nothing then (its unhealthy-zone-threshold is 0.55, and at least three nodes).
DISRUPTED_SHARE, DISRUPTED_NODES = 0.55, 3
# What stops to be heard at once is called not ready within a minute. Nodes that became so apart from each other have
# reasons of their own, and those that are powered off for weeks say nothing of the one that dies today.
TOGETHER_SECONDS = 300.0


class Nodes:
    """`changed(name)` is called when a node is no longer, or again, ready. Ready ones cost nothing: there are many.

    Since when is counted by our own clock, from when we first saw it: another machine's may be minutes off.
    """

    def __init__(self, changed: Callable[[str], None], now: Callable[[], dt.datetime]) -> None:
        self._changed = changed
        self._now = now
        self._names: set[str] = set()
        self._not_ready: dict[str, Node] = {}
        self._turned: dict[str, float] = {}
        """When those became so; before we looked, by the cluster's clock."""
        self._listed = False
        self._said = False

    def seen(self) -> dict[str, Node] | None:
        """Those that are not ready, by name; None while they were never listed: nothing is known then."""
        return self._not_ready if self._listed else None

    @property
    def disrupted(self) -> bool:
        """Whether most nodes have become not ready together."""
        return any(node.with_most for node in self._not_ready.values())

    def put(self, raw: Raw) -> None:
        """A node as it is."""
        known = raw["metadata"]["name"] in self._names
        self._names.add(raw["metadata"]["name"])
        self._put(raw, known)

    def _put(self, raw: Raw, known: bool) -> None:
        name = raw["metadata"]["name"]
        if observe.is_ready(raw):
            return self._set(name, READY)
        if name not in self._not_ready:
            at = self._now() if known else min(_turned_at(raw) or self._now(), self._now())
            self._turned[name] = at.timestamp()
        return self._set(name, self._not_ready.get(name) or Node(ready=False, since=self._now()))

    def remove(self, namespace: str, name: str, uid: str) -> None:
        """A node is gone; the cluster itself then removes its pods."""
        self._names.discard(name)
        self._set(name, READY)

    def replace(self, raws: Sequence[Raw], list_version: int, namespace: str = "") -> None:
        """What a list says."""
        self._listed = True
        names, known = {raw["metadata"]["name"] for raw in raws}, self._names
        for name in known - names:
            self.remove("", name, "")
        self._names = names  # all of them before the first is judged
        for raw in raws:
            self._put(raw, raw["metadata"]["name"] in known)

    def _set(self, name: str, node: Node) -> None:
        before = self._not_ready
        if node.ready == (name not in before):
            return
        # A new mapping: a plan may still read the old one.
        others = {n: known for n, known in before.items() if n != name}
        if node.ready:
            del self._turned[name]
        self._not_ready = others if node.ready else {**others, name: node}
        most = self._with_most()
        others_too = most ^ {n for n, known in self._not_ready.items() if known.with_most}
        for other in others_too:
            self._not_ready[other] = dataclasses.replace(self._not_ready[other], with_most=other in most)
        for changed in sorted(others_too | {name}):
            self._changed(changed)
        self._say()

    def _with_most(self) -> set[str]:
        """The nodes that most others have become not ready together with, of those that were ready until then."""
        if len(self._turned) < DISRUPTED_NODES:
            return set()
        names = sorted(self._turned, key=self._turned.__getitem__)
        times = [self._turned[name] for name in names]
        found: set[str] = set()
        first = last = 0
        for name, at in zip(names, times, strict=True):
            while times[first] < at - TOGETHER_SECONDS:
                first += 1
            while last < len(times) and times[last] <= at + TOGETHER_SECONDS:
                last += 1
            # Those before `first` were off already.
            if last - first >= max(DISRUPTED_NODES, DISRUPTED_SHARE * (len(self._names) - first)):
                found.add(name)
        return found

    def _say(self) -> None:
        if self.disrupted != self._said:
            self._said = self.disrupted
            if self._said:
                text = "%d of %d nodes are not ready, most of them at once: those do not count as lost"
                _LOGGER.warning(text, len(self._not_ready), len(self._names))
            else:
                _LOGGER.info("most nodes are ready again")


def _turned_at(raw: Raw) -> dt.datetime | None:
    """Since when the cluster calls it not ready."""
    conditions = (raw.get("status") or {}).get("conditions") or ()
    return next((observe.time(c.get("lastTransitionTime")) for c in conditions if c.get("type") == "Ready"), None)
