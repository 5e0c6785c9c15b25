"""The folder of a run is inside a folder of the user. Nothing there is removed except what a run has created."""

import os
import pwd
import shutil
import tempfile
import threading
import uuid
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shell import Cli

from ddpjob_cli.local.run_files.run_folder import LATEST, MARK, RUNS_KEPT, RunFolder, is_running

RUNS = RUNS_KEPT + 5


def files_below(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


def fill(folder: Path) -> None:
    """Add files like those of a data set, or of another tool's runs."""
    for name in ("volumes", "deep/er"):
        (folder / name).mkdir(parents=True)
        (folder / name / "x.png").write_text("precious")
    for name in ("lock", "token", "job-1-0.log", "status.json"):
        (folder / name).write_text("precious")


def runs_of(job: Path) -> list[Path]:
    """Return the folders of the job's runs, without the link to the latest run."""
    return [path for path in job.iterdir() if path.name != LATEST]


def run_often(base: Path, times: int = RUNS) -> None:
    for _ in range(times):
        RunFolder("job", base).close()


def test_no_file_outside_is_removed_through_a_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    fill(outside)
    before = files_below(outside)
    base = tmp_path / "base"
    run_often(base, 2)
    for run in runs_of(base / "job"):
        (run / "volumes").symlink_to(outside)
        (run / "token").symlink_to(outside / "token")
        (run / "lock").symlink_to(outside / "lock")
    for _ in range(RUNS):
        (base / "job" / str(uuid.uuid4())).symlink_to(outside)
    run_often(base)
    assert files_below(outside) == before


def test_a_marked_folder_that_is_only_linked_to_is_not_removed(tmp_path: Path) -> None:
    """A marked folder that is only linked to must not be removed, because a user may have moved the run."""
    run_often(tmp_path, 1)
    (run,) = runs_of(tmp_path / "job")
    (run / "job-1-0.log").write_text("the one that mattered")
    moved = tmp_path / run.name
    run.rename(moved)
    run.symlink_to(moved)
    run_often(tmp_path)
    assert (moved / "job-1-0.log").exists()


def test_a_copy_of_a_run_belongs_to_the_user_and_is_kept(tmp_path: Path) -> None:
    """A user's copy of a run must be kept, however many runs follow."""
    run_often(tmp_path, 1)
    (run,) = runs_of(tmp_path / "job")
    (run / "job-1-0.log").write_text("the one that mattered")
    copy = tmp_path / "job" / "kept"
    shutil.copytree(run, copy, symlinks=True)
    again = tmp_path / "other" / "job" / run.name
    shutil.copytree(run, again, symlinks=True)
    run_often(tmp_path)
    run_often(tmp_path / "other")
    assert not run.exists()
    assert (copy / "job-1-0.log").exists()
    assert (again / "job-1-0.log").exists()


def test_files_that_a_user_adds_to_a_run_folder_are_kept(tmp_path: Path) -> None:
    """Files that a user adds to a run's folder must be kept, such as notes and checkpoints."""
    run_often(tmp_path, 1)
    (run,) = runs_of(tmp_path / "job")
    (run / "job-1-0.log").write_text("log")
    (run / "job-12-3-r1.log").write_text("log")
    (run / "notes.txt").write_text("precious")
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "best.pt").write_text("precious")
    run_often(tmp_path)
    assert files_below(run) == {"notes.txt": "precious", "checkpoints/best.pt": "precious"}


def test_old_runs_are_removed_and_a_killed_run_leaves_no_volume(tmp_path: Path) -> None:
    """Old runs must be removed, and a killed run must leave no volume, because both fill the disk."""
    first = RunFolder("job", tmp_path)
    (first.path / "volumes" / "job-1-0").mkdir(parents=True)
    (first.path / "job-1-0.log").write_text("log")
    os.close(first.lock)  # SIGKILL also releases the lock
    run_often(tmp_path, 1)
    assert not (first.path / "volumes").exists()
    assert (first.path / "job-1-0.log").exists()
    run_often(tmp_path)
    assert not first.path.exists()
    assert len(runs_of(tmp_path / "job")) == RUNS_KEPT


def test_agent_folders_of_a_killed_run_are_removed_by_the_next_run(monkeypatch, tmp_path):
    """After `kill -9` of `ddpjob run` the next run must remove the agents' folders in /tmp."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    killed, running = RunFolder("job", tmp_path), RunFolder("job", tmp_path)
    of_killed, of_running, others = (
        tmp_path / "tmp" / name
        for name in (f"ddprun_{killed.uid}-1_5f3a", f"ddprun_{running.uid}-1_77c0", f"ddprun_{uuid.uuid4()}-1_0b1d")
    )
    for folder in (of_killed, of_running, others):
        (folder / "attempt_0").mkdir(parents=True)
    os.close(killed.lock)  # SIGKILL also releases the lock
    run_often(tmp_path, 1)
    assert [folder.exists() for folder in (of_killed, of_running, others)] == [False, True, True]
    running.close()
    assert not of_running.exists()


@pytest.mark.parametrize("command", [["run", "job.yaml"], ["list"], ["logs", "job"], ["report", "job"]])
def test_a_user_without_a_home_must_set_one(cli: Cli, monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    """A user without a home, as in `docker run --user 12345`, must get an error that says what to set."""
    cli.file("pass")
    for name in ("HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
        cli.env.pop(name, None)

    def unknown(*_: object) -> None:
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    done = cli.here(*command)
    assert (done.returncode, "set HOME or XDG_STATE_HOME" in done.stderr) == (2, True), done.stderr


def test_a_running_run_is_not_cleaned_up(tmp_path: Path) -> None:
    running = RunFolder("job", tmp_path)
    (running.path / "volumes" / "job-1-0").mkdir(parents=True)
    run_often(tmp_path)
    assert (running.path / "volumes" / "job-1-0").exists()
    running.close()
    assert not (running.path / "volumes").exists()


def test_two_commands_that_check_a_killed_run_at_once_both_see_that_it_has_ended(tmp_path: Path) -> None:
    killed = RunFolder("job", tmp_path)
    os.close(killed.lock)  # SIGKILL also releases the lock
    answers: list[bool] = []
    threads = [
        threading.Thread(target=lambda: answers.extend(is_running(killed.path) for _ in range(2000))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [False] * 8000


def test_the_link_latest_points_to_the_newest_run_and_a_users_file_of_that_name_is_kept(tmp_path: Path) -> None:
    """The link `latest` must lead to the newest run, and a user's file of this name must be kept."""
    for _ in range(2):
        newest = RunFolder("job", tmp_path)
        newest.close()
        assert (tmp_path / "job" / LATEST).resolve() == newest.path
    for job, make in (
        ("file", lambda path: path.write_text("precious")),
        ("folder", lambda path: path.mkdir()),
        ("link", lambda path: path.symlink_to("../job")),
        ("sibling", lambda path: path.symlink_to("best")),
    ):
        theirs = tmp_path / job / LATEST
        theirs.parent.mkdir()
        make(theirs)
        before = os.readlink(theirs) if theirs.is_symlink() else theirs.is_dir()
        RunFolder(job, tmp_path).close()
        assert before == (os.readlink(theirs) if theirs.is_symlink() else theirs.is_dir()), job


@pytest.mark.parametrize("kind", ["file", "dangling", "link to a file"])
def test_a_file_in_place_of_the_folder_is_refused_and_kept(cli: Cli, kind: str) -> None:
    """If a file has the name of the run's folder, users must neither see a traceback nor lose the file."""
    (cli.folder / "data").write_text("precious")
    if kind == "file":
        (cli.folder / "job").write_text("precious")
    else:
        (cli.folder / "job").symlink_to("data" if kind == "link to a file" else "nowhere")
    done = cli.run("run", cli.file("pass"), "--logs", ".", code=2, says="choose a folder with --logs")
    assert "Traceback" not in done.stderr
    assert (cli.folder / "data").read_text() == "precious"
    assert (cli.folder / "job").is_symlink() or (cli.folder / "job").read_text() == "precious"


@pytest.mark.parametrize(
    "mark", ["", "{}", "null", "[" * 4000, '{"job": "job"}', '{"job":"job","run":"x","inode":1}', "\udcff", "\0" * 10]
)
def test_a_marker_file_copied_from_another_folder_is_ignored(tmp_path: Path, mark: str) -> None:
    """A marker file that has the right name by chance, or is a copy, must not cause the removal of a user's folder."""
    for i in range(RUNS):
        theirs = tmp_path / "job" / f"x{i}"
        fill(theirs)
        (theirs / MARK).write_bytes(mark.encode(errors="surrogateescape"))
    before = {p.relative_to(tmp_path) for p in tmp_path.rglob("*")}
    run_often(tmp_path, 2)
    assert before <= {p.relative_to(tmp_path) for p in tmp_path.rglob("*")}


NAMES = st.one_of(
    st.sampled_from(["volumes", "lock", "token", MARK, "job-1-0.log", "job"]),
    st.uuids().map(str),
    st.text("abc.-1", min_size=1, max_size=8).filter(lambda n: n not in (".", "..")),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(NAMES, min_size=1, max_size=4), max_size=12))
def test_all_files_of_a_user_are_kept_after_any_number_of_runs(tmp_path_factory, paths):
    base = tmp_path_factory.mktemp("base")
    (base / "job").mkdir()
    for parts in paths:
        path = base.joinpath("job", *parts)
        if not path.exists() and all(not p.is_file() for p in path.parents):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("precious")
    before = files_below(base)
    run_often(base, RUNS_KEPT + 1)
    assert before.items() <= files_below(base).items()
