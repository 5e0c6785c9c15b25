"""A model of what survivors do after a failure: one rank of a node writes its state, part by part. The real rules
(`ddpjob_core.memory`) decide who waits for whom, and whether the state is already there. If a rank is killed, the
others on its node continue to write. The agent ends them when all have answered or their time is over."""

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
"""Seconds from inside the optimizer's step to the next boundary."""
LIMIT_SECONDS = memory.limit_seconds(0)
SLOW_SECONDS = (0.3, 1.5)
"""Seconds per part on a node with a busy CPU."""
PROOF_STEPS = 3
"""Steps in which a node's ranks must prove that large values change only in the optimizer, before any is kept."""
BYTES, BYTES_MORE = 300, 301
"""Size of the state that `load` passes, and of the one that `save` passes if the script saves more."""


@dataclass(eq=False)
class Kept:
    """A rank after its `load`, with its progress in writing its state."""

    life: Life
    first: int
    """The first boundary that the rank records."""
    local: int = 0
    """Local rank of the rank."""
    is_on: bool = True
    assumed: bool = False
    loads: int = 0
    """How often the state with which the rank began was loaded from memory."""
    alive: bool = True
    clock: int = 0  # the rank's position (memory.is_clean), set when the group has stopped
    written: int = -1
    """Number of written parts; -1 before it begins."""
    answer: int = memory.NONE
    copying: Copying | None = None  # set if the rank makes periodic copies
    place: Place | None = None  # area to which the rank writes its state after a failure

    @property
    def copies_instead(self) -> bool:
        """True if the rank writes nothing after a failure, because its state may be incomplete."""
        return self.copying is not None and self.copying.changes


class Rescues:
    """Writes the states of all nodes of a simulation after failures."""

    def __init__(self, training: Training, script: Script, chance: random.Random) -> None:
        self.script, self._training, self._random = script, training, chance
        self._loop, self._faults = training.loop, training.faults

    def note(self, agent: Agent, kept: Kept) -> None:
        """Record the steps of a rank's last two calls of `should_stop`, `save` or `keep`."""
        last = kept.clock // 2
        for step in range(max(kept.first, last - 1), last + 1):
            agent.area.note(Version(agent.process.attempt, kept.life.in_memory, step), kept.local)
        if last >= kept.first + PROOF_STEPS:
            agent.area.proven = True

    def lose(self, agent: Agent, life: Life, lost: Kept | None, *, raises: bool) -> bool:
        """Lose one rank of an agent: `lost`, or any. Return True if other ranks with a state are alive."""
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
        """Let an agent's ranks write the state. Call `then` when all have answered, or their time is over."""
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
            fault = ""  # only the first rank has the fault
        return None

    def raises(self, agent: Agent) -> None:
        """Let an agent's ranks end by an exception. They write the state first, unless a step is in progress."""
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
        """True if the agent waits for this rank: the rank is alive, keeps a state, and has not answered."""
        if kept.life is not agent.life or not (kept.alive and kept.is_on) or kept.answer != memory.NONE:
            return False
        if kept.copies_instead:
            return kept.life.ended_at is not None and kept.copying is not None and bool(kept.copying.step)
        needed = kept.first if agent.area.proven else kept.first + PROOF_STEPS
        return kept.life.ended_at is not None and kept.clock // 2 >= needed

    def _finish(self, agent: Agent, kept: Kept, fault: str) -> None:
        """Let a living rank finish its copy, which counts only if all ranks have certainly written their part."""
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
        if not copying.is_writer:  # otherwise another thread answers at once
            copying.work(self._random.randrange(2))
            return self._answers(agent, kept, memory.UNABLE)
        copying.work(1)
        seconds = SLOW_SECONDS if fault == "slow" else PART_SECONDS
        self._loop.call_later(self._random.uniform(*seconds), self._finish, agent, kept, fault)
        return None

    def _try(self, agent: Agent, kept: Kept, fault: str) -> None:
        """Do the next action of the thread that writes."""
        if not self._runs(agent, kept) or kept.answer != memory.NONE:
            return None
        if self.script.changes and agent.area.changes:  # another rank of the node has detected changes
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
        """Begin to write. Return True if the state in memory is at least as new as this rank's."""
        held = self.stamp(agent, kept)
        if self.script.changes == "seldom" and held.version.step > kept.first and self._random.random() < 0.5:
            agent.area.changes = CHANGED
            return True  # the rank detects changed parameters, and writes nothing
        if memory.is_there(agent.area.held, held.version, assumed=held.assumed):
            return True
        kept.written = 0
        if kept.copying is not None:
            kept.copying.work()
            kept.copying.drop()
        return False

    def _write(self, agent: Agent, kept: Kept) -> bool:
        """Write the next part, unless another rank writes. After the last part, make it count. Return True if a part
        was written."""
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
        """True if this rank gets the lock for writing."""
        return all(one.written <= 0 for one in self._others(agent, kept))

    def _dies_within_a_part(self, agent: Agent, kept: Kept) -> None:
        assert kept.place is not None, "it has begun"
        kept.place.parts[kept.written] = TORN
        self._training.agents.rank_killed(agent, kept.life, kept)

    def _others(self, agent: Agent, kept: Kept) -> list[Kept]:
        """Return the other ranks of the node for which the agent waits."""
        return [one for one in agent.kepts if one is not kept and self._may_write(agent, one)]

    def stamp(self, agent: Agent, kept: Kept, step: int = -1, every: int = 0) -> Held:
        """Return the description (`Held`) of the state of this step, or of the last one that the rank completed."""
        step = memory.step_of(kept.clock) if step < 0 else step
        state = state_at(kept.life, step)
        size = BYTES_MORE if self.script.names_more and not kept.assumed else BYTES
        version = Version(agent.process.attempt, kept.life.in_memory, step)
        loads = 0 if state.life == kept.life.number else kept.loads
        return Held(version, loads, size, hash((*state, size)), kept.assumed, every)

    # ---------------------------------------------------------------- its agent

    def _answers(self, agent: Agent, kept: Kept, answer: int) -> None:
        kept.answer = answer
        self._look(agent)

    def _look(self, agent: Agent) -> None:
        """Let the agent continue if it waits for no rank."""
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
    """Return the state of a generation at a step."""
    assert life.loaded is not None, "it has loaded"
    return life.loaded.state if step == life.loaded.state.step else State(life.number, step)
