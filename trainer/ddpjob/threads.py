"""What the kernel says of threads. Standard library only: the agent and its ranks ask it."""

import contextlib
import os


def is_held_up(pid: int) -> bool:
    """Whether a thread of this process runs, would run if it had a processor, or waits for a disk.

    Not one that was stopped (SIGSTOP), that waits for something else, or has ended.
    """
    with contextlib.suppress(OSError):
        return any(would_run(pid, int(thread)) for thread in os.listdir(f"/proc/{pid}/task"))
    return False


def would_run(pid: int, thread: int) -> bool:
    """The same of one thread."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/stat", "rb") as stat:
        after_name = stat.read().rpartition(b")")[2]  # which may hold spaces
        return after_name.split()[0] in (b"R", b"D")
    return False
