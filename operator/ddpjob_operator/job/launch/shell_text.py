"""Finds the variables that a pod's shell reads in a script of `sh -c`, also in quotes, here-documents and inner shells.

A shell that a launcher starts runs in each rank, with the variables of the ranks, so its script is not read here.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ddpjob_operator.job.launch import command, programs, shell

_IN_TEXT = re.compile(r"(?<!\\)\$(?:\{[!#]?([A-Za-z_]\w*)(:?[-=+?])?|([A-Za-z_]\w*))")
_IN_NUMBERS = re.compile(r"(?<![\w.])[A-Za-z_]\w*")
_OPTION_C = re.compile(r"-[a-z]*c[a-z]*")
_DEPTH_MAX = 10  # maximum number of nested shells (`sh -c`) whose scripts are read


class Reference(NamedTuple):
    """A variable that a script reads, with the operator `:-` of ${NAME:-0}."""

    name: str
    operator: str = ""


def scripts(words: Sequence[str]) -> Iterator[tuple[int, bool]]:
    """Yield (index, True) for each word that is the script of a shell; (index, False) if each rank runs this shell."""
    has_shell = is_launched = is_script = False
    for place, word in enumerate(words):
        name, before = programs.name(word), words[place - 1] if place else ""
        if is_script:
            yield place, not is_launched
            is_script = False
        elif name in command.SHELLS:
            has_shell = True
        elif has_shell and _OPTION_C.fullmatch(word):
            is_script = True
        elif has_shell and not word.startswith(("-", "+")) and not before.endswith("o"):
            has_shell = False  # dash runs the file as a script; `bash -o pipefail -c` is a command
        elif command.starts_ranks(word) or name in programs.FRAMEWORKS:
            is_launched = True


@functools.lru_cache(maxsize=16)
def references(script: str) -> tuple[Reference, ...]:
    """Return the variables that the pod's own shell reads when it runs the script; none if it cannot be read."""
    return tuple(dict.fromkeys(_references(script, 0)))


def _references(script: str, depth: int) -> Iterator[Reference]:
    try:
        nodes = list(shell.walk(shell.parse(script))) if depth < _DEPTH_MAX else []
    except shell.ShellSyntaxError:
        return
    for node in nodes:
        for word in shell.words_of(node):
            yield from (found for text in word.expanded for found in _in_text(text))
        if not isinstance(node, shell.Simple):
            continue
        yield from (found for text in node.expanded for found in _in_text(text))
        words = [word.value for word in node.words]
        read = [words[place] for place, is_read_by_pod in scripts(words) if is_read_by_pod]
        if words[:1] == ["eval"]:
            read.append(" ".join(words[1:]))
        elif words[:1] == ["trap"]:
            read += words[1:2]
        elif words and not read and programs.name(words[0]) in command.SHELLS:
            read += node.document
        for text in read:
            yield from _references(text, depth + 1)


def _in_text(text: str) -> Iterator[Reference]:
    if text.startswith(("((", "$((")):  # names need no $ in arithmetic
        yield from map(Reference, _IN_NUMBERS.findall(text))
        return
    for found in _IN_TEXT.finditer(text):
        yield Reference(found[1] or found[3], found[2] or "")


def sets(script: str, name: str) -> bool:
    """True if a script sets a variable on any path through it."""
    given = rf"(?<![\w$-]){name}=|\bfor\s+{name}\s|\bread\s[^;&|\n]*\b{name}\b|\$\{{{name}:?="
    return re.search(given, script) is not None
