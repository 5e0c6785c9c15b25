"""ddprun on one node, with scripts without torch: what users of torchrun expect, and what PID 1 of a pod must do."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from agents import Launcher, finish
from shell import eventually, lives

from ddprun.core.charges import REPEATS
from ddprun.forkserver import CRASH_DESCRIPTOR

# Ranks may be new processes or forks of a server. Both must pass the same tests.
STARTS = pytest.mark.parametrize("start", ["--no-preload", "--preload=json"])


def message(launcher: Launcher) -> Any:
    return json.loads((launcher.folder / "termination.json").read_text())


@STARTS
def test_ranks_run_the_script_with_its_arguments_and_their_rank_numbers(launcher: Launcher, start: str) -> None:
    script = launcher.script(
        """
        import os, sys
        numbers = " ".join(os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
        sys.stdout.write(f"{numbers} {sys.argv[1:]}\\n")  # one write: those of two ranks do not mix
        """
    )
    done = launcher.done(start, "--nproc", 2, script, "--nproc", "9", "-m", "${local_rank}")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{r} {r} 2 ['--nproc', '9', '-m', '{r}']" for r in (0, 1)]


@STARTS
@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("raise SystemExit(7)", 7),
        ("raise ValueError('x')", 1),
        ("os.kill(os.getpid(), 11)", 139),
        ("os._exit(255)", 255),
    ],
)
def test_the_exit_code_is_that_of_the_script(launcher: Launcher, start: str, line: str, code: int) -> None:
    script = launcher.script(f"import os, time\nif os.environ['RANK'] == '1': {line}\ntime.sleep(100)")
    done = launcher.done(start, "--nproc", 2, "--max-restarts", 0, script)
    assert done.returncode == code
    said = message(launcher)
    assert (said["ddpjob"], said["rank"], said["exitCode"]) == (1, 1, code)
    assert said["signal"] == ("SIGSEGV" if code == 139 else "")


@pytest.mark.parametrize(
    ("line", "exception", "trace"),
    [
        ("import argparse; argparse.ArgumentParser().parse_args(['--lrr', '1'])",)
        + ("train.py: error: unrecognized arguments: --lrr 1",) * 2,
        (
            "import argparse as a; p = a.ArgumentParser(prog='x'); p.add_argument('n', type=int); p.parse_args(['a'])",
            "x: error: argument n: invalid int value: 'a'",
            "x: error: argument n: invalid int value: 'a'",
        ),
        ("sys.exit('no data in /data')", "SystemExit: no data in /data", "no data in /data"),
        ("try: int('a')\nexcept ValueError: sys.exit(4)", "ValueError: invalid literal", "int('a')"),
        ("raise KeyError('k')", "KeyError: 'k'", "raise KeyError('k')"),
        ("sys.exit(3)", "", ""),
        ("sys.exit(256)", "", ""),  # sys.exit(os.system("false")) exits with 0, because exit codes are modulo 256
        *(
            (
                f"import os; sys.excepthook = lambda *_: {ends}(0)\nraise KeyError('k')",
                "KeyError: 'k'",
                "raise KeyError",
            )
            for ends in ("os._exit", "sys.exit")
        ),
    ],
)
def test_the_last_words_of_a_rank_are_in_the_message(launcher: Launcher, line: str, exception: str, trace: str) -> None:
    """A rank's last lines must be in the message, because `ended with exit code 2` explains nothing."""
    script = launcher.script(f"import sys\n{line}")
    done = launcher.done("--preload=json", "--max-restarts", 0, script)
    said = message(launcher)
    assert said["exception"].startswith(exception)
    assert bool(said["exception"]) is bool(exception)
    assert trace in said.get("traceback", "")
    assert f"rank 0 ended with exit code {done.returncode}" in done.stderr
    assert exception in done.stderr


@pytest.mark.parametrize(("goes_on", "code"), [("print('done')", 1), ("ddpjob.progress(1)", 0)])
def test_a_failed_child_that_its_rank_ignores_is_a_failure(launcher: Launcher, goes_on: str, code: int) -> None:
    """A failed child process that its rank ignores must fail the job, unless the rank reports another step later."""
    script = launcher.script(
        "import multiprocessing, ddpjob\n"
        "def train():\n"
        "    ddpjob.progress(1)\n"
        "    raise ValueError('boom')\n"
        "child = multiprocessing.get_context('fork').Process(target=train)\n"
        "child.start()\n"
        "child.join()\n" + goes_on
    )
    done = launcher.done("--preload=json", "--max-restarts", 0, script)
    assert done.returncode == code
    assert ("ValueError: boom); no restarts left" in done.stderr) is bool(code)


def test_a_backend_unknown_to_torch_is_not_retried(launcher: Launcher) -> None:
    """A mistyped backend must end the job at once, without four starts and the back-off between them."""
    script = launcher.script("open('starts', 'a').write('x')\nassert False, 'Unknown backend type gluu'")
    done = launcher.done("--preload=json", script)
    assert done.returncode == 1
    assert (launcher.folder / "starts").read_text() == "x"
    assert (
        "(AssertionError: Unknown backend type gluu); a restart would fail in the same way: not restarted"
        in done.stderr
    )


COMPLAINTS = """
import json, os, sys
class DistBackendError(RuntimeError): __module__ = "torch.distributed"
SAID = "NCCL error in: NCCLUtils.cpp:77, unhandled system error, NCCL version 2.26.2\\nncclSystemError: System call"
def recorded(text):  # as torch's @record
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file: json.dump({"message": {"message": text}}, file)
    sys.exit(1)
def wrapped():
    try: raise DistBackendError(SAID)
    except DistBackendError as error: raise ValueError("step 7 failed") from error
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
"""


@pytest.mark.parametrize(
    "line",
    [
        "    raise DistBackendError(SAID)",
        "    recorded('DistBackendError: ' + SAID)",
        "    wrapped()",
        "    try: wrapped()\n    except ValueError: sys.exit(1)",
    ],
)
def test_a_complaint_about_a_peer_is_recognized_in_the_second_line_of_nccl_and_after_a_script_error(launcher, line):
    """A rank that only reports a lost peer must not count as the rank that failed."""
    done = launcher.done("--preload=json", launcher.script(COMPLAINTS + line))
    assert done.returncode == 0
    assert "ncclSystemError: System call); charged to infrastructure" in done.stderr


@pytest.mark.parametrize("line", ["sys.exit()", "sys.exit(0)", "raise SystemExit"])
def test_a_successful_exit_is_not_reported_as_an_exception(launcher: Launcher, line: str) -> None:
    done = launcher.done("--preload=json", "--max-restarts", 0, launcher.script(f"import sys\n{line}"))
    assert (done.returncode, done.stderr) == (0, "")


def test_the_message_about_stopping_a_job_of_one_node_mentions_no_other_nodes(launcher: Launcher) -> None:
    script = launcher.script("import time; open('ready', 'w').close(); time.sleep(1000)")
    left = json.dumps({"application": 3, "infrastructure": 100, "stall": 10})
    run = launcher.ddprun("--no-preload", script, DDPJOB_RESTARTS_LEFT=left)
    eventually((launcher.folder / "ready").exists)
    run.terminate()
    assert finish(run).stderr == "ddprun: told to stop\n"


def test_a_killed_rank_has_a_message_although_it_could_not_write_one(launcher: Launcher) -> None:
    script = launcher.script("import os; os.kill(os.getpid(), 9)")
    assert launcher.done("--no-preload", "--max-restarts", 0, script).returncode == 137
    assert message(launcher)["signal"] == "SIGKILL"
    assert (launcher.folder / "termination.json").stat().st_size <= 4096


def test_the_failure_reported_by_the_library_is_in_the_message_of_the_pod(launcher: Launcher) -> None:
    script = launcher.script(
        "from ddpjob.reporting import termination; termination.install(); raise ValueError('no such shard: 7')"
    )
    done = launcher.done("--no-preload", "--max-restarts", 0, script)
    assert done.returncode == 1
    said = message(launcher)
    assert said["exception"] == "ValueError: no such shard: 7"
    assert "train.py" in said["traceback"]


def test_a_recovered_failure_leaves_only_its_charge_in_the_message(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import os, ddpjob.reporting.termination
        ddpjob.reporting.termination.install()
        assert os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
        """
    )
    assert launcher.done("--no-preload", script).returncode == 0
    counts = {"application": 1, "infrastructure": 0, "stall": 0, "inARow": 1, "chargedInARow": 1}
    account = {"replacement": 0, "generation": 1, "restarts": counts}
    assert message(launcher) == {"ddpjob": 1, "ended": True, "agent": account}


def test_a_job_without_a_failure_leaves_no_message(launcher: Launcher) -> None:
    assert launcher.done("--no-preload", launcher.script("")).returncode == 0
    assert not (launcher.folder / "termination.json").exists()


@STARTS
def test_a_failure_restarts_all_ranks_on_another_port(launcher: Launcher, start: str) -> None:
    script = launcher.script(
        """
        import os, sys, time
        life = os.environ["TORCHELASTIC_RESTART_COUNT"]
        sys.stdout.write(" ".join((life, os.environ["RANK"], os.environ["MASTER_PORT"])) + "\\n")
        if os.environ["RANK"] == "0": open(f"up{life}", "w").close()
        while not os.path.exists(f"up{life}"): time.sleep(0.01)
        if life < "2":
            if os.environ["RANK"] == "1": os.kill(os.getpid(), 9)
            time.sleep(100)
        """
    )
    done = launcher.done(start, "--nproc", 2, "--max-restarts", 2, script)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert sorted((life, rank) for life, rank, _ in rows) == [(g, r) for g in "012" for r in "01"]
    ports = {life: {row[2] for row in rows if row[0] == life} for life in "012"}
    assert all(len(its) == 1 for its in ports.values()), "the ranks of a generation meet at one port"
    assert ports["0"] != ports["1"] != ports["2"], "what is left of an old generation finds nobody at its port"


def test_a_program_that_cannot_be_started_is_not_retried(launcher: Launcher) -> None:
    done = launcher.done("--no-python", "no-such-program")
    assert done.returncode == 127
    assert done.stderr.count("no-such-program") == 1


def test_a_missing_script_gives_one_line_with_a_similar_name(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    done = launcher.done(tmp_path / "trian.py")
    assert done.returncode == 2
    there_is_none, *others = done.stderr.splitlines()
    assert others == []
    assert there_is_none.startswith(f"ddprun: there is no file {tmp_path}/trian.py in ")
    assert there_is_none.endswith(f"; did you mean {tmp_path}/train.py?")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("trian", "there is no module trian in "),
        ("trian.main", "there is no module trian in "),
        ("train.py", "there is no module train.py: -m takes train; without -m the file is train.py"),
        ("src/train.py", "there is no module src/train.py: -m takes src.train; without -m the file is src/train.py"),
    ],
)
def test_a_missing_module_gives_one_line_and_no_restart(launcher: Launcher, name: str, said: str) -> None:
    (launcher.folder / "src").mkdir()
    for script in ("train.py", "src/train.py"):
        launcher.script("print('imported')", script)
    log = launcher.folder / "termination-log"
    done = launcher.done("-m", name, DDPJOB_TERMINATION_LOG=str(log))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"ddprun: {said}")
    assert json.loads(log.read_text())["exception"] == done.stderr.strip(), "an operator is told why"


@STARTS
@pytest.mark.parametrize("name", ["train", "src.train", "lib.py", "installed"])
def test_a_module_in_the_working_folder_a_package_or_the_path_is_run(launcher: Launcher, start: str, name: str) -> None:
    for folder in ("src", "lib", "elsewhere"):
        (launcher.folder / folder).mkdir()
    for script in ("train.py", "src/train.py", "lib.py", "lib/__init__.py", "lib/py.py", "elsewhere/installed.py"):
        launcher.script("print(__name__)", script)
    path = f"{launcher.folder}/elsewhere:{launcher.env.get('PYTHONPATH', '')}"
    done = launcher.done(start, "-m", name, PYTHONPATH=path)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "__main__"), done.stderr


def test_modules_of_another_interpreter_are_not_judged_before_it_is_started(launcher: Launcher) -> None:
    other = launcher.script("#!/bin/sh\necho runs", "python-of-conda")
    other.chmod(0o755)
    done = launcher.done("--no-preload", "-m", "trian", PYTHON_EXEC=str(other))
    assert (done.returncode, done.stdout) == (0, "runs\n"), done.stderr


def test_a_module_found_missing_only_by_python_is_not_retried(launcher: Launcher) -> None:
    """A missing module must not be retried, even if ddprun's check passes: it finds the package of json.nowhere."""
    launcher.script("print(__name__)")
    done = launcher.done("--preload=json", "-m", "json.nowhere")
    assert (done.returncode, done.stderr.count("ddprun: restart ")) == (1, 0), done.stderr


# ---- stopped by a signal -----------------------------------------------------------------------------------


@STARTS
def test_sigterm_reaches_the_ranks_so_that_they_may_save(launcher: Launcher, start: str) -> None:
    script = launcher.script(
        """
        import os, signal, sys, time
        def save(*_):
            print("saved", flush=True)
            sys.exit(75)
        signal.signal(signal.SIGTERM, save)
        print("ready", flush=True)
        time.sleep(100)
        """
    )
    agent = launcher.ddprun(start, script)
    assert agent.stdout.readline() == "ready\n"
    agent.terminate()
    done = finish(agent)
    assert (done.stdout, done.returncode) == ("saved\n", 75)


def test_ranks_that_ignore_sigterm_are_killed_after_their_grace(launcher: Launcher) -> None:
    script = launcher.script(
        "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(100)"
    )
    agent = launcher.ddprun("--no-preload", script, PET_SHUTDOWN_TIMEOUT="1")
    agent.stdout.readline()
    began = time.monotonic()
    agent.terminate()
    assert finish(agent).returncode == 137
    assert 0.9 < time.monotonic() - began < 10


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM])
def test_an_unhandled_signal_ends_the_agent_as_in_torchrun_and_leaves_nothing(launcher, number):
    """A signal without a handler must end the agent as in torchrun, but the agent removes its folder in /tmp first."""
    script = launcher.script("import sys, time\nsys.stdout.write('up\\n')\ntime.sleep(100)")  # in a single write
    job = launcher.ddprun("--no-preload", "--nproc", 2, script)
    assert [job.stdout.readline() for _ in range(2)] == ["up\n"] * 2
    job.send_signal(number)
    done = finish(job)
    assert done.returncode == 128 + number
    assert f"ended by {number.name}, which is not among --signals-to-handle" in done.stderr
    assert list((launcher.folder / "tmp").iterdir()) == []


def test_a_signal_ignored_by_the_starter_of_the_agent_ends_nothing(launcher: Launcher) -> None:
    script = launcher.script("import os, signal\nos.kill(os.getppid(), signal.SIGUSR1)\nprint('goes on')")
    words = shlex.join([sys.executable, "-m", "ddprun", "--no-preload", str(script)])
    shell = ["sh", "-c", f"trap '' USR1; exec {words}"]
    done = subprocess.run(shell, cwd=launcher.folder, env=launcher.env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "goes on\n"), done.stderr


def test_ranks_that_end_by_sigterm_are_not_restarted(launcher: Launcher) -> None:
    script = launcher.script("import time; print('ready', flush=True); time.sleep(100)")
    agent = launcher.ddprun("--no-preload", script)
    agent.stdout.readline()
    agent.terminate()
    assert finish(agent).returncode == 143


def test_sigterm_during_the_import_of_torch_ends_the_agent(launcher: Launcher) -> None:
    launcher.script("import time; open('importing', 'w').close(); time.sleep(100)", "slow.py")
    script = launcher.script("print('never')")
    agent = launcher.ddprun("--preload=slow", script)
    eventually((launcher.folder / "importing").exists)
    agent.terminate()
    done = finish(agent)
    assert (done.returncode, done.stdout) == (143, "")


# ---- cleaning up -------------------------------------------------------------------------------------------

LEAVES_CHILDREN = """
import os, subprocess, sys, time
for _ in range(2):
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork(): os._exit(0)
    time.sleep(1000)
print("ready", flush=True)
"""


@STARTS
@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), 9)"])
def test_processes_of_a_rank_in_other_sessions_are_ended(launcher: Launcher, start: str, end: str) -> None:
    """All processes of a rank must end. The fixture `launcher` fails the test if a process survives."""
    done = launcher.done(start, "--max-restarts", 1, launcher.script(LEAVES_CHILDREN + end))
    assert done.stdout == ("ready\n" if not end else "ready\nready\n")


@STARTS
def test_ranks_end_if_their_agent_is_killed(launcher: Launcher, start: str) -> None:
    script = launcher.script("import sys, time; sys.stdout.write('ready\\n'); time.sleep(1000)")
    agent = launcher.ddprun(start, "--nproc", 2, script)
    assert [agent.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    agent.kill()
    agent.communicate()
    eventually(lambda: not launcher.marked())
    launcher.forget_killed()


def test_an_orphan_is_reaped_and_does_not_stay_a_zombie(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import os, time
        if os.fork() == 0:
            if os.fork() == 0: os._exit(0)
            time.sleep(0.05)
            os._exit(0)
        os.wait()
        print("ready", flush=True)
        time.sleep(1000)
        """
    )
    agent = launcher.ddprun("--no-preload", script)
    agent.stdout.readline()
    below = psutil.Process(agent.pid)
    eventually(lambda: all(map(lives, below.children(recursive=True))))
    assert len(below.children(recursive=True)) == 1
    agent.terminate()
    finish(agent)


@STARTS
def test_a_rank_inherits_no_descriptor_except_its_streams(launcher: Launcher, start: str) -> None:
    """A rank must inherit only stdin, stdout and stderr, and from the fork server also the file for crashes."""
    script = launcher.script(
        """
        import os
        names = os.listdir("/proc/self/fd")  # with the one that has read them
        print(sorted(int(name) for name in names if os.path.exists(f"/proc/self/fd/{name}")))
        """
    )
    expected = [0, 1, 2] if start == "--no-preload" else [0, 1, 2, CRASH_DESCRIPTOR]
    assert launcher.done(start, script).stdout == f"{expected}\n"


# ---- output ------------------------------------------------------------------------------------------------


def test_log_files_are_where_torchrun_puts_them(launcher: Launcher) -> None:
    script = launcher.script("import sys; print('out'); print('err', file=sys.stderr)")
    done = launcher.done("--no-preload", "--nproc", 2, "--rdzv-id", "id", "--master-port", 1, "--log-dir", "logs",
                         "-r", "0:3,1:1", script)  # fmt: skip
    assert done.returncode == 0
    (run,) = (launcher.folder / "logs").iterdir()
    assert run.name.startswith("id_")
    found = {str(p.relative_to(run)): p.read_text() for p in run.rglob("*") if p.is_file()}
    assert found == {
        "attempt_0/0/stdout.log": "out\n",
        "attempt_0/0/stderr.log": "err\n",
        "attempt_0/1/stdout.log": "out\n",
    }
    assert (done.stdout, done.stderr) == ("", "err\n")


@STARTS
def test_tee_shows_complete_lines_with_their_rank_and_keeps_them(launcher: Launcher, start: str) -> None:
    script = launcher.script(
        """
        import os, sys, time
        sys.stdout.write("half"); sys.stdout.flush()
        time.sleep(0.3)
        print(" a line"); print("no end", end="")
        """
    )
    done = launcher.done(start, "--nproc", 2, "--tee", "3", "--log-dir", "logs", "--local-ranks-filter", "1", script)
    assert done.stdout == "[default1]:half a line\n[default1]:no end"
    assert [p.read_text() for p in (launcher.folder / "logs").rglob("stdout.log")] == ["half a line\nno end"] * 2


def test_tee_shows_a_long_line_as_one_line(launcher: Launcher) -> None:
    """A long line must be shown as one line, and not with the rank's prefix every 64 KiB."""
    script = launcher.script("import sys; sys.stdout.write('x' * 300_000 + '\\nshort\\n' + 'y' * 100_000)")
    done = launcher.done("--no-preload", "--tee", "1", script)
    assert done.stdout == f"[default0]:{'x' * 300_000}\n[default0]:short\n[default0]:{'y' * 100_000}"


@pytest.mark.parametrize("words", [["-r", "3"], ["--tee", "3", "--local-ranks-filter", "1"]])
def test_without_log_dir_hidden_output_is_kept_and_its_folder_is_named(launcher: Launcher, words: list[str]) -> None:
    script = launcher.script("print('out')")
    done = launcher.done("--no-preload", "--nproc", 2, *words, script, TMPDIR=str(launcher.folder / "kept"))
    (run,) = (launcher.folder / "kept").iterdir()
    assert f"is in {run}" in done.stderr
    assert (run / "attempt_0" / "0" / "stdout.log").read_text() == "out\n"


@pytest.mark.parametrize("words", [["--log-dir", "logs"], ["-r", "2", "--log-dir", "logs"], []])
def test_reports_arrive_from_a_script_that_changes_its_working_directory(launcher: Launcher, words: list[str]) -> None:
    (launcher.folder / "tmp" / "its").mkdir()
    script = launcher.script("import os; os.mkdir('other'); os.chdir('other'); raise ValueError('no shard 7')")
    path = launcher.folder / "termination.json"
    done = launcher.done(
        "--preload=json", "--max-restarts=0", *words, script, DDPJOB_TERMINATION_LOG=str(path), TMPDIR="tmp/its"
    )
    (launcher.folder / "tmp" / "its").rmdir()
    assert done.returncode == 1
    assert json.loads(path.read_text())["exception"] == "ValueError: no shard 7"


def test_filtered_lines_are_collected(launcher: Launcher) -> None:
    script = launcher.script("print('apple'); print('pear')")
    done = launcher.done(
        "--no-preload", "--tee", "1", "--log-dir", "logs", "--duplicate-stdout-filters", "apple,x", script
    )
    assert done.returncode == 0
    (filtered,) = (launcher.folder / "logs").rglob("filtered_stdout.log")
    assert filtered.read_text() == "[default0]:apple\n"


PRINTS = "import time\nwhile True:\n    print('line')\n    time.sleep(0.01)"


@STARTS
@pytest.mark.parametrize("library", ["", "from ddpjob.reporting import termination; termination.install()\n"])
@pytest.mark.parametrize("redirected", ["", "2>&1"])
def test_closed_output_does_not_cause_a_restart(launcher: Launcher, start: str, redirected: str, library: str) -> None:
    """Closed output, as in `ddprun train.py | head`, must not restart the ranks with a BrokenPipeError each time."""
    words = shlex.join([sys.executable, "-m", "ddprun", start, str(launcher.script(library + PRINTS))])
    shell = ["bash", "-c", f"{words} {redirected} | head -1; exit ${{PIPESTATUS[0]}}"]
    done = subprocess.run(shell, cwd=launcher.folder, env=launcher.env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "line\n"), done.stderr
    assert "restart 1" not in done.stderr
    assert redirected or done.stderr.endswith(f"(nobody reads its output any more); {REPEATS}\n")
    assert message(launcher)["exception"] == "nobody reads its output any more"


@pytest.mark.parametrize("line", ["raise OSError('x')", "sys.exit(3)"])
def test_another_failure_while_output_is_closed_is_handled_as_usual(launcher: Launcher, line: str) -> None:
    script = launcher.script(f"import sys, time\nprint('line', flush=True)\ntime.sleep(1)\n{line}")
    words = shlex.join([sys.executable, "-m", "ddprun", "--preload=json", "--max-restarts=1", str(script)])
    shell = ["bash", "-c", f"{words} | head -1"]
    done = subprocess.run(shell, cwd=launcher.folder, env=launcher.env, capture_output=True, text=True, check=False)
    assert "restart 1" in done.stderr


@pytest.mark.parametrize("letter", ["r", "ü"])
def test_a_run_with_a_long_name_gets_a_folder_with_a_shortened_name(launcher: Launcher, letter: str) -> None:
    script = launcher.script("import os\nprint(os.environ['TORCHELASTIC_RUN_ID'])")
    run_id = letter * 300
    done = launcher.done("--no-preload", "--log-dir", "logs", "--master-port", 0, "--rdzv-id", run_id, script)
    assert (done.returncode, done.stdout) == (0, f"{run_id}\n"), done.stderr
    (folder,) = (launcher.folder / "logs").iterdir()
    assert folder.name.startswith(letter * 100)


def test_the_temporary_folder_is_removed(launcher: Launcher, tmp_path: Path) -> None:
    script = launcher.script("import os; print(os.path.dirname(os.environ['TORCHELASTIC_ERROR_FILE']))")
    done = launcher.done("--no-preload", script)
    assert done.stdout.startswith(str(tmp_path / "tmp"))
    assert not os.path.exists(done.stdout.strip())


def test_a_restart_names_the_checkpoint_from_which_it_resumes(launcher: Launcher) -> None:
    """The message must name the checkpoint, so that users see how many steps a failure has cost."""
    script = launcher.script(
        """
        import os, ddpjob
        from ddpjob.reporting.progress import report_saved
        ddpjob.progress(7)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            report_saved(5)
            os._exit(3)
        """
    )
    done = launcher.done("--no-preload", script)
    assert done.returncode == 0, done.stderr
    assert "restart 1: rank 0 ended with exit code 3; charged to application, waiting 0 s, from step 5\n" in done.stderr
