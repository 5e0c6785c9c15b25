"""Read the stacks of processes that cannot answer, by py-spy if it is installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from itertools import takewhile

from ddpjob.reporting import frames
from ddpjob.reporting.frames import FORK_SERVER, Frame

SECONDS = 5.0


def program() -> str | None:
    """Return the path of py-spy, also if this Python's environment is not activated; None if it is not installed."""
    return shutil.which("py-spy", path=os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", ""))))


def stack(program: str, pid: int) -> list[str]:
    """Return the calls of a process's main thread, folded; one line with the reason if py-spy cannot read them."""
    command = [program, "dump", "--nonblocking", "--json", "--pid", str(pid)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS, check=False)
        threads = (
            {thread["os_thread_id"]: thread["frames"] for thread in json.loads(done.stdout)} if done.stdout else {}
        )
        running = [Frame(call["filename"], call["line"], call["name"]) for call in threads.get(pid, [])]
    except (OSError, subprocess.TimeoutExpired, ValueError, TypeError, KeyError) as error:
        return [f"py-spy: {error}"]
    said = done.stderr.decode(errors="replace").strip().splitlines()
    if not running:
        return [f"py-spy: {said[-1] if said else 'no Python frame'}"]
    return frames.folded(list(takewhile(lambda frame: frame.file != FORK_SERVER, running)))
