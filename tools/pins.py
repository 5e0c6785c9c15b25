"""Write pins/*.txt: the packages of each image, with the hashes of the wheels for x86_64 and aarch64 (`make pins`).

pip itself chooses the wheels, as it would in the image; nothing is installed. Versions are from constraints.txt. torch
has no hash, because TORCH_INDEX selects among wheels for several platforms (Dockerfile).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tomllib  # type: ignore[import-not-found]  # mypy checks for Python 3.10

ROOT = Path(__file__).parents[1]
ARCHITECTURES = ("x86_64", "aarch64")
PYTHON = "3.11"  # version of Python in the base image
GLIBC = ("2014", "_2_17", "_2_26", "_2_27", "_2_28")  # manylinux tags that Debian bookworm has
# Dependencies of torch, except CUDA libraries.
OF_TORCH = ("filelock", "fsspec", "jinja2", "networkx", "setuptools", "sympy", "typing-extensions")
# The operator's image lacks them, because it holds no command line. The operator must not import them (pyproject.toml).
OF_THE_COMMAND_LINE = ("psutil", "rich")
BUILD = ("hatchling==1.33.0",)


def wanted() -> dict[str, list[str]]:
    """Return the requirements of each image, by the name of its file in pins/."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base, extras = project["dependencies"], project["optional-dependencies"]
    operator = [one for one in base if not one.startswith(OF_THE_COMMAND_LINE)]
    trainer = [one for one in extras["trainer"] if not one.startswith("torch")]
    return {
        "build": list(BUILD),
        "operator": [*operator, *extras["operator"]],
        "trainer": [*base, *trainer, *extras["examples"], *OF_TORCH],
    }


def chosen(requirements: Iterable[str], architecture: str) -> dict[str, str]:
    """Return the SHA-256 of the wheel that pip chooses for each package, by name==version."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        platforms = [word for tag in GLIBC for word in ("--platform", f"manylinux{tag}_{architecture}")]
        command = ["pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--only-binary", ":all:"]
        command += ["--python-version", PYTHON, "--implementation", "cp", *platforms, "--target", folder]
        command += ["--constraint", str(ROOT / "constraints.txt"), "--report", str(report), *requirements]
        subprocess.run([sys.executable, "-m", *command], check=True)
        return dict(map(_hashed, json.loads(report.read_text())["install"]))


def _hashed(one: dict[str, Any]) -> tuple[str, str]:
    about = one["metadata"]
    name = about["name"].lower().replace("_", "-")
    return f"{name}=={about['version']}", one["download_info"]["archive_info"]["hashes"]["sha256"]


def text(of_architectures: Iterable[dict[str, str]]) -> str:
    """Return a requirements file with the hashes of all architectures."""
    hashes: dict[str, set[str]] = {}
    for wheels in of_architectures:
        for name, sha256 in wheels.items():
            hashes.setdefault(name, set()).add(sha256)
    lines = [[name, *(f"--hash=sha256:{sha256}" for sha256 in sorted(hashes[name]))] for name in sorted(hashes)]
    head = "# Made by `make pins` from pyproject.toml and constraints.txt.\n"
    return head + "".join(" \\\n    ".join(line) + "\n" for line in lines)


def main() -> None:
    """Write the requirements files to pins/."""
    for name, requirements in wanted().items():
        (ROOT / "pins" / f"{name}.txt").write_text(text(chosen(requirements, each) for each in ARCHITECTURES))


if __name__ == "__main__":
    main()
