"""Detect a missing script or module: no restart can fix that."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping

from ddpjob_core.failures import EXCEPTION_MAX
from ddprun.options import RankScript

_OF_RUNPY = re.compile(r"SystemExit: \S+: No module named ")
# Python's exit codes for a missing file, and for a missing module.
_EXIT_CODES = {"script": 2, "module": 1}


def missing(script: RankScript, environ: Mapping[str, str]) -> str:
    """Return a sentence that names what is missing; "" if nothing is known to be missing."""
    try:
        if script.kind == "module":
            return _missing_module(script.name, environ)
        return _missing_script(script.name) if script.kind == "script" else ""
    except OSError:  # an unreadable or deleted folder: Python will report it
        return ""


def told(sentence: str) -> str:
    """Return the sentence with the prefix NO_PROGRAM (ddpjob_core/failures.py), by which operator and agents recognize
    a missing program.
    """
    return f"ddprun: {sentence}"[:EXCEPTION_MAX]


def explains(code: int, recorded: str, script: RankScript, environ: Mapping[str, str]) -> str:
    """Return the result of `told` if a missing script or module explains this exit code; else "".

    recorded: the rank's exception. A new Python process has none, because Python only prints what is missing. A rank of
    the fork server has the exception that runpy raised.
    """
    if recorded and not _OF_RUNPY.match(recorded):
        return ""
    if code != _EXIT_CODES.get(script.kind) or not (sentence := missing(script, environ)):
        return ""
    return told(sentence)


def _missing_script(script: str) -> str:
    if os.path.exists(script):
        return ""
    from difflib import get_close_matches  # imported late: a job waits for imports

    folder, name = os.path.split(script)
    there = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
    close = get_close_matches(name, there, n=1)
    hint = f"; did you mean {os.path.join(folder, close[0])}?" if close else ""
    return f"there is no file {script} in {os.getcwd()}{hint}"


def _missing_module(name: str, environ: Mapping[str, str]) -> str:
    """Return which top-level package is missing, or that a file name was given as module; "" if neither is known."""
    stem = name.removesuffix(".py")
    path = f"{stem.replace('.', '/')}.py"
    if stem != name and os.path.isfile(path) and not os.path.isdir(path[:-3]):
        return f"there is no module {name}: -m takes {stem.replace('/', '.')}; without -m the file is {path}"
    top = name.partition(".")[0]
    # Not checked: another interpreter or other flags may find other modules; Python itself refuses a relative name.
    other = environ.get("PYTHON_EXEC") or sys.flags.ignore_environment or sys.flags.no_user_site
    if other or not top or _is_there(top):
        return ""
    return f"there is no module {top} in {os.getcwd()}, nor is one installed in {sys.executable}"


def _is_there(module: str) -> bool:
    """True if `python -m` finds a top-level module. Nothing is imported."""
    from importlib.util import find_spec

    before = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # an import hook that is not Python's own may find the module
        return True
    finally:
        sys.path[:] = before
