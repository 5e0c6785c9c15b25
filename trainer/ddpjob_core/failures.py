"""A failure: what a rank, an agent and the operator know of it, and which of several is the root cause.

Standard library only and cheap to import, because a job starts only when its agent has imported it.
"""

from __future__ import annotations

import enum
import os
import re
import signal
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

# EX_TEMPFAIL of sysexits.h. A group that was asked to stop has saved at one agreed step; those of its ranks whose own
# pod was not asked must end with something other than 0, or they would count as completed.
RESUMABLE_EXIT_CODE = 75
CANNOT_RUN = (126, 127)
"""What a shell, and torchrun, end with where the program may not run, or is not there."""
NO_PROGRAM = "ddprun: there is no "
"""How an agent begins the exception of a rank whose script or module is not there."""
EXCEPTION_MAX = 500
BRIEF_MAX = 300
WHERE_MAX = 128
TRACEBACK_MAX = 65_536
BAD_NODES_MAX = 64
KILLED_BY_KERNEL = "out of memory: killed by the kernel"
"""What an agent writes as the exception of a rank that the kernel has killed for its memory."""
OUTPUT_UNREAD = "nobody reads its output any more"
"""What an agent writes as the exception of a rank that has failed because the console is closed: `ddprun … | head`."""
_ABORTED = 134
UNUSED_PARAMETERS = re.compile(r"^Parameter(?:s| indices) which did not receive grad for rank \d+: .*", re.MULTILINE)
"""The line of DDP's longest error that says which parameters it is about (reducer.cpp); the lines before it advise."""
_UNFINISHED = "Expected to have finished reduction in the prior iteration before starting a new one."
LAST_ERROR = "Last error:"
"""The line of NCCL's error above what it found."""
_TRACEBACK = "Traceback (most recent call last):\n"
_OTHER_PROCESS = re.compile(r"Process \d+ has [\d.]+ \w+ memory in use\. ?")
_KIND_OF_NCCL = re.compile(r"(?<= )(nccl[A-Z]\w*:) .*")


class Precedence(enum.IntEnum):
    """Which failure explains the others; the lowest is the root cause."""

    KERNEL = 0
    """Out of memory, or never started: nothing outside the pod does that."""
    NODE = 1
    """Evicted, preempted, or its node is lost or slow."""
    DELETED = 2
    """Deleted by someone else than the operator."""
    OWN = 3
    """An exception, a signal or an exit code that no lost peer explains."""
    NODE_LATE = 4
    """As NODE, and seen after the operator had stopped the pod: the kubelet reports an eviction when it is over."""
    UNKNOWN = 5
    """Exit code 1 without an exception, or an abort: many failures look so."""
    LATE = 6
    """As OWN, and it ended after the operator had stopped it: most likely it is what made the others fail."""
    RESUMABLE = 7
    """It saved and stopped because it was asked to, or an agent's connection is lost: the cause is elsewhere."""
    SYMPTOM = 8
    """It reports that a peer is gone."""
    STOPPED = 9
    """The operator stopped it."""


class Failure(NamedTuple):
    """How a rank, or a node as a whole, has failed."""

    rank: int | None = None
    """The global rank. None: a node as a whole."""
    node_rank: int | None = None
    """The node, where it failed as a whole."""
    exit_code: int | None = None
    """128 + n where signal n ended it."""
    signal: str = ""
    """SIGSEGV."""
    exception: str = ""
    """The exception's line."""
    step: int = 0
    """The last step that it made."""
    time: float = 0.0
    """Seconds since 1970 by the clock of its node; 0: unknown."""
    resumable: bool = False
    """Whether it stopped because it was asked to, with everything saved."""
    symptom: bool = False
    """Whether it only reports that a peer is gone."""
    stalled: bool = False
    """Whether it was stopped because the group had made no step for too long."""
    early: bool = False
    """Whether it ended with 0 while others still waited for it."""
    vanished: bool = False
    """Whether its node, its pod or the connection to its agent is gone without a report."""
    unstarted: bool = False
    """Whether the process could not be started."""
    preflight: bool = False
    """Whether it is the result of a node check."""
    bad_nodes: tuple[int, ...] = ()
    """Node ranks that a node check found to be far slower than the others."""
    traceback: str = ""
    """Its last lines."""
    where: str = ""
    """The line of the script that raised it: train.py:41."""
    failure_class: str = ""
    """The rules.Class that an agent has given it."""
    charged_to: str = ""
    """The budget that an agent has charged for it."""
    generation: int | None = None
    """Of the ranks that it ended, as the agent that has charged it knows."""
    waited_in: int = 0
    """The collective of the default group that it began last, where it waited there for another rank until its timeout;
    0: it did not, or it is not known."""
    # What Kubernetes knows of the pod; only the operator sets it, and no process sends it.
    container_reason: str = ""
    """Of the container's status: OOMKilled, Error, StartError."""
    pod_reason: str = ""
    """Of the pod's status: Evicted."""
    pod_message: str = ""
    """The sentence with it."""
    disruption: str = ""
    """The reason of the pod's condition DisruptionTarget: PreemptionByScheduler."""
    deletion_requested: bool = False
    """Whether the pod's deletion was requested before it ended."""

    @property
    def precedence(self) -> Precedence:
        """By what the process shows alone; root_cause.py of the operator adds what Kubernetes knows of the pod."""
        if self.bad_nodes:
            return Precedence.NODE
        if self.exception.startswith(KILLED_BY_KERNEL):
            return Precedence.KERNEL
        if self.stalled or self.early:
            return Precedence.OWN
        if self.resumable or self.vanished:
            return Precedence.RESUMABLE
        if self.symptom:
            return Precedence.SYMPTOM
        silent = not self.exception and self.exit_code in (None, 1, _ABORTED)
        return Precedence.UNKNOWN if silent else Precedence.OWN

    @property
    def lacks_program(self) -> bool:
        """Whether what was to run is not there: on its node, or on any."""
        return self.exit_code in CANNOT_RUN or self.exception.startswith(NO_PROGRAM)

    def brief(self) -> Failure:
        """As much of it as a line between agents and a report hold."""
        where = self.where or where_of(self.traceback.splitlines())
        return self._replace(exception=abridged(self.exception, BRIEF_MAX), traceback="", where=where)

    def as_dict(self) -> dict[str, Any]:
        """For a termination message, a line between agents or a report; what is unknown or False is left out."""
        known = {key: value for key, (name, _) in _KEYS.items() if (value := getattr(self, name))}
        always = {"exitCode": self.exit_code, "signal": self.signal, "exception": self.exception, "step": self.step}
        ranks = {} if self.rank is None else {"rank": self.rank}
        ranks |= {} if self.generation is None else {"generation": self.generation}
        return {**ranks, **always, "resumable": self.resumable, **known}

    @classmethod
    def from_dict(cls, written: Mapping[str, Any]) -> Failure:
        """What another process has written. Raises ValueError with the key of a value that is none; texts are cut."""
        if not isinstance(written, Mapping):
            raise ValueError(f"{written!r:.80} is no object")
        values = {}
        for key, (name, read) in _KEYS.items():
            if written.get(key) is not None:
                values[name] = read(written[key])
                if values[name] is None:
                    raise ValueError(f"{key}: {written[key]!r:.80} cannot be read")
        return cls(**values)


def _number(value: Any, first: int, end: int) -> int | None:
    return value if type(value) is int and first <= value < end else None


def _text(value: Any, length: int) -> str | None:
    return value[:length] if isinstance(value, str) else None


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _seconds(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and 0 < value < 1e11 else None


def _nodes(value: Any) -> tuple[int, ...] | None:
    are_ranks = isinstance(value, list) and all(_number(rank, 0, 2**31) is not None for rank in value)
    return tuple(value) if are_ranks and len(value) <= BAD_NODES_MAX else None


def root_cause(failures: Iterable[Failure]) -> Failure:
    """The failure that explains the others: the first of the strongest precedence. failures: as they were seen."""
    return min(failures, key=lambda failure: failure.precedence)


def signal_name(number: int) -> str:
    """SIGKILL for 9; SIGRTMIN+6 for 40, a real-time signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        first = getattr(signal, "SIGRTMIN", number)  # macOS has none
        is_real_time = first < number < getattr(signal, "SIGRTMAX", number)
        return f"SIGRTMIN+{number - first}" if is_real_time else f"SIG{number}"


def first_line(text: str) -> str:
    """Of what an exception says, with the next where it ends in a colon; of one that quotes a traceback, what that ends
    with. NCCL's error has its kind, by which a lost peer is known, in the second, and what it found in the one after
    "Last error:"."""
    text = quoted(text) or text
    first, *more = text.strip().split("\n")
    first = shorter(first)
    if unused := UNUSED_PARAMETERS.search(text):
        return with_next(first, unused[0])
    if goes_on(first):
        return with_next(first, next(filter(None, map(str.strip, more)), ""))
    second = more[0].rstrip() if more else ""
    if not second.startswith("nccl") or not second[4:5].isupper():
        return first
    line = f"{first} {second}"
    return with_last_error(line, more[2]) if len(more) > 2 and more[1].strip() == LAST_ERROR else line


def abridged(text: str, length: int) -> str:
    """Return a text of at most `length` characters: the beginning and, if it is short, the last sentence of a longer
    one, with an ellipsis between.

    The end begins with a sentence, so that no end of a secret can stand there without the name by which it is masked.
    """
    if len(text) <= length:
        return text
    last = re.split(r"[.!?;] ", text)[-1]
    end = f"… {last}" if len(last) <= length // 3 and not last.endswith("…") else "…"
    begin = text[: length - len(end) - 1]
    word = begin.rfind(" ")
    return f"{(begin[:word] if word > length // 2 else begin).rstrip()} {end}"


def goes_on(line: str) -> bool:
    """Whether the reason is in the next line: Error(s) in loading state_dict for Net:"""
    return line.endswith(":")


def with_next(line: str, following: str) -> str:
    """A line that goes on, with the next that is not empty."""
    return f"{line} {following.strip()}".rstrip()


def quoted(text: str) -> str:
    """What the last traceback in the text of an exception ends with: torch puts that of a DataLoader's worker, or of a
    process of spawn, there. "" where there is none.

        Caught ValueError in DataLoader worker process 1.
        Original Traceback (most recent call last):
          File "data.py", line 7, in __getitem__
        ValueError: no such shard: 7
    """
    _, has_one, trace = text.rpartition(_TRACEBACK)
    lines = trace.split("\n") if has_one else []
    ends = (i for i, line in enumerate(lines) if line.strip() and not line[0].isspace())
    return "\n".join(lines[next(ends, len(lines)) :]).strip()


def shorter(line: str) -> str:
    """torch's line of a GPU that is full, without what a message has no room for: what each other process has, which
    the total, the free memory and this process's tell as a sum, and the advice at its end. DDP's line of unused
    parameters without its advice."""
    if _UNFINISHED in line:
        return line.partition(_UNFINISHED)[0] + _UNFINISHED
    if "out of memory. Tried to allocate " not in line:
        return line
    line = _OTHER_PROCESS.sub("", line.partition(" If reserved but unallocated memory is large")[0])
    return line.replace("Including non-PyTorch memory, this process", "This process")


def with_last_error(line: str, last: str) -> str:
    """The line of NCCL's error, with what it found for what its kind means: ncclInvalidUsage: Duplicate GPU …"""
    return _KIND_OF_NCCL.sub(lambda kind: f"{kind[1]} {last.strip()}", line) if last.strip() else line


def where_of(trace: Iterable[str]) -> str:
    """The last line of a traceback that is the user's own and no library's: train.py:41. "" where there is none."""
    found = ""
    for line in trace:
        before, is_frame, rest = line.partition('File "')
        path, has_line, number = rest.partition('", line ')
        if not is_frame or not has_line or before.strip(" |+-") or _is_library(path):
            continue
        folder, _, name = path.rpartition("/")
        name = f"{folder.rpartition('/')[2]}/{name}" if name in ("__init__.py", "__main__.py") else name
        found = f"{name}:{number.partition(',')[0].strip()}"[:WHERE_MAX]
    return found


_OWN = tuple(f"{os.path.dirname(os.path.dirname(__file__))}/{name}/" for name in ("ddpjob", "ddpjob_core", "ddprun"))


def _is_library(path: str) -> bool:
    """Installed, of Python itself, of no file, or of this library, where it is not installed."""
    if path.startswith(_OWN):
        return True
    return "-packages/" in path or "/lib/python" in path or path.startswith("<") or path.endswith("/bin/torchrun")


_KEYS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "rank": ("rank", lambda value: _number(value, 0, 2**31)),
    "nodeRank": ("node_rank", lambda value: _number(value, 0, 2**31)),
    "exitCode": ("exit_code", lambda value: _number(value, -64, 256)),
    "signal": ("signal", lambda value: _text(value, 16)),
    "exception": ("exception", lambda value: _text(value, EXCEPTION_MAX)),
    "step": ("step", lambda value: _number(value, 0, 2**53)),
    "time": ("time", _seconds),
    **{name: (name, _flag) for name in "resumable symptom stalled early vanished unstarted preflight".split()},
    "waitedIn": ("waited_in", lambda value: _number(value, 0, 2**53)),
    "badNodes": ("bad_nodes", _nodes),
    "traceback": ("traceback", lambda value: _text(value, TRACEBACK_MAX)),
    "where": ("where", lambda value: _text(value, WHERE_MAX)),
    "class": ("failure_class", lambda value: _text(value, 16)),
    "chargedTo": ("charged_to", lambda value: _text(value, 16)),
    "generation": ("generation", lambda value: _number(value, 0, 2**31)),
}
