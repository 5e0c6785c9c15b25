"""Images and CI pin their dependencies, so that a replaced package, image or Action is noticed."""

import re
from pathlib import Path

import pytest
import tomllib

import pins as tools_pins

ROOT = Path(__file__).parents[2]
CONSTRAINTS = {
    re.sub("[_.]", "-", name).lower(): version
    for name, version in (
        line.partition(";")[0].split("==") for line in (ROOT / "constraints.txt").read_text().splitlines()
    )
}


def pins(name: str) -> dict[str, str]:
    """Return the version of each package in a requirements file, and check that each has a hash."""
    text = (ROOT / "pins" / f"{name}.txt").read_text().replace(" \\\n", "")
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            match = re.fullmatch(r"([a-z0-9.-]+)==(\S+)(?:\s+--hash=sha256:[0-9a-f]{64})+", line)
            assert match is not None, f"{line[:60]} has no hash"
            found[match[1]] = match[2]
    return found


@pytest.mark.parametrize("name", ["build", "operator", "trainer"])
def test_an_image_installs_the_tested_versions_by_their_hashes(name: str) -> None:
    assert pins(name)
    assert {one: CONSTRAINTS.get(one, version) for one, version in pins(name).items()} == pins(name), "make pins"


def test_the_hashes_cover_all_requirements_of_the_project() -> None:
    """Requirements files with hashes must be complete: pip installs nothing else, so the image would lack a package."""
    for name, requirements in tools_pins.wanted().items():
        required = {re.split(r"[\[<>=;]", one)[0] for one in requirements}
        assert required <= pins(name).keys(), "make pins"


def test_the_operators_image_lacks_what_only_the_command_line_uses() -> None:
    """The operator's image must not grow by packages that it never imports: rich alone brings 10 MB of pygments."""
    left_out = set(tools_pins.OF_THE_COMMAND_LINE)
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = (one for one in contracts if one["name"] == "The operator's image holds the operator alone")
    assert left_out <= set(contract["forbidden_modules"]), "the operator may not import what its image lacks"
    assert left_out <= pins("trainer").keys()
    assert not (left_out | {"pygments", "markdown-it-py", "mdurl"}) & pins("operator").keys(), "make pins"


def test_every_installation_in_the_images_uses_hashes_except_those_of_torch() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text().replace("\\\n", "")
    commands = [one for line in dockerfile.splitlines() if not line.startswith("#") for one in line.split("&&")]
    installed = [one for one in commands if re.search(r"\bpip (--python \S+ )?install ", one)]
    assert len(installed) == 7
    free = [one for one in installed if "--require-hashes" not in one and "--no-index" not in one]
    assert all("torch" in one for one in free), free


def test_every_action_is_pinned_to_a_commit() -> None:
    for workflow in (ROOT / ".github/workflows").glob("*.y*ml"):
        for used in re.findall(r"uses:\s*(\S+)", workflow.read_text()):
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", used), used


def test_a_release_pins_the_base_image_by_its_digest() -> None:
    """A release must name its base image by digest, because each patch release of Python moves the tag."""
    image = (ROOT / "pins/python-image.txt").read_text().strip()
    tag, _, digest = image.partition("@sha256:")
    assert re.fullmatch(r"[0-9a-f]{64}", digest)
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert f"ARG PYTHON_IMAGE={tag}\n" in dockerfile
    assert set(re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE)) == {"${PYTHON_IMAGE}"}
    release = (ROOT / ".github/workflows/release.yaml").read_text()
    assert 'echo "base=$(cat pins/python-image.txt)"' in release
    assert "build-args: PYTHON_IMAGE=${{ steps.name.outputs.base }}" in release
