"""Apply the command line's options that change a document: `--set spec.x=y`, `--nodes`, `--env`."""

from __future__ import annotations

import os
import re
from typing import Any

import msgspec

from ddpjob_cli.manifest.yamlbounds import DEPTH_MAX
from ddpjob_cli.manifest.yamlfile import Document, InputError, read_value
from ddpjob_operator.job import api
from ddpjob_operator.job.podspec import trainer_container
from ddpjob_operator.job.typos import Typos
from ddpjob_operator.job.validation import Path as FieldPath


def set_field(document: Document, setting: str, option: str) -> None:
    """Set a field, as in `spec.template.spec.containers[0].image=x`; the value is parsed as YAML. Raise InputError."""
    name, has_value, text = setting.partition("=")
    path = _path(name)
    if not has_value or not path:
        raise InputError(f"--set {setting}: must be PATH=VALUE, such as spec.nodes=4")
    if path[0] not in ("spec", "metadata"):
        known = [field.encode_name for field in msgspec.structs.fields(api.Spec)]
        close = Typos().meant(str(path[0]), known)
        meant = f"did you mean --set spec.{close}{setting[len(str(path[0])) :]}?" if close else ""
        raise InputError(f"--set {setting}: {meant or 'the path must begin with spec or metadata'}")
    try:
        value = read_value(text)
    except InputError as error:
        raise InputError(f"--set {name}: {error}") from None
    _put(document.data, path, value, setting)
    document.options[path] = option


def set_variable(document: Document, variable: str) -> None:
    """Set `NAME=VALUE` in the trainer's env; for `NAME` alone use its value in our environment. Raise InputError."""
    name, has_value, value = variable.partition("=")
    if not has_value and name not in os.environ:
        raise InputError(f"--env {variable}: must be NAME=VALUE, or the name of a variable that is set in this shell")
    value = value if has_value else os.environ[name]
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*", name):
        raise InputError(f"--env {variable}: a name has letters, digits, _, . and -, and does not begin with a digit")
    spec = document.data.get("spec")
    trainer = trainer_container(spec.get("template") or {}) if isinstance(spec, dict) else None
    if trainer is None:
        return  # the template is invalid, which validation will report
    env = trainer.get("env") if isinstance(trainer.get("env"), list) else []
    own = [i for i, e in enumerate(env or ()) if isinstance(e, dict) and e.get("name") == name]
    kept = [e for i, e in enumerate(env or ()) if i not in own]
    # Keep the variable's position, because $(NAME) can refer only to an earlier variable.
    first = own[0] if own else len(kept)
    trainer["env"] = [*kept[:first], {"name": name, "value": value}, *kept[first:]]


def _path(text: str) -> FieldPath:
    if not re.fullmatch(r"\w[\w-]*(\[\d{1,6}\])*(\.\w[\w-]*(\[\d{1,6}\])*)*", text) or text.count(".") > DEPTH_MAX:
        return ()
    return tuple(int(index) if index else name for name, index in re.findall(r"(\w[\w-]*)|\[(\d+)\]", text))


def _put(data: Any, path: FieldPath, value: Any, setting: str) -> None:
    *parents, last = path
    for part in parents:
        data = _step(data, part, setting)
    if isinstance(last, int):
        _step(data, last, setting)
        data[last] = value
    elif isinstance(data, dict):
        data[last] = value
    else:
        raise InputError(f"--set {setting}: there is no field {last} to set")


def _step(data: Any, part: str | int, setting: str) -> Any:
    if isinstance(part, int):
        if isinstance(data, list) and part < len(data):
            return data[part]
        raise InputError(f"--set {setting}: there is no item [{part}]")
    if not isinstance(data, dict):
        hint = f" A list item is written [{part}]." if isinstance(data, list) else ""
        raise InputError(f"--set {setting}: there is no field {part}.{hint}")
    if data.get(part) is None:
        data[part] = {}
    return data[part]
