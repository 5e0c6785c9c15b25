"""A failure as ranks, agents and operator know it, and the choice of the root cause among several.

Standard library only and cheap to import, because a job starts only when its agent has imported it.
"""

from __future__ import annotations

import enum
import re
import signal
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

# EX_TEMPFAIL of sysexits.h. When some pods are asked to stop, all ranks save at one agreed step and stop.
# Ranks of the other pods must not exit with 0, or they would count as completed.
RESUMABLE_EXIT_CODE = 75
CANNOT_RUN = (126, 127)
"""Exit codes of shells and torchrun for a program that is missing or not executable."""
NO_PROGRAM = "ddprun: there is no "
"""Beginning of the exception that an agent records if a rank's script or module is missing."""
EXCEPTION_MAX = 500
BRIEF_MAX = 300
WHERE_MAX = 128
TRACEBACK_MAX = 65_536
BAD_NODES_MAX = 64
KILLED_BY_KERNEL = "out of memory: killed by the kernel"
"""Exception that an agent records for a rank that the kernel killed for lack of memory."""
OUTPUT_UNREAD = "nobody reads its output any more"
"""Exception that an agent records for a rank that failed because the console is closed: `ddprun … | head`."""
_ABORTED = 134
UNUSED_PARAMETERS = re.compile(r"^Parameter(?:s| indices) which did not receive grad for rank \d+: .*", re.MULTILINE)
"""The line of DDP's longest error that names the parameters (reducer.cpp); the lines before it are advice."""
_UNFINISHED = "Expected to have finished reduction in the prior iteration before starting a new one."
LAST_ERROR = "Last error:"
"""Line of NCCL's error above the details."""
_TRACEBACK = "Traceback (most recent call last):\n"
_OTHER_PROCESS = re.compile(r"Process \d+ has [\d.]+ \w+ memory in use\. ?")
_KIND_OF_NCCL = re.compile(r"(?<= )(nccl[A-Z]\w*:) .*")


class Precedence(enum.IntEnum):
    """Order of failures by how likely they are the cause; the failure with the lowest number is the root cause."""

    KERNEL = 0
    """Out of memory, or never started: nothing outside the pod causes that."""
    NODE = 1
    """The pod was evicted or preempted, or its node is lost or slow."""
    DELETED = 2
    """The pod was deleted by somebody other than the operator."""
    OWN = 3
    """An exception, a signal or an exit code that no lost peer explains."""
    NODE_LATE = 4
    """As NODE, but seen after the operator had stopped the pod: the kubelet reports an eviction at its end."""
    UNKNOWN = 5
    """Exit code 1 without an exception, or an abort: many failures look like this."""
    LATE = 6
    """As OWN, but the process ended after the operator had stopped the pod. It probably made the others fail."""
    RESUMABLE = 7
    """The rank saved and stopped on request, or an agent's connection was lost: the cause is elsewhere."""
    SYMPTOM = 8
    """The rank only reports a lost peer."""
    STOPPED = 9
    """The operator stopped the pod."""


class Failure(NamedTuple):
    """The failure of a rank, or of a whole node."""

    rank: int | None = None
    """The global rank; None for a whole node."""
    node_rank: int | None = None
    """The node, if it failed as a whole."""
    exit_code: int | None = None
    """128 + n if signal n ended the process."""
    signal: str = ""
    """For example SIGSEGV."""
    exception: str = ""
    """The exception's line."""
    step: int = 0
    """Last step of the rank."""
    time: float = 0.0
    """Seconds since 1970 by the clock of the rank's node; 0 if unknown."""
    resumable: bool = False
    """True if the rank stopped on request, with its state saved."""
    symptom: bool = False
    """True if the exception only reports a lost peer."""
    stalled: bool = False
    """True if the rank was stopped because the group was stalled."""
    early: bool = False
    """True if the rank ended with 0 while others were waiting for it."""
    vanished: bool = False
    """True if the node, the pod or the agent's connection was lost without a report."""
    unstarted: bool = False
    """True if the process could not be started."""
    preflight: bool = False
    """True if the failure comes from a node check before the training."""
    bad_nodes: tuple[int, ...] = ()
    """Node ranks that a node check found far slower than the others."""
    traceback: str = ""
    """The last lines of the traceback."""
    where: str = ""
    """The line of the script that raised the exception, such as train.py:41."""
    failure_class: str = ""
    """The rules.Class that an agent assigned."""
    charged_to: str = ""
    """The budget that an agent charged."""
    generation: int | None = None
    """Generation of the ranks that this failure ended, according to the agent that charged it."""
    waited_in: int = 0
    """The default group's collective in which the rank waited for another until its timeout; 0: none or unknown."""
    # Kubernetes' facts about the pod. Only the operator sets these fields; no process sends them.
    container_reason: str = ""
    """Reason in the container's status: OOMKilled, Error, StartError."""
    pod_reason: str = ""
    """Reason in the pod's status: Evicted."""
    pod_message: str = ""
    """The sentence of the pod's reason."""
    disruption: str = ""
    """Reason of the pod's condition DisruptionTarget, such as PreemptionByScheduler."""
    deletion_requested: bool = False
    """True if the pod's deletion was requested before it ended."""

    @property
    def precedence(self) -> Precedence:
        """Return the precedence by how the process ended; root_cause.py also uses Kubernetes' facts about the pod."""
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
    def only_complains(self) -> bool:
        """True if the rank only reports a lost peer. Agents decide this, because texts differ by backend and torch."""
        return self.symptom and not self.unstarted

    @property
    def lacks_program(self) -> bool:
        """True if the program is missing on its node."""
        return self.exit_code in CANNOT_RUN or self.exception.startswith(NO_PROGRAM)

    def brief(self) -> Failure:
        """Return the failure with short texts, for reports and for messages between agents."""
        where = self.where or where_of(self.traceback.splitlines())
        return self._replace(exception=abridged(self.exception, BRIEF_MAX), traceback="", where=where)

    def as_dict(self) -> dict[str, Any]:
        """Return the failure as a JSON object without unknown or False values, for messages and reports."""
        known = {key: value for key, (name, _) in _KEYS.items() if (value := getattr(self, name))}
        always = {"exitCode": self.exit_code, "signal": self.signal, "exception": self.exception, "step": self.step}
        ranks = {} if self.rank is None else {"rank": self.rank}
        ranks |= {} if self.generation is None else {"generation": self.generation}
        return {**ranks, **always, "resumable": self.resumable, **known}

    @classmethod
    def from_dict(cls, written: Mapping[str, Any]) -> Failure:
        """Read a failure that another process wrote; cut long texts. Raise ValueError that names the invalid key."""
        if not isinstance(written, Mapping):
            raise ValueError(f"{written!r:.80} is not an object")
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
    """Return the failure that explains the others: the first with the lowest precedence. failures: as they arrived."""
    return min(failures, key=lambda failure: failure.precedence)


def signal_name(number: int) -> str:
    """Return SIGKILL for 9; SIGRTMIN+6 for 40, a real-time signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        first = getattr(signal, "SIGRTMIN", number)  # macOS has no real-time signals
        is_real_time = first < number < getattr(signal, "SIGRTMAX", number)
        return f"SIGRTMIN+{number - first}" if is_real_time else f"SIG{number}"


def first_line(text: str) -> str:
    """Return the first line of an exception, joined with the next if it ends in a colon.

    If the text quotes a traceback, return its end. For NCCL's error add the detail after "Last error:", and the kind of
    error from the second line, which shows a lost peer.
    """
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
    """Return at most `length` characters: the beginning and, if it is short, the last sentence, with an ellipsis
    between.

    The last sentence is never cut, because redaction finds a secret only by the name before it.
    """
    if len(text) <= length:
        return text
    last = re.split(r"[.!?;] ", text)[-1]
    end = f"… {last}" if len(last) <= length // 3 and not last.endswith("…") else "…"
    begin = text[: length - len(end) - 1]
    word = begin.rfind(" ")
    return f"{(begin[:word] if word > length // 2 else begin).rstrip()} {end}"


def goes_on(line: str) -> bool:
    """True if the next line has the reason, as after `Error(s) in loading state_dict for Net:`."""
    return line.endswith(":")


def with_next(line: str, following: str) -> str:
    """Join a line with the next line that is not empty."""
    return f"{line} {following.strip()}".rstrip()


def quoted(text: str) -> str:
    """Return the end of the last traceback quoted in an exception; "" if there is none. torch quotes the traceback of a
    DataLoader worker or of a spawned process:

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
    """Shorten torch's line about a full GPU: drop the advice, and the memory of each other process (the totals include
    it). Drop the advice of DDP's line about unused parameters.
    """
    if _UNFINISHED in line:
        return line.partition(_UNFINISHED)[0] + _UNFINISHED
    if "out of memory. Tried to allocate " not in line:
        return line
    line = _OTHER_PROCESS.sub("", line.partition(" If reserved but unallocated memory is large")[0])
    return line.replace("Including non-PyTorch memory, this process", "This process")


def with_last_error(line: str, last: str) -> str:
    """Replace NCCL's description of an error kind by the detail, for example ncclInvalidUsage: Duplicate GPU …"""
    return _KIND_OF_NCCL.sub(lambda kind: f"{kind[1]} {last.strip()}", line) if last.strip() else line


def where_of(trace: Iterable[str]) -> str:
    """Return the last line of a traceback in the user's own code, such as train.py:41; "" if there is none."""
    found = ""
    for line in trace:
        before, is_frame, rest = line.partition('File "')
        path, has_line, number = rest.partition('", line ')
        if not is_frame or not has_line or before.strip(" |+-") or is_library(path):
            continue
        folder, _, name = path.rpartition("/")
        name = f"{folder.rpartition('/')[2]}/{name}" if name in ("__init__.py", "__main__.py") else name
        found = f"{name}:{number.partition(',')[0].strip()}"[:WHERE_MAX]
    return found


_ROOT = __file__.rpartition("/")[0].rpartition("/")[0]
_OWN = tuple(f"{_ROOT}/{name}/" for name in ("ddpjob", "ddpjob_core", "ddprun"))


def is_library(path: str) -> bool:
    """True for installed packages, Python's own files, code without a file, and this library in a clone."""
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
