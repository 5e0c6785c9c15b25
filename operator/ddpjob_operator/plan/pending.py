"""What a job waits for, for how long, and how to see why: no job stands still without a word.

A message changes as seldom as the times in it allow, for each change is a write of the status; what takes longer than
ten minutes is a Warning, once.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

from msgspec.structs import replace

from ddpjob_operator.job import api, ranges, reasons, wording
from ddpjob_operator.observed.cluster import Pod
from ddpjob_operator.plan.view import View
from ddpjob_operator.pods import naming

LONG_SECONDS = 600.0
# After so long the message says how long it has been; before the first nobody wonders.
SAID_AT_SECONDS = (60.0, 120.0, 300.0, LONG_SECONDS, 1200.0, 1800.0, 3600.0, 7200.0, 21600.0, 86400.0, 604800.0)
# What the kubelet says while images, volumes and the network are made ready: it may mend itself, and may not.
_IN_THE_MAKING = ("", "ContainerCreating", "PodInitializing")
_WAITS = ("Pending", "Starting", "Restarting", "Failing")


def said_once(status: api.Status, now: dt.datetime) -> tuple[api.Status, dt.datetime | None]:
    """The status, with a reason that is a Warning where a state that only waits has lasted long without one, and when
    that will be."""
    reason = reasons.ALL.get(status.reason)
    if status.state not in _WAITS or reason is None or reason.warning:
        return status, None
    # Each attempt waits anew. One that is in the future has not begun to.
    begun = max(at for at in (status.state_time or now, status.attempt_time or status.state_time or now))
    long = begun + dt.timedelta(seconds=LONG_SECONDS)
    return (status, long) if now < long else (replace(status, reason=reasons.WAITS_LONG.name), None)


def to_be_created(s: View, pods: Sequence[Pod]) -> tuple[str, bool]:
    """What is said of the pod whose container the kubelet has been creating longest, and whether that is long."""
    slow = _slowest(s, pods)
    if slow is None:
        return "", False
    pod, since = slow
    reached = [seconds for seconds in SAID_AT_SECONDS if s.now >= since + dt.timedelta(seconds=seconds)]
    if not reached:
        return "", False
    word, where = pod.trainer.reason or "ContainerCreating", f" on {pod.node}" if pod.node else ""
    how = f"kubectl describe pod --namespace {s.job.metadata.namespace} {pod.name}"
    text = f"{pod.name}{where} is in {word} for more than {wording.duration(reached[-1])}: `{how}` says why"
    return text, reached[-1] >= LONG_SECONDS


def next_word(s: View, pods: Sequence[Pod]) -> dt.datetime | None:
    """When `to_be_created` says something else although nothing has changed."""
    slow = _slowest(s, pods)
    if slow is None:
        return None
    times = (slow[1] + dt.timedelta(seconds=seconds) for seconds in SAID_AT_SECONDS)
    return next((at for at in times if at > s.now), None)


def completed_long_ago(s: View) -> tuple[str, dt.datetime | None]:
    """What is said where some nodes completed long ago and others still run, and when to look again.

    Without reports nobody can know whether those hang in a collective; and one node may well have more to do.
    """
    done = ranges.parse(s.status.completed_nodes)
    pods = {**s.deleted_pods, **s.mine}
    ended = [pods[rank].trainer.ended_at or s.status.running_time for rank in done if rank in pods]
    times = [at for at in ended if at is not None] or ([s.status.running_time] if s.status.running_time else [])
    if not done or not times:
        return "", None
    last = max(times)
    long = last + dt.timedelta(seconds=LONG_SECONDS)
    if s.now < long:
        return "", long
    rest = sorted(set(range(s.spec.nodes)) - done)
    verb = "run" if len(rest) > 1 else "runs"
    log = f"kubectl logs --namespace {s.job.metadata.namespace} {naming.present_pod_name(s.job, s.status, rest[0])}"
    text = (
        f"{_nodes(rest)} still {verb}, attempt {s.status.attempt}, and {_nodes(sorted(done))} completed by "
        f"{last:%Y-%m-%dT%H:%M:%SZ}. If a rank waits for one that has ended, the ranks make different numbers of "
        f"steps; `{log}` may tell"
    )
    return text, None


def for_nodes(s: View) -> str:
    """What is said of pods on nodes that the cluster does not hear."""
    parts = [
        f"; node {u.pod.node} (node {u.pod.rank}) is not ready since {_time(u.since)}; "
        + (f"given up at {_time(u.lost_at)}" if u.lost_at else "so are most others, and none of them is given up")
        for u in s.unheard[:3]
    ]
    more = len(s.unheard) - 3
    return "".join(parts) + (f"; and {more} more" if more > 0 else "")


def _slowest(s: View, pods: Sequence[Pod]) -> tuple[Pod, dt.datetime] | None:
    making = [p for p in pods if p.node and not p.unschedulable and p.trainer.reason in _IN_THE_MAKING]
    begun = [(at, p.rank, p) for p in making if (at := p.scheduled_at or s.status.attempt_time) is not None]
    if not begun:
        return None
    since, _, pod = min(begun, key=lambda found: found[:2])
    return pod, since


def _nodes(ranks: Sequence[int]) -> str:
    return f"node{'s' if len(ranks) > 1 else ''} {ranges.for_people(ranks)}"


def _time(at: dt.datetime) -> str:
    return f"{at:%H:%M:%S}"


__all__ = ["completed_long_ago", "for_nodes", "next_word", "said_once", "to_be_created"]
