"""Appoints the leader of an elastic `ddprun` job: the pod whose agent starts and stops the ranks of all nodes.

Agents elect nobody. They ask the status receiver, which tells only what is in the stored status, so terms only grow and
no two agents lead in one term.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from typing import Any

from msgspec.structs import replace

from ddpjob_operator.job import api, topology
from ddpjob_operator.observed.cluster import Pod
from ddpjob_operator.plan.view import View
from ddpjob_operator.pods import agent_environment, naming


def after_loss(view: View, status: api.Status, lost: Collection[int]) -> api.Status:
    """Return the status with a new leader, if the present one's pod is lost. status: counts the lost pods already."""
    present = leader(view.job, status)
    if not view.appoints or present.place not in lost:
        return status
    # Without any other pod, the agent of the next pod at this place leads.
    place = min(view.staying - set(lost), default=present.place)
    number = naming.replacement(status, place)
    return replace(status, leader=api.JobLeader(term=present.term + 1, place=place, replacement=number))


def leader(job: api.DDPJob, status: api.Status) -> api.JobLeader:
    """Return the leader of the attempt; the first one, node 0, is not in the status."""
    return status.leader or api.JobLeader(term=1, place=topology.members(job.spec).leader)


def turn(job: api.DDPJob, status: api.Status) -> int:
    """Return the number of the present leader's agent in its reports: each later leader has a higher one."""
    found = leader(job, status)
    return found.term if found.term > 1 else naming.replacement(status, found.place)


def answer(job: api.DDPJob, pods: Iterable[Pod], port: int) -> dict[str, Any] | None:
    """Return what agents are told; None if the leader's pod is not running. port: of the leader's agent."""
    found = leader(job, job.status)
    wanted = (job.metadata.uid, job.status.attempt, found.place, found.replacement)
    of_leader = (p for p in pods if (p.owner_uid, p.attempt, p.place, p.replacement) == wanted and p.address)
    left = json.loads(agent_environment.grant(job).text())
    about = {"term": found.term, "place": found.place, "port": port, "left": left}
    return next((about | {"host": pod.address} for pod in of_leader), None)
