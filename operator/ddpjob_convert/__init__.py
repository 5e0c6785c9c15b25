"""Convert jobs of other tools into DDPJobs.

In: parsed documents: a PyTorchJob, or a TrainJob with the runtime that it names. Out: a DDPJob, and remarks. No field
is dropped silently: a converted field may have a comment, and any other field gets a remark (`fields.py`). Called by:
`ddpjob convert` (ddpjob_cli/commands/convert.py), which reads the files and prints. Must not use: files, clusters, the
clock. `ddpjob_operator.job` defines DDPJobs.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ddpjob_convert import pytorchjob, trainjob
from ddpjob_convert.fields import ConvertError, walk
from ddpjob_convert.result import Converted
from ddpjob_operator.job import api, podspec
from ddpjob_operator.job.launch import programs
from ddpjob_operator.job.launch.command import PYTHON
from ddpjob_operator.job.wording import say

KINDS = ("PyTorchJob", "TrainJob")
RUNTIMES = ("ClusterTrainingRuntime", "TrainingRuntime")
# Kinds whose pods start a command that may become a DDPJob, and their API groups. Two groups have a kind Job.
_GROUPS = {"Job": ("batch", "batch.volcano.sh"), "MPIJob": ("kubeflow.org",), "JobSet": ("jobset.x-k8s.io",)}
_GROUPS |= {"RayJob": ("ray.io",)}
_LENGTH_MAX = 300


def convert(document: Mapping[str, Any], documents: Sequence[Mapping[str, Any]]) -> Converted:
    """Return the DDPJob of a PyTorchJob or TrainJob, whose runtime is among `documents`. Raise ConvertError."""
    kind = document.get("kind")
    if kind == "PyTorchJob":
        return pytorchjob.convert(document)
    if kind == "TrainJob":
        runtimes = [other for other in documents if other.get("kind") in RUNTIMES]
        return trainjob.convert(document, runtimes)
    raise ConvertError(("kind",), f"can convert {' and '.join(KINDS)}, not {kind}")


def left_out(document: object) -> str:
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
    if fix := advice(document):
        return f"{title}: not converted: {fix}"
    return f"{title}: not converted: only {' and '.join(KINDS)} become DDPJobs; apply it by itself if the job needs it"


def advice(document: Mapping[str, Any]) -> str:
    """Return advice with the `ddpjob convert` command for a job of _GROUPS; "" for any other document."""
    kind, version = document.get("kind"), document.get("apiVersion")
    if not isinstance(kind, str) or not isinstance(version, str) or version.split("/")[0] not in _GROUPS.get(kind, ()):
        return ""
    parts = (part for _, part in walk(document.get("spec")) if isinstance(part, dict))
    container = next((found for part in parts for found in podspec.mappings(part, "containers")), {})
    given = [container.get(part) for part in ("command", "args")]
    words = [word for part in given if isinstance(part, list) for word in part if isinstance(word, str)]
    if words and programs.name(words[0]) in programs.FRAMEWORKS:  # such as `mpirun -np 4 python …`
        words = words[next((i for i, word in enumerate(words) if PYTHON.match(programs.name(word))), len(words)) :]
    line = shlex.join(word.rstrip("\n") for word in words)
    if not words or len(line) > _LENGTH_MAX or "\n" in line:
        line = "COMMAND"
    image = f"--image {shlex.quote(container['image'])} " if isinstance(container.get("image"), str) else ""
    return f"make one of its command: ddpjob convert {image}-- {line}"
