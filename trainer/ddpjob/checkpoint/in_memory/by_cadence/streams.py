"""The torch.cuda calls that copy from a GPU into host memory while the host continues, in three classes.

Tested on an H100 (docs/measured.md, on a GPU). The callers are also tested with a fake device that does queued work
late, in any order that its streams allow (tests/support/late_device.py).
"""

from collections.abc import Sequence
from typing import Any

import torch

PORTABLE = 1  # cudaHostRegisterPortable: pinned for all contexts of the process


class StreamMark:
    """A CUDA event in a device's stream; done when the device has finished all work that was queued before it."""

    def __init__(self, device: torch.device) -> None:
        """Record the event on the current stream."""
        self._device, self._event = device, _event()
        self._event.record(torch.cuda.current_stream(device))

    def is_done(self) -> bool:
        """True if the device has reached the event. Does not wait."""
        return bool(self._event.query())

    def wait(self) -> None:
        """Block the host until the device has reached the event."""
        self._event.synchronize()


class Ticket(StreamMark):
    """A copy from a device into host memory; done when all bytes have arrived."""

    def __init__(
        self, device: torch.device, began: Any, ended: Any, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        self._device, self._began, self._event = device, began, ended
        self._pairs = pairs  # keeps the tensors: torch's allocator ignores the side stream and would reuse their memory
        self._held: tuple[Any, Any] | None = None

    def hold(self) -> None:
        """Make all later work on the current stream start after the copy. The host does not wait."""
        before = StreamMark(self._device)
        torch.cuda.current_stream(self._device).wait_event(self._event)
        if self._held is None:
            self._held = before._event, StreamMark(self._device)._event

    @property
    def seconds(self) -> float:
        """Seconds that the copy took on the device. The copy must be done."""
        return float(self._began.elapsed_time(self._event)) / 1000

    @property
    def held_seconds(self) -> float:
        """Seconds that the current stream waited for the copy; 0 before `hold`, or if that wait is not over."""
        if self._held is None or not self._held[1].query():
            return 0.0
        return float(self._held[0].elapsed_time(self._held[1])) / 1000


class Streams:
    """Copies from a CUDA device to the host's memory, one after the other on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side: Any = None

    def pin(self, memory: torch.Tensor) -> str:
        """Pin `memory`, so that the device can write to it asynchronously. Return the error; "" if there was none.

        PyTorch pins shared memory in the same way for torch.distributed's state dicts.
        """
        with torch.cuda.device(self.device):  # without this, a new thread would use device 0
            cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            error = int(cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), PORTABLE))
        return f"cudaHostRegister answers {error}" if error else ""

    def clone(self, tensor: torch.Tensor) -> torch.Tensor:
        """Queue a copy of this tensor on the device's current stream."""
        return tensor.detach().clone()

    def begin_copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Ticket:
        """Queue a copy for each (target, source) pair on a second stream. They start after all work queued so far."""
        if self._side is None:
            self._side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        began, ended = _event(), _event()
        with torch.cuda.stream(self._side):
            began.record()
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            ended.record()
        return Ticket(self.device, began, ended, pairs)

    def mark(self) -> StreamMark:
        """Record an event on the current stream, after all work that is queued there."""
        return StreamMark(self.device)

    def is_recording(self) -> bool:
        """True if the current stream is being captured into a CUDA graph: then queued work runs only at a replay."""
        return torch.cuda.is_current_stream_capturing()


def for_device(device: torch.device) -> Streams | None:
    """Return the streams of a CUDA device; None for any other kind, whose state cannot be copied."""
    return Streams(device) if device.type == "cuda" else None


def _event() -> Any:
    """Return a CUDA event. A host thread that waits for it sleeps and uses no CPU."""
    return torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
