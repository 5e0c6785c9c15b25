"""What the tests of ddprun share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import Launcher


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    found = Launcher(tmp_path)
    yield found
    survivors = found.marked()
    for process in survivors:
        process.kill()
    assert not survivors, "an agent leaves no process behind"
    assert os.listdir(tmp_path / "tmp") == [], "an agent leaves no file behind"
