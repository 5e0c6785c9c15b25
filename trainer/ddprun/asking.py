"""Ask which agent leads the group: if the leader of an elastic job is lost, the operator appoints another agent.

Agents elect nobody. Each remembers the highest term that it has seen, and ends its ranks if another agent leads in a
higher one. Without a status receiver (DDPJOB_STATUS_URL), node 0 leads for ever. A leader asks every 5 s, because the
operator may have replaced it meanwhile. An agent that has lost its leader asks four times a second, after two seconds
once a second. The others ask twice a minute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ddpjob_core.members import LEADER_PATH
from ddprun.calls import ChildCall
from ddprun.core.appointment import Appointment

if TYPE_CHECKING:
    from ddprun.agent import Agent

LEADER_SECONDS, FOLLOWER_SECONDS, LEADERLESS_SECONDS = 5.0, 30.0, 1.0  # seconds between two requests
HURRIED_SECONDS, HURRIED_REQUESTS = 0.25, 8  # the first requests without a leader


class Asking:
    """Asks the status receiver who leads, one request at a time."""

    def __init__(self, agent: Agent, told: Callable[[Appointment], None]) -> None:
        self._agent, self._told = agent, told
        self._url = agent.environ.get("DDPJOB_STATUS_URL", "") if agent.options.is_elastic else ""
        self._call = ChildCall(agent, self._answered)
        self._asked_at = float("-inf")
        self._seconds = LEADER_SECONDS
        self._requests = 0  # how many requests were sent since `_seconds` changed

    @property
    def is_possible(self) -> bool:
        return bool(self._url)

    @property
    def deadline(self) -> float | None:
        """Time of the next call of `tick`; None if none is due."""
        if not self._url:
            return None
        return self._call.until if self._call.is_running else self._asked_at + self._pause

    @property
    def _pause(self) -> float:
        hurries = self._seconds == LEADERLESS_SECONDS and self._requests < HURRIED_REQUESTS
        return HURRIED_SECONDS if hurries else self._seconds

    def tick(self, now: float, seconds: float) -> None:
        """Send a request if the last one is old enough."""
        if seconds != self._seconds:
            self._seconds, self._requests = seconds, 0
        self._call.tick(now)
        if not self._url or self._call.is_running or now < self._asked_at + self._pause:
            return
        self._asked_at, environ = now, self._agent.environ
        try:
            from urllib.parse import urljoin  # takes 4 ms, and only agents in a cluster need it

            url = urljoin(self._url, LEADER_PATH)
            self._call.begin(lambda: _ask_in_child(url, environ), now)
        except OSError:  # no process can be created now
            return
        self._requests += 1

    def ask_soon(self) -> None:
        """Ask at the next `tick`."""
        self._asked_at = float("-inf")

    def _answered(self, answer: bytes, _now: float) -> None:
        try:
            self._told(Appointment.read(answer))
        except ValueError:  # the operator does not answer, or is older: the leader stays
            return


def _ask_in_child(url: str, environ: Mapping[str, str]) -> bytes:
    """Return the answer; b"" if there is none."""
    from ddpjob.reporting.sender import ReportSender

    try:
        return ReportSender(url, environ).ask()
    except Exception:
        return b""
