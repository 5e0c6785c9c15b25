"""Find the collective in which this rank waits, as evidence for a deadlock (`ddprun/core/deadlock.py`).

No answer is given if it could be wrong: another thread may begin collectives, a GPU may work for the rank, or torch's
flight recorder does not show all collectives of a group. The recorder is read only after the rank has not run for
seconds, because reading a full one takes 0.1 to 0.5 s."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Iterable, Mapping
from types import CodeType, FrameType
from typing import Any

from ddpjob import process

SYNC, BACKWARD = "sync", "backward"
# Functions of torch that begin one collective and wait for it.
_COLLECTIVES = frozenset(
    "all_reduce broadcast reduce gather scatter barrier all_gather all_gather_into_tensor all_gather_single "
    "reduce_scatter reduce_scatter_tensor reduce_scatter_single all_to_all all_to_all_single "
    "all_reduce_coalesced".split()
)
# C++ functions that wait for each of their collectives before they return: DDP's constructor and its forward pass.
_IN_C = frozenset(("_broadcast_coalesced", "_verify_params_across_processes", "_rebuild_buckets"))
TIMEOUT_MS_MIN = 10_000  # ms; a script may rely on a shorter time-out, which ends the wait by itself
GROUPS_MAX, RECENT, RANKS_MAX = 12, 6, 64
# By the name of a type in torch's flight recorder: the name that users write, and the size in bytes.
_DTYPES = {
    "Float": ("float32", 4), "Double": ("float64", 8), "Half": ("float16", 2), "BFloat16": ("bfloat16", 2),
    "Long": ("int64", 8), "Int": ("int32", 4), "Short": ("int16", 2), "Char": ("int8", 1), "Byte": ("uint8", 1),
    "Bool": ("bool", 1),
}  # fmt: skip
# Files in which threads run that begin no collectives; a thread belongs to the file of its outermost call.
_HARMLESS = (
    "-packages/torch/utils/data/", "-packages/torch/_inductor/", "-packages/torch/utils/tensorboard/",
    "-packages/tensorboard/", "-packages/tensorboardX/", "-packages/tqdm/_monitor.py", "-packages/wandb/",
    os.path.join(os.path.dirname(os.__file__), "multiprocessing", "queues.py"),
    os.path.join(os.path.dirname(os.__file__), "multiprocessing", "resource_sharer.py"),
)  # fmt: skip
_IDLE_WORKER = "/concurrent/futures/thread.py"
_BEFORE_THREADS = ("/threading.py", os.path.join("ddprun", "forkserver.py"))
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def how(frame: FrameType | None) -> str:
    """Return how the main thread waits: SYNC in a collective, BACKWARD in autograd for collectives begun there; "" if
    it may do something else."""
    if frame is None:
        return ""
    file, names = frame.f_code.co_filename, names_of_line(frame.f_code, frame.f_lineno)
    if file.endswith("/torch/distributed/distributed_c10d.py"):
        return SYNC if frame.f_code.co_name in _COLLECTIVES and "wait" in names else ""
    if "/torch/" in file and names & _IN_C:
        return SYNC
    return BACKWARD if file.endswith("/torch/autograd/graph.py") and "run_backward" in names else ""


def names_of_line(code: CodeType, line: int) -> set[str]:
    """Return the names that a line of a function uses. Its source is not read, because its disk may hang."""
    import dis  # imported here, because it is rarely needed and the import would delay every rank

    ranges = [(start, end) for start, end, number in code.co_lines() if number == line]
    return {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if isinstance(instruction.argval, str) and any(a <= instruction.offset < b for a, b in ranges)
    }


def may_begin_others(frames: Mapping[int, FrameType], own: Iterable[int]) -> bool:
    """True if a thread other than these may begin a collective."""
    return any(not _is_harmless(frame) for ident, frame in frames.items() if ident not in own)


def _is_harmless(frame: FrameType) -> bool:
    innermost, outermost, above = frame, frame, frame.f_back
    while above is not None:
        if not above.f_code.co_filename.endswith(_BEFORE_THREADS):
            outermost = above
        above = above.f_back
    file = outermost.f_code.co_filename
    if file.startswith(_OWN) or any(part in file for part in _HARMLESS):
        return True
    return file.endswith(_IDLE_WORKER) and innermost.f_code.co_filename.endswith(_IDLE_WORKER)


def answer(frames: Mapping[int, FrameType], own: int, recorded: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the collective in which this rank waits; empty if it is uncertain. own: the calling thread."""
    main = threading.main_thread().ident or 0
    waits = how(frames.get(main))
    if not waits or not recorded or not is_known(main, recorded) or may_begin_others(frames, {main, own}):
        return {}
    groups = _groups(recorded)
    size = world_size()
    if groups is None or size is None:
        return {}
    _add_root(groups, recorded[-1], frames[main])
    return {"how": waits, "size": size, "groups": groups}


def is_known(main: int, recorded: list[dict[str, Any]]) -> bool:
    """True if the newest collective is gloo's, was begun by the main thread and is not done. False if CUDA or another
    backend is used, because their work cannot be seen."""
    newest = recorded[-1]
    cuda = sys.modules.get("torch.cuda")
    of_main = {entry.get("thread_id") for entry in recorded} == {str(main)}
    is_patient = int(newest.get("timeout_ms") or 0) >= TIMEOUT_MS_MIN
    of_gloo = all(str(entry.get("profiling_name", "")).startswith("gloo:") for entry in recorded)
    return of_main and of_gloo and is_patient and not newest.get("retired") and not getattr(cuda, "_initialized", False)


def world_size() -> int | None:
    """Return the number of ranks; None unless the default group has all ranks of the job, numbered as in the job."""
    c10d = sys.modules["torch.distributed.distributed_c10d"]
    ranks = c10d._world.pg_group_ranks[c10d._world.default_pg]
    size, rank = len(ranks), process.place().rank
    is_whole = ranks == {number: number for number in range(size)} and c10d._world.default_pg.rank() == rank
    return size if is_whole else None


def _groups(recorded: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    world = sys.modules["torch.distributed.distributed_c10d"]._world
    names = {str(name): group for group, name in world.pg_names.items()}
    if len(names) > GROUPS_MAX or not {str(e["process_group"][0]) for e in recorded if not e.get("retired")} <= set(
        names
    ):
        return None
    groups = []
    for name, group in names.items():
        ranks = sorted(world.pg_group_ranks[group])
        if len(ranks) > RANKS_MAX and len(ranks) != world.default_pg.size():
            return None
        entries = [entry for entry in recorded if str(entry["process_group"][0]) == name]
        groups.append({
            "name": name,
            "ranks": [] if len(ranks) == world.default_pg.size() else ranks,
            "begun": begun(entries, int(group._get_sequence_number_for_group())),
            "recent": [_call(entry) for entry in entries[-RECENT:]],
        })  # fmt: skip
        # An older collective that has not ended would be missing from "recent".
        if any(not entry.get("retired") for entry in entries[:-RECENT]):
            return None
    return groups


def begun(entries: list[dict[str, Any]], count: int) -> int:
    """Return the number of a group's newest collective; -1 if uncertain. count: all operations that the group has
    begun, including sends. The count differs if the last operation is not recorded, or if a destroyed group had the
    same name."""
    if not entries:
        return 0 if count == 0 else -1
    is_one = len({entry["pg_id"] for entry in entries}) == 1
    return int(entries[-1]["collective_seq_id"]) if is_one and entries[-1]["op_id"] == count else -1


def _call(entry: dict[str, Any]) -> list[Any]:
    return [entry["collective_seq_id"], operation(entry), shape(entry), size_of(entry), bool(entry.get("retired")), -1]


def operation(entry: dict[str, Any]) -> str:
    """Return the operation without its backend: all_reduce for gloo:all_reduce."""
    return str(entry.get("profiling_name", "")).rpartition(":")[2][:40]


def shape(entry: dict[str, Any]) -> str:
    """Return the entry's shape and type, for example "[4, 3] float32"."""
    sizes, dtypes = entry.get("input_sizes") or [], entry.get("input_dtypes") or []
    kinds = sorted({_DTYPES.get(name, (str(name), 0))[0] for name in dtypes})
    listed = " ".join(str(size) for size in sizes[:2]) + (f" and {len(sizes) - 2} more" if len(sizes) > 2 else "")
    return f"{listed} {' '.join(kinds)}".strip()[:60]


def size_of(entry: dict[str, Any]) -> int:
    """Return the bytes that the rank contributes; -1 if unknown."""
    dtypes = entry.get("input_dtypes") or []
    if not all(name in _DTYPES for name in dtypes):
        return -1
    pairs = zip(entry.get("input_sizes") or [], dtypes, strict=False)
    return sum(math.prod(size) * _DTYPES[name][1] for size, name in pairs)


def _add_root(groups: list[dict[str, Any]], newest: dict[str, Any], frame: FrameType) -> None:
    """Add the root of a broadcast, which the recorder does not know, from the call that waits."""
    if frame.f_code.co_name not in ("broadcast", "reduce", "gather", "scatter"):
        return
    root = next((v for n in ("group_src", "group_dst") if isinstance(v := frame.f_locals.get(n), int)), -1)
    group = next(group for group in groups if group["name"] == str(newest["process_group"][0]))
    members = group["ranks"] or range(1 << 30)
    if 0 <= root < len(members):
        group["recent"][-1][-1] = members[root]
