"""A device that executes its work late, in any order that its streams allow, and hosts that use it.

Only the device's work changes its tensors. Hosts are threads, of which only one runs at a time. A host that waits for
its device lets the test choose what runs next."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterator, Sequence

import torch

Work = Callable[[], bool]
"""Does one piece of work. Returns False if it must wait for another stream or device."""


class Killed(BaseException):
    """Raised to end the thread of a host."""


class Host:
    """A rank's program, in a thread that runs only during `go_on`."""

    def __init__(self, body: Callable[[Host], None]) -> None:
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._waits: Callable[[], bool] = lambda: True
        self._killed = self.ended = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(body,), daemon=True)
        self._thread.start()

    def _run(self, body: Callable[[Host], None]) -> None:
        self._turn.acquire()
        try:
            if not self._killed:
                body(self)
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        self.ended = True
        self._back.release()

    def pause(self, until: Callable[[], bool] = lambda: True) -> None:
        """Called by the host's thread: let other threads run until the condition is true."""
        self._waits = until
        self._back.release()
        self._turn.acquire()
        if self._killed:
            raise Killed

    @property
    def can_go_on(self) -> bool:
        return not self.ended and self._waits()

    def go_on(self) -> None:
        """Run the host's thread until it pauses."""
        self._turn.release()
        self._back.acquire()
        if self.error is not None:
            raise self.error

    def kill(self) -> None:
        if not self.ended:
            self._killed = True
            self._turn.release()
            self._back.acquire()
        self._thread.join()


class Mark:
    """An event of a stream, with the methods that the library uses."""

    def __init__(self, device: LateDevice) -> None:
        self._device, self.reached = device, False

    def is_done(self) -> bool:
        return self.reached

    def wait(self) -> None:
        if not self.reached:
            self._device.host.pause(lambda: self.reached)

    def _reach(self) -> bool:
        self.reached = True
        return True


class Ticket(Mark):
    seconds = held_seconds = 0.001

    def hold(self) -> None:
        self._device.main.append(lambda: self.reached)


class LateDevice:
    """The device of one rank, with a main stream and a side stream."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.host: Host
        self.main: collections.deque[Work] = collections.deque()
        self.side: collections.deque[Work] = collections.deque()
        self._owned: list[torch.Tensor] = []

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Record a tensor that, from now on, only the device may change."""
        self._owned.append(tensor)
        return tensor

    def _owns(self, tensor: torch.Tensor) -> bool:
        place = tensor.untyped_storage().data_ptr()
        return any(own.untyped_storage().data_ptr() == place for own in self._owned)

    def give(self, work: Callable[[], object]) -> None:
        """Add work to the main stream, without a wait for it."""
        self.main.append(lambda: (work(), True)[1])

    @property
    def ready(self) -> list[collections.deque[Work]]:
        return [stream for stream in (self.main, self.side) if stream]

    def work(self, stream: collections.deque[Work]) -> bool:
        """Do the next piece of work of a stream, unless it must wait. Return True if it was done."""
        if not stream[0]():
            return False
        stream.popleft()
        return True

    # ---- the interface that the library uses ---------------------------------------------------------------

    def pin(self, memory: torch.Tensor) -> str:
        return ""

    def clone(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = self.own(torch.full_like(tensor.detach(), -1))
        self.give(lambda: copy.copy_(tensor.detach()))
        return copy

    def begin_copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Ticket:
        begun, ticket = self.mark(), Ticket(self)
        self.side.append(lambda: begun.reached)
        for target, source in pairs:
            if not self._owns(source):
                target.copy_(source)
                continue
            for part in self._halves(target, source):
                self.side.append(part)
        self.side.append(ticket._reach)
        return ticket

    def _halves(self, target: torch.Tensor, source: torch.Tensor) -> Iterator[Work]:
        middle = len(source) // 2
        for part in (slice(0, middle), slice(middle, None)):
            yield lambda part=part: (target[part].copy_(source[part]), True)[1]  # type: ignore[misc]

    def mark(self) -> Mark:
        mark = Mark(self)
        self.main.append(mark._reach)
        return mark

    def is_recording(self) -> bool:
        return False
