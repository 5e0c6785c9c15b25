"""Find lines that may change values invisibly: exec, globals(), a star import, setattr. After such a line an earlier
value is uncertain, so no rule may rely on it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator

from ddpjob_check.nodes import Function, dotted, name_of

EVERYWHERE = 10**9
"""Line number for code in a function, because it may run at any time."""
_NAMESPACES = ("globals", "vars", "locals")
# Functions that only read a namespace that is passed to them, so no name changes.
_READERS = {"dict", "list", "sorted", "set", "tuple", "len", "print", "str", "repr", "bool", "any", "all"}
_READING = {"items", "keys", "values", "get", "copy"}
_CHANGING = {"update", "setdefault", "clear", "pop", "popitem", "insert", "sort", "reverse", "extend"}
_MERGES = ("update", "merge", "load", "from_", "parse", "read", "override")


def rebound_until(nodes: Iterable[ast.AST], parent: Callable[[ast.AST], ast.AST | None]) -> int:
    """Return the last line that may rebind any name that the script uses; 0 if there is none."""
    return max((_line(n, parent) for n in nodes if _rebinds(n, parent)), default=0)


def changed_objects(nodes: Iterable[ast.AST]) -> set[str]:
    """Return names, as written, of objects whose attributes may be set without `name.attribute = …`."""
    return {name for n in nodes for name in _changed(n) if name}


def changed_containers(nodes: Iterable[ast.AST]) -> set[str]:
    """Return names of dicts and lists that are changed after they were made: items are set, or methods change them."""
    items = (n.value for n in nodes if isinstance(n, ast.Subscript) and not isinstance(n.ctx, ast.Load))
    calls = (n.func for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute))
    changed = (f.value for f in calls if isinstance(f, ast.Attribute) and f.attr in _CHANGING)
    return {name for n in (*items, *changed) if (name := dotted(n))}


def _line(node: ast.AST, parent: Callable[[ast.AST], ast.AST | None]) -> int:
    above: ast.AST | None = node
    while above is not None:
        if isinstance(above, Function | ast.Lambda):
            return EVERYWHERE
        above = parent(above)
    return getattr(node, "lineno", EVERYWHERE)


def _rebinds(node: ast.AST, parent: Callable[[ast.AST], ast.AST | None]) -> bool:
    if isinstance(node, ast.ImportFrom):
        return any(alias.name == "*" for alias in node.names)
    if isinstance(node, ast.Attribute):
        return dotted(node) == "sys.modules" and not isinstance(parent(node), ast.Compare)
    return isinstance(node, ast.Call) and (_executes(node) or _gives_away_names(node, parent))


def _executes(call: ast.Call) -> bool:
    name = dotted(call.func).removeprefix("builtins.")
    if name == "eval":  # eval runs an expression, which assigns no name
        return bool(call.args) and isinstance(call.args[0], ast.Call)
    own_names = len(call.args) > 1 and isinstance(call.args[1], ast.Dict)
    return name in ("exec", "execfile") and not own_names


def _gives_away_names(call: ast.Call, parent: Callable[[ast.AST], ast.AST | None]) -> bool:
    """True for globals() unless it is only read. In a function, locals() and vars() return copies and do not count."""
    name = name_of(call.func)
    if name not in _NAMESPACES or call.args or isinstance(call.func, ast.Attribute):
        return False
    if name != "globals" and _line(call, parent) == EVERYWHERE:
        return False
    return not _is_read(call, parent(call))


def _is_read(call: ast.Call, above: ast.AST | None) -> bool:
    if isinstance(above, ast.Subscript):
        return isinstance(above.ctx, ast.Load)
    if isinstance(above, ast.Attribute):
        return above.attr in _READING
    if isinstance(above, ast.Call):
        return name_of(above.func) in _READERS
    # `**globals()` passes a copy.
    return isinstance(above, ast.Compare | ast.comprehension | ast.For | ast.FormattedValue | ast.keyword)


def _changed(node: ast.AST) -> Iterator[str]:
    """Yield `args` for setattr(args, …), vars(args).update(…), args.__dict__[…] = … and parse_args(namespace=args)."""
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        yield _object_of(node.value)
    elif isinstance(node, ast.Call):
        if name_of(node.func) == "setattr" and node.args:
            yield dotted(node.args[0])
        elif isinstance(node.func, ast.Attribute) and node.func.attr.startswith(_MERGES):
            yield _object_of(node.func.value) or dotted(node.func.value)
        yield from (dotted(k.value) for k in node.keywords if k.arg == "namespace")
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Attribute) and target.attr == "__dict__":
                yield dotted(target.value)
    elif isinstance(node, ast.AugAssign):
        yield _object_of(node.target)


def _object_of(namespace: ast.AST) -> str:
    """Return the object of a namespace: `args` for vars(args) and args.__dict__; "" for any other expression."""
    if isinstance(namespace, ast.Call) and name_of(namespace.func) == "vars" and namespace.args:
        return dotted(namespace.args[0])
    if isinstance(namespace, ast.Attribute) and namespace.attr == "__dict__":
        return dotted(namespace.value)
    return ""
