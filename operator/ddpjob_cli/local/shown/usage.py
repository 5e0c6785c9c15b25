"""Measure CPU, memory and GPU use of each node with psutil and nvidia-smi, every few seconds, for the live table."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from ddpjob_cli.local.processes import ranks
from ddpjob_cli.local.shown.table import Usage
from ddprun import processes

SECONDS = 2.0
GPU_SECONDS = 5.0  # seconds between calls of nvidia-smi, which takes up to a second
_QUERY = "--query-gpu=index,uuid,utilization.gpu,memory.used"


@dataclass(frozen=True)
class SeenUsage:
    usage: Usage | None
    """None after the first measurement, because CPU use is the difference between two."""
    pids: tuple[int, ...]
    """Pids of the node's ranks; () if they cannot be distinguished from other processes."""


class Usages:
    """Measures CPU, memory and GPUs of each node. `seen` has the last results by the pid of the node's supervisor."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self.seen: dict[int, SeenUsage] = {}
        self._at = -seconds
        self._cpu_seconds: dict[psutil.Process, float] = {}
        self._gpus = Gpus()

    def look(self, nodes: Mapping[int, Sequence[str]]) -> None:
        """Measure if the last values are old enough. nodes: the GPUs of each node, by the pid of its supervisor."""
        now = time.monotonic()
        if any(nodes.values()):
            self._gpus.look(now)
        if now - self._at < self._seconds:
            return
        parent_of = processes.parents()
        cpu_seconds: dict[psutil.Process, float] = {}
        seen = {}
        for supervisor, devices in nodes.items():
            used, memory = 0.0, 0
            for pid in processes.descendants(supervisor, parent_of):
                with contextlib.suppress(psutil.Error):  # the process has ended
                    process = psutil.Process(pid)
                    times = process.cpu_times()
                    memory += process.memory_info().rss
                    cpu_seconds[process] = times.user + times.system
                    # For a process that began after the last measurement, all its CPU time counts.
                    used += cpu_seconds[process] - self._cpu_seconds.get(process, 0.0)
            known = supervisor in self.seen  # False at the node's first measurement
            usage = Usage(100 * used / (now - self._at), memory, *self._gpus.of(devices)) if known else None
            seen[supervisor] = SeenUsage(usage, ranks.of_node(supervisor, parent_of))
        self._cpu_seconds, self.seen, self._at = cpu_seconds, seen, now

    def close(self) -> None:
        self._gpus.close()


class Gpus:
    """Measures use and memory of the machine's GPUs, by index and by UUID, with nvidia-smi in the background."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, int]] = {}
        self._process: subprocess.Popen[str] | None = None
        self._at = -GPU_SECONDS
        self._program = shutil.which("nvidia-smi")

    def look(self, now: float) -> None:
        """Read nvidia-smi's output if it has ended, or start it again."""
        if self._process is not None:
            if self._process.poll() is None:
                return
            out = self._process.communicate()[0] if self._process.returncode == 0 else ""
            self._seen, self._process = parse(out), None
        elif self._program is not None and now - self._at >= GPU_SECONDS:
            self._at = now
            command = [self._program, _QUERY, "--format=csv,noheader,nounits"]
            quiet = subprocess.DEVNULL
            with contextlib.suppress(OSError):
                self._process = subprocess.Popen(
                    command, stdin=quiet, stdout=subprocess.PIPE, stderr=quiet, text=True, errors="replace"
                )

    def of(self, devices: Sequence[str]) -> tuple[float | None, int]:
        """Return the mean use and the memory of some GPUs; None and 0 if unknown."""
        known = [self._seen[device] for device in devices if device in self._seen]
        return (sum(use for use, _ in known) / len(known) if known else None), sum(used for _, used in known)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def parse(listing: str) -> dict[str, tuple[float, int]]:
    """Return percent and bytes by index and by UUID. A GPU without values ([N/A], as in MIG mode) is left out."""
    found = {}
    for line in listing.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        with contextlib.suppress(ValueError):
            index, uuid, use, mebibytes = cells
            found[index] = found[uuid] = (float(use), int(mebibytes) << 20)
    return found
