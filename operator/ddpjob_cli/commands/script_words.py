"""Split the arguments of `ddpjob run`, `submit` and `init` as torchrun does. Our options come before the file or
directly after it. The script gets everything after `--`, or after the last of these options. If the file is a YAML, our
options may be anywhere, because the YAML contains the script's arguments."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from ddpjob_cli.commands.output import say

_SCRIPTS = (".py", ".ipynb")
_FILES = (*_SCRIPTS, ".yaml", ".yml")
_SELECT = ("filename", "module")  # parameters that name what to run instead of FILE
_OF_LAUNCHERS = {"nnodes": "--nodes", "nproc_per_node": "--nproc-per-node", "max_restarts": "--max-restarts"}

Taken = list[tuple[click.Option, list[str]]]


def normalized(name: str) -> str:
    """Return our spelling of an option's name without dashes: nproc-per-node for nproc_per_node, nodes for nnodes."""
    name = name.replace("_", "-")
    return "nodes" if name == "nnodes" else name


SETTINGS: dict[str, Any] = {"token_normalize_func": normalized}


class ScriptCommand(click.Command):
    """A command that starts a script and passes on the words after it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Arrange the words for click, and explain an unknown option."""
        try:
            return super().parse_args(ctx, args if ctx.resilient_parsing else _arranged(self, ctx, args))
        except click.NoSuchOption as error:  # only for a YAML file, because `_arranged` splits all other lines
            keep_close(error)
            if error.possibilities:
                raise
            text = f"{error.message.rstrip('.')}; put arguments for the script of a YAML file after --"
            raise click.UsageError(text, ctx) from None


@dataclass
class _Line:
    program: str
    """ddpjob run"""
    options: Mapping[str, click.Option]
    """Our options by their normalized names, with dashes."""
    before: list[str] = field(default_factory=list)
    """Our options before the file, except --filename and --module."""
    named: list[str] = field(default_factory=list)
    after: Taken = field(default_factory=list)
    words: list[str] = field(default_factory=list)

    def text(self, *words: str) -> str:
        return f"{self.program} {shlex.join(words)}"

    def match(self, words: Sequence[str]) -> tuple[click.Option, int] | None:
        """Return our option and its number of words, with its value, if the first word is our option; else None."""
        word = words[0]
        is_long = word.startswith("--")
        name, has_value, _ = word.partition("=") if is_long else (word[:2], word[2:], "")
        option = self.options.get(spelling(name)) if name not in ("-", "--") else None
        if option is None or (has_value and not is_long and _is_flag(option)):
            return None
        return option, 1 if has_value or _is_flag(option) else 2

    def take(self, words: Sequence[str], *, behind: bool) -> Taken:
        """Return our options at the beginning, with their values. behind: after the file --help is the script's."""
        taken: Taken = []
        rest = list(words)
        while rest and (found := self.match(rest)) is not None:
            option, size = found
            if size > len(rest):
                raise click.BadOptionUsage(rest[0], f"Option {rest[0]!r} requires an argument.")
            if behind and (option.name in _SELECT or option.is_eager):
                break
            taken.append((option, rest[:size]))
            rest = rest[size:]
            if option.name in _SELECT:
                break
        return taken


def spelling(name: str) -> str:
    """Return an option in our spelling: --nproc-per-node for --nproc_per_node."""
    bare = name.lstrip("-")
    return name[: len(name) - len(bare)] + normalized(bare)


def close(name: str, known: Sequence[str]) -> str:
    """Return the known name of which this is probably a typo or a prefix; "" if no name is close."""
    from ddpjob_operator.job.typos import Typos

    bare = {other.lstrip("-"): other for other in known}
    name = normalized(name.lstrip("-"))
    begun = [other for other in bare if len(name) >= _BEGINNING_MIN and other.startswith(name)]
    alike = [other for other in bare if abs(len(other) - len(name)) <= 1]
    meant = begun[0] if len(begun) == 1 else Typos().meant(name, alike, cutoff=_CLOSE)
    return bare.get(meant, "")


_BEGINNING_MIN = 4
_CLOSE = 0.75  # minimum ratio of difflib: of four letters, one may have moved but none may be replaced


def keep_close(error: click.ClickException) -> None:
    """Replace click's suggestions for an unknown option or command by the closest name, or by nothing."""
    context = getattr(error, "ctx", None)
    if context is None:
        return
    if isinstance(error, click.NoSuchOption):
        options = [p for p in context.command.get_params(context) if isinstance(p, click.Option)]
        name, known = error.option_name, [name for option in options for name in option.opts]
    elif isinstance(context.command, click.Group) and hasattr(error, "command_name"):
        name, known = error.command_name, context.command.list_commands(context)
    else:
        return
    meant = close(name, known)
    vars(error)["possibilities"] = [meant] if meant else []


def _is_flag(option: click.Option) -> bool:
    return option.is_flag or option.count


def _flat(taken: Taken) -> list[str]:
    return [word for _, words in taken for word in words]


def _arranged(command: click.Command, ctx: click.Context, args: Sequence[str]) -> list[str]:
    """Return the words in the order that click parses: our options, `--`, the file, the script's. Raise UsageError."""
    known = {spelling(name): p for p in command.get_params(ctx) if isinstance(p, click.Option) for name in p.opts}
    line = _Line(ctx.command_path, known)
    taken = line.take(args, behind=False)
    rest = list(args[len(_flat(taken)) :])
    chosen = taken.pop() if taken and taken[-1][0].name in _SELECT else None
    line.before = _flat(taken)
    is_explicit = chosen is None and rest[:1] == ["--"]
    rest = rest[1:] if is_explicit else rest
    if chosen is None and not rest:
        return list(args)
    if chosen is not None:
        line.named = [*(["-m"] if chosen[0].name == "module" else []), _value(chosen[1])]
    elif rest[0].startswith("-") and rest[0] != "-" and not is_explicit:
        raise click.UsageError(_unknown(line, rest), ctx)
    else:
        line.named, rest = rest[:1], rest[1:]
    if not line.named[0].startswith("-") and is_program(line.named[0]):
        raise _refused(instead(line.program, [*line.named, *rest], line.before))
    from ddpjob_cli.commands import kinds

    is_job = line.named[0] not in ("-", "-m") and kinds.of(line.named[0]) == "job"
    return list(args) if is_job else _split(line, rest, is_explicit=is_explicit)


def _split(line: _Line, rest: list[str], *, is_explicit: bool) -> list[str]:
    """Return the words in click's order if the file is a script or a module. is_explicit: `--` was before the file."""
    from ddpjob_cli.commands import declared_options
    from ddpjob_operator.job.launch.command import Command

    is_module = line.named[0] == "-m"
    line.after = [] if is_explicit else line.take(rest, behind=True)
    rest = rest[len(_flat(line.after)) :]
    has_dashes = not is_explicit and rest[:1] == ["--"]
    line.words = rest[1:] if has_dashes else rest
    if line.after or (line.words and not has_dashes):
        declared = declared_options.of(Command(module=line.named[1]).files if is_module else line.named)
        _refuse_ambiguous(line, declared)
        if declared and not has_dashes:
            _say_what_is_handed_over(line, declared)
    ours = [*line.before, *(line.named if is_module else []), *_flat(line.after)]
    return [*ours, "--", *([] if is_module else line.named), *line.words]


def _value(words: Sequence[str]) -> str:
    """Return the value of an option: pkg for `-m pkg`, `-mpkg` and `--module=pkg`."""
    if len(words) > 1:
        return words[1]
    return words[0].partition("=")[2] if words[0].startswith("--") else words[0][2:]


def _refused(text: str) -> Exception:
    from ddpjob_cli.manifest.yamlfile import InputError

    return InputError(text)


# ---------------------------------------------------------------- errors and hints


def without_command(words: Sequence[str]) -> str:
    """Return what to type if a file or a launcher was given in place of a command; "" otherwise."""
    program = "ddpjob run"
    if is_program(words[0]):
        return instead(program, words)
    if words[0].endswith(_FILES) or os.path.isfile(words[0]):
        return f"{words[0]} is a file and not a command: {program} {shlex.join(words)}"
    return ""


def _unknown(line: _Line, rest: Sequence[str]) -> str:
    from ddpjob_operator.job.launch import command

    name = rest[0].partition("=")[0]
    if meant := close(name, list(line.options)):
        return f"No such option {name}; did you mean {meant}?"
    if name.lstrip("-").replace("-", "_") in command.OPTIONS:
        return (
            f"{name} is an option of torchrun, which {line.program} starts and configures itself: leave it out, or "
            f"make a job of the whole command: ddpjob convert -- torchrun …"
        )
    behind = line.text(*line.before, *_moved(line, rest))
    return f"{name} is not an option of {line.program}; options of the script follow the file: {behind}"


def _moved(line: _Line, rest: Sequence[str]) -> list[str]:
    """Return the arguments in the right order: the file before all options that are not ours."""
    at = next((i for i, word in enumerate(rest) if word.endswith(_SCRIPTS)), None)
    if not at:  # no file, or its name begins with a dash
        return ["FILE" if at is None else "--", *rest]
    ours: list[str] = []
    others: list[str] = []
    words = list(rest[:at])
    while words:
        found = line.match(words)
        size = 1 if found is None else found[1]
        (others if found is None else ours).extend(words[:size])
        words = words[size:]
    return [*ours, rest[at], *others, *rest[at + 1 :]]


def is_program(word: str) -> bool:
    """True for a program that starts scripts: torchrun, python, accelerate, nohup."""
    from ddpjob_operator.job.launch import command, programs

    name = programs.name(word)
    others = name in programs.FRAMEWORKS or name in programs.WRAPPERS or name in command.SHELLS
    return command.starts_scripts(name) or (others and not os.path.isfile(word))


def instead(program: str, words: Sequence[str], before: Sequence[str] = ()) -> str:
    """Return a sentence with what to type instead of a launcher, or python, with its script."""
    from ddpjob_convert.command import convert
    from ddpjob_convert.fields import ConvertError
    from ddpjob_operator.job.launch import command, programs

    # The launcher, or Python, may follow programs such as nohup.
    at = next((i for i, word in enumerate(words) if command.starts_scripts(programs.name(word))), 0)
    started = command.read(list(words))
    is_ddprun = "ddprun" in (programs.name(words[at]), started.launcher)
    is_torchrun = programs.name(words[at]) == "torchrun" or started.launcher.startswith("torch.distributed")
    if is_ddprun or is_torchrun or started.launcher in ("python", "torchrun") or len(words) == 1:
        begin = command.options_begin(list(words))
        given = {} if begin is None else command.read_options(list(words[begin:]))[0]
        ours = [word for name, own in _OF_LAUNCHERS.items() if name in given for word in (own, given[name])]
        if is_ddprun and program.split()[-1] != "run":  # only `run` uses ddprun for every image
            ours += ["--launcher", "ddprun"]
        typed = shlex.join([*before, *ours, *(started.named or ("FILE",)), *started.words])
        wrapped = f"{shlex.join(words[:at])} " if at else ""  # keep wrappers such as nohup
        return f"{words[at]}: leave it out, {program} takes the script itself: {wrapped}{program} {typed}"
    try:
        convert(words)
    except ConvertError as error:  # a launcher that starts the ranks of all nodes, or a shell script
        begin = next((i for i, word in enumerate(words) if word.endswith(_SCRIPTS)), None)
        if begin is None:
            return str(error)
        typed = shlex.join([*before, "--nodes", "NODES", "--nproc-per-node", "RANKS", *words[begin:]])
        return f"{words[0]}: leave it out, {program} starts the ranks of all nodes: {program} {typed}"
    then = f", then {program} job.yaml" if program.split()[-1] != "init" else ""
    return (
        f"{words[0]} is not a script; to make a job from a whole command: ddpjob convert -- {shlex.join(words)} > "
        f"job.yaml{then}"
    )


def _refuse_ambiguous(line: _Line, declared: frozenset[str]) -> None:
    """Raise InputError if an option directly after the file could also be the script's."""
    mine = {spelling(name) for name in declared}
    both = [words for _, words in line.after if spelling(_name(words[0])) in mine]
    if not both:
        return
    others = [word for _, words in line.after if words not in both for word in words]
    ours = line.text(*line.before, *_flat(line.after), *line.named, *line.words)
    theirs = line.text(*line.before, *others, *line.named, "--", *(w for words in both for w in words), *line.words)
    raise _refused(
        f"{line.named[-1]} has an option {_name(both[0][0])} too, so type {ours} for the option of {line.program}, or "
        f"{theirs} for the script's"
    )


def _name(word: str) -> str:
    return word.partition("=")[0] if word.startswith("--") else word[:2]


def _say_what_is_handed_over(line: _Line, declared: frozenset[str]) -> None:
    """Warn if the script gets an option of ours that it does not declare: the user probably meant it for ddpjob."""
    theirs = {spelling(name) for name in declared}
    for word in line.words:
        name = spelling(_name(word))
        is_theirs = any(other.startswith(name) for other in theirs)  # argparse accepts a prefix
        if word.startswith("--") and name in line.options and name != "--help" and not is_theirs:
            say(
                f"{_name(word)} goes to {line.named[-1]}, which declares no such option: options of {line.program} "
                "come before the file or directly after it"
            )
            return
