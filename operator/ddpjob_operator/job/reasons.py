"""All reasons of status, conditions and events, and when each is used."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reason:
    """One word, the situation in which a user meets it, and advice ("" for none). warning: the Event is a Warning."""

    name: str
    when: str
    todo: str = ""
    warning: bool = False


def _warning(name: str, when: str, todo: str) -> Reason:
    return Reason(name, when, todo, warning=True)


INVALID_SPEC = _warning(
    "InvalidSpec",
    "The spec cannot run; the message names the field and the fix.",
    "Change the field that the message names: `kubectl edit ddp NAME`, or apply the corrected file.",
)
UNREADABLE_STATUS = _warning(
    "UnreadableStatus",
    "Condition and event only: the operator cannot read a field of the status, so it does nothing for the job.",
    "Run the operator version that wrote it, or fix the field: `kubectl edit ddp NAME --subresource=status`.",
)
ACCEPTED = Reason("Accepted", "Event only: the spec is valid now, or the status is readable now.")
NAME_TAKEN = _warning(
    "NameTaken",
    "An object of another owner has a name that the job needs.",
    "Delete or rename the object that the message names, or give the job another name.",
)
WAITING_FOR_DELETED_JOB = Reason(
    "WaitingForDeletedJob",
    "Pods of a deleted job of the same name still exist.",
    "Wait for their grace period. If a pod stays: `kubectl describe pod` shows its finalizers and its node.",
)
WAITING_FOR_OLD_PODS = Reason(
    "WaitingForOldPods",
    "Pods of the previous attempt must end before this one starts.",
    "Wait for their grace period. If a pod stays: `kubectl describe pod` shows its finalizers and its node.",
)
START_BACK_OFF = _warning(
    "StartBackOff",
    "Not all nodes ran within startDeadlineSeconds; all pods were deleted, and are created again later.",
    "Nothing, if the cluster is only full: the message has the time of the next try. Otherwise see `Unschedulable`.",
)
UNREADABLE = _warning(
    "Unreadable",
    "Event only: an object of the job cannot be read; until it can, the operator does nothing for the job.",
    "Fix or delete the object that the message names.",
)
GANG_UNAVAILABLE = _warning(
    "GangUnavailable",
    "The job needs a kind of gang that this operator or this API server does not support.",
    "Change the chart or the API server as the message says, or set `spec.gang: none`.",
)
QUEUE_NOT_SERVED = _warning(
    "QueueNotServed",
    "Event only: the job names a queue of Kueue, but this operator does not use Kueue, so the pods start at once.",
    "Set `gang.kueue.enabled=true` in the chart and apply the job again, or remove the label.",
)
WAITING_FOR_ADMISSION = Reason(
    "WaitingForAdmission",
    "The queue has not admitted the job yet; pods are created after that.",
    "Wait: the message has the queue's own reason.",
)
WAITING_FOR_ROOM = _warning(
    "WaitingForRoom",
    "The operator has no memory for one more started job, so it creates no pods yet.",
    "Nothing: the job starts when others end or are suspended. To start more jobs: use smaller templates, or raise "
    "`resources.limits.memory` of the chart.",
)
EVICTED = _warning(
    "Evicted",
    "The queue withdrew its admission; the pods stop as for a suspension, until it admits the job again.",
    "Nothing: no restart is charged.",
)
CREATING_PODS = Reason("CreatingPods", "The Service and the pods are being created.")
CREATE_REFUSED = _warning(
    "CreateRefused",
    "The API server refuses a pod or the Service: quota, PodSecurity, a typo.",
    "Fix what the API server's message names, such as the quota or the template. The operator retries by itself.",
)
UNSCHEDULABLE = _warning(
    "Unschedulable",
    "The scheduler finds no node for some pods; the message is the scheduler's own.",
    "Free or add nodes, or request less. `kubectl describe pod` shows the scheduler's count of nodes.",
)
AVOIDANCE_OVER = _warning(
    "AvoidanceOver",
    "Pods may go to an avoided node again: for a minute they fit on no other node, or the time is over.",
    "Check the node that the message names. If it is bad: `kubectl cordon` it, and add a node for the job.",
)
CANNOT_START = _warning(
    "CannotStart",
    "The kubelet cannot start a trainer, because of its image, a mount or a ConfigMap.",
    "Fix the image, volume or ConfigMap that `kubectl describe pod` names. The kubelet retries by itself.",
)
WAITS_LONG = _warning(
    "WaitsLong",
    "The job has waited more than ten minutes; the message says for what.",
    "Check the pods and nodes that the message names, as it says.",
)
OTHERS_COMPLETED = _warning(
    "OthersCompleted",
    "Some nodes completed more than ten minutes ago, and others are still running.",
    "Read `kubectl logs` of the pods that are running: their ranks may wait in a collective for ranks that have ended.",
)
STARTING_TRAINERS = Reason("StartingTrainers", "All pods have a node; images are being pulled and containers started.")
ALL_NODES_RUN = Reason("AllNodesRun", "The trainers of all nodes are running.")
ENOUGH_NODES_RUN = Reason(
    "EnoughNodesRun",
    "At least minNodes trainers are running; the message says what the others wait for.",
    "Nothing: nodes that start later join. To stop waiting for them: `kubectl scale ddp NAME --replicas N`.",
)
RESCALED = Reason(
    "Rescaled",
    "spec.nodes of an elastic job has changed: under torchrun all nodes start again, under ddprun the others go on.",
)
RANK_FAILED = _warning(
    "RankFailed",
    "A trainer ended with an error, or its pod vanished.",
    "Read the message: it names rank, pod and cause. The group restarts by itself.",
)
DISRUPTED = _warning(
    "Disrupted",
    "A pod is being ended from outside: deleted, evicted, preempted, drained.",
    "Nothing: the restart is not charged to backoffLimit.",
)
NODE_LOST = _warning(
    "NodeLost",
    "A node with a pod of the job has been not ready, or without a Node object, for lostNodeSeconds.",
    "Nothing for the job: the restart is not charged to backoffLimit. Check the node.",
)
STALLED = _warning(
    "Stalled",
    "A rank reports, but has made no step for too long.",
    "Find the line where the rank hangs: `kubectl logs` of the pod that the message names.",
)
STALL_SUSPECTED = _warning(
    "StallSuspected",
    "No step was made for unusually long; the job continues.",
    "If a step may take that long: declare it with `ddpjob.pause`, or raise `stall.timeoutSeconds`.",
)
RESTARTING = Reason("Restarting", "The cause is known, and the restart charged; all pods are created again.")
REPLACING = Reason("Replacing", "The cause is known, and the restart charged; lost pods are created again (ddprun).")
RESTARTED_IN_PLACE = _warning(
    "RestartedInPlace",
    "Event only: all ranks were restarted in their pods (ddprun).",
    "Read the cause in the message. Training continues.",
)
BACKOFF_LIMIT_EXCEEDED = _warning(
    "BackoffLimitExceeded",
    "One more restart would exceed backoffLimit; lastFailure has the cause.",
    "Fix the cause in `status.lastFailure`, then delete the job and apply it again.",
)
NO_PROGRESS = _warning(
    "NoProgress",
    "Three charged restarts in a row made no new step.",
    "Fix the cause in `status.lastFailure`: it recurs before the first new step.",
)
PERMANENT_FAILURE = _warning(
    "PermanentFailure",
    "A retry cannot succeed: failurePolicy says FailJob, exit code 126 or 127, a missing module.",
    "Fix command, image or script, then delete the job and apply it again.",
)
TOO_MANY_INFRASTRUCTURE_FAILURES = _warning(
    "TooManyInfrastructureFailures",
    "A hundred restarts in a row because of nodes, without a new step.",
    "Check the nodes in `status.failures`: jobs fail on them.",
)
TOO_MANY_STALLS = _warning(
    "TooManyStalls",
    "More than ten restarts because no step was made.",
    "Find the line where ranks hang: `ddprun` writes their stacks to the log.",
)
DEADLINE_EXCEEDED = _warning(
    "DeadlineExceeded",
    "The job was not finished within activeDeadlineSeconds.",
    "Read the log of the pod in `status.lastFailure`. If it was still training, raise `activeDeadlineSeconds`.",
)
SUSPENDING = Reason("Suspending", "spec.suspend is true, and pods of the job are still stopping.")
SUSPENDED = Reason(
    "Suspended",
    "spec.suspend is true: all pods have ended, or were never started.",
    "Set `spec.suspend` to false to go on.",
)
ALL_NODES_COMPLETED = Reason("AllNodesCompleted", "The trainers of all nodes ended with 0.")
RESTART_POLICY_CHANGED = Reason(
    "RestartPolicyChanged",
    "Event only: the template's restartPolicy becomes Never, and that of its trainer container is removed.",
    "Leave `restartPolicy` out of the template.",
)
GRACE_RAISED = Reason(
    "GraceRaised",
    "Event only: the template's terminationGracePeriodSeconds of 0 becomes 1.",
    "Set `terminationGracePeriodSeconds` to at least 1.",
)
RENDEZVOUS_OVERRIDDEN = _warning(
    "RendezvousOverridden",
    "Event only: the template sets variables that the rendezvous needs.",
    "Remove these variables from the template, unless the script needs other values than the job's.",
)
LAUNCHER_OPTION = _warning(
    "LauncherOption",
    "Event: the launcher or one of its options has a side effect. Condition Suspicious: each node trained alone, or "
    "none trained.",
    "Replace the launcher or option as the message says.",
)

EXIT_CODE_LOST = _warning(
    "ExitCodeLost",
    "Event: the command's shell exits with 0 although its launcher fails, as in a pipe to tee. Condition Suspicious, "
    "in local runs only: the log has a traceback, or the command ended before its launcher.",
    "Change the command as the message says.",
)

DEVICES_NOT_COUNTED = _warning(
    "DevicesNotCounted",
    "Event only: the template claims devices (resourceClaims), and the operator cannot know if they are GPUs.",
    "Set the fields that the message names.",
)

NO_PROCESS_GROUP = _warning(
    "NoProcessGroup",
    "Condition Suspicious and event: several ranks exited with 0, but none formed a process group.",
    "Each rank trained alone: call `init_process_group`, or pass the option with which the script does.",
)
REPLICAS_DIFFER = _warning(
    "ReplicasDiffer",
    "Condition Suspicious and event: the parameters of a DDP module were not the same on all ranks at the end.",
    "Find what changes parameters without DDP: an optimizer step or a load on some ranks, a backward in `no_sync`.",
)
FAILURE_IN_LOG = _warning(
    "FailureInLog",
    "The exit code is 0, but the log ends with the failure of a rank, or shows that of a thread or process. Condition "
    "Suspicious and event in local runs; in a cluster a line of `submit --follow`, `wait` and `describe`. Under ddprun "
    "also if a rank left an exception by `sys.exit(0)`.",
    "See [When the exit code is lost](failures.md#when-the-exit-code-is-lost).",
)

NOT_KEPT_IN_MEMORY = Reason(
    "NotKeptInMemory",
    "Event only: the state is not kept in memory, so restarts go on from the last save.",
    "Read the message. If the memory limit is too small, it names the field and the value to set.",
)

SAVE_FAILED = _warning(
    "SaveFailed",
    "Event and condition only: a checkpoint could not be written. Training continues, and the next save tries again. "
    "With the condition Suspicious: the job succeeded, but its last state is not in the folder.",
    "Before the job ends, free disk space or make the folder writable, as the message says. Otherwise the job fails at "
    "its end, because its last state is not in the folder.",
)

ALL: dict[str, Reason] = {r.name: r for r in list(globals().values()) if isinstance(r, Reason)}


def named(name: str) -> Reason:
    """Return the reason with this name; a new one if another version wrote it."""
    return ALL.get(name) or Reason(name, "")
