"""Find the options that a script and its own files declare, as a user types them: --lr, -e. Nothing is run."""

from __future__ import annotations

import ast
import itertools
import os
from collections.abc import Iterator, Sequence

from ddpjob_check.nodes import name_of, parameters_of, text_in
from ddpjob_check.parsing import TooLongError, parse
from ddpjob_cli.local.run_files.files import read_script, text_of_script

_FILES_MAX = 20  # files read; the argument parser is in the script or in a module that it imports
_ABOVE_MAX = 100  # parent folders that a relative import may name
_PLACES_MAX = 1000  # places that are searched for the imports of one file
# Functions that declare an option, in this order: argparse, optparse, click, typer.
_DECLARE = ("add_argument", "add_option", "option", "Option")
# These parsers turn each field of a dataclass into an option,
_OF_FIELDS = ("HfArgumentParser", "simple_parsing", "tyro", "jsonargparse", "draccus")
# and these each parameter of a function that is decorated as a command or passed to them.
_OF_PARAMETERS = ("typer", "fire", "tyro", "jsonargparse", "cyclopts")


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
            names |= _declared(tree)
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


def _declared(tree: ast.AST) -> frozenset[str]:
    """Return the options that a file declares with argparse, click, typer, absl, as fields of a dataclass, or as
    parameters of a function."""
    found = {name for node in ast.walk(tree) for name in _of(node)}
    used = {name_of(node) for node in ast.walk(tree)}
    used |= {alias.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
    used |= {(n.module or "").split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    found |= set() if used.isdisjoint(_OF_FIELDS) else set(_fields(tree))
    return frozenset(found if used.isdisjoint(_OF_PARAMETERS) else found | set(_parameters(tree)))


def _of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Compare) and name_of(node.comparators[0]) == "argv":  # if "--resume" in sys.argv
        yield from _options(text_in(node.left))
    if not isinstance(node, ast.Call):
        return
    function = name_of(node.func)
    if function.startswith("DEFINE_") and node.args and text_in(node.args[0]):  # absl
        yield f"--{text_in(node.args[0])}"
    if function not in _DECLARE:
        return
    for argument in node.args:
        yield from _options(text_in(argument))
    if any(name_of(k.value) == "BooleanOptionalAction" for k in node.keywords if k.arg == "action"):
        yield from (f"--no-{text_in(a)[2:]}" for a in node.args if text_in(a).startswith("--"))


def _options(text: str) -> Iterator[str]:
    """Yield the options in a declaration; click declares a pair of flags as one text: --shuffle/--no-shuffle."""
    yield from (part.strip() for part in text.split("/") if part.strip().startswith("-") and part.strip("- "))


def _fields(tree: ast.AST) -> Iterator[str]:
    for body in (node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and _is_dataclass(node)):
        for statement in body:
            if isinstance(statement, ast.AnnAssign):
                yield f"--{name_of(statement.target)}"


def _is_dataclass(node: ast.ClassDef) -> bool:
    decorators = (d.func if isinstance(d, ast.Call) else d for d in node.decorator_list)
    return any(name_of(decorator) == "dataclass" for decorator in decorators)


def _parameters(tree: ast.AST) -> Iterator[str]:
    passed = {name_of(word) for node in ast.walk(tree) if isinstance(node, ast.Call) for word in node.args}
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        decorators = (d.func if isinstance(d, ast.Call) else d for d in function.decorator_list)
        if function.name in passed or any(name_of(one) in ("command", "default") for one in decorators):
            yield from (f"--{name}" for name in parameters_of(function))
