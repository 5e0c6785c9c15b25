"""Fixtures that the tests of the local run share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from shell import Cli


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    found = Cli(tmp_path)
    yield found
    survivors = found.marked()
    for process in survivors:
        process.kill()
    assert not survivors, "a run leaves no process behind"
