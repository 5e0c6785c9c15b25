"""Where the kernel refuses a file in memory, or a flag of it."""

from __future__ import annotations

import errno
import os

import pytest

from ddpjob.agent import memory as agent_memory


@pytest.mark.parametrize("refused", ["without the flag", "with the flag"])
def test_the_memory_is_there_with_memfd_noexec_2_and_on_a_kernel_that_knows_no_such_flag(
    monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """vm.memfd_noexec=2 refuses files that may be executed; a kernel before 6.3 refuses the flag that says so."""
    create = os.memfd_create

    def strict(name: str, flags: int = os.MFD_CLOEXEC) -> int:
        if bool(flags & agent_memory.MFD_NOEXEC_SEAL) == (refused == "with the flag"):
            raise OSError(errno.EINVAL if refused == "with the flag" else errno.EACCES, "refused")
        return create(name, os.MFD_CLOEXEC)

    monkeypatch.setattr(os, "memfd_create", strict)
    assert agent_memory.created(1) is not None


def test_a_kernel_that_gives_no_memory_at_all_ends_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart then goes on from the folder, as without it."""

    def none(*_: object) -> int:
        raise OSError(errno.ENOMEM, "none")

    monkeypatch.setattr(os, "memfd_create", none)
    assert agent_memory.created(1) is None
