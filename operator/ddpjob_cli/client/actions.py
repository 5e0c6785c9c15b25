"""The commands that change or await a job: suspend, resume, restart, scale, delete, wait."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from ddpjob_cli.client import jobs, log_findings, many_jobs, watch
from ddpjob_cli.client.connection import Cluster
from ddpjob_cli.client.errors import NotFoundError
from ddpjob_cli.client.watch import Say, Watch
from ddpjob_cli.describe import ending
from ddpjob_cli.manifest.yamlfile import InputError
from ddpjob_operator.job import wording
from ddpjob_operator.job.status import find_condition
from ddpjob_operator.job.typos import suggestion

CONDITIONS = ("Complete", "Failed", "FailureTarget", "Running", "Suspended", "Accepted")
STATES = ("Pending", "Starting", "Running", "Restarting", "Failing", "Suspended", "Succeeded", "Failed")


def suspend(cluster: Cluster, name: str, say: Say) -> None:
    """Stop all pods of a job with their full grace period, and keep it."""
    stored = _unfinished(cluster, name, "suspended")
    if stored.job.spec.suspend:
        say(f"{name} is suspended already")
        return
    jobs.patch(cluster, name, {"suspend": True})
    grace = stored.job.spec.facts.grace_seconds
    say(f"{name} is suspended: its pods get SIGTERM and up to {grace} s to save. To go on: ddpjob resume {name}")


def resume(cluster: Cluster, name: str, say: Say) -> None:
    """Start a suspended job again, as a new attempt, after its last pod has ended."""
    stored = _unfinished(cluster, name, "resumed")
    if not stored.job.spec.suspend:
        say(f"{name} is not suspended")
        return
    jobs.patch(cluster, name, {"suspend": False})
    stops = stored.job.status.state == "Suspended" and not watch.stopped(stored)
    say(f"{name} is resumed" + ("; it starts again when the last of its pods has ended" if stops else ""))


def restart(cluster: Cluster, name: str, seconds: float, say: Say) -> None:
    """Suspend a job, wait until all pods have ended, then resume it. backoffLimit does not count such a restart."""
    _stop(cluster, _unfinished(cluster, name, "restarted"), "restarted", seconds, say)
    jobs.patch(cluster, name, {"suspend": False})
    say(f"{name} starts again")


def scale(cluster: Cluster, name: str, nodes: int, seconds: float, say: Say) -> None:
    """Change the number of nodes. A running job is stopped first; for an elastic job the operator does that."""
    stored = _unfinished(cluster, name, "scaled")
    before = stored.job.spec.nodes
    if before == nodes:
        say(f"{name} has {wording.count(nodes, 'node')} already")
        return
    was_suspended = stored.job.spec.suspend
    if stored.job.spec.min_nodes is not None and not was_suspended:
        jobs.patch(cluster, name, {"nodes": nodes})
        say(f"{name} now has {wording.count(nodes, 'node')} (before: {before}); all ranks save and start again")
        return
    _stop(cluster, stored, "scaled", seconds, say)
    jobs.patch(cluster, name, {"nodes": nodes, "suspend": was_suspended})
    still = "; it is still suspended" if was_suspended else ""
    say(f"{name} now has {wording.count(nodes, 'node')} (before: {before}){still}")


def delete(cluster: Cluster, names: Sequence[str], *, wait: bool, seconds: float, say: Say) -> None:
    """Delete jobs. A failure does not stop the other deletions; raise InputError or ClusterError after the last one."""

    def begin(name: str) -> str:
        going[name] = jobs.find(cluster, name)
        with contextlib.suppress(NotFoundError):
            cluster.delete(jobs.path_of(cluster, name))
        return name

    def finish(name: str) -> None:
        if wait:
            _until_gone(cluster, going[name], end, seconds)
        say(f"{name} is deleted" if wait else f"{name} is being deleted")

    going: dict[str, jobs.Stored] = {}
    begun, wrong = many_jobs.of_each(names, begin)
    end = time.monotonic() + seconds
    _, late = many_jobs.of_each(begun, finish)
    many_jobs.refuse([*wrong, *late])


def _until_gone(cluster: Cluster, stored: jobs.Stored, end: float, seconds: float) -> None:
    while True:
        try:
            jobs.again(cluster, stored)
        except jobs.JobGoneError:
            return
        if time.monotonic() > end:
            name = stored.job.metadata.name
            raise watch.TooLateError(f"{name} is being deleted, and still exists after {wording.duration(seconds)}")
        time.sleep(0.2)


def wait(cluster: Cluster, names: Sequence[str], wanted: str, seconds: float | None, say: Say) -> bool:
    """Wait until all jobs reach `wanted`: a state, a condition, `ended` or `deleted`. Return False as soon as a job
    can no longer reach it. Raise InputError for any other word, and ClusterError, also after `seconds`."""
    goal = _Goal(wanted, _condition(wanted), seconds)
    is_one = len(set(names)) == 1
    going, wrong = many_jobs.of_each(names, lambda name: _Waiting(cluster, name, goal, say, is_named=not is_one))
    many_jobs.refuse(wrong)
    while going:
        looked, wrong = many_jobs.of_each(going, lambda one: (one, one.look()))
        many_jobs.refuse(wrong)
        if any(answer is False for _, answer in looked):
            return False
        going = [one for one, answer in looked if answer is None]
    return True


class _Goal:
    def __init__(self, wanted: str, true: Callable[[jobs.Stored], bool], seconds: float | None) -> None:
        self.wanted, self.true, self.seconds = wanted, true, seconds
        self.is_end = true is not _never  # `deleted` also needs waiting after the job has ended
        self.end = None if seconds is None else time.monotonic() + seconds


class _Waiting:
    """The state of waiting for one job. is_named: messages begin with its name, because there are several jobs."""

    def __init__(self, cluster: Cluster, name: str, goal: _Goal, say: Say, *, is_named: bool) -> None:
        self._cluster, self._name, self._goal, self._say = cluster, name, goal, say
        begin = f"{name}: "
        self._lines = watch.StateLines(
            (lambda text: say(text if text.startswith(begin) else begin + text)) if is_named else say
        )
        self._watch: Watch | None = None
        try:
            self._watch = Watch(cluster, jobs.find(cluster, name), say)
        except jobs.NoJobError as error:
            if goal.is_end:
                raise
            say(str(error))
            return
        self._states = self._watch.states()

    def look(self) -> bool | None:
        """Return True if the job has reached the goal, False if it no longer can. Raise TooLateError, ClusterError."""
        if self._watch is None:
            return True
        goal = self._goal
        try:
            now = next(self._states)
        except jobs.JobGoneError:
            if goal.is_end:
                raise
            return True
        self._lines.see(now)
        if goal.true(now):
            doubts = ending.suspicions(log_findings.with_findings(self._cluster, now).job.status)
            if doubts and now.job.status.state == "Succeeded":
                self._say(f"{self._name} has Succeeded, but suspicious: {doubts}")
            return True
        if goal.is_end and watch.ended(now):
            self._say(f"{self._name} can no longer be {goal.wanted}: it has {now.job.status.state}")
            return False
        if goal.end is not None and time.monotonic() >= goal.end:
            raise watch.too_late(now, goal.wanted, goal.seconds)
        return None


def _condition(wanted: str) -> Callable[[jobs.Stored], bool]:
    words = {word.lower(): word for word in ("ended", "deleted", *CONDITIONS, *STATES)}
    words["delete"] = "deleted"  # as in kubectl wait --for=delete
    word = words.get(wanted.lower().removeprefix("condition="))
    if word is None:
        known = ", ".join(dict.fromkeys(words.values()))
        raise InputError(f"--for {wanted}: unknown{suggestion(wanted, words.values())} (known: {known})")
    if word == "ended":
        return watch.ended
    if word == "deleted":
        return _never

    def holds(stored: jobs.Stored) -> bool:
        # Prefer the condition to the state: while pods still save, the state is Suspended already, the condition False.
        condition = find_condition(stored.job.status, word)
        return stored.job.status.state == word if condition is None else condition.status == "True"

    return holds


def _never(_: jobs.Stored) -> bool:
    return False


def _stop(cluster: Cluster, stored: jobs.Stored, what: str, seconds: float, say: Say) -> None:
    """Suspend a job and wait until all its pods have ended. Raise InputError if the job ends meanwhile."""
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
