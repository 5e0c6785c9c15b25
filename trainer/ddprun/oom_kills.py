"""Whether the kernel has killed a process of this container for its memory: a SIGKILL alone does not say by whom.

The kernel counts before it kills (mm/oom_kill.c: "Raise event before sending signal"), so the count has grown when the
process is reaped. A kubelet on cgroup v2 lets the kernel kill all processes of the container together, the agent too,
unless singleProcessOOMKill is set: then the container's own reason is OOMKilled, and nothing here is used.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable


class Kills:
    """How often the kernel has killed for memory, in the cgroup of this process and those below it."""

    def __init__(self, path: str = "") -> None:
        """path: the file with the count; where there is none, no SIGKILL is taken for an OOM kill."""
        self._path = path or counting_file()
        self._accounted = self._count()

    def look(self) -> None:
        """Leave out the kills until now: they were none of the ranks that start now."""
        self._accounted = self._count()

    def another(self) -> bool:
        """Whether there is a kill that no rank accounts for yet; to be called for each rank that ended by SIGKILL."""
        if self._count() <= self._accounted:
            return False
        self._accounted += 1
        return True

    def _count(self) -> int:
        with contextlib.suppress(OSError, ValueError, IndexError), open(self._path, "rb") as events:
            return sum(int(line.split()[1]) for line in events if line.startswith(b"oom_kill "))
        return 0


def counting_file(root: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> str:
    """memory.events of cgroup v2, memory.oom_control of v1; "" where neither is there.

    Most containers have a cgroup namespace of their own, in which their cgroup is the root. Otherwise /proc has its
    path, which may or may not be mounted.
    """
    return next((file for file in _candidates(root, own) if os.path.exists(file)), "")


def _candidates(root: str, own: str) -> Iterable[str]:
    with contextlib.suppress(OSError), open(own) as lines:
        for line in lines:
            _, controllers, path = line.rstrip("/\n").split(":", 2)
            if not controllers:
                yield f"{root}{path}/memory.events"
            elif "memory" in controllers.split(","):
                yield f"{root}/memory{path}/memory.oom_control"
    yield f"{root}/memory.events"
    yield f"{root}/memory/memory.oom_control"
