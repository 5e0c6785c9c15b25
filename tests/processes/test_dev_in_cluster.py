"""`ddpjob dev --cluster`: what is saved reaches every pod, before node 0's agent starts the ranks again."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from fake_cluster import FakeCluster, pod
from hypothesis import given
from hypothesis import strategies as st
from shell import Ddpjob
from worlds import manifest

from ddpjob_cli.client import connection, in_pod, jobs
from ddpjob_cli.client.dev import Code, DevPods, MovingDeadline, changes, read_code
from ddpjob_cli.client.errors import ClusterError
from ddpjob_core.heartbeat import RERUN_SIGNAL

NAMES = st.sampled_from("abc")
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
FILES = st.tuples(st.binary(max_size=3), st.booleans())


def is_tree(paths: list[str]) -> bool:
    return not any(other.startswith(f"{path}/") for path in paths for other in paths)


CODES = st.dictionaries(PATHS, FILES | st.just("elsewhere"), max_size=4).filter(lambda code: is_tree(list(code)))


class Pods:
    """Two pods, each of them a folder. A fake kubectl runs the given program in that folder."""

    def __init__(self, folder: Path, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.cluster = folder, cluster
        self.source = folder / "source"
        self.source.mkdir()
        (self.source / "train.py").write_text("1")
        self.said: list[str] = []
        self.signalled: list[str] = []
        self.unreachable: set[str] = set()
        body = manifest(container={"command": ["ddprun", "train.py"], "workingDir": "/code"})
        del body["metadata"]["uid"], body["metadata"]["namespace"]
        cluster.add("ddpjobs", {**body, "status": {"state": "Running", "attempt": 1}})
        for place in (0, 1):
            self.add(place)
        monkeypatch.setattr(shutil, "which", lambda _: "/bin/kubectl")
        real = subprocess.run
        monkeypatch.setattr(subprocess, "run", lambda words, **options: self._exec(real, words, options))
        api = connection.connect(namespace="default")
        self.dev = DevPods(api, jobs.find(api, "digits"), self.source, read_code(self.source), self.said.append)

    def add(self, place: int, attempt: int = 1) -> None:
        self.cluster.add("pods", pod("digits", attempt, place))
        self.at(place, attempt).mkdir()
        shutil.copytree(self.folder / "source", self.at(place, attempt), dirs_exist_ok=True)

    def at(self, place: int, attempt: int = 1) -> Path:
        return self.folder / f"digits-{attempt}-{place}"

    def texts(self) -> list[str]:
        return [(self.at(place) / "train.py").read_text() for place in (0, 1)]

    def _exec(self, real: Any, words: list[str], options: Any) -> subprocess.CompletedProcess[str]:
        at = words.index("--")
        name, program = words[at - 1], words[at + 2 : -1 if words[-1].isdigit() else None]
        if name in self.unreachable:
            return subprocess.CompletedProcess(words, 1, "", "error: unable to upgrade connection")
        assert program[-1] == "/code"
        done = real([sys.executable, *program[:-1], str(self.folder / name)], **options)
        if words[-1].isdigit():
            assert self.texts()[1:] == [(self.source / "train.py").read_text()], "the other nodes have the files"
            self.signalled.append(name)
        return done


@pytest.fixture
def pods(tmp_path: Path, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> Pods:
    return Pods(tmp_path, cluster, monkeypatch)


def test_a_save_reaches_all_pods_and_then_the_ranks_start_again(pods: Pods) -> None:
    """A save must reach all pods before the ranks start: ranks with two versions of a script may hang."""
    (pods.source / "train.py").write_text("2")
    pods.dev.save()
    assert (pods.texts(), pods.signalled) == (["2", "2"], ["digits-1-0"])
    pods.dev.look()
    pods.dev.save()  # save() without a change, as if the user had only pressed Enter
    assert pods.signalled == ["digits-1-0"] * 2


def test_a_pod_that_cannot_be_reached_is_tried_again_and_no_rank_starts_before(pods: Pods) -> None:
    (pods.source / "train.py").write_text("2")
    pods.unreachable = {"digits-1-1"}
    with pytest.raises(ClusterError, match=r"pod digits-1-1 did not get the files: .*unable to upgrade connection"):
        pods.dev.save()
    assert pods.signalled == []
    pods.unreachable = set()
    pods.dev.look()
    assert (pods.texts(), pods.signalled) == (["2", "2"], ["digits-1-0"])


def test_pods_of_a_later_attempt_get_the_code_of_the_last_save(pods: Pods) -> None:
    before = read_code(pods.source)
    (pods.source / "train.py").write_text("2")
    pods.dev.save()
    for place in (0, 1):
        pods.add(place, attempt=2)
        (pods.at(place, 2) / "train.py").write_bytes(before["train.py"][0])
    pods.dev.look()
    assert [(pods.at(place, 2) / "train.py").read_text() for place in (0, 1)] == ["2", "2"]
    assert pods.signalled == ["digits-1-0", "digits-2-0"]


def test_a_terminal_is_lent_to_the_running_pod_of_a_node(pods: Pods, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's terminal must be connected to a node's running pod, also a replacement; without a pod, to none."""
    program = pods.folder / "kubectl"
    program.write_text(f'#!/bin/sh\necho "$@" > {pods.folder}/words\nexit 130\n')
    program.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda _: str(program))
    api = connection.connect(namespace="default")
    dev = DevPods(api, jobs.find(api, "digits"), pods.source, {}, print)
    assert dev.lend_terminal(1, ["7", "5", "9"], lambda: False) == 130
    words = (pods.folder / "words").read_text()
    assert "exec -i" in words
    assert "-t digits-1-1 -- python3 -I -S -c from" in words
    assert words.endswith(" 7 5 9\n")
    assert dev.lend_terminal(2, ["7", "5", "9"], lambda: False) == 3
    pods.cluster.forbidden.add("list pods")
    assert dev.lend_terminal(1, ["7", "5", "9"], lambda: False) == 1


def test_what_cannot_be_sent_is_named_and_the_ranks_go_on(pods: Pods) -> None:
    with (pods.source / "data.bin").open("wb") as file:
        file.truncate(30 << 20)
    pods.dev.save()
    assert (pods.signalled, len(pods.said)) == ([], 1)
    assert "data.bin 31.5 MB" in pods.said[0]


def test_a_job_whose_client_is_dead_ends_within_the_idle_limit_and_no_other_does(cluster: FakeCluster) -> None:
    """If the client dies, for example with its laptop, the job must end after the idle limit and free its GPUs."""
    stored = cluster.add("ddpjobs", {**manifest(), "status": {"state": "Pending"}})
    deadline = MovingDeadline(connection.connect(namespace="default"), "digits", 1800)

    def until(now: float, start: str | None) -> int | None:
        stored["status"]["startTime"] = start
        deadline.renew(jobs.of_raw(stored).job.status, now)
        limit: int | None = stored["spec"].get("activeDeadlineSeconds")
        return limit

    assert until(5000, None) is None, "in a queue no time counts"
    first, second = "2026-01-01T00:00:00Z", "2026-01-01T09:00:00Z"
    limits = {after: until(6000 + after, first) or 0 for after in range(0, 20_000, 90)}
    left = [limit - after for after, limit in limits.items()]
    assert max(left) == 1800
    assert min(left) > 1200, "a client may sleep for a while"
    assert len(set(limits.values())) < 50, "each one is a request"
    assert until(30_000, second) == 1800, "a job that starts again counts again"


@pytest.mark.parametrize(
    ("words", "limit"),
    [((), 1800), (("--idle", "90"), 90), (("--idle", "0"), None), (("--set", "spec.activeDeadlineSeconds=60"), 60)],
)
def test_a_session_begins_with_a_deadline(
    cluster: FakeCluster, ddpjob: Ddpjob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...], limit: int | None,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)\n")
    monkeypatch.setattr(shutil, "which", lambda _: "/bin/kubectl")
    seen: list[Any] = []

    def start_and_end() -> None:
        job = cluster.find("ddpjobs")
        seen.append(dict(job["spec"]))
        job["status"] = {"state": "Failed", "startTime": "2026-01-01T00:00:00Z"}

    cluster.after("create ddpjobs.training.ddpjob.io", start_and_end)
    assert ddpjob("dev", "--cluster", *words, "train.py")[0] == 1
    assert seen[0].get("activeDeadlineSeconds") == limit


def test_a_second_session_for_a_job_is_refused_and_leaves_the_first(pods, cluster, ddpjob, monkeypatch):
    """A second session for a job must be refused. It would send other code, and its end would delete the job."""
    monkeypatch.chdir(pods.source)
    code, _, err = ddpjob("dev", "--cluster", "--name", "digits", "train.py")
    assert code != 0
    assert "a DDPJob digits already exists in namespace default (Running)" in err
    assert cluster.find("ddpjobs", "digits")


@given(CODES, CODES)
def test_a_folder_with_the_changes_is_the_new_folder(before: Code, now: Code) -> None:
    """A change of a folder must arrive exactly, also if a file becomes a folder, a link or an executable."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.chdir(folder)
        in_pod.write(changes({}, before))
        in_pod.write(changes(before, now))
        found: dict[str, Any] = {}
        for path in (path for path in Path().rglob("*") if path.is_symlink() or path.is_file()):
            is_link = path.is_symlink()
            found[str(path)] = (
                str(path.readlink()) if is_link else (path.read_bytes(), bool(path.stat().st_mode & 0o100))
            )
    assert found == now


def test_only_an_agent_that_handles_the_signal_gets_it() -> None:
    """Only an agent with a handler may get the signal, which ends any other process."""
    catches = f"import signal, time; signal.signal({RERUN_SIGNAL}, print); print('up', flush=True); time.sleep(60)"
    plain = "import time; print('up', flush=True); time.sleep(60)"
    started = [
        subprocess.Popen([sys.executable, "-c", text, name], stdout=subprocess.PIPE)
        for text, name in ((catches, "ddprun"), (plain, "ddprun"), (catches, "other"))
    ]
    try:
        for process in started:
            process.stdout.readline()
        found = set(in_pod.agents(RERUN_SIGNAL))
        assert [process.pid in found for process in started] == [True, False, False]
    finally:
        for process in started:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--cluster", "-m", "train"), "-m: only on this machine"),
        (("--cluster", "--pdb", "0", "train.py"), "--pdb 0: stdin is not a terminal"),
        (
            ("--cluster", "--nodes", "2", "--pdb", "2", "train.py"),
            "--pdb 2: there is no such rank: the job has ranks 0 to 1",
        ),
        (("--cluster", "--nproc-per-node", "gpu", "train.py"), "--nproc-per-node gpu: with --cluster it is a number"),
        (("--image", "mine", "train.py"), "are for --cluster"),
        (("-n", "team", "train.py"), "are for --cluster"),
        (("--cluster", "spawns.py"), "spawns.py: ddpjob dev needs ddprun"),
    ],
)
def test_an_option_for_the_other_place_is_refused(
    cluster: FakeCluster, ddpjob: Ddpjob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...], said: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "spawns.py").write_text(
        "import torch.multiprocessing as mp\nif __name__ == '__main__':\n    mp.spawn(print, nprocs=2)\n"
    )
    code, out, err = ddpjob("dev", *words)
    assert (code, out) == (2, "")
    assert said in err
