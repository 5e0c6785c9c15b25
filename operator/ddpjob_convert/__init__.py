"""Jobs of other tools as DDPJobs.

In:   documents that are read already: a PyTorchJob or a TrainJob, with the runtime that it names.
Out:  a DDPJob, and remarks. Nothing is dropped silently: a field that was read says what it became, any other gets a
      remark (`fields.py`).

Called by: `ddpjob convert` (ddpjob_cli/commands/convert.py), which reads the files and prints.
Must not know: files, clusters, the clock. What a DDPJob is it takes from `ddpjob_operator.job`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddpjob_convert import others, pytorchjob, trainjob
from ddpjob_convert.fields import ConvertError
from ddpjob_convert.result import Converted
from ddpjob_operator.job import api, podspec
from ddpjob_operator.job.wording import say

KINDS = ("PyTorchJob", "TrainJob")
RUNTIMES = ("ClusterTrainingRuntime", "TrainingRuntime")


def convert(document: Mapping[str, Any], documents: Sequence[Mapping[str, Any]]) -> Converted:
    """The DDPJob of one PyTorchJob or TrainJob. `documents` are all of them, among them the TrainJob's runtime.

    Raises ConvertError with the path of what cannot be converted.
    """
    kind = document.get("kind")
    if kind == "PyTorchJob":
        return pytorchjob.convert(document)
    if kind == "TrainJob":
        runtimes = [other for other in documents if other.get("kind") in RUNTIMES]
        return trainjob.convert(document, runtimes)
    raise ConvertError(("kind",), f"can convert {' and '.join(KINDS)}, not {kind}")


def left_out(document: object) -> str:
    """A document that became no part of a DDPJob, and why."""
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
    if fix := others.advice(document):
        return f"{title}: not converted: {fix}"
    return f"{title}: not converted: only {' and '.join(KINDS)} become DDPJobs; apply it by itself if the job needs it"
