"""The folder of one run: logs, volumes and the token. Logs of the last runs stay; the other files are removed when
the run ends. The parent folder is the user's (`--logs DIR`) and may hold anything, such as a data set with the job's
name. So a run marks its folder. Before anything is removed the mark is checked, and links are not followed. Only
known files are removed; if a folder has others, it stays."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from ddpjob import own_files
from ddpjob_cli.local.run_files import files
from ddpjob_cli.manifest.yamlfile import InputError

RUNS_KEPT = 10
MARK = ".ddpjob-run"
LATEST = "latest"
STATUS, FACTS, HISTORY = "status.json", "run.json", "history.json"
FAULTS = "faults"
_MARK_BYTES_MAX = 4096
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class RunFolder:
    """`<state>/ddpjob/<job>/<uid>`, locked during the run so that no other run removes it."""

    def __init__(self, job: str, base: Path | None = None) -> None:
        self.uid = str(uuid.uuid4())
        jobs = (base or state_home() / "ddpjob").absolute() / job
        if jobs.is_symlink() and jobs.lstat().st_uid not in (os.geteuid(), 0):
            raise InputError(f"{jobs}: is a link of another user, and is not followed; choose another --logs")
        jobs.mkdir(mode=0o700, parents=True, exist_ok=True)
        _clear_old(jobs, job)
        self.path = jobs / self.uid
        self.path.mkdir(mode=0o700)
        self._job = job
        self.lock = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        _mark(self.path, job)  # locked first, so the run of a marked folder has ended if its lock is free
        # `latest` links to the newest run. If the name is not a link to a run, it belongs to the user and stays.
        link = self.path.parent / LATEST
        with contextlib.suppress(OSError):  # another run replaces the link now, or the file system has no links
            if link.is_symlink() and _UUID.fullmatch(os.readlink(link)):
                link.unlink()
            link.symlink_to(self.path.name)

    def write(self, name: str, data: bytes) -> None:
        files.write_privately(self.path / name, data)

    def close(self) -> None:
        with _own(self.path, self._job) as held:
            if held is not None:
                _remove_what_ends_with_a_run(held)
        _remove_folders_of_agents(self.uid)
        os.close(self.lock)


def state_home() -> Path:
    """Return $XDG_STATE_HOME, or ~/.local/state if unset. Raise InputError if the user has no home."""
    given = os.environ.get("XDG_STATE_HOME", "")
    if given.startswith("/"):
        return Path(given)
    try:
        return Path.home() / ".local" / "state"
    except RuntimeError:  # a container may run with an arbitrary user id and without HOME
        raise InputError("this user has no home folder for the logs of runs; set HOME or XDG_STATE_HOME") from None


def folders(base: Path | None = None) -> Iterator[tuple[str, Path]]:
    """Yield the job's name and the folder of each run below the parent folder."""
    with contextlib.suppress(OSError):
        for jobs in sorted((base or state_home() / "ddpjob").absolute().iterdir()):
            with contextlib.suppress(OSError):  # a user's file, or a folder that is being removed
                yield from ((jobs.name, run) for run in _runs(jobs, jobs.name))


def is_running(run: Path) -> bool:
    """True if the process that runs a job in this folder is alive."""
    try:
        lock = os.open(run / "lock", os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # A running job holds the exclusive lock. Take a shared lock, because other commands may check this folder too.
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def _clear_old(jobs: Path, job: str) -> None:
    """Remove old runs, and volumes and agents' folders of killed runs. A killed run holds no lock."""
    for i, run in enumerate(_runs(jobs, job)):
        with _own(run, job) as held:
            if held is None or is_running(held):
                continue
            _remove_what_ends_with_a_run(held)
            _remove_folders_of_agents(run.name)
            if i >= RUNS_KEPT - 1:
                # Remove the run's files. If other files are left, keep the folder, but remove its mark file.
                written = (STATUS, FACTS, HISTORY)
                for path in list(held.iterdir()):
                    if path.name in written or re.fullmatch(rf"{re.escape(job)}-\d+-\d+(-r\d+)?\.log", path.name):
                        _unlink(path)
                _unlink(held / MARK)
                with contextlib.suppress(OSError):  # the folder has other files
                    run.rmdir()


def _runs(jobs: Path, job: str) -> Iterator[Path]:
    """Return the folders of this job's runs, the newest first, without links such as `latest`."""
    ages = []
    for run in jobs.iterdir():
        with contextlib.suppress(OSError):  # another run may be clearing this folder too
            status = run.lstat()
            if stat.S_ISDIR(status.st_mode) and _has_mark(run, job, run.name, status.st_ino):
                ages.append((status.st_mtime, run))
    return (run for _, run in sorted(ages, reverse=True))


def _mark(run: Path, job: str) -> None:
    """Write the mark file with the folder's inode, so that a copied mark is invalid. (Device numbers may change.)"""
    mark = {"job": job, "run": run.name, "inode": run.lstat().st_ino}
    descriptor = os.open(run / MARK, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w") as file:
        json.dump(mark, file)


def _has_mark(run: Path, job: str, name: str, inode: int) -> bool:
    try:
        mark = json.loads(own_files.read_file(run / MARK, _MARK_BYTES_MAX))
    except (OSError, ValueError, RecursionError):  # no mark file, or one that we did not write
        return False
    return bool(_UUID.fullmatch(name) and mark == {"job": job, "run": name, "inode": inode})


@contextlib.contextmanager
def _own(run: Path, job: str) -> Iterator[Path | None]:
    """Open a run's folder, and yield a path that stays valid if the name is replaced; None if it is no run of ours."""
    try:
        descriptor = os.open(run, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        status, held = os.fstat(descriptor), Path(f"/proc/self/fd/{descriptor}")
        is_own = status.st_uid == os.geteuid() and _has_mark(held, job, run.name, status.st_ino)
        yield held if is_own else None
    finally:
        os.close(descriptor)


def _remove_what_ends_with_a_run(run: Path) -> None:
    """Remove volumes, faults, token and lock. Links are not followed: rmtree refuses them, unlink removes the link."""
    for folder in ("volumes", FAULTS):
        shutil.rmtree(run / folder, ignore_errors=True)
    for leftover in ("token", "lock"):
        _unlink(run / leftover)


def _remove_folders_of_agents(run: str) -> None:
    """Remove temporary folders of a killed `ddprun`, whose names contain the run's id."""
    for left in Path(tempfile.gettempdir()).glob(f"ddprun_{run}*"):
        with contextlib.suppress(OSError):
            if left.lstat().st_uid == os.geteuid():
                shutil.rmtree(left, ignore_errors=True)


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):  # removed already, or a user's folder with this name
        path.unlink()
