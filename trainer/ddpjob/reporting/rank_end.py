"""Record for the agent if this rank has formed a process group, and checksums of its DDP modules.

`ddprun/core/rank_ends.py` compares the records of all ranks. They are exchanged by a file and not by a collective, so a
script that ends or hangs is not affected. A rank forked by the fork server records all of this. A rank in a new process
(DDPJOB_END) records only checksums, of modules that it wraps after its first call of `ddpjob.init` or `progress`.

The checksum is computed when the DDP object is released, or at the end of the process. Checksums of the first 32 KiB
of each parameter are computed at some backward passes, less and less often: 1, 2, 3, 4, 6, 8, 12, 16, … At the others,
one hook counts the passes and copies a few values of one parameter without waiting for the device.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import os
import re
import sys
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from ddpjob import own_files, process
from ddpjob_core.members import Members

MODULES_MAX = 64  # a hyperparameter search creates many models in one process
RECENT = 32  # number of the last backward passes whose parameter values are kept
RECENT_VALUES = 64  # values kept per pass, spread over one parameter
PREFIX_WORDS = 4096  # 64-bit words from the start of each parameter that enter a pass's checksum
ROW = 1021  # 64-bit words that share a weight; a prime, because axes of tensors are rarely multiples of it
WORDS_WEIGHTED = 2048  # 64-bit words; in larger tensors the words of a row share a weight
# Backends or libraries whose ranks communicate without torch.distributed, or in an unknown way.
OTHER_WAYS = ("horovod", "byteps", "mpi4py", "torch_xla", "torchft", "jax")
FORMS_A_GROUP = re.compile(rb"\b(?:init_process_group|ddpjob\.init)\(")
# torch's communication hooks, except OUT_OF_STEP, leave all ranks with the same parameters before a backward pass.
# A script's own hook may leave different parameters. So does local SGD, whose replicas differ for some steps.
# ZeRO may still be sending parameters when the next pass begins.
HOOKS = "torch.distributed.algorithms."
OUT_OF_STEP = ("post_localSGD_hook", "ddp_zero_hook")


class RankEnd:
    """The record that this process writes at its end."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.group_size = 0  # size of the largest default group of this process
        self.hidden: tuple[str, str] | None = None  # place and line of the exception that an exit with 0 hides
        self._modules: list[WatchedModule] = []
        self._made: dict[str, int] = {}  # number of modules per group

    def add(self, ddp: Any) -> None:
        """Watch a module that was just wrapped in DDP."""
        dist = sys.modules["torch.distributed"]
        group = Members(sorted(dist.get_process_group_ranks(ddp.process_group))).text
        number = self._made.get(group, 0)
        self._made[group] = number + 1
        if len(self._modules) < MODULES_MAX:
            self._modules.append(WatchedModule(ddp, group, number))

    def write(self) -> None:
        """Write the record at the end of the process, unless the script has not imported torch."""
        if "torch" not in sys.modules and not self.hidden:
            return
        for module in self._modules:
            module.end()
        modules = [module.ended for module in self._modules if module.ended is not None]
        alone = self.group_size <= 1 and has_trained_alone()
        with open(self._path, "w", opener=own_files.opener) as file:
            json.dump({"alone": alone, "hidden": self.hidden, "modules": modules}, file)


def begin(path: str) -> RankEnd:
    """Start recording in a rank, before its script."""
    end = process.current.end = RankEnd(path)
    atexit.register(_write, end)  # registered before the script's handlers, so it runs after them
    return end


def begin_in_new_process(path: str) -> None:
    """Start recording at the first call of the library, in a rank that the fork server has not forked."""
    torchs = sys.modules.get("torch.nn.parallel.distributed")
    if torchs is None or process.current.end is not None:
        return
    begin(path).group_size = 2  # a group may have been formed before, so this rank must not count as trained alone
    watch_ddp(torchs.DistributedDataParallel)


def watch_ddp(ddp: Any) -> None:
    """Make this class report each module that it wraps. The fork server calls this once for all ranks."""
    wrap = ddp.__init__
    if hasattr(wrap, "watched"):
        return

    @functools.wraps(wrap)
    def wrap_and_watch(self: Any, *args: Any, **kwargs: Any) -> None:
        wrap(self, *args, **kwargs)
        with contextlib.suppress(Exception):
            if process.current.end is not None:
                process.current.end.add(self)

    wrap_and_watch.watched = True  # type: ignore[attr-defined]
    ddp.__init__ = wrap_and_watch


def formed(group: Any) -> None:
    """Record that a default process group was formed."""
    if process.current.end is not None:
        process.current.end.group_size = max(process.current.end.group_size, group.size())


def _write(end: RankEnd) -> None:
    with contextlib.suppress(Exception):
        # Do not write in a fork of the rank, nor after an exception: then the ranks are restarted and not compared.
        if process.current.end is end and getattr(sys, "last_value", None) is None:
            end.write()


class WatchedModule:
    """Watch a DDP module through weak references, so that its memory is freed when the script drops the module."""

    def __init__(self, ddp: Any, group: str, number: int) -> None:
        self.ended: dict[str, Any] | None = None
        self._group, self._number = group, number
        ignored = set(ddp.parameters_to_ignore)
        named = [(n, p) for n, p in ddp.module.named_parameters() if n not in ignored and is_comparable(p)]
        self._names = [name for name, _ in named]
        self._parameters = [weakref.ref(parameter) for _, parameter in named]
        shapes = json.dumps([(name, *parameter.shape) for name, parameter in named])
        self._digest = hashlib.sha256(shapes.encode()).hexdigest()[:16]
        self._made, self._next = 0, 1  # backward passes so far, and the number of the next pass to sum (0: none)
        self._passes: list[tuple[int, int, str]] = []
        # Compare values of matrices only: a bias may get equal gradients on ranks with different data.
        self._kept = [i for i, (_, p) in enumerate(named) if p.dim() > 1] or [*range(len(named))]
        self._recent = Recent()
        self._ddp = weakref.ref(ddp, self._released)
        self._counted: int | None = None  # the parameter whose hook counts passes
        self._hooks = [parameter.register_hook(self._hook(index)) for index, (_, parameter) in enumerate(named)]

    def _hook(self, index: int) -> Callable[[Any], None]:
        hook = functools.partial(self._reached, index)
        hook.__torch_unserializable__ = True  # type: ignore[attr-defined]  # otherwise torch warns when the model is pickled
        return hook

    def end(self) -> None:
        """Sum the parameters at the end of the process, unless the module was released before."""
        ddp = self._ddp()
        if ddp is not None:
            self._sum_all()

    def _released(self, _reference: Any) -> None:
        """Sum the parameters when the DDP object is released."""
        with contextlib.suppress(Exception):
            if not sys.is_finalizing() and process.current.end is not None:
                self._sum_all()
        self._recent = Recent()

    def _sum_all(self) -> None:
        torch: Any = sys.modules["torch"]
        parameters = self._living()
        has_stopped = process.current.stopped_at is not None  # the agent compares only ranks that have completed
        if self.ended is not None or has_stopped or not self._passes or not parameters:
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
            "passes": [*self._passes, *self._recent.read(torch)],
            "hardware": hardware(torch, parameters[0]),
        }

    def _reached(self, index: int, _gradient: Any) -> None:
        """Count a backward pass when it reaches the parameter that the first pass reached first. The pass has begun no
        collective by then, so the number of collectives begun so far identifies the pass."""
        with contextlib.suppress(Exception):
            if self._counted is None:
                self._counted = index
                after_this_pass(self._remove_hooks)
            if index == self._counted:
                self._count_pass()

    def _count_pass(self) -> None:
        self._made += 1
        if not self._next:
            return
        is_noted, goes_on = self._made == self._next, False
        if is_noted:
            self._next = next_noted(self._made)
        with contextlib.suppress(Exception):
            goes_on = self._note_pass() if is_noted else self._keep_values()
        if not goes_on:
            self._next, self._counted = 0, -1
            after_this_pass(self._remove_hooks)

    def _keep_values(self) -> bool:
        """Copy a few values of a parameter at this pass. Return False if no more passes are to be recorded."""
        ddp, parameter = self._ddp(), self._parameters[self._kept[self._made % len(self._kept)]]()
        if ddp is None or parameter is None:
            return False
        if not is_captured(torch := sys.modules["torch"]):
            self._recent.add(torch, parameter, self._made, collectives_begun(ddp.process_group))
        return True

    def _remove_hooks(self) -> None:
        """Remove all hooks except the counting one, and empty hook lists, because they cost time at each pass."""
        for index, (hook, reference) in enumerate(zip(self._hooks, self._parameters, strict=True)):
            parameter = reference()
            if index != self._counted and parameter is not None:
                hook.remove()
                if not parameter._backward_hooks:
                    parameter._backward_hooks = None

    def _note_pass(self) -> bool:
        """Sum all parameters at this pass. Return False if no more passes are to be recorded."""
        torch: Any = sys.modules["torch"]
        ddp, parameters = self._ddp(), self._living()
        if ddp is None or not parameters:
            return False
        if not all(keeps_in_step(hook) for hook, _ in getattr(ddp, "_comm_hooks", ())):
            self._passes.clear()
            return False
        if is_captured(torch):
            return True
        with torch.no_grad():
            sums = checksums(torch, parameters, PREFIX_WORDS)
        text = json.dumps([[number, str(p.dtype)] for number, p in zip(sums, parameters, strict=True)])
        number = hashlib.sha256(text.encode()).hexdigest()[:16]
        self._passes.append((self._made, collectives_begun(ddp.process_group), number))
        return True

    def _living(self) -> list[Any]:
        """Return the module's parameters; an empty list if the script has replaced any."""
        parameters = [parameter() for parameter in self._parameters]
        return [] if any(parameter is None for parameter in parameters) else parameters


class Recent:
    """Some parameter values at the start of the last backward passes. They stay on the device until the end, because
    reading them in a pass would wait for the GPU."""

    def __init__(self) -> None:
        self._values: Any = None
        self._passes: dict[int, tuple[int, int]] = {}  # row -> (backward passes made, collectives begun)

    def add(self, torch: Any, parameter: Any, made: int, collectives: int) -> None:
        """Store some values of the parameter at this pass, and overwrite those of the oldest pass."""
        values = parameter.detach()  # not stored, because a reference would keep the memory after training
        if values.is_complex():
            return
        if self._values is None or self._values.device != values.device:
            self._values = torch.zeros((RECENT, RECENT_VALUES), dtype=torch.float64, device=values.device)
            self._passes.clear()
        row, length = made % RECENT, values.numel()
        count = min(RECENT_VALUES, length)
        self._values[row, :count].copy_(values.as_strided((count,), (length // max(count, 1),)))
        self._passes[row] = (made, collectives)

    def read(self, torch: Any) -> list[tuple[int, int, str]]:
        """Return (backward passes made, collectives begun, value) of each pass, in order."""
        if self._values is None:
            return []
        octets = self._values.cpu().view(torch.uint8)
        rows = sorted((key, row) for row, key in self._passes.items())
        return [(*key, hashlib.sha256(bytes(octets[row].tolist())).hexdigest()[:16]) for key, row in rows]


def next_noted(made: int) -> int:
    """Return the next pass to sum after this one: the passes are 1, 2, 3, 4, 6, 8, 12, 16, 24, …"""
    is_power = made & (made - 1) == 0
    return made + 1 if made < 3 else made * 3 // 2 if is_power else made * 4 // 3


def is_captured(torch: Any) -> bool:
    """True while a CUDA graph is being captured: our operations would become part of each replay."""
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def after_this_pass(call: Callable[[], None]) -> None:
    """Call the function when this backward pass has ended, because a hook must not be removed while it is running."""
    sys.modules["torch"].autograd.Variable._execution_engine.queue_callback(call)


def is_comparable(parameter: Any) -> bool:
    """True for a trained parameter whose values can be compared: no meta tensor, no DTensor or other subclass."""
    torch: Any = sys.modules["torch"]
    is_plain = type(parameter) in (torch.nn.Parameter, torch.Tensor) and parameter.layout == torch.strided
    return is_plain and bool(parameter.requires_grad) and parameter.device.type != "meta"


def keeps_in_step(hook: Any) -> bool:
    """True for a communication hook of torch that keeps replicas equal at each step."""
    module = str(getattr(hook, "__module__", ""))
    return module.startswith(HOOKS) and not any(name in module for name in OUT_OF_STEP)


def collectives_begun(group: Any) -> int:
    """Return the number of collectives begun in this group; 0 if its backend does not count them."""
    try:
        return int(group._get_sequence_number_for_group())
    except Exception:
        return 0


def checksums(torch: Any, parameters: Sequence[Any], words_max: int | None = None) -> list[int]:
    """Return the weighted sum of each parameter's bits, modulo 2**64; bits, because NaN differs from itself. words_max:
    sum only the first words.

    Each word of a small tensor has its own weight. In a large tensor each row of words has one, so two swapped words of
    a row are not found. Odd weights lose no bit.
    """
    by_device: dict[Any, list[int]] = {}
    for index, parameter in enumerate(parameters):
        by_device.setdefault(parameter.device, []).append(index)
    sums = [0] * len(parameters)
    for indices in by_device.values():
        for index, number in zip(indices, _checksums(torch, [parameters[i] for i in indices], words_max), strict=True):
            sums[index] = number
    return sums


def _checksums(torch: Any, parameters: Sequence[Any], words_max: int | None) -> list[int]:
    """Return the checksums of parameters on one device, with few operations each and a single copy from a GPU."""
    parts: list[Any] = []
    ends: list[int] = []
    length = 0
    for parameter in parameters:
        own = _parts(torch, parameter, words_max)
        parts += own
        length += sum(map(len, own))
        ends.append(length)
    words = torch.cat([torch.zeros(1, dtype=torch.int64, device=parameters[0].device), *parts])
    weights = torch.arange(-1, 2 * length, 2, device=words.device)  # checksum factors: -1 (for the zero), 1, 3, 5, …
    sums = torch.stack([words.cumsum(0), words.mul_(weights).cumsum(0)])[:, [0, *ends]].tolist()
    return [
        weighted[1] - weighted[0] - 2 * begin * (plain[1] - plain[0]) & 0xFFFFFFFFFFFFFFFF
        for begin, plain, weighted in zip([0, *ends], *(pairwise(row) for row in sums), strict=False)
    ]


def _parts(torch: Any, parameter: Any, words_max: int | None) -> list[Any]:
    """Return the weighted parts of a parameter: sums of its rows, the words after them, and the remaining bytes."""
    words, rest = words_of(torch, parameter, words_max)
    rows = len(words) // ROW if len(words) > WORDS_WEIGHTED else 0
    parts = [words[: rows * ROW].view(rows, ROW).sum(1), words[rows * ROW :]] if rows else [words]
    return parts if rest is None else [*parts, rest]


def words_of(torch: Any, parameter: Any, words_max: int | None) -> tuple[Any, Any]:
    """Return the parameter's memory as 64-bit words, and the remaining bytes; None if none remain."""
    flat = parameter.detach()
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj())
    flat = flat.reshape(-1)  # copies only if it is not contiguous
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
    """Return the name of the GPU or processor that holds this parameter; "" if unknown."""
    with contextlib.suppress(Exception):
        if parameter.device.type == "cuda":
            return str(torch.cuda.get_device_name(parameter.device))
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            start = file.read(4096)  # only the first processor, because the kernel takes milliseconds to list many
        return next(line.partition(":")[2].strip() for line in start.splitlines() if line.startswith("model name"))
    return ""


def has_trained_alone() -> bool:
    """True if this process is one of several ranks that cannot exchange gradients, and has trained or has a call that
    forms a group. Call it at the end of a process that never joined a group of several ranks."""
    torch = sys.modules.get("torch")
    if torch is None or process.number("WORLD_SIZE", 1) <= 1 or knows_others():
        return False
    return has_run_backward(torch) or names_a_group()


def names_a_group() -> bool:
    """True if the script, or a module next to it, has a call that forms a group. The call was not reached (behind a
    mistyped `if __name__ == "main"`), or its exception was lost (in a future that nobody reads)."""
    # Do not use getattr: a module that loads lazily may raise any exception.
    modules = {name: getattr(module, "__dict__", {}).get("__file__") for name, module in list(sys.modules.items())}
    folder = os.path.dirname(os.path.abspath(modules["__main__"] or "")) + os.sep
    for path in {os.path.abspath(file) for file in modules.values() if isinstance(file, str) and file.endswith(".py")}:
        if path.startswith(folder) and "site-packages" not in path:
            with contextlib.suppress(OSError), open(path, "rb") as text:
                if FORMS_A_GROUP.search(text.read()):
                    return True
    return False


def knows_others() -> bool:
    """True if the ranks may exchange gradients without a process group."""
    rpc = sys.modules.get("torch.distributed.rpc")
    return getattr(rpc, "_init_counter", 0) > 0 or any(name in sys.modules for name in OTHER_WAYS)


def has_run_backward(torch: Any) -> bool:
    """True if autograd has run in this process. Autograd numbers its runs; the first one has number 0."""
    numbers: list[int] = []
    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.zeros((), device="cpu", requires_grad=True)
        leaf.register_hook(lambda _: numbers.append(torch._C._current_graph_task_id()))
        (leaf * 1).backward()
    return numbers[0] > 0
