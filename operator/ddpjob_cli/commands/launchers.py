"""Choose the launcher of a script without a command: ddprun if it is installed, unless something needs torchrun."""

from __future__ import annotations

import ast
import os
import shutil
from collections.abc import Iterator, Mapping

from ddpjob_check.nodes import text_in
from ddpjob_check.script import Script
from ddprun import late_environment

DDPRUN, TORCHRUN = NAMES = ("ddprun", "torchrun")
IMAGE = "ddpjob-trainer"  # this project's image, which contains ddprun, from any registry and with any tag
HINT = (
    "In an image with the package ddpjob, ddprun in place of torchrun restarts the ranks in place: ddpjob init "
    "--launcher ddprun."
)
_STORE = "torch.distributed.TCPStore"


def missing_here(environ: Mapping[str, str]) -> str:
    """Return why ddprun cannot start the ranks with torchrun's Python; "" if it can."""
    from ddpjob_cli.local.preparation.pod_process import search_path

    path = search_path(environ.get("PATH", os.defpath))
    ours, torchs = (shutil.which(name, path=path) for name in NAMES)
    if torchs is None:
        return "ddprun needs PyTorch"  # the run then reports that torchrun is missing, and how to install it
    if ours is None or os.path.dirname(ours) != os.path.dirname(torchs):
        return f"{os.path.dirname(torchs)}, where PyTorch is installed, has no ddprun: install the package ddpjob there"
    return ""


def missing_in(image: str) -> str:
    """Return why an image may lack ddprun; "" for this project's image."""
    name = image.rpartition("/")[2].partition("@")[0].partition(":")[0]
    return "" if name == IMAGE else f"{image} may lack ddprun; with the package ddpjob in it, add --launcher ddprun"


def why_torchrun(script: Script) -> Iterator[str]:
    """Yield what in the script works only under torchrun, as a clause with its line."""
    stores = script.calls_to(_STORE)
    if stores and not any(_may_serve(script, call) for call in stores):
        yield f"line {stores[0].lineno} connects to a store that torchrun serves"
    first = min(_imports_of_torch(script), default=None)
    for name, line in _variables_set(script):
        if late_environment.is_read_at_import(name) and (first is None or line < first):
            yield f"line {line} sets {name}, which torch reads while ddprun imports it, before the script runs"


def _may_serve(script: Script, call: ast.Call) -> bool:
    """True unless this TCPStore is certainly a client: the fourth argument, is_master, is False or missing."""
    given = script.argument(call, "is_master", 3)
    return not (given is None or (isinstance(given, ast.Constant) and given.value is False))


def _imports_of_torch(script: Script) -> Iterator[int]:
    for node in ast.walk(script.tree):
        names = (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom) and not node.level
            else []
        )
        if any(name.partition(".")[0] == late_environment.PACKAGE for name in names):
            yield int(getattr(node, "lineno", 0))


def _variables_set(script: Script) -> Iterator[tuple[str, int]]:
    yield from ((name, getattr(where, "lineno", 0)) for name, _, where in script.variables_set)
    for call in script.calls_to("os.environ.setdefault"):
        if call.args:
            yield text_in(call.args[0]), call.lineno
