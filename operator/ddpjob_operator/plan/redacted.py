"""Cleans and masks all text for people in a status or an Event; names that machines read stay unchanged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace as replaced

from msgspec.structs import replace

from ddpjob_operator.failures.log_lines import TAIL_MAX
from ddpjob_operator.failures.redaction import clean, mask, shown, shown_pair
from ddpjob_operator.failures.root_cause import EXCEPTION_MAX, WORD_MAX
from ddpjob_operator.job import api, bounds
from ddpjob_operator.observed.reports import METRIC_LENGTH_MAX
from ddpjob_operator.plan.actions import Event
from ddpjob_operator.plan.transitions import MESSAGE_MAX

CONDITION_MAX = 1024


def status(new: api.Status, old: api.Status) -> api.Status:
    """Return the status as people may see it. Entries that `old` contains are not masked again, to save up to 20 ms."""
    return replace(
        new,
        message=shown(new.message, MESSAGE_MAX),
        resumed_from=shown(new.resumed_from, bounds.SENTENCE_MAX),
        not_kept=shown(new.not_kept, bounds.ADVICE_MAX),
        save_failed=shown(new.save_failed, bounds.SENTENCE_MAX),
        progress=_progress(new.progress, old.progress),
        last_failure=new.last_failure if new.last_failure == old.last_failure else _failure(new.last_failure),
        failures=[line if line in old.failures else _line(line) for line in new.failures],
        findings=[replace(one, message=shown(one.message, EXCEPTION_MAX)) for one in new.findings],
        avoided_nodes=[node if node in old.avoided_nodes else _avoided(node) for node in new.avoided_nodes],
        conditions=[replace(one, message=shown(one.message, CONDITION_MAX)) for one in new.conditions],
    )


def events(new: Iterable[Event]) -> tuple[Event, ...]:
    return tuple(replaced(event, message=shown(event.message, MESSAGE_MAX)) for event in new)


def _avoided(node: api.AvoidedNode) -> api.AvoidedNode:
    return replace(node, message=shown(node.message, EXCEPTION_MAX))


def _progress(progress: api.Progress | None, old: api.Progress | None) -> api.Progress | None:
    if progress is None or not progress.metrics or (old is not None and progress.metrics == old.metrics):
        return progress
    pairs = progress.metrics.items()
    return replace(progress, metrics=dict(shown_pair(name, value, METRIC_LENGTH_MAX) for name, value in pairs))


def _line(line: api.FailureLine) -> api.FailureLine:
    return replace(line, message=shown(line.message, EXCEPTION_MAX), reason=shown(line.reason, WORD_MAX))


def _failure(failure: api.JobFailure | None) -> api.JobFailure | None:
    if failure is None:
        return None
    return replace(
        failure,
        reason=shown(failure.reason, WORD_MAX),
        signal=shown(failure.signal, WORD_MAX),
        exception=shown(failure.exception, EXCEPTION_MAX),
        log_tail=mask(clean(failure.log_tail))[:TAIL_MAX],
    )
