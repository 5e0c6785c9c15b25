"""Jobs as the command line prints them: a table, names, JSON, YAML, in full."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Sequence

from ddpjob_cli.client import jobs
from ddpjob_cli.client.connection import Cluster, Raw
from ddpjob_cli.client.errors import ClusterError
from ddpjob_cli.client.watch import Say
from ddpjob_cli.describe import job as describe
from ddpjob_cli.describe import table
from ddpjob_operator.failures.redaction import clean
from ddpjob_operator.job import api, yamlvalues


def of_jobs(found: Sequence[Raw], form: str, *, one: bool, namespaces: bool) -> str:
    """Jobs in a form of `-o`; one: the job itself and not a list. JSON and YAML are as the API server has them,
    without managedFields, which are longer than all the rest."""
    if form == "name":
        return "".join(f"{api.KIND.lower()}.{api.GROUP}/{raw['metadata']['name']}\n" for raw in found)
    if form in ("json", "yaml"):
        found = [_without_managed_fields(raw) for raw in found]
        return _document(found[0] if one else {"apiVersion": "v1", "kind": "List", "items": list(found)}, form)
    return _text(table.table(found, _now(), wide=form == "wide", namespaces=namespaces))


def _without_managed_fields(raw: Raw) -> Raw:
    metadata = {name: value for name, value in raw["metadata"].items() if name != "managedFields"}
    return {**raw, "metadata": metadata}


def in_full(cluster: Cluster, stored: jobs.Stored, say: Say) -> str:
    """What describe shows; where the right to see pods or Events is missing, it says so and leaves them out."""
    now, name = _now(), stored.job.metadata.name
    lines = describe.describe(stored.job, stored.created, now)
    try:
        pods = [jobs.pod_line(pod, stored.trainer) for pod in jobs.pods(cluster, name)]
        lines += describe.pod_lines(pods)
    except ClusterError as error:
        say(f"pods are not shown: {error}")
    try:
        events = jobs.events(cluster, stored)
        if events:
            lines += ["", "Events:", *(f"  {line}" for line in describe.event_lines(events, now))]
    except ClusterError as error:
        say(f"Events are not shown: {error}")
    return _text(lines)


def of_events(events: Sequence[describe.EventLine]) -> str:
    """A table of Events."""
    return _text(describe.event_lines(events, _now()))


def documents(bodies: Sequence[Raw]) -> str:
    """Objects as YAML documents, without anchors."""
    return "---\n".join(_document(body, "yaml") for body in bodies)


def _document(body: Raw, form: str) -> str:
    if form == "json":
        return json.dumps(body, indent=2, ensure_ascii=False) + "\n"
    import yaml

    class Dumper(yaml.SafeDumper):
        """Without anchors: kubectl reads them, people do not."""

        def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002
            return True

    Dumper.add_representer(str, yamlvalues.represent)
    text: str = yaml.dump(body, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=10_000)
    return text


def _text(lines: Sequence[str]) -> str:
    return "".join(f"{clean(line)}\n" for line in lines)


def _now() -> dt.datetime:
    return dt.datetime.now(dt.timezone.utc)
