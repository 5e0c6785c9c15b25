"""What the shell remembers of a job and no watch tells: refusals, strangers in its place, reports."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field

from ddpjob_operator.observed import Foreign, Pod, Refusal, Report
from ddpjob_operator.stall import Pace

REFUSED_SECONDS = (1, 2, 4, 8, 15, 30, 60, 120, 300)
STRANGER_SECONDS = (2, 5, 10, 20, 30)


@dataclass
class Stranger:
    """An object in our place that no watch of ours shows. It is looked at again until it is gone."""

    foreign: Foreign
    check_at: dt.datetime
    checks: int = 0

    def seen_again(self, now: dt.datetime) -> None:
        """It is still there."""
        self.check_at = now + dt.timedelta(seconds=STRANGER_SECONDS[min(self.checks, len(STRANGER_SECONDS) - 1)])
        self.checks += 1


@dataclass
class Memory:
    """Of one job, by its uid: a job of the same name starts with nothing."""

    uid: str
    refusals: dict[str, Refusal] = field(default_factory=dict)
    refused_in_a_row: int = 0
    strangers: dict[tuple[str, str], Stranger] = field(default_factory=dict)
    reports: dict[int, Report] = field(default_factory=dict)
    """The first of each rank's reports that said what its last one says."""
    paces: dict[int, Pace] = field(default_factory=dict)
    heard_at: dt.datetime | None = None
    """When one of its ranks was last heard; None: nobody has spoken yet, or they have said that they end."""
    departed: dict[str, Pod] = field(default_factory=dict)
    """Pods whose object has gone, as they were last seen: a whole life may pass between two looks."""
    confirmed_gone: set[str] = field(default_factory=set)
    """Pods that are not in our copy, and that the API server has confirmed to be gone."""
    asked_before: int = 0
    """The newest attempt before whose first pod the API server was asked what older ones have left."""

    def refuse(self, name: str, message: str, now: dt.datetime) -> None:
        """The server would not create it. All refusals of one round wait for the same time."""
        retry_at = max((r.retry_at for r in self.refusals.values()), default=now)
        if retry_at <= now:
            self.refused_in_a_row += 1
            wait = REFUSED_SECONDS[min(self.refused_in_a_row, len(REFUSED_SECONDS)) - 1]
            retry_at = now + dt.timedelta(seconds=wait)
        self.refusals[name] = Refusal(name, message, retry_at)

    def created(self, name: str) -> None:
        """The server has created it. The next refusal is a new one."""
        self.refusals.pop(name, None)
        self.refused_in_a_row = 0

    def take(self, foreign: Foreign, now: dt.datetime) -> None:
        """A stranger has been found."""
        stranger = self.strangers.setdefault((foreign.kind, foreign.name), Stranger(foreign, now))
        stranger.foreign = foreign
        stranger.seen_again(now)
