"""Check that a container has processes and memory to spare for the next generation's spare ranks."""

from __future__ import annotations

import contextlib

from ddpjob import limits

# The limit pids.max includes threads of torch, of gloo or NCCL, and of DataLoader workers.
PROCESSES_FOR_EACH_RANK = 50
BYTES_OF_EACH = 16 << 20  # memory of a spare; more than the 6 to 10 MiB measured with torch for CPUs


def has_room(ranks: int, root: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> bool:
    """True if the container's limits leave room for as many spares as ranks."""
    for folder, _ in limits.cgroups("pids", root, own):
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            limit, used = (int((folder / name).read_text()) for name in ("pids.max", "pids.current"))
            if limit - used < PROCESSES_FOR_EACH_RANK * ranks:
                return False
    return limits.shortage(BYTES_OF_EACH * ranks, root, own) is None
