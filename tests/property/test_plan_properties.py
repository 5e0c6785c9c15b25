"""Properties of the plan that hold for any generated job and cluster state."""

import datetime as dt
from dataclasses import replace as replaced
from typing import Any

import msgspec
from hypothesis import event, given
from hypothesis import strategies as st
from msgspec.structs import replace
from worlds import START, UID, World, job

from ddpjob_operator.job import api, ranges, validation
from ddpjob_operator.job.status import apart_from_progress
from ddpjob_operator.job.validation import Problem
from ddpjob_operator.observed.cluster import ConflictingObject, Container, Node, Observed, Pod
from ddpjob_operator.observed.reports import AgentCounts, AgentReport, Report
from ddpjob_operator.plan import leadership
from ddpjob_operator.plan.actions import CreatePod, CreateService, DeleteJob, DeletePod
from ddpjob_operator.plan.plan import plan
from ddpjob_operator.pods import naming

NODES_MAX = 3
times = st.integers(-100, 4000).map(lambda s: START + dt.timedelta(seconds=s))
containers = st.one_of(
    st.builds(
        Container, st.just("waiting"), st.sampled_from(["", "ContainerCreating", "ErrImagePull"]), st.text(max_size=5)
    ),
    st.builds(Container, st.just("running"), ready=st.booleans()),
    st.builds(
        Container,
        st.just("ended"),
        st.sampled_from(["Completed", "Error", "OOMKilled"]),
        st.sampled_from(
            [
                "",
                "ValueError: x",
                "RuntimeError: Connection closed by peer",
                '{"ddpjob": 1, "ended": true}',
                '{"ddpjob": 1, "ended": true, "agent": {"members": "0-1"}}',
                # Rank numbers as in a log, which may be invalid.
                "Root Cause (first observed failure):\n[0]:\n  rank      : -1 (local_rank: 0)\n  exitcode  : 1",
                "[rank999999999]: ValueError: x\n[rank-2]: ValueError: y",
            ]
        ),
        exit_code=st.sampled_from([None, 0, 1, 137, 143]),
        ended_at=st.none() | times,
    ),
)
pods = st.builds(
    Pod,
    name=st.integers(0, 99).map(lambda n: f"digits-{n // 10}-{n % 10}"),
    uid=st.uuids().map(str),
    owner_uid=st.sampled_from([UID, UID, UID, "", "someone-else"]),
    attempt=st.integers(0, 3),
    place=st.integers(-1, NODES_MAX),
    replacement=st.sampled_from([0, 0, 1, 2]),
    job=st.sampled_from(["digits", ""]),
    node=st.sampled_from(["", "node-a"]),
    phase=st.sampled_from(["Pending", "Running", "Succeeded", "Failed", "Unknown"]),
    reason=st.sampled_from(["", "Evicted"]),
    unschedulable=st.sampled_from(["", "0/3 nodes"]),
    message=st.sampled_from(["", "The node was low on resource: memory."]),
    disruption=st.sampled_from(["", "PreemptionByScheduler"]),
    scheduled_at=st.none() | times,
    silent_since=st.none() | times,
    deletion_requested_at=st.none() | times,
    deletion_deadline=st.none() | times,
    trainer=containers,
    sidecars_run=st.booleans(),
)
agents = st.builds(AgentCounts, application=st.integers(0, 3), stall=st.integers(0, 2), in_a_row=st.integers(0, 4))
observed = st.builds(
    Observed,
    service=st.booleans(),
    pods=st.lists(pods, max_size=6, unique_by=lambda p: p.name).map(tuple),
    conflicts=st.lists(
        st.builds(ConflictingObject, st.just("Service"), st.just("digits"), st.booleans()), max_size=1
    ).map(tuple),
    reports=st.dictionaries(st.just(0), st.builds(Report, step=st.integers(0, 99), received_at=times), max_size=1),
    agent=st.none() | st.builds(AgentReport, replacement=st.integers(0, 2), restarts=agents),
    nodes=st.none() | st.dictionaries(st.just("node-a"), st.builds(Node, st.booleans(), st.none() | times), max_size=1),
)
failures = st.builds(
    api.JobFailure,
    attempt=st.integers(0, 3),
    node_rank=st.integers(0, NODES_MAX),
    pod=st.sampled_from(["", "digits-1-0"]),
    node=st.sampled_from(["", "node-a"]),
    reason=st.sampled_from(["Error", "NodeLost", "PodGone", "Stalled", "StoppedFromOutside", "OOMKilled"]),
    time=times,
)
states = st.sampled_from(
    [None, "Pending", "Starting", "Running", "Restarting", "Failing", "Suspended", "Succeeded", "Failed"]
)
node_ranges = st.sets(st.integers(0, NODES_MAX)).map(ranges.text) | st.sampled_from(["", "x", "3-", "9-1", ",,"])


@st.composite
def jobs(draw: st.DrawFn) -> api.DDPJob:
    """Generate a valid job with a random status."""
    status = api.Status(
        state=draw(states),
        reason=draw(st.sampled_from(["RankFailed", "Disrupted", "DeadlineExceeded", "Suspended", "StartBackOff"])),
        last_failure=draw(st.none() | failures),
        attempt=draw(st.integers(0, 3)),
        attempt_time=draw(st.none() | times),
        state_time=draw(st.none() | times),
        start_time=draw(st.none() | times),
        completion_time=draw(st.none() | times),
        started_nodes=draw(node_ranges),
        completed_nodes=draw(node_ranges),
        replacements=draw(st.dictionaries(st.sampled_from(["0", "1", "x"]), st.integers(0, 2), max_size=2)),
        in_place=draw(st.none() | st.builds(api.InPlace, replacement=st.integers(0, 2), application=st.integers(0, 2))),
    )
    limit, nodes = st.none() | st.integers(1, 500), draw(st.integers(1, NODES_MAX))
    what = job(
        container={"command": [draw(st.sampled_from(["torchrun", "ddprun"])), "train.py"]},
        nodes=nodes,
        minNodes=draw(st.none() | st.integers(1, nodes)),
        suspend=draw(st.booleans()),
        cleanPodPolicy=draw(st.sampled_from(["None", "Running", "All"])),
        activeDeadlineSeconds=draw(limit),
        startDeadlineSeconds=draw(limit),
        ttlSecondsAfterFinished=draw(limit),
    )
    return replace(what, status=status)


@given(jobs(), observed, times)
def test_any_world_gives_a_plan_and_an_equal_world_an_equal_plan(what, seen, now):
    assert plan(what, seen, now) == plan(what, seen, now)


@given(jobs(), observed, times, st.randoms(use_true_random=False))
def test_the_order_of_observations_does_not_matter(what, seen, now, shuffle):
    mixed = list({(p.attempt, p.place, p.replacement): p for p in seen.pods}.values())
    one = replaced(seen, pods=tuple(mixed))
    shuffle.shuffle(mixed)
    assert plan(what, replaced(seen, pods=tuple(mixed)), now) == plan(what, one, now)


@given(jobs(), observed, times)
def test_no_object_of_another_owner_is_ever_deleted(what: api.DDPJob, seen: Observed, now: dt.datetime) -> None:
    # Pods without a living owner, left on a lost node by a deleted job of the same name.
    leaked = {(p.name, p.uid) for p in seen.pods if p.job == "digits" and p.owner_uid and p.deletion_requested_at}
    of_this_name = leaked | {(p.name, p.uid) for p in seen.pods if p.owner_uid == UID}
    for action in plan(what, seen, now).actions:
        if isinstance(action, DeletePod):
            assert (action.name, action.uid) in of_this_name
        if isinstance(action, DeleteJob):
            assert action.uid == UID


@given(jobs(), observed, times)
def test_a_pod_is_deleted_only_for_a_reason_that_the_status_already_records(what, seen, now):
    """A pod may be deleted only when the status has what the pod shows: a failure, a restart or a completed rank."""
    recorded = what.status
    # A job without a state whose pods are there has lost its status, and counts as suspended.
    has_lost_it = recorded.state is None and any(p.owner_uid == UID and p.attempt for p in seen.pods)
    for action in plan(what, seen, now).actions:
        if isinstance(action, DeletePod):
            pod = next(p for p in seen.pods if p.uid == action.uid)
            if pod.owner_uid != UID:
                continue
            stopping = (
                has_lost_it or recorded.state in ("Failing", "Suspended", "Succeeded", "Failed") or recorded.is_broken
            )
            newest = (recorded.attempt, naming.replacement(recorded, pod.place))
            assert stopping or (pod.attempt, pod.replacement) < newest


@given(jobs(), observed, times)
def test_no_pod_is_created_next_to_a_live_one_of_the_same_rank(what, seen, now):
    """No pod may be created next to a live one of the same rank: both would write the same checkpoint."""
    todo = plan(what, seen, now)
    given_up = {a.uid for a in todo.actions if isinstance(a, DeletePod) and a.grace_seconds == 0}
    live = {p.place for p in seen.pods if p.owner_uid == UID and p.live and p.uid not in given_up}
    made = [a.place for a in todo.actions if isinstance(a, CreatePod)]
    assert not live & set(made)
    assert len(made) == len(set(made))
    status = todo.status or what.status
    assert all(a.attempt == status.attempt for a in todo.actions if isinstance(a, CreatePod))


@given(jobs(), observed, times)
def test_counts_never_decrease(what: api.DDPJob, seen: Observed, now: dt.datetime) -> None:
    after = plan(what, seen, now).status
    before = what.status.restarts or api.Restarts()
    if after is not None and after.restarts is not None:
        for name in ("application", "infrastructure", "stall", "total"):
            assert getattr(after.restarts, name) >= getattr(before, name)


@given(jobs(), observed, times)
def test_attempts_only_grow_and_a_terminal_state_is_final(what: api.DDPJob, seen: Observed, now: dt.datetime) -> None:
    after = plan(what, seen, now).status
    if after is not None:
        assert after.attempt >= what.status.attempt
        if what.status.state in ("Succeeded", "Failed"):
            assert (after.state, after.attempt) == (what.status.state, what.status.attempt)


@given(jobs(), observed, times)
def test_a_carried_out_plan_soon_leaves_nothing_to_do_if_nothing_else_happens(what, seen, now):
    world = World(what)
    world.now, world.service, world.conflicts = now, seen.service, list(seen.conflicts)
    # The API server has one pod per name, and attempt, place and replacement determine a pod's name.
    own = {naming.pod_name(what, p.attempt, p.place, p.replacement): p for p in seen.pods if p.owner_uid == UID}
    world.pods = {name: replace(p, name=name) for name, p in own.items()}
    world.conflicting_pods = [p for p in seen.pods if p.owner_uid != UID and p.name not in own]
    world.reports, world.agent = dict(seen.reports), seen.agent
    world.settle(limit=8)


@st.composite
def runs(draw: st.DrawFn) -> tuple[api.DDPJob, Observed]:
    """Generate a job in which most trainers are running or have completed, with a random status and reports."""
    what, seen = draw(jobs()), draw(observed)
    attempt = max(1, what.status.attempt)
    fine = st.sampled_from([Container("running"), Container("running", ready=True), Container("ended", exit_code=0)])
    own = [
        replace(
            draw(pods),
            name=naming.pod_name(what, attempt, place, naming.replacement(what.status, place)),
            owner_uid=UID,
            attempt=attempt,
            place=place,
            replacement=naming.replacement(what.status, place),
            phase="Running",
            trainer=draw(st.one_of(fine, fine, fine, containers)),
            deletion_requested_at=None,
            deletion_deadline=None,
            disruption="",
        )
        for place in range(what.spec.nodes)
    ]
    what = replace(what, status=replace(what.status, attempt=attempt), spec=replace(what.spec, suspend=False))
    return what, replaced(seen, service=True, conflicts=(), pods=tuple(own))


@given(runs(), times, st.integers(1, 60))
def test_after_a_write_of_progress_alone_nothing_is_left_to_do(world, now, seconds):
    """After a write of progress alone nothing may be left to do, because no reconcile follows it."""
    what, seen = world
    for _ in range(4):  # so that the status is that of a job that has run for a while
        before = plan(what, seen, now)
        what = replace(what, status=before.status or what.status)
    if before.status is not None or before.actions:
        return
    later = now + dt.timedelta(seconds=seconds)
    report = Report(attempt=what.status.attempt, step=100, received_at=later)
    seen = replaced(seen, reports={0: report})
    todo = plan(what, seen, later)
    if (
        todo.status is not None
        and not todo.actions
        and apart_from_progress(todo.status) == apart_from_progress(what.status)
    ):
        event("progress alone is written")
        again = plan(replace(what, status=todo.status), seen, later)
        assert (again.status, again.actions, again.events) == (None, (), ())
        assert again.requeue_at == todo.requeue_at


@given(jobs(), observed, times)
def test_a_status_is_read_back_as_it_was_written(what: api.DDPJob, seen: Observed, now: dt.datetime) -> None:
    """A status must be read back as it was written, or the job stands still."""
    status = plan(what, seen, now).status
    if status is not None:
        stored = msgspec.json.decode(msgspec.json.encode(msgspec.to_builtins(status)))
        assert validation.stored_status({"status": stored}) == status


@given(observed, times, st.text(max_size=20))
def test_an_invalid_spec_creates_nothing(seen: Observed, now: dt.datetime, why: str) -> None:
    actions = plan(job(), seen, now, problems=[Problem(("spec",), why)]).actions
    assert not [a for a in actions if isinstance(a, (CreatePod, CreateService))]


@given(st.sets(st.integers(0, 300)))
def test_ranges_contain_exactly_the_given_numbers(ranks: set[int]) -> None:
    assert ranges.parse(ranges.text(ranks)) == ranks


json_values: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from([2**70, 10**400]) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)
FIELDS = [*api.Spec.__struct_fields__, "nprocPerNode", "template", "minNodes", "failurePolicy", "stall", "suspend"]


@given(
    st.one_of(
        json_values,
        st.fixed_dictionaries(
            {"apiVersion": st.just(api.API_VERSION), "kind": st.just(api.KIND)},
            optional={
                "metadata": json_values | st.fixed_dictionaries({"name": json_values}),
                "spec": json_values | st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=5),
                "status": json_values,
            },
        ),
    )
)
def test_any_applied_object_is_a_job_or_a_list_of_named_problems(raw: Any) -> None:
    parsed, problems = validation.parse(raw)
    assert isinstance(parsed, api.DDPJob)
    for problem in problems:
        assert str(problem)
    plan(replace(parsed, metadata=replace(parsed.metadata, uid=UID)), Observed(), START, problems=problems)


WRONG_SPECS = st.dictionaries(
    st.sampled_from([f.encode_name for f in msgspec.structs.fields(api.Spec)]), json_values, max_size=5
) | st.fixed_dictionaries(
    {
        "template": st.fixed_dictionaries(
            {},
            optional={
                "metadata": json_values,
                "spec": json_values
                | st.fixed_dictionaries(
                    {},
                    optional={
                        "containers": json_values
                        | st.lists(
                            st.dictionaries(
                                st.sampled_from("name command args env resources volumeMounts ports".split()),
                                json_values,
                                max_size=4,
                            ),
                            max_size=2,
                        ),
                        "terminationGracePeriodSeconds": json_values,
                        "volumes": json_values,
                        "restartPolicy": json_values,
                    },
                ),
            },
        )
    }
)


@given(jobs(), WRONG_SPECS, observed, times)
def test_any_spec_of_a_running_job_gives_a_plan(what, given_spec, seen, now):
    """Any spec of a running job must give a plan, also one that only an old CRD accepts."""
    metadata = {"name": "digits", "namespace": "default", "uid": UID}
    raw = {"apiVersion": api.API_VERSION, "kind": api.KIND, "metadata": metadata, "spec": given_spec}
    parsed, problems = validation.parse(raw)
    changed = replace(parsed, status=what.status)
    todo = plan(changed, seen, now, problems=problems)
    assert (
        not problems
        or todo.status is None
        or not what.status.attempt
        or "invalid" in todo.status.message
        or (todo.status.state in ("Succeeded", "Failed") or todo.status.reason == "InvalidSpec")
    )


LOSSES = ("vanishes", "Evicted", "node lost", "deleted", "ends", "runs", "unschedulable", "a minute", "a step")


def happens(world: World, what: str, place: int, number: int) -> None:
    """Let something happen to a place, unless no node would be left whose first pod is training."""
    trains = {p.place for p in world.pods.values() if p.live and p.trainer.state == "running" and p.replacement == 0}
    trains -= {p.place for p in world.pods.values() if p.deletion_requested_at is not None}
    pod = next((p for p in world.pods.values() if p.place == place and p.live), None)
    waits = pod is not None and pod.trainer.state == "waiting" and pod.deletion_requested_at is None
    if what == "resize" and any(other < place for other in trains):
        world.change(nodes=place)
    elif what == "runs" and waits:
        world.nodes = {}
        world.runs(place)
    elif what == "unschedulable" and waits:
        world.unschedulable(place, "0/4 nodes are available")
    elif what in ("a minute", "a step", "resize") or pod is None or not trains - {place}:
        world.after(60 if what == "a minute" else 1).reports_step(number)
    else:
        is_lost(world, what, pod)


def is_lost(world: World, what: str, pod: Pod) -> None:
    if what == "node lost" and pod.node:
        world.node_lost(pod.place).after(31)
    elif what == "deleted" and pod.deletion_requested_at is None:
        world.deleted_first(pod.place)
    elif what == "ends" and pod.node:
        world.exits(pod.place, 143 if pod.deletion_requested_at else 75)
    elif what == "Evicted" and pod.node:
        world.evicted(pod.place, what)
    elif what == "vanishes":
        world.vanishes(pod.place)


@given(st.lists(st.tuples(st.sampled_from((*LOSSES, "resize")), st.integers(0, 3)), max_size=30))
def test_an_elastic_job_under_ddprun_trains_on_as_long_as_one_node_stays(events: list[tuple[str, int]]) -> None:
    """An elastic job under ddprun must stay Running in one attempt while one node stays. No node may have two live
    pods, and each term's leader must have a live one."""
    world = World(job(container={"command": ["ddprun", "train.py"]}, nodes=4, minNodes=1)).running().after(60)
    leaders: dict[int, api.JobLeader] = {}
    for number, (what, place) in enumerate(events):
        happens(world, what, place, number)
        world.settle()
        assert (world.status.state, world.status.attempt, world.status.restarts.application) == ("Running", 1, 0)
        live = [(p.place, p.replacement) for p in world.pods.values() if p.live]
        assert len(live) == len({place for place, _ in live})
        leader = leadership.leader(world.job, world.status)
        assert leader.place in [place for place, _ in live]
        assert leaders.setdefault(leader.term, leader) == leader
        assert leader.term == max(leaders)
    world.nodes = {}
    world.change(nodes=4).settle().stops_all().settle().after(10).settle()
    waiting = [p.place for p in world.pods.values() if p.live and p.trainer.state == "waiting"]
    assert world.runs(*waiting).settle().status.reason == "AllNodesRun"
