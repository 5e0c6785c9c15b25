"""Real faults on real pods: the right end, cause and charge, and no objects are left over. kubectl checks what users
see. The ranks of these jobs meet like torch's: rank 0 listens on MASTER_ADDR:MASTER_PORT."""

import datetime as dt
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import yaml
from clusters import kubectl, until
from pods import MEET, RELEASE, ROOT, Space, charged, helm, job, result, says, spread, trainer, uids

pytestmark = pytest.mark.timeout(300)  # jobs of several tests run at the same time, and the machine may be slow
Status = dict[str, Any]

TRAINS = f"""
import os, signal, socket, sys, time
rank, attempt = int(os.environ["RANK"]), int(os.environ["DDPJOB_ATTEMPT"])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
{MEET}print("attempt", attempt, "trains", flush=True)
"""
WORKS_FOR_EVER = f"{TRAINS}\ntime.sleep(1000)"
ENDS_IN_ATTEMPT_2 = f"{TRAINS}\nif attempt == 1: time.sleep(1000)"
GOES_ON_IN_ATTEMPT_2 = f"{TRAINS}\nif attempt > 1: print('goes on', flush=True)\ntime.sleep(1000)"


def breaks(how: str, others: str = "time.sleep(1000)", *, once: bool = True) -> str:
    """Return a script in which rank 1 fails after the group has met. once: only in attempt 1, otherwise in all."""
    condition = "if attempt > 1: sys.exit(0)" if once else ""
    return f"{TRAINS}\n{condition}\nif rank == 1:\n    {how}\n{others}"


DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(1000)"
HANGS = """
import ddpjob
for step in range(1, 4 - rank):
    ddpjob.progress(step)
    time.sleep(0.5)
"""


@dataclass(frozen=True)
class Case:
    """A failure of rank 1 in the first attempt, and its consequences."""

    script: str
    failure: dict[str, Any]
    """Expected fields of `lastFailure`; None: unset."""
    restarts: tuple[int, int, int]
    """Restarts charged to application, infrastructure, stall."""
    says: str
    """Text in `status.failures`, or in the status if the job fails."""
    end: str = "AllNodesCompleted"
    attempt: int = 2
    spec: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    grace_seconds: int = 5
    """terminationGracePeriodSeconds."""

    def body(self, name: str) -> dict[str, Any]:
        made = job(name, self.script, **self.spec)
        made["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = self.grace_seconds
        trainer(made)["env"] = [{"name": k, "value": v} for k, v in self.env.items()]
        if self.command:
            # torchrun imports torch, but its ranks do not.
            trainer(made)["command"] = [*self.command, self.script]
            trainer(made)["resources"] = {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}
        return made


def rule(action: str, code: int) -> dict[str, Any]:
    return {"failurePolicy": {"rules": [{"action": action, "onExitCodes": {"operator": "In", "values": [code]}}]}}


APPLICATION, CHARGED = {"class": "application", "chargedTo": "application"}, (1, 0, 0)
CASES = {
    "an-exit-code": Case(breaks("sys.exit(3)"), APPLICATION | {"exitCode": 3}, CHARGED, "ended with exit code 3"),
    "an-exception": Case(
        breaks("raise ValueError('no such shard: 7')"),
        APPLICATION | {"exitCode": 1, "exception": "ValueError: no such shard: 7"},
        CHARGED,
        "(ValueError: no such shard: 7)",
    ),
    "a-segmentation-fault": Case(
        breaks("import ctypes; ctypes.string_at(0)"),
        APPLICATION | {"exitCode": 139, "signal": "SIGSEGV"},
        CHARGED,
        "was killed by SIGSEGV",
    ),
    "too-much-memory": Case(
        breaks("eaten = [bytearray(b'x' * 2**22) for _ in range(1000)]"),
        {"class": "outOfMemory", "chargedTo": "application", "exitCode": 137, "reason": "OOMKilled"},
        CHARGED,
        "used more memory than its limit of ",
    ),
    "too-much-memory-under-torchrun": Case(
        "import os, sys, time\nif os.environ['DDPJOB_ATTEMPT'] > '1': sys.exit(0)\n"
        "eaten = [bytearray(b'x' * 2**22) for _ in range(1000)] if os.environ['RANK'] == '1' else time.sleep(1000)",
        {"class": "outOfMemory", "chargedTo": "application", "reason": "OOMKilled"},
        CHARGED,
        "used more memory than its limit of ",
        command=("torchrun", "--no-python", "python", "-c"),
    ),
    "code-137-that-is-no-oom": Case(
        breaks("os._exit(137)"),
        APPLICATION | {"exitCode": 137, "signal": "SIGKILL"},
        CHARGED,
        "no out-of-memory kill was reported",
    ),
    "a-megabyte-of-garbage": Case(
        breaks("open(os.environ['DDPJOB_TERMINATION_LOG'], 'wb').write(os.urandom(1 << 20)); sys.exit(5)"),
        APPLICATION | {"exitCode": 5},
        CHARGED,
        "ended with exit code 5",
    ),
    "half-a-message": Case(
        breaks("open(os.environ['DDPJOB_TERMINATION_LOG'], 'w').write('{\"ddpjob\":1,\"rank\":'); sys.exit(6)"),
        APPLICATION | {"exitCode": 6},
        CHARGED,
        "ended with exit code 6",
    ),
    "an-ignored-code": Case(
        breaks("sys.exit(42)"), {"exitCode": 42}, (0, 1, 0), "exit code 42", spec=rule("Ignore", 42)
    ),
    "a-fatal-code": Case(
        breaks("sys.exit(78)", once=False),
        {"class": "permanent", "exitCode": 78, "chargedTo": None},
        (0, 0, 0),
        "failurePolicy says FailJob",
        end="PermanentFailure",
        attempt=1,
        spec=rule("FailJob", 78),
    ),
    "a-fault-in-every-attempt": Case(
        breaks("raise ValueError('no such shard: 7')", once=False),
        {"class": "application", "exception": "ValueError: no such shard: 7", "attempt": 2, "chargedTo": None},
        CHARGED,
        "(backoffLimit: 1)",
        end="BackoffLimitExceeded",
        spec={"backoffLimit": 1},
    ),
    "a-peer-that-is-deaf-to-sigterm": Case(
        breaks("sys.exit(3)", DEAF),
        APPLICATION | {"exitCode": 3},
        CHARGED,
        "exit code 3",
        spec={"restartGraceSeconds": 2},
        grace_seconds=600,
    ),
    "a-hang": Case(
        f"{TRAINS}\nif attempt > 1: sys.exit(0)\n{HANGS}\ntime.sleep(1000)",
        {"class": "stall", "chargedTo": "stall", "reason": "Stalled", "step": 2, "exitCode": None},
        (0, 0, 1),
        "has made no step for",
        spec={"stall": {"timeoutSeconds": 5}},
        env={"DDPJOB_STATUS_INTERVAL": "1"},
    ),
    "a-restart-of-torchruns-own": Case(
        breaks("sys.exit(3)"), APPLICATION | {"exitCode": 3}, CHARGED, "exit code 3", env={"PET_MAX_RESTARTS": "5"}
    ),
    "a-code-that-torchrun-hides": Case(
        "import os, sys, time\nif os.environ['DDPJOB_ATTEMPT'] > '1': sys.exit(0)\n"
        "if os.environ['RANK'] == '3': time.sleep(2); sys.exit(17)\ntime.sleep(1000)",
        {"exitCode": 17, "rank": 3, "class": "infrastructure"},
        (0, 1, 0),
        "rank 3 (",
        spec=rule("Ignore", 17) | {"nprocPerNode": 2},
        command=("torchrun", "--no-python", "python", "-c"),
    ),
}


@pytest.fixture(scope="module")
def broken(jobs: Space) -> Space:
    """Run all cases at the same time."""
    jobs.apply(*(case.body(name) for name, case in CASES.items()))
    return jobs


@pytest.mark.parametrize("name", CASES)
def test_a_fault_restarts_the_group_once_and_is_reported_and_charged_correctly(broken: Space, name: str) -> None:
    case = CASES[name]
    status = broken.ends(name)
    assert status["reason"] == case.end, status
    assert status["attempt"] == case.attempt, status
    failure = status["lastFailure"]
    expected = {"rank": 1, "nodeRank": 1, "attempt": 1, "pod": f"{name}-{failure['attempt']}-1"} | case.failure
    assert {k: failure.get(k) for k in expected} == expected
    assert charged(status) == case.restarts
    assert failure["node"], "on which node stands there also after the pod is gone"
    assert case.says in (status["message"] if status["state"] == "Failed" else status["failures"][-1]["message"])
    assert case.says in broken.kubectl("describe", "ddp", name), "kubectl shows it"
    until(lambda: not not_ended(broken, name), "nothing runs on after the job has ended", 20)


def test_only_the_pod_of_a_rank_that_ended_by_itself_is_kept_for_its_log(broken: Space) -> None:
    broken.ends("an-exception")
    broken.keeps("an-exception", "an-exception-1-1", "an-exception-2-0", "an-exception-2-1")
    assert "no such shard" in broken.kubectl("logs", "an-exception-1-1")
    warnings = [reason for kind, reason, _ in broken.events("an-exception") if kind == "Warning"]
    assert warnings == ["RankFailed"], "one failure is one warning"


def test_the_pod_of_a_stalled_rank_is_kept_and_its_log_is_in_the_status(broken: Space) -> None:
    """A stalled rank's pod must be kept, and its log be in the status, because only the log explains the hang."""
    status = broken.ends("a-hang")
    broken.keeps("a-hang", "a-hang-1-1", "a-hang-2-0", "a-hang-2-1")
    assert broken.get("pod", "a-hang-1-1")["status"]["reason"] == "DeadlineExceeded"
    assert "attempt 1 trains" in broken.kubectl("logs", "a-hang-1-1")
    assert "attempt 1 trains" in status["lastFailure"]["logTail"]


def test_a_pod_that_ignores_sigterm_is_waited_for_only_for_restart_grace(broken: Space) -> None:
    status = broken.ends("a-peer-that-is-deaf-to-sigterm")
    took = seconds_between(status["lastFailure"]["time"], created(broken, "a-peer-that-is-deaf-to-sigterm-2-0"))
    assert 2 <= took <= 300, "not before its grace was over, and its own terminationGracePeriodSeconds does not count"


def test_max_restarts_set_by_the_user_is_respected_with_a_warning(broken: Space) -> None:
    broken.ends("a-restart-of-torchruns-own")
    (env,) = (
        e
        for e in broken.get("pod", "a-restart-of-torchruns-own-2-0")["spec"]["containers"][0]["env"]
        if e["name"] == "PET_MAX_RESTARTS"
    )
    assert env["value"] == "5"
    warnings = {reason: text for kind, reason, text in broken.events("a-restart-of-torchruns-own") if kind == "Warning"}
    assert "PET_MAX_RESTARTS" in warnings["RendezvousOverridden"]


def test_kill_9_of_a_rank_is_a_sigkill_charged_to_the_application(jobs: Space) -> None:
    body = job("killed", ENDS_IN_ATTEMPT_2)
    body["spec"]["template"]["spec"]["shareProcessNamespace"] = True
    jobs.apply(body)
    jobs.reaches("killed", "Running")
    jobs.kill("killed-1-1")
    status = jobs.ends("killed")
    assert (status["state"], status["attempt"], charged(status)) == ("Succeeded", 2, CHARGED), status
    failure = status["lastFailure"]
    assert (failure["rank"], failure["exitCode"], failure["signal"]) == (1, 137, "SIGKILL")
    assert failure["class"] == "application"


def test_a_deleted_pod_is_not_charged_and_its_peers_get_their_full_grace_to_save(jobs: Space) -> None:
    saves = "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(3), print('saved', flush=True), sys.exit(75)))"
    waits = "print('ready', flush=True)\nif attempt == 1: time.sleep(1000)"
    jobs.apply(job("deleted", f"{TRAINS}\n{saves}\n{waits}", restartGraceSeconds=1))
    for pod in ("deleted-1-0", "deleted-1-1"):
        says(jobs, pod, "ready")
    with jobs.following("deleted-1-0") as log:
        jobs.kubectl("delete", "pod", "deleted-1-1", "--wait=false")
        status = jobs.ends("deleted")
        said = log()
    assert (status["state"], status["attempt"], charged(status)) == ("Succeeded", 2, (0, 1, 0)), status
    failure = status["lastFailure"]
    assert (failure["rank"], failure["pod"], failure["class"]) == (1, "deleted-1-1", "infrastructure")
    assert failure["reason"] == "StoppedFromOutside"
    assert "saved" in said, "restartGraceSeconds is for groups that are broken"


# ---------------------------------------------------------------- nodes


@pytest.mark.alone
def test_a_node_without_power_costs_no_budget_and_the_job_ends_on_the_other_node(jobs, nodes, operator, break_node):
    survivor = leader(operator)[1]
    dead = other(nodes[:2], survivor)
    jobs.apply(spread(job("powerless", ENDS_IN_ATTEMPT_2)), on_node(job("aside", WORKS_FOR_EVER), survivor))
    rank = starts_on_both(jobs, "powerless")[dead]
    jobs.reaches("aside", "Running")
    aside = uids(jobs, "aside")
    break_node("kill", dead)
    status = jobs.ends("powerless")
    assert status["state"] == "Succeeded"
    lost_with(status, dead, rank)
    jobs.keeps("powerless", "powerless-2-0", "powerless-2-1")  # the lost pod is force-deleted
    assert {p["spec"]["nodeName"] for p in jobs.pods("powerless").values()} == {survivor}
    assert uids(jobs, "aside") == aside
    assert jobs.status("aside")["attempt"] == 1, "a job that has no pod there goes on"


def of_attempt_2_alone(jobs: Space, name: str) -> dict[str, str]:
    """Wait until only pods of attempt 2 are left, while the node is cut off; return their uids."""
    jobs.keeps(name, f"{name}-2-0", f"{name}-2-1")
    return uids(jobs, name)


@pytest.mark.alone
def test_a_node_that_returns_with_its_pods_still_running_changes_nothing(jobs, nodes, operator, break_node):
    """A node that returns with its pods still running must change nothing, although it had the leading operator."""
    away = leader(operator)[1]
    jobs.apply(spread(job("returning", GOES_ON_IN_ATTEMPT_2)))
    rank = starts_on_both(jobs, "returning")[away]
    zombie = f"returning-1-{rank}"
    until(lambda: zombie in running_on(away, jobs), "its kubelet shows what runs there")
    break_node("cut", away)
    status = jobs.waits("returning", lambda s: s.get("attempt") == 2 and s["state"] == "Running", "attempt 2 runs", 150)
    lost_with(status, away, rank)
    pods = of_attempt_2_alone(jobs, "returning")
    break_node("join", away)
    until(lambda: zombie not in running_on(away, jobs), f"{zombie} is ended by its kubelet", 60)
    assert uids(jobs, "returning") == pods
    status = jobs.status("returning")
    assert (status["state"], status["attempt"], charged(status)) == ("Running", 2, (0, 1, 0))


@pytest.mark.alone
@pytest.mark.long
def test_a_kubelet_that_stops_leaves_processes_that_never_rejoin_the_job(jobs, nodes, operator, break_node):
    """If a kubelet stops, its old processes must never rejoin the job, although they resolve its DNS names."""
    halted = other(nodes[:2], leader(operator)[1])
    jobs.apply(spread(job("halting", GOES_ON_IN_ATTEMPT_2)))
    rank = starts_on_both(jobs, "halting")[halted]
    zombie = f"halting-1-{rank}"
    until(lambda: zombie in running_on(halted, jobs), "its kubelet shows what runs there")
    break_node("stop", halted)
    status = jobs.waits("halting", lambda s: s.get("attempt") == 2 and s["state"] == "Running", "attempt 2 runs", 150)
    lost_with(status, halted, rank)
    pods = of_attempt_2_alone(jobs, "halting")
    break_node("start", halted)
    until(lambda: zombie not in running_on(halted, jobs), f"{zombie} is ended by its kubelet", 60)
    assert uids(jobs, "halting") == pods
    assert jobs.status("halting")["attempt"] == 2


def test_a_node_that_failed_a_job_twice_is_avoided_by_it_for_an_hour(jobs: Space, nodes: list[str]) -> None:
    sick = "RuntimeError('CUDA error: uncorrectable ECC error encountered')"
    body = job("choosing", f"import os\nif os.environ['NODE'] == {nodes[0]!r}: raise {sick}", nodes=1)
    trainer(body)["env"] = [{"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}]
    wish = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [nodes[0]]}]}
    prefers = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "preference": wish}]}
    body["spec"]["template"]["spec"]["affinity"] = {"nodeAffinity": prefers}
    jobs.apply(body)
    status = jobs.ends("choosing")
    assert (status["state"], status["attempt"], charged(status)) == ("Succeeded", 3, (0, 2, 0)), status
    assert [jobs.node_of(f"choosing-{attempt}-0") for attempt in (1, 2, 3)] == [nodes[0], nodes[0], nodes[1]]
    (avoided,) = status["avoidedNodes"]
    assert avoided["node"] == nodes[0]
    assert 3500 < seconds_between(status["lastFailure"]["time"], avoided["until"]) < 3700


@pytest.mark.alone
def test_a_drain_moves_the_job_without_a_charge(jobs: Space, nodes: list[str], operator: str) -> None:
    jobs.apply(spread(job("drained", ENDS_IN_ATTEMPT_2)))
    ranks = starts_on_both(jobs, "drained")
    # Drain the other node: a new leading operator would find the pod gone without a reason.
    node = other(nodes[:2], leader(operator)[1])
    try:
        # No --force: without it, drain evicts only pods that a controller recreates.
        kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=150s")
        status = jobs.ends("drained")
        jobs.keeps("drained", "drained-2-0", "drained-2-1")
        assert {p["spec"]["nodeName"] for p in jobs.pods("drained").values()} == {other(nodes[:2], node)}
    finally:
        kubectl("uncordon", node)
    assert (status["state"], status["attempt"], charged(status)) == ("Succeeded", 2, (0, 1, 0)), status
    failure = status["lastFailure"]
    assert (failure["reason"], failure["rank"], failure["node"]) == ("EvictionByEvictionAPI", ranks[node], node)
    assert failure["class"] == "infrastructure"
    assert not status.get("avoidedNodes")
    assert "node" not in status["failures"][-1], "a drain is no fault of the node"


@pytest.mark.alone
@pytest.mark.long
def test_a_lost_node_is_recognized_without_the_right_to_read_nodes(space, nodes, operator, break_node):
    chart = str(ROOT / "charts/ddpjob-operator")
    upgrade = ["upgrade", RELEASE, chart, "-n", operator, "--reuse-values", "--wait", "--timeout", "120s"]
    helm(*upgrade, "--set", f"watchNamespaces={{{space.name}}}")
    try:
        assert f"name: {RELEASE}" not in kubectl("get", "clusterroles", "-o", "yaml"), "it may read no Node"
        away = other(nodes[:2], leader(operator)[1])
        space.apply(spread(job("blind", ENDS_IN_ATTEMPT_2)))
        rank = starts_on_both(space, "blind")[away]
        break_node("cut", away)
        status = space.ends("blind")
        assert status["state"] == "Succeeded"
        lost_with(status, away, rank)
        break_node("join", away)
    finally:
        helm(*upgrade, "--set-json", "watchNamespaces=[]")


# ---------------------------------------------------------------- the operator and the API server

DELETE = ("delete", "pod", "--wait=false")
SLOW_RESTART = breaks("sys.exit(3)", DEAF)


def is_restarted_once(status: Status) -> None:
    assert (status["state"], status["attempt"], charged(status)) == ("Succeeded", 2, CHARGED), status["failures"]
    assert status["lastFailure"]["exitCode"] == 3
    assert len(status["failures"]) == 1


@pytest.mark.alone
def test_operators_killed_during_a_restart_lose_and_duplicate_nothing(jobs: Space, operator: str) -> None:
    jobs.apply(job("orphaned", SLOW_RESTART, restartGraceSeconds=4))
    jobs.reaches("orphaned", "Restarting")
    mine = ["-l", "app.kubernetes.io/name=ddpjob-operator"]
    kubectl("-n", operator, "delete", "pod", *mine, "--grace-period=0", "--force", "--wait=false")
    is_restarted_once(jobs.ends("orphaned"))
    kubectl("-n", operator, "rollout", "status", "deployment", "--timeout=180s")


@pytest.mark.alone
def test_an_api_server_outage_of_20_seconds_delays_a_restart_and_disturbs_no_running_job(jobs, take_api_server_away):
    jobs.apply(job("lonely", "import time; time.sleep(35)"), job("cut-off", SLOW_RESTART, restartGraceSeconds=4))
    jobs.reaches("lonely", "Running")
    before = uids(jobs, "lonely")
    jobs.reaches("cut-off", "Restarting")
    take_api_server_away(20)  # the grace period of the restart ends during the outage
    is_restarted_once(jobs.ends("cut-off"))
    assert jobs.ends("lonely")["state"] == "Succeeded"
    assert uids(jobs, "lonely") == before


# ---------------------------------------------------------------- with torch


def digits(name: str) -> dict[str, Any]:
    body = yaml.safe_load((ROOT / "examples/digits.yaml").read_text())
    body["metadata"]["name"] = name
    command = trainer(body)["command"]
    command[0] = "torchrun"
    # With fewer epochs, a fast machine would finish before a rank could be killed.
    command[command.index("--epochs") + 1] = "20"
    trainer(body)["env"] = [{"name": "DDPJOB_STATUS_INTERVAL", "value": "1"}]
    return body


@pytest.fixture(scope="module")
def trainings(jobs: Space, all_with_torch: None) -> Space:
    """Run three trainings of digits at the same time, because importing torch takes long; one is not disturbed."""
    jobs.apply(*(digits(name) for name in ("calm", "struck", "moved")))
    to_break: dict[str, Callable[[], object]] = {
        "struck": lambda: jobs.kill("struck-1-1"),
        "moved": lambda: jobs.kubectl(*DELETE, "moved-1-0"),
    }

    def all_are_broken() -> bool:
        for name in [name for name in to_break if jobs.status(name).get("progress", {}).get("step", 0) > 0]:
            to_break.pop(name)()  # break each job at once, because it could end while the other starts
        return not to_break

    until(all_are_broken, "both make a step", 300)
    return jobs


@pytest.mark.timeout(900)  # six imports of torch at once take long
def test_training_that_was_killed_ends_with_exactly_the_result_of_an_undisturbed_run(trainings: Space) -> None:
    status = trainings.ends("struck", 400)
    assert (status["state"], status["attempt"], charged(status)) == ("Succeeded", 2, CHARGED), status
    failure = status["lastFailure"]
    told = (failure["rank"], failure["pod"], failure["exitCode"], failure["signal"], failure["class"])
    assert told == (1, "struck-1-1", 137, "SIGKILL", "application"), "not torchrun's 1, and not the peer's complaint"
    assert failure["step"] > 0
    trainings.ends("calm", 400)
    assert result(trainings, "struck-2-0") == result(trainings, "calm-1-0")


@pytest.mark.timeout(600)
def test_training_whose_pod_is_deleted_stops_at_one_step_and_is_not_charged(trainings: Space) -> None:
    status = trainings.ends("moved", 400)
    assert (status["state"], status["attempt"], charged(status)) == ("Succeeded", 2, (0, 1, 0)), status
    failure = status["lastFailure"]
    assert (failure["rank"], failure["pod"], failure["class"]) == (0, "moved-1-0", "infrastructure")
    trainings.ends("calm", 400)
    assert result(trainings, "moved-2-0") == result(trainings, "calm-1-0")


# ---------------------------------------------------------------- helpers


def created(space: Space, pod: str) -> str:
    made: str = space.get("pod", pod)["metadata"]["creationTimestamp"]
    return made


def seconds_between(first: str, last: str) -> float:
    return (dt.datetime.fromisoformat(last[:-1]) - dt.datetime.fromisoformat(first[:-1])).total_seconds()


def not_ended(space: Space, name: str) -> list[str]:
    """Return the pods of a job that have not ended."""
    return [n for n, p in space.pods(name).items() if p["status"]["phase"] not in ("Succeeded", "Failed")]


def on_node(body: dict[str, Any], node: str) -> dict[str, Any]:
    body["spec"]["template"]["spec"]["nodeSelector"] = {"kubernetes.io/hostname": node}
    return body


def starts_on_both(space: Space, name: str) -> dict[str, int]:
    """Start a job with a pod on each of the two nodes; return the rank of each node's pod."""
    space.reaches(name, "Running")
    ranks = {p["spec"]["nodeName"]: int(n.rsplit("-", 1)[1]) for n, p in space.pods(name).items()}
    assert len(ranks) == 2, f"the scheduler has put both pods on one node: {ranks}"
    return ranks


def lost_with(status: Status, node: str, rank: int) -> None:
    """Check that the job was restarted once, and that only the infrastructure budget counts this restart."""
    failure = status["lastFailure"]
    assert (failure["reason"], failure["node"], failure["rank"]) == ("NodeLost", node, rank), failure
    assert failure["class"] == "infrastructure"
    assert charged(status) == (0, 1, 0)
    assert status["attempt"] == 2
    assert node in status["failures"][-1]["message"]


def running_on(node: str, space: Space) -> set[str]:
    """Return the pods whose containers run on a node, even if the API server has already deleted the pods."""
    found = json.loads(kubectl("get", "--raw", f"/api/v1/nodes/{node}/proxy/runningpods/"))["items"] or []
    return {p["metadata"]["name"] for p in found if p["metadata"]["namespace"] == space.name}


def leader(operator: str) -> tuple[str, str]:
    """Return the leading operator's pod, and its node."""

    def holder() -> tuple[str, str] | None:
        (lease,) = json.loads(kubectl("-n", operator, "get", "leases", "-o", "json"))["items"]
        pod = (lease["spec"].get("holderIdentity") or "none").partition("_")[0]
        node = kubectl("-n", operator, "get", "pod", pod, "--ignore-not-found", "-o", "jsonpath={.spec.nodeName}")
        return (pod, node) if node else None

    return until(holder, "an operator holds the Lease")


def other(nodes: list[str], node: str) -> str:
    return next(n for n in nodes if n != node)
