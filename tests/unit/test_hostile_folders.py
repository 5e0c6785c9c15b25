"""Folders to check, convert or submit may be a stranger's: nothing in them is executed or blocks the command."""

import os
import socket
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ddpjob_cli.client import gitignore, pack
from ddpjob_cli.commands import main
from ddpjob_cli.manifest.yamlfile import InputError

WRONG = "import torch.distributed as d, os\nd.init_process_group(rank=int(os.environ['LOCAL_RANK']))\n"


def ran(*words: object) -> Result:
    result = CliRunner().invoke(main.cli, list(map(str, words)), standalone_mode=False)
    if result.exception is not None and not isinstance(result.exception, InputError):
        raise result.exception
    return result


def said(result: Result) -> str:
    return f"{result.stdout}{result.stderr}{result.exception or ''}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "train.py").write_text(WRONG)
    monkeypatch.chdir(folder)
    return folder


# ---------------------------------------------------------------- git


@pytest.fixture
def no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put fake programs on PATH, and return the file that they write their names to if something calls them."""
    ran, programs = tmp_path / "ran", tmp_path / "bin"
    programs.mkdir()
    for name in ("git", "less", "sh", "bash", "python", "python3", "ssh", "tar", "nvidia-smi", "kubectl"):
        (programs / name).write_text(f"#!{sys.executable}\nopen({str(ran)!r}, 'a').write({name!r})\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    return ran


def configured_to_run(folder: Path, ran: Path) -> None:
    """Make a repository whose configuration names a program wherever git allows one."""
    git = folder / ".git"
    for below in ("objects", "refs/heads", "hooks"):
        (git / below).mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "config").write_text(
        f'[core]\n\tfsmonitor = "touch {ran}; false"\n\tpager = touch {ran}\n\thooksPath = hooks\n'
        f"\tsshCommand = touch {ran}\n\tattributesFile = attributes\n"
        f'[filter "x"]\n\tclean = touch {ran}\n\tprocess = touch {ran}\n'
        f'[alias]\n\tls-files = "!touch {ran}"\n[includeIf "gitdir:/"]\n\tpath = more\n'
    )
    (folder / ".gitattributes").write_text("* filter=x\n")
    (folder / ".gitmodules").write_text(
        f'[submodule "x"]\n\tpath = x\n\turl = ext::touch {ran}\n\tupdate = !touch {ran}\n'
    )
    for hook in ("post-index-change", "pre-commit", "fsmonitor-watchman"):
        (git / "hooks" / hook).write_text(f"#!/bin/sh\ntouch {ran}\n")
        (git / "hooks" / hook).chmod(0o755)


def bare(folder: Path, ran: Path) -> None:
    """Put the files of a bare repository next to the scripts. An ordinary clone can contain such files."""
    configured_to_run(folder, ran)
    for path in (folder / ".git").iterdir():
        path.rename(folder / path.name)
    (folder / ".git").rmdir()
    (folder / "config").write_text(f"[core]\n\tbare = false\n\tworktree = .\n\tfsmonitor = touch {ran}\n")


def pointing_elsewhere(folder: Path, ran: Path) -> None:
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    configured_to_run(elsewhere, ran)
    (folder / ".git").write_text(f"gitdir: {elsewhere}/.git\n")


@pytest.mark.parametrize("made", [configured_to_run, bare, pointing_elsewhere])
@pytest.mark.parametrize(
    "words", [["check", "."], ["check", "train.py"], ["init", "train.py"], ["convert", "train.py"],
              ["submit", "--code", ".", "--dry-run", "train.py"], ["run", "train.py", "--dry-run", "--nodes", "2"]],
    ids=" ".join,
)  # fmt: skip
def test_no_program_named_by_a_folder_is_executed(folder, no_program, made, words, monkeypatch) -> None:
    """No program that a folder names may be executed: `git status` would call the program in core.fsmonitor."""
    made(folder, no_program)
    for name in ("GIT_DIR", "GIT_CONFIG_GLOBAL", "GIT_EXTERNAL_DIFF", "GIT_SSH_COMMAND"):
        monkeypatch.setenv(name, str(folder))
    ran(*words)
    assert not no_program.exists(), no_program.read_text()


def test_a_folder_is_checked_even_without_git(folder, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    (folder / ".gitignore").write_text("/old\n")
    (folder / "old").mkdir()
    (folder / "old/train.py").write_text(WRONG)
    result = ran("check", ".")
    assert [line.split(": ")[0] for line in result.stdout.splitlines()] == ["train.py:2"]


# ---------------------------------------------------------------- files that are not regular


def plant(folder: Path) -> list[str]:
    """Create pipes, links and devices under the names of files that commands read."""
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "secret.py").write_text(WRONG)
    os.mkfifo(folder / "pipe.py")
    os.mkfifo(folder / "pipe.yaml")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "socket.py"))
    (folder / "device.py").symlink_to("/dev/zero")
    (folder / "loop.py").symlink_to("loop.py")
    (folder / "nowhere.py").symlink_to("not-there")
    (folder / "process.py").symlink_to("/proc/self/environ")
    (folder / "secret.py").symlink_to(outside / "secret.py")
    (folder / "around").symlink_to("..")
    (folder / "folder.py").mkdir()
    with (folder / "sparse.py").open("wb") as file:
        file.truncate(10 << 30)
    return ["pipe.py", "pipe.yaml", "socket.py", "device.py", "loop.py", "nowhere.py", "process.py", "secret.py"]


def test_irregular_files_of_the_folder_are_skipped_and_named(folder) -> None:
    """A pipe must not block the check for ever, nor a link show the content of a user's file."""
    planted = plant(folder)
    (folder / "alias.py").symlink_to("train.py")
    (folder / "a\n::stop-commands::\x1b[2J.py").write_text(WRONG)  # a command for GitHub Actions, if it begins a line
    result = ran("check", ".")
    places = [line.split(": ")[0] for line in result.stdout.splitlines()]
    assert places == ["a ::stop-commands::.py:2", "alias.py:2", "sparse.py:1", "train.py:2"]
    assert "sparse.py:1: error[syntax]: larger than 4 MiB" in result.stdout
    left_out = [line.split(": ")[0] for line in result.stderr.splitlines() if line.endswith("so it is left out")]
    assert sorted(left_out) == sorted(planted)


def test_links_pipes_and_devices_do_not_block_submit(folder) -> None:
    plant(folder)
    (folder / "sparse.py").unlink()
    packed = pack.pack(folder)
    assert packed.files == 1
    assert "leads" in packed.remarks[0] or "lead" in packed.remarks[0]


def test_a_folder_replaced_by_a_link_during_packing_leaks_no_file(folder, monkeypatch) -> None:
    """A user's own file must not be sent to the cluster, where everybody in the namespace can read it."""
    (folder / "src").mkdir()
    (folder / "src/id").write_text("theirs")
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "id").write_text("secret")
    scan = pack.scan

    def swapped(root: Path) -> pack.Folder:
        found = scan(root)
        (folder / "src").rename(folder.parent / "moved")
        (folder / "src").symlink_to(outside)
        return found

    monkeypatch.setattr(pack, "scan", swapped)
    with pytest.raises(InputError, match="src/id: Not a directory"):
        pack.pack(folder)


@pytest.mark.parametrize("name", ["pipe.py", "pipe.yaml", "pipe.ipynb", "pipe"])
@pytest.mark.parametrize("words", ["check", "init", "convert", "run --dry-run", "submit --dry-run"])
def test_a_named_pipe_is_refused_without_waiting(folder, words, name) -> None:
    """A named pipe must be refused without reading it: a read would block for ever."""
    os.mkfifo(folder / name)
    if (words, name) != ("init", "pipe.ipynb"):  # init refuses any notebook, without reading it
        assert "is a pipe" in said(ran(*words.split(), name))


def test_a_gitignore_that_is_not_a_file_is_an_error_of_one_sentence(folder) -> None:
    """.gitignore may list secret files, so an unreadable one must stop the submit."""
    os.mkfifo(folder / ".gitignore")
    for words in (["check", "."], ["submit", "train.py", "--dry-run", "--no-check"]):
        assert str(ran(*words).exception).count("\n") == 0
    (folder / ".gitignore").unlink()
    (folder / ".gitignore").symlink_to("/dev/zero")
    assert "is a link, which is not followed" in str(ran("check", ".").exception)


def test_a_folder_that_is_too_deep_is_skipped_and_named(folder) -> None:
    """A folder of 1,000 levels must be skipped and named, without a traceback."""
    here = os.open(".", os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("d")
        os.chdir("d")
    Path("deep.py").write_text(WRONG)
    deepest = os.open(".", os.O_RDONLY)
    os.fchdir(here)
    result = ran("check", ".")
    assert "more than 100 folders deep, so it is left out" in result.stderr
    assert len(result.stdout.splitlines()) == 1
    with pytest.raises(InputError, match="more than 100 folders deep"):
        pack.pack(folder)
    os.fchdir(deepest)  # shutil.rmtree, and with it pytest, cannot remove so many levels
    os.remove("deep.py")
    for _ in range(1200):
        os.chdir("..")
        os.rmdir("d")
    os.close(deepest)
    os.close(here)


# ---------------------------------------------------------------- .gitignore


@pytest.mark.parametrize(
    "line",
    ["*a" * 40 + "z", "**/a" * 500 + "/z", "a*" * 1000 + "z", "?*" * 1000 + "z", "*" * 4000 + "z", "[ab]*" * 700 + "z"],
    ids=lambda line: line[:6],
)
def test_no_pattern_blocks_submit_or_check(folder, line) -> None:
    """A pattern like `*a*a*a…` must not block `submit` or `check`; it could take half a minute for a single file."""
    deep = "/".join(["a"] * 99)
    (folder / deep).mkdir(parents=True)
    for name in ("a" * 250, f"{deep}/{'a' * 200}", "ab" * 120):
        (folder / name).write_text("x")
    (folder / ".gitignore").write_text(f"{line}\n" * 20)
    assert pack.pack(folder).files == 5
    assert ran("check", ".").stdout.count("\n") == 1


def test_too_many_patterns_for_too_many_files_are_refused_in_one_sentence(folder) -> None:
    """Too many comparisons of long patterns with files must be refused, here those of 100 patterns with 300 files."""
    (folder / ".gitignore").write_text(f"*{'x' * 254}\n" * 100)
    for number in range(300):
        (folder / f"{number}.txt").touch()
    with pytest.raises(InputError, match=r"too many patterns for the files in this folder .*; name a smaller folder"):
        pack.pack(folder)
    for line in ("x", "*a" * 40):
        (folder / ".gitignore").write_text(f"{line}\n" * 100)  # slow to compile, before any path is compared
        with pytest.raises(InputError, match="too many patterns"):
            gitignore.Ignored(folder, left=5_000).enter("")
    (folder / ".gitignore").write_text("a\n" * 600_000)
    with pytest.raises(InputError, match="larger than 1 MiB"):
        pack.pack(folder)


@pytest.mark.parametrize(
    ("pattern", "ignored", "kept"),
    [
        ("a*b*c", "abc aXbXc abcbc", "abcd xabc ab"),
        ("a/**/b", "a/b a/x/b a/x/y/b", "b x/a/b"),
        ("**/b", "b a/b x/y/b", "bb"),
        ("a/**", "a/b a/x/y", "b"),
        ("a**b", "ab aXb", "x/aXc"),
        ("/a//b", "", "a/b"),
        ("[!a-c]x", "dx", "ax bx x"),
        ("[]-]x", "]x -x", "ax"),
        ("[[:digit:]]*", "1 1a", "a1"),
        ("[z-a]", "", "b"),
        ("a[", "", "a["),
        ("x\\", "", "x"),
        ("\\!x", "!x", "x"),
        ("a\\*b", "a*b", "aXb"),
        ("tail\\ ", "'tail '", "tail"),
        ("tail   ", "tail", "tailx"),
        ("é?", "éa", "é"),
    ],
)
def test_a_pattern_means_the_same_as_in_git(tmp_path, pattern, ignored, kept) -> None:
    (tmp_path / ".gitignore").write_text(f"{pattern}\n")
    rules = gitignore.Ignored(tmp_path)
    rules.enter("")
    for paths, wanted in ((ignored, True), (kept, False)):
        for path in ["tail "] if paths == "'tail '" else paths.split():
            assert rules.has(path, is_folder=False) is wanted, path
