"""A spec may become invalid while its job is running: the job continues, and its message names the mistake."""

from typing import Any

import pytest
from msgspec.structs import replace
from worlds import World, digits, manifest

from ddpjob_operator.job import api, validation
from ddpjob_operator.plan.actions import CreatePod

WRONG = {"preflight": "sometimes"}
PROBLEM = 'spec.preflight: must be one of Always, Never, OnRestart, is "sometimes"'
SAID = f"the spec is invalid ({PROBLEM}); the job goes on as it was"


def becomes(world: World, **spec: Any) -> World:
    """Apply an edit that makes the spec invalid. An API server with an old CRD accepts such an edit."""
    given = {**manifest()["spec"], "nodes": world.job.spec.nodes, **spec}
    parsed, world.problems = validation.parse({**manifest(), "spec": given})
    assert world.problems
    generation = (world.job.metadata.generation or 0) + 1
    metadata = replace(world.job.metadata, generation=generation)
    world.job = replace(world.job, spec=parsed.spec, metadata=metadata)
    return world


def is_mended(world: World, **spec: Any) -> World:
    parsed, world.problems = validation.parse(manifest(**spec))
    assert not world.problems
    world.job = replace(world.job, spec=parsed.spec)
    return world


def test_a_job_whose_spec_became_invalid_still_succeeds() -> None:
    """A job whose spec has become invalid must still succeed, and free its GPUs, when its nodes have completed."""
    world = becomes(digits().running(), **WRONG).settle().exits(0).exits(1).settle()
    assert (world.status.state, world.status.reason) == ("Succeeded", "AllNodesCompleted")


def test_a_job_whose_spec_became_invalid_restarts_and_is_charged() -> None:
    """After the loss of a pod the job must restart, although nobody has repaired its spec yet."""
    world = becomes(digits().running(), **WRONG).settle().exits(0, code=1).restarted()
    assert world.names() == ["digits-1-0", "digits-2-0", "digits-2-1"]
    assert world.status.restarts.application == 1


def test_a_job_whose_spec_became_invalid_still_fails_when_its_budget_is_spent() -> None:
    world = becomes(digits(backoffLimit=0).running(), backoffLimit=0, **WRONG).exits(0, code=1).restarted()
    assert (world.status.state, world.status.reason) == ("Failed", "BackoffLimitExceeded")
    assert "the spec is invalid" not in world.status.message, "what is over speaks of its end alone"


def test_a_job_whose_spec_became_invalid_keeps_its_deadlines() -> None:
    limits = {"activeDeadlineSeconds": 60, "ttlSecondsAfterFinished": 30}
    world = becomes(digits(**limits).running(), **limits, **WRONG).settle()
    assert world.plan().requeue_at is not None
    world.after(60).settle().stops_all().settle()
    assert (world.status.state, world.status.reason) == ("Failed", "DeadlineExceeded")
    assert world.after(30).step().actions
    assert world.of_deleted_job


def test_a_job_whose_spec_became_invalid_can_be_suspended_and_resumes_when_it_is_fixed() -> None:
    world = becomes(digits().running(), suspend=True, **WRONG).settle().stops_all().settle()
    assert world.status.state == "Suspended"
    assert world.status.message.endswith(f"; the spec is invalid ({PROBLEM})")
    becomes(world, **WRONG).settle()
    assert (world.status.state, world.status.reason, world.names()) == ("Suspended", "InvalidSpec", [])
    assert "suspended until the spec is fixed" in world.status.message
    is_mended(world).settle()
    assert world.names() == ["digits-2-0", "digits-2-1"]


def test_an_invalid_spec_is_reported_in_the_message_the_condition_and_one_event() -> None:
    world = becomes(digits().running(), **WRONG).settle()
    assert world.status.message == f"2 of 2 nodes are running, attempt 1; {SAID}"
    assert not world.is_true("Accepted")
    assert [(e.type, e.message) for e in world.events if e.reason == "InvalidSpec"] == [("Warning", SAID)]
    world.after(60).settle()
    assert world.plan().status is None
    is_mended(world).settle()
    assert world.status.message == "2 of 2 nodes are running, attempt 1"
    assert (world.events[-1].reason, world.events[-1].message) == ("Accepted", "the spec is valid now")


def test_the_remark_occurs_once_however_often_the_job_is_reconciled() -> None:
    """A message that is kept between reconciles, as in a back-off, must not grow by a sentence each time."""
    world = becomes(digits().running(), **WRONG).settle()
    world.exits(0, code=1).restarted().runs(0, 1).settle().exits(0, code=1).settle().stops_all().settle()
    assert world.status.state == "Restarting"
    for _ in range(3):
        assert world.after(0.1).settle().status.message.count("the spec is invalid") == 1


def test_events_do_not_repeat_the_remark() -> None:
    world = becomes(digits().running(), **WRONG).settle().exits(0, code=1).restarted()
    assert [e.message for e in world.events if "the spec is invalid" in e.message] == [SAID]


@pytest.mark.parametrize(
    ("spec", "read"),
    [
        ({"backoffLimit": -1}, {"backoff_limit": 0}),
        ({"activeDeadlineSeconds": 10**12}, {"active_deadline_seconds": api.SECONDS_MAX}),
        ({"ttlSecondsAfterFinished": -5}, {"ttl_seconds_after_finished": 0}),
    ],
)
def test_a_number_that_a_newer_operator_no_longer_allows_is_read_as_the_nearest_allowed_one(spec, read):
    """A number that a newer operator forbids must be read as the nearest allowed one, and not as the default."""
    world = becomes(digits().running(), **spec).settle()
    assert {name: getattr(world.job.spec, name) for name in read} == read


@pytest.mark.parametrize("nodes", ["two", None, 0, 10**9, {}])
def test_an_unreadable_number_of_nodes_is_taken_from_the_status(nodes: object) -> None:
    """An unreadable number of nodes must be taken from the status: with the default of 1, one node would be enough."""
    world = digits().running()
    parsed, _ = validation.parse({**manifest(), "spec": {**manifest()["spec"], "nodes": nodes}})
    world.job = replace(world.job, spec=parsed.spec)
    world.problems = [validation.Problem(("spec", "nodes"), "must be a whole number")]
    world.settle().exits(0).settle()
    assert world.status.state == "Running"
    assert world.exits(1).settle().status.state == "Succeeded"


def test_an_unreadable_template_creates_no_pod_and_gives_the_reason() -> None:
    template = {"spec": {"containers": [{"name": "trainer", "env": "A=1"}]}}
    world = becomes(digits().running(), template=template).settle()
    world.exits(0, code=1).settle().stops_all()
    for _ in range(4):
        assert not [a for a in world.step().actions if isinstance(a, CreatePod)]
    assert (world.status.state, world.status.reason) == ("Restarting", "InvalidSpec")
    assert "no pod can be created while the spec is invalid: spec.template.spec.containers[0].env: must be a list" in (
        world.status.message
    )
    assert is_mended(world).settle().names()[-2:] == ["digits-2-0", "digits-2-1"]


TOO_LARGE = {"failurePolicy": {"rules": [{"action": "Count", "onExitCodes": {"values": [1] * 255}}] * 40}}


NO_POD = {"template": {"spec": True}}


@pytest.mark.parametrize(
    "spec",
    [{"spec": manifest()["spec"] | wrong} for wrong in (TOO_LARGE, NO_POD)] + [{"spec": None}, {"spec": []}, {}],
)
def test_an_unreadable_spec_does_not_reduce_two_nodes_to_one(spec: dict[str, Any]) -> None:
    """An unreadable spec must not turn two nodes into one: the job would succeed when rank 0 ends."""
    world = digits().running()
    without = {name: value for name, value in manifest().items() if name != "spec"}
    parsed, world.problems = validation.parse({**without, **spec})
    world.job = replace(world.job, spec=parsed.spec)
    world.exits(0).settle()
    assert (world.status.state, world.status.completed_nodes) == ("Running", "0")
    world.exits(1, code=1).settle()
    assert (world.status.state, world.status.reason) == ("Restarting", "InvalidSpec")
    assert "no pod can be created while the spec is invalid" in world.status.message
    assert is_mended(world).settle().names()[-2:] == ["digits-2-0", "digits-2-1"]
