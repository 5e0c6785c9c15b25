"""The options that a script reads with argparse, and their values in a job. Those of other parsers are not known."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

from ddpjob_check.nodes import Marker, is_main_guard, is_method, name_of, text_in
from ddpjob_check.script import Script

UNKNOWN = object()
_TYPES: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}


@dataclass(frozen=True)
class Option:
    """An option as the script declares it."""

    node: ast.AST
    names: tuple[str, ...]
    """--launcher, -l"""
    default: Any
    """UNKNOWN if it is not a literal."""
    kind: str = "str"
    """The type of its value: int, float or str; values of other types are unknown."""
    flags: Mapping[str, bool] = field(default_factory=dict)
    """The value for each of its names; empty if a value follows the name."""

    @property
    def name(self) -> str:
        """Its longest name, for a message."""
        return max(self.names, key=len)

    def given(self, words: Sequence[str]) -> Any:
        """Return its value with these words, or its default; UNKNOWN if that is uncertain."""
        meant = [(self._meant(word), word, after) for word, after in pairwise((*words, ""))]
        meant = [found for found in meant if found[0]]
        if not meant:
            return self.default
        name, word, after = meant[-1]
        if self.flags:
            return UNKNOWN if "=" in word else self.flags[name]
        try:
            return _TYPES[self.kind](word.partition("=")[2] if "=" in word else after)
        except (KeyError, ValueError):
            return UNKNOWN

    def _meant(self, word: str) -> str:
        """Return the one of its names that a word is, or abbreviates; "" if it is another option."""
        name = word.partition("=")[0]
        is_long = len(name) > 3 and name.startswith("--")
        return name if name in self.names else next((n for n in self.names if is_long and n.startswith(name)), "")


def literal(node: ast.expr | None) -> Any:
    """Return the value of a literal, None for None, and UNKNOWN for any other expression."""
    try:
        return ast.literal_eval(node or ast.Constant(None))
    except (ValueError, TypeError):
        return UNKNOWN


# With one of these, an option may get its value elsewhere.
_OTHER_SOURCES = ("set_defaults", "add_subparsers", "fromfile_prefix_chars", "parents")
_DEPTH_MAX = 6
_FLAGS = {"store_true": (False, True), "store_false": (True, False)}


class ScriptOptions:
    """The options of a script. words: its arguments in the command. An option that is not among them has its
    default."""

    def __init__(self, script: Script, words: Sequence[str]) -> None:
        self._script, self._words = script, tuple(words)

    @cached_property
    def declared(self) -> dict[str, Option]:
        """Return the options by their attribute, if declared once and unconditionally."""
        calls: dict[str, list[ast.Call]] = {}
        if not self._script.mentions(*_OTHER_SOURCES):
            for call in self._script.methods_called("add_argument"):
                calls.setdefault(destination(call), []).append(call)
        once = {name: found[0] for name, found in calls.items() if name and len(found) == 1}
        read = ((name, self._of_argparse(call)) for name, call in once.items() if self._is_plain(call))
        return {name: option for name, option in read if option is not None}

    def _is_plain(self, call: ast.Call) -> bool:
        return all(is_main_guard(test) for test in self._script.enclosing_tests(call))

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

    def option(self, node: ast.expr) -> Option | None:
        """Return the declaration of the option that `args.NAME` reads."""
        if not isinstance(node, ast.Attribute) or node.attr not in self.declared:
            return None
        return self.declared[node.attr] if self._is_parsed(node.value) else None

    def declaration(self, node: ast.expr) -> Option | None:
        """Return the option from which a name or attribute was made, followed through the names of the file."""
        found = [self.option(o) for o in (node, *self._script.origins(node)) if isinstance(o, ast.expr)]
        return next((option for option in found if option is not None), None)

    def value(self, node: ast.expr, depth: int = 0) -> Any:
        """Return the value of an expression in this job; UNKNOWN if the options alone do not decide it."""
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
        """Return the value of an option, from the words of the command or from its default."""
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
    """Return the attribute for an option in argparse: launcher for add_argument("-l", "--launcher")."""
    for keyword in call.keywords:
        if keyword.arg == "dest":
            return text_in(keyword.value)
    names = [text for a in call.args if (text := text_in(a))]
    chosen = next((n for n in names if n.startswith("--")), names[0] if names else "")
    return chosen.lstrip("-").replace("-", "_")
