"""A rank that ends successfully but too early, under each launcher: this may cost at most one restart."""

import json

import pytest
from shell import Cli, status_of

pytestmark = pytest.mark.timeout(300)

# Rank 0 ends before the others continue. If it were stopped meanwhile, only its peer's message would show its end.
MEETS_RANK_0 = """
import os, pathlib, time
pid_file = pathlib.Path("rank-0", os.environ["DDPJOB_ATTEMPT"], os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
pid_file.parent.mkdir(parents=True, exist_ok=True)
if os.environ["RANK"] == "0":
    pid_file.with_suffix(".new").write_text(str(os.getpid()))
    pid_file.with_suffix(".new").replace(pid_file)

def wait_for_the_end_of_rank_0():
    while not pid_file.exists() or pathlib.Path("/proc", pid_file.read_text()).exists():
        time.sleep(0.01)
"""
UNEVEN = f"""
{MEETS_RANK_0}
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(20 if rank == 0 else 30):
    if step == 20:
        wait_for_the_end_of_rank_0()
    dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""
# Script that fails like torch's gloo, but without importing torch, which would take most of the time here.
COMPLAINS = f"""
{MEETS_RANK_0}
if os.environ["RANK"] == "0":
    raise SystemExit(0)
wait_for_the_end_of_rank_0()
raise RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:29595")
"""


SECONDS_MAX = 240  # two attempts of four processes that import torch, possibly on a busy machine


@pytest.mark.parametrize(
    ("command", "script"),
    [
        (["python", "train.py"], UNEVEN),  # shows that gloo's present message equals the one in COMPLAINS
        (["ddprun", "--preload=json", "train.py"], COMPLAINS),
    ],
    ids=["python, torch", "ddprun"],
)
def test_a_rank_that_ends_early_is_named_and_charged(cli: Cli, command: list[str], script: str) -> None:
    """A rank that ends early, because of uneven data or a `break`, must be named and charged."""
    job = cli.file(script, container={"command": command}, nodes=2, nprocPerNode=1, backoffLimit=0)
    with cli.start("run", job, "--no-check", "--status", "status.json") as process:
        out, said = process.communicate(timeout=SECONDS_MAX)
    assert process.returncode == 1, out + said
    status = status_of(cli.folder / "status.json")
    assert "rank 0 " in said, said
    assert "ended with exit code 0 while rank 1 still waited for it: the ranks make different numbers of steps" in said
    assert (status["state"], status["reason"]) == ("Failed", "BackoffLimitExceeded")
    assert status["restarts"]["total"] == 0, json.dumps(status["restarts"])
    assert (status["lastFailure"]["rank"], status["lastFailure"]["class"]) == (0, "application")
