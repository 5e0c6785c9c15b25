"""The command line against an API server: its output, and its requests."""

import datetime as dt
import json
import re
import socket
import threading
import time
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from fake_cluster import FakeCluster, kubeconfig, pod
from shell import Ddpjob
from worlds import manifest

from ddpjob_cli.client import watch
from ddpjob_cli.commands.main import cli


def stored(name: str = "digits", state: str | None = "Running", **status: Any) -> dict[str, Any]:
    """Return a job with a status as an operator writes it."""
    body = manifest(name)
    del body["metadata"]["uid"], body["metadata"]["namespace"]
    full = {"state": state, "reason": "AllNodesRun", "message": "2 of 2 nodes are running", "attempt": 1} | status
    return {**body, "status": full if state else {}}


def runs(cluster: FakeCluster, *logs: list[str], exit_code: int | None = None, **status: Any) -> dict[str, Any]:
    """Return a server with one job, and with a pod for each log."""
    for place, lines in enumerate(logs):
        cluster.add("pods", pod("digits", 1, place, exit_code=exit_code))
        cluster.logs[f"digits-1-{place}"] = lines
    return cluster.add("ddpjobs", stored(**status))


def pod_ends(trainer: dict[str, Any], exit_code: int = 0) -> None:
    trainer["status"]["containerStatuses"][0]["state"] = {"terminated": {"exitCode": exit_code}}


LOOK = "get ddpjobs.training.ddpjob.io"
THEN = "2026-01-01T00:10:00Z"
SUSPENDED = {"type": "Suspended", "status": "True", "reason": "Suspended", "message": "", "lastTransitionTime": THEN}
WHERE = {"attempt": 1, "rank": 1, "nodeRank": 1, "pod": "digits-1-1", "node": "gpu-07", "exitCode": 1, "time": THEN}
FAILURE = WHERE | {
    "exception": "ValueError: no such shard", "class": "application", "chargedTo": "application", "step": 312,
    "logTail": "Traceback …\nValueError: no such shard",
}  # fmt: skip


# -------------------------------------------------------------------- connecting


@pytest.mark.parametrize("current", [None, ""])
def test_a_single_context_is_used_if_no_current_context_is_set(cluster, ddpjob, tmp_path, current):
    """A kubeconfig with one context and no current context must be accepted, as after `unset current-context`."""
    config = json.loads((tmp_path / "kubeconfig").read_text())
    del config["current-context"]
    config |= {} if current is None else {"current-context": current}
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    cluster.add("ddpjobs", stored())
    assert "digits" in ddpjob("get", "--context", "test").out
    done = ddpjob("get", "--context", "tets")
    assert (done.code, "did you mean test?" in done.err, "--context tets" in done.err) == (2, True, True)
    assert ddpjob("get").code == 2


def test_a_kubeconfig_may_be_given_as_for_kubectl(cluster, ddpjob, tmp_path, monkeypatch):
    """`kubectl ddp get --kubeconfig FILE` must use the cluster of this file."""
    cluster.add("ddpjobs", stored())
    for set_ in (str(tmp_path / "none"), ""):
        monkeypatch.setenv("KUBECONFIG", set_)
        assert "digits" in ddpjob("get", "--kubeconfig", tmp_path / "kubeconfig").out
    assert "no node has a log" in ddpjob("logs", "digits", "--kubeconfig", tmp_path / "kubeconfig").err
    assert ddpjob("get", "--kubeconfig", tmp_path / "nothing").code == 2
    there = f"--context test: not in {tmp_path}/nothing (there: none)"
    ddpjob("get", "--kubeconfig", tmp_path / "nothing", "--context", "test", code=2, says=there)


def test_a_server_that_does_not_answer_costs_no_more_than_the_request_timeout(cluster, ddpjob):
    """A server that does not answer, as without a VPN, must block the terminal only until the request timeout."""
    cluster.seconds = 10
    began = time.monotonic()
    done = ddpjob("get", "--request-timeout", "1s", code=1)
    assert time.monotonic() - began < cluster.seconds, "it has not waited for the answer"
    assert done.err.startswith("context test (http://127.0.0.1:")
    assert "does not answer within 1 s" in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("time_", ["0", "0s", "999999999999"])
def test_the_request_timeout_may_be_unlimited(cluster: FakeCluster, ddpjob: Ddpjob, time_: str) -> None:
    """`--request-timeout 0` means no limit, as in kubectl."""
    cluster.add("ddpjobs", stored())
    assert "digits" in ddpjob("get", "--request-timeout", time_).out


@pytest.mark.parametrize("namespace", ["a/b", "..", "team a", "Team"])
def test_a_namespace_that_is_a_path_is_refused(cluster: FakeCluster, ddpjob: Ddpjob, namespace: str) -> None:
    """A namespace that is a path must be refused: it becomes part of a URL, and would lead to another path."""
    done = ddpjob("delete", "digits", "-n", namespace)
    assert (done.code, cluster.requests) == (2, [])
    assert f"{namespace!r} is not the name of a namespace" in done.err


def test_an_unreachable_server_or_a_closed_connection_is_described_in_words(tmp_path, monkeypatch, ddpjob):
    """Users must read a sentence, not a Python tuple, when a server or a proxy closes the connection."""
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, "http://127.0.0.1:9")))
    done = ddpjob("get", code=1, says=("does not answer", "refused"))
    assert done.err.count("\n") == 1
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            connection, _ = server.accept()
            connection.recv(2**16)
            connection.close()

        threading.Thread(target=hang_up, daemon=True).start()
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, f"http://127.0.0.1:{server.getsockname()[1]}")))
        done = ddpjob("get")
    assert done.code == 1
    assert done.err.endswith("does not answer: Remote end closed connection without response\n")


def test_the_error_without_a_kubeconfig_names_the_local_run(tmp_path, monkeypatch, ddpjob):
    """The error must name `ddpjob run`, because a user without a cluster probably wants a local run."""
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    ddpjob("get", code=2, says="ddpjob run")


@pytest.mark.parametrize("content", ["", "[1, 2]", "a: [", "contexts: 5", "\0", "current-context: x\ncontexts: []"])
def test_a_broken_kubeconfig_gives_an_error_of_one_line(tmp_path, monkeypatch, ddpjob, content):
    path = tmp_path / "broken"
    path.write_text(content)
    monkeypatch.setenv("KUBECONFIG", str(path))
    done = ddpjob("get", code=2)
    assert done.err.startswith(f"{path}: the kubeconfig cannot be used")
    assert done.err.count("\n") == 1


def test_the_help_of_each_cluster_command_has_its_exit_codes_and_an_example(ddpjob: Ddpjob) -> None:
    """The help of each command must have its exit codes: scripts tell a failed job from a wrong name by them."""
    for command in "submit get describe logs events top wait suspend resume restart scale delete".split():
        text = ddpjob(command, "--help").out
        failed = {"submit": "the job failed, or ", "wait": "a job failed, or "}.get(command, "")
        assert f"Exit codes: 0 done, 1 {failed}the cluster refused or did not answer" in " ".join(text.split())
        assert f"Example: ddpjob {command}" in text
        assert len(text.splitlines()) <= 45, "one screen"


def test_the_error_without_an_installed_operator_tells_how_to_install_it(cluster: FakeCluster, ddpjob: Ddpjob) -> None:
    cluster.crd = False
    for words in (["get"], ["describe", "digits"], ["get", "-A"]):
        ddpjob(*words, code=1, says="install the operator")


def test_a_missing_right_is_named_by_verb_resource_and_namespace(cluster: FakeCluster, ddpjob: Ddpjob) -> None:
    """A missing right must be named completely, because the user sends this line to an administrator."""
    cluster.forbidden = {"list ddpjobs.training.ddpjob.io"}
    ddpjob(
        "get",
        "-n",
        "team-a",
        code=1,
        says=("jane may not list ddpjobs.training.ddpjob.io in namespace team-a", "ddpjob-view"),
    )


@pytest.mark.parametrize("code", [401, 429, 500, 503])
def test_other_refusals_give_an_error_of_one_line(cluster: FakeCluster, ddpjob: Ddpjob, code: int) -> None:
    cluster.answers["list ddpjobs.training.ddpjob.io"] = code, {"kind": "Status", "message": "no"}
    done = ddpjob("get", code=1)
    assert str(code) in done.err
    assert done.err.count("\n") == 1


# -------------------------------------------------------------------- looking


def test_get_shows_the_columns_of_kubectl(cluster: FakeCluster, ddpjob: Ddpjob) -> None:
    cluster.add("ddpjobs", stored(display={"nodes": "2/2", "step": "312/1125", "progress": "28%", "eta": "24s"}))
    cluster.add("ddpjobs", stored("other"), namespace="team-b")
    head, row = ddpjob("get").out.splitlines()
    assert head.split() == ["NAME", "STATE", "NODES", "RESTARTS", "STEP", "PROGRESS", "ETA", "AGE"]
    assert row.split()[:6] == ["digits", "Running", "2/2", "312/1125", "28%", "24s"]
    assert "team-b" in ddpjob("get", "-A").out
    assert "2 of 2 nodes are running" in ddpjob("get", "digits", "-o", "wide").out
    assert ddpjob("get", "-o", "name").out == "ddpjob.training.ddpjob.io/digits\n"
    assert json.loads(ddpjob("get", "digits", "-o", "json").out)["metadata"]["name"] == "digits"
    assert yaml.safe_load(ddpjob("get", "-o", "yaml").out)["items"][0]["status"]["state"] == "Running"


def test_an_empty_namespace_prints_nothing_to_a_pipe(cluster: FakeCluster, ddpjob: Ddpjob) -> None:
    done = ddpjob("get", "-n", "empty")
    assert (done.code, done.out) == (0, "")
    assert "no DDPJob in namespace empty" in done.err
    assert json.loads(ddpjob("get", "-o", "json").out)["items"] == []


def test_the_error_about_an_unknown_job_suggests_the_closest_name(cluster: FakeCluster, ddpjob: Ddpjob) -> None:
    cluster.add("ddpjobs", stored())
    for verb in ("describe", "get", "suspend", "delete", "wait"):
        ddpjob(verb, "digit", code=2, says="did you mean digits?")


def test_a_job_may_be_given_in_the_form_that_get_prints(cluster: FakeCluster, ddpjob: Ddpjob) -> None:
    """Names with their resource must be accepted, because `ddpjob get -o name | xargs ddpjob delete` passes them."""
    for name in ("digits", "other"):
        cluster.add("ddpjobs", stored(name))
    names = ddpjob("get", "-o", "name").out.split()
    assert names == ["ddpjob.training.ddpjob.io/digits", "ddpjob.training.ddpjob.io/other"]
    assert "digits" in ddpjob("describe", names[0]).out
    for named in ("ddp/digits", "ddpjobs/digits", "DDPJob/digits"):
        assert ddpjob("get", named).code == 0
    assert "no node has a log" in ddpjob("logs", "ddp/digits", "--cluster").err
    assert ddpjob("get", "pod/digits").code == 2
    assert ddpjob("delete", *names).code == 0
    assert cluster.find("ddpjobs") is None


def test_jobs_are_chosen_by_name_or_by_label(cluster: FakeCluster, ddpjob: Ddpjob) -> None:
    """Jobs of a sweep share a label, so a command must accept a label instead of names."""
    for name in ("a", "b", "c"):
        body = stored(name)
        body["metadata"]["labels"] = {"sweep": "1"} if name != "c" else {}
        cluster.add("ddpjobs", body)
    ids = [f"ddpjob.training.ddpjob.io/{name}" for name in "abc"]
    assert ddpjob("get", "c", "a", "-o", "name").out.split() == [ids[2], ids[0]]
    assert len(json.loads(ddpjob("get", "a", "b", "-o", "json").out)["items"]) == 2
    assert json.loads(ddpjob("get", "a", "-o", "json").out)["metadata"]["name"] == "a"
    assert ddpjob("get", "-l", "sweep=1", "-o", "name").out.split() == ids[:2]
    assert ddpjob("get", "-l", "sweep=2").err == "no DDPJob has the labels sweep=2\n"
    assert ddpjob("get", "a", "-l", "sweep=1").code == ddpjob("delete").code == 2
    assert ddpjob("delete", "-l", "sweep=1").code == 0
    assert ddpjob("get", "-o", "name").out.split() == ids[2:]
    assert ddpjob("delete", "-l", "sweep=1").err == "no DDPJob in namespace default has the labels sweep=1\n"


def test_the_shell_completes_the_names_of_jobs(cluster: FakeCluster) -> None:
    """The shell must complete names of jobs, as for kubectl. Without a cluster it offers nothing, without an error."""
    for name in ("digits", "dinosaurs", "bert"):
        cluster.add("ddpjobs", stored(name))
    cluster.add("ddpjobs", stored("other"), namespace="team-b")

    def offered(typed: str) -> list[str]:
        words = {"_DDPJOB_COMPLETE": "bash_complete", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
        done = CliRunner().invoke(cli, prog_name="ddpjob", env=words)
        assert (done.exit_code, done.stderr) == (0, "")
        return done.stdout.split()

    assert offered("ddpjob describe di") == ["plain,digits", "plain,dinosaurs"]
    assert offered("ddpjob delete digits di") == ["plain,dinosaurs"]
    assert offered("ddpjob logs -n team-b ") == ["plain,other"]
    cluster.crd = False
    assert offered("ddpjob describe di") == []


def test_a_job_name_that_is_a_path_is_refused(cluster: FakeCluster, ddpjob: Ddpjob) -> None:
    """A name such as `../../` must be refused, because in a URL it would address another object."""
    for name in ("../pods/x", "a/b", "A", "a?dryRun=All"):
        assert ddpjob("delete", name).code == 2
    assert cluster.requests == []


def test_describe_shows_who_failed_where_and_why(cluster: FakeCluster, ddpjob: Ddpjob) -> None:
    """`ddpjob describe` must show the same sentence about a failure as a local run."""
    restarts = {"application": 1, "total": 1}
    cluster.add("ddpjobs", stored(state="Restarting", lastFailure=FAILURE, restarts=restarts, attempt=2))
    cluster.add("pods", pod("digits", 2, 0, node="gpu-01"))
    about = {"kind": "DDPJob", "name": "digits"}
    event = {"involvedObject": about, "type": "Warning", "reason": "RankFailed", "message": "rank 1", "metadata": {}}
    cluster.add("events", {**event, "metadata": {"name": "e"}, "lastTimestamp": "2026-01-01T00:10:00Z"})
    text = ddpjob("describe", "digits").out
    sentence = "rank 1 (pod digits-1-1, node gpu-07) ended with exit code 1 at step 312 (ValueError: no such shard)"
    assert sentence in text
    assert "class application, charged to application" in text
    assert "| ValueError: no such shard" in text
    assert "Restarts:   1 (1 application); backoffLimit 3" in text
    assert "digits-2-0   gpu-01   Running" in text
    assert "RankFailed" in text


@pytest.mark.parametrize(
    ("status", "shown"),
    [
        ({"containerStatuses": [{"reason": "Error", "exitCode": 1}]}, "Failed (exit code 1)"),
        ({"containerStatuses": [{"reason": "OOMKilled", "exitCode": 137}]}, "Failed (OOMKilled, exit code 137)"),
        ({"reason": "Evicted", "containerStatuses": [{"reason": "Error", "exitCode": 143}]},
         "Failed (Evicted, exit code 143)"),
        ({"reason": "Evicted"}, "Failed (Evicted)"),
        ({}, "Failed"),
    ],
)  # fmt: skip
def test_describe_shows_why_a_kubelet_has_ended_a_pod(cluster, ddpjob, status, shown):
    """`describe` must show why a kubelet ended a pod: code 137 has several causes, an evicted pod has no code."""
    cluster.add("ddpjobs", stored(state="Failed"))
    ended = [{"name": "trainer", "state": {"terminated": s}} for s in status.pop("containerStatuses", ())]
    cluster.add("pods", pod("digits") | {"status": {"phase": "Failed", "containerStatuses": ended, **status}})
    assert any(line.endswith(f"  {shown}") for line in ddpjob("describe", "digits").out.splitlines())


def test_describe_without_the_right_to_see_pods_shows_the_rest(cluster: FakeCluster, ddpjob: Ddpjob) -> None:
    cluster.add("ddpjobs", stored())
    cluster.forbidden = {"list pods", "list events"}
    done = ddpjob("describe", "digits", code=0)
    assert "Running" in done.out
    assert "may not list pods" in done.err


PIPED = ["sh", "-c", "torchrun train.py 2>&1 | tee log"]
RAISED = ["[rank1]: Traceback (most recent call last):", '[rank1]:   File "/app/train.py", line 7, in <module>']


@pytest.mark.parametrize(("command", "is_doubted"), [(PIPED, True), (["torchrun", "train.py"], False)])
def test_a_success_whose_log_shows_a_failed_rank_gets_a_warning(cluster, ddpjob, command, is_doubted):
    """`torchrun … | tee` exits with tee's 0, and the operator reads no logs. So `ddpjob` must warn of the failure."""
    body = stored(state="Succeeded", attempt=2)
    body["spec"]["template"]["spec"]["containers"][0]["command"] = command
    cluster.add("ddpjobs", body)
    for attempt, place, exit_code in ((1, 0, 1), (2, 0, 0), (2, 1, 0)):
        cluster.add("pods", pod("digits", attempt, place, exit_code=exit_code))
    cluster.logs["digits-1-0"] = [*RAISED, "[rank1]: ValueError: of an attempt that was overcome"]
    cluster.logs["digits-2-1"] = ["epoch 1", *RAISED, "[rank1]: ValueError: no such shard: 7", "epoch 2"]
    doubt = "rank 1 has failed in train.py:7, although the exit code is 0: ValueError: no such shard: 7"
    assert (f"Suspicious: {doubt}" in ddpjob("describe", "digits").out) is is_doubted
    done = ddpjob("wait", "digits")
    assert (done.code, done.err) == (0, f"digits has Succeeded, but suspicious: {doubt}\n" if is_doubted else "")
    cluster.forbidden = {"get pods/log"}
    assert ddpjob("wait", "digits").err == ""


def test_events_are_shown_and_on_request_also_those_of_pods(cluster: FakeCluster, ddpjob: Ddpjob) -> None:
    cluster.add("ddpjobs", stored())
    cluster.add("pods", pod("digits"))
    told = ("DDPJob", "digits", "AllNodesRun"), ("Pod", "digits-1-0", "FailedMount"), ("Pod", "x", "No")
    for kind, name, reason in told:
        about = {"kind": kind, "name": name}
        cluster.add("events", {"metadata": {"name": reason.lower()}, "involvedObject": about, "reason": reason})
    assert "FailedMount" not in ddpjob("events", "digits").out
    text = ddpjob("events", "digits", "--pods").out
    assert "pod/digits-1-0" in text
    assert "No" not in text.split()


# -------------------------------------------------------------------- acting


def test_suspend_and_resume_change_one_field(cluster: FakeCluster, ddpjob: Ddpjob) -> None:
    job = cluster.add("ddpjobs", stored())
    ddpjob("suspend", "digits", says="up to 30 s to save")
    assert job["spec"]["suspend"] is True
    assert "suspended already" in ddpjob("suspend", "digits").err
    assert ddpjob("resume", "digits").code == 0
    assert job["spec"]["suspend"] is False
    assert "is not suspended" in ddpjob("resume", "digits").err


def test_resuming_a_job_whose_pods_are_stopping_reports_that_it_starts_when_they_have_ended(cluster, ddpjob):
    """If no pod starts at once, users must not think that `ddpjob resume` did nothing."""
    job = cluster.add("ddpjobs", stored(state="Suspended", startTime="2026-01-01T00:00:00Z"))
    job["spec"]["suspend"] = True
    said = "digits is resumed; it starts again when the last of its pods has ended\n"
    assert ddpjob("resume", "digits").err == said
    stopped = cluster.add("ddpjobs", stored("resnet", state="Suspended", conditions=[SUSPENDED]))
    stopped["spec"]["suspend"] = True
    assert ddpjob("resume", "resnet").err == "resnet is resumed\n"


def test_suspending_a_finished_job_is_refused(cluster: FakeCluster, ddpjob: Ddpjob) -> None:
    """suspend, restart and scale must refuse an ended job: the API server would accept a change without effect."""
    cluster.add("ddpjobs", stored(state="Succeeded"))
    for words in (["suspend", "digits"], ["restart", "digits"], ["scale", "digits", "--nodes", 3]):
        ddpjob(*words, code=2, says="has Succeeded")


def _stops(job: dict[str, Any]) -> None:
    """Act as the operator does on a suspension."""
    if job["spec"].get("suspend"):
        job["status"] = {"state": "Suspended", "attempt": 1, "conditions": [SUSPENDED]}


def test_scale_stops_a_running_job_first_and_starts_it_with_the_new_number(cluster, ddpjob):
    """`ddpjob scale` must suspend a running job first, because a running job's number of nodes cannot change."""
    job = cluster.add("ddpjobs", stored(startTime="2026-01-01T00:00:00Z"))
    seen: list[tuple[Any, Any]] = []

    def patched(raw: dict[str, Any]) -> None:
        seen.append((raw["spec"].get("suspend"), raw["spec"]["nodes"]))
        _stops(raw)

    cluster.on_patch = patched
    assert ddpjob("scale", "digits", "--nodes", 4).code == 0
    assert seen == [(True, 2), (False, 4)]
    assert ddpjob("scale", "digits", "--nodes", 4).err == "digits has 4 nodes already\n"
    assert job["spec"]["nodes"] == 4


def test_an_elastic_job_is_scaled_while_it_runs(cluster: FakeCluster, ddpjob: Ddpjob) -> None:
    """An elastic job is scaled without a suspension, so an interrupted command cannot leave the job suspended."""
    job = cluster.add("ddpjobs", stored(startTime="2026-01-01T00:00:00Z"))
    job["spec"]["minNodes"] = 1
    done = ddpjob("scale", "digits", "--nodes", 4)
    assert done.err == "digits now has 4 nodes (before: 2); all ranks save and start again\n"
    assert (job["spec"]["nodes"], job["spec"].get("suspend")) == (4, None)


def test_restart_waits_until_all_pods_have_ended_and_scale_keeps_a_suspended_job_suspended(cluster, ddpjob):
    """`ddpjob restart` must resume only when all pods have ended: at once, the old pods would simply go on."""
    job = cluster.add("ddpjobs", stored(startTime="2026-01-01T00:00:00Z"))
    cluster.on_patch = _stops
    assert ddpjob("restart", "digits").code == 0
    assert job["spec"]["suspend"] is False
    ddpjob("suspend", "digits", code=0)
    ddpjob("scale", "digits", "--nodes", 4, says="still suspended")
    assert job["spec"]["suspend"] is True


@pytest.mark.parametrize("words", [["restart", "digits"], ["scale", "digits", "--nodes", 4]])
def test_a_job_that_ends_while_it_is_being_stopped_is_not_waited_for(cluster, ddpjob, words):
    """If the job ends meanwhile, restart and scale must not wait for their time-out and call the job suspended."""
    cluster.add("ddpjobs", stored(startTime="2026-01-01T00:00:00Z"))

    def ends(raw: dict[str, Any]) -> None:
        raw["status"] |= {"state": "Failed", "reason": "BackoffLimitExceeded"}

    cluster.on_patch = ends
    done = ddpjob(*words, "--timeout", "5s")
    assert done.code == 2
    assert f"digits has Failed and cannot be {words[0]}{'d' if words[0] == 'scale' else 'ed'}" in done.err
    assert "stays suspended" not in done.err


def test_a_restart_that_times_out_reports_that_the_job_stays_suspended(cluster: FakeCluster, ddpjob: Ddpjob) -> None:
    cluster.add("ddpjobs", stored(startTime="2026-01-01T00:00:00Z"))
    ddpjob("restart", "digits", "--timeout", "1s", code=1, says=("not stopped within 1s", "ddpjob resume digits"))


def test_one_failing_job_does_not_prevent_get_suspend_or_resume_of_the_others(cluster, ddpjob):
    """If one job is missing, the command must still handle the others. A loop in a shell would stop."""
    running = [cluster.add("ddpjobs", stored(name)) for name in ("b", "c")]
    cluster.add("ddpjobs", stored("over", state="Succeeded"))
    for verb, said in (("suspend", "b is suspended"), ("resume", "b is resumed")):
        done = ddpjob(verb, "a", "over", "ddp/b", "c", "b")
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith(said)
        assert done.err.count(said) == 1
        assert "no DDPJob a in namespace default" in done.err
        assert "over has Succeeded and cannot be" in done.err
        assert [job["spec"]["suspend"] for job in running] == [verb == "suspend"] * 2
    for verb in ("get", "describe"):
        done = ddpjob(verb, "a", "b", "c", code=2)
        assert re.findall(r"^(?:Name: +)?([a-z])\b", done.out, re.MULTILINE) == ["b", "c"], verb
        assert done.err.startswith("no DDPJob a in namespace default")
    assert ddpjob("get", "a").out == ddpjob("describe", "a").out == ""
    cluster.forbidden = {"patch ddpjobs.training.ddpjob.io"}
    assert ddpjob("suspend", "a", "b").code == 1
    assert ddpjob("suspend").code == ddpjob("describe").code == ddpjob("wait").code == 2


def test_several_jobs_are_waited_for_together(cluster: FakeCluster, ddpjob: Ddpjob) -> None:
    """The command must watch all jobs at once: ttlSecondsAfterFinished may delete a job while it waits for another."""
    first, second = cluster.add("ddpjobs", stored("a")), cluster.add("ddpjobs", stored("b", state="Succeeded"))
    path = next(at for at in cluster.objects if at.endswith("/b"))

    def ends() -> None:
        del cluster.objects[path]
        cluster.after(LOOK, lambda: first["status"].update(state="Succeeded"))

    cluster.after(LOOK, lambda: cluster.after(LOOK, ends))
    done = ddpjob("wait", "a", "b")
    assert (done.code, done.err) == (0, "a: Running: 2 of 2 nodes are running\n")
    cluster.objects[path] = second
    second["status"]["state"] = "Failed"
    done = ddpjob("wait", "b", "a", "b")
    assert (done.code, done.err) == (1, "b can no longer be Succeeded: it has Failed\n")
    assert ddpjob("wait", "a", "b", "--for", "ended").code == 0
    assert ddpjob("wait", "gone", "gone-too", "--for", "deleted").code == 0


def test_a_wait_for_several_jobs_ends_with_the_first_that_fails_it(cluster: FakeCluster, ddpjob: Ddpjob) -> None:
    """The command must end with the first failure. A pipeline must not wait hours for the last job."""
    cluster.add("ddpjobs", stored("runs"))
    cluster.add("ddpjobs", stored("failed", state="Failed"))
    done = ddpjob("wait", "runs", "typo", "--for", "ended", code=2)
    assert done.err.startswith("no DDPJob typo in namespace default")
    done = ddpjob("wait", "runs", "failed")
    assert (done.code, done.err.splitlines()[-1]) == (1, "failed can no longer be Succeeded: it has Failed")


def test_the_timeout_applies_to_all_jobs_together(cluster, ddpjob, monkeypatch):
    monkeypatch.setattr(watch, "LOOK_SECONDS", 1.0)
    for name in ("a", "b", "c"):
        cluster.add("ddpjobs", stored(name, state="Pending" if name != "c" else "Succeeded", message="no GPU"))
    done = ddpjob("wait", "a", "b", "c", "--timeout", "1s", code=1)
    assert done.err.splitlines()[:2] == ["a: Pending: no GPU", "b: Pending: no GPU"]
    assert [line.rpartition(": ")[0] for line in done.err.splitlines()[2:]] == [
        f"not Succeeded within 1s: {name} is Pending" for name in ("a", "b")
    ]
    assert cluster.requests.count(LOOK) <= 7, "a look at each, and after a second one more at those that are open"


@pytest.mark.parametrize(
    ("state", "wanted", "code"),
    [("Succeeded", "Succeeded", 0), ("Failed", "Succeeded", 1), ("Failed", "failed", 0), ("Failed", "ended", 0),
     ("Running", "Running", 0), ("Succeeded", "Running", 1)],
)  # fmt: skip
def test_wait_ends_as_soon_as_the_result_is_known(cluster, ddpjob, state, wanted, code):
    """`ddpjob wait` must end when the job fails, unlike `kubectl wait --for=condition=Complete`."""
    cluster.add("ddpjobs", stored(state=state))
    assert ddpjob("wait", "digits", "--for", wanted).code == code


def test_a_wait_for_a_suspension_ends_when_the_last_pod_has_ended(cluster: FakeCluster, ddpjob: Ddpjob) -> None:
    """A wait for a suspension must last until all pods have ended and free their GPUs and volume."""
    text = "suspended; digits-1-0 still stopping"
    stops = {**SUSPENDED, "status": "False", "reason": "NotSuspended"}
    job = cluster.add("ddpjobs", stored(state="Suspended", reason="Suspending", message=text, conditions=[stops]))
    ddpjob("wait", "digits", "--for", "Suspended", "--timeout", "1s", code=1, says=f"digits is Suspended: {text}")
    job["status"] |= {"reason": "Suspended", "conditions": [SUSPENDED]}
    assert ddpjob("wait", "digits", "--for", "Suspended").code == 0


def test_wait_ends_after_its_timeout_and_shows_the_state_of_the_job(cluster: FakeCluster, ddpjob: Ddpjob) -> None:
    cluster.add("ddpjobs", stored(state="Pending", message="13 nodes have them free"))
    ddpjob("wait", "digits", "--timeout", "1s", code=1, says="digits is Pending: 13 nodes have them free")
    assert ddpjob("wait", "digits", "--for", "Suceeded").err.count("did you mean Succeeded?") == 1
    assert ddpjob("wait", "digits", "--timeout", "soon").code == 2


def test_wait_distinguishes_a_deleted_job_from_a_finished_one(cluster: FakeCluster, ddpjob: Ddpjob) -> None:
    cluster.add("ddpjobs", stored())
    cluster.after(LOOK, cluster.objects.clear)
    done = ddpjob("wait", "digits", code=1)
    assert done.err.endswith("digits was deleted\n")
    cluster.add("ddpjobs", stored())
    cluster.after(LOOK, cluster.objects.clear)
    assert ddpjob("wait", "digits", "--for", "deleted").code == 0


def test_a_wait_survives_an_unavailable_api_server(cluster: FakeCluster, ddpjob: Ddpjob) -> None:
    """An API server that is away, for example during an upgrade, must not end a script that waits for a training."""
    job = cluster.add("ddpjobs", stored())
    unavailable = (503, {"kind": "Status", "message": "shutting down"})

    def away() -> None:
        cluster.answers["get ddpjobs.training.ddpjob.io"] = unavailable
        cluster.after(LOOK, lambda: cluster.after(LOOK, back))

    def back() -> None:
        job["status"]["state"] = "Succeeded"
        cluster.answers.clear()

    cluster.after(LOOK, away)
    done = ddpjob("wait", "digits", code=0)
    assert done.err.count("still trying") == 1


def test_top_prints_one_table_if_there_is_no_terminal(cluster: FakeCluster, ddpjob: Ddpjob) -> None:
    cluster.add("ddpjobs", stored("done", state="Succeeded"))
    cluster.add("ddpjobs", stored())
    lines = ddpjob("top").out.splitlines()
    assert lines[0] == "2 DDPJobs: 1 Running, 1 Succeeded"
    assert [line.split()[0] for line in lines[2:]] == ["digits", "done"], "what runs comes first"


# -------------------------------------------------------------------- logs


def test_logs_of_all_nodes_have_a_node_prefix_and_logs_of_one_node_do_not(cluster: FakeCluster, ddpjob: Ddpjob) -> None:
    runs(cluster, *[["epoch 1", "epoch 2"]] * 2)
    assert (
        ddpjob("logs", "digits", "-n", "default").out == "[0:0] epoch 1\n[0:0] epoch 2\n[1:1] epoch 1\n[1:1] epoch 2\n"
    )
    assert ddpjob("logs", "digits", "--cluster", "--rank", 1).out == "epoch 1\nepoch 2\n"
    assert ddpjob("logs", "digits", "--cluster", "--rank", 2).code == 2
    assert ddpjob("logs", "digits", "--cluster", "--node", 0).out == "epoch 1\nepoch 2\n"
    assert ddpjob("logs", "digits", name="kubectl ddp").out.count("epoch") == 4


def test_logs_of_a_job_that_did_not_run_on_this_machine_come_from_the_cluster(cluster, ddpjob, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    runs(cluster, ["epoch 1"])
    done = ddpjob("logs", "digits")
    assert done.out == "epoch 1\n"
    assert "looking in the cluster" in done.err


def test_logs_of_a_missing_pod_are_the_log_tail_in_the_status(cluster: FakeCluster, ddpjob: Ddpjob) -> None:
    """The end of the log must be shown from the status if the pod was deleted, for example with its node."""
    cluster.add("ddpjobs", stored(state="Running", attempt=2, lastFailure=FAILURE))
    cluster.add("pods", pod("digits", 2, 0))
    cluster.logs["digits-2-0"] = ["new"]
    assert ddpjob("logs", "digits", "--cluster").out == "new\n"
    done = ddpjob("logs", "digits", "--cluster", "--previous")
    assert done.out == "[1:1] Traceback …\n[1:1] ValueError: no such shard\n", "it is one of two"
    assert "pod digits-1-1 is gone" in done.err
    assert "digits, attempt 1: the pod of node 0 is gone, and its log with it" in done.err
    assert ddpjob("logs", "digits", "--cluster", "--attempt", 7).code == 2


def test_logs_of_a_failed_job_mention_the_nodes_whose_pods_are_gone(cluster: FakeCluster, ddpjob: Ddpjob) -> None:
    """The output must say that a log is missing, because the remaining log looks like that of the whole job."""
    cluster.add("ddpjobs", stored(state="Failed", startedNodes="0-1"))
    cluster.add("pods", pod("digits", 1, 1))
    cluster.logs["digits-1-1"] = ["ValueError: no such shard"]
    done = ddpjob("logs", "digits", "--cluster")
    assert done.out == "[1:1] ValueError: no such shard\n"
    assert "digits, attempt 1: the pod of node 0 is gone, and its log with it" in done.err
    chosen = ddpjob("logs", "digits", "--cluster", "--node", 1)
    assert (chosen.out, chosen.err) == ("ValueError: no such shard\n", "")


@pytest.mark.parametrize("form", ["yaml", "json"])
def test_a_job_is_shown_without_its_managed_fields(cluster: FakeCluster, ddpjob: Ddpjob, form: str) -> None:
    """A job must be shown without its managedFields, as in kubectl, because they are longer than the job."""
    job = cluster.add("ddpjobs", stored())
    job["metadata"]["managedFields"] = [{"manager": "ddpjob", "operation": "Update"}]
    for words in (["digits"], []):
        out = ddpjob("get", *words, "-o", form).out
        assert "managedFields" not in out
        assert "nodes" in out


def test_the_command_line_is_named_as_the_manager_of_the_fields_that_it_writes(cluster, ddpjob):
    """`kubectl get --show-managed-fields` must show ddpjob, and not python-urllib3, which no user recognizes."""
    cluster.add("ddpjobs", stored())
    assert ddpjob("suspend", "digits").code == 0
    assert cluster.agents == {"ddpjob"}


def test_describe_shows_a_failure_once(cluster: FakeCluster, ddpjob: Ddpjob) -> None:
    text = "rank 1 (pod digits-1-1, node gpu-07) ended with exit code 1"
    message = f"{text}; gave up after 3 restarts (backoffLimit: 3)"
    failure = WHERE | {"reason": "Error", "class": "application", "logTail": "boom"}
    cluster.add("ddpjobs", stored(state="Failed", message=message, lastFailure=failure))
    out = ddpjob("describe", "digits").out
    assert out.count(text) == 1
    assert "class application; no restart followed" in out
    assert "| boom" in out


def test_describe_shows_no_time_left_for_a_silent_rank(cluster: FakeCluster, ddpjob: Ddpjob) -> None:
    """A silent rank has no time left in `describe`, as in kubectl's column ETA."""
    progress = {"step": 812, "totalSteps": 6000, "etaSeconds": 312, "attempt": 1, "updated": "2026-01-01T00:00:00Z"}
    job = cluster.add("ddpjobs", stored(progress=progress, display={"step": "812/6000", "eta": "5m12s"}))
    assert "5m12s left" in ddpjob("describe", "digits").out
    del job["status"]["display"]["eta"]
    assert "left" not in ddpjob("describe", "digits").out


def test_followed_logs_continue_with_the_next_attempt(cluster: FakeCluster, ddpjob: Ddpjob) -> None:
    job = cluster.add("ddpjobs", stored(nodes={"total": 1, "ready": 1}))
    first = cluster.add("pods", pod("digits", 1, 0))
    cluster.logs["digits-1-0"] = ["before"]

    def restarts() -> None:
        pod_ends(first, 1)
        cluster.wait_for("get pods")  # after the log, the command reads if the pod has ended
        second = cluster.add("pods", pod("digits", 2, 0))
        cluster.logs["digits-2-0"] = ["after"]
        job["status"]["attempt"] = 2
        cluster.wait_for("get pods/log", 2)
        pod_ends(second)
        job["status"]["state"] = "Succeeded"

    cluster.after("get pods/log", restarts)
    done = ddpjob("logs", "digits", "--cluster", "-f")
    assert done.out == "[0:0] before\n[0:0] after\n"


@pytest.mark.parametrize("options", [[], ["-f"], ["--timestamps"], ["-f", "--timestamps"]], ids=" ".join)
def test_lines_that_carry_the_result_of_a_function_are_not_shown(cluster, ddpjob, options):
    """Lines that carry a function's result must not be shown: a result of 1 MB is 450 lines of base64."""
    answer = "ddpjob-answer-0123456789abcdef:value:0:0/2:" + "a/+" * 1000
    shown = ["epoch 1", "", "bar 100%", "ddpjob-answer-me: what is this?", "epoch 2"]
    runs(
        cluster,
        [shown[0], answer, shown[1], shown[2] + answer, answer.replace("0/2", "1/2"), *shown[3:]],
        exit_code=1,
        state="Failed",
    )
    lines = ddpjob("logs", "digits", "--cluster", *options).out.splitlines()
    assert [line.removeprefix("[0:0] ").partition("Z ")[2] if "Z " in line else line for line in lines] == [
        "[0:0] " * ("-f" in options and "--timestamps" not in options) + line for line in shown
    ]


@pytest.mark.parametrize("follow", [[], ["-f"]])
def test_the_last_minutes_of_a_log_are_shown_with_their_times(cluster, ddpjob, follow):
    """`ddpjob logs` must accept --since and --timestamps, because users search for a time in days of output."""
    runs(cluster, [f"step {number}" for number in range(300)], exit_code=1, state="Failed")
    prefix = "[0:0] " if follow else ""
    # Code 0, as from kubectl logs, although the job has failed.
    done = ddpjob("logs", "digits", "--since", "2m", *follow, code=0)
    assert done.out.splitlines() == [f"{prefix}step {number}" for number in range(180, 300)]
    done = ddpjob("logs", "digits", "--timestamps", "--tail", 1, *follow)
    assert done.out == f"{prefix}2026-01-01T00:00:00.000000299Z step 299\n"
    assert ddpjob("logs", "digits", "--since", "yesterday").code == 2


def test_a_followed_tail_shows_all_output_of_later_pods(cluster: FakeCluster, ddpjob: Ddpjob) -> None:
    """`--tail 0 -f` must show all output from now on, also the complete output of the next attempt's pods."""
    job = cluster.add("ddpjobs", stored(nodes={"total": 1, "ready": 1}))
    first = cluster.add("pods", pod("digits", 1, 0))
    cluster.logs |= {"digits-1-0": ["before"], "digits-2-0": ["ValueError: no such shard"]}

    def restarts() -> None:
        pod_ends(first, 1)
        cluster.add("pods", pod("digits", 2, 0, exit_code=1))
        job["status"]["state"] = "Failed"

    cluster.after("get pods/log", restarts)
    assert ddpjob("logs", "digits", "--cluster", "-f", "--tail", 0).out == "[0:0] ValueError: no such shard\n"


def test_the_log_of_a_node_that_was_scaled_away_is_shown(cluster: FakeCluster, ddpjob: Ddpjob) -> None:
    """The log of a node must be shown although its job was scaled down and its number is above the rest."""
    cluster.add("ddpjobs", stored())
    for place in (0, 2):
        cluster.add("pods", pod("digits", 1, place))
        cluster.logs[f"digits-1-{place}"] = ["saved"]
    assert ddpjob("logs", "digits", "--cluster").out == "[0:0] saved\n[2] saved\n"


KUBELET = "the log of digits-1-0: failed to create fsnotify watcher: too many open files\n"


@pytest.mark.parametrize(
    ("broken", "hours", "told"),
    [(["cut"], 0, ""), (["cut"], 2, ""), (["cut"], -7, ""), (["no watch", "no watch"], 0, KUBELET)],
)
def test_a_followed_log_continues_where_its_connection_broke(cluster, ddpjob, broken, hours, told):
    """A followed log must continue with the rest of a line that was cut, whatever the node's time zone is, and after
    the kubelet's own error (no inotify watches are free), which has no time."""
    cluster.zone = dt.timezone(dt.timedelta(hours=hours))
    cluster.broken = list(broken)
    job = cluster.add("ddpjobs", stored())
    trainer = cluster.add("pods", pod("digits"))
    cluster.logs["digits-1-0"] = ["one", "two", "three"]

    def ends() -> None:
        cluster.wait_for("get pods/log", 1 + len(broken))
        pod_ends(trainer)
        job["status"]["state"] = "Succeeded"

    cluster.after("get pods/log", ends)
    done = ddpjob("logs", "digits", "--cluster", "-f")
    assert (done.out, done.err) == ("[0:0] one\n[0:0] two\n[0:0] three\n", told)


def test_a_node_whose_log_cannot_be_read_does_not_hide_the_others(cluster: FakeCluster, ddpjob: Ddpjob) -> None:
    message = 'Get "https://10.0.0.5:10250/containerLogs": dial tcp 10.0.0.5:10250: i/o timeout'
    cluster.answers["get pods/log digits-1-0"] = 500, {"kind": "Status", "message": message}
    runs(cluster, *[["epoch 1"]] * 2)
    done = ddpjob("logs", "digits", "--cluster")
    assert (done.code, done.out) == (1, "[1:1] epoch 1\n")
    assert done.err.startswith("the log of digits-1-0 on n1 is not shown: context test (http")
    assert done.err.endswith(f") cannot read it (500): {message}\n")


def test_logs_of_many_nodes_are_complete_and_in_order(cluster: FakeCluster, ddpjob: Ddpjob) -> None:
    job = cluster.add("ddpjobs", stored())
    job["spec"]["nodes"] = 9
    for place in range(9):
        cluster.add("pods", pod("digits", 1, place))
        cluster.logs[f"digits-1-{place}"] = [f"{number} " + "x" * 20_000 for number in range(2 + place)]
    done = ddpjob("logs", "digits", "--cluster")
    assert [line.partition(" x")[0] for line in done.out.splitlines()] == [
        f"[{place}:{place}] {number}" for place in range(9) for number in range(2 + place)
    ]


def test_followed_logs_name_the_node_whose_log_is_missing(cluster: FakeCluster, ddpjob: Ddpjob) -> None:
    """The kubelet of a lost node does not answer. The output must say that the log of this node is missing."""
    refusal = 500, {"kind": "Status", "message": "dial tcp 10.0.0.5:10250: connection refused"}
    job = runs(cluster, *[["epoch 1"]] * 3)
    job["spec"]["nodes"] = 3
    for lost in (0, 2):
        cluster.answers[f"get pods/log digits-1-{lost}"] = refusal

    def goes_on() -> None:
        cluster.wait_for("get pods/log", 6)
        looked = cluster.requests.count(LOOK)
        cluster.wait_for(LOOK, looked + 2)
        cluster.answers.clear()
        for place in (0, 1, 2):
            state = {"terminated": {"exitCode": 0}}
            cluster.find("pods", f"digits-1-{place}")["status"]["containerStatuses"][0]["state"] = state
        cluster.wait_for(LOOK, looked + 5)
        job["status"]["state"] = "Succeeded"

    cluster.after(LOOK, goes_on)
    done = ddpjob("logs", "digits", "--cluster", "-f")
    assert sorted(done.out.splitlines()) == ["[0:0] epoch 1", "[1:1] epoch 1", "[2:2] epoch 1"]
    told = done.err.splitlines()
    assert 1 <= len(told) <= 2, "not at each try"
    assert all(
        re.match(r"the log of digits-1-[02] on n1 is not shown: .*connection refused.*; still trying", t) for t in told
    )


def test_logs_of_a_container_that_has_not_started_are_not_yet_available(cluster: FakeCluster, ddpjob: Ddpjob) -> None:
    cluster.add("ddpjobs", stored(state="Pending", message="1 of 1 pods cannot start: ErrImagePull"))
    waiting = pod("digits")
    waiting["status"]["containerStatuses"][0]["state"] = {"waiting": {"reason": "ErrImagePull"}}
    cluster.add("pods", waiting)
    done = ddpjob("logs", "digits", "--cluster", code=2)
    assert done.err == "digits: no node has a log yet: Pending: 1 of 1 pods cannot start: ErrImagePull\n"
    assert "digits-1-0   n1     Running (ErrImagePull)" in ddpjob("describe", "digits").out


def test_the_error_about_missing_logs_names_a_missing_operator_or_the_end_of_the_job(cluster, ddpjob):
    """If a job has no logs, the error must give the reason: no operator, or pods deleted after a deadline."""
    job = cluster.add("ddpjobs", stored(state=None))
    assert "no node has a log yet: no operator has seen the job" in ddpjob("logs", "digits", "--cluster").err
    described = ddpjob("describe", "digits").out
    assert "no operator has seen the job" in described
    assert "Pods:" not in described
    job["status"] = {"state": "Failed", "reason": "DeadlineExceeded", "message": "not finished in 8 s", "attempt": 1}
    why = "digits: no node has a log: Failed: not finished in 8 s\n"
    assert ddpjob("logs", "digits", "--cluster").err == why
    followed = ddpjob("logs", "digits", "--cluster", "-f")
    assert (followed.code, followed.out, followed.err) == (0, "", why)
    job["status"]["lastFailure"] = FAILURE
    followed = ddpjob("logs", "digits", "--cluster", "-f")
    assert followed.out == "[1:1] Traceback …\nValueError: no such shard\n".replace("\nV", "\n[1:1] V")
    assert "pod digits-1-1 is gone" in followed.err


def test_followed_logs_show_what_the_job_is_waiting_for(cluster, ddpjob, monkeypatch):
    """The output must show a wrong image or a missing operator, and not stay empty."""
    monkeypatch.setattr(watch.StateLines, "UNSEEN_SECONDS", 0.0)
    job = cluster.add("ddpjobs", stored(state=None))

    def goes_on() -> None:
        looks = cluster.requests.count(LOOK)
        cluster.wait_for(LOOK, looks + 1)
        job["status"] = {"state": "Pending", "reason": "CannotStart", "message": "ErrImagePull", "attempt": 1}
        cluster.wait_for(LOOK, looks + 3)
        job["status"]["state"] = "Running"
        cluster.wait_for(LOOK, looks + 5)
        job["status"]["state"] = "Succeeded"

    cluster.after(LOOK, goes_on)
    done = ddpjob("logs", "digits", "--cluster", "-f")
    assert done.err.splitlines() == [
        "digits: no operator has seen the job; is one running, and does it watch this namespace?",
        "Pending: ErrImagePull",
    ]


# -------------------------------------------------------------------- a terminal
