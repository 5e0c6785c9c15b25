"""`make quick` starts no processes."""

import multiprocessing
import os
import subprocess
from collections.abc import Callable

import pexpect
import pytest


@pytest.mark.parametrize(
    "start",
    [
        lambda: subprocess.run(["true"], check=True),
        lambda: os.system("true"),
        lambda: os.posix_spawn("/bin/true", ["true"], {}),
        lambda: pexpect.spawn("true"),
        lambda: multiprocessing.get_context("fork").Process(target=int).start(),
    ],
    ids=["subprocess", "shell", "spawn", "terminal", "fork"],
)
def test_a_test_that_starts_a_process_fails(start: Callable[[], object]) -> None:
    """Such a test must fail, or `make quick` becomes slow, and flaky on a busy machine."""
    with pytest.raises(pytest.fail.Exception, match="starts a process"):
        start()
