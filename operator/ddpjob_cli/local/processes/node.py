"""The runner's side of a local node: start its supervisor, request its stop, read its reports. Nothing here waits for a
trainer: `output` and `report` are non-blocking descriptors for the runner's selectors loop. The runner must not call
`os.waitpid(-1)`, which could reap the supervisor before this module does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ddpjob_cli
import ddprun
from ddpjob_cli.local.processes.supervisor import read_available
from ddpjob_core.failures import signal_name
from ddprun import processes

# Python starts much faster in isolated mode and without site-packages, so both packages are given by path.
SUPERVISOR = "from ddpjob_cli.local.processes.supervisor import main; main()"
# The folders of the two packages that the supervisor needs.
PACKAGES = [str(Path(package.__file__ or "").parents[1]) for package in (ddpjob_cli, ddprun)]
CLOSE_SECONDS = 10.0  # seconds; a working supervisor ends its processes within milliseconds


@dataclass(frozen=True)
class End:
    """The end of a node. None of its processes is running, unless its supervisor was lost."""

    reason: str
    """Completed, Error, StartError (code 127 if the file or folder is missing, else 126) or SupervisorLost."""
    time: float
    code: int | None = None
    """Exit code of the trainer's first process, 128 + N for signal N; None if the supervisor was lost."""
    message: str = ""
    ended_first: bool = False
    """True if the trainer ended before a stop was requested. Otherwise exit 0 is not a success."""
    left: Sequence[list[str]] = ()
    """Command lines of processes that were still running when the trainer ended, and were killed."""

    @property
    def is_lost(self) -> bool:
        """True if the supervisor ended without a last report. `kill_orphans` then kills the node's processes."""
        return self.reason == "SupervisorLost"


class NodeProcess:
    def __init__(
        self, number: int, argv: Sequence[str], env: Mapping[str, str], cwd: str, grace_seconds: float
    ) -> None:
        """Start the supervisor, and send it the trainer's command. env: the trainer's whole environment, whose PATH is
        used to find `argv[0]`. cwd: must exist. grace_seconds: from SIGTERM to SIGKILL if the supervisor is terminated.
        Raise OSError."""
        self.number = number
        self.trainer_pid: int | None = None
        self.end: End | None = None  # set once
        self.report, report_write = os.pipe()
        """Non-blocking descriptor. When it is readable, call `handle_report`, until `end` is known."""
        os.set_blocking(self.report, False)
        self._buffer = b""
        program = f"import sys; sys.path += sys.argv[2:]; {SUPERVISOR}"
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", program, str(report_write), *PACKAGES],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,  # a traceback of the supervisor goes to its node's log
                bufsize=0,
                start_new_session=True,  # Ctrl-C reaches only the runner, which stops the nodes
                pass_fds=(report_write,),
            )
        except BaseException:
            os.close(self.report)
            raise
        finally:
            os.close(report_write)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self.pid = self._process.pid  # the supervisor's pid, for `kill_orphans`
        self.output = self._stdout.fileno()
        """Non-blocking descriptor with all output of the trainer. Read it to its end, which comes with the node's."""
        os.set_blocking(self.output, False)
        self._send({"argv": list(argv), "env": dict(env), "cwd": cwd, "grace_seconds": grace_seconds})

    def stop(self, grace_seconds: float) -> None:
        """Send SIGTERM to the trainer's first process, and SIGKILL to all after the grace; later calls shorten it."""
        self._send({"stop": grace_seconds})

    def handle_report(self) -> None:
        """Read the supervisor's reports, or notice that it ended without a last report."""
        arrived = read_available(self.report)
        *lines, self._buffer = (self._buffer + (arrived or b"")).split(b"\n")
        for report in map(json.loads, lines):
            self.trainer_pid = report.get("started", self.trainer_pid)
            if "ended" in report:
                self.end = End(**report["ended"])
        if arrived is None and self.end is None:
            self.end = self._lost()

    def close(self) -> None:
        """Kill what is still running and release everything; wait at most 10 s for the supervisor."""
        self._stdin.close()  # a closed pipe tells the supervisor that the runner has ended
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:  # a debugger has stopped the supervisor, or a child of it survives SIGKILL
            self._process.kill()
            self._process.wait()
        self._stdout.close()
        os.close(self.report)

    def _send(self, message: dict[str, object]) -> None:
        data = memoryview(json.dumps(message).encode() + b"\n")
        try:
            while data:
                data = data[self._stdin.write(data) or 0 :]
        except BrokenPipeError:
            return  # the supervisor has ended; `handle_report` will read its result

    def _lost(self) -> End:
        code = self._process.wait()  # the supervisor's pipe is closed, so it ends soon; we then adopt its children
        if code < 0:
            how = f"was killed by {signal_name(-code)}"
        else:
            how = f"ended with code {code} before its trainer did; its own message is the last in the node's log"
        return End("SupervisorLost", time.time(), message=f"the supervisor of node {self.number} {how}")


def kill_orphans(known_pids: set[int], timeout_seconds: float = 10.0) -> None:
    """Kill and reap all children except `known_pids`, with their descendants. A subreaper adopts them if SIGKILL ended
    their supervisor. Return after `timeout_seconds` even if one is stuck in the kernel."""
    deadline, pause = time.monotonic() + timeout_seconds, 0.001
    while time.monotonic() < deadline:
        parent_of = processes.parents()
        orphans = {pid for pid, parent in parent_of.items() if parent == os.getpid()} - known_pids
        if not orphans:
            return
        processes.kill(orphans.union(*(processes.descendants(orphan, parent_of) for orphan in orphans)))
        time.sleep(pause)  # the next round finds processes forked after /proc was read
        pause = min(2 * pause, 0.1)
        for orphan in orphans:
            os.waitpid(orphan, os.WNOHANG)
