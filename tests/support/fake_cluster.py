"""A small API server for tests of the command line, in a thread: objects by path, patches, dry runs, logs of pods."""

import datetime as dt
import json
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ddpjob_operator.job.requests import read

Raw = dict[str, Any]
START = dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc)
USER = "jane"
KINDS = {"ddpjobs": ("training.ddpjob.io", "ddpjobs.training.ddpjob.io"), "configmaps": ("", "configmaps")}


class FakeCluster:
    """An API server whose `objects` a test may change at any time; the next request sees the change."""

    def __init__(self) -> None:
        self.objects: dict[str, Raw] = {}
        self.logs: dict[str, list[str]] = {}
        """The lines of a pod's log, by its name; a followed log ends when the pod does."""
        self.requests: list[str] = []
        """Verb and resource of each request, followed by (dry run) for a dry run."""
        self.tokens: set[str] = set()
        """Tokens of all clients."""
        self.agents: set[str] = set()
        """User agents of all clients."""
        self.forbidden: set[str] = set()
        """Requests to refuse, for example `create configmaps`."""
        self.answers: dict[str, tuple[int, Raw]] = {}
        """Answers by request, for example `create ddpjobs.training.ddpjob.io`. Such a request is not executed. With `…
        for real` only requests without dry run get the answer; `get pods/log NAME` is for one object."""
        self.broken: list[str] = []
        """Faults of the next requests for logs, after the first line. `cut`: in the second line. `silent`: after a
        pause. `no watch`: as from a kubelet without inotify watches."""
        self.zone = dt.timezone.utc
        """Time zone of the nodes, in which a kubelet writes the times of lines."""
        self.line_seconds = 0.0
        """Seconds before each line of a log."""
        self.seconds = 0.0
        self.crd = True
        self.on_patch: Callable[[Raw], None] = lambda _: None
        """Called with each patched job; a test acts here as the operator."""

    def add(self, plural: str, body: Raw, namespace: str = "default") -> Raw:
        """Add an object with a uid and a creation time."""
        group = "/apis/training.ddpjob.io/v1alpha1" if plural == "ddpjobs" else "/api/v1"
        path = f"{group}/namespaces/{namespace}/{plural}/{body['metadata']['name']}"
        metadata = {"namespace": namespace, "uid": uuid.uuid4().hex, "creationTimestamp": "2026-01-01T00:00:00Z"}
        self.objects[path] = {**body, "metadata": metadata | body["metadata"]}
        return self.objects[path]

    def find(self, plural: str, name: str = "", namespace: str = "default") -> Any:
        """Return the object of this name, or the first object if there is no name; None if there is none."""
        found = [raw for path, raw in self.objects.items() if f"/{namespace}/{plural}/{name}" in path]
        return found[0] if found else None

    def wait_for(self, request: str, times: int = 1, seconds: float = 30) -> None:
        """Wait until this many requests of a kind have arrived."""
        end = time.monotonic() + seconds
        while self.requests.count(request) < times:
            assert time.monotonic() < end, f"no {request} came: {self.requests}"
            time.sleep(0.02)

    def after(self, request: str, do: Callable[[], None]) -> None:
        """Call a function as soon as the next request of this kind arrives."""
        times = self.requests.count(request) + 1

        def wait() -> None:
            self.wait_for(request, times)
            do()

        threading.Thread(target=wait, daemon=True).start()

    # ------------------------------------------------------------------ requests

    def handle(self, method: str, raw_path: str, body: Any) -> tuple[int, Any]:
        """Answer a request, and count it only then: a test that waits for the count cannot change this answer."""
        answer = self._answer(method, raw_path, body)
        asked = read(method, urllib.parse.urlsplit(raw_path).path)
        self.requests.append(f"{asked.verb} {asked.resource}{' (dry run)' if 'dryRun' in raw_path else ''}")
        return answer

    def _answer(self, method: str, raw_path: str, body: Any) -> tuple[int, Any]:
        url = urllib.parse.urlsplit(raw_path)
        query = dict(urllib.parse.parse_qsl(url.query))
        asked = read(method, url.path)
        what = f"{asked.verb} {asked.resource}"
        time.sleep(self.seconds)
        if what in self.forbidden:
            group = asked.resource.partition(".")[2]
            text = (
                f'{asked.resource} is forbidden: User "{USER}" cannot {asked.verb} resource "{asked.resource}" in API '
                f'group "{group}" in the namespace "{asked.namespace}"'
            )
            return _failure(403, "Forbidden", text)
        for known in (what, f"{what} {asked.name}"):
            if known in self.answers:
                return self.answers[known]
        if "dryRun" not in query and f"{what} for real" in self.answers:
            return self.answers[f"{what} for real"]
        if asked.resource.startswith("ddpjobs") and not self.crd:
            return 404, "404 page not found\n"
        return self._carry_out(method, url.path, query, body)

    def _carry_out(self, method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        asked = read(method, path)
        plural = asked.resource.partition(".")[0]
        if asked.verb == "list":
            return 200, {"kind": "List", "items": self._selected(path, plural, query)}
        if asked.verb == "create":
            at = f"{path}/{body['metadata']['name']}"
            if at in self.objects:
                return _failure(409, "AlreadyExists", f"{plural} already exists")
            if "dryRun" in query:
                return 201, body
            return 201, self.add(plural, body, asked.namespace)
        if path not in self.objects:
            return _failure(404, "NotFound", "not found", {"kind": plural, "name": asked.name})
        if asked.verb == "delete":
            self._remove(path)
            return 200, {"kind": "Status"}
        if asked.verb == "patch":
            _patch(self.objects[path], body)
            self.on_patch(self.objects[path])
        return 200, self.objects[path]

    def _selected(self, path: str, plural: str, query: dict[str, str]) -> list[Raw]:
        everywhere = "/namespaces/" not in path
        found = [
            raw for at, raw in self.objects.items()
            if at.startswith(f"{path}/") or (everywhere and f"/{plural}/" in at)
        ]  # fmt: skip
        if "labelSelector" in query:
            key, _, value = query["labelSelector"].partition("=")
            found = [raw for raw in found if (raw["metadata"].get("labels") or {}).get(key) == value]
        for part in filter(None, query.get("fieldSelector", "").split(",")):
            key, _, value = part.partition("=")
            found = [raw for raw in found if raw["involvedObject"][key.partition(".")[2]] == value]
        return found

    def changes(self, path: str, query: dict[str, str]) -> Iterator[Raw]:
        """Yield the events of a watch of pods for ten seconds."""
        sent: dict[str, str] = {}
        end = time.monotonic() + 10
        while time.monotonic() < end:
            for raw in self._selected(path, "pods", query):
                uid, text = raw["metadata"]["uid"], json.dumps(raw)
                if sent.get(uid) != text:
                    yield {"type": "MODIFIED" if uid in sent else "ADDED", "object": json.loads(text)}
                sent[uid] = text
            time.sleep(0.02)

    def _remove(self, path: str) -> None:
        uid = self.objects.pop(path)["metadata"]["uid"]
        for at, raw in list(self.objects.items()):
            owners = [o for o in raw["metadata"].get("ownerReferences") or () if o["uid"] != uid]
            if "ownerReferences" in raw["metadata"] and not owners:
                del self.objects[at]

    def shows_log(self, path: str) -> bool:
        """True if this is a request for a log that the server does not refuse."""
        refused = "get pods/log" in self.forbidden or f"get pods/log {path.split('/')[-2]}" in self.answers
        return path.endswith("/log") and not refused

    def shows_changes(self, query: dict[str, str]) -> bool:
        """True if this is a watch of pods that the server does not refuse."""
        return "watch" in query and "watch pods" not in self.forbidden

    def log_lines(self, name: str, *, follow: bool) -> Iterator[str]:
        """Yield the lines of a pod's log; with `follow` until the pod has ended."""
        sent = 0
        while True:
            pod = self.find("pods", name)
            lines = self.logs.get(name, [])
            yield from lines[sent:]
            sent = len(lines)
            state = pod["status"]["containerStatuses"][0]["state"] if pod else {}
            if not follow or "running" not in state:
                yield from self.logs.get(name, [])[sent:]
                return
            time.sleep(0.02)


def pod(job: str, attempt: int = 1, place: int = 0, *, exit_code: int | None = None, node: str = "n1") -> Raw:
    """Return a pod of a job that is running or has ended."""
    state: Raw = {"running": {}} if exit_code is None else {"terminated": {"exitCode": exit_code}}
    phase = "Running" if exit_code is None else "Failed" if exit_code else "Succeeded"
    prefix = "training.ddpjob.io"
    labels = {f"{prefix}/job": job, f"{prefix}/attempt": str(attempt), f"{prefix}/rank": str(place)}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"{job}-{attempt}-{place}", "labels": labels},
        "spec": {"nodeName": node},
        "status": {"phase": phase, "containerStatuses": [{"name": "trainer", "state": state}]},
    }


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: Any) -> None:
        """Ignore clients that have disconnected."""


@contextmanager
def fake_cluster(folder: Path, namespace: str = "") -> Iterator[tuple[FakeCluster, Path]]:
    """Serve a FakeCluster on loopback; yield it and a kubeconfig."""
    cluster = FakeCluster()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _any(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            cluster.tokens.add(self.headers.get("Authorization") or "")
            cluster.agents.add(self.headers.get("User-Agent") or "")
            path = urllib.parse.urlsplit(self.path)
            query = dict(urllib.parse.parse_qsl(path.query))
            if cluster.shows_log(path.path):
                self._log(path.path.split("/")[-2], query)
                return
            if cluster.shows_changes(query):
                self._watch(path.path, query)
                return
            code, answer = cluster.handle(self.command, self.path, body)
            data = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _log(self, name: str, query: dict[str, str]) -> None:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for data in _printed(cluster, name, query):
                self._chunk(data)
            self._chunk(b"")

        def _watch(self, path: str, query: dict[str, str]) -> None:
            cluster.requests.append("watch pods")
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for event in cluster.changes(path, query):
                self._chunk(f"{json.dumps(event)}\n".encode())
            self._chunk(b"")
            self.close_connection = True

        def _chunk(self, data: bytes) -> None:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()

        do_GET = do_POST = do_PATCH = do_DELETE = _any  # noqa: N815

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    server = _Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield cluster, kubeconfig(folder, f"http://127.0.0.1:{server.server_address[1]}", namespace)
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def kubeconfig(folder: Path, url: str, namespace: str = "") -> Path:
    """Write a kubeconfig with one context `test`, and return its path."""
    context = {"cluster": "test", "user": USER} | ({"namespace": namespace} if namespace else {})
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": url}}],
        "users": [{"name": USER, "user": {"token": "secret"}}],
        "contexts": [{"name": "test", "context": context}],
    }
    path = folder / "kubeconfig"
    path.write_text(json.dumps(config))
    return path


def _printed(cluster: FakeCluster, name: str, query: dict[str, str]) -> Iterator[bytes]:
    """Yield the lines of a log that a request selects. The request is counted after its first line. Raise
    ConnectionAbortedError for a fault."""
    printed = len(cluster.logs.get(name, ()))
    # Select by time as if one line had been printed in each second until now.
    skipped = max(0, *(printed - int(query.get(part, printed)) for part in ("tailLines", "sinceSeconds")))
    if skipped == printed:
        cluster.requests.append("get pods/log")
    broken = cluster.broken.pop(0) if cluster.broken else ""
    since = dt.datetime.fromisoformat(query.get("sinceTime", "2026-01-01T00:00:00Z").replace("Z", "+00:00"))
    for number, line in enumerate(cluster.log_lines(name, follow=query.get("follow") == "true")):
        time.sleep(cluster.line_seconds)
        if since > START or number < skipped:
            continue
        stamp = f"{_time(number, cluster.zone)} " if "timestamps" in query else ""
        data = f"{stamp}{line}\n".encode(errors="surrogateescape")
        if broken == "no watch" and number:
            yield b"failed to create fsnotify watcher: too many open files"
            return
        if broken and number:
            yield from [data[:-2]] * (broken == "cut")
            time.sleep(2.0 * (broken == "silent"))
            raise ConnectionAbortedError
        yield data
        if number == skipped:
            cluster.requests.append("get pods/log")


def _time(number: int, zone: dt.timezone) -> str:
    """Return the time of a line with nanoseconds, as a kubelet writes it."""
    text = START.astimezone(zone).isoformat()
    return f"{text[:19]}.{number:09d}{text[19:].replace('+00:00', 'Z')}"


def _patch(raw: Raw, body: Any) -> None:
    """Apply a merge patch, or a JSON patch that appends."""
    if isinstance(body, list):
        for change in body:
            *parents, last = change["path"].strip("/").split("/")
            place: Any = raw
            for part in parents:
                place = place[part]
            assert last == "-"
            place.append(change["value"])
        return
    for key, value in body.items():
        if isinstance(value, dict):
            _patch(raw.setdefault(key, {}), value)
        else:
            raw[key] = value


def _failure(code: int, reason: str, message: str, details: Raw | None = None) -> tuple[int, Raw]:
    return code, {"kind": "Status", "code": code, "reason": reason, "message": message, "details": details or {}}
