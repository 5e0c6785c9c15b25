"""Measure a restart in a cluster: seconds from a fault until all ranks have made two more steps.

    KUBECONFIG=… python bench/restart_times.py                       a rank killed and a pod deleted, each launcher
    KUBECONFIG=… python bench/restart_times.py --faults kill --launchers ddprun --runs 10

Two nodes with a rank each, gloo, in a cluster with the operator. Under ddprun a killed rank starts again in its pod;
under torchrun both pods are replaced. Times are from the pods' logs, so all clocks must be of one machine, or
synchronized.
"""

import itertools
import time
from typing import Any

import common
from clusters import until
from pods import Space, job, spread, trainer

TRAIN = """
import time; began = time.time()
import os, torch
import ddpjob
step = torch.ones(1)
with ddpjob.init():
    for number in range(1, 100_000):
        torch.distributed.all_reduce(step)
        ddpjob.progress(number)
        if number == 2:
            print("STEP", os.getpid(), began, time.time(), flush=True)
        if ddpjob.should_stop(number):
            raise ddpjob.Stopped(number)
        time.sleep(0.05)
"""
SECONDS_MAX = 180.0
Line = tuple[int, float, float]  # of a rank at its second step: pid, start time of the script, time of the step


def body(name: str, launcher: str) -> dict[str, Any]:
    """Return a job whose script is a file. ddprun starts other programs as new processes, which is slower."""
    made = spread(job(name))
    made["spec"]["template"]["spec"]["volumes"] = [{"name": "script", "configMap": {"name": "script"}}]
    trainer(made).update(
        command=[launcher, "/script/train.py"],
        volumeMounts=[{"name": "script", "mountPath": "/script"}],
        resources={"requests": {"cpu": "500m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
    )
    return made


def second_steps(space: Space, name: str, after: float = 0.0) -> list[Line]:
    """Wait for the second steps of ranks 0 and 1 in processes that started later than `after`; return their lines."""

    def are_made() -> list[Line]:
        logs = [space.kubectl("logs", pod, check=False) for pod in sorted(space.pods(name))]
        words = [line[line.index("STEP ") :].split() for log in logs for line in log.splitlines() if "STEP " in line]
        found = [(int(w[1]), float(w[2]), float(w[3])) for w in words if float(w[2]) > after]
        return found if len(found) == 2 else []

    return until(are_made, f"two steps of both ranks of {name}", SECONDS_MAX)


def restart(space: Space, name: str, launcher: str, fault: str) -> float:
    """Run one job with this fault, and return the seconds of its restart."""
    space.apply(body(name, launcher))
    _, (pid, _, _) = second_steps(space, name)
    victim = f"{name}-1-1"
    if fault == "kill":
        kill = f"import os, time; print(time.time()); os.kill({pid}, 9)"
        began = float(space.kubectl("exec", victim, "--", "python", "-c", kill))
    else:
        began = time.time()
        space.kubectl("delete", "pod", victim, "--wait=false")
    made = max(at for _, _, at in second_steps(space, name, after=began))
    space.kubectl("delete", "ddp", name)
    return made - began


def main() -> None:
    given = common.options(__doc__, faults=["kill", "delete"], launchers=["ddprun", "torchrun"], runs=3)
    print(common.machine())
    space = Space("ddpjob-bench")
    try:
        head = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "script"}}
        space.apply({**head, "data": {"train.py": TRAIN}})
        for fault, launcher in itertools.product(given.faults, given.launchers):
            took = [restart(space, f"{launcher}-{fault}-{n}", launcher, fault) for n in range(given.runs)]
            print(f"{launcher}, {fault}: {common.shown(took)}", flush=True)
    finally:
        space.leaves_nothing()
        space.remove()


if __name__ == "__main__":
    main()
