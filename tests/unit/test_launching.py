"""Every command in docs/launching.md is accepted as written, and what the page calls refused is refused."""

import re
from pathlib import Path

import pytest
import yaml
from worlds import manifest

from ddpjob_operator.job import launcher, validation
from ddpjob_operator.job.launch import command

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/launching.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\|(?P<you_have>[^|]*)\| `(?P<command>\[.*?\])` \| (?P<nodes>\d)×(?P<nproc>\d) \| (?P<rest>.*) \|$")
ROWS = [match for line in TEXT.splitlines() if (match := ROW.match(line))]
REFUSED_ROW = re.compile(r"^\| `(?P<command>\[.*?\])` \| (?P<nodes>\d)×(?P<nproc>\d) \| (?P<rest>.*) \|$")
REFUSED = [match for line in TEXT.splitlines() if (match := REFUSED_ROW.match(line))]


def problems(row: re.Match[str]) -> list[str]:
    container = {"command": yaml.safe_load(row["command"])}
    body = manifest(nodes=int(row["nodes"]), nprocPerNode=int(row["nproc"]), container=container)
    return [str(problem) for problem in validation.parse(body)[1]]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: re.findall(r"\[([\w-]+)\]", row["rest"])[0])
def test_a_command_in_the_guide_is_accepted(row: re.Match[str]) -> None:
    assert problems(row) == []


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row["command"])
def test_a_command_that_the_guide_calls_refused_is_refused_for_that_reason(row: re.Match[str]) -> None:
    (sentence,) = problems(row)
    assert row["rest"] in sentence


def test_the_guide_has_the_expected_number_of_rows() -> None:
    assert (len(ROWS), len(REFUSED)) == (23, 8)


def test_the_example_at_the_top_is_a_valid_job() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", TEXT, flags=re.DOTALL)
    assert validation.parse(yaml.safe_load(block))[1] == []


def test_every_link_leads_to_a_file_and_every_example_is_linked() -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", TEXT)
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
    examples = {path.name for path in (ROOT / "examples/notes").glob("*.yaml")}
    assert examples - {Path(link).name for link in links} == set()


@pytest.mark.parametrize("path", sorted((ROOT / "examples/notes").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_launch_example_is_a_valid_job(path: Path) -> None:
    assert validation.parse(yaml.safe_load(path.read_text(encoding="utf-8")))[1] == []


def test_a_command_that_contains_a_long_script_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command with a long script must be parsed once, and not for each report: 10 kB take 18 ms."""
    read = 0

    def counted(words: list[str]) -> command.Command:
        nonlocal read
        read += 1
        return begins(words)

    begins = command.of_container
    monkeypatch.setattr(command, "of_container", counted)
    script = "echo 'hello world'\n" * 1000 + "exec torchrun --nproc-per-node={} train.py"
    for processes in (2, 4):
        job, _ = validation.parse(manifest(nodes=2, container={"command": ["bash", "-c", script.format(processes)]}))
        for _ in range(5):
            assert job.spec.facts.nproc_per_node == processes
            assert job.spec.facts.ranks_follow_nodes
            assert job.spec.facts.min_nodes is None
    assert read == 2


def in_vain(*launchers: tuple[str, dict[str, str]]) -> list[str]:
    """Return the warnings about these processes, one per node of a job that starts a script of its image."""
    spec = validation.parse(manifest(nodes=2, nprocPerNode=2, container={"command": ["bash", "train.sh"]}))[0].spec
    running = ((node, words.split(), environ) for node, (words, environ) in enumerate(launchers))
    return list(launcher.waits_in_vain(spec, running))


OF_JOB = [{"PET_NNODES": "2", "PET_NODE_RANK": str(node)} for node in range(2)]


@pytest.mark.parametrize(
    ("words", "environ", "expected"),
    [
        ("python /bin/torchrun --standalone train.py", OF_JOB[1], "torchrun --standalone is for one node"),
        ("ddprun --nnodes=3 train.py", OF_JOB[1], "ddprun --nnodes=3 contradicts spec.nodes: 2"),
        ("torchrun --rdzv-backend c10d train.py", OF_JOB[1], "without --rdzv_endpoint: each of 2 nodes waits at its"),
        ("python -m torch.distributed.run train.py", {"PET_NODE_RANK": "1"}, "does not have the variable PET_NNODES"),
        ("torchrun train.py", OF_JOB[0], "torchrun has --node_rank=0, as on node 0"),
        ("torchrun --node_rank 0 train.py", OF_JOB[1], "torchrun has --node_rank=0, as on node 0"),
    ],
)
def test_a_running_launcher_that_waits_in_vain_is_named(words: str, environ: dict[str, str], expected: str) -> None:
    """A launcher that waits in vain must be named by its process: the operator cannot read the image's script."""
    (sentence,) = in_vain(("torchrun train.py", OF_JOB[0]), (words, environ))
    assert sentence.startswith("node 1 waits for others in vain: ")
    assert expected in sentence


@pytest.mark.parametrize(
    ("words", "environ"),
    [
        ("torchrun train.py", OF_JOB[1]),
        ("torchrun --standalone --nnodes=1 prepare.py", OF_JOB[1]),
        ("ddprun --standalone train.py", OF_JOB[1]),
        ("torchrun train.py", {}),
        ("torchrun --nnodes 2 --node_rank 1 train.py", {}),
        ("torchrun --rdzv-backend c10d --rdzv-endpoint node-0:29500 train.py", {"PET_NNODES": "2"}),
        ("bash -c torchrun\t--standalone\ttrain.py", OF_JOB[1]),
        ("python train.py", OF_JOB[0]),
    ],
)
def test_a_running_launcher_that_may_meet_others_or_trains_alone_on_purpose_is_not(words, environ):
    assert in_vain(("torchrun train.py", OF_JOB[0]), (words, environ)) == []
