"""Lines at the bottom of a terminal that are redrawn in place, while others scroll above them.

rich.live would do but for two things: it erases as many rows as it has drawn, and a terminal that has become narrower
shows them as more; and it goes on drawing when the shell has the terminal back.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from ddpjob_cli.local.shown.table import Line

if TYPE_CHECKING:
    from rich.console import Console


class Board:
    """The lines at the bottom; `erase` them before anything else is printed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._drawn: list[int] = []
        """The columns of each line that stands there."""

    def draw(self, lines: Iterable[Line]) -> None:
        """Show these lines in the place of the ones before."""
        from rich.text import Text

        lines = list(lines)
        with self._console:  # one write
            self.erase()
            self._console.show_cursor(False)
            texts = [Text.assemble(*line) for line in lines]
            whole = Text("\n").join(texts)
            self._console.print(whole, end="", no_wrap=True, overflow="ignore", crop=False, highlight=False)
        self._drawn = [text.cell_len for text in texts]

    def erase(self) -> None:
        """Remove the lines; the cursor is where the first of them began."""
        from rich.control import Control
        from rich.segment import ControlType

        if not self._drawn:
            return
        width = max(1, self._console.width)
        rows = sum(max(1, -(-columns // width)) for columns in self._drawn)
        up = [(ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)] * (rows - 1)
        self._console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2), *up))
        self._drawn = []

    def leave(self) -> None:
        """Give the terminal back: nothing of ours stands there, and the cursor is shown."""
        with self._console:
            self.erase()
            self._console.show_cursor(True)

    def forget(self) -> None:
        """What stands there belongs to the scrolled lines from now on: the shell has printed below it."""
        self._drawn = []


def has_terminal(groups: Collection[int]) -> bool:
    """True if one of these process groups is in the foreground of the terminal on stderr."""
    try:
        return os.tcgetpgrp(2) in groups
    except OSError:  # a terminal, but not the one that controls us: nobody else types there
        return True
