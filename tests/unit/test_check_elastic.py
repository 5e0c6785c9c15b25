"""`ddpjob check` warns about code that breaks when the number of ranks changes, if that may happen."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from worlds import job

import ddpjob_check as check
from ddpjob_check import CheckedJob
from ddpjob_check.job import known
from ddpjob_cli.commands import check_files
from ddpjob_cli.manifest.yamlfile import InputError

FIXTURES = Path(__file__).parent / "check/fixtures"
MISTAKES = sorted(FIXTURES.glob("mistakes/elastic-*.py"))
ELASTIC = CheckedJob(nodes=4, min_nodes=2, nproc=8, gpus=8, launcher="torchrun")
FIXED = CheckedJob(nodes=4, nproc=8, gpus=8, launcher="torchrun")
SOUND = (FIXTURES / "healthy/elastic_global_batch.py").read_text()
SHARED = (FIXTURES / "healthy/elastic_accumulation.py").read_text()
LATER = "    main()\n"


def rules(text: str, context: CheckedJob = ELASTIC) -> set[str]:
    return {finding.rule for finding in check.check("train.py", text, context)}


@pytest.mark.parametrize("path", MISTAKES, ids=lambda p: p.stem)
def test_a_mistake_that_only_hurts_elastic_jobs_is_reported_for_no_other_job(path: Path) -> None:
    """Rules for elastic jobs must not apply to others, where a fixed batch size per rank is correct."""
    assert rules(path.read_text()) == {path.stem}
    assert rules(path.read_text(), dataclasses.replace(ELASTIC, launcher="ddprun")) == {path.stem}
    assert rules(path.read_text(), FIXED) == set()
    assert rules(path.read_text(), CheckedJob()) == set(), "a script without a job"


@pytest.mark.parametrize(
    ("spec", "is_elastic"),
    [
        ({"nodes": 3}, False),
        ({"nodes": 3, "minNodes": 1}, True),
        ({"nodes": 1, "minNodes": 1}, True),
        ({"nodes": 4, "container": {"command": ["torchrun", "--nnodes=1:4", "train.py"]}}, True),
        ({"nodes": 4, "container": {"command": ["ddprun", "--nnodes", "2:4", "train.py"]}}, True),
        ({"nodes": 4, "container": {"command": ["torchrun", "--nnodes=4:4", "train.py"]}}, False),
        ({"nodes": 4, "container": {"command": ["torchrun", "train.py", "--nnodes=1:4"]}}, False),
    ],
)
def test_a_job_is_elastic_by_minNodes_or_by_its_command(spec: dict[str, Any], is_elastic: bool) -> None:
    assert known(job(**spec)).is_elastic == is_elastic


# Each case: a sound elastic script, a text in it, the replacement, and the rules that report the change.
CHANGES = [
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
    (SOUND, "    start = 0\n", "    start = 0\n    assert dist.get_world_size(group) == 8\n", set()),
    (SHARED, "    start = resume", "    world_size = dist.get_world_size(half)\n    assert world_size == 8\n"
     "    start = resume", set()),
]  # fmt: skip


@pytest.mark.parametrize(("text", "right", "wrong", "found"), CHANGES)
def test_one_change_to_a_sound_elastic_script_is_found_if_it_is_certain(text, right, wrong, found):
    """A change that assumes a fixed number of ranks must be found: the training would differ between 3 and 4 nodes."""
    assert rules(text) == set()
    assert right in text
    assert rules(text.replace(right, wrong)) == found


@pytest.mark.parametrize(
    ("nodes", "elastic"), [(None, None), ("4", None), ("1:4", 1), ("4:4", 4)], ids=["not_said", "one", "range", "same"]
)
def test_a_script_without_a_job_is_checked_as_elastic_if_a_range_is_given(nodes, elastic):
    assert check_files.context(nodes, None).min_nodes == elastic


@pytest.mark.parametrize("nodes", ["0", "4:1", "0:2", "many", "1:many", ":4", "9" * 20, "9" * 5000])
def test_an_invalid_number_of_nodes_is_refused(nodes: str) -> None:
    with pytest.raises(InputError, match="--nodes: must be a number of nodes, or MIN:MAX as 1:3"):
        check_files.context(nodes, None)
