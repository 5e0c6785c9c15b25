"""The fork server: imports torch once, and forks each rank from there.

`preload.py` runs this file as a program, `python -u forkserver.py FD FD2`, with the environment of the ranks. It
imports little, and only the standard library, because its imports are also in each rank. FD is a socket to the agent,
with one JSON object per line:

    agent:  {"modules": ["torch"], "path0": "/app", "hidden": {"PYTORCH_NVML_BASED_CUDA_CHECK": null}}
    server: {"ready": true, "failed": {"numpyy": "ModuleNotFoundError: …"}}  or  {"refused": "why"}
    agent:  {"run": "script", "argv": ["train.py", "--lr", "1"], "environ": {"RANK": "3"}, "stdout": "", …}
    server: {"pid": 4711}  or  {"error": "OSError: …"}
    agent:  {"spare": true}
    server: {"pid": 4712}  or  {"error": "OSError: …"}
    agent:  {"changed": true}
    server: {"changed": ["/app/model.py"]}
    agent:  {"learn": "/tmp/…/imports_0.json"}

After `learn`, a child imports what the ranks have imported (`learned.py`) and answers on FD2:

    child:  {"ready": true, "pid": 4713, "imports": ["sklearn"], "left": {"x.y": "starts a thread"}, "bytes": 61000000}

Then the agent closes the first socket, which ends the server, and the child serves on FD2.

A rank is forked twice: its parent exits at once, so that the rank becomes a child of the agent, which reaps it.
`become` gives it the state that `python -u train.py` starts with. Its run is the message with "run". A spare is forked
in the same way before it is needed, and becomes a rank of the next generation when it gets a run.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import io
import json
import os
import signal
import socket
import sys
import time
import types
import zipimport

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing is not imported at run time, because it would be in each rank
    from collections.abc import Callable, Iterator
    from typing import Any

PR_SET_PDEATHSIG = 1
CRASH_DESCRIPTOR = 512  # lowest number of the descriptor; `ulimit -n` is usually 1024 or more
PIPE_BYTES = 4096  # PIPE_BUF: a write of up to this size is atomic
CALLSTACK_CHARACTERS_MAX = 8192  # the termination message has at most 4096 bytes


def main() -> Callable[[], None] | None:
    """Import the modules, report whether forks are safe, and call `served`."""
    agent, later = (socket.socket(fileno=int(word)) for word in sys.argv[1:])
    agent.set_inheritable(False)
    later.set_inheritable(False)
    agent_pid = os.getppid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    lines = agent.makefile("r", encoding="utf-8")
    order = json.loads(lines.readline())
    with reads_recorded() as read, not_collected():
        failed = preload(order)
    refused = unsafe()
    if refused:
        say(agent, {"refused": refused})
        return None
    prepared = Prepared(read)
    say(agent, {"ready": True, "failed": failed})
    return served(agent, lines, agent_pid, order, prepared, later)


def served(
    agent: socket.socket,
    lines: Any,
    agent_pid: int,
    order: dict[str, Any],
    prepared: Prepared,
    later: socket.socket | None,
) -> Callable[[], None] | None:
    """Fork ranks until the agent has ended. Return None then; in a rank, return the function that runs the script.

    later: socket for a child that learns imports."""
    spares = Spares(prepared.wait)
    for line in lines:
        asked = json.loads(line)
        if "changed" in asked:
            say(agent, {"changed": prepared.imported.changed()})
            continue
        if "learn" in asked:
            if later is not None and learns(asked["learn"], agent_pid, prepared, later):
                spares.close()
                lines.close()
                agent.close()
                return served(later, later.makefile("r", encoding="utf-8"), agent_pid, order, prepared, None)
            if later is not None:
                later.close()
                later = None
            continue
        told = serve(agent, agent_pid, asked, spares)
        if told is not None:
            lines.close()
            agent.close()
            if later is not None:
                later.close()
            return become(order, told(), prepared)
    return None


def learns(path: str, agent_pid: int, prepared: Prepared, later: socket.socket) -> bool:
    """Fork a child that imports a rank's list of imports. Return False here at once, True in the child when it can
    serve."""
    from ddprun import learned

    with not_collected():
        known = learned.fork(path, agent_pid, later, prepared.show_torch)
    if known is None:
        return False
    prepared.hide_torch(known.read)
    packages = list(dict.fromkeys(name.partition(".")[0] for name in known.modules))
    say(
        later,
        {"ready": True, "pid": os.getpid(), "imports": packages, "left": known.left, "bytes": known.size},
    )
    return True


def preload(order: dict[str, Any]) -> dict[str, str]:
    """Import the modules with the search path and environment of the ranks. Return errors by name."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = order["path0"]  # torch imports numpy; a numpy.py next to the script must take effect as in a rank
    # Detecting GPUs through CUDA would make this process and its forks unable to use them.
    for name in order["hidden"]:
        os.environ[name] = "1"
    failed = {}
    for name in order["modules"]:
        try:
            __import__(name)
        except Exception as error:  # noqa: PERF203 - the next may be importable
            failed[name] = f"{type(error).__name__}: {error}"
    if "torch.distributed.distributed_c10d" in sys.modules:
        with contextlib.suppress(ImportError):
            import ddpjob.group.gloo_teardown
            import ddpjob.group.wait_for_store
            import ddpjob.reporting.rank_end  # noqa: F401 - what `prepare_groups` needs
            import ddprun.learned  # noqa: F401 - how a rank tells of its imports
    return failed


@contextlib.contextmanager
def not_collected() -> Iterator[None]:
    """Exempt all objects created in this `with` block from garbage collection, permanently.

    Otherwise the collector would traverse all imports repeatedly, which takes a quarter of the import time. It would do
    so in each rank too, where its writes copy memory pages. The cost is 6 MB of torch's garbage, shared by all ranks.
    """
    before = gc.get_threshold()
    gc.set_threshold(0)  # gc.disable() is not enough, because modules may call gc.enable()
    try:
        yield
    finally:
        gc.freeze()
        if gc.get_threshold()[0] == 0:
            gc.set_threshold(*before)


@contextlib.contextmanager
def reads_recorded() -> Iterator[set[str]]:
    """Yield a set that records which environment variables imports read: a script would set them too late."""
    names: set[str] = set()
    kind: Any = type(os.environ)
    read = kind.__getitem__

    def read_and_record(environ: Any, name: Any) -> Any:
        names.add(name)
        return read(environ, name)

    kind.__getitem__ = read_and_record
    try:
        yield names
    finally:
        kind.__getitem__ = read


def unsafe() -> str:
    """Return why a fork would differ from a new process; "" if it would not."""
    from ddprun.late_environment import openblas_threads

    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "a preloaded module has initialised CUDA, and a forked process cannot use it"
    threads = len(os.listdir("/proc/self/task")) - 1
    pool = openblas_threads()
    if threads > pool:
        names = [thread_name(task) for task in os.listdir("/proc/self/task") if int(task) != os.getpid()]
        of_blas = f", of which OpenBLAS has {pool}" if pool else ""
        shown = ", ".join(sorted(names))
        return f"the preloaded modules run {threads} threads ({shown}){of_blas}: a forked process would lose them"
    return ""


def thread_name(task: str) -> str:
    with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm") as comm:
        return comm.read().strip()
    return "ended"


class Prepared:
    """Work that all ranks need, done once before the forks.

    In a rank each write copies a memory page, which takes 6 ms for torch's modules alone."""

    def __init__(self, read: set[str]) -> None:
        """read: variables that were read while torch was imported."""
        self.torch: Any = sys.modules.get("torch")
        self.hidden: Any = None
        self._read: set[str] = set()
        prepare_groups()
        write_whole_lines()
        self.imported: Any = None  # used only under `ddpjob dev`
        self.hide_torch(read)
        # Let the kernel reap ended children, because waiting for each child would take as long as its fork.
        self._ended = signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    def hide_torch(self, read: set[str]) -> None:
        """Hide torch until a script imports it (late_environment.py). read: variables read since the last call."""
        self._read |= read
        if "DDPJOB_DEV" in os.environ:
            from ddprun.changed import ImportedFiles

            self.imported = self.imported or ImportedFiles()
            self.imported.add(list(sys.modules.values()))
        if self.torch is not None:
            with contextlib.suppress(ImportError):
                from ddprun import late_environment

                self.hidden = late_environment.hide_torch(self._read)

    def show_torch(self) -> None:
        """Undo `hide_torch`."""
        if self.hidden is not None:
            self.hidden.begin()
            import torch  # noqa: F401 - its finder restores all of torch

    def wait(self) -> None:
        """Copy the memory pages that the script's `import torch` will write to. Called while a spare waits."""
        if self.hidden is not None:
            self.hidden.touch()

    def of_torch(self) -> set[str]:
        """Names of torch's modules that the server hides until the script imports torch."""
        return set() if self.hidden is None else self.hidden.names

    def begin(self) -> None:
        """Finish the preparation in a rank, after the rank's environment was set."""
        signal.signal(signal.SIGCHLD, self._ended)
        reseed(self.torch)
        if (learned := sys.modules.get("ddprun.learned")) is not None:
            learned.set_ranks()
        if self.hidden is not None:
            self.hidden.begin()


class Spares:
    """Ranks forked in advance, because a restart would wait for the forks: 12 to 30 ms per rank on two CPUs."""

    def __init__(self, begin: Callable[[], None]) -> None:
        """begin: called in a spare before it waits."""
        self._begin = begin
        self._waiting: list[tuple[int, int]] = []  # for each spare: its pid, and the pipe that gets its run

    def add(self, agent_pid: int) -> tuple[int, Callable[[], dict[str, Any]] | None]:
        """Fork a spare. Return its pid; in the spare, return 0 and a function that waits for its run. Raise OSError."""
        read_end, write_end = os.pipe()
        try:
            pid = fork_rank(agent_pid, (read_end, write_end))
        except OSError:
            os.close(read_end)
            os.close(write_end)
            raise
        if pid == 0:
            os.close(write_end)
            self.close()
            self._begin()
            return 0, lambda: awaited(read_end)
        os.close(read_end)
        self._waiting.append((pid, write_end))
        return pid, None

    def take(self, run: dict[str, Any]) -> int:
        """Let a spare run the script with these settings. Return its pid; 0 if no spare is left."""
        while self._waiting:
            pid, pipe = self._waiting.pop(0)
            with contextlib.suppress(OSError), open(pipe, "w", encoding="utf-8") as file:  # the spare was killed
                file.write(json.dumps(run) + "\n")
                file.flush()
                return pid
        return 0

    def close(self) -> None:
        """Close the pipes in a rank: otherwise the spares would wait even after the server has ended."""
        for _, pipe in self._waiting:
            os.close(pipe)
        self._waiting.clear()


def awaited(pipe: int) -> dict[str, Any]:
    """Wait in a spare for a script to run, and return its settings. Exit if the server ends first."""
    with open(pipe, encoding="utf-8") as file:
        line = file.readline()
    if not line.endswith("\n"):
        os._exit(0)
    run: dict[str, Any] = json.loads(line)
    return run


def serve(
    agent: socket.socket, agent_pid: int, asked: dict[str, Any], spares: Spares
) -> Callable[[], dict[str, Any]] | None:
    """Fork a rank or use a spare. Return None in the server; in the rank, return a function that returns its run."""
    told, server = None, os.getpid()
    try:
        if "spare" in asked:
            pid, told = spares.add(agent_pid)
        else:
            pid = spares.take(asked) or fork_rank(agent_pid)
    except OSError as error:
        if os.getpid() != server:  # a fork that went on here would be a second server on the same socket
            os._exit(1)
        say(agent, {"error": str(error)})
        return None
    if pid:
        say(agent, {"pid": pid})
        return None
    spares.close()
    return told or (lambda: asked)


def fork_rank(agent_pid: int, of_rank: tuple[int, ...] = ()) -> int:
    """Fork twice. Return the pid in the server, and 0 in the rank, whose parent is the agent. Raise OSError.

    of_rank: descriptors that only the rank keeps; the process between server and rank closes them.
    """
    read_end, write_end = os.pipe()
    try:
        between = fork()
    except OSError as error:
        os.close(read_end)
        os.close(write_end)
        raise OSError(f"{type(error).__name__}: {error}") from None
    if between == 0:
        os.close(read_end)
        fork_again(agent_pid, write_end, of_rank)
        return 0
    os.close(write_end)
    answer = os.read(read_end, PIPE_BYTES).decode()  # the rank's pid, or an error: one atomic write
    os.close(read_end)
    if not answer.isdecimal():
        raise OSError(answer or "it was killed while it forked")
    return int(answer)


def fork_again(agent_pid: int, answer: int, of_rank: tuple[int, ...]) -> None:
    """Fork the rank and exit. Return in the rank, once the agent is its parent and each notices the other's end."""
    between = os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # otherwise the kernel reaps a rank that is killed too early
    try:
        pid = fork()
    except OSError as error:
        os.write(answer, f"{type(error).__name__}: {error}".encode()[:PIPE_BYTES])
        os._exit(1)
    if pid:
        for descriptor in of_rank:  # closed before the answer: otherwise the server could send a run to a killed spare
            os.close(descriptor)
        os.write(answer, str(pid).encode())
        os._exit(0)
    os.close(answer)
    while os.getppid() == between:
        time.sleep(0.0002)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != agent_pid:  # the agent ended before prctl, so no signal will come
        os._exit(1)


def fork() -> int:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads, which `unsafe` checks
        return os.fork()


def become(order: dict[str, Any], run: dict[str, Any], prepared: Prepared) -> Callable[[], None]:
    """Bring this process into the state of `python -u SCRIPT` before the script's first line.

    Return the function that runs the script, to be called last. Python's stream objects are kept, because they buffer
    at most the current line."""
    os.setsid()
    for path, descriptor in ((run["stdout"], 1), (run["stderr"], 2)):
        if path:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW, 0o600)
            os.dup2(file, descriptor)
            os.close(file)
    write_down_stacks(run["crash"], run["stacks_signal"])
    if (rank_end := sys.modules.get("ddpjob.reporting.rank_end")) is not None:
        rank_end.begin(run["end"])
    for name, value in order["hidden"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    os.environ.update(run["environ"])
    module = run["run"] == "module"
    sys.argv[:] = run["argv"]
    sys.orig_argv[:] = [sys.executable, "-u", *(["-m"] if module else []), *run["argv"]]
    if run.get("imports"):
        Imports.path, Imports.known = run["imports"], {*sys.modules, *prepared.of_torch()}
        Imports.environ = {name: value for name, value in os.environ.items() if name not in run["environ"]}
    prepared.begin()
    if "triton" in sys.modules:
        # For frozen objects, triton's nanobind prints hundreds of lines of "leaked" at exit.
        atexit.register(gc.unfreeze)
    sys.modules["__main__"] = main_module()
    return run_module if module else run_script


def write_whole_lines() -> None:
    """Let stdout and stderr write whole lines. Under -u each print makes two writes, so ranks that print at the same
    time, as after a collective, would mix their lines: `rank 0rank 1`.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a preloaded module may have replaced the stream
            stream.reconfigure(line_buffering=True, write_through=False)


def write_down_stacks(path: str, stacks_signal: int) -> None:
    """Write the stack to a file when a signal kills this process, or when the agent sends `stacks_signal`. The agent
    uses this signal until the first process group starts the watchdog, which then answers the agent's requests.

    No crash is recorded if the user has set PYTHONFAULTHANDLER. The file's descriptor has a high number. If a script
    closes all descriptors, its own files get the lowest numbers, so stacks are not written into them.
    """
    with contextlib.suppress(OSError, ValueError):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        try:
            descriptor = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, CRASH_DESCRIPTOR)
            if not faulthandler.is_enabled():
                faulthandler.enable(file=descriptor)
            faulthandler.register(stacks_signal, file=descriptor, all_threads=True)
        finally:
            os.close(file)


def reseed(torch: Any) -> None:
    """Seed numpy and torch again. Otherwise all ranks, also after a restart, would draw the same numbers."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    if torch is not None:
        torch.default_generator.seed()  # the CPU's random generator; those of GPUs are created in the rank


def prepare_groups() -> None:
    """Prepare process groups of scripts without the library: torch waits for rank 0 (wait_for_store.py), gloo groups
    are kept (gloo_teardown.py), and the watchdog starts with the first group.
    """
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    gloo, store = (sys.modules.get(f"ddpjob.group.{name}") for name in ("gloo_teardown", "wait_for_store"))
    if store is not None:
        store.have_torch_wait_for_rank_0()
    if c10d is not None and gloo is not None:
        gloo.keep_all_of(c10d)
    watch_group(c10d)
    ddp, rank_end = (sys.modules.get(name) for name in ("torch.nn.parallel.distributed", "ddpjob.reporting.rank_end"))
    if ddp is not None and rank_end is not None:
        rank_end.watch_ddp(ddp.DistributedDataParallel)


def watch_group(c10d: Any) -> None:
    """Start ddprun's watchdog with the first process group, not earlier: it is a thread, and scripts may fork before.

    torch has no public hook for a new group, so this replaces `_update_default_pg`
    (torch/distributed/distributed_c10d.py:1445 in torch 2.13.0). If a torch version renames it, only scripts that call
    `ddpjob.init` or `ddpjob.progress` are watched.
    """
    update = getattr(c10d, "_update_default_pg", None)
    if update is None:
        return

    def update_and_watch(group: Any) -> None:
        if "DDPJOB_BEATS" not in os.environ:
            update(group)
            return
        with contextlib.suppress(Exception):
            from ddpjob.reporting import watchdog

            if group is None:
                watchdog.left()
        update(group)
        with contextlib.suppress(Exception):
            if group is not None:
                show_torch()
                watchdog.begin()
                sys.modules["ddpjob.reporting.rank_end"].formed(group)
        with contextlib.suppress(Exception):
            if group is not None:
                Imports.note()

    c10d._update_default_pg = update_and_watch


def show_torch() -> None:
    """Make torch visible again: if all imports of a script were learned, its import statements never load torch."""
    import torch  # noqa: F401


class Imports:
    """The imports of a rank, written to a file when it forms its first group."""

    path = ""
    """The file; "" if the imports are not needed."""
    known: set[str] = set()  # noqa: RUF012 - replaced as a whole
    """Modules that the fork server had imported."""
    environ: dict[str, str] = {}  # noqa: RUF012
    """Variables at the start, without those that only this rank has."""

    @classmethod
    def note(cls) -> None:
        """Write the imports to the file, once, and never in a child of the rank."""
        path, cls.path = cls.path, ""
        if path and os.environ.get("DDPJOB_BEATS"):
            from ddprun import learned

            names = {*cls.environ, *os.environ}
            changed = {n: os.environ.get(n) for n in names if cls.environ.get(n) != os.environ.get(n)}
            learned.note(path, cls.known, changed)


def main_module() -> Any:
    module: Any = types.ModuleType("__main__")
    module.__builtins__ = sys.modules["builtins"]
    module.__annotations__ = {}
    return module


def run_script() -> None:
    """Run as `python SCRIPT`."""
    path = sys.argv[0]
    if is_zip(path):
        sys.path[0] = path
        run_main(alter_argv=False)
    else:
        run_source(path, read_source(os.path.abspath(path)))


def read_source(path: str) -> bytes:
    try:
        with io.open_code(path) as file:
            return file.read()
    except OSError as error:
        print(f"{sys.executable}: can't open file {path!r}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def run_source(path: str, source: bytes) -> None:
    from importlib.machinery import SourceFileLoader

    module: Any = sys.modules["__main__"]
    module.__file__ = os.path.join(os.getcwd(), path)
    module.__cached__ = None
    module.__loader__ = SourceFileLoader("__main__", module.__file__)
    exec(compile(source, module.__file__, "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - runs the script


def is_zip(path: str) -> bool:
    with contextlib.suppress(ImportError):
        return bool(zipimport.zipimporter(path))
    return False


def run_module() -> None:
    """Run as `python -m MODULE`."""
    sys.argv[0], name = "-m", sys.argv[0]
    run_main(name)


def run_main(name: str = "__main__", *, alter_argv: bool = True) -> None:
    import runpy

    runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]  # what Python itself calls


def say(agent: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the agent has ended, and PDEATHSIG ends this process too
        agent.sendall(json.dumps(message).encode() + b"\n")


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def print_without_our_frames() -> None:
    """Print tracebacks without the fork server's frames, and record the exception for the agent."""
    users, rank = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        sys.excepthook = users
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        error.__traceback__ = sys.last_traceback = trace
        # Only in the rank itself, not in its forks. Not for KeyboardInterrupt, after which Python must end by SIGINT.
        # A call of exec() here, as in an import of dataclasses, would prevent the end by SIGINT.
        if os.getpid() == rank and isinstance(error, Exception):
            with contextlib.suppress(Exception):
                import traceback

                from ddpjob.reporting.termination import cause_line

                record(cause_line(error), "".join(traceback.format_exception(kind, error, trace)))
            with never_exit_with_0():
                users(kind, error, trace)
            with contextlib.suppress(Exception):
                from ddpjob.reporting.termination import end_soon

                end_soon()
        else:
            users(kind, error, trace)

    sys.excepthook = hook


@contextlib.contextmanager
def never_exit_with_0() -> Iterator[None]:
    """Exit with 1 if a script's own excepthook exits with 0, because the exception was not handled."""
    leave: Any = os._exit
    os._exit = lambda status: leave(status or 1)
    try:
        yield
    except SystemExit as ended:
        raise SystemExit(ended.code or 1) from None


def record_exit(error: SystemExit) -> None:
    """Record a SystemExit with a text, such as `sys.exit("no data")` or argparse's: no excepthook is called for it."""
    if isinstance(error.code, int) and error.code and not error.code & 0xFF:
        error.code = 1  # sys.exit(os.system(…)) may pass 256; the kernel would keep 8 bits, so the exit code would be 0
    with contextlib.suppress(Exception):
        from ddpjob import process
        from ddpjob.reporting.termination import end_soon, exit_code, exit_words, hidden_by
        from ddpjob_core import rules

        line, printed = exit_words(error)
        if line:
            record(line, printed)
        if exit_code(error) not in (0, rules.RESUMABLE_EXIT_CODE):
            end_soon()
        if process.current.end is not None:
            process.current.end.hidden = hidden_by(error)


def record(line: str, printed: str) -> None:
    """Write the exception as torch's `@record` does, also for scripts without it: an exit code shows no cause."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path):
        return
    extra = {"py_callstack": printed[-CALLSTACK_CHARACTERS_MAX:], "timestamp": str(int(time.time()))}
    with open(path, "w", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o600)) as file:
        json.dump({"message": {"message": line, "extraInfo": extra}}, file)


def stopped_code(error: BaseException) -> int:
    """Return the exit code of a script that ends by `raise ddpjob.Stopped(step)`; 0 for other ends."""
    errors: Any = sys.modules.get("ddpjob.errors")
    return int(error.code) if errors is not None and isinstance(error, errors.Stopped) else 0


def end_without_teardown(code: int) -> None:
    """End a stopped rank as Python does, except that imported modules are not destroyed: torch's take 0.25 s of CPU
    time, and the next generation waits for all ranks.

    Exit functions run, the objects of the script are destroyed, and all files are flushed.
    """
    import threading

    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit.unregister(gc.unfreeze)
    if (gloo := sys.modules.get("ddpjob.group.gloo_teardown")) is not None:
        atexit.unregister(gloo.settle_at_exit)
    atexit._run_exitfuncs()
    del sys.modules["__main__"]
    gc.collect()
    for file in gc.get_objects():
        if issubclass(type(file), (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)):
            with contextlib.suppress(Exception):
                file.flush()
    ctypes.CDLL(None).fflush(None)
    os._exit(code)


if __name__ == "__main__":
    run = main()
    if run is not None:
        stopped = 0
        try:
            run()
        except BaseException as error:
            print_without_our_frames()
            if isinstance(error, SystemExit):
                record_exit(error)
            stopped = stopped_code(error)
            if not stopped:
                raise
        if stopped:
            end_without_teardown(stopped)
