"""Reads the end of a log, and the last line of a program that ended without an exception: an error of argparse or
click, or the text of `sys.exit("text")`. No decision depends on this line, because it may also be the last line of a
stopped rank."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

from ddpjob_operator.failures.redaction import mask

TAIL_MAX = 2048
"""Bytes of the log's end in the status."""
ANSWER = "ddpjob-answer-"
"""Prefix of the lines that return the result of a function, in base64 for programs (docs/python.md)."""
LAST_LINE = "last line: "
"""Prefix of a last line that may not be the reason."""
# Exit codes of sys.exit("text"), of argparse and click, and of shells that cannot start a program.
# Other exit codes were chosen by the program, and the last line of its log does not explain them.
_CODES = (1, 2, 126, 127)
LINE_MAX = 2000
# `[rank1]: ` comes from torch, `[default0]:` (with the local rank) from torchrun --tee.
PREFIX = re.compile(r"^(?:\[[A-Za-z]{0,20}\d{1,9}\]:\s?)+")
_RANK = re.compile(r"\[rank(\d{1,9})\]")
_ARGPARSE = re.compile(r"^[^\s:][^:]{0,200}: error: \S")
_CLICK = re.compile(r"^Error: \S")
_BOX = re.compile(r"^[\u256d\u250c\u250f][\u2500\u2501] Error ")
# Lines of torchrun itself: _REPORT matches the first line of its report (until torch 2.1 with the logger's name).
# _LAUNCHERS_OWN also matches lines about OMP_NUM_THREADS or, with LOGLEVEL=INFO, about each start.
_REPORT = re.compile(
    r"^(?:[EW]\d{4} \d\d:\d\d:\d\d.*torch/distributed/elastic|(?:ERROR|WARNING):torch\.distributed\.elastic)"
)
_REPORT_ENDS = re.compile(
    r"ChildFailedError|Root Cause \(first observed failure\)|SignalException: Process \d+ got signal"
)
_LAUNCHERS_OWN = re.compile(
    r"^(?:[EWI]\d{4} \d\d:\d\d:\d\d.*torch/distributed/|(?:ERROR|WARNING|INFO):torch\.distributed|ddprun: (?!error: )"
    r"|\[\d{4}-[\d ,:-]{1,30}\] \[[A-Z]{1,9}\] \[launch\.py:|srun: error: |slurmstepd: error: )"
)
BORDER = re.compile(r"^(?:={7,}|\*{7,}|-{7,})\s*$")
# Lines that libraries print at the end of any program, for example torch if a group was not destroyed.
# wandb prints lines about its files, hydra a hint about HYDRA_FULL_ERROR, and Python a line of code below each warning.
_SUMMARY = re.compile(
    r"^(?:\[[WI]\d{4} \d\d:\d\d:\d\d|wandb: |Set the environment variable HYDRA_FULL_ERROR=1"
    r"|[^\s:][^:]{0,300}:\d{1,9}: [A-Za-z_.]{0,60}Warning: )"
)
_CODE_BELOW = re.compile(r"^ +\S")
# typer draws a box around click's messages.
_BLANK = " \t\u2502\u2503|"
# bytes; the kubelet keeps the last 2048, so the first line of a log this long is incomplete
_CUT_FROM = 2000


def of(log: str, exit_code: int | None, rank: int | None = None) -> str:
    """Return the program's own sentence at the end of its log; "" if the exit code does not suggest one.

    rank: the rank that ended, if known. Lines of other ranks, which torch marks, are skipped.
    """
    if exit_code not in _CODES:
        return ""
    lines = _own_lines(log, rank)
    if exit_code == 2 and (sentence := _refused(lines)):
        return sentence
    return LAST_LINE + lines[-1] if lines else ""


def refused(log: str) -> str:
    """Return argparse's or click's message about unknown options; "" if there is none."""
    return _refused(_own_lines(log))


def _refused(lines: list[str]) -> str:
    """Return the message about options that a parser refused."""
    error = next((line for line in reversed(lines) if _ARGPARSE.match(line)), "")
    if error or not any(line.startswith("Usage: ") for line in lines):
        return error
    boxes = [f"Error: {text}" for line, text in itertools.pairwise(lines) if _BOX.match(line)]
    return next((line for line in reversed(lines) if _CLICK.match(line)), boxes[-1] if boxes else "")


def report_begins(lines: Sequence[str]) -> int | None:
    """Return the index of the first line of torchrun's report about a failed rank; None without a report."""
    return next((i for i, line in enumerate(lines) if _REPORT.match(line)), None)


def is_of_no_rank(line: str) -> bool:
    """True for a line that a launcher prints, or that libraries print at the end of any program."""
    return any(pattern.match(line) for pattern in (_LAUNCHERS_OWN, _SUMMARY, BORDER))


def of_training(log: str) -> list[str]:
    """Return the training's own lines, without torchrun's report."""
    lines = log.splitlines()
    return [line for line in lines[: report_begins(lines)] if line.strip()]


def tail(log: str) -> str:
    """Return the last 2 kB of a log, masked. An incomplete first line is dropped: it may be part of a credential."""
    # Mask before cutting: a password without its name is not recognized. The kubelet may have cut within a character.
    raw = mask("".join(line for line in log.splitlines(keepends=True) if ANSWER not in line)).strip("\n").encode()
    if len(raw) <= TAIL_MAX and len(log.encode()) < TAIL_MAX - 3:
        return raw.decode()
    first, _, rest = raw[-TAIL_MAX:].decode(errors="ignore").partition("\n")
    return rest or first


def _own_lines(log: str, rank: int | None = None) -> list[str]:
    """Return the program's own lines; none if the log contains only torchrun's report."""
    known = (line for line in log.splitlines() if not _is_of_another(line, rank))
    lines = [line.strip(_BLANK) for line in _without_warnings(known)]
    begins = report_begins(lines)
    if begins is None and _REPORT_ENDS.search(log):
        return []
    first = 1 if len(lines) > 1 and len(log.encode()) >= _CUT_FROM else 0
    return [line for line in lines[first:begins] if not _LAUNCHERS_OWN.match(line) and any(c.isalpha() for c in line)]


def _is_of_another(line: str, rank: int | None) -> bool:
    prefix = PREFIX.match(line[:200])
    known = None if prefix is None else _RANK.search(prefix[0])
    return rank is not None and known is not None and int(known[1]) != rank


def _without_warnings(log: Iterable[str]) -> Iterator[str]:
    """Yield the lines, but skip libraries' summaries, code below Python's warnings, and ignored exceptions."""
    is_summary = is_ignored = False
    for line in (PREFIX.sub("", line[:LINE_MAX]) for line in log):
        if is_ignored or line.startswith("Exception ignored "):
            # Skip the exception that Python ignored: its traceback, and then its own line.
            is_ignored = line.startswith(("Exception ignored ", "Traceback ", " "))
            line = ""
        below, is_summary = is_summary and _CODE_BELOW.match(line), bool(_SUMMARY.match(line))
        yield "" if below or is_summary else line
