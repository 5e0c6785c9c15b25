"""All reasons of status, conditions and events, and when each is used."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reason:
    """One word, and its sentence for the reference. warning: its event is a Warning."""

    name: str
    when: str
    warning: bool = False


def _warning(name: str, when: str) -> Reason:
    return Reason(name, when, warning=True)


INVALID_SPEC = _warning("InvalidSpec", "The spec cannot run; the message names the field and the fix.")
UNREADABLE_STATUS = _warning(
    "UnreadableStatus",
    "Condition and event only: the operator cannot read a field of the status, and does nothing for the job.",
)
NAME_TAKEN = _warning("NameTaken", "An object with a name that the job needs belongs to someone else.")
WAITING_FOR_DELETED_JOB = Reason("WaitingForDeletedJob", "Pods of a deleted job of the same name are still there.")
WAITING_FOR_OLD_PODS = Reason("WaitingForOldPods", "Pods of the attempt before must end before this one may start.")
START_BACK_OFF = _warning(
    "StartBackOff", "Not all nodes ran by startDeadlineSeconds; all were released, to try again later."
)
UNREADABLE = _warning("Unreadable", "Event only: an object of the job cannot be read; nothing is done until it can be.")
CREATING_PODS = Reason("CreatingPods", "The Service and the pods are being created.")
CREATE_REFUSED = _warning("CreateRefused", "The server refuses a pod or the Service: quota, PodSecurity, a typo.")
UNSCHEDULABLE = _warning("Unschedulable", "The scheduler finds no node for some pods; the message is its own.")
CANNOT_START = _warning("CannotStart", "The kubelet cannot start a trainer: an image, a mount or a configuration.")
WAITS_LONG = _warning(
    "WaitsLong", "What the job waits for has taken more than ten minutes; the message says what it is."
)
OTHERS_COMPLETED = _warning("OthersCompleted", "Some nodes completed more than ten minutes ago, and others still run.")
STARTING_TRAINERS = Reason("StartingTrainers", "All pods have a node; images are pulled and containers started.")
ALL_NODES_RUN = Reason("AllNodesRun", "The trainers of all nodes run.")
ENOUGH_NODES_RUN = Reason(
    "EnoughNodesRun", "At least minNodes trainers run; the message says what the others wait for."
)
RESCALED = Reason("Rescaled", "spec.nodes of an elastic job has changed; the group starts again with that many nodes.")
RANK_FAILED = _warning("RankFailed", "A trainer ended with an error, or its pod vanished.")
DISRUPTED = _warning("Disrupted", "A pod is being ended from outside: deleted, evicted, preempted, drained.")
NODE_LOST = _warning("NodeLost", "A node with a pod of the job is not ready for lostNodeSeconds.")
STALLED = _warning("Stalled", "A rank reports, and has made no step for too long.")
STALL_SUSPECTED = _warning("StallSuspected", "No step for unusually long; the job goes on.")
RESTARTING = Reason("Restarting", "The cause is settled and charged; the whole group starts again.")
REPLACING = Reason("Replacing", "The cause is settled and charged; only the lost pod is created again (ddprun).")
RESTARTED_IN_PLACE = _warning(
    "RestartedInPlace", "Event only: all ranks have started again in the pods that they had (ddprun)."
)
BACKOFF_LIMIT_EXCEEDED = _warning(
    "BackoffLimitExceeded", "One more restart would be beyond backoffLimit; lastFailure says why."
)
NO_PROGRESS = _warning("NoProgress", "Three charged restarts in a row brought no new step.")
PERMANENT_FAILURE = _warning(
    "PermanentFailure", "Another try cannot help: failurePolicy, 126/127, a module that is missing."
)
TOO_MANY_INFRASTRUCTURE_FAILURES = _warning(
    "TooManyInfrastructureFailures", "A hundred restarts in a row for the nodes' sake, without a new step."
)
TOO_MANY_STALLS = _warning("TooManyStalls", "More than ten restarts because no step was made.")
DEADLINE_EXCEEDED = _warning("DeadlineExceeded", "The job was not finished within activeDeadlineSeconds.")
SUSPENDING = Reason("Suspending", "spec.suspend is true, and pods of the job are still stopping.")
SUSPENDED = Reason("Suspended", "spec.suspend is true: all pods have ended, or were never started.")
ALL_NODES_COMPLETED = Reason("AllNodesCompleted", "The trainers of all nodes ended with 0.")
RESTART_POLICY_CHANGED = Reason(
    "RestartPolicyChanged", "Event only: the template's restartPolicy becomes Never, its trainer's is left out."
)
GRACE_RAISED = Reason("GraceRaised", "Event only: the template's terminationGracePeriodSeconds of 0 becomes 1.")
RENDEZVOUS_OVERRIDDEN = _warning(
    "RendezvousOverridden", "Event only: the template sets variables that the rendezvous needs."
)
LAUNCHER_OPTION = _warning("LauncherOption", "Event only: an option of the launcher has a consequence.")

ALL: dict[str, Reason] = {r.name: r for r in list(globals().values()) if isinstance(r, Reason)}


def named(name: str) -> Reason:
    """The reason with this name; a status of another version may have one that we do not know."""
    return ALL.get(name) or Reason(name, "")
