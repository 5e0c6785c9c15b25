"""`ddpjob check FOLDER`: the scripts, notebooks and DDPJobs in it, without what is ignored, hidden or installed."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddpjob_operator.cli.check_files import is_job
from ddpjob_operator.cli.kinds import YAML_SUFFIXES
from ddpjob_operator.job import api
from ddpjob_operator.manifest import yamlbounds, yamlfile
from ddpjob_operator.manifest.yamlfile import Document, InputError

_SUFFIXES = (".py", ".ipynb", ".yaml", ".yml")
_NOT_OWN = {"node_modules", "site-packages", "__pycache__"}
_IS_A_JOB = re.compile(rf"^\s*kind:\s*[\"']?{api.KIND}\b", re.MULTILINE)
Load = Callable[[str, str | None], tuple[Document, api.DDPJob]]


@dataclass
class Targets:
    """What is to be checked."""

    scripts: list[str]
    jobs: dict[str, tuple[Document, api.DDPJob]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    """What is wrong with the jobs of a folder that cannot be read; a file that is named raises InputError."""
    apart: bool = False
    """Whether a folder is among them, so that not every script is one of the jobs'."""


def targets(paths: Sequence[str], job: str | None, load: Load) -> Targets:
    """The scripts and jobs of files and folders. Raises InputError for a folder that has none. job: the one to take
    where a file has several."""
    files = [name for path in paths for name in (_inside(path) if os.path.isdir(path) else [path])]
    found = Targets([f for f in dict.fromkeys(files) if not is_job(f)], apart=files != list(paths))
    for path in filter(is_job, dict.fromkeys(files)):
        if found.apart:
            _add_jobs(found, path, load)
        else:
            found.jobs[path] = load(path, job)
    return found


def _add_jobs(found: Targets, path: str, load: Load) -> None:
    try:
        documents = [d for d in yamlfile.read(path) if isinstance(d.data, dict) and d.data.get("kind") == api.KIND]
        for document in documents:
            found.jobs[f"{path}#{document.name}"] = load(path, document.name if len(documents) > 1 else None)
    except InputError as error:
        found.wrong.append(str(error))


def _inside(folder: str) -> list[str]:
    names = list(_files_in(folder))
    if not names:
        raise InputError(f"{folder}: no Python script, notebook or DDPJob in this folder")
    return names


def _files_in(folder: str) -> Iterator[str]:
    names = _known_to_git(folder) or sorted(_walked(folder))
    environments = {os.path.dirname(name) for name in names if os.path.basename(name) == "pyvenv.cfg"}
    for name in names:
        parts = Path(name).parts
        hidden = any(part.startswith(".") or part in _NOT_OWN for part in parts)
        installed = any(name.startswith(f"{e}{os.sep}") for e in environments)
        path = os.path.join(folder, name) if folder != "." else name
        if name.endswith(_SUFFIXES) and not (hidden or installed) and os.path.isfile(path) and _is_wanted(path):
            yield path


def _known_to_git(folder: str) -> list[str]:
    """All files that git does not ignore; none where the folder is in no repository, or git is not there."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(words, cwd=folder, capture_output=True, check=False)
    except OSError:
        return []
    names = done.stdout.decode(errors="surrogateescape").split("\0") if done.returncode == 0 else []
    return sorted(set(filter(None, names)))


def _walked(folder: str) -> Iterator[str]:
    for top, folders, files in os.walk(folder):
        folders[:] = [f for f in folders if not f.startswith(".") and f not in _NOT_OWN]
        yield from (os.path.relpath(os.path.join(top, name), folder) for name in files)


def _is_wanted(path: str) -> bool:
    """Whether a YAML file has a DDPJob; Python is always wanted."""
    if not path.endswith(YAML_SUFFIXES):
        return True
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return _IS_A_JOB.search(file.read(yamlbounds.BYTES_MAX)) is not None
    except OSError:
        return False
