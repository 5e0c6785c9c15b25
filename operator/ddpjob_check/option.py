"""One option of a script, and what the words of a command make of it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

UNKNOWN = object()
_TYPES: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}


@dataclass(frozen=True)
class Option:
    """An option as the script declares it."""

    node: ast.AST
    names: tuple[str, ...]
    """--launcher, -l"""
    default: Any
    """UNKNOWN if it is not a literal."""
    kind: str = "str"
    """The type of its value: int, float or str; the values of any other type are not known."""
    flags: Mapping[str, bool] = field(default_factory=dict)
    """The value that each of its names gives it; empty if a value follows the name."""

    @property
    def name(self) -> str:
        """Its longest name, for a message."""
        return max(self.names, key=len)

    def given(self, words: Sequence[str]) -> Any:
        """Return its value with these words, or its default; UNKNOWN if neither is certain."""
        meant = [(self._meant(word), word, after) for word, after in pairwise((*words, ""))]
        meant = [found for found in meant if found[0]]
        if not meant:
            return self.default
        name, word, after = meant[-1]
        if self.flags:
            return UNKNOWN if "=" in word else self.flags[name]
        return self._typed(word.partition("=")[2] if "=" in word else after)

    def _meant(self, word: str) -> str:
        """The one of its names that a word is, or begins; "" if it is another option."""
        name = word.partition("=")[0]
        is_long = len(name) > 3 and name.startswith("--")
        return name if name in self.names else next((n for n in self.names if is_long and n.startswith(name)), "")

    def _typed(self, text: str) -> Any:
        convert = _TYPES.get(self.kind)
        try:
            return UNKNOWN if convert is None else convert(text)
        except ValueError:
            return UNKNOWN


def literal(node: ast.expr | None) -> Any:
    """The value of a literal, None for None, and UNKNOWN for any other expression."""
    try:
        return ast.literal_eval(node or ast.Constant(None))
    except (ValueError, TypeError):
        return UNKNOWN
