"""Parse a stranger's Python. Text that would take too long is not parsed, because no signal stops the parser."""

from __future__ import annotations

import ast
import contextlib
import re
import sys
import warnings

# Before 3.12 Python searches an f-string from its start for each `{`, which takes 0.2 to 0.5 ns per character.
_SEARCHED_MAX = 1_000_000_000
# Python 3.10 crashes in ast.parse on a chain of 200,000 names (a.a.a, a + a + a) and parses 30,000 of them.
_CHAIN_CHARACTERS_MAX = 50_000
_COMMENT_OR_TEXT = re.compile(
    r"#[^\n]*|(?P<prefix>[bfru]{0,2})(?:"
    + "|".join(rf"{quote}(?:\\.?|[^\\])*?(?:{quote}|\Z)" for quote in ("'''", '"""'))
    + r"|'(?:\\.?|[^\\\n'])*'?|\"(?:\\.?|[^\\\n\"])*\"?)",
    re.DOTALL | re.IGNORECASE,
)


class TooLongError(Exception):
    """Parsing a script, or a rule for it, takes too long and is stopped."""


def parse(text: str) -> ast.Module:
    """Return the tree. Raise TooLongError, or Python's SyntaxError, ValueError, RecursionError or MemoryError."""
    formatted = (found[0] for found in _COMMENT_OR_TEXT.finditer(text) if "f" in (found["prefix"] or "").lower())
    if sum(len(one) * one.count("{") for one in formatted) > _SEARCHED_MAX:
        raise TooLongError
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "\d" in a text causes a warning, but is no DDP mistake
        if sys.version_info < (3, 11) and len(text) > _CHAIN_CHARACTERS_MAX:
            with contextlib.suppress(SyntaxError, ValueError):  # ast.parse raises errors of syntax again
                compile(text, "<script>", "exec", dont_inherit=True)  # raises RecursionError for a long chain
        return ast.parse(text)
