"""The client of the API server: refused and unanswered requests, expired credentials, and large lists."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import kopf
import pytest
from aiohttp import web

from ddpjob_operator.kube.api.client import ApiError, Client, LoginError, Page, RequestLimits, login
from ddpjob_operator.kube.api.tokens import ISSUER_PATH, KEYS_PATH
from ddpjob_operator.kube.other_releases import MARK, OtherReleases

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
PATIENT = RequestLimits(request_seconds=30, silence_seconds=30, retry_after_seconds_max=0.5)
IMPATIENT = RequestLimits(request_seconds=0.5, silence_seconds=0.2)


def status(code: int, message: str = "no", reason: str = "Forbidden", **headers: str) -> web.Response:
    body = {"kind": "Status", "code": code, "reason": reason, "message": message}
    return web.json_response(body, status=code, headers=headers)


def talk(
    answer: Answer,
    use: Callable[[Client], Awaitable[Any]],
    tokens: list[str] | None = None,
    may_write: Callable[[str], bool] = lambda: True,
    limits: RequestLimits = PATIENT,
) -> Any:
    """Return the result of `use` with a client of a server that answers each request with `answer`."""

    async def run() -> Any:
        async def handle(request: web.Request) -> web.StreamResponse:
            return await answer(request)

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        left = list(tokens or ["secret"])

        def log_in() -> kopf.ConnectionInfo:
            return kopf.ConnectionInfo(server=url, token=left.pop(0) if len(left) > 1 else left[0])

        try:
            async with Client(log_in, limits, may_write) as client:
                return await use(client)
        finally:
            await runner.cleanup()

    return asyncio.run(run())


class Script:
    """Server that gives its answers in order, and then repeats the last one."""

    def __init__(self, *answers: Callable[[], web.StreamResponse]) -> None:
        self.answers = list(answers)
        self.asked: list[web.Request] = []

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request)
        return (self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])()


def ok() -> web.Response:
    return web.json_response({"kind": "Pod"})


def test_the_error_contains_the_message_of_the_server() -> None:
    why = 'pods "a" is forbidden: exceeded quota: one-pod'
    with pytest.raises(ApiError) as raised:
        talk(Script(lambda: status(403, why)), lambda c: c.create("/api/v1/namespaces/a/pods", {}))
    assert (raised.value.status, raised.value.reason, raised.value.message) == (403, "Forbidden", why)


@pytest.mark.parametrize("code", [429, 503])
def test_a_rejected_request_waits_as_long_as_the_server_demands(code: int) -> None:
    script = Script(lambda: status(code, **{"Retry-After": "0.1"}), lambda: status(code, **{"Retry-After": "0.1"}), ok)
    assert talk(script, lambda c: c.create("/pods", {})) == {"kind": "Pod"}
    assert len(script.asked) == 3


def test_a_long_wait_demanded_by_the_server_is_left_to_the_caller() -> None:
    script = Script(lambda: status(429, **{"Retry-After": "7"}))
    with pytest.raises(ApiError) as raised:
        talk(script, lambda c: c.get("/pods"))
    assert raised.value.retry_after_seconds == 7.0
    assert len(script.asked) == 1


@pytest.mark.parametrize("code", [500, 503, 504, 409, 422])
def test_a_write_that_may_have_been_carried_out_is_not_sent_again(code: int) -> None:
    script = Script(lambda: status(code))
    with pytest.raises(ApiError):
        talk(script, lambda c: c.create("/pods", {}))
    assert len(script.asked) == 1


def test_a_refused_token_is_read_again_once() -> None:
    script = Script(lambda: status(401, reason="Unauthorized"), ok)
    assert talk(script, lambda c: c.get("/pods"), ["old", "new"]) == {"kind": "Pod"}
    assert [r.headers["Authorization"] for r in script.asked] == ["Bearer old", "Bearer new"]
    stays = Script(lambda: status(401, reason="Unauthorized"))
    with pytest.raises(ApiError, match="401"):
        talk(stays, lambda c: c.get("/pods"))
    assert len(stays.asked) == 2, "no loop"


def test_a_server_that_does_not_answer_gives_an_error_with_the_request() -> None:
    async def never(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(30)
        return ok()

    with pytest.raises(ApiError, match="GET /pods: the API server did not answer in time") as raised:
        talk(never, lambda c: c.get("/pods"), limits=IMPATIENT)
    assert raised.value.status == 0


@pytest.mark.parametrize(
    ("code", "text", "quoted"),
    [
        (200, "<html>a proxy's page</html>", "BadAnswer"),
        (200, "[]", "BadAnswer"),
        (200, "", "BadAnswer"),
        (502, "<html>Bad Gateway", "Bad Gateway"),
    ],
)
def test_an_answer_that_is_not_an_object_is_an_error_with_the_proxy_page(code: int, text: str, quoted: str) -> None:
    with pytest.raises(ApiError, match=quoted):
        talk(Script(lambda: web.Response(status=code, text=text)), lambda c: c.get("/pods"))


def the_pages(client: Client) -> Awaitable[list[Page]]:
    async def all_of_them() -> list[Page]:
        return [page async for page in client.pages("/pods", "a=b")]

    return all_of_them()


def test_a_long_list_is_read_page_by_page() -> None:
    pages = [
        {"items": [{"n": 1}], "metadata": {"resourceVersion": "7", "continue": "more"}},
        {"items": [{"n": 2}], "metadata": {"resourceVersion": "7"}},
    ]
    script = Script(*(lambda page=page: web.json_response(page) for page in pages))  # type: ignore[misc]
    assert talk(script, the_pages) == [([{"n": 1}], "7"), ([{"n": 2}], "7")]
    assert [r.query.get("continue") for r in script.asked] == [None, "more"]
    assert {r.query["labelSelector"] for r in script.asked} == {"a=b"}


def test_a_list_of_large_objects_is_requested_in_pages_that_fit() -> None:
    """A list of large objects must be requested in pages that fit: too long ones are given up and requested again."""
    listed, asked = [{"n": n, "spec": "x" * 50_000} for n in range(30)], 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        first, limit = int(request.query.get("continue", "0")), int(request.query["limit"])
        rest = len(listed) - first - limit
        metadata = {"resourceVersion": "7"} | ({"continue": str(first + limit)} if rest > 0 else {})
        return web.json_response({"metadata": metadata, "items": listed[first : first + limit]})

    pages = talk(answer, the_pages, limits=dataclasses.replace(PATIENT, page_bytes=400_000))
    assert [item["n"] for page in pages for item in page.items] == list(range(30))
    assert asked <= len(pages) + 2


@pytest.mark.parametrize("path", [ISSUER_PATH, KEYS_PATH, "/apis/scheduling.k8s.io", "/apis/apps/v1", "/version"])
def test_metadata_paths_of_the_api_server_are_not_read_as_lists(path: str) -> None:
    """Metadata paths with token keys must not be read as lists of a collection: each report would get a 503."""
    said = {"keys": [{"kid": "a"}]}

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.json_response(said)

    assert talk(answer, lambda client: client.get(path)) == said


def test_a_release_mark_of_a_megabyte_still_counts_as_a_mark() -> None:
    """A ConfigMap of 600 kB with the name of a release's mark must count as a mark, and not stop the operator."""
    large = {"metadata": {"namespace": "team", "name": MARK}, "data": {"release": "a", "more": "x" * 1_000_000}}
    small = {"metadata": {"namespace": "other", "name": MARK}, "data": {"release": "b/c"}}
    script = Script(lambda: web.json_response({"items": [large, small], "metadata": {"resourceVersion": "7"}}))

    async def marks(client: Client) -> dict[str, str]:
        others = OtherReleases(client)
        running = asyncio.create_task(others.run(lambda _: None))
        while not others.are_known:
            await asyncio.sleep(0.01)
        running.cancel()
        return {namespace: others.of(namespace) for namespace in ("team", "other")}

    assert talk(script, marks) == {"team": "?", "other": "b/c"}
    assert script.asked[0].query["fieldSelector"] == f"metadata.name={MARK}"


def test_managed_fields_are_never_kept() -> None:
    """managedFields must not be kept: they would double the memory for 10,000 pods."""
    pod = {"metadata": {"name": "a", "managedFields": [{"manager": "kubelet"}]}, "spec": {}}
    listed = {"items": [pod], "metadata": {"resourceVersion": "7"}}
    kept = {"metadata": {"name": "a"}, "spec": {}}
    assert talk(Script(lambda: web.json_response(listed)), the_pages) == [([kept], "7")]
    assert talk(Script(lambda: web.json_response(pod)), lambda client: client.get("/pods/a")) == kept


def test_a_create_request_asks_only_for_metadata_and_keeps_the_sent_object() -> None:
    """A create request must ask only for metadata: the full answer is three times as long as the pod."""
    metadata = {"name": "a-1-0", "uid": "u", "resourceVersion": "7", "labels": {"a": "b"}}
    more = {"managedFields": [{"manager": "ddpjob-operator"}], "creationTimestamp": "2026-01-01T00:00:00Z"}
    script = Script(lambda: web.json_response({"kind": "PartialObjectMetadata", "metadata": metadata | more}))
    pod = {"kind": "Pod", "metadata": {"name": "a-1-0"}, "spec": {"containers": []}}
    made = talk(script, lambda c: c.create("/api/v1/namespaces/a/pods", pod))
    assert made == pod | {"metadata": metadata}
    assert "as=PartialObjectMetadata;" in script.asked[0].headers["Accept"]


WRITES: dict[str, Callable[[Client], Awaitable[Any]]] = {
    "create": lambda c: c.create("/pods", {}),
    "replace": lambda c: c.replace("/jobs/a/status", {}),
    "delete": lambda c: c.delete("/pods/a", {}),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_no_write_is_sent_while_another_operator_may_be_leader(write: Callable[[Client], Awaitable[Any]]) -> None:
    script = Script(ok)
    with pytest.raises(ApiError, match="another operator may lead"):
        talk(script, write, may_write=lambda: False)
    assert script.asked == []


def test_a_write_is_not_retried_if_the_lease_was_lost_after_the_first_try() -> None:
    script, leads = Script(lambda: status(429, **{"Retry-After": "0.1"}), ok), iter([True, False])
    with pytest.raises(ApiError, match="another operator may lead"):
        talk(script, lambda c: c.create("/pods", {}), may_write=lambda: next(leads))
    assert len(script.asked) == 1


def test_a_standby_operator_may_read_and_check_its_rights() -> None:
    script = Script(ok)
    talk(script, lambda c: c.get("/pods/a"), may_write=lambda: False)
    reviews = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    talk(script, lambda c: c.create(reviews, {}), may_write=lambda: False)
    assert len(script.asked) == 2


async def _events(client: Client) -> list[Any]:
    return [event async for event in client.watch("/pods", "5")]


def stream(*chunks: bytes, then: float = 0.0) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
            await asyncio.sleep(0.01)
        await asyncio.sleep(then)
        return response

    return answer


def test_watch_events_are_read_however_the_stream_is_split() -> None:
    long = "x" * 300_000
    data = f'{{"type":"ADDED","object":{{"a":"{long}"}}}}\n{{"type":"BOOKMARK","object":{{}}}}\n'.encode()
    events = talk(stream(data[:100], data[100:200_000], data[200_000:]), _events)
    assert [e["type"] for e in events] == ["ADDED", "BOOKMARK"]


def test_a_watch_that_falls_silent_is_an_error() -> None:
    with pytest.raises(ApiError, match="did not answer in time"):
        talk(stream(b'{"type":"BOOKMARK","object":{}}\n', then=5.0), _events, limits=IMPATIENT)


def test_a_resource_version_that_is_too_old_is_reported() -> None:
    error = b'{"type":"ERROR","object":{"kind":"Status","code":410,"reason":"Expired","message":"too old"}}\n'
    with pytest.raises(ApiError) as raised:
        talk(stream(error), _events)
    assert raised.value.status == 410


def test_without_credentials_the_error_lists_where_they_were_searched(monkeypatch, tmp_path):
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(LoginError, match="neither KUBECONFIG, nor a service account's token, nor"):
        login()


def test_a_missing_kubeconfig_is_an_error_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/no/such/file")
    with pytest.raises(LoginError, match="cannot be used"):
        login()
