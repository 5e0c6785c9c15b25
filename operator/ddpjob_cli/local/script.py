"""Find the script of a job's command on this machine, and decide if the script can report steps."""

from __future__ import annotations

import ast
import os
from pathlib import Path

from ddpjob_check.parsing import TooLongError, parse
from ddpjob_cli.local.kept.files import read_script
from ddpjob_operator.job import api, launcher

_REPORTERS = ("ddpjob", "transformers", "DDPJOB_", "KUBEFLOW_")


def find(source: str, job: api.DDPJob) -> Path | None:
    """Return the script's path: next to the YAML, else in the working folder; None if it is in neither."""
    names = launcher.facts(job.spec).started.files
    # Look next to the YAML and here too, because a workingDir often exists only in the image.
    folders = (folder_of(source, job), Path(os.path.abspath(source)).parent, Path.cwd())
    # Not Path.is_file(), which raises for a name of 1,000 characters.
    return next((path for name in names for folder in folders if os.path.isfile(path := folder / name)), None)


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
