"""Decide for node 0's agent when to start, stop and restart a generation, and when to end the job.

Pure: it takes events and times and returns orders, which `leader.py` carries out. The leader's own node follows the
same rules as any other.

    gathering   until every node is connected and no rank of the last generation is running. If the number of nodes may
                change: until there are enough
    running     until a rank fails, a node is lost, another one joins, or all nodes have finished
    stopping    until the ranks of every connected node have ended. If a rank failed because it waited for another until
                its timeout, ranks first report their positions. If the script has a mistake, ranks of the other
                nodes get a moment to make the same one
    pausing     the back-off
    standing    only under `ddpjob dev`: all ranks have ended, and the next saved file starts them again
    over

An operator, if there is one, replaces a lost pod and charges for it. Restarts without a new pod are charged here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from ddpjob_core.budget import Budget, Grant
from ddpjob_core.failure_policy import PolicyRule
from ddpjob_core.failures import RESUMABLE_EXIT_CODE as RESUMABLE
from ddpjob_core.failures import Failure, Precedence
from ddpjob_core.members import Members
from ddprun.core.charges import Charges
from ddprun.core.connected import Connected
from ddprun.core.deadlock import Position
from ddprun.core.generation import Ended, Generation, compared
from ddprun.core.stall_rules import only_waited

if TYPE_CHECKING:
    from ddprun.core.stall_monitor import StallReport

State = Literal["gathering", "running", "stopping", "pausing", "standing", "over"]


class StartOrder(NamedTuple):
    """Order all nodes to start their ranks."""

    generation: int
    members: Members
    preflight: bool = False
    """True for a pre-flight: the ranks measure the nodes, under the number of the previous generation."""


class Stop(NamedTuple):
    """Order these nodes to end their ranks and report when they have ended."""

    nodes: Collection[int]
    generation: int
    patient: bool
    """True if ranks may save a state together, because they were requested to stop and are still connected."""


class Ask(NamedTuple):
    """Ask all nodes for the positions of their ranks, because the group seems stalled."""

    generation: int
    timed_out: int | None = None
    """The rank that waited for another one until its timeout, if that is the reason."""
    quiet: bool = False
    """True if ranks only report what they wait for and print nothing, because perhaps none hangs."""


class Over(NamedTuple):
    """Tell all nodes that the ranks of one node have ended with 0: a rank that waits for another rank now hangs."""

    generation: int


class EndOrder(NamedTuple):
    """Tell all nodes that the job is over."""

    code: int
    """0, or the exit code of the rank that caused the end; 75 if there is none."""
    failure: Failure | None
    why: str


class Stand(NamedTuple):
    """Tell node 0 alone that no rank is running, and that the next `rerun` starts all of them again."""

    why: str
    succeeded: bool


class Leave(NamedTuple):
    """Order node 0's agent alone to end: its termination was requested, and the others wait for its replacement."""

    why: str


ALL_SUCCEEDED = "all ranks have ended with 0"
STANDS = "stands: "  # prefix of node 0's message for a `Stand`; `ddpjob dev` reads it
ANSWER_SECONDS = 3.0  # limit for answers; an agent answers within about one second
SAME_MISTAKE_SECONDS = 3.0  # ranks that start together reach the same line within a second
PREFLIGHT_SECONDS = 120.0  # limit; a pre-flight takes some seconds and the time of its imports
Order = StartOrder | Stop | Ask | Over | EndOrder | Stand | Leave


class LeaderState:
    """The state of one job, as its leader knows it."""

    def __init__(
        self,
        places: Members,
        budget: Budget,
        join_seconds: float,
        now: float,
        *,
        nproc: int = 1,
        least: int | None = None,
        spares: int = 0,
        last_call_seconds: float = 0.0,
        snooze_seconds: float = 0.0,
        policy: Sequence[PolicyRule] = (),
        has_operator: bool = False,
        preflight: bool = False,
        furthest_step: int = 0,
        dev: bool = False,
        local: bool = False,
        leader: int | None = None,
        turn: int | None = None,
        survivors: Collection[int] = (),
    ) -> None:
        """places: the numbers of all nodes that may take part. least: the smallest number of nodes that train; None:
        all but the spares. spares: how many of the nodes only wait, until another one is lost.

        last_call_seconds: how long the first start waits for more than `least`. snooze_seconds: how long a node
        is connected before it may interrupt a generation to join it. leader: place (number) of this agent; None: the
        first place. turn: number of this leader in its reports; None: the number of its pod.
        survivors: nodes of an earlier leader's last generation; the first start waits for no others.
        """
        self.state: State = "gathering"
        self.orders: list[Order] = []
        self.generation = -1
        self.members = places  # places of the last generation
        self.said = ""  # reason for the next start of ranks: the last failure, and the budget that it was charged to
        self.nodes = Connected(
            places,
            now,
            least=least,
            spares=spares,
            last_call_seconds=last_call_seconds,
            snooze_seconds=snooze_seconds,
            survivors=survivors,
        )
        self.charges = Charges(
            budget, policy=policy, has_operator=has_operator, is_local=local, furthest_step=furthest_step, turn=turn
        )
        self._leader = places.leader if leader is None else leader
        self._terminations = Terminations(self._leader, has_operator or self.nodes.least < len(places))
        self._current = Generation()
        self._stopping: set[int] = set()  # nodes with ranks that have not ended yet
        self._known_generation = -1  # highest generation in which a connected node took part
        self._begun = -1  # highest generation that the operator knows of
        self._nproc, self._dev, self._has_operator = nproc, dev, has_operator
        self._wants_preflight = preflight
        self._join_seconds = join_seconds
        self._since = now  # start of this state
        self._deadline: float | None = now + join_seconds  # time at which this state ends by itself

    @property
    def deadline(self) -> float | None:
        """Time of the next call of `tick`; None if none is due."""
        return min((at for at in (self._deadline, self._grows_at) if at is not None), default=None)

    @property
    def _grows_at(self) -> float | None:
        """Time at which running ranks are stopped for nodes that have connected meanwhile; None without such nodes."""
        if self.state != "running" or self._current.checking or self._current.finished or self.is_full:
            return None
        return self.nodes.newcomers.due_at(self.nodes.here.difference(self.members))

    @property
    def is_full(self) -> bool:
        """True if no more nodes can join the last generation: the others are spares."""
        return len(self.members) >= self.nodes.size

    def joins_in(self, node: int, now: float) -> float | None:
        """Return the seconds until a waiting node joins the running generation; None for other nodes."""
        waits = self.state == "running" and node not in self.members and not self.is_full
        return self.nodes.newcomers.joins_in(node, now) if waits else None

    def is_outdated(self, node: int, replacement: int) -> bool:
        """True if a newer pod of this node has connected before; this one is being replaced."""
        return replacement < self.nodes.replacements.get(node, 0)

    def joined(
        self,
        node: int,
        now: float,
        generation: int = -1,
        replacement: int = 0,
        *,
        nodes: int = 0,
        preflight: bool = False,
        grant: Grant | None = None,
        is_ready: bool = True,
    ) -> None:
        """Add a node whose agent connected, without running ranks. generation: that of its last ranks; -1 if none ran.

        nodes: how many may take part, by this agent's --nnodes, because the job may have been resized. is_ready: False
        if its ranks could not start at once; `ready` follows.
        """
        assert node not in self.nodes.here, "a node is lost before it comes again"
        made = 0 if grant is None else grant.replaced
        self.nodes.came(node, now, replacement, nodes=nodes, made=made, is_ready=is_ready)
        self._terminations.leaving.discard(node)
        self._wants_preflight |= preflight
        if grant is not None:
            self.granted(grant)
        if generation > max(self.generation, self._known_generation):  # a new leader continues the count
            self._known_generation = generation
            if self.state == "gathering":
                leads = node == self._leader
                self.generation = generation
                self.said = f"node {node} leads now" if leads else f"the pod of node {self._leader} is new"
        self._go_on_if_enough_are_here(now)

    def granted(self, grant: Grant) -> None:
        """Apply the operator's counts, which a new pod or an answer of the operator contains."""
        self._begun = max(self._begun, grant.generations - 1)
        self.charges.granted(grant, self.nodes.replacements[self._leader])

    def ready(self, node: int, now: float) -> None:
        """Record that the ranks of a connected node could start at once. The node joins after its snooze."""
        if node in self.nodes.here:
            self.nodes.newcomers.ready(node, now)

    def lost(self, node: int, now: float) -> None:
        """Remove a node whose connection was lost. Stop all ranks, because they cannot continue without this node."""
        if node not in self.nodes.here:
            return None
        self.nodes.left(node, now)
        if self.state == "gathering":
            return self._go_on_if_enough_are_here(now)
        if node not in self.members:
            return None
        has_finished = node in self._current.finished
        self._stopping.discard(node)
        self._current.finished.discard(node)
        vanished = self._lose(node)
        if self.state == "running":
            self._stop([vanished], now, may_agree=has_finished)
        elif self.state == "stopping":
            self._current.failures.append(vanished)
            self._ask_no_more()
            self._await_no_more()
            self._settle_if_all_have_stopped(now)
        return None

    def failed(self, node: int, failures: list[Failure], now: float) -> None:
        """Stop all ranks, because ranks of this node ended with a code other than 0."""
        if self.state == "running" and node in self.members:
            self._current.note_raised(node, failures)
            self._stop(failures, now, asks=True)
            return
        if not all(failure.waited_in or failure.symptom for failure in failures):
            self._ask_no_more()  # the cause is known, and the node reports it again when it calls `stopped`
        self._current.note_raised(node, failures)
        self._await_no_more(unless_others_may_raise_it=True)

    def stopped(
        self,
        node: int,
        failures: list[Failure],
        now: float,
        ended: Ended | None = None,
        *,
        lacks_program: bool = False,
    ) -> None:
        """Record the failures of a node whose ranks have all ended. After the last node, decide what happens next.

        ended: a rank that ended with 0 before it was stopped. lacks_program: the script is missing, even if no rank
        has tried to run it.
        """
        if self.state == "stopping" and node in self._stopping:
            self._stopping.discard(node)
            self._current.end_of(node, failures, ended, lacks_program=lacks_program)
            self._ask_no_more(answered=True)
            self._await_no_more(unless_others_may_raise_it=True)
            self._settle_if_all_have_stopped(now)

    def finished(self, node: int, now: float, ended: Ended | None = None) -> None:
        """Record that all ranks of a node ended with 0; after the last node, end the job. ended: first rank to end."""
        if self.state == "running" and node in self.members:
            self._current.finished.add(node)
            self._current.add_ended(ended)
            wait = self._current.standstill.forget(node)
            self._current.search.forget(node)
            if wait is not None and not self._current.standstill.asked:
                self._deadline = now + wait
            if len(self._current.finished) == len(self.members) and self._current.checking:
                self._go_on_after_check("", now)
            elif len(self._current.finished) == len(self.members) and self._dev:
                self._stand(ALL_SUCCEEDED, now, succeeded=True)
            elif len(self._current.finished) == len(self.members):
                self._end(0, None, "all ranks have ended", now)
            elif len(self._current.finished) == 1:
                self.orders.append(Over(self.generation))
        else:
            self._current.finished |= self._stopping.intersection({node})
            self._ask_no_more()  # no rank is left that could answer
            self._await_no_more()

    def rerun(self, now: float) -> None:
        """Start all ranks again, with the files as they are now, without a charge and without a back-off."""
        if self._current.checking or self.state not in ("running", "stopping", "standing"):
            return  # the ranks have not started yet, so they will read the new files anyway
        self._current.reruns = "files were saved"
        if self.state == "standing":
            self._settle_if_all_have_stopped(now)
        elif self.state == "running":
            self._stop([], now)
        else:
            self._ask_no_more()
            self._await_no_more()

    def reached(self, step: int, saved: int = 0) -> None:
        """Record a step that a rank has made. saved: step of the newest checkpoint that was saved or loaded."""
        self.charges.reached(step, saved)

    def stood(self, node: int, report: StallReport, now: float) -> None:
        """Store a node's stall report, and request the positions of all ranks if the group seems stalled."""
        if self.state == "running" and node in self.members:
            stalled = self._current.standstill.heard(node, report)
            self._current.search.heard(node, still=report.still)
            if stalled and self._deadline is None:
                self._ask(now)
            elif self._deadline is None and self._current.search.is_due(set(self.members) - self._current.finished):
                self._current.search.ask()
                self._deadline = now + ANSWER_SECONDS
                self.orders.append(Ask(self.generation, quiet=True))

    def answered(self, node: int, report: StallReport, positions: Sequence[Position], now: float) -> None:
        """Store the positions of a node's ranks; after the last node, decide if the group hangs."""
        if self.state == "running" and node in self.members:
            running = set(self.members) - self._current.finished
            self._current.search.heard(node, still=report.still)
            self._current.search.take(node, positions)
            if self._current.search.is_answered(running):
                self._settle_search(now)
            elif self._current.standstill.answered(node, report, positions, running):
                self._settle_standstill(now)
        elif self._current.question.asked and node in self._stopping:
            self._current.question.take(node, positions)
            self._ask_no_more(answered=True)

    def termination_requested(self, node: int, now: float) -> None:
        """Remove a node whose termination was requested, after its ranks. Without an operator the whole job ends."""
        if self.state in ("running", "stopping") and node not in self.members:
            self.nodes.left(node, now)
            return
        self._terminations.request(node)
        if self.state in ("gathering", "pausing", "standing"):
            if self._terminations.include_leader:
                self._leave(now)
            else:
                self.nodes.left(node, now)
                self._go_on_if_enough_are_here(now)
        elif self.state == "stopping":
            self._ask_no_more()
            self._await_no_more()
            self._settle_if_all_have_stopped(now)
        elif node == self._leader and node in self._current.finished:
            self._stop([self._lose(node)], now)  # stop all: the leader must leave, and the others may save first

    def tick(self, now: float) -> None:
        """Act on a deadline that has passed, such as the end of a back-off or a missing answer."""
        if self._grows_at is not None and now >= self._grows_at:
            return self._grow(now)
        if self._deadline is None or now < self._deadline:
            return None
        if self.state == "pausing":
            self._gather(now)
        elif self.state == "running" and self._current.checking:
            why = f"took longer than {PREFLIGHT_SECONDS:g} s"
            self._stop([Failure(exit_code=RESUMABLE, exception=why, symptom=True)], now)
        elif self.state == "gathering":
            self._wait_no_longer(now)
        elif self.state == "stopping":
            self._ask_no_more()
            self._await_no_more()
        elif self._current.search.asked:
            self._settle_search(now)
        elif self._current.standstill.asked:
            self._settle_standstill(now)
        elif self._current.standstill.stalled:
            self._ask(now)
        else:
            self._deadline = None
        return None

    def _lose(self, place: int) -> Failure:
        self._current.lost_pods.setdefault(place, self.nodes.replacements[place])
        return Failure(node_rank=place, vanished=True)

    def _part_with_leaving(self, now: float) -> None:
        for place in self._terminations.leaving & self.nodes.here:
            self.nodes.left(place, now)

    def _ask(self, now: float) -> None:
        self._current.standstill.ask()
        self._deadline = now + ANSWER_SECONDS
        self.orders.append(Ask(self.generation))

    def _settle_standstill(self, now: float) -> None:
        self._deadline = None
        found = self._current.standstill.settle()
        if found is not None:
            self._stop([found], now)

    def _settle_search(self, now: float) -> None:
        self._deadline = None
        found = self._current.search.settle(set(self.members) - self._current.finished)
        if found is not None:
            self._stop([found], now)
        elif self._current.standstill.stalled:
            self._ask(now)

    def _gather(self, now: float) -> None:
        self._enter("gathering", now, self._join_seconds)
        self.nodes.begin_wait()
        self._go_on_if_enough_are_here(now)

    def _go_on_if_enough_are_here(self, now: float) -> None:
        """Start the ranks if all nodes are connected, or if enough nodes are and no further node is expected."""
        if self.state != "gathering":
            return None
        lost = self._current.uncharged
        if lost is not None and (place := lost.node_rank) in self.nodes.here:
            assert place is not None, "a lost node has a place"
            self._current.uncharged = None
            if self.nodes.replacements[place] == self._current.lost_pods[place]:
                return self._charge(lost, now)  # the same pod, so only the connection was lost
            self.said = f"{describe(lost)}, and a new pod has replaced it"
        until = self.nodes.waits_until(now, self._since + self._join_seconds)
        if until is None:
            return self._start(now)
        self._deadline = until
        return None

    def _wait_no_longer(self, now: float) -> None:
        if len(self.nodes.here) >= self.nodes.least:
            return self._start(now)
        missing = _listed(sorted(set(self.nodes.places) - self.nodes.here))
        enough = f"; at least {self.nodes.least} are needed" if self.nodes.least < len(self.nodes.places) else ""
        why = f"nodes {missing} did not connect within {self._join_seconds:g} s{enough}"
        return self._end(RESUMABLE, None, why, now)

    def _grow(self, now: float) -> None:
        """Stop all ranks together, so that the next generation includes all connected nodes. Nothing is charged."""
        joining = sorted(self.nodes.here.difference(self.members))
        self._current.reruns = f"node{'s'[: len(joining) > 1]} {_listed(joining)} joined"
        self._stop([], now, patient=True)

    def _go_on_after_check(self, said: str, now: float) -> None:
        self.said = "; ".join(sentence for sentence in (self.said, said) if sentence)
        self._current.checking = self._wants_preflight = False
        if self._terminations.include_leader:
            return self._leave(now)
        return self._gather(now)

    def _start(self, now: float) -> None:
        is_first = max(self.generation, self._known_generation) < 0
        self.members = self.nodes.choose(self._leader, self.members, now, is_first=is_first)
        self._current = Generation(checking=self._wants_preflight)
        if not self._current.checking:
            self.generation = max(self.generation, self._known_generation, self._begun) + 1
        self._terminations.begin_generation()
        self._enter("running", now, PREFLIGHT_SECONDS if self._current.checking else None)
        self.orders.append(StartOrder(self.generation, self.members, self._current.checking))

    def _stop(
        self,
        failures: list[Failure],
        now: float,
        *,
        asks: bool = False,
        patient: bool = False,
        may_agree: bool = True,
    ) -> None:
        """Enter "stopping". asks: True if a running rank may be the one that a failed rank has waited for. may_agree:
        False if running ranks are lost. The others would wait in vain for them, and then end without their state."""
        self._current.failures += failures
        self.charges.ran(now - self._since)
        self._terminations.group_stops()
        patient |= may_agree and (self._terminations.came_first or any(failure.resumable for failure in failures))
        asks = asks and not (patient or self._current.finished or self._current.checking)
        self._stopping = self.nodes.here.intersection(self.members)
        self._enter("stopping", now, None)
        if not self._stopping:
            self._settle_if_all_have_stopped(now)
        elif asks and only_waited(failures):
            self._current.question.ask()
            self._deadline = now + ANSWER_SECONDS
            self.orders.append(Ask(self.generation, next(f.rank for f in failures if f.waited_in)))
        elif asks and self._others_may_make(failures[0]):
            self._current.awaited = compared(failures[0])
            self._deadline = now + SAME_MISTAKE_SECONDS
        else:
            self.orders.append(Stop(frozenset(self._stopping), self.generation, patient))

    def _others_may_make(self, failure: Failure) -> bool:
        """True if ranks of other nodes may soon make this mistake of the script too, before the first step.

        A mistake that all nodes make is not worth a restart. If their ranks are stopped too early, we cannot see that.
        """
        from ddpjob_core import rules

        if len(self.members) == 1 or self.charges.has_trained or failure.lacks_program:
            return False
        return rules.is_mistake(failure.exception, failure.exit_code) or rules.cannot_start(failure)

    def _await_no_more(self, *, unless_others_may_raise_it: bool = False) -> None:
        """Stop the ranks that got time to make the same mistake."""
        if self._current.awaited is None or self.state != "stopping":
            return
        if unless_others_may_raise_it and self._current.others_may_raise_it(self._stopping):
            return
        self._current.awaited = self._deadline = None
        if self._stopping:
            self.orders.append(Stop(frozenset(self._stopping), self.generation, patient=False))

    def _ask_no_more(self, *, answered: bool = False) -> None:
        """Stop waiting for positions, and stop the ranks. answered: do so only if all ranks have answered or ended."""
        question = self._current.question
        if not question.asked or (answered and not question.is_answered(self._stopping)):
            return
        self._current.waited_for = question.settle(self._current.failures, self._stopping)
        self._deadline = None
        if self._stopping:
            self.orders.append(Stop(frozenset(self._stopping), self.generation, patient=False))

    def _settle_if_all_have_stopped(self, now: float) -> None:
        # A leader that is leaving does not wait for other leaving nodes, which end by themselves.
        leaving, leader = self._terminations.leaving, self._leader
        if self._stopping - (leaving - {leader} if self._has_operator and leader in leaving else set()):
            return None
        if self._current.finished.issuperset(self.members) and not (self._current.checking or self._dev):
            return self._end(0, None, "all ranks have ended", now)  # the ranks were stopped only to let a new node join
        if self._current.reruns:
            self.said = self._current.reruns
            return self._pause(0, now)
        failure = self._current.cause()
        if self._terminations.explain(failure):
            self.said = str(self._terminations)
            return self._pause(0, now)
        if failure.vanished and self._has_operator and not self._does_without(failure):
            self._current.uncharged = failure
            return self._pause(0, now)
        return self._charge(failure, now)

    def _does_without(self, failure: Failure) -> bool:
        """True if the failure is the loss of a node, and enough other nodes are connected to go on."""
        left = self.nodes.here - self._terminations.leaving
        return failure.vanished and failure.node_rank not in left and len(left) >= self.nodes.least

    def _settle_check(self, failure: Failure, now: float) -> None:
        """End the group if the pre-flight found a bad node, so that it restarts without that node. Otherwise start
        training."""
        bad = next((f for f in self._current.failures if f.preflight and f.bad_nodes), None)
        if bad is not None:
            return self._end(RESUMABLE, bad, bad.exception, now)
        why = failure.exception if failure.rank is None else describe(failure)
        self._part_with_leaving(now)
        return self._go_on_after_check(f"the pre-flight failed: {why}; training starts without it", now)

    def _charge(self, failure: Failure, now: float) -> None:
        if self._current.checking and not failure.vanished:
            return self._settle_check(failure, now)
        if self._dev:
            return self._stand(describe(failure), now)
        does_without = self._does_without(failure)
        failure, verdict = self.charges.judge(failure, self._current, self.members, now, does_without=does_without)
        if isinstance(verdict, str):
            # A rank that ended too early has exit code 0, which would count as success.
            code = failure.exit_code or (1 if failure.early else RESUMABLE)
            return self._end(code, failure, f"{describe(failure)}; {verdict}", now)
        if does_without:
            self.charges.note_uncharged(verdict)
            self.said = describe(failure)
            return self._pause(0, now)
        self.said = f"{describe(failure)}; charged to {verdict.charged_to}, waiting {verdict.wait_seconds} s"
        place = failure.node_rank if failure.rank is None else self.members.place_of_rank(failure.rank, self._nproc)
        charged = failure._replace(
            node_rank=place, charged_to=verdict.charged_to or "", generation=self.generation
        )  # set now, because the next generation may have other members
        self.charges.charge(charged, verdict)
        return self._pause(verdict.wait_seconds, now)

    def _pause(self, seconds: float, now: float) -> None:
        """Begin the next generation after these seconds, when every node is connected."""
        if self._terminations.include_leader:
            return self._leave(now)
        self._part_with_leaving(now)
        self._enter("pausing", now, seconds)
        return self.tick(now)

    def _leave(self, now: float) -> None:
        """End this agent because of a termination. If no operator replaces the node, all nodes end."""
        if not self._has_operator:
            from ddpjob_core import rules

            unsaved = next((f for f in self._current.failures if rules.is_unsaved(f.exception)), None)
            if unsaved is not None:  # not 75, which would mean that the state was saved
                return self._end(unsaved.exit_code or 1, unsaved, f"told to stop; {describe(unsaved)}", now)
            return self._end(RESUMABLE, None, "told to stop", now)
        self._enter("over", now, None)
        others = "; the other nodes wait for a new leader" if len(self.nodes.places) > 1 else ""
        return self.orders.append(Leave(f"told to stop{others}"))

    def _stand(self, why: str, now: float, *, succeeded: bool = False) -> None:
        self._part_with_leaving(now)
        self._enter("standing", now, None)
        self.orders.append(Stand(why, succeeded))

    def _end(self, code: int, failure: Failure | None, why: str, now: float) -> None:
        self._enter("over", now, None)
        self.orders.append(EndOrder(code, failure, why))

    def _enter(self, state: State, now: float, seconds: float | None) -> None:
        self.state, self._since = state, now
        self._deadline = None if seconds is None else now + seconds


class Terminations:
    """Nodes whose termination was requested from outside. Failures that follow from a termination are not charged."""

    def __init__(self, leader: int, others_go_on: bool) -> None:
        """others_go_on: False if all nodes end when one leaves."""
        self._leader, self._others_go_on = leader, others_go_on
        self._requested: set[int] = set()  # nodes whose termination was requested in this generation
        self.leaving: set[int] = set()  # nodes that leave and have no new agent yet
        self.came_first = False  # True if a termination was requested before any failure

    @property
    def include_leader(self) -> bool:
        """True if node 0's agent must end too."""
        return self._leader in self.leaving if self._others_go_on else bool(self.leaving)

    def request(self, node: int) -> None:
        self.leaving.add(node)
        self._requested.add(node)

    def begin_generation(self) -> None:
        """Drop the requests, because they explain no failure of the next generation."""
        self._requested, self.came_first = set(), False

    def group_stops(self) -> None:
        """Record that the group is stopping."""
        self.came_first = bool(self._requested)

    def explain(self, failure: Failure) -> bool:
        """True if this failure, the root cause of the stop, follows from a termination."""
        if not self._others_go_on or self.came_first:
            return bool(self._requested)
        return bool(self._requested) and failure.precedence >= Precedence.RESUMABLE

    def __str__(self) -> str:
        return " and ".join(f"node {node} was told to stop" for node in sorted(self._requested))


def _listed(places: Sequence[int]) -> str:
    return ", ".join(map(str, places))


def describe(failure: Failure) -> str:
    """Return `rank 3 ended with exit code 7 in train.py:41 (ValueError: none)`, or `rank 3 was killed by SIGKILL`."""
    if failure.early:
        return f"rank {failure.rank} {failure.exception}"
    if failure.vanished:
        return f"node {failure.node_rank} is lost"
    if failure.stalled:
        return f"the group {failure.exception}"
    how = f"was killed by {failure.signal}" if failure.signal else f"ended with exit code {failure.exit_code}"
    how += f" in {failure.where}" if failure.where else ""
    return f"rank {failure.rank} {how}" + (f" ({failure.exception})" if failure.exception else "")
