"""check_replicas(): one bit that differs on one rank is named on all of them, whatever it is in, and nothing hangs."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ddpjob

replicas = importlib.import_module("ddpjob.replicas")


def net(width: int = 3) -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 700))


def flip(tensor: torch.Tensor, element: int = 0, bit: int = 0) -> None:
    """One bit of one element, as faulty memory does it."""
    raw = tensor.detach().view(-1)[element : element + 1].view(torch.uint8)
    raw[bit // 8] ^= 1 << bit % 8


def changed(who: int, how: Callable[[Any], None], made: Callable[[], Any] = net) -> Callable[[int], Any]:
    """A model for each rank, changed on one of them."""

    def of(rank: int) -> Any:
        model = made()
        if rank == who:
            how(model)
        return model

    return of


def every_dtype() -> dict[str, torch.Tensor]:
    """Also what has no elements, no dimension, gaps, a place in the middle of a word, or a lazy conjugate."""
    kinds = (torch.bool, torch.uint8, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.complex64)
    odd = {str(kind): torch.ones(5, dtype=kind) for kind in kinds}
    half_words = torch.zeros(9, dtype=torch.bfloat16)
    return odd | {
        "empty": torch.ones(0, 3),
        "scalar": torch.tensor(7),
        "gaps": torch.arange(24.0).view(4, 6)[:, ::2],
        "half a word in": half_words[1:8],
        "conjugate": torch.ones(3, dtype=torch.complex64).conj(),
        "sparse": torch.eye(3).to_sparse(),
    }


class Unreadable(torch.nn.Module):
    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("the shard is elsewhere")


WORLDS: dict[str, tuple[Callable[[int], Any], str]] = {  # of four ranks; "" = nothing to complain about
    "equal": (lambda rank: net(), ""),
    "every kind of tensor, equal": (lambda rank: every_dtype(), ""),
    "nothing at all": (lambda rank: torch.nn.Identity(), ""),
    "one bit on one rank": (
        changed(3, lambda m: flip(m[2].weight, 1234, bit=22)),
        "parameter 2.weight (float32 [700, 3]) is not the same on all ranks: rank 3 differs from ranks 0, 1, 2. "
        "1 of 9 tensors differs.",
    ),
    "the majority is right where rank 0 is not": (
        changed(0, lambda m: flip(m[0].bias)),
        "parameter 0.bias (float32 [3]) is not the same on all ranks: rank 0 differs from ranks 1, 2, 3.",
    ),
    "without a majority rank 0 is the reference": (
        lambda rank: {"state": [torch.tensor(rank // 2)]},
        "tensor state[0] (int64 []) is not the same on all ranks: ranks 2, 3 differ from ranks 0, 1 (no value has most "
        "ranks: rank 0 is the reference).",
    ),
    "a buffer, with the usual reason": (
        changed(1, lambda m: flip(m[1].running_mean)),
        "buffer 1.running_mean (float32 [3]) is not the same on all ranks: rank 1 differs from ranks 0, 2, 3. 1 of 9 "
        "tensors differs. A BatchNorm's statistics are each rank's own until the next forward pass: use SyncBatchNorm",
    ),
    "another shape": (
        lambda rank: net(4 if rank == 2 else 3),
        "tensor 0 is not the same on all ranks: rank 2 has parameter 0.weight (float32 [4, 2]), ranks 0, 1, 3 have "
        "parameter 0.weight (float32 [3, 2]).",
    ),
    "one tensor more": (
        changed(1, lambda m: m.append(torch.nn.Linear(1, 1))),
        "tensor 6 is not the same on all ranks: rank 1 has parameter 3.weight (float32 [1, 1]), ranks 0, 2, 3 have "
        "buffer 1.running_mean (float32 [3]).",
    ),
    "tensors on one rank only": (
        lambda rank: net() if rank == 0 else torch.nn.Identity(),
        "rank 0 has parameter 0.weight (float32 [3, 2]), ranks 1, 2, 3 have no further tensor.",
    ),
    "a rank that cannot read its tensors does not keep the others waiting": (
        lambda rank: Unreadable() if rank == 2 else net(),
        "rank 2 has tensors that cannot be read: RuntimeError: the shard is elsewhere, ranks 0, 1, 3 have parameter",
    ),
    **{
        f"one bit of {name}": (
            changed(2, lambda tensors, name=name: flip(tensors[name], 1), every_dtype),
            f"tensor {name} (",
        )
        for name, tensor in every_dtype().items()
        if len(tensor.shape) == 1 and tensor.layout is torch.strided and not tensor.is_conj()
    },
}


def said_by(model: Any, **how: Any) -> str:
    try:
        ddpjob.check_replicas(model, **how)
    except ddpjob.ReplicasDifferError as error:
        return str(error)
    return ""


def test_four_ranks_say_the_same_of_each_world(run_ranks, meeting_file):
    def body(rank: int) -> dict[str, str]:
        with ddpjob.init("gloo", init_method=meeting_file, rank=rank, world_size=4):
            return {name: said_by(of(rank)) for name, (of, _) in WORLDS.items()}

    said = run_ranks(body, 4)
    assert said[1:] == said[:1] * 3, "the same error on all ranks"
    for name, (_, wanted) in WORLDS.items():
        assert (wanted in said[0][name]) if wanted else (said[0][name] == ""), name


def test_a_training_of_two_ranks_stays_equal_and_one_that_leaves_ddp_is_caught(run_ranks, meeting_file):
    def body(rank: int) -> list[Any]:
        with ddpjob.init("gloo", init_method=meeting_file, rank=rank, world_size=2) as world:
            model = world.wrap(net())
            optimizer = torch.optim.Adam(model.parameters())
            model(torch.randn(8, 2) + rank).sum().backward()
            optimizer.step()
            said: list[Any] = [said_by(model, buffers=False), said_by(optimizer)]
            said.append(said_by(model))
            if rank == 1:
                model.module[0].weight.data.mul_(1.001)
            try:
                ddpjob.check_replicas(model)
            except ddpjob.ReplicasDifferError as error:
                said += [error.tensor, error.ranks, str(error)]
            with pytest.raises(TypeError, match="not int"):  # on all ranks alike, so it is the caller's
                ddpjob.check_replicas(3)
            return said

    parameters, adam, buffers, *after = run_ranks(body, 2)[1]
    assert (parameters, adam) == ("", "")
    assert "buffers=False" in buffers, "BatchNorm's statistics are each rank's own"
    assert after[:2] == ["0.weight", [1]]
    assert "rank 1 differs from rank 0 (no value has most ranks: rank 0 is the reference)" in after[2]


def test_alone_there_is_nothing_to_compare():
    assert ddpjob.check_replicas(net()) is None


@pytest.mark.parametrize(
    ("a", "b"), [(0, 1), (5, 1029), (0, 4099), (4097, 4098), (1023, 1024)], ids="columns rows rest rest row-end".split()
)
def test_two_elements_that_change_places_are_noticed(a, b):
    """Also x and -x, whose bits differ in the sign alone: the sum of 32-bit words is the same both ways."""
    values = torch.arange(1.0, 4101.0)
    values[a] = -values[b]
    before = replicas._sums(values)
    values[[a, b]] = values[[b, a]]
    assert not torch.equal(replicas._sums(values), before)


def test_each_bit_of_each_element_is_noticed():
    values = torch.arange(2051, dtype=torch.int16)
    before = replicas._sums(values)
    for element in (*range(0, 2051, 97), 2047, 2048, 2050):
        for bit in range(16):
            flip(values, element, bit)
            assert not torch.equal(replicas._sums(values), before), (element, bit)
            flip(values, element, bit)
    assert torch.equal(replicas._sums(values), before)


@pytest.mark.parametrize(
    ("backends", "wanted", "device"),
    [
        ("cpu:gloo,cuda:gloo", "cuda:1", "cpu"),
        ("cpu:gloo,cuda:nccl", "cuda:1", "cpu"),
        ("cuda:nccl", "cuda:1", "cuda:1"),
        ("cuda:nccl", "cpu", "cuda:0"),
    ],
)
def test_what_is_told_to_the_others_is_where_their_backend_takes_it(monkeypatch, backends, wanted, device):
    """All ranks decide alike, also where one has its model on the CPU."""
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: backends)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert replicas.gather.device_for(None, torch.device(wanted)) == torch.device(device)
