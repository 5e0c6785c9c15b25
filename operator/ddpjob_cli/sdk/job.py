"""A job as a Python object, on this machine or in a cluster."""

from __future__ import annotations

import abc
import atexit
import contextlib
import html
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ddpjob_cli
from ddpjob_cli.client import actions, jobs, log_findings, stacks, watch
from ddpjob_cli.client.connection import Cluster
from ddpjob_cli.client.errors import ClusterError
from ddpjob_cli.client.logs import ClusterLogs, LogPart
from ddpjob_cli.commands.logs import whole_lines
from ddpjob_cli.commands.output import say
from ddpjob_cli.commands.sources import naming
from ddpjob_cli.describe import ending, progress
from ddpjob_cli.local.processes import stacks as local_stacks
from ddpjob_cli.local.run_files import run_logs, runs
from ddpjob_cli.manifest.yamlfile import InputError
from ddpjob_cli.sdk import function
from ddpjob_operator.failures import sentences
from ddpjob_operator.job import api, wording
from ddpjob_operator.job.status import TERMINAL

if TYPE_CHECKING:
    from ddpjob_cli.commands.logs import LogSource

POLL_SECONDS = 0.1
DELETE_SECONDS = 600.0
ANSWER_LINES_MAX = 5000  # lines read for a result: a result of 1 MB has 450, and other lines may follow

ALL = LogPart()

_going: set[LocalJob] = set()


class RankError(Exception):
    """The error of a rank as its log or status shows it, if its exception itself was not sent back."""


class JobFailedError(Exception):
    """A job has failed, or was stopped for good. Its cause is the exception of the rank that failed first."""

    def __init__(self, name: str, status: api.Status) -> None:
        tail = status.last_failure.log_tail if status.last_failure else ""
        text = f"{name} is {status.state or 'new'}: {status.message or status.reason}"
        super().__init__(f"{text}\n{tail}".strip())
        self.status = status


class Job(abc.ABC):
    """A started job. It continues if this object is deleted."""

    def __init__(self, name: str, sent: function.Sent | None) -> None:
        self.name = name
        """Name of the job in the cluster, or in `ddpjob list`."""
        self._sent = sent

    @property
    @abc.abstractmethod
    def status(self) -> api.Status:
        """The current status (docs/reference.md). Raises ClusterError without an answer, or if the job is gone."""

    @abc.abstractmethod
    def suspend(self) -> None:
        """Stop all ranks with their grace period to save; returns at once. Raises InputError if the job has ended."""

    @abc.abstractmethod
    def resume(self) -> None:
        """Start a suspended job again, as a new attempt. Raises InputError for a job that has ended."""

    @abc.abstractmethod
    def delete(self) -> None:
        """Stop the job with its grace period, and remove it; returns when it is gone. Logs of this machine stay."""

    @abc.abstractmethod
    def stacks(self) -> list[str]:
        """Return the ranks' stacks, as a text for each node. Ranks go on. Raises InputError if there are none."""

    def wait(self, timeout: float | None = None) -> api.Status:
        """Wait until the job has Succeeded, and return its status. Events go to stderr; a notebook also shows a table.
        timeout: seconds. Raises TimeoutError, JobFailedError, ClusterError. After KeyboardInterrupt the job goes on."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        update = _in_notebook(self)
        try:
            for status in self._looks():
                update()
                if status.state in TERMINAL:
                    break
                if time.monotonic() >= end:
                    raise TimeoutError(f"{self.name} is {status.state or 'new'} after {wording.duration(timeout or 0)}")
        except KeyboardInterrupt:
            say(f"{self.name} goes on: wait() waits again, suspend() stops it, delete() ends it")
            raise
        if status.state != "Succeeded":
            raise JobFailedError(self.name, status) from self._cause(status)
        return status

    def result(self, timeout: float | None = None) -> Any:
        """Wait, and return what the function returned on rank 0; None for a script. Loading it with cloudpickle runs
        code from the job, so call this only for a job that you trust. Raises the errors of wait(), and UnsentError if
        the result is larger than 1 MB, cannot be pickled, or is no longer there."""
        if self.status.state != "Succeeded":  # wait() would report the end of a succeeded job again
            self.wait(timeout)
        if self._sent is None:
            return None
        found = function.answers(self._sent.word, self._answer_lines(rank=0))
        if ("value", 0) in found:
            return function.loaded(found["value", 0])
        why = found.get(("refused", 0), b"nothing that is still there").decode()
        raise function.UnsentError(f"{self.name} returned {why}")

    def logs(self, follow: bool = False, rank: int | None = None) -> Iterator[str]:
        """Yield the lines of the last attempt, with the prefix [node:rank] if there are several nodes. follow: until
        the job ends, also after restarts. rank: only the node of this rank, whose ranks share a log. Raises InputError
        for an unknown rank, ClusterError."""
        return _lines(self._source(), follow, rank)

    @abc.abstractmethod
    def _looks(self) -> Iterator[api.Status]:
        """Yield the status repeatedly until nothing runs, and print events to stderr."""

    @abc.abstractmethod
    def _source(self) -> LogSource:
        """Return the source of the job's logs."""

    @abc.abstractmethod
    def _answer_lines(self, rank: int | None) -> Iterable[str]:
        """Return the lines that may contain the result of this rank, or of any rank for None."""

    def _cause(self, status: api.Status) -> BaseException | None:
        """Return the exception of the failed rank, else a RankError from the status; None without a failure."""
        failure = status.last_failure
        if failure is None or status.state != "Failed":
            return None
        if self._sent is not None:
            with contextlib.suppress(ClusterError, function.UnsentError):
                found = function.answers(self._sent.word, self._answer_lines(failure.rank))
                errors = {rank: data for (kind, rank), data in found.items() if kind == "error"}
                rank = failure.rank if failure.rank in errors else min(errors, default=None)
                if rank is not None and isinstance(error := function.loaded(errors[rank]), BaseException):
                    return error
        return RankError(sentences.sentence(failure))

    def __repr__(self) -> str:
        """Return for example Job(digits: Running, step 200/500)."""
        return f"Job({self.name}: {', '.join(self._row())})"

    def _row(self) -> list[str]:
        try:
            status = self.status
        except (ClusterError, InputError) as error:
            return [str(error)]
        parts = [*progress.step_parts(status), *progress.pace_parts(status), *progress.restart_parts(status)]
        return [text for text in (status.state or "new", "  ".join(parts), status.message) if text]

    def _repr_html_(self) -> str:
        return f"<table><tr><td>{'</td><td>'.join(map(html.escape, (self.name, *self._row())))}</td></tr></table>"


class LocalJob(Job):
    """`ddpjob run` in a process with its own session, so that Ctrl-C does not reach it."""

    def __init__(self, words: Sequence[str], sent: function.Sent | None = None) -> None:
        """Start the run. words: the arguments of `ddpjob run`. Raise InputError if it did not start."""
        self._folder = tempfile.TemporaryDirectory(prefix="ddpjob-")
        folder = Path(self._folder.name)
        self._environ = {**os.environ}
        if sent is not None:
            sent.write(folder)
            words = [*words, str(folder / function.SCRIPT)]
            # Pass our search path, so that ranks import the same modules as this process.
            self._environ["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in sys.path)
        program = Path(ddpjob_cli.__file__).with_name("__main__.py")  # python -m would import from the working folder
        self._argv = [sys.executable, str(program), "run", "--plain", *words]
        self._output = folder / "stderr"
        self._output.touch()
        self._told = open(self._output, errors="replace")  # noqa: SIM115 - what it has read was shown
        with naming(str(folder / function.SCRIPT), "" if sent is None else sent.name):
            self._begin()
        super().__init__(self._run.facts.job, sent)

    def _begin(self) -> None:
        with open(self._output, "ab") as stderr:
            self._process = subprocess.Popen(
                self._argv, env=self._environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr,
                start_new_session=True,
            )  # fmt: skip
        _going.add(self)
        atexit.unregister(_wait_for_all)
        atexit.register(_wait_for_all)  # runs first at exit, while the folder still exists
        try:
            while (run := self._begun()) is None:
                if self._process.poll() is not None:
                    why = self._told.read().strip() or f"ddpjob run ended with {self._process.returncode}"
                    raise InputError(why)
                time.sleep(POLL_SECONDS / 4)
        except BaseException:
            self._stop()
            raise
        self._run = run

    def _begun(self) -> runs.Run | None:
        """Return the run, if its folder exists. The folder is found by the lock that the process holds open."""
        with contextlib.suppress(OSError):  # the process has ended, or has just closed a descriptor
            for entry in os.scandir(f"/proc/{self._process.pid}/fd"):
                path = Path(os.readlink(entry.path))
                if path.name == "lock" and (run := runs.read(path.parent)):
                    return run
        return None

    @property
    def status(self) -> api.Status:
        return (runs.read(self._run.folder) or self._run).status

    def suspend(self) -> None:
        self._refuse_ended("suspended")
        self._process.send_signal(signal.SIGTERM)

    def resume(self) -> None:
        self._refuse_ended("resumed")
        if self.is_running and self.status.state != "Suspended":
            say(f"{self.name} is not suspended")
            return
        self.join()
        self._begin()

    def delete(self) -> None:
        self._stop()
        self._folder.cleanup()

    def stacks(self) -> list[str]:
        return local_stacks.of_run(runs.read(self._run.folder) or self._run)

    def _looks(self) -> Iterator[api.Status]:
        while True:
            is_over = not self.is_running
            status = self.status
            if is_over or status.state in TERMINAL:
                self.join()  # the process prints its last lines after the final status, so wait until it has ended
            sys.stderr.write(self._told.read())
            yield status
            if is_over:
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(POLL_SECONDS)

    @property
    def is_running(self) -> bool:
        """True until the job's process has ended."""
        return self._process.poll() is None

    def _source(self) -> LogSource:
        return run_logs.LocalLogs(self._run)

    def _answer_lines(self, rank: int | None) -> Iterable[str]:  # noqa: ARG002 - all ranks write into one file
        path = Path(self._folder.name) / function.ANSWER_FILE
        return path.read_text().splitlines() if path.exists() else ()

    def join(self) -> None:
        self._process.wait()
        _going.discard(self)

    def _stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self.join()

    def _refuse_ended(self, what: str) -> None:
        if (state := self.status.state) in TERMINAL:
            raise InputError(f"{self.name} has {state} and cannot be {what}: run it again")


class ClusterJob(Job):
    """A DDPJob of a cluster."""

    def __init__(self, cluster: Cluster, stored: jobs.Stored, sent: function.Sent | None) -> None:
        super().__init__(stored.job.metadata.name, sent)
        self._cluster, self._stored = cluster, stored

    @property
    def status(self) -> api.Status:
        return self._again().job.status

    def suspend(self) -> None:
        actions.suspend(self._cluster, self.name, say)

    def resume(self) -> None:
        actions.resume(self._cluster, self.name, say)

    def delete(self) -> None:
        actions.delete(self._cluster, [self.name], wait=True, seconds=DELETE_SECONDS, say=say)

    def stacks(self) -> list[str]:
        return stacks.of_job(self._cluster, self._again())

    def _looks(self) -> Iterator[api.Status]:
        lines = watch.StateLines(say)
        for stored in watch.Watch(self._cluster, self._again(), say).states():
            lines.see(stored)
            if watch.ended(stored):
                stored = log_findings.with_findings(self._cluster, stored)
                say(ending.of_job(stored.job))
            yield stored.job.status

    def _source(self, part: LogPart = ALL) -> ClusterLogs:
        return ClusterLogs(self._cluster, self._again(), say, part=part)

    def _again(self) -> jobs.Stored:
        return jobs.again(self._cluster, self._stored)

    def _answer_lines(self, rank: int | None) -> Iterable[str]:
        source = self._source(LogPart(tail=ANSWER_LINES_MAX, answers=True))
        try:
            return list(_lines(source, follow=False, rank=rank))
        except InputError:  # torchrun may number the nodes differently, so read all of them
            return list(_lines(source, follow=False, rank=None))


def _lines(source: LogSource, follow: bool, rank: int | None) -> Iterator[str]:
    wanted = None if rank is None else [source.node_of_rank(rank)]
    attempt = max(source.attempts(), default=1)
    nodes = source.nodes(attempt) if wanted is None else wanted
    pieces = source.follow(attempt, wanted, later=True) if follow else source.read(attempt, nodes)
    is_several = wanted is None and (follow or len(nodes) > 1)
    for node, lines in whole_lines(pieces):
        begin = source.prefix(node) if is_several else ""
        yield from (begin + line.decode(errors="replace") for line in lines)


def _in_notebook(job: Job) -> Any:
    """Return a function that redraws the job's row in a notebook. Elsewhere it does nothing."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is None:
        return lambda: None
    from IPython.display import display

    handle = display(job, display_id=True)
    return lambda: handle.update(job)


def _wait_for_all() -> None:
    """Wait for all runs at the program's exit, like multiprocessing for its processes. Ctrl-C stops the runs."""
    try:
        for job in list(_going):
            if job.is_running:
                say(f"this program waits for {job.name}; Ctrl-C stops it")
            job.join()
    except KeyboardInterrupt:
        for job in list(_going):
            job.delete()
