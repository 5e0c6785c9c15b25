"""`ddpjob.submit` from a user's program: functions are sent to a job, and results come back."""

import base64
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_cluster import FakeCluster, pod

import ddpjob
from ddpjob_cli.sdk import function

JOBS = "ddpjobs.training.ddpjob.io"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def in_main(code: str) -> Any:
    """Return the function `work` of this code, defined in `__main__` as in a program or a notebook."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(code, scope)
    return scope["work"]


def called(folder: Path, rank: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a rank that calls the function whose files are in a folder."""
    words = [sys.executable, "-S", str(folder / function.SCRIPT)]  # -S: no site-packages, as in a minimal image
    environ = {"PATH": os.environ["PATH"], "RANK": str(rank)}
    return subprocess.run(words, env=environ, capture_output=True, text=True, check=False, timeout=60)


def unpacked(cluster: FakeCluster, folder: Path) -> Path:
    """Unpack the code of the only job into `folder`, as its pods do, and return the folder."""
    data = base64.b64decode(cluster.find("configmaps")["binaryData"]["code.tar.gz"])
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar:
            file = tar.extractfile(member)
            (folder / member.name).parent.mkdir(exist_ok=True, parents=True)
            (folder / member.name).write_bytes(file.read() if file else b"")
    return folder


def ends(cluster: FakeCluster, folder: Path, name: str = "work") -> None:
    """Run the function of the only job as a pod would, and let the job end."""
    done = called(unpacked(cluster, folder / "code"))
    cluster.add("pods", pod(name, exit_code=done.returncode))
    cluster.logs[f"{name}-1-0"] = (done.stdout + done.stderr).splitlines()
    status = {"state": "Succeeded" if done.returncode == 0 else "Failed", "attempt": 1, "message": "it has ended"}
    if done.returncode:
        failure = {"attempt": 1, "rank": 0, "nodeRank": 0, "time": "2026-01-01T00:00:00Z", "exception": "ValueError"}
        status["lastFailure"] = {**failure, "exitCode": 1}
    cluster.find("ddpjobs", name)["status"] = status


WORK = "import random\nclass Point:\n    x = 3\ndef work(y): return Point.x + y\n"


@pytest.mark.parametrize(
    ("code", "args", "answer"),
    [
        (WORK, (4,), 7),
        ("work = lambda a, b=2: [a, b]", (1,), [1, 2]),
        ("def made(n):\n    def inner(): return n\n    return inner\nwork = made(5)", (), 5),
        ("class Model:\n    def __call__(self): return 'called'\nwork = Model()", (), "called"),
        ("import functools\nwork = functools.partial(lambda a, b: a - b, 9)", (4,), 5),
    ],
    ids=["of __main__ with a class", "lambda", "closure", "object", "partial"],
)
def test_the_result_of_a_function_in_the_cluster_is_returned(cluster, tmp_path, code, args, answer):
    """The result of a function must be returned, also from an image without cloudpickle and ddpjob."""
    job = ddpjob.submit(in_main(code), args=args, name="work")
    ends(cluster, tmp_path)
    assert job.result(timeout=20) == answer
    assert not [line for line in job.logs() if "ddpjob-answer" in line]


def test_an_object_of_a_class_of_the_program_is_returned_as_this_class(cluster: FakeCluster, tmp_path: Path) -> None:
    work = in_main(
        "class Point:\n    def __init__(self, x): self.x = x\ndef work(x): return Point(x)\nwork.kind = Point"
    )
    job = ddpjob.submit(work, args=(3,))
    ends(cluster, tmp_path)
    found = job.result(timeout=20)
    assert (type(found).__name__, found.x) == ("Point", 3)


def test_the_exception_of_the_failed_rank_is_the_cause(cluster: FakeCluster, tmp_path: Path) -> None:
    """The failed rank's exception must be the cause, so that a program can catch the exception by its type."""
    job = ddpjob.submit(in_main("def work(): raise FileNotFoundError(2, 'no such shard')"))
    ends(cluster, tmp_path)
    with pytest.raises(ddpjob.JobFailedError, match="work is Failed") as raised:
        job.wait(timeout=20)
    assert isinstance(raised.value.__cause__, FileNotFoundError)
    assert raised.value.status.last_failure is not None


def test_the_cause_of_a_failed_script_is_taken_from_its_log(cluster: FakeCluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('trains')\n")
    job = ddpjob.submit(tmp_path / "train.py", args=("--epochs", 5), labels={"sweep": "7"}, env={"A": "b"})
    failure = {"attempt": 1, "rank": 1, "nodeRank": 1, "time": "2026-01-01T00:00:00Z", "exception": "OSError: full"}
    raw = cluster.find("ddpjobs", "train")
    raw["status"] = {"state": "Failed", "attempt": 1, "message": "rank 1 failed", "lastFailure": failure}
    trainer = raw["spec"]["template"]["spec"]["containers"][0]
    assert trainer["command"][-2:] == ["--epochs", "5"]
    assert {"name": "A", "value": "b"} in trainer["env"]
    with pytest.raises(ddpjob.JobFailedError) as raised:
        job.wait(timeout=20)
    assert isinstance(raised.value.__cause__, ddpjob.RankError)
    assert "OSError: full" in str(raised.value.__cause__)
    failure |= {"pod": "train-1-1", "exception": "", "exitCode": 137, "signal": "SIGKILL", "reason": "Error"}
    raw["status"]["lastFailure"] = failure
    with pytest.raises(ddpjob.JobFailedError) as raised:
        job.wait(timeout=20)
    assert "rank 1 (pod train-1-1) was killed by SIGKILL" in str(raised.value.__cause__)


def test_the_arguments_of_submit_reach_the_job(cluster: FakeCluster) -> None:
    job = ddpjob.submit(
        in_main("def work(): pass"), nodes="1:3", nproc_per_node=2, max_restarts=9, name="mine", image="lab/torch:2",
        gpus=2, resources={"memory": "8Gi"}, labels={"sweep": "7"}, queue="team-a", launcher="torchrun",
    )  # fmt: skip
    assert job.name == "mine"
    raw = cluster.find("ddpjobs", "mine")
    spec, trainer = raw["spec"], raw["spec"]["template"]["spec"]["containers"][0]
    assert (spec["nodes"], spec["minNodes"], spec["nprocPerNode"], spec["backoffLimit"]) == (3, 1, 2, 9)
    assert raw["metadata"]["labels"] == {"sweep": "7", "kueue.x-k8s.io/queue-name": "team-a"}
    assert (trainer["image"], trainer["command"]) == ("lab/torch:2", ["torchrun", function.SCRIPT])
    assert trainer["resources"]["limits"] == {"nvidia.com/gpu": 2, "memory": "8Gi"}


def test_a_cell_that_is_edited_while_its_job_runs_changes_nothing_of_it(cluster: FakeCluster, tmp_path: Path) -> None:
    cell = "class Point:\n    x = 1\ndef work(): return Point()"
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(cell, scope)
    job = ddpjob.submit(scope["work"])
    exec(cell.replace("1", "2"), scope)
    ends(cluster, tmp_path)
    assert job.result(timeout=20).x == 1


def test_a_function_in_a_module_of_the_user_is_sent_with_its_module(cluster, tmp_path, monkeypatch):
    """The function's module must be sent, because the image lacks it, even if its name equals the job's."""
    (tmp_path / "work.py").write_text("FACTOR = 3\ndef helper(x): return x * FACTOR\ndef work(x): return helper(x)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = __import__("work")
    job = ddpjob.submit(module.work, args=(2,))
    ends(cluster, tmp_path)
    assert job.result(timeout=20) == 6


def test_a_function_finds_its_other_modules_in_the_sent_folder(cluster, tmp_path, monkeypatch):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "shards.py").write_text("COUNT = 4\n")
    job = ddpjob.submit(in_main("def work():\n    import shards\n    return shards.COUNT"), code=tmp_path / "lib")
    ends(cluster, tmp_path)
    assert job.result(timeout=20) == 4


# ---------------------------------------------------------------- what cannot be sent or returned


class Huge:
    """An object of 2 GB, such as a model; its data are created while it is pickled."""

    parts = 0

    def __reduce__(self) -> Any:
        return list, (), None, self._all()

    def _part(self) -> bytes:
        Huge.parts += 1
        return os.urandom(1 << 20)

    def _all(self) -> Iterator[bytes]:
        while Huge.parts < 2000:
            yield self._part()


def test_a_closure_over_a_large_model_is_refused_by_name_before_it_is_copied() -> None:
    model, small = Huge(), [1]

    def train() -> int:
        return len(str(model)) + len(small)

    with pytest.raises(ddpjob.InputError, match=r"train: .*more than 0.68 MB \(model\)"):
        ddpjob.submit(train)
    assert Huge.parts < 10


def test_an_object_that_cannot_be_pickled_is_named(tmp_path: Path) -> None:
    with open(tmp_path / "file", "w") as log:

        def train() -> None:
            log.write("x")

        with pytest.raises(ddpjob.InputError, match=r"train: cannot be sent \(log\)"):
            ddpjob.run(train)


@pytest.mark.parametrize(
    ("code", "options", "why"),
    [
        ("async def work(): pass", {}, "work: calling it would run nothing"),
        ("def work(): yield 1", {}, "work: calling it would run nothing"),
        ("def work(*words): pass", {"args": "--epochs 5"}, "args='--epochs 5': must be a list"),
        ("def work(): pass", {"launcher": "mpirun"}, "--launcher"),
    ],
)
def test_what_would_train_nothing_is_refused(cluster, code, options, why):
    """A function that would train nothing must be refused: its job would succeed, or fail only in its pods."""
    for start in (ddpjob.submit, ddpjob.run):
        with pytest.raises(ddpjob.InputError, match=why):
            start(in_main(code), **options)
    assert cluster.find("ddpjobs") is None


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("def work():\n    import os\n    return os.urandom(2_000_000)", r"a bytes of 2\.0 MB, but at most 1 MB"),
        (
            "def work():\n    import threading\n    return threading.Lock()",
            "work returned a lock, which cannot be pickled",
        ),
    ],
)
def test_a_result_that_cannot_be_returned_is_reported_and_the_job_succeeds(cluster, tmp_path, code, why):
    """The job must succeed although its result cannot be sent, because the long training itself was correct."""
    job = ddpjob.submit(in_main(code))
    ends(cluster, tmp_path)
    assert job.wait(timeout=20).state == "Succeeded"
    with pytest.raises(ddpjob.UnsentError, match=why):
        job.result()


def test_a_result_of_almost_a_megabyte_is_returned(cluster: FakeCluster, tmp_path: Path) -> None:
    job = ddpjob.submit(in_main("def work():\n    print('no end of line', end='')\n    return b'x' * 990_000"))
    ends(cluster, tmp_path)
    assert len(job.result(timeout=20)) == 990_000


def test_a_result_whose_pod_is_gone_is_reported_as_lost(cluster: FakeCluster, tmp_path: Path) -> None:
    job = ddpjob.submit(in_main("def work(): return 1"))
    ends(cluster, tmp_path)
    del cluster.objects["/api/v1/namespaces/default/pods/work-1-0"]
    with pytest.raises(ddpjob.UnsentError, match="nothing that is still there"):
        job.result(timeout=20)


def test_a_rank_with_another_python_names_both_versions_before_it_loads_anything(tmp_path: Path) -> None:
    sent = function.sent(in_main("def work(): return 1"), ())
    sent.write(tmp_path)
    path = tmp_path / "ddpjob_function.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"python": "3.7", "function": "broken"}))
    done = called(tmp_path)
    assert done.returncode == 1
    assert "work was sent by Python 3.7, but this image has Python 3." in done.stderr
    assert "Traceback" not in done.stderr


def test_a_module_that_is_missing_in_the_image_is_named(tmp_path: Path) -> None:
    module = types.ModuleType("only_here")
    sys.modules["only_here"] = module
    try:
        function.sent(in_main("import only_here\ndef work(): return only_here"), ()).write(tmp_path)
    finally:
        del sys.modules["only_here"]
    done = called(tmp_path)
    assert done.returncode == 1
    assert "No module named 'only_here'" in done.stderr


def test_lines_that_only_resemble_a_result_are_not_unpickled() -> None:
    """Lines that only look like a result must not be unpickled, because that would run a stranger's code."""
    word = "ddpjob-answer-1234"
    lines = [f"{word}:value:0:0/2:YWJj", "noise", f"[0:0] {word}:value:0:1/2:ZGVm", "ddpjob-answer-99:value:1:0/1:eA=="]
    lines += [f"{word}:value", f"{word}:value:0:1/2:eA=="]
    assert function.answers(word, lines) == {("value", 0): b"abcdef"}


def test_the_error_about_missing_cloudpickle_tells_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ImportError, match=r"pip install 'ddpjob\[sdk\]'"):
        ddpjob.submit(lambda: None)


# ---------------------------------------------------------------- the cluster


def test_an_error_names_the_function_and_not_a_temporary_file(cluster: FakeCluster) -> None:
    def train() -> None: ...

    for start in (ddpjob.run, ddpjob.submit):
        with pytest.raises(ddpjob.InputError, match=r"^train: spec\.nprocPerNode: must be at least 1 or auto, is -1"):
            start(train, nproc_per_node=-1)
    cluster.forbidden.add("create ddpjobs.training.ddpjob.io")
    with pytest.raises(ddpjob.ClusterError, match="jane may not create ddpjobs"):
        ddpjob.submit(train)


def test_a_job_is_suspended_resumed_and_deleted(cluster: FakeCluster) -> None:
    job = ddpjob.submit(in_main("def work(): pass"))
    raw = cluster.find("ddpjobs", "work")
    job.suspend()
    assert raw["spec"]["suspend"] is True
    job.resume()
    assert raw["spec"]["suspend"] is False
    job.delete()
    assert cluster.find("ddpjobs", "work") is None
    with pytest.raises(ddpjob.ClusterError, match="work was deleted"):
        _ = job.status


def test_a_function_that_never_returns_ends_the_wait_at_the_timeout(cluster: FakeCluster) -> None:
    job = ddpjob.submit(in_main("def work():\n    while True: pass"))
    cluster.find("ddpjobs", "work")["status"] = {"state": "Running", "attempt": 1}
    with pytest.raises(TimeoutError, match="work is Running after 0s"):
        job.result(timeout=0.1)


def test_ctrl_c_ends_the_wait_and_not_the_job(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    job = ddpjob.submit(in_main("def work(): pass"))
    cluster.find("ddpjobs", "work")["status"] = {"state": "Running", "attempt": 1}
    cluster.after(f"get {JOBS}", lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        job.wait()
    assert "work goes on: wait() waits again" in capsys.readouterr().err
    assert cluster.find("ddpjobs", "work")["spec"].get("suspend") is not True


def test_a_job_is_displayed_in_a_notebook_without_executing_its_content(cluster: FakeCluster) -> None:
    job = ddpjob.submit(in_main("def work(): pass"))
    cluster.find("ddpjobs", "work")["status"] = {"state": "Running", "attempt": 1, "message": "<script>"}
    html = job._repr_html_()
    assert "<td>Running</td>" in html
    assert "&lt;script&gt;" in html
    assert "Running" in repr(job)
