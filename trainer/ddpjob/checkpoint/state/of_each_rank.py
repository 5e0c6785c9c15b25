"""State that differs between ranks, in the snapshot's one file: readers, generators, buffers that DDP does not send.

Rank 0 writes its own state. Every other rank hands it a copy of what may differ, together with its random state, and
the file keeps the copies that do differ, under "ranks". Models and optimizers are replicas: of these only the parts
that DistributedDataParallel leaves to each rank are compared, and the numbers in an optimizer's settings.
"""

import gc
import io
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpjob.checkpoint.state import packed
from ddpjob.checkpoint.state.alike import digest
from ddpjob.checkpoint.state.state_dicts import copied, state_of, unwrapped
from ddpjob.errors import StateError

OWN_BYTES_MAX = 4 << 20  # of one object of one rank, which passes through the store of the group
SAMPLES, SAMPLED_VALUES = 32, 8  # parameters of a model, and of each: replicas that are out of step differ everywhere

WHOLE, KEYS, OPTIMIZER, LARGE = "whole", "keys", "optimizer", "large"
_wrappers: "weakref.WeakKeyDictionary[torch.nn.Module, Any]" = weakref.WeakKeyDictionary()


class LateError(StateError):
    """A file lacks what a rank had of its own, because that rank was too late for it."""


def own(objects: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What may differ between ranks of what save() is given, by name; a copy, or of a large one a sum of its bits."""
    models = [unwrapped(value) for value in objects.values() if isinstance(value, torch.nn.Module)]
    of_rank = {id(model.get_parameter(name)) for model in models for name in ignored(model)}
    found = {name: _own(name, value, of_rank) for name, value in objects.items()}
    return {name: part for name, part in found.items() if part}


def _own(name: str, value: Any, of_rank: set[int]) -> dict[str, Any]:
    if isinstance(value, torch.optim.Optimizer):
        # by the number that state_dict() gives to parameters
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
    """By name of a model: the first values of some parameters that all ranks are to have the same."""
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
    """Names of models of which a rank has other parameters than rank 0."""
    return sorted({name for other in others for name in of_0 if other.get(name, of_0[name]) != of_0[name]})


def senders(value: torch.nn.Module) -> list[DistributedDataParallel]:
    """The wrappers that send this model's buffers to all ranks before each forward pass; none if one does not."""
    inside = [each for each in value.modules() if isinstance(each, DistributedDataParallel)]
    wrappers = inside or [each for each in [_wrapper_of(_uncompiled(value))] if each is not None]
    return wrappers if all(each.broadcast_buffers and not _ignores_a_buffer(each) for each in wrappers) else []


def _ignores_a_buffer(wrapper: DistributedDataParallel) -> bool:
    """True if it is told to leave a buffer to each rank."""
    return any(name in wrapper.parameters_to_ignore for name, _ in wrapper.module.named_buffers())


def send_those_of_0(wrappers: Collection[DistributedDataParallel]) -> bool:
    """True if rank 0's buffers are sent. Inside of `with model.join()` it is those of the highest rank that still has
    data (DistributedDataParallel._sync_buffers, torch/nn/parallel/distributed.py, torch 2.13)."""
    return bool(wrappers) and not any(each._join_config.enable for each in wrappers)


def outermost(value: torch.nn.Module) -> torch.nn.Module:
    """The wrapper of a model that is in DistributedDataParallel, else the model."""
    if isinstance(value, DistributedDataParallel):
        return value
    wrapper: torch.nn.Module | None = _wrapper_of(_uncompiled(value))
    return value if wrapper is None else wrapper


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
    """Names of parameters that DistributedDataParallel is told to ignore, and that are trained; also in a copy of the
    model, as an average of its weights has it within."""
    names = {
        f"{place}.{name}" if place else name
        for place, inside in module.named_modules()
        for name in getattr(inside, "_ddp_params_and_buffers_to_ignore", ())
    }
    return [key for key, each in module.named_parameters() if key in names and each.requires_grad] if names else []


def _keys(model: torch.nn.Module) -> set[str]:
    """Names in the model's state that DistributedDataParallel does not make the same on all ranks."""
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
    """What a rank hands to rank 0."""

    rng: Any
    own: Any
    samples: Mapping[str, list[str]]

    def as_bytes(self) -> bytes:
        buffer = io.BytesIO()
        torch.save(self._asdict(), buffer)
        return buffer.getvalue()


def from_bytes(data: bytes) -> Handed:
    """What a rank has handed over."""
    return Handed(**torch.load(io.BytesIO(data), weights_only=True))


def differing(
    of_0: Mapping[str, Any], others: Mapping[int, Mapping[str, Any]], known: Collection[str] = ()
) -> dict[int, dict[str, Any]]:
    """By rank: its parts of each name of which not all ranks have the same. known: names that differ whatever these
    have, because a rank is missing."""
    names = {name for parts in others.values() for name in of_0 if digest(of_0[name]) != digest(parts.get(name))}
    names |= of_0.keys() & set(known)
    ranks = {0: of_0, **others} if names else {}
    return {rank: {name: parts[name] for name in sorted(names) if name in parts} for rank, parts in ranks.items()}


def names_in(ranks: Mapping[int, Mapping[str, Any]]) -> set[str]:
    """Names of which each rank has its own."""
    return {name for parts in ranks.values() for name in parts}


def too_large(ranks: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Names of which each rank has its own, and it is too large to be kept."""
    return sorted({name for parts in ranks.values() for name, part in parts.items() if part["kind"] == LARGE})


# ---- the way back ------------------------------------------------------------------------------------------------


def state_for(document: Mapping[str, Any], rank: int, world_size: int, named: Sequence[str]) -> dict[str, Any]:
    """The document's state with this rank's own parts. named: what is to be restored into objects.

    Raises StateError where a rank's own part of these is not in the document, LateError if the rank did not save in
    time; of others rank 0's is given.
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
            f"{_had_own(names, document)}, and that of rank {late[0]} is not in the snapshot, because it did not save "
            f"in time."
        )
    for name, part in ranks.get(rank, {}).items() if world_size == document["world_size"] else ():
        if part["kind"] != LARGE:
            state[name] = _with(state[name], part)
    return state


def _lost(names: Sequence[str], document: Mapping[str, Any], world_size: int) -> str:
    """Why not each rank can be given its own, the same on all ranks; "" where it can."""
    if names and world_size != document["world_size"]:
        return (
            f"{_had_own(names, document)}, by {document['world_size']} ranks, and there are {world_size} now. Start as "
            f"many, or save only what is the same on all ranks."
        )
    if names and (large := [name for name in too_large(document["ranks"]) if name in names]):
        return f"{_had_own(names, document)}, and {', '.join(large)} is too large to be kept of each."
    return ""


def _had_own(names: Sequence[str], document: Mapping[str, Any]) -> str:
    return f"{', '.join(names)}: each rank had its own when step {document['step']} was saved"


def _with(whole: Any, part: Mapping[str, Any]) -> Any:
    if part["kind"] == WHOLE:
        return part["value"]
    if part["kind"] == OPTIMIZER and "param_groups" not in whole:
        return whole  # an optimizer with a format of its own
    if part["kind"] == OPTIMIZER:
        groups = [{**group, **own} for group, own in zip(whole["param_groups"], part["value"]["rates"], strict=True)]
        return {**whole, "state": {**whole["state"], **part["value"]["state"]}, "param_groups": groups}
    merged = type(whole)(whole)
    merged.update(part["value"])
    if hasattr(whole, "_metadata"):  # versions of the modules
        merged._metadata = whole._metadata
    return merged
