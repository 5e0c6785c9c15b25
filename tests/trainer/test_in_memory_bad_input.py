"""Unusual models and scripts whose state is kept in memory. Each generation is a forked process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_node import Node, begin, parts, rescue, saved, settle, steps

import ddpjob
from ddpjob import limits, process
from ddpjob.checkpoint.in_memory.kept import Kept
from ddpjob.checkpoint.state import packed
from ddpjob.errors import StateError
from ddpjob_core import memory


class Graph(torch.nn.Module):
    """Layer of a graph network, with a sparse buffer for the neighbors of each node."""

    neighbors: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.register_buffer("neighbors", torch.eye(4).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.neighbors @ x)


@pytest.mark.parametrize("kind", [Graph, lambda: torch.nn.Sequential(torch.nn.LazyLinear(1))])
def test_a_model_with_sparse_or_lazy_tensors_is_loaded_and_continues_after_a_restart(
    node: Node, kind: Callable[[], torch.nn.Module]
) -> None:
    """`load` must not raise for a model with sparse or lazy tensors, neither at the start nor at a restart."""

    def train(until: int) -> int:
        model = kind()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        snapshot = ddpjob.Snapshot("snapshots")
        step = began = snapshot.load(model=model, optimizer=optimizer)
        while step < until:
            steps(step, step + 1, model, optimizer)
            step += 1
            if step == 4:
                snapshot.save(step, model=model, optimizer=optimizer)
        rescue()
        return began

    assert node.run(0, lambda: train(12)) == 0
    assert node.run(1, lambda: train(12)) == (4 if kind is Graph else 12)


def test_a_model_on_another_device_at_a_failure_resumes_from_the_folder_and_the_log_says_so(
    node: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    """If a rank fails while the model is on another device (here the meta device), a restart must use the folder."""

    def train(until: int, *, moves: bool) -> int:
        objects, snapshot, step = begin()
        if not step:
            steps(0, 4, **objects)
            saved(snapshot, 4, **objects)
        steps(step or 4, until, **objects)
        if moves:
            objects["model"].to("meta")
        rescue()
        return step

    assert node.run(0, lambda: train(6, moves=True)) == 0
    assert node.step is None
    assert "the state is not written: the model has other parameters than before" in capfd.readouterr().err
    assert node.run(1, lambda: train(6, moves=False)) == 4


def test_a_model_with_a_layer_on_another_device_trains_and_the_log_says_that_it_is_not_kept(
    node: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    """A model with a layer on another device must train, and the log must say that it is not kept in memory."""

    def train() -> int:
        objects = parts()
        objects["model"].append(torch.nn.Linear(2, 2, device="meta"))
        step = ddpjob.Snapshot("snapshots").load(**objects)
        steps(step, 6, lambda x: objects["model"][:3](x), objects["optimizer"])
        rescue()
        return step

    assert node.run(0, train) == 0
    assert node.step is None
    assert "the state is not kept in memory: a tensor on the meta device" in capfd.readouterr().err


@pytest.mark.parametrize("short", [1, 0])
def test_a_limit_that_is_one_byte_too_small_is_reported_with_the_sufficient_one(
    node: Node, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], short: int
) -> None:
    """If the memory limit is one byte too small, no state is kept, and the message names a sufficient limit."""

    def size_of_state() -> int:
        objects = parts()
        steps(0, 1, **objects)
        return packed.pack(Kept(objects).large()).size

    def train() -> tuple[str, int | None]:
        objects, _, _ = begin()
        steps(0, 6, **objects)
        rescue()
        return process.current.not_kept, process.current.limit_needed

    enough = memory.needed(memory.area_bytes(node.run(0, size_of_state)))
    monkeypatch.setattr(limits, "_limits", lambda *_: iter([(enough - short, 0)]))
    not_kept, limit_needed = node.run(1, train, ranks=2)
    assert (node.step, limit_needed) == ((None, enough) if short else (6, None))
    assert not_kept.startswith("the container's memory limit is 0 MiB" if short else "")
    assert ("the state is not kept in memory: the container's memory limit" in capfd.readouterr().err) is bool(short)


class Averages:
    """An object of a script with a state_dict(), which is copied at each step."""

    def __init__(self) -> None:
        self.values = torch.zeros(2 << 20)

    def state_dict(self) -> dict[str, Any]:
        """Return the state without a copy, as many classes do."""
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Use the tensors of `state` without a copy, as many classes do."""
        self.values = state["values"]


@pytest.mark.parametrize(
    ("which", "why"),
    [
        ("a buffer", "buffers and other small objects have 68 MiB, but at most 64 MiB can be written at each step"),
        ("an object", "averages: it has more than 4 MiB to copy at each step"),
    ],
)
def test_a_script_with_too_much_data_per_step_trains_and_the_log_says_why_it_is_not_kept(
    node: Node, which: str, why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A script with 64 MiB of small values must train without memory: copying them would slow down each step."""

    def train() -> None:
        objects, snapshot = parts(), ddpjob.Snapshot("snapshots")
        others = {"averages": Averages()} if which == "an object" else {}
        if which == "a buffer":
            objects["model"].register_buffer("mask", torch.zeros(17 << 20))
        snapshot.load(**objects, **others)
        steps(0, 2, **objects)
        snapshot.keep(2, **objects, **others)
        steps(2, 6, **objects)
        rescue()

    node.run(0, train)
    assert node.step is None
    assert f"the state is not kept in memory: {why}; a restart goes on from the last save" in capfd.readouterr().err


def accumulated(until: int, *, fails_within: bool, saves_within: bool = True) -> Any:
    """Train with two micro-batches per step and dropout; save, and perhaps fail, in the middle of step 7."""
    objects, snapshot = parts(), ddpjob.Snapshot("snapshots")
    step = began = snapshot.load(**objects)
    if not step:
        torch.manual_seed(5)
    while step < until:
        objects["optimizer"].zero_grad()
        for half in range(2):
            x = torch.nn.functional.dropout(torch.full((4, 4), float(step + half)), 0.5)
            objects["model"](x).square().sum().backward()
            if half == 0 and step == 6 and not began and saves_within:
                saved(snapshot, step, **objects)
                if fails_within:
                    rescue()
                    return began, []
        objects["optimizer"].step()
        step += 1
        ddpjob.should_stop(step)
        settle()
    return began, [value.tolist() for value in objects["model"].state_dict().values()]


def test_ranks_that_mark_different_steps_resume_from_the_folder_and_the_log_says_so(
    node: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    """If ranks pass different numbers to should_stop() for the same step, a restart must use the folder."""

    def train() -> int:
        rank = int(os.environ["RANK"])
        objects, snapshot, began = begin()
        model = torch.nn.parallel.DistributedDataParallel(objects["model"])
        for step in range(began + 1, began + 9):
            objects["optimizer"].zero_grad()
            model(torch.full((4, 4), float(step))).square().sum().backward()
            objects["optimizer"].step()
            if step == began + 4:
                saved(snapshot, step, **objects)
            ddpjob.should_stop(step + 5 * rank)
            settle()
        rescue()
        return began

    assert [node.run(generation, train, ranks=2) for generation in range(2)] == [0, 4]
    assert "the state in memory is not used: the state is of step" in capfd.readouterr().err


def test_a_rank_that_marks_only_its_saves_resumes_with_its_own_random_states(
    node: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    """If only rank 0 calls should_stop(), rank 1 may have begun the next step when rank 0 fails. A restart must not use
    random states of that step."""

    def train() -> None:
        objects, snapshot, _ = begin()
        model = torch.nn.parallel.DistributedDataParallel(objects["model"])
        for step in range(1, 9):
            model(torch.randn(4, 4)).square().sum().backward()
            objects["optimizer"].step()
            if step % 5 == 0:
                saved(snapshot, step, **objects)
            if os.environ["RANK"] == "0":
                ddpjob.should_stop(step)
                snapshot.keep(step, **objects)
            settle()
        if os.environ["RANK"] == "0":
            rescue()
        else:
            with model.no_sync():
                objects["model"](torch.randn(4, 4)).square().sum().backward()

    node.run(0, train, ranks=2)
    assert node.run(1, lambda: begin()[2], ranks=2) == 5
    assert "rank 1 does not call should_stop() after each step" in capfd.readouterr().err


def test_a_save_within_an_accumulation_restores_the_complete_step(node: Node, tmp_path: Path) -> None:
    """After a save within a gradient accumulation, memory must have random states and running means of the last
    complete step, because a restart repeats all micro-batches of the next step."""
    _, undisturbed = node.run(0, lambda: accumulated(9, fails_within=False, saves_within=False))
    node.lose(0)
    assert node.run(1, lambda: accumulated(9, fails_within=True)) == (0, [])
    assert node.step == 6
    began, ended = node.run(2, lambda: accumulated(9, fails_within=False))
    assert began == 6
    assert ended == undisturbed


@pytest.mark.parametrize("kind", ["plain", "lbfgs", "adversary"])
def test_a_script_whose_step_needs_its_peers_is_told_in_time_that_memory_lacks_some_steps(
    node: Node, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    """A script with LBFGS or a GAN must get a warning, because a rank that fails within its step leaves no state."""

    def train() -> str:
        objects = parts()
        model, optimizer = objects["model"], objects["optimizer"]
        if kind == "lbfgs":
            optimizer = objects["optimizer"] = torch.optim.LBFGS(model.parameters(), max_iter=2)
        if kind == "adversary":
            objects["critic"] = torch.nn.Linear(1, 1)
            objects["critic_optimizer"] = torch.optim.SGD(objects["critic"].parameters(), lr=0.1)
        ddpjob.Snapshot("snapshots").load(**objects)

        def backward() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(torch.randn(4, 4)).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        for step in range(1, 6):
            if kind == "adversary":
                objects["critic"](model(torch.randn(4, 4)).detach()).square().mean().backward()
                objects["critic_optimizer"].step()
            if kind == "lbfgs":
                optimizer.step(backward)
            else:
                backward()
                optimizer.step()
            ddpjob.should_stop(step)
            settle()
        return process.current.not_kept

    not_kept = node.run(0, train, ranks=2)
    why = "as with LBFGS or a second optimizer: a rank that fails there leaves no complete state"
    assert (why in not_kept) == (kind != "plain")
    assert capfd.readouterr().err.count(why) == int(kind != "plain")


@pytest.mark.parametrize("world_size", ["1", "2"])
def test_an_embedding_whose_rows_differ_by_rank_is_not_kept_and_named(
    monkeypatch: pytest.MonkeyPatch, world_size: str
) -> None:
    """With `max_norm` a rank scales the rows that it looks up. A survivor must not give its rows to a lost rank."""
    monkeypatch.setenv("WORLD_SIZE", world_size)
    model = torch.nn.Sequential(torch.nn.Embedding(2, 4, max_norm=0.1))
    if world_size == "1":
        assert Kept({"model": model}).models == ["model"]
        return
    with pytest.raises(StateError, match=r"model: each rank may have its own 0, which .* has max_norm"):
        Kept({"model": model})
