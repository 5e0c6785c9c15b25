"""`ddprun` as a user or a pod starts it: one process for each node, in a folder of the test."""

import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import warm
from free_port import free_port
from shell import Cli

SECONDS_MAX = 150  # importing torch takes more than a minute on a busy machine
# Prefixes of variables that are removed: a pod or a launcher around the tests may have set them.
FOREIGN = ("PET_", "DDPJOB_", "TORCHELASTIC_", "MASTER_", "RANK", "LOCAL_", "WORLD_SIZE", "OMP_NUM_THREADS")


class Launcher(Cli):
    """Starts agents, and marks all their processes so that the test finds survivors."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.env = {k: v for k, v in self.env.items() if not k.startswith(FOREIGN)}
        (folder / "tmp").mkdir()
        self.env |= {"TMPDIR": str(folder / "tmp"), "DDPJOB_TERMINATION_LOG": str(folder / "termination.json")}

    def script(self, text: str, name: str = "train.py") -> Path:
        """Write a user's script into the folder."""
        path = self.folder / name
        path.write_text(textwrap.dedent(text))
        return path

    def ddprun(self, *words: object, module: str = "ddprun", **env: str) -> subprocess.Popen[str]:
        """Start `ddprun …` in the background."""
        return subprocess.Popen(
            [sys.executable, "-m", module, *map(str, words)],
            cwd=self.folder,
            env=self.env | env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def done(self, *words: object, **env: str) -> subprocess.CompletedProcess[str]:
        """Run `ddprun …` to its end."""
        return finish(self.ddprun(*words, **env))

    def warm(self, *words: object, **env: str) -> subprocess.Popen[str]:
        """Run `ddprun …` in the background, forked from this process, so that it has imported torch already."""
        return warm.start("ddprun", [*map(str, words)], cwd=self.folder, env=self.env | env)

    def nodes(
        self, count: int, *words: object, port: int = 0, is_warm: bool = False, **env: str
    ) -> list[subprocess.Popen[str]]:
        """Start an agent for each node. They meet on loopback, and each has its own termination log, as in pods."""
        start = self.warm if is_warm else self.ddprun
        port = port or free_port()
        group = ["--nnodes", count, "--master-port", port, "--rdzv-id", self.mark]
        logs = [{"DDPJOB_TERMINATION_LOG": str(self.folder / f"termination-{k}.json")} for k in range(count)]
        return [start(*group, "--node-rank", k, *words, **({"NODE": str(k)} | logs[k] | env)) for k in range(count)]

    def forget_killed(self) -> None:
        """Remove the folders that killed agents have left, because the fixture checks that none is left."""
        for folder in (self.folder / "tmp").iterdir():
            subprocess.run(["rm", "-r", folder], check=True)


def finish(process: subprocess.Popen[Any], seconds: float = SECONDS_MAX) -> subprocess.CompletedProcess[str]:
    """Wait for the end of an agent; return its output. A traceback of ddprun itself fails the test."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=10)
        raise AssertionError(f"it did not end\n{out}\n{err}") from None
    # A stopped rank's stack, which is printed without an error, may contain the fork server's path.
    assert "Traceback" not in err or "ddprun/" not in err, err  # the agent has a traceback
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def forget_torchs_own(launcher: Launcher) -> None:
    """Remove the log folder of torchrun and the cache folder of torch._dynamo, which they leave behind."""
    for folder in (launcher.folder / "tmp").glob("torch*"):
        subprocess.run(["rm", "-r", folder], check=True)
