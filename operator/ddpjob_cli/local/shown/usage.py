"""What the processes of each node use, from /proc and nvidia-smi: at most once every few seconds, and only for a table.

A look reads one small file for each process of the machine, and two more for each of the job's, some 15 us each.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ddpjob_cli.local.shown.table import Usage
from ddprun import processes

SECONDS = 2.0
GPU_SECONDS = 5.0  # nvidia-smi takes up to a second of its own
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_QUERY = "--query-gpu=index,uuid,utilization.gpu,memory.used"
_FORK_SERVER = b"/ddprun/forkserver.py\0"
_OF_A_RANK = (b"RANK", b"LOCAL_RANK", b"TORCHELASTIC_RUN_ID", b"TORCHELASTIC_RESTART_COUNT")


@dataclass(frozen=True)
class ProcessStat:
    """A process at one look."""

    parent: int
    ticks: int
    pages: int
    began: int
    """In ticks since the machine's start."""
    session: int


@dataclass(frozen=True)
class SeenUsage:
    """What a look has found for a node."""

    usage: Usage | None
    """None at the first look: how much of the CPU is used shows between two."""
    pids: tuple[int, ...]
    """Of its ranks; empty where they cannot be told from the others."""


class Usages:
    """Looks at the nodes now and then; `seen` is the last one, by the pid of a node's supervisor."""

    def __init__(self, seconds: float = SECONDS) -> None:
        """seconds: between two looks."""
        self._seconds = seconds
        self.seen: dict[int, SeenUsage] = {}
        self._at = -seconds
        self._ticks: dict[int, int] = {}
        self._looked_at: set[int] = set()
        self._gpus = Gpus()

    def look(self, nodes: Mapping[int, Sequence[str]]) -> None:
        """Look again if it is time. nodes: each supervisor's pid with its GPUs."""
        now = time.monotonic()
        if any(nodes.values()):
            self._gpus.look(now)
        if now - self._at < self._seconds:
            return
        found = dict(_all_processes())
        parent_of = {pid: process.parent for pid, process in found.items()}
        seconds, before = now - self._at, self._ticks
        self._ticks = {}
        self.seen = {}
        for supervisor, devices in nodes.items():
            own = processes.descendants(supervisor, parent_of) & found.keys()
            self._ticks |= {pid: found[pid].ticks for pid in own}
            # One that has begun since the last look has used all of its time since then.
            used = sum(max(0, found[pid].ticks - before.get(pid, 0)) for pid in own)
            memory = sum(found[pid].pages for pid in own) * _PAGE
            gpu = self._gpus.of(devices)
            known = supervisor in self._looked_at  # at the first look the time since the last one is not known
            usage = Usage(100 * used / _TICKS / seconds, memory, *(gpu or (None, 0))) if known else None
            self.seen[supervisor] = SeenUsage(usage, ranks(own, found))
        self._looked_at = set(nodes)
        self._at = now

    def close(self) -> None:
        """End a look at the GPUs that is under way."""
        self._gpus.close()


@dataclass
class Gpus:
    """Use and memory of the machine's GPUs, by index and by UUID. nvidia-smi runs beside us: it is never waited for."""

    seen: dict[str, tuple[float, int]] = field(default_factory=dict)
    _process: subprocess.Popen[str] | None = None
    _at: float = -GPU_SECONDS
    _program: str | None = field(default_factory=lambda: shutil.which("nvidia-smi"))

    def look(self, now: float) -> None:
        """Read the answer that has come, or ask again."""
        if self._process is not None:
            if self._process.poll() is None:
                return
            out = self._process.communicate()[0] if self._process.returncode == 0 else ""
            self.seen, self._process = parse(out), None
        elif self._program is not None and now - self._at >= GPU_SECONDS:
            self._at = now
            command = [self._program, _QUERY, "--format=csv,noheader,nounits"]
            with contextlib.suppress(OSError):
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    errors="replace",
                )

    def of(self, devices: Sequence[str]) -> tuple[float, int] | None:
        """The mean use and the memory of some GPUs; None where it is not known."""
        known = [self.seen[device] for device in devices if device in self.seen]
        return (sum(use for use, _ in known) / len(known), sum(used for _, used in known)) if known else None

    def close(self) -> None:
        """End the program if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def parse(listing: str) -> dict[str, tuple[float, int]]:
    """Percent and bytes by index and by UUID; a GPU that does not say ([N/A], in MIG mode) is left out."""
    found = {}
    for line in listing.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        with contextlib.suppress(ValueError):
            index, uuid, use, mebibytes = cells
            found[index] = found[uuid] = (float(use), int(mebibytes) << 20)
    return found


def ranks_of(supervisor: int) -> tuple[int, ...]:
    """Return the processes that are the ranks of a node now; empty if they cannot be told from the others."""
    found = dict(_all_processes())
    parent_of = {pid: process.parent for pid, process in found.items()}
    return ranks(processes.descendants(supervisor, parent_of) & found.keys(), found)


def ranks(own: set[int], found: Mapping[int, ProcessStat]) -> tuple[int, ...]:
    """The processes of a node that are ranks, in their order; empty where they cannot be told from the others."""
    return _given(own, found) or _forked(own, found)


def _given(own: set[int], found: Mapping[int, ProcessStat]) -> tuple[int, ...]:
    """The processes that were given the variables of a rank, without those that started them: a launcher in a pod of
    one process has a rank, too, and the workers of a loader have that of their parent."""
    variables = {pid: _variables(pid) for pid in own}
    marked = {pid for pid in own if variables[pid] and variables[pid] != variables.get(found[pid].parent, b"")}
    above = set()
    for pid in marked:
        parent = found[pid].parent
        while parent in own:
            above.add(parent)
            parent = found[parent].parent
    return tuple(sorted(marked - above, key=lambda pid: (_rank(variables[pid]), pid)))


def _forked(own: set[int], found: Mapping[int, ProcessStat]) -> tuple[int, ...]:
    """The ranks that a fork server of `ddprun` has started. They have its command line, its variables and its parent,
    the agent. Each rank leads a session. The first server does as well; the ranks that wait for a restart, and the
    server that takes the first one's place, are in the session of the first server.
    """
    forked = {pid for pid in own if _is_forked(pid)}
    children = sorted((found[pid].began, pid) for pid in forked if found[pid].parent not in forked)
    leaders = [pid for _, pid in children if found[pid].session == pid]
    servers = {found[pid].session for _, pid in children if pid not in leaders} or set(leaders[:1])
    return tuple(pid for pid in leaders if pid not in servers)


def _is_forked(pid: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:  # it may have ended since
        return _FORK_SERVER in file.read(4096)
    return False


def _variables(pid: int) -> bytes:
    """Those of a rank with which a process was started; empty where it has none."""
    # Read at each look: a process that is about to become another program still has those of its parent.
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        entries = dict(entry.partition(b"=")[::2] for entry in file.read(1 << 18).split(b"\0"))
        if b"RANK" in entries:
            return b"\0".join(entries.get(name, b"") for name in _OF_A_RANK)
    return b""


def _rank(variables: bytes) -> int:
    text = variables.partition(b"\0")[0]
    return int(text) if text.isdigit() else 0


def _all_processes() -> Iterator[tuple[int, ProcessStat]]:
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:  # it may have ended since
            after_name = stat.read().rpartition(b")")[2].split()  # the name may hold spaces
            yield (
                int(name),
                ProcessStat(
                    int(after_name[1]),
                    int(after_name[11]) + int(after_name[12]),
                    int(after_name[21]),
                    int(after_name[19]),
                    int(after_name[3]),
                ),
            )
