"""Options and shared fixtures of the whole test suite."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import no_processes
import pytest
import real_gpus
import this_tree
import yaml
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

# In a shell's background SIGINT is ignored. All programs that tests start would inherit this, and ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

real_gpus.hide()
# Tests start servers on this machine, which a proxy from the environment could not reach.
for name in ("NO_PROXY", "no_proxy"):
    os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1", "localhost"]))

# There is no deadline, because a busy machine or a first run without caches is no bug.
# A property test has 30 examples, or 1,000 with --hypothesis-profile=night.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=30)
settings.register_profile("night", settings.get_profile("unhurried"), max_examples=1000)
settings.load_profile("unhurried")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Seed the property tests by the sources, so that the same sources always try the same examples. --hypothesis-seed
    and --hypothesis-profile override this."""
    if config.option.hypothesis_seed is None and config.option.hypothesis_profile is None:
        config.option.hypothesis_seed = this_tree.number()


# Tests that share an expensive fixture run in one process, because each process would create the fixture again.
# xdist_group cannot do this: pytest 9.2 does not see the group that xdist 3.8 appends to a test's identifier.
TOGETHER = (
    "api/test_crd.py",  # a namespace, and a running job
    *(f"cluster/{file.name}" for file in Path(__file__).parent.glob("cluster/test_*.py")),  # jobs that run together
    "test_examples.py",  # the trainings that the fixture `run` keeps
    "test_memory.py",  # the undisturbed training
    "test_scrape.py",  # the operator that Prometheus scrapes
    "test_site.py",  # the built site
)


@pytest.fixture(autouse=True)
def handlers_of_signals() -> Iterator[None]:
    """Restore the handlers that a command sets in this process: processes of later tests would inherit them."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Together(LoadScopeScheduling):
    """Give each process one test at a time. Tests that belong together go to one process, before all other tests."""

    def _split_scope(self, nodeid: str) -> str:
        return next((name for name in TOGETHER if f"/{name}" in nodeid), nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    return Together(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    with no_processes.forbidden() if no_processes.is_quick(item) else contextlib.nullcontext():
        return (yield)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--refresh-goldens", action="store_true", help="write the golden files anew; then read the diff")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str | list[Any]], None]:
    """Return a function that compares a text, or objects as YAML, with a golden file in the test's folder."""

    def compare(name: str, what: str | list[Any]) -> None:
        as_yaml = {"sort_keys": False, "default_flow_style": None, "width": 120}
        text = what if isinstance(what, str) else yaml.safe_dump_all(what, **as_yaml)
        file = Path(request.path).parent / "golden" / name
        if request.config.getoption("--refresh-goldens"):
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
        assert file.exists(), f"{name} is missing; write it with --refresh-goldens"
        assert text == file.read_text(), f"{name} differs; if that is meant, refresh with --refresh-goldens"

    return compare
