"""Work that no state_dict() contains is reported when it is saved, instead of being lost at a restart."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_node import saved
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.distributed.optim import ZeroRedundancyOptimizer

import ddpjob
from ddpjob.checkpoint.state import half_done

WAITING = "gradients wait for optimizer.step(): a restart does not continue the accumulation"
HOOK = "model: its communication hook has a state (PowerSGDState), which is in no state_dict(): a restart does not"


@pytest.mark.parametrize("every", [1, 4])
def test_a_save_within_an_accumulation_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str], every: int) -> None:
    """A save within a gradient accumulation must get a warning: a restart from it loses two of four micro-batches."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snapshot = ddpjob.Snapshot(tmp_path / "s")
    step = snapshot.load(model=model, optimizer=optimizer)
    while step < 12:
        model(torch.ones(1, 2)).sum().backward()
        step += 1
        if step % every == 0:
            optimizer.step()
            if every > 1:  # with `every` 1, gradients stay until the next optimizer step
                optimizer.zero_grad()
        if step == 4:
            snapshot.save(step, model=model, optimizer=optimizer)
            assert WAITING not in capfd.readouterr().err
        if step in (6, 10):
            snapshot.save(step, model=model, optimizer=optimizer)
        if every == 1:
            optimizer.zero_grad()
    snapshot.close()
    assert capfd.readouterr().err.count(WAITING) == int(every > 1)


@pytest.mark.parametrize("loads", ["in parts", "nothing"])
@pytest.mark.parametrize("at", [2, 6])
def test_a_first_partial_save_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str], loads: str, at: int) -> None:
    """The first save within an accumulation must get a warning, even if no optimizer has stepped yet (step 2)."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snapshot = ddpjob.Snapshot(tmp_path / "s")
    if loads == "in parts":
        snapshot.load(model=model)
        snapshot.load(optimizer=optimizer)
    for step in range(1, at + 1):
        model(torch.ones(1, 2)).sum().backward()
        if step % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
    saved(snapshot, at, model=model, optimizer=optimizer)
    assert f"model: step {at} is saved while {WAITING}" in capfd.readouterr().err


def test_a_closure_and_a_second_model_give_no_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """LBFGS, which runs backward in its step, and a GAN, whose critic keeps gradients, must get no warning."""
    model, critic = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    optimizer, other = torch.optim.LBFGS(model.parameters(), max_iter=2), torch.optim.SGD(critic.parameters(), lr=0.1)
    snapshot = ddpjob.Snapshot(tmp_path / "s")
    snapshot.load(model=model, critic=critic)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = critic(model(torch.ones(1, 1))).square().sum()
        loss.backward()
        return loss

    for step in range(1, 4):
        other.zero_grad()
        critic(torch.ones(1, 1)).square().sum().backward()
        other.step()
        optimizer.step(closure)
        snapshot.save(step, model=model, critic=critic)
    snapshot.close()
    assert WAITING not in capfd.readouterr().err


@pytest.mark.parametrize("keeps_state", [True, False])
def test_a_communication_hook_with_a_state_gets_a_warning_at_the_start(run_ranks, tmp_path, capfd, keeps_state):
    """A communication hook with a state, such as PowerSGD, must get a warning: a restart loses that state."""

    def body(rank: int) -> int:
        with ddpjob.init(init_method=f"file://{tmp_path}/a", rank=rank, world_size=2) as world:
            model = world.wrap(torch.nn.Linear(1, 1))
            if keeps_state:
                model.register_comm_hook(power.PowerSGDState(None, 1), power.powerSGD_hook)  # type: ignore[operator]
            else:
                model.register_comm_hook(None, default_hooks.fp16_compress_hook)  # type: ignore[operator]
            return ddpjob.Snapshot(tmp_path / "s", world).load(model=model)

    run_ranks(body, 2)
    assert capfd.readouterr().err.count(HOOK) == int(keeps_state)


def test_shards_older_than_the_last_step_are_refused(run_ranks: Any, tmp_path: Path) -> None:
    """ZeroRedundancyOptimizer returns its last consolidated state, so step 2 with moments of step 1 must be refused."""

    def body(rank: int) -> int:
        with ddpjob.init(init_method=f"file://{tmp_path}/a", rank=rank, world_size=2) as world:
            model = world.wrap(torch.nn.Linear(2, 2))
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
            snapshot = ddpjob.Snapshot(tmp_path / "s", world)
            for step in (1, 2):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                if step == 1:
                    optimizer.consolidate_state_dict(0)
                if world.is_main and step == 1:
                    snapshot.save(step, optimizer=optimizer)
                elif world.is_main:
                    with pytest.raises(ddpjob.StateError, match="consolidated state is older than its last step"):
                        snapshot.save(step, optimizer=optimizer)
            snapshot.close()
        return 0

    run_ranks(body, 2)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("place", ["last batch", "next epoch"])
@pytest.mark.parametrize("updates", ["scheduler each epoch", "scheduler each step", "average each epoch"])
def test_a_save_at_an_epoch_end_after_an_update_for_this_epoch_is_named(tmp_path, capfd, updates, place, drop_last):
    """A save at an epoch's end, after the scheduler or the average was updated, must be named: a resume has no batch
    left, but updates again, and later learning rates differ."""
    sampler = ddpjob.GlobalBatchSampler(18, 4, 7, rank=0, world_size=1, drop_last=drop_last)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    name, when = updates.split(" ", 1)
    average, halves = torch.optim.swa_utils.AveragedModel(model), torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    objects: dict[str, Any] = {"model": model, "optimizer": optimizer, "average": average, "scheduler": halves}
    snapshot = ddpjob.Snapshot(tmp_path / "s")
    step = snapshot.load(**objects, place=sampler)
    for epoch in range(2):
        for batches, _ in enumerate(sampler.epoch(epoch), start=1):
            optimizer.step()
            step += 1
            if when == "each step":
                halves.step()
            within = sampler.state_dict(epoch=epoch, batches=batches)
            snapshot.save(step, **objects, place=within)
        if updates == "scheduler each epoch":
            halves.step()
        if updates == "average each epoch":
            average.update_parameters(model)
        after = within if place == "last batch" else sampler.state_dict(epoch=epoch + 1, batches=0)
        snapshot.save(step, **objects, place=after)
    snapshot.close()
    said = f"place: step {4 if drop_last else 5} is saved at the last batch of an epoch for which {name} was updated"
    assert capfd.readouterr().err.count(said) == (when, place).count("each epoch") * (place == "last batch")


SEEDED = "a DataLoader draws its seed from torch's global generator: a restart within an epoch does not continue"


@pytest.mark.parametrize("at", ["within the epoch", "its end"])
@pytest.mark.parametrize(
    ("loader", "dropout", "is_named"),
    [
        ({}, 0.5, True),
        ({"shuffle": True}, 0.5, True),
        ({}, 0.0, False),  # the script draws no random numbers
        ({"generator": torch.Generator()}, 0.5, False),
        ({"batch_sampler": ddpjob.GlobalBatchSampler(12, 2, seed=0)}, 0.5, False),
    ],
)
def test_a_loader_that_draws_a_seed_gets_a_warning(tmp_path, capfd, loader, dropout, is_named, at):
    """A DataLoader that draws a seed must get a warning: a restart within the epoch draws the seed again."""
    if "batch_sampler" not in loader:
        loader = loader | {"batch_size": 2}
    loading = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(12, 2)), **loader)
    model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Dropout(dropout))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snapshot = ddpjob.Snapshot(tmp_path / "s")
    step = snapshot.load(model=model, optimizer=optimizer)
    for (part,) in loading:
        model(part).sum().backward()
        optimizer.step()
        step += 1
        if at == "within the epoch" and step in (4, 5):
            saved(snapshot, step, model=model, optimizer=optimizer)
    saved(snapshot, step, model=model, optimizer=optimizer)
    snapshot.close()
    assert capfd.readouterr().err.count(SEEDED) == int(is_named and at == "within the epoch")


def test_a_loader_that_draws_a_seed_gets_a_warning_at_a_save_before_the_third_optimizer_step(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """An accumulation may take longer than the time until the first save, from which a restart already goes on."""
    loading = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(12, 2)), batch_size=2)
    model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snapshot = ddpjob.Snapshot(tmp_path / "s")
    snapshot.load(model=model, optimizer=optimizer)
    for step, (part,) in enumerate(loading, start=1):
        model(part).sum().backward()
        if step == 2:
            optimizer.step()
        if step == 4:
            optimizer.zero_grad()
            saved(snapshot, step, model=model, optimizer=optimizer)
            break
    snapshot.close()
    assert capfd.readouterr().err.count(SEEDED) == 1


@pytest.mark.parametrize("how", ["not saved", "saved", "saved by value", "in an object"])
def test_a_learning_rate_scheduler_that_is_not_saved_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], how: str
) -> None:
    """A restart restores the optimizer, but begins the schedule again."""

    class Trainer:
        def state_dict(self) -> dict[str, Any]:
            return {"schedule": scheduler.state_dict()}

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    sampler = ddpjob.GlobalBatchSampler(8, 2, 1)
    snapshot = ddpjob.Snapshot(tmp_path)
    also = {"saved": scheduler, "saved by value": scheduler.state_dict(), "in an object": Trainer()}
    for step in (1, 2):
        optimizer.step()
        scheduler.step()
        state = {"it": also[how]} if how in also else {}
        saved(snapshot, step, model=model, optimizer=optimizer, sampler=sampler, **state)
    assert capfd.readouterr().err.count("optimizer: its StepLR is not saved") == int(how == "not saved")


class Stream(torch.utils.data.IterableDataset[int]):
    """A dataset without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


@pytest.mark.parametrize("is_copied", [True, False])
def test_optimizer_state_that_is_the_memory_of_a_parameter_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], is_copied: bool
) -> None:
    """`p.float()` copies nothing for float32. After a restart the two differ if the script then normalizes weights."""

    class Master(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for p in self.param_groups[0]["params"]:
                self.state[p].setdefault("master", p.detach().clone() if is_copied else p.detach().float())
            return super().step(closure)

    model = torch.nn.Linear(2, 1)
    optimizer = Master(model.parameters(), lr=0.1)
    snapshot = ddpjob.Snapshot(tmp_path / "s")
    for step in (1, 2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        snapshot.save(step, model=model, optimizer=optimizer)
    snapshot.close()
    assert capfd.readouterr().err.count("optimizer: its state master is the memory of a parameter") == int(
        not is_copied
    )


def test_a_plain_loader_is_known_to_be_within_an_epoch_or_at_its_end() -> None:
    """A script that saves only at the ends of epochs may be unable to resume within one."""
    assert half_done.is_within_epoch() is None
    for data in (range(4), Stream()):
        loader = torch.utils.data.DataLoader(data)  # type: ignore[var-annotated, arg-type]
        batches = iter(loader)
        next(batches)
        assert half_done.is_within_epoch() is True
        assert half_done.draws_within_epoch(shuffles=True) is False
    batches = iter(torch.utils.data.DataLoader(range(2)))  # type: ignore[arg-type]
    assert len([next(batches), next(batches)]) == 2
    assert half_done.is_within_epoch() is False
