"""`ddpjob check` ends, whatever a script holds, and names the rules that took too long."""

from __future__ import annotations

import json
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import ddpjob_check as check
from ddpjob_check.rule import TooLongError
from ddpjob_cli.commands import main
from ddpjob_cli.commands.cpu_limit import CpuLimit

WRONG = "import torch.distributed as d, os\nd.init_process_group(rank=int(os.environ['LOCAL_RANK']))\n"
HEAD = "import os, torch\nimport torch.distributed as dist\nrank = int(os.environ['RANK'])\n"
BYTES = 1_000_000


def spins() -> None:
    while True:
        pass


def test_work_that_takes_too_long_is_given_up() -> None:
    limit = CpuLimit(0.05)
    with pytest.raises(TooLongError):
        limit(spins)
    with pytest.raises(TooLongError):
        limit(lambda: "the file has had its time")
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0), "nothing else is interrupted later"


def test_an_error_that_a_destructor_swallows_is_raised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python prints `Exception ignored in`, and the work went on for ever."""
    swallowed: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", swallowed.append)

    class Slow:
        def __del__(self) -> None:
            spins()

    def work() -> None:
        Slow()
        spins()

    with pytest.raises(TooLongError):
        CpuLimit(0.05)(work)
    assert swallowed


def test_there_is_no_limit_in_a_thread_because_only_the_main_one_gets_signals() -> None:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(CpuLimit()(lambda: 7)))
    thread.start()
    thread.join()
    assert results == [7]


def test_rules_that_take_too_long_are_named_and_the_others_find_what_they_find() -> None:
    left_out = {"collective-on-one-rank", "init-missing"}
    names = iter(["the tree", *(rule.name for rule in check.RULES), "ignored lines"])

    def limited(work: Any) -> Any:
        if next(names) in left_out:
            raise TooLongError
        return work()

    findings = check.check("train.py", WRONG, check.Job(nodes=2), limited)
    assert [f.rule for f in findings] == ["left-out", "rank-is-local-rank"]
    assert findings[0].severity == "warning"
    assert findings[0].message.endswith("is not checked for collective-on-one-rank, init-missing")


def test_a_script_that_takes_too_long_as_a_whole_is_one_warning() -> None:
    def limited(_work: Any) -> Any:
        raise TooLongError

    (finding,) = check.check("train.py", WRONG, limited=limited)
    assert (finding.rule, finding.severity) == ("left-out", "warning")


def repeated(line: str, head: str = HEAD, tail: str = "") -> str:
    """A megabyte of lines; `{}` is the number of each."""
    size = len(line.format(10_000))
    return head + "".join(line.format(i) for i in range(BYTES // size)) + tail


LARGE = {
    "barriers under conditions": lambda: repeated("if rank == {}: dist.barrier()\n"),
    "returns before each": lambda: repeated(" if rank == {}: return\n dist.barrier()\n", HEAD + "def main():\n"),
    "functions that call each other": lambda: repeated("def f{0}(rank): f(rank); f{0}(rank); dist.barrier()\n"),
    "one name": lambda: repeated("x = x + rank\n"),
    "a chain of names": lambda: repeated("rank = rank\n", tail="if rank: dist.barrier()\n"),
    "a long dict": lambda: repeated("'k{}': rank, ", HEAD + "d = {", "}\nif d['k1']: dist.barrier()\n"),
    "a long condition": lambda: repeated(" and a{}", HEAD + "if rank == 0", ": dist.barrier()\n"),
    "methods": lambda: repeated("class C{0}:\n def step(self): self.step()\nC{0}().step()\n"),
    "shell texts": lambda: repeated("os.system('for i in 1 2; do torchrun x.py && echo $i; done')\n"),
    "statements on one line": lambda: repeated("x = 1; "),
}


@pytest.mark.long  # the rules and the limit have tests of their own by day
@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("words", [["check"], ["init"], ["submit", "--dry-run", "--no-code"]], ids=" ".join)
def test_a_megabyte_of_python_ends(tmp_path: Path, name: str, words: list[str]) -> None:
    """2,000 barriers under conditions took 37 seconds, and four times as many ten minutes."""
    script = tmp_path / "train.py"
    script.write_text(LARGE[name]())
    result = CliRunner().invoke(main.cli, [*words, str(script)], standalone_mode=False)
    assert result.exception is None or "error[" in str(result.exception)


def test_ten_thousand_cells_of_a_notebook_end(tmp_path: Path) -> None:
    cells = [{"cell_type": "code", "source": f"%time\nif rank == {i}: dist.barrier()\n"} for i in range(10_000)]
    notebook = tmp_path / "a.ipynb"
    notebook.write_text(json.dumps({"cells": cells}))
    result = CliRunner().invoke(main.cli, ["check", str(notebook)], standalone_mode=False)
    assert result.exception is None
    assert result.return_value == 0
