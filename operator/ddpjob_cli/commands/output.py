"""Print answers to stdout, and messages to stderr."""

from __future__ import annotations

import os
import sys

import click


def answer(text: str) -> int:
    """Write an answer to stdout; return the exit code. A reader that has closed stdout (`| head`) is no error."""
    try:
        sys.stdout.write(_shown(text))
        sys.stdout.flush()
    except OSError as error:
        return closed(error)
    return 0


def say(text: str) -> None:
    """Print a sentence to stderr, without control characters."""
    from ddpjob_operator.failures.redaction import clean

    click.echo(clean(text), err=True)


def write_printed(lines: bytes) -> None:
    """Write whole lines that a script has printed: unchanged to a pipe, only text and colors to a terminal."""
    write(_shown(lines.decode(errors="replace")).encode() if _is_terminal() else lines)


def _shown(text: str) -> str:
    """Return lines without escape sequences if stdout is a terminal, because a stranger's text may contain them."""
    if not _is_terminal():
        return text
    from ddpjob_cli.describe.terminal import for_terminal

    return for_terminal(text)


def _is_terminal() -> bool:
    return sys.stdout.isatty()


def write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def closed(error: OSError) -> int:
    """Return the exit code for a closed or full stdout. Raise the error if it concerns another file."""
    if error.filename is not None:
        raise error
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # to /dev/null, or Python's flush at exit would fail again
    if isinstance(error, BrokenPipeError):
        return 0
    say(f"stdout: {error.strerror}")
    return 1
