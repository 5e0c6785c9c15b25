"""An agent numbers its ranks by the pods that the generation lists as members. Here some pods are not listed."""

from ddpjob_core.members import Members
from ddprun import environment
from ddprun.environment import Life
from ddprun.logs import LogFolder
from ddprun.node import LocalRanks
from ddprun.options import Options, parse

LATER = Members((0, 2))


def at_place_2(*options: str) -> Options:
    return parse(["--nnodes", "3", "--node-rank", "2", "--nproc-per-node", "2", *options, "--no-python", "true"], {})


def test_a_rank_starts_with_the_rank_numbers_and_sizes_of_its_generation() -> None:
    options, life = at_place_2("--rdzv-endpoint", "head:29400"), Life(1, LATER, "head", 23001)
    environ = [environment.of_rank(options, life, local_rank, {}) for local_rank in (0, 1)]
    assert [(e["RANK"], e["LOCAL_RANK"], e["GROUP_RANK"]) for e in environ] == [("2", "0", "1"), ("3", "1", "1")]
    assert (environ[0]["WORLD_SIZE"], environ[0]["GROUP_WORLD_SIZE"]) == ("4", "2")


def test_failures_and_log_lines_carry_the_rank_of_the_generation(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[${rank}/${local_rank}]")
    options = at_place_2("--rdzv-endpoint", "head:29400", "--log-dir", str(tmp_path), "--tee", "3")
    folder = LogFolder(options)
    ranks = LocalRanks(options, {"PATH": "/nowhere"}, folder, None)
    ranks.start(Life(0, LATER, "head", 23001))
    assert [ranks.rank(local_rank) for local_rank in (0, 1)] == [2, 3]
    ranks.end()
    assert {tail._header for tail in folder.tails} == {b"[2/0]", b"[3/1]"}
    assert {failure.rank for failure in ranks.failures} <= {2, 3}
