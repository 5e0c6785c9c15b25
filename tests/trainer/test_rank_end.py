"""A rank records its DDP modules, and the hooks on these modules cost little."""

import copy
import json
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpjob import process
from ddpjob.reporting import rank_end

Ranks = Callable[[Callable[[int], Any], int], list[Any]]


def left_by(run_ranks: Ranks, path: Path, training: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """Return the result of a training and the record of its rank, which is alone in its group and in a new process."""

    def body(_rank: int) -> Any:
        rank_end.begin(str(path))
        rank_end.watch_ddp(DistributedDataParallel)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        found = training()
        process.current.end.write()
        return found

    [found] = run_ranks(body, 1)
    return found, json.loads(path.read_text())


def trained(passes: int) -> DistributedDataParallel:
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)))
    for _ in range(passes):
        model(torch.ones(2, 4)).sum().backward()
    return model


def test_one_hook_remains_after_the_first_pass_and_none_after_the_module_is_released(run_ranks, tmp_path):
    def script() -> list[list[int]]:
        counts = [[len(p._backward_hooks or ()) for p in trained(passes).parameters()] for passes in (0, 1, 30)]
        module = trained(3).module
        module(torch.ones(2, 4)).sum().backward()
        counts.append([len(p._backward_hooks or ()) for p in module.parameters()])
        return counts

    none, one, thirty, released = left_by(run_ranks, tmp_path / "end.json", script)[0]
    assert none == [1, 1, 1, 1]
    assert (sum(one), sum(thirty)) == (1, 1)
    assert released == [0, 0, 0, 0]


def test_the_record_of_a_long_training_grows_logarithmically(run_ranks: Ranks, tmp_path: Path) -> None:
    """The record of a long training must grow logarithmically: the last passes, and earlier ones ever more rarely."""
    _, end = left_by(run_ranks, tmp_path / "end.json", lambda: bool(trained(400)))
    numbers = [passes for passes, *_ in end["modules"][0]["passes"]]
    noted = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384]
    assert numbers[: len(noted)] == noted
    assert {*range(370, 401)} <= {*numbers}
    assert len(numbers) <= len(noted) + rank_end.RECENT


def test_a_hook_of_the_script_is_kept_and_does_not_count_twice(run_ranks: Ranks, tmp_path: Path) -> None:
    def script() -> int:
        model = trained(0)
        called: list[int] = []
        for parameter in model.parameters():
            parameter.register_hook(lambda _: called.append(1))
        for _ in range(5):
            model(torch.ones(2, 4)).sum().backward()
        return len(called)

    called, end = left_by(run_ranks, tmp_path / "end.json", script)
    assert called == 20
    assert sorted(passes for passes, *_ in end["modules"][0]["passes"]) == [1, 2, 3, 4, 5]


@pytest.mark.filterwarnings("error")
def test_a_model_can_be_copied_and_sent_to_another_process_while_passes_are_counted(run_ranks, tmp_path):
    """A model must stay copyable and picklable, without a warning, while its backward passes are counted."""

    def script() -> int:
        model = trained(5)
        copied = copy.deepcopy(model.module)
        for parameter in (*model.module.parameters(), *copied.parameters()):
            ForkingPickler.dumps(parameter)
        torch.save(model.module, tmp_path / "model.pt")
        return sum(len(p._backward_hooks or ()) for p in copied.parameters())

    assert left_by(run_ranks, tmp_path / "end.json", script)[0] == 0


def test_a_module_released_before_the_end_is_still_recorded(run_ranks: Ranks, tmp_path: Path) -> None:
    """A module that is released before the end must be recorded, as in a script that trains in a function."""
    kept: list[Any] = []

    def script() -> None:
        kept.append(trained(3))
        trained(3)
        trained(0)

    _, end = left_by(run_ranks, tmp_path / "end.json", script)
    assert [(module["number"], module["names"][0]) for module in end["modules"]] == [(0, "0.weight"), (1, "0.weight")]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(7, dtype=torch.float32)[1:],
        torch.arange(64, dtype=torch.float32).view(8, 8).t(),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones((), dtype=torch.float64),
        torch.ones(3, dtype=torch.complex64),
        torch.ones(3).to(torch.float8_e4m3fn),
        torch.full((9,), float("nan")),
        torch.zeros(0),
        torch.arange(40_001, dtype=torch.float32),
    ],
)
def test_a_tensor_of_any_kind_has_a_checksum_equal_to_that_of_its_copy(tensor: torch.Tensor) -> None:
    [one] = rank_end.checksums(torch, [tensor])
    assert rank_end.checksums(torch, [tensor.clone(), tensor.contiguous()]) == [one, one]


def test_another_value_sign_or_order_changes_the_checksum() -> None:
    """Other values, signs or orders of rows must change the checksum of a matrix."""
    values = torch.arange(1.0, 30_001.0).view(30, 1000)
    changed = values.clone()
    changed[29, 999] += 0.01
    others = [changed, -values, values.flip(0), values.t().contiguous()]
    sums = rank_end.checksums(torch, [values, *others, *(one[:2] for one in (values, -values, values.flip(1)))])
    assert len(set(sums)) == len(sums)
