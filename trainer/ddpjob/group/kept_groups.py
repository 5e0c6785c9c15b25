"""Process groups of gloo are kept for ever: for `init`, and for every rank that ddprun forks.

The destructor of such a group joins gloo's threads while it holds the interpreter's lock; one that has just finished a
collective wants that lock to release the tensor (ProcessGroupGloo::runLoop -> decref_pyobject). Whoever drops the last
reference hangs then: close() did in 5 of 46 groups of 3, with stacks that show it, and the DDP model does as well at
the end of a script (2 of 16). A collective still under way holds the destructor until its time-out besides (20 s of
20 s). Kept, its threads and sockets end with the process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
from typing import Any

SETTLE_SECONDS = 2.0  # as `init` waits for collectives that nobody waited for; they take milliseconds
SETTLE_AFTER_ERROR_SECONDS = 0.2  # the peers are in a collective then, and shall hear of it


def never_destroy(group: Any) -> None:
    """Keep one reference for ever."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def keep_all_of(c10d: Any) -> None:
    """Every group of gloo that this module of torch makes from now on, also by new_group; and this process ends when
    their threads are idle (gloo_teardown.py says why). Where this function of torch has another name, only those of
    `ddpjob.init` are kept."""
    make = getattr(c10d, "_new_process_group_helper", None)
    if make is None:
        return
    process = os.getpid()

    def make_and_keep(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        with contextlib.suppress(Exception):
            group = made[0] if isinstance(made, tuple) else made
            if "gloo" in str(c10d.get_backend_config(group)):  # "cpu:gloo,cuda:nccl" where there are two
                never_destroy(group)
                atexit.unregister(end_in_order)
                atexit.register(end_in_order, process)
        return made

    c10d._new_process_group_helper = make_and_keep


def end_in_order(process: int) -> None:
    """Wait until gloo's threads are idle, in the process that has them and not in a fork of it."""
    if os.getpid() == process:
        from ddpjob.group.gloo_teardown import settle

        failed = hasattr(sys, "last_traceback")
        settle(SETTLE_AFTER_ERROR_SECONDS if failed else SETTLE_SECONDS, wait_for_work=not failed)
