"""`ddpjob submit`: what is sent with a job, what is left out, and what a cluster gets."""

import base64
import errno
import io
import json
import os
import random
import re
import shlex
import sys
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from fake_cluster import FakeCluster, pod
from shell import Ddpjob, Done, eventually

from ddpjob_cli.client import pack
from ddpjob_cli.commands.main import cli
from ddpjob_cli.manifest import yamlfile
from ddpjob_cli.manifest.yamlfile import InputError
from ddpjob_operator.job import validation

LOCAL_RANK = "import os; d.init_process_group('gloo', rank=int(os.environ['LOCAL_RANK']), world_size=4)\n"
SOUND = "import torch.distributed as dist\nprint('trains')\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the user's folder with a script, which is the working folder."""
    path = tmp_path / "my project"
    path.mkdir()
    (path / "train.py").write_text(SOUND)
    monkeypatch.chdir(path)
    return path


def unpacked(data: bytes) -> dict[str, str]:
    """Return path → content, or a link's target."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        found = {}
        for member in tar:
            file = tar.extractfile(member) if member.isreg() else None
            found[member.name] = file.read().decode() if file else f"-> {member.linkname}"
    return found


def code_of(config_map: dict[str, Any]) -> dict[str, str]:
    """Return the files in a ConfigMap."""
    return unpacked(base64.b64decode(config_map["binaryData"]["code.tar.gz"]))


def trainer_of(job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = job["spec"]["template"]["spec"]["containers"][0]
    return found


# -------------------------------------------------------------------- the folder


def test_a_folder_is_packed_with_its_file_names_executables_and_links(folder: Path) -> None:
    """Code that ran locally must run in the cluster, so executables and links must stay as they are."""
    (folder / "übung mit leer").mkdir()
    (folder / "übung mit leer" / "größe.txt").write_text("ä")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "latest.py").symlink_to(folder / "train.py")
    packed = pack.pack(folder)
    assert unpacked(packed.data) == {
        "train.py": SOUND,
        "übung mit leer/größe.txt": "ä",
        "run.sh": "#!/bin/sh\n",
        "latest.py": "-> train.py",
    }
    with tarfile.open(fileobj=io.BytesIO(packed.data)) as tar:
        assert tar.getmember("run.sh").mode & 0o100
    assert packed.files == 4


def test_the_same_files_give_the_same_archive(folder: Path) -> None:
    """The same files must give the same archive, because a hash of the content is its name: times do not count."""
    before = pack.pack(folder).digest
    os.utime(folder / "train.py", (1, 1))
    assert pack.pack(folder).digest == before
    (folder / "train.py").write_text(SOUND + "#")
    assert pack.pack(folder).digest != before


def test_files_that_git_ignores_or_that_are_no_code_are_not_sent(folder: Path) -> None:
    """Files that git ignores must not be sent, for example a Python environment of 5 GB."""
    (folder / ".gitignore").write_text("data/\n*.log\n/only-here\n!keep.log\n")
    for path in ("data/x.bin", "a.log", "keep.log", "only-here", "lib/only-here", ".git/config", "__pycache__/a.pyc"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("x")
    (folder / "lib/.gitignore").write_text("!b.log\n")
    (folder / "lib/b.log").write_text("x")
    (folder / "env").mkdir()
    (folder / "env/pyvenv.cfg").write_text("")
    found = set(unpacked(pack.pack(folder).data))
    assert found == {".gitignore", "train.py", "keep.log", "lib/only-here", "lib/.gitignore", "lib/b.log"}


def test_credentials_are_not_sent_and_are_named(folder: Path) -> None:
    """Credentials must not be sent, because everybody who may read ConfigMaps could read them."""
    (folder / "deploy").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n")
    (folder / "keys").mkdir()
    for name in (".env", "prod.env", "keys/id_rsa", "tls.pem", ".netrc"):
        (folder / name).write_text("PASSWORD=1")
    packed = pack.pack(folder)
    assert set(unpacked(packed.data)) == {"train.py"}
    (remark,) = packed.remarks
    assert remark.startswith("left out, because they look like credentials: ")
    assert "and 1 more file" in remark


def test_snapshots_of_a_local_training_are_not_sent_and_are_named(folder: Path) -> None:
    """Snapshots of a local run must not be sent: the job would resume at their end, make no step, and succeed."""
    for below in ("snapshots", "old/snapshots"):
        (folder / below).mkdir(parents=True)
        (folder / below / "writer-000001.json").write_text("{}")
        (folder / below / "step-000000001500.writer-000001.0123456789abcdef.pt").write_text("state")
    packed = pack.pack(folder)
    assert set(unpacked(packed.data)) == {"train.py"}
    assert packed.remarks == ("left out, because they are snapshots of another training: old/snapshots/, snapshots/",)


def test_links_that_lead_outside_in_a_circle_or_nowhere_are_omitted_and_named(folder: Path) -> None:
    (folder / "outside").symlink_to("/etc/hostname")
    (folder / "loop").symlink_to("loop")
    (folder / "nowhere").symlink_to("not-there")
    (folder / "sub").mkdir()
    (folder / "sub/up").symlink_to("..")
    os.mkfifo(folder / "pipe")
    packed = pack.pack(folder)
    assert unpacked(packed.data) == {"train.py": SOUND, "sub/up": "-> .."}
    assert "loop, nowhere, outside" in packed.remarks[0]


def test_files_that_vanish_while_a_folder_is_read_are_left_out(tmp_path: Path) -> None:
    """Files that vanish while a folder is read, such as an editor's backup, must be left out."""
    (tmp_path / "train.py").write_text("print(1)")
    over = threading.Event()

    def edit() -> None:
        while not over.is_set():
            for number in range(30):
                (tmp_path / f"new{number}").mkdir()
                (tmp_path / f"new{number}" / "backup~").touch()
                (tmp_path / f"{number}~").touch()
            for number in range(30):
                (tmp_path / f"{number}~").unlink()
                (tmp_path / f"new{number}" / "backup~").unlink()
                (tmp_path / f"new{number}").rmdir()

    editor = threading.Thread(target=edit)
    editor.start()
    try:
        for _ in range(100):
            assert "train.py" in pack.read(tmp_path)[1]
    finally:
        over.set()
        editor.join()


def test_a_folder_of_2_gb_is_refused_at_once_with_its_largest_files(folder: Path) -> None:
    (folder / "data").mkdir()
    with (folder / "data/train.bin").open("wb") as file:
        file.truncate(2 << 30)
    began = time.process_time()
    with pytest.raises(InputError) as refused:
        pack.pack(folder)
    assert time.process_time() - began < 1
    assert "2.15 GB" in str(refused.value)
    assert "data/ 2.15 GB" in str(refused.value)
    assert "docs/your-code.md" in str(refused.value)


def test_an_archive_that_is_too_large_or_has_too_many_files_is_refused(folder: Path) -> None:
    (folder / "noise.bin").write_bytes(os.urandom(1_000_000))
    with pytest.raises(InputError, match="1 MB packed, and at most 900 kB"):
        pack.pack(folder)
    (folder / "noise.bin").unlink()
    for number in range(pack.FILES_MAX + 1):
        (folder / f"{number}.txt").touch()
    with pytest.raises(InputError, match="more than 5,000 files"):
        pack.pack(folder)


# -------------------------------------------------------------------- what the cluster gets


def test_a_script_becomes_a_job_that_owns_its_code(folder: Path, cluster: FakeCluster, ddpjob: Ddpjob) -> None:
    """A script must become a job that owns its code: no image is needed, and nothing stays when it is deleted."""
    ddpjob("submit", "train.py", "--nodes", 2, "--nproc-per-node", 4, "--", "--epochs", "5", code=0)
    job, config_map = cluster.find("ddpjobs", "train"), cluster.find("configmaps")
    trainer = trainer_of(job)
    assert (job["spec"]["nodes"], job["spec"]["nprocPerNode"]) == (2, 4)
    assert trainer["command"][-3:] == ["train.py", "--epochs", "5"]
    assert code_of(config_map) == {"train.py": SOUND}
    assert config_map["immutable"] is True
    assert config_map["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]
    assert ddpjob("delete", "train").code == 0
    assert cluster.find("configmaps") is None


def test_the_job_is_valid_and_meets_the_restricted_profile(folder: Path, cluster: FakeCluster, ddpjob: Ddpjob) -> None:
    ddpjob("submit", "train.py", "--gpus", 8)
    job = cluster.find("ddpjobs", "train")
    parsed, problems = validation.parse(job)
    assert not problems
    assert not list(validation.strict(parsed.spec))
    spec = job["spec"]["template"]["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    for container in (*spec["containers"], *spec["initContainers"]):
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert trainer_of(job)["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert spec["initContainers"][0]["resources"] == {"limits": {}}, "a GPU is not needed to unpack"


def test_two_jobs_with_the_same_code_share_it_until_the_last_is_deleted(folder, cluster, ddpjob):
    assert ddpjob("submit", "train.py", "--name", "a").code == 0
    assert ddpjob("submit", "train.py", "--name", "b").code == 0
    assert len(cluster.find("configmaps")["metadata"]["ownerReferences"]) == 2
    assert len([path for path in cluster.objects if "configmaps" in path]) == 1


def test_code_of_the_same_name_with_another_content_is_refused(folder, cluster, ddpjob):
    """Code of the same name with other content must be refused, because somebody else's code would run."""
    ddpjob("submit", "train.py", "--name", "a")
    cluster.find("configmaps")["binaryData"]["code.tar.gz"] = "AAAA"
    ddpjob("submit", "train.py", "--name", "b", code=1, says="exists with other code")
    assert cluster.find("ddpjobs", "b") is None, "a job that waits for its code for ever is not left behind"


def test_a_refused_submit_leaves_nothing_behind(folder: Path, cluster: FakeCluster, ddpjob: Ddpjob) -> None:
    cluster.forbidden = {"create configmaps"}
    ddpjob("submit", "train.py", code=1, says="jane may not create configmaps in namespace default")
    assert cluster.objects == {}


def test_a_job_whose_creation_is_uncertain_is_reported_as_uncertain(folder, cluster, ddpjob):
    """A job whose creation is uncertain must be named: it may exist, without its code."""
    status = {"kind": "Status", "message": "timeout"}
    cluster.answers["create ddpjobs.training.ddpjob.io for real"] = 504, status
    ddpjob("submit", "train.py", code=1, says="It is unknown if train was created: check with `ddpjob get train`")
    cluster.answers = {"create configmaps for real": (504, status)}
    assert ddpjob("submit", "train.py").code == 1
    assert cluster.objects == {}


def test_a_refusal_uses_the_field_names_of_the_server(folder: Path, cluster: FakeCluster, ddpjob: Ddpjob) -> None:
    causes = [{"field": "spec.nodes", "message": "must be at most 3"}]
    status = {"kind": "Status", "message": "invalid", "details": {"causes": causes}}
    cluster.answers["create ddpjobs.training.ddpjob.io"] = 422, status
    ddpjob("submit", "train.py", code=1, says="spec.nodes: must be at most 3")


def test_a_name_in_use_is_reported_with_the_state_of_the_existing_job(folder, cluster, ddpjob):
    ddpjob("submit", "train.py")
    ddpjob("submit", "train.py", code=2, says=("--name train-2", "ddpjob delete train"))


def test_a_dry_run_needs_no_cluster_and_prints_what_kubectl_can_apply(folder, ddpjob, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", "/not/there")
    done = ddpjob("submit", "train.py", "--dry-run", code=0)
    config_map, job = yaml.safe_load_all(done.out)
    volumes = job["spec"]["template"]["spec"]["volumes"]
    assert {"name": config_map["metadata"]["name"]} in [v.get("configMap") for v in volumes]
    assert code_of(config_map) == {"train.py": SOUND}


@pytest.mark.parametrize("image", [[], ["--image", "ddpjob-trainer"]])
def test_an_image_that_is_loaded_onto_the_nodes_is_not_pulled(folder: Path, ddpjob: Ddpjob, image: list[str]) -> None:
    """An image that is loaded onto the nodes must not be pulled, or a job on kind waits in ErrImagePull."""
    *_, job = yaml.safe_load_all(ddpjob("submit", "train.py", "--dry-run", *image).out)
    pod = job["spec"]["template"]["spec"]
    assert {c["imagePullPolicy"] for c in (*pod["containers"], *pod["initContainers"])} == {"IfNotPresent"}


def test_a_script_that_saves_to_a_folder_lost_with_the_pod_gets_a_warning(folder: Path, ddpjob: Ddpjob) -> None:
    (folder / "train.py").write_text(SOUND + "\nimport torch\ntorch.save(1, 'model.pt')\n")
    lost = f"Line {len(SOUND.splitlines()) + 3} saves files, which are lost when the pod ends: mount a volume"
    assert lost in ddpjob("submit", "train.py", "--dry-run").err
    claim = "spec.template.spec.volumes=[{name: x, persistentVolumeClaim: {claimName: x}}]"
    assert lost not in ddpjob("submit", "train.py", "--dry-run", "--set", claim).err


@pytest.mark.parametrize("command", ["submit", "run"])
def test_a_dry_run_quotes_words_that_kubectl_would_misread(folder: Path, ddpjob: Ddpjob, command: str) -> None:
    """Words such as 1e-3 and y must be quoted, because kubectl reads them as a number and as true."""
    words = ["1e-3", "y", "on", "08", "1.5"]
    done = ddpjob(command, "train.py", "--dry-run", "--", *words, code=0)
    bodies = [document.data for document in yamlfile.parse("x", done.out.encode())]
    specs = [b["spec"].get("template", b).get("spec", {}) for b in bodies if "spec" in b]
    found = [spec["containers"][0]["command"] for spec in specs if "containers" in spec]
    assert found
    assert [command[-5:] for command in found] == [words] * len(found)


def test_a_yaml_file_is_submitted_unchanged_and_with_code_on_request(folder, cluster, ddpjob):
    trainer = {"name": "trainer", "image": "mine", "command": ["torchrun", "train.py"], "workingDir": "/app"}
    spec = {"nodes": 2, "template": {"spec": {"containers": [trainer]}}}
    kind = {"apiVersion": "training.ddpjob.io/v1alpha1", "kind": "DDPJob"}
    (folder / "job.yaml").write_text(yaml.safe_dump({**kind, "metadata": {"name": "mine"}, "spec": spec}))
    assert ddpjob("submit", "job.yaml", "--nodes", 3).code == 0
    job = cluster.find("ddpjobs", "mine")
    assert job["spec"] == {**spec, "nodes": 3}
    assert cluster.find("configmaps") is None
    assert ddpjob("submit", "job.yaml", "--name", "second", "--code", ".").code == 0
    mounts = trainer_of(cluster.find("ddpjobs", "second"))["volumeMounts"]
    assert mounts[-1]["mountPath"] == "/app", "where the command looks for it"


JOB = (
    "apiVersion: training.ddpjob.io/v1alpha1\nkind: DDPJob\nmetadata: {name: mine}\n"
    "spec: {template: {spec: {containers: [{name: t, image: i, command: [torchrun, train.py, --epochs, '1']}]}}}\n"
)


def test_a_job_printed_by_the_cluster_is_submitted_again_under_another_name(folder, cluster, ddpjob):
    """A job printed by the cluster must be accepted: fields that only the API server may set are removed."""
    (folder / "job.yaml").write_text(JOB)
    assert ddpjob("submit", "job.yaml").code == 0
    first = cluster.find("ddpjobs", "mine")
    first["metadata"] |= {"resourceVersion": "42", "generation": 1, "managedFields": []}
    first["metadata"] |= {"labels": {"team": "a"}, "finalizers": ["x/y"]}
    first["status"] = {"state": "Failed", "attempt": 1}
    (folder / "again.yaml").write_text(ddpjob("get", "mine", "-o", "yaml").out)
    done = ddpjob("submit", "again.yaml", "--name", "again", "--dry-run")
    assert yaml.safe_load(done.out)["metadata"] == {"name": "again", "namespace": "default", "labels": {"team": "a"}}
    assert ddpjob("submit", "again.yaml", "--name", "again").code == 0
    again = cluster.find("ddpjobs", "again")
    assert "status" not in again
    assert "resourceVersion" not in again["metadata"]
    assert again["metadata"]["uid"] != first["metadata"]["uid"]


def test_a_job_with_generate_name_gets_a_new_name_each_time(folder: Path, cluster: FakeCluster, ddpjob: Ddpjob) -> None:
    """A file with generateName must get a new name at each submit, as with `kubectl create`."""
    (folder / "job.yaml").write_text(JOB.replace("{name: mine}", "{generateName: sweep-}"))
    for _ in range(2):
        assert re.match(r"sweep-[a-z0-9]{5} is submitted", ddpjob("submit", "job.yaml").err)
    names = {raw["metadata"]["name"] for raw in cluster.objects.values()}
    assert len(names) == 2
    assert ddpjob("submit", "job.yaml", "--name", "mine").code == 0
    assert cluster.find("ddpjobs", "mine")


def test_yaml_may_come_from_stdin_and_arguments_replace_those_of_the_file(folder, cluster, ddpjob, monkeypatch):
    """`submit -` reads a job from stdin, and arguments replace those of the file, as with `ddpjob run`."""
    (folder / "job.yaml").write_text(JOB)
    assert ddpjob("submit", "job.yaml", "--", "--epochs", "9").code == 0
    assert trainer_of(cluster.find("ddpjobs", "mine"))["command"] == ["torchrun", "train.py", "--epochs", "9"]
    monkeypatch.setattr(sys, "stdin", io.StringIO(JOB))
    assert ddpjob("submit", "-", "--name", "piped").code == 0
    assert cluster.find("ddpjobs", "piped") is not None


def test_a_field_without_a_value_counts_as_absent(folder: Path, cluster: FakeCluster, ddpjob: Ddpjob) -> None:
    """`resources:` with everything below it commented out must not cause a traceback."""
    empty = "image: i, resources: null, workingDir: null, volumeMounts: null"
    (folder / "job.yaml").write_text(JOB.replace("image: i", empty))
    assert ddpjob("submit", "job.yaml", "--gpus", 2, "--code", ".").code == 0
    trainer = trainer_of(cluster.find("ddpjobs", "mine"))
    assert trainer["resources"] == {"limits": {"nvidia.com/gpu": 2}}
    assert trainer["workingDir"] == "/code"


def notebook(*cells: str) -> str:
    return json.dumps({"cells": [{"cell_type": "code", "source": cell} for cell in cells]})


def test_a_notebook_is_sent_as_the_script_of_its_cells_with_its_folder(folder, cluster, ddpjob):
    """submit must send the code cells as a script, as `ddpjob run` does, and not read the JSON as a DDPJob."""
    (folder / "try it.ipynb").write_text(notebook("%pip list\nimport train", "print(train)"))
    ddpjob("submit", "try it.ipynb", "--", "--epochs", "5", code=0)
    job = cluster.find("ddpjobs", "try-it")
    assert trainer_of(job)["command"] == ["ddprun", "try it.py", "--epochs", "5"]
    assert "env" not in trainer_of(job), "a folder of this machine is in no pod"
    assert code_of(cluster.find("configmaps")) == {"train.py": SOUND, "try it.py": "pass\nimport train\nprint(train)\n"}


def test_the_script_of_a_notebook_replaces_no_file_of_its_folder(folder, cluster, ddpjob):
    """The script of train.ipynb must not replace the train.py next to it."""
    (folder / "src").mkdir()
    (folder / "src/train.ipynb").write_text(notebook("x = 1"))
    (folder / "src/train.py").write_text("y = 2\n")
    assert ddpjob("submit", "src/train.ipynb", "--code", ".").code == 0
    assert trainer_of(cluster.find("ddpjobs", "train"))["command"] == ["ddprun", "src/train_notebook.py"]
    sent = code_of(cluster.find("configmaps"))
    assert sent == {"train.py": SOUND, "src/train.py": "y = 2\n", "src/train_notebook.py": "x = 1\n"}


@pytest.mark.parametrize(
    ("text", "words", "says"),
    [
        ("{}", [], "nb.ipynb:1: not a valid notebook: not a notebook: it has no cells"),
        ("x = 1", [], "nb.ipynb:1: not a valid notebook"),
        (notebook(), [], "nb.ipynb: no cell has Python to run"),
        (notebook("%%writefile a.py\nx = 1"), [], "nb.ipynb: no cell has Python to run"),
        (notebook("x = 1", "y =\n"), [], "nb.ipynb:cell 2:1: not valid Python"),
        (notebook("x = 1"), ["--no-code"], "nb.ipynb: no image contains this script"),
        (notebook("x = 1"), ["--code", "sub"], "nb.ipynb: is not in the folder --code sub"),
        (notebook("import torch.distributed as d", f"\n{LOCAL_RANK}"), [], "nb.ipynb:cell 2:2: error[rank-is-local"),
    ],
)  # fmt: skip
def test_an_error_in_a_notebook_is_reported_with_its_cell(folder, cluster, ddpjob, text, words, says):
    """An error in a notebook must be reported with its cell, because the script in /tmp is deleted."""
    (folder / "nb.ipynb").write_text(text)
    (folder / "sub").mkdir()
    done = ddpjob("submit", "nb.ipynb", "--nodes", 2, *words, code=2)
    assert says in done.err
    assert "/tmp" not in done.err
    assert cluster.requests == []


def test_a_script_from_stdin_is_sent_alone_or_in_the_named_folder(folder, cluster, ddpjob, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("print(1)\n"))
    assert ddpjob("submit", "-", "--name", "alone").code == 0
    assert trainer_of(cluster.find("ddpjobs", "alone"))["command"] == ["ddprun", "stdin.py"]
    assert code_of(cluster.find("configmaps")) == {"stdin.py": "print(1)\n"}
    assert ddpjob("delete", "alone").code == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO("print(1)\n"))
    assert ddpjob("submit", "-", "--code", ".").code == 0
    assert code_of(cluster.find("configmaps")) == {"stdin.py": "print(1)\n", "train.py": SOUND}


def test_a_script_in_a_code_folder_elsewhere_is_checked(folder, tmp_path, ddpjob, monkeypatch):
    """A script must be found in the code folder, although its path in the pod does not exist here."""
    (folder / "src").mkdir()
    (folder / "src/train.py").write_text(f"import torch.distributed as d\n{LOCAL_RANK}")
    monkeypatch.chdir(tmp_path)
    ddpjob(
        "submit",
        folder / "src/train.py",
        "--code",
        folder,
        "--nodes",
        2,
        "--dry-run",
        code=2,
        says="rank-is-local-rank",
    )


def test_a_script_that_starts_its_own_processes_is_not_started_by_torchrun(folder, cluster, ddpjob):
    """A script that starts its own processes must be started by python, as in the job from `ddpjob init`."""
    (folder / "src").mkdir()
    (folder / "src/spawning.py").write_text(
        "import torch.multiprocessing as mp\ndef main(i): pass\nif __name__ == '__main__': mp.spawn(main, nprocs=2)\n"
    )
    assert ddpjob("submit", "src/spawning.py", "--code", ".", "--no-check").code == 0
    job = cluster.find("ddpjobs", "spawning")
    assert trainer_of(job)["command"] == ["python", "src/spawning.py"]
    assert set(code_of(cluster.find("configmaps"))) == {"train.py", "src/spawning.py"}


def test_contradicting_namespaces_are_refused(folder: Path, cluster: FakeCluster, ddpjob: Ddpjob) -> None:
    (folder / "job.yaml").write_text(JOB.replace("{name: mine}", "{name: a, namespace: team-a}"))
    ddpjob("submit", "job.yaml", "-n", "team-b", code=2, says="job.yaml:3: metadata.namespace is team-a")
    assert ddpjob("submit", "job.yaml").code == 0
    assert cluster.find("ddpjobs", "a", "team-a") is not None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["trian.py"], "trian.py"),
        (["train.py", "--code", "sub"], "not in the folder"),
        (["train.py", "--code", "nowhere"], "--code nowhere: no such folder"),
        (["train.py", "--code", "circle"], "--code circle: no such folder"),
        (["circle"], "circle: Too many levels of symbolic links"),
        (["train.py", "--code", ".", "--no-code"], "exclude each other"),
        (["train.py", "--name", "Not_A_Name"], "metadata.name"),
        (["train.py", "--nodes", "0"], "--nodes"),
        (["train.py", "--nodes", "2", "--set", "spec.nodes=3"], "two values for spec.nodes"),
        (["job.yaml"], "job.yaml"),
    ],
)
def test_wrong_input_gives_one_line_and_exit_code_2(folder, cluster, ddpjob, words, says):
    (folder / "sub").mkdir()
    (folder / "circle").symlink_to("circle")
    done = ddpjob("submit", *words, code=2)
    assert says in done.err
    assert cluster.requests == []


def test_what_cannot_be_sent_is_named_as_the_user_knows_it(folder, cluster, ddpjob, monkeypatch):
    """What cannot be sent must be named as the user knows it, and not by a path in /tmp."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("import torch\ndef f(:\n"))
    assert ddpjob("submit", "-", code=2).err == "stdin:2: not valid Python: invalid syntax\n"
    lines = "\n".join(f"# {random.randbytes(64).hex()}" for _ in range(30_000))
    (folder / "large.ipynb").write_text(json.dumps({"cells": [{"cell_type": "code", "source": f"x = 1\n{lines}"}]}))
    assert "The largest: large.ipynb 3.93 MB" in ddpjob("submit", "large.ipynb", code=2).err
    assert cluster.requests == []


def test_a_folder_that_cannot_be_read_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "private").mkdir()
    scan = os.scandir

    def refuse(path: Path) -> Any:
        if path.name == "private":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(InputError, match=r"/private: Permission denied$"):
        pack.scan(folder)


def test_a_job_with_a_mistake_that_check_finds_is_refused(folder: Path, cluster: FakeCluster, ddpjob: Ddpjob) -> None:
    """A job with a mistake that `ddpjob check` finds must be refused before it waits for an image and GPUs."""
    (folder / "train.py").write_text(f"import torch.distributed as d\n{LOCAL_RANK}")
    ddpjob("submit", "train.py", "--nodes", 2, code=2, says="rank-is-local-rank")
    assert cluster.objects == {}
    assert ddpjob("submit", "train.py", "--nodes", 2, "--no-check").code == 0


# -------------------------------------------------------------------- --follow


def _operator(cluster: FakeCluster, state: str, lines: list[str], by: str = " {place}") -> None:
    """Act as operator and kubelets do: two pods run, print, and end."""
    job = eventually(lambda: cluster.find("ddpjobs", "train"))
    pods = [cluster.add("pods", pod("train", 1, place)) for place in (0, 1)]
    job["status"] = {"state": "Running", "reason": "AllNodesRun", "message": "2 of 2 nodes are running", "attempt": 1}
    for place in (0, 1):
        cluster.logs[f"train-1-{place}"] = [line + by.format(place=place) for line in lines]
    cluster.wait_for("get pods/log", 2)
    look = "get ddpjobs.training.ddpjob.io"
    cluster.wait_for(look, cluster.requests.count(look) + 2)  # submit has then seen the job running
    for one in pods:
        one["status"]["containerStatuses"][0]["state"] = {"terminated": {"exitCode": 0}}
    times = {"startTime": "2026-01-01T00:00:00Z", "completionTime": "2026-01-01T00:00:38Z"}
    job["status"] = {"state": state, "reason": "x", "message": "gave up", "attempt": 1, **times}


def _followed(cluster: FakeCluster, ddpjob: Ddpjob, *told: Any) -> Done:
    operator = threading.Thread(target=_operator, args=(cluster, *told))
    operator.start()
    done = ddpjob("submit", "train.py", "--nodes", 2, "--nproc-per-node", 1, "--follow")
    operator.join()
    return done


@pytest.mark.parametrize(("state", "code", "says"), [("Succeeded", 0, "✔ train Succeeded in 38s"), ("Failed", 1, "✖")])
def test_follow_shows_the_logs_of_all_nodes_and_ends_with_the_job(folder, cluster, ddpjob, state, code, says):
    done = _followed(cluster, ddpjob, state, ["epoch 1", "epoch 2"])
    assert done.code == code
    assert sorted(done.out.splitlines()) == ["[0:0] epoch 1 0", "[0:0] epoch 2 0", "[1:1] epoch 1 1", "[1:1] epoch 2 1"]
    assert "Running: 2 of 2 nodes are running" in done.err
    assert says in done.err


def test_follow_warns_about_a_success_whose_log_ends_with_a_traceback(folder, cluster, ddpjob):
    lines = ["Traceback (most recent call last):", '  File "train.py", line 7, in <module>', "ValueError: bad shard"]
    done = _followed(cluster, ddpjob, "Succeeded", lines, "")
    doubt = "a rank has failed in train.py:7, although the exit code is 0: ValueError: bad shard"
    assert done.code == 0
    assert done.err.splitlines()[-1] == f"⚠ but suspicious: {doubt}"


@pytest.mark.parametrize(
    ("words", "says"), [([], "was deleted\n"), (["--set", "spec.ttlSecondsAfterFinished=0"], "; it may have finished")]
)
def test_the_deletion_of_a_followed_job_is_reported(folder, cluster, ddpjob, words, says):
    """The deletion of a followed job must be reported, as with ttlSecondsAfterFinished 0."""
    cluster.after("get ddpjobs.training.ddpjob.io", cluster.objects.clear)
    ddpjob("submit", "train.py", *words, "--follow", code=1, says=says)


# -------------------------------------------------------------------- documents


def test_each_job_on_the_page_about_code_is_valid() -> None:
    """Each job on the page about code must be valid, because readers copy it unchanged."""
    page = (Path(__file__).parents[2] / "docs/your-code.md").read_text()
    jobs = [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)]
    assert jobs
    for body in jobs:
        parsed, problems = validation.parse(body)
        assert not [*problems, *validation.strict(parsed.spec)]


def test_each_command_on_the_command_line_page_exists_with_its_options() -> None:
    page = (Path(__file__).parents[2] / "docs/cli.md").read_text()
    lines = set(re.findall(r"`(ddpjob \w+ [^`…]*)`", page))
    assert len(lines) > 15
    for line in lines:
        _, name, *words = shlex.split(line)
        command = cli.get_command(click.Context(cli), name)
        assert command is not None, line
        if "NAME" not in words:
            command.make_context(name, words, resilient_parsing=False)
