"""The rank's side of ddprun's watchdog: its heartbeat, in memory that it shares with its agent.

`progress`, `pause` and `report_start` write their values into cells; the agent (`ddprun/heartbeats.py`) reads them, and
asks the rank where it is when the group is stalled. A daemon thread answers, because a rank that is blocked in a
collective runs no Python handler: where each thread is, and the last collectives of torch's flight recorder. Both go to
stderr, and a summary to the agent. While something holds the interpreter this thread cannot run, so faulthandler writes
the stacks on a signal of its own.

DDPJOB_BEATS names the memory (`ddpjob_core/heartbeat.py` has its layout); without it the cells are this process's own, and
no agent reads them.
"""

import atexit
import contextlib
import faulthandler
import json
import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from ddpjob import process
from ddpjob.reporting import waiting
from ddpjob.reporting.waiting import operation, shape
from ddpjob_core import heartbeat
from ddpjob_core.heartbeat import (
    ANSWERED,
    ASKED,
    CELLS_BYTES,
    COLLECTIVES,
    COMPLETED,
    KIND,
    OVER,
    PAGE_BYTES,
    PHASE,
    PID,
    QUIET,
    SAVED,
    STACK,
    STEP,
    WAITED_IN,
)

T = TypeVar("T")
TEXT_CHARACTERS_MAX = 120
POLL_SECONDS = 0.25
END_SECONDS = 1.0  # it answers in milliseconds, unless nobody reads what it writes
THREADS_MAX, FRAMES_MAX, COLLECTIVES_MAX = 64, 40, 8
FOLDED_MAX, FOLDED_BYTES_MAX = 20, 3000  # in an answer of a page
_LIBRARY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_FORK_SERVER = os.path.join(_LIBRARY, "agent", "forkserver.py")


def begin() -> None:
    """Share the heartbeat of this process with the agent, if there is one, from its first call on; never raises."""
    where = os.environ.get("DDPJOB_BEATS")
    if where and not process.current.watched:
        process.current.watched = True
        with contextlib.suppress(Exception):
            _share(where)


def left() -> None:
    """The default group is about to be left; the thread may not have polled since its last collective."""
    begun = _of_torch(collectives_begun)
    if begun and process.current.watched:
        process.current.cells[COLLECTIVES], process.current.cells[OVER] = begun, 1


def _share(where: str) -> None:
    """where: the agent's process, its descriptors of the memory and of the notify pipe, and the page."""
    agent, memory, notify, page_number = map(int, where.split(":"))
    with open(f"/proc/{agent}/fd/{memory}", "r+b", buffering=0) as file:
        page = memoryview(mmap.mmap(file.fileno(), 0))[page_number * PAGE_BYTES :][:PAGE_BYTES]
    cells = page[:CELLS_BYTES].cast("q")
    pipe = f"/proc/{agent}/fd/{notify}"
    if cells[PID] not in (0, os.getpid()) and os.path.exists(f"/proc/{cells[PID]}"):
        _notify(pipe)
        return  # the script has started processes of its own, and another one reports for the rank
    cells[PHASE] = cells[STEP] = cells[COLLECTIVES] = cells[OVER] = cells[WAITED_IN] = cells[COMPLETED] = 0
    cells[SAVED] = process.current.saved_step or 0
    cells[PID] = os.getpid()
    faulthandler.register(heartbeat.STACKS_SIGNAL, file=2, all_threads=True)
    threading.Thread(target=_serve, args=(page, cells), name="ddpjob-watchdog", daemon=True).start()
    _notify(pipe)
    process.current.cells = cells


def _notify(pipe: str) -> None:
    """Tell the agent that this process trains: it reads no heartbeat before the first one, and signals each of them."""
    descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.write(descriptor, struct.pack(heartbeat.NOTICE, os.getpid()))
    finally:
        os.close(descriptor)


# ---- the thread --------------------------------------------------------------------------------------------


def _serve(page: memoryview, cells: memoryview) -> None:
    """Polls, because a descriptor to wait for would not survive a script that closes all of them."""
    while True:
        time.sleep(POLL_SECONDS)
        if cells[PHASE] <= 1:
            begun = _of_torch(collectives_begun)
            if begun is not None:
                cells[COLLECTIVES], cells[OVER] = begun, 0
                if begun and not cells[COMPLETED]:
                    cells[COMPLETED] = int(begun > 1 or _has_completed())
            elif cells[COLLECTIVES]:
                cells[OVER] = 1
        asked = cells[ASKED]
        if cells[ANSWERED] != asked:
            with contextlib.suppress(Exception):
                _answer(page, cells)
            cells[ANSWERED] = asked


def _has_completed() -> bool:
    """True if the only collective so far is done; the recorder is short then."""
    return any(is_done(entry) for entry in _of_torch(_recorded) or [])


def _of_torch(call: Callable[[], T]) -> T | None:
    """What torch knows; None at the end of the process, or where this torch has other names."""
    in_torch = process.current.in_torch
    if in_torch.acquire(blocking=False):
        try:
            return call()
        except Exception:
            return None
        finally:
            in_torch.release()
    return None


def _keep_out_of_torch() -> None:
    """From now on: a thread that comes back from C++ when the interpreter has ended aborts the process."""
    if process.current.watched:
        left()
        with contextlib.suppress(Exception):
            process.current.cells[WAITED_IN] = _waited_in()
        process.current.cells[OVER] = 1
        process.current.in_torch.acquire(timeout=END_SECONDS)


def _waited_in() -> int:
    """Of this process, where it ends by the timeout of a rank that waited for another one."""
    from ddpjob.reporting.termination import cause_line, ending
    from ddpjob_core import rules

    error = ending()
    line = "" if error is None else cause_line(error)
    if not (rules.is_symptom(line) and rules.has_timed_out(line)):
        return 0  # and the recorder, which takes a tenth of a second, is not read
    return waited_in(_of_torch(_recorded) or [], process.current.cells[COLLECTIVES])


atexit.register(_keep_out_of_torch)  # at the import: what is registered later, as the way out of the group, runs before


# They wait all the time, and the thread that a reader looks for came after them.
NEVER_THE_CAUSE = ("ddpjob-progress", "ddpjob-stop", "ddpjob-presence")


def collectives_begun() -> int | None:
    """Of the default group, None where there is none; a call of 5 µs, of the group and not of its backend's devices."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    group = None if c10d is None else c10d._world.default_pg
    return None if group is None else int(group._get_sequence_number_for_group())


def _answer(page: memoryview, cells: memoryview) -> None:
    """First to the agent, which waits for it; stderr may be a pipe that nobody reads."""
    frames = sys._current_frames()
    main = threading.main_thread().ident
    answer: dict[str, Any] = {"step": cells[STEP], "where": innermost(frames.get(main or 0))}
    if cells[KIND] == QUIET:
        answer["waits"] = _waits(frames)
        _write_answer(page, cells, answer)
        return
    recorded = _of_torch(_recorded) or []
    answer |= {**last_collective(recorded), "apart": waits_apart(recorded, _of_torch(collectives_begun))}
    if cells[KIND] == STACK:
        _write_answer(page, cells, answer | {"stack": folded(frames.get(main or 0))})
        return
    _write_answer(page, cells, answer)
    os.write(2, _stacks(cells, frames, recorded).encode("utf-8", "replace"))


def _waits(frames: dict[int, FrameType]) -> dict[str, Any]:
    """What the rank waits in; the recorder is read only if it waits in a collective."""
    if not waiting.how(frames.get(threading.main_thread().ident or 0)):
        return {}
    return _of_torch(lambda: waiting.answer(frames, threading.get_ident(), _recorded())) or {}


def _write_answer(page: memoryview, cells: memoryview, answer: dict[str, Any]) -> None:
    """What does not fit is no answer: the agent reads a shorter one as none."""
    body = json.dumps(answer).encode()[: PAGE_BYTES - CELLS_BYTES]
    page[CELLS_BYTES : CELLS_BYTES + len(body)] = body
    cells[heartbeat.LENGTH], cells[ANSWERED] = len(body), cells[ASKED]


def _stacks(cells: memoryview, frames: dict[int, FrameType], recorded: list[dict[str, Any]]) -> str:
    """In one piece, so that the lines of two ranks do not mix; the main thread last, where a log is read first."""
    rank = os.environ.get("RANK", "0")
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    order = sorted(frames, key=lambda ident: ident == threading.main_thread().ident)
    # A script that reports no steps is located by its collectives.
    where = f"at step {cells[STEP]}" if cells[PHASE] else f"after {cells[COLLECTIVES]} collectives"
    lines = [f"ddpjob: rank {rank} (process {os.getpid()}) is stalled {where}; innermost call first:"]
    shown = [ident for ident in order if ident != own and names.get(ident) not in NEVER_THE_CAUSE]
    for ident in shown[-THREADS_MAX:]:
        lines += [f"  thread {names.get(ident, 'of C')}:", *stack(frames[ident])]
    if recorded:
        lines += ["  collectives, the last of them last:", *table(recorded)]
    return "\n".join(lines) + "\n"


def stack(frame: FrameType | None) -> list[str]:
    """As Python prints it, without the source: that would be read from a disk that may be what hangs."""
    lines: list[str] = []
    while frame is not None and len(lines) < FRAMES_MAX and frame.f_code.co_filename != _FORK_SERVER:
        lines.append(f'    File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}')
        frame = frame.f_back
    return lines


def innermost(frame: FrameType | None) -> str:
    """train.py:41 in load_batch: the innermost call of the user's own code, else the innermost."""
    first = frame
    while frame is not None and not _is_of_script(frame):
        frame = frame.f_back
    frame = frame or first
    return "" if frame is None else _place(frame)


def folded(frame: FrameType | None) -> list[str]:
    """The frames of the user's own code, innermost first, and one line for all others; short enough for an answer."""
    own: list[str] = []
    others: list[FrameType] = []
    while frame is not None and frame.f_code.co_filename != _FORK_SERVER:
        if _is_of_script(frame):
            own.append(_place(frame))
        else:
            others.append(frame)
        frame = frame.f_back
    count = f"{len(others)} frame{'s' * (len(others) > 1)} of libraries"
    lines = [f"(above it {count}, innermost {_place(others[0])})"] if others and own else []
    lines = lines or ([f"({count}, innermost {_place(others[0])})"] if others else [])
    shown = own[:FOLDED_MAX] + ([f"… {len(own) - FOLDED_MAX} more"] if len(own) > FOLDED_MAX else [])
    while len(json.dumps(shown + lines)) > FOLDED_BYTES_MAX:  # names that are not ASCII take six bytes a letter
        shown.pop()
    return shown + lines


def _is_of_script(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return not name.startswith((os.path.dirname(os.__file__), _LIBRARY, "<frozen")) and "-packages" not in name


def _place(frame: FrameType) -> str:
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"[:TEXT_CHARACTERS_MAX]


def _recorded() -> list[dict[str, Any]]:
    """The entries of torch's flight recorder: NCCL's where it has any, else those of the other backends (gloo)."""
    return recorder("_dump_nccl_trace_json") or recorder("_dump_fr_trace_json")


def recorder(name: str) -> list[dict[str, Any]]:
    """What that function of torch knows; nothing where this torch does not have it."""
    dump = getattr(sys.modules.get("torch._C._distributed_c10d"), name, None)
    return list(json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries") or []) if dump else []


def last_collective(recorded: list[dict[str, Any]]) -> dict[str, Any]:
    """The newest of the default group, whose numbers are the same on all ranks: sequence, op, done."""
    default = [e for e in recorded if not _is_apart(e)]
    if not default:
        return {}
    last = max(default, key=lambda e: e["collective_seq_id"])
    found = {"sequence": last["collective_seq_id"], "op": operation(last), "done": is_done(last)}
    return found | ({"shape": text} if (text := shape(last)) else {})


def waited_in(recorded: list[dict[str, Any]], begun: int | None) -> int:
    """The last collective of the default group, if nothing was begun after it; else 0. A collective that has failed is
    recorded as done. begun: as the default group counts."""
    if not recorded or not begun or _is_apart(recorded[-1]) or waits_apart(recorded, begun):
        return 0
    return int(last_collective(recorded)["sequence"])


def waits_apart(recorded: list[dict[str, Any]], begun: int | None) -> bool:
    """Whether it may wait in another group or in a send or recv, or its numbers are not those of the other ranks.

    gloo counts a send or recv as it counts a collective, and does not record it. begun: as the default group counts;
    None: that is left.
    """
    numbers = [entry["collective_seq_id"] for entry in recorded if not _is_apart(entry)]
    is_counted = not numbers or max(numbers) - min(numbers) < len(numbers)
    is_newest = begun is None or begun == max(numbers, default=begun)
    return not (is_counted and is_newest) or any(_is_apart(entry) and not is_done(entry) for entry in recorded)


def _is_apart(entry: dict[str, Any]) -> bool:
    return entry["process_group"][0] != "0" or bool(entry.get("is_p2p"))


def is_done(entry: dict[str, Any]) -> bool:
    """gloo's entries stay "scheduled" and are retired; NCCL's get a state."""
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def table(recorded: list[dict[str, Any]]) -> list[str]:
    """The last of them, one a line."""
    return [
        f"    {e['collective_seq_id']:>6} {operation(e)} {e.get('input_sizes')} in group {e['process_group'][0]}"[:160]
        + (", done" if is_done(e) else ", not done")
        for e in recorded[-COLLECTIVES_MAX:]
    ]
