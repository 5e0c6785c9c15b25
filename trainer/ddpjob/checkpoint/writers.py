"""Whether the process that writes into a snapshot folder still runs, as another job's process can see it there.

writer-000003.alive, beside that writer's claim: {"process": "boot/namespace/pid/start"}, with "saves" once it has begun
to save, touched every few seconds, and emptied when the process leaves in order. No clock is compared with another
machine's: a heartbeat is a change of the file's time, and the age of the last one is measured with a file that is made
in the same folder.
"""

import contextlib
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ddpjob import own_files
from ddpjob.process import at_exit_of_child, log

HEARTBEAT_SECONDS = 10.0
SILENT_SECONDS = 60.0  # so long without a heartbeat: that process is gone, or stopped with its machine
LOOK_SECONDS = 1.0
_saving: set[Path] = set()  # the files of this process that say so


def claim_path(folder: Path, writer: int) -> Path:
    return folder / f"writer-{writer:06d}.json"


def alive_path(folder: Path, writer: int) -> Path:
    return folder / f"writer-{writer:06d}.alive"


def begin(owner: object, path: Path, is_newest: Callable[[], bool]) -> None:
    """Write heartbeats until the owner is gone, this process ends, or a newer writer has the folder."""
    stopped, pid = threading.Event(), os.getpid()
    _write(path)
    work = (path, stopped, is_newest)
    threading.Thread(target=_write_heartbeats, args=work, name="ddpjob-presence", daemon=True).start()
    leave = weakref.finalize(owner, _leave, path, stopped, pid)  # at the exit too, after the last state is written
    at_exit_of_child(leave, 5)


def note_saving(folder: Path, writer: int) -> None:
    """Say there that this process saves. Who has only loaded keeps nobody of the same attempt from saving."""
    if (path := alive_path(folder, writer)) not in _saving:
        _saving.add(path)
        _write(path)


def _write(path: Path) -> None:
    saves = {"saves": True} if path in _saving else {}
    body = json.dumps({"process": f"{process_namespace()}/{os.getpid()}/{_started('self')}", **saves}).encode()
    tmp = tmp_path(path.parent, int(path.name[len("writer-") : -len(".alive")]))
    with contextlib.suppress(OSError):
        try:
            write_new(tmp, body)
            os.replace(tmp, path)  # never empty meanwhile (a process that has left), and what is planted there goes
        finally:
            tmp.unlink(missing_ok=True)


def _write_heartbeats(path: Path, stopped: threading.Event, is_newest: Callable[[], bool]) -> None:
    while not stopped.wait(HEARTBEAT_SECONDS):
        with contextlib.suppress(OSError):  # a folder that is away for a moment
            if not is_newest():
                return
            with _opened(path) as descriptor:
                os.utime(descriptor)


def _leave(path: Path, stopped: threading.Event, pid: int) -> None:
    if pid == os.getpid():  # a fork has copied this and writes no heartbeats
        stopped.set()
        with contextlib.suppress(OSError), _opened(path) as descriptor:
            os.ftruncate(descriptor, 0)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """The file of this process's heartbeats. Raises OSError if it was replaced by a link or the like."""
    descriptor = own_files.open_file(path, os.O_WRONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def tmp_path(folder: Path, writer: int) -> Path:
    """Return a path for a temporary file of this writer. Nobody can guess its name, and plant a link there."""
    return folder / f".tmp-{writer:06d}-{os.getpid()}-{int.from_bytes(os.urandom(8), 'big')}"


def write_new(path: Path, data: bytes) -> None:
    """Write a file that is not there yet, readable as the umask allows: pods of other users share the folder."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb") as file:
        file.write(data)


def is_running(folder: Path, writer: int, who: str) -> bool:
    """Whether that writer still runs; waits for a heartbeat, SILENT_SECONDS after the last at most."""
    process, last = _seen(folder, writer)
    if process == "":
        return False
    if process is not None and (known := _runs_on_this_machine(process)) is not None:
        return known
    wait_seconds = SILENT_SECONDS - _age(folder, last)
    if wait_seconds > 0:
        log(f"{folder} was in use by {who} a moment ago: waiting up to {wait_seconds:.0f} s to see if it still is")
    deadline = time.monotonic() + wait_seconds
    while time.monotonic() < deadline:
        time.sleep(min(LOOK_SECONDS, max(0.0, deadline - time.monotonic())))
        process, now = _seen(folder, writer)
        if process == "" or now != last:
            return process != ""
    return False


def running_here(folder: Path, writer: int) -> str:
    """The number of the writer's process where that is another one, known to run on this machine, else ""; waits for
    nothing."""
    process, _ = _seen(folder, writer)
    number = process.split("/")[-2] if process and _runs_on_this_machine(process) else ""
    return "" if number == str(os.getpid()) else number


def saves(folder: Path, writer: int) -> bool:
    """Whether the process of that writer has begun to save."""
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
        return json.loads(own_files.read_file(alive_path(folder, writer))).get("saves") is True
    return False


def _seen(folder: Path, writer: int) -> tuple[str | None, int]:
    """The process, "" where it has left in order, None where it is not known; and the time of its last heartbeat."""
    path = alive_path(folder, writer)
    for file in (path, claim_path(folder, writer)):  # a claim is made a moment before its first heartbeat
        with contextlib.suppress(OSError, ValueError):
            # Opened before its time is read, so that NFS asks its server again.
            with open(own_files.open_file(file, os.O_RDONLY), encoding="utf-8") as opened:
                modified, text = os.fstat(opened.fileno()).st_mtime_ns, opened.read(own_files.READ_BYTES_MAX)
            process = None
            with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):  # something else is there
                process = json.loads(text)["process"] if text else ""
            return (process if file == path and isinstance(process, str) else None), modified
    return "", 0


def _age(folder: Path, modified: int) -> float:
    probe = tmp_path(folder, 0)
    try:
        write_new(probe, b"")
        return max(0.0, (probe.lstat().st_mtime_ns - modified) / 1e9)
    except OSError:
        return 0.0
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def _runs_on_this_machine(process: str) -> bool | None:
    """Whether it runs, where this process can see it: same boot of the machine and same namespace of processes."""
    namespace, _, rest = process.rpartition("/")[0].rpartition("/")
    if not namespace or namespace != process_namespace():
        return None
    return _started(rest) == process.rpartition("/")[2]


def process_namespace() -> str:
    """ "" where there is no such thing: then no process can be identified."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: str) -> str:
    """When that process began, in the kernel's ticks: a number is given again, but not with the same begin."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "gone"
    return "gone" if state in "ZX" else rest[18]


def named(job: Any) -> str:
    return f"job {job}" if job else "a job without a name"
