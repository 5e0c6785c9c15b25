"""Reduce a node's output to the script's own lines; the node's log has all lines. Stacks of a stall are held back,
and tracebacks until their failure is known. `failure_lines.py` then shows the traceback of the rank that failed first,
once. If the script handled the exception, its traceback is shown after all."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from ddpjob_core.failures import is_library, where_of
from ddpjob_operator.failures.log_lines import PREFIX
from ddpjob_operator.job import wording

HELD_SECONDS = 30.0  # seconds until an uncaught exception has ended its pod; a rank has ten seconds to stop
UNSURE_SECONDS = 10.0  # seconds for a traceback without torch's prefix: the exception may have been handled
_LAUNCHERS = re.compile(
    # E0131 12:00:00.1 77 torch/distributed/elastic/…; up to torch 2.1 ERROR:torch.distributed…
    r"^(?:[EWI]\d{4} \d\d:\d\d:\d\d\S* \d+ (?:\[\d+\] )?torch/distributed/|(?:ERROR|WARNING|INFO):torch\.distributed"
    # ddprun's lines about restarts and stops are hidden, because the run reports these itself
    r"|ddprun: (?:restart \d|rank \d|node \d+ is lost|the group |told to stop|waiting for node))"
)
_CPP = re.compile(
    r"^(?:\[W\d{4} \d\d:\d\d:\d\d[^\]]*\b(?:socket|TCPStore\w*|ProcessGroup\w*|Utils|HeartbeatMonitor)\.[ch]pp:\d+\]"
    r"|Exception raised from \S+ at |frame #\d+: |<omitting python frames>)"
)
_STALLED = re.compile(r"^ddpjob: rank (\d+) \(process \d+\) is stalled ")
_BEGINS = "Traceback (most recent call last):"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_FRAME = re.compile(r'  File "([^"]+)", line \d')
_PACKAGE = re.compile(r"-packages/([^/]+)/")
_BORDER = re.compile(r"^(?:={7,}|\*{7,})\s*$")


@dataclass
class Trace:
    """A traceback that is held back: torch's prefix, and its lines without this prefix."""

    prefix: str
    since: float
    lines: list[str] = field(default_factory=list)
    exception: str = ""
    """The line with the exception; "" until it is read."""

    @property
    def due(self) -> float:
        """Time at which the traceback is shown, unless its exception has ended a pod by then."""
        return self.since + (HELD_SECONDS if self.prefix else UNSURE_SECONDS)

    @property
    def is_launchers(self) -> bool:
        """True if all frames are torch's: torchrun itself then reports that a rank has failed or was stopped."""
        return not where_of(self.lines) and any("torch/distributed/" in line for line in self.lines)

    @property
    def _is_chained(self) -> bool:
        """True if the last line announces a chained traceback, so that the next traceback continues this one."""
        return next((line for line in reversed(self.lines) if line), "").startswith(_CHAINED)

    def takes(self, line: str) -> bool:
        """Add the line and return True if it belongs to this traceback; else return False."""
        if self.exception:
            goes_on = line.startswith(_BEGINS) and self._is_chained
            more = not line or line[0].isspace() or line.startswith(_CHAINED) or goes_on
            # torch puts its prefix on every line of an uncaught exception's message.
            more = more or ("[rank" in self.prefix and not line.startswith(_BEGINS))
            if goes_on:
                self.exception = ""
        else:
            more = True
            if line and not line[0].isspace() and not line.startswith((_BEGINS, *_CHAINED)):
                self.exception = line
        if more:
            self.lines.append(line)
        return more


def without_libraries(trace: list[str]) -> list[str]:
    """Return a traceback with only the script's frames, and the number of the others; all of it if no frame is the
    script's."""
    shown: list[str] = []
    hidden: Counter[str] = Counter()
    is_hidden = False
    for line in trace if where_of(trace) else ():
        if frame := _FRAME.match(line):
            is_hidden = is_library(frame[1])
            package = _PACKAGE.search(frame[1])
            hidden.update([package[1] if package else "Python"] * is_hidden)
        is_hidden = is_hidden and line.startswith("  ")
        if hidden and not is_hidden:
            frames = wording.count(hidden.total(), "frame")
            shown.append(f"  … {frames} of {', '.join(hidden)}")
            hidden.clear()
        if not is_hidden:
            shown.append(line)
    return shown or trace


class OutputFilter:
    def __init__(self) -> None:
        self.hidden = 0
        """Number of hidden lines that were not reported yet."""
        self.held: list[Trace] = []
        self.stacks: dict[int, list[str]] = {}
        """By rank, the stacks that it printed when it was stalled."""
        self._in_stacks: list[str] | None = None
        self._open: dict[str, Trace] = {}  # by prefix, because the output of ranks is interleaved
        self._borders = 0  # number of borders of torchrun's table that are still to come
        self._after_cpp = False

    def take(self, lines: list[str], now: float) -> list[str]:
        return [shown for line in lines for shown in self._take(line, now)]

    def due_in(self, now: float) -> float | None:
        """Return the seconds until a held-back traceback is due; None without one."""
        return max(0.0, min(trace.due for trace in self.held) - now) if self.held else None

    def overdue(self, now: float) -> list[str]:
        return self._release([trace for trace in self.held if now >= trace.due])

    def forget(self) -> list[Trace]:
        held, self.held, self._open = self.held, [], {}
        return held

    def _take(self, raw: str, now: float) -> Iterator[str]:
        if self._is_of_stacks(raw):
            return
        match = PREFIX.match(raw[:200])
        prefix = match[0] if match else ""
        line = raw[len(prefix) :].rstrip()
        if (trace := self._open.get(prefix)) is not None and trace.takes(line):
            if trace.exception and trace.is_launchers:
                self._close_launchers(trace)
        elif line.startswith(_BEGINS):
            self._open[prefix] = Trace(prefix, now, [line])
            self.held.append(self._open[prefix])
        elif self._is_noise(line):
            self.hidden += 1
        else:
            self._open.pop(prefix, None)
            # The script has continued, so an exception without torch's prefix did not end a rank. Show its traceback.
            yield from self._release([t for t in self.held if not t.prefix and t.exception and not prefix])
            yield raw

    def _is_of_stacks(self, raw: str) -> bool:
        """If the line belongs to stacks of a stalled rank (indented after the first line), keep it and return True."""
        if match := _STALLED.match(raw):
            self._in_stacks = self.stacks[int(match[1])] = []
        elif not raw.startswith("  "):
            self._in_stacks = None
        if self._in_stacks is not None:
            self._in_stacks.append(raw)
        return self._in_stacks is not None

    def _is_noise(self, line: str) -> bool:
        if self._borders:
            self._borders -= bool(_BORDER.match(line))
            return True
        is_cpp = _CPP.match(line) is not None or (self._after_cpp and not line)
        self._after_cpp = is_cpp
        return is_cpp or _LAUNCHERS.match(line) is not None

    def _close_launchers(self, trace: Trace) -> None:
        """Hide the launcher's own exception. After ChildFailedError a table with two borders follows."""
        self._borders = 2 if "ChildFailedError" in trace.exception else 0
        self.hidden += len(trace.lines)
        self.held.remove(trace)
        self._open = {prefix: other for prefix, other in self._open.items() if other is not trace}

    def _release(self, traces: list[Trace]) -> list[str]:
        self.held = [trace for trace in self.held if trace not in traces]
        self._open = {prefix: trace for prefix, trace in self._open.items() if trace not in traces}
        return [trace.prefix + line for trace in traces for line in trace.lines]
