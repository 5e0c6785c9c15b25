"""Appoints the leader of an elastic `ddprun` job: the pod whose agent starts and stops the ranks of all nodes.

Agents elect nobody. They ask the status receiver, which answers from the stored status. So terms only grow, and no two
agents lead in one term.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Set
from typing import Any

from msgspec.structs import replace

from ddpjob_core.members import Members
from ddpjob_operator.job import api
from ddpjob_operator.observed.cluster import Pod
from ddpjob_operator.plan.view import View
from ddpjob_operator.pods import agent_environment, naming


def after_loss(view: View, status: api.Status, lost: Collection[int]) -> api.Status:
    """Return the status with a new leader if the leader's pod is in `lost`. status: includes the loss of these pods."""
    present = leader(view.job, status)
    if not view.appoints or present.place not in lost:
        return status
    staying = view.staying - set(lost)
    # Prefer a pod whose ranks trained in the last group, because other pods may hold no state, or an older state.
    # If no pod stays, the next pod at the leader's place leads, or node 0 if the job has no such place any more.
    next_one = present.place if present.place in view.spec.members else view.spec.members.leader
    place = min(in_last_group(view, status, staying, lost) or staying, default=next_one)
    # Node 0's agent leads first without an appointment. In its reports, its pod's replacement number is the term.
    before = max(present.term, naming.replacement(status, view.spec.members.leader))
    return replace(status, leader=api.JobLeader(term=before + 1, place=place))


def in_last_group(view: View, status: api.Status, waiting: Set[int], lost: Collection[int]) -> set[int]:
    """Return the waiting pods that were in the newest generation of ranks: first pods of the attempt, and replacements
    whose ranks have reported. If a lost pod has run, a first pod counts only if it is recorded as started, because it
    may be the second pod of this name, after one that nobody observed."""
    started = {
        (view.spec.members.place(report.node_rank), report.replacement)
        for report in view.seen.reports.values()
        if report.attempt == status.attempt
    }
    ran = view.recorded.started | status.started
    first = waiting & ran if ran.intersection(lost) else waiting
    numbers = {place: naming.replacement(status, place) for place in waiting}
    return {
        place for place, number in numbers.items() if (number == 0 and place in first) or (place, number) in started
    }


def with_present(view: View, status: api.Status) -> api.Status:
    """Return the status with a new leader if a lower spec.nodes removed the leader's place, and its pod has ended. That
    pod ends first, because all ranks save together. Node 0 is recorded once agents ask: a new operator, which nobody
    has asked yet, must know that they would learn of another leader."""
    if view.appoints and 0 < status.attempt == view.recorded.attempt:
        status = replace(status, leader=leader(view.job, status))
    place = leader(view.job, status).place
    gone = place not in view.spec.members and all(p.place != place for p in view.removed)
    return after_loss(view, status, {place}) if gone else status


def leader(job: api.DDPJob, status: api.Status) -> api.JobLeader:
    """Return the leader of the attempt; node 0 as long as the status names no other leader."""
    return status.leader or api.JobLeader(term=1, place=job.spec.members.leader)


def turn(job: api.DDPJob, status: api.Status) -> int:
    """Return the number that the leader's agent puts into its reports. It is higher for each later leader."""
    found = leader(job, status)
    return found.term if found.term > 1 else naming.replacement(status, found.place)


def pod_name(job: api.DDPJob) -> str:
    """Return the name of the leader's pod, by the stored status."""
    return naming.present_pod_name(job, job.status, leader(job, job.status).place)


def answer(job: api.DDPJob, pod: Pod | None, port: int) -> dict[str, Any] | None:
    """Return the answer to agents that ask which node leads; None if the leader's pod is not running. pod: with the
    name `pod_name(job)`. port: of the leader's agent."""
    if pod is None or pod.owner_uid != job.metadata.uid or not pod.address:
        return None
    found, left = leader(job, job.status), json.loads(agent_environment.grant(job).text())
    places = Members(sorted(job.status.started.intersection(job.spec.members))).text
    return {"term": found.term, "place": found.place, "host": pod.address, "port": port, "left": left, "places": places}
