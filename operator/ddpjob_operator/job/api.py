"""The DDPJob resource: its fields, their defaults and their meaning.

This is the one source of the CRD (`crd.py` writes the docstring below each field into it), of the defaults and of
the reference in docs/. The types say what a value may be; rules between fields are in `validation.py`.
Field names follow batch/v1 Job and torchrun. Times are timezone-aware datetimes in UTC, durations whole seconds.
"""

from __future__ import annotations

import datetime as dt
from functools import cached_property
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from ddpjob_core import budget, failure_policy
from ddpjob_operator.job import bounds, ranges

GROUP = "training.ddpjob.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "DDPJob"
PLURAL = "ddpjobs"
SHORT = "ddp"
SET_BY_THE_SERVER = ("uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "selfLink")
"""Fields of metadata that `kubectl get -o yaml` prints and a new object must not have."""

# `<job>-<rank>` is the hostname of a pod, at most 63 characters, and a rank has at most 5 digits.
NAME_LENGTH_MAX = 57
NODES_MAX = bounds.NODES_MAX
# The job's name is also its Service's name, and a Service wants a DNS-1035 label: it starts with a letter.
NAME_PATTERN = "^[a-z]([-a-z0-9]*[a-z0-9])?$"

SECONDS_MAX = bounds.SECONDS_MAX
Seconds = Annotated[int, Meta(ge=1, le=SECONDS_MAX)]
SecondsOrZero = Annotated[int, Meta(ge=0, le=SECONDS_MAX)]
Count = Annotated[int, Meta(ge=0, le=bounds.COUNT_MAX)]
# A time without a zone could not be compared with other times.
Time = Annotated[dt.datetime, Meta(tz=True)]

# Texts of a status are limited, because a user may write a status by hand, and each plan reads all texts.
Text = Annotated[str, Meta(max_length=bounds.STATUS_TEXT_MAX)]
Ranges = Annotated[str, Meta(max_length=bounds.RANGES_LENGTH_MAX)]

State = Literal["Pending", "Starting", "Running", "Restarting", "Failing", "Suspended", "Succeeded", "Failed"]


class Spec(Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True, dict=True):
    """The desired state, written by the user."""

    nodes: Annotated[int, Meta(ge=1, le=NODES_MAX)] = 1
    """Pods of the job, one per node. Changes only while the job is suspended, or with minNodes set. The scale
    subresource sets it."""
    min_nodes: Annotated[int, Meta(ge=1, le=NODES_MAX)] | None = None
    """Elastic: trains with this many nodes to `nodes`, as torchrun's --nnodes=MIN:MAX. Needs torchrun in the command.
    `nodes` may then change while the job runs."""
    nproc_per_node: Annotated[int, Meta(ge=1, le=bounds.NPROC_MAX)] | Literal["auto"] = "auto"
    """Processes per node. auto: as the launcher in the command says, else a rank a GPU, else 1."""
    backend: Literal["auto", "nccl", "gloo", "mpi"] = "auto"
    """The torch.distributed backend for ddpjob.init(). auto: nccl with GPUs, else gloo. mpi is refused."""
    suspend: bool = False
    """true stops all pods gracefully, or keeps them from starting; false starts a new attempt."""
    backoff_limit: Count = budget.BACKOFF_LIMIT
    """Restarts charged to the application before the job fails; lost nodes and evictions are not charged."""
    backoff_window_seconds: Seconds | None = None
    """Only restarts within this window count against backoffLimit. Unset: all, as in a batch/v1 Job."""
    restart_grace_seconds: SecondsOrZero | None = None
    """How long the other ranks get to stop after one has failed: a pod at least 1. Unset: 10, or the pod's grace if
    less; 0.1 where ddprun restarts them in place."""
    active_deadline_seconds: Seconds | None = None
    """The job fails when it is not finished this long after it (last) started. Unset: no limit."""
    start_deadline_seconds: Seconds | None = None
    """All nodes must run by then, else all pods are released and tried again after 1 to 30 min. Unset: no limit."""
    ttl_seconds_after_finished: SecondsOrZero | None = None
    """The job and its pods are deleted this long after it finished. Unset: they stay."""
    clean_pod_policy: Literal["None", "Running", "All"] = "Running"
    """Which pods are deleted once the job has finished. Pods that ended stay for `kubectl logs` unless All."""
    one_pod_per_node: bool | Literal["auto"] = "auto"
    """At most one pod of this job on a node. auto: yes for jobs with GPUs."""
    dns: Literal["auto", "leader", "all"] = "auto"
    """Which pods have a DNS name JOB-N.JOB. leader: node 0, whose name all need. all: every node, for scripts that name
    others (MPI). auto: leader; all where torchrun numbers the nodes itself. Never changes."""
    failure_policy: FailurePolicy | None = None
    """What an exit code means, in the shape of batch/v1 Job's podFailurePolicy."""
    stall: Stall | None = None
    """When a job that reports, and makes no step, is restarted."""
    preflight: Literal["Never", "OnRestart", "Always"] = "OnRestart"
    """When ddprun first measures the nodes, to name a slow one. OnRestart: after two infrastructure failures."""
    gang: Literal["auto", "none", "native", "kueue"] = "auto"
    """All pods or none. native: a PodGroup of Kubernetes 1.36 or newer. kueue: a queue of Kueue, the one that the job's
    label kueue.x-k8s.io/queue-name names, else `default`. auto: kueue where the job has that label; native where the
    job has several nodes; each only where operator and API server have it. Another value counts from the next attempt
    on."""
    topology_key: Annotated[str, Meta(max_length=317)] = ""
    """A node label, such as topology.kubernetes.io/rack: all pods go where it has one value. Needs a gang."""
    managed_by: Annotated[str, Meta(max_length=63)] = ""
    """Another controller that runs this job (as in batch/v1 Job). Empty: this operator."""
    template: dict[str, Any] = field(default_factory=dict)
    """An ordinary PodTemplateSpec. The container named `trainer`, else the first, is the trainer."""


class FailurePolicy(Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True):
    """What an exit code means."""

    rules: list[FailureRule] = []
    """The first rule that matches decides."""


class FailureRule(Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True):
    """One rule of a failure policy."""

    action: failure_policy.Action = "Count"
    """FailJob: the job fails at once. Ignore: restart without a charge. Count: restart, charged to backoffLimit."""
    on_exit_codes: OnExitCodes
    """The exit codes that the rule is for: of the culprit rank where it is known, else of the container."""


class OnExitCodes(Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True):
    """A set of exit codes."""

    operator: Literal["In", "NotIn"] = "In"
    """In: one of the values. NotIn: none of them."""
    values: Annotated[list[Annotated[int, Meta(ge=1, le=255)]], Meta(min_length=1, max_length=255)]
    """Exit codes from 1 to 255."""


class Stall(Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True):
    """When a job that makes no step is restarted."""

    timeout_seconds: SecondsOrZero | None = None
    """Longest time without a step. Unset: learned from the job's own steps. 0: off."""


class Status(Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True, dict=True):
    """The observed state, written by the operator alone."""

    state: State | None = None
    """One word for people: Pending, Starting, Running, Restarting, Failing, Suspended, Succeeded or Failed."""
    reason: Text = ""
    """Why, as one CamelCase word; the reference lists them."""
    message: Annotated[str, Meta(max_length=4096)] = ""
    """Why, as a sentence: who, what, since when, and what happens next."""
    state_time: Time | None = None
    """Since when the state holds."""
    observed_generation: int | None = None
    """The metadata.generation that this status speaks of."""
    attempt: Count = 0
    """The number of the present set of pods; every restart, resume and retry of the start takes the next one."""
    attempt_time: Time | None = None
    """When the pods of this attempt were (or, in the future, will be) created."""
    running_time: Time | None = None
    """When the trainers of all nodes (of an elastic job, of minNodes) ran in this attempt for the first time."""
    first_step_time: Time | None = None
    """When this attempt reported its first step."""
    start_retries: Count = 0
    """How often in a row the pods were released because not all ran by startDeadlineSeconds."""
    starting_since: Time | None = None
    """Since when attempts follow each other without all pods having started: startDeadlineSeconds counts from here.
    Unset: from attemptTime."""
    unconfigured_since: Time | None = None
    """Since when a ConfigMap or Secret is missing."""
    restarts: Restarts | None = None
    """Restarts so far, by what they are charged to."""
    nodes: Nodes | None = None
    """How many nodes the job wants, and how many run now."""
    gang: Gang | None = None
    """Who admits all pods at once, and why; unset where the operator has no such API switched on."""
    attempt_nodes: Count | None = None
    """spec.nodes when this attempt began; only of an elastic job, whose spec.nodes may have changed since."""
    started_nodes: Ranges = ""
    """Node ranks whose trainer has run in this attempt, as ranges: 0-5,8."""
    replacements: Annotated[dict[str, Count], Meta(max_length=NODES_MAX)] = {}
    """How often the pod of a node was replaced alone in this attempt, by node rank; needs ddprun."""
    in_place: InPlace | None = None
    """What the agent of node 0 has restarted in place in this attempt, as far as `restarts` counts it."""
    completed_nodes: Ranges = ""
    """Node ranks whose trainer ended with 0 in this attempt, as ranges: 0-5,8."""
    selector: Text = ""
    """Label selector of the job's pods, for the scale subresource."""
    start_time: Time | None = None
    """When the job (last) started; unset while it is suspended."""
    completion_time: Time | None = None
    """When the job succeeded or failed and its last pod had ended."""
    master_addr: Text = ""
    """The address of the rendezvous, that of rank 0, as host:port."""
    progress: Progress | None = None
    """What the training reports."""
    resumed_step: Count | None = None
    """The step of the state from which the ranks that train now went on; unset where they have loaded none."""
    resumed_from: Annotated[str, Meta(max_length=bounds.SENTENCE_MAX)] = ""
    """Where that state was: a folder, or the memory of the nodes of which ranks."""
    not_kept: Annotated[str, Meta(max_length=bounds.ADVICE_MAX)] = ""
    """Why the state is not kept in memory, in which pods, and what to do; a restart goes on from the last save.
    Unset where it is kept, or where nobody has tried."""
    save_failed: Annotated[str, Meta(max_length=bounds.SENTENCE_MAX)] = ""
    """Why the last save of ddpjob.Snapshot failed; unset after one that succeeds."""
    furthest_step: Count | None = None
    """The furthest step of all ranks before those that train now; unset while none has reported a step."""
    last_failure: JobFailure | None = None
    """The root cause of the last failure."""
    failures: Annotated[list[FailureLine], Meta(max_length=bounds.STATUS_ITEMS_MAX)] = []
    """The last 10 failures, short, the newest last."""
    findings: Annotated[list[StoredFinding], Meta(max_length=bounds.FINDINGS_MAX)] = []
    """Facts that make a success suspicious."""
    avoided_nodes: Annotated[list[AvoidedNode], Meta(max_length=bounds.STATUS_ITEMS_MAX)] = []
    """Nodes that failed this job repeatedly, and that its next pods stay away from until a given time."""
    goodput: Goodput | None = None
    """Where the time went, up to stateTime."""
    display: Display | None = None
    """The texts that `kubectl get` shows."""
    conditions: Annotated[list[Condition], Meta(max_length=bounds.STATUS_ITEMS_MAX)] = []
    """Accepted, Running, Suspended, FailureTarget, Complete, Failed, as in batch/v1 Job; SaveFailed, Suspicious."""

    @cached_property
    def started(self) -> frozenset[int]:
        """startedNodes as a set."""
        return ranges.parse(self.started_nodes)

    @cached_property
    def completed(self) -> frozenset[int]:
        """completedNodes as a set."""
        return ranges.parse(self.completed_nodes)


class Gang(Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True):
    """Who admits all pods of an attempt at once."""

    kind: Literal["none", "native", "kueue"]
    """none: nobody, pods are placed one by one. native: the scheduler of Kubernetes, by a PodGroup.
    kueue: a queue, before a pod is made."""
    attempt: Count = 0
    """The attempt that it was chosen for."""
    why: Annotated[str, Meta(max_length=bounds.WHY_MAX)] = ""
    """Why it was chosen."""
    waiting_since: Time | None = None
    """Since when a queue has not admitted the job."""


class Restarts(Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True):
    """Restarts so far, by what they are charged to."""

    # With default_factory, msgspec also writes a value of 0, because people and printer columns read these four. Only
    # the operator reads the counters below, so they are left out while they are 0.

    application: Count = field(default_factory=int)
    """Charged to backoffLimit."""
    infrastructure: Count = field(default_factory=int)
    """Nodes, evictions, preemption: never charged to the application."""
    stall: Count = field(default_factory=int)
    """No step for too long."""
    total: Count = field(default_factory=int)
    """All of them."""
    in_a_row: Count = 0
    """Restarts without a new step since the last one: the back-off follows it."""
    charged_in_a_row: Count = 0
    """Those of them charged to application or stall: three stop a job that reports steps."""
    charged_at: Annotated[list[Time], Meta(max_length=bounds.STATUS_ITEMS_MAX)] = []
    """When the application was charged, where backoffWindowSeconds is set."""
    uncharged_in_a_row: Count = 0
    """Restarts charged to infrastructure since the last new step: a hundred stop the job."""
    peers_lost: Count = 0
    """Those of them for which only complaints about lost peers were found: the next one is the application's."""


class InPlace(Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True):
    """Restarts without new pods, as one agent counts them in its life."""

    replacement: Count = 0
    """Which pod of node 0 it runs in."""
    earlier: Count = 0
    """Restarts in place that were counted in this attempt by agents in earlier pods of node 0."""
    application: Count = 0
    """Charged to backoffLimit."""
    infrastructure: Count = 0
    """Lost connections between nodes."""
    stall: Count = 0
    """No step for too long."""


class Nodes(Struct, rename="camel", frozen=True, kw_only=True):
    """Nodes of the job."""

    total: Count = 0
    """Nodes that the job wants."""
    ready: Count = 0
    """Nodes whose trainer runs and is ready now."""


class Progress(Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True):
    """What the training reports, from rank 0."""

    step: Count
    """Optimizer steps done."""
    total_steps: Count | None = None
    """Optimizer steps of the whole training, where it is known."""
    percent: Annotated[int, Meta(ge=0, le=100)] | None = None
    """step of totalSteps."""
    eta_seconds: Count | None = None
    """How long it will take at the present pace."""
    samples_per_second: float | None = None
    """Samples of all ranks together."""
    world_size: Count | None = None
    """The number of ranks that the training itself sees; other than nodes x nprocPerNode, it did not form one group."""
    saved_step: Count | None = None
    """The step of the newest checkpoint of ddpjob.Snapshot: a restart goes on from it."""
    metrics: Annotated[dict[Text, Text], Meta(max_length=bounds.STATUS_ITEMS_MAX)] = {}
    """At most 16 values with a name, as text."""
    attempt: Count = 0
    """The attempt that reported."""
    generation: Count = 0
    """How often the ranks that reported had been restarted in their pods."""
    updated: Time
    """When the report arrived."""


class Evidence(Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True):
    """Why a failure is the root cause, and of its class: kept because its pod may be gone when that is asked again."""

    precedence: Annotated[str, Meta(max_length=16)]
    """Its precedence among possible causes, from KERNEL (an out-of-memory kill) to STOPPED (by the operator)."""
    raised: bool = False
    """True if a process raised the exception; false if it says why a container could not start."""
    container_reason: Annotated[str, Meta(max_length=128)] = ""
    """The container's reason in its status."""
    pod_reason: Annotated[str, Meta(max_length=128)] = ""
    """The pod's own reason."""
    pod_message: Annotated[str, Meta(max_length=300)] = ""
    """The sentence with it."""
    disruption: Annotated[str, Meta(max_length=128)] = ""
    """The reason of the pod's condition DisruptionTarget."""
    deletion_requested: bool = False
    """Whether somebody had asked for the pod's deletion before it ended."""
    vanished: bool = False
    """Whether its pod, or its node, is gone without a report."""
    stalled: bool = False
    """True if the rank was stopped because it made no step."""
    hidden: bool = False
    """True if the failed rank's container ended with 0."""
    silent_node: Annotated[str, Meta(max_length=128)] = ""
    """If ranks only complained about lost peers: a node of the attempt that had not reported for a while."""


class JobFailure(Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True):
    """The root cause of a failure: the earliest that is not a symptom of a lost peer."""

    attempt: Count
    """The attempt that failed."""
    rank: Count | None = None
    """The global rank, where it is known."""
    node_rank: Count
    """The node's rank in the job."""
    pod: Text = ""
    """The pod's name."""
    init_container: Text = ""
    """The init container that failed; the trainer never ran then."""
    node: Text = ""
    """The cluster node it ran on."""
    exit_code: int | None = None
    """The exit code of the culprit rank where it is known, else of the container."""
    signal: Text = ""
    """The signal's name where a signal ended it: SIGKILL."""
    reason: Text = ""
    """The kubelet's or the process's reason, one word: OOMKilled, Error, NodeLost, Stalled."""
    failure_class: Text = field(default="", name="class")
    """application, outOfMemory, infrastructure, stall or permanent; unset until all pods of the attempt have ended."""
    charged_to: Text = ""
    """The restart that paid for it: application, infrastructure or stall. Unset: none."""
    step: Count | None = None
    """The last step that the training had reported."""
    generation: Count | None = None
    """How often the ranks that it ended had been restarted in their pods, as far as was known when it was recorded."""
    exception: Text = ""
    """The exception's line, where the log has one."""
    where: Annotated[str, Meta(max_length=128)] = ""
    """The line of the script that raised it, where the log has its traceback: train.py:41."""
    log_tail: Annotated[str, Meta(max_length=2048)] = ""
    """The end of the log."""
    evidence: Evidence | None = None
    """What the operator has seen of it. Unset: its reason says all."""
    time: Time
    """When it happened."""


class FailureLine(Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True):
    """A failure in one line."""

    attempt: Count
    """The attempt that failed."""
    message: Annotated[str, Meta(max_length=300)]
    """Who and what."""
    reason: Text = ""
    """The kubelet's or the process's reason, as in lastFailure; unset for an init container."""
    failure_class: Text = field(default="", name="class")
    """What it was, as in lastFailure."""
    node: Text = ""
    """The cluster node."""
    time: Time
    """When."""


class StoredFinding(Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True):
    """A fact that is suspicious in a job that succeeded."""

    reason: Annotated[str, Meta(max_length=64)]
    """NoProcessGroup, ReplicasDiffer, FailureInLog."""
    message: Annotated[str, Meta(max_length=300)]
    """A sentence."""


class AvoidedNode(Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True):
    """A node that failed this job repeatedly."""

    node: Text
    """Its name."""
    until: Time
    """New pods may go there again."""
    message: Annotated[str, Meta(max_length=300)] = ""
    """Why."""
    lifted: bool = False
    """True if new pods may go there earlier, because they fit nowhere else."""


class Goodput(Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True):
    """Where the time went, up to stateTime; the state that holds now is not counted yet."""

    productive_seconds: Count = 0
    """All nodes ran and steps were made, or one was under way and took no longer than is expected."""
    idle_seconds: Count = 0
    """All nodes ran, and after the last step none came for longer than expected, or until ranks that had started again
    in place made one, or until a node was given up."""
    unreported_seconds: Count = 0
    """All nodes ran, and no step was ever reported: whether they trained is not known."""
    starting_seconds: Count = 0
    """Waiting for nodes, images, peers and the first step."""
    restarting_seconds: Count = 0
    """After a failure, until all nodes trained again."""
    lost_steps: Count = 0
    """Steps that had to be repeated after a restart: none where it went on from the state in memory."""
    ratio: float | None = None
    """productiveSeconds of all seconds; unset where no step was ever reported."""
    idle_since: Time | None = None
    """Since when no step is made, while that lasts."""
    counted_until: Time | None = None
    """Up to when the seconds are counted, where that is later than stateTime."""


class Display(Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True):
    """The texts that `kubectl get` shows; printer columns cannot join two fields."""

    nodes: Text = ""
    """2/2"""
    step: Text = ""
    """312/1125"""
    progress: Text = ""
    """28%"""
    eta: Text = ""
    """3h10m"""
    restarts: Text = ""
    """2 application, 1 infrastructure: what the restarts were charged to"""


class Condition(Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True):
    """metav1.Condition."""

    type: Text
    """Which one."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: Text
    """Why, as one CamelCase word."""
    message: Annotated[str, Meta(max_length=bounds.CONDITION_MAX)] = ""
    """Why, as a sentence. That of the state has status.message; Accepted, what is wrong with the spec."""
    last_transition_time: Time
    """Since when the status of this condition holds."""
    observed_generation: int | None = None
    """The metadata.generation that it speaks of."""


class Metadata(Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True):
    """The part of ObjectMeta that decisions read; the rest belongs to the API server."""

    name: str = ""
    namespace: str = "default"
    uid: str = ""
    generation: int | None = None
    resource_version: str = ""
    deletion_timestamp: Time | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class DDPJob(Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True):
    """A PyTorch DistributedDataParallel job."""

    api_version: str = API_VERSION
    kind: str = KIND
    metadata: Metadata = Metadata()
    spec: Spec = Spec()
    status: Status = Status()
