"""Answers on stdout."""

from __future__ import annotations

import os
import sys

import click


def answer(text: str) -> int:
    """Write an answer to stdout; return the exit code. A reader that has closed it (`| head`) is not an error."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        return closed(error)
    return 0


def write_printed(lines: bytes) -> None:
    """Write whole lines that a script has printed: unchanged to a pipe, only text and colors to a terminal."""
    if sys.stdout.isatty():
        from ddpjob_cli.describe.terminal import for_terminal

        lines = for_terminal(lines.decode(errors="replace")).encode()
    write(lines)


def write(data: bytes) -> None:
    """Write to stdout without buffering."""
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def closed(error: OSError) -> int:
    """Return the exit code for a closed or full stdout; a full disk is reported. Raise an error that concerns another
    file."""
    if error.filename is not None:
        raise error
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes again at the exit, and would fail again
    if isinstance(error, BrokenPipeError):
        return 0
    click.echo(f"stdout: {error.strerror}", err=True)
    return 1
