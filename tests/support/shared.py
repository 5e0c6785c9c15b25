"""Resources that all processes of a test run share on a cluster: the first one creates them, and the last one removes
them; and work that only one process does at a time."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

T = TypeVar("T", bound=dict[str, object])


@contextlib.contextmanager
def made_once(what: str, make: Callable[[], T], remove: Callable[[T], None]) -> Iterator[T]:
    """Return what `make` has made here or in another process of this run. what: its name; make returns a JSON value.
    Processes wait while one makes or removes it."""
    with _locked(what) as file:
        users, made = json.loads(file.read_text() or "[0, null]")
        made = make() if made is None else made
        file.write_text(json.dumps([users + 1, made]))
    try:
        yield made
    finally:
        with _locked(what) as file:
            users, _ = json.loads(file.read_text())
            file.write_text(json.dumps([users - 1, made]) if users > 1 else "")
            if users == 1:
                remove(made)


@contextlib.contextmanager
def one_at_a_time(what: str) -> Iterator[None]:
    """Wait until no other process of this run is in this block."""
    with _locked(what):
        yield


@contextlib.contextmanager
def _locked(what: str) -> Iterator[Path]:
    """Lock the file that counts the users. The last one removes it."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or str(os.getpid())
    file = Path(tempfile.gettempdir(), f"ddpjob-tests-{run}-{what}")
    while True:
        with file.open("a") as opened:
            fcntl.flock(opened, fcntl.LOCK_EX)
            if not file.exists() or not os.path.samestat(os.fstat(opened.fileno()), file.stat()):
                continue  # its last user removed it while this process waited
            try:
                yield file
            finally:
                if not file.read_text():
                    file.unlink()
            return
