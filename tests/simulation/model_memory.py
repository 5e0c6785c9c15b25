"""A model of the memory in which a state outlives its ranks: what each agent holds, and what a generation begins with.

Which state counts is the real rule (`ddpjob.core.memory`). The model has what surrounds it: ranks at a boundary or
within the optimizer's step, areas that are written in parts, agents that are lost. It knows what no rank does: in which
life each part was made.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ddpjob.core import memory
from ddpjob.core.memory import Found, Held, Mark, Version

if TYPE_CHECKING:
    from model_agents import Agent, Life
    from model_training import Training

PARTS = 3
"""Of an area; a writer may die between any two."""
PART_SECONDS = (0.01, 0.1)
BOUNDARY_SECONDS = (0.001, 0.04)
"""From within the optimizer's step to the next boundary."""
LIMIT_SECONDS = memory.limit_seconds(0)
SLOW_SECONDS = (0.3, 1.5)
"""For a part, on a node whose processor is not given to it."""
SUMMED = 0.3
"""How often a group ends after the gradients have reached all its ranks: each may then make the step by itself."""
PROOF_STEPS = 3
"""A node's ranks prove for so many steps that nothing large changes outside of them, before anything is held."""
BYTES, BYTES_MORE = 300, 301
"""Of what `load` names, and of what `save` does where that is more."""


@dataclass(frozen=True)
class Script:
    """How a script uses its Snapshot."""

    memory: bool = True
    folder: bool = True
    all_save: bool = True
    """Else rank 0 alone does."""
    names_more: bool = False
    """Whether `save` names more than `load` does. The script cannot go on without that."""


class State(NamedTuple):
    """What the ranks of a life had at a step."""

    life: int
    """Its number; the next one goes on with this state until it has made a step."""
    step: int


NOTHING = State(0, 0)
TORN = State(-1, -1)
"""Of a rank within its optimizer's step."""


@dataclass
class Area:
    """The memory of one agent. It goes with it."""

    parts: list[State] = field(default_factory=lambda: [NOTHING] * PARTS)
    held: Held | None = None
    """What its cells say."""
    slots: list[Version] = field(default_factory=list)
    """The last two boundaries of its rank."""
    proven: bool = False
    writer: Life | None = None
    """The truth: in which life all its parts were written; None: they were not."""

    @property
    def mark(self) -> Mark | None:
        """As `Shared.mark`."""
        if len(self.slots) < 2 or self.slots[0].generation != self.slots[1].generation:
            return None
        before, last = sorted(self.slots)
        return Mark(last.generation, last.step, before.step)

    def note(self, version: Version) -> None:
        """What is small, into the older of the two slots."""
        if version not in self.slots:
            self.slots = [*sorted(self.slots)[-1:], version]

    def begin(self, held: Held) -> None:
        """The first part is about to be written; until the last one is, nothing is there."""
        self.held = self.writer = None

    def end(self, held: Held, life: Life) -> None:
        """The last part was written."""
        self.held, self.writer = held, life


@dataclass(eq=False)
class Kept:
    """What a rank keeps from its `load` on."""

    life: Life
    first: int
    """The first boundary at which it is noted."""
    is_on: bool = True
    assumed: bool = False
    loads: int = 0
    """How often the state that it began with was loaded from memory."""
    clock: int = 0
    """Once its group has stopped."""
    written: int = -1
    """How many parts; -1: it has not begun."""
    answer: int = memory.NONE
    then: Callable[[], None] | None = None
    """What its agent does when it has answered, or its time is over."""


class Saved(NamedTuple):
    """The newest state in a folder."""

    version: Version
    state: State
    life: Life


class Loaded(NamedTuple):
    """What a life begins with."""

    state: State
    origin: str
    """Where it was; empty: nowhere."""
    ranks: tuple[int, ...] = ()
    """On whose nodes, where it was in memory."""
    assumed: bool = False


class Memories:
    """Those of all agents of a simulation, and the folders of their jobs."""

    def __init__(
        self, training: Training, script: Script, checked: Callable[[Life, Loaded, Saved | None], None]
    ) -> None:
        """checked: called with what a life is about to begin with, before anything is counted."""
        self.script, self._checked, self._training = script, checked, training
        self._loop, self._faults = training.loop, training.faults
        self._random = random.Random(f"{training.faults.seed} memory")
        self.saved: dict[str, Saved] = {}
        """By job uid, what its folder has."""

    # ---------------------------------------------------------------- load and save

    def load(self, life: Life) -> Loaded:
        """All ranks take the newest state that counts, as `Snapshot.load` does."""
        agents = [life.ranks[node] for node in sorted(life.ranks)]
        attempt, uid = life.leader.process.attempt, life.leader.process.job_uid
        saved = self.saved.get(uid)
        found = self._found(agents, Version(attempt, life.generation, 0))
        if found is None or memory.is_newer(saved and saved.version, found.held):
            loaded = Loaded(NOTHING, "") if saved is None else Loaded(saved.state, "/snapshots")
            self._checked(life, loaded, saved)
            loads, first = 0, loaded.state.step + 1
        else:
            ranks = ", ".join(map(str, found.ranks))
            state = agents[found.ranks[0]].area.parts[0]
            loaded = Loaded(state, f"the memory on the nodes of ranks {ranks}", found.ranks, found.held.assumed)
            self._checked(life, loaded, saved)
            loads, first = found.held.loads + 1, found.held.version.step
            for area in (agents[rank].area for rank in found.ranks):
                assert area.held is not None, "it was found there"
                area.held = area.held._replace(loads=area.held.loads + 1)
        for agent in agents:
            agent.kept = self._kept(life, loaded, first, loads)
            if loads and agent.kept.is_on:
                agent.area.note(Version(attempt, life.generation, first))
        return loaded

    def _found(self, agents: list[Agent], present: Version) -> Found | None:
        """In memory: the area of one rank, and of any rank what is small."""
        if not self.script.memory:
            return None
        found = memory.newest([a.area.held for a in agents], present, (), [a.area.mark for a in agents])
        if isinstance(found, str):
            return None
        return found if any(found.held.version in agent.area.slots for agent in agents) else None

    def _kept(self, life: Life, loaded: Loaded, first: int, loads: int) -> Kept:
        """Where more was saved than `load` names, nothing is kept until it is saved again."""
        knows_all = not self.script.names_more or loaded.assumed or not loaded.origin
        assumed = loaded.assumed or not loads
        return Kept(life, first, self.script.memory and knows_all, assumed, loads)

    def save(self, life: Life, step: int) -> bool:
        """Ranks call `save`; whether the folder still takes what they write. At the begin it is claimed alone."""
        first = life.ranks[0].process
        is_begin = life.loaded is None or step <= life.loaded.state.step
        if self.script.folder and not self._training.saves(first, 0.0 if is_begin else float(step), life.generation):
            return False
        if not is_begin:
            if self.script.folder:
                version = Version(first.attempt, life.generation, step)
                self.saved[first.job_uid] = Saved(version, State(life.number, step), life)
            for agent in life.ranks.values() if self.script.all_save else [life.ranks[0]]:
                self._names(agent, step)
        return True

    def _names(self, agent: Agent, step: int) -> None:
        """`save` names all that the script has."""
        kept = agent.kept
        if kept is None or not self.script.memory:
            return
        if self.script.names_more and (kept.assumed or not kept.is_on):
            if kept.is_on:  # what was noted, and proved, is of less
                generation = kept.life.generation
                agent.area.slots = [slot for slot in agent.area.slots if slot.generation != generation]
                agent.area.proven = False
            kept.first, kept.is_on = step, True
        kept.assumed = False

    # ---------------------------------------------------------------- a group that ends

    def stop(self, life: Life, step: int) -> None:
        """No step follows: a rank has ended, or agents have asked for the state. Each rank is where it is."""
        if life.loaded is None or life.ended_at is not None:
            return
        life.ended_at = step
        summed = life.stuck_at is None and self._random.random() < SUMMED
        for agent in life.ranks.values():
            kept = agent.kept
            if kept is None or kept.life is not life:
                continue
            kept.clock = 2 * step + (self._random.randrange(3) if summed else 0)
            life.ended_at = max(life.ended_at, kept.clock // 2)
            if kept.is_on:
                self._note(agent, kept)

    def _note(self, agent: Agent, kept: Kept) -> None:
        """Its last boundaries."""
        last = kept.clock // 2
        for step in range(max(kept.first, last - 1), last + 1):
            agent.area.note(Version(agent.process.attempt, kept.life.generation, step))
        if last >= kept.first + PROOF_STEPS:
            agent.area.proven = True

    def _may_write(self, agent: Agent) -> Kept | None:
        """The rank that its agent waits for; None: it has promised nothing, or has answered."""
        kept = agent.kept
        if kept is None or kept.life is not agent.life or not kept.is_on or kept.answer != memory.NONE:
            return None
        needed = kept.first if agent.area.proven else kept.first + PROOF_STEPS
        return kept if kept.life.ended_at is not None and kept.clock // 2 >= needed else None

    def order(self, agent: Agent, then: Callable[[], None]) -> None:
        """Its agent has its rank write the state, and goes on when that has answered, or after a while."""
        kept = self._may_write(agent)
        if kept is None:
            return then()
        kept.then = then
        self._loop.call_later(LIMIT_SECONDS, self._goes_on, kept)
        fault = self._faults.at("rescue")
        return self._try(agent, kept, fault)

    def _try(self, agent: Agent, kept: Kept, fault: str) -> None:
        """One turn of the thread that writes."""
        if not self._runs(agent, kept) or kept.answer != memory.NONE:
            return None
        if not memory.is_clean(kept.clock):
            if kept.clock % 2 == 0:
                return self._answers(kept, memory.UNABLE)
            self._loop.call_later(self._random.uniform(*BOUNDARY_SECONDS), self._makes_the_step, agent, kept, fault)
            return None
        if kept.written < 0 and self._begin(agent, kept):
            return self._answers(kept, memory.SAVED)
        if fault == "dies" and kept.written == 1:
            self._training.agents.rank_killed(agent, kept.life)
            return None
        self._write(agent, kept)
        if kept.answer == memory.NONE:
            seconds = SLOW_SECONDS if fault == "slow" else PART_SECONDS
            self._loop.call_later(self._random.uniform(*seconds), self._try, agent, kept, fault)
        return None

    def _makes_the_step(self, agent: Agent, kept: Kept, fault: str) -> None:
        if self._runs(agent, kept):
            kept.clock += 1
            self._note(agent, kept)
            kept.life.ended_at = max(kept.life.ended_at or 0, kept.clock // 2)
            self._try(agent, kept, fault)

    def _begin(self, agent: Agent, kept: Kept) -> bool:
        """Whether what is there is as new."""
        held = self._stamp(agent, kept)
        if agent.area.held is not None and agent.area.held.version >= held.version:
            return True
        kept.written = 0
        agent.area.begin(held)
        return False

    def _write(self, agent: Agent, kept: Kept) -> None:
        """The next part; after the last one, what makes it count."""
        agent.area.parts[kept.written] = TORN if kept.clock % 2 else _state(kept)
        kept.written += 1
        if kept.written == PARTS:
            agent.area.end(self._stamp(agent, kept), kept.life)
            self._answers(kept, memory.SAVED)

    def _stamp(self, agent: Agent, kept: Kept) -> Held:
        """What the cells will say."""
        state, step = _state(kept), memory.step_of(kept.clock)
        size = BYTES_MORE if self.script.names_more and not kept.assumed else BYTES
        version = Version(agent.process.attempt, kept.life.generation, step)
        loads = 0 if state.life == kept.life.number else kept.loads
        return Held(version, loads, size, hash((*state, size)), kept.assumed)

    def _answers(self, kept: Kept, answer: int) -> None:
        kept.answer = answer
        self._goes_on(kept)

    def _goes_on(self, kept: Kept) -> None:
        then, kept.then = kept.then, None
        if then is not None:
            then()

    def _runs(self, agent: Agent, kept: Kept) -> bool:
        return agent.kept is kept and agent.life is kept.life and agent.runs and not agent.over

    def raises(self, agent: Agent) -> None:
        """Its rank ends by an exception, and writes the state before, if no step is under way."""
        kept = self._may_write(agent)
        if kept is None:
            return None
        if not memory.is_clean(kept.clock) or (kept.written < 0 and self._begin(agent, kept)):
            return self._answers(kept, memory.UNABLE)
        until = self._random.randrange(PARTS) if self._faults.at("rescue") == "dies" else PARTS
        while kept.written < until:
            self._write(agent, kept)
        return None


def _state(kept: Kept) -> State:
    """What its rank has at its last boundary."""
    life, step = kept.life, memory.step_of(kept.clock)
    assert life.loaded is not None, "it has loaded"
    return life.loaded.state if step == life.loaded.state.step else State(life.number, step)
