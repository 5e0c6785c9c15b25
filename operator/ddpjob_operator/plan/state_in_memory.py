"""What the library reports of the state in memory (docs/memory.md), as the status says it."""

from __future__ import annotations

from ddpjob_operator.job import api, bounds, podspec
from ddpjob_operator.job.validation import dotted
from ddpjob_operator.observed.reports import Report

MIB = 1 << 20


def why_not(report: Report | None, spec: api.Spec) -> str:
    """Why the state is not kept in memory, and which field to raise where a limit is too small; empty: no such word."""
    if report is None or not report.not_kept:
        return ""
    if report.limit_needed is None:
        return report.not_kept
    has_trainer = podspec.trainer_container(spec.template) is not None
    path = podspec.trainer_path(spec.template) if has_trainer else ("trainer",)
    field = dotted((*path, "resources", "limits", "memory"))
    return f"{report.not_kept}; set {field} to {-(-report.limit_needed // MIB)}Mi or more"[: bounds.ADVICE_MAX]
