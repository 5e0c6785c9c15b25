"""A memory cgroup with a limit, like that of a container, below the cgroup of this process."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path("/sys/fs/cgroup")
SECONDS_MAX = 20


class Limited(NamedTuple):
    """The files of a memory cgroup."""

    limit: Path
    used: Path
    procs: Path


@contextlib.contextmanager
def limited(size: int) -> Iterator[Limited]:
    """Yield a cgroup with this limit in bytes; skip the test if none can be created."""
    folder, limit, used = _place()
    own = folder / f"ddpjob-test-{os.getpid()}"
    try:
        own.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    files = Limited(own / limit, own / used, own / "cgroup.procs")
    try:
        if not files.limit.exists():
            pytest.skip(f"{folder} has no memory controller for the cgroups in it")
        files.limit.write_text(str(size))
        yield files
    finally:
        _remove(own)


def _place() -> tuple[Path, str, str]:
    """Return the parent cgroup, and the names of its files for limit and usage."""
    groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    version_1 = next((path for _, controllers, path in groups if "memory" in controllers.split(",")), None)
    if version_1 is not None:
        return ROOT / "memory" / version_1.lstrip("/"), "memory.limit_in_bytes", "memory.usage_in_bytes"
    version_2 = next((path for _, controllers, path in groups if not controllers), "/")
    return ROOT / version_2.lstrip("/"), "memory.max", "memory.current"


def _remove(own: Path) -> None:
    """Remove the cgroup. The kernel allows this only a moment after its last process has ended."""
    end = time.monotonic() + SECONDS_MAX
    while own.exists():
        with contextlib.suppress(OSError):
            own.rmdir()
        assert time.monotonic() < end, f"{own} is in use"
        time.sleep(0.01)
