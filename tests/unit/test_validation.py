"""A mistake in a job is named before it costs time: with its field, value and fix."""

from pathlib import Path
from typing import Any

import pytest
from worlds import job, manifest

from ddpjob_cli.manifest import override, yamlfile
from ddpjob_operator.job import launcher, validation
from ddpjob_operator.job.launch.command import script_of


def problems(**spec: Any) -> list[str]:
    return [str(p) for p in validation.parse(manifest(**spec))[1]]


def command(*words: str, **spec: Any) -> list[str]:
    return problems(container={"command": list(words)}, **spec)


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"nodes": 0}, "spec.nodes: must be at least 1, is 0"),
        ({"nodes": "two"}, 'spec.nodes: must be a whole number of at least 1, is "two"'),
        ({"nodes": 100_000}, "spec.nodes: must be at most 10000, is 100000"),
        ({"activeDeadlineSeconds": 10**15}, f"spec.activeDeadlineSeconds: must be at most 315360000, is {10**15}"),
        ({"nodes": True}, "spec.nodes: must be a whole number of at least 1, is true"),
        ({"nodes": 1.5}, "spec.nodes: must be a whole number of at least 1, is 1.5"),
        ({"nprocPerNode": "gpu"}, 'spec.nprocPerNode: must be a whole number of at least 1 or auto, is "gpu"'),
        ({"cleanPodPolicy": "Some"}, 'spec.cleanPodPolicy: must be one of All, None, Running, is "Some"'),
        ({"node": 2}, "spec.node: unknown field; did you mean nodes?"),
        (
            {"ttlSecondsAfterFinish": 2},
            "spec.ttlSecondsAfterFinish: unknown field; did you mean ttlSecondsAfterFinished?",
        ),
        ({"gang": "volcano"}, 'spec.gang: must be one of auto, kueue, native, none, is "volcano"'),
        (
            {"gang": "none", "topologyKey": "rack"},
            "spec.gang: none schedules pods one by one, but topologyKey needs a gang. "
            "Set gang to native or auto, or remove topologyKey.",
        ),
        (
            {"topologyKey": "a rack"},
            "spec.topologyKey: must be the key of a node label, such as topology.kubernetes.io/rack.",
        ),
        ({"minNodes": 3}, "spec.minNodes: must be at most spec.nodes. Lower minNodes, or raise nodes."),
        ({"minNodes": 0}, "spec.minNodes: must be at least 1, is 0"),
        (
            {"backoffWindowSeconds": 60, "backoffLimit": 101},
            "spec.backoffWindowSeconds: needs a backoffLimit of at most 100: the status keeps the time of each "
            "restart. Lower it.",
        ),
        (
            {"failurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": {"values": [256]}}]}},
            "spec.failurePolicy.rules[0].onExitCodes.values[0]: must be at most 255, is 256",
        ),
        (
            {"failurePolicy": {"rules": [{"action": "FailJob"}]}},
            "spec.failurePolicy.rules[0]: needs onExitCodes",
        ),
        (
            {"failurePolicy": {"rules": [{"onExitCodes": {"values": []}}]}},
            "spec.failurePolicy.rules[0].onExitCodes.values: must have at least 1 items, has 0",
        ),
        (
            {"failurePolicy": {"rules": [7]}},
            "spec.failurePolicy.rules[0]: must be a mapping, is 7",
        ),
        ({"template": None}, "spec.template: needs a spec with at least one container"),
        ({"template": {"spec": {"containers": []}}}, "spec.template.spec.containers: needs at least one container"),
        (
            {"template": {"spec": {"containers": [{"image": "x"}]}}},
            "spec.template.spec.containers[0]: needs a name, such as trainer",
        ),
        (
            {"backend": "mpi"},
            'spec.backend: "mpi" needs a PyTorch built with MPI; no published wheel has it. '
            "Use gloo (CPU) or nccl (GPU).",
        ),
        (
            {"container": {"comand": ["x"]}},
            "spec.template.spec.containers[0].comand: unknown field; did you mean command?",
        ),
    ],
)
def test_each_wrong_field_is_named_with_its_value_and_its_fix(spec: dict[str, Any], sentence: str) -> None:
    assert problems(**spec) == [sentence]


@pytest.mark.parametrize(
    ("pod", "container", "sentence"),
    [
        ({"volumes": 9}, {}, "volumes: must be a list, is 9"),
        ({"volumes": [3]}, {}, "volumes[0]: must be a mapping, is 3"),
        ({"volumes": [{"name": "v", "hostPath": "/x"}]}, {}, 'volumes[0].hostPath: must be a mapping, is "/x"'),
        ({"affinity": 4}, {}, "affinity: must be a mapping, is 4"),
        ({"affinity": {"podAntiAffinity": [1]}}, {}, "affinity.podAntiAffinity: must be a mapping, is a list"),
        ({"terminationGracePeriodSeconds": "30"}, {}, 'must be a whole number of at most 315360000, is "30"'),
        ({}, {"env": 5}, "containers[0].env: must be a list, is 5"),
        ({"volumes": [{"emptyDir": {}}]}, {}, "volumes[0]: needs a name"),
        ({}, {"env": [{"value": "x"}]}, "containers[0].env[0]: needs a name"),
        ({}, {"env": [3]}, "containers[0].env[0]: must be a mapping, is 3"),
        ({}, {"resources": [1]}, "containers[0].resources: must be a mapping, is a list"),
        ({}, {"resources": {"limits": 3}}, "containers[0].resources.limits: must be a mapping, is 3"),
        ({}, {"volumeMounts": [1]}, "containers[0].volumeMounts[0]: must be a mapping, is 1"),
        ({}, {"workingDir": 3}, "containers[0].workingDir: must be text, is 3"),
    ],
)
def test_a_template_of_the_wrong_shape_is_named_without_a_traceback(pod: dict, container: dict, sentence: str) -> None:
    body = manifest(container=container)
    body["spec"]["template"]["spec"] |= pod
    (found,) = map(str, validation.parse(body)[1])
    assert sentence in found


def test_invalid_metadata_of_the_template_is_named() -> None:
    body = manifest()
    body["spec"]["template"]["metadata"] = {"labels": ["a"]}
    (found,) = map(str, validation.parse(body)[1])
    assert found == "spec.template.metadata.labels: must be a mapping, is a list"


def test_all_mistakes_are_named_at_once() -> None:
    assert len(problems(nodes=0, backend="x", suspend="no")) == 3


@pytest.mark.parametrize(("length", "good"), [(57, True), (58, False), (63, False)])
def test_a_name_must_leave_room_for_the_rank_in_the_hostname(length: int, good: bool) -> None:
    found = validation.parse(manifest("d" * length))[1]
    assert (not found) == good
    if not good:
        assert f"at most 57 characters (its pods' hostnames add a rank), has {length}" in str(found[0])


@pytest.mark.parametrize("name", ["a.b", "1st", "Upper", "-x", "x-", "ü", ""])
def test_a_name_that_is_invalid_for_a_service_is_refused(name: str) -> None:
    assert str(validation.parse(manifest(name))[1][0]).startswith("metadata.name: must be")


@pytest.mark.parametrize(
    ("words", "nodes", "part"),
    [
        (["torchrun", "--standalone", "x.py"], 2, "--standalone is for one node, and spec.nodes is 2"),
        (["torchrun", "--nnodes=1", "x.py"], 2, "--nnodes=1 contradicts spec.nodes: 2"),
        (["torchrun", "--nnode", "1", "x.py"], 2, "--nnodes=1 contradicts spec.nodes: 2"),
        (["torchrun", "--nnodes=3:4", "x.py"], 2, "--nnodes=3:4 contradicts spec.nodes: 2"),
        (["torchrun", "--nnodes=1:2", "x.py"], 3, "--nnodes=1:2 contradicts spec.nodes: 3"),
        (["torchrun", "--nnodes=2:1", "x.py"], 2, "--nnodes=2:1 contradicts spec.nodes: 2"),
        (
            ["torchrun", "--nnodes=1:2", "--rdzv-backend=static", "x.py"],
            2,
            "an elastic job use the backend c10d. Remove it",
        ),
        (["python", "-m", "torch.distributed.launch", "--node_rank=0", "x.py"], 2, "gives all 2 nodes the same rank"),
        (
            ["python3", "-m", "torch.distributed.run", "--master-addr", "localhost", "x.py"],
            2,
            "is not an address at which 2 nodes can find rank 0",
        ),
        (["sh", "-c", "cd /app && torchrun --standalone x.py"], 2, "--standalone is for one node"),
        (["bash", "-c", "R=${HOSTNAME##*-} && torchrun --nnodes=4 x.py"], 2, "--nnodes=4 contradicts spec.nodes: 2"),
        (["bash", "-c", "set -e\ntorchrun \\\n  --nnodes=4 \\\n  x.py\n"], 2, "--nnodes=4 contradicts spec.nodes: 2"),
        (["python", "/opt/torch/distributed/launch.py", "--nnodes", "3", "x.py"], 2, "--nnodes=3 contradicts"),
        (["torchrun", "--nnodes=2", "x.py"], 1, "--nnodes=2 contradicts spec.nodes: 1"),
        (
            ["torchrun", "--master-addr=1.2.3.4", "x.py"],
            2,
            "--master_addr=1.2.3.4 is not an address at which 2 nodes can find rank 0",
        ),
        (
            ["torchrun", "--master-addr=m", "--master-port=0", "x.py"],
            2,
            "port 0 is a different port on each of 2 nodes",
        ),
        (["torchrun", "--master-port=0", "x.py"], 2, "port 0 is a different port on each of 2 nodes"),
        (["torchrun", "--rdzv-endpoint", "localhost:0", "x.py"], 2, "Use $(MASTER_ADDR):$(MASTER_PORT)"),
        (["torchrun", "--rdzv-backend=c10d", "x.py"], 2, "each of 2 nodes waits at its own address"),
        (
            ["sh", "-c", "torchrun --master-addr=$(hostname) x.py"],
            2,
            "--master_addr=$(hostname) is not an address at which 2 nodes can find rank 0",
        ),
        (
            ["sh", "-c", "torchrun --nproc_per_node=$(nvidia-smi -L | wc -l) --nnodes=4 x.py"],
            2,
            "--nnodes=4 contradicts",
        ),
        (["sh", "-c", "torchrun --nproc_per_node `nproc --all` --nnodes=4 x.py"], 2, "--nnodes=4 contradicts"),
        (["sh", "-c", "torchrun --rdzv_id $RANDOM x.py"], 2, "--rdzv_id=$RANDOM differs on each of 2 nodes"),
        (["sh", "-c", "torchrun --rdzv-id=job-$(date +%s) x.py"], 2, "differs on each of 2 nodes"),
        (["sh", "-c", "torchrun --rdzv-id=${HOSTNAME} x.py"], 2, "differs on each of 2 nodes"),
        (["sh", "-c", "torchrun --rdzv-id=`hostname -s` x.py"], 2, "differs on each of 2 nodes"),
        (
            ["torchrun", "--node-rank=1", "x.py"],
            1,
            "--node_rank=1 waits for node 0, but spec.nodes: 1 is only this node",
        ),
        (["torchrun", "--nproc-per-node=gpu", "x.py"], 2, "--nproc_per_node=gpu: the trainer's limits have no GPU"),
        (["python", "-m", "torch.distributed.launch", "--no-python", "./x"], 1, "cannot pass --local-rank"),
        (
            ["python", "x.py", "--dist-url", "file:///tmp/meet"],
            2,
            "--dist-url=file:///tmp/meet: 2 nodes share no folder",
        ),
        (["torchrun", "x.py", "--init_method=file:///tmp/meet"], 2, "Mount a volume that all nodes share"),
    ],
)
def test_a_command_that_contradicts_the_job_and_would_hang_is_refused(words: list[str], nodes: int, part: str) -> None:
    (sentence,) = command(*words, nodes=nodes)
    assert part in sentence
    assert sentence.startswith("spec.template.spec.containers[0].command: ")


@pytest.mark.parametrize(
    ("words", "nodes"),
    [
        (["torchrun", "--standalone", "x.py"], 1),
        (["torchrun", "--nnode=1", "x.py"], 1),
        (["torchrun", "--nnodes=$(NNODES)", "--node_rank=$(NODE_RANK)", "x.py"], 2),
        (["torchrun", "x.py", "--standalone", "--nnodes=1", "--node_rank", "0"], 2),
        (["torchrun", "-m", "pkg.train", "--nnodes=1"], 2),
        (["torchrun", "--nnodes=2:2", "x.py"], 2),
        (["torchrun", "--rdzv-backend=c10d", "--rdzv-endpoint=$(MASTER_ADDR):$(MASTER_PORT)", "x.py"], 2),
        (["torchrun", "--master-addr=digits-0.digits", "x.py"], 2),
        (["torchrun", "--rdzv-id=$RANDOM", "x.py"], 2),  # no shell expands $RANDOM: all nodes get the same id
        (["sh", "-c", "torchrun --rdzv-id=$DDPJOB_UID x.py"], 2),
        (["sh", "-c", "torchrun --rdzv-id=$RANDOM x.py"], 1),
        (["sh", "-c", "torchrun --rdzv-id=${HOSTNAME%-*} x.py"], 2),  # the pod's name without its number
        (["sh", "-c", "torchrun --rdzv-id=$(hostname | sed 's/-[0-9]*$//') x.py"], 2),
        (["sh", "-c", "torchrun --rdzv-id=$RANDOM_SEED x.py"], 2),
        (["sh", "-c", "echo 'unclosed && torchrun --standalone x.py"], 2),
        (["sh", "-c", "# torchrun --standalone x.py\npython x.py # or torchrun --nnodes=7"], 2),
        (["torchrun", "--node-rank=0", "x.py"], 1),
        (["torchrun", "--standalone", "--rdzv-backend=c10d", "x.py"], 1),
        (["python", "-m", "torch.distributed.launch", "--no-python", "--use_env", "./x"], 1),
        (["python", "x.py", "--dist-url", "file:///tmp/meet"], 1),
        (["python", "x.py", "--data", "file:///tmp/mnist", "--dist-url=tcp://$(MASTER_ADDR):23456"], 2),
    ],
)
def test_options_that_agree_with_the_job_or_belong_to_the_script_run_unchanged(words: list[str], nodes: int) -> None:
    assert command(*words, nodes=nodes) == []


@pytest.mark.parametrize(
    ("volume", "refused"),
    [
        ({"persistentVolumeClaim": {"claimName": "all"}}, False),
        ({"hostPath": {"path": "/nfs"}}, False),
        ({"nfs": {"server": "s", "path": "/"}}, False),
        ({"emptyDir": {}}, True),
        ({}, True),
    ],
)
def test_the_rendezvous_file_must_be_on_a_volume_that_nodes_can_share(volume: dict, refused: bool) -> None:
    mount = [{"name": "meet", "mountPath": "/meet/"}, {"name": "other", "mountPath": "/"}]
    command = ["python", "x.py", "--dist_url=file:///meet/here"]
    body = manifest(container={"command": command, "volumeMounts": mount})
    other = {"name": "other", "persistentVolumeClaim": {"claimName": "root"}}
    body["spec"]["template"]["spec"]["volumes"] = [{"name": "meet", **volume}, other]
    assert bool(validation.parse(body)[1]) == refused


def test_an_invalid_name_is_reported_even_if_ranks_would_meet_on_its_volume() -> None:
    command = ["python", "x.py", "--dist_url=file:///meet/here"]
    body = manifest(container={"command": command, "volumeMounts": [{"name": ["meet"], "mountPath": "/meet"}]})
    body["spec"]["template"]["spec"]["volumes"] = [{"name": ["meet"], "emptyDir": {}}]
    assert any("name: must be text, is a list" in str(problem) for problem in validation.parse(body)[1])


def test_an_endpoint_for_torchrun_may_come_from_a_variable() -> None:
    env = [{"name": "PET_RDZV_ENDPOINT", "value": "etcd:2379"}]
    command = ["torchrun", "--rdzv-backend=etcd-v2", "x.py"]
    assert problems(container={"command": command, "env": env}) == []


def test_as_many_processes_as_gpus_are_no_contradiction_if_the_job_has_gpus() -> None:
    limits = {"limits": {"nvidia.com/gpu": 2}}
    assert problems(container={"command": ["torchrun", "--nproc-per-node=gpu", "x.py"], "resources": limits}) == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("python -u -X dev train.py --x y.py", "train.py"),
        ("python3.11 -m pkg.train", None),
        ("python -c print(1) x.py", None),
        ("torchrun --tee 3 a/b.py", "a/b.py"),
        ("torchrun -m pkg x.py", None),
        ("/usr/bin/python -m torch.distributed.launch --use-env t.py", "t.py"),
        ("bash run.sh x.py", None),
    ],
)
def test_the_script_is_known_only_if_the_command_shows_it_plainly(words: str, expected: str | None) -> None:
    assert script_of(words.split()) == expected


def test_a_dynamic_rendezvous_numbers_the_nodes_itself_so_no_rank_is_claimed() -> None:
    """If torchrun numbers the nodes itself, no rank may be named for a node: it could be the wrong one."""
    spec = job(container={"command": ["torchrun", "--rdzv_backend=c10d", "--rdzv_endpoint=a:1", "x.py"]}).spec
    assert spec.rank_of_place(1) is None
    assert job().spec.rank_of_place(1) == 1
    assert launcher.warnings(spec)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["mpirun", "-np", "4", "python", "x.py"], "mpirun"),
        (["/opt/bin/deepspeed", "--num_gpus", "2", "x.py"], "deepspeed"),
        (["bash", "-c", "cd /app && exec horovodrun -np 4 python x.py"], "horovodrun"),
        (["bash", "-c", "mpirun -np 4 python x.py"], "mpirun"),
        (["bash", "-c", "mpirun -H $(paste -sd, /etc/hosts.txt) python x.py"], ""),
        (["mpirun", "-np", "4", "--hostfile", "/etc/mpi/hostfile", "python", "x.py"], ""),
        (["mpirun", "-H", "a,b", "python", "x.py"], ""),
        (["deepspeed", "--no_ssh", "--node_rank=$(NODE_RANK)", "--master_addr=$(MASTER_ADDR)", "x.py"], ""),
        (["bash", "-c", "pip install deepspeed && python x.py"], ""),
        (["torchrun", "x.py", "mpirun"], ""),
    ],
)
def test_a_launcher_that_does_not_know_the_other_nodes_is_named(words: list[str], named: str) -> None:
    """A launcher that starts one node only must be reported. Otherwise eight nodes would each train the same model."""
    said = launcher.warnings(job(container={"command": words}).spec)
    assert bool(named) == any(f"{named} starts ranks on its own node, so each of the 2 nodes" in note for note in said)
    assert launcher.warnings(job(container={"command": words}, nodes=1).spec) == []


WITHHELD = """
env -i torchrun t.py
env - PATH=$PATH torchrun t.py
env -u PET_NNODES torchrun t.py
sudo -u $USER torchrun t.py
sudo bash -c "torchrun t.py"
nohup sudo env OMP_NUM_THREADS=2 python -m torch.distributed.run t.py
su - me -c "cd /app && torchrun t.py"
ssh $HOST torchrun t.py
docker run --rm image bash -c "torchrun t.py"
singularity exec --cleanenv image torchrun t.py
kubectl exec pod -- torchrun t.py
unset PET_RDZV_ENDPOINT PET_NNODES PET_MASTER_ADDR; torchrun t.py
export -n PET_NNODES PET_NODE_RANK; torchrun t.py
f() { sudo ddprun "$@"; }; f t.py
cd /app; sudo python t.py
bash -n run.sh
torchrun --help
python -m torch.distributed.run --help
"""
HANDED_OVER = """
sudo -nE torchrun t.py
sudo --preserve-env=PET_NNODES,PET_NODE_RANK,PET_MASTER_ADDR torchrun t.py
sudo torchrun --nnodes=$NNODES --node-rank=$NODE_RANK --master-addr=$MASTER_ADDR t.py
sudo torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint $MASTER_ADDR:29500 t.py
sudo python t.py --rank $RANK --world-size 2
sudo nvidia-smi -pm 1; torchrun t.py
env A=1 torchrun t.py
env -u X torchrun t.py
env -i $(env | grep PET_) torchrun t.py
env -i python prepare.py && torchrun t.py
docker exec -e PET_NNODES -e PET_NODE_RANK -e PET_MASTER_ADDR container torchrun t.py
singularity exec image torchrun t.py
env -u PET_NNODES torchrun --nnodes 2 t.py
su me -c "torchrun t.py"
docker run -e PET_NNODES -e PET_NODE_RANK -e PET_MASTER_ADDR image torchrun t.py
ssh storage mkdir -p /x; torchrun t.py
(unset PET_NNODES); torchrun t.py
unset RANK WORLD_SIZE LOCAL_RANK; torchrun t.py
unset PET_NNODES; export PET_NNODES=2; torchrun t.py
bash -n run.sh && torchrun t.py
torchrun --help; torchrun t.py
torchrun t.py --help
"""


@pytest.mark.parametrize("script", WITHHELD.strip().splitlines())
def test_a_command_that_separates_the_nodes_or_starts_nothing_is_named(script: str) -> None:
    """A command that separates the nodes or starts nothing must be named, because the job would succeed or wait."""
    words = script.split() if script.startswith(("bash", "torchrun", "python")) else ["bash", "-c", script]
    assert len(launcher.apart(job(container={"command": words}).spec)) == 1


@pytest.mark.parametrize("script", HANDED_OVER.strip().splitlines())
def test_a_launcher_that_uses_the_variables_of_its_pod_is_not_named(script: str) -> None:
    assert launcher.apart(job(container={"command": ["bash", "-c", script]}).spec) == []


def test_on_one_node_a_launcher_needs_only_the_number_of_processes() -> None:
    command = {"command": ["sudo", "torchrun", "t.py"]}
    assert launcher.apart(job(container=command, nodes=1).spec) == []
    (said,) = launcher.apart(job(container=command, nodes=1, nprocPerNode=4).spec)
    assert said.endswith("so it starts one process and not 4; use `sudo -E`")


@pytest.mark.parametrize(
    "variable", ["OMPI_MCA_orte_default_hostfile", "PRTE_MCA_prte_default_hostfile", "I_MPI_HYDRA_HOST_FILE"]
)
def test_a_launcher_that_gets_the_nodes_from_a_variable_is_not_reported_as_training_alone(variable: str) -> None:
    env = [{"name": variable, "value": "/etc/mpi/hostfile"}]
    assert launcher.warnings(job(container={"command": ["mpirun", "python", "x.py"], "env": env}).spec) == []
    other = [{"name": "OMP_NUM_THREADS", "value": "1"}]
    assert launcher.warnings(job(container={"command": ["mpirun", "python", "x.py"], "env": other}).spec)


@pytest.mark.parametrize("path", ["/job", "/job/", "/job/hostfile"])
def test_the_default_hostfile_of_deepspeed_may_be_in_a_volume(path: str) -> None:
    """DeepSpeed's default hostfile, /job/hostfile, must be accepted, because the image may have it."""
    said = {}
    for program in ("deepspeed", "mpirun"):
        trainer = {"name": "trainer", "image": "i", "command": [program, "x.py"]}
        pod = {
            "containers": [trainer | {"volumeMounts": [{"name": "hosts", "mountPath": path}]}],
            "volumes": [{"name": "hosts", "configMap": {"name": "hosts"}}],
        }
        said[program] = launcher.warnings(job(template={"spec": pod}).spec)
    assert said["deepspeed"] == []
    assert len(said["mpirun"]) == 1, "it does not read that file"


def test_two_contradicting_numbers_of_processes_are_refused() -> None:
    (sentence,) = command("torchrun", "--nproc_per_node=2", "x.py", nprocPerNode=4)
    assert "--nproc_per_node=2 contradicts spec.nprocPerNode: 4" in sentence


# ---------------------------------------------------------------- files

HEAD = "apiVersion: training.ddpjob.io/v1alpha1\nkind: DDPJob\nmetadata: {name: digits}\n"
GOOD = HEAD + "spec:\n  template: {spec: {containers: [{name: t, image: i, command: [x]}]}}\n"


@pytest.fixture
def write(tmp_path: Path):
    def file(content: str | bytes) -> str:
        path = tmp_path / "bad.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return file


def refused(path: str, *settings: str, job: str | None = None) -> str:
    try:
        document = yamlfile.read_job(path, job)
        for setting in settings:
            override.set_field(document, setting, f"--set {setting}")
        error = document.error(validation.parse(document.data)[1])
    except yamlfile.InputError as early:
        error = early
    return str(error).replace(path, "bad.yaml")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "bad.yaml:1: the file has no DDPJob: it is empty"),
        ("---\n---\n", "bad.yaml:1: the file has no DDPJob: it is empty"),
        ("kind: Pod\n", 'bad.yaml:1: kind: must be DDPJob, is "Pod"'),
        ("- 1\n", "bad.yaml:1: a DDPJob is a mapping with apiVersion, kind, metadata and spec, not a list"),
        ("a: [1\n", "bad.yaml:2: not valid YAML: did not find expected ',' or ']'"),
        ("a: 1\na: 2\n", "bad.yaml:2: a is given twice, first in line 1; remove one"),
        (b"\xff\xfe", "bad.yaml:1: byte 0 is not UTF-8, so not valid YAML"),
        ("a: &x [*x]\n", "bad.yaml:1: an alias that contains itself"),
        (HEAD + "spec:\n  # comment\n  nodes: 0\n  template: {}\n", "bad.yaml:6: spec.nodes: must be at least 1, is 0"),
        (GOOD + "---\n" + GOOD.replace("digits", "other"), "Choose one with --job NAME"),
    ],
)
def test_a_file_without_a_job_is_refused_with_file_and_line(write, content: str | bytes, sentence: str) -> None:
    assert sentence in refused(write(content))


def test_a_missing_file_is_reported_in_one_line() -> None:
    with pytest.raises(yamlfile.InputError, match="No such file or directory"):
        yamlfile.read_job("/nowhere/job.yaml")


def test_the_chosen_one_of_several_jobs_is_taken(write) -> None:
    path = write(GOOD + "---\n" + GOOD.replace("digits", "other"))
    assert yamlfile.read_job(path, "other").name == "other"
    assert "no DDPJob named othr; did you mean other?" in refused(path, job="othr")


def test_a_job_next_to_other_objects_is_found(write) -> None:
    assert yamlfile.read_job(write("kind: ConfigMap\n---\n" + GOOD)).name == "digits"


def test_an_error_in_a_value_set_by_an_option_names_the_option_and_no_line(write) -> None:
    assert refused(write(GOOD), "spec.nodes=0") == "--set spec.nodes=0: spec.nodes: must be at least 1, is 0"


@pytest.mark.parametrize(
    ("setting", "part"),
    [
        ("spec.nodes", "must be PATH=VALUE"),
        ("nodes=2", "did you mean --set spec.nodes=2?"),
        ("spec.template.spec.containers[3].image=x", "there is no item [3]"),
        ("spec.nodes.x=1", "must be a whole number"),
    ],
)
def test_a_wrong_setting_is_named(write, setting: str, part: str) -> None:
    assert part in refused(write(GOOD), setting)


def test_env_replaces_a_variable_of_the_trainer(write) -> None:
    document = yamlfile.read_job(write(GOOD))
    override.set_variable(document, "A=1")
    override.set_variable(document, "A=2=3")
    assert document.data["spec"]["template"]["spec"]["containers"][0]["env"] == [{"name": "A", "value": "2=3"}]


def test_env_keeps_the_position_of_a_variable_that_others_refer_to(write) -> None:
    """A variable must keep its position in env, because Kubernetes replaces $(ROOT) only by an earlier entry."""
    env = "env: [{name: ROOT, value: /a}, {name: DATA, value: $(ROOT)/data}, {name: ROOT, value: /b}]"
    document = yamlfile.read_job(write(GOOD.replace("command: [x]", env)))
    override.set_variable(document, "ROOT=/c")
    made = document.data["spec"]["template"]["spec"]["containers"][0]["env"]
    assert made == [{"name": "ROOT", "value": "/c"}, {"name": "DATA", "value": "$(ROOT)/data"}]


def test_the_operator_does_not_search_for_similar_names() -> None:
    """The operator must not search for similar names, because a tenant may write thousands of names."""
    body = manifest(node=2, container={"comand": ["torchrun"]})
    found = [str(problem) for problem in validation.parse(body, hints=False)[1]]
    assert found == ["spec.node: unknown field"]


def test_a_template_with_more_items_than_any_pod_has_is_refused_before_its_pods_are_created() -> None:
    """A template with too many items must be refused: the API server's work is quadratic in their number."""
    raw = manifest()
    container = raw["spec"]["template"]["spec"]["containers"][0]
    container["volumeMounts"] = [{"name": f"v{i}", "mountPath": f"/{i}"} for i in range(600)]
    assert ["spec: holds more than 512 items in its lists" in str(p) for p in validation.parse(raw)[1]] == [True]
    container["volumeMounts"] = container["volumeMounts"][:400]
    assert validation.parse(raw)[1] == []


def test_only_the_first_of_thousands_of_wrong_values_are_named() -> None:
    """Only the first of thousands of wrong values may be named: all 5,000 would block the operator for 90 ms."""
    limits = {f"x{number}": "1e3Ki" for number in range(4_000)}
    found = validation.parse(manifest(container={"resources": {"limits": limits}}), hints=False)[1]
    assert len(found) == validation.PROBLEMS_MAX
    found = validation.parse(manifest(container={"env": [1] * 4_000}), hints=False)[1]
    assert len(found) == validation.PROBLEMS_MAX
    assert all(problem.unreadable for problem in found)
