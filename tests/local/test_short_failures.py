"""A failure fits on one screen: it shows the error in the script, without torchrun's report."""

import json
import re

from shell import Cli, status_of

# Script that fails like torch's gloo, but without importing torch, which would take most of the time here.
COMPLAINS = """
import os, pathlib, signal, time
if os.environ["RANK"] == "1":
    pathlib.Path("dies").touch()
    os.kill(os.getpid(), signal.SIGKILL)
while not pathlib.Path("dies").exists():  # rank 1 may start later
    time.sleep(0.01)
time.sleep(0.5)
raise RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:29595")
"""
LINES_MAX = 15


def test_a_killed_rank_under_torchrun_adds_at_most_15_lines_to_the_output_of_the_script(cli: Cli) -> None:
    """A killed rank under torchrun must add at most 15 lines: torchrun's own report has 75."""
    job = cli.file(COMPLAINS, container={"command": ["torchrun", "train.py"]})
    done = cli.run("run", job, "--max-restarts", "0")
    lines = (done.stdout + done.stderr).splitlines()
    assert done.returncode == 1
    assert len(lines) <= LINES_MAX, "\n".join(lines)
    assert re.search(r"✖ job Failed after \S+: rank 1 \(node 1\) was killed by SIGKILL", lines[-1])
    assert lines[-1].endswith("; --max-restarts 0 allows no restart"), "the option that was typed"
    assert re.search(
        r"… \d+ lines of torchrun hidden \(and \d+ of other nodes\); ddpjob logs job --attempt 1 --node 1", done.stderr
    ), done.stderr


def test_an_error_in_a_notebook_is_named_by_its_cell(cli: Cli) -> None:
    """The error must name the notebook's cell, because the temporary script with the cell's code no longer exists."""
    cells = ["import os", "def load(path):\n    raise ValueError(f'no such shard: {path}')", "\nload(7)"]
    document = {"cells": [{"cell_type": "code", "source": cell} for cell in cells]}
    (cli.folder / "try.ipynb").write_text(json.dumps(document))
    done = cli.run("run", "try.ipynb", "--nodes", "1", "--max-restarts", "0", "--status", "status.json", code=1)
    assert re.search(r"✖ .* in try\.ipynb:cell 2:2 \(ValueError: no such shard: 7\)", done.stderr)
    assert 'File "try.ipynb:cell 3", line 2, in <module>' in done.stdout
    assert status_of(cli.folder / "status.json")["lastFailure"]["where"] == "try.ipynb:cell 2:2"
    logs = cli.run("logs", "try", code=0).stdout
    assert 'File "try.ipynb:cell 3", line 2, in <module>' in logs
    assert "try.py" not in done.stdout + done.stderr + logs


def test_messages_of_torch_at_the_end_of_a_success_are_not_mentioned(cli: Cli) -> None:
    """Messages of torch at the end of a success must not be mentioned, as `… 23 lines of torchrun in …`."""
    noise = "[W1122 16:20:01.1 TCPStore.cpp:138] [c10d] recvValueWithTimeout failed\\nframe #0: c10::Error\\n"
    done = cli.run("run", cli.file(f'print("{noise}<omitting python frames>\\nlast")'), code=0)
    assert done.stdout == "[0:0] last\n[1:1] last\n" or done.stdout == "[1:1] last\n[0:0] last\n"
    assert "…" not in done.stderr
    assert "omitting" not in done.stdout + done.stderr
