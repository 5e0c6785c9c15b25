"""Shorten a Python stack for people: the script's own frames, innermost first, and one line for all others."""

import json
import os
from collections.abc import Sequence
from typing import NamedTuple

FRAMES_MAX, BYTES_MAX = 20, 3000  # an answer to ddprun must fit into 4 KiB
TEXT_CHARACTERS_MAX = 120
_LIBRARY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_AGENT = os.path.join(os.path.dirname(_LIBRARY), "ddprun")
FORK_SERVER = os.path.join(_AGENT, "forkserver.py")
_LIBRARIES = (os.path.dirname(os.__file__), _LIBRARY, _AGENT, "<frozen")


class Frame(NamedTuple):
    """A call that is running."""

    file: str
    line: int
    function: str

    @property
    def is_of_script(self) -> bool:
        """True if the code is outside Python's library and installed packages."""
        return not self.file.startswith(_LIBRARIES) and "-packages" not in self.file

    @property
    def line_of_traceback(self) -> str:
        """Return the call as Python prints it, without the source line, which may be on the disk that hangs."""
        return f'    File "{self.file}", line {self.line}, in {self.function}'

    @property
    def place(self) -> str:
        """Return for example `train.py:41 in load_batch`."""
        return f"{os.path.basename(self.file)}:{self.line} in {self.function}"[:TEXT_CHARACTERS_MAX]


def innermost(frames: Sequence[Frame]) -> str:
    """Return the place of the innermost call of the script, else of the innermost of all; "" without frames."""
    found = [frame for frame in frames if frame.is_of_script] or frames
    return found[0].place if found else ""


def folded(frames: Sequence[Frame]) -> list[str]:
    """Return the script's frames, and one line for those of libraries. frames: innermost first."""
    own = [frame.place for frame in frames if frame.is_of_script]
    others = [frame for frame in frames if not frame.is_of_script]
    lines: list[str] = []
    if others:
        count = f"{len(others)} frame{'s' * (len(others) > 1)} of libraries, innermost {others[0].place}"
        lines = [f"(above it {count})" if own else f"({count})"]
    shown = own[:FRAMES_MAX] + ([f"… {len(own) - FRAMES_MAX} more"] if len(own) > FRAMES_MAX else [])
    while len(json.dumps(shown + lines)) > BYTES_MAX:  # non-ASCII names take six bytes per letter
        shown.pop()
    return shown + lines
