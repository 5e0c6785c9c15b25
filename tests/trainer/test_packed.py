"""A state is converted to bytes in memory and back without a change of any bit."""

import collections
import pickle
from typing import Any

import pytest
import torch

from ddpjob.checkpoint.in_memory.kept import Kept, merged
from ddpjob.checkpoint.state import packed
from ddpjob.errors import StateError


def memory_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def there_and_back(value: Any, threads: int = 1) -> Any:
    state = packed.pack(value)
    memory = torch.zeros(state.size, dtype=torch.uint8, device="cpu")
    packed.write(state, memory, threads)
    there, small = packed.in_place(memory), packed.loads(packed.dumps(value))
    assert str(there) == str(packed.own(there)) == str(small)
    return packed.own(there)


def test_tensors_of_any_shape_and_type_are_restored_with_the_same_bits_and_strides() -> None:
    """Tensors must come back with the same bits and strides, because a change of strides slows down each step."""
    values = {
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 3),
        "bf16": torch.randn(3, 5).bfloat16(),
        "bool": torch.tensor([True, False, True]),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "every other": torch.arange(10)[::2],
        "expanded": torch.tensor([7]).expand(4),
        "nan": torch.tensor([float("nan"), -0.0]),
        "large": torch.randn(300, 301),
    }
    back = there_and_back(values)
    for name, value in values.items():
        assert (back[name].dtype, back[name].shape) == (value.dtype, value.shape)
        bits, expected = (tensor.reshape(-1).contiguous().view(torch.uint8) for tensor in (back[name], value))
        assert torch.equal(bits, expected), name
    assert back["channels_last"].stride() == values["channels_last"].stride()
    assert packed.total(packed.tensors_of(back)) == packed.total(packed.tensors_of(values))


def test_another_default_device_of_the_script_has_no_effect() -> None:
    """Packing must use the CPU also after `torch.set_default_device("cuda")`."""
    value = {"x": torch.arange(6.0), "large": torch.randn(300, 301)}
    with torch.device("meta"):
        back = there_and_back(value)
    assert all(map(torch.equal, back.values(), value.values()))


def test_plain_values_keep_their_types() -> None:
    """Plain values must keep their types: a scheduler's milestones are a Counter, which a dict cannot replace."""
    value = {"a": [1, 2.5, None, "x", b"y", (True,)], "c": collections.Counter([3, 3]), "d": torch.float16}
    assert there_and_back(value) == value
    assert type(there_and_back(value)["c"]) is collections.Counter


def test_tied_weights_are_written_once_and_restored_as_one() -> None:
    """Tied weights, for example of a language model, must be written once and come back as one tensor."""
    tied = torch.randn(1000)
    assert packed.pack([tied, tied]).size < 6000
    one, other = there_and_back([tied, tied])
    assert one is other


def test_ten_thousand_tensors_are_restored() -> None:
    values = [torch.full((1 + number % 3,), float(number)) for number in range(10_000)]
    assert torch.equal(torch.cat(there_and_back(values)), torch.cat(values))


@pytest.mark.parametrize("threads", [1, 3])
def test_a_state_of_several_pieces_has_the_same_checksum_with_any_number_of_threads(monkeypatch, threads):
    """The checksum must not depend on the number of threads: nodes may have different numbers of CPUs."""
    monkeypatch.setattr(packed, "PIECE_BYTES", 1 << 18)
    values, before = [torch.randn(300_001), torch.zeros(0), torch.randn(2, 3, 400, 500)], torch.get_num_threads()
    assert all(map(torch.equal, there_and_back(values, threads), values))
    assert packed.total(values, threads) == packed.total(values)
    assert all(map(torch.equal, packed.own(values, threads), values))
    assert torch.get_num_threads() == before


def test_a_small_state_is_packed_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small state must be packed by one thread, because starting threads takes longer than the copy."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(16))
    assert packed.threads(2, 1 << 20) == 1
    assert packed.threads(2, 1500 << 20) == packed.THREADS_MAX
    assert packed.threads(8, 1500 << 20) == 2, "each of eight ranks of a node loads it at the same time"
    assert packed.threads(64, 1500 << 20) == 1


@pytest.mark.parametrize("at", [0, 100, 4000])
def test_a_changed_bit_changes_the_checksum(at: int) -> None:
    """Every changed bit must change the checksum, by which ranks compare their states."""
    state = [torch.randn(40, 100), torch.randn(200_000)]
    before = packed.total(state)
    state[int(at == 4000)].view(-1).view(torch.int32)[at % 4000] ^= 1
    assert packed.total(state) != before


def test_data_that_are_no_state_are_refused_without_running_anything() -> None:
    """Bytes that are no state must be refused without running code, which a pickle could contain."""
    with pytest.raises(StateError):
        packed.in_place(memory_of(bytes(100)))
    body = pickle.dumps((print, []))
    data = len(body).to_bytes(8, "little") + (16 + len(body)).to_bytes(8, "little") + body
    with pytest.raises(StateError, match="not a plain value"):
        packed.in_place(memory_of(data))
    with pytest.raises(StateError, match="not a plain value"):
        packed.loads(body)
    for broken in (b"", body[:3], packed.dumps({"x": torch.ones(4)})[:-6]):
        with pytest.raises(StateError):
            packed.loads(broken)


@pytest.mark.parametrize("wrong", [torch.zeros(2, device="meta"), torch.nested.nested_tensor([torch.zeros(1)])])
def test_a_tensor_without_plain_bytes_is_refused(wrong: torch.Tensor) -> None:
    """A tensor without plain bytes must be refused, so that a restart uses the folder."""
    for packs in (packed.pack, packed.dumps):
        with pytest.raises(StateError, match="kept in memory"):
            packs({"x": wrong})


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(6, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_large_and_small_parts_together_equal_the_state_dicts() -> None:
    """Large and small values together must equal the state_dict() of the objects, as in a file."""
    model, optimizer = model_and_optimizer()
    kept = Kept({"model": model, "optimizer": optimizer, "note": {"best": 0.5}})
    state = merged(there_and_back(kept.large()), there_and_back(kept.buffers() | kept.settings()))
    assert list(state["model"]) == list(model.state_dict())
    assert state["model"]._metadata == model.state_dict()._metadata  # type: ignore[attr-defined]
    assert all(torch.equal(state["model"][key], value) for key, value in model.state_dict().items())
    assert str(state["optimizer"]) == str(optimizer.state_dict())
    assert state["note"] == {"best": 0.5}
    assert kept.by_value == ["note"]


def test_the_small_part_is_that_of_the_boundary_even_if_the_module_has_continued() -> None:
    """Buffers must be those of the end of the step, although the forward pass of the next step changes them."""
    model, optimizer = model_and_optimizer()
    kept = Kept({"model": model, "optimizer": optimizer})
    small = there_and_back(kept.buffers() | kept.settings())
    before = model.state_dict()["1.running_mean"].clone()
    model(torch.randn(6, 4))
    optimizer.param_groups[0]["lr"] = 7.0
    state = merged(there_and_back(kept.large()), small)
    assert torch.equal(state["model"]["1.running_mean"], before)
    assert state["optimizer"]["param_groups"][0]["lr"] == 0.1


def test_a_parameter_changed_without_the_optimizer_is_noticed() -> None:
    """A parameter that changes without an optimizer step must be noticed, because it belongs to no step."""
    model, optimizer = model_and_optimizer()
    kept = Kept({"model": model, "optimizer": optimizer})
    before = kept.watch.versions()
    with torch.no_grad():
        model[0].weight.add_(1)
    assert kept.watch.versions() != before


class OwnStateDict(torch.optim.SGD):
    def state_dict(self) -> Any:
        return {"mine": 1}


def test_an_optimizer_with_its_own_state_dict_is_left_to_the_folder() -> None:
    """An optimizer with its own state_dict() must be refused, because its moments may be of an older step."""
    model, optimizer = model_and_optimizer()
    with pytest.raises(StateError, match="OwnStateDict overrides state_dict"):
        Kept({"optimizer": OwnStateDict(model.parameters(), lr=0.1)})
    kept, usual = Kept({"optimizer": optimizer}), optimizer.state_dict
    optimizer.state_dict = lambda: {**usual(), "mine": 1}  # type: ignore[method-assign]
    with pytest.raises(StateError, match="AdamW overrides state_dict"):
        Kept({"optimizer": optimizer})
    with pytest.raises(StateError, match="AdamW overrides state_dict"):
        kept.settings()
    del optimizer.state_dict  # type: ignore[method-assign]
    optimizer.register_state_dict_post_hook(lambda _, state: state | {"mine": 1})
    with pytest.raises(StateError, match="AdamW has a hook that changes its state_dict"):
        Kept({"optimizer": optimizer})


class Interrupted(torch.optim.SGD):
    """An optimizer that lets another thread run once, before a read of its groups."""

    left, interrupt = -1, staticmethod(lambda: None)

    @property
    def param_groups(self) -> Any:
        self.left -= 1
        if self.left == 0:
            self.interrupt()
        return self.groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.groups = groups


def test_settings_that_two_threads_read_at_once_are_the_present_ones_in_both() -> None:
    """After a failure of another rank, a thread reads the settings. A save meanwhile must not get old ones."""
    optimizer = Interrupted(torch.nn.Linear(4, 8).parameters(), lr=0.1)
    kept, found = Kept({"optimizer": optimizer}), []
    kept.settings()
    optimizer.groups[0]["lr"] = 0.05
    optimizer.left, optimizer.interrupt = 1, lambda: found.append(kept.settings())
    found.append(kept.settings())
    assert {each["optimizer"][0]["lr"] for each in found} == {0.05}
