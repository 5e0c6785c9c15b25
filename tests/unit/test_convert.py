"""`ddpjob convert`: jobs of Kubeflow and command lines become DDPJobs, and nothing is dropped silently."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

import ddpjob_convert as room
from ddpjob_cli.commands.main import cli
from ddpjob_cli.manifest import yamlfile
from ddpjob_convert import command
from ddpjob_convert.fields import ConvertError
from ddpjob_convert.result import Converted
from ddpjob_operator.job import validation

PYTORCHJOB = """\
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: mnist, namespace: team-a}
spec:
  nprocPerNode: "4"
  pytorchReplicaSpecs:
    Master:
      replicas: 1
      restartPolicy: OnFailure
      template: &pod
        spec:
          containers:
          - name: pytorch
            image: registry.example/mnist:1
            command: [torchrun, train.py, --epochs, "5"]
            resources: {limits: {nvidia.com/gpu: 4}}
    Worker:
      replicas: 3
      restartPolicy: OnFailure
      template: *pod
"""

TRAINJOB = """\
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: gpt}
spec:
  runtimeRef: {name: torch-distributed}
  trainer:
    numNodes: 4
    numProcPerNode: 8
    image: registry.example/gpt:1
    command: [torchrun, train.py]
    args: [--epochs, "5"]
    env: [{name: NCCL_DEBUG, value: WARN}, {name: LR, value: "0.1"}]
    resourcesPerNode: {limits: {nvidia.com/gpu: 8}}
"""

RUNTIME = """\
apiVersion: trainer.kubeflow.org/v1alpha1
kind: ClusterTrainingRuntime
metadata: {name: torch-distributed}
spec:
  mlPolicy: {numNodes: 1, torch: {numProcPerNode: auto}}
  podGroupPolicy: {coscheduling: {scheduleTimeoutSeconds: 120}}
  template:
    spec:
      failurePolicy: {maxRestarts: 2}
      replicatedJobs:
      - name: node
        template:
          metadata: {labels: {trainer.kubeflow.org/trainjob-ancestor-step: trainer}}
          spec:
            template:
              spec:
                tolerations: [{key: gpu, operator: Exists}]
                containers:
                - name: node
                  image: pytorch/pytorch:2.7.1
                  env: [{name: NCCL_DEBUG, value: INFO}, {name: HOME, value: /tmp}]
"""


def pytorchjob(**spec: Any) -> dict[str, Any]:
    body: dict[str, Any] = copy.deepcopy(yaml.safe_load(PYTORCHJOB))
    body["spec"] |= spec
    return body


def trainjob(runtime: str = RUNTIME, **spec: Any) -> Converted:
    body = yaml.safe_load(TRAINJOB)
    body["spec"] |= spec
    return checked(room.convert(body, [yaml.safe_load(runtime)]))


def checked(result: Converted) -> Converted:
    """Return the result, read back from its YAML and comments, which must be a valid DDPJob."""
    data = yaml.safe_load(result.to_yaml())
    assert data == result.data
    assert [str(problem) for problem in validation.parse(data)[1]] == []
    return result


def converted(**spec: Any) -> Converted:
    return checked(room.convert(pytorchjob(**spec), []))


def of_command(line: str) -> Converted:
    return checked(command.convert(line.split()))


def remarks(result: Converted) -> dict[str, str]:
    return {validation.dotted(remark.path): remark.text for remark in result.remarks}


def trainer(result: Converted) -> dict[str, Any]:
    (container,) = result.spec["template"]["spec"]["containers"]
    return dict(container)


# ---- PyTorchJob


def test_a_pytorchjob_becomes_a_ddpjob_with_all_its_replicas() -> None:
    """Master and Worker must become one DDPJob with the sum of their replicas and the container `trainer`."""
    result = converted()
    assert result.metadata == {"name": "mnist", "namespace": "team-a"}
    assert (result.spec["nodes"], result.spec["nprocPerNode"]) == (4, 4)
    assert (trainer(result)["name"], trainer(result)["image"]) == ("trainer", "registry.example/mnist:1")
    assert trainer(result)["command"] == ["torchrun", "train.py", "--epochs", "5"]


RUN_POLICY = [
    ({"cleanPodPolicy": "None"}, {"cleanPodPolicy": "None"}),
    ({"backoffLimit": 7}, {"backoffLimit": 7}),
    ({"ttlSecondsAfterFinished": 0}, {"ttlSecondsAfterFinished": 0}),
    ({"activeDeadlineSeconds": 60}, {"activeDeadlineSeconds": 60}),
    ({"suspend": True}, {"suspend": True}),
    ({"managedBy": "kubeflow.org/training-operator"}, {}),
    ({"managedBy": "kueue.x-k8s.io/multikueue"}, {"managedBy": "kueue.x-k8s.io/multikueue"}),
    ({"schedulingPolicy": {"scheduleTimeoutSeconds": 90}}, {"startDeadlineSeconds": 90}),
]


@pytest.mark.parametrize(
    ("spec", "made"),
    [
        *(({"runPolicy": given}, made) for given, made in RUN_POLICY),
        *RUN_POLICY,
        ({"backoffLimit": 2, "runPolicy": {"cleanPodPolicy": "All"}}, {"backoffLimit": 2, "cleanPodPolicy": "All"}),
        ({"backoffLimit": 2, "runPolicy": {"backoffLimit": 4}}, {"backoffLimit": 4}),
    ],
)
def test_a_field_of_run_policy_becomes_the_field_of_the_same_meaning(spec: Any, made: dict[str, Any]) -> None:
    """Fields of runPolicy must be read in spec, too: Kubeflow's first operator had them there."""
    result = converted(**spec)
    assert {k: v for k, v in result.spec.items() if k not in ("nodes", "nprocPerNode", "template")} == made
    assert not [text for text in remarks(result).values() if "has no such field" in text]


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ({"runPolicy": {"schedulingPolicy": {"minAvailable": 4}}}, "spec.runPolicy.schedulingPolicy.minAvailable"),
        ({"runPolicy": {"schedulingPolicy": {"queue": "a"}}}, "spec.runPolicy.schedulingPolicy.queue"),
        ({"runPolicy": {"frobnicate": 1}}, "spec.runPolicy.frobnicate"),
        ({"elasticPolicy": {"maxReplicas": 9}}, "spec.elasticPolicy.maxReplicas"),
        ({"elasticPolicy": {"metrics": [{}]}}, "spec.elasticPolicy.metrics"),
        ({"elasticPolicy": {"rdzvBackend": "c10d"}}, "spec.elasticPolicy.rdzvBackend"),
        ({"nprocPerNode": "cpu"}, "spec.nprocPerNode"),
        ({"future": {"a": 1}}, "spec.future"),
    ],
)
def test_a_field_without_a_counterpart_is_named(spec: dict[str, Any], named: str) -> None:
    """Each field that is dropped must be named. Otherwise users notice it only when the job runs differently."""
    assert named in remarks(converted(**spec))


def said(body: dict[str, Any]) -> str:
    """Return what `ddpjob convert` prints on stderr."""
    return str(run("-", stdin=yaml.safe_dump(body)).stderr)


def test_the_launcher_in_a_shell_of_a_pytorchjob_gets_the_variables_of_the_ddpjob() -> None:
    """$WORLD_SIZE and $RANK of Kubeflow, which count nodes, must become $NNODES and $NODE_RANK in a shell."""
    for count in ("$WORLD_SIZE", "$((WORLD_SIZE))", '"${WORLD_SIZE}"', "$(($WORLD_SIZE / 2))"):
        script = f'cd /app\ntorchrun --nnodes={count} --node_rank "${{RANK}}" --nproc_per_node=4 \\\n  train.py --lr 1'
        result = converted(pytorchReplicaSpecs=replicas(command=["bash", "-c"], args=[script]))
        made = script.replace(count, "$NNODES").replace('"${RANK}"', "$NODE_RANK")
        assert (trainer(result)["command"], trainer(result)["args"]) == (["bash", "-c"], [made])
        assert f"--nnodes={count} is now $NNODES" in told(result)
    whole = converted(pytorchReplicaSpecs=replicas(command=["bash", "-c", "torchrun --nnodes=4 train.py"]))
    assert trainer(whole)["command"][2] == "torchrun --nnodes=4 train.py"


@pytest.mark.parametrize(("script", "is_named"), [("tee log_$RANK.txt", True), ("RANK=$NODE_RANK; echo $RANK", False)])
def test_a_rank_variable_that_counts_nodes_in_kubeflow_and_ranks_here_is_named(script: str, is_named: bool) -> None:
    """A RANK that counts nodes in Kubeflow must be named: with 4 processes per node it is not set in a DDPJob's pod."""
    words = ["bash", "-xc", f"{script}\ntorchrun --nnodes 4 train.py"]
    text = "RANK: not set before the launcher has started the ranks; NODE_RANK is the node's"
    for stderr in (
        said(pytorchjob(pytorchReplicaSpecs=replicas(command=words))),
        run("--image", "i", "--", "bash", "-xc", f"{script}\ntorchrun --nnodes 4 --nproc-per-node 4 t.py").stderr,
    ):
        assert (text.partition(": ")[2] in stderr) == is_named


@pytest.mark.parametrize(("words", "is_named"), [(["--nnodes", "1"], True), ([], False)])
def test_only_an_option_of_the_command_is_named_as_the_source_of_nodes(words: list[str], is_named: bool) -> None:
    assert ("# --nnodes" in run("--", "torchrun", *words, "train.py").stdout) == is_named


def test_words_and_variables_with_kubernetes_references_are_named_too() -> None:
    container = {"command": ["torchrun", "t.py", "--rank=$(RANK)"], "env": [{"name": "LOG", "value": "$(WORLD_SIZE)"}]}
    named = said(pytorchjob(pytorchReplicaSpecs=replicas(**container)))
    assert "$(RANK): not set before the launcher has started the ranks" in named
    assert "NNODES are the nodes, DDPJOB_WORLD_SIZE all ranks" in named


@pytest.mark.parametrize("value", [5, True, "torchrun train.py", {"a": 1}])
def test_a_command_that_is_not_a_list_is_refused_without_a_traceback(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(pytorchjob(pytorchReplicaSpecs=replicas(command=value))))
    said = str(CliRunner().invoke(cli, ["convert", str(path)]).exception)
    assert "spec.template.spec.containers[0].command: must be a list of words" in said


def test_a_runtime_whose_metadata_is_a_text_is_refused_without_a_traceback() -> None:
    own, of_job = yaml.safe_load(RUNTIME), yaml.safe_load(RUNTIME)
    own["metadata"] = "torch-distributed"
    job = of_job["spec"]["template"]["spec"]["replicatedJobs"][0]
    job |= {"name": "other", "template": job["template"] | {"metadata": "trainer"}}
    for runtime in (own, of_job):
        with pytest.raises(ConvertError):
            trainjob(yaml.safe_dump(runtime))


def test_references_to_the_container_name_follow_its_renaming() -> None:
    """References to the container must follow its renaming from `pytorch` to `trainer`, or no pod starts."""

    def cpus(name: str) -> dict[str, Any]:
        reference = {"containerName": name, "resource": "limits.cpu"}
        return {"name": "CPUS", "valueFrom": {"resourceFieldRef": reference}}

    assert trainer(converted(pytorchReplicaSpecs=replicas(env=[cpus("pytorch")])))["env"] == [cpus("trainer")]
    assert trainer(converted(pytorchReplicaSpecs=replicas(env=[cpus("other")])))["env"] == [cpus("other")]


def test_a_job_with_generateName_gets_a_name() -> None:
    """A file with generateName has no name. The job must get a name made from it, and not be refused."""
    result = checked(room.convert(pytorchjob() | {"metadata": {"generateName": "mnist-", "namespace": "a"}}, []))
    assert result.metadata == {"name": "mnist", "namespace": "a"}
    assert "change it for each job" in remarks(result)["metadata.generateName"]


def test_the_suspension_that_a_queue_has_written_is_dropped() -> None:
    """`suspend: true`, as in Kubeflow's example for Kueue, must be dropped, because nobody would resume the DDPJob."""
    labelled = {"name": "x", "labels": {"kueue.x-k8s.io/queue-name": "main"}}
    pytorch = pytorchjob(runPolicy={"suspend": True}) | {"metadata": labelled}
    train = yaml.safe_load(TRAINJOB) | {"metadata": labelled}
    train["spec"]["suspend"] = True
    for body in (pytorch, train):
        result = checked(room.convert(body, [yaml.safe_load(RUNTIME)]))
        assert "suspend" not in result.spec
        (told,) = (text for path, text in remarks(result).items() if path.endswith("suspend"))
        assert "would wait for ever" in told
        assert "gang.kueue.enabled" in remarks(result)["metadata.labels.kueue.x-k8s.io/queue-name"]
        assert result.metadata["labels"] == labelled["labels"]
    wrong = pytorchjob(runPolicy={"suspend": True}) | {"metadata": {"name": "x", "labels": 3}}
    assert room.convert(wrong, []).spec["suspend"] is True, "wrong labels are for the API server to name"


def replicas(policy: str | None = None, **container: Any) -> dict[str, Any]:
    given: dict[str, Any] = pytorchjob()["spec"]["pytorchReplicaSpecs"]
    for group in given.values():
        group["restartPolicy"] = policy or group["restartPolicy"]
        group["template"]["spec"]["containers"][0] |= container
    return given


def test_restart_policies_become_limits_and_rules() -> None:
    assert converted(pytorchReplicaSpecs=replicas("Never")).spec["backoffLimit"] == 0
    assert "backoffLimit" not in converted().spec
    assert "backoffLimit: 3" in remarks(converted())["spec.pytorchReplicaSpecs.Master.restartPolicy"]
    (rule,) = converted(pytorchReplicaSpecs=replicas("ExitCode")).spec["failurePolicy"]["rules"]
    codes = set(rule["onExitCodes"]["values"])
    assert rule["action"] == "FailJob"
    assert (1 in codes, 127 in codes, 128 in codes, 137 in codes) == (True, True, False, False)
    assert 75 not in codes, "a rank that has saved its state ends with it, and must be resumed"
    kept_trying = remarks(converted(pytorchReplicaSpecs=replicas("ExitCode")))
    assert "backoffLimit: 3" in kept_trying["spec.pytorchReplicaSpecs.Master.restartPolicy"], "there it has no limit"


def test_elastic_restarts_count_if_there_is_no_backoff_limit() -> None:
    assert converted(elasticPolicy={"maxRestarts": 9}).spec["backoffLimit"] == 9
    assert converted(elasticPolicy={"maxRestarts": 9}, runPolicy={"backoffLimit": 1}).spec["backoffLimit"] == 1


@pytest.mark.parametrize(
    ("policy", "words", "made", "named"),
    [
        ({"minReplicas": 2}, "torchrun x.py", (2, 4), ""),
        ({"minReplicas": 1, "maxReplicas": 9}, "torchrun x.py", (1, 9), "elasticPolicy.minReplicas"),
        ({"minReplicas": 6}, "torchrun x.py", (None, 6), "elasticPolicy.minReplicas"),
        ({"minReplicas": 1, "maxReplicas": 9}, "ddprun x.py", (1, 9), "elasticPolicy.minReplicas"),
        ({"minReplicas": 2}, "python x.py", (None, 4), "elasticPolicy.minReplicas"),
        ({}, "torchrun --nnodes=2:4 x.py", (2, 4), ""),
        ({}, "torchrun --nnodes 2:6 x.py", (2, 6), "pytorchReplicaSpecs.Worker.replicas"),
        ({"minReplicas": 1, "maxReplicas": 9}, "torchrun --nnodes 2:4 x.py", (2, 4), ""),
        ({"minReplicas": 1, "maxReplicas": 64}, "torchrun --nnodes=4 x.py", (None, 4), "elasticPolicy.minReplicas"),
        ({"minReplicas": 1, "maxReplicas": 9}, "torchrun --nnodes=$(N) x.py", (1, 9), "elasticPolicy.minReplicas"),
    ],
)
def test_the_nodes_of_an_elastic_job_are_a_range(policy: Any, words: str, made: Any, named: str) -> None:
    """--nnodes in the command must win over elasticPolicy: AWS' FSDP examples have --nnodes=4 and maxReplicas:
    64."""
    result = converted(elasticPolicy=policy, pytorchReplicaSpecs=replicas(command=words.split()))
    assert (result.spec.get("minNodes"), result.spec["nodes"]) == made
    told = [name for name in remarks(result) if "elasticPolicy" in name or name.endswith(".replicas")]
    assert told == ([f"spec.{named}"] if named else [])


def test_differences_for_an_elastic_job_are_reported_with_both_numbers() -> None:
    more = remarks(converted(elasticPolicy={"minReplicas": 1, "maxReplicas": 9}))["spec.elasticPolicy.minReplicas"]
    assert more == "the job requests 9 pods at once; the source began with 4"
    none = converted(elasticPolicy={"minReplicas": 2}, pytorchReplicaSpecs=replicas(command=["python", "train.py"]))
    assert "needs torchrun" in remarks(none)["spec.elasticPolicy.minReplicas"]


ELASTIC_RUNTIME = RUNTIME.replace("torch: {", "torch: {elasticPolicy: {minNodes: 2, maxNodes: 6}, ")


@pytest.mark.parametrize(
    ("runtime", "command", "made"),
    [
        (ELASTIC_RUNTIME, "torchrun train.py", (2, 6)),
        (ELASTIC_RUNTIME.replace("minNodes: 2, ", ""), "torchrun train.py", (None, 6)),
        (ELASTIC_RUNTIME.replace(", maxNodes: 6", ""), "torchrun train.py", (2, 4)),
        (RUNTIME, "torchrun --nnodes=1:4 train.py", (1, 4)),
        (RUNTIME, "torchrun --nnodes=2 train.py", (None, 4)),
        (ELASTIC_RUNTIME, "torchrun --nnodes=4 train.py", (None, 4)),
        (ELASTIC_RUNTIME, "sh -c|exec torchrun --nnodes=4 train.py", (None, 4)),
        (RUNTIME, "sh -c|exec torchrun --nnodes=1:3 train.py", (1, 3)),
    ],
)
def test_a_trainjob_with_a_range_is_elastic(runtime: str, command: str, made: Any) -> None:
    """An elastic job must lose --nnodes=2 from the command, because it would be refused with this option."""
    words = " ".join(command.split("|")[:1]).split() + command.split("|")[1:]
    result = trainjob(runtime, trainer={**yaml.safe_load(TRAINJOB)["spec"]["trainer"], "command": words})
    assert (result.spec.get("minNodes"), result.spec["nodes"]) == made


@pytest.mark.parametrize(
    ("resources", "command", "made"),
    [
        ({"requests": {"cpu": "2"}, "limits": {"cpu": "4"}}, "torchrun train.py", 2),
        ({"limits": {"cpu": "3500m"}}, "torchrun train.py", 4),
        ({"requests": {"cpu": 2}}, "torchrun --nproc-per-node=3 train.py", None),
        ({"requests": {"cpu": 2}}, "python train.py", None),
        ({"requests": {"cpu": 2}, "limits": {"nvidia.com/gpu": 2}}, "torchrun train.py", None),
        ({"requests": {"memory": "1Gi"}}, "torchrun train.py", None),
    ],
)
def test_a_trainjob_without_gpus_gets_a_process_for_each_cpu(resources: Any, command: str, made: int | None) -> None:
    """A TrainJob without GPUs gets a process per CPU, as in Kubeflow (pkg/runtime/framework/plugins/torch)."""
    result = trainjob(trainer={"image": "i", "command": command.split(), "resourcesPerNode": resources})
    assert result.spec.get("nprocPerNode") == made


def test_a_pytorchjob_without_gpus_gets_a_remark_about_its_number_of_processes() -> None:
    """The remark must name the number of processes, for which Kubeflow uses the number of the machine's CPUs."""
    without = replicas(resources={"limits": {"cpu": 8}})
    assert (
        "set spec.nprocPerNode"
        in remarks(converted(nprocPerNode=None, pytorchReplicaSpecs=without))["spec.nprocPerNode"]
    )
    assert "spec.nprocPerNode" not in remarks(converted(nprocPerNode=None))
    assert "spec.nprocPerNode" not in remarks(converted(nprocPerNode="2", pytorchReplicaSpecs=without))


def test_options_that_continue_in_args_are_removed_too() -> None:
    """Launcher options in args must be removed like those in command, because they would contradict spec.nodes."""
    for first, args in ((["torchrun"], "--nnodes=1:4 --tee 3 x.py"), (["tini"], "torchrun --nnodes=1:4 --tee 3 x.py")):
        result = converted(pytorchReplicaSpecs=replicas(command=first, args=args.split()))
        made = trainer(result)
        assert [*made["command"], *made.get("args", [])][-4:] == ["torchrun", "--tee", "3", "x.py"]
        assert (result.spec["minNodes"], result.spec["nodes"]) == (1, 4)


def test_a_worker_that_differs_from_the_master_is_named_field_by_field() -> None:
    """A DDPJob has one template. Each field in which the Worker differs from the Master must be named."""
    given = replicas()
    given["Worker"]["template"] = copy.deepcopy(given["Master"]["template"])
    given["Worker"]["template"]["spec"]["containers"][0]["image"] = "registry.example/mnist:2"
    named = [name for name in remarks(converted(pytorchReplicaSpecs=given)) if "template" in name]
    assert named == ["spec.pytorchReplicaSpecs.Worker.template.spec.containers[0].image"]


def test_options_that_identify_the_machine_are_removed_from_the_command() -> None:
    """--nnodes=1:3 and a rendezvous at a fixed address must be removed from the command: they fit only the old job."""
    words = "torchrun --nnodes=1:3 --rdzv-backend c10d --rdzv_endpoint=h:1 --tee 3 train.py --nnodes 9".split()
    result = converted(pytorchReplicaSpecs=replicas(command=words))
    assert trainer(result)["command"] == ["torchrun", "--tee", "3", "train.py", "--nnodes", "9"]
    assert any("--nnodes=1:3 --rdzv-backend c10d" in text for text in remarks(result).values())


def test_plain_python_with_several_gpus_stays_one_process_per_node() -> None:
    """Plain python with several GPUs must stay one process per node, because its RANK is the node's number."""
    result = converted(nprocPerNode=None, pytorchReplicaSpecs=replicas(command=["python", "train.py"]))
    assert result.spec["nprocPerNode"] == 1
    assert "nprocPerNode" not in converted(nprocPerNode=None).spec


@pytest.mark.parametrize(
    ("spec", "path", "sentence"),
    [
        ({"pytorchReplicaSpecs": {}}, "spec.pytorchReplicaSpecs", "neither a Master nor a Worker"),
        ({"pytorchReplicaSpecs": {"PS": {}}}, "spec.pytorchReplicaSpecs.PS", "Master and Worker"),
        (
            {"runPolicy": {"backoffLimit": "x"}},
            "spec.runPolicy.backoffLimit",
            'must be a whole number of at least 0, is "x"',
        ),
        ({"runPolicy": []}, "spec.runPolicy", "must be a mapping, is a list"),
        ({"nprocPerNode": "many"}, "spec.nprocPerNode", "must be auto, cpu, gpu or a number"),
        ({"elasticPolicy": {"minReplicas": 4, "maxReplicas": 3}}, "spec.elasticPolicy.minReplicas", "must be"),
        ({"elasticPolicy": {"minReplicas": 0, "maxReplicas": 3}}, "spec.elasticPolicy.minReplicas", "must be"),
    ],
)
def test_jobs_that_cannot_be_converted_are_refused_at_the_field(spec: dict[str, Any], path: str, sentence: str) -> None:
    with pytest.raises(ConvertError, match=sentence) as raised:
        converted(**spec)
    assert validation.dotted(raised.value.path) == path


@pytest.mark.parametrize("groups", [("Master", "Worker"), ("Master",), ("Worker",)])
def test_the_port_of_the_master_service_is_named_and_not_compared(groups: tuple[str, ...]) -> None:
    """A remark must name the dropped port. A port that only the Master has must not count as a difference."""
    other = {"name": "metrics", "containerPort": 8000}
    given = copy.deepcopy(replicas(ports=[other]))
    given["Worker"]["template"] = copy.deepcopy(given["Master"]["template"])
    for name in groups:
        ports = given[name]["template"]["spec"]["containers"][0]["ports"]
        ports.append({"name": "pytorchjob-port", "containerPort": 12345})
    result = converted(pytorchReplicaSpecs=given)
    assert trainer(result)["ports"] == [other]
    named = {name: text for name, text in remarks(result).items() if "ports" in name}
    assert list(named) == [f"spec.pytorchReplicaSpecs.{groups[0]}.template.spec.containers[0].ports"]
    assert "pytorchjob-port: not needed: the job sets MASTER_PORT" in "".join(named.values())


def test_replica_types_are_case_insensitive_and_may_occur_once() -> None:
    given = replicas()
    assert converted(pytorchReplicaSpecs={"MASTER": given["Master"], "worker": given["Worker"]}).spec["nodes"] == 4
    for twice in ({"Master": given["Master"], "MASTER": given["Master"]}, {"chief": given["Master"]}):
        with pytest.raises(ConvertError, match="the replicas Master and Worker, each once"):
            converted(pytorchReplicaSpecs=twice)


# ---- the address of rank 0


def told(result: Converted) -> str:
    return "\n".join(remarks(result).values())


def test_the_name_of_the_master_in_a_word_or_shell_script_becomes_the_variable_of_the_job() -> None:
    """The name mnist-master-0 must become $MASTER_ADDR, because a DDPJob has no Service of this name."""
    words = ["python", "train.py", "--dist-url=tcp://mnist-master-0:23456", "--host", "mnist-master-0.team-a.svc"]
    result = converted(pytorchReplicaSpecs=replicas(command=words))
    assert trainer(result)["command"][2:] == ["--dist-url=tcp://$(MASTER_ADDR):23456", "--host", "$(MASTER_ADDR)"]
    assert "mnist-master-0 is now $(MASTER_ADDR), which the job sets" in told(result)
    script = "torchrun --master_addr=mnist-master-0 train.py --url 'tcp://mnist-master-0:1'"
    for given in ({"command": ["sh", "-c", script]}, {"command": ["/bin/bash", "-ec"], "args": [script]}):
        result = converted(pytorchReplicaSpecs=replicas(**given))
        made = trainer(result).get("args", trainer(result)["command"])[-1]
        assert made == "torchrun --master_addr=$MASTER_ADDR train.py --url 'tcp://$(MASTER_ADDR):1'"
        assert "mnist-master-0 is now $(MASTER_ADDR), which the job sets" in told(result)


def test_variables_set_by_the_job_are_dropped_and_a_master_name_becomes_a_reference() -> None:
    """Variables that the job sets must be dropped from env: WORLD_SIZE "9" would make rank 0 wait for missing ranks."""
    given = {"MASTER_ADDR": "mnist-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "9", "RANK": "0", "LR": "1"}
    env = [{"name": name, "value": value} for name, value in given.items()]
    url = {"name": "URL", "value": "tcp://mnist-master-0:23456"}
    result = converted(pytorchReplicaSpecs=replicas(env=[*env, url]))
    assert trainer(result)["env"] == [
        {"name": "LR", "value": "1"},
        {"name": "URL", "value": "tcp://$(MASTER_ADDR):23456"},
    ]
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"):
        assert f"{name}: not needed: the job sets it itself" in told(result)
    assert "env" not in trainer(converted(pytorchReplicaSpecs=replicas(env=env[:4])))


def test_a_variable_whose_name_is_a_list_is_refused_without_a_traceback() -> None:
    body = pytorchjob(pytorchReplicaSpecs=replicas(env=[{"name": ["a"], "value": "1"}]))
    assert "env[0].name: must be text, is a list" in str(run("-", stdin=yaml.safe_dump(body)).exception)
    assert "not converted: its kind is 3" in run("-", stdin=f"kind: 3\n---\n{PYTORCHJOB}").stderr


def test_a_name_without_a_replacement_is_reported_at_its_line() -> None:
    """A Master's name must be reported if nothing can replace it: in an init container, or without spec.dns."""
    given = replicas(command=["python", "x.py", "--peer=mnist-worker-1", "/mnist-master-0", "a/mnist-master-0.log"])
    waits = ["sh", "-c", "until nslookup mnist-master-0; do sleep 1; done"]
    given["Master"]["template"]["spec"]["initContainers"] = [{"name": "wait", "image": "i", "command": waits}]
    result = converted(pytorchReplicaSpecs=given)
    assert trainer(result)["command"][2:] == ["--peer=mnist-worker-1", "/mnist-master-0", "a/mnist-master-0.log"]
    path = "spec.pytorchReplicaSpecs.Master.template.spec"
    assert "with spec.dns: all" in remarks(result)[f"{path}.containers[0].command[2]"]
    assert "mnist-master-0: a DDPJob has no such name" in remarks(result)[f"{path}.initContainers[0].command[2]"]


def test_without_a_master_the_first_worker_is_rank_0() -> None:
    given = replicas(command=["python", "x.py", "tcp://mnist-worker-0:1"])
    result = converted(pytorchReplicaSpecs={"Worker": given["Worker"]})
    assert trainer(result)["command"][2] == "tcp://$(MASTER_ADDR):1"
    assert result.comments["nodes"] == "3 Worker; the first of them is node 0"


def test_the_name_of_the_first_pod_of_a_trainjob_becomes_the_variable_of_the_job() -> None:
    """The name of a JobSet's first pod must become MASTER_ADDR, because no pod of a DDPJob has this name."""
    env = [{"name": "MASTER_ADDR", "value": "gpt-node-0-0.gpt"}, {"name": "LR", "value": "1"}]
    words = ["python", "x.py", "--url=tcp://gpt-node-0-0.gpt:29500", "--peer=gpt-node-0-1.gpt"]
    result = trainjob(trainer={"command": words, "env": env})
    assert trainer(result)["command"][2:] == ["--url=tcp://$(MASTER_ADDR):29500", "--peer=gpt-node-0-1.gpt"]
    assert "MASTER_ADDR" not in {entry["name"] for entry in trainer(result)["env"]}
    assert "MASTER_ADDR: not needed" in remarks(result)["spec.trainer.env"]
    assert "gpt-node-0-1.gpt: a DDPJob has no such name" in remarks(result)["spec.trainer.command"]


# ---- TrainJob


def test_a_trainjob_and_its_runtime_become_one_job() -> None:
    result = trainjob()
    assert (result.spec["nodes"], result.spec["nprocPerNode"], result.spec["backoffLimit"]) == (4, 8, 2)
    assert not any("numProcPerNode" in path for path in remarks(result)), "it goes before the runtime's"
    assert result.spec["startDeadlineSeconds"] == 120
    container = trainer(result)
    assert (container["name"], container["image"]) == ("trainer", "registry.example/gpt:1")
    assert container["command"] + container["args"] == ["torchrun", "train.py", "--epochs", "5"]
    assert {entry["name"]: entry["value"] for entry in container["env"]} == {
        "NCCL_DEBUG": "WARN", "HOME": "/tmp", "LR": "0.1"
    }  # fmt: skip
    assert result.spec["template"]["spec"]["tolerations"] == [{"key": "gpu", "operator": "Exists"}]


def _patched(pod: dict[str, Any], name: str = "node") -> Iterator[dict[str, Any]]:
    job = {"name": name, "template": {"spec": {"template": {"spec": pod}}}}
    template = {"spec": {"replicatedJobs": [job]}}
    yield {"runtimePatches": [{"manager": "me", "trainingRuntimeSpec": {"template": template}}]}
    yield {"podTemplateOverrides": [{"targetJobs": [{"name": name}], "spec": pod}]}
    yield {"podSpecOverrides": [{"targetJobs": [{"name": name}], **pod}]}


def test_parts_of_a_patch_that_do_not_concern_pods_are_named() -> None:
    """Kubeflow's example sets labels and annotations of the JobSet in a patch. They must be named as not converted."""
    job = {"name": "node", "template": {"metadata": {"labels": {"a": "b"}}, "spec": {}}}
    template = {"metadata": {"labels": {"team": "ml"}}, "spec": {"replicatedJobs": [job]}}
    told = remarks(trainjob(runtimePatches=[{"manager": "me", "trainingRuntimeSpec": {"template": template}}]))
    path = "spec.runtimePatches[0].trainingRuntimeSpec.template"
    assert "set it in metadata of the job" in told[f"{path}.metadata"]
    assert f"{path}.spec.replicatedJobs[0].template.metadata" in told


def test_parts_of_a_runtime_outside_its_pods_are_named() -> None:
    """Labels for billing, a Job that others wait for, and a number of restarts must be named as not converted."""
    own = yaml.safe_load(
        ELASTIC_RUNTIME.replace("torch: {elasticPolicy: {", "torch: {elasticPolicy: {maxRestarts: 5, ")
    )
    of_job_set = own["spec"]["template"]
    of_job_set |= {"metadata": {"labels": {"team": "ml"}, "annotations": {"note": "x"}}}
    of_job_set["spec"] |= {"failurePolicy": {"maxRestarts": 7}}
    (job,) = of_job_set["spec"]["replicatedJobs"]
    job |= {"dependsOn": [{"name": "data", "status": "Complete"}], "replicas": 1, "groupName": "default"}
    job["template"]["metadata"] |= {"annotations": {"note": "y"}}
    job["template"]["metadata"]["labels"]["cost"] = "a"
    job["template"]["spec"] |= {"activeDeadlineSeconds": 100}
    job["template"]["spec"]["template"]["spec"]["restartPolicy"] = "OnFailure"
    result = trainjob(yaml.safe_dump(own))
    named, path = remarks(result), "runtime.spec.template"
    of_job = f"{path}.spec.replicatedJobs[0]"
    assert result.spec["backoffLimit"] == 5
    assert "7 restarts of the JobSet" in named[f"{path}.spec.failurePolicy.maxRestarts"]
    assert named[f"{path}.metadata.labels"].startswith("team: not set on the pods of the source: set it in metadata")
    assert named[f"{of_job}.template.metadata.labels"].startswith("cost: not set on the pods of the source")
    assert {f"{path}.metadata.annotations", f"{of_job}.template.metadata.annotations"} <= named.keys()
    assert "waits for no other Job" in named[f"{of_job}.dependsOn"]
    assert '"OnFailure" restarts one container' in named[f"{of_job}.template.spec.template.spec.restartPolicy"]
    assert "limits all together" in named[f"{of_job}.template.spec.activeDeadlineSeconds"]
    assert not any(name.startswith("runtime.spec.template") for name in remarks(trainjob()))


def test_patches_of_every_version_change_the_pod_as_kubernetes_merges() -> None:
    """A patch must be merged as Kubernetes does: one with its own volume must not replace the runtime's containers."""
    volume = {"name": "data", "persistentVolumeClaim": {"claimName": "data"}}
    mount = {"name": "data", "mountPath": "/data"}
    pod = {"volumes": [volume], "containers": [{"name": "node", "volumeMounts": [mount]}], "nodeSelector": {"a": "b"}}
    for spec in _patched(pod):
        made = trainjob(**spec).spec["template"]["spec"]
        (container,) = made["containers"]
        assert (made["volumes"], made["nodeSelector"]) == ([volume], {"a": "b"})
        assert (container["volumeMounts"], container["image"]) == ([mount], "registry.example/gpt:1")


def test_a_patch_of_another_job_is_named_and_not_applied() -> None:
    for spec in _patched({"nodeSelector": {"a": "b"}}, "dataset-initializer"):
        result = trainjob(**spec)
        assert "nodeSelector" not in result.spec["template"]["spec"]
        assert any("another Job" in text for text in remarks(result).values())


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ({"initializer": {"dataset": {"storageUri": "hf://x"}}}, "spec.initializer"),
        ({"labels": {"a": "b"}}, "spec.labels"),
        ({"future": 1}, "spec.future"),
        ({}, "runtime.spec.podGroupPolicy.coscheduling"),
    ],
)
def test_fields_of_a_trainjob_without_a_counterpart_are_named(spec: dict[str, Any], named: str) -> None:
    assert named in remarks(trainjob(**spec))


def test_the_error_about_a_missing_runtime_tells_how_to_get_it() -> None:
    with pytest.raises(ConvertError, match="kubectl get clustertrainingruntime torch-distributed -o yaml"):
        room.convert(yaml.safe_load(TRAINJOB), [])


def test_a_runtime_for_another_purpose_is_refused() -> None:
    with pytest.raises(ConvertError, match="mpi is not PyTorch DDP"):
        trainjob(RUNTIME.replace("torch: {numProcPerNode: auto}", "mpi: {numProcPerNode: 2}"))


# ---- command lines


@pytest.mark.parametrize(
    ("line", "nodes", "nproc", "made"),
    [
        ("torchrun --nnodes 2 --nproc-per-node=4 train.py --lr 1", 2, 4, "torchrun train.py --lr 1"),
        ("torchrun --nnodes=1:4 --rdzv-backend=c10d --rdzv-endpoint=h:29400 train.py", 4, None, "torchrun train.py"),
        ("torchrun --standalone --nproc_per_node=gpu train.py", 1, None, "torchrun train.py"),
        ("python -m torch.distributed.launch --nnodes=2 --node_rank=0 --master_addr=h train.py", 2, None,
         "python -m torch.distributed.launch train.py"),
        ("ddprun --nnodes 2 --node-rank 1 -m package.train", 2, None, "ddprun -m package.train"),
        ("python train.py --epochs 5", 1, None, "python train.py --epochs 5"),
        ("accelerate launch --multi_gpu --num_machines 2 --num_processes 8 --machine_rank 0 train.py x", 2, 4,
         "torchrun train.py x"),
        ("accelerate launch train.py", 1, None, "torchrun train.py"),
    ],
)  # fmt: skip
def test_a_command_line_keeps_everything_except_what_identifies_the_machine(line, nodes, nproc, made):
    result = of_command(line)
    assert (result.spec["nodes"], result.spec.get("nprocPerNode")) == (nodes, nproc)
    assert trainer(result)["command"] == made.split()


@pytest.mark.parametrize(
    ("words", "made"),
    [
        (["uv", "run", "torchrun", "--nnodes", "2", "train.py"], ["uv", "run", "torchrun", "train.py"]),
        (
            ["conda", "run", "-n", "e", "accelerate", "launch", "--num_machines", "2", "train.py"],
            ["conda", "run", "-n", "e", "torchrun", "train.py"],
        ),
        (["python", "-m", "accelerate.commands.launch", "--num_machines=2", "train.py"], ["torchrun", "train.py"]),
        (["uv", "run", "-n", "torchrun", "--nnodes", "2", "train.py"], ["uv", "run", "-n", "torchrun", "train.py"]),
        (
            ["sudo", "-n", "conda", "run", "-n", "ray", "torchrun", "--nnodes", "2", "train.py"],
            ["sudo", "-n", "conda", "run", "-n", "ray", "torchrun", "train.py"],
        ),
        (["bash", "-c", "exec torchrun --nnodes 2 --node_rank 0 train.py"], ["torchrun", "train.py"]),
        (["sh", "-c", "cd /x && torchrun --nnodes=2 train.py"], ["sh", "-c", "cd /x && torchrun --nnodes=2 train.py"]),
    ],
)
def test_a_command_after_a_wrapper_program_is_read(words: list[str], made: list[str]) -> None:
    """In `uv run torchrun …` the launcher is torchrun. `uv` must not be taken for a script."""
    for result in (run("--", *words), run(*words)):
        job = yaml.safe_load(result.stdout)
        assert (job["spec"]["nodes"], job["metadata"]["name"]) == (2, "train")
        assert job["spec"]["template"]["spec"]["containers"][0]["command"] == made


@pytest.mark.parametrize(
    "words",
    [
        ["bash", "-c", "pip install lightning ray && torchrun --nnodes 2 train.py"],
        ["conda", "run", "-n", "ray", "torchrun", "--nnodes", "2", "train.py"],
        ["torchrun", "--nnodes", "2", "train.py", "--sampler", "tune"],
        ["bash", "-c", "mpirun --version && horovodrun -cb && torchrun --nnodes 2 train.py"],
    ],
)
def test_a_package_folder_or_environment_named_like_a_launcher_is_not_a_launcher(words: list[str]) -> None:
    """A package, folder or environment named like a launcher must not count as one, as in `pip install lightning`."""
    assert checked(command.convert(words)).spec["nodes"] == 2


@pytest.mark.parametrize(
    "line", ["torchrun", "torchrun --nnodes 2", "torchrun --help", "python -m torch.distributed.run --nnodes=2"]
)
def test_a_launcher_without_a_script_is_refused(line: str) -> None:
    """A launcher without a script must be refused, because its job would start nothing."""
    with pytest.raises(ConvertError, match=r"(torchrun|torch\.distributed\.run) has no script: what does it start\?"):
        of_command(line)


@pytest.mark.parametrize(
    ("script", "made", "named"),
    [
        (  # variables and names of Volcano's pods
            "cd /w && torchrun --nnodes=3 --node_rank=$VK_TASK_INDEX --master_addr ddp-worker-0.ddp "
            "--master_port='29500' t.py",
            "cd /w && torchrun --nnodes=3 --node_rank=$NODE_RANK --master_addr $MASTER_ADDR --master_port=$MASTER_PORT "
            "t.py",
            "--node_rank=$VK_TASK_INDEX is now $NODE_RANK, --master_addr ddp-worker-0.ddp is now $MASTER_ADDR",
        ),
        (  # PyTorch's example for Slurm; $RANDOM would differ by node
            "torchrun --nnodes 3 --rdzv_id $RANDOM --rdzv_backend c10d \\\n  --rdzv_endpoint \\\n "
            "$head_node_ip:29500 t.py",
            "torchrun --nnodes 3 --rdzv_id $PET_RDZV_ID --rdzv_backend c10d \\\n  --rdzv_endpoint \\\n "
            "$MASTER_ADDR:$MASTER_PORT t.py",
            "--rdzv_id $RANDOM is now $PET_RDZV_ID",
        ),
        (  # the options continue after a command substitution
            "set -e; torchrun --master_addr=$(scontrol show hostnames | head -n 1) --nnodes=3 t.py",
            "set -e; torchrun --master_addr=$MASTER_ADDR --nnodes=3 t.py",
            "is now $MASTER_ADDR",
        ),
        (
            "export MASTER_ADDR=$(head -1 /etc/volcano/worker.host); torchrun --nnodes=3 t.py",
            "export MASTER_ADDR=$(head -1 /etc/volcano/worker.host); torchrun --nnodes=3 t.py",
            "MASTER_ADDR: the job sets it, but the script assigns another value: remove the assignment",
        ),
    ],
)
def test_the_rendezvous_in_a_shell_script_becomes_that_of_the_job(script: str, made: str, named: str) -> None:
    """Rendezvous options in a shell script must be replaced, or the nodes wait for each other until the timeout."""
    result = command.convert(["bash", "-c", script])
    assert trainer(result)["command"] == ["bash", "-c", made]
    assert result.spec["nodes"] == 3
    assert [r.text for r in result.remarks if named in r.text] != []


@pytest.mark.parametrize(
    "script",
    [
        'cd /w && torchrun --nnodes=2 --node_rank=${NODE_RANK} --master_addr="$MASTER_ADDR" t.py',
        "MASTER_PORT=${MASTER_PORT:-29500} torchrun --nnodes=2 --rdzv-endpoint=$MASTER_ADDR:29400 t.py",
    ],
)
def test_a_shell_script_that_reads_the_variables_of_the_job_is_not_changed(script: str) -> None:
    result = command.convert(["bash", "-c", script], image="i")
    assert trainer(result)["command"] == ["bash", "-c", script]
    assert result.remarks == []


def test_variables_of_another_launcher_are_named() -> None:
    """Another launcher's variables must be named. In a pod they are empty, so each node would have its own rank 0."""
    script = "torchrun --nnodes=3 t.py --local_id=$SLURM_LOCALID; echo $VC_TASK_INDEX"
    stderr = run("--image", "i", "--", "bash", "-c", script).stderr
    assert "SLURM_LOCALID: neither Slurm nor MPI starts the job" in stderr
    assert "VC_TASK_INDEX: neither Slurm" in stderr


def test_a_number_of_processes_that_only_the_pod_knows_stays_unset() -> None:
    """A number that only the pod knows, as in `--nproc_per_node=$(nvidia-smi -L | wc -l)`, leaves the field unset."""
    script = "N=$(nvidia-smi -L | wc -l); torchrun --nnodes=2 --nproc_per_node=$N x.py"
    result = command.convert(["bash", "-c", script], image="i")
    assert "nprocPerNode" not in result.spec
    assert trainer(result)["command"] == ["bash", "-c", script]
    (remark,) = result.remarks
    assert remark.text == (
        "--nproc-per-node=$N: known only in the pod; set spec.nprocPerNode to the same number, or the GPUs in "
        "resources.limits"
    )


def test_a_shell_script_without_a_launcher_becomes_one_node() -> None:
    result = checked(command.convert(["bash", "-c", "source env.sh; python my_train.py --lr $LR"]))
    assert (result.spec["nodes"], result.metadata["name"]) == (1, "my-train")


@pytest.mark.parametrize(
    ("words", "named", "started"),
    [
        (["mpirun", "-np", "4", "python", "train.py", "--lr", "1"], "mpirun", "train.py --lr 1"),
        (["srun", "python", "train.py"], "srun", "train.py"),
        (["timeout", "9", "/usr/bin/mpiexec", "-n", "2", "python", "x.py"], "mpiexec", "x.py"),
        (["bash", "-c", "cd /x; mpirun -np 4 python x.py"], "mpirun", "x.py"),
        (["bash", "-c", "pip install ray\nA=1 nohup srun --mpi none torchrun x.py"], "srun", "x.py"),
        (["sudo", "-E", "mpirun", "python", "x.py"], "mpirun", "x.py"),
        (["uv", "run", "-n", "mpirun", "python", "x.py"], "mpirun", "x.py"),
        (["ray", "stop"], "ray", "train.py"),
        (["bash", "train.sh"], "bash", "train.py"),
        (["./train.sh"], "train.sh", "train.py"),
        (["poetry", "run", "train"], "poetry", "train.py"),
    ],
)
def test_a_command_that_starts_the_ranks_of_all_nodes_is_refused_with_the_alternative(words, named, started):
    """A command that starts all nodes, such as mpirun, must be refused with the alternative: one command per node."""
    said = str(run("--", *words).exception)
    assert said.startswith(f"command: {named} cannot be converted: `ddpjob convert` reads torchrun, ddprun")
    assert said.endswith(f"ddpjob convert -- torchrun --nnodes NODES --nproc-per-node RANKS {started}")


def test_a_yaml_file_after_the_dashes_is_recognized_as_a_file() -> None:
    assert "job.yaml is a file: remove the -- before it" in str(run("--", "job.yaml").exception)
    assert "' is not closed" in str(run("--", "bash", "-c", "python 'x.py").exception)


@pytest.mark.parametrize(("nnodes", "least"), [("1:4", 1), ("3:4", 3), ("4:4", None), ("4", None)])
def test_a_command_line_with_a_range_is_elastic(nnodes: str, least: int | None) -> None:
    result = of_command(f"torchrun --nnodes {nnodes} train.py")
    assert (result.spec.get("minNodes"), result.spec["nodes"]) == (least, 4)


def test_settings_of_accelerate_for_its_ranks_become_variables() -> None:
    """Accelerate's settings must become variables: without --mixed_precision the training would use float32."""
    line = "NCCL_DEBUG=INFO accelerate launch --mixed_precision bf16 --gradient_accumulation_steps=4 train.py"
    assert trainer(of_command(line))["env"] == [
        {"name": "NCCL_DEBUG", "value": "INFO"},
        {"name": "ACCELERATE_MIXED_PRECISION", "value": "bf16"},
        {"name": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "value": "4"},
    ]


def test_words_that_yaml_would_read_as_numbers_or_true_stay_words() -> None:
    """A number such as 1e-3 in `--lr 1e-3` must be quoted, because ddpjob run and kubectl refuse numbers as words."""
    words = ["torchrun", "train.py", "--lr", "1e-3", "y", "N", "08", "0o17", "1e3", "1:30", "on", "2026-01-01", "="]
    text = command.convert(words).to_yaml()
    read = yamlfile.read_job("x.yaml", None, text.encode()).data
    assert read["spec"]["template"]["spec"]["containers"][0]["command"] == words


@pytest.mark.parametrize(
    "script",
    [
        "set -e\ntorchrun \\\n  --nnodes=2 t.py\n",
        "\nif true; then\n\ttorchrun --nnodes=2 t.py\nfi\n\n",
        "  cd /w\ntorchrun --nnodes=2 t.py",
        "cat << E > t.py\nprint('ä—')  \n# \U0001f600 \x85 \u2028 \ufeff\nE\ntorchrun --nnodes=2 t.py",
        "#!/bin/sh\r\ntorchrun --nnodes=2 t.py\r\n",
        "torchrun --nnodes=2 $A t.py\n",
    ],
)
def test_a_multiline_script_is_unchanged_when_it_is_read_again(script: str) -> None:
    result = command.convert(["bash", "-c", script], image="i")
    read = yaml.safe_load(result.to_yaml())
    assert read["spec"]["template"]["spec"]["containers"][0]["command"] == ["bash", "-c", script]


def test_a_multiline_script_stays_multiline() -> None:
    """A script of several lines must keep them in the YAML, because one quoted line can hardly be edited."""
    text = command.convert(["bash", "-c", "set -e\ntorchrun \\\n  --nnodes=2 t.py\n"], image="i").to_yaml()
    assert "- |\n          set -e\n          torchrun \\\n            --nnodes=2 t.py\n" in text


def test_a_command_that_is_not_utf_8_is_refused() -> None:
    """A command with undecodable bytes must be refused. Otherwise the job would name a file that does not exist."""
    result = CliRunner().invoke(cli, ["convert", "--", "torchrun", "\udcff.py"])
    assert result.stdout == ""
    assert "not UTF-8" in str(result.exception)


@pytest.mark.parametrize("line", ["bash run.sh", "./run.sh --lr 1", "sh -x -e run.sh", "bash ./run.sh", "bash run"])
def test_a_shell_script_file_is_refused_with_the_argument_to_give_instead(line: str) -> None:
    with pytest.raises(ConvertError) as refused:
        of_command(line)
    file = next(word for word in line.split() if "run" in word)
    assert f", but not the shell script {file}: give the command in it that starts the training." in str(refused.value)


def test_the_job_is_named_after_the_script() -> None:
    names = {
        "torchrun my/Train_GPT.py": "train-gpt",
        "torchrun -m pack.train_it": "train-it",
        "torchrun 1.py": "job-1",
        "torchrun --standalone -m scripts.base_train -- --depth=24 --run=d24": "base-train",
        "torchrun --nproc_per_node 8 -m open_clip.main -- --lr 1e-3": "main",
        "python -u -m pkg.fit --lr 1e-3": "fit",
        "./Go.py 3": "go",
        "uv run python src/fit.py 1e-4": "fit",
        "accelerate launch -m a.b --x 5": "b",
        "torchrun /opt/bin/fairseq-train /data --lr 1": "fairseq-train",
        "torchrun --no-python python -m a.c --lr 1": "c",
        "python": "train",
    }
    assert {line: of_command(line).metadata["name"] for line in names} == names
    scripts = {
        "cd x && torchrun --nnodes 2 -m pkg.tr -- --run=d24; echo done.py": "tr",
        "pip install x; python prepare.py; exec torchrun fit.py a.py": "fit",
        "torchrun $SCRIPT --lr 1e-3": "train",
    }
    assert {text: command.convert(["bash", "-c", text]).metadata["name"] for text in scripts} == scripts


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            "python m.py --dist-url tcp://10.0.0.1:23456 --world-size 4 --rank 0 --lr 1",
            "--dist-url tcp://10.0.0.1:23456 --world-size 4 --rank 0: one machine's values, but all nodes would "
            "get them; write $(NODE_RANK), $(NNODES) and tcp://$(MASTER_ADDR):$(MASTER_PORT), and set spec.nodes",
        ),
        (
            "python t.py --num-machines=2 --machine-rank 1 --dist-url=tcp://node0:1",
            "--num-machines=2 --machine-rank 1 --dist-url=tcp://node0:1: one machine's values, but all nodes",
        ),
        ("torchrun t.py --init_method tcp://10.1.1.1:9", "--init_method tcp://10.1.1.1:9: one machine's values"),
        ("python t.py --nodes-file x --node_rank 0 --num_nodes 3", "--node_rank 0 --num_nodes 3: one machine's values"),
    ],
)
def test_options_for_one_of_several_machines_are_named(line: str, told: str) -> None:
    """Options such as --node_rank 0 must be named, because all nodes would wait at an address of another cluster."""
    for result in (of_command(line), command.convert(["bash", "-c", f"cd /w; {line}; true"])):
        assert [remark.text for remark in result.remarks if remark.text.startswith(told)]


@pytest.mark.parametrize("before", ["", "env ", "nohup env "])
def test_variables_for_one_of_several_machines_are_removed_and_named(before: str) -> None:
    """RANK=0 in env must be removed and named, because all nodes would wait for each other."""
    own = "RANK=0 WORLD_SIZE=4 MASTER_ADDR=10.0.0.1"
    result = of_command(f"{before}{own} LR=1 python m.py")
    words = [*before.split(), *(["LR=1"] if before else []), "python", "m.py"]
    assert trainer(result)["command"] == words
    assert trainer(result).get("env", []) == ([] if before else [{"name": "LR", "value": "1"}])
    told = [remark.text for remark in result.remarks]
    assert f"{own}: not needed: the job sets the rendezvous of each node" in told
    assert "WORLD_SIZE or NNODES of several machines: set spec.nodes to their number" in told


@pytest.mark.parametrize(
    "line",
    [
        "python m.py --multiprocessing-distributed --dist-url tcp://localhost:10001 --world-size 1 --rank 0",
        "python m.py --dist-url env:// --world-size -1 --rank -1",
        "python m.py --rank 16",
        "python m.py --world_size 4",
        "python m.py --rank $(NODE_RANK) --world-size $(NNODES) --dist-url tcp://$(MASTER_ADDR):$(MASTER_PORT)",
        "torchrun --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 t.py --lr 1",
    ],
)
def test_options_of_a_single_machine_are_kept(line: str) -> None:
    assert not [remark for remark in of_command(line).remarks if "one machine's own" in remark.text]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("accelerate launch --use_deepspeed train.py", "--use_deepspeed is not DDP"),
        ("accelerate launch --num_machines 2 --num_processes 3 train.py", "not a multiple"),
        ("accelerate launch --num_machines 2", "has no script"),
        ("accelerate config", "only `accelerate launch`"),
        ("torchrun --nnodes=many train.py", "must be a number of nodes"),
        ("torchrun --nnodes=4:1 train.py", "--nnodes=4:1: must be a number of nodes, or MIN:MAX as 1:4"),
        ("torchrun --nnodes=0:4 train.py", "must be a number of nodes"),
        (f"torchrun --nnodes={'9' * 5000} train.py", "must be a number of nodes"),
        ("A=b", "is empty"),
        (
            "torchrun --nnodes=$SLURM_NNODES x.py",
            "SLURM_NNODES: a variable that has no value here; give the number of nodes",
        ),
        ("torchrun --nnodes 2 --nproc-per-node=8x x.py", "--nproc-per-node must be auto, cpu, gpu or a number, is 8x"),
    ],
)
def test_a_command_line_that_cannot_be_converted_is_refused(line: str, sentence: str) -> None:
    with pytest.raises(ConvertError, match=sentence):
        of_command(line)


# ---- the command


def run(*arguments: str, stdin: str = "") -> Any:
    return CliRunner().invoke(cli, ["convert", *arguments], input=stdin, prog_name="ddpjob", standalone_mode=False)


def test_yaml_is_on_stdout_and_each_remark_has_its_line_on_stderr(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(PYTORCHJOB + "  runPolicy:\n    schedulingPolicy: {queue: research}\n")
    result = run(str(file))
    assert yaml.safe_load(result.stdout)["kind"] == "DDPJob"
    assert result.stdout.startswith("# Converted from the PyTorchJob mnist by `ddpjob convert`.\n")
    assert f"{file}:22: spec.runPolicy.schedulingPolicy.queue: a DDPJob has no queue; " in result.stderr


def test_a_pipe_with_several_jobs_gives_several_documents() -> None:
    result = run("-", stdin=f"{PYTORCHJOB}---\n{TRAINJOB}---\n{RUNTIME}")
    assert [job["metadata"]["name"] for job in yaml.safe_load_all(result.stdout)] == ["mnist", "gpt"]
    assert "stdin:" in result.stderr


def as_kubectl_prints(body: dict[str, Any]) -> dict[str, Any]:
    of_server = {"uid": "u", "resourceVersion": "7", "generation": 1, "creationTimestamp": "2031-03-05T07:11:13Z"}
    applied = {"kubectl.kubernetes.io/last-applied-configuration": "{}", "note": "mine"}
    metadata = {**body["metadata"], **of_server, "managedFields": [{"manager": "kubectl"}], "annotations": applied}
    for group in body["spec"].get("pytorchReplicaSpecs", {}).values():
        group["template"]["metadata"] = {"creationTimestamp": None}
    return {**body, "metadata": metadata, "status": {"startTime": "2031-03-05T07:11:14Z"}}


@pytest.mark.parametrize("kind", ["List", "PyTorchJobList"])
def test_a_list_that_kubectl_prints_is_read_item_by_item(kind: str) -> None:
    """Each item of a List must be read, because `kubectl get pytorchjobs -o yaml` prints a List."""
    items = [as_kubectl_prints(pytorchjob(runPolicy={"schedulingPolicy": {"queue": name}})) for name in "ab"]
    items[1]["metadata"]["name"] = "second"
    if kind != "List":  # the API server's own lists have items without a kind
        items = [{name: value for name, value in item.items() if name not in ("apiVersion", "kind")} for item in items]
    text = yaml.safe_dump({"apiVersion": "kubeflow.org/v1", "kind": kind, "items": items}, sort_keys=False)
    result = run("-", stdin=text)
    jobs = list(yaml.safe_load_all(result.stdout))
    own = {"namespace": "team-a", "annotations": {"note": "mine"}}
    assert [job["metadata"] for job in jobs] == [{"name": "mnist", **own}, {"name": "second", **own}]
    assert not any("status" in job or "metadata" in job["spec"]["template"] for job in jobs)
    lines = [n for n, line in enumerate(text.splitlines(), 1) if "queue:" in line]
    assert [f"stdin:{n}: spec.runPolicy.schedulingPolicy.queue: " in result.stderr for n in lines] == [True, True]


def test_a_list_may_contain_the_runtime_of_its_trainjobs_and_without_jobs_its_kinds_are_named() -> None:
    items = [yaml.safe_load(RUNTIME), yaml.safe_load(TRAINJOB)]
    of_list = {"apiVersion": "v1", "kind": "List"}
    assert "nodes: 4" in run("-", stdin=yaml.safe_dump({**of_list, "items": items})).stdout
    none = run("-", stdin=yaml.safe_dump({**of_list, "items": [{"kind": "Pod"}, 3]}))
    assert "but Pod (line 3)" in str(none.exception)


def test_owners_and_finalizers_of_a_job_in_a_cluster_are_named() -> None:
    """Owners and finalizers, for example of a CronJob, must be named, because they do not belong to the new object."""
    body = pytorchjob()
    body["metadata"]["ownerReferences"] = [{"kind": "Workflow", "name": "w"}]
    assert "metadata.ownerReferences" in remarks(checked(room.convert(body, [])))


IN_A_POD = """{spec: {containers: [{name: m, image: 'r/x:1', command: [python, train.py], args: ['--lr', '1']}]}}"""
FIX = "ddpjob convert --image r/x:1 -- python train.py --lr 1"


@pytest.mark.parametrize(
    ("version", "kind", "spec", "fix"),
    [
        ("batch.volcano.sh/v1alpha1", "Job", f"{{tasks: [{{name: a, template: {IN_A_POD}}}]}}", FIX),
        ("batch/v1", "Job", f"{{template: {IN_A_POD}}}", FIX),
        ("jobset.x-k8s.io/v1alpha2", "JobSet",
         f"{{replicatedJobs: [{{template: {{spec: {{template: {IN_A_POD}}}}}}}]}}", FIX),
        ("kubeflow.org/v2beta1", "MPIJob",
         "{mpiReplicaSpecs: {Launcher: {template: " + IN_A_POD.replace("[python", "[mpirun, -np, '4', -x, A=b, python")
         + "}}}", FIX),
        ("batch/v1", "Job", "{template: {spec: {containers: [{command: [sh, -xc, \"torchrun t.py\\n\"]}]}}}",
         "ddpjob convert -- sh -xc 'torchrun t.py'"),  # a YAML block that begins with `- |` ends with a newline
        ("batch/v1", "Job", "{template: 3}", "ddpjob convert -- COMMAND"),
        ("ray.io/v1", "RayJob", "{entrypoint: python x.py}", "ddpjob convert -- COMMAND"),
    ],
)  # fmt: skip
def test_a_job_of_another_kind_is_refused_with_the_command_that_converts_its_command_line(version, kind, spec, fix):
    """The message must name `ddpjob convert -- COMMAND`. `no PyTorchJob and no TrainJob in it` would not help."""
    text = f"apiVersion: {version}\nkind: {kind}\nmetadata: {{name: mine}}\nspec: {spec}\n"
    line = f"stdin:1: {kind} mine: not converted: make one of its command: {fix}"
    result = run("-", stdin=text)
    assert str(result.exception).splitlines()[1:] == [line]
    assert line in run("-", stdin=f"{text}---\n{PYTORCHJOB}").stderr


def test_each_unconverted_document_is_named_with_its_line() -> None:
    """A Volcano Job between two PyTorchJobs must not disappear silently."""
    others = "kind: ConfigMap\nmetadata: {name: c}\n---\nkind: Job\nmetadata: {name: v}\n---\n[1]\n---\n"
    result = run(
        "-", stdin=f"{others}{TRAINJOB}---\n{RUNTIME}---\n{RUNTIME.replace('torch-distributed', 'other')}---\n"
    )
    assert [job["kind"] for job in yaml.safe_load_all(result.stdout)] == ["DDPJob"]
    named = [line for line in result.stderr.splitlines() if "not converted" in line]
    assert [line.partition(": not converted")[0] for line in named] == [
        "stdin:1: ConfigMap c",
        "stdin:4: Job v",
        "stdin:7",
        "stdin:45: ClusterTrainingRuntime other",
    ]


def test_a_remark_on_the_runtime_has_the_line_of_the_runtime(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(TRAINJOB)
    (tmp_path / "runtime.yaml").write_text(RUNTIME)
    result = run(str(tmp_path / "job.yaml"), str(tmp_path / "runtime.yaml"))
    assert f"{tmp_path}/runtime.yaml:6: spec.podGroupPolicy.coscheduling: the gang of a DDPJob" in result.stderr


def test_a_command_is_accepted_with_and_without_dashes() -> None:
    with_dashes = run("--image", "my-image", "--", "torchrun", "--nnodes", "2", "train.py")
    assert run("--image", "my-image", "torchrun", "--nnodes", "2", "train.py").stdout == with_dashes.stdout
    assert yaml.safe_load(with_dashes.stdout)["spec"]["template"]["spec"]["containers"][0]["image"] == "my-image"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("kind: Deployment\n", "contains no PyTorchJob and no TrainJob, but Deployment (line 1)"),
        ("", "contains no PyTorchJob and no TrainJob, but nothing else"),
        ("a: [", "stdin:"),
        (TRAINJOB, "stdin:5: spec.runtimeRef.name: the ClusterTrainingRuntime torch-distributed"),
        (PYTORCHJOB.replace("name: mnist", "name: Mnist"), "the DDPJob would not be valid: metadata.name"),
    ],
)
def test_wrong_input_gives_one_line_with_its_position_and_no_output(text: str, sentence: str) -> None:
    result = run("-", stdin=text)
    assert isinstance(result.exception, yamlfile.InputError)
    assert sentence in str(result.exception)
    assert result.stdout == ""


def test_run_and_check_name_the_convert_command(tmp_path: Path) -> None:
    """`run` and `check` must name the convert command for a Kubeflow job, and not only `kind: must be DDPJob`."""
    assert yamlfile.CONVERTED == room.KINDS
    file = tmp_path / "job.yaml"
    file.write_text(PYTORCHJOB)
    with pytest.raises(yamlfile.InputError, match=f"`ddpjob convert {file}` makes one of it"):
        yamlfile.read_job(str(file))
