"""`ddpjob run --fail` breaks a job on purpose: the job recovers and reports what happened. No torch is needed."""

import re
from typing import Any

import pytest
from shell import Cli, status_of

from ddpjob_cli.local.preparation import faults

# Script that counts to 50 and saves every ten steps, like a training. A restart resumes at the last save.
COUNTS = """
    import os, pathlib, time
    import ddpjob
    rank = os.environ["RANK"]
    saved = pathlib.Path(f"saved-{rank}")
    first = int(saved.read_text()) if saved.exists() else 0
    for step in range(first + 1, 51):
        time.sleep(0.05)
        if step % 10 == 0:
            saved.with_suffix(".new").write_text(str(step))  # as one saves what a kill may interrupt
            saved.with_suffix(".new").replace(saved)
        ddpjob.progress(step=step, total=50)
    print("done after", 50 - first, "steps in attempt", os.environ["DDPJOB_ATTEMPT"])
"""
# Like COUNTS, but as under DDP a rank that is a step ahead waits for the other rank. A waiting rank still reports.
COUNTS_TOGETHER = COUNTS.replace(
    "time.sleep(0.05)",
    """pathlib.Path(f"at-{rank}").write_text(str(step))
        other = pathlib.Path(f"at-{1 - int(rank)}")
        while not other.exists() or int(other.read_text() or 0) < step - 1:
            time.sleep(0.01)
        time.sleep(0.05)""",
)


def run(cli: Cli, *words: object, script: str = COUNTS, **spec: Any) -> tuple[Any, dict[str, Any], str]:
    done = cli.run("run", cli.file(script, **spec), "--status", "status.json", *words)
    return done, status_of(cli.folder / "status.json"), done.stderr


@pytest.mark.parametrize(
    ("how", "words", "code"),
    [
        # The message names the last step that the group reported. It may be any step: rank 0 does not wait for rank 1.
        ("signal=KILL", r"was killed by SIGKILL at step \d+", 137),
        ("exit=3", r"ended with exit code 3 at step \d+", 3),
    ],
)
def test_a_rank_that_fails_at_a_step_restarts_the_group_from_its_last_save(cli, how, words, code):
    done, status, told = run(cli, "--fail", f"rank=1,step=25,{how}")
    assert done.returncode == 0, told
    assert re.search(words, told), told
    assert "restarting all 2 nodes: attempt 2, restart 1 of 3" in told
    assert "[1:1] done after 30 steps in attempt 2" in done.stdout
    assert re.search(r"✔ job Succeeded in .* 1 restart(, \d+ steps? repeated)?\n", told), told
    assert (status["restarts"]["application"], status["restarts"]["total"]) == (1, 1)
    failure = status["lastFailure"]
    assert (failure["rank"], failure["exitCode"], failure["class"]) == (1, code, "application")


def test_a_hanging_rank_is_found_named_and_restarted(cli: Cli) -> None:
    grace = "spec.template.spec.terminationGracePeriodSeconds=1"  # seconds; the hanging rank does not end by itself
    done, status, told = run(
        cli, "--fail", "rank=0,step=25,hang", "--set", grace, script=COUNTS_TOGETHER, stall={"timeoutSeconds": 3}
    )
    assert done.returncode == 0
    assert "rank 0 (node 0) " in told
    assert status["restarts"]["stall"] == 1
    assert (status["lastFailure"]["rank"], status["lastFailure"]["reason"]) == (0, "Stalled")
    assert "injected fault at step 25: hang" in status["lastFailure"]["logTail"], "what it said last explains the hang"


def test_a_node_that_dies_is_replaced_without_a_charge(cli: Cli) -> None:
    done, status, told = run(cli, "--fail", "node=1,at=1s", backoffLimit=0)
    assert done.returncode == 0, told
    assert "--fail node=1,at=1s: node 1 dies now" in told
    lost = r"rank 1 \(node 1\) was lost( at step \d+)?: the process that started its ranks on this machine is gone"
    assert re.search(lost, told)
    assert (status["restarts"]["infrastructure"], status["restarts"]["application"]) == (1, 0)
    assert status["lastFailure"]["nodeRank"] == 1


def test_a_node_that_is_not_yet_running_at_its_fault_dies_once_it_runs(cli: Cli) -> None:
    done, status, told = run(cli, "--fail", "node=1,at=0s")
    assert done.returncode == 0, told
    assert "did not happen" not in told
    assert status["restarts"]["infrastructure"] == 1


@pytest.mark.parametrize("command", [["python"], ["ddprun", "--no-preload"], ["ddprun"]])
def test_a_training_ends_although_a_rank_is_killed_repeatedly(cli: Cli, command: list[str]) -> None:
    container = {"command": [*command, "train.py"]}
    # Each step is saved: on a busy machine ten steps may take longer than two seconds.
    lasts = COUNTS.replace("time.sleep(0.05)", "time.sleep(0.1)").replace("step % 10 == 0", "step")
    done, status, told = run(cli, "--fail", "every=2s", script=lasts, container=container, backoffLimit=1000)
    assert done.returncode == 0, told
    assert re.search(r"--fail every=2s: process \d+ of node [01] is killed now", told)
    assert status["restarts"]["application"] >= 1
    assert all("was killed by SIGKILL" in f["message"] for f in status["failures"])


def test_kills_at_an_interval_report_the_number_of_restarts_and_if_none_happened(cli: Cli) -> None:
    done, _, told = run(cli, "--fail", "every=10m", script="import ddpjob\nddpjob.progress(step=1)")
    assert done.returncode == 1
    assert "--fail every=10m: the job fails after 3 restarts; --max-restarts allows more" in told
    assert "--fail every=10m: did not happen; no rank of the job trained for so long" in told


@pytest.mark.parametrize("command", ["python", "ddprun"])
def test_every_fault_happens_once_in_any_attempt_or_generation(cli: Cli, command: str) -> None:
    """All faults of --fail must happen under ddprun, too. Otherwise the run would end as if all had been tested."""
    given = (
        "rank=0,step=12,exit=7",
        "rank=1,step=35,signal=SEGV",
        "rank=1,step=35,signal=SEGV",
        "rank=0,step=48,exit=5",
    )
    words = [word for text in given for word in ("--fail", text)]
    start = {"python": ["python"], "ddprun": ["ddprun", "--no-preload"]}[command]
    container = {"command": [*start, "train.py"]}
    done, status, told = run(cli, *words, script=COUNTS_TOGETHER, container=container, backoffLimit=9)
    assert done.returncode == 0, told
    assert "did not happen" not in told
    assert status["restarts"]["application"] == 4
    assert (status["attempt"] == 1) == (command == "ddprun")


def test_only_a_fault_that_did_not_happen_is_named(cli: Cli) -> None:
    """Only a fault that did not happen must be named, so that no user believes that it was tested."""
    late, early = "rank=1,step=5000", "rank=0,step=12,exit=7"
    done, _, told = run(cli, "--fail", early, "--fail", late, "--fail", "node=1,at=10m")
    assert done.returncode == 1
    assert f"--fail {late}: did not happen; the rank did not call ddpjob.progress() with this step\n" in told
    assert "--fail node=1,at=10m: did not happen; the job had ended before" in told
    assert f"--fail {early}" not in told


def test_a_mistake_on_all_ranks_is_shown_once_and_not_retried(cli: Cli) -> None:
    """A mistake on all ranks must be shown once, and not cost four attempts, 36 s and 334 lines of output."""
    done, status, told = run(cli, script="def main():\n    [].apend(1)\nmain()", nodes=1)
    assert (done.returncode, status["reason"], status["attempt"]) == (1, "PermanentFailure", 1)
    assert "in train.py:2 (AttributeError: " in told.splitlines()[-1]
    assert done.stdout.count("Traceback") == 1
    assert len((done.stdout + told).splitlines()) < 15


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("rank=9,step=1,hang", "the job's ranks are 0 to 1"),
        ("node=2,at=1s", "the job's nodes are 0 to 1"),
        ("rank=1,step=x,hang", 'step must be a whole number, is "x"'),
        ("rank=1,step=1,signal=BANG", 'signal must be one such as KILL, SEGV or TERM, is "BANG"'),
        ("rank=1,step=1,exit=0", 'exit must be a code from 1 to 255, is "0"'),
        ("rank=1", f"must be {faults.FORMS}"),
        ("rank=1,step=1,hang,exit=3", f"must be {faults.FORMS}"),
        ("node=1,at=soon", 'at must be a time such as 20s or 2m, is "soon"'),
        ("rank=1,rank=2,step=1,hang", "rank is given twice"),
        ("rank=" + "9" * 5000 + ",step=1,hang", "rank must be a whole number"),
        ("node=1,at=" + "9" * 400 + "s", "at must be a time such as 20s or 2m"),
        ("every=0s", "every must be more than 0"),
        ("every=often", 'every must be a time such as 20s or 2m, is "often"'),
        ("every=10s,rank=1", f"must be {faults.FORMS}"),
        ("disk=full", "disk is unknown"),
        ("", "an empty part is unknown"),
    ],
)
def test_an_impossible_fault_is_refused_before_anything_starts(cli: Cli, fault: str, sentence: str) -> None:
    done = cli.here("run", cli.file("print('started')"), "--fail", fault)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "started" not in done.stdout


ONE_RANK = """
import os, time
def load(attempt):
    raise {exception}
if os.environ["RANK"] == "1":
    load(int(os.environ["DDPJOB_ATTEMPT"]))
time.sleep(1000)
"""


@pytest.mark.parametrize("in_place", [True, False], ids=["ddprun", "torchrun"])
def test_the_same_exception_at_the_same_line_twice_in_a_row_ends_the_job(cli: Cli, in_place: bool) -> None:
    """The same exception at the same line twice in a row must end the job, which otherwise would start four times."""
    script = ONE_RANK.replace("DDPJOB_ATTEMPT", "DDPJOB_GENERATION" if in_place else "DDPJOB_ATTEMPT")
    script = script.format(exception="OSError(f'no such shard in attempt {attempt}')")
    own = {"container": {"command": ["ddprun", "--preload=json", "train.py"]}} if in_place else {}
    done, status, told = run(cli, script=script, **own)
    assert (done.returncode, status["reason"]) == (1, "PermanentFailure")
    assert f"in train.py:4 (OSError: no such shard in attempt {1 if in_place else 2})" in told
    if in_place:
        assert (told.count("restarted all ranks in place"), "restart 2" in told) == (1, False), told
    else:
        assert status["attempt"] == 2
        assert "the same exception at the same line twice in a row, so the job is not retried" in told
