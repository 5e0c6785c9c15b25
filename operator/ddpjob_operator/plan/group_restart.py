"""The group restart: what breaks an attempt, how it is ended, what it is charged to, and when the next one starts.

Three looks, each by what is recorded: `attempt_broken` records the first sign; `restarting` stops what still runs, and
when the last pod has ended (or its node is lost) settles the cause, for peers often say "connection closed" before
the out-of-memory kill behind it is known; then the next attempt is in the status, and starts by the ordinary rules.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from ddpjob.core import rules
from ddpjob_operator.failures import root_cause, sentences, termination_message
from ddpjob_operator.failures.redaction import shown
from ddpjob_operator.job import api, budgets, launcher, podspec, ranges, reasons, topology, wording
from ddpjob_operator.job.reasons import Reason
from ddpjob_operator.observed import stall
from ddpjob_operator.observed.cluster import Pod
from ddpjob_operator.plan import culprit, pending
from ddpjob_operator.plan import status as statuses
from ddpjob_operator.plan.view import (
    Decision,
    Settings,
    View,
    after,
    is_past,
    name_pods,
    new_attempt,
    restart_grace_seconds,
)
from ddpjob_operator.pods import naming

CONFIG_ERROR = root_cause.CONFIG_ERROR
# Twice within `avoid_node_seconds`: once may be chance, and a job must not run out of nodes.
FAILURES_TO_AVOID = 2
AVOIDED_MAX = 10
# A job that reports no steps has trained when an earlier attempt ran so long: mistakes that keep it from starting show
# within seconds, imports from a slow file system within a minute.
TRAINED_SECONDS = 60
# An agent in the pod finds a stall itself, and restarts in place: what takes longer has no agent that can.
AGENT_FIRST = dt.timedelta(seconds=60)
_WHY_IT_STOPS: dict[rules.Stop, tuple[Reason, str]] = {
    "BackoffLimitExceeded": (reasons.BACKOFF_LIMIT_EXCEEDED, "{restarts}backoffLimit: {limit} allows no {more}"),
    "NoProgress": (
        reasons.NO_PROGRESS,
        "{charged} charged failures in a row without a new step, so another try is not worth it",
    ),
    "PermanentFailure": (reasons.PERMANENT_FAILURE, "another try cannot help"),
    "TooManyInfrastructureFailures": (
        reasons.TOO_MANY_INFRASTRUCTURE_FAILURES,
        "{uncharged} restarts without a charge and without a new step, so another try is not worth it",
    ),
    "TooManyStalls": (reasons.TOO_MANY_STALLS, "restarted {stalls} times because no step was made"),
}


def attempt_broken(s: View) -> Decision | None:
    """One rank is lost, so the group is broken: the others would hang in a collective until their time-out."""
    sign = next(_signs(s), None)
    if sign is None:
        return None
    reason, failure = sign
    text = sentences.sentence(failure)
    status = statuses.with_failure(s.status, failure, text)
    if not s.alive and not launcher.restarts_in_place(s.spec):
        # Nothing is left to stop or to wait for, so the first sign is all that there is: one look, and one event. The
        # attempt ends first, for what it has trained is booked from its own times.
        ended = dataclasses.replace(s, status=statuses.enter(status, "Restarting", reason, text, s.now))
        return _next_attempt(ended, settle(ended, failure))
    # Where agents wait in the other pods it is the next look that says whether these stop (pod_replacement.py).
    said = text + _open_question(failure) if launcher.restarts_in_place(s.spec) else _ending(s, text, failure)
    return Decision(statuses.enter(status, "Restarting", reason, said, s.now))


def restarting(s: View) -> Decision | None:
    """Stop what is left of a broken attempt; when nothing is, settle the cause, and start again or fail."""
    first = s.recorded.last_failure
    if first is None or not statuses.is_broken(s.recorded):
        return None
    if not s.alive:
        return _next_attempt(s, settle(s, first))
    # What is told to stop goes with its object, and perhaps says before what the first sign was only a symptom of.
    seen, _ = _cause(s, first)
    # What is ended from outside gets its full grace to save, so its peers get theirs: they stop at one agreed step.
    grace = None if s.recorded.reason == reasons.DISRUPTED.name else restart_grace_seconds(s.spec)
    text = sentences.sentence(seen)
    status = statuses.with_failure(s.status, seen, text)
    actions, again = culprit.stop(s, first, s.alive, grace)
    return Decision(replace(status, message=_ending(s, text, seen)), actions, again)


def _signs(s: View) -> Iterator[tuple[Reason, api.Failure]]:
    """What shows that this attempt cannot go on; the strongest first."""
    yield from sorted((*_failed(s), *_gone(s)), key=lambda sign: root_cause.precedence_of(sign[1]))
    yield from _stopped_from_outside(s)
    yield from _never_configured(s)
    yield from _stalled(s)


def _failed(s: View) -> Iterator[tuple[Reason, api.Failure]]:
    if s.failed:
        keep = s.settings.keep_log_tail
        # Nothing of this attempt was told to stop by us: who else did it may explain what failed.
        signs = [*s.failed, *(p for p in s.alive if p.deletion_requested_at is not None)]
        found = root_cause.root_cause(
            s.status.attempt, signs, _rank_of(s), s.now, keep_log_tail=keep, launched=_launched(s)
        )
        yield reasons.RANK_FAILED, _with_limit(s, _stepped(s, found))


def _gone(s: View) -> Iterator[tuple[Reason, api.Failure]]:
    for pod in sorted((p for p in s.mine.values() if p.uid in s.lost), key=lambda p: p.rank):
        yield reasons.NODE_LOST, _failure(s, pod.rank, pod.name, "NodeLost", pod.node)
    ran = ranges.parse(s.status.started_nodes) - ranges.parse(s.status.completed_nodes)
    for rank in sorted(ran - set(s.mine)):
        yield reasons.RANK_FAILED, _failure(s, rank, naming.present_pod_name(s.job, s.status, rank), "PodGone")


def _stopped_from_outside(s: View) -> Iterator[tuple[Reason, api.Failure]]:
    for pod in s.alive:
        if pod.deletion_requested_at is not None:
            failure = _failure(s, pod.rank, pod.name, pod.disruption or root_cause.STOPPED, pod.node)
            word = shown(pod.disruption, root_cause.WORD_MAX)
            evidence = api.Evidence(precedence="NODE", disruption=word) if word else None
            yield reasons.DISRUPTED, replace(failure, evidence=evidence)


def _never_configured(s: View) -> Iterator[tuple[Reason, api.Failure]]:
    for pod in s.alive:
        if is_past(_config_error_at(s, pod), s.now):
            failure = _failure(s, pod.rank, pod.name, CONFIG_ERROR, pod.node)
            yield reasons.RANK_FAILED, replace(failure, exception=pod.trainer.message[:300])


def _stalled(s: View) -> Iterator[tuple[Reason, api.Failure]]:
    finding = s.standstill
    if finding is None or finding.kind == "warning" or finding.node_rank not in s.mine:
        return
    if launcher.restarts_in_place(s.spec) and s.now < finding.until + AGENT_FIRST:
        return
    pod = s.mine[finding.node_rank]
    failure = _failure(s, pod.rank, pod.name, "Stalled", pod.node)
    yield reasons.STALLED, replace(failure, rank=finding.rank, step=finding.step, exception=finding.what()[:300])


def next_look(s: View) -> dt.datetime | None:
    """When time alone may break this attempt."""
    if s.status.state in (*statuses.TERMINAL, "Failing", "Suspended") or statuses.is_broken(s.status):
        return None
    times = [t for p in s.alive if (t := _config_error_at(s, p)) is not None]
    if (at := stall.requeue_at(s.trackers, s.spec.stall, s.now)) is not None:
        times.append(at)
    return min((t for t in times if t > s.now), default=None)


# ---------------------------------------------------------------- settling


@dataclass(frozen=True)
class Settled:
    """All that can be known is known: the cause, what it is charged to, and whether it goes on."""

    failure: api.Failure
    verdict: rules.Verdict
    text: str
    """Who and what."""

    def status(self, s: View) -> api.Status:
        """The status with it, and with what it costs."""
        status = statuses.with_failure(s.status, self.failure, self.text)
        if not self.verdict.restart:
            return status
        windowed = s.spec.backoff_window_seconds is not None
        return replace(
            status,
            restarts=budgets.restarts(self.verdict.history, windowed=windowed),
            avoided_nodes=avoided(status, s.settings, s.now, _unfit(s)),
        )


def settle(s: View, first: api.Failure) -> Settled:
    """Name the cause of what the first sign showed, and charge it."""
    failure, found = _cause(s, first)
    history, past = budgets.history(s.status), _past(s, failure)
    if found == "infrastructure" and _never_starts(s, failure, history):
        found = "permanent"
    found = rules.of_complaints(found, history, past)
    outside = root_cause.from_outside(failure)
    found = rules.with_policy(found, failure.exit_code, budgets.policy(s.spec), from_outside=outside)
    verdict = rules.judge(found, history, past, budgets.limits(s.spec), s.now)
    failure = replace(failure, failure_class=found, charged_to=(verdict.charged_to or "") if verdict.restart else "")
    return Settled(failure, verdict, sentences.sentence(failure))


def _next_attempt(s: View, settled: Settled) -> Decision:
    """All pods have ended: start again, or fail."""
    status, verdict, text = settled.status(s), settled.verdict, settled.text
    if not verdict.restart:
        reason, why = _why_it_stops(s, settled.failure, verdict)
        failed_status = statuses.enter(status, "Failed", reason, f"{text}; {why}", s.now)
        return Decision(replace(failed_status, completion_time=s.now))
    status = new_attempt(status, s.now + dt.timedelta(seconds=verdict.wait_seconds))
    return Decision(statuses.enter(status, "Restarting", reasons.RESTARTING, _going_on(s, text, verdict), s.now))


def _cause(s: View, first: api.Failure) -> tuple[api.Failure, rules.Class]:
    """The cause by all that is known now: the first sign, and every pod that has ended badly, gone or not."""
    failure, found = root_cause.settle(
        first,
        s.failed,
        _rank_of(s),
        s.now,
        stepped=s.status.first_step_time is not None or _ran_seconds(s) >= rules.FORGIVEN_AFTER_SECONDS,
        trained=_has_trained_before(s.status),
        nodes=s.spec.nodes,
        keep_log_tail=s.settings.keep_log_tail,
        lost=[
            _failure(s, p.rank, p.name, root_cause.NODE_LOST, p.node)
            for p in s.mine.values()
            if p.uid in s.lost_by_node
        ],
        early=_completed(s),
        steps={rank: pace.step for rank, pace in s.trackers.items()},
        launched=_launched(s),
    )
    failure = _with_limit(s, culprit.with_log(s, failure))
    return replace(_stepped(s, failure), failure_class=""), found


def _unfit(s: View) -> list[str]:
    """The cluster nodes that a pre-flight has found bad."""
    pods = {**s.deleted_pods, **s.mine}
    left = [message for p in pods.values() if p.ended and (message := termination_message.left(p.trainer.message))]
    ranks = {rank for message in left for rank in message.failure.bad_nodes}
    return sorted({pods[rank].node for rank in ranks if rank in pods and pods[rank].node})


def avoided(
    status: api.Status, settings: Settings, now: dt.datetime, unfit: Sequence[str] = ()
) -> list[api.AvoidedNode]:
    """The nodes to stay away from, now that the last failure is recorded. unfit: those that were measured."""
    kept = [a for a in status.avoided_nodes if a.until > now and a.node not in unfit]
    until = now + dt.timedelta(seconds=settings.avoid_node_seconds)
    kept += [api.AvoidedNode(node=node, until=until, message="the pre-flight found it bad") for node in unfit]
    since = now - dt.timedelta(seconds=settings.avoid_node_seconds)
    node = status.failures[-1].node if status.failures else ""
    count = sum(bool(node) and f.node == node and f.time > since for f in status.failures)
    if count >= FAILURES_TO_AVOID and node not in {a.node for a in kept}:
        kept.append(api.AvoidedNode(node=node, until=until, message=f"{count} failures of this job were its"))
    return kept[-AVOIDED_MAX:]


def _completed(s: View) -> api.Failure | None:
    """The first node that has completed in this attempt, as what explains peers that complain of it."""
    ranks = ranges.parse(s.status.completed_nodes)
    if not ranks:
        return None
    pods = {**s.deleted_pods, **s.mine}
    ends = {rank: pods[rank].trainer.ended_at or s.now for rank in ranks if rank in pods}
    first = min(ranks, key=lambda rank: (ends.get(rank, s.now), rank))
    node = pods[first].node if first in pods else ""
    name = naming.present_pod_name(s.job, s.status, first)
    failure = _failure(s, first, name, root_cause.ENDED_EARLY, node)
    # What rank 0 has reported last is its own; of another rank only its own reports say anything.
    return replace(failure, step=failure.step if first == 0 else None, time=ends.get(first, s.now))


def _has_trained_before(status: api.Status) -> bool:
    """Whether an attempt before the present one has trained: then its image, command and modules were right once."""
    if status.furthest_step:
        return True
    begun, ended = status.running_time, status.state_time
    here = (ended - begun).total_seconds() if status.state == "Restarting" and begun and ended else 0.0
    spent = status.goodput or api.Goodput()
    return spent.productive_seconds + spent.unreported_seconds - here >= TRAINED_SECONDS


def _never_starts(s: View, failure: api.Failure, history: rules.History) -> bool:
    """Whether other nodes were tried often enough, for a job that has never trained."""
    if not root_cause.cannot_start(failure) or _has_trained_before(s.status):
        return False
    return history.uncharged_in_a_row >= rules.STARTS_MAX


def _with_limit(s: View, failure: api.Failure) -> api.Failure:
    """Out of what memory."""
    if failure.init_container:
        return failure  # its limit is not the trainer's
    limit = podspec.limits(s.spec.template).get("memory")
    if failure.reason != "OOMKilled" or limit is None or failure.exception.startswith(root_cause.MEMORY):
        return failure
    said = f"{root_cause.MEMORY}{limit}" + (f"; {failure.exception}" if failure.exception else "")
    return replace(failure, exception=said[: root_cause.EXCEPTION_MAX])


def _launched(s: View) -> root_cause.Launched:
    port = s.status.master_addr.rpartition(":")[2]
    found = launcher.find(launcher.command_of(s.spec.template))
    return root_cause.Launched(int(port) if port.isdecimal() else None, found is not None and found.name != "ddprun")


def _ran_seconds(s: View) -> float:
    running = s.status.running_time
    return 0.0 if running is None else max(0.0, (s.now - running).total_seconds())


def _past(s: View, failure: api.Failure) -> rules.Attempt:
    progress = s.status.progress
    here = progress.step if progress is not None and progress.attempt == s.status.attempt else 0
    return rules.Attempt(
        made_a_new_step=here > (s.status.furthest_step or 0),
        reports_steps=budgets.furthest(s.status) is not None,
        ran_seconds=_ran_seconds(s),
        only_complaints=failure.reason == root_cause.PEER_LOST,
    )


def _stepped(s: View, failure: api.Failure) -> api.Failure:
    """With the last step that was reported before it."""
    progress = s.status.progress
    known = failure.step is None and progress is not None and progress.attempt == s.status.attempt
    return replace(failure, step=progress.step) if known and progress is not None else failure


def _failure(s: View, node_rank: int, pod: str, reason: str, node: str = "") -> api.Failure:
    failure = api.Failure(
        attempt=s.status.attempt,
        rank=topology.rank_of_node(s.spec, node_rank),
        node_rank=node_rank,
        pod=pod,
        node=node,
        reason=reason,
        time=s.now,
    )
    return _stepped(s, failure)


def _rank_of(s: View) -> root_cause.RankOf:
    return lambda node_rank: topology.rank_of_node(s.spec, node_rank)


def _config_error_at(s: View, pod: Pod) -> dt.datetime | None:
    stuck = pod.trainer.state == "waiting" and pod.trainer.reason == CONFIG_ERROR
    return after(pod.scheduled_at, s.settings.config_error_seconds) if stuck else None


# ---------------------------------------------------------------- sentences


def _ending(s: View, text: str, failure: api.Failure) -> str:
    left = f"stopping {name_pods(s.alive)}" if s.alive else "all pods have ended"
    return f"{text}; {left}{_open_question(failure)}{pending.for_nodes(s)}"


def _open_question(failure: api.Failure) -> str:
    return "" if root_cause.is_a_cause(failure) else "; cause not yet known"


def _going_on(s: View, text: str, verdict: rules.Verdict) -> str:
    count = f"all {s.spec.nodes} nodes" if s.spec.nodes > 1 else "the node"
    verb = "restart" if s.spec.nodes > 1 else "restarts"
    when = f" in {wording.duration(verdict.wait_seconds)}" if verdict.wait_seconds else ""
    return f"{text}; {count} {verb}{when} as attempt {s.status.attempt + 1} ({charge(s, verdict)})"


def charge(s: View, verdict: rules.Verdict) -> str:
    """What a restart costs, in words."""
    history = verdict.history
    if verdict.charged_to == "application":
        return f"restart {rules.counted(history, budgets.limits(s.spec), s.now)} of {s.spec.backoff_limit}"
    if verdict.charged_to == "stall":
        return f"stall {history.stall} of {rules.STALLS_MAX}"
    return f"not charged to backoffLimit; {history.infrastructure} so far"


def _why_it_stops(s: View, failure: api.Failure, verdict: rules.Verdict) -> tuple[Reason, str]:
    reason, text = _WHY_IT_STOPS[verdict.stop]
    if verdict.stop == "PermanentFailure" and any(
        r.action == "FailJob" and r.matches(failure.exit_code) for r in budgets.policy(s.spec)
    ):
        return reason, "failurePolicy says FailJob for this exit code"
    used = rules.counted(verdict.history, budgets.limits(s.spec), s.now)
    return reason, text.format(
        restarts=("" if not used else "restarted once: " if used == 1 else f"restarted {used} times: "),
        limit=s.spec.backoff_limit,
        more="more" if used else "restart",
        charged=verdict.history.charged_in_a_row + 1,
        in_a_row=verdict.history.in_a_row + 1,
        stalls=verdict.history.stall,
        uncharged=verdict.history.uncharged_in_a_row,
    )
