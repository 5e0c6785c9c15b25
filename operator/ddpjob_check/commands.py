"""The functions of a script that click, typer or fire call, with the options that these get as parameters."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from ddpjob_check.nodes import Function, default_of, name_of, text_in
from ddpjob_check.option import UNKNOWN, Option, literal
from ddpjob_check.script import Script

# With these, an option may get its value elsewhere.
_OTHER_SOURCES = ("default_map", "auto_envvar_prefix")
_NOT_READ = {"callback", "count", "envvar", "flag_value", "multiple", "nargs", "prompt", "required"}


def commands(script: Script, words: Sequence[str]) -> dict[Function, dict[str, Option]]:
    """Return the options of each such function by its parameters; only those whose value the words decide."""
    if script.mentions(*_OTHER_SOURCES) or not script.mentions("click", "typer", "fire"):
        return {}
    called = [a for call in script.calls_to("typer.run") for a in call.args[:1]]
    # fire may give a word that neither is an option nor follows one to any parameter.
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
    """True below @app.command() and @app.callback()."""
    calls = [d.func for d in function.decorator_list if isinstance(d, ast.Call)]
    return script.mentions("Typer") and any(
        isinstance(called, ast.Attribute)
        and called.attr in ("command", "callback")
        and any(script.called(o) == "typer.Typer" for o in script.origins(called.value))
        for called in calls
    )


def _of_click(script: Script, function: Function) -> Iterator[tuple[str, Option]]:
    """Those of @click.option("--launcher", default="none")."""
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
    """Those of typer and fire: launcher: str = "none", = typer.Option("none", "-l"), Annotated[str, typer.Option()]."""
    listed = [*function.args.posonlyargs, *function.args.args]
    pairs = [(parameter, default_of(function, i)) for i, parameter in enumerate(listed)]
    for parameter, default in (*pairs, *zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)):
        if default is None:
            continue  # an argument of its own, without a name
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
            names += [f"/--no{n[2:].partition('/')[0]}" for n in names if n[:2] == "--"]  # fire's
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
    """Return an option; None if more than its words may decide on its value. names: "--ddp/--no-ddp" are two."""
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
    """The type that click converts to: type=int, click.Choice(…), or that of the default."""
    if isinstance(typed, ast.Call):
        return "str" if name_of(typed.func) == "Choice" else ""
    if typed is not None:
        return {"INT": "int", "FLOAT": "float", "STRING": "str"}.get(name_of(typed), name_of(typed))
    return "str" if value is None or value is UNKNOWN else type(value).__name__
