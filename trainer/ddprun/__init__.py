"""The agent in each pod, `ddprun`: start it in place of torchrun, and nothing else changes.

    ddprun --nproc-per-node 4 train.py --lr 0.1

It starts the ranks of its node with torchrun's environment, forked from a process that has imported torch already. When
a rank fails, the leader's agent (node 0's) lets all ranks of the job start again in their pods, on a new port (a new
generation).

    options.py         torchrun's options                 environment.py  variables and command line of a rank
    run.py             puts an agent together             wire.py         the protocol between agents
    agent.py           the loop: signals, sockets, time
    leader.py          the agent of node 0                follower.py     the agents of all other nodes
    asking.py          who leads, and in which term         calls.py        work in a child process
    node.py            the ranks of this node              processes.py    fork, exec, signals, the tree
    forkserver.py      the process with torch in it       preload.py      the agent's connection to it
    heartbeats.py      shared memory of heartbeats       watch_ranks.py  the watchdog: reads them, asks for positions
    posting.py         reports of restarts                logs.py         files, tee, filters
    core/              the decisions: no I/O, no clock (leader_state, charges, stall_rules, stall_monitor)

In:   torchrun's command line and variables, and the pod's (`DDPJOB_…`).
Out:  ranks, their logs, the exit code of the job's first failure, reports to the operator.
Called by: the command in a pod, or by hand on any machine.
Must not know: Kubernetes, the operator, torch (its fork server imports torch). Rules shared with the operator are in
`ddpjob_core`. From the library (`ddpjob`) it uses how ranks report, and helpers for files, threads and memory.

Imports only the standard library, and little of it, because a job waits for these imports.
"""

from __future__ import annotations

import contextlib
import os
import sys


def main() -> None:
    """Run the console script. Exit with the code of the job's first failure, or 128 + n for signal n."""
    from ddprun.options import parse

    options = parse(sys.argv[1:], os.environ)
    from ddprun import foreign_children, processes

    processes.open_streams()
    foreign_children.stand_apart()  # before most imports: if this forks, the parent only waits and needs none of them
    from ddprun.run import run

    code = run(options, os.environ)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, AttributeError):  # a stream that was closed at the start is None
            stream.flush()
    os._exit(code)  # skips Python's shutdown, which takes as long as its start
