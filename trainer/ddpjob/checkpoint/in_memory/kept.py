"""`Kept`: the objects that one `Snapshot` keeps in memory, split into large and small values.

Only an optimizer step changes large values (parameters, optimizer state), so they are written only after a failure.
Small values (buffers, learning rates, samplers, schedulers, plain values) are copied at the end of each step. `merged`
joins both when a state is loaded. A Kept has only weak references to optimizers, averages and most other objects, so
that it notices when the script replaces one.
"""

import collections
import contextlib
import copy
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from ddpjob import process
from ddpjob.checkpoint.in_memory.change_watch import NO_VIEWS, ChangeWatch, version_of, views
from ddpjob.checkpoint.state import packed
from ddpjob.checkpoint.state.of_each_rank import ignored, outermost, send_those_of_0, senders, uses_all
from ddpjob.checkpoint.state.state_dicts import copied, sharded, state_of, unwrapped
from ddpjob.errors import StateError

SMALL_BYTES_MAX = 4 << 20  # limit in bytes for one object that is copied at each step
COMPARED_BYTES = 1 << 14  # number of first bytes of a buffer that are compared
_SMALL = "\0ddpjob small"
BUFFERS = "\0ddpjob buffers"
"""Key of the buffers in a copy from a device, next to the large values."""


class OutgrownError(StateError):
    """The objects have other parameters or buffers than when the script passed them to `save`, `keep` or `load`."""


class ReplacedError(StateError):
    """The script trains with other objects than those that it has passed to `save`, `keep` or `load`."""


class Kept:
    """The objects that the script has passed to `save`, `keep` or `load`, by name."""

    def __init__(self, objects: Mapping[str, Any], loaded: Mapping[str, Any] | None = None) -> None:
        """loaded: values that were just loaded into these objects. Raises StateError for objects that cannot be kept in
        memory, only in a file."""
        averages = untrained(objects)
        self.loaded = {n: v for n, v in (loaded or {}).items() if not may_be_assumed({n: objects[n]})}
        """Values of objects of unknown type until the next step: state_dict() begins an epoch of some data loaders."""
        self._objects = {name: _held(unwrapped(value), is_weak=name in averages) for name, value in objects.items()}
        # name of a module → for each buffer: state_dict key, dict that holds the buffer, key in that dict
        self._leaves: dict[str, list[tuple[str, dict[str, Any], str]]] = {}
        self._keys: dict[str, list[str]] = {}  # keys of each module's state_dict()
        self.optimizers: list[str] = []
        self._others: list[str] = []
        self.by_value: list[str] = []  # names of plain values, which are captured when the script passes them
        for name, value in objects.items():
            self._add(name, unwrapped(value))
        self._senders = {name: senders(objects[name]) for name in self._leaves}
        """The wrappers that send the buffers of each model."""
        self.wrapped = {name for name in self._leaves if isinstance(outermost(objects[name]), DistributedDataParallel)}
        """Names of models in DistributedDataParallel."""
        modules: dict[str, torch.nn.Module] = {name: self._get(name) for name in self._leaves}
        parameters = {id(each): each for module in modules.values() for each in module.parameters()}
        optimizers = {name: self._get(name) for name in self.optimizers}
        for optimizer in optimizers.values():
            parameters |= {id(each): each for group in optimizer.param_groups for each in group["params"]}
        self._weak = [*self.optimizers, *averages]
        self.watch = ChangeWatch(optimizers, {name: modules[name] for name in averages}, list(parameters.values()))
        self._seen = NO_VIEWS
        self._summed: dict[tuple[str, str], tuple[Any, int]] = {}  # see `total`
        self._parts = self._parts_now()
        self._counts = list(map(len, self._parts[1]))
        self.buffered = {f"buffers of {name}": name for name, leaves in self._leaves.items() if leaves}
        """Names of modules with buffers, by the name under which the log reports that the buffers have changed."""
        others = {name: unwrapped(objects[name]) for name in self._others}
        self.models = list(modules)
        self.sampled = [name for name, value in others.items() if hasattr(value, "reads_ahead")]
        alike = LRScheduler | torch.amp.GradScaler
        ours = [name for name, value in others.items() if isinstance(value, alike) or name in self.sampled]
        counts = [name for name in averages if isinstance(modules[name], AveragedModel)]
        self.known = [*self.optimizers, *ours, *(f"n_averaged of {name}" for name in counts)]
        """Names of objects and buffers that are the same on all ranks because of their type."""
        schedulers = [name for name in ours if isinstance(others[name], LRScheduler)]
        self.idle = [*averages, *schedulers, *(others.keys() - ours - set(self.by_value))]
        """Names of objects that a script surely changes at some point of its loop: averages of weights, schedulers, and
        objects of its own."""
        trained = {name: [p for p in module.parameters() if p.requires_grad] for name, module in modules.items()}
        self.first_gradients = [p for n, its in trained.items() for p in (its[-1:] if uses_all(objects[n]) else its)]
        """The parameters one of which gets the first gradient of a backward pass: usually the last of a module."""

    @property
    def broadcast(self) -> list[str]:
        """Names of models whose buffers DistributedDataParallel broadcasts from rank 0 before each forward pass."""
        return [name for name, wrappers in self._senders.items() if send_those_of_0(wrappers)]

    @property
    def with_own_buffers(self) -> set[str]:
        """Names of wrapped models whose buffers may differ between ranks."""
        return self.wrapped - set(self.broadcast)

    def was_wrapped(self) -> bool:
        """True if the script has wrapped a model in DistributedDataParallel after it has passed it, as after load()."""
        models = [self._get(name) for name in self.models if name not in self.wrapped]
        return any(isinstance(outermost(model), DistributedDataParallel) for model in models)

    def may_be_assumed(self) -> bool:
        """True if each object knows its position in the training; see the function below."""
        return may_be_assumed({name: held() for name, held in self._objects.items()})

    @property
    def objects(self) -> dict[str, Any]:
        """The kept objects by name. Raises ReplacedError if the script has dropped an object."""
        return {name: self._get(name) for name in self._objects}

    def _get(self, name: str) -> Any:
        """Return the object with this name. Raises ReplacedError if the script has dropped it."""
        value = self._objects[name]()
        if value is None and isinstance(self._objects[name], weakref.ref):
            raise ReplacedError(f"{name}: the script has replaced the object that it passed to save()")
        return value

    def samplers(self) -> dict[str, Any]:
        """Return the GlobalBatchSamplers by name. Raises ReplacedError."""
        return {name: self._get(name) for name in self.sampled}

    def check_gone(self) -> None:
        """Raise ReplacedError if the script has dropped an optimizer or an average."""
        for name in self._weak:
            self._get(name)

    def check_counts(self) -> None:
        """Raise OutgrownError if an optimizer has other parameters than before, ReplacedError if it was dropped."""
        self.check_gone()
        if [len(group["params"]) for each in self.optimizers for group in self._get(each).param_groups] != self._counts:
            raise OutgrownError("an optimizer has other parameters")

    def check(self) -> None:
        """Raise OutgrownError if modules or optimizers have other parameters than before; `large` checks buffers."""
        self.check_counts()
        if self._parts_now() != self._parts:
            raise OutgrownError("the model has other parameters")

    def has_parts_of(self, other: "Kept") -> bool:
        """True if this Kept and the other one have the same parameters and optimizers."""
        return self._parts == other._parts

    def _parts_now(self) -> list[Any]:
        modules = list(map(self._get, self._leaves))
        named = [module.named_parameters(remove_duplicate=False) for module in modules]
        of_modules = [[(key, id(p), p.shape) for key, p in parameters] for parameters in named]
        groups = [group["params"] for name in self.optimizers for group in self._get(name).param_groups]
        # A layer without parameters may be replaced, too. `_leaves` has its old dict, so no new one has that id.
        buffers = [[id(each._buffers) for each in module.modules() if each._buffers] for module in modules]
        return [of_modules, [list(map(id, parameters)) for parameters in groups], buffers]

    def of(self, objects: Mapping[str, Any]) -> "Kept | None":
        """Return this Kept if these are its objects with the same parameters; a copy with the new values if some are
        plain values; otherwise None. Raises StateError for a plain value that cannot be kept."""
        values = {name: objects[name] for name in self.by_value if name in objects}
        ids = {name: id(unwrapped(value)) for name, value in objects.items() if name not in values}
        try:
            own = {name: id(value) for name, value in self.objects.items() if name not in values}
            if ids != own or any(hasattr(unwrapped(value), "state_dict") for value in values.values()):
                return None
            self.check()
        except (OutgrownError, ReplacedError):
            return None
        if not values:
            return self
        renewed = copy.copy(self)  # a new Kept would look at each parameter again
        renewed.loaded, renewed._objects = {}, dict(self._objects)
        for name, value in values.items():
            renewed._objects[name] = _held(value, is_weak=False)
            renewed._check_size(name, copied(value, name))
        return renewed

    def _add(self, name: str, value: Any) -> None:
        if problem := sharded(value):
            raise StateError(f"{name}: {problem}")
        if isinstance(value, torch.nn.Module):
            if own := [*ignored(value), *_renormed(value)]:
                raise StateError(
                    f"{name}: each rank may have its own {own[0]}, which DistributedDataParallel ignores or which has "
                    f"max_norm: the surviving ranks do not have that of a lost rank"
                )
            self._leaves[name] = list(_buffers(name, value))
            self._keys[name] = list(value.state_dict())
        elif isinstance(value, torch.optim.Optimizer):
            packed.dumps(_setting(value, name))
            self.optimizers.append(name)
        else:
            self._others.append(name)
            if not hasattr(value, "state_dict"):
                self.by_value.append(name)
            self._check_size(name, self.loaded[name] if name in self.loaded else copied(state_of(value), name))

    def _check_size(self, name: str, state: Any) -> None:
        if len(packed.dumps(state)) > SMALL_BYTES_MAX:
            raise StateError(f"{name}: it has more than {SMALL_BYTES_MAX >> 20} MiB to copy at each step")

    def settings(self) -> dict[str, Any]:
        """Return learning rates and other settings of optimizers, and the states of objects that are no modules."""
        new = [name for name in (*self.optimizers, *self._others) if name not in self.loaded]
        return {**self.loaded, **{name: _setting(self._get(name), name) for name in new}}

    def watched(self, begun: Mapping[str, Any], settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the small values to compare: begun (random states and buffers), settings, and averages of weights."""
        averages = {name: list(map(version_of, tensors)) for name, (_, tensors) in self.watch.averages.items()}
        return {**begun, **(self.settings() if settings is None else settings), **averages}

    def buffers(self, only: Collection[tuple[str, str]] | None = None) -> dict[str, Any]:
        """Return the buffers of the modules, not copied. only: (module name, key) pairs to return; None for all."""
        return {
            name: {key: of_module[leaf] for key, of_module, leaf in leaves if only is None or (name, key) in only}
            for name, leaves in self._leaves.items()
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
        for name, leaves in self._leaves.items():
            small = {key for key, _, _ in leaves}
            state = self._get(name).state_dict()
            if list(state) != self._keys[name]:
                raise OutgrownError(f"{name} has other parameters or buffers")
            if unknown := [key for key, value in state.items() if not isinstance(value, torch.Tensor)]:
                raise StateError(f"{name}: {unknown[0]} is not a tensor")
            own = collections.OrderedDict((key, _SMALL if key in small else value) for key, value in state.items())
            large[name] = {"state": own, "metadata": dict(getattr(state, "_metadata", {}))}
        for name in self.optimizers:
            state = self._get(name).state_dict()
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
        leaves = [(each, *leaf) for each, name in self.buffered.items() for leaf in self._leaves[name]]
        tensors = [of_module[leaf] for _, _, of_module, leaf in leaves]
        self._seen = seen = views(self._seen, tensors, COMPARED_BYTES)
        found: dict[str, dict[str, Any]] = {each: {} for each in self.buffered}
        for (each, key, *_), view, is_whole, tensor in zip(leaves, seen.views, seen.are_whole, tensors, strict=True):
            found[each][key] = bytes(view) if is_whole else (bytes(view), tensor.data_ptr(), tensor._version)
        return found

    def total(self) -> int:
        """Return the sum of all bits of parameters and optimizer state. Raises OutgrownError; StateError for a large
        buffer that has changed although `buffers_as_they_are` is the same."""
        self.check()
        for each, its in self.buffers_as_they_are().items():
            own = self.buffers()[self.buffered[each]]
            for key in (key for key, what in its.items() if type(what) is tuple and own[key].is_cpu):
                before, total = self._summed.get((each, key), (None, 0))
                now = packed.total(packed.tensors_of([own[key]]))
                if before == its[key] and total != now:
                    raise StateError(f"{each}: {key} is changed through .data, which is seen in small buffers only")
                self._summed[each, key] = its[key], now
        return self.watch.total()


def _renormed(model: torch.nn.Module) -> list[str]:
    """Return the names of embeddings with `max_norm`: each forward pass changes the rows that its rank looks up."""
    kinds = torch.nn.Embedding | torch.nn.EmbeddingBag
    found = [key for key, each in model.named_modules() if isinstance(each, kinds) and each.max_norm is not None]
    return found if process.place().world_size > 1 else []


def may_be_assumed(objects: Mapping[str, Any]) -> bool:
    """True if memory may keep these objects of `load`, although the script has not called `save` yet.

    Each object must know its position in the training. A sampler does not know it if a DataLoader reads ahead, and a
    script's own class may not know it. This is decided without `state_dict()`, which begins an epoch of some loaders.
    """
    return all(
        isinstance(value, torch.nn.Module | torch.optim.Optimizer | LRScheduler)
        or (hasattr(value, "state_dict") and type(value).__module__.startswith("torch."))
        or getattr(value, "reads_ahead", True) is False
        for value in map(unwrapped, objects.values())
    )


def untrained(objects: Mapping[str, Any]) -> list[str]:
    """Return the names of modules that no optimizer trains, for example averages of weights. Without any optimizer
    there are none, because the script trains in another way."""
    optimizers = [value for value in objects.values() if isinstance(value, torch.optim.Optimizer)]
    own = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    modules = {name: value for name, value in objects.items() if isinstance(value, torch.nn.Module)}
    return [name for name, module in modules.items() if own and own.isdisjoint(map(id, module.parameters()))]


def _held(value: Any, *, is_weak: bool) -> Callable[[], Any]:
    """Return a function that returns the object, or None if the script has dropped it. An object that cannot have a
    weak reference is kept alive. is_weak: False for a module that is trained. It is kept alive, because the script may
    make a container of modules for each call."""
    if hasattr(value, "state_dict") and (is_weak or not isinstance(value, torch.nn.Module)):
        with contextlib.suppress(TypeError):
            return weakref.ref(value)
    return lambda: value


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


def _setting(value: Any, name: str) -> Any:
    """Return a copy of the value; for an optimizer the settings of its groups, such as learning rates. Raises
    StateError for an optimizer whose state_dict() may have more; a script may replace this method at any time."""
    if isinstance(value, torch.optim.Optimizer):
        if getattr(value.state_dict, "__func__", None) is not torch.optim.Optimizer.state_dict:
            raise StateError(f"{name}: {type(value).__name__} overrides state_dict(), which is not supported")
        if value._optimizer_state_dict_post_hooks:
            raise StateError(f"{name}: {type(value).__name__} has a hook that changes its state_dict()")
        groups = [{key: each for key, each in group.items() if key != "params"} for group in value.param_groups]
        return copied(groups, name)
    return copied(state_of(value), name)
