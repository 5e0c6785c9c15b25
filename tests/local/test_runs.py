"""Finding earlier runs: `ddpjob list`, and `ddpjob logs` with the options that users know from kubectl."""

import json
import os
import signal
from pathlib import Path

from shell import Cli, eventually

FAILS_ONCE = """
    import os, pathlib, sys, time
    attempt, rank = os.environ["DDPJOB_ATTEMPT"], os.environ["RANK"]
    print(f"attempt {attempt} rank {rank}", flush=True)
    pathlib.Path(f"printed-{attempt}-{rank}").touch()
    while not pathlib.Path(f"printed-{attempt}-0").exists():  # the failure would end rank 0 before it has printed
        time.sleep(0.01)
    sys.exit(3 if attempt == "1" and rank == "1" else 0)
"""


def listed(cli: Cli, *words: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(cli.run("list", "-o", "json", *words).stdout)
    return found


def test_list_shows_the_result_of_each_run_with_the_newest_first(cli: Cli) -> None:
    cli.run("run", cli.file("print(1)", "first"))
    cli.run("run", cli.file(FAILS_ONCE, "second", backoffLimit=2))
    text = cli.run("list").stdout.splitlines()
    assert text[0].split() == ["JOB", "STATE", "AGE", "ATTEMPTS", "RESTARTS", "STEP", "FOLDER"]
    assert text[1].split()[:2] == ["second", "Succeeded"]
    assert text[1].split()[3:5] == ["2", "1"]
    assert text[2].split()[:2] == ["first", "Succeeded"]
    assert "NODES" in cli.run("list", "-o", "wide").stdout
    second, first = listed(cli)
    assert (second["job"], second["attempts"], second["restarts"]) == ("second", 2, 1)
    status = json.loads((Path(str(first["folder"])) / "status.json").read_text())
    assert status["state"] == "Succeeded"


def test_a_run_whose_process_was_killed_is_not_listed_as_running(cli: Cli) -> None:
    ready = cli.folder / "ready"
    with cli.start("run", cli.file(f"open({str(ready)!r}, 'w'); import time; time.sleep(1000)")) as process:
        eventually(lambda: ready.exists() and listed(cli)[0]["state"] == "Running")
        os.kill(process.pid, signal.SIGKILL)
    eventually(lambda: not cli.marked())
    assert listed(cli)[0]["state"] == "Killed"


def test_without_runs_list_and_logs_report_that_there_are_none(cli: Cli) -> None:
    """Without any run, a new user must see neither an empty line nor a traceback."""
    done = cli.run("list")
    assert (done.returncode, done.stdout) == (0, "")
    assert "no run is kept" in done.stderr
    assert listed(cli) == []
    cli.run("logs", code=2, says="start one with ddpjob run")


def test_logs_shows_the_last_run_by_attempt_and_rank(cli: Cli) -> None:
    """`ddpjob logs` must find the last run's log by attempt and rank, so that users need not search its folder."""
    cli.run("run", cli.file(FAILS_ONCE, backoffLimit=2))
    assert cli.run("logs").stdout == "[0:0] attempt 2 rank 0\n[1:1] attempt 2 rank 1\n"
    assert cli.run("logs", "job", "--rank", 1).stdout == "attempt 2 rank 1\n"
    assert cli.run("logs", "job", "--rank", 1, "--previous").stdout == "attempt 1 rank 1\n"
    assert cli.run("logs", "job", "--node", 0, "--attempt", 1).stdout == "attempt 1 rank 0\n"


def test_a_request_that_matches_no_log_is_refused_with_the_existing_ones(cli: Cli) -> None:
    cli.run("run", cli.file("print(1)"))
    for words, why in (
        (["other"], "there are runs of: job"),
        (["--rank", "2"], "has the ranks 0 to 1"),
        (["--node", "7"], "node 7 has no log in attempt 1"),
        (["--attempt", "5"], "has logs of 1"),
        (["--previous"], "has 1 attempt"),
        (["--previous", "--attempt", "1"], "exclude each other"),
        (["--rank", "0", "--node", "1"], "exclude each other"),
    ):
        done = cli.run("logs", *words)
        assert done.returncode == 2, words
        assert why in done.stderr, words
        assert done.stdout == ""


def test_follow_continues_through_a_restart_until_the_job_ends(cli: Cli) -> None:
    """`ddpjob logs -f` must continue with the next attempt. A plain tail -f stays at the log of the ended pod."""
    script = FAILS_ONCE.replace("sys.exit(", "while not os.path.exists('go'): time.sleep(0.02)\n    sys.exit(")
    with cli.start("run", cli.file(script, backoffLimit=2)) as run:
        eventually(lambda: listed(cli) and "attempt 1" in cli.run("logs", "--node", 0).stdout)
        with cli.start("logs", "--follow") as follower:
            first = follower.stdout.readline()
            (cli.folder / "go").touch()
            rest = follower.stdout.read()
        run.communicate(timeout=60)
    shown = [f"[{rank}:{rank}] attempt {attempt} rank {rank}" for attempt in (1, 2) for rank in (0, 1)]
    assert sorted((first + rest).splitlines()) == sorted(shown)


def test_logs_ends_quietly_if_its_reader_closes(cli: Cli) -> None:
    """`ddpjob logs | head -1` must not end in a traceback."""
    cli.run("run", cli.file("for i in range(100000): print(i)", nodes=1))
    with cli.start("logs") as process:
        assert process.stdout.readline() == "0\n"
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 0


def test_a_report_is_written_at_the_end_and_can_be_printed_again_later(cli: Cli) -> None:
    cli.run("run", cli.file(FAILS_ONCE, backoffLimit=2), "--report", "run.html", code=0)
    written = (cli.folder / "run.html").read_text()
    for said in ("<title>job: Succeeded</title>", "attempt 2", "exit code 3", "job-1-1.log", "job-2-0.log"):
        assert said in written, said
    printed = cli.run("report", "job").stdout
    assert "<title>job: Succeeded</title>" in printed
    assert "exit code 3" in printed


def test_logs_to_a_full_disk_give_an_error_of_one_line(cli: Cli) -> None:
    """`ddpjob logs > all.log` must not end in a traceback."""
    assert cli.run("run", cli.file("print(1)")).returncode == 0
    for words in (["logs"], ["logs", "-f"]):
        with open("/dev/full", "w") as full:
            done = cli.run(*words, stdout=full)
        assert (done.returncode, done.stderr) == (1, "stdout: No space left on device\n")
