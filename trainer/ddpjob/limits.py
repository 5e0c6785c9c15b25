"""Limits of this container: check if it may use more memory."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ddpjob_core import memory

MIB = 1 << 20


class Shortage(NamedTuple):
    """The reason why memory is too small for a state."""

    why: str
    limit_needed: int | None = None
    """Memory limit in bytes that the container would need; None if the machine has too little memory."""


class _Files(NamedTuple):
    """File names of a cgroup's memory limit and usage, and the key in memory.stat of what can be reclaimed."""

    limit: str
    used: str
    reclaimable: str


_VERSION_1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ")
_VERSION_2 = _Files("memory.max", "memory.current", "inactive_file ")


def shortage(
    size: int, root: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup", *, with_later: int = 0
) -> Shortage | None:
    """Return why `size` bytes do not fit; None if they do. with_later: `size` plus the bytes that will be needed later;
    the message names a memory limit that is large enough for all of them."""
    needed = memory.needed(size)
    for limit, used in _limits(root, own):
        if not memory.fits(size, limit, used, None):
            return Shortage(
                f"the container's memory limit is {limit // MIB} MiB, {used // MIB} MiB are in use, and "
                f"{needed // MIB} MiB are needed",
                used + memory.needed(max(size, with_later)),
            )
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
        if not memory.fits(size, None, 0, free):
            return Shortage(f"the machine has {free // MIB} MiB of memory left, and {needed // MIB} MiB are needed")
    return None


def cgroups(
    controller: str, root: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup"
) -> Iterator[tuple[Path, int]]:
    """Yield the folder and version (1 or 2) of each cgroup that may limit this process: its own and all parents.

    If a container has no cgroup namespace, `root` is the container's own cgroup.
    """
    with contextlib.suppress(OSError, ValueError):
        for line in Path(own).read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            top = Path(root, controller if controllers else "")
            folder = top / path.lstrip("/")
            for each in (folder, *folder.parents):
                if each != top and top not in each.parents:
                    break
                yield each, 1 if controllers else 2


def _limits(root: str, own: str) -> Iterator[tuple[int, int]]:
    """Yield (limit, bytes in use) of each cgroup of this process that has a limit. Reclaimable bytes count as free."""
    for folder, version in cgroups("memory", root, own):
        files = _VERSION_1 if version == 1 else _VERSION_2
        with contextlib.suppress(OSError, ValueError, StopIteration):
            limit, used = int((folder / files.limit).read_text()), int((folder / files.used).read_text())
            lines = (folder / "memory.stat").read_text().splitlines()
            yield limit, used - next(int(line.split()[1]) for line in lines if line.startswith(files.reclaimable))
