"""Find the options that a script reads with argparse, absl, click, typer or fire, and their values in a job."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

from ddpjob_check.nodes import Function, Marker, default_of, is_main_guard, is_method, name_of, parameters_of, text_in
from ddpjob_check.script import Script

UNKNOWN = object()
_TYPES: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}


@dataclass(frozen=True)
class Option:
    """An option as the script declares it."""

    node: ast.AST
    names: tuple[str, ...]
    """For example --launcher and -l."""
    default: Any
    """Value of the literal default; UNKNOWN if it is not a literal."""
    kind: str = "str"
    """Type of the value: int, float or str. Values of other types are UNKNOWN."""
    flags: Mapping[str, bool] = field(default_factory=dict)
    """Value that each name sets, for options without a value; otherwise empty."""

    @property
    def name(self) -> str:
        """Return the option's longest name, for messages."""
        return max(self.names, key=len)

    def given(self, words: Sequence[str]) -> Any:
        """Return the value that these words give the option, or its default; UNKNOWN if it is uncertain."""
        meant = [(self._meant(word), word, after) for word, after in pairwise((*words, ""))]
        meant = [found for found in meant if found[0]]
        if not meant:
            # A shell may replace $ARGS by options, unless $ARGS is the value of an option.
            expanded = (a.startswith("$") and not b.startswith("-") for b, a in pairwise(("", *words)))
            return UNKNOWN if any(expanded) else self.default
        name, word, after = meant[-1]
        if self.flags:
            return UNKNOWN if "=" in word else self.flags[name]
        try:
            return _TYPES[self.kind](word.partition("=")[2] if "=" in word else after)
        except (KeyError, ValueError):
            return UNKNOWN

    def _meant(self, word: str) -> str:
        """Return the option's name that a word spells or abbreviates; "" if the word is not this option."""
        name = word.partition("=")[0]
        is_long = len(name) > 3 and name.startswith("--")
        return name if name in self.names else next((n for n in self.names if is_long and n.startswith(name)), "")


def literal(node: ast.expr | None) -> Any:
    """Return the value of a literal, None if there is no expression, and UNKNOWN for any other expression."""
    try:
        return ast.literal_eval(node or ast.Constant(None))
    except (ValueError, TypeError):
        return UNKNOWN


# ---------------------------------------------------------------- functions that click, typer or fire call

# With one of these arguments, an option's value may come from a source other than the command line.
_OTHER_SOURCES_OF_CLICK = ("default_map", "auto_envvar_prefix")
_OTHER_SOURCES = ("set_defaults", "add_subparsers", "fromfile_prefix_chars", "parents")
_NOT_READ = {"callback", "count", "envvar", "flag_value", "multiple", "nargs", "prompt", "required"}


def commands(script: Script, words: Sequence[str]) -> dict[Function, dict[str, Option]]:
    """Return, for each function that click, typer or fire calls, its options by parameter.

    Return {} if anything except the words of the command may decide their values.
    """
    if script.mentions(*_OTHER_SOURCES_OF_CLICK) or not script.mentions("click", "typer", "fire"):
        return {}
    called = [a for call in script.calls_to("typer.run") for a in call.args[:1]]
    # fire may pass a word to any parameter if it is neither an option nor an option's value.
    pairs = pairwise(("", *words))
    if not any(word[:1] != "-" and (before[:1] != "-" or "=" in before) for before, word in pairs):
        called += [a for call in script.calls_to("fire.Fire") for a in call.args[:1]]
    functions = {script.definition(a) for a in called}
    found: dict[Function, dict[str, Option]] = {}
    for function in (node for node in script.nodes if isinstance(node, Function)):
        if function in functions or _is_command_of_typer(script, function):
            found[function] = dict(_of_parameters(script, function))
        elif options := dict(_of_click(script, function)):
            found[function] = options
    return found


def _is_command_of_typer(script: Script, function: Function) -> bool:
    """True for functions decorated with @app.command() or @app.callback() of a typer.Typer."""
    calls = [d.func for d in function.decorator_list if isinstance(d, ast.Call)]
    return script.mentions("Typer") and any(
        isinstance(called, ast.Attribute)
        and called.attr in ("command", "callback")
        and any(script.called(o) == "typer.Typer" for o in script.origins(called.value))
        for called in calls
    )


def _of_click(script: Script, function: Function) -> Iterator[tuple[str, Option]]:
    """Yield (parameter, option) for each @click.option("--launcher", default="none")."""
    for call in function.decorator_list:
        if isinstance(call, ast.Call) and script.full_name(call.func).endswith("click.option"):
            texts = [text for a in call.args if (text := text_in(a))]
            names = [text for text in texts if text.startswith("-")]
            plain = [text for text in texts if not text.startswith("-")]
            option = _option(script, call, call, names)
            if option is not None and names:
                longest = max(names, key=lambda name: len(name) - len(name.lstrip("-"))).partition("/")[0]
                yield (plain[0] if plain else longest.lstrip("-").replace("-", "_").lower()), option


def _of_parameters(script: Script, function: Function) -> Iterator[tuple[str, Option]]:
    """Yield (parameter, option) for the parameters of a function that typer or fire calls.

    For example launcher: str = "none", = typer.Option("none", "-l"), Annotated[str, typer.Option()].
    """
    listed = [*function.args.posonlyargs, *function.args.args]
    pairs = [(parameter, default_of(function, i)) for i, parameter in enumerate(listed)]
    for parameter, default in (*pairs, *zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)):
        if default is None:
            continue  # a positional argument
        call, kind = default if _declares(default) else None, parameter.annotation
        if isinstance(kind, ast.Subscript) and name_of(kind.value) == "Annotated" and isinstance(kind.slice, ast.Tuple):
            call = next((part for part in kind.slice.elts[1:] if _declares(part)), call)
            kind = kind.slice.elts[0]
        if isinstance(call, ast.Call) and call is default:
            default = script.argument(call, "default", 0)
        names = [text for a in getattr(call, "args", ()) if (text := text_in(a)).startswith("-")]
        names = names or [f"--{text}" for text in {parameter.arg.replace("_", "-"), parameter.arg}]
        if name_of(kind or ast.Pass()) == "bool" or isinstance(literal(default), bool):
            names = [n if "/" in n or n[:2] != "--" else f"{n}/--no-{n[2:]}" for n in names]
            names += [f"/--no{n[2:].partition('/')[0]}" for n in names if n[:2] == "--"]  # fire also accepts --noNAME
        option = _option(script, parameter, call, names, default, name_of(kind or ast.Pass()))
        if option is not None and name_of(getattr(call, "func", ast.Pass())) != "Argument":
            yield parameter.arg, option


def _declares(node: ast.AST) -> bool:
    """True for typer.Option(…) and typer.Argument(…)."""
    return isinstance(node, ast.Call) and name_of(node.func) in ("Option", "Argument")


def _option(
    script: Script,
    node: ast.AST,
    call: ast.AST | None,
    names: Sequence[str],
    default: ast.expr | None = None,
    kind: str = "",
) -> Option | None:
    """Return an option; None if anything except words of the command may decide its value. names: may be --a/--no-a."""
    declared = call if isinstance(call, ast.Call) else ast.Call(ast.Name("Option", ast.Load()), [], [])
    if any(keyword.arg is None or keyword.arg in _NOT_READ for keyword in declared.keywords):
        return None
    typed = script.argument(declared, "type")
    value = literal(default or script.argument(declared, "default"))
    on, off = ([part for n in names if (part := n.partition("/")[i].strip())] for i in (0, 2))
    if off or literal(script.argument(declared, "is_flag")) is True:
        flags = {**dict.fromkeys(on, True), **dict.fromkeys(off, False)}
        return Option(node, (*on, *off), False if value is None else value, "bool", flags)
    return Option(node, tuple(on), value, kind or _kind(typed, value))


def _kind(typed: ast.expr | None, value: Any) -> str:
    """Return the type to which click converts the value: from type=int or click.Choice(…), or the default's type."""
    if isinstance(typed, ast.Call):
        return "str" if name_of(typed.func) == "Choice" else ""
    if typed is not None:
        return {"INT": "int", "FLOAT": "float", "STRING": "str"}.get(name_of(typed), name_of(typed))
    return "str" if value is None or value is UNKNOWN else type(value).__name__


_DEPTH_MAX = 6
_FLAGS = {"store_true": (False, True), "store_false": (True, False)}
_ABSL = {
    "DEFINE_string": "str", "DEFINE_enum": "str", "DEFINE_integer": "int", "DEFINE_float": "float",
    "DEFINE_bool": "bool", "DEFINE_boolean": "bool",
}  # fmt: skip


class ScriptOptions:
    """The options of a script, and their values. words: its arguments in the command; other options have defaults."""

    def __init__(self, script: Script, words: Sequence[str]) -> None:
        self._script, self._words = script, tuple(words)

    @cached_property
    def declared(self) -> dict[str, Option]:
        """Return the options of argparse and absl by attribute, if they are declared once and unconditionally."""
        calls: dict[str, list[ast.Call]] = {}
        if not self._script.mentions(*_OTHER_SOURCES):
            for call in self._script.methods_called("add_argument"):
                calls.setdefault(destination(call), []).append(call)
        for call in self._script.calls:
            if name_of(call.func) in _ABSL and self._is_of_absl(call.func, name_of(call.func)):
                calls.setdefault(text_in(call.args[0]) if call.args else "", []).append(call)
        once = {name: found[0] for name, found in calls.items() if name and len(found) == 1}
        plain = {n: c for n, c in once.items() if all(map(is_main_guard, self._script.enclosing_tests(c)))}
        return {name: option for name, call in plain.items() if (option := self._read(call)) is not None}

    def _is_of_absl(self, node: ast.AST, name: str) -> bool:
        return self._script.full_name(node) in (f"absl.flags.{name}", f"flags.{name}")

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
        """Return the option that an expression reads, by `args.NAME` or by a parameter that click passes; else None."""
        if isinstance(node, ast.Name):
            scope = self._script.scope(node)
            is_plain = isinstance(scope, Function) and node.id in parameters_of(scope)
            return self._commands.get(scope, {}).get(node.id) if is_plain and isinstance(scope, Function) else None
        if not isinstance(node, ast.Attribute) or node.attr not in self.declared:
            return None
        option = self.declared[node.attr]
        of_absl = name_of(getattr(option.node, "func", ast.Pass())) in _ABSL
        gives = partial(self._is_of_absl, name="FLAGS") if of_absl else self._gives_options
        is_read = all(isinstance(o, ast.expr) and gives(o) for o in self._script.origins(node.value))
        return option if is_read else None

    def declaration(self, node: ast.expr) -> Option | None:
        """Return the option that a name or attribute gets its value from, also through other names; else None."""
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

    def _gives_options(self, value: ast.expr, depth: int = 0) -> bool:
        """True for parser.parse_args(), parser.parse_known_args()[0], and functions of the file that return either."""
        if isinstance(value, ast.Subscript):
            value = value.value
        if not isinstance(value, ast.Call) or depth > _DEPTH_MAX:
            return False
        if is_method(value, "parse_args") or is_method(value, "parse_known_args"):
            return not value.args and not value.keywords
        results = [o for r in self._script.results(value) for o in self._script.origins(r)]
        return bool(results) and all(isinstance(o, ast.expr) and self._gives_options(o, depth + 1) for o in results)


def destination(call: ast.Call) -> str:
    """Return argparse's attribute for an option: launcher for add_argument("-l", "--launcher")."""
    for keyword in call.keywords:
        if keyword.arg == "dest":
            return text_in(keyword.value)
    names = [text for a in call.args if (text := text_in(a))]
    chosen = next((n for n in names if n.startswith("--")), names[0] if names else "")
    return chosen.lstrip("-").replace("-", "_")
