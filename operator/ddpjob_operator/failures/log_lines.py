"""The last lines of a program that raised nothing: argparse's or click's error, `sys.exit("text")`.

They are shown, and decide nothing, because any line may be the last, also that of a rank that was stopped.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

LAST_LINE = "last line: "
"""The prefix of what is only the last line, and perhaps not why it ended."""
# What Python gives for sys.exit("text"), argparse and click for options, a shell for what it cannot start. A program
# that chooses another code means something by it, and its last line may be any.
_CODES = (1, 2, 126, 127)
LINE_MAX = 2000
# `[rank1]: ` comes from torch, `[default0]:` (with the local rank) from torchrun --tee.
PREFIX = re.compile(r"^(?:\[[A-Za-z]{0,20}\d{1,9}\]:\s?)+")
_RANK = re.compile(r"\[rank(\d{1,9})\]")
_ARGPARSE = re.compile(r"^[^\s:][^:]{0,200}: error: \S")
_CLICK = re.compile(r"^Error: \S")
_BOX = re.compile(r"^[\u256d\u250c\u250f][\u2500\u2501] Error ")
# Where torchrun begins to report, `E0131 12:00:00.1 … torch/distributed/elastic/…`, until 2.1 with the logger's name;
# and its other lines, such as that about OMP_NUM_THREADS at the start, and with LOGLEVEL=INFO those of each start.
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
# What libraries print at the end of any program: torch's C++ of a group that was not destroyed, wandb of its files,
# hydra of how to see more, Python's warnings with the line of code below each.
_SUMMARY = re.compile(
    r"^(?:\[[WI]\d{4} \d\d:\d\d:\d\d|wandb: |Set the environment variable HYDRA_FULL_ERROR=1"
    r"|[^\s:][^:]{0,300}:\d{1,9}: [A-Za-z_.]{0,60}Warning: )"
)
_CODE_BELOW = re.compile(r"^ +\S")
# typer draws a box around what click says.
_BLANK = " \t\u2502\u2503|"
# A kubelet keeps the last 2048 bytes: the first line of such a log is the rest of one.
_CUT_FROM = 2000


def of(log: str, exit_code: int | None, rank: int | None = None) -> str:
    """The program's own sentence at the end of its log; "" where the exit code does not suggest one.

    rank: that ended; None: not known. What another one has raised, which torch marks, is not its sentence.
    """
    if exit_code not in _CODES:
        return ""
    lines = _own_lines(log, rank)
    if exit_code == 2 and (sentence := _refused(lines)):
        return sentence
    return LAST_LINE + lines[-1] if lines else ""


def refused(log: str) -> str:
    """What argparse or click said of options that the program does not have; "" where neither did."""
    return _refused(_own_lines(log))


def _refused(lines: list[str]) -> str:
    """Options that a parser did not take."""
    error = next((line for line in reversed(lines) if _ARGPARSE.match(line)), "")
    if error or not any(line.startswith("Usage: ") for line in lines):
        return error
    boxes = [f"Error: {text}" for line, text in itertools.pairwise(lines) if _BOX.match(line)]
    return next((line for line in reversed(lines) if _CLICK.match(line)), boxes[-1] if boxes else "")


def report_begins(lines: Sequence[str]) -> int | None:
    """The first line of torchrun's report that a rank has failed; None where there is none."""
    return next((i for i, line in enumerate(lines) if _REPORT.match(line)), None)


def is_of_no_rank(line: str) -> bool:
    """True if it is a launcher's line, or what libraries print at the end of any program."""
    return any(pattern.match(line) for pattern in (_LAUNCHERS_OWN, _SUMMARY, BORDER))


def _own_lines(log: str, rank: int | None = None) -> list[str]:
    """The lines of the program itself; none where all that is left of the log is torchrun's report."""
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
    """Without the libraries' summaries, the code below a warning of Python's, and errors that Python has ignored."""
    is_summary = is_ignored = False
    for line in (PREFIX.sub("", line[:LINE_MAX]) for line in log):
        if is_ignored or line.startswith("Exception ignored "):
            # Its trace; the exception's own line is the last of it.
            is_ignored = line.startswith(("Exception ignored ", "Traceback ", " "))
            line = ""
        below, is_summary = is_summary and _CODE_BELOW.match(line), bool(_SUMMARY.match(line))
        yield "" if below or is_summary else line
