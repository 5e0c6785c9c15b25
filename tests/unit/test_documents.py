"""What README and docs/ show: links lead somewhere, YAML is valid, commands and their options exist."""

import ast
import re
import shlex
from pathlib import Path

import click
import documents
import pytest
import yaml
from click.testing import CliRunner

from ddpjob_cli.commands.main import cli
from ddpjob_operator.job import validation

LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.mark.parametrize("page", documents.PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_an_existing_file_and_heading(page: Path) -> None:
    broken = []
    for link in LINK.findall(documents.prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in documents.anchors(target)):
            broken.append(link)
    assert broken == []


WIDEST = 120  # columns
WRITTEN = [
    *documents.PAGES,
    *(
        documents.ROOT / name
        for name in ("CHANGELOG.md", "charts/ddpjob-operator/README.md", "trainer/examples/README.md")
    ),
]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_no_line_of_prose_is_wider_than_a_terminal(page: Path) -> None:
    """Lines must have at most 120 columns, so that they can be read in a terminal and in a diff."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    wide = [line for line in text.splitlines() if len(line) > WIDEST and not line.lstrip().startswith("|")]
    assert wide == []


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    site = yaml.safe_load((documents.ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    entries = [
        page for part in site["nav"] for page in ([part] if isinstance(part, str) else next(iter(part.values())))
    ]
    entries += [page for page in site["not_in_nav"].split() if page.endswith(".md")]  # pages that redirect old links
    assert sorted(entries) == sorted(page.name for page in documents.PAGES if page.parent == documents.ROOT / "docs")


LOOKED_UP = ("index.md", "tutorial.md", "reference.md", "check.md", "messages.md", "metrics.md")


@pytest.mark.parametrize("page", documents.PAGES, ids=lambda page: page.name)
def test_a_page_for_users_opens_with_the_question_that_it_answers(page: Path) -> None:
    """A user's page must open with its question, because readers who skim leave after the first line."""
    text = page.read_text(encoding="utf-8")
    leads_on = "This page is now a part of" in text
    if page.parent == documents.ROOT / "docs" and page.name not in LOOKED_UP and not leads_on:
        assert "\n\nThis page answers" in text[:400]


@pytest.mark.parametrize("block", documents.blocks("yaml"), ids=str)
def test_every_ddpjob_in_a_page_is_valid(block: documents.Block) -> None:
    for document in yaml.safe_load_all(block.text):
        if isinstance(document, dict) and document.get("kind") == "DDPJob":
            assert [str(problem) for problem in validation.parse(document)[1]] == []


EXAMPLES = {str(path): path.read_text(encoding="utf-8") for path in sorted(documents.ROOT.glob("examples/**/*.yaml"))}


def test_no_shown_job_pulls_the_image_that_the_reader_has_built() -> None:
    """A shown job must not pull the image that its reader has built: without a tag it is always pulled, but from no
    registry."""
    texts = EXAMPLES | {str(block): block.text for block in documents.blocks("yaml")}
    jobs = [(place, job) for place, text in texts.items() for job in yaml.safe_load_all(text) if isinstance(job, dict)]
    containers = [
        (place, container)
        for place, job in jobs
        if job.get("kind") == "DDPJob"
        for container in job["spec"]["template"]["spec"]["containers"]
    ]
    built = [(place, container) for place, container in containers if container["image"] == "ddpjob-trainer"]
    assert len(built) > len(EXAMPLES)
    assert [place for place, container in built if container.get("imagePullPolicy") != "IfNotPresent"] == []


@pytest.mark.parametrize("block", documents.blocks("python"), ids=str)
def test_every_python_block_is_python(block: documents.Block) -> None:
    ast.parse(block.text)


def commands() -> list[tuple[str, list[str]]]:
    """Yield each `ddpjob …` line of the shell blocks."""
    found = []
    for block in documents.blocks("console", "bash", "sh"):
        for line in block.text.replace("\\\n", " ").splitlines():
            parts = re.split(r"; | && | \|\|? | >+ | < | & *$", line.removeprefix("$").partition(" #")[0])
            found += [(str(block), shlex.split(p)[1:]) for p in parts if p.strip().startswith("ddpjob ")]
    return found


@pytest.mark.parametrize(("place", "words"), commands(), ids=lambda value: value if isinstance(value, str) else "")
def test_every_command_in_a_page_has_the_shown_options(place: str, words: list[str]) -> None:
    command = cli.get_command(click.Context(cli), words[0])
    assert command is not None, f"{place}: no such command: {words[0]}"
    command.make_context(words[0], words[1:])  # raises an error for an unknown option


def test_the_tutorial_shows_the_real_output_of_its_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tutorial must show the output that its script prints, because readers compare the two."""
    page = documents.ROOT / "docs/tutorial.md"
    told = " ".join(page.read_text(encoding="utf-8").split())
    script, mistake = (block.text for block in documents.blocks("python") if block.page == page)
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(script + "\n", encoding="utf-8")
    made = CliRunner().invoke(cli, ["init", "--nodes", "2", "train.py"]).output
    assert made.strip() in [block.text for block in documents.blocks("yaml") if block.page == page]
    place = "            step += 1\n"
    assert script.count(place) == 1
    wrong = script.replace(place, place + "".join(f"            {line}\n" for line in mistake.splitlines()))
    Path("train.py").write_text(wrong + "\n", encoding="utf-8")
    found = CliRunner().invoke(cli, ["check", "train.py", "--nodes", "2"]).output
    assert " ".join(found.split()) in told
