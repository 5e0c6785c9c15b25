"""The program `ddpjob-operator`.

kopf and uvloop are imported only at a start, so that `--help` is fast and a missing extra is one line, no traceback.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from importlib import metadata

# Packages of the extra `operator` that the operator cannot start without.
NEEDED = ("aiohttp", "jwt", "kopf", "kubernetes", "orjson", "uvloop")

ABOUT = """Run the operator for DDPJobs until SIGTERM. Its settings are environment variables, which the chart sets
(charts/ddpjob-operator/README.md). In a cluster it uses the pod's service account, elsewhere KUBECONFIG."""
EXAMPLE = """example: helm install ddpjob charts/ddpjob-operator --namespace ddpjob --create-namespace"""


def main() -> None:
    """Run the console script. Exit with 2 if an argument is wrong or a package is missing."""
    sys.exit(start(sys.argv[1:]))


def start(arguments: Sequence[str]) -> int:
    """Answer --help and --version, or run the operator. Return the exit code; argparse and the operator raise
    SystemExit.
    """
    parser = argparse.ArgumentParser(
        "ddpjob-operator", "ddpjob-operator", ABOUT, EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"ddpjob-operator {metadata.version('ddpjob')}")
    parser.add_argument(
        "--log-format", choices=("text", "json"), help="text for people, json for a log store; else DDPJOB_LOG_FORMAT"
    )
    options = parser.parse_args(arguments)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"ddpjob-operator: {missing[0]} is not installed: pip install 'ddpjob[operator]'", file=sys.stderr)
        return 2
    from ddpjob_operator.kube.main import main as run

    run(options.log_format)
    return 0
