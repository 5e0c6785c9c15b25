"""What ranks and agents report, as a request body carries it."""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Literal

import msgspec

from ddpjob_operator.job import bounds
from ddpjob_operator.job.bounds import NOT_READABLE

METRICS_MAX = 16
METRIC_LENGTH_MAX = 64

Phase = Literal["start", "train", "save", "evaluate"]
_Number = Annotated[int, msgspec.Meta(ge=0, le=bounds.COUNT_MAX)]
_Restarts = Annotated[int, msgspec.Meta(ge=0, le=bounds.IN_PLACE_MAX)]
_Node = Annotated[int, msgspec.Meta(ge=0, le=bounds.NODES_MAX)]
_Turn = Annotated[int, msgspec.Meta(ge=0, le=bounds.TURNS_MAX)]
AGENT_TEXT_MAX = 300
AGENT_FAILURES_MAX = 5


class AgentCounts(msgspec.Struct, rename="camel", frozen=True, kw_only=True):
    """What an agent has charged in its life, from 0 on; the counts in a row go on from those that it was given."""

    application: _Restarts = 0
    infrastructure: _Restarts = 0
    stall: _Restarts = 0
    in_a_row: _Restarts = 0
    charged_in_a_row: _Restarts = 0

    @property
    def total(self) -> int:
        """All restarts in place that it led."""
        return self.application + self.infrastructure + self.stall


class AgentFailure(msgspec.Struct, rename="camel", frozen=True, kw_only=True):
    """A failure that an agent has overcome."""

    rank: Annotated[int, msgspec.Meta(ge=-1, lt=2**31)]
    """-1: of a node as a whole."""
    node_rank: _Node
    exit_code: Annotated[int, msgspec.Meta(ge=0, le=255)] | None = None
    signal: Annotated[str, msgspec.Meta(max_length=16)] = ""
    exception: Annotated[str, msgspec.Meta(max_length=AGENT_TEXT_MAX)] = ""
    step: _Number | None = None
    failure_class: Literal["application", "outOfMemory", "infrastructure", "stall"] = msgspec.field(name="class")
    charged_to: Literal["application", "infrastructure", "stall"]


class Agent(msgspec.Struct, rename="camel", frozen=True, kw_only=True):
    """What node 0's `ddprun` says of the restarts in place that it has led."""

    replacement: _Turn = 0
    """Which pod of node 0 it runs in."""
    generation: _Turn = 0
    restarts: AgentCounts = AgentCounts()
    failures: Annotated[list[AgentFailure], msgspec.Meta(max_length=AGENT_FAILURES_MAX)] = []
    """The last ones, the oldest first."""


class Report(msgspec.Struct, rename="camel", frozen=True, kw_only=True, omit_defaults=True):
    """What a rank reports about the training (the body of the status request)."""

    step: int
    attempt: int = 0
    rank: int = 0
    node_rank: int = 0
    world_size: int | None = None
    total_steps: int | None = None
    eta_seconds: int | None = None
    samples_per_second: float | None = None
    metrics: dict[str, str] = {}
    phase: Phase | None = "train"
    """What it does now: start is before the first step. None: the sender reports only when it makes a step, so that a
    step reported twice proves nothing (Kubeflow's protocol)."""
    final: bool = False
    agent: Agent | None = None
    """Set: the report is not of a rank but of the agent of its pod."""
    received_at: dt.datetime | None = None
    """Set by the receiver: the sender's clock is not trusted."""


class BadReportError(ValueError):
    """A report that cannot be used; the text is the reason."""


def read_report(body: bytes, received_at: dt.datetime) -> Report:
    """The report in a request body. Raises BadReportError; numbers out of range are refused, not bent."""
    try:
        report = msgspec.json.decode(body, type=Report)
    except NOT_READABLE as error:
        raise BadReportError(str(error) or type(error).__name__) from None
    counts = (report.step, report.attempt, report.rank, report.node_rank)
    optional = (report.world_size, report.total_steps, report.eta_seconds)
    if any(not 0 <= n <= bounds.COUNT_MAX for n in (*counts, *(n for n in optional if n is not None))):
        raise BadReportError("numbers must be from 0 to 2^53 - 1")
    if report.samples_per_second is not None and not 0 <= report.samples_per_second < 1e15:
        raise BadReportError("samplesPerSecond must be from 0 to 1e15")
    if len(report.metrics) > METRICS_MAX:
        raise BadReportError(f"at most {METRICS_MAX} metrics are read, not {len(report.metrics)}")
    if any(len(text) > METRIC_LENGTH_MAX for pair in report.metrics.items() for text in pair):
        raise BadReportError(f"names and values of metrics have at most {METRIC_LENGTH_MAX} characters")
    return msgspec.structs.replace(report, received_at=received_at)
