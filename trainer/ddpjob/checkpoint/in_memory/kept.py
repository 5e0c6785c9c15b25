"""`Kept`: the objects that one `Snapshot` keeps in memory, split into large and small values.

Flow: large values are the parameters of modules and the state of optimizers. Only an optimizer step changes them, so
they are written only after a failure (`large`). Small values change at other times and are copied at the end of each
step (`settings`, `buffers`): buffers, learning rates, positions of samplers, states of schedulers, plain values.
`merged` joins both parts when a state is loaded.

Life cycle: `memory.Keeper` creates a Kept when the script passes other objects than before. Kept has only weak
references to optimizers and most other objects, so that it notices when the script replaces one.

Drawbacks: changes are detected by torch's version counters and by samples of the values. Writes through `.data` move no
counter and are seen only in the samples. `_Views` reads a tensor's memory by its address.
"""

import collections
import ctypes
import functools
import itertools
import operator
import weakref
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from ddpjob.checkpoint.state import packed
from ddpjob.checkpoint.state.of_each_rank import ignored, outermost, send_those_of_0, senders
from ddpjob.checkpoint.state.state_dicts import copied, sharded, state_of, unwrapped
from ddpjob.errors import StateError

SMALL_BYTES_MAX = 4 << 20  # limit in bytes for one object that is copied at each step
SAMPLES = 32  # number of sampled parameters; 32 are enough, because different models differ in every parameter
SAMPLED_BYTES = 8192  # total size of all samples, in bytes
COMPARED_BYTES = 1 << 14  # number of first bytes of a buffer that are compared
RECORD_STEPS = 64  # steps between two reads of all version counters, because reading all of them is slow
READ_AT_EACH = 8  # number of version counters of an optimizer's tensors that are read at each step
_DENSE = (torch.Tensor, torch.nn.Parameter)
_SMALL = "\0ddpjob small"
_CONSTANT: frozenset[Any] = frozenset({float, bool, type(None), int, str})  # types that cannot change in place
_is_list, _is_no_list = functools.partial(operator.is_, list), functools.partial(operator.is_not, list)
_version_of = operator.attrgetter("_version")
_address_of = torch.Tensor.data_ptr
PARAMETERS = "parameters"
BUFFERS = "\0ddpjob buffers"
"""Key of the buffers in a copy from a device, next to the large values."""


class OutgrownError(StateError):
    """The objects have other parameters or buffers than when the script passed them to `save`, `keep` or `load`."""


class ReplacedError(StateError):
    """The script trains with other objects than those that it has passed to `save`, `keep` or `load`."""


class Kept:
    """The objects that the script has passed to `save`, `keep` or `load`, by name."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        """Raises StateError for objects that cannot be kept in memory, only in a file."""
        self._objects = {name: _held(unwrapped(value)) for name, value in objects.items()}
        # name → module, and for each buffer: state_dict key, dict that holds the buffer, key in that dict
        self._modules: dict[str, tuple[torch.nn.Module, list[tuple[str, dict[str, Any], str]]]] = {}
        self._keys: dict[str, list[str]] = {}  # keys of each module's state_dict()
        self.optimizers: list[str] = []
        self._others: list[str] = []
        self._settings: dict[str, tuple[list[Any] | None, Any]] = {}  # see `settings`
        self._held: list[Any] = []
        self.by_value: list[str] = []  # names of plain values, which are captured when the script passes them
        self._senders: dict[str, list[DistributedDataParallel]] = {}
        """The wrappers that send the buffers of each model."""
        self.wrapped: set[str] = set()
        """Names of models in DistributedDataParallel."""
        self.called: list[torch.nn.Module] = []
        """Models as the script calls them: inside their DistributedDataParallel wrapper, if they have one."""
        for name, value in objects.items():
            if isinstance(value, torch.nn.Module):
                self._senders[name] = senders(value)
                self.called.append(outermost(value))
                if isinstance(self.called[-1], DistributedDataParallel):
                    self.wrapped.add(name)
            self._add(name, unwrapped(value))
        parameters = {id(each): each for module, _ in self._modules.values() for each in module.parameters()}
        for optimizer in self._living():
            parameters |= {id(each): each for group in optimizer.param_groups for each in group["params"]}
        self._parameters = list(parameters.values())
        dense = [p for p in self._parameters if type(p) in _DENSE and p.layout is torch.strided]
        self._samples = [dense[number * len(dense) // SAMPLES] for number in range(min(SAMPLES, len(dense)))]
        self._first = self._all = self._seen = _Views([], [], [], [])
        self._sampled = b""  # content of `_samples` at the end of the last step
        self._parts, self._counts = self._parts_now(), self._counts_now()
        own = {id(each) for optimizer in self._living() for group in optimizer.param_groups for each in group["params"]}
        self._untrained = {
            name: [*module.parameters()][:SAMPLES]
            for name, (module, _) in self._modules.items()
            if self.optimizers and own.isdisjoint(map(id, module.parameters()))
        }
        self.buffered = {f"buffers of {name}": name for name, (_, places) in self._modules.items() if places}
        """Names of modules with buffers, by the name under which the log reports that the buffers have changed."""
        others = {name: unwrapped(objects[name]) for name in self._others}
        self.models = list(self._modules)
        alike = LRScheduler | torch.amp.GradScaler
        ours = [name for name, value in others.items() if isinstance(value, alike) or hasattr(value, "reads_ahead")]
        self.known = [*self.optimizers, *ours]
        """Names of objects that are the same on all ranks because of their type."""
        schedulers = [name for name in ours if isinstance(others[name], LRScheduler)]
        self.idle = [*self._untrained, *schedulers, *(others.keys() - ours - set(self.by_value))]
        """Names of objects that a script surely changes at some point of its loop: averages of weights, schedulers, and
        objects of its own."""
        self._counters = [_Counters(optimizer, own) for optimizer, own in self._owned(parameters)]
        trained = [[p for p in module.parameters() if p.requires_grad] for module, _ in self._modules.values()]
        self.first_gradients = [its[-1] for its in trained if its]
        """The last parameter of each module: its gradient is usually the first one in a backward pass."""

    @property
    def broadcast(self) -> list[str]:
        """Names of models whose buffers DistributedDataParallel broadcasts from rank 0 before each forward pass."""
        return [name for name, wrappers in self._senders.items() if send_those_of_0(wrappers)]

    @property
    def with_own_buffers(self) -> set[str]:
        """Names of wrapped models whose buffers may differ between ranks."""
        return self.wrapped - set(self.broadcast)

    def _owned(self, parameters: Mapping[int, Any]) -> Iterator[tuple[Any, list[Any]]]:
        """Yield (optimizer, its parameters) pairs, and last (None, parameters that belong to no optimizer)."""
        left = dict(parameters)
        for optimizer in self._living():
            yield (
                optimizer,
                [p for group in optimizer.param_groups for p in group["params"] if left.pop(id(p), None) is not None],
            )
        yield None, list(left.values())

    def may_be_assumed(self) -> bool:
        """True if memory may keep these objects of `load`, although the script has not called `save` yet.

        Each object must know its position in the training. A sampler does not know it if a DataLoader reads ahead, and
        a script's own class may not know it.
        """
        return not self.by_value and all(
            isinstance(value, LRScheduler)
            or type(value).__module__.startswith("torch.")
            or getattr(value, "reads_ahead", True) is False
            for value in (self._objects[name]() for name in self._others)
        )

    @property
    def objects(self) -> dict[str, Any]:
        """The kept objects by name. Raises ReplacedError if the script has dropped an object."""
        return {name: self._get(name) for name in self._objects}

    def _get(self, name: str) -> Any:
        """Return the object with this name. Raises ReplacedError if the script has dropped it."""
        value = self._objects[name]()
        if value is None and type(self._objects[name]) is not _Held:
            raise ReplacedError(f"{name}: the script has replaced the object that it passed to save()")
        return value

    def samplers(self) -> dict[str, Any]:
        """Return the GlobalBatchSamplers by name. Raises ReplacedError."""
        return {name: value for name in self._others if hasattr(value := self._get(name), "reads_ahead")}

    def check_gone(self) -> None:
        """Raise ReplacedError if the script has dropped an optimizer."""
        for name in self.optimizers:
            self._get(name)

    def _living(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that the script has not dropped."""
        return [optimizer for name in self.optimizers if (optimizer := self._objects[name]()) is not None]

    def has(self, optimizer: Any) -> bool:
        """True if this optimizer's state is kept in memory."""
        return any(optimizer is self._objects[name]() for name in self.optimizers)

    def trains_with(self, optimizer: torch.optim.Optimizer) -> bool:
        """True if this optimizer changes parameters that are kept."""
        own = set(map(id, self._parameters))
        return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])

    def check_counts(self) -> None:
        """Raise OutgrownError if an optimizer has other parameters than before, ReplacedError if it was dropped."""
        self.check_gone()
        if self._counts_now() != self._counts:
            raise OutgrownError("an optimizer has other parameters")

    def check(self) -> None:
        """Raise OutgrownError if modules or optimizers have other parameters than before; `large` checks buffers."""
        self.check_counts()
        if self._parts_now() != self._parts:
            raise OutgrownError("the model has other parameters")

    def has_parts_of(self, other: "Kept") -> bool:
        """True if this Kept and the other one have the same parameters and optimizers."""
        return self._parts == other._parts

    def _counts_now(self) -> list[list[int]]:
        return [[len(group["params"]) for group in each.param_groups] for each in self._living()]

    def _parts_now(self) -> list[Any]:
        modules = [module.named_parameters(remove_duplicate=False) for module, _ in self._modules.values()]
        of_modules = [[(key, id(p), p.shape) for key, p in parameters] for parameters in modules]
        groups = [group["params"] for optimizer in self._living() for group in optimizer.param_groups]
        return [of_modules, [list(map(id, parameters)) for parameters in groups]]

    def is_of(self, objects: Mapping[str, Any]) -> bool:
        """True if these are the same objects with the same parameters. False if any is a plain value."""
        try:
            if self.by_value or {n: id(unwrapped(o)) for n, o in objects.items()} != {
                n: id(o) for n, o in self.objects.items()
            }:
                return False
            self.check()
        except (OutgrownError, ReplacedError):
            return False
        return True

    def _add(self, name: str, value: Any) -> None:
        if problem := sharded(value):
            raise StateError(f"{name}: {problem}")
        if isinstance(value, torch.nn.Module):
            if own := ignored(value):
                raise StateError(
                    f"{name}: DistributedDataParallel ignores {own[0]}: each rank may train its own, and the "
                    f"surviving ranks do not have that of a lost rank"
                )
            self._modules[name] = value, list(_buffers(name, value))
            self._keys[name] = list(value.state_dict())
        elif isinstance(value, torch.optim.Optimizer):
            if type(value).state_dict is not torch.optim.Optimizer.state_dict:
                raise StateError(f"{name}: {type(value).__name__} overrides state_dict(), which is not supported")
            packed.dumps(_setting(value, name))
            self.optimizers.append(name)
        else:
            self._others.append(name)
            if not hasattr(value, "state_dict"):
                self.by_value.append(name)
            if len(packed.dumps(copied(state_of(value), name))) > SMALL_BYTES_MAX:
                raise StateError(f"{name}: it has more than {SMALL_BYTES_MAX >> 20} MiB to copy at each step")

    def settings(self) -> dict[str, Any]:
        """Return learning rates and other settings of optimizers, and the states of objects that are no modules.

        Settings are copied again only if the object was given a new part, or has a part that can change in place.
        """
        for name in (*self.optimizers, *self._others):
            value = self._get(name)
            parts, last = _parts_of(value), self._settings.get(name, (None, None))[0]
            if parts is None or last is None or len(parts) != len(last):
                is_constant = parts is not None and _is_constant(value)
            elif new := list(itertools.compress(parts, map(operator.is_not, parts, last))):
                is_constant = _CONSTANT.issuperset(map(type, new)) or _is_constant(value)  # old parts are constant
            else:
                continue
            self._settings[name] = parts if is_constant else None, _setting(value, name, is_constant=is_constant)
        return {name: value for name, (_, value) in self._settings.items()}

    def untrained(self) -> dict[str, Any]:
        """Return version counters of modules that no optimizer trains, for example averages of weights."""
        return {name: list(map(_version_of, tensors)) for name, tensors in self._untrained.items()}

    def buffers(self, only: Collection[tuple[str, str]] | None = None) -> dict[str, Any]:
        """Return the buffers of the modules, not copied. only: (module name, key) pairs to return; None for all."""
        return {
            name: {key: of_module[leaf] for key, of_module, leaf in places if only is None or (name, key) in only}
            for name, (_, places) in self._modules.items()
        }

    def large_with_buffers(self, clone: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
        """Return parameters, optimizer state and buffers. Buffers are cloned: the next forward pass changes them."""
        copies = {
            name: {key: clone(value) for key, value in buffers.items()} for name, buffers in self.buffers().items()
        }
        return self.large() | {BUFFERS: copies}

    def large(self) -> dict[str, Any]:
        """Return parameters and optimizer state, not copied. Raises OutgrownError, StateError."""
        large: dict[str, Any] = {}
        for name, (module, places) in self._modules.items():
            small = {key for key, _, _ in places}
            state = module.state_dict()
            if list(state) != self._keys[name]:
                raise OutgrownError(f"{name} has other parameters or buffers")
            if unknown := [key for key, value in state.items() if not isinstance(value, torch.Tensor)]:
                raise StateError(f"{name}: {unknown[0]} is not a tensor")
            own = collections.OrderedDict((key, _SMALL if key in small else value) for key, value in state.items())
            large[name] = {"state": own, "metadata": dict(getattr(state, "_metadata", {}))}
        for name, optimizer in zip(self.optimizers, self._living(), strict=True):
            state = optimizer.state_dict()
            large[name] = {"state": state["state"], "params": [group["params"] for group in state["param_groups"]]}
        self.check()  # checked last, because another thread may add a layer meanwhile
        return large

    def buffers_as_they_are(self) -> dict[str, dict[str, Any]]:
        """Return the content of each buffer, by model and buffer name, to compare it later.

        For a large buffer return its first bytes, address and version counter. The counter alone is not enough, because
        forward passes in C++ (BatchNorm, InstanceNorm) and writes through `.data` do not change it.
        """
        if not self.buffered:
            return {}
        places = [(each, *place) for each, name in self.buffered.items() for place in self._modules[name][1]]
        tensors = [of_module[leaf] for _, _, of_module, leaf in places]
        self._seen = seen = _views(self._seen, tensors, COMPARED_BYTES)
        found: dict[str, dict[str, Any]] = {each: {} for each in self.buffered}
        for (each, key, *_), view, is_whole, tensor in zip(places, seen.views, seen.are_whole, tensors, strict=True):
            found[each][key] = bytes(view) if is_whole else (bytes(view), tensor.data_ptr(), tensor._version)
        return found

    def count_step(self, optimizer: Any) -> None:
        """Record that this optimizer is about to make a step."""
        for own in self._counters:
            if own.optimizer() is optimizer:
                own.steps += 1

    def goes_on_from(self, other: "Kept") -> None:
        """Copy the version counters from another Kept with the same optimizers."""
        if [own.optimizer() for own in self._counters] == [own.optimizer() for own in other._counters]:
            self._counters, self._sampled = other._counters, other._sampled

    def record(self) -> None:
        """Remember version counters and samples of parameters and optimizer state at the end of a step."""
        for own in self._counters:
            own.record()
        self._sampled = self._sample_now()
        self._held = self._living()  # keeps the optimizer's state alive after the script's main() has returned

    def release(self) -> None:
        """Drop the references to optimizers, to notice an optimizer that the script drops."""
        self._held = []

    def changed(self) -> str:
        """Return what has changed without an optimizer step since `record`: PARAMETERS, an optimizer's name, or ""."""
        found = dict(zip([*self.optimizers, PARAMETERS], [own.changed() for own in self._counters], strict=True))
        is_sampled = self._counters[-1].is_recorded
        if PARAMETERS in found.values() or (is_sampled and self._sample_now() != self._sampled):
            return PARAMETERS
        return next((name for name, what in found.items() if what), "")

    def count_tensors(self) -> int:
        """Return the number of parameters that have optimizer state."""
        return sum(len(optimizer.state) for optimizer in self._living())

    def counters(self) -> list[Any]:
        """Return the version counter of each parameter."""
        return list(map(_version_of, self._parameters))

    def sample(self) -> int:
        """Return a checksum of the parameter samples at the last `record`, to compare parameters of ranks."""
        return zlib.crc32(self._sampled)

    def versions(self) -> list[Any]:
        """Return version counters and samples of the parameters. Equal lists mean that parameters have not changed.
        Samples are included because writes through `.data` do not move a version counter.
        """
        return [*self.counters(), self._sample_now()]

    def total(self) -> int:
        """Return the sum of all bits of parameters and optimizer state. Raises OutgrownError, StateError."""
        self.check()
        states = [tensor for own in self._counters for tensor in own.state_now()]
        every = [*self._parameters, *states]
        dense = [each for each in every if each.layout is torch.strided]  # sparse tensors have no address
        self._all = _views(self._all, dense, packed.SMALL_BYTES)
        large = [each for each, is_whole in zip(self._all.tensors, self._all.are_whole, strict=True) if not is_whole]
        large += [each for each in every if each.layout is not torch.strided]
        small = functools.reduce(lambda found, view: zlib.crc32(view, found), self._all.views, 0)
        return (packed.total(packed.tensors_of(large)) * 3 + small) % (1 << 63)

    def _sample_now(self) -> bytes:
        self._first = _views(self._first, self._samples, SAMPLED_BYTES // max(1, len(self._samples)))
        return b"".join(self._first.views)


class _Held:
    """Strong reference to an object that cannot have a weak reference; keeps the object alive."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __call__(self) -> Any:
        return self._value


def _held(value: Any) -> Callable[[], Any]:
    """Return a function that returns the object, or None if the script has dropped it. A module is kept alive."""
    if hasattr(value, "state_dict") and not isinstance(value, torch.nn.Module):
        try:
            return weakref.ref(value)
        except TypeError:
            pass
    return _Held(value)


class _Counters:
    """Version counters of an optimizer's parameters and state.

    Each step increases a counter by the same amount. So all counters are read only at every RECORD_STEPS-th step. At
    other steps a few counters are read, to check that they have the expected values.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None, parameters: list[torch.Tensor]) -> None:
        """optimizer: None for parameters that belong to no optimizer."""
        self.optimizer: Callable[[], Any] = _none if optimizer is None else weakref.ref(optimizer)
        self.steps = 0
        self._parameters, self._boundaries = parameters, 0
        self._tensors: list[torch.Tensor] = []
        self._counters: list[int] | None = None
        self._moves: list[int] | None = None
        self._few: list[torch.Tensor] = []
        self._few_moves: list[tuple[int, int]] = []  # (counter, increase per step) for each tensor in `_few`

    @property
    def is_recorded(self) -> bool:
        """True if `record` was called before."""
        return self._counters is not None

    def record(self) -> None:
        """Remember the version counters as they are now."""
        self._boundaries += 1
        if self._moves is not None and self._boundaries < RECORD_STEPS:
            expected = [counter + self.steps * move for counter, move in self._few_moves]
            if list(map(_version_of, self._few)) == expected:
                return
        tensors, before, moves, steps = self._now(), self._counters, self._moves, self.steps
        is_same, counters = before is not None and self._is_of(tensors), list(map(_version_of, tensors))
        self._tensors, self._counters, self.steps, self._boundaries, self._moves = tensors, counters, 0, 0, None
        if before is None or not is_same:
            return
        if moves is not None:
            is_known = counters == _after(before, moves, steps)
        else:
            moves = [now - then for now, then in zip(counters, before, strict=True)]
            is_known = steps == (0 if self.optimizer is _none else 1) and (steps == 1 or not any(moves))
        if is_known:
            self._moves, stride = moves, max(1, len(tensors) // READ_AT_EACH)
            self._few, self._few_moves = tensors[::stride], list(zip(counters, moves, strict=True))[::stride]

    def changed(self) -> str:
        """Return what has changed without an optimizer step since `record`: PARAMETERS, "state", or ""."""
        if self._counters is None:
            return ""
        tensors = self._now()
        expected = self._counters if self._moves is None else _after(self._counters, self._moves, self.steps)
        counters, own = list(map(_version_of, tensors)), len(self._parameters)
        if counters == expected and self._is_of(tensors):
            return ""
        return "state" if counters[:own] == expected[:own] else PARAMETERS

    def _is_of(self, tensors: list[torch.Tensor]) -> bool:
        return len(tensors) == len(self._tensors) and all(map(operator.is_, tensors, self._tensors))

    def _now(self) -> list[torch.Tensor]:
        return [*self._parameters, *self.state_now()]

    def state_now(self) -> list[torch.Tensor]:
        """Return the tensors of the optimizer's state."""
        optimizer = self.optimizer()
        states = [] if optimizer is None else list(optimizer.state.values())
        values = itertools.chain.from_iterable(state.values() for state in states if isinstance(state, dict))
        return [value for value in values if isinstance(value, torch.Tensor)]


def _none() -> None:
    """Replaces the weak reference to an optimizer, for parameters that no optimizer has."""


def _after(counters: list[int], moves: list[int], steps: int) -> list[int]:
    """Return the expected version counters after this many steps."""
    return [counter + steps * move for counter, move in zip(counters, moves, strict=True)]


class _Views(NamedTuple):
    """Views of the first bytes of tensors, without a copy."""

    addresses: list[int]
    tensors: list[torch.Tensor]
    """References that keep the memory alive if another thread replaces a tensor."""
    are_whole: list[bool]
    """For each tensor: True if its view has all bytes of the tensor."""
    views: list[Any]


def _views(before: _Views, tensors: Sequence[torch.Tensor], most: int) -> _Views:
    """Return views of these tensors, at most `most` bytes each. Return `before` if no tensor has a new address."""
    addresses = list(map(_address_of, tensors))
    if addresses == before.addresses:
        return before
    found = _Views(addresses, [], [], [])
    for address, tensor in zip(addresses, (each.detach() for each in tensors), strict=True):
        size = tensor.numel() * tensor.element_size()
        is_seen = tensor.is_cpu and size > 0 and packed.is_one_run(tensor)
        found.tensors.append(tensor)
        found.are_whole.append(is_seen and size <= most)
        found.views.append((ctypes.c_char * min(size, most)).from_address(address) if is_seen else b"")
    return found


def merged(large: Mapping[str, Any], small: Mapping[str, Any]) -> dict[str, Any]:
    """Join large and small values to the state that `save` would write. Raises StateError if they do not match."""
    try:
        return {name: _merged(large.get(name), value) for name, value in small.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StateError(f"the parts of a state in memory do not match: {type(error).__name__}: {error}") from error


def _merged(large: Any, small: Any) -> Any:
    if large is None:
        return small
    if "params" in large:
        groups = [{**group, "params": params} for group, params in zip(small, large["params"], strict=True)]
        return {"state": large["state"], "param_groups": groups}
    state = collections.OrderedDict((k, small[k] if isinstance(v, str) else v) for k, v in large["state"].items())
    state._metadata = collections.OrderedDict(large["metadata"])  # type: ignore[attr-defined]
    return state


def _buffers(name: str, model: torch.nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """For each buffer yield its state_dict key, the dict that holds it, and its key in that dict. Reading the dict
    takes a tenth of the time of `getattr`. Raises StateError."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for key, value in model.state_dict().items():
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            raise StateError(f"{name}: {key} is not dense, but would be dense after a restart")
        if is_lazy(value):
            raise StateError(f"{name}: {key} has no shape before the first forward pass")
        prefix, _, leaf = key.rpartition(".")
        if key in parameters:
            continue
        try:
            module = model.get_submodule(prefix)
            same = isinstance(value, torch.Tensor) and getattr(module, leaf).data_ptr() == value.data_ptr()
        except AttributeError:
            same = False
        if not same:
            raise StateError(f"{name}: {key} of its state_dict() is neither a parameter nor a buffer")
        yield key, module._buffers if leaf in module._buffers else vars(module), leaf


def _parts_of(value: Any) -> list[Any] | None:
    """Return the parts of an optimizer's or scheduler's settings; None for other objects, whose parts are unknown. A
    scheduler's lists are replaced by their items, because LRScheduler makes a new list at each step."""
    if isinstance(value, torch.optim.Optimizer):
        found: list[Any] = []
        for group in value.param_groups:
            found += group
            found += group.values()
        return found
    if not isinstance(value, LRScheduler):
        return None
    own = vars(value)
    types = list(map(type, own.values()))
    items = itertools.chain.from_iterable(itertools.compress(own.values(), map(_is_list, types)))
    return [*own, *types, *itertools.compress(own.values(), map(_is_no_list, types)), *items]


def _is_constant(value: Any) -> bool:
    """True if no value in the settings of an optimizer or a scheduler can change in place."""
    if isinstance(value, torch.optim.Optimizer):
        items = [item for group in value.param_groups for item in group.items() if item[0] != "params"]
        return all(type(key) is str and _is_plain(each) for key, each in items)
    return type(value).state_dict is LRScheduler.state_dict and all(
        each is value.optimizer or all(_is_plain(item) for item in (each if type(each) is list else [each]))
        for each in vars(value).values()
    )


def _setting(value: Any, name: str, *, is_constant: bool = False) -> Any:
    """Return a copy of the value; for an optimizer the settings of its groups, such as learning rates."""
    if isinstance(value, torch.optim.Optimizer):
        groups = [{**group} for group in value.param_groups]
        for group in groups:
            del group["params"]
        return groups if is_constant else [{key: copied(each, key) for key, each in group.items()} for group in groups]
    if is_constant:
        return {key: [*each] if type(each) is list else each for key, each in value.state_dict().items()}
    return copied(state_of(value), name)


def _is_plain(value: Any) -> bool:
    return type(value) in _CONSTANT or (type(value) is tuple and all(type(item) in _CONSTANT for item in value))
