"""`ddpjob check`: find the classic mistakes of DDP in a training script, without running it.

In:   the text of a script or notebook, and facts about its job (job.py).
Out:  findings, each with its line, what happens, and what to write instead.

A script is parsed once (script.py), and each rule is a function of it and of its job (rule.py has the list). A rule
that is not sure reports nothing, because a false finding costs more trust than a missed one; an error is certain.

Called by: `ddpjob check`, and by `run`, `submit` and `init` before they start anything.
Must not use: files, processes, the clock. Commands are parsed by `ddpjob_operator.job`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial

from ddpjob_check import (
    alone,
    checkpoints,
    collectives,
    data,
    elastic,
    gradients,
    groups,
    hidden,
    local_rank,
    ranks,
    schedulers,
    starting,
    steps,
    wrapping,
)
from ddpjob_check.parsing import TooLongError
from ddpjob_check.reached import Certainty
from ddpjob_check.rule import LEFT_OUT, SYNTAX, CheckedJob, Finding, Found, Limited, Rule, Severity, unlimited
from ddpjob_check.script import Script

__all__ = ["RULES", "CheckedJob", "Finding", "Found", "Rule", "check", "kept", "unchecked"]

_IGNORE = re.compile(r"#\s*ddpjob:\s*ignore\[([\w\s,-]*)\]")
_NOTHING_KNOWN = CheckedJob()
LEFT_OUT_MAX = 5  # number of stopped rules that a finding names
_MODULES = (
    ranks, collectives, wrapping, steps, gradients, data, checkpoints, groups, starting,
    local_rank, alone, schedulers, elastic, hidden,
)  # fmt: skip
RULES = tuple(r for module in _MODULES for r in vars(module).values() if isinstance(r, Rule))
"""All rules, in the order of docs/check.md."""


def check(file: str, text: str, job: CheckedJob = _NOTHING_KNOWN, limited: Limited = unlimited) -> list[Finding]:
    """Return all findings in a script, in line order. A script that does not parse is itself a finding. limited: calls
    a function with a time limit. Stopped rules are named in a finding."""
    try:
        script = limited(lambda: Script(text))
        findings = list(_findings(file, script, job if job.script else replace(job, script=(file,)), limited))
        kept_findings: list[Finding] = limited(lambda: kept(findings, text))
        return kept_findings
    except SyntaxError as error:
        return [_of_syntax(file, text, error)]
    except ValueError as error:  # the text contains a null byte
        return [Finding(file, 1, 1, SYNTAX, "error", f"not valid Python: {error}")]
    except (RecursionError, MemoryError):
        return [Finding(file, 1, 1, SYNTAX, "error", "nested too deeply to be read")]
    except TooLongError:
        return [unchecked(file)]


def unchecked(file: str) -> Finding:
    """Return the finding for a file that takes too long as a whole."""
    return Finding(file, 1, 1, LEFT_OUT, "warning", "this file takes too long to follow, so nothing in it is checked")


# Python 3.12 syntax: type parameters, type aliases, and nested quotes in f-strings.
_NEWER = re.compile(r"\s*(?:(?:async\s+)?def|class)\s+\w+\s*\[|\s*type\s+\w+\s*(?:\[.*\]\s*)?=")


def _of_syntax(file: str, text: str, error: SyntaxError) -> Finding:
    """Return the finding for a syntax error; only a warning if the script may be for a newer Python."""
    number, lines = error.lineno or 1, text.splitlines()
    line = lines[number - 1] if number <= len(lines) else ""
    newer = sys.version_info < (3, 12) and (_NEWER.match(line) or "f-string" in error.msg)
    said = f"not valid Python {sys.version_info[0]}.{sys.version_info[1]}" if newer else "not valid Python"
    severity: Severity = "warning" if newer else "error"
    return Finding(file, number, error.offset or 1, SYNTAX, severity, f"{said}: {error.msg}")


def _findings(file: str, script: Script, job: CheckedJob, limited: Limited) -> Iterator[Finding]:
    certainty = Certainty(script, job)
    left_out = [rule.name for rule in RULES]
    for rule in RULES:
        with suppress(TooLongError):
            yield from limited(partial(list, _of_rule(rule, file, script, job, certainty)))
            left_out.remove(rule.name)
    if left_out:
        more = f" and {len(left_out) - LEFT_OUT_MAX} more" if len(left_out) > LEFT_OUT_MAX else ""
        why = f"this file takes too long to follow, so it is not checked for {', '.join(left_out[:LEFT_OUT_MAX])}{more}"
        yield Finding(file, 1, 1, LEFT_OUT, "warning", why)


def _of_rule(rule: Rule, file: str, script: Script, job: CheckedJob, certainty: Certainty) -> Iterator[Finding]:
    for found in rule.find(script, job):
        severity = found.severity or rule.severity
        runs = job.certain and (found.node is None or certainty.runs(found.node))
        severity = "warning" if severity == "error" and not runs else severity
        yield Finding(file, found.line, found.column, rule.name, severity, found.message)


def kept(findings: Iterable[Finding], text: str) -> list[Finding]:
    """Return the findings not suppressed by `# ddpjob: ignore[rule]` on their line, or alone on the line above."""
    lines = text.splitlines()
    return sorted(f for f in set(findings) if f.rule not in _ignored(lines, f.line))


def _ignored(lines: list[str], line: int) -> set[str]:
    same = lines[line - 1] if 0 < line <= len(lines) else ""
    above = lines[line - 2].strip() if 1 < line <= len(lines) + 1 else ""
    texts = [same, above if above.startswith("#") else ""]
    return {name.strip() for text in texts for listed in _IGNORE.findall(text) for name in listed.split(",")}
