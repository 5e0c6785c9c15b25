"""Process groups of gloo are kept for ever: for `init`, and for every rank that ddprun forks.

The destructor of such a group joins gloo's threads while it holds the interpreter's lock; one that has just finished a
collective wants that lock to release the tensor (ProcessGroupGloo::runLoop -> decref_pyobject). Whoever drops the last
reference hangs then: close() did in 5 of 46 groups of 3, with stacks that show it, and the DDP model does as well at
the end of a script (2 of 16). A collective still under way holds the destructor until its time-out besides (20 s of
20 s). Kept, its threads and sockets end with the process.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any


def never_destroy(group: Any) -> None:
    """Keep one reference for ever."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def keep_all_of(c10d: Any) -> None:
    """Every group of gloo that this module of torch makes from now on, also by new_group. Where this function of torch
    has another name, only those of `ddpjob.init` are kept."""
    make = getattr(c10d, "_new_process_group_helper", None)
    if make is None:
        return

    def make_and_keep(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        with contextlib.suppress(Exception):
            group = made[0] if isinstance(made, tuple) else made
            if "gloo" in str(c10d.get_backend_config(group)):  # "cpu:gloo,cuda:nccl" where there are two
                never_destroy(group)
        return made

    c10d._new_process_group_helper = make_and_keep
