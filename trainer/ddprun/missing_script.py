"""A script or a module that is not there: no restart mends that."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping

from ddpjob_core.failures import EXCEPTION_MAX
from ddprun.options import Options

_OF_RUNPY = re.compile(r"SystemExit: \S+: No module named ")
# Python's own for a file, and for a module.
_EXIT_CODES = {"script": 2, "module": 1}


def missing(options: Options, environ: Mapping[str, str]) -> str:
    """What is not there, in a sentence; empty: nothing is known to be missing."""
    try:
        if options.kind == "module":
            return _missing_module(options.script, environ)
        return _missing_script(options.script) if options.kind == "script" else ""
    except OSError:  # a folder that may not be read, or is gone: Python will say it
        return ""


def told(sentence: str) -> str:
    """As the exception of a failure, by which operator and agents know it (ddpjob_core/failures.py NO_PROGRAM)."""
    return f"ddprun: {sentence}"[:EXCEPTION_MAX]


def explains(code: int, recorded: str, options: Options, environ: Mapping[str, str]) -> str:
    """Why a rank ended with this code, as `told`; empty: not by what is missing.

    recorded: the exception that it has recorded. Python says what is missing to the console alone, which nobody reads
    here; in a rank from the fork server runpy raises it.
    """
    if recorded and not _OF_RUNPY.match(recorded):
        return ""
    if code != _EXIT_CODES.get(options.kind) or not (sentence := missing(options, environ)):
        return ""
    return told(sentence)


def _missing_script(script: str) -> str:
    if os.path.exists(script):
        return ""
    from difflib import get_close_matches  # only where it is needed: a job waits for imports

    folder, name = os.path.split(script)
    there = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
    close = get_close_matches(name, there, n=1)
    hint = f"; did you mean {os.path.join(folder, close[0])}?" if close else ""
    return f"there is no file {script} in {os.getcwd()}{hint}"


def _missing_module(name: str, environ: Mapping[str, str]) -> str:
    """As far as that is known without an import: of the first package, and of a file that is named instead."""
    stem = name.removesuffix(".py")
    path = f"{stem.replace('.', '/')}.py"
    if stem != name and os.path.isfile(path) and not os.path.isdir(path[:-3]):
        return f"there is no module {name}: -m takes {stem.replace('/', '.')}; without -m the file is {path}"
    top = name.partition(".")[0]
    # Another interpreter, or one with other flags, has modules of its own. A relative name is refused by Python.
    other = environ.get("PYTHON_EXEC") or sys.flags.ignore_environment or sys.flags.no_user_site
    if other or not top or _is_there(top):
        return ""
    return f"there is no module {top} in {os.getcwd()}, nor is one installed in {sys.executable}"


def _is_there(module: str) -> bool:
    """Whether `python -m` finds a module that is in no package; nothing is imported for that."""
    from importlib.util import find_spec

    before = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # something else than Python's own finders knows it
        return True
    finally:
        sys.path[:] = before
