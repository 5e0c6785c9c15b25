"""Read the state of threads from /proc. Standard library only, because the agent uses it too."""

import contextlib
import os


def is_held_up(pid: int) -> bool:
    """True if a thread of this process is running, is waiting for a processor, or is waiting for a disk.

    False for threads that are stopped (SIGSTOP), wait for anything else, or have ended.
    """
    with contextlib.suppress(OSError):
        return any(would_run(pid, int(thread)) for thread in os.listdir(f"/proc/{pid}/task"))
    return False


def would_run(pid: int, thread: int) -> bool:
    """Like `is_held_up`, for one thread."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/stat", "rb") as stat:
        after_name = stat.read().rpartition(b")")[2]  # the name may contain spaces
        return after_name.split()[0] in (b"R", b"D")
    return False


def times_run(pid: int) -> str:
    """Return pid and context switch counts of a process if its main thread is sleeping, else "".

    If two answers are equal, the thread has not run in between. A thread that is stopped (SIGSTOP) or waits for a disk
    does not count as sleeping.
    """
    with (
        contextlib.suppress(OSError),
        open(f"/proc/{pid}/task/{pid}/status", encoding="ascii", errors="replace") as file,
    ):
        lines = [line for line in file if line.startswith(("State:", "voluntary_ctxt", "nonvoluntary_ctxt"))]
        if len(lines) == 3 and "S (sleeping)" in lines[0]:
            return f"{pid} " + " ".join(line.split()[1] for line in lines[1:])
    return ""
