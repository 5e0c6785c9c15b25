"""A rank reports a collective only if it certainly waits in this collective."""

import sys
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpjob.reporting import waiting
from ddprun.core import deadlock
from ddprun.core.deadlock import Call, GroupCalls, Position, Waits
from ddprun.core.stall_rules import failure
from ddprun.watch_ranks import waiting as position_of_answer

C10D = "/x/site-packages/torch/distributed/distributed_c10d.py"


@pytest.mark.parametrize(
    ("file", "source", "how"),
    [
        (C10D, "def all_reduce():\n    group\n    work.wait()", "sync"),
        (C10D, "def all_reduce():\n    group.allreduce()\n    work", ""),
        (C10D, "def recv():\n    work.wait()", ""),
        (C10D, "def monitored_barrier():\n    group.monitored_barrier()", ""),
        (C10D, "def _coalescing_manager():\n    work.wait()", ""),
        ("/work/train.py", "def all_reduce():\n    work.wait()", ""),
        ("/x/torch/nn/parallel/distributed.py", "def f():\n    dist._broadcast_coalesced(\n        1,\n    )", "sync"),
        ("/x/torch/autograd/graph.py", "def f():\n    return dist.run_backward(1)", "backward"),
        ("/x/torch/autograd/graph.py", "def f():\n    return dist.hook(1)", ""),
    ],
)
def test_only_a_line_that_certainly_waits_for_a_collective_counts_as_one(file: str, source: str, how: str) -> None:
    """A rank that computes, sends, or waits for something else may continue without its peers, so it must not count."""
    seen: list[str] = []
    function = source.partition("(")[0].removeprefix("def ")

    class Work:
        def __getattr__(self, _name: str) -> Any:
            return lambda *_: seen.append(waiting.how(sys._getframe(1)))

    names: dict[str, Any] = {"work": Work(), "dist": Work(), "group": Work()}
    exec(compile(source, file, "exec"), names)
    names[function]()
    assert seen[-1] == how


def test_a_thread_of_the_user_may_begin_a_collective_and_an_idle_library_thread_does_not() -> None:
    here, ready = threading.Event(), threading.Event()

    def own() -> None:
        ready.set()
        here.wait()

    thread = threading.Thread(target=own)
    thread.start()
    ready.wait()
    frames = sys._current_frames()
    main = threading.main_thread().ident or 0
    mine = {ident: frame for ident, frame in frames.items() if ident in (main, thread.ident)}
    assert waiting.may_begin_others(mine, {main})
    assert not waiting.may_begin_others(mine, {main, thread.ident or 0})
    here.set()
    thread.join()


def entry(number: int, **known: Any) -> dict[str, Any]:
    made = {"collective_seq_id": number, "op_id": number, "pg_id": 0, "process_group": ["0", "default_pg"]}
    return {
        **made,
        "profiling_name": "gloo:all_reduce",
        "thread_id": "7",
        "retired": False,
        "timeout_ms": 60_000,
        **known,
    }


@pytest.mark.parametrize(
    ("entries", "count", "begun"),
    [
        ([], 0, 0),
        ([], 3, -1),  # three sends, or collectives that the flight recorder has dropped
        ([entry(1), entry(2)], 2, 2),
        ([entry(1), entry(2)], 3, -1),  # one send was made after collective 2
        ([entry(1), entry(2, op_id=5)], 5, 2),  # before collective 2 there were three sends
        ([entry(1), entry(1, pg_id=4)], 1, -1),  # the group was destroyed, and created again with its old name
    ],
)
def test_the_newest_collective_of_a_group_is_known_only_if_it_was_begun_last(entries, count, begun):
    assert waiting.begun(entries, count) == begun


@pytest.mark.parametrize(
    ("newest", "known"),
    [
        ({}, True),
        ({"retired": True}, False),
        ({"timeout_ms": 5_000}, False),
        ({"thread_id": "8"}, False),
        ({"profiling_name": "nccl:all_reduce"}, False),
    ],
)
def test_work_of_another_thread_or_backend_is_unknown(newest: dict[str, Any], known: bool) -> None:
    assert waiting.is_known(7, [entry(1), entry(2, **newest)]) == known


def test_the_shape_of_a_collective_is_described_in_the_terms_of_the_user() -> None:
    one = {"input_sizes": [[4, 3]], "input_dtypes": ["Float"]}
    assert (waiting.shape(one), waiting.size_of(one)) == ("[4, 3] float32", 48)
    more = {"input_sizes": [[1], [2], [3]], "input_dtypes": ["Long", "Long", "Long"]}
    assert (waiting.shape(more), waiting.size_of(more)) == ("[1] [2] and 1 more int64", 48)
    assert waiting.size_of({"input_sizes": [[1]], "input_dtypes": ["Float8_e4m3fn"]}) == -1
    assert (waiting.shape({}), waiting.size_of({})) == ("", 0)


@given(
    st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda v: st.lists(v) | st.dictionaries(st.text(), v))
)
def test_a_malformed_answer_gives_nothing(written: Any) -> None:
    assert position_of_answer(3, 7, {"waits": {"how": "sync", "size": 2, "groups": written}, "where": "x"}).waits in (
        None,
        Waits("sync", 2, ()),
    )


# ---- sentences ---------------------------------------------------------------------------------------------------


def stands(rank: int, *calls: Call, begun: int | None = None, how: str = "sync") -> Position:
    newest = calls[-1].number if begun is None else begun
    waits = Waits(how, 2, (GroupCalls("0", (), newest, calls),))
    return Position(rank, waits=waits, where=f"train.py:{10 + rank} in step")


def deadlocked(*positions: Position) -> str:
    ranks = {position.rank: position for position in positions}
    return "" if (found := deadlock.conflict(ranks)) is None else deadlock.sentence(found, ranks)


def test_the_operation_of_a_rank_in_the_collective_that_another_waits_in_is_named() -> None:
    """If rank 0 was in a broadcast with the number of rank 1's all_reduce, both operations must be named."""
    gone_on = stands(0, Call(5, "broadcast", "[4] float32", 16, True), Call(6, "barrier", size=0))
    left = stands(1, Call(5, "all_reduce", "[4] float32", 16))
    assert deadlocked(gone_on, left) == (
        "is deadlocked: rank 1 waits in all_reduce [4] float32 (collective 5, train.py:11 in step), rank 0 was in "
        "broadcast [4] float32 (collective 5): these never meet"
    )


def test_a_rank_that_ended_without_the_collective_is_named() -> None:
    waits = stands(0, Call(5, "barrier", size=0))
    assert deadlocked(waits, Position(1, ended_after=4)) == (
        "is deadlocked: rank 0 waits in barrier (collective 5, train.py:10 in step), and rank 1 has ended without it"
    )
    assert deadlocked(waits, Position(1, ended_after=5)) == "", "it may have been there"
    assert deadlocked(waits, Position(1)) == "", "it may still come"


def test_a_rank_that_waits_for_more_bytes_than_are_sent_hangs() -> None:
    large, small = Call(5, "all_gather", "[9] int64", 72), Call(5, "all_gather", "[4] int64", 32)
    assert "[9] int64 (collective 5" in deadlocked(stands(0, small), stands(1, large))
    assert deadlocked(stands(0, small), stands(1, small)) == ""


def test_a_stall_compares_operations_and_shapes_at_the_same_number() -> None:
    """Operations and shapes must be compared at the same number: ranks with different collectives 7 never meet."""
    others = [Position(rank, sequence=7, op="all_reduce", done=False, shape="[4] float32") for rank in (0, 1)]
    barrier = Position(2, sequence=7, op="barrier", done=False)
    told = failure([*others, barrier], 300, "train")
    assert (told.rank, told.exception) == (
        2,
        "made no step for 300 s: rank 2 stands in collective 7 (barrier), rank 0 in 7 (all_reduce)",
    )
    larger = Position(2, sequence=7, op="all_reduce", done=False, shape="[9] float32")
    assert failure([*others, larger], 300, "train").exception == (
        "made no step for 300 s: rank 2 stands in collective 7 (all_reduce) with [9] float32, rank 0 in 7 "
        "(all_reduce [4] float32)"
    )
    assert failure(others, 300, "train").exception.endswith("as the others do")
