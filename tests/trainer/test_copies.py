"""Periodic copies of the state in memory are used if no rank can write its state after a failure. A rank that is killed
in these tests ends without writing."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_node import Node, begin, parts, rescue, saved, settle, steps

import ddpjob
from ddpjob import process
from ddpjob_core import copies


@pytest.fixture
def node(node: Node, monkeypatch: pytest.MonkeyPatch) -> Node:
    """Return a node where copies cost nothing, so that each step is copied."""
    monkeypatch.setattr(copies, "COST_MAX", 1e9)
    return node


@pytest.fixture
def nodes(nodes: Node, monkeypatch: pytest.MonkeyPatch) -> Node:
    """Return two nodes where copies cost nothing, so that each step is copied."""
    monkeypatch.setattr(copies, "COST_MAX", 1e9)
    return nodes


def clip(model: Any) -> None:
    """Change weights outside of the optimizer, as some scripts do."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.05, 0.05)


def digest(model: Any) -> str:
    return hashlib.sha256(b"".join(value.detach().numpy().tobytes() for value in model.parameters())).hexdigest()


def clipped(until: int, place: str, *, ranks: int = 1, saves: tuple[int, ...] = (2,), keeps: bool = False) -> Any:
    """Clip weights at this place of each step; save at these steps. keeps: call keep() instead of should_stop(). Return
    first step and hash of parameters."""
    world = ddpjob.init()
    objects, snapshot = parts(), ddpjob.Snapshot("snapshots", world)
    step = began = snapshot.load(**objects)
    model = world.wrap(objects["model"]) if ranks > 1 else objects["model"]
    while step < until:
        if place == "first":
            clip(model)
        objects["optimizer"].zero_grad()
        model(torch.full((4, 4), float(step + 1)) + torch.randn(4, 4)).square().sum().backward()
        objects["optimizer"].step()
        step += 1
        if keeps:
            snapshot.keep(step, **objects)
        else:
            ddpjob.should_stop(step)
        settle()
        if place == "before save":
            clip(model)
        if step in saves:
            saved(snapshot, step, **objects)
    return began, digest(model)


def test_a_single_killed_rank_resumes_from_the_last_copy(node: Node, capfd: pytest.CaptureFixture[str]) -> None:
    """A single rank that is killed must resume from the last copy, because no other rank can write its state."""

    def train(until: int) -> int:
        objects, _, step = begin()
        steps(step, until, **objects)
        return step

    assert node.run(0, lambda: train(20)) == 0
    assert node.run(1, lambda: train(30)) == 19
    said = capfd.readouterr().err
    assert "the state is copied at each step, because there is no other rank that could write it" in said
    assert "resumed at step 19 from a copy in the memory on the node of rank 0" in said
    assert node.run(2, lambda: train(31)) == 29


def test_a_single_rank_that_ends_with_an_exception_repeats_no_step(node: Node) -> None:
    """A single rank that ends with an exception must still write its state, which is newer than the last copy."""

    def train(until: int) -> int:
        objects, _, step = begin()
        steps(step, until, **objects)
        rescue()
        return step

    assert [node.run(0, lambda: train(20)), node.run(1, lambda: train(30)), node.run(2, lambda: train(31))] == [
        0,
        20,
        30,
    ]


def test_weights_clipped_before_each_forward_are_copied_and_the_result_is_bitwise_equal(node, capfd):
    """If a script changes its weights before each forward pass, only a copy can keep its state in memory."""
    _, undisturbed = node.run(0, lambda: clipped(24, "first", saves=()))
    node.lose(0)
    Path("snapshots").rename("others")
    assert node.run(0, lambda: clipped(16, "first"))[0] == 0
    assert node.run(1, lambda: clipped(24, "first")) == (15, undisturbed)
    said = capfd.readouterr().err
    assert "parameters or optimizer state changed between step" in said
    assert (
        "the state is copied at each step, because parameters or optimizer state change between the end of a step"
        in said
    )


def test_weights_clipped_between_should_stop_and_save_are_copied_as_save_sees_them(node: Node) -> None:
    """A copy must have the weights that save() finds, because the next step begins with these clipped weights."""
    _, undisturbed = node.run(0, lambda: clipped(24, "before save", saves=()))
    node.lose(0)
    Path("snapshots").rename("others")
    assert node.run(0, lambda: clipped(20, "before save", saves=(2, 12, 16)))[0] == 0
    assert node.run(1, lambda: clipped(24, "before save")) == (16, undisturbed)


def test_weights_clipped_between_keep_and_save_are_copied_as_save_sees_them(node: Node) -> None:
    """Before the first save() a copy of keep() is not used, because save() may be called after a change; after the save
    only copies of save() are, also in the next generation, before its first save."""
    _, undisturbed = node.run(0, lambda: clipped(24, "before save", saves=(), keeps=True))
    assert node.step is None
    node.lose(0)
    Path("snapshots").rename("others")
    assert node.run(0, lambda: clipped(20, "before save", saves=(8, 12), keeps=True))[0] == 0
    assert node.run(1, lambda: clipped(24, "before save", saves=(), keeps=True)) == (12, undisturbed)
    assert node.run(2, lambda: clipped(24, "before save", saves=(), keeps=True)) == (12, undisturbed)


def test_weights_clipped_before_each_forward_are_copied_at_keep_once_a_save_has_the_same(node: Node) -> None:
    _, undisturbed = node.run(0, lambda: clipped(24, "first", saves=(), keeps=True))
    node.lose(0)
    Path("snapshots").rename("others")
    assert node.run(0, lambda: clipped(16, "first", keeps=True))[0] == 0
    assert node.run(1, lambda: clipped(24, "first", keeps=True)) == (15, undisturbed)


def test_copies_at_saved_steps_count_however_many_steps_follow(node: Node, capfd: pytest.CaptureFixture[str]) -> None:
    assert node.run(0, lambda: clipped(30, "before save", saves=(2, 12)))[0] == 0
    assert node.run(1, lambda: clipped(32, "before save"))[0] == 12
    assert "resumed at step 12 from a copy in the memory on the node of rank 0" in capfd.readouterr().err


def test_a_script_that_changes_its_weights_before_its_first_save_is_not_copied(node: Node) -> None:
    """Before the first save no copy is made: it is unknown if a step begins before or after the script's change."""
    assert node.run(0, lambda: clipped(16, "first", saves=()))[0] == 0
    assert node.step is None


def test_ranks_that_change_their_weights_copy_at_the_same_steps_with_all_random_states(node, capfd):
    """All ranks must copy at the same step, because each random state must belong to the copied parameters."""
    _, undisturbed = node.run(0, lambda: clipped(24, "first", ranks=2, saves=()), ranks=2)
    node.lose(0)
    Path("snapshots").rename("others")
    assert node.run(0, lambda: clipped(18, "first", ranks=2), ranks=2)[0] == 0
    assert node.run(1, lambda: clipped(24, "first", ranks=2), ranks=2) == (17, undisturbed)
    said = capfd.readouterr().err
    assert "the state is copied at each step, because parameters or optimizer state change" in said
    assert "seeded" not in said


@pytest.mark.parametrize("place", ["node", "nodes"])
def test_a_copy_that_lacks_the_random_states_of_a_living_rank_is_not_used(place: str, request, capfd) -> None:
    """A rank that marks fewer steps than rank 0 has no random states of the others, so a copy of them must not be used:
    the rank would silently draw other numbers."""
    node = request.getfixturevalue(place)

    def train(until: int) -> int:
        world = ddpjob.init()
        objects, snapshot = parts(), ddpjob.Snapshot("snapshots", world)
        began = snapshot.load(**objects)
        model = world.wrap(objects["model"])
        for step in range(began + 1, until):
            clip(model)
            objects["optimizer"].zero_grad()
            model(torch.randn(4, 4)).square().sum().backward()
            objects["optimizer"].step()
            if world.rank == 0 or step % 8 == 0:
                ddpjob.should_stop(step)
            settle()
            if step % 8 == 0:
                saved(snapshot, step, **objects)
        return began

    assert node.run_all(0, lambda: train(22), ranks=2) == [0, 0]
    assert node.step == 20
    assert node.run_all(1, lambda: train(0), ranks=2) == [16, 16]
    assert "does not call should_stop(), keep() or save() after each step" in capfd.readouterr().err


def test_facts_about_the_script_learned_by_a_survivor_apply_to_ranks_of_all_nodes(nodes):
    """If one survivor has learned that the script clips weights, ranks of all nodes must copy after a restart."""

    def train(until: int, saves: tuple[int, ...] = ()) -> int:
        world = ddpjob.init()
        objects, snapshot, began = begin()
        model = world.wrap(objects["model"])  # keeps the ranks at the same step
        for step in range(began + 1, until + 1):
            if step > 8:  # the script clips only after the first eight steps
                clip(objects["model"])
            steps(step - 1, step, model, objects["optimizer"])
            if step in saves:
                saved(snapshot, step, **objects)
        clip(objects["model"])
        if world.rank == 1:
            rescue()
        return began

    assert nodes.run(0, lambda: train(12, saves=(2,)), ranks=2) == 0
    assert nodes.run(1, lambda: train(30, saves=(4,)), ranks=2) == 2
    assert nodes.run(2, lambda: train(30), ranks=2) == 29


def saved_otherwise(until: int, who_saves: str) -> int:
    """Save at steps 2 and 40; at 40, clip weights after should_stop() and before save(). Return the loaded step."""
    world = ddpjob.init()
    objects, snapshot, began = begin()
    model = world.wrap(objects["model"])
    for step in range(began + 1, until + 1):
        clip(model)
        steps(step - 1, step, model, objects["optimizer"])
        if step == 40:
            clip(model)
        if step in (2, 40) and (world.rank == 0 or who_saves == "all ranks"):
            saved(snapshot, step, **objects)
    return began


@pytest.mark.parametrize(("who_saves", "until"), [("all ranks", 43), ("rank 0", 46)])
def test_once_save_sees_other_weights_than_should_stop_no_copy_is_made_at_should_stop(nodes, who_saves, until):
    assert nodes.run(0, lambda: saved_otherwise(18, who_saves), ranks=2) == 0
    assert nodes.run(1, lambda: saved_otherwise(until, who_saves), ranks=2) == 17, "copies at should_stop"
    assert nodes.run(2, lambda: saved_otherwise(until, who_saves), ranks=2) == 40


def test_facts_that_rank_0_learned_about_save_survive_a_restart(nodes):
    """After a restart no rank may copy at should_stop() if rank 0 has found other weights at save() before."""
    assert nodes.run(0, lambda: saved_otherwise(18, "rank 0"), ranks=2) == 0
    assert nodes.run(1, lambda: saved_otherwise(41, "rank 0"), ranks=2) == 17
    assert nodes.run(2, lambda: saved_otherwise(70, "rank 0"), ranks=2) == 40
    assert nodes.run(3, lambda: saved_otherwise(70, "rank 0"), ranks=2) == 40


def test_copies_that_do_not_fit_are_reported_with_the_reason(node, monkeypatch, capfd):
    """If two copies exceed the container's memory limit, none is made, and the log must give the reason."""
    from ddpjob import limits

    monkeypatch.setattr(
        limits, "shortage", lambda size, with_later: limits.Shortage(f"{size} bytes are too many", size)
    )

    def train() -> Any:
        clipped(16, "first")
        return process.current.not_kept

    assert "two copies of 0 MiB have no room" in node.run(0, train)
    assert "the state is not kept in memory: two copies of" in capfd.readouterr().err
    assert node.step is None


def test_a_single_rank_without_room_for_copies_reports_it_in_the_status(node, monkeypatch):
    """If copies exceed the memory limit, the job's status must show that a killed rank loses steps."""
    from ddpjob import limits

    with_copies: list[bool] = []

    def shortage(size: int, *, with_later: int) -> limits.Shortage | None:
        if not with_later:
            return limits.Shortage("the limit is too small", size)
        with_copies.append(with_later == 2 * size)
        return None

    monkeypatch.setattr(limits, "shortage", shortage)

    def train() -> Any:
        objects, _, _ = begin()
        steps(0, 12, **objects)
        rescue()
        return process.current.not_kept, with_copies

    said, looked = node.run(0, train)
    assert said.startswith("two copies of 0 MiB have no room: the limit is too small; a rank that ends by an exception")
    assert looked == [True], "the limit that is named for the first area has room for the second one"
    assert node.step == 12, "one that ends by an exception leaves its state"
