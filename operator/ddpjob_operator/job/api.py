"""The DDPJob resource: its fields, their defaults and their meaning.

This is the one source of the CRD (`crd.py` writes the docstring below each field into it), of the defaults and of
the reference in docs/. The types say what a value may be; rules between fields are in `validation.py`.
Field names follow batch/v1 Job and torchrun. Times are timezone-aware datetimes in UTC, durations whole seconds.
"""

from __future__ import annotations

import datetime as dt
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from ddpjob_core import budget, failure_policy
from ddpjob_core.members import Members
from ddpjob_operator.job import bounds, ranges
from ddpjob_operator.job.facts import JobFacts

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
# Bounded, because a plan walks through as many nodes as a status names.
NodeCount = Annotated[int, Meta(ge=0, le=NODES_MAX)]
# A time without a zone could not be compared with other times.
Time = Annotated[dt.datetime, Meta(tz=True)]

# Texts of a status are limited, because a user may write a status by hand, and each plan reads all texts.
Text = Annotated[str, Meta(max_length=bounds.STATUS_TEXT_MAX)]
Ranges = Annotated[str, Meta(max_length=bounds.RANGES_LENGTH_MAX)]

State = Literal["Pending", "Starting", "Running", "Restarting", "Failing", "Suspended", "Succeeded", "Failed"]


class Spec(Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True, dict=True):
    """The desired state, written by the user."""

    nodes: Annotated[int, Meta(ge=1, le=NODES_MAX)] = 1
    """Number of nodes, one pod each. Changes only while the job is suspended, or if minNodes is set. The scale
    subresource sets it."""
    min_nodes: Annotated[int, Meta(ge=1, le=NODES_MAX)] | None = None
    """Makes the job elastic: it trains with minNodes to `nodes` nodes, and `nodes` may change while it runs. Needs
    ddprun or torchrun in the command."""
    spares: Annotated[int, Meta(ge=0, le=NODES_MAX)] = 0
    """More pods, which wait: one takes a lost node's place at once. Needs ddprun."""
    nproc_per_node: Annotated[int, Meta(ge=1, le=bounds.NPROC_MAX)] | Literal["auto"] = "auto"
    """Processes per node. auto: the launcher's number in the command, else one per GPU, else 1."""
    backend: Literal["auto", "nccl", "gloo", "mpi"] = "auto"
    """The torch.distributed backend for ddpjob.init(). auto: nccl with GPUs, else gloo. mpi is refused."""
    suspend: bool = False
    """true stops all pods gracefully and creates none; false starts a new attempt."""
    backoff_limit: Count = budget.BACKOFF_LIMIT
    """Restarts charged to the application before the job fails; lost nodes and evictions are not charged."""
    backoff_window_seconds: Seconds | None = None
    """Only restarts within this window count against backoffLimit. Unset: all, as in a batch/v1 Job."""
    restart_grace_seconds: SecondsOrZero | None = None
    """Time for the other ranks to stop after one has failed; at least 1 for a pod. Unset: 10, or the pod's grace period
    if shorter; 0.1 if ddprun restarts in place."""
    active_deadline_seconds: Seconds | None = None
    """The job fails if it is not finished this long after it (last) started. Unset: no limit."""
    start_deadline_seconds: Seconds | None = None
    """If not all nodes run within this time, all pods are deleted, and made again after 1 to 30 min. Unset: no
    limit."""
    ttl_seconds_after_finished: SecondsOrZero | None = None
    """The job and its pods are deleted this long after it finished. Unset: they stay."""
    clean_pod_policy: Literal["None", "Running", "All"] = "Running"
    """Which pods are deleted once the job has finished. Pods that ended stay for `kubectl logs` unless All."""
    one_pod_per_node: bool | Literal["auto"] = "auto"
    """At most one pod of this job on a node. auto: yes for jobs with GPUs."""
    dns: Literal["auto", "leader", "all"] = "auto"
    """Which pods have a DNS name JOB-N.JOB. leader: node 0, to which all connect. all: every node, for scripts that use
    other names (MPI). auto: leader, or all if torchrun numbers the nodes itself. Cannot be changed."""
    failure_policy: FailurePolicy | None = None
    """Meaning of exit codes, in the form of batch/v1 Job's podFailurePolicy."""
    stall: Stall | None = None
    """When a job that reports, but makes no step, is restarted."""
    preflight: Literal["Never", "OnRestart", "Always"] = "OnRestart"
    """When ddprun measures the nodes before a start, to find a slow one. OnRestart: after two infrastructure
    failures."""
    gang: Literal["auto", "none", "native", "kueue"] = "auto"
    """Starts all pods or none. native: with a PodGroup of Kubernetes 1.36 or newer. kueue: with the Kueue queue in the
    label kueue.x-k8s.io/queue-name, else `default`. auto: kueue with that label, else native with several
    nodes; only if operator and API server support it. A change takes effect at the next attempt."""
    topology_key: Annotated[str, Meta(max_length=317)] = ""
    """A node label, such as topology.kubernetes.io/rack: all pods go to nodes with the same value. Needs a gang."""
    managed_by: Annotated[str, Meta(max_length=63)] = ""
    """Another controller that runs this job (as in batch/v1 Job). Empty: this operator."""
    template: dict[str, Any] = field(default_factory=dict)
    """An ordinary PodTemplateSpec. The container named `trainer`, else the first, is the trainer."""

    @cached_property
    def facts(self) -> JobFacts:
        """Facts that follow from this spec for any number of nodes."""
        return JobFacts(
            self.template,
            min_nodes=self.nodes if self.spares and self.min_nodes is None else self.min_nodes,
            nproc_per_node=self.nproc_per_node,
            backend=self.backend,
            dns=self.dns,
        )

    @property
    def members(self) -> Members:
        """The places of the job (the numbers in its pods' names), in order. Only `Members` translates between places
        (pods, startedNodes, completedNodes and replacements in a status) and node ranks (reports, failures)."""
        return _members(self.pods)

    @property
    def pods(self) -> int:
        """Number of pods: the nodes and the spares."""
        return self.nodes + self.spares

    @property
    def world_size(self) -> int:
        return self.nodes * self.facts.nproc_per_node

    def rank_of_place(self, place: int) -> int | None:
        """Return the rank of a pod's only process; None if the pod has several processes or the rank is unknown."""
        is_known = self.facts.nproc_per_node == 1 and self.facts.ranks_follow_nodes
        return self.members.node_rank(place) if is_known else None

    @property
    def grace_after_failure(self) -> int:
        """Seconds for pods to stop after a failure: few, because a broken group cannot save together."""
        unset = min(10, self.facts.grace_seconds)
        return max(1, unset if self.restart_grace_seconds is None else self.restart_grace_seconds)

    def with_nodes(self, nodes: int) -> Spec:
        """Return the spec with another number of nodes; its command is not read again."""
        if nodes == self.nodes:
            return self
        changed = replace(self, nodes=nodes)
        changed.__dict__["facts"] = self.facts
        return changed


@lru_cache(maxsize=16)
def _members(nodes: int) -> Members:
    # Members are not cached in the spec: the operator keeps the specs of all jobs, and a job may have 99,999 nodes.
    return Members(range(nodes))


class FailurePolicy(Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True):
    """Rules that give exit codes of a rank a meaning."""

    rules: list[FailureRule] = []
    """The first rule that matches decides."""


class FailureRule(Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True):
    """One rule of a failure policy."""

    action: failure_policy.Action = "Count"
    """FailJob: the job fails at once. Ignore: restart without a charge. Count: restart, charged to backoffLimit."""
    on_exit_codes: OnExitCodes
    """Exit codes that the rule matches: of the rank that failed first if known, else of the container."""


class OnExitCodes(Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True):
    """A set of exit codes."""

    operator: Literal["In", "NotIn"] = "In"
    """In: one of the values. NotIn: none of them."""
    values: Annotated[list[Annotated[int, Meta(ge=1, le=255)]], Meta(min_length=1, max_length=255)]
    """Exit codes from 1 to 255."""


class Stall(Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True):
    """The time limit after which a job that makes no step is restarted."""

    timeout_seconds: SecondsOrZero | None = None
    """Longest time without a step. Unset: learned from the job's own steps. 0: off."""


class Status(Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True, dict=True):
    """The observed state, written by the operator alone."""

    state: State | None = None
    """In one word."""
    reason: Text = ""
    """Why, as one CamelCase word; docs/messages.md lists them."""
    message: Annotated[str, Meta(max_length=4096)] = ""
    """Why, as a sentence: who, what, since when, and what happens next."""
    state_time: Time | None = None
    """When the job entered this state."""
    observed_generation: int | None = None
    """The metadata.generation that this status is about."""
    attempt: Count = 0
    """Number of the current set of pods; each restart, resume and retry takes the next one."""
    attempt_time: Time | None = None
    """When the pods of this attempt were created; if in the future, when they will be."""
    running_time: Time | None = None
    """When the trainers of all nodes (elastic: minNodes) first ran in this attempt."""
    first_step_time: Time | None = None
    """When this attempt reported its first step."""
    start_retries: Count = 0
    """How often in a row startDeadlineSeconds passed."""
    starting_since: Time | None = None
    """Since when startDeadlineSeconds counts, if not since attemptTime."""
    unconfigured_since: Time | None = None
    """When a ConfigMap or Secret was first missing."""
    restarts: Restarts | None = None
    """Restarts so far, by what they are charged to."""
    nodes: Nodes | None = None
    """Nodes that the job wants, and that run now."""
    gang: Gang | None = None
    """API that admits all pods at once, and why; unset if the operator has no such API enabled."""
    attempt_nodes: NodeCount | None = None
    """spec.nodes of this attempt of an elastic job."""
    started_nodes: Ranges = ""
    """Node ranks whose trainer has run in this attempt, as ranges: 0-5,8."""
    replacements: Annotated[dict[str, Count], Meta(max_length=NODES_MAX)] = {}
    """Replacements of single pods in this attempt (with ddprun), by node rank."""
    in_place: InPlace | None = None
    """Restarts in place in this attempt, as reported by node 0's agent; `restarts` includes them."""
    leader: JobLeader | None = None
    """Who leads an elastic ddprun job; unset if its agents do not ask."""
    completed_nodes: Ranges = ""
    """Node ranks whose trainer ended with 0 in this attempt, as ranges: 0-5,8."""
    selector: Text = ""
    """Label selector of the job's pods, for the scale subresource."""
    start_time: Time | None = None
    """When the job (last) started; unset while it is suspended."""
    completion_time: Time | None = None
    """When the last pod of a job that succeeded or failed had ended."""
    master_addr: Text = ""
    """Address of the rendezvous, on the node of rank 0, as host:port."""
    progress: Progress | None = None
    """Progress reported by rank 0."""
    resumed_step: Count | None = None
    """Step of the state that the present ranks loaded, if any."""
    resumed_from: Annotated[str, Meta(max_length=bounds.SENTENCE_MAX)] = ""
    """Source of that state: a folder, or the memory of named nodes."""
    not_kept: Annotated[str, Meta(max_length=bounds.ADVICE_MAX)] = ""
    """Why the state is not kept in memory, in which pods, and what to do. Unset if it is kept, or if no rank has
    tried."""
    save_failed: Annotated[str, Meta(max_length=bounds.SENTENCE_MAX)] = ""
    """Why the last save of ddpjob.Snapshot failed; unset after one that succeeds."""
    furthest_step: Count | None = None
    """Furthest step reported before the last restart."""
    last_failure: JobFailure | None = None
    """The root cause of the last failure."""
    failures: Annotated[list[FailureLine], Meta(max_length=bounds.STATUS_ITEMS_MAX)] = []
    """The last 10 failures in short, the newest last."""
    findings: Annotated[list[StoredFinding], Meta(max_length=bounds.FINDINGS_MAX)] = []
    """Facts that make a success suspicious."""
    avoided_nodes: Annotated[list[AvoidedNode], Meta(max_length=bounds.STATUS_ITEMS_MAX)] = []
    """Nodes on which this job failed repeatedly; its new pods avoid them for a time."""
    goodput: Goodput | None = None
    """What the time was spent on, up to stateTime."""
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

    @property
    def is_begun(self) -> bool:
        """True if the job has an attempt, and is not suspended."""
        return self.attempt > 0 and self.state != "Suspended"

    @property
    def attempt_progress(self) -> Progress | None:
        """The progress if it is of the current attempt, else None."""
        return self.progress if self.progress is not None and self.progress.attempt == self.attempt else None

    @property
    def furthest(self) -> int | None:
        """The furthest step so far; None if none was reported."""
        now = self.progress.step if self.progress is not None and self.progress.step else None
        return max((n for n in (now, self.furthest_step) if n is not None), default=None)

    @property
    def restarted_in_place(self) -> int:
        """Number of restarts in place in this attempt."""
        done = self.in_place
        return 0 if done is None else done.earlier + done.application + done.infrastructure + done.stall

    @property
    def is_restarted(self) -> bool:
        """True if a failure started the current attempt, or if a pod in it is being replaced after a failure."""
        failure = self.last_failure
        return failure is not None and (failure.attempt == self.attempt - 1 or bool(self.replacements))

    @property
    def unsettled_failure(self) -> JobFailure | None:
        """The failure that broke the attempt, until its pods (or the one to replace) have ended; then None."""
        failure = self.last_failure
        is_open = failure is not None and failure.attempt == self.attempt and not failure.failure_class
        return failure if is_open and self.state == "Restarting" else None

    @property
    def is_broken(self) -> bool:
        return self.unsettled_failure is not None


class Gang(Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True):
    """The scheduler or queue that admits all pods of an attempt at once."""

    kind: Literal["none", "native", "kueue"]
    """none: pods are scheduled one by one. native: the Kubernetes scheduler, with a PodGroup.
    kueue: a queue, before pods are created."""
    attempt: Count = 0
    """The attempt that it was chosen for."""
    why: Annotated[str, Meta(max_length=bounds.WHY_MAX)] = ""
    """Why it was chosen."""
    waiting_since: Time | None = None
    """When the job began to wait for admission."""


class Restarts(Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True):
    """Restarts so far, by what they are charged to."""

    # People and printer columns read the first four counters; default_factory makes msgspec write them also if 0.
    # Only the operator reads the other counters, so msgspec leaves them out while they are 0.

    application: Count = field(default_factory=int)
    """Charged to backoffLimit."""
    infrastructure: Count = field(default_factory=int)
    """For lost nodes, evictions and preemptions; not charged to backoffLimit."""
    stall: Count = field(default_factory=int)
    """Because no step was made for too long."""
    total: Count = field(default_factory=int)
    """Sum of these three."""
    in_a_row: Count = 0
    """Restarts since the last new step; the back-off grows with them."""
    charged_in_a_row: Count = 0
    """Those of inARow charged to application or stall; after three a job that reports steps fails."""
    charged_at: Annotated[list[Time], Meta(max_length=bounds.STATUS_ITEMS_MAX)] = []
    """When the application was charged, if backoffWindowSeconds is set."""
    uncharged_in_a_row: Count = 0
    """Restarts charged to infrastructure since the last new step; after a hundred the job fails."""
    peers_lost: Count = 0
    """Those of unchargedInARow with lost peers alone; the next is charged to the application."""


class JobLeader(Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True):
    """The pod whose agent starts and stops the ranks of all nodes."""

    term: Count
    """Grows with each new leader."""
    place: NodeCount = 0
    """Number in the pod's name."""


class InPlace(Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True):
    """Restarts without new pods, as counted by one agent."""

    replacement: Count = 0
    """How often node 0's pod was replaced before the agent's; or the leader's term."""
    earlier: Count = 0
    """Those of earlier leaders in this attempt."""
    application: Count = 0
    """Charged to backoffLimit."""
    infrastructure: Count = 0
    """For lost connections between nodes."""
    stall: Count = 0
    """Because no step was made for too long."""


class Nodes(Struct, rename="camel", frozen=True, kw_only=True):
    """Nodes of the job."""

    total: NodeCount = 0
    """Nodes that the job wants, without spares."""
    ready: NodeCount = 0
    """Nodes whose trainer is running and ready."""


class Progress(Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True):
    """Progress of the training, as rank 0 reports it."""

    step: Count
    """Optimizer steps done."""
    total_steps: Count | None = None
    """Optimizer steps of the whole training, if known."""
    percent: Annotated[int, Meta(ge=0, le=100)] | None = None
    """Share of totalSteps that is done."""
    eta_seconds: Count | None = None
    """Time left at the present pace."""
    samples_per_second: float | None = None
    """Samples of all ranks together."""
    world_size: Count | None = None
    """Number of ranks in the script's process group; if not nodes x nprocPerNode, it is not one group."""
    saved_step: Count | None = None
    """Step of the newest checkpoint of ddpjob.Snapshot; a restart continues from it."""
    metrics: Annotated[dict[Text, Text], Meta(max_length=bounds.STATUS_ITEMS_MAX)] = {}
    """At most 16 named values, as text."""
    attempt: Count = 0
    """The attempt that reported."""
    generation: Count = 0
    """How often these ranks had been restarted in their pods."""
    updated: Time
    """When the report arrived."""


class Evidence(Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True):
    """Facts that show the root cause and its class. A later reconcile needs them when the pod may be gone."""

    precedence: Annotated[str, Meta(max_length=16)]
    """Its precedence among possible causes, from KERNEL to STOPPED."""
    raised: bool = False
    """True if a process raised the exception; false if a container could not start."""
    container_reason: Annotated[str, Meta(max_length=128)] = ""
    """The container's reason in its status."""
    pod_reason: Annotated[str, Meta(max_length=128)] = ""
    """The pod's reason in its status."""
    pod_message: Annotated[str, Meta(max_length=300)] = ""
    """The pod's message in its status."""
    disruption: Annotated[str, Meta(max_length=128)] = ""
    """The reason of the pod's condition DisruptionTarget."""
    deletion_requested: bool = False
    """True if the pod was being deleted before it ended."""
    vanished: bool = False
    """True if the pod or its node disappeared without an exit code."""
    stalled: bool = False
    """True if the rank was stopped because it made no step."""
    hidden: bool = False
    """True if the container of the failed rank exited with 0."""
    silent_node: Annotated[str, Meta(max_length=128)] = ""
    """If ranks only reported lost peers: a node of the attempt that had not reported for a while."""


class JobFailure(Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True):
    """The root cause: the earliest failure that is not a symptom of a lost peer."""

    attempt: Count
    """The attempt that failed."""
    rank: Count | None = None
    """The global rank, if known."""
    node_rank: Count
    """The node's rank in the job."""
    pod: Text = ""
    """The pod's name."""
    init_container: Text = ""
    """The init container that failed before the trainer started."""
    node: Text = ""
    """The cluster node it ran on."""
    exit_code: int | None = None
    """The exit code of the failed rank if known, else of the container."""
    signal: Text = ""
    """The signal that killed it, such as SIGKILL."""
    reason: Text = ""
    """The kubelet's or the process's reason, one word: OOMKilled, Error, NodeLost, Stalled."""
    failure_class: Text = field(default="", name="class")
    """application, outOfMemory, infrastructure, stall or permanent; unset until all pods of the attempt have ended."""
    charged_to: Text = ""
    """What the restart was charged to: application, infrastructure or stall. Unset: no restart."""
    step: Count | None = None
    """The last step that the training had reported."""
    generation: Count | None = None
    """Restarts of these ranks in their pods before the failure."""
    exception: Text = ""
    """The exception's line in the log, if there is one."""
    where: Annotated[str, Meta(max_length=128)] = ""
    """The line of the script that raised it, such as train.py:41; needs a traceback in the log."""
    log_tail: Annotated[str, Meta(max_length=2048)] = ""
    """The end of the log."""
    evidence: Evidence | None = None
    """What the operator has observed. Unset: the reason is enough."""
    time: Time
    """When it happened."""


class FailureLine(Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True):
    """A failure in one line."""

    attempt: Count
    """The attempt that failed."""
    message: Annotated[str, Meta(max_length=300)]
    """Who failed, and how."""
    reason: Text = ""
    """The kubelet's or the process's reason, as in lastFailure; unset for an init container."""
    failure_class: Text = field(default="", name="class")
    """The class, as in lastFailure."""
    node: Text = ""
    """The cluster node."""
    time: Time
    """When."""


class StoredFinding(Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True):
    """A fact that is suspicious in a job that succeeded."""

    reason: Annotated[str, Meta(max_length=64)]
    """One word, such as NoProcessGroup, ReplicasDiffer or FailureInLog."""
    message: Annotated[str, Meta(max_length=300)]
    """A sentence."""


class AvoidedNode(Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True):
    """A node on which this job failed repeatedly."""

    node: Text
    """Its name."""
    until: Time
    """When new pods may go there again."""
    message: Annotated[str, Meta(max_length=300)] = ""
    """Why."""
    lifted: bool = False
    """True if new pods may go there earlier, because they fit nowhere else."""


class Goodput(Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True):
    """Seconds spent in each kind of state up to stateTime; the current state is not counted yet."""

    productive_seconds: Count = 0
    """All nodes ran, and steps were made at the expected pace."""
    idle_seconds: Count = 0
    """All nodes ran without a step: for longer than expected, or around a restart in place or the loss of a node."""
    unreported_seconds: Count = 0
    """All nodes ran, but no step was ever reported, so it is unknown whether they trained."""
    starting_seconds: Count = 0
    """Waiting for nodes, images, peers and the first step."""
    restarting_seconds: Count = 0
    """After a failure, until all nodes trained again."""
    lost_steps: Count = 0
    """Steps repeated after restarts; none if the state in memory was loaded."""
    ratio: float | None = None
    """productiveSeconds divided by all seconds; unset if no step was ever reported."""
    idle_since: Time | None = None
    """Start of the idle time, while no new step is made."""
    counted_until: Time | None = None
    """Time up to which the seconds are counted, if later than stateTime."""


class Display(Struct, rename="camel", omit_defaults=True, frozen=True, kw_only=True):
    """The texts that `kubectl get` shows."""

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
    """The condition."""
    status: Literal["True", "False", "Unknown"]
    """True if the condition holds."""
    reason: Text
    """Why, as one CamelCase word."""
    message: Annotated[str, Meta(max_length=bounds.CONDITION_MAX)] = ""
    """Why, as a sentence."""
    last_transition_time: Time
    """When the status of this condition last changed."""
    observed_generation: int | None = None
    """The metadata.generation that it is about."""


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
