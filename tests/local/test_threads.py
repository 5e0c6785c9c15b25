"""The number of threads in a local run: the job's value, the user's OMP_NUM_THREADS, or torchrun's default."""

from typing import Any

import pytest
from worlds import job

from ddpjob_cli.local.preparation import threads
from ddpjob_operator.pods import build


def of_pod(what: Any) -> str:
    env = build.pod(what, 1, 0)["spec"]["containers"][0]["env"]
    return next((entry["value"] for entry in env if entry["name"] == "OMP_NUM_THREADS"), "unset")


@pytest.mark.parametrize(
    ("nodes", "nproc", "cpu", "caller", "made"),
    [
        (1, 1, None, "", "unset"),  # unset: all cores, as for `python train.py` and torchrun
        (2, 1, None, "", "1"),  # two nodes, so two ranks, on this machine
        (1, 2, None, "", "1"),
        (1, 1, 4, "", "4"),
        (2, 2, 4, "", "2"),
        (1, 1, None, "3", "3"),
        (2, 2, None, "3", "3"),
        (2, 1, 8, "3", "3"),
        (2, 1, None, "4,2", "4,2"),
    ],
)
def test_the_number_of_threads_is_that_of_the_caller_or_else_of_torchrun(nodes, nproc, cpu, caller, made):
    """The number of threads must be the caller's, or torchrun's default: OMP_NUM_THREADS=3 must not become 1."""
    limits = {"resources": {"limits": {"cpu": cpu}}} if cpu else None
    given = job(nodes=nodes, nprocPerNode=nproc, container=limits)
    environ = {"OMP_NUM_THREADS": caller} if caller else {}
    assert of_pod(threads.set_threads(given, environ)) == made
    shown = threads.chosen(given, environ)
    assert shown == ("" if caller or made == "unset" else f"OMP_NUM_THREADS={made}"), "what nobody gave is in the title"
    own = job(nodes=nodes, nprocPerNode=nproc, container={"env": [{"name": "OMP_NUM_THREADS", "value": "7"}]})
    assert of_pod(threads.set_threads(own, environ)) == "7", "the job's own value counts before both"
    assert threads.chosen(own, environ) == ""
    assert of_pod(given) == of_pod(threads.set_threads(given, {})) or (nodes, nproc) == (2, 1), "the job is unchanged"
