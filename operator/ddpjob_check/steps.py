"""The rule about loops with collectives, which all ranks must call equally often."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TypeAlias

from ddpjob_check.nodes import Function, bindings_in, dotted, is_method, leaves, name_of, words_of
from ddpjob_check.ranks import COLLECTIVES, at, guard, has_group, is_for_some, is_rank
from ddpjob_check.rule import CheckedJob, Found, rule
from ddpjob_check.script import DDP, Kind, Script

Loop: TypeAlias = ast.For | ast.AsyncFor | ast.While
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_RANKS = {Kind.GLOBAL, Kind.LOCAL, Kind.INDEX}
# torch's Join allows different numbers of steps per rank, and no_sync() skips collectives.
_ALLOWS_UNEVEN = ("join", "Join", "no_sync", "monitored_barrier")


@rule(
    "error",
    wrong="for step in range(20 if rank == 0 else 30):\n    dist.all_reduce(loss)",
    right="for step in range(20):\n    dist.all_reduce(loss)",
)
def uneven_steps(script: Script, job: CheckedJob) -> Iterator[Found]:
    """Each step of DDP and each collective waits for all ranks. If one rank makes fewer of them, the others wait for it
    until the timeout."""
    if job.has_one_rank:
        return
    for loop in (n for n in script.nodes if isinstance(n, _LOOPS)):
        steps = _steps(script, loop)
        if not steps or script.mentions(*_ALLOWS_UNEVEN):
            continue
        count = _count(loop)
        if count is not None and _range_varies(script, count) and not _others_join(script, loop, steps):
            yield at(
                loop,
                f"{_head(script, loop)}: the ranks run this loop different numbers of times, and "
                f"{script.text_of(steps[0].func)}(…) in it waits for all ranks; run the same number of steps on all",
            )
            continue
        for leaving in _leaves_on_some(script, loop, steps):
            yield at(
                leaving,
                f"if {script.text_of(leaving.test)}: only some ranks leave this loop here, and the others wait for "
                f"them in {script.text_of(steps[0].func)}(…); broadcast the decision, so that all ranks leave together",
            )
        yield from _leaves_by_itself(script, loop, steps)


def _steps(script: Script, loop: Loop) -> list[ast.Call]:
    """Return calls in a loop that wait for all ranks: collectives, DDP's backward(), and functions that call these."""
    calls = [n for s in loop.body for n in ast.walk(s) if isinstance(n, ast.Call)]
    function = script.function(loop)
    waiting = [c for c in calls if script.function(c) is function and _waits_for_all(script, c)]
    return sorted(waiting, key=lambda c: (c.lineno, c.col_offset))


def _waits_for_all(script: Script, call: ast.Call) -> bool:
    if _is_collective(script, call):
        return guard(script, call) is None
    defined = script.definition(call.func)
    if isinstance(defined, Function):
        return any(isinstance(n, ast.Call) and _is_collective(script, n) for n in ast.walk(defined))
    return is_method(call, "backward") and bool(script.calls_to(DDP)) and not script.uses_a_framework


def _is_collective(script: Script, call: ast.Call) -> bool:
    return script.called(call) in COLLECTIVES and not has_group(script, call)


def _count(loop: Loop) -> ast.expr | None:
    """Return the expression that decides the number of iterations: the call of range(), or the condition."""
    if isinstance(loop, ast.While):
        return loop.test if isinstance(loop.test, ast.Compare) else None
    counted: ast.expr = loop.iter
    while isinstance(counted, ast.Call) and name_of(counted.func) in ("enumerate", "tqdm", "trange", "islice", "zip"):
        if name_of(counted.func) == "trange":
            return counted
        ranges = [a for a in counted.args if isinstance(a, ast.Call) and name_of(a.func) == "range"]
        if name_of(counted.func) == "islice":
            return ast.Call(counted.func, counted.args[1:2], []) if len(counted.args) == 2 else None
        counted = (ranges or counted.args or [ast.Constant(None)])[0]
    return counted if isinstance(counted, ast.Call) and name_of(counted.func) == "range" else None


def _range_varies(script: Script, count: ast.expr) -> bool:
    if isinstance(count, ast.Compare):
        compares = not isinstance(count.ops[0], ast.In | ast.NotIn | ast.Is | ast.IsNot)
        return compares and sum(_varies(script, s) for s in count.comparators) == 1
    if not isinstance(count, ast.Call) or not 1 <= len(count.args) <= 2:
        return False  # range(rank, n, world_size) gives about the same number on all ranks
    return sum(_varies(script, a) for a in count.args) == 1


def _varies(script: Script, value: ast.expr, depth: int = 0) -> bool:
    """True if a number certainly differs by rank."""
    if depth > 6:
        return False
    if isinstance(value, ast.BinOp):
        sides = [_varies(script, side, depth + 1) for side in (value.left, value.right)]
        return isinstance(value.op, ast.Add | ast.Sub | ast.Mult | ast.Mod) and sum(sides) == 1
    if isinstance(value, ast.IfExp):
        return is_for_some(script, value.test) and ast.dump(value.body) != ast.dump(value.orelse)
    if isinstance(value, ast.Call):
        inner = name_of(value.func) in ("int", "round", "abs") and len(value.args) == 1
        return _is_certain_rank(script, value) or (inner and _varies(script, value.args[0], depth + 1))
    if isinstance(value, ast.Subscript):
        return _is_certain_rank(script, value) or _picks_by_rank(script, value, depth)
    return isinstance(value, ast.Name | ast.Attribute) and _name_varies(script, value, depth)


def _is_certain_rank(script: Script, value: ast.expr) -> bool:
    kinds = script.kinds(value)
    return bool(kinds) and kinds <= _RANKS


def _name_varies(script: Script, name: ast.Name | ast.Attribute, depth: int) -> bool:
    if _is_certain_rank(script, name):
        return True
    if _is_sent(script, name):
        return False
    origins = [o for o in script.origins(name) if isinstance(o, ast.expr)]
    if origins == [name] or not origins:
        return is_rank(script, name) and not _is_counted(script, name)
    if len(origins) == 1:
        return _varies(script, origins[0], depth + 1)
    decided = [o for o in origins if any(is_for_some(script, t) for t in script.enclosing_tests(o))]
    return bool(decided) and len({ast.dump(o) for o in origins}) > 1


def _is_sent(script: Script, name: ast.expr) -> bool:
    """True if a collective gets this number or may return it, because ranks may then have agreed on it."""
    text = dotted(name)
    given = (a for c in script.calls if script.called(c) in COLLECTIVES for a in c.args)
    may_agree = any(
        isinstance(o, ast.Call) and words_of(name_of(o.func)) & {"broadcast", "reduce", "sync", "gather"}
        for o in script.origins(name)
    )
    return may_agree or any(dotted(n) == text for a in given for n in ast.walk(a))


def _is_counted(script: Script, name: ast.expr) -> bool:
    """True for `for rank in range(world_size)`, in which each rank counts all ranks."""
    loops = [n.target for n in script.nodes if isinstance(n, ast.For | ast.AsyncFor | ast.comprehension)]
    return any(name_of(n) == name_of(name) for target in loops for n in ast.walk(target))


def _picks_by_rank(script: Script, value: ast.Subscript, depth: int) -> bool:
    """True for [20, 30][rank], whose value differs by rank."""
    if not _varies(script, value.slice, depth + 1):
        return False
    for container in script.origins(value.value):
        listed = container.values if isinstance(container, ast.Dict) else getattr(container, "elts", [])
        if len({ast.dump(e) for e in listed}) < 2:
            return False
    return True


def _others_join(script: Script, loop: Loop, steps: list[ast.Call]) -> bool:
    """True if a second loop balances the number of steps: range(rank), and then range(world_size - rank)."""
    names = {ast.dump(s.func) for s in steps}
    others = [n for n in script.nodes if isinstance(n, _LOOPS) and n is not loop]
    return any(
        script.function(n) is script.function(loop)
        and (count := _count(n)) is not None
        and _range_varies(script, count)
        and any(ast.dump(s.func) in names for s in _steps(script, n))
        for n in others
    )


def _leaves_on_some(script: Script, loop: Loop, steps: list[ast.Call]) -> Iterator[ast.If]:
    """Yield `if` statements directly in a loop by which only some ranks leave the loop."""
    for i, statement in enumerate(loop.body):
        if not isinstance(statement, ast.If) or statement.orelse or not is_for_some(script, statement.test):
            continue
        last = statement.body[-1]
        later = [s for s in loop.body[i + 1 :] if isinstance(s, ast.If) and leaves(s.body)]
        leaves_loop = isinstance(last, ast.Return | ast.Break)
        if leaves_loop and not later and not _joined_inside(script, statement, steps):
            yield statement


def _leaves_by_itself(script: Script, loop: Loop, steps: list[ast.Call]) -> Iterator[Found]:
    """Yield findings for loops that a rank leaves because of its own value, such as its loss or its clock."""
    values = LocalValues(script, script.function(loop))
    waits = f"the others wait for it in {script.text_of(steps[0].func)}(…)"
    fix = "average or broadcast it first, so that all ranks do the same"
    if isinstance(loop, ast.While) and values.decide(loop.test):
        test = script.text_of(loop.test)
        yield at(
            loop,
            f"while {test}: this value differs by rank, and if one leaves, {waits}; {fix}",
            "warning",
        )
    for branch in leavings(loop):
        if not values.decide(branch.test) or _joined_inside(script, branch, steps):
            continue
        skips = isinstance(branch.body[-1], ast.Continue)
        if not skips or any(step.lineno > branch.lineno for step in steps):
            leaves_it = "skips the rest of the turn" if skips else "leaves the loop"
            text = f"if {script.text_of(branch.test)}: this value differs by rank"
            yield at(branch, f"{text}, and if one {leaves_it}, {waits}; {fix}", "warning")


def _joined_inside(script: Script, statement: ast.If, steps: list[ast.Call]) -> bool:
    """True if the branch itself contains some of the steps that all ranks must make, which is a different mistake."""
    inside = {id(n) for n in ast.walk(statement)}
    return any(id(s) in inside for s in steps)


def _head(script: Script, loop: Loop) -> str:
    if isinstance(loop, ast.While):
        return f"while {script.text_of(loop.test)}"
    return f"for {script.text_of(loop.target)} in {script.text_of(loop.iter)}"


# ---------------------------------------------------------------- values that each rank computes for itself

# Functions with these names may combine the values of all ranks, so that all ranks decide equally.
_AGREES = {
    "agree", "agreed", "average", "averaged", "barrier", "broadcast", "bcast", "collect", "consensus", "dist",
    "distributed", "gather", "global", "gathered", "reduce", "reduced", "should", "sync", "synchronize",
}  # fmt: skip
_CLOCKS = {"time.time", "time.perf_counter", "time.monotonic", "time.process_time"}
_PASSES = 4


def names_of(node: ast.AST) -> set[str]:
    """Return the names and attributes in an expression, as written."""
    return {text for n in ast.walk(node) if isinstance(n, ast.Name | ast.Attribute) and (text := dotted(n))}


class LocalValues:
    """The names in a function whose values certainly differ by rank: the loss, the clock, and values made from them."""

    def __init__(self, script: Script, function: Function | None) -> None:
        self._script = script
        self._nodes = [n for n in ast.walk(function or script.tree) if script.function(n) is function]
        self._shared = self._sent()
        self.names = self._sources() - self._shared
        for _ in range(_PASSES):
            grown = self.names | (self._made_of() - self._shared)
            if grown == self.names:
                break
            self.names = grown

    def decide(self, test: ast.AST) -> bool:
        """True if an expression depends on a value that differs by rank, and no call in it may make the ranks agree."""
        if any(isinstance(n, ast.Call) and self._may_agree(n) for n in ast.walk(test)):
            return False
        return bool(self._names_in(test) & self.names) or self._reads_a_clock(test)

    def _names_in(self, value: ast.AST) -> set[str]:
        """Return names and attributes, and the objects of the attributes: stopper for stopper.early_stop."""
        names = names_of(value)
        return names | {name.rpartition(".")[0] for name in names if "." in name and not name.startswith("self.")}

    def _reads_a_clock(self, value: ast.AST) -> bool:
        return any(self._script.called(n) in _CLOCKS for n in ast.walk(value))

    def _may_agree(self, call: ast.Call) -> bool:
        name = self._script.called(call)
        if name in COLLECTIVES or not words_of(name_of(call.func)).isdisjoint(_AGREES):
            return True
        return any(
            self._script.called(inner) in COLLECTIVES
            for function in self._script.functions_called(call)
            for inner in self._script.calls_in(function)
        )

    def _sent(self) -> set[str]:
        """Return names passed to a collective, or to a function that may call one, because ranks may agree on them."""
        sent: set[str] = set()
        for node in self._nodes:
            if isinstance(node, ast.Call) and self._may_agree(node):
                for given in (*node.args, *(k.value for k in node.keywords), node.func):
                    sent |= self._names_in(given)
        return sent

    def _sources(self) -> set[str]:
        """Return names of losses (that have backward() called), of the wrapped model's results, and of clock times."""
        losses = {
            dotted(n.func.value)
            for n in self._nodes
            if isinstance(n, ast.Call) and is_method(n, "backward") and isinstance(n.func, ast.Attribute)
        }
        made = {
            name
            for node in self._nodes
            for target, value in bindings_in(node)
            if isinstance(value, ast.expr) and (self._reads_a_clock(value) or self._runs_the_model(value))
            for name in names_of(target)
        }
        return (losses | made) - {""}

    def _runs_the_model(self, call: ast.expr) -> bool:
        """True for a call of the wrapped model, or of a function that gets the model and calls no collective."""
        if not isinstance(call, ast.Call) or self._script.is_wrapped(call.func):
            return isinstance(call, ast.Call)
        gets_model = any(self._script.is_wrapped(a) for a in call.args if isinstance(a, ast.Name | ast.Attribute))
        functions = self._script.functions_called(call)
        parts = self._script.mentions("DistributedSampler")
        return gets_model and bool(functions) and parts and not self._may_agree(call)

    def _made_of(self) -> set[str]:
        """Return names whose value differs by rank: it is computed, set under a condition, or stored in an object."""
        made: set[str] = set()
        for node in self._nodes:
            for target, value in bindings_in(node):
                decided = any(self.decide(test) for test in self._script.enclosing_tests(node))
                if decided or (isinstance(value, ast.expr) and self.decide(value)):
                    made |= names_of(target)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                made |= self._kept_by(node.value)
        return made

    def _kept_by(self, call: ast.Call) -> set[str]:
        """Return the object that stores a value that differs by rank: stopper(loss), losses.append(loss)."""
        kept = dotted(call.func.value) if isinstance(call.func, ast.Attribute) else dotted(call.func)
        first = kept.partition(".")[0]
        is_object = bool(kept) and first not in self._script.imported and self._script.definition(call.func) is None
        given = (*call.args, *(k.value for k in call.keywords))
        return {kept} if is_object and not self._may_agree(call) and any(map(self.decide, given)) else set()


def leavings(loop: ast.For | ast.AsyncFor | ast.While) -> Iterator[ast.If]:
    """Yield `if` statements of a loop, but not of inner loops, that end with break, return or continue."""
    todo: list[ast.stmt] = list(loop.body)
    while todo:
        statement = todo.pop(0)
        if isinstance(statement, ast.If):
            if statement.body and isinstance(statement.body[-1], ast.Break | ast.Return | ast.Continue):
                yield statement
            todo += [*statement.body, *statement.orelse]
        elif isinstance(statement, ast.With | ast.AsyncWith | ast.Try):
            todo += statement.body
