"""In a pre-flight nodes measure each other before the first ranks start: what follows from the result."""

import json
from pathlib import Path
from typing import Any

import pytest
from agents import Launcher, finish
from leads import failure, start, taken

from ddpjob_core.budget import Budget
from ddpjob_core.failures import RESUMABLE_EXIT_CODE as RESUMABLE
from ddpjob_core.members import Members
from ddprun.core.leader_state import PREFLIGHT_SECONDS, LeaderState, Stop

JOIN_SECONDS, T0 = 600.0, 7.25
ASKED = {"DDPJOB_PREFLIGHT": "1"}
TRAIN = "import os; open(f'trained-{os.environ[\"RANK\"]}-{os.environ[\"TORCHELASTIC_RESTART_COUNT\"]}', 'w').close()"
# Module that replaces ddpjob/preflight, which needs torch.
STUB = """
import os, sys, time
from ddpjob.reporting import termination
rank = os.environ["RANK"]
open(f"checked-{rank}", "w").close()
if os.environ["CHECK"] == "bad":
    while not (os.path.exists("checked-0") and os.path.exists("checked-1")):  # as ranks that measure each other
        time.sleep(0.01)
    if rank == "0":
        termination.tell_unfit(1, "pre-flight: node 1 is slow: 1 GB/s to its peers where the median is 9 GB/s", [1])
        open("told", "w").close()
    while not os.path.exists("told"):
        time.sleep(0.01)
    sys.exit(75)
assert os.environ["CHECK"] == "well"
"""


def checking(nodes: int = 2, **more: Any) -> LeaderState:
    found = LeaderState(Members(range(nodes)), Budget(3, 3, 3, 3), JOIN_SECONDS, T0, preflight=True, **more)
    for node in range(nodes):
        found.joined(node, T0)
    assert taken(found) == [start(found, -1, preflight=True)], "no generation is spent on it"
    return found


def test_the_first_generation_starts_when_all_nodes_have_measured() -> None:
    found = checking()
    found.finished(0, T0)
    assert taken(found) == []
    found.finished(1, T0)
    assert taken(found) == [start(found, 0)]
    found.finished(0, T0)
    found.finished(1, T0)
    (order,) = taken(found)
    assert order.code == 0, "and it is the training that ends the job"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_bad_node_ends_the_group_and_is_named_whoever_reports_first(order: tuple[int, int]) -> None:
    found = checking()
    found.failed(1, [failure(1, 75)], T0)
    assert taken(found) == [Stop(frozenset({0, 1}), -1, patient=True)]
    bad = failure(1, 75, exception="pre-flight: node 1 is slow", bad_nodes=(1,), preflight=True)
    said = {0: [failure(0, 75), bad], 1: [failure(1, 75)]}
    for node in order:
        found.stopped(node, said[node], T0)
    (end,) = taken(found)
    assert (end.code, end.failure.bad_nodes, end.why) == (RESUMABLE, (1,), "pre-flight: node 1 is slow")


@pytest.mark.parametrize("late", [False, True], ids=["it fails", "it takes too long"])
def test_a_failing_preflight_costs_no_restart_and_the_training_starts(late: bool) -> None:
    found = checking()
    if late:
        found.tick(T0 + PREFLIGHT_SECONDS - 1)
        assert taken(found) == []
        found.tick(T0 + PREFLIGHT_SECONDS)
    else:
        found.failed(0, [failure(0, 1, exception="ModuleNotFoundError: No module named 'torch'")], T0)
    taken(found)
    for node in range(2):
        found.stopped(node, [], T0)
    assert taken(found) == [start(found, 0)]
    assert found.charges.restarts == 0
    assert ("took longer than 120 s" if late else "No module named 'torch'") in found.said


def test_a_node_lost_meanwhile_is_waited_for_and_all_nodes_measure_again() -> None:
    found = checking(has_operator=True)
    found.lost(1, T0)
    taken(found)
    found.stopped(0, [], T0)
    assert taken(found) == []
    found.joined(1, T0 + 5, replacement=1)
    assert taken(found) == [start(found, -1, preflight=True)]


@pytest.mark.parametrize("works", [True, False])
def test_a_preflight_after_a_lost_pod_does_not_hide_the_reason_of_the_restart(works: bool) -> None:
    """After a lost pod and a pre-flight, node 0's log must still give the lost pod as the reason of the restart."""
    found = LeaderState(Members(range(2)), Budget(3, 3, 3, 3), JOIN_SECONDS, T0, has_operator=True)
    for node in range(2):
        found.joined(node, T0)
    found.lost(1, T0)
    found.stopped(0, [], T0)
    found.joined(1, T0 + 5, generation=-1, replacement=1, preflight=True)
    assert taken(found)[-1] == start(found, 0, preflight=True)
    if works:
        found.finished(0, T0)
    else:
        found.failed(0, [failure(0, 1, exception="no torch here")], T0)
        found.stopped(0, [], T0)
        found.stopped(1, [], T0)
    found.finished(1, T0)
    assert taken(found)[-1] == start(found, 1)
    assert found.said.startswith("node 1 is lost, and a new pod has replaced it")
    assert ("no torch here" in found.said) is not works


def test_a_new_leader_reports_that_its_pod_is_new_even_after_a_preflight() -> None:
    found = LeaderState(Members(range(2)), Budget(3, 3, 3, 3), JOIN_SECONDS, T0, has_operator=True)
    found.joined(0, T0, replacement=1, preflight=True)
    found.joined(1, T0, generation=4)
    found.finished(0, T0)
    found.finished(1, T0)
    assert found.said == "the pod of node 0 is new"
    assert LeaderState(Members(range(1)), Budget(3, 3, 3, 3), JOIN_SECONDS, T0).said == "", (
        "at a first start nothing is"
    )


def test_a_new_pod_with_a_requested_preflight_makes_all_nodes_measure() -> None:
    found = LeaderState(Members(range(2)), Budget(3, 3, 3, 3), JOIN_SECONDS, T0)
    found.joined(0, T0)
    found.joined(1, T0, generation=4, preflight=True)
    assert taken(found) == [start(found, 4, preflight=True)]
    found.finished(0, T0)
    found.finished(1, T0)
    assert taken(found) == [start(found, 5)]


@pytest.fixture
def stubbed(launcher: Launcher) -> Launcher:
    """Return a launcher whose agents run the stub as pre-flight."""
    stub = launcher.folder / "stub"
    (stub / "preflight").mkdir(parents=True)
    (stub / "preflight/__init__.py").touch()
    (stub / "preflight/__main__.py").write_text(STUB)
    (stub / "sitecustomize.py").write_text("import ddpjob; ddpjob.__path__.insert(0, __file__.rsplit('/', 1)[0])")
    path = [str(stub), *filter(None, [launcher.env.get("PYTHONPATH")])]
    launcher.env |= {"PYTHONPATH": ":".join(path)}
    return launcher


def traces(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*ed-*"))


@pytest.mark.parametrize("preload", [["--no-preload"], ["--preload", "json"]], ids=["spawned", "forked"])
def test_healthy_nodes_train_in_generation_0(stubbed: Launcher, preload: list[str]) -> None:
    done = [finish(a) for a in stubbed.nodes(2, *preload, stubbed.script(TRAIN), **ASKED, CHECK="well")]
    assert [d.returncode for d in done] == [0, 0], [d.stderr for d in done]
    assert traces(stubbed.folder) == ["checked-0", "checked-1", "trained-0-0", "trained-1-0"]
    assert "pre-flight: the nodes measure each other first" in done[0].stderr


def test_a_bad_node_ends_the_pods_with_75_before_training_starts(stubbed: Launcher) -> None:
    done = [finish(a) for a in stubbed.nodes(2, "--no-preload", stubbed.script(TRAIN), **ASKED, CHECK="bad")]
    assert [d.returncode for d in done] == [75, 75], [d.stderr for d in done]
    assert traces(stubbed.folder) == ["checked-0", "checked-1"]
    said = json.loads((stubbed.folder / "termination-0.json").read_text())
    assert (said["rank"], said["exitCode"], said["badNodes"], said["ended"]) == (1, 75, [1], True)
    assert "pre-flight: node 1 is slow: 1 GB/s" in done[0].stderr


def test_the_real_preflight_in_the_fork_server_prints_its_table(launcher: Launcher) -> None:
    # With more threads, two "nodes" on the same CPUs would wait for each other in every matrix product.
    asked = ASKED | {"OMP_NUM_THREADS": "1"}
    done = [finish(a, 120) for a in launcher.nodes(2, launcher.script(TRAIN), is_warm=True, **asked)]
    assert [d.returncode for d in done] == [0, 0], [d.stderr for d in done]
    assert "pre-flight, nodes: 2, ranks: 2, gloo" in done[0].stdout
    assert traces(launcher.folder) == ["trained-0-0", "trained-1-0"]
