"""Processes as the agent needs them: orphans come to it, a rank starts as a shell would start it, a tree ends whole.

torch starts workers in sessions of their own, and users' scripts fork as they like: a process group misses some of
them, so the tree is read from /proc, and who loses its parent becomes our child.
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
    """From now on the orphans among our descendants become our children, also where we are not PID 1.

    Raises OSError where the kernel cannot do it.
    """
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def prctl(option: int, value: int) -> None:
    """prctl(2) with one argument; raises OSError as the os module would."""
    if not sys.platform.startswith("linux"):
        raise OSError(errno.ENOSYS, f"ddprun needs Linux, this is {sys.platform}")
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


def listen_to_signals(numbers: Iterable[int]) -> int:
    """The read end of a pipe that gets a byte, the number, for each signal we live by; SIGCHLD is one of them."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in {signal.SIGCHLD, *numbers}:
        signal.signal(number, lambda *_: None)  # the byte in the pipe is the message; it needs some handler
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # inherited: a parent that blocks SIGCHLD would leave us deaf
    return read_end


def close_to_children() -> None:
    """Mark every descriptor but the standard streams to be closed by an exec: a rank is given nothing else."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):  # the one that listed the folder is closed by now
                os.set_inheritable(int(name), False)


def start(
    argv: Sequence[str], environ: Mapping[str, str], *, stdout: str = "", stderr: str = "", keep: Iterable[int] = ()
) -> int:
    """Start a program in a session of its own, its streams in these files where named; its pid.

    It ends with us. Where it cannot be started it ends as in a shell: with 127 or 126, and a sentence on stderr.
    """
    parent = os.getpid()
    # Blocked across the fork: until the child has given up our handlers, a signal meant for it would be written into
    # our pipe and taken for ours.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _in_child(lambda: _become(argv, environ, stdout, stderr, keep, parent))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
    return pid


def call_in_child(work: Callable[[], bytes]) -> tuple[int, int]:
    """Do something that may block for long (a name that does not resolve) in a child: its pid, and the end of a pipe
    with what it returns. A thread would do, if a fork beside it were safe. Raises OSError where no process is left."""
    read_end, write_end = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        os.close(read_end)
        os.close(write_end)
        raise
    if pid == 0:

        def answer() -> None:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            _close_all_but(write_end)
            os.write(write_end, work())
            os._exit(0)

        _in_child(answer)
    os.close(write_end)
    os.set_blocking(read_end, False)
    return pid, read_end


def _close_all_but(kept: int) -> None:
    """Our connections and ports are ours alone: held open by a child too, none of them would close while it waits."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != kept:
            with contextlib.suppress(OSError):  # the one that listed the folder is closed by now
                os.close(int(name))


def _in_child(work: Callable[[], None]) -> None:
    """Never returns: a fork that came back into the agent's loop would be a second agent."""
    try:
        work()
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(2, f"ddprun: {error}\n".encode())
        missing = isinstance(error, OSError) and error.errno in (errno.ENOENT, errno.ENOTDIR)
        os._exit(127 if missing else 126)
    finally:
        os._exit(126)


def _become(
    argv: Sequence[str], environ: Mapping[str, str], stdout: str, stderr: str, keep: Iterable[int], parent: int
) -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above: that signal will never come
        os._exit(127)
    os.setsid()
    for path, descriptor in ((stdout, 1), (stderr, 2)):
        if path:
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), descriptor)
    for descriptor in keep:
        os.set_inheritable(descriptor, True)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    try:
        os.execvpe(argv[0], list(argv), environ)  # noqa: S606 - no shell is meant
    except OSError as error:
        error.filename = argv[0]  # the last folder of PATH that was tried says nothing to the user
        raise


def reaped() -> Iterable[tuple[int, int]]:
    """Every child that has ended: its pid, and its exit code or the negative of its signal."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, os.waitstatus_to_exitcode(status)


def signal_group(pid: int, number: int) -> None:
    """A signal to a process and all that it started in its session; to it alone where it has none yet."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        try:
            os.killpg(pid, number)
        except ProcessLookupError:
            os.kill(pid, number)


def kill(pids: Iterable[int]) -> None:
    """SIGKILL to each; one that has ended or belongs to another user is passed over."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def descendants(root: int) -> set[int]:
    """Every process below `root`, whatever session or group it is in; the dead that are not yet reaped too."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    todo = [root]
    while todo:
        below = [pid for pid in children.get(todo.pop(), []) if pid not in found]
        found.update(below)
        todo.extend(below)
    return found


def _parents() -> Iterable[tuple[int, int]]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as stat:
                    line = stat.read()
            except OSError:  # ended since listdir
                continue
            yield int(name), int(line.rpartition(b")")[2].split()[1])  # the name before it may hold spaces


def readable(descriptor: int, seconds: float) -> bool:
    """Whether there is something to read, or the other end is closed, within that time."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(seconds * 1000))
