"""check_replicas() reports a different bit of one rank on all ranks, wherever the bit is, and never hangs."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ddpjob

replicas = importlib.import_module("ddpjob.checkpoint.state.replicas")


def net(width: int = 3) -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 700))


def flip(tensor: torch.Tensor, element: int = 0, bit: int = 0) -> None:
    """Flip one bit of one element, as faulty memory does."""
    raw = tensor.detach().view(-1)[element : element + 1].view(torch.uint8)
    raw[bit // 8] ^= 1 << bit % 8


def changed(who: int, how: Callable[[Any], None], made: Callable[[], Any] = net) -> Callable[[int], Any]:
    """Return a function that makes the model of a rank; the model of rank `who` is changed."""

    def of(rank: int) -> Any:
        model = made()
        if rank == who:
            how(model)
        return model

    return of


def every_dtype() -> dict[str, torch.Tensor]:
    """Yield tensors of all dtypes: some without elements or dimensions, with gaps, at odd offsets, or lazily
    conjugated."""
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


WORLDS: dict[str, tuple[Callable[[int], Any], str]] = {  # the expected error; "" if the ranks are equal
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


def test_four_ranks_agree_on_the_result_for_each_case(run_ranks, meeting_file):
    def body(rank: int) -> dict[str, str]:
        with ddpjob.init("gloo", init_method=meeting_file, rank=rank, world_size=4):
            return {name: said_by(of(rank)) for name, (of, _) in WORLDS.items()}

    said = run_ranks(body, 4)
    assert said[1:] == said[:1] * 3, "the same error on all ranks"
    for name, (_, wanted) in WORLDS.items():
        assert (wanted in said[0][name]) if wanted else (said[0][name] == ""), name


def test_a_training_of_two_ranks_stays_equal_and_one_that_bypasses_ddp_is_caught(run_ranks, meeting_file):
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
            with pytest.raises(TypeError, match="not int"):  # raised on all ranks, because all pass an int
                ddpjob.check_replicas(3)
            return said

    parameters, adam, buffers, *after = run_ranks(body, 2)[1]
    assert (parameters, adam) == ("", "")
    assert "buffers=False" in buffers, "BatchNorm's statistics are each rank's own"
    assert after[:2] == ["0.weight", [1]]
    assert "rank 1 differs from rank 0 (no value has most ranks: rank 0 is the reference)" in after[2]


def test_a_single_rank_has_nothing_to_compare():
    assert ddpjob.check_replicas(net()) is None


CHANGES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {  # words: tensor elements as int32
    "signs": lambda draw, words: words ^ (some(draw, words) * torch.tensor(-(2**31), dtype=torch.int32)),
    "one bit in several words": lambda draw, words: words ^ (some(draw, words) << draw(st.integers(0, 30))),
    "several bits in several words": lambda draw, words: words ^ (some(draw, words) * draw(st.integers(1, 2**31 - 1))),
    "places": lambda draw, words: words[torch.randperm(len(words), generator=dice(draw))],
    "two halves": lambda draw, words: words.roll(len(words) // 2),
    "turned round": lambda draw, words: words.flip(0),
    "all bits": lambda draw, words: ~words,
    "rows": lambda draw, words: turned(words, draw(st.sampled_from((2, 3, 4, 8, 64)))),
    "as floats": lambda draw, words: (-words.view(torch.float32)).view(torch.int32),
    "as doubles": lambda draw, words: (-words[: len(words) // 2 * 2].view(torch.float64)).view(torch.int32),
    "added and taken away": lambda draw, words: words + some(draw, words) - some(draw, words),
    "a rectangle": lambda draw, words: rectangle(draw, words),
}


def dice(draw: Any) -> torch.Generator:
    return torch.Generator().manual_seed(draw(st.integers(0, 2**32)))


def some(draw: Any, words: torch.Tensor) -> torch.Tensor:
    """Return a tensor with 1 for each word to change and 0 for the others: for few, half or all of the words."""
    chosen = torch.rand(len(words), generator=dice(draw)) < draw(st.sampled_from((0.01, 0.5, 1.0)))
    return chosen.int()


def turned(words: torch.Tensor, columns: int) -> torch.Tensor:
    """Reverse the order of the rows of the matrix with this many columns. Return the elements as int32 words."""
    whole = len(words) // columns * columns
    return torch.cat([words[:whole].view(-1, columns).flip(0).reshape(-1), words[whole:]])


def rectangle(draw: Any, words: torch.Tensor) -> torch.Tensor:
    """Change four elements in two rows and two columns of the matrix, without a change of any sum."""
    columns = draw(st.sampled_from((2, 4, 32, 64, 1024)))
    if len(words) < 2 * columns:
        return words
    changed, by = words.clone(), draw(st.integers(1, 2**31 - 1))
    top, left = columns * draw(st.integers(0, len(words) // columns - 2)), draw(st.integers(0, columns - 2))
    for place, sign in (
        (top + left, 1),
        (top + left + 1, -1),
        (top + columns + left, -1),
        (top + columns + left + 1, 1),
    ):
        changed[place] += sign * by
    return changed


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@given(data=st.data())
@settings(deadline=None)
def test_any_change_of_one_or_several_words_changes_the_checksum(change, data):
    """Any change of one or several words must change the checksum, also changes that sums of rows and columns miss."""
    count = data.draw(st.one_of(st.integers(1, 200), st.sampled_from((1024, 4096, 65_536, 300_001))))
    kind = data.draw(st.sampled_from(("random", "equal", "positive")))
    words = torch.randint(-(2**31), 2**31 - 1, (count,), generator=dice(data.draw)).int()
    words = {"random": words, "equal": words[:1].expand(count).clone(), "positive": words.abs()}[kind]
    other = change(data.draw, words)
    here = words[: len(other)]
    assert torch.equal(replicas.bit_sum(here), replicas.bit_sum(other)) == torch.equal(here, other)


@pytest.mark.parametrize("shape", [(64, 64), (64, 32), (1024, 1024), (3, 1), (2,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_weights_with_the_opposite_sign_differ(shape, dtype):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype)
    for those in (values, values.abs().to(dtype)):
        assert not torch.equal(replicas.bit_sum(those), replicas.bit_sum(-those))


def test_a_rank_whose_weights_have_the_opposite_sign_is_named(run_ranks, meeting_file):
    def body(rank: int) -> str:
        with ddpjob.init("gloo", init_method=meeting_file, rank=rank, world_size=3):
            torch.manual_seed(7)
            model = torch.nn.Linear(64, 64)
            if rank == 1:
                model.weight.data.neg_()
            return said_by(model)

    for said in run_ranks(body, 3):
        assert (
            "parameter weight (float32 [64, 64]) is not the same on all ranks: rank 1 differs from ranks 0, 2" in said
        )


NOT_PLAIN: dict[str, Callable[[], torch.Tensor]] = {
    "meta": lambda: torch.ones(2, device="meta"),
    "subclass": lambda: torch.ones(2).as_subclass(type("Own", (torch.Tensor,), {})),
    "layout mkldnn": lambda: torch.ones(2, 2).to_mkldnn(),
}


@pytest.mark.parametrize("made", NOT_PLAIN.values(), ids=NOT_PLAIN)
@pytest.mark.parametrize("on", [(0, 1), (1,)], ids=["on all ranks", "on one rank"])
def test_a_tensor_without_plain_bits_is_refused_on_every_rank_and_none_waits(end_ranks, meeting_file, made, on):
    def body(rank: int) -> None:
        with ddpjob.init("gloo", init_method=meeting_file, rank=rank, world_size=2):
            ddpjob.check_replicas({"first": torch.ones(2), "second": made() if rank in on else torch.ones(2)})

    for outcome in end_ranks(body, 2, 30):
        assert outcome.error.startswith("StateError" if len(on) == 2 else "ReplicasDifferError"), outcome
        assert "second" in outcome.error


def test_a_change_of_any_bit_of_any_element_is_noticed():
    values = torch.arange(2051, dtype=torch.int16)
    before = replicas.bit_sum(values)
    for element in (*range(0, 2051, 97), 2047, 2048, 2050):
        for bit in range(16):
            flip(values, element, bit)
            assert not torch.equal(replicas.bit_sum(values), before), (element, bit)
            flip(values, element, bit)
    assert torch.equal(replicas.bit_sum(values), before)


@pytest.mark.parametrize(
    ("backends", "wanted", "device"),
    [
        ("cpu:gloo,cuda:gloo", "cuda:1", "cpu"),
        ("cpu:gloo,cuda:nccl", "cuda:1", "cpu"),
        ("cuda:nccl", "cuda:1", "cuda:1"),
        ("cuda:nccl", "cpu", "cuda:0"),
    ],
)
def test_checksums_are_sent_on_the_device_of_the_backend(monkeypatch, backends, wanted, device):
    """All ranks must send checksums on the same device, even if one rank has its model on the CPU."""
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: backends)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert replicas.gather.device_for(None, torch.device(wanted)) == torch.device(device)
