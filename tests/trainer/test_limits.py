"""If a state is too large for its container's memory, a message names the memory limit that is needed."""

from pathlib import Path

import torch

from ddpjob import limits
from ddpjob.checkpoint.in_memory.shared import Shared
from ddpjob.checkpoint.state import packed
from ddpjob_core.memory import Held, Version
from ddprun.memory import Memory

MIB = 1 << 20


def container(folder: Path, limit: str, used: int, cache: int = 0) -> tuple[str, str]:
    """Make a cgroup v2 with this limit, and the file /proc/self/cgroup for it; return their paths."""
    pod = folder / "kubepods/pod1"
    pod.mkdir(parents=True)
    (pod / "memory.max").write_text(limit)
    (pod / "memory.current").write_text(str(used))
    (pod / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\n")
    (folder / "own").write_text("0::/kubepods/pod1\n")
    return str(folder), str(folder / "own")


def test_a_limit_that_is_too_small_is_reported_with_a_sufficient_one(tmp_path: Path) -> None:
    where = container(tmp_path, str(600 * MIB), used=590 * MIB)
    short = limits.shortage(100 * MIB, *where)
    assert short is not None
    assert short.why == "the container's memory limit is 600 MiB, 590 MiB are in use, and 110 MiB are needed"
    assert short.limit_needed == 700 * MIB
    (tmp_path / "kubepods/pod1/memory.max").write_text(str(short.limit_needed))
    assert limits.shortage(100 * MIB, *where) is None, "what it says is enough"


def test_the_named_limit_is_also_sufficient_for_later_copies(tmp_path: Path) -> None:
    """The memory limit in the message must also suffice for the second copy of the state, which is made later."""
    where = container(tmp_path, str(600 * MIB), used=590 * MIB)
    short = limits.shortage(100 * MIB, *where, with_later=200 * MIB)
    assert short is not None
    assert short.limit_needed == 590 * MIB + 220 * MIB


def test_a_limit_of_cgroups_version_1_counts(tmp_path: Path) -> None:
    """The memory limit of cgroups v1 must count, because some Kubernetes nodes still have them."""
    pod = tmp_path / "memory/kubepods/pod1"
    pod.mkdir(parents=True)
    (pod / "memory.limit_in_bytes").write_text(str(600 * MIB))
    (pod / "memory.usage_in_bytes").write_text(str(590 * MIB))
    (pod / "memory.stat").write_text(f"inactive_file 0\ntotal_inactive_file {20 * MIB}\n")
    (tmp_path / "own").write_text("3:cpu,cpuacct:/kubepods/pod1\n4:memory:/kubepods/pod1\n0::/\n")
    short = limits.shortage(100 * MIB, str(tmp_path), str(tmp_path / "own"))
    assert short is not None
    assert short.why.startswith("the container's memory limit is 600 MiB, 570 MiB are in use")


def test_reclaimable_page_cache_counts_as_room(tmp_path: Path) -> None:
    """Page cache that the kernel can free must not count as used, because training data fills the page cache."""
    where = container(tmp_path, str(600 * MIB), used=590 * MIB, cache=200 * MIB)
    assert limits.shortage(100 * MIB, *where) is None


def test_no_limit_is_suggested_if_the_machine_itself_has_no_room(tmp_path: Path) -> None:
    """If the machine has no free memory, the message must not suggest a higher limit."""
    where = container(tmp_path, "max", used=0)
    short = limits.shortage(1 << 60, *where)
    assert short is not None
    assert short.limit_needed is None
    assert short.why.startswith("the machine has ")


def test_reserving_more_room_does_not_change_the_kept_state() -> None:
    """Reserving more memory writes to the new part only; a state at the beginning of the memory must not change."""
    agent = Memory(1)
    agent.begin(0)
    shared, kept = Shared(agent.where(0), 1, 0), {"weight": torch.arange(5000.0)}
    state = packed.pack(kept)
    shared.reserve(state.size)
    held = Held(Version(1, 0, 7), 0, state.size, 0)
    shared.write_copy(0, state, held)
    shared.count_copy(0, held)
    shared.reserve(5 * MIB + 3)
    assert shared.reserved() == 5 * MIB + 3
    assert shared.held() == held
    assert torch.equal(packed.in_place(shared.newest(held.size))["weight"], kept["weight"])
