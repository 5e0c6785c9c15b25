"""The report of the code in which a process was killed by a signal."""

from ddprun.core.crash import calls, stack

SEGFAULT = """Fatal Python error: Segmentation fault

Thread 0x00007f0000000001 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  File "/app/reader.py", line 9 in run

Current thread 0x00007f0000000002 (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/app/train.py", line 3 in inner
  File "/app/train.py", line 7 in <module>
  File "/opt/site-packages/ddprun/forkserver.py", line 424 in run_source
  File "/opt/site-packages/ddprun/forkserver.py", line 512 in <module>

Extension modules: numpy.core._multiarray_umath, torch._C (total: 2)
"""
OF_C = """Fatal Python error: Aborted

Thread 0x00007f0000000001 (most recent call first):
  File "/app/reader.py", line 9 in run

Thread 0x00007f0000000002 [python] (most recent call first):
  File "/opt/site-packages/torch/distributed/distributed_c10d.py", line 2930 in all_reduce
  File "/app/train.py", line 6 in step
"""


def test_the_calls_of_the_crashed_thread_have_the_order_of_a_traceback() -> None:
    assert calls(SEGFAULT) == [
        '  File "/app/train.py", line 7, in <module>',
        '  File "/app/train.py", line 3, in inner',
        '  File "/usr/lib/python3.11/ctypes/__init__.py", line 519, in string_at',
    ]


def test_if_a_cpp_thread_aborts_the_main_thread_shows_what_waits_for_it() -> None:
    assert calls(OF_C)[-2:] == [
        '  File "/app/train.py", line 6, in step',
        '  File "/opt/site-packages/torch/distributed/distributed_c10d.py", line 2930, in all_reduce',
    ]
    nothing = "Current thread 0x00007f0000000003 (most recent call first):\n  <no Python frame>\n\nThread 0x"
    assert calls(OF_C.replace("Thread 0x", nothing, 1)) == calls(OF_C)


def test_stacks_that_were_asked_for_before_are_no_crash() -> None:
    """Requested stacks must not count as a crash. faulthandler writes them into the same file, without a first line."""
    asked = SEGFAULT.partition("\n\n")[2]
    assert stack(asked)[-1] == ("/app/train.py", 7, "<module>")
    assert calls(asked) == []
    assert calls(asked + OF_C) == calls(OF_C)


def test_an_earlier_crash_of_a_child_process_is_not_reported_for_this_process() -> None:
    assert calls(OF_C + SEGFAULT) == calls(SEGFAULT)


def test_the_c_frames_that_python_3_14_adds_are_not_python_frames() -> None:
    of_c = (
        'Current thread\'s C stack trace (most recent call first):\n  Binary file "/usr/bin/python3", at x+0x1 [0x2]\n'
    )
    assert calls(f"{SEGFAULT}\n{of_c}") == calls(SEGFAULT)


def test_the_main_thread_is_unknown_if_there_are_a_hundred_threads_or_more() -> None:
    """With 100 threads or more, no thread may count as the main thread: faulthandler writes at most 100 of them."""
    assert calls(OF_C + "...\n") == []
    assert calls(SEGFAULT + "...\n") == calls(SEGFAULT)


def test_a_deep_recursion_shows_its_innermost_calls() -> None:
    deep = "".join(f'  File "/app/train.py", line {i} in f\n' for i in range(1, 101))
    found = calls(
        f"Fatal Python error: Segmentation fault\n\nCurrent thread 0x01 (most recent call first):\n{deep}  ...\n"
    )
    assert (len(found), found[-1]) == (20, '  File "/app/train.py", line 1, in f')


def test_a_truncated_or_empty_report_gives_nothing() -> None:
    assert calls("") == calls("Fatal Python error: Aborted\n\nThread 0x00") == []
