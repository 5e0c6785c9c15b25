"""The nodes that are not ready, if the operator may read nodes."""

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
# If this share of the nodes is silent, the control plane is probably cut off and the trainers are still running.
# The node controller also stops evicting at its unhealthy-zone-threshold, 0.55, if three nodes or more are not ready.
DISRUPTED_SHARE, DISRUPTED_NODES = 0.55, 3
# Seconds. Nodes that lose contact together are marked not ready within a minute, so longer intervals mean other causes:
# nodes that were powered off weeks ago are no evidence about a node that dies today.
TOGETHER_SECONDS = 300.0
# More than the nodes of the largest cluster (5,000). An autoscaler removes nodes daily; most are never needed again.
GONE_MAX = 10_000


class NodeCache:
    """Keeps the nodes that are not ready; there are few.

    `changed(names)` is called when nodes become ready or not ready, and when a disruption of most nodes begins or ends:
    once for all nodes, because it may visit all pods. Times are by our own clock, from when we first saw a node not
    ready, because clocks of other machines may be minutes off.
    """

    def __init__(self, changed: Callable[[Set[str]], None], now: Callable[[], dt.datetime]) -> None:
        self._changed = changed
        self._now = now
        self._clock = Clock()
        self._names: dict[str, tuple[int, str]] = {}
        """Version seen last, and uid, of all nodes."""
        self._not_ready: dict[str, Node] = {}
        """Nodes that are not ready, deleted nodes included."""
        self._gone: dict[str, bool] = {}
        """Deleted nodes; True if the API server confirmed the deletion, because a watch or list may be late."""
        self._turned: dict[str, float] = {}
        """When nodes became not ready; by the cluster's clock if that was before the first list."""
        self._listed = False
        self._disruption_logged = False

    def __len__(self) -> int:
        return len(self._names)

    def seen(self) -> dict[str, Node] | None:
        """Return the nodes that are not ready or deleted; None before the first list."""
        if not self._listed:
            return None
        if by := self._clock.set_back(self._now()):  # move our times with the clock
            self._not_ready = {
                n: dataclasses.replace(node, since=node.since and node.since + by)
                for n, node in self._not_ready.items()
            }
            self._turned = {n: at + by.total_seconds() for n, at in self._turned.items()}
        return self._not_ready

    @property
    def disrupted(self) -> bool:
        """True if most nodes became not ready together."""
        return any(node.with_most for node in self._not_ready.values())

    def put(self, raw: Raw) -> None:
        name = raw["metadata"]["name"]
        known = name in self._names or name in self._gone
        self._names[name] = (version(raw["metadata"]), raw["metadata"].get("uid", ""))
        if observe.is_ready(raw):
            self._gone.pop(name, None)
            return self._set(name, READY)
        if name not in self._turned:
            # If the node became not ready before the first list, only the API server knows the time.
            since = bounds.time(observe.condition(raw, "Ready").get("lastTransitionTime"))
            at = self._now() if known else min(since or self._now(), self._now())
            self._turned[name] = at.timestamp()
        # A new node is not ready at first.
        # If a deleted node had this name, keep its time, because the pods are silent since then.
        since = self._not_ready[name].since if self._gone.pop(name, None) is not None else self._now()
        return self._set(name, Node(ready=False, since=since))

    def remove(self, namespace: str, name: str, uid: str) -> None:
        """Treat a deleted node as not ready, because nothing reports on its pods any more.

        uid: of the deleted object, "" if unknown: a new object of this name may exist already.
        """
        if uid and self._names.get(name, (0, uid))[1] != uid:
            return None
        self._names.pop(name, None)
        self._turned.pop(name, None)
        if not self._listed:  # before the first list, deleted nodes are not known
            return self._set(name, READY)
        if name in self._gone:
            return None
        known = self._not_ready.get(name)
        # While most nodes are silent, no node counts as lost. So this node's silence until now does not count.
        since = self._now() if known is None or known.with_most else known.since
        self._gone[name] = False
        while len(self._gone) > GONE_MAX:
            oldest = next(iter(self._gone))
            del self._gone[oldest]
            self._set(oldest, READY)
        return self._set(name, Node(ready=False, since=since, gone=True))

    def unknown(self, names: Set[str]) -> list[str]:
        """Return the names of nodes that are neither known nor confirmed as gone by the API server."""
        if not self._listed:
            return []
        return sorted(name for name in names if name not in self._names and not self._gone.get(name))

    def is_gone(self, name: str) -> None:
        """Record the API server's answer that there is no node of this name."""
        self.remove("", name, "")
        if self._listed:
            self._gone[name] = True

    def one_observation(
        self, namespace: str = "", key: Key | None = None
    ) -> contextlib.AbstractContextManager[set[ObjectKey]]:
        return contextlib.nullcontext({("", name) for name in self._names})

    def drop(self, unlisted: Set[ObjectKey], list_version: int) -> None:
        self._listed = True
        for place in sorted(unlisted):
            self.remove(*place, "")
        self._judge()

    def begin_anew(self, namespace: str) -> None:
        """Do nothing: a Sink must now accept older versions, and `put` accepts any version."""

    def has(self, raw: Raw) -> bool:
        return self._names.get(raw["metadata"]["name"], (-1, ""))[0] >= version(raw["metadata"])

    def _set(self, name: str, node: Node) -> None:
        before = self._not_ready.get(name, READY)
        if (node.ready, node.gone) == (before.ready, before.gone):
            return
        # Make a new dict, because a plan may be reading the old one in a thread.
        others = {n: known for n, known in self._not_ready.items() if n != name}
        if node.ready:
            self._turned.pop(name, None)
        self._not_ready = others if node.ready else {**others, name: node}
        self._changed({name})
        if self._listed:  # before the first list most nodes are not known
            self._judge()

    def _judge(self) -> None:
        """Find out which nodes became not ready together with most others, and log a disruption."""
        most = self._with_most()
        changed = sorted(most ^ {n for n, known in self._not_ready.items() if known.with_most})
        judged = {n: dataclasses.replace(self._not_ready[n], with_most=n in most) for n in changed}
        self._not_ready = {**self._not_ready, **judged} if judged else self._not_ready
        if changed:
            self._changed(set(changed))
        if self.disrupted != self._disruption_logged:
            self._disruption_logged = self.disrupted
            if self.disrupted:
                text = "%d of %d nodes are not ready, most of them since the same moment, so those do not count as lost"
                _LOGGER.warning(text, len(self._turned), len(self._names))
            else:
                _LOGGER.info("most nodes are ready again")

    def _with_most(self) -> set[str]:
        """Return the nodes that became not ready together with most of the nodes that were ready until then."""
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
            # Nodes before `first` had become not ready earlier, so they do not count.
            if last - first >= max(DISRUPTED_NODES, DISRUPTED_SHARE * (len(self._names) - first)):
                together.add(name)
        return together
