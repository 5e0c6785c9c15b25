"""Write docs/metrics.md from the table of metrics (ddpjob_operator/metrics/names.py) and the chart's alerts."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from ddpjob_operator.kube.ports.bounded_server import REQUEST_SECONDS
from ddpjob_operator.metrics import job_lines, names

RULES = Path(__file__).parents[1] / "charts" / "ddpjob-operator" / "files" / "rules.yaml"
INTRO = f"""\
<!-- Written from metrics/names.py and the alerts by `python tools/metrics_page.py`. Change them, then run it again. -->
# Metrics

Each operator pod serves `/metrics` on port 8082 (`metrics.port` of the chart; `metrics.enabled=false`: none):
OpenMetrics for a scraper that accepts it, else Prometheus' older text. Names and labels follow controller-runtime and
client-go where these have one, so dashboards for them show this operator as well; the others begin with `ddpjob_`.

## Set-up

With the Prometheus operator and Grafana's sidecar, both off by default:

```yaml
metrics:
  serviceMonitor: {{enabled: true, labels: {{release: prometheus}}}}
  prometheusRule: {{enabled: true, labels: {{release: prometheus}}}}
  dashboards: {{enabled: true}}
```

`labels` are what your Prometheus selects by. Without the Prometheus operator, the pods have a port named `metrics`;
keep `honor_labels: true`, because `namespace` is the job's. The alerts are `charts/ddpjob-operator/files/rules.yaml`,
for `rule_files`, and the dashboards beside them can be imported as they are. With `networkPolicy.enabled=true`, name
the scraper in `networkPolicy.metricsFrom`.

Whoever reaches the port reads the names of jobs and namespaces, as with kube-state-metrics. `metrics.perJob=false`
leaves out all series of single jobs; jobs are then still counted by namespace and state. Without them the alerts that
name a job never fire, and the dashboard of a job, "Nodes" and "Goodput by job" are empty.

A local run keeps the same names in a file for node-exporter's textfile collector (`--collector.textfile.directory`):
`ddpjob run job.yaml --metrics-file /var/lib/node_exporter/ddpjob.prom`. It has no series of the operator.

## What the series promise

- The operator that leads serves what concerns jobs, and a standby only its own queue, requests and copies. So a sum
  over all pods counts each job once. Of two releases the one that acts for a job counts it, as long as it does.
- A series of a job ends with the job, {job_lines.ENDED_SECONDS / 60:.0f} minutes after the job has ended, or when
  another operator leads. It is made from `status` at each scrape, so a new leader goes on with the same values.
- The seconds of a job never fall while one operator leads: where a stall or a failure is found later than it began,
  `productive` stays until what the status counts is more.
- No label is a pod, a node, a uid or a message. Values of labels are Kubernetes names, of at most {names.LABEL_MAX}
  characters, or words of a fixed list.
- Counters and histograms without `_job_` count from the start of the process that leads: use `increase` and `rate`.
  The seconds of all jobs are counted when a job changes or is deleted and at each scrape, so a job that begins and ends
  between two scrapes is in them. What passes between the end of one leader and the begin of the next is not.
- The name of a job is `job_name`, because Prometheus itself sets `job` on every series.
- A scraper that does not read its answer within {REQUEST_SECONDS:.0f} s is cut off. Whoever asks more often than once a
  second gets the same answer again.
- 1,000 jobs are 25,000 lines, which take a tenth of a second to write, in a thread beside the reconciles.
"""
SPENT = """\
`spent` is `productive` (all nodes ran and steps were made), `idle` (all nodes ran and no step came), `unreported` (all
nodes ran and no step was ever reported), `starting`, or `restarting` (from a failure until all nodes ran again). Time
that a job is suspended is not counted. `scope` is what was started again: `rank` (ranks in the pods that they have,
by `ddprun`), `pod` (a lost pod alone), or `group` (all pods).
"""
KINDS = {"stateset": "gauge", "info": "gauge"}
SECTIONS = (
    ("Jobs together", names.OF_ALL_JOBS, SPENT),
    ("A job", names.OF_A_JOB, "Each has the labels `namespace` and `job_name`.\n"),
    (
        "The operator",
        names.OF_OPERATOR,
        "Beside them those of prometheus-client: `process_cpu_seconds_total`, `process_resident_memory_bytes`.\n",
    ),
)


def to_markdown() -> str:
    """Return docs/metrics.md."""
    return "\n".join([INTRO, *(line for section in SECTIONS for line in _section(*section)), *_alerts()])


def _section(title: str, metrics: tuple[names.Metric, ...], more: str) -> Iterator[str]:
    yield from (f"## {title}", "", more)
    yield from ("| Name | Kind | Labels | What it is |", "| --- | --- | --- | --- |")
    for metric in metrics:
        labels = [name for name in metric.labels if name not in names.JOB or metrics is not names.OF_A_JOB]
        labels += [metric.name] if metric.kind == "stateset" else []
        kind = KINDS.get(metric.kind, metric.kind)
        yield f"| `{metric.shown}` | {kind} | {', '.join(f'`{name}`' for name in labels)} | {_escaped(metric.help)} |"
    yield ""


def _alerts() -> Iterator[str]:
    yield from ("## Alerts", "", "| Alert | After | Says | Then |", "| --- | --- | --- | --- |")
    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            said = (_escaped(rule["annotations"][name]) for name in ("summary", "description"))
            yield f"| `{rule['alert']}` ({rule['labels']['severity']}) | {rule.get('for', '0m')} | {' | '.join(said)} |"


def _escaped(text: str) -> str:
    """Escape text for a table's cell. Label placeholders of alerts become capital words, such as NAMESPACE."""
    text = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: found[1].upper(), text)
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.stdout.write(to_markdown() + "\n")
