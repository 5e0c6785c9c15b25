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


def times_run(pid: int) -> str:
    """Return how often the kernel has run the main thread of this process, if it sleeps now; "" otherwise.

    The same answer twice: it has not run in between. A stopped process (SIGSTOP), or one that waits for a disk, does
    not sleep.
    """
    with (
        contextlib.suppress(OSError),
        open(f"/proc/{pid}/task/{pid}/status", encoding="ascii", errors="replace") as file,
    ):
        lines = [line for line in file if line.startswith(("State:", "voluntary_ctxt", "nonvoluntary_ctxt"))]
        if len(lines) == 3 and "S (sleeping)" in lines[0]:
            return f"{pid} " + " ".join(line.split()[1] for line in lines[1:])
    return ""
