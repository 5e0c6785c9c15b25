"""The Python in a Jupyter notebook: its code cells as one script, and each `%%writefile NAME.py` as one of its own."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePath

_WRITES = re.compile(r"%%(?:writefile|file)\s+(?:-a\s+|--append\s+)?(\S+\.py)\s*$")
# Cell magics below which the rest of the cell is Python as it stands.
_PYTHON = re.compile(r"%%(?:time|timeit|capture|prun)\b")
_MAGIC = re.compile(r"(\s*)(?:%{1,2}[A-Za-z]|[!?])|(\s*)[\w.]+\?{1,2}\s*$")
_ASSIGNED = re.compile(r"(\s*[\w, ]+=\s*)[%!]")


@dataclass
class Part:
    """One script of a notebook: its text, and for each line the cell (from 1, code cells alone) and the line in it."""

    lines: list[str] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The script."""
        return "".join(f"{line}\n" for line in self.lines)

    def place(self, line: int) -> tuple[int, int]:
        """(cell, line in it) of a line of the script."""
        return self.places[min(max(line, 1), len(self.places)) - 1] if self.places else (1, 1)


def parts(text: str) -> list[Part]:
    """The scripts of a notebook. Raises ValueError where the text is no notebook."""
    document = json.loads(text)
    cells = document.get("cells") if isinstance(document, dict) else None
    if not isinstance(cells, list):
        raise ValueError("not a notebook: it has no cells")
    own, written = Part(), []
    code = [c for c in cells if isinstance(c, dict) and c.get("cell_type") == "code"]
    for number, cell in enumerate(code, start=1):
        lines = _lines(cell.get("source"))
        begin, first = _begin(lines)
        if _WRITES.match(first.strip()):
            written.append(Part(lines[begin + 1 :], [(number, i) for i in range(begin + 2, len(lines) + 1)]))
        elif not first.lstrip().startswith("%%") or _PYTHON.match(first.lstrip()):
            own.lines += lines if _is_python(lines) else _without_magic(lines)
            own.places += [(number, i) for i in range(1, len(lines) + 1)]
    return [own, *written]


def by_cell(own: Part, path: str) -> Callable[[str], str]:
    """Return a function that names the cells of a notebook in a text: nb.py:6 becomes nb.ipynb:cell 3:2.

    own: the script that was made of the notebook at this path; it has the notebook's stem.
    """
    name, script = PurePath(path).name, re.escape(f"{PurePath(path).stem}.py")
    in_trace = re.compile(rf'(File \\?")[^"\n]*?{script}(\\?", line )(\d{{1,9}})')
    in_sentence = re.compile(rf"(?<![\w./-]){script}:(\d{{1,9}})(?!\d)")

    def frame(match: re.Match[str]) -> str:
        cell, line = own.place(int(match[3]))
        return f"{match[1]}{name}:cell {cell}{match[2]}{line}"

    def place(match: re.Match[str]) -> str:
        cell, line = own.place(int(match[1]))
        return f"{name}:cell {cell}:{line}"

    return lambda text: in_sentence.sub(place, in_trace.sub(frame, text))


def _lines(source: object) -> list[str]:
    """nbformat has a text or a list of lines."""
    if isinstance(source, list):
        source = "".join(s for s in source if isinstance(s, str))
    return source.splitlines() if isinstance(source, str) else []


def _begin(lines: list[str]) -> tuple[int, str]:
    """The first line of a cell and its index: IPython leaves out those before it that are empty."""
    return next(((i, line) for i, line in enumerate(lines) if line.strip()), (0, ""))


def _is_python(lines: list[str]) -> bool:
    """A cell without magic stays as it is: a line of an expression may begin with `%`, where it was wrapped."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse("\n".join(lines))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _without_magic(lines: list[str]) -> Iterator[str]:
    """As IPython reads a cell: the indent of its first line is taken off all, and a line of magic goes on in the next
    one after a backslash."""
    _, first = _begin(lines)
    indent = first[: len(first) - len(first.lstrip())]
    goes_on = False
    for line in lines:
        plain = "" if goes_on else _plain(line.removeprefix(indent))
        goes_on = line.endswith("\\") and (goes_on or plain != line.removeprefix(indent))
        yield plain


def _plain(line: str) -> str:
    """The line, or what stands in the place of its magic."""
    assigned = _ASSIGNED.match(line)
    if assigned:
        return f"{assigned[1]}None"
    magic = _MAGIC.match(line)
    return f"{magic[1] or magic[2] or ''}pass" if magic else line
