"""`ddpjob --help`: the commands by where they work."""

from __future__ import annotations

import click

SECTIONS = (
    ("On this machine", "run init check list logs report".split()),
    ("In a cluster", "submit get describe logs events top wait suspend resume restart scale delete".split()),
)
OTHERS = "More"


class Sections(click.Group):
    """A group whose help lists its commands in sections; what is in none comes last."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Called by click."""
        known = {name for _, names in SECTIONS for name in names}
        others = [name for name in self.list_commands(ctx) if name not in known]
        for title, names in (*SECTIONS, (OTHERS, others)):
            commands = [(name, self.get_command(ctx, name)) for name in names]
            rows = [(name, command.get_short_help_str(60)) for name, command in commands if command is not None]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
