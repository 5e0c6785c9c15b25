"""Classify failures, and decide whether a restart is worthwhile; its cost is in `budget.py`.

Shared by the operator and the programs in pods; failures.py finds the cause among several. Standard library only, no
I/O, no clock. `class_of` returns a failure's class; `judge` charges it to a budget and decides whether and when the
group restarts.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ddpjob_core import budget
from ddpjob_core.budget import Attempt, ChargedTo, Limits, RestartHistory, Stop
from ddpjob_core.failure_policy import Action, PolicyRule
from ddpjob_core.failures import CANNOT_RUN as CANNOT_RUN
from ddpjob_core.failures import KILLED_BY_KERNEL, NO_PROGRAM, OUTPUT_UNREAD, Failure
from ddpjob_core.failures import RESUMABLE_EXIT_CODE as RESUMABLE_EXIT_CODE

Class = Literal["application", "outOfMemory", "infrastructure", "stall", "permanent"]
# Classes of failures of the script itself.
OWN = ("application", "outOfMemory")

# If a job that has never trained fails on different nodes this many times, the job itself counts as the cause.
STARTS_MAX = 10
# This many failures in a row in which ranks only lost peers are not charged, because a network fault may cause one.
PEERS_LOST_FREE = 1

# Errors of a rank whose peer is gone; never a root cause. NCCL's network errors are from its documentation.
# All other errors were seen with torch 2.13 on gloo, or with torch 2.11 and NCCL 2.28.9 on an H100.
# A node that dies closes no connection, and gloo reports the kernel's error (seen with a link taken down).
# "wait timeout" is "Socket Timeout" from torch 2.6 on.
SYMPTOMS = re.compile(
    r"Connection closed by peer|Connection reset by peer|Connection refused|Broken pipe|Connection was likely closed"
    r"|remote process exited|DistStoreError|DistNetworkError|RendezvousConnectionError|RendezvousClosedError"
    r"|RendezvousTimeoutError|connectFullMesh failed|monitoredBarrier|Socket Timeout|wait timeout after \d+ms, keys"
    r"|gloo/transport/.*(?:Connection timed out|No route to host|Network is unreachable)"
    r"|Timed out waiting \d+ms for (?:recv|send) operation|Application timeout caused pair closure"
    r"|ProcessGroupNCCL.*(?:watchdog|timeout)|Watchdog caught collective operation timeout"
    r"|NCCL communicator was aborted|ncclRemoteError|ncclSystemError",
    re.IGNORECASE,
)
# Symptoms of a rank whose wait timed out: the rank that it waited for may still be there and hang.
_TIMED_OUT = re.compile(
    r"Timed out (?:waiting \d+ms for|after \d+ seconds waiting)|wait timeout after \d+ms|Socket Timeout"
    # gloo's errors in other collectives of a rank whose wait timed out: the timeout has closed all its connections.
    r"|Application timeout caused pair closure|monitoredBarrier|Watchdog caught collective operation timeout",
    re.IGNORECASE,
)
# Symptoms of a launcher that has waited for the launchers of other nodes.
_NEVER_MET = re.compile(r"RendezvousTimeoutError|waiting for clients\. \d+/\d+ clients joined")
# Symptoms count only in torch's errors: a database that refuses a connection raises ConnectionRefusedError.
FROM_TORCH = re.compile(r"(?:\w+(?:\.|::))*(?:RuntimeError|Dist\w*Error|Rendezvous\w*Error)\b|gloo::|c10d?::")
# Out-of-memory errors of torch, CUDA (a GPU filled by others), NCCL (its own buffers), Python, numpy and C++.
# KILLED_BY_KERNEL is the agent's own error for a SIGKILL by the kernel (ddprun/oom_kills.py).
OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|(?:CUDA|HIP) (?:driver )?error: out of memory|Cuda failure (?:2 )?'out of memory'"
    r"|^[\w.]*MemoryError\b|^std::bad_alloc\b"
    rf"|DefaultCPUAllocator: can't allocate memory|^{KILLED_BY_KERNEL}"
)
# The cause behind torch's message "exited unexpectedly"; if shared memory is full, the signal is SIGBUS.
WORKER_KILLED = re.compile(r"^RuntimeError: DataLoader worker \(pid \d+\) is killed by signal: ")
# A GPU has failed, not the program. The texts are from NVIDIA's and PyTorch's documentation; none was seen.
# "not yet initialized" means that the node's fabric manager is not running.
DEVICE = re.compile(
    r"uncorrectable (?:ECC|NVLink) error|CUDA-capable device\(s\) is/are busy or unavailable"
    r"|no CUDA-capable device is detected|system not yet initialized|GPU is lost|fallen off the bus"
    r"|nvidia-container-cli: ",
    re.IGNORECASE,
)
CANNOT_EVER_START = re.compile(
    r"^(?:ModuleNotFoundError|ImportError|SyntaxError|IndentationError|TabError)\b"
    # The interpreter's own messages: `python nowhere.py`, `python -m nowhere`; runpy raises them as SystemExit.
    r"|^(?:SystemExit: )?\S*python[\w.]*: (?:can't open file '|can't find '__main__' module in '|No module named )"
    r"|^(?:SystemExit: )?\S*python[\w.]*: Error while finding module specification for '"
    rf"|^{NO_PROGRAM}"
    # runc's and crun's message in the container's log: an image for another architecture, or an invalid entry point.
    r"|^(?:exec \S{1,200}|[\w.: ]{0,60}exec user process caused): exec format error"
)
# A backend that no PyTorch has, or that the image's PyTorch lacks: messages of torch 2.4 to 2.13 and of `init`.
NO_SUCH_BACKEND = re.compile(
    r"^[\w.]+: (?:Unknown (?:c10d )?backend|Invalid backend|Distributed package doesn't have \w+ built in"
    r"|.*is none of auto, nccl, gloo|.*no published wheel has it|.*is not in this PyTorch)"
)
# Exceptions for mistakes in the script, which would be raised again, and the text of sys.exit("no data").
# Failures of networks, disks and GPUs have other types (OSError, TimeoutError …), or a text in _MAY_PASS.
_MISTAKE = re.compile(
    r"^SystemExit: (?!\d+$)|^(?:AttributeError|TypeError|NameError|UnboundLocalError|KeyError|IndexError|ValueError"
    r"|ddpjob\.errors\.(?:ConfigurationError|StateError)"
    r"|ZeroDivisionError|NotImplementedError|RecursionError|FileNotFoundError|NotADirectoryError|IsADirectoryError"
    r"|RuntimeError)\b"
)
_MAY_PASS = re.compile(
    r"^(?:RuntimeError|SystemExit)\b.*(?:CUDA|cuDNN|cublas|\bHIP\b|\bNCCL\b.*(?:error|abort)|nvidia|connect"
    r"|time[d -]{0,2}out|unavailable|temporar|retry|download|socket|rendezvous|gloo|c10d|DataLoader worker"
    # torch.save on a full disk, or a truncated file: "unexpected pos 704 vs 598".
    r"|inline_container\.cc|PytorchStream(?:Writer|Reader))",
    re.IGNORECASE,
)
# torch.save raises this if its file takes no more bytes, and does not name the reason.
WRITE_CUT_SHORT = re.compile(r"inline_container\.cc:\d+\] \. unexpected pos|PytorchStreamWriter failed writing")
# Mistakes whose text names a GPU. AcceleratorError, torch's class for CUDA errors from 2.9 on, does not count.
_OF_DEVICES = re.compile(
    r"^RuntimeError: (?:Expected all tensors to be on the same device|Input type \(.{0,60}\) and weight type"
    r"|Cannot re-initialize CUDA in forked subprocess)"
)
# Errors of a folder that a new process would get, too: EPERM, EACCES, EFBIG, ENOSPC, EROFS, ENAMETOOLONG, ELOOP.
# Also EDQUOT (the user's quota), and EEXIST or ENOTDIR if a file is in place of the folder.
CANNOT_SAVE = re.compile(r"^ddpjob\.errors\.SnapshotError: .*\(errno (?:1|13|17|20|27|28|30|36|40|122)\)")
# Messages of argparse and click, with exit code 2, about options that the script does not have.
_OPTIONS_REFUSED = re.compile(r"^(?:[^\s:][^:]{0,200}: error|Error): \S")
# The launcher has refused its options: it would refuse them on every node, before a rank starts.
_LAUNCHER_REFUSED = re.compile(r"^(?:ddprun|torchrun): error: \S")
ADDRESS_IN_USE = re.compile(r"EADDRINUSE|\[Errno 98\]|address already in use", re.IGNORECASE)
_PORT = re.compile(r"\bport[: ]+(\d{1,5})\b|\('[^']*', (\d{1,5})\)|:(\d{1,5})\b(?= .*in use)", re.IGNORECASE)
# Reasons of kubelet and node controller for a pod that was ended because of its node, or not admitted to it.
# The reasons are from pkg/kubelet: lifecycle, cm/topologymanager, volumemanager.
# SysctlForbidden, SMTAlignmentError and AppArmor are left out: no node admits such pods, so retries would never end.
NODE_REASONS = frozenset(
    "Evicted NodeLost NodeShutdown Shutdown Terminated Preempting SupervisorLost UnexpectedAdmissionError NodeAffinity "
    "NodeName NodePorts TaintToleration TopologyAffinityError InvalidNodeInfo VolumeAttachmentLimitExceeded "
    "UnknownReason UnexpectedPredicateFailureType".split()
)
# The pod has exceeded the activeDeadlineSeconds of its template: the next pod would end in the same way.
POD_DEADLINE = "DeadlineExceeded"
# Reasons of containerd and kubelet for a container that they have lost: its node was rebooted.
LOST_CONTAINER = frozenset(("Unknown", "ContainerStatusUnknown"))
START_REASONS = frozenset(("StartError", "ContainerCannotRun", "CreateContainerConfigError"))
_CLASS_OF: dict[Action, Class] = {"FailJob": "permanent", "Ignore": "infrastructure", "Count": "application"}
# Message of an eviction because of the pod's own disk limit: the pod would be evicted from every node.
OWN_LIMIT = re.compile(r"exceeds the (?:total )?limit|exceeded its local ephemeral storage limit")


@dataclass(frozen=True)
class Verdict:
    """The decision after a failure: which budget it is charged to, and when the group restarts or why it does not."""

    restart: bool
    history: RestartHistory
    """With a restart: includes this failure. Without: unchanged, because it counts restarts."""
    charged_to: ChargedTo | None
    """None if no budget is charged: the failure is permanent."""
    wait_seconds: int = 0
    """Seconds before the next attempt starts."""
    stop: Stop = ""
    """Why there is no restart; "" if there is one."""


def classify(failure: Failure) -> Class:
    """Return the class of a failure. The failure must not be a symptom of another one.

    Reports of Kubernetes and the kernel have priority, because a process that is ended from outside may print anything.
    """
    f = failure
    if f.stalled:
        return "stall"
    if f.container_reason == "OOMKilled":
        return "outOfMemory"
    if f.pod_reason == POD_DEADLINE:
        return "application"
    if from_outside(f):
        return "infrastructure"
    is_stopped = f.exit_code in (RESUMABLE_EXIT_CODE, 143)
    if cannot_start(f) and not is_stopped:
        return "infrastructure" if DEVICE.search(f.exception) else "permanent"
    if NO_SUCH_BACKEND.search(f.exception) or f.exception == OUTPUT_UNREAD or CANNOT_SAVE.match(f.exception):
        return "permanent"
    if OUT_OF_MEMORY.search(f.exception):
        return "outOfMemory"
    if is_stopped or DEVICE.search(f.exception):
        return "infrastructure"
    return "application"


def class_of(f: Failure, *, everywhere: bool, stepped: bool, trained: bool) -> Class:
    """Return the class of the failure that ended the ranks of a group.

    everywhere: True if all nodes show this failure, or no other node could be used. stepped: True if these ranks have
    trained. trained: True if ranks of an earlier attempt have. Until then a failure on all nodes is permanent, because
    a restart would fail in the same way. If only some nodes cannot start the program, they may be the reason.
    """
    found = classify(f)
    if found == "permanent" and cannot_start(f):
        if stepped and f.container_reason not in START_REASONS:
            return "application"  # the ranks have trained, so the program exists on these nodes
        return "permanent" if everywhere and not (stepped or trained) else "infrastructure"
    is_untried = found == "application" and not (stepped or trained) and is_mistake(f.exception, f.exit_code)
    # One node is enough if the launcher refuses its options, because all nodes have the same command.
    return "permanent" if is_untried and (everywhere or _LAUNCHER_REFUSED.match(f.exception)) else found


def is_again(f: Failure, before: Failure) -> bool:
    """True for an exception of the same type at the same line as before. On one machine, where no node can be the
    cause, a restart would then fail in the same way."""
    kind, kind_before = (one.exception.partition(":")[0] for one in (f, before))
    is_known = bool(kind and f.where) and f.exit_code not in (None, 0)
    return is_known and (kind, f.where) == (kind_before, before.where)


def from_outside(f: Failure) -> bool:
    """True if something outside the pod ended it: its node, an eviction, a deletion."""
    if f.disruption or f.deletion_requested or f.vanished or f.container_reason in LOST_CONTAINER:
        return True
    return is_of_node(f.pod_reason) and not OWN_LIMIT.search(f.pod_message)


def is_of_node(pod_reason: str) -> bool:
    """True if a pod with this reason was ended because of its node."""
    return pod_reason in NODE_REASONS or pod_reason.startswith(("OutOf", "Outof"))


def is_symptom(exception: str) -> bool:
    """True if an exception only reports a lost peer. An address in use does not count, although torch raises the
    same class, because it has other causes.
    """
    if ADDRESS_IN_USE.search(exception):
        return False
    return FROM_TORCH.match(exception) is not None and SYMPTOMS.search(exception) is not None


def is_unsaved(exception: str) -> bool:
    """True if a rank ended because its last state is not in its folder, although the other ranks stopped to save it."""
    return exception.startswith("ddpjob.errors.SnapshotError: ")


def cannot_start(f: Failure) -> bool:
    """True if none of the user's code ran: the container, the program or a module is missing."""
    has_not_started = f.container_reason in START_REASONS or f.exit_code in CANNOT_RUN
    return has_not_started or CANNOT_EVER_START.search(f.exception) is not None


def has_timed_out(exception: str) -> bool:
    """True if the exception is that of a rank that waited for another until its timeout."""
    return _TIMED_OUT.search(exception) is not None


def have_never_met(exception: str) -> bool:
    """True if the exception is that of a launcher that waited for other nodes' launchers until its timeout."""
    return _NEVER_MET.search(exception) is not None


def is_mistake(exception: str, exit_code: int | None) -> bool:
    """True if the same command would fail in the same way on any node: its exception is a mistake in the script, or its
    options were refused. Exit codes other than 1 and 2 are ignored, because the script chooses them.
    """
    if exit_code == 2:
        return _OPTIONS_REFUSED.match(exception) is not None
    if exit_code != 1 or _MISTAKE.match(exception) is None:
        return False
    return _MAY_PASS.match(exception) is None or _OF_DEVICES.match(exception) is not None


def port_in_use(exception: str) -> int | None:
    """Return the port that an exception reports as in use; 0 if it is not named, None if none is reported."""
    if not ADDRESS_IN_USE.search(exception):
        return None
    match = _PORT.search(exception)
    return int(next(group for group in match.groups() if group)) if match else 0


def ended_early(step: int | None, peer: str, peers_step: int | None) -> str:
    """Describe an early end: ended with exit code 0 after step 20 while rank 1 was in step 21: the ranks make different
    numbers of steps.

    peer: the rank that reported the lost connection. peers_step: last step of this rank, if known.
    """
    after = f" after step {step}" if step else ""
    known = peers_step is not None and peers_step >= (step or 1)
    where = f"was in step {peers_step + 1}" if known and peers_step is not None else "still waited for it"
    return f"ended with exit code 0{after} while {peer} {where}: the ranks make different numbers of steps"


def with_policy(
    failure_class: Class, exit_code: int | None, rules: Sequence[PolicyRule], *, from_outside: bool = False
) -> Class:
    """Return the class by the user's failurePolicy; the first matching rule decides. Rules apply to all exits, also
    those that count against no limit by default, but not to evictions and stalls.
    """
    if from_outside or failure_class == "stall":
        return failure_class
    rule = next((r for r in rules if r.matches(exit_code)), None)
    return failure_class if rule is None else _CLASS_OF[rule.action]


def of_complaints(failure_class: Class, history: RestartHistory, attempt: Attempt) -> Class:
    """Return the class of a failed attempt, given earlier ones. If all ranks only report lost peers, this counts
    against no limit the first time. It counts if it happens again before a new step, because the most frequent mistakes
    in scripts (uneven data, a collective that only some ranks call) end in this way every time.
    """
    before = 0 if attempt.made_a_new_step else history.peers_lost
    if failure_class == "infrastructure" and attempt.only_complaints and before >= PEERS_LOST_FREE:
        return "application"
    return failure_class


def judge(failure_class: Class, history: RestartHistory, attempt: Attempt, limits: Limits, now: dt.datetime) -> Verdict:
    """Count a failure against its budget, and return whether and when the group restarts."""
    if failure_class == "permanent":
        return Verdict(False, history, None, stop="PermanentFailure")
    to: ChargedTo = "application" if failure_class == "outOfMemory" else failure_class
    after = budget.charge(to, history, attempt, limits, now)
    stop = budget.exhausted(to, after, attempt, limits, now)
    if stop:
        return Verdict(False, history, to, stop=stop)
    return Verdict(True, after, to, wait_seconds=budget.back_off_seconds(after.in_a_row))
