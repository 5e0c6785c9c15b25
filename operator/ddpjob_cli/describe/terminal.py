"""Clean the output of scripts for a terminal. Colors and carriage returns are kept. Sequences for titles, cursor moves,
links and the clipboard (OSC 52) are removed. Otherwise a line of a log could hide or replace lines above it."""

from __future__ import annotations

import codecs
import re

HELD_MAX = 4096
_COLORS = r"\x1b\[[0-9;:]{0,64}m"
_OBEYED = re.compile(
    rf"({_COLORS})"
    # A control string, such as a window title. Without its end mark it ends with the line.
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|\x1b[ -/]*[0-~]"
    r"|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]"
)
_UNFINISHED = re.compile(
    r"(?:(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n]*|(?:\x1b\[|\x9b)[0-?]*[ -/]*|\x1b[ -/]*)\Z"
)
_OPENERS = "\x1b\x90\x98\x9b\x9d\x9e\x9f"


def for_terminal(text: str) -> str:
    """Return whole lines without control sequences except colors and line ends."""
    return _OBEYED.sub(r"\1", text)


class TerminalPieces:
    """Cleans text in pieces, which may end in the middle of a character or a sequence."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def feed(self, piece: bytes, *, last: bool = False) -> str:
        text = self._held + self._decoder.decode(piece, last)
        begin = max(text.rfind(letter) for letter in _OPENERS)
        unfinished = None if last or begin < 0 else _UNFINISHED.match(text, begin)
        end = len(text) if unfinished is None or len(text) - begin > HELD_MAX else begin
        self._held = text[end:]
        return for_terminal(text[:end])
