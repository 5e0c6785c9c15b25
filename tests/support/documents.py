"""Code blocks and links of README and docs/."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("**/*.md")])
_BLOCK = re.compile(r"(?P<above>[^\n]*)\n```(?P<kind>\w*)\n(?P<text>.*?)\n```", re.DOTALL)
_NOT_RUN = re.compile(r"<!-- not run: (.+) -->")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and why it cannot be run ("" if it can)."""

    page: Path
    line: int
    kind: str
    text: str
    not_run: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(*kinds: str) -> list[Block]:
    """Return all blocks of these languages, except those of docs/check.md, which is generated from the rules."""
    return list(_blocks(kinds))


def _blocks(kinds: tuple[str, ...]) -> Iterator[Block]:
    for page in PAGES:
        if page.name == "check.md":
            continue
        whole = page.read_text(encoding="utf-8")
        for match in _BLOCK.finditer(whole):
            if match["kind"] in kinds:
                line = whole.count("\n", 0, match.start("text")) + 1
                reason = _NOT_RUN.fullmatch(match["above"].strip())
                yield Block(page, line, match["kind"], match["text"], reason[1] if reason else "")


def prose(page: Path) -> str:
    """Return a page without its code."""
    return re.sub(r"`[^`\n]+`", "", re.sub(r"```.*?\n```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MkDocs generate them."""
    text = re.sub(r"```.*?\n```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}
