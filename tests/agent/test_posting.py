"""Node 0's agent reports all restarts in place to the status receiver, repeats the reports, and sends no secret."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from agents import Launcher, finish
from free_port import free_port
from shell import eventually

from ddpjob.reporting import termination
from ddprun import posting

# Script that fails in the first two generations; the third generation runs until the test ends it.
FAILS = """
import os, time
life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
open(f"up-{life}", "w").close()
if life < 2: raise SystemExit(7)
while not os.path.exists("enough"): time.sleep(0.01)
"""
# Script that fails in two generations. The second failure waits until the file `enough` exists.
FAILS_TWICE = """
import os, time
while os.environ["TORCHELASTIC_RESTART_COUNT"] == "1" and not os.path.exists("enough"): time.sleep(0.01)
raise SystemExit(7)
"""


class Receiver:
    """A status receiver that records reports, and can be unreachable or refuse them."""

    def __init__(self, port: int = 0) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.tokens: list[str] = []
        self.answer = 204
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                receiver.tokens.append(self.headers.get("Authorization", ""))
                self.send_response(receiver.answer)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/status"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()
    yield found
    found.close()


def application(body: dict[str, Any]) -> int:
    return int(body["agent"]["restarts"]["application"])


def test_steps_of_ended_ranks_count_as_progress_even_after_the_final_report(launcher, receiver):
    """Steps of ended ranks must count as progress, also after the final report, or a rare failure ends the job."""
    script = launcher.script(
        """
        import os, ddpjob
        life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        for step in range(10 * life + 1, 10 * life + 11):
            ddpjob.progress(step)
        if life < 4: raise OSError("again")
        """
    )
    left = '{"application": 9, "infrastructure": 9, "stall": 9}'
    where = {"DDPJOB_STATUS_URL": receiver.url, "DDPJOB_RESTARTS_LEFT": left}
    done = launcher.done("--no-preload", script, **where)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("charged to application, waiting 0 s") == 4


def test_each_restart_is_reported_with_all_failures_so_far(launcher: Launcher, receiver: Receiver) -> None:
    token = launcher.folder / "token"
    token.write_text("a-secret\n")
    where = {"DDPJOB_STATUS_URL": receiver.url, "DDPJOB_STATUS_TOKEN_FILE": str(token), "DDPJOB_ATTEMPT": "4"}
    agent = launcher.ddprun("--no-preload", launcher.script(FAILS), **where, DDPJOB_REPLACEMENT="2")
    eventually(lambda: receiver.bodies and receiver.bodies[-1]["agent"]["generation"] == 2)
    (launcher.folder / "enough").touch()
    done = finish(agent)
    assert done.returncode == 0
    told = receiver.bodies[-1]
    assert {k: told[k] for k in ("attempt", "rank", "nodeRank", "step")} == {
        "attempt": 4, "rank": 0, "nodeRank": 0, "step": 0,
    }  # fmt: skip
    failure = {
        "rank": 0, "nodeRank": 0, "exitCode": 7, "signal": "", "exception": "", "step": 0,
        "resumable": False, "class": "application", "chargedTo": "application",
    }  # fmt: skip
    failures = [{**failure, "generation": generation} for generation in (0, 1)]
    for one in told["agent"]["failures"]:
        del one["time"]
    counts = {"application": 2, "infrastructure": 0, "stall": 0, "inARow": 2, "chargedInARow": 2}
    assert told["agent"] == {"replacement": 2, "generation": 2, "restarts": counts, "failures": failures}
    assert set(receiver.tokens) == {"Bearer a-secret"}
    assert "a-secret" not in done.stderr + done.stdout


def test_an_agent_without_restarts_sends_no_report(launcher: Launcher, receiver: Receiver) -> None:
    done = launcher.done("--no-preload", launcher.script(""), DDPJOB_STATUS_URL=receiver.url)
    assert (done.returncode, done.stderr, receiver.bodies) == (0, "", [])


def test_a_receiver_that_was_away_gets_the_reports_later_and_its_absence_is_logged_once(launcher: Launcher) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/v1/status"
    agent = launcher.ddprun("--no-preload", launcher.script(FAILS), DDPJOB_STATUS_URL=url)
    eventually((launcher.folder / "up-2").exists)
    receiver = Receiver(port)
    eventually(lambda: receiver.bodies)
    receiver.close()
    assert application(receiver.bodies[-1]) == 2
    (launcher.folder / "enough").touch()
    done = finish(agent)
    assert done.returncode == 0
    assert done.stderr.count("not reported") == 1
    assert "reported once" in done.stderr


def test_an_unacknowledged_report_is_tried_once_more_at_the_end(launcher: Launcher, receiver: Receiver) -> None:
    receiver.answer = 503
    words = ["--no-preload", "--max-restarts", 1, launcher.script(FAILS_TWICE)]
    agent = launcher.ddprun(*words, DDPJOB_STATUS_URL=receiver.url)
    eventually(lambda: receiver.bodies)
    (launcher.folder / "enough").touch()
    done = finish(agent)
    assert done.returncode == 7
    assert [application(body) for body in receiver.bodies] in ([1], [1, 1])
    assert "answered 503" in done.stderr


def test_a_receiver_that_never_answers_delays_the_end_by_at_most_two_seconds(launcher: Launcher) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/"
        agent = launcher.ddprun("--no-preload", launcher.script(FAILS), DDPJOB_STATUS_URL=url)
        eventually((launcher.folder / "up-2").exists)
        (launcher.folder / "enough").touch()
        began = time.monotonic()
        assert finish(agent).returncode == 0
        assert time.monotonic() - began < posting.LAST_POST_SECONDS + 8, (
            "the machine may be slow, a post takes for ever"
        )


def test_a_token_that_cannot_be_sent_is_not_quoted(launcher: Launcher, receiver: Receiver) -> None:
    """An error about a token that cannot be sent must not quote it, as http.client's own message does."""
    token = launcher.folder / "token"
    token.write_text("a-secret\nof-two-lines")
    where = {"DDPJOB_STATUS_URL": receiver.url, "DDPJOB_STATUS_TOKEN_FILE": str(token)}
    agent = launcher.ddprun("--no-preload", "--max-restarts", 1, launcher.script(FAILS_TWICE), **where)
    assert agent.stderr is not None
    said = ""
    while "not reported" not in said:
        said += (line := agent.stderr.readline())
        assert line, said
    (launcher.folder / "enough").touch()
    said += finish(agent).stderr
    assert "not reported to DDPJOB_STATUS_URL: ValueError" in said
    assert "secret" not in said + (launcher.folder / "termination.json").read_text()
    assert receiver.bodies == []


@pytest.mark.parametrize("character", ["x", "é", "\x01", "\U0001f600", "\ud800"])
def test_a_report_is_never_too_large(character: str) -> None:
    failure = {"rank": 0, "exception": character * 300, "signal": "", "step": 2**52}
    body = posting.encode({"attempt": 1, "agent": {"replacement": 0, "failures": [failure] * 5}})
    assert len(body) <= posting.BODY_BYTES_MAX
    assert json.loads(body)["agent"]["failures"], "the newest stay"


@pytest.mark.parametrize("character", ["x", "é", "\x01", "\U0001f600", "\ud800"])
@pytest.mark.parametrize("name", ["exception", "traceback", "its own"])
def test_a_termination_message_is_never_too_large_and_keeps_what_the_operator_needs(character: str, name: str) -> None:
    """A termination message must have at most 4096 bytes and keep what the operator needs, whatever a script writes."""
    needed = {"rank": 3, "exitCode": 1, "ended": True, "agent": {"replacement": 0, "restarts": {"application": 3}}}
    body = termination.encode({**needed, name: character * 60_000, "list": ["x"] * 5_000})
    assert len(body) <= termination.BYTES_MAX
    assert {k: v for k, v in json.loads(body).items() if k in needed} == needed
