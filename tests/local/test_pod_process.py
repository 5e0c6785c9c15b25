"""Fields of a pod that a local process honors, that are refused, and that are reported as without effect."""

import sys
from pathlib import Path
from typing import Any

import pytest
from worlds import job

from ddpjob_cli.local.preparation import pod_process
from ddpjob_operator.pods import build


def pod(container: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    what = job(container=container)
    what.spec.template["spec"].update(spec)
    return build.pod(what, 1, 1)


@pytest.fixture
def slot(tmp_path: Path) -> pod_process.Slot:
    return pod_process.Slot(tmp_path, tmp_path / "volumes", {"PATH": "/bin:/usr/bin", "HOME": "/h", "RANK": "7"})


def refused(body: dict[str, Any]) -> list[str]:
    return [str(p) for p in pod_process.problems(body)]


def test_command_args_and_variables_are_expanded_as_by_the_kubelet(slot: pod_process.Slot) -> None:
    body = pod(
        {
            "command": ["sh", "-c", "echo $(NODE_RANK) $$(NODE_RANK) $(UNKNOWN) $(MINE)"],
            "args": ["$(MINE)"],
            "env": [{"name": "MINE", "value": "n$(NNODES)"}],
        }
    )
    assert pod_process.process(body, slot).argv == ["sh", "-c", "echo 1 $(NODE_RANK) $(UNKNOWN) n2", "n2"]


def test_the_environment_of_the_caller_is_kept_without_the_variables_of_an_outer_job(slot: pod_process.Slot) -> None:
    env = pod_process.process(pod({"command": ["x"]}), slot).env
    assert (env["HOME"], env["RANK"]) == ("/h", "1")
    assert (
        "RANK" not in pod_process.process(pod({"command": ["x"]}) | {"spec": {"containers": [{"name": "t"}]}}, slot).env
    )


def test_a_job_runs_in_the_working_directory_of_the_caller_unless_it_names_one(slot: pod_process.Slot) -> None:
    assert pod_process.process(pod({"command": ["x"]}), slot).cwd == str(slot.cwd)
    assert pod_process.process(pod({"command": ["x"], "workingDir": "/usr"}), slot).cwd == "/usr"


def test_volumes_become_folders_and_their_mount_paths_are_replaced(slot: pod_process.Slot, tmp_path: Path) -> None:
    body = pod(
        {
            "command": ["x", "--out", "/data/run", "--data=/data", "/database", "/in/a"],
            "env": [{"name": "CACHE", "value": "/data/cache:/in"}],
            "volumeMounts": [{"name": "d", "mountPath": "/data"}, {"name": "h", "mountPath": "/in", "subPath": "s"}],
        },
        volumes=[
            {"name": "d", "emptyDir": {}},
            {"name": "h", "hostPath": {"path": str(tmp_path), "type": "Directory"}},
        ],
    )
    process = pod_process.process(body, slot)
    here = tmp_path / "volumes" / "d"
    assert process.argv == ["x", "--out", f"{here}/run", f"--data={here}", "/database", f"{tmp_path}/s/a"]
    assert process.env["CACHE"] == f"{here}/cache:{tmp_path}/s"
    assert process.folders == [here], "a hostPath of type Directory must be there already"


def test_a_folder_whose_path_contains_another_mount_path_is_not_replaced_twice(slot: pod_process.Slot) -> None:
    body = pod(
        {
            "command": ["x", "/a/b", "/v"],
            "volumeMounts": [{"name": "v", "mountPath": "/a/b"}, {"name": "w", "mountPath": "/v"}],
        },
        volumes=[{"name": "v", "hostPath": {"path": "/v/inner"}}, {"name": "w", "hostPath": {"path": "/w"}}],
    )
    assert pod_process.process(body, slot).argv == ["x", "/v/inner", "/w"]


def test_a_tmp_volume_for_a_read_only_root_does_not_affect_the_folders_of_the_caller(tmp_path: Path) -> None:
    clone = Path("/tmp/clone")
    mount = {"name": "tmp", "mountPath": "/tmp"}
    body = pod({"command": ["x", "/tmp/cache"], "volumeMounts": [mount]}, volumes=[{"name": "tmp", "emptyDir": {}}])
    process = pod_process.process(body, pod_process.Slot(clone, tmp_path / "volumes", {}))
    assert (process.cwd, process.argv, process.folders) == ("/tmp/clone", ["x", "/tmp/cache"], [])


@pytest.mark.parametrize(
    ("container", "spec", "part"),
    [
        ({}, {"initContainers": [{"name": "i"}]}, "initContainers: init containers do not run locally"),
        (
            {},
            {"volumes": [{"name": "s", "secret": {"secretName": "x"}}]},
            "volumes[0]: s: a secret volume does not exist locally",
        ),
        (
            {},
            {"volumes": [{"name": "p", "persistentVolumeClaim": {}}]},
            "a persistentVolumeClaim volume does not exist locally",
        ),
        ({"envFrom": [{"secretRef": {"name": "x"}}]}, {}, "envFrom: there are no Secrets or ConfigMaps"),
        (
            {"env": [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "x", "key": "y"}}}]},
            {},
            "env[0]: TOKEN comes from a secretKeyRef, which does not exist locally. Set it with --env TOKEN=…",
        ),
        ({"lifecycle": {"preStop": {}}}, {}, "lifecycle: hooks do not run locally"),
    ],
)
def test_a_field_without_a_local_equivalent_is_refused(container: dict, spec: dict, part: str) -> None:
    (sentence,) = refused({"spec": {"containers": [{"name": "trainer"} | container]} | spec})
    assert sentence.startswith("spec.template.spec.")
    assert part in sentence


def test_a_sidecar_does_not_run_locally_and_a_message_reports_it() -> None:
    body = {"spec": {"containers": [{"name": "trainer"}, {"name": "logger"}]}}
    assert "the container logger does not run locally" in refused(body)[0]


def test_fields_that_only_place_a_pod_are_ignored_with_a_message() -> None:
    body = {"spec": {"nodeSelector": {"a": "b"}, "containers": [{"name": "t", "image": "i"}]}}
    assert pod_process.ignored(body) == ["image", "nodeSelector"]
    assert refused(body) == []


def test_the_downward_api_and_optional_secrets_are_supported(slot: pod_process.Slot) -> None:
    env = [
        {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "R", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['training.ddpjob.io/rank']"}}},
        {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "x", "key": "y", "optional": True}}},
    ]
    body = pod({"command": ["x"], "env": env})
    values = pod_process.process(body, slot).env
    assert (values["POD"], values["IP"], values["R"]) == ("digits-1-1", "127.0.0.1", "1")
    assert "KEY" not in values
    assert refused(body) == []


@pytest.mark.parametrize(
    ("container", "part"),
    [
        ({"command": ["no-such-program"]}, '"no-such-program" is not a program on this machine'),
        ({"command": ["mpiexec"]}, "install MPI, or leave it out"),
        ({"command": []}, "has no command, and the image's command is not used locally. Set command."),
        ({"command": ["sh"], "workingDir": "/nowhere"}, "there is no folder /nowhere on this machine"),
        ({"command": ["./not-executable"]}, "is not a program on this machine"),
        ({"command": ["sh"], "workingDir": "/" + "x" * 5000}, "there is no folder /xxx"),
        ({"command": ["/" + "x" * 5000]}, "is not a program on this machine"),
        ({"command": ["python", "x" * 5000 + ".py"]}, "there is no file xxx"),
    ],
)
def test_a_command_that_cannot_start_is_named_before_anything_starts(slot, container, part):
    (problem,) = pod_process.start_problems(pod(container), slot)
    assert part in str(problem)


def test_a_script_in_the_parent_folder_is_suggested(slot: pod_process.Slot, tmp_path: Path) -> None:
    """A script in the parent folder must be suggested: the message names the folder from which to start the job."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "train.py").touch()
    (problem,) = pod_process.start_problems(
        pod({"command": ["python", "train.py"], "workingDir": f"{tmp_path}/jobs"}), slot
    )
    assert str(problem).endswith(f"there is no file train.py in {tmp_path}/jobs; it is in {tmp_path}: run from there")


@pytest.mark.parametrize("volume", [{"name": "v"}, {"name": "v", "emptyDir": None}, {"name": "v", "hostPath": None}])
def test_a_volume_without_a_kind_is_an_empty_folder_as_in_the_cluster(slot: pod_process.Slot, volume: dict) -> None:
    """`volumes: [{name: cache}]` must give an empty folder, because a cluster makes it an emptyDir."""
    body = pod({"command": ["ls", "/d/x"], "volumeMounts": [{"name": "v", "mountPath": "/d"}]}, volumes=[volume])
    process = pod_process.process(body, slot)
    assert (process.argv[1], process.folders) == (f"{slot.volumes}/v/x", [slot.volumes / "v"])


def test_an_empty_volume_kind_does_not_hide_a_volume_that_is_not_available_here() -> None:
    """An empty volume kind must not hide a volume that is not available: the run would train on an empty folder."""
    volume = {"name": "v", "emptyDir": None, "persistentVolumeClaim": {"claimName": "data"}}
    assert (
        "a persistentVolumeClaim volume does not exist locally" in refused(pod({"command": ["x"]}, volumes=[volume]))[0]
    )


def test_each_node_has_its_own_folder_if_the_path_contains_a_variable(slot: pod_process.Slot, tmp_path: Path) -> None:
    """Each node must have its own folder if the path contains a variable, or nodes overwrite each other's files."""
    container = {
        "command": ["x", "/out/log", "file:///out/init", "s3:///out"],
        "env": [{"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
        "volumeMounts": [{"name": "v", "mountPath": "/out", "subPathExpr": "$(POD)"}],
    }
    source = {"name": "v", "hostPath": {"path": str(tmp_path), "type": "DirectoryOrCreate"}}
    process = pod_process.process(pod(container, volumes=[source]), slot)
    mine = tmp_path / "digits-1-1"
    assert process.argv[1:] == [f"{mine}/log", f"file://{mine}/init", "s3:///out"]
    assert process.folders == [mine]


@pytest.mark.parametrize(
    ("mount", "name", "part"),
    [
        ({"subPath": "../../etc"}, "v", "volumeMounts[0].subPath: ../../etc must be a path within the volume"),
        ({"subPath": "/etc"}, "v", "volumeMounts[0].subPath: /etc must be"),
        ({"subPathExpr": "a/$(UP)"}, "v", "volumeMounts[0].subPathExpr: a/.. must be"),
        ({}, "../../x", "volumes[0].name: ../../x is not a volume name"),
        ({}, "", "volumes[0].name"),
    ],
)
def test_a_volume_path_that_leaves_the_folders_of_the_job_is_refused(slot, mount, name, part):
    """An API server refuses `..` in a path. A local run must refuse it too, and not write into the user's folders."""
    mounts = [{"name": name, "mountPath": "/d", **mount}]
    container = {"command": ["sh"], "env": [{"name": "UP", "value": ".."}], "volumeMounts": mounts}
    (problem,) = pod_process.start_problems(pod(container, volumes=[{"name": name, "emptyDir": {}}]), slot)
    assert part in str(problem)


def test_an_empty_variable_source_counts_as_none(slot: pod_process.Slot) -> None:
    env = [{"name": "A", "valueFrom": {"fieldRef": None}}, {"name": "B", "valueFrom": {}}]
    assert not {"A", "B"} & pod_process.process(pod({"command": ["x"], "env": env}), slot).env.keys()


def test_the_torchrun_next_to_this_interpreter_is_preferred_only_if_torch_is_there(monkeypatch, tmp_path):
    """Without torch next to this interpreter, its folder must not hide the torchrun of another environment."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert pod_process.search_path("/bin") == f"/bin:{tmp_path}"
    (tmp_path / "torchrun").touch(mode=0o755)
    assert pod_process.search_path("/bin") == f"{tmp_path}:/bin"


@pytest.mark.parametrize(
    ("own", "given", "expected"),
    [((), None, ""), (("3", "5"), None, "3,5"), (("3",), "0", "0")],
)
def test_a_node_sees_its_share_of_the_gpus_unless_the_user_sets_it(tmp_path, own, given, expected) -> None:
    env = [{"name": "CUDA_VISIBLE_DEVICES", "value": given}] if given else []
    slot = pod_process.Slot(tmp_path, tmp_path, {"PATH": "/bin"}, gpus=own)
    assert pod_process.process(pod({"command": ["x"], "env": env}), slot).env["CUDA_VISIBLE_DEVICES"] == expected
