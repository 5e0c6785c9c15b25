"""The supervisor of one local node, like PID 1 of a pod. `node.py` runs it as a program. It imports little, because a
job waits for it. Before it reports the end of the node, it kills all descendants of its trainer, in any session. stdin
is the control pipe with a JSON object per line: first {"argv", "env", "cwd", "grace_seconds"}, later {"stop": 10}. If
stdin ends, the runner has died, and all processes are killed. (PDEATHSIG would depend on a thread of the runner.) The
descriptor in the first argument carries {"started": PID}, and last {"ended": …} with the fields of `node.End`. stdout
belongs to the trainer."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from typing import Any

from ddprun import processes

WAIT_SECONDS_MAX = 3600.0  # seconds; poll accepts at most 24.8 days, but a grace period may be years
LEFT_MAX = 16  # maximum number of leftover processes in a report; each command line has at most 4 KiB
STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def main() -> None:
    report_fd = int(sys.argv[1])
    processes.close_to_children()  # an inherited report pipe would stay open after the supervisor's end
    processes.become_subreaper()
    supervisor = Supervisor(report_fd)
    try:
        supervisor.run()
    finally:
        supervisor.end_tree()  # even after a bug in this program, no process of the node may survive


class Supervisor:
    """Supervises one trainer and all its descendants. `run` returns when all have ended and this is reported."""

    def __init__(self, report_fd: int) -> None:
        self.report_fd = report_fd
        self.main_pid = 0  # 0 until the trainer is started
        self.main_end: tuple[int, float] | None = None  # exit code (negative: signal) and Unix time
        self.grace_seconds = 0.0
        self.kill_at: float | None = None  # time on the monotonic clock; None until a stop is requested
        self.stop_requested = False
        self.end_now = False
        self.control = b""
        self.wakeup_fd = processes.listen_to_signals(STOP_SIGNALS)
        os.set_blocking(0, False)

    def run(self) -> None:
        """Read the command, start the trainer, handle requests until it ends, kill its descendants, and report."""
        poller = select.poll()
        poller.register(0, select.POLLIN)
        poller.register(self.wakeup_fd, select.POLLIN)
        while not self.over():
            poller.poll(self.wait_milliseconds())  # blocks if there is no deadline
            signals = read_available(self.wakeup_fd) or b""  # one byte for each signal since the last call
            self.reap()  # before the requests, because a stop must not count for a trainer that has already ended
            self.read_control()
            if STOP_SIGNALS & set(signals):
                self.stop(self.grace_seconds)
        # If the trainer did not end in time, its descendants are killed with it, and not reported.
        still = processes.descendants(os.getpid()) if self.main_end is not None else ()
        left = [processes.words(pid) for pid in sorted(still)]
        self.end_tree()
        if self.main_end is not None:
            code, at = self.main_end
            ended = {"reason": "Error" if code else "Completed", "time": at, "code": code if code >= 0 else 128 - code}
            self.report({"ended": ended | {"ended_first": not self.stop_requested, "left": left[:LEFT_MAX]}})

    def over(self) -> bool:
        if self.end_now or self.main_end is not None:
            return True
        return self.kill_at is not None and time.monotonic() >= self.kill_at

    def wait_milliseconds(self) -> float | None:
        """Return the milliseconds until the next deadline; None if there is none."""
        if self.kill_at is None:
            return None
        return min(max(0.0, self.kill_at - time.monotonic()), WAIT_SECONDS_MAX) * 1000

    def read_control(self) -> None:
        """Handle each complete line from the runner. The pipe ends if the runner has died: then kill everything."""
        arrived = read_available(0)
        self.end_now = self.end_now or arrived is None
        *lines, self.control = (self.control + (arrived or b"")).split(b"\n")
        for command in map(json.loads, lines):
            if "argv" in command:
                self.start(command)
            else:
                self.stop(command["stop"])

    def start(self, order: dict[str, Any]) -> None:
        assert not self.main_pid, "one order for each supervisor"
        self.grace_seconds = order["grace_seconds"]
        self.main_pid, failure = start_trainer(order)
        if failure is not None:
            self.report({"ended": failure})
            sys.exit(0)
        self.report({"started": self.main_pid})

    def stop(self, grace_seconds: float) -> None:
        """Stop the trainer's first process as the kubelet stops PID 1. A later call can only shorten the grace."""
        if not self.main_pid:  # no trainer was started yet, so there is nothing to end
            self.end_now = True
            return
        kill_at = time.monotonic() + grace_seconds
        if self.kill_at is None and self.main_end is None:
            self.stop_requested = True
            os.kill(self.main_pid, signal.SIGTERM)  # not reaped yet, so no other process has this pid
        self.kill_at = kill_at if self.kill_at is None else min(self.kill_at, kill_at)

    def reap(self) -> None:
        for pid, code in processes.reaped():
            if pid == self.main_pid and self.main_end is None:  # once reaped, its pid may belong to another process
                self.main_end = (code, time.time())

    def end_tree(self) -> None:
        """Kill and reap until no descendant is left. Orphans become our children, so none is missed."""
        pause_ms = 10
        poller = select.poll()
        poller.register(self.wakeup_fd, select.POLLIN)
        self.reap()
        while left := processes.descendants(os.getpid()):
            processes.kill(left)
            poller.poll(pause_ms)  # wait until a child ends, then check again for children forked after /proc was read
            read_available(self.wakeup_fd)
            pause_ms = min(2 * pause_ms, 1000)
            self.reap()

    def report(self, message: dict[str, object]) -> None:
        """Send one line to the runner. If the runner has ended, end this process too."""
        try:
            os.write(self.report_fd, json.dumps(message).encode() + b"\n")
        except BrokenPipeError:
            self.end_now = True


def start_trainer(order: dict[str, Any]) -> tuple[int, dict[str, object] | None]:
    """Start the trainer. Return its pid, and None or a report of why exec failed."""
    failure_read, failure_write = os.pipe()  # a successful exec closes this pipe without data

    def become() -> None:
        # `fork` has made a new session, so `trap "kill 0" EXIT` in a launch script does not reach the supervisor.
        try:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(1, 2)
            os.chdir(order["cwd"])
            processes.execute(order["argv"], order["env"])
        except Exception as error:
            os.write(failure_write, json.dumps(start_failure(error)).encode())

    pid = processes.fork(become)
    os.close(failure_write)
    with open(failure_read, "rb") as pipe:
        failure = pipe.read()
    return pid, json.loads(failure) if failure else None


def start_failure(error: Exception) -> dict[str, object]:
    """Return the report of a failed exec, with the exit code that a shell would have."""
    missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
    sentence = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
    if isinstance(error, FileNotFoundError) and os.path.isfile(str(error.filename)):
        sentence += " (the file is there: the program in its #! line is not)"
    return {"reason": "StartError", "time": time.time(), "code": 127 if missing else 126, "message": sentence}


def read_available(fd: int) -> bytes | None:
    """Return all available bytes of a non-blocking pipe; None at its end."""
    data = b""
    while True:
        try:
            chunk = os.read(fd, 65536)
        except BlockingIOError:
            return data
        if not chunk:
            return data or None  # None at the end of the pipe; after data only in the next call
        data += chunk
