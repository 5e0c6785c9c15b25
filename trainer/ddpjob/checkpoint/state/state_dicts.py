"""Copy the values that `Snapshot` can save to the CPU, and restore them into the objects.

Values are accepted by exact type, because otherwise a value that cannot be read back would be noticed only after a
crash. The dtypes that torch.load reads with weights_only=True depend on its version (2.4 reads neither bytes nor
torch.uint16), so each dtype is tried. `replicas` also uses `not_whole` and `sharded`.
"""

import collections
import contextlib
import copy
import functools
import io
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ddpjob.errors import StateError

NESTED_MAX = 100  # maximum nesting of lists; also ends the copy of a list that contains itself
INTEGER_BITS_MAX = 2039  # bits; torch.load(weights_only=True) cannot read longer integers (pickle's LONG4)

_CONSTANT = {float, bool, str, type(None)}
"""Types whose values need no copy, and are always read back. They are copied first, because each step copies some."""
_WHOLE_TYPES = (torch.Tensor, torch.nn.Parameter)
_WHOLE_LAYOUTS = [
    getattr(torch, name) for name in "strided sparse_coo sparse_csr sparse_csc sparse_bsr sparse_bsc".split()
]
_SHARDED = "each rank holds a part of it only. Use torch.distributed.checkpoint for sharded models."
_REMEDY = (
    "it would not be read back (weights_only=True). Save tensors, numbers, strings, and dicts, lists and tuples of "
    "them, no subclasses: dict(value), tuple(value), int(value), value.item() make plain ones."
)


def state_of(value: Any) -> Any:
    """Return the value's state_dict(), without a DDP wrapper; the value itself if it has none."""
    value = unwrapped(value)
    return value.state_dict() if hasattr(value, "state_dict") else value


def unwrapped(value: Any) -> Any:
    """Return the model without its DDP wrapper, so that the keys of its state lack the prefix "module."."""
    return value.module if isinstance(value, DistributedDataParallel) else value


# ---- tensors that are whole --------------------------------------------------------------------------------


def not_whole(tensor: torch.Tensor) -> str:
    """Return the kind of tensor if this rank does not have all its values as plain numbers; else ""."""
    if type(tensor) not in _WHOLE_TYPES:
        return f"a {_type_name(tensor)}"
    if tensor.is_meta:
        return "a tensor on the meta device, which has no values,"
    if tensor.is_quantized:
        return "a quantized tensor"
    if tensor.is_nested or tensor.layout not in _WHOLE_LAYOUTS:
        return f"a tensor of layout {'nested' if tensor.is_nested else str(tensor.layout).removeprefix('torch.')}"
    return ""


def sharded(value: Any) -> str:
    """Return why no rank has the complete model or optimizer, the same text on all ranks; "" if each rank has it.

    Every rank checks this first, because state_dict() of a sharded model waits for all ranks, or returns only a part.
    """
    value = unwrapped(value)
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    if isinstance(value, torch.nn.Module) and any(isinstance(module, fsdp) for module in value.modules()):
        return f"a model in FullyShardedDataParallel: {_SHARDED}"
    for name, tensor in _trained(value):
        if _is_distributed(tensor):
            return f"{name} is a {_type_name(tensor)}: {_SHARDED}"
    return ""


def _trained(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.nn.Module):
        yield from value.named_parameters()
    elif isinstance(value, torch.optim.Optimizer):
        for group in value.param_groups:
            yield from (("a parameter", parameter) for parameter in group["params"])
    elif isinstance(value, torch.Tensor):
        yield "it", value


def refuse_sharded(objects: Mapping[str, Any]) -> None:
    """Raise StateError, on every rank, for sharded objects: each rank holds only a part of such an object."""
    for name, value in objects.items():
        if problem := sharded(value):
            raise StateError(f"{name}: {problem}")


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


# ---- copies ------------------------------------------------------------------------------------------------


def copied(value: Any, where: str, depth: int = 0) -> Any:
    """Return a deep copy on the CPU. Raise StateError for a value that would not be read back as the same type."""
    kind = type(value)
    if kind in (list, tuple) and _CONSTANT.issuperset(map(type, value)):
        return kind(value)
    if depth > NESTED_MAX:
        raise StateError(f"{where[:60]}…: is nested deeper than {NESTED_MAX}, or contains itself, and cannot be saved.")
    if isinstance(value, torch.Tensor):
        return _copied_tensor(value, where)
    if kind in (dict, collections.OrderedDict, collections.Counter):
        return _copied_mapping(value, where, depth)
    if kind in (list, tuple, torch.Size):
        return kind(copied(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value))
    if kind.__module__ == "numpy" and isinstance(value, float):  # schedulers compute with numpy.float64
        return float(value)
    if not _is_plain(value):
        raise StateError(f"{where}: a {_type_name(value)} cannot be saved: {_REMEDY}")
    return value


def _is_plain(value: Any) -> bool:
    """True if torch.load reads this value back. Containers are checked by `copied`."""
    kind = type(value)
    if kind is int:
        return bool(value.bit_length() <= INTEGER_BITS_MAX)
    if kind is bytes:
        return value != b"" and is_read(b"a")  # pickle writes b"" as a call of bytes(), which weights_only refuses
    if kind is torch.dtype:
        return is_read(value)
    return kind in _CONSTANT or kind is torch.device


def _copied_tensor(tensor: torch.Tensor, where: str) -> torch.Tensor:
    if problem := not_whole(tensor):
        remedy = _SHARDED if _is_distributed(tensor) else _REMEDY
        raise StateError(f"{where}: {problem} cannot be saved: {remedy}")
    if not tensor_is_read(tensor.dtype):
        raise StateError(f"{where}: a tensor of {tensor.dtype} cannot be saved: {_REMEDY}")
    return tensor.detach().to("cpu", copy=True)


def _is_distributed(tensor: Any) -> bool:
    """True for DTensor and ShardedTensor. Their modules differ by torch version, and are not imported if unused."""
    return type(tensor).__module__.startswith("torch.distributed")


def _copied_mapping(value: dict[Any, Any], where: str, depth: int) -> Any:
    items = {
        key if type(key) is str else _key(key, where, depth): item
        if type(item) in _CONSTANT
        else copied(item, f"{where}.{key}", depth + 1)
        for key, item in value.items()
    }
    if type(value) is dict:
        return items
    same = type(value)(items)  # for example Counter, the type of MultiStepLR's milestones
    if hasattr(value, "_metadata"):  # `_metadata` has the versions of the modules, which load_state_dict reads
        same._metadata = copied(value._metadata, f"{where} metadata", depth + 1)  # type: ignore[attr-defined]
    return same


def _key(key: Any, where: str, depth: int) -> Any:
    """Return a copy of a dict's key. Raise StateError for a tensor, because a copied tensor is another key."""
    if isinstance(key, torch.Tensor):
        raise StateError(f"{where} key: a {_type_name(key)} cannot be saved as a key: {_REMEDY}")
    if type(key) is tuple:
        return tuple(_key(part, where, depth) for part in key)
    return copied(key, f"{where} key", depth + 1)


# ---- what this torch reads back ------------------------------------------------------------------------------


@functools.cache
def tensor_is_read(dtype: torch.dtype) -> bool:
    try:
        return is_read(torch.zeros(16, dtype=torch.uint8, device="cpu").view(dtype).to("cpu", copy=True))
    except (RuntimeError, TypeError):  # torch cannot copy dtypes of less than a byte
        return False


@functools.cache
def is_read(value: torch.dtype | bytes | torch.Tensor) -> bool:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        back = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception:
        return False
    return type(back) is type(value) and (isinstance(value, torch.Tensor) or bool(back == value))


# ---- the way back --------------------------------------------------------------------------------------------


def restore(objects: Mapping[str, Any], state: Mapping[str, Any], where: str) -> None:
    """Load a state into the objects. where: the file or memory that the state comes from, for error messages.

    Raises StateError. Most errors are found before anything is changed.
    """
    missing = sorted(set(objects) - set(state))
    if missing:
        raise StateError(f"{where}: has no {', '.join(missing)}; it has {', '.join(sorted(state)) or 'nothing'}.")
    targets = {name: unwrapped(target) for name, target in objects.items()}
    for name, target in targets.items():
        if problem := _does_not_fit(target, state[name]):
            raise StateError(f"{where}: {name}: {problem}")
    for name, target in targets.items():
        _restore_named(name, target, state[name], where)
    _restore_dtypes(targets, state)


def _restore_named(name: str, target: Any, saved: Any, where: str) -> None:
    try:
        _restore_one(target, saved)
    except (RuntimeError, ValueError) as error:
        problem = str(error)
        if problem.startswith("Error(s) in loading state_dict"):
            problem = _first_difference(error)
        elif not problem.startswith("loaded state dict "):  # a ValueError of Optimizer.load_state_dict
            raise
        raise StateError(f"{where} holds another {name}: {problem}; give this run another folder.") from error


def _restore_dtypes(targets: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Undo a cast of an optimizer's load_state_dict(), which would round float32 moments of a bfloat16 parameter.

    It converts the state of a parameter to the parameter's dtype (torch 2.13.0, torch/optim/optimizer.py,
    `_process_value_according_to_param_policy`). If no model was saved with such a parameter, its dtype was another one,
    and the cast stays. The model may be loaded by another call.
    """
    models = [each for each in state.values() if isinstance(each, Mapping) and "param_groups" not in each]
    saved = {(v.dtype, v.shape) for each in models for v in each.values() if isinstance(v, torch.Tensor)}
    for name, target in targets.items():
        if not isinstance(target, torch.optim.Optimizer) or "param_groups" not in state[name]:
            continue
        numbered = dict(enumerate(p for group in target.param_groups for p in group["params"]))
        for number, values in state[name]["state"].items():
            parameter = numbered.get(number)
            if parameter is None or (parameter.dtype, parameter.shape) not in saved:
                continue
            own = target.state.get(parameter) or {}  # ZeroRedundancyOptimizer has None for those of other ranks
            for key, now in own.items():
                value = values.get(key)
                if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
                    own[key] = value.to(now.device, copy=True)


def _first_difference(error: Exception) -> str:
    """Return the first line of load_state_dict()'s error message after the heading."""
    lines = str(error).strip().splitlines()
    return lines[min(1, len(lines) - 1)].strip()[:200].rstrip(".") if lines else type(error).__name__


def without_copies(objects: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """Replace loaded tensors of models and optimizers by the objects' own tensors, to free memory."""
    own = {}
    for name, target in large_of(objects).items():
        with contextlib.suppress(RuntimeError):  # ZeroRedundancyOptimizer cannot return its sharded state
            own[name] = unwrapped(target).state_dict()
    return {**state, **own}


def large_of(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return the models and optimizers."""
    large = (torch.nn.Module, torch.optim.Optimizer)
    return {name: target for name, target in objects.items() if isinstance(target, large)}


def misfit(objects: Mapping[str, Any], state: Mapping[str, Any]) -> str:
    """Return why a model or an optimizer would refuse its state; "" if all would accept it. Nothing is changed.

    Without this check a model's load_state_dict() would raise after it has loaded the keys that fit. A script that then
    continues from another state would keep these parameters.
    """
    for name, target in objects.items():
        if problem := _would_refuse(unwrapped(target), state[name]):
            return f"{name} is not as it was: {problem}"
    return ""


def _would_refuse(target: Any, saved: Any) -> str:
    if isinstance(target, torch.optim.Optimizer):
        own, its = ([len(g["params"]) for g in groups] for groups in (target.param_groups, saved["param_groups"]))
        return "" if own == its else f"the saved state has {_counted(its)}, this optimizer {_counted(own)}"
    if not isinstance(target, torch.nn.Module) or not isinstance(saved, Mapping):
        return ""
    if _shapes(target.state_dict()) == _shapes(saved):
        return ""
    try:
        copy.deepcopy(target).load_state_dict(saved)  # some models convert states of other shapes
    except Exception as error:
        return _first_difference(error)
    return ""


def _counted(groups: list[int]) -> str:
    return f"{sum(groups)} parameters in {len(groups)} group{'s'[: len(groups) > 1]}"


def _shapes(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.shape if isinstance(value, torch.Tensor) and not is_lazy(value) else None
        for key, value in state.items()
    }


def _does_not_fit(target: Any, saved: Any) -> str:
    if hasattr(target, "load_state_dict"):
        return ""  # load_state_dict() itself checks these objects
    if isinstance(target, torch.Tensor):
        if not isinstance(saved, torch.Tensor):
            return f"a {type(saved).__name__} was saved, and cannot be copied into a tensor."
        if (saved.shape, saved.dtype) == (target.shape, target.dtype):
            return ""
        # copy_ would silently broadcast rows, or cut values that do not fit into a smaller type.
        return f"saved: {described(saved)}; to be restored: {described(target)}."
    if isinstance(target, dict):
        return "" if isinstance(saved, dict) else f"a {type(saved).__name__} was saved, and cannot fill a dict."
    return (
        f"a {type(target).__name__} cannot be restored in place. Leave it out of load(): its value is in "
        f"snapshot.state afterwards."
    )


def described(tensor: torch.Tensor) -> str:
    """Return for example "float32 [10, 64]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _restore_one(target: Any, saved: Any) -> None:
    if isinstance(target, torch.optim.Optimizer):
        own = set(getattr(target, "defaults", ())).intersection(*target.param_groups)
        inner: Any = getattr(target, "optim", None)
        shares = getattr(inner, "param_groups", None) is target.param_groups
        target.load_state_dict(_where_they_are({"param_groups": target.param_groups}, saved))
        if shares:  # PostLocalSGDOptimizer would keep its old list of groups, which schedulers change
            target.param_groups = inner.param_groups
        if lacked := own.difference(own.intersection(*target.param_groups)):  # of another class: step() would fail
            raise ValueError(f"loaded state dict has no {', '.join(sorted(lacked))}")
    elif isinstance(target, torch.optim.lr_scheduler.LRScheduler):
        target.load_state_dict(_where_they_are(target, saved))
    elif hasattr(target, "load_state_dict"):
        target.load_state_dict(saved)
    elif isinstance(target, torch.Tensor):
        with torch.no_grad():
            target.copy_(saved)
    else:
        target.clear()
        target.update(saved)


def _where_they_are(own: Any, saved: Any) -> Any:
    """Return the saved value with its tensors moved to the devices of the object's own tensors.

    torch moves the state of a parameter to its device, but not a learning rate. A step with a learning rate on the CPU
    and one on the GPU differ in their last bits.
    """
    if isinstance(own, torch.Tensor) and isinstance(saved, torch.Tensor):
        return saved.to(own.device)
    if isinstance(own, torch.optim.lr_scheduler.LRScheduler):  # SequentialLR has schedulers as attributes
        own = vars(own)
    if type(own) is type(saved) is dict:
        return {key: _where_they_are(own.get(key), value) for key, value in saved.items()}
    if type(own) is type(saved) and type(own) in (list, tuple) and len(own) == len(saved):
        return type(own)(_where_they_are(*pair) for pair in zip(own, saved, strict=True))
    return saved
