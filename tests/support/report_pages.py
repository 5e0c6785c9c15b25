"""Reports of a run, and their elements."""

import datetime as dt
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from worlds import START, UID

from ddpjob_cli.local.run_files.history import Facts, History
from ddpjob_cli.local.run_files.report import page
from ddpjob_cli.local.run_files.runs import Run
from ddpjob_operator.job import api

FACTS = Facts(job="digits", run=UID, started=START, nodes=2, nproc_per_node=1, ranks_follow_nodes=True, backend="gloo")
HOSTILE = "</script></style></title><script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;\x1b[31m\0"
VOID = {"meta", "br"}


def at(seconds: float) -> dt.datetime:
    return START + dt.timedelta(seconds=seconds)


def failure(attempt: int, message: str = "rank 1 (node 1) was killed by SIGKILL at step 40") -> api.FailureLine:
    return api.FailureLine(attempt=attempt, message=message, time=at(60), failure_class="application", node="vm")


def status(seconds: float, step: int, attempt: int, state: Any = "Running", **others: Any) -> api.Status:
    progress = api.Progress(
        step=step,
        total_steps=100,
        attempt=attempt,
        samples_per_second=512.5,
        metrics={"loss": f"{2 / (1 + step):.5f}", "params": "fa68aa27"},
        updated=at(seconds),
    )
    return api.Status(state=state, attempt=attempt, progress=progress, **others)


def report(folder: Path, message: str = "rank 1 failed", log: str = "the end of the log") -> tuple[Run, History]:
    """Return a run of 100 steps with its history: the run failed once at step 40 and resumed at step 31."""
    history = History()
    for step in range(1, 41):
        history.take(status(10 + step, step, 1), START, at(10 + step))
    history.take(status(50, 40, 1, "Restarting", message=message), START, at(60))
    again = {"attempt_time": at(61), "failures": [failure(1, message)]}
    history.take(api.Status(state="Running", attempt=2, **again), START, at(62))
    for step in range(31, 101):
        history.take(status(40 + step, step, 2, **again), START, at(40 + step))
    last = api.JobFailure(attempt=1, rank=1, node_rank=1, time=at(60), exception=message, log_tail=log)
    spent = api.Goodput(productive_seconds=100, starting_seconds=20, restarting_seconds=10, lost_steps=10, ratio=0.769)
    done = {"goodput": spent, "restarts": api.Restarts(application=1, total=1), "last_failure": last}
    ended = status(140, 100, 2, "Succeeded", **again, **done)
    history.take(ended, START, at(141))
    return Run(folder, FACTS, ended, running=False), history


def shown(folder: Path, message: str = "rank 1 failed", log: str = "the end of the log") -> str:
    return page(*report(folder, message, log), at(141))


class Parsed(HTMLParser):
    """The elements of a page with their attributes, and its text. Fails if elements are not closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.text += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)
