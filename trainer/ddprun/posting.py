"""Report charged restarts (those that node 0 counts against a limit) to the status receiver, for `status.restarts`.

The counts are totals, sent again every minute, so lost or repeated posts do no harm. Nothing is sent before the first
charge. A post may block for seconds, so a child process makes it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ddprun.calls import ChildCall
from ddprun.node import say

if TYPE_CHECKING:
    from ddprun.agent import Agent

BODY_BYTES_MAX = 8192  # limit of the receiver
REPEAT_SECONDS = 60.0  # send the counts again, because a new operator pod does not have them
BACK_OFF_SECONDS, BACK_OFF_SECONDS_MAX = 1.0, 60.0
LAST_POST_SECONDS = 2.0
_CONFIRMED = b"ok"


class Posting:
    """Sends the counts of charged restarts (the account), one post at a time."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._url = agent.environ.get("DDPJOB_STATUS_URL", "")
        self._call = ChildCall(agent, self._answered)
        self._posted: Any = None  # the account in the last post
        self._confirmed: Any = None  # the account that the receiver last confirmed
        self._at, self._back_off = 0.0, 0.0  # time of the next post; 0: nothing was sent yet
        self._has_warned = False

    @property
    def deadline(self) -> float | None:
        """Time at which `tick` has something to do."""
        return (self._call.until if self._call.is_running else self._at) or None

    def tick(self, now: float, document: Mapping[str, Any] | None) -> None:
        """Post the document if it is new or due. document: the counts under "agent"; None: nothing was charged."""
        if document is None or not self._url:
            return
        self._call.tick(now)
        if self._call.is_running:
            return
        if now >= self._at or (not self._back_off and document["agent"] != self._confirmed):
            self._post(document, now)

    def abandon(self) -> None:
        """End the post in flight."""
        self._call.abandon()

    def finish(self, document: Mapping[str, Any] | None) -> None:
        """Post the last counts once more if they were not confirmed; wait for at most 2 s."""
        if document is None or not self._url:
            return
        if self._posted != document["agent"]:
            self._call.abandon()
        if not self._call.is_running and self._confirmed != document["agent"]:
            self._post(document, time.monotonic())
        self._call.wait(LAST_POST_SECONDS)

    def _post(self, document: Mapping[str, Any], now: float) -> None:
        environ = self._agent.environ
        attempt = environ.get("DDPJOB_ATTEMPT", "")
        body = encode({"attempt": int(attempt) if attempt.isdecimal() else 1, "rank": 0, "nodeRank": 0, **document})
        self._posted = document["agent"]
        try:
            self._call.begin(lambda: _post_in_child(self._url, body, environ), now)
        except OSError as error:
            self._failed(f"no process for it: {error.strerror}", now)

    def _answered(self, answer: bytes, now: float) -> None:
        if answer == _CONFIRMED:
            self._confirmed, self._back_off, self._at = self._posted, 0.0, now + REPEAT_SECONDS
        else:
            self._failed(answer.decode(errors="replace"), now)

    def _failed(self, why: str, now: float) -> None:
        self._back_off = min(2 * self._back_off or BACK_OFF_SECONDS, BACK_OFF_SECONDS_MAX)
        self._at = now + self._back_off
        if not self._has_warned:
            self._has_warned = True
            why = why or "the process that sends them was killed"
            say(f"restarts in place are not reported to DDPJOB_STATUS_URL: {why}; trying again, reported once")


def encode(document: Mapping[str, Any]) -> bytes:
    """Encode the document as JSON of at most 8 KiB, without the oldest failures if needed."""
    failures = document["agent"]["failures"]
    while True:
        agent = {**document["agent"], "failures": failures}
        body = json.dumps({**document, "agent": agent}, ensure_ascii=False).encode("utf-8", "replace")
        if len(body) <= BODY_BYTES_MAX or not failures:
            return body
        failures = failures[1:]


def _post_in_child(url: str, body: bytes, environ: Mapping[str, str]) -> bytes:
    """Return the confirmation, or the problem without the exception's text, which could quote the token's header."""
    try:
        from ddpjob.reporting.sender import ReportSender

        problem = ReportSender(url, environ).send(body)
    except OSError as error:
        problem = f"{type(error).__name__}: {error.strerror or ''}"
    except Exception as error:
        problem = type(error).__name__
    return _CONFIRMED if problem is None else problem.encode("utf-8", "replace")[:300]
