"""State machine of `memory.Keeper`: what a restart can rely on, and the events that change it.

The mode does not show at which boundary a rank is; its CLOCK does (`ddpjob_core/memory.py`).
"""

import enum
from typing import Literal

Event = Literal["named", "dropped", "proven", "reserved", "grown", "changes", "refused"]
"""named: the script passes objects. dropped: it trains others. proven: nothing large changes between a boundary and the
next step. changes: something large does. reserved: memory is there. grown: too little memory. refused: not kept."""


class Mode(enum.Enum):
    """The state that a restart in place can load."""

    EMPTY = enum.auto()
    """The folder, because the script has passed no objects."""
    PROVING = enum.auto()
    """The folder, until sums of all bits have shown at a few steps that nothing large changes before the step."""
    PROVEN = enum.auto()
    """The folder, because memory is still being reserved."""
    READY = enum.auto()
    """The state that a survivor writes; the agent waits for it."""
    COPYING = enum.auto()
    """The last copy (`copies.py`), because the state of a survivor may be wrong."""
    OFF = enum.auto()
    """The folder, until this process ends."""


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
    """Return the next mode: the same mode if the table has none, for example if memory was reserved for objects that
    are dropped."""
    return _NEXT[event].get(mode, mode)
