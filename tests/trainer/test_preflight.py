"""The pre-flight names a slow node, and no node that is only busy for a moment. All ranks end with the same result."""

import importlib
import json
import runpy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ddpjob
from ddpjob.preflight import judge as judge_file
from ddpjob.preflight.judge import Peer, RankMeasures, judge

preflight = importlib.import_module("ddpjob.preflight.measure")

GB_PER_SECOND, MS = 1e-9, 1e-3


def job(nodes: int = 4, ranks: int = 1, **measured: Any) -> list[RankMeasures]:
    """Return measurements of healthy nodes on separate machines: 10 GB/s, 0.1 ms, 100 GFLOP/s, 500 MB/s. measured:
    other values, by node."""

    def of(name: str, node: int, usual: Any) -> Any:
        return measured.get(name, {}).get(node, usual)

    def peer(a: int, b: int) -> Peer:
        gb = min(of("gb", a, 10.0), of("gb", b, 10.0))
        return Peer(b, GB_PER_SECOND / gb, max(of("ms", a, 0.1), of("ms", b, 0.1)) * MS)

    def report(node: int, local_rank: int) -> RankMeasures:
        slow = of("gflops", node, 100.0) if local_rank == ranks - 1 else 100.0  # one process of the slow node is slow
        mine = RankMeasures(node, node * ranks + local_rank, of("machine", node, f"m{node}"), 1e-9 / slow)
        return mine if local_rank else mine._replace(
            disk_seconds_per_byte=1e-6 / of("mb", node, 500.0),
            resolve_seconds=of("resolve", node, 0.002),
            skew_seconds=of("skew", node, 0.0),
            shm_bytes=of("shm", node, 1 << 30),
            trouble=of("trouble", node, ""),
            peers=tuple(peer(node, other) for other in range(nodes) if other != node),
        )  # fmt: skip

    return [report(node, local_rank) for node in range(nodes) for local_rank in range(ranks)]


def beside_each_other(reports: list[RankMeasures]) -> list[RankMeasures]:
    """Return the reports as if the first three nodes were pods of one machine, with 90 GB/s between them."""

    def near(a: int, peer: Peer) -> Peer:
        return peer._replace(seconds_per_byte=GB_PER_SECOND / 90) if a < 3 and peer.node < 3 else peer

    return [report._replace(peers=tuple(near(report.node, peer) for peer in report.peers)) for report in reports]


JUDGED: dict[str, tuple[list[RankMeasures], str]] = {  # "" if no node is bad
    "healthy nodes": (job(), ""),
    "one node alone": (job(1), ""),
    "a slow link to all peers": (
        job(gb={3: 1.1}),
        "pre-flight: node 3 is slow: 1.1 GB/s to its peers where the median is 10 GB/s",
    ),
    "a slow link of one of three": (
        job(3, gb={1: 4.9}),
        "pre-flight: node 1 is slow: 4.9 GB/s to its peers where the median is 10 GB/s",
    ),
    "less than twice as slow": (job(gb={3: 5.5}, gflops={1: 55}), ""),
    "of a pair nobody can say whose link is slow": (job(2, gb={1: 0.1}, ms={0: 50}), ""),
    "two of four have no majority against them": (job(gb={2: 1, 3: 1}), ""),
    "two of five have": (
        job(5, gb={2: 1, 4: 2}),
        "pre-flight: node 2 is slow: 1 GB/s to its peers where the median is 10 GB/s; "
        "node 4 is slow: 2 GB/s to its peers where the median is 10 GB/s",
    ),
    "latency of another rack": (job(ms={2: 0.9}), ""),
    "latency that matters": (
        job(ms={2: 4}),
        "pre-flight: node 2 is slow: 4 ms to its peers where the median is 0.1 ms",
    ),
    "one slow processor among eight": (
        job(4, 8, gflops={1: 40}),
        "pre-flight: node 1 is slow: 40 GFLOP/s in a matrix product where the median is 100 GFLOP/s",
    ),
    "the slower processor of a pair is known": (
        job(2, gflops={0: 24}),
        "pre-flight: node 0 is slow: 24 GFLOP/s in a matrix product where the other is 100 GFLOP/s",
    ),
    "but it may be half as fast": (job(2, gflops={0: 45}), ""),
    "a slow disk": (
        job(mb={0: 9}),
        "pre-flight: node 0 is slow: 9 MB/s to its disk where the median is 500 MB/s",
    ),
    "a disk that is slower, and fast enough": (job(mb={0: 110}), ""),
    "pods of one machine are near, which is no fault of the fourth": (
        beside_each_other(job(machine={0: "m", 1: "m", 2: "m"})),
        "",
    ),
    "half of the nodes are never bad: the worst of them is": (
        job(4, gb={1: 2}, gflops={2: 5}),
        "pre-flight: node 2 is slow: 5 GFLOP/s in a matrix product where the median is 100 GFLOP/s",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", JUDGED)
def test_a_node_is_bad_if_it_is_twice_as_slow_as_the_median_and_the_difference_matters(name):
    reports, wanted = JUDGED[name]
    assert judge(reports).message == wanted


@pytest.mark.parametrize(
    ("reports", "words"),
    [
        (job(skew={2: -3.21}), "node 2's clock is 3.2 s behind node 0's"),
        (job(skew={1: 1.9}), ""),
        (job(resolve={1: 2.5}), "node 1 took 2.5 s to resolve MASTER_ADDR"),
        (job(4, 2, shm={0: 60 << 20}), "node 0 has 60 MiB free in /dev/shm for 2 ranks"),
        (job(4, 1, shm={0: 60 << 20}), ""),
        (job(trouble={3: "the disk was not measured: full"}), "node 3: the disk was not measured: full"),
    ],
)
def test_a_slowness_with_another_cause_than_the_node_is_only_a_warning(reports, words):
    verdict = judge(reports)
    assert not verdict.bad
    assert len(verdict.warnings) == bool(words)
    assert words in "".join(verdict.warnings)


def test_the_better_of_two_measurements_counts():
    busy, later = job(gb={3: 1}, gflops={1: 20}), job(gb={2: 1}, mb={0: 1})
    assert judge(busy).bad
    assert judge(later).bad
    assert not judge([judge_file.best_of(*both) for both in zip(busy, later, strict=True)]).bad


@pytest.mark.parametrize("count", [2, 3, 4, 7, 16])
def test_in_the_tournament_all_nodes_meet_once_and_each_has_one_opponent_at_a_time(count):
    played = preflight.rounds(count)
    assert all(len({node for pair in pairs for node in pair}) == 2 * len(pairs) for pairs in played)
    met = [frozenset(pair) for pairs in played for pair in pairs]
    assert len(met) == len(set(met)) == count * (count - 1) // 2


def test_each_of_a_thousand_nodes_meets_sixteen_others():
    assert len(preflight.rounds(1000)) == 16


Outcomes = Callable[..., list[Any]]


@pytest.fixture
def four_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end_ranks: Outcomes, free_port: int) -> Outcomes:
    """Return a function that runs four processes as ranks on four nodes, and returns how they end."""

    def start(of_rank: Callable[[int], None]) -> list[Any]:
        def body(rank: int) -> None:
            place = {
                "RANK": rank,
                "WORLD_SIZE": 4,
                "LOCAL_RANK": 0,
                "LOCAL_WORLD_SIZE": 1,
                "NODE_RANK": rank,
                "NNODES": 4,
            }
            meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port, "DDPJOB_BACKEND": "gloo"}
            for name, value in (place | meeting).items():
                monkeypatch.setenv(name, str(value))
            monkeypatch.setenv("DDPJOB_TERMINATION_LOG", str(tmp_path / f"said-{rank}"))
            monkeypatch.chdir(tmp_path)
            of_rank(rank)

        return end_ranks(body, 4)

    return start  # fmt: skip


def test_four_healthy_nodes_exit_with_0_and_a_table(four_nodes, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("sys.argv", ["preflight", "--folder", str(tmp_path)])
    ended = four_nodes(lambda rank: runpy.run_module("ddpjob.preflight", run_name="__main__") and None)
    said = capfd.readouterr().out
    assert [(o.exit_code, o.error) for o in ended] == [(0, "")] * 4, said
    assert "pre-flight, nodes: 4, ranks: 4, gloo" in said
    assert "pre-flight: no node is slow" in said
    rows = [line.split() for line in said.splitlines() if line.startswith("    ")]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert not any("-" in row for row in rows), "everything was measured"
    assert not list(tmp_path.iterdir()), "nothing is left: no file of the disk's test, no message"


def test_a_node_with_a_slow_link_is_named_and_all_ranks_exit_to_be_resumed(four_nodes, tmp_path, capfd):
    def run(rank: int) -> None:
        if rank == 2:
            preflight.swap = delayed(preflight.swap)
        preflight.CONFIRMATIONS, preflight.PAYLOADS = 1, 2  # each exchange is slow in this test
        with ddpjob.init():
            preflight.run()

    def delayed(swap: Callable[..., None]) -> Callable[..., None]:
        def after_a_while(peer: int, out: Any, into: Any) -> None:
            time.sleep(1e-6 * len(out))  # 1 MB/s; the peer has to wait for the exchange
            swap(peer, out, into)

        return after_a_while

    ended = four_nodes(run)
    said = capfd.readouterr().out
    assert [o.exit_code for o in ended] == [75] * 4, said
    assert "pre-flight: node 2 is slow: " in said
    message = json.loads((tmp_path / "said-0").read_text())
    assert message["exception"].startswith("pre-flight: node 2 is slow: ")
    expected = {"rank": 2, "exitCode": 75, "resumable": True, "badNodes": [2], "preflight": True}
    assert {name: message[name] for name in expected} == expected
    assert not (tmp_path / "said-2").exists(), "one message for the job, rank 0's"
