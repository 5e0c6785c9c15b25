"""Rules for the state with which each generation begins, and for the status about that state."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from model_area import TORN, Area, State, Whole
from model_memory import Loaded, Saved

from ddpjob_core.memory import LOADS_ASSUMED_MAX, LOADS_MAX, Version

if TYPE_CHECKING:
    from model_agents import Agent, Life

Raw = dict[str, Any]
Age = tuple[int, int, int, int]
"""Attempt, numbers of the leader and of the generation, and step. The model knows the truth; ranks a `Version`."""
HONEST = ("was loaded before", "are gone")
"""Legitimate reasons why a state in memory may not count. The model's ranks give no other reason to refuse one."""


class MemoryJudge:
    """Knows the true history of all generations. Each violation that it reports says what a user would lose."""

    def __init__(self, wrong: list[str]) -> None:
        self.repeated: Counter[str] = Counter()
        """By job uid, the steps that were repeated or will be."""
        self.seen: Counter[str] = Counter()
        """How often a generation began from memory, from the folder or without a state, and had a choice."""
        self._wrong = wrong
        self._lives: dict[str, list[Life]] = defaultdict(list)
        """By job uid, the generations that have loaded."""
        self._tried: dict[tuple[str, State], list[Life]] = defaultdict(list)
        """The generations that loaded this state from memory."""
        self._newest_loaded: dict[str, Version] = {}
        """By job uid, the newest version loaded from memory."""

    # ---- the state from which a generation begins

    def begins(self, life: Life, loaded: Loaded, saved: Saved | None) -> None:
        """Check the state with which a generation begins. saved: the newest state in its folder."""
        uid = life.leader.process.job_uid
        agents = life.agents
        self.seen["memory" if loaded.ranks else "folder" if loaded.origin else "nothing"] += 1
        if loaded.ranks:
            self._check_memory(life, loaded, saved, [agents[rank] for rank in loaded.ranks])
            self._check_random_states(life, agents, agents[loaded.ranks[0]].area)
        elif loaded.why and not any(reason in loaded.why for reason in HONEST):
            self._wrong.append(f"{life} is said not to go on from memory because {loaded.why}: its ranks count alike")
        whole = self._whole(life, agents, saved)
        age = max((_age(agents[rank], loaded.state) for rank in loaded.ranks), default=(0, 0, 0, 0))
        if not loaded.ranks and saved is not None:
            age = _age_of(saved)
        best = max(whole, default=(0, 0, 0, 0))
        self.seen["choice"] += len(set(whole)) > 1
        if best > age:
            self._wrong.append(
                f"{life} begins with step {loaded.state.step} of {loaded.origin or 'nothing'}, and step {best[3]} of "
                f"life {best[2]} in attempt {best[0]} was whole: what was made since is lost"
            )
        if loaded.ranks:
            self._tried[uid, loaded.state].append(life)
        others = self._lives[uid]
        came_to = max(
            (_furthest(other) for other in others if other is others[-1] or other.ended_at is None), default=0
        )
        self.repeated[uid] += max(0, came_to - loaded.state.step)
        if not any(reason in loaded.why for reason in HONEST):
            self._check_pace(life, loaded, saved, agents)
        others.append(life)

    def _check_pace(self, life: Life, loaded: Loaded, saved: Saved | None, agents: list[Agent]) -> None:
        """Check that a generation repeats no more steps than the copies allow, if a node of the last one is alive."""
        others = self._lives[life.leader.process.job_uid]
        for kept in (agent.kept for agent in agents):
            if others and kept is not None and kept.life is others[-1] and kept.copying is not None:
                own = Version(life.leader.process.attempt, kept.life.in_memory, 0)
                is_less = kept.assumed and saved is not None and saved.version[:2] == own[:2]
                if kept.is_on and not is_less and loaded.state.step < kept.copying.least:
                    self._wrong.append(
                        f"{life} begins with step {loaded.state.step}, but a rank was at step {kept.copying.step} "
                        f"and copies each {kept.copying.schedule.every} steps: its copies are lost, or were not made"
                    )
                self.seen["paced"] += kept.copying.least > 0

    def _check_random_states(self, life: Life, agents: list[Agent], area: Area) -> None:
        """Check that a rank whose node is alive finds its random states for the loaded copy. Exception: the only node
        with a newer copy was lost, so an older copy is loaded, whose random states may be overwritten."""
        held, writer, uid = area.held, area.newest.writer, life.leader.process.job_uid
        if held is None or writer is None:
            return  # this violation is already reported
        is_newer = held.version >= self._newest_loaded.get(uid, held.version)
        self._newest_loaded[uid] = max(held.version, self._newest_loaded.get(uid, held.version))
        self.seen["copy"] += held.every > 0
        state = State(writer.number, held.version.step)
        for agent in agents if is_newer and held.every else ():
            for local in range(len(agent.kepts)) if agent in writer.ranks.values() else ():
                if (local, state) not in agent.area.excused and not agent.area.has_own(held.version, local):
                    self._wrong.append(
                        f"{life} begins with a copy, and local rank {local} of {agent.process} has lost its random "
                        "states of it"
                    )

    def _check_memory(self, life: Life, loaded: Loaded, saved: Saved | None, holders: list[Agent]) -> None:
        parts = {part for agent in holders for part in agent.area.newest.parts}
        if len(parts) > 1 or TORN in parts:
            self._wrong.append(f"{life} begins with a mix of states, {sorted(parts)}: its result is nobody's")
        for agent in holders:
            held, writer = agent.area.held, agent.area.newest.writer
            if held is None or held.version.step != loaded.state.step:
                self._wrong.append(f"{life} begins with step {loaded.state.step}, which is said to be {held}")
            elif held.assumed and saved is not None and saved.life is writer:
                self._wrong.append(f"{life} begins with what was assumed, and by then more was saved: {saved.version}")

    def _whole(self, life: Life, agents: list[Agent], saved: Saved | None) -> list[Age]:
        """Return the age of each state that may be loaded: whole in memory, or in the folder."""
        known = [place.whole for agent in agents for place in agent.area.places] + [a.area.copied for a in agents]
        whole: set[Whole] = {one for one in known if one is not None and one.state != TORN}
        named = {one.writer.in_memory for one in whole if not one.assumed}
        if saved is not None and saved.version.attempt == life.leader.process.attempt:
            # Two generations have this number if a pod was made again unseen.
            named.add(saved.version.generation)
        uid, attempt = life.leader.process.job_uid, life.leader.process.attempt
        found: list[Age] = []
        useless: list[Age] = []
        for one in whole:
            version = Version(attempt, one.writer.in_memory, one.state.step)
            has_small = any(agent.area.has_small(version) for agent in agents)
            if not one.assumed or one.writer.in_memory not in named:
                bad = not has_small or self._is_hopeless(uid, one.state, one.assumed, agents)
                (useless if bad else found).append((attempt, one.writer.turn, one.writer.number, one.state.step))
        # If the newest state in memory must not be loaded, nor must older ones there: they may have its fault.
        # The state in the folder may be loaded, although it may have the fault, too (docs/memory.md).
        found = [age for age in found if age > max(useless, default=(0, 0, 0, 0))]
        return found if saved is None else [*found, _age_of(saved)]

    def _is_hopeless(self, uid: str, state: State, is_assumed: bool, agents: list[Agent]) -> bool:
        """True if the state may cause the failures: it was loaded often, and no node has recorded a later step."""
        lives = self._tried.get((uid, state), [])
        marks = [mark for agent in agents for mark in agent.area.marks]
        most = LOADS_ASSUMED_MAX if is_assumed else LOADS_MAX
        if len(lives) < most:
            return False
        return not any(mark.step > state.step and mark.generation >= lives[-1].in_memory for mark in marks)

    # ---------------------------------------------------------------- the status

    def check_status(self, uid: str, status: Raw) -> None:
        """Check each new status of a job."""
        lives = self._lives.get(uid)
        if lives is None:
            return
        lost = (status.get("goodput") or {}).get("lostSteps", 0)
        if lost > self.repeated[uid]:
            self._wrong.append(f"lostSteps is {lost}, and {self.repeated[uid]} steps were lost")
        step, origin = status.get("resumedStep"), status.get("resumedFrom", "")
        if step is None:
            return
        progress = status.get("progress") or {}
        least = progress.get("generation", 0) if progress.get("attempt") == status.get("attempt") else 0
        true = [
            (life.loaded.state.step, life.loaded.origin)
            for life in lives
            if life.loaded is not None
            and life.generation >= least
            and life.leader.process.attempt == status.get("attempt")
        ]
        if (step, origin) not in true:
            self._wrong.append(f"it is said to go on from step {step} of {origin or 'nothing'}, and has from {true}")


def _age(agent: Agent, state: State) -> Age:
    writer = agent.area.newest.writer
    return (agent.process.attempt, *((0, 0) if writer is None else (writer.turn, writer.number)), state.step)


def _age_of(saved: Saved) -> Age:
    return (saved.version.attempt, saved.life.turn, saved.life.number, saved.state.step)


def _furthest(life: Life) -> int:
    """Return the furthest step of a generation's ranks."""
    return max(int(life.step), life.ended_at or 0)
