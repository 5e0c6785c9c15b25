"""The leader's pod has a label by which reports find it. It follows the Lease, even if the former leader hangs."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast

import pytest
from slow_server import play

from ddpjob_operator.kube.api.client import ApiError
from ddpjob_operator.kube.api.runtime import Runtime
from ddpjob_operator.kube.leader_label import FORBIDDEN_SECONDS, LABEL, LeaderLabel


class Pods:
    """Pods of an API server, which raises each of `errors` once."""

    def __init__(self, *errors: ApiError, **labels: str) -> None:
        self.errors = list(errors)
        self.labels: dict[str, str | None] = dict(labels)
        self.asked = 0

    async def patch(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.asked += 1
        await asyncio.sleep(0.01)
        if self.errors:
            raise self.errors.pop(0)
        assert path.startswith("/api/v1/namespaces/ops/pods/")
        name = path.rpartition("/")[2]
        if name == "gone":
            raise ApiError(404, "NotFound", 'pods "gone" not found')
        ((label, value),) = body["metadata"]["labels"].items()
        assert label == LABEL
        self.labels[name] = value
        return body


def lives(pods: Pods, pod: str, story: Callable[[LeaderLabel], Any], seconds: float = 60.0) -> None:
    async def run() -> None:
        label = LeaderLabel(cast(Any, pods), "ops", pod, Runtime(log=logging.getLogger("test")))
        running = asyncio.create_task(label.run())
        await asyncio.sleep(1)
        story(label)
        await asyncio.sleep(seconds)
        running.cancel()

    play(run)


def test_the_leader_gets_the_label_and_the_former_leader_loses_it() -> None:
    """The new leader must remove the label of the former one, because a leader that hangs cannot. Reports follow it."""
    pods = Pods(a="true")
    lives(pods, "b", lambda label: label.take_from("a"))
    assert pods.labels == {"a": None, "b": "true"}


@pytest.mark.parametrize("former", ["", "gone", "b"])
def test_the_leader_gets_the_label_whoever_was_leader_before(former: str) -> None:
    pods = Pods()
    lives(pods, "b", lambda label: label.take_from(former))
    assert pods.labels == {"b": "true"}


def test_a_restarted_container_removes_the_label_from_its_pod_until_it_is_leader() -> None:
    """A restarted container must remove the label of its pod until it leads, because reports would go to a standby."""
    pods = Pods(a="true")
    lives(pods, "a", lambda _: None)
    assert pods.labels == {"a": None}


def test_a_refused_label_is_tried_again() -> None:
    busy = ApiError(0, "NoAnswer", "connection refused")
    pods = Pods(busy, busy, busy, a="true")
    lives(pods, "b", lambda label: label.take_from("a"))
    assert pods.labels == {"a": None, "b": "true"}


def test_a_missing_right_is_logged_once_and_retried_rarely(caplog: pytest.LogCaptureFixture) -> None:
    """A missing right, as in an older chart, must be logged once: without the label, reports are lost."""
    pods = Pods(*[ApiError(403, "Forbidden", "cannot patch pods")] * 1000)
    lives(pods, "a", lambda label: label.take_from(""), seconds=10 * FORBIDDEN_SECONDS)
    assert pods.asked <= 11
    said = f"progress reports may not arrive, because the label {LABEL} was not set: 403 Forbidden: cannot patch pods"
    assert caplog.messages == [said]


def test_an_operator_outside_a_cluster_labels_nothing() -> None:
    pods = Pods()
    lives(pods, "", lambda label: label.take_from(""))
    assert pods.asked == 0
