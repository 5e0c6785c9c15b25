"""A model of the memory in which a state outlives its ranks: what each agent holds, and which state a generation loads.
model_rescue.py models what survivors write. The real rules (`ddpjob_core.memory`) decide which state counts. Ranks are
at a boundary (a call of `should_stop`, `save` or `keep`) or inside an optimizer step, areas are written in parts, and
agents are lost. Unlike the ranks, the model knows which generation wrote each part."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from model_area import NOTHING, State
from model_copies import WORK, At, Copying, Store
from model_rescue import PROOF_STEPS, Kept, Rescues, state_at

from ddpjob_core import memory
from ddpjob_core.memory import FoundState, Version

if TYPE_CHECKING:
    from model_agents import Agent, Life
    from model_training import Training

SUMMED = 0.3
"""Probability that a group ends after all its ranks have the gradients, so that each can still make the step alone."""


@dataclass(frozen=True)
class Script:
    """How a script uses its Snapshot, for example which ranks save."""

    memory: bool = True
    folder: bool = True
    all_save: bool = True
    """False: only rank 0 saves."""
    names_more: bool = False
    """True if the script saves more than it gave `load`, and cannot continue without it."""
    ranks: int = 1
    """Ranks per node."""
    changes: str = ""
    """Where the state for the next step is complete if the script changes parameters between steps: at `should_stop`,
    or only before `save`. "seldom": at `should_stop`, and a survivor detects the change. "": no changes."""


class Saved(NamedTuple):
    """The newest state in a folder."""

    version: Version
    state: State
    life: Life


class Loaded(NamedTuple):
    """The state with which a generation begins."""

    state: State
    origin: str
    """Where the state comes from; "" without a state."""
    ranks: tuple[int, ...] = ()
    """If the state is from memory, the ranks on whose nodes it was."""
    assumed: bool = False
    why: str = ""
    """Why no state in memory counts although there are some."""


class Memories:
    """The memories of all agents of a simulation, and the folders of the jobs."""

    def __init__(
        self, training: Training, script: Script, checked: Callable[[Life, Loaded, Saved | None], None]
    ) -> None:
        """checked: called with the state from which a generation begins, before the load is counted."""
        self.script, self._checked, self._training = script, checked, training
        self._loop, self._faults = training.loop, training.faults
        self._random = random.Random(f"{training.faults.seed} memory")
        self.rescues = Rescues(training, script, self._random)
        self.saved: dict[str, Saved] = {}
        """By job uid, the newest state in its folder."""

    # ---------------------------------------------------------------- load and save

    def load(self, life: Life) -> Loaded:
        """Let all ranks load the newest state that counts, as `Snapshot.load` does."""
        agents = life.agents
        attempt, uid = life.leader.process.attempt, life.leader.process.job_uid
        saved = self.saved.get(uid)
        found = self._found(agents, Version(attempt, life.in_memory, 0))
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
                agents[rank].area.count_load(found.held.version)
        store, version = Store(), None if isinstance(found, str) or not loaded.ranks else found.held.version
        for agent in agents:
            agent.area.changes = max(other.area.changes for other in agents)
            agent.kepts = [self._kept(life, loaded, first, loads, local) for local in range(self.script.ranks)]
            for kept in agent.kepts:
                kept.copying = self._copying(agent, kept, store, version)
                if loads and kept.is_on:
                    agent.area.note(Version(attempt, life.in_memory, first), kept.local)
        return loaded

    def _found(self, agents: list[Agent], present: Version) -> FoundState | str:
        """Return the newest state in memory if a rank has its random states; otherwise the reason why there is none."""
        if not self.script.memory:
            return ""
        marks = [mark for agent in agents for mark in agent.area.marks]
        found = memory.newest([a.area.held for a in agents], present, (), marks)
        if isinstance(found, str) or any(agent.area.has_small(found.held.version) for agent in agents):
            return found
        return "the random states of this step are gone"

    def _kept(self, life: Life, loaded: Loaded, first: int, loads: int, local: int) -> Kept:
        """Return a rank's record. If the script saves more objects than `load` got, keep nothing until it saves."""
        knows_all = not self.script.names_more or loaded.assumed or not loaded.origin
        assumed = loaded.assumed or not loads
        return Kept(life, first, local, self.script.memory and knows_all, assumed, loads)

    def _copying(self, agent: Agent, kept: Kept, store: Store, loaded: Version | None) -> Copying | None:
        """Return the copies of a rank if no rank could write the state after a failure; otherwise None."""
        life, changes = kept.life, bool(self.script.changes and (self.script.changes != "seldom" or agent.area.changes))
        if not self.script.memory or not (changes or len(life.ranks) * self.script.ranks == 1):
            return None
        proofs = 1 if changes else 0 if agent.area.proven else PROOF_STEPS
        rank = life.rank(agent)
        name = f"{rank} {kept.local}" if kept.local else str(rank)
        return Copying(
            rank=rank * self.script.ranks + kept.local,
            ranks=len(life.ranks) * self.script.ranks,
            per_node=self.script.ranks,
            area=agent.area,
            life=life,
            store=store,
            stamp=lambda step, every: self.rescues.stamp(agent, kept, step, every),
            state=lambda step: state_at(life, step),
            chance=random.Random(f"{self._training.faults.seed} copies {life.number} {name}"),
            changes=changes,
            has_place=self.script.changes != "before save",
            starts=kept.first + proofs,
            loaded=loaded,
        )

    def _comes_to(self, life: Life, lasts: dict[Kept, int], named: Collection[Kept] = ()) -> None:
        """Let ranks make the steps up to `lasts`, and copy. named: the ranks that call `save` at their last step."""
        copying = [(kept, one) for kept in lasts if (one := kept.copying) is not None]
        begun = min((one.step for _, one in copying if one.step), default=0)
        first = max(begun, life.loaded.state.step if life.loaded is not None else 0)
        for step in range(first, max(lasts.values(), default=0) + 1):
            for kept, one in sorted(copying, key=lambda rank: rank[1].rank):
                if kept.is_on and one.step <= step <= lasts[kept]:
                    is_named = kept in named and step == lasts[kept]
                    if step > one.step or is_named:
                        one.comes_to(At(step, is_named))

    def _of(self, life: Life) -> dict[Kept, Agent]:
        """Return the record of each rank of a generation, with the rank's agent."""
        return {kept: agent for agent in life.ranks.values() for kept in agent.kepts if kept.life is life}

    def save(self, life: Life, step: int) -> bool:
        """Let ranks call `save`. Return True if the folder still accepts their writes. At the start they only reserve
        their writer number."""
        first = life.agents[0].process
        is_begin = life.loaded is None or step <= life.loaded.state.step
        new = 0.0 if is_begin else float(step)
        if self.script.folder and not self._training.saves(first, new, life.turn, life.generation):
            return False
        if not is_begin:
            if self.script.folder:
                version = Version(first.attempt, life.in_memory, step)
                self.saved[first.job_uid] = Saved(version, State(life.number, step), life)
            ranks = self._of(life)
            savers = [kept for kept in ranks if self.script.all_save or kept is life.agents[0].kept]
            for kept in savers:
                self._names(ranks[kept], kept, step)
            self._comes_to(life, dict.fromkeys(ranks, step), savers)
        return True

    def _names(self, agent: Agent, kept: Kept, step: int) -> None:
        """Record that the script has passed all its objects to `save`."""
        if not self.script.memory:
            return
        if self.script.names_more and (kept.assumed or not kept.is_on):
            if kept.is_on:  # drop earlier records, which are about fewer objects
                generation = kept.life.in_memory
                agent.area.forget(generation)
                agent.area.proven = False
            kept.first, kept.is_on = step, True
            if kept.copying is not None:
                kept.copying.forget(step + PROOF_STEPS)
        kept.assumed = False

    # ---------------------------------------------------------------- a group that ends

    def stop(self, life: Life, step: int) -> None:
        """Stop all ranks where they are, because a rank has ended or agents have requested the state."""
        if life.loaded is None or life.ended_at is not None:
            return
        life.ended_at = step
        summed = life.stuck_at is None and self._random.random() < SUMMED
        for agent in life.ranks.values():
            for kept in agent.kepts if agent.kept is not None and agent.kept.life is life else ():
                kept.clock = 2 * step + (self._random.randrange(3) if summed else 0)
                life.ended_at = max(life.ended_at, kept.clock // 2)
                if kept.is_on and not kept.copies_instead:
                    self.rescues.note(agent, kept)
        self._stop_copies(life)

    def _stop_copies(self, life: Life) -> None:
        """Stop all copies. A rank that others have overtaken finishes its copy; any other copy may be cut off."""
        ranks = self._of(life)
        self._comes_to(life, {kept: kept.clock // 2 for kept in ranks})
        furthest, order = max((kept.clock for kept in ranks), default=0), list(ranks)
        if self.script.ranks > 1 and self.script.changes:
            self._random.shuffle(order)
        for kept in order:
            if kept.copying is not None and kept.is_on:
                is_cut = kept.clock == furthest and self._random.random() < 0.5
                most = len(WORK) if kept.copying.is_writer else 2
                kept.copying.work(self._random.randrange(most)) if is_cut else kept.copying.work()
                if kept.clock % 2:
                    kept.copying.begins_a_step()
                if kept.copies_instead and kept.clock // 2 >= kept.first:
                    version = self.rescues.stamp(ranks[kept], kept, kept.first).version
                    ranks[kept].area.note(version, kept.local)
