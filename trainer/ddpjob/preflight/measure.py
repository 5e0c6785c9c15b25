"""`python -m ddpjob.preflight`, run as every rank of a job: check if a node is too slow to train with the others.

    survey    every process multiplies matrices; one of each node writes a file, resolves a name, compares clocks and
              exchanges bytes with its peers, in pairs that share no node
    judge     judge.py: which nodes are slow, by how much, and what else is worth a warning
    report    a table in rank 0's log; if a node is bad, its termination message names it, and all ranks end with 75

`ddprun` runs it if the job requests it (docs/ddprun.md); a script under another launcher may call `run()`.
"""

import argparse
import contextlib
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddpjob.errors import Stopped
from ddpjob.group import gather
from ddpjob.group.join import World, active, init
from ddpjob.preflight import judge
from ddpjob.preflight.judge import MIB, NodeResult, Peer, RankMeasures
from ddpjob.process import latest_step
from ddpjob.reporting import termination

JOIN_SECONDS = 60.0  # limit for the rendezvous and for each collective; a node that takes longer counts as lost
ROUNDS_MAX = 16  # rounds of exchanges: with more than 17 nodes each has 16 peers
CONFIRMATIONS = 2  # number of further measurements before a node counts as bad
PINGS, CLOCK_TRIALS = 20, 4
PROBES, PROBE_BYTES = 4, 64 * 1024
# A process may wait some milliseconds for a busy processor, so a shorter exchange measures nothing.
PAYLOADS, PAYLOAD_SECONDS, PAYLOAD_BYTES_MIN, PAYLOAD_BYTES_MAX = 6, 0.02, 256 * 1024, 64 * MIB
MATMULS_MIN, MATMUL_SECONDS = 3, 0.2
CHUNKS, DISK_SECONDS = 16, 0.3
ROWS_MAX = 32


def run(folder: str = "") -> NodeResult:
    """Check the nodes of this job and return the result. Call it on every rank. If a node is bad, all exit with 75.

    folder  on the disk to measure: at most 16 MiB are written, and removed. Default: the working folder, or the one for
            temporary files if the working folder is not writable.
    """
    began = time.monotonic()
    world = active() or init(timeout_start_seconds=JOIN_SECONDS)
    measures = survey(world, folder)
    result = judge.judge(measures)
    for _ in range(CONFIRMATIONS):
        if result.bad:  # measure the nodes again, because other programs may have used processor, network or disk
            measures = [judge.best_of(*both) for both in zip(measures, survey(world, folder), strict=True)]
            result = judge.judge(measures)
    if world.is_main:
        print("\n".join(table(measures, result, world.backend, time.monotonic() - began)), flush=True)
    if not result.bad:
        return result
    if world.is_main:
        first = min(rank.rank for rank in measures if rank.node == result.bad_nodes[0])
        termination.tell_unfit(first, result.message, result.bad_nodes)
    raise Stopped(latest_step())


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m ddpjob.preflight", description="Is a node too slow to train with the others?"
    )
    parser.add_argument("--folder", default="", help="where the speed of the disk is measured")
    folder = parser.parse_args().folder
    with init(timeout_start_seconds=JOIN_SECONDS):
        run(folder)


# ---- survey ------------------------------------------------------------------------------------------------


def survey(world: World, folder: str = "") -> list[RankMeasures]:
    """Let every rank measure, and return the measurements by rank; all ranks get the same list."""
    own = RankMeasures(world.node_rank, world.rank, _machine(), seconds_per_flop(world.device))
    places = [json.loads(text) for text in gather.texts(json.dumps([world.local_rank, world.node_rank]))]
    first_ranks = {node: rank for rank, (local_rank, node) in enumerate(places) if local_rank == 0}
    if first_ranks.get(world.node_rank) == world.rank:
        own = _of_node(own, world, first_ranks, folder)
    return [_decoded(json.loads(text)) for text in gather.texts(json.dumps(own))]


def _of_node(own: RankMeasures, world: World, first_ranks: dict[int, int], folder: str) -> RankMeasures:
    """Return the measurements of one rank, with those of its node if it is the node's first rank."""
    own = own._replace(
        peers=tuple(_measure_links(world, first_ranks)),
        skew_seconds=skew_seconds(world, first_ranks),
        resolve_seconds=resolve_seconds(os.environ.get("MASTER_ADDR", "")),
        shm_bytes=_free_bytes("/dev/shm"),  # noqa: S108 - nothing is written there
    )
    try:
        return own._replace(disk_seconds_per_byte=disk_seconds_per_byte(folder))
    except OSError as error:
        return own._replace(trouble=f"the disk was not measured: {error}")


def _decoded(fields: list[Any]) -> RankMeasures:
    *values, peers = fields
    return RankMeasures._make([*values, tuple(Peer(*peer) for peer in peers)])


def _measure_links(world: World, first_ranks: dict[int, int]) -> Iterator[Peer]:
    """Let each node exchange bytes with the others, in rounds: in a round each node has at most one peer."""
    nodes = sorted(first_ranks)
    for pairs in rounds(len(nodes)):
        for one, other in ((nodes[a], nodes[b]) for a, b in pairs):
            if world.node_rank in (one, other):
                node = other if world.node_rank == one else one
                yield Peer(node, *measure_link(first_ranks[node], world.device))


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Return the pairs of each round, as in a round-robin tournament: the first node keeps its place, and the others
    rotate. If the number of nodes is odd, each round leaves one out."""
    seats: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    played = []
    for _ in range(min(len(seats) - 1, ROUNDS_MAX)):
        pairs = [(seats[i], seats[-1 - i]) for i in range(len(seats) // 2)]
        played.append([(a, b) for a, b in pairs if a is not None and b is not None])
        seats[1:] = [seats[-1], *seats[1:-1]]
    return played


def measure_link(peer: int, device: torch.device) -> tuple[float, float]:
    """Return the fewest seconds per byte, in both directions at once as in a ring all_reduce, and per small message."""
    on_device = gather.device_for(None, device)
    _exchange(peer, 1, on_device)  # not timed, because nccl connects at its first exchange
    latency = min(_exchange(peer, 1, on_device) for _ in range(PINGS))
    probe = min(_exchange(peer, PROBE_BYTES, on_device) for _ in range(PROBES))
    both = torch.empty(1, dtype=torch.float64, device=on_device)
    swap(peer, torch.tensor([probe], dtype=torch.float64, device=on_device), both)
    fitting = int(PROBE_BYTES * PAYLOAD_SECONDS / max(probe, both.item()))  # equal on both sides of the link
    size = min(PAYLOAD_BYTES_MAX, max(PAYLOAD_BYTES_MIN, fitting))
    fastest = min(_exchange(peer, size, on_device) for _ in range(PAYLOADS))
    return min(fastest / size, probe / PROBE_BYTES), latency


def _exchange(peer: int, size: int, device: torch.device) -> float:
    """Return the seconds of an exchange. Both sides begin together, when each has received a byte of the other."""
    out, into = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    swap(peer, out[:1], into[:1])
    began = time.perf_counter()
    swap(peer, out, into)
    return time.perf_counter() - began


def swap(peer: int, out: torch.Tensor, into: torch.Tensor) -> None:
    # As one batch, because nccl would otherwise create a communicator for each pair, which takes a second.
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, out, peer), dist.P2POp(dist.irecv, into, peer)]):
        work.wait()
    if out.is_cuda:
        torch.cuda.synchronize()


def skew_seconds(world: World, first_ranks: dict[int, int]) -> float:
    """Return this node's clock minus node 0's, in seconds. Node 0 measures the other nodes one by one."""
    if world.rank != first_ranks[min(first_ranks)]:
        return _clock_less_that_of(first_ranks[min(first_ranks)], world.device)
    for rank in sorted(first_ranks.values()):
        if rank != world.rank:
            _clock_less_that_of(rank, world.device)
    return 0.0


def _clock_less_that_of(peer: int, device: torch.device) -> float:
    """Return our clock minus the peer's in seconds, computed like NTP: from the fastest message in each direction,
    because it waited least. Both directions are assumed to take equally long."""
    on_device = gather.device_for(None, device)
    theirs = torch.empty(1, dtype=torch.float64, device=on_device)

    def swapped(value: float) -> float:
        swap(peer, torch.tensor([value], dtype=torch.float64, device=on_device), theirs)
        return theirs.item()

    late = min(
        -swapped(time.time()) + time.time() for _ in range(CLOCK_TRIALS)
    )  # a message's transit time plus our clock minus the peer's clock
    return (late - swapped(late)) / 2


def seconds_per_flop(device: torch.device) -> float:
    """Return seconds per floating-point operation of a matrix product, the best of several within 0.2 s."""
    size = 4096 if device.type == "cuda" else 256  # takes some milliseconds, less than a time slice of the processor
    left, right = torch.ones(size, size, device=device), torch.ones(size, size, device=device)

    def product() -> None:
        torch.mm(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return _least_seconds(product, MATMULS_MIN, MATMUL_SECONDS) / (2 * size**3)


def disk_seconds_per_byte(folder: str = "") -> float:
    """Return seconds per byte of the fastest mebibyte that reached the disk."""
    if not folder:
        folder = "." if os.access(".", os.W_OK) else tempfile.gettempdir()
    chunk = bytes(MIB)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:

        def write() -> None:
            file.seek(0)
            file.write(chunk)
            os.fsync(file.fileno())

        return _least_seconds(write, 1, DISK_SECONDS, CHUNKS) / MIB


def resolve_seconds(name: str) -> float:
    """Return the seconds to resolve this name, by which the ranks have found each other; 0 without a name."""
    began = time.perf_counter()
    with contextlib.suppress(OSError):
        socket.getaddrinfo(name, None)
    return time.perf_counter() - began if name else 0.0


def _least_seconds(work: Callable[[], None], least: int, seconds: float, most: int = 1000) -> float:
    """Return the shortest duration of several calls, because other work on the machine only adds time."""
    until = time.perf_counter() + seconds
    took: list[float] = []
    while len(took) < least or (len(took) < most and time.perf_counter() < until):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return min(took)


def _machine() -> str:
    """Return the kernel's boot id, which is the same in all containers of a machine."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return socket.gethostname()


def _free_bytes(folder: str) -> int | None:
    with contextlib.suppress(OSError):
        system = os.statvfs(folder)
        return system.f_bavail * system.f_frsize
    return None


# ---- report ------------------------------------------------------------------------------------------------


def table(measures: Sequence[RankMeasures], result: NodeResult, backend: str, seconds: float) -> list[str]:
    nodes = judge.by_node(measures)
    first_ranks = {rank.node: rank for rank in reversed(measures)}
    lines = [
        f"pre-flight, nodes: {len(nodes)}, ranks: {len(measures)}, {backend}, in {seconds:.1f} s",
        " node   bandwidth   latency         matmul        disk      name     clock    /dev/shm",
    ]
    shown = sorted(nodes, key=lambda node: (node not in result.bad_nodes, node))[:ROWS_MAX]
    for node in shown:
        of, first = nodes[node], first_ranks[node]
        shm = "-" if first.shm_bytes is None else f"{first.shm_bytes // MIB} MiB"
        lines.append(
            f"{node:>5}{judge.rate(of.bandwidth, 'B/s'):>12}{judge.duration(of.latency):>10}"
            f"{judge.rate(of.matmul, 'FLOP/s'):>15}{judge.rate(of.disk, 'B/s'):>12}"
            f"{judge.duration(first.resolve_seconds):>10}{first.skew_seconds:>+9.2f}s{shm:>12}"
        )
    if len(nodes) > len(shown):
        lines.append(f"      and {len(nodes) - len(shown)} more")
    lines += [f"pre-flight: warning: {warning}" for warning in result.warnings]
    return [*lines, result.message or "pre-flight: no node is slow"]
