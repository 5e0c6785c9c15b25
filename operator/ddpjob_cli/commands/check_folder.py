"""Find what `ddpjob check FOLDER` checks: scripts, notebooks and DDPJobs. The folder may be a stranger's, so no program
is called in it, and no file outside is read."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddpjob import own_files
from ddpjob_cli.client.gitignore import FOLDERS_DEEP_MAX, Ignored
from ddpjob_cli.commands.check_files import is_job
from ddpjob_cli.commands.kinds import YAML_SUFFIXES
from ddpjob_cli.manifest import yamlbounds, yamlfile
from ddpjob_cli.manifest.yamlfile import Document, InputError
from ddpjob_operator.job import api

_SUFFIXES = (".py", ".ipynb", ".yaml", ".yml")
_NOT_OWN = {"node_modules", "site-packages", "__pycache__"}
_IS_A_JOB = re.compile(rf"^[ \t]*kind:[ \t]*[\"']?{api.KIND}\b", re.MULTILINE)
Load = Callable[..., tuple[Document, api.DDPJob]]
"""Reads a job: its file, its name (None: the only one), and the document if it was read already."""


@dataclass
class Targets:
    scripts: list[str]
    jobs: dict[str, tuple[Document, api.DDPJob]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    """Problems of the jobs of a folder that cannot be read; a file named by the user raises InputError."""
    left_out: list[str] = field(default_factory=list)
    """Sentences about entries of a folder that are not read: links that lead out of it, pipes, devices."""
    apart: bool = False
    """True if a folder was given: then a script does not belong to a job just because both were found."""


def targets(paths: Sequence[str], job: str | None, load: Load) -> Targets:
    """Return the scripts and jobs in files and folders. Raise InputError. job: which job of a file with several."""
    left_out: list[str] = []
    files = [name for path in paths for name in (_inside(path, left_out) if os.path.isdir(path) else [path])]
    scripts = [file for file in dict.fromkeys(files) if not is_job(file)]
    found = Targets(scripts, apart=files != list(paths), left_out=left_out)
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
            if (name := f"{path}#{document.name}") in found.jobs:
                raise InputError(f"{path}: two DDPJobs are named {document.name}; names must differ")
            found.jobs[name] = load(path, None, document)
    except InputError as error:
        found.wrong.append(str(error))


def _inside(folder: str, left_out: list[str]) -> list[str]:
    names = sorted(_files_in(folder, left_out))
    if not names:
        raise InputError("\n".join((*left_out, f"{folder}: no Python script, notebook or DDPJob in this folder")))
    return names


def _files_in(folder: str, left_out: list[str]) -> Iterator[str]:
    root = Path(folder)
    ignored, folders = Ignored(root), [""]
    while folders:
        below = folders.pop()
        try:
            with os.scandir(root / below) as found:
                entries = list(found)
            ignored.enter(below)
        except OSError as error:
            left_out.append(f"{root / below}: {error.strerror}, so it is left out")
            continue
        if below and any(entry.name == "pyvenv.cfg" for entry in entries):
            continue  # a virtual environment
        for entry in entries:
            path = below + entry.name
            if entry.is_dir(follow_symlinks=False):
                if _is_own(entry.name) and not ignored.has(path, is_folder=True):
                    folders += _not_too_deep(root, f"{path}/", left_out)
            elif _is_own(entry.name) and entry.name.endswith(_SUFFIXES) and not ignored.has(path, is_folder=False):
                yield from _readable(root, path, left_out)


def _is_own(name: str) -> bool:
    return not name.startswith(".") and name not in _NOT_OWN


def _not_too_deep(root: Path, below: str, left_out: list[str]) -> list[str]:
    if below.count("/") <= FOLDERS_DEEP_MAX:
        return [below]
    left_out.append(f"{root / below}: more than {FOLDERS_DEEP_MAX} folders deep, so it is left out")
    return []


def _readable(root: Path, path: str, left_out: list[str]) -> Iterator[str]:
    """Yield the path if it is a regular file to check. A link may point only to another file of the folder."""
    whole = os.path.join(root, path) if str(root) != "." else path
    try:
        target = os.path.realpath(whole, strict=True)
        is_file = stat.S_ISREG(os.lstat(target).st_mode)
    except OSError as error:
        left_out.append(f"{whole}: {error.strerror}, so it is left out")
        return
    if not is_file:
        left_out.append(f"{whole}: no regular file, so it is left out")
    elif not Path(target).is_relative_to(os.path.realpath(root)):
        left_out.append(f"{whole}: a link that leads out of the folder, so it is left out")
    elif _is_wanted(whole):
        yield whole


def _is_wanted(path: str) -> bool:
    """True for a Python file, and for a YAML file with a DDPJob."""
    if not path.endswith(YAML_SUFFIXES):
        return True
    try:
        with open(own_files.open_named(path), encoding="utf-8", errors="replace") as file:
            return _IS_A_JOB.search(file.read(yamlbounds.BYTES_MAX)) is not None
    except OSError:
        return False
