"""The processes of a node that are ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

import psutil

from ddprun import processes

_FORK_SERVER = "/ddprun/forkserver.py"
_OF_A_RANK = ("RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")


def environ(pid: int) -> dict[str, str]:
    """Return the variables with which a process was started; none of another user's, or of one that has ended."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).environ()
    return {}


def of_node(supervisor: int, parent_of: Mapping[int, int]) -> tuple[int, ...]:
    """Return the ranks of a node by rank; empty if they cannot be told from its other processes."""
    own = processes.descendants(supervisor, parent_of)
    return _given(own, parent_of) or _forked(own, parent_of)


def _given(own: set[int], parent_of: Mapping[int, int]) -> tuple[int, ...]:
    """The processes that were given the variables of a rank, without those that started them: a launcher in a pod of
    one process has a rank, too, and the workers of a loader have that of their parent."""
    # Read at each look: a process that is about to become another program still has those of its parent.
    variables = {pid: _variables(pid) for pid in own}
    marked = {pid for pid in own if variables[pid] and variables[pid] != variables.get(parent_of[pid])}
    lowest = [pid for pid in marked if not processes.descendants(pid, parent_of) & marked]
    return tuple(sorted(lowest, key=lambda pid: (int(variables[pid][0]), pid)))


def _variables(pid: int) -> tuple[str, ...]:
    """Those of a rank with which a process was started; empty if it has none."""
    given = environ(pid)
    return tuple(given.get(name, "") for name in _OF_A_RANK) if given.get("RANK", "").isdecimal() else ()


def _forked(own: set[int], parent_of: Mapping[int, int]) -> tuple[int, ...]:
    """The ranks that a fork server of `ddprun` has started. They have its command line, its variables and its parent,
    the agent. Each rank leads a session. The first server does as well; the ranks that wait for a restart, and the
    server that takes the first one's place, are in the session of the first server.
    """
    found: dict[int, tuple[float, int]] = {}  # when it began, and its session
    for pid in own:
        with contextlib.suppress(psutil.Error, OSError):  # it may have ended
            process = psutil.Process(pid)
            if any(word.endswith(_FORK_SERVER) for word in process.cmdline()):
                found[pid] = (process.create_time(), os.getsid(pid))
    children = sorted((pid for pid in found if parent_of[pid] not in found), key=lambda pid: (found[pid][0], pid))
    leaders = [pid for pid in children if found[pid][1] == pid]
    servers = {found[pid][1] for pid in children if pid not in leaders} or set(leaders[:1])
    return tuple(pid for pid in leaders if pid not in servers)
