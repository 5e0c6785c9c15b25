"""Write a Grafana dashboard of the chart: `python tools/dashboards.py ddpjob-fleet`.

A panel is one or two lines here. In Grafana's JSON it is forty lines, of which only three differ between panels.
"""

from __future__ import annotations

import json
import sys
from typing import Any, NamedTuple

RATE = "[$__rate_interval]"
OF_JOB = '{namespace="$namespace",job_name="$job_name"}'
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


class Panel(NamedTuple):
    """One graph. queries: PromQL queries by legend."""

    title: str
    queries: dict[str, str]
    unit: str = "short"
    stacked: bool = False
    width: int = 8
    kind: str = "timeseries"


def _quantiles(metric: str, more: str = "", by: str = "scope") -> dict[str, str]:
    buckets = f"sum by (le, {by}) (rate({metric}_bucket{more}{RATE}))"
    return {f"{{{{{by}}}}} p{q}": f"histogram_quantile(0.{q}, {buckets})" for q in (50, 90)}


def _job(metric: str, more: str = "") -> str:
    return metric + OF_JOB.replace("}", f",{more}}}" if more else "}")


FLEET = (
    Panel("Jobs by state", {"{{state}}": "sum by (state) (ddpjob_jobs)"}, stacked=True),
    Panel(
        "Nodes",
        {"wanted": "sum(ddpjob_job_nodes)", "ready": "sum(ddpjob_job_nodes_ready)"},
    ),
    Panel(
        "Goodput",
        {
            "of all time": f'sum(rate(ddpjob_seconds_total{{spent="productive"}}{RATE}))'
            f" / sum(rate(ddpjob_seconds_total{RATE}))"
        },
        "percentunit",
    ),
    Panel(
        "Where the time of jobs goes",
        {"{{spent}}": f"sum by (spent) (rate(ddpjob_seconds_total{RATE}))"},
        stacked=True,
        width=12,
    ),
    Panel(
        "Goodput by job",
        {
            "{{namespace}}/{{job_name}}": "sum by (namespace, job_name) "
            f'(rate(ddpjob_job_seconds_total{{spent="productive"}}{RATE}))'
        },
        "percentunit",
        width=12,
    ),
    Panel(
        "Restarts by class and scope",
        {"{{class}} {{scope}}": "sum by (class, scope) (increase(ddpjob_restarts_total[1h]))"},
        stacked=True,
    ),
    Panel("Attempts begun", {"an hour": "sum(increase(ddpjob_attempts_total[1h]))"}),
    Panel(
        "Ended jobs",
        {"{{state}} {{reason}}": "sum by (state, reason) (increase(ddpjob_jobs_finished_total[1h]))"},
        stacked=True,
    ),
    Panel("From a failure until it is known", _quantiles("ddpjob_failure_detection_seconds"), "s"),
    Panel(
        "From a failure to the next step",
        _quantiles("ddpjob_restart_seconds", '{until="first_step"}'),
        "s",
    ),
    Panel("From the start to nodes and first step", _quantiles("ddpjob_start_seconds", by="until"), "s"),
    Panel(
        "Steps",
        {
            "made": f"sum(rate(ddpjob_steps_total{RATE}))",
            "to be made again": f"sum(rate(ddpjob_lost_steps_total{RATE}))",
        },
        "ops",
    ),
    Panel("Leader", {"{{instance}}": "ddpjob_operator_leads", "lease {{name}}": "leader_election_master_status"}),
    Panel("Version", {"{{version}}": "count by (version) (ddpjob_operator_info)"}),
    Panel("Queue: keys that wait", {"{{name}}": "sum by (name) (workqueue_depth)"}),
    Panel(
        "Queue: how long",
        {
            "{{name}} oldest now": "max by (name) (ddpjob_queue_oldest_seconds)",
            **_quantiles("workqueue_queue_duration_seconds", by="name"),
            "{{name}} longest at work": "max by (name) (workqueue_longest_running_processor_seconds)",
        },
        "s",
    ),
    Panel("Work on a key", _quantiles("workqueue_work_duration_seconds", by="name"), "s"),
    Panel(
        "Queue: requests and retries",
        {
            "{{name}}": f"sum by (name) (rate(workqueue_adds_total{RATE}))",
            "{{name}} again": f"sum by (name) (rate(workqueue_retries_total{RATE}))",
        },
        "ops",
    ),
    Panel(
        "Reconcile duration",
        _quantiles("controller_runtime_reconcile_time_seconds", by="controller"),
        "s",
    ),
    Panel(
        "Reconciles",
        {
            "{{result}}": f"sum by (result) (rate(controller_runtime_reconcile_total{RATE}))",
            "errors": f"sum(rate(controller_runtime_reconcile_errors_total{RATE}))",
            "at work": "sum(controller_runtime_active_workers)",
        },
    ),
    Panel(
        "API requests",
        {"{{verb}} {{resource}} {{code}}": f"sum by (verb, resource, code) (rate(rest_client_requests_total{RATE}))"},
        "reqps",
    ),
    Panel(
        "API latency",
        _quantiles("rest_client_request_duration_seconds", '{verb!="watch"}', by="verb"),
        "s",
    ),
    Panel(
        "Watches that began again",
        {"{{resource}} {{cause}}": "sum by (resource, cause) (increase(ddpjob_watch_restarts_total[1h]))"},
    ),
    Panel("Objects in the operator's copy", {"{{resource}}": "max by (resource) (ddpjob_cache_objects)"}),
    Panel(
        "Memory of the operator",
        {"{{instance}}": "process_resident_memory_bytes and on (instance) ddpjob_operator_leads"},
        "bytes",
    ),
    Panel(
        "CPU of the operator",
        {"{{instance}}": f"rate(process_cpu_seconds_total{RATE}) and on (instance) ddpjob_operator_leads"},
    ),
)
JOB = (
    Panel(
        "State",
        {"{{ddpjob_job_state}}": f"{_job('ddpjob_job_state')} == 1"},
        kind="state-timeline",
        width=16,
    ),
    Panel("In this state for", {"": f"time() - {_job('ddpjob_job_state_timestamp_seconds')}"}, "s", kind="stat"),
    Panel(
        "Steps",
        {
            "done": _job("ddpjob_job_step"),
            "wanted": _job("ddpjob_job_steps_wanted"),
            "saved": _job("ddpjob_job_saved_step"),
        },
        width=12,
    ),
    Panel("Steps a second", {"": f"deriv({_job('ddpjob_job_step')}{RATE})"}, "ops", width=6),
    Panel("Samples a second", {"": _job("ddpjob_job_samples_per_second")}, "ops", width=6),
    Panel(
        "Where the time goes",
        {"{{spent}}": f"rate({_job('ddpjob_job_seconds_total')}{RATE})"},
        "percentunit",
        stacked=True,
        width=12,
    ),
    Panel(
        "Goodput so far",
        {
            "": f"sum({_job('ddpjob_job_seconds_total', 'spent=' + chr(34) + 'productive' + chr(34))})"
            f" / sum({_job('ddpjob_job_seconds_total')})"
        },
        "percentunit",
        kind="stat",
        width=6,
    ),
    Panel("Steps made again", {"": _job("ddpjob_job_lost_steps_total")}, kind="stat", width=6),
    Panel("Restarts", {"{{class}}": _job("ddpjob_job_restarts_total")}, stacked=True),
    Panel("Attempts", {"": _job("ddpjob_job_attempts_total")}),
    Panel("Nodes", {"wanted": _job("ddpjob_job_nodes"), "ready": _job("ddpjob_job_nodes_ready")}),
    Panel("Since the last report", {"": f"time() - {_job('ddpjob_job_progress_timestamp_seconds')}"}, "s"),
)
DASHBOARDS = {"ddpjob-fleet": ("DDPJobs", FLEET), "ddpjob-job": ("DDPJob", JOB)}


def dashboard(uid: str) -> dict[str, Any]:
    """Return the dashboard in the format that Grafana imports."""
    title, panels = DASHBOARDS[uid]
    return {
        "uid": uid,
        "title": title,
        "tags": ["ddpjob"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": _variables(of_job=panels is JOB)},
        "panels": _placed(panels),
    }


def _variables(*, of_job: bool) -> list[dict[str, Any]]:
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
    if not of_job:
        return [source]
    asked = {
        "namespace": "label_values(ddpjob_job_state, namespace)",
        "job_name": 'label_values(ddpjob_job_state{namespace="$namespace"}, job_name)',
    }
    return [
        source,
        *(
            {"name": name, "type": "query", "datasource": SOURCE, "query": query, "refresh": 2, "sort": 1}
            for name, query in asked.items()
        ),
    ]


def _placed(panels: tuple[Panel, ...]) -> list[dict[str, Any]]:
    placed, x, y = [], 0, 0
    for number, panel in enumerate(panels, 1):
        if x + panel.width > 24:
            x, y = 0, y + 8
        placed.append(_panel(panel, number, x, y))
        x += panel.width
    return placed


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    custom = {"stacking": {"mode": "normal"}, "fillOpacity": 20} if panel.stacked else {}
    return {
        "id": number,
        "title": panel.title,
        "type": panel.kind,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": 8},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "targets": [
            {"refId": chr(65 + i), "expr": query, "legendFormat": legend, "datasource": SOURCE}
            for i, (legend, query) in enumerate(panel.queries.items())
        ],
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(sys.argv[1]), indent=1))
