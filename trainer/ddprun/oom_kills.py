"""Detect kills by the kernel for lack of memory in this container: SIGKILL alone does not show its sender.

The kernel counts before it kills (mm/oom_kill.c: "Raise event before sending signal"), so the count has grown when the
process is reaped. With cgroup v2 a kubelet lets the kernel kill all processes of a container together, the agent too,
unless singleProcessOOMKill is set: the container's own reason is then OOMKilled, and this is not used.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable


class OomKills:
    """Counts kills for lack of memory in this process's cgroup and below."""

    def __init__(self, path: str = "") -> None:
        """path: file with the count, by default `counting_file`; without a file no SIGKILL counts as one for memory."""
        self._path = path or counting_file()
        self._accounted = self._count()

    def look(self) -> None:
        """Ignore all kills until now, because they did not hit the ranks that start next."""
        self._accounted = self._count()

    def another(self) -> bool:
        """True if there is a kill not yet attributed to a rank. Call it once for each rank that ended by SIGKILL."""
        if self._count() <= self._accounted:
            return False
        self._accounted += 1
        return True

    def _count(self) -> int:
        with contextlib.suppress(OSError, ValueError, IndexError), open(self._path, "rb") as events:
            return sum(int(line.split()[1]) for line in events if line.startswith(b"oom_kill "))
        return 0


def counting_file(root: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> str:
    """Return memory.events of cgroup v2 or memory.oom_control of v1; "" if there is neither.

    Most containers have their own cgroup namespace, in which their cgroup is the root. Otherwise the path is in /proc,
    and may not be mounted.
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
