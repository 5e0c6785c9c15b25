"""Build the environment variables of a rank, which are torchrun's, and its command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import NamedTuple

from ddpjob_core.members import Members
from ddpjob_core.memory import numbered
from ddprun.options import SIGNALS, Options, RankScript

PREFLIGHT = "ddpjob.preflight"
PDB, ALL_RANKS = "DDPJOB_PDB", "all"
"""Variable that `ddpjob dev` sets at a terminal: the rank that stops at `breakpoint()`, or all ranks."""


class Life(NamedTuple):
    """Facts about one generation: one start of all ranks, until they end."""

    generation: int
    """Number of restarts before this generation."""
    members: Members
    host: str
    """Name or address of the first member, where rank 0 runs."""
    port: int
    """Port of rank 0's store; each generation has another, so that no old process can join."""
    preflight: bool = False
    """True if the nodes only measure each other. A pre-flight has the number of the previous generation."""
    turn: int = 0
    """Number of the leader; a claim of a snapshot folder contains it."""

    @property
    def number(self) -> int:
        """Number of the generation in the nodes' memory."""
        return numbered(self.turn, self.generation)

    @property
    def name(self) -> str:
        """Name of the log folder. Several pre-flights may have the same number, but their ports differ."""
        return f"preflight_{self.port}" if self.preflight else str(self.generation)


def prepare(options: Options, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for all child processes: `environ` with the changes that torchrun makes for all ranks."""
    # torchrun's default includes SIGQUIT. The default of ddprun does not, because SIGQUIT requests stacks.
    signals = options.signals if options.signals != SIGNALS else (*SIGNALS, "SIGQUIT")
    changed = {**environ, "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(signals)}
    # Parameter groups that a script makes from a set must have the same order on each rank, and after a restart.
    changed.setdefault("PYTHONHASHSEED", "0")
    if options.nproc > 1:
        # torchrun's default, because n ranks that use all cores are slower than n ranks with one core each.
        changed.setdefault("OMP_NUM_THREADS", "1")
    return changed


def of_rank(options: Options, life: Life, local_rank: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that only this rank gets.

    TORCHELASTIC_USE_AGENT_STORE is False: rank 0 itself serves the store at MASTER_PORT, also for scripts with
    init_method="tcp://…" (docs/ddprun.md).
    """
    members = life.members
    rank, world_size = members.ranks(options.place, options.nproc)[local_rank], members.world_size(options.nproc)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(members.node_rank(options.place)),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": options.role,
        "LOCAL_WORLD_SIZE": str(options.nproc),
        "WORLD_SIZE": str(world_size),
        "GROUP_WORLD_SIZE": str(len(members)),
        "ROLE_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": life.host,
        "MASTER_PORT": str(life.port),
        # 0 under `ddpjob dev`: a saved file starts the ranks again, and they must not load another model's state.
        "TORCHELASTIC_RESTART_COUNT": "0" if options.dev else str(life.generation),
        "TORCHELASTIC_MAX_RESTARTS": str(options.budget.application),
        "TORCHELASTIC_RUN_ID": options.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        **(_one_gpu(local_rank, environ) if options.virtual_local_rank else {}),
        **_of_breakpoint(str(rank), environ),
    }


def argv_of_rank(options: Options, life: Life, local_rank: int, environ: Mapping[str, str]) -> list[str]:
    """Return the command line of a rank that is a new process."""
    if life.preflight:
        return [python(environ), "-u", "-m", PREFLIGHT]
    script = options.script
    words = [script.name, *(substituted(word, local_rank) for word in script.args)]
    if script.kind == "program":
        return words
    return [python(environ), "-u", *(["-m"] if script.kind == "module" else []), *words]


def python(environ: Mapping[str, str]) -> str:
    """Return the interpreter of the ranks."""
    return environ.get("PYTHON_EXEC") or sys.executable


def substituted(word: str, local_rank: int) -> str:
    """Replace torchrun's only macro, ${local_rank}."""
    if "$" not in word:
        return word
    import string

    return string.Template(word).safe_substitute(local_rank=local_rank)


def _of_breakpoint(rank: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Let `breakpoint()` borrow the user's terminal in ranks that DDPJOB_PDB names, and do nothing in the others."""
    named = environ.get(PDB)
    if named is None or environ.get("PYTHONBREAKPOINT") == "0":
        return {}
    return {"PYTHONBREAKPOINT": "ddprun.breakpoints.stop" if named in (ALL_RANKS, rank) else "0"}


def _one_gpu(local_rank: int, environ: Mapping[str, str]) -> dict[str, str]:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    gpus = str(local_rank) if visible is None else (visible.split(",")[local_rank : local_rank + 1] or [""])[0].strip()
    return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": gpus}


def first_folder(script: RankScript) -> str:
    """Return the folder that Python puts first in sys.path."""
    if script.kind == "module":
        return os.getcwd()
    return os.path.dirname(os.path.realpath(script.name))
