"""`ddpjob.run` starts functions and scripts as processes of this machine, from a Python program."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from shell import eventually

import ddpjob
from ddpjob_operator.job import api


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


def plain(folder: Path, code: str) -> Path:
    """Return a job without torch, of one process."""
    (folder / "train.py").write_text(code)
    pod = {"containers": [{"name": "trainer", "image": "none", "command": ["python", "train.py"]}]}
    path = folder / "job.json"
    spec: dict[str, Any] = {"nodes": 1, "backoffLimit": 0, "template": {"spec": pod}}
    body = {"apiVersion": api.API_VERSION, "kind": api.KIND, "metadata": {"name": "plain"}, "spec": spec}
    path.write_text(json.dumps(body))
    return path


def test_a_function_trains_on_all_ranks_and_the_result_of_rank_0_is_returned(tmp_path: Path) -> None:
    def train(value: int) -> tuple[float, str]:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.tensor(float(value))
        dist.all_reduce(total)
        print("reduced")
        dist.destroy_process_group()
        return float(total), os.getcwd()

    job = ddpjob.run(train, args=(2,), nodes=1, nproc_per_node=2)
    assert job.result(timeout=200) == (4.0, str(tmp_path))
    assert job.name == "train"
    assert job.status.state == "Succeeded"
    assert list(job.logs()).count("reduced") == 2


def test_the_exception_of_the_failed_rank_is_the_cause(tmp_path: Path) -> None:
    def train() -> None:
        raise KeyError("no such shard")

    job = ddpjob.run(train, max_restarts=0)
    with pytest.raises(ddpjob.JobFailedError, match="no such shard") as raised:
        job.wait(timeout=200)
    assert repr(raised.value.__cause__) == "KeyError('no such shard')"


def test_a_missing_script_is_refused_at_once() -> None:
    with pytest.raises(ddpjob.InputError, match=r"nope\.py: No such file"):
        ddpjob.run("nope.py")


def test_a_job_can_be_suspended_resumed_and_deleted(tmp_path: Path) -> None:
    """A job must be suspended, resumed and deleted: wait() ends with a suspension, and the script finds its save."""
    script = (
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "if pathlib.Path('saved').exists(): print('goes on', flush=True); sys.exit()\n"
        "pathlib.Path('saved').touch()\n"
        "while True: time.sleep(0.05)\n"
    )
    job = ddpjob.run(plain(tmp_path, script))
    eventually((tmp_path / "saved").exists)
    job.suspend()
    with pytest.raises(ddpjob.JobFailedError, match="plain is Suspended"):
        job.wait(timeout=60)
    job.resume()
    assert job.wait(timeout=60).state == "Succeeded"
    assert list(job.logs()) == ["goes on"]
    job.delete()


def test_ctrl_c_ends_the_wait_and_not_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = "import pathlib, time\nwhile not pathlib.Path('end').exists(): time.sleep(0.05)\n"
    job = ddpjob.run(plain(tmp_path, script))
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        job.wait()
    assert "plain goes on: wait() waits again" in capsys.readouterr().err
    (tmp_path / "end").touch()
    assert job.wait(timeout=60).state == "Succeeded"


def test_a_deleted_run_is_no_success(tmp_path: Path) -> None:
    job = ddpjob.run(plain(tmp_path, "import time\nwhile True: time.sleep(0.05)\n"))
    with pytest.raises(TimeoutError, match="plain is"):
        job.wait(timeout=0.2)
    job.delete()
    with pytest.raises(ddpjob.JobFailedError, match="plain is Suspended"):
        job.wait(timeout=20)


def test_a_program_waits_at_its_exit_for_its_running_jobs_and_says_so(tmp_path: Path) -> None:
    """Like multiprocessing, a program that only starts a training must not end before the training does. After a Ctrl-C
    in wait() the program would otherwise seem to hang."""
    job = plain(tmp_path, "import pathlib, time\ntime.sleep(0.5)\npathlib.Path('done').touch()\n")
    code = f"import ddpjob; ddpjob.run({str(job)!r})"
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stderr=subprocess.PIPE, text=True)
    assert (tmp_path / "done").exists()
    assert "this program waits for plain; Ctrl-C stops it" in done.stderr
