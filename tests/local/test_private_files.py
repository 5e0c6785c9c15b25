"""Only the user of a local run can read its files, and a run does not write through planted files."""

import json
import os
import shutil
import stat
import tempfile
import uuid
from pathlib import Path

import pytest
from shell import Cli

from ddpjob_cli.local.processes.logs import Log
from ddpjob_cli.local.run_files import runs
from ddpjob_cli.local.run_files.run_folder import FAULTS, LATEST, MARK, RUNS_KEPT, RunFolder

PRINTS = """
import os, pathlib
folder = pathlib.Path(os.environ["DDPJOB_TERMINATION_LOG"]).parent.parent
modes = {str(p.relative_to(folder)): oct(p.lstat().st_mode & 0o777) for p in folder.rglob("*") if not p.is_symlink()}
print("modes", modes, flush=True)
"""


def modes(folder: Path) -> dict[str, int]:
    return {
        str(p.relative_to(folder)): stat.S_IMODE(p.lstat().st_mode) for p in folder.rglob("*") if not p.is_symlink()
    }


@pytest.fixture
def open_umask() -> object:
    before = os.umask(0)
    yield
    os.umask(before)


def test_files_of_a_run_have_mode_0600_and_its_folders_0700(cli: Cli, open_umask: object) -> None:
    """Files of a run must have mode 0600 and folders 0700, because everybody could read a copy's status and logs."""
    done = cli.run("run", cli.file(PRINTS), "--logs", "logs", code=0)
    (run,) = [path for path in (cli.folder / "logs/job").iterdir() if path.name != LATEST]
    copy = shutil.copytree(run, cli.folder / "copy")
    for folder in (run, copy):
        assert {"status.json", "history.json", "run.json"} <= modes(folder).keys()
        assert set(modes(folder).values()) == {0o600}
    during = eval(next(line for line in done.stdout.splitlines() if "modes" in line).partition("modes ")[2])
    assert {name: mode for name, mode in during.items() if mode not in ("0o600", "0o700")} == {}


def test_no_other_user_can_create_names_in_the_folder_of_a_job(tmp_path: Path, open_umask: object) -> None:
    """No other user may create names in a job's folder: they could replace a running run by a link."""
    RunFolder("job", tmp_path / "base").close()
    assert stat.S_IMODE((tmp_path / "base/job").stat().st_mode) == 0o700


def planted(kind: str, path: Path, outside: Path) -> None:
    if kind == "link":
        path.symlink_to(outside)
    elif kind == "hard link":
        os.link(outside, path)
    else:
        os.mkfifo(path)


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe"])
def test_a_record_replaces_a_planted_file_and_a_planted_log_is_refused(tmp_path: Path, kind: str) -> None:
    outside = tmp_path / "precious"
    outside.write_text("precious")
    folder = RunFolder("job", tmp_path / "base")
    planted(kind, folder.path / "status.json", outside)
    folder.write("status.json", b"{}")
    assert (folder.path / "status.json").read_bytes() == b"{}"
    planted(kind, folder.path / "job-1-0.log", outside)
    with pytest.raises(OSError, match=r"link|pipe|No such device"):
        Log(folder.path / "job-1-0.log")
    assert outside.read_text() == "precious"
    folder.close()


def test_a_record_that_is_a_pipe_does_not_block_the_list_of_runs(tmp_path: Path) -> None:
    folder = RunFolder("job", tmp_path)
    for name in ("run.json", "status.json"):
        os.mkfifo(folder.path / name)
    folder.close()
    assert runs.find_all(tmp_path) == []


def marked(folder: Path, job: str) -> Path:
    """Create a folder with the marker file of a run, and return it."""
    folder.mkdir(parents=True)
    mark = {"job": job, "run": folder.name, "inode": folder.stat().st_ino}
    (folder / MARK).write_text(json.dumps(mark))
    return folder


def test_a_folder_whose_name_is_a_glob_pattern_is_not_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder whose name is a glob pattern must not count as a run: all agents' folders could be removed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    others = tmp_path / "tmp" / f"ddprun_{uuid.uuid4()}_1"
    others.mkdir(parents=True)
    for name in ("*", "[0-9a-f]*", "?"):
        marked(tmp_path / "base/job" / name, "job")
    RunFolder("job", tmp_path / "base").close()
    assert others.exists()


def test_a_run_folder_replaced_by_a_link_during_cleanup_removes_nothing_else(tmp_path, monkeypatch):
    """A run's folder that a link replaces during the cleanup must not cause a removal behind the link."""
    outside = tmp_path / "outside"
    (outside / "volumes").mkdir(parents=True)
    (outside / "volumes/precious").write_text("precious")
    base = tmp_path / "base"
    old = RunFolder("job", base)
    (old.path / "volumes" / "x").mkdir(parents=True)
    os.close(old.lock)
    rmtree = shutil.rmtree

    def swapped(path: Path, **options: object) -> None:
        if old.path.exists() and not old.path.is_symlink():
            old.path.rename(tmp_path / "moved")
            old.path.symlink_to(outside)
        rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", swapped)
    RunFolder("job", base).close()
    assert (outside / "volumes/precious").read_text() == "precious"
    assert not (tmp_path / "moved/volumes").exists(), "the run's own went"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_files_of_another_user_are_neither_removed_nor_followed(tmp_path: Path) -> None:
    base = tmp_path / "base"
    for _ in range(RUNS_KEPT + 3):
        theirs = marked(base / "job" / str(uuid.uuid4()), "job")
        (theirs / FAULTS).mkdir()
        os.chown(theirs, 12345, 12345)
    RunFolder("job", base).close()
    assert len(list(base.glob(f"job/*/{FAULTS}"))) == RUNS_KEPT + 3
    (base / "linked").symlink_to(tmp_path)
    os.chown(base / "linked", 12345, 12345, follow_symlinks=False)
    with pytest.raises(Exception, match="a link of another user"):
        RunFolder("linked", base)
