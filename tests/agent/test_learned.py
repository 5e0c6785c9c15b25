"""Modules that the ranks imported are imported in the background, so that the next generation need not."""

from __future__ import annotations

import re

from agents import Launcher

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
FIRST = "import sys\nbefore = set(sys.modules)\nimport mine, wsgiref.handlers, wsgiref.util\n"
LAST = "print(*sorted({'mine', 'wsgiref.util', 'wsgiref.handlers'} & before))\n"


def test_a_restart_imports_nothing_again_but_the_users_own_code_and_what_differs_by_rank(launcher: Launcher) -> None:
    """Otherwise each kill costs 1.4 s, mostly for importing sklearn in every rank. A module that reads a rank's
    variable during its import (here wsgiref.handlers, which copies them all) must not be shared."""
    launcher.script("", "mine.py")
    done = launcher.done("--max-restarts=1", launcher.script(FIRST + TRAIN + LAST))
    assert (done.returncode, done.stdout) == (0, "wsgiref.util\n"), done.stderr
    assert re.search(r"imported before the ranks start: .*\d+ MiB more in the fork server", done.stderr)
    assert "left out: wsgiref.handlers (reads " in done.stderr
