"""The library's reports about state in memory (docs/memory.md), as text of the status."""

from __future__ import annotations

from ddpjob_operator.job import api, bounds
from ddpjob_operator.job.validation import dotted
from ddpjob_operator.observed.reports import Report
from ddpjob_operator.plan.view import View
from ddpjob_operator.pods import naming

MIB = 1 << 20


def why_not(view: View, status: api.Status) -> str:
    """Return why state is not kept in memory, in which pods, and which limit to raise; "" if no rank reports that."""
    lacking = _lacking(view, status)
    if not lacking:
        return ""
    first = lacking[0]
    why = f"{_where(view, status, lacking)}{first.not_kept}"
    needed = max((one.limit_needed for one in lacking if one.limit_needed is not None), default=None)
    if first.limit_needed is None or needed is None:
        return why[: bounds.ADVICE_MAX]
    facts = view.spec.facts
    path = facts.trainer_path if facts.trainer else ("trainer",)
    field = dotted((*path, "resources", "limits", "memory"))
    return f"{why}; set {field} to {-(-needed // MIB)}Mi or more"[: bounds.ADVICE_MAX]


def _lacking(view: View, status: api.Status) -> list[Report]:
    """Return the reports with `not_kept`, by rank. Reports of generations before rank 0's do not count."""
    zero = view.seen.reports.get(0)
    if zero is None:
        return []
    return [
        report
        for _, report in sorted(view.seen.reports.items())
        if report.not_kept
        and report.attempt in (0, status.attempt)
        and report.generation == zero.generation
        and view.spec.members.place(report.node_rank) is not None
    ]


def _where(view: View, status: api.Status, lacking: list[Report]) -> str:
    places = sorted({place for one in lacking if (place := view.spec.members.place(one.node_rank)) is not None})
    if len(view.spec.members) == 1:
        return ""
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    return f"in pod {naming.present_pod_name(view.job, status, places[0])}{more}: "
