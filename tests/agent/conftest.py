"""Fixtures that the tests of ddprun share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import Launcher, forget_torchs_own


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    found = Launcher(tmp_path)
    yield found
    survivors = found.marked()
    for process in survivors:
        process.kill()
    assert not survivors, "an agent leaves no process behind"
    forget_torchs_own(found)
    assert os.listdir(tmp_path / "tmp") == [], "an agent leaves no file behind"
