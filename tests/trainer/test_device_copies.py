"""Copies of a state on a fake device, which makes each copy as late as allowed. If a step does not wait for a copy, the
copy gets the values after that step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from last_moment import LastMoment
from memory_node import Node, begin, make_step, parts, rescue, saved, settle

import ddpjob
from ddpjob import process
from ddpjob.checkpoint.in_memory.by_cadence import streams
from ddpjob.checkpoint.in_memory.by_cadence.device_copies import would_go_on
from ddpjob.checkpoint.state import packed
from ddpjob.group.join import end_without_abort
from ddpjob_core import copies


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LastMoment:
    device = LastMoment()
    monkeypatch.setattr(streams, "for_device", lambda _: device)
    return device


@pytest.fixture
def node(node: Node, monkeypatch: pytest.MonkeyPatch, device: LastMoment) -> Node:
    """Return a node where copies cost nothing, so that every fourth step is copied."""
    monkeypatch.setattr(copies, "COST_MAX", 1e9)
    return node


def train(until: int, *, ranks: int = 1, save_at: int = 0, clips: bool = False, fails: bool = False) -> Any:
    """Train to this step; return the first step, and the final values of the model."""
    world = ddpjob.init()
    objects, snapshot = parts(), ddpjob.Snapshot("snapshots", world)
    step = began = snapshot.load(**objects)
    model = world.wrap(objects["model"]) if ranks > 1 else objects["model"]
    while step < until:
        if clips:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.clamp_(-0.05, 0.05)
        objects["optimizer"].zero_grad()
        model(torch.full((4, 4), float(step + 1)) + torch.randn(4, 4)).square().sum().backward()
        objects["optimizer"].step()
        step += 1
        ddpjob.should_stop(step)
        settle()
        if step == save_at:
            saved(snapshot, step, **objects)
    if fails:
        rescue()
    return began, [value.tolist() for value in objects["model"].state_dict().values()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_state_on_a_device_is_restored_bitwise_from_the_last_copy(node, ranks, capfd):
    """A copy from a device must have parameters, buffers, optimizer state and random states of the same step."""
    _, undisturbed = node.run(0, lambda: train(60, ranks=ranks), ranks=ranks)
    node.lose(0)
    assert node.run(0, lambda: train(30, ranks=ranks, fails=True), ranks=ranks)[0] == 0
    began, _ = node.run(1, lambda: train(50, ranks=ranks), ranks=ranks)
    assert began in (20, 24), "that of step 28 is under way when the training ends, and does not count"
    began, bits = node.run(2, lambda: train(60, ranks=ranks), ranks=ranks)
    assert (began in (40, 44), bits) == (True, undisturbed)
    said = capfd.readouterr().err
    assert (
        "the state is copied every 4 steps, because after a failure it is unknown which step a GPU has reached" in said
    )
    assert f"resumed at step {began} from a copy in the memory on the node" in said
    assert "seeded" not in said


@pytest.mark.parametrize("ranks", [1, 2])
def test_without_a_folder_a_saved_state_is_copied_and_counts_some_steps_later(node, ranks, monkeypatch):
    """A copy of a saved state must become valid some steps after save(), not only at the next save()."""
    monkeypatch.setattr(copies, "COST_MAX", 0.0)  # copy saved states, however much copies cost

    def only_saves(until: int) -> Any:
        world = ddpjob.init()
        objects, snapshot = parts(), ddpjob.Snapshot(world=world)
        step = began = snapshot.load(**objects)
        best = snapshot.state.get("best") if step else None
        model = world.wrap(objects["model"]) if ranks > 1 else objects["model"]
        while step < until:
            objects["optimizer"].zero_grad()
            model(torch.full((4, 4), float(step + 1)) + torch.randn(4, 4)).square().sum().backward()
            objects["optimizer"].step()
            step += 1
            if step % 10 == 0:
                snapshot.save(step, **objects, best=step + 0.5)
        return began, best, [value.tolist() for value in objects["model"].state_dict().values()]

    *_, undisturbed = node.run(0, lambda: only_saves(40), ranks=ranks)
    node.lose(0)
    assert node.run(0, lambda: only_saves(19), ranks=ranks)[:2] == (0, None)
    assert node.run(1, lambda: only_saves(29), ranks=ranks)[:2] == (10, 10.5)
    assert node.run(2, lambda: only_saves(40), ranks=ranks) == (20, 20.5, undisturbed)


def test_weights_clipped_before_each_forward_are_copied_as_at_the_boundary(node: Node) -> None:
    """If a script clips weights before each forward pass, the clipping on the device must wait for the copy."""
    _, undisturbed = node.run(0, lambda: train(40, clips=True))
    node.lose(0)
    Path("snapshots").rename("others")
    assert node.run(0, lambda: train(30, clips=True, save_at=3))[0] == 0
    began, bits = node.run(1, lambda: train(40, clips=True, save_at=3))
    assert (began in (20, 24), bits) == (True, undisturbed)


def test_memory_that_cannot_be_pinned_is_reported_and_still_used(node, device, capfd):
    """Memory that cannot be pinned must be reported and used, with fewer copies, because the host waits for each."""
    device.cannot_pin = "cudaHostRegister answers 1"
    node.run(0, lambda: train(30))
    assert node.run(1, lambda: train(31))[0] in (20, 24)
    said = capfd.readouterr().err
    assert said.count("cudaHostRegister answers 1: the host waits for each copy of the state into memory") == 2


def test_steps_in_a_cuda_graph_are_not_kept_and_the_reason_is_given(node, device, capfd):
    """Steps in a CUDA graph must not be kept: a replay calls no hook, and would change the state during a copy."""
    device.recording = True

    def recorded() -> str:
        train(12)
        return process.current.not_kept

    assert node.run(0, recorded) == "a CUDA graph makes the optimizer's steps, so no step is noticed"
    assert "the state is not kept in memory: a CUDA graph" in capfd.readouterr().err
    assert node.step is None


def test_a_grown_state_gets_room_and_counts_again(node: Node) -> None:
    """A state that grows must get larger memory, although the device may still be writing to the old memory."""

    def grow() -> int:
        objects, _snapshot, step = begin()
        for until in (24, 60):
            while step < until:
                objects["optimizer"].zero_grad()
                make_step(objects["model"], objects["optimizer"])
                step += 1
                ddpjob.should_stop(step)
                settle()
            if until == 24:
                objects["model"].append(torch.nn.Linear(1, 5000))
                objects["optimizer"].add_param_group({"params": objects["model"][-1].parameters()})
        return step

    node.run(0, grow)
    assert node.step in (52, 56)


@pytest.mark.parametrize(
    ("backend", "world_size", "environ", "goes_on"),
    [
        ("nccl", 2, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, True),
        ("nccl", 2, {"NCCL_ASYNC_ERROR_HANDLING": "2"}, True),
        ("nccl", 2, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}, False),
        ("nccl", 2, {}, False),
        ("nccl", 1, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, False),
        ("gloo", 2, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, False),
    ],
)
def test_nothing_is_kept_if_a_gpu_continues_after_an_abort(backend, world_size, environ, goes_on):
    """No state is kept if a GPU continues after an aborted collective, because it then trains with invalid data."""
    assert bool(would_go_on(backend, world_size, environ)) is goes_on


@pytest.mark.parametrize(
    ("environ", "then"),
    [
        ({"DDPJOB_MEMORY": "1:2:3:1:0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, "3"),
        ({"DDPJOB_MEMORY": "1:2:3:1:0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}, "2"),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, "1"),
    ],
)
def test_under_ddprun_an_nccl_error_ends_a_rank_without_an_earlier_abort(environ: dict[str, str], then: str) -> None:
    """ddpjob.init must change the NCCL error handling that ddprun sets, but not a value that the script sets."""
    end_without_abort(environ)
    assert environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == then


def test_the_checksum_of_tensors_equals_that_of_their_bytes_in_memory() -> None:
    """The checksum of bytes in shared memory must equal that of the loaded tensors, because a restart compares them."""
    tensors = [torch.randn(3), torch.randn(200, 100).t(), torch.randn(70_001).bfloat16(), torch.zeros(0)]
    state = packed.pack(tensors)
    memory = torch.zeros(state.size, dtype=torch.uint8)
    for place, tensor in zip(packed.places(state, memory), state.tensors, strict=True):
        place.copy_(packed.flat_bytes(tensor))
    assert packed.total(packed.places(state, memory)) == packed.total(tensors)


def test_small_gpu_tensors_are_summed_from_a_copy_that_lives_until_it_is_read(monkeypatch):
    """The host copy of a small GPU tensor must live until its checksum is computed."""
    tensors = [torch.randn(size) for size in (3, 64, 512, 64)]
    total = packed.total(tensors)
    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)  # `cpu()` of a tensor on a GPU returns a copy
    assert packed.total(tensors) == total


def test_the_random_state_of_a_gpu_is_kept_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's random state must be kept, because otherwise dropout draws other numbers after a restart."""
    from ddpjob.checkpoint.state import random_states

    state = torch.arange(16, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: state)
    assert torch.equal(random_states.expanded(random_states.compact())["cuda"], state)
