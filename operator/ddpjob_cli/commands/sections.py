"""`ddpjob --help`: the commands grouped by where they work."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from typing import Any, TypeVar

import click

from ddpjob_cli.commands import script_words

F = TypeVar("F", bound=Callable[..., Any])

SECTIONS = (
    ("On this machine", "run dev init check list logs stacks report".split()),
    ("In a cluster", "submit get describe logs events top wait suspend resume restart scale delete".split()),
)
OTHERS = "More"


class AsPath(click.Path):
    """click.Path whose value is a pathlib.Path. The import is late, because pathlib and its imports take 5 ms."""

    def coerce_path_result(self, value: str | bytes | os.PathLike[str]) -> Any:
        """Convert the option's value to a pathlib.Path."""
        from pathlib import Path

        return Path(os.fsdecode(value))


class RareOption(click.Option):
    """An option that the help of `Brief` only mentions in a few words, in its last section."""


def launcher(about: str, *, rare: bool = True) -> Callable[[F], F]:
    """Return the decorator that adds --launcher."""
    kind = RareOption if rare else click.Option
    names = click.Choice(["ddprun", "torchrun"])
    return click.option("--launcher", cls=kind, metavar="NAME", type=names, help=about)


class Brief(script_words.ScriptCommand):
    """A command for scripts with many options, whose help fits on a screen of 24 lines."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the options, and name the rare ones in one paragraph."""
        listed: list[tuple[str, str]] = []
        rare: list[str] = []
        for option in (param for param in self.get_params(ctx) if isinstance(param, click.Option)):
            record = option.get_help_record(ctx)
            if record is not None and isinstance(option, RareOption):
                rare.append(f"{record[0]} ({record[1]})")
            elif record is not None:
                listed.append(record)
        with formatter.section("Options"):
            formatter.write_dl(listed)
        with formatter.section("More"):
            formatter.write_text(", ".join(rare))


class Sections(click.Group):
    """A group whose help lists its commands in sections. Commands without a section come last."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Explain an option of `run` that was given without the command."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            of_run = [name for param in self.commands["run"].get_params(ctx) for name in param.opts]
            if script_words.spelling(error.option_name) not in of_run:
                raise
            text = f"{error.option_name} is an option of a command, which comes first: {ctx.command_path} run"
            raise click.UsageError(f"{text} {shlex.join(given)}", ctx) from None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Explain a file or a launcher that was given in place of a command."""
        is_command = args[0].startswith("-") or self.get_command(ctx, args[0]) is not None
        if not is_command and not ctx.resilient_parsing and (text := script_words.without_command(args)):
            raise click.UsageError(text, ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands by section."""
        known = {name for _, names in SECTIONS for name in names}
        others = [name for name in self.list_commands(ctx) if name not in known]
        for title, names in (*SECTIONS, (OTHERS, others)):
            commands = [(name, self.get_command(ctx, name)) for name in names]
            rows = [(name, command.get_short_help_str(60)) for name, command in commands if command is not None]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
