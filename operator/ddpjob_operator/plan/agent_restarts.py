"""Restarts without new pods: what the agent of node 0 says of them becomes part of the status.

The agent spends from the budget that its pod was given, and says what it has charged in its life so far, again and
again. So nothing is lost with a message, and nothing counted twice: the operator counts what is more than it knew.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping

from msgspec.structs import replace

from ddpjob.core import rules
from ddpjob.core.failures import Failure
from ddpjob_operator.failures import root_cause, sentences, termination_message
from ddpjob_operator.failures.redaction import shown
from ddpjob_operator.job import api, bounds, budgets, ranges, topology, validation
from ddpjob_operator.observed.cluster import Observed, Pod
from ddpjob_operator.observed.reports import Agent, Report
from ddpjob_operator.plan import status as statuses
from ddpjob_operator.pods import naming


def newest(mine: Mapping[int, Pod], deleted_pods: Mapping[int, Pod], seen: Observed) -> Agent | None:
    """The last word of node 0's agent: reported, or left behind at its end where nobody could be reached."""
    first = mine.get(0) or deleted_pods.get(0)
    left = termination_message.left(first.trainer.message) if first is not None and first.ended else None
    said = [agent for agent in (seen.agent, left.agent if left is not None else None) if agent is not None]
    # The same counts: the report is the one that tells of the failures behind them.
    return max(said, key=lambda a: (a.replacement, a.restarts.total), default=None)


def latest(known: Report | None, new: Report) -> Report | None:
    """The report that counts: each says all that its agent has charged so far, and only node 0's agent charges."""
    return known if new.node_rank != 0 or (known is not None and _age(new) < _age(known)) else new


def _age(report: Report) -> tuple[int, int, int]:
    agent = report.agent
    return (report.attempt, agent.replacement, agent.restarts.total) if agent is not None else (0, 0, 0)


def with_agent(
    status: api.Status, agent: Agent | None, job: api.DDPJob, mine: Mapping[int, Pod], now: dt.datetime
) -> api.Status:
    """The status with what the agent has charged since it was last counted."""
    known = status.in_place
    if agent is None or (known is not None and agent.replacement < known.replacement):
        return status
    if known is None or known.replacement != agent.replacement:
        known = api.InPlace(replacement=agent.replacement, earlier=count(status))
    new = _new(status, agent, known, job, now)
    if not any(new.values()):
        return status
    status = statuses.with_idle(_charged(status, new, agent, job, now), _last_step_time(status))
    status = _with_what_was_free(status, new, agent)
    if agent.replacement == naming.replacement(status, 0):
        # Who has spoken has run: a second pod under its name would count from nothing, and be taken for the first.
        status = replace(status, started_nodes=ranges.text(ranges.parse(status.started_nodes) | {0}))
    counted = replace(known, **{k: getattr(known, k) + n for k, n in new.items()})
    # The steps until now were progress for that agent's verdict, and are none for the next one.
    status = replace(status, in_place=counted, furthest_step=budgets.furthest(status))
    if statuses.is_broken(status):
        return status  # what is being settled stays the last failure
    for failure in agent.failures[-sum(new.values()) :]:
        told = _failure(status, failure, job, mine, now)
        status = statuses.with_failure(status, told, sentences.sentence(told))
    return status


def _last_step_time(status: api.Status) -> dt.datetime | None:
    """When the ranks that have ended were last heard of with a new step."""
    made = status.progress
    return made.updated if made is not None and made.attempt == status.attempt else None


def count(status: api.Status) -> int:
    """How often the ranks of this attempt have started again in the pods that they had."""
    done = status.in_place
    return 0 if done is None else done.earlier + done.application + done.infrastructure + done.stall


def _new(status: api.Status, agent: Agent, known: api.InPlace, job: api.DDPJob, now: dt.datetime) -> dict[str, int]:
    """What the agent has charged since it was last counted, never more than one beyond what it was given: it stops
    there itself, and what a pod says beyond that is no count."""
    history = budgets.history(status)
    limits = rules.Limits(job.spec.backoff_limit, job.spec.backoff_window_seconds)
    left = {
        "application": limits.backoff_limit + 1 - rules.counted(history, limits, now),
        "infrastructure": bounds.IN_PLACE_MAX,
        "stall": rules.STALLS_MAX + 1 - history.stall,
    }
    said = agent.restarts
    return {name: max(0, min(getattr(said, name) - getattr(known, name), most)) for name, most in left.items()}


def _charged(status: api.Status, new: dict[str, int], agent: Agent, job: api.DDPJob, now: dt.datetime) -> api.Status:
    restarts, windowed = status.restarts or api.Restarts(), job.spec.backoff_window_seconds is not None
    kept = min(job.spec.backoff_limit, validation.WINDOWED_LIMIT_MAX) + 1
    times = [*restarts.charged_at, *[now] * min(new["application"], kept)][-kept:] if windowed else []
    after = replace(
        restarts,
        **{name: getattr(restarts, name) + n for name, n in new.items()},
        total=restarts.total + sum(new.values()),
        # In a row are at most those before and these.
        in_a_row=min(agent.restarts.in_a_row, restarts.in_a_row + sum(new.values())),
        charged_in_a_row=min(agent.restarts.charged_in_a_row, restarts.charged_in_a_row + sum(new.values())),
        charged_at=times,
    )
    return replace(status, restarts=after)


def _with_what_was_free(status: api.Status, new: dict[str, int], agent: Agent) -> api.Status:
    """As rules.charge counts it, for all that is new at once."""
    restarts = status.restarts or api.Restarts()
    made_a_new_step = (budgets.furthest(status) or 0) > (status.furthest_step or 0)
    before = replace(restarts, uncharged_in_a_row=0, peers_lost=0) if made_a_new_step else restarts
    told = agent.failures[-sum(new.values()) :]
    lost = sum(f.charged_to == "infrastructure" and rules.is_symptom(f.exception) for f in told)
    return replace(
        status,
        restarts=replace(
            restarts,
            uncharged_in_a_row=before.uncharged_in_a_row + new["infrastructure"],
            peers_lost=before.peers_lost + lost,
        ),
    )


def _failure(
    status: api.Status, failure: Failure, job: api.DDPJob, mine: Mapping[int, Pod], now: dt.datetime
) -> api.Failure:
    assert failure.node_rank is not None, "a report without it is refused"
    pod = mine.get(failure.node_rank)
    is_known = failure.rank is not None and failure.rank < topology.world_size(job.spec)
    return api.Failure(
        attempt=status.attempt,
        rank=failure.rank if is_known else None,
        node_rank=failure.node_rank,
        pod=naming.present_pod_name(job, status, failure.node_rank),
        node=pod.node if pod is not None else "",
        exit_code=None if failure.failure_class == "stall" else failure.exit_code,
        signal=failure.signal,
        reason=_reason(failure),
        failure_class=failure.failure_class,
        charged_to=failure.charged_to,
        step=failure.step or None,
        exception=shown(failure.exception, root_cause.EXCEPTION_MAX),
        time=now,
    )


def _reason(failure: Failure) -> str:
    if failure.failure_class == "stall":
        return root_cause.STALLED
    if failure.rank is None:
        return root_cause.CONNECTION_LOST
    if failure.failure_class == "infrastructure" and rules.is_symptom(failure.exception):
        return root_cause.PEER_LOST
    return root_cause.ENDED_EARLY if failure.exit_code == 0 else "Error"
