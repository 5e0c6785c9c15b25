"""Find unfinished work that no state_dict() contains, to log it before a restart loses or repeats it.

Examples: gradients that wait for an optimizer's step, the state of a communication hook, shards that
ZeroRedundancyOptimizer consolidated before its last step, a scheduler that is not saved, or that has already stepped at
the end of an epoch, and the seed that a DataLoader draws at the beginning of an epoch.
"""

import gc
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ddpjob import process
from ddpjob.checkpoint.state import random_states
from ddpjob.errors import StateError

COMPARED_STEPS = 3  # number of first steps whose random states are compared, to see if training draws random numbers
SCANS = 3  # a DataLoader that draws a seed is searched for at this many saves, from the first one
_NO_SCHEDULE = (
    torch.nn.Module,
    torch.optim.Optimizer,
    LRScheduler,
    torch.amp.GradScaler,
    torch.Tensor,
    int,
    float,
    str,
)
_POSITION = {"n", "seed", "epoch", "consumed"}  # keys of a GlobalBatchSampler's state
NESTED_MAX = 8  # depth at which such a state is searched for
WATCHED_MAX = 8  # hooks per optimizer; a hook on each parameter would cost time at each step


def hooks_with_state(objects: Mapping[str, Any]) -> dict[str, str]:
    """Return the type of the communication hook's state, by name of the DDP model."""
    found = {}
    for name, value in objects.items():
        for _, state in getattr(value, "_comm_hooks", ()) if isinstance(value, DistributedDataParallel) else ():
            if state is not None and not isinstance(state, dist.ProcessGroup):  # stateless hooks get the group as state
                found[name] = type(state).__name__
    return found


def updated_at_end_of_epoch(step: int, objects: Mapping[str, Any]) -> tuple[str, str]:
    """Return the names of a sampler's state at the end of an epoch, and of a scheduler or weight average that was
    already updated for this epoch; ("", "") if there are none. A resume has no batch left, but updates it again."""
    for place, state in objects.items():
        if not isinstance(state, dict) or state.keys() != _POSITION:
            continue
        for name, value in objects.items() if state["consumed"] == state["n"] else ():
            # the count is equal to `step` for a scheduler that steps with each batch
            if state["epoch"] + 1 == _updates(value) < step:
                return place, name
    return "", ""


def has_position(value: Any, depth: int = 0) -> bool:
    """True if this value contains the state of a GlobalBatchSampler."""
    if depth > NESTED_MAX:
        return False
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    is_position = isinstance(value, dict) and value.keys() >= _POSITION
    return is_position or any(has_position(each, depth + 1) for each in inner)


def _updates(value: Any) -> int:
    """Return how often a scheduler or an average of weights was updated; 0 for other objects."""
    if isinstance(value, AveragedModel):
        return int(value.n_averaged)
    return value.last_epoch if isinstance(value, LRScheduler) else 0


def schedule_not_saved(objects: Mapping[str, Any]) -> tuple[str, str]:
    """Return the name of an optimizer, and the type of its learning rate scheduler if that is not saved; ("", "") if
    there is none, or if a value of unknown type may contain it."""
    saved = {id(each.optimizer) for each in objects.values() if isinstance(each, LRScheduler)}
    lack = {
        id(each): name
        for name, each in objects.items()
        if isinstance(each, torch.optim.Optimizer) and "initial_lr" in each.param_groups[0] and id(each) not in saved
    }
    if lack and all(isinstance(each, _NO_SCHEDULE) or hasattr(each, "reads_ahead") for each in objects.values()):
        for each in gc.get_objects():
            if issubclass(type(each), LRScheduler) and id(getattr(each, "optimizer", None)) in lack:
                return lack[id(each.optimizer)], type(each).__name__
    return "", ""


def shared_state(objects: Mapping[str, Any]) -> tuple[str, str]:
    """Return the name of an optimizer, and the key of a state tensor that is the memory of its parameter, as
    `p.float()` is for float32; ("", "") if there is none. A load gives the state its own memory."""
    for name, optimizer in objects.items():
        states = optimizer.state if isinstance(optimizer, torch.optim.Optimizer) else None
        for parameter, state in states.items() if isinstance(states, Mapping) else ():
            for key, value in state.items() if isinstance(state, Mapping) else ():
                if _address(value) == _address(parameter) != 0:
                    return name, str(key)
    return "", ""


def _address(value: Any) -> int:
    is_dense = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return value.data_ptr() if is_dense else 0


def _iterations() -> list[tuple[Any, Any]]:
    """Return the DataLoaders that are being iterated, with their iterators, except those with a GlobalBatchSampler.
    Takes about 50 ms: it reads all objects."""
    objects = gc.get_objects()
    # Attributes may be missing: another thread may be creating an object, or a subclass does not call __init__.
    iterators = [each for each in objects if issubclass(type(each), _BaseDataLoaderIter)]
    of_sampler = {id(each._index_sampler): each for each in iterators if hasattr(each, "_index_sampler")}
    loaders = [each for each in objects if issubclass(type(each), DataLoader)] if of_sampler else []
    found = [(each, of_sampler.get(id(getattr(each, "_index_sampler", None)))) for each in loaders]
    ours = [hasattr(getattr(each, "batch_sampler", None), "reads_ahead") for each in loaders]
    return [one for one, is_ours in zip(found, ours, strict=True) if one[1] is not None and not is_ours]


def draws_within_epoch(*, shuffles: bool) -> bool:
    """True if a DataLoader that draws its seed from torch's global generator is being iterated. A resume within the
    epoch draws the seed again. A GlobalBatchSampler restores the generator. shuffles: find only loaders whose order of
    samples is drawn from that generator."""
    return any(
        getattr(each, "generator", ...) is None
        and (not shuffles or getattr(getattr(each, "sampler", None), "generator", ...) is None)
        for each, _ in _iterations()
    )


def is_within_epoch() -> bool | None:
    """True if a DataLoader that cannot save its position is within an epoch, False if all are at its end, None if there
    is none. Takes about 50 ms: it reads all objects."""
    iterators = [each for each in gc.get_objects() if issubclass(type(each), _BaseDataLoaderIter)]
    ours = [hasattr(getattr(each, "_index_sampler", None), "reads_ahead") for each in iterators]
    plain = [each for each, is_ours in zip(iterators, ours, strict=True) if not is_ours]
    found = [_has_more(each) for each in plain if not hasattr(each, "state_dict")]
    return any(found) if found else None


def _has_more(iterator: Any) -> bool:
    try:
        return bool(iterator._num_yielded < len(iterator))
    except (AttributeError, TypeError):  # a stream has no length
        return True


class SinceLastStep:
    """Find gradients that wait for the next optimizer step, and consolidated shards older than the last optimizer step.

    Parameters usually keep their gradients after a step. So hooks on some parameters record when new gradients arrive.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._watched: weakref.WeakKeyDictionary[Any, list[torch.Tensor]] = weakref.WeakKeyDictionary()
        self._settled: set[int] = set()  # ids of parameters whose gradients the last optimizer step has used
        self._shards: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._all: set[int] = set()
        self._steps = self._random = 0  # _random: hash of the random states after the first step
        self._scans_left = SCANS
        self._draws = False  # True if training draws random numbers between its first steps, as with dropout
        itself = weakref.ref(self)

        def after_step(optimizer: Any, *_: Any) -> None:
            if (watch := itself()) is not None:
                watch._watch(optimizer)
                watch._settled |= watch._all
                if (shards := getattr(optimizer, "_all_state_dicts", None)) is not None:
                    watch._shards[optimizer] = shards
                if watch._steps < COMPARED_STEPS:
                    watch._compare_random_states()

        register_optimizer_step_post_hook(after_step)

    def _watch(self, optimizer: Any) -> None:
        if optimizer in self._watched:
            return
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        if any(map(is_lazy, parameters)):  # they get hooks at the first step, when they have a shape
            return
        parameters = [each for each in parameters if each.requires_grad and each.is_leaf]
        count = min(len(parameters), WATCHED_MAX)  # number of watched parameters, evenly spread over all
        self._watched[optimizer] = [parameters[(len(parameters) - 1) * i // max(1, count - 1)] for i in range(count)]
        settled, current = self._settled, process.current  # a hook that refers to self would keep this object alive
        current.gradients = current.gradients or 0  # from here on they are counted

        def arrived(own: torch.Tensor) -> None:
            settled.discard(id(own))
            current.gradients = (current.gradients or 0) + 1

        for parameter in self._watched[optimizer]:
            self._all.add(id(parameter))
            parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]

    def _compare_random_states(self) -> None:
        mark = random_states.mark(random_states.compact())
        self._random = self._random if self._steps else mark
        self._steps += 1
        self._draws |= mark != self._random
        if self._steps == COMPARED_STEPS and process.current.keeper is not None:  # without memory save() logs this
            self.name_loader()

    def name_loader(self) -> None:
        """Log on rank 0 if a restart within this epoch would continue with other random numbers."""
        if not self._scans_left or self._rank != 0:
            return
        self._scans_left -= 1
        if 0 < self._steps < COMPARED_STEPS:  # an accumulation may take longer than the time until the first save
            self._draws |= random_states.mark(random_states.compact()) != self._random
        if draws_within_epoch(shuffles=not self._draws):
            self._scans_left = 0
            process.log(
                "a DataLoader draws its seed from torch's global generator: a restart within an epoch does not "
                "continue the random numbers (dropout, augmentation, shuffle=True), because it draws the seed again. "
                "Give the DataLoader a GlobalBatchSampler as batch_sampler, or without shuffle=True "
                "generator=torch.Generator()."
            )

    def refuse_stale_shards(self, objects: Mapping[str, Any]) -> None:
        """Raise StateError if a ZeroRedundancyOptimizer has stepped after consolidate_state_dict(), because the save
        would mix older shards of other ranks with the newer step. Called on rank 0. Each call of consolidate_state_dict
        makes a new list."""
        for name, value in objects.items():
            shards = getattr(value, "_all_state_dicts", None) if isinstance(value, torch.optim.Optimizer) else None
            if shards and self._shards.get(value) is shards:
                raise StateError(
                    f"{name}: its consolidated state is older than its last step. Call "
                    f"{name}.consolidate_state_dict(0) on every rank before each save()."
                )

    def watch(self, objects: Mapping[str, Any]) -> None:
        """Watch the gradients of optimizers that have not stepped yet."""
        for value in objects.values():
            if isinstance(value, torch.optim.Optimizer):
                self._watch(value)

    def pending(self, objects: Mapping[str, Any]) -> str:
        """Return the name of a model with gradients that wait for an optimizer step; "" if there is none."""
        self.watch(objects)
        for parameter in (each for its in self._watched.values() for each in its):
            waits = id(parameter) not in self._settled and parameter.grad is not None and _waits(parameter.grad)
            for name, value in objects.items() if waits else ():
                if isinstance(value, torch.nn.Module) and any(each is parameter for each in value.parameters()):
                    return name
        return ""


def _waits(gradient: torch.Tensor) -> bool:
    """True if the gradient is finite and not all zero. GradScaler skips the step for gradients that are not finite."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(values.any()) and bool(values.isfinite().all())
