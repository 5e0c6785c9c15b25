"""Reports of ranks and agents, as request bodies."""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec.structs import force_setattr

from ddpjob_core import budget, rules
from ddpjob_core.failures import Failure
from ddpjob_operator.job import api, bounds
from ddpjob_operator.job.bounds import NOT_READABLE

METRICS_MAX = 16
METRIC_LENGTH_MAX = 64
Phase = Literal["start", "train", "save", "evaluate"]
_Number = Annotated[int, msgspec.Meta(ge=0, le=bounds.COUNT_MAX)]
_Restarts = Annotated[int, msgspec.Meta(ge=0, le=bounds.IN_PLACE_MAX)]
_Rate = Annotated[float, msgspec.Meta(ge=0, lt=1e15)]
_Metric = Annotated[str, msgspec.Meta(max_length=METRIC_LENGTH_MAX)]
_Sentence = Annotated[str, msgspec.Meta(max_length=bounds.SENTENCE_MAX)]
_Turn = Annotated[int, msgspec.Meta(ge=0, le=bounds.TURNS_MAX)]
_CLASSES = frozenset(get_args(rules.Class)) - {"permanent"}
AGENT_FAILURES_MAX = 5


class AgentCounts(msgspec.Struct, rename="camel", frozen=True, kw_only=True):
    """Restarts that an agent has counted, from 0; counts in a row continue from the agent's initial values."""

    application: _Restarts = 0
    infrastructure: _Restarts = 0
    stall: _Restarts = 0
    in_a_row: _Restarts = 0
    charged_in_a_row: _Restarts = 0

    @property
    def total(self) -> int:
        """Number of all restarts in place that this agent led."""
        return self.application + self.infrastructure + self.stall


class AgentReport(msgspec.Struct, rename="camel", frozen=True, kw_only=True):
    """Report of node 0's `ddprun` about restarts in place."""

    replacement: _Turn = 0
    """Number of node 0's pod in this attempt."""
    generation: _Turn = 0
    step_in_memory: _Number = 0
    """Step of the state that the last stopped ranks left in memory; 0 if none."""
    members: Annotated[str, msgspec.Meta(max_length=bounds.RANGES_LENGTH_MAX)] = ""
    """In the last message of an elastic job that has succeeded: the places whose ranks trained to the end."""
    restarts: AgentCounts = AgentCounts()
    failures: Annotated[list[Any], msgspec.Meta(max_length=AGENT_FAILURES_MAX)] = []
    """The last `Failure`s, oldest first."""

    def __post_init__(self) -> None:
        """Parse the failures: msgspec would use a dataclass's field names, not the keys of a report."""
        force_setattr(self, "failures", [_failure(written) for written in self.failures])


class Report(msgspec.Struct, rename="camel", frozen=True, kw_only=True, omit_defaults=True):
    """A rank's report about the training, the body of the status request."""

    step: _Number
    attempt: _Number = 0
    rank: _Number = 0
    node_rank: _Number = 0
    world_size: _Number | None = None
    total_steps: _Number | None = None
    eta_seconds: _Number | None = None
    samples_per_second: _Rate | None = None
    metrics: Annotated[dict[_Metric, _Metric], msgspec.Meta(max_length=METRICS_MAX)] = {}
    phase: Phase | None = "train"
    """start: before the first step. None: the sender reports only when it makes a step (Kubeflow's protocol), so a
    repeated step proves nothing.
    """
    saved_step: _Number | None = None
    """Step of the newest checkpoint; None if the script saves none, or the library is older."""
    resumed_step: _Number | None = None
    """Step of the state that the sender has loaded."""
    resumed_from: _Sentence = ""
    """Source of the loaded state: a folder, or the memory of named nodes."""
    generation: _Turn = 0
    """Restarts of the ranks in their pods before the sender started."""
    replacement: _Turn = 0
    """Number of the sender's pod at its node; 0 is the first of the attempt. In a cluster the receiver sets it."""
    not_kept: _Sentence = ""
    """Why the state is not kept in the memory of the sender's pod."""
    limit_needed: _Number | None = None
    """Memory limit in bytes that keeping the state would need, if the limit is too small."""
    save_failed: _Sentence = ""
    """Why the last checkpoint failed; "" after a later success."""
    alone: bool = False
    """True if the sender is one of several ranks, has trained, and was never in a process group."""
    final: bool = False
    agent: AgentReport | None = None
    """Set if the report is of the pod's agent, not of a rank."""
    received_at: dt.datetime | None = None
    """Set by the receiver: the sender's clock is not trusted."""


def _failure(written: Any) -> Failure:
    """Return the failure from which an agent has recovered; rank -1 means the whole node. Raise ValueError."""
    if isinstance(written, Failure):
        return written
    whole = isinstance(written, dict) and written.get("rank") == -1
    failure = Failure.from_dict({**written, "rank": None} if whole else written)
    if failure.node_rank is None or failure.node_rank > bounds.NODES_MAX or (failure.rank is None and not whole):
        raise ValueError("a failure has a rank and a nodeRank")
    if (failure.exit_code or 0) < 0:
        raise ValueError("exitCode: 128 + n where signal n ended it")
    if failure.failure_class not in _CLASSES or failure.charged_to not in get_args(budget.ChargedTo):
        raise ValueError(f"class: {failure.failure_class}, chargedTo: {failure.charged_to}")
    return failure


class BadReportError(ValueError):
    """A report that cannot be used; the message gives the reason."""


def read_report(body: bytes, received_at: dt.datetime) -> Report:
    """Return the report in a request body. Raise BadReportError; out-of-range numbers are refused, not clamped."""
    try:
        report = msgspec.json.decode(body, type=Report)
    except NOT_READABLE as error:
        raise BadReportError(str(error) or type(error).__name__) from None
    return msgspec.structs.replace(report, received_at=received_at)


def latest(known: Report | None, new: Report) -> Report | None:
    """Return the newer report of a leader's agent, because it contains all restarts so far."""
    return known if known is not None and _age(new) < _age(known) else new


def _age(report: Report) -> tuple[int, int, int]:
    agent = report.agent
    return (report.attempt, agent.replacement, agent.restarts.total) if agent is not None else (0, 0, 0)


def check_rank(spec: api.Spec, rank: int, node_rank: int | None = None) -> None:
    """Raise BadReportError if the pod of a node may not report for a rank. node_rank None: the node is unknown."""
    nproc, world = spec.facts.nproc_per_node, spec.world_size
    if rank >= world:
        raise BadReportError(f"rank: {rank} is not one of the job's {world} ranks (nodes x nprocPerNode)")
    if node_rank is not None and spec.facts.ranks_follow_nodes and rank // nproc != node_rank:
        first = node_rank * nproc
        raise BadReportError(
            f"rank: {rank} is not on node {node_rank}, which has ranks {first} to {first + nproc - 1} (nprocPerNode)"
        )
