"""The runner's side of a local node: start its supervisor, request its stop, read its reports. Nothing here waits for a
trainer: `output` and `report` are non-blocking descriptors for the runner's selectors loop. The runner must never wait
for any child (`os.waitpid(-1)`), otherwise the node would miss the end of its supervisor."""

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

# Isolated and without site-packages, which starts much faster, so both packages are given by path.
SUPERVISOR = "from ddpjob_cli.local.processes.supervisor import main; main()"
# The folders of the two packages that the supervisor needs.
PACKAGES = [str(Path(package.__file__ or "").parents[1]) for package in (ddpjob_cli, ddprun)]
CLOSE_SECONDS = 10.0  # far above the milliseconds that an obedient supervisor needs to end its tree


@dataclass(frozen=True)
class End:
    """The end of a node. None of its processes are left, unless its supervisor was lost."""

    reason: str
    """Completed, Error, StartError (code 127 if the file or folder is missing, else 126) or SupervisorLost."""
    time: float
    code: int | None = None
    """Exit code of the trainer's first process, 128 + N for signal N; None if the supervisor was lost."""
    message: str = ""
    ended_first: bool = False
    """True if the trainer ended before a stop was requested. Otherwise exit 0 is not a success."""
    left: Sequence[list[str]] = ()
    """Command lines of processes that were still running then, and were killed."""

    @property
    def is_lost(self) -> bool:
        """True if the supervisor ended without a last report; `kill_orphans` ends what the node left."""
        return self.reason == "SupervisorLost"


class NodeProcess:
    def __init__(
        self, number: int, argv: Sequence[str], env: Mapping[str, str], cwd: str, grace_seconds: float
    ) -> None:
        """Spawn the supervisor and send it what to run. env: the trainer's whole environment, which finds `argv[0]` by
        its PATH. cwd: must exist. grace_seconds: between SIGTERM and SIGKILL when the supervisor is terminated. Raises
        OSError."""
        self.number = number
        self.trainer_pid: int | None = None
        self.end: End | None = None  # once known it never changes
        self.report, report_write = os.pipe()
        """Non-blocking descriptor; when it is readable call `handle_report`, and no more once `end` is known."""
        os.set_blocking(self.report, False)
        self._buffer = b""
        program = f"import sys; sys.path += sys.argv[2:]; {SUPERVISOR}"
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", program, str(report_write), *PACKAGES],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,  # a traceback of the supervisor belongs in its node's log
                bufsize=0,
                start_new_session=True,  # the runner handles Ctrl-C and stops the nodes itself
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
        """Non-blocking descriptor of all that the trainer prints. It closes with the node: read to its end."""
        os.set_blocking(self.output, False)
        self._send({"argv": list(argv), "env": dict(env), "cwd": cwd, "grace_seconds": grace_seconds})

    def stop(self, grace_seconds: float) -> None:
        """Send SIGTERM to the trainer's first process, after the grace SIGKILL to all; later calls can shorten it."""
        self._send({"stop": grace_seconds})

    def handle_report(self) -> None:
        """Read the supervisor's reports, or its end without a last report."""
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
        self._stdin.close()  # tells the supervisor that the runner has ended
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:  # stopped by a debugger, or a child that even SIGKILL does not end
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
            return  # it has ended; the loop reads the result from its report

    def _lost(self) -> End:
        code = self._process.wait()  # the report pipe closes with its only holder; after this its children are adopted
        if code < 0:
            how = f"was killed by {signal_name(-code)}"
        else:
            how = f"ended with code {code} before its trainer did; its own message is the last in the node's log"
        return End("SupervisorLost", time.time(), message=f"the supervisor of node {self.number} {how}")


def kill_orphans(known_pids: set[int], timeout_seconds: float = 10.0) -> None:
    """Kill and reap every child that is not in `known_pids`, with its descendants: for a subreaper these are left by a
    supervisor that SIGKILL ended. Return after `timeout_seconds` even if one is stuck in the kernel."""
    deadline, pause = time.monotonic() + timeout_seconds, 0.001
    while time.monotonic() < deadline:
        parent_of = processes.parents()
        orphans = {pid for pid, parent in parent_of.items() if parent == os.getpid()} - known_pids
        if not orphans:
            return
        processes.kill(orphans.union(*(processes.descendants(orphan, parent_of) for orphan in orphans)))
        time.sleep(pause)  # the kernel ends them; one forked after /proc was read is found in the next round
        pause = min(2 * pause, 0.1)
        for orphan in orphans:
            os.waitpid(orphan, os.WNOHANG)
