"""`ddpjob stacks` in a cluster: kubectl signals the agent in each pod, which writes to its log."""

import shutil
import subprocess
from typing import Any

import pytest
from fake_cluster import FakeCluster, pod
from worlds import manifest

DDPRUN = {"command": ["ddprun", "train.py"]}


@pytest.fixture(autouse=True)
def kubectl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: "/bin/kubectl")


def add(cluster: FakeCluster, state: str = "Running", container: dict[str, Any] = DDPRUN) -> None:
    body = manifest(container=container)
    del body["metadata"]["uid"], body["metadata"]["namespace"]
    status = {"state": state, "reason": "AllNodesRun", "message": "2 of 2 nodes are running", "attempt": 1}
    cluster.add("ddpjobs", {**body, "status": status})
    for place in (0, 1):
        cluster.add("pods", pod("digits", 1, place))
        cluster.logs[f"digits-1-{place}"] = ["epoch 1", *text(place, "old")]


def text(rank: int, function: str) -> list[str]:
    return [
        f"ddprun: stacks of rank {rank}, innermost call first:",
        f"  rank {rank}: step 7",
        "a line of the rank",
        f"    train.py:4 in {function}",
        "ddprun: end of the stacks",
    ]


def answered_by(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, code: int = 0, error: str = ""
) -> list[list[str]]:
    """Return the list of kubectl calls. A fake kubectl handles them, and writes the agents' texts to the logs."""
    called: list[list[str]] = []

    def run(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        called.append(words)
        name = words[words.index("--") - 1]
        if code == 0:
            cluster.logs[name] += text(int(name[-1]), "load_batch")
        return subprocess.CompletedProcess(words, code, "", error)

    monkeypatch.setattr(subprocess, "run", run)
    return called


def test_all_agents_are_signalled_and_only_their_new_texts_are_shown(cluster, ddpjob, monkeypatch):
    """Texts of an earlier request must not be shown, because they have old positions of the ranks."""
    add(cluster)
    called = answered_by(cluster, monkeypatch)
    code, out, _ = ddpjob("stacks", "digits", "-n", "default")
    assert code == 0
    assert out == "".join(
        f"stacks of rank {r}, innermost call first:\n  rank {r}: step 7\n    train.py:4 in load_batch\n" for r in (0, 1)
    )
    assert sorted(words[: words.index("--")] for words in called) == [
        ["/bin/kubectl", "exec", "--namespace", "default", "-c", "trainer", f"digits-1-{place}"] for place in (0, 1)
    ]
    called.clear()
    assert ddpjob("stacks", "digits", "--cluster", "--rank", 1)[1] == "  rank 1: step 7\n    train.py:4 in load_batch\n"
    assert len(called) == 1, "the other pod is left alone"


@pytest.mark.parametrize(
    ("code", "error", "sentence"),
    [
        (3, "", "no stacks of pod digits-1-0: no ddprun runs in it now"),
        (
            1,
            "\nError: pods/exec is forbidden",
            "pod digits-1-0: kubectl exec: Error: pods/exec is forbidden",
        ),
    ],
)
def test_a_pod_that_cannot_be_signalled_is_named(cluster, ddpjob, monkeypatch, code, error, sentence):
    add(cluster)
    answered_by(cluster, monkeypatch, code, error)
    ended, out, err = ddpjob("stacks", "digits", "--cluster")
    assert (ended, out) == (1, "")
    assert sentence in err


def test_a_job_without_stacks_gives_one_sentence(cluster, ddpjob, monkeypatch):
    called = answered_by(cluster, monkeypatch)
    code, out, err = ddpjob("stacks", "gone", "--cluster")
    assert (code, out) == (2, "")
    assert "no DDPJob gone" in err
    add(cluster, "Failed")
    assert ddpjob("stacks", "digits", "--cluster")[0::2] == (2, "digits: has ended (Failed), so it has no stacks\n")
    add(cluster, container={})
    assert "its command does not start ddprun" in ddpjob("stacks", "digits", "--cluster")[2]
    assert called == []
    add(cluster)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    code, _, err = ddpjob("stacks", "digits", "--cluster")
    assert code == 1
    assert "kubectl exec --namespace default digits-1-0 -c trainer -- kill -QUIT 1" in err
