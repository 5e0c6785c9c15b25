"""`ddpjob run --metrics-file`: write the operator's metrics for node-exporter's textfile collector."""

from __future__ import annotations

import datetime as dt
import time
from importlib import metadata
from pathlib import Path

from ddpjob_cli.local.run_files import files
from ddpjob_operator.job import api
from ddpjob_operator.metrics.meter import Meter, MeteredJob, Moment
from ddpjob_operator.metrics.of_change import Restart
from ddpjob_operator.observed.reports import AgentReport

# seconds between writes; files are usually scraped every 15 s or less often
AGAIN_SECONDS = 5.0


class MetricsFile:
    def __init__(self, path: Path, job: api.DDPJob) -> None:
        self._path = path
        self._namespace, self._name, self._uid = job.metadata.namespace, job.metadata.name, job.metadata.uid
        self._meter = Meter()
        self._restart: Restart | None = None
        self._written_at = float("-inf")

    def changed(self, old: api.Status, new: api.Status, now: dt.datetime, agent: AgentReport | None) -> None:
        self._restart = self._meter.changed(old, new, now, self._restart, agent)
        if new.state != old.state or time.monotonic() - self._written_at >= AGAIN_SECONDS:
            self.write(new, now)

    def write(self, status: api.Status, now: dt.datetime) -> None:
        self._written_at = time.monotonic()
        jobs = [MeteredJob(self._namespace, self._name, self._uid, status)]
        text, _ = self._meter.text(Moment(now, jobs, metadata.version("ddpjob")), openmetrics=False)
        files.write_atomically(self._path, text)
