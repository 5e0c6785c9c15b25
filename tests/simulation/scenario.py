"""What happens in one run of the simulation: a job, a cluster, and all faults. Everything follows from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

from faults import Rates, swarm, swarm_of_agents, swarm_of_elastic_agents, swarm_of_gangs, swarm_of_memory
from model_memory import Script
from model_training import COMPLAINS, ENDS_EARLY, HANGS, Failure

from ddpjob_operator.job import api, validation

FAULTS_SECONDS = 400.0
"""Seconds after which no fault happens any more. The job must then come to its end."""


@dataclass(frozen=True)
class Deed:
    """An action of a user, a machine or a clock at a given moment."""

    at: float
    what: str
    number: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"t+{self.at:.1f} {self.what} {self.number} {self.seconds:.1f}"


@dataclass(frozen=True)
class Scenario:
    """A job, a cluster and all faults of a run. `spec` is that of the DDPJob without its template."""

    seed: int = 0
    spec: dict[str, Any] = field(default_factory=lambda: {"nodes": 2})
    grace_seconds: int = 30
    cluster_nodes: int = 3
    training_seconds: float = 40.0
    reports: bool = False
    clusterwide: bool = True
    launcher: str = "torchrun"
    operators: int = 1
    stale_by: int = 0
    """How many changes of its kind a stale list is behind; 0: a random number."""
    rates: Rates = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    """By attempt; under ddprun by the number of the generation."""
    deeds: tuple[Deed, ...] = ()
    gang: bool = False
    """True if the API server serves PodGroups and the operator has them switched on."""
    script: Script = field(default_factory=Script)
    """How the script keeps its state, under ddprun."""
    receiver: bool = True
    """False if agents and ranks cannot report to the operator, nor ask who leads (the chart's progress.enabled)."""
    slots: int = 2
    """How many pods fit on a cluster node."""
    name: str = "digits"
    labels: dict[str, str] = field(default_factory=dict)
    starts_at: float = 0.0
    """When the user applies the job."""
    quota: int = 0
    """How many nodes a queue of Kueue admits at a time; 0: there is no Kueue."""
    kueue: str = "v1beta1"
    """The version of its API that Kueue serves."""
    more: tuple[Scenario, ...] = ()
    """Further jobs in the same cluster. Only their spec, launcher, grace, failures, name, labels and start count."""
    events: str = "Brief"
    """DDPJOB_EVENTS of the operator."""
    has_room: bool = True
    """True if the operator keeps all of a job that has not begun; otherwise each reconcile reads the job again."""

    @property
    def gangs(self) -> tuple[str, ...]:
        """Names of the gang features that the operator has switched on."""
        return (*(["native"] if self.gang else []), *(["kueue"] if self.quota else []))

    def manifest(self) -> dict[str, Any]:
        """Return the DDPJob."""
        container = {"name": "trainer", "image": "ddpjob-trainer", "command": [self.launcher, "train.py"]}
        pod = {"containers": [container], "terminationGracePeriodSeconds": self.grace_seconds}
        return {
            "apiVersion": api.API_VERSION,
            "kind": api.KIND,
            "metadata": {"name": self.name, "namespace": "default", **({"labels": self.labels} if self.labels else {})},
            "spec": {**self.spec, "template": {"spec": pod}},
        }


def accepts(**spec: Any) -> bool:
    """True if the validation accepts a job with this spec."""
    manifest = Scenario(spec={"nodes": 2, **spec}).manifest()
    return not validation.parse(manifest)[1]


RESTARTS = accepts(backoffLimit=1)
"""True if failed groups are restarted."""

USERS = ("suspend", "suspend", "delete and apply", "delete", "touch")
OPERATORS = ("crash", "restart", "clock jumps", "api server away", "operator cut off")
CREATES = ("quota", "conflicting pod", "conflicting service")
PODS = ("pod deleted", "pod deleted", "drained", "evicted", "node shuts down", "pod forced", "pod's deadline")
NODES = ("node cut", "node cut", "node killed", "node removed", "node dies")
# Faults that break one pod of a job, while the others wait for its replacement. They come repeatedly, in any order.
ONE_BY_ONE = (*PODS, *NODES, "agent killed", "agent killed", "agent killed", "pod forced", "nodes cut", "nodes cut")
# Faults of a gang: pods of others take nodes, or somebody deletes its group.
NEIGHBOURS = ("neighbour", "neighbour", "neighbour", "group deleted")
# Objects that an attacker may create.
HOSTILE = ("hostile pod",)
DDPRUN_SHARE, ELASTIC_DDPRUN_SHARE = 0.25, 0.5
# Share of elastic jobs under ddprun whose agents reach a status receiver.
RECEIVER_SHARE = 0.8
# Share of elastic jobs under ddprun with spares.
SPARES_SHARE = 0.25
# Share of jobs with memory whose ranks copy their state regularly, in addition to jobs of one rank.
COPIES_SHARE = 0.4
# Maximum number of attempts of a job; its restart budgets allow fewer.
ATTEMPTS_MAX = 300
# Edits that leave the operator with a status or spec that it cannot read or must not start from.
EDITS = ("status edited", "spec made invalid")
EDITS_SHARE = 0.15

# Kinds of faults that may cause a bug only together, in this order or in any order.
NARROW: tuple[tuple[dict[str, tuple[str, ...]], tuple[str, ...]], ...] = (
    # Answers to requests are lost, and the watch is late.
    ({"write": ("lost answer", "not carried out"), "watch.pods": ("late",)}, ("suspend", "crash", "pod deleted")),
    # Requests are executed after their sender has ended.
    ({"write": ("slow",)}, ("suspend", "crash", "delete and apply")),
    ({"watch.pods": ("late", "gone", "broken")}, ("suspend", "pod deleted", "drained", "delete and apply")),
    ({"watch.pods": ("late",), "sigterm": ("ignored",)}, ("suspend", "crash")),
    ({"list": ("stale",), "watch.ddpjobs": ("late",)}, ("crash", "suspend", "delete and apply")),
    ({"watch.nodes": ("late",), "watch.pods": ("late",)}, ("node cut", "node cut", "crash", "drained")),
)


def scenario(seed: int) -> Scenario:
    """Return the scenario of a seed."""
    found, rng = _under_torchrun(seed), random.Random(f"{seed} launcher")
    found = _under_ddprun(rng, found) if rng.random() < DDPRUN_SHARE else found
    return _with_edits(random.Random(f"{seed} edits"), found)


def elastic_scenario(seed: int) -> Scenario:
    """Return a job that trains with minNodes to nodes, is sometimes scaled, and whose cluster may have fewer nodes."""
    found, rng = _elastic(seed), random.Random(f"{seed} spares")
    return _with_spares(rng, found) if found.launcher == "ddprun" and rng.random() < SPARES_SHARE else found


def _with_spares(rng: random.Random, found: Scenario) -> Scenario:
    """Add spares. Such a job keeps its size; without minNodes it trains with exactly `nodes` nodes."""
    spec = {**found.spec, "spares": rng.choice((1, 1, 2)), "gang": "none"}
    least = spec["minNodes"] if rng.random() < 0.5 else spec["nodes"]
    if least == spec["nodes"]:
        del spec["minNodes"]
    # One node may die for good.
    cluster_nodes = least + rng.randrange(1, spec["nodes"] - least + spec["spares"] + 3)
    deeds = tuple(deed for deed in found.deeds if deed.what != "scaled")
    return replace(found, spec=spec, cluster_nodes=cluster_nodes, deeds=deeds)


def _elastic(seed: int) -> Scenario:
    found, rng = _under_torchrun(seed), random.Random(f"{seed} elastic")
    nodes = max(2, found.spec["nodes"])
    least = rng.randrange(1, nodes + 1)
    spec = {**found.spec, "nodes": nodes, "minNodes": least, "onePodPerNode": True}
    spec.pop("stall", None)
    failures = {life: _failure(rng, nodes, False) for life in range(1, 9) if rng.random() < rng.choice((0, 0.3, 0.8))}
    deeds = [
        Deed(
            rng.uniform(0, 0.7 * FAULTS_SECONDS), rng.choice((*PODS, *NODES[:3], *["scaled"] * 6)), rng.randrange(6), 10
        )
        for _ in range(rng.choice((0, 1, 2, 4)))
    ]
    elastic = replace(
        found,
        spec=spec,
        cluster_nodes=least + rng.randrange(1, nodes - least + 3),
        failures=failures,
        deeds=tuple(sorted((*found.deeds, *deeds), key=lambda deed: deed.at)),
    )
    launcher = random.Random(f"{seed} elastic launcher")
    if launcher.random() >= ELASTIC_DDPRUN_SHARE:
        return elastic
    # Train long enough for new pods to join: an agent must first be connected for its `snooze_seconds`.
    found = _under_ddprun(launcher, replace(elastic, training_seconds=launcher.choice((20.0, 150.0, 400.0))))
    return replace(
        found, receiver=launcher.random() < RECEIVER_SHARE, rates={**found.rates, **swarm_of_elastic_agents(launcher)}
    )


def gang_scenario(seed: int) -> Scenario:
    """Return a job whose pods are placed together. It is sometimes elastic, and other jobs take nodes."""
    rng = random.Random(f"{seed} gang")
    found = _elastic(seed) if rng.random() < 0.25 else scenario(seed)
    deeds = [
        Deed(rng.uniform(0, 0.6 * FAULTS_SECONDS), rng.choice(NEIGHBOURS), rng.randrange(6), 10 ** rng.uniform(0.5, 2))
        for _ in range(rng.choice((1, 2, 4)))
    ]
    spec = found.spec if rng.random() < 0.5 else {**found.spec, "gang": rng.choice(("native", "auto"))}
    return replace(
        found,
        gang=True,
        spec=spec,
        rates={**found.rates, **swarm_of_gangs(rng)},
        deeds=tuple(sorted((*found.deeds, *deeds), key=lambda deed: deed.at)),
    )


def memory_scenario(seed: int) -> Scenario:
    """Return a job under ddprun whose ranks fail repeatedly in any order, and report where they resume."""
    rng = random.Random(f"{seed} memory")
    found = _under_ddprun(rng, _under_torchrun(seed))
    nodes, hangs = found.spec["nodes"], "stall" in found.spec
    failures = {life: _soon(rng, _failure(rng, nodes, hangs)) for life in range(1, 30) if rng.random() < 0.6}
    shares = {"memory": 0.95, "folder": 0.8, "all_save": 0.6, "names_more": 0.3}
    script = Script(**{name: rng.random() < share for name, share in shares.items()})
    if rng.random() < 0.7:  # with more failures the job would have no restart left
        found = replace(found, spec={**found.spec, "backoffLimit": 20})
    found = replace(
        found,
        training_seconds=rng.choice((20.0, 60.0, 150.0)),
        failures=failures,
        reports=True,
        script=script,
        rates={**found.rates, **swarm_of_memory(rng)},
    )
    copying, ranks = random.Random(f"{seed} copies"), random.Random(f"{seed} ranks")
    if copying.random() < COPIES_SHARE:
        return _with_ranks(ranks, _that_copies(copying, found))
    return replace(found, script=replace(script, ranks=ranks.choice((1, 1, 2, 3))))


def _with_ranks(rng: random.Random, found: Scenario) -> Scenario:
    """Add ranks to each node, because the script changes parameters. In half of the cases all are on one node: a copy
    in progress then counts if all ranks have written their part. Failures are many, because few hit a copy."""
    ranks = rng.choice((1, 1, 2, 3))
    if ranks == 1 or not found.script.changes:
        return found
    found = replace(found, script=replace(found.script, ranks=ranks))
    if rng.random() < 0.5:
        return found
    times = {life: rng.choice((12.0, 18.0, rng.uniform(5, 40))) for life in range(1, 30)}
    failures = {life: Failure(0, after, rng.choice((139, 134, 1))) for life, after in times.items()}
    return replace(found, spec={**found.spec, "nodes": 1, "backoffLimit": 20}, failures=failures)


def _that_copies(rng: random.Random, found: Scenario) -> Scenario:
    """Make survivors unable to write the state: one rank alone, or a script that changes parameters between steps."""
    script = replace(found.script, memory=True, names_more=False)
    failures = {life: _late(rng, failure) for life, failure in found.failures.items()}
    found = replace(found, training_seconds=rng.choice((60.0, 150.0)), failures=failures)
    if rng.random() < 0.4:
        failures = {life: replace(failure, rank=0) for life, failure in failures.items()}
        return replace(found, spec={**found.spec, "nodes": 1}, failures=failures, script=script)
    where = rng.choice(("at should_stop", "at should_stop", "before save"))
    where = "seldom" if where == "at should_stop" and rng.random() < 0.4 else where
    return replace(found, script=replace(script, changes=where))


def _soon(rng: random.Random, failure: Failure) -> Failure:
    """Move some failures to before the first step, so that the same state is loaded again, or into the training."""
    if failure.code == HANGS or rng.random() < 0.4:
        return failure
    return replace(failure, after_seconds=rng.choice((0.5, rng.uniform(1, 30))))


def _late(rng: random.Random, failure: Failure) -> Failure:
    """Move a failure to a time with copies, mostly as a signal: at an exception a lone rank could write its state."""
    if failure.code == HANGS or failure.reason == "OOMKilled" or rng.random() < 0.3:
        return failure
    return replace(failure, code=rng.choice((139, 134, 1)), after_seconds=rng.choice((12.0, 18.0, rng.uniform(5, 40))))


def _with_edits(rng: random.Random, found: Scenario) -> Scenario:
    if rng.random() >= EDITS_SHARE:
        return found
    deeds = [
        Deed(rng.uniform(0, 0.5 * FAULTS_SECONDS), rng.choice(EDITS), rng.randrange(6), 10 ** rng.uniform(-0.5, 2))
        for _ in range(rng.choice((1, 2)))
    ]
    return replace(found, deeds=tuple(sorted((*found.deeds, *deeds), key=lambda deed: deed.at)))


def _under_ddprun(rng: random.Random, found: Scenario) -> Scenario:
    """Use ddprun, with its own faults: ranks that fail repeatedly, and pods that are lost one by one."""
    nodes, hangs = found.spec["nodes"], "stall" in found.spec
    share = rng.choice((0.0, 0.3, 0.8, 1.0))
    failures = {life: _failure(rng, nodes, hangs) for life in range(1, 30) if rng.random() < share}
    deeds = [
        Deed(rng.uniform(0, 0.7 * FAULTS_SECONDS), rng.choice(ONE_BY_ONE), rng.randrange(6), 10 ** rng.uniform(-0.5, 2))
        for _ in range(rng.choice((0, 1, 2, 3, 6)))
    ]
    return replace(
        found,
        launcher="ddprun",
        failures=failures,
        rates={**found.rates, **swarm_of_agents(rng)},
        deeds=tuple(sorted((*found.deeds, *deeds), key=lambda deed: deed.at)),
    )


def _under_torchrun(seed: int) -> Scenario:
    rng = random.Random(seed)
    nodes = rng.choice((1, 2, 2, 2, 3, 3, 4, 8))
    spec: dict[str, Any] = {"nodes": nodes}
    _maybe(rng, spec, "cleanPodPolicy", ("None", "Running", "All"))
    _maybe(rng, spec, "ttlSecondsAfterFinished", (0, 30, 600))
    _maybe(rng, spec, "startDeadlineSeconds", (10, 60, 300))
    _maybe(rng, spec, "restartGraceSeconds", (0, 1, 5, 20))
    _maybe(rng, spec, "onePodPerNode", (True,))
    if RESTARTS:
        _maybe(rng, spec, "backoffLimit", (0, 1, 2, 6))
    # Without reports nobody detects a hang, and without a time-out it would last for hours.
    reports = rng.random() < 0.3
    hangs = reports and rng.random() < 0.5
    if hangs:
        spec["stall"] = {"timeoutSeconds": 60}
    return Scenario(
        seed=seed,
        spec=spec,
        grace_seconds=rng.choice((0, 1, 5, 30, 30)),
        cluster_nodes=nodes + rng.choice((1, 1, 2)),
        training_seconds=rng.choice((3.0, 20.0, 60.0, 150.0)),
        reports=reports,
        clusterwide=rng.random() < 0.5,
        operators=2 if rng.random() < 0.12 else 1,
        failures=_failures(rng, nodes, hangs),
        **(_narrow(rng) if rng.random() < 0.25 else {"rates": swarm(rng), "deeds": _deeds(rng)}),
    )


def _narrow(rng: random.Random) -> dict[str, Any]:
    """Return few kinds of faults, frequent and close together, for bugs that need three faults."""
    faults, kinds = rng.choice(NARROW)
    start, within = rng.choice((0.0, rng.uniform(0, 60))), rng.choice((2.0, 12.0))
    if rng.random() < 0.5:
        kinds = tuple(rng.choice(kinds) for _ in range(rng.choice((2, 3, 5))))
    times = sorted(start + rng.uniform(0, within) for _ in kinds)
    deeds = tuple(
        Deed(at, kind, rng.randrange(6), rng.uniform(0, within)) for at, kind in zip(times, kinds, strict=True)
    )
    rates = {point: {fault: rng.uniform(0.1, 0.5) for fault in some} for point, some in faults.items()}
    return {"rates": rates, "deeds": deeds}


def _maybe(rng: random.Random, spec: dict[str, Any], name: str, values: tuple[Any, ...]) -> None:
    if rng.random() < 0.3:
        spec[name] = rng.choice(values)


def _failures(rng: random.Random, nodes: int, hangs: bool) -> dict[int, Failure]:
    # The script is wrong, and fails in the same way in every attempt.
    if nodes > 1 and rng.random() < 0.08:
        always = Failure(rng.randrange(nodes), rng.uniform(1, 3), rng.choice((ENDS_EARLY, COMPLAINS)))
        return dict.fromkeys(range(1, ATTEMPTS_MAX), replace(always, reason="Completed", message=""))
    share = rng.choice((0.0, 0.0, 0.3, 0.8))
    return {attempt: _failure(rng, nodes, hangs) for attempt in range(1, 9) if rng.random() < share}


def _failure(rng: random.Random, nodes: int, hangs: bool) -> Failure:
    if hangs and rng.random() < 0.3:
        return Failure(0, rng.uniform(1, 30), HANGS)
    rank, after = rng.randrange(nodes), rng.choice((0.0, 1.0, rng.uniform(1, 60)))
    if rng.random() < 0.25:
        return Failure(rank, after, 137, "OOMKilled", "")
    return Failure(rank, after, rng.choice((1, 1, 3, 139, 134)))


def _deeds(rng: random.Random) -> tuple[Deed, ...]:
    groups = [g for g in (USERS, OPERATORS, CREATES, PODS, NODES, HOSTILE) if rng.random() < 0.3]
    kinds = [kind for group in groups for kind in group]
    if not kinds:
        return ()
    deeds = [
        Deed(rng.uniform(0, 0.7 * FAULTS_SECONDS), rng.choice(kinds), rng.randrange(6), 10 ** rng.uniform(-0.5, 2))
        for _ in range(rng.choice((1, 2, 3, 6)))
    ]
    return tuple(sorted(deeds, key=lambda deed: deed.at))
