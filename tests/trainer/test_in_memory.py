"""`Snapshot` keeps a state in shared memory, and the next generation, here a forked process, loads the state. No rank
is killed: `rescue()` does what a surviving rank does. `tests/agent/test_memory.py` has the kills."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_node import Node, begin, make_step, parts, rescue, saved, settle, steps

import ddpjob
from ddpjob import process
from ddpjob.checkpoint import writers
from ddpjob.checkpoint.in_memory.change_watch import SAMPLES, ChangeWatch
from ddpjob.checkpoint.in_memory.shared import Shared
from ddpjob.checkpoint.state import packed
from ddpjob.group import gather
from ddpjob_core import heartbeat, memory

# ---- from load() on, before the first save() ---------------------------------------------------------------


def train_from_load(until: int, **others: Any) -> int:
    """Train to step `until`, then write the state as after another rank's failure. Return the first step."""
    objects = parts()
    step = ddpjob.Snapshot("snapshots").load(**objects, **others)
    steps(step, until, **objects)
    rescue()
    return step


class Keeping(torch.nn.Linear):
    """A layer that uses the loaded tensor itself, not a copy."""

    seen: torch.Tensor

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        self.seen = state_dict[f"{prefix}weight"]
        super()._load_from_state_dict(state_dict, prefix, *others)


@pytest.mark.parametrize("who_keeps", ["a layer", "the model"])
def test_loaded_tensors_do_not_change_when_the_memory_is_written_again(node: Node, who_keeps: str) -> None:
    """Loaded tensors must not be views of shared memory, because the next write to shared memory would change them."""

    def objects_of() -> dict[str, Any]:
        first = Keeping if who_keeps == "a layer" else torch.nn.Linear
        model = torch.nn.Sequential(first(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        if who_keeps == "the model":  # some scripts set assign=True to save memory
            model.load_state_dict = functools.partial(model.load_state_dict, assign=True)  # type: ignore[method-assign]
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters())}

    def train() -> None:
        objects = objects_of()
        ddpjob.Snapshot("snapshots").load(**objects)
        steps(0, 6, **objects)
        rescue()

    def load() -> list[bool]:
        objects = objects_of()
        snapshot = ddpjob.Snapshot("snapshots")
        assert snapshot.load(**objects) == 6
        optimizer = objects["optimizer"].state_dict()["state"]
        seen = getattr(objects["model"][0], "seen", None)
        held = packed.tensors_of([objects["model"].state_dict(), seen, optimizer, snapshot.state])
        before = [tensor.clone() for tensor in held]
        shared = Shared(os.environ["DDPJOB_MEMORY"], 1, 1)
        shared.mapped(0)[:] = b"\xff" * shared.reserved(0)
        return [torch.equal(now, then) for now, then in zip(held, before, strict=True)]

    node.run(0, train)
    same = node.run(1, load)
    assert len(same) > 20
    assert all(same)


def test_loading_a_snapshot_takes_no_extra_memory_for_existing_tensors(node: Node) -> None:
    """After load() a rank must not have a second copy of the model and the optimizer's state in memory."""

    def load() -> tuple[int, list[bool]]:
        objects = parts()
        snapshot = ddpjob.Snapshot("snapshots")
        step = snapshot.load(**objects)
        own = {tensor.data_ptr() for tensor in packed.tensors_of([o.state_dict() for o in objects.values()])}
        named = {name: value for name, value in snapshot.state.items() if name in objects}
        same = [tensor.data_ptr() in own for tensor in packed.tensors_of(named)]
        steps(step, step + 3, **objects)
        snapshot.save(step + 3, **objects)
        snapshot.close()
        return step, same

    assert node.run(0, load) == (0, [])
    for generation, step in ((1, 3), (2, 6)):
        began, same = node.run(generation, load)
        assert began == step
        assert len(same) > 10
        assert all(same)


def test_a_sampler_read_ahead_by_a_dataloader_is_not_kept_before_save_gives_its_position(node: Node) -> None:
    """If a DataLoader reads ahead, memory must not be used before save() gives the position: the sampler counts queued
    batches as trained, so a restart would skip their samples."""

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


def test_an_optimizer_that_was_not_passed_to_load_shows_that_load_lacks_objects(node: Node) -> None:
    """If an optimizer that was not passed to load() makes a step, memory must not keep the objects passed to load()."""

    def train() -> None:
        objects = parts()
        step = ddpjob.Snapshot("snapshots").load(model=objects["model"])
        steps(step, 6, **objects)
        rescue()

    node.run(0, train)
    assert node.step is None


def train_from_parts(*parts_of_load: tuple[str, ...]) -> tuple[int, ...]:
    """Return the steps that the calls of load() return. In the first generation, write step 3 to the folder, and step 9
    without the object "best" to memory."""
    snapshot = ddpjob.Snapshot("snapshots")
    objects, best = parts(), {"best": torch.zeros(())}
    loaded = tuple(snapshot.load(**{name: (objects | best)[name] for name in names}) for names in parts_of_load)
    if not any(loaded):
        steps(0, 3, **objects)
        saved(snapshot, 3, **objects, **best)
        for step in range(3, 9):
            steps(step, step + 1, **objects)
            snapshot.keep(step + 1, **objects)
        rescue()
    return loaded


def test_two_calls_of_load_use_the_same_step_however_often_it_was_loaded(
    node: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two calls of load() must use the same step for the parameters and the optimizer."""
    found = [node.run(number, lambda: train_from_parts(("model",), ("optimizer",))) for number in range(5)]
    assert found == [(0, 0), (9, 9), (9, 9), (9, 9), (3, 3)]
    assert "step 9 was loaded before, and no step after it is known" in capfd.readouterr().err


def test_a_second_call_of_load_uses_the_folder_if_the_first_did(node: Node) -> None:
    """If the first load() used the folder, the second must use the folder, too, although memory has a newer step."""
    found = [node.run(number, lambda: train_from_parts(("model", "best"), ("optimizer",))) for number in range(2)]
    assert found == [(0, 0), (3, 3)]


def test_a_second_call_of_load_that_memory_cannot_serve_is_refused_once(node: Node) -> None:
    """A second load() must raise if its object is only in the folder, at an earlier step than the first object."""

    def refused() -> None:
        with pytest.raises(ddpjob.StateError, match=r"^best: .* than 9, at which model, optimizer was loaded"):
            train_from_parts(("model", "optimizer"), ("best",))

    def train() -> tuple[int, ...]:
        return train_from_parts(("model", "optimizer"), ("best",))

    assert node.run(0, train) == (0, 0)
    node.run(1, refused)
    assert node.run(2, train) == (3, 3)


def test_passing_a_state_again_after_load_does_not_reset_its_number_of_loads(node: Node) -> None:
    """A loaded state that is passed again must keep its number of loads, so that it is given up if it always fails."""

    def train() -> int:
        snapshot, objects = ddpjob.Snapshot("snapshots"), parts()
        step = snapshot.load(**objects)
        if not step:
            steps(0, 3, **objects)
            saved(snapshot, 3, **objects, best=0.5)
            step = 9
            for each in range(3, step):
                steps(each, each + 1, **objects)
                snapshot.keep(each + 1, **objects, best=0.5)
            rescue()
            return 0
        snapshot.keep(step, **objects, best=0.5)
        rescue()
        return step

    assert [node.run(number, train) for number in range(5)] == [0, 9, 9, 9, 3]


def test_a_script_that_loads_again_after_steps_returns_to_the_newest_state(
    node: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    """A script that calls load() again, for example after an infinite loss, must get its newest state."""

    def train() -> tuple[int, ...]:
        objects, snapshot, step = begin()
        steps(step, step + 4, **objects)
        saved(snapshot, step + 4, **objects)
        steps(step + 4, step + 6, **objects)
        back = snapshot.load(**objects)
        snapshot.keep(back, **objects)
        rescue()
        return step, back

    assert [node.run(number, train) for number in range(2)] == [(0, 4), (4, 8)]
    assert "name the same state" not in capfd.readouterr().err, "should_stop and keep count alike"


def test_a_script_that_loads_values_is_kept_from_the_first_save_on(node: Node) -> None:
    """Before the first save no state is kept if the script also saves plain values, which load() does not get."""

    def train() -> float:
        objects, snapshot, step = begin()
        best = float(snapshot.state.get("best", 9.0))
        steps(step, 6, **objects)
        rescue()
        return best

    assert node.run(0, train) == 9.0
    assert node.step is None


def test_memory_has_the_values_that_the_script_passed_last_and_the_log_says_so_once(
    node: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    """A plain value such as the best loss must be restored as the script passed it last, and the log say so once."""

    def train(until: int, *, steps_after: int = 0) -> Any:
        objects, snapshot, step = begin()
        best = snapshot.state.get("best")
        for each in range(step, until):
            steps(each, each + 1, **objects)
            snapshot.keep(each + 1, **objects, best=each + 1.5)
        steps(until, until + steps_after, **objects)
        rescue()
        return step, best

    assert node.run(0, lambda: train(8)) == (0, None)
    told = capfd.readouterr().err
    assert told.count("best: saved by value, so memory has it only until the next optimizer step; then") == 1
    assert node.step == 8
    assert node.run(1, lambda: train(12, steps_after=1)) == (8, 8.5)
    assert node.step != 13, "nobody has named what there is at step 13"


def test_a_call_of_progress_is_no_step_boundary(node: Node) -> None:
    """progress() must not count as the end of a step, because scripts may call it before they make the step."""

    def train() -> int:
        objects, snapshot = parts(), ddpjob.Snapshot("snapshots")
        step = began = snapshot.load(**objects)
        while step < 9:
            step += 1
            ddpjob.progress(step=step)
            make_step(objects["model"], objects["optimizer"])
            ddpjob.progress(step=step)
            settle()
            if step == 4 and not began:
                saved(snapshot, step, **objects)
        rescue()
        return began

    assert [node.run(number, train) for number in range(2)] == [0, 4]
    assert node.step is None


@pytest.mark.parametrize(("each", "left"), [(1, 9), (2, None)])
def test_a_rank_in_its_step_is_waited_for_if_it_passes_values_after_each_step(
    node: Node, each: int, left: int | None
) -> None:
    """A rank inside its optimizer step must complete the step before it writes, if the script passes plain values after
    each step. If it passes them only now and then, the rank must write nothing."""

    def train() -> None:
        objects, snapshot, _ = begin()
        for step in range(8):
            steps(step, step + 1, **objects)
            if (step + 1) % each == 0:
                snapshot.keep(step + 1, **objects, best=step + 1.5)
        survivor = threading.Thread(target=rescue)
        objects["optimizer"].register_step_pre_hook(lambda *_: survivor.start())
        steps(8, 9, **objects)
        if each == 2:
            survivor.join()
        snapshot.keep(9, **objects, best=9.5)
        survivor.join()

    node.run(0, train)
    assert node.step == left


@pytest.mark.parametrize("makes_it", [True, False])
@pytest.mark.parametrize("killed_at", [2 * 7, 2 * 6 + 1])
def test_a_rank_completes_the_step_that_a_killed_rank_of_its_node_had_summed(
    node: Node, makes_it: bool, killed_at: int
) -> None:
    """A rank must complete a step whose gradients were summed before another rank was killed, because it may be late by
    milliseconds. If it waits in vain, it must write the state that it has."""

    def train() -> None:
        objects, asked, ask = parts(), threading.Event(), memory.turn
        ddpjob.Snapshot("snapshots").load(**objects)
        steps(0, 6, **objects)
        killed = Shared(os.environ["DDPJOB_MEMORY"].rpartition(":")[0] + ":1", 1, 0).cells
        killed[memory.PID], killed[memory.CLOCK] = ended_process(), killed_at

        def asks(*clocks: Any) -> Any:
            asked.set()
            return ask(*clocks)

        memory.turn = asks
        if makes_it:
            memory.SECONDS_LEAST = 60.0  # longer than any delay on this machine
        survivor = threading.Thread(target=rescue)
        survivor.start()
        assert asked.wait(30)
        if makes_it:
            steps(6, 7, **objects)
        survivor.join()

    node.run(0, train)
    assert node.step == (7 if makes_it else 6)


def test_no_step_begins_after_the_state_was_written_because_all_ranks_are_stopped(node: Node) -> None:
    """After the state was written for a stop of all ranks, no rank may begin a step, which a restart would repeat."""

    def train() -> list[bool]:
        objects, cells = begin()[0], process.current.cells
        cells[heartbeat.FAILED] = 1
        steps(0, 2, **objects)  # memory does not have the state before each step
        cells[heartbeat.FAILED] = 0
        steps(2, 6, **objects)
        rescue()
        cells[heartbeat.FAILED] = 1
        stepped = threading.Event()
        objects["optimizer"].register_step_post_hook(lambda *_: stepped.set())
        thread = threading.Thread(target=make_step, kwargs=objects)
        thread.start()
        held = not stepped.wait(0.3)
        cells[heartbeat.FAILED] = 0
        thread.join()
        return [held, stepped.is_set()]

    assert node.run(0, train) == [True, True]
    assert node.step == 6


def ended_process() -> int:
    """Return the pid of a process that has ended."""
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    return child


def test_a_script_that_counts_differently_for_should_stop_and_save_resumes_from_the_folder(
    node: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    """If should_stop() counts steps from 0 and save() from 1, a restart must use the folder."""

    def train(*, saves: bool) -> int:
        objects, snapshot, made = begin()
        for index in range(made, made + 9):
            steps(index - 1, index, **objects)
            if saves and index == 4:
                saved(snapshot, index + 1, **objects)
        rescue()
        return made

    assert [node.run(0, lambda: train(saves=True)), node.run(1, lambda: train(saves=False))] == [0, 5]
    assert node.run(2, lambda: train(saves=False)) == 5, "it has not saved again, and counts as before"
    assert "should_stop(0) is called after step 1 was made" in capfd.readouterr().err


def test_memory_false_keeps_nothing_and_a_restart_uses_the_folder(node: Node) -> None:
    """With memory=False nothing is kept in memory, so users can return to a save before the loss became infinite."""

    def train() -> int:
        objects, snapshot = parts(), ddpjob.Snapshot("snapshots", memory=False)
        step = snapshot.load(**objects)
        steps(step, step + 6, **objects)
        saved(snapshot, step + 5, **objects)
        rescue()
        return step

    assert [node.run(generation, train) for generation in range(3)] == [0, 5, 10]
    assert node.step is None


def test_a_script_that_loads_values_only_after_a_resume_is_refused_once(
    node: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    """A script that reads plain values only after a resume must get an error once: memory lacks these values."""

    def train() -> int:
        objects, snapshot, step = begin()
        if step:
            with pytest.raises(ddpjob.StateError, match=r"best: the state in memory has only what load\(\) names"):
                snapshot.state.get("best", 9.0)
        else:
            steps(step, 6, **objects)
        rescue()
        return step

    assert [node.run(number, train) for number in range(3)] == [0, 6, 0]
    assert "step 6 was loaded before, and no step after it is known" in capfd.readouterr().err


def test_the_log_gives_the_reason_if_a_state_is_not_used_after_lost_steps(
    node: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    """If all ranks were lost after new steps, the log must say why the state is not used."""

    def train() -> int:
        ddpjob.init()
        objects, _snapshot, step = begin()
        steps(step, step + 6, **objects)
        if not step:
            rescue()
        return step

    assert [node.run(number, train, ranks=2) for number in range(3)] == [0, 6, 0]
    said = capfd.readouterr().err
    assert "step 6 in memory is not used: rank 0: steps were made after it, and all ranks were lost before" in said
    assert "no step after it is known" not in said


def test_after_an_out_of_memory_kill_the_next_pod_keeps_nothing_and_the_log_says_so(
    node: Node, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """After an out-of-memory kill no state is kept, because training may need that memory and would be killed again."""
    monkeypatch.setenv("DDPJOB_OUT_OF_MEMORY", "1")
    assert node.run(0, lambda: train_from_load(6)) == 0
    assert node.step is None
    said = capfd.readouterr().err
    assert "the state is not kept in memory: a pod of this job was killed because it used more memory than" in said
    assert "a restart goes on from the last save" in said
    monkeypatch.setenv("DDPJOB_OUT_OF_MEMORY", "0")
    assert node.run(1, lambda: train_from_load(7)) == 0
    assert node.run(2, lambda: train_from_load(8)) == 7


def test_a_saved_state_overwrites_one_assumed_by_another_rank_of_the_pod(node: Node) -> None:
    """A state that one rank passes to save() must overwrite a state that another rank has only from load()."""

    def train() -> Any:
        world = ddpjob.init()
        objects, snapshot, step = begin()
        if step:
            return step, "scheduler" in snapshot.state
        scheduler = torch.optim.lr_scheduler.StepLR(objects["optimizer"], 2, 0.5)
        steps(0, 3, **objects)
        if world.is_main:
            saved(snapshot, 3, **objects, scheduler=scheduler)
        steps(3, 9, **objects, before_boundary=scheduler.step)
        for first in (False, True):
            if world.is_main is first:
                rescue()
            torch.distributed.barrier()
        return step, False

    node.run(0, train, ranks=2)
    assert node.run(1, train, ranks=2) == (9, True)


def test_values_saved_by_one_rank_override_those_assumed_by_another(node: Node) -> None:
    """If only rank 0 passes plain values to save(), a restart must have rank 0's values."""

    def train() -> Any:
        world = ddpjob.init()
        objects, snapshot, step = begin()
        steps(step, 5, **objects)
        if world.is_main and not step:
            saved(snapshot, 5, **objects, best=0.5)
        steps(5, 6, **objects)
        if not world.is_main:
            rescue()
        return step, snapshot.state.get("best")

    assert node.run(0, train, ranks=2) == (0, None)
    assert node.step == 6
    assert node.run(1, train, ranks=2) == (5, 0.5)


def test_a_value_that_only_rank_0_saves_is_not_lost_with_its_node(
    run_ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """If the node of rank 0 is lost, only the folder has what rank 0 alone saves, so a restart must use the folder."""
    monkeypatch.chdir(tmp_path)
    node = Node(tmp_path, run_ranks, nodes=2)

    def train() -> Any:
        world = ddpjob.init()
        objects, snapshot = parts(torch.nn.LayerNorm), ddpjob.Snapshot("snapshots", world)
        if step := snapshot.load(**objects):
            return step, snapshot.state.get("history")
        steps(0, 5, **objects)
        saved(snapshot, 5, **objects, **({"history": [1]} if world.is_main else {}))
        steps(5, 7, **objects)
        if not world.is_main:
            rescue()
        return None

    node.run_all(0, train, ranks=2)
    node.lose(0)
    assert node.run(1, train, ranks=2) == (5, [1])
    assert "step 7 in memory is not used: rank 0: it has no history" in capfd.readouterr().err


# ---- no folder; two Snapshots ------------------------------------------------------------------------------


def test_without_a_folder_the_state_is_only_in_memory_and_the_log_says_so_once(
    node: Node, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """If a Snapshot has no folder, the log must say once that the state is only in memory."""

    def train(until: int) -> int:
        objects, snapshot, step = begin(None)
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
    assert {path.name for path in set(tmp_path.iterdir()) - before} <= {"meet-0-0", "meet-0-1"}


def saving(until: int, *, every: int, values: bool, marks: str = "", dies: int | None = None) -> Any:
    """Train to step `until` without a folder, with a save every few steps. Then one rank fails and the others write
    their state. Return the first step, its value, and a checksum of the final model.

    marks: steps at which the script calls should_stop(). dies: rank that fails right after its last save."""
    objects, snapshot = parts(torch.nn.LayerNorm), ddpjob.Snapshot()
    step = began = snapshot.load(**objects)
    back = snapshot.state.get("best") if began else None
    while step < until:
        step += 1
        objects["optimizer"].zero_grad()
        objects["model"](torch.full((4, 4), float(step)) + torch.randn(4, 4)).square().sum().backward()
        objects["optimizer"].step()
        if marks == "each step" or (marks == "what it saves" and step % every == 0):
            ddpjob.should_stop(step)
        if step % every == 0:
            snapshot.save(step, **objects, **({"best": step + 0.5} if values else {}))
        settle()
    torch.distributed.barrier()  # all ranks must come here before one dies
    if dies != int(os.environ["RANK"]):
        rescue()
    return began, back, packed.total(packed.tensors_of(objects["model"].state_dict()))


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
def test_without_a_folder_the_last_saved_state_is_in_memory(
    node: Node, values: bool, ranks: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """A script without a folder that saves once an epoch must restart from its last save, and not at step 0."""

    def run(generation: int, until: int) -> Any:
        return node.run(generation, lambda: saving(until, every=4, values=values), ranks=ranks)

    assert run(0, 4 + 2)[:2] == (0, None), "the first one counts already"
    assert node.step == 4
    assert (
        capfd.readouterr().err.count("what is saved is copied into memory, and a restart goes on from the last save()")
        == 1
    )
    assert run(1, 8 + 3)[:2] == (4, 4.5 if values else None)
    assert node.step == 8
    began, best, killed = run(2, 12)
    assert (began, best) == (8, 8.5 if values else None)
    (node.folder / "whole").mkdir()
    whole = Node(node.folder / "whole", node.run_ranks)
    assert killed == whole.run(0, lambda: saving(12, every=4, values=values), ranks=ranks)[2], "with the same bits"


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("dies", [0, 1])
def test_a_saved_state_counts_even_if_a_rank_dies_before_the_next_step(
    tmp_path: Path, run_ranks: Callable[[Callable[[int], Any], int], list[Any]], nodes: int, dies: int
) -> None:
    """A saved state must be used if a rank dies before the next step, also if this rank writes the copies."""
    node = Node(tmp_path, run_ranks, nodes=nodes)
    node.run(0, lambda: saving(20, every=4, values=True, dies=dies), ranks=2)
    if nodes == 2:
        node.lose(dies)
    assert node.run(1, lambda: saving(20, every=4, values=True), ranks=2)[:2] == (20, 20.5)


def test_failures_between_two_saves_do_not_use_up_the_saved_state(node: Node) -> None:
    """A saved state must not be given up after four failures if the script makes steps between them without a call of
    should_stop(). Only a state that is loaded repeatedly without a later step is given up."""
    began = [node.run(number, lambda: saving(9, every=6, values=True), ranks=2)[0] for number in range(6)]
    assert began == [0, 6, 6, 6, 6, 6]


def test_a_save_that_one_rank_has_not_reached_does_not_cause_a_start_at_step_0(node: Node) -> None:
    """A restart must use the last save, and not step 0, although one rank had not reached that save."""

    def train(until: int) -> Any:
        objects, snapshot = parts(), ddpjob.Snapshot()
        step = began = snapshot.load(**objects)
        is_lost = os.environ["RANK"] == "1" and until == 20
        while step < until - is_lost:
            step += 1
            make_step(objects["model"], objects["optimizer"])
            for best in (0.1, 0.2) if step in (4, 6, 8, 20) else ():
                snapshot.save(step, **objects, best=step + best)
        torch.distributed.barrier()
        if not is_lost:
            rescue()
        return began, snapshot.state.get("best") if began else None

    assert node.run(0, lambda: train(20), ranks=2) == (0, None)
    assert node.run(1, lambda: train(21), ranks=2) == (20, 20.2)


@pytest.mark.parametrize("folder", ["snapshots", None])
def test_buffers_of_another_step_are_not_used_for_a_lost_rank_0(node: Node, folder: str | None) -> None:
    """If rank 0 is lost, buffers that it wrote ten steps ago must not be combined with newer parameters."""

    def train(until: int) -> Any:
        objects, snapshot = parts(), ddpjob.Snapshot(folder)
        step = began = snapshot.load(**objects)
        batches = objects["model"][1].num_batches_tracked
        is_lost = os.environ["RANK"] == "0"
        while not began and step < until:
            step += 1
            objects["model"](torch.full((4, 4), float(step))).square().sum().backward()
            objects["optimizer"].step()
            if step % 10 == 0 and not (step == until and is_lost):
                snapshot.keep(step, **objects)
            settle()
        torch.distributed.barrier()
        if not is_lost:
            rescue()
        return began, int(batches)

    assert node.run(0, lambda: train(50), ranks=2) == (0, 50)
    assert node.run(1, lambda: train(50), ranks=2) == (50, 50)


@pytest.mark.parametrize("script", ["has an optimizer that seldom makes a step", "clips its weights after a save"])
def test_a_saved_state_counts_if_steps_or_weight_changes_happen_between_saves(node: Node, script: str) -> None:
    """A saved state must be used if one step lies between two saves, and if parameters change after a save."""

    def train(until: int) -> int:
        objects, snapshot = parts(), ddpjob.Snapshot()
        seldom = torch.optim.SGD([objects["model"][2].bias], lr=1e-3)
        objects |= {"seldom": seldom} if "seldom" in script else {}
        step = began = snapshot.load(**objects)
        while step < until:
            step += 1
            make_step(objects["model"], objects["optimizer"])
            if step % 5 == 0:
                snapshot.save(step, **objects)
                if "clips" in script:
                    with torch.no_grad():
                        objects["model"][0].weight.clamp_(-0.01, 0.01)
                else:
                    seldom.step()
        torch.distributed.barrier()
        rescue()
        return began

    assert node.run(0, lambda: train(17), ranks=2) == 0
    assert node.run(1, lambda: train(17), ranks=2) == 15


def test_the_first_of_two_states_with_the_same_number_is_kept_completely(node: Node) -> None:
    """If two states are saved with the same number, as by a script that counts epochs, memory keeps the first
    completely. Values of one state must not be combined with parameters of the other."""

    def train(until: int) -> Any:
        objects, snapshot = parts(), ddpjob.Snapshot()
        epoch = began = snapshot.load(**objects)
        sums = {"loaded": packed.total(packed.tensors_of(objects["model"].state_dict()))}
        best = snapshot.state.get("best") if began else None
        while epoch < until:
            epoch += 1
            for half in ("first", "second"):
                for _ in range(3):
                    make_step(objects["model"], objects["optimizer"])
                snapshot.save(epoch, **objects, best=half)
                sums[half] = packed.total(packed.tensors_of(objects["model"].state_dict()))
        torch.distributed.barrier()
        rescue()
        return began, best, sums

    for number, until in enumerate((2, 3, 5)):
        before = node.run(number, lambda until=until: train(until), ranks=2)[2]  # type: ignore[misc]
        began, best, sums = node.run(10 + number, lambda until=until: train(until), ranks=2)  # type: ignore[misc]
        assert (began, best, sums["loaded"]) == (until, "first", before["first"])


def test_a_state_saved_right_before_the_model_grows_is_kept(node: Node) -> None:
    """A restart must use the state that was saved right before the script adds layers to the model."""

    def train() -> None:
        objects, snapshot, _ = begin(None)
        for step in range(1, 10):
            make_step(objects["model"], objects["optimizer"])
            if step in (4, 8):
                snapshot.save(step, **objects)
            if step == 8:
                objects["optimizer"].add_param_group({"params": torch.nn.Linear(4, 4).parameters()})

    node.run(0, train, ranks=2)
    assert node.step == 8


@pytest.mark.parametrize("marks", ["each step", "what it saves"])
def test_a_script_that_marks_each_step_is_not_copied_at_its_saves(node: Node, marks: str) -> None:
    """A script that calls should_stop() or keep() at each step needs no copies, which cost memory and time."""
    for generation, until in enumerate((10, 15)):
        node.run(generation, lambda until=until: saving(until, every=4, values=False, marks=marks), ranks=2)  # type: ignore[misc]
        assert node.step == (until if marks == "each step" else until // 4 * 4)


def test_without_a_folder_and_an_agent_the_log_says_that_nothing_is_saved(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Without a folder and without ddprun's agent nothing is saved, and the log must say so."""
    process.replace()
    objects, snapshot = parts(), ddpjob.Snapshot()
    assert snapshot.load(**objects) == 0
    snapshot.save(1, **objects)
    assert capfd.readouterr().err.count("nothing is saved") == 1
    process.replace()


def test_a_snapshot_without_folder_and_memory_is_refused() -> None:
    """A Snapshot without a folder and without memory must be refused, because it would save nothing."""
    with pytest.raises(ddpjob.ConfigurationError, match="nothing would be saved"):
        ddpjob.Snapshot(memory=False)


def test_a_second_snapshot_that_only_writes_leaves_the_memory_to_the_one_that_loads(node: Node) -> None:
    """A second Snapshot that only saves, for example the best state, must not take the memory from the first one."""

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


def test_a_script_that_loads_from_two_snapshots_resumes_from_their_folders(
    node: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    """If a script loads from two Snapshots, both must load from their folders: memory has only one state."""

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


# ---- rare events, unusual scripts --------------------------------------------------------------------------


def train(until: int, before_rescue: Callable[[dict[str, Any]], object] = lambda _: None) -> int:
    """Train to step `until`, save at step 4, then write the state as after a failure. Return the first step."""
    objects, snapshot, step = begin()
    if step == 0:
        steps(0, 4, **objects)
        saved(snapshot, 4, **objects)
        step, began = 4, 0
    else:
        began = step
    steps(step, until, **objects)
    before_rescue(objects)
    rescue()
    return began


def test_a_model_grown_since_its_last_step_resumes_from_the_folder_and_the_log_says_so(
    node: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    """If a rank fails after the model has grown and before the next step, a restart must use the folder."""

    def grow(objects: dict[str, Any]) -> None:
        objects["model"].append(torch.nn.Linear(1, 100_000))

    assert node.run(0, lambda: train(6, grow)) == 0
    assert "the state is not written: the model has other parameters than before; a" in capfd.readouterr().err
    assert node.run(1, lambda: train(6)) == 4


def test_parameters_changed_after_the_boundary_do_not_count_as_those_of_the_step(
    node: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    """Parameters that the script changes after should_stop() must not be written as the state of that step."""

    def clip(objects: dict[str, Any]) -> None:
        with torch.no_grad():
            objects["model"][0].weight.clamp_(-0.01, 0.01)

    assert node.run(0, lambda: train(6, clip)) == 0
    assert "parameters changed after step 6, but not in optimizer.step()" in capfd.readouterr().err
    assert node.run(1, lambda: train(6)) == 4


def test_a_value_that_changed_before_save_is_not_taken_from_keep_alone(
    node: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    """If a value changes between keep() and save(), a state that only keep() got must not be used."""

    def train() -> None:
        objects, snapshot, step = begin()
        for each in range(step + 1, 9):
            make_step(**objects)
            snapshot.keep(each, **objects, average=each)
            settle()
            if each == 4:
                saved(snapshot, each, **objects, average=each + 0.5)
        rescue()

    node.run(0, train)
    assert node.step != 8
    assert "average: changed between should_stop(4) or keep(4, …) and save(4)" in capfd.readouterr().err


class Average:
    """An object of the script that changes at the end of an epoch."""

    def __init__(self) -> None:
        self.updates = 0

    def state_dict(self) -> dict[str, int]:
        return {"updates": self.updates}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.updates = state["updates"]


@pytest.mark.parametrize("is_updated", ["each step", "each epoch"])
def test_an_object_that_has_not_changed_yet_may_change_after_the_mark(node: Node, is_updated: str) -> None:
    """Memory must not be used with an object that has not changed yet: it may change after should_stop()."""

    def train() -> None:
        (objects, snapshot, step), average = begin(), Average()
        for each in range(step + 1, 9):
            make_step(**objects)
            average.updates += is_updated == "each step"
            ddpjob.should_stop(each)
            settle()
            if each == 4:
                saved(snapshot, each, **objects, average=average)
        rescue()

    node.run(0, train)
    assert (node.step == 8) is (is_updated == "each step")


def test_a_value_that_the_script_changes_in_place_after_keep_is_not_taken(node: Node) -> None:
    """A value that the script changes in place after keep() must not be used, because it is not what keep() got."""

    def train() -> None:
        objects, snapshot, step = begin()
        average = {"weight": torch.zeros(4)}
        for each in range(step + 1, 9):
            make_step(**objects)
            snapshot.keep(each, **objects, average=average)
            settle()
            average["weight"].add_(1)
        objects["model"](torch.ones(4, 4))
        rescue()

    node.run(0, train)
    assert node.step is None


def test_places_of_state_changes_in_a_script_are_known_after_a_restart_too(node: Node) -> None:
    """After a restart the library must still know where the script changes the learning rate, because otherwise a
    change is lost if a rank fails before the first save."""

    def train(until: int) -> int:
        objects, snapshot, step = begin()
        for each in range(step + 1, until + 1):
            make_step(**objects)
            ddpjob.should_stop(each)
            settle()
            objects["optimizer"].param_groups[0]["lr"] *= 0.9
            if each == 4:
                saved(snapshot, each, **objects)
        rescue()
        return step

    assert node.run(0, lambda: train(5)) == 0
    assert node.run(1, lambda: train(9)) == 4
    assert node.step != 9


@pytest.mark.parametrize("marks", ["should_stop", "keep"])
@pytest.mark.parametrize("evaluates", ["not at all", "by random numbers", "in training mode", "by F.batch_norm"])
def test_changes_by_an_evaluation_after_the_mark_are_not_lost(node: Node, marks: str, evaluates: str) -> None:
    """If an evaluation after should_stop() draws random numbers or changes averages, memory must not be used."""

    def train() -> None:
        objects, snapshot, step = begin()
        for each in range(step + 1, 9):
            objects["model"](torch.arange(16.0).view(4, 4)).square().sum().backward()
            objects["optimizer"].step()
            if marks == "keep":
                snapshot.keep(each, **objects)
            else:
                ddpjob.should_stop(each)
            settle()
        if evaluates == "by random numbers":
            torch.rand(1)
        if evaluates == "in training mode":
            with torch.no_grad():
                objects["model"](torch.ones(4, 4))
        if evaluates == "by F.batch_norm":  # no version counter shows that its statistics change
            norm = objects["model"][1]
            torch.nn.functional.batch_norm(torch.ones(4, 8), norm.running_mean, norm.running_var, training=True)
        rescue()

    node.run(0, train)
    assert (node.step == 8) is (evaluates == "not at all")


@pytest.mark.parametrize("evaluates", ["not at all", "from a loader", "with gradients"])
def test_a_restart_repeats_the_seed_of_the_next_epoch_and_not_that_of_an_evaluation(node: Node, evaluates: str) -> None:
    """A restart must repeat the seed of the next epoch's DataLoader. After an evaluation memory must not be used."""

    def train() -> None:
        objects, snapshot, step = begin()
        sampler = ddpjob.GlobalBatchSampler(16, 4, 7)
        loader = torch.utils.data.DataLoader(range(16), batch_sampler=sampler)
        for epoch in range(3):
            for batches, _ in enumerate(loader, start=1):
                if (epoch, batches) == (2, 1):
                    rescue()
                    return
                make_step(**objects)
                step += 1
                snapshot.keep(step, **objects, sampler=sampler.state_dict(epoch=epoch, batches=batches))
                settle()
            if evaluates == "from a loader" and epoch == 1:
                list(torch.utils.data.DataLoader(range(4)))
            if evaluates == "with gradients" and epoch == 1:
                objects["model"](torch.ones(4, 4))

    node.run(0, train)
    assert (node.step == 8) is (evaluates == "not at all")


@pytest.mark.parametrize("marks", ["should_stop", "keep"])
def test_a_sampler_that_ends_an_epoch_before_its_save_is_trusted_in_the_next_epoch(node: Node, marks: str) -> None:
    """A sampler that ends an epoch before save() must not seem to change before each save()."""

    def train() -> None:
        objects, sampler, step = parts(), ddpjob.GlobalBatchSampler(16, 4, 7), 0
        snapshot = ddpjob.Snapshot("snapshots")
        snapshot.load(**objects, sampler=sampler)
        for epoch in range(3):
            for _ in sampler.epoch(epoch):
                if step == 10:
                    rescue()
                    return
                make_step(**objects)
                step += 1
                if marks == "keep":
                    snapshot.keep(step, **objects, sampler=sampler)
                else:
                    ddpjob.should_stop(step)
                settle()
            saved(snapshot, step, **objects, sampler=sampler)

    node.run(0, train)
    assert node.step == 10


@pytest.mark.parametrize("more", [1, 2])
def test_no_step_of_an_epoch_is_kept_whose_sampler_is_not_saved(node: Node, more: int) -> None:
    """A restart would begin the epoch again after the first of its steps. The first batches would train twice."""

    def train(until: int) -> Any:
        objects, snapshot = parts(torch.nn.LayerNorm), ddpjob.Snapshot("snapshots")
        first = step = snapshot.load(model=objects["model"])
        sampler = ddpjob.GlobalBatchSampler(16, 4, 7)
        for epoch in range(step // 4, 3):
            for _ in sampler.epoch(epoch):
                objects["optimizer"].zero_grad()
                objects["model"](torch.ones(4, 4)).sum().backward()
                if step == until:
                    rescue()
                    return first
                objects["optimizer"].step()
                step += 1
                ddpjob.should_stop(step)
                settle()
            saved(snapshot, step, **objects)
        return first

    node.run(0, lambda: train(7))  # proves that only optimizers change the parameters
    assert [node.run(number, lambda: train(8 + more)) for number in (1, 2)] == [4, 8]


@pytest.mark.parametrize(
    ("by", "each", "kept"), [("should_stop", 4, 32), ("should_stop", 3, None), ("keep", 3, None), ("save", 3, None)]
)
def test_a_step_that_ends_while_gradients_wait_for_the_optimizer_is_not_kept(
    node: Node, capfd: pytest.CaptureFixture[str], by: str, each: int, kept: int | None
) -> None:
    """A script may count micro-batches as steps. A restart within an accumulation would lose its first gradients."""

    def train() -> None:
        objects, snapshot, _ = begin()
        model, optimizer = objects["model"], objects["optimizer"]
        mark = {"should_stop": lambda step, **_: ddpjob.should_stop(step)}.get(by) or getattr(snapshot, by)
        for step in range(1, 34):
            model(torch.randn(4, 4)).square().sum().backward()
            if step % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
            if step % each == 0:
                mark(step, **objects)
                settle()
        rescue()

    node.run(0, train)
    assert node.step == kept
    assert capfd.readouterr().err.count("gradients wait for optimizer.step() at the end of step") == (kept is None)


@pytest.mark.parametrize("place", ["at the top", "after the mark"])
def test_a_restart_does_not_repeat_a_rate_change_made_before_the_next_batch(
    node: Node, capfd: pytest.CaptureFixture[str], place: str
) -> None:
    """If a learning rate changes between should_stop() and the next batch, memory is not used and the log says why. A
    rate that is set at the top of the loop gets no warning, because a restart sets it again.
    """

    def train() -> None:
        objects, sampler = parts(), ddpjob.GlobalBatchSampler(64, 4, 7)
        rate = objects["optimizer"].param_groups[0]
        ddpjob.Snapshot("snapshots").load(**objects, sampler=sampler)
        for step, _ in enumerate(sampler.epoch(0), start=1):
            if place == "at the top":
                rate["lr"] = 0.01 / step
            if step == 8:
                rescue()
                break
            make_step(**objects)
            ddpjob.should_stop(step)
            settle()
            if place == "after the mark":
                rate["lr"] *= 0.9

    node.run(0, train)
    assert (node.step == 7) is (place == "at the top")
    assert ("changed between" in capfd.readouterr().err) is (place == "after the mark")


@pytest.mark.parametrize("how", ["copied into", "put in place"])
def test_averaged_weights_swapped_in_for_evaluation_do_not_count_as_those_of_the_step(node: Node, how: str) -> None:
    """If a script swaps averaged weights into the model for an evaluation, and a rank fails there, the other ranks must
    not write the averages as the state. No version counter shows a swap through `.data`."""

    def swap(objects: dict[str, Any]) -> None:
        for parameter in objects["model"].parameters():
            average = parameter.detach() * 0.9
            if how == "copied into":
                parameter.data.copy_(average)
            else:
                parameter.data = average

    assert node.run(0, lambda: train(6, swap)) == 0
    assert node.run(1, lambda: train(6)) == 4


def test_moments_changed_through_data_do_not_count_as_those_of_the_step(node: Node) -> None:
    """Optimizer state that the script changes through `.data` after should_stop() must not be written as the state of
    that step. No version counter shows such a change."""

    def damp(objects: dict[str, Any]) -> None:
        for state in objects["optimizer"].state.values():
            state["exp_avg"].data.mul_(0.1)

    assert node.run(0, lambda: train(6, damp)) == 0
    assert node.run(1, lambda: train(6)) == 4


@pytest.mark.parametrize("layers", [1, 4, 30])
def test_a_change_through_data_of_any_parameter_is_seen(layers: int) -> None:
    """An average that is updated through `.data` moves no version counter, so the values must be sampled."""
    model = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(layers)])
    optimizer = torch.optim.SGD(model.parameters())
    watch = ChangeWatch({"optimizer": optimizer}, {}, [*model.parameters()])
    watch.record()
    assert not watch.changed()
    unseen = []
    for number, parameter in enumerate(model.parameters()):
        before = parameter.data
        parameter.data = before + 1
        unseen += [] if watch.changed() else [number]
        parameter.data = before
    assert len(unseen) <= max(0, 2 * layers - SAMPLES)


@pytest.mark.parametrize("frozen", [10, 400])
def test_the_samples_have_trained_parameters_if_most_are_frozen(frozen: int) -> None:
    """If only the last layer of a large model is trained, the samples must show its steps: ranks compare them to see if
    they are at the same step. Frozen parameters are sampled, too, because a script may change them itself."""
    model = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(frozen)]).requires_grad_(False)
    head = torch.nn.Linear(2, 2)
    watch = ChangeWatch(
        {"optimizer": torch.optim.SGD(head.parameters())}, {}, [*model.parameters(), *head.parameters()]
    )
    watch.record()
    for parameters in (head.parameters(), model.parameters()):
        before = watch.sampled
        with torch.no_grad():
            for parameter in parameters:
                parameter.add_(1)
        watch.record()
        assert watch.sampled != before


@pytest.mark.parametrize("where", ["in a list", "in a dict", "of no parameter"])
def test_optimizer_state_within_other_values_is_seen_to_change(where: str) -> None:
    """A hook of a forward pass may add to statistics that an optimizer has in a list. Then a state that is written
    within a step would have half of the next step."""
    parameter, statistics = torch.nn.Parameter(torch.zeros(2)), torch.zeros(2)
    optimizer = torch.optim.SGD([parameter])
    inner = {"statistics": statistics} if where == "in a dict" else [statistics]
    optimizer.state[parameter if where.startswith("in") else "all"] = {"inner": inner}
    watch = ChangeWatch({"optimizer": optimizer}, {}, [parameter])
    watch.record()
    before = watch.total()
    assert not watch.changed()
    statistics.add_(1)
    assert watch.changed() == "optimizer"
    assert watch.total() != before


@pytest.mark.parametrize(
    ("first", "by_value", "back"), [(1, {}, "="), (6, {}, "="), (6, {"loss": 0.1}, "="), (6, {}, "copy_")]
)
def test_weights_that_are_perturbed_within_a_step_are_never_those_of_a_step(
    node: Node, first: int, by_value: dict[str, float], back: str
) -> None:
    """Adversarial training perturbs a few rows of an embedding for a second backward pass and puts them back before
    optimizer.step(). If a rank fails in between, the others must not write the perturbed rows. No version counter and
    no sample of the weights shows them."""

    def of_state() -> dict[str, Any]:
        torch.manual_seed(1)
        model = torch.nn.Embedding(100, 64)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    def attack() -> list[torch.Tensor]:
        objects, weights = of_state(), []
        model, optimizer = objects["model"], objects["optimizer"]
        snapshot = ddpjob.Snapshot("snapshots")
        snapshot.load(**objects)
        for step in range(1, 9):
            optimizer.zero_grad()
            model(torch.tensor([50])).square().sum().backward()
            if step >= first:
                before = model.weight.data.clone()
                model.weight.data.add_(model.weight.grad)
                model(torch.tensor([50])).square().sum().backward()
                if step == 8:
                    rescue()
                if back == "=":
                    model.weight.data = before
                else:
                    model.weight.data.copy_(before)
            optimizer.step()
            weights.append(model.weight.detach().clone())
            snapshot.keep(step, **objects, **by_value)
            settle()
        return weights

    def load() -> tuple[int, torch.Tensor]:
        objects = of_state()
        return ddpjob.Snapshot("snapshots").load(**objects), objects["model"].weight.detach()

    weights = node.run(0, attack)
    step, found = node.run(1, load)
    assert step == 0 or torch.equal(found, weights[step - 1])


def test_a_large_buffer_that_changes_through_data_is_named_and_nothing_is_kept(
    node: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of a large buffer only the beginning is compared. No version counter shows a change of its end through `.data`,
    so a rank that is killed within a step could get back an older buffer."""

    def train() -> None:
        objects = parts()
        objects["model"].register_buffer("queue", torch.zeros(8192))
        ddpjob.Snapshot("snapshots").load(**objects)
        for step in range(6):
            steps(step, step + 1, **objects)
            objects["model"].queue.data[-1] += 1
        rescue()

    node.run(0, train)
    assert node.step is None
    assert "not kept in memory: buffers of model: queue is changed through .data" in capfd.readouterr().err


def test_a_state_is_written_while_the_next_optimizer_step_waits_for_it(node: Node) -> None:
    """A survivor and the training thread need the same lock. A step that has to wait has changed nothing yet."""

    class RescueFirst:
        """Lock that a survivor gets before the training thread."""

        def __init__(self, now: Any) -> None:
            self.now, self.lock, now.lock = now, now.lock, self

        def __enter__(self) -> None:
            self.now.lock = self.lock
            rescue()
            self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()

    def train() -> None:
        objects, _, _ = begin()
        steps(0, 6, **objects)
        RescueFirst(process.current.keeper.now)
        make_step(**objects)

    node.run(0, train)
    assert node.step == 6


@pytest.mark.parametrize("length", [8192, 1 << 17])
def test_a_large_buffer_of_one_repeated_value_is_kept(node: Node, length: int) -> None:
    """Such a buffer has more values than its memory. Reading beyond that memory would find changes by others."""

    def train() -> None:
        objects, memory = parts(), torch.zeros(1 << 18)
        objects["model"].register_buffer("mask", memory[:1].expand(length))
        ddpjob.Snapshot("snapshots").load(**objects)
        for step in range(6):
            steps(step, step + 1, **objects)
            memory.data[1:] += 1
        rescue()

    node.run(0, train)
    assert node.step == 6


@pytest.mark.parametrize("what", ["a copy of the model", "a layer without parameters"])
def test_a_module_that_the_script_has_replaced_is_not_kept_in_its_old_state(node: Node, what: str) -> None:
    """If a script replaces averaged weights, or a layer that has only buffers, a restart must not use the old ones."""

    def replace() -> None:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8, affine=False), torch.nn.Linear(8, 1))
        optimizer, average = torch.optim.Adam(model.parameters()), copy.deepcopy(model)
        snapshot = ddpjob.Snapshot("snapshots")
        snapshot.load(model=model, optimizer=optimizer, average=average)
        steps(0, 6, model, optimizer)
        saved(snapshot, 6, model=model, optimizer=optimizer, average=average)
        if what == "a copy of the model":
            average = copy.deepcopy(model)
        else:
            model[1] = torch.nn.BatchNorm1d(8, affine=False)
        steps(6, 7, model, optimizer)
        model(torch.ones(4, 4))  # the next step has begun
        rescue()

    node.run(0, replace)
    assert node.step is None


def test_an_average_that_is_replaced_before_the_first_step_does_not_end_the_training(
    node: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    """A script may replace an average right after it has loaded it. Then nothing is kept, but the training goes on."""

    def train() -> int:
        objects, snapshot = parts(), ddpjob.Snapshot("snapshots")
        average = copy.deepcopy(objects["model"])
        step = snapshot.load(**objects, average=average)
        average = copy.deepcopy(objects["model"])
        steps(step, 6, **objects)
        saved(snapshot, 6, **objects, average=average)
        return step

    assert node.run(0, train) == 0
    assert node.run(1, train) == 6
    assert "average: the script has replaced the object that it passed to save()" in capfd.readouterr().err


def test_a_state_in_memory_overrides_one_saved_by_another_job(node: Node, tmp_path: Path) -> None:
    """A state in memory must be preferred to a folder of another job, although that job was at attempt 7."""
    assert node.run(0, lambda: train(4)) == 0
    node.lose(0)
    (tmp_path / "snapshots" / "writer-000001.json").write_text('{"job": "uid-0", "attempt": 7}')
    assert node.run(1, lambda: train(10)) == 4
    assert node.run(2, lambda: train(11)) == 10


def test_a_state_of_an_earlier_leader_is_older_whatever_its_generation(node: Node, tmp_path: Path) -> None:
    """A node of an earlier leader must not bring its steps back: those of the later leader's group would be lost."""

    def save_step_6() -> int:
        objects, snapshot, step = begin()
        steps(step, 6, **objects)
        saved(snapshot, 6, **objects)
        return step

    assert [node.run(generation, lambda: train(9)) for generation in (0, 1)] == [0, 9]
    assert node.run(2, lambda: train(10)) == 9
    assert Node(tmp_path, node.run_ranks).run(0, save_step_6, term=1) == 4
    assert node.run(3, lambda: train(12), term=1) == 6


def test_a_rank_of_an_earlier_generation_writes_nothing(node: Node) -> None:
    """A process of an earlier generation that is still running must not overwrite the state of the new ranks."""

    def live_on() -> None:
        objects, _, _ = begin()
        steps(0, 6, **objects)
        torch.distributed.barrier()
        Shared(os.environ["DDPJOB_MEMORY"], 1, 0).node[memory.GENERATION] = 1
        steps(6, 7, **objects)
        rescue()

    node.run(0, live_on, ranks=2)
    assert node.step is None


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_with_different_models_do_not_load_the_state_of_another_and_the_log_says_so(
    node: Node, capfd: pytest.CaptureFixture[str], first: int
) -> None:
    """If each rank trains its own model, no rank may load the state of another rank, and the log must say so."""

    def train_own() -> int:
        world, step = ddpjob.init(), 0
        objects, snapshot = parts(), ddpjob.Snapshot(world=world)
        with torch.no_grad():
            objects["model"][0].weight += world.rank
        if os.environ["DDPJOB_GENERATION"] == "1":
            return snapshot.load(**objects)
        for turn in range(2):
            if (world.rank == first) is (turn == 0):
                snapshot.load(**objects)
                steps(0, 6, **objects)
            torch.distributed.barrier()
        if world.is_main:
            rescue()
        return step

    assert [node.run(number, train_own, ranks=2) for number in range(2)] == [0, 0]
    said = capfd.readouterr().err
    assert "the state in memory is not used: rank 1 did not hold the same parameters as the others" in said


def test_the_log_gives_the_reason_if_nobody_wrote_a_state_before_a_restart(
    node: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    """If all ranks that could write the state were killed, the log must say that no rank has left it."""

    def train(*, saves: bool) -> int:
        objects, snapshot, step = begin()
        steps(step, step + 5, **objects)
        if saves:
            saved(snapshot, step + 5, **objects)
        steps(step + 5, step + 6, **objects)
        return step

    found = [node.run(0, lambda: train(saves=False), ranks=2)]
    assert "step 0" not in capfd.readouterr().err, "it is the first start"
    found.append(node.run(1, lambda: train(saves=True), ranks=2))
    said = capfd.readouterr().err
    assert "no rank has left the state of step 6 in memory" in said
    assert "begins at step 0: there is no state in snapshots" in said
    found.append(node.run(2, lambda: train(saves=True), ranks=2))
    said = capfd.readouterr().err
    assert "no rank has left the state of step 6 in memory" in said
    assert "resumed at step 5 from snapshots" in said
    assert "begins at" not in said
    assert found == [0, 0, 5]


def test_a_state_with_a_changed_bit_in_memory_is_not_used_and_the_log_says_so(
    node: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    """If a bit of the state in memory has changed, as by faulty memory, the state must not be used."""

    def flip(_: Any) -> None:
        rescue()
        shared = Shared(os.environ["DDPJOB_MEMORY"], 1, 0)
        held = shared.held()
        assert held is not None
        for area in range(memory.AREAS):
            shared.mapped(area)[held.size - 1] ^= 1

    assert node.run(0, lambda: train(6, flip)) == 0
    assert node.step == 6
    assert node.run(1, lambda: train(7)) == 4
    said = capfd.readouterr().err
    assert "step 6 in memory is not used: rank 0: its checksum differs from the one that was written" in said


def test_an_optimizer_that_steps_within_backward_is_never_kept_in_the_middle_of_a_step(node: Node) -> None:
    """If optimizers step within the backward pass, no state is kept while only some parameters have stepped."""

    def train_so(dies_within: bool) -> int:
        model = parts()["model"]
        own = {f"optimizer {n}": torch.optim.SGD([p], lr=0.1) for n, p in enumerate(model.parameters())}
        step = began = ddpjob.Snapshot("snapshots").load(model=model, **own)

        def update(parameter: Any, optimizer: Any) -> None:
            optimizer.step()
            optimizer.zero_grad()
            if dies_within and step == 6 and parameter is next(iter(model[1].parameters())):
                rescue()

        for parameter, optimizer in zip(model.parameters(), own.values(), strict=True):
            parameter.register_post_accumulate_grad_hook(lambda p, o=optimizer: update(p, o))
        while step < 7:
            model(torch.randn(4, 4)).square().sum().backward()
            step += 1
            ddpjob.should_stop(step)
            settle()
        rescue()
        return began

    assert node.run(0, lambda: train_so(dies_within=True)) == 0
    assert node.step is None
    assert node.run(1, lambda: train_so(dies_within=False)) == 0
    assert node.step == 7


def test_a_grad_scaler_is_restored_with_the_step(node: Node) -> None:
    """A GradScaler must be restored from memory, because with its initial scale it would skip the next steps."""

    def train_scaled(until: int) -> Any:
        objects, scaler = parts(), torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        step = ddpjob.Snapshot("snapshots").load(**objects, scaler=scaler)
        began = step, float(scaler.get_scale())
        for number in range(step + 1, until + 1):
            objects["optimizer"].zero_grad()
            scaler.scale(objects["model"](torch.randn(4, 4)).square().sum()).backward()
            scaler.step(objects["optimizer"])
            scaler.update()
            ddpjob.should_stop(number)
            settle()
        rescue()
        return began

    assert node.run(0, lambda: train_scaled(6)) == (0, 8.0)
    assert node.run(1, lambda: train_scaled(7)) == (6, 64.0)


def test_a_full_folder_ends_the_rank_and_the_step_is_kept_in_memory(node: Node) -> None:
    """If a full folder ends a rank, the state of its last step must stay in memory."""

    def train_full(until: int) -> int:
        objects, snapshot, step = begin()
        steps(step, until, **objects)

        def full(_: int) -> None:
            raise OSError(28, "No space left on device")

        os.fsync = full
        snapshot.save(until, **objects)
        with pytest.raises(ddpjob.SnapshotError, match="No space left"):
            snapshot.close()
        rescue()
        return step

    assert [node.run(0, lambda: train_full(6)), node.run(1, lambda: train_full(7))] == [0, 6]


@pytest.mark.parametrize("more", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_training_that_resumed_from_memory_has_its_last_state_in_the_folder_at_its_end(
    node: Node, more: int, ranks: int
) -> None:
    """A training that resumed from memory must write its last state to the folder, also if it made no step."""

    def train(until: int) -> Any:
        objects, _snapshot, step = begin()
        steps(step, until, **objects)
        if step == 0:
            rescue()
            os.environ["RANK"] == "0" and os.system("rm -r snapshots")
        return step, packed.total(packed.tensors_of(objects["model"].state_dict()))

    assert node.run(0, lambda: train(6), ranks=ranks)[0] == 0
    step, total = node.run(1, lambda: train(6 + more), ranks=ranks, ends=True)
    assert step == 6
    for number in range(2):
        node.lose(0)
        assert node.run(2 + number, lambda: train(0), ranks=ranks) == (6 + more, total)


@pytest.mark.parametrize("more", [0, 1])
def test_the_folder_gets_the_state_in_memory_without_what_was_drawn_later(node: Node, more: int) -> None:
    """After a resume from memory, wait() writes the loaded state to the folder, or that of the last keep(). Sampler and
    random states must belong to it, although a DataLoader has drawn its seed and read ahead by then."""

    def train(until: int) -> Any:
        objects = {**parts(), "sampler": ddpjob.GlobalBatchSampler(40, global_batch=4, seed=1)}
        snapshot = ddpjob.Snapshot("snapshots")
        step = snapshot.load(**objects)
        for number in range(step + 1, until + 1):
            make_step(objects["model"], objects["optimizer"])
            snapshot.keep(number, **objects)
            settle()
        if step == 0:
            rescue()
            return step
        batches = iter(objects["sampler"])
        drawn = next(batches), next(batches), torch.rand(1).item()
        snapshot.wait()
        return step, drawn

    assert node.run(0, lambda: train(6)) == 0
    step, drawn = node.run(1, lambda: train(6 + more))
    assert step == 6
    node.lose(0)
    assert node.run(2, lambda: train(0)) == (6 + more, drawn)


def test_a_training_that_cannot_write_a_state_known_only_to_memory_fails(node: Node, end_ranks: Any) -> None:
    def train(until: int) -> int:
        objects, _snapshot, step = begin()
        steps(step, until, **objects)
        if step == 0:
            rescue()
        else:
            os.fsync = _full
        return step

    assert node.run(0, lambda: train(6)) == 0
    node.run_ranks = lambda body, ranks: [outcome.error for outcome in end_ranks(body, ranks)]
    assert "the state of step 6 was not saved: disk full" in node.run(1, lambda: train(6), ends=True)


@pytest.mark.parametrize("is_written", [False, True])
def test_a_script_without_step_numbers_fails_if_a_state_known_only_to_memory_is_lost(
    node: Node, end_ranks: Any, is_written: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """If a script resumes from a state that only memory has, trains on and saves nothing, it must fail. Otherwise the
    job succeeds with a snapshot that is older than its restart."""

    def train() -> int:
        objects, snapshot, step = begin()
        steps(step, 6, **objects)
        if is_written:
            snapshot.save(6, **objects)
            snapshot.close()
        rescue()
        return step

    def go_on() -> None:
        objects, _snapshot, _ = begin()
        for _ in range(2):
            make_step(**objects)

    assert node.run(0, train) == 0
    node.run_ranks = lambda body, ranks: [outcome.exit_code for outcome in end_ranks(body, ranks)]
    assert node.run(1, go_on, ends=True) == (0 if is_written else 1)
    why = "the steps after 6 were not saved, and the state of step 6, from which they went on, was only in memory, in "
    assert (f"{why}snapshots; there is no snapshot; save the last" in capfd.readouterr().err) == (not is_written)


@pytest.mark.parametrize("way", ["keep", "save"])
def test_a_script_with_its_own_step_numbers_ends_with_its_last_state_in_the_folder(node: Node, way: str) -> None:
    def train(until: int) -> int:
        objects, snapshot = parts(), ddpjob.Snapshot("snapshots")
        step = begun = snapshot.load(**objects)
        while step < until:
            make_step(**objects)
            step += 1
            if way == "keep" or begun == 0:
                snapshot.keep(step, value=step, **objects)
                settle()
        if begun == 0:
            rescue()
        elif way == "save":
            snapshot.save(step, value=step, **objects)
        return begun

    assert [node.run(0, lambda: train(6)), node.run(1, lambda: train(8), ends=True)] == [0, 6]
    node.lose(0)
    assert node.run(2, lambda: train(8)) == 8


@pytest.mark.parametrize("save_failed", ["", "the state of step 6 was not saved: disk full"])
def test_a_stop_whose_save_failed_leaves_the_state_in_memory(node: Node, save_failed: str, end_ranks: Any) -> None:
    """If ranks are stopped, as when a node is drained, and the last save fails, the state must be in memory."""

    def train() -> None:
        objects, _snapshot, step = begin()
        steps(step, 6, **objects)
        process.current.save_failed, process.current.stopped_at = save_failed, 6

    node.run_ranks = lambda body, ranks: [outcome.exit_code for outcome in end_ranks(body, ranks)]
    assert node.run(0, train) == 75
    assert node.step == (6 if save_failed else None)


def test_a_folder_that_accepts_no_claim_does_not_lose_the_state_in_memory(
    node: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    """If a full disk prevents the creation of a claim file, the next generation must load the state from memory."""

    def train(until: int) -> tuple[int, str]:
        objects, snapshot = parts(), ddpjob.Snapshot("snapshots")
        write = writers.write_new
        if os.environ["DDPJOB_GENERATION"] == "1":
            writers.write_new = _full
        step = snapshot.load(**objects)
        why = process.current.save_failed
        writers.write_new = write
        steps(step, until, **objects)
        if step == 0:
            rescue()
        else:
            snapshot.save(until, **objects)
            snapshot.close()
        return step, why

    assert node.run(0, lambda: train(6)) == (0, "")
    step, why = node.run(1, lambda: train(8))
    assert step == 6
    assert why.startswith("the state of step 6 is only in memory: disk full")
    node.lose(0)
    assert node.run(2, lambda: train(9))[0] == 8


def _full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def test_ranks_of_a_lost_node_draw_new_numbers_the_same_at_each_resume_and_the_log_says_so(
    nodes: Node, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ranks of a lost node get new seeds, the same at each resume, and the log must say so, because the result differs.
    Here the state is sent to the new node in pieces, and the last piece is shorter."""
    monkeypatch.setattr(gather, "PIECE_BYTES", 100)

    def train_both(until: int) -> Any:
        world = ddpjob.init()
        objects, snapshot, step = begin()
        if not step:
            torch.manual_seed(10 + world.rank)
        drawn = float(torch.rand(()))
        model = world.wrap(objects["model"])
        steps(step, until, model, objects["optimizer"])
        if not step:
            snapshot.keep(until, **objects)
        rescue()
        if step:  # the job's log ends with a line that has `resumed_from`
            assert "random states of rank 1 were lost" in process.current.resumed_from
        return step, drawn

    nodes.run(0, lambda: train_both(6), ranks=2)
    nodes.lose(1)
    (step, kept), (_, seeded) = nodes.run_all(1, lambda: train_both(6), ranks=2)
    assert step == 6
    assert kept != seeded
    said = "from the memory on the node of rank 0 (random states of rank 1 were lost, and are seeded"
    assert said in capfd.readouterr().err
    nodes.lose(1)
    assert nodes.run_all(2, lambda: train_both(6), ranks=2)[1] == (6, seeded)


@pytest.mark.parametrize("each", [1, 4])
def test_a_rank_that_dies_within_a_step_keeps_its_random_states_however_steps_are_counted(
    node: Node, each: int
) -> None:
    """A rank that dies within a step must keep its random states, also if the script counts micro-batches."""

    def train() -> Any:
        world = ddpjob.init()
        objects, _snapshot, step = begin()
        if step:
            return step, float(torch.rand(()))
        torch.manual_seed(10 + world.rank)
        model = world.wrap(objects["model"])
        for step in range(each, 9 * each, each):
            model(torch.randn(4, 4)).square().sum().backward()
            objects["optimizer"].step()
            if step == 8 * each and world.rank == 1:
                break
            ddpjob.should_stop(step)
            settle()
        else:
            rescue()
        return step, float(torch.rand(()))

    found = [node.run_all(generation, train, ranks=2) for generation in range(2)]
    assert found[0] == found[1]


class Branches(torch.nn.Module):
    """A model that uses one of two layers, another one in each forward pass."""

    def __init__(self, uses: int) -> None:
        super().__init__()
        self.layers, self.uses = torch.nn.ModuleList(torch.nn.Linear(4, 1) for _ in range(2)), uses

    def forward(self, x: torch.Tensor) -> Any:
        self.uses = 1 - self.uses
        return self.layers[self.uses](x + torch.randn(4))


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("last", [0, 1])
def test_a_rank_that_dies_within_a_step_keeps_its_random_states_whichever_layer_it_uses_last(
    node: Node, micro_batches: int, last: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Random states are written when a gradient arrives. A parameter that the step does not use gets none, so the rank
    must not wait for the gradient of one chosen parameter."""

    def train() -> Any:
        world = ddpjob.init()
        torch.manual_seed(1)
        objects: dict[str, Any] = {"model": Branches(last)}  # an even number of passes follows
        objects["optimizer"] = torch.optim.SGD(objects["model"].parameters(), lr=0.1)
        if step := ddpjob.Snapshot("snapshots", world).load(**objects):
            return step, float(torch.rand(()))
        torch.manual_seed(10 + world.rank)
        model = world.wrap(objects["model"], find_unused_parameters=True)
        for step in range(1, 9):
            for micro_batch in range(1, micro_batches + 1):
                with contextlib.nullcontext() if micro_batch == micro_batches else model.no_sync():
                    model(torch.ones(1, 4)).sum().backward()
            if step == 8 and world.rank == 1:
                break
            objects["optimizer"].step()
            ddpjob.should_stop(step)
            settle()
        else:
            rescue()
        return step, float(torch.rand(()))

    found = [node.run_all(generation, train, ranks=2) for generation in range(2)]
    assert found[0] == found[1]
    assert "random numbers are drawn after the gradients" not in capfd.readouterr().err


def test_a_rank_that_dies_before_it_has_written_its_random_states_does_not_get_others_silently(
    node: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    """A script may sum gradients by itself, so that no gradient hook runs before the optimizer's step. A rank that is
    killed in between has not written its random states."""

    def train() -> int:
        world = ddpjob.init()
        objects, _snapshot, began = begin()
        parameters = list(objects["model"].parameters())
        for step in range(began + 1, 1 if began else 9):
            loss = objects["model"](torch.randn(4, 4)).square().sum()
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                torch.distributed.all_reduce(gradient)
                parameter.grad = gradient
            if step == 8 and world.rank == 1:
                break
            objects["optimizer"].step()
            ddpjob.should_stop(step)
            settle()
        else:
            rescue()
        return began

    assert node.run_all(0, train, ranks=2) == [0, 0]
    assert node.step == 8
    assert node.run_all(1, train, ranks=2) == [0, 0]
    assert (
        "rank 1: this rank has not written its random states of this step: it was lost before" in capfd.readouterr().err
    )


@pytest.mark.parametrize("who", [[1], [0, 1]])
@pytest.mark.parametrize("place", ["node", "nodes"])
def test_random_states_given_up_by_one_rank_alone_are_not_replaced_silently(
    place: str, who: list[int], request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    """If rank 1 draws random numbers after its gradients, its random states are lost with it. Only rank 0 logs this, so
    if rank 0 draws none, a restart must not use the state, also if rank 1's node does not have it."""
    node: Node = request.getfixturevalue(place)

    def train() -> int:
        world = ddpjob.init()
        objects, snapshot, began = begin()
        model = world.wrap(objects["model"])
        for step in range(began + 1, 1 if began else 9):
            model(torch.randn(4, 4)).square().sum().backward()
            if step == 8 and world.rank == 1:
                break
            if step == 3 and world.rank in who:
                torch.rand(())
            objects["optimizer"].step()
            ddpjob.should_stop(step)
            settle()
            if step == 2:
                saved(snapshot, step, **objects)
        else:
            rescue()
        return began

    assert node.run_all(0, train, ranks=2) == [0, 0]
    is_named = 0 in who
    assert ("random numbers are drawn after the gradients" in capfd.readouterr().err) is is_named
    assert node.run_all(1, train, ranks=2) == [8 if is_named else 2] * 2


@pytest.mark.parametrize(("what", "keeps"), [("random numbers", False), ("random numbers", True), ("buffers", False)])
def test_a_first_change_after_the_gradients_is_not_lost_with_a_rank_that_dies_before_it(
    node: Node, what: str, keeps: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """A rank may be killed between its backward pass and the first noise that the script ever draws there. The others
    complete the step. A restart must not use their state with random states from before the noise."""

    def train() -> None:
        world = ddpjob.init()
        objects, snapshot, _ = begin()
        model = world.wrap(objects["model"])
        for step in range(1, 9):
            model(torch.randn(4, 4)).square().sum().backward()
            if step == 8:
                if world.rank == 1:
                    return
                if what == "buffers":
                    objects["model"][1].running_mean.add_(1)
                else:
                    torch.rand(())
            objects["optimizer"].step()
            ddpjob.should_stop(step)
            if keeps:
                snapshot.keep(step, **objects)
            settle()
        rescue()

    node.run_all(0, train, ranks=2)
    assert node.run_all(1, lambda: begin()[2], ranks=2) == [0, 0]
    assert f"{what} changed after the gradients of step 8" in capfd.readouterr().err


def test_a_rank_that_dies_repeatedly_while_loading_keeps_its_random_states_and_buffers(
    node: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    """A rank that dies repeatedly while it loads must keep its random states and buffers."""

    def fail(*_: Any) -> None:
        raise InterruptedError

    def train() -> Any:
        world, generation = ddpjob.init(), int(os.environ["DDPJOB_GENERATION"])
        objects, snapshot = parts(), ddpjob.Snapshot("snapshots", world)
        if generation in (1, 2) and world.rank == 0:  # rank 0's buffers are saved with the model
            objects["optimizer"].register_load_state_dict_pre_hook(fail)
        try:
            step = snapshot.load(**objects)
        except InterruptedError:
            return None
        if not step:
            torch.manual_seed(10 + world.rank)
            model = world.wrap(objects["model"], broadcast_buffers=False)
            steps(0, 1, model, objects["optimizer"])
            snapshot.keep(1, **objects)
            steps(1, 8, model, objects["optimizer"])
        buffers = [float(value.sum()) for value in objects["model"].buffers()]
        rescue()
        return node.step, buffers, float(torch.rand(()))

    first, *loading, last = (node.run_all(generation, train, ranks=2) for generation in range(4))
    assert first[0][0] == 8
    assert first[0][1] != first[1][1]
    assert [rank_0 for rank_0, _ in loading] == [None, None]
    assert [last[rank][2] for rank in range(2)] == [first[rank][2] for rank in range(2)], capfd.readouterr().err
    assert [last[rank][1] for rank in range(2)] == [first[rank][1] for rank in range(2)], "each has its own buffers"


def test_a_rank_that_dies_within_a_step_keeps_the_buffers_of_all_its_micro_batches(node: Node) -> None:
    """A rank that dies within a step must keep BatchNorm's averages of all micro-batches of the step."""

    def train() -> Any:
        world = ddpjob.init()
        objects, snapshot = parts(), ddpjob.Snapshot("snapshots", world)
        began = step = snapshot.load(**objects)
        model = objects["model"] if began else world.wrap(objects["model"])
        for step in range(began + 1, 9):
            for micro_batch in range(3):
                model(torch.eye(4) * (step + micro_batch + world.rank)).square().sum().backward()
            objects["optimizer"].step()
            if step == 8 and world.rank == 0:
                break
            ddpjob.should_stop(step)
            settle()
        else:
            rescue()
        return began or step, [value.tolist() for value in objects["model"].buffers()]

    before, after = (node.run_all(generation, train, ranks=2) for generation in range(2))
    assert after == before


@pytest.mark.parametrize("each_has_its_own", [True, False])
def test_a_rank_that_dies_within_a_step_does_not_get_the_averaged_buffers_of_another(
    node: Node, each_has_its_own: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """A killed rank must not get another rank's averaged buffers: they differ by rank, and only the folder has all."""

    def train() -> Any:
        world = ddpjob.init()
        objects, snapshot = parts(), ddpjob.Snapshot("snapshots", world)
        average = torch.optim.swa_utils.AveragedModel(objects["model"], use_buffers=True)
        began = step = snapshot.load(**objects, average=average)
        model = world.wrap(objects["model"])
        for step in range(began + 1, 1 if began else 9):
            model(torch.eye(4) * (step + world.rank * each_has_its_own)).square().sum().backward()
            objects["optimizer"].step()
            average.update_parameters(objects["model"])
            if step == 8 and world.rank == 1:
                break
            ddpjob.should_stop(step)
            settle()
            if step == 4:
                saved(snapshot, step, **objects, average=average)
        else:
            rescue()
        return began, [value.tolist() for value in average.module.buffers()]

    before, after = (node.run_all(generation, train, ranks=2) for generation in range(2))
    assert (before[0][1] != before[1][1]) is each_has_its_own
    if each_has_its_own:
        assert (
            "running_mean of average: each rank may have its own, and that of rank 1 is lost" in capfd.readouterr().err
        )
    assert [step for step, _ in after] == [4 if each_has_its_own else 8] * 2


@pytest.mark.parametrize("has_statistics", [True, False])
def test_ranks_of_a_lost_node_do_not_get_buffers_that_may_differ_by_rank(
    nodes: Node, has_statistics: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nobody knows the buffers of a lost node. If they change outside of DistributedDataParallel, they may differ by
    rank, so ranks must not get another rank's. The number of updates of an average is the same on all ranks."""

    def train() -> int:
        world = ddpjob.init()
        objects, snapshot = parts(), ddpjob.Snapshot("snapshots", world)
        if not has_statistics:
            del objects["model"][1]
        average = torch.optim.swa_utils.AveragedModel(objects["model"], use_buffers=True)
        began = snapshot.load(**objects, average=average)
        model = world.wrap(objects["model"])
        for step in range(began + 1, 1 if began else 9):
            model(torch.eye(4) * (step + world.rank)).square().sum().backward()
            objects["optimizer"].step()
            average.update_parameters(objects["model"])
            ddpjob.should_stop(step)
            settle()
            if step == 4:
                saved(snapshot, step, **objects, average=average)
        rescue()
        return began

    nodes.run_all(0, train, ranks=2)
    nodes.lose(1)
    assert nodes.run_all(1, train, ranks=2) == [4 if has_statistics else 8] * 2
    assert (": each rank may have its own, and that of rank 1 is lost" in capfd.readouterr().err) is has_statistics


@pytest.mark.parametrize("is_lost", [True, False])
def test_random_states_that_a_rank_has_not_written_are_lost_only_with_its_node(nodes: Node, is_lost: bool) -> None:
    """A rank that is killed before its first keep() of a generation has not written its random states. If its node
    lives, the restart must use the folder, which has them. Random numbers of a lost node are lost anyway."""

    def train(until: int) -> int:
        world = ddpjob.init()
        objects, snapshot, began = begin()
        model = world.wrap(objects["model"])
        for step in range(began + 1, until + 1):
            make_step(model, objects["optimizer"])
            if step == 9 and world.rank == 1:
                return began
            snapshot.keep(step, **objects, best=0.5)
            settle()
            if step == 4:
                saved(snapshot, step, **objects, best=0.5)
        rescue()
        return began

    assert nodes.run_all(0, lambda: train(8), ranks=2) == [0, 0]
    assert nodes.run_all(1, lambda: train(9), ranks=2) == [8, 8]
    assert nodes.step == 9
    if is_lost:
        nodes.lose(1)
    assert nodes.run_all(2, lambda: train(0), ranks=2) == [9 if is_lost else 4] * 2


def test_a_node_that_takes_part_again_has_lost_no_random_states_of_the_steps_without_it(nodes: Node) -> None:
    """A node that was cut off keeps its memory, and may later take the place of another one that is lost."""

    def train(until: int) -> int:
        world = ddpjob.init()
        objects, snapshot, began = begin()
        model = world.wrap(objects["model"])
        for step in range(began + 1, until + 1):
            make_step(model, objects["optimizer"])
            snapshot.keep(step, **objects)
            settle()
            if step == 4:
                saved(snapshot, step, **objects)
        rescue()
        return began

    assert nodes.run_all(0, lambda: train(8), ranks=2) == [0, 0]
    cut_off = nodes.lose(1)
    assert nodes.run_all(1, lambda: train(12), ranks=2) == [8, 8]
    nodes.lose(1, cut_off)
    assert nodes.run_all(2, lambda: train(0), ranks=2) == [12, 12]


@pytest.mark.parametrize("evaluates", ["once", "a part", "before each step"])
@pytest.mark.parametrize("ends", ["killed", "by an error"])
def test_what_an_evaluation_leads_to_is_not_lost_with_the_only_rank_that_evaluates(
    node: Node, ends: str, evaluates: str
) -> None:
    """Rank 0 may be the only one that evaluates: it may draw random numbers, and halve its learning rate afterwards. If
    it is lost within the evaluation, also of a part of the model, memory must not be used, although the other ranks
    have a complete state. A forward pass without gradients before each step, as of a teacher, is no evaluation."""

    def train() -> int:
        world = ddpjob.init()
        objects, snapshot, began = begin()
        model = world.wrap(objects["model"])
        for step in range(began + 1, 1 if began else 10):
            if (evaluates == "before each step" or step == 9) and world.rank == 0:
                evaluated = objects["model"][0] if evaluates == "a part" else objects["model"]
                with torch.no_grad():
                    evaluated.eval()(torch.ones(4, 4))
                objects["model"].train()
            if step == 9:
                break
            model(torch.eye(4)).square().sum().backward()
            objects["optimizer"].step()
            ddpjob.should_stop(step)
            settle()
            if step == 4:
                saved(snapshot, step, **objects)
        if world.rank == 1 or ends == "by an error":
            process.current.keeper.now.places.has_called |= world.rank == 1  # its next step has begun
            rescue()
        return began

    node.run_all(0, train, ranks=2)
    assert node.step == 8
    assert node.run_all(1, train, ranks=2) == [8 if evaluates == "before each step" else 4] * 2


def test_a_kept_model_can_be_pickled_and_scripted_between_two_steps(node: Node) -> None:
    """A script may export its model during training. The file must not need this library, and torch.jit.script refuses
    models with hooks."""

    def train() -> bytes:
        objects, _snapshot, _ = begin()
        steps(0, 20, **objects)  # calls without DistributedDataParallel are searched for in the first 16 steps
        torch.jit.script(objects["model"])
        rescue()
        return pickle.dumps(objects["model"])

    assert b"ddpjob" not in node.run(0, train)
    assert node.step == 20


@pytest.mark.parametrize(
    ("trains", "values"), [(True, {}), (False, {}), (True, {"counter": {"steps": 3}}), (True, {"counter": 3})]
)
def test_a_sampler_that_is_not_saved_prevents_memory_only_if_its_batches_are_trained(
    node: Node, trains: bool, values: dict[str, Any]
) -> None:
    """A restart within an epoch would train its first batches again. A sampler of an evaluation does no harm. A value
    of the script need not be a position."""

    def train() -> None:
        objects, snapshot, _ = begin()
        sampler = ddpjob.GlobalBatchSampler(64, global_batch=8, seed=1)
        if trains:
            for step, _batch in enumerate(sampler.epoch(0), start=1):
                make_step(**objects)
                snapshot.keep(step, **objects, **values)
                settle()
        for step in range(1, 9) if not trains else ():
            make_step(**objects)
            ddpjob.should_stop(step)
            settle()
            if step % 3 == 0:
                list(sampler.epoch(step))
        objects["model"](torch.ones(4, 4))  # the next step has begun
        rescue()

    node.run(0, train)
    assert (node.step == 8) is not trains


def test_a_rank_that_gives_up_the_agreement_on_a_step_leaves_its_state_in_memory(node: Node) -> None:
    """If a rank is lost while all are told to stop, the others cannot agree, and no agent asks for their state."""

    def train() -> None:
        objects, _snapshot, _ = begin()
        steps(0, 20, **objects)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(os, "_exit", lambda _: None)
            process.current.agreement._give_up()

    node.run(0, train, ends=False)
    assert node.step == 20


class Metric:
    """An object of the script that knows no position."""

    def state_dict(self) -> dict[str, float]:
        return {"best": 0.5}

    def load_state_dict(self, _state: dict[str, float]) -> None:
        pass


@pytest.mark.parametrize("more", [{}, {"shard": 3}])
def test_a_sampler_in_a_value_of_the_script_is_saved(node: Node, more: dict[str, int]) -> None:
    def train() -> None:
        objects, snapshot, _ = begin()
        sampler = ddpjob.GlobalBatchSampler(64, global_batch=8, seed=1)
        for step, _batch in enumerate(sampler.epoch(0), start=1):
            make_step(**objects)
            snapshot.keep(step, **objects, trainer={"data": [sampler.state_dict() | more]})
            settle()
        rescue()

    node.run(0, train)
    assert node.step == 8


@pytest.mark.parametrize(
    "saves", ["at the end of an epoch", "within an epoch", "with its own position", "its own object", "not loaded"]
)
def test_a_script_with_a_plain_data_loader_is_kept_once_it_has_saved_within_an_epoch(node: Node, saves: str) -> None:
    """If a script saves only at the ends of epochs, it begins an epoch again after a restart. From a state within the
    epoch it would train batches twice."""

    def train() -> str:
        objects, snapshot = (parts(), ddpjob.Snapshot("snapshots")) if saves == "not loaded" else begin()[:2]
        if saves == "not loaded":
            snapshot.load()
        loader = torch.utils.data.DataLoader(torch.arange(8))
        more = {"position": 1} if saves == "with its own position" else {}
        own = {"metric": Metric()} if saves == "its own object" else {}
        step = 0
        for _epoch in range(2):
            for _batch in loader:
                if step == 12:
                    break
                make_step(**objects)
                step += 1
                ddpjob.should_stop(step)
                settle()
                if more:
                    snapshot.keep(step, **objects, **more)
                if step == 4 and saves == "within an epoch":
                    saved(snapshot, step, **objects)
            if step == 8:
                saved(snapshot, step, **objects, **more, **own)
        objects["model"](torch.ones(4, 4))  # the next step has begun
        rescue()
        return process.current.not_kept

    why, is_kept = node.run(0, train), saves in ("within an epoch", "with its own position")
    assert (node.step == 12) is is_kept
    assert why.startswith("a DataLoader provides the batches") is not is_kept


def test_a_scheduler_that_is_replaced_before_the_first_save_does_not_end_the_training(node: Node) -> None:
    def train() -> None:
        objects = parts()
        scheduler = torch.optim.lr_scheduler.StepLR(objects["optimizer"], 5)
        ddpjob.Snapshot("snapshots").load(**objects, scheduler=scheduler)
        for step in range(1, 6):
            make_step(**objects)
            if step == 2:
                scheduler = torch.optim.lr_scheduler.StepLR(objects["optimizer"], 5)
            ddpjob.should_stop(step)
            scheduler.step()

    node.run(0, train)


@pytest.mark.parametrize("steps_made", [0, 1])
def test_a_new_node_keeps_the_state_as_soon_as_it_has_loaded_it(steps_made: int, nodes: Node) -> None:
    """A new node must keep the state as soon as it has loaded it, because the other node may be lost soon, too."""

    def train(until: int, survivor: int) -> int:
        world = ddpjob.init()
        objects, snapshot = parts(), ddpjob.Snapshot(world=world)
        began = step = snapshot.load(**objects)
        settle()
        model = world.wrap(objects["model"])
        if not began:
            step = 1
            steps(0, step, model, objects["optimizer"])
            snapshot.keep(step, **objects)
        steps(step, until, model, objects["optimizer"])
        if world.rank == survivor:
            rescue()
        return began

    began = [nodes.run_all(0, lambda: train(8, survivor=0), ranks=2)]
    nodes.lose(1)
    began.append(nodes.run_all(1, lambda: train(8 + steps_made, survivor=1), ranks=2))
    nodes.lose(0)
    began.append(nodes.run_all(2, lambda: train(12, survivor=1), ranks=2))
    assert began == [[0, 0], [8, 8], [8 + steps_made] * 2]
