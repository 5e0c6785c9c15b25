"""Find what each rank has of its own among the objects that `save` is given, keep it per rank, and give it back.

Ranks of DistributedDataParallel hold the same parameters, and rank 0's buffers count. Each rank may have its own of

    an object, such as a reader of its shard of the data
    buffers of a model that DistributedDataParallel does not broadcast
    parameters that it is told to ignore, and the optimizer's state of these

Each rank sends these to rank 0, which compares them with its own when it writes the file. What differs is in the file
under the rank's number. A resume at another number of ranks is refused then, because nobody's state would be right.
"""

import contextlib
import gc
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpjob.checkpoint import packed
from ddpjob.checkpoint.alike import digest
from ddpjob.checkpoint.state_dicts import copied, state_of, unwrapped
from ddpjob.errors import StateError

BYTES_MAX = 4 << 20
"""Of one object of one rank: it is sent through the store of the group."""
_SUM = "\0ddpjob sum"
NUMBERS = int, float, bool, str, type(None)
_wrappers: "weakref.WeakKeyDictionary[torch.nn.Module, Any]" = weakref.WeakKeyDictionary()


def sends_buffers(value: torch.nn.Module) -> bool:
    """True if DistributedDataParallel sends rank 0's buffers of this model to all ranks before each forward pass."""
    inside = [each for each in value.modules() if isinstance(each, DistributedDataParallel)]
    wrappers = inside or [each for each in [_wrapper_of(_uncompiled(value))] if each is not None]
    return bool(wrappers) and all(each.broadcast_buffers for each in wrappers)


def _wrapper_of(module: torch.nn.Module) -> Any:
    """The wrapper of a model that a script saves without it; None if there is none."""
    found = _wrappers.get(module)
    if found is None or (found is not _none and found() is None):  # the search takes a tenth of a second
        wrappers = (each for each in gc.get_objects() if type(each) is DistributedDataParallel)
        wrapper = next((each for each in wrappers if _uncompiled(each.module) is module), None)
        found = _wrappers[module] = _none if wrapper is None else weakref.ref(wrapper)
    return found()


def _none() -> None:
    """A model that nobody has wrapped."""


def _uncompiled(module: Any) -> Any:
    """The module that torch.compile has made another one of."""
    return getattr(module, "_orig_mod", module)


def ignored(module: torch.nn.Module) -> list[str]:
    """Names of parameters that DistributedDataParallel is told to ignore, and that are trained."""
    names = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    return [key for key, each in module.named_parameters() if key in names and each.requires_grad] if names else []


def parts(state: Mapping[str, Any]) -> dict[str, Any]:
    """What this rank may have of its own, by the names of `save`."""
    models = {name: unwrapped(value) for name, value in state.items() if isinstance(value, torch.nn.Module)}
    of_rank = {id(module.get_parameter(key)) for module in models.values() for key in ignored(module)}
    found: dict[str, Any] = {}
    for name, value in state.items():
        if name in models:
            own: Any = dict(_of_model(value))
        elif isinstance(value, torch.optim.Optimizer):
            own = _of_optimizer(value, of_rank) if of_rank else {}
        else:
            own = {"": state_of(value)}
        if own:
            found[name] = _collected(own, name)
    return found


def _collected(own: dict[Any, Any], name: str) -> dict[Any, Any]:
    """A copy that is sent to rank 0; of much only a sum, which shows whether ranks differ."""
    with contextlib.suppress(StateError):  # what cannot be packed is not large, or cannot be copied either
        if packed.pack(own).size > BYTES_MAX:
            return {_SUM: packed.total(packed.tensors_of(own))}
    return dict(copied(own, name))


def _of_model(value: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    module = unwrapped(value)
    parameters, own = dict(module.named_parameters(remove_duplicate=False)), set(ignored(module))
    has_own_buffers = any(True for _ in module.buffers()) and not sends_buffers(value)
    for key, tensor in module.state_dict().items() if own or has_own_buffers else ():
        if key in own or (has_own_buffers and key not in parameters):
            yield key, tensor


def _of_optimizer(optimizer: torch.optim.Optimizer, of_rank: set[int]) -> dict[Any, Any]:
    """Its state of these parameters, by their number."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    numbers = [number for number, each in enumerate(parameters) if id(each) in of_rank]
    state = optimizer.state_dict()["state"]
    return {number: state[number] for number in numbers if number in state}


def differing(of_0: Mapping[str, Any], others: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """By rank what it has of its own, of the names of which not all ranks have the same; empty if all have. Raises
    StateError if that is too much to be kept."""
    own = {name: digest(value) for name, value in of_0.items()}
    names = sorted(
        {
            name
            for parts in others.values()
            for name in parts.keys() | own.keys()
            if own.get(name) != _digest(parts, name)
        }
    )
    for name in names:
        if any(_SUM in parts.get(name, {}) for parts in (of_0, *others.values())):
            raise StateError(f"{name}: each rank has its own, and one has more than {BYTES_MAX >> 20} MiB")
    return {rank: {name: parts[name] for name in names if name in parts} for rank, parts in others.items() if names}


def _digest(parts: Mapping[str, Any], name: str) -> str | None:
    return digest(parts[name]) if name in parts else None


def of_this_rank(document: Mapping[str, Any], rank: int, world_size: int, where: str) -> dict[str, Any]:
    """The state in a file as this rank has saved it. Raises StateError if that is known of no rank with this number."""
    state, own = dict(document["state"]), document.get("own", {})
    if document["world_size"] == world_size:
        if own and rank and rank not in own:
            raise StateError(f"{where}: ranks have their own {_named(own)}, and rank {rank} has not saved its own.")
        return state | {name: _joined(state[name], parts) for name, parts in own.get(rank, {}).items()}
    if any(not _is_number(parts) for each in own.values() for parts in each.values()):
        raise StateError(
            f"{where}: ranks have their own {_named(own)}, and {document['world_size']} ranks have saved it, now there "
            f"are {world_size}. Start as many ranks as have saved it."
        )
    return state  # a number, such as the last loss, is rank 0's


def _named(own: Mapping[int, Mapping[str, Any]]) -> str:
    return ", ".join(sorted({name for parts in own.values() for name in parts}))


def _is_number(parts: Any) -> bool:
    return "" in parts and isinstance(parts[""], NUMBERS)


def told(own: Mapping[int, Mapping[str, Any]]) -> str:
    """Names of what no other number of ranks can go on from."""
    return _named(
        {rank: {name: each for name, each in parts.items() if not _is_number(each)} for rank, parts in own.items()}
    )


def _joined(state: Any, parts: Any) -> Any:
    if "" in parts:
        return parts[""]
    if "param_groups" in state:
        return {**state, "state": {**state["state"], **parts}}
    joined = state.copy()  # an OrderedDict with the versions of its modules
    joined.update(parts)
    return joined
