"""Warnings about the shell script around a launcher: lost exit codes, and SIGTERM that is not forwarded."""

import contextlib
import time
from pathlib import Path

import pytest

from ddpjob_operator.job.launch import exit_codes, shell, shells

FIXTURES = Path(__file__).parent / "check/fixtures"


def scripts(name: str) -> list[str]:
    """Return the scripts of a fixture, which are separated by empty lines."""
    text = (FIXTURES / f"shells-{name}.txt").read_text()
    return [part.strip("\n") for part in text.split("\n\n") if part.strip()]


def is_lost(script: str) -> bool:
    return bool(list(shells.lost_exit_codes(["bash", "-c", script])))


@pytest.mark.parametrize("script", scripts("lose"))
def test_a_script_that_hides_the_failure_of_its_launcher_gets_a_warning(script: str) -> None:
    """A script that hides its launcher's failure must get a warning, because its job would succeed."""
    assert is_lost(script)


@pytest.mark.parametrize("script", scripts("keep"))
def test_a_script_that_returns_the_failure_of_its_launcher_gets_no_warning(script: str) -> None:
    """A correct script must get no warning, because users ignore a check with false warnings."""
    assert not is_lost(script)


@pytest.mark.parametrize(
    ("script", "part"),
    [
        ("torchrun t.py | tee log", "that of the last command in the pipe, `| tee log`"),
        ("torchrun t.py || true", "`|| true` takes its place"),
        ("torchrun t.py; echo done", "goes on with `echo done`"),
        ("torchrun t.py &", "in the background"),
        ("torchrun t.py & wait", "`wait $!`"),
        ("if torchrun t.py; then a; fi", "`if` only tests it"),
        ("! torchrun t.py", "`!` turns a failure into 0"),
        ("echo $(torchrun t.py)", "inside another command"),
        ("torchrun t.py; exit 0", "`exit 0`"),
        ("trap 'exit 0' EXIT; torchrun t.py", "`trap 'exit 0' EXIT` sets another"),
        ("script -c 'torchrun t.py' log", "give it -e"),
        ("tmux new -d -s t 'torchrun t.py'", "`tmux` starts it in the background"),
        ("screen -dmS t bash -c 'torchrun t.py'", "`screen` starts it in the background"),
    ],
)
def test_the_warning_quotes_the_text_that_loses_the_exit_code(script: str, part: str) -> None:
    (warning,) = shells.lost_exit_codes(["bash", "-c", script])
    assert warning.startswith("the exit code of torchrun is lost: ")
    assert part in warning


def test_the_fix_of_a_pipe_in_sh_is_bash_because_dash_has_no_pipefail() -> None:
    assert "use bash in place of sh" in next(shells.lost_exit_codes(["sh", "-c", "torchrun t.py | tee log"]))
    assert "sh" not in next(shells.lost_exit_codes(["bash", "-c", "torchrun t.py | tee log"])).split()


@pytest.mark.parametrize(
    ("words", "is_warned"),
    [
        (["sh", "-c", "set -o pipefail; torchrun t.py | tee log"], True),
        (["sh", "-euo", "pipefail", "-c", "torchrun t.py | tee log"], True),
        (["bash", "-c", "set -o pipefail; torchrun t.py | tee log"], False),
        (["bash", "-c", "sh -c 'set -euo pipefail; torchrun t.py'"], True),
        (["sh", "-c", "torchrun t.py"], False),
    ],
)
def test_pipefail_in_sh_gets_a_warning(words: list[str], is_warned: bool) -> None:
    """`set -o pipefail` in sh must get a warning: if sh is dash, it exits with 2 before anything has started."""
    assert shells.pipefail_in_sh(words) is is_warned


@pytest.mark.parametrize(
    ("words", "is_lost"),
    [
        (["/bin/bash", "-lc", "torchrun t.py | tee log"], True),
        (["bash", "-o", "pipefail", "-c", "torchrun t.py | tee log"], False),
        (["timeout", "1h", "bash", "-c", "torchrun t.py | tee log"], True),
        (["/opt/nvidia/nvidia_entrypoint.sh", "bash", "-c", "torchrun t.py | tee log"], True),
        (["busybox", "sh", "-c", "torchrun t.py | tee log"], True),
        (["bash", "-O", "extglob", "-c", "torchrun t.py | tee log"], True),
        (["bash", "run.sh", "-c", "torchrun t.py | tee log"], False),  # an option of run.sh
        (["script", "-c", "torchrun t.py", "log"], True),
        (["torchrun", "t.py"], False),
        (["setsid", "torchrun", "t.py"], True),  # setsid forks if it is the leader of its group, as in a container
        (["torchrun", "t.py", "|", "tee", "log"], False),  # without a shell, `|` is an argument
        (["bash", "run.sh"], False),
        (["bash", "-c", "torchrun 't.py | tee"], False),  # the closing quote is missing
        (["(("], False),  # a list of words does not need valid shell syntax
        ([], False),
    ],
)
def test_a_command_without_a_shell_loses_no_exit_code_unless_it_starts_one(words: list[str], is_lost: bool) -> None:
    assert bool(list(shells.lost_exit_codes(words))) is is_lost


@pytest.mark.parametrize(
    "script",
    [
        "cd .; torchrun t.py; echo after",
        "torchrun t.py | tee log",
        "exec torchrun t.py | tee log",
        "f() { torchrun t.py; }; f",
        "if a; then torchrun t.py; fi",
        "torchrun t.py && echo done",
        "torchrun t.py || exit 1",
        "torchrun t.py & wait $!",
        "sh -c 'exec torchrun t.py'; echo done",
        "(torchrun t.py)",
        "set -e\ntorchrun t.py\ncp a b",
        "exec bash -c 'torchrun t.py; true'",
        "torchrun t.py > >(tee log) 2>&1",
        "trap 'echo bye' TERM; torchrun t.py & wait",
        "trap 'pkill torchrun' TERM; torchrun t.py; true",
        "trap 'echo bye' TERM; torchrun t.py",
        "torchrun t.py 2>&1",
        "time torchrun t.py",
        'f() { "$@"; }; f torchrun t.py',
        'CMD=(torchrun t.py); "${CMD[@]}"; true',
        "eval torchrun t.py",
        "command torchrun t.py; true",
        "echo t.py | exec xargs torchrun",
        "exec script -qec 'torchrun t.py' /dev/null",
        "exec setsid -w torchrun t.py",
        "trap 'kill -9 $pid' TERM; torchrun t.py & pid=$!; wait $pid",
        "trap 'kill $pid' TERM; { torchrun t.py; } & pid=$!; wait $pid",
        "trap 'kill $pid' TERM; torchrun t.py | tee log & pid=$!; wait $pid",
        "find . -maxdepth 0 -exec torchrun t.py \\;",
        "bash <<< 'torchrun t.py'",
        "exec bash <<< 'torchrun t.py; true'",
        "trap 'kill -INT $pid' TERM; torchrun t.py & pid=$!; wait $pid",
    ],
)
def test_a_launcher_that_its_shell_waits_for_gets_no_sigterm(script: str) -> None:
    """A launcher that its shell waits for must get a warning: it gets no SIGTERM, so its ranks do not save."""
    assert shells.without_sigterm(["bash", "-c", script]) == "torchrun"


@pytest.mark.parametrize(
    "script",
    [
        "torchrun t.py",
        "cd .; exec torchrun t.py",
        "cd . && torchrun t.py",
        "cd .\ntorchrun t.py\n",
        "if a; then exec torchrun t.py --resume; fi; exec torchrun t.py",
        "trap 'kill -TERM $pid' TERM; torchrun t.py & pid=$!; wait $pid",
        "exec torchrun t.py > >(tee log) 2>&1",
        "stop() { kill -TERM $pid; }; trap stop SIGTERM; torchrun t.py & pid=$!; wait $pid",
        "trap 'kill -TERM $pid' EXIT; torchrun t.py & pid=$!; wait $pid",
        "f() { exec torchrun t.py; }; f",
        "trap 'kill 0' EXIT; torchrun t.py",
        "trap 'kill $pid' TERM; (torchrun t.py) & pid=$!; wait $pid",
        "trap 'kill $pid' TERM; torchrun t.py & pid=$!; while kill -0 $pid; do sleep 1; done",
        "python prep.py; exec torchrun t.py",
        "bash run.sh; echo done",
        "exec bash <<< 'exec torchrun t.py'",
        "trap 'kill -INT $pid' TERM; ddprun t.py & pid=$!; wait $pid",
        "trap 'kill -9 $log; kill -s TERM $pid' TERM; torchrun t.py & pid=$!; wait $pid",
    ],
)
def test_a_launcher_that_replaces_its_shell_or_is_signalled_by_a_trap_gets_sigterm(script: str) -> None:
    assert shells.without_sigterm(["bash", "-c", script]) == ""


@pytest.mark.parametrize(
    ("script", "is_warned"),
    [
        ("torchrun t.py", True),
        ("exec sh -c 'torchrun t.py'", True),
        ("trap 'kill $pid' SIGTERM; torchrun t.py & pid=$!; wait $pid", True),
        ("exec torchrun t.py", False),
        ("exec bash -c 'torchrun t.py'", False),
        ("trap 'kill $pid' TERM; { torchrun t.py; } & pid=$!; wait $pid", False),
        ("trap 'kill %1; wait' TERM; torchrun t.py & wait $!", True),
        ("trap 'kill -TERM $(jobs -p); wait' TERM; torchrun t.py & wait $!", True),
        ("stop() { kill `jobs -p`; wait; }; trap stop TERM; torchrun t.py & wait $!", True),
        ("trap 'jobs -p > pids; kill $(cat pids); wait' TERM; torchrun t.py & wait $!", False),
    ],
)
def test_dash_is_replaced_by_its_last_command_only_with_exec(script: str, is_warned: bool) -> None:
    """`[sh, -c, torchrun train.py]` must get a warning if sh is dash, which runs its last command as a child."""
    assert ("dash (sh in Debian" in shells.sigterm_warning(["sh", "-c", script])) is is_warned


@pytest.mark.parametrize(
    ("trap", "waits", "is_warned"),
    [
        ("kill $pid", "wait $pid", True),
        ("kill $pid", "wait $pid; exit $?", True),
        ("kill $pid; exit", "while kill -0 $pid; do sleep 1; done", True),
        ("kill $pid; wait $pid", "wait $pid", False),
        ("kill $pid", "wait $pid; wait $pid", False),
        ("kill $pid", "while kill -0 $pid; do wait $pid; done", False),
    ],
)
def test_a_shell_that_exits_right_after_its_trap_gets_a_warning(trap: str, waits: str, is_warned: bool) -> None:
    """A shell that exits after its trap must get a warning: the container ends, and with it ranks that are saving."""
    warning = shells.sigterm_warning(["bash", "-c", f"trap '{trap}' TERM; torchrun t.py & pid=$!; {waits}"])
    assert ("`wait` in the trap as well" in warning) is is_warned


def test_a_launcher_gets_sigterm_from_an_init_that_signals_all_processes() -> None:
    assert shells.without_sigterm(["dumb-init", "bash", "-c", "torchrun t.py; echo done"]) == ""
    assert shells.without_sigterm(["tini", "-g", "--", "bash", "-c", "torchrun t.py; echo done"]) == ""
    assert shells.without_sigterm(["tini", "--", "bash", "-c", "torchrun t.py; echo done"]) == "torchrun"
    assert shells.without_sigterm(["env", "A=1", "bash", "-c", "torchrun t.py; echo done"]) == "torchrun"


def test_exit_code_0_proves_success_only_if_no_shell_can_lose_a_failure() -> None:
    assert exit_codes.zero_proves_success(["torchrun", "t.py"])
    assert exit_codes.zero_proves_success(["bash", "-c", "torchrun a.py || torchrun b.py"])
    assert not exit_codes.zero_proves_success(["bash", "-c", "torchrun t.py | tee log"])
    assert not exit_codes.zero_proves_success(["bash", "-c", "timeout 1h torchrun t.py || [ $? -eq 124 ]"])
    assert not exit_codes.zero_proves_success(["bash", "run.sh"])
    assert not exit_codes.zero_proves_success(["python", "launch.py"])


def test_many_unknown_tests_in_a_script_do_not_multiply_its_paths() -> None:
    script = "\n".join(f"if [ -f x{i} ]; then echo {i}; fi" for i in range(30)) + "\ntorchrun t.py | tee log"
    assert is_lost(script)


@pytest.mark.parametrize(
    "text", ["a 'b", 'echo "', "if x", "a )", "fi", "a | ", "$(", "`", "case x in", "a <<E", "(" * 99]
)
def test_a_script_that_cannot_be_parsed_raises_only_shell_syntax_error(text: str) -> None:
    with contextlib.suppress(shell.ShellSyntaxError):
        shell.parse(text)
    assert not is_lost(f"torchrun t.py {text}") or text == "a <<E"


@pytest.mark.parametrize("program", ["xargs", "docker", "env", "sudo"])
@pytest.mark.parametrize("word", ["a", "env", "sudo"])
def test_a_command_of_thousands_of_words_is_read_at_once(program: str, word: str) -> None:
    """A command of thousands of words must be read at once: 20 kB of `xargs a a a …` must not block the operator."""
    began = time.process_time()
    exit_codes.launcher_exits([program, *[word] * 5000])
    assert time.process_time() - began < 1
