"""Messages of a job that waits: for what, for how long, and how to find out why. Each new text writes the status."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Sequence

from msgspec.structs import replace

from ddpjob_operator.job import api, ranges, reasons, wording
from ddpjob_operator.job.times import after
from ddpjob_operator.observed import stall
from ddpjob_operator.observed.cluster import Observed, Pod
from ddpjob_operator.plan.view import Unreachable, View
from ddpjob_operator.pods import naming

LONG_SECONDS = 600.0
# Durations (seconds) that the message names once they are reached. A wait shorter than the first is not unusual.
NAMED_AT_SECONDS = (60.0, 120.0, 300.0, LONG_SECONDS, 1200.0, 1800.0, 3600.0, 7200.0, 21600.0, 86400.0, 604800.0)
# The kubelet's reasons while it prepares images, volumes and the network. These may end by themselves, or never.
_BEING_CREATED = ("", "ContainerCreating", "PodInitializing")
_WAITS = ("Pending", "Starting", "Restarting", "Failing")
# Limits for scheduler messages, in messages and characters: each of hundreds of pods may have its own message.
SENTENCES_MAX, SENTENCE_LENGTH_MAX = 3, 300
UNREACHABLE_MAX = 3
# After this time the message names the time of rank 0's last report, so that old figures do not look new.
MISSED_SECONDS = 60.0


def with_long_wait(view: View, status: api.Status) -> tuple[api.Status, dt.datetime | None]:
    """Return the status, and when its wait will count as long. If it is long already, the reason becomes WaitsLong."""
    now = view.now
    reason = reasons.ALL.get(status.reason)
    if reason is None or reason.warning or not (status.state in _WAITS or reason is reasons.WAITING_FOR_OLD_PODS):
        return status, None
    if reason is reasons.STARTING_TRAINERS and _slowest(status, view.waiting) is not None:
        return status, None  # the reason becomes CannotStart within a second, so this Warning is not needed
    # Each attempt's wait counts from its own start, which is in the future during a back-off.
    begun = max(at for at in (status.state_time or now, status.attempt_time or status.state_time or now))
    long = begun + dt.timedelta(seconds=LONG_SECONDS)
    return (status, long) if now < long else (replace(status, reason=reasons.WAITS_LONG.name), None)


def waited(since: dt.datetime | None, now: dt.datetime) -> tuple[str, dt.datetime | None]:
    """Return for example `, for more than 5m` ("" in the first minute), and when the text will change."""
    if since is None:
        return "", None
    reached, next_at = _named(since, now)
    return f", for more than {wording.duration(reached)}" if reached else "", next_at


def waited_for_nodes(view: View, status: api.Status) -> tuple[str, dt.datetime | None]:
    """Return `waited` for pods without a node, over all attempts; "" if the job trains with fewer nodes."""
    if view.trains_with_fewer(status):
        return "", None
    return waited(status.starting_since or status.attempt_time, view.now)


def why_unschedulable(pods: Sequence[Pod]) -> str:
    """Return the scheduler's messages, the most frequent first. pods: sorted, because each new text is a write."""
    about: defaultdict[str, list[Pod]] = defaultdict(list)
    for pod in pods:
        about[pod.unschedulable].append(pod)
    if len(about) == 1:
        return next(iter(about))
    most = sorted(about.items(), key=lambda one: -len(one[1]))
    named = [f"{_cut(why)} ({_pods(alike)})" for why, alike in most[:SENTENCES_MAX]]
    if rest := [pod for _, alike in most[SENTENCES_MAX:] for pod in alike]:
        named.append(f"something else ({_pods(rest)})")
    return "; ".join(named)


def creating(view: View, status: api.Status, pods: Sequence[Pod]) -> tuple[str, bool]:
    """Return as text the pod whose container is being created longest, and True if that takes unusually long."""
    slow = _slowest(status, pods)
    reached = 0.0 if slow is None else _named(slow[1], view.now)[0]
    if slow is None or not reached:
        return "", False
    pod = slow[0]
    reason, where = pod.trainer.reason or "ContainerCreating", f" on {pod.node}" if pod.node else ""
    how = f"kubectl describe pod --namespace {view.job.metadata.namespace} {pod.name}"
    text = f"{pod.name}{where} has been in {reason} for more than {wording.duration(reached)}: `{how}` shows why"
    return text, reached >= LONG_SECONDS


def next_creating_text_at(view: View, status: api.Status, pods: Sequence[Pod]) -> dt.datetime | None:
    slow = _slowest(status, pods)
    return None if slow is None else _named(slow[1], view.now)[1]


def completed_long_ago(view: View, status: api.Status) -> tuple[str, dt.datetime | None]:
    """Return a message if some nodes completed long ago while others are running, else the time when to check again.
    Without reports, a rank that hangs looks like one that has more work."""
    done, running_time = status.completed, status.running_time
    pods = view.known_pods
    ended = [pods[place].trainer.ended_at or running_time for place in done if place in pods]
    times = [at for at in ended if at is not None] or ([running_time] if running_time else [])
    if not done or not times:
        return "", None
    last = max(times)
    long = last + dt.timedelta(seconds=LONG_SECONDS)
    if view.now < long:
        return "", long
    rest = sorted(view.participants(status) - done) or sorted(set(view.spec.members) - done)
    verb = "run" if len(rest) > 1 else "runs"
    log = f"kubectl logs --namespace {view.job.metadata.namespace} {naming.present_pod_name(view.job, status, rest[0])}"
    text = (
        f"{name_nodes(rest)} still {verb}, attempt {status.attempt}, and {name_nodes(sorted(done))} completed by "
        f"{last:%Y-%m-%dT%H:%M:%SZ}. If a rank is waiting for a rank that has ended, the ranks make different "
        f"numbers of steps; `{log}` may show where"
    )
    return text, None


def unreachable_nodes(view: View) -> str:
    by_node: defaultdict[tuple[str, dt.datetime | None], list[Unreachable]] = defaultdict(list)
    for one in view.unreachable:
        by_node[one.pod.node, one.lost_at].append(one)
    parts = [_unreachable(alike) for alike in by_node.values()]
    more = len(parts) - UNREACHABLE_MAX
    return "".join(parts[:UNREACHABLE_MAX]) + (f"; and {more} more" if more > 0 else "")


def _unreachable(alike: Sequence[Unreachable]) -> str:
    first = alike[0]
    what = "is gone" if first.gone else "is not ready"
    until = "most other nodes are not ready either, so none is given up"
    until = f"given up at {first.lost_at:%H:%M:%S}" if first.lost_at else until
    of = name_nodes([one.pod.place for one in alike])
    return f"; node {first.pod.node} ({of}) {what} since {min(one.since for one in alike):%H:%M:%S}; {until}"


def _named(since: dt.datetime, now: dt.datetime) -> tuple[float, dt.datetime | None]:
    """Return how many seconds of a wait since `since` the message shows (0: none yet), and when it will show more."""
    times = [(seconds, since + dt.timedelta(seconds=seconds)) for seconds in NAMED_AT_SECONDS]
    reached = max((seconds for seconds, at in times if now >= at), default=0.0)
    return reached, next((at for _, at in times if at > now), None)


def _slowest(status: api.Status, pods: Sequence[Pod]) -> tuple[Pod, dt.datetime] | None:
    created = [p for p in pods if p.node and not p.unschedulable and p.trainer.reason in _BEING_CREATED]
    begun = [(at, p.place, p) for p in created if (at := p.bound_at or status.attempt_time) is not None]
    if not begun:
        return None
    since, _, pod = min(begun, key=lambda begin: begin[:2])
    return pod, since


def _cut(sentence: str) -> str:
    return sentence[:SENTENCE_LENGTH_MAX] + ("…" if len(sentence) > SENTENCE_LENGTH_MAX else "")


def _pods(pods: Sequence[Pod]) -> str:
    return pods[0].name if len(pods) == 1 else wording.count(len(pods), "pod")


def name_nodes(places: Sequence[int]) -> str:
    return f"node{'s' if len(places) > 1 else ''} {ranges.for_people(places)}"


def last_report_at(status: api.Status, seen: Observed) -> dt.datetime | None:
    """Return when rank 0 last reported in this attempt; None if no report is expected from it."""
    progress, report, tracker = status.attempt_progress, seen.reports.get(0), seen.trackers.get(0)
    if progress is None or 0 in status.completed:
        return None
    if report is not None and (report.final or report.phase is None):
        return None
    known = tracker is not None and tracker.attempt in (0, status.attempt)
    heard = tracker.heard_at if tracker is not None and known else progress.updated
    return max(heard, progress.updated, seen.listening_since or progress.updated)


def report_old_at(last_report: dt.datetime | None) -> dt.datetime | None:
    """Return when to hide the remaining time, because it would otherwise not change while time passes."""
    return after(last_report, stall.SILENT_SECONDS)
