"""A test of `make quick` fails if it starts a process: processes are slow, and flaky on a busy machine."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_FOLDERS = {"unit", "property", "simulation"}  # tests/chart starts helm
_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"}
_forbidden = False
_hooked = False


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if _forbidden and event in _STARTS:
        pytest.fail(f"{event}{arguments[:2]}: a test of `make quick` starts a process; move it to tests/processes")


def is_quick(test: pytest.Item) -> bool:
    folder = test.path.relative_to(Path(__file__).parents[1]).parts[0]
    return folder in _FOLDERS and test.get_closest_marker("long") is None


@contextlib.contextmanager
def forbidden() -> Iterator[None]:
    """Fail the test that starts a process within this `with` block."""
    global _forbidden, _hooked
    if not _hooked:  # it cannot be removed again, and slows down the processes that other tests fork
        sys.addaudithook(_refuse)
        _hooked = True
    _forbidden = True
    try:
        yield
    finally:
        _forbidden = False
