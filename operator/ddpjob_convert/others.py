"""Jobs of other kinds, which become no DDPJob: the command of their pods may, and the refusal names it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from ddpjob_convert.command import is_command, starts_all_ranks
from ddpjob_operator.job import podspec

# By the group of the API, because two of them call their kind Job.
_GROUPS = {"Job": ("batch", "batch.volcano.sh"), "MPIJob": ("kubeflow.org",), "JobSet": ("jobset.x-k8s.io",)}
_GROUPS |= {"RayJob": ("ray.io",)}
_LENGTH_MAX = 300
_DEPTH_MAX = 20


def advice(document: Mapping[str, Any]) -> str:
    """The command that makes a DDPJob of what such a job starts; "" for a document of any other kind."""
    kind, version = document.get("kind"), document.get("apiVersion")
    if not isinstance(kind, str) or not isinstance(version, str) or version.split("/")[0] not in _GROUPS.get(kind, ()):
        return ""
    words, image = _started(document)
    line = shlex.join(word.rstrip("\n") for word in words)
    if not words or len(line) > _LENGTH_MAX or "\n" in line:
        line = "COMMAND"
    option = f"--image {shlex.quote(image)} " if image else ""
    return f"make one of its command: ddpjob convert {option}-- {line}"


def _started(document: Mapping[str, Any]) -> tuple[list[str], str]:
    """The command, without what starts the ranks of all nodes, and the image."""
    spec = podspec.mapping(document, "spec")
    found = list(_containers(spec, 0))
    container = next((c for c in found if any(map(_is_program, _words(c)))), found[0] if found else {})
    words, image = _words(container), container.get("image")
    entrypoint = spec.get("entrypoint")
    if isinstance(entrypoint, str):  # of a RayJob, whose containers start Ray
        try:
            words = shlex.split(entrypoint)
        except ValueError:
            words = []
    if words and starts_all_ranks(words[0]):
        words = next((words[i:] for i in range(1, len(words)) if _is_program(words[i])), [])
    return words, image if isinstance(image, str) else ""


def _is_program(word: str) -> bool:
    return is_command(word) and not re.match(r"[A-Za-z_]\w*=", word) and not starts_all_ranks(word)


def _words(container: Mapping[str, Any]) -> list[str]:
    parts = [container.get(part) for part in ("command", "args")]
    return [word for part in parts if isinstance(part, list) for word in part if isinstance(word, str)]


def _containers(part: Any, depth: int) -> Iterator[dict[str, Any]]:
    """The containers of all templates below, in their order."""
    if depth > _DEPTH_MAX:
        return
    if isinstance(part, dict):
        yield from podspec.mappings(part, "containers")
    for value in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from _containers(value, depth + 1)
