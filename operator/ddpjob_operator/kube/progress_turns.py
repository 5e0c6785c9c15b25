"""Whose progress is written next: so many writes a second of all jobs together, the oldest figures first.

Thousands of jobs that train would else take all of the API server's time for their step numbers, and a job that fails
would wait behind them. Only writes of nothing but progress wait here.
"""

from __future__ import annotations

import bisect
import datetime as dt

from ddpjob_operator.kube.store import Key

WRITES_PER_SECOND = 10
INTERVAL_SECONDS = 1.0 / WRITES_PER_SECOND
# A job that does not come back in time (it is gone, or its reconcile waits in a slow namespace) must not hold up the
# others for longer than two turns. It loses nothing: when it comes, its figures are the oldest still.
ABSENT_SECONDS = 0.2
_Entry = tuple[dt.datetime, Key]


class ProgressTurns:
    """Times in seconds of any one clock."""

    def __init__(self) -> None:
        self._next_at = float("-inf")
        self._line: list[_Entry] = []
        self._entries: dict[Key, _Entry] = {}
        self._comes_at: dict[Key, float] = {}

    def ask(self, key: Key, written: dt.datetime, now: float) -> float:
        """0: write it now; else the seconds until it is worth to ask again. written: when it was written last."""
        while self._line and self._comes_at.get(self._line[0][1], now) + ABSENT_SECONDS < now:
            self.forget(self._line[0][1])
        entry = (written, key)
        if self._entries.get(key) != entry:
            self.forget(key)
            self._entries[key] = entry
            bisect.insort(self._line, entry)
        position = bisect.bisect_left(self._line, entry)
        if position == 0 and now >= self._next_at:
            self.forget(key)
            self._next_at = now + INTERVAL_SECONDS
            return 0.0
        wait = max(0.0, self._next_at - now) + position * INTERVAL_SECONDS
        self._comes_at[key] = now + wait
        return wait

    def comes_in(self, key: Key, now: float) -> float:
        """Seconds until the job that waits has its turn; 0: it does not wait."""
        return max(0.0, self._comes_at.get(key, now) - now)

    def forget(self, key: Key) -> None:
        """It waits no more: its progress went along with other news, or it is gone."""
        entry = self._entries.pop(key, None)
        self._comes_at.pop(key, None)
        if entry is not None:
            del self._line[bisect.bisect_left(self._line, entry)]
