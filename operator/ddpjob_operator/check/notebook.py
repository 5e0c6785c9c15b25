"""The Python in a Jupyter notebook: its code cells as one script, and each `%%writefile NAME.py` as one of its own."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

_WRITES = re.compile(r"%%(?:writefile|file)\s+(?:-a\s+|--append\s+)?(\S+\.py)\s*$")
# Cell magics below which the rest of the cell is Python as it stands.
_PYTHON = re.compile(r"%%(?:time|timeit|capture|prun)\b")
_MAGIC = re.compile(r"(\s*)[%!?]|(\s*)[\w.]+\?{1,2}\s*$")
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
        first = lines[0].strip() if lines else ""
        if _WRITES.match(first):
            written.append(Part(lines[1:], [(number, i) for i in range(2, len(lines) + 1)]))
        elif not first.startswith("%%") or _PYTHON.match(first):
            own.lines += map(_without_magic, lines)
            own.places += [(number, i) for i in range(1, len(lines) + 1)]
    return [own, *written]


def _lines(source: object) -> list[str]:
    """nbformat has a text or a list of lines."""
    if isinstance(source, list):
        source = "".join(s for s in source if isinstance(s, str))
    return source.splitlines() if isinstance(source, str) else []


def _without_magic(line: str) -> str:
    assigned = _ASSIGNED.match(line)
    if assigned:
        return f"{assigned[1]}None"
    magic = _MAGIC.match(line)
    return f"{magic[1] or magic[2] or ''}pass" if magic else line
