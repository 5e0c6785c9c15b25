"""Facts about single nodes of a syntax tree, without the rest of the file."""

from __future__ import annotations

import ast
import enum
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeGuard

Function = ast.FunctionDef | ast.AsyncFunctionDef
Scope = Function | ast.Lambda | ast.ClassDef | ast.Module

_GROUP_WORDS = {"distributed", "ddp", "initialized", "multiprocessing"}
_NO_WORDS = {"no", "not", "non", "without", "disable", "disabled"}
_RANK_WORDS = {"rank", "rank0", "main", "master", "chief", "primary", "leader", "coordinator", "gpu"}


class Marker(enum.Enum):
    """Stands for a value that is not an expression in the file."""

    UNKNOWN = enum.auto()
    BROUGHT = enum.auto()
    """A value that an attribute may have had before this file set it, for example from argparse."""
    COUNT = enum.auto()
    """The variable of `for … in range(n)`."""
    INDEX = enum.auto()
    """The number of a process among those that this script starts, from 0, on this machine."""


Origin = ast.expr | Marker


def leaves(body: list[ast.stmt]) -> bool:
    """True if a block ends by return, raise, continue, break or sys.exit()."""
    last = body[-1] if body else None
    if isinstance(last, ast.Return | ast.Raise | ast.Continue | ast.Break):
        return True
    call = last.value if isinstance(last, ast.Expr) else None
    return isinstance(call, ast.Call) and dotted(call.func).rsplit(".", 1)[-1] in ("exit", "_exit", "quit")


def ends_the_run(body: list[ast.stmt]) -> bool:
    """True if a block ends by an error or sys.exit(), so that the job ends and no rank waits for this one."""
    return leaves(body) and not isinstance(body[-1], ast.Return | ast.Continue | ast.Break)


def is_main_guard(test: ast.expr) -> bool:
    """True for `if __name__ == "__main__":`"""
    return isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id == "__name__"


def means_one_process(test: ast.expr, *, holds: bool, forming: bool = False) -> bool:
    """True if a condition means that there is no process group: `not args.distributed`, `world_size == 1`, or a false
    `dist.is_initialized()`. holds: False if the condition is false. forming: the code forms the group, so `not
    dist.is_initialized()` only means that the group does not exist yet."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return means_one_process(test.operand, holds=not holds, forming=forming)
    if isinstance(test, ast.BoolOp):  # if `a and b` is true, both are true; if it is false, either may be false
        said = [means_one_process(value, holds=holds, forming=forming) for value in test.values]
        return any(said) if isinstance(test.op, ast.And) == holds else all(said)
    if isinstance(test, ast.Compare):
        return _is_count_of_one(test, holds)
    asked = test.func if isinstance(test, ast.Call) else test
    words = words_of(text_in(asked.slice) if isinstance(asked, ast.Subscript) else name_of(asked))
    available = dotted(asked).endswith(("dist.is_available", "distributed.is_available"))
    if forming and "initialized" in words:
        return False
    of_group = available or words & _GROUP_WORDS or words - {"is", "use"} == {"dist"}
    return bool(of_group) and holds != words.isdisjoint(_NO_WORDS)  # `args.no_ddp` is true for one process


def _is_count_of_one(test: ast.Compare, holds: bool) -> bool:
    """True if a condition means one process: `world_size == 1` that holds, or `world_size > 1` that does not hold."""
    number = test.comparators[0].value if isinstance(test.comparators[0], ast.Constant) else None
    names = (word for n in ast.walk(test.left) for word in words_of(name_of(n) or text_in(n)))
    if len(test.ops) != 1 or "world" not in names:
        return False
    to_one, to_two = (ast.Eq | ast.LtE, ast.Lt) if holds else (ast.NotEq | ast.Gt, ast.GtE)
    return isinstance(test.ops[0], to_one if number == 1 else to_two) and number in (1, 2)


def is_true(node: ast.AST | None) -> TypeGuard[ast.Constant]:
    """True for the literal True."""
    return isinstance(node, ast.Constant) and node.value is True


def is_method(node: ast.AST, name: str) -> bool:
    """True for a call `….name(…)` on any object."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name


def words_of(identifier: str) -> set[str]:
    """Return the words of a name, for example {local, rank} for local_rank and localRank."""
    return {w.lower() for w in re.findall(r"[A-Z]?[a-z]+\d*|[A-Z]+(?![a-z])|\d+", identifier)}


def is_named_like_a_rank(name: str) -> bool:
    """True for names such as local_rank, is_main_process and args.gpu."""
    return bool(name) and not words_of(name).isdisjoint(_RANK_WORDS)


def parts_of(expression: ast.AST, *, with_arguments: bool) -> Iterator[ast.AST]:
    """Yield the expression and all nodes in it. with_arguments=False: skip arguments of calls, except of int(), bool(),
    get() and getenv()."""
    todo = [expression]
    while todo:
        node = todo.pop()
        yield node
        if (
            isinstance(node, ast.Call)
            and not with_arguments
            and name_of(node.func) not in ("int", "bool", "get", "getenv")
        ):
            todo.append(node.func)
        else:
            todo += ast.iter_child_nodes(node)


def words_in(node: ast.AST) -> set[str]:
    """Return the words of all names in an expression."""
    return {word for n in ast.walk(node) for word in words_of(name_of(n))}


def unmoved(maker: object) -> object:
    """Return a model without its move to a device: `Net()` for `Net().to(rank)`."""
    while isinstance(maker, ast.Call) and isinstance(maker.func, ast.Attribute) and maker.func.attr in ("to", "cuda"):
        maker = maker.func.value
    return maker


def name_of(node: ast.AST) -> str:
    """Return a name, or the last name of an attribute; "" for anything else."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def parameters_of(function: Function | ast.Lambda) -> set[str]:
    """Return the names of all parameters."""
    args = function.args
    listed = (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg)
    return {p.arg for p in listed if p is not None}


def imports_in(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """Return {name in the file: full name} for all imports. If a name is imported twice, torch's import counts."""
    imported: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                name, full = (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0],) * 2
                imported[name] = full
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                name = alias.asname or alias.name
                if not imported.get(name, "").startswith("torch."):
                    imported[name] = f"{node.module}.{alias.name}"
    return imported


def aliases_in(nodes: Sequence[ast.AST], imported: Mapping[str, str]) -> dict[str, str]:
    """Return {alias: full name} for names that are bound once, to torch functions: `reduce = dist.all_reduce`."""
    bound = Counter(n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    bound.update(n.arg for n in nodes if isinstance(n, ast.arg))
    aliases: dict[str, str] = {}
    for node in nodes:
        target = name_of(node.targets[0]) if isinstance(node, ast.Assign) and len(node.targets) == 1 else ""
        first, dot, rest = dotted(node.value).partition(".") if isinstance(node, ast.Assign) else ("", "", "")
        full = imported.get(first, "") + dot + rest
        if bound[target] == 1 and dot and full.startswith("torch.distributed."):
            aliases[target] = full
    return aliases


def bindings_in(node: ast.AST) -> Iterator[tuple[ast.AST, Origin]]:
    """Yield target and value of each assignment that a statement makes."""
    if isinstance(node, ast.Assign):
        yield from ((target, node.value) for target in node.targets)
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        yield node.target, node.value
    elif isinstance(node, ast.AugAssign):
        left = ast.Name(node.target.id, ast.Load()) if isinstance(node.target, ast.Name) else node.target
        yield node.target, ast.copy_location(ast.BinOp(left, node.op, node.value), node)
    elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        yield node.target, Marker.COUNT if _counts_from_zero(node.iter) else Marker.UNKNOWN
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield node.optional_vars, node.context_expr


def targets_in(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield all targets of assignments in a statement, including targets in nested statements."""
    return (target for node in ast.walk(statement) for target, _ in bindings_in(node))


def fields_declared(owner: ast.ClassDef, name: str) -> list[Origin]:
    """Return [UNKNOWN] if the name is a dataclass field without a default, because the call gives its value."""
    fields = (s for s in owner.body if isinstance(s, ast.AnnAssign) and s.value is None)
    return [Marker.UNKNOWN for f in fields if name_of(f.target) == name]


def _counts_from_zero(iterated: ast.expr) -> bool:
    return (
        isinstance(iterated, ast.Call)
        and isinstance(iterated.func, ast.Name)
        and iterated.func.id == "range"
        and len(iterated.args) == 1
    )


def default_of(function: Function, position: int) -> ast.expr | None:
    """Return the default of the parameter at this position; None without a default."""
    count = len(function.args.posonlyargs) + len(function.args.args)
    from_end = position - count
    defaults = function.args.defaults
    return defaults[from_end] if -from_end <= len(defaults) else None


def is_outside_the_body(scope: Scope, child: ast.AST) -> bool:
    """True for decorators and bases, which are evaluated where the function or class is defined."""
    if isinstance(scope, ast.ClassDef):
        return child in scope.decorator_list or child in scope.bases or child in scope.keywords
    return isinstance(scope, Function) and (child in scope.decorator_list or child is scope.returns)


def before(parent: ast.AST, child: ast.AST) -> list[ast.stmt]:
    """Return the earlier statements of the same block."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(parent, name, None)
        if isinstance(block, list) and child in block:
            return block[: block.index(child)]
    return []


def has_hidden_arguments(call: ast.Call) -> bool:
    """True if * or ** may pass an argument that the file does not show."""
    return any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords)


def dotted(node: ast.AST) -> str:
    """Return a dotted name as written, such as `args.rank`; "" for any other expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def text_in(node: ast.AST) -> str:
    """Return the text of a constant; "" for anything else."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
