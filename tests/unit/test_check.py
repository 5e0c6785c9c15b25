"""`ddpjob check` finds the classic mistakes of DDP at their lines, and reports nothing in sound scripts."""

import dataclasses
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from worlds import manifest

import ddpjob_check as check
from ddpjob_check import CheckedJob, Finding
from ddpjob_check.job import known
from ddpjob_check.notebook import parts as read_notebook
from ddpjob_cli.commands import check_files, main, sources
from ddpjob_cli.manifest import yamlfile
from ddpjob_operator.job import validation
from ddpjob_operator.job.launch.command import by_torchrun, read
from ddpjob_operator.plan import finish

ROOT = Path(__file__).parents[2]
FIXTURES = Path(__file__).parent / "check/fixtures"
MISTAKES = sorted(FIXTURES.glob("mistakes/*.py"))
CLEAN = sorted(FIXTURES.glob("clean/*.py"))
HEALTHY = sorted(FIXTURES.glob("healthy/*.py"))
EXAMPLES = sorted((ROOT / "trainer/examples").rglob("*.py"))
JOBS = sorted((ROOT / "examples").rglob("*.yaml"))
RULES = {rule.name: rule for rule in check.RULES}
TWO_NODES = CheckedJob(nodes=2, nproc=2, gpus=2)
ELASTIC = CheckedJob(nodes=4, min_nodes=2, nproc=8, gpus=8, launcher="torchrun")


def found(text: str, job: CheckedJob | None = None) -> list[tuple[int, str]]:
    return [(f.line, f.rule) for f in check.check("train.py", text, job or CheckedJob())]


def rules_in(text: str, job: CheckedJob | None = None) -> set[str]:
    return {rule for _, rule in found(text, job)}


def context_of(text: str) -> CheckedJob:
    """Return the job that the first line of a fixture describes, for example `# job: nodes=2 launcher=torchrun`."""
    words = text.splitlines()[0].removeprefix("# job:").split() if text.startswith("# job:") else []
    given = {name: int(value) if value.isdecimal() else value for name, value in (word.split("=") for word in words)}
    if given.get("variables") == "none":
        given["variables"] = frozenset()  # type: ignore[assignment]
    return CheckedJob(**given)  # type: ignore[arg-type]


# ---------------------------------------------------------------- what is found


@pytest.mark.parametrize("path", MISTAKES, ids=lambda p: p.stem)
def test_each_mistake_is_found_once_at_its_line_and_nothing_else_is_reported(path: Path) -> None:
    text = path.read_text()
    line = next(i for i, content in enumerate(text.splitlines(), start=1) if "# <- here" in content)
    assert found(text, context_of(text)) == [(line, path.stem)]


def test_each_rule_has_a_script_that_breaks_it() -> None:
    assert {path.stem for path in MISTAKES} == set(RULES)


def test_a_finding_has_file_line_rule_and_the_fix() -> None:
    path = FIXTURES / "mistakes/rank-is-local-rank.py"
    (finding,) = check.check("train.py", path.read_text(), TWO_NODES)
    assert str(finding) == (
        "train.py:13: error[rank-is-local-rank]: init_process_group(rank=local_rank): on 2 nodes two processes get "
        'rank 0; use int(os.environ["RANK"])'
    )


# Each case: a correct script from fixtures, a text in it and its replacement, and the rules that report the change.
CHANGES = [
    ("multigpu", "self.gpu_id == 0 and ", "", {"save-on-every-rank"}),
    ("multigpu", "self.train_data.sampler.set_epoch(epoch)", "pass", {"set-epoch-missing"}),
    ("multigpu", "shuffle=False, sampler", "shuffle=True, sampler", {"shuffle-with-sampler"}),
    ("multigpu", "def main(rank: int, world_size", "def main(world_size", {"spawn-function-without-rank"}),
    ("multinode", "    destroy_process_group()\n", "", set()),
    ("multigpu", "DDP(model, device_ids=[gpu_id])", "model", {"model-not-wrapped"}),
    ("multinode", ", map_location=loc", "", {"load-without-map-location"}),
    (
        "multinode",
        'self.local_rank = int(os.environ["LOCAL_RANK"])',
        'self.local_rank = int(os.environ["RANK"])',
        {"device-is-global-rank"},
    ),
    ("multinode", 'backend="nccl")', 'backend="nccl", rank=int(os.environ["LOCAL_RANK"]))', {"rank-is-local-rank"}),
    ("imagenet", "train_sampler.set_epoch(epoch)", "pass", {"set-epoch-missing"}),
    ("dist_tuto", "128 // size", "128 / float(size)", {"batch-size-is-float"}),
    ("dist_tuto", "        rng.seed(seed)\n", "", {"partitioner-unseeded"}),
    ("dist_tuto", "    else:\n        dist.scatter(tensor)\n", "", {"collective-on-one-rank"}),
    ("nodes_by_hand", "rank=rank)\n    torch", "rank=gpu)\n    torch", {"rank-is-local-rank"}),
    (
        "nodes_by_hand",
        "batch_size=100, shuffle=False, num_workers=0, sampler=sampler",
        "batch_size=100, shuffle=True",
        {"sampler-unused"},
    ),
    ("both_sides_of_the_barrier", "    if dist.get_rank() != 0:\n        return\n", "", {"save-on-every-rank"}),
    ("both_sides_of_the_barrier", '"--local_rank", "--local-rank"', '"--local_rank"', set()),
    ("ddp_example", '"--local_rank", "--local-rank"', '"--local_rank"', {"local-rank-one-spelling"}),
]


@pytest.mark.parametrize(("name", "right", "wrong", "rules"), CHANGES)
def test_one_wrong_change_to_a_sound_script_is_found(name: str, right: str, wrong: str, rules: set[str]) -> None:
    text = (FIXTURES / f"clean/{name}.py").read_text()
    job = TWO_NODES if "# several nodes" in text else CheckedJob()
    assert rules_in(text, job) == set()
    assert right in text or not rules
    assert rules_in(text.replace(right, wrong), job) == rules


def test_a_script_for_one_machine_is_wrong_only_in_a_job_with_several() -> None:
    """An address such as localhost must be an error only in a job of several nodes. On one machine it is correct."""
    text = (FIXTURES / "clean/ddp_tutorial.py").read_text()
    assert rules_in(text) == set()
    assert rules_in(text, CheckedJob(nodes=1, nproc=8)) == {"master-port-fixed"}
    on_two = rules_in(text, CheckedJob(nodes=2, nproc=8))
    assert {"master-overwritten", "rank-is-local-rank"} <= on_two


@pytest.mark.parametrize(("nodes", "severity"), [(None, "warning"), (2, "error"), (1, None)])
def test_a_mistake_that_needs_several_nodes_is_an_error_only_if_the_job_has_several(nodes, severity):
    text = (FIXTURES / "mistakes/rank-is-local-rank.py").read_text()
    assert {f.severity for f in check.check("t.py", text, CheckedJob(nodes=nodes))} == (
        {severity} if severity else set()
    )


@pytest.mark.parametrize(
    ("gpus", "nproc", "severity"), [(None, 2, "warning"), (2, 2, "error"), (8, 1, "warning"), (0, 2, "error")]
)
def test_a_global_rank_as_device_is_an_error_if_a_node_has_fewer_gpus_than_the_job_has_ranks(gpus, nproc, severity):
    """A global rank as device is no error if each node has a GPU with this number: two GPUs for ranks 0 and 1."""
    text = (FIXTURES / "mistakes/device-is-global-rank.py").read_text()
    found = [f for f in check.check("t.py", text, CheckedJob(nodes=2, nproc=nproc, gpus=gpus)) if "device-is" in f.rule]
    assert {f.severity for f in found} == {severity}


@pytest.mark.parametrize("name", ["file-not-shared", "master-overwritten"])
def test_a_mistake_that_only_matters_in_a_cluster_is_a_warning_before_a_local_run(name: str) -> None:
    """A local run must not be refused: all nodes are on this machine, so they share files and localhost."""
    text = (FIXTURES / f"mistakes/{name}.py").read_text()
    for local, severity in ((False, "error"), (True, "warning")):
        found = check.check("t.py", text, CheckedJob(nodes=2, nproc=1, known=True, local=local))
        assert [f.severity for f in found if f.rule == name] == [severity]


ON_SOME = """
import torch.distributed as dist
def evaluate(t):
    dist.all_reduce(t)
def train(args):
    rank = dist.get_rank()
BODY
def options():
    import argparse
    parser = argparse.ArgumentParser()
    parser.add_argument("--evaluate", action="store_true")
    return parser.parse_args()
if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(options())
"""


@pytest.mark.parametrize(
    ("body", "words", "severity", "where"),
    [
        ("if rank == 0:\n  dist.barrier()", "", "error", "barrier() only if `rank == 0`"),
        ("if rank == 0:\n  pass\nelse:\n  dist.barrier()", "", "error", "barrier() only if not `rank == 0`"),
        ("if rank != 0:\n  return\ndist.barrier()", "", "error", "barrier() only if not `rank != 0`"),
        ("if rank == 0:\n  pass\nelif rank > 1:\n  dist.barrier()", "", "error", "only if `rank > 1`"),
        ("if rank == 0:\n  evaluate(1)", "", "error", "evaluate() calls all_reduce() (line 4) only if `rank == 0`"),
        ("for i in range(9):\n  if i % 3 == 0 and rank == 0:\n    evaluate(1)", "", "error", "only if"),
        ("if args.evaluate:\n  if rank == 0:\n    evaluate(1)", "", "warning", "only if"),
        ("if args.evaluate:\n  if rank == 0:\n    evaluate(1)", "--evaluate", "error", "only if"),
        ("if args.evaluate:\n  return\nif rank == 0:\n  evaluate(1)", "", "error", "only if"),
        ("if args.evaluate:\n  return\nif rank == 0:\n  evaluate(1)", "--eval", "warning", "only if"),
        ("if rank == 0 and found():\n  return\ndist.barrier()", "", "warning", "only if not"),
        ("if found():\n  if rank == 0:\n    dist.barrier()", "", "warning", "only if"),
    ],
)
def test_an_error_is_about_a_line_that_the_run_certainly_executes(body, words, severity, where):
    """An error refuses the run, so it must be about a line that certainly runs, and name the right ranks."""
    text = ON_SOME.replace("BODY", "\n".join(f"    {line}" for line in body.splitlines()))
    (finding,) = check.check("t.py", text, CheckedJob(nodes=2, nproc=2, words=tuple(words.split())))
    assert (finding.rule, finding.severity) == ("collective-on-one-rank", severity)
    assert where in finding.message


def test_a_job_of_one_rank_has_no_finding_about_other_ranks() -> None:
    """`ddpjob run --nodes 1` must accept a script that is correct with one process."""
    for name in ("collective-on-one-rank", "uneven-steps", "gradients-not-averaged", "partitioner-unseeded"):
        text = (FIXTURES / f"mistakes/{name}.py").read_text()
        assert name not in rules_in(text, CheckedJob(nodes=1, nproc=1))


def test_the_first_rank_of_each_node_is_every_rank_if_nodes_have_one_process() -> None:
    text = (FIXTURES / "mistakes/collective-on-one-rank.py").read_text()
    text = text.replace("dist.get_rank()", "int(os.environ['LOCAL_RANK'])").replace(
        "import torch\n", "import os, torch\n"
    )
    given = [
        (CheckedJob(nodes=2, nproc=1), []),
        (CheckedJob(nodes=2), ["warning"]),
        (CheckedJob(nodes=2, nproc=2), ["error"]),
    ]
    for job, severities in given:
        assert [f.severity for f in check.check("t.py", text, job)] == severities


HEAD = """
import os
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP
"""


def snippets() -> list[Any]:
    parts = re.split(r"^=== (.*):(.*)\n", (FIXTURES / "snippets.txt").read_text(), flags=re.MULTILINE)[1:]
    rows = zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    return [pytest.param(lines, set(rules.split()), id=why.replace(" ", "_")) for why, rules, lines in rows]


@pytest.mark.parametrize(("lines", "rules"), snippets())
def test_certain_mistakes_are_reported_and_uncertain_ones_are_not(lines: str, rules: set[str]) -> None:
    """Certain mistakes must be reported, and no others. The lines are parts of scripts, so a missing group is none."""
    assert rules_in(HEAD + lines) - ({"init-missing"} - rules) == rules


@pytest.mark.parametrize(
    ("lines", "rules"),
    [
        ("", {"nothing-runs"}),
        ("logger = logging.getLogger()", {"nothing-runs"}),
        ("train()", set()),
        ("Runner(train).start()", set()),
        ("pool.submit(train)", {"process-failure-ignored"}),
        ("pool.apply_async(train, (1,))", {"process-failure-ignored"}),
        ("future = pool.submit(train)\nfuture.result()", set()),
        ("futures = [pool.submit(train) for _ in range(2)]\nwait(futures)", {"process-failure-ignored"}),
        ("results = [pool.apply_async(train) for _ in range(2)]\n[r.get() for r in results]", set()),
        ("with ProcessPoolExecutor() as pool: pool.map(train, range(2))", {"process-failure-ignored"}),
        ("with ProcessPoolExecutor() as pool: list(pool.map(train, range(2)))", set()),
        ("with mp.Pool() as pool: pool.map(train, range(2))", set()),
        ("mp.spawn(train, nprocs=2, join=False)", {"process-failure-ignored"}),
        ("context = mp.spawn(train, nprocs=2, join=False)\nwhile not context.join(): pass", set()),
        ("train()\npool.submit(upload)", set()),
        ("mp.Process(target=train).start()", {"process-failure-ignored"}),
        ("p = mp.Process(target=train)\np.start()\nsys.exit(p.exitcode)", set()),
        ("train()\nmp.Process(target=upload).start()", set()),
    ],
)
def test_a_training_that_is_never_called_or_whose_failure_is_swallowed_is_named_in_a_job(lines, rules):
    """A training that is never called must be reported: it ends with 0. A file outside a job may be a module."""
    head = f"{HEAD}from concurrent.futures import ProcessPoolExecutor, wait\n"
    text = f"{head}def train(): dist.init_process_group('gloo')\ndef upload(): print('done')\n{lines}"
    ours = {"nothing-runs", "process-failure-ignored"}
    assert rules_in(text, CheckedJob(known=True)) & ours == rules
    assert rules_in(text) & ours == set()


@pytest.mark.parametrize(
    ("mounts", "wrong"),
    [({}, True), ({"/tmp": False}, True), ({"/tmp": True}, False), ({"/tm": True}, True)],
)
def test_a_rendezvous_file_is_wrong_if_the_nodes_do_not_share_its_folder(mounts: dict[str, bool], wrong: bool) -> None:
    text = (FIXTURES / "mistakes/file-not-shared.py").read_text()
    job = CheckedJob(nodes=2, nproc=1, known=True, mounts=mounts)
    assert rules_in(text, job) == ({"file-not-shared"} if wrong else set())


@pytest.mark.parametrize(
    ("method", "wrong"),
    [
        ('f"file://{folder}/meet"', False),
        ('f"file:///mnt/{folder}/meet"', False),
        ('f"file:///tmp/{folder}"', True),
        ('"file:///mnt/shared/meet"', False),
        ('"file:///mnt/meet"', True),
    ],
)
def test_a_rendezvous_file_in_an_unknown_folder_may_be_on_the_shared_volume(method: str, wrong: bool) -> None:
    text = (FIXTURES / "mistakes/file-not-shared.py").read_text()
    text = text.replace("dist.init_process_group(", f"where = {method}\ndist.init_process_group(")
    text = text.replace('init_method="file:///tmp/meet",  # <- here', "init_method=where,")
    job = CheckedJob(nodes=2, nproc=1, known=True, mounts={"/mnt/shared": True, "/data": False})
    assert rules_in(text, job) == ({"file-not-shared"} if wrong else set())
    alone = CheckedJob(nodes=2, nproc=1, known=True, mounts={"/data": False})
    assert rules_in(text, alone) == {"file-not-shared"}, "no volume is shared"


@pytest.mark.parametrize(
    ("launcher", "rules"),
    [
        ("torchrun", {"tcp-under-torchrun"}),
        ("torch.distributed.launch", {"tcp-under-torchrun"}),
        ("ddprun", set()),
        ("python", set()),
    ],
)
def test_tcp_is_wrong_only_if_the_launcher_serves_the_store_itself(launcher: str, rules: set[str]) -> None:
    text = (FIXTURES / "mistakes/tcp-under-torchrun.py").read_text()
    assert rules_in(text, CheckedJob(nodes=2, launcher=launcher)) == rules


OTHERWISE = """
try:
    local_rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("nccl")
except KeyError:
    INIT
===
if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
    dist.init_process_group("nccl")
else:
    INIT
===
rank = os.environ.get("RANK")
if os.environ.get("RANK") is not None:
    dist.init_process_group("nccl")
else:
    INIT
===
launched = int(os.environ.get("LOCAL_RANK", -1)) != -1
if not launched:
    INIT
===
if not os.environ.get("LOCAL_RANK"):
    INIT
===
if args.distributed and args.world_size > 1:
    dist.init_process_group("nccl")
if int(os.environ.get("WORLD_SIZE", 1)) == 1:
    INIT
===
import sys
if sys.platform == "win32":
    INIT
else:
    dist.init_process_group("nccl")
===
def worker(rank, size):
    os.environ["MASTER_ADDR"] = "localhost"
    INIT
if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:
        dist.init_process_group("nccl")
    else:
        mp.spawn(worker, args=(2,), nprocs=2)
"""
ALONE = (
    'dist.init_process_group("gloo", init_method="tcp://127.0.0.1:23456", rank=0, world_size=1)',
    'dist.init_process_group("gloo", init_method="file:///tmp/meet", rank=0, world_size=1)',
    'os.environ["MASTER_PORT"] = "29500"',
    'dist.init_process_group(rank=int(os.environ["LOCAL_RANK"]))',
)


@pytest.mark.parametrize("alone", ALONE)
@pytest.mark.parametrize("lines", OTHERWISE.split("===\n"))
def test_code_that_runs_only_without_a_launcher_is_no_mistake_in_a_job(lines: str, alone: str) -> None:
    """Code in `except KeyError`, as in insightface's ArcFace, must be no error: with a launcher it does not run."""
    job = CheckedJob(nodes=2, nproc=2, gpus=2, launcher="torchrun", known=True)
    assert rules_in(HEAD + lines.replace("INIT", alone), job) <= {"set-device-missing"}
    assert rules_in(HEAD + alone, job)


def test_a_script_that_tries_nccl_first_may_run_without_a_gpu() -> None:
    job = CheckedJob(nodes=2, nproc=2, gpus=0, launcher="torchrun", known=True)
    init = 'dist.init_process_group("nccl")'
    assert rules_in(f"{HEAD}try:\n    {init}\nexcept RuntimeError:\n    {init.replace('nccl', 'gloo')}\n", job) == set()
    assert rules_in(f"{HEAD}try:\n    {init}\nfinally:\n    pass\n", job) == {"nccl-without-gpu"}
    for ends in (
        "RuntimeError as e:\n    print(e)\n    raise",
        "Exception:\n    sys.exit(1)",
        "KeyboardInterrupt:\n    pass",
    ):
        assert rules_in(f"{HEAD}import sys\ntry:\n    {init}\nexcept {ends}\n", job) == {"nccl-without-gpu"}
    assert rules_in(f"{HEAD}if 'RANK' in os.environ:\n    {init}\n", job) == {"nccl-without-gpu"}


SPAWN = """
import torch, torch.multiprocessing as mp
def train(rank, n): ...
if __name__ == "__main__":
    n = torch.cuda.device_count()
    mp.spawn(train, args=(n,), nprocs=n)
"""


@pytest.mark.parametrize(
    ("right", "wrong", "found_there"),
    [
        ("", "", True),
        ("nprocs=n", "nprocs=torch.cuda.device_count()", True),
        ("    mp.", "    def run(n):\n        mp.spawn(train, nprocs=n)\n    run(n)\n    ", True),
        ("count()", "count() or 2", False),
        ("count()", "count() if torch.cuda.is_available() else 2", False),
        ("count()", "count()\n    if n == 0:\n        train(0, 1)\n        exit()", False),
        ("    mp.", "    if n: mp.", False),
        ("nprocs=n", "nprocs=2", False),
    ],
)
def test_a_spawn_of_one_process_per_gpu_is_found_if_there_is_no_gpu(right: str, wrong: str, found_there: bool) -> None:
    """A script that spawns a process per GPU must be an error without GPUs: it would start no process and succeed."""
    text = SPAWN.replace(right, wrong) if right else SPAWN
    assert ("spawn-without-gpu" in rules_in(text, CheckedJob(nodes=1, nproc=2, gpus=0))) == found_there
    for gpus in (None, 2):
        assert "spawn-without-gpu" not in rules_in(text, CheckedJob(nodes=1, nproc=2, gpus=gpus))


P = "import argparse\nparser = argparse.ArgumentParser()\n"
OLD, NEW = 'parser.add_argument("--local_rank", type=int)\n', 'parser.add_argument("--local-rank", type=int)\n'
PARSE = "args = parser.parse_args()\n"
LAUNCH = ["python", "-m", "torch.distributed.launch"]


@pytest.mark.parametrize(
    ("script", "command", "line"),
    [
        (P + OLD + PARSE, LAUNCH, 3),
        (P + OLD.replace("type=int", "default=0") + "import lightning\n" + PARSE, LAUNCH, 3),
        (P + 'parser.add_argument("--lr")\n' + PARSE, LAUNCH, 4),
        (P + PARSE.replace("parser", "argparse.ArgumentParser()"), LAUNCH, 3),
        ("import click\n@click.command()\n@click.option('--local_rank')\ndef f(local_rank): ...\nf()", LAUNCH, 3),
        (P + OLD.replace("type=int", "required=True") + PARSE, ["torchrun"], 3),
        (P + NEW.replace("type=int", "required=True") + PARSE, [*LAUNCH, "--use-env"], 3),
        (P + NEW + PARSE, LAUNCH, None),
        (P + OLD.replace('rank"', 'rank", "--local-rank"') + PARSE, LAUNCH, None),
        (P + OLD + PARSE, ["torchrun"], None),
        (P + OLD + PARSE, ["python"], None),
        (P + OLD + PARSE.replace("parse_args", "parse_known_args"), LAUNCH, None),
        (P + PARSE.replace("parse_args()", "parse_args([])"), LAUNCH, None),
        (P + "from lib import add\nadd(parser)\n" + PARSE, LAUNCH, None),
        (P.replace("Parser()", "Parser(parents=[base])") + PARSE, LAUNCH, None),
        (P + 'parser.add_argument("rest", nargs=argparse.REMAINDER)\n' + PARSE, LAUNCH, None),
        ("import os\nprint(os.environ['RANK'])\n", LAUNCH, None),
    ],
)
def test_an_option_that_the_launcher_passes_must_be_declared_by_the_script(job_file, script, command, line):
    """An option that the launcher passes and the script does not declare must be found: all ranks would exit with 2."""
    result = ran(job_file(script, *command, "train.py"))
    assert re.findall(r"train.py:(\d+): error\[local-rank-one-spelling\]", result.stdout) == (
        [str(line)] if line else []
    )


ALONE = (
    P
    + """import torch.distributed as dist
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()
if args.local_rank != -1:
    dist.init_process_group("nccl")
"""
)
NOT_PASSED = {
    "as people write it": (ALONE, ["torchrun"], True),
    "without a launcher": (ALONE, ["python"], True),
    "by launch, which is told not to": (ALONE, [*LAUNCH, "--use-env"], True),
    "no default is None": (ALONE.replace(", default=-1", "").replace("!= -1", "is not None"), ["torchrun"], True),
    "in a function": (
        ALONE.replace(
            "if args.local_rank", "def setup(local_rank):\n  if local_rank == -1: return\n  if 1 or local_rank"
        )
        + "setup(args.local_rank)\n",
        ["torchrun"],
        True,
    ),
    "around the call of one": (
        ALONE.replace("if args", "def setup():\n  dist.init_process_group()\nif args").replace(
            'dist.init_process_group("nccl")', "setup()"
        ),
        ["torchrun"],
        True,
    ),
    "it is passed": (ALONE.replace('"--local_rank"', '"--local_rank", "--local-rank"'), LAUNCH, False),
    "it is in the command": (ALONE, ["torchrun", "--no-python", "sh", "-c"], False),
    "a variable": (ALONE.replace("-1)", '-1)\nimport os; r = os.environ["LOCAL_RANK"]'), ["torchrun"], False),
    "set": (ALONE.replace("if args", "args.local_rank = place()\nif args"), ["torchrun"], False),
    "set in a function": (ALONE.replace("if args", "def f(a):\n  a.local_rank = 0\nif args"), ["torchrun"], False),
    "or a group in any case": (ALONE + 'dist.init_process_group("nccl")\n', ["torchrun"], False),
    "the first rank is asked for": (
        ALONE.replace("if args.local_rank != -1", "if args.local_rank < 1"),
        ["torchrun"],
        False,
    ),
    "an error": (ALONE + "else:\n    raise ValueError\n", ["torchrun"], False),
    "its own processes": (ALONE + "import torch.multiprocessing as mp\nmp.spawn(f)\n", ["torchrun"], False),
    "by DeepSpeed's launcher": (ALONE, ["deepspeed"], False),
}


@pytest.mark.parametrize(("script", "command", "alone"), NOT_PASSED.values(), ids=NOT_PASSED)
def test_ranks_that_each_train_as_a_single_process_are_found(job_file, script, command, alone):
    """Ranks that train as single processes must be found: each would train its own model, and the job would succeed."""
    start = ["exec python train.py --local_rank=$LOCAL_RANK"] if "sh" in command else ["train.py"]
    result = ran(job_file(script, *command, *start, nodes=2, nprocPerNode=2))
    assert ("error[local-rank-not-passed]" in result.stdout) == alone, result.stdout


FIRST_GPU = """
import argparse, os, torch, torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
args = parser.parse_args()
if int(os.environ.get("WORLD_SIZE", 1)) > 1:
    torch.cuda.set_device(args.local_rank)
    dist.init_process_group("nccl")
"""


@pytest.mark.parametrize(
    ("script", "command", "gpus", "found"),
    [
        (FIRST_GPU, ["torchrun"], 2, True),
        (FIRST_GPU, ["ddprun"], 2, True),
        (FIRST_GPU, ["torchrun"], 1, False),
        (FIRST_GPU, ["torchrun", "--no-python", "sh", "-c"], 2, False),
        (FIRST_GPU.replace('"--local_rank"', '"--local_rank", "--local-rank"'), LAUNCH, 2, False),
        (FIRST_GPU.replace("set_device(args.local_rank)", "set_device(args.rank % 2)"), ["torchrun"], 2, False),
        (FIRST_GPU.replace("if int", "args.local_rank = place()\nif int"), ["torchrun"], 2, False),
        (FIRST_GPU.replace("if int", "os.environ['CUDA_VISIBLE_DEVICES'] = gpu()\nif int"), ["torchrun"], 2, False),
        (FIRST_GPU.replace("    torch.cuda.set_device(args.local_rank)\n", ""), ["torchrun"], 2, False),
    ],
    ids=["torchrun", "ddprun", "one GPU", "given", "passed", "another device", "set", "each sees its own", "none"],
)
def test_ranks_that_all_use_the_first_gpu_of_their_node_are_found(job_file, script, command, gpus, found):
    """Ranks that all use the first GPU of their node must be found, as in scripts of apex and timm. NCCL would fail,
    but only after all nodes have pulled the image."""
    start = ["exec python train.py --local_rank=$LOCAL_RANK"] if "sh" in command else ["train.py"]
    container = {"resources": {"limits": {"nvidia.com/gpu": gpus}}}
    result = ran(job_file(script, *command, *start, nodes=2, container=container))
    assert ("error[local-rank-not-passed]" in result.stdout) == found, result.stdout
    assert not found or "all 2 ranks of a node use its first GPU" in result.stdout


@pytest.mark.parametrize("command", [["python", "train.py"], ["torchrun", "train.py"]])
def test_one_process_that_uses_all_gpus_of_its_node_is_left_alone(job_file, command: list[str]) -> None:
    """A script with DataParallel uses all GPUs of a node in one process. It must get no finding."""
    nproc = 1 if command[0] == "torchrun" else 4
    container = {"resources": {"limits": {"nvidia.com/gpu": 4}}}
    result = ran(job_file(ALONE, *command, nodes=1, nprocPerNode=nproc, container=container))
    assert "local-rank-not-passed" not in result.stdout


@pytest.mark.parametrize(
    ("names", "command"),
    [
        ('"--local_rank"', 'command: [torchrun, --no-python, sh, -c, "exec python train.py --local_rank=$LOCAL_RANK"]'),
        ('"--local-rank"', "command: [python, -m, torch.distributed.launch, train.py]"),
    ],
)
def test_a_command_that_needs_no_edit_of_the_script_is_named(job_file, names: str, command: str) -> None:
    """The finding must name the command in docs/launching.md that needs no edit, or users edit the script."""
    assert command in (ROOT / "docs/launching.md").read_text().replace("`[", "`command: [")
    assert (
        f"with the script unchanged: {command};"
        in ran(job_file(ALONE.replace('"--local_rank"', names), nprocPerNode=2)).stdout
    )


@pytest.mark.parametrize("by", [["torchrun"], LAUNCH])
def test_a_command_is_named_if_the_local_rank_option_is_required_or_refused(job_file, by: list[str]) -> None:
    """If the local rank is an option, a command can pass it. The message must name this command."""
    required = P + OLD.replace("type=int", "required=True") + PARSE
    said = ran(job_file(required, *by, "train.py")).stdout
    assert 'with the script unchanged: command: [torchrun, --no-python, sh, -c, "exec python train.py --loc' in said


def test_a_script_that_a_shell_starts_for_each_rank_is_checked(job_file) -> None:
    """`torchrun --no-python sh -c "exec python train.py …"` also has a script, which must be checked."""
    words = ["torchrun", "--no-python", "sh", "-c", "exec python train.py --local_rank=$LOCAL_RANK"]
    result = ran(job_file((FIXTURES / "mistakes/backend-mpi.py").read_text(), *words))
    assert "error[backend-mpi]" in result.stdout


PYTHON, TORCHRUN = ["python", "train.py"], ["torchrun", "train.py"]
REMOVE = "Remove it: the job sets it"
VARIABLES = [
    (PYTHON, "RANK", "0", f"RANK=0 gives all 2 nodes the same rank. {REMOVE}; or use $(NODE_RANK)."),
    (PYTHON, "NODE_RANK", "1", "the same rank"),
    (TORCHRUN, "PET_NODE_RANK", "0", "the same rank"),
    (PYTHON, "WORLD_SIZE", "8", "WORLD_SIZE=8 contradicts spec.nodes: 2."),
    (TORCHRUN, "PET_NNODES", "4", f"PET_NNODES=4 contradicts spec.nodes: 2. {REMOVE}."),
    (PYTHON, "MASTER_ADDR", "localhost", "MASTER_ADDR=localhost is not an address at which 2 nodes can find rank 0."),
    (["torchrun", "--master_addr=$(MASTER_ADDR)", "train.py"], "MASTER_ADDR", "localhost", "is not an address"),
    (["torchrun", "--node_rank=$(NODE_RANK)", "train.py"], "NODE_RANK", "0", "the same rank"),
    (PYTHON, "RANK", "$(NODE_RANK)", ""),
    (PYTHON, "WORLD_SIZE", "2", ""),
    (PYTHON, "PET_NODE_RANK", "0", ""),
    (TORCHRUN, "RANK", "0", ""),
    (TORCHRUN, "MASTER_ADDR", "localhost", ""),
    (TORCHRUN, "PET_NNODES", "2:2", ""),
    (["torchrun", "--rdzv_backend=c10d", "--rdzv_endpoint=$(MASTER_ADDR):1", "train.py"], "PET_NODE_RANK", "0", ""),
    (["bash", "train.sh"], "RANK", "0", ""),
]


@pytest.mark.parametrize(("command", "name", "value", "said"), VARIABLES)
def test_a_variable_that_keeps_the_nodes_apart_is_an_error_like_the_option(job_file, command, name, value, said):
    """A fixed RANK or MASTER_ADDR in env must be an error like the launcher's option, because all nodes would wait."""
    env = {"env": [{"name": "A", "value": "1"}, {"name": name, "value": value}]}
    result = ran(job_file("", *command, nodes=2, container=env))
    errors = [line for line in result.stdout.splitlines() if "error[variable-keeps-nodes-apart]" in line]
    assert len(errors) == bool(said), result.stdout
    assert said in result.stdout
    on_one_node = ran(job_file("", *command, nodes=1, container=env)).stdout
    assert "variable-keeps-nodes-apart" not in on_one_node


BY_RANKS = "torchrun --nnodes=$WORLD_SIZE --node_rank=$RANK train.py"


@pytest.mark.parametrize(
    ("script", "nproc", "said"),
    [
        (BY_RANKS, 2, 2),
        ("torchrun --nnodes ${WORLD_SIZE} --node-rank=$NODE_RANK train.py", 2, 1),
        ("export NNODES=$WORLD_SIZE; torchrun --nnodes=$NNODES train.py", 2, 1),
        (BY_RANKS, 1, 0),
        (BY_RANKS.replace("WORLD_SIZE", "NNODES").replace("RANK", "NODE_RANK"), 2, 0),
        ("torchrun --nnodes=${WORLD_SIZE:-2} train.py", 2, 0),
        (f"WORLD_SIZE=$NNODES RANK=$NODE_RANK; {BY_RANKS}", 2, 0),
        ("python train.py --nnodes=$WORLD_SIZE", 2, 0),
    ],
)
def test_launcher_options_from_variables_that_the_launcher_itself_sets_are_an_error(job_file, script, nproc, said):
    """$WORLD_SIZE in a launcher's option must be an error. It is empty in the shell: torchrun gets `--nnodes=`."""
    stdout = ran(job_file("", "bash", "-c", script, nodes=2, nprocPerNode=nproc)).stdout
    assert stdout.count("error[variable-of-ranks]") == said, stdout
    assert ("WORLD_SIZE is a variable of the ranks" in stdout and "; use NNODES" in stdout) == bool(said)


def test_the_advice_names_the_checked_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The advice must have the script's name, because a fixed `python train.py` is wrong for most scripts."""
    monkeypatch.chdir(tmp_path)
    Path("main_pretrain.py").write_text("import torch.distributed as dist\n" + P + OLD + "dist.init_process_group()\n")
    assert "exec python main_pretrain.py --local_rank=$LOCAL_RANK" in ran("main_pretrain.py").stdout


def test_a_refused_variable_gets_no_additional_warning(job_file) -> None:
    def said(*names: str) -> list[str]:
        env = {"env": [{"name": name, "value": "1"} for name in names]}
        return re.findall(r"\[([a-z-]+)\]: [A-Z]", ran(job_file("", *PYTHON, nodes=2, container=env)).stdout)

    assert said("RANK") == ["variable-keeps-nodes-apart"]
    assert sorted(said("GROUP_RANK", "MASTER_PORT")) == ["rendezvous-overridden", "variable-keeps-nodes-apart"]


def test_the_warnings_before_a_run_have_the_same_words_as_the_events_of_the_job(job_file) -> None:
    """The warnings of `ddpjob check` must be those that a job later gets as Events."""
    env = {"env": [{"name": "MASTER_PORT", "value": "29500"}]}
    path = job_file("", "torchrun", "--max-restarts=3", "train.py", nodes=2, container=env)
    said = ran(path).stdout
    document = yamlfile.read_job(path, None)
    job, _ = validation.parse(document.data)
    events = "".join(event.message for event in finish._advisories(job))
    for rule in ("rendezvous-overridden", "launcher-option"):
        (line,) = [line for line in said.splitlines() if f"warning[{rule}]: " in line]
        assert line.partition("]: ")[2] in events
    assert check_files.before_run(document, job) == ([], False)


SLURM = """
import os, torch.distributed as dist
dist.init_process_group("gloo", rank=int(os.environ["SLURM_PROCID"]), world_size=int(os.environ["SLURM_NTASKS"]))
"""
OF_POD = "env: [{name: SLURM_PROCID, value: $(RANK)}, {name: SLURM_NTASKS, value: $(WORLD_SIZE)}]"
OF_RANK = '--no-python, sh, -c, "SLURM_PROCID=$RANK SLURM_NTASKS=$WORLD_SIZE exec python train.py --lr 1"]'


@pytest.mark.parametrize(
    ("launcher", "nproc", "recipe"),
    [
        ("python", 1, f'with the script unchanged: {OF_POD}; or in the script: os.environ["RANK"]'),
        ("torchrun", 2, f"with the script unchanged: command: [torchrun, {OF_RANK}; or"),
        ("ddprun", 2, f"with the script unchanged: command: [ddprun, {OF_RANK}; or"),
        ("torchrun", 1, f"with the script unchanged: command: [torchrun, {OF_RANK}; or"),
        ("python", 2, f"with the script unchanged: command: [torchrun, {OF_RANK}; or"),
    ],
)
def test_a_variable_of_slurm_is_an_error_that_says_how_to_set_it(job_file, launcher, nproc, recipe):
    """A variable of Slurm must be an error that names the fix, because the script would end with a KeyError."""
    said = ran(job_file(SLURM, launcher, "train.py", "--lr", "1", nodes=2, nprocPerNode=nproc)).stdout
    assert "error[variable-of-other-launcher]" in said
    assert recipe in said


def test_a_variable_of_slurm_that_is_made_a_number_without_a_default_is_an_error(job_file) -> None:
    said = ran(job_file(SLURM.replace('environ["SLURM_PROCID"]', 'getenv("SLURM_PROCID")'), *PYTHON, nodes=2)).stdout
    assert "error[variable-of-other-launcher]: os.getenv('SLURM_PROCID'): nothing sets it here, so this is a T" in said


WITH_ENV = {"env": [{"name": n, "value": f"$({v})"} for n, v in (("SLURM_PROCID", "RANK"), ("SLURM_NTASKS", "NNODES"))]}
OTHERWISE = [
    (SLURM, ["python", "train.py"], WITH_ENV),
    (SLURM, ["python", "train.py"], {"envFrom": [{"configMapRef": {"name": "x"}}]}),
    (SLURM, ["sh", "-c", ". ./slurm.sh; exec python train.py"], {}),
    (SLURM, ["env", "SLURM_PROCID=$(RANK)", "SLURM_NTASKS=2", "python", "train.py"], {}),
    (SLURM, ["torchrun", "--no-python", "sh", "-c", "SLURM_PROCID=$RANK SLURM_NTASKS=2 exec python train.py"], {}),
    (SLURM, ["srun", "python", "train.py"], {}),
    (
        SLURM.replace("dist.init", "if 'SLURM_PROCID' in os.environ and 'SLURM_NTASKS' in os.environ: dist.init"),
        PYTHON,
        {},
    ),
    (SLURM.replace("dist.init", "if args.slurm: dist.init"), PYTHON, {}),
    (SLURM.replace("dist.init", "def slurm(): dist.init"), PYTHON, {}),
    (SLURM.replace("dist.init", "try: dist.init") + "except KeyError: pass\n", PYTHON, {}),
    (
        SLURM.replace('environ["SLURM_PROCID"]', 'environ.get("SLURM_PROCID", 0)').replace("NTASKS", "JOB_ID"),
        PYTHON,
        {},
    ),
    (SLURM.replace("dist.init", "os.environ.update(SLURM_PROCID='0', SLURM_NTASKS='1'); dist.init"), PYTHON, {}),
]


@pytest.mark.parametrize(("script", "command", "container"), OTHERWISE)
def test_a_variable_of_slurm_that_may_be_set_or_is_optional_is_left_alone(job_file, script, command, container):
    assert "variable-of-other-launcher" not in ran(job_file(script, *command, nodes=2, container=container)).stdout


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        (["torchrun"], True),
        (["torchrun", "--max-restarts=0"], True),
        (["python", "-m", "torch.distributed.run"], True),
        (["ddprun"], True),
        (["torchrun", "train.py"], False),
        (["torchrun", "-m", "train"], False),
        (["torchrun", "--help"], False),
        (["sh", "-c", "torchrun $ARGS"], False),
        (["bash", "-c", "torchrun", "train.py"], True),
        (["sh", "-c", "python3", "train.py"], True),  # reads stdin, which is empty, and ends with 0
        (["sh", "-c", 'torchrun "$0"', "train.py"], False),
        (["python"], False),
    ],
)
def test_a_launcher_without_a_script_is_an_error(job_file, command: list[str], missing: bool) -> None:
    """torchrun without a script must be an error, because it only prints its usage and exits."""
    assert ("error[script-missing]" in ran(job_file("", *command)).stdout) == missing


def test_the_error_about_a_missing_launcher_quotes_the_script_with_its_arguments(job_file, tmp_path: Path) -> None:
    """The advice must have the script and its arguments, because a fixed command is wrong for most scripts."""
    (tmp_path / "bert.py").write_text("import torch.distributed as dist\ndist.init_process_group('gloo')\n")
    said = ran(job_file("", "python", "bert.py", "--lr", "1", "a: b", nprocPerNode=2)).stdout
    assert 'start it with torchrun: command: [torchrun, bert.py, --lr, "1", "a: b"]' in said


WORLD = """
import os, torch.distributed as dist
dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=N)
"""


@pytest.mark.parametrize(
    ("number", "nodes", "nproc", "launcher", "found"),
    [
        ("8", 2, 2, "torchrun", True),
        ("2", 2, 2, "ddprun", True),
        ("8", 2, 1, "", True),
        ("4", 2, 2, "torchrun", False),
        ("8", 2, None, "torchrun", False),
        ("8", None, 2, "torchrun", False),
        ("8", 2, 2, "mpirun", False),
        ("-1", 2, 2, "torchrun", False),
        ("int(os.environ['WORLD_SIZE'])", 2, 2, "torchrun", False),
        ("int(os.environ.get('WORLD_SIZE', 8))", 2, 2, "torchrun", False),
    ],
)
def test_a_world_size_that_differs_from_that_of_the_job_is_found_if_both_are_known(
    number: str, nodes: int | None, nproc: int | None, launcher: str, found: bool
) -> None:
    """A world size other than the job's must be found: the group would wait 30 minutes for ranks that nobody starts."""
    job = CheckedJob(nodes=nodes, nproc=nproc, launcher=launcher)
    findings = check.check("t.py", WORLD.replace("N)", f"{number})"), job)
    assert [(f.rule, f.severity) for f in findings] == ([("world-size-differs", "error")] if found else [])


BY_OPTION = (FIXTURES / "mistakes/group-needs-option.py").read_text()


@pytest.mark.parametrize(
    ("right", "wrong", "words", "found"),
    [
        ("", "", "", True),
        ("", "", "--launcher none", True),
        ("", "", "--launcher pytorch", False),
        ("", "", "--launcher=pytorch", False),
        ("", "", "cfg.py --launch pytorch", False),
        ('default="none"', 'default="pytorch"', "", False),
        ('args.launcher != "none"', 'args.launcher != "none" or "RANK" in os.environ', "", False),
        ("    dist.init_process_group", "    pass\nelse:\n    dist.init_process_group", "", False),
        ('dist.init_process_group("gloo")', "setup_distributed(args)", "", True),
        ("args = ", 'parser.add_argument("--ddp", action="store_true")\nargs = ', "--ddp", True),
        ("if args.launcher", "args.launcher = guess()\nif args.launcher", "", False),
        ("if args.launcher", 'if args.launcher == "none":\n    raise ValueError\nif args.launcher', "", False),
    ],
)
def test_a_group_that_needs_an_option_is_found_if_the_option_is_missing(right, wrong, words, found):
    """A missing option (such as `--ddp`) that forms the group must be found: each rank would train its own model."""
    text = BY_OPTION.replace(right, wrong) if right else BY_OPTION
    job = CheckedJob(nodes=2, nproc=1, launcher="torchrun", words=tuple(words.split()))
    assert ("group-needs-option" in rules_in(text, job)) == found
    flag = text.replace(
        '"--launcher", choices=["none", "pytorch"], default="none"', '"--launcher", action="store_true"'
    )
    if not right and not words:
        flag = flag.replace('args.launcher != "none"', "args.launcher")
        assert "group-needs-option" in rules_in(flag, job)
        given = dataclasses.replace(job, words=("--launcher",))
        assert "group-needs-option" not in rules_in(flag, given)
    assert "group-needs-option" not in rules_in(text, dataclasses.replace(job, nodes=1))


CLICK = """import click
import torch.distributed as dist
@click.command()
@click.option("--launcher", "-l", default="none")
@click.option("--ddp/--no-ddp", default=DDP)
def main(launcher, ddp):
    if launcher != "none" or ddp:
        dist.init_process_group("gloo")
main()
"""
TYPER = """import typer
import torch.distributed as dist
def main(launcher: str = "none", use_ddp: bool = False):
    if launcher != "none" or use_ddp:
        dist.init_process_group("gloo")
typer.run(main)
"""
ANNOTATED = """import typer
from typing import Annotated
import torch.distributed as dist
app = typer.Typer()
def setup(name):
    if name == "pytorch":
        dist.init_process_group("gloo")
@app.command()
def main(launcher: Annotated[str, typer.Option("--by", "-b")] = "none"):
    setup(launcher)
app()
"""
ABSL = """from absl import app, flags
import torch.distributed as dist
FLAGS = flags.FLAGS
flags.DEFINE_string("launcher", "none", "who starts it")
flags.DEFINE_bool("ddp", False, "")
def main(_):
    if FLAGS.ddp or FLAGS.launcher == "pytorch":
        dist.init_process_group("gloo")
app.run(main)
"""
FIRE = TYPER.replace("typer.run", "fire.Fire").replace("typer", "fire")


@pytest.mark.parametrize(
    ("text", "words", "found"),
    [
        (CLICK.replace("DDP", "False"), "", True),
        (CLICK.replace("DDP", "False"), "-l pytorch", False),
        (CLICK.replace("DDP", "False"), "--ddp", False),
        (CLICK.replace("DDP", "True"), "", False),
        (CLICK.replace("DDP", "False, envvar='DDP'"), "", False),
        (CLICK.replace("DDP", "False").replace("main()", "main(auto_envvar_prefix='X')"), "", False),
        (TYPER, "", True),
        (TYPER, "--launcher=pytorch", False),
        (TYPER, "--use-ddp", False),
        (TYPER.replace("= False", "= typer.Option(False, '--ddp')"), "", True),
        (TYPER.replace("= False", "= typer.Option(False, '--ddp')"), "--ddp", False),
        (ANNOTATED, "", True),
        (ANNOTATED, "-b pytorch", False),
        (ABSL, "", True),
        (ABSL, "--launcher=pytorch", False),
        (ABSL, "-launcher pytorch", False),
        (ABSL, "--ddp", False),
        (ABSL, "--noddp", True),
        (FIRE, "", True),
        (FIRE, "--lr 0.1 --launcher none", True),
        (FIRE, "--launcher pytorch", False),
        (FIRE, "--use_ddp", False),
        (FIRE, "pytorch", False),
    ],
)
def test_options_of_click_typer_absl_and_fire_count_like_those_of_argparse(text: str, words: str, found: bool) -> None:
    """Options of click, typer, absl and fire must be read, too. Otherwise ranks that train alone are missed."""
    job = CheckedJob(nodes=2, nproc=1, launcher="torchrun", words=tuple(words.split()))
    assert ("group-needs-option" in rules_in(text, job)) == found


@pytest.mark.parametrize(
    ("options", "default", "said"),
    [
        ('"--local-rank", "--local_rank", type=int', "", "set_device(None) raises an error"),
        ('"--local_rank", type=int', ", default=-1", "all 2 ranks of a node use its first GPU"),
        ('"--local-rank", type=int', ", default=0", "all 2 ranks of a node use its first GPU"),
    ],
)
def test_the_local_rank_option_is_found_in_all_documented_spellings(job_file, options, default, said):
    """An option --local-rank without a default must be found (torchrun's documentation): set_device(None) raises."""
    text = FIRST_GPU.replace('"--local_rank", type=int, default=0', options + default)
    container = {"resources": {"limits": {"nvidia.com/gpu": 2}}}
    stdout = ran(job_file(text, "torchrun", "train.py", nodes=2, nprocPerNode=2, container=container)).stdout
    assert "error[local-rank-not-passed]" in stdout
    assert said in stdout


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="this Python reads it")
@pytest.mark.parametrize("line", ["def f[T](x: T) -> T: ...", "type X = int", "x = f'{d['a']}'"])
def test_the_syntax_of_a_newer_python_is_a_warning(tmp_path: Path, line: str) -> None:
    """Newer syntax must be a warning, not an error, because the image may have a newer Python than this machine."""
    (tmp_path / "train.py").write_text(f"{line}\n")
    result = ran(tmp_path / "train.py")
    assert (result.return_value, "warning[syntax]: not valid Python 3" in result.stdout) == (0, True)


# ---------------------------------------------------------------- what is left alone


@pytest.mark.parametrize("path", CLEAN, ids=lambda p: p.stem)
def test_a_script_in_the_style_of_the_official_tutorials_is_left_alone(path: Path) -> None:
    text = path.read_text()
    assert found(text) == []
    if "# several nodes" in text:
        assert found(text, TWO_NODES) == []


def test_at_most_one_of_thirty_healthy_scripts_gets_a_false_warning() -> None:
    """At most one of thirty correct scripts may get a warning: users switch off a checker with many false warnings."""
    assert len(HEALTHY) >= 30
    false_alarms = [
        str(finding)
        for path in HEALTHY
        for job in (CheckedJob(), dataclasses.replace(context_of(path.read_text()), known=True))
        for finding in check.check(path.name, path.read_text(), job)
    ]
    assert len({alarm.split(":")[0] for alarm in false_alarms}) <= 1, "\n".join(false_alarms)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_our_own_examples_have_no_finding_and_support_a_changing_number_of_ranks(path: Path) -> None:
    jobs = (
        (CheckedJob(), ELASTIC) if path.parent.name == "examples" else (CheckedJob(),)
    )  # the scripts in clean/ show other ways to start, and need not be elastic
    assert [str(f) for job in jobs for f in check.check(path.name, path.read_text(), job)] == []


@pytest.mark.parametrize("path", JOBS, ids=lambda p: p.stem)
def test_our_own_jobs_have_no_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our example jobs may have warnings but no errors. Some show old ways to start on purpose."""
    monkeypatch.chdir(ROOT)
    report = check_files.check_all([str(path)], {str(path): sources.load(sources.Source(str(path)))})
    assert [str(f) for f in report.findings if f.severity == "error"] == []


@pytest.mark.parametrize(
    ("lines", "rules"),
    [
        ("subprocess.call(['torchrun', 'train.py'])", "launcher-failure-ignored"),
        ("os.system('cd src && torchrun train.py')", "launcher-failure-ignored"),
        ("os.system(f'python train.py --lr {lr}')", "launcher-failure-ignored"),
        ("subprocess.run('ddprun train.py', shell=True)", "launcher-failure-ignored"),
        ("p = subprocess.Popen(['torchrun', 'train.py'])\np.wait()", "launcher-failure-ignored"),
        ("done = subprocess.run(['torchrun', 'train.py'], stdout=log)\nprint(done.stdout)", "launcher-failure-ignored"),
        ("print(subprocess.getoutput('torchrun train.py'))", "launcher-failure-ignored"),
        ("p = subprocess.Popen(['torchrun', 'train.py'])\nprint('started')", "launcher-failure-ignored"),
        ("subprocess.check_call('torchrun --standalone train.py', shell=True)", "launcher-for-one-node"),
        ("subprocess.check_call(['torchrun', 'train.py'])", ""),
        ("subprocess.run(['torchrun', 'train.py'], check=True)", ""),
        ("subprocess.run(['torchrun', 'train.py'], **options)", ""),
        ("sys.exit(subprocess.call(['torchrun', 'train.py']))", ""),
        ("code = os.system('torchrun train.py')\nassert code == 0", ""),
        ("p = subprocess.Popen(['torchrun', 'train.py'])\nsys.exit(p.wait())", ""),
        ("p = subprocess.Popen(['torchrun', 'train.py'])\np.wait()\nsys.exit(p.returncode)", ""),
        ("subprocess.run(['python', 'prepare.py'])\nloss.backward()", ""),
        ("subprocess.run(['nvidia-smi'])\nos.system('mkdir -p out')", ""),
        ("os.system('torchrun --standalone --nnodes=1 prepare.py') and sys.exit(1)", ""),
    ],
)
def test_a_program_that_starts_the_launcher_must_look_at_its_exit_code(lines: str, rules: str) -> None:
    """A program must be reported if it ignores its launcher's exit code: a failed training would count as done."""
    job = CheckedJob(nodes=2, nproc=2, known=True, launcher="python")
    assert [f.rule for f in check.check("run.py", f"import os, subprocess, sys\n{lines}", job)] == rules.split()


# ---------------------------------------------------------------- suppression


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        ("", "  # ddpjob: ignore[backend-mpi]", False),
        ("", "  # ddpjob:ignore[other, backend-mpi]", False),
        ("# ddpjob: ignore[backend-mpi]\n", "", False),
        ("# ddpjob: ignore[other]\n", "", True),
        ("x = 1  # ddpjob: ignore[backend-mpi]\n", "", True),
        ("", "  # ddpjob: ignore", True),
    ],
)
def test_a_comment_suppresses_a_finding_on_its_line_or_alone_on_the_line_above(before, after, kept):
    text = (
        f"import torch.distributed as dist\n{before}dist.init_process_group('mpi'){after}\ndist.destroy_process_group()"
    )
    assert rules_in(text) == ({"backend-mpi"} if kept else set())


# ---------------------------------------------------------------- any input


@given(st.text())
def test_any_text_gives_findings_and_never_a_traceback(text: str) -> None:
    assert all(isinstance(f, Finding) for f in check.check("t.py", text))


@given(st.sampled_from([*CLEAN, *MISTAKES, *HEALTHY]), st.data())
def test_a_script_with_lines_lost_or_moved_gives_no_traceback(path: Path, data: st.DataObject) -> None:
    lines = path.read_text().splitlines()
    a, b = (data.draw(st.integers(0, len(lines))) for _ in range(2))
    broken = [lines[:a] + lines[b:], lines[a:] + lines[:a]][data.draw(st.integers(0, 1))]
    for job in (CheckedJob(), TWO_NODES, ELASTIC):
        check.check("t.py", "\n".join(broken), job)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ndef f(:\n", "not valid Python"),
        ("a\0b", "not valid Python"),
        ("(" * 5000, "not valid Python"),
        ("x = " + "-" * 100_000 + "1", "nested too deeply"),
    ],
)
def test_a_script_that_does_not_parse_is_a_finding(text: str, message: str) -> None:
    (finding,) = check.check("t.py", text)
    assert (finding.rule, finding.severity) == ("syntax", "error")
    assert message in finding.message


@pytest.mark.parametrize(
    "lines",
    [
        "def f(): return f()\nr = f()[0]\ndist.init_process_group(rank=r)",
        "def f(): return f(), f()\na, b = f()\ndist.init_process_group(rank=a)",
        "ps = list(ps)\nfor p in ps:\n    if type(p) is torch.Tensor: dist.all_reduce(p.grad)",
        "n = n + rank\nfor i in range(n): dist.all_reduce(t)",
        "n = {0: n}[rank]\nwhile i < n: dist.all_reduce(t)",
        "e = dict(e)\nm.to(int(e['RANK']))",
        "c = C(rank=c.rank)\nm.to(c.rank)",
        "a = b\nb = a\ndef g(x): g(x)\ndist.init_process_group(rank=a)\ng(a)\nm.to(a)",
    ],
)
def test_resolving_values_defined_by_themselves_ends(lines: str) -> None:
    """The search for a value must end. Otherwise a healthy script would get the error "nested too deeply"."""
    assert "syntax" not in rules_in(HEAD + "class C:\n    rank: int\n" + lines, TWO_NODES)


def test_a_file_without_torch_has_no_partitioner() -> None:
    text = "import random\ndef partition(graph, n):\n    return random.sample(list(graph), n)\n"
    assert rules_in(text) == set()
    assert rules_in("import torch\n" + text) == {"partitioner-unseeded"}


def test_values_defined_by_each_other_a_hundred_times_are_read_at_once() -> None:
    began = time.process_time()
    mixed = "".join(f"v{i % 7} = v{(i + 1) % 7} + v{(i + 2) % 7} * (v{(i + 3) % 7} - w % v0)\n" for i in range(200))
    use = "dist.init_process_group('nccl', rank=v1)\nif v0 > 3:\n    torch.save(1, v2)\n    m.to(v2 % v3)\n"
    calls = "".join(
        f"def f{i}(a):\n    f{(i + 1) % 99}(a)\n    f{(i + 2) % 99}(a)\n    torch.load(a)\n" for i in range(99)
    )
    check.check("t.py", HEAD + mixed + use + calls, TWO_NODES)
    returns = "".join(
        f"def g{i}(a):\n    if a: return g{(i + 1) % 9}(a)\n    if a > 1: return g{(i + 2) % 9}(a)\n"
        f"    return g{i}(a)\n"
        for i in range(9)
    )
    check.check(
        "t.py", HEAD + returns + "x, y = g0(1)\nm.to(x)\nfor i in range(y):\n    dist.all_reduce(t)\n", TWO_NODES
    )
    assert time.process_time() - began < 20


# ---------------------------------------------------------------- the command


def ran(*words: object) -> Result:
    return CliRunner().invoke(main.cli, ["check", *map(str, words)], standalone_mode=False)


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that writes train.py and a job that runs it into the working folder."""
    monkeypatch.chdir(tmp_path)

    def write(script: str, *command: str, name: str = "job.yaml", **spec: Any) -> str:
        (tmp_path / "train.py").write_text(script)
        body = manifest(
            container={"command": list(command or ("torchrun", "train.py")), **spec.pop("container", {})}, **spec
        )
        (tmp_path / name).write_text(yaml.safe_dump(body))
        return name

    return write


@pytest.mark.parametrize(
    ("fixture", "options", "code"),
    [
        ("clean/multinode", [], 0),
        ("mistakes/destroy-missing", [], 0),
        ("mistakes/backend-mpi", [], 1),
        ("mistakes/rank-is-local-rank", [], 0),
        ("mistakes/rank-is-local-rank", ["--nodes", "2"], 1),
        ("mistakes/rank-is-local-rank", ["--nodes", "1"], 0),
    ],
)
def test_the_exit_code_is_1_for_errors_and_0_for_warnings(fixture: str, options: list[str], code: int) -> None:
    assert ran(FIXTURES / f"{fixture}.py", *options).return_value == code


def test_an_input_that_is_not_python_exits_with_2_and_its_line(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import os\nif rank = 0:\n")
    result = ran(path)
    assert result.return_value == 2
    assert f"{path}:2: error[syntax]: not valid Python: " in result.stdout


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"# coding: rot13\n", b"# coding: hex\n", b"# coding: no-such\n"])
def test_bytes_that_are_not_text_exit_with_2(tmp_path: Path, content: bytes) -> None:
    """For a file that cannot be checked, users must see one sentence, not a traceback."""
    (tmp_path / "train.py").write_bytes(content)
    assert ran(tmp_path / "train.py").return_value == 2


def test_a_script_with_an_impossible_file_name_is_not_on_this_machine(job_file) -> None:
    """A script name that no file can have must give an error in one sentence, not a traceback."""
    result = ran(job_file("", "python", "x" * 5000 + ".py"))
    assert "is not on this machine" in result.stderr


@pytest.mark.parametrize("name", ["nowhere.py", "nowhere.yaml"])
def test_a_missing_file_is_wrong_input(tmp_path: Path, name: str) -> None:
    with pytest.raises(yamlfile.InputError, match=f"{name}: No such file"):
        raise ran(tmp_path / name).exception or AssertionError("nothing was raised")


def test_findings_are_on_stdout_and_the_summary_is_on_stderr() -> None:
    result = ran(FIXTURES / "mistakes/backend-mpi.py", FIXTURES / "clean/multinode.py")
    assert result.stdout.count("\n") == 1
    assert result.stderr == "2 files read: 1 error\n"


def test_json_is_one_document_with_stable_names() -> None:
    result = ran(FIXTURES / "mistakes/backend-mpi.py", FIXTURES / "mistakes/destroy-missing.py", "--format", "json")
    document = json.loads(result.stdout)
    assert {key: document[key] for key in ("errors", "warnings")} == {"errors": 1, "warnings": 1}
    first = document["findings"][0]
    assert list(first) == ["file", "line", "column", "rule", "severity", "message"]
    assert (first["line"], first["column"], first["rule"], first["severity"]) == (3, 25, "backend-mpi", "error")


def test_a_job_is_checked_together_with_the_script_that_it_runs(job_file) -> None:
    script = (FIXTURES / "mistakes/rank-is-local-rank.py").read_text()
    gpu = {"resources": {"limits": {"nvidia.com/gpu": 4}}}
    assert "train.py:13: error[rank-is-local-rank]" in ran(job_file(script, nodes=2, container=gpu)).stdout
    assert ran(job_file(script, nodes=1, container=gpu)).return_value == 0
    assert ran(job_file(script, nodes=1, container=gpu), "--nodes", "2").return_value == 1


def test_gpus_and_launcher_of_a_job_are_known(job_file) -> None:
    script = 'import torch.distributed as dist\ndist.init_process_group("nccl")\ndist.destroy_process_group()\n'
    assert "train.py:2: error[nccl-without-gpu]" in ran(job_file(script)).stdout
    gpu = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
    assert ran(job_file(script, container=gpu)).stdout == ""
    tcp = (FIXTURES / "mistakes/tcp-under-torchrun.py").read_text()
    assert "error[tcp-under-torchrun]" in ran(job_file(tcp)).stdout
    assert ran(job_file(tcp, "python", "train.py")).stdout == ""


def test_findings_about_the_yaml_itself_have_its_line_and_can_be_suppressed(job_file) -> None:
    path = job_file("", "python", "-m", "torch.distributed.launch", "train.py", backend="nccl")
    text = Path(path).read_text()
    lines = {line.split(":")[0].strip(): i for i, line in enumerate(text.splitlines(), start=1)}
    out = ran(path).stdout
    assert f"{path}:{lines['backend']}: error[nccl-without-gpu]" in out
    assert f"{path}:{lines['- command']}: warning[launch-deprecated]" in out
    Path(path).write_text(text.replace("backend: nccl", "backend: nccl  # ddpjob: ignore[nccl-without-gpu]"))
    assert "nccl-without-gpu" not in ran(path).stdout


def test_volumes_and_claims_of_a_job_are_known() -> None:
    """The check must know which volumes are shared: a claim is, an emptyDir is not. A resource claim may be a GPU."""
    mounts = [{"name": name, "mountPath": f"/{name}"} for name in ("own", "claim", "host", "typo")]
    body = manifest(container={"volumeMounts": mounts})
    body["spec"]["template"]["spec"]["volumes"] = [
        {"name": "own", "emptyDir": {}},
        {"name": "claim", "persistentVolumeClaim": {"claimName": "c"}},
        {"name": "host", "hostPath": {"path": "/mnt/nfs"}},
    ]
    context = known(validation.parse(body)[0])
    assert context.mounts == {"/own": False, "/claim": True, "/host": True, "/typo": False}
    assert context.gpus == 0
    claims = manifest(container={"resources": {"claims": [{"name": "gpu"}]}})
    assert known(validation.parse(claims)[0]).gpus is None


@pytest.mark.parametrize(
    ("command", "script"),
    [
        (["sh", "-c", "cd /x; export A=1 && A=1 exec torchrun --nproc-per-node 2 train.py --x"], "train.py"),
        (["bash", "-c", "python -u train.py"], "train.py"),
        (["bash", "-c", "torchrun --nproc-per-node=$(nvidia-smi -L | wc -l) train.py"], "train.py"),
        (
            ["bash", "-c", 'N="$(hostname -s)"; echo "$(date) a"; torchrun --role="$(hostname -s) b" train.py'],
            "train.py",
        ),
        (["bash", "-c", "python -m pip install datasets && python train.py"], "train.py"),
        (["bash", "-c", "python train.py && python evaluate.py"], "train.py"),
        (
            ["bash", "-c", "if true; then torchrun \\\n  --nproc-per-node 2 \\\n  train.py \\\n  --lr 1\nfi\n"],
            "train.py",
        ),
        (["bash", "-c", "# NCCL_DEBUG=INFO \\\ntorchrun train.py"], "train.py"),  # a comment ends at its line
        (["bash", "-c", "R=${HOSTNAME##*-} torchrun --nproc-per-node 2 train.py"], "train.py"),  # no comment
        (["python", "/opt/torch/distributed/launch.py", "--nproc_per_node=2", "train.py"], "train.py"),
        (["sh", "-c", "echo 'unclosed"], None),
        (["sh", "-c"], None),
        ([], None),
    ],
)
def test_the_script_is_found_in_a_shell_and_after_a_launcher_with_a_path(command, script):
    assert read(command).script == script


@pytest.mark.parametrize(
    ("line", "launcher", "files", "words"),
    [
        ("fabric run --strategy ddp --devices 2 train.py --lr 0.1", "fabric", ["train.py"], "--lr 0.1"),
        ("fabric run model --accelerator=cpu src/train.py", "fabric", ["src/train.py"], ""),
        ("lightning run model --devices=2 train.py", "lightning", ["train.py"], ""),
        ("accelerate launch --config_file a.yaml --num_processes 4 train.py --x", "accelerate", ["train.py"], "--x"),
        ("accelerate launch -m pkg.train --x", "accelerate", ["pkg/train.py", "pkg/train/__main__.py"], "--x"),
        ("python -m accelerate.commands.launch --multi_gpu train.py", "accelerate", ["train.py"], ""),
        ("python -m lightning.fabric.cli run --devices 2 train.py", "fabric", ["train.py"], ""),
        ("deepspeed --num_gpus 2 train.py --deepspeed ds.json", "deepspeed", ["train.py"], "--deepspeed ds.json"),
        ("python -m deepspeed.launcher.runner train.py", "deepspeed", ["train.py"], ""),
        ("composer -n 8 train.py yaml=a.yaml", "composer", ["train.py"], "yaml=a.yaml"),
        ("colossalai run --nproc_per_node 4 --hostfile h train.py", "colossalai", ["train.py"], ""),
        ("mpirun -np 4 -x PATH python -u train.py --x", "mpirun", ["train.py"], "--x"),
        ("horovodrun -np 2 python train.py", "horovodrun", ["train.py"], ""),
        ("srun --ntasks=2 torchrun --nproc-per-node 2 train.py", "torchrun", ["train.py"], ""),
        ("ray job submit -- python train.py", "ray", ["train.py"], ""),
        ("tune run --nproc_per_node 2 full_finetune_distributed --config c", "tune", [], ""),
        ("uv run --with torch train.py", "python", ["train.py"], ""),
        ("uv run torchrun train.py", "torchrun", ["train.py"], ""),
        ("poetry run python train.py", "python", ["train.py"], ""),
        ("conda run -n env --no-capture-output python train.py", "python", ["train.py"], ""),
        ("tini -- python train.py", "python", ["train.py"], ""),
        ("numactl --cpunodebind=0 torchrun train.py", "torchrun", ["train.py"], ""),
        ("env OMP_NUM_THREADS=1 python train.py", "python", ["train.py"], ""),
        ("python -m cProfile -o out train.py", "python", ["train.py"], ""),
        ("python -m debugpy --listen 5678 train.py --x", "python", ["train.py"], "--x"),
        ("python -m pkg.train --x", "python", ["pkg/train.py", "pkg/train/__main__.py"], "--x"),
        ("python3.11 -X dev -u train.py", "python", ["train.py"], ""),
        ("python -m torch.distributed.run -m pkg", "torch.distributed.run", ["pkg.py", "pkg/__main__.py"], ""),
        ("torchrun --no-python python train.py", "torchrun", ["train.py"], ""),
        ("python -m ddprun train.py", "ddprun", ["train.py"], ""),
        ("./train.py --x", "python", ["./train.py"], "--x"),
        ("python -c pass", "python", [], ""),
        ("/entrypoint train", "", [], ""),
    ],
)
def test_the_script_is_found_after_the_launchers_of_frameworks(line, launcher, files, words):
    """The script must be found after `accelerate launch` and others. Otherwise only the YAML would be checked, and
    "nothing found" would mislead."""
    found = read(line.split())
    assert (found.launcher, found.files, list(found.words)) == (launcher, files, words.split())
    assert read(["bash", "-lc", f"set -e; cd /app && {line}"]).files == files


@pytest.mark.parametrize(
    "before",
    [
        "python -m pip install -r requirements.txt",
        "python3 -m ensurepip || apt-get install python3-pip",
        "python prepare.py --out /data",
        "python -m data.download",
    ],
)
def test_commands_of_a_shell_before_the_launcher_are_not_the_training(before: str) -> None:
    """The script of a step that installs packages must not be checked instead of the training script."""
    assert read(["bash", "-c", f"{before} && torchrun --nproc-per-node 2 train.py --x"]).script == "train.py"


@pytest.mark.parametrize(
    "before",
    [
        "accelerate config default",
        "ray start --head",
        "ray job list",
        "python -m accelerate config",
        "torchrun --version",
        "python -m torch.distributed.run --help",
        "deepspeed --help",
        "mpirun -V",
        "tune download meta-llama/Llama-3.2-1B",
    ],
)
def test_a_launcher_command_that_starts_no_ranks_is_not_the_training(before: str) -> None:
    """A launcher command that starts no ranks must be skipped. Otherwise train.py would not be checked."""
    for end in (" &&", ";"):
        words = ["bash", "-c", f"{before}{end} python train.py"]
        found = read(words)
        assert (found.launcher, found.script, by_torchrun(words)) == ("python", "train.py", None)


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["/entrypoint.sh", "torchrun", "--nnodes", "2", "t.py"], {"nnodes": "2"}),
        (["env", "A=b", "bash", "-lc", "set -e; exec torchrun --nnodes=2 t.py"], {"nnodes": "2"}),
        (["sh", "-c", "bash -c 'ddprun --nnodes 2 t.py'"], {"nnodes": "2"}),
        (
            ["python", "-m", "debugpy", "--listen", "5678", "-m", "torch.distributed.run", "--nnodes=2", "t.py"],
            {"nnodes": "2"},
        ),
        (["sh", "-c", "which torchrun; python t.py"], None),
        (["sh", "-c", "echo Starting torchrun t.py; python t.py"], None),
        (["python", "t.py", "--launcher", "torchrun"], None),
        (["sh", "-c", "pip list | grep torchrun"], None),
    ],
)
def test_all_readers_recognize_the_same_launcher(words: list[str], options: dict[str, str] | None) -> None:
    """All code that searches for a launcher must find the same one. In `which torchrun; python t.py` it is python."""
    found = by_torchrun(words)
    assert (found and found.options) == options
    assert found is None or found.script == "t.py"


def test_the_name_of_an_environment_is_not_a_launcher() -> None:
    found = read("conda run -n ray python train.py -p torchrun".split())
    assert (found.launcher, found.script, found.words) == ("python", "train.py", ("-p", "torchrun"))
    assert read("uv run -n torchrun train.py".split()).launcher == "torchrun"
    assert read("viztracer -u train.py".split()).script == "train.py"


@given(
    st.lists(st.sampled_from(["python", "-m", "torchrun", "accelerate", "launch", "bash", "-c", "a.py", "--x", "''"]))
)
def test_any_command_is_read_without_a_traceback(words: list[str]) -> None:
    assert len(read(words).files) <= 2


def test_a_command_without_a_script_is_reported_with_its_launcher(job_file) -> None:
    result = ran(job_file("", "tune", "run", "--nproc_per_node", "2", "full_finetune_distributed"))
    assert "no script was found in the command that starts tune" in result.stderr


def test_a_module_is_searched_as_its_file(job_file, tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/train.py").write_text((FIXTURES / "mistakes/rank-is-local-rank.py").read_text())
    assert "pkg/train.py:13: error[rank-is-local-rank]" in ran(job_file("", "torchrun", "-m", "pkg.train")).stdout
    assert "the module pkg.other is not on this machine" in ran(job_file("", "torchrun", "-m", "pkg.other")).stderr


@pytest.mark.parametrize(
    ("option", "errors"),
    [
        (["--backend=gloo"], 0),
        (["--dist-backend=GLOO"], 0),
        (["backend=gloo"], 0),
        (["+trainer.backend=gloo"], 0),
        (["ddp_backend:gloo"], 0),
        (["--backend", "nccl", "--lr=1"], 1),
        (["--backends"], 1),
    ],
)
def test_a_backend_in_the_command_overrides_that_of_the_script(job_file, option: list[str], errors: int) -> None:
    """--backend=gloo in the command overrides the script's default, so this default must cause no error."""
    script = 'import torch.distributed as dist\ndist.init_process_group("nccl")\ndist.destroy_process_group()\n'
    assert ran(job_file(script, "torchrun", "train.py", *option)).return_value == errors


def test_a_missing_script_is_reported_and_may_be_passed_next_to_the_job(job_file, tmp_path: Path) -> None:
    script = (FIXTURES / "mistakes/rank-is-local-rank.py").read_text()
    path = job_file(script, "torchrun", "/app/other.py")
    result = ran(path)
    assert result.return_value == 0
    assert "/app/other.py is not on this machine, so only the job was checked" in result.stderr
    assert ran(path, "train.py").return_value == 1


@pytest.mark.parametrize(
    ("command", "meant"), [(["torchrun", "trian.py"], "train.py"), (["torchrunn", "train.py"], "torchrun")]
)
def test_a_typo_in_the_command_is_named(job_file, command: list[str], meant: str) -> None:
    """A wrong name in the command gets a warning. It is no error, because the image may have a file of this name."""
    result = ran(job_file("print()", *command))
    assert (result.return_value, result.stderr.count(f"; did you mean {meant}?, so only the job was checked")) == (0, 1)


def test_a_job_that_cannot_run_is_wrong_input(job_file) -> None:
    result = ran(job_file("", nodes=0))
    assert isinstance(result.exception, yamlfile.InputError)
    assert "spec.nodes: must be at least 1, is 0" in str(result.exception)


@pytest.mark.parametrize("command", ["train.py", "/app/train.py"])
def test_a_script_beside_a_job_is_the_jobs_only_if_its_command_names_it(job_file, tmp_path: Path, command: str) -> None:
    gpu = {"resources": {"limits": {"nvidia.com/gpu": 4}}}
    path = job_file("", "torchrun", command, nodes=2, container=gpu)
    (tmp_path / "utils.py").write_text((FIXTURES / "mistakes/rank-is-local-rank.py").read_text())
    for scripts in (("train.py", "utils.py"), ("utils.py", "train.py")):
        result = ran(path, *scripts)
        assert result.stdout.startswith("utils.py:13: warning[rank-is-local-rank]")
        assert result.stderr == "3 files read: 1 warning\n"


@pytest.mark.parametrize(
    ("command", "shebang"),
    [
        (["bash", "train.sh", "--x", "1"], ""),
        (["bash", "-eux", "-o", "nounset", "train.sh"], ""),
        (["env", "A=1", "./train.sh"], "#!/usr/bin/env bash\n"),
        (["timeout", "1h", "train.sh"], "#!/bin/sh -e\n"),
    ],
)
def test_a_shell_script_in_the_folder_is_read_as_if_it_were_in_the_command(job_file, tmp_path, command, shebang):
    """A shell script in the folder is read like a command. Its findings are warnings, because a branch may not run."""
    (tmp_path / "train.sh").write_text(f'{shebang}torchrun --standalone train.py "$@" | tee log.txt\n')
    path = job_file((FIXTURES / "mistakes/backend-mpi.py").read_text(), *command, nodes=2)
    result = ran(path)
    assert (
        f"warning[exit-code-lost]: {command[-1] if command[-1] != '1' else 'train.sh'}: the exit code" in result.stdout
    )
    assert "--standalone is for one node, and spec.nodes is 2" in result.stdout
    assert "train.py:3: warning[backend-mpi]" in result.stdout
    lines, is_refused = check_files.before_run(*sources.load(sources.Source(path)))
    assert not is_refused
    assert any("--standalone" in line for line in lines)


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("if [ $N = 1 ]; then exec torchrun --standalone t.py; else exec torchrun t.py; fi", ["bash", "train.sh"]),
        ("torchrun --standalone train.py", ["bash", "-c", "true", "train.sh"]),
        ("torchrun --standalone train.py", ["bash", "other.sh"]),
        ("torchrun --standalone train.py", ["cat", "train.sh"]),
        ("torchrun --standalone train.py", ["./train.sh"]),
        ("if torchrun --standalone train.py", ["bash", "train.sh"]),
    ],
)
def test_a_shell_script_that_is_not_plain_is_not_read(job_file, tmp_path: Path, text: str, command: list[str]) -> None:
    (tmp_path / "train.sh").write_text(text)
    assert ran(job_file("", *command, nodes=2)).stdout == ""


def test_a_shell_script_with_several_launches_is_read_as_far_as_all_of_them_go(job_file, tmp_path: Path) -> None:
    """If a shell script starts torchrun twice, only a failure of the last one ends the job; this must be reported."""
    launches = "torchrun --standalone prepare.py\ntorchrun --nnodes=3 train.py {end}"
    (tmp_path / "train.sh").write_text(launches.format(end="| tee log"))
    (tmp_path / "prepare.py").write_text("print('data')\n")
    path = job_file((FIXTURES / "mistakes/backend-mpi.py").read_text(), "bash", "train.sh", nodes=2)
    result = ran(path)
    assert result.stdout.count("warning[exit-code-lost]: train.sh: the exit code of torchrun is lost") == 2
    assert "train.py:3: warning[backend-mpi]" in result.stdout
    assert "launcher-option" not in result.stdout, "one of them may be meant for this node alone"
    assert result.stderr.startswith("3 files read")
    (tmp_path / "train.sh").write_text(f"set -e\n{launches.format(end='')}")
    assert "exit-code-lost" not in ran(path).stdout


def test_options_that_a_shell_may_give_are_not_missing(job_file) -> None:
    """`$ARGS` in `torchrun train.py $ARGS` may contain --launcher pytorch, so this option must not count as missing."""
    launcher = (FIXTURES / "mistakes/group-needs-option.py").read_text()
    for arguments, expected in (("", True), ("$ARGS", False), ('"${ARGS[@]}"', False), ("--data $DATA", True)):
        result = ran(job_file(launcher, "bash", "-c", f"exec torchrun train.py {arguments}", nodes=2))
        assert ("group-needs-option" in result.stdout) is expected


@pytest.mark.parametrize(
    ("code", "end", "found"),
    [
        ("import train", 'if __name__ == "__main__":\n    main()', True),
        ("from train import *", 'if __name__ == "__main__":\n    loss.backward()', True),
        ("import train", "main()", False),
        ("import train; train.main()", 'if __name__ == "__main__":\n    main()', False),
        ("import other", 'if __name__ == "__main__":\n    main()', False),
    ],
)
def test_a_command_that_only_imports_the_script_trains_nothing(job_file, code: str, end: str, found: bool) -> None:
    """A command that only imports the script must be found, because its job succeeds at once without a training."""
    result = ran(job_file(f"def main():\n    loss.backward()\n{end}\n", "python", "-c", code, nodes=2))
    assert ("train.py:3: warning[nothing-runs]: the command only imports this file" in result.stdout) is found


def test_a_script_beside_two_jobs_is_checked_for_those_that_name_it(job_file, tmp_path: Path) -> None:
    gpu = {"resources": {"limits": {"nvidia.com/gpu": 4}}}
    text = (FIXTURES / "mistakes/rank-is-local-rank.py").read_text()
    one, two = job_file(text, nodes=2, container=gpu, name="one.yaml"), job_file(text, nodes=1, name="two.yaml")
    assert "train.py:13: error[rank-is-local-rank]" in ran(one, two, "train.py").stdout


# ---------------------------------------------------------------- notebooks and folders

ON_ONE_RANK = ["import torch.distributed as dist\n", "if dist.get_rank() == 0:\n", "    dist.all_reduce(loss)"]


def notebook(*cells: str | list[str]) -> str:
    """Return a notebook that has a text cell and then these code cells."""
    code = [{"cell_type": "code", "source": cell, "outputs": []} for cell in cells]
    return json.dumps({"cells": [{"cell_type": "markdown", "source": "# rank"}, *code], "nbformat": 4})


@pytest.mark.parametrize(
    ("cells", "place"),
    [
        (["dist = 1", ON_ONE_RANK], "cell 2:3"),
        (["%matplotlib inline\n!pip install torch\nx = !ls\nfiles?", "".join(ON_ONE_RANK)], "cell 2:3"),
        (["%%time\n" + "".join(ON_ONE_RANK)], "cell 1:4"),
        (["!python train.py \\\n    --epochs 5 \\\n    --lr 1\nx = !ls \\\n  -l\n" + "".join(ON_ONE_RANK)], "cell 1:8"),
        ([" !pip install torch\n x = 1", "".join(ON_ONE_RANK)], "cell 2:3"),
        (["\n !pip install torch\n x = 1", "\n%%bash\ncd /data && ls", "".join(ON_ONE_RANK)], "cell 3:3"),
        (["print('%d %d'\n      % (1, 2))\n" + "".join(ON_ONE_RANK)], "cell 1:5"),
        (["%matplotlib inline\nprint('%d %d'\n      % (1, 2))\n" + "".join(ON_ONE_RANK)], "cell 1:6"),
        (["%%bash\nfor i in 1 2; do ls; done", "%%writefile train.py\n" + "".join(ON_ONE_RANK)], "cell 2:4"),
    ],
)
def test_the_code_cells_of_a_notebook_are_checked_and_the_cell_is_named(tmp_path, cells, place):
    """The code cells of a notebook must be checked, not its JSON, which is valid Python without any mistake."""
    path = tmp_path / "train.ipynb"
    path.write_text(notebook("import torch.distributed as dist\ndist.init_process_group('gloo')", *cells))
    cell, line = place.removeprefix("cell ").split(":")
    result = ran(path)
    assert result.return_value == 1
    assert f"{path}:cell {int(cell) + 1}:{line}: error[collective-on-one-rank]: " in result.stdout


@pytest.mark.parametrize(
    "line",
    [
        "ls -l text.txt",
        "cd data",
        "cd ~/data",
        "rm -rf out",
        "pip install torch==2.1",
        "pip install -q 'torch>2'",
        "matplotlib inline",
        "?model",
        "model??",
        "model.train?",
        "*.ipynb?",
        "!nvidia-smi",
        "!!ls",
        "x = !ls",
        "x[0] = %timeit f(1)",
        "%%bash\ncd data\nls | wc -l",
        "%%writefile a.txt\nno python",
        "/print 1",
        ">>> x = 1\n>>> for i in range(2):\n...     print(i)",
        "In [3]: x = 1",
    ],
)
def test_a_line_that_ipython_accepts_is_no_syntax_error(tmp_path: Path, line: str) -> None:
    """A line that only IPython accepts, such as a magic, must not be reported as a syntax error."""
    path = tmp_path / "train.ipynb"
    path.write_text(notebook(line))
    assert (ran(path).return_value, ran(path).stdout) == (0, "")
    if not line.startswith(("%%", ">>>", "In [")):
        path.write_text(notebook(f"x = 1\n{line}\nprint('%d'\n      % 1)\n" + "".join(ON_ONE_RANK)))
        assert "cell 1:7: error[collective-on-one-rank]: " in ran(path).stdout, "lines before and after it are read"


@pytest.mark.parametrize("line", ["lss -l x", "cat = = 1", "print 'a'", "x = 1 +", "ls = [1,\ny = 2", "if x\n    pass"])
def test_a_line_that_ipython_does_not_accept_is_a_syntax_error(tmp_path: Path, line: str) -> None:
    path = tmp_path / "train.ipynb"
    path.write_text(notebook("x = 1", line))
    assert re.search(r"cell 2:\d: error\[syntax\]", ran(path).stdout), ran(path).stdout


@pytest.mark.parametrize("text", ["[]", "{", "", "[" * 100_000, '{"cells": 3}'])
def test_a_file_that_is_not_a_notebook_exits_with_2(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.ipynb").write_text(text)
    result = ran(tmp_path / "x.ipynb")
    assert result.return_value == 2
    assert "error[syntax]: not a valid notebook: " in result.stdout


@given(st.recursive(st.none() | st.integers() | st.text(max_size=9), lambda inner: st.lists(inner, max_size=3)))
def test_any_cells_are_read_without_a_traceback(source: Any) -> None:
    cells = [{"cell_type": "code", "source": source}, source]
    for part in read_notebook(json.dumps({"cells": cells})):
        assert part.place(99)[0] == 1


def test_files_that_are_ignored_hidden_or_installed_are_not_checked_in_a_folder(job_file, tmp_path: Path) -> None:
    wrong = (FIXTURES / "mistakes/backend-mpi.py").read_text()
    job_file("import os\n")
    for name in ("old/a.py", "env/lib/b.py", ".hidden/c.py", "ignored/d.py", "e.ipynb"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(notebook(wrong) if name.endswith("ipynb") else wrong)
    (tmp_path / "env/pyvenv.cfg").touch()
    (tmp_path / "values.yaml").write_text("replicas: {{ .Values.n }}\n")
    (tmp_path / ".gitignore").write_text("ignored/\n")
    result = ran(".")
    assert [line.split(": ")[0] for line in result.stdout.splitlines()] == ["e.ipynb:cell 1:3", "old/a.py:3"]
    assert result.stderr == "4 files read: 2 errors\n"


def test_only_the_script_of_a_job_in_a_folder_is_checked_with_the_job(job_file, tmp_path) -> None:
    text = (FIXTURES / "mistakes/rank-is-local-rank.py").read_text()
    job_file(text, nodes=2, container={"resources": {"limits": {"nvidia.com/gpu": 4}}})
    (tmp_path / "other.py").write_text(text)
    found = ran(tmp_path).stdout
    assert f"{tmp_path}/train.py:13: error[rank-is-local-rank]" in found or "train.py:13: error" in found
    assert f"{tmp_path}/other.py:13: warning[rank-is-local-rank]" in found


def test_a_broken_job_in_a_folder_does_not_hide_the_rest(job_file, tmp_path: Path) -> None:
    job_file((FIXTURES / "mistakes/backend-mpi.py").read_text())
    job_file((FIXTURES / "mistakes/backend-mpi.py").read_text(), name="broken.yaml", nodes=0)
    result = ran(".")
    assert result.return_value == 2
    assert "error[backend-mpi]" in result.stdout
    assert "spec.nodes: must be at least 1, is 0" in result.stderr


def test_a_folder_without_anything_to_check_is_wrong_input(tmp_path: Path) -> None:
    assert "no Python script" in str(ran(tmp_path).exception)


# ---------------------------------------------------------------- the YAML alone


def test_a_job_without_an_image_gets_a_warning(job_file) -> None:
    path = job_file("")
    text = Path(path).read_text()
    Path(path).write_text(re.sub(r" *image: .*\n", "", text))
    result = ran(path)
    assert result.return_value == 0
    assert re.search(r"job.yaml:\d+: warning\[image-missing\]", result.stdout)


@pytest.mark.parametrize(
    ("of_job", "nodes", "wrong"),
    [
        ({"limits": {"memory": "9Gi"}}, 2, ""),
        ({"limits": {"memory": "8Gi"}}, 2, "8Gi is too small for its state in memory: 300,000,000 parameters with"),
        ({"limits": {"memory": "8Gi"}}, 1, "8Gi is too small for two copies of its state in memory: "),
        ({"limits": {"memory": "8Gi", "nvidia.com/gpu": 1}}, 2, ""),
        ({"limits": {"memory": "7Gi", "nvidia.com/gpu": 1}}, 2, "7Gi is too small for two copies of its state in"),
        ({}, 2, ""),
    ],
)
def test_a_memory_limit_too_small_for_the_state_is_reported_before_the_start(job_file, of_job, nodes, wrong):
    path = job_file("", "ddprun", "train.py", nodes=nodes, container={"resources": of_job})
    said = ran(path, "--parameters", "300M").stdout
    assert ("memory-limit-too-small" in said) == bool(wrong), said
    assert wrong in said
    assert "memory-limit-too-small" not in ran(path).stdout, "nothing is known of the model"
    if wrong:
        enough = re.search(r"set it to (\d+Mi) or more", said)
        larger = {"limits": {**of_job["limits"], "memory": enough[1]}}
        path = job_file("", "ddprun", "train.py", nodes=nodes, container={"resources": larger})
        assert "memory-limit-too-small" not in ran(path, "--parameters", "0.3B").stdout, "what it says is enough"


def test_an_invalid_number_of_parameters_is_wrong_input(job_file) -> None:
    assert "--parameters: a number such as 350M or 7B, not many" in str(
        ran(job_file(""), "--parameters", "many").exception
    )


def test_a_field_unknown_to_every_known_api_server_is_a_warning(job_file) -> None:
    result = ran(job_file("", container={"quantumEntanglement": True}))
    assert "warning[unknown-field]: quantumEntanglement: unknown field of a Container" in result.stdout


def test_a_missing_script_is_reported_with_the_line_of_the_command(job_file) -> None:
    path = job_file("", "python", "other.py")
    lines = Path(path).read_text().splitlines()
    line = next(i for i, text in enumerate(lines, start=1) if "command" in text)
    assert ran(path).stderr.startswith(f"{path}:{line}: other.py is not on this machine")


def test_two_jobs_with_one_name_in_a_file_get_no_advice_to_choose_by_name(job_file) -> None:
    path = job_file("")
    Path(path).write_text("---\n".join([Path(path).read_text()] * 2))
    assert "Two have the same name; names must differ" in str(ran(path).exception)
