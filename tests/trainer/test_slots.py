"""Random states, buffers and settings in a rank's slots are correct, although unchanged parts are reused."""

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch

from ddpjob.checkpoint.in_memory import recall
from ddpjob.checkpoint.in_memory.kept import Kept
from ddpjob.checkpoint.in_memory.shared import Shared
from ddpjob.checkpoint.in_memory.slots import PLACE, Slots
from ddpjob.checkpoint.state import random_states
from ddpjob.errors import StateError
from ddpjob_core.memory import EARLY
from ddprun.memory import Memory


class Rank:
    """A rank with shared memory, a model with buffers, and other objects of a script."""

    def __init__(self, **others: Any) -> None:
        self.agent = Memory(1)
        self.agent.begin(0)
        self.shared = Shared(self.agent.where(0), 1, 0)
        self.slots = Slots(self.shared, 0, 1)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step = 0
        self.keep(**others)

    def keep(self, **others: Any) -> None:
        self.kept = Kept({"model": self.model, "optimizer": self.optimizer, **others})

    def writes_the_truth(self) -> bool:
        """Write the small values during and after a step. Return True if the written values are correct."""
        self.step += 1
        for slot in (EARLY, self.step % 2):
            small = self.kept.buffers() | ({} if slot == EARLY else self.kept.settings())
            self.slots.write(slot, self.step, self.kept, random_states.compact(), small)
        early, own = self.shared.read_slot(EARLY), self.shared.read_slot(self.step % 2)
        now = described(random_states.current())
        if any(described(random_states.expanded(found["rng"])) != now for found in (early, own)):
            return False
        return described(own["small"]) == described(self.kept.buffers() | self.kept.settings()) and own["of"] == (0, 1)


def described(value: Any) -> Any:
    """Return type, shape and numbers of all tensors and values, to compare two states."""
    if isinstance(value, dict):
        return {key: described(item) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.shape, repr(value.tolist())
    return repr(value)


@pytest.fixture
def rank() -> Iterator[Rank]:
    usual = numpy.random.get_bit_generator()
    yield Rank()
    numpy.random.set_bit_generator(usual)


def new_buffer(rank: Rank) -> None:
    rank.model[1].running_mean = torch.randn(8).bfloat16()


def tied_buffers(rank: Rank) -> None:
    rank.model[1].running_var = rank.model[1].running_mean


def strided_buffer(rank: Rank) -> None:
    rank.model[1].running_mean = torch.randn(16)[::2]


def in_a_dict(name: str, value: Any) -> Callable[[Rank], None]:
    return lambda rank: rank.optimizer.param_groups[0].__setitem__(name, value)


CHANGES: dict[str, Callable[[Rank], Any]] = {
    "nothing": lambda _: None,
    "torch draws": lambda _: torch.rand(3),
    "python draws": lambda _: random.random(),
    "python draws a normal one": lambda _: random.gauss(0, 1),
    "numpy draws": lambda _: numpy.random.random(),
    "numpy draws a normal one": lambda _: numpy.random.normal(),
    "another generator of numpy": lambda _: numpy.random.set_bit_generator(numpy.random.MT19937(3)),
    "a buffer": lambda rank: rank.model[1].running_mean.mul_(0.9).add_(1),
    "a buffer of another type": new_buffer,
    "two buffers that are one": tied_buffers,
    "a buffer that is every other value": strided_buffer,
    "a new learning rate": lambda rank: in_a_dict("lr", rank.optimizer.param_groups[0]["lr"] * 0.5)(rank),
    "zero": in_a_dict("weight_decay", 0.0),
    "less than zero": in_a_dict("weight_decay", -0.0),
    "a number that is True": in_a_dict("weight_decay", True),
    "a list that changes": lambda rank: rank.optimizer.param_groups[0].setdefault("own", []).append(1),
    "a tensor that changes": lambda rank: rank.optimizer.param_groups[0].setdefault("rate", torch.zeros(1)).add_(1),
    "a new name": lambda rank: rank.optimizer.param_groups[0].__setitem__("initial_lr", 0.1),
    "the model alone": lambda rank: rank.keep(note=1),
}


@pytest.mark.parametrize("first", CHANGES)
def test_the_read_state_is_exact_whatever_changed_since_the_last_step(rank: Rank, first: str) -> None:
    """The small values in a slot must be those of the present step, whatever has changed."""
    for second in CHANGES.values():
        for change in (CHANGES[first], second, CHANGES["nothing"], CHANGES["torch draws"]):
            change(rank)
            assert rank.writes_the_truth()


def test_growing_schedulers_and_values_are_those_of_the_step() -> None:
    notes: dict[str, Any] = {}
    rank = Rank(notes=notes)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(rank.optimizer, 50)
    rank.keep(notes=notes, scheduler=scheduler)
    for step in range(20):
        rank.optimizer.step()
        scheduler.step()
        notes[f"{step}"] = torch.randn(1 + step * 100)
        assert rank.writes_the_truth()


def test_another_process_can_read_the_written_state() -> None:
    """Another process must be able to read the small values of a rank that was killed."""
    rank = Rank()
    if (pid := os.fork()) == 0:
        rank.slots.write(0, 1, rank.kept, random_states.compact(), rank.kept.settings())
        rank.optimizer.param_groups[0]["lr"] = 7.0
        rank.slots.write(0, 3, rank.kept, random_states.compact(), rank.kept.settings())
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)
    assert rank.shared.read_slot(0)["small"]["optimizer"][0]["lr"] == 7.0


def test_a_script_that_closes_all_descriptors_keeps_its_state(rank: Rank) -> None:
    """A script that closes all file descriptors, as programs that start a daemon do, must keep its state in memory."""
    if (pid := os.fork()) == 0:
        assert rank.writes_the_truth()
        os.closerange(3, 1000)
        rank.kept.objects["model"][1].running_mean.add_(1)
        os._exit(0 if all(rank.writes_the_truth() for _ in range(3)) else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_rank_that_lost_its_own_buffers_does_not_get_those_of_another() -> None:
    """If DistributedDataParallel broadcasts no buffers, a rank that has lost its own must not get those of rank 0."""
    place = {"of_0": [], "own": ["model"], "models": ["model"]}
    first = {"small": {"model": {"centre": 1}, PLACE: place}}
    with pytest.raises(StateError, match="model: each rank had buffers of its own, and those of this rank are lost"):
        recall._small(None, None, first, None)
    early = {"small": {"model": {"centre": 2}}}
    assert recall._small(None, early, first, None) == early["small"]


def test_an_average_of_weights_that_starts_after_the_first_step_loses_no_random_states() -> None:
    average = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(1, 1))
    rank = Rank(average=average)
    for _ in range(2):
        rank.slots.write_early(rank.kept, in_backward=True)
        average.n_averaged.add_(1)
        rank.slots.begin(rank.kept.buffers_as_they_are(), random_states.compact())
    assert rank.shared.slot_version(EARLY) is not None


def test_numbers_drawn_before_a_first_save_of_other_objects_lose_no_random_states() -> None:
    """If save() gets more objects than load(), EARLY must keep the random states of the next step."""
    rank = Rank()
    rank.slots.write_early(rank.kept, in_backward=True)
    random.random()
    rank.slots.forget_early()
    rank.slots.begin(rank.kept.buffers_as_they_are(), random_states.compact())
    rank.slots.write_early(rank.kept, in_backward=True)
    assert rank.shared.slot_version(EARLY) is not None


def test_random_numbers_drawn_after_the_gradients_do_not_lose_the_buffers_of_a_killed_rank(capfd):
    """If random numbers are drawn after the backward pass, EARLY must lose only the random states, not the buffers."""
    rank = Rank()
    for _ in range(3):
        rank.model(torch.ones(2, 4))
        rank.slots.write_early(rank.kept, in_backward=True)
        random.random()
        rank.slots.begin(rank.kept.buffers_as_they_are(), random_states.compact())
    rank.model(torch.ones(2, 4))
    rank.slots.write_early(rank.kept, in_backward=True)
    found = rank.shared.read_slot(EARLY)
    assert found["rng"] is None
    assert described(found["small"]["model"]) == described(rank.kept.buffers()["model"])
    assert capfd.readouterr().err.count("should_stop() loses its random numbers") == 1


def test_buffers_changed_after_the_gradients_do_not_lose_the_random_numbers_of_a_killed_rank(
    capfd: pytest.CaptureFixture[str],
) -> None:
    rank = Rank()
    for _ in range(3):
        rank.model(torch.ones(2, 4))
        rank.slots.write_early(rank.kept, in_backward=True)
        rank.model(torch.ones(2, 4))
        rank.slots.begin(rank.kept.buffers_as_they_are(), random_states.compact())
    random.random()
    rank.slots.write_early(rank.kept, in_backward=True)
    found = rank.shared.read_slot(EARLY)
    assert described(random_states.expanded(found["rng"])) == described(random_states.current())
    assert not found["small"]["model"]
    assert capfd.readouterr().err.count("should_stop() loses its buffers") == 1
    place = {"of_0": [], "own": ["model"], "models": ["model"]}
    with pytest.raises(StateError, match="model: each rank had buffers of its own, and those of this rank are lost"):
        recall._small(None, found, {"small": {"model": {"centre": 1}, PLACE: place}}, None)
