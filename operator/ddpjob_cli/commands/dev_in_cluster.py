"""`ddpjob dev --cluster`: submit a DDPJob, start its ranks again at each save, and delete it at the end."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from typing import Any, NamedTuple

from ddpjob_cli.client import actions, jobs, many_jobs
from ddpjob_cli.client.dev import DevPods, MovingDeadline, read_code
from ddpjob_cli.client.logs import ClusterLogs
from ddpjob_cli.client.watch import StateLines
from ddpjob_cli.commands import submit
from ddpjob_cli.commands.cluster import Connect, end_of
from ddpjob_cli.commands.output import closed, say, write_printed
from ddpjob_cli.local import session
from ddpjob_cli.local.preparation import debugging
from ddpjob_cli.local.processes.saves import SavedFiles
from ddpjob_cli.manifest.yamlfile import InputError
from ddpjob_operator.job import bounds, validation

LOOK_SECONDS = 1.0
DELETE_SECONDS = 60.0
# Disable the stall limit: ended ranks make no step until the next save. Deadlocks are still reported.
SETTINGS = (f"spec.stall.timeoutSeconds={bounds.SECONDS_MAX}",)


class _LogPod(NamedTuple):
    attempt: int
    place: int
    name: str


class _OverError(Exception):
    """Raised to end the session of `ddpjob dev`. The text is the reason."""


def run(
    connect: Connect, file: str, words: tuple[str, ...], idle: float, pdb: int | None, *, check: bool,
    image: str | None, settings: tuple[str, ...], **given: Any,
) -> int:  # fmt: skip
    """Run a script until Ctrl-C, the idle limit or the end of the job. pdb: the rank that stops at `breakpoint()`.
    given: other fields of Wishes. Raise InputError, ClusterError."""
    limit = min(math.ceil(idle), bounds.SECONDS_MAX)
    first_limit = (f"spec.activeDeadlineSeconds={limit}",) if limit else ()
    wishes = submit.Wishes(
        namespace=connect.namespace, image=image, launcher="ddprun" if image else None,
        settings=(*SETTINGS, *first_limit, *settings), **given,
    )  # fmt: skip
    root = submit.folder_of(file, wishes)
    files, submitted = SavedFiles([str(root)]), read_code(root)
    document, archive = submit.prepare(file, words, wishes, checked=check)
    parsed, _ = validation.parse(document.data)
    if not parsed.spec.facts.restarts_in_place:
        raise InputError(f"{file}: ddpjob dev needs ddprun, which starts the ranks again; use ddpjob submit")
    debugging.check(pdb, parsed, {os.getpgrp()})
    cluster, made = submit.create(connect, document, archive)
    for number in (signal.SIGTERM, signal.SIGHUP):  # delete the job also if the terminal is closed
        signal.signal(number, signal.default_int_handler)
    is_ours = limit and made.job.spec.active_deadline_seconds == limit  # --set may change the deadline
    deadline = MovingDeadline(cluster, made.job.metadata.name, limit) if is_ours else None
    pods = DevPods(cluster, made, root, submitted, say)
    held = session.DevSession(files, idle, lambda pod, *loan: pods.lend_terminal(pod.place, *loan))
    follower = _Follower(ClusterLogs(cluster, made, say), held, pods, deadline)
    try:
        return follower.run()
    finally:
        held.close()
        with contextlib.suppress(jobs.NoJobError):
            actions.delete(cluster, [made.job.metadata.name], wait=False, seconds=DELETE_SECONDS, say=say)


class _Follower:
    """Shows the logs. A second thread sends saved files, because the cluster may answer slowly."""

    def __init__(
        self, logs: ClusterLogs, held: session.DevSession, pods: DevPods, deadline: MovingDeadline | None
    ) -> None:
        self._logs, self._session, self._pods, self._deadline = logs, held, pods, deadline
        self._woken, self._over = threading.Event(), threading.Event()
        self._stop = ""

    def run(self) -> int:
        states = StateLines(say)

        def look(stored: jobs.Stored) -> None:
            states.see(stored)
            if self._stop:
                raise _OverError(self._stop)

        self._logs.on_look = look
        for sentence in self._session.begin(self._woken.set):
            say(sentence)
        sender = threading.Thread(target=self._send, daemon=True)
        sender.start()
        try:
            for node, piece in self._logs.follow(1, None, later=True):
                self._print(node, piece)
        except _OverError as over:
            say(str(over))
            return 130
        except KeyboardInterrupt:
            return 130
        except OSError as error:
            return closed(error)
        finally:
            self._over.set()
            self._woken.set()
        return end_of(self._logs.stored)

    def _print(self, node: int, piece: bytes) -> None:
        status = self._logs.stored.job.status
        pod = _LogPod(status.attempt, node, f"{self._logs.name}-{status.attempt}-{node}")
        if self._session.printed(pod, [piece.decode(errors="replace").rstrip("\n")]):
            self._write(node, piece)
        else:
            self._woken.set()

    def _write(self, node: int, piece: bytes) -> None:
        write_printed(self._logs.prefix(node).encode() + piece)

    def _send(self) -> None:
        said: list[str] = []
        while not self._over.is_set():
            self._woken.wait(LOOK_SECONDS)
            self._woken.clear()
            progress = self._logs.stored.job.status.progress
            asked: list[bool] = []
            found = self._session.look(progress and progress.step, lambda: asked.append(True))  # noqa: B023
            for pod, line in found.printed:
                self._write(pod.place, f"{line}\n".encode())
            for note in found.notes:
                say(note)
            self._stop = found.stop
            _, wrong = many_jobs.of_each((self._renew, self._pods.save if asked else self._pods.look), lambda do: do())
            before, said = said, [str(error) for error in wrong]
            for text in said:
                if text not in before:
                    say(f"{text}; trying again")

    def _renew(self) -> None:
        if self._deadline is not None:
            self._deadline.renew(self._logs.stored.job.status, time.clock_gettime(time.CLOCK_BOOTTIME))
