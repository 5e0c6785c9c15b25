"""Local runs whose command ends with 0 although the ranks failed, because the shell or the script hides the failure."""

import signal

import pytest
from shell import Cli, status_of

BOOM = "RuntimeError: boom"
FAILS = "raise RuntimeError('boom')"
DDPRUN = "ddprun --preload json --nproc-per-node 1"


def ran(cli: Cli, script: str, shell: str, *words: str) -> tuple[int, str, dict]:  # type: ignore[type-arg]
    job = cli.file(script, container={"command": ["bash", "-c", shell]}, nodes=1, backoffLimit=0)
    done = cli.run("run", job, "--no-check", "--status", "status.json", *words)
    return done.returncode, done.stdout + done.stderr, status_of(cli.folder / "status.json")


@pytest.mark.parametrize("shell", [f"{DDPRUN} train.py | cat", f"{DDPRUN} train.py || true; echo done"])
def test_a_failure_reported_by_ddprun_fails_the_job_even_if_the_shell_exits_with_0(cli: Cli, shell: str) -> None:
    code, text, status = ran(cli, FAILS, shell)
    assert (code, status["state"], status["lastFailure"]["exception"]) == (1, "Failed", BOOM)
    assert "although the command ended with 0" in text


def test_a_traceback_at_the_end_of_a_success_is_shown_with_a_warning(cli: Cli) -> None:
    """A traceback at the end of a success must be shown with a warning, because the run is Succeeded."""
    script = "import traceback\ntry:\n    raise RuntimeError('boom')\nexcept RuntimeError:\n    traceback.print_exc()"
    code, text, status = ran(cli, script, "python train.py")
    assert (code, status["state"], status["findings"][0]["reason"]) == (0, "Succeeded", "FailureInLog")
    assert f"[0] {BOOM}" in text or f"[0:0] {BOOM}" in text
    assert text.splitlines()[-1].startswith("⚠ but suspicious: a rank has failed in train.py:3")


@pytest.mark.parametrize(
    ("shell", "left"),
    [(f"{DDPRUN} train.py & until [ -e begun ]; do sleep 0.05; done", True), (f"sleep 99 & {DDPRUN} done.py", False)],
)
def test_a_launcher_that_nobody_waited_for_gives_a_success_with_a_warning(cli: Cli, shell: str, left: bool) -> None:
    """A launcher that nobody waited for must give a warning: it is killed with its container, and the run succeeds."""
    (cli.folder / "done.py").write_text("")
    code, text, status = ran(cli, "import time\nopen('begun', 'w').close()\ntime.sleep(99)", shell)
    found = [one["reason"] for one in status.get("findings", ())]
    assert (code, status["state"], found) == (0, "Succeeded", ["ExitCodeLost"] * left)
    assert ("while `ddprun train.py` was running" in text.splitlines()[-1]) is left


@pytest.mark.long  # slow: ranks are observed every 5 s; tests/unit/test_hidden_failures.py has a fast test
@pytest.mark.parametrize("size", [1, 2])
def test_ranks_that_see_only_those_of_their_node_give_a_success_with_a_warning(cli: Cli, size: int) -> None:
    """Ranks that see only those of their node must give a warning: a wrapper around torchrun may cause it."""
    rank = "{'PATH': os.environ['PATH'], 'RANK': '0', 'WORLD_SIZE': '%s'}" % size  # noqa: UP031
    script = f"import os, subprocess\nsubprocess.run(['sleep', '11'], env={rank})"
    done = cli.run("run", cli.file(script, container={"command": ["python", "train.py"]}, nodes=2))
    assert (done.returncode, "rank 0 was in a group of 1 rank, but the job has 2" in done.stderr) == (0, size == 1)


@pytest.mark.long  # slow: launchers are checked every 5 s; tests/unit/test_launching.py has a fast test
def test_a_launcher_of_a_script_that_waits_in_vain_is_named_while_it_waits(cli: Cli) -> None:
    (cli.folder / "torchrun").write_text("import time\ntime.sleep(9)\n")
    job = cli.file("", container={"command": ["sh", "-c", "exec python $0 --nnodes=3 train.py", "torchrun"]}, nodes=2)
    assert "node 1 waits for others in vain: torchrun --nnodes=3 contradicts" in cli.run("run", job, code=0).stderr


@pytest.mark.parametrize(("shell", "is_kept"), [("{0}; true", True), ("exec {0}", False)])
def test_a_stop_signal_that_a_shell_does_not_forward_is_explained(cli: Cli, shell: str, is_kept: bool) -> None:
    """A stop signal that a shell does not forward must be explained, because the ranks are killed before they save."""
    script = "import time\nprint('trains', flush=True)\ntime.sleep(99)"
    command = ["bash", "-c", shell.format(f"{DDPRUN} train.py")]
    process = cli.start("run", cli.file(script, container={"command": command}, nodes=1))
    assert "trains" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    last = process.communicate(timeout=60)[1].splitlines()[-1]
    assert ("; nothing was saved: the shell that started `ddprun train.py` ended on SIGTERM" in last) is is_kept


def test_an_exit_code_of_the_launcher_lost_by_the_shell_gets_one_warning_before_the_run(cli: Cli) -> None:
    job = cli.file("", container={"command": ["bash", "-c", f"{DDPRUN} train.py | cat"]}, nodes=1)
    done = cli.run("run", job, code=0)
    assert done.stderr.count("the exit code of ddprun is lost") == 1
