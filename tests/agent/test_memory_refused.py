"""The kernel refuses memfd_create() or one of its flags."""

import errno
import os
from collections.abc import Callable

import pytest
from agents import Launcher, finish

from ddprun import memory as agent_memory


@pytest.mark.parametrize("refused", ["without the flag", "with the flag"])
def test_memory_works_with_memfd_noexec_2_and_on_a_kernel_without_the_flag(monkeypatch, refused):
    """Memory must work with vm.memfd_noexec=2 (refuses executable files) and before Linux 6.3 (refuses the flag)."""
    create = os.memfd_create

    def strict(name: str, flags: int = os.MFD_CLOEXEC) -> int:
        if bool(flags & agent_memory.MFD_NOEXEC_SEAL) == (refused == "with the flag"):
            raise OSError(errno.EINVAL if refused == "with the flag" else errno.EACCES, "refused")
        return create(name, os.MFD_CLOEXEC)

    monkeypatch.setattr(os, "memfd_create", strict)
    assert agent_memory.created(1) is not None


def test_a_kernel_that_refuses_memfd_ends_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the kernel refuses memfd_create(), the agent goes on without shared memory."""

    def none(*_: object) -> int:
        raise OSError(errno.ENOMEM, "none")

    monkeypatch.setattr(os, "memfd_create", none)
    assert agent_memory.created(1) is None


TRAIN = """
import os, signal
import torch
import ddpjob

with ddpjob.init() as world:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    snapshot = ddpjob.Snapshot("snapshots", world)
    step = snapshot.load(model=model, optimizer=optimizer)
    ddp = world.wrap(model)
    if world.is_main:
        print("BEGIN", step, flush=True)
    while step < 12:
        optimizer.zero_grad()
        if os.environ["DDPJOB_GENERATION"] == "0" and step == 8 and world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        ddp(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        step += 1
        ddpjob.should_stop(step)
        if step == 5:
            snapshot.save(step, model=model, optimizer=optimizer)
            snapshot.wait()
"""


def restarted(launcher: Launcher, monkeypatch: pytest.MonkeyPatch, create: Callable[..., int]) -> tuple[list[str], str]:
    """Return the steps at which the ranks began, and stderr, if memfd_create() is replaced by `create`. The agent is
    forked from this process."""
    monkeypatch.setattr(os, "memfd_create", create)
    done = finish(launcher.warm("--nproc", 2, launcher.script(TRAIN), OMP_NUM_THREADS="1"), 150)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("BEGIN")], done.stderr


def test_a_job_starts_and_keeps_its_state_if_memory_files_must_not_be_executable(launcher, monkeypatch):
    """With vm.memfd_noexec=2 before Linux 6.6 ranks must start: the heartbeat file needs the flag MFD_NOEXEC_SEAL."""
    create = os.memfd_create

    def strict(name: str, flags: int = os.MFD_CLOEXEC) -> int:
        if not flags & agent_memory.MFD_NOEXEC_SEAL:
            raise OSError(errno.EACCES, "refused")
        return create(name, os.MFD_CLOEXEC)

    began, said = restarted(launcher, monkeypatch, strict)
    assert began == ["BEGIN 0", "BEGIN 8"], said


def test_a_job_whose_agent_gets_no_memory_resumes_from_the_folder_and_the_log_gives_the_reason(launcher, monkeypatch):
    """Ranks must start although seccomp refuses memfd_create(), and the log must name the reason."""

    def refused(*_: object) -> int:
        raise OSError(errno.EPERM, "refused")

    began, said = restarted(launcher, monkeypatch, refused)
    assert began == ["BEGIN 0", "BEGIN 5"], said
    why = "the state is not kept in memory: the kernel refuses the agent's file in memory (memfd_create); a restart"
    assert said.count(why) == 2, "once in each generation"
