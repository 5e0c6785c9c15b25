"""Findings: facts that make a successful exit code suspicious.

Agents write them under "findings" of the container's termination message. Rank 0 also reports with its last progress if
it has trained alone. The operator and the local run read both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ddpjob_core.failures import BRIEF_MAX

FINDINGS_MAX = 8
NO_PROCESS_GROUP = "NoProcessGroup"
"""Several ranks were expected, but no rank has formed a process group, so each has trained alone, or not at all."""
REPLICAS_DIFFER = "ReplicasDiffer"
"""The parameters of a DDP-wrapped module were not the same on all ranks at the end."""
FAILURE_IN_LOG = "FailureInLog"
"""The log shows the failure of a rank, or an exit with 0 has hidden it, and the exit code is 0."""


class NamedFinding(NamedTuple):
    """One suspicious fact. reason: a word in CamelCase; message: one sentence of at most 300 characters."""

    reason: str
    message: str

    def as_dict(self) -> dict[str, str]:
        """Return the finding for a termination message."""
        return {"reason": self.reason, "message": self.message[:BRIEF_MAX]}

    @classmethod
    def from_dict(cls, written: Any) -> NamedFinding:
        """Read a finding that another process has written; cut long texts. Raises ValueError if it is none."""
        if not isinstance(written, Mapping):
            raise ValueError(f"{written!r:.80} is not an object")
        reason, message = written.get("reason"), written.get("message")
        if not isinstance(reason, str) or not reason.isidentifier() or not isinstance(message, str):
            raise ValueError(f"{dict(written)!r:.80} has no reason or no message")
        return cls(reason[:64], message[:BRIEF_MAX])


def trained_alone(world_size: int) -> NamedFinding:
    """Return the finding of ranks that have all trained alone."""
    text = f"{world_size} ranks ran, but none formed a process group with another: each trained a model of its own, or"
    text += " nothing. Call init_process_group, or pass the option with which the script calls it"
    return NamedFinding(NO_PROCESS_GROUP, text)


def hidden_failure(rank: int | None, where: str, why: str) -> NamedFinding:
    """Return the finding of a rank that has failed and ended with 0. where: train.py:41, or "". why: its exception."""
    who = "a rank" if rank is None else f"rank {rank}"
    what = f"{who} has failed{f' in {where}' if where else ''}, although the exit code is 0: "
    return NamedFinding(FAILURE_IN_LOG, what + why[: BRIEF_MAX - len(what)])
