"""What `Snapshot` keeps in the agent's memory, and gives back in the next generation; one forked process for each.

Here no rank is killed: `rescue()` is what a survivor does. `tests/agent/test_memory.py` has the kills.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ddpjob
from ddpjob import process
from ddpjob.agent.memory import Memory

RANKS = 2


class Node:
    """A node, its agent's memory, and the generations of its ranks."""

    def __init__(self, folder: Path, run_ranks: Callable[[Callable[[int], Any], int], list[Any]]) -> None:
        self._folder, self._run = folder, run_ranks
        self._memory = Memory(RANKS)

    def run(self, generation: int, body: Callable[[], Any], *, ranks: int = 1) -> Any:
        """What the body returns on rank 0."""
        self._memory.begin(generation)

        def main(rank: int) -> Any:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "DDPJOB_UID": "uid-1"}
            os.environ |= {"DDPJOB_GENERATION": str(generation), "DDPJOB_MEMORY": self._memory.where(rank)}
            url = f"file://{self._folder}/meet-{generation}"
            with ddpjob.init("gloo", init_method=url, rank=rank, world_size=ranks):
                return body()

        return self._run(main, ranks)[0]

    @property
    def step(self) -> int | None:
        """Of the state that is in memory."""
        return None if self._memory.whole is None else self._memory.whole.step


@pytest.fixture
def node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run_ranks: Callable[[Callable[[int], Any], int], list[Any]]
) -> Node:
    monkeypatch.chdir(tmp_path)
    return Node(tmp_path, run_ranks)


def rescue() -> None:
    """What a rank does when another one has failed."""
    if process.current.keeper is not None:
        process.current.keeper.save()


def settle() -> None:
    """Room for the state is reserved in a thread."""
    for thread in threading.enumerate():
        if thread.name == "ddpjob-memory-room":
            thread.join()


def parts() -> dict[str, Any]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters())}


def steps(
    first: int, last: int, model: Any, optimizer: Any, before_boundary: Callable[[], object] = lambda: None
) -> None:
    """Train the steps from the one after `first` to `last`."""
    for step in range(first + 1, last + 1):
        optimizer.zero_grad()
        model(torch.full((4, 4), float(step)) + torch.randn(4, 4)).square().sum().backward()
        optimizer.step()
        before_boundary()
        ddpjob.should_stop(step)
        settle()


# ---- from load on, before the first save -------------------------------------------------------------------


def train_from_load(until: int, **others: Any) -> int:
    """To this step, and then a rank fails. The step at which it began."""
    objects = parts()
    step = ddpjob.Snapshot("snapshots").load(**objects, **others)
    steps(step, until, **objects)
    rescue()
    return step


def test_a_failure_before_the_first_save_repeats_no_step(node: Node) -> None:
    """A script that saves once an hour would else lose the first hour, whenever a rank dies in it."""
    assert node.run(0, lambda: train_from_load(6)) == 0
    assert node.run(1, lambda: train_from_load(7)) == 6
    assert node.run(2, lambda: train_from_load(8)) == 7


def test_a_scheduler_and_a_sampler_are_kept_from_load_on_at_the_step_of_the_model(node: Node) -> None:
    """Most scripts have them."""

    def train(until: int) -> Any:
        objects = parts()
        scheduler = torch.optim.lr_scheduler.StepLR(objects["optimizer"], 2, 0.5)
        sampler = ddpjob.GlobalBatchSampler(64, 4, 7)
        step = ddpjob.Snapshot("snapshots").load(**objects, scheduler=scheduler, sampler=sampler)
        place = (step, scheduler.last_epoch, sampler.state_dict()["consumed"])
        batches = sampler.epoch(sampler.current_epoch)
        while step < until:
            next(batches)
            steps(step, step + 1, **objects, before_boundary=scheduler.step)
            step += 1
        rescue()
        return place

    assert node.run(0, lambda: train(6)) == (0, 0, 0)
    assert node.run(1, lambda: train(7)) == (6, 6, 24)


def test_a_sampler_that_a_dataloader_reads_ahead_is_not_kept_before_save_names_its_place(node: Node) -> None:
    """It says that batches were trained which only lie in a queue: the samples would be left out."""

    def train() -> int:
        sampler = ddpjob.GlobalBatchSampler(64, 4, 7)
        objects = parts()
        step = ddpjob.Snapshot("snapshots").load(**objects, sampler=sampler)
        next(iter(sampler))
        steps(step, 6, **objects)
        rescue()
        return step

    node.run(0, train)
    assert node.step is None


def test_an_optimizer_that_load_does_not_name_means_that_load_names_too_little(node: Node) -> None:
    """A script that loads pretrained weights and saves more: its optimizer would begin anew in the middle."""

    def train() -> None:
        objects = parts()
        step = ddpjob.Snapshot("snapshots").load(model=objects["model"])
        steps(step, 6, **objects)
        rescue()

    node.run(0, train)
    assert node.step is None


def test_a_load_in_two_calls_is_kept_from_the_first_save_on(node: Node) -> None:
    """Each names a part, and a part of a state is none."""

    def train() -> int:
        objects, snapshot = parts(), ddpjob.Snapshot("snapshots")
        snapshot.load(model=objects["model"])
        step = snapshot.load(optimizer=objects["optimizer"])
        steps(step, 6, **objects)
        rescue()
        return step

    assert [node.run(number, train) for number in range(2)] == [0, 0]


def test_a_script_that_asks_for_values_is_kept_from_the_first_save_on(node: Node) -> None:
    """It would go on from step 6 with the best loss of step 0."""

    def train() -> float:
        objects, snapshot = parts(), ddpjob.Snapshot("snapshots")
        step = snapshot.load(**objects)
        best = float(snapshot.state.get("best", 9.0))
        steps(step, 6, **objects)
        rescue()
        return best

    assert node.run(0, train) == 9.0
    assert node.step is None


def test_a_script_that_asks_for_values_only_after_a_resume_is_refused_once(
    node: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    """At its first start nothing tells that it has values; a default in their place would change the result."""

    def train() -> int:
        objects, snapshot = parts(), ddpjob.Snapshot("snapshots")
        step = snapshot.load(**objects)
        if step:
            with pytest.raises(ddpjob.StateError, match=r"best: the state in memory has only what load\(\) names"):
                snapshot.state.get("best", 9.0)
        else:
            steps(step, 6, **objects)
        rescue()
        return step

    assert [node.run(number, train) for number in range(3)] == [0, 6, 0]
    assert "step 6 was loaded before, and no step was made after it" in capfd.readouterr().err


def test_what_one_rank_has_saved_counts_before_what_another_assumes(node: Node) -> None:
    """`if world.is_main: snapshot.save(…, best=best)`: the other ranks know of no best loss."""

    def train() -> Any:
        world = ddpjob.init()
        objects, snapshot = parts(), ddpjob.Snapshot("snapshots", world)
        step = snapshot.load(**objects)
        steps(step, 5, **objects)
        if world.is_main and not step:
            snapshot.save(5, **objects, best=0.5)
            snapshot.wait()
        steps(5, 6, **objects)
        if not world.is_main:
            rescue()
        return step, snapshot.state.get("best")

    assert node.run(0, train, ranks=2) == (0, None)
    assert node.step == 6
    assert node.run(1, train, ranks=2) == (5, 0.5)


# ---- without a folder; two of them -------------------------------------------------------------------------


def test_without_a_folder_the_state_is_in_memory_alone_and_the_log_says_so_once(
    node: Node, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A short training needs no volume, and who forgets one must know what is lost when all ranks end."""

    def train(until: int) -> int:
        objects, snapshot = parts(), ddpjob.Snapshot()
        step = snapshot.load(**objects)
        steps(step, until, **objects)
        snapshot.save(until, **objects)
        snapshot.save(until, **objects)
        snapshot.close()
        rescue()
        return step

    before = set(tmp_path.iterdir())
    assert node.run(0, lambda: train(6)) == 0
    assert capfd.readouterr().err.count("begins at step 0 when all ranks have ended") == 1
    assert node.run(1, lambda: train(8)) == 6
    assert {path.name for path in set(tmp_path.iterdir()) - before} <= {"meet-0", "meet-1"}


def test_without_a_folder_and_without_an_agent_the_log_says_that_nothing_is_saved(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Under torchrun there is no memory that outlives the ranks: a script that believes in one would lose its work."""
    objects, snapshot = parts(), ddpjob.Snapshot()
    assert snapshot.load(**objects) == 0
    snapshot.save(1, **objects)
    assert capfd.readouterr().err.count("nothing is saved") == 1
    process.replace()


def test_no_folder_and_no_memory_is_a_mistake() -> None:
    """Its saves would do nothing."""
    with pytest.raises(ddpjob.ConfigurationError, match="nothing would be saved"):
        ddpjob.Snapshot(memory=False)


def test_a_second_snapshot_that_is_only_written_leaves_the_memory_to_the_one_that_loads(node: Node) -> None:
    """The best state in a folder of its own is what many scripts have."""

    def train(until: int) -> int:
        objects, best = parts(), ddpjob.Snapshot("best")
        step = ddpjob.Snapshot("last").load(**objects)
        steps(step, until, **objects)
        best.save(until, model=objects["model"], loss=0.5)
        best.wait()
        rescue()
        return step

    assert node.run(0, lambda: train(6)) == 0
    assert node.run(1, lambda: train(7)) == 6


def test_a_script_that_loads_from_two_snapshots_goes_on_from_their_folders(
    node: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    """One state would be of the last step, and the other of the last save."""

    def train() -> Any:
        one, other = parts(), parts()
        first, second = ddpjob.Snapshot("first"), ddpjob.Snapshot("second")
        step = first.load(**one), second.load(**other)
        steps(step[0], 6, **one)
        if step == (0, 0):
            first.save(5, **one)
            second.save(4, **other)
        first.wait()
        second.wait()
        rescue()
        return step

    assert node.run(0, train) == (0, 0)
    assert "not kept in memory: the script loads from a second Snapshot" in capfd.readouterr().err
    assert node.run(1, train) == (5, 4)
