"""A model of the memory in which a state outlives its ranks: what each agent holds, and what a generation begins with.

Which state counts is the real rule (`ddpjob.core.memory`). The model has what surrounds it: ranks at a boundary or
within the optimizer's step, areas that are written in parts, agents that are lost. It knows what no rank does: in which
life each part was made.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from model_copies import NOTHING, PARTS, TORN, At, Copying, Place, State, Store

from ddpjob.core import copies, memory
from ddpjob.core.memory import CHANGED, Found, Held, Version

if TYPE_CHECKING:
    from model_agents import Agent, Life
    from model_training import Training

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
    changes: str = ""
    """Whether it changes parameters between two steps, and where the state is what the next step begins with: at
    `should_stop`, or not before `save`. "seldom": as the first, but a survivor is the one that finds it."""


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
    clock: int = 0  # once its group has stopped
    written: int = -1
    """How many parts; -1: it has not begun."""
    answer: int = memory.NONE
    then: Callable[[], None] | None = None
    """What its agent does when it has answered, or its time is over."""
    copying: Copying | None = None  # where it copies by cadence
    place: Place | None = None  # where it writes after a failure

    @property
    def copies_instead(self) -> bool:
        """Whether it writes nothing after a failure, because nobody knows whether that is the state."""
        return self.copying is not None and self.copying.changes


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
    why: str = ""
    """Why nothing in memory counts, though there is something."""


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
        if isinstance(found, str) or memory.is_newer(saved and saved.version, found.held):
            why = found if isinstance(found, str) else ""
            loaded = Loaded(NOTHING, "", why=why) if saved is None else Loaded(saved.state, "/snapshots", why=why)
            self._checked(life, loaded, saved)
            loads, first = 0, loaded.state.step + 1
        else:
            ranks = ", ".join(map(str, found.ranks))
            state = agents[found.ranks[0]].area.newest.parts[0]
            loaded = Loaded(state, f"the memory on the nodes of ranks {ranks}", found.ranks, found.held.assumed)
            self._checked(life, loaded, saved)
            loads, first = found.held.loads + 1, found.held.version.step
            for rank in found.ranks:
                agents[rank].area.count_load()
        store, version = Store(), None if isinstance(found, str) or not loaded.ranks else found.held.version
        for agent in agents:
            agent.area.changes = max(other.area.changes for other in agents)
            agent.kept = self._kept(life, loaded, first, loads)
            agent.kept.copying = self._copying(agent, agent.kept, store, version)
            if loads and agent.kept.is_on:
                agent.area.note(Version(attempt, life.generation, first))
        return loaded

    def _found(self, agents: list[Agent], present: Version) -> Found | str:
        """In memory: the area of one rank, and of any rank what is small; else why not."""
        if not self.script.memory:
            return ""
        found = memory.newest([a.area.held for a in agents], present, (), [a.area.mark for a in agents])
        if isinstance(found, str) or any(agent.area.has_small(found.held.version) for agent in agents):
            return found
        return "the random states of this step are gone"

    def _kept(self, life: Life, loaded: Loaded, first: int, loads: int) -> Kept:
        """Where more was saved than `load` names, nothing is kept until it is saved again."""
        knows_all = not self.script.names_more or loaded.assumed or not loaded.origin
        assumed = loaded.assumed or not loads
        return Kept(life, first, self.script.memory and knows_all, assumed, loads)

    def _copying(self, agent: Agent, kept: Kept, store: Store, loaded: Version | None) -> Copying | None:
        """Where nobody can write the state after a failure."""
        life, changes = kept.life, bool(self.script.changes and (self.script.changes != "seldom" or agent.area.changes))
        if not self.script.memory or not (changes or len(life.ranks) == 1):
            return None
        proofs = 1 if changes else 0 if agent.area.proven else PROOF_STEPS
        return Copying(
            rank=agent.node,
            ranks=len(life.ranks),
            area=agent.area,
            life=life,
            store=store,
            stamp=lambda step, every: self._stamp(agent, kept, step, every),
            state=lambda step: _state_at(life, step),
            chance=random.Random(f"{self._training.faults.seed} copies {life.number} {agent.node}"),
            changes=changes,
            has_place=self.script.changes != "before save",
            starts=kept.first + proofs,
            loaded=loaded,
        )

    def _comes_to(self, life: Life, lasts: dict[int, int], named: Collection[int] = ()) -> None:
        """Ranks make their steps to those, by node, and copy. named: the nodes on which the last one is saved."""
        ranks = {node: agent.kept for node, agent in life.ranks.items() if node in lasts}
        copying = {node: kept.copying for node, kept in ranks.items() if kept is not None and kept.life is life}
        begun = min((one.step for one in copying.values() if one is not None and one.step), default=0)
        first = max(begun, life.loaded.state.step if life.loaded is not None else 0)
        for step in range(first, max(lasts.values(), default=0) + 1):
            for node, one in sorted(copying.items()):
                kept = ranks[node]
                if one is not None and kept is not None and kept.is_on and one.step <= step <= lasts[node]:
                    is_named = node in named and step == lasts[node]
                    if step > one.step or is_named:
                        one.comes_to(At(step, is_named))

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
            savers = life.ranks if self.script.all_save else [0]
            for node in savers:
                self._names(life.ranks[node], step)
            self._comes_to(life, dict.fromkeys(life.ranks, step), savers)
        return True

    def _names(self, agent: Agent, step: int) -> None:
        """`save` names all that the script has."""
        kept = agent.kept
        if kept is None or not self.script.memory:
            return
        if self.script.names_more and (kept.assumed or not kept.is_on):
            if kept.is_on:  # what was noted, and proved, is of less
                generation = kept.life.generation
                agent.area.forget(generation)
                agent.area.proven = False
            kept.first, kept.is_on = step, True
            if kept.copying is not None:
                kept.copying.forget(step + PROOF_STEPS)
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
            if kept.is_on and not kept.copies_instead:
                self._note(agent, kept)
        self._stop_copies(life)

    def _stop_copies(self, life: Life) -> None:
        """Where others have gone on, all had come to the boundary; else a copy may be cut short anywhere."""
        clocks = {node: a.kept.clock for node, a in life.ranks.items() if a.kept is not None and a.kept.life is life}
        self._comes_to(life, {node: clock // 2 for node, clock in clocks.items()})
        for node, clock in clocks.items():
            kept = life.ranks[node].kept
            if kept is not None and kept.copying is not None and kept.is_on:
                is_cut = clock == max(clocks.values()) and self._random.random() < 0.5
                kept.copying.work(self._random.randrange(PARTS + 3)) if is_cut else kept.copying.work()
                if clock % 2:
                    kept.copying.begins_a_step()
                if kept.copies_instead and kept.clock // 2 >= kept.first:
                    version = self._stamp(life.ranks[node], kept, kept.first).version
                    life.ranks[node].area.note(version)

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
        if kept.copies_instead:
            return kept if kept.life.ended_at is not None and kept.copying is not None and kept.copying.step else None
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
        if kept.copies_instead:
            return self._finish(agent, kept, fault)
        return self._try(agent, kept, fault)

    def _finish(self, agent: Agent, kept: Kept, fault: str) -> None:
        """Its rank lives, and comes to the end of the copy that is under way. It counts where no other rank can lack
        its random states of it."""
        copying = kept.copying
        if copying is None or not self._runs(agent, kept) or kept.answer != memory.NONE:
            return None
        if not copying.todo:
            is_all = copying.is_complete and len(kept.life.ranks) == 1  # all are of this node
            if is_all:
                copying.count()
            return self._answers(kept, memory.SAVED if is_all else memory.UNABLE)
        if fault == "dies" and len(copying.todo) < PARTS:
            self._training.agents.rank_killed(agent, kept.life)
            return None
        copying.work(1)
        seconds = SLOW_SECONDS if fault == "slow" else PART_SECONDS
        self._loop.call_later(self._random.uniform(*seconds), self._finish, agent, kept, fault)
        return None

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
        if self.script.changes == "seldom" and held.version.step > kept.first and self._random.random() < 0.5:
            agent.area.changes = CHANGED
            return True  # parameters have changed since, so it writes nothing
        if agent.area.held is not None and agent.area.held.version >= held.version:
            return True
        kept.written = 0
        kept.place = agent.area.places[0]
        if kept.copying is not None:
            kept.copying.work()
            kept.copying.drop()
            if kept.copying.has_room:
                kept.place = agent.area.places[copies.area_for([place.held for place in agent.area.places])]
        agent.area.begin(kept.place, held)
        return False

    def _write(self, agent: Agent, kept: Kept) -> None:
        """The next part; after the last one, what makes it count."""
        assert kept.place is not None, "it has begun"
        kept.place.parts[kept.written] = TORN if kept.clock % 2 else _state_at(kept.life, kept.clock // 2)
        kept.written += 1
        if kept.written == PARTS:
            agent.area.end(kept.place, self._stamp(agent, kept), kept.life)
            self._answers(kept, memory.SAVED)

    def _stamp(self, agent: Agent, kept: Kept, step: int = -1, every: int = 0) -> Held:
        """What the cells will say of a step, or of its last boundary."""
        step = memory.step_of(kept.clock) if step < 0 else step
        state = _state_at(kept.life, step)
        size = BYTES_MORE if self.script.names_more and not kept.assumed else BYTES
        version = Version(agent.process.attempt, kept.life.generation, step)
        loads = 0 if state.life == kept.life.number else kept.loads
        return Held(version, loads, size, hash((*state, size)), kept.assumed, every)

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
        if kept.copies_instead and kept.copying is not None:
            kept.copying.work()
            return self._finish(agent, kept, "")
        if not memory.is_clean(kept.clock) or (kept.written < 0 and self._begin(agent, kept)):
            return self._answers(kept, memory.UNABLE)
        until = self._random.randrange(PARTS) if self._faults.at("rescue") == "dies" else PARTS
        while kept.written < until:
            self._write(agent, kept)
        return None


def _state_at(life: Life, step: int) -> State:
    """What its ranks have at a step."""
    assert life.loaded is not None, "it has loaded"
    return life.loaded.state if step == life.loaded.state.step else State(life.number, step)
