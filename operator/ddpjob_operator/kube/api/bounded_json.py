"""Parses JSON of the API server, bounded in depth and size, because users write it.

Kubernetes 1.36 stores a DDPJob whose template is nested 9,900 levels deep; Python's JSON parsers fail at about 1,000.
One such object would make its whole list unreadable, and end its watch. So nesting beyond the limit is cut off and
parts beyond the limit are left out, only in this object.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, TypedDict, TypeVar

import msgspec
import orjson
from aiohttp import StreamReader

from ddpjob_operator.job import api, bounds, storage

T = TypeVar("T")
Raw = dict[str, Any]
# etcd accepts 1.5 MB. Our objects have a few kB; Python objects may need 20 times the bytes of their JSON.
OBJECT_BYTES_MAX = 512 * 1024
# Bytes; longer fields are dropped if a job is kept only in part.
SHORT_BYTES_MAX = 1_024
# JSON levels that are kept: more than bounds.DEPTH_MAX, so that validation still detects specs that are too deep.
DEPTH_KEPT = 80
_CUT = b'"..."'
# Possessive quantifiers, because backtracking would need 16 bytes per character of a string, 100 if it is escaped.
_TOKENS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]', re.DOTALL)
_ODD = r"(?:0\d|1[0-8]|9\d|\d{3,18})\d\d-\d\d-\d\dT"
_ODD_DATE = re.compile(_ODD)
# Matches JSON that may hold a date before 1900 or after 8999.
# The pattern also matches empty JSON, and all non-ASCII JSON: \d matches more digits in str than in bytes.
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


class _Event(msgspec.Struct, Generic[T]):
    type: str
    object: T


class _Container(TypedDict, total=False):
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


class _Spec(TypedDict, total=False):
    nodeName: Any
    activeDeadlineSeconds: Any
    schedulingGates: Any
    containers: list[_Container] | None
    initContainers: list[_Container] | None


class _Status(TypedDict, total=False):
    phase: Any
    reason: Any
    message: Any
    startTime: Any
    podIP: Any
    conditions: Any
    containerStatuses: Any
    initContainerStatuses: Any


class _Object(TypedDict, total=False):
    kind: Any
    metadata: _Identity
    spec: _Spec
    status: _Status


# Only the fields that observe.py reads are kept, which makes handling a pod event five times faster (bench/results).
_CUT_KINDS = frozenset({"pods", "services", "nodes"})
_OBJECT: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_Object)
_EVENT: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_Event[_Object])
METADATA_ALONE = "PartialObjectMetadata"


class ListPage(msgspec.Struct):
    """A page of a list: its objects, the version of the list, and the token of the next page."""

    items: list[Raw]
    version: str
    token: str


class BadJsonError(ValueError):
    """The answer is not JSON, or not what was requested."""


def page(content: bytes, plural: str = "") -> ListPage:
    """Parse a page of a list, object by object, so that a bad object does not affect the others. Raise BadJsonError.

    plural: the kind. Pods, Services and nodes keep only the fields that observe.py reads; DDPJobs: see `stored_job`.
    """
    listed = _decode(content, _List)
    if not listed.metadata.resource_version:
        raise BadJsonError("the answer is not a list")
    return ListPage(
        items=[_object(bytes(item), plural) for item in listed.items or ()],
        version=listed.metadata.resource_version,
        token=listed.metadata.continue_,
    )


def listed(content: bytes) -> Raw:
    """Parse a short list as a whole. Raise BadJsonError."""
    return {"items": page(content).items}


async def lines(content: StreamReader) -> AsyncIterator[bytes]:
    """Yield lines of any length: aiohttp's own readers fail at 128 kB."""
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
    """Parse an event of a watch. plural: as for `page`. Raise BadJsonError."""
    cut = _cut(line, _EVENT) if plural in _CUT_KINDS else None
    if cut is not None and cut.type != "ERROR":  # the object of an ERROR event is a Status
        return {"type": cut.type, "object": cut.object}
    decoded = _decode(line, _Event[msgspec.Raw])
    read = stored_job if plural == api.PLURAL and decoded.type != "ERROR" else obj
    return {"type": decoded.type, "object": read(bytes(decoded.object))}


def _object(content: bytes, plural: str) -> Raw:
    if plural == api.PLURAL:
        return stored_job(content)
    return (_cut(content, _OBJECT) if plural in _CUT_KINDS else None) or obj(content)


def stored_job(content: bytes) -> Raw:
    """Parse a DDPJob of a list or a watch. Keep only a part of a large job that has not begun, because there may be
    thousands of them. Raise BadJsonError.
    """
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
    """Return the fields of an object as JSON; {} if it is not an object."""
    text = b"" if content is None else bytes(content)
    return _decode(text, dict[str, msgspec.Raw]) if text[:1] == b"{" else {}


def _short(fields: dict[str, msgspec.Raw]) -> Raw:
    return {name: _loads(text) for name, one in fields.items() if len(text := bytes(one)) <= SHORT_BYTES_MAX}


def obj(content: bytes) -> Raw:
    """Parse an object without its managedFields, which double its size. Raise BadJsonError."""
    raw = _without_what_is_large(content) if len(content) > OBJECT_BYTES_MAX else _loads(content)
    if not isinstance(raw, dict):
        raise BadJsonError("the answer is not an object")
    if isinstance(raw.get("metadata"), dict):
        raw["metadata"].pop("managedFields", None)
    return raw


def made(content: bytes) -> Raw:
    """Parse the answer to a create: the object, or only its metadata. Raise BadJsonError."""
    cut = _cut(content, _OBJECT)
    return cut if cut is not None and cut.get("kind") == METADATA_ALONE and "metadata" in cut else obj(content)


def _cut(content: bytes, decoder: msgspec.json.Decoder[Any]) -> Any:
    """Return the fields that the decoder knows; None if the object has another shape."""
    try:
        return decoder.decode(content) if len(content) <= OBJECT_BYTES_MAX else None
    except _GIVE_UP:
        return None


def job(raw: Raw) -> Raw:
    """Return a DDPJob without too deep or too large parts, because template and status may contain anything."""
    spec, status = raw.get("spec"), raw.get("status")
    if not _is_small(_json(spec)) and (why := bounds.refused(spec)):
        raw["spec"] = bounds.too_large(why)
    text = _json(status)
    if not _is_small(text) and (why := bounds.refused(status)):
        raw["status"] = {"state": bounds.too_large(why)}  # not {}, because a job without a state looks new
    elif status and _ODD_DATES.search(text):
        raw["status"] = _with_true_dates(status)
    return raw


def _json(value: Any) -> bytes:
    """Return a value as JSON; b"" if the value is nested too deep."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return b""


def _is_small(text: bytes) -> bool:
    """True if the length and the number of brackets show that JSON is within the bounds of a spec: every value has a
    character, and every level a bracket. This suffices for nearly all jobs, and is 20 times as fast as a walk.
    """
    brackets = text.count(b"{") + text.count(b"[")
    return 0 < len(text) <= bounds.SPEC_VALUES_MAX and brackets < bounds.DEPTH_MAX and _TOO_LARGE not in text


def _with_true_dates(value: Any) -> Any:
    """Return a status with dates limited to TIME_FIRST to TIME_LAST, because the API server accepts any year."""
    if isinstance(value, dict):
        return {key: _with_true_dates(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_with_true_dates(one) for one in value]
    if isinstance(value, str) and _ODD_DATE.match(value) and (at := bounds.time(value)):
        return at.isoformat()
    return value


def shallow(content: bytes) -> bytes:
    """Replace what is nested deeper than DEPTH_KEPT by "..."; order and strings stay."""
    kept: list[bytes | memoryview] = []
    depth = at = 0
    view = memoryview(content)  # avoids copies
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


def _decode(content: bytes, kind: Any) -> Any:
    """Decode into a type. Its fields of type msgspec.Raw stay bytes."""
    return _loads(content, functools.partial(msgspec.json.decode, type=kind))


def _loads(content: bytes, read: Callable[[bytes], Any] = orjson.loads) -> Any:
    with contextlib.suppress(*_GIVE_UP):
        return read(content)
    # Not JSON, or nested deeper than 1,024 levels.
    try:
        return read(shallow(content))
    except _GIVE_UP as error:
        raise BadJsonError(str(error)) from None


def _without_what_is_large(content: bytes) -> Raw:
    """Parse an object, but leave out its spec or status if either is too large."""
    parts = _decode(content, dict[str, msgspec.Raw])
    kept: Raw = {}
    for name, part in parts.items():
        if len(bytes(part)) <= OBJECT_BYTES_MAX // 2:
            kept[name] = _loads(bytes(part))
        elif name == "metadata":
            fields = _decode(bytes(part), dict[str, msgspec.Raw])
            kept[name] = {key: _loads(text) for key, one in fields.items() if len(text := bytes(one)) <= 65_536}
        else:
            why = f"has {len(bytes(part))} bytes of JSON, and at most {OBJECT_BYTES_MAX // 2} are read."
            kept[name] = bounds.too_large(why)
    return kept
