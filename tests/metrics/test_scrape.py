"""A real Prometheus scrapes an operator process that uses a model of an API server, to find mistakes in queries. The
jobs start, restart and end, so that each histogram has data."""

import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from clusters import Operator
from dashboard_queries import DASHBOARDS, FILES, OF_REPORTS, queries
from free_port import free_port
from model_server import ModelServer
from prometheus import Prometheus, needs_prometheus, until
from worlds import manifest

from ddpjob_operator.metrics import names

pytestmark = needs_prometheus


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Yield a Prometheus that has scraped an operator while jobs started, failed and ended."""
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    settings = {"DDPJOB_METRICS_PORT": str(port), "DDPJOB_LOG_LEVEL": "DEBUG", "DDPJOB_LOG_FORMAT": "json"}
    target = f"127.0.0.1:{port}"
    with (
        ModelServer() as server,
        Operator(server, **settings) as operator,  # type: ignore[arg-type]
        Prometheus(folder, target, FILES / "rules.yaml") as prometheus,
    ):
        try:
            until(lambda: prometheus.query("ddpjob_operator_leads == 1"), "the operator is scraped")
            live(server, prometheus)
            yield prometheus
        finally:
            print(operator.log, file=sys.stderr)


def live(server: ModelServer, prometheus: Prometheus) -> None:
    """Run three jobs: one fails once and trains again, one ends, and one is deleted."""
    for name in ("digits", "ends", "deleted"):
        server.apply(manifest(name))
        until(lambda name=name: {f"{name}-1-0", f"{name}-1-1"} <= set(server.pods()), f"{name}: pods")
        server.runs(f"{name}-1-0", f"{name}-1-1")
        until(lambda name=name: server.status(name).get("state") == "Running", f"{name} runs")
    until(lambda: prometheus.query('ddpjob_job_state{job_name="deleted"}'), "its series is there")
    server.delete_job("deleted")
    server.exits("digits-1-1", code=3)
    until(lambda: {"digits-2-0", "digits-2-1"} <= set(server.pods()), "the group starts again")
    server.runs("digits-2-0", "digits-2-1")
    until(lambda: server.status("digits").get("state") == "Running", "digits runs again")
    for pod in ("ends-1-0", "ends-1-1"):
        server.exits(pod, code=0)
    until(lambda: server.status("ends").get("state") == "Succeeded", "ends has ended")
    began = prometheus.query("max(timestamp(ddpjob_operator_leads))")[0]["value"][0]
    until(lambda: prometheus.query(f"max(timestamp(ddpjob_operator_leads)) > {began + 4}"), "four more scrapes")


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_every_query_of_a_dashboard_gives_data(scraped: Prometheus, dashboard: Path) -> None:
    """Each query must give data, because a panel without data looks like a cluster without problems."""
    asked = {name: query for name, query in queries(dashboard).items() if not OF_REPORTS.search(query)}
    assert len(asked) > 5
    empty = asked
    for _ in range(20):
        empty = {name: query for name, query in empty.items() if not scraped.query(query)}
        if not empty:
            break
        time.sleep(1)  # a rate needs at least two scrapes
    assert empty == {}
    for name, query in queries(dashboard).items():
        assert isinstance(scraped.query(query), list), name


def rules() -> dict[str, str]:
    groups = yaml.safe_load((FILES / "rules.yaml").read_text())["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


@pytest.mark.parametrize("alert", sorted(rules()))
def test_every_name_and_label_in_an_alert_is_served_by_the_operator(scraped: Prometheus, alert: str) -> None:
    """The operator must serve each name in an alert. Otherwise the alert never fires."""
    for selector in re.findall(r"\b((?:ddpjob|controller|workqueue|rest)_\w+(?:\{[^}]*\})?)", rules()[alert]):
        if OF_REPORTS.search(selector) or selector.startswith("ddpjob_job_state{"):
            selector = selector.partition("{")[0]
        selector = selector.replace('code=~"5..|429|<error>",', "")
        if not OF_REPORTS.search(selector):
            assert scraped.query(selector), selector


def test_no_alert_fires_while_all_is_well(scraped: Prometheus) -> None:
    assert [a["labels"]["alertname"] for a in scraped.get("alerts")["alerts"] if a["state"] == "firing"] == []
    groups = scraped.get("rules")["groups"]
    assert {rule["health"] for group in groups for rule in group["rules"]} == {"ok"}


def test_the_series_of_a_deleted_job_end(scraped: Prometheus) -> None:
    assert scraped.query('{job_name="digits"}')
    assert scraped.query('{job_name="deleted"}') == []
    assert scraped.query('sum(ddpjob_jobs{namespace="default"})')[0]["value"][1] == "2"


def test_the_restart_was_counted_and_timed(scraped: Prometheus) -> None:
    (restarts,) = scraped.query('ddpjob_restarts_total{class="application"} > 0')
    assert (restarts["metric"]["scope"], restarts["value"][1]) == ("group", "1")
    (job,) = scraped.query('ddpjob_job_attempts_total{job_name="digits"}')
    assert job["value"][1] == "2"
    assert scraped.query('ddpjob_restart_seconds_count{scope="group",until="running"}')[0]["value"][1] == "1"


def test_prometheus_knows_the_type_and_the_help_of_every_metric(scraped: Prometheus) -> None:
    known = scraped.get("metadata")
    for metric in names.ALL:
        if metric.name in known:
            assert known[metric.name][0]["help"] == metric.help
    assert {m.name for m in names.OF_OPERATOR if m.kind == "histogram"} <= known.keys()


def test_promtool_accepts_the_rules_and_the_served_metrics(scraped: Prometheus) -> None:
    checked = subprocess.run(["promtool", "check", "rules", FILES / "rules.yaml"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    target = scraped.get("targets")["activeTargets"][0]["scrapeUrl"]
    with urllib.request.urlopen(target, timeout=10) as answer:
        served = answer.read()
    linted = subprocess.run(["promtool", "check", "metrics"], input=served, capture_output=True, timeout=60)
    said = [line for line in linted.stderr.decode().splitlines() if "ddpjob" in line]
    assert said == []
