"""A spec that becomes invalid while its job runs: by an edit, or because a newer operator checks more.

A spec that cannot run starts nothing, but what runs goes on as it was, to its end, and restarts. No copy of the last
valid spec is kept, for a newer version might not read that either. None is needed: what pods are made from (`nodes`,
`nprocPerNode`, `template`) cannot change while they run (crd.py), so the last valid spec is the present one without
what is wrong in it. A field that is wrong counts as unset, a number out of bounds as the nearest that is allowed
(validation.py), and `nodes` is what the status has.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec.structs import replace

from ddpjob_operator.job import api, launcher, reasons
from ddpjob_operator.job.status import TERMINAL
from ddpjob_operator.job.validation import Path, Problem
from ddpjob_operator.plan.transitions import MESSAGE_MAX

_SENTENCE_MAX = 1000
_PROBLEMS_MAX = 50  # a tenant's template may have thousands; a condition has room for about 20
_REMARK = re.compile(r"; the spec is invalid \(.*\)(?:; the job goes on as it was)?\Z", re.DOTALL)
# With another value the ranks of the next attempt would be others than those that have trained.
_RANKS = frozenset((("spec", "nodes"), ("spec", "nprocPerNode")))
# No field of the spec could be read: it is missing, no mapping, or larger than what is kept.
_WHOLE: frozenset[Path] = frozenset(((), ("spec",)))


def sentence(problems: Sequence[Problem]) -> str:
    """The problems in one sentence, as many as anybody reads."""
    return "; ".join(str(p)[:_SENTENCE_MAX] for p in problems[:_PROBLEMS_MAX])


def as_it_was(job: api.DDPJob, problems: Sequence[Problem]) -> api.DDPJob:
    """The job with the spec by which it goes on, and its status without the remark that this module adds."""
    status = replace(job.status, message=_REMARK.sub("", job.status.message))
    nodes = status.nodes.total if status.nodes is not None and status.attempt else 0
    wrong = nodes > 0 and any(p.path in _WHOLE or p.path[:2] == ("spec", "nodes") for p in problems)
    return replace(job, status=status, spec=launcher.with_nodes(job.spec, nodes) if wrong else job.spec)


def keeps_pods_from_being_made(problems: Sequence[Problem]) -> bool:
    """Whether what is wrong is what a pod is made from, and cannot be read."""
    return any(p.unreadable or p.path in _WHOLE or p.path[:2] in _RANKS for p in problems)


def remark(problems: Sequence[Problem], *, goes_on: bool = True) -> str:
    """What the message of a job that goes on nevertheless says in addition."""
    text = sentence(problems)
    cut = text if len(text) <= _SENTENCE_MAX else text[:_SENTENCE_MAX] + "…"
    return f"the spec is invalid ({cut})" + ("; the job goes on as it was" if goes_on else "")


def with_remark(status: api.Status, problems: Sequence[Problem]) -> api.Status:
    """The status with the remark, unless its reason is the spec already or nothing goes on."""
    if not problems or is_explained(status):
        return status
    text = remark(problems, goes_on=status.state != "Suspended")
    return replace(status, message=f"{status.message[: MESSAGE_MAX - len(text) - 2]}; {text}")


def is_explained(status: api.Status) -> bool:
    """Whether the reason of the state is the spec itself, or the job is over, so that its spec no longer matters."""
    return status.state in TERMINAL or status.reason == reasons.INVALID_SPEC.name
