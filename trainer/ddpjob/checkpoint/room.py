"""How much memory this container may still take."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ddpjob.core import memory

MIB = 1 << 20


class Shortage(NamedTuple):
    """Why something has no room."""

    why: str
    limit_needed: int | None = None
    """Bytes that the container's memory limit must be; None where it is the machine that has too little."""


def shortage(size: int, root: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> Shortage | None:
    """Why so many bytes have no room; None where they have."""
    needed = int(size * memory.MARGIN)
    for limit, used in _limits(Path(root), own):
        if not memory.fits(size, limit, used, None):
            return Shortage(
                f"the container's memory limit is {limit // MIB} MiB, {used // MIB} MiB are in use, and "
                f"{needed // MIB} MiB are needed",
                used + needed,
            )
    free = _available()
    if not memory.fits(size, None, 0, free):
        return Shortage(f"the machine has {(free or 0) // MIB} MiB of memory left, and {needed // MIB} MiB are needed")
    return None


def _limits(root: Path, own: str) -> Iterator[tuple[int, int]]:
    """(limit, in use) of each cgroup of this process that has a limit; what can be reclaimed is not in use."""
    with contextlib.suppress(OSError, ValueError):
        path = next(line.rstrip("\n").split(":", 2)[2] for line in Path(own).read_text().splitlines() if "::" in line)
        folder = root / path.lstrip("/")
        for each in (folder, *folder.parents):
            if each != root and root not in each.parents:
                return
            with contextlib.suppress(OSError, ValueError, StopIteration):
                limit, used = int((each / "memory.max").read_text()), int((each / "memory.current").read_text())
                lines = (each / "memory.stat").read_text().splitlines()
                yield limit, used - next(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))


def _available() -> int | None:
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return None
