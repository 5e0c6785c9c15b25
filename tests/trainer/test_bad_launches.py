"""A wrong launch ends with a sentence that names the mistake. No rank hangs or silently trains alone."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ddpjob

LIMIT_SECONDS = 40


def become(rank: int, world_size: int, port: int, host: str = "127.0.0.1") -> None:
    """Set the variables that a launcher sets for a rank."""
    place = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": host, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})


# ---- init more than once, or never ---------------------------------------------------------------------------


def test_a_second_init_gives_the_same_world_and_that_of_torch_reports_an_existing_group(run_ranks, free_port):
    def body(rank: int) -> str:
        become(rank, 2, free_port)
        world = ddpjob.init("gloo")
        assert ddpjob.init("gloo") is world
        with pytest.raises(ValueError, match="trying to initialize the default process group twice") as caught:
            dist.init_process_group("gloo")
        return str(caught.value)

    assert len(run_ranks(body, 2)) == 2


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "DDPJOB_WORLD_SIZE"])
def test_a_script_that_never_calls_init_gets_an_error_and_does_not_train_alone(monkeypatch, variable):
    monkeypatch.setenv(variable, "2")
    with pytest.raises(ddpjob.ConfigurationError, match=rf"{variable}: 2 .* Call ddpjob.init\(\) first"):
        ddpjob.GlobalBatchSampler(100, 10, seed=7)
    assert ddpjob.GlobalBatchSampler(100, 10, seed=7, rank=1, world_size=2).world_size == 2, "it may say it itself"


def test_the_error_about_ddp_without_a_group_names_the_missing_call():
    with pytest.raises(ValueError, match="make sure to call init_process_group"):
        DistributedDataParallel(torch.nn.Linear(1, 1))


@pytest.mark.parametrize("world_size", ["", "0", "1", "many"])
def test_one_process_needs_no_group(monkeypatch, world_size):
    monkeypatch.setenv("WORLD_SIZE", world_size)
    if world_size:  # an elastic job of up to two ranks
        monkeypatch.setenv("DDPJOB_WORLD_SIZE", "2")
    assert ddpjob.GlobalBatchSampler(100, 10, seed=7).world_size == 1


# ---- numbers that do not fit ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2)])
def test_ranks_that_expect_different_world_sizes_report_it_within_their_limit(end_ranks, meeting_file, sizes):
    """Ranks that expect two and three ranks must report it. Otherwise one rank trains with two ranks, and the other
    waits half an hour for a third rank."""

    def body(rank: int) -> None:
        place = {"init_method": meeting_file, "rank": rank, "world_size": sizes[rank]}
        ddpjob.init("gloo", **place, timeout_start_seconds=2)

    outcomes = end_ranks(body, 2, LIMIT_SECONDS)
    assert [outcome.exit_code for outcome in outcomes] == [1, 1]
    for rank, outcome in enumerate(outcomes):
        assert f"rank {rank} of {sizes[rank]} did not meet the others" in outcome.error


def test_two_processes_with_the_same_rank_both_fail_and_name_themselves(end_ranks, free_port):
    def body(rank: int) -> None:
        become(1, 3, free_port) if rank else become(0, 3, free_port)
        ddpjob.init("gloo", timeout_start_seconds=2)

    outcomes = end_ranks(body, 3, LIMIT_SECONDS)
    assert [outcome.exit_code for outcome in outcomes] == [1, 1, 1]
    assert "rank 0 of 3 did not meet the others" in outcomes[0].error
    assert all("rank 1 of 3 did not meet the others" in outcome.error for outcome in outcomes[1:])


# ---- addresses -----------------------------------------------------------------------------------------------


def test_a_port_in_use_by_another_program_is_named_at_once(end_ranks):
    """If another program uses the port, rank 0 must end, because the other ranks would wait for that program."""
    with socket.create_server(("", 0)) as other_program:
        port = other_program.getsockname()[1]

        def body(rank: int) -> None:
            become(rank, 2, port)
            ddpjob.init("gloo", timeout_start_seconds=300)

        began = time.monotonic()
        (outcome,) = end_ranks(body, 1, LIMIT_SECONDS)
    assert time.monotonic() - began < LIMIT_SECONDS
    assert f"env://, 127.0.0.1:{port} " in outcome.error, "torch 2.4 does not name it"
    assert "address already in use" in outcome.error


def test_an_unresolvable_host_is_named_with_the_limit(end_ranks, free_port):
    def body(rank: int) -> None:
        become(1, 2, free_port, "no-such-host.invalid")
        ddpjob.init("gloo", timeout_start_seconds=1)

    (outcome,) = end_ranks(body, 1, LIMIT_SECONDS)
    assert "no-such-host.invalid" in outcome.error
    assert "limit 1 s" in outcome.error


TWO_RANKS = """
import multiprocessing, os, sys
import torch
import ddpjob

def main(rank):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="late-host", MASTER_PORT=sys.argv[1])
    with ddpjob.init("gloo") as world:
        total = torch.ones(1)
        torch.distributed.all_reduce(total)
        print(f"rank {rank} met {int(total)}", flush=True)

ranks = [multiprocessing.get_context("fork").Process(target=main, args=(rank,)) for rank in range(2)]
for rank in ranks: rank.start()
for rank in ranks: rank.join()
"""


@pytest.fixture
def late_hosts(tmp_path: Path) -> Iterator[tuple[list[str], Path]]:
    """Return a command that starts a program with its own /etc/hosts, and the path of that file."""
    file = tmp_path / "hosts"
    shutil.copy("/etc/hosts", file)
    own = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(file)]
    if not shutil.which("unshare") or subprocess.run([*own, "true"], capture_output=True).returncode:
        pytest.skip("a mount namespace of its own needs root")
    return own, file


def test_ranks_wait_for_a_host_name_that_does_not_resolve_yet(late_hosts, tmp_path, free_port):
    """A rank must wait for the host name, because in a cluster the DNS learns of a pod only after its start."""
    own, hosts = late_hosts
    (tmp_path / "ranks.py").write_text(TWO_RANKS)
    words = [*own, sys.executable, "-u", str(tmp_path / "ranks.py"), str(free_port)]
    environment = os.environ | {"PYTHONPATH": str(Path(ddpjob.__file__).parents[1]), "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(words, env=environment, text=True, stdout=-1, stderr=-1) as process:
        assert process.stderr is not None
        assert any("late-host" in line for line in process.stderr), "it was looked for, and not found"
        with hosts.open("a") as file:
            file.write("\n127.0.0.1 late-host\n")
        out, err = process.communicate(timeout=LIMIT_SECONDS)
    assert sorted(re.findall(r"rank \d met \d", out)) == ["rank 0 met 2", "rank 1 met 2"], err
