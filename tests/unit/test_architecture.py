"""docs/dev/architecture.md agrees with the code."""

import inspect
import re
from pathlib import Path

import pytest

from ddpjob_operator.kube import kopf_workarounds
from ddpjob_operator.plan import plan
from ddpjob_operator.plan.plan import RULES

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/dev/architecture.md").read_text()
ROOMS = ("", "operator/", "operator/ddpjob_operator/", "operator/ddpjob_cli/", "trainer/", "trainer/ddpjob/")
MUST_HAVE = ("In:", "Out:", "Called by:", "Must not")


def _first_column(heading: str) -> list[str]:
    section = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| (\w+) \|", section, re.MULTILINE)[1:]


def test_the_page_lists_the_rules_in_the_order_of_their_evaluation() -> None:
    assert _first_column("The rules") == [rule.__name__ for rule in RULES]


def test_the_page_lists_the_phases_in_the_order_in_which_a_plan_calls_them() -> None:
    calls = re.findall(r"= (\w+)\(|return (\w+)\(view", inspect.getsource(plan.plan))
    assert _first_column("The four phases of a plan") == [name for pair in calls for name in pair if name]


@pytest.mark.parametrize("named", sorted(set(re.findall(r"[\w/]+(?:/\w+\.py|/(?=[ ,|`]))", TEXT))))
def test_every_file_named_on_the_page_exists(named: str) -> None:
    assert any((ROOT / room / named).exists() for room in ROOMS)


def test_each_kopf_workaround_is_listed_with_the_affected_version_and_the_condition_for_its_removal() -> None:
    """The page must list all workarounds for kopf, so that each can be removed after an upgrade of kopf."""
    (folder,) = kopf_workarounds.__path__
    texts = {path.stem: path.read_text().split('"""')[1] for path in Path(folder).glob("[!_]*.py")}
    assert set(re.findall(r"^(\w+)   ", kopf_workarounds.__doc__ or "", re.MULTILINE)) == set(texts)
    for name, text in texts.items():
        assert re.search(r"kopf \d+\.\d+", text), name
        assert re.search(r"Remove\s+this\s+when", text), name


def test_the_docstrings_of_packages_and_of_large_folders_say_what_a_newcomer_needs() -> None:
    """A newcomer must learn from a folder's docstring what goes in and out, who calls it, and what it must not know."""
    paragraph = TEXT.split("\n## The packages\n")[1].split("\n```")[0]
    named = re.findall(r"`([\w/]+)/`", paragraph)
    packages = [path.parent for folder in ("operator", "trainer") for path in (ROOT / folder).glob("ddp*/__init__.py")]
    assert (len(packages), len(named)) == (7, 12)
    folders = packages + [next(ROOT / room / one for room in ROOMS if (ROOT / room / one).is_dir()) for one in named]
    for folder in folders:
        text = (folder / "__init__.py").read_text().split('"""')[1]
        assert all(re.search(rf"^{word}|\. {word}", text, re.MULTILINE) for word in MUST_HAVE), folder


def test_the_page_is_short_enough_to_read() -> None:
    assert len(TEXT.splitlines()) <= 150


def test_a_class_name_occurs_once_in_the_project() -> None:
    """A class name must occur once in the project, so that a search finds only one class."""
    places: dict[str, list[str]] = {}
    for folder in ("operator", "trainer"):
        for path in (p for p in (ROOT / folder).rglob("*.py") if "examples" not in p.parts):
            for name in re.findall(r"^ *class (\w+)[(:]", path.read_text(encoding="utf-8"), re.MULTILINE):
                places.setdefault(name, []).append(str(path.relative_to(ROOT)))
    doubled = {name for name, where in places.items() if len(where) > 1}
    assert doubled == set(), {name: places[name] for name in doubled}
