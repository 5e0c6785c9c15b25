"""`ddpjob check` ends for any script, and names the rules that took too long."""

import ast
import json
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from worlds import manifest

import ddpjob_check as check
from ddpjob_check import notebook, parsing
from ddpjob_check.parsing import TooLongError
from ddpjob_cli.commands import check_files, cpu_limit, declared_options, main
from ddpjob_cli.commands.cpu_limit import CpuLimit
from ddpjob_cli.manifest import yamlfile
from ddpjob_cli.manifest.yamlfile import InputError

WRONG = "import torch.distributed as d, os\nd.init_process_group(rank=int(os.environ['LOCAL_RANK']))\n"
HEAD = """import os, torch
import torch.distributed as dist
import torch.multiprocessing as mp
rank = int(os.environ['RANK'])
"""


def spins() -> None:
    while True:
        pass


def test_a_check_that_takes_too_long_is_aborted() -> None:
    limit = CpuLimit(0.05)
    with pytest.raises(TooLongError):
        limit(spins)
    with pytest.raises(TooLongError):
        limit(lambda: "the file has had its time")
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0), "nothing else is interrupted later"


def test_a_time_out_that_a_destructor_swallows_is_raised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time-out must be raised again if Python drops it in a destructor. Otherwise the check would never end."""
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


def test_there_is_no_time_limit_in_a_thread_because_only_the_main_thread_gets_signals() -> None:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(CpuLimit()(lambda: 7)))
    thread.start()
    thread.join()
    assert results == [7]


def test_slow_rules_are_named_and_the_others_still_report_their_findings() -> None:
    left_out = {"collective-on-one-rank", "init-missing"}
    names = iter(["the tree", *(rule.name for rule in check.RULES), "ignored lines"])

    def limited(work: Any) -> Any:
        if next(names) in left_out:
            raise TooLongError
        return work()

    findings = check.check("train.py", WRONG, check.CheckedJob(nodes=2), limited)
    assert [f.rule for f in findings] == ["left-out", "rank-is-local-rank"]
    assert findings[0].severity == "warning"
    assert findings[0].message.endswith("is not checked for collective-on-one-rank, init-missing")


def test_a_script_that_takes_too_long_in_total_gets_one_warning() -> None:
    def limited(_work: Any) -> Any:
        raise TooLongError

    (finding,) = check.check("train.py", WRONG, limited=limited)
    assert (finding.rule, finding.severity) == ("left-out", "warning")


LARGE = {
    # name: (a repeated line with its number {0} and the next number {1}, the text before it, the text after it)
    "barriers under conditions": ("if rank == {}: dist.barrier()\n", "", ""),
    "returns before each": (" if rank == {}: return\n dist.barrier()\n", "def main():\n", "main()\n"),
    "functions that call each other": ("def f{0}(rank): f(rank); f{0}(rank); dist.barrier()\n", "", ""),
    "a chain of names": ("x{1} = x{0}\n", "x0 = rank\n", "if x99: dist.barrier()\n"),
    "a long dict": ("'k{}': rank, ", "d = {", "}\nif d['k1']: dist.barrier()\n"),
    "a long condition": (" and a{}", "if rank == 0", ": dist.barrier()\n"),
    "shell texts": ("os.system('for i in 1 2; do torchrun x.py && echo $i; done')\n", "", ""),
    "statements on one line": ("x = 1; ", "", ""),
    "a chain of guarded calls": ("def f{0}(r):\n if r: f{1}(r)\n dist.barrier()\n", "", "f0(rank)\n"),
    "calls of one function": ("f(rank, {})\n", "def f(r, n):\n" + " dist.barrier()\n" * 200, ""),
    "attributes of self": ("  self.a{0} = self.a{1}\n", "class C:\n def f(self):\n", "  if self.a1: dist.barrier()\n"),
    "optimizers": ("o{0} = torch.optim.Adam(m.parameters())\no{0}.step()\no{0}.zero_grad()\n", "", ""),
    "models in models": ("m{0} = torch.nn.parallel.DistributedDataParallel(m{1})\n", "", ""),
    "groups": ("g{0} = dist.new_group([0, {0}])\ndist.all_reduce(x, group=g{0})\n", "", ""),
    "starts of many": ("def f{0}(r, n): f{1}(r, n)\nmp.spawn(f{0}, args=(1,), nprocs=2)\n", "", ""),
    "copies of the environment": ("e{1} = dict(e{0})\nx = e{0}['RANK']\n", "e0 = os.environ\n", ""),
    "elif": ("elif rank == {}: dist.barrier()\n", "if rank: pass\n", ""),
    "a long sum": (" + rank", "x = rank", "\nif x: dist.barrier()\n"),
    "comprehensions": ("x{0} = [dist.all_reduce(t) for t in x{1} if rank]\n", "", ""),
    "try": ("try:\n dist.barrier()\nexcept Exception:\n if rank: dist.barrier()\n", "", ""),
    "bases": ("class C{1}(C{0}):\n def forward(self, x): return self.l(x)\n", "", ""),
    "findings that are ignored": ("dist.init_process_group(rank=local_rank)  # ddpjob: ignore[x{}]\n", "", ""),
    "async": ("async def f{0}():\n await f{1}()\n dist.barrier()\n", "", ""),
    "parentheses": ("(", "x = ", "rank"),
    "dots": (".a", "x = rank", "\n"),
}


def large(name: str, size: int) -> str:
    """Return a script of about this size in bytes."""
    line, before, after = LARGE[name]
    count = size // len(line.format(10_000, 10_001))
    return HEAD + before + "".join(line.format(i, i + 1) for i in range(count)) + after


@pytest.mark.parametrize("name", LARGE)
def test_a_script_is_checked_or_the_skipped_parts_are_named(name: str) -> None:
    """A stranger's script must cause neither a traceback nor an endless check."""
    findings = check.check("train.py", large(name, 20_000), check.CheckedJob(nodes=2), CpuLimit(0.1))
    rules = {rule.name for rule in check.RULES} | {"left-out", "syntax"}
    assert {finding.rule for finding in findings} <= rules


@pytest.mark.long  # the rules and the time limit have fast tests of their own
@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("words", [["check"], ["init"], ["submit", "--dry-run", "--no-code"]], ids=" ".join)
def test_checking_a_megabyte_of_python_ends(tmp_path: Path, name: str, words: list[str]) -> None:
    """A check of a megabyte must end in time: with 2,000 barriers under conditions, quadratic time would be minutes."""
    script = tmp_path / "train.py"
    script.write_text(large(name, 1_000_000))
    result = CliRunner().invoke(main.cli, [*words, str(script)], standalone_mode=False)
    said = str(result.exception)
    assert result.exception is None or "error[" in said or "not valid Python" in said


def test_checking_a_notebook_with_two_thousand_cells_ends(tmp_path: Path) -> None:
    cells = [{"cell_type": "code", "source": f"%time\nif rank == {i}: dist.barrier()\n"} for i in range(2_000)]
    notebook = tmp_path / "a.ipynb"
    notebook.write_text(json.dumps({"cells": cells}))
    result = CliRunner().invoke(main.cli, ["check", str(notebook)], standalone_mode=False)
    assert result.exception is None
    assert result.return_value == 0


def test_the_number_of_parses_of_invalid_cells_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invalid cells must not be parsed line by line: a megabyte of `cd a` would take a minute."""
    parsed, parse = 0, ast.parse

    def counted(text: str) -> ast.AST:
        nonlocal parsed
        parsed += len(text)
        return parse(text)

    monkeypatch.setattr(ast, "parse", counted)
    cells = [{"cell_type": "code", "source": "cd a\n" * 200}] * 20
    notebook.parts(json.dumps({"cells": cells}))
    assert parsed < 2_500_000


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.yaml", "\n" * 200_000), ("a.yaml", "kind:" + "\n" * 200_000), ("a.json", " " * 200_000)],
    ids=["blank lines", "a kind far away", "spaces"],
)  # fmt: skip
def test_a_folder_with_a_long_yaml_is_searched_in_linear_time(tmp_path: Path, name: str, text: str) -> None:
    """A folder with 4 MB of blank lines must be searched in linear time; quadratic time would be hours."""
    (tmp_path / name).write_text(text)
    (tmp_path / "train.py").write_text(WRONG)
    result = CliRunner().invoke(main.cli, ["check", str(tmp_path)], standalone_mode=False)
    assert result.stdout.count("\n") == 1


@pytest.mark.parametrize("piece", ["{rank}", "a{rank!r:>{w}}"])
def test_an_f_string_that_would_block_the_parser_is_not_parsed(tmp_path: Path, piece: str) -> None:
    """A nested f-string must not be parsed: Python 3.11 takes minutes for 1 MB, and no signal interrupts it."""
    text = f"x = f'{piece * 30_000}'\n"
    (finding,) = check.check("train.py", text)
    assert (finding.rule, finding.severity) == ("left-out", "warning")
    (tmp_path / "train").write_text(text)
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": [{"cell_type": "code", "source": text}]}))
    for words in (["check", "a.ipynb"], ["init", "train"], ["run", "--dry-run", "a.ipynb"]):
        CliRunner().invoke(main.cli, [*words[:-1], str(tmp_path / words[-1])], standalone_mode=False)


@pytest.mark.parametrize(
    "text",
    ["# it's {}\n" * 50_000, "x = '{}'\n" * 50_000, "x = f'{a}'\n" * 50_000, f"x = '''{'{}' * 50_000}'''\n"],
    ids=["comments", "texts", "short f-strings", "a long text"],
)  # fmt: skip
def test_braces_outside_f_strings_do_not_slow_down_the_parser(text: str) -> None:
    parsing.parse(text)


@pytest.mark.parametrize("link", [".a", "+a", "()", "[0]"])
def test_a_chain_of_names_that_crashes_the_parser_of_python_3_10_is_refused(tmp_path, monkeypatch, ddpjob, link):
    (tmp_path / "train.py").write_text(f"return\nx = a{link * 200_000}\n")
    monkeypatch.chdir(tmp_path)
    done = ddpjob("check", "train.py", code=2)
    assert "train.py:1: error[syntax]: nested too deeply to be read" in done.out


def test_only_a_limited_number_of_imports_is_searched(tmp_path: Path) -> None:
    """The number of imports to follow must be limited: 130,000 imported names would delay `ddpjob submit` by 20 s."""
    names = ", ".join(f"a{number}" for number in range(130_000))
    (tmp_path / "train.py").write_text(f"import {names}\nfrom {'.' * 100_000}a import b\n")
    found = declared_options.of([str(tmp_path / "train.py")])
    assert found == frozenset()


def test_a_long_line_in_a_cell_is_searched_in_linear_time() -> None:
    """A megabyte of spaces in one line must be searched in linear time; quadratic time would be 20 minutes."""
    for line in (" " * 200_000 + "%", "a," * 100_000, "a=" * 100_000, "?" * 200_000, "ls" + " " * 200_000 + "("):
        notebook.parts(json.dumps({"cells": [{"cell_type": "code", "source": f"{line}\n!ls"}]}))


@pytest.mark.parametrize("slow", ["notebook.parts", "mistakes"])
def test_files_that_are_read_besides_scripts_have_the_same_limit(tmp_path, slow, monkeypatch):
    (tmp_path / "a.ipynb").write_text('{"cells": []}')
    (tmp_path / "job.yaml").write_text(json.dumps(manifest()))
    monkeypatch.setattr(f"ddpjob_cli.commands.check_files.{slow}", lambda *_, **__: spins())
    monkeypatch.setattr(check_files, "CpuLimit", lambda _seconds: CpuLimit(0.05))
    result = CliRunner().invoke(main.cli, ["check", *map(str, tmp_path.iterdir())], standalone_mode=False)
    assert "warning[left-out]: this file takes too long to follow" in result.stdout


def test_one_script_of_many_jobs_is_read_once_and_the_jobs_share_its_time(tmp_path, monkeypatch):
    """A script of 900 jobs must be parsed once, and all jobs must share its time limit. Otherwise the check takes
    minutes."""
    jobs = [
        {**manifest(container={"command": ["torchrun", "train.py"]}), "metadata": {"name": f"j{i}"}} for i in range(99)
    ]
    (tmp_path / "jobs.yaml").write_text(yaml.safe_dump_all(jobs))
    (tmp_path / "train.py").write_text("import torch\n")
    parsed, seconds, parse = [], [], yamlfile.parse
    monkeypatch.setattr(yamlfile, "parse", lambda *given: parsed.append(1) or parse(*given))
    monkeypatch.setattr(check_files, "CpuLimit", lambda given: seconds.append(given) or CpuLimit(given))
    result = CliRunner().invoke(main.cli, ["check", str(tmp_path)], standalone_mode=False)
    assert "2 files read" in result.stderr
    assert len(parsed) == 1
    assert seconds == [15.0, 15.0]


def test_the_skipped_rest_of_a_notebook_is_reported_in_one_line(tmp_path, monkeypatch):
    """Cells that are skipped must be reported in one line: 30,000 cells would give 23,000 warnings."""
    cells = [{"cell_type": "code", "source": f"%%writefile a{i}.py\nx = 1\n"} for i in range(3)]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    monkeypatch.setattr(check, "check", lambda path, *_: [check.unchecked(path)])
    result = CliRunner().invoke(main.cli, ["check", str(tmp_path)], standalone_mode=False)
    assert "cell 1:1: warning[left-out]: the notebook takes too long to follow" in result.stdout
    assert result.stdout.count("\n") == 1


@pytest.mark.parametrize("text", ["x = '\ud800'", "x = '\0'"], ids=["half of a character", "null"])
def test_a_notebook_with_characters_that_no_script_can_have_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": [{"cell_type": "code", "source": text}]}))
    for words in ("run --dry-run", "submit --dry-run"):
        result = CliRunner().invoke(main.cli, [*words.split(), str(tmp_path / "a.ipynb")], standalone_mode=False)
        assert "not valid Python" in str(result.exception)
        assert isinstance(result.exception, InputError)


def test_convert_ends_for_a_command_that_is_slow_to_analyze(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search must be limited: 450 names after each of 2,500 `read` in 18 kB of shell would take minutes."""
    monkeypatch.setattr(cpu_limit, "CpuLimit", lambda: CpuLimit(0.2))
    script = f"echo '{'read ' * 2500}'; {''.join(f'a $SLURM_{i};' for i in range(450))} torchrun x.py"
    container = {"name": "pytorch", "image": "i", "command": ["sh", "-c", script]}
    pods = {"replicas": 1, "template": {"spec": {"containers": [container]}}}
    metadata = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": "digits"}}
    (tmp_path / "job.json").write_text(json.dumps({**metadata, "spec": {"pytorchReplicaSpecs": {"Master": pods}}}))
    result = CliRunner().invoke(main.cli, ["convert", str(tmp_path / "job.json")], standalone_mode=False)
    assert "kind: DDPJob" in result.stdout
    assert "takes too long to follow" in result.stderr
