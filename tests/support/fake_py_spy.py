"""A py-spy that answers the same for every process."""

import json
import os
from pathlib import Path

FRAMES = [
    {"filename": "/usr/lib/python3/dist-packages/time.py", "line": 1, "name": "wait"},
    {"filename": "/app/silent.py", "line": 3, "name": "load"},
]


def path_with_py_spy(folder: Path) -> str:
    """Return a PATH on which py-spy is found first."""
    program = folder / "py-spy"
    program.parent.mkdir()
    program.write_text(f"""#!/bin/sh\necho '[{{"os_thread_id": '"$5"', "frames": {json.dumps(FRAMES)}}}]'\n""")
    program.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"
