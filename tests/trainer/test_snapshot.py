"""The states that Snapshot saves are complete, come back equal, and never belong to two attempts."""

import contextlib
import errno
import importlib
import io
import itertools
import multiprocessing
import os
import random
import shutil
import signal
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from free_port import free_port
from memory_node import saved
from shell import eventually
from torch.distributed.optim import ZeroRedundancyOptimizer

import ddpjob
from ddpjob import process
from ddpjob.checkpoint import writers
from ddpjob.group.join import World


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix == ".pt")


def steps(folder: Path) -> list[int]:
    return [int(name[5:17]) for name in names(folder)]


@pytest.fixture
def attempt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a function that makes a Snapshot as a process of the given attempt of the job."""

    def make(number: int, job: str = "uid-1", keep: int = 3, generation: int = 0, leader: int = 0) -> ddpjob.Snapshot:
        monkeypatch.setenv("DDPJOB_UID", job)
        monkeypatch.setenv("DDPJOB_GENERATION", str(generation))
        monkeypatch.setenv("DDPJOB_TERM", str(leader))
        monkeypatch.setenv("DDPJOB_ATTEMPT", str(number))
        snapshot = ddpjob.Snapshot(tmp_path / "s", keep=keep)
        snapshot.load()
        return snapshot

    return make


# ---- what comes back ---------------------------------------------------------------------------------------


def test_model_optimizer_scheduler_sampler_and_plain_values_are_restored(tmp_path):
    def parts() -> tuple[Any, ...]:
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])
        return model, optimizer, scheduler, ddpjob.GlobalBatchSampler(20, 5, 7)

    def train(model: Any, optimizer: Any, scheduler: Any, sampler: Any) -> None:
        next(sampler.epoch(sampler.current_epoch))
        optimizer.zero_grad()
        model(torch.ones(4, 3) * torch.rand(4, 1)).square().sum().backward()
        optimizer.step()
        scheduler.step()

    one, other = parts(), parts()
    keys = ("model", "optimizer", "scheduler", "sampler")
    train(*one)
    plain = {"best": np.float64(0.5), "seen": {"a": [1, (2, None)]}}
    saved(ddpjob.Snapshot(tmp_path), 5, **dict(zip(keys, one, strict=True)), **plain)
    train(*one)
    snapshot, seen = ddpjob.Snapshot(tmp_path), {"old": 1}
    assert snapshot.load(**dict(zip(keys, other, strict=True)), seen=seen) == 5
    train(*other)  # with the same random numbers as in the first training
    for mine, theirs in zip(one[0].state_dict().values(), other[0].state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    assert one[2].state_dict() == other[2].state_dict()
    assert one[3].state_dict() == other[3].state_dict()
    assert snapshot.state["best"] == 0.5
    assert seen == {"a": [1, (2, None)]}


def test_the_saved_state_is_that_of_the_call_of_save_whatever_training_does_meanwhile(tmp_path):
    weights = torch.zeros(1000)
    snapshot = ddpjob.Snapshot(tmp_path)
    snapshot.save(1, weights=weights)
    weights.fill_(1)
    snapshot.wait()
    back = torch.full((1000,), 2.0)
    ddpjob.Snapshot(tmp_path).load(weights=back)
    assert back.sum() == 0


def test_random_numbers_continue_after_a_resume(tmp_path):
    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    saved(ddpjob.Snapshot(tmp_path), 1)
    expected = draw()
    draw()
    ddpjob.Snapshot(tmp_path).load()
    assert draw() == expected


def test_a_snapshot_file_is_an_ordinary_torch_file(tmp_path):
    saved(ddpjob.Snapshot(tmp_path), 12, weights=torch.ones(2))
    (path,) = tmp_path.glob("*.pt")
    assert torch.load(path, weights_only=True)["state"]["weights"].sum() == 2


@pytest.mark.parametrize("step", [1.5, torch.tensor(1.5), "3", 0, -1, 10**12])
def test_a_step_that_gives_no_valid_file_name_is_refused(tmp_path, step):
    """A step of 13 digits must be refused, because a resume would not find its file name."""
    with pytest.raises(ddpjob.ConfigurationError, match="step: "):
        ddpjob.Snapshot(tmp_path).save(step)


def test_unnamed_objects_are_refused_and_the_named_call_is_shown(tmp_path):
    """save(step, model) without names must be refused, and the error must show the correct call."""
    snapshot, model = ddpjob.Snapshot(tmp_path), torch.nn.Linear(1, 1)
    for call in (lambda: snapshot.save(1, model), lambda: snapshot.keep(1, model), lambda: snapshot.load(model)):
        with pytest.raises(TypeError, match=r"needs a name for each object, .*model=model.* Linear"):
            call()


def test_a_name_that_was_not_saved_is_an_error_and_changes_nothing(tmp_path):
    saved(ddpjob.Snapshot(tmp_path), 1, weights=torch.ones(2))
    weights = torch.zeros(2)
    with pytest.raises(ddpjob.StateError, match="has no optimizer; it has weights"):
        ddpjob.Snapshot(tmp_path).load(weights=weights, optimizer={})
    assert weights.sum() == 0


# ---- damage, disks, crashes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: data[:700] + bytes([data[700] ^ 1]) + data[701:],
    ],
    ids=["cut", "empty", "one bit"],
)
def test_a_damaged_file_is_named_and_the_previous_one_is_used(tmp_path, capfd, damage):
    snapshot = ddpjob.Snapshot(tmp_path)
    for step in (1, 2):
        saved(snapshot, step, weights=torch.full((100,), float(step)))
    newest = tmp_path / names(tmp_path)[-1]
    newest.write_bytes(damage(newest.read_bytes()))
    weights = torch.zeros(100)
    assert ddpjob.Snapshot(tmp_path).load(weights=weights) == 1
    assert weights[0] == 1
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 2, "the damaged file, and from where it resumed"
    assert str(newest) in said[0]


def test_a_large_file_is_never_in_memory_in_addition_to_its_state(tmp_path):
    """A load must not read the whole file into memory, because eight ranks of a node would do it eight times."""
    saved(ddpjob.Snapshot(tmp_path), 1, weights=torch.ones(5_000_000))
    tracemalloc.start()  # tracemalloc does not count the memory of torch's tensors
    try:
        assert ddpjob.Snapshot(tmp_path).load(weights=torch.zeros(5_000_000)) == 1
        assert tracemalloc.get_traced_memory()[1] < 10_000_000, "the file has 20 MB"
    finally:
        tracemalloc.stop()


def test_the_newest_states_are_kept_and_leftovers_of_crashes_are_removed(tmp_path):
    snapshot = ddpjob.Snapshot(tmp_path, keep=2)
    snapshot.load()
    (tmp_path / ".tmp-000001-1-1").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("the user's")
    for step in (1, 2, 3, 4):
        saved(snapshot, step)
    assert steps(tmp_path) == [3, 4]
    assert {path.name for path in tmp_path.iterdir()} - set(names(tmp_path)) == {
        *("writer-000001.json", "writer-000001.alive"),
        "notes.txt",
    }


def test_leftovers_of_a_killed_process_with_the_same_pid_are_no_obstacle(tmp_path, monkeypatch):
    """Leftovers of a killed process with the same pid, as in a restarted container, must be no obstacle."""
    snapshot, sync, written = ddpjob.Snapshot(tmp_path), os.fsync, []
    monkeypatch.setattr(os, "fsync", lambda descriptor: [written.extend(tmp_path.glob(".tmp*")), sync(descriptor)])
    saved(snapshot, 1)
    name, _, number = written[0].name.rpartition("-")
    (tmp_path / f"{name}-{int(number) + 1}").write_bytes(b"half")
    saved(snapshot, 2)
    assert steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("first", [1, 2])
def test_two_snapshots_of_one_process_may_write_into_a_folder_at_once(tmp_path, monkeypatch, first):
    sync, may_end = os.fsync, {step: threading.Event() for step in (1, 2)}
    begun: list[threading.Event] = []

    def slow_sync(descriptor: int) -> None:
        if len(begun) < 2:  # both Snapshots write through this function
            begun.append(may_end[len(begun) + 1])
            begun[-1].wait(20)
        sync(descriptor)

    snapshots = {step: ddpjob.Snapshot(tmp_path) for step in (1, 2)}
    for snapshot in snapshots.values():
        snapshot.load()
    monkeypatch.setattr(os, "fsync", slow_sync)
    for step, snapshot in snapshots.items():
        snapshot.save(step, weights=torch.full([1], float(step)))
        eventually(lambda step=step: len(begun) == step)
    for step in (first, 3 - first):
        may_end[step].set()
        snapshots[step].wait()
    assert steps(tmp_path) == [1, 2]
    weights = torch.zeros(1)
    assert ddpjob.Snapshot(tmp_path).load(weights=weights) == weights == 2


def test_a_failed_write_does_not_end_the_training_and_is_raised_by_wait(tmp_path, monkeypatch, capfd):
    """A disk that is full for a minute must not end a training of weeks."""
    snapshot = ddpjob.Snapshot(tmp_path)
    saved(snapshot, 1)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        snapshot.save(2)
        snapshot.save(3)
        with pytest.raises(ddpjob.SnapshotError, match=r"step 3 was not saved: disk full: No space left on device"):
            snapshot.wait()
    assert not list(tmp_path.glob(".tmp*"))
    saved(snapshot, 4)
    assert steps(tmp_path) == [1, 4]
    assert "step 2 was not saved: disk full" in capfd.readouterr().err
    assert not list(tmp_path.glob(".tmp*"))


def test_a_full_disk_is_named_as_such(tmp_path, monkeypatch):
    """The error must name a full disk, because torch's message is only `enforce fail at inline_container.cc:672`."""
    write, room = io.FileIO.write, 20_000

    class Full(io.FileIO):
        def write(self, data: Any) -> int:
            if self.tell() + len(data) > room:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(self, data)

    snapshot = ddpjob.Snapshot(tmp_path)
    saved(snapshot, 1, weights=torch.zeros(10))
    monkeypatch.setattr(io, "FileIO", Full)
    snapshot.save(2, weights=torch.zeros(100_000))
    full = r"step 2 was not saved: disk full: No space left on device \(errno 28\), in .*; the newest .* is of step 1"
    with pytest.raises(ddpjob.SnapshotError, match=full):
        snapshot.wait()
    assert steps(tmp_path) == [1]


def test_a_process_killed_while_writing_keeps_the_previous_state(tmp_path, monkeypatch):
    saved(ddpjob.Snapshot(tmp_path), 1, weights=torch.ones(1))

    def die_in_fsync() -> None:
        monkeypatch.setattr(os, "fsync", lambda descriptor: os._exit(9))
        ddpjob.Snapshot(tmp_path).save(2, weights=torch.ones(1))

    process = multiprocessing.get_context("fork").Process(target=die_in_fsync)
    process.start()
    process.join(30)
    assert process.exitcode == 9
    assert ddpjob.Snapshot(tmp_path).load() == 1


def test_a_script_that_never_waits_still_saves_its_last_state(tmp_path, end_ranks):
    (outcome,) = end_ranks(lambda rank: ddpjob.Snapshot(tmp_path).save(7, weights=torch.ones(100_000)), 1)
    assert outcome.exit_code == 0
    assert ddpjob.Snapshot(tmp_path).load() == 7


DAMAGED = [
    *(b"", b"[]", b"5", b"null", b"{}", b"{", b"\xff\xfe", b"[" * 100_000, b'{"process": 5}'),
    *(b'{"job": "j", "attempt": 1e999}', b'{"job": "j", "attempt": "x"}', b'{"job": 3, "attempt": 1}'),
]


@pytest.mark.parametrize("content", DAMAGED)
@pytest.mark.parametrize("damaged", ["writer-000001.json", "writer-000001.alive"])
def test_a_damaged_claim_or_heartbeat_is_ignored_and_the_training_goes_on(attempt, tmp_path, damaged, content):
    """A damaged claim file must be ignored, because a traceback on rank 0 would leave the other ranks waiting."""
    folder = attempt(1).folder
    folder.mkdir(exist_ok=True)
    (folder / "writer-000001.json").write_text('{"job": "other", "attempt": 1}')
    (folder / damaged).write_bytes(content)
    for path in folder.iterdir():
        os.utime(path, (1, 1))  # old enough that the process counts as dead
    training = attempt(1)
    assert training.load() == 0
    saved(training, 3)
    assert attempt(2).load() == 3


@pytest.mark.parametrize("keep", [2.5, "3", None, 0])
def test_an_invalid_number_of_states_to_keep_is_refused_before_training(tmp_path, keep):
    """keep=2.5 must be refused when the Snapshot is created, and not at a later save."""
    with pytest.raises(ddpjob.ConfigurationError, match="keep: "):
        ddpjob.Snapshot(tmp_path / "s", keep=keep)


def test_a_folder_that_cannot_be_created_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ddpjob.SnapshotError, match="file/s cannot be made: Not a directory"):
        ddpjob.Snapshot(tmp_path / "file" / "s").load()


@pytest.mark.parametrize("folder", ["s3://bucket/run", Path("gs://bucket"), "file:///mnt/run"])
def test_a_url_is_refused_because_it_would_be_a_folder_of_the_container(folder, tmp_path, monkeypatch):
    """A URL as folder must be refused, because states would be written to ./s3:/bucket/run, and lost with the pod."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ddpjob.ConfigurationError, match=rf"folder: {folder} is a URL.*Mount"):
        ddpjob.Snapshot(folder)


def test_a_sampler_read_ahead_by_a_loader_is_named_once(tmp_path, capfd):
    """A sampler that DataLoader workers read ahead must be named once, because a resume skips these batches."""
    sampler = ddpjob.GlobalBatchSampler(32, 4, seed=7)
    loader = torch.utils.data.DataLoader(range(32), batch_sampler=sampler, num_workers=2)
    snapshot = ddpjob.Snapshot(tmp_path)
    for batches, _ in enumerate(loader, start=1):
        saved(snapshot, batches, order=sampler.state_dict(epoch=0, batches=batches))
    assert capfd.readouterr().err == ""
    for step in (9, 10):
        saved(snapshot, step, order=sampler)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("ddpjob: order: batches are taken before they are trained")
    assert "save order.state_dict(epoch=..., batches=...)" in line


def test_a_loader_without_workers_reads_nothing_ahead_and_is_not_named(tmp_path, capfd):
    sampler = ddpjob.GlobalBatchSampler(32, 4, seed=7)
    loader = torch.utils.data.DataLoader(range(32), batch_sampler=sampler)
    for batches, _ in enumerate(loader, start=1):
        saved(ddpjob.Snapshot(tmp_path), batches, order=sampler)
        assert sampler.state_dict() == sampler.state_dict(epoch=0, batches=batches)
        if batches == 3:
            break
    assert capfd.readouterr().err == ""


def one_ahead(batches):
    batches = iter(batches)
    coming = next(batches, None)
    while coming is not None:
        now, coming = coming, next(batches, None)
        yield now


@pytest.mark.parametrize(
    ("order", "each_step", "backward_passes", "is_ahead"),
    [
        (one_ahead, 1, 1, True),  # a prefetcher
        (lambda batches: iter(list(batches)), 1, 1, True),
        (iter, 1, 1, False),
        (iter, 4, 4, False),  # accumulated gradients
        (iter, 2, 1, False),  # two batches in one
    ],
    ids=["prefetched", "listed", "one by one", "accumulated", "joined"],
)
@pytest.mark.parametrize("with_loader", [False, True], ids=["sampler", "loader"])
def test_a_script_that_reads_batches_ahead_is_told_that_a_restart_skips_them(
    with_loader, order, each_step, backward_passes, is_ahead, tmp_path, capfd
):
    """A script that takes batches before it trains them must be told, because the saved position is behind them."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = ddpjob.GlobalBatchSampler(64, 4, seed=7)
    snapshot = ddpjob.Snapshot(tmp_path)
    step = snapshot.load(model=model, optimizer=optimizer, order=sampler)
    for epoch in range(2):
        source = torch.utils.data.DataLoader(range(64), batch_sampler=sampler) if with_loader else sampler.epoch(epoch)
        batches = order(source)
        while parts := list(itertools.islice(batches, each_step)):
            for _ in range(backward_passes):
                model(torch.ones(len(parts), 1)).sum().backward()
            optimizer.step()
            step += 1
            saved(snapshot, step, model=model, optimizer=optimizer, order=sampler)
            assert not sampler.is_ahead or (is_ahead and step > 1)
        assert sampler.is_ahead == is_ahead
    assert capfd.readouterr().err.count("order: batches are taken before they are trained") == int(is_ahead)


def test_an_evaluation_and_two_optimizers_read_no_batches_ahead(tmp_path, capfd):
    """Batches of an evaluation are never trained, and a GAN may take a batch for each of its two optimizers."""
    model = torch.nn.Linear(1, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    order, held = ddpjob.GlobalBatchSampler(64, 4, seed=7), ddpjob.GlobalBatchSampler(16, 4, seed=8)
    snapshot = ddpjob.Snapshot(tmp_path)
    step = snapshot.load(model=model, one=optimizers[0], other=optimizers[1], order=order, held=held)
    batches = order.epoch(0)
    while list(itertools.islice(batches, 2)):
        for optimizer in optimizers:
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
        step += 1
        list(held.epoch(step))
        saved(snapshot, step, model=model, one=optimizers[0], other=optimizers[1], order=order, held=held)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("is_placed", [False, True], ids=["sampler", "position"])
@pytest.mark.parametrize("moves", [False, True], ids=["after the save", "before the save"])
def test_an_epoch_that_is_left_early_is_named_because_a_restart_continues_it(is_placed, moves, tmp_path, capfd):
    """A restart from the last step of a shortened epoch would train the rest of the epoch, which the script skipped."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler, snapshot = ddpjob.GlobalBatchSampler(64, 4, seed=7), ddpjob.Snapshot(tmp_path)
    step = snapshot.load(model=model, optimizer=optimizer, order=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batches, _ in enumerate(sampler.epoch(epoch), start=1):
            optimizer.step()
            step, place = step + 1, (epoch, batches)
            if batches == 4 and moves:
                place = (epoch + 1, 0)
                if not is_placed:
                    sampler.set_epoch(epoch + 1)
            order = sampler.state_dict(epoch=place[0], batches=place[1]) if is_placed else sampler
            saved(snapshot, step, model=model, optimizer=optimizer, order=order)
            if batches == 4:
                break
    assert capfd.readouterr().err.count("ddpjob: epoch 0 of the data is left early") == int(not moves)


@pytest.mark.parametrize("first", [0, 1])
def test_a_resume_that_begins_at_an_earlier_epoch_is_named(first, tmp_path, capfd):
    """A loop over range(epochs) instead of range(sampler.current_epoch, epochs) trains the same epochs again."""
    sampler = ddpjob.GlobalBatchSampler(64, 4, seed=7)
    sampler.load_state_dict({"n": 64, "seed": 7, "epoch": 1, "consumed": 8})
    for epoch in range(first, 3):
        list(sampler.epoch(epoch))
    assert capfd.readouterr().err.count("ddpjob: epoch 0 of the data begins, but epoch 1 was loaded") == int(not first)


# ---- attempts ----------------------------------------------------------------------------------------------


def test_a_process_of_an_old_attempt_can_neither_publish_nor_prune(attempt, tmp_path):
    zombie = attempt(1, keep=1)
    saved(zombie, 10)
    newer = attempt(2)
    saved(newer, 11)
    before = names(tmp_path / "s")
    with pytest.raises(ddpjob.Superseded, match=r"attempt 2 of job uid-1.*attempt 1"):
        zombie.save(500)
    assert names(tmp_path / "s") == before
    assert attempt(3).load() == 11


def test_an_old_attempt_that_is_superseded_while_writing_publishes_nothing(attempt, tmp_path, monkeypatch):
    zombie = attempt(1)
    written, go_on = threading.Event(), threading.Event()
    sync = os.fsync

    def stop_after_writing(descriptor: int) -> None:
        sync(descriptor)
        written.set()
        assert go_on.wait(30)

    monkeypatch.setattr(os, "fsync", stop_after_writing)
    zombie.save(500)
    assert written.wait(30)
    monkeypatch.setattr(os, "fsync", sync)
    saved(attempt(2), 11)
    go_on.set()
    with pytest.raises(ddpjob.Superseded):
        zombie.wait()
    assert steps(tmp_path / "s") == [11]


def test_a_state_published_by_an_old_attempt_at_the_last_moment_is_never_the_newest(attempt, tmp_path, monkeypatch):
    zombie = attempt(1)
    rename = os.rename

    def newer_attempt_comes_first(source: Path, target: Path) -> None:
        data = source.read_bytes()
        monkeypatch.setattr(os, "rename", rename)
        saved(attempt(2), 11)
        target.write_bytes(data)  # as if the newer attempt had removed the source just after the rename

    monkeypatch.setattr(os, "rename", newer_attempt_comes_first)
    zombie.save(500)
    with pytest.raises(ddpjob.Superseded):
        zombie.save(501)
    assert sorted(steps(tmp_path / "s")) == [11, 500]
    assert attempt(3).load() == 11


def test_a_save_that_blocks_the_training_is_a_declared_pause(tmp_path, monkeypatch):
    """While a save blocks the training a pause is declared, so that a slow disk does not look like a stall."""
    phases = []
    snapshot = ddpjob.Snapshot(tmp_path)
    saved(snapshot, 1)
    sync = os.fsync

    def slow(descriptor: int) -> None:
        while process.current.paused is None:  # until the training waits for this save
            pass
        phases.append(process.current.paused)
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", slow)
        saved(snapshot, 2)
    assert set(phases) == {"save"}
    assert process.current.paused is None


def test_the_same_attempt_may_restart_in_place_and_a_new_job_takes_over_the_folder(attempt):
    saved(attempt(4), 10)
    saved(attempt(4), 20)
    new_job = attempt(1, job="uid-2")
    assert new_job.load() == 20
    saved(new_job, 21)
    assert attempt(2, job="uid-2").load() == 21


def test_an_old_generation_is_refused_like_an_old_attempt(attempt, tmp_path):
    zombie = attempt(1)
    saved(zombie, 10)
    saved(attempt(1, generation=1), 5)
    with pytest.raises(ddpjob.Superseded, match=r"attempt 1, generation 1 of job uid-1.*of attempt 1, must end"):
        zombie.save(500)
    with pytest.raises(ddpjob.Superseded):
        attempt(1)
    assert attempt(1, generation=2).load() == 5
    assert attempt(2).load() == 5, "a new attempt counts its generations from 0"
    with pytest.raises(ddpjob.Superseded):
        attempt(1, generation=3)


def test_a_new_leader_writes_and_ranks_of_an_older_one_do_not(attempt):
    """A new leader must be able to write, even if it counts generations from a lower number than an older leader."""
    zombie = attempt(1, generation=5)
    saved(zombie, 10)
    newer = attempt(1, generation=0, leader=1)
    assert newer.load() == 10
    saved(newer, 20)
    with pytest.raises(ddpjob.Superseded):
        attempt(1, generation=6)
    assert attempt(1, generation=0, leader=2).load() == 20


def test_two_processes_cannot_claim_the_same_number(tmp_path, monkeypatch):
    """Only one of two processes may get a writer number, also on a file system without hard links."""
    from ddpjob.checkpoint import snapshot as file

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "no links")

    assert file.create_exclusively(tmp_path, 1, "{}")
    assert not file.create_exclusively(tmp_path, 1, "{}")
    monkeypatch.setattr(os, "link", refuse)
    assert not file.create_exclusively(tmp_path, 1, "{}")
    assert file.create_exclusively(tmp_path, 2, "{}")


# ---- processes of the same attempt --------------------------------------------------------------------------


def in_a_process_of_its_own(body: Callable[[], object]) -> None:
    process = multiprocessing.get_context("fork").Process(target=body)
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_a_training_that_starts_from_scratch_in_the_folder_of_another_run_keeps_its_own_states(tmp_path):
    """A training from step 0 in an earlier run's folder must keep its saves, although old states have higher steps."""

    def run(*steps: int) -> None:
        snapshot = ddpjob.Snapshot(tmp_path, keep=2)
        for step in steps:
            saved(snapshot, step, weights=torch.full([1], float(step)))
        del snapshot

    in_a_process_of_its_own(lambda: run(100, 200, 300))
    in_a_process_of_its_own(lambda: run(10, 20, 30))
    assert steps(tmp_path) == [20, 30]
    assert ddpjob.Snapshot(tmp_path).load() == 30


def test_a_run_that_falls_back_to_an_older_state_keeps_what_it_saves(tmp_path):
    """After a fall-back to an older state, keep=1 must keep the new saves and not the damaged newer file."""
    in_a_process_of_its_own(lambda: [saved(ddpjob.Snapshot(tmp_path), step, weights=torch.ones(9)) for step in (1, 5)])
    (newest,) = tmp_path.glob("step-000000000005*")
    newest.write_bytes(newest.read_bytes()[:-1])

    def resumed() -> None:
        snapshot = ddpjob.Snapshot(tmp_path, keep=1)
        assert snapshot.load() == 1
        saved(snapshot, 2, weights=torch.ones(9))

    in_a_process_of_its_own(resumed)
    assert steps(tmp_path) == [2]


def test_a_process_that_only_reads_does_not_disturb_a_saving_training(tmp_path):
    """A process that only loads, such as an evaluation, must not remove the heartbeat of a running training."""
    training = ddpjob.Snapshot(tmp_path)
    saved(training, 1)
    beats = (tmp_path / "writer-000001.alive").read_text()
    in_a_process_of_its_own(lambda: ddpjob.Snapshot(tmp_path).load())
    saved(training, 2)
    assert (tmp_path / "writer-000001.alive").read_text() == beats
    assert steps(tmp_path) == [1, 2]


def test_a_second_run_in_a_folder_is_refused_while_the_first_is_running(tmp_path):
    """A second run in the same folder must be refused, because two runs would remove each other's saves."""
    training = ddpjob.Snapshot(tmp_path)
    saved(training, 7)

    def second() -> None:
        with pytest.raises(ddpjob.SnapshotError, match=rf"in use by process {os.getppid()}, which is running"):
            ddpjob.Snapshot(tmp_path).save(1)

    in_a_process_of_its_own(second)
    saved(training, 8)
    assert steps(tmp_path) == [7, 8]


def test_a_process_that_has_only_loaded_blocks_no_training(tmp_path):
    """A script that only loads, for example a notebook, must not block a training in the same folder."""

    def training(folder: Path, step: int) -> None:
        ddpjob.process.current.writers.clear()  # a forked process inherits the writer numbers of its parent
        saved(ddpjob.Snapshot(folder), step)

    in_a_process_of_its_own(lambda: training(tmp_path / "resumed", 7))
    for folder, step in ((tmp_path / "resumed", 7), (tmp_path / "new", 0)):
        reader = ddpjob.Snapshot(folder)
        assert reader.load() == step
        in_a_process_of_its_own(lambda folder=folder: training(folder, 8))
        assert steps(folder)[-1] == 8
    with pytest.raises(ddpjob.Superseded, match="belongs to another process of attempt 1 of a job without a name"):
        reader.save(1)


def test_a_folder_that_was_removed_is_named(tmp_path):
    snapshot = ddpjob.Snapshot(tmp_path / "s")
    saved(snapshot, 1)
    shutil.rmtree(tmp_path / "s")
    snapshot.save(2)
    with pytest.raises(ddpjob.SnapshotError, match=r"step 2 was not saved: No such file or directory .* in .*/s\."):
        snapshot.close()
    assert not (tmp_path / "s").exists(), "a mount that is gone would be a folder of the container"


# ---- a folder of another job --------------------------------------------------------------------------------


@pytest.fixture
def other_job(tmp_path: Path) -> Iterator[Callable[..., int]]:
    """Return a function that starts a process of job uid-other, which saves step 5 and lives until it gets SIGTERM."""
    started = []

    def start(elsewhere: bool = False) -> int:
        said, saying = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                if elsewhere:
                    writers.process_namespace = lambda: "another machine"
                os.environ |= {"DDPJOB_UID": "uid-other", "DDPJOB_ATTEMPT": "1"}
                snapshot = ddpjob.Snapshot(tmp_path / "s")
                saved(snapshot, 5, weights=torch.full((3,), 5.0))
                signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
                os.write(saying, b".")
                signal.pause()
            finally:
                del snapshot  # before it exits, the interpreter releases objects
                os._exit(0)
        os.close(saying)
        assert os.read(said, 1) == b"."
        os.close(said)
        started.append(pid)
        return pid

    yield start
    for pid in started:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def ended(pid: int, how: int) -> None:
    os.kill(pid, how)
    os.waitpid(pid, 0)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["on this machine", "on another machine"])
def test_the_folder_of_another_running_job_is_refused_and_that_job_continues(
    other_job, attempt, tmp_path, monkeypatch, elsewhere
):
    monkeypatch.setattr(writers, "HEARTBEAT_SECONDS", 0.2)
    pid = other_job(elsewhere)
    with pytest.raises(
        ddpjob.SnapshotError, match=r"/s is in use by job uid-other, which is running\. Give each job a"
    ):
        attempt(1)
    with pytest.raises(ddpjob.SnapshotError, match="in use by job uid-other"):
        ddpjob.Snapshot(tmp_path / "s").save(1)
    assert not (tmp_path / "s" / "writer-000002.json").exists()
    ended(pid, signal.SIGTERM)
    assert attempt(1).load() == 5


@pytest.mark.parametrize(
    ("elsewhere", "how"),
    [(False, signal.SIGTERM), (False, signal.SIGKILL), (True, signal.SIGTERM)],
    ids=["in order", "killed on this machine", "in order on another machine"],
)
def test_the_state_of_an_ended_job_is_used_at_once_with_a_message(
    other_job, attempt, monkeypatch, receiver, capfd, elsewhere, how
):
    monkeypatch.setattr(writers, "SILENT_SECONDS", 1000.0)
    ended(other_job(elsewhere), how)
    assert attempt(1).load() == 5
    said = capfd.readouterr().err
    assert "ddpjob: resumed at step 5 from " in said
    assert ", saved by job uid-other; " in said
    assert "give this job a folder of its own" in said
    assert receiver.next()["metrics"] == {"goesOnFrom": "job uid-other"}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_silent_job_on_another_machine_is_waited_for_before_its_folder_is_taken_over(
    other_job, attempt, monkeypatch, capfd, how
):
    monkeypatch.setattr(writers, "HEARTBEAT_SECONDS", 0.2)
    monkeypatch.setattr(writers, "SILENT_SECONDS", 2.0)
    monkeypatch.setattr(writers, "LOOK_SECONDS", 0.05)
    os.kill(other_job(elsewhere=True), how)
    assert attempt(1).load() == 5
    assert "was in use by job uid-other a moment ago: waiting up to " in capfd.readouterr().err


def test_a_new_claim_without_a_heartbeat_is_waited_for(attempt, tmp_path, monkeypatch):
    monkeypatch.setattr(writers, "SILENT_SECONDS", 1.0)
    folder = tmp_path / "s"
    folder.mkdir()
    claim = folder / "writer-000001.json"
    claim.write_text('{"job": "uid-other", "attempt": 1}')
    begin = claim.stat().st_mtime
    attempt(1)
    assert (folder / "writer-000002.json").stat().st_mtime - begin >= 0.9


def test_a_process_that_survives_its_deleted_job_cannot_end_the_next_job(attempt, tmp_path):
    """A late first save by a process of a deleted job must not take over the folder of the next job."""
    newer = attempt(1, job="uid-new")
    saved(newer, 1)

    def survivor() -> None:
        os.environ |= {"DDPJOB_UID": "uid-deleted", "DDPJOB_ATTEMPT": "7"}
        with pytest.raises(ddpjob.SnapshotError, match="in use by job uid-new"):
            ddpjob.Snapshot(tmp_path / "s").save(900)

    in_a_process_of_its_own(survivor)
    saved(newer, 2)
    assert steps(tmp_path / "s") == [1, 2]


def test_a_job_has_a_heartbeat_exactly_as_long_as_it_holds_the_folder(attempt, tmp_path, monkeypatch):
    monkeypatch.setattr(writers, "HEARTBEAT_SECONDS", 0.02)
    holder = attempt(1)
    beat = tmp_path / "s" / "writer-000001.alive"
    begin = beat.stat().st_mtime_ns
    eventually(lambda: beat.stat().st_mtime_ns != begin)
    assert "process" in beat.read_text()
    del holder
    assert beat.read_text() == "", "left in order"
    saved(attempt(2), 1)
    assert not beat.exists(), "the next writer tidies up"


# ---- several ranks -----------------------------------------------------------------------------------------


def world_of(rank: int, world_size: int, url: str) -> World:
    return ddpjob.init(init_method=url, rank=rank, world_size=world_size)


@pytest.fixture
def patient(monkeypatch):
    """Let the writing thread wait for random states of a late rank longer than any delay on this machine."""
    monkeypatch.setattr(importlib.import_module("ddpjob.checkpoint.snapshot"), "RNG_WAIT_SECONDS", 30.0)


def test_every_rank_continues_with_its_own_random_numbers(run_ranks, tmp_path, patient):
    def save_and_draw(rank: int) -> float:
        with world_of(rank, 3, f"file://{tmp_path}/a") as world:
            torch.manual_seed(100 + rank)
            ddpjob.Snapshot(tmp_path / "s").save(1, weights=torch.ones(2))
            assert world.rank == rank
            return float(torch.rand(()))

    def load_and_draw(rank: int, world_size: int, name: str) -> float:
        with world_of(rank, world_size, f"file://{tmp_path}/{name}"):
            assert ddpjob.Snapshot(tmp_path / "s").load(weights=torch.zeros(2)) == 1
            return float(torch.rand(()))

    expected = run_ranks(save_and_draw, 3)
    assert run_ranks(lambda rank: load_and_draw(rank, 3, "b"), 3) == expected
    smaller = run_ranks(lambda rank: load_and_draw(rank, 2, "c"), 2)
    assert len({*smaller, *expected}) == 5, "ranks of another world size must not draw the same numbers"
    assert run_ranks(lambda rank: load_and_draw(rank, 2, "d"), 2) == smaller, "a resume must be repeatable"


def test_a_step_that_is_saved_twice_keeps_the_random_numbers_of_every_rank(run_ranks, tmp_path, patient):
    """If a step is saved again at the end, the second file must have all ranks' random states, although the store has
    them only for the first save."""

    def save_twice(rank: int) -> None:
        with world_of(rank, 2, f"file://{tmp_path}/a"):
            snapshot = ddpjob.Snapshot(tmp_path / "s")
            for value in (1.0, 2.0):
                saved(snapshot, 1, weights=torch.full((2,), value))

    run_ranks(save_twice, 2)
    files = list((tmp_path / "s").glob("step-*.pt"))
    assert files
    for file in files:
        assert sorted(torch.load(file, weights_only=True)["rng"]) == [0, 1], file.name


def rng_of(path: Path) -> list[int]:
    return sorted(torch.load(path, weights_only=True)["rng"])


def test_a_rank_that_is_late_once_has_its_random_states_in_all_later_files(run_ranks, tmp_path, monkeypatch):
    snapshot_file = importlib.import_module("ddpjob.checkpoint.snapshot")
    monkeypatch.setattr(snapshot_file, "RNG_WAIT_SECONDS", 0.2)
    folder = tmp_path / "s"

    def body(rank: int) -> list[int]:
        keys = []
        with world_of(rank, 2, f"tcp://127.0.0.1:{port}") as world:
            snapshot = ddpjob.Snapshot(folder, world, keep=100)
            while rank == 1 and not list(folder.glob("step-*1.*.pt")):  # until rank 0 has saved alone
                time.sleep(0.01)
            for step in range(1, 13):
                saved(snapshot, step)
                snapshot_file.RNG_WAIT_SECONDS = 30.0  # longer than any delay on this machine
                torch.distributed.barrier()
                keys.append(importlib.import_module("ddpjob.group.join").store_of(world).num_keys())
        return keys

    port = free_port()
    counts = run_ranks(body, 2)[0]
    kept = {step: rng_of(next(folder.glob(f"step-{step:012d}.*"))) for step in range(1, 13)}
    assert kept[1] == [0]
    assert all(kept[step] == [0, 1] for step in range(2, 13)), kept
    # Rank 1 may be one save ahead when rank 0 counts the keys of the store.
    assert counts[-1] <= counts[2] + 2, "the store grows with each save"


def test_a_resume_without_the_random_states_of_a_rank_is_reported(run_ranks, tmp_path, capfd):
    def save(rank: int) -> None:
        with world_of(rank, 2, f"file://{tmp_path}/a") as world:
            if world.is_main:
                saved(ddpjob.Snapshot(tmp_path / "s", world), 1)

    def load(rank: int) -> int:
        with world_of(rank, 2, f"file://{tmp_path}/b"):
            return ddpjob.Snapshot(tmp_path / "s").load()

    run_ranks(save, 2)
    run_ranks(load, 2)
    assert capfd.readouterr().err.count("has no random state of rank 1, which did not save in time") == 1


def test_each_node_may_have_its_own_folder(run_ranks, tmp_path, patient):
    """If each node has its own folder, as with an emptyDir, files must have the random states of all nodes."""

    def save(rank: int) -> float:
        with world_of(rank, 2, f"file://{tmp_path}/a") as world:
            snapshot = ddpjob.Snapshot(tmp_path / f"node-{rank}" / "s", world)
            assert snapshot.load() == 0
            torch.manual_seed(100 + rank)
            for step in (1, 2):
                saved(snapshot, step)
            return float(torch.rand(()))

    def load(rank: int) -> float:
        with world_of(rank, 2, f"file://{tmp_path}/b") as world:
            assert ddpjob.Snapshot(tmp_path / f"node-{rank}" / "s", world).load() == 2
            return float(torch.rand(()))

    expected = run_ranks(save, 2)
    assert [rng_of(file) for file in (tmp_path / "node-0" / "s").glob("step-*.pt")] == [[0, 1], [0, 1]]
    assert run_ranks(load, 2) == expected


def test_a_save_of_rank_0_alone_waits_for_nobody_and_reports_what_is_missing(run_ranks, tmp_path, capfd, monkeypatch):
    """If only rank 0 saves, it must not wait two seconds for the other ranks, and must log what the file lacks."""
    monkeypatch.setattr(importlib.import_module("ddpjob.checkpoint.snapshot"), "RNG_WAIT_SECONDS", 1e6)

    def body(rank: int) -> int:
        with world_of(rank, 2, f"file://{tmp_path}/a") as world:
            model = world.wrap(torch.nn.Linear(1, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            snapshot = ddpjob.Snapshot(tmp_path / "s", world, keep=9)
            for step in range(1, 7):
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
                if world.is_main and step in (1, 2, 4):
                    snapshot.save(step, model=model)
            snapshot.close()
        return 0

    run_ranks(body, 2)
    assert [rng_of(file) for file in sorted((tmp_path / "s").glob("step-*.pt"))] == [[0]] * 3
    assert (
        capfd.readouterr().err.count("rank 1 did not save step 1: from the snapshot a restart does not continue") == 1
    )


def test_nodes_without_a_shared_folder_get_the_state_of_rank_0(run_ranks, tmp_path):
    saved(ddpjob.Snapshot(tmp_path / "rank0"), 9, weights=torch.arange(1000.0))

    def body(rank: int) -> tuple[int, float]:
        with world_of(rank, 3, f"file://{tmp_path}/meet") as world:
            weights = torch.zeros(1000)
            step = ddpjob.Snapshot(tmp_path / f"rank{rank}", world).load(weights=weights)
            return step, float(weights.sum())

    assert run_ranks(body, 3) == [(9, 499500.0)] * 3


def test_all_ranks_stop_when_rank_0_is_superseded(end_ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("DDPJOB_ATTEMPT", "2")
    ddpjob.Snapshot(tmp_path / "s").load()
    monkeypatch.setenv("DDPJOB_ATTEMPT", "1")

    def body(rank: int) -> None:
        with world_of(rank, 2, f"file://{tmp_path}/meet"):
            ddpjob.Snapshot(tmp_path / "s").load()

    for outcome in end_ranks(body, 2):
        assert outcome.error.startswith("Superseded")


def test_a_ddp_model_and_a_plain_one_can_load_each_others_states(run_ranks, tmp_path):
    def body(rank: int) -> list[str]:
        with world_of(rank, 1, f"file://{tmp_path}/meet") as world:
            model = world.wrap(torch.nn.Linear(2, 1))
            snapshot = ddpjob.Snapshot(tmp_path / "s", world)
            saved(snapshot, 1, model=model)
            snapshot.load(model=model)
            return list(snapshot.state["model"])

    assert run_ranks(body, 1) == [["weight", "bias"]]
    assert ddpjob.Snapshot(tmp_path / "s").load(model=torch.nn.Linear(2, 1)) == 1


def test_a_group_that_the_script_has_created_is_used(run_ranks, tmp_path):
    """A group that the script has created must be used, because otherwise each rank saves as rank 0 of 1."""

    def body(rank: int) -> Any:
        dist.init_process_group("gloo", store=dist.FileStore(f"{tmp_path}/meet", 2), rank=rank, world_size=2)
        torch.manual_seed(rank)
        weights = torch.full([1], float(rank))
        snapshot = ddpjob.Snapshot(tmp_path / "s")
        for step in (1, 2):
            snapshot.save(step, weights=weights)
        snapshot.close()
        dist.barrier()
        drawn = torch.rand(1).item()
        again = ddpjob.Snapshot(tmp_path / "s")
        found = again.load(weights=weights), weights.item(), torch.rand(1).item() == drawn
        dist.destroy_process_group()
        return snapshot.rank, snapshot.world_size, *found

    assert run_ranks(body, 2) == [(0, 2, 2, 0.0, True), (1, 2, 2, 1.0, True)]
    assert steps(tmp_path / "s") == [1, 2]


def test_a_rank_that_has_left_its_group_loads_by_itself_and_only_rank_0_saves(run_ranks, tmp_path):
    def body(rank: int) -> Any:
        os.environ["WORLD_SIZE"] = "2"
        with ddpjob.init("gloo", init_method=f"file://{tmp_path}/meet", rank=rank, world_size=2):
            saved(ddpjob.Snapshot(tmp_path / "s"), 7, weights=torch.full([1], float(rank)))
            dist.barrier()
        weights = torch.full([1], 9.0)
        after = ddpjob.Snapshot(tmp_path / "s")
        step = after.load(weights=weights)
        saved(after, 8 + rank, weights=weights)
        return step, weights.item()

    assert run_ranks(body, 2) == [(7, 0.0), (7, 1.0)]
    assert steps(tmp_path / "s") == [7, 8]


def test_a_rank_without_a_group_is_told_to_join_it_first(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ddpjob.ConfigurationError, match=r"WORLD_SIZE: 2 and .* Call ddpjob\.init\(\) first, or pass world"
    ):
        ddpjob.Snapshot(tmp_path / "s")


def test_an_optimizer_sharded_over_ranks_is_resumed_once_rank_0_has_all_of_it(run_ranks, tmp_path):
    """load() must accept a ZeroRedundancyOptimizer, whose state_dict() raises on all ranks after a load."""

    def body(rank: int) -> Any:
        world = ddpjob.init("gloo", init_method=f"file://{tmp_path}/meet", rank=rank, world_size=2)
        model = world.wrap(torch.nn.Linear(4, 4))
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.consolidate_state_dict(0)
        saved(ddpjob.Snapshot(tmp_path / "s", world), 1, model=model, optimizer=optimizer)
        dist.barrier()
        again = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.5)
        step = ddpjob.Snapshot(tmp_path / "s", world).load(model=model, optimizer=again)
        again.consolidate_state_dict(0)
        world.close()
        same = rank > 0 or str(again.state_dict()) == str(optimizer.state_dict())
        return step, again.param_groups[0]["lr"], same

    assert run_ranks(body, 2) == [(1, 0.1, True)] * 2
