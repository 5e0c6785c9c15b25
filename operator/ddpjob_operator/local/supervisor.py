"""The supervisor of one local node: PID 1 of a pod, for a pod that is only processes.

`node.py` runs this file as a program, `python -I -S supervisor.py REPORT_FD`, once for each node; it imports little,
and from the standard library alone, because a job waits for it. It ends every descendant of its trainer, whatever
session that moved to, before it says that the node has ended: torch starts workers in sessions of their own, so killing
a process group leaves some alive (two survived a kill -9 of torchrun).

stdin is the control pipe, one JSON object a line: first the order {"argv", "env", "cwd", "grace_seconds"}, later
{"stop": {"grace_seconds": 10}} or {"kill": {}}. Its end is the end of the runner, however that died, and ends
everything at once. A pipe, because PDEATHSIG alone follows the thread that made the child, not the process.
REPORT_FD carries JSON lines back: {"started": …}, perhaps {"lingering": …}, one last {"exited": …} or {"failed": …}.
stdout is the trainer's: what it prints goes straight to the runner, never through here.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import select
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
WAIT_SECONDS_MAX = 3600.0  # poll takes 24.8 days at most, a grace may be years
LINGERING_SECONDS = 5.0  # SIGKILL takes milliseconds; after this long the kernel or another user's rights prevent it


def main() -> None:
    """Supervise one node, from the order on stdin to the last report."""
    report_fd = int(sys.argv[1])
    keep_from_trainer()
    become_subreaper()
    supervisor = Supervisor(report_fd)
    try:
        supervisor.run()
    finally:
        supervisor.end_tree()  # whatever went wrong here, a mistake of ours included, nothing of the node survives it


class Supervisor:
    """One trainer and all that it ever started; `run` returns when none of it is left and the runner has been told."""

    def __init__(self, report_fd: int) -> None:
        self.report_fd = report_fd
        self.main_pid = 0  # 0 until the trainer is started
        self.main_end: tuple[int, float] | None = None  # exit code (negative: signal) and Unix time
        self.grace_seconds = 0.0
        self.kill_at: float | None = None  # on the monotonic clock, once told to stop
        self.told_to_stop = False
        self.killed_after_grace = False
        self.end_now = False
        self.control = b""
        self.wakeup_fd = listen_to_signals()
        os.set_blocking(0, False)

    def run(self) -> None:
        """Wait for the order, start the trainer, obey until it ends, end what it left, report."""
        poller = select.poll()
        poller.register(0, select.POLLIN)
        poller.register(self.wakeup_fd, select.POLLIN)
        while not self.over():
            poller.poll(self.wait_milliseconds())  # without a deadline this sleeps for ever: no CPU at rest
            signals = drain(self.wakeup_fd)
            self.reap()  # before the orders: a trainer that had ended by then was not stopped
            self.read_control()
            if {signal.SIGTERM, signal.SIGINT, signal.SIGHUP} & set(signals):
                self.stop(self.grace_seconds)
        self.killed_after_grace = self.main_end is None and not self.end_now
        self.end_tree()
        if self.main_end is not None:
            self.report({"exited": self.exit_report(*self.main_end)})

    def over(self) -> bool:
        """Is there nothing left to wait for but the end of what still runs?"""
        if self.end_now or self.main_end is not None:
            return True
        return self.kill_at is not None and time.monotonic() >= self.kill_at

    def wait_milliseconds(self) -> float | None:
        """How long nothing needs doing unless something happens; None is for ever."""
        if self.kill_at is None:
            return None
        return min(max(0.0, self.kill_at - time.monotonic()), WAIT_SECONDS_MAX) * 1000

    def read_control(self) -> None:
        """Obey every whole line that has arrived; the end of the pipe is the end of the runner."""
        arrived = read_available(0)
        self.end_now = self.end_now or arrived is None
        *lines, self.control = (self.control + (arrived or b"")).split(b"\n")
        for line in lines:
            self.obey(json.loads(line))

    def obey(self, command: dict[str, object]) -> None:
        """Do what one line of the control pipe says."""
        if "argv" in command:
            self.start(command)
        elif "stop" in command:
            wish = command["stop"]
            assert isinstance(wish, dict)
            self.stop(float(wish["grace_seconds"]))
        else:
            assert "kill" in command, command
            self.end_now = True
            self.told_to_stop = self.told_to_stop or self.main_end is None

    def start(self, order: dict[str, object]) -> None:
        """Start the trainer and report it, or report why it cannot be started and end."""
        assert not self.main_pid, "one order for each supervisor"
        assert isinstance(order["grace_seconds"], (int, float))
        self.grace_seconds = float(order["grace_seconds"])
        self.main_pid, failure = fork_trainer(order)
        if failure is None:
            self.report({"started": {"pid": self.main_pid, "time": time.time()}})
            return
        self.report({"failed": failure})
        sys.exit(0)

    def stop(self, grace_seconds: float) -> None:
        """Ask the trainer's first process to end, as the kubelet asks PID 1; a later call can only shorten its time."""
        if not self.main_pid:  # told before the order came: nothing to end
            self.end_now = True
            return
        kill_at = time.monotonic() + grace_seconds
        if self.kill_at is None and self.main_end is None:
            self.told_to_stop = True
            os.kill(self.main_pid, signal.SIGTERM)  # not yet reaped, so the number is still its own
        self.kill_at = kill_at if self.kill_at is None else min(self.kill_at, kill_at)

    def reap(self) -> bool:
        """Collect every child that has ended, adopted ones too; False when no child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.main_pid and self.main_end is None:  # once reaped, its number may belong to another
                self.main_end = (os.waitstatus_to_exitcode(status), time.time())

    def end_tree(self) -> None:
        """Kill and reap until the kernel says that no child is left; orphans become our children, so none can hide."""
        since, told, pause_ms = time.monotonic(), False, 10
        poller = select.poll()
        poller.register(self.wakeup_fd, select.POLLIN)
        while self.reap():
            kill_all(left := descendants(os.getpid()))
            if not told and time.monotonic() - since > LINGERING_SECONDS:
                told = True
                self.report({"lingering": {"pids": sorted(left), "time": time.time()}})
            poller.poll(pause_ms)  # a child's end wakes us; the time-out is for one forked between look and kill
            drain(self.wakeup_fd)
            pause_ms = min(2 * pause_ms, 1000)

    def exit_report(self, code: int, ended: float) -> dict[str, object]:
        """What the runner hears about the trainer's first process; all others are gone by now."""
        return {
            "code": code if code >= 0 else None,
            "signal": -code if code < 0 else None,
            "time": ended,
            "told_to_stop": self.told_to_stop,
            "killed_after_grace": self.killed_after_grace,
        }

    def report(self, message: dict[str, object]) -> None:
        """Send one line to the runner, if there still is one."""
        try:
            os.write(self.report_fd, json.dumps(message).encode() + b"\n")
        except BrokenPipeError:
            self.end_now = True


def fork_trainer(order: dict[str, object]) -> tuple[int, dict[str, object] | None]:
    """Fork and exec the order's argv: its pid and None, or its pid and the report of why the exec failed."""
    failure_read, failure_write = os.pipe()  # closed by a successful exec: its end without a word is the success
    supervisor_pid = os.getpid()
    # Blocked across the fork: until the child has given up our handlers, a signal meant for it would be written into
    # our wakeup pipe and taken for ours.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pid = os.fork()
    if pid == 0:
        try:
            exec_trainer(order, supervisor_pid)
        except BaseException as error:  # a fork that returned into the supervisor's loop would obey orders twice
            os.write(failure_write, json.dumps(start_failure(error)).encode())
        finally:
            os._exit(127)
    os.close(failure_write)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    with open(failure_read, "rb") as pipe:
        said = pipe.read()
    return pid, json.loads(said) if said else None


def exec_trainer(order: dict[str, object], supervisor_pid: int) -> None:
    """Become the trainer; only ever returns by an exception."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor_pid:  # it died before the line above: that signal will never come
        os._exit(127)
    os.setsid()  # as PID 1 of a pod: `trap "kill 0" EXIT` of a launch script must not reach the supervisor
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(1, 2)
    cwd, argv, env = order["cwd"], order["argv"], order["env"]
    assert isinstance(cwd, str)
    assert isinstance(argv, list)
    assert isinstance(env, dict)
    os.chdir(cwd)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    try:
        os.execvpe(argv[0], argv, env)  # noqa: S606 - no shell is meant: the order's argv is what runs
    except OSError as error:
        error.filename = argv[0]  # the last folder of PATH that was tried says nothing to the user
        raise


def start_failure(error: BaseException) -> dict[str, object]:
    """The report of an exec that failed, with the code that a shell or a container gives."""
    number = (error.errno if isinstance(error, OSError) else None) or errno.EINVAL
    missing = number in (errno.ENOENT, errno.ENOTDIR)
    sentence = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
    if missing and isinstance(error, OSError) and os.path.isfile(str(error.filename)):
        sentence += " (the file is there: the program in its #! line is not)"
    return {"errno": number, "error": sentence, "code": 127 if missing else 126}


def listen_to_signals() -> int:
    """The read end of a pipe that gets a byte, the number, for each signal we live by."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # the byte in the pipe is the message; it needs some handler
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # inherited: a runner that blocks SIGCHLD would leave us deaf
    return read_end


def keep_from_trainer() -> None:
    """Mark everything that the runner handed down, the report pipe above all, to be closed by the trainer's exec."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):  # the one that listed the folder is closed by now
                os.set_inheritable(int(name), False)


def read_available(fd: int) -> bytes | None:
    """All bytes that wait in a non-blocking pipe; None at its end."""
    data = b""
    while True:
        try:
            chunk = os.read(fd, 65536)
        except BlockingIOError:
            return data
        if not chunk:
            return data or None  # the next call sees the end again
        data += chunk


def drain(fd: int) -> bytes:
    """The signals that arrived since the last look, a byte each."""
    return read_available(fd) or b""


def become_subreaper() -> None:
    """From now on the orphans among our descendants become our children, not init's.

    Raises OSError where the kernel cannot do it, with a sentence for the user where the system is not Linux.
    """
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def prctl(option: int, value: int) -> None:
    """prctl(2) with one argument; raises OSError as the os module would."""
    if not sys.platform.startswith("linux"):
        raise OSError(
            errno.ENOSYS,
            f"ddpjob run needs Linux, this is {sys.platform}: only there can it promise that no process survives. "
            "Run it in a Linux container or virtual machine",
        )
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


def parents() -> dict[int, int]:
    """The parent of every process that we may see, zombies included."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as stat:
                    line = stat.read()
            except OSError:  # ended since listdir
                continue
            found[int(name)] = int(line.rpartition(b")")[2].split()[1])  # the name before it may hold spaces
    return found


def descendants(root: int, parent_of: dict[int, int] | None = None) -> set[int]:
    """Every process below `root`, whatever session or group it is in."""
    children: dict[int, list[int]] = {}
    for pid, parent in (parents() if parent_of is None else parent_of).items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    todo = [root]
    while todo:
        below = [pid for pid in children.get(todo.pop(), []) if pid not in found]
        found.update(below)
        todo.extend(below)
    return found


def kill_all(pids: set[int]) -> None:
    """SIGKILL to each; one that has ended or belongs to another user is passed over."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
