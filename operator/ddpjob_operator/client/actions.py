"""What users do to a job: suspend, resume, restart, scale, delete, wait."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from ddpjob_operator.client import jobs, watch
from ddpjob_operator.client.connection import Cluster
from ddpjob_operator.client.errors import ClusterError, NotFoundError
from ddpjob_operator.client.watch import Say, Watch
from ddpjob_operator.job import podspec, wording
from ddpjob_operator.job.status import find_condition
from ddpjob_operator.job.validation import suggestion
from ddpjob_operator.manifest.yamlfile import InputError

CONDITIONS = ("Complete", "Failed", "FailureTarget", "Running", "Suspended", "Accepted")
STATES = ("Pending", "Starting", "Running", "Restarting", "Failing", "Suspended", "Succeeded", "Failed")


def suspend(cluster: Cluster, name: str, say: Say) -> None:
    """Stop all pods of a job with their full grace period, and keep it."""
    stored = _unfinished(cluster, name, "suspended")
    if stored.job.spec.suspend:
        say(f"{name} is suspended already")
        return
    jobs.patch(cluster, name, {"suspend": True})
    grace = podspec.grace_seconds(stored.job.spec.template)
    say(f"{name} is suspended: its pods get SIGTERM and up to {grace} s to save. To go on: ddpjob resume {name}")


def resume(cluster: Cluster, name: str, say: Say) -> None:
    """Start a suspended job again, as a new attempt, when its last pod has ended."""
    stored = _unfinished(cluster, name, "resumed")
    if not stored.job.spec.suspend:
        say(f"{name} is not suspended")
        return
    jobs.patch(cluster, name, {"suspend": False})
    stops = stored.job.status.state == "Suspended" and not watch.stopped(stored)
    say(f"{name} is resumed" + ("; it starts again when the last of its pods has ended" if stops else ""))


def restart(cluster: Cluster, name: str, seconds: float, say: Say) -> None:
    """Suspend, wait until all pods have ended, resume. Nothing is charged to backoffLimit but a failure before it."""
    _stop(cluster, _unfinished(cluster, name, "restarted"), "restarted", seconds, say)
    jobs.patch(cluster, name, {"suspend": False})
    say(f"{name} starts again")


def scale(cluster: Cluster, name: str, nodes: int, seconds: float, say: Say) -> None:
    """Change the number of nodes. A job that runs is stopped first, and started with the new number; of an elastic job
    the operator does that."""
    stored = _unfinished(cluster, name, "scaled")
    before = stored.job.spec.nodes
    if before == nodes:
        say(f"{name} has {wording.count(nodes, 'node')} already")
        return
    was_suspended = stored.job.spec.suspend
    if stored.job.spec.min_nodes is not None and not was_suspended:
        jobs.patch(cluster, name, {"nodes": nodes})
        say(f"{name} has {wording.count(nodes, 'node')} now, before {before}; all save, and start again")
        return
    _stop(cluster, stored, "scaled", seconds, say)
    jobs.patch(cluster, name, {"nodes": nodes, "suspend": was_suspended})
    still = "; it is still suspended" if was_suspended else ""
    say(f"{name} has {wording.count(nodes, 'node')} now, before {before}{still}")


def delete(cluster: Cluster, names: Sequence[str], *, wait: bool, seconds: float, say: Say) -> None:
    """Delete jobs; their pods get their grace period. One that cannot be deleted does not keep the others.

    Raises InputError where one is not there, ClusterError where one could not be deleted, after the last one.
    """
    going: list[jobs.Stored] = []
    wrong: list[InputError | ClusterError] = []
    for name in dict.fromkeys(names):
        try:
            stored = jobs.find(cluster, name)
            with contextlib.suppress(NotFoundError):
                cluster.delete(jobs.path_of(cluster, name))
            going.append(stored)
        except (InputError, ClusterError) as error:  # noqa: PERF203 - the next one may be there
            wrong.append(error)
    end = time.monotonic() + seconds
    for stored in going:
        name = stored.job.metadata.name
        try:
            if wait:
                _until_gone(cluster, stored, end, seconds)
            say(f"{name} is deleted" if wait else f"{name} is being deleted")
        except ClusterError as error:
            wrong.append(error)
    if wrong:
        kind = ClusterError if any(isinstance(error, ClusterError) for error in wrong) else InputError
        raise kind("\n".join(dict.fromkeys(map(str, wrong))))


def _until_gone(cluster: Cluster, stored: jobs.Stored, end: float, seconds: float) -> None:
    """Wait until a job is gone. Raises TooLateError at `end`, which is `seconds` after it was deleted."""
    while True:
        try:
            jobs.again(cluster, stored)
        except jobs.JobGoneError:
            return
        if time.monotonic() > end:
            name = stored.job.metadata.name
            raise watch.TooLateError(f"{name} is being deleted, and still there after {wording.duration(seconds)}")
        time.sleep(0.2)


def wait(cluster: Cluster, name: str, wanted: str, seconds: float | None, say: Say) -> bool:
    """Wait for a state, a condition, `ended` or `deleted`. Whether it has come true; False: it no longer can.

    Raises InputError for a word that is none of these, TooLateError.
    """
    true = _condition(wanted)
    try:
        stored = jobs.find(cluster, name)
    except jobs.NoJobError as error:
        if true is not _never:
            raise
        say(str(error))
        return True
    try:
        lines = watch.StateLines(say)

        def over(job: jobs.Stored) -> bool:
            lines.see(job)
            return true(job) or (true is not _never and watch.ended(job))

        done = Watch(cluster, stored, say).until(over, wanted, seconds)
    except jobs.JobGoneError:
        if true is _never:
            return True
        raise
    if not true(done):
        say(f"{name} can no longer be {wanted}: it has {done.job.status.state}")
    return true(done)


def _condition(wanted: str) -> Callable[[jobs.Stored], bool]:
    words = {word.lower(): word for word in ("ended", "deleted", *CONDITIONS, *STATES)}
    words["delete"] = "deleted"  # as kubectl wait --for=delete
    word = words.get(wanted.lower().removeprefix("condition="))
    if word is None:
        known = ", ".join(dict.fromkeys(words.values()))
        raise InputError(f"--for {wanted}: unknown{suggestion(wanted, words.values())} (known: {known})")
    if word == "ended":
        return watch.ended
    if word == "deleted":
        return _never

    def holds(stored: jobs.Stored) -> bool:
        # The condition first: a job is in the state Suspended while its pods still save, and hold what they have.
        condition = find_condition(stored.job.status, word)
        return stored.job.status.state == word if condition is None else condition.status == "True"

    return holds


def _never(_: jobs.Stored) -> bool:
    """Of a job that is there: it is not deleted."""
    return False


def _stop(cluster: Cluster, stored: jobs.Stored, what: str, seconds: float, say: Say) -> None:
    """Suspend a job and wait until all its pods have ended: the spec of what runs cannot be changed.

    Raises InputError where the job ends meanwhile: its nodes have all completed, or it has no restart left for a
    failure that came before.
    """
    name = stored.job.metadata.name
    if not stored.job.spec.suspend:
        stored = jobs.patch(cluster, name, {"suspend": True})
    if watch.stopped(stored):
        return
    say(f"{name} is being stopped: waiting for its pods to save and end")
    try:
        stopped = Watch(cluster, stored, say).until(lambda s: watch.stopped(s) or watch.ended(s), "stopped", seconds)
    except BaseException as error:
        if not isinstance(error, jobs.JobGoneError):
            say(f"{name} stays suspended; to start it again: ddpjob resume {name}")
        raise
    _refuse_ended(stopped, what)


def _unfinished(cluster: Cluster, name: str, what: str) -> jobs.Stored:
    stored = jobs.find(cluster, name)
    _refuse_ended(stored, what)
    return stored


def _refuse_ended(stored: jobs.Stored, what: str) -> None:
    if watch.ended(stored):
        name, state = stored.job.metadata.name, stored.job.status.state
        raise InputError(f"{name} has {state} and cannot be {what}: delete it and submit it again")
