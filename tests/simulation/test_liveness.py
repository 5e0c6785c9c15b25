"""Every job ends or reports what it waits for, even if its fault never goes away."""

from __future__ import annotations

import pytest
from liveness import SCRIPTS, Doomed, broken, kubelets, live, never_mounts
from scenario import Deed, Scenario

pytestmark = pytest.mark.timeout(300)


def scenario(nodes: int = 2, **more: object) -> Scenario:
    spec = {"nodes": nodes, **more.pop("spec", {})}  # type: ignore[dict-item]
    return Scenario(**{"spec": spec, "cluster_nodes": nodes + 1, "training_seconds": 1e6, **more})  # type: ignore[arg-type]


def check(run: Doomed) -> Doomed:
    assert not run.judge.wrong, "\n".join([*run.story[-30:], run.judge.wrong[0]])
    return run


@pytest.mark.parametrize("failures", SCRIPTS.values(), ids=SCRIPTS.keys())
@pytest.mark.parametrize(
    ("nodes", "seed"), [(2, 1), *(pytest.param(*case, marks=pytest.mark.long) for case in ((2, 2), (4, 1), (4, 2)))]
)
def test_a_script_that_can_never_succeed_fails_its_job(failures: dict[int, object], nodes: int, seed: int) -> None:
    """A script that can never succeed must fail its job, which would otherwise hold GPUs for ever."""
    run = check(live(scenario(nodes, seed=seed, failures=failures)))
    assert run.state == "Failed", run.status["message"]
    free = run.status["restarts"]["infrastructure"]
    assert free <= 100
    assert run.status["restarts"]["application"] <= 3


def test_a_volume_that_never_mounts_is_reported_with_one_warning() -> None:
    with kubelets(never_mounts):
        run = check(live(scenario()))
    assert (run.state, run.status["reason"]) == ("Pending", "CannotStart")
    assert "kubectl describe pod --namespace default digits-1-" in run.status["message"]
    assert run.warnings == {"CannotStart": 1}


def test_a_broken_node_is_replaced_by_another_one() -> None:
    with kubelets(broken("node-0")):
        run = check(live(scenario(training_seconds=60.0)))
    assert run.state == "Succeeded", run.status["message"]


def test_a_job_returns_to_the_only_other_node_although_it_has_failed_twice() -> None:
    """A job must return to the only other node, although it failed there twice: the node may be healthy again."""
    deeds = (Deed(20, "node cut", 1, seconds=75), Deed(140, "node cut", 1, seconds=75))
    run = check(live(scenario(spec={"onePodPerNode": True}, cluster_nodes=2, training_seconds=250, deeds=deeds)))
    assert run.state == "Succeeded", run.status["message"]
    assert run.warnings["AvoidanceOver"] == 1
    assert [node["lifted"] for node in run.status["avoidedNodes"]] == [True]


def test_a_rank_that_hangs_silently_next_to_an_ended_one_is_reported_with_one_warning() -> None:
    run = check(live(scenario(failures=SCRIPTS["a rank that ends early"]), peers_complain=False))
    assert (run.state, run.status["reason"]) == ("Running", "OthersCompleted")
    assert run.warnings == {"OthersCompleted": 1}


@pytest.mark.parametrize(("minutes", "at"), [(1, 14.0), (60, 24.0), (600, 30.0)])
def test_a_clock_that_is_set_back_does_not_keep_a_job_from_its_end(minutes: int, at: float) -> None:
    """A clock that is set back must not make the next attempt wait for the time of the jump."""
    deed = Deed(at, "clock jumps", number=0, seconds=float(minutes))
    run = check(live(scenario(failures=SCRIPTS["an error in the script"], deeds=(deed,))))
    assert run.state == "Failed", run.status["message"]
    assert run.loop.time() < 3600.0
