"""Converts jobs of other tools into DDPJobs.

In: parsed documents: a PyTorchJob, or a TrainJob with the runtime that it names. Out: a DDPJob, and remarks. Nothing is
dropped silently: a field that is read says what it became, and any other gets a remark (`fields.py`). Called by:
`ddpjob convert` (ddpjob_cli/commands/convert.py), which reads the files and prints. Must not know: files, clusters, the
clock. `ddpjob_operator.job` defines what a DDPJob is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddpjob_convert import pytorchjob, trainjob
from ddpjob_convert.fields import ConvertError
from ddpjob_convert.result import Converted
from ddpjob_operator.job import api, podspec
from ddpjob_operator.job.wording import say

KINDS = ("PyTorchJob", "TrainJob")
RUNTIMES = ("ClusterTrainingRuntime", "TrainingRuntime")
OF_COMMAND = "make one of the command that it starts: ddpjob convert --image IMAGE -- COMMAND"
# Kinds whose pods start a command that may become a DDPJob.
_OTHER_JOBS = ("Job", "MPIJob", "JobSet", "RayJob")


def convert(document: Mapping[str, Any], documents: Sequence[Mapping[str, Any]]) -> Converted:
    """Return the DDPJob of one PyTorchJob or TrainJob. `documents` are all, including the TrainJob's runtime. Raise
    ConvertError with the path of what cannot be converted."""
    kind = document.get("kind")
    if kind == "PyTorchJob":
        return pytorchjob.convert(document)
    if kind == "TrainJob":
        runtimes = [other for other in documents if other.get("kind") in RUNTIMES]
        return trainjob.convert(document, runtimes)
    raise ConvertError(("kind",), f"can convert {' and '.join(KINDS)}, not {kind}")


def left_out(document: object) -> str:
    """Return a remark about a document that is in no DDPJob, with the reason."""
    if not isinstance(document, Mapping):
        return f"not converted: it is {say(document)}, not an object"
    kind, name = document.get("kind"), podspec.mapping(document, "metadata").get("name")
    if not isinstance(kind, str):
        return f"not converted: its kind is {say(kind)}"
    title = f"{kind} {name}" if isinstance(name, str) else kind
    if kind in RUNTIMES:
        return f"{title}: not converted: no TrainJob here has it as its runtimeRef"
    if kind == api.KIND:
        return f"{title}: not converted: it is a DDPJob already"
    if kind in _OTHER_JOBS:
        return f"{title}: not converted: {OF_COMMAND}"
    return f"{title}: not converted: only {' and '.join(KINDS)} become DDPJobs; apply it by itself if the job needs it"
