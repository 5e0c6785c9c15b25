"""Compares a pod template with the API's own description (pod_types.py): wrong values, typos, unknown fields. Every API
server refuses deviations of the kind `wrong`. Only the described version is sure to refuse the others: `misspelled` if
they resemble a known field, else `unknown`."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ddpjob_operator.job import pod_types
from ddpjob_operator.job.typos import Typos
from ddpjob_operator.job.wording import quoted, say

Path = tuple[str | int, ...]
QUANTITY = r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$"
PORT_MAX = 65_535

_ROOT = "PodTemplateSpec"
_RESEMBLES = 0.7  # "valeu" is 0.8 like "value", "comand" 0.92 like "command"; "hostUsers" is 0.67 like "hostAliases"
_OLDER = {"PodSpec": ("workloadRef",)}  # fields that only an older API has
_PORTS = ("containerPort", "hostPort", "port")
_WORDS = {
    ("Container", "imagePullPolicy"): ("Always", "IfNotPresent", "Never"),
    ("Container", "terminationMessagePolicy"): ("FallbackToLogsOnError", "File"),
    ("ContainerPort", "protocol"): ("SCTP", "TCP", "UDP"),
    ("PodSpec", "dnsPolicy"): ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"),
    ("Toleration", "effect"): ("NoExecute", "NoSchedule", "PreferNoSchedule"),
}


@dataclass(frozen=True)
class Deviation:
    path: Path
    message: str
    kind: Literal["wrong", "misspelled", "unknown"]


@dataclass(frozen=True)
class _Field:
    type: str
    is_required: bool


@functools.cache
def fields(name: str) -> tuple[str, ...]:
    return (*_types()[name], *_OLDER.get(name, ()))


def deviations(template: Mapping[str, Any]) -> Iterator[Deviation]:
    """Yield all deviations of any template. A null field is unset."""
    typos = Typos()
    yield from _fields_of(template, _ROOT, (), typos)
    yield from _mounts(template, typos)


def wrong(template: Mapping[str, Any]) -> Iterator[Deviation]:
    """Yield deviations that every API server refuses, in time linear in the size of the template."""
    return (d for d in _fields_of(template, _ROOT, (), Typos(0)) if d.kind == "wrong")


@functools.cache
def _types() -> dict[str, dict[str, _Field]]:
    types: dict[str, dict[str, _Field]] = {}
    for paragraph in re.split(r"\n(?! )", pod_types.TYPES.strip()):
        name, *words = paragraph.split()
        pairs = [word.split("=", 1) for word in words]
        types[name] = {field.rstrip("!"): _Field(kind, field.endswith("!")) for field, kind in pairs}
    return types


@functools.cache
def _required(kind: str) -> tuple[str, ...]:
    return tuple(name for name, field in _types()[kind].items() if field.is_required)


def _fields_of(given: Mapping[Any, Any], kind: str, path: Path, typos: Typos) -> Iterator[Deviation]:
    known = _types()[kind]
    for name, value in given.items():
        field = known.get(str(name))
        if field is not None:
            yield from _value(value, field.type, (*path, str(name)), typos)
            words = _WORDS.get((kind, str(name)), ())
            if words and isinstance(value, str) and value not in words and value:
                text = f"must be one of {', '.join(words)}, is {say(value)}"
                yield Deviation((*path, str(name)), text, "misspelled")
        elif str(name) not in _OLDER.get(kind, ()):
            yield _unknown(str(name), kind, path, typos)
    missing = [name for name in _required(kind) if given.get(name) is None]
    yield from (_wrong(path, f"needs {'a name' if name == 'name' else name}") for name in missing)


def _unknown(name: str, kind: str, path: Path, typos: Typos) -> Deviation:
    typo = typos.meant(name, fields(kind), _RESEMBLES)
    where = (*path, name)
    if typo:
        return Deviation(where, f"unknown field; did you mean {typo}?", "misspelled")
    return Deviation(where, f"unknown field of a {kind} in the API of Kubernetes {pod_types.VERSION}", "unknown")


def _value(value: object, kind: str, path: Path, typos: Typos) -> Iterator[Deviation]:
    if value is None:
        return
    if kind[0] == "[":
        if not isinstance(value, list):
            yield _wrong(path, f"must be a list, is {say(value)}")
            return
        what = "text" if kind == "[text]" else "a mapping"
        yield from (_wrong((*path, i), f"must be {what}, is empty") for i, item in enumerate(value) if item is None)
        for i, item in enumerate(value):
            yield from _value(item, kind[1:-1], (*path, i), typos)
    elif kind[0] == "{":
        if not isinstance(value, Mapping):
            yield _wrong(path, f"must be a mapping, is {say(value)}")
            return
        for name, item in value.items():
            yield from _value(item, kind[1:-1], (*path, str(name)), typos)
    elif kind in _types():
        if isinstance(value, Mapping):
            yield from _fields_of(value, kind, path, typos)
        else:
            yield _wrong(path, f"must be a mapping, is {say(value)}")
    else:
        yield from _plain(value, kind, path)


def _plain(value: object, kind: str, path: Path) -> Iterator[Deviation]:
    is_whole = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
    if kind == "quantity":
        yield from _quantity(value, path)
    elif kind == "text" and not isinstance(value, str):
        yield _wrong(path, f"must be text, is {say(value)}{quoted(value)}")
    elif kind == "bool" and not isinstance(value, bool):
        yield _wrong(path, f"must be true or false, is {say(value)}")
    elif kind in ("int", "number") and not is_whole:
        yield _wrong(path, f"must be a whole number, is {say(value)}")
    elif kind == "int|text" and not (is_whole or isinstance(value, str)):
        yield _wrong(path, f"must be a whole number or a name, is {say(value)}")
    elif path[-1] in _PORTS and isinstance(value, int):
        least = 0 if path[-1] == "hostPort" else 1
        if not least <= value <= PORT_MAX:
            yield _wrong(path, f"must be a port from 1 to {PORT_MAX}, is {value}")


def _quantity(value: object, path: Path) -> Iterator[Deviation]:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    text = value.strip() if isinstance(value, str) else str(value)
    if not (is_number or isinstance(value, str)) or not re.match(QUANTITY, text):
        yield _wrong(path, f"must be a quantity such as 2, 500m or 4Gi, is {say(value)}")
    elif text.startswith("-") and float(re.sub(r"[A-Za-z]+$", "", text.split("e")[0].split("E")[0])):
        yield _wrong(path, f"must not be negative, is {say(value)}")


def _mounts(template: Mapping[str, Any], typos: Typos) -> Iterator[Deviation]:
    """Yield mounts of volumes that the pod does not have."""
    pod = template.get("spec")
    if not isinstance(pod, Mapping):
        return
    volumes = dict.fromkeys(str(v.get("name")) for v in _mappings(pod, "volumes"))
    for listed in ("containers", "initContainers"):
        for i, container in enumerate(_mappings(pod, listed)):
            for j, mount in enumerate(_mappings(container, "volumeMounts")):
                name = mount.get("name")
                if isinstance(name, str) and name not in volumes:
                    typo = typos.meant(name, volumes)
                    fix = f'did you mean "{typo}"?' if typo else "Add it to the pod's volumes."
                    path = ("spec", listed, i, "volumeMounts", j, "name")
                    yield Deviation(path, f"the pod has no volume {say(name)}; {fix}", "misspelled")


def _mappings(given: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Return the items of a list. An item that is no mapping becomes {}, so that all indexes stay correct."""
    listed = given.get(name)
    return [i if isinstance(i, Mapping) else {} for i in listed] if isinstance(listed, list) else []


def _wrong(path: Path, message: str) -> Deviation:
    return Deviation(path, message, "wrong")
