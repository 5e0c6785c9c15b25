"""An agent that starts as a fork of this process, which has imported torch: 0.1 s of CPU instead of 5 s.

The agent's fork server is a fork of the agent. All else is as for an agent in a pod: arguments, environment, folder,
signals, streams, and the ranks that it forks. Only `Launcher.ddprun`, which starts a new Python, tests when modules are
imported and which variables torch reads during its import."""

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import logging
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from ddprun import preload

_ends_early = False


def start(
    module: str,
    words: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    ends_early: bool = False,
    log: Any = subprocess.PIPE,
) -> subprocess.Popen[str]:
    """Run `python -m MODULE WORDS` in a fork of this process with torch. ends_early: its processes run threads and exit
    handlers, but do not destroy the interpreter, which takes a fifth of a short run. log: file for its output."""
    global _ends_early
    import torch
    import torch._dynamo  # imports everything that a fork server imports

    torch.set_num_threads(1)  # a fork does not have the threads of a pool
    _ends_early = ends_early  # the forked process reads this
    return _copy(module, words, env, cwd=cwd, stdout=log, stderr=log, text=True)


def start_operator(env: Mapping[str, str], log: BinaryIO) -> subprocess.Popen[bytes]:
    """Run `python -m ddpjob_operator` in a fork of this process, with its output in the log."""
    import ddpjob_operator.kube.main  # noqa: F401 - what the operator imports to start

    return _copy("ddpjob_operator", [], env, stdout=log, stderr=log)


def start_ddpjob(words: Sequence[str], env: Mapping[str, str], cwd: Path) -> subprocess.Popen[str]:
    """Run `ddpjob WORDS` in a fork of this process, which has imported the command line already. The trainers that it
    starts are new processes as usual."""
    import ddpjob_cli.local.run  # noqa: F401 - most of what the command line imports

    pipe = subprocess.PIPE
    return _copy("ddpjob_cli", words, env, cwd=cwd, stdout=pipe, stderr=pipe, text=True, errors="replace")


def _copy(module: str, words: Sequence[str], env: Mapping[str, str], **options: Any) -> subprocess.Popen[Any]:
    gc.freeze()  # without this, each fork would collect pytest's objects at its end
    try:
        return subprocess.Popen(
            [sys.executable, "-m", module, *words],
            stdin=subprocess.DEVNULL,
            preexec_fn=lambda: _begin(module, words, env),  # never returns, so no program is executed
            **options,
        )
    finally:
        gc.unfreeze()


def _begin(module: str, words: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    _forget_pytest()
    kept = _let_go_of_pytests_files()
    _as_a_new_program(env, [module, *words], kept)
    sys.path.insert(0, os.getcwd())
    os.execvpe = functools.partial(_fork_server, kept)  # type: ignore[assignment]
    code = _run(lambda: runpy.run_module(module, run_name="__main__", alter_sys=False))
    if module == "ddpjob_cli":
        threading._shutdown()  # type: ignore[attr-defined]  # a thread that never ends would hang a new Python
    os._exit(code)


def _fork_server(kept: set[int], file: str, argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Replace os.execvpe: run fork servers in this process, and execute all other programs."""
    if list(argv[1:3]) != ["-u", preload.PROGRAM]:
        return os.execve(file, argv, environ)
    _as_a_new_program(environ, argv[2:], kept)
    code = _run(lambda: runpy.run_path(preload.PROGRAM, run_name="__main__"))
    if _ends_early:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    sys.stdout.flush()
    if _ends_early:
        os._exit(code)
    ctypes.pythonapi.Py_Exit(code)  # exits with the interpreter's full shutdown, as a rank does
    raise AssertionError("it has ended")


def _let_go_of_pytests_files() -> set[int]:
    """Close pytest's files, but keep their numbers in use. An object that holds such a number closes it when the fork
    ends; by then the number could belong to one of gloo's sockets."""
    nothing = os.open(os.devnull, os.O_RDWR)
    numbers = {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, nothing}
    for number in numbers:
        os.dup2(nothing, number, inheritable=False)
    return numbers | {nothing}


def _as_a_new_program(environ: Mapping[str, str], argv: Sequence[str], kept: set[int]) -> None:
    """Close what an exec would close. Set streams, variables and arguments as for a new program."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listed folder is closed already
            if int(name) > 2 and int(name) not in kept and not os.get_inheritable(int(name)):
                os.close(int(name))
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores both signals; Popen may have reset them
        signal.signal(number, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv[:] = argv
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115 - as long as it runs
    sys.stdout = sys.__stdout__ = _unbuffered(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _unbuffered(2)  # type: ignore[misc]


def _unbuffered(descriptor: int) -> Any:
    """Return a stream as under `python -u`."""
    errors = "backslashreplace" if descriptor == 2 else None
    stream: Any = open(descriptor, "w", closefd=False, errors=errors)  # noqa: SIM115 - as long as it runs
    stream.reconfigure(write_through=True)
    return stream


def _forget_pytest() -> None:
    """Reset signals, hooks and exit handlers as in a new Python."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.disable()
    atexit._clear()
    # Keep only torch's finalizers: those of pytest would remove its temporary folders at this process's exit.
    for one in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        found = one.peek()
        one.atexit = bool(found and str(found[1].__module__).startswith("torch"))
    atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    logging.getLogger().handlers.clear()
    warnings.simplefilter("ignore")
    tempfile.tempdir = None


def _run(work: Any) -> int:
    try:
        work()
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != preload.PROGRAM:
            trace = trace.tb_next  # drop frames that a new Python would not have
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace or error.__traceback__
        sys.excepthook(type(error), error, trace or error.__traceback__)
        return 1
    return 0
