"""Whether the state fits into the memory of its container, and what is said where it does not."""

from __future__ import annotations

from pathlib import Path

from ddpjob.checkpoint import room

MIB = 1 << 20


def container(folder: Path, limit: str, used: int, cache: int = 0) -> tuple[str, str]:
    """A cgroup of version 2 with this limit, and what /proc/self/cgroup says of it."""
    pod = folder / "kubepods/pod1"
    pod.mkdir(parents=True)
    (pod / "memory.max").write_text(limit)
    (pod / "memory.current").write_text(str(used))
    (pod / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\n")
    (folder / "own").write_text("0::/kubepods/pod1\n")
    return str(folder), str(folder / "own")


def test_a_limit_that_is_too_small_is_said_with_the_one_that_would_do(tmp_path: Path) -> None:
    """A container that goes over its limit is killed: the memory would cause what it is there for."""
    where = container(tmp_path, str(600 * MIB), used=590 * MIB)
    short = room.shortage(100 * MIB, *where)
    assert short is not None
    assert short.why == "the container's memory limit is 600 MiB, 590 MiB are in use, and 110 MiB are needed"
    assert short.limit_needed == 700 * MIB
    (tmp_path / "kubepods/pod1/memory.max").write_text(str(short.limit_needed))
    assert room.shortage(100 * MIB, *where) is None, "what it says is enough"


def test_a_page_cache_that_can_be_reclaimed_is_room(tmp_path: Path) -> None:
    """A training that reads its data fills the cache up to its limit, and would never have room."""
    where = container(tmp_path, str(600 * MIB), used=590 * MIB, cache=200 * MIB)
    assert room.shortage(100 * MIB, *where) is None


def test_a_machine_without_room_has_no_limit_that_could_be_raised(tmp_path: Path) -> None:
    """Else a user would raise the limit of a pod on a node that is full."""
    where = container(tmp_path, "max", used=0)
    short = room.shortage(1 << 60, *where)
    assert short is not None
    assert short.limit_needed is None
    assert short.why.startswith("the machine has ")
