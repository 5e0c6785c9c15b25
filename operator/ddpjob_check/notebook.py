"""Extract the Python of a Jupyter notebook: its code cells as one script, and each `%%writefile NAME.py` as another."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePath

from ddpjob_check.parsing import parse

_WRITES = re.compile(r"%%(?:writefile|file)\s+(?:-a\s+|--append\s+)?(\S+\.py)\s*$")
# Cell magics that are followed by plain Python.
_PYTHON = re.compile(r"%%(?:time|timeit|capture|prun)\b")
_MAGIC = re.compile(r"(\s*)(?:%{1,2}[A-Za-z]|[!?])|(\s*)%?[\w.*]+\?{1,2}\s*$")
_ASSIGNED = re.compile(r"([\w\s,.\[\]'\"]+=\s*)[%!]")
# Magics that run the statement after them.
_RUNS = re.compile(r"%?(?:time|timeit|prun)\s+(?:-\S+\s+(?:\d+\s+)?)*(\S.*)")
# Lines that only IPython accepts: line magics without `%`, aliases, and calls without parentheses (`,print a b`).
_AUTOMAGIC = re.compile(
    r"(\s*)(?:(?:alias|autoreload|bookmark|cat|cd|clear|colors|conda|config|cp|debug|dhist|dirs|ed|edit|env|gui|hist|"
    r"history|ldir|less|lf|lk|ll|load|load_ext|logstart|logstop|ls|lsmagic|lx|macro|magic|mamba|man|matplotlib|"
    r"micromamba|mkdir|more|mv|notebook|page|pastebin|pdb|pdef|pdoc|pfile|pinfo|pinfo2|pip|popd|pprint|precision|prun|"
    r"psearch|psource|pushd|pwd|pycat|pylab|recall|rehashx|reload_ext|rep|rerun|reset|reset_selective|rm|rmdir|run|save|"
    r"sc|set_env|store|sx|system|tb|time|timeit|unalias|unload_ext|uv|who|who_ls|whos|xdel|xmode)"
    r"(?:\s+[^=(\s].*|\s*)$|[/,;][A-Za-z_].*)"
)
_PROMPT = re.compile(r"(?:>>> ?|\.\.\. ?|In \[\d+\]: ?)")
_AUTOMAGIC_MAX = 200  # lines of automagic per cell; each requires parsing the cell again
_PARSED_MAX = 2_000_000  # characters that may be parsed in all cells to find automagic


@dataclass
class NotebookPart:
    """One script of a notebook. places: for each line the cell (from 1, code cells only) and the line in the cell."""

    lines: list[str] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(f"{line}\n" for line in self.lines)

    def place(self, line: int) -> tuple[int, int]:
        """Return the cell and the line in the cell for a line of the script."""
        return self.places[min(max(line, 1), len(self.places)) - 1] if self.places else (1, 1)


def parts(text: str) -> list[NotebookPart]:
    """Return the scripts of a notebook, its own cells first. Raise ValueError if the text is not a notebook."""
    document = json.loads(text)
    cells = document.get("cells") if isinstance(document, dict) else None
    if not isinstance(cells, list):
        raise ValueError("not a notebook: it has no cells")
    own, written, left = NotebookPart(), [], [_PARSED_MAX]
    code = [c for c in cells if isinstance(c, dict) and c.get("cell_type") == "code"]
    for number, cell in enumerate(code, start=1):
        lines = _lines(cell.get("source"))
        begin, first = _begin(lines)
        if _WRITES.match(first.strip()):
            written.append(NotebookPart(lines[begin + 1 :], [(number, i) for i in range(begin + 2, len(lines) + 1)]))
        elif not first.lstrip().startswith("%%") or _PYTHON.match(first.lstrip()):
            own.lines += lines if _error_in(lines) is None else _without_automagic(list(_without_magic(lines)), left)
            own.places += [(number, i) for i in range(1, len(lines) + 1)]
    return [own, *written]


def by_cell(own: NotebookPart, path: str) -> Callable[[str], str]:
    """Return a function that rewrites places in a text as cells: nb.py:6 becomes nb.ipynb:cell 3:2. own: the script
    made from the notebook at this path, which has the same stem."""
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
    """Return the lines of a cell's source, which nbformat stores as a text or as a list of texts."""
    if isinstance(source, list):
        source = "".join(s for s in source if isinstance(s, str))
    return source.splitlines() if isinstance(source, str) else []


def _begin(lines: list[str]) -> tuple[int, str]:
    """Return the index and the text of a cell's first non-empty line, as IPython finds it."""
    return next(((i, line) for i, line in enumerate(lines) if line.strip()), (0, ""))


def _error_in(lines: list[str]) -> int | None:
    """Return the line (from 1) with a syntax error; 0 if unknown. Return None for a valid cell, which stays unchanged,
    because a line of a wrapped expression may begin with `%`."""
    try:
        parse("\n".join(lines))
    except SyntaxError as error:
        return error.lineno or 0
    except (ValueError, RecursionError, MemoryError):
        return 0
    return None


def _without_automagic(lines: list[str], left: list[int]) -> list[str]:
    """Replace lines that are not valid Python but that IPython accepts as magic."""
    size = 50 + sum(map(len, lines))  # parsing an empty cell costs as much as 50 characters
    for _ in range(min(_AUTOMAGIC_MAX, 1 + max(left[0], 0) // size)):
        left[0] -= size
        wrong = _error_in(lines)
        # After an incomplete line such as `cd data/`, Python may report the error on the next line.
        found = [
            (i, m)
            for i in ((wrong or 0) - 1, (wrong or 0) - 2)
            if 0 <= i < len(lines) and (m := _AUTOMAGIC.match(lines[i]))
        ]
        if wrong is None or not found:
            break
        place, magic = found[0]
        lines = [*lines[:place], _replaced(lines[place], magic[1] or "", "pass"), *lines[place + 1 :]]
    return lines


def _without_magic(lines: list[str]) -> Iterator[str]:
    """Yield the lines with magic replaced. As in IPython, the first line's indent is removed from all lines, and a
    backslash continues a line of magic."""
    _, first = _begin(lines)
    if _PROMPT.match(first):  # the cell was copied from a terminal
        lines = [_PROMPT.sub("", line, count=1) for line in lines]
    indent = first[: len(first) - len(first.lstrip())]
    goes_on = False
    for line in lines:
        plain = "" if goes_on else _plain(line.removeprefix(indent))
        goes_on = line.endswith("\\") and (goes_on or not plain.endswith("\\"))
        yield plain


def _plain(line: str) -> str:
    """Return the line, or a replacement for its magic."""
    assigned, magic = _ASSIGNED.match(line), _MAGIC.match(line)
    if assigned:
        return _replaced(line, assigned[1], "None")
    return _replaced(line, magic[1] or magic[2] or "", "pass") if magic else line


def _replaced(line: str, before: str, nothing: str) -> str:
    """Return the text before a magic, followed by the statement that the magic runs, or by `nothing`."""
    runs = _RUNS.match(line, len(before))
    return before + (runs[1] if runs else nothing)
