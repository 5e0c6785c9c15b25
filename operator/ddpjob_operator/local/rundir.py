"""The folder of one run: logs, volumes and the token. Logs of the last runs stay, the rest goes with the run."""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from pathlib import Path

RUNS_KEPT = 10


class RunFolder:
    """`<state>/ddpjob/<job>/<uid>`, locked while the run lives so that no other run clears it away."""

    def __init__(self, job: str, base: Path | None = None) -> None:
        self.uid = str(uuid.uuid4())
        jobs = (base or state_home() / "ddpjob").absolute() / job
        jobs.mkdir(parents=True, exist_ok=True)
        _clear_old(jobs)
        self.path = jobs / self.uid
        self.path.mkdir(mode=0o700)
        self._lock = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        """Remove all but the logs."""
        shutil.rmtree(self.path / "volumes", ignore_errors=True)
        for leftover in ("token", "lock"):
            (self.path / leftover).unlink(missing_ok=True)
        os.close(self._lock)


def state_home() -> Path:
    """$XDG_STATE_HOME, ~/.local/state where it is not set."""
    given = os.environ.get("XDG_STATE_HOME", "")
    return Path(given) if given.startswith("/") else Path.home() / ".local" / "state"


def _clear_old(jobs: Path) -> None:
    """Keep the newest runs. A run that was killed left its volumes and its lock file; the lock itself is free."""
    runs = sorted((p for p in jobs.iterdir() if p.is_dir()), key=lambda p: p.stat().st_mtime, reverse=True)
    for i, run in enumerate(runs):
        if _is_running(run):
            continue
        if i >= RUNS_KEPT - 1:
            shutil.rmtree(run, ignore_errors=True)
        else:
            shutil.rmtree(run / "volumes", ignore_errors=True)


def _is_running(run: Path) -> bool:
    try:
        lock = os.open(run / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False
