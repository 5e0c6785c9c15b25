"""Of kopf's lines about requests that it sends again, one a minute is logged.

kopf 1.45 logs each try that fails as an error, although the watches of pods and Services have said already that the API
server is away: an administrator would read the same error every few seconds. Not left out altogether, because an error
of the DDPJobs' own watch is seen nowhere else. Can go when kopf has a setting for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

RETRY_SECONDS = 60.0


class RetriesNowAndThen:
    """A filter of a log handler: one of kopf's records about a retry in RETRY_SECONDS."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = float("-inf")

    def __call__(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged."""
        if not (record.name.startswith("kopf") and "; will retry: " in str(record.msg)):
            return True
        if self._clock() - self._last < RETRY_SECONDS:
            return False
        self._last = self._clock()
        return True
