"""Find the ranks among the processes of a node."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

import psutil

from ddpjob_operator.job import bounds
from ddprun import processes

_FORK_SERVER = "/ddprun/forkserver.py"
_OF_A_RANK = ("RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")


def environ(pid: int) -> dict[str, str]:
    """Return the variables that a process was started with; {} if it has ended or belongs to another user."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).environ()
    return {}


def started_among(pid: int) -> tuple[float, int]:
    """Return a rank's start time and its WORLD_SIZE; zeros if they are unknown."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return process.create_time(), max(0, bounds.number(process.environ().get("WORLD_SIZE"), bounds.COUNT_MAX))
    return 0.0, 0


def of_node(supervisor: int, parent_of: Mapping[int, int]) -> tuple[int, ...]:
    """Return the pids of a node's ranks, sorted by rank; () if the ranks cannot be told from other processes."""
    own = processes.descendants(supervisor, parent_of)
    # A rank differs from its parent in the values of `_variables`; launchers and DataLoader workers do not.
    # Read the variables in each call, because a process has its parent's variables until exec.
    variables = {pid: _variables(pid) for pid in own}
    marked = {pid for pid in own if variables[pid] and variables[pid] != variables.get(parent_of[pid])}
    lowest = [pid for pid in marked if not processes.descendants(pid, parent_of) & marked]
    return tuple(sorted(lowest, key=lambda pid: (int(variables[pid][0]), pid))) or _forked(own, parent_of)


def _variables(pid: int) -> tuple[str, ...]:
    """Return the values of the variables that distinguish ranks; () if the process has none."""
    given = environ(pid)
    return tuple(given.get(name, "") for name in _OF_A_RANK) if given.get("RANK", "").isdecimal() else ()


def _forked(own: set[int], parent_of: Mapping[int, int]) -> tuple[int, ...]:
    """Return the ranks that a fork server of `ddprun` has started. They have the server's command line, variables and
    parent (the agent). Each rank leads a session; waiting spares and servers are in the first server's session."""
    found: dict[int, tuple[float, int]] = {}  # by pid: start time and session
    for pid in own:
        with contextlib.suppress(psutil.Error, OSError):  # the process may have ended
            process = psutil.Process(pid)
            if any(word.endswith(_FORK_SERVER) for word in process.cmdline()):
                found[pid] = (process.create_time(), os.getsid(pid))
    children = sorted((pid for pid in found if parent_of[pid] not in found), key=lambda pid: (found[pid][0], pid))
    leaders = [pid for pid in children if found[pid][1] == pid]
    servers = {found[pid][1] for pid in children if pid not in leaders} or set(leaders[:1])
    return tuple(pid for pid in leaders if pid not in servers)
