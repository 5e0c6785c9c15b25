"""A fake device that copies as late as allowed: when the next optimizer step waits for the copy, or long after a step
that does not wait. Its tensors are on the CPU; a script changes them as it would change tensors of a device."""

from collections.abc import Sequence

import torch


class Mark:
    """An event that reports completion only after several queries."""

    def __init__(self) -> None:
        self._asked = 0

    def is_done(self) -> bool:
        self._asked += 1
        return self._asked > 3

    def wait(self) -> None:
        self._asked = 3


class Ticket(Mark):
    seconds = held_seconds = 0.0

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self._pairs = pairs

    def hold(self) -> None:
        """Copy now, because the optimizer's next step is waiting for this copy."""
        for target, source in self._pairs:
            target.copy_(source)
        self._pairs = []

    def is_done(self) -> bool:
        done = super().is_done()
        if done:
            self.hold()
        return done

    def wait(self) -> None:
        self.hold()


class LastMoment:
    device = torch.device("cpu")
    cannot_pin = ""
    recording = False

    def pin(self, memory: torch.Tensor) -> str:
        return self.cannot_pin

    def clone(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone()

    def begin_copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Ticket:
        return Ticket(pairs)

    def mark(self) -> Mark:
        return Mark()

    def is_recording(self) -> bool:
        return self.recording
