"""The memory that the ranks of a node share with their agent: `watchdog.py` writes it, `ddprun/heartbeats.py` reads it.

One page for each rank: cells of 8 bytes, then the answer to the agent's last request. The cells:

    PID         of the process that writes here: the first process of the rank that reports; 0: none
    PHASE       index in PHASES; "" if the script does not use the library
    STEP        step of the last call of `progress`, or the step that was loaded
    COLLECTIVES number begun in the default group; the watchdog's thread counts while no step is reported
    ASKED       number of the agent's last request; ANSWERED: number of the request that was answered last
    OVER        1: the rank has left the default group, or its script has ended, so it needs no other rank any more
    SAVED       step of the newest checkpoint that `Snapshot` has saved or loaded; 0: none
    LENGTH      of the answer: {"step": 41, "where": "train.py:41 in load", "sequence": 7, "op": "…", "done": true}
    COMPLETED   1: at least one collective of the default group has completed
    KIND        of the request. LOUD: position, and stacks on stderr; QUIET: the call it waits in; STACK: its stack
    FAILED      1: a rank of the group has failed, so the agent ends all ranks; set before SIGTERM
    WAITED_IN   number of the last collective of the default group, if the rank ends because it timed out; else 0
"""

from typing import Literal

PHASES: tuple[Literal["", "start", "train", "save", "evaluate"], ...] = ("", "start", "train", "save", "evaluate")
PID, PHASE, STEP, COLLECTIVES, ASKED, ANSWERED, LENGTH, OVER, SAVED, WAITED_IN, KIND, COMPLETED, FAILED = range(13)
LOUD, QUIET, STACK = range(3)
CELLS_BYTES = 104
PAGE_BYTES = 4096
NOTICE = "=q"  # struct format of a PID: a process writes its own into the notify pipe when it begins to train
# SIGRTMIN + 11: scripts and libraries hardly use real-time signals.
# The agent sends this signal only to processes with a handler, because it would end any other process.
STACKS_SIGNAL = 45
# Sent to node 0's agent in a session of `ddpjob dev` to start all ranks again.
RERUN_SIGNAL = 46
