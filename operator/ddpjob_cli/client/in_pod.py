"""A program that `ddpjob dev --cluster` runs in a pod, with the pod's own Python (3.8 or newer). It writes changed
files, and signals node 0's agent to start the ranks again. kubectl sends its source, so it imports nothing of ours.

    python3 -I -S -c TEXT FOLDER [SIGNAL] < changes.json

changes.json: {"files": {path: [base64, mode]}, "links": {path: target}, "gone": [path, …]}. Exit code 3: no agent.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import sys
from typing import Any, Iterator  # noqa: UP035 - Python 3.8

NO_AGENT = 3
NEW = ".ddpjob-new"


def write(changes: dict[str, Any]) -> None:
    """Write the changes. Each file is replaced atomically, so a starting rank reads the old or the new text."""
    for path in changes["gone"]:
        if os.path.lexists(path):
            os.remove(path)
    for path, target in changes["links"].items():
        _make_room(path)
        os.symlink(target, path + NEW)
        os.replace(path + NEW, path)
    for path, (text, mode) in changes["files"].items():
        _make_room(path)
        with open(path + NEW, "wb") as file:
            file.write(base64.b64decode(text))
        os.chmod(path + NEW, mode)
        os.replace(path + NEW, path)


def _make_room(path: str) -> None:
    """Create the folder of a file. Remove a folder with the file's name; it may contain only __pycache__."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    if os.path.lexists(path + NEW):
        os.remove(path + NEW)


def agents(number: int) -> Iterator[int]:
    """Yield the ddprun processes that handle this signal. An agent without a handler is starting, and has no ranks."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                is_ours = b"ddprun" in file.read()
            with open(f"/proc/{pid}/status") as file:
                caught = next(line.split()[1] for line in file if line.startswith("SigCgt:"))
        except (OSError, StopIteration):
            continue
        if is_ours and int(caught, 16) >> (number - 1) & 1:
            yield int(pid)


def main() -> int:
    """Write the changes and signal the agents. Return the exit code."""
    os.chdir(sys.argv[1])
    write(json.load(sys.stdin))
    if len(sys.argv) < 3:
        return 0
    found = list(agents(int(sys.argv[2])))
    for pid in found:
        os.kill(pid, int(sys.argv[2]))
    return 0 if found else NO_AGENT


if __name__ == "__main__":
    sys.exit(main())
