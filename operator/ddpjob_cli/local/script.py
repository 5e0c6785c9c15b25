"""Find the script of a job's command on this machine, and decide if the script can report steps."""

from __future__ import annotations

import ast
import itertools
import os
import re
import shlex
from pathlib import Path

from msgspec.structs import replace

from ddpjob_check.parsing import TooLongError, parse
from ddpjob_cli.local.kept.files import read_script
from ddpjob_operator.job import api, command, exit_codes, launcher, programs
from ddpjob_operator.job.podspec import command_path, trainer_container

_REPORTERS = ("ddpjob", "transformers", "DDPJOB_", "KUBEFLOW_")
_SHEBANG = re.compile(r"#!\s*(?:/\S*/env\s+(?:-S\s+)?)?(\S+)(.*)")
_OPTION_OF_SHELL = re.compile(r"[-+].*|pipefail|errexit|nounset|xtrace")
_ONLY_IMPORTS = re.compile(r"\s*(?:import|from)\s+([\w.]+)[^;\n]*;?\s*")
_ALL_ARGUMENTS = re.compile(r""""\$\{?@\}?"|\$\{?[@*]\}?""")


def find(source: str, job: api.DDPJob) -> Path | None:
    """Return the script's path: next to the YAML, else in the working folder; None if it is in neither."""
    return _here(source, job, launcher.facts(job.spec).started.files)


def imported(source: str, job: api.DDPJob) -> Path | None:
    """Return the file of the module that the command only imports: `python -c "import train"`; None if it is no such
    command, or the file is not here."""
    words = launcher.facts(job.spec).command
    code = next(
        (code for option, code in itertools.pairwise(words) if option == "-c" and not command.is_shell(words)), ""
    )
    found = _ONLY_IMPORTS.fullmatch(code)
    return _here(source, job, [f"{found[1].replace('.', '/')}.py"]) if found else None


def _here(source: str, job: api.DDPJob, names: list[str]) -> Path | None:
    # Look next to the YAML and here too, because a workingDir often exists only in the image.
    folders = (folder_of(source, job), Path(os.path.abspath(source)).parent, Path.cwd())
    # Not Path.is_file(), which raises for a name of 1,000 characters.
    return next((path for name in names for folder in folders if os.path.isfile(path := folder / name)), None)


def with_shell_script(source: str, job: api.DDPJob) -> tuple[api.DDPJob, str]:
    """Return the job with `bash train.sh` replaced by `bash -c` and the file's text; and the file's name, train.sh.

    Return the same job and "" if there is no such file here, or if it does not start exactly one training.
    """
    words = launcher.facts(job.spec).command
    for i in programs.places(words):
        own = [words[i]] if programs.name(words[i]) in command.SHELLS else []
        own += itertools.takewhile(_OPTION_OF_SHELL.fullmatch, words[i + 1 :] if own else ())
        name, *arguments = words[i + len(own) :] or [""]
        path = _here(source, job, [name]) if name and not any(re.match(r"-\w*c", option) for option in own) else None
        if path is None:
            continue
        try:
            text = read_script(path).decode()
        except (OSError, ValueError):
            break
        if not own and (begins := _SHEBANG.match(text)) and programs.name(begins[1]) in command.SHELLS:
            own = [begins[1], *begins[2].split()]
        if own:
            given = _ALL_ARGUMENTS.sub(shlex.join(arguments).replace("\\", r"\\"), text)
            changed = [*words[:i], *own, "-c", given, name, *arguments]
            started = [one.started for one in exit_codes.launcher_exits(changed)]
            if started and all(one == started[0] for one in started):
                return _with_command(job, changed), name
    return job, ""


def _with_command(job: api.DDPJob, words: list[str]) -> api.DDPJob:
    pod, trainer = job.spec.template["spec"], trainer_container(job.spec.template)
    changed = {**(trainer or {}), "command": [], "args": [], str(command_path(job.spec.template)[-1]): words}
    containers = [changed if one is trainer else one for one in pod["containers"]]
    template = {**job.spec.template, "spec": {**pod, "containers": containers}}
    return replace(job, spec=replace(job.spec, template=template))


def folder_of(source: str, job: api.DDPJob) -> Path:
    """Return the folder in which the trainer starts: workingDir, else the YAML's if it has the script, else ours."""
    names = launcher.facts(job.spec).started.files
    own = launcher.facts(job.spec).trainer.get("workingDir")
    if isinstance(own, str):
        return Path.cwd() / own
    beside = Path(os.path.abspath(source)).parent
    return beside if any(os.path.isfile(beside / name) for name in names if not os.path.isabs(name)) else Path.cwd()


def reports_no_steps(path: Path | None) -> bool:
    """True if a script certainly reports no steps: it uses no library that does, and imports no file next to it."""
    if path is None:
        return False
    try:
        text = read_script(path).decode()
        tree = parse(text)
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError, TooLongError):
        return False
    if any(word in text for word in _REPORTERS):
        return False
    imports = [n for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom))]
    names = {a.name for n in imports if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module or "." for n in imports if isinstance(n, ast.ImportFrom)}
    folders = {path.parent, Path.cwd()}
    tops = {name.split(".")[0] for name in names}
    places = [folder / name for folder in folders for top in tops for name in (top, f"{top}.py")]
    return not any(os.path.exists(place) for place in places)
