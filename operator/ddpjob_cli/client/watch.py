"""Check a job repeatedly with `get`, because not every user has the right to watch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

from ddpjob_cli.client import jobs
from ddpjob_cli.client.connection import Cluster
from ddpjob_cli.client.errors import ClusterError, NoAnswerError
from ddpjob_operator.job import wording
from ddpjob_operator.job.status import TERMINAL, find_condition

LOOK_SECONDS = 1.0
PATIENCE_SECONDS = 600.0  # seconds; an upgrade of the API server is shorter, and the job continues without it

Say = Callable[[str], None]


class TooLateError(ClusterError):
    """The awaited state of a job was not reached in time."""


def ended(stored: jobs.Stored) -> bool:
    return stored.job.status.state in TERMINAL


def stopped(stored: jobs.Stored) -> bool:
    """True if nothing of the job is running: it is suspended and all its pods have ended, or it never started."""
    status = stored.job.status
    suspended = find_condition(status, "Suspended")
    return status.start_time is None and (status.attempt == 0 or (suspended is not None and suspended.status == "True"))


def too_late(stored: jobs.Stored, what: str, seconds: float | None) -> TooLateError:
    status = stored.job.status
    return TooLateError(
        f"not {what} within {wording.duration(seconds or 0)}: {stored.job.metadata.name} is "
        f"{status.state or 'not handled by an operator yet'}{f': {status.message}' if status.message else ''}"
    )


class Watch:
    """Reads a job once a second. An API server that does not answer is tried again for PATIENCE_SECONDS."""

    def __init__(self, cluster: Cluster, stored: jobs.Stored, say: Say) -> None:
        self.now = stored
        self._cluster, self._say = cluster, say
        self._next = time.monotonic() + LOOK_SECONDS
        self._silent_since: float | None = None

    @property
    def answers(self) -> bool:
        return self._silent_since is None

    def due_in(self) -> float:
        return max(0.0, self._next - time.monotonic())

    def look(self) -> jobs.Stored:
        """Return the job, or its last state if the server does not answer. Raise JobGoneError, ClusterError."""
        try:
            self.now = jobs.again(self._cluster, self.now)
            self._silent_since = None
        except NoAnswerError as error:
            now = time.monotonic()
            if self._silent_since is None:
                self._silent_since = now
                self._say(f"{error}; still trying, the job is not affected")
            elif now - self._silent_since > PATIENCE_SECONDS:
                raise
        self._next = time.monotonic() + LOOK_SECONDS
        return self.now

    def states(self) -> Iterator[jobs.Stored]:
        yield self.now
        while True:
            time.sleep(self.due_in())
            yield self.look()

    def until(self, true: Callable[[jobs.Stored], bool], what: str, seconds: float) -> jobs.Stored:
        """Return the job as soon as the predicate is true. Raise TooLateError after `seconds`."""
        end = time.monotonic() + seconds
        for stored in self.states():
            if true(stored):
                break
            if time.monotonic() >= end:
                raise too_late(stored, what, seconds)
        return self.now


class StateLines:
    """Prints changes of a job's state. running: also print its progress, at most every 10 s."""

    PROGRESS_SECONDS = 10.0
    UNSEEN_SECONDS = 5.0  # seconds without a state; a running operator sets a state within a second

    def __init__(self, say: Say, *, running: bool = True) -> None:
        self._say, self._running = say, running
        self._unseen_from = time.monotonic() + self.UNSEEN_SECONDS
        self._said = ("", "")
        self._step: int | None = None
        self._next = 0.0

    def see(self, stored: jobs.Stored) -> None:
        from ddpjob_cli.describe import progress
        from ddpjob_cli.describe.job import UNSEEN

        status = stored.job.status
        told = (status.state or "", status.reason)
        if status.state is None:
            if time.monotonic() >= self._unseen_from:
                self._unseen_from = math.inf
                self._say(f"{stored.job.metadata.name}: {UNSEEN}")
        elif status.state == "Running" and not self._running:
            self._said = ("", "")
            return
        elif told != self._said and not ended(stored):
            self._say(f"{status.state}: {status.message or status.reason}")
            self._said = told
        step = status.progress.step if status.progress else None
        if status.state == "Running" and step != self._step and time.monotonic() >= self._next:
            self._step, self._next = step, time.monotonic() + self.PROGRESS_SECONDS
            self._say("  ".join(["Running", *progress.step_parts(status), *progress.pace_parts(status)]))
