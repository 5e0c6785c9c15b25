"""Report charged restarts (those that node 0 counts against a limit) to the status receiver, for `status.restarts`.

The counts are totals, sent again every minute, so lost or repeated posts do no harm. Nothing is sent before the first
charge. A post may block for seconds, so a child process makes it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ddprun import processes
from ddprun.node import say

if TYPE_CHECKING:
    from ddprun.agent import Agent

BODY_BYTES_MAX = 8192  # limit of the receiver
REPEAT_SECONDS = 60.0  # a new operator pod does not know the counts
BACK_OFF_SECONDS, BACK_OFF_SECONDS_MAX = 1.0, 60.0
CHILD_SECONDS_MAX = 30.0  # limit for name resolution; the request itself has a time-out in ddpjob/reporting/sender.py
LAST_POST_SECONDS = 2.0
_CONFIRMED = b"ok"


class Posting:
    """Sends the counts of charged restarts (the account), one post at a time."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._url = agent.environ.get("DDPJOB_STATUS_URL", "")
        self._child, self._pipe = 0, -1  # the post in flight
        self._until = 0.0  # deadline of that post
        self._posted: Any = None  # the counts in the last post
        self._confirmed: Any = None  # the counts that the receiver last confirmed
        self._at, self._back_off = 0.0, 0.0  # time of the next post; 0: nothing was sent yet
        self._has_warned = False

    @property
    def deadline(self) -> float | None:
        """Time at which `tick` has something to do."""
        return (self._until if self._pipe >= 0 else self._at) or None

    def tick(self, now: float, document: Mapping[str, Any] | None) -> None:
        """Post the document if it is new or due. document: the counts under "agent"; None: nothing was charged."""
        if document is None or not self._url:
            return
        if self._pipe >= 0:
            if now >= self._until:
                self._abandon()
                self._failed(f"no answer within {CHILD_SECONDS_MAX:g} s", now)
        elif now >= self._at or (not self._back_off and document["agent"] != self._confirmed):
            self._post(document, now)

    def finish(self, document: Mapping[str, Any] | None) -> None:
        """Post the last counts once more if they were not confirmed; wait for at most 2 s."""
        if document is None or not self._url:
            return
        if self._pipe >= 0 and self._posted != document["agent"]:
            self._abandon()
        if self._pipe < 0 and self._confirmed != document["agent"]:
            self._post(document, time.monotonic())
        if self._pipe >= 0 and processes.readable(self._pipe, LAST_POST_SECONDS):
            self._receive()

    def _post(self, document: Mapping[str, Any], now: float) -> None:
        environ = self._agent.environ
        attempt = environ.get("DDPJOB_ATTEMPT", "")
        body = encode({"attempt": int(attempt) if attempt.isdecimal() else 1, "rank": 0, "nodeRank": 0, **document})
        self._posted, self._until = document["agent"], now + CHILD_SECONDS_MAX
        try:
            self._child, self._pipe = processes.call_in_child(lambda: _post_in_child(self._url, body, environ))
        except OSError as error:
            return self._failed(f"no process for it: {error.strerror}", now)
        self._agent.node.helpers.add(self._child)
        return self._agent.watch(self._pipe, self._receive)

    def _receive(self) -> None:
        try:
            answer = os.read(self._pipe, 1 << 12)
        except BlockingIOError:
            return
        now = time.monotonic()
        self._close()
        if answer == _CONFIRMED:
            self._confirmed, self._back_off, self._at = self._posted, 0.0, now + REPEAT_SECONDS
        else:
            self._failed(answer.decode(errors="replace"), now)

    def _failed(self, why: str, now: float) -> None:
        self._back_off = min(2 * self._back_off or BACK_OFF_SECONDS, BACK_OFF_SECONDS_MAX)
        self._at = now + self._back_off
        if not self._has_warned:
            self._has_warned = True
            why = why or "the process that was to do it was killed"
            say(f"restarts in place are not reported to DDPJOB_STATUS_URL: {why}; tried again, said once")

    def _abandon(self) -> None:
        processes.kill([self._child])  # the child has not answered and is not reaped, so its pid is not reused
        self._close()

    def _close(self) -> None:
        self._agent.node.helpers.discard(self._child)
        self._agent.unwatch(self._pipe)
        os.close(self._pipe)
        self._pipe = -1


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
