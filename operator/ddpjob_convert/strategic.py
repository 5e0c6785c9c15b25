"""Merges a patch into a pod template as Kubernetes does: mappings by key, named lists by name, all else replaced."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

# The key by which Kubernetes merges the items of a list.
_MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "schedulingGates": "name",
    "volumeMounts": "mountPath",
}
_APPENDED = {"tolerations"}


def merge(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """A new mapping: `base` with what `patch` has otherwise."""
    merged = dict(base)
    for name, value in patch.items():
        merged[name] = _merged(name, base.get(name), value)
    return merged


def _merged(name: str, old: Any, new: Any) -> Any:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return merge(old, new)
    if isinstance(old, list) and isinstance(new, list):
        if name in _APPENDED:
            return [*old, *(item for item in new if item not in old)]
        if key := _MERGE_KEYS.get(name):
            return _by_key(old, new, key)
    return copy.deepcopy(new)


def _by_key(old: list[Any], new: list[Any], key: str) -> list[Any]:
    found = [dict(item) if isinstance(item, Mapping) else item for item in old]
    for item in new:
        name = item.get(key) if isinstance(item, Mapping) else None
        same = next((i for i, o in enumerate(found) if isinstance(o, dict) and name and o.get(key) == name), None)
        if same is None:
            found.append(copy.deepcopy(item))
        else:
            found[same] = merge(found[same], item)
    return found
