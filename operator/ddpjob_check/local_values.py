"""Values that each rank computes from its own samples, or reads from its own clock, and decides by."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpjob_check.nodes import Function, bindings_in, dotted, is_method, name_of, words_of
from ddpjob_check.ranks import COLLECTIVES
from ddpjob_check.script import Script

# A call that is named so may make one value of those of all ranks.
_AGREES = {
    "agree", "agreed", "average", "averaged", "barrier", "broadcast", "bcast", "collect", "consensus", "dist",
    "distributed", "gather", "global", "gathered", "reduce", "reduced", "should", "sync", "synchronize",
}  # fmt: skip
_CLOCKS = {"time.time", "time.perf_counter", "time.monotonic", "time.process_time"}
_PASSES = 4


def names_of(node: ast.AST) -> set[str]:
    """The names and attributes in an expression, as they stand there."""
    return {text for n in ast.walk(node) if isinstance(n, ast.Name | ast.Attribute) and (text := dotted(n))}


class LocalValues:
    """The names in a function whose values certainly differ by rank: the loss of its batch, and what is made of it."""

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

    def decide(self, test: ast.expr) -> bool:
        """True if a condition depends on such a value, and nothing in it may have been agreed upon."""
        return self._is_local(test)

    def _is_local(self, value: ast.AST) -> bool:
        if any(isinstance(n, ast.Call) and self._may_agree(n) for n in ast.walk(value)):
            return False
        return bool(self._names_in(value) & self.names) or self._reads_a_clock(value)

    def _names_in(self, value: ast.AST) -> set[str]:
        """Names, and what the attributes of an object tell: stopper.early_stop of stopper."""
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
        """The names that a collective, or a function that may hold one, gets: all ranks may have the same there."""
        sent: set[str] = set()
        for node in self._nodes:
            if isinstance(node, ast.Call) and self._may_agree(node):
                for given in (*node.args, *(k.value for k in node.keywords), node.func):
                    sent |= self._names_in(given)
        return sent

    def _sources(self) -> set[str]:
        """The losses on which backward() is called, and what the wrapped model gives."""
        losses = {
            dotted(n.func.value)
            for n in self._nodes
            if isinstance(n, ast.Call) and is_method(n, "backward") and isinstance(n.func, ast.Attribute)
        }
        outputs = {
            name
            for node in self._nodes
            for target, value in bindings_in(node)
            if isinstance(value, ast.Call) and (self._script.is_wrapped(value.func) or self._evaluates(value))
            for name in names_of(target)
        }
        clocks = {
            name
            for node in self._nodes
            for target, value in bindings_in(node)
            if isinstance(value, ast.expr) and self._reads_a_clock(value)
            for name in names_of(target)
        }
        return (losses | outputs | clocks) - {""}

    def _evaluates(self, call: ast.Call) -> bool:
        """True for a function of the file that runs the wrapped model on this rank's part of the samples, and sends
        nothing."""
        gets_model = any(self._script.is_wrapped(a) for a in call.args if isinstance(a, ast.Name | ast.Attribute))
        functions = self._script.functions_called(call)
        parts = self._script.mentions("DistributedSampler")
        return gets_model and bool(functions) and parts and not self._may_agree(call)

    def _made_of(self) -> set[str]:
        """The names that get a value of such names, or get theirs under a condition with one, or keep one."""
        made: set[str] = set()
        for node in self._nodes:
            for target, value in bindings_in(node):
                decided = any(self._is_local(test) for test in self._script.enclosing_tests(node))
                if decided or (isinstance(value, ast.expr) and self._is_local(value)):
                    made |= names_of(target)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                made |= self._kept_by(node.value)
        return made

    def _kept_by(self, call: ast.Call) -> set[str]:
        """The object that a statement gives such a value to: stopper(loss), losses.append(loss)."""
        kept = dotted(call.func.value) if isinstance(call.func, ast.Attribute) else dotted(call.func)
        first = kept.partition(".")[0]
        is_object = bool(kept) and first not in self._script.imported and self._script.definition(call.func) is None
        given = (*call.args, *(k.value for k in call.keywords))
        return {kept} if is_object and not self._may_agree(call) and any(map(self._is_local, given)) else set()


def leavings(loop: ast.For | ast.AsyncFor | ast.While) -> Iterator[ast.If]:
    """The ifs of a loop, not of a loop in it, whose branch leaves it, or leaves out the rest of this turn."""
    todo: list[ast.stmt] = list(loop.body)
    while todo:
        statement = todo.pop(0)
        if isinstance(statement, ast.If):
            if statement.body and isinstance(statement.body[-1], ast.Break | ast.Return | ast.Continue):
                yield statement
            todo += [*statement.body, *statement.orelse]
        elif isinstance(statement, ast.With | ast.AsyncWith | ast.Try):
            todo += statement.body
