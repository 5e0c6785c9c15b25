"""init(): every way to start finds the others or says why not, and every way to end ends."""

import contextlib
import datetime
import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ddpjob

init_file = importlib.import_module("ddpjob.init")
TRAINER = str(Path(ddpjob.__file__).parents[1])


def place(environ: dict[str, str], **arguments: Any) -> tuple[int, ...]:
    return tuple(init_file.find_place(environ, **arguments))


TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}
ONE_PER_NODE = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NNODES": "2", "NODE_RANK": "1"}


@pytest.mark.parametrize(
    ("how", "environ", "arguments", "expected"),
    [  # rank, world_size, local_rank, local_world_size, node_rank
        ("alone", {}, {}, (0, 1, 0, 1, 0)),
        ("torchrun", TORCHRUN, {}, (5, 8, 1, 4, 1)),
        ("plain python, one process per node", ONE_PER_NODE, {}, (1, 2, 0, 1, 1)),
        ("spawned on one machine", {}, {"rank": 3, "world_size": 4}, (3, 4, 3, 4, 0)),
        ("spawned, 2 on each of 2 nodes", {"NNODES": "2", "NODE_RANK": "1"}, {"rank": 3, "world_size": 4}, (3, 4, 1, 2, 1)),
        ("spawned in a pod that has the variables of one", ONE_PER_NODE, {"rank": 3, "world_size": 4}, (3, 4, 1, 2, 1)),
        ("a URL that says it", {}, {"init_method": "tcp://h:1?rank=1&world_size=2"}, (1, 2, 1, 2, 0)),
        ("local_rank given", {}, {"rank": 3, "world_size": 4, "local_rank": 0}, (3, 4, 0, 4, 0)),
        ("a job of one process", {"DDPJOB_WORLD_SIZE": "1", "NNODES": "1"}, {}, (0, 1, 0, 1, 0)),
    ],
)
def test_the_place_follows_from_how_the_process_was_started(how, environ, arguments, expected):
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
def test_a_place_that_cannot_be_right_is_an_error_and_not_a_training_alone(environ, arguments, words):
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
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(arguments, words):
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
        (1, 3, None, None, {}, ("nccl", "cuda:0")),  # each process is shown its own GPU; the same one is found out later
        (4, 0, None, None, {"DDPJOB_BACKEND": "gloo"}, ("gloo", "cuda:0")),
        (4, 0, None, None, {"DDPJOB_BACKEND": "auto"}, ("nccl", "cuda:0")),
        (4, 0, "nccl", None, {"DDPJOB_BACKEND": "gloo"}, ("nccl", "cuda:0")),
    ],
)
def test_backend_and_device_follow_from_what_is_said_and_what_is_there(
    monkeypatch, gpus, local_rank, backend, device, environ, expected
):
    pretend_gpus(monkeypatch, gpus)
    chosen = init_file.choose(backend, device, init_file.Place(local_rank, 4, local_rank, 4, 0), environ)
    assert (chosen[0], str(chosen[1])) == expected


def test_more_processes_than_gpus_and_nccl_without_a_gpu_are_refused(monkeypatch):
    pretend_gpus(monkeypatch, 2)
    with pytest.raises(ddpjob.UnsupportedError, match=r"LOCAL_RANK: 2 .* sees 2\. Start at most 2"):
        init_file.choose("nccl", None, init_file.Place(2, 4, 2, 4, 0), {})
    pretend_gpus(monkeypatch, 0)
    with pytest.raises(ddpjob.UnsupportedError, match="DDPJOB_BACKEND.*no CUDA device"):
        init_file.choose(None, None, init_file.Place(0, 1, 0, 1, 0), {"DDPJOB_BACKEND": "nccl"})


def summed(**arguments: Any) -> tuple[float, int, int]:
    """Join, add the ranks up, leave."""
    with ddpjob.init(**arguments) as world:
        assert ddpjob.init() is world, "a second call must not make a second group"
        ranks = torch.tensor([float(world.rank)])
        dist.all_reduce(ranks)
        return float(ranks), world.rank, world.world_size


def test_alone_needs_no_variables_and_no_port(run_ranks):
    def body(rank: int) -> Any:
        first, again = summed(), summed()  # the second after the first was closed
        assert not dist.is_initialized()
        return first, again

    assert run_ranks(body, 1) == [((0.0, 0, 1),) * 2]


def test_ranks_meet_by_variables_by_port_and_in_a_file(run_ranks, free_port, meeting_file, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port))
    expected = [(1.0, 0, 2), (1.0, 1, 2)]
    assert run_ranks(lambda rank: summed(rank=rank, world_size=2), 2) == expected
    assert run_ranks(lambda rank: summed(init_method=meeting_file, rank=rank, world_size=2), 2) == expected
    url = f"tcp://127.0.0.1:{free_port}"
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # torch's own tcp:// waits for ever with this
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


def test_a_new_attempt_may_use_the_file_that_a_crashed_one_left(end_ranks, meeting_file, monkeypatch):
    def body(rank: int) -> None:
        ddpjob.init(init_method=meeting_file, rank=rank, world_size=2)
        if os.environ["DDPJOB_ATTEMPT"] == "1":
            os._exit(1)

    for attempt, code in (("1", 1), ("2", 0)):
        monkeypatch.setenv("DDPJOB_ATTEMPT", attempt)
        assert [outcome.exit_code for outcome in end_ranks(body, 2)] == [code, code]


def test_ranks_that_chose_different_backends_are_told_so(end_ranks, meeting_file, monkeypatch):
    def body(rank: int) -> None:
        monkeypatch.setattr(init_file, "choose", lambda *args: (("gloo", "nccl")[rank], torch.device("cpu")))
        ddpjob.init(init_method=meeting_file, rank=rank, world_size=2, timeout_start_seconds=2)

    outcomes = end_ranks(body, 2)
    assert "rank 1 uses nccl and rank 0 gloo" in outcomes[1].error


def test_a_rank_that_waits_in_vain_says_for_whom_and_where(end_ranks, meeting_file):
    (outcome,) = end_ranks(
        lambda rank: ddpjob.init(init_method=meeting_file, rank=0, world_size=2, timeout_start_seconds=0.5), 1
    )
    assert "rank 0 of 2 did not meet the others at file://" in outcome.error
    assert "0.5 s" in outcome.error


def test_after_the_first_step_a_collective_fails_sooner(end_ranks, meeting_file):
    def body(rank: int) -> None:
        world = ddpjob.init(init_method=meeting_file, rank=rank, world_size=2, timeout_step_seconds=0.5)
        dist.all_reduce(torch.ones(1))
        if rank == 0:
            ddpjob.progress(1)
            dist.all_reduce(torch.ones(1))
        else:
            with contextlib.suppress(RuntimeError):  # wait for rank 0 to give up
                dist.recv(torch.ones(1), src=0)
            os._exit(0)
        del world

    outcomes = end_ranks(body, 2, limit_seconds=30)
    assert "Timed out waiting 500ms" in outcomes[0].error, outcomes[0]


def test_a_group_that_the_script_made_itself_is_used(run_ranks, tmp_path):
    def body(rank: int) -> tuple[int, int, str]:
        dist.init_process_group("gloo", store=dist.FileStore(f"{tmp_path}/meet", 2), rank=rank, world_size=2)
        with ddpjob.init() as world:
            return world.rank, world.world_size, world.backend

    assert run_ranks(body, 2) == [(0, 2, "gloo"), (1, 2, "gloo")]


def test_the_world_says_attempt_and_device_and_wraps_a_model_for_the_cpu(run_ranks, monkeypatch):
    monkeypatch.setenv("DDPJOB_ATTEMPT", "3")

    def body(rank: int) -> tuple[int, str, bool, Any]:
        with ddpjob.init() as world:
            model = world.wrap(torch.nn.Linear(2, 1), broadcast_buffers=False)
            return world.attempt, str(world.device), world.is_main, model.device_ids

    assert run_ranks(body, 1) == [(3, "cpu", True, None)]


# ---- the end ---------------------------------------------------------------------------------------------------------


def finish(body: str, world_size: int, url: str) -> list[tuple[int, float]]:
    """(exit status, seconds) of ranks that run the code and then the interpreter's own exit, torch import not included."""
    started = {}
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            _be_a_script(body, {"rank": rank, "world_size": world_size, "url": url})
        started[pid] = rank
    begin, ended = time.monotonic(), {}
    while started:
        pid, status = os.wait()
        ended[started.pop(pid)] = (os.waitstatus_to_exitcode(status), time.monotonic() - begin)
    return [ended[rank] for rank in range(world_size)]


def _be_a_script(body: str, names: dict[str, Any]) -> None:
    """As the interpreter does at its end: the exception is printed, atexit runs, objects are destroyed. Never returns."""
    import ctypes

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    code = 0
    try:
        exec(body, {"ddpjob": ddpjob, "torch": torch, "dist": dist, **names})
    except BaseException:
        sys.last_type, code = sys.exc_info()[0], 1
    ctypes.pythonapi.Py_FinalizeEx()
    os._exit(code)
