"""What a script does where it is not started as in the job: without a launcher, as one process, or on Windows."""

from __future__ import annotations

import ast

from ddpjob_check.nodes import Function, means_one_process, text_in
from ddpjob_check.script import Script

_SET_BY_THE_JOB = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"}
_WINDOWS = ("win32", "nt", "Windows")


def is_otherwise(script: Script, node: ast.AST, seen: frozenset[Function] = frozenset()) -> bool:
    """Whether a node runs only there, by a condition around it or around all calls of its function, or after an
    exception: `except KeyError` where RANK is read."""
    if any(_says_otherwise(script, parent, child) for child, parent in script.above(node)):
        return True
    function = script.function(node)
    callers = [] if function is None or function in seen else script.callers(function)
    return bool(callers) and all(is_otherwise(script, c.call, seen | {function}) for c in callers if function)


def _says_otherwise(script: Script, parent: ast.AST, child: ast.AST) -> bool:
    if isinstance(parent, ast.ExceptHandler):
        return True
    if not isinstance(parent, ast.If) or child is parent.test:
        return False
    holds = child in parent.body
    is_the_only_one = len(script.inits) < 2  # of two, the second is for where the first was not called
    one_process = means_one_process(parent.test, holds=holds, forming=is_the_only_one)
    return one_process or means_otherwise(script, parent.test, holds)


def means_otherwise(script: Script, test: ast.expr, holds: bool) -> bool:
    """True if a condition means, where it holds or where it does not, that there is no launcher, or that this is
    Windows."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return means_otherwise(script, test.operand, not holds)
    if isinstance(test, ast.BoolOp):
        said = [means_otherwise(script, value, holds) for value in test.values]
        return any(said) if isinstance(test.op, ast.And) == holds else all(said)
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return _compares(script, test, holds)
    if isinstance(test, ast.Name):
        origins = script.origins(test)
        only = origins[0] if len(origins) == 1 else test
        tests = [only] if isinstance(only, ast.Compare | ast.BoolOp | ast.UnaryOp) else []
        return any(means_otherwise(script, only, holds) for only in tests)
    return not holds and script.variable_read(test) in _SET_BY_THE_JOB


def _compares(script: Script, test: ast.Compare, holds: bool) -> bool:
    """`"RANK" not in os.environ`, `os.environ.get("RANK") is None`, `int(os.environ.get("RANK", -1)) == -1`."""
    operator, other = test.ops[0], test.comparators[0]
    if isinstance(operator, ast.In | ast.NotIn):
        asked = text_in(test.left) in _SET_BY_THE_JOB and script.full_name(other) == "os.environ"
        return asked and holds == isinstance(operator, ast.NotIn)
    if isinstance(operator, ast.Eq | ast.NotEq) and text_in(other) in _WINDOWS:
        return holds == isinstance(operator, ast.Eq)
    absent = (isinstance(other, ast.Constant) and other.value is None) or ast.unparse(other) == "-1"
    reads = any(script.variable_read(n) in _SET_BY_THE_JOB for n in ast.walk(test.left))
    equal = isinstance(operator, ast.Is | ast.Eq)
    return absent and reads and isinstance(operator, ast.Is | ast.IsNot | ast.Eq | ast.NotEq) and holds == equal
