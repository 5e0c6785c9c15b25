"""If the folder cannot be written, training continues, but the script must not end with 0 without its last state."""

import contextlib
import errno
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_node import saved

import ddpjob
from ddpjob import process
from ddpjob_core import rules
from ddpjob_core.failures import Failure


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Return a function that lets torch.save fail with this errno; with 0 torch.save works again."""
    number = [0]

    class Failing(io.FileIO):
        def write(self, data: Any) -> int:
            if number[0]:
                raise OSError(number[0], os.strerror(number[0]))
            return super().write(data)

    monkeypatch.setattr(io, "FileIO", Failing)
    yield lambda error: number.__setitem__(0, error)
    number[0] = 0


def steps(folder: Path) -> list[int]:
    return sorted(int(name[5:17]) for name in os.listdir(folder) if name.endswith(".pt"))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE])
def test_a_training_whose_saves_fail_continues_and_saves_again_when_it_can(tmp_path, disk, number, capfd):
    snapshot = ddpjob.Snapshot(tmp_path)
    for step, error in enumerate((0, number, number, 0), start=1):
        disk(error)
        snapshot.save(step, weights=torch.zeros(9))
        with contextlib.suppress(ddpjob.SnapshotError):
            snapshot.wait() if not error else None
        snapshot._thread and snapshot._thread.join()
        assert bool(process.current.save_failed) is bool(error)
        assert process.current.saved_step == (1 if error else step)
    snapshot.close()
    assert steps(tmp_path) == [1, 4]
    assert not list(tmp_path.glob(".tmp*"))
    assert capfd.readouterr().err.count("was not saved: ") == 2


def test_the_end_writes_the_state_that_the_last_save_could_not(tmp_path, disk):
    """If the last save() failed and the disk has free space again, the end of the script must write that state."""
    snapshot = ddpjob.Snapshot(tmp_path)
    disk(errno.ENOSPC)
    snapshot.save(7, weights=torch.full((3,), 7.0))
    snapshot._thread and snapshot._thread.join()
    disk(0)
    snapshot.close()
    weights = torch.zeros(3)
    assert ddpjob.Snapshot(tmp_path).load(weights=weights) == 7
    assert weights.tolist() == [7.0] * 3


@pytest.mark.parametrize("way", ["returns", "exits", "stops", "closes"])
@pytest.mark.parametrize("has_group", [False, True])
def test_a_script_that_ends_without_its_last_state_fails(end_ranks, tmp_path, disk, way, has_group):
    """A script that ends without its last state must fail, and not end with 0 or 75, so that users learn of it."""

    def body(_rank: int) -> None:
        world = ddpjob.init(init_method=f"file://{tmp_path}/meet", rank=0, world_size=1) if has_group else None
        os.environ["DDPJOB_TERMINATION_LOG"] = str(tmp_path / "said")
        ddpjob.progress(step=1)
        snapshot = ddpjob.Snapshot(tmp_path / "s", world)
        saved(snapshot, 1)
        disk(errno.ENOSPC)
        if way == "stops":
            process.current.stopped_at = 2
        snapshot.save(2)
        if way == "stops":
            raise ddpjob.Stopped(2)
        if way == "exits":
            raise SystemExit(0)
        if way == "closes":
            snapshot.close()

    (outcome,) = end_ranks(body, 1)
    assert outcome.exit_code == 1
    assert steps(tmp_path / "s") == [1]
    said = json.loads((tmp_path / "said").read_text())["exception"]
    assert "the state of step 2 was not saved: disk full" in said
    assert said.rstrip(".").endswith("the newest snapshot in the folder is of step 1")


def test_a_script_that_fails_by_itself_keeps_its_own_error(end_ranks, tmp_path, disk):
    def body(_rank: int) -> None:
        os.environ["DDPJOB_TERMINATION_LOG"] = str(tmp_path / "said")
        ddpjob.progress(step=1)
        disk(errno.ENOSPC)
        ddpjob.Snapshot(tmp_path / "s").save(2)
        raise ValueError("its own")

    (outcome,) = end_ranks(body, 1)
    assert (outcome.exit_code, outcome.error) == (1, "ValueError: its own")


def test_a_deleted_claim_is_created_again(tmp_path):
    """A deleted claim file must be created again, because otherwise the next attempt takes the same writer number."""
    snapshot = ddpjob.Snapshot(tmp_path)
    saved(snapshot, 1)
    (tmp_path / "writer-000001.json").unlink()
    saved(snapshot, 2)
    assert (tmp_path / "writer-000001.json").exists()
    (tmp_path / "writer-000001.json").write_text('{"job": "another", "attempt": 1}')
    with pytest.raises(ddpjob.Superseded, match="now belongs to attempt 1 of job another"):
        snapshot.save(3)


def test_older_snapshots_that_cannot_be_removed_do_not_make_a_save_fail(tmp_path, monkeypatch, capfd):
    snapshot = ddpjob.Snapshot(tmp_path, keep=1)
    saved(snapshot, 1)

    unlink = Path.unlink

    def refuse(path: Path, **options: Any) -> None:
        if path.suffix == ".pt":
            raise PermissionError(errno.EPERM, "Operation not permitted")
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", refuse)
    saved(snapshot, 2)
    assert steps(tmp_path) == [1, 2]
    assert "older snapshots in " in capfd.readouterr().err


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC])
def test_a_folder_that_cannot_be_used_is_named_before_the_training_begins(tmp_path, monkeypatch, number):
    """A folder that cannot be used must be named at the start, before any training is lost, and no file may be left."""

    def refuse(path: Path, _: bytes) -> None:
        path.touch()
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("ddpjob.checkpoint.writers.write_new", refuse)
    with pytest.raises(ddpjob.SnapshotError, match=rf"folder: .*: .*{os.strerror(number)} \(errno {number}\)"):
        ddpjob.Snapshot(tmp_path).load()
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("text", "failure_class"),
    [
        ("the state of step 4 was not saved: disk full: No space left on device (errno 28), in /c", "permanent"),
        ("the state of step 4 was not saved: disk full: Disk quota exceeded (errno 122), in /c", "permanent"),
        ("folder: /c: Read-only file system (errno 30).", "permanent"),
        ("folder: /c cannot be made: Permission denied (errno 13).", "permanent"),
        ("folder: /c cannot be made: File exists (errno 17).", "permanent"),
        ("the state of step 4 was not saved: File too large (errno 27), in /c", "permanent"),
        ("the state of step 4 was not saved: Stale file handle (errno 116), in /c", "application"),
        ("folder: /c is in use by job a, which is running.", "application"),
    ],
)
def test_a_failed_save_that_a_restart_cannot_fix_is_permanent(text, failure_class):
    failure = Failure(0, exit_code=1, exception=f"ddpjob.errors.SnapshotError: {text}")
    assert rules.classify(failure) == failure_class


def test_a_script_whose_folder_was_removed_during_the_training_fails(end_ranks, tmp_path):
    def body(_rank: int) -> None:
        snapshot = ddpjob.Snapshot(tmp_path / "s")
        snapshot.load()
        shutil.rmtree(tmp_path / "s")
        snapshot.save(1)

    (outcome,) = end_ranks(body, 1)
    assert outcome.exit_code == 1
