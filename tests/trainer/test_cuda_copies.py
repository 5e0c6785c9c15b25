"""Copies of a state on a real GPU; and, where there is none, which calls of torch.cuda are made in which order.

Scripts run in processes of their own: one that has used CUDA cannot fork ranks for other tests.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from agents import Launcher, finish, forget_torchs_own

from ddpjob.checkpoint.streams import CudaStreams, for_device


def has_cuda() -> bool:
    """By NVML, so that this process can still fork."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        return torch.cuda.is_available()


on_gpu = pytest.mark.skipif(not has_cuda(), reason="needs a CUDA device")

STREAMS = """
import mmap, os, time
import torch
from ddpjob.checkpoint.streams import for_device

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
import hashlib, os, signal
import torch
import ddpjob
from ddpjob.core import copies

copies.COST_MAX = 1e9  # every fourth step is copied
generation, kill = int(os.environ["DDPJOB_GENERATION"]), os.environ.get("KILL", "").split()
torch.use_deterministic_algorithms(True)
with ddpjob.init(os.environ["BACKEND"]) as world:
    torch.manual_seed(7)
    layers = [torch.nn.Linear(8, 64), torch.nn.BatchNorm1d(64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 1)]
    model = world.wrap(torch.nn.Sequential(*layers))
    on_host = torch.nn.Linear(2, 2)  # some of the state is on the CPU
    optimizer = torch.optim.AdamW([*model.parameters(), *on_host.parameters()], lr=1e-2)
    x = torch.linspace(-1, 1, 512, device=world.device).view(64, 8)
    objects = dict(model=model, on_host=on_host, optimizer=optimizer)
    snapshot = ddpjob.Snapshot("snapshots", world)
    step = snapshot.load(**objects)
    print("BEGIN", step, flush=True)
    while step < 80:
        if generation < len(kill) and step == int(kill[generation]):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        (model(x).square().sum() + on_host(torch.ones(2)).square().sum().to(world.device)).backward()
        optimizer.step()
        step += 1
        ddpjob.should_stop(step)
        for thread in __import__("threading").enumerate():
            if thread.name == "ddpjob-memory-room":
                thread.join()
    snapshot.close()
    values = [*model.state_dict().values(), *on_host.state_dict().values()]
    bits = b"".join(value.cpu().numpy().tobytes() for value in values)
    print("END", hashlib.sha256(bits).hexdigest(), torch.rand(1, device=world.device).item(), flush=True)
"""


@on_gpu
def test_a_gpu_copies_what_was_there_at_the_boundary_while_the_host_goes_on(tmp_path: Path) -> None:
    """Else the copy would be of half a step, or each copy cost the time of the steps that the host is ahead."""
    script = tmp_path / "streams.py"
    script.write_text(STREAMS)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "SECONDS" in done.stdout


def lines(folder: Path, backend: str, kill: str) -> tuple[list[int], list[list[str]], str]:
    """Where each generation began, how the last one ended, and what was said."""
    folder.mkdir()
    launcher = Launcher(folder)
    env = {"KILL": kill, "BACKEND": backend, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = finish(launcher.ddprun("--nproc", 1, "--max-restarts", 9, launcher.script(TRAIN), **env), 150)
    assert done.returncode == 0, done.stderr
    forget_torchs_own(launcher)
    words = [line.split() for line in done.stdout.splitlines()]
    return [int(w[1]) for w in words if w[0] == "BEGIN"], [w[1:] for w in words if w[0] == "END"], done.stderr


@on_gpu
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_training_on_a_gpu_that_is_killed_goes_on_from_a_copy_with_the_same_bits(
    tmp_path: Path, backend: str
) -> None:
    """Of parameters, buffers, optimizer state and random states, some of them on the CPU."""
    _, undisturbed, _ = lines(tmp_path / "one", backend, "")
    began, ended, said = lines(tmp_path / "other", backend, "30 60")
    assert ended == undisturbed, said
    assert began[0] == 0, said
    assert 12 <= began[1] <= 28, said
    assert 44 <= began[2] <= 56, said
    assert "the state is copied each 4 steps, because after a failure nobody knows which step a GPU has come to" in said


# ---- without a GPU -----------------------------------------------------------------------------------------


class Told:
    """torch.cuda, as far as it is used; what it was told, in order."""

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


def test_the_copy_begins_after_what_the_device_was_given_and_the_next_step_after_the_copy(told: Told) -> None:
    """In another order the copy has half of the last step, or of the next one; a wait of the host would cost time."""
    streams = CudaStreams(torch.device("cuda", 1))
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
def test_memory_is_pinned_for_the_rank_s_own_device(told: Told, answer: int, says: str) -> None:
    """It happens in a thread, whose device would be the first one: each rank would take memory of GPU 0."""
    told.answer = answer
    assert CudaStreams(torch.device("cuda", 1)).pin(torch.zeros(64, dtype=torch.uint8)) == says
    assert told.calls == ["on cuda:1", "pinned 64 1"]


def test_only_cuda_has_streams() -> None:
    """On the CPU survivors write the state, which costs less; of other accelerators nothing is known."""
    assert for_device(torch.device("cpu")) is None
    assert for_device(torch.device("xpu", 0)) is None
    assert isinstance(for_device(torch.device("cuda", 0)), CudaStreams)
