"""DDPJobs in a YAML file, with the line of every field, so that a mistake is named as FILE:LINE: FIELD: what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ddpjob_operator import api
from ddpjob_operator.validation import NOT_A_JOB, Problem, say, suggestion
from ddpjob_operator.validation import Path as FieldPath

# libyaml where PyYAML was built with it (all wheels are), else the same loader in Python.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class InputError(Exception):
    """The user's input is wrong; each line of the text names the place and the mend. The command line exits with 2."""


@dataclass(frozen=True)
class Document:
    """One YAML document: its data, and the line (from 1) on which each field stands."""

    source: str
    data: Any
    lines: dict[FieldPath, int] = field(default_factory=dict)
    options: dict[FieldPath, str] = field(default_factory=dict)
    """Fields that an option of the command line has set: `--nodes` and not a line is then the place."""

    @property
    def name(self) -> str:
        """metadata.name, or a dash."""
        metadata = self.data.get("metadata") if isinstance(self.data, Mapping) else None
        name = metadata.get("name") if isinstance(metadata, Mapping) else None
        return name if isinstance(name, str) else "-"

    def line(self, path: FieldPath) -> int:
        """The line of a field, or of the closest field above it that is there."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def error(self, problems: list[Problem]) -> InputError:
        """All problems, one a line, in the order of the file."""
        ordered = sorted(problems, key=lambda p: self.line(p.path))
        return InputError("\n".join(f"{self.place(p.path)}: {p}" for p in ordered))

    def place(self, path: FieldPath) -> str:
        """FILE:LINE of a field, or the option that has set it."""
        option = next((o for set_path, o in self.options.items() if path[: len(set_path)] == set_path), None)
        return option or f"{self.source}:{self.line(path)}"


def read_job(path: str, job: str | None = None) -> Document:
    """The one DDPJob of a file. Raises InputError where there is none, or several and `job` does not choose."""
    documents = [d for d in read(path) if d.data is not None]
    if not documents:
        raise InputError(f"{path}:1: the file has no DDPJob: it is empty")
    jobs = [d for d in documents if isinstance(d.data, Mapping) and d.data.get("kind") == api.KIND]
    if not jobs:
        raise InputError("\n".join(_not_a_job(d) for d in documents))
    if job is not None:
        return _choose(path, jobs, job)
    if len(jobs) > 1:
        names = ", ".join(f"{d.name} (line {d.line(())})" for d in jobs)
        raise InputError(f"{path}: {len(jobs)} DDPJobs: {names}. Choose one with --job NAME.")
    return jobs[0]


def read(path: str) -> Iterator[Document]:
    """All documents of a file. Raises InputError for what is no YAML, with the line."""
    try:
        text = Path(path).read_bytes().decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not UTF-8: this is no YAML text") from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    return iter(_documents(path, text))


def _documents(source: str, text: str) -> list[Document]:
    found = []
    loader = _Loader(text)
    try:
        while loader.check_node():
            node = loader.get_node()
            lines: dict[FieldPath, int] = {}
            _walk(source, node, (), lines, set())
            found.append(Document(source, loader.construct_document(node), lines))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}" if mark else source
        raise InputError(f"{where}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise InputError(f"{source}: not valid YAML: {error}".splitlines()[0]) from None
    except (ValueError, RecursionError) as error:  # a date that is none; nesting without end
        raise InputError(f"{source}: not valid YAML: {type(error).__name__}: {error}") from None
    finally:
        loader.dispose()
    return found


def _walk(source: str, node: Any, path: FieldPath, lines: dict[FieldPath, int], above: set[int]) -> None:
    """Note the line of every field below `node`. A key that comes twice is an error: YAML readers keep the last
    silently, and the API server refuses it."""
    lines.setdefault(path, node.start_mark.line + 1)
    if id(node) in above:
        raise InputError(f"{source}:{node.start_mark.line + 1}: an alias that contains itself")
    below = above | {id(node)}
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise InputError(f"{source}:{key.start_mark.line + 1}: {key.value} is there twice; remove one")
            seen.add(str(key.value))
            where = (*path, str(key.value))
            lines[where] = key.start_mark.line + 1
            _walk(source, value, where, lines, below)
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            _walk(source, value, (*path, i), lines, below)


def _choose(path: str, jobs: list[Document], name: str) -> Document:
    found = [d for d in jobs if d.name == name]
    if not found:
        names = [d.name for d in jobs]
        raise InputError(f"{path}: no DDPJob named {name}{suggestion(name, names)} (there: {', '.join(names)})")
    if len(found) > 1:
        raise InputError(f"{path}: {len(found)} DDPJobs are named {name}; a name must be there once")
    return found[0]


def _not_a_job(document: Document) -> str:
    if not isinstance(document.data, Mapping):
        return f"{document.source}:{document.line(())}: {NOT_A_JOB}, not {say(document.data)}"
    kind = document.data.get("kind")
    return f"{document.source}:{document.line(('kind',))}: kind: must be {api.KIND}, is {say(kind)}"
