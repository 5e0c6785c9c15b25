"""A model of what survivors do after a failure: one rank of a node writes its state, part by part. The real rules
(`ddpjob_core.memory`) decide who waits for whom, and what is there already. If a rank is killed, the others on its node
continue to write; the agent ends them when all have answered, or their time is over."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from model_area import NOTHING, PARTS, TORN, Place, State
from model_copies import Copying

from ddpjob_core import copies, memory
from ddpjob_core.memory import CHANGED, Held, Version

if TYPE_CHECKING:
    from model_agents import Agent, Life
    from model_memory import Script
    from model_training import Training

PART_SECONDS = (0.01, 0.1)
BOUNDARY_SECONDS = (0.001, 0.04)
"""From inside the optimizer's step to the next boundary."""
LIMIT_SECONDS = memory.limit_seconds(0)
SLOW_SECONDS = (0.3, 1.5)
"""Per part, on a node whose processor is busy."""
PROOF_STEPS = 3
"""A node's ranks must prove for so many steps that nothing large changes outside of them, before anything is kept."""
BYTES, BYTES_MORE = 300, 301
"""Of what `load` passes, and of what `save` passes if that is more."""


@dataclass(eq=False)
class Kept:
    """What a rank keeps after its `load`."""

    life: Life
    first: int
    """The first boundary at which it is noted."""
    local: int = 0
    """Its local rank."""
    is_on: bool = True
    assumed: bool = False
    loads: int = 0
    """How often the state that it began with was loaded from memory."""
    alive: bool = True
    clock: int = 0  # once its group has stopped
    written: int = -1
    """Number of parts; -1: it has not begun."""
    answer: int = memory.NONE
    copying: Copying | None = None  # if it makes periodic copies
    place: Place | None = None  # where it writes after a failure

    @property
    def copies_instead(self) -> bool:
        """True if it writes nothing after a failure, because nobody knows if its state is complete."""
        return self.copying is not None and self.copying.changes


class Rescues:
    """The rescues of all nodes of a simulation."""

    def __init__(self, training: Training, script: Script, chance: random.Random) -> None:
        self.script, self._training, self._random = script, training, chance
        self._loop, self._faults = training.loop, training.faults

    def note(self, agent: Agent, kept: Kept) -> None:
        """Record its last boundaries."""
        last = kept.clock // 2
        for step in range(max(kept.first, last - 1), last + 1):
            agent.area.note(Version(agent.process.attempt, kept.life.generation, step), kept.local)
        if last >= kept.first + PROOF_STEPS:
            agent.area.proven = True

    def lose(self, agent: Agent, life: Life, lost: Kept | None, *, raises: bool) -> bool:
        """Lose one of its ranks, that one or any; return True if others with a state are alive."""
        alive = [kept for kept in agent.kepts if kept.alive and kept.life is life]
        if len(alive) < 2:
            return False
        lost = self._random.choice(alive) if lost is None else lost
        if raises and self._may_write(agent, lost):
            self._raises(agent, lost)
        lost.alive = False
        self._look(agent)
        return True

    def order(self, agent: Agent, then: Callable[[], None]) -> None:
        """Let its agent have the ranks write the state, and continue when they have answered, or after a while."""
        writers = [kept for kept in agent.kepts if self._may_write(agent, kept)]
        if not writers:
            return then()
        agent.then, agent.asked_at = then, self._loop.time()
        self._loop.call_later(LIMIT_SECONDS, self._goes_on, agent, writers[0].life)
        fault = self._faults.at("rescue")
        for kept in writers:
            if kept.copies_instead:
                self._finish(agent, kept, fault)
            else:
                self._try(agent, kept, fault)
            fault = ""  # of the first one
        return None

    def raises(self, agent: Agent) -> None:
        """Let its ranks end by an exception; they write the state first, if no step is under way."""
        for kept in agent.kepts:
            if self._may_write(agent, kept):
                self._raises(agent, kept)

    def _raises(self, agent: Agent, kept: Kept) -> None:
        if kept.copies_instead and kept.copying is not None:
            kept.copying.work()
            return self._finish(agent, kept, "")
        if not memory.is_clean(kept.clock) or (kept.written < 0 and self._begin(agent, kept)):
            return self._answers(agent, kept, memory.UNABLE)
        until = self._random.randrange(PARTS) if self._faults.at("rescue") == "dies" else PARTS
        while kept.written < until and kept.answer == memory.NONE and self._write(agent, kept):
            pass
        return None

    # ---------------------------------------------------------------- one rank

    def _may_write(self, agent: Agent, kept: Kept) -> bool:
        """True if its agent waits for it; otherwise it has promised nothing, has answered, or is gone."""
        if kept.life is not agent.life or not (kept.alive and kept.is_on) or kept.answer != memory.NONE:
            return False
        if kept.copies_instead:
            return kept.life.ended_at is not None and kept.copying is not None and bool(kept.copying.step)
        needed = kept.first if agent.area.proven else kept.first + PROOF_STEPS
        return kept.life.ended_at is not None and kept.clock // 2 >= needed

    def _finish(self, agent: Agent, kept: Kept, fault: str) -> None:
        """Let its rank, which is alive, finish its present copy. It counts if no other rank can lack its random
        states."""
        copying = kept.copying
        if copying is None or not self._runs(agent, kept) or kept.answer != memory.NONE:
            return None
        if not copying.todo:
            if is_complete := copying.is_complete:
                copying.count()
            return self._answers(agent, kept, memory.SAVED if is_complete else memory.UNABLE)
        if fault == "dies" and len(copying.todo) < PARTS:
            self._training.agents.rank_killed(agent, kept.life, kept)
            return None
        if not copying.is_writer:  # it answers at once, without its main thread
            copying.work(self._random.randrange(2))
            return self._answers(agent, kept, memory.UNABLE)
        copying.work(1)
        seconds = SLOW_SECONDS if fault == "slow" else PART_SECONDS
        self._loop.call_later(self._random.uniform(*seconds), self._finish, agent, kept, fault)
        return None

    def _try(self, agent: Agent, kept: Kept, fault: str) -> None:
        """One turn of the writing thread."""
        if not self._runs(agent, kept) or kept.answer != memory.NONE:
            return None
        if self.script.changes and agent.area.changes:  # another rank of its node has detected it
            return self._answers(agent, kept, memory.UNABLE)
        if not memory.is_clean(kept.clock):
            if kept.clock % 2 == 0:
                return self._answers(agent, kept, memory.UNABLE)
            self._loop.call_later(self._random.uniform(*BOUNDARY_SECONDS), self._makes_the_step, agent, kept, fault)
            return None
        if kept.written < 0 and self._begin(agent, kept):
            return self._answers(agent, kept, memory.SAVED)
        is_patient = self._loop.time() < agent.asked_at + LIMIT_SECONDS / 2
        if (
            kept.written == 0
            and is_patient
            and memory.turn(kept.clock, [one.clock for one in self._others(agent, kept)]) != "write"
        ):
            self._loop.call_later(self._random.uniform(*BOUNDARY_SECONDS), self._try, agent, kept, fault)
            return None
        if fault == "dies" and kept.written == 1:
            self._dies_within_a_part(agent, kept)
            return None
        has_written = self._write(agent, kept)
        if kept.answer == memory.NONE:
            seconds = SLOW_SECONDS if fault == "slow" and has_written else PART_SECONDS
            self._loop.call_later(self._random.uniform(*seconds), self._try, agent, kept, fault)
        return None

    def _makes_the_step(self, agent: Agent, kept: Kept, fault: str) -> None:
        if self._runs(agent, kept):
            kept.clock += 1
            self.note(agent, kept)
            kept.life.ended_at = max(kept.life.ended_at or 0, kept.clock // 2)
            self._try(agent, kept, fault)

    def _begin(self, agent: Agent, kept: Kept) -> bool:
        """Return True if what is there is as new."""
        held = self.stamp(agent, kept)
        if self.script.changes == "seldom" and held.version.step > kept.first and self._random.random() < 0.5:
            agent.area.changes = CHANGED
            return True  # parameters have changed meanwhile, so it writes nothing
        if memory.is_there(agent.area.held, held.version, assumed=held.assumed):
            return True
        kept.written = 0
        if kept.copying is not None:
            kept.copying.work()
            kept.copying.drop()
        return False

    def _write(self, agent: Agent, kept: Kept) -> bool:
        """Write the next part, unless another rank writes; after the last part, make it count. Return True if it wrote
        one."""
        held, places = self.stamp(agent, kept), agent.area.places
        if kept.written == 0:
            if not self._is_alone(agent, kept):
                return False
            if memory.is_there(agent.area.held, held.version, assumed=held.assumed):
                self._answers(agent, kept, memory.SAVED)
                return False
            has_two = kept.copying is not None and kept.copying.has_room
            kept.place = places[copies.area_for([place.held for place in places]) if has_two else 0]
            agent.area.begin(kept.place, held)
            kept.place.parts = [NOTHING] * PARTS
        assert kept.place is not None, "it has begun"
        kept.place.parts[kept.written] = TORN if kept.clock % 2 else state_at(kept.life, kept.clock // 2)
        kept.written += 1
        if kept.written == PARTS:
            agent.area.end(kept.place, held, kept.life)
            self._answers(agent, kept, memory.SAVED)
        return True

    def _is_alone(self, agent: Agent, kept: Kept) -> bool:
        """True if it gets the writers' lock."""
        return all(one.written <= 0 for one in self._others(agent, kept))

    def _dies_within_a_part(self, agent: Agent, kept: Kept) -> None:
        assert kept.place is not None, "it has begun"
        kept.place.parts[kept.written] = TORN
        self._training.agents.rank_killed(agent, kept.life, kept)

    def _others(self, agent: Agent, kept: Kept) -> list[Kept]:
        """Return the other ranks of its node that are alive, take part, and have not answered yet."""
        return [one for one in agent.kepts if one is not kept and self._may_write(agent, one)]

    def stamp(self, agent: Agent, kept: Kept, step: int = -1, every: int = 0) -> Held:
        """Return the cells for a step, or for its last boundary."""
        step = memory.step_of(kept.clock) if step < 0 else step
        state = state_at(kept.life, step)
        size = BYTES_MORE if self.script.names_more and not kept.assumed else BYTES
        version = Version(agent.process.attempt, kept.life.generation, step)
        loads = 0 if state.life == kept.life.number else kept.loads
        return Held(version, loads, size, hash((*state, size)), kept.assumed, every)

    # ---------------------------------------------------------------- its agent

    def _answers(self, agent: Agent, kept: Kept, answer: int) -> None:
        kept.answer = answer
        self._look(agent)

    def _look(self, agent: Agent) -> None:
        """Its agent continues when it waits for none."""
        if agent.life is not None and not any(self._may_write(agent, kept) for kept in agent.kepts):
            self._goes_on(agent, agent.life)

    def _goes_on(self, agent: Agent, life: Life) -> None:
        then = agent.then
        if then is not None and agent.life is life:
            agent.then = None
            then()

    def _runs(self, agent: Agent, kept: Kept) -> bool:
        return kept in agent.kepts and kept.alive and agent.life is kept.life and agent.runs and not agent.over


def state_at(life: Life, step: int) -> State:
    """Return what its ranks have at a step."""
    assert life.loaded is not None, "it has loaded"
    return life.loaded.state if step == life.loaded.state.step else State(life.number, step)
