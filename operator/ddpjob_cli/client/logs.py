"""The logs of a job's pods; for a pod that is gone, the end of its log in the job's status."""

from __future__ import annotations

import contextlib
import queue
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from ddpjob_cli.client import jobs, many_jobs, watch
from ddpjob_cli.client.connection import Cluster, Raw
from ddpjob_cli.client.errors import ClusterError, CutOffError, NoAnswerError, NotFoundError
from ddpjob_cli.client.watch import Say
from ddpjob_cli.manifest.yamlfile import InputError
from ddpjob_operator.failures.log_lines import ANSWER
from ddpjob_operator.job import api

DRAIN_SECONDS = 10.0  # seconds without a new line after the job's end, until a log counts as complete
RETRY_SECONDS = 1.0
_QUEUE_MAX = 10_000  # lines that wait if stdout is read more slowly than the job writes
_TIME = re.compile(r"\d{4}-\d\d-\d\dT")
# A line that carries a function's result (sdk/in_rank.py). A timestamp, or text without a line end, may precede it.
_OF_ANSWER = rf"{ANSWER}[0-9a-f]{{16}}:\w+:\d+:\d+/\d+:[\w+/=]*".encode()
_ANSWERS = re.compile(rb"^(?:\d{4}-\S+ )?" + _OF_ANSWER + rb"\n|" + _OF_ANSWER, re.MULTILINE)
_ANSWER_BYTES_MAX = 4096


@dataclass(frozen=True)
class LogPart:
    tail: int | None = None
    since_seconds: float | None = None
    timestamps: bool = False
    """Prefix each line with the container runtime's time."""
    answers: bool = False
    """Include the lines with the result of a function, which are not for people."""

    def params(self) -> dict[str, str]:
        wanted = {
            "tailLines": None if self.tail is None else str(self.tail),
            "sinceSeconds": None if self.since_seconds is None else str(max(1, round(self.since_seconds))),
            "timestamps": "true" if self.timestamps else None,
        }
        return {name: value for name, value in wanted.items() if value is not None}


class ClusterLogs:
    """The source of `ddpjob logs` for a job in a cluster."""

    def __init__(
        self,
        cluster: Cluster,
        stored: jobs.Stored,
        say: Say,
        *,
        part: LogPart = LogPart(),
        on_look: Callable[[jobs.Stored], None] = lambda _: None,
    ) -> None:
        self.name = stored.job.metadata.name
        self.stored = stored  # the job at the last check
        self.cluster, self._say, self._part = cluster, say, part
        self.on_look = on_look  # called with the job at each check of follow()
        self._pods = [pod for pod in jobs.pods(cluster, self.name) if _has_log(pod, stored.trainer)]

    def attempts(self) -> list[int]:
        failure = self._kept()
        return sorted({*map(jobs.attempt_of, self._pods), *([failure.attempt] if failure else [])})

    def nodes(self, attempt: int) -> list[int]:
        failure = self._kept()
        kept = {failure.node_rank} if failure and failure.attempt == attempt else set()
        return sorted({jobs.place_of(pod) for pod in self._pods if jobs.attempt_of(pod) == attempt} | kept)

    def gone(self, attempt: int) -> list[int]:
        status, spec = self.stored.job.status, self.stored.job.spec
        is_static = spec.facts.min_nodes is None
        ran = status.started if attempt == status.attempt else set(range(spec.nodes * is_static))
        return sorted(set(ran) - set(self.nodes(attempt)))

    def why_none(self) -> str:
        from ddpjob_cli.describe.job import UNSEEN

        status = self.stored.job.status
        if status.state is None:
            return f"no node has a log yet: {UNSEEN}"
        over = watch.ended(self.stored)
        return f"no node has a log{'' if over else ' yet'}: {status.state}: {status.message or status.reason}"

    def node_of_rank(self, rank: int) -> int:
        spec = self.stored.job.spec
        world = spec.world_size
        if rank >= world:
            raise InputError(f"--rank {rank}: {self.name} has ranks 0 to {world - 1}")
        if not spec.facts.ranks_follow_nodes:
            raise InputError(f"--rank {rank}: torchrun assigns ranks to nodes as they arrive; choose with --node")
        return rank // spec.facts.nproc_per_node

    def prefix(self, node: int) -> str:
        """Return the node's prefix: [node:rank] if a node is one rank; [node] otherwise, and for a removed node."""
        spec = self.stored.job.spec
        rank = spec.rank_of_place(node) if node < spec.nodes else None
        return f"[{node}] " if rank is None else f"[{node}:{rank}] "

    def read(self, attempt: int, nodes: Collection[int]) -> Iterator[tuple[int, bytes]]:
        """Yield (node, piece) of the logs. Raise ClusterError only at the end, so that all readable logs are shown."""
        of_attempt = [pod for pod in self._pods if jobs.attempt_of(pod) == attempt]
        wrong: list[many_jobs.Wrong] = []
        failure = self._kept()
        for node in nodes:
            own = [pod for pod in of_attempt if jobs.place_of(pod) == node]
            for pod in own:
                try:
                    for piece in self._log_of(pod):
                        yield node, piece
                except ClusterError as error:  # noqa: PERF203 - the next may be readable
                    wrong.append(error)
            if not own and failure and (failure.attempt, failure.node_rank) == (attempt, node):
                yield node, self._end_of(failure)
        many_jobs.refuse(wrong)

    def _log_of(self, pod: Raw) -> Iterator[bytes]:
        """Yield the log of a pod as it is now, with a line end added to an unfinished last line."""
        end = b"\n"
        try:
            pieces = self.cluster.pieces(jobs.log_path(pod), container=self.stored.trainer, **self._part.params())
            for piece in pieces if self._part.answers else without_answers(pieces):
                yield piece
                end = piece[-1:] or end
        except NoAnswerError as error:
            raise NoAnswerError(_not_shown(pod, error)) from None
        yield b"" if end == b"\n" else b"\n"

    def follow(self, attempt: int, nodes: Collection[int] | None, *, later: bool) -> Iterator[tuple[int, bytes]]:
        """Yield (node, lines) until the job ends, or the attempt if `later` is false. Raise JobGoneError."""
        uids = [pod["metadata"]["uid"] for pod in self._pods]
        streams = _Streams(self.cluster, self.stored.trainer, self._part, uids, self._say)
        seen = watch.Watch(self.cluster, self.stored, self._say)
        was_over = watch.ended(self.stored)

        def add(pod: Raw) -> None:
            of = jobs.attempt_of(pod)
            right_attempt = of >= attempt if later else of == attempt
            if right_attempt and (nodes is None or jobs.place_of(pod) in nodes) and _has_log(pod, self.stored.trainer):
                streams.add(pod)

        try:
            while True:
                with contextlib.suppress(NoAnswerError):  # `seen.look` reports it
                    for pod in jobs.pods(self.cluster, self.name):
                        add(pod)
                over = watch.ended(seen.now) or (not later and seen.now.job.status.attempt > attempt)
                if over:
                    yield from streams.rest()
                    if was_over and not streams.has_any():
                        yield from self._of_gone_pods(attempt, nodes)
                    return
                yield from streams.until(seen.due_in())
                self.stored = seen.look()
                streams.tell_unread(api_answers=seen.answers)
                self.on_look(self.stored)
        finally:
            streams.close()

    def _of_gone_pods(self, attempt: int, nodes: Collection[int] | None) -> Iterator[tuple[int, bytes]]:
        """Yield the end of the failed pod's log from the job's status; if there is none, report why."""
        failure = self._kept()
        if failure and failure.attempt == attempt and (nodes is None or failure.node_rank in nodes):
            yield failure.node_rank or 0, self._end_of(failure)
        else:
            self._say(f"{self.name}: {self.why_none()}")

    def _end_of(self, failure: api.JobFailure) -> bytes:
        self._say(f"pod {failure.pod} is gone; this is the end of its log, as the job's status keeps it")
        return failure.log_tail.rstrip("\n").encode() + b"\n"

    def _kept(self) -> api.JobFailure | None:
        failure = self.stored.job.status.last_failure
        there = {pod["metadata"]["name"] for pod in self._pods}
        return failure if failure and failure.log_tail and failure.pod not in there else None


def without_answers(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the pieces without lines that carry a function's result. An unfinished line waits for its end."""
    held = b""
    for piece in pieces:
        held += piece
        end = max(held.rfind(b"\n") + 1, len(held) - _ANSWER_BYTES_MAX)
        yield _ANSWERS.sub(b"", held[:end])
        held = held[end:]
    yield _ANSWERS.sub(b"", held)


class _Streams:
    """One thread per pod, which reads its log to the end and reconnects when the connection breaks."""

    def __init__(self, cluster: Cluster, container: str, part: LogPart, begun: Collection[str], say: Say) -> None:
        """begun: uids of pods whose logs `part` shortens, for example by tail; logs of later pods are shown in full."""
        self._cluster, self._container, self._part, self._begun, self._say = cluster, container, part, begun, say
        self._lines: queue.Queue[tuple[int, bytes]] = queue.Queue(_QUEUE_MAX)
        self._threads: dict[str, threading.Thread] = {}
        self._why: dict[str, str] = {}
        self._last: dict[str, str] = {}  # time of the last line of each pod, by its uid
        self._told: set[str] = set()
        self._unread: dict[str, int] = {}  # failed reads in a row of each pod's log, by its uid
        self._adding = threading.Lock()
        self._closed = threading.Event()

    def add(self, pod: Raw) -> None:
        uid = pod["metadata"]["uid"]
        with self._adding:
            if uid not in self._threads:
                self._threads[uid] = threading.Thread(target=self._read, args=(pod,), daemon=True)
                self._threads[uid].start()

    def has_any(self) -> bool:
        return bool(self._threads)

    def until(self, seconds: float) -> Iterator[tuple[int, bytes]]:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                yield self._lines.get(timeout=left)

    def rest(self) -> Iterator[tuple[int, bytes]]:
        """Yield all lines until every log has ended, or until no line has come for DRAIN_SECONDS."""
        end = time.monotonic() + DRAIN_SECONDS
        while time.monotonic() < end and any(thread.is_alive() for thread in list(self._threads.values())):
            for line in self.until(0.1):
                yield line
                end = time.monotonic() + DRAIN_SECONDS
        while not self._lines.empty():
            yield self._lines.get()

    def close(self) -> None:
        """Stop reading. The threads end when their connections or the program end."""
        self._closed.set()

    def _read(self, pod: Raw) -> None:
        uid = pod["metadata"]["uid"]
        while not self._closed.is_set():
            try:
                self._read_once(pod)
                path = jobs.log_path(pod).removesuffix("/log")
                now = self._cluster.get(path)
                if now["metadata"]["uid"] != pod["metadata"]["uid"] or not _runs(now, self._container):
                    return
            except CutOffError:
                self._unread.pop(uid, None)  # read an ended pod's log again, because its last lines show why
            except NoAnswerError as error:
                self._unread[uid] = self._unread.get(uid, 0) + 1
                self._why[uid] = _not_shown(pod, error)
            except ClusterError as error:
                if not isinstance(error, NotFoundError):
                    self._say(_not_shown(pod, error))
                return
            self._closed.wait(RETRY_SECONDS)

    def _read_once(self, pod: Raw) -> None:
        """Read from the last line on, until the log or the connection ends."""
        uid, place = pod["metadata"]["uid"], jobs.place_of(pod)
        before = self._last.get(uid, "")
        begin = self._part.params() if uid in self._begun and not before else {}
        params = {"container": self._container, "follow": "true", **begin, "timestamps": "true"}
        if before:
            # sinceTime has whole seconds, so some lines are read twice. Keep the node's time zone.
            params["sinceTime"] = re.sub(r"\.\d+", "", before)
        for line in self._cluster.lines(jobs.log_path(pod), **params):
            at, _, text = line.partition(" ")
            if not _TIME.match(at):
                self._tell(f"the log of {pod['metadata']['name']}: {line}")
            elif at > before:
                self._last[uid] = max(at, self._last.get(uid, ""))
                text = f"{at} {text}" if self._part.timestamps else text
                shown = text.encode(errors="surrogateescape") + b"\n"
                shown = _ANSWERS.sub(b"", shown) if ANSWER in text else shown
                if shown:
                    self._put(place, shown)

    def tell_unread(self, *, api_answers: bool) -> None:
        """Report once which logs cannot be read although the API server answers, for example after a node is lost."""
        if not api_answers:
            self._unread.clear()
            return
        # The first failed read is not reported, because the API server may only be away for a moment.
        new = [uid for uid, times in self._unread.copy().items() if times > 1 and uid not in self._told]
        if new:
            self._told.update(new)
            more = f" (and {len(new) - 1} more)" if len(new) > 1 else ""
            self._say(f"{self._why[new[0]]}{more}; still trying")

    def _tell(self, text: str) -> None:
        """Report once a kubelet's message in a log: `failed to create fsnotify watcher: too many open files`."""
        if text not in self._told:
            self._told.add(text)
            self._say(text)

    def _put(self, place: int, line: bytes) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._lines.put((place, line), timeout=1)
                break


def _not_shown(pod: Raw, error: ClusterError) -> str:
    node = (pod.get("spec") or {}).get("nodeName")
    return f"the log of {pod['metadata']['name']}{f' on {node}' if node else ''} is not shown: {error}"


def _has_log(pod: Raw, container: str) -> bool:
    state = state_of(pod, container)
    return "running" in state or "terminated" in state


def _runs(pod: Raw, container: str) -> bool:
    return "running" in state_of(pod, container)


def state_of(pod: Raw, container: str) -> Raw:
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    return next((s.get("state") or {} for s in statuses if s.get("name") == container), {})
