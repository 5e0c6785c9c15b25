"""What the documentation says about a cluster, on real pods. kubectl checks what users see."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from clusters import kubectl, until
from pods import RELEASE, ROOT, Space, helm, job
from shell import Cli

SLEEP = "import time; time.sleep(1000)"
SAVES = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(0)))
print("trains as rank", os.environ["RANK"], flush=True)
time.sleep(1000)
"""


def done_line(log: str) -> dict[str, Any]:
    """Return the last line of an example."""
    line = next(line for line in log.splitlines() if '"event": "done"' in line)
    return json.loads(line[line.index("{") :])


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("with_torch")
def test_digits_trains_on_two_nodes_and_ends_exactly_as_locally(space: Space, tmp_path: Path, nodes: list[str]) -> None:
    """digits must train on two nodes and end exactly as locally. One job serves many assertions."""
    body = yaml.safe_load((ROOT / "examples/digits.yaml").read_text())
    body["spec"]["onePodPerNode"] = True
    space.kubectl("apply", "-f", "-", stdin=body)
    rows: set[str] = set()

    def complete() -> bool:
        rows.add(space.kubectl("get", "ddp", "digits", "--no-headers"))
        return space.status("digits").get("state") in ("Succeeded", "Failed")

    until(complete, "digits ends", 420, every=1)
    # The row may have changed between the last read and the end.
    rows.add(space.kubectl("get", "ddp", "digits", "--no-headers"))
    assert "condition met" in space.kubectl("wait", "--for=condition=Complete", "ddp/digits", "--timeout=5s")
    # This check fails on a machine that makes all steps between two writes of the status, or two reads of the test.
    assert any(re.search(r"\d+/1125", row) for row in rows), f"kubectl get shows no steps: {rows}"
    assert not all(re.search(r"\d+/1125", row) for row in rows), f"the columns of kubectl get do not move: {rows}"
    pods = space.pods("digits")
    assert {p["spec"]["nodeName"] for p in pods.values()} == set(nodes[:2])
    in_cluster = done_line(space.kubectl("logs", "digits-1-0"))

    cli = Cli(tmp_path)
    os.symlink(ROOT / "trainer", tmp_path / "trainer")
    with cli.start("run", ROOT / "examples/digits.yaml", "--status", "status.json") as process:
        locally = done_line(process.communicate(timeout=300)[0])
    assert in_cluster == locally, "accuracy, steps, world size and the hash of all parameters"

    status = space.status("digits")
    assert 0 < status["progress"]["step"] <= 1125, "the last word of a process that ends has one second"
    assert status["progress"]["worldSize"] == 2
    conditions = {c["type"]: c["reason"] for c in status["conditions"] if c["status"] == "True"}
    assert conditions["Complete"] == "AllNodesCompleted"

    space.kubectl("delete", "ddp", "digits")
    left = "pods,services,ddpjobs"
    until(lambda: "No resources found" in space.kubectl("get", left), "delete leaves nothing behind", 90)


def test_a_trainer_gets_the_same_variables_in_a_cluster_and_in_a_local_run(space: Space, tmp_path: Path) -> None:
    script = "import os; print('NAMES', ' '.join(sorted(os.environ)), 'END')"
    space.kubectl("apply", "-f", "-", stdin=job("names", script))
    space.reaches("names", "Succeeded")
    there = set(re.search(r"NAMES (.*) END", space.kubectl("logs", "names-1-1"))[1].split())
    cli = Cli(tmp_path)
    local = cli.run("run", cli.file(script, "names"))
    here = set(re.search(r"\[1:1\] NAMES (.*) END", local.stdout)[1].split())

    def contract(names: set[str]) -> set[str]:
        # OMP_NUM_THREADS is not set, because the ranks of a local run share the cores of one machine.
        own = re.compile(r"(PET_|DDPJOB_|KUBEFLOW_|MASTER_|.*RANK$|.*WORLD_SIZE$|NNODES|NPROC_|TORCH_FR|PYTHONUNB)")
        return {name for name in names if own.match(name)}

    # A local run reports more often than the default, which needs no variable.
    assert contract(there) == contract(here) - {"DDPJOB_STATUS_INTERVAL"}
    assert len(contract(there)) > 25


def test_a_gpu_job_gets_one_pod_per_node(space: Space) -> None:
    gpus = json.loads(kubectl("get", "nodes", "-o", "json"))["items"]
    if sum(int(n["status"]["allocatable"].get("nvidia.com/gpu", 0)) > 0 for n in gpus) < 2:
        pytest.skip("fewer than two nodes have an nvidia.com/gpu")
    body = job("gpus", SLEEP, resources={"limits": {"nvidia.com/gpu": 1, "memory": "128Mi"}})
    space.kubectl("apply", "-f", "-", stdin=body)
    space.reaches("gpus", "Running")
    assert len({p["spec"]["nodeName"] for p in space.pods("gpus").values()}) == 2


def test_a_failed_rank_fails_the_job_and_the_status_names_rank_and_cause(space: Space) -> None:
    script = "import os, time\nif os.environ['RANK'] == '1': raise ValueError('no such shard: 7')\ntime.sleep(1000)"
    space.kubectl("apply", "-f", "-", stdin=job("failing", script, backoffLimit=0))
    status = space.reaches("failing", "Failed")
    assert "rank 1 (pod failing-1-1, node " in status["message"]
    assert "ValueError: no such shard: 7" in status["message"]
    assert "Traceback" in status["lastFailure"]["logTail"]
    assert "no such shard" in space.kubectl("logs", "failing-1-1"), "what ended by itself stays for its log"
    assert "no such shard" in space.kubectl("describe", "ddp", "failing")


def test_an_invalid_job_shows_the_reason_and_starts_nothing(space: Space) -> None:
    refused = space.kubectl("apply", "-f", "-", stdin=job("mpi", SLEEP, backend="mpi"), check=False)
    assert "needs a PyTorch built with MPI" in refused
    refused = space.kubectl("apply", "-f", "-", stdin=job("crowd", SLEEP, gang="crowd"), check=False)
    assert 'spec.gang: Unsupported value: "crowd"' in refused
    apart = job("apart")
    apart["spec"]["template"]["spec"]["containers"][0]["command"] = ["torchrun", "--standalone", "train.py"]
    space.kubectl("apply", "-f", "-", stdin=apart)
    status = until(lambda: space.status("apart"), "the job has a status", 30)
    assert status["reason"] == "InvalidSpec"
    assert "--standalone is for one node" in status["message"]
    assert space.pods("apart") == {}


def test_helm_test_reports_that_the_installation_works(operator: str) -> None:
    done = helm("test", RELEASE, "--namespace", operator, "--logs", "--timeout", "120s")
    # Helm prints the log once per object of the test, because all these objects have the same name.
    assert len({line for line in done.splitlines() if line.startswith("ok    ")}) == 4, done


def test_deleting_and_applying_a_job_at_once_works(space: Space) -> None:
    space.kubectl("apply", "-f", "-", stdin=job("again", SAVES))
    space.reaches("again", "Running")
    before = space.get("ddp", "again")["metadata"]["uid"]
    space.kubectl("delete", "ddp", "again", "--wait=false")
    until(lambda: "NotFound" in space.kubectl("get", "ddp", "again", check=False), "the job is deleted")
    space.kubectl("apply", "-f", "-", stdin=job("again", SAVES))
    space.reaches("again", "Running")
    assert {p["metadata"]["ownerReferences"][0]["uid"] for p in space.pods("again").values()} != {before}
