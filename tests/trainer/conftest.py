"""Fixtures that run functions in ranks, forked from this process because it has torch imported already."""

import importlib
import json
import multiprocessing
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo  # imported once here, because otherwise each rank's first DistributedDataParallel needs 1 to 5 s
from free_port import free_port
from memory_node import Node

import ddpjob
from ddpjob.process import replace as new_process_state

progress_file = importlib.import_module("ddpjob.reporting.progress")
LIMIT_SECONDS = 120.0  # seconds; a test takes less than 15 s on an idle machine
LAUNCHER_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "NNODES", "NPROC_PER_NODE",
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE",
)  # fmt: skip

torch.set_num_threads(1)  # a thread pool does not survive a fork


class Outcome(NamedTuple):
    """The end of a rank: the result of its function or the text of an exception, and the exit code of its process."""

    value: Any
    error: str
    exit_code: int | None


def _rank_main(body: Callable[[int], Any], rank: int, answer: Any) -> None:
    try:
        # send() would share tensors with this process, which is about to end
        answer.send_bytes(pickle.dumps((body(rank), "")))
    except BaseException as error:
        answer.send_bytes(pickle.dumps((None, f"{type(error).__name__}: {error}")))
        if os.environ.get("DDPJOB_TEST_TRACEBACK"):
            traceback.print_exc()
        raise error if isinstance(error, SystemExit) else SystemExit(1) from error


def outcomes_of(body: Callable[[int], Any], world_size: int, limit_seconds: float = LIMIT_SECONDS) -> list[Outcome]:
    """Run the body in a forked process for each rank. Exit code -9 means that the rank exceeded the limit."""
    context = multiprocessing.get_context("fork")
    started = []
    for rank in range(world_size):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank_main, args=(body, rank, theirs))
        process.start()
        theirs.close()
        started.append((process, mine))
    end = time.monotonic() + limit_seconds
    return [_outcome(process, pipe, end) for process, pipe in started]


def _outcome(process: Any, pipe: Any, end: float) -> Outcome:
    value, error = (None, "no answer")
    try:
        if pipe.poll(max(0.0, end - time.monotonic())):
            value, error = pickle.loads(pipe.recv_bytes())
    except EOFError:
        pass
    process.join(max(1.0, end - time.monotonic()))
    if process.is_alive():
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    return Outcome(value, error, process.exitcode)


def values_of(body: Callable[[int], Any], world_size: int) -> list[Any]:
    """Return the result of each rank. Fail the test if a rank did not end well."""
    outcomes = outcomes_of(body, world_size)
    bad = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome.error or outcome.exit_code}
    assert not bad, f"ranks that did not end well: {bad}"
    return [outcome.value for outcome in outcomes]


@pytest.fixture
def run_ranks() -> Callable[[Callable[[int], Any], int], list[Any]]:
    return values_of


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run_ranks: Callable[..., list[Any]]) -> Node:
    monkeypatch.chdir(tmp_path)
    return Node(tmp_path, run_ranks)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run_ranks: Callable[..., list[Any]]) -> Node:
    monkeypatch.chdir(tmp_path)
    return Node(tmp_path, run_ranks, nodes=2)


@pytest.fixture
def end_ranks() -> Callable[..., list[Outcome]]:
    return outcomes_of


Script = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start_script(tmp_path: Path) -> Iterator[Script]:
    """Return a function that starts a script in a new interpreter."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str, **environ: object) -> "subprocess.Popen[str]":
        path = tmp_path / f"script-{len(started)}.py"
        path.write_text(code)
        everything = {"PYTHONPATH": str(Path(ddpjob.__file__).parents[1]), **{k: str(v) for k, v in environ.items()}}
        process = subprocess.Popen(
            [sys.executable, str(path)], env=everything, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables of a launcher or a job in which the tests are running."""
    for name in [*LAUNCHER_VARIABLES, *(name for name in os.environ if name.startswith(("DDPJOB_", "PET_")))]:
        if name != "DDPJOB_TEST_TRACEBACK":
            monkeypatch.delenv(name, raising=False)


@pytest.fixture
def meeting_file(tmp_path: Path) -> str:
    return f"file://{tmp_path}/meet"


@pytest.fixture(name="free_port")
def _free_port() -> int:
    return free_port()


def same(values: Sequence[Any]) -> bool:
    return all(value == values[0] for value in values)


class Receiver:
    """HTTP server on loopback that records reports. It answers with the status codes in `answers`, then with 200."""

    def __init__(self) -> None:
        self.posts: queue.Queue[tuple[dict[str, Any], dict[str, str]]] = queue.Queue()
        self.answers: list[int] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.posts.put((json.loads(body), dict(self.headers)))
                self.send_response(outer.answers.pop(0) if outer.answers else 200)
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/status/digits"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def next(self) -> dict[str, Any]:
        return self.posts.get(timeout=20)[0]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Receiver]:
    receiver = Receiver()
    (tmp_path / "token").write_text("first\n")
    monkeypatch.setenv("DDPJOB_STATUS_URL", receiver.url)
    monkeypatch.setenv("DDPJOB_STATUS_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("DDPJOB_STATUS_INTERVAL", "0.02")
    new_process_state()  # an earlier test may have recorded a saved step
    yield receiver
    progress_file.flush()
    new_process_state()
    receiver.close()
