"""Bugs made on purpose, to show that the simulation would find them. No bug changes a source file."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from model_client import ModelClient
from msgspec.structs import replace

from ddpjob_core import rules
from ddpjob_operator.job import api, validation
from ddpjob_operator.kube import operator as kube_operator
from ddpjob_operator.kube.watch import listing, observe
from ddpjob_operator.kube.work import executor as execute
from ddpjob_operator.kube.work import lookup
from ddpjob_operator.observed import cluster, facts
from ddpjob_operator.plan import leadership, lifecycle, record, restart, settlement, startup
from ddpjob_operator.plan import plan as planning
from ddpjob_operator.plan.actions import CreatePod, CreateService, Decision, DeletePod, Plan
from ddpjob_operator.plan.view import View
from ddpjob_operator.pods import environment as pod_environment
from ddpjob_operator.pods import naming

Mutant = Callable[[], contextlib.AbstractContextManager[Any]]


def no_fence() -> contextlib.AbstractContextManager[Any]:
    """Bug: a new attempt does not wait for the pods of the previous attempt."""
    rules = tuple(rule for rule in planning.RULES if rule.__name__ != "attempt_still_ending")
    return mock.patch.object(planning, "RULES", rules)


def random_names() -> contextlib.AbstractContextManager[Any]:
    """Bug: each pod gets a random name, as with generateName."""
    number, name = itertools.count(), naming.pod_name
    return mock.patch.object(naming, "pod_name", lambda *which: f"{name(*which)}-{next(number)}")


def writes_unread() -> contextlib.AbstractContextManager[Any]:
    """Bug: the cache ignores the answers to our own writes and waits for the watch."""

    class Deaf:
        def __init__(self, store: Any) -> None:
            self._store = store

        def __getattr__(self, name: str) -> Any:
            return getattr(self._store, name)

        def put(self, raw: Any) -> None:
            """Do nothing, as a bug: the object is not stored."""

        def remove(self, *_: Any) -> None:
            """Do nothing, as a bug: the object stays stored."""

    def executor(client: Any, caches: Any, _: Any, events: Any, runtime: Any, *others: Any, **named: Any) -> Any:
        pods, services = Deaf(caches.pods), Deaf(caches.services)
        deaf: Any = lookup.Caches(caches.jobs, pods, services, caches.nodes)  # type: ignore[arg-type]
        deaf_lookup = lookup.Lookup(client, deaf, runtime)
        return execute.Executor(client, deaf, deaf_lookup, events, runtime, *others, **named)

    return mock.patch.object(kube_operator, "Executor", executor)


def delete_without_uid() -> contextlib.AbstractContextManager[Any]:
    """Bug: a delete without the uid deletes whatever object has the name by then."""
    delete = ModelClient.delete

    async def blind(self: ModelClient, path: str, options: Any) -> Any:
        return await delete(self, path, {k: v for k, v in options.items() if k != "preconditions"})

    return mock.patch.object(ModelClient, "delete", blind)


def copy_believed() -> contextlib.AbstractContextManager[Any]:
    """Bug: the operator trusts its cache and never asks the API server what exists, not even after its start."""

    async def not_asked(*_: Any) -> None:
        """Return without a read, as if the cache were always up to date."""

    return mock.patch.object(lookup.Lookup, "list_pods", not_asked)


def act_before_record() -> contextlib.AbstractContextManager[Any]:
    """Bug: pods are created and deleted before the status is written."""

    async def execute_(self: execute.Executor, job: Any, todo: Plan, memory: Any) -> None:
        for action in todo.actions:
            if isinstance(action, DeletePod):
                await self._delete(job, action)
        await self._create_all(job, [a for a in todo.actions if isinstance(a, (CreatePod, CreateService))], memory)
        if todo.status is not None:
            await self._record(job, todo.status)

    return mock.patch.object(execute.Executor, "execute", execute_)


def exit_zero_is_success() -> contextlib.AbstractContextManager[Any]:
    """Bug: a rank that was stopped and ended with 0 counts as completed."""
    return mock.patch.object(cluster.Pod, "deleted_first", False)


@contextlib.contextmanager
def last_word_believed() -> Iterator[None]:
    """Bug: only the last observation of a pod counts, and clocks decide if it was stopped before its end."""

    def deleted_first(pod: cluster.Pod) -> bool:
        ended = pod.trainer.ended_at
        return pod.deletion_requested_at is not None and (ended is None or ended >= pod.deletion_requested_at)

    with (
        mock.patch.object(facts, "merge", lambda earlier, later, look: later),
        mock.patch.object(cluster.Pod, "deleted_first", property(deleted_first)),
    ):
        yield


def kubelets_end_is_success() -> contextlib.AbstractContextManager[Any]:
    """Bug: a rank that its kubelet ended (an eviction, a node shutdown) counts as completed if its exit code is 0."""

    def has_completed(pod: cluster.Pod) -> bool:
        return pod.completed or (pod.trainer.state == "ended" and pod.trainer.exit_code == 0 and not pod.deleted_first)

    return mock.patch.object(cluster.Pod, "has_completed", property(has_completed))


def early_end_unseen() -> contextlib.AbstractContextManager[Any]:
    """Bug: a rank that ended with 0 while its peers wait for it is not blamed."""
    return mock.patch.object(settlement, "_completed_early", return_value=None)


def complaints_free() -> contextlib.AbstractContextManager[Any]:
    """Bug: no budget counts attempts in which ranks only report lost peers."""
    return mock.patch.object(rules, "of_complaints", lambda found, *_: found)


def silence_forgotten() -> contextlib.AbstractContextManager[Any]:
    """Bug: a node that was silent for a while explains no failure, so the application is blamed."""
    return mock.patch.object(settlement, "_with_silent_node", lambda _, failure, first: failure)


@contextlib.contextmanager
def a_pod_may_say_anything() -> Iterator[None]:
    """Bug: numbers and times of a pod are used unchecked, and one bad object ends the watch of all pods."""
    careful = listing.Careful
    with (
        mock.patch.object(observe, "pod", getattr(observe.pod, "__wrapped__", observe.pod)),
        mock.patch.object(observe, "seconds", lambda value: value or 0),
        mock.patch.object(careful, "put", lambda _, sink, raw: sink.put(raw)),
    ):
        yield


def old_run_id() -> contextlib.AbstractContextManager[Any]:
    """Bug: all attempts meet at the same run id and port."""
    environment = pod_environment.environment

    def same(job: Any, attempt: int, rank: int, meet: Any) -> dict[str, str]:
        found = environment(job, attempt, rank, meet)
        first = environment(job, 1, rank, naming.endpoint(job, 1))
        return found | {name: first[name] for name in ("PET_RDZV_ID", "PET_MASTER_PORT")}

    return mock.patch.object(pod_environment, "environment", same)


def replaced_at_once() -> contextlib.AbstractContextManager[Any]:
    """Bug: a replacement pod is created before the old pod has ended."""

    def at_once(view: View, status: api.Status) -> Decision | None:
        first = view.recorded.unsettled_failure
        lost = restart.lost_alone(view, status, first) if first is not None else []
        settled = settlement.settle(view, status, first) if lost and first is not None else None
        if settled is None or not settled.verdict.restart:
            return None
        return Decision(restart._replaced(view, status, "Restarting", settled, lost, ""))

    def of_older_attempts(view: View, status: api.Status) -> Decision | None:
        older = tuple(p for p in view.older if p.attempt < status.attempt)
        return startup.attempt_still_ending(dataclasses.replace(view, older=older), status)

    new = {"attempt_still_ending": of_older_attempts, "replacing": at_once}
    return mock.patch.object(planning, "RULES", tuple(new.get(rule.__name__, rule) for rule in planning.RULES))


def all_replaced_in_turn() -> contextlib.AbstractContextManager[Any]:
    """Bug: lost pods are replaced one by one, even if no other pod is left that was in the newest generation."""
    return mock.patch.object(leadership, "in_last_group", lambda *seen: set(seen[-1]))


def words_added_up() -> contextlib.AbstractContextManager[Any]:
    """Bug: the total in each report of an agent is added again."""
    with_agent = record.with_agent
    return mock.patch.object(record, "with_agent", lambda s, *rest: with_agent(replace(s, in_place=None), *rest))


def words_dropped() -> contextlib.AbstractContextManager[Any]:
    """Bug: the operator ignores restarts in place that agents report."""
    return mock.patch.object(record, "with_agent", lambda status, *_: status)


def unreadable_is_empty() -> contextlib.AbstractContextManager[Any]:
    """Bug: an unreadable status counts as empty."""
    read = validation.stored_status

    def lenient(raw: Any) -> api.Status:
        try:
            return read(raw)
        except validation.UnreadableJobError:
            return api.Status()

    return mock.patch.object(validation, "stored_status", lenient)


def invalid_spec_first() -> contextlib.AbstractContextManager[Any]:
    """Bug: a job whose spec has become invalid can be suspended, but nothing else is done for it."""

    def invalid(view: View, status: api.Status) -> Decision | None:
        if view.problems and status.attempt:
            return lifecycle.suspended(view, status) or Decision(status)
        return lifecycle.invalid(view, status)

    return mock.patch.object(planning, "RULES", tuple(invalid if r is lifecycle.invalid else r for r in planning.RULES))


# Bugs that random seeds find soon. The others need a certain order of events (test_exhaustive.py).
ALL: tuple[Mutant, ...] = (
    no_fence,
    random_names,
    writes_unread,
    act_before_record,
    exit_zero_is_success,
    last_word_believed,
    kubelets_end_is_success,
    early_end_unseen,
    complaints_free,
    a_pod_may_say_anything,
    old_run_id,
    replaced_at_once,
    words_added_up,
    words_dropped,
    unreadable_is_empty,
    invalid_spec_first,
)
