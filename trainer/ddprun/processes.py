"""Processes for an agent and for a local run: adopt orphans, start a program, read the tree, kill it.

A process group is not enough to kill a job. torch 2.13.0 starts each worker in its own session
(torch/distributed/elastic/multiprocessing/subprocess_handler/subprocess_handler.py:66), and scripts fork as they like:
two workers survived a kill -9 of torchrun. So the tree is read from /proc, and a subreaper adopts orphans.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Make orphaned descendants children of this process, even if it is not PID 1. Raise OSError on failure."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def prctl(option: int, value: int) -> None:
    """Call prctl(2) with one argument. Raise OSError as the os module does."""
    if not sys.platform.startswith("linux"):
        raise OSError(
            errno.ENOSYS,
            f"DDPJob needs Linux, this is {sys.platform}: only there can it ensure that no process survives. "
            "Run it in a Linux container or virtual machine",
        )
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


def end_with(parent: int) -> None:
    """Let the kernel kill this process when this parent ends."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before prctl, so the signal will never come
        os._exit(128 + signal.SIGKILL)


def listen_to_signals(numbers: Iterable[int]) -> int:
    """Return the read end of a pipe that gets a byte, its number, for SIGCHLD and each signal of `numbers`."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in {signal.SIGCHLD, *numbers}:
        signal.signal(number, lambda *_: None)  # only a signal with a Python handler writes a byte into the pipe
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # a parent may block SIGCHLD, and the mask is inherited
    return read_end


def open_streams() -> None:
    """Open closed standard streams, as in some daemons, on /dev/null: otherwise a socket would get their numbers."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # open() takes the lowest free number
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def close_to_children() -> None:
    """Mark every descriptor except the standard streams as close-on-exec."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):  # the descriptor that listed the folder is closed
                os.set_inheritable(int(name), False)


def start(
    argv: Sequence[str], environ: Mapping[str, str], *, stdout: str = "", stderr: str = "", keep: Iterable[int] = ()
) -> int:
    """Start a program in its own session, and return its pid. It is killed when this process ends.

    stdout, stderr: files for its streams. If the program cannot be started, the child exits as in a shell: with 127 or
    126 and a sentence on stderr.
    """

    def become() -> None:
        for path, descriptor in ((stdout, 1), (stderr, 2)):
            if path:
                os.dup2(
                    os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW, 0o600),
                    descriptor,
                )
        for descriptor in keep:
            os.set_inheritable(descriptor, True)
        execute(argv, environ)

    return fork(become)


def fork(work: Callable[[], None]) -> int:
    """Run `work` in a child with its own session and default signals. Return its pid. It ends with this process."""
    parent = os.getpid()

    def child() -> None:
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_DFL)
        end_with(parent)
        os.setsid()
        work()

    # Block signals until the child has removed its handlers, which would write its signals into the parent's pipe.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _in_child(child)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
    return pid


def execute(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Replace this process by a program. Raise OSError with the program's name if that fails."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    try:
        os.execvpe(argv[0], list(argv), environ)  # noqa: S606 - no shell is meant
    except OSError as error:
        error.filename = argv[0]  # otherwise the error names the last folder of PATH that Python tried
        raise


def call_in_child(work: Callable[[], bytes]) -> tuple[int, int]:
    """Run work that may block for long, such as name resolution, in a child.

    Return its pid, and a pipe with the result. Not a thread, because a fork with threads is unsafe. Raise OSError if no
    process can be created.
    """
    read_end, write_end = os.pipe()

    def answer() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        _close_all_but(write_end)
        os.write(write_end, work())
        os._exit(0)

    try:
        pid = fork(answer)
    except OSError:
        os.close(read_end)
        raise
    finally:
        os.close(write_end)
    os.set_blocking(read_end, False)
    return pid, read_end


def _close_all_but(kept: int) -> None:
    """Close inherited connections and ports: otherwise they would stay open after we have closed them."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != kept:
            with contextlib.suppress(OSError):  # the descriptor that listed the folder is closed
                os.close(int(name))


def _in_child(work: Callable[[], None]) -> None:
    """Run `work` and exit. Never return, because the child would then run its parent's loop."""
    try:
        work()
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(2, f"ddprun: {error}\n".encode())
        missing = isinstance(error, OSError) and error.errno in (errno.ENOENT, errno.ENOTDIR)
        os._exit(127 if missing else 126)
    finally:
        os._exit(126)


def reaped() -> Iterable[tuple[int, int]]:
    """Yield the pid of each ended child, and its exit code or the negative of its signal."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended[0], os.waitstatus_to_exitcode(ended[1])


def send(pids: Iterable[int], number: int) -> None:
    """Send a signal to each process, except those that have ended or belong to another user."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill(pids: Iterable[int]) -> None:
    """Send SIGKILL to each process, except those that have ended or belong to another user."""
    send(pids, signal.SIGKILL)


def descendants(root: int, parent_of: Mapping[int, int] | None = None) -> set[int]:
    """Return all processes below `root`, in any session or group, zombies included."""
    children: dict[int, list[int]] = {}
    for pid, parent in (parents() if parent_of is None else parent_of).items():
        children.setdefault(parent, []).append(pid)
    below: set[int] = set()
    todo = [root]
    while todo:
        new = [pid for pid in children.get(todo.pop(), []) if pid not in below]
        below.update(new)
        todo.extend(new)
    return below


def parents() -> dict[int, int]:
    """Return the parent of every visible process, zombies included."""
    parent_of = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        if fields := stat(pid):
            parent_of[pid] = int(fields[1])
    return parent_of


def catches(pid: int, number: int) -> bool:
    """True if this process has a handler for the signal; otherwise the signal may end it."""
    return bool(_masks(pid).get("SigCgt", 0) >> (number - 1) & 1)


def would_end(pid: int, number: int) -> bool:
    """True if the signal would end this process at once, such as the parent of torch.multiprocessing.spawn: the kernel
    then sends SIGINT to the training processes, which save nothing.
    """
    masks = _masks(pid)
    return bool(masks) and not (masks["SigCgt"] | masks["SigIgn"]) >> (number - 1) & 1


def _masks(pid: int) -> dict[str, int]:
    """Return the signals that a process catches and ignores, as bits by name; empty if it has ended."""
    with contextlib.suppress(OSError):
        lines = _read(f"/proc/{pid}/status", 1 << 16).decode(errors="replace").splitlines()
        fields = (line.split() for line in lines if line.startswith(("SigCgt:", "SigIgn:")))
        return {name.rstrip(":"): int(bits, 16) for name, bits in fields}
    return {}


def is_python(pid: int) -> bool:
    """True if this process is a Python interpreter."""
    with contextlib.suppress(OSError):  # the process is another user's, or has ended
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith(("python", "pypy"))
    return False


def words(pid: int) -> list[str]:
    """Return the command line of a process; empty if it has ended."""
    with contextlib.suppress(OSError):
        return _read(f"/proc/{pid}/cmdline").decode(errors="replace").split("\0")[:-1]
    return []


def is_running(pid: int) -> bool:
    """True if this process has not ended; zombies have."""
    fields = stat(pid)
    return bool(fields) and fields[0] not in ("Z", "X")


def stat(pid: int) -> list[str]:
    """Return the fields of a process in /proc/PID/stat, its state first; empty if it has ended."""
    with contextlib.suppress(OSError):
        return _read(f"/proc/{pid}/stat").rpartition(b")")[2].decode().split()  # the name before may contain spaces
    return []


def _read(path: str, size: int = 4096) -> bytes:
    """Read a short file of /proc. A restart reads many, and `open` makes eight system calls for each."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, size)
    finally:
        os.close(descriptor)


def readable(descriptor: int, seconds: float) -> bool:
    """True if there is something to read, or the other end is closed, within that time."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(seconds * 1000))
