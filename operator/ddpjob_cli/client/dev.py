"""Send changed code to the pods of `ddpjob dev --cluster`, by kubectl exec."""

from __future__ import annotations

import base64
import datetime as dt
import json
import math
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

from ddpjob_cli.client import in_pod, jobs, many_jobs
from ddpjob_cli.client.connection import Cluster, Raw
from ddpjob_cli.client.errors import ClusterError
from ddpjob_cli.client.pack import Contents, read
from ddpjob_cli.client.watch import Say
from ddpjob_cli.manifest.yamlfile import InputError
from ddpjob_core.heartbeat import RERUN_SIGNAL
from ddpjob_operator.job import api, bounds
from ddprun import lend_terminal

EXEC_SECONDS = 30.0
TOGETHER_MAX = 16
TAKE_BACK_SECONDS = 0.05
NO_ANSWER = 1  # kubectl's exit code if the API server does not answer

Code = dict[str, tuple[bytes, bool] | str]  # path → data and whether it is executable, or the target of a link


def _python(module: ModuleType) -> list[str]:
    """Return a command that runs a module's text in a pod. exec sends it in a URL, so the docstring is left out."""
    text = Path(str(module.__file__)).read_text(encoding="utf-8")
    return ["--", "python3", "-I", "-S", "-c", text[text.index("from __future__") :]]


def read_code(root: Path) -> Code:
    """Return the files and links of a folder that `ddpjob submit` would send. Raise InputError."""
    folder, contents = read(root)
    return {**contents, **folder.links}


def changes(before: Code, now: Code) -> Raw:
    """Return the input of in_pod.py that turns the code `before` into `now`."""
    new = {path: value for path, value in now.items() if before.get(path) != value}
    files: Contents = {path: value for path, value in new.items() if not isinstance(value, str)}
    coded = {path: [base64.b64encode(data).decode(), 0o755 if runs else 0o644] for path, (data, runs) in files.items()}
    return {
        "files": coded,
        "links": {path: value for path, value in new.items() if isinstance(value, str)},
        "gone": sorted(before.keys() - now.keys()),
    }  # fmt: skip


class MovingDeadline:
    """The deadline of a job. The client keeps moving it on, so that the nodes are freed if the client is gone."""

    def __init__(self, cluster: Cluster, name: str, seconds: int) -> None:
        self._cluster, self._name, self._seconds = cluster, name, seconds
        self._started: dt.datetime | None = None
        self._seen_at, self._limit = 0.0, 0

    def renew(self, status: api.Status, now: float) -> None:
        """Set activeDeadlineSeconds, which counts from the start of the job. now: seconds of a clock that goes on while
        this machine sleeps, and that may differ from the cluster's. Raise ClusterError, InputError."""
        if status.start_time is None:
            return
        if status.start_time != self._started:
            self._started, self._seen_at, self._limit = status.start_time, now, 0
        limit = min(math.ceil(now - self._seen_at) + self._seconds, bounds.SECONDS_MAX)
        if limit >= self._limit + self._seconds / 4:
            jobs.patch(self._cluster, self._name, {"activeDeadlineSeconds": limit})
            self._limit = limit


class DevPods:
    """The running pods of a job that was submitted with a folder of code."""

    def __init__(self, cluster: Cluster, stored: jobs.Stored, root: Path, submitted: Code, say: Say) -> None:
        """submitted: the code with which each pod begins."""
        kubectl = shutil.which("kubectl")
        if kubectl is None:
            raise ClusterError("kubectl is not on the PATH; ddpjob dev --cluster needs it to reach the pods")
        folder = str(stored.job.spec.facts.trainer.get("workingDir"))
        self._exec = [kubectl, "exec", "-i", *cluster.kubectl, "-c", stored.trainer]
        self._write, self._lend = [*_python(in_pod), folder], _python(lend_terminal)
        self._cluster, self._stored, self._root, self._say = cluster, stored, root, say
        self._submitted = self._now = submitted
        self._has: dict[str, Code] = {}  # the code of each pod, by its uid
        self._is_due = False  # True until the ranks have started with the code of the last save

    def save(self) -> None:
        """Send the folder as it is now, and start the ranks again."""
        try:
            self._now = read_code(self._root)
        except InputError as error:
            self._say(f"not sent: {error}")
            return
        self._is_due = True
        self.look()

    def look(self) -> None:
        """Send the current code to pods that have older code, such as the replacement of a lost pod."""
        pods = jobs.running(self._cluster, self._stored)
        for pod in pods:
            self._has.setdefault(pod["metadata"]["uid"], self._submitted)
        old = [pod for pod in pods if self._has[pod["metadata"]["uid"]] != self._now]
        if not pods or not (old or self._is_due):
            return
        self._is_due = True
        first = pods[0] if jobs.place_of(pods[0]) == 0 else None
        with ThreadPoolExecutor(TOGETHER_MAX) as threads:
            asked = [threads.submit(self._send, pod) for pod in old if pod is not first]
            _, wrong = many_jobs.of_each(asked, lambda future: future.result())
        many_jobs.refuse(wrong)
        if first is not None:  # node 0's agent starts the ranks of all nodes, so it gets the files last
            self._send(first, str(int(RERUN_SIGNAL)))
            self._is_due = False

    def lend_terminal(self, place: int, words: Sequence[str], is_over: Callable[[], bool]) -> int:
        """Lend this terminal to a process of the pod at this place: see session.Lend."""
        try:
            pods = [pod for pod in jobs.running(self._cluster, self._stored) if jobs.place_of(pod) == place]
        except ClusterError:  # `look` reports it
            return NO_ANSWER
        if not pods:
            return lend_terminal.GONE
        with subprocess.Popen([*self._exec, "-t", pods[0]["metadata"]["name"], *self._lend, *words]) as process:
            while process.poll() is None:
                if is_over():
                    process.kill()
                time.sleep(TAKE_BACK_SECONDS)
        return process.returncode

    def _send(self, pod: Raw, *signal: str) -> None:
        name, uid, now = pod["metadata"]["name"], pod["metadata"]["uid"], self._now
        text = json.dumps(changes(self._has[uid], now))
        words: list[Any] = [*self._exec, name, *self._write, *signal]
        try:
            done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=EXEC_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ClusterError(f"pod {name} did not get the files: kubectl exec: {error}") from None
        # NO_AGENT is no error: the container is still starting, and its ranks will read the new files.
        if done.returncode not in (0, in_pod.NO_AGENT):
            why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise ClusterError(f"pod {name} did not get the files: kubectl exec: {why}")
        self._has[uid] = now
