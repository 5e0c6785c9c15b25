"""Let the fork server learn the ranks' imports, so that the next generation imports nothing again.

The first rank of a node that forms its group writes down its imports (`note`). A child of the fork server imports them
in the background, and pauses after each import for as long as that took. Then it replaces the server (`forkserver.py`).
This is safe only if an import creates nothing that belongs to one process. So each import is watched (`_Watch`). An
import with such effects is left out, and another child starts without it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import site
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from importlib import machinery, util
from typing import Any, NamedTuple

from ddpjob import limits, own_files

ROUNDS_MAX = 6
COARSE_AFTER = 3  # after this many rounds leave out whole packages instead of single modules
MODULES_MAX = 20_000
MIB = 1 << 20
BYTES_MAX = 512 * MIB  # limit for the memory that learned imports add to the fork server
BYTES_EXPECTED = 128 * MIB  # free memory required before learning begins
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Modules that may be imported before the fork, although they draw random numbers or read variables at the import.
# numpy is seeded again in each rank, and joblib's temporary names differ by process. Ranks may share rich's link IDs,
# transformers' session ID and scipy's default generators. fsspec reads only FSSPEC_* variables, equal on all ranks.
_HARMLESS = (
    "numpy.random numpy.random._pickle joblib._multiprocessing_helpers rich.style scipy.stats._new_distributions"
    " transformers.utils.hub fsspec.config"
).split()
# Modules that at their import copy a variable into `rank_zero_only.rank`, which `set_ranks` corrects.
_KEEPS_RANK = {
    "torchmetrics.utilities.prints": "LOCAL_RANK",
    "lightning.fabric.utilities.rank_zero": "RANK",
    "lightning_fabric.utilities.rank_zero": "RANK",
}
_OURS = ("ddpjob", "ddpjob_core", "ddprun")


# ---- in a rank ---------------------------------------------------------------------------------------------


def note(path: str, known: set[str], variables: dict[str, str | None]) -> None:
    """Write down the modules that this rank has imported, except `known`, and its variables that differ."""
    folders = _installed()
    modules = [
        name
        for name, module in list(sys.modules.items())
        if name not in known and name != "__main__" and _is_installed(name, module, folders)
    ]
    with open(f"{path}.new", "w", encoding="utf-8", opener=own_files.opener) as file:
        json.dump({"modules": modules[:MODULES_MAX], "variables": variables, "argv": sys.argv}, file)
    os.replace(f"{path}.new", path)


def set_ranks() -> None:
    """Set this process's rank in modules that kept the fork server's rank at their import."""
    for name, variable in _KEEPS_RANK.items():
        if (module := sys.modules.get(name)) is not None:
            module.rank_zero_only.rank = int(os.environ[variable])


def _installed() -> tuple[str, ...]:
    """Return folders that do not change during a job: of the standard library and installed packages."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    paths = {sysconfig.get_path(name) for name in names} | {*site.getsitepackages(), site.getusersitepackages()}
    return tuple(os.path.realpath(path) + os.sep for path in paths if path)


def _is_installed(name: str, module: Any, folders: tuple[str, ...]) -> bool:
    file = getattr(getattr(module, "__spec__", None), "origin", None)
    if not isinstance(file, str) or not os.path.isabs(file):
        return False
    return name.partition(".")[0] in _OURS or os.path.realpath(file).startswith(folders)


# ---- in the fork server ------------------------------------------------------------------------------------


class LearnedLimits(NamedTuple):
    """The modules that a child of the fork server has imported."""

    modules: list[str]
    left: dict[str, str]
    """Names that are left out, and the reasons."""
    read: set[str]
    """Variables that the imports read."""
    size: int
    """Additional resident memory of the child, in bytes."""


def fork(path: str, agent_pid: int, later: socket.socket, unhide: Callable[[], None]) -> LearnedLimits | None:
    """Fork a process that imports the modules of a note. Return None in the caller, and the imports in the process that
    replaces it, whose parent is the agent.
    """
    if os.fork():
        return None
    _end_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        learned = _rounds(path, agent_pid, unhide)
    except Exception as error:
        with contextlib.suppress(OSError):
            later.sendall(json.dumps({"unlearned": f"{type(error).__name__}: {error}"}).encode() + b"\n")
        os._exit(1)
    return learned


def _rounds(path: str, agent_pid: int, unhide: Callable[[], None]) -> LearnedLimits:
    """Fork children until the imports of one have no side effects. Return in that child; all others exit."""
    with open(path, encoding="utf-8", opener=own_files.opener) as file:
        order = json.load(file)
    if shortage := limits.shortage(BYTES_EXPECTED):
        raise RuntimeError(shortage.why)
    left: dict[str, str] = {}
    for number in range(ROUNDS_MAX):
        wanted = [name for name in order["modules"] if not _is_left(name, left)]
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read_end)
            return _imported(wanted, order, left, write_end, agent_pid, unhide)
        os.close(write_end)
        with open(read_end, encoding="utf-8") as pipe:
            answer = pipe.read()
        found = json.loads(answer) if answer else {wanted[-1] if wanted else "": "ends the process"}
        if not found:
            os._exit(0)  # the agent adopts the child
        os.waitpid(pid, 0)
        for name, why in found.items():
            left[name if number < COARSE_AFTER else name.partition(".")[0]] = why
    raise RuntimeError(f"imports of {', '.join(sorted(left))} cannot be repeated")


def _is_left(name: str, left: dict[str, str]) -> bool:
    return any(name == other or name.startswith(f"{other}.") for other in left)


def _imported(
    wanted: list[str],
    order: dict[str, Any],
    left: dict[str, str],
    answer: int,
    agent_pid: int,
    unhide: Callable[[], None],
) -> LearnedLimits:
    parent = os.getppid()
    argv, sys.argv[:] = list(sys.argv), order["argv"]
    unhide()
    watch = _Watch(order["variables"])
    found: dict[str, str] = {}
    with watch:
        for name in wanted:
            if name not in sys.modules and (why := watch.imports(name)):
                found[name] = why
    sys.argv[:] = argv
    with open(answer, "w", encoding="utf-8") as pipe:
        json.dump(found, pipe)
    if found:
        os._exit(0)
    while os.getppid() == parent:
        time.sleep(0.001)
    if os.getppid() != agent_pid:
        os._exit(1)
    _end_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    return LearnedLimits(wanted, left, watch.read, max(0, _resident() - watch.resident))


def _end_with_parent() -> None:
    from ddprun import processes

    processes.prctl(processes.PR_SET_PDEATHSIG, signal.SIGKILL)


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class _Watch:
    """Watch imports one by one for side effects that make a fork differ from a process that imports the module."""

    def __init__(self, variables: dict[str, str | None]) -> None:
        """variables: the rank's values of environment variables that differ in the fork server."""
        self._read_now: set[str] = set()
        self.read: set[str] = set()
        self.resident = _resident()
        self._variables = variables
        self._why = ""
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> _Watch:
        self._out = os.memfd_create("printed")
        self._kept = [(number, os.dup(number)) for number in (1, 2)]
        for number, _ in self._kept:
            os.dup2(self._out, number)
        kind: Any = type(os.environ)
        getter, iterate, seed = kind.__getitem__, kind.__iter__, random.Random.seed

        def get(environ: Any, name: Any) -> Any:
            self.read.add(name)
            self._read_now.add(name)
            return getter(environ, name)

        def iterated(environ: Any) -> Iterator[Any]:
            self._why = "reads all variables"
            return iterate(environ)  # type: ignore[no-any-return]

        def seeded(generator: Any, a: Any = None, *rest: Any, **options: Any) -> Any:
            if a is None:
                self._why = "draws random numbers"
            return seed(generator, a, *rest, **options)

        run = machinery.SourceFileLoader.exec_module

        def executed(loader: Any, module: Any) -> None:
            why, read, state = self._why, set(self._read_now), random.getstate()
            run(loader, module)
            if module.__name__ in _HARMLESS or module.__name__ in _KEEPS_RANK:
                self._why, self._read_now = why, read
                random.setstate(state)

        self._replace(machinery.SourceFileLoader, "exec_module", executed)
        self._replace(kind, "__getitem__", get)
        self._replace(kind, "__iter__", iterated)
        self._replace(random.Random, "seed", seeded)
        for owner, name, why in (
            (os, "fork", "starts a process"),
            (os, "posix_spawn", "starts a process"),
            (os, "system", "starts a process"),
            (subprocess.Popen, "__init__", "starts a process"),
            (socket.socket, "__init__", "opens a socket"),
            (os, "urandom", "draws random numbers"),
            (random, "_urandom", "draws random numbers"),
        ):
            self._replace(owner, name, self._noting(getattr(owner, name), why))
        return self

    def __exit__(self, *_: object) -> None:
        for undo in reversed(self._undo):
            undo()
        for number, kept in self._kept:
            os.dup2(kept, number)
            os.close(kept)
        os.close(self._out)

    def imports(self, name: str) -> str:
        """Import a module. Return why it must be left out; "" if it need not."""
        before, began = self._state(), time.process_time()
        self._why = ""
        self._read_now.clear()
        try:
            if util.find_spec(name.partition(".")[0]) is None:
                return "is not found"
            __import__(name)
        except BaseException as error:
            return f"cannot be imported: {type(error).__name__}"
        # Reading a variable is harmless if it has the same value here and in the rank.
        own = (n for n in sorted(self._read_now & self._variables.keys()) if os.environ.get(n) != self._variables[n])
        why = next((f"reads {name}" for name in own), "") or self._why or self._changed(before, self._state())
        time.sleep(time.process_time() - began)  # leave CPU time to the ranks, which are training
        return why

    def _changed(self, before: dict[str, Any], after: dict[str, Any]) -> str:
        if (more := after["bytes"] - self.resident) > BYTES_MAX:
            return f"takes the fork server's imports to {more // MIB} MiB; the limit is {BYTES_MAX // MIB}"
        names = {"threads": "starts a thread", "files": "keeps a file open", "printed": "prints"}
        names["cuda"] = "initialises CUDA"
        names |= dict.fromkeys(("python", "numpy", "torch"), "draws random numbers")
        return next((why for name, why in names.items() if before[name] not in (after[name], None)), "")

    def _state(self) -> dict[str, Any]:
        from ddprun.late_environment import openblas_threads

        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy.random")
        return {
            "bytes": _resident(),
            "threads": len(os.listdir("/proc/self/task")) - openblas_threads(),
            "files": len(os.listdir("/proc/self/fd")),
            "printed": os.fstat(self._out).st_size,
            "cuda": torch is not None and torch.cuda.is_initialized(),
            "python": random.getstate(),
            "numpy": None if numpy is None else (numpy.get_state()[1].tobytes(), *numpy.get_state()[2:]),
            "torch": None if torch is None else torch.default_generator.get_state().numpy().tobytes(),
        }

    def _noting(self, call: Callable[..., Any], why: str) -> Callable[..., Any]:
        def noted(*arguments: Any, **options: Any) -> Any:
            self._why = why
            return call(*arguments, **options)

        return noted

    def _replace(self, owner: Any, name: str, by: Callable[..., Any]) -> None:
        before = vars(owner).get(name)
        setattr(owner, name, by)
        self._undo.append(lambda: setattr(owner, name, before) if before is not None else delattr(owner, name))
