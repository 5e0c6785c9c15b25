"""What a failure is, what it costs, and when no other try is worth it.

One place for the operator and for what runs in the pods; how failures rank as causes is in failures.py. Standard
library only, no I/O, no clock. `classify` names the class of a failure, `judge` charges it to a budget and says
whether, and when, the group starts again.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ddpjob.core.failures import CANNOT_RUN as CANNOT_RUN
from ddpjob.core.failures import KILLED_BY_KERNEL, Failure
from ddpjob.core.failures import RESUMABLE_EXIT_CODE as RESUMABLE_EXIT_CODE

Class = Literal["application", "outOfMemory", "infrastructure", "stall", "permanent"]
Budget = Literal["application", "infrastructure", "stall"]
Stop = Literal[
    "", "BackoffLimitExceeded", "NoProgress", "PermanentFailure", "TooManyInfrastructureFailures", "TooManyStalls"
]
Action = Literal["FailJob", "Ignore", "Count"]

BACKOFF_LIMIT = 3
# A job on preemptible nodes may lose hundreds of them in a week and be healthy: what counts is how many in a row.
INFRASTRUCTURE_IN_A_ROW_MAX = 100
STALLS_MAX = 10
NO_PROGRESS_MAX = 3
# A job that has never trained, and that something on a node keeps from starting: after so many tries on other nodes it
# is the job itself.
STARTS_MAX = 10
# Nobody saw a node, a pod or a connection go: once that may be the network, the second time it is the script.
PEERS_LOST_FREE = 1
BACK_OFF_SECONDS_MAX = 300
# As the kubelet forgets its crash back-off: a job that reports no steps has nothing else to show that it went well. So
# the next restart is immediate again; how many restarts may be free is another question, which time does not answer.
FORGIVEN_AFTER_SECONDS = 600

# What a rank raises when its peer is gone: true, and not the reason. Seen with torch 2.13 on gloo; the NCCL lines are
# from its documentation and were not run here (docs/measured.md, failures).
SYMPTOMS = re.compile(
    r"Connection closed by peer|Connection reset by peer|Connection refused|Broken pipe|Connection was likely closed"
    r"|remote process exited|DistStoreError|DistNetworkError|RendezvousConnectionError|RendezvousClosedError"
    r"|RendezvousTimeoutError|connectFullMesh failed|monitoredBarrier|Socket Timeout"
    r"|Timed out waiting \d+ms for (?:recv|send) operation|Application timeout caused pair closure"
    r"|ProcessGroupNCCL.*(?:watchdog|timeout)|Watchdog caught collective operation timeout"
    r"|NCCL communicator was aborted|ncclRemoteError|ncclSystemError",
    re.IGNORECASE,
)
# Only torch speaks of peers: a database that refuses a connection is a ConnectionRefusedError, and no lost rank.
FROM_TORCH = re.compile(r"(?:\w+(?:\.|::))*(?:RuntimeError|Dist\w*Error|Rendezvous\w*Error)\b|gloo::|c10d?::")
# torch's, Python's, and the agent's of a SIGKILL by the kernel (agent/oom_kills.py).
OUT_OF_MEMORY = re.compile(
    rf"OutOfMemoryError|^MemoryError|DefaultCPUAllocator: can't allocate memory|^{KILLED_BY_KERNEL}"
)
# A GPU that has failed, and not the program on it. From NVIDIA's and PyTorch's texts; no such GPU was here.
DEVICE = re.compile(
    r"uncorrectable (?:ECC|NVLink) error|CUDA-capable device\(s\) is/are busy or unavailable"
    r"|no CUDA-capable device is detected|GPU is lost|fallen off the bus|nvidia-container-cli: ",
    re.IGNORECASE,
)
CANNOT_EVER_START = re.compile(
    r"^(?:ModuleNotFoundError|ImportError|SyntaxError|IndentationError|TabError)\b"
    # The interpreter's own words: `python nowhere.py`, `python -m nowhere`.
    r"|^\S*python[\w.]*: (?:can't open file '|can't find '__main__' module in '|No module named )"
    r"|^\S*python[\w.]*: Error while finding module specification for '"
    # runc's and crun's, in the container's log: an image for another architecture, or an entry point that is none.
    r"|^(?:exec \S{1,200}|[\w.: ]{0,60}exec user process caused): exec format error"
)
# The name of a backend that no PyTorch has, or not the one of the image: torch 2.4 to 2.13 and `init`.
NO_SUCH_BACKEND = re.compile(
    r"^[\w.]+: (?:Unknown (?:c10d )?backend|Invalid backend|Distributed package doesn't have \w+ built in"
    r"|.*is none of auto, nccl, gloo|.*no published wheel has it|.*is not in this PyTorch)"
)
ADDRESS_IN_USE = re.compile(r"EADDRINUSE|\[Errno 98\]|address already in use", re.IGNORECASE)
_PORT = re.compile(r"\bport[: ]+(\d{1,5})\b|\('[^']*', (\d{1,5})\)|:(\d{1,5})\b(?= .*in use)", re.IGNORECASE)
# The kubelet's and the node controller's words for a pod that it ended for the node's sake.
NODE_REASONS = frozenset(
    "Evicted NodeLost NodeShutdown Shutdown Terminated Preempting NodeAffinity UnexpectedAdmissionError "
    "SupervisorLost".split()
)
# The word for a pod whose own activeDeadlineSeconds, the template's, are over: the next pod meets them as well.
POD_DEADLINE = "DeadlineExceeded"
# What containerd and the kubelet write for a container that they have lost: its node was rebooted.
LOST_CONTAINER = frozenset(("Unknown", "ContainerStatusUnknown"))
START_REASONS = frozenset(("StartError", "ContainerCannotRun", "CreateContainerConfigError"))
_CLASS_OF: dict[Action, Class] = {"FailJob": "permanent", "Ignore": "infrastructure", "Count": "application"}
# A pod beyond its own limit of disk is evicted as well, and would be again on every node.
OWN_LIMIT = re.compile(r"exceeds the (?:total )?limit|exceeded its local ephemeral storage limit")


@dataclass(frozen=True)
class Evidence:
    """What is known of the end of one process or pod; all of it may be missing. `classify` goes by it."""

    exit_code: int | None = None
    """Of the culprit rank where it is known, else of the container; 128 + n where signal n ended it."""
    reason: str = ""
    """The kubelet's word for the container: OOMKilled, Error, StartError."""
    pod_reason: str = ""
    """The pod's own reason: Evicted."""
    pod_message: str = ""
    """The sentence with it."""
    disruption: str = ""
    """The reason of its condition DisruptionTarget: PreemptionByScheduler."""
    exception: str = ""
    """The exception's line."""
    deletion_requested: bool = False
    """Whether its deletion was requested before it ended."""
    vanished: bool = False
    """Whether its pod, or its node, is gone without a report."""
    stalled: bool = False
    """Whether it was stopped because it made no step."""


@dataclass(frozen=True)
class PolicyRule:
    """A rule of spec.failurePolicy."""

    action: Action
    codes: frozenset[int]
    inverted: bool = False
    """Whether it is for all codes but these (NotIn)."""

    def matches(self, exit_code: int | None) -> bool:
        """As in a Job's podFailurePolicy: 0 is never a failure's code."""
        return bool(exit_code) and (exit_code in self.codes) != self.inverted


@dataclass(frozen=True)
class Limits:
    """What the user allows."""

    backoff_limit: int = BACKOFF_LIMIT
    window_seconds: int | None = None
    """Only what was charged within it counts against backoff_limit."""


@dataclass(frozen=True)
class History:
    """What failures have cost so far; it grows with each."""

    application: int = 0
    infrastructure: int = 0
    stall: int = 0
    in_a_row: int = 0
    """Restarts without a new step since the last one: the back-off follows it."""
    charged_in_a_row: int = 0
    """Those of them that application or stall are charged for."""
    charged_at: tuple[dt.datetime, ...] = ()
    """When the application was charged, as far back as backoff_limit looks."""
    uncharged_in_a_row: int = 0
    """Restarts for the nodes' sake since the last new step: what is free has this bound, however long attempts run."""
    peers_lost: int = 0
    """Those of them for which only complaints about lost peers were found."""

    @property
    def total(self) -> int:
        """All restarts."""
        return self.application + self.infrastructure + self.stall


@dataclass(frozen=True)
class Attempt:
    """What the attempt that failed had done."""

    made_a_new_step: bool
    """Whether it went beyond the furthest step of all attempts before."""
    reports_steps: bool
    """Whether any attempt of the job ever reported a step."""
    ran_seconds: float
    """How long all its ranks ran together."""
    only_complaints: bool = False
    """Whether its ranks complained of lost peers, and nothing else was seen of a node, a pod or a connection."""


@dataclass(frozen=True)
class Verdict:
    """What follows from a failure."""

    restart: bool
    history: History
    """restart: with this failure in it; else as it was, for it counts restarts."""
    charged_to: Budget | None
    """None: no budget; it is permanent."""
    wait_seconds: int = 0
    """restart: before the next attempt starts."""
    stop: Stop = ""
    """not restart: why."""


def evidence(failure: Failure) -> Evidence:
    """What `classify` goes by, of a failure as its pod knows it."""
    f = failure
    return Evidence(exit_code=f.exit_code, exception=f.exception, vanished=f.vanished, stalled=f.stalled)


def classify(evidence: Evidence) -> Class:
    """The class of a failure that is not the mere symptom of another one.

    Kubernetes' and the kernel's own findings come first: a process that is ended from outside may say anything.
    """
    e = evidence
    if e.stalled:
        return "stall"
    if e.reason == "OOMKilled":
        return "outOfMemory"
    if e.pod_reason == POD_DEADLINE:
        return "application"
    if from_outside(e):
        return "infrastructure"
    if e.reason in START_REASONS or e.exit_code in CANNOT_RUN:
        return "infrastructure" if DEVICE.search(e.exception) else "permanent"
    if NO_SUCH_BACKEND.search(e.exception):
        return "permanent"
    if OUT_OF_MEMORY.search(e.exception):
        return "outOfMemory"
    if e.exit_code in (RESUMABLE_EXIT_CODE, 143) or DEVICE.search(e.exception):
        return "infrastructure"
    return "application"


def from_outside(e: Evidence) -> bool:
    """Whether it was ended by what is not in it: its node, an eviction, somebody's delete."""
    killed = e.disruption or e.deletion_requested or e.vanished or e.reason in LOST_CONTAINER
    return bool(killed) or _ended_by_its_node(e)


def is_of_node(pod_reason: str) -> bool:
    """Whether a pod's reason says that it was ended for the sake of its node."""
    return pod_reason in NODE_REASONS or pod_reason.startswith(("OutOf", "Outof"))


def is_symptom(exception: str) -> bool:
    """Whether an exception's line only says that a peer is gone. An address in use is none: no peer's end explains it,
    although torch raises the same class for both."""
    if ADDRESS_IN_USE.search(exception):
        return False
    return FROM_TORCH.match(exception) is not None and SYMPTOMS.search(exception) is not None


def cannot_start(reason: str, exit_code: int | None, exception: str) -> bool:
    """Whether none of the user's own code ran: the container, the program or a module is not there."""
    return reason in START_REASONS or exit_code in CANNOT_RUN or CANNOT_EVER_START.search(exception) is not None


def port_in_use(exception: str) -> int | None:
    """The port that an exception says is in use; 0 where it does not say which, None where it says no such thing."""
    if not ADDRESS_IN_USE.search(exception):
        return None
    found = _PORT.search(exception)
    return int(next(group for group in found.groups() if group)) if found else 0


def ended_early(step: int | None, peer: str, peers_step: int | None) -> str:
    """ended with exit code 0 after step 20 while rank 1 was in step 21: the ranks make different numbers of steps

    peer: that complained then. peers_step: the last that it had made, where that is known.
    """
    after = f" after step {step}" if step else ""
    known = peers_step is not None and peers_step >= (step or 1)
    where = f"was in step {peers_step + 1}" if known and peers_step is not None else "still waited for it"
    return f"ended with exit code 0{after} while {peer} {where}: the ranks make different numbers of steps"


def with_policy(
    found: Class, exit_code: int | None, rules: Sequence[PolicyRule], *, from_outside: bool = False
) -> Class:
    """The class after the user's rules; the first that matches decides. They speak of exit codes, and so of all that a
    process did by itself, also of what is free without them: an eviction stays one, and so does a stall."""
    if from_outside or found == "stall":
        return found
    rule = next((r for r in rules if r.matches(exit_code)), None)
    if rule is None:
        return found
    return _CLASS_OF[rule.action]


def of_complaints(found: Class, history: History, attempt: Attempt) -> Class:
    """The class of an attempt by what came before: complaints about lost peers alone are free once, until the job has
    made a new step. Uneven data, a collective that only some ranks call: the commonest mistakes end so, every time."""
    before = 0 if attempt.made_a_new_step else history.peers_lost
    if found == "infrastructure" and attempt.only_complaints and before >= PEERS_LOST_FREE:
        return "application"
    return found


def judge(found: Class, history: History, attempt: Attempt, limits: Limits, now: dt.datetime) -> Verdict:
    """Charge a failure, and say whether the group starts again."""
    if found == "permanent":
        return Verdict(False, history, None, stop="PermanentFailure")
    budget: Budget = "application" if found == "outOfMemory" else found
    after = charge(budget, history, attempt, limits, now)
    stop = _exhausted(budget, after, attempt, limits, now)
    if stop:
        return Verdict(False, history, budget, stop=stop)
    return Verdict(True, after, budget, wait_seconds=back_off_seconds(after.in_a_row))


def charge(budget: Budget, history: History, attempt: Attempt, limits: Limits, now: dt.datetime) -> History:
    """The history with one more failure."""
    forgiven = attempt.made_a_new_step or (not attempt.reports_steps and attempt.ran_seconds >= FORGIVEN_AFTER_SECONDS)
    charged = budget in ("application", "stall")
    counted = 0 if forgiven else history.charged_in_a_row + charged
    free = replace(history, uncharged_in_a_row=0, peers_lost=0) if attempt.made_a_new_step else history
    times = (*history.charged_at, now)[-limits.backoff_limit - 1 :] if budget == "application" else history.charged_at
    return replace(
        history,
        application=history.application + (budget == "application"),
        infrastructure=history.infrastructure + (budget == "infrastructure"),
        stall=history.stall + (budget == "stall"),
        in_a_row=1 if forgiven else history.in_a_row + 1,
        charged_in_a_row=counted,
        charged_at=times,
        uncharged_in_a_row=free.uncharged_in_a_row + (not charged),
        peers_lost=free.peers_lost + (not charged and attempt.only_complaints),
    )


def back_off_seconds(in_a_row: int) -> int:
    """0 for the first restart in a row, then 1, 2, 4 … 300."""
    return 0 if in_a_row <= 1 else min(2 ** min(in_a_row - 2, 20), BACK_OFF_SECONDS_MAX)


def counted(history: History, limits: Limits, now: dt.datetime) -> int:
    """The restarts that count against backoff_limit now."""
    if limits.window_seconds is None:
        return history.application
    since = now - dt.timedelta(seconds=limits.window_seconds)
    return sum(at > since for at in history.charged_at)


def _exhausted(budget: Budget, after: History, attempt: Attempt, limits: Limits, now: dt.datetime) -> Stop:
    if budget == "application" and counted(after, limits, now) > limits.backoff_limit:
        return "BackoffLimitExceeded"
    if budget == "stall" and after.stall > STALLS_MAX:
        return "TooManyStalls"
    if budget == "infrastructure" and after.uncharged_in_a_row > INFRASTRUCTURE_IN_A_ROW_MAX:
        return "TooManyInfrastructureFailures"
    if budget != "infrastructure" and attempt.reports_steps and after.charged_in_a_row >= NO_PROGRESS_MAX:
        return "NoProgress"
    return ""


def _ended_by_its_node(e: Evidence) -> bool:
    if OWN_LIMIT.search(e.pod_message):
        return False
    return is_of_node(e.pod_reason)
