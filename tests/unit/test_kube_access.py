"""At its start the operator logs which rights it lacks."""

import asyncio
from typing import Any, cast

import pytest

from ddpjob_operator.kube.api.access import GANG_RIGHTS, RIGHTS, missing_rights
from ddpjob_operator.kube.api.client import Client

ALL = [{"verbs": list(r.verbs), "apiGroups": [r.group], "resources": [r.resource]} for r in RIGHTS]


class Server:
    """API server that grants `rules`, and also each (verb, resource) in `allows` that is requested alone."""

    def __init__(self, rules: list[dict[str, Any]], *allows: tuple[str, str]) -> None:
        self.rules, self.allows = rules, allows
        self.requests: list[str] = []

    async def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(body["kind"])
        if body["kind"] == "SelfSubjectRulesReview":
            return {"status": {"resourceRules": self.rules, "incomplete": True}}
        asked = body["spec"]["resourceAttributes"]
        return {"status": {"allowed": (asked["verb"], asked["resource"]) in self.allows}}


def missing(server: Server, namespace: str = "team") -> list[str]:
    return asyncio.run(missing_rights(cast(Client, server), namespace))


def test_an_operator_with_all_rights_sends_one_request_per_namespace() -> None:
    server = Server(ALL)
    assert missing(server) == []
    assert server.requests == ["SelfSubjectRulesReview"]


@pytest.mark.parametrize(
    "rule",
    [
        {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]},
        {"verbs": ["create", "patch"], "apiGroups": [""], "resources": ["events", "pods"]},
    ],
)
def test_a_rule_may_name_several_verbs_and_resources_or_all_of_them(rule: dict[str, Any]) -> None:
    others = [r for r in ALL if r["resources"] != ["events"]]
    assert missing(Server([*others, rule])) == []
    assert missing(Server(others, ("create", "events"))) == [], "an authorizer grants it without listing it"


@pytest.mark.parametrize(
    "rule",
    [
        {"verbs": ["create"], "apiGroups": ["apps"], "resources": ["events"]},
        {"verbs": ["create"], "apiGroups": [""], "resources": ["events"], "resourceNames": ["one"]},
        {"verbs": ["get"], "apiGroups": [""], "resources": ["events"]},
    ],
    ids=["another group", "one name alone", "another verb"],
)
def test_a_verb_that_no_rule_grants_is_named_with_its_purpose(rule: dict[str, Any]) -> None:
    server = Server([*(r for r in ALL if r["resources"] != ["events"]), rule])
    assert missing(server) == [
        "the operator may not create events in team (the Events that `kubectl describe` shows); "
        "its ClusterRole or Role needs the verb create on events"
    ]
    assert server.requests == ["SelfSubjectRulesReview", "SelfSubjectAccessReview"]


def test_every_verb_is_requested_for_all_namespaces_because_rules_are_listed_per_namespace() -> None:
    server = Server(ALL)
    lines = missing(server, "")
    assert set(server.requests) == {"SelfSubjectAccessReview"}
    assert len(lines) == len(server.requests) == sum(len(right.verbs) for right in RIGHTS)
    assert "may not list nodes in all namespaces" in "\n".join(lines)


def test_the_rights_for_gangs_are_requested_only_if_gangs_are_switched_on() -> None:
    """If gangs are off, no line may report their rights as missing: an administrator would search for nothing."""
    assert missing(Server(ALL)) == []
    lines = asyncio.run(missing_rights(cast(Client, Server(ALL)), "team", ["native"]))
    assert len(lines) == sum(len(right.verbs) for right in GANG_RIGHTS["native"])
    assert "the operator may not create podgroups.scheduling.k8s.io in team" in "\n".join(lines)
