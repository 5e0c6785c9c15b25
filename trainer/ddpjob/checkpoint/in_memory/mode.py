"""How far the memory of a process has come, and what changes that: one table, which `memory.Keeper` goes through.

The boundary that a rank is at is another matter: its clock (`ddpjob_core/memory.py`).
"""

import enum
from typing import Literal

Event = Literal["named", "dropped", "proven", "reserved", "grown", "changes", "refused"]
"""The script names objects; it trains others; nothing large changes between a boundary and the next step; there is
room; no longer; something large does change there; this state cannot be kept."""


class Mode(enum.Enum):
    """What a restart can rely on."""

    EMPTY = enum.auto()
    """No objects are named: the folder."""
    PROVING = enum.auto()
    """All bits are summed at both ends of the first steps: the folder until then."""
    PROVEN = enum.auto()
    """Memory is being reserved."""
    READY = enum.auto()
    """A survivor writes the state, and the agent waits for it."""
    COPYING = enum.auto()
    """The last copy (`copies.py`): what a survivor has may be wrong."""
    OFF = enum.auto()
    """The folder, for good."""


_NEXT: dict[Event, dict[Mode, Mode]] = {
    "named": {Mode.EMPTY: Mode.PROVING},
    "dropped": {Mode.PROVING: Mode.EMPTY, Mode.PROVEN: Mode.EMPTY, Mode.READY: Mode.EMPTY},
    "proven": {Mode.PROVING: Mode.PROVEN},
    "reserved": {Mode.PROVEN: Mode.READY},
    "grown": {Mode.READY: Mode.PROVEN},
    "changes": dict.fromkeys([Mode.EMPTY, Mode.PROVING, Mode.PROVEN, Mode.READY], Mode.COPYING),
    "refused": dict.fromkeys(Mode, Mode.OFF),
}


def after(mode: Mode, event: Event) -> Mode:
    """The mode that follows: the same where the table has none, as when room comes for objects that were dropped."""
    return _NEXT[event].get(mode, mode)
