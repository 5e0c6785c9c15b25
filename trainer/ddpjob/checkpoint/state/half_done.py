"""What a state does not hold of work that is half done, named before a restart needs it.

Gradients that wait for an optimizer's step, the state of a communication hook, and what ZeroRedundancyOptimizer has
consolidated before its last step are in no state_dict(). Nor is what a script has done at the end of an epoch, and at
the beginning of one: a DataLoader draws a seed there.
"""

import gc
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ddpjob import process
from ddpjob.checkpoint.state import random_states
from ddpjob.errors import StateError

COMPARED_STEPS = 3  # the first ones: between them training shows if it draws random numbers
SCANS = 3  # for such a loader, at the first saves
WATCHED_MAX = 8  # parameters of a model: what follows each optimizer step must cost nothing


def hooks_with_state(objects: Mapping[str, Any]) -> dict[str, str]:
    """By name of a model in DDP: the type of the state that its communication hook keeps."""
    found = {}
    for name, value in objects.items():
        for _, state in getattr(value, "_comm_hooks", ()) if isinstance(value, DistributedDataParallel) else ():
            if state is not None and not isinstance(state, dist.ProcessGroup):  # stateless hooks are given the group
                found[name] = type(state).__name__
    return found


def stepped_at_end_of_epoch(step: int, objects: Mapping[str, Any]) -> tuple[str, str]:
    """Names of a sampler's state that leaves no batch of its epoch, and of a scheduler that has stepped for this epoch
    already: the resume has no batch, and the script steps the scheduler again. Two empty strings if there are none."""
    schedulers = {name: value for name, value in objects.items() if isinstance(value, LRScheduler)}
    for place, state in objects.items():
        if not isinstance(state, dict) or {"n", "seed", "epoch", "consumed"} != state.keys():
            continue
        for name, scheduler in schedulers.items():
            # one that steps with each batch has stepped as often as the optimizer
            if state["consumed"] == state["n"] and state["epoch"] + 1 == scheduler.last_epoch < step:
                return place, name
    return "", ""


def draws_within_epoch() -> bool:
    """True if a DataLoader is iterated that has drawn its seed from torch's global generator, so that a resume within
    the epoch draws it once more. A GlobalBatchSampler sets the generator back. Looks at all objects: some 50 ms."""
    objects = gc.get_objects()
    iterated = {id(each._index_sampler) for each in objects if issubclass(type(each), _BaseDataLoaderIter)}
    loaders = [each for each in objects if issubclass(type(each), DataLoader)] if iterated else []
    seeded = [each for each in loaders if each.generator is None and id(each._index_sampler) in iterated]
    return any(not hasattr(each.batch_sampler, "has_workers") for each in seeded)


class SinceLastStep:
    """What has happened since the last optimizer step: gradients that wait for the next one, and shards that are older.

    Gradients usually stay after a step. So a hook of some parameters notes when they get another one.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._watched: weakref.WeakKeyDictionary[Any, list[torch.Tensor]] = weakref.WeakKeyDictionary()
        self._settled: set[int] = set()  # parameters whose gradients the last step has used
        self._shards: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._all: set[int] = set()
        self._steps = self._random = 0  # the random states after the first step
        self._scans_left = SCANS
        self._draws = False  # True if training draws between its first steps: dropout, augmentation
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
        parameters = [each for each in parameters if each.requires_grad and each.is_leaf]
        count = min(len(parameters), WATCHED_MAX)  # from the first to the last
        self._watched[optimizer] = [parameters[(len(parameters) - 1) * i // max(1, count - 1)] for i in range(count)]
        settled = self._settled  # not self, which a parameter would keep
        for parameter in self._watched[optimizer]:
            self._all.add(id(parameter))
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda own: settled.discard(id(own))
            )

    def _compare_random_states(self) -> None:
        mark = random_states.mark(random_states.compact())
        self._random = self._random if self._steps else mark
        self._steps += 1
        self._draws |= mark != self._random
        if self._steps == COMPARED_STEPS and process.current.keeper is not None:  # else only a save can lead to it
            self.name_loader()

    def name_loader(self) -> None:
        """Log on rank 0 if a restart from here, within an epoch, continues random numbers with another one."""
        if not (self._draws and self._scans_left and self._rank == 0):
            return
        self._scans_left -= 1
        if draws_within_epoch():
            self._scans_left = 0
            process.log(
                "a DataLoader draws its seed from torch's global generator: a restart within an epoch does not "
                "continue the random numbers (dropout, augmentation), because it draws the seed once more. Give the "
                "DataLoader a GlobalBatchSampler as batch_sampler, or generator=torch.Generator()."
            )

    def refuse_stale_shards(self, objects: Mapping[str, Any]) -> None:
        """StateError for a ZeroRedundancyOptimizer that has stepped after consolidate_state_dict(), which makes a new
        list each time: it would give the older shards of other ranks under the newer step. Called on rank 0."""
        for name, value in objects.items():
            shards = getattr(value, "_all_state_dicts", None) if isinstance(value, torch.optim.Optimizer) else None
            if shards and self._shards.get(value) is shards:
                raise StateError(
                    f"{name}: what it has consolidated is older than its last step. Call "
                    f"{name}.consolidate_state_dict(0) on every rank before each save()."
                )

    def pending(self, objects: Mapping[str, Any]) -> str:
        """The name of an object whose gradients wait; "" if none does."""
        for value in objects.values():
            if isinstance(value, torch.optim.Optimizer):
                self._watch(value)  # which may have made no step yet
        for parameter in (each for its in self._watched.values() for each in its):
            waits = id(parameter) not in self._settled and parameter.grad is not None and _waits(parameter.grad)
            for name, value in objects.items() if waits else ():
                if isinstance(value, torch.nn.Module) and any(each is parameter for each in value.parameters()):
                    return name
        return ""


def _waits(gradient: torch.Tensor) -> bool:
    """Whether it has a value. GradScaler leaves out the step of one that is not finite."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(values.any()) and bool(values.isfinite().all())
