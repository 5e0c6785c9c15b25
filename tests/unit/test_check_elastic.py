"""`ddpjob check` warns of what does not survive a changing number of ranks, where the number may change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import job

from ddpjob_operator import check
from ddpjob_operator.check import Job
from ddpjob_operator.check.job import known
from ddpjob_operator.cli import check_files
from ddpjob_operator.manifest.yamlfile import InputError

FIXTURES = Path(__file__).parent / "check/fixtures"
EXAMPLES = sorted((Path(__file__).parents[2] / "trainer/examples").glob("*.py"))
MISTAKES = sorted(FIXTURES.glob("mistakes/elastic-*.py"))
ELASTIC = Job(nodes=4, min_nodes=2, nproc=8, gpus=8, launcher="torchrun")
FIXED = Job(nodes=4, nproc=8, gpus=8, launcher="torchrun")
SOUND = (FIXTURES / "healthy/elastic_global_batch.py").read_text()
SHARED = (FIXTURES / "healthy/elastic_accumulation.py").read_text()
LATER = "    main()\n"


def rules(text: str, context: Job = ELASTIC) -> set[str]:
    return {finding.rule for finding in check.check("train.py", text, context)}


@pytest.mark.parametrize("path", MISTAKES, ids=lambda p: p.stem)
def test_what_only_an_elastic_job_suffers_from_is_said_of_no_other(path: Path) -> None:
    """A batch size of each rank is what most scripts have, and right where the number of ranks stays."""
    assert rules(path.read_text()) == {path.stem}
    assert rules(path.read_text(), FIXED) == set()
    assert rules(path.read_text(), Job()) == set(), "a script without a job"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_our_own_examples_survive_a_changing_number_of_ranks(path: Path) -> None:
    assert rules(path.read_text()) == set()


@pytest.mark.parametrize(
    ("spec", "is_elastic"),
    [
        ({"nodes": 3}, False),
        ({"nodes": 3, "minNodes": 1}, True),
        ({"nodes": 1, "minNodes": 1}, True),
        ({"nodes": 4, "container": {"command": ["torchrun", "--nnodes=1:4", "train.py"]}}, True),
        ({"nodes": 4, "container": {"command": ["torchrun", "--nnodes=4:4", "train.py"]}}, False),
        ({"nodes": 4, "container": {"command": ["torchrun", "train.py", "--nnodes=1:4"]}}, False),
    ],
)
def test_a_job_is_elastic_by_minNodes_or_by_its_command(spec: dict[str, Any], is_elastic: bool) -> None:
    assert known(job(**spec)).is_elastic == is_elastic


# A sound elastic script, one change, and what it costs.
CHANGES = [
    (SOUND, "args.batch_size // world_size", "args.batch_size", {"elastic-batch-size"}),
    (SOUND, "args.batch_size // world_size", "64", {"elastic-batch-size"}),
    (SOUND, "batch_size=args.batch_size // world_size, ", "", {"elastic-batch-size"}),
    (SOUND, "args.batch_size // world_size", "int(args.batch_size / world_size)", set()),
    (SOUND, "args.batch_size // world_size", "per_rank(args)", set()),
    (SOUND, "lr=args.lr,", "lr=args.lr * world_size,", {"elastic-learning-rate"}),
    (SOUND, "lr=args.lr,", "lr=args.lr * args.batch_size * world_size / 256,", {"elastic-learning-rate"}),
    (SOUND, "lr=args.lr,", "lr=args.lr * (args.batch_size // world_size) * world_size / 256,", set()),
    (SOUND, "lr=args.lr,", "lr=args.lr * world_size**0.5,", {"elastic-learning-rate"}),
    (SOUND, "lr=args.lr,", "lr=scaled(args.lr, world_size),", set()),
    (SOUND, "    model = DDP(", "    args.lr *= world_size\n    model = DDP(", {"elastic-learning-rate"}),
    (SOUND, "    model = DDP(", "    if args.scale:\n        args.lr *= world_size\n    model = DDP(", set()),
    (SOUND, "            optimizer.step()\n",
     "            for g in optimizer.param_groups:\n                g['lr'] = 0.1 * dist.get_world_size()\n"
     "            optimizer.step()\n", {"elastic-learning-rate"}),
    (SOUND, "nn.SyncBatchNorm.convert_sync_batchnorm(resnet50())", "resnet50()", {"elastic-batch-norm"}),
    (SOUND, "nn.SyncBatchNorm.convert_sync_batchnorm(resnet50())", "resnet50(norm_layer=groups)", set()),
    (SOUND, "nn.SyncBatchNorm.convert_sync_batchnorm(resnet50())", "nn.Linear(4, 4)", set()),
    (SOUND, "nn.SyncBatchNorm.convert_sync_batchnorm(resnet50())", "convert_syncbn_model(resnet50())", set()),
    (SOUND, "num_replicas=world_size", "num_replicas=32", {"elastic-fixed-world"}),
    (SOUND, "num_replicas=world_size, rank=dist.get_rank()", "num_replicas=1, rank=0", set()),
    (SOUND, '("nccl")', '("nccl", rank=int(os.environ["RANK"]), world_size=32)', {"elastic-fixed-world"}),
    (SOUND, '("nccl")', '("nccl", None, None, 32, int(os.environ["RANK"]))', {"elastic-fixed-world"}),
    (SOUND, "    start = 0\n", "    start = 0\n    assert world_size == 32\n", {"elastic-fixed-world"}),
    (SOUND, "    start = 0\n", "    start = 0\n    assert args.batch_size % world_size == 0\n", set()),
    (SOUND, "    start = 0\n", "    start = 0\n    assert world_size > 1\n", set()),
    (SOUND, "    start = 0\n", "    start = 0\n    if dist.get_world_size() != 32:\n        raise ValueError\n",
     {"elastic-fixed-world"}),
    (SOUND, "    start = 0\n", "    start = 0\n    if world_size != 32:\n        print('slow')\n", set()),
    (SOUND, LATER, "    os.environ['WORLD_SIZE'] = '32'\n" + LATER, {"elastic-fixed-world"}),
    (SOUND, LATER, "    os.environ.setdefault('WORLD_SIZE', '32')\n" + LATER, set()),
    (SHARED, "(MICRO_BATCH * ranks)", "MICRO_BATCH", {"elastic-batch-size"}),
    (SHARED, "start = resume(model, optimizer)", "start = 0", set()),
    (SHARED, "GLOBAL_BATCH // (MICRO_BATCH * ranks)", "max(1, 64 // ranks)", set()),
    (SHARED, "accumulation = GLOBAL_BATCH // (MICRO_BATCH * ranks)", "def accumulation_steps():\n"
     "        return 64 // dist.get_world_size()\n\n    accumulation = accumulation_steps()", set()),
    (SHARED, "accumulation = GLOBAL_BATCH // (MICRO_BATCH * ranks)", "accumulation = Run(accum=64 // ranks)", set()),
    (SHARED, "accumulation = GLOBAL_BATCH // (MICRO_BATCH * ranks)", "accumulation = 8\n    steps = 6400 // ranks",
     {"elastic-batch-size"}),
    (SOUND, "lr=args.lr,", "lr=args.lr * misc.get_world_size(),", {"elastic-learning-rate"}),
    (SOUND, "lr=args.lr,", "lr=args.lr * dist.get_world_size(group),", set()),
    (SOUND, "    start = 0\n", "    start = 0\n    assert dist.get_world_size(group) == 8\n", set()),
    (SHARED, "    start = resume", "    world_size = dist.get_world_size(half)\n    assert world_size == 8\n"
     "    start = resume", set()),
]  # fmt: skip


@pytest.mark.parametrize(("text", "right", "wrong", "found"), CHANGES)
def test_one_change_to_a_sound_elastic_script_is_found_where_it_is_certain(
    text: str, right: str, wrong: str, found: set[str]
) -> None:
    """Else the same job trains another model on Monday, with three nodes, than on Sunday with four."""
    assert rules(text) == set()
    assert right in text
    assert rules(text.replace(right, wrong)) == found


LOOP = (FIXTURES / "mistakes/elastic-no-checkpoint.py").read_text()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("for epoch in", "start = load_checkpoint()\nfor epoch in"),
        ("for epoch in", "model.load_state_dict(torch.load('last.pt', map_location='cpu'))\nfor epoch in"),
        ("for epoch in", "import lightning\nfor epoch in"),
        ("for epoch in", "model = recover(model)\nfor epoch in"),
        ("for epoch in", "from mine import prepare\nprepare(model, optimizer)\nfor epoch in"),
        ("for epoch in", "from mine import *\nfor epoch in"),
        (".backward()", ""),
    ],
)
def test_a_script_that_may_load_its_state_is_left_alone(right: str, wrong: str) -> None:
    """Whoever resumes by a function of another file does resume."""
    assert rules(LOOP) == {"elastic-no-checkpoint"}
    assert rules(LOOP.replace(right, wrong)) - {"load-without-map-location"} == set()


@pytest.mark.parametrize("text", ["load_digits()", "np.load('x.npy')", "load_dataset('x')", "yaml.load(f)"])
def test_loading_data_is_no_checkpoint(text: str) -> None:
    imports = "import yaml\nimport numpy as np\n"
    assert rules(
        LOOP.replace("for epoch", f"data = {text}\nfor epoch").replace("import os\n", f"import os\n{imports}")
    ) == {"elastic-no-checkpoint"}


def test_a_total_that_is_not_divided_is_said_once() -> None:
    """Two findings about one number contradict each other."""
    text = (FIXTURES / "mistakes/batch-size-not-divided.py").read_text()
    assert rules(text) == {"batch-size-not-divided"}


def test_the_sentence_names_the_number_and_the_fix() -> None:
    text = (FIXTURES / "mistakes/elastic-batch-size.py").read_text()
    (finding,) = check.check("train.py", text, ELASTIC)
    assert str(finding) == (
        "train.py:17: warning[elastic-batch-size]: batch_size=args.batch_size is that of each rank, so a step of an "
        "elastic job has more samples with more nodes; divide a global batch, GLOBAL_BATCH // dist.get_world_size(), "
        "or use ddpjob.GlobalBatchSampler"
    )


@pytest.mark.parametrize(
    ("nodes", "elastic"), [(None, None), ("4", None), ("1:4", 1), ("4:4", 4)], ids=["not_said", "one", "range", "same"]
)
def test_a_script_without_a_job_is_checked_as_elastic_where_a_range_is_given(
    nodes: str | None, elastic: int | None
) -> None:
    assert check_files.context(nodes, None).min_nodes == elastic


@pytest.mark.parametrize("nodes", ["0", "4:1", "0:2", "many", "1:many", ":4", "9" * 20, "9" * 5000])
def test_a_number_of_nodes_that_is_none_is_refused(nodes: str) -> None:
    with pytest.raises(InputError, match="--nodes: must be a number of nodes, or MIN:MAX as 1:3"):
        check_files.context(nodes, None)


def test_a_rate_that_is_multiplied_elsewhere_is_said_with_that_line() -> None:
    """At `lr=args.lr` nobody sees a product."""
    text = SOUND.replace(
        "    model = DDP(", "    total = args.batch_size * world_size\n    args.lr *= total / 256\n    model = DDP("
    )
    (finding,) = check.check("train.py", text, ELASTIC)
    line = next(i for i, line in enumerate(text.splitlines(), start=1) if "total = " in line)
    assert f"lr=args.lr is multiplied by the number of ranks (line {line}), which changes" in finding.message
    (finding,) = check.check("train.py", SOUND.replace("lr=args.lr,", "lr=args.lr * world_size,"), ELASTIC)
    assert "lr=args.lr * world_size is multiplied by the number of ranks, which changes" in finding.message


@given(st.sampled_from(sorted(FIXTURES.rglob("*.py"))), st.data())
def test_a_script_with_lines_lost_or_moved_gives_no_traceback(path: Path, data: st.DataObject) -> None:
    lines = path.read_text().splitlines()
    a, b = (data.draw(st.integers(0, len(lines))) for _ in range(2))
    for broken in (lines[:a] + lines[b:], lines[a:] + lines[:a]):
        check.check("t.py", "\n".join(broken), ELASTIC)
