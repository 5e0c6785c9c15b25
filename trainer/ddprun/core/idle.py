"""Detect that all ranks of a node are idle, so that the log can show this long before a stall is certain.

Pure. `ddprun/watch_ranks.py` reads the ranks under ddprun, `ddpjob run` under other launchers. Times are seconds of a
monotonic clock.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

IDLE_SECONDS = 60.0
LOOK_SECONDS = 5.0
CPU_SHARE_MAX = 0.02  # share of a CPU; waiting threads of torch and of this library use a tenth of it
CPU_SECONDS_MAX = 0.2  # CPU seconds that do not end an idle period: an idle rank still answers the agent
IDLE, NO_PROGRESS = "have been idle", "have made no step and ended no collective"


class IdleClock:
    """Measures for how many seconds the ranks have used no CPU, and for how many they have made no progress."""

    def __init__(self, seconds: float = IDLE_SECONDS) -> None:
        self.seconds = seconds
        self._cpu: Mapping[int, float] = {}  # by rank, CPU seconds when the present idle period began
        self._idle_since: float | None = None
        self._mark: Hashable = None
        self._marked_at: float | None = None
        self._has_remarked = False

    def look(self, now: float, cpu: Mapping[int, float], mark: Hashable = None) -> str:
        """Return IDLE or NO_PROGRESS once per period without activity, else "".

        cpu: the CPU seconds of each rank; empty if no rank is running or a rank has declared a pause. mark: any value
        that changes when a rank makes progress; None if progress is unknown.
        """
        has_moved = mark is not None and mark != self._mark
        if has_moved or self._is_busy(now, cpu):  # ranks that make steps are not idle
            self._cpu, self._idle_since = dict(cpu), now if cpu else None
        if mark is None or not cpu or has_moved:
            self._mark, self._marked_at = mark, None if mark is None or not cpu else now
        stands = self._marked_at is not None and now - self._marked_at >= self.seconds
        is_idle = self._idle_since is not None and now - self._idle_since >= self.seconds
        if not (is_idle or stands):
            self._has_remarked = False
        elif not self._has_remarked:
            self._has_remarked = True
            return IDLE if is_idle else NO_PROGRESS
        return ""

    def _is_busy(self, now: float, cpu: Mapping[int, float]) -> bool:
        if self._idle_since is None or cpu.keys() != self._cpu.keys():
            return True
        allowed = max(CPU_SECONDS_MAX, CPU_SHARE_MAX * (now - self._idle_since))
        return any(used - self._cpu[rank] > allowed for rank, used in cpu.items())


def sentence(found: str, seconds: float, whose: str, how: str) -> str:
    """Return for example `all ranks have been idle for 60s; stacks: ddpjob stacks digits`."""
    return f"all ranks{whose} {found} for {seconds:.0f}s; stacks: {how}"
