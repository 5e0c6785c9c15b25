"""All metrics: name, kind, help and labels. docs/metrics.md is generated from this (tools/metrics_page.py).

Names that controller-runtime's dashboards know keep their meaning; all others begin with ddpjob_. A job's name is the
label `job_name`, as in kube-state-metrics, because Prometheus sets `job` itself. Label values are names of Kubernetes
objects, which are bounded, or come from the lists here.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Literal

from ddpjob_core import budget
from ddpjob_operator.job import api, reasons

Kind = Literal["counter", "gauge", "histogram", "info", "stateset"]

STATES: tuple[str, ...] = typing.get_args(api.State)
NO_STATE = "None"
"""A job without a state: no operator has seen it yet, or its status is unreadable."""
CLASSES = ("application", "infrastructure", "stall")
SPENT = ("productive", "idle", "unreported", "starting", "restarting")
SCOPES = ("rank", "pod", "group")
"""What is restarted: ranks in their pods, single pods, or all pods."""
UNTIL = ("running", "first_step")
ENDS = (
    ("Succeeded", reasons.ALL_NODES_COMPLETED.name),
    *(("Failed", stop) for stop in typing.get_args(budget.Stop) if stop),
    ("Failed", reasons.DEADLINE_EXCEEDED.name),
)
"""The ends of a job: state and reason."""
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OTHER")
NO_CODE = "<error>"
"""A request without an answer, as in client-go."""
OTHER = "other"
RESOURCES = (
    "customresourcedefinitions ddpjobs ddpjobs/status events leases localqueues/pendingworkloads namespaces nodes "
    "podgroups pods pods/log priorityclasses resourceflavors selfsubjectaccessreviews selfsubjectrulesreviews services "
    "workloadpriorityclasses workloads workloads/status".split()
)
RESULTS = ("success", "requeue", "requeue_after", "error")
QUEUES = ("ddpjob", "ddpjob-events")
"""The queue of jobs to reconcile, and the queue of Events to send."""
CACHES = ("ddpjobs", "pods", "services", "nodes", "podgroups", "workloads")

LABEL_MAX = 253
"""Longest label value: the name of an object."""

QUICK = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SLOW = (0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


@dataclass(frozen=True)
class Metric:
    """One metric. name: without the suffix of its kind (_total, _bucket, _info)."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds, in seconds."""

    @property
    def shown(self) -> str:
        """The metric's name in queries, with the suffix of its kind."""
        return self.name + {"counter": "_total", "info": "_info"}.get(self.kind, "")


RECONCILES = Metric(
    "controller_runtime_reconcile",
    "counter",
    "Reconciles of jobs, by how they ended.",
    ("controller", "result"),
)
RECONCILE_ERRORS = Metric(
    "controller_runtime_reconcile_errors",
    "counter",
    "Reconciles that failed and are tried again after a back-off.",
    ("controller",),
)
RECONCILE_SECONDS = Metric(
    "controller_runtime_reconcile_time_seconds",
    "histogram",
    "Duration of a reconcile, including its requests.",
    ("controller",),
    QUICK,
)
ACTIVE_WORKERS = Metric("controller_runtime_active_workers", "gauge", "Reconciles that are running.", ("controller",))
QUEUE_DEPTH = Metric("workqueue_depth", "gauge", "Keys that are due and wait to be worked on.", ("name",))
QUEUE_ADDS = Metric("workqueue_adds", "counter", "Keys that were added to the queue.", ("name",))
QUEUE_RETRIES = Metric("workqueue_retries", "counter", "Keys that were put back after a failure.", ("name",))
QUEUE_SECONDS = Metric(
    "workqueue_queue_duration_seconds",
    "histogram",
    "Time that a key waited after it was due.",
    ("name",),
    QUICK,
)
WORK_SECONDS = Metric(
    "workqueue_work_duration_seconds", "histogram", "Duration of the work on a key.", ("name",), QUICK
)
LONGEST_SECONDS = Metric(
    "workqueue_longest_running_processor_seconds",
    "gauge",
    "Longest time that unfinished work has waited for an answer of the API server.",
    ("name",),
)
UNFINISHED_SECONDS = Metric(
    "workqueue_unfinished_work_seconds",
    "gauge",
    "Total time that unfinished work has waited for answers of the API server.",
    ("name",),
)
QUEUE_OLDEST = Metric(
    "ddpjob_queue_oldest_seconds", "gauge", "Time that the oldest key has waited since it was due.", ("name",)
)
REQUESTS = Metric(
    "rest_client_requests",
    "counter",
    f"Requests to the API server, by the code of the answer; {NO_CODE}: no answer came.",
    ("method", "verb", "resource", "code"),
)
REQUEST_SECONDS = Metric(
    "rest_client_request_duration_seconds",
    "histogram",
    "Time until the API server answered; for a watch, until it began.",
    ("verb", "resource"),
    QUICK,
)
WATCH_RESTARTS = Metric(
    "ddpjob_watch_restarts",
    "counter",
    "Watches that ended and were started again. end: the server's time-out, every few minutes; error: all others.",
    ("resource", "cause"),
)
MISSED = Metric(
    "ddpjob_watch_missed",
    "counter",
    "Objects whose newest change a watch missed and a later list showed. Deletions are not counted.",
    ("resource",),
)
LEADER = Metric("leader_election_master_status", "gauge", "1 for the operator that holds the Lease.", ("name",))
LEADS = Metric(
    "ddpjob_operator_leads",
    "gauge",
    "1 for the operator that acts, as leader_election_master_status, but without a label.",
)
INFO = Metric("ddpjob_operator", "info", "The version of this operator.", ("version",))
CACHE_OBJECTS = Metric("ddpjob_cache_objects", "gauge", "Objects in the operator's copy of the cluster.", ("resource",))

JOBS = Metric("ddpjob_jobs", "gauge", "Jobs by namespace and state, including finished ones.", ("namespace", "state"))
FINISHED = Metric(
    "ddpjob_jobs_finished",
    "counter",
    "Jobs that succeeded or failed, by the reason in their status.",
    ("state", "reason"),
)
ATTEMPTS = Metric(
    "ddpjob_attempts", "counter", "Attempts that were begun: first starts, restarts, resumes, retries of a start."
)
RESTARTS = Metric(
    "ddpjob_restarts",
    "counter",
    "Restarts, by what they were charged to and what was restarted.",
    ("class", "scope"),
)
SPENT_SECONDS = Metric(
    "ddpjob_seconds", "counter", "Time of all jobs, by what it was spent on; it adds up to wall time.", ("spent",)
)
STEPS = Metric("ddpjob_steps", "counter", "Steps that jobs have reported, including repeated ones.")
LOST_STEPS = Metric("ddpjob_lost_steps", "counter", "Steps that had to be repeated after a restart.")
DETECTION = Metric(
    "ddpjob_failure_detection_seconds",
    "histogram",
    "Time from a failure until it is recorded, by what was restarted.",
    ("scope",),
    SLOW,
)
RESTART_SECONDS = Metric(
    "ddpjob_restart_seconds",
    "histogram",
    "Time from a failure until all nodes run again, and until the first step. Restarts of ranks in place have only the "
    "second, because their pods keep running.",
    ("scope", "until"),
    SLOW,
)
START_SECONDS = Metric(
    "ddpjob_start_seconds",
    "histogram",
    "Time from the start of a job until all its nodes run, and until its first step; restarts are not counted.",
    ("until",),
    SLOW,
)

JOB = ("namespace", "job_name")
JOB_STATE = Metric("ddpjob_job_state", "stateset", "The state of a job: 1 for the one that holds.", JOB)
JOB_STATE_TIME = Metric("ddpjob_job_state_timestamp_seconds", "gauge", "Time when the job entered its state.", JOB)
JOB_ATTEMPTS = Metric("ddpjob_job_attempts", "counter", "Attempts of the job (status.attempt).", JOB)
JOB_RESTARTS = Metric(
    "ddpjob_job_restarts",
    "counter",
    "Restarts of the job (status.restarts), by what they were charged to.",
    (*JOB, "class"),
)
JOB_SECONDS = Metric(
    "ddpjob_job_seconds",
    "counter",
    "Time of the job, by what it was spent on; it adds up to wall time.",
    (*JOB, "spent"),
)
JOB_LOST_STEPS = Metric("ddpjob_job_lost_steps", "counter", "Steps that had to be repeated after restarts.", JOB)
JOB_NODES = Metric("ddpjob_job_nodes", "gauge", "Nodes that the job wants.", JOB)
JOB_READY = Metric("ddpjob_job_nodes_ready", "gauge", "Nodes whose trainer is running.", JOB)
JOB_STEP = Metric("ddpjob_job_step", "gauge", "Steps done, as last reported; a restart may set it back.", JOB)
JOB_STEPS_WANTED = Metric("ddpjob_job_steps_wanted", "gauge", "Steps of the whole training, if known.", JOB)
JOB_SAVED_STEP = Metric("ddpjob_job_saved_step", "gauge", "The step of the newest checkpoint that was reported.", JOB)
JOB_SAMPLES = Metric("ddpjob_job_samples_per_second", "gauge", "Samples of all ranks together.", JOB)
JOB_PROGRESS_TIME = Metric(
    "ddpjob_job_progress_timestamp_seconds", "gauge", "Time when the progress in the status was reported.", JOB
)

OF_OPERATOR = (
    RECONCILES, RECONCILE_ERRORS, RECONCILE_SECONDS, ACTIVE_WORKERS, QUEUE_DEPTH, QUEUE_ADDS, QUEUE_RETRIES,
    QUEUE_SECONDS, WORK_SECONDS, LONGEST_SECONDS, UNFINISHED_SECONDS, QUEUE_OLDEST, REQUESTS, REQUEST_SECONDS,
    WATCH_RESTARTS, MISSED, LEADER, LEADS, INFO, CACHE_OBJECTS,
)  # fmt: skip
"""Metrics of one operator process."""
OF_ALL_JOBS = (
    JOBS, FINISHED, ATTEMPTS, RESTARTS, SPENT_SECONDS, STEPS, LOST_STEPS, DETECTION, RESTART_SECONDS, START_SECONDS,
)  # fmt: skip
"""Metrics of all jobs together, from the leading operator."""
OF_A_JOB = (
    JOB_STATE, JOB_STATE_TIME, JOB_ATTEMPTS, JOB_RESTARTS, JOB_SECONDS, JOB_LOST_STEPS, JOB_NODES, JOB_READY, JOB_STEP,
    JOB_STEPS_WANTED, JOB_SAVED_STEP, JOB_SAMPLES, JOB_PROGRESS_TIME,
)  # fmt: skip
"""Metrics of one job, while it exists and until shortly after its end."""
ALL = (*OF_OPERATOR, *OF_ALL_JOBS, *OF_A_JOB)


def bounded(label: str) -> str:
    """Shorten a label value."""
    return label if len(label) <= LABEL_MAX else label[: LABEL_MAX - 1] + "…"
