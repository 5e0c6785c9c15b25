"""Fixtures that the tests of ddprun share."""

import os
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from agents import Launcher, forget_torchs_own
from appointments import Appointments


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


@pytest.fixture
def appointments() -> Iterator[Appointments]:
    with Appointments() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
