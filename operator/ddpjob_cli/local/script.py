"""Find the script of a job's command on this machine, and decide if the script can report steps."""

from __future__ import annotations

import ast
import itertools
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from ddpjob_check.parsing import TooLongError, parse
from ddpjob_cli.local.run_files.files import read_script
from ddpjob_operator.job import api
from ddpjob_operator.job.launch import command, exit_codes, programs
from ddpjob_operator.job.podspec import trainer_container

_STARTERS = ("spawn", "start_processes", "Process")  # names in torch.multiprocessing
_REPORTERS = ("ddpjob", "transformers", "DDPJOB_", "KUBEFLOW_")
_SHEBANG = re.compile(r"#!\s*(?:/\S*/env\s+(?:-S\s+)?)?(\S+)(.*)")
_OPTION_OF_SHELL = re.compile(r"[-+].*|pipefail|errexit|nounset|xtrace")
_ONLY_IMPORTS = re.compile(r"\s*(?:import|from)\s+([\w.]+)[^;\n]*;?\s*")
_ALL_ARGUMENTS = re.compile(r""""\$\{?@\}?"|\$\{?[@*]\}?""")


def find(source: str, job: api.DDPJob) -> Path | None:
    """Return the script's path: next to the YAML, else in the working folder; None if it is in neither."""
    return _here(source, job, job.spec.facts.started.files)


def imported(source: str, job: api.DDPJob) -> Path | None:
    """Return the file of the module that the command only imports: `python -c "import train"`; None if it is no such
    command, or the file is not here."""
    words = job.spec.facts.command
    code = next(
        (code for option, code in itertools.pairwise(words) if option == "-c" and not command.is_shell(words)), ""
    )
    found = _ONLY_IMPORTS.fullmatch(code)
    return _here(source, job, [f"{found[1].replace('.', '/')}.py"]) if found else None


def of_launches(source: str, read: WithScript) -> list[Path]:
    """Return the scripts that a shell's file starts, as far as they are on this machine."""
    found = (_here(source, read.job, one.files) for one in read.starts)
    return list(dict.fromkeys(path for path in found if path is not None))


def _here(source: str, job: api.DDPJob, names: list[str]) -> Path | None:
    # Search the YAML's folder and the current folder too, because a workingDir often exists only in the image.
    folders = (folder_of(source, job), Path(os.path.abspath(source)).parent, Path.cwd())
    # Not Path.is_file(), which raises for a name of 1,000 characters.
    return next((path for name in names for folder in folders if os.path.isfile(path := folder / name)), None)


@dataclass(frozen=True)
class WithScript:
    """A job as if the file of a shell's script were in its command."""

    job: api.DDPJob
    name: str = ""
    """Name of the file: train.sh of `bash train.sh`; "" if there is none here, or if it starts no training."""
    starts: Sequence[command.Command] = ()
    """The different launches of the file."""

    @property
    def is_one(self) -> bool:
        """True if the file's options and script are known, because all its launches are the same."""
        return len(self.starts) == 1


def with_shell_script(source: str, job: api.DDPJob) -> WithScript:
    """Return the job with the file of its command's shell."""
    words = job.spec.facts.command
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
            if started := [one.started for one in exit_codes.launcher_exits(changed) if one.starts_a_script]:
                starts = [one for i, one in enumerate(started) if one not in started[:i]]
                return WithScript(_with_command(job, changed), name, starts)
    return WithScript(job)


def _with_command(job: api.DDPJob, words: list[str]) -> api.DDPJob:
    pod, trainer = job.spec.template["spec"], trainer_container(job.spec.template)
    changed = {**(trainer or {}), "command": [], "args": [], str(job.spec.facts.command_path[-1]): words}
    containers = [changed if one is trainer else one for one in pod["containers"]]
    template = {**job.spec.template, "spec": {**pod, "containers": containers}}
    return replace(job, spec=replace(job.spec, template=template))


def folder_of(source: str, job: api.DDPJob) -> Path:
    """Return the folder in which the trainer starts: workingDir, else the YAML's if it has the script, else ours."""
    names = job.spec.facts.started.files
    own = job.spec.facts.trainer.get("workingDir")
    if isinstance(own, str):
        return Path.cwd() / own
    beside = Path(os.path.abspath(source)).parent
    return beside if any(os.path.isfile(beside / name) for name in names if not os.path.isabs(name)) else Path.cwd()


def starts_ranks(path: Path | None) -> bool:
    """True if a script starts the ranks of its node itself, so that their number is unknown."""
    text, tree = _read(path)
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    names = {str(getattr(func, "attr", getattr(func, "id", ""))) for func in calls}
    return "multiprocessing" in text and not names.isdisjoint(_STARTERS)


def reports_no_steps(path: Path | None) -> bool:
    """True if a script certainly reports no steps: it uses no library that does, and imports no file next to it."""
    text, tree = _read(path)
    if path is None or not text or any(word in text for word in _REPORTERS):
        return False
    imports = [n for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom))]
    names = {a.name for n in imports if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module or "." for n in imports if isinstance(n, ast.ImportFrom)}
    folders = {path.parent, Path.cwd()}
    tops = {name.split(".")[0] for name in names}
    places = [folder / name for folder in folders for top in tops for name in (top, f"{top}.py")]
    return not any(os.path.exists(place) for place in places)


def _read(path: Path | None) -> tuple[str, ast.AST]:
    """Return a script as text and parsed; "" and an empty module if it cannot be read."""
    try:
        text = "" if path is None else read_script(path).decode()
        return text, parse(text)
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError, TooLongError):
        return "", ast.Module([], [])
