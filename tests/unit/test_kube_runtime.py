"""The operator's use of process limits."""

from __future__ import annotations

import subprocess
import sys

import pytest

LOWERED = """
import resource
from ddpjob_operator.kube.api.runtime import allow_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1024))
allow_open_files({count})
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("count", "found"), [(512, "512 1024"), (16_384, "1024 1024"), (100, "256 1024")])
def test_the_operator_may_have_as_many_connections_open_as_its_container_allows(count: int, found: str) -> None:
    """containerd 2 gives a container 1,024 open files at first, too few for a thousand reporting trainers."""
    done = subprocess.run(
        [sys.executable, "-c", LOWERED.format(count=count)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == found
