"""The operator's limit of open files, in a new Python, because a lowered limit cannot be raised again."""

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
def test_the_operator_raises_its_limit_of_connections_to_that_of_its_container(count: int, found: str) -> None:
    """The operator must raise its limit of open files: containerd 2 sets 1,024, and a thousand trainers connect."""
    done = subprocess.run(
        [sys.executable, "-c", LOWERED.format(count=count)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == found
