"""The lines that `helm test` prints about an installation, and its advice if a check fails."""

import asyncio
import datetime as dt
from typing import Any, cast

import pytest
from free_port import free_port
from worlds import START

from ddpjob_operator.job import crd
from ddpjob_operator.kube.api.client import ApiError, Client
from ddpjob_operator.kube.api.runtime import Runtime
from ddpjob_operator.kube.api.served_crd import OPENAPI
from ddpjob_operator.kube.api.tokens import BoundPod
from ddpjob_operator.kube.installation import check
from ddpjob_operator.kube.ports.receive import PATH, Receiver

KIND = "/apis/training.ddpjob.io/v1alpha1"
DEPLOYMENT = "/apis/apps/v1/namespaces/ddpjob/deployments/ddpjob-operator"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/ddpjob/leases/ddpjob-operator"
TOLD = {"DDPJOB_LEASE_NAMESPACE": "ddpjob", "DDPJOB_LEASE_NAME": "ddpjob-operator"}
SERVED = {"resources": [{"name": f"ddpjobs{part}"} for part in ("", "/status", "/scale")]}


def lease(seconds_ago: float = 1.0, holder: str = "ddpjob-operator-x2lqk_5f0c") -> dict[str, Any]:
    at = START - dt.timedelta(seconds=seconds_ago)
    renewed = at.isoformat(timespec="microseconds").replace("+00:00", "Z")
    return {"spec": {"holderIdentity": holder, "renewTime": renewed, "leaseDurationSeconds": 15}}


def published(**status: Any) -> dict[str, Any]:
    """Return the CRD as the API server publishes it, with other fields in the schema of its status."""
    schema = crd.crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    if status:
        schema["properties"]["status"]["properties"] = status
    kind = {"group": "training.ddpjob.io", "version": "v1alpha1", "kind": "DDPJob"}
    return {"components": {"schemas": {"DDPJob": schema | {"x-kubernetes-group-version-kind": [kind]}}}}


WORKS = {
    KIND: SERVED,
    OPENAPI: published(),
    DEPLOYMENT: {"status": {"replicas": 2, "readyReplicas": 2}},
    LEASE: lease(),
}


class Server:
    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers

    async def get(self, path: str) -> dict[str, Any]:
        if path not in self.answers:
            raise ApiError(404, "NotFound", "the server could not find the requested resource")
        return cast(dict[str, Any], self.answers[path])


def run(answers: dict[str, Any], **told: str) -> int:
    return asyncio.run(check(cast(Client, Server(answers)), TOLD | told, tries=1, utc=lambda: START))


def test_a_working_installation_is_reported_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(WORKS) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ok    the CRD ddpjobs.training.ddpjob.io is served with v1alpha1",
        "ok    2 of 2 operators answer /healthz",
        "ok    ddpjob-operator-x2lqk_5f0c leads",
    ]


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "the CRD was left out": ({path: a for path, a in WORKS.items() if path != KIND}, "kubectl apply --server-side"),
    "the CRD is from before": (
        WORKS | {KIND: {"resources": [{"name": "ddpjobs"}]}},
        "has no ddpjobs/scale, ddpjobs/status",
    ),
    "the CRD lacks fields": (
        WORKS | {OPENAPI: published(state={})},
        "is older than this operator: the API server drops or refuses status.attempt, ",
    ),
    "no operator is ready": (
        WORKS | {DEPLOYMENT: {"status": {"replicas": 2}}},
        "0 of 2: kubectl -n ddpjob describe pods",
    ),
    "nobody has ever led": (WORKS | {LEASE: {}}, "no operator holds the Lease ddpjob/ddpjob-operator"),
    "nobody leads any more": (WORKS | {LEASE: lease(100)}, "was renewed 100 s ago by ddpjob-operator-x2lqk_5f0c"),
    "a right is missing": ({path: a for path, a in WORKS.items() if path != LEASE}, "404 NotFound"),
}


@pytest.mark.parametrize(("answers", "said"), BROKEN.values(), ids=BROKEN)
def test_a_failed_check_is_named_with_the_command_that_shows_the_reason(answers, said, capsys):
    """The log of a failed check must have the reason and a command: `helm test` only names the pod."""
    assert run(answers) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert said in line


def test_the_address_for_reports_is_requested_like_a_pod_without_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    async def nobody(_: str) -> BoundPod:
        raise AssertionError("no token was sent")

    async def checked() -> int:
        receiver = Receiver(nobody, lambda _pod: None, lambda _sender, _report: None, runtime=Runtime())
        await receiver.start("127.0.0.1", 0)
        try:
            url = f"http://127.0.0.1:{receiver.port}{PATH}"
            return await check(
                cast(Client, Server(WORKS)), TOLD | {"DDPJOB_STATUS_URL": url}, tries=1, utc=lambda: START
            )
        finally:
            await receiver.stop()

    assert asyncio.run(checked()) == 0
    assert "accepts reports from pods, with a token" in capsys.readouterr().out


def test_an_address_that_does_not_answer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(WORKS, DDPJOB_STATUS_URL=f"http://127.0.0.1:{free_port()}{PATH}") == 1
    assert "does not answer" in capsys.readouterr().out
