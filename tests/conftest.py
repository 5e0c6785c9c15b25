"""Options of the whole test suite."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import real_gpus
import this_tree
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

# In the background of a shell SIGINT is ignored, and every program that the tests start would inherit it: Ctrl-C would
# then end none of them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

real_gpus.hide()
# A proxy of the environment does not reach what tests serve on this machine.
for name in ("NO_PROXY", "no_proxy"):
    os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1", "localhost"]))

# A busy machine, or a first run that has all sources to read, is no fault of what is tested.
# 30 examples by day, others in each tree; 1,000 at night: --hypothesis-profile=night.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=30)
settings.register_profile("night", settings.get_profile("unhurried"), max_examples=1000)
settings.load_profile("unhurried")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Examples of property tests are those of this tree; --hypothesis-seed and the night choose others."""
    if config.option.hypothesis_seed is None and config.option.hypothesis_profile is None:
        config.option.hypothesis_seed = this_tree.number()


# Tests that share what takes long to make; each process would make it again. Marks cannot say it: with pytest 9.2 the
# groups of xdist 3.8 have no effect, because a test's identifier is no longer taken from where xdist writes its group.
TOGETHER = (
    "api/test_crd.py",  # a namespace, and a job that runs
    *(f"cluster/{file.name}" for file in Path(__file__).parent.glob("cluster/test_*.py")),  # jobs that run side by side
    "test_examples.py",  # the trainings that `run` keeps
    "test_memory.py",  # the training that nothing disturbs
    "test_scrape.py",  # the operator that Prometheus has scraped
)


class Together(LoadScopeScheduling):
    """Gives a process one test after the other, and tests that belong together at once, before all others."""

    def _split_scope(self, nodeid: str) -> str:
        return next((name for name in TOGETHER if f"/{name}" in nodeid), nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    return Together(config, log) if config.getvalue("dist") == "loadgroup" else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--refresh-goldens", action="store_true", help="write the golden files anew; then read the diff")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with the golden file of that name beside the test."""

    def compare(name: str, text: str) -> None:
        file = Path(request.path).parent / "golden" / name
        if request.config.getoption("--refresh-goldens"):
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
        assert file.exists(), f"{name} is missing; write it with --refresh-goldens"
        assert text == file.read_text(), f"{name} differs; if that is meant, refresh with --refresh-goldens"

    return compare
