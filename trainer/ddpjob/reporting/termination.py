"""The termination message of a rank that fails, in the file that DDPJOB_TERMINATION_LOG names.

In a pod this is the container's termination message; the operator reads it from the pod's status after the pod's end.

    {"ddpjob": 1, "rank": 3, "exitCode": 1, "signal": "", "exception": "ValueError: no such shard: 7", "step": 41,
     "time": 1796000000.123, "resumable": false, "parent": 77, "traceback": "the last lines, as many as fit"}

All ranks of a pod share the file. The earliest failure stays, and it replaces the message of a rank that stopped on
request. A rank that only reports a lost peer writes nothing. `init` and the first `progress` install the hook. A
process that is killed, or crashes in C code, writes nothing: the kubelet and torchrun report that.

Each process removes a failure that is older than its own start, because the ranks have been started again since. If a
failure is left when the container ends with 0, a shell or a program around the ranks has hidden it
(observed/hidden_failure.py of the operator).
"""

import contextlib
import faulthandler
import fcntl
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from ddpjob import own_files, process
from ddpjob.errors import Stopped
from ddpjob_core import rules
from ddpjob_core.failures import BAD_NODES_MAX, EXCEPTION_MAX, Failure, abridged, first_line, quoted, where_of

BYTES_MAX = 4096  # the kubelet reads no more; an exception of EXCEPTION_MAX characters, 6 bytes each in JSON, fits
FRAMES_MAX = 40
_BEGINS = b'{"ddpjob"'
EXIT_SECONDS = 60.0  # after a failure, time for the script's exit handlers, for example an upload
LOCK_SECONDS = 0.5  # limit for the file's lock, which the pod's other ranks hold while they write 4 kB each


def install() -> None:
    """Write the message if an exception ends this process later. No effect without DDPJOB_TERMINATION_LOG."""
    state = process.current
    if state.reports_failure or not os.environ.get("DDPJOB_TERMINATION_LOG"):
        return
    if state.previous_hook is None:  # a forked child already has the hook
        state.previous_hook, sys.excepthook = sys.excepthook, _hook
    state.reports_failure = True
    with contextlib.suppress(Exception):
        _forget_earlier()
    # Children of multiprocessing never reach sys.excepthook. This action runs before the group's, which may wait.
    process.at_exit_of_child(_tell_end_of_child, 30)


def tell(error: BaseException) -> None:
    """Write the exception of this process. Never raise, and wait at most 0.5 s for the other ranks of the pod."""
    with contextlib.suppress(Exception):
        code = exit_code(error)
        if code == 0 or isinstance(error, Stopped):  # tell_stopped or tell_unfit has written the message
            return
        # After sys.exit(1) in an except block (also torch.multiprocessing.spawn's), the caught exception is the cause.
        cause = (error.__context__ or error) if isinstance(error, SystemExit) else error
        if _complaint(cause) is not None:
            # Leave the file empty, so that the kubelet uses the end of the log.
            # The log ends with torchrun's table, which names the rank of this pod that crashed without an exception.
            return
        trace = "".join(traceback.format_exception(cause, limit=-FRAMES_MAX))
        signal = "SIGINT" if isinstance(error, KeyboardInterrupt) else ""
        exception = exit_sentence(error) or cause_line(cause)
        _leave(_of_rank()._replace(exit_code=code, signal=signal, exception=exception, traceback=trace))


def tell_stopped(step: int) -> None:
    """Write that this process was requested to stop and has saved this step. Never raise."""
    with contextlib.suppress(Exception):
        _leave(_of_rank()._replace(exit_code=rules.RESUMABLE_EXIT_CODE, step=step, resumable=True))


def tell_unfit(rank: int, exception: str, bad_nodes: list[int]) -> None:
    """Write which nodes of the job the pre-flight has found bad; never raise."""
    with contextlib.suppress(Exception):
        _leave(
            _of_rank()._replace(
                rank=rank,
                exit_code=rules.RESUMABLE_EXIT_CODE,
                exception=abridged(exception, EXCEPTION_MAX),
                resumable=True,
                preflight=True,
                bad_nodes=tuple(bad_nodes[:BAD_NODES_MAX]),
            )
        )


def ending() -> BaseException | None:
    """Return the exception that ends this process, for exit handlers. A script's sys.exit() is not visible."""
    error = sys.exc_info()[1]  # before Python 3.13 multiprocessing is still raising the exception here
    # At the exit the exception was printed already, and Python keeps it in sys.last_value.
    return error if error is not None else getattr(sys, "last_value", None)


def exit_code(error: BaseException) -> int:
    """Return the exit code of a process that ends by this exception."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    if not isinstance(error, SystemExit):
        return 1
    if isinstance(error.code, int):
        return error.code & 0xFF
    return 0 if error.code is None else 1


def exception_line(error: BaseException) -> str:
    """Return the exception's line, such as `ValueError: no such shard: 7`."""
    kind = type(error)
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    text = _text(error).strip()
    return abridged(first_line(f"{module}{kind.__qualname__}{': ' if text else ''}{text}"), EXCEPTION_MAX)


def cause_line(error: BaseException) -> str:
    """Return the line of the exception's cause if the cause reports a lost peer or a killed data loader worker.
    Otherwise return the exception's own line; for an exception group, the line of one of its members."""
    killed = (link for link in _chain(error) if rules.WORKER_KILLED.match(_whole(link)))
    return exception_line(_complaint(error) or next(killed, _one_of_group(error)))


def exit_sentence(error: BaseException) -> str:
    """Return the line that argparse printed before it exited: train.py: error: unrecognized arguments: --lrr"""
    trace = error.__traceback__ if isinstance(error, SystemExit) else None
    while trace is not None:
        frame, trace = trace.tb_frame, trace.tb_next
        if frame.f_code.co_name == "exit" and frame.f_globals.get("__name__") == "argparse":
            return abridged(str(frame.f_locals.get("message") or "").strip(), EXCEPTION_MAX)
    return ""


def exit_words(error: SystemExit) -> tuple[str, str]:
    """Return (line that explains an exit with a code other than 0, its part that is in the log). Both are "" if only
    the exit code is known."""
    if exit_code(error) in (0, rules.RESUMABLE_EXIT_CODE):
        return "", ""
    printed = exit_sentence(error)
    if printed:
        return printed, printed
    if not isinstance(error.code, int):
        return exception_line(error), _text(error).strip()
    cause = error.__context__  # exception of an except block that called sys.exit(1)
    if not isinstance(cause, Exception):
        return "", ""
    return cause_line(cause), "".join(traceback.format_exception(cause))


def hidden_by(error: SystemExit) -> tuple[str, str] | None:
    """Return place and line of the exception that an exit with 0 hides: `finally: sys.exit(0)`; None if it hides none.

    An exception of a class that the script defines is ignored: it may mean that the training is done.
    """
    cause = error.__context__
    known = type(cause).__module__.partition(".")[0] in ("builtins", "torch")
    if exit_code(error) != 0 or not known or not isinstance(cause, Exception) or isinstance(cause, StopIteration):
        return None
    return where_of(traceback.format_exception(cause)), cause_line(cause)


def end_soon() -> None:
    """Let this process, whose script has failed, exit with 1 even if something holds it at its exit, such as a thread
    or a multiprocessing.Process that is not daemonic. The other ranks would wait for it until their timeout."""
    with contextlib.suppress(Exception):  # stderr is closed
        faulthandler.dump_traceback_later(EXIT_SECONDS, exit=True)


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if process.current.reports_failure:  # False in a child that this rank has forked
        tell(error)
    process.current.previous_hook(kind, error, trace)
    if process.current.reports_failure and isinstance(error, Exception):
        end_soon()


def _tell_end_of_child() -> None:
    error = ending()
    if error is not None and process.current.reports_failure:
        tell(error)


def _of_rank() -> Failure:
    return Failure(process.place().rank, time=time.time(), step=process.latest_step())


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its text cannot be made)"


def _complaint(error: BaseException) -> BaseException | None:
    """Return the exception that reports a lost peer, also if the script raised its own exception from it."""
    return next((link for link in _chain(error) if rules.is_symptom(_whole(link))), None)


def _one_of_group(error: BaseException) -> BaseException:
    """Return the last member of an ExceptionGroup that reports no lost peer, else its last member; any other exception
    itself. A group is recognized by `exceptions`, because Python 3.10 has no class ExceptionGroup."""
    members = getattr(error, "exceptions", None)
    if not isinstance(members, tuple) or not members or not all(isinstance(m, BaseException) for m in members):
        return error
    inner = [_one_of_group(member) for member in members]
    return next((one for one in reversed(inner) if not rules.is_symptom(_whole(one))), inner[-1])


def _chain(error: BaseException) -> list[BaseException]:
    """Return the exception, then its cause, then the cause's cause, and so on."""
    chain: list[BaseException] = []
    link: BaseException | None = _one_of_group(error)
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__
    return chain


def _whole(error: BaseException) -> str:
    text = _text(error)
    return quoted(text) or f"{type(error).__name__}: {text}"


def _leave(message: Failure) -> None:
    with _opened() as descriptor:
        if not _stays(os.pread(descriptor, BYTES_MAX, 0), message):
            write_over(descriptor, message.as_dict() | {"parent": os.getppid()})


def _forget_earlier() -> None:
    """Remove a failure that was written before this process started, because it belongs to an earlier start of all
    ranks. Also remove a child's failure if the parent continues: `except ProcessRaisedException: train_alone()`."""
    if not os.path.getsize(os.environ["DDPJOB_TERMINATION_LOG"]):
        return
    with _opened() as descriptor:
        written = os.pread(descriptor, BYTES_MAX, 0)
        document = json.loads(written) if written.startswith(_BEGINS) else {}
        is_earlier = 0 < Failure.from_dict(document).time < _started_at()
        if is_earlier or document.get("parent") == os.getpid():
            os.ftruncate(descriptor, 0)


def _started_at() -> float:
    """Return the latest time when this process was started or forked, in seconds since 1970. The import of this module
    is too late, because a peer may have failed before it."""
    with open("/proc/self/stat", "rb") as file:
        ticks = int(file.read().rpartition(b")")[2].split()[19])  # clock ticks
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - (ticks + 1) / os.sysconf("SC_CLK_TCK")
    return time.time() - age


@contextlib.contextmanager
def _opened() -> Iterator[int]:
    path = os.environ["DDPJOB_TERMINATION_LOG"]
    descriptor = own_files.open_file(path, os.O_RDWR | os.O_CREAT)
    try:
        _lock(descriptor)
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    deadline = time.monotonic() + LOCK_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(0.01)
    raise TimeoutError


def _stays(written: bytes, message: Failure) -> bool:
    """True if the message in the file explains more than this one, so that it must stay."""
    if not written.startswith(_BEGINS):
        return bool(written)  # text that the script itself has written
    try:
        earlier = Failure.from_dict(json.loads(written))
    except ValueError:
        return False  # a rank was killed while it wrote the file
    return earlier.time > 0 and (earlier.resumable, earlier.time) <= (message.resumable, message.time)


def write_over(descriptor: int, message: dict[str, Any]) -> None:
    """Overwrite the file in place: in a pod it is a mount, and a rename over it fails with EBUSY. Raise OSError."""
    body = encode(message)
    os.pwrite(descriptor, body, 0)
    os.ftruncate(descriptor, len(body))


def encode(message: dict[str, Any]) -> bytes:
    """Return the message as JSON of at most 4096 bytes. The traceback loses its beginning until it fits, then the
    longest field is cut."""
    trace = message.pop("traceback", "")
    kept = trace[-BYTES_MAX:]
    while True:
        tail = kept if kept == trace else kept.partition("\n")[2] or kept
        document = {"ddpjob": 1, **message, **({"traceback": tail} if tail else {})}
        body = json.dumps(document, ensure_ascii=False).encode("utf-8", "replace")
        excess = len(body) - BYTES_MAX
        if excess <= 0:
            return body
        if not kept:
            return encode(_without_its_longest(message))
        kept = kept[max(1, excess // 6) :]  # JSON needs at most 6 bytes per character, such as \u001f


def _without_its_longest(message: dict[str, Any]) -> dict[str, Any]:
    """Halve the longest text of the message. If the longest value is no text, drop it: scripts may write anything."""
    name = max(message, key=lambda k: len(json.dumps({k: message[k]})))
    value = message[name]
    rest = {k: v for k, v in message.items() if k != name}
    return {**rest, name: value[: len(value) // 2]} if isinstance(value, str) and value else rest
