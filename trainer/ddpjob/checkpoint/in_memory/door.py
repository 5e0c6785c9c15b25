"""Keep the state of a `Snapshot` in its node's memory, and restore it. Does nothing if no agent started the rank."""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ddpjob import process
from ddpjob.checkpoint.in_memory import recall
from ddpjob.checkpoint.in_memory.by_cadence import device_copies, streams
from ddpjob.checkpoint.in_memory.memory import OTHERWISE, Keeper, Pending
from ddpjob.checkpoint.in_memory.places import KEPT, SAVED
from ddpjob.checkpoint.in_memory.shared import Shared
from ddpjob.errors import StateError
from ddpjob.group.join import World, store_of
from ddpjob_core.memory import FoundState, Version

_ALONE = (
    "Snapshot() has no folder: the state is kept only in the memory of the pods, and the training begins at step 0 "
    "when all ranks have ended"
)
_REFUSED = "the kernel refuses the agent's file in memory (memfd_create)"
_KILLED = (
    "a pod of this job was killed because it used more memory than its limit, and the state counts against that; to "
    "keep it again, suspend the job, raise the limit, and resume it"
)
_NOTHING = (
    "Snapshot() has no folder, and there is no memory to keep the state in (ddprun has one, for training on CPUs and "
    "CUDA): nothing is saved"
)


class Assumed(dict[str, Any]):
    """`Snapshot.state` before the first `save`. Calls `missed` if the script reads a name that it did not pass to
    `load`, because such a script will save more objects than it has loaded."""

    def __init__(self, state: Mapping[str, Any], missed: Callable[[str], None]) -> None:
        super().__init__(state)
        self._missed = missed

    def __missing__(self, name: str) -> Any:
        self._missed(name)
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        if not super().__contains__(name):
            self._missed(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Like `dict.get`."""
        return self[name] if name in self else default  # noqa: SIM401  # this is get()


class InMemory:
    """Access of a Snapshot to the node's memory. Memory is turned off if a script loads from two Snapshots: a state in
    memory and a state in the other Snapshot's folder could have different steps."""

    def __init__(
        self, world: World | None, present: Version, pending: Pending, *, wanted: bool, has_folder: bool
    ) -> None:
        """present: version of this generation, with step 0."""
        self._present, self._pending = present, pending
        self._has_folder = has_folder
        self._keeper: Keeper | None = None
        self._shared: Shared | None = None
        self._world = world
        self._loads = 0
        self._named: set[str] = set()  # names passed to calls of load() that restore the same step
        self._taken: FoundState | None = None  # state in memory that load() restores; None if it uses the folder
        # memory is only for ranks that the agent has started
        place = process.number("RANK", -1), process.number("WORLD_SIZE", -1)
        is_started = world is not None and (world.rank, world.world_size) == place
        self._used = wanted and is_started and "DDPJOB_MEMORY" in os.environ

    def begin(self) -> None:
        """Called by each `load`. The first call starts to keep the state; a second Snapshot turns memory off."""
        current = process.current
        if current.loader is None:
            current.loader = self
            if self._used:
                self._begin()
            if not self._has_folder and (self._world is None or self._world.rank == 0):
                process.log(_ALONE if self._keeper is not None else _NOTHING)
        elif current.loader is not self:
            self._used = False
            if current.keeper is not None:
                current.keeper.turn_off("the script loads from a second Snapshot, which may have another step")

    def _begin(self) -> None:
        assert self._world is not None, "without a group there is no rank"
        where = os.environ["DDPJOB_MEMORY"]
        world, device = self._world, streams.for_device(self._world.device)
        if device is None and world.device.type != "cpu":
            return
        why, otherwise = _REFUSED, OTHERWISE[self._has_folder]
        if where:  # empty: the agent could not create the memory
            is_killed = process.number("DDPJOB_OUT_OF_MEMORY", 0)
            why = _KILLED if is_killed else device_copies.would_go_on(world.backend, world.world_size, os.environ)
        if why:
            process.current.not_kept = why
            if world.rank == 0 or (why is _KILLED and world.local_rank == 0):  # also log it in the killed pod
                process.log(f"the state is not kept in memory: {why}; {otherwise}")
            return
        try:
            self._shared = Shared(where, self._present.attempt, self._present.generation)
            own = self._shared, world.rank, world.world_size, store_of(world), device
            self._keeper = Keeper(*own, self._pending, has_folder=self._has_folder)
        except (OSError, ValueError) as error:
            process.log(f"rank {world.rank}: the state is not kept in memory: {error}; {otherwise}")
            return
        process.current.keeper = self._keeper
        process.current.at_boundary = self._keeper.boundary

    def find(self, objects: Mapping[str, Any]) -> FoundState | None:
        """Describe the newest complete state in the memory of any node. Collective: every rank calls it.

        If several calls of `load` restore one part of the state each, all of them use the state that the first call
        used. A call that repeats a name starts over with the newest state.
        """
        if not self._used or self._world is None or self._present.generation == 0:
            return None  # in the first generation no state can be in memory
        if not _names(objects).isdisjoint(self._named):
            self._named = set()
        if self._named:
            return self._taken
        return recall.find(self._shared, self._world.rank, self._world.world_size, self._present)

    def fetch(
        self, found: FoundState, objects: Mapping[str, Any], names_in_folder: Callable[[], Iterable[str]]
    ) -> recall.Fetched | None:
        """Return the found state; None if it lacks these names or has changed. Collective: every rank calls it. Raises
        StateError instead of None if another part of the state was loaded before, because the folder has another step.
        """
        assert self._world is not None, "it was found"
        rank, world_size = self._world.rank, self._world.world_size
        fetched = recall.fetch(self._shared, found, rank, world_size, objects, names_in_folder)
        holder = self._shared if self._world.local_rank == 0 and rank in found.ranks else None
        if fetched is None:
            if not self._named:
                return None
            if holder is not None:
                holder.forget_copy()
            raise StateError(_half(self._named, found, objects))
        if holder is not None and not self._named:
            holder.set_loads(found.held.version, found.held.loads + 1)
        self._named, self._taken = self._named | _names(objects), found
        return fetched

    def resumed(self, found: FoundState, objects: Mapping[str, Any], fetched: recall.Fetched) -> dict[str, Any]:
        """Called when the objects were loaded from memory: keep them in memory. Return `Snapshot.state`.

        They are not kept if the script saves plain values such as `sampler.state_dict(step)`: `load` gets only the
        sampler, whose own position is ahead of the trained samples if DataLoader workers read ahead.
        """
        if self._keeper is not None:
            self._keeper.goes_on(found.held.version.step, found.held)
        if self._keeper is not None and not fetched.by_value and objects.keys() == fetched.state.keys():
            if found.held.assumed:
                self._keeper.assume(objects)
            else:
                self._keeper.register(objects, fetched.state)
            self._keeper.boundary(found.held.version.step, SAVED)
        return Assumed(fetched.state, _refuse) if found.held.assumed else fetched.state

    def loaded(self, step: int, objects: Mapping[str, Any], state: dict[str, Any]) -> dict[str, Any]:
        """Called when the objects were loaded from the folder, which has this state. Return `Snapshot.state`."""
        self._named, self._taken = self._named | _names(objects), None
        self._loads += 1
        keeper = self._keeper
        if keeper is None:
            return state
        keeper.goes_on(step)
        if self._loads > 1:  # each call loads only a part of the state
            keeper.forget_assumed()
        elif not state or state.keys() == objects.keys():
            keeper.assume(objects)
            return Assumed(state, lambda _: keeper.forget_assumed())
        return state

    def saved(self, step: int, objects: Mapping[str, Any], *, kept_alone: bool = False) -> None:
        """Called when the script has passed the state of this step: to `keep` if kept_alone, else to `save`."""
        if self._keeper is not None:
            self._keeper.register(objects)
            self._keeper.boundary(step, KEPT if kept_alone else SAVED)


def _refuse(name: str) -> None:
    raise StateError(
        f"{name}: the state in memory has only what load() names, because save() was not called before the restart; "
        f"the next restart does not use it. To keep {name} from the first step on, call snapshot.keep(step, …) after "
        f"each step with all that save() is given."
    )


def _names(objects: Mapping[str, Any]) -> set[str]:
    """Return the names that one call of load() gets; {""} if it gets no names, so that this call counts, too."""
    return set(objects) or {""}


def _half(named: set[str], found: FoundState, objects: Mapping[str, Any]) -> str:
    before = ", ".join(sorted(named - {""})) or "the rest"
    return (
        f"{', '.join(sorted(objects))}: not in memory, and the folder has another step than "
        f"{found.held.version.step}, at which {before} was loaded from memory. The next restart uses the folder. "
        f"Pass all objects to one call of load(), and pass the same objects to keep() and save()."
    )
