"""The options that a script reads with argparse, absl, click, typer or fire, and what each is worth in a job."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from ddpjob_check.commands import commands
from ddpjob_check.nodes import Function, Marker, is_main_guard, is_method, name_of, parameters_of, text_in
from ddpjob_check.option import UNKNOWN, Option, literal
from ddpjob_check.script import Script

_DEPTH_MAX = 6
# With these, an option may get its value elsewhere.
_OTHER_SOURCES = ("set_defaults", "add_subparsers", "fromfile_prefix_chars", "parents")
_FLAGS = {"store_true": (False, True), "store_false": (True, False)}
_ABSL = {
    "DEFINE_string": "str", "DEFINE_enum": "str", "DEFINE_integer": "int", "DEFINE_float": "float",
    "DEFINE_bool": "bool", "DEFINE_boolean": "bool",
}  # fmt: skip


class ScriptOptions:
    """words: what the command gives to the script. An option that is not among them has its default."""

    def __init__(self, script: Script, words: Sequence[str]) -> None:
        self._script, self._words = script, tuple(words)

    @cached_property
    def declared(self) -> dict[str, Option]:
        """The options by the attribute that argparse or absl gives them; only those that are declared once, always."""
        calls: dict[str, list[ast.Call]] = {}
        if not self._script.mentions(*_OTHER_SOURCES):
            for call in self._script.methods_called("add_argument"):
                calls.setdefault(destination(call), []).append(call)
        for call in self._script.calls:
            if name_of(call.func) in _ABSL and self._is_of_absl(call.func, name_of(call.func)):
                calls.setdefault(text_in(call.args[0]) if call.args else "", []).append(call)
        once = {name: found[0] for name, found in calls.items() if name and len(found) == 1}
        read = ((name, self._read(call)) for name, call in once.items() if self._is_plain(call))
        return {name: option for name, option in read if option is not None}

    def _is_of_absl(self, node: ast.AST, name: str) -> bool:
        return self._script.full_name(node) in (f"absl.flags.{name}", f"flags.{name}")

    def _is_plain(self, call: ast.Call) -> bool:
        return all(is_main_guard(test) for test in self._script.enclosing_tests(call))

    def _read(self, call: ast.Call) -> Option | None:
        kind = _ABSL.get(name_of(call.func))
        if kind is None:
            return self._of_argparse(call)
        name = text_in(call.args[0])
        default = literal(self._script.argument(call, "default", 1))
        flags = {f"{dash}{text}{name}": not text for dash in ("--", "-") for text in ("", "no")}
        return Option(call, (f"--{name}", f"-{name}", *flags), default, kind, flags if kind == "bool" else {})

    def _of_argparse(self, call: ast.Call) -> Option | None:
        names = tuple(word for a in call.args if (word := text_in(a)))
        action = text_in(self._script.argument(call, "action") or ast.Constant(None))
        if not all(name.startswith("-") for name in names) or (action and action not in _FLAGS):
            return None
        if action:
            off, on = _FLAGS[action]
            return Option(call, names, off, "bool", dict.fromkeys(names, on))
        kind = self._script.argument(call, "type")
        known = "str" if kind is None else name_of(kind)
        known = "" if self._script.argument(call, "nargs") else known
        return Option(call, names, literal(self._script.argument(call, "default")), known)

    @cached_property
    def _commands(self) -> dict[Function, dict[str, Option]]:
        return commands(self._script, self._words)

    def option(self, node: ast.expr) -> Option | None:
        """The declaration of the option that `args.NAME` reads, or a parameter of the function that click calls."""
        if isinstance(node, ast.Name):
            scope = self._script.scope(node)
            is_plain = isinstance(scope, Function) and node.id in parameters_of(scope)
            return self._commands.get(scope, {}).get(node.id) if is_plain and isinstance(scope, Function) else None
        if not isinstance(node, ast.Attribute) or node.attr not in self.declared:
            return None
        option = self.declared[node.attr]
        of_absl = name_of(getattr(option.node, "func", ast.Pass())) in _ABSL
        is_read = self._is_flags(node.value) if of_absl else self._is_parsed(node.value)
        return option if is_read else None

    def _is_flags(self, base: ast.expr) -> bool:
        return all(isinstance(o, ast.expr) and self._is_of_absl(o, "FLAGS") for o in self._script.origins(base))

    def declaration(self, node: ast.expr) -> Option | None:
        """The option that a name or attribute was made of, through the names of the file."""
        found = [self.option(o) for o in (node, *self._script.origins(node)) if isinstance(o, ast.expr)]
        return next((option for option in found if option is not None), None)

    def value(self, node: ast.expr, depth: int = 0) -> Any:
        """What an expression is worth in this job; UNKNOWN if the options alone do not decide it."""
        if depth > _DEPTH_MAX:
            return UNKNOWN
        option = self.option(node)
        if option is None and not isinstance(node, ast.Name | ast.Constant):
            return UNKNOWN
        values = [self._own_value(o, node, option, depth) for o in self._script.origins(node)]
        first = values[0]
        return first if all(v is not UNKNOWN and v == first for v in values) else UNKNOWN

    def _own_value(self, origin: object, node: ast.expr, option: Option | None, depth: int) -> Any:
        if isinstance(origin, ast.Constant):
            return origin.value
        if option is not None and (origin is node or origin is Marker.BROUGHT):
            return option.given(self._words)
        is_other = isinstance(origin, ast.Attribute | ast.Name) and origin is not node
        return self.value(origin, depth + 1) if is_other and isinstance(origin, ast.expr) else UNKNOWN

    def given(self, option: Option) -> Any:
        """What an option is worth, by the words of the command or by its default."""
        return option.given(self._words)

    def _is_parsed(self, base: ast.expr) -> bool:
        return all(isinstance(o, ast.expr) and self._gives_options(o) for o in self._script.origins(base))

    def _gives_options(self, value: ast.expr, depth: int = 0) -> bool:
        """True for parser.parse_args(), parser.parse_known_args()[0], and functions of the file that return it."""
        if isinstance(value, ast.Subscript):
            value = value.value
        if not isinstance(value, ast.Call) or depth > _DEPTH_MAX:
            return False
        if is_method(value, "parse_args") or is_method(value, "parse_known_args"):
            return not value.args and not value.keywords
        results = [o for r in self._script.results(value) for o in self._script.origins(r)]
        return bool(results) and all(isinstance(o, ast.expr) and self._gives_options(o, depth + 1) for o in results)


def destination(call: ast.Call) -> str:
    """The attribute under which argparse keeps an option: launcher for add_argument("-l", "--launcher")."""
    for keyword in call.keywords:
        if keyword.arg == "dest":
            return text_in(keyword.value)
    names = [text for a in call.args if (text := text_in(a))]
    chosen = next((n for n in names if n.startswith("--")), names[0] if names else "")
    return chosen.lstrip("-").replace("-", "_")
