"""The order of training data depends only on the seed, not on the number of ranks or on restarts."""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch script gives it
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

import ddpjob

data_file = importlib.import_module("ddpjob.data")
SAMPLES = 100


def shares(n: int, global_batch: int, world_size: int, epoch: int = 0, **kwargs: Any) -> list[list[int]]:
    """Return the global batches of an epoch, put together from the shares of all ranks."""
    samplers = [
        ddpjob.GlobalBatchSampler(n, global_batch, 7, rank=rank, world_size=world_size, **kwargs)
        for rank in range(world_size)
    ]
    per_step = zip(*(sampler.epoch(epoch) for sampler in samplers), strict=True)
    return [[index for share in step for index in share] for step in per_step]


@given(n=st.integers(1, 60), global_batch=st.integers(1, 20), world_size=st.integers(1, 7), epoch=st.integers(0, 3))
def test_every_world_size_trains_the_same_samples_in_the_same_order(n, global_batch, world_size, epoch):
    batches = shares(n, global_batch, world_size, epoch, drop_last=False)
    assert batches == shares(n, global_batch, 1, epoch, drop_last=False)
    assert sorted(index for batch in batches for index in batch) == list(range(n)), "a sample was lost or seen twice"


@given(size=st.integers(1, 40), world_size=st.integers(1, 9))
def test_shares_differ_by_at_most_one_sample_and_rank_0_has_the_most(size, world_size):
    sizes = [
        len(next(ddpjob.GlobalBatchSampler(40, size, 7, rank=rank, world_size=world_size).epoch(0)))
        for rank in range(world_size)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def test_another_epoch_or_seed_gives_another_order():
    orders = [
        [list(batch) for batch in ddpjob.GlobalBatchSampler(50, 10, seed, rank=0, world_size=1).epoch(epoch)]
        for seed, epoch in ((7, 0), (7, 1), (8, 0))
    ]
    assert orders[0] != orders[1]
    assert orders[1] != orders[2], "seed + 1 must not be the next epoch of seed"


def test_training_continues_in_the_middle_of_an_epoch_with_another_number_of_ranks():
    before = ddpjob.GlobalBatchSampler(SAMPLES, 10, 7, rank=0, world_size=4)
    batches = before.epoch(3)
    for _ in range(4):
        next(batches)
    after = ddpjob.GlobalBatchSampler(SAMPLES, 10, 7, rank=0, world_size=1)
    after.load_state_dict(before.state_dict())
    assert after.current_epoch == 3
    assert [list(batch) for batch in after.epoch(3)] == shares(SAMPLES, 10, 1, epoch=3)[4:]
    assert after.current_epoch == 4, "a finished epoch leads to the next"


def test_a_snapshot_at_the_end_of_an_epoch_repeats_nothing():
    before = ddpjob.GlobalBatchSampler(20, 10, 7)
    *_, _last = (before.state_dict() for _ in before.epoch(0))
    after = ddpjob.GlobalBatchSampler(20, 10, 7)
    after.load_state_dict(_last)
    assert list(after.epoch(0)) == []
    assert len(list(after.epoch(1))) == 2


def test_a_data_loader_accepts_the_sampler_and_reports_the_position():
    data = torch.arange(40)
    sampler = ddpjob.GlobalBatchSampler(40, 8, 7, rank=1, world_size=2)
    loader = DataLoader(data, batch_sampler=sampler)
    first, second = ([batch.tolist() for batch in loader] for _ in range(2))
    again = ddpjob.GlobalBatchSampler(40, 8, 7, rank=1, world_size=2)
    assert first == [list(batch) for batch in again.epoch(0)]
    assert second == [list(batch) for batch in again.epoch(1)]
    assert sampler.state_dict(epoch=1, batches=2) == {"n": 40, "seed": 7, "epoch": 1, "consumed": 16}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: ddpjob.GlobalBatchSampler(10, 11, 7), ["global_batch: 11", "n: 10", "drop_last=False"]),
        (lambda: ddpjob.GlobalBatchSampler(10, 0, 7), ["global_batch: 0", "at least 1"]),
        (lambda: ddpjob.GlobalBatchSampler(10, 5, 7, rank=2, world_size=2), ["rank: 2", "world_size: 2"]),
        (lambda: ddpjob.GlobalBatchSampler(10, 5, 7, rank=0), ["both or neither"]),
        (lambda: iter(ddpjob.GlobalBatchSampler(10, 2, 7, rank=0, world_size=3)), ["3 ranks", "global_batch >= 3"]),
        (lambda: ddpjob.GlobalBatchSampler(10, 5 / 2, 7), ["global_batch: 2.5", "not a whole number"]),
        (lambda: ddpjob.GlobalBatchSampler(10, "2", 7), ["global_batch: '2'", "not a whole number"]),
        (lambda: ddpjob.GlobalBatchSampler(float("inf"), 2, 7), ["n: inf", "not a whole number"]),
        (lambda: ddpjob.GlobalBatchSampler(10, 2, None), ["seed: None", "not a whole number"]),
        (lambda: ddpjob.GlobalBatchSampler(10, 4, 7, micro_batch=1.5), ["micro_batch: 1.5", "not a whole number"]),
        (lambda: ddpjob.GlobalBatchSampler(10, 2, 7).state_dict(epoch=0, batches=-1), ["batches: -1", "at least 0"]),
        (lambda: ddpjob.GlobalBatchSampler(10, 2, 7).state_dict(epoch=-1, batches=1), ["epoch: -1", "at least 0"]),
        (lambda: ddpjob.DataPartitioner(10.5, [1.0], 7), ["dataset: 10.5", "not a whole number"]),
        (lambda: ddpjob.DataPartitioner(10, ["half", 0.5], 7), ["fractions", "half", "list of numbers"]),
        (lambda: ddpjob.DataPartitioner(10, None, 7), ["fractions: None", "list of numbers"]),
        (lambda: ddpjob.DataPartitioner(10, [0.5, 0.4], 7), ["[0.5, 0.4]", "0.9", "must be 1"]),
        (lambda: ddpjob.DataPartitioner(10, [1.5, -0.5], 7), ["fractions[1]", "-0.5"]),
        (lambda: ddpjob.DataPartitioner(10, [], 7), ["at least one"]),
        (lambda: ddpjob.DataPartitioner(10, [1.0], 7).use(1), ["i: 1", "0 to 0"]),
    ],
)
def test_a_wrong_argument_is_named_with_its_value_and_the_fix(wrong: Callable[[], Any], words: list[str]):
    with pytest.raises(ddpjob.ConfigurationError) as caught:
        wrong()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_state_of_other_data_or_another_seed_is_refused():
    state = ddpjob.GlobalBatchSampler(20, 10, 7).state_dict()
    for other in (ddpjob.GlobalBatchSampler(21, 10, 7), ddpjob.GlobalBatchSampler(20, 10, 8)):
        with pytest.raises(ddpjob.StateError, match="saved state has"):
            other.load_state_dict(state)


@given(
    n=st.integers(1, 60),
    before=st.integers(1, 20),
    after=st.integers(1, 20),
    made=st.integers(0, 60),
    drop=st.booleans(),
)
def test_a_resume_with_another_global_batch_trains_full_batches_only_and_no_sample_twice(n, before, after, made, drop):
    first = ddpjob.GlobalBatchSampler(n, min(before, n), 7)
    seen = [index for batch, _ in zip(first.epoch(0), range(made), strict=False) for index in batch]
    second = ddpjob.GlobalBatchSampler(n, min(after, n), 7, drop_last=drop)
    state = {"n": n, "seed": 7, "epoch": 0, "consumed": len(seen)}
    second.load_state_dict(state)
    batches = [list(batch) for batch in second.epoch(0)]
    assert not drop or all(len(batch) == second.global_batch for batch in batches)
    trained = [*seen, *(index for batch in batches for index in batch)]
    assert len(set(trained)) == len(trained)
    assert n - len(trained) < (second.global_batch if drop else 1), "a whole global batch was left out"


@pytest.mark.parametrize("made", [0, 1, 2])
def test_a_data_loader_resumed_twice_trains_every_sample_once(made):
    """A loader that is resumed twice must train each sample once: batches count from the start of the epoch."""
    trained: list[int] = []
    state = ddpjob.GlobalBatchSampler(96, 16, 7).state_dict()
    for global_batch in (16, 8, 24):
        sampler = ddpjob.GlobalBatchSampler(96, global_batch, 7)
        sampler.load_state_dict(state)
        loader = DataLoader(torch.arange(96), batch_sampler=sampler)
        for batches, batch in enumerate(loader, start=1):
            if batches > made:
                break
            trained += batch.tolist()
            state = sampler.state_dict(epoch=0, batches=batches)
    assert state["consumed"] == len(trained) == made * (16 + 8 + 24)
    assert len(set(trained)) == len(trained)
    sampler.set_epoch(1)
    assert sampler.state_dict(epoch=1, batches=1)["consumed"] == 24
    sampler.set_epoch(0)
    assert sampler.state_dict(epoch=0, batches=1)["consumed"] == 24, "from its first sample again"


@pytest.mark.parametrize("workers", [0, 2])
def test_fetching_one_batch_of_a_loader_removes_none_from_the_training(workers, capfd):
    """`next(iter(loader))` must not remove a batch from the training, nor the samples that workers read ahead."""
    sampler = ddpjob.GlobalBatchSampler(32, 4, seed=7)
    sampler.load_state_dict({"n": 32, "seed": 7, "epoch": 1, "consumed": 8})
    loader = DataLoader(range(32), batch_sampler=sampler, num_workers=workers)
    first = next(iter(loader)).tolist()
    batches = [batch.tolist() for batch in loader]
    assert (len(batches), batches[0]) == (6, first)
    assert sampler.current_epoch == 2
    assert sampler.state_dict(epoch=1, batches=6)["consumed"] == 32
    assert capfd.readouterr().err == "", "a loader with workers makes two iterators, and uses one"


def test_a_loader_epoch_that_is_left_early_is_followed_by_the_next_one():
    sampler = ddpjob.GlobalBatchSampler(32, 4, seed=7)
    loader = DataLoader(range(32), batch_sampler=sampler)
    taken = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        taken.append(next(iter(loader)).tolist())
    orders = [next(ddpjob.GlobalBatchSampler(32, 4, seed=7).epoch(epoch)) for epoch in range(2)]
    assert taken == orders


class Augmented(torch.utils.data.Dataset):
    """A data set that draws a random number for each sample."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(())


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("plain", [True, False])
def test_a_warning_says_that_random_numbers_of_loader_workers_do_not_continue(workers, plain, capfd):
    """A warning must say that random numbers of DataLoader workers do not continue after a resume within an epoch."""
    data = torch.utils.data.TensorDataset(torch.arange(8)) if plain else Augmented()
    data = torch.utils.data.Subset(data, range(8))
    sampler = ddpjob.GlobalBatchSampler(8, 2, seed=1)
    loader = torch.utils.data.DataLoader(data, batch_sampler=sampler, num_workers=workers)
    for _ in range(2):
        list(loader)
    said = capfd.readouterr().err.count("a restart does not continue random numbers that the dataset draws in its")
    assert said == int(bool(workers) and not plain)


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1, "persistent_workers": True}], ids=["none", "persistent"])
def test_a_resume_draws_no_additional_seed_for_a_loader(tmp_path, workers):
    """A resume must draw no additional seed for a DataLoader, because all later dropout masks would differ."""

    def train(until: int, folder: str) -> torch.Tensor:
        weights = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(weights.parameters(), lr=0.1)
        sampler = ddpjob.GlobalBatchSampler(8, 2, seed=1)
        snapshot = ddpjob.Snapshot(tmp_path / folder)
        torch.manual_seed(3)
        step = snapshot.load(sampler=sampler)
        data = torch.utils.data.TensorDataset(torch.arange(8))
        loader = torch.utils.data.DataLoader(data, batch_sampler=sampler, **workers)
        for epoch in range(sampler.current_epoch, 3):
            sampler.set_epoch(epoch)
            for batches, _ in enumerate(loader, start=1):
                optimizer.step()
                drawn = torch.rand(())
                step += 1
                place = (epoch, batches) if step % 4 else (epoch + 1, 0)
                snapshot.save(step, sampler=sampler.state_dict(epoch=place[0], batches=place[1]))
                if step == until:
                    snapshot.close()
                    return drawn
        raise AssertionError("it was to be left")

    whole = {step: train(step, f"whole-{step}") for step in (5, 6, 9, 11)}
    for first, second in ((5, 6), (4, 5), (8, 9), (5, 11)):  # steps within and across epochs
        train(first, f"{first}-{second}")
        assert train(second, f"{first}-{second}") == whole[second]


class BatchSamplerShard:
    """Imitates the wrapper that accelerator.prepare() puts around the batch sampler of a DataLoader."""

    def __init__(self, batch_sampler: Any, num_processes: int) -> None:
        self.batch_sampler, self.num_processes = batch_sampler, num_processes

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.batch_sampler):
            if number % self.num_processes == 0:
                yield batch


def test_shares_that_accelerate_would_divide_again_are_refused():
    """A sampler that accelerate would divide again must be refused, because half of the samples would be left out."""
    sampler = ddpjob.GlobalBatchSampler(8, 2, seed=1, rank=0, world_size=2)
    with pytest.raises(
        ddpjob.ConfigurationError, match=r"BatchSamplerShard distributes batches .* Do not pass this DataLoader"
    ):
        list(DataLoader(range(8), batch_sampler=BatchSamplerShard(sampler, 2)))
    alone = ddpjob.GlobalBatchSampler(8, 2, seed=1, rank=0, world_size=1)
    assert len(list(DataLoader(range(8), batch_sampler=BatchSamplerShard(alone, 1)))) == 4


def test_epochs_that_are_all_left_early_get_a_warning_that_they_are_the_same(capfd):
    """A loop that leaves each epoch early and never calls set_epoch must get a warning: all epochs are equal."""
    sampler = ddpjob.GlobalBatchSampler(32, 4, seed=7)
    loader = DataLoader(range(32), batch_sampler=sampler)
    for _ in range(2):
        next(iter(loader))
    assert capfd.readouterr().err == "", "a look at a batch is not a mistake"
    for _ in range(3):
        next(iter(loader))
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("ddpjob: epoch 0 of the data begins for the third time, with the same samples, because")
    for epoch in range(1, 5):
        sampler.set_epoch(epoch)
        next(iter(loader))
    assert capfd.readouterr().err == ""


def test_a_resume_that_leaves_a_rank_without_samples_is_refused_if_a_data_loader_cannot_handle_it():
    sampler = ddpjob.GlobalBatchSampler(100, 10, 7, rank=0, world_size=2, drop_last=False)
    sampler.load_state_dict({"n": 100, "seed": 7, "epoch": 0, "consumed": 99})
    with pytest.raises(ddpjob.ConfigurationError, match="a global batch of 1 leaves some of"):
        iter(sampler)


@pytest.mark.parametrize(
    ("name", "value"),
    [*((name, value) for name in ("epoch", "consumed") for value in (-5, 1.5, "3", None, True)), ("consumed", 21)],
)
def test_a_damaged_state_is_refused_and_does_not_give_an_epoch_without_samples(name, value):
    """A damaged sampler state must be refused, because training would skip or repeat samples."""
    sampler = ddpjob.GlobalBatchSampler(20, 10, 7)
    with pytest.raises(ddpjob.StateError, match=f"{name}: the saved state has"):
        sampler.load_state_dict({**sampler.state_dict(), name: value})
    assert len(list(sampler.epoch(0))) == 2, "nothing was changed"


# ---- the same parameters from any number of processes -----------------------------------------------------------


def trained(
    rank: int, world_size: int, url: str, steps: int, state: dict[str, Any] | None, made_of: Any = None, **kwargs: Any
) -> Any:
    """Return the parameters of a small network after this many steps. state: sampler state to begin with. made_of:
    wraps the DDP model."""
    world = ddpjob.init(init_method=url, rank=rank, world_size=world_size)
    torch.manual_seed(1)
    x, y = torch.randn(SAMPLES, 6), torch.randint(0, 3, (SAMPLES,))
    net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.GELU(), torch.nn.Linear(16, 3)).double()
    model = world.wrap(net) if made_of is None else made_of(world.wrap(net))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    sampler = ddpjob.GlobalBatchSampler(SAMPLES, seed=7, drop_last=False, **kwargs)
    if state is not None:
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        sampler.load_state_dict(state["sampler"])
    x = x.double()
    made, losses = 0, []
    while made < steps:
        for batch in sampler.epoch(sampler.current_epoch):
            optimizer.zero_grad()
            loss = ddpjob.accumulate(
                model, batch, sampler.global_batch, lambda i: F.cross_entropy(model(x[i]), y[i], reduction="sum")
            )
            torch.distributed.all_reduce(loss, op=torch.distributed.ReduceOp.SUM)
            losses.append(round(loss.item() / world_size, 9))
            optimizer.step()
            made += 1
            if made == steps:
                break
    world.close()
    return {
        "net": {name: value.clone() for name, value in net.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "sampler": sampler.state_dict(),
        "losses": losses,
    }


def far(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max((one["net"][name] - other["net"][name]).abs().max().item() for name in one["net"])


def test_parameters_are_the_same_for_1_2_3_and_4_processes(run_ranks, tmp_path):
    def of(world_size: int, **kwargs: Any) -> list[Any]:
        url = f"file://{tmp_path}/{world_size}-{len(kwargs)}"
        return run_ranks(lambda rank: trained(rank, world_size, url, 15, None, global_batch=14, **kwargs), world_size)

    reference = of(1)[0]
    for world_size in (2, 3, 4):
        for result in of(world_size):
            assert far(result, reference) < 1e-6, f"{world_size} processes learnt something else than one"
            assert result["losses"] == reference["losses"]
    for result in of(3, micro_batch=2):
        assert far(result, reference) < 1e-6, "micro-batches changed what is learnt"


def test_a_compiled_model_learns_the_same_from_two_processes_as_from_one(run_ranks, tmp_path):
    """A compiled DDP model must learn the same from two processes as from one, although it is no DDP instance."""

    def of(world_size: int, **kwargs: Any) -> Any:
        url = f"file://{tmp_path}/{world_size}"
        return run_ranks(lambda rank: trained(rank, world_size, url, 5, None, global_batch=14, **kwargs), world_size)[0]

    assert far(of(2, made_of=lambda model: torch.compile(model, backend="eager"), micro_batch=3), of(1)) < 1e-6


def test_parameters_are_the_same_if_4_processes_become_3_and_then_1_within_an_epoch(run_ranks, tmp_path):
    def go(world_size: int, steps: int, state: Any) -> Any:
        url = f"file://{tmp_path}/{world_size}-{steps}"
        return run_ranks(lambda rank: trained(rank, world_size, url, steps, state, global_batch=14), world_size)[0]

    state = None
    for world_size, steps in ((4, 3), (3, 6), (1, 6)):
        state = go(world_size, steps, state)
    assert far(state, go(1, 15, None)) < 1e-6


class Holder(torch.nn.Module):
    """Module with parts that are DDP models, as in a GAN."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_a_model_containing_ddp_learns_the_same_from_two_processes_as_from_one(run_ranks, tmp_path):
    def of(world_size: int, **kwargs: Any) -> Any:
        url = f"file://{tmp_path}/{world_size}"
        return run_ranks(lambda rank: trained(rank, world_size, url, 5, None, global_batch=14, **kwargs), world_size)[0]

    assert far(of(2, made_of=Holder, micro_batch=3), of(1)) < 1e-6


def test_a_model_that_is_not_averaged_over_the_ranks_is_refused(end_ranks, tmp_path):
    """A model that was not passed to world.wrap() must be refused, because each rank would train its own model."""

    def body(rank: int) -> None:
        trained(rank, 2, f"file://{tmp_path}/meet", 1, None, made_of=lambda model: model.module, global_batch=14)

    for outcome in end_ranks(body, 2):
        assert outcome.error.startswith("ConfigurationError: model: a Sequential is not a DistributedDataParallel, so")
        assert "Use world.wrap(model)" in outcome.error


def test_a_rank_without_samples_takes_part_and_changes_nothing(run_ranks, tmp_path):
    def of(world_size: int) -> Any:
        url = f"file://{tmp_path}/{world_size}"
        return run_ranks(lambda rank: trained(rank, world_size, url, 5, None, global_batch=2), world_size)[0]

    assert far(of(4), of(1)) < 1e-6


def test_accumulate_accepts_tensors_of_a_data_loader_and_runs_the_backward_of_the_caller():
    torch.manual_seed(1)
    x, y = torch.randn(10, 3), torch.randn(10, 1)
    model, calls = torch.nn.Linear(3, 1), []

    def backward(loss: torch.Tensor) -> None:
        calls.append(loss.item())
        loss.backward()

    def loss_of(piece: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.mse_loss(model(piece[0]), piece[1], reduction="sum")

    loss = ddpjob.accumulate(model, (x, y), 10, loss_of, micro_batch=4, backward=backward)
    gradient = model.weight.grad.clone()
    model.zero_grad()
    fields = {"x": x, "y": y}  # models of transformers take a dict
    ddpjob.accumulate(model, fields, 10, lambda piece: loss_of((piece["x"], piece["y"])), micro_batch=4)
    assert torch.equal(gradient, model.weight.grad)
    model.zero_grad()
    whole = F.mse_loss(model(x), y)
    whole.backward()
    torch.testing.assert_close(gradient, model.weight.grad)
    torch.testing.assert_close(loss, whole.detach())
    assert len(calls) == 3


@pytest.mark.parametrize("share", [0.5, torch.tensor(0.5), np.float32(0.5)], ids=["float", "tensor", "numpy"])
@pytest.mark.parametrize("first", [True, False])
def test_a_number_in_a_batch_is_the_same_in_each_micro_batch(share: Any, first: bool) -> None:
    """A number in a batch must reach each micro-batch unchanged, not raise `object of type 'float' has no len()`."""
    x, model = torch.ones(10, 3), torch.nn.Linear(3, 1)
    whole = {"share": share, "name": "digits", "none": None}
    fields = whole | {"x": x} if first else {"x": x} | whole
    seen = []

    def loss_of(piece: dict[str, Any]) -> torch.Tensor:
        seen.append((len(piece["x"]), float(piece["share"]), piece["name"], piece["none"], list(piece)))
        return (model(piece["x"]) * piece["share"]).sum()

    ddpjob.accumulate(model, fields, 10, loss_of, micro_batch=4)
    assert seen == [(n, 0.5, "digits", None, list(fields)) for n in (4, 4, 2)]
    assert model.bias.grad.item() == 0.5
    by_place = []
    ddpjob.accumulate(model, (0.5, x), 10, lambda p: by_place.append(p[0]) or model(p[1]).sum(), micro_batch=5)
    assert by_place == [0.5, 0.5]


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({}, "batch: this dict has no tensor and no list of samples in it."),
        ((), "batch: this tuple has no tensor and no list"),
        ({"a": 1}, "batch: this dict has no tensor and no list"),
        (5, "batch: this int has no tensor and no list"),
        ({"x": torch.ones(10, 3), "w": torch.ones(3)}, "batch['w']: has 3 entries, and batch['x'] 10, so they cannot"),
        ({"w": torch.ones(3), "x": torch.ones(10, 3)}, "batch['x']: has 10 entries, and batch['w'] 3, so they cannot"),
        ({"in": {"a": 1}, "x": torch.ones(10, 3)}, "batch['in']: a dict cannot be cut into micro"),
        ((torch.ones(10, 3), [1, 2]), "batch[1]: has 2 entries, and batch[0] 10, so they cannot"),
        ({"x": torch.ones(10, 3), "more": {"y": torch.ones(10)}}, "batch['more']: a dict cannot be cut into micro"),
        ({"x": torch.ones(10, 3), "graph": object()}, "batch['graph']: a object cannot be cut into micro-batches."),
    ],
)  # fmt: skip
def test_a_batch_that_cannot_be_split_is_refused_with_the_field_and_the_fix(batch: Any, said: str) -> None:
    """A batch that cannot be split, such as ten samples with three weights, must be refused with the field's name."""
    model = torch.nn.Linear(3, 1)
    with pytest.raises(ddpjob.ConfigurationError) as refused:
        ddpjob.accumulate(model, batch, 10, lambda piece: model(piece["x"]).sum(), micro_batch=4)
    assert str(refused.value).startswith(said)
    assert "Give " in str(refused.value)


def test_a_batch_that_is_not_split_may_contain_anything() -> None:
    model, x = torch.nn.Linear(3, 1), torch.ones(10, 3)
    fields = {"x": x, "classes": torch.ones(3), "more": {"y": x}}
    seen: list[Any] = []
    for micro_batch in (None, 10, 64):
        ddpjob.accumulate(model, fields, 10, lambda p: seen.append(p) or model(p["x"]).sum(), micro_batch=micro_batch)
    assert all(piece is fields for piece in seen)


@pytest.mark.parametrize("data", [[1, 2, 3], torch.zeros(5, 2)], ids=["list", "tensor"])
def test_the_error_about_data_passed_as_their_number_suggests_their_length(data):
    with pytest.raises(ddpjob.ConfigurationError, match=r"n: .* has a length: give len\(\.\.\.\)\.$"):
        ddpjob.GlobalBatchSampler(data, 1, seed=7)


def test_a_data_set_without_a_length_is_refused_with_the_reason():
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with pytest.raises(ddpjob.ConfigurationError, match=r"dataset: a Stream has no length"):
        ddpjob.DataPartitioner(Stream(), [1.0], seed=7)


# ---- partitions ---------------------------------------------------------------------------------------------------


@given(n=st.integers(0, 200), weights=st.lists(st.integers(0, 10), min_size=1, max_size=6).filter(any))
def test_every_sample_is_in_exactly_one_part_and_sizes_follow_the_fractions(n, weights):
    fractions = [weight / sum(weights) for weight in weights]
    parts = ddpjob.DataPartitioner(n, fractions, 7)
    members = [parts.use(i).indices for i in range(len(parts))]
    assert sorted(index for part in members for index in part) == list(range(n))
    assert all(abs(len(part) - fraction * n) < 1 for part, fraction in zip(members, fractions, strict=True))


@given(
    n=st.integers(0, 10**12),
    weights=st.lists(st.floats(0, 1), min_size=1, max_size=8).filter(lambda weights: sum(weights) > 1e-3),
    off=st.floats(-9e-7, 9e-7),
)
def test_sizes_add_up_to_all_samples_however_the_fractions_are_rounded(n, weights, off):
    """The sizes of partitions must add up to all samples, also for fractions like [0.3333333] * 3."""
    fractions = [weight / sum(weights) * (1 + off) for weight in weights]
    sizes = data_file.part_sizes(n, fractions)
    assert sum(sizes) == n
    assert all(size >= 0 for size in sizes)
    assert all(size == 0 for size, fraction in zip(sizes, fractions, strict=True) if fraction == 0)


def test_an_epoch_reshuffles_within_a_part_so_that_validation_data_are_never_trained():
    parts = ddpjob.DataPartitioner("abcdefghijklmnopqrstuvwxyz", [0.75, 0.25], seed=7)
    before = [list(parts.use(i)) for i in range(2)]
    parts.set_epoch(1)
    after = [list(parts.use(i)) for i in range(2)]
    assert before != after
    assert [sorted(part) for part in before] == [sorted(part) for part in after]
    assert len(before[0]) == 20 or len(before[0]) == 19
    assert parts.use(0)[0:2] == after[0][:2]


def test_the_order_does_not_depend_on_the_default_device_of_the_script() -> None:
    """The order of samples must not depend on `torch.set_default_device("cuda")`."""
    before = shares(50, 10, 2)
    with torch.device("meta"):
        assert shares(50, 10, 2) == before
        assert list(ddpjob.DataPartitioner(range(20), [0.5, 0.5], seed=3).use(0))


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "loss_fn: it returned None"),
        (0.5, "loss_fn: it returned 0.5"),
        (torch.zeros(3), r"loss_fn: it returned a tensor of shape \[3\]"),
    ],
)
def test_the_error_about_a_loss_function_without_a_scalar_tensor_says_what_to_return(returned, said):
    """A loss function without `return` must get an error that says what to return, not only Python's TypeError."""
    with pytest.raises(ddpjob.ConfigurationError, match=said + r'.*reduction="sum"'):
        ddpjob.accumulate(torch.nn.Linear(2, 1), torch.zeros(4, 2), 4, lambda piece: returned)


def test_a_batch_larger_than_the_global_batch_is_refused():
    """A batch that is larger than the global batch must be refused, because gradients would be too large."""
    model = torch.nn.Linear(2, 1)
    with pytest.raises(ddpjob.ConfigurationError, match="batch: it has 64 samples, and global_batch is 8"):
        ddpjob.accumulate(model, torch.zeros(64, 2), 8, lambda piece: model(piece).sum())
