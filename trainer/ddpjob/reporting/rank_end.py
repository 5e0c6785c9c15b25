"""What a rank leaves for its agent at its end: whether it has formed a process group, and checksums of its DDP modules.

`agent/core/rank_ends.py` compares them between ranks. The numbers go through a file, and no collective: a script that
ends, or hangs, is not changed by them. A rank that was forked by the fork server has all this; another one, or a child
of a rank, writes nothing.

The parameters of a module are summed when the DDP object is released, or at the end of the process; and, over their
first 32 KiB each, at 20 of the first 1,024 backward passes. After those no hook is left: a step costs nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ddpjob import own_files, process
from ddpjob.core.members import Members

MODULES_MAX = 64  # a search over hyperparameters makes one after the other
PASSES = sorted({1 << n for n in range(11)} | {3 << n for n in range(9)})  # 1, 2, 3, 4, 6, 8, 12, … 768, 1024
PREFIX_WORDS = 4096  # of each parameter, in a backward pass
ROW = 1021  # words that are summed without their positions; a prime, so that no axis of a tensor is a multiple of it
WORDS_WEIGHTED = 8192  # at most, with a weight for each
# Their ranks talk to each other without torch.distributed, or it is not known how.
OTHER_WAYS = ("horovod", "byteps", "mpi4py", "torch_xla", "torchft", "jax")
# Communication hooks after which all ranks have the same parameters before a backward pass. A script's own may do
# anything, a local SGD lets replicas differ for some steps, and ZeRO may send parameters while the next pass begins.
HOOKS = "torch.distributed.algorithms."
OUT_OF_STEP = ("post_localSGD_hook", "ddp_zero_hook")


class RankEnd:
    """What this process will write at its end."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.group_size = 0  # of the largest default group that this process was in
        self._modules: list[WatchedModule] = []
        self._made: dict[str, int] = {}  # modules, by their group

    def add(self, ddp: Any) -> None:
        """Watch a module that was wrapped in DDP just now."""
        dist = sys.modules["torch.distributed"]
        group = Members(sorted(dist.get_process_group_ranks(ddp.process_group))).text
        number = self._made.get(group, 0)
        self._made[group] = number + 1
        if len(self._modules) < MODULES_MAX:
            self._modules.append(WatchedModule(ddp, group, number))

    def write(self) -> None:
        """At the end of the process. A script that has not imported torch is no training, and writes nothing."""
        torch = sys.modules.get("torch")
        if torch is None:
            return
        for module in self._modules:
            module.end()
        modules = [module.ended for module in self._modules if module.ended is not None]
        alone = process.number("WORLD_SIZE", 1) > 1 >= self.group_size
        alone = alone and not knows_others() and has_run_backward(torch)
        with open(self._path, "w", opener=own_files.opener) as file:
            json.dump({"alone": alone, "modules": modules}, file)


def begin(path: str) -> None:
    """In a rank, before its script."""
    process.current.end = RankEnd(path)
    atexit.register(_write, process.current.end)  # before what the script registers, so that it runs after that


def watch_ddp(ddp: Any) -> None:
    """Have this class tell of each module that it wraps. In the fork server, once for all ranks."""
    wrap = ddp.__init__

    @functools.wraps(wrap)
    def wrap_and_watch(self: Any, *args: Any, **kwargs: Any) -> None:
        wrap(self, *args, **kwargs)
        with contextlib.suppress(Exception):
            if process.current.end is not None:
                process.current.end.add(self)

    ddp.__init__ = wrap_and_watch


def formed(group: Any) -> None:
    """A default process group has been formed."""
    if process.current.end is not None:
        process.current.end.group_size = max(process.current.end.group_size, group.size())


def _write(end: RankEnd) -> None:
    with contextlib.suppress(Exception):
        # Not in a fork of the rank, and not where an exception ends it: the others wait for the restart.
        if process.current.end is end and getattr(sys, "last_value", None) is None:
            end.write()


class WatchedModule:
    """A DDP module. Holds nothing of it, so that its memory is free when the script lets go of it."""

    def __init__(self, ddp: Any, group: str, number: int) -> None:
        self.ended: dict[str, Any] | None = None
        self._group, self._number = group, number
        ignored = set(ddp.parameters_to_ignore)
        named = [(n, p) for n, p in ddp.module.named_parameters() if n not in ignored and is_comparable(p)]
        self._names = [name for name, _ in named]
        self._parameters = [weakref.ref(parameter) for _, parameter in named]
        shapes = json.dumps([(name, *parameter.shape) for name, parameter in named])
        self._digest = hashlib.sha256(shapes.encode()).hexdigest()[:16]
        self._made, self._next = 0, list(PASSES)  # backward passes so far, and those that are still to be noted
        self._passes: list[tuple[int, int, str]] = []
        self._ddp = weakref.ref(ddp, self._released)
        self._counted: int | None = None  # the parameter at which passes are counted
        self._hooks = [p.register_hook(functools.partial(self._reached, index)) for index, (_, p) in enumerate(named)]

    def end(self) -> None:
        """Sum the parameters, if that was not done when the module was released."""
        ddp = self._ddp()
        if ddp is not None:
            self._sum_all()

    def _released(self, _reference: Any) -> None:
        """The DDP object is about to go; what it refers to is still there."""
        with contextlib.suppress(Exception):
            if not sys.is_finalizing() and process.current.end is not None:
                self._sum_all()

    def _sum_all(self) -> None:
        torch: Any = sys.modules["torch"]
        parameters = self._living()
        if self.ended is not None or not self._passes or not parameters:
            return
        with torch.no_grad():
            sums = checksums(torch, parameters)
        dtypes = [str(parameter.dtype).removeprefix("torch.") for parameter in parameters]
        self.ended = {
            "group": self._group,
            "number": self._number,
            "digest": self._digest,
            "names": self._names,
            "sums": "".join(f"{(number ^ number >> 32) & 0xFFFFFFFF:08x}" for number in sums),
            "dtypes": dtypes[:1] if len(set(dtypes)) == 1 else dtypes,
            "passes": self._passes,
            "hardware": hardware(torch, parameters[0]),
        }

    def _reached(self, index: int, _gradient: Any) -> None:
        """A backward pass has come to this parameter. Passes are counted at the first one that the first pass comes to:
        no collective of the pass has begun there, so their number tells which pass it is."""
        with contextlib.suppress(Exception):
            if self._counted is None:
                self._counted = index
                after_this_pass(self._remove_hooks)
            if index == self._counted:
                self._count_pass()

    def _count_pass(self) -> None:
        self._made += 1
        if not self._next or self._made < self._next[0]:
            return
        self._next.pop(0)
        goes_on = False
        with contextlib.suppress(Exception):
            goes_on = self._note_pass()
        if not goes_on:
            self._next.clear()
        if not self._next:
            self._counted = -1
            after_this_pass(self._remove_hooks)

    def _remove_hooks(self) -> None:
        """All but the one that counts. A parameter without any costs nothing again: its list would be called, empty."""
        for index, (hook, reference) in enumerate(zip(self._hooks, self._parameters, strict=True)):
            parameter = reference()
            if index != self._counted and parameter is not None:
                hook.remove()
                if not parameter._backward_hooks:
                    parameter._backward_hooks = None

    def _note_pass(self) -> bool:
        """Returns False if no more passes are to be noted."""
        torch: Any = sys.modules["torch"]
        ddp, parameters = self._ddp(), self._living()
        if ddp is None or not parameters:
            return False
        if not all(keeps_in_step(hook) for hook, _ in getattr(ddp, "_comm_hooks", ())):
            self._passes.clear()
            return False
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return True
        with torch.no_grad():
            sums = checksums(torch, parameters, PREFIX_WORDS)
        text = json.dumps([[number, str(p.dtype)] for number, p in zip(sums, parameters, strict=True)])
        number = hashlib.sha256(text.encode()).hexdigest()[:16]
        self._passes.append((self._made, collectives_begun(ddp.process_group), number))
        return True

    def _living(self) -> list[Any]:
        """Its parameters; none if the script has put others in the place of some."""
        parameters = [parameter() for parameter in self._parameters]
        return [] if any(parameter is None for parameter in parameters) else parameters


def after_this_pass(call: Callable[[], None]) -> None:
    """Call it when the backward pass that runs now has ended: a hook that runs must not be removed from its list."""
    sys.modules["torch"].autograd.Variable._execution_engine.queue_callback(call)


def is_comparable(parameter: Any) -> bool:
    """True for a trained parameter with values of its own: not on meta, and no DTensor or other subclass."""
    torch: Any = sys.modules["torch"]
    is_plain = type(parameter) in (torch.nn.Parameter, torch.Tensor) and parameter.layout == torch.strided
    return is_plain and bool(parameter.requires_grad) and parameter.device.type != "meta"


def keeps_in_step(hook: Any) -> bool:
    """True for a communication hook of torch that keeps replicas the same at each step."""
    module = str(getattr(hook, "__module__", ""))
    return module.startswith(HOOKS) and not any(name in module for name in OUT_OF_STEP)


def collectives_begun(group: Any) -> int:
    """In this group; 0 if its backend does not count them."""
    try:
        return int(group._get_sequence_number_for_group())
    except Exception:
        return 0


def checksums(torch: Any, parameters: Sequence[Any], words_max: int | None = None) -> list[int]:
    """Sum the bits of each parameter, so that NaN is equal to itself; words_max: of the first words alone."""
    weights: dict[Any, Any] = {}  # by device: 1, 3, 5, …: odd, so that no bit gets lost
    sums = [checksum(torch, parameter, weights, words_max) for parameter in parameters]
    if len({one.device for one in sums}) == 1:
        return list(torch.stack(sums).tolist())  # one copy from a GPU
    return [int(one) for one in sums]


def checksum(torch: Any, parameter: Any, weights: dict[Any, Any], words_max: int | None) -> Any:
    """Return a sum over 64-bit words as a tensor, modulo 2**64. In a small tensor each word has a weight of its own, in
    a large one each row of words: parts that have changed places are found, two words of one row are not."""
    words, rest = words_of(torch, parameter, words_max)
    length = words.numel()
    rows = length // ROW if length > WORDS_WEIGHTED else 0
    known = weights.get(words.device)
    if known is None or len(known) < max(rows, WORDS_WEIGHTED):
        known = weights[words.device] = torch.arange(1, 2 * max(rows, WORDS_WEIGHTED), 2, device=words.device)
    if rows:
        total = (words[: rows * ROW].view(rows, ROW).sum(1) * known[:rows]).sum()
        words, length = words[rows * ROW :], length - rows * ROW
        total += 3 * (words * known[:length]).sum()
    else:
        total = (words * known[:length]).sum()
    return total if rest is None else total + 5 * (rest * known[: len(rest)]).sum()


def words_of(torch: Any, parameter: Any, words_max: int | None) -> tuple[Any, Any]:
    """Its memory as 64-bit words, and what is less than a word."""
    flat = parameter.detach()
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj())
    flat = flat.reshape(-1)  # a copy only if it is not contiguous
    size = flat.element_size()
    if words_max is not None and flat.numel() * size > 8 * words_max:
        flat = flat[: 8 * words_max // size]
    if flat.numel() * size % 8 == 0 and flat.storage_offset() * size % 8 == 0:
        return flat.view(torch.int64), None
    octets = flat.view(torch.uint8)
    octets = octets.clone() if octets.storage_offset() % 8 else octets
    length = octets.numel() // 8 * 8
    return octets[:length].view(torch.int64), octets[length:].to(torch.int64)


def hardware(torch: Any, parameter: Any) -> str:
    """The name of the GPU, or of the processor, that has this parameter; empty if it is not known."""
    with contextlib.suppress(Exception):
        if parameter.device.type == "cuda":
            return str(torch.cuda.get_device_name(parameter.device))
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            start = file.read(4096)  # the kernel takes milliseconds for all of many processors
        return next(line.partition(":")[2].strip() for line in start.splitlines() if line.startswith("model name"))
    return ""


def knows_others() -> bool:
    """True if the ranks may exchange their gradients in another way than a process group."""
    rpc = sys.modules.get("torch.distributed.rpc")
    return getattr(rpc, "_init_counter", 0) > 0 or any(name in sys.modules for name in OTHER_WAYS)


def has_run_backward(torch: Any) -> bool:
    """True if autograd has run in this process: it numbers its runs from 0, and only a run can ask for its number."""
    numbers: list[int] = []
    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.zeros((), device="cpu", requires_grad=True)
        leaf.register_hook(lambda _: numbers.append(torch._C._current_graph_task_id()))
        (leaf * 1).backward()
    return numbers[0] > 0
