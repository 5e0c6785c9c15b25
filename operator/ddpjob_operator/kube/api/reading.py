"""JSON of the API server as Python objects, bounded in depth and size, because users write it.

Seen on Kubernetes 1.36: a DDPJob whose template is nested 9,900 levels deep is stored, and Python's JSON readers give
up at about 1,000. A reader that gives up on one object would read none of its list, nor what follows it in a watch. So
what is nested too deep is cut off, and what is too large is left out, each in its own object alone.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import AsyncIterator, Callable
from typing import Any, TypedDict

import msgspec
import orjson
from aiohttp import StreamReader

from ddpjob_operator.job import api, bounds, storage

Raw = dict[str, Any]
# etcd takes 1.5 MB. Ours are of some kB; as Python objects it may be 20 times as much.
OBJECT_BYTES_MAX = 512 * 1024
# No field that is kept of a job that is cut has more.
SHORT_BYTES_MAX = 1_024
# From the object's root; deeper than a spec may be (bounds.DEPTH_MAX), so that validation still sees that it is.
DEPTH_KEPT = 80
_CUT = b'"..."'
# Possessive: a pattern that may backtrack keeps 16 bytes for each character of a text, 100 for each escaped one.
_TOKENS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]', re.DOTALL)
_ODD = r"(?:0\d|1[0-8]|9\d|\d{3,18})\d\d-\d\d-\d\dT"
_ODD_DATE = re.compile(_ODD)
# In JSON: where one may be. Also in JSON that is not ASCII, of whose digits Python knows more than bytes do, or empty.
_ODD_DATES = re.compile(rb'\A\Z|[\x80-\xff]|"' + _ODD.encode())
_TOO_LARGE = f'"{bounds.TOO_LARGE}"'.encode()
_GIVE_UP = (orjson.JSONDecodeError, msgspec.DecodeError, RecursionError, ValueError)


class _Metadata(msgspec.Struct, rename="camel", frozen=True):
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class _List(msgspec.Struct, rename="camel", frozen=True):
    api_version: str = ""
    kind: str = ""
    metadata: _Metadata = _Metadata()
    items: list[msgspec.Raw] | None = None


class _Event(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class _Named(TypedDict, total=False):
    name: Any
    restartPolicy: Any


class _Identity(TypedDict, total=False):
    name: Any
    namespace: Any
    uid: Any
    resourceVersion: Any
    labels: Any
    ownerReferences: Any
    deletionTimestamp: Any
    deletionGracePeriodSeconds: Any


class _PodSpec(TypedDict, total=False):
    nodeName: Any
    activeDeadlineSeconds: Any
    schedulingGates: Any
    containers: list[_Named] | None
    initContainers: list[_Named] | None


class _PodStatus(TypedDict, total=False):
    phase: Any
    reason: Any
    message: Any
    startTime: Any
    conditions: Any
    containerStatuses: Any
    initContainerStatuses: Any


class _Pod(TypedDict, total=False):
    metadata: _Identity
    spec: _PodSpec
    status: _PodStatus


class _MetadataAlone(TypedDict, total=False):
    metadata: _Identity


class _Made(TypedDict, total=False):
    kind: Any
    metadata: _Identity


class _NodeStatus(TypedDict, total=False):
    conditions: Any


class _Node(TypedDict, total=False):
    metadata: _Identity
    status: _NodeStatus


class _PodEvent(TypedDict):
    type: str
    object: _Pod


class _ServiceEvent(TypedDict):
    type: str
    object: _MetadataAlone


class _NodeEvent(TypedDict):
    type: str
    object: _Node


# By plural, what observe.py reads of an object and no more: a pod's event takes a fifth of the time (bench/results).
_OBJECTS: dict[str, msgspec.json.Decoder[Any]] = {
    "pods": msgspec.json.Decoder(_Pod),
    "services": msgspec.json.Decoder(_MetadataAlone),
    "nodes": msgspec.json.Decoder(_Node),
}
_MADE = msgspec.json.Decoder(_Made)
METADATA_ALONE = "PartialObjectMetadata"
_EVENTS: dict[str, msgspec.json.Decoder[Any]] = {
    "pods": msgspec.json.Decoder(_PodEvent),
    "services": msgspec.json.Decoder(_ServiceEvent),
    "nodes": msgspec.json.Decoder(_NodeEvent),
}


class ListPage(msgspec.Struct):
    """A page of a list: its objects, the version of the list, and where the next page begins."""

    items: list[Raw]
    version: str
    token: str


class BadJsonError(ValueError):
    """An answer that is no JSON, or not what was asked for."""


def page(content: bytes, plural: str = "") -> ListPage:
    """A page of a list. Each object is made by itself, so that one cannot spoil the others. Raises BadJsonError.

    plural: what is listed; of pods, Services and nodes only what is read is kept, of DDPJobs as `stored_job` has it.
    """
    listed = _decode(content, _List)
    if not listed.metadata.resource_version:
        raise BadJsonError("the answer is no list")
    return ListPage(
        items=[_object(bytes(item), plural) for item in listed.items or ()],
        version=listed.metadata.resource_version,
        token=listed.metadata.continue_,
    )


async def lines(content: StreamReader) -> AsyncIterator[bytes]:
    """aiohttp's own lines end at 128 kB, and an object may be longer."""
    parts: list[bytes] = []
    async for chunk in content.iter_any():
        *whole, rest = chunk.split(b"\n")
        for line in whole:
            parts.append(line)
            if joined := b"".join(parts):
                yield joined
            parts = []
        parts.append(rest)


def event(line: bytes, plural: str = "") -> Raw:
    """An event of a watch. plural: what is watched, as for `page`. Raises BadJsonError."""
    cut = _cut(line, _EVENTS.get(plural))
    if cut is not None and cut["type"] != "ERROR":  # its object is a Status
        return cut
    decoded = _decode(line, _Event)
    read = stored_job if plural == api.PLURAL and decoded.type != "ERROR" else obj
    return {"type": decoded.type, "object": read(bytes(decoded.object))}


def _object(content: bytes, plural: str) -> Raw:
    if plural == api.PLURAL:
        return stored_job(content)
    return _cut(content, _OBJECTS.get(plural)) or obj(content)


def stored_job(content: bytes) -> Raw:
    """A DDPJob of a list or a watch. Of a large one that has not begun only what is kept of it is made: there may be
    thousands. Raises BadJsonError."""
    if storage.size_of_json(content) <= storage.SMALL:
        return obj(content)
    parts = _parts(content)
    metadata, spec = _parts(parts.get("metadata")), _parts(parts.get("spec"))
    status = parts.get("status")
    raw = {
        "metadata": _short(metadata),
        "spec": _short(spec),
        "status": _loads(bytes(status)) if status is not None and len(bytes(status)) <= OBJECT_BYTES_MAX // 2 else {},
    }
    written = [bytes(part) for name, part in metadata.items() if name != "managedFields"]
    size = storage.OF_A_JOB + sum(map(storage.size_of_json, [*written, *(bytes(part) for part in spec.values())]))
    if size <= storage.SMALL or storage.has_begun(raw):
        return obj(content)
    return storage.cut(raw, size)


def _parts(content: bytes | msgspec.Raw | None) -> dict[str, msgspec.Raw]:
    """The fields of an object as JSON; none where it is no object."""
    text = b"" if content is None else bytes(content)
    return _decode(text, dict[str, msgspec.Raw]) if text[:1] == b"{" else {}


def _short(fields: dict[str, msgspec.Raw]) -> Raw:
    return {name: _loads(text) for name, one in fields.items() if len(text := bytes(one)) <= SHORT_BYTES_MAX}


def obj(content: bytes) -> Raw:
    """An object without its managedFields, which are as long as all the rest. Raises BadJsonError."""
    raw = _without_what_is_large(content) if len(content) > OBJECT_BYTES_MAX else _loads(content)
    if not isinstance(raw, dict):
        raise BadJsonError("the answer is no object")
    if isinstance(raw.get("metadata"), dict):
        raw["metadata"].pop("managedFields", None)
    return raw


def made(content: bytes) -> Raw:
    """The answer to a create: of its metadata alone, where that is all that came, what is read; else the object. Raises
    BadJsonError."""
    cut = _cut(content, _MADE)
    return cut if cut is not None and cut.get("kind") == METADATA_ALONE and "metadata" in cut else obj(content)


def _cut(content: bytes, decoder: msgspec.json.Decoder[Any] | None) -> Raw | None:
    """The fields that the decoder has; None where it has none for this kind, or the object has another shape."""
    if decoder is None or len(content) > OBJECT_BYTES_MAX:
        return None
    try:
        cut: Raw = decoder.decode(content)
    except _GIVE_UP:
        return None
    return cut


def job(raw: Raw) -> Raw:
    """A DDPJob without what is too deep or too large: its template and its status may hold anything."""
    spec, status = raw.get("spec"), raw.get("status")
    if not _is_small(_json(spec)) and (why := bounds.refused(spec)):
        raw["spec"] = bounds.too_large(why)
    text = _json(status)
    if not _is_small(text) and (why := bounds.refused(status)):
        raw["status"] = {"state": bounds.too_large(why)}  # no state, so that it is not taken for an empty status
    elif status and _ODD_DATES.search(text):
        raw["status"] = _with_true_dates(status)
    return raw


def _json(value: Any) -> bytes:
    """What was decoded from JSON, as JSON; empty where it is nested too deep to be written again."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return b""


def _is_small(text: bytes) -> bool:
    """Whether JSON is surely within the bounds of a spec, by its length and its brackets alone: a twentieth of the time
    of a walk, and nearly all jobs are. No value is shorter than a character, no level has less than a bracket."""
    brackets = text.count(b"{") + text.count(b"[")
    return 0 < len(text) <= bounds.SPEC_VALUES_MAX and brackets < bounds.DEPTH_MAX and _TOO_LARGE not in text


def _with_true_dates(value: Any) -> Any:
    """A status without the year 9999, beyond which nothing can be reckoned: the API server takes any year."""
    if isinstance(value, dict):
        return {key: _with_true_dates(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_with_true_dates(one) for one in value]
    if isinstance(value, str) and _ODD_DATE.match(value) and (at := bounds.time(value)):
        return at.isoformat()
    return value


def shallow(content: bytes) -> bytes:
    """The JSON with "..." in the place of what is nested deeper than DEPTH_KEPT; its order and strings stay."""
    kept: list[bytes | memoryview] = []
    depth = at = 0
    view = memoryview(content)  # nothing is copied twice
    for token in _TOKENS.finditer(content):
        character = content[token.start()]
        if character in b"[{":
            depth += 1
            if depth == DEPTH_KEPT + 1:
                kept += [view[at : token.start()], _CUT]
        elif character in b"]}":
            if depth == DEPTH_KEPT + 1:
                at = token.end()
            depth -= 1
    return b"".join([*kept, view[at:]]) if depth == 0 else content


def _loads(content: bytes) -> Any:
    return _read(content, orjson.loads)


def _decode(content: bytes, kind: Any) -> Any:
    """As a type that leaves what it does not need as bytes."""
    return _read(content, functools.partial(msgspec.json.decode, type=kind))


def _read(content: bytes, read: Callable[[bytes], Any]) -> Any:
    with contextlib.suppress(*_GIVE_UP):
        return read(content)
    # No JSON, or nested deeper than 1,024 levels.
    try:
        return read(shallow(content))
    except _GIVE_UP as error:
        raise BadJsonError(str(error)) from None


def _without_what_is_large(content: bytes) -> Raw:
    """An object whose spec or status is left out: never made, for in Python it may be 20 times as large."""
    parts = _decode(content, dict[str, msgspec.Raw])
    kept: Raw = {}
    for name, part in parts.items():
        if len(bytes(part)) <= OBJECT_BYTES_MAX // 2:
            kept[name] = _loads(bytes(part))
        elif name == "metadata":
            kept[name] = _identity(bytes(part))
        else:
            why = f"has {len(bytes(part))} bytes of JSON, and at most {OBJECT_BYTES_MAX // 2} are read."
            kept[name] = bounds.too_large(why)
    return kept


def _identity(metadata: bytes) -> Raw:
    fields = _decode(metadata, dict[str, msgspec.Raw])
    return {name: _loads(bytes(field)) for name, field in fields.items() if len(bytes(field)) <= 65_536}
