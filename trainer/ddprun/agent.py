"""The agent: one loop over signals, sockets and time that never blocks. `core/` makes the decisions.

The leader's agent has the `LeaderState`; every other agent has one connection to it. If the connection is lost, both
sides end their ranks at once, because ranks cannot continue without each other. So an agent that reconnects has no
running ranks.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ddpjob import own_files
from ddpjob_core.budget import Grant
from ddpjob_core.failures import RESUMABLE_EXIT_CODE as RESUMABLE
from ddpjob_core.failures import Failure
from ddpjob_core.findings import NamedFinding
from ddpjob_core.heartbeat import RERUN_SIGNAL, STACKS_SIGNAL
from ddpjob_core.members import Members
from ddprun import processes
from ddprun.core.appointment import Appointment
from ddprun.core.leader_state import EndOrder
from ddprun.environment import Life
from ddprun.logs import LogFolder
from ddprun.node import LocalRanks, say
from ddprun.options import Options
from ddprun.preload import ForkServer

if TYPE_CHECKING:
    from ddprun.core.deadlock import Position
    from ddprun.core.stall_monitor import StallReport
    from ddprun.heartbeats import Heartbeats

# Signals that end a process without a handler.
_FATAL = "SIGHUP SIGINT SIGTERM SIGUSR1 SIGUSR2 SIGALRM SIGVTALRM SIGPROF SIGIO SIGPWR SIGXCPU".split()
WAIT_SECONDS_MAX = 3600.0  # poll accepts at most 24 days
MESSAGE_BEGINS = b'{"ddpjob"'


class Group(Protocol):
    """The role of an agent: leader or follower. The agent calls the methods for events of its node."""

    leads: bool

    @property
    def ask_seconds(self) -> float:
        """Seconds between two requests to the operator for the leader's address."""

    @property
    def deadline(self) -> float | None:
        """Time of the next call of `tick`; None if none is due."""

    def begin(self, now: float, /) -> None: ...
    def leave(self) -> int: ...
    def granted(self, grant: Grant, /) -> None: ...
    def tick(self, now: float, /) -> None: ...
    def failed(self, failures: list[Failure], now: float, /) -> None: ...
    def stopped(self, failures: list[Failure], now: float, /) -> None: ...
    def finished(self, now: float, /) -> None: ...
    def termination_requested(self, now: float, /) -> None: ...
    def rerun(self, now: float, /) -> None: ...
    def abandon(self) -> None: ...
    def stood(self, report: StallReport, now: float, /) -> None: ...
    def answered(self, report: StallReport, positions: Sequence[Position], now: float, /) -> None: ...


class Watchdog(Protocol):
    """Detects that the ranks of this node are stalled."""

    @property
    def deadline(self) -> float | None:
        """Time of the next call of `tick`; None if none is due."""

    def begin(self, beats: Heartbeats, /) -> None: ...
    def tick(self, now: float, /) -> None: ...
    def ask(self, now: float, /, *, quiet: bool = False) -> None: ...
    def others_have_ended(self) -> None: ...
    def ask_stacks(self, now: float, /) -> None: ...
    def end(self) -> None: ...


class Asker(Protocol):
    """Asks the status receiver who leads."""

    @property
    def deadline(self) -> float | None:
        """Time of the next call of `tick`; None if none is due."""

    def tick(self, now: float, seconds: float, /) -> None: ...
    def ask_soon(self) -> None: ...


class Agent:
    """The agent of one node of a job."""

    group: Group
    group_of: Callable[[bool, int], Group]
    """Returns the agent's next role: True to lead, and the last generation of this node's ranks."""
    watching: Watchdog
    asking: Asker

    def __init__(
        self, options: Options, environ: Mapping[str, str], folder: LogFolder, server: ForkServer | None
    ) -> None:
        self.options, self.environ, self.folder = options, environ, folder
        self.code: int | None = None
        self.termination_signal = 0  # signal that requested the termination; 0: none
        self._on_signal = self._signal_handlers()
        self._signals = processes.listen_to_signals(self._on_signal)
        self._poller = select.poll()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._server = server
        self.node = LocalRanks(options, environ, folder, server)
        self.members = Members()  # nodes of the last generation in which this node took part
        self._failure_reported = False
        self.settled = True  # False until all ranks of the last generation have ended on this node
        self.leader = Appointment(1, options.places.leader, options.host, options.port, options.grant)
        self._next_leader: Appointment | None = None

    def _signal_handlers(self) -> dict[int, Callable[[int], None]]:
        """Return what to do for each signal. A later entry replaces an earlier one for the same signal."""
        handlers: dict[int, Callable[[int], None]] = dict.fromkeys(_fatal(), self._end_by)
        if self.options.dev and self.options.place == self.options.places.leader:
            handlers[RERUN_SIGNAL] = lambda _: self.group.rerun(time.monotonic())
        # SIGQUIT prints the stacks, unless the user has configured it to end the job. STACKS_SIGNAL always prints them.
        for number in (signal.SIGQUIT, STACKS_SIGNAL):
            handlers[number] = lambda _: self.watching.ask_stacks(time.monotonic())
        is_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # with nohup, a closed terminal must not end jobs
        names = [name for name in self.options.signals if not (is_nohup and name == "SIGHUP")]
        return handlers | dict.fromkeys((getattr(signal, name) for name in names), self._terminate)

    # ---- the loop ------------------------------------------------------------------------------------------

    def run(self) -> int:
        self.watch(self._signals, self._receive_signals)
        if self._server is not None:
            self.watch(self._server.fileno(), self._receive_from_server)
            self.watch(self._server.later.fileno(), self._receive_learned)
        self.group.begin(time.monotonic())
        while self.code is None:
            for descriptor, _ in self._poller.poll(self._milliseconds()):
                heard = self._callbacks.get(descriptor)
                if heard is not None:
                    heard()
            self._turn()
        return self.code

    def watch(self, descriptor: int, heard: Callable[[], None], *, write: bool = False) -> None:
        """Call `heard` when the descriptor can be read, or with write=True also when it can be written to."""
        self._poller.register(descriptor, select.POLLOUT if write else select.POLLIN)
        self._callbacks[descriptor] = heard

    def unwatch(self, descriptor: int) -> None:
        if self._callbacks.pop(descriptor, None) is not None:
            self._poller.unregister(descriptor)

    def _turn(self) -> None:
        now = time.monotonic()
        for pid, code in processes.reaped():
            self.node.ended(pid, code)
        self.node.advance()
        self.node.tick(now)
        if self.node.ending.outlives_sigkill(now):
            # Without this exit the agent would wait forever. If it ends, the job continues with another pod.
            say("a rank does not end after SIGKILL, because it waits in the kernel; this node is given up")
            return self.group.abandon()
        self.folder.copy()
        self._report(now)
        self.watching.tick(now)
        self.asking.tick(now, self.group.ask_seconds)
        self._change_leader(now)
        return self.group.tick(now)

    def _report(self, now: float) -> None:
        """Report the first failure of a rank at once, and the result when all ranks of this node have ended."""
        if self.settled:
            return
        if self.node.failures and not self._failure_reported:
            self._failure_reported = True
            self.group.failed(self.node.failures, now)
        if self.node.running:
            return
        self.settled = True
        self.watching.end()
        failures = self.node.settle()
        if self.termination_signal and not self.group.leads:
            if not failures and not self.node.ending.by_group:
                self.group.finished(now)  # otherwise node 0 might wait for this node forever
            self.end(self.termination_code(), None)
        elif self.node.ending.by_group or failures:
            self.group.stopped(failures, now)
        else:
            self.group.finished(now)

    def _milliseconds(self) -> float:
        now = time.monotonic()
        times = [self.node.deadline(now), self.folder.deadline(now)]
        times += [self.group.deadline, self.watching.deadline, self.asking.deadline]
        deadlines = [now + WAIT_SECONDS_MAX, *(at for at in times if at)]
        if not self.settled and not self.node.running:  # no rank could be started
            deadlines.append(now)
        return max(0.0, min(deadlines) - now) * 1000 + 1

    def _receive_signals(self) -> None:
        for number in os.read(self._signals, 4096):
            if (handle := self._on_signal.get(number)) is not None:  # None for SIGCHLD
                handle(number)

    def _end_by(self, number: int) -> None:
        """End on a signal that torchrun ends on, too. The agent handles it only to remove its folder first."""
        handled = ",".join(self.options.signals)
        say(f"ended by {signal.Signals(number).name}, which is not among --signals-to-handle: {handled}")
        self.code = 128 + number

    def _terminate(self, number: int) -> None:
        """Forward a signal, for instance the kubelet's, to the ranks, which have shutdown_seconds to end."""
        first, self.termination_signal = not self.termination_signal, self.termination_signal or number
        now = time.monotonic()
        if not first:
            if number == signal.SIGINT:  # at a second Ctrl-C kill at once
                self.node.ending.kill_now(now)
            return
        self.watching.end()
        if self.node.running:
            self.node.tell(number, self.options.shutdown_seconds, now)
        elif self.node.exit_code:
            self.node.forget()
        self.group.termination_requested(now)

    def _receive_from_server(self) -> None:
        assert self._server is not None, "only a server is heard"
        given_up = bool(self._server.refused)  # already logged
        self._server.hear()
        if self._server.refused:
            self.unwatch(self._server.fileno())
            self._server.close()
            if not given_up:
                say(f"no fork server: {self._server.refused}; every rank is a new process (or use --no-preload)")
        for name, why in self._server.failed.items():
            say(f"--preload: {name}: {why}; left out")
        self._server.failed = {}

    def _receive_learned(self) -> None:
        """If the fork server's child has learned the ranks' imports and can serve, replace the server by this child."""
        assert self._server is not None, "only a server is heard"
        before, later = self._server.fileno(), self._server.later.fileno()
        self.unwatch(later)
        if self._server.hear_later():
            self.unwatch(before)
            self.watch(later, self._receive_from_server)

    # ---- who leads -----------------------------------------------------------------------------------------

    @property
    def is_appointed(self) -> bool:
        """True if the newest appointment says that this agent leads."""
        return self.leader.term > 0 and self.leader.place == self.options.place

    @property
    def turn(self) -> int:
        """Number of this leader in the attempt; each later leader has a higher number."""
        return self.leader.term if self.leader.term > 1 else self.options.replacement

    def take_answer(self, leader: Appointment) -> None:
        """Record who leads. The role changes when no ranks are being stopped. A leader also learns what is left of its
        budget, of which the operator may have spent a part."""
        if leader.replaces(self._next_leader or self.leader):
            self._next_leader = leader
        elif leader.term == self.leader.term and leader.grant is not None:
            self.group.granted(leader.grant)

    def _change_leader(self, now: float) -> None:
        """Follow the newest leader, or lead, once all ranks here have ended: stopping ranks may be saving together."""
        leader, ends_already = self._next_leader, not self.settled and (self.node.ending.by_group or self.node.failures)
        if leader is None or ends_already or self.code is not None:
            return
        self._next_leader = None
        if self.leader.term:
            say(f"node {leader.place} is appointed the leader, term {leader.term}")
        generation = self.group.leave()
        self.stop(now, patient=False)
        self.leader, self.group = leader, self.group_of(False, generation)
        self.group.begin(now)

    def lead(self, generation: int, now: float) -> None:
        """Lead the group from now on. generation: the last generation of this node's ranks."""
        self.group = self.group_of(True, generation)
        self.group.begin(now)

    # ---- what the group orders -----------------------------------------------------------------------------

    def start(self, life: Life) -> None:
        """Start the ranks of a generation."""
        self.settled = self._failure_reported = False
        self.members = life.members
        self.node.start(life)
        if life.generation and self._server is not None and (learned := self._server.tell_learned()):
            say(learned)
        if not life.preflight and self.node.beats is not None:
            self.watching.begin(self.node.beats)
        # Import what the first failure will need. An earlier import would delay the start of the ranks.
        from ddpjob.reporting import termination  # noqa: F401

    def stop(self, now: float, *, patient: bool, furthest: int = 0) -> None:
        """End the ranks, then call `group.stopped`. furthest: highest CLOCK (ddpjob_core/memory.py) of other nodes."""
        self.watching.end()
        if self.node.running:
            options = self.options
            grace = options.shutdown_seconds if patient else options.broken_grace_seconds
            rescue = not patient or self.node.cannot_save
            self.node.stop(signal.SIGTERM, grace, now, rescue=rescue, furthest=furthest)
        elif self.settled:
            if self.node.exit_code == 0:
                self.node.forget()  # ranks that ended with 0 start again, too
            self.group.stopped([], now)

    def end(
        self,
        code: int,
        failure: Failure | None,
        *,
        ended: bool = False,
        account: dict[str, Any] | None = None,
        findings: Sequence[NamedFinding] = (),
    ) -> None:
        """End this agent: leave the termination message, and make `run` return.

        ended: True if the leader ends the whole group; False if only this agent ends, and another pod replaces it.
        account: restarts that node 0 has charged. findings: reasons to doubt an exit code of 0.
        """
        known = self.node.termination_message() if code != 0 else None
        if code != 0 and failure is not None and failure.rank is not None and self.is_mine(failure):
            known = failure._replace(traceback=self.node.traceback_of(failure.rank))
        group: dict[str, Any] = ({"ended": True} if ended else {}) | ({"agent": account} if account else {})
        if findings:
            group["findings"] = [finding.as_dict() for finding in findings]
        message = group if code != 0 or account or findings else {}
        if known is not None or (code != 0 and not self.termination_signal):
            # Without this message a pipeline such as `ddprun train.py | tee log` exits with 0 and hides the failure.
            own = {"exitCode": code} if known is None else known.as_dict()
            message = own | group | {"failed": not self.termination_signal}
        if message:
            leave_message(self.environ.get("DDPJOB_TERMINATION_LOG"), message)
        self.code = code

    def termination_code(self) -> int:
        """Return the exit code of the ranks, or 128 + the signal if no rank had started."""
        return 128 + self.termination_signal if self.node.exit_code is None else self.node.exit_code

    def own_code(self, order: EndOrder) -> int:
        """Return this agent's exit code: the failed rank's code on its own node, 75 on other nodes."""
        if order.code == 0:
            return 0
        if self.termination_signal:
            return self.termination_code()
        return order.code if self.is_mine(order.failure) else RESUMABLE

    def is_mine(self, failure: Failure | None) -> bool:
        """True if the rank of this failure belongs to this node."""
        if failure is None or failure.rank is None:
            return False
        return self.members.place_of_rank(failure.rank, self.options.nproc) == self.options.place


def _fatal() -> set[int]:
    """Return the signals that would end this process, except those that were ignored when it started."""
    numbers = (getattr(signal, name) for name in _FATAL)
    return {number for number in numbers if signal.getsignal(number) != signal.SIG_IGN}


def leave_message(path: str | None, message: dict[str, Any]) -> None:
    """Write the pod's termination message."""
    if not path:
        return
    from ddpjob.reporting.termination import write_over

    with contextlib.suppress(OSError):
        descriptor = own_files.open_file(path, os.O_WRONLY | os.O_CREAT)
        try:
            write_over(descriptor, message)
        finally:
            os.close(descriptor)


def forget_message(path: str | None) -> None:
    """Remove the message that an earlier launcher left in this container, as in `ddprun a.py || ddprun b.py`."""
    with contextlib.suppress(OSError):
        if path and os.path.getsize(path):
            with open(path, "r+b", opener=own_files.opener) as file:
                if file.read(len(MESSAGE_BEGINS)) == MESSAGE_BEGINS:
                    file.truncate(0)
