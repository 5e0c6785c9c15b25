"""Write docs/environment.md: run the code that sets the variables; fail if the meaning of a variable is missing."""

from __future__ import annotations

import datetime as dt
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from msgspec.structs import replace

from ddpjob_operator.job import api, validation
from ddpjob_operator.kube import lease, settings
from ddpjob_operator.pods import agent_environment, environment, naming, report_token
from reference_page import escaped, table

ROOT = Path(__file__).parents[1]
INTRO = """\
<!-- Written by `python tools/environment_page.py`, which runs the code that sets the variables. `make generate` -->
# Environment variables

This page answers: which variables does a trainer find, and which may I set?

A value that your template sets takes precedence. If the rendezvous depends on it, an Event (`RendezvousOverridden`)
names it. Set variables in the trainer's `env`, or by `--env NAME=VALUE`: `ddpjob run` hands on the variables of your
shell, except those of a job (`DDPJOB_…`, `PET_…`, `RANK` and the like).

## What a trainer finds

The values are those of the last node of a job with 2 nodes, attempt 1. With several processes per node the launcher
sets `RANK`, `WORLD_SIZE`, `LOCAL_RANK` and `LOCAL_WORLD_SIZE`, because the job's would mislead scripts that multiply
`WORLD_SIZE` by their GPUs. Use `NODE_RANK`, `NNODES`, `NPROC_PER_NODE` and `DDPJOB_WORLD_SIZE` in a command:
`--nnodes=$(NNODES)`.

Variables that the program in `command` does not read are left out, because each costs the cluster as much as a fiftieth
of a pod. A variable that the container mentions anywhere, such as `$(RANK)`, is set in any case.

- `command` starts torchrun or ddprun itself, without a shell: no `RANK`, `WORLD_SIZE`, `LOCAL_RANK`,
  `LOCAL_WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`, because the launcher sets them in the ranks; no
  `PET_MAX_RESTARTS=0` and `PET_NPROC_PER_NODE=1`, which are the defaults.
"""
AGENT = """\
## What `ddprun` finds in addition

The operator and the local run set these if the command starts `ddprun`, with the values at the time when the pod is
created.
"""
REPORTS = """\
## Where reports go

Set if reports are received.
"""
RANKS = """\
## What a rank finds under `ddprun`

Besides torchrun's variables, of which `MASTER_PORT` is new in each generation. After a restart, modules may have been
imported [before the ranks started](ddprun.md#a-restart-in-place); one that reads such a variable is imported by each
rank.
"""
OTHERS = """\
## Others
"""
OPERATOR = """\
## The operator

The chart's values set these; `extraEnv` sets those that have no value of their own.
"""

MEANINGS = {
    "MASTER_ADDR": "the host of rank 0; locally 127.0.0.1",
    "MASTER_PORT": "the port of rank 0, another one for each job and attempt",
    "NNODES": "`spec.nodes`",
    "NODE_RANK": "the number of this node, from 0",
    "NPROC_PER_NODE": "processes on each node",
    "DDPJOB_WORLD_SIZE": "all processes of the job",
    "RANK": "the number of this process in the job",
    "WORLD_SIZE": "all processes of the job",
    "LOCAL_RANK": "the number of this process on its node",
    "LOCAL_WORLD_SIZE": "processes on this node",
    "PET_NNODES": "torchrun's `--nnodes`; MIN:MAX in an elastic job",
    "PET_NPROC_PER_NODE": "torchrun's `--nproc-per-node`",
    "PET_NODE_RANK": "torchrun's `--node-rank`; torchrun numbers those itself",
    "PET_MASTER_ADDR": "torchrun's `--master-addr`",
    "PET_MASTER_PORT": "torchrun's `--master-port`",
    "PET_RDZV_ID": "torchrun's `--rdzv-id`: a process of an older attempt cannot join",
    "PET_MAX_RESTARTS": "torchrun's `--max-restarts`; in an elastic job what `backoffLimit` has left",
    "PET_SHUTDOWN_TIMEOUT": "seconds that ranks have to save after SIGTERM",
    "PET_RDZV_BACKEND": "torchrun's `--rdzv-backend`",
    "PET_RDZV_ENDPOINT": "torchrun's `--rdzv-endpoint`",
    "PET_RDZV_CONF": "torchrun's `--rdzv-conf`",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "ranks that are started again must not read addresses of those before them",
    "DDPJOB_NAME": "the name of the job",
    "DDPJOB_NAMESPACE": "its namespace",
    "DDPJOB_UID": "its uid, the same in all attempts",
    "DDPJOB_ATTEMPT": "the number of this attempt, from 1",
    "DDPJOB_BACKEND": "the backend that `ddpjob.init()` takes: nccl or gloo",
    "DDPJOB_TERMINATION_LOG": "the file for the message of a failure; removed or empty: the exit code counts",
    "OMP_NUM_THREADS": "threads of torch and numpy: the CPU limit divided by the processes, else 1 with several "
    "processes per node. A local run keeps your shell's value, else it sets 1 if several ranks share the machine. "
    "Results depend on it",
    "PYTHONUNBUFFERED": "output is complete when a rank fails",
    "TORCH_FR_BUFFER_SIZE": "entries of torch's flight recorder, which names the collectives of a hang",
    "DDPJOB_LEADER_APPOINTED": "1 in an elastic job in which another node than node 0 was appointed the leader",
    "DDPJOB_REPLACEMENT": "the number of this pod among the pods of its node in the attempt",
    "DDPJOB_SPARES": "`spares`: how many of the nodes wait until another one is lost",
    "DDPJOB_RESTARTS_LEFT": "the restarts that are left, by class, and what the back-off continues from",
    "DDPJOB_FAILURE_POLICY": "the job's `failurePolicy`, for restarts in place too",
    "DDPJOB_STALL_TIMEOUT": "`stall.timeoutSeconds`: 0 turns the detection of hangs off",
    "DDPJOB_RESTART_GRACE": "`restartGraceSeconds`: seconds from SIGTERM to SIGKILL after another rank failed",
    "DDPJOB_PREFLIGHT": "1: the nodes measure each other before their ranks start",
    "DDPJOB_OUT_OF_MEMORY": "1: a pod was OOMKilled, so no state is kept in memory. `0` in the template keeps it",
    "DDPJOB_STATUS_URL": "where progress is posted",
    "DDPJOB_STATUS_TOKEN_FILE": "the file with the token of this pod",
    "DDPJOB_STATUS_INTERVAL": "seconds between two reports; unset: 5",
    "DDPJOB_TENSORBOARD": "a folder for TensorBoard event files with the metrics of `progress()`; set it yourself",
    "KUBEFLOW_TRAINER_SERVER_URL": "the address for Hugging Face's `Trainer` and Kubeflow's SDK",
    "KUBEFLOW_TRAINER_SERVER_TOKEN": "the token file for these",
    "DDPJOB_TERM": "1, 2, …: the number of the leader, if another pod than the first one of node 0 leads",
    "DDPJOB_GENERATION": "0, 1, …: how often the ranks were started again in their pods; equal on all nodes",
    "DDPJOB_BEATS": "the memory of the heartbeats",
    "DDPJOB_END": "the file for checksums of DDP modules, where the rank is a new process",
    "DDPJOB_MEMORY": "the memory in which the state outlives the ranks",
    "DDPJOB_STATUS_CA_FILE": "the certificate authority of an `https` receiver",
    "DDPJOB_AGENT_KEY": "the secret of `ddprun`'s agents, from a Secret; else the run id and the uid are their key",
    "DDPJOB_FAULTS": "faults that `progress()` injects: JSON, set by `ddpjob run --fail`",
    "DDPJOB_LOCAL": "1: a local run, in which an exception that comes twice at one line ends the job",
    "DDPJOB_DEV": "1: a session of `ddpjob dev`: a save starts the ranks again, and no failure does",
    "DDPJOB_PDB": "the rank that stops at `breakpoint()` under `ddpjob dev`, or `all`",
    "DDPJOB_FAULTS_HAPPENED": "the folder in which a local run records them, so that each happens once",
}
"""Each variable that a job sets or a trainer reads, and what it means."""

# A shell may use any variable, so the operator sets all of them for this command.
_SHELL = ["sh", "-c", "torchrun train.py"]
SHAPES = {
    "always": {"command": _SHELL, "nprocPerNode": 2},
    "one process per node": {"command": _SHELL, "nprocPerNode": 1},
    "elastic jobs under torchrun": {"command": _SHELL, "nprocPerNode": 2, "minNodes": 1},
    "a CPU limit": {"command": _SHELL, "nprocPerNode": 1, "cpus": 8},
}


def to_markdown() -> str:
    """Return docs/environment.md."""
    head = ("Variable", "Value", "Set", "Meaning")
    own = ("Variable", "Meaning")
    ranks = ("DDPJOB_TERM", "DDPJOB_GENERATION", "DDPJOB_BEATS", "DDPJOB_END", "DDPJOB_MEMORY")
    others = (
        "DDPJOB_AGENT_KEY",
        "DDPJOB_LOCAL",
        "DDPJOB_DEV",
        "DDPJOB_PDB",
        "DDPJOB_FAULTS",
        "DDPJOB_FAULTS_HAPPENED",
    )
    agents = _of_agents()
    reports = report_token.environment("http://ddpjob-operator-status.ddpjob.svc:8081/v1/progress")
    parts = [
        INTRO,
        table(head, _of_trainers()),
        AGENT,
        table(own, _rows(name for name in MEANINGS if name in agents)),
        REPORTS,
        table(own, _rows([*reports, "DDPJOB_STATUS_INTERVAL", "DDPJOB_STATUS_CA_FILE", "DDPJOB_TENSORBOARD"])),
        RANKS,
        table(own, _rows(ranks)),
        OTHERS,
        table(own, _rows(others)),
        OPERATOR,
        table(own, iter(sorted((f"`{name}`", escaped(text)) for name, text in _of_operator().items()))),
    ]
    text = "\n".join(parts)
    if missing := sorted(name for name in _in_the_source() if f"`{name}`" not in text):
        raise SystemExit(f"tools/environment_page.py: no meaning of {', '.join(missing)}")
    return text


def _rows(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    return ((f"`{name}`", escaped(MEANINGS[name])) for name in names)


def _of_trainers() -> Iterator[tuple[str, ...]]:
    """Yield a row for each variable: its value in the first kind of job that has it, and when it is set."""
    found = {when: _environment(shape) for when, shape in SHAPES.items()}
    always = set.intersection(*(set(variables) for variables in found.values()))
    for name in MEANINGS:
        shapes = [when for when, variables in found.items() if name in variables]
        if shapes:
            when = "always" if name in always else _when(name, shapes)
            yield f"`{name}`", f"`{found[shapes[0]][name]}`", when, escaped(MEANINGS[name])


def _when(name: str, shapes: list[str]) -> str:
    if name == "PET_NODE_RANK":
        return "not in elastic jobs under torchrun"
    if name == "OMP_NUM_THREADS":
        return "a CPU limit, or several processes per node"
    return shapes[0]


def _environment(shape: Mapping[str, object]) -> dict[str, str]:
    what = _job(shape)
    return environment.environment(what, 1, what.spec.nodes - 1, naming.endpoint(what, 1))


def _of_agents() -> Mapping[str, str]:
    what = _job(
        {
            "command": ["ddprun", "train.py"],
            "failurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [78]}}]},
            "stall": {"timeoutSeconds": 600},
            "restartGraceSeconds": 5,
            "preflight": "Always",
            "spares": 1,
            "gang": "none",
        }
    )
    killed = api.FailureLine(attempt=1, time=dt.datetime.now(dt.timezone.utc), reason="OOMKilled", message="")
    status = api.Status(attempt=1, failures=[killed], leader=api.JobLeader(term=2))
    return agent_environment.environment(replace(what, status=status), 0)


def _job(shape: Mapping[str, object]) -> api.DDPJob:
    spec = dict(shape)
    trainer = {"name": "trainer", "image": "my-image", "command": spec.pop("command")}
    if cpus := spec.pop("cpus", None):
        trainer["resources"] = {"limits": {"cpu": cpus}}
    template = {"spec": {"containers": [trainer]}}
    metadata = {"name": "train", "namespace": "team", "uid": "0de19b24-5f4c-4d3e-9a51-2f6f1a6c0f6e"}
    manifest = {
        "apiVersion": api.API_VERSION,
        "kind": api.KIND,
        "metadata": metadata,
        "spec": {"nodes": 2, **spec, "template": template},
    }
    job, problems = validation.parse(manifest)
    assert not problems, problems
    return job


def _of_operator() -> dict[str, str]:
    """Return the meaning of each variable of the operator, from the docstrings of its settings."""
    found = {}
    for module in (settings, lease):
        for text in re.findall(r'"""(.*?)"""', inspect.getsource(module), re.DOTALL):
            for name, meaning in re.findall(r"\b(DDPJOB_\w+): (.*?)(?=\n *DDPJOB_\w+:|\Z)", text, re.DOTALL):
                found[name] = " ".join(meaning.split())
    return found


def _in_the_source() -> set[str]:
    """Return every DDPJOB_ variable that the code names."""
    sources = [path for part in ("operator", "trainer") for path in (ROOT / part).rglob("*.py")]
    text = "".join(path.read_text(encoding="utf-8") for path in sources)
    return {name for name in re.findall(r"\bDDPJOB_[A-Z][A-Z_]*[A-Z]\b", text) if "_TEST_" not in name}


if __name__ == "__main__":
    sys.stdout.write(to_markdown())
