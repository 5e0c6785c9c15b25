"""`ddpjob run --pdb RANK`: connect one rank to the terminal for a debugger. torchrun and ddprun start $PYTHON_EXEC
as the ranks' Python: we set it to a program that opens the terminal's device, which any session may do."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Collection
from pathlib import Path

from msgspec.structs import replace

from ddpjob_cli.local.preparation import pod_process
from ddpjob_cli.manifest.yamlfile import InputError
from ddpjob_operator.job import api, wording
from ddpjob_operator.job.launch import command

PROGRAM = "pdb-python"
PYTHON_EXEC = "PYTHON_EXEC"


def check(rank: int | None, job: api.DDPJob, groups: Collection[int]) -> None:
    """Raise InputError if a rank of the job cannot get this terminal. groups: our process groups."""
    if rank is None:
        return
    option = f"--pdb {rank}"
    ranks = job.spec.world_size
    if not 0 <= rank < ranks:
        has = "one rank, 0" if ranks == 1 else f"ranks 0 to {ranks - 1}"
        raise InputError(f"{option}: there is no such rank: the job has {has}")
    for stream, name in ((0, "stdin"), (1, "stdout")):
        if not os.isatty(stream):
            raise InputError(f"{option}: {name} is not a terminal, and a debugger needs one: run it without a pipe")
    if os.tcgetpgrp(0) not in groups:
        raise InputError(f"{option}: the run is in the background, so the shell has the terminal: leave & out")


def terminal(rank: int, job: api.DDPJob, groups: Collection[int]) -> pod_process.Terminal:
    """Return this process's terminal for a rank of `ddpjob run`. groups: our process groups. Raise InputError."""
    check(rank, job, groups)
    _refuse_other_commands(rank, job)
    return pod_process.Terminal(rank, os.ttyname(0))


def _refuse_other_commands(rank: int, job: api.DDPJob) -> None:
    words = job.spec.facts.command
    found, program = job.spec.facts.launcher, os.path.basename(words[0]) if words else ""
    if found is not None and "no_python" not in found.options:
        return
    if found is None and program.startswith("python") and job.spec.facts.nproc_per_node == 1:
        return
    processes = wording.count(job.spec.facts.nproc_per_node, "process")
    raise InputError(
        f"--pdb {rank}: needs a command in which torchrun or ddprun starts a Python script, or python is the only "
        f"process of each node; this command is `{shlex.join(words[:4])}`, with {processes} on each node"
    )


def undisturbed(job: api.DDPJob) -> api.DDPJob:
    """Return the job without a stall limit, because a rank in a debugger makes no step."""
    return replace(job, spec=replace(job.spec, stall=api.Stall(timeout_seconds=0)))


def attach(process: pod_process.ProcessSpec, to: pod_process.Terminal, folder: Path) -> None:
    """Change the command of a node so that the rank gets the terminal. folder: the run's folder."""
    program, argv = folder / PROGRAM, process.argv
    device = shlex.quote(to.device)
    program.write_text(
        "#!/bin/sh\n"
        f'if [ "$RANK" = {to.rank} ]; then exec <{device} >{device}; else export PYTHONBREAKPOINT=0; fi\n'
        f'exec {shlex.quote(_python(process))} "$@"\n'
    )
    program.chmod(0o700)
    begin = command.options_begin(argv)
    if begin is None:
        process.argv = [str(program), *argv[1:]]
        return
    process.env[PYTHON_EXEC] = str(program)
    if argv[begin - 1] == "ddprun" or os.path.basename(argv[begin - 1]) == "ddprun":
        argv.insert(begin, "--no-preload")  # $PYTHON_EXEC has no effect on forked ranks


def _python(process: pod_process.ProcessSpec) -> str:
    path, argv = process.env["PATH"], process.argv
    if known := process.env.get(PYTHON_EXEC):
        return known
    started = shutil.which(argv[0], path=path) or argv[0]
    if os.path.basename(started).startswith("python"):
        return started
    beside = os.path.join(os.path.dirname(started), "python")
    return beside if os.access(beside, os.X_OK) else shutil.which("python", path=path) or sys.executable
