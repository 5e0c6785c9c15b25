"""Resolve names, calls and values of a Python file: the origins of a value, and which function calls which. If a value
is uncertain, the result is Marker.UNKNOWN, never a guess. Nothing is imported or run."""

from __future__ import annotations

import ast
import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from ddpjob_check.nodes import (
    Function,
    Marker,
    Origin,
    Scope,
    aliases_in,
    bindings_in,
    default_of,
    dotted,
    fields_declared,
    has_hidden_arguments,
    imports_in,
    is_method,
    is_outside_the_body,
    leaves,
    name_of,
    parameters_of,
    targets_in,
)
from ddpjob_check.parsing import parse
from ddpjob_check.rebinding import changed_containers, changed_objects, rebound_until

# The parser uses a single object for each of these types, so they have no single parent and are left out.
_SHARED = ast.expr_context | ast.operator | ast.boolop | ast.unaryop | ast.cmpop
_VALUES_MAX = 100  # values of one name; beyond this the result is UNKNOWN
_STEPS_MAX = 1000  # steps from a value to its origin; beyond this the origin is UNKNOWN

STARTERS = {"torch.multiprocessing.spawn", "torch.multiprocessing.start_processes"}
_ALIASES = {
    "torch.distributed.distributed_c10d.": "torch.distributed.",
    "torch.nn.parallel.distributed.": "torch.nn.parallel.",
    "torch.multiprocessing.spawn.": "torch.multiprocessing.",
    "torch.utils.data.dataloader.": "torch.utils.data.",
    "torch.utils.data.distributed.": "torch.utils.data.",
    "ddpjob.init.": "ddpjob.",
}


# Decorators that do not change the arguments that the function gets.
_KEEP_ARGUMENTS = {
    "record", "no_grad", "inference_mode", "enable_grad", "autocast", "compile", "property", "staticmethod",
    "classmethod", "cache", "lru_cache", "contextmanager", "wraps", "setter", "abstractmethod", "override",
}  # fmt: skip


@dataclass(frozen=True)
class Caller:
    """One call of a function of the file, with the values of positional and named parameters."""

    call: ast.Call
    positional: tuple[Origin, ...]
    named: dict[str, ast.expr] = field(default_factory=dict)
    starts_process: bool = False
    all_known: bool = True
    """False if the call has * or **, so that other parameters may have any value."""


class Values:
    """A parsed file. Raise SyntaxError (with the line), ValueError, RecursionError or TooLongError."""

    def __init__(self, text: str) -> None:
        self.tree = parse(text)
        self._parent: dict[ast.AST, ast.AST] = {}
        self.nodes: list[ast.AST] = [self.tree]
        for node in self.nodes:  # the list grows during the loop
            children = [child for child in ast.iter_child_nodes(node) if not isinstance(child, _SHARED)]
            self.nodes += children
            self._parent.update(dict.fromkeys(children, node))
        self.imported = imports_in(self.nodes)
        self.imported |= aliases_in(self.nodes, self.imported)
        self._defs: dict[tuple[Scope, str], Function | ast.ClassDef] = {}
        self._methods: dict[str, list[Function]] = defaultdict(list)
        self._names: dict[tuple[Scope, str], list[Origin]] = defaultdict(list)
        self._attributes: dict[tuple[ast.ClassDef | None, str], list[Origin]] = defaultdict(list)
        self._callers: dict[Function, list[Caller]] = defaultdict(list)
        self._globals = {(self.scope(n), name) for n in self.nodes if isinstance(n, ast.Global) for name in n.names}
        self._rebound_until = rebound_until(self.nodes, self.parent)
        self._changed = changed_objects(self.nodes)
        self.containers_changed = self._changed | changed_containers(self.nodes)
        """Names of objects, dicts and lists that may be changed after they were made."""
        self._origins: dict[ast.expr | None, list[Origin]] = {}
        self._is_complete = False
        self._note_definitions()
        for node in self.nodes:
            for target, value in bindings_in(node):
                self._note(target, value, node)
        self._note_callers()
        self._is_complete = True  # results are cached from here on

    # ---------------------------------------------------------------- shape

    def parent(self, node: ast.AST) -> ast.AST | None:
        """Return the node that contains this one."""
        return self._parent.get(node)

    def above(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Yield (child, parent) from this node up to its function, or to the module."""
        while (parent := self._parent.get(node)) is not None and not isinstance(node, Function):
            yield node, parent
            node = parent

    def scope(self, node: ast.AST) -> Scope:
        """Return the innermost function, class or module in which this node's names are looked up."""
        child, parent = node, self._parent.get(node)
        while parent is not None:
            if isinstance(parent, Function | ast.Lambda | ast.ClassDef) and not is_outside_the_body(parent, child):
                return parent
            child, parent = parent, self._parent.get(parent)
        return self.tree

    def function(self, node: ast.AST) -> Function | None:
        """Return the function that contains this node; None for code of the module itself."""
        scope: ast.AST | None = self.scope(node)
        while scope is not None and not isinstance(scope, Function):
            scope = None if isinstance(scope, ast.Module | ast.ClassDef) else self.scope(scope)
        return scope

    def text_of(self, node: ast.AST) -> str:
        """Return the node as one short line of Python, for a message."""
        words = " ".join(ast.unparse(node).split())
        return words if len(words) <= 60 else words[:57] + "…"

    # ---------------------------------------------------------------- names and calls

    def full_name(self, node: ast.AST) -> str:
        """Return torch.distributed.get_rank for `dist.get_rank`; "" if it is not a dotted name."""
        first, dot, rest = dotted(node).partition(".")
        name = self.imported.get(first, first) + dot + rest
        return next((new + name.removeprefix(old) for old, new in _ALIASES.items() if name.startswith(old)), name)

    def called(self, node: object) -> str:
        """Return the full name of a called function; "" if it is not a call."""
        return self.full_name(node.func) if isinstance(node, ast.Call) else ""

    @cached_property
    def calls(self) -> list[ast.Call]:
        """Return all calls, in the order of the file."""
        return sorted((n for n in self.nodes if isinstance(n, ast.Call)), key=lambda n: (n.lineno, n.col_offset))

    @cached_property
    def _calls_by_name(self) -> dict[str, list[ast.Call]]:
        by_name: dict[str, list[ast.Call]] = defaultdict(list)
        for call in self.calls:
            by_name[self.called(call)].append(call)
        return by_name

    def calls_to(self, *names: str) -> list[ast.Call]:
        """Return all calls of these full names."""
        return sorted(
            (c for n in names for c in self._calls_by_name.get(n, ())), key=lambda n: (n.lineno, n.col_offset)
        )

    def methods_called(self, name: str) -> list[ast.Call]:
        """Return all calls `….name(…)` on any object."""
        return [c for c in self.calls if is_method(c, name)]

    def calls_in(self, function: Function | None) -> list[ast.Call]:
        """Return the calls in a function's own body. function: None for calls outside all functions."""
        return self._calls_by_function[function]

    @cached_property
    def _calls_by_function(self) -> dict[Function | None, list[ast.Call]]:
        by_function: dict[Function | None, list[ast.Call]] = defaultdict(list)
        for call in self.calls:
            by_function[self.function(call)].append(call)
        return by_function

    def methods_named(self, name: str) -> list[Function]:
        """Return the methods of this file's classes with this name, or with the last part of a dotted one."""
        return self._methods.get(name.rpartition(".")[2], [])

    def definition(self, node: ast.AST) -> Function | ast.ClassDef | None:
        """Return the function or class of this file that a name refers to."""
        if not isinstance(node, ast.Name):
            return None
        return next((d for s in self._scopes(node) if (d := self._defs.get((s, node.id))) is not None), None)

    def functions_meant(self, node: ast.AST) -> list[Function]:
        """Return functions of this file that an expression may refer to, also through a parameter: `fn(rank, size)`."""
        origins = self.origins(node) if isinstance(node, ast.expr) else []
        return [d for o in origins if isinstance(o, ast.Name) and isinstance(d := self.definition(o), Function)]

    def functions_called(self, call: ast.Call) -> list[Function]:
        """Return functions of this file that a call certainly runs: by name, as a method of an instance made
        here, or by functools.partial."""
        if named := [function for function, _ in self._called_here(call)]:
            return named
        only = origins[0] if len(origins := self.origins(call.func)) == 1 else None
        if self.called(only) == "functools.partial" and isinstance(only, ast.Call) and only.args:
            only = only.args[0]
        meant = self.definition(only) if isinstance(only, ast.Name) else None
        return [meant] if isinstance(meant, Function) else []

    def callers(self, function: Function) -> list[Caller]:
        """Return the places where this file calls a function, or starts a process with it."""
        return self._callers.get(function, [])

    def mentions(self, *identifiers: str) -> bool:
        """True if one of these is used anywhere as a name, an attribute or a keyword. A mere import does not count."""
        return not self.identifiers.isdisjoint(identifiers)

    @cached_property
    def identifiers(self) -> set[str]:
        identifiers = set()
        for node in self.nodes:
            if isinstance(node, ast.Name):
                identifiers.add(node.id)
            elif isinstance(node, ast.Attribute):
                identifiers.add(node.attr)
            elif isinstance(node, ast.keyword) and node.arg:
                identifiers.add(node.arg)
        return identifiers

    # ---------------------------------------------------------------- values

    def argument(self, call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
        """Return an argument of a call, found by name or position; None if the call does not pass the argument."""
        for keyword in call.keywords:
            if keyword.arg == name:
                return keyword.value
            if keyword.arg is None and (value := self._item(keyword.value, name)) is not None:
                return value
        if position is None or any(isinstance(a, ast.Starred) for a in call.args[: position + 1]):
            return None
        return call.args[position] if position < len(call.args) else None

    def passed(self, call: ast.Call, function: Function, name: str) -> ast.expr | None:
        """Return the argument that a call passes for a parameter of a function of this file; None if it passes none."""
        names = [p.arg for p in (*function.args.posonlyargs, *function.args.args)]
        is_bound = isinstance(call.func, ast.Attribute) and names[:1] in (["self"], ["cls"])
        return self.argument(call, name, names.index(name) - is_bound if name in names else None)

    def _item(self, mapping: ast.expr, name: str) -> ast.expr | None:
        """Return the item with this name in `**mapping`, if the dict is a literal that is never changed."""
        if not self._is_complete or dotted(mapping) in self.containers_changed:
            return None
        origins = self.origins(mapping)
        only = origins[0] if len(origins) == 1 else None
        if isinstance(only, ast.Call) and self.called(only) == "dict" and not only.args:
            return next((k.value for k in only.keywords if k.arg == name), None)
        if isinstance(only, ast.Dict):
            items = zip(only.keys, only.values, strict=True)
            return next((v for k, v in items if isinstance(k, ast.Constant) and k.value == name), None)
        return None

    def origins(self, expression: ast.expr | None) -> list[Origin]:
        """Return all values that an expression may have, followed through names, attributes and parameters of this
        file. Never empty: an unresolved name is returned itself."""
        if not self._is_complete:
            return self._find_origins(expression)
        if expression not in self._origins:
            self._origins[expression] = self._find_origins(expression)
        return self._origins[expression]

    def _find_origins(self, expression: ast.expr | None) -> list[Origin]:
        ends: list[Origin] = []
        todo: list[Origin] = [] if expression is None else [expression]
        seen: set[Origin] = set()
        while todo:
            origin = todo.pop()
            if origin in seen:
                continue
            seen.add(origin)
            values = self._values(origin)
            if values is not None and (len(values) > _VALUES_MAX or len(seen) > _STEPS_MAX):
                return [Marker.UNKNOWN]
            if values is None:
                ends.append(origin)
            else:
                todo += values
        return ends or [Marker.UNKNOWN]

    def texts(self, expression: ast.expr | None) -> list[str]:
        """Return the texts that an expression may be; none if one of its origins is not a plain text."""
        origins = self.origins(expression)
        texts = [o.value for o in origins if isinstance(o, ast.Constant) and isinstance(o.value, str)]
        return texts if len(texts) == len(origins) else []

    def results(self, call: ast.Call) -> list[ast.expr]:
        """Return what a function of this file returns; nothing if that is uncertain."""
        function = self.definition(call.func)
        if not isinstance(function, ast.FunctionDef) or function.decorator_list:
            return []
        own = [n for n in ast.walk(function) if self.function(n) is function]
        returns = [n.value for n in own if isinstance(n, ast.Return)]
        # A function without a final `return` may also return None.
        if any(isinstance(n, ast.Yield | ast.YieldFrom) for n in own) or not isinstance(function.body[-1], ast.Return):
            return []
        return [r for r in returns if r is not None] if None not in returns else []

    # ---------------------------------------------------------------- how values are found

    def _scopes(self, node: ast.AST) -> Iterator[Scope]:
        """Yield the scopes in which a name is looked up, the closest first; methods do not see their class's scope."""
        first = scope = self.scope(node)
        yield first
        while not isinstance(scope, ast.Module):
            scope = self.scope(scope)
            if not isinstance(scope, ast.ClassDef):
                yield scope

    def _values(self, origin: Origin) -> list[Origin] | None:
        """Return the values that a value comes from directly; None if the value is an origin itself."""
        if isinstance(origin, ast.Name):
            return self._values_of_name(origin)
        if isinstance(origin, ast.Attribute):
            return self._values_of_attribute(origin)
        if isinstance(origin, ast.IfExp):
            return [origin.body, origin.orelse]
        if isinstance(origin, ast.BoolOp) and isinstance(origin.op, ast.Or):
            return list(origin.values)
        return [origin.value] if isinstance(origin, ast.NamedExpr) else None

    def _values_of_name(self, name: ast.Name) -> list[Origin] | None:
        for scope in self._scopes(name):
            where: Scope = self.tree if (scope, name.id) in self._globals else scope
            values = self._names.get((where, name.id), [])
            if len(values) > _VALUES_MAX:
                return [Marker.UNKNOWN]
            is_parameter = (
                where is scope and isinstance(scope, Function | ast.Lambda) and name.id in parameters_of(scope)
            )
            if is_parameter:
                given = self._values_of_parameter(scope, name.id)
                return [*values, *given] if values or given != [Marker.UNKNOWN] else None
            if values:
                return [*values, *self._rebound(values if isinstance(where, ast.Module) else [])]
            if (where, name.id) in self._defs:
                return None
        return None

    def _values_of_parameter(self, scope: Scope, name: str) -> list[Origin]:
        """Return the values that all callers in this file pass for a parameter."""
        if not isinstance(scope, Function) or not 0 < len(self._callers.get(scope, ())) <= _VALUES_MAX:
            return [Marker.UNKNOWN]
        names = [name_of(d.func if isinstance(d, ast.Call) else d) for d in scope.decorator_list]
        if not _KEEP_ARGUMENTS.issuperset(names):
            return [Marker.UNKNOWN]  # for example, click, typer and hydra pass values of the command line
        positions = {p.arg: i for i, p in enumerate((*scope.args.posonlyargs, *scope.args.args))}
        if name not in positions:
            return [Marker.UNKNOWN]
        default = default_of(scope, positions[name])
        return [self._given(caller, positions[name], name, default) for caller in self._callers[scope]]

    def _given(self, caller: Caller, position: int, name: str, default: ast.expr | None) -> Origin:
        if position < len(caller.positional):
            return caller.positional[position]
        value = caller.named.get(name, default if caller.all_known else None)
        return Marker.UNKNOWN if value is None else value

    def _values_of_attribute(self, node: ast.Attribute) -> list[Origin] | None:
        text = dotted(node)
        if not text:
            return None
        may_change: list[Origin] = [Marker.UNKNOWN] if text.rpartition(".")[0] in self._changed else []
        if not text.startswith("self."):
            set_here = self._attributes.get((None, text))
            if not set_here:
                return None
            if len(set_here) > _VALUES_MAX:
                return [Marker.UNKNOWN]
            before: list[Origin] = []
            if not any(self._is_set_in_any_case(text, value) for value in set_here):
                before.append(Marker.BROUGHT)
            return [*set_here, *before, *may_change, *self._rebound(set_here)]
        owner = self._class_of(node)
        values = self._attributes.get((owner, text), [])
        if owner is None or not values:
            return None
        if len(values) > _VALUES_MAX:
            return [Marker.UNKNOWN]
        # The class body or a base class may also set the attribute.
        named = [*self._names.get((owner, node.attr), ()), *(fields_declared(owner, node.attr))]
        foreign = [b for b in owner.bases if not self.full_name(b).startswith("torch.") and name_of(b) != "object"]
        return [*values, *named, *may_change, *([Marker.UNKNOWN] if foreign else [])]

    def _is_set_in_any_case(self, text: str, value: Origin) -> bool:
        """True if every branch sets the attribute. If not, it may keep an earlier value, for example from argparse."""
        if isinstance(value, Marker):
            return False
        for child, parent in self.above(value):
            if isinstance(parent, ast.If):
                other = parent.orelse if child in parent.body else parent.body
                if not (leaves(other) or any(dotted(t) == text for s in other for t in targets_in(s))):
                    return False
        return True

    def _rebound(self, values: list[Origin]) -> list[Origin]:
        """Return [UNKNOWN] if a later line, such as exec, may change all names of the module."""
        first = min((v.lineno for v in values if isinstance(v, ast.expr)), default=self._rebound_until)
        return [Marker.UNKNOWN] if first < self._rebound_until else []

    def _class_of(self, node: ast.AST) -> ast.ClassDef | None:
        scope: ast.AST = self.scope(node)
        while not isinstance(scope, ast.ClassDef | ast.Module):
            scope = self.scope(scope)
        return scope if isinstance(scope, ast.ClassDef) else None

    def _note_definitions(self) -> None:
        for node in self.nodes:
            if isinstance(node, Function | ast.ClassDef):
                scope = self.scope(node)
                self._defs[scope, node.name] = node
                if isinstance(node, Function) and isinstance(scope, ast.ClassDef):
                    self._methods[node.name].append(node)

    def _note(self, target: ast.AST, value: Origin, node: ast.AST) -> None:
        if isinstance(target, ast.Starred):
            self._note(target.value, Marker.UNKNOWN, node)
        elif isinstance(target, ast.Tuple | ast.List):
            parts = value.elts if isinstance(value, ast.Tuple | ast.List) else []
            known = len(parts) == len(target.elts) and not any(isinstance(p, ast.Starred) for p in parts)
            for i, inner in enumerate(target.elts):
                item = _item(value, i, target) if isinstance(value, ast.Call) else Marker.UNKNOWN
                self._note(inner, parts[i] if known else self._placed(item, node), node)
        elif isinstance(target, ast.Name):
            scope = self.scope(target)
            where = self.tree if (scope, target.id) in self._globals else scope
            self._names[where, target.id].append(self._placed(value, node))
        elif isinstance(target, ast.Attribute) and (text := dotted(target)):
            owner = self._class_of(target) if text.startswith("self.") else None
            self._attributes[owner, text].append(self._placed(value, node))

    def _placed(self, value: Origin, node: ast.AST) -> Origin:
        """Give a parent to nodes that are not in the file: `x /= 2` is stored as `x / 2`, and `a, b = f()` as
        `a = f()[0]`."""
        if isinstance(value, ast.Subscript) and value not in self._parent:
            self._parent[value] = node
        if isinstance(node, ast.AugAssign) and isinstance(value, ast.BinOp):
            self._parent[value] = node
            self._parent[value.left] = value
        return value

    # ---------------------------------------------------------------- who calls whom

    def _note_callers(self) -> None:
        for call in self.calls:
            for function, skip in self._called_here(call):
                self._callers[function].append(_caller(call, skip))
        # Keep this order: the callers from the loop above resolve `demo` in def start(demo): mp.spawn(demo, …).
        # The callers from this loop resolve `fn` in def init_process(rank, size, fn): fn(rank, size).
        for target, caller in filter(None, map(self.started, self.calls)):
            for function in self.functions_meant(target):
                self._callers[function].append(caller)
        for call in self.calls:
            if isinstance(call.func, ast.Name) and self.definition(call.func) is None:
                for function in self.functions_meant(call.func):
                    self._callers[function].append(_caller(call, 0))

    def _called_here(self, call: ast.Call) -> Iterator[tuple[Function, int]]:
        """Yield functions of this file that a call runs, and the number of arguments that Python adds: 1 for self."""
        defined = self.definition(call.func)
        if isinstance(defined, Function):
            yield defined, 0
        elif isinstance(defined, ast.ClassDef):
            init = next((m for m in self._methods.get("__init__", ()) if self.scope(m) is defined), None)
            if init is not None:
                yield init, 1
        elif isinstance(call.func, ast.Attribute):
            classes = self._classes_of(call.func.value)
            for method in self._methods.get(call.func.attr, ()):
                if self.scope(method) in classes:
                    static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in method.decorator_list)
                    yield method, 0 if static else 1

    def _classes_of(self, node: ast.expr) -> list[ast.AST]:
        """Return classes of this file that a value may be an instance of."""
        if isinstance(node, ast.Name) and node.id == "self":
            return [c] if (c := self._class_of(node)) else []
        origins = self.origins(node)
        definitions = [self.definition(o.func) for o in origins if isinstance(o, ast.Call)]
        return [d for d in definitions if isinstance(d, ast.ClassDef)]

    def started(self, call: ast.Call) -> tuple[ast.expr, Caller] | None:
        """Return the function that a call starts in new processes, and its arguments."""
        spawns = self.called(call) in STARTERS
        target = self.argument(call, "fn", 0) if spawns else self.argument(call, "target")
        if target is None or not (spawns or self.called(call).endswith("Process") or is_method(call, "Process")):
            return None
        given = self.argument(call, "args", 1) if spawns else self.argument(call, "args")
        plain = given is None or (
            isinstance(given, ast.Tuple | ast.List) and not any(isinstance(e, ast.Starred) for e in given.elts)
        )
        values = given.elts if isinstance(given, ast.Tuple | ast.List) else []
        first: tuple[Origin, ...] = (Marker.INDEX,) if spawns else ()
        known = plain and self.argument(call, "kwargs") is None
        # In `for rank in range(n): Process(target=run, args=(rank, n))` the counter is the process's number.
        numbers = (Marker.INDEX if self.origins(v) == [Marker.COUNT] else v for v in values)
        return target, Caller(call, (*first, *numbers), starts_process=True, all_known=known)


def _item(value: ast.expr, number: int, target: ast.Tuple | ast.List) -> Origin:
    """Return value[number], which `a, b = value` assigns to the name at this position."""
    if any(isinstance(e, ast.Starred) for e in target.elts):
        return Marker.UNKNOWN
    return ast.copy_location(ast.Subscript(value, ast.Constant(number), ast.Load()), value)


def _caller(call: ast.Call, skip: int) -> Caller:
    plain = itertools.takewhile(lambda arg: not isinstance(arg, ast.Starred), call.args)
    values: tuple[Origin, ...] = (*[Marker.UNKNOWN] * skip, *plain)
    named = {k.arg: k.value for k in call.keywords if k.arg}
    return Caller(call, values, named, all_known=not has_hidden_arguments(call))
