"""`ddpjob dev`: saving a file restarts the ranks. No torch: the fork server of these sessions imports only json."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest
from shell import SECONDS_MAX, Cli, eventually

from ddpjob_cli.local.processes.saves import QUIET_SECONDS, STORM_SECONDS, SavedFiles

DDPRUN = str(Path(sys.executable).parent / "ddprun")
WAITS = """
import os, time
print("hello v{version} from", os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"])
time.sleep(600)
"""


class Session:
    """`ddpjob dev` on two nodes, with all its output in one file."""

    def __init__(self, cli: Cli, *words: str, command: tuple[str, ...] = ("train.py",), name: str = "printed") -> None:
        self.path = cli.folder / "train.py"
        self._printed = cli.folder / name
        line = ",".join([DDPRUN, "--preload", "json", *command])
        launch = f"spec.template.spec.containers[0].command=[{line}]"
        argv = [sys.executable, "-m", "ddpjob_cli", "dev", "--nodes", "2", "--set", launch, *words]
        with self._printed.open("w") as file:
            self.process = subprocess.Popen(
                argv, cwd=cli.folder, env=cli.env, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )

    @property
    def text(self) -> str:
        return self._printed.read_text(errors="replace")

    def prints(self, what: str, times: int = 1) -> None:
        """Wait until the session has printed this text this many times."""
        eventually(lambda: self.text.count(what) >= times or self.process.poll() is not None, SECONDS_MAX)
        assert self.text.count(what) >= times, self.text

    def save(self, text: str, path: Path | None = None) -> None:
        """Save like vim: write a new file, and rename it to the old name."""
        path = path or self.path
        (path.parent / "4913").touch()
        (path.parent / "4913").unlink()
        path.with_name(f"{path.name}~").write_text(text)
        path.with_name(f"{path.name}~").replace(path)

    def end(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(SECONDS_MAX)


@pytest.fixture
def session(cli: Cli) -> Iterator[Session]:
    (cli.folder / "train.py").write_text(WAITS.format(version=1))
    found = Session(cli, "train.py")
    yield found
    if found.process.poll() is None:
        found.end()


def test_all_ranks_run_the_saved_code_and_nothing_is_charged(cli: Cli, session: Session) -> None:
    """All ranks must run the saved code. backoffLimit must not count saves, or each save would cause a back-off."""
    for version in range(1, 7):
        session.prints(f"hello v{version} from 0 0")
        session.prints(f"hello v{version} from 1 0")
        session.save(WAITS.format(version=version + 1))
    session.prints("hello v7", 2)
    assert session.end() == 130
    assert session.text.count("↻ train.py changed") == 6
    status = json.loads(next((cli.folder / "state").rglob("*/status.json")).read_text())
    assert (status["attempt"], status["restarts"]["total"], status.get("inPlace")) == (1, 0, None)


def test_nodes_stay_up_after_an_error_or_the_end_of_the_script_until_the_next_save(session: Session) -> None:
    """Nodes must stay after an error or the end of the script, because a new start would import torch again."""
    session.prints("hello v1", 2)
    session.save("def f(:\n")
    session.prints("SyntaxError: invalid syntax (train.py, line 1)); save a file to start them again")
    session.save("import helpers\nprint('helped by', helpers.NAME)\n")
    session.prints("ModuleNotFoundError: No module named 'helpers'); save a file")
    assert session.text.count("import helpers\n") == 1, "the traceback is shown once, and not for each rank"
    session.save("NAME = 'a new file'\n", session.path.with_name("helpers.py"))
    session.prints("helped by a new file", 2)
    session.prints("✔ all ranks have ended with 0; save a file to start them again")
    session.path.with_name("helpers.py").unlink()
    session.prints("↻ helpers.py is gone")
    session.prints("No module named 'helpers'); save a file", 2)
    session.save("import os\nif os.environ['RANK'] == '1': raise OSError('same again')\nimport time; time.sleep(600)\n")
    for times in range(1, 4):
        session.prints("✖ rank 1 ended with exit code 1 in train.py:2 (OSError: same again); save", times)
        session.save(session.path.read_text() + "\n")
    session.save("breakpoint()\nprint('not reached')\n")
    session.prints("(bdb.BdbQuit); breakpoint() needs a terminal; save a file")
    session.save(WAITS.format(version=2))
    session.prints("hello v2", 2)
    assert session.end() == 130


def test_a_rank_that_ignores_sigterm_does_not_delay_the_others_after_a_save(session: Session) -> None:
    session.prints("hello v1", 2)
    session.save("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAITS.format(version=2))
    session.prints("hello v2", 2)
    session.save(WAITS.format(version=3))
    session.prints("hello v3", 2)


def test_a_configuration_file_passed_to_the_script_is_watched_too(cli: Cli) -> None:
    (cli.folder / "train.py").write_text("import sys; print(open(sys.argv[1]).read()); import time; time.sleep(600)")
    (cli.folder / "c.json").write_text("lr 1")
    session = Session(cli, "train.py", "c.json", command=("train.py", "c.json"))
    session.prints("lr 1", 2)
    (cli.folder / "c.json").write_text("lr 2")
    session.prints("lr 2", 2)
    assert session.end() == 130


def test_ctrl_c_during_a_restart_ends_the_session(session: Session) -> None:
    session.prints("hello v1", 2)
    session.save("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAITS.format(version=2))
    session.prints("↻")
    assert session.end() == 130


def test_a_script_started_as_a_module_is_restarted_when_an_import_changes(cli: Cli) -> None:
    package = cli.folder / "pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "part.py").write_text("NAME = 'part 1'")
    (package / "train.py").write_text("from .part import NAME; print('has', NAME); import time; time.sleep(600)")
    session = Session(cli, "-m", "pkg.train", command=("-m", "pkg.train"))
    session.prints("has part 1", 2)
    (package / "part.py").write_text("NAME = 'part two'")  # another size: Python reuses a .pyc of equal mtime and size
    session.prints("has part two", 2)
    assert session.end() == 130


def test_an_unused_session_releases_its_nodes(cli: Cli) -> None:
    (cli.folder / "train.py").write_text("print('done')")
    session = Session(cli, "--idle", "1s", "train.py")
    assert session.process.wait(SECONDS_MAX) == 130
    assert "Stopping on 1s without a save or a line of output" in session.text


def at_a_terminal(cli: Cli, *words: str) -> pexpect.spawn:
    launch = f"spec.template.spec.containers[0].command=[{DDPRUN},--preload,json,train.py]"
    argv = ["-m", "ddpjob_cli", "dev", "--set", launch, *words, "train.py"]
    return pexpect.spawn(
        sys.executable, argv, cwd=cli.folder, env=cli.env, timeout=SECONDS_MAX, encoding="utf-8", dimensions=(50, 400)
    )


def test_enter_restarts_the_ranks_at_a_terminal(cli: Cli) -> None:
    (cli.folder / "train.py").write_text(WAITS.format(version=1))
    child = at_a_terminal(cli)
    child.expect_exact("hello v1")
    child.send("\r")
    child.expect_exact("↻ Enter: all ranks start again")
    child.expect_exact("hello v1")
    child.sendintr()
    child.expect(pexpect.EOF)
    assert child.wait() == 130


DEBUGGED = """
import os, sys
assert "json" in sys.modules, "it is forked"
answer = {answer}
breakpoint()
print("rank", os.environ["RANK"], "went on with", answer)
"""


def test_a_debugger_in_one_rank_starts_again_after_a_save(cli: Cli) -> None:
    """A debugger in one rank must start again after a save. If it is killed, the terminal must keep its echo."""
    script = cli.folder / "train.py"
    script.write_text(DEBUGGED.format(answer=41))
    child = at_a_terminal(cli, "--nodes", "2", "--pdb", "1")
    child.expect_exact("(Pdb)")
    script.write_text(DEBUGGED.format(answer=43))
    child.expect_exact("↻ train.py changed")
    child.expect_exact("(Pdb)")
    child.send("answer += 1\nc\n")
    child.expect_exact("answer += 1")
    child.expect_exact("rank 1 went on with 44")
    child.expect_exact("✔ all ranks have ended with 0; save a file or press Enter to start them again")
    script.write_text("raise OSError('no such shard')")
    child.expect_exact("OSError: no such shard")
    child.sendintr()
    child.expect(pexpect.EOF)
    assert child.wait() == 130


def test_ranks_at_a_breakpoint_get_the_terminal_one_after_the_other(cli: Cli) -> None:
    """Ranks at a breakpoint must get the terminal one after the other: two debuggers would share the user's keys."""
    (cli.folder / "train.py").write_text(DEBUGGED.format(answer=41) + "breakpoint()\nprint('through')\n")
    child = at_a_terminal(cli, "--nodes", "2")
    got = []
    for _ in range(4):  # each of two ranks stops twice, in any order
        child.expect(r"rank (\d) has the terminal until c or q")
        got.append(child.match[1])
        child.expect_exact("(Pdb)")
        child.send("p answer\n")
        child.expect("\n41")
        child.send("c\n")
    assert sorted(got) == ["0", "0", "1", "1"]
    child.expect_exact("✔ all ranks have ended with 0")
    child.sendintr()
    child.expect(pexpect.EOF)
    assert child.wait() == 130


def test_a_debugger_is_refused_on_a_pipe_or_for_a_missing_rank(cli: Cli) -> None:
    (cli.folder / "train.py").write_text("pass")
    for rank, said in (("0", "stdin is not a terminal, and a debugger needs one"), ("2", "the job has one rank, 0")):
        done = cli.run("dev", "--pdb", rank, "train.py", stdin=subprocess.DEVNULL)
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr


def test_a_changed_module_that_was_preloaded_is_run_too(cli: Cli) -> None:
    """A module that was preloaded must be loaded again after a change, or the ranks run old code."""
    (cli.folder / "train.py").write_text("import part; print('has', part.NAME); import time; time.sleep(600)")
    (cli.folder / "part.py").write_text("NAME = 'part 1'")
    session = Session(cli, "train.py", command=("--preload=part", "train.py"))
    session.prints("has part 1", 2)
    (cli.folder / "part.py").write_text("NAME = 'part two'")
    session.prints("has part two", 2)
    session.prints("part.py changed after the import; every rank is a new process", 2)
    assert session.end() == 130


@pytest.mark.parametrize(
    ("name", "text", "words", "said"),
    [
        ("job.yaml", "kind: DDPJob", (), "job.yaml: not a Python script; ddpjob dev takes a script, or -m MODULE"),
        ("a.py", "import torch.multiprocessing as mp\nmp.spawn(print)", (), "starts the processes of its node by it"),
        ("a.py", "def f(:", (), "a.py:1: not valid Python: invalid syntax"),
        ("a.py", "pass", ("--nodes", "0"), "must be at least 1, is 0"),
    ],
)
def test_a_command_that_cannot_be_restarted_in_place_is_refused(cli, name, text, words, said):
    (cli.folder / name).write_text(text)
    done = cli.here("dev", *words, name)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr


# ---- which files count -------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("train.py", "conf/a.yaml", "metrics.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")
    os.symlink(tmp_path, tmp_path / "conf/circle")
    os.symlink("nowhere.py", tmp_path / "dangling.py")
    os.symlink("itself", tmp_path / "itself")
    return tmp_path


def changed(files: SavedFiles, **how: Any) -> set[str]:
    """Return the names of files that two polls, 9 seconds apart, report as changed."""
    now = time.monotonic()
    return {Path(path).name for at in (now, now + 9) for path in files.poll(at, **how)}


def test_a_file_counts_as_changed_once_if_its_text_has_changed(folder: Path) -> None:
    files = SavedFiles([str(folder)])
    assert changed(files) == set()
    (folder / "train.py").touch()
    (folder / "metrics.json").write_text("2")
    assert changed(files) == set()
    (folder / "train.py").write_text("22")
    (folder / "conf/a.yaml").write_text("22")
    assert changed(files) == {"train.py", "a.yaml"}
    assert changed(files) == set()
    (folder / "train.py").unlink()
    assert changed(files) == {"train.py"}
    (folder / "train.py").write_text("3")
    assert changed(files) == {"train.py"}


def test_a_new_file_counts_as_changed_if_no_rank_can_have_written_it(folder: Path) -> None:
    files = SavedFiles([str(folder)])
    (folder / "new").mkdir()
    (folder / "new/copy.py").write_text("1")
    (folder / "new/hparams.yaml").write_text("1")
    assert changed(files) == set()
    for hidden in (".git/index.py", "__pycache__/a.py"):
        (folder / hidden).parent.mkdir()
        (folder / hidden).write_text("1")
    assert changed(files, also_new=True) == {"copy.py"}
    (folder / "new/other.py").write_text("1")
    files.adopt()
    assert changed(files, also_new=True) == set()
    (folder / "new/mine.py").write_text("1")
    assert changed(files, also_new=True) == {"mine.py"}
    (folder / "new/copy.py").write_text("2")
    assert changed(files) == {"copy.py"}, "since the ranks have started again it may be imported"


def test_a_file_of_200_mb_is_not_read_and_a_data_folder_is_not_searched(folder: Path) -> None:
    with (folder / "large.py").open("wb") as file:
        file.truncate(200 << 20)
    (folder / "data").mkdir()
    for number in range(5100):
        (folder / f"data/{number}.txt").touch()
    began = time.process_time()
    files = SavedFiles([str(folder)])
    assert changed(files) == set()
    assert time.process_time() - began < 1, "reading alone takes longer"
    with (folder / "large.py").open("ab") as file:
        file.write(b"#")
    assert changed(files) == {"large.py"}


def test_changes_are_handled_when_they_have_settled_and_at_the_latest_after_a_second(folder: Path) -> None:
    """One save must be reported once, although an editor truncates or replaces the file before it writes the text."""
    files, script = SavedFiles([str(folder)]), folder / "train.py"
    now = 100.0
    for text in ("", "2", "22"):
        script.write_text(text)
        assert files.poll(now) == set()
        now += QUIET_SECONDS / 2
    script.unlink()
    assert files.poll(now) == set()
    script.write_text("1")
    assert [files.poll(now + after) for after in (0, 5)] == [set(), set()], "it is as before"
    polls = [110 + QUIET_SECONDS / 2 * number for number in range(200)]
    for number, at in enumerate(polls):
        script.write_text(f"# {number}")
        if files.poll(at):
            assert at == pytest.approx(110 + STORM_SECONDS, abs=QUIET_SECONDS)
            return
    raise AssertionError("it counts in the end")
