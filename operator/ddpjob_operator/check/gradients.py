"""Gradients that a script averages by itself, parameter by parameter."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpjob_operator.check.nodes import Function, leaves, name_of
from ddpjob_operator.check.ranks import COLLECTIVES, at
from ddpjob_operator.check.rule import Found, Job, rule
from ddpjob_operator.check.script import Script


@rule(
    "error",
    wrong="for param in model.parameters():\n    if type(param) is torch.Tensor:\n        dist.all_reduce(param.grad)",
    right="for param in model.parameters():\n    dist.all_reduce(param.grad)",
)
def gradients_not_averaged(script: Script, job: Job) -> Iterator[Found]:
    """model.parameters() yields torch.nn.Parameter, so `type(param) is torch.Tensor` is never true: no gradient is
    averaged, every rank trains a model of its own, and no error is raised."""
    if job.has_one_rank or not any(script.called(c) in COLLECTIVES for c in script.calls):
        return
    for node in script.nodes:
        if isinstance(node, ast.If) and _averages_nothing(script, node):
            yield at(node.test, _message(script, node.test))
        elif isinstance(node, ast.comprehension):
            yield from (at(test, _message(script, test)) for test in node.ifs if _is_never(script, test))


def _message(script: Script, test: ast.expr) -> str:
    return (
        f"{script.text_of(test)}: parameters() yields torch.nn.Parameter, so this test has the same result for all "
        "of them, and no gradient is averaged; remove the test, or use isinstance(…, torch.Tensor)"
    )


def _averages_nothing(script: Script, node: ast.If) -> bool:
    if _is_never(script, node.test):
        return _has_collective(script, node.body) and not _has_collective(script, node.orelse)
    if not (_is_always(script, node.test) and leaves(node.body)):
        return False
    block = getattr(script.parent(node), "body", [])
    return node in block and _has_collective(script, block[block.index(node) + 1 :])


def _has_collective(script: Script, body: list[ast.stmt]) -> bool:
    calls = [n for s in body for n in ast.walk(s) if isinstance(n, ast.Call)]
    return any(script.called(c) in COLLECTIVES or isinstance(script.definition(c.func), Function) for c in calls)


def _is_never(script: Script, test: ast.expr) -> bool:
    if isinstance(test, ast.BoolOp):
        return isinstance(test.op, ast.And) and any(_is_never(script, v) for v in test.values)
    if isinstance(test, ast.UnaryOp):
        return isinstance(test.op, ast.Not) and _is_always(script, test.operand)
    return _compares_type(script, test, ast.Is | ast.Eq | ast.In)


def _is_always(script: Script, test: ast.expr) -> bool:
    if isinstance(test, ast.BoolOp):
        return isinstance(test.op, ast.Or) and any(_is_always(script, v) for v in test.values)
    if isinstance(test, ast.UnaryOp):
        return isinstance(test.op, ast.Not) and _is_never(script, test.operand)
    return _compares_type(script, test, ast.IsNot | ast.NotEq | ast.NotIn)


def _compares_type(script: Script, test: ast.expr, operators: object) -> bool:
    """Whether the type of a parameter is compared, by one of these operators, with types that no parameter has."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], operators):  # type: ignore[arg-type]
        return False
    for one, other in ((test.left, test.comparators[0]), (test.comparators[0], test.left)):
        typed = _typed(script, one)
        if typed is not None and _is_parameter(script, typed):
            kinds = other.elts if isinstance(other, ast.Tuple | ast.List | ast.Set) else [other]
            return all(_is_other_type(script, k) for k in kinds)
    return False


def _typed(script: Script, node: ast.expr) -> ast.Name | None:
    """p for type(p), p.__class__ and type(p).__name__."""
    for origin in script.origins(node):
        value = origin
        if isinstance(value, ast.Attribute) and value.attr in ("__name__", "__qualname__"):
            value = value.value
        if isinstance(value, ast.Call) and name_of(value.func) == "type" and len(value.args) == 1:
            value = value.args[0]
        elif isinstance(value, ast.Attribute) and value.attr == "__class__":
            value = value.value
        else:
            return None
        return value if isinstance(value, ast.Name) else None
    return None


def _is_other_type(script: Script, node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return node.value in ("Tensor", "Variable", "FloatTensor")
    name = script.full_name(node)
    return name.startswith("torch.") and name.endswith(("Tensor", "Variable"))


def _is_parameter(script: Script, name: ast.Name) -> bool:
    """Whether a name is the variable of a loop over parameters()."""
    child: ast.AST = name
    while (parent := script.parent(child)) is not None and not isinstance(parent, Function):
        generators = getattr(parent, "generators", [])
        loops = [parent] if isinstance(parent, ast.For | ast.comprehension) else generators
        if any(_binds(loop.target, name.id) and _gives_parameters(script, loop.iter) for loop in loops):
            return True
        child = parent
    return False


def _binds(target: ast.expr, name: str) -> bool:
    """The variable itself, or the last of `name, param` and `i, param`."""
    last = target.elts[-1] if isinstance(target, ast.Tuple | ast.List) and target.elts else target
    return name_of(last) == name


def _gives_parameters(script: Script, iterated: ast.expr, depth: int = 0) -> bool:
    if depth > 6:
        return False
    for origin in script.origins(iterated):
        if isinstance(origin, ast.Call) and name_of(origin.func) in (
            "list",
            "enumerate",
            "reversed",
            "sorted",
            "tuple",
        ):
            return bool(origin.args) and _gives_parameters(script, origin.args[0], depth + 1)
        if isinstance(origin, ast.Call) and name_of(origin.func) == "filter" and len(origin.args) == 2:
            return _gives_parameters(script, origin.args[1], depth + 1)
        if isinstance(origin, ast.Subscript):
            return isinstance(origin.slice, ast.Constant) and origin.slice.value == "params"
        return isinstance(origin, ast.Call) and name_of(origin.func) in ("parameters", "named_parameters")
    return False
