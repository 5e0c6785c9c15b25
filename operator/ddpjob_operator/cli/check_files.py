"""`ddpjob check`: reads files, and prints the findings of check/."""

from __future__ import annotations

import io
import json
import os
import tokenize
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ddpjob_operator import check
from ddpjob_operator.check import Finding, Job, command
from ddpjob_operator.check.job import known, mistakes
from ddpjob_operator.check.rule import SYNTAX
from ddpjob_operator.job import api, launcher
from ddpjob_operator.job.podspec import trainer_container
from ddpjob_operator.job.wording import count
from ddpjob_operator.manifest.yamlfile import Document, InputError

YAML_SUFFIXES = (".yaml", ".yml", ".json")
WARNINGS_SHOWN = 3  # before a run, whose own lines matter more


@dataclass(frozen=True)
class CheckResult:
    """The findings, and sentences about scripts that could not be read."""

    findings: list[Finding]
    unread: list[str]
    files: int

    @property
    def errors(self) -> int:
        """How many findings are errors."""
        return sum(f.severity == "error" for f in self.findings)

    @property
    def exit_code(self) -> int:
        """2 for a file that is not valid Python, 1 for errors, 0 for warnings or nothing."""
        return 2 if any(f.rule == SYNTAX for f in self.findings) else int(self.errors > 0)

    def to_text(self) -> str:
        """A line for each finding."""
        return "".join(f"{finding}\n" for finding in self.findings)

    def to_json(self) -> str:
        """One document: findings (file, line, column, rule, severity, message), errors, warnings."""
        counts = {"errors": self.errors, "warnings": len(self.findings) - self.errors}
        return json.dumps({"findings": [asdict(f) for f in self.findings], **counts}, indent=2) + "\n"

    def summary(self) -> str:
        """One line for people."""
        warnings = len(self.findings) - self.errors
        counts = [count(n, word) for n, word in ((self.errors, "error"), (warnings, "warning")) if n]
        return f"{count(self.files, 'file')} read: {', '.join(counts) or 'nothing found'}"


def is_job(path: str) -> bool:
    """Whether a path names a DDPJob's YAML; all others are scripts."""
    return path.endswith(YAML_SUFFIXES)


def check_all(
    paths: Sequence[str],
    jobs: Mapping[str, tuple[Document, api.DDPJob]],
    nodes: int | None = None,
    nproc: int | None = None,
) -> CheckResult:
    """Check scripts, and jobs with the scripts that they run. Raises InputError for a file that cannot be read.

    A script beside one job is checked as that job's; so a script can be named that lies in an image under another path.
    nodes, nproc: the context of scripts without a job.
    """
    scripts = [path for path in paths if path not in jobs]
    if scripts and len(jobs) > 1:
        raise InputError(
            f"{scripts[0]}: belongs to one of {len(jobs)} jobs, and which is not known. Check the jobs one by one."
        )
    findings = [finding for path, (document, job) in jobs.items() for finding in _of_job(path, document, job)]
    unread: list[str] = []
    read = [(script, Job(nodes=nodes, nproc=nproc)) for script in scripts]
    for path, (document, job) in jobs.items():
        own = scripts or _script_of(path, job)
        read = [*(() if scripts else read), *((script, known(job)) for script in own)]
        unread += [] if own else [_not_read(document, job)]
    for script, context in read:
        findings += _of_script(script, context)
    return CheckResult(sorted(set(findings)), unread, len({*jobs, *(script for script, _ in read)}))


def before_run(document: Document, job: api.DDPJob, *, cpu: bool = False) -> tuple[list[str], bool]:
    """The lines to show before a local run, and whether an error forbids it.

    A script that is not found is not checked: the run itself says what is not there. cpu: no GPU is used.
    """
    context = replace(known(job), gpus=0) if cpu else known(job)
    own = _script_of(document.source, job)
    findings = sorted({*_of_job(document.source, document, job), *(f for s in own for f in _of_script(s, context))})
    errors = [f for f in findings if f.severity == "error"]
    warnings = [f for f in findings if f.severity != "error"]
    lines = [str(f) for f in errors] if errors else [str(f) for f in warnings[:WARNINGS_SHOWN]]
    name = " ".join((document.source, *own))
    if errors:
        fix = "fix it" if len(errors) == 1 else "fix them"
        lines.append(f"not started: {count(len(errors), 'error')}; {fix}, or run with --no-check")
    elif len(warnings) > WARNINGS_SHOWN:
        lines.append(f"and {count(len(warnings) - WARNINGS_SHOWN, 'more warning')}: ddpjob check {name}")
    return lines, bool(errors)


def _of_script(path: str, context: Job) -> list[Finding]:
    """A file that is no text is a finding, as one that is not valid Python."""
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        text = raw.decode(encoding)
    except (UnicodeDecodeError, SyntaxError, LookupError) as error:  # "coding: rot13" is known, and of no text
        return [Finding(path, 1, 1, SYNTAX, "error", f"not valid Python: {error}")]
    return check.check(path, text, context)


def _of_job(path: str, document: Document, job: api.DDPJob) -> list[Finding]:
    severities = {rule.name: rule.severity for rule in check.RULES}
    findings = [
        Finding(path, document.line(field), 1, rule, severities[rule], text) for field, rule, text in mistakes(job)
    ]
    return check.kept(findings, _text_of(path)) if findings else []


def _text_of(path: str) -> str:
    """Nothing for a job that comes from no file."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def _script_of(path: str, job: api.DDPJob) -> list[str]:
    """The script that the job's command names: where `ddpjob run` looks for it, or beside the YAML; none elsewhere."""
    scripts = command.read(launcher.command_of(job.spec.template)).files
    folder = (trainer_container(job.spec.template) or {}).get("workingDir") or "."
    places = [p for s in scripts for p in (Path(folder) / s, Path(s), Path(path).parent / s)]
    return next(([str(place)] for place in places if os.path.isfile(place)), [])  # Path's own raises for long names


def _not_read(document: Document, job: api.DDPJob) -> str:
    """Why no script was read, because "nothing found" is then about the YAML alone."""
    started = command.read(launcher.command_of(job.spec.template))
    by = f"starts {started.launcher}, and " if started.launcher not in ("", "python") else ""
    why = f"the command {by}names no script that is plain to see"
    if started.files:
        why = f"{started.script or f'the module {started.module}'} is not on this machine"
    where = document.place(("spec", "template", "spec", "containers"))
    return f"{where}: {why}, so only the job was read; name it: ddpjob check {document.source} SCRIPT"
