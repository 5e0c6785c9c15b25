"""State that differs between ranks: each rank gets its own state from the folder, or the load is refused."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_node import saved
from torch.nn.parallel import DistributedDataParallel

import ddpjob
from ddpjob.checkpoint.state.of_each_rank import uses_all
from ddpjob.group import gather


class Reader:
    """Data reader with state_dict() and load_state_dict(), like torchdata's StatefulDataLoader."""

    def __init__(self, shard: int) -> None:
        self.state: dict[str, Any] = {"shard": shard, "place": 0}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


class Centred(torch.nn.Module):
    """Model with a buffer, and with a part that each rank trains alone."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.own = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
        self.register_buffer("centre", torch.zeros(2))


class Shifted(torch.nn.Linear):
    """Model with a buffer that its forward pass uses and changes."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.add_(x.detach().mean())
        return super().forward(x - self.mean)


class System(torch.nn.Module):
    """Model that wraps its own part in DDP."""

    def __init__(self, inside: torch.nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("saved", ["module", "wrapper", "system"])
@pytest.mark.parametrize("call", ["module", "wrapper", "system", "copy", "evaluation", "module with a constant"])
def test_a_model_that_is_trained_without_its_wrapper_is_named(
    run_ranks: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], call: str, saved: str
) -> None:
    """A call of the module without DDP changes the buffers of each rank, but the snapshot has only those of rank 0."""

    def train(world: Any, snapshot: ddpjob.Snapshot) -> None:
        module: torch.nn.Module = Shifted()
        if call == "module with a constant":
            module = torch.nn.Linear(1, 1)
            module.register_buffer("mask", torch.ones(1))
        model = DistributedDataParallel(module)
        own = {"module": module, "wrapper": model, "system": System(model), "copy": copy.deepcopy(module)}
        snapshot.load(model=own[saved])
        for _ in range(2):
            with torch.set_grad_enabled(call != "evaluation"):
                own.get(call, module)(torch.ones(1, 1))
            model(torch.ones(1, 1)).sum().backward()

    in_ranks(run_ranks, tmp_path, "meet", 2, train)
    assert capfd.readouterr().err.count("model: called without its Dist") == int(call == "module")


def test_a_model_can_be_exported_after_its_first_steps(run_ranks: Any, tmp_path: Path) -> None:
    """A pickle of the whole model must be readable without this library, and torch.jit.script refuses its hooks."""

    def export(world: Any, snapshot: ddpjob.Snapshot) -> bool:
        module = torch.nn.BatchNorm1d(1)
        model, optimizer = DistributedDataParallel(module), torch.optim.SGD(module.parameters(), lr=0.1)
        snapshot.load(model=model, optimizer=optimizer)
        for _ in range(20):
            model(torch.ones(2, 1)).sum().backward()
            optimizer.step()
        return b"ddpjob" in pickle.dumps(module) or torch.jit.script(module) is None

    assert in_ranks(run_ranks, tmp_path, "meet", 1, export) == [False]


def in_ranks(run_ranks: Any, folder: Path, meet: str, world_size: int, body: Callable[[Any, Any], Any]) -> list[Any]:
    """Return the results of `body(world, snapshot)` on each rank."""

    def rank_main(rank: int) -> Any:
        with ddpjob.init(init_method=f"file://{folder}/{meet}", rank=rank, world_size=world_size) as world:
            return body(world, ddpjob.Snapshot(folder / "s", world))

    return run_ranks(rank_main, world_size)  # type: ignore[no-any-return]


def save_readers(world: Any, snapshot: ddpjob.Snapshot) -> None:
    """Save a reader and a generator that differ between ranks, and a value that is equal on all ranks."""
    reader = Reader(world.rank)
    reader.state["place"] = 10 * world.rank + 3
    generator = torch.Generator().manual_seed(world.rank)
    saved(snapshot, 1, reader=reader, drawn=generator.get_state(), lr=0.1)


def test_each_rank_gets_its_own_reader_and_values_back(run_ranks: Any, tmp_path: Path) -> None:
    """Each rank must get its own reader back, because otherwise all ranks read the shard of rank 0."""

    def load(world: Any, snapshot: ddpjob.Snapshot) -> Any:
        reader = Reader(9)
        assert snapshot.load(reader=reader) == 1
        seed = torch.Generator().manual_seed(world.rank).get_state()
        return reader.state, bool(torch.equal(snapshot.state["drawn"], seed)), snapshot.state["lr"]

    in_ranks(run_ranks, tmp_path, "a", 2, save_readers)
    assert in_ranks(run_ranks, tmp_path, "b", 2, load) == [
        ({"shard": 0, "place": 3}, True, 0.1),
        ({"shard": 1, "place": 13}, True, 0.1),
    ]


def test_a_load_with_another_number_of_ranks_is_refused_by_name(run_ranks: Any, tmp_path: Path) -> None:
    """A load with another number of ranks must be refused with the reader's name: positions cannot be divided."""

    def load(world: Any, snapshot: ddpjob.Snapshot) -> str:
        with pytest.raises(
            ddpjob.StateError, match=r"reader: each rank had its own .* by 2 ranks, but there are 3 now"
        ):
            snapshot.load(reader=Reader(9))
        snapshot.load()  # load() without objects checks none
        return str(snapshot.state["lr"])

    in_ranks(run_ranks, tmp_path, "a", 2, save_readers)
    assert in_ranks(run_ranks, tmp_path, "b", 3, load) == ["0.1"] * 3


def test_values_that_are_equal_on_all_ranks_are_saved_once(run_ranks: Any, tmp_path: Path) -> None:
    def save(world: Any, snapshot: ddpjob.Snapshot) -> None:
        optimizer = torch.optim.Adam(torch.nn.Linear(1, 1).parameters())
        saved(snapshot, 1, reader=Reader(7), optimizer=optimizer, loss=float("nan"))

    in_ranks(run_ranks, tmp_path, "a", 2, save)
    (file,) = (tmp_path / "s").glob("step-*.pt")
    assert torch.load(file, weights_only=True)["ranks"] == {}


@pytest.mark.parametrize("buffers", ["sent", "not sent", "joined", "ignored"])
def test_buffers_and_parameters_that_ddp_ignores_belong_to_each_rank(run_ranks, tmp_path, buffers):
    """A rank must get back parameters and buffers that DDP ignores, with their optimizer state. So must BatchNorm in
    `with model.join()`, where DDP broadcasts the last rank's buffers."""

    def made() -> tuple[Any, Any, Any]:
        net = Centred()
        names = ["own.weight", "own.bias", *["centre"][: buffers == "ignored"]]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, names)  # type: ignore[attr-defined]
        model = DistributedDataParallel(net, broadcast_buffers=buffers != "not sent")
        average = torch.optim.swa_utils.AveragedModel(net)
        return model, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), average

    def save(world: Any, snapshot: ddpjob.Snapshot) -> None:
        model, optimizer, average = made()
        for parameter in model.module.parameters():
            parameter.grad = torch.full_like(parameter, float(world.rank))
        optimizer.step()
        model.module.centre.fill_(world.rank)
        with torch.no_grad():
            model.module.own.weight.fill_(world.rank)
        average.update_parameters(model.module)
        optimizer.param_groups[0]["lr"] += world.rank  # some scripts step a scheduler with each rank's own loss
        with model.join(enable=buffers == "joined"):
            saved(snapshot, 1, model=model, optimizer=optimizer, average=average)

    def load(world: Any, snapshot: ddpjob.Snapshot) -> list[float]:
        model, optimizer, average = made()
        snapshot.load(model=model, optimizer=optimizer, average=average)
        net, averaged = model.module, average.module.own.weight
        momentum = optimizer.state[net.own.weight]["momentum_buffer"]
        values = [float(value.flatten()[0]) for value in (net.own.weight, averaged, momentum, net.centre)]
        return [optimizer.param_groups[0]["lr"], *values]

    in_ranks(run_ranks, tmp_path, "a", 2, save)
    of_rank_1 = [1.1, 1.0, 1.0, 1.0, float(buffers != "sent")]
    assert in_ranks(run_ranks, tmp_path, "b", 2, load) == [[0.1, 0.0, 0.0, 0.0, 0.0], of_rank_1]


def test_rows_that_max_norm_changes_on_the_rank_that_reads_them_are_named_and_rank_0s_are_loaded(
    run_ranks: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """`Embedding(max_norm=…)` scales the rows that a rank looks up, so ranks with the same gradients differ. A resume
    with any number of ranks must be possible."""

    def made() -> torch.nn.Module:
        return DistributedDataParallel(torch.nn.Sequential(torch.nn.Embedding(2, 4, max_norm=0.1)))

    def save(world: Any, snapshot: ddpjob.Snapshot) -> None:
        model = made()
        model(torch.tensor([world.rank]))
        saved(snapshot, 1, model=model)

    def load(_: Any, snapshot: ddpjob.Snapshot) -> list[bool]:
        model = made()
        snapshot.load(model=model)
        return (model.module[0].weight.norm(dim=1) <= 0.11).tolist()

    in_ranks(run_ranks, tmp_path, "a", 2, save)
    assert "model: its parameters differ between the ranks: a restart does not give each" in capfd.readouterr().err
    assert in_ranks(run_ranks, tmp_path, "b", 3, load) == [[True, False]] * 3


@pytest.mark.parametrize("keep", [1, 3])
def test_a_file_without_the_reader_of_a_late_rank_is_skipped(run_ranks, tmp_path, capfd, keep):
    """A file without the reader of a rank that was killed just before save(2) must be skipped, and step 1 be loaded."""

    def rank_main(rank: int) -> int:
        with ddpjob.init(init_method=f"file://{tmp_path}/a", rank=rank, world_size=2) as world:
            snapshot = ddpjob.Snapshot(tmp_path / "s", world, keep)
            for step in (1, 2):
                reader = Reader(world.rank)
                reader.state["place"] = step
                if step == 1 or world.is_main:
                    snapshot.save(step, reader=reader)
                snapshot.wait()
                gather.numbers(torch.tensor([step]))
            snapshot.close()
        return 0

    def load(world: Any, snapshot: ddpjob.Snapshot) -> Any:
        reader = Reader(9)
        return snapshot.load(reader=reader), reader.state

    run_ranks(rank_main, 2)
    capfd.readouterr()
    found = in_ranks(run_ranks, tmp_path, "b", 2, load)
    assert found == [(1, {"shard": 0, "place": 1}), (1, {"shard": 1, "place": 1})]
    error = capfd.readouterr().err
    assert "reader: each rank had its own when step 2 was saved" in error
    assert "the snapshot of step 1 is used" in error


@pytest.mark.parametrize("differs", [True, False])
def test_replicas_that_differ_are_named_at_a_save(run_ranks, tmp_path, capfd, differs):
    """A save must warn if parameters differ between ranks, because a restart gives all ranks those of rank 0."""

    def save(world: Any, snapshot: ddpjob.Snapshot) -> None:
        model = world.wrap(torch.nn.Linear(2, 2))
        with torch.no_grad():
            model.module.weight.mul_(1 + world.rank * differs)
        for step in (1, 2):
            saved(snapshot, step, model=model)
            gather.numbers(torch.tensor([step]))
        snapshot.close()

    in_ranks(run_ranks, tmp_path, "a", 2, save)
    said = "model: its parameters differ between the ranks: a restart does not give each rank its own"
    assert capfd.readouterr().err.count(said) == int(differs)


def test_a_load_is_refused_if_no_file_has_the_reader_of_a_late_rank(run_ranks: Any, tmp_path: Path) -> None:
    """If no file has the state of a late rank's reader, the load must be refused, and not start at step 0."""

    def save(world: Any, snapshot: ddpjob.Snapshot) -> None:
        if world.rank < 2:
            snapshot.save(1, reader=Reader(world.rank))
        snapshot.close()

    def load(world: Any, snapshot: ddpjob.Snapshot) -> str:
        with pytest.raises(ddpjob.StateError) as caught:
            snapshot.load(reader=Reader(9))
        return str(caught.value)

    in_ranks(run_ranks, tmp_path, "a", 3, save)
    for text in in_ranks(run_ranks, tmp_path, "b", 3, load):
        assert "reader: each rank had its own when step 1 was saved, but that of rank 2 is not in the snapshot" in text


def test_a_per_rank_state_that_is_too_large_is_named_at_once(run_ranks, tmp_path, capfd):
    """Large values that differ between ranks are not saved for each rank, and the log must say so once."""

    def save(world: Any, snapshot: ddpjob.Snapshot) -> None:
        for step in (1, 2):
            snapshot.save(step, queue=torch.full((2 << 20,), float(world.rank)), same=torch.ones(2 << 20))
        snapshot.close()

    in_ranks(run_ranks, tmp_path, "a", 2, save)
    assert (
        capfd.readouterr().err.count("queue: its state differs between the ranks and has more than 4 MiB: a restart")
        == 1
    )


def test_a_name_that_rank_0_does_not_save_is_named_at_the_save(run_ranks, tmp_path, capfd):
    """The snapshot lacks what only another rank saves, so this rank could never resume."""

    def save(world: Any, snapshot: ddpjob.Snapshot) -> None:
        extra = {"reader": Reader(1), "critic": torch.nn.Linear(1, 1)} if world.rank == 1 else {}
        snapshot.save(1, model=torch.nn.Linear(1, 1), **extra)
        snapshot.close()

    in_ranks(run_ranks, tmp_path, "a", 2, save)
    said = capfd.readouterr().err
    for name in ("reader", "critic"):
        assert f"{name}: rank 1 saves it and rank 0 does not, so it is in no snapshot" in said


def test_only_a_model_in_one_wrapper_uses_all_its_parameters_in_each_backward_pass(
    run_ranks: Any, tmp_path: Path
) -> None:
    """Of a generator and a discriminator saved as one model, each has backward passes of its own."""

    def which(world: Any, _: Any) -> list[bool]:
        one, two = (world.wrap(torch.nn.Linear(1, 1)) for _ in range(2))
        both = torch.nn.ModuleDict({"generator": one, "discriminator": two})
        return [uses_all(each) for each in (one, one.module, both, torch.nn.Linear(1, 1))]

    assert in_ranks(run_ranks, tmp_path, "meet", 1, which) == [[True, True, False, False]]
