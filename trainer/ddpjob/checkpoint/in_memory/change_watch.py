"""`ChangeWatch`: find changes of parameters and optimizer state that no optimizer step has made.

Drawbacks: changes are detected by torch's version counters and by samples of the values. Writes through `.data` move no
counter and are seen only in the samples. `views` reads a tensor's memory by its address.
"""

import ctypes
import functools
import itertools
import operator
import random
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ddpjob.checkpoint.state import packed

SAMPLES = 32  # number of sampled parameters; 32 are enough, because different steps differ in every trained parameter
FROZEN_SAMPLES = 8  # number of them without gradients, such as averages; more if few parameters are trained
SAMPLED_BYTES = 8192  # total size of all samples, in bytes
REBINDS = 3  # number of steps that are checked again, because the script has assigned `.data` within the step before
RECORD_STEPS = 64  # steps between two reads of all version counters, because reading all of them is slow
READ_AT_EACH = 8  # number of version counters of an optimizer's tensors that are read at each step
PARAMETERS = "parameters"
version_of = operator.attrgetter("_version")
_address_of = torch.Tensor.data_ptr


class Views(NamedTuple):
    """Views of the first bytes of tensors, without a copy."""

    addresses: list[int]
    tensors: list[torch.Tensor]
    """References that keep the memory alive if another thread replaces a tensor."""
    are_whole: list[bool]
    """For each tensor: True if its view has all bytes of the tensor."""
    views: list[Any]


NO_VIEWS = Views([], [], [], [])


def views(before: Views, tensors: Sequence[torch.Tensor], most: int) -> Views:
    """Return views of these tensors, at most `most` bytes each. Return `before` if no tensor has a new address."""
    addresses = list(map(_address_of, tensors))
    if addresses == before.addresses:
        return before
    found = Views(addresses, [], [], [])
    for address, tensor in zip(addresses, (each.detach() for each in tensors), strict=True):
        size = tensor.numel() * tensor.element_size()
        is_seen = tensor.is_cpu and size > 0 and packed.is_one_run(tensor)
        found.tensors.append(tensor)
        found.are_whole.append(is_seen and size <= most)
        found.views.append((ctypes.c_char * min(size, most)).from_address(address) if is_seen else b"")
    return found


class ChangeWatch:
    """Finds changes of parameters and optimizer state that no optimizer step has made."""

    def __init__(
        self,
        optimizers: Mapping[str, torch.optim.Optimizer],
        averages: Mapping[str, torch.nn.Module],
        parameters: Sequence[torch.Tensor],
    ) -> None:
        """averages: modules that no optimizer trains. parameters: of all modules and optimizers."""
        self._parameters = parameters
        left = {id(each): each for each in parameters}
        self._counters = [_Counters(name, each, left) for name, each in optimizers.items()]
        if left:
            self._counters.append(_Counters(PARAMETERS, None, left))
        self.averages = {name: (weakref.ref(each), [*each.parameters()][:SAMPLES]) for name, each in averages.items()}
        """Each module that no optimizer trains, and some of its parameters."""
        dense = list(filter(_is_dense, parameters))
        trained, frozen = ([each for each in dense if each.requires_grad is is_trained] for is_trained in (True, False))
        few = _spread(frozen, max(FROZEN_SAMPLES, SAMPLES - len(trained)))
        self._samples = [*_spread(trained, SAMPLES - len(few)), *few]
        self._first = self._all = NO_VIEWS
        self.sampled = b""
        """Samples of the parameters at the last `record`, also to compare parameters of ranks."""
        self._is_rebound, self._rebinds_left = False, REBINDS
        self._stateful = 0  # number of parameters with optimizer state at the last call of `has_grown`

    def trains_with(self, optimizer: torch.optim.Optimizer) -> bool:
        """True if this optimizer changes parameters that are kept."""
        own = set(map(id, self._parameters))
        return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])

    def counters_of(self, optimizer: Any) -> "_Counters | None":
        """Return the counters of this optimizer's tensors; None if its state is not kept."""
        for own in self._counters:
            if own.optimizer() is optimizer:
                return own
        return None

    def living(self) -> dict[str, Any]:
        """Return optimizers and averages by name; None for those that the script has dropped."""
        return {own.name: own.optimizer() for own in self._counters} | {
            n: own() for n, (own, _) in self.averages.items()
        }

    def record(self) -> None:
        """Remember version counters and samples of parameters and optimizer state at the end of a step."""
        for own in self._counters:
            own.record()
        before, self.sampled = self._first, self._sample_now()
        self._is_rebound = before is not NO_VIEWS and self._first is not before

    def was_rebound(self) -> bool:
        """True if the script has assigned `.data` of a sampled parameter within the last step, as in adversarial
        training. Only REBINDS times, because each time all bits of the state are summed."""
        self._rebinds_left -= self._is_rebound
        return self._is_rebound and self._rebinds_left >= 0

    def changed(self) -> str:
        """Return what has changed without an optimizer step since `record`: PARAMETERS, an optimizer's name, or ""."""
        found = {own.name: own.changed() for own in self._counters}
        if PARAMETERS in found.values() or (self.sampled and self._sample_now() != self.sampled):
            return PARAMETERS
        return next((name for name, what in found.items() if what), "")

    def has_grown(self) -> bool:
        """True if more parameters have optimizer state than at the last call."""
        before, living = self._stateful, [each.optimizer() for each in self._counters]
        self._stateful = sum([len(each.state) for each in living if each is not None])
        return self._stateful > before

    def counters(self) -> list[Any]:
        """Return the version counter of each parameter."""
        return list(map(version_of, self._parameters))

    def versions(self) -> list[Any]:
        """Return version counters and samples of the parameters. Equal lists mean that parameters have not changed.
        Samples are included because writes through `.data` do not move a version counter.
        """
        return [*self.counters(), self._sample_now()]

    def total(self) -> int:
        """Return the sum of all bits of parameters and optimizer state."""
        states = [tensor for own in self._counters for tensor in own.state_now()]
        every = [*self._parameters, *states]
        dense = [each for each in every if each.layout is torch.strided]  # sparse tensors have no address
        self._all = views(self._all, dense, packed.SMALL_BYTES)
        large = [each for each, is_whole in zip(self._all.tensors, self._all.are_whole, strict=True) if not is_whole]
        large += [each for each in every if each.layout is not torch.strided]
        small = functools.reduce(lambda found, view: zlib.crc32(view, found), self._all.views, 0)
        return (packed.total(packed.tensors_of(large)) * 3 + small) % (1 << 63)

    def _sample_now(self) -> bytes:
        self._first = views(self._first, self._samples, SAMPLED_BYTES // max(1, len(self._samples)))
        return b"".join(self._first.views)


def _spread(tensors: Sequence[torch.Tensor], most: int) -> list[torch.Tensor]:
    """Return at most so many of the tensors, at even distances."""
    count = min(most, len(tensors))
    return [tensors[number * len(tensors) // count] for number in range(count)]


def _inside(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value, also in dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _inside(each)


def _is_dense(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided


class _Counters:
    """Version counters of an optimizer's parameters and state.

    Each step increases a counter by the same amount. So all counters are read only at every RECORD_STEPS-th step. At
    other steps a few counters are read, to check that they have the expected values.
    """

    def __init__(self, name: str, optimizer: torch.optim.Optimizer | None, left: dict[int, Any]) -> None:
        """optimizer: None for parameters that belong to no optimizer. left: the parameters of later counters; those of
        this one are taken out."""
        self.name = name
        self.optimizer: Callable[[], Any] = (lambda: None) if optimizer is None else weakref.ref(optimizer)
        self.steps, self._first_steps = 0, 0 if optimizer is None else 1
        groups = [{"params": list(left.values())}] if optimizer is None else optimizer.param_groups
        owned = [left.pop(id(p), None) for group in groups for p in group["params"]]
        self._parameters, self._boundaries = [p for p in owned if p is not None], 0
        self._tensors: list[torch.Tensor] = []
        self._counters: list[int] | None = None
        self._moves: list[int] | None = None
        self._few: list[torch.Tensor] = []
        self._few_moves: list[tuple[int, int]] = []  # (counter, increase per step) for each tensor in `_few`
        self._states: list[torch.Tensor] = []  # some tensors of the optimizer's state
        self._views, self._sampled = NO_VIEWS, b""  # their first bytes, now and at the end of the last step

    def record(self) -> None:
        """Remember version counters and samples of the state as they are now."""
        self._boundaries += 1
        is_usual = self._moves is not None and self._boundaries < RECORD_STEPS
        if not is_usual or list(map(version_of, self._few)) != [
            one + self.steps * each for one, each in self._few_moves
        ]:
            self._record_all()
        self._sampled = self._sample_now()

    def _record_all(self) -> None:
        tensors, before, moves, steps = self._now(), self._counters, self._moves, self.steps
        is_same, counters = before is not None and self._is_of(tensors), list(map(version_of, tensors))
        self._tensors, self._counters, self.steps, self._boundaries, self._moves = tensors, counters, 0, 0, None
        if before is None or not is_same:
            return
        if moves is not None:
            is_known = counters == _after(before, moves, steps)
        else:
            moves = [now - then for now, then in zip(counters, before, strict=True)]
            is_known = steps == self._first_steps and (steps == 1 or not any(moves))
        if is_known:
            self._moves, stride = moves, max(1, len(tensors) // READ_AT_EACH)
            self._few, self._few_moves = tensors[::stride], list(zip(counters, moves, strict=True))[::stride]
            states = [each for each in tensors[len(self._parameters) :] if _is_dense(each) and each.dim()]
            # drawn, because every n-th tensor may be the same moment of each parameter
            self._states = random.Random(0).sample(states, min(READ_AT_EACH, len(states)))  # noqa: S311

    def changed(self) -> str:
        """Return what has changed without an optimizer step since `record`: PARAMETERS, "state", or ""."""
        if self._counters is None:
            return ""
        tensors = self._now()
        expected = self._counters if self._moves is None else _after(self._counters, self._moves, self.steps)
        counters, own = list(map(version_of, tensors)), len(self._parameters)
        if counters == expected and self._is_of(tensors):
            return "" if self._sample_now() == self._sampled else "state"
        return "state" if counters[:own] == expected[:own] else PARAMETERS

    def _sample_now(self) -> bytes:
        """Return the first bytes of some tensors of the state: writes through `.data` move no version counter."""
        self._views = views(self._views, self._states, SAMPLED_BYTES // SAMPLES)
        return b"".join(self._views.views)

    def _is_of(self, tensors: list[torch.Tensor]) -> bool:
        return len(tensors) == len(self._tensors) and all(map(operator.is_, tensors, self._tensors))

    def _now(self) -> list[torch.Tensor]:
        return [*self._parameters, *self.state_now()]

    def state_now(self) -> list[torch.Tensor]:
        """Return the tensors of the optimizer's state."""
        optimizer = self.optimizer()
        states = [] if optimizer is None else list(optimizer.state.values())
        found = []
        for value in itertools.chain.from_iterable(
            each.values() if isinstance(each, dict) else [each] for each in states
        ):
            if isinstance(value, torch.Tensor):  # nearly always, so no generator is made
                found.append(value)
            else:
                found += _inside(value)
        return found


def _after(counters: list[int], moves: list[int], steps: int) -> list[int]:
    """Return the expected version counters after this many steps."""
    return [counter + steps * move for counter, move in zip(counters, moves, strict=True)]
