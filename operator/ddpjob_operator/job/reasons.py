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
    "Condition and event only: the operator cannot read a field of the status, and does nothing for the job.",
    "Run the newer operator, or fix the field: `kubectl edit ddp NAME --subresource=status`.",
)
ACCEPTED = Reason("Accepted", "Event only: the spec is valid, or the status can be read, and was not before.")
NAME_TAKEN = _warning(
    "NameTaken",
    "An object with a name that the job needs belongs to someone else.",
    "Delete or rename the object that the message names, or give the job another name.",
)
WAITING_FOR_DELETED_JOB = Reason(
    "WaitingForDeletedJob",
    "Pods of a deleted job of the same name are still there.",
    "Wait for their grace period. One that stays: `kubectl describe pod` shows its finalizers and its node.",
)
WAITING_FOR_OLD_PODS = Reason(
    "WaitingForOldPods",
    "Pods of the attempt before must end before this one may start.",
    "Wait for their grace period. One that stays: `kubectl describe pod` shows its finalizers and its node.",
)
START_BACK_OFF = _warning(
    "StartBackOff",
    "Not all nodes ran by startDeadlineSeconds; all were released, to try again later.",
    "Nothing, if the cluster is only full; the message says when the next try is. Else see `Unschedulable`.",
)
UNREADABLE = _warning(
    "Unreadable",
    "Event only: an object of the job cannot be read; nothing is done until it can be.",
    "Fix or delete the object that the message names.",
)
GANG_UNAVAILABLE = _warning(
    "GangUnavailable",
    "The job asks for a gang that this operator or this API server does not have.",
    "Do what the message says of the chart or of the API server, or set `spec.gang: none`.",
)
QUEUE_NOT_SERVED = _warning(
    "QueueNotServed",
    "Event only: the job names a queue of Kueue, and this operator asks none, so the pods start at once.",
    "Set `gang.kueue.enabled=true` in the chart and apply the job again, or remove the label.",
)
WAITING_FOR_ADMISSION = Reason(
    "WaitingForAdmission",
    "The queue has not admitted the job; no pod is made before that.",
    "Wait: the message has the queue's own sentence.",
)
WAITING_FOR_ROOM = _warning(
    "WaitingForRoom",
    "The operator has no room in its memory for one more job that has begun; no pod is made before that.",
    "Nothing: it begins when others end or are suspended. Smaller templates need less; a larger "
    "`resources.limits.memory` of the chart has more room.",
)
EVICTED = _warning(
    "Evicted",
    "The queue has taken its admission back; the pods stop as for a suspension, until it admits the job again.",
    "Nothing: no restart is charged.",
)
CREATING_PODS = Reason("CreatingPods", "The Service and the pods are being created.")
CREATE_REFUSED = _warning(
    "CreateRefused",
    "The server refuses a pod or the Service: quota, PodSecurity, a typo.",
    "Do what the server's sentence asks: raise the quota, change the template. It is tried again by itself.",
)
UNSCHEDULABLE = _warning(
    "Unschedulable",
    "The scheduler finds no node for some pods; the message is its own, with the number of pods where it differs.",
    "Free or add nodes, or request less. `kubectl describe pod` has the scheduler's count of nodes.",
)
AVOIDANCE_OVER = _warning(
    "AvoidanceOver",
    "Pods fit on no other node for a minute, or the time is over: they may go to the node that was avoided.",
    "Look at the node that the message names. If it is bad: `kubectl cordon` it, and add a node for the job.",
)
CANNOT_START = _warning(
    "CannotStart",
    "The kubelet cannot start a trainer: an image, a mount or a configuration.",
    "`kubectl describe pod` names the image, the volume or the ConfigMap. It is tried again by itself.",
)
WAITS_LONG = _warning(
    "WaitsLong",
    "What the job waits for has taken more than ten minutes; the message says what it is.",
    "Do what the message says of the pods and nodes that it names.",
)
OTHERS_COMPLETED = _warning(
    "OthersCompleted",
    "Some nodes completed more than ten minutes ago, and others still run.",
    "`kubectl logs` of the pods that still run: their ranks may wait in a collective for ranks that have ended.",
)
STARTING_TRAINERS = Reason("StartingTrainers", "All pods have a node; images are pulled and containers started.")
ALL_NODES_RUN = Reason("AllNodesRun", "The trainers of all nodes are running.")
ENOUGH_NODES_RUN = Reason(
    "EnoughNodesRun",
    "At least minNodes trainers are running; the message says what the others wait for.",
    "Nothing: a node that comes later joins. To free what the others ask for: `kubectl scale ddp NAME --replicas N`.",
)
RESCALED = Reason("Rescaled", "spec.nodes of an elastic job has changed; the group starts again with that many nodes.")
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
    "A node with a pod of the job is not ready, or its Node object is gone, for lostNodeSeconds.",
    "Nothing: the restart is not charged to backoffLimit. The node itself wants a look.",
)
STALLED = _warning(
    "Stalled",
    "A rank reports, and has made no step for too long.",
    "Look for the line where the rank stands still: `kubectl logs` of the pod that the message names.",
)
STALL_SUSPECTED = _warning(
    "StallSuspected",
    "No step for unusually long; the job goes on.",
    "Nothing, if a step may take so long: declare it with `ddpjob.pause`, or raise `stall.timeoutSeconds`.",
)
RESTARTING = Reason("Restarting", "The cause is settled and charged; the whole group starts again.")
REPLACING = Reason("Replacing", "The cause is settled and charged; only the lost pod is created again (ddprun).")
RESTARTED_IN_PLACE = _warning(
    "RestartedInPlace",
    "Event only: all ranks were restarted in their pods (ddprun).",
    "Read the cause in the message. Training has gone on.",
)
BACKOFF_LIMIT_EXCEEDED = _warning(
    "BackoffLimitExceeded",
    "One more restart would be beyond backoffLimit; lastFailure says why.",
    "Fix the cause in `status.lastFailure`, then delete the job and apply it again.",
)
NO_PROGRESS = _warning(
    "NoProgress",
    "Three charged restarts in a row brought no new step.",
    "Fix the cause in `status.lastFailure`: it comes back before the first new step.",
)
PERMANENT_FAILURE = _warning(
    "PermanentFailure",
    "Another try cannot help: failurePolicy, 126/127, a module that is missing.",
    "Fix command, image or script, then delete the job and apply it again.",
)
TOO_MANY_INFRASTRUCTURE_FAILURES = _warning(
    "TooManyInfrastructureFailures",
    "A hundred restarts in a row for the nodes' sake, without a new step.",
    "Look at the nodes in `status.failures`: jobs do not survive on them.",
)
TOO_MANY_STALLS = _warning(
    "TooManyStalls",
    "More than ten restarts because no step was made.",
    "Look for the line where ranks stand still; `ddprun` writes their stacks to the log.",
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
    "Event only: the template's restartPolicy becomes Never, its trainer's is left out.",
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
    "Event: the launcher, or an option of it, matters. Condition Suspicious: each node trained alone, or none.",
    "Read the message; it names it, and what to write in its place.",
)

EXIT_CODE_LOST = _warning(
    "ExitCodeLost",
    "Event: the shell of the command ends with 0 although its launcher fails, as in a pipe to tee. In a local run also "
    "a condition Suspicious: the log has a traceback, or the command ended before its launcher.",
    "Do what the message says of the command.",
)

DEVICES_NOT_COUNTED = _warning(
    "DevicesNotCounted",
    "Event only: the template claims devices (resourceClaims), of which the job does not know whether they are GPUs.",
    "Set the fields that the message names.",
)

NO_PROCESS_GROUP = _warning(
    "NoProcessGroup",
    "Condition Suspicious and event: several ranks ended with 0, and none has formed a process group.",
    "Each rank has trained alone: call `init_process_group`, or give the script the option with which it does.",
)
REPLICAS_DIFFER = _warning(
    "ReplicasDiffer",
    "Condition Suspicious and event: the parameters of a DDP module were not the same on all ranks at the end.",
    "Find what changes parameters without DDP: an optimizer step or a load on some ranks, a backward in `no_sync`.",
)
FAILURE_IN_LOG = _warning(
    "FailureInLog",
    "Condition Suspicious and event, of local runs; in a cluster a line of `submit --follow`, `wait` and `describe`: "
    "the log ends with the failure of a rank, or shows that of a thread or process, and the exit code is 0. Under "
    "ddprun also: a rank has left an exception by `sys.exit(0)`.",
    "See [When the exit code is lost](failures.md#when-the-exit-code-is-lost). With ddprun it would be certain.",
)

NOT_KEPT_IN_MEMORY = Reason(
    "NotKeptInMemory",
    "Event only: the state is not kept in memory, so restarts go on from the last save.",
    "Read the message; where the memory limit is too small, it says which field to raise and to what.",
)

SAVE_FAILED = _warning(
    "SaveFailed",
    "Event and condition only: a checkpoint could not be written. The training goes on, and the next save tries again. "
    "With the condition Suspicious: the job has succeeded, and its last state is not in the folder.",
    "Read the message: make room, or make the folder writable, before the job ends; a job whose last state is not in "
    "its folder fails.",
)

ALL: dict[str, Reason] = {r.name: r for r in list(globals().values()) if isinstance(r, Reason)}


def named(name: str) -> Reason:
    """Return the reason with this name; a new one if another version wrote it."""
    return ALL.get(name) or Reason(name, "")
