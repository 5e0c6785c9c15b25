"""The commands about the command line itself: `ddpjob schema`, `completion`, `version` and `help`."""

from __future__ import annotations

import click

from ddpjob_cli.commands.output import answer

SHELLS = ("bash", "zsh", "fish")

EPILOG = """\b
Examples:
  bash: ddpjob completion bash > ~/.local/share/bash-completion/completions/ddpjob
  zsh:  ddpjob completion zsh > ~/.zfunc/_ddpjob    (fpath+=~/.zfunc before compinit in ~/.zshrc)
  fish: ddpjob completion fish > ~/.config/fish/completions/ddpjob.fish"""


@click.command(short_help="Print the JSON Schema, for editors.", epilog="Example: ddpjob schema > ddpjob.schema.json")
def schema() -> int:
    """Print the JSON Schema of DDPJob, with which editors complete and check its YAML."""
    from ddpjob_operator.job.schema import to_json

    return answer(to_json())


@click.command(short_help="Print the completion script for a shell.", epilog=EPILOG)
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> int:
    """Print the completion script of ddpjob for a shell."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None  # click has all of SHELLS
    # click's source() is not used, because it runs bash to check its version, and warns.
    script = kind(context.find_root().command, {}, "ddpjob", "_DDPJOB_COMPLETE")
    return answer(script.source_template % script.source_vars())


@click.command()
@click.pass_context
def version(context: click.Context) -> int:
    """Print the version, as --version does."""
    from importlib import metadata

    return answer(f"{context.find_root().info_name} {metadata.version('ddpjob')}\n")


@click.command("help", epilog="Example: ddpjob help run")
@click.argument("command", required=False)
@click.pass_context
def help_(context: click.Context, command: str | None) -> int:
    """Show the help of ddpjob or of a command, as --help does."""
    root = context.find_root()
    group = root.command
    assert isinstance(group, click.Group)
    if command is None:
        return answer(root.get_help() + "\n")
    found = group.get_command(root, command)
    if found is None:
        raise click.UsageError(f"no such command '{command}'; ddpjob help lists them", root)
    with click.Context(found, info_name=command, parent=root) as inner:
        return answer(found.get_help(inner) + "\n")


COMMANDS = (schema, completion, version, help_)
