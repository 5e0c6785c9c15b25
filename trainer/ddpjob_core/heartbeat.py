"""The memory that the ranks of a node share with their agent: `watchdog.py` writes it, `ddprun/heartbeats.py` reads it.

One page for each rank. It begins with cells of 8 bytes, an answer to the agent's question follows:

    PID         of the process that writes here: the first of the rank that does; 0: none
    PHASE       index in PHASES; "" where the script does not use the library
    STEP        of the last call of `progress`, or the one that was loaded
    COLLECTIVES begun in the default group; counted by the watchdog's thread while no step is reported
    ASKED       how often the agent has asked; ANSWERED: which of its questions the answer is for
    OVER        1: the default group was left, or the script has ended; what is left to do needs no other rank
    SAVED       the step of the newest checkpoint that `Snapshot` has saved or loaded; 0: none
    LENGTH      of the answer: {"step": 41, "where": "train.py:41 in load", "sequence": 7, "op": "…", "done": true}
    COMPLETED   1: a collective of the default group has completed
    KIND        of the question: LOUD: also writes its stacks to its stderr; QUIET: what it waits in; STACK: its stack
    FAILED      1: the agent ends the ranks, because one of the group has failed; set before SIGTERM
    WAITED_IN   the last collective of the default group, of a rank that ends by the timeout of one; 0: it does not
"""

from typing import Literal

PHASES: tuple[Literal["", "start", "train", "save", "evaluate"], ...] = ("", "start", "train", "save", "evaluate")
PID, PHASE, STEP, COLLECTIVES, ASKED, ANSWERED, LENGTH, OVER, SAVED, WAITED_IN, KIND, COMPLETED, FAILED = range(13)
LOUD, QUIET, STACK = range(3)
CELLS_BYTES = 104
PAGE_BYTES = 4096
NOTICE = "=q"  # what a process writes into the notify pipe when it begins to train: its number
# SIGRTMIN + 11: real-time, so that no script and no library has another use for it; sent only to who handles it.
STACKS_SIGNAL = 45
# To node 0's agent in a session of `ddpjob dev`: start all ranks again.
RERUN_SIGNAL = 46
