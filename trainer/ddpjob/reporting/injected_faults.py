"""Faults that `ddpjob run --fail` injects: DDPJOB_FAULTS lists them, and `progress` executes them.

[{"rank": 3, "step": 50, "signal": "SEGV"}, {"rank": 1, "step": 40, "exit": 3},
{"rank": 0, "step": 30, "hang": true, "attempt": 2, "generation": 1}]

A fault belongs to one attempt (default: the first) and one generation of ranks in it (default: 0, the first; later ones
are restarted in the same pods), so that training succeeds afterwards. It happens at the first step that the rank
reports at or after `step`. An invalid entry is named once on stderr and ignored.

A local run also sets DDPJOB_FAULTS_HAPPENED, the path of a folder. Then each fault happens once in the whole run. A
fault without "attempt" or "generation" happens in the attempt or generation that first reaches its step. A file in the
folder, named by the fault's index, records that it has happened.
"""

import contextlib
import json
import os
import signal
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

from ddpjob import process

HAPPENED = "DDPJOB_FAULTS_HAPPENED"


class Fault(NamedTuple):
    """One fault of this rank, in this attempt and generation."""

    rank: Any
    attempt: str | None
    """None: the first attempt, or any attempt of a run that records faults."""
    generation: str | None
    step: int
    kind: str
    value: Any
    record: str = ""
    """The file that records that the fault has happened; "" without a record."""


def ordered(environ: Mapping[str, str], rank: int) -> list[Fault]:
    """Return the faults of this rank in this attempt and generation."""
    text = environ.get("DDPJOB_FAULTS")
    if not text:
        return []
    folder = environ.get(HAPPENED, "")
    read = [(entry, _fault(entry, folder and os.path.join(folder, str(i)))) for i, entry in enumerate(_entries(text))]
    misread = [json.dumps(entry)[:200] for entry, fault in read if fault is None]
    if misread:
        process.log(
            f"DDPJOB_FAULTS: {', '.join(misread)} left out: a fault has rank, step, perhaps attempt and generation, "
            f"and one of signal (a name), exit (1 to 255), hang (true)"
        )
    generation = environ.get("DDPJOB_GENERATION") or environ.get("TORCHELASTIC_RESTART_COUNT") or "0"
    attempt = environ.get("DDPJOB_ATTEMPT") or "1"
    return [f for _, f in read if f and f.rank == rank and _is_of(f, attempt, generation)]


def obey(faults: list[Fault], step: int) -> list[Fault]:
    """Execute the faults that are due at this step. Return the faults of later steps."""
    due = [fault for fault in faults if fault.step <= step]
    for fault in due:
        if not fault.record or _records(fault.record):
            _break(fault)
    return [fault for fault in faults if fault not in due]


def _is_of(fault: Fault, attempt: str, generation: str) -> bool:
    if fault.record:
        return fault.attempt in (None, attempt) and fault.generation in (None, generation)
    return (fault.attempt or "1", fault.generation or "0") == (attempt, generation)


def _records(file: str) -> bool:
    """True if this call recorded the fault. A fault that cannot be recorded does not happen, because it would happen
    again after each restart."""
    with contextlib.suppress(OSError):
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        return True
    return False


def _entries(text: str) -> list[Any]:
    try:
        entries = json.loads(text)
    except ValueError:
        return [text]
    return entries if isinstance(entries, list) else [entries]


def _fault(entry: Any, record: str) -> Fault | None:
    """Return the fault; None if the entry is invalid."""
    try:
        (kind,) = set(entry) - {"rank", "step", "attempt", "generation"}
        attempt, generation = (str(entry[key]) if key in entry else None for key in ("attempt", "generation"))
        value = _value(kind, entry[kind])
        return Fault(entry["rank"], attempt, generation, int(entry["step"]), kind, value, record)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _value(kind: str, value: Any) -> Any:
    if kind == "signal":
        return signal.Signals[value if value.startswith("SIG") else f"SIG{value}"]
    if (kind == "exit" and type(value) is int and 0 < value < 256) or (kind == "hang" and value is True):
        return value
    raise ValueError(kind)


def _break(fault: Fault) -> None:
    value = {"signal": getattr(fault.value, "name", ""), "exit": str(fault.value)}.get(fault.kind, "")
    process.log(f"injected fault at step {fault.step}: {fault.kind} {value}".rstrip())
    if fault.kind == "signal":
        os.kill(os.getpid(), fault.value)
    elif fault.kind == "exit":
        raise SystemExit(fault.value)  # like sys.exit() in a script: leaves the group, writes the termination message
    else:
        threading.Event().wait()  # the thread that posts continues, so the rank reports but makes no step
