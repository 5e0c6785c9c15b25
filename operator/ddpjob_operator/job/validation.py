"""Validates a DDPJob: names the wrong field, its value and the fix. The command line adds file and line, the operator
writes the condition Accepted, and `crd.py` writes the RULES between fields into the CRD."""

from __future__ import annotations

import functools
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec
from msgspec import Struct, inspect

from ddpjob_operator.job import api, bounds, launcher, template
from ddpjob_operator.job.bounds import NOT_READABLE
from ddpjob_operator.job.typos import Typos, suggestion
from ddpjob_operator.job.wording import quoted, say

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Problem:
    path: Path
    message: str
    unreadable: bool = False
    """True if no pod can be created, because the template is malformed."""

    def __str__(self) -> str:
        return f"{dotted(self.path)}: {self.message}" if self.path else self.message


@dataclass(frozen=True)
class SpecRule:
    """A rule that types cannot express: `cel` for the API server, `broken` for parse(), one sentence for both."""

    field: str
    cel: str
    broken: Callable[[api.Spec], bool]
    message: str


NOT_A_JOB = "a DDPJob is a mapping with apiVersion, kind, metadata and spec"
MPI_REFUSED = '"mpi" needs a PyTorch built with MPI; no published wheel has it. Use gloo (CPU) or nccl (GPU).'

WINDOWED_LIMIT_MAX = 100
PROBLEMS_MAX = 200  # problems of a template that are reported; each takes 20 µs, and a tenant may write 9,000
LABEL_KEY = "^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
_RESEMBLES = 0.8  # smallest similarity of a typo; "comand" and "command" have 0.92

RULES = (
    SpecRule("backend", "!has(self.backend) || self.backend != 'mpi'", lambda s: s.backend == "mpi", MPI_REFUSED),
    SpecRule(
        "minNodes",
        "!has(self.minNodes) || self.minNodes <= self.nodes",
        lambda s: s.min_nodes is not None and s.min_nodes > s.nodes,
        "must be at most spec.nodes. Lower minNodes, or raise nodes.",
    ),
    SpecRule(
        "backoffWindowSeconds",
        f"!has(self.backoffWindowSeconds) || !has(self.backoffLimit) || self.backoffLimit <= {WINDOWED_LIMIT_MAX}",
        lambda s: s.backoff_window_seconds is not None and s.backoff_limit > WINDOWED_LIMIT_MAX,
        f"needs a backoffLimit of at most {WINDOWED_LIMIT_MAX}: the status keeps the time of each restart. Lower it.",
    ),
    SpecRule(
        "gang",
        "!has(self.topologyKey) || self.topologyKey == '' || !has(self.gang) || self.gang != 'none'",
        lambda s: bool(s.topology_key) and s.gang == "none",
        "none schedules pods one by one, but topologyKey needs a gang. Set gang to native or auto, or remove "
        "topologyKey.",
    ),
    SpecRule(
        "topologyKey",
        f"!has(self.topologyKey) || self.topologyKey == '' || self.topologyKey.matches('{LABEL_KEY}')",
        lambda s: bool(s.topology_key) and not re.fullmatch(LABEL_KEY.strip("^$"), s.topology_key),
        "must be the key of a node label, such as topology.kubernetes.io/rack.",
    ),
)

# The template fields that are read to make a pod, as names without list indexes. The API server checks all others.
_OF_CONTAINERS = "name command args workingDir ports env env.name env.value volumeMounts volumeMounts.name resources"
_AFFINITY = "affinity.{}.requiredDuringSchedulingIgnoredDuringExecution"
_READ = frozenset(
    tuple(name.split("."))
    for name in (
        *("metadata", "metadata.labels", "metadata.annotations", "spec"),
        *(f"spec.{name}" for name in "containers initContainers restartPolicy affinity volumes volumes.name".split()),
        *(f"spec.volumes.{name}" for name in ("emptyDir", "hostPath")),
        *(f"spec.affinity.{name}" for name in ("podAntiAffinity", "nodeAffinity")),
        *(f"spec.{_AFFINITY.format(kind)}" for kind in ("podAntiAffinity", "nodeAffinity")),
        *(f"spec.{_AFFINITY.format('nodeAffinity')}.nodeSelectorTerms{name}" for name in ("", ".matchFields")),
        *(f"spec.containers.{name}" for name in _OF_CONTAINERS.split()),
        *(f"spec.containers.resources.{name}" for name in ("limits", "requests")),
    )
)


def parse(raw: object, *, hints: bool = True) -> tuple[api.DDPJob, list[Problem]]:
    """Return the job in `raw` and all its problems. There is a job for any `raw`, with defaults for unreadable fields,
    so that problems can be reported with the job's name. hints: suggest fixes for typos; the operator does not, because
    a tenant may write thousands of names."""
    typos = Typos() if hints else Typos(0)
    if not isinstance(raw, Mapping):
        return api.DDPJob(), [Problem((), f"{NOT_A_JOB}, not {say(raw)}")]
    problems = _Found(_kind(raw))
    problems.typos = typos
    status = _lenient(raw.get("status"), api.Status)
    metadata = _lenient(raw.get("metadata"), api.Metadata)
    given = raw.get("spec", {})
    if why := bounds.refused(given):
        return api.DDPJob(metadata=metadata, status=status), [*problems, Problem(("spec",), why)]
    spec = typing.cast(api.Spec, _convert(given, api.Spec, ("spec",), problems) or api.Spec())
    job = api.DDPJob(metadata=metadata, spec=spec, status=status)
    problems += _unknown(raw, ("apiVersion", "kind", "metadata", "spec", "status"), (), typos)
    problems += _name(raw)
    if not any(p.path[:1] == ("spec",) for p in problems):
        problems += check(spec, typos)
    elif "template" not in {p.path[1] for p in problems if len(p.path) == 2}:
        problems += _template(spec.template, typos)
    return job, problems


class UnreadableJobError(ValueError):
    """A part of a stored job that cannot be read; the text names the field and the value."""


def stored_metadata(raw: Mapping[str, Any]) -> api.Metadata:
    return typing.cast(api.Metadata, _stored(raw, "metadata", api.Metadata))


def stored_status(raw: Mapping[str, Any]) -> api.Status:
    """Return the status of a stored job. Raise UnreadableJobError: an unreadable status must not count as empty."""
    return typing.cast(api.Status, _stored(raw, "status", api.Status))


def check(spec: api.Spec, typos: Typos) -> Iterator[Problem]:
    """Yield problems of a spec whose fields have the right types."""
    wrong = {rule.field: rule.message for rule in RULES if rule.broken(spec)}
    yield from (Problem(("spec", name), message) for name, message in wrong.items())
    misshapen = [*_template(spec.template, typos)]
    yield from misshapen
    if not any(p.unreadable for p in misshapen):
        yield from (Problem(path, text) for path, text in launcher.contradictions(spec))


def dotted(path: Path) -> str:
    """Return a path as text, such as spec.template.spec.containers[0].name."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _kind(raw: Mapping[Any, Any]) -> Iterator[Problem]:
    if raw.get("kind") != api.KIND:
        yield Problem(("kind",), f"must be {api.KIND}, is {say(raw.get('kind'))}")
    elif raw.get("apiVersion") != api.API_VERSION:
        yield Problem(("apiVersion",), f"must be {api.API_VERSION}, is {say(raw.get('apiVersion'))}")
    if "spec" not in raw:
        yield Problem((), "spec is missing: set at least spec.nodes and spec.template")


def _name(raw: Mapping[Any, Any]) -> Iterator[Problem]:
    metadata = raw.get("metadata")
    if not isinstance(metadata, Mapping):
        yield Problem(("metadata",), f"must be a mapping with a name, is {say(metadata)}")
        return
    name = metadata.get("name")
    if not isinstance(name, str) or not name:
        yield Problem(("metadata", "name"), f"must be a name, is {say(name)}{quoted(name)}")
    elif len(name) > api.NAME_LENGTH_MAX:
        why = f"must have at most {api.NAME_LENGTH_MAX} characters (its pods' hostnames add a rank), has {len(name)}"
        yield Problem(("metadata", "name"), why)
    elif not re.match(api.NAME_PATTERN, name):
        why = "must be lower-case letters, digits and -, from a letter to a letter or digit (it names a Service)"
        why += f", is {say(name)}"
        yield Problem(("metadata", "name"), why)


def strict(spec: api.Spec) -> Iterator[Problem]:
    """Yield further problems: the API server of pod_types.py's version refuses these, a newer one may accept them."""
    found = template.deviations(spec.template)
    yield from (Problem(("spec", "template", *d.path), d.message) for d in found if d.kind == "misspelled")


def _template(given: Mapping[str, Any], typos: Typos) -> Iterator[Problem]:
    path: Path = ("spec", "template")
    shape = [Problem((*path, *place), text, unreadable=True) for place, text in _shape_of(given)]
    yield from shape
    named = {p.path for p in shape}
    wrong = list(islice(template.wrong(given), PROBLEMS_MAX + 1))
    for deviation in wrong[:PROBLEMS_MAX]:
        where: Path = (*path, *deviation.path)
        if not any(where[:length] in named for length in range(len(where) + 1)):
            # Problems of other fields do not prevent a pod from being made; the API server refuses them by itself.
            names = tuple(part for part in deviation.path if isinstance(part, str))
            yield Problem(where, deviation.message, unreadable=names in _READ or len(wrong) > PROBLEMS_MAX)
    pod = given.get("spec")
    if isinstance(pod, Mapping):
        yield from _misspelled(pod, "PodSpec", (*path, "spec"), typos)
        containers = pod.get("containers")
        for i, container in enumerate(containers if isinstance(containers, list) else ()):
            if isinstance(container, Mapping):
                yield from _misspelled(container, "Container", (*path, "spec", "containers", i), typos)


def _shape_of(given: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    """Yield problems for which there is a clearer message than the one about types."""
    pod = given.get("spec")
    if not isinstance(pod, Mapping):
        yield ("spec",) if pod is not None else (), "needs a spec with at least one container"
        return
    containers = pod.get("containers")
    if not isinstance(containers, list) or not containers:
        yield ("spec", "containers") if "containers" in pod else ("spec",), "needs at least one container"
        return
    grace = pod.get("terminationGracePeriodSeconds")
    if grace is not None and bounds.integer(grace, 0, api.SECONDS_MAX) is None:
        text = f"must be a whole number of at most {api.SECONDS_MAX}, is {say(grace)}"
        yield ("spec", "terminationGracePeriodSeconds"), text
    for i, container in enumerate(containers):
        where: Path = ("spec", "containers", i)
        if not isinstance(container, Mapping):
            yield where, f"must be a mapping with name and image, is {say(container)}"
            continue
        if not isinstance(container.get("name"), str):
            yield (*where, "name") if "name" in container else where, "needs a name, such as trainer"
        for name in ("command", "args"):
            value = container.get(name)
            if value is not None and not isinstance(value, list):
                text = f"must be a list of words, is {say(value)}. Write [{', '.join(str(value).split())}]."
                yield (*where, name), text


def _misspelled(given: Mapping[Any, Any], kind: str, path: Path, typos: Typos) -> Iterator[Problem]:
    """Yield only fields that closely resemble a known field, because a newer API server may know other fields."""
    known = frozenset(template.fields(kind))
    for name in map(str, given if typos.left else ()):
        if name not in known and (close := typos.meant(name, template.fields(kind), _RESEMBLES)):
            yield Problem((*path, name), f"unknown field; did you mean {close}?")


def _unknown(raw: Mapping[Any, Any], known: typing.Iterable[str], path: Path, typos: Typos) -> Iterator[Problem]:
    known = list(known)
    for name in raw:
        if name not in known:
            hint = suggestion(str(name), known, typos) if typos.left else ""
            yield Problem((*path, str(name)), f"unknown field{hint}")


def _stored(raw: Mapping[str, Any], name: str, kind: type[Struct]) -> Struct:
    given = raw.get(name)
    try:
        return msgspec.convert({} if given is None else given, kind, strict=False)
    except (*NOT_READABLE, OverflowError) as error:
        what, _, where = str(error).partition(" - at `$")
        # Truncate both texts, because a key may have any length.
        raise UnreadableJobError(f"{name}{where.rstrip('`')[:200]}: {what[:200]}") from None


def _lenient(raw: object, kind: type[Any]) -> Any:
    """Return a part of a job from the API server, with defaults for values that this version cannot read."""
    try:
        return msgspec.convert(raw if isinstance(raw, Mapping) else {}, kind, strict=False)
    except msgspec.ValidationError:
        name = raw.get("name") if isinstance(raw, Mapping) else None
        return kind(name=name) if kind is api.Metadata and isinstance(name, str) else kind()


class _Found(list[Problem]):
    typos: Typos


def _convert(raw: object, kind: type[Struct], path: Path, problems: _Found) -> Struct | None:
    """Make a Struct from a mapping, field by field, so that every wrong field is named and not only the first."""
    if not isinstance(raw, Mapping):
        problems.append(Problem(path, f"must be a mapping, is {say(raw)}"))
        return None
    fields, hints = _fields_of(kind)
    problems += _unknown(raw, (f.encode_name for f in fields), path, problems.typos)
    values = {}
    for field in fields:
        # null means unset, as in the API server, which drops null fields.
        if raw.get(field.encode_name) is not None:
            where = (*path, field.encode_name)
            values[field.name] = _field(raw[field.encode_name], hints[field.name], field.type, where, problems)
    missing = [f.encode_name for f in fields if f.required and f.name not in values]
    problems += [Problem(path, f"needs {name}") for name in missing]
    given = {k: v for k, v in values.items() if v is not msgspec.UNSET}
    return kind(**given) if all(f.name in given for f in fields if f.required) else None


@functools.cache
def _fields_of(kind: type[Struct]) -> tuple[tuple[inspect.Field, ...], dict[str, Any]]:
    """Return the fields of a type and their hints. Cached: otherwise reading a job takes 1 ms instead of 0.03."""
    info = typing.cast(inspect.StructType, inspect.type_info(kind))
    return info.fields, typing.get_type_hints(kind, include_extras=True)


def _field(raw: object, hint: Any, kind: inspect.Type, path: Path, problems: _Found) -> Any:
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    struct = next((o for o in options if isinstance(o, type) and issubclass(o, Struct)), None)
    if struct is not None:
        value = _convert(raw, struct, path, problems)
        return msgspec.UNSET if value is None else value
    if isinstance(kind, inspect.ListType) and isinstance(raw, list):
        return _list(raw, hint, kind, path, problems)
    try:
        return msgspec.convert(raw, hint)
    except msgspec.ValidationError:
        kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
        wanted = " or ".join(filter(None, (_wanted(one, raw) for one in kinds)))
        problems.append(Problem(path, f"must be {wanted}, is {say(raw)}"))
        # Another operator version may have accepted a larger number: use the nearest one. Other values become unset.
        whole = next((t for t in kinds if isinstance(t, inspect.IntType)), None)
        if whole is None or not isinstance(raw, int) or isinstance(raw, bool):
            return msgspec.UNSET
        low = raw if whole.ge is None else max(raw, whole.ge)
        return low if whole.le is None else min(low, whole.le)


def _list(raw: list[object], hint: Any, kind: inspect.ListType, path: Path, problems: _Found) -> list[Any]:
    if not (kind.min_length or 0) <= len(raw) <= (kind.max_length or len(raw)):
        wanted = f"at least {kind.min_length}" if len(raw) < (kind.min_length or 0) else f"at most {kind.max_length}"
        problems.append(Problem(path, f"must have {wanted} items, has {len(raw)}"))
    while typing.get_origin(hint) is not list:  # Annotated[list[X], …]
        hint = typing.get_args(hint)[0]
    (item,) = typing.get_args(hint)
    items = [_field(one, item, kind.item_type, (*path, i), problems) for i, one in enumerate(raw)]
    return [one for one in items if one is not msgspec.UNSET]


def _wanted(kind: inspect.Type, raw: object) -> str:
    """Return the requirement of a type as text that fits the value: `at least 1`."""
    if isinstance(kind, inspect.IntType):
        is_number = isinstance(raw, int) and not isinstance(raw, bool)
        if is_number and kind.le is not None and typing.cast(int, raw) > kind.le:
            return f"at most {kind.le}"
        parts = ("" if is_number else "a whole number", "" if kind.ge is None else f"at least {kind.ge}")
        return " of ".join(filter(None, parts))
    if isinstance(kind, inspect.BoolType):
        return "true or false"
    if isinstance(kind, inspect.LiteralType):
        return ("one of " if len(kind.values) > 1 else "") + ", ".join(map(str, kind.values))
    if isinstance(kind, inspect.StrType):
        return "text" if kind.max_length is None else f"text of at most {kind.max_length} characters"
    if isinstance(kind, inspect.DictType):
        return "a mapping"
    if isinstance(kind, inspect.ListType):
        return "a list"
    return ""
