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
        # Python flushes once more at exit, and would fail once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if not isinstance(error, BrokenPipeError):
            click.echo(f"stdout: {error.strerror}", err=True)
            return 1
    return 0
