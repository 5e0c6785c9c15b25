"""The table of `ddpjob get`, with the columns of `kubectl get ddp`."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any

from ddpjob_cli.describe.figures import columns
from ddpjob_operator.job import bounds, wording
from ddpjob_operator.job.crd import COLUMNS

Raw = Mapping[str, Any]


def table(jobs: Sequence[Raw], now: dt.datetime, *, wide: bool = False, namespaces: bool = False) -> list[str]:
    """Return a header and a row per job. jobs: as the API server returns them. namespaces: add their column."""
    shown = [column for column in COLUMNS if wide or not column[3]]
    head = [*(["NAMESPACE"] if namespaces else []), "NAME", *(name.upper() for name, *_ in shown)]
    rows = [head]
    for raw in jobs:
        metadata = raw["metadata"]
        first = [*([metadata.get("namespace", "")] if namespaces else []), metadata["name"]]
        rows.append([*first, *(_cell(raw, kind, path, now) for _, kind, path, _ in shown)])
    return columns(rows)


def _cell(raw: Raw, kind: str, path: str, now: dt.datetime) -> str:
    value: Any = raw
    for part in path.strip(".").split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if kind == "date":
        time = bounds.time(value)
        return wording.duration((now - time).total_seconds()) if time else ""
    return "" if value is None else str(value).replace("\n", " ")
