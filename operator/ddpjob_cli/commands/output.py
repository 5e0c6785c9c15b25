"""Answers on stdout."""

from __future__ import annotations

import os
import sys

import click


def answer(text: str) -> int:
    """Write an answer to stdout; the exit code. A reader that has closed it (`| head`) is no error."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        return closed(error)
    return 0


def write_printed(lines: bytes) -> None:
    """Write whole lines that a script has printed: unchanged to a pipe; a terminal gets text and colors alone."""
    if sys.stdout.isatty():
        from ddpjob_cli.describe.terminal import for_terminal

        lines = for_terminal(lines.decode(errors="replace")).encode()
    write(lines)


def write(data: bytes) -> None:
    """Write to stdout at once."""
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def closed(error: OSError) -> int:
    """The exit code where stdout takes no more: a full disk is said. Raises an error that is of a file."""
    if error.filename is not None:
        raise error
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes once more at exit, and would fail once more
    if isinstance(error, BrokenPipeError):
        return 0
    click.echo(f"stdout: {error.strerror}", err=True)
    return 1
