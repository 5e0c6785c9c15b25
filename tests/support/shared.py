"""Cluster resources that all processes of a test run share: the first process creates them, and the last process
removes them. Also work that only one process may do at a time."""

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
    """Yield the value of `make`, called in this or another process of this run. what: name of the resource. make:
    returns a JSON value. While one process makes or removes the resource, the others wait."""
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
    """Let only one process of this run at a time into the `with` block. what: a name for the block."""
    with _locked(what):
        yield


@contextlib.contextmanager
def _locked(what: str) -> Iterator[Path]:
    """Lock the file that counts the processes that use a resource. The last one removes the file."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or str(os.getpid())
    file = Path(tempfile.gettempdir(), f"ddpjob-tests-{run}-{what}")
    while True:
        with file.open("a") as opened:
            fcntl.flock(opened, fcntl.LOCK_EX)
            if not file.exists() or not os.path.samestat(os.fstat(opened.fileno()), file.stat()):
                continue  # the last process that used it has removed the file
            try:
                yield file
            finally:
                if not file.read_text():
                    file.unlink()
            return
