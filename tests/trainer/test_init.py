"""init() finds the other ranks however they are started, or names the reason. Leaving the group never hangs."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import free_port as ports
import pytest
import torch
import torch.distributed as dist
from script_ends import finish

import ddpjob
from ddpjob.group import join, stop
from ddpjob_core import stall_limits
from ddpjob_core.rank_info import RankInfo

TRAINER = str(Path(ddpjob.__file__).parents[1])


def place(environ: dict[str, str], **arguments: Any) -> tuple[int, ...]:
    return tuple(join.find_place(environ, **arguments))


TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}
ONE_PER_NODE = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NNODES": "2", "NODE_RANK": "1"
}  # fmt: skip
SECOND_OF_2_NODES = {"NNODES": "2", "NODE_RANK": "1"}


@pytest.mark.parametrize(
    ("how", "environ", "arguments", "expected"),
    [  # rank, world_size, local_rank, local_world_size, node_rank
        ("alone", {}, {}, (0, 1, 0, 1, 0)),
        ("torchrun", TORCHRUN, {}, (5, 8, 1, 4, 1)),
        ("plain python, one process per node", ONE_PER_NODE, {}, (1, 2, 0, 1, 1)),
        ("spawned on one machine", {}, {"rank": 3, "world_size": 4}, (3, 4, 3, 4, 0)),
        ("spawned, 2 on each of 2 nodes", SECOND_OF_2_NODES, {"rank": 3, "world_size": 4}, (3, 4, 1, 2, 1)),
        ("spawned in a pod that has the variables of one", ONE_PER_NODE, {"rank": 3, "world_size": 4}, (3, 4, 1, 2, 1)),
        ("a URL that says it", {}, {"init_method": "tcp://h:1?rank=1&world_size=2"}, (1, 2, 1, 2, 0)),
        ("local_rank given", {}, {"rank": 3, "world_size": 4, "local_rank": 0}, (3, 4, 0, 4, 0)),
        ("a job of one process", {"DDPJOB_WORLD_SIZE": "1", "NNODES": "1"}, {}, (0, 1, 0, 1, 0)),
    ],
)
def test_rank_and_world_size_follow_from_how_the_process_was_started(how, environ, arguments, expected):
    assert place(environ, **arguments) == expected, how


@pytest.mark.parametrize(
    ("environ", "arguments", "words"),
    [
        ({"RANK": "0"}, {}, ["RANK: 0", "WORLD_SIZE is not"]),
        ({"WORLD_SIZE": "2"}, {}, ["WORLD_SIZE: 2", "RANK is not"]),
        ({"DDPJOB_WORLD_SIZE": "4"}, {}, ["DDPJOB_WORLD_SIZE: 4", "torchrun", "nprocPerNode: 1"]),
        ({"RANK": "zero", "WORLD_SIZE": "2"}, {}, ["RANK: 'zero'", "whole number"]),
        ({}, {"rank": 2, "world_size": 2}, ["rank: 2", "less than the world size, 2"]),
        ({}, {"rank": 0}, ["rank: 0, world_size: None", "both or neither"]),
        ({}, {"init_method": "tcp://h:1?rank=x&world_size=2"}, ["needs numbers"]),
    ],
)
def test_impossible_rank_numbers_are_an_error_and_do_not_train_alone(environ, arguments, words):
    with pytest.raises(ddpjob.ConfigurationError) as caught:
        place(environ, **arguments)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"backend": "mpi"}, ["mpi", "no published wheel", "gloo"]),
        ({"backend": "smoke"}, ["backend: 'smoke'", "auto, nccl, gloo"]),
        ({"device": "tpu"}, ["device: 'tpu'", "cpu, cuda"]),
        ({"init_method": "tcp://nohost"}, ["tcp://nohost", "host and a port"]),
        ({"init_method": "ftp://x"}, ["ftp://x", "env://"]),
        ({"init_method": "file:///no/such/folder/meet"}, ["/no/such/folder", "does not exist"]),
        ({"rank": 1, "world_size": 2}, ["MASTER_ADDR is not set", "rank 1 of 2"]),
        ({"timeout_step_seconds": 0}, ["timeout_step_seconds: 0", "above 0"]),
        ({"timeout_step_seconds": float("inf")}, ["timeout_step_seconds: inf", "at most"]),
        ({"timeout_start_seconds": float("nan")}, ["timeout_start_seconds: nan", "number of seconds"]),
        ({"timeout_start_seconds": "60"}, ["timeout_start_seconds: '60'", "number of seconds"]),
    ],
)
def test_an_impossible_setup_is_refused_with_the_reason(arguments, words):
    with pytest.raises(ddpjob.ConfigurationError) as caught:
        ddpjob.init(**arguments)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)


@pytest.mark.parametrize(
    ("gpus", "local_rank", "backend", "device", "environ", "expected"),
    [
        (0, 0, None, None, {}, ("gloo", "cpu")),
        (4, 3, None, None, {}, ("nccl", "cuda:3")),
        (4, 3, "gloo", "cpu", {}, ("gloo", "cpu")),
        (4, 3, None, "cpu", {}, ("gloo", "cpu")),
        (2, 3, "gloo", None, {}, ("gloo", "cuda:1")),
        (1, 3, None, None, {}, ("nccl", "cuda:0")),  # a launcher may let each process see only one GPU
        (4, 0, None, None, {"DDPJOB_BACKEND": "gloo"}, ("gloo", "cuda:0")),
        (4, 0, None, None, {"DDPJOB_BACKEND": "auto"}, ("nccl", "cuda:0")),
        (4, 0, "nccl", None, {"DDPJOB_BACKEND": "gloo"}, ("nccl", "cuda:0")),
    ],
)
def test_backend_and_device_follow_from_the_arguments_and_the_hardware(
    monkeypatch, gpus, local_rank, backend, device, environ, expected
):
    pretend_gpus(monkeypatch, gpus)
    chosen = join.choose(backend, device, RankInfo(local_rank, 4, local_rank, 4, 0), environ)
    assert (chosen[0], str(chosen[1])) == expected


def test_more_processes_than_gpus_and_nccl_without_a_gpu_are_refused(monkeypatch):
    pretend_gpus(monkeypatch, 2)
    with pytest.raises(ddpjob.UnsupportedError, match=r"LOCAL_RANK: 2 .* sees 2\. Start at most 2"):
        join.choose("nccl", None, RankInfo(2, 4, 2, 4, 0), {})
    pretend_gpus(monkeypatch, 0)
    with pytest.raises(ddpjob.UnsupportedError, match=r"DDPJOB_BACKEND.*no CUDA device"):
        join.choose(None, None, RankInfo(0, 1, 0, 1, 0), {"DDPJOB_BACKEND": "nccl"})


def summed(**arguments: Any) -> tuple[float, int, int]:
    """Join the group, sum the ranks' numbers, and leave it."""
    with ddpjob.init(**arguments) as world:
        assert ddpjob.init() is world, "a second call must not make a second group"
        ranks = torch.tensor([float(world.rank)])
        dist.all_reduce(ranks)
        return float(ranks), world.rank, world.world_size


def test_a_single_process_needs_no_variables_and_no_port(run_ranks):
    def body(rank: int) -> Any:
        first, again = summed(), summed()  # the second group is formed after the first has ended
        assert not dist.is_initialized()
        return first, again

    assert run_ranks(body, 1) == [((0.0, 0, 1),) * 2]


def test_ranks_meet_by_variables_by_port_and_by_file(run_ranks, free_port, meeting_file, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port))
    expected = [(1.0, 0, 2), (1.0, 1, 2)]
    assert run_ranks(lambda rank: summed(rank=rank, world_size=2), 2) == expected
    assert run_ranks(lambda rank: summed(init_method=meeting_file, rank=rank, world_size=2), 2) == expected
    url = f"tcp://127.0.0.1:{free_port}"
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # with this variable torch's tcp:// waits for ever
    monkeypatch.setenv("MASTER_PORT", "1")
    assert run_ranks(lambda rank: summed(init_method=url, rank=rank, world_size=2), 2) == expected


def test_a_file_left_by_a_crash_is_an_error_at_once_and_not_a_long_wait(end_ranks, meeting_file):
    def crash(rank: int) -> None:
        ddpjob.init(init_method=meeting_file, rank=rank, world_size=2)
        os._exit(1)

    def body(rank: int) -> None:
        ddpjob.init(init_method=meeting_file, rank=rank, world_size=2)

    end_ranks(crash, 2)
    for rank, outcome in enumerate(end_ranks(body, 2)):
        assert outcome.error.startswith("RendezvousError"), outcome
        assert f"rank {rank} had joined" in outcome.error
        assert "Delete" in outcome.error


def test_a_new_attempt_may_use_the_file_left_by_a_crashed_one(end_ranks, meeting_file, monkeypatch):
    def body(rank: int) -> None:
        ddpjob.init(init_method=meeting_file, rank=rank, world_size=2)
        if os.environ["DDPJOB_ATTEMPT"] == "1":
            os._exit(1)

    for attempt, code in (("1", 1), ("2", 0)):
        monkeypatch.setenv("DDPJOB_ATTEMPT", attempt)
        assert [outcome.exit_code for outcome in end_ranks(body, 2)] == [code, code]


def test_a_new_generation_may_use_the_file_of_the_previous_one(end_ranks, meeting_file, monkeypatch):
    def body(rank: int) -> None:
        ddpjob.init(init_method=meeting_file, rank=rank, world_size=2)
        if os.environ["DDPJOB_GENERATION"] == "0":
            os._exit(1)

    for generation, code in (("0", 1), ("1", 0)):
        monkeypatch.setenv("DDPJOB_GENERATION", generation)
        assert [outcome.exit_code for outcome in end_ranks(body, 2)] == [code, code]


def test_ranks_with_different_backends_get_an_error_about_it(end_ranks, meeting_file, monkeypatch):
    def body(rank: int) -> None:
        monkeypatch.setattr(join, "choose", lambda *args: (("gloo", "nccl")[rank], torch.device("cpu")))
        ddpjob.init(init_method=meeting_file, rank=rank, world_size=2, timeout_start_seconds=2)

    outcomes = end_ranks(body, 2)
    assert "rank 1 uses nccl and rank 0 gloo" in outcomes[1].error


def test_a_rank_that_times_out_names_the_missing_ranks_and_the_address(end_ranks, meeting_file):
    (outcome,) = end_ranks(
        lambda rank: ddpjob.init(init_method=meeting_file, rank=0, world_size=2, timeout_start_seconds=0.5), 1
    )
    assert "rank 0 of 2 did not meet the others at file://" in outcome.error
    assert "0.5 s" in outcome.error


# docs/versions.md mentions this limit of torch 2.4.
needs_a_timeout_that_changes = pytest.mark.skipif(
    torch.__version__.startswith("2.4."), reason="gloo of torch 2.4 keeps the time-out that its group was made with"
)


@needs_a_timeout_that_changes
def test_after_the_first_step_a_collective_fails_sooner(end_ranks, meeting_file):
    def body(rank: int) -> None:
        world = ddpjob.init(init_method=meeting_file, rank=rank, world_size=2, timeout_step_seconds=0.5)
        dist.all_reduce(torch.ones(1))
        if rank == 0:
            ddpjob.progress(1)
            dist.all_reduce(torch.ones(1))
        else:
            with contextlib.suppress(RuntimeError):  # wait until rank 0's all_reduce has timed out
                dist.recv(torch.ones(1), src=0)
            os._exit(0)
        del world

    outcomes = end_ranks(body, 2, limit_seconds=30)
    assert "Timed out waiting 500ms" in outcomes[0].error, outcomes[0]


@pytest.mark.parametrize("watched", [{}, {"DDPJOB_BEATS": "1:2:3:0"}, {"DDPJOB_STATUS_URL": "http://x"}], ids=str)
@pytest.mark.parametrize("stall", ["", "0", "300", "20000"])
def test_no_collective_times_out_sooner_than_a_declared_pause_may_take(watched, stall):
    """Collectives must not time out while rank 0 evaluates for half an hour, also after a restart."""
    allowed = join.default_timeout_seconds({**watched, "DDPJOB_STALL_TIMEOUT": stall})
    learned = stall_limits.Learned(step_seconds=(1.0,))
    limit = stall_limits.limit("evaluate", 41, learned, float(stall) if watched and stall else None)
    assert allowed >= (limit.allowed if watched else limit.expected)
    assert allowed > 1800


def test_an_evaluation_on_rank_0_alone_ends_no_rank_before_or_after_the_first_step(
    run_ranks, meeting_file, monkeypatch
):
    monkeypatch.setattr(stall_limits, "PAUSE_SECONDS", 4.0)

    def body(rank: int) -> float:
        with ddpjob.init(init_method=meeting_file, rank=rank, world_size=2, timeout_start_seconds=3) as world:
            sums = torch.zeros(1)
            for step in (0, 1):
                if step:
                    ddpjob.progress(step)
                if world.is_main:
                    with ddpjob.pause("evaluate"):
                        time.sleep(4.0)
                dist.all_reduce(sums.add_(1))
            return float(sums)

    assert run_ranks(body, 2) == [6.0, 6.0]


@needs_a_timeout_that_changes
@pytest.mark.parametrize("close", [True, False], ids=["in a with", "without"])
def test_a_rank_that_times_out_names_the_limit(end_ranks, meeting_file, capfd, close):
    def body(rank: int) -> None:
        world = ddpjob.init(init_method=meeting_file, rank=rank, world_size=2, timeout_step_seconds=0.5)
        with world if close else contextlib.nullcontext():
            ddpjob.progress(1)
            if rank == 0:
                dist.all_reduce(torch.ones(1))
            with contextlib.suppress(RuntimeError):  # wait until rank 0's all_reduce has timed out
                dist.recv(torch.ones(1), src=0)
            os._exit(0)

    end_ranks(body, 2, limit_seconds=30)
    said = capfd.readouterr().err
    assert said.count("rank 0 has waited for another rank for the time-out of 0.5 s (timeout_step_seconds of") == 1


def test_a_group_that_the_script_created_itself_is_used(run_ranks, tmp_path):
    def body(rank: int) -> tuple[int, int, str]:
        dist.init_process_group("gloo", store=dist.FileStore(f"{tmp_path}/meet", 2), rank=rank, world_size=2)
        with ddpjob.init() as world:
            return world.rank, world.world_size, world.backend

    assert run_ranks(body, 2) == [(0, 2, "gloo"), (1, 2, "gloo")]


def test_the_world_has_attempt_and_device_and_wraps_a_model_for_the_cpu(run_ranks, monkeypatch):
    monkeypatch.setenv("DDPJOB_ATTEMPT", "3")

    def body(rank: int) -> tuple[int, str, bool, Any]:
        with ddpjob.init() as world:
            model = world.wrap(torch.nn.Linear(2, 1), broadcast_buffers=False)
            return world.attempt, str(world.device), world.is_main, model.device_ids

    assert run_ranks(body, 1) == [(3, "cpu", True, None)]


# ---- the end -----------------------------------------------------------------------------------------------


def train_a_little(rank: int, url: str, world_size: int) -> None:
    world = ddpjob.init(init_method=url, rank=rank, world_size=world_size)
    model = world.wrap(torch.nn.Linear(32, 8))
    for _ in range(3):
        model(torch.ones(4, 32)).sum().backward()
    dist.all_reduce(torch.ones(1))  # gloo's thread needs the interpreter lock to release this tensor
    sys.modules["__main__"].model = model  # type: ignore[attr-defined]  # as in a script: it dies in the very last moment


def test_finished_jobs_never_abort_or_hang_even_if_the_script_closes_nothing(tmp_path):
    """A finished job must not abort or hang at the interpreter's exit, although the script closes no group."""
    for job in range(5):
        ended = finish(lambda rank, job=job: train_a_little(rank, f"file://{tmp_path}/{job}", 2), 2)
        assert {code for code, _ in ended.values()} == {0}, f"job {job} of 5: {ended}"


def test_closing_never_hangs_on_a_thread_that_releases_the_last_tensor(run_ranks, tmp_path):
    def body(rank: int) -> None:
        for number in range(20):
            train_a_little(rank, f"file://{tmp_path}/{number}", 3)
            join.active().close()

    run_ranks(body, 3)


def test_a_rank_that_fails_within_a_collective_exits_at_once_with_1(tmp_path):
    """A rank that fails within a collective must exit at once with 1, not after the collective's time-out."""

    def body(rank: int) -> None:
        with ddpjob.init(init_method=f"file://{tmp_path}/meet", rank=rank, world_size=2):
            pending = dist.all_reduce(torch.ones(1), async_op=True) if rank == 1 else None
            if pending is None:
                with contextlib.suppress(RuntimeError):
                    dist.recv(torch.ones(1), src=1)  # returns when rank 1 has ended
                os._exit(0)
            raise ValueError("rank 1 is broken")

    ended = finish(body, 2)
    assert ended[1][0] == 1
    assert ended[1][1] < 15, "of 300 s until the time-out"


def test_a_group_may_be_closed_and_created_again_in_one_process(run_ranks, free_port, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port))
    assert run_ranks(lambda rank: [summed(rank=rank, world_size=2) for _ in range(3)], 2) == [
        [(1.0, 0, 2)] * 3,
        [(1.0, 1, 2)] * 3,
    ]


def test_tcp_works_under_torchrun_although_torch_itself_waits_for_ever(tmp_path, free_port):
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, torch, ddpjob\n"
        "world = ddpjob.init(init_method=sys.argv[1] if len(sys.argv) > 1 else None)\n"
        "total = torch.ones(1) * world.rank\n"
        "torch.distributed.all_reduce(total)\n"
        "os.write(1, f'sum {int(total)} local {world.local_rank} of {world.local_world_size}\\n'.encode())\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port}"]
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": TRAINER, "OMP_NUM_THREADS": "1"}
    url = f"tcp://127.0.0.1:{ports.free_port()}"
    done = subprocess.run(
        [*command, str(script), url], env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["sum 1 local 0 of 2", "sum 1 local 1 of 2"]


def test_ranks_that_finish_together_print_nothing_like_a_failure_on_stderr(end_ranks, capfd, free_port):
    """Ranks that finish together must print no error: if rank 0 left first, torch would print a trace of 20 lines."""

    def body(rank: int) -> None:
        if rank != 0:  # poll so rarely that the other ranks have ended long before
            stop.COUNT_SECONDS = 0.3
        stop.LEAVE_LAST_SECONDS = 30.0  # longer than any delay on this machine
        world = ddpjob.init(init_method=f"tcp://127.0.0.1:{free_port}", rank=rank, world_size=3)
        world.close()
        os._exit(0)  # as at the interpreter's exit, which also ends the store

    assert [outcome.exit_code for outcome in end_ranks(body, 3)] == [0, 0, 0]
    assert "recvValue" not in capfd.readouterr().err
