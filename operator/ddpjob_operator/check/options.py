"""The options that a script reads with argparse, and what each is worth in a job."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

from ddpjob_operator.check.nodes import Marker, is_main_guard, is_method, name_of, text_in
from ddpjob_operator.check.script import Script

UNKNOWN = object()
_DEPTH_MAX = 6
# With these, an option may get its value elsewhere.
_OTHER_SOURCES = ("set_defaults", "add_subparsers", "fromfile_prefix_chars", "parents")
_TYPES = {"int": int, "float": float, "str": str}
_FLAGS = {"store_true": (False, True), "store_false": (True, False)}


class Options:
    """words: what the command gives to the script. An option that is not among them has its default."""

    def __init__(self, script: Script, words: Sequence[str]) -> None:
        self._script, self._words = script, tuple(words)

    @cached_property
    def declared(self) -> dict[str, ast.Call]:
        """The options by the attribute that argparse gives them; only those that are declared once, in any case."""
        calls: dict[str, list[ast.Call]] = {}
        if not self._script.mentions(*_OTHER_SOURCES):
            for call in self._script.methods_called("add_argument"):
                calls.setdefault(destination(call), []).append(call)
        return {
            name: found[0] for name, found in calls.items() if name and len(found) == 1 and self._is_plain(found[0])
        }

    def _is_plain(self, call: ast.Call) -> bool:
        return all(is_main_guard(test) for test in self._script.enclosing_tests(call))

    def option(self, node: ast.expr) -> ast.Call | None:
        """The declaration of the option that `args.NAME` reads."""
        if not isinstance(node, ast.Attribute) or node.attr not in self.declared:
            return None
        return self.declared[node.attr] if self._is_parsed(node.value) else None

    def declaration(self, node: ast.expr) -> ast.Call | None:
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

    def _own_value(self, origin: object, node: ast.expr, option: ast.Call | None, depth: int) -> Any:
        if isinstance(origin, ast.Constant):
            return origin.value
        if option is not None and (origin is node or origin is Marker.BROUGHT):
            return self.given(option)
        return self.value(origin, depth + 1) if isinstance(origin, ast.Attribute) and origin is not node else UNKNOWN

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

    def given(self, option: ast.Call) -> Any:
        """What an option is worth, by the words of the command or by its default."""
        names = [word for a in option.args if (word := text_in(a))]
        action = text_in(self._script.argument(option, "action") or ast.Constant(None))
        if not all(name.startswith("-") for name in names) or (action and action not in _FLAGS):
            return UNKNOWN
        given = [self._word(word, after, names) for word, after in pairwise((*self._words, ""))]
        text = next((t for t in reversed(given) if t is not None), None)
        if action:
            return _FLAGS[action][text is not None]
        return self._default(option) if text is None else self._typed(option, text)

    def _word(self, word: str, after: str, names: list[str]) -> str | None:
        """The text that a word gives to an option, by its name or the beginning of it; None: it is another one."""
        name, equals, text = word.partition("=")
        is_name = name in names or (len(name) > 3 and name.startswith("--") and any(n.startswith(name) for n in names))
        return None if not is_name else text if equals else after

    def _default(self, option: ast.Call) -> Any:
        try:
            return ast.literal_eval(self._script.argument(option, "default") or ast.Constant(None))
        except (ValueError, TypeError):
            return UNKNOWN

    def _typed(self, option: ast.Call, text: str) -> Any:
        kind = self._script.argument(option, "type")
        convert = _TYPES.get(name_of(kind) if kind is not None else "str")
        try:
            return UNKNOWN if convert is None or self._script.argument(option, "nargs") else convert(text)
        except ValueError:
            return UNKNOWN


def destination(call: ast.Call) -> str:
    """The attribute under which argparse keeps an option: launcher for add_argument("-l", "--launcher")."""
    for keyword in call.keywords:
        if keyword.arg == "dest":
            return text_in(keyword.value)
    names = [text for a in call.args if (text := text_in(a))]
    chosen = next((n for n in names if n.startswith("--")), names[0] if names else "")
    return chosen.lstrip("-").replace("-", "_")
