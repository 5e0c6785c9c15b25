"""The rank's side of ddprun's watchdog: its heartbeat, in memory shared with its agent.

`progress`, `pause` and `report_start` write their values into cells. The agent (`ddprun/heartbeats.py`) reads them, and
requests the rank's stacks when the group is stalled. A daemon thread answers, because a rank that is blocked in a
collective runs no Python signal handler. It writes the stack of each thread, and the last collectives of torch's flight
recorder, to stderr, and a summary to the agent. If something holds the interpreter lock, this thread cannot run; then
faulthandler writes the stacks on another signal.

DDPJOB_BEATS names the memory (layout: `ddpjob_core/heartbeat.py`). Without it the cells are private, and no agent reads
them.
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
from ddpjob.reporting import frames, waiting
from ddpjob.reporting.frames import FORK_SERVER, Frame
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
POLL_SECONDS = 0.25
END_SECONDS = 1.0  # limit for the thread to leave torch; an answer takes milliseconds
THREADS_MAX, FRAMES_MAX, COLLECTIVES_MAX = 64, 40, 8


def begin() -> None:
    """Share the heartbeat of this process with the agent, if there is one, at its first call; never raise."""
    where = os.environ.get("DDPJOB_BEATS")
    if where and not process.current.watched:
        process.current.watched = True
        with contextlib.suppress(Exception):
            _share(where)


def left() -> None:
    """Record the last collective before the default group is left: the thread may not have polled after it."""
    begun = _of_torch(collectives_begun)
    if begun and process.current.watched:
        process.current.cells[COLLECTIVES], process.current.cells[OVER] = begun, 1


def _share(where: str) -> None:
    """Share the heartbeat and start the thread. where: the agent's pid, its descriptors of the memory and the notify
    pipe, and the number of this rank's page."""
    agent, memory, notify, page_number = map(int, where.split(":"))
    with open(f"/proc/{agent}/fd/{memory}", "r+b", buffering=0) as file:
        page = memoryview(mmap.mmap(file.fileno(), 0))[page_number * PAGE_BYTES :][:PAGE_BYTES]
    cells = page[:CELLS_BYTES].cast("q")
    pipe = f"/proc/{agent}/fd/{notify}"
    if cells[PID] not in (0, os.getpid()) and os.path.exists(f"/proc/{cells[PID]}"):
        _notify(pipe)
        return  # another process of this rank reports already
    cells[PHASE] = cells[STEP] = cells[COLLECTIVES] = cells[OVER] = cells[WAITED_IN] = cells[COMPLETED] = 0
    cells[SAVED] = process.current.saved_step or 0
    cells[PID] = os.getpid()
    faulthandler.register(heartbeat.STACKS_SIGNAL, file=2, all_threads=True)
    threading.Thread(target=_serve, args=(page, cells), name="ddpjob-watchdog", daemon=True).start()
    _notify(pipe)
    process.current.cells = cells


def _notify(pipe: str) -> None:
    """Tell the agent that this process trains. The agent reads no heartbeat before the first one, and signals the
    process each time."""
    descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.write(descriptor, struct.pack(heartbeat.NOTICE, os.getpid()))
    finally:
        os.close(descriptor)


# ---- the thread --------------------------------------------------------------------------------------------


def _serve(page: memoryview, cells: memoryview) -> None:
    """Answer the agent's requests. The thread polls, because a script may close all file descriptors."""
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
    """True if the first collective is done. Called only before the second one, when the flight recorder is short."""
    return any(is_done(entry) for entry in _of_torch(_recorded) or [])


def _of_torch(call: Callable[[], T]) -> T | None:
    """Return the result of a call into torch; None at the end of the process, or if this torch lacks the function."""
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
    """Stop calling torch: a thread that returns from C++ after the interpreter has ended aborts the process."""
    if process.current.watched:
        left()
        with contextlib.suppress(Exception):
            process.current.cells[WAITED_IN] = _waited_in()
        process.current.cells[OVER] = 1
        process.current.in_torch.acquire(timeout=END_SECONDS)


def _waited_in() -> int:
    """Return the collective in which this process waited, if it ends by the time-out of waiting for another rank."""
    from ddpjob.reporting.termination import cause_line, ending
    from ddpjob_core import rules

    error = ending()
    line = "" if error is None else cause_line(error)
    if not (rules.is_symptom(line) and rules.has_timed_out(line)):
        return 0  # reading the recorder would take a tenth of a second
    return waited_in(_of_torch(_recorded) or [], process.current.cells[COLLECTIVES])


# Registered at the import, so that later handlers, such as leaving the group, run before it.
atexit.register(_keep_out_of_torch)


# The library's threads are left out of stacks: they always wait, and a reader looks for the thread that hangs.
NEVER_THE_CAUSE = ("ddpjob-progress", "ddpjob-stop", "ddpjob-presence")


def collectives_begun() -> int | None:
    """Return the number of collectives begun in the default group; None without a group. Takes 5 µs."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    group = None if c10d is None else c10d._world.default_pg
    return None if group is None else int(group._get_sequence_number_for_group())


def _answer(page: memoryview, cells: memoryview) -> None:
    """Answer the agent before writing to stderr, which may be a pipe that nobody reads: the write would block."""
    running = sys._current_frames()
    stack = calls(running.get(threading.main_thread().ident or 0))
    answer: dict[str, Any] = {"step": cells[STEP], "where": frames.innermost(stack)}
    if cells[KIND] == QUIET:
        answer["waits"] = _waits(running)
        _write_answer(page, cells, answer)
        return
    recorded = _of_torch(_recorded) or []
    answer |= {**last_collective(recorded), "apart": waits_apart(recorded, _of_torch(collectives_begun))}
    if cells[KIND] == STACK:
        _write_answer(page, cells, answer | {"stack": frames.folded(stack)})
        return
    _write_answer(page, cells, answer)
    os.write(2, _stacks(cells, running, recorded).encode("utf-8", "replace"))


def _waits(frames: dict[int, FrameType]) -> dict[str, Any]:
    """Return the collective in which the rank waits. The flight recorder is read only if it waits in one."""
    if not waiting.how(frames.get(threading.main_thread().ident or 0)):
        return {}
    return _of_torch(lambda: waiting.answer(frames, threading.get_ident(), _recorded())) or {}


def _write_answer(page: memoryview, cells: memoryview, answer: dict[str, Any]) -> None:
    """Write the answer to shared memory, cut to the page's size. The agent ignores an answer that was cut."""
    body = json.dumps(answer).encode()[: PAGE_BYTES - CELLS_BYTES]
    page[CELLS_BYTES : CELLS_BYTES + len(body)] = body
    cells[heartbeat.LENGTH], cells[ANSWERED] = len(body), cells[ASKED]


def _stacks(cells: memoryview, running: dict[int, FrameType], recorded: list[dict[str, Any]]) -> str:
    """Return the stacks as one text, so that lines of two ranks do not mix. The main thread is last, where readers of a
    log look first."""
    rank = os.environ.get("RANK", "0")
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    order = sorted(running, key=lambda ident: ident == threading.main_thread().ident)
    # If the script reports no steps, the number of collectives shows how far it is.
    where = f"at step {cells[STEP]}" if cells[PHASE] else f"after {cells[COLLECTIVES]} collectives"
    lines = [f"ddpjob: rank {rank} (process {os.getpid()}) is stalled {where}; innermost call first:"]
    shown = [ident for ident in order if ident != own and names.get(ident) not in NEVER_THE_CAUSE]
    for ident in shown[-THREADS_MAX:]:
        lines.append(f"  thread {names.get(ident, 'of C')}:")
        lines += [frame.line_of_traceback for frame in calls(running[ident])[:FRAMES_MAX]]
    if recorded:
        lines += ["  collectives, the last of them last:", *table(recorded)]
    return "\n".join(lines) + "\n"


def calls(frame: FrameType | None) -> list[Frame]:
    """Return the running calls up to the first one of the script, innermost first."""
    found: list[Frame] = []
    while frame is not None and frame.f_code.co_filename != FORK_SERVER:
        found.append(Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return found


def _recorded() -> list[dict[str, Any]]:
    """Return the entries of torch's flight recorder: NCCL's if it has any, else those of other backends (gloo)."""
    return recorder("_dump_nccl_trace_json") or recorder("_dump_fr_trace_json")


def recorder(name: str) -> list[dict[str, Any]]:
    """Return the entries of torch's flight recorder that this function dumps; empty if torch lacks the function."""
    dump = getattr(sys.modules.get("torch._C._distributed_c10d"), name, None)
    return list(json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries") or []) if dump else []


def last_collective(recorded: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the newest collective of the default group, whose numbers are equal on all ranks: sequence, op, done."""
    default = [e for e in recorded if not _is_apart(e)]
    if not default:
        return {}
    last = max(default, key=lambda e: e["collective_seq_id"])
    found = {"sequence": last["collective_seq_id"], "op": operation(last), "done": is_done(last)}
    return found | ({"shape": text} if (text := shape(last)) else {})


def waited_in(recorded: list[dict[str, Any]], begun: int | None) -> int:
    """Return the number of the default group's last collective; 0 if another operation was begun after it. A failed
    collective is recorded as done. begun: number of operations that the default group has begun."""
    if not recorded or not begun or _is_apart(recorded[-1]) or waits_apart(recorded, begun):
        return 0
    return int(last_collective(recorded)["sequence"])


def waits_apart(recorded: list[dict[str, Any]], begun: int | None) -> bool:
    """True if the rank may wait in another group or in a send or recv, or if its collectives may have other numbers
    than on other ranks. gloo counts sends and recvs like collectives, but does not record them. begun: number of
    operations that the default group has begun; None after the group was left."""
    numbers = [entry["collective_seq_id"] for entry in recorded if not _is_apart(entry)]
    is_counted = not numbers or max(numbers) - min(numbers) < len(numbers)
    is_newest = begun is None or begun == max(numbers, default=begun)
    return not (is_counted and is_newest) or any(_is_apart(entry) and not is_done(entry) for entry in recorded)


def _is_apart(entry: dict[str, Any]) -> bool:
    return entry["process_group"][0] != "0" or bool(entry.get("is_p2p"))


def is_done(entry: dict[str, Any]) -> bool:
    """True if the collective of this entry is done: gloo marks its entries "retired", NCCL sets their state."""
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def table(recorded: list[dict[str, Any]]) -> list[str]:
    """Return the last entries, one per line."""
    return [
        f"    {e['collective_seq_id']:>6} {operation(e)} {e.get('input_sizes')} in group {e['process_group'][0]}"[:160]
        + (", done" if is_done(e) else ", not done")
        for e in recorded[-COLLECTIVES_MAX:]
    ]
