"""Which failure came first, and what it was."""

from __future__ import annotations

import datetime as dt
import re
import signal as signals
from collections.abc import Callable, Iterable

from ddpjob_operator import api
from ddpjob_operator.observed import Pod

LOG_TAIL_MAX = 2048
RankOf = Callable[[int], "int | None"]
"""The rank of a node's only process; None where that is not known."""

# What a rank says when its peer is gone: true, and not the reason. Seen with torch 2.13 on gloo; the NCCL lines are
# from its documentation and were not run here (docs/measured.md, failures).
SYMPTOMS = re.compile(
    r"Connection closed by peer|Connection reset by peer|Connection refused|Broken pipe"
    r"|remote process exited|DistStoreError|DistNetworkError|RendezvousConnectionError|RendezvousClosedError"
    r"|Timed out waiting \d+ms for (?:recv|send) operation|Application timeout caused pair closure"
    r"|ProcessGroupNCCL.*(?:watchdog|timeout)|ncclRemoteError|ncclSystemError",
    re.IGNORECASE,
)
# "ValueError: no such shard": what an exception looks like where its traceback is not seen.
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt)(?::.*)?$")
_TRACEBACK_END = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?::.*)?$")
# `[rank1]: ` comes from torch, `[default0]:` from torchrun --tee.
_PREFIX = re.compile(r"^(?:\[(?:rank|default)?\d+\]:\s?)+")
# torchrun's own summary at the end of its output (torch/distributed/elastic/multiprocessing/errors, 2.13).
_TORCHRUN_ROOT = re.compile(
    r"Root Cause \(first observed failure\):\s*\[0\]:.*?\brank\s*:\s*(?P<rank>\d+).*?\bexitcode\s*:\s*(?P<code>-?\d+)",
    re.DOTALL,
)


def root_cause(attempt: int, failed: Iterable[Pod], rank_of: RankOf, now: dt.datetime) -> api.Failure:
    """The earliest failure that is not the symptom of a lost peer, or the earliest where all look like symptoms.

    `failed`: at least one pod of the attempt that ended badly. Ties (the kubelet's clock has whole seconds) go to
    the lower rank, so that the answer does not depend on the order of the pods.
    """
    pods = sorted(failed, key=lambda p: (is_symptom(p), p.trainer.ended_at or p.stop_asked_at or now, p.rank))
    return describe(attempt, pods[0], rank_of, now)


def is_symptom(pod: Pod) -> bool:
    """Whether a pod failed because a peer had: the kubelet's own findings never are."""
    if pod.trainer.reason == "OOMKilled" or pod.reason or pod.trainer.exit_code in (126, 127, 128):
        return False
    if pod.told_to_stop:
        return True
    return SYMPTOMS.search(exception_line(pod.trainer.message) or "") is not None


def describe(attempt: int, pod: Pod, rank_of: RankOf, now: dt.datetime) -> api.Failure:
    """The failure of one pod, as the status tells it."""
    rank, code = torchrun_root(pod.trainer.message)
    rank = rank_of(pod.rank) if rank is None else rank
    code = pod.trainer.exit_code if code is None else code
    return api.Failure(
        attempt=attempt,
        rank=rank,
        node_rank=pod.rank,
        pod=pod.name,
        node=pod.node,
        exit_code=code,
        signal=signal_name(code),
        reason=pod.reason or _reason(pod),
        exception=exception_line(pod.trainer.message)[:300],
        log_tail=pod.trainer.message[-LOG_TAIL_MAX:],
        time=pod.trainer.ended_at or now,
    )


def gone(attempt: int, node_rank: int, pod_name: str, rank_of: RankOf, now: dt.datetime) -> api.Failure:
    """A pod that ran and has vanished without a word."""
    return api.Failure(
        attempt=attempt, rank=rank_of(node_rank), node_rank=node_rank, pod=pod_name, reason="PodGone", time=now
    )


def sentence(failure: api.Failure) -> str:
    """rank 3 (pod digits-2-3, node gpu-07) ended with exit code 1 (ValueError: no such shard)"""
    who = f"rank {failure.rank}" if failure.rank is not None else f"node {failure.node_rank}"
    where = f"pod {failure.pod}" + (f", node {failure.node}" if failure.node else "")
    return f"{who} ({where}) {_what(failure)}"


def exception_line(log: str) -> str:
    """The last exception in a log, as Python's traceback ends; empty where there is none.

    What stands at the end of a traceback counts whatever its name; where the log begins in the middle of one, a line
    that looks like an exception does. torchrun's own ChildFailedError is not what happened.
    """
    found, inside = "", False
    for line in map(_without_prefix, log.splitlines()):
        if line.startswith("Traceback (most recent call last)"):
            inside = True
        elif line and not line[0].isspace():
            if "ChildFailedError" not in line and (_EXCEPTION.match(line) or (inside and _TRACEBACK_END.match(line))):
                found = line.strip()
            inside = False
    return found


def own_lines(log: str) -> list[str]:
    """The lines that the training printed itself: what torchrun adds when a worker has failed is cut off."""
    lines = log.splitlines()
    ends = (i for i, line in enumerate(lines) if re.match(r"[EW]\d{4} \d\d:\d\d:\d\d.*torch/distributed/elastic", line))
    return [line for line in lines[: next(ends, len(lines))] if line.strip()]


def torchrun_root(log: str) -> tuple[int | None, int | None]:
    """Rank and exit code (negative: a signal; here as 128 + n) of torchrun's failure table, where the log has one."""
    found = None
    for found in _TORCHRUN_ROOT.finditer(log):  # noqa: B007 - the last table counts
        pass
    if found is None:
        return None, None
    code = int(found["code"])
    return int(found["rank"]), code if code >= 0 else 128 - code


def signal_name(exit_code: int | None) -> str:
    """SIGKILL for 137; empty where no signal ended it."""
    if exit_code is None or exit_code <= 128:
        return ""
    try:
        return signals.Signals(exit_code - 128).name
    except ValueError:
        return ""


def _without_prefix(line: str) -> str:
    return _PREFIX.sub("", line)


def _reason(pod: Pod) -> str:
    if pod.told_to_stop and pod.trainer.reason in ("", "Completed", "Error"):
        return "StoppedFromOutside"
    return pod.trainer.reason


def _what(failure: api.Failure) -> str:
    if failure.reason == "PodGone":
        return "vanished while it ran: someone deleted the pod, or its node is gone"
    if failure.reason == "StoppedFromOutside":
        return f"was stopped from outside (exit code {failure.exit_code}): the pod was deleted, or its node drained"
    if failure.reason == "OOMKilled":
        return "was killed because it used more memory than its limit (OOMKilled)"
    how = f"was killed by {failure.signal}" if failure.signal else f"ended with exit code {failure.exit_code}"
    if failure.exit_code is None:
        how = f"failed ({failure.reason or 'no exit code'})"
    return how + (f" ({failure.exception})" if failure.exception else "")
