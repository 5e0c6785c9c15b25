"""Restarts without new pods: what the agent of node 0 reports of them becomes part of the status, by the ledger in
`ddpjob.core.budget`."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping

from msgspec.structs import replace

from ddpjob.core import rules
from ddpjob.core.budget import Spent, newly_spent, with_newly_spent
from ddpjob_operator.failures import root_cause, termination_message
from ddpjob_operator.failures.redaction import shown
from ddpjob_operator.job import api, budgets, ranges, topology
from ddpjob_operator.observed.cluster import Observed, Pod
from ddpjob_operator.observed.reports import Agent, AgentFailure, Report
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
    """The status with what the agent has spent since it was last counted."""
    if agent is None:
        return status
    history, limits, known, said = (
        budgets.history(status),
        budgets.limits(job.spec),
        budgets.known(status),
        agent.restarts,
    )
    reported = Spent(said.application, said.infrastructure, said.stall)
    new = newly_spent(known, agent.replacement, reported, history, limits, now)
    if not new.total:
        return status
    failures = agent.failures[-new.total :]
    after = with_newly_spent(
        history,
        new,
        limits,
        now,
        in_a_row=said.in_a_row,
        charged_in_a_row=said.charged_in_a_row,
        peers_lost=sum(f.charged_to == "infrastructure" and rules.is_symptom(f.exception) for f in failures),
        made_a_new_step=(budgets.furthest(status) or 0) > (status.furthest_step or 0),
    )
    status = replace(status, restarts=budgets.restarts(after), in_place=_counted(status, agent.replacement, new))
    status = statuses.with_idle(status, _last_step_time(status))
    if agent.replacement == naming.replacement(status, 0):
        # Its pod has run: a second pod of this name would count from 0, and be taken for the first.
        status = replace(status, started_nodes=ranges.text(ranges.parse(status.started_nodes) | {0}))
    # The agent has judged these restarts by the steps until now, so they are no progress for the next verdict.
    status = replace(status, furthest_step=budgets.furthest(status))
    if statuses.is_broken(status):
        return status  # what is being settled stays the last failure
    for failure in failures:
        told = _failure(status, failure, job, mine, now)
        status = statuses.with_failure(status, told, root_cause.sentence(told))
    return status


def _counted(status: api.Status, replacement: int, new: Spent) -> api.InPlace:
    known, done = budgets.known(status), status.in_place
    is_same = done is not None and done.replacement == replacement
    earlier = done.earlier if done is not None and is_same else count(status)
    spent = (before + more for before, more in zip(known.of(replacement), new, strict=True))
    return api.InPlace(replacement=replacement, earlier=earlier, **dict(zip(Spent._fields, spent, strict=True)))


def _last_step_time(status: api.Status) -> dt.datetime | None:
    """When the ranks that have ended were last heard of with a new step."""
    made = status.progress
    return made.updated if made is not None and made.attempt == status.attempt else None


def count(status: api.Status) -> int:
    """How often the ranks of this attempt have started again in the pods that they had."""
    done = status.in_place
    return 0 if done is None else done.earlier + done.application + done.infrastructure + done.stall


def _failure(
    status: api.Status, said: AgentFailure, job: api.DDPJob, mine: Mapping[int, Pod], now: dt.datetime
) -> api.Failure:
    pod = mine.get(said.node_rank)
    stalled = said.failure_class == "stall"
    return api.Failure(
        attempt=status.attempt,
        rank=said.rank if 0 <= said.rank < topology.world_size(job.spec) else None,
        node_rank=said.node_rank,
        pod=naming.present_pod_name(job, status, said.node_rank),
        node=pod.node if pod is not None else "",
        exit_code=None if stalled else said.exit_code,
        signal=said.signal,
        reason=_reason(said),
        failure_class=said.failure_class,
        charged_to=said.charged_to,
        step=said.step or None,
        exception=shown(said.exception, root_cause.EXCEPTION_MAX),
        time=now,
    )


def _reason(said: AgentFailure) -> str:
    if said.failure_class == "stall":
        return root_cause.STALLED
    if said.rank < 0:
        return root_cause.CONNECTION_LOST
    if said.failure_class == "infrastructure" and rules.is_symptom(said.exception):
        return root_cause.PEER_LOST
    return root_cause.ENDED_EARLY if said.exit_code == 0 else "Error"
