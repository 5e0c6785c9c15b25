"""Stacks of the ranks of a job in a cluster: kubectl signals the agent in each pod, which prints to its log."""

from __future__ import annotations

import math
import shutil
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from ddpjob_cli.client import jobs, many_jobs, watch
from ddpjob_cli.client.connection import Cluster, Raw
from ddpjob_cli.client.errors import ClusterError, NoAnswerError
from ddpjob_cli.manifest.yamlfile import InputError
from ddpjob_core.heartbeat import STACKS_SIGNAL
from ddprun.core import folded_stacks

ANSWER_SECONDS = 40.0
EXEC_SECONDS = 30.0
POLL_SECONDS = 0.5
BEFORE_SECONDS = 5
TOGETHER_MAX = 8
NO_AGENT = 3
# A shell script that signals, in a pod, the agents that handle the signal, but not their fork servers.
ASK = f"""\
asked={NO_AGENT}
for folder in /proc/[0-9]*; do
  case "$(tr '\\0' ' ' 2>/dev/null <$folder/cmdline)" in *forkserver*) continue;; *ddprun*|*ddprun*) ;; *) continue;; esac
  while read -r key value; do [ "$key" = SigCgt: ] && caught=$value; done 2>/dev/null <$folder/status
  [ $((0x${{caught:-0}} >> {STACKS_SIGNAL - 1} & 1)) = 1 ] && kill -{STACKS_SIGNAL} "${{folder#/proc/}}" && asked=0
  caught=0
done
exit $asked
"""  # noqa: E501


def of_job(cluster: Cluster, stored: jobs.Stored, node: int | None = None) -> list[str]:
    """Return the stacks of a job's ranks, as its agents print them. Raise InputError or ClusterError for none."""
    name = stored.job.metadata.name
    if watch.ended(stored):
        raise InputError(f"{name}: has ended ({stored.job.status.state}), so it has no stacks")
    if not stored.job.spec.facts.restarts_in_place:
        raise InputError(f"{name}: its command does not start ddprun, and only ddprun shows the stacks of its ranks")
    pods = [pod for pod in jobs.running(cluster, stored) if node in (None, jobs.place_of(pod))]
    if not pods:
        raise InputError(f"{name}: no pod is running, so it has no stacks")
    of_trainer = ["-c", stored.trainer]
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        words = ["kubectl", "exec", *cluster.kubectl, pods[0]["metadata"]["name"], *of_trainer, "--", "kill -QUIT 1"]
        raise ClusterError(
            f"kubectl is not on the PATH. If ddprun is the container's first program, type on a machine with kubectl "
            f"`{' '.join(words)}`; the stacks are then in ddpjob logs"
        )
    command = [kubectl, "exec", *cluster.kubectl, *of_trainer]
    with ThreadPoolExecutor(TOGETHER_MAX) as threads:
        asked = [threads.submit(_of_pod, cluster, stored, pod, command) for pod in pods]
        found, wrong = many_jobs.of_each(asked, lambda future: future.result())
    if not found:
        many_jobs.refuse(wrong)
    return [*found, *map(str, wrong)]  # a pod that does not answer must not hide other pods' stacks


def _of_pod(cluster: Cluster, stored: jobs.Stored, pod: Raw, command: Sequence[str]) -> str:
    name, began = pod["metadata"]["name"], time.monotonic()
    before = len(_printed(cluster, stored, pod, BEFORE_SECONDS))
    words = [*command, name, "--", "sh", "-c", ASK]
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=EXEC_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClusterError(f"no stacks of pod {name}: kubectl exec: {error}") from None
    if done.returncode:
        why = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        is_without = done.returncode == NO_AGENT
        text = "no ddprun runs in it now" if is_without else f"kubectl exec: {why[0]}"
        raise ClusterError(f"no stacks of pod {name}: {text}")
    while time.monotonic() - began < ANSWER_SECONDS:
        found = _printed(cluster, stored, pod, BEFORE_SECONDS + math.ceil(time.monotonic() - began))
        if len(found) > before:
            return found[-1]
        time.sleep(POLL_SECONDS)
    raise ClusterError(f"no stacks of pod {name}: its ddprun did not answer within {ANSWER_SECONDS:.0f} s")


def _printed(cluster: Cluster, stored: jobs.Stored, pod: Raw, seconds: int) -> list[str]:
    try:
        pieces = b"".join(cluster.pieces(jobs.log_path(pod), container=stored.trainer, sinceSeconds=str(seconds)))
    except NoAnswerError:
        return []
    return folded_stacks.printed(pieces.decode(errors="replace"))
