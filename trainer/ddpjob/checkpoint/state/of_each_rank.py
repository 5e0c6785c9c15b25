"""Collect state that differs between ranks in one file: samplers, random generators, buffers that DDP does not send.

Rank 0 writes its own state. Every other rank sends rank 0 its random state, and a copy of values that may differ. The
file has the copies that do differ under "ranks". Models and optimizers are replicas, so only two parts are compared:
what DistributedDataParallel does not synchronize, and the numbers in an optimizer's settings.
"""

import contextlib
import gc
import io
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpjob import process
from ddpjob.checkpoint.state import packed
from ddpjob.checkpoint.state.alike import digest
from ddpjob.checkpoint.state.state_dicts import copied, state_of, unwrapped
from ddpjob.errors import StateError

OWN_BYTES_MAX = 4 << 20  # limit in bytes for one object of one rank, because the group's store transfers it
SAMPLES, SAMPLED_VALUES = 32, 8  # sampled parameters per model, values of each; few, as another step changes nearly all

CALLS_STEPS = 16  # calls without DDP are searched for in so many first steps of optimizers

WHOLE, KEYS, OPTIMIZER, LARGE = "whole", "keys", "optimizer", "large"
_watched: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # modules whose calls without DDP are logged
_wrappers: "weakref.WeakKeyDictionary[torch.nn.Module, Any]" = weakref.WeakKeyDictionary()


class LateError(StateError):
    """The file lacks a rank's own values, because that rank did not save in time."""


def own(objects: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a copy of each value of save() that may differ between ranks, by name; for a large value its checksum."""
    models = [unwrapped(value) for value in objects.values() if isinstance(value, torch.nn.Module)]
    of_rank = {id(model.get_parameter(name)) for model in models for name in ignored(model)}
    found = {name: _own(name, value, of_rank) for name, value in objects.items()}
    return {name: part for name, part in found.items() if part}


def _own(name: str, value: Any, of_rank: set[int]) -> dict[str, Any]:
    if isinstance(value, torch.optim.Optimizer):
        # as in state_dict(), parameters have the keys 0, 1, 2 …
        numbered = enumerate(p for group in value.param_groups for p in group["params"]) if of_rank else ()
        moments = {n: value.state[p] for n, p in numbered if id(p) in of_rank and p in value.state}
        groups = value.param_groups
        rates = [{key: v for key, v in each.items() if isinstance(v, float | torch.Tensor)} for each in groups]
        return _bounded(name, OPTIMIZER, {"state": moments, "rates": rates})
    if isinstance(value, torch.nn.Module):
        keys = _keys(value)
        state = unwrapped(value).state_dict() if keys else {}
        return _bounded(name, KEYS, {key: state[key] for key in sorted(keys & state.keys())})
    return _bounded(name, WHOLE, state_of(value))


def samples(objects: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return some values of synchronized parameters, by model name. They are equal on ranks at the same step."""
    models = {name: unwrapped(value) for name, value in objects.items() if isinstance(value, torch.nn.Module)}
    found = {}
    for name, model in models.items():
        own = set(ignored(model))
        kept = [p.detach() for key, p in model.named_parameters() if key not in own and p.layout is torch.strided]
        found[name] = [_first_values(each) for each in kept[:: max(1, len(kept) // SAMPLES)]]
    return found


def _first_values(tensor: torch.Tensor) -> str:
    values = tensor.reshape(-1)[:SAMPLED_VALUES].cpu().resolve_conj().resolve_neg().contiguous()
    return values.view(torch.uint8).numpy().tobytes().hex()


def out_of_step(of_0: Mapping[str, Any], others: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of models whose parameters differ between rank 0 and any other rank."""
    return sorted({name for other in others for name in of_0 if other.get(name, of_0[name]) != of_0[name]})


def senders(value: torch.nn.Module) -> list[DistributedDataParallel]:
    """Return the DDP wrappers that broadcast this model's buffers before each forward pass; an empty list if a wrapper
    does not broadcast all its buffers."""
    wrappers = _wrappers_of(value)
    return wrappers if all(each.broadcast_buffers and not _ignores_a_buffer(each) for each in wrappers) else []


def uses_all(value: torch.nn.Module) -> bool:
    """True if each backward pass uses all parameters of this model, because its DDP wrapper waits for all gradients.
    False for a model of several wrappers, which may have backward passes of their own."""
    whole, wrappers = outermost(value), _wrappers_of(value)
    is_wrapped = isinstance(whole, DistributedDataParallel)
    return is_wrapped and not any(each.find_unused_parameters or each.static_graph for each in wrappers)


def _wrappers_of(value: torch.nn.Module) -> list[DistributedDataParallel]:
    inside = [each for each in value.modules() if isinstance(each, DistributedDataParallel)]
    return inside or [each for each in [_wrapper_of(_uncompiled(value))] if each is not None]


def _ignores_a_buffer(wrapper: DistributedDataParallel) -> bool:
    """True if DDP was told to ignore a buffer, so that each rank has its own."""
    return any(name in wrapper.parameters_to_ignore for name, _ in wrapper.module.named_buffers())


def send_those_of_0(wrappers: Collection[DistributedDataParallel]) -> bool:
    """True if rank 0's buffers are broadcast. Inside `with model.join()` DDP sends those of the highest rank that still
    has data (DistributedDataParallel._sync_buffers, torch/nn/parallel/distributed.py, torch 2.13)."""
    return bool(wrappers) and not any(each._join_config.enable for each in wrappers)


def name_calls_without_ddp(objects: Mapping[str, Any]) -> None:
    """Log if the script trains with a model whose buffers DDP broadcasts, but calls it without DDP, as for a gradient
    penalty. Such a call changes the buffers of each rank, and those of other ranks than rank 0 are not saved."""
    for name, value in objects.items():
        inside = value.modules() if isinstance(value, torch.nn.Module) else ()
        for module in [each.module for each in inside if isinstance(each, DistributedDataParallel)] or [value]:
            if isinstance(module, torch.nn.Module) and module not in _watched and any(True for _ in module.buffers()):
                _watched.add(module)
                _CallWatch(name, module)


class _CallWatch:
    """Forward pre-hook of a module. Removes itself after some steps: a module with hooks cannot be compiled by
    torch.jit.script, and a pickle of it cannot be read where this library is missing."""

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self._name, self._id, self._until = name, id(module), process.current.optimizer_steps + CALLS_STEPS
        self._before = ""  # hash of the buffers before a call without DDP
        self._hook = module.register_forward_pre_hook(self)

    def __call__(self, module: torch.nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            return
        is_copy = id(module) != self._id  # a deep copy of a module has its hooks, too
        if is_copy or self._before or process.current.optimizer_steps >= self._until:
            self._hook.remove()
            if not is_copy and self._before and self._before != _buffers_hash(module):
                process.log(
                    f"{self._name}: called without its DistributedDataParallel wrapper in training, so each rank "
                    f"changes buffers of its own, but a restart gives all ranks those of rank 0. Call the wrapper, or "
                    f"use broadcast_buffers=False."
                )
        elif module.training and torch.is_grad_enabled() and DistributedDataParallel._active_ddp_module is None:
            self._before = _buffers_hash(module) if senders(module) else ""


def _buffers_hash(module: torch.nn.Module) -> str:
    """Return a hash of all buffers; "" within a transform of torch.func, where tensors have no values."""
    with contextlib.suppress(Exception):  # the training must not end because of it
        return digest([*module.buffers()])
    return ""


def outermost(value: torch.nn.Module) -> torch.nn.Module:
    """Return the DistributedDataParallel wrapper of a model if it has one, else the model."""
    if isinstance(value, DistributedDataParallel):
        return value
    wrapper: torch.nn.Module | None = _wrapper_of(_uncompiled(value))
    return value if wrapper is None else wrapper


def _wrapper_of(module: torch.nn.Module) -> Any:
    """Return the DDP wrapper of a model that the script saves without its wrapper; None if there is none."""
    found, has_stepped = _wrappers.get(module), process.current.optimizer_steps > 0
    # The result is cached, because a search takes 0.1 s. A script may wrap a model until its first step.
    if found is None or (found() is None and found is not _none and (found is not _none_yet or has_stepped)):
        wrappers = (each for each in gc.get_objects() if type(each) is DistributedDataParallel)
        wrapper = next((each for each in wrappers if _uncompiled(each.module) is module), None)
        absent = _none if has_stepped else _none_yet
        found = _wrappers[module] = absent if wrapper is None else weakref.ref(wrapper)
    return found()


def _none() -> None:
    """Replaces a weak reference for a model without a wrapper."""


def _none_yet() -> None:
    """The same before the first optimizer step, until which a script may wrap the model."""


def _uncompiled(module: Any) -> Any:
    """Return the original module if torch.compile returned this one, else the module itself."""
    return getattr(module, "_orig_mod", module)


def ignored(module: torch.nn.Module) -> list[str]:
    """Return the names of trained parameters that DDP was told to ignore, also in copies of the model inside another
    module, such as an average of its weights."""
    names = {
        f"{place}.{name}" if place else name
        for place, inside in module.named_modules()
        for name in getattr(inside, "_ddp_params_and_buffers_to_ignore", ())
    }
    return [key for key, each in module.named_parameters() if key in names and each.requires_grad] if names else []


def _keys(model: torch.nn.Module) -> set[str]:
    """Return the keys of the model's state that DistributedDataParallel does not synchronize."""
    module = unwrapped(model)
    buffers = set() if send_those_of_0(senders(model)) else {name for name, _ in module.named_buffers()}
    return buffers.union(ignored(module))


def _bounded(name: str, kind: str, value: Any) -> dict[str, Any]:
    tensors = packed.tensors_of(value)
    if sum(tensor.numel() * tensor.element_size() for tensor in tensors) > OWN_BYTES_MAX:
        return {"kind": LARGE, "value": packed.total(tensors)}
    return {"kind": kind, "value": copied(value, name)} if not isinstance(value, dict) or value else {}


# ---- the writer ------------------------------------------------------------------------------------------------


class Handed(NamedTuple):
    """The values that a rank sends to rank 0 for a save."""

    rng: Any
    own: Any
    samples: Mapping[str, list[str]]

    def as_bytes(self) -> bytes:
        buffer = io.BytesIO()
        torch.save(self._asdict(), buffer)
        return buffer.getvalue()


def from_bytes(data: bytes) -> Handed:
    """Parse the bytes that `Handed.as_bytes` returned."""
    return Handed(**torch.load(io.BytesIO(data), weights_only=True))


def differing(
    of_0: Mapping[str, Any], others: Mapping[int, Mapping[str, Any]], known: Collection[str] = ()
) -> dict[int, dict[str, Any]]:
    """Return for each rank the values that are not equal on all ranks, by name. known: names of values that are treated
    as different even if they are equal, because the value of a rank is missing."""
    names = {name for parts in others.values() for name in of_0 if digest(of_0[name]) != digest(parts.get(name))}
    names |= of_0.keys() & set(known)
    ranks = {0: of_0, **others} if names else {}
    return {rank: {name: parts[name] for name in sorted(names) if name in parts} for rank, parts in ranks.items()}


def missing(of_0: Collection[str], others: Mapping[int, Handed]) -> list[tuple[int, str]]:
    """Return each name that another rank saves and rank 0 does not, with the first such rank."""
    found = {name: rank for rank, its in sorted(others.items(), reverse=True) for name in {*its.own, *its.samples}}
    return sorted((rank, name) for name, rank in found.items() if name not in of_0)


def names_in(ranks: Mapping[int, Mapping[str, Any]]) -> set[str]:
    """Return the names for which each rank has a value of its own."""
    return {name for parts in ranks.values() for name in parts}


def too_large(ranks: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Return the names for which each rank has a value of its own that is too large for the file."""
    return sorted({name for parts in ranks.values() for name, part in parts.items() if part["kind"] == LARGE})


# ---- the way back ------------------------------------------------------------------------------------------------


def state_for(document: Mapping[str, Any], rank: int, world_size: int, named: Sequence[str]) -> dict[str, Any]:
    """Return the state in the document with this rank's own parts. named: names that will be restored into objects.

    Raises StateError if the document lacks a rank's own part of a restored object, LateError if the rank did not save
    in time. For objects that are not restored, rank 0's part is used instead.
    """
    state: dict[str, Any] = dict(document["state"])
    ranks: Mapping[int, Mapping[str, Any]] = document.get("ranks", {})
    if not ranks:
        return state
    names = sorted(names_in(ranks) & set(named))
    if problem := _lost(names, document, world_size):
        raise StateError(problem)
    if names and world_size > 1 and (late := sorted(set(range(world_size)) - ranks.keys())):
        raise LateError(
            f"{_had_own(names, document)}, but that of rank {late[0]} is not in the snapshot, because it did not save "
            f"in time."
        )
    for name, part in ranks.get(rank, {}).items() if world_size == document["world_size"] else ():
        if part["kind"] != LARGE:
            state[name] = _with(state[name], part)
    return state


def _lost(names: Sequence[str], document: Mapping[str, Any], world_size: int) -> str:
    """Return why ranks cannot restore their own parts, the same text on all ranks; "" if they can."""
    if names and world_size != document["world_size"]:
        return (
            f"{_had_own(names, document)}, by {document['world_size']} ranks, but there are {world_size} now. Start as "
            f"many, or save only what is the same on all ranks."
        )
    if names and (large := [name for name in too_large(document["ranks"]) if name in names]):
        return f"{_had_own(names, document)}, and {', '.join(large)} is too large to be saved for each."
    return ""


def _had_own(names: Sequence[str], document: Mapping[str, Any]) -> str:
    return f"{', '.join(names)}: each rank had its own when step {document['step']} was saved"


def _with(whole: Any, part: Mapping[str, Any]) -> Any:
    if part["kind"] == WHOLE:
        return part["value"]
    if part["kind"] == OPTIMIZER and "param_groups" not in whole:
        return whole  # an optimizer with another format of its state_dict()
    if part["kind"] == OPTIMIZER:
        groups = [{**group, **own} for group, own in zip(whole["param_groups"], part["value"]["rates"], strict=True)]
        return {**whole, "state": {**whole["state"], **part["value"]["state"]}, "param_groups": groups}
    merged = type(whole)(whole)
    merged.update(part["value"])
    if hasattr(whole, "_metadata"):  # `_metadata` has the versions of the modules, which load_state_dict() reads
        merged._metadata = whole._metadata
    return merged
