"""`ddpjob run` of a job under ddprun: ranks restart in place, and only a node that dies is replaced."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from shell import Cli, status_of

DDPRUN = {"command": [str(Path(sys.executable).parent / "ddprun"), "--preload", "json", "train.py"]}
# Script that counts to 60 and saves every ten steps, like a training. A restart resumes at the rank's last save.
COUNTS = """
    import os, pathlib, time
    import ddpjob
    rank, life = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    pod = os.environ.get("DDPJOB_REPLACEMENT", 0)
    os.write(1, f"generation {life} of {pod}\\n".encode())  # its agent has the same pipe
    saved = pathlib.Path(f"saved-{rank}")
    first = int(saved.read_text()) if saved.exists() else 0
    for step in range(first + 1, 61):
        time.sleep(0.05)
        if step % 10 == 0:
            saved.with_suffix(".new").write_text(str(step))
            saved.with_suffix(".new").replace(saved)
        ddpjob.progress(step=step, total=60)
    os.write(1, f"done in generation {life}\\n".encode())
"""


def run(cli: Cli, *words: object, script: str = COUNTS, **spec: Any) -> tuple[Any, dict[str, Any], str]:
    file = cli.file(script, container=DDPRUN, **spec)
    done = cli.run("run", file, "--status", "status.json", *words)
    return done, status_of(cli.folder / "status.json"), done.stderr


def test_a_killed_rank_restarts_together_with_the_others_and_is_named(cli: Cli) -> None:
    done, status, told = run(cli, "--fail", "rank=1,step=25,signal=KILL")
    assert done.returncode == 0, told
    assert (status["attempt"], status["inPlace"]) == (1, {"application": 1})
    assert (status["restarts"]["application"], status["restarts"]["total"]) == (1, 1)
    failure = status["lastFailure"]
    assert (failure["rank"], failure["pod"], failure["signal"]) == (1, "job-1-1", "SIGKILL")
    assert re.search(r"✖ rank 1 \(node 1\) was killed by SIGKILL.*; restarted all ranks in place", told)
    assert "[0:0] done in generation 1" in done.stdout
    assert "did not happen" not in told


@pytest.mark.parametrize(
    ("line", "exception", "tail"),
    [
        ("import argparse; argparse.ArgumentParser(prog='t').parse_args(['--lr'])", "t: error: unrec", "t: error:"),
        ("import sys; sys.exit('no data in /data')", "SystemExit: no data in /data", "no data in /data"),
        ("raise ValueError('no shard')", "ValueError: no shard", "in <module>"),
    ],
)
def test_the_last_words_of_a_rank_are_in_the_failure_and_in_its_log_tail(cli, line, exception, tail):
    """A rank's last lines must be in the failure: `ended with exit code 2` does not say why it failed."""
    done, status, told = run(cli, script=line, backoffLimit=0)
    assert done.returncode == 1
    assert status["lastFailure"]["exception"].startswith(exception), status["lastFailure"]
    assert tail in status["lastFailure"]["logTail"]
    assert exception in told


@pytest.mark.parametrize("node", [0, 1], ids=["node 0, which leads", "another"])
def test_only_the_node_that_dies_is_replaced(cli: Cli, node: int, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    cli.env["TMPDIR"] = str(temporary)
    done, status, told = run(cli, "--fail", f"node={node},at=2s", backoffLimit=0)
    assert done.returncode == 0, told
    assert (status["attempt"], status["replacements"]) == (1, {str(node): 1})
    assert (status["restarts"]["infrastructure"], status["restarts"]["application"]) == (1, 0)
    assert f"job-1-{node}-r1 takes its place, the other node waits" in told
    assert re.search(rf"\[{node}:{node}\] generation \d+ of 1\n", done.stdout), "the new pod"
    assert f"[{1 - node}:{1 - node}] done in generation" in done.stdout
    assert not re.search(rf"\[{1 - node}:{1 - node}\] generation \d+ of 1\n", done.stdout), "the other one kept its own"
    assert not list(temporary.glob("ddprun_*")), "each pod that dies would leave a folder in /tmp"


# Script that saves step 10 to the folder and keeps every step in memory.
KEEPS = """
    import time
    import ddpjob, torch
    with ddpjob.init() as world:
        model = world.wrap(torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        snapshot = ddpjob.Snapshot("snapshots", world)
        step = snapshot.load(model=model, optimizer=optimizer)
        while step < 40:
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            step += 1
            time.sleep(0.05)
            ddpjob.should_stop(step)
            ddpjob.progress(step=step, total=40)
            if step == 10:
                snapshot.save(step, model=model, optimizer=optimizer)
                snapshot.wait()
        snapshot.close()
"""


def test_a_restart_from_memory_repeats_no_step_and_the_final_message_shows_where_it_resumed(cli: Cli) -> None:
    file = cli.file(KEEPS, container={"command": [DDPRUN["command"][0], "train.py"]}, nodes=1, nprocPerNode=2)
    with cli.start("run", file, "--status", "status.json", "--fail", "rank=1,step=30,signal=KILL") as process:
        _, told = process.communicate(timeout=150)  # importing torch can take a minute on a busy machine
    assert process.returncode == 0, told
    status = status_of(cli.folder / "status.json")
    where = "the memory on the nodes of ranks 0, 1"
    assert (status["resumedStep"], status["resumedFrom"]) in [(29, where), (30, where)]
    assert "lostSteps" not in status["goodput"]
    end = f"1 restart, no step repeated   resumed at step {status['resumedStep']} from {where}"
    assert told.splitlines()[-1].endswith(end), told
    assert f"restarted all ranks in place (restart 1); step {status['resumedStep']} is in memory" in told
