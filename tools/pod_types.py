"""Write operator/ddpjob_operator/job/pod_types.py: the fields of a pod template, from the Kubernetes API's schema.

It reads the models of the `kubernetes` package, which are generated from the API's OpenAPI document.
"""

from __future__ import annotations

import re
import sys
import textwrap
import typing
from collections.abc import Iterator

from kubernetes.client import models

_ROOT = "V1PodTemplateSpec"
# Fields with the type Quantity in the API's schema; in the models they are strings.
_QUANTITIES = {"limits", "requests", "overhead", "sizeLimit", "divisor"}
_HEAD = '''\
"""The fields of a pod template and their types. Written by `python tools/pod_types.py` from the API's description.

One type a paragraph: its name, then `field=type`. `field!=type` is required; [T] is a list of T, {T} a mapping of T.
"""

VERSION = "{version}"

TYPES = """\\
'''


def to_python() -> str:
    """Return the text of pod_types.py."""
    lines: list[str] = []
    for name, fields in sorted(_types().items()):
        text = " ".join((name, *(f"{field}={kind}" for field, kind in fields.items())))
        lines += textwrap.wrap(text, 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return _HEAD.replace("{version}", _version()) + "\n".join(lines) + '\n"""\n'


def _version() -> str:
    """Return the version of the API that the models describe, such as 1.37."""
    found = re.search(r"release-([\d.]+)", sys.modules[models.V1Pod.__module__].__doc__ or "")
    assert found is not None, "the models no longer say which API they describe"
    return found[1]


def _types() -> dict[str, dict[str, str]]:
    """Return type → field → type of the field, for all types in a pod template."""
    found: dict[str, dict[str, str]] = {}
    todo: list[type] = [getattr(models, _ROOT)]
    while todo:
        model = todo.pop()
        if _name(model) not in found:
            found[_name(model)] = {}
            for wire, annotation, required in _fields(model):
                found[_name(model)][f"{wire}!" if required else wire] = _type(wire, annotation, todo)
    return found


def _fields(model: typing.Any) -> Iterator[tuple[str, typing.Any, bool]]:
    wire_names = {name.lstrip("_"): wire for name, wire in model.attribute_map.items()}
    for name, field in model.model_fields.items():
        wire = wire_names[name.removeprefix("var_").strip("_")]
        yield wire, field.annotation, field.is_required()


def _type(wire: str, annotation: typing.Any, todo: list[type]) -> str:
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(wire, inner[0], todo)
    if origin is typing.Union:
        kinds = [_type(wire, one, todo) for one in inner if one is not type(None)]
        return "|".join(dict.fromkeys(kinds))
    if origin is list:
        return f"[{_type(wire, inner[0], todo)}]"
    if origin is dict:
        return f"{{{_type(wire, inner[1], todo)}}}"
    if isinstance(annotation, type) and annotation.__module__.startswith("kubernetes."):
        todo.append(annotation)
        return _name(annotation)
    plain = {"str": "text", "int": "int", "bool": "bool", "float": "number", "datetime": "text"}
    kind = plain.get(getattr(annotation, "__name__", ""), "any")
    return "quantity" if kind == "text" and wire in _QUANTITIES else kind


def _name(model: type) -> str:
    """Return the type's name without its API version: Container for V1Container and CoreV1Container."""
    return re.sub(r"^(Core)?V\d+", "", model.__name__)


if __name__ == "__main__":
    sys.stdout.write(to_python())
