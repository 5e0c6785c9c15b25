"""Find the options that a script declares, as a user types them: --lr, -e."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpjob_check.nodes import name_of, parameters_of, text_in

# Functions that declare an option, in this order: argparse, optparse, click, typer.
_DECLARE = ("add_argument", "add_option", "option", "Option")
# Parsers that turn each field of a dataclass into an option.
_OF_FIELDS = ("HfArgumentParser", "simple_parsing", "tyro", "jsonargparse", "draccus")
# Parsers that turn each parameter of a function (a decorated command, or passed to the parser) into an option.
_OF_PARAMETERS = ("typer", "fire", "tyro", "jsonargparse", "cyclopts")


def declared(tree: ast.AST) -> frozenset[str]:
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
