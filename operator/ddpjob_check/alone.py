"""Rules about scripts that form no group in this job, so that each rank trains alone."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from typing import Any

from ddpjob_check.local_rank import default_means_alone
from ddpjob_check.nodes import name_of, text_in, words_of
from ddpjob_check.options import UNKNOWN, ScriptOptions
from ddpjob_check.ranks import at
from ddpjob_check.reached import Paths
from ddpjob_check.rule import CheckedJob, Found, rule
from ddpjob_check.script import Script
from ddpjob_check.wrapping import NO_GROUP, imports_only

_ALONE = ("none", "None", "")


@rule(
    "warning",
    wrong='command: [torchrun, train.py]    # add_argument("--launcher", default="none"), and none forms no group',
    right="command: [torchrun, train.py, --launcher, pytorch]",
)
def group_needs_option(script: Script, job: CheckedJob) -> Iterator[Found]:
    """Only in a job with several ranks. The script forms its group only if an option is given. Without it each rank
    trains its own model, and the job succeeds."""
    if not _has_several(job) or default_means_alone(script) is not None:
        return
    options, seen = ScriptOptions(script, job.words), list[tuple[str, Any]]()

    def value(node: ast.expr) -> Any:
        """Return the value that the options give to this expression. `seen` records the options used."""
        value = options.value(node)
        if value is not UNKNOWN and not isinstance(node, ast.Constant) and (found := options.declaration(node)):
            seen.append((found.name, value))
        return value

    paths, forming = Paths(script, value), list(_forming(script))
    if forming and not any(paths.reaches(call) for call in forming) and seen:
        name, default = seen[-1]
        yield at(
            forming[0],
            f"{script.text_of(forming[0].func)}(…) is not reached because {name} is {default!r}: no group is "
            f"formed, and each rank trains alone; give the script another {name}",
        )
    option = None if forming else options.declared.get("launcher")
    # OpenMMLab's scripts have an option --launcher, and form the group in another file.
    is_theirs = option is not None and any(text_in(n) == "pytorch" for n in ast.walk(option.node))
    if option is not None and is_theirs and options.given(option) in _ALONE:
        yield at(
            option.node,
            "--launcher is none: no group is formed, and each rank trains alone; give the script --launcher pytorch",
        )


@rule(
    "warning",
    wrong="model = Net()\nloss.backward()    # no process group, in a job of two nodes",
    right="dist.init_process_group()\nmodel = DistributedDataParallel(Net())",
)
def group_missing(script: Script, job: CheckedJob) -> Iterator[Found]:
    """Only in a job with several ranks, if no import of the script could form a group either. Each rank trains its own
    model, and the job succeeds."""
    imported = script.imported.values()
    asks = script.mentions("distributed") or any("distributed" in name or "parallel" in name for name in imported)
    backwards = script.methods_called("backward") if script.methods_called("step") else []
    if _has_several(job) and backwards and not asks and imports_only(script, _FORM_NO_GROUP):
        yield at(backwards[0], "nothing in this script forms a process group, so each rank trains alone")


_MAY_FORM_ONE = set("ddpjob importlib multiprocessing runpy subprocess".split())
_FORM_NO_GROUP = (NO_GROUP | sys.stdlib_module_names) - _MAY_FORM_ONE


def _has_several(job: CheckedJob) -> bool:
    by_launcher = job.by_torchrun or job.launcher in ("ddprun", "")
    return not job.has_one_rank and ((job.nodes or 1) > 1 or (by_launcher and (job.nproc or 1) > 1))


def _forming(script: Script) -> Iterator[ast.Call]:
    """Yield calls that form the group: torch's, and functions of other files that may, such as init_dist(…)."""
    yield from script.inits
    for call in script.calls:
        name = name_of(call.func)
        words = words_of(name)
        forms = words & {"init", "initialize", "setup"} and words & {"dist", "distributed", "ddp"}
        if forms and call not in script.inits and not script.functions_called(call):
            yield call
