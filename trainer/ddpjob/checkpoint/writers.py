"""Whether the process that writes into a snapshot folder still lives, as another job's process can see it there.

writer-000003.alive, beside that writer's claim: {"process": "boot/namespace/pid/start"}, touched every few seconds, and
emptied when the process leaves in order. No clock is compared with another machine's: a beat is a change of the file's
time, and the age of the last one is measured with a file that is made in the same folder.
"""

import contextlib
import json
import multiprocessing.util
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddpjob.process import log

BEAT_SECONDS = 10.0
SILENT_SECONDS = 60.0  # so long without a beat: that process is gone, or stopped with its machine
LOOK_SECONDS = 1.0


def alive_path(folder: Path, writer: int) -> Path:
    return folder / f"writer-{writer:06d}.alive"


def begin(owner: object, path: Path, still: Callable[[], bool]) -> None:
    """Beat until the owner is gone or this process ends. still: whether the beat still means something."""
    stopped, pid = threading.Event(), os.getpid()
    with contextlib.suppress(OSError):
        path.write_text(json.dumps({"process": _this_process()}))
    threading.Thread(target=_beat, args=(path, stopped, still), name="ddpjob-presence", daemon=True).start()
    leave = weakref.finalize(owner, _leave, path, stopped, pid)  # at the exit too, after the last state is written
    multiprocessing.util.Finalize(None, leave, exitpriority=5)  # its children run no atexit


def _beat(path: Path, stopped: threading.Event, still: Callable[[], bool]) -> None:
    while not stopped.wait(BEAT_SECONDS):
        with contextlib.suppress(OSError):  # a folder that is away for a moment
            if not still():
                return
            os.utime(path)


def _leave(path: Path, stopped: threading.Event, pid: int) -> None:
    if pid == os.getpid():  # a fork has copied this and does not beat
        stopped.set()
        with contextlib.suppress(OSError):
            os.truncate(path, 0)


def is_running(claim: Path, path: Path, who: str) -> bool:
    """Whether the writer of that claim still lives; waits for a beat of it, SILENT_SECONDS after its last at most."""
    process, last = _seen(claim, path)
    if process == "":
        return False
    if process is not None and (known := _known_here(process)) is not None:
        return known
    patience = SILENT_SECONDS - _age(claim.parent, last)
    if patience > 0:
        log(f"{claim.parent} was in use by {who} a moment ago: waiting up to {patience:.0f} s to see if it still is")
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        time.sleep(min(LOOK_SECONDS, max(0.0, deadline - time.monotonic())))
        process, now = _seen(claim, path)
        if process == "" or now != last:
            return process != ""
    return False


def _seen(claim: Path, path: Path) -> tuple[str | None, int]:
    """The process, "" where it has left in order, None where it is not said; and when it was last heard."""
    for file in (path, claim):  # a claim is made a moment before its first beat
        with contextlib.suppress(OSError, ValueError), open(file) as opened:  # opened: NFS asks its server anew then
            modified, text = os.fstat(opened.fileno()).st_mtime_ns, opened.read()
            if file == claim:
                return None, modified
            return (_process_in(text) if text else ""), modified
    return "", 0


def _process_in(text: str) -> str | None:
    """None where something else has been written there."""
    try:
        process = json.loads(text)["process"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return process if isinstance(process, str) else None


def _age(folder: Path, modified: int) -> float:
    probe = folder / f".tmp-000000-{os.getpid()}-{threading.get_ident()}"
    try:
        probe.touch()
        return max(0.0, (probe.stat().st_mtime_ns - modified) / 1e9)
    except OSError:
        return 0.0
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def _known_here(process: str) -> bool | None:
    """Whether it runs, where this process can see it: same boot of the machine and same namespace of processes."""
    namespace, _, rest = process.rpartition("/")[0].rpartition("/")
    if not namespace or namespace != process_namespace():
        return None
    return _started(rest) == process.rpartition("/")[2]


def _this_process() -> str:
    return f"{process_namespace()}/{os.getpid()}/{_started('self')}"


def process_namespace() -> str:
    """ "" where there is no such thing: then nobody is known here."""
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
