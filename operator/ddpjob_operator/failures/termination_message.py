"""Reads a container's termination message: the trainer library's, torchrun's table, a traceback, or nothing.

The kubelet keeps the termination message, or the last 2 kB of the log. The text may be cut anywhere, mix lines of
several ranks, or be garbage; it then counts as a log.
"""

from __future__ import annotations

import contextlib
import re
import signal as signals
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from ddpjob_core import failures, rules
from ddpjob_core.failures import (
    LAST_ERROR,
    UNUSED_PARAMETERS,
    Failure,
    goes_on,
    shorter,
    where_of,
    with_last_error,
    with_next,
)
from ddpjob_core.findings import FINDINGS_MAX, NamedFinding, hidden_failure
from ddpjob_operator.failures.log_lines import BORDER, LINE_MAX, PREFIX, is_of_no_rank
from ddpjob_operator.failures.redaction import clean
from ddpjob_operator.job import reasons
from ddpjob_operator.job.bounds import NOT_READABLE
from ddpjob_operator.observed.hidden_failure import is_recorded
from ddpjob_operator.observed.reports import AgentReport

# Characters that are read; a local run keeps 16 kB of log, the kubelet 2 to 4 kB.
READ_MAX = 65_536

_RANK = re.compile(r"\[rank(\d{1,9})\]")
_GUTTER = re.compile(r"^ {1,80}\| ")
_CHAINED = re.compile(r"^(?:During handling of the above exception|The above exception was the direct cause)")
# "ValueError: no such shard": an exception without its traceback.
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt)(?::.*)?$")
_TRACEBACK_END = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?::.*)?$")
# Printed by multiprocessing above the traceback of a child: Process SpawnProcess-1:
_PROCESS = re.compile(r"^Process \S+:$")
# Printed above the traceback that ended a thread, or a process of multiprocessing.
_ENDS_A_PART = re.compile(r"^(?:\[[^]\n]{1,40}\]:\s?)*(?:Exception in thread .*|Process \S+:)$", re.MULTILINE)
_ANY_TRACEBACK = re.compile(r"(?:\A|^(?!Exception ignored |--- Logging ).*\n)(?=Traceback \()", re.MULTILINE)
# Part of torchrun's report of a failure.
REPORTS_FAILURE = "ChildFailedError"
# Exceptions with which a program ends after SIGTERM or Ctrl-C.
_NO_FAILURE = ("KeyboardInterrupt", "SystemExit", "BrokenPipeError")
# Text before an exception that ends no program: in a `__del__` (such as a DataLoader's at exit), or in a log line.
_ENDS_NOTHING = re.compile(r"^(?:Exception ignored |--- Logging error ---)")
# Errors of a parent whose child has reported its failure in detail: `accelerate launch` on one GPU, wrappers, spawn.
_OF_A_CHILD = re.compile(
    r"^subprocess\.CalledProcessError: Command '\[?'?[^ ']*(?:python[\d.]*|torchrun|ddprun)[' ]"
    r"|^torch\.multiprocessing\.spawn\.ProcessExitedException: process \d+ terminated with exit code 1$"
)
# How the lines of a traceback begin: Python's, loguru's, rich's.
_OF_TRACEBACK = " \t>\u2502\u2570"
_GROUP = re.compile(r"\(\d+ sub-exceptions?\)$")
_TERMINATE = re.compile(r"^terminate called after throwing an instance of '(.+)'")
_WHAT = re.compile(r"^\s+what\(\):\s+(.*)$")
# torch.multiprocessing.spawn reports the exit of the process that made it stop.
_SPAWNED = re.compile(r"ProcessExitedException: process \d+ terminated with (?:exit code (\d{1,3})|signal (\w+))")
_INTERPRETER = re.compile(r"python|^exec |exec user process")
# Begins the second line of NCCL's error: `ncclSystemError: System call …`. Does not match `nccl_train.py FAILED`.
_OF_NCCL = re.compile(r"nccl[A-Z]\w*\b")
_TORCHS_OWN = re.compile(r"gloo|c10d|nccl|Dist\w*Error|Rendezvous", re.IGNORECASE)
# The function in which torchrun waits for other nodes after its own ranks ended with 0 (elastic/agent/server/api.py).
_TORCHRUN_WAITED = "in _exit_barrier\n"
# torchrun prints this when it stops its other ranks: Sending process 2000 closing signal SIGTERM.
_STOPS = " closing signal SIG"
_ABORTED, _TERMINATED = 134, 143
_TORCHRUN_SIGNALLED = re.compile(r"SignalException: Process \d+ got signal: (\d{1,2})$")

# torchrun's summary at the end of its output (torch/distributed/elastic/multiprocessing/errors, 1.9 to 2.13).
_SECTION = re.compile(r"^(?:Failures|Other Failures|Root Cause[^:]{0,60}):\s*$")
_ENTRY = re.compile(r"^\[\d+\]:\s*$")
_FIELD = re.compile(r"^  (rank|exitcode|traceback|msg|time|host|error_file)\s{0,9}:(?: (.*))?$")


class Message(NamedTuple):
    """Contents of a termination message, or of the end of a log."""

    failure: Failure = Failure()
    """Failure of the rank that failed first in the container."""
    log: str = ""
    """The container's output."""
    done: bool = False
    """True if all ranks of the container had ended with 0, and only the launcher was stopped."""
    ended: bool = False
    """True if the agent ended by agreement of the group's agents. A lost agent writes no message."""
    agent: AgentReport | None = None
    """Node 0's restarts in place."""
    findings: tuple[NamedFinding, ...] = ()
    """Reasons to doubt a success."""

    @property
    def agreed(self) -> str:
        """The class on which the agents agreed before any of them was requested to stop; "" if they did not."""
        return self.failure.failure_class if self.ended else ""


def read_message(text: str) -> Message | None:
    """Return the message of the library or an agent; None if the text has none. Any log after it is ignored."""
    return _message(text)[0]


def read(text: str) -> Message:
    """Return the message, completed from the log. The library's exception outranks the log's."""
    message, log = _message(text)
    report = _read_log(log)
    if message is None:
        return report
    failure, of_log = message.failure, report.failure
    code = _code(failure.exit_code, failure.signal)
    same = failure.exception.strip() in ("", of_log.exception)
    merged = failure._replace(
        rank=of_log.rank if failure.rank is None else failure.rank,
        exit_code=of_log.exit_code if code is None else code,
        exception=failure.exception.strip() or of_log.exception,
        resumable=not failure.stalled and (failure.resumable or code == rules.RESUMABLE_EXIT_CODE),
        symptom=failure.symptom or rules.is_symptom(failure.exception),
        where=failure.where or where_of(failure.traceback.splitlines()) or (of_log.where if same else ""),
        traceback="",
    )
    lines = "\n".join(part for part in (failure.traceback or failure.exception, log) if part.strip())
    return message._replace(failure=merged, log=lines)


def findings(text: str, *, trusted: bool | None) -> Iterator[NamedFinding]:
    """Yield reasons to doubt the success of a container that ended with 0.

    trusted: True if the exit code is that of the container's last launcher. An earlier failure in log or message is
    then ignored, because a retry succeeded. False if the shell hides the exit code, so any traceback may be the end of
    a rank. A traceback at the end of the log always counts, because the script printed it and ended.
    """
    message, log = _message(text)
    if message is not None:
        yield from message.findings
    failure = _failure_in_log(log, trusted=trusted is True)
    if message is not None and is_recorded(text) and not trusted:
        failure = message.failure
    if failure is not None:
        why = f"its own was {failure.exit_code}" if failure.exit_code else "its launcher reports it"
        yield hidden_failure(failure.rank, failure.where, failure.exception or why)
    elif trusted is False and (may_have_ended := next(_own_after(_ANY_TRACEBACK, log), None)) is not None:
        what = f"the log has {may_have_ended.exception} ({may_have_ended.where})"
        yield NamedFinding(reasons.EXIT_CODE_LOST.name, f"{what}, and the shell hides if that ended a rank")


def _failure_in_log(log: str, *, trusted: bool) -> Failure | None:
    """Return the failure of a rank in the log of a success.

    Without torch's prefix or torchrun's report, only a traceback at the end counts, because a script that continued has
    handled its exception. An exception that ended a thread or a process was not handled. Exceptions of libraries do not
    count: for example, pin_memory may fail at the end of a good run.
    """
    # Count the failure of an atexit callback, because the callback may save or upload, and nothing else reports it.
    log = log.replace("Exception ignored in atexit callback", "At the exit")
    exceptions = raised(log)
    if not trusted and (REPORTS_FAILURE in log or any(f.rank is not None for f in exceptions)):
        return _read_log(log).failure
    if exceptions and _ends_with_traceback(log):
        return _cause(exceptions[-1:])
    own = next(_own_after(_ENDS_A_PART, log), None)
    return own and own._replace(exception=f"{own.exception} (in a thread or a process)")


def _own_after(begins: re.Pattern[str], log: str) -> Iterator[Failure]:
    """Yield the first exception after each match that was raised in the user's own code."""
    for begin in begins.finditer(log):
        for one in raised(log[begin.end() :])[:1]:
            if one.where and not one.exception.startswith(_NO_FAILURE):
                yield one


def _ends_with_traceback(log: str) -> bool:
    """True if the log ends with a traceback. Lines that launchers and libraries print at every exit may follow."""
    before, begins, rest = log.rpartition("Traceback (most recent call last)")
    above = before.rstrip().rpartition("\n")[2]
    if not begins or PREFIX.match(before.rpartition("\n")[2]) or _ENDS_NOTHING.match(above):
        return False
    lines = (line for line in rest.splitlines()[1:] if line.strip() and line[0] not in _OF_TRACEBACK)
    exception, *more = [line for line in lines if not (is_of_no_rank(line) or _PROCESS.match(line))] or [""]
    ends = bool(_TRACEBACK_END.match(exception)) and not exception.startswith(_NO_FAILURE)
    return ends and all(map(_EXCEPTION.match, more))  # several processes may write into one traceback


def raised(log: str) -> list[Failure]:
    """Return the exceptions in a log, in the order in which their tracebacks end. A chain of exceptions counts as one.

    The rank comes from the line's prefix. An exception is a symptom if it reports a lost peer, or if its chain began
    with such an exception.
    """
    chains: list[list[Failure]] = []
    streams: dict[str, _Stream] = {}
    for raw in log.splitlines():
        prefix = PREFIX.match(raw[:200])
        name = prefix[0] if prefix else ""
        rank = _RANK.search(name)
        stream = streams.setdefault(name, _Stream(int(rank[1]) if rank else None))
        stream.read(raw[len(name) :][:LINE_MAX], chains)
    return [_of_chain(chain) for chain in chains]


def table(log: str) -> list[Failure]:
    """Return the rows of torchrun's last failure table in a log. The table's top may be cut off.

    torchrun's root cause comes first. A row has an exception only if the script uses @record.
    """
    rows: list[tuple[bool, dict[str, str]]] = [(True, {})]
    root, field = True, ""
    for line in log.splitlines():
        if _SECTION.match(line):
            root, field = line.startswith("Root"), ""
            rows = [] if line.startswith("Failures") else rows
        elif _ENTRY.match(line) or BORDER.match(line):
            rows.append((root, {}))
            field = ""
        elif rows and (match := _FIELD.match(line[:LINE_MAX])):
            field = match[1]
            rows[-1][1][field] = match[2] or ""
        elif rows and field in ("traceback", "msg"):
            rows[-1][1][field] += "\n" + line.removeprefix("  ")
    rows.sort(key=lambda row: not row[0])
    return [row for _, fields in rows if (row := _row(fields)) is not None]


def signal_name(exit_code: int | None) -> str:
    """Return for example SIGKILL for 137; "" if no signal ended the process. 168 counts as an exit code that the
    program chose, not as a real-time signal."""
    number = (exit_code or 0) - 128
    return failures.signal_name(number) if number in set(signals.Signals) else ""


class _Stream:
    """Collects the lines of one rank, because the ranks of a pod print tracebacks at the same time."""

    def __init__(self, rank: int | None) -> None:
        self.rank = rank
        self.inside = self.chained = self.passed_over = self.found = self.goes_on = False
        self.thrown = ""
        self.where = ""
        self.chain: list[Failure] = []

    def read(self, line: str, chains: list[list[Failure]]) -> None:
        line = _GUTTER.sub("", line)
        if not line.strip():
            return
        goes_on_here, self.goes_on = self.goes_on and not is_of_no_rank(line), False
        if "Traceback (most recent call last):" in line:
            self.inside, self.where = True, ""
        elif _CHAINED.match(line):
            self.chained = True
        elif _ENDS_NOTHING.match(line):
            self.inside, self.passed_over = False, True
        elif thrown := _TERMINATE.match(line):
            self.thrown = thrown[1]
        elif self.thrown and (what := _WHAT.match(line)):
            self._add(f"{self.thrown}: {what[1]}", chains)
        elif self.chain and (goes_on_here or UNUSED_PARAMETERS.match(line)):
            self.chain[-1] = self.chain[-1]._replace(exception=with_next(self.chain[-1].exception, line))
        elif self.chain and (self.found or _OF_NCCL.match(line) or line.strip() == LAST_ERROR):
            self._of_nccl(line)
        elif line[0].isspace():
            self.where = where_of([line]) or self.where
        else:
            self._unindented(line.rstrip(), chains)

    def _of_nccl(self, line: str) -> None:
        """Add another line to the text of NCCL's error."""
        before, found = self.chain[-1], self.found
        self.found = line.strip() == LAST_ERROR
        if not self.found:
            text = with_last_error(before.exception, line) if found else f"{before.exception} {line}"
            self.chain[-1] = self._raised(text)._replace(where=before.where)

    def _unindented(self, line: str, chains: list[list[Failure]]) -> None:
        ends = _EXCEPTION.match(line) or (self.inside and _TRACEBACK_END.match(line))
        self.inside = False
        # Skip torchrun's own error, which is not the cause, and an ExceptionGroup, whose members are counted instead.
        if ends and "ChildFailedError" not in line and not _GROUP.search(line):
            self._add(line, chains)
        self.passed_over = False

    def _add(self, line: str, chains: list[list[Failure]]) -> None:
        if not (self.chained and self.chain):
            self.chain = []
            chains += [] if self.passed_over else [self.chain]
        self.chained, self.thrown = False, ""
        self.chain.append(self._raised(line))
        self.where, self.goes_on = "", goes_on(line)

    def _raised(self, line: str) -> Failure:
        return Failure(self.rank, exception=shorter(line), symptom=rules.is_symptom(line), where=self.where)


def _of_chain(chain: list[Failure]) -> Failure:
    """Return the failure of a chain of exceptions: the first if it reports a lost peer, else the last that does not."""
    if chain[0].symptom:
        return chain[0]
    own = [r for r in reversed(chain) if not r.symptom]
    killed = next((r for r in own if rules.WORKER_KILLED.match(r.exception)), own[0])
    return killed._replace(where=killed.where or own[0].where)  # the traceback of a killed worker shows only torch


def _read_log(log: str) -> Message:
    rows, exceptions = table(log), raised(log)
    signalled = _last_match(_TORCHRUN_SIGNALLED, exceptions)
    if signalled is not None and not rows:
        # After a signal torchrun exits with 1, so take the signal's number from its exception.
        return Message(Failure(exit_code=128 + int(signalled[1])), log, done=_TORCHRUN_WAITED in log)
    spawned = _last_match(_SPAWNED, exceptions)
    code = _code(int(spawned[1] or 0), spawned[2] or "") if spawned else None
    rows = _before_they_were_stopped(log, rows)
    culprit = min(rows, key=lambda row: _has_followed(row, exceptions), default=Failure(exit_code=code))
    cause = next((c for c in _causes(log, culprit, exceptions, cut=not rows) if c.exception), culprit)
    return Message(
        culprit._replace(
            rank=cause.rank if culprit.rank is None else culprit.rank,
            exception=cause.exception,
            where=cause.where,
            symptom=cause.symptom,
            resumable=culprit.exit_code == rules.RESUMABLE_EXIT_CODE,
        ),
        log,
        done=_TORCHRUN_WAITED in log,
    )


def _causes(log: str, culprit: Failure, exceptions: list[Failure], *, cut: bool) -> Iterator[Failure]:
    """Yield possible causes for the end of `culprit`, most certain first. Exceptions of other ranks do not explain it.

    cut: True if torchrun's table has no row left, because the log begins after the rows.
    """
    yield culprit
    yield _cause([r for r in exceptions if r.rank is not None and r.rank == culprit.rank])
    yield _cause([r for r in exceptions if culprit.rank is None or r.rank is None])
    lines = log.rstrip().splitlines()
    if cut and lines and BORDER.match(lines[-1]):  # a traceback in torchrun's table, whose top lines are cut off
        yield _cause(raised("\n".join(line.removeprefix("  ") for line in lines[1:-1] if line.startswith("  "))))
    # The log may begin within the message of a lost connection: gloo's line plus torchrun's table exceed 2 kB.
    line = log.partition("\n")[0]
    is_complaint = rules.SYMPTOMS.search(line) and _TORCHS_OWN.search(line)
    yield Failure(exception=f"…{line}", symptom=True) if is_complaint else Failure()
    # Some failures raise no exception: of the interpreter (`python nowhere.py`) or of the container runtime.
    unmarked = (PREFIX.sub("", line[:LINE_MAX]) for line in log.splitlines())
    errors = (line for line in unmarked if _INTERPRETER.search(line) and rules.CANNOT_EVER_START.match(line))
    yield Failure(exception=next(errors, "").strip())


def _cause(exceptions: list[Failure]) -> Failure:
    """Return the last exception that is not a symptom, or the last exception if all are symptoms."""
    own = [r for r in exceptions if not _OF_A_CHILD.match(r.exception)] or exceptions
    return next((r for r in reversed(own) if not r.symptom), own[-1] if own else Failure())


def _before_they_were_stopped(log: str, rows: list[Failure]) -> list[Failure]:
    """Return the rows, corrected for a rank that torchrun stopped after it had raised.

    Python with torch needs a second to exit, so a rank that has lost the connection may end before the rank that
    raised. The rank that raised then counts as ended by its exception, with 1, before all ranks without an exception.
    Only torch's prefix proves that the exception was not caught.
    """
    before, stops, _ = log.partition(_STOPS)
    ended = {f.rank for f in raised(before) if f.rank is not None and not f.symptom} if stops else set()
    late = [row._replace(exit_code=1) for row in rows if row.exit_code == _TERMINATED and row.rank in ended]
    if not late:
        return rows
    others = [row for row in rows if row.rank not in {one.rank for one in late}]
    silent = [row for row in others if row.exit_code in (1, _ABORTED) and not row.exception and row.rank not in ended]
    return [*(row for row in others if row not in silent), *late, *silent]


def _has_followed(row: Failure, exceptions: list[Failure]) -> bool:
    """True if this failure may be the effect of another one. torchrun checks ten times per second, stops the other
    ranks with SIGTERM, and orders failures between two checks by rank. So its root cause may be a symptom."""
    own = row if row.exception else _cause([r for r in exceptions if r.rank is not None and r.rank == row.rank])
    return own.symptom or row.exit_code in (_TERMINATED, rules.RESUMABLE_EXIT_CODE)


def _row(fields: dict[str, str]) -> Failure | None:
    code = _code(_integer(fields.get("exitcode", "")), "")
    if code is None:
        return None
    rank = _integer(fields.get("rank", ""))
    cause = _cause(raised(fields.get("traceback", fields.get("msg", ""))))
    # Ranks are never negative, but a log may contain any number.
    return cause._replace(rank=None if rank is None or rank < 0 else rank, exit_code=code)


def _last_match(pattern: re.Pattern[str], exceptions: list[Failure]) -> re.Match[str] | None:
    return next((match for r in reversed(exceptions) if (match := pattern.search(r.exception))), None)


def _message(text: str) -> tuple[Message | None, str]:
    text = clean(text[-READ_MAX:])
    first, _, rest = text.partition("\n")
    try:
        written = msgspec.json.decode(first.encode(), type=dict[str, Any])
        failure = Failure.from_dict(written)
        agent = msgspec.convert(written.get("agent"), AgentReport | None)
    except (*NOT_READABLE, ValueError):
        return None, text
    if type(written.get("ddpjob")) is not int or written["ddpjob"] != 1:
        return None, text
    # Clean again: JSON has decoded \u001b into an escape character.
    failure = failure._replace(exception=clean(failure.exception), traceback=clean(failure.traceback))
    found = _findings(written.get("findings"))
    return Message(failure, ended=written.get("ended") is True, agent=agent, findings=found), rest


def _findings(written: Any) -> tuple[NamedFinding, ...]:
    found: list[NamedFinding] = []
    for one in written[:FINDINGS_MAX] if isinstance(written, list) else ():
        with contextlib.suppress(ValueError):
            read = NamedFinding.from_dict(one)
            found.append(read._replace(message=clean(read.message)))
    return tuple(found)


def _code(exit_code: int | None, signal: str) -> int | None:
    if signal in signals.Signals.__members__:
        return 128 + signals.Signals[signal].value
    if exit_code is None or exit_code == 0:
        return None
    return exit_code if exit_code > 0 else 128 - exit_code


def _integer(text: str) -> int | None:
    match = re.match(r"-?\d{1,9}\b", text)
    return int(match[0]) if match else None
