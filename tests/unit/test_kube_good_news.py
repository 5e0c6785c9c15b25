"""Good news is told later where pods are being created, and never lost, whatever comes in which order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ddpjob_operator.kube.good_news import ALL_LATER_SECONDS, SOME_LATER_SECONDS, GoodNews
from ddpjob_operator.kube.shares import Shares
from ddpjob_operator.kube.store import Key


class Creates(Shares):
    """Those of pods, as the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way: set[str] = set()

    def busy(self, namespace: str) -> bool:
        return namespace in self.under_way


class Told:
    """When each job is enqueued for: of several times the earliest counts, as in the queue."""

    def __init__(self) -> None:
        self.now = 0.5
        self.creates = Creates()
        self.due: dict[Key, float] = {}
        self.news = GoodNews(self._enqueue, self.creates, lambda: self.now)

    def _enqueue(self, key: Key, in_seconds: float) -> None:
        self.due[key] = min(self.due.get(key, float("inf")), self.now + in_seconds)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("news"), st.sampled_from("ab"), st.integers(0, 2), st.sampled_from([0.02, 3.0])),
        st.tuples(st.just("busy"), st.sampled_from("ab"), st.just(0), st.just(0.0)),
        st.tuples(st.just("quiet"), st.sampled_from("ab"), st.just(0), st.just(0.0)),
        st.tuples(st.just("later"), st.just(""), st.just(0), st.floats(0.01, 9)),
    ),
    max_size=60,
)


@given(steps)
def test_each_job_has_its_turn_once_its_namespace_is_quiet_and_in_time_where_it_never_is(
    story: list[tuple[str, str, int, float]],
) -> None:
    told = Told()
    wanted: dict[Key, tuple[float, float]] = {}
    for what, namespace, number, seconds in story:
        key = (namespace, f"job-{number}")
        if what == "news":
            all_run = seconds < 1
            told.news.add(key, seconds, all_run=all_run)
            latest = told.now + (ALL_LATER_SECONDS if all_run else SOME_LATER_SECONDS)
            wanted[key] = told.now + seconds, min(latest, wanted.get(key, (0.0, latest))[1])
        elif what == "busy":
            told.creates.under_way.add(namespace)
        elif what == "quiet" and namespace in told.creates.under_way:
            told.creates.under_way.remove(namespace)
            told.creates.quiet(namespace)
        told.now += seconds if what == "later" else 0.0
        for key, (soonest, latest) in list(wanted.items()):
            assert told.due[key] <= latest
            if key[0] not in told.creates.under_way:
                assert told.due[key] <= max(soonest, told.now)
            if told.due[key] <= told.now:  # it is planned
                del wanted[key], told.due[key]


def test_a_namespace_in_which_pods_are_always_being_made_is_no_list_of_all_its_jobs() -> None:
    told = Told()
    told.creates.under_way = {"team"}
    for number in range(5_000):
        told.now += 0.1
        told.news.add(("team", f"job-{number}"), 0.02, all_run=number % 2 == 0)
        assert sum(map(len, told.news._put_off.values())) < 2 * SOME_LATER_SECONDS / 0.1


def test_what_is_news_after_a_jobs_turn_waits_as_the_first_did() -> None:
    """Each further pod of it cost a reconcile at once, and perhaps a write, as long as an older job waited."""
    told, key = Told(), ("a", "job-0")
    told.creates.under_way.add("a")
    told.news.add(("a", "older"), 3.0, all_run=False)
    told.news.add(key, 0.02, all_run=True)
    told.now += ALL_LATER_SECONDS
    assert told.due.pop(key) == told.now, "its turn"
    told.now += 1
    told.news.add(key, 0.02, all_run=True)
    assert told.due[key] == told.now + ALL_LATER_SECONDS


def test_a_job_that_goes_on_to_make_pods_tells_of_the_first_one_no_sooner_than_of_the_others() -> None:
    """A storm of 500 jobs wrote 170 statuses more: 15 s after its first pod each was looked at once more."""
    told, key = Told(), ("a", "job-0")
    told.creates.under_way.add("a")
    told.news.add(key, 3.0, all_run=False)
    told.now += 10
    told.due.clear()
    told.news.goes_on(key)
    assert told.due.pop(key) == told.now, "it makes its pods now"
    told.news.add(key, 3.0, all_run=False)
    assert told.due[key] == told.now + SOME_LATER_SECONDS
