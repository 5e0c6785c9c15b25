"""Read DDPJobs from a YAML file, with the line of every field, so that messages begin with FILE:LINE."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from ddpjob import own_files
from ddpjob_cli.manifest import yamlbounds
from ddpjob_operator.job import api, yamlvalues
from ddpjob_operator.job.typos import suggestion
from ddpjob_operator.job.validation import NOT_A_JOB, Problem
from ddpjob_operator.job.validation import Path as FieldPath
from ddpjob_operator.job.wording import say

_TAG = yamlvalues.TAG
_NUMBERS = (f"{_TAG}int", f"{_TAG}float")
# Kinds that `ddpjob convert` reads; tests/unit/test_convert.py compares this with ddpjob_convert's own list.
CONVERTED = ("PyTorchJob", "TrainJob")
_LIST = "List"
PROBLEMS_MAX = 20  # maximum number of problems shown; 10,000 wrong containers are probably one mistake


# Use libyaml if PyYAML was built with it (all wheels are), else PyYAML's loader in Python.
class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads values as kubectl does, which knows only JSON's types: 2024-01-31 is a text, and a set is refused."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        """Return the tag of a node without one. implicit[0]: True if the value has no quotes. Called by PyYAML."""
        if kind is yaml.ScalarNode and implicit[0]:
            return yamlvalues.tag_of(value)
        return super().resolve(kind, value, implicit)

    def construct_number(self, node: Any) -> Any:
        return self._constructed(node, yamlvalues.number, "a number")

    def construct_boolean(self, node: Any) -> Any:
        return self._constructed(node, yamlvalues.boolean, "true or false")

    def _constructed(self, node: Any, read: Callable[[str], Any], what: str) -> Any:
        text = self.construct_scalar(node)
        try:
            return read(text)
        except ValueError:
            problem = f"{_short(text)} is not {what}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


for _name in _NUMBERS:
    _Loader.add_constructor(_name, _Loader.construct_number)
_Loader.add_constructor(f"{_TAG}bool", _Loader.construct_boolean)
for _name in ("timestamp", "merge"):  # `<<` as a value has one of these tags
    _Loader.add_constructor(f"{_TAG}{_name}", _Loader.construct_yaml_str)
for _name in ("binary", "omap", "pairs", "set"):
    _Loader.add_constructor(f"{_TAG}{_name}", _Loader.construct_undefined)


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Writes no anchors, because people find them hard to read."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the signature is PyYAML's
        return True


_Dumper.add_representer(str, yamlvalues.represent)


def text_of(body: Any) -> str:
    """Return an object as YAML that kubectl reads with the same values."""
    return str(yaml.dump(body, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000))


class InputError(Exception):
    """The user's input is wrong. Each line of the text names the place and the fix. The command line exits with 2."""


@dataclass(frozen=True)
class Document:
    source: str
    data: Any
    lines: dict[FieldPath, int] = field(default_factory=dict)
    options: dict[FieldPath, str] = field(default_factory=dict)
    """Fields set by an option, which messages name instead of a line: `--nodes`."""

    @property
    def name(self) -> str:
        metadata = self.data.get("metadata") if isinstance(self.data, Mapping) else None
        name = metadata.get("name") if isinstance(metadata, Mapping) else None
        return name if isinstance(name, str) else "-"

    def line(self, path: FieldPath) -> int:
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def error(self, problems: list[Problem]) -> InputError:
        """Return an error with the first problems, one per line, in the order of the file."""
        ordered = sorted(problems, key=lambda p: self.line(p.path))
        lines = [f"{self.place(p.path)}: {p}" for p in ordered[:PROBLEMS_MAX]]
        if len(ordered) > PROBLEMS_MAX:
            lines.append(f"{self.source}: and {len(ordered) - PROBLEMS_MAX} more")
        return InputError("\n".join(lines))

    def place(self, path: FieldPath) -> str:
        """Return FILE:LINE of a field, or the option that has set it; only FILE for a job made for a script."""
        option = next((o for set_path, o in self.options.items() if path[: len(set_path)] == set_path), None)
        return option or (f"{self.source}:{self.line(path)}" if self.lines else self.source)


def read_job(path: str, job: str | None = None, data: bytes | None = None) -> Document:
    """Return the only DDPJob of a file, or the one named `job`. Raise InputError. data: content, if already read."""
    documents = [d for d in (read(path) if data is None else parse(path, data)) if d.data is not None]
    if not documents:
        raise InputError(f"{path}:1: the file has no DDPJob: it is empty")
    jobs = [d for d in documents if isinstance(d.data, Mapping) and d.data.get("kind") == api.KIND]
    if not jobs:
        raise InputError("\n".join(_not_a_job(d) for d in documents))
    if job is not None:
        return _choose(path, jobs, job)
    if len(jobs) > 1:
        names = ", ".join(f"{d.name} (line {d.line(())})" for d in jobs)
        several = f"{path}:{jobs[1].line(())}: {len(jobs)} DDPJobs: {names}"
        if len({d.name for d in jobs}) < len(jobs):
            raise InputError(f"{several}. Two have the same name; names must differ.")
        raise InputError(f"{several}. Choose one with --job NAME.")
    return jobs[0]


def read(path: str) -> Iterator[Document]:
    """Return all documents of a file, or of stdin for `-`; lists become their items. Raise InputError with the line."""
    try:
        if path == "-":
            path, data = "stdin", sys.stdin.buffer.read(yamlbounds.BYTES_MAX + 1)
        else:
            with open(own_files.open_named(path), "rb") as file:
                data = file.read(yamlbounds.BYTES_MAX + 1) or b""
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except ValueError:  # a NUL in the name
        raise InputError(f"{path!r}: no file has such a name") from None
    return parse(path, data)


def parse(path: str, data: bytes) -> Iterator[Document]:
    """Return all documents of a file's content, as `read` does. path: for messages."""
    if len(data) > yamlbounds.BYTES_MAX:
        line = data.count(b"\n") + 1
        raise InputError(f"{path}:{line}: more than {yamlbounds.BYTES_MAX >> 20} MiB: too large for a file of jobs")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}:{line}: byte {error.start} is not UTF-8, so not valid YAML") from None
    return (document for read in _documents(path, text) for document in _of_list(read))


def _of_list(document: Document) -> Iterator[Document]:
    """Yield the items of a list, as `kubectl get -o yaml` prints it. Items of a typed list have no kind, so add it."""
    data = document.data
    kind = data.get("kind") if isinstance(data, Mapping) else None
    if not isinstance(kind, str) or not kind.endswith(_LIST) or not isinstance(data.get("items"), list):
        yield document
        return
    lines: list[dict[FieldPath, int]] = [{} for _ in data["items"]]
    for path, line in document.lines.items():
        if path[:1] == ("items",) and len(path) > 1:
            lines[int(path[1])][path[2:]] = line
    of_items = {"apiVersion": data.get("apiVersion"), "kind": kind.removesuffix(_LIST)} if kind != _LIST else {}
    for item, own in zip(data["items"], lines, strict=True):
        yield Document(document.source, {**of_items, **item} if isinstance(item, dict) else item, own)


def read_value(text: str) -> Any:
    """Parse a value of `--set` as YAML; if it is not valid, return the text itself. Raise InputError if too large."""
    try:
        documents = _documents("the value", text)
    except _NotYAMLError:
        return text
    return documents[0].data if documents else None


class _NotYAMLError(InputError):
    """Text that is not valid YAML."""


def _documents(source: str, text: str) -> list[Document]:
    documents = []
    _check_characters(source, text)
    loader = _Loader(text)
    try:
        yamlbounds.check(text, _Loader)
        while loader.check_node():
            node = loader.get_node()
            lines: dict[FieldPath, int] = {}
            _Walk(source, lines).visit(node, ())
            documents.append(Document(source, loader.construct_document(node), lines))
    except yamlbounds.OutOfBoundsError as error:
        raise InputError(f"{source}:{error.line}: {error}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}" if mark else source
        line = text.splitlines()[mark.line] if mark and mark.line < len(text.splitlines()) else ""
        if line[: len(line) - len(line.lstrip())].count("\t"):
            raise _NotYAMLError(f"{where}: not valid YAML: a tab: YAML is indented with spaces") from None
        raise _NotYAMLError(f"{where}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise _NotYAMLError(f"{source}: not valid YAML: {error}".splitlines()[0]) from None
    finally:
        loader.dispose()
    return documents


def _check_characters(source: str, text: str) -> None:
    """Refuse control characters here, with their line, because the parser's error has no line."""
    wrong = yaml.reader.Reader.NON_PRINTABLE.search(text)
    if wrong:
        line = text.count("\n", 0, wrong.start()) + 1
        raise _NotYAMLError(f"{source}:{line}: not valid YAML: the control character U+{ord(wrong[0]):04X}")


@dataclass
class _Walk:
    """Records the line of every field. Mistakes that would later be reported without a line are refused here."""

    source: str
    lines: dict[FieldPath, int]

    def visit(self, node: Any, path: FieldPath) -> None:
        self.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            self._visit_mapping(node, path)
        elif isinstance(node, yaml.SequenceNode):
            for i, value in enumerate(node.value):
                self.visit(value, (*path, i))
        else:
            self._check_text(node)
            if node.tag in _NUMBERS:
                self._check_number(node)

    def _visit_mapping(self, node: Any, path: FieldPath) -> None:
        """Refuse duplicate keys, because YAML readers silently keep the last one."""
        seen: dict[str, int] = {}
        node.value = [(self._key(key), value) for key, value in node.value]
        for key, value in node.value:
            if key.tag != f"{_TAG}merge" and key.value in seen:
                raise self._wrong(
                    key, f"{_short(key.value)} is given twice, first in line {seen[key.value]}; remove one"
                )
            seen[key.value] = key.start_mark.line + 1
            where = (*path, key.value)
            self.lines[where] = key.start_mark.line + 1
            self.visit(value, where)

    def _key(self, key: Any) -> Any:
        """Return a key as a text, as JSON requires; in a new node, because an alias may use the old node as a value."""
        if not isinstance(key, yaml.ScalarNode):
            kind = "a list" if isinstance(key, yaml.SequenceNode) else "a mapping"
            raise self._wrong(key, f"{kind} cannot be a key; a key must be text")
        self._check_text(key)
        if key.tag == f"{_TAG}merge":
            return key
        return yaml.ScalarNode(f"{_TAG}str", key.value, key.start_mark, key.end_mark)

    def _check_text(self, node: Any) -> None:
        if "\0" in node.value:
            raise self._wrong(node, "a text with a NUL character, which no program can receive. Remove it.")

    def _check_number(self, node: Any) -> None:
        """Refuse numbers that JSON does not have, and long numbers, because Python takes a second for many digits."""
        try:
            if len(node.value) > yamlbounds.NUMBER_CHARACTERS_MAX:
                raise ValueError
            yamlvalues.number(node.value)
        except ValueError:
            text = f'{_short(node.value)} is not a number that JSON has; if it is meant as text, put it into "…"'
            raise self._wrong(node, text) from None

    def _wrong(self, node: Any, what: str) -> InputError:
        return InputError(f"{self.source}:{node.start_mark.line + 1}: {what}")


def _short(text: str) -> str:
    if not text:
        return "an empty text"
    return text if len(text) <= 60 else f"{text[:60]}…"


def _choose(path: str, jobs: list[Document], name: str) -> Document:
    matching = [d for d in jobs if d.name == name]
    if not matching:
        names = [d.name for d in jobs]
        raise InputError(f"{path}: no DDPJob named {name}{suggestion(name, names)} (there: {', '.join(names)})")
    if len(matching) > 1:
        raise InputError(f"{path}: {len(matching)} DDPJobs are named {name}; names must differ")
    return matching[0]


def _not_a_job(document: Document) -> str:
    if not isinstance(document.data, Mapping):
        return f"{document.source}:{document.line(())}: {NOT_A_JOB}, not {say(document.data)}"
    kind = document.data.get("kind")
    hint = f"; `ddpjob convert {document.source}` makes one of it" if kind in CONVERTED else ""
    return f"{document.source}:{document.line(('kind',))}: kind: must be {api.KIND}, is {say(kind)}{hint}"
