"""Write the ranks' output to the same files as torchrun, and to the console.

    <log_dir>/<run id>_<random>/attempt_<restarts>/<local rank>/{stdout.log,stderr.log,error.json}
    <log_dir>/<run id>_<random>/attempt_<restarts>/filtered_{stdout,stderr}.log

Without --log-dir the folder is temporary. It is kept if it has output that the console has not shown.

A stream that is neither redirected nor tee'd is inherited from the agent, and the rank writes to it directly. With
`--tee` the rank writes into a file, and the agent copies whole lines from it, so a blocked console blocks no rank.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ddpjob import own_files
from ddprun.options import Options, Output

TAIL_SECONDS = 0.1
LAST_LINES_SECONDS = 5.0  # limit for a console that accepts no data
LAST_LINES_SECONDS_MAX = 20.0  # limit for a slow console: the copy blocks this agent, and node 0 waits only 30 s for it
CHUNK = 1 << 16
CHUNKS_MAX = 16  # at most this many chunks of a file are copied at once, because signals and peers wait meanwhile
RUN_BYTES_MAX = 200  # length of the run id in the folder's name; file systems allow 255 bytes
WRITE_MAX = select.PIPE_BUF  # bytes that a pipe that is ready accepts without blocking
STREAMS = (("stdout", 1), ("stderr", 2))
OWN = ("crash_{}.txt", "end_{}.json", "imports_{}.json")  # files that a rank writes for the agent; torchrun has none


class Files(NamedTuple):
    """Files of one rank; "" is the console."""

    stdout: str
    stderr: str
    error: str
    crash: str
    """Stack written by faulthandler if a signal kills the rank."""
    end: str
    """Result that the rank writes at its end (core/rank_ends.py)."""
    imports: str = ""
    """List of imports that the rank writes when it forms its group."""


class LogFolder:
    """The files of this run."""

    def __init__(self, options: Options) -> None:
        self._nproc, self._role, self._output = options.nproc, options.role, options.output
        given = options.output.folder
        self._kept = given not in ("", os.devnull)
        base = given if self._kept else os.environ.get("TMPDIR") or "/tmp"  # noqa: S108 - as tempfile, without its imports
        base = os.path.abspath(base)  # ranks are given paths below it, and may change their folder
        os.makedirs(base, exist_ok=True)
        run = os.fsencode(options.run_id.replace("/", "_"))[:RUN_BYTES_MAX].decode(errors="ignore")
        name = f"{run}_{os.urandom(4).hex()}"
        self.has_unseen = not given and _has_unseen(options.output)
        # `ddpjob run` removes folders that begin with ddprun_ and its id. A folder to keep needs another name.
        kind = "" if self._kept else "ddprun-output_" if self.has_unseen else "ddprun_"
        self.path = os.path.join(base, f"{kind}{name}")
        os.mkdir(self.path, 0o700)
        self.tails: list[_Tail] = []  # files that are copied to the console
        self._has_backlog = False  # True if ranks have written more output than one `copy` takes

    def termination(self, life: str) -> str:
        """File for the termination message of this node's ranks."""
        return os.path.join(self._attempt(life), "termination.json")

    def prepare(self, life: str, ranks: Sequence[int]) -> list[Files]:
        """Create the folders of these ranks, and return their files by local rank."""
        output, attempt = self._output, self._attempt(life)
        own_files.make_folder(self.path)  # after /tmp was emptied, another user may have created this folder
        os.mkdir(attempt, 0o700)  # the folder cannot exist: generation numbers only grow, also under a new leader
        files = []
        for rank in range(len(ranks)):
            folder = os.path.join(attempt, str(rank))
            os.mkdir(folder, 0o700)
            to_file, hidden = output.in_files(rank), "" if output.shows(rank) else os.devnull
            out, err = (os.path.join(folder, f"{name}.log") if to_file & bit else hidden for name, bit in STREAMS)
            own = [os.path.join(attempt, name.format(rank)) for name in OWN]
            files.append(Files(out, err, os.path.join(folder, "error.json"), *own))
        # `extend` adds files one by one. So if one cannot be opened, `copy_last` still closes those opened before.
        self.tails.extend(self._make_tails(attempt, files, ranks))
        return files

    def copy(self) -> None:
        """Copy new output of the ranks, up to 1 MiB of each."""
        self._has_backlog = None in [tail.copy(chunks=CHUNKS_MAX) for tail in self.tails]

    def deadline(self, now: float) -> float | None:
        """Time of the next call of `copy`; None if nothing is copied."""
        return None if not self.tails else now if self._has_backlog else now + TAIL_SECONDS

    def copy_last(self) -> bool:
        """Copy the rest of a generation's output, also an incomplete last line. True if the console took all of it.

        A slow console gets more time as long as it takes data, at most `LAST_LINES_SECONDS_MAX`.
        """
        left, taken, began = self.tails, 0, time.monotonic()
        give_up = began + LAST_LINES_SECONDS
        while left := [tail for tail in left if tail.copy(last=True, chunks=CHUNKS_MAX) is not True]:
            now, before, taken = time.monotonic(), taken, sum(tail.taken for tail in self.tails)
            if taken != before:
                give_up = now + LAST_LINES_SECONDS
            if now > min(give_up, began + LAST_LINES_SECONDS_MAX):
                self.has_unseen = not self._output.folder
                break
            takes(left[0].console, TAIL_SECONDS)
        for tail in self.tails:
            tail.close()
        self.tails = []
        return not left

    @property
    def rest(self) -> str:
        """Return a text that says where the output is that the console has not taken."""
        return f"only in {self.path}" if self._kept or self.has_unseen else f"lost, because --log-dir is {os.devnull}"

    def remove(self) -> None:
        if not self._kept and not self.has_unseen:
            import shutil

            shutil.rmtree(self.path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):  # a leftover file must not change the exit code
                for attempt in os.scandir(self.path):
                    _unlink_own(attempt.path, self._nproc)

    def _attempt(self, life: str) -> str:
        return os.path.join(self.path, f"attempt_{life}")

    def _make_tails(self, attempt: str, files: list[Files], ranks: Sequence[int]) -> Iterable[_Tail]:
        output = self._output
        prefix = os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
        for (name, bit), words in zip(STREAMS, output.filters, strict=True):
            filtered = os.path.join(attempt, f"filtered_{name}.log") if words else ""
            for local_rank, rank in enumerate(ranks):
                if output.tee[local_rank] & bit and output.shows(local_rank):
                    header = _header(prefix, self._role, rank, local_rank)
                    path = files[local_rank].stdout if bit == 1 else files[local_rank].stderr
                    yield _Tail(path, header.encode(), bit, filtered, [word.encode() for word in words])


def takes(console: int, seconds: float = 0.0) -> bool:
    """True if the console accepts data within this time."""
    poller = select.poll()
    poller.register(console, select.POLLOUT)
    return bool(poller.poll(seconds * 1000))


def is_read(console: int) -> bool:
    """True if the console has a reader; always for files and devices."""
    poller = select.poll()
    poller.register(console, 0)
    return not any(found & (select.POLLERR | select.POLLHUP) for _, found in poller.poll(0))


def _has_unseen(output: Output) -> bool:
    """True if a stream of a rank goes to a file and not to the console."""
    return any(output.in_files(rank) & ~(tee if output.shows(rank) else 0) for rank, tee in output.tee.items())


def _header(template: str | None, role: str, rank: int, local_rank: int) -> str:
    if not template:
        return f"[{role}{local_rank}]:"
    import string

    return string.Template(template).safe_substitute(role_name=role, rank=rank, local_rank=local_rank)


def _unlink_own(attempt: str, nproc: int) -> None:
    """Remove the files that torchrun does not have."""
    for name in ("termination.json", *(name.format(rank) for name in OWN for rank in range(nproc))):
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(attempt, name))


class _Tail:
    """Copies the lines of a growing file to the console, and chosen ones to the filtered file."""

    def __init__(self, path: str, header: bytes, console: int, filtered: str, words: list[bytes]) -> None:
        self._header, self.console, self._words = header, console, words
        self._file = own_files.open_file(path, os.O_RDONLY | os.O_CREAT)
        try:
            self._filtered = own_files.open_file(filtered, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if filtered else -1
        except OSError:
            os.close(self._file)
            raise
        self._part = b""  # incomplete last line
        self._goes_on = False  # True if part of a long line was shown
        self._waiting = b""  # data for the console
        self.taken = 0  # bytes that the console has taken

    def copy(self, *, last: bool = False, chunks: int | None = None) -> bool | None:
        """Copy new data. Return True if all is copied, False if the console is full, None after `chunks` chunks."""
        while self._write():
            if chunks == 0:
                return None
            chunks = None if chunks is None else chunks - 1
            data = os.read(self._file, CHUNK)
            if not data:
                if last and self._part:
                    self._take([self._part])
                    self._part = b""
                    return self._write()
                return True
            lines = (self._part + data).splitlines(keepends=True)  # progress bars end their lines with \r
            self._part = b"" if lines[-1].endswith(b"\n") or len(lines[-1]) > CHUNK else lines.pop()
            self._take(lines)
        return False

    def close(self) -> None:
        os.close(self._file)
        if self._filtered >= 0:
            os.close(self._filtered)

    def _take(self, lines: list[bytes]) -> None:
        named = [b"" if goes_on else self._header for goes_on in self._going_on(lines)]
        pairs = list(zip(named, lines, strict=True))
        self._waiting += b"".join(header + line for header, line in pairs)
        chosen = b"".join(header + line for header, line in pairs if any(word in line for word in self._words))
        if chosen:
            # On a full disk the rank's own file is complete or shows the error, and training goes on.
            with contextlib.suppress(OSError):
                os.write(self._filtered, chosen)

    def _going_on(self, lines: list[bytes]) -> Iterable[bool]:
        """Yield True for each line that continues the previous one, else False."""
        for line in lines:
            yield self._goes_on
            self._goes_on = not line.endswith((b"\n", b"\r"))

    def _write(self) -> bool:
        while self._waiting:
            if not takes(self.console):
                return False
            # Write whole lines, because other ranks write to this console too.
            end = self._waiting.rfind(b"\n", 0, WRITE_MAX) + 1 or WRITE_MAX
            try:
                written = os.write(self.console, self._waiting[:end])
            except OSError:  # nobody reads the console; the log file is complete
                written = len(self._waiting)
            self._waiting = self._waiting[written:]
            self.taken += written
        return True
