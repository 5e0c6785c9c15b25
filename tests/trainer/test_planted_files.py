"""Other users may plant links or pipes in a snapshot folder. Links are not followed, and pipes are not waited for."""

import gc
import itertools
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ddpjob
from ddpjob import own_files
from ddpjob.checkpoint import snapshot as snapshot_file
from ddpjob.checkpoint import writers

PRECIOUS = b"precious"


def a_link(path: Path, outside: Path) -> None:
    path.symlink_to(outside)


def a_hard_link(path: Path, outside: Path) -> None:
    os.link(outside, path)


def a_pipe(path: Path, outside: Path) -> None:
    os.mkfifo(path)


def an_endless_device(path: Path, outside: Path) -> None:
    path.symlink_to("/dev/zero")


PLANTS = [a_link, a_hard_link, a_pipe, an_endless_device]


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    file = tmp_path / "precious"
    file.write_bytes(PRECIOUS)
    os.utime(file, (1, 1))
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "s"
    folder.mkdir()
    return folder


def train_one_step(folder: Path) -> None:
    snapshot = ddpjob.Snapshot(folder)
    snapshot.load()
    snapshot.save(1, weights=torch.ones(3))
    snapshot.close()
    del snapshot
    gc.collect()


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("name", ["writer-000001.alive", "writer-000002.alive", "writer-000000.json"])
def test_a_planted_file_under_a_snapshot_name_harms_no_file_outside(folder, outside, plant, name):
    """A link at writer-000001.alive must not be followed, because the user's file behind the link would be emptied."""
    plant(folder / name, outside)
    train_one_step(folder)
    assert outside.read_bytes() == PRECIOUS
    assert outside.stat().st_mtime == 1
    assert list(folder.glob("step-000000000001.*.pt")), "the training saves as if nothing were there"


@pytest.mark.parametrize("plant", PLANTS)
def test_a_link_that_appears_during_the_training_is_neither_touched_nor_emptied(folder, outside, plant, monkeypatch):
    """Heartbeats touch the file `.alive` every few seconds, and the end of the process empties it, but never a link."""
    monkeypatch.setattr(writers, "HEARTBEAT_SECONDS", 0.01)
    checks = itertools.count()

    class Owner:
        pass

    owner, path = Owner(), writers.alive_path(folder, 1)
    done = Waiter()
    writers.begin(owner, path, lambda: done.is_due(next(checks)))
    path.unlink()
    plant(path, outside)
    done.wait_for_more(3)
    del owner
    gc.collect()
    assert outside.read_bytes() == PRECIOUS
    assert outside.stat().st_mtime == 1


class Waiter:
    def __init__(self) -> None:
        import threading

        self._changed = threading.Condition()
        self._count = 0

    def is_due(self, count: int) -> bool:
        with self._changed:
            self._count = count
            self._changed.notify_all()
        return True

    def wait_for_more(self, heartbeats: int) -> None:
        with self._changed:
            begun = self._count
            assert self._changed.wait_for(lambda: self._count >= begun + heartbeats, 60)


@pytest.mark.parametrize("plant", [*PLANTS, lambda path, _: path.mkdir()])
def test_a_state_that_is_no_regular_file_is_ignored(folder, outside, plant):
    """A pipe with the name of a newer state must be ignored, because opening it would block each resume for ever."""
    train_one_step(folder)
    name = "step-000000000009.writer-000001.0123456789abcdef.pt"
    plant(folder / name, outside)
    assert ddpjob.Snapshot(folder).load() == 1


@pytest.mark.parametrize("plant", [a_pipe, an_endless_device, a_link])
def test_a_claim_that_is_no_regular_file_is_ignored(folder, outside, plant):
    """A pipe with the name of a claim file must be ignored, because opening it would block each start."""
    plant(folder / "writer-000007.json", outside)
    train_one_step(folder)
    assert (folder / "writer-000008.json").exists()
    assert outside.read_bytes() == PRECIOUS


def test_names_of_temporary_files_cannot_be_guessed(folder, outside, monkeypatch):
    """Names of temporary files must be random, because a link with a guessed name would redirect a write."""
    for number, last in itertools.product(range(3), range(20)):
        (folder / f".tmp-{number:06d}-{os.getpid()}-{last}").symlink_to(outside)
    assert snapshot_file.create_exclusively(folder, 1, "{}")
    train_one_step(folder)
    assert outside.read_bytes() == PRECIOUS
    assert len({writers.tmp_path(folder, 1).name for _ in range(99)}) == 99


def test_snapshots_are_readable_for_pods_of_the_job_that_run_as_other_users(folder):
    """Snapshots must be readable for other users of the job's pods: the next attempt may run as another user."""
    before = os.umask(0o022)
    try:
        train_one_step(folder)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert set(modes.values()) == {0o644}, modes


# ---- the one way to open -------------------------------------------------------------------------------------


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("flags", [os.O_WRONLY | os.O_CREAT | os.O_TRUNC, os.O_RDWR, os.O_WRONLY | os.O_APPEND])
def test_a_file_is_opened_for_writing_only_if_it_is_ours(tmp_path, outside, plant: Callable, flags):
    plant(tmp_path / "log", outside)
    with pytest.raises(OSError, match=r"is a link|hard link|is a pipe|No such device or address"):
        own_files.open_file(tmp_path / "log", flags)
    assert outside.read_bytes() == PRECIOUS


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "/"])
def test_a_device_or_a_folder_is_not_read_as_a_file(path):
    with pytest.raises(OSError, match=r"is a device|is a folder"):
        own_files.read_file(path)


def test_a_new_file_is_readable_only_for_its_user(tmp_path):
    os.close(own_files.open_file(tmp_path / "log", os.O_WRONLY | os.O_CREAT))
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600


def test_a_folder_is_created_as_ours_or_refused(tmp_path, outside):
    """A folder is created with this user as owner, or refused if another user has created it before, as in /tmp."""
    own_files.make_folder(tmp_path / "new")
    own_files.make_folder(tmp_path / "new")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    (tmp_path / "link").symlink_to(tmp_path / "new")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for refused in (tmp_path / "link", tmp_path / "open", outside):
        with pytest.raises(OSError, match="not a folder that only this user can write"):
            own_files.make_folder(refused)
