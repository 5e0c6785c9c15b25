"""The variables that a trainer gets, in the cluster and locally."""

from collections.abc import Callable
from typing import Any

import pytest
from worlds import job

from ddpjob_operator.job import launcher, variables
from ddpjob_operator.job.launch import command
from ddpjob_operator.pods import build, environment, naming

GPU_8 = {"resources": {"limits": {"nvidia.com/gpu": 8}}}
GPU_1 = {"resources": {"limits": {"nvidia.com/gpu": "1", "cpu": "6"}}}
CPU_4 = {"resources": {"limits": {"cpu": "4500m"}}}

SHAPES = {
    "1-node-1-process-cpu": job(nodes=1),
    "2-nodes-1-process-cpu": job(nodes=2),
    "2-nodes-4-processes-cpu": job(nodes=2, nprocPerNode=4, container=CPU_4),
    "1-node-4-processes-cpu": job(nodes=1, nprocPerNode=4),
    "2-nodes-8-gpus": job(nodes=2, container=GPU_8),
    "2-nodes-1-gpu": job(nodes=2, container=GPU_1),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_node_gets_the_complete_environment(shape: str, golden: Callable[[str, str], None]) -> None:
    """The golden file has all variables of node 0, and those that differ on the other nodes."""
    what = SHAPES[shape]
    text, first = "", environment.environment(what, 1, 0, naming.endpoint(what, 1))
    for rank in range(what.spec.nodes):
        env = environment.environment(what, 1, rank, naming.endpoint(what, 1))
        assert list(env) == list(first)
        shown = [f"{name}={value}\n" for name, value in env.items() if rank == 0 or value != first[name]]
        text += f"# node {rank}\n" + "".join(shown)
    golden(f"environment-{shape}.env", text)


def test_rank_and_world_size_are_set_only_if_a_node_has_one_process() -> None:
    """RANK and WORLD_SIZE must be set only for nodes with one process, because other scripts multiply them."""
    script = {"command": ["python", "train.py"]}
    one = environment.environment(job(container=script), 1, 1, naming.Endpoint("h", 1))
    many = environment.environment(job(nprocPerNode=4, container=script), 1, 1, naming.Endpoint("h", 1))
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}
    assert {n: one[n] for n in sorted(names)} == {
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "RANK": "1",
        "WORLD_SIZE": "2",
    }
    assert not names & set(many)
    assert many["DDPJOB_WORLD_SIZE"] == "8"


def test_an_attempt_never_meets_processes_of_an_earlier_one() -> None:
    """Each attempt must have its own port and run id, because a process on a lost node resolves the same name."""
    what = job()
    first, second = (environment.environment(what, a, 0, naming.endpoint(what, a)) for a in (1, 2))
    assert first["PET_MASTER_ADDR"] == second["PET_MASTER_ADDR"]
    assert first["PET_MASTER_PORT"] != second["PET_MASTER_PORT"]
    assert first["PET_RDZV_ID"] != second["PET_RDZV_ID"]


ANY = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PET_NNODES",
    "PET_RDZV_ID",
}
BY_LAUNCHER = {"PET_NNODES", "PET_RDZV_ID"}


@pytest.mark.parametrize(
    ("container", "found"),
    [
        ({"command": ["torchrun", "x.py"]}, BY_LAUNCHER),
        ({"command": ["/opt/bin/torchrun"], "args": ["-m", "x"]}, BY_LAUNCHER),
        ({"command": ["python3.11", "-u", "-m", "torch.distributed.run", "x.py"]}, BY_LAUNCHER),
        ({"command": ["python", "-m", "ddprun", "x.py"]}, BY_LAUNCHER),
        ({"command": ["torchrun", "x.py", "--rank=$(RANK)"]}, BY_LAUNCHER | {"RANK"}),
        ({"command": ["torchrun", "--rdzv-endpoint=$(MASTER_ADDR):1", "x.py"]}, BY_LAUNCHER | {"MASTER_ADDR"}),
        (
            {"command": ["torchrun", "x.py"], "env": [{"name": "SIZE", "value": "$(WORLD_SIZE)"}]},
            BY_LAUNCHER | {"WORLD_SIZE"},
        ),
        (
            {"command": ["torchrun", "x.py"], "lifecycle": {"preStop": {"exec": {"command": ["sh", "-c", "a $RANK"]}}}},
            BY_LAUNCHER | {"RANK"},
        ),
        ({"command": ["python", "x.py"]}, ANY),
        ({"command": ["python", "wrapper.py", "torchrun", "x.py"]}, ANY),
        ({"command": ["python", "-m", "x"]}, ANY),
        ({"command": ["sh", "-c", "wait-for-rank-0; torchrun x.py"]}, ANY),
        ({"command": ["nsys", "profile", "torchrun", "x.py"]}, ANY),
        ({"command": ["accelerate", "launch", "x.py"]}, ANY),
        ({"args": ["torchrun", "x.py"], "command": None}, ANY),
        ({"command": None}, ANY),
    ],
)
def test_variables_that_the_program_does_not_read_are_omitted(container: dict[str, Any], found: set[str]) -> None:
    """Unused variables must be left out (those of 8 pods would be larger than the status), and no needed one."""
    env = environment.environment(job(container=container), 1, 0, naming.Endpoint("h", 1))
    assert ANY & set(env) == found


def test_a_script_that_may_start_torchrun_gets_the_variables_of_torchrun() -> None:
    """A script must get torchrun's variables, because it may start torchrun, which would train on each node alone."""
    what = job(nprocPerNode=2, container={"command": ["python", "x.py"]})
    assert environment.environment(what, 1, 0, naming.Endpoint("h", 1)).keys() >= BY_LAUNCHER


def test_no_port_is_hard_coded_in_known_scripts_or_in_the_ephemeral_range_of_the_kernel() -> None:
    ports = {naming.port(f"uid-{n}", attempt) for n in range(300) for attempt in range(30)}
    assert min(ports) >= 20000
    assert max(ports) < 30000
    assert not ports & {12355, 29500, 8888, 23456, 29400}


def test_the_attempts_of_a_job_use_each_port_only_after_thousands_of_others() -> None:
    assert len({naming.port("uid", attempt) for attempt in range(5000)}) > 4990


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, 1),
        ({"container": GPU_8}, 8),
        ({"container": {"resources": {"limits": {"nvidia.com/mig-1g.10gb": 2}}}}, 2),
        ({"container": {"resources": {"limits": {"amd.com/gpu": 4}}}}, 4),
        ({"container": {"command": ["torchrun", "--nproc_per_node=3", "x.py"]}}, 3),
        ({"container": {"command": ["python", "-m", "torch.distributed.launch", "--nproc-per-node", "2", "x.py"]}}, 2),
        ({"container": {"command": ["bash", "-c"], "args": ["torchrun \\\n  --nproc_per_node=3 \\\n  x.py\n"]}}, 3),
        ({"container": {"command": ["sh", "-c", "# NCCL_DEBUG=INFO \\\ntorchrun --nproc_per_node=3 x.py"]}}, 3),
        ({"container": GPU_8 | {"command": ["torchrun", "--nproc_per_node", "auto", "x.py"]}}, 8),
        ({"nprocPerNode": 5, "container": GPU_8}, 5),
    ],
)
def test_auto_resolves_to_what_really_runs_on_a_node(spec: dict, expected: int) -> None:
    assert job(**spec).spec.facts.nproc_per_node == expected


@pytest.mark.parametrize("name", ["nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.10gb.shared"])
def test_a_job_with_gpus_uses_nccl_whatever_the_resource_is_called(name: str) -> None:
    spec = job(container={"resources": {"limits": {name: 1}}}).spec
    assert (spec.facts.backend, spec.facts.nproc_per_node, build.wants_one_pod_per_node(spec)) == (
        "nccl", 1, True
    )  # fmt: skip


def test_threads_follow_the_cpu_limit_or_else_the_rule_of_torchrun() -> None:
    """The number of threads must follow the CPU limit; without a limit, a node's only process gets all cores."""

    def threads(cpu: object, nproc: int) -> str:
        what = job(nprocPerNode=nproc, container={"resources": {"limits": {"cpu": cpu}}} if cpu else None)
        return environment.environment(what, 1, 0, naming.Endpoint("h", 1)).get("OMP_NUM_THREADS", "unset")

    assert [threads(None, 4), threads("500m", 1), threads(8, 2), threads("3", 4)] == ["1", "1", "4", "1"]
    assert [threads(None, 1), threads(8, 1)] == ["unset", "8"]


@pytest.mark.parametrize(("grace", "expected"), [(None, "25"), (5, "1"), (0, "1"), (600, "595")])
def test_torchrun_gives_its_workers_less_than_the_grace_period_and_never_a_negative_time(grace, expected: str) -> None:
    what = job()
    if grace is not None:
        what.spec.template["spec"]["terminationGracePeriodSeconds"] = grace
    assert environment.environment(what, 1, 0, naming.Endpoint("h", 1))["PET_SHUTDOWN_TIMEOUT"] == expected


def test_a_value_set_by_the_user_wins_and_is_named_if_it_breaks_the_rendezvous() -> None:
    own = [{"name": "MASTER_ADDR", "value": "10.0.0.1"}, {"name": "OMP_NUM_THREADS", "value": "7"}]
    what = job(container={"env": own})
    env = build.pod(what, 1, 0)["spec"]["containers"][0]["env"]
    values = {e["name"]: e.get("value") for e in env}
    assert (values["MASTER_ADDR"], values["OMP_NUM_THREADS"]) == ("10.0.0.1", "7")
    assert len(values) == len(env), "no name is there twice"
    assert variables.overridden(what.spec.template) == ["MASTER_ADDR"]


def test_ddprun_keeps_each_node_rank_and_its_own_restarts_get_no_warning() -> None:
    """ddprun's nodes keep their node ranks, so its options must cause no warning. torchrun's c10d renumbers nodes."""
    options = ["--preload", "torch", "--no-preload", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-endpoint=x:1"]
    ours = job(container={"command": ["ddprun", *options, "train.py"]}).spec
    assert ours.facts.ranks_follow_nodes
    assert launcher.warnings(ours) == []
    assert command.script_of(["ddprun", *options, "train.py"]) == "train.py"
    theirs = job(container={"command": ["torchrun", *options[3:], "train.py"]}).spec
    assert not theirs.facts.ranks_follow_nodes
    assert len(launcher.warnings(theirs)) == 2
