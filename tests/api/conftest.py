"""Fixtures that the tests against an API server share. test_crd.py does not use them."""

from collections.abc import Callable, Iterator

import pytest
from clusters import Namespace, Operator, installed_crd, skip_without_cluster
from faulty_api import FaultyApi
from queues import Queue

from ddpjob_operator.gangs.kueue import ADAPTER


@pytest.fixture(scope="session")
def _cluster() -> Iterator[None]:
    skip_without_cluster()
    with installed_crd():
        yield


@pytest.fixture
def api(_cluster: None) -> Iterator[FaultyApi]:
    """Yield a proxy to the API server that can inject faults."""
    with FaultyApi() as proxy:
        yield proxy


@pytest.fixture
def namespace(api: FaultyApi) -> Iterator[Namespace]:
    """Yield a namespace, and remove it afterwards."""
    made = Namespace(api)
    try:
        yield made.make()
    finally:
        api.mend()
        made.remove()


@pytest.fixture
def operators(api: FaultyApi, request: pytest.FixtureRequest) -> Iterator[Callable[..., Operator]]:
    """Yield a function that starts operators; stop them at the end. Fail if one of them has logged a traceback."""
    started: list[Operator] = []

    def start(*namespaces: str, **options: object) -> Operator:
        started.append(Operator(api, *namespaces, **options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    api.mend()
    logs = []
    for operator in started:
        with operator:
            if operator.process.poll() is None:
                operator.stop()
            logs.append(operator.log)
    print("\n".join(logs))
    assert not any("Traceback" in log for log in logs), "the operator has a traceback in its log"


@pytest.fixture
def operator(operators: Callable[..., Operator], namespace: Namespace) -> Operator:
    """Return an operator that watches the namespace."""
    return operators(namespace.name).watches()


@pytest.fixture(scope="module")
def kueue_api() -> str:
    """Return the API path of the version in which Kueue's Workloads are served."""
    with FaultyApi() as api:
        for version in ADAPTER.versions:
            listed = (api.find(f"/apis/{ADAPTER.group}/{version}") or {}).get("resources") or ()
            if any(kind["name"] == ADAPTER.plural for kind in listed):
                return f"/apis/{ADAPTER.group}/{version}"
    pytest.skip("this API server serves no Workloads of kueue.x-k8s.io: Kueue is not there")


@pytest.fixture
def unwatched(kueue_api: str, namespace: Namespace) -> Iterator[Queue]:
    """Yield a queue in a namespace without an operator."""
    made = Queue(namespace, kueue_api)
    try:
        made.make()
        yield made
    finally:
        namespace.api.mend()
        made.remove()


@pytest.fixture
def queue(unwatched: Queue, operators: Callable[..., Operator]) -> Queue:
    """Return a queue in a namespace with an operator."""
    operators(unwatched.namespace.name, DDPJOB_GANGS="kueue").watches()
    return unwatched
