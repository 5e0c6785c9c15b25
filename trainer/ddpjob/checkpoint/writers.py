"""Check if a process that writes to a snapshot folder is still running, also if the process belongs to another job.

The process of writer 3 has a file writer-000003.alive with {"process": "boot/namespace/pid/start"}, and with "saves"
once it has begun to save. The process touches this file every few seconds, and empties the file when it exits normally.
Clocks of machines are never compared: a heartbeat is a change of the file's mtime, and its age is measured with a new
file in the same folder.
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
SILENT_SECONDS = 60.0  # after this time without a heartbeat, the process is gone or its machine is stopped
LOOK_SECONDS = 1.0
_saving: set[Path] = set()  # paths of this process's .alive files that contain "saves"


def claim_path(folder: Path, writer: int) -> Path:
    return folder / f"writer-{writer:06d}.json"


def alive_path(folder: Path, writer: int) -> Path:
    return folder / f"writer-{writer:06d}.alive"


def begin(owner: object, path: Path, is_newest: Callable[[], bool]) -> None:
    """Write heartbeats to this file until the owner is gone, this process ends, or a newer writer has the folder."""
    stopped, pid = threading.Event(), os.getpid()
    _write(path)
    work = (path, stopped, is_newest)
    threading.Thread(target=_write_heartbeats, args=work, name="ddpjob-presence", daemon=True).start()
    leave = weakref.finalize(owner, _leave, path, stopped, pid)  # called also at exit, after the last save
    at_exit_of_child(leave, 5)


def note_saving(folder: Path, writer: int) -> None:
    """Record that this process saves. A process that only loads lets other processes of its attempt save."""
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
            os.replace(tmp, path)  # not emptied: an empty file means "exited"; also replaces a planted link
        finally:
            tmp.unlink(missing_ok=True)


def _write_heartbeats(path: Path, stopped: threading.Event, is_newest: Callable[[], bool]) -> None:
    while not stopped.wait(HEARTBEAT_SECONDS):
        with contextlib.suppress(OSError):  # the folder may be unreachable for some seconds
            if not is_newest():
                return
            with _opened(path) as descriptor:
                os.utime(descriptor)


def _leave(path: Path, stopped: threading.Event, pid: int) -> None:
    if pid == os.getpid():  # a forked child has this finalizer too, but writes no heartbeats
        stopped.set()
        with contextlib.suppress(OSError), _opened(path) as descriptor:
            os.ftruncate(descriptor, 0)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open the .alive file of this process. Raises OSError if a link or another special file has replaced it."""
    descriptor = own_files.open_file(path, os.O_WRONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def tmp_path(folder: Path, writer: int) -> Path:
    """Return a path for a temporary file of this writer, with a random name, so that nobody can plant a link there."""
    return folder / f".tmp-{writer:06d}-{os.getpid()}-{int.from_bytes(os.urandom(8), 'big')}"


def write_new(path: Path, data: bytes) -> None:
    """Create and write a file, readable as the umask allows, because pods of other users share the folder."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb") as file:
        file.write(data)


def is_running(folder: Path, writer: int, who: str) -> bool:
    """True if this writer is still running. Wait for its next heartbeat, until SILENT_SECONDS after the last one."""
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
    """Return the pid of this writer if it is another process and is running on this machine, else "". Does not wait."""
    process, _ = _seen(folder, writer)
    number = process.split("/")[-2] if process and _runs_on_this_machine(process) else ""
    return "" if number == str(os.getpid()) else number


def saves(folder: Path, writer: int) -> bool:
    """True if the process of this writer has begun to save."""
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
        return json.loads(own_files.read_file(alive_path(folder, writer))).get("saves") is True
    return False


def _seen(folder: Path, writer: int) -> tuple[str | None, int]:
    """Return the writer's process ("" if it exited normally, None if unknown), and its last heartbeat's time in ns."""
    path = alive_path(folder, writer)
    for file in (path, claim_path(folder, writer)):  # the claim file is a moment older than the first heartbeat
        with contextlib.suppress(OSError, ValueError):
            # Open the file before its mtime is read, because only open() makes NFS fetch the mtime from the server.
            with open(own_files.open_file(file, os.O_RDONLY), encoding="utf-8") as opened:
                modified, text = os.fstat(opened.fileno()).st_mtime_ns, opened.read(own_files.READ_BYTES_MAX)
            process = None
            with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):  # invalid content
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
    """True if the process is running; None if unknown, because it has another boot id or PID namespace."""
    namespace, _, rest = process.rpartition("/")[0].rpartition("/")
    if not namespace or namespace != process_namespace():
        return None
    return _started(rest) == process.rpartition("/")[2]


def process_namespace() -> str:
    """Return boot and PID namespace; "" if the system has none, and no process can be identified."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: str) -> str:
    """Return the start time of a process in clock ticks: a pid is reused, but not with the same start time."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "gone"
    return "gone" if state in "ZX" else rest[18]


def named(job: Any) -> str:
    return f"job {job}" if job else "a job without a name"
