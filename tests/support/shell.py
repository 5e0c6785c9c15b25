"""`ddpjob` as a user starts it: a separate process in a separate folder, which leaves nothing behind."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import warm
import yaml

from ddpjob_cli.commands.main import main


class Done(NamedTuple):
    """Result of a command that ran in this process."""

    code: int
    out: str
    err: str


Ddpjob = Callable[..., Done]
SECONDS_MAX = 150  # two attempts that import torch, on a slow machine


class Cli:
    """Runs `ddpjob` in a folder of the test, and marks all its processes so that the test finds survivors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = f"mark-{uuid.uuid4()}"
        # The home has no kubeconfig, because these tests must not depend on a cluster.
        own = {"XDG_STATE_HOME": str(folder / "state"), "HOME": str(folder), "KUBECONFIG": ""}
        self.env = {**os.environ, **own, "DDPTEST_MARK": self.mark}
        self.env.pop("PYTHONUNBUFFERED", None)  # otherwise Python writes a full stdout's buffer again at its exit

    def file(self, script: str, name: str = "job", *, container: dict[str, Any] | None = None, **spec: Any) -> Path:
        """Write a job file whose trainer runs a Python script; return its path."""
        (self.folder / "train.py").write_text(textwrap.dedent(script))
        command = [sys.executable, "-u", "train.py"]
        trainer = {"name": "trainer", "image": "none", "command": command} | (container or {})
        body = {
            "apiVersion": "training.ddpjob.io/v1alpha1",
            "kind": "DDPJob",
            "metadata": {"name": name},
            "spec": {"nodes": 2, "template": {"spec": {"containers": [trainer]}}} | spec,
        }
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(body))
        return path

    def start(self, *words: object, **options: Any) -> subprocess.Popen[str]:
        """Start `ddpjob …` in the background."""
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "errors": "replace"} | options
        argv = [sys.executable, "-m", "ddpjob_cli", *map(str, words)]
        return subprocess.Popen(argv, cwd=self.folder, env=self.env, **options)

    def run(
        self,
        *words: object,
        code: int | None = None,
        says: str | tuple[str, ...] = (),
        is_forked: bool = True,
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Run `ddpjob …` to its end. code: the expected exit code. says: texts expected on stderr. It is a fork of this
        process, unless is_forked is False or options for its streams are given: a fork's streams have no buffers, and
        ignore variables such as PYTHONIOENCODING."""
        if is_forked and not options:
            started = warm.start_ddpjob([*map(str, words)], self.env, self.folder)
        else:
            started = self.start(*words, **options)
        with started as process:
            out, err = process.communicate(timeout=SECONDS_MAX)
        assert "Traceback" not in err, err
        assert code in (None, process.returncode), err
        assert all(text in err for text in ([says] if isinstance(says, str) else says)), err
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def here(self, *words: object) -> subprocess.CompletedProcess[str]:
        """Run `ddpjob …` in this process if it starts nothing: a new Python takes 0.4 s."""
        argv, out, err = [*map(str, words)], io.StringIO(), io.StringIO()
        place, environ, given = os.getcwd(), dict(os.environ), sys.argv
        os.chdir(self.folder)
        os.environ.update(self.env)
        sys.argv = ["ddpjob", *argv]
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                main()
        except SystemExit as end:
            return subprocess.CompletedProcess(argv, int(end.code or 0), out.getvalue(), err.getvalue())
        finally:
            sys.argv = given
            os.environ.clear()
            os.environ.update(environ)
            os.chdir(place)
        raise AssertionError("it ends with an exit code")

    def marked(self) -> list[psutil.Process]:
        """Return all living processes that carry the mark of this test."""
        return [p for p in psutil.process_iter() if self._has_mark(p)]

    def _has_mark(self, process: psutil.Process) -> bool:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            # A process forked by warm.py shows the variables of pytest, so its folder is checked too.
            return process.environ().get("DDPTEST_MARK") == self.mark or process.cwd() == str(self.folder)
        except (psutil.Error, OSError):
            return False


def eventually(what: Callable[[], Any], seconds: float = 30) -> Any:
    """Wait until a condition is true; return its value."""
    end = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.02)
    return value


def lives(process: psutil.Process) -> bool:
    """True if the process exists and is no zombie. It may have ended since it was listed."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def hears(pid: int, number: int = signal.SIGTERM) -> bool:
    """True if a process has its own handler for this signal."""
    caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def status_of(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}
