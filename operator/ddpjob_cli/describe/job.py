"""A job in full: `ddpjob describe`."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ddpjob_cli.describe import progress
from ddpjob_cli.describe.figures import columns
from ddpjob_operator.failures import log_lines, sentences
from ddpjob_operator.job import api, bounds, budgets, wording
from ddpjob_operator.plan import transitions

LABEL_WIDTH = 12
UNSEEN = "no operator has seen the job; is one running, and does it watch this namespace?"
TAIL_LINES = 12  # lines that hold the end of a traceback; the status keeps 2 KiB of the log


def describe(job: api.DDPJob, created: dt.datetime | None, now: dt.datetime) -> list[str]:
    status, spec = job.status, job.spec
    ready = status.nodes.ready if status.nodes else 0
    processes = wording.count(spec.facts.nproc_per_node, "process")
    lines = [
        labelled("Name", job.metadata.name),
        labelled("Namespace", job.metadata.namespace),
        *([labelled("Created", _time(created, now))] if created else []),
        labelled("State", state_line(status, now)),
        *([labelled("", status.message)] if status.message else []),
        labelled("Nodes", f"{ready} of {spec.nodes} ready, {processes} each, {spec.facts.backend}"),
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
    lines += _goodput(status, now)
    lines += [labelled("Avoids", sentences.avoided(a)) for a in status.avoided_nodes if a.until > now]
    lines += failure_lines(status, now)
    return lines


def state_line(status: api.Status, now: dt.datetime) -> str:
    """Return a line such as `Restarting for 24s (BackOff), attempt 2`."""
    if status.state is None:
        return f"unknown: {UNSEEN}"
    since = f" for {wording.duration((now - status.state_time).total_seconds())}" if status.state_time else ""
    reason = f" ({status.reason})" if status.reason else ""
    attempt = f", attempt {status.attempt}" if status.attempt else ""
    return f"{status.state}{since}{reason}{attempt}"


def failure_lines(status: api.Status, now: dt.datetime) -> Iterator[str]:
    """Return the root cause of the last failure with the end of its log, and earlier failures."""
    failure = status.last_failure
    if failure is None:
        return
    yield ""
    text = sentences.sentence(failure)
    yield f"Last failure, of attempt {failure.attempt}, {_ago(failure.time, now)}:"
    yield "  the one in the message above" if text in status.message else f"  {text}"
    if failure.failure_class:
        paid = f", charged to {failure.charged_to}" if failure.charged_to else "; no restart followed"
        yield f"  class {failure.failure_class}{paid}"
    yield from (f"  | {line}" for line in log_lines.of_training(failure.log_tail)[-TAIL_LINES:])
    earlier = status.failures[:-1]
    if earlier:
        yield "Earlier failures:"
        yield from (f"  attempt {line.attempt}, {_ago(line.time, now)}: {line.message}" for line in reversed(earlier))


def titled(title: str, rows: Sequence[str]) -> list[str]:
    return ["", title, *(f"  {row}" for row in rows)] if rows[1:] else []


def event_lines(events: Sequence[Mapping[str, Any]], now: dt.datetime) -> list[str]:
    def time_of(event: Mapping[str, Any]) -> dt.datetime | None:
        last = (event.get("series") or {}).get("lastObservedTime")
        return bounds.time(last or event.get("lastTimestamp") or event.get("eventTime"))

    rows = [("AGE", "TYPE", "REASON", "MESSAGE")]
    for event in sorted(events, key=lambda e: time_of(e) or dt.datetime.max.replace(tzinfo=dt.timezone.utc)):
        time, about = time_of(event), event["involvedObject"]
        age = wording.duration((now - time).total_seconds()) if time else "-"
        kind, reason, message = (str(event.get(key) or "") for key in ("type", "reason", "message"))
        told = "" if about.get("kind") == api.KIND else f"{str(about.get('kind')).lower()}/{about.get('name')}: "
        rows.append((age, kind, reason, told + message))
    return columns(rows)


def labelled(name: str, text: str) -> str:
    """Return for example `State:   Running`; a text of several lines stays in its column."""
    head = f"{name}:" if name else ""
    return head.ljust(LABEL_WIDTH) + text.replace("\n", "\n" + " " * LABEL_WIDTH)


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


def _goodput(status: api.Status, now: dt.datetime) -> Iterator[str]:
    if status.goodput is None:
        return
    g = transitions.goodput(status, now)  # the status has the time until its last change
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
