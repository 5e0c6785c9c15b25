"""Under ddprun in real pods: ranks restart in place, and only a lost pod is replaced."""

import json
import textwrap
from typing import Any

import pytest
import yaml
from clusters import read, until
from pods import MEET, ROOT, Gate, Space, charged, job, result, says, spread, trainer, uids

pytestmark = pytest.mark.timeout(300)  # jobs of several tests run at the same time, and the machine may be slow
Status = dict[str, Any]

# Script without torch: ranks read their generation, connect to each other as torch's ranks do, and then fail or end.
TRAINS = f"""
import os, signal, socket, sys, time
rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
{MEET}print("generation", life, "trains", flush=True)
"""
# seconds to post the reason for the restart; a pod that is ending has two seconds for it
TOLD = "time.sleep(5)"
ENDS_AFTER_A_RESTART = f"{TRAINS}\nif life == 0: time.sleep(1000)"


def ddprun(name: str, script: str, **spec: Any) -> dict[str, Any]:
    """Return a job of two nodes whose ranks are plain Python processes under ddprun."""
    body = job(name, script, **spec)
    trainer(body)["command"] = ["ddprun", "--no-python", "python", "-u", "-c", script]
    return body


def breaks(how: str) -> str:
    """Return a script in which rank 1 fails after the group has met for the first time."""
    return f"{TRAINS}\nif life == 0:\n    if rank == 1: {how}\n    time.sleep(1000)\n{TOLD}"


# Rank 1 makes one step fewer than rank 0.
HANGS = """
import ddpjob
for step in range(1, 4 - rank):
    ddpjob.progress(step)
    time.sleep(0.5)
time.sleep(1000)
"""
JOBS = {
    "killed": ddprun("killed", breaks("os.kill(os.getpid(), 9)")),
    "raising": ddprun("raising", breaks("raise ValueError('no such shard: 7')")),
    "hopeless": ddprun("hopeless", f"{TRAINS}\nsys.exit(3)", backoffLimit=1),
    "deleted": ddprun("deleted", ENDS_AFTER_A_RESTART),
    "led": ddprun("led", ENDS_AFTER_A_RESTART),
    "hanging": ddprun(
        "hanging", f"{TRAINS}\nif life:\n    {TOLD}\n    sys.exit(0)\n{HANGS}", stall={"timeoutSeconds": 5}
    ),
    "starved": ddprun("starved", breaks("eaten = [bytearray(b'x' * 2**22) for _ in range(1000)]")),
}


@pytest.fixture(scope="module")
def broken(jobs: Space) -> Space:
    """Run all jobs at the same time. Two pods are deleted, one of them by force as if its node were lost."""
    jobs.apply(*JOBS.values())
    for name in ("deleted", "led"):
        for rank in (0, 1):
            says(jobs, f"{name}-1-{rank}", "generation 0 trains")
    jobs.before = {name: uids(jobs, name) for name in ("deleted", "led")}  # type: ignore[attr-defined]
    jobs.kubectl("delete", "pod", "deleted-1-1", "--wait=false")
    jobs.kubectl("delete", "pod", "led-1-0", "--grace-period=0", "--force", "--wait=false")
    return jobs


@pytest.mark.parametrize(
    ("name", "failure"),
    [
        ("killed", {"signal": "SIGKILL", "exitCode": 137}),
        ("raising", {"exitCode": 1}),
    ],
)
def test_a_failed_rank_restarts_with_all_others_in_the_same_pods(broken, name, failure):
    status = broken.ends(name)
    assert (status["state"], status["attempt"], charged(status)) == ("Succeeded", 1, (1, 0, 0)), status
    assert sorted(broken.pods(name)) == [f"{name}-1-0", f"{name}-1-1"]
    told = status["lastFailure"]
    expected = {"rank": 1, "nodeRank": 1, "pod": f"{name}-1-1", "class": "application"} | failure
    assert {k: told.get(k) for k in expected} == expected
    assert told["node"]
    assert ("Warning", "RestartedInPlace") in [(kind, reason) for kind, reason, _ in broken.events(name)]


def test_a_script_that_always_fails_uses_up_its_budget_and_no_pod(broken: Space) -> None:
    status = broken.ends("hopeless")
    assert (status["state"], status["reason"]) == ("Failed", "BackoffLimitExceeded"), status
    assert (status["attempt"], charged(status)) == (1, (1, 0, 0))
    assert status["lastFailure"]["exitCode"] == 3


def test_only_a_deleted_pod_is_recreated(broken: Space) -> None:
    status = broken.ends("deleted")
    assert (status["state"], status["attempt"], charged(status)) == ("Succeeded", 1, (0, 1, 0)), status
    broken.keeps("deleted", "deleted-1-0", "deleted-1-1-r1")
    pods = uids(broken, "deleted")
    assert pods["deleted-1-0"] == broken.before["deleted"]["deleted-1-0"]  # type: ignore[attr-defined]
    assert "generation 1 trains" in broken.kubectl("logs", "deleted-1-0")
    assert status["lastFailure"]["class"] == "infrastructure"


def test_the_leading_pod_is_replaced_like_any_other(broken: Space) -> None:
    status = broken.ends("led")
    assert (status["state"], status["attempt"], charged(status)) == ("Succeeded", 1, (0, 1, 0)), status
    broken.keeps("led", "led-1-0-r1", "led-1-1")
    pods = uids(broken, "led")
    assert pods["led-1-1"] == broken.before["led"]["led-1-1"]  # type: ignore[attr-defined]
    assert "node 0 is lost" in broken.kubectl("logs", "led-1-1")


def test_a_pod_beyond_its_memory_limit_is_replaced_and_charged_to_the_application(broken: Space) -> None:
    """A pod beyond its memory limit must be replaced and charged: the kernel kills the agent with its ranks."""
    status = broken.ends("starved")
    assert (status["state"], status["attempt"], charged(status)) == ("Succeeded", 1, (1, 0, 0)), status
    assert status["lastFailure"]["class"] == "outOfMemory"


def test_a_hang_is_found_in_the_pod_and_the_rank_that_is_behind_is_named(broken: Space) -> None:
    status = broken.ends("hanging")
    assert (status["state"], status["attempt"], charged(status)) == ("Succeeded", 1, (0, 0, 1)), status
    failure = status["lastFailure"]
    assert (failure["rank"], failure["reason"], failure["class"]) == (1, "Stalled", "stall"), failure
    log = broken.kubectl("logs", "hanging-1-1")
    assert "time.sleep" in log or 'File "<string>"' in log, "its stack"


def test_a_suspended_job_stops_at_once_and_continues_with_new_pods(jobs: Space) -> None:
    jobs.apply(ddprun("paused", f"{TRAINS}\nif os.environ['DDPJOB_ATTEMPT'] == '1': time.sleep(1000)"))
    says(jobs, "paused-1-1", "generation 0 trains")
    jobs.kubectl("patch", "ddp", "paused", "--type=merge", "-p", '{"spec":{"suspend":true}}')
    until(lambda: not jobs.pods("paused"), "all agents end, none waits for the other", 40)
    jobs.kubectl("patch", "ddp", "paused", "--type=merge", "-p", '{"spec":{"suspend":false}}')
    status = jobs.ends("paused")
    assert (status["state"], status["attempt"], charged(status)) == ("Succeeded", 2, (0, 0, 0)), status


# Script: ranks connect to each other if there are several, and train until a file exists in their pods.
CHANGES = f"""
import os, socket, time
rank, size, life = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
if size > 1:
{textwrap.indent(MEET, "    ")}
print("generation", life, "trains with", size, flush=True)
while not os.path.exists("/tmp/enough"):
    time.sleep(0.1)
"""


def loses_a_pod(jobs: Space, gate: Gate, name: str, snooze: int) -> dict[str, str]:
    """Run an elastic job, delete its second pod, and wait until the first one trains alone. Return the first uids."""
    body = gate.before(ddprun(name, CHANGES, minNodes=1))
    trainer(body)["command"][1:1] = ["--rdzv-conf", f"last_call_timeout=60,snooze={snooze}"]
    jobs.apply(body)
    says(jobs, f"{name}-1-0", "generation 0 trains with 2")
    before = uids(jobs, name)
    gate.set("closed")
    jobs.kubectl("delete", "pod", f"{name}-1-1", "--wait=false")
    says(jobs, f"{name}-1-0", "generation 1 trains with 1")
    gate.set("open")
    return before


def ends_with(jobs: Space, name: str, *pods: str) -> Status:
    """Let the ranks in these pods end, and return the status of the job."""
    for pod in pods:
        jobs.kubectl("exec", pod, "--", "touch", "/tmp/enough")
    status = jobs.ends(name, 60)
    assert (status["state"], status["attempt"], charged(status)) == ("Succeeded", 1, (0, 1, 0)), status
    return status


def test_an_elastic_job_trains_without_a_deleted_pod_until_the_new_pod_joins(jobs: Space, gate: Gate) -> None:
    before = loses_a_pod(jobs, gate, "changes", 1)
    says(jobs, "changes-1-1-r1", "generation 2 trains with 2")
    jobs.waits("changes", lambda s: s["reason"] == "AllNodesRun", "changes runs on all nodes", 30)
    ends_with(jobs, "changes", "changes-1-0", "changes-1-1-r1")
    kept = jobs.pods("changes")["changes-1-0"]
    assert kept["metadata"]["uid"] == before["changes-1-0"]
    assert kept["status"]["containerStatuses"][0]["restartCount"] == 0
    told = [reason for _, reason, _ in jobs.events("changes")]
    assert told.count("Replacing") == 1
    assert not {"Disrupted", "RankFailed", "Restarting"}.intersection(told), "nobody waited"


def test_another_node_leads_after_the_loss_of_node_0_and_the_number_of_nodes_changes_in_place(
    jobs: Space, gate: Gate
) -> None:
    """Another node must lead after node 0 is lost, and `kubectl scale` must work in place; no other pod may restart."""
    body = gate.before(ddprun("moves", CHANGES, minNodes=1))
    trainer(body)["command"][1:1] = ["--rdzv-conf", "last_call_timeout=60,snooze=1"]
    jobs.apply(body)
    says(jobs, "moves-1-1", "generation 0 trains with 2")
    stays = uids(jobs, "moves")["moves-1-1"]
    gate.set("closed")
    jobs.kubectl("delete", "pod", "moves-1-0", "--grace-period=0", "--force", "--wait=false")
    says(jobs, "moves-1-1", "generation 1 trains with 1")
    gate.set("open")
    says(jobs, "moves-1-1", "generation 2 trains with 2")
    assert jobs.status("moves")["leader"] == {"term": 2, "place": 1}
    jobs.kubectl("scale", "ddpjob", "moves", "--replicas=3")
    says(jobs, "moves-1-1", "generation 3 trains with 3")
    jobs.kubectl("scale", "ddpjob", "moves", "--replicas=2")
    says(jobs, "moves-1-1", "generation 4 trains with 2")
    status = ends_with(jobs, "moves", "moves-1-0-r1", "moves-1-1")
    assert status["nodes"]["total"] == 2
    assert jobs.pods("moves")["moves-1-1"]["metadata"]["uid"] == stays
    assert jobs.pods("moves")["moves-1-1"]["status"]["containerStatuses"][0]["restartCount"] == 0


def test_a_spare_takes_the_place_of_a_deleted_pod_at_once(jobs: Space, gate: Gate) -> None:
    """The job must train with all its nodes without waiting for the new pod, which is the next spare."""
    jobs.apply(gate.before(ddprun("spared", CHANGES, spares=1, gang="none")))
    says(jobs, "spared-1-0", "generation 0 trains with 2")

    def is_spare(place: int) -> bool:
        return b"this one is a spare" in (read(f"/api/v1/namespaces/{jobs.name}/pods/spared-1-{place}/log") or b"")

    spare = until(lambda: next(filter(is_spare, (1, 2)), None), "a pod waits as a spare", 60)
    lost = 3 - spare
    gate.set("closed")
    jobs.kubectl("delete", "pod", f"spared-1-{lost}", "--grace-period=0", "--force", "--wait=false")
    says(jobs, f"spared-1-{spare}", "generation 1 trains with 2")
    gate.set("open")
    says(jobs, f"spared-1-{lost}-r1", "this one is a spare")
    ends_with(jobs, "spared", "spared-1-0", f"spared-1-{spare}")


def test_an_elastic_job_succeeds_while_a_pod_waits_to_join(jobs: Space, gate: Gate) -> None:
    loses_a_pod(jobs, gate, "short", 500)
    says(jobs, "short-1-1-r1", "this one joins them in")
    status = ends_with(jobs, "short", "short-1-0")
    assert status["message"] == "1 of 2 nodes trained and completed"


@pytest.mark.alone
def test_a_pod_on_a_lost_node_is_replaced_on_another_and_its_peer_stays(jobs, nodes, break_node):
    jobs.apply(spread(ddprun("powerless", ENDS_AFTER_A_RESTART)))
    for rank in (0, 1):
        says(jobs, f"powerless-1-{rank}", "generation 0 trains")
    before = uids(jobs, "powerless")
    dead, kept = (jobs.node_of(f"powerless-1-{rank}") for rank in (1, 0))
    assert dead != kept, "the scheduler has put both pods on one node"
    break_node("kill", dead)
    status = jobs.ends("powerless")
    assert (status["state"], status["attempt"], charged(status)) == ("Succeeded", 1, (0, 1, 0)), status
    assert (status["lastFailure"]["reason"], status["lastFailure"]["node"]) == ("NodeLost", dead)
    jobs.keeps("powerless", "powerless-1-0", "powerless-1-1-r1")
    pods = uids(jobs, "powerless")
    assert pods["powerless-1-0"] == before["powerless-1-0"]


# ---------------------------------------------------------------- with torch


def digits(name: str, *faults: dict[str, Any]) -> dict[str, Any]:
    body = yaml.safe_load((ROOT / "examples/digits.yaml").read_text())
    body["metadata"]["name"] = name
    command = trainer(body)["command"]
    command[command.index("--epochs") + 1] = "8"
    trainer(body)["env"] = [
        {"name": "DDPJOB_STATUS_INTERVAL", "value": "1"},
        {"name": "DDPJOB_FAULTS", "value": json.dumps(faults)},
    ]
    return body


@pytest.mark.timeout(900)  # four imports of torch at once take long
@pytest.mark.usefixtures("with_torch")
def test_training_that_restarts_in_place_ends_with_exactly_the_result_of_an_undisturbed_run(jobs: Space) -> None:
    jobs.apply(digits("calm"), digits("struck", {"rank": 1, "step": 150, "signal": "KILL"}))
    status = jobs.ends("struck", 300)
    assert (status["state"], status["attempt"], charged(status)) == ("Succeeded", 1, (1, 0, 0)), status
    failure = status["lastFailure"]
    assert (failure["rank"], failure["signal"], failure["class"]) == (1, "SIGKILL", "application")
    assert failure["step"] >= 100, "the steps reach the status by the agent"
    jobs.ends("calm", 300)
    assert result(jobs, "struck-1-0") == result(jobs, "calm-1-0")
    assert "restart 1" in jobs.kubectl("logs", "struck-1-0")
    told = [reason for kind, reason, _ in jobs.events("struck") if kind == "Warning"]
    assert told == ["RestartedInPlace"], "one failure is one warning"


# At step 30 rank 1 takes more memory than the limit, like a batch that is too long.
TAKES_TOO_MUCH = """
import os, time
import torch
import ddpjob

with ddpjob.init() as world:
    torch.manual_seed(7)
    model = world.wrap(torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    snapshot = ddpjob.Snapshot("/tmp/snapshots", world)
    step = snapshot.load(model=model, optimizer=optimizer)
    print("begins at step", step, flush=True)
    while step < 60:
        optimizer.zero_grad()
        model(torch.ones(4, 64)).square().sum().backward()
        optimizer.step()
        step += 1
        ddpjob.progress(step=step, total=60)
        ddpjob.should_stop(step)
        time.sleep(0.1)  # so that steps are reported
        if step == 30 and world.rank == 1 and os.environ["DDPJOB_GENERATION"] == "0":
            taken = [b"x" * 2**24 for _ in range(1000)]
"""


@pytest.mark.timeout(900)  # importing torch takes long
@pytest.mark.usefixtures("with_torch")
def test_a_pod_beyond_its_memory_limit_costs_no_step_because_the_other_pod_has_the_state(jobs: Space) -> None:
    """A pod beyond its memory limit must cost no step: with cgroups v2 the agent is killed, too, so the new pod gets
    the state from its peer. The folder of snapshots is empty."""
    body = ddprun("hungry", TAKES_TOO_MUCH)
    resources = {"requests": {"cpu": "50m", "memory": "512Mi"}, "limits": {"memory": "1Gi"}}
    trainer(body)["resources"] = resources
    trainer(body)["env"] = [{"name": "DDPJOB_STATUS_INTERVAL", "value": "1"}]
    jobs.apply(body)
    status = jobs.ends("hungry", 300)
    assert (status["state"], status["attempt"], charged(status)) == ("Succeeded", 1, (1, 0, 0)), status
    failure = status["lastFailure"]
    assert (failure["exitCode"], failure["class"]) == (137, "outOfMemory"), failure
    # If the kernel kills only the rank, the agent still has the rank's random state.
    is_replaced = failure["reason"] == "OOMKilled"
    lost = " (random states of rank 1 were lost, and are seeded the same way at each resume)" if is_replaced else ""
    assert (status["resumedStep"], status["resumedFrom"]) == (30, f"the memory on the node of rank 0{lost}"), status
    assert status["goodput"].get("lostSteps", 0) == 0, status
    second = "hungry-1-1-r1" if is_replaced else "hungry-1-1"
    jobs.keeps("hungry", "hungry-1-0", second)
