"""A CRD older than the operator: Helm never upgrades it, and the API server drops fields that it does not know."""

import asyncio
import copy
import logging
from typing import Any, cast

import pytest

from ddpjob_operator.job import crd
from ddpjob_operator.kube.api.client import ApiError, Client
from ddpjob_operator.kube.api.served_crd import OPENAPI, dropped_fields, report_old_crd

LOG = logging.getLogger("test.served_crd")


def served(*without: str) -> dict[str, Any]:
    """Return the schema that the API server publishes for our CRD, without these fields."""
    schema = copy.deepcopy(crd.crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
    for path in without:
        *parents, name = path.split(".")
        at = schema
        for parent in parents:
            at = at["properties"][parent]
            at = at.get("items", at)
        del at["properties"][name]
    kind = {"group": "training.ddpjob.io", "version": "v1alpha1", "kind": "DDPJob"}
    schema["x-kubernetes-group-version-kind"] = [kind]
    others = {"Status": {"type": "object", "x-kubernetes-group-version-kind": [{"kind": "Status"}]}}
    return {"components": {"schemas": others | {"io.ddpjob.training.v1alpha1.DDPJob": schema}}}


class Server:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    async def get(self, path: str) -> dict[str, Any]:
        assert path == OPENAPI
        if isinstance(self.answer, ApiError):
            raise self.answer
        if self.answer is None:
            await asyncio.sleep(3600)
        return cast(dict[str, Any], self.answer)


def dropped(answer: Any) -> list[str]:
    return asyncio.run(dropped_fields(cast(Client, Server(answer))))


def test_a_crd_of_this_version_lacks_nothing() -> None:
    assert dropped(served()) == []


def test_the_fields_missing_in_an_older_crd_are_named_by_path() -> None:
    older = served("spec.dns", "status.startingSince", "status.failures.reason")
    assert dropped(older) == ["spec.dns", "status.failures.reason", "status.startingSince"]


def test_a_part_that_is_missing_completely_is_named_only_once() -> None:
    assert dropped(served("status.goodput")) == ["status.goodput"]


def test_a_newer_crd_is_accepted() -> None:
    newer = served()
    newer["components"]["schemas"]["io.ddpjob.training.v1alpha1.DDPJob"]["properties"]["status"]["properties"]["x"] = {}
    assert dropped(newer) == []


@pytest.mark.parametrize("answer", [{}, {"components": None}, {"components": {"schemas": {"x": None}}}])
def test_an_answer_without_our_kind_blames_no_crd(answer: dict[str, Any]) -> None:
    assert dropped(answer) == []


def reported(answer: Any, caplog: pytest.LogCaptureFixture, seconds: float = 5.0) -> list[str]:
    with caplog.at_level(logging.INFO, LOG.name):
        asyncio.run(report_old_crd(cast(Client, Server(answer)), LOG, seconds=seconds))
    return [record.getMessage() for record in caplog.records]


def test_an_old_crd_is_logged_in_one_line_with_the_command_that_upgrades_it(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = reported(served("spec.dns", "status.startingSince"), caplog)
    assert line == (
        "the CRD ddpjobs.training.ddpjob.io is older than this operator: the API server drops or refuses spec.dns, "
        "status.startingSince; Helm never upgrades a CRD: kubectl apply --server-side --force-conflicts -f "
        "charts/ddpjob-operator/crds"
    )
    assert caplog.records[0].levelno == logging.WARNING


def test_only_a_few_of_many_missing_fields_are_named(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = reported(
        served(*(f"status.{name}" for name in ("gang", "goodput", "inPlace", "nodes", "notKept"))), caplog
    )
    assert "drops or refuses status.gang, status.goodput, status.inPlace and 2 more fields;" in line


@pytest.mark.parametrize("answer", [ApiError(403, "Forbidden", "no"), None], ids=["refused", "no answer"])
def test_a_server_that_does_not_publish_its_schema_delays_nothing(answer, caplog):
    assert [line for line in reported(answer, caplog, 0.01) if "was not compared" not in line] == []
