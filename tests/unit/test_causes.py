"""The cause is read from what the process and the kubelet really say."""

from __future__ import annotations

import pytest

from ddpjob_operator import causes

TRACEBACK = 'Traceback (most recent call last):\n  File "t.py", line 3, in <module>\n    main()\n'
TORCHRUN = (
    "E1121 13:48:18.926000 7721 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1)\n"
    + TRACEBACK
    + "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    "====\nRoot Cause (first observed failure):\n[0]:\n  rank      : 5 (local_rank: 1)\n  exitcode  : -9 (pid: 7)\n"
)


@pytest.mark.parametrize(
    ("log", "line"),
    [
        (TRACEBACK + "ValueError: no such shard", "ValueError: no such shard"),
        (TRACEBACK + "ShardMissing: 7\nmore output", "ShardMissing: 7"),
        (TRACEBACK + "KeyboardInterrupt", "KeyboardInterrupt"),
        ("[rank1]: " + TRACEBACK.replace("\n", "\n[rank1]: ") + "pkg.errors.Odd: x", "pkg.errors.Odd: x"),
        ("cut in the middle\n[default0]:RuntimeError: boom", "RuntimeError: boom"),
        (TRACEBACK + "ValueError: first\n" + TORCHRUN, "ValueError: first"),
        ("epoch 1 accuracy 0.9\nNote: all is well", ""),
        ("", ""),
    ],
)
def test_the_exceptions_line_is_found_whatever_its_name_and_what_torchrun_adds(log: str, line: str) -> None:
    assert causes.exception_line(log) == line


def test_torchruns_table_has_the_guilty_rank_and_how_it_ended() -> None:
    assert causes.torchrun_root(TORCHRUN) == (5, 137)
    assert causes.torchrun_root("no table") == (None, None)


def test_the_trainings_own_lines_are_told_from_torchruns() -> None:
    own = "python: can't open file 'nofile.py'\n\n"
    assert causes.own_lines(own + TORCHRUN) == ["python: can't open file 'nofile.py'"]
