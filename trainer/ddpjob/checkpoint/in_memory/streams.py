"""Copies from a device into memory while its host goes on: the calls of torch.cuda that they need, in three classes.

Run on an H100 (docs/measured.md, on a GPU). What uses it is tested besides with a device that does its work later, in
any order that its streams allow (tests/support/late_device.py).
"""

from collections.abc import Sequence
from typing import Any

import torch

PORTABLE = 1  # cudaHostRegisterPortable: pinned for all contexts of the process


class StreamMark:
    """A point in what a device does."""

    def __init__(self, device: torch.device) -> None:
        """Done when the device has done what its current stream was given so far."""
        self._device, self._event = device, _event()
        self._event.record(torch.cuda.current_stream(device))

    def is_done(self) -> bool:
        """Whether the device has come to it. Waits for nothing."""
        return bool(self._event.query())

    def wait(self) -> None:
        """Until it has."""
        self._event.synchronize()


class Ticket(StreamMark):
    """A copy that is on its way; done when all its bytes are there."""

    def __init__(
        self, device: torch.device, began: Any, ended: Any, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        self._device, self._began, self._event = device, began, ended
        self._pairs = pairs  # until it is done nobody else is given their memory: the other stream is not known to it
        self._held: tuple[Any, Any] | None = None

    def hold(self) -> None:
        """What the current stream is given from now on begins after the copy; the host does not wait."""
        before = StreamMark(self._device)
        torch.cuda.current_stream(self._device).wait_event(self._event)
        if self._held is None:
            self._held = before._event, StreamMark(self._device)._event

    @property
    def seconds(self) -> float:
        """How long the device has copied, once it is done."""
        return float(self._began.elapsed_time(self._event)) / 1000

    @property
    def held_seconds(self) -> float:
        """How long the current stream stood still for it; once a mark after `hold` is done."""
        if self._held is None or not self._held[1].query():  # of a stream that nothing has waited for
            return 0.0
        return float(self._held[0].elapsed_time(self._held[1])) / 1000


class Streams:
    """A CUDA device and the host's memory, with one stream for all copies: they are made one after the other."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side: Any = None

    def pin(self, memory: torch.Tensor) -> str:
        """Let the device write there by itself; "" or why it cannot: then the host waits for each copy.

        As PyTorch pins shared memory itself (torch.distributed's state dicts).
        """
        with torch.cuda.device(self.device):  # of a thread it would be the first one
            cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            error = int(cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), PORTABLE))
        return f"cudaHostRegister answers {error}" if error else ""

    def clone(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the device, made in the order of what it is given."""
        return tensor.detach().clone()

    def begin_copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Ticket:
        """Copy to each first from each second one, as it is when the device has done what it was given so far."""
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
        """Done when the device has done what the current stream was given so far."""
        return StreamMark(self.device)

    def is_recording(self) -> bool:
        """Whether what is given to the current stream is recorded for a CUDA graph, and not done now."""
        return torch.cuda.is_current_stream_capturing()


def for_device(device: torch.device) -> Streams | None:
    """None: there is no way for this kind."""
    return Streams(device) if device.type == "cuda" else None


def _event() -> Any:
    """One that a host waits for without turning its processor."""
    return torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
