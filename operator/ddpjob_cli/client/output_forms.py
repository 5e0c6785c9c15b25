"""Print jobs as a table, names, JSON or YAML, or in full for `ddpjob describe`."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Sequence

from ddpjob_cli.client import jobs, log_findings
from ddpjob_cli.client.connection import Cluster, Raw
from ddpjob_cli.client.errors import ClusterError
from ddpjob_cli.client.watch import Say
from ddpjob_cli.describe import job as describe
from ddpjob_cli.describe import table
from ddpjob_cli.describe.figures import columns
from ddpjob_cli.manifest import yamlfile
from ddpjob_operator.failures.redaction import clean
from ddpjob_operator.job import api


def of_jobs(found: Sequence[Raw], form: str, *, one: bool, namespaces: bool) -> str:
    """Return jobs in a form of `-o`, without managedFields, because they are long. one: a single job, not a list."""
    if form == "name":
        return "".join(f"{api.KIND.lower()}.{api.GROUP}/{raw['metadata']['name']}\n" for raw in found)
    if form in ("json", "yaml"):
        shown = [{name: value for name, value in raw["metadata"].items() if name != "managedFields"} for raw in found]
        found = [{**raw, "metadata": metadata} for raw, metadata in zip(found, shown, strict=True)]
        return _document(found[0] if one else {"apiVersion": "v1", "kind": "List", "items": list(found)}, form)
    return _text(table.table(found, _now(), wide=form == "wide", namespaces=namespaces))


def in_full(cluster: Cluster, stored: jobs.Stored, say: Say) -> str:
    """Return the text of `ddpjob describe`. Without the right to read pods or Events, report it and leave them out."""
    now, name = _now(), stored.job.metadata.name
    stored = log_findings.with_findings(cluster, stored)
    lines = describe.describe(stored.job, stored.created, now)
    try:
        rows = [("NAME", "NODE", "STATE")]
        for pod in jobs.pods(cluster, name):
            node = (pod.get("spec") or {}).get("nodeName") or "-"
            rows.append((pod["metadata"]["name"], node, jobs.state_of(pod, stored.trainer)))
        lines += describe.titled("Pods:", columns(rows))
    except ClusterError as error:
        say(f"pods are not shown: {error}")
    try:
        lines += describe.titled("Events:", describe.event_lines(jobs.events(cluster, stored), now))
    except ClusterError as error:
        say(f"Events are not shown: {error}")
    return _text(lines)


def of_events(events: Sequence[Raw]) -> str:
    return _text(describe.event_lines(events, _now()))


def documents(bodies: Sequence[Raw]) -> str:
    return "---\n".join(_document(body, "yaml") for body in bodies)


def _document(body: Raw, form: str) -> str:
    if form == "json":
        return json.dumps(body, indent=2, ensure_ascii=False) + "\n"
    return yamlfile.text_of(body)


def _text(lines: Sequence[str]) -> str:
    return "".join(f"{clean(line)}\n" for line in lines)


def _now() -> dt.datetime:
    return dt.datetime.now(dt.timezone.utc)
