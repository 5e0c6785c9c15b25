"""A model of `ddprun` in the pods: each node's agent starts its rank, and node 0's agent, or the one that the operator
has appointed, leads the others. The real `LeaderState` makes its decisions, with the budgets from its pod's environment
or the operator's answer; its posts and termination message are real too. Ranks, connections and time are modelled."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from model_area import Area
from model_memory import Loaded, Memories
from model_rescue import Kept
from model_training import HANGS, REPORT_SECONDS, SAVE_SECONDS, SYMPTOM, Failure, Process

from ddpjob.reporting.termination import encode
from ddpjob_core.budget import Budget, Grant
from ddpjob_core.failure_policy import PolicyRule
from ddpjob_core.failures import RESUMABLE_EXIT_CODE as RESUMABLE
from ddpjob_core.failures import Failure as RankFailure
from ddpjob_core.members import Members
from ddpjob_core.memory import numbered
from ddprun import asking, calls, options, posting
from ddprun import leader as leading
from ddprun.core.appointment import Appointment
from ddprun.core.leader_state import EndOrder, LeaderState, Leave, Over, StartOrder, Stop

if TYPE_CHECKING:
    from model_training import Training

RETRY_SECONDS = (0.3, 3.0)
# Seconds that a TCP connection survives without a network; ranks on a node that is cut off for less continue.
HELD_UP_SECONDS = 5.0
# Seconds after which all agents that can ask have heard of a new leader, even if some answers are lost.
HEARD_WITHIN_SECONDS = 90.0
SUPERSEDED = "ddpjob.Superseded: a newer generation has written"


@dataclass(eq=False)
class Life:
    """A generation: the ranks that meet at one port, under one leader."""

    leader: Agent
    turn: int
    """Number of the leader in the attempt."""
    generation: int
    number: int
    """Number among all generations that the job's agents have ever started."""
    members: Members
    ranks: dict[int, Agent] = field(default_factory=dict)
    started_at: float | None = None
    loaded: Loaded | None = None
    """The state with which the generation began."""
    step: float = 0.0
    """The furthest step that was made."""
    saved_step: int = 0
    """The step at which its ranks were stopped together for nodes that join; 0: they were not."""
    unheard_at: float = 0.0
    """When no agent could hear of a newer leader, at last."""
    held_up: float = 0.0
    stuck_at: float | None = None
    broken: bool = False
    ended_at: int | None = None
    """The furthest step of any rank, set when no more steps follow."""

    def __str__(self) -> str:
        return f"generation {self.generation} of {self.leader.process}"

    @property
    def in_memory(self) -> int:
        """Number of the generation in the nodes' memory."""
        return numbered(self.turn, self.generation)

    @property
    def agents(self) -> list[Agent]:
        """The agents in the order of their ranks."""
        return [self.ranks[node] for node in self.members]

    @property
    def is_complete(self) -> bool:
        """True if the ranks of all members have been started."""
        return len(self.ranks) == len(self.members)

    def rank(self, agent: Agent) -> int:
        """Return the rank of an agent. It is not its node's number if other nodes are missing."""
        return self.members.node_rank(agent.node)


@dataclass(eq=False)
class Link:
    """A connection between the leader and another agent. Each end notices separately that the other is gone."""

    leader: Agent
    follower: Agent
    open: set[Agent] = field(default_factory=set)
    lines: dict[Agent, list[Callable[[], None]]] = field(default_factory=dict)
    """Messages in flight to each agent, in order."""

    def other(self, agent: Agent) -> Agent:
        """Return the agent at the other end of the connection."""
        return self.follower if agent is self.leader else self.leader


@dataclass(eq=False)
class Agent:
    process: Process
    budget: Budget
    policy: tuple[PolicyRule, ...]
    grant: Grant | None
    """The budgets that the operator has granted to the pod."""
    leader: Appointment
    next_leader: Appointment | None = None
    asked: int = 0
    """Number of requests for the leader."""
    generation: int = -1
    """The last one that the agent has heard of."""
    members: Members = field(default_factory=Members)
    """The nodes of the last generation, if the agent took part in it."""
    lead: LeaderState | None = None
    """Set only on the leader."""
    links: dict[int, Link] = field(default_factory=dict)
    """By node of the other end."""
    life: Life | None = None
    runs: bool = False
    """True if the agent's rank is running."""
    stopped: bool = False
    """True if the agent was told to end its rank."""
    code: int | None = None
    """The exit code of the agent's rank."""
    failures: list[RankFailure] = field(default_factory=list)
    told: bool = False
    told_how: int = 143
    """The exit code of the agent's rank after SIGTERM."""
    deaf: bool = False
    """True if the agent's rank ignores SIGTERM."""
    done: bool = False
    alone_since: float = 0.0
    over: bool = False
    known: Any = None
    """What the receiver has last confirmed."""
    back_off: float = 0.0
    posts: int = 0
    posting: bool = False
    due: float | None = None
    """When the agent's leader state must be checked next."""
    area: Area = field(default_factory=Area)
    """The agent's memory."""
    kepts: list[Kept] = field(default_factory=list)
    """What each rank of the agent keeps in memory."""
    then: Callable[[], None] | None = None
    """What the agent does when its ranks have written the state or their time is over."""
    asked_at: float = 0.0
    """When the agent requested the state."""

    @staticmethod
    def of(process: Process, *, asks: bool) -> Agent:
        """Return the agent of a process, with the settings from its pod's environment. asks: if it asks who leads."""
        environ = process.environ
        first = 0 if asks and environ.get("DDPJOB_LEADER_APPOINTED") == "1" else 1
        return Agent(
            process=process,
            budget=options.budget(None, grant := options.granted(environ), environ),
            policy=options._policy(environ.get("DDPJOB_FAILURE_POLICY")),
            grant=grant,
            leader=Appointment(first, 0, "", None, grant),
        )

    @property
    def turn(self) -> int:
        """Number of this agent in its reports, if it leads."""
        return self.leader.term if self.leader.term > 1 else self.replacement

    @property
    def is_appointed(self) -> bool:
        return self.leader.term > 0 and self.leader.place == self.node

    @property
    def ask_seconds(self) -> float:
        if self.lead is not None:
            return asking.LEADER_SECONDS
        is_lost = not self.links and (self.generation >= 0 or not self.leader.term)
        return asking.LEADERLESS_SECONDS if is_lost else asking.FOLLOWER_SECONDS

    @property
    def kept(self) -> Kept | None:
        """The record of the agent's first rank; None if the agent has no ranks."""
        return self.kepts[0] if self.kepts else None

    @property
    def node(self) -> int:
        return self.process.rank

    @property
    def replacement(self) -> int:
        return self.process.replacement

    @property
    def spares(self) -> int:
        """Number of nodes that only wait, until another one is lost."""
        return options._count("DDPJOB_SPARES", self.process.environ)

    @property
    def code_when_told(self) -> int:
        return 143 if self.code is None else self.code

    @property
    def broken_grace_seconds(self) -> float:
        """Grace period of the ranks after another rank has failed."""
        said = self.process.environ.get("DDPJOB_RESTART_GRACE")
        return float(said) if said else options.BROKEN_GRACE_SECONDS

    @property
    def shutdown_seconds(self) -> float:
        return float(self.process.environ.get("PET_SHUTDOWN_TIMEOUT", options.SHUTDOWN_SECONDS))


class Agents:
    """All agents of a simulation, their messages and timers."""

    def __init__(self, training: Training, connected: Callable[[Process, Process], bool], memories: Memories) -> None:
        self.heard: Callable[[Process, bytes], bool] = lambda *_: False
        """Receives a post of a leader's agent; returns True if a receiver confirmed it."""
        self.asks: Callable[[Process], bool] = lambda _: False
        """Returns True if the agent of this process asks who leads."""
        self.told_by_operator: Callable[[Process], dict[str, Any] | None] = lambda _: None
        """Returns what the operator answers to an agent that asks who leads; None without an answer."""
        self.has_name: Callable[[Process], bool] = lambda _: True
        """Returns True if the DNS name of its rank resolves to it."""
        self.not_trained: dict[tuple[str, int], set[int]] = {}
        """By job uid and attempt, the nodes that were not in the group when its training ended."""
        self.shrunk = self.grown = self.appointed = 0
        """How often a generation had fewer or more nodes than the one before, and an appointed agent has led."""
        self.charged: dict[tuple[str, int, int], dict[str, int]] = {}
        """By job uid, attempt and number of the leader: the real charges of each leader."""
        self._leaders: dict[tuple[str, int, int], Agent] = {}
        """By job uid, attempt and number of the leader."""
        self._training, self._connected, self._memories = training, connected, memories
        self._loop, self._faults, self._random = training.loop, training.faults, training.random
        self._all: dict[str, Agent] = {}
        self._lives: dict[str, list[Life]] = {}
        """By job uid, the generations that may still train."""
        self._numbers: dict[str, int] = {}

    # ---------------------------------------------------------------- events from outside

    def begin(self, process: Process) -> None:
        """Start an agent, because its container has started."""
        agent = self._all[process.uid] = Agent.of(process, asks=self.asks(process))
        self._later(0.05, 0.8, self._ready, agent)

    def told(self, process: Process, fault: str) -> None:
        """Send SIGTERM to the container of an agent."""
        agent = self._all[process.uid]
        if agent.over or agent.told:
            return None
        agent.told, agent.deaf = True, fault == "ignored"
        agent.told_how = {"ends with 0": 0, "resumable": RESUMABLE}.get(fault, 143)
        if agent.runs:
            self._signal(agent, patient=True)
        if agent.lead is not None:
            agent.lead.termination_requested(agent.node, self._loop.time())
            return self._turn(agent)
        self._say(agent, lambda lead, now: lead.termination_requested(agent.node, now), of_now=False)
        return None if agent.runs else self._end(agent, agent.code_when_told)

    def left(self, process: Process) -> None:
        """End an agent, because its container has ended with all its processes."""
        agent = self._all[process.uid]
        agent.over = True
        self._breaks(agent)
        for link in list(agent.links.values()):
            self._hang_up(link, agent)

    def kill(self, process: Process, reason: str = "Error") -> None:
        """Kill the agent itself, not its rank."""
        if process.alive:
            self._training.application_failed(process)
            self._training.ends(process, 137, reason, "")

    def disconnected(self, node: str) -> None:
        """Let peers give up the agents of a node that is cut off for too long."""
        for agent in list(self._all.values()):
            if agent.process.node == node and not agent.over:
                for link in list(agent.links.values()):
                    self._later(leading.SILENT_SECONDS, leading.SILENT_SECONDS + 5, self._check, link)

    def _check(self, link: Link) -> None:
        if not self._connected(link.leader.process, link.follower.process):
            for agent in (link.leader, link.follower):  # in this order, so that a seed repeats
                self._lost(link, agent)

    # ---------------------------------------------------------------- agents

    def _ready(self, agent: Agent) -> None:
        if agent.over:
            return None
        agent.alone_since = self._loop.time()
        if self.asks(agent.process):
            self._ask(agent)
        return self._look(agent)

    def _lead(self, agent: Agent) -> None:
        """Let an agent lead, as `ddprun.leader.Leader` begins."""
        process, grant, term, now = agent.process, agent.leader.grant, agent.leader.term, self._loop.time()
        place = process.job_uid, process.attempt, agent.turn
        before, self._leaders[place] = self._leaders.get(place), agent
        if before is not None and before.lead is not None and not before.over:
            self._training.wrong.append(f"{before.process} and {process} lead at once as number {agent.turn}")
        self.appointed += term > 1
        agent.lead = LeaderState(
            Members(range(process.nodes)),
            agent.budget if grant is None else Budget.of(grant, agent.budget.max_restarts),
            options.JOIN_SECONDS,
            now,
            least=process.least,
            spares=agent.spares,
            last_call_seconds=leading.RECALL_SECONDS if term > 1 else options.LAST_CALL_SECONDS,
            snooze_seconds=options.SNOOZE_SECONDS,
            policy=agent.policy,
            has_operator=agent.grant is not None,
            furthest_step=0 if grant is None else grant.step,
            leader=agent.node,
            turn=agent.turn,
            survivors=agent.leader.survivors(agent.members),
        )
        agent.lead.joined(agent.node, now, agent.generation, agent.replacement, grant=grant)
        self._turn(agent)

    def _look(self, agent: Agent) -> None:
        """Lead if the agent is appointed. Otherwise search for the leader: by node 0's DNS name, which may lead to an
        old agent, or at the address of the appointed one."""
        if agent.over or agent.links or agent.runs or agent.lead is not None:
            return None
        if agent.told:
            return self._end(agent, agent.code_when_told)
        if agent.is_appointed:
            return self._lead(agent)
        if self._loop.time() >= agent.alone_since + options.JOIN_SECONDS:
            return self._end(agent, 0 if agent.done else RESUMABLE)
        found = [a for a in self._all.values() if self._is_leader_of(a, agent)]
        self._random.shuffle(found)
        if found:
            self._later(0.01, 0.3, self._greet, found[0], agent)
        else:
            self._later(*RETRY_SECONDS, self._look, agent)
        return None

    def _is_leader_of(self, one: Agent, other: Agent) -> bool:
        here = one.lead is not None and not one.over and one.process.run == other.process.run
        is_named = self.has_name(one.process) and one.node == 0
        is_there = is_named if other.leader.term == 1 else one.process.uid == other.leader.host
        return here and is_there and other.leader.term > 0 and self._connected(one.process, other.process)

    # ---------------------------------------------------------------- who leads

    def _ask(self, agent: Agent, number: int | None = None) -> None:
        """Ask who leads, and again later. number: of the request that this one follows; None: of any."""
        if agent.over or (number is not None and number != agent.asked):
            return
        agent.asked += 1
        if (fault := self._faults.at("ask")) != "lost":
            late = self._faults.number("ask", 5, 25) if fault == "late" else self._random.uniform(0.01, 0.25)
            self._later(0.01, 0.25, self._asks, agent, late)
        self._loop.call_later(agent.ask_seconds, self._ask, agent, agent.asked)

    def _asks(self, agent: Agent, seconds: float) -> None:
        answer = self.told_by_operator(agent.process)
        if answer is not None and not agent.over:
            self._loop.call_later(seconds, self._take, agent, Appointment.read(json.dumps(answer).encode()))

    def _take(self, agent: Agent, answer: Appointment) -> None:
        if answer.replaces(agent.next_leader or agent.leader):
            agent.next_leader = answer
            self._change_leader(agent)
        elif answer.term == agent.leader.term and answer.grant is not None and agent.lead is not None:
            agent.lead.granted(answer.grant)

    def _change_leader(self, agent: Agent) -> None:
        """Follow the next leader, or lead, after all ranks that are being stopped have ended here."""
        leader = agent.next_leader
        if leader is None or agent.over or (agent.runs and (agent.stopped or agent.failures)):
            return None
        if leader.term < agent.leader.term:
            self._training.wrong.append(f"{agent.process} goes back from term {agent.leader.term} to {leader.term}")
        if agent.lead is not None:
            agent.generation, agent.lead, agent.due = agent.lead.generation, None, None
            agent.posts, agent.posting, agent.back_off = agent.posts + 1, False, 0.0
        for link in list(agent.links.values()):
            self._hang_up(link, agent)
        agent.leader, agent.next_leader, agent.alone_since = leader, None, self._loop.time()
        if not agent.runs:
            return self._look(agent)
        agent.stopped = True
        return self._end_rank(agent, patient=False)

    def _greet(self, leader: Agent, agent: Agent) -> None:
        lead = leader.lead
        if agent.over or agent.links or agent.runs or agent.lead is not None:
            return
        if is_outdated := agent.leader.term > leader.leader.term:
            self._ask(leader)
        if lead is None or leader.over or is_outdated or lead.is_outdated(agent.node, agent.replacement):
            self._later(*RETRY_SECONDS, self._look, agent)
            return
        if (old := leader.links.get(agent.node)) is not None:
            self._drop(old, leader)
        link = Link(leader, agent, {leader, agent}, {leader: [], agent: []})
        leader.links[agent.node] = agent.links[leader.node] = link
        present = lead.generation
        lead.joined(
            agent.node,
            self._loop.time(),
            agent.generation,
            agent.replacement,
            nodes=agent.process.nodes,
            grant=agent.grant,
        )
        if present > agent.generation:  # the leader's welcome tells the agent this number
            agent.generation, agent.members = present, Members()
        if agent.told:
            self._say(agent, lambda lead, now: lead.termination_requested(agent.node, now), of_now=False)
        self._turn(leader)

    def _end(self, agent: Agent, code: int, failure: RankFailure | None = None, *, ended: bool = False) -> None:
        """End the agent, with its final report."""
        if agent.over:
            return
        agent.over = True
        is_mine = _is_mine(agent, failure)
        account = (
            self._account(agent)
            if agent.lead is not None and (agent.lead.charges.restarts or (code and ended))
            else None
        )
        if agent.lead is not None and ended and not code and agent.process.is_elastic:
            account = {**self._account(agent), "members": agent.lead.members.text}
            place = agent.process.job_uid, agent.process.attempt
            self.not_trained[place] = {*agent.lead.nodes.places}.difference(agent.lead.members)
        group = ({"ended": True} if ended else {}) | ({"agent": account} if account else {})
        said = failure.as_dict() if failure is not None and is_mine and code else {}
        message = encode({**said, **group}).decode() if said or (group and (code or account)) else ""
        if agent.lead is not None:
            self._post(agent, last=True)
        self._later(0.02, 1.0, self._exit, agent, code, message)

    def _exit(self, agent: Agent, code: int, message: str) -> None:
        if agent.process.alive:
            self._training.ends(agent.process, code, "Error" if code else "Completed", message)

    # ---------------------------------------------------------------- the leader

    def _turn(self, leader: Agent) -> None:
        lead, now = leader.lead, self._loop.time()
        assert lead is not None, "only the leader leads"
        if leader.over:
            return
        lead.tick(now)
        while lead.orders and not leader.over:
            self._carry_out(leader, lead.orders.pop(0))
        process = leader.process
        self.charged[process.job_uid, process.attempt, leader.turn] = lead.charges.counts
        if leader.over:
            return
        self._check_that_it_goes_on(leader, lead)
        if lead.deadline is not None and lead.deadline != leader.due:
            leader.due = lead.deadline
            self._loop.call_later(max(0.0, lead.deadline - now), self._turn_if_due, leader, lead.deadline)
        if (
            lead.charges.failures
            and not leader.back_off
            and not leader.posting
            and leader.known != self._account(leader)
        ):
            self._post(leader)

    def _check_that_it_goes_on(self, leader: Agent, lead: LeaderState) -> None:
        """Check that a group with enough nodes waits for no further one."""
        here = [agent for agent in (leader, *(link.follower for link in leader.links.values())) if not agent.told]
        needed = len(lead.nodes.places) - leader.spares
        if lead.state == "gathering" and len(here) >= needed:
            self._training.wrong.append(f"{len(here)} nodes are with {leader.process}, {needed} train, and all wait")

    def _turn_if_due(self, leader: Agent, deadline: float) -> None:
        if leader.due == deadline:
            leader.due = None
            self._turn(leader)

    def _carry_out(self, leader: Agent, order: Any) -> None:
        followers = list(leader.links.values())
        if isinstance(order, StartOrder):
            life = self._new_life(leader, order)
            for link in followers:
                if link.follower.node in order.members:
                    self._tell(link, lambda agent: self._start(agent, life))
            self._start(leader, life)
        elif isinstance(order, Stop):
            self._save_together(leader, order)
            for link in followers:
                if link.follower.node in order.nodes:
                    self._tell(link, lambda agent: self._stop(agent, order))
            self._stop(leader, order)
        elif isinstance(order, EndOrder):
            for link in followers:
                self._tell(link, lambda agent: self._end(agent, _own_code(agent, order), order.failure, ended=True))
            self._end(leader, _own_code(leader, order), order.failure, ended=True)
        elif not isinstance(order, Over):  # tests with real processes cover hangs after the end
            assert isinstance(order, Leave), order
            self._end(leader, leader.code_when_told)

    def _save_together(self, leader: Agent, order: Stop) -> None:
        """Let all ranks save after the same step, because nodes join them. A rank that was told to stop may die."""
        life = leader.life
        if not order.patient or life is None or not self.trains(life) or not self._memories.script.folder:
            return
        if not any(agent.told for agent in life.ranks.values()):
            step = int(min(self._step(life), self._training.seconds))
            life.saved_step = step if self._memories.save(life, step) else 0
            self._stands(life)

    def _account(self, leader: Agent) -> dict[str, Any]:
        lead = leader.lead
        assert lead is not None, "only the leader leads"
        return {"replacement": leader.turn, "generation": max(0, lead.generation), "restarts": lead.charges.counts}

    # ---------------------------------------------------------------- posts

    def _post(self, leader: Agent, *, last: bool = False) -> None:
        """Post all restarts that the leader has counted until they are confirmed, and post them again every minute."""
        lead = leader.lead
        assert lead is not None, "only the leader leads"
        if not lead.charges.failures or (leader.over and not last):
            return
        leader.posts, leader.posting = leader.posts + 1, True
        account = self._account(leader)
        failures = list(map(leading.reported, lead.charges.failures))
        place = {"attempt": leader.process.attempt, "rank": 0, "nodeRank": 0, "step": lead.charges.furthest_step}
        body = posting.encode({**place, "agent": {**account, "failures": failures}})
        fault = self._faults.at("post")
        if fault != "lost":
            seconds = self._faults.number("post", 5, 25) if fault == "late" else self._random.uniform(0.02, 0.5)
            self._loop.call_later(seconds, self._arrives, leader, account, body, fault == "lost answer", leader.posts)
        # All requests that are still open fail within half a minute.
        self._loop.call_later(calls.SECONDS_MAX, self._failed, leader, leader.posts)

    def _arrives(self, leader: Agent, account: Any, body: bytes, is_unheard: bool, number: int) -> None:
        if not self.heard(leader.process, body):
            self._failed(leader, number)
        elif not is_unheard and leader.posts == number:
            leader.known, leader.back_off, leader.posting = account, 0.0, False
            leader.posts += 1
            self._loop.call_later(posting.REPEAT_SECONDS, self._repeat, leader, leader.posts)
            if not leader.over and leader.known != self._account(leader):
                self._post(leader)

    def _failed(self, leader: Agent, number: int) -> None:
        if leader.posts == number:
            leader.posts, leader.posting = leader.posts + 1, False
            most = posting.BACK_OFF_SECONDS_MAX
            leader.back_off = min(2 * leader.back_off or posting.BACK_OFF_SECONDS, most)
            self._loop.call_later(leader.back_off, self._repeat, leader, leader.posts)

    def _repeat(self, leader: Agent, number: int) -> None:
        if leader.posts == number:
            self._post(leader)

    # ---------------------------------------------------------------- ranks

    def _new_life(self, leader: Agent, order: StartOrder) -> Life:
        uid = leader.process.job_uid
        self._numbers[uid] = number = self._numbers.get(uid, 0) + 1
        life = Life(leader, leader.turn, order.generation, number, order.members)
        assert leader.lead is not None, "it has ordered the start"
        if len(order.members) > len(leader.lead.nodes.places) - leader.spares:
            self._training.wrong.append(f"{life} has {len(order.members)} nodes, and {leader.spares} were to wait")
        if len(order.members) < leader.process.least:
            self._training.wrong.append(f"{life} has {len(order.members)} of at least {leader.process.least} nodes")
        if leader.life is not None:
            life.saved_step, before = leader.life.saved_step, leader.life.members
            self.shrunk += len(order.members) < len(before)
            self.grown += len(order.members) > len(before)
        self._lives.setdefault(uid, []).append(life)
        return life

    def _start(self, agent: Agent, life: Life) -> None:
        assert not agent.runs, "one generation at a time"
        agent.life, agent.runs, agent.stopped, agent.done = life, True, False, False
        agent.generation, agent.members = life.generation, life.members
        agent.code, agent.failures = None, []
        life.ranks[agent.node] = agent
        failure = self._training.fails(agent.process, life.number)
        if failure is not None and failure.after_seconds == 0:
            self._loop.call_later(0.1, self._fail, agent, life, failure)
        if agent.told:
            self._signal(agent, patient=True)
        if life.is_complete:
            self._later(0.2, 2, self._train, life)

    def _stop(self, agent: Agent, order: Stop) -> None:
        if agent.generation != order.generation or not agent.runs:
            return self._has_stopped(agent)
        if agent.stopped and agent.failures:
            return None  # the agent is ending processes that a rank has left behind
        agent.stopped = True
        return self._end_rank(agent, patient=order.patient)

    def _end_rank(self, agent: Agent, *, patient: bool) -> None:
        """Signal the agent's rank. Without a request to save, the rank first writes its state into memory."""
        life = agent.life
        if patient or agent.told or life is None or life.loaded is None:
            return self._signal(agent, patient=patient)
        self._stands(life)
        return self._memories.rescues.order(agent, lambda: self._signal_if(agent, life))

    def _signal_if(self, agent: Agent, life: Life) -> None:
        if agent.life is life and agent.runs and not agent.over:
            self._signal(agent, patient=False)

    def _stands(self, life: Life) -> None:
        """Stop a generation at its present step."""
        if life.loaded is not None and life.ended_at is None:
            self._memories.stop(life, int(min(self._step(life), self._training.seconds)))

    def rank_killed(self, agent: Agent, life: Life, kept: Kept) -> None:
        """Send SIGKILL to one rank alone."""
        self._one_ends(agent, life, 137, kept=kept)

    def _signal(self, agent: Agent, *, patient: bool) -> None:
        """Send SIGTERM to the agent's rank, and SIGKILL after the grace period."""
        life, seconds = agent.life, agent.shutdown_seconds if patient else agent.broken_grace_seconds
        if not agent.deaf:
            code = agent.told_how if agent.told else RESUMABLE if patient else 143
            self._later(0.01, min(3.0, seconds), self._rank_ends, agent, life, code)
        self._loop.call_later(seconds, self._rank_ends, agent, life, 137)

    def _fail(self, agent: Agent, life: Life, failure: Failure) -> None:
        if agent.life is not life or not agent.runs or agent.over:
            return None
        if failure.code == HANGS:
            return self._hang(life)
        if failure.reason == "OOMKilled":  # the kernel kills all processes of the container
            return self.kill(agent.process, failure.reason)
        self._training.application_failed(agent.process)
        return self._one_ends(agent, life, failure.code, failure.message.rpartition("\n")[2])

    def _one_ends(self, agent: Agent, life: Life, code: int, exception: str = "", kept: Kept | None = None) -> None:
        """End one of the agent's ranks: `kept`, or any if it is None. The others write the state before they end."""
        if agent.life is not life or not agent.runs or agent.over:
            return
        if life.loaded is not None:
            self._stands(life)
        if not self._memories.rescues.lose(agent, life, kept, raises=code == 1):
            self._rank_ends(agent, life, code, exception)
            return
        self._break(life)
        if not agent.stopped:
            agent.stopped, agent.code = True, code
            agent.failures = failures = [_failure(life.rank(agent), code, exception, self._loop.time())]
            self._say(agent, lambda lead, now: lead.failed(agent.node, failures, now))
            self._end_rank(agent, patient=False)

    def _rank_ends(self, agent: Agent, life: Life, code: int, exception: str = "") -> None:
        """Let all ranks of an agent end."""
        if agent.life is not life or not agent.runs or agent.over:
            return
        if code:
            self._stands(life)
        if code == 1:
            self._memories.rescues.raises(agent)
        agent.runs, agent.code = False, code
        if code:
            self._breaks(agent)
        if code and not agent.stopped:
            agent.failures = [_failure(life.rank(agent), code, exception, self._loop.time())]
            failures = agent.failures
            self._say(agent, lambda lead, now: lead.failed(agent.node, failures, now))
        if agent.over:  # this failure has ended the job
            return
        if agent.told and agent.lead is None:
            if not agent.failures and not agent.stopped:
                self._say(agent, lambda lead, now: lead.finished(agent.node, now))
            self._end(agent, agent.code_when_told)
        elif agent.stopped or agent.failures:
            self._has_stopped(agent)
        else:
            agent.done = True
            self._say(agent, lambda lead, now: lead.finished(agent.node, now))

    def _has_stopped(self, agent: Agent) -> None:
        failures = agent.failures
        self._say(agent, lambda lead, now: lead.stopped(agent.node, failures, now))
        if agent.next_leader is not None:
            self._loop.call_later(0.01, self._change_leader, agent)
        if agent.lead is None and not agent.links:
            self._look(agent)

    def _breaks(self, agent: Agent) -> None:
        """Remove an agent's rank, and let the other ranks notice the closed connection."""
        agent.runs = False
        if agent.life is not None:
            self._break(agent.life)

    def _break(self, life: Life) -> None:
        if life.broken:
            return
        self._stands(life)
        life.broken = True
        if life.started_at is not None:
            for peer in life.ranks.values():
                self._later(0.05, 6, self._rank_ends, peer, life, 1, SYMPTOM)

    # ---------------------------------------------------------------- training

    def trains(self, life: Life) -> bool:
        """True if a generation makes steps: all its ranks are alive and reach each other."""
        if life.started_at is None or life.broken:
            return False
        ranks = list(life.ranks.values())
        return all(a.life is life and a.runs and not a.over for a in ranks) and self._is_together(life)

    def _is_together(self, life: Life) -> bool:
        ranks = [a.process for a in life.ranks.values()]
        return all(self._connected(ranks[0], other) for other in ranks[1:])

    def _train(self, life: Life) -> None:
        first = life.agents[0]
        if (
            life.broken
            or life.ended_at is not None
            or life.started_at is not None
            or not all(a.runs and not a.over for a in life.ranks.values())
        ):
            return
        if not self._is_together(life):
            self._loop.call_later(HELD_UP_SECONDS, self._train, life)
            return
        if not self._memories.save(life, 0):
            self._rank_ends(first, life, 1, SUPERSEDED)
            return
        life.loaded = self._memories.load(life)
        life.started_at, life.step = self._loop.time(), life.loaded.state.step
        if life.step < life.saved_step:
            self._training.wrong.append(f"{life} repeats steps after {life.step}: all stopped at {life.saved_step}")
        if life.loaded.assumed and self._memories.script.names_more:
            self._training.application_failed(first.process)
            for agent in life.ranks.values():
                self._later(
                    0, 0.3, self._rank_ends, agent, life, 1, "ddpjob.StateError: epoch: the state in memory has …"
                )
            return
        for agent in life.ranks.values():
            failure = self._training.fails(agent.process, life.number)
            if failure is not None and failure.after_seconds:
                self._loop.call_later(failure.after_seconds, self._fail, agent, life, failure)
        self._loop.call_later(0.2, self._report, life)
        self._advance(life)

    def _advance(self, life: Life) -> None:
        """Save periodically, and complete the training. Do nothing while the ranks cannot reach each other."""
        has_ended = life.broken or life.stuck_at is not None or life.ended_at is not None
        if has_ended or not all(a.runs and not a.over for a in life.ranks.values()):
            return
        if not self._is_together(life):
            life.held_up += HELD_UP_SECONDS
            self._loop.call_later(HELD_UP_SECONDS, self._advance, life)
            return
        self._check_alone(life)
        left = self._training.seconds - self._step(life)
        if left <= 0:
            for agent in life.ranks.values():
                self._later(0, 0.5, self._rank_ends, agent, life, 0)
        elif not self._memories.save(life, int(self._step(life))):
            self._rank_ends(life.agents[0], life, 1, SUPERSEDED)
        else:
            self._loop.call_later(max(0.1, min(SAVE_SECONDS, left)), self._advance, life)

    def _check_alone(self, life: Life) -> None:
        """Check that no other generation of the attempt trains, unless it cannot know of this one."""
        uid, attempt = life.leader.process.job_uid, life.leader.process.attempt
        alive = self._lives[uid] = [
            other for other in self._lives[uid] if not other.broken and not other.leader.process.terminated
        ]
        for other in alive:
            is_same = other is life or other.leader.process.attempt != attempt
            if not is_same and self.trains(other) and not self._is_unheard(*sorted((life, other), key=_age)):
                self._training.wrong.append(
                    f"{life} and {other} train at the same time: two groups write into one checkpoint, and the attempt "
                    f"that keeps an old one out is the same: {_names(life)} and {_names(other)}"
                )

    def _is_unheard(self, older: Life, newer: Life) -> bool:
        """True if no agent of the older generation could hear of the newer one's leader until a moment ago."""
        assert newer.started_at is not None, "it trains"
        if not any(map(self._can_hear, older.agents)):
            older.unheard_at = self._loop.time()
        since = max(newer.started_at, older.unheard_at)
        is_appointed = newer.leader.process.is_elastic and newer.turn > older.turn
        return is_appointed and self._loop.time() < since + HEARD_WITHIN_SECONDS

    def _can_hear(self, agent: Agent) -> bool:
        """True if an agent can hear of a newer leader, or if its kubelet can hear that its pod was deleted."""
        if not self.asks(agent.process):
            return self._training.reachable(agent.process)
        answer = self.told_by_operator(agent.process)
        return answer is not None and answer["term"] > agent.leader.term

    def _step(self, life: Life) -> float:
        """Return the current step; one second is one step."""
        assert life.started_at is not None, "it trains"
        assert life.loaded is not None, "it has loaded"
        if life.ended_at is None:
            until = self._loop.time() if life.stuck_at is None else life.stuck_at
            life.step = max(life.step, life.loaded.state.step + until - life.started_at - life.held_up)
        return life.step

    def _report(self, life: Life) -> None:
        if self._training.reports is None:
            return
        alive = [a for a in life.ranks.values() if a.life is life and a.runs and not a.over]
        for agent in alive:
            self._training.reports(agent.process, int(self._step(life)), life)
        if alive and not life.broken:
            self._loop.call_later(REPORT_SECONDS, self._report, life)

    def _hang(self, life: Life) -> None:
        if life.stuck_at is not None or not self.trains(life):
            return
        life.stuck_at = self._loop.time()
        first = life.agents[0].process
        self._training.hung.add((first.job_uid, -1000 - life.number))
        limit = first.environ.get("DDPJOB_STALL_TIMEOUT")
        if limit and self._faults.at("watchdog") != "blind":  # "blind": only the operator detects the hang, later
            self._loop.call_later(float(limit), self._found_hanging, life)

    def _found_hanging(self, life: Life) -> None:
        lead = life.leader.lead
        if lead is not None and not life.leader.over and lead.generation == life.generation and not life.broken:
            stalled = RankFailure(0, exit_code=RESUMABLE, exception="made no step", stalled=True)
            lead.failed(life.leader.node, [stalled], self._loop.time())
            self._turn(life.leader)

    # ---------------------------------------------------------------- connections

    def _say(self, agent: Agent, what: Callable[[LeaderState, float], None], *, of_now: bool = True) -> None:
        """Send a message to the leader, which may be the agent. of_now: ignore the message in a later generation."""
        if agent.lead is not None:
            what(agent.lead, self._loop.time())
            return self._turn(agent)
        link, generation = next(iter(agent.links.values()), None), agent.generation
        if link is None:
            return None

        def hear(leader: Agent) -> None:
            lead = leader.lead
            if lead is not None and leader.links.get(agent.node) is link:
                if generation == lead.generation or not of_now:
                    what(lead, self._loop.time())
                self._turn(leader)

        return self._send(link, link.leader, lambda: hear(link.leader))

    def _tell(self, link: Link, what: Callable[[Agent], None]) -> None:
        self._send(link, link.follower, lambda: what(link.follower))

    def _send(self, link: Link, to: Agent, line: Callable[[], None]) -> None:
        link.lines[to].append(line)
        if len(link.lines[to]) == 1:
            self._later(0.002, 0.05, self._deliver, link, to)

    def _deliver(self, link: Link, to: Agent) -> None:
        if to.over or to not in link.open:
            return
        if not self._connected(link.leader.process, link.follower.process):
            self._loop.call_later(1.0, self._deliver, link, to)
            return
        line, lines = link.lines[to][0], link.lines[to]
        line()
        lines.pop(0)
        if lines:
            self._later(0.002, 0.05, self._deliver, link, to)

    def _hang_up(self, link: Link, agent: Agent) -> None:
        """Close this end of a connection. The other end notices after all earlier messages, or by the silence."""
        link.open.discard(agent)
        if agent.links.get(link.other(agent).node) is link:
            del agent.links[link.other(agent).node]
        other = link.other(agent)
        if other in link.open:
            self._send(link, other, lambda: self._lost(link, other))
            self._loop.call_later(leading.SILENT_SECONDS, self._lost, link, other)

    def _drop(self, link: Link, leader: Agent) -> None:
        """Close a connection on the leader's side, and let the leader treat its node as lost."""
        self._hang_up(link, leader)
        lead, node = leader.lead, link.follower.node
        assert lead is not None, "only the leader leads"
        only_waits = lead.state == "running" and node not in lead.members
        lead.lost(node, self._loop.time())
        if only_waits and lead.state != "running":
            self._training.wrong.append(f"node {node} only waited, and its end stops all ranks")

    def _lost(self, link: Link, agent: Agent) -> None:
        """Let this end of a connection notice that the other is gone."""
        if agent.over or agent not in link.open:
            return None
        if agent is link.leader:
            self._drop(link, agent)
            return self._turn(agent)
        self._hang_up(link, agent)
        agent.alone_since = self._loop.time()
        if self.asks(agent.process):
            self._loop.call_later(agent.ask_seconds, self._ask, agent)
        if agent.runs:
            agent.stopped = True
            return self._end_rank(agent, patient=agent.told or agent.code == RESUMABLE)
        return self._look(agent)

    def _later(self, low: float, high: float, call: Callable[..., Any], *arguments: Any) -> None:
        self._loop.call_later(self._random.uniform(low, high), call, *arguments)


def _failure(rank: int, code: int, exception: str, at: float) -> RankFailure:
    return RankFailure(
        rank,
        exit_code=code,
        signal={137: "SIGKILL", 139: "SIGSEGV", 134: "SIGABRT", 143: "SIGTERM"}.get(code, ""),
        exception=exception,
        time=1e9 + at,
        resumable=code == RESUMABLE,
        symptom=exception == SYMPTOM,
    )


def _own_code(agent: Agent, order: EndOrder) -> int:
    if order.code == 0:
        return 0
    if agent.told:
        return agent.code_when_told
    return order.code if _is_mine(agent, order.failure) else RESUMABLE


def _is_mine(agent: Agent, failure: RankFailure | None) -> bool:
    return failure is not None and agent.life is not None and failure.rank == agent.life.rank(agent)


def _age(life: Life) -> tuple[int, int]:
    return (life.turn, life.generation)


def _names(life: Life) -> list[str]:
    return [str(agent.process) for agent in life.ranks.values()]
