"""What the benches share: the tests' helpers on the path, the command line, and how scripts and figures are handled."""

import argparse
import contextlib
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests/support"), str(ROOT / "tests/simulation")]
BIN = Path(sys.executable).parent
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # as in DDPJobs; torchrun would set the same and print a note


def options(text: str | None, **defaults: Any) -> argparse.Namespace:
    """Read the command line. Each keyword is an option with this default; False makes a switch, a list takes several
    values, and the values have the default's type."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        one = default[0] if isinstance(default, list) else default
        nargs = {"nargs": "+"} if isinstance(default, list) else {}
        more = {"action": "store_true"} if default is False else {"type": type(one), **nargs}
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, help="%(default)s", **more)
    return parser.parse_args()


def machine() -> str:
    """Return CPUs, present load and versions of this machine, to print above measured numbers."""
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    return f"{os.cpu_count()} CPUs, load {load}, Linux {platform.release()}, Python {platform.python_version()}"


def shown(seconds: Sequence[float]) -> str:
    """Return median and maximum as a text."""
    return f"median {statistics.median(seconds):.2f} s, slowest {max(seconds):.2f} s, of {len(seconds)}"


@contextlib.contextmanager
def script(text: str, parent: str | None = None) -> Iterator[Path]:
    """Yield a new folder whose train.py is this text."""
    with tempfile.TemporaryDirectory(dir=parent, ignore_cleanup_errors=True) as folder:
        Path(folder, "train.py").write_text(text)
        yield Path(folder)


def kill(process: psutil.Process) -> None:
    """Send SIGKILL to a process and all its descendants, also those in other sessions."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for one in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
