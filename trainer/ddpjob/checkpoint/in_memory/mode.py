"""State machine of `memory.Keeper`: from where a restart can load the state, and the events that change this.

The mode does not show at which step a rank is; its CLOCK does (`ddpjob_core/memory.py`).
"""

import enum
from typing import Literal

Event = Literal["named", "dropped", "proven", "reserved", "grown", "changes", "refused"]
"""named: the script passes objects. dropped: the script trains other objects. proven: only optimizers change
parameters. changes: the script changes parameters, too. reserved: memory is reserved for the state. grown: the state
has outgrown that memory. refused: the state cannot be kept."""


class Mode(enum.Enum):
    """What a restart in place loads: the last save in the folder, or a state in memory."""

    EMPTY = enum.auto()
    """A restart loads from the folder, because the script has passed no objects."""
    PROVING = enum.auto()
    """A restart loads from the folder, until PROOF_STEPS steps have shown that only optimizers change parameters."""
    PROVEN = enum.auto()
    """A restart loads from the folder, because memory is still being reserved."""
    READY = enum.auto()
    """A restart loads the state that a surviving rank writes; the agent waits for that rank."""
    COPYING = enum.auto()
    """A restart loads the last copy (`by_cadence/`), because a state that a survivor writes may be wrong."""
    OFF = enum.auto()
    """A restart loads from the folder, until this process ends."""


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
    """Return the mode after this event: the same mode if `_NEXT` has none."""
    return _NEXT[event].get(mode, mode)
