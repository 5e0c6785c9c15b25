"""A failure's class and budget, and when a restart is useless: the same rules in the operator and in the agents."""

import datetime as dt

import pytest

from ddpjob_core import budget, rules
from ddpjob_core.budget import Attempt, Limits, RestartHistory
from ddpjob_core.failure_policy import PolicyRule
from ddpjob_core.failures import Failure

NOW = dt.datetime(2031, 3, 5, 7, 11, 13, tzinfo=dt.timezone.utc)
NOTHING, ALLOWED = RestartHistory(), Limits()
LOW_ON_MEMORY = "The node was low on resource: memory."
USELESS = Attempt(made_a_new_step=False, reports_steps=True, ran_seconds=30)
GOOD = Attempt(made_a_new_step=True, reports_steps=True, ran_seconds=30)
SILENT = Attempt(made_a_new_step=False, reports_steps=False, ran_seconds=30)
IN_USE = (
    "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
    "port: 23456, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
)


def fails(
    *found: rules.Class,
    attempt: Attempt = SILENT,
    limits: Limits = ALLOWED,
    every: float = 60,
    history: RestartHistory = NOTHING,
) -> rules.Verdict:
    """Return the verdict on the last of these failures, which are `every` seconds apart."""
    verdict = rules.Verdict(True, history, None)
    for number, one in enumerate(found):
        assert verdict.restart, f"failure {number} was the last: {verdict.stop}"
        verdict = rules.judge(one, verdict.history, attempt, limits, NOW + dt.timedelta(seconds=number * every))
    return verdict


# ---------------------------------------------------------------- classes

CLASSES: dict[str, tuple[Failure, rules.Class]] = {
    "an exit code is the application's": (Failure(exit_code=3, container_reason="Error"), "application"),
    "an exception is the application's": (Failure(exit_code=1, exception="ValueError: x"), "application"),
    "a crash in C is the application's": (Failure(exit_code=139), "application"),
    "a kill that is not called out of memory": (Failure(exit_code=137), "application"),
    "nothing known is the application's": (Failure(), "application"),
    "the kernel's out of memory": (Failure(exit_code=137, container_reason="OOMKilled"), "outOfMemory"),
    "one rank out of memory, as ddprun says it": (
        Failure(exit_code=137, exception="out of memory: killed by the kernel"), "outOfMemory"
    ),
    "one rank out of memory, for which torchrun ends with 1": (
        Failure(exit_code=1, container_reason="OOMKilled"), "outOfMemory"
    ),
    "out of a GPU's memory": (
        Failure(exit_code=1, exception="torch.OutOfMemoryError: CUDA out of memory."), "outOfMemory"
    ),
    "out of a GPU's memory, in older words": (Failure(exception="torch.cuda.OutOfMemoryError: x"), "outOfMemory"),
    "out of memory in Python": (Failure(exit_code=1, exception="MemoryError"), "outOfMemory"),
    "out of memory in numpy": (
        Failure(exit_code=1, exception="numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7.45 GiB"),
        "outOfMemory",
    ),
    "out of memory in C++": (Failure(exit_code=134, exception="std::bad_alloc: std::bad_alloc"), "outOfMemory"),
    "a GPU that others have filled": (
        Failure(exit_code=1, exception="torch.AcceleratorError: CUDA error: out of memory"), "outOfMemory"
    ),
    "a GPU of AMD's that others have filled": (
        Failure(exit_code=1, exception="RuntimeError: HIP error: out of memory"), "outOfMemory"
    ),
    "NCCL, for which torch has left no GPU memory": (
        Failure(
            exit_code=1,
            exception="torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/"
            "NCCLUtils.cpp:93, unhandled cuda error, NCCL version 2.28.9 ncclUnhandledCudaError: Cuda failure 2 'out "
            "of memory'",
        ),
        "outOfMemory",
    ),
    "out of memory while it was told to stop": (
        Failure(container_reason="OOMKilled", deletion_requested=True), "outOfMemory"
    ),
    "preemption counts before an exception": (Failure(disruption="x", exception="MemoryError"), "infrastructure"),
    "preemption": (Failure(exit_code=143, disruption="PreemptionByScheduler"), "infrastructure"),
    "an eviction": (Failure(pod_reason="Evicted", pod_message=LOW_ON_MEMORY), "infrastructure"),
    "an eviction for the pod's own disk": (
        Failure(pod_reason="Evicted", pod_message='Usage of EmptyDir volume "shm" exceeds the limit "64Mi".'),
        "application",
    ),
    "a node shut down": (Failure(pod_reason="Terminated"), "infrastructure"),
    "a node out of pods": (Failure(pod_reason="OutOfpods"), "infrastructure"),
    "a pod whose node was tainted before its kubelet had seen it": (
        Failure(pod_reason="TaintToleration", pod_message="Predicate TaintToleration failed"), "infrastructure"
    ),
    "a node whose free GPUs and CPUs are of different NUMA nodes": (
        Failure(pod_reason="TopologyAffinityError"), "infrastructure"
    ),
    "a pod that no node with this policy admits": (Failure(pod_reason="SMTAlignmentError"), "application"),
    "a node that was restarted": (Failure(exit_code=255, container_reason="Unknown"), "infrastructure"),
    "a pod without a trace": (Failure(vanished=True), "infrastructure"),
    "a stop from outside": (Failure(exit_code=1, deletion_requested=True), "infrastructure"),
    "a SIGTERM of unknown origin": (Failure(exit_code=143), "infrastructure"),
    "a stop at an agreed step": (Failure(exit_code=rules.RESUMABLE_EXIT_CODE), "infrastructure"),
    "a broken GPU": (
        Failure(exit_code=1, exception="RuntimeError: CUDA error: uncorrectable ECC error"), "infrastructure"
    ),
    "GPUs whose fabric manager does not run": (
        Failure(
            exit_code=1,
            exception="RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions "
            "before calling NumCudaDevices() that might have already set an error? Error 802: system not yet "
            "initialized",
        ),
        "infrastructure",
    ),
    "no step": (Failure(exit_code=143, stalled=True, deletion_requested=True), "stall"),
    "a backend that no torch has": (
        Failure(exit_code=1, exception="AssertionError: Unknown backend type foo"),
        "permanent",
    ),
    "a backend that this torch does not have": (
        Failure(exit_code=1, exception="RuntimeError: Distributed package doesn't have NCCL built in"),
        "permanent",
    ),
    "a backend that init does not know": (
        Failure(
            exit_code=1,
            exception="ddpjob.errors.ConfigurationError: DDPJOB_BACKEND: 'foo' is none of auto, nccl, gloo.",
        ),
        "permanent",
    ),
    "a database whose backend is unknown": (
        Failure(exit_code=1, exception="RuntimeError: the feature store: Unknown backend redis"),
        "application",
    ),
    "a program that is not there": (Failure(exit_code=127), "permanent"),
    "a program that may not run": (Failure(exit_code=126), "permanent"),
    "a pipe that nobody reads": (Failure(exit_code=1, exception="nobody reads its output any more"), "permanent"),
    "a pipe of the script's own": (Failure(exit_code=1, exception="BrokenPipeError: Broken pipe"), "application"),
    "a container that cannot start": (Failure(exit_code=128, container_reason="StartError"), "permanent"),
    "a configuration that is not there": (Failure(container_reason="CreateContainerConfigError"), "permanent"),
}  # fmt: skip


@pytest.mark.parametrize(("failure", "found"), CLASSES.values(), ids=CLASSES.keys())
def test_the_failure_class_follows_from_kubernetes_and_the_process(failure: Failure, found: rules.Class) -> None:
    assert rules.classify(failure) == found


NO_PROGRAM, NO_MODULE = Failure(exit_code=127), Failure(exit_code=1, exception="ImportError: no wandb")
TYPO = Failure(exit_code=1, exception="NameError: name 'modle' is not defined")
REFUSED = Failure(exit_code=2, exception="torchrun: error: --nproc-per-node: 'x' is not a number")
# Classes by failure: one node shows it, all nodes do, and ranks of this attempt, or of an earlier one, have trained.
BY_TRAINING: list[tuple[Failure, list[rules.Class]]] = [
    (NO_PROGRAM, ["infrastructure", "permanent", "application", "infrastructure"]),
    (NO_MODULE, ["infrastructure", "permanent", "application", "infrastructure"]),
    (Failure(container_reason="StartError"), ["infrastructure", "permanent", "infrastructure", "infrastructure"]),
    (TYPO, ["application", "permanent", "application", "application"]),
    (REFUSED, ["permanent", "permanent", "application", "application"]),
    (Failure(exit_code=3), ["application"] * 4),
    (Failure(exit_code=75, exception=NO_MODULE.exception), ["infrastructure"] * 4),
    (Failure(exit_code=1, exception="AssertionError: Unknown backend type foo"), ["permanent"] * 4),
]


@pytest.mark.parametrize(("failure", "classes"), BY_TRAINING, ids=str)
def test_a_failure_that_no_restart_can_fix_is_permanent_until_the_job_has_trained(failure, classes) -> None:
    cases = ((False, False, False), (True, False, False), (True, True, False), (True, False, True))
    found = [rules.class_of(failure, everywhere=e, stepped=s, trained=t) for e, s, t in cases]
    assert found == classes


@pytest.mark.parametrize(
    ("error", "found"),
    [
        ("out of memory", "outOfMemory"),
        ("uncorrectable ECC error encountered", "infrastructure"),
        ("CUDA-capable device(s) is/are busy or unavailable", "infrastructure"),
        ("no CUDA-capable device is detected", "infrastructure"),
        ("invalid device ordinal", "application"),
        ("device-side assert triggered", "application"),
        ("an illegal memory access was encountered", "application"),
        ("unspecified launch failure", "application"),
    ],
)
@pytest.mark.parametrize(
    "raised",
    [
        "torch.AcceleratorError: ",
        "RuntimeError: ",  # printed by torch before 2.9
        "c10::AcceleratorError: ",
        "c10::DistBackendError: [PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with "
        "exception: ",
    ],
)
def test_a_cuda_error_has_one_class_whatever_its_type_and_is_retried(raised, error, found):
    exception = f"{raised}CUDA error: {error}"
    assert rules.classify(Failure(exit_code=1, exception=exception)) == found
    assert not rules.is_symptom(exception)
    assert not rules.is_mistake(exception, 1)


@pytest.mark.parametrize(
    ("exception", "mistake"),
    [
        # torch 2.11 on an H100, and torch 2.4
        (
            "RuntimeError: Expected all tensors to be on the same device, but got mat1 is on cpu, different from other "
            "tensors on cuda:0 (when checking argument in method wrapper_CUDA_addmm)",
            True,
        ),
        ("RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0", True),
        ("RuntimeError: Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the", True),
        (
            "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must "
            "use the 'spawn' start method",
            True,
        ),
        ("RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x4 and 5x4)", True),
        ("RuntimeError: No CUDA GPUs are available", False),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", False),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", False),
    ],
)
def test_a_script_mistake_that_mentions_a_gpu_is_distinguished_from_a_gpu_error(exception: str, mistake: bool) -> None:
    """A mistake such as tensors on two devices must not count as a GPU error, which is retried."""
    assert rules.is_mistake(exception, 1) == mistake


@pytest.mark.parametrize(
    ("exception", "code", "mistake"),
    [
        ("SystemExit: /data/train is no folder", 1, True),
        ("SystemExit: the data server does not answer: connection refused", 1, False),
        ("SystemExit: no CUDA device", 1, False),
        ("SystemExit: 1", 1, False),
        ("AssertionError: empty shard", 1, False),  # an assert may check something that changes
        ("ddpjob.errors.StateError: snaps/step-3.pt holds another model", 1, True),
        ("ddpjob.errors.SnapshotError: the state of step 3 was not saved: timed out", 1, False),
    ],
)
def test_a_script_that_exits_with_a_message_is_not_restarted(exception: str, code: int, mistake: bool) -> None:
    """A script that exits with a message, such as `no data`, must not be started again."""
    assert rules.is_mistake(exception, code) == mistake


@pytest.mark.parametrize(
    ("exception", "timed_out"),
    [
        (
            "RuntimeError: [../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 8000ms for recv operation",
            True,
        ),
        ("RuntimeError: Application timeout caused pair closure", True),
        ("torch.distributed.DistStoreError: Timed out after 9 seconds waiting for clients. 1/2 clients joined.", True),
        ("torch.distributed.DistStoreError: wait timeout after 8000ms, keys: /default_pg/0//cpu//0/1", True),
        ("torch.distributed.DistBackendError: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(", True),
        ("RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 2000 ms", True),
        ("RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:4242", False),
    ],
)
def test_a_rank_that_waited_too_long_has_not_lost_its_peer(exception: str, timed_out: bool) -> None:
    assert rules.is_symptom(exception)
    assert rules.has_timed_out(exception) == timed_out


@pytest.mark.parametrize(
    "exception",
    [
        "RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598",
        "RuntimeError: [enforce fail at inline_container.cc:862] . PytorchStreamWriter failed writing file data/0: "
        "file write failed",
        "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
    ],
)
def test_a_full_disk_is_no_mistake_of_the_script(exception: str) -> None:
    """A full disk must not count as a mistake of the script: torch.save does not name the disk (2.13, /dev/full), and a
    new job would fail for good."""
    assert not rules.is_mistake(exception, 1)


@pytest.mark.parametrize(
    "exception",
    [
        "RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:4242",
        "RuntimeError: Gloo connectFullMesh failed with [../gloo/transport/tcp/pair.cc:144] no error",
        "RuntimeError: [../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation",
        "torch.distributed.DistNetworkError: The client socket has failed to connect to any network address",
        "torch.distributed.DistStoreError: Timed out after 301 seconds waiting for clients. 1/2 clients joined.",
        "DistBackendError: NCCL error: remote process exited or there was a network error",
        "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError",
        "torch.distributed.DistNetworkError: failed to recv, got 0 bytes. Connection was likely closed.",
        "c10::DistBackendError: [Rank 1] Watchdog caught collective operation timeout",
        # Messages if a node has lost power or network, and if a peer has never started.
        "RuntimeError: [../gloo/transport/tcp/pair.cc:535] Read error [10.1.3.122]:42916: No route to host",
        "RuntimeError: [../gloo/transport/tcp/pair.cc:535] Read error [10.1.3.122]:42916: Connection timed out",
        "torch.distributed.DistBackendError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] "
        "via c10d key-value store by key '0', but store->get('0') got error: wait timeout after 600000ms, keys: /0",
    ],
)
def test_an_error_of_torch_about_a_lost_peer_is_a_symptom(exception: str) -> None:
    assert rules.is_symptom(exception)


@pytest.mark.parametrize(
    "exception",
    [
        "ValueError: no such shard",
        "RuntimeError: shape mismatch",
        "ConnectionRefusedError: [Errno 111] Connection refused",
        "requests.exceptions.ConnectionError: Connection reset by peer",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "RuntimeError: the feature store: Connection timed out",
        IN_USE,
        "RuntimeError: [/gloo/transport/tcp/listener.cc:61] bind: Address already in use",
        "",
    ],
)
def test_a_failure_that_no_lost_peer_explains_is_not_a_symptom(exception: str) -> None:
    assert not rules.is_symptom(exception), "a data base that is down would restart the job for ever, without a charge"


# ---------------------------------------------------------------- failurePolicy


@pytest.mark.parametrize(
    ("action", "codes", "inverted", "exit_code", "found", "want"),
    [
        ("FailJob", {78}, False, 78, "application", "permanent"),
        ("FailJob", {78}, False, 77, "application", "application"),
        ("FailJob", {78}, True, 77, "application", "permanent"),
        ("FailJob", {78}, True, 78, "application", "application"),
        ("FailJob", {1}, True, None, "application", "application"),
        ("FailJob", {1}, True, 0, "application", "application"),
        ("Ignore", {137}, False, 137, "outOfMemory", "infrastructure"),
        ("Count", {127}, False, 127, "permanent", "application"),
        ("FailJob", {143}, False, 143, "infrastructure", "permanent"),
        ("FailJob", {75}, False, 75, "infrastructure", "permanent"),
        ("Count", {143}, False, 143, "infrastructure", "application"),
        ("FailJob", {143}, False, 143, "stall", "stall"),
    ],
)
def test_a_failure_policy_rule_applies_to_the_exit_of_a_process(action, codes, inverted, exit_code, found, want):
    rule = PolicyRule(action, frozenset(codes), inverted)
    assert rules.with_policy(found, exit_code, [rule]) == want


def test_the_first_rule_that_matches_decides() -> None:
    listed = [PolicyRule("Ignore", frozenset({3})), PolicyRule("FailJob", frozenset({3, 4}))]
    assert rules.with_policy("application", 3, listed) == "infrastructure"
    assert rules.with_policy("application", 4, listed) == "permanent"
    assert rules.with_policy("application", 4, []) == "application"


# ---------------------------------------------------------------- budgets


def test_the_application_restarts_as_often_as_backoff_limit_allows() -> None:
    assert fails(*["application"] * 3).restart
    last = fails(*["application"] * 4)
    assert (last.restart, last.stop) == (False, "BackoffLimitExceeded")
    assert last.history.application == 3, "what did not restart is not a restart"
    assert not fails("application", limits=Limits(backoff_limit=0)).restart


def test_out_of_memory_is_charged_to_the_application() -> None:
    assert fails("outOfMemory").charged_to == "application"
    assert fails("outOfMemory", "application", "outOfMemory", "outOfMemory").stop == "BackoffLimitExceeded"


def test_only_failures_within_the_window_count() -> None:
    hour = Limits(backoff_limit=1, window_seconds=3600)
    assert fails(*["application"] * 5, limits=hour, every=3600).restart, "one an hour is allowed for ever"
    assert fails(*["application"] * 2, limits=hour, every=3599).stop == "BackoffLimitExceeded"


def test_infrastructure_gives_up_after_a_hundred_failures_in_a_row_without_progress() -> None:
    assert fails(*["infrastructure"] * 100, attempt=USELESS).restart
    assert fails(*["infrastructure"] * 101, attempt=USELESS).stop == "TooManyInfrastructureFailures"
    assert fails(*["infrastructure"] * 300, attempt=GOOD).restart


def test_stalls_have_their_own_budget() -> None:
    assert fails(*["stall"] * 10, attempt=GOOD).history == RestartHistory(stall=10, in_a_row=1)
    assert fails(*["stall"] * 11, attempt=GOOD).stop == "TooManyStalls"


def test_a_permanent_failure_ends_the_job_at_once_without_a_charge() -> None:
    assert fails("permanent") == rules.Verdict(False, RestartHistory(), None, stop="PermanentFailure")


def test_three_failures_without_a_new_step_end_a_reporting_job_whatever_its_budget() -> None:
    many = Limits(backoff_limit=100)
    assert fails("application", "stall", attempt=USELESS, limits=many).restart
    assert fails("application", "stall", "application", attempt=USELESS, limits=many).stop == "NoProgress"
    assert fails(*["application"] * 50, attempt=GOOD, limits=many).restart
    assert fails(*["application"] * 50, attempt=SILENT, limits=many).restart, "its steps are not known"


def test_a_lost_node_in_between_neither_counts_as_no_progress_nor_resets_the_count() -> None:
    many = Limits(backoff_limit=100)
    mixed: list[rules.Class] = ["application", "infrastructure", "application", "infrastructure"]
    assert fails(*mixed, attempt=USELESS, limits=many).restart
    assert fails(*mixed, "application", attempt=USELESS, limits=many).stop == "NoProgress"


@pytest.mark.parametrize(
    ("exception", "port"),
    [
        (IN_USE, 23456),
        ("RuntimeError: [..] bind: Address already in use", 0),
        (
            "OSError: [Errno 98] error while attempting to bind on address ('0.0.0.0', 8081): address already in use",
            8081,
        ),
        ("OSError: [Errno 98] Address already in use", 0),
        ("torch.distributed.DistNetworkError: Connection reset by peer, port: 23456", None),
        ("", None),
    ],
)
def test_the_error_about_an_address_in_use_names_the_port(exception: str, port: int | None) -> None:
    assert rules.port_in_use(exception) == port


def test_pure_complaints_about_peers_are_free_once_until_the_next_new_step() -> None:
    """Lost peers alone must be charged the second time before a new step: uneven data always ends like this."""
    torn = SILENT._replace(only_complaints=True, ran_seconds=3600)
    after = rules.judge("infrastructure", NOTHING, torn, ALLOWED, NOW).history
    assert rules.of_complaints("infrastructure", NOTHING, torn) == "infrastructure"
    assert rules.of_complaints("infrastructure", after, torn) == "application"
    assert rules.of_complaints("infrastructure", after, SILENT) == "infrastructure", "a lost node in between is none"
    assert rules.of_complaints("infrastructure", after, torn._replace(made_a_new_step=True)) == "infrastructure"


# ---------------------------------------------------------------- back-off


def test_the_first_restart_is_at_once_then_after_1_2_4_seconds_up_to_5_minutes() -> None:
    waits = [fails(*["infrastructure"] * n, attempt=USELESS).wait_seconds for n in range(1, 13)]
    assert waits == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    assert budget.back_off_seconds(10**9) == 300


def test_the_back_off_of_a_job_without_reports_resets_after_ten_minutes_of_running() -> None:
    tired = RestartHistory(application=2, in_a_row=9)
    assert fails("application", attempt=SILENT._replace(ran_seconds=600), history=tired).wait_seconds == 0
    assert fails("application", attempt=SILENT._replace(ran_seconds=599), history=tired).wait_seconds == 256
    assert fails("application", attempt=USELESS._replace(ran_seconds=9999), history=tired).wait_seconds == 256
