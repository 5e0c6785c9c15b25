"""Which nodes of the cluster are not ready, where we may read nodes at all."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import logging
from collections.abc import Callable, Set

from ddpjob_operator.job import bounds
from ddpjob_operator.job.times import Clock
from ddpjob_operator.kube.watch import observe
from ddpjob_operator.kube.watch.store import Key, ObjectKey, Raw, version
from ddpjob_operator.observed.cluster import Node

_LOGGER = logging.getLogger(__name__)
READY = Node(ready=True)
# When so many do not report, the control plane does not receive, and their trainers go on. The node controller judges
# alike and evicts nothing then (its unhealthy-zone-threshold is 0.55, and at least three nodes).
DISRUPTED_SHARE, DISRUPTED_NODES = 0.55, 3
# Nodes that stop to report together are called not ready within a minute. Those that became so apart from each other
# have causes of their own, and those that have been powered off for weeks prove nothing about one that dies today.
TOGETHER_SECONDS = 300.0
# More than a cluster has nodes (5,000). An autoscaler removes nodes every day, and nobody asks for most of them again.
GONE_MAX = 10_000


class NodeCache:
    """`changed(names)` is called when nodes are no longer, or again, ready, or when it is judged anew what that means:
    once for all of them, since who is told may look at every pod. Ready ones cost nothing: there are many.

    Since when is counted by our own clock, from when we first saw it: another machine's may be minutes off.
    """

    def __init__(self, changed: Callable[[Set[str]], None], now: Callable[[], dt.datetime]) -> None:
        self._changed = changed
        self._now = now
        self._clock = Clock()
        self._names: dict[str, tuple[int, str]] = {}
        """With the version that was seen last, and the uid."""
        self._not_ready: dict[str, Node] = {}
        """Also those whose object is gone."""
        self._gone: dict[str, bool] = {}
        """Those whose object is gone, and whether the API server was asked for it: a watch or a list may be late."""
        self._turned: dict[str, float] = {}
        """When those became so; by the cluster's clock where that was before the first list."""
        self._listed = False
        self._disruption_logged = False

    def __len__(self) -> int:
        return len(self._names)

    def seen(self) -> dict[str, Node] | None:
        """Those that are not ready or gone, by name; None while they were never listed: nothing is known then."""
        if not self._listed:
            return None
        self._adjust_clock()
        return self._not_ready

    def _adjust_clock(self) -> None:
        """Where our wall clock was set back, move all times as far, so that no node counts as lost later."""
        if by := self._clock.set_back(self._now()):
            self._not_ready = {
                n: dataclasses.replace(node, since=node.since and node.since + by)
                for n, node in self._not_ready.items()
            }
            self._turned = {n: at + by.total_seconds() for n, at in self._turned.items()}

    @property
    def disrupted(self) -> bool:
        """Whether most nodes have become not ready together."""
        return any(node.with_most for node in self._not_ready.values())

    def put(self, raw: Raw) -> None:
        """A node as it is."""
        name = raw["metadata"]["name"]
        known = name in self._names or name in self._gone
        self._names[name] = (version(raw["metadata"]), raw["metadata"].get("uid", ""))
        if observe.is_ready(raw):
            self._gone.pop(name, None)
            return self._set(name, READY)
        if name not in self._turned:
            # Since when the cluster calls it not ready, where it became so before the first list.
            since = bounds.time(observe.condition(raw, "Ready").get("lastTransitionTime"))
            at = self._now() if known else min(since or self._now(), self._now())
            self._turned[name] = at.timestamp()
        # A node that comes back is not ready at first. Its pods were not heard of in between, so their time goes on.
        since = self._not_ready[name].since if self._gone.pop(name, None) is not None else self._now()
        return self._set(name, Node(ready=False, since=since))

    def remove(self, namespace: str, name: str, uid: str) -> None:
        """A node's object is gone, and with it what would report on its pods: they count as on a node that is not
        ready, since now or since it was not ready. uid: empty, or that of the object, because another one of that name
        may be there by now."""
        if uid and self._names.get(name, (0, uid))[1] != uid:
            return None
        self._names.pop(name, None)
        self._turned.pop(name, None)
        if not self._listed:  # what a list before this operator had is not known
            return self._set(name, READY)
        if name in self._gone:
            return None
        known = self._not_ready.get(name)
        # Where most nodes are not heard nobody counts as lost, and the time until now proves nothing of this one.
        since = self._now() if known is None or known.with_most else known.since
        self._gone[name] = False
        while len(self._gone) > GONE_MAX:
            self._forget(next(iter(self._gone)))
        return self._set(name, Node(ready=False, since=since, gone=True))

    def _forget(self, name: str) -> None:
        del self._gone[name]
        self._set(name, READY)

    def unknown(self, names: Set[str]) -> list[str]:
        """Those of these names of which the API server was not asked whether such a node is there, and no node of ours
        has them."""
        if not self._listed:
            return []
        return sorted(name for name in names if name not in self._names and not self._gone.get(name))

    def is_gone(self, name: str) -> None:
        """The API server has no node of this name."""
        self.remove("", name, "")
        if self._listed:
            self._gone[name] = True

    def one_observation(self, namespace: str = "", key: Key | None = None) -> contextlib.AbstractContextManager[None]:
        """The order in which nodes were seen does not matter."""
        return contextlib.nullcontext()

    def retain(self, named: Set[ObjectKey], list_version: int, namespace: str = "") -> None:
        """The end of a list: all that it named was put."""
        self._listed = True
        for name in self._names.keys() - {name for _, name in named}:
            self.remove("", name, "")
        self._judge()

    def begin_anew(self, namespace: str) -> None:
        """It keeps no order."""

    def has(self, raw: Raw) -> bool:
        """True if a node is known as it was at its resourceVersion, or later."""
        return self._names.get(raw["metadata"]["name"], (-1, ""))[0] >= version(raw["metadata"])

    def _set(self, name: str, node: Node) -> None:
        before = self._not_ready.get(name, READY)
        if (node.ready, node.gone) == (before.ready, before.gone):
            return
        # A new mapping: a plan may still read the old one.
        others = {n: known for n, known in self._not_ready.items() if n != name}
        if node.ready:
            self._turned.pop(name, None)
        self._not_ready = others if node.ready else {**others, name: node}
        self._changed({name})
        if self._listed:  # else most are not known yet
            self._judge()

    def _judge(self) -> None:
        """Which of them became so with most others."""
        most = self._with_most()
        changed = sorted(most ^ {n for n, known in self._not_ready.items() if known.with_most})
        judged = {n: dataclasses.replace(self._not_ready[n], with_most=n in most) for n in changed}
        self._not_ready = {**self._not_ready, **judged} if judged else self._not_ready
        if changed:
            self._changed(set(changed))
        self._log_disruption()

    def _with_most(self) -> set[str]:
        """The nodes that most others have become not ready together with, of those that were ready until then."""
        if len(self._turned) < DISRUPTED_NODES:
            return set()
        names = sorted(self._turned, key=self._turned.__getitem__)
        times = [self._turned[name] for name in names]
        together: set[str] = set()
        first = last = 0
        for name, at in zip(names, times, strict=True):
            while times[first] < at - TOGETHER_SECONDS:
                first += 1
            while last < len(times) and times[last] <= at + TOGETHER_SECONDS:
                last += 1
            # Those before `first` were off already.
            if last - first >= max(DISRUPTED_NODES, DISRUPTED_SHARE * (len(self._names) - first)):
                together.add(name)
        return together

    def _log_disruption(self) -> None:
        if self.disrupted != self._disruption_logged:
            self._disruption_logged = self.disrupted
            if self.disrupted:
                text = "%d of %d nodes are not ready, most of them at once: those do not count as lost"
                _LOGGER.warning(text, len(self._turned), len(self._names))
            else:
                _LOGGER.info("most nodes are ready again")
