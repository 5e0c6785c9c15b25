"""Find the files that a .gitignore excludes, as in gitignore(5). Git itself is not called, because a stranger's folder
may configure programs that git starts (core.fsmonitor, filters). Each pattern becomes a regular expression that never
backtracks into a `*`, because the leftmost match is always right. A lookahead with a backreference prevents that."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ddpjob import own_files
from ddpjob_cli.manifest.yamlfile import InputError

NAME = ".gitignore"
FOLDERS_DEEP_MAX = 100
BYTES_MAX = 1 << 20
PATTERN_MAX = 4096  # characters; no path is longer
NAME_MAX = 255  # bytes; the longest file name
COMPARISONS_MAX = 5_000_000  # paths times patterns; so many comparisons take some seconds
COMPILE_COST = 100  # cost of compiling the shortest pattern, counted in comparisons
_POSIX = {
    "alpha": "a-zA-Z", "digit": "0-9", "alnum": "a-zA-Z0-9", "upper": "A-Z", "lower": "a-z", "blank": " \\t",
    "space": "\\s", "xdigit": "0-9a-fA-F", "punct": "!-/:-@\\[-`{-~", "cntrl": "\\x00-\\x1f\\x7f",
    "print": "\\x20-\\x7e", "graph": "\\x21-\\x7e",
}  # fmt: skip
_STAR, _SLASH = "*", "/"
_NEVER = "(?!)"
# Matches stars, a character class, an escaped character, or one other character.
# An unclosed `[` and a final backslash count as one character; git matches nothing with such a pattern (`_tokens`).
_TOKEN = re.compile(
    r"\*+|\[(?P<negated>[!^]?)(?P<members>\]?(?:\[:[a-z]+:\]|\\.|\[(?!:[a-z]+:\])|[^]\\[])*)\]|\\.|.", re.DOTALL
)
_MEMBER = re.compile(r"\[:(?P<posix>[a-z]+):\]|(?P<low>\\.|[^\\])-(?P<high>\\.|[^\\])|\\?(?P<one>.)", re.DOTALL)


class Pattern(NamedTuple):
    expression: re.Pattern[str]
    includes: bool
    folders_only: bool
    by_name: bool
    """True if only the last part of a path is compared."""
    cost: int


@dataclass
class Ignored:
    """The .gitignore files of a folder and its subfolders. Raise InputError beyond COMPARISONS_MAX."""

    root: Path
    left: int = COMPARISONS_MAX
    _files: dict[str, list[Pattern]] = field(default_factory=dict)
    """Patterns by their folder: its path below the root with a slash at its end, or ""."""

    def enter(self, below: str) -> None:
        """Read the .gitignore of a folder, before `has` is called for its entries."""
        path = self.root / below / NAME
        try:
            data = own_files.read_file(path, BYTES_MAX + 1)
        except FileNotFoundError:
            return
        except OSError as error:  # an error, because the excluded files may be secret
            raise InputError(f"{path}: {error.strerror}") from None
        if len(data) > BYTES_MAX:
            raise InputError(f"{path}: larger than {BYTES_MAX >> 20} MiB")
        for pattern in patterns(data.decode(errors="replace")):
            self._count(COMPILE_COST + len(pattern.expression.pattern))  # 99 kB of stars take 4 s to compile
            self._files.setdefault(below, []).append(pattern)

    def has(self, path: str, *, is_folder: bool) -> bool:
        """True if git would ignore this path below the root. The folders above it must not be ignored."""
        name = path.rpartition("/")[2]
        for below in _innermost_first(path):
            for pattern in reversed(self._files.get(below, ())):
                if pattern.folders_only and not is_folder:
                    continue
                self._count(pattern.cost)
                if pattern.expression.match(name if pattern.by_name else path[len(below) :]):
                    return not pattern.includes
        return False

    def _count(self, comparisons: int) -> None:
        self.left -= comparisons
        if self.left < 0:
            raise InputError(
                f"{self.root / NAME}: too many patterns for the files in this folder "
                f"(more than {COMPARISONS_MAX:,} comparisons); name a smaller folder"
            )


def patterns(text: str) -> Iterator[Pattern]:
    """Yield the patterns of a .gitignore in order, except patterns that match nothing in git."""
    for given in text.removeprefix("\ufeff").split("\n"):
        line = given.removesuffix("\r")
        end = len(line.rstrip(" "))
        backslashes = end - len(line[:end].rstrip("\\"))
        line = line[: end + backslashes % 2]  # a backslash keeps one space at the end
        if not line or line.startswith("#") or len(line) > PATTERN_MAX:
            continue
        pattern = _pattern(line)
        if pattern is not None:
            yield pattern


def _pattern(line: str) -> Pattern | None:
    text = line.removeprefix("!")
    folders_only = text.endswith("/")
    text = text.removesuffix("/")
    by_name = "/" not in text
    tokens = _tokens(text.removeprefix("/"))
    if not tokens:
        return None
    expression = _of_part(tokens, itertools.count()) if by_name else _of_path(tokens)
    longest = min(len(text), NAME_MAX)
    cost = 1 + (longest * longest >> 8) if _STAR in text else 1
    return Pattern(re.compile(f"{expression}\\Z", re.DOTALL), line.startswith("!"), folders_only, by_name, cost)


def _innermost_first(path: str) -> Iterator[str]:
    """Yield a/b/, a/ and "" for a/b/c."""
    end = len(path)
    while (end := path.rfind("/", 0, end)) >= 0:
        yield path[: end + 1]
    yield ""


def _tokens(text: str) -> list[str]:
    """Return `*`, `**`, `/`, and an expression for each other character; [] if the pattern matches nothing in git."""
    tokens: list[str] = []
    for found in _TOKEN.finditer(text):
        letters = found[0]
        if letters in ("[", "\\"):
            return []
        if letters[0] == "[":
            tokens.append(_class(found["negated"], found["members"]))
        elif letters[0] == _STAR:
            tokens.append(letters[:2])
        else:
            letter = letters[-1]
            tokens.append(_SLASH if letter == _SLASH else "[^/]" if letters == "?" else re.escape(letter))
    return tokens


def _class(negated: str, members: str) -> str:
    """Return an expression for `[...]`; a reversed range such as z-a matches its first letter."""
    inside = ""
    for found in _MEMBER.finditer(members):
        if found["posix"]:
            inside += _POSIX.get(found["posix"], "")
            continue
        low, high = (found["low"] or found["one"])[-1], (found["high"] or " ")[-1]
        inside += f"{re.escape(low)}-{re.escape(high)}" if low <= high and found["high"] else re.escape(low)
    return f"(?!/)[{'^' if negated else ''}{inside}]" if inside else "[^/]" if negated else _NEVER


def _of_path(tokens: list[str]) -> str:
    """Return an expression for a pattern with slashes. `**` between them matches any number of folders."""
    parts: list[list[str]] = [[]]
    for token in tokens:
        if token == _SLASH:
            parts.append([])
        else:
            parts[-1].append(token)
    if not all(parts):
        return _NEVER  # no path has two slashes in a row
    numbers = itertools.count()
    runs: list[list[str]] = [[]]  # the parts between two `**`
    for part in parts:
        if part == ["**"]:
            runs.append([])
        else:
            runs[-1].append(_of_part(part, numbers))
    first, *others = ["/".join(run) for run in runs]
    if not others:
        return first
    begin = f"{first}/" if first else ""
    middle = "".join(_kept(f"(?:[^/]+/)*?{run}/", numbers) for run in others[:-1] if run)
    return begin + middle + (f"(?:[^/]+/)*?{others[-1]}" if others[-1] else ".+")


def _of_part(tokens: list[str], numbers: Iterator[int]) -> str:
    """Return an expression for the part of a pattern between two slashes."""
    chunks = [""]
    for token in tokens:
        if token[0] == _STAR:
            chunks.append("")
        else:
            chunks[-1] += token
    if len(chunks) == 1:
        return chunks[0]
    middle = "".join(_kept(f"[^/]*?{chunk}", numbers) for chunk in chunks[1:-1] if chunk)
    return f"{chunks[0]}{middle}[^/]*{chunks[-1]}(?=/|\\Z)"


def _kept(expression: str, numbers: Iterator[int]) -> str:
    """Return an expression that keeps its first match, like an atomic group, which Python 3.10's `re` lacks."""
    name = f"kept{next(numbers)}"
    return f"(?=(?P<{name}>{expression}))(?P={name})"
