"""Find the kind of a file by its suffix, else by its content: scripts from pip have no suffix, but a shebang."""

from __future__ import annotations

import ast
import os
import re
from typing import Literal

from ddpjob_check.parsing import TooLongError, parse
from ddpjob_cli.local.run_files.files import read_script, text_of_script

Kind = Literal["script", "notebook", "job", "program"]

YAML_SUFFIXES = (".yaml", ".yml", ".json")
_SHELL_SUFFIXES = (".sh", ".bash")
NOTEBOOK = ".ipynb"
_SHEBANG = re.compile(rb"\A(?:\xef\xbb\xbf)?#![^\n]*")
_PYTHON_RUNS_IT = re.compile(rb"python|pypy|torchrun|ddprun")
_PYTHON = re.compile(rb"^(?:import|from)\s+\w|^(?:async )?def \w+\(|^class \w+|^if __name__\b", re.MULTILINE)
_YAML = re.compile(rb"^(?:apiVersion:|kind:|metadata:|spec:|\{|---)", re.MULTILINE)


def of(path: str, unreadable: Kind = "job") -> Kind:
    """Return the kind of a file. unreadable: the kind of a missing file, or of a pipe, which can be read only once."""
    if path.endswith(".py"):
        return "script"
    if path.endswith(NOTEBOOK):
        return "notebook"
    if path.endswith(YAML_SUFFIXES):
        return "job"
    if not os.path.isfile(path):
        return unreadable
    try:
        data = read_script(path)
    except OSError:
        return unreadable
    if not path.endswith(_SHELL_SUFFIXES) and is_python(data):
        return "script"
    return "program" if _SHEBANG.match(data) or path.endswith(_SHELL_SUFFIXES) else "job"


def is_python(data: bytes) -> bool:
    """True for a Python script, even with a syntax error. False for YAML, although short YAML may be valid Python."""
    shebang = _SHEBANG.match(data)
    by_python = shebang is not None and _PYTHON_RUNS_IT.search(shebang[0]) is not None
    try:
        body = parse(text_of_script(data)).body
    except (SyntaxError, ValueError, LookupError, RecursionError, MemoryError, TooLongError):
        if by_python or _PYTHON.search(data):
            return True
        return shebang is None and b"\0" not in data and not _YAML.search(data)
    return by_python or not all(map(_is_yaml_too, body))


def _is_yaml_too(statement: ast.stmt) -> bool:
    """True for `kind: DDPJob`, which Python reads as an annotation, and for JSON, which is an expression."""
    if isinstance(statement, ast.AnnAssign):
        return statement.value is None
    return isinstance(statement, ast.Expr) and not any(
        isinstance(node, ast.Call | ast.Await) for node in ast.walk(statement)
    )
