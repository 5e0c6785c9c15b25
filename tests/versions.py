"""Runs the tests of library and agent with each Python from 3.10 on that is installed, with the oldest and the newest
torch.

Use `make test-versions`; docs/versions.md has the results. Each pair has a virtual environment below --folder, which is
made once, because torch is several gigabytes with CUDA. The operator is not tested here: its image has one version of
Python."""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TORCHES = ("2.4", "newest")  # the oldest version that pyproject.toml allows, and the newest
NEEDED = "numpy pytest pytest-timeout pytest-xdist hypothesis psutil pexpect pyte scikit-learn".split()
TESTS = ("tests/trainer", "tests/agent")


def main() -> int:
    options = _options()
    results = [
        (python, torch, _tried(python, Path(path), torch, options))
        for python, path in _interpreters(options.python)
        for torch in options.torch
    ]
    print("\n" + "\n".join(f"Python {python:5} torch {torch:7} {said}" for python, torch, (_, said) in results))
    return 0 if results and all(good for _, _, (good, _) in results) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / ".versions", help="where the environments are kept")
    parser.add_argument("--python", nargs="*", default=PYTHONS, help="versions to look for")
    parser.add_argument("--torch", nargs="*", default=TORCHES, help="2.4, or newest")
    parser.add_argument("--tests", nargs="*", default=TESTS, help="files or folders of tests")
    return parser.parse_args()


def _interpreters(wanted: list[str]) -> Iterator[tuple[str, str]]:
    for version in wanted:
        found = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
        path = shutil.which(f"python{version}") if not found else str(found[-1])
        if path and _is(path, version):
            yield version, path
        else:
            print(f"Python {version} is not on this machine: left out", file=sys.stderr)


def _is(path: str, version: str) -> bool:
    """True if this command runs this version of Python. pyenv has commands also for versions that are not installed."""
    ask = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run([path, "-c", ask], text=True, capture_output=True).stdout.strip() == version


def _tried(version: str, python: Path, torch: str, options: argparse.Namespace) -> tuple[bool, str]:
    """Run the tests. Return True if they passed or this torch does not exist for this Python, and a line about it."""
    folder = options.folder / f"{version}-torch-{torch}"
    problem = _made(folder, python, torch)
    if problem:
        return "no matching distribution" in problem.lower(), problem
    return _tested(folder / "bin" / "python", options.tests)


def _made(folder: Path, python: Path, torch: str) -> str:
    """Create the virtual environment if it does not exist. Return an error in one line; "" if there is none."""
    if (folder / "ready").exists():
        return ""
    subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
    wanted = "torch" if torch == "newest" else f"torch=={torch}.*"
    install = [folder / "bin" / "pip", "install", "--quiet", wanted, *NEEDED, "--editable", ROOT]
    done = subprocess.run(install, text=True, stderr=subprocess.PIPE)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        return f"not installed: {(lines or ['pip failed'])[-1]}"
    (folder / "ready").touch()
    return ""


def _tested(python: Path, tests: list[str]) -> tuple[bool, str]:
    ask = "import sys, torch; print(sys.version.split()[0], 'with torch', torch.__version__)"
    which = subprocess.run([python, "-c", ask], text=True, capture_output=True, check=True).stdout.strip()
    print(f"== Python {which}", flush=True)
    command = [python, "-m", "pytest", "-q", "-n", "0", *tests]
    process = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    last = ""
    for line in process.stdout:
        print(line, end="", flush=True)
        last = line.strip() or last
    return process.wait() == 0, f"({which}): {last.strip('= ')}"


if __name__ == "__main__":
    sys.exit(main())
