"""The ranks of this node: start them, see how they end, and end them with all their descendants."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddpjob import own_files
from ddpjob_core.failures import (
    EXCEPTION_MAX,
    KILLED_BY_KERNEL,
    OUTPUT_UNREAD,
    Failure,
    abridged,
    first_line,
    signal_name,
    where_of,
)
from ddpjob_core.failures import RESUMABLE_EXIT_CODE as RESUMABLE
from ddpjob_core.heartbeat import STACKS_SIGNAL
from ddprun import environment, missing_script, processes
from ddprun.core import crash
from ddprun.core.generation import Ended
from ddprun.ending import Ending
from ddprun.environment import Life
from ddprun.heartbeats import Heartbeats
from ddprun.logs import Files, LogFolder, is_read, takes
from ddprun.memory import created
from ddprun.oom_kills import OomKills
from ddprun.options import Options
from ddprun.preload import ForkServer

if TYPE_CHECKING:
    from ddprun.core.rank_ends import NodeEnd

LINGERING_SECONDS = 5.0  # a process that is still there this long after SIGKILL is held by the kernel
NOTE_SECONDS = 0.5  # seconds between two checks for a rank's list of imports
SPARES_AFTER_SECONDS = 5.0  # spares are forked this long after the start: starting ranks need the CPUs
FILE_BYTES_MAX = 1 << 16
END_BYTES_MAX = 1 << 22  # limit for a rank's end record; enough for a model with 20,000 parameters
STDERR = 2
_OF_PIPE = "BrokenPipeError"
_UNFLUSHED = 120  # Python's exit code if it cannot flush stdout at its end


class LocalRanks:
    """The ranks of this pod, one generation at a time."""

    def __init__(
        self, options: Options, environ: Mapping[str, str], folder: LogFolder, server: ForkServer | None
    ) -> None:
        self._options, self._environ, self._folder, self._server = options, environ, folder, server
        self._life: Life | None = None
        self._ranks: Sequence[int] = ()  # global ranks of this generation, by local rank
        self._waiting = False  # True if the ranks wait for the fork server
        self._spares_at: float | None = None  # when spare processes for the next generation are forked
        self._learn_at: float | None = None  # when to check if a rank has written its list of imports
        self._pids: dict[int, int] = {}  # pids of running ranks, by local rank
        self._codes: dict[int, int] = {}  # exit codes of ended ranks, by local rank; negative for a signal
        self._files: list[Files] = []
        self._kills = OomKills()
        self.beats: Heartbeats | None = None  # heartbeats of this generation's ranks
        self._saved_before = 0  # highest `saved_step` of earlier generations
        self.memory = None if options.dev else created(options.nproc)  # None for `dev`: the next ranks may run new code
        self.failures: list[Failure] = []  # failures of this generation, in order, except those of stopped ranks
        self.ending = Ending(self._pids, self.memory)
        self.helpers: set[int] = set()  # children of the agent that belong to no rank and outlive a generation
        self.ended_well: Ended | None = None  # first rank of this generation that ended with 0 by itself

    @property
    def running(self) -> bool:
        """True if a rank of this generation, or a signalled descendant, is running or about to start."""
        return self._waiting or bool(self._pids) or bool(self.ending.left)

    @property
    def can_start(self) -> bool:
        """True if ranks would start at once: the fork server has finished its imports, or there is none."""
        return self._server is None or self._server.settled

    @property
    def running_ranks(self) -> set[int]:
        """Local ranks that are running."""
        return set(self._pids)

    def pid(self, local_rank: int) -> int:
        """Return the pid of a local rank; 0 if it has ended."""
        return self._pids.get(local_rank, 0)

    def crash_file(self, local_rank: int) -> str:
        """Return the file into which faulthandler writes the stacks of a rank."""
        return self._files[local_rank].crash

    def rank(self, local_rank: int) -> int:
        """Return the global rank of a local rank in this generation."""
        return self._ranks[local_rank]

    @property
    def furthest_step(self) -> int:
        """Highest step that a rank of this generation has reported."""
        return 0 if self.beats is None else self.beats.furthest_step

    @property
    def saved_step(self) -> int:
        """Step of the newest checkpoint that the ranks have saved or loaded; 0 if none is known."""
        return (0 if self.beats is None else self.beats.saved_step) or self._saved_before

    @property
    def step_in_memory(self) -> int:
        """Step of the complete state that this generation left in this node's memory; 0 if there is none."""
        whole = None if self.memory is None else self.memory.whole
        return whole.step if whole and self._life and whole.generation == self._life.number else 0

    @property
    def cannot_save(self) -> bool:
        """True if SIGTERM would end a rank with a state in memory: its script calls `keep`, but not `should_stop`."""
        return self.memory is not None and any(processes.would_end(pid, signal.SIGTERM) for pid in self.memory.keepers)

    @property
    def clock(self) -> int:
        """Highest CLOCK at which a rank of this node has completed a step (ddpjob_core/memory.py); 0 if unknown."""
        return 0 if self.memory is None else self.memory.clock

    @property
    def exit_code(self) -> int | None:
        """Exit code of all ranks together; None if none has trained.

        0 if all ranks ended with 0; 75 if a rank ended with 75, unless another rank reports an unsaved state.
        """
        if not self._codes or (self._life is not None and self._life.preflight):
            return None
        codes = [as_exit_code(code) for code in self._codes.values()]
        others = [code for code in codes if code not in (0, RESUMABLE)]
        if RESUMABLE in codes:
            from ddpjob_core import rules

            if not (others and any(rules.is_unsaved(failure.exception) for failure in self.failures)):
                return RESUMABLE
        return next(iter(others), 0)

    def start(self, life: Life) -> None:
        """Start all ranks: now, or when the fork server has finished its imports."""
        assert not self.running, "one generation at a time"
        self._life, self._codes, self.failures = life, {}, []
        self._ranks = life.members.ranks(self._options.place, self._options.nproc)
        self.ending = Ending(self._pids, None if life.preflight else self.memory)
        self.ended_well = None
        self._kills.look()
        self._saved_before = self.saved_step
        if self.beats is not None:
            self.beats.close()
        self.beats = None
        try:
            self.beats = Heartbeats(self._options.nproc)
            self._files = self._folder.prepare(life.name, self._ranks)
            if self.memory is not None and not life.preflight:
                self.memory.begin(life.number)
        except OSError as error:  # no descriptors left, a full disk, or somebody has emptied /tmp
            self._files = [Files("", "", "", "", "")] * self._options.nproc
            self._has_not_started(0, error)
            return
        self._waiting = True
        if self._options.dev and self._server is not None and (why := self._server.look_for_changes()):
            say(f"no fork server: {why}; every rank is a new process")
        self.advance()

    def advance(self) -> None:
        """Start the ranks if they wait for the fork server and it is ready."""
        if self._waiting and self.can_start:
            self._waiting = False
            for local_rank in range(self._options.nproc):
                if not self.failures:
                    self._start_or_fail(local_rank)
            if not self.failures:
                self._spares_at = time.monotonic() + SPARES_AFTER_SECONDS
                self._learn_at = time.monotonic() + NOTE_SECONDS if self._can_learn else None

    def ended(self, pid: int, code: int) -> None:
        """Record that a child has ended."""
        local_rank = next((rank for rank, its in self._pids.items() if its == pid), None)
        if local_rank is None:
            if self._server is not None:
                self._server.spares.discard(pid)
            return
        self._fork_no_spares()
        del self._pids[local_rank]
        self._codes[local_rank] = code
        if code == 0 and not self.ending.numbers and self.ended_well is None:
            self.ended_well = (self.rank(local_rank), self._step(local_rank))
        if code != 0 and not self.ending.by_group:
            self.failures.append(self._failure(local_rank, code))
        if not self._pids and self.ending.numbers:
            self.ending.look(self._not_of_ranks)
        elif not (self._pids or self.ending.by_group or any(self._codes.values())):
            self._add_hidden_failure()

    def _add_hidden_failure(self) -> None:
        """Add the failure that a rank's child process has recorded, such as a Process whose exitcode is not read. The
        record is removed if the parent goes on without the child, or starts it again (`reporting/termination.py`).
        """
        message = self.termination_message()
        if message is None or message.rank is None or not message.exit_code or self._life is None:
            return
        by_rank = (_document(self._folder.termination(self._life.name)) or {}).get("parent", os.getpid()) == os.getpid()
        if not (by_rank or message.preflight or message.symptom or message.resumable or message.signal == "SIGINT"):
            self.failures.append(message)

    def stop(self, number: int, grace_seconds: float, now: float, *, rescue: bool = False, furthest: int = 0) -> None:
        """Stop all ranks because of another rank: signal them, then their descendants; SIGKILL after the grace period.

        rescue: first wait a moment for ranks that can write their state to this node's memory. furthest: highest CLOCK
        (ddpjob_core/memory.py) of the other nodes.
        """
        self.ending.begin()
        self._fork_no_spares()
        if rescue and self.beats is not None:
            self.beats.group_failed()
        if self._waiting or not (rescue and self.ending.waits(number, grace_seconds, now, furthest)):
            self._signal(number, grace_seconds, now)

    def tell(self, number: int, grace_seconds: float, now: float) -> None:
        """Send a requested termination to the ranks. Unlike after `stop`, exit codes count: ranks may save."""
        if self._waiting:  # no rank has started
            self.failures.append(self._failure(0, -number))
        self._signal(number, grace_seconds, now)

    def _signal(self, number: int, grace_seconds: float, now: float) -> None:
        self._waiting = False
        self._fork_no_spares()
        self.ending.send(number, now + grace_seconds, set() if self.beats is None else self.beats.announced)

    def deadline(self, now: float) -> float | None:
        """Time of the next call of `tick`; None if none is due."""
        at = self.ending.deadline(now) if self.running else None
        times = (self._spares_at, self._learn_at) if at is None else (at,)
        return min((at for at in times if at is not None), default=None)

    def forget(self) -> None:
        """Forget how the last generation ended, because all ranks start again."""
        assert not self.running, "what runs has not ended"
        self._life, self._codes = None, {}

    def tick(self, now: float) -> None:
        """Send the signal when the ranks have written their state. Send SIGKILL when their grace period is over."""
        if (due := self.ending.due(now)) is not None:
            self._signal(*due, now)
        if self._spares_at is not None and now >= self._spares_at:
            self._fork_spares(now)
        if self._learn_at is not None and now >= self._learn_at:
            self._learn(now)
        if self.running and (remark := self.ending.tick(now, self._not_of_ranks)):
            say(remark)

    @property
    def _can_learn(self) -> bool:
        """True if the fork server can learn the ranks' imports for the next generation."""
        server = self._server
        return server is not None and server.ready and not server.learning and not self._options.script.preload_asked

    def _learn(self, now: float) -> None:
        """Make the fork server learn if a rank has written its list of imports, as it does when it forms its group."""
        self._learn_at = None
        note = self._files[0].imports
        if not self._can_learn or self._server is None:
            return
        if not os.path.exists(note):
            self._learn_at = now + NOTE_SECONDS
        else:
            self._server.learn(note)

    def _fork_spares(self, now: float) -> None:
        from ddprun import spares  # imported late, so that ranks do not wait for the import

        if self._server is not None and self._server.learning == "now":  # the next fork server will fork the spares
            self._spares_at = now + NOTE_SECONDS
            return
        self._spares_at = None
        if self._server is not None and spares.has_room(self._options.nproc):
            self._server.fork_spares(self._options.nproc)

    def _fork_no_spares(self) -> None:
        """Stop forking: ranks that end or write their state need the processors."""
        self._spares_at = self._learn_at = None
        if self._server is not None:
            self._server.fork_spares(0)

    def settle(self) -> list[Failure]:
        """Kill what the ended ranks have left running. Return the failures of this generation."""
        assert not self.running, "only what has ended is settled"
        self._end_tree(self._not_of_ranks())
        if not self._folder.copy_last() and takes(STDERR):
            say(f"the console is too slow: the end of the ranks' output is {self._folder.rest}")
        if self._life is not None:
            self._add_termination_message()
        self._blame_for_ports()
        return self.failures

    def _not_of_ranks(self) -> set[int]:
        server = self._server
        serves = set() if server is None or server.refused else {server.pid, *server.spares}
        if server is not None and server.learning == "now":
            serves |= processes.descendants(server.pid)
        return serves | self.helpers

    def end(self) -> None:
        """Kill all descendants, the fork server included."""
        self._waiting = False
        self._end_tree(set())
        self._pids.clear()

    @property
    def lacks_program(self) -> bool:
        """True if the script is missing; checked only before the first generation has trained."""
        life = self._life
        if life is None or life.preflight or life.generation > 0:
            return False
        return missing_script.missing(self._options.script, self._environ) != ""

    def termination_message(self) -> Failure | None:
        """Read what the library has written for this node's ranks; None if invalid, because scripts may write there
        too.
        """
        written = None if self._life is None else _document(self._folder.termination(self._life.name))
        with contextlib.suppress(ValueError):
            message = None if written is None else Failure.from_dict(written)
            return message and message._replace(where=message.where or where_of(message.traceback.splitlines()))
        return None

    def end_of_ranks(self) -> NodeEnd:
        """Results of the ranks, which have all ended with 0."""
        from ddprun.core import rank_ends

        files = zip(self._ranks, self._files, strict=True)
        return rank_ends.node_end({rank: _document(of_rank.end, END_BYTES_MAX) for rank, of_rank in files})

    def traceback_of(self, rank: int) -> str:
        """Traceback of a rank of this node; "" if none was recorded."""
        known = [*self.failures, *([message] if (message := self.termination_message()) is not None else [])]
        return next((failure.traceback for failure in known if failure.rank == rank and failure.traceback), "")

    def _start_or_fail(self, local_rank: int) -> None:
        """Start a rank. After an error do not try again in this generation, because the rank may be running."""
        try:
            self._pids[local_rank] = self._start_rank(local_rank)
        except OSError as error:
            if self._server is not None and self._server.ready:
                self._server.give_up(str(error))
                say(f"the fork server is given up: {error}; from now on every rank is a new process")
            self._has_not_started(local_rank, error)

    def _has_not_started(self, local_rank: int, error: OSError) -> None:
        # A symptom, because the application has not failed. `unstarted`: no other rank is the cause.
        failure = self._failure(local_rank, RESUMABLE)
        text = f"not started: {error}"
        self.failures.append(failure._replace(exception=text, resumable=False, symptom=True, unstarted=True))

    def _start_rank(self, local_rank: int) -> int:
        assert self._life is not None
        assert self.beats is not None
        files = self._files[local_rank]
        own = environment.of_rank(self._options, self._life, local_rank, self._environ) | {
            "TORCHELASTIC_ERROR_FILE": files.error if self._options.output.folder != os.devnull else "",
            # One file per generation, not the pod's: a message of an earlier generation must not count.
            "DDPJOB_TERMINATION_LOG": self._folder.termination(self._life.name),
            "DDPJOB_BEATS": self.beats.where(local_rank),
            # Counts the restarts of the job; torchrun's TORCHELASTIC_RESTART_COUNT is per node.
            "DDPJOB_GENERATION": str(self._life.generation),
            **({"DDPJOB_TERM": str(self._life.turn)} if self._life.turn else {}),
            "DDPJOB_MEMORY": "" if self.memory is None else self.memory.where(local_rank),
        }
        if self._life.preflight:
            own["DDPJOB_STATUS_URL"] = own["DDPJOB_MEMORY"] = ""  # a pre-flight reports no progress, writes no state
        if self._server is not None and self._server.ready:
            words = [environment.substituted(word, local_rank) for word in self._options.script.args]
            run = {
                "run": self._options.script.kind,
                "argv": [self._options.script.name, *words],
                "environ": own,
                "crash": files.crash,
                "stacks_signal": STACKS_SIGNAL,
                "end": files.end,
                "imports": files.imports if local_rank == 0 and self._can_learn else "",
            }
            if self._life.preflight:
                run |= {"run": "module", "argv": [environment.PREFLIGHT]}
            return self._server.start({**run, "stdout": files.stdout, "stderr": files.stderr})
        argv = environment.argv_of_rank(self._options, self._life, local_rank, self._environ)
        own["DDPJOB_END"] = files.end
        return processes.start(argv, {**self._environ, **own}, stdout=files.stdout, stderr=files.stderr)

    def _failure(self, local_rank: int, code: int) -> Failure:
        from ddpjob_core import rules

        exception, traceback = _recorded(self._files[local_rank].error)
        symptom = rules.is_symptom(exception)
        traceback = traceback or self._crash(local_rank, -code)
        if code == -signal.SIGKILL and self._kills.another():
            exception, symptom = KILLED_BY_KERNEL, False
        elif self._found_no_reader(local_rank, code, exception):
            exception, symptom = OUTPUT_UNREAD, False
        elif self._life is not None and not self._life.preflight:
            exception = missing_script.explains(code, exception, self._options.script, self._environ) or exception
        return Failure(
            self.rank(local_rank),
            exit_code=as_exit_code(code),
            signal=signal_name(-code) if code < 0 else "",
            exception=exception,
            step=self._step(local_rank),
            time=time.time(),
            resumable=code == RESUMABLE,
            symptom=symptom,
            waited_in=0 if self.beats is None else self.beats.waited_in(local_rank),
            traceback=traceback,
            where=where_of(traceback.splitlines()),
        )

    def _crash(self, local_rank: int, number: int) -> str:
        """Return the call stack of a rank that a signal killed, and print it to the rank's stderr."""
        if number not in crash.SIGNALS:
            return ""
        files = self._files[local_rank]
        calls = crash.calls(text_of(files.crash))
        if not calls:
            return ""
        header = f"calls of rank {self.rank(local_rank)} when {signal_name(number)} killed it, the most recent last:"
        text = "\n".join((header, *calls))
        if not files.stderr:
            say(text)
        elif files.stderr != os.devnull:
            with contextlib.suppress(OSError), open(files.stderr, "a", opener=own_files.opener) as file:
                file.write(f"ddprun: {text}\n")
        return text

    def _found_no_reader(self, local_rank: int, code: int, exception: str) -> bool:
        """True if the rank failed because the console that it writes to is closed. Always False with an operator, which
        replaces a pod whose output is not read.
        """
        if self._options.has_operator or code not in (1, _UNFLUSHED, -signal.SIGPIPE):
            return False
        files = self._files[local_rank]
        consoles = [console for path, console in ((files.stdout, 1), (files.stderr, STDERR)) if not path]
        of_pipe = not exception or exception.startswith(_OF_PIPE)  # "" if only a child process may have failed
        return of_pipe and not all(is_read(console) for console in consoles)

    def _step(self, local_rank: int) -> int:
        return 0 if self.beats is None else self.beats.of(local_rank).step

    def _blame_for_ports(self) -> None:
        """Correct "port in use" failures: another process has taken rank 0's port, or another rank acts as rank 0."""
        from ddpjob_core import rules

        port = 0 if self._life is None else self._life.port
        for i, failure in enumerate(self.failures):
            if not port or rules.port_in_use(failure.exception) != port:
                continue
            if failure.rank == 0:
                self.failures[i] = failure._replace(symptom=True)  # another process took rank 0's port
            else:
                text = (
                    f"port {port} is in use: it is rank 0's, and rank {failure.rank} took itself for rank 0 "
                    f"({failure.exception})"
                )
                self.failures[i] = failure._replace(exception=abridged(text, EXCEPTION_MAX))

    def _add_termination_message(self) -> None:
        """Add what a rank wrote about its own failure, even if the rank was then stopped.

        Messages written after the stop are ignored: they are effects of our signal, such as a dead DataLoader worker or
        an exception in the script's handler.
        """
        message = self.termination_message()
        if message is None or message.rank is None or message.exit_code is None:
            return
        if not self.failures and not self.ending.by_group:
            return  # all ranks ended with 0, so the rank continued after the failure that it wrote
        known = next((i for i, failure in enumerate(self.failures) if failure.rank == message.rank), None)
        if known is not None:
            self.failures[known] = _with_message(self.failures[known], message)
            return
        from ddpjob_core import rules

        # "State not saved" counts even after the stop, because the other ranks end with 75.
        is_late = message.time > self.ending.began_at and not rules.is_unsaved(message.exception)
        if message.preflight or not (message.symptom or message.resumable or is_late):
            self.failures.append(message)

    def _end_tree(self, spared: set[int]) -> None:
        """Kill until no descendant is left. Orphans become children of the agent, so it finds all of them."""
        deadline = time.monotonic() + LINGERING_SECONDS
        pause = 0.0005
        while True:
            for pid, code in processes.reaped():
                self.ended(pid, code)
            left = processes.descendants(os.getpid()) - spared
            if not left:
                return None
            if time.monotonic() > deadline:
                return say(f"processes {sorted(left)} do not end, although they were killed")
            processes.kill(left)
            time.sleep(pause)
            pause = min(2 * pause, 0.05)


def as_exit_code(code: int) -> int:
    """Return the exit code as shells do: 128 + n for signal n."""
    return code if code >= 0 else 128 - code


def say(sentence: str) -> None:
    with contextlib.suppress(OSError, AttributeError):  # stderr is None if it was closed at the start
        sys.stderr.write(f"ddprun: {sentence}\n")
        sys.stderr.flush()


def _recorded(path: str) -> tuple[str, str]:
    """Return the exception's line and traceback that torch's `@record` or the fork server wrote."""
    message = (_document(path) or {}).get("message")
    if not isinstance(message, dict) or not isinstance(message.get("message"), str):
        return "", ""
    extra = message.get("extraInfo")
    trace = extra.get("py_callstack") if isinstance(extra, dict) else ""
    return abridged(first_line(message["message"]), EXCEPTION_MAX), trace if isinstance(trace, str) else ""


def _with_message(failure: Failure, message: Failure) -> Failure:
    """Combine how the process ended with what the rank wrote. Only the agent knows if a broken pipe was the console."""
    is_known = failure.exception == OUTPUT_UNREAD and message.exception.startswith(_OF_PIPE)
    return message._replace(
        exit_code=failure.exit_code,
        signal=failure.signal,
        exception=failure.exception if is_known else message.exception or failure.exception,
        traceback=message.traceback or failure.traceback,
        symptom=message.symptom or failure.symptom,
        waited_in=failure.waited_in,
    )


def text_of(path: str) -> str:
    """Read a text file that a rank wrote; only its end if it is long."""
    with contextlib.suppress(OSError), open(path, "rb", opener=own_files.opener) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - FILE_BYTES_MAX))
        return file.read(FILE_BYTES_MAX).decode(errors="replace")
    return ""


def _document(path: str, bytes_max: int = FILE_BYTES_MAX) -> dict[str, Any] | None:
    try:
        read = json.loads(own_files.read_file(path, bytes_max))
    except (OSError, ValueError):
        return None
    return read if isinstance(read, dict) else None
