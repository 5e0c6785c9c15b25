"""A snapshot restores every accepted value unchanged. Any other value is refused by name when it is saved."""

import collections
import copy
import enum
import math
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_node import saved

import ddpjob
from ddpjob.checkpoint.state import state_dicts

DTYPES = sorted({kind for name in dir(torch) if isinstance(kind := getattr(torch, name), torch.dtype)}, key=str)


class Subclass(torch.Tensor):
    pass


class Words(str):
    __slots__ = ()


class Colour(enum.IntEnum):
    RED = 1


Pair = collections.namedtuple("Pair", "a b")


def itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


NOT_READ_BACK: dict[str, Any] = {
    "a subclass of Tensor": torch.ones(2).as_subclass(Subclass),
    "a parameter that has no values yet": torch.nn.UninitializedParameter(),
    "a tensor on the meta device": torch.ones(2, device="meta"),
    "a layout of one CPU's": torch.ones(2, 2).to_mkldnn(),
    "an array": np.zeros(3),
    "a number of numpy": np.int64(3),
    "a boolean of numpy": np.bool_(True),
    "a set": {1},
    "a frozen set": frozenset([1]),
    "a function": deep,
    "a lambda": lambda: 1,
    "an object": object(),
    "a class": Path,
    "a path": Path("a"),
    "a named tuple": Pair(1, 2),
    "a default dict": collections.defaultdict(list),
    "a read-only dict": types.MappingProxyType({}),
    "an enumeration": Colour.RED,
    "a subclass of str": Words("a"),
    "bytes that can change": bytearray(b"a"),
    "no bytes": b"",
    "a number of 2,040 bits": 2**2040,
    "a range": range(3),
    "what contains itself": itself(),
    "nesting without an end": deep(200),
    "a complex number": 1j,
    "an ellipsis": ...,
    "a module": torch.nn.Linear(1, 1),
}


@pytest.mark.parametrize("value", NOT_READ_BACK.values(), ids=NOT_READ_BACK)
@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: {"a": [1, (v,)]}], ids=["bare", "inside"])
def test_a_value_that_would_be_restored_differently_is_refused_by_name_and_nothing_is_written(tmp_path, value, wrap):
    with pytest.raises(ddpjob.StateError, match=r"extra.*cannot be saved"):
        ddpjob.Snapshot(tmp_path).save(1, extra={"rates": wrap(value)})
    assert not list(tmp_path.glob("*.pt"))


@pytest.mark.parametrize("key", [torch.ones(1), (1, torch.ones(1)), Path("a"), Pair(1, 2)], ids=str)
def test_a_key_that_cannot_be_restored_is_refused(key):
    with pytest.raises(ddpjob.StateError, match="extra key"):
        state_dicts.copied({key: 1}, "extra")


def test_the_message_names_the_place_of_the_value_and_what_to_save_instead(tmp_path):
    with pytest.raises(
        ddpjob.StateError, match=r"extra\.rates\[1\]: a numpy\.ndarray cannot be saved.*Save tensors, num"
    ):
        ddpjob.Snapshot(tmp_path).save(1, extra={"rates": [1.0, np.zeros(3)]})


# ---- whatever is accepted comes back ---------------------------------------------------------------------------


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Generate tensors of any dtype, shape, layout and offset, with arbitrary bits (also NaN)."""
    dtype = draw(st.sampled_from([kind for kind in DTYPES if state_dicts.tensor_is_read(kind)]))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    bits = draw(st.binary(min_size=size, max_size=size)) if dtype != torch.bool else bytes(size)
    tensor = torch.frombuffer(bytearray(bits), dtype=torch.uint8).view(dtype) if size else torch.empty(0, dtype=dtype)
    tensor = tensor.reshape(shape)
    how = draw(st.sampled_from(("as it is", "transposed", "expanded", "sparse", "parameter", "conjugate")))
    if how == "transposed":
        return tensor.transpose(0, -1) if shape else tensor
    if how == "expanded":
        return tensor.unsqueeze(0).expand(3, *shape)
    if how == "sparse" and dtype in (torch.float32, torch.float64, torch.int64):
        return tensor.to_sparse()
    if how == "parameter" and dtype.is_floating_point:
        return torch.nn.Parameter(tensor)
    return tensor.conj() if how == "conjugate" and dtype.is_complex else tensor


plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.integers(-(2**2039) + 1, 2**2039 - 1),
    st.sampled_from([torch.device("cpu"), torch.device("cuda", 3), torch.Size([1, 2]), float("-0.0")]),
    st.sampled_from([kind for kind in DTYPES if state_dicts.is_read(kind)]),
    st.binary(min_size=1) if state_dicts.is_read(b"a") else st.none(),
)
keys = st.recursive(
    st.one_of(st.text(), st.integers(), st.booleans(), st.none()), lambda k: st.tuples(k, k), max_leaves=3
)
nested = st.recursive(
    st.one_of(plain, tensors()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(collections.OrderedDict),
        st.dictionaries(keys, st.integers(), max_size=3).map(collections.Counter),
    ),
    max_leaves=8,
)


def same(one: Any, other: Any) -> bool:
    """True if both are equal in type, order, sign of zero and every bit. A Parameter comes back as a Tensor."""
    if isinstance(one, torch.Tensor):
        return type(other) is torch.Tensor and _same_tensors(one.detach(), other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return (
            list(one) == list(other) and all(map(same, one, other)) and all(same(one[key], other[key]) for key in one)
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)


def _same_tensors(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
        return False
    return bits_of(one) == bits_of(other)


def bits_of(tensor: torch.Tensor) -> bytes:
    plain = tensor.to_dense() if tensor.layout != torch.strided else tensor
    return bytes(plain.resolve_conj().contiguous().reshape(-1).view(torch.uint8).tolist()) if plain.numel() else b""


@given(state=nested)
@settings(deadline=None)
def test_every_accepted_value_is_restored_equal(tmp_path_factory, state):
    folder = tmp_path_factory.mktemp("s")
    saved(ddpjob.Snapshot(folder), 1, state=state)
    back = ddpjob.Snapshot(folder)
    assert back.load() == 1
    assert same(state, back.state["state"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_of_every_dtype_is_restored_or_refused(tmp_path, dtype):
    try:
        tensor = torch.zeros(16, dtype=torch.uint8).view(dtype)
    except (RuntimeError, TypeError):
        pytest.skip(f"this torch makes no tensor of {dtype}")
    snapshot = ddpjob.Snapshot(tmp_path)
    if not state_dicts.tensor_is_read(dtype):
        with pytest.raises(ddpjob.StateError, match=f"tensor: a tensor of {dtype} cannot be saved"):
            snapshot.save(1, tensor=tensor)
        return
    saved(snapshot, 1, tensor=tensor)
    back = ddpjob.Snapshot(tmp_path)
    back.load()
    assert same(tensor, back.state["tensor"])


def test_a_numpy_float_is_restored_as_a_float():
    assert type(state_dicts.copied(np.float64(0.5), "best")) is float


# ---- objects of torch itself ---------------------------------------------------------------------------------


def test_a_learning_rate_on_a_gpu_is_restored_onto_it() -> None:
    """A learning rate on a GPU (here "meta") must be restored there: on the CPU the last bits of a step differ."""
    on_device, on_host = (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=torch.tensor(0.1)) for _ in range(2))
    schedulers = [torch.optim.lr_scheduler.LambdaLR(each, lambda _: 0.5) for each in (on_device, on_host)]
    group = on_device.param_groups[0]
    group |= {name: group[name].to("meta") for name in ("lr", "initial_lr")}
    schedulers[0].base_lrs = [group["initial_lr"]]
    state = {"optimizer": on_host.state_dict(), "scheduler": schedulers[1].state_dict()}
    state_dicts.restore({"optimizer": on_device, "scheduler": schedulers[0]}, state, "here")
    group = on_device.param_groups[0]
    assert (group["lr"].device.type, group["initial_lr"].device.type) == ("meta", "meta")
    assert schedulers[0].base_lrs[0].device.type == "meta"
    state_dicts.restore({"optimizer": on_host}, {"optimizer": on_host.state_dict()}, "here")
    assert on_host.param_groups[0]["lr"].device.type == "cpu"


def test_nested_settings_on_a_gpu_are_restored_onto_it() -> None:
    """Betas, and initial values of nested schedulers, that are tensors on a GPU must be restored to the GPU."""
    of_torch = torch.optim.lr_scheduler
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=torch.tensor(0.1)) for _ in range(2)]
    on_device, on_host = [
        of_torch.SequentialLR(each, [of_torch.LinearLR(each), of_torch.StepLR(each, 3)], [2]) for each in optimizers
    ]
    for optimizer, place in zip(optimizers, ("meta", "cpu"), strict=True):
        optimizer.param_groups[0]["betas"] = (torch.tensor(0.9, device=place), 0.99)
    for inner in on_device._schedulers:
        inner.base_lrs = [torch.tensor(0.1, device="meta")]
    state = {"optimizer": optimizers[1].state_dict(), "scheduler": on_host.state_dict()}
    state_dicts.restore({"optimizer": optimizers[0], "scheduler": on_device}, state, "here")
    betas = optimizers[0].param_groups[0]["betas"]
    assert (type(betas), betas[0].device.type, betas[1]) == (tuple, "meta", 0.99)
    assert [inner.base_lrs[0].device.type for inner in on_device._schedulers] == ["meta", "meta"]


class Lookahead(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {"fast": super().state_dict(), "slow": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict["slow"] == 1
        super().load_state_dict(state_dict["fast"])


def test_an_optimizer_with_its_own_state_dict_format_is_restored() -> None:
    """An optimizer whose state_dict() has another format, without param_groups, must be restored."""
    one, other = (Lookahead([torch.nn.Parameter(torch.ones(1))], lr=lr) for lr in (0.1, 0.2))
    state_dicts.restore({"optimizer": one}, {"optimizer": other.state_dict()}, "here")
    assert one.param_groups[0]["lr"] == 0.2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("names", [["model", "optimizer"], ["optimizer"]], ids=["at once", "in parts"])
def test_moments_of_another_dtype_than_their_parameter_are_restored_exactly(
    names: list[str], dtype: torch.dtype
) -> None:
    """float32 moments of bfloat16 parameters must not be rounded, also if another call of load() restores the model.
    Those of a parameter that now has another dtype must follow it, as torch does."""

    def made(of: torch.dtype) -> dict[str, Any]:
        model = torch.nn.Linear(4, 1, dtype=of)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.state[model.weight]["moment"] = torch.full((1, 4), 1 / 3)
        return {"model": model, "optimizer": optimizer}

    state = {name: copy.deepcopy(each.state_dict()) for name, each in made(torch.bfloat16).items()}
    objects = made(dtype)
    state_dicts.restore({name: objects[name] for name in names}, state, "here")
    moment = objects["optimizer"].state[objects["model"].weight]["moment"]
    assert moment.dtype is (torch.float32 if dtype is torch.bfloat16 else dtype)
    assert moment.tolist() == torch.full((1, 4), 1 / 3, dtype=torch.float32).tolist()


def optimizers() -> Iterator[type[torch.optim.Optimizer]]:
    for kind in vars(torch.optim).values():
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
            yield kind


def test_a_scheduler_reaches_an_optimizer_that_wraps_another_one_after_a_restart() -> None:
    """After a restart a scheduler must still change the learning rates of an optimizer in PostLocalSGDOptimizer."""
    from torch.distributed.optim import PostLocalSGDOptimizer

    averager = types.SimpleNamespace(step=0, average_parameters=lambda params: None)
    inner = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1.0)
    optimizer = PostLocalSGDOptimizer(inner, averager)  # type: ignore[arg-type,no-untyped-call]
    state = optimizer.state_dict()  # type: ignore[no-untyped-call]
    state_dicts.restore({"optimizer": optimizer}, {"optimizer": state}, "here")
    optimizer.param_groups[0]["lr"] = 0.5
    assert inner.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("kind", list(optimizers()), ids=lambda kind: kind.__name__)
def test_every_optimizer_of_torch_continues_from_a_snapshot(tmp_path, kind):
    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = torch.nn.Linear(3, 2, bias=False)
        return model, kind(model.parameters(), lr=0.1)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(4, 3)).square().sum()
            loss.backward()
            if "Sparse" in kind.__name__:
                model.weight.grad = model.weight.grad.to_sparse()
            return loss

        optimizer.step(closure)

    one, other = made(), made()
    step(*one)
    snapshot = ddpjob.Snapshot(tmp_path)
    snapshot.save(1, model=one[0], optimizer=one[1])
    step(*one)
    snapshot.close()
    ddpjob.Snapshot(tmp_path).load(model=other[0], optimizer=other[1])
    step(*other)
    assert torch.equal(one[0].weight, other[0].weight)


SCHEDULERS = {
    "StepLR": {"step_size": 3},
    "MultiStepLR": {"milestones": [1, 3]},
    "ConstantLR": {},
    "LinearLR": {},
    "ExponentialLR": {"gamma": 0.9},
    "CosineAnnealingLR": {"T_max": 10},
    "ReduceLROnPlateau": {},
    "CyclicLR": {"base_lr": 0.1, "max_lr": 1.0, "cycle_momentum": False},
    "CosineAnnealingWarmRestarts": {"T_0": 3},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 100},
    "PolynomialLR": {},
    "LambdaLR": {"lr_lambda": lambda epoch: 0.9**epoch},
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_of_torch_continues_from_a_snapshot(tmp_path, name):
    def made() -> Any:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        return optimizer, getattr(torch.optim.lr_scheduler, name)(optimizer, **SCHEDULERS[name])

    def step(scheduler: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns because the optimizer makes no step here
            scheduler.step(*([0.5] if name == "ReduceLROnPlateau" else []))

    (optimizer, one), (fresh, other) = made(), made()
    step(one)
    saved(ddpjob.Snapshot(tmp_path), 1, scheduler=one, optimizer=optimizer)
    ddpjob.Snapshot(tmp_path).load(scheduler=other, optimizer=fresh)
    step(one)
    step(other)
    assert one.get_last_lr() == other.get_last_lr()


# ---- back into objects ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "target", "said"),
    [
        (torch.ones(1), torch.zeros(3), r"saved: float32 \[1\]; to be restored: float32 \[3\]"),
        (torch.ones(3, dtype=torch.float64), torch.zeros(3), "saved: float64"),
        (torch.ones(3), torch.zeros(3, dtype=torch.int64), r"saved: float32 \[3\]; to be restored: int64"),
        ([1], torch.zeros(3), "a list was saved"),
        ([1], {"old": 1}, "a list was saved, and cannot fill a dict"),
        (1, 2, "a int cannot be restored in place"),
    ],
)
def test_a_value_of_another_shape_or_type_is_named_and_nothing_is_changed(tmp_path, value, target, said):
    """A value of another shape or type must be named, because copy_ silently repeats rows and truncates values."""
    snapshot, first = ddpjob.Snapshot(tmp_path), torch.zeros(2)
    saved(snapshot, 1, first=torch.ones(2), second=value)
    with pytest.raises(ddpjob.StateError, match=f"second: {said}"):
        ddpjob.Snapshot(tmp_path).load(first=first, second=target)
    assert first.sum() == 0
    assert target == {"old": 1} or not isinstance(target, dict)


# ---- models that are divided among ranks -------------------------------------------------------------------------


def sharded_model(rank: int) -> torch.nn.Module:
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from torch.distributed.tensor import Shard, distribute_tensor
    except ImportError:  # torch before 2.5
        from torch.distributed._tensor import Shard, distribute_tensor
    mesh = init_device_mesh("cpu", (2,))
    model = torch.nn.Linear(8, 1, bias=False)
    model.weight = torch.nn.Parameter(distribute_tensor(torch.arange(8.0).view(1, 8), mesh, [Shard(1)]))
    return model


def test_a_model_sharded_over_ranks_is_refused_on_every_rank_at_once(end_ranks, tmp_path):
    """A model that is sharded over the ranks must be refused on every rank: rank 0's part is not the model."""
    snapshot = ddpjob.Snapshot(tmp_path / "s")
    saved(snapshot, 1, model=torch.nn.Linear(8, 1, bias=False))

    def body(rank: int) -> list[str]:
        said = []
        with ddpjob.init(init_method=f"file://{tmp_path}/meet", rank=rank, world_size=2):
            model = sharded_model(rank)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            snapshot = ddpjob.Snapshot(tmp_path / "s")
            for call in (
                lambda: snapshot.save(2, model=model),
                lambda: snapshot.save(2, optimizer=optimizer),
                lambda: snapshot.load(model=model),
                lambda: ddpjob.check_replicas(model),
                lambda: ddpjob.check_replicas(optimizer.state_dict() | {"weights": model.weight}),
            ):
                with pytest.raises(ddpjob.StateError, match="DTensor") as caught:
                    call()
                said.append(str(caught.value))
        return said

    for outcome in end_ranks(body, 2):
        assert outcome.error == ""
        assert "Use torch.distributed.checkpoint" in outcome.value[0]
    assert len(list((tmp_path / "s").glob("*.pt"))) == 1


def test_fully_sharded_data_parallel_is_refused_before_it_waits_for_the_other_ranks(tmp_path):
    """FSDP must be refused before its state_dict() is called, which would wait for the other ranks."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    shell = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    torch.nn.Module.__init__(shell)  # only a part of FSDP's constructor, because the rest needs a group and a GPU
    snapshot = ddpjob.Snapshot(tmp_path)
    for call in (snapshot.load, lambda model: snapshot.save(1, model=model)):
        with pytest.raises(ddpjob.StateError, match="model: a model in FullyShardedDataParallel"):
            call(model=torch.nn.Sequential(shell))


# ---- a state is checked before anything is changed -----------------------------------------------------------


class Growing(torch.nn.Sequential):
    """Model whose load_state_dict() creates as many layers as the loaded state has."""

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        while len(self) < len({key.partition(".")[0] for key in state_dict}):
            self.append(torch.nn.Linear(2, 2))
        return super().load_state_dict(state_dict, *args, **kwargs)


def test_a_state_that_does_not_fit_is_named_and_leaves_the_model_unchanged() -> None:
    """A state that does not fit must leave the model unchanged: load_state_dict() raises after changing some layers."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 3))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    other = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 4))
    said = state_dicts.misfit({"model": model}, {"model": other.state_dict()})
    assert said.startswith("model is not as it was: size mismatch for 1.weight")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert state_dicts.misfit({"model": model}, {"model": model.state_dict()}) == ""


def test_a_model_that_can_convert_another_state_gets_it() -> None:
    """A state of other sizes must be accepted if the model's own load_state_dict() can convert it."""
    model, other = (Growing(*[torch.nn.Linear(2, 2) for _ in range(count)]) for count in (1, 3))
    assert state_dicts.misfit({"model": model}, {"model": other.state_dict()}) == ""
    assert len(model) == 1, "it was tried in a copy"


def test_the_state_of_an_optimizer_of_other_parameters_is_refused() -> None:
    one, other = (torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1) for _ in range(2))
    assert state_dicts.misfit({"optimizer": one}, {"optimizer": other.state_dict()}) == ""
    other.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    assert state_dicts.misfit({"optimizer": one}, {"optimizer": other.state_dict()}) == (
        "optimizer is not as it was: the saved state has 3 parameters in 2 groups, "
        "this optimizer 2 parameters in 1 group"
    )


def test_a_snapshot_of_another_model_is_reported_as_such():
    """A snapshot of another model must be reported with the folder's name, not only as `size mismatch for weight`."""
    saved = {"model": torch.nn.Linear(2, 3).state_dict()}
    said = r"^/runs/step-300 holds another model: size mismatch for weight.*; give this run another folder\.$"
    with pytest.raises(ddpjob.StateError, match=said):
        state_dicts.restore({"model": torch.nn.Linear(2, 4)}, saved, "/runs/step-300")
    more = torch.optim.SGD([torch.zeros(1), torch.zeros(1)], 0.1)
    saved = {"optimizer": torch.optim.SGD([torch.zeros(1)], 0.1).state_dict()}
    with pytest.raises(ddpjob.StateError, match=r"^/runs/step-300 holds another optimizer: loaded state dict"):
        state_dicts.restore({"optimizer": more}, saved, "/runs/step-300")


def test_the_state_of_another_kind_of_optimizer_is_reported_as_such():
    """The state of another class of optimizer must be refused: torch accepts it, and the first step raises KeyError."""
    sgd, adam = torch.optim.SGD([torch.zeros(1)], 0.1), torch.optim.Adam([torch.zeros(1)])
    torch.optim.lr_scheduler.StepLR(adam, 3)  # a scheduler adds initial_lr to the groups
    older = adam.state_dict()
    for name in ("fused", "foreach", "initial_lr"):  # torch itself adds settings that an older optimizer lacked
        del older["param_groups"][0][name]
    state_dicts.restore({"optimizer": adam}, {"optimizer": older}, "/runs/step-300")
    said = (
        r"^/runs/step-300 holds another optimizer: loaded state dict has no betas, eps; give this run another folder\.$"
    )
    with pytest.raises(ddpjob.StateError, match=said):
        state_dicts.restore({"optimizer": adam}, {"optimizer": sgd.state_dict()}, "/runs/step-300")
