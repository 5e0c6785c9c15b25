"""The options that a script and its own files declare, read without running them."""

from __future__ import annotations

import ast
import itertools
import os
from collections.abc import Iterator, Sequence

from ddpjob_check import option_names
from ddpjob_check.parsing import TooLongError, parse
from ddpjob_cli.local.kept.files import read_script, text_of_script

_FILES_MAX = 20  # files read; the argument parser is in the script or in a module that it imports
_ABOVE_MAX = 100  # parent folders that a relative import may name
_PLACES_MAX = 1000  # places that are searched for the imports of one file


def of(scripts: Sequence[str]) -> frozenset[str]:
    """Return the options that these scripts and the local files that they import declare. Skip unreadable files."""
    waiting, read = list(scripts), set[str]()
    names: frozenset[str] = frozenset()
    while waiting and len(read) < _FILES_MAX:
        path = os.path.abspath(waiting.pop(0))
        if path in read or not os.path.isfile(path):
            continue
        read.add(path)
        tree = _tree(path)
        if tree is not None:
            names |= option_names.declared(tree)
            waiting += itertools.islice(_imported(tree, os.path.dirname(path)), _PLACES_MAX)
    return names


def _tree(path: str) -> ast.AST | None:
    try:
        return parse(text_of_script(read_script(path)))
    except (OSError, ValueError, SyntaxError, LookupError, RecursionError, MemoryError, TooLongError):
        return None


def _imported(tree: ast.AST, folder: str) -> Iterator[str]:
    """Yield paths next to a script, or in the working folder, that its imports may mean. The paths need not exist."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)]
        else:
            continue
        above = min(max(0, getattr(node, "level", 0) - 1), _ABOVE_MAX)
        for place in (os.path.join(folder, *[os.pardir] * above), os.getcwd()):
            for path in (os.path.join(place, *name.split(".")) for name in names if name):
                yield from (f"{path}.py", os.path.join(path, "__init__.py"))
