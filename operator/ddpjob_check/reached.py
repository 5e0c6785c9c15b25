"""Find the lines that a run reaches, as far as the script's options decide this. An error of `check` refuses a run,
so it must be about a line that the run certainly executes."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

from ddpjob_check.nodes import (
    Function,
    before,
    ends_the_run,
    is_main_guard,
    leaves,
    means_one_process,
    name_of,
    text_in,
)
from ddpjob_check.options import UNKNOWN, ScriptOptions, literal
from ddpjob_check.rule import CheckedJob
from ddpjob_check.script import Script

_DEPTH_MAX = 3
_COMPARISONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Is: operator.eq, ast.IsNot: operator.ne, ast.Lt: operator.lt,
    ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip


class Paths:
    """The lines that may run. value: returns the value of an expression, or UNKNOWN."""

    def __init__(self, script: Script, value: Callable[[ast.expr], Any]) -> None:
        self._script, self._value = script, value

    def reaches(self, node: ast.AST, seen: frozenset[ast.AST] = frozenset()) -> bool:
        """True if a node may run, or if an error is raised in its place."""
        if self._ends_before(node):
            return True
        for child, parent in self._script.above(node):
            if isinstance(parent, ast.If) and child is not parent.test:
                holds = self.holds(parent.test)
                if holds is not None and holds != (child in parent.body):
                    return any(isinstance(s, ast.Raise) for s in (parent.body if holds else parent.orelse))
            for earlier in before(parent, child):
                if isinstance(earlier, ast.If) and leaves(earlier.body) and self.holds(earlier.test):
                    return False
        function = self._script.function(node)
        callers = [] if function is None or function in seen else self._script.callers(function)
        return not callers or any(self.reaches(c.call, seen | {function}) for c in callers if function)

    def _ends_before(self, node: ast.AST) -> bool:
        """True if the run ends before this node, as by `if args.launcher == "none": raise …`."""
        return any(
            isinstance(earlier, ast.If) and ends_the_run(earlier.body) and self.holds(earlier.test) is True
            for child, parent in self._script.above(node)
            for earlier in before(parent, child)
        )

    def holds(self, test: ast.expr, depth: int = 0) -> bool | None:
        """Return the value of a condition; None if the known values do not decide it."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self.holds(test.operand, depth)
            return None if inner is None else not inner
        if isinstance(test, ast.BoolOp):
            values, decisive = [self.holds(value, depth) for value in test.values], isinstance(test.op, ast.Or)
            return decisive if decisive in values else None if None in values else not decisive
        if isinstance(test, ast.Compare):
            return self._compares(test)
        known = self._value(test)
        if known is not UNKNOWN:
            return bool(known)
        origins = self._script.origins(test)
        if depth > _DEPTH_MAX or origins == [test]:
            return None
        results = {self.holds(o, depth + 1) if isinstance(o, ast.expr) else None for o in origins}
        return results.pop() if len(results) == 1 else None

    def _compares(self, test: ast.Compare) -> bool | None:
        compare = _COMPARISONS.get(type(test.ops[0]))
        left, right = self._value(test.left), literal(test.comparators[0])
        if len(test.ops) != 1 or compare is None or left is UNKNOWN or right is UNKNOWN:
            return None
        try:
            return bool(compare(left, right))
        except TypeError:
            return None


class Certainty:
    """The lines that some rank of the job certainly executes, unless another error ends it earlier."""

    def __init__(self, script: Script, job: CheckedJob) -> None:
        self._script, self._job = script, job
        self._skips: dict[ast.AST, bool] = {}
        self._paths = Paths(script, self._value)
        self._options = ScriptOptions(script, job.words)

    def _value(self, node: ast.expr) -> Any:
        if self._script.called(node) == "torch.cuda.is_available":
            return UNKNOWN if self._job.gpus is None else self._job.gpus > 0
        return self._options.value(node)

    def runs(self, node: ast.AST) -> bool:
        """True if this node certainly runs: the job meets all conditions that it depends on."""
        todo, seen = [node], set[Function]()
        while todo:
            place = todo.pop()
            if self._may_be_skipped(place):
                continue
            function = self._script.function(place)
            if function is None:
                return True
            if function not in seen:
                seen.add(function)
                todo += self._places_of(function)
        return False

    def _places_of(self, function: Function) -> Iterator[ast.AST]:
        """Yield places that call a function of the file, or pass it on: fire.Fire(main), Process(target=train)."""
        yield from (c.call for c in self._script.callers(function))
        owner = self._script.scope(function)
        names = {function.name}
        if isinstance(owner, ast.ClassDef) and (function.name.startswith("__") or owner.bases):
            names.add(owner.name)  # creating an instance may call the method
        yield from (n for name in names for n in self._uses.get(name, ()))

    @cached_property
    def _uses(self) -> dict[str, list[ast.AST]]:
        uses: dict[str, list[ast.AST]] = {}
        for node in self._script.nodes:
            if isinstance(self._script.parent(node), ast.ClassDef):
                continue  # being a base class runs no method
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
                uses.setdefault(name_of(node), []).append(node)
        return uses

    def _may_be_skipped(self, node: ast.AST) -> bool:
        if node not in self._skips:
            self._skips[node] = any(self._skips_below(parent, child) for child, parent in self._script.above(node))
        return self._skips[node]

    def _skips_below(self, parent: ast.AST, child: ast.AST) -> bool:
        if isinstance(parent, ast.If | ast.IfExp) and child is not parent.test:
            inside = parent.body if isinstance(parent, ast.If) else [parent.body]
            if not self._is_met(parent.test, child in inside):
                return True
        if isinstance(parent, ast.BoolOp) and child in parent.values:
            earlier = parent.values[: parent.values.index(child)]
            if not all(self._is_met(value, isinstance(parent.op, ast.And)) for value in earlier):
                return True
        if isinstance(parent, ast.match_case):
            match = self._script.parent(parent)
            return not (isinstance(match, ast.Match) and self._script.depends_on_rank(match.subject))
        if isinstance(parent, ast.ExceptHandler):
            return True
        if isinstance(parent, ast.Try) and child in parent.body and any(map(goes_on, parent.handlers)):
            return True
        return any(self._may_leave(statement) for statement in before(parent, child))

    def _may_leave(self, statement: ast.stmt) -> bool:
        """True for a statement such as `if args.evaluate: return`. A raise does not count: the run fails anyway."""
        if not isinstance(statement, ast.If) or not leaves(statement.body):
            return False
        return not isinstance(statement.body[-1], ast.Raise) and not self._is_met(statement.test, False)

    def _is_met(self, test: ast.expr, wanted: bool) -> bool:
        """True if a condition certainly has this value on at least one rank in at least one step."""
        known = self._paths.holds(test)
        if known is not None:
            return known == wanted
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self._is_met(test.operand, not wanted)
        if isinstance(test, ast.BoolOp):
            met = [self._is_met(value, wanted) for value in test.values]
            return all(met) if isinstance(test.op, ast.And) == wanted else any(met)
        if is_main_guard(test):
            return wanted
        if means_one_process(test, holds=not wanted) or means_otherwise(self._script, test, not wanted):
            return True
        if self._script.called(test) == "torch.cuda.is_available":
            return wanted  # code for GPUs is meant for jobs with GPUs
        return self._script.depends_on_rank(test) or self._counts(test)

    def _counts(self, test: ast.expr) -> bool:
        """True for `step % 100 == 0` if a loop changes the step."""
        names = [n for n in ast.walk(test) if isinstance(n, ast.Name)]
        return any(n.id in self._counters.get(self._script.scope(n), ()) for n in names)

    @cached_property
    def _counters(self) -> dict[ast.AST, set[str]]:
        counters: dict[ast.AST, set[str]] = {}
        for node in self._script.nodes:
            if not isinstance(node, ast.For | ast.AugAssign):
                continue
            target: ast.expr = node.target
            if isinstance(node, ast.For):
                iterates = name_of(node.iter.func) if isinstance(node.iter, ast.Call) else ""
                if iterates == "enumerate" and isinstance(target, ast.Tuple):
                    target = target.elts[0]
                elif iterates not in ("range", "trange", "tqdm", "count"):
                    continue
            if isinstance(target, ast.Name):
                counters.setdefault(self._script.scope(node), set()).add(target.id)
        return counters


def goes_on(handler: ast.ExceptHandler) -> bool:
    """True if a script may continue after an error: `except RuntimeError: init_process_group("gloo")`."""
    return not ends_the_run(handler.body) and (handler.type is None or name_of(handler.type) != "KeyboardInterrupt")


# Variables of a job. If code tests whether one of them is set, its branch for an unset variable never runs in a job.
_SET_BY_THE_JOB = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"}
_WINDOWS = ("win32", "nt", "Windows")


def is_otherwise(script: Script, node: ast.AST, seen: frozenset[Function] = frozenset()) -> bool:
    """True if a job never runs this node: a condition excludes the job from the node or from all calls of its
    function, or the node handles an exception, such as `except KeyError` if RANK is unset."""
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
    is_the_only_one = len(script.inits) < 2  # of two init calls, the second is for runs that skip the first
    one_process = means_one_process(parent.test, holds=holds, forming=is_the_only_one)
    return one_process or means_otherwise(script, parent.test, holds)


def means_otherwise(script: Script, test: ast.expr, holds: bool) -> bool:
    """True if a condition with this value means that there is no launcher, or that this is Windows."""
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
    """True for `"RANK" not in os.environ`, `os.environ.get("RANK") is None`, `os.environ.get("RANK", -1) == -1`."""
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
