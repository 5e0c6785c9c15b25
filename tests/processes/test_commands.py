"""`ddpjob` as users start it: at a terminal, stopped by Ctrl-C, with bytes that are not UTF-8, and with git."""

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pexpect
import pytest
from fake_cluster import FakeCluster, pod
from worlds import manifest

from ddpjob_cli.client import pack

DDPJOB = [sys.executable, "-m", "ddpjob_cli"]


def stored(state: str = "Running", **status: Any) -> dict[str, Any]:
    """Return the job `digits` with a status as an operator writes it."""
    body = manifest()
    del body["metadata"]["uid"], body["metadata"]["namespace"]
    return {**body, "status": {"state": state, "reason": "AllNodesRun", "message": "", "attempt": 1} | status}


def test_a_shell_that_loads_the_script_completes_commands_and_options() -> None:
    for typed, offered in {"ddpjob comp": "plain,completion", "ddpjob check --for": "plain,--format"}.items():
        environ = os.environ | {
            "_DDPJOB_COMPLETE": "bash_complete", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))
        }  # fmt: skip
        done = subprocess.run(DDPJOB, env=environ, capture_output=True, text=True, timeout=60, check=False)
        assert done.stdout.splitlines() == [offered], done.stderr


@pytest.mark.parametrize(
    ("command", "says"), [("no-such-plugin", "No such file"), ("false", "returned 1"), ("true", "Expecting value")]
)
def test_a_plugin_that_gives_no_credentials_is_reported(cluster, ddpjob, tmp_path, command, says):
    """If a plugin gives no credentials, the request must not be sent without any."""
    config = json.loads((tmp_path / "kubeconfig").read_text())
    plugin = {"apiVersion": "client.authentication.k8s.io/v1", "command": command, "interactiveMode": "Never"}
    config["users"][0]["user"] = {"exec": plugin}
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    done = ddpjob("get", code=2, says="kubeconfig: no credentials for context test: ")
    assert says in done.err
    assert done.err.count("\n") == 1
    assert cluster.requests == []


def test_a_log_keeps_its_bytes_with_and_without_following(cluster: FakeCluster) -> None:
    """A log in Latin-1 must have the same bytes with -f, without -f, and in kubectl logs."""
    cluster.add("ddpjobs", stored(state="Succeeded"))
    cluster.add("pods", pod("digits", exit_code=0))
    printed = b"caf\xe9 \xff\n"
    cluster.logs["digits-1-0"] = [printed[:-1].decode(errors="surrogateescape")]
    argv = [*DDPJOB, "logs", "digits", "--cluster"]
    assert subprocess.run(argv, capture_output=True, check=True).stdout == printed
    assert subprocess.run([*argv, "-f"], capture_output=True, check=True).stdout == b"[0:0] " + printed


@pytest.mark.parametrize("is_drawn", [True, False])
def test_top_redraws_until_ctrl_c_and_prints_once_on_a_dumb_terminal(cluster, monkeypatch, *, is_drawn):
    """Ctrl-C must end `ddpjob top` with exit code 0, because this is the normal way to end it."""
    monkeypatch.setenv("TERM", "xterm" if is_drawn else "dumb")
    job = cluster.add("ddpjobs", stored(display={"step": "312/1125"}))
    argv = [*DDPJOB[1:], "top"]
    with pexpect.spawn(sys.executable, argv, dimensions=(24, 80), timeout=30, encoding="utf-8") as terminal:
        terminal.expect_exact("312/1125")
        if is_drawn:
            job["status"]["display"]["step"] = "400/1125"
            terminal.expect_exact("400/1125")
            cluster.answers["list ddpjobs.training.ddpjob.io"] = 503, {"kind": "Status", "message": "shutting down"}
            terminal.expect_exact("not ready (503)")
            terminal.sendintr()
        terminal.expect(pexpect.EOF)
    assert terminal.exitstatus == 0


def test_ctrl_c_ends_the_command_and_not_the_job(cluster: FakeCluster) -> None:
    """Ctrl-C must end only the command. The training continues, so users may close the laptop."""
    cluster.add("ddpjobs", stored())
    argv = [*DDPJOB, "logs", "digits", "--cluster", "-f"]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        cluster.wait_for("get ddpjobs.training.ddpjob.io", 2)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    # 130 is the exit code of a shell after SIGINT. During an import SIGINT ends Python by the signal.
    assert process.returncode in (130, -signal.SIGINT), err
    assert "Traceback" not in err
    assert cluster.find("ddpjobs", "digits") is not None


def test_gitignore_has_the_same_meaning_as_in_git(tmp_path: Path) -> None:
    """.gitignore must mean the same as in git: the files that are sent are compared with git's."""
    unreadable = "!\n[z-a]\nend\\\n"
    (tmp_path / ".gitignore").write_text(
        f"*.tmp\nbuild/\n!important.tmp\ndocs/**/gen\n# no\n\\#yes\nspace\\ \n{unreadable}"
    )
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/.gitignore").write_text("/local\n!x.tmp\n")
    names = "a.tmp important.tmp build/x docs/a/b/gen docs/gen #yes sub/local sub/x.tmp sub/deep/local sub/build/y"
    for path in names.split():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    command = ["git", "ls-files", "-z", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    with tarfile.open(fileobj=io.BytesIO(pack.pack(tmp_path).data)) as tar:
        sent = set(tar.getnames())
    assert sent == set(filter(None, listed.stdout.split("\0")))


def test_ctrl_c_ends_following_and_tells_that_the_job_continues(tmp_path: Path, cluster: FakeCluster) -> None:
    (tmp_path / "train.py").write_text("print('trains')\n")
    argv = [*DDPJOB, "submit", "train.py", "--follow"]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        cluster.wait_for("get ddpjobs.training.ddpjob.io")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "train goes on in the cluster" in err
    assert "Traceback" not in err
    assert cluster.find("ddpjobs", "train") is not None


def test_stdin_that_is_not_utf_8_is_an_error_of_one_line(tmp_path: Path) -> None:
    words = [*DDPJOB, "run", "-", "--dry-run"]
    done = subprocess.run(words, input="print('é')".encode("latin-1"), capture_output=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, b"stdin:1: it is not UTF-8\n")
