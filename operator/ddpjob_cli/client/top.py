"""Lines of `ddpjob top`: the state and progress of all jobs."""

from __future__ import annotations

import contextlib
import datetime as dt
import time

from ddpjob_cli.client import jobs
from ddpjob_cli.client.connection import Cluster, Raw
from ddpjob_cli.client.errors import NoAnswerError
from ddpjob_cli.describe import table
from ddpjob_operator.failures.redaction import clean

SECONDS = 2.0
# Sort running jobs first and ended jobs last.
_ORDER = ("Running", "Restarting", "Failing", "Starting", "Pending", None, "Suspended", "Failed", "Succeeded")


def lines(cluster: Cluster, *, all_namespaces: bool) -> list[str]:
    """Return the number of jobs in each state, then the table."""

    def rank(raw: Raw) -> int:
        state = (raw.get("status") or {}).get("state")
        return _ORDER.index(state) if state in _ORDER else len(_ORDER)

    found = sorted(jobs.items(cluster, all_namespaces=all_namespaces), key=rank)
    states = [(raw.get("status") or {}).get("state") for raw in found]
    counts = ", ".join(f"{states.count(s)} {s or 'new'}" for s in _ORDER if s in states)
    head = f"{len(found)} DDPJobs: {counts}" if found else "no DDPJobs"
    rows = table.table(found, dt.datetime.now(dt.timezone.utc), namespaces=all_namespaces) if found else []
    return [clean(line) for line in (head, *rows)]


def show(cluster: Cluster, *, all_namespaces: bool) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    shown = lines(cluster, all_namespaces=all_namespaces)
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            rows = Text("\n".join(shown[: max(2, console.height - 1)]), no_wrap=True, overflow="ellipsis")
            live.update(rows, refresh=True)
            time.sleep(SECONDS)
            try:
                shown = lines(cluster, all_namespaces=all_namespaces)
            except NoAnswerError as error:
                shown = [clean(str(error)), *shown[1:]]
