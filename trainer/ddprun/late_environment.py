"""Apply variables that a script sets before its `import torch`, although the fork server has imported torch already.

A rank hides torch from `sys.modules` until the script imports it. Then the script's changes to `os.environ` are
compared with what torch has read. Some are applied late (threads, logs, debug level, temporary folder). For the others,
one line on stderr names the variables without effect. Variables that torch reads later (CUDA_VISIBLE_DEVICES,
NCCL_DEBUG) work by themselves.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGE = "torch"
NAMES_MAX = 5
# Prefixes of variables that C and C++ code reads when libraries are loaded; Python cannot observe this.
LIBRARIES = ("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "GOTO_")
IN_C = frozenset(
    "TORCH_CPP_LOG_LEVEL ATEN_CPU_CAPABILITY PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF PYTORCH_HIP_ALLOC_CONF".split()
)
# Prefixes of variables that torch, numpy and sympy read in Python during import (torch 2.13).
READ_IN_PYTHON = (
    "TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCHEXPORT_", "TORCH_COMPILE", "TORCH_DYNAMO_", "TORCH_TRACE", "TORCH_DTRACE",
    "TORCH_FAKE_TENSOR_", "TORCH_CUDA_SANITIZER", "TORCH_USE_RTLD_GLOBAL", "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "AOT_", "AOTINDUCTOR_", "INDUCTOR_", "PYTORCH_JIT", "NPY_", "NUMPY_", "SYMPY_", "MPMATH_",
)  # fmt: skip
# Variables that torch reads again before each use, or that have no effect on it.
HARMLESS = frozenset("HOME USER LOGNAME LNAME USERNAME CI CXX PYTHONUSERBASE TORCHINDUCTOR_CACHE_DIR".split())


def is_read_at_import(name: str) -> bool:
    """True if this variable is read at import: a forked rank's script sets it too late, even before `import torch`."""
    is_read = name in IN_C or name.startswith((*LIBRARIES, *READ_IN_PYTHON))
    return is_read and name not in HARMLESS and not any(name in names for names, _ in APPLIED)


def hide_torch(read: set[str]) -> Hidden:
    """Make the imported torch look not imported, here and in forks. read: variables read during its import."""
    modules = {n: m for n, m in sys.modules.items() if n == PACKAGE or n.startswith(f"{PACKAGE}.")}
    for name in modules:
        del sys.modules[name]
    hidden = Hidden(modules, read)
    sys.meta_path.insert(0, hidden)
    return hidden


class Hidden:
    """Import hook for torch. When the script imports torch, it restores the hidden modules and loads nothing."""

    def __init__(self, modules: dict[str, ModuleType], read: set[str]) -> None:
        self._modules, self._read, self._before = modules, read, dict(os.environ)
        self._spec = modules[PACKAGE].__spec__

    @property
    def names(self) -> set[str]:
        """Names of the hidden modules."""
        return set(self._modules)

    def touch(self) -> None:
        """Take a reference to each module, as an import does. So the memory pages are copied before the import."""
        self._touched = dict(self._modules)

    def begin(self) -> None:
        """Record the environment at the start of the script."""
        self._before = dict(os.environ)

    def find_spec(self, name: str, _path: Sequence[str] | None = None, _target: Any = None) -> ModuleSpec | None:
        """Find torch, also for libraries that only check whether it exists, as transformers and datasets do."""
        if name != PACKAGE:
            return None
        spec = ModuleSpec(PACKAGE, self)  # type: ignore[arg-type]
        if self._spec is not None:
            spec.origin, spec.submodule_search_locations = self._spec.origin, self._spec.submodule_search_locations
        return spec

    def create_module(self, _spec: ModuleSpec) -> ModuleType:
        return self._modules[PACKAGE]

    def exec_module(self, module: ModuleType) -> None:
        """Restore torch's submodules, which would otherwise be loaded again."""
        with contextlib.suppress(ValueError):  # already removed: code that kept this loader may call it again
            sys.meta_path.remove(self)
        module.__spec__ = self._spec
        sys.modules.update(self._modules)
        with contextlib.suppress(Exception):  # if torch's internals are different, only the warning is missing
            apply_late(changes(self._before), self._read)


def changes(before: dict[str, str]) -> set[str]:
    """Return the environment variables that the script has changed, added or removed."""
    now = os.environ
    return {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)}


def apply_late(changed: set[str], read: set[str]) -> None:
    """Apply the changes that can be applied late. Name the rest on stderr, on rank 0 only because ranks are alike."""
    lost = {n for n in changed if n in read or n in IN_C or n.startswith(LIBRARIES)} - HARMLESS
    for names, apply in APPLIED:
        if names & changed:
            with contextlib.suppress(Exception):
                apply()
                lost -= names
    if lost and os.environ.get("RANK", "0") == "0":
        sys.stderr.write(sentence(sorted(lost)))


def sentence(names: list[str]) -> str:
    others = len(names) - NAMES_MAX
    listed = ", ".join(names[:NAMES_MAX]) + (f" and {others} more" if others > 0 else "")
    return (
        f"ddprun: the fork server had imported torch before the script set {listed}: that has no effect. "
        "Set it in the job's env, or start with --no-preload.\n"
    )


def _threads(*names: str) -> int:
    """Return the number in the first variable that is set, else the number of CPUs."""
    asked = next((os.environ[name] for name in names if os.environ.get(name)), "")
    return int(asked.split(",")[0]) if asked else len(os.sched_getaffinity(0))


def _set_threads() -> None:
    import torch

    torch.set_num_threads(_threads(*["MKL_NUM_THREADS"] * torch._C.has_mkl, "OMP_NUM_THREADS"))


def _set_threads_of_numpy() -> None:
    for setter in of_openblas("set"):
        setter(_threads("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS"))


def of_openblas(verb: str) -> Iterator[Any]:
    """Yield openblas_get_num_threads (or set) of each loaded OpenBLAS library."""
    import ctypes

    with open("/proc/self/maps") as maps:
        paths = {line.split(None, 5)[5].strip() for line in maps if "openblas" in line}
    names = [f"{p}openblas_{verb}_num_threads{s}" for p in ("scipy_", "") for s in ("64_", "")]
    for path in paths:
        with contextlib.suppress(OSError, StopIteration):
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            yield next(getattr(library, name) for name in names if hasattr(library, name))


def openblas_threads() -> int:
    """Return the number of OpenBLAS threads. They do not make forks unsafe: OpenBLAS ends them before a fork."""
    return sum(max(0, int(size()) - 1) for size in of_openblas("get"))


def _forget_temporary_folder() -> None:
    tempfile = sys.modules.get("tempfile")
    if tempfile is not None:
        tempfile.tempdir = None  # type: ignore[attr-defined]  # tempfile looks for it again


APPLIED: list[tuple[set[str], Callable[[], None]]] = [
    ({"OMP_NUM_THREADS", "MKL_NUM_THREADS"}, _set_threads),
    ({"OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS"}, _set_threads_of_numpy),
    (
        {"TORCH_LOGS", "TORCH_LOGS_OUT", "TORCH_LOGS_FORMAT"},
        lambda: sys.modules["torch._logging._internal"]._init_logs(),
    ),
    ({"TORCH_DISTRIBUTED_DEBUG"}, lambda: sys.modules["torch._C._distributed_c10d"].set_debug_level_from_env()),
    ({"TMPDIR", "TEMP", "TMP"}, _forget_temporary_folder),
]
