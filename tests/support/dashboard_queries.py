"""The queries of the chart's dashboards, with Grafana's variables filled in."""

import json
import re
from pathlib import Path

FILES = Path(__file__).parents[2] / "charts" / "ddpjob-operator" / "files"
DASHBOARDS = sorted((FILES / "dashboards").glob("*.json"))


def queries(dashboard: Path) -> dict[str, str]:
    """Return the queries by panel and legend, with Grafana's variables filled in."""
    panels = json.loads(dashboard.read_text())["panels"]
    found = {f"{p['title']}: {t['legendFormat']}": t["expr"] for p in panels for t in p["targets"]}
    filled = {"$__rate_interval": "1m", "$namespace": "default", "$job_name": "digits"}
    return {name: _filled(query, filled) for name, query in found.items()}


def _filled(query: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        query = query.replace(name, value)
    return query


# Only trainings that report have these series; tests/unit/test_metrics_meter.py tests them.
OF_REPORTS = re.compile(
    "ddpjob_job_(step|steps_wanted|saved_step|samples_per_second|progress_timestamp_seconds)\\b"
    '|ddpjob_restart_seconds_bucket{until="first_step"}'
)
