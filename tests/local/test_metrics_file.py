"""`ddpjob run --metrics-file` writes metrics of a local run for node-exporter's textfile collector."""

import re

from prometheus_client.parser import text_string_to_metric_families
from shell import Cli

from ddpjob_operator.metrics import names

FAILS_ONCE = """
import os, pathlib, sys
mark = pathlib.Path("failed")
if os.environ["RANK"] == "1" and not mark.exists():
    mark.touch()
    sys.exit(3)
"""


def test_a_restart_is_in_the_metrics_file_under_the_names_of_the_operator(cli: Cli) -> None:
    """Metrics of a local run must have the operator's names, so that a cluster's dashboard shows them."""
    cli.run("run", cli.file(FAILS_ONCE), "--metrics-file", "run.prom", code=0)
    families = list(text_string_to_metric_families((cli.folder / "run.prom").read_text()))
    values = {(s.name, *sorted(s.labels.values())): s.value for family in families for s in family.samples}
    (name,) = {s.labels["job_name"] for f in families for s in f.samples if "job_name" in s.labels}
    assert values["ddpjob_job_state", "Succeeded", "default", name] == 1
    assert values["ddpjob_job_restarts_total", "application", "default", name] == 1
    assert values["ddpjob_restarts_total", "application", "group"] == 1
    assert values["ddpjob_failure_detection_seconds_count", "group"] == 1
    known = {metric.name for metric in (*names.OF_ALL_JOBS, *names.OF_A_JOB)}
    assert {re.sub("_total$", "", family.name) for family in families} <= known
    assert [path.name for path in cli.folder.glob(".run.prom*")] == [], "no temporary file is left"


def test_a_metrics_file_that_cannot_be_written_does_not_fail_the_job(cli: Cli) -> None:
    (cli.folder / "gone").mkdir()
    script = "import shutil; shutil.rmtree('gone', ignore_errors=True)"
    done = cli.run("run", cli.file(script), "--metrics-file", "gone/run.prom")
    assert done.returncode == 0, done.stderr
    assert "--metrics-file gone/run.prom: No such file or directory; the job goes on without it" in done.stderr
