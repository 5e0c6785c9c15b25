"""The metrics that a scraper reads: each series once, in both formats, none of a deleted job, and no label of unbounded
length."""

import asyncio
import datetime as dt
import itertools
import typing
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics_parser
from slow_server import SlowServer, Town, play

from ddpjob_core import budget
from ddpjob_operator.gangs import ADAPTERS
from ddpjob_operator.job import api, reasons
from ddpjob_operator.kube.api import access
from ddpjob_operator.kube.api.client import Client
from ddpjob_operator.kube.operator import Operator
from ddpjob_operator.kube.ports.exposition import Scrape, read
from ddpjob_operator.kube.settings import OperatorSettings
from ddpjob_operator.metrics import names
from ddpjob_operator.metrics.meter import Meter, MeteredJob, Moment, QueueWaits, verb_and_resource

ROOT = Path(__file__).parents[2]
NOW = dt.datetime(2031, 3, 5, 7, 11, 13, tzinfo=dt.timezone.utc)
Series = dict[str, float]


def at(seconds: float) -> dt.datetime:
    return NOW + dt.timedelta(seconds=seconds)


def job(name: str = "digits", namespace: str = "team", created: float = -600, **status: Any) -> MeteredJob:
    return MeteredJob(namespace, name, f"uid-{namespace}-{name}", api.Status(**status), at(created))


def moment(*jobs: MeteredJob, seconds: float = 0, **more: Any) -> Moment:
    return Moment(now=at(seconds), jobs=list(jobs), version="0.1.0", **({"leads": True, "lease": "ddpjob"} | more))


def series(text: str, *, openmetrics_text: bool = True) -> Series:
    """Return the series by name and labels, as in a query; each may occur only once."""
    families = (openmetrics_parser if openmetrics_text else parser).text_string_to_metric_families(text)
    found: Series = {}
    for family in families:
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
            key = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert key not in found, key
            found[key] = sample.value
    return found


def scraped(meter: Meter, now: Moment, *, openmetrics_text: bool = True) -> Series:
    body, content_type = meter.text(now, openmetrics=openmetrics_text)
    assert content_type.startswith("application/openmetrics-text" if openmetrics_text else "text/plain")
    return series(body.decode(), openmetrics_text=openmetrics_text)


def test_jobs_are_counted_by_namespace_and_state_and_an_unused_state_is_zero() -> None:
    """An unused state must have a series with 0: an alert on a missing series never fires."""
    jobs = [job(state="Running"), job("b", state="Running"), job("c", "other", state="Failed"), job("d")]
    found = scraped(Meter(), moment(*jobs, MeteredJob("team", "e", "u", None)))
    assert found['ddpjob_jobs{namespace="team",state="Running"}'] == 2
    assert found['ddpjob_jobs{namespace="other",state="Failed"}'] == 1
    assert found['ddpjob_jobs{namespace="team",state="None"}'] == 2, "one without a state, one that cannot be read"
    assert found['ddpjob_jobs{namespace="team",state="Pending"}'] == 0


def test_both_formats_have_the_same_series() -> None:
    """OpenMetrics and the older text format must have the same series, because scrapers read either."""
    progress = api.Progress(step=5, total_steps=9, saved_step=4, samples_per_second=2.5, updated=NOW)
    now = moment(job(state="Running", state_time=NOW, progress=progress))
    assert scraped(Meter(), now) == scraped(Meter(), now, openmetrics_text=False)


def test_exactly_the_documented_names_are_served() -> None:
    meter = Meter()
    for metric in names.ALL:
        if metric.kind == "counter" and metric not in names.OF_A_JOB:
            meter.count(metric, *("x" for _ in metric.labels))
        if metric.kind == "histogram":
            meter.observe(metric, 1.0, *("x" for _ in metric.labels))
    progress = api.Progress(step=5, total_steps=9, saved_step=4, samples_per_second=2.5, updated=NOW)
    of_operator = {
        "queues": [QueueWaits(name) for name in names.QUEUES],
        "cached": [(name, 1) for name in names.CACHES],
    }
    now = moment(job(state="Running", state_time=NOW, progress=progress), **of_operator)
    body, _ = meter.text(now, openmetrics=True)
    families = list(openmetrics_parser.text_string_to_metric_families(body.decode()))
    with_samples = {(family.name, family.type) for family in families if family.samples}
    assert with_samples == {(metric.name, metric.kind) for metric in names.ALL}
    labels = {f.name: {n for s in f.samples for n in s.labels} - {"le", f.name} for f in families if f.samples}
    assert labels == {m.name: set(m.labels) for m in names.ALL if m.name in labels}


def test_the_dashboard_of_kubebuilder_has_data_in_each_panel() -> None:
    """Each panel of kubebuilder's dashboard must have data, because administrators use it for all controllers."""
    asked = {
        *("controller_runtime_active_workers", "controller_runtime_reconcile_total"),
        *("controller_runtime_reconcile_errors_total", "workqueue_depth", "workqueue_queue_duration_seconds"),
        *("workqueue_adds_total", "workqueue_unfinished_work_seconds", "workqueue_work_duration_seconds"),
        "workqueue_retries_total",
    }
    assert asked <= {metric.shown for metric in names.OF_OPERATOR}


def test_the_time_in_the_current_state_is_counted_while_it_lasts() -> None:
    running = job(state="Running", state_time=NOW, first_step_time=NOW, goodput=api.Goodput(starting_seconds=30))
    found = scraped(Meter(), moment(running, seconds=100))
    assert found['ddpjob_job_seconds_total{job_name="digits",namespace="team",spent="productive"}'] == 100
    assert found['ddpjob_job_seconds_total{job_name="digits",namespace="team",spent="starting"}'] == 30


def test_the_total_seconds_of_all_jobs_never_fall_when_jobs_are_deleted() -> None:
    """The total seconds must never fall when a job is deleted: Prometheus would add the whole value again."""
    meter, name = Meter(), 'ddpjob_seconds_total{spent="productive"}'
    one = job(state="Running", state_time=NOW, first_step_time=NOW)
    two = job("b", created=15, state="Running", state_time=at(20), first_step_time=at(20))
    assert scraped(meter, moment(one, seconds=10))[name] == 0, "the leader before this one has counted these"
    assert scraped(meter, moment(one, two, seconds=30))[name] == 20 + 10
    assert scraped(meter, moment(two, seconds=40))[name] == 40
    assert scraped(meter, moment(two, seconds=35))[name] == 40, "a clock that is set back takes nothing away"


SPENT = 'ddpjob_seconds_total{spent="productive"}'


def trained(seconds: float, created: float = 5, *, name: str = "digits", over: bool = False) -> MeteredJob:
    """Return a job that has trained since NOW + `created`. over: it ended at NOW + `seconds`."""
    goodput = api.Goodput(productive_seconds=int(seconds - created)) if over else None
    state: Any = "Succeeded" if over else "Running"
    since, first = at(seconds if over else created), at(created)
    return job(name, created=created, state=state, state_time=since, first_step_time=first, goodput=goodput)


def test_a_job_that_begins_and_ends_between_two_scrapes_is_counted() -> None:
    meter = Meter()
    meter.leads(NOW)
    meter.spends(trained(5), at(5))
    meter.spends(trained(25, over=True), at(25))
    meter.gone(trained(25, over=True), at(26))
    meter.spends(trained(0, 10, name="deleted"), at(12))
    meter.gone(trained(0, 10, name="deleted"), at(17))
    assert scraped(meter, moment(seconds=30))[SPENT] == 20 + 7
    assert meter.remembered == 0


def test_a_leader_counts_from_its_election_and_not_from_its_first_scrape() -> None:
    """A leader must count from its election: otherwise each running job lacks the time until the first scrape."""
    meter = Meter()
    meter.leads(at(100))
    running = job(state="Running", state_time=NOW, first_step_time=NOW)
    assert scraped(meter, moment(running, seconds=160))[SPENT] == 60
    assert scraped(meter, moment(running, seconds=190))[SPENT] == 90


@pytest.mark.parametrize(
    "later",
    [
        pytest.param(job(state="Running", state_time=NOW, first_step_time=NOW), id="the clock was set back"),
        pytest.param(
            job(state="Running", state_time=NOW, first_step_time=NOW, goodput=api.Goodput(idle_since=at(40))),
            id="it has made no step for a minute, as is known now",
        ),
        pytest.param(
            job(state="Restarting", state_time=at(40), goodput=api.Goodput(productive_seconds=40)),
            id="its agent says that a rank had failed a minute ago",
        ),
    ],
)
def test_the_seconds_of_one_job_never_fall(later: MeteredJob) -> None:
    """A job's seconds must never fall: increase() would add the whole value again, such as a week."""
    meter, mine = Meter(), 'ddpjob_job_seconds_total{job_name="digits",namespace="team",spent="productive"}'
    running = job(state="Running", state_time=NOW, first_step_time=NOW)
    assert scraped(meter, moment(running, seconds=100))[mine] == 100
    now = moment(later, seconds=50 if later.status == running.status else 101)
    found = scraped(meter, now)
    assert found[mine] == 100
    assert found['ddpjob_seconds_total{spent="productive"}'] == 0, "the first scrape counts nothing, and this one less"
    assert scraped(Meter(), now)[mine] < 100, "what the status alone would show"


def test_a_job_whose_status_is_temporarily_unreadable_is_not_counted_twice() -> None:
    """If a status becomes unreadable and is then repaired, the job's time must not be counted again."""
    meter, name = Meter(), SPENT
    running = job(state="Running", state_time=NOW, first_step_time=NOW)
    scraped(meter, moment(running, seconds=1000))
    scraped(meter, moment(running._replace(status=None), seconds=1010))
    assert scraped(meter, moment(running, seconds=1020))[name] == 20


WEEK = api.Goodput(productive_seconds=7 * 86400)
TRAINS = job(state="Running", state_time=NOW, first_step_time=NOW, goodput=WEEK)


@pytest.mark.parametrize(
    ("first", "counted"),
    [
        pytest.param(moment(), 30, id="its copy of the jobs is not there yet"),
        pytest.param(moment(TRAINS._replace(status=None)), 30, id="the status of the job cannot be read"),
        pytest.param(moment()._replace(jobs=None, leads=False), 0, id="it does not lead yet"),
    ],
)
def test_a_restarted_operator_does_not_recount_what_was_already_counted(first: Moment, counted: int) -> None:
    """An update of the operator must not add the whole past of all jobs to the counter."""
    meter = Meter()
    scraped(meter, first)
    assert scraped(meter, moment(TRAINS, seconds=30))[SPENT] == counted
    assert scraped(meter, moment(TRAINS, seconds=60))[SPENT] == counted + 30


def test_time_of_a_job_under_another_release_is_counted_only_by_that_release() -> None:
    meter = Meter()
    scraped(meter, moment(TRAINS))
    assert scraped(meter, moment(TRAINS, seconds=30))[SPENT] == 30
    scraped(meter, moment(seconds=60, away=[TRAINS.uid]))
    scraped(meter, moment(seconds=500, away=[TRAINS.uid]))
    assert scraped(meter, moment(TRAINS, seconds=530))[SPENT] == 30
    assert scraped(meter, moment(TRAINS, seconds=560))[SPENT] == 60


def test_all_time_of_a_new_job_is_counted() -> None:
    meter = Meter()
    scraped(meter, moment())
    new = job(created=5, state="Running", state_time=at(10), first_step_time=at(10))
    assert scraped(meter, moment(new, seconds=30))[SPENT] == 20


def test_a_thousand_jobs_that_come_and_go_leave_no_series_and_no_memory() -> None:
    """Names of deleted jobs must not exhaust the operator's memory within months."""
    meter = Meter()

    def lines(*jobs: MeteredJob) -> int:
        return meter.text(moment(*jobs), openmetrics=True)[0].count(b"\n")

    empty = lines()
    for turn in range(4):
        jobs = [job(f"job-{turn}-{n}", state="Running", state_time=NOW, first_step_time=NOW) for n in range(1000)]
        assert lines(*jobs) > 20_000
        assert meter.remembered == 1000
    assert lines() == empty
    assert meter.remembered == 0


def test_every_possible_end_of_a_job_has_a_zero_counter_before_the_first() -> None:
    """Every possible end of a job must have a counter at 0, or the dashboard misses the first failed job."""
    found = scraped(Meter(), moment())
    ends = {name for name, value in found.items() if name.startswith("ddpjob_jobs_finished_total") and value == 0}
    why = ["AllNodesCompleted", "DeadlineExceeded", *filter(None, typing.get_args(budget.Stop))]
    states = ("Succeeded", *("Failed" for _ in why[1:]))
    assert ends == {f'ddpjob_jobs_finished_total{{reason="{r}",state="{s}"}}' for r, s in zip(why, states, strict=True)}
    assert set(why) <= set(reasons.ALL)


def test_a_job_that_ended_ten_minutes_ago_has_no_series_of_its_own() -> None:
    """Ended jobs must lose their own series, because a cluster may have ten thousand. Their states still count."""
    ended = job(state="Succeeded", state_time=NOW, completion_time=NOW)
    mine = 'job_name="digits"'
    assert any(mine in name for name in scraped(Meter(), moment(ended, seconds=599)))
    later = scraped(Meter(), moment(ended, seconds=601))
    assert not any(mine in name for name in later)
    assert later['ddpjob_jobs{namespace="team",state="Succeeded"}'] == 1


def test_a_standby_counts_no_jobs_so_that_a_sum_over_all_operators_counts_each_once() -> None:
    meter = Meter()
    found = scraped(meter, moment()._replace(jobs=None, leads=False))
    assert found["ddpjob_operator_leads"] == 0
    assert found['leader_election_master_status{name="ddpjob"}'] == 0
    assert not any(name.startswith(("ddpjob_jobs{", "ddpjob_job_")) for name in found)


def test_with_job_series_switched_off_no_job_is_named() -> None:
    body, _ = Meter().text(moment(job("secret-plan", state="Running"), of_jobs=False), openmetrics=True)
    assert b"secret-plan" not in body
    assert b'ddpjob_jobs{namespace="team",state="Running"} 1' in body


@pytest.mark.parametrize("hostile", ["x" * 10_000, 'a"b\\c\nd', "\u2028}"])
def test_a_label_of_any_length_or_characters_stays_one_label(hostile: str) -> None:
    """A long or unusual name must stay one label. A scrape that cannot be parsed would stop all alerts."""
    meter = Meter()
    meter.count(names.REQUESTS, "GET", "get", "pods", hostile)
    found = scraped(meter, moment(MeteredJob(hostile, hostile, "u", api.Status(state="Running"))))
    assert max(map(len, found)) < 2000
    scraped(meter, moment(MeteredJob(hostile, hostile, "u", api.Status(state="Running"))), openmetrics_text=False)


@pytest.mark.parametrize(
    "status",
    ["Running", [], {"state": "x" * 10_000}, {"state": 5, "restarts": "many", "goodput": {"idleSeconds": "x"}}],
)
def test_an_edited_status_does_not_remove_the_metrics_of_another_job(status: object) -> None:
    raws = [
        {"metadata": {"namespace": "team", "name": "edited", "uid": "1"}, "status": status},
        {"metadata": {"namespace": "team", "name": "digits", "uid": "2"}, "status": {"state": "Running"}},
    ]
    now = read(Scrape(moment(), raws))
    found = scraped(Meter(), now)
    assert found['ddpjob_jobs{namespace="team",state="None"}'] == 1
    assert found['ddpjob_job_state{ddpjob_job_state="Running",job_name="digits",namespace="team"}'] == 1
    assert not any('job_name="edited"' in name for name in found)


def test_no_label_contains_a_uid() -> None:
    """No label may contain a uid, because Prometheus keeps a series for each."""
    assert not {label for metric in names.ALL for label in metric.labels} & {"uid", "pod", "node", "message"}


def test_the_operator_shows_metrics_of_its_jobs_its_queue_and_its_copies() -> None:
    async def story() -> None:
        town = Town(SlowServer(lambda _verb, _path: 0.01))
        town.apply("team", "digits", 2)
        await town.until(lambda: town.pods("team") == 2, 10)
        operator = town.operator
        found = scraped(operator.meter, read(operator.snapshot()))
        assert found['ddpjob_jobs{namespace="team",state="Pending"}'] == 1
        assert found['ddpjob_cache_objects{resource="pods"}'] == 2
        assert found['workqueue_depth{name="ddpjob"}'] == 0
        assert found['controller_runtime_reconcile_total{controller="ddpjob",result="success"}'] >= 0
        assert found['controller_runtime_reconcile_time_seconds_count{controller="ddpjob"}'] >= 1
        assert found["ddpjob_attempts_total"] == 1

    play(story)


def test_jobs_of_another_release_do_not_count_as_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of another release must not count as deleted. Otherwise their past would be counted again later."""

    async def story() -> None:
        town = Town(SlowServer(lambda _verb, _path: 0.01))
        town.apply("team", "digits", 2)
        await town.until(lambda: town.pods("team") == 2, 10)
        shown = read(town.operator.snapshot())
        assert shown.jobs is not None
        monkeypatch.setattr(town.operator._others, "of", lambda _namespace: "team/theirs")
        later = read(town.operator.snapshot())
        assert (later.jobs, later.away, shown.away) == ([], [job.uid for job in shown.jobs], [])

    play(story)


def test_requests_for_a_queue_or_gang_scheduler_are_counted_under_its_name() -> None:
    """Requests for a queue must be counted under its name: under "other" no alert shows that Kueue refuses them."""
    rights = [*access.RIGHTS, *itertools.chain(*access.GANG_RIGHTS.values()), access.PLACES_RIGHT]
    assert {right.resource for right in rights} <= set(names.RESOURCES)
    assert {adapter.plural for adapter in ADAPTERS.values()} <= set(names.CACHES)
    path = "/apis/kueue.x-k8s.io/v1beta1/namespaces/team/workloads/digits/status"
    assert verb_and_resource("PUT", path) == ("update", "workloads/status")


@pytest.mark.parametrize(
    ("method", "path", "watch", "words"),
    [
        ("GET", "/api/v1/namespaces/team/pods?limit=5", True, ("watch", "pods")),
        ("GET", "/api/v1/namespaces/team/pods/a/log", False, ("get", "pods/log")),
        ("GET", "/api/v1/namespaces/team", False, ("get", "namespaces")),
        ("GET", "/apis/training.ddpjob.io/v1alpha1/ddpjobs", False, ("list", "ddpjobs")),
        ("HEAD", "/version", False, ("other", "other")),
    ],
)
def test_a_request_is_counted_by_its_rbac_verb(method: str, path: str, watch: bool, words: tuple[str, str]) -> None:
    assert verb_and_resource(method, path, watch=watch) == words


def test_objects_of_a_queue_and_of_a_gang_scheduler_have_their_own_size_metrics() -> None:
    settings = OperatorSettings(health_port=0, gangs=("native", "kueue"))
    operator = Operator(settings, cast(Client, SlowServer(lambda _verb, _path: 0.0)))
    labels = {"training.ddpjob.io/job": "digits"}
    named = {"name": "digits", "namespace": "team", "uid": "1", "resourceVersion": "7", "labels": labels}
    operator.caches.gangs["kueue"].store.put({"metadata": named, "status": {}})
    cached = dict(operator.snapshot().moment.cached)
    assert (cached["workloads"], cached["podgroups"]) == (1, 0)


def test_an_api_server_that_refuses_every_write_shows_as_reconcile_errors() -> None:
    async def story() -> None:
        town = Town(SlowServer(lambda verb, _path: 100.0 if verb == "replace" else 0.01))
        town.apply("team", "digits", 2)
        name = 'controller_runtime_reconcile_errors_total{controller="ddpjob"}'
        for _ in range(10):
            await asyncio.sleep(10)  # virtual time; parsing each scrape takes real milliseconds
            if scraped(town.operator.meter, read(town.operator.snapshot()))[name] >= 1:
                return
        pytest.fail("no error is counted within 100 s")

    play(story)
