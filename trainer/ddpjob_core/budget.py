"""The ledger of restarts: how many of a job's restarts the operator and the agents in its pods have used.

A failure is charged to a budget if it counts against a limit such as backoffLimit. Both restart: the operator creates
new pods, and the agent of node 0 starts the ranks again in the existing pods. They do not ask each other first, because
a restart in place must not wait for the network. So each keeps its own counts, and learns the other's counts from three
records that only grow:

    Spent   restarts that one agent has used so far. It is in each of its reports and in its last message.
    Known   the part of Spent that the operator has counted. It is written to the status together with the counts.
    Grant   in the environment of each new pod: what is left by the operator's counts, and its Known. Agents send their
            grants to the agent of node 0, which uses the latest one.

Invariants for each budget that only grows (application without a window, stall):

    Nothing is counted twice. The counts in the status are the operator's own charges plus all Known restarts of agents.
    A report adds only what exceeds Known, so a report that is repeated, late or out of order adds nothing.

    Nothing is forgotten, because each report has the agent's total. The only loss: restarts that an agent of node 0 has
    not reported before the operator counts a report of the agent in the next pod of node 0.

    The limit holds: left + Known = limit - the operator's own charges - restarts of earlier agents. So an agent with a
    grant stays within the limit, however many of its restarts are Known. The excess is at most what one side has spent
    before the other side learned of it.

Reports are not trusted: the operator counts at most one restart beyond the limit, which ends the job.

Standard library only, no I/O, no clock; imported by `ddprun` before its ranks start, so nothing slow (dataclasses, re).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import datetime as dt

ChargedTo = Literal["application", "infrastructure", "stall"]
Stop = Literal[
    "", "BackoffLimitExceeded", "NoProgress", "PermanentFailure", "TooManyInfrastructureFailures", "TooManyStalls"
]

BACKOFF_LIMIT = 3
# Only losses in a row count, because a healthy job on preemptible nodes may lose hundreds of nodes in a week.
INFRASTRUCTURE_IN_A_ROW_MAX = 100
STALLS_MAX = 10
NO_PROGRESS_MAX = 3
BACK_OFF_SECONDS_MAX = 300
# Seconds of running after which the back-off of a job without step reports is reset, as in the kubelet.
# The count of lost peers is not reset. Otherwise each loss would count as the first, which is not charged.
RESET_AFTER_SECONDS = 600
# Seconds after which a job without step reports counts as trained.
# Mistakes that prevent a start show within seconds; slow imports take up to a minute.
TRAINED_SECONDS = 60


class Limits(NamedTuple):
    """Limits for restarts that the user has set."""

    backoff_limit: int = BACKOFF_LIMIT
    window_seconds: int | None = None
    """Only charges within this time count against backoff_limit."""


class Attempt(NamedTuple):
    """The progress of a failed attempt."""

    made_a_new_step: bool
    """True if the attempt went beyond the furthest step of all earlier attempts."""
    reports_steps: bool
    """True if any attempt of the job has reported a step."""
    ran_seconds: float
    """Seconds during which all ranks of the attempt were running."""
    only_complaints: bool = False
    """True if ranks reported lost peers, and no lost node, pod or connection was seen."""


class Spent(NamedTuple):
    """Number of restarts, by the budget that they are charged to."""

    application: int = 0
    infrastructure: int = 0
    stall: int = 0

    @property
    def total(self) -> int:
        return sum(self)


class Known(NamedTuple):
    """The restarts that the operator has counted for the agent that reported last."""

    replacement: int = -1
    """Number of node 0's pod that the agent runs in; -1 before the first report."""
    spent: Spent = Spent()

    def of(self, replacement: int) -> Spent:
        """Return the counted restarts of the agent in this pod of node 0; none if another pod's agent reported last."""
        return self.spent if self.replacement == replacement else Spent()


class RestartHistory(NamedTuple):
    """Restarts charged so far, as the operator or an agent counts them."""

    application: int = 0
    infrastructure: int = 0
    stall: int = 0
    in_a_row: int = 0
    """Restarts without a new step since the last one; the back-off depends on it."""
    charged_in_a_row: int = 0
    """Restarts in `in_a_row` that were charged to application or stall."""
    charged_at: tuple[dt.datetime, ...] = ()
    """Times of charges to the application, as far back as backoff_limit needs."""
    uncharged_in_a_row: int = 0
    """Restarts for lost nodes since the last new step. They are limited, however long the attempts were running."""
    peers_lost: int = 0
    """Restarts in `uncharged_in_a_row` for which ranks only reported lost peers."""

    @property
    def spent(self) -> Spent:
        return Spent(*self[:3])

    @property
    def total(self) -> int:
        return self.spent.total


class Grant(NamedTuple):
    """Restarts left and generations made, as counted by the operator when it created a pod or answered an agent."""

    application: int
    infrastructure: int
    stall: int
    in_a_row: int = 0
    """Restarts so far without a new step: the back-off continues from there."""
    charged_in_a_row: int = 0
    peers_lost: int = 0
    """Restarts with only reports of lost peers since the last new step."""
    step: int = 0
    """The furthest step of the job."""
    replaced: int = 0
    """Pods of the attempt that were replaced before: the later of two grants has the higher number."""
    generations: int = 0
    """Generations of ranks that have begun in the attempt: a leader that was in none of them begins above."""
    known: Known = Known()

    @staticmethod
    def of(
        history: RestartHistory,
        limits: Limits,
        at: dt.datetime | None,
        *,
        step: int = 0,
        replaced: int = 0,
        generations: int = 0,
        known: Known,
    ) -> Grant:
        """Return the grant for a pod created with these counts. at: start of its attempt."""
        return Grant(
            application=max(0, limits.backoff_limit - counted(history, limits, at)),
            infrastructure=max(0, INFRASTRUCTURE_IN_A_ROW_MAX - history.uncharged_in_a_row),
            stall=max(0, STALLS_MAX - history.stall),
            in_a_row=history.in_a_row,
            charged_in_a_row=history.charged_in_a_row,
            peers_lost=history.peers_lost,
            step=step,
            replaced=replaced,
            generations=generations,
            known=known,
        )

    def text(self) -> str:
        """Return the value of DDPJOB_RESTARTS_LEFT."""
        values = {key: getattr(self, name) for name, key in _KEYS.items()}
        if self.known.replacement >= 0:
            values["known"] = {"replacement": self.known.replacement, **self.known.spent._asdict()}
        return json.dumps(values)

    @staticmethod
    def read(text: str) -> Grant:
        """Parse the value of DDPJOB_RESTARTS_LEFT. Raise ValueError."""
        try:
            values = json.loads(text)
            known = values.get("known")
            return Grant(
                **_spent(values)._asdict(),
                **{name: natural(values.get(key, 0)) for name, key in list(_KEYS.items())[3:]},
                known=Known() if known is None else Known(natural(known["replacement"]), _spent(known)),
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise ValueError(
                f"DDPJOB_RESTARTS_LEFT: {text[:100]!r} must have the form "
                '{"application": 3, "infrastructure": 100, "stall": 10}.'
            ) from None


class Budget(NamedTuple):
    """The restarts that the agent of node 0 may use in total, and those that it has used."""

    application: int
    infrastructure: int
    stall: int
    total: int
    history: RestartHistory = RestartHistory()
    """The agent's own restarts; counts in a row continue from the operator's."""
    max_restarts: int | None = None
    """--max-restarts, if it was set."""
    replaced: int = 0
    """`replaced` of the grant that applies."""

    @staticmethod
    def of(grant: Grant, max_restarts: int | None) -> Budget:
        """Return the budget of an agent that has spent nothing."""
        return Budget(0, 0, 0, 0, max_restarts=max_restarts)._by(grant, Spent())

    def renewed(self, grant: Grant, replacement: int) -> Budget:
        """Apply the grant of another pod if it is later. replacement: number of the pod that this agent runs in."""
        return self if grant.replaced <= self.replaced else self._by(grant, grant.known.of(replacement))

    def allows(self, to: ChargedTo, after: RestartHistory) -> bool:
        """True if the budget has a restart left for the failure that led to this history."""
        return bool(getattr(after, to) <= getattr(self, to)) and after.total <= self.total

    @property
    def report(self) -> dict[str, int]:
        """Return the restarts that this agent has used, for its report to the operator."""
        h = self.history
        return {**h.spent._asdict(), "inARow": h.in_a_row, "chargedInARow": h.charged_in_a_row}

    def _by(self, grant: Grant, known: Spent) -> Budget:
        """Apply a grant. known: restarts of this agent that the operator had counted; the grant excludes them."""
        in_life = [left + own for left, own in zip(grant[:3], known, strict=True)]
        most = sum(in_life) if self.max_restarts is None else self.max_restarts
        application, infrastructure, stall = (min(most, number) for number in in_life)
        history = self.history
        return self._replace(
            application=application,
            infrastructure=infrastructure,
            stall=stall,
            total=min(most, application + infrastructure + stall),
            history=history._replace(
                in_a_row=grant.in_a_row + history.total - known.total,
                charged_in_a_row=grant.charged_in_a_row + _charged(history.spent) - _charged(known),
                peers_lost=history.peers_lost if history.total else grant.peers_lost,
            ),
            replaced=grant.replaced,
        )


def newly_spent(
    known: Known, replacement: int, reported: Spent, history: RestartHistory, limits: Limits, now: dt.datetime
) -> Spent:
    """Return the reported restarts that were not counted before, at most one beyond the limit.

    One restart beyond the limit is enough to end the job; a correct agent stops at its budget anyway. Infrastructure
    restarts have no total limit, only one in a row.
    """
    if replacement < known.replacement:
        return Spent()
    most = (limits.backoff_limit + 1 - counted(history, limits, now), reported[1], STALLS_MAX + 1 - history.stall)
    counts = zip(reported, known.of(replacement), most, strict=True)
    return Spent(*(max(0, min(total - before, bound)) for total, before, bound in counts))


def with_newly_spent(
    history: RestartHistory,
    new: Spent,
    limits: Limits,
    now: dt.datetime,
    *,
    in_a_row: int,
    charged_in_a_row: int,
    peers_lost: int,
    made_a_new_step: bool,
) -> RestartHistory:
    """Add an agent's new restarts to the operator's history, as `charge` adds one failure.

    in_a_row, charged_in_a_row: as reported by the agent; limited to the earlier count plus the new restarts.
    """
    after = _with(history, new, limits, now, peers_lost, made_a_new_step=made_a_new_step)
    return after._replace(
        in_a_row=min(in_a_row, history.in_a_row + new.total),
        charged_in_a_row=min(charged_in_a_row, history.charged_in_a_row + new.total),
    )


def with_application_spent(
    history: RestartHistory, limits: Limits, now: dt.datetime, given: int | None = None
) -> RestartHistory:
    """Count all restarts left for application failures as used, because a launcher such as torchrun used them.

    given: how many of them it got; None: all.
    """
    left = max(0, limits.backoff_limit - counted(history, limits, now))
    left = left if given is None else min(left, given)
    return _with(history, Spent(left, 0, 0), limits, now, 0, made_a_new_step=False)


def charge(
    to: ChargedTo, history: RestartHistory, attempt: Attempt, limits: Limits, now: dt.datetime
) -> RestartHistory:
    """Return the history of the operator or an agent with one more failure, charged to this budget."""
    reset = attempt.made_a_new_step or (not attempt.reports_steps and attempt.ran_seconds >= RESET_AFTER_SECONDS)
    new = Spent(**{to: 1})
    peers_lost = int(to == "infrastructure" and attempt.only_complaints)
    after = _with(history, new, limits, now, peers_lost, made_a_new_step=attempt.made_a_new_step)
    return after._replace(
        in_a_row=1 if reset else history.in_a_row + 1,
        charged_in_a_row=0 if reset else history.charged_in_a_row + _charged(new),
    )


def exhausted(to: ChargedTo, after: RestartHistory, attempt: Attempt, limits: Limits, now: dt.datetime) -> Stop:
    """Return why no restart is left after the last failure of this history; "" if one is left."""
    if to == "application" and counted(after, limits, now) > limits.backoff_limit:
        return "BackoffLimitExceeded"
    if to == "stall" and after.stall > STALLS_MAX:
        return "TooManyStalls"
    if to == "infrastructure" and after.uncharged_in_a_row > INFRASTRUCTURE_IN_A_ROW_MAX:
        return "TooManyInfrastructureFailures"
    if to != "infrastructure" and attempt.reports_steps and after.charged_in_a_row >= NO_PROGRESS_MAX:
        return "NoProgress"
    return ""


def back_off_seconds(in_a_row: int) -> int:
    """Return 0 for the first restart in a row, then 1, 2, 4 … 300."""
    return 0 if in_a_row <= 1 else min(2 ** min(in_a_row - 2, 20), BACK_OFF_SECONDS_MAX)


def counted(history: RestartHistory, limits: Limits, now: dt.datetime | None) -> int:
    """Return the restarts that count against backoff_limit. now: None counts all."""
    if limits.window_seconds is None or now is None:
        return history.application
    return sum((now - at).total_seconds() < limits.window_seconds for at in history.charged_at)


def natural(value: Any) -> int:
    """Check a count from JSON. Raise ValueError."""
    if type(value) is not int or value < 0:
        raise ValueError(value)
    return value


_KEYS = {
    **{name: name for name in Spent._fields},
    "in_a_row": "inARow",
    "charged_in_a_row": "chargedInARow",
    "peers_lost": "peersLost",
    "step": "step",
    "replaced": "replaced",
    "generations": "generations",
}
"""Names of a grant's fields in JSON."""


def _spent(values: Any) -> Spent:
    return Spent(*(natural(values[name]) for name in Spent._fields))


def _charged(spent: Spent) -> int:
    return spent.application + spent.stall


def _with(
    history: RestartHistory, new: Spent, limits: Limits, now: dt.datetime, peers_lost: int, *, made_a_new_step: bool
) -> RestartHistory:
    """Return the history with these restarts added, except in_a_row and charged_in_a_row, which the callers set."""
    uncharged, lost_before = (0, 0) if made_a_new_step else (history.uncharged_in_a_row, history.peers_lost)
    return history._replace(
        **{name: getattr(history, name) + getattr(new, name) for name in Spent._fields},
        charged_at=_times(history, new.application, limits, now),
        uncharged_in_a_row=uncharged + new.infrastructure,
        peers_lost=lost_before + peers_lost,
    )


def _times(history: RestartHistory, new: int, limits: Limits, now: dt.datetime) -> tuple[dt.datetime, ...]:
    """Return the times of the last charges, one more than the backoff limit; none if there is no time window."""
    if limits.window_seconds is None:
        return ()
    kept = limits.backoff_limit + 1
    return (*history.charged_at, *(now,) * min(new, kept))[-kept:]
