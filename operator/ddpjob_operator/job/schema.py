"""The JSON Schema of a DDPJob for editors, written from the CRD's schema, so that an editor and the API server agree.
An editor also marks unknown fields of the spec, which the API server prunes. Pure."""

from __future__ import annotations

import json
from typing import Any

from ddpjob_operator.job import api, bounds, crd

Schema = dict[str, Any]

DIALECT = "http://json-schema.org/draft-07/schema#"  # the draft that yaml-language-server, VS Code and JetBrains read


def to_json() -> str:
    """Return the schema as it is checked in: the same bytes for the same types."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


def schema() -> Schema:
    root = crd.crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    name = {"type": "string", "pattern": api.NAME_PATTERN, "maxLength": api.NAME_LENGTH_MAX}
    return {
        "$schema": DIALECT,
        "title": api.KIND,
        "description": root["description"],
        "type": "object",
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "additionalProperties": False,
        "properties": {
            "apiVersion": {"const": api.API_VERSION},
            "kind": {"const": api.KIND},
            "metadata": {"type": "object", "required": ["name"], "properties": {"name": name}},
            "spec": _plain(root["properties"]["spec"]),
            "status": {"type": "object", "description": root["properties"]["status"]["description"]},
        },
    }


def _plain(given: Schema) -> Schema:
    plain = {k: v for k, v in given.items() if not k.startswith("x-kubernetes-") and k not in ("nullable", "format")}
    open_ended = "x-kubernetes-preserve-unknown-fields" in given
    if "x-kubernetes-int-or-string" in given:
        plain["oneOf"] = [{"type": "integer", "minimum": 1, "maximum": bounds.NPROC_MAX}, {"const": "auto"}]
    if "properties" in given:
        plain["properties"] = {name: _plain(inner) for name, inner in given["properties"].items()}
        if not open_ended:
            plain["additionalProperties"] = False
    for inner in ("items", "additionalProperties"):
        if isinstance(given.get(inner), dict):
            plain[inner] = _plain(given[inner])
    if given.get("nullable") and "type" in plain:
        plain["type"] = [plain["type"], "null"]
    if "pattern" in plain and "type" not in plain:  # a quantity, such as 0.5 or "500m"; patterns apply to strings only
        plain["type"] = ["string", "number", "null"]
    return plain
