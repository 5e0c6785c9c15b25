"""Each alert fires on its fault, and no other alert does. An operator and its jobs live for hours in virtual time, are
scraped every 30 s, and Prometheus' own rule engine judges (`promtool test rules`)."""

from __future__ import annotations

import asyncio
import datetime as dt
import re
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from dashboard_queries import DASHBOARDS, OF_REPORTS, queries
from prometheus import needs_prometheus
from slow_server import SlowServer, Town, play
from worlds import START, World, digits

from ddpjob_operator.kube.api.availability import Availability
from ddpjob_operator.kube.api.client import ApiError, Page, RequestLimits
from ddpjob_operator.kube.api.runtime import Runtime
from ddpjob_operator.kube.ports.exposition import read
from ddpjob_operator.kube.watch.reflector import Reflector
from ddpjob_operator.metrics.meter import Meter, MeteredJob, Moment
from ddpjob_operator.metrics.of_change import Restart

ROOT = Path(__file__).parents[2]
RULES = ROOT / "charts" / "ddpjob-operator" / "files" / "rules.yaml"
ALERTS = {rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}
QUERIES = {name: query for file in DASHBOARDS for name, query in queries(file).items()}
USED = set(re.findall(r"(?:ddpjob|controller|workqueue|rest)_\w+", "".join([RULES.read_text(), *QUERIES.values()])))
SECONDS = 30
"""Seconds between two scrapes, as in the chart's ServiceMonitor."""

pytestmark = [needs_prometheus, pytest.mark.timeout(900)]  # CPU bound: a busy machine needs longer


class History:
    """All scrapes of a target, in order."""

    def __init__(self) -> None:
        self.scrapes = 0
        self._values: dict[str, dict[int, float]] = {}

    def take(self, text: bytes) -> None:
        """Add the metrics of one scrape."""
        for line in text.decode().splitlines():
            series, _, value = line.rpartition(" ")
            if not line.startswith("#") and (name := series.partition("{")[0]) in USED:
                # Timestamps are shifted, because promtool's clock starts at 0.
                shift = START.timestamp() if name.endswith("_timestamp_seconds") else 0.0
                self._values.setdefault(series, {})[self.scrapes] = float(value) - shift
        self.scrapes += 1

    def nothing(self) -> None:
        """Record that the target did not answer."""
        self.scrapes += 1

    def fired(self, folder: Path) -> set[str]:
        """Return the names of all alerts that have fired."""
        asked = f'group by (alertname) (max_over_time(ALERTS{{alertstate="firing"}}[{self.scrapes * SECONDS}s]))'
        return set(re.findall(r'alertname="(\w+)"', self.result(folder, asked)))

    def _written(self, values: dict[int, float]) -> list[str]:
        """Return a series in promtool's notation. As in Prometheus, it is stale from the first scrape that lacks it."""
        texts, before = [], False
        for number in range(self.scrapes):
            texts.append(repr(values[number]) if number in values else "stale" if before else "_")
            before = number in values
        return texts

    def result(self, folder: Path, query: str) -> str:
        """Return a query's result at the last scrape, as promtool prints it: "nil" for no result."""
        series = [{"series": name, "values": " ".join(self._written(v))} for name, v in self._values.items()]
        wish = {
            "expr": query,
            "eval_time": f"{self.scrapes * SECONDS}s",
            "exp_samples": [{"labels": "{}", "value": -1}],
        }
        test = {
            "rule_files": [str(RULES)],
            "evaluation_interval": f"{SECONDS}s",
            "tests": [{"interval": f"{SECONDS}s", "input_series": series, "promql_expr_test": [wish]}],
        }
        file = folder / "test.yaml"
        file.write_text(yaml.safe_dump(test))
        done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True, timeout=120)
        # The expectation is wrong on purpose: promtool prints the real result only for a failed test.
        got = re.search(r"got:(.*)", done.stdout + done.stderr, re.S)
        assert got, done.stdout + done.stderr
        return got[1].strip()


# ---------------------------------------------------------------- jobs


class Watched:
    """A job whose status is scraped regularly."""

    def __init__(self, world: World, name: str = "digits") -> None:
        self.world = world
        self.history = History()
        self.meter = Meter()
        self._name = name
        self._restart: Restart | None = None
        self._due = world.now
        self.scrape()

    @property
    def step(self) -> int:
        """The last reported step."""
        progress = self.world.status.progress
        return 0 if progress is None else progress.step

    def settle(self) -> Watched:
        for _ in range(10):
            old = self.world.status
            todo = self.world.step()
            if todo.status is not None:
                self._restart = self.meter.changed(old, todo.status, self.world.now, self._restart, self.world.agent)
            if todo.status is None and not todo.actions:
                return self
        raise AssertionError("still busy")

    def scrape(self) -> None:
        status = self.world.status
        moment = Moment(self.world.now, [MeteredJob("default", self._name, "uid", status)], "0.1.0", True, "ddpjob")
        self.history.take(self.meter.text(moment, openmetrics=True)[0])
        self._due = self.world.now + dt.timedelta(seconds=SECONDS)

    def wait(self, minutes: float) -> Watched:
        """Let time pass without any other event."""
        for _ in range(round(minutes * 60 / SECONDS)):
            self.world.after(SECONDS)
            self.settle().scrape()
        return self

    def trains(self, minutes: float) -> Watched:
        """Report steps at every scrape."""
        for _ in range(round(minutes * 60 / SECONDS)):
            self.world.after(SECONDS).reports_step(
                self.step + 10, total_steps=9000, samples_per_second=5.0, saved_step=1
            )
            self.settle().scrape()
        return self

    def starts(self) -> Watched:
        self.settle().world.runs(*range(self.world.job.spec.nodes))
        return self.settle()

    def fails(self, minutes_down: float = 0.5, code: int = 3, reason: str = "") -> Watched:
        """Let rank 1 fail, and start the group again after this many minutes."""
        if reason:
            self.world.evicted(1, reason)
        else:
            self.world.exits(1, code)
        self.settle().world.stops_all()
        self.settle().wait(minutes_down)
        return self.starts()


def healthy() -> Watched:
    watched = Watched(digits()).wait(1).starts().trains(60).fails().trains(60)
    watched.world.exits(0).exits(1)
    return watched.settle().wait(20)


def waits() -> Watched:
    return Watched(digits()).settle().wait(20)


def failed() -> Watched:
    watched = Watched(digits(backoffLimit=0)).wait(1).starts().trains(10)
    watched.world.exits(1, 3)
    watched.settle().world.stops_all()
    return watched.settle().wait(5)


def restarts_often() -> Watched:
    watched = Watched(digits(backoffLimit=20)).wait(1).starts().trains(5)
    for _ in range(6):
        watched.fails(1).trains(5)
    return watched


def stands_still() -> Watched:
    """Let the ranks report the same step for 20 minutes, with the detection of stalls turned off."""
    watched = Watched(digits(stall={"timeoutSeconds": 0})).wait(1).starts().trains(60)
    for _ in range(40):
        watched.world.after(SECONDS).reports_step(watched.step)
        watched.settle().scrape()
    return watched


def low_goodput() -> Watched:
    watched = Watched(digits(backoffLimit=20)).wait(1).starts().trains(10)
    for _ in range(4):
        watched.fails(25).trains(8)
    return watched


def restarts_slow() -> Watched:
    return Watched(digits()).wait(1).starts().trains(60).fails(14).trains(20)


def nodes_fail() -> Watched:
    watched = Watched(digits()).wait(1).starts().trains(5)
    for _ in range(24):
        watched.fails(0.5, reason="Evicted").trains(1.5)
    return watched


OF_JOBS: dict[Callable[[], Watched], set[str]] = {
    healthy: set(),
    waits: {"DDPJobWaits"},
    failed: {"DDPJobFailed"},
    restarts_often: {"DDPJobRestartsOften"},
    stands_still: {"DDPJobStandsStill"},
    low_goodput: {"DDPJobLowGoodput", "DDPJobRestartsSlow"},
    restarts_slow: {"DDPJobRestartsSlow"},
    nodes_fail: {"DDPJobNodesFail", "DDPJobRestartsOften"},
}


@pytest.mark.parametrize("life", OF_JOBS, ids=lambda life: life.__name__)
def test_an_alert_on_a_job_fires_only_on_its_fault(life: Callable[[], Watched], tmp_path: Path) -> None:
    """An alert must fire only on its own fault. Administrators turn off an alert that wakes them falsely."""
    assert life().history.fired(tmp_path) == OF_JOBS[life]


def trained_again() -> Watched:
    return Watched(digits(), "digits").wait(1).starts().trains(20).fails().trains(10)


def test_every_dashboard_query_on_training_reports_gives_data(tmp_path: Path) -> None:
    """Each query on reports of trainings must give data. test_scrape.py tests the other queries in a real process."""
    history = trained_again().history
    asked = {name: query for name, query in QUERIES.items() if OF_REPORTS.search(query)}
    assert len(asked) > 5
    assert [name for name, query in asked.items() if history.result(tmp_path, query) in ("nil", "")] == []


# ---------------------------------------------------------------- the operator


class Counting(SlowServer):
    """A slow API server whose answers the operator's metrics count. `refuses(verb, path)`: answer with 500."""

    def __init__(self, delay: Callable[[str, str], float]) -> None:
        super().__init__(delay)
        self.counted: Callable[..., None] = lambda *_: None
        self.refuses: Callable[[str, str], bool] = lambda _verb, _path: False

    async def _wait(self, verb: str, path: str) -> None:
        methods = {"create": "POST", "replace": "PUT", "delete": "DELETE"}
        began, code = asyncio.get_running_loop().time(), 0
        try:
            if self.refuses(verb, path):
                code = 500
                raise ApiError(500, "InternalError", "made by the test")
            await super()._wait(verb, path)
            code = 200
        finally:
            self.counted(methods.get(verb, "GET"), path, code, asyncio.get_running_loop().time() - began)


class Operated:
    """A scraped operator in virtual time."""

    def __init__(self) -> None:
        self.server = Counting(lambda _verb, _path: 0.05)
        self.town = Town(self.server)
        self.meter = self.town.operator.meter
        self.server.counted = self.meter.answered
        self.history = History()

    async def wait(self, minutes: float, *, answers: bool = True) -> None:
        """Scrape regularly, and edit a job before each scrape so that the operator has work."""
        for number in range(round(minutes * 60 / SECONDS)):
            self.town.apply("team", "busy", 1, suspend=True, backoffLimit=number)
            await asyncio.sleep(SECONDS)
            if answers:
                moment = read(self.town.operator.snapshot())
                self.history.take(self.meter.text(moment, openmetrics=True)[0])
            else:
                self.history.nothing()


async def all_is_well(operated: Operated) -> None:
    await operated.wait(30)


async def is_gone(operated: Operated) -> None:
    await operated.wait(10)
    await operated.wait(10, answers=False)


async def stands_by(operated: Operated) -> None:
    """Let the operator lose its Lease. No other operator takes the Lease."""
    await operated.wait(10)
    operated.town.operator.leads = False
    await operated.wait(10)


async def cannot_write(operated: Operated) -> None:
    await operated.wait(10)
    operated.server.refuses = lambda verb, path: verb == "replace"
    operated.town.apply("team", "new", 2)
    await operated.wait(30)


async def hangs(operated: Operated) -> None:
    """Let a webhook hang, with a time limit of the request that is much too long."""
    await operated.wait(10)
    operated.server.limits = RequestLimits(request_seconds=1200.0)
    operated.server.delay = lambda verb, path: 1200.0 if "/stuck/" in path and verb == "create" else 0.05
    operated.town.apply("stuck", "digits", 2)
    await operated.wait(15)


async def is_overrun(operated: Operated) -> None:
    """Start 240 jobs in one namespace while the API server takes 40 s per request: most get no state for minutes."""
    await operated.wait(10)
    operated.server.limits = RequestLimits(request_seconds=45.0)
    operated.server.delay = lambda verb, path: 40.0 if "/full/" in path else 0.05
    for number in range(240):
        operated.town.apply("full", f"job-{number}", 1)
    await operated.wait(12)


class Closing:
    """An API server, or a proxy in front of it, that ends every watch after some seconds."""

    def __init__(self, after: float) -> None:
        self._after, self.availability = after, Availability()

    async def pages(self, path: str, selector: str = "") -> AsyncIterator[Page]:
        yield Page([], "1000")

    async def watch(self, path: str, version: str, selector: str = "") -> AsyncIterator[Any]:
        await asyncio.sleep(self._after)
        return
        yield


async def _watches(operated: Operated, after: float) -> None:
    loop = asyncio.get_running_loop()
    runtime = Runtime(clock=loop.time)
    closing: Any = Closing(after)
    reflector = Reflector(
        closing, "pods", "", "", operated.town.operator.caches.pods, runtime=runtime, meter=operated.meter
    )
    task = loop.create_task(reflector.run())
    await operated.wait(30)
    task.cancel()


async def loses_its_watch(operated: Operated) -> None:
    await _watches(operated, after=1)


async def renews_its_watch(operated: Operated) -> None:
    """Let the API server end each watch after some minutes, which is normal, so no alert may fire."""
    await _watches(operated, after=240)


OF_THE_OPERATOR: dict[Any, set[str]] = {
    all_is_well: set(),
    renews_its_watch: set(),
    is_gone: {"DDPJobNoLeader"},
    stands_by: {"DDPJobNoLeader"},
    cannot_write: {"DDPJobReconcileErrors", "DDPJobAPIErrors", "DDPJobsUnseen"},
    hangs: {"DDPJobReconcileStuck"},
    is_overrun: {"DDPJobQueueSlow", "DDPJobsUnseen"},
    loses_its_watch: {"DDPJobWatchBroken"},
}


@pytest.mark.parametrize("life", OF_THE_OPERATOR, ids=lambda life: life.__name__)
def test_an_alert_on_the_operator_fires_only_on_its_fault(life: Any, tmp_path: Path) -> None:
    found: list[History] = []

    async def story() -> None:
        operated = Operated()
        found.append(operated.history)
        await life(operated)

    play(story)
    assert found[0].fired(tmp_path) == OF_THE_OPERATOR[life]


def test_a_release_without_a_leader_fires_an_alert_even_next_to_one_with_a_leader(tmp_path: Path) -> None:
    """Each release without a leader must fire an alert, even if another release has one: the label job differs."""
    history = History()
    for _ in range(20):
        history.take(b'ddpjob_operator_leads{job="a-metrics"} 1.0\nddpjob_operator_leads{job="b-metrics"} 0.0\n')
    assert history.fired(tmp_path) == {"DDPJobNoLeader"}


def test_every_alert_has_a_scenario() -> None:
    assert set().union(*OF_JOBS.values(), *OF_THE_OPERATOR.values()) == ALERTS
