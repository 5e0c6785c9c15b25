"""The report of a run from its folder, for `ddpjob report` and `ddpjob run --report`."""

from __future__ import annotations

import datetime as dt

from ddpjob_cli.local.kept import report_page, runs
from ddpjob_cli.local.kept.history import History

LOGS_MAX = 200


def page(run: runs.Run, history: History, now: dt.datetime) -> str:
    """One HTML file. The logs are linked where they lie; of more than `LOGS_MAX` the last ones."""
    took = runs.took(run, now)
    last = history.changes[-1].time if history.changes else run.facts.started
    ended = last if took is None else run.facts.started + dt.timedelta(seconds=took)
    paths = [path for attempt, nodes in run.attempts().items() for node in nodes for path in run.logs(attempt, node)]
    logs = [(path.name, path.absolute().as_uri()) for path in paths[-LOGS_MAX:]]
    return report_page.page(report_page.ReportPage(run.facts, run.status, run.state, history, ended, logs))
