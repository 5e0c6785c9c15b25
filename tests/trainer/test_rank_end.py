"""What a rank notes of its DDP modules, and what is left of that when it has noted enough."""

from __future__ import annotations

import json
from collections.abc import Callable
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
    """What a training returns, and what its rank leaves; alone in its group, in a process of its own."""

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


def test_no_hook_is_left_when_the_last_pass_is_noted(
    run_ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of a long training must cost what it costs without ddprun, also after its first minutes."""
    monkeypatch.setattr(rank_end, "PASSES", [1, 2, 4])  # the real ones end at 1,024

    def hooks() -> list[list[int]]:
        parameters = [[*trained(passes).parameters()] for passes in (0, 1, 3, 4, 6)]
        return [[len(parameter._backward_hooks or ()) for parameter in ours] for ours in parameters]

    none, one, three, four, six = left_by(run_ranks, tmp_path / "end.json", hooks)[0]
    assert none == [1, 1, 1, 1]
    assert (sum(one), sum(three)) == (1, 1)
    assert (four, six) == ([0] * 4, [0] * 4)


def test_a_hook_of_the_script_stays_and_does_not_count_twice(
    run_ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_end, "PASSES", [1, 2])

    def script() -> int:
        model = trained(0)
        called: list[int] = []
        for parameter in model.parameters():
            parameter.register_hook(lambda _: called.append(1))
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
        return len(called)

    called, end = left_by(run_ranks, tmp_path / "end.json", script)
    assert called == 12
    assert [passes for passes, *_ in end["modules"][0]["passes"]] == [1, 2]


def test_a_module_is_known_although_it_was_released_before_the_end(run_ranks: Ranks, tmp_path: Path) -> None:
    """Most scripts train in a function: nothing of their model exists when the interpreter exits."""
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
def test_a_tensor_of_any_kind_has_a_checksum_and_its_copy_the_same(tensor: torch.Tensor) -> None:
    [one] = rank_end.checksums(torch, [tensor])
    assert rank_end.checksums(torch, [tensor.clone(), tensor.contiguous()]) == [one, one]


def test_another_value_another_sign_and_another_order_have_other_checksums() -> None:
    """W and -W, or two rows that have changed places, are not the same network."""
    values = torch.arange(1.0, 30_001.0).view(30, 1000)
    changed = values.clone()
    changed[29, 999] += 0.01
    others = [changed, -values, values.flip(0), values.t().contiguous()]
    sums = rank_end.checksums(torch, [values, *others, *(one[:2] for one in (values, -values, values.flip(1)))])
    assert len(set(sums)) == len(sums)
