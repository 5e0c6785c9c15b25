"""Adds the restarts in place that node 0's agent (ddprun) reports to the status. `ddpjob_core.budget` counts them."""

from __future__ import annotations

import datetime as dt

from msgspec.structs import replace

from ddpjob_core.budget import Spent, newly_spent, with_newly_spent
from ddpjob_core.failures import Failure
from ddpjob_operator.failures import root_cause, sentences, termination_message
from ddpjob_operator.failures.redaction import shown
from ddpjob_operator.job import api, budgets, ranges
from ddpjob_operator.observed.reports import AgentReport, Report
from ddpjob_operator.plan import leadership, transitions
from ddpjob_operator.plan.view import View
from ddpjob_operator.pods import naming


def newest(view: View) -> AgentReport | None:
    """Return the newest counts of node 0's agent, from its last report or its termination message."""
    leader = view.known_pods.get(view.leader)
    message = termination_message.read_message(leader.trainer.message) if leader is not None and leader.ended else None
    agents = [agent for agent in (view.seen.agent, message.agent if message is not None else None) if agent is not None]
    # With equal counts `max` returns the first, which is the agent's report: only the report contains the failures.
    return max(agents, key=lambda a: (a.replacement, a.restarts.total), default=None)


def latest(known: Report | None, new: Report) -> Report | None:
    """Return the newer report of a leader's agent, because it contains all restarts so far."""
    return known if known is not None and _age(new) < _age(known) else new


def _age(report: Report) -> tuple[int, int, int]:
    agent = report.agent
    return (report.attempt, agent.replacement, agent.restarts.total) if agent is not None else (0, 0, 0)


def with_agent(status: api.Status, view: View) -> api.Status:
    """Return the status with the restarts that the leader's agent has made but the status does not count yet."""
    agent, leader = newest(view), view.leader
    counted, number = (status, 0) if agent is None else _counted(status, agent, view.job, view.now)
    if agent is None or not number:
        return status
    made = counted.progress
    last_step_time = made.updated if made is not None and made.attempt == counted.attempt else None
    status = transitions.with_idle(counted, last_step_time)
    # Record that all first pods have run: ranks start only after all nodes have joined, except in an elastic job.
    # Without this record, a second pod of the same name would count as the first, and start again at generation 0.
    leads = {leader} if agent.replacement == leadership.turn(view.job, status) else set()
    firsts = set() if view.is_elastic else {p for p in view.spec.members if naming.replacement(status, p) == 0}
    ran = (leads | firsts).intersection(view.spec.members)  # a leader that was scaled away may still report
    status = replace(status, started_nodes=ranges.text(status.started | ran))
    # The agent has already counted these steps as progress, so later failures must not count them again.
    status = replace(status, furthest_step=status.furthest)
    if status.is_broken:
        return status  # lastFailure stays the failure that is being classified
    for reported in agent.failures[-number:]:
        failure = _failure(status, reported, view)
        status = transitions.with_failure(status, failure, sentences.sentence(failure))
    return status


def _counted(status: api.Status, agent: AgentReport, job: api.DDPJob, now: dt.datetime) -> tuple[api.Status, int]:
    history, limits, spent = budgets.history(status), budgets.limits(job.spec), budgets.known(status)
    known, counts = status.in_place, agent.restarts
    reported = Spent(counts.application, counts.infrastructure, counts.stall)
    new = newly_spent(spent, agent.replacement, reported, history, limits, now)
    if not new.total:
        return status, 0
    if known is None or known.replacement != agent.replacement:
        known = api.InPlace(replacement=agent.replacement, earlier=status.restarted_in_place)
    failures = agent.failures[-new.total :]
    history = with_newly_spent(
        history,
        new,
        limits,
        now,
        in_a_row=counts.in_a_row,
        charged_in_a_row=counts.charged_in_a_row,
        peers_lost=sum(f.charged_to == "infrastructure" and f.only_complains for f in failures),
        made_a_new_step=(status.furthest or 0) > (status.furthest_step or 0),
    )
    known = replace(known, **{name: getattr(known, name) + n for name, n in new._asdict().items()})
    return replace(status, restarts=budgets.restarts(history), in_place=known), new.total


def _failure(status: api.Status, failure: Failure, view: View) -> api.JobFailure:
    assert failure.node_rank is not None, "a report without it is refused"
    place = view.spec.members.place(failure.node_rank)
    pod = None if place is None else view.pods.get(place)
    is_known = failure.rank is not None and failure.rank < view.spec.world_size
    return api.JobFailure(
        attempt=status.attempt,
        rank=failure.rank if is_known else None,
        node_rank=failure.node_rank,
        pod="" if place is None else naming.present_pod_name(view.job, status, place),
        node=pod.node if pod is not None else "",
        exit_code=None if failure.stalled else failure.exit_code,
        signal=failure.signal,
        reason=_reason(failure),
        failure_class=failure.failure_class,
        charged_to=failure.charged_to,
        step=failure.step or None,
        generation=failure.generation,
        exception=shown(failure.exception, root_cause.EXCEPTION_MAX),
        where=shown(failure.where, root_cause.WORD_MAX),
        time=view.now,
    )


def _reason(failure: Failure) -> str:
    if failure.stalled:
        return root_cause.STALLED
    if failure.rank is None:
        return root_cause.CONNECTION_LOST
    if failure.only_complains:
        return root_cause.PEER_LOST
    return root_cause.ENDED_EARLY if failure.early else "Error"
