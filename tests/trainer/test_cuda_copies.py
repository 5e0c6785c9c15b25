"""Copies of a state on a real GPU. Without a GPU only the order of torch.cuda calls is tested. Scripts run in new
processes, because a process that has used CUDA cannot fork ranks for other tests."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import real_gpus
import torch
from agents import Launcher, finish

from ddpjob.checkpoint.in_memory.by_cadence.streams import Streams, for_device

on_gpu = pytest.mark.skipif(not real_gpus.count(), reason="needs a CUDA device")

STREAMS = """
import mmap, os, time
import torch
from ddpjob.checkpoint.in_memory.by_cadence.streams import for_device

device = torch.device("cuda", 0)
torch.cuda.set_device(device)
streams = for_device(device)
size = 64 << 20
file = os.memfd_create("area")
os.posix_fallocate(file, 0, size)
area = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
assert streams.pin(area) == "", "it is not pinned"
assert area.is_pinned(), "torch does not know it"
state = torch.zeros(size, dtype=torch.uint8, device=device)
busy = torch.randn(4096, 4096, device=device)
torch.cuda.synchronize()
for number in range(1, 6):
    for _ in range(100):
        busy = busy @ busy * 1e-3
    state.fill_(number)
    began = time.perf_counter()
    ticket = streams.begin_copy([(area, state)])
    ticket.hold()
    state.fill_(100 + number)
    mark = streams.mark()
    seconds = time.perf_counter() - began
    assert not mark.is_done(), "the host has waited for the device"
    mark.wait()
    assert ticket.is_done() and bool((area == number).all()), "the copy is of another moment"
    assert bytes(os.pread(file, 4, size - 4)) == bytes([number] * 4), "the agent does not see it"
print("SECONDS", seconds, ticket.seconds, ticket.held_seconds)
"""

TRAIN = """
import contextlib, hashlib, os, random, signal, threading
import torch
import ddpjob
from ddpjob_core import copies

copies.COST_MAX = 1e9  # every fourth step is copied
rank, generation = int(os.environ["RANK"]), int(os.environ["DDPJOB_GENERATION"])
os.environ["NCCL_HOSTID"] = os.environ["RANK"]  # NCCL then lets the ranks of two nodes share a GPU
kill, how = os.environ.get("KILL", "").split(), os.environ.get("HOW", "")
seed, width, steps = os.environ.get("SEED"), int(os.environ.get("WIDTH", 64)), int(os.environ.get("STEPS", 80))
torch.use_deterministic_algorithms(True)

def until_reserved():
    for thread in threading.enumerate():
        if thread.name == "ddpjob-memory-room":
            thread.join()

@contextlib.contextmanager
def without_waits(step):
    "torch raises where the host would wait for the device; only the proof of the first steps may, and what is named."
    torch.cuda.set_sync_debug_mode("default" if step <= 8 or how in ("scaler", "on the gpu") else "error")
    yield
    torch.cuda.set_sync_debug_mode("default")

with ddpjob.init(os.environ["BACKEND"]) as world:
    torch.manual_seed(7)
    net = torch.nn.Sequential(
        torch.nn.Linear(8, width), torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.2), torch.nn.Linear(width, width),
        torch.nn.ReLU(), torch.nn.Linear(width, 1)
    )
    model = world.wrap(torch.compile(net) if how == "compile" else net)
    groups = [{"params": [*model.parameters()]}]
    options = {"fused": {"fused": True}, "on the gpu": {"capturable": True}}.get(how, {})
    lr = torch.tensor(1e-2, device=world.device) if how == "on the gpu" else 1e-2
    on_host = torch.nn.Linear(2, 2)  # some of the state is on the CPU
    torch.manual_seed(7 + rank)
    if how in ("", "compile"):
        groups.append({"params": [*on_host.parameters()]})
    optimizer = torch.optim.AdamW(groups, lr=lr, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
    scaler = torch.amp.GradScaler("cuda", enabled=how == "scaler", init_scale=2.0**10, growth_interval=7)
    x = torch.linspace(-1, 1, 512, device=world.device).view(64, 8) + rank
    objects = dict(model=model, on_host=on_host, optimizer=optimizer, scheduler=scheduler, scaler=scaler)
    snapshot = ddpjob.Snapshot("snapshots", world)
    step = snapshot.load(**objects)
    print("BEGIN", step, flush=True) if rank == 0 else None
    chance = random.Random(f"{seed} {generation}")
    if seed and generation < 3 and rank == chance.randrange(world.world_size):
        threading.Timer(chance.uniform(0, 1.5), os.kill, (os.getpid(), signal.SIGKILL)).start()
    while step < steps:
        if generation < len(kill) and f"{rank}:{step}" == kill[generation]:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16, enabled=how == "scaler"):
            loss = model(x).square().mean()
        loss = loss + on_host(torch.ones(2)).square().sum().to(world.device)
        scaler.scale(loss).backward()
        with without_waits(step):
            scaler.step(optimizer)
            scaler.update()
        scheduler.step()
        step += 1
        with without_waits(step):
            ddpjob.should_stop(step)
        until_reserved()
    snapshot.close()
    moments = [value for its in optimizer.state_dict()["state"].values() for value in its.values()]
    values = [*net.state_dict().values(), *on_host.state_dict().values(), *moments]
    bits = b"".join(value.cpu().numpy().tobytes() for value in values)
    number = torch.rand(1, device=world.device).item()
    os.write(1, f"END {rank} {hashlib.sha256(bits).hexdigest()} {number}\\n".encode())  # whole lines: two ranks write
"""

# Steps of this script replay a CUDA graph, so hooks of the optimizer are not called.
GRAPH = """
import torch
import ddpjob

with ddpjob.init() as world:
    model = torch.nn.Linear(8, 8).to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2, device=world.device), capturable=True)
    x = torch.ones(4, 8, device=world.device)
    snapshot = ddpjob.Snapshot("snapshots", world)
    step = snapshot.load(model=model, optimizer=optimizer)

    def train():
        optimizer.zero_grad(set_to_none=False)
        model(x).square().sum().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(6):
            train()
            step += 1
            ddpjob.should_stop(step)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train()
    while step < 30:
        graph.replay()
        step += 1
        ddpjob.should_stop(step)
    snapshot.save(step, model=model, optimizer=optimizer)
    snapshot.close()
    print("END", step, flush=True)
"""


@on_gpu
def test_a_gpu_copies_the_state_of_the_boundary_while_the_host_continues(tmp_path: Path) -> None:
    """A copy from a GPU must have the values of one step only, and training must not wait for each copy."""
    script = tmp_path / "streams.py"
    script.write_text(STREAMS)
    env = {**os.environ, **real_gpus.shown()}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    assert "SECONDS" in done.stdout


def ends(folder: Path, nodes: int, **env: str) -> tuple[list[int], set[tuple[str, ...]], str]:
    """Return the first step of each generation, the end of each rank, and the output."""
    folder.mkdir()
    launcher = Launcher(folder)
    options = ["--nproc", 2 // nodes if env["BACKEND"] == "gloo" else 1, "--max-restarts", 9, launcher.script(TRAIN)]
    env = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_SOCKET_IFNAME": "lo"} | real_gpus.shown() | env
    agents = launcher.nodes(nodes, *options, **env) if nodes > 1 else [launcher.ddprun(*options, **env)]
    ended = [finish(agent, 150) for agent in agents]
    said = "".join(done.stderr for done in ended)
    assert [done.returncode for done in ended] == [0] * nodes, said
    words = [line.split() for done in ended for line in done.stdout.splitlines()]
    return [int(w[1]) for w in words if w[0] == "BEGIN"], {tuple(w[1:]) for w in words if w[0] == "END"}, said


@on_gpu
@pytest.mark.parametrize(
    ("backend", "nodes", "how", "kill"),
    [
        ("nccl", 1, "", "0:30 0:60"),
        ("nccl", 2, "", "1:30 0:60"),
        ("gloo", 1, "", "1:30 0:60"),
        ("nccl", 1, "scaler", "0:30 0:60"),
        ("nccl", 1, "fused", "0:30 0:60"),
        ("nccl", 1, "on the gpu", "0:30 0:60"),
        ("nccl", 1, "compile", "0:30 0:60"),
    ],
)
def test_a_killed_gpu_training_resumes_from_a_copy_with_bitwise_equal_results(tmp_path, backend, nodes, how, kill):
    """After a kill the state (parameters, buffers, optimizer state, random states, partly on the CPU) must be restored
    with the same bits. The host waits for no copy."""
    of = {"BACKEND": backend, "HOW": how}
    _, undisturbed, _ = ends(tmp_path / "one", nodes, **of)
    began, ended, said = ends(tmp_path / "other", nodes, **of, KILL=kill)
    assert "not kept" not in said
    assert ended == undisturbed, said
    assert began[0] == 0, said
    assert 12 <= began[1] <= 28, said
    assert 44 <= began[2] <= 56, said
    assert (
        "the state is copied every 4 steps, because after a failure it is unknown which step a GPU has reached" in said
    )


@on_gpu
@pytest.mark.parametrize(("backend", "nodes"), [("nccl", 1), ("nccl", 2), ("gloo", 1)])
@pytest.mark.parametrize("seed", ["1", "2"])
def test_kills_at_any_moment_of_a_gpu_change_no_bit(tmp_path: Path, backend: str, nodes: int, seed: str) -> None:
    """A rank that is killed while 50 MB are being copied from the GPU, or read back, must not change the result."""
    of = {"BACKEND": backend, "STEPS": "300", "WIDTH": "2048"}
    _, undisturbed, _ = ends(tmp_path / "one", nodes, **of)
    began, ended, said = ends(tmp_path / "other", nodes, **of, SEED=seed)
    assert len(began) > 1, "nobody was killed"
    assert ended == undisturbed, said
    assert began == sorted(began), said
    assert "not kept" not in said


@on_gpu
def test_steps_in_a_real_cuda_graph_are_not_kept_with_a_reason(tmp_path: Path) -> None:
    """If a CUDA graph makes the steps, no state is kept, because a replay calls no hook that counts steps."""
    launcher = Launcher(tmp_path)
    done = launcher.done("--nproc", 1, launcher.script(GRAPH), **real_gpus.shown())
    assert (done.returncode, done.stdout.split()) == (0, ["END", "30"]), done.stderr
    assert "a CUDA graph makes the optimizer's steps, so no step is noticed" in done.stderr


# ---- without a GPU -----------------------------------------------------------------------------------------


class Told:
    """A fake torch.cuda that records its calls in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.answer = 0

    def stream(self, name: str) -> Any:
        told = self

        class Stream:
            def wait_stream(self, other: Any) -> None:
                told.calls.append(f"{name} waits for {other}")

            def wait_event(self, event: Any) -> None:
                told.calls.append(f"{name} waits for {event}")

            def __str__(self) -> str:
                return name

        return Stream()

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        current, side, told = [self.stream("current")], self.stream("side"), self

        class Event:
            number = 0

            def __init__(self, *, enable_timing: bool, blocking: bool) -> None:
                Event.number += 1
                self.name = f"event {Event.number}"

            def record(self, stream: Any = None) -> None:
                told.calls.append(f"{self.name} on {stream or current[-1]}")

            def query(self) -> bool:
                return True

            def synchronize(self) -> None:
                told.calls.append(f"host waits for {self.name}")

            def elapsed_time(self, other: Any) -> float:
                return 250.0

            def __str__(self) -> str:
                return self.name

        class Cudart:
            def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
                told.calls.append(f"pinned {size} {flags}")
                return told.answer

        @contextlib.contextmanager
        def on_stream(stream: Any) -> Iterator[None]:
            current.append(stream)
            yield
            current.pop()

        @contextlib.contextmanager
        def on_device(device: torch.device) -> Iterator[None]:
            told.calls.append(f"on {device}")
            yield

        patch.setattr(torch.cuda, "Stream", lambda device: side)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: current[-1])
        patch.setattr(torch.cuda, "stream", on_stream)
        patch.setattr(torch.cuda, "device", on_device)
        patch.setattr(torch.cuda, "cudart", Cudart)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    told = Told()
    told.patch(monkeypatch)
    return told


def test_the_copy_begins_after_queued_device_work_and_the_next_step_after_the_copy(told: Told) -> None:
    """The copy must begin after all queued work, and the next step after the copy. Otherwise the copy would mix two
    steps. The host must not wait for the copy."""
    streams = Streams(torch.device("cuda", 1))
    target, source = torch.zeros(4), torch.ones(4)
    ticket = streams.begin_copy([(target, source)])
    ticket.hold()
    assert told.calls == [
        "side waits for current",
        "event 1 on side",
        "event 2 on side",
        "event 3 on current",
        "current waits for event 2",
        "event 4 on current",
    ]
    assert torch.equal(target, source)
    assert (ticket.is_done(), ticket.seconds, ticket.held_seconds) == (True, 0.25, 0.25)
    streams.mark().wait()
    assert told.calls[6:] == ["event 5 on current", "host waits for event 5"]


@pytest.mark.parametrize(("answer", "says"), [(0, ""), (712, "cudaHostRegister answers 712")])
def test_memory_is_pinned_for_the_device_of_the_rank(told: Told, answer: int, says: str) -> None:
    """The thread that pins memory must select the rank's GPU, because a new thread uses GPU 0."""
    told.answer = answer
    assert Streams(torch.device("cuda", 1)).pin(torch.zeros(64, dtype=torch.uint8)) == says
    assert told.calls == ["on cuda:1", "pinned 64 1"]


def test_only_cuda_devices_get_copies_by_streams() -> None:
    """Only CUDA devices get copies by streams: on the CPU surviving ranks write the state, which is cheaper."""
    assert for_device(torch.device("cpu")) is None
    assert for_device(torch.device("xpu", 0)) is None
    assert isinstance(for_device(torch.device("cuda", 0)), Streams)
