"""Modules that the ranks imported are imported in the background, so that the next generation finds them imported."""

import re
import sysconfig
from pathlib import Path

TRAIN = """
import os, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
def fork_server():
    with open(f"/proc/{os.getppid()}/task/{os.getppid()}/children") as file:
        return file.read()
first = fork_server().split()[0]
if os.environ["DDPJOB_GENERATION"] == "0":
    while fork_server().split()[0] == first:  # until another one has taken its place
        time.sleep(0.05)
    sys.exit(3)
"""
FIRST = """
import sys
before = set(sys.modules)
import mine, wsgiref.handlers, wsgiref.util
from torchmetrics.utilities import prints
"""
LAST = """
seen = sorted({'mine', 'wsgiref.util', 'wsgiref.handlers', prints.__name__} & before)
print(*seen, "rank", prints.rank_zero_only.rank)
"""
KEEPS_RANK = """
import os
def rank_zero_only(): pass
rank_zero_only.rank = int(os.environ.get("LOCAL_RANK", 0))
"""


def test_a_restart_imports_again_only_the_users_own_code_and_rank_dependent_modules(launcher, tmp_path):
    """A restart must import only the user's own modules and those that depend on the rank: importing all takes 1.4 s.
    wsgiref.handlers, for example, copies a rank's variables; torchmetrics may be shared, because its rank attribute is
    set again."""
    installed = Path(sysconfig.get_path("purelib", "posix_user", {"userbase": str(tmp_path)}))
    (installed / "torchmetrics/utilities").mkdir(parents=True)
    (installed / "torchmetrics/utilities/prints.py").write_text(KEEPS_RANK)
    for package in ("torchmetrics", "torchmetrics/utilities"):
        (installed / package / "__init__.py").touch()
    env = {"PYTHONUSERBASE": str(tmp_path), "PYTHONPATH": str(installed)}
    launcher.script("", "mine.py")
    done = launcher.done("--max-restarts=1", "--nproc-per-node=2", launcher.script(FIRST + TRAIN + LAST), **env)
    learned = "torchmetrics.utilities.prints wsgiref.util rank"
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, [f"{learned} 0", f"{learned} 1"]), done.stderr
    assert re.search(r"imported before the ranks start: .*the fork server grew by \d+ MiB", done.stderr)
    assert "left out: wsgiref.handlers (reads " in done.stderr
