"""Decide from the measurements of all ranks which nodes are too slow. Pure, and without torch.

Measures are seconds per unit of work: less is better, and 0 means not measured. A node is bad if it takes twice as long
as the median node and the difference matters. A suspect is measured again (`best_of`), because it may have been busy.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

MIB = 1024**2
LATENCY_SECONDS = 1e-3  # a smaller difference from the median is another rack or zone, not a fault
DISK_SECONDS_PER_BYTE = 1 / 100e6  # faster disks delay no snapshot; healthy disks may differ by more than a factor of 2
SKEW_SECONDS = 2.0
RESOLVE_SECONDS = 1.0
SHM_BYTES = 64 * MIB  # default size of /dev/shm in a container


class Peer(NamedTuple):
    """The connection from this node to another."""

    node: int
    seconds_per_byte: float
    latency_seconds: float


class RankMeasures(NamedTuple):
    """Measurements of one rank; only the first rank of each node has more than seconds_per_flop."""

    node: int
    rank: int
    machine: str
    """Equal for nodes that are pods of one machine."""
    seconds_per_flop: float
    disk_seconds_per_byte: float = 0.0
    resolve_seconds: float = 0.0
    """Time to resolve MASTER_ADDR."""
    skew_seconds: float = 0.0
    """Seconds: the node's clock minus that of node 0."""
    shm_bytes: int | None = None
    """Free bytes in /dev/shm."""
    trouble: str = ""
    """Name of what could not be measured, and the reason."""
    peers: tuple[Peer, ...] = ()


class SlowNode(NamedTuple):
    """A node that is slow by one criterion."""

    node: int
    times: float
    """Factor relative to the usual value."""
    text: str


class NodeResult(NamedTuple):
    """The verdict on all nodes."""

    bad: tuple[SlowNode, ...] = ()
    """Bad nodes, the worst first. Always fewer than half of the nodes (of two: one), because the majority defines what
    is usual."""
    warnings: tuple[str, ...] = ()

    @property
    def bad_nodes(self) -> list[int]:
        return list(dict.fromkeys(slow.node for slow in self.bad))

    @property
    def message(self) -> str:
        """Return for example "pre-flight: node 3 is slow: 1.1 GB/s to its peers where the median is 9.8 GB/s"."""
        return "pre-flight: " + "; ".join(slow.text for slow in self.bad) if self.bad else ""


class NodeMeasures(NamedTuple):
    """The four measures of a node."""

    bandwidth: float
    latency: float
    matmul: float
    disk: float


class Criterion(NamedTuple):
    """The limit at which a node is bad by one measure."""

    measure: str
    """The field of NodeMeasures."""
    factor: float
    factor_of_two: float
    """The factor if there are only two nodes, so that each defines what is usual for the other; 0 if two nodes cannot
    show which one is at fault."""
    text: Callable[[float], str]
    what: str
    matters: Callable[[float, float], bool] = lambda _seconds, _usual: True


CRITERIA = (
    Criterion("bandwidth", 2, 0, lambda s: rate(s, "B/s"), "to its peers"),
    Criterion("latency", 2, 0, lambda s: duration(s), "to its peers", lambda s, usual: s - usual >= LATENCY_SECONDS),
    Criterion("matmul", 2, 4, lambda s: rate(s, "FLOP/s"), "in a matrix product"),
    Criterion("disk", 4, 8, lambda s: rate(s, "B/s"), "to its disk", lambda s, _usual: s > DISK_SECONDS_PER_BYTE),
)


def judge(measures: Sequence[RankMeasures]) -> NodeResult:
    """Return the verdict. It is the same on every rank, because all have the same measurements."""
    nodes = by_node(measures)
    slow = sorted((node for criterion in CRITERIA for node in _slow(criterion, nodes)), key=lambda s: -s.times)
    bad = list(dict.fromkeys(s.node for s in slow))[: max(1, (len(nodes) - 1) // 2)]
    return NodeResult(tuple(s for s in slow if s.node in bad), tuple(_warnings(measures)))


def by_node(measures: Sequence[RankMeasures]) -> dict[int, NodeMeasures]:
    """Return the four measures of each node: of its slowest process, and the median over its peers. A slow link lowers
    the measure of both ends, but the median is low only on a slow node. Pods of one machine communicate without a
    network, so with several machines only links between machines count."""
    machine = {rank.node: rank.machine for rank in measures}
    nodes = {}
    for node in sorted(machine):
        ranks = [rank for rank in measures if rank.node == node]
        peers = [peer for rank in ranks for peer in rank.peers]
        if len(set(machine.values())) > 1:
            peers = [peer for peer in peers if machine[peer.node] != machine[node]]
        nodes[node] = NodeMeasures(
            statistics.median_low([p.seconds_per_byte for p in peers]) if peers else 0.0,
            statistics.median_low([p.latency_seconds for p in peers]) if peers else 0.0,
            max(rank.seconds_per_flop for rank in ranks),
            max(rank.disk_seconds_per_byte for rank in ranks),
        )
    return nodes


def best_of(one: RankMeasures, other: RankMeasures) -> RankMeasures:
    """Return the better (smaller) value of each measure from two measurements of a rank."""
    peers = {peer.node: peer for peer in one.peers}
    for peer in other.peers:
        before = peers.get(peer.node, peer)
        peers[peer.node] = Peer(peer.node, *(_least(a, b) for a, b in zip(before[1:], peer[1:], strict=True)))
    return other._replace(
        seconds_per_flop=_least(one.seconds_per_flop, other.seconds_per_flop),
        disk_seconds_per_byte=_least(one.disk_seconds_per_byte, other.disk_seconds_per_byte),
        resolve_seconds=min(one.resolve_seconds, other.resolve_seconds),
        skew_seconds=min(one.skew_seconds, other.skew_seconds, key=abs),
        peers=tuple(peers.values()),
    )


def _slow(criterion: Criterion, nodes: dict[int, NodeMeasures]) -> Iterator[SlowNode]:
    seconds = {node: value for node, of in nodes.items() if (value := getattr(of, criterion.measure)) > 0}
    if len(seconds) < 2:
        return
    several = len(seconds) > 2
    usual = statistics.median(seconds.values()) if several else min(seconds.values())
    factor = criterion.factor if several else criterion.factor_of_two
    for node, value in seconds.items():
        if factor and value >= factor * usual and criterion.matters(value, usual):
            than = f"the {'median' if several else 'other'} is {criterion.text(usual)}"
            yield SlowNode(
                node, value / usual, f"node {node} is slow: {criterion.text(value)} {criterion.what} where {than}"
            )


def _warnings(measures: Sequence[RankMeasures]) -> Iterator[str]:
    ranks = {node: sum(rank.node == node for rank in measures) for node in {rank.node for rank in measures}}
    for rank in measures:
        node = f"node {rank.node}"
        if abs(rank.skew_seconds) > SKEW_SECONDS:
            way = "ahead of" if rank.skew_seconds > 0 else "behind"
            yield (
                f"{node}'s clock is {abs(rank.skew_seconds):.1f} s {way} node 0's: tokens and certificates may be "
                f"refused there, and times in logs mislead. Check that it runs chrony or another NTP client."
            )
        if rank.resolve_seconds > RESOLVE_SECONDS:
            yield (
                f"{node} took {rank.resolve_seconds:.1f} s to resolve MASTER_ADDR: check the cluster's DNS, its "
                f"load, and the pod's search domains."
            )
        if rank.shm_bytes is not None and rank.shm_bytes < SHM_BYTES and ranks[rank.node] > 1:
            yield (
                f"{node} has {rank.shm_bytes // MIB} MiB free in /dev/shm for {ranks[rank.node]} ranks: NCCL and "
                f"data loaders need more than {SHM_BYTES // MIB} MiB. Mount an emptyDir of medium Memory there."
            )
        if rank.trouble:
            yield f"{node}: {rank.trouble}"


def rate(seconds: float, unit: str) -> str:
    """Return for example "9.8 GB/s". seconds: per byte if the unit is "B/s"."""
    if seconds <= 0:
        return "-"
    per_second = float(f"{1 / seconds:.3g}")
    scale, prefix = next((s, p) for s, p in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (0.0, "k")) if per_second >= s)
    return f"{per_second / (scale or 1e3):g} {prefix}{unit}"


def duration(seconds: float) -> str:
    """Return for example "0.05 ms"."""
    return f"{seconds * 1e3:.2g} ms" if seconds < 1 else f"{seconds:.1f} s"


def _least(one: float, other: float) -> float:
    """Return the smaller value; a value of 0 was not measured."""
    return min((seconds for seconds in (one, other) if seconds > 0), default=0.0)
