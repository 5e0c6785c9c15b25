"""`ddpjob submit` and related commands on real pods: a script with its folder becomes a job, without an image build."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import until
from pods import ROOT, TRAINER_IMAGE, Space

SCRIPT = """
import os, signal, sys, time
import helper
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(0)))
print("rank", os.environ["RANK"], helper.WORD, *sys.argv[1:], flush=True)
end = time.monotonic() + float(os.environ.get("SECONDS", "0"))
while time.monotonic() < end: time.sleep(0.1)
"""
# Requests are small, because in most test clusters all pods run on one machine.
SMALL = ("--set", "spec.template.spec.containers[0].resources={requests: {cpu: 50m, memory: 64Mi}}")


class Client:
    """Runs `ddpjob …` in a folder with a script, for one namespace."""

    def __init__(self, space: Space, folder: Path) -> None:
        self.space, self.folder = space, folder
        (folder / "train.py").write_text(SCRIPT)
        (folder / "helper.py").write_text("WORD = 'grüße'\n")
        (folder / ".env").write_text("PASSWORD=1\n")

    def start(self, *words: object, **options: Any) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "ddpjob_cli", *map(str, words)]
        if "-n" not in argv:
            argv[4:4] = ["-n", self.space.name]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        return subprocess.Popen(argv, cwd=self.folder, text=True, env=os.environ, **streams)

    def run(self, *words: object) -> subprocess.CompletedProcess[str]:
        with self.start(*words) as process:
            out, err = process.communicate(timeout=400)
        assert "Traceback (most recent call last)" not in err, err
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    @contextlib.contextmanager
    def followed(self, *words: object, **options: Any) -> Iterator[tuple[subprocess.Popen[str], Path]]:
        """Yield a command that runs until its job is deleted, and its output file; kill the command at the end."""
        printed = self.folder / "printed"
        with printed.open("w") as file, self.start(*words, stdout=file, **options) as process:
            try:
                yield process, printed
            finally:
                process.kill()

    def has_begun(self, name: str, *, attempt: int, nodes: int) -> None:
        """Wait until the pods print a line; the state Running comes before, when their containers start."""
        self.space.waits(
            name, lambda s: s.get("state") == "Running" and s["attempt"] == attempt, f"attempt {attempt} runs", 90
        )
        until(
            lambda: len(self.run("logs", name, "--attempt", attempt).stdout.splitlines()) == nodes,
            f"each rank of attempt {attempt} has printed its line",
            60,
        )

    def submit(self, name: str, *words: object) -> subprocess.CompletedProcess[str]:
        own = ("--name", name, "--nodes", 2, "--image", TRAINER_IMAGE, *SMALL)
        # python instead of torchrun, because importing torch would take most of the test's time
        python = ("--set", 'spec.template.spec.containers[0].command=["python", "-u", "train.py", "a b"]')
        return self.run("submit", "train.py", *own, *python, *words)


@pytest.fixture
def client(space: Space, tmp_path: Path) -> Client:
    return Client(space, tmp_path)


@pytest.mark.timeout(400)
def test_a_script_is_submitted_followed_and_deleted_with_its_code(client: Client) -> None:
    done = client.submit("first", "--follow")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0:0] rank 0 grüße a b", "[1:1] rank 1 grüße a b"]
    assert "left out, because they look like credentials: .env" in done.stderr
    assert "✔ first Succeeded" in done.stderr
    assert "first" in client.run("get").stdout
    assert "Succeeded" in client.run("describe", "first").stdout
    assert client.run("events", "first").returncode == 0
    assert client.run("logs", "first", "--rank", 1).stdout == "rank 1 grüße a b\n"
    assert client.run("wait", "first", "--timeout", "5s").returncode == 0
    assert client.space.get("configmaps", "-l", "app.kubernetes.io/managed-by=ddpjob")["items"]
    assert client.run("delete", "first").returncode == 0
    until(
        lambda: not client.space.get("configmaps", "-l", "app.kubernetes.io/managed-by=ddpjob")["items"],
        "the code is deleted with the job",
        60,
    )


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("with_torch")
def test_a_training_with_torchrun_needs_no_image_of_its_own(client: Client) -> None:
    (client.folder / "train.py").write_text((ROOT / "trainer/examples/digits.py").read_text())
    done = client.run("submit", "train.py", "--nodes", 2, "--image", TRAINER_IMAGE, "--follow", "--", "--epochs", 2)
    assert done.returncode == 0, done.stderr
    assert '"world_size": 2' in done.stdout
    assert "✔ train Succeeded" in done.stderr
    assert "accuracy" in done.stderr.splitlines()[-1]


@pytest.mark.timeout(600)
def test_a_job_is_suspended_resumed_restarted_and_scaled(client: Client) -> None:
    """A job must be suspended, resumed, restarted and scaled with time to save; `logs -f` shows all attempts."""
    assert client.submit("long", "--env", "SECONDS=1000").returncode == 0
    assert client.run("wait", "long", "--for", "Running", "--timeout", "2m").returncode == 0
    client.has_begun("long", attempt=1, nodes=2)
    with client.followed("logs", "long", "-f") as (following, printed):
        until(lambda: printed.read_text().count("grüße") == 2, "the lines of both ranks are followed", 60)
        assert "up to 30 s to save" in client.run("suspend", "long").stderr
        assert client.run("wait", "long", "--for", "Suspended", "--timeout", "1m").returncode == 0
        assert client.run("resume", "long").returncode == 0
        client.has_begun("long", attempt=2, nodes=2)
        assert client.run("restart", "long").returncode == 0
        client.has_begun("long", attempt=3, nodes=2)
        scaled = client.run("scale", "long", "--nodes", 3)
        assert scaled.returncode == 0, scaled.stderr
        client.has_begun("long", attempt=4, nodes=3)
        # The pods' output is deleted with the job.
        until(lambda: printed.read_text().count("rank 0 grüße") == 4, "the line of each attempt was followed", 60)
        assert client.run("delete", "long").returncode == 0
        _, err = following.communicate(timeout=60)
    assert following.returncode == 1
    assert "long was deleted" in err
    assert printed.read_text().count("saved") >= 6, "each rank of attempts 1 to 3 had time to save"


@pytest.mark.timeout(300)
def test_describe_shows_the_same_sentence_about_a_failed_job_as_its_last_line(client: Client) -> None:
    (client.folder / "helper.py").write_text("raise ValueError('no such shard: 7')\n")
    done = client.submit("failing", "--set", "spec.backoffLimit=0", "--follow")
    assert done.returncode == 1
    assert "✖ failing Failed" in done.stderr
    assert "ValueError: no such shard: 7" in done.stderr
    described = client.run("describe", "failing").stdout
    assert "ValueError: no such shard: 7" in described
    assert "Traceback" in described
    assert client.run("wait", "failing", "--timeout", "5s").returncode == 1


def test_the_commands_have_only_the_rights_of_the_user(client: Client, tmp_path: Path) -> None:
    """The commands must have only the user's rights: a user who may only view is told which right is missing."""
    space = client.space
    space.kubectl("create", "serviceaccount", "looker")
    space.kubectl("create", "rolebinding", "look", "--clusterrole=view", f"--serviceaccount={space.name}:looker")
    token = space.kubectl("create", "token", "looker").strip()
    config = tmp_path / "looker"
    config.write_text(space.kubectl("config", "view", "--raw", "--minify", "--flatten"))
    os.chmod(config, 0o600)
    for words in (("unset", "users"), ("set-credentials", "looker", f"--token={token}")):
        subprocess.run(["kubectl", f"--kubeconfig={config}", "config", *words], check=True, capture_output=True)
    subprocess.run(
        ["kubectl", f"--kubeconfig={config}", "config", "set-context", "--current", "--user=looker"],
        check=True,
        capture_output=True,
    )
    argv = [sys.executable, "-m", "ddpjob_cli"]
    env = {**os.environ, "KUBECONFIG": str(config)}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*argv, *words, "-n", space.name], cwd=client.folder, env=env, capture_output=True, text=True, timeout=60
        )

    assert run("get").returncode == 0
    refused = run("submit", "train.py")
    assert refused.returncode == 1
    assert f"looker may not create ddpjobs.training.ddpjob.io in namespace {space.name}" in refused.stderr
    assert "No resources found" in space.kubectl("get", "ddp,configmaps", "-l", "app.kubernetes.io/managed-by=ddpjob")


@pytest.mark.timeout(400)
def test_a_saved_file_runs_on_all_pods_and_the_end_of_the_session_releases_the_nodes(client: Client) -> None:
    """In `ddpjob dev --cluster` a pod that is deleted must come back with the code of the last save."""
    script = client.folder / "code" / "train.py"
    script.parent.mkdir()
    text = "import os, time\nprint('v1 of rank', os.environ['RANK'], flush=True)\ntime.sleep(600)\n"
    script.write_text(text)
    words = ("dev", "--cluster", "--nodes", 2, *SMALL, "--image", TRAINER_IMAGE, "--name", "dev", script)

    def prints(text: str, times: int = 1) -> None:
        until(lambda: printed.read_text().count(text) >= times, f"it prints {text}", 120)

    with client.followed(*words, stderr=subprocess.STDOUT) as (session, printed):
        for version, pause in (("v1", "time.sleep(600)"), ("v2", "1 / 0"), ("v3", "time.sleep(600)")):
            script.write_text(text.replace("v1", version).replace("time.sleep(600)", pause))
            prints(f"[0:0] {version} of rank 0")
            prints(f"[1:1] {version} of rank 1")
            if version == "v2":
                prints("(ZeroDivisionError: division by zero); save a file to start them again")
        client.space.kubectl("delete", "pod", "dev-1-1", "--grace-period=1")
        prints("[1:1] v3 of rank 1", 2)
        session.terminate()
        assert session.wait(60) == 130
    until(lambda: not client.space.kubectl("get", "ddpjobs", "-o", "name"), "the job is gone", 60)
