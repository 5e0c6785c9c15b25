"""Copies of states on devices, made by the library's code. Hosts run ahead, devices work later, and ranks are killed
between any two of their actions."""

import functools
import random
import threading
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from late_device import Host, LateDevice, Mark, Ticket

from ddpjob import process
from ddpjob.checkpoint.in_memory.by_cadence.copies import Boundary
from ddpjob.checkpoint.in_memory.by_cadence.device_copies import DeviceCopies
from ddpjob.checkpoint.in_memory.kept import BUFFERS, Kept
from ddpjob.checkpoint.in_memory.places import MARKED
from ddpjob.checkpoint.in_memory.shared import Shared
from ddpjob.checkpoint.state import packed
from ddpjob_core import copies
from ddpjob_core.memory import AREAS, COPY_SLOTS, FoundState, Held, Version, newest
from ddprun.memory import Memory

PER_NODE, NODES = 2, 2
BUFFER = 0.5  # the value of a buffer is the number of its step plus 0.5
Mistake = Literal[
    "",
    "the optimizer's step does not wait",
    "counts before it is complete",
    "counts before all have come",
    "buffers are not cloned",
    "the newest is written over",
]
MISTAKES: tuple[Mistake, ...] = Mistake.__args__[1:]  # type: ignore[attr-defined]


class Model(torch.nn.Module):
    """A model that shows its step: each parameter is the number of the step, each buffer is half a step more."""

    def __init__(self, step: int, device: LateDevice) -> None:
        super().__init__()
        self.one, self.other = (torch.nn.Parameter(torch.full((size,), float(step))) for size in (6, 3))
        self.on_host = torch.nn.Parameter(torch.full((2,), float(step)))
        self.register_buffer("seen", torch.full((4,), step + BUFFER))
        for tensor in (self.one, self.other, self.seen):
            device.own(tensor.detach())

    def set(self, tensors: list[torch.Tensor], value: float) -> None:
        for tensor in tensors:
            tensor.data.fill_(value)


class Store:
    """A model of the group's TCPStore, in which rank 0 writes its plans."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def check(self, keys: list[str]) -> bool:
        return all(key in self._texts for key in keys)

    def get(self, key: str) -> bytes:
        return self._texts[key].encode()

    def set(self, key: str, text: str) -> None:
        self._texts[key] = text


class Node:
    """The memory of an agent, which one walk after another uses."""

    def __init__(self) -> None:
        self._memory = Memory(PER_NODE)
        self._memory.begin(0)
        self.shared = [Shared(self._memory.where(rank), 1, 0) for rank in range(PER_NODE)]

    def empty(self) -> None:
        """Set all cells of the memory to 0."""
        for cells in (self.shared[0].node, *(shared.cells for shared in self.shared)):
            for cell in range(len(cells)):
                cells[cell] = 0


class HeldWithout(Ticket):
    def hold(self) -> None:
        """Do nothing, as a bug: the optimizer's step does not wait for the copy."""


class DoneAtOnce(Ticket):
    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        """Do nothing, as a bug: the host does not wait for the copy."""


class PassedAtOnce(Mark):
    is_done, wait = DoneAtOnce.is_done, DoneAtOnce.wait


@dataclass(eq=False)
class Rank:
    number: int
    node: Node
    device: LateDevice
    model: Model
    host: Host | None = None
    summed: int = 0
    """The last step for which this device has reached the sum of gradients."""
    alive: bool = True

    @property
    def shared(self) -> Shared:
        return self.node.shared[self.number % PER_NODE]


class Walk:
    """Some generations of a job on devices, whose actions come in random order."""

    def __init__(self, seed: int, nodes: list[Node], mistake: Mistake = "") -> None:
        self.chance, self.mistake = random.Random(seed), mistake
        self.nodes, self.generation, self.step = nodes[: self.chance.choice([1, 2])], 0, 0
        self.since = [0] * len(self.nodes)
        self.best: list[Version | None] = [None] * len(self.nodes)
        self.stories = {"copies": 0, "begin": 0, "counted": 0}
        self.gap = self.chance.choice([1, 1, 2])
        self.speed = self.chance.choice([0.3, 0.6, 0.9])  # speed of devices relative to hosts
        for node in self.nodes:
            node.empty()

    def run(self) -> None:
        for _ in range(self.chance.randrange(1, 4)):
            self.begin()
            for _ in range(self.chance.randrange(0, 900)):
                self.advance()
            self.fail()
            self.restart()

    # ---- a generation --------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.ranks = []
        self.loaded = Version(1, self.generation - 1, self.step) if self.step else None
        store = Store()
        for number in range(PER_NODE * len(self.nodes)):
            device = LateDevice()
            rank = Rank(number, self.nodes[number // PER_NODE], device, Model(self.step, device), summed=self.step)
            rank.shared.generation = self.generation
            device.begin_copy = self.begin_copy(device)  # type: ignore[method-assign]
            device.mark = self.mark(device)  # type: ignore[method-assign]
            if self.mistake == "buffers are not cloned":
                device.clone = lambda tensor: tensor.detach()  # type: ignore[method-assign]
            device.host = rank.host = Host(lambda _, rank=rank: self.train(rank, store))  # type: ignore[misc]
            self.ranks.append(rank)

    def begin_copy(self, device: LateDevice) -> Any:
        kinds = {MISTAKES[0]: HeldWithout, MISTAKES[1]: DoneAtOnce}
        begin = device.begin_copy

        def begun(pairs: Any) -> Ticket:
            ticket = begin(pairs)
            ticket.__class__ = kinds.get(self.mistake, Ticket)
            return ticket

        return begun

    def mark(self, device: LateDevice) -> Any:
        make = device.mark

        def made() -> Mark:
            mark = make()
            mark.__class__ = PassedAtOnce if self.mistake == "counts before all have come" else Mark
            return mark

        return made

    def train(self, rank: Rank, store: Store) -> None:
        """Act as a host: queue steps on the device, and never wait for them directly."""
        assert rank.host is not None, "it runs"
        model, device = rank.model, rank.device
        kept = Kept({"model": model})
        own = DeviceCopies(rank.shared, rank.number, len(self.ranks), store, True, device)
        rank.shared.loaded = None if self.loaded is None else Held(self.loaded, 0, 0, 0)
        step = self.step
        while True:
            rank.host.pause()
            device.give(lambda step=step: model.set([model.seen], step + 1 + BUFFER))  # type: ignore[misc]
            device.main.append(lambda step=step: self.sums(rank, step + 1))  # type: ignore[misc]
            if step % self.gap == 0:
                own.before_step(kept)
            rank.host.pause()
            device.give(lambda step=step: model.set([model.one, model.other], step + 1.0))  # type: ignore[misc]
            model.set([model.on_host], step + 1.0)
            step += 1
            if step % self.gap == 0:
                small = {"of": (rank.number, len(self.ranks)), "rng": step, "small": kept.settings()}
                write = functools.partial(rank.shared.write_slot, step=step, data=packed.dumps(small))
                own.boundary(Boundary(kept, step, MARKED, write, False))
                for thread in threading.enumerate():
                    if thread.name == "ddpjob-memory-room":
                        thread.join()

    def sums(self, rank: Rank, step: int) -> bool:
        """Sum gradients: no device continues before the gradients of all ranks have arrived."""
        rank.summed = step
        return all(other.summed >= step for other in self.ranks)

    def advance(self) -> None:
        """Execute the next action of a random host or stream."""
        rank = self.chance.choice(self.ranks)
        assert rank.host is not None, "it runs"
        if rank.alive and rank.device.ready and self.chance.random() < self.speed:
            for _ in range(self.chance.choice([1, 1, 5])):
                if rank.device.ready:
                    rank.device.work(self.chance.choice(rank.device.ready))
        elif rank.alive and rank.host.can_go_on:
            rank.host.go_on()
            self.judge(rank.node)

    # ---- what must be true ---------------------------------------------------------------------------------

    def judge(self, node: Node) -> None:
        """Check that the valid state of a node is complete, of one step, and that all ranks have reached this step."""
        number, held = self.nodes.index(node), node.shared[0].held()
        if held is None or held.version == self.best[number]:
            assert held is not None or self.best[number] is None, "nothing is left of what counted"
            return
        best = self.best[number]
        assert best is None or held.version > best, "older than what counted"
        self.best[number], self.stories["counted"] = held.version, self.stories["counted"] + 1
        self.read(node)
        for rank in self.ranks:
            assert self.has_slot(rank, held.version), "a rank has not come to it"

    def has_slot(self, rank: Rank, version: Version) -> bool:
        slots = [slot for slot in COPY_SLOTS if rank.shared.slot_version(slot) == version]
        return any(rank.shared.read_slot(slot)["rng"] == version.step for slot in slots)

    def read(self, node: Node) -> None:
        """Check the node's newest state: its checksum, and each value."""
        shared = node.shared[0]
        held = shared.held()
        assert held is not None, "it was looked at"
        large = packed.in_place(shared.newest(held.size))
        buffers = large.pop(BUFFERS)
        assert packed.total(packed.tensors_of(large)) == held.total, "its bits do not add up"
        step = float(held.version.step)
        for name in ("one", "other", "on_host"):
            value = large["model"]["state"][name]
            assert bool((value == step).all()), f"{name} of step {step} is {value.tolist()}"
        seen = buffers["model"]["seen"]
        assert bool((seen == step + BUFFER).all()), f"the buffer of step {step} is {seen.tolist()}"

    def fail(self) -> None:
        """Kill one rank, several ranks, all ranks or a node; the others continue for a while."""
        lost = self.chance.randrange(len(self.nodes)) if self.chance.random() < 0.2 and len(self.nodes) > 1 else None
        count = self.chance.choice([1, self.chance.randrange(1, len(self.ranks) + 1), len(self.ranks)])
        gone = [r for r in self.ranks if r.node is self.nodes[lost]] if lost is not None else self.ranks[-count:]
        for rank in gone:
            rank.alive = False
        for _ in range(self.chance.choice([0, 100])):
            self.advance()
        for rank in self.ranks:
            assert rank.host is not None, "it runs"
            rank.host.kill()
        if lost is not None:
            self.nodes[lost].empty()
            self.best[lost], self.since[lost] = None, self.generation + 1

    def restart(self) -> None:
        ranks = self.ranks
        held = [rank.shared.held() for rank in ranks]
        best = max((one for one in self.best if one is not None), default=None)
        self.generation += 1
        found = newest(held, Version(1, self.generation, 0), (), [rank.shared.mark() for rank in ranks])
        if not isinstance(found, FoundState):
            assert best is None or "loaded before" in found, found
            self.stories["begin"], self.step = self.stories["begin"] + 1, 0
            self.best, self.since = [None] * len(self.nodes), [self.generation] * len(self.nodes)
            for node in self.nodes:
                node.empty()
            return
        version = found.held.version
        assert version == best, "older than what was whole"
        for node in {id(ranks[number].node): ranks[number].node for number in found.ranks}.values():
            self.read(node)
            node.shared[0].set_loads(version, found.held.loads + 1)
        is_newer = self.loaded is None or version >= self.loaded
        for rank in ranks:
            if is_newer and self.since[self.nodes.index(rank.node)] <= version.generation:
                assert self.has_slot(rank, version), "a rank whose node lives has lost its random states"
        self.stories["copies"], self.step = self.stories["copies"] + 1, version.step
        self.loaded = version


@pytest.fixture(scope="module")
def nodes() -> list[Node]:
    return [Node() for _ in range(NODES)]


class Cadence:
    """Replaces copies.every() by random numbers of steps between two copies."""

    chance = random.Random(0)

    @classmethod
    def every(cls, _copy: float, _step: float, least: int) -> int:
        return least * cls.chance.choice([1, 1, 1, 2, 4, 8])


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow copies as often as possible, whatever they cost on this machine."""
    monkeypatch.setattr(copies, "COST_MAX", 1e9)
    monkeypatch.setattr(copies, "every", Cadence.every)
    monkeypatch.setattr(process, "log", lambda _: None)


def walks(count: int, nodes: list[Node], first: int = 0, mistake: Mistake = "") -> dict[str, int]:
    """Return how often each event happened in these walks. Raise an error with the seed if a walk was wrong."""
    sums: dict[str, int] = {}
    for seed in range(first, first + count):
        walk, Cadence.chance = Walk(seed, nodes, mistake), random.Random(seed)
        try:
            walk.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        finally:
            for rank in getattr(walk, "ranks", []):
                rank.host.kill()
        for name, number in walk.stories.items():
            sums[name] = sums.get(name, 0) + number
    return sums


def test_an_incomplete_device_copy_never_counts_and_a_kill_leaves_the_previous_one(nodes: list[Node]) -> None:
    seen = walks(8, nodes)
    assert seen["counted"] > 5, seen
    assert min(seen["copies"], seen["begin"]) > 3, seen


@pytest.mark.long
def test_an_incomplete_device_copy_never_counts_in_thousands_of_walks(nodes: list[Node]) -> None:
    """An incomplete copy must never be valid, also in thousands of random walks: some orders of events are rare."""
    walks(1_000, nodes, first=1_000_000)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_deliberate_bug_in_device_copies_is_found(nodes, mistake, monkeypatch):
    """A deliberate bug in device copies must be found, or the tests above could miss one."""
    if mistake == "the newest is written over":
        monkeypatch.setattr(copies, "area_for", lambda held: AREAS - 1)
    with pytest.raises(AssertionError, match="seed"):
        walks(100, nodes, mistake=mistake)
