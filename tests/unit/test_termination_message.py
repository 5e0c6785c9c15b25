"""The end of a container, read from output of torch 2.13 that is cut as the kubelet cuts it. data/logs has the last 2
kB of torchrun's output for short scripts: raise, sys.exit(3), SIGSEGV and SIGKILL to oneself, raise under @record, two
ranks that exit at different times, two ranks on gloo of which rank 1 raises (in one pod, and in two pods: peer-gone is
the other pod's), and SIGTERM to torchrun itself."""

import json
from pathlib import Path

import pytest

from ddpjob_core.failures import Failure, first_line
from ddpjob_operator.failures import root_cause, termination_message
from ddpjob_operator.failures.termination_message import Message

DATA = Path(__file__).parent / "data/logs"
SHARD = "ValueError: no such shard: 7"
FRAME = 'Traceback (most recent call last):\n  File "t.py", line 3, in <module>\n    main()\n'
PEER = "RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:4242"
REFUSED = "ConnectionRefusedError: [Errno 111] Connection refused"
WATCHDOG = "[PG ID 0 Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7) ran for 600 ms"
SPAWN = "torch.multiprocessing.spawn.ProcessRaisedException: \n\n-- Process 1 terminated with the following error:\n"
NCCL = "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:269, unhandled system error"


def read(text: str) -> Failure:
    return termination_message.read(text).failure


def chained(first: str, second: str) -> str:
    link = "\nDuring handling of the above exception, another exception occurred:\n\n"
    return FRAME + first + "\n" + link + FRAME + second + "\n"


def of_rank(rank: int, log: str) -> str:
    """Return the log with the prefix that torch prints for this rank."""
    return "\n".join(f"[rank{rank}]: {line}" if line else "" for line in log.splitlines()) + "\n"


@pytest.mark.parametrize(
    ("name", "rank", "code", "exception", "symptom"),
    [
        ("exception", 0, 1, SHARD, False),
        ("exit-3", 0, 3, "", False),
        ("sigsegv", 0, 139, "", False),
        ("sigkill", 0, 137, "", False),
        ("record", 0, 1, SHARD, False),
        ("two-in-one-second", 0, 4, "", False),
        ("two-one-after-the-other", 1, 1, "", False),
        ("two-ranks-gloo-whole", 1, 1, SHARD, False),
        ("two-ranks-gloo", 1, 1, "", False),
        ("peers-cause", 1, 1, SHARD, False),
        ("sigterm-to-torchrun", None, 143, "", False),
    ],
)
def test_the_final_report_of_torchrun_gives_rank_code_and_exception(name, rank, code, exception, symptom):
    failure = read((DATA / f"{name}.log").read_text())
    assert (failure.rank, failure.exit_code, failure.exception, failure.symptom) == (rank, code, exception, symptom)


@pytest.mark.parametrize("name", ["peer-gone-record", "peer-gone"])
def test_a_complaint_about_a_peer_is_recognized_even_if_the_kubelet_cut_its_beginning(name: str) -> None:
    failure = read((DATA / f"{name}.log").read_text())
    assert "Connection closed by peer" in failure.exception
    assert failure.symptom
    assert (failure.rank, failure.exit_code) == (0, 1)


def test_the_root_cause_of_torchrun_is_ignored_if_it_is_a_symptom() -> None:
    whole = (DATA / "two-in-one-second.log").read_text()
    log = of_rank(0, FRAME + PEER) + of_rank(1, FRAME + SHARD) + whole
    failure = read(log)
    assert (failure.rank, failure.exit_code, failure.exception) == (1, 5, SHARD), (
        "it checks 10 times a second, then by number"
    )


def test_a_rank_that_torchrun_stopped_is_not_the_reason_for_the_stop() -> None:
    log = (DATA / "two-in-one-second.log").read_text().replace("exitcode  : 4", "exitcode  : -15")
    assert read(log).rank == 1


LOADING = "RuntimeError: Error(s) in loading state_dict for Net:"
SIZES = "size mismatch for fc.weight: copying a param with shape torch.Size([4, 4]) from checkpoint, the shape"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (f"{LOADING}\n\t{SIZES}\n\tsize mismatch for fc.bias: copying", f"{LOADING} {SIZES}"),
        (
            "RuntimeError: \n        An attempt has been made to start a new process before the\n        current",
            "RuntimeError: An attempt has been made to start a new process before the",
        ),
        (
            "torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:\nRuntimeError: no compiler\n\nSet T=1",
            "torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised: RuntimeError: no compiler",
        ),
        ("ValueError: no such key:", "ValueError: no such key:"),
    ],
    ids=["load_state_dict", "spawn without a main guard", "torch.compile", "nothing follows"],
)
def test_an_exception_whose_first_line_ends_in_a_colon_includes_the_next_line(said: str, expected: str) -> None:
    """If an exception's first line ends in a colon, the next line must be included, because it has the reason."""
    failure = read(FRAME + said + "\n")
    assert (failure.exception, failure.where) == (expected, "t.py:3")
    assert read(of_rank(1, FRAME + said)).exception == expected
    kind, _, text = said.partition(": ")
    assert first_line(f"{kind}: {text.strip()}") == expected


@pytest.mark.parametrize(
    "foreign",
    [
        "E1126 12:00:00.123000 7 torch/distributed/elastic/multiprocessing/api.py:984] failed (exitcode: 1) rank: 1",
        "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: 1) local_rank: 1 (pid: 9)",
        "[W1126 12:00:00.123 ProcessGroupNCCL.cpp:1250] Warning: WARNING: process group has NOT been destroyed",
        "ddprun: rank 1 ended with exit code 1",
        "wandb: Synced 5 W&B file(s)",
        "/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: 1 leaked semaphore",
        "srun: error: node-1: task 1: Exited with exit code 1",
        "=" * 60,
        "-" * 74 + "\nmpirun detected that one or more processes exited with non-zero status",
    ],
)
def test_lines_of_a_launcher_or_library_are_not_part_of_an_exception_text(foreign: str) -> None:
    """A launcher's line must not be joined to the exception: `ValueError: no such key: ddprun: rank 1 ended …`."""
    assert read(f"{FRAME}ValueError: no such key:\n{foreign}\n").exception == "ValueError: no such key:"
    assert read(f"{FRAME}ValueError: no such key:\n{foreign}\nmore\n").exception == "ValueError: no such key:"


def test_a_traceback_after_a_colon_is_not_part_of_the_line_above_it() -> None:
    assert read(f"{FRAME}ValueError: of the worker:\n{FRAME}{SHARD}\n").exception == SHARD


EXITED = "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with exit code 1"


def test_the_traceback_of_a_spawned_process_counts_more_than_its_exit() -> None:
    """The traceback of a spawned process must count more than its exit: without a `__main__` guard it cannot report."""
    guard = "RuntimeError: \n        An attempt has been made to start a new process before the\n"
    failure = read(f"{FRAME}{guard}{FRAME}{EXITED}\n")
    assert failure.exception == "RuntimeError: An attempt has been made to start a new process before the"
    assert (failure.exit_code, read(f"{FRAME}{EXITED}\n").exception) == (1, EXITED)
    chosen = EXITED.replace("code 1", "code 3")
    assert read(f"{FRAME}{SHARD}\n{FRAME}{chosen}\n").exception == chosen, "Python ends with 1 by what it raises"


STOPS = "W1126 15:07:58.508000 1794 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 20 closing "


@pytest.mark.parametrize(
    ("code", "said"), [(-6, ""), (1, of_rank(0, FRAME + PEER))], ids=["an abort without a word", "a complaint"]
)
def test_a_rank_that_raised_and_was_stopped_during_its_exit_is_the_cause(code: int, said: str) -> None:
    """A rank that raised must be the cause, even if it was stopped while Python exited and a peer ended before."""
    table = (DATA / "two-in-one-second.log").read_text()
    table = table.replace("exitcode  : 4", f"exitcode  : {code}").replace("exitcode  : 5", "exitcode  : -15")
    raised = of_rank(1, FRAME + SHARD)
    failure = read(f"{raised}{said}{STOPS}signal SIGTERM\n{table}")
    assert (failure.rank, failure.exit_code, failure.exception) == (1, 1, SHARD)
    late = read(f"{said}{STOPS}signal SIGTERM\n{raised}{table}")
    assert late.rank == 0, "what a rank raises when it is stopped explains nothing"


def test_a_rank_that_exited_by_itself_is_the_cause_and_not_one_that_was_stopped() -> None:
    table = (DATA / "two-in-one-second.log").read_text().replace("exitcode  : 5", "exitcode  : -15")
    assert read(f"{of_rank(1, FRAME + SHARD)}{STOPS}signal SIGTERM\n{table}").exit_code == 4


@pytest.mark.parametrize("kept", [1900, 1200, 700, 300])
def test_the_exception_of_a_recorded_script_is_kept_however_deep_its_traceback(kept: int) -> None:
    log = (DATA / "record.log").read_text()[-kept:]
    assert read(log).exception == SHARD


def test_the_tables_of_older_torch_are_parsed() -> None:
    log = (
        "***************************************\n            train.py FAILED            \n"
        "=======================================\nRoot Cause:\n[0]:\n  time: 2021-07-16_12:38:01\n"
        '  rank: 5 (local_rank: 1)\n  exitcode: 7 (pid: 2344)\n  error_file: <N/A>\n  msg: "Process failed"\n'
        "=======================================\nOther Failures:\n[1]:\n  time: 2021-07-16_12:38:09\n"
        "  rank: 4 (local_rank: 0)\n  exitcode: 9 (pid: 2343)\n***************************************\n"
    )
    assert (read(log).rank, read(log).exit_code) == (5, 7)


def test_the_last_table_counts() -> None:
    first, last = ((DATA / f"{name}.log").read_text() for name in ("exit-3", "sigsegv"))
    assert read(first + last).exit_code == 139


# ---------------------------------------------------------------- the library's message


def test_the_message_of_the_library_is_read_completely() -> None:
    text = json.dumps(
        {"ddpjob": 1, "rank": 3, "exitCode": 1, "signal": "", "exception": SHARD, "step": 41, "time": 1796000000.5,
         "resumable": False, "symptom": False, "traceback": "the last lines\n" + SHARD}
    )  # fmt: skip
    report = termination_message.read(text + "\n")
    failure = Failure(3, exit_code=1, exception=SHARD, step=41, time=1796000000.5)
    want = Message(failure, log=f"the last lines\n{SHARD}")
    assert report == want


@pytest.mark.parametrize(
    ("fields", "code", "resumable", "symptom"),
    [
        ({}, None, False, False),
        ({"exitCode": 0}, None, False, False),
        ({"exitCode": 75}, 75, True, False),
        ({"exitCode": -9}, 137, False, False),
        ({"signal": "SIGINT", "exitCode": 130}, 130, False, False),
        ({"signal": "SIGNONSENSE", "exitCode": 4}, 4, False, False),
        ({"resumable": True, "step": 41}, None, True, False),
        ({"exception": "TrainingError: step failed", "symptom": True}, None, False, True),
        ({"exception": PEER}, None, False, True),
    ],
)
def test_every_field_of_the_library_message_may_be_missing(fields, code, resumable, symptom):
    failure = read(json.dumps({"ddpjob": 1, **fields}))
    assert (failure.exit_code, failure.resumable, failure.symptom) == (code, resumable, symptom)


def test_the_exception_of_the_library_overrides_the_log_and_the_table_fills_its_gaps() -> None:
    log = (DATA / "exit-3.log").read_text()
    failure = read(json.dumps({"ddpjob": 1, "exception": SHARD}) + "\n" + log)
    assert (failure.rank, failure.exit_code, failure.exception) == (0, 3, SHARD)


@pytest.mark.parametrize(
    "text",
    [
        '{"ddpjob":1,"rank":3,"exception":"ValueError: no su',
        '{"ddpjob":1,"rank":"3"}',
        '{"ddpjob":1,"rank":-1}',
        '{"ddpjob":1,"rank":true}',
        '{"ddpjob":1,"exitCode":1e400}',
        '{"ddpjob":1,"time":NaN}',
        '{"ddpjob":1,"step":99999999999999999999999}',
        '{"ddpjob":1,"exception":["ValueError"]}',
        '{"ddpjob":2,"rank":3}',
        '{"ddpjob":1,"exception":"\\ud800"}',
        '{"rank":3}',
        "[" * 20000,
        "null",
        "\x00\x00",
    ],
)
def test_a_text_that_is_no_library_message_is_read_as_a_log(text: str) -> None:
    report = termination_message.read(text)
    assert report == Message(log=text.replace("\x00", ""))


# ---------------------------------------------------------------- exceptions

# Output of Python 3.11 and 3.14 for an error in `__del__`, and of logging for a record that it cannot write.
DELETED = "Exception ignored in: <function _MultiProcessingDataLoaderIter.__del__ at 0x7f1>\n"
DEALLOCATED = (
    "Exception ignored while calling deallocator <function _MultiProcessingDataLoaderIter.__del__ at 0x7f1>:\n"
)
CHILD = "AssertionError: can only test a child process"
KILLED = "RuntimeError: DataLoader worker (pid 2032) is killed by signal: Bus error. It is possible that dataloader's"
GONE = "RuntimeError: DataLoader worker (pid(s) 2032) exited unexpectedly"
CALLED = "subprocess.CalledProcessError: Command '['/opt/bin/python3.11', 't.py']' returned non-zero exit status 1."
GIT = "subprocess.CalledProcessError: Command '['git', 'rev-parse', 'HEAD']' returned non-zero exit status 128."
UNWRITTEN = (
    f"--- Logging error ---\n{FRAME}TypeError: not all arguments converted\nCall stack:\n  File 't.py'\nMessage: 'a'\n"
)


@pytest.mark.parametrize(
    ("log", "exception", "symptom"),
    [
        (FRAME + SHARD, SHARD, False),
        (FRAME + "ShardMissing: 7\nmore output", "ShardMissing: 7", False),
        (FRAME + "KeyboardInterrupt", "KeyboardInterrupt", False),
        ("cut in the middle\n[default0]:RuntimeError: boom", "RuntimeError: boom", False),
        ('  File "t.py", line 3\n    def (:\n        ^\nSyntaxError: bad', "SyntaxError: bad", False),
        ("epoch 1 accuracy 0.9\nNote: all is well", "", False),
        ("", "", False),
        # Tracebacks that are chained
        (chained(SHARD, "TrainingError: step 7 failed"), "TrainingError: step 7 failed", False),
        (chained(SHARD, PEER), SHARD, False),
        (chained(PEER, "TrainingError: step 7 failed"), PEER, True),
        (
            f"{FRAME}{PEER}\n\nThe above exception was the direct cause of the following exception:\n\n{FRAME}Bad: x",
            PEER,
            True,
        ),
        # Tracebacks that are not chained
        (FRAME + SHARD + "\n" + FRAME + PEER, SHARD, False),
        (FRAME + PEER + "\n" + FRAME + SHARD, SHARD, False),
        (FRAME + PEER, PEER, True),
        (REFUSED, REFUSED, False),
        # Tracebacks that do not end the program
        (f"{FRAME}{SHARD}\n{DELETED}{FRAME}{CHILD}\n", SHARD, False),
        (f"{FRAME}{PEER}\n{DELETED}{FRAME}{CHILD}\n", PEER, True),
        (f"{FRAME}{PEER}\n{DEALLOCATED}{chained(SHARD, CHILD)}", PEER, True),
        (f"{FRAME}{PEER}\nException ignored in: <_io.TextIOWrapper>\nBrokenPipeError: [Errno 32]", PEER, True),
        (f"{UNWRITTEN}{FRAME}{PEER}\n", PEER, True),
        (f"{DELETED}{FRAME}{CHILD}\n{FRAME}{SHARD}\n", SHARD, False),
        (f"Exception ignored, as ordered by --keep-going\nstep 2\n{FRAME}{SHARD}\n", SHARD, False),
        # Lines of launchers
        (f"{FRAME}{SHARD}\n{FRAME}{CALLED}", SHARD, False),
        (f"{FRAME}{PEER}\n{FRAME}{CALLED}", PEER, True),
        (f"loading\n{FRAME}{CALLED}", CALLED, False),
        (f"{FRAME}{SHARD}\n{FRAME}{GIT}", GIT, False),
        # Errors of multiprocessing and of data loaders
        (
            FRAME + "ValueError: Caught ValueError in DataLoader worker process 0.\nOriginal " + FRAME + SHARD + "\n",
            SHARD,
            False,
        ),
        (chained(KILLED, GONE), KILLED, False),
        (chained("_queue.Empty", GONE), GONE, False),
        (FRAME + SPAWN + FRAME + SHARD, SHARD, False),
        # Errors of C++
        (
            f"terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  {WATCHDOG}",
            f"c10::DistBackendError: {WATCHDOG}",
            True,
        ),
        (f"{FRAME}{NCCL}\nncclSystemError: System call failed", f"{NCCL} ncclSystemError: System call failed", True),
        (f"{FRAME}{SHARD}\nnccl_train.py FAILED", SHARD, False),  # the script's name in torchrun's table
    ],
)  # fmt: skip
def test_the_exception_is_the_last_one_that_is_no_symptom(log: str, exception: str, symptom: bool) -> None:
    failure = read(log)
    assert (failure.exception, failure.symptom) == (exception, symptom)


def test_an_nccl_error_keeps_the_line_of_the_script_that_raised_it() -> None:
    """An NCCL error has a second line, which must not hide the script's line at the end of the first line."""
    failure = read(
        f"{FRAME}{NCCL}\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
    )
    assert (failure.where, failure.symptom) == ("t.py:3", False)
    assert failure.exception.endswith("ncclInvalidUsage: This usually reflects invalid usage of NCCL library.")


def test_an_nccl_error_keeps_its_detail_in_a_log_and_in_an_exception() -> None:
    """The message must keep NCCL's detail: the explanation of the error class names neither ranks nor GPU (2.28.9)."""
    kind = "ncclInvalidUsage: This usually reflects invalid usage of NCCL library."
    found = "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 60"
    said = f"{NCCL}\n{kind}\nLast error:\n{found}"
    expected = f"{NCCL} ncclInvalidUsage: {found}"
    assert read(f"{FRAME}{said}\nstep 3\n").exception == expected
    assert read(of_rank(1, FRAME + said)).exception == expected
    assert f"{NCCL.partition(':')[0]}: {first_line(said.partition(': ')[2])}" == expected


@pytest.mark.parametrize("kind", ["torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError"])
def test_a_gpu_out_of_memory_error_keeps_the_memory_of_this_process_in_a_log_and_in_an_exception(kind: str) -> None:
    """The text must not be cut within the list of other processes on the GPU (torch 2.11 on an H100)."""
    said = (
        "CUDA out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total capacity of 79.18 GiB of which 3.27 GiB is "
        "free. Process 610 has 1.15 GiB memory in use. Including non-PyTorch memory, this process has 73.15 GiB memory "
        "in use. Process 607 has 590.00 MiB memory in use. Process 609 has 518.00 MiB memory in use. Of the allocated "
        "memory 72.00 GiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated. If reserved but "
        "unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
        "fragmentation.  See documentation for Memory Management  (https://docs.pytorch.org/docs/stable/notes/cuda)"
    )
    expected = (
        "CUDA out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total capacity of 79.18 GiB of which 3.27 GiB is "
        "free. This process has 73.15 GiB memory in use. Of the allocated memory 72.00 GiB is allocated by PyTorch, "
        "and 0 bytes is reserved by PyTorch but unallocated."
    )
    assert read(f"{FRAME}{kind}: {said}\nstep 3\n").exception == f"{kind}: {expected}"
    assert first_line(said) == expected
    assert len(f"{kind}: {expected}") <= root_cause.EXCEPTION_MAX


def test_a_memory_error_of_torch_without_other_processes_is_kept() -> None:
    older = (
        "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 79.18 GiB total capacity; 72.00 GiB already allocated; "
        "1.50 GiB free; 72.10 GiB reserved in total by PyTorch)"
    )
    assert first_line(older) == older
    assert first_line("ValueError: Process 7 has 3 shards.") == "ValueError: Process 7 has 3 shards."


def test_an_nccl_watchdog_that_ends_its_process_is_a_symptom_with_its_collective() -> None:
    """The watchdog's error is a symptom, because another rank is late. The text is that of PyTorch 2.11 on a GPU."""
    what = (
        "[PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with exception: [Rank 0] "
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=11, OpType=ALLREDUCE, NumelIn=4160, "
        "NumelOut=4160, Timeout(ms)=12000) ran for 12082 milliseconds before timing out."
    )
    log = f"""[rank0]:[E1126 01:16:00.700312978 ProcessGroupNCCL.cpp:764] [Rank 0] To avoid data inconsistency, we are \
taking the entire process down.
[rank0]:[E1126 01:16:00.705641709 ProcessGroupNCCL.cpp:2119] {what}
Exception raised from checkTimeout at /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:692 (most recent \
call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x9d (0x7e6f0f9d94dd in /v/lib/libc10.so)

terminate called after throwing an instance of 'c10::DistBackendError'
  what():  {what}
Exception raised from checkTimeout at /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:692 (most recent \
call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x9d (0x7e6f0f9d94dd in /v/lib/libc10.so)
"""
    failure = read(log)
    assert failure.symptom
    assert failure.exception == f"c10::DistBackendError: {what}"


def test_a_killed_data_loader_worker_is_reported_with_the_script_line_that_requested_a_batch() -> None:
    """A killed data loader worker must be reported with the script's line, which torch's own traceback lacks."""
    within = FRAME.replace("t.py", "/v/site-packages/torch/utils/data/dataloader.py")
    log = chained(KILLED, GONE).replace(FRAME, within, 1)
    assert (read(log).exception, read(log).where) == (KILLED, "t.py:3")


def test_an_exception_group_is_classified_by_its_exceptions() -> None:
    group = """
  + Exception Group Traceback (most recent call last):
  |   File "t.py", line 5, in <module>
  |     raise ExceptionGroup("unhandled errors in a TaskGroup", [ValueError("no such shard: 7")])
  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "t.py", line 3, in <module>
    | ValueError: no such shard: 7
    +------------------------------------
"""
    assert read(group).exception == SHARD
    lost = group.replace(SHARD, PEER)
    assert read(lost).symptom


def test_interleaved_output_of_ranks_is_separated_by_the_prefix_of_torch() -> None:
    one, other = of_rank(3, FRAME + SHARD).splitlines(), of_rank(2, FRAME + PEER).splitlines()
    mixed = "\n".join(line for pair in zip(one, other, strict=True) for line in pair)
    failure = read(mixed)
    assert (failure.rank, failure.exception, failure.symptom) == (3, SHARD, False)


def test_a_process_that_spawn_gives_up_for_has_its_own_exit_code() -> None:
    line = "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with "
    assert termination_message.read(FRAME + line + "exit code 3").failure.exit_code == 3
    assert termination_message.read(FRAME + line + "signal SIGSEGV").failure.exit_code == 139


@pytest.mark.parametrize(
    ("code", "name"), [(137, "SIGKILL"), (139, "SIGSEGV"), (1, ""), (None, ""), (255, ""), (168, ""), (128, "")]
)
def test_a_signal_is_recognized_by_the_exit_code(code: int | None, name: str) -> None:
    assert termination_message.signal_name(code) == name
