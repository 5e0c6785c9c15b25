"""`ddpjob check`: reads files, and prints the findings of ddpjob_check."""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import ddpjob_check as check
from ddpjob_check import CheckedJob, Finding, notebook
from ddpjob_check.job import CLUSTER_ONLY, OF_SHELLS, YAML_RULES, FieldPath, known, mistakes
from ddpjob_check.parsing import TooLongError
from ddpjob_check.rule import SYNTAX
from ddpjob_cli.commands import kinds, launchers
from ddpjob_cli.commands.cpu_limit import FILE_SECONDS, CpuLimit
from ddpjob_cli.commands.options import NODES_WANTED, range_of
from ddpjob_cli.local.preparation import suggestions
from ddpjob_cli.local.run_files.files import read_script, text_of_script
from ddpjob_cli.local.script import find, folder_of, imported, of_launches, with_shell_script
from ddpjob_cli.manifest.yamlfile import Document, InputError
from ddpjob_operator.failures.redaction import clean
from ddpjob_operator.job import api, podspec
from ddpjob_operator.job.bounds import NODES_MAX, number
from ddpjob_operator.job.wording import count

_NOTHING_KNOWN = CheckedJob()
USES_MAX = 5  # maximum number of jobs per script; each job adds to the script's CPU time limit
WARNINGS_SHOWN = 3  # warnings shown before a run, because the run's own output matters more


@dataclass(frozen=True)
class CheckResult:
    """The findings, and sentences about scripts that could not be read."""

    findings: list[Finding]
    unread: list[str]
    files: int

    @property
    def errors(self) -> int:
        return sum(f.severity == "error" for f in self.findings)

    @property
    def exit_code(self) -> int:
        """Return 2 if a file is not valid Python, 1 for other errors, 0 for warnings or nothing."""
        broken = any(f.rule == SYNTAX and f.severity == "error" for f in self.findings)
        return 2 if broken else int(self.errors > 0)

    def to_text(self) -> str:
        """Return a line per finding, without control characters, because a stranger may have named the files. A line
        that begins with `::` would be a command for GitHub Actions."""
        return "".join(clean(str(finding)).replace("\n", " ") + "\n" for finding in self.findings)

    def to_json(self) -> str:
        """Return one document: findings (file, line, column, rule, severity, message), errors, warnings."""
        counts = {"errors": self.errors, "warnings": len(self.findings) - self.errors}
        return json.dumps({"findings": [asdict(f) for f in self.findings], **counts}, indent=2) + "\n"

    def summary(self) -> str:
        warnings = len(self.findings) - self.errors
        counts = [count(n, word) for n, word in ((self.errors, "error"), (warnings, "warning")) if n]
        return f"{count(self.files, 'file')} read: {', '.join(counts) or 'nothing found'}"


def is_job(path: str) -> bool:
    """True if a path names a DDPJob's YAML; False for a script."""
    return kinds.of(path, "script") == "job"


def context(nodes: str | None, nproc: int | None) -> CheckedJob:
    """Return the context for scripts without a job, from the options. nodes: a number or MIN:MAX. Raise InputError."""
    if nodes is None:
        return CheckedJob(nproc=nproc)
    least, most = range_of(nodes)
    low, high = (number(text, NODES_MAX) for text in (least or most, most))
    if not 0 < low <= high:
        raise InputError(f'--nodes: {NODES_WANTED}, is "{nodes}"')
    if not least:
        return CheckedJob(nodes=high, nproc=nproc)
    return CheckedJob(nodes=high, min_nodes=low, nproc=nproc, launcher=launchers.DDPRUN)


def check_all(
    paths: Sequence[str],
    jobs: Mapping[str, tuple[Document, api.DDPJob]],
    alone: CheckedJob = _NOTHING_KNOWN,
    *,
    apart: bool = False,
    parameters: int = 0,
) -> CheckResult:
    """Check scripts, and jobs with their scripts. Raise InputError for a file that cannot be read. A job's script is
    the one that its command names; all other scripts are checked in the context `alone`. apart: the files come from a
    folder, so a job's missing script is not searched among them. parameters: of the model; 0: unknown."""
    sources = {document.source for document, _ in jobs.values()}
    scripts = [path for path in paths if path not in sources]
    unread: list[str] = []
    read: list[tuple[str, CheckedJob]] = []
    for document, job in jobs.values():
        context, own = _context(document, job)
        own = own or _meant(job, scripts if len(jobs) == 1 and not apart else [])
        read += [(script, context) for script in own]
        unread += [] if own else [_not_read(document, job)]
    started = {os.path.realpath(script) for script, _ in read}
    read += [(s, alone) for s in scripts if os.path.realpath(s) not in started]
    uses = Counter((*(document.source for document, _ in jobs.values()), *(script for script, _ in read)))
    limits = {file: CpuLimit(FILE_SECONDS * min(times, USES_MAX)) for file, times in uses.items()}
    findings = [f for d, job in jobs.values() for f in _of_job(d, job, parameters, limits[d.source])]
    findings += [f for script, context in read for f in _of_script(script, context, limits[script])]
    return CheckResult(sorted(set(findings)), unread, len({*sources, *(script for script, _ in read)}))


def parameters(text: str | None) -> int:
    """Return a number of parameters as people write it: 350M, 7B; 0 for none. Raise InputError."""
    number = podspec.quantity(f"{text[:-1]}G" if text.endswith(("B", "b")) else text) if text else 0
    if text and number < 1:
        raise InputError(f"--parameters: a number such as 350M or 7B, not {text}")
    return int(number)


def before_run(
    document: Document,
    job: api.DDPJob,
    *,
    local: bool = True,
    cpu: bool = False,
    read_instead: str | None = None,
    given: Collection[str] = (),
) -> tuple[list[str], bool]:
    """Return the lines to show before a run, and True if an error prevents it. cpu: no GPU is used. read_instead: the
    notebook from which the script was made. given: variables that the trainer gets from outside the job."""
    context, own = _context(document, job)
    context = replace(context, local=local, gpus=0 if cpu else context.gpus)
    own = own if read_instead is None else [read_instead]
    of_job = _of_job(document, job, given=given, local=local, left_out=CLUSTER_ONLY)
    findings = sorted({*of_job, *(f for s in own for f in _of_script(s, context))})
    errors = [f for f in findings if f.severity == "error"]
    warnings = [f for f in findings if f.severity != "error"]
    lines = [str(f) for f in errors] if errors else [str(f) for f in warnings[:WARNINGS_SHOWN]]
    name = read_instead or " ".join((document.source, *own))
    if errors:
        fix = "fix it" if len(errors) == 1 else "fix them"
        lines.append(f"not started: {count(len(errors), 'error')}; {fix}, or run with --no-check")
    elif len(warnings) > WARNINGS_SHOWN:
        lines.append(f"and {count(len(warnings) - WARNINGS_SHOWN, 'more warning')}: ddpjob check {name}")
    return lines, bool(errors)


def _context(document: Document, job: api.DDPJob) -> tuple[CheckedJob, list[str]]:
    """Return the facts with which a job's script is checked, and the script if the file exists on this machine."""
    read, path = with_shell_script(document.source, job), imported(document.source, job)
    # If a file has several launches, the options of each script are unknown.
    context = known(read.job if read.is_one else job)
    context = replace(context, certain=not (read.name or path), imported=path is not None)
    own = of_launches(document.source, read) if read.name else [find(document.source, job)]
    return context, [_shown(found) for found in ([path] if path else own) if found is not None]


def _of_script(path: str, context: CheckedJob, limit: CpuLimit | None = None) -> list[Finding]:
    """Return the findings of a script. If the file is no text or no valid Python, this is the only finding."""
    try:
        raw = read_script(path)
    except OSError as error:
        if error.errno == errno.EFBIG:
            return [Finding(path, 1, 1, SYNTAX, "error", error.strerror or "too large")]
        raise InputError(f"{path}: {error.strerror}") from None
    try:
        text = text_of_script(raw)
    except (ValueError, SyntaxError, LookupError) as error:  # "coding: rot13" names a codec that is no text encoding
        return [Finding(path, 1, 1, SYNTAX, "error", f"not valid Python: {error}")]
    limit = limit or CpuLimit()
    if path.endswith(kinds.NOTEBOOK):
        return _of_notebook(path, text, context, limit)
    return check.check(path, text, context, limit)


def for_a_cluster(document: Document, job: api.DDPJob) -> list[str]:
    return [str(finding) for finding in _of_job(document, job)]


def _of_notebook(path: str, text: str, context: CheckedJob, limit: CpuLimit) -> list[Finding]:
    """Return the findings of a notebook, with `PATH:cell N` as the file and the line within the cell."""
    try:
        parts = limit(lambda: notebook.parts(text))
    except (ValueError, RecursionError) as error:
        return [Finding(path, 1, 1, SYNTAX, "error", f"not a valid notebook: {error}")]
    except TooLongError:
        return [check.unchecked(path)]
    findings = []
    for part in parts:
        of_part = check.check(path, part.text, context, limit)
        for found in of_part:
            cell, line = part.place(found.line)
            findings.append(replace(found, file=f"{path}:cell {cell}", line=line))
        if of_part == [check.unchecked(path)]:  # one finding, because thousands of cells may follow
            why = "the notebook takes too long to follow, so cells from this one on are not checked"
            findings[-1] = replace(findings[-1], message=why)
            break
    return [f for f in findings if f.rule != "spawn-without-main-guard"]  # nothing imports a notebook


def _of_job(
    document: Document,
    job: api.DDPJob,
    parameters: int = 0,
    limit: CpuLimit | None = None,
    *,
    given: Collection[str] = (),
    local: bool = False,
    left_out: Collection[str] = (),
) -> list[Finding]:
    """Return the findings in a job. left_out: rules that the job's Events report. Their findings about a script file
    stay, because the operator cannot read that file."""
    severities = {rule.name: rule.severity for rule in check.RULES} | {r.name: r.severity for r in YAML_RULES}
    path, read = document.source, with_shell_script(document.source, job)
    script, limit = _script_text(path, read.job), limit or CpuLimit()
    try:
        of_job, of_file = (limit(partial(_listed, of, parameters, script, given, local)) for of in (job, read.job))
    except TooLongError:
        return [check.unchecked(path)]
    # A branch of a script file may not run, so no mistake in it is certain.
    new = [found for found in of_file if found not in of_job and (read.is_one or found[1] in OF_SHELLS)]
    more = [(field, rule, f"{read.name}: {text}") for field, rule, text in new]
    severities |= dict.fromkeys((rule for _, rule, _ in more), "warning")
    left_out_of_file = CLUSTER_ONLY - {"launcher-option"} if local else ()
    shown = [found for found in of_job if found[1] not in left_out]
    shown += [found for found in more if found[1] not in left_out_of_file]
    findings = [Finding(path, document.line(field), 1, rule, severities[rule], text) for field, rule, text in shown]
    return check.kept(findings, _text_of(path)) if findings else []


def _listed(
    job: api.DDPJob, parameters: int, script: str, given: Collection[str], local: bool
) -> list[tuple[FieldPath, str, str]]:
    return list(mistakes(job, parameters, script, given, local=local))


def _text_of(path: str) -> str:
    """Return the text of a job's file; "" if no file exists, or for a pipe, because a pipe can be read only once."""
    try:
        return read_script(path).decode()
    except (OSError, ValueError):
        return ""


def _script_text(path: str, job: api.DDPJob) -> str:
    try:
        return "" if (found := find(path, job)) is None else read_script(_shown(found)).decode(errors="replace")
    except OSError:
        return ""


def _shown(path: Path) -> str:
    """Return a script's path as messages show it."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _meant(job: api.DDPJob, scripts: list[str]) -> list[str]:
    """Return the scripts that a job's command probably means if its path (/app/train.py) exists only in the image."""
    names = {os.path.basename(file) for file in job.spec.facts.started.files}
    return [script for script in scripts if os.path.basename(script) in names] or scripts


def _not_read(document: Document, job: api.DDPJob) -> str:
    """Return why the job's script was not checked. Otherwise "nothing found" would seem to include the script."""
    started = job.spec.facts.started
    by = f" that starts {started.launcher}" if started.launcher not in ("", "python") else ""
    why = f"no script was found in the command{by}"
    if started.files:
        why = f"{started.script or f'the module {started.module}'} is not on this machine"
        why += suggestions.file(started.script or "", str(folder_of(document.source, job)))
    elif not started.launcher:
        why += suggestions.program(str((job.spec.facts.trainer.get("command") or [""])[0]))
    where = document.place(job.spec.facts.command_path)
    return f"{where}: {why}, so only the job was checked; name it: ddpjob check {document.source} SCRIPT"
