"""Which lines of a node's output a local run shows, and which it only counts."""

from pathlib import Path

import pytest

from ddpjob_cli.local.shown.output_filter import HELD_SECONDS, UNSURE_SECONDS, OutputFilter, without_libraries

DATA = Path(__file__).parent / "data/logs"
T0 = 7.25
MISTAKE = [
    "Traceback (most recent call last):",
    '  File "/app/train.py", line 41, in <module>',
    "    main()",
    "ValueError: no such shard: 7",
]
LAUNCHER = [
    "E1122 16:19:47.568000 27043 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1)",
    "Traceback (most recent call last):",
    '  File "/app/bin/torchrun", line 8, in <module>',
    "    sys.exit(main())",
    '  File "/lib/python3.11/site-packages/torch/distributed/run.py", line 1028, in main',
    "    run(args)",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    "============================================================",
    "train.py FAILED",
    "------------------------------------------------------------",
    "Root Cause (first observed failure):",
    "============================================================",
]
FRAMES = [
    "[W1122 16:20:01.1 TCPStore.cpp:138] [c10d] recvValueWithTimeout failed on SocketImpl(fd=3): Connection reset",
    "Exception raised from recvBytes at /pytorch/torch/csrc/distributed/c10d/Utils.hpp:679 (most recent call first):",
    "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x98 (0x7f in /lib/libc10.so)",
    "<omitting python frames>",
    "",
]


def of_rank(rank: int, lines: list[str]) -> list[str]:
    return [f"[rank{rank}]: {line}" for line in lines]


def test_lines_of_the_script_are_shown_unchanged() -> None:
    lines = ["epoch 1 loss 0.3", "", "  indented", "[rank0]: said with a prefix", "UserWarning: x"]
    assert OutputFilter().take(lines, T0) == lines


def test_the_report_of_torchrun_is_counted_and_later_output_of_the_shell_is_shown() -> None:
    """torchrun's report must only be counted, because in full it hides the line that explains the failure."""
    output = OutputFilter()
    assert output.take(["before", *LAUNCHER, "after"], T0) == ["before", "after"]
    assert (output.hidden, output.held) == (len(LAUNCHER), [])


def test_a_stopped_torchrun_prints_nothing() -> None:
    """A stopped torchrun prints 40 to 80 lines of SignalException. None of them may be shown after Ctrl-C."""
    shown = OutputFilter().take((DATA / "sigterm-to-torchrun.log").read_text().splitlines(), T0)
    assert not [line for line in shown if "torch" in line or "Signal" in line]


def test_cpp_frames_of_torch_are_only_counted_and_useful_warnings_are_shown() -> None:
    """torch's C++ frames must only be counted: a successful run must not end with 25 lines of them."""
    warning = "[rank0]:[W1122 16:20:01.1 reducer.cpp:1430] Warning: find_unused_parameters=True was specified"
    output = OutputFilter()
    assert output.take(["accuracy 0.98", *FRAMES, warning], T0) == ["accuracy 0.98", warning]
    assert output.hidden == len(FRAMES)


def test_an_uncaught_exception_is_held_until_the_culprit_is_known() -> None:
    output = OutputFilter()
    lines = [line for pair in zip(of_rank(0, MISTAKE), of_rank(1, MISTAKE), strict=True) for line in pair]
    assert output.take([*lines, "rank 2 still trains"], T0) == ["rank 2 still trains"]
    assert [(trace.prefix, trace.lines) for trace in output.forget()] == [
        ("[rank0]: ", MISTAKE),
        ("[rank1]: ", MISTAKE),
    ]


def test_frames_of_libraries_are_counted_and_those_of_the_script_are_shown() -> None:
    """Frames of libraries must only be counted: an error has one line of the script among 20 of torch."""
    begin, script, error = MISTAKE[0], MISTAKE[1:3], "RuntimeError: mat1 and mat2 shapes cannot be multiplied"
    torch = ['  File "/x/site-packages/torch/nn/modules/module.py", line 1786, in _call_impl', "    return f(x)"] * 2
    hf = ['  File "/x/dist-packages/transformers/trainer.py", line 9, in step', "    loss(x)", "    ^^^^^^^"]
    chain = ["", "The above exception was the direct cause of the following exception:", ""]
    trace = [begin, *hf, *script, *torch, error, *chain, begin, *script, '  File "<frozen runpy>", line 8, in r', error]
    counted = [begin, "  … 1 frame of transformers", *script, "  … 2 frames of torch", error]
    assert without_libraries(trace) == [*counted, *chain, begin, *script, "  … 1 frame of Python", error]
    assert without_libraries([begin, *torch, error]) == [begin, *torch, error], "the only place that is known"
    group = ["  + Exception Group Traceback (most recent call last):", '  |   File "/x/lib/python3/a.py", line 1, in f']
    assert without_libraries([*group, *script, error]) == [*group, *script, error]


def test_a_traceback_that_the_script_has_handled_is_shown_before_its_next_line() -> None:
    assert OutputFilter().take([*MISTAKE, "trying the next shard"], T0) == [*MISTAKE, "trying the next shard"]


@pytest.mark.parametrize(("lines", "seconds"), [(MISTAKE, UNSURE_SECONDS), (of_rank(3, MISTAKE), HELD_SECONDS)])
def test_a_traceback_is_shown_in_time_even_if_no_process_ends(lines: list[str], seconds: float) -> None:
    """A traceback must be shown in time, also if a thread raises or the rank hangs after it."""
    output = OutputFilter()
    assert output.take(lines, T0) == []
    assert output.due_in(T0 + 1) == seconds - 1
    assert output.overdue(T0 + seconds - 1) == []
    assert output.overdue(T0 + seconds) == lines


def test_the_traceback_of_the_launcher_is_not_mixed_with_that_of_the_script() -> None:
    """The launcher's traceback must not mix with the script's, although torch prints no rank yet."""
    output = OutputFilter()
    assert output.take([*MISTAKE, *LAUNCHER], T0) == []
    assert [trace.lines for trace in output.forget()] == [MISTAKE]
    assert output.hidden == len(LAUNCHER)


def test_chained_exceptions_are_one_traceback_with_all_lines_of_the_last() -> None:
    chained = [*MISTAKE, "", "During handling of the above exception, another exception occurred:", "", *MISTAKE[:-1]]
    whole = [*chained, "RuntimeError: Error(s) in loading state_dict for Net:", "\tMissing key(s): a"]
    output = OutputFilter()
    assert output.take(of_rank(0, whole), T0) == []
    (trace,) = output.forget()
    assert trace.lines == [line.rstrip() for line in whole]


def test_all_lines_of_an_exceptions_message_are_held_with_its_traceback() -> None:
    """All lines of an exception's message must follow its traceback, such as five of CUDA (torch 2.11 on an H100)."""
    message = [
        "torch.AcceleratorError: CUDA error: device-side assert triggered",
        "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
        "incorrect.",
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
    ]
    asserted = (
        "/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1515: indexSelectSmallIndex: block: [0,0,0], thread: [0,0,0] "
        "Assertion `srcIndex < srcSelectDimSize` failed."
    )
    cpp = "[rank0]:[W1126 01:14:22.742356363 reducer.cpp:1430] Warning: a user can act on it"
    output = OutputFilter()
    assert output.take([asserted, *of_rank(0, [*MISTAKE[:-1], *message, ""]), cpp], T0) == [asserted, cpp]
    (trace,) = output.forget()
    assert trace.lines == [*MISTAKE[:-1], *message, ""]
    assert trace.exception == message[0]


def test_the_messages_of_ddprun_about_restarts_are_left_to_the_run() -> None:
    said = ["ddprun: restart 1: rank 1 was killed by SIGKILL; charged to application, waiting 0 s"]
    other = ["ddprun: --preload: no_such_module: ModuleNotFoundError; left out"]
    assert OutputFilter().take([*said, *other], T0) == other


def test_the_stacks_of_a_stall_are_kept_by_rank_and_the_scripts_lines_are_shown() -> None:
    """Stacks of a stall must be kept by rank, and only the script's lines shown: sixty lines hide the cause."""
    culprit = [
        "ddpjob: rank 1 (process 77) is stalled at step 2; innermost call first:",
        "  thread MainThread:",
        '    File "train.py", line 6, in load_batch',
    ]
    peer = ["ddpjob: rank 0 (process 76) is stalled at step 4; innermost call first:", "  thread MainThread:"]
    output = OutputFilter()
    assert output.take(["epoch 1", *culprit, *peer, "epoch 2", "  indented"], T0) == [
        "epoch 1",
        "epoch 2",
        "  indented",
    ]
    assert output.stacks == {1: culprit, 0: peer}
