"""What a `Snapshot` keeps in memory of the objects that it is given: what is small at each step, the rest after a
failure.

Large are the parameters of a module and the state of an optimizer: only the optimizer's step changes them, so they are
written when a rank has failed. Small is what changes at other times, and is copied at each boundary: buffers, learning
rates, the place of a sampler, the state of a scheduler, values that the script names.
"""

import collections
import ctypes
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from ddpjob.checkpoint import packed
from ddpjob.checkpoint.state_dicts import copied, sharded, state_of, unwrapped
from ddpjob.errors import StateError

SMALL_BYTES_MAX = 4 << 20  # of one object, at each step
SAMPLES = 8  # averages that are swapped in differ everywhere
_DENSE = (torch.Tensor, torch.nn.Parameter)
_SMALL = "\0ddpjob small"
_PLAIN: frozenset[Any] = frozenset({float, bool, type(None)})  # what needs no copy: most settings of a group
_CONSTANT = _PLAIN | {int, str}  # what never becomes another value
_version_of, _raw_of = operator.attrgetter("_version"), operator.attrgetter("raw")
_address_of = torch.Tensor.data_ptr
_NOTHING: Any = (ctypes.c_char * 0)()
BUFFERS = "\0ddpjob buffers"
"""The name of buffers beside what is large."""


class OutgrownError(StateError):
    """The objects have other parameters or buffers than when the script named them."""


class Kept:
    """The objects of one `save`, by the names that it has for them."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        """Raises StateError for what only a file can keep."""
        self.objects = {name: unwrapped(value) for name, value in objects.items()}
        self._modules: dict[str, tuple[torch.nn.Module, list[tuple[str, torch.nn.Module, str]]]] = {}
        self._keys: dict[str, list[str]] = {}  # of their state_dict()
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._others: dict[str, Any] = {}
        self.by_value: list[str] = []  # names of values, which are what they were when the script named them
        for name, value in self.objects.items():
            self._add(name, value)
        parameters = {id(each): each for module, _ in self._modules.values() for each in module.parameters()}
        for optimizer in self._optimizers.values():
            parameters |= {id(each): each for group in optimizer.param_groups for each in group["params"]}
        self._parameters = list(parameters.values())
        dense = [p for p in self._parameters if type(p) in _DENSE and p.layout is torch.strided]
        self._samples = [dense[number * len(dense) // SAMPLES] for number in range(min(SAMPLES, len(dense)))]
        self._firsts = _Firsts([], [], [])
        self._parts, self._counts = self._parts_now(), self._counts_now()
        trained = [[p for p in module.parameters() if p.requires_grad] for module, _ in self._modules.values()]
        self.first_gradients = [its[-1] for its in trained if its]
        """The last parameter of each module: in backward its gradient usually comes first."""

    def may_be_assumed(self) -> bool:
        """Whether objects that `load` has named are what `save` will name: each can tell by itself where training is.

        A sampler that a DataLoader reads ahead cannot, and what a script has made itself need not.
        """
        return not self.by_value and all(
            isinstance(value, torch.optim.lr_scheduler.LRScheduler)
            or type(value).__module__.startswith("torch.")
            or getattr(value, "reads_ahead", True) is False
            for value in self._others.values()
        )

    def has(self, optimizer: Any) -> bool:
        """Whether it keeps this optimizer's state."""
        return any(optimizer is own for own in self._optimizers.values())

    def trains_with(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this optimizer changes what it keeps."""
        own = set(map(id, self._parameters))
        return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])

    def check_counts(self) -> None:
        """Raises OutgrownError where an optimizer has more parameters than it had; cheap enough for each step."""
        if self._counts_now() != self._counts:
            raise OutgrownError("an optimizer has other parameters")

    def check(self) -> None:
        """Raises OutgrownError where the objects have other parameters than they had; buffers: see `large`."""
        self.check_counts()
        if self._parts_now() != self._parts:
            raise OutgrownError("the model has other parameters")

    def has_parts_of(self, other: "Kept") -> bool:
        """Whether both have the same parameters and optimizers."""
        return (self._parts, self._counts) == (other._parts, other._counts)

    def _counts_now(self) -> list[list[int]]:
        return [[len(group["params"]) for group in each.param_groups] for each in self._optimizers.values()]

    def _parts_now(self) -> list[Any]:
        modules = [module.named_parameters(remove_duplicate=False) for module, _ in self._modules.values()]
        of_modules = [[(key, id(p), p.shape) for key, p in parameters] for parameters in modules]
        groups = [group["params"] for optimizer in self._optimizers.values() for group in optimizer.param_groups]
        return [of_modules, [list(map(id, parameters)) for parameters in groups]]

    def is_of(self, objects: Mapping[str, Any]) -> bool:
        """Whether it keeps these very objects, and they have what they had; values are none."""
        if self.by_value or {n: id(unwrapped(o)) for n, o in objects.items()} != {
            n: id(o) for n, o in self.objects.items()
        }:
            return False
        try:
            self.check()
        except OutgrownError:
            return False
        return True

    def _add(self, name: str, value: Any) -> None:
        if problem := sharded(value):
            raise StateError(f"{name}: {problem}")
        if isinstance(value, torch.nn.Module):
            self._modules[name] = value, list(_buffers(name, value))
            self._keys[name] = list(value.state_dict())
        elif isinstance(value, torch.optim.Optimizer):
            if type(value).state_dict is not torch.optim.Optimizer.state_dict:
                raise StateError(f"{name}: a {type(value).__name__} has a state_dict() of its own")
            packed.pack(_groups(value))
            self._optimizers[name] = value
        else:
            self._others[name] = value
            if not hasattr(value, "state_dict"):
                self.by_value.append(name)
            if packed.pack(copied(state_of(value), name)).size > SMALL_BYTES_MAX:
                raise StateError(f"{name}: it has more than {SMALL_BYTES_MAX >> 20} MiB to copy at each step")

    def small(self, *, buffers: bool = True) -> dict[str, Any]:
        """What changes at other times; to be written at once, for its tensors are the live ones."""
        return (self.buffers() if buffers else {}) | self.settings()

    def settings(self) -> dict[str, Any]:
        """All of that but the buffers."""
        groups = {name: _groups(optimizer) for name, optimizer in self._optimizers.items()}
        return groups | {name: copied(state_of(value), name) for name, value in self._others.items()}

    def objects_of_settings(self) -> list[Any]:
        """While these are the very same ones, so are the settings, if `settings_are_plain`."""
        found: list[Any] = [len(optimizer.param_groups) for optimizer in self._optimizers.values()]
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                found += group
                found += group.values()
        return found

    def settings_are_plain(self) -> bool:
        """Whether they are optimizers' alone, and each a value that never becomes another one."""
        groups = [group for optimizer in self._optimizers.values() for group in optimizer.param_groups]
        items = [item for group in groups for item in group.items() if item[0] != "params"]
        return not self._others and all(type(key) is str and _is_plain(value, _CONSTANT) for key, value in items)

    def tensors_of_buffers(self) -> list[Any]:
        """Those of `buffers`, one after the other."""
        return [getattr(module, leaf) for _, places in self._modules.values() for _, module, leaf in places]

    def buffers(self) -> dict[str, Any]:
        """Of the modules alone."""
        return {
            name: {key: getattr(module, leaf) for key, module, leaf in places}
            for name, (_, places) in self._modules.items()
        }

    def large_with_buffers(self, clone: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
        """Everything that may be on a device, with clones of the buffers: the next forward pass changes them."""
        copies = {
            name: {key: clone(value) for key, value in buffers.items()} for name, buffers in self.buffers().items()
        }
        return self.large() | {BUFFERS: copies}

    def large(self) -> dict[str, Any]:
        """Everything else, as it is now. Raises OutgrownError."""
        large: dict[str, Any] = {}
        for name, (module, places) in self._modules.items():
            small = {key for key, _, _ in places}
            state = module.state_dict()
            if list(state) != self._keys[name]:
                raise OutgrownError(f"{name} has other parameters or buffers")
            if unknown := [key for key, value in state.items() if not isinstance(value, torch.Tensor)]:
                raise StateError(f"{name}: {unknown[0]} is no tensor")
            own = collections.OrderedDict((key, _SMALL if key in small else value) for key, value in state.items())
            large[name] = {"state": own, "metadata": dict(getattr(state, "_metadata", {}))}
        for name, optimizer in self._optimizers.items():
            state = optimizer.state_dict()
            large[name] = {"state": state["state"], "params": [group["params"] for group in state["param_groups"]]}
        self.check()  # last: the script may add a layer meanwhile
        return large

    def counters(self) -> list[Any]:
        """How often each parameter was changed in place."""
        return list(map(_version_of, self._parameters))

    def versions(self) -> list[Any]:
        """The counters, and of some parameters the first value, because what is written through `.data` is not counted:
        equal lists, and nobody has changed them."""
        found = self.counters()
        firsts = self._firsts
        if list(map(_address_of, self._samples)) != firsts.addresses:
            firsts = self._firsts = _firsts(self._samples)
        found += map(_raw_of, firsts.values)
        return found


class _Firsts(NamedTuple):
    """Where the first values of some parameters are."""

    addresses: list[int]
    values: list[Any]
    held: list[torch.Tensor]
    """What holds that memory, where another thread puts another one in its place."""


def _firsts(parameters: Sequence[torch.Tensor]) -> _Firsts:
    firsts = _Firsts([], [], [])
    for tensor in (parameter.detach() for parameter in parameters):
        address, value = tensor.data_ptr(), _NOTHING
        if tensor.is_cpu and tensor.numel() and address:
            value = (ctypes.c_char * tensor.element_size()).from_address(address)
            firsts.held.append(tensor)
        firsts.addresses.append(address)
        firsts.values.append(value)
    return firsts


def merged(large: Mapping[str, Any], small: Mapping[str, Any]) -> dict[str, Any]:
    """The state as `save` would have it. Raises StateError where the two do not belong together."""
    try:
        return {name: _merged(large.get(name), value) for name, value in small.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StateError(f"the parts of a state in memory do not fit: {type(error).__name__}: {error}") from error


def _merged(large: Any, small: Any) -> Any:
    if large is None:
        return small
    if "params" in large:
        groups = [{**group, "params": params} for group, params in zip(small, large["params"], strict=True)]
        return {"state": large["state"], "param_groups": groups}
    state = collections.OrderedDict((k, small[k] if isinstance(v, str) else v) for k, v in large["state"].items())
    state._metadata = collections.OrderedDict(large["metadata"])  # type: ignore[attr-defined]
    return state


def _buffers(name: str, model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str]]:
    """The key in the state_dict, the module, the attribute."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for key, value in model.state_dict().items():
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            raise StateError(f"{name}: {key} is not dense, and would be when it comes back")
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
        yield key, module, leaf


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The settings, such as learning rates, without the parameters."""
    return [
        {key: value if _is_plain(value) else copied(value, key) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _is_plain(value: Any, types: Collection[Any] = _PLAIN) -> bool:
    return type(value) in types or (type(value) is tuple and all(type(item) in types for item in value))
