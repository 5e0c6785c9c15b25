"""A job in full: `ddpjob describe`."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ddpjob_cli.describe import progress
from ddpjob_operator.failures import root_cause, sentences
from ddpjob_operator.job import api, budgets, topology, wording

LABEL_WIDTH = 12
UNSEEN = "no operator has seen the job; is one running, and does it watch this namespace?"
TAIL_LINES = 12  # the end of a traceback; the status keeps 2 KiB


@dataclass(frozen=True)
class PodLine:
    """A pod as describe shows it."""

    name: str
    node: str
    state: str


@dataclass(frozen=True)
class EventLine:
    """An Event as describe and events show it."""

    time: dt.datetime | None
    type: str
    reason: str
    message: str
    about: str = ""
    """Kind and name of the object, where it is not the job itself."""


def describe(job: api.DDPJob, created: dt.datetime | None, now: dt.datetime) -> list[str]:
    """The job's state, progress, restarts and failures."""
    status, spec = job.status, job.spec
    processes = wording.count(topology.nproc_per_node(spec), "process")
    lines = [
        labelled("Name", job.metadata.name),
        labelled("Namespace", job.metadata.namespace),
        *([labelled("Created", _time(created, now))] if created else []),
        labelled("State", state_line(status, now)),
        *([labelled("", status.message)] if status.message else []),
        labelled("Nodes", f"{_ready(job)} of {spec.nodes} ready, {processes} each, {topology.backend(spec)}"),
    ]
    if status.gang is not None:
        lines.append(labelled("Gang", f"{status.gang.kind}: {status.gang.why}"))
    lines += _progress(status, now)
    if status.save_failed:
        lines.append(labelled("Saves", f"fail: {status.save_failed}"))
    lines += [labelled("Suspicious", found.message) for found in status.findings]
    if status.not_kept:
        lines.append(labelled("In memory", f"no: {status.not_kept}"))
    lines += _restarts(job)
    lines += _goodput(status)
    lines += [labelled("Avoids", sentences.avoided(a)) for a in status.avoided_nodes if a.until > now]
    lines += failure_lines(status, now)
    return lines


def state_line(status: api.Status, now: dt.datetime) -> str:
    """Restarting for 24s (BackOff), attempt 2"""
    if status.state is None:
        return f"unknown: {UNSEEN}"
    since = f" for {wording.duration((now - status.state_time).total_seconds())}" if status.state_time else ""
    reason = f" ({status.reason})" if status.reason else ""
    attempt = f", attempt {status.attempt}" if status.attempt else ""
    return f"{status.state}{since}{reason}{attempt}"


def failure_lines(status: api.Status, now: dt.datetime) -> Iterator[str]:
    """The root cause of the last failure with the end of its log, and the failures before it."""
    failure = status.last_failure
    if failure is None:
        return
    yield ""
    text = sentences.sentence(failure)
    yield f"Last failure, of attempt {failure.attempt}, {_ago(failure.time, now)}:"
    yield "  the one that the state names" if text in status.message else f"  {text}"
    if failure.failure_class:
        paid = f", charged to {failure.charged_to}" if failure.charged_to else "; no restart followed"
        yield f"  class {failure.failure_class}{paid}"
    yield from (f"  | {line}" for line in root_cause.own_lines(failure.log_tail)[-TAIL_LINES:])
    earlier = status.failures[:-1]
    if earlier:
        yield "Earlier failures:"
        yield from (f"  attempt {line.attempt}, {_ago(line.time, now)}: {line.message}" for line in reversed(earlier))


def pod_lines(pods: Sequence[PodLine]) -> list[str]:
    """A table of the pods; nothing where there are none."""
    rows = [("NAME", "NODE", "STATE"), *((p.name, p.node or "-", p.state) for p in pods)]
    return ["", "Pods:", *(f"  {line}" for line in columns(rows))] if pods else []


def event_lines(events: Sequence[EventLine], now: dt.datetime) -> list[str]:
    """A table of Events, the newest last."""
    rows = [("AGE", "TYPE", "REASON", "MESSAGE")]
    for e in events:
        age = wording.duration((now - e.time).total_seconds()) if e.time else "-"
        rows.append((age, e.type, e.reason, f"{e.about}: {e.message}" if e.about else e.message))
    return columns(rows)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows with their cells below each other, three spaces apart as kubectl has them."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["   ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def labelled(name: str, text: str) -> str:
    """`State:      Running`; a text of several lines stays in its column."""
    head = f"{name}:" if name else ""
    return head.ljust(LABEL_WIDTH) + text.replace("\n", "\n" + " " * LABEL_WIDTH)


def _ready(job: api.DDPJob) -> int:
    return job.status.nodes.ready if job.status.nodes else 0


def _progress(status: api.Status, now: dt.datetime) -> Iterator[str]:
    parts = [*progress.step_parts(status), *progress.pace_parts(status), *progress.resumed_parts(status)]
    if status.progress is not None:
        parts.append(f"(reported {_ago(status.progress.updated, now)})")
    if parts:
        yield labelled("Progress", "  ".join(parts))


def _restarts(job: api.DDPJob) -> Iterator[str]:
    r = job.status.restarts
    if r is None or not r.total:
        return
    yield labelled("Restarts", f"{r.total} ({budgets.by_class(r)}); backoffLimit {job.spec.backoff_limit}")


def _goodput(status: api.Status) -> Iterator[str]:
    g = status.goodput
    if g is None:
        return
    spent = [
        (g.productive_seconds, "training"),
        (g.unreported_seconds, "running without reports"),
        (g.idle_seconds, "without a step"),
        (g.starting_seconds, "starting"),
        (g.restarting_seconds, "restarting"),
    ]
    parts = ", ".join(f"{wording.duration(seconds)} {name}" for seconds, name in spent if seconds)
    if not parts:
        return
    ratio = "" if g.ratio is None else f"{g.ratio:.0%}: "
    lost = f"; {wording.count(g.lost_steps, 'step')} repeated" if g.lost_steps else ""
    yield labelled("Goodput", f"{ratio}{parts}{lost}")


def _time(time: dt.datetime, now: dt.datetime) -> str:
    return f"{time.astimezone(dt.timezone.utc):%Y-%m-%d %H:%M:%S} UTC ({_ago(time, now)})"


def _ago(time: dt.datetime, now: dt.datetime) -> str:
    return f"{wording.duration((now - time).total_seconds())} ago"
