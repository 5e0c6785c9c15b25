"""The result of a conversion: a DDPJob with comments on fields, and remarks on what has no counterpart."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from ddpjob_operator.job import api, yamlvalues

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Remark:
    path: Path
    text: str


@dataclass
class Converted:
    """The DDPJob so far, and remarks. A remark's path that begins with "runtime" is in the runtime's document."""

    title: str
    metadata: dict[str, Any]
    spec: dict[str, Any] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    remarks: list[Remark] = field(default_factory=list)
    runtime: Mapping[str, Any] | None = None

    def set(self, name: str, value: Any, comment: str = "") -> None:
        self.spec[name] = value
        if comment:
            self.comments[name] = comment

    def remark(self, path: Path, text: str) -> None:
        self.remarks.append(Remark(path, text))

    @property
    def data(self) -> dict[str, Any]:
        """Return the DDPJob as a mapping, with the template last, because it is the longest."""
        spec = {name: value for name, value in self.spec.items() if name != "template"}
        return {
            "apiVersion": api.API_VERSION,
            "kind": api.KIND,
            "metadata": self.metadata,
            "spec": spec | {"template": self.spec.get("template", {})},
        }

    def to_yaml(self) -> str:
        data = self.data
        lines = [f"# {self.title}", *_dumped({k: v for k, v in data.items() if k != "spec"}), "spec:"]
        for name, value in data["spec"].items():
            if name in self.comments:
                lines.append(f"  # {self.comments[name]}")
            lines += (f"  {line}" for line in _dumped({name: value}))
        return "\n".join(lines) + "\n"


class _JobDumper(yaml.SafeDumper):
    """Writes lists of words and numbers on one line, as people write commands, and no anchors."""

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        items = list(sequence)
        plain = all(isinstance(item, (str, int)) and "\n" not in str(item) for item in items)
        return super().represent_sequence(tag, items, flow_style=plain or flow_style)

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the signature is PyYAML's
        return True


def _text(dumper: Any, text: str) -> Any:
    """Write a script of several lines as a block, because one long quoted line is hard to edit."""
    if "\n" in text and text.strip() and not re.search(r"[ \t]\n|[^\n\t\x20-\x7e\xa0-\ud7ff\ue000-\ufffd]", text):
        return dumper.represent_scalar(f"{yamlvalues.TAG}str", text, style="|")
    return yamlvalues.represent(dumper, text)


_JobDumper.add_representer(str, _text)


def _dumped(data: dict[str, Any]) -> list[str]:
    # PyYAML's own dumper, not libyaml's, because it can be customized for lists, and the text is short.
    text = yaml.dump(data, Dumper=_JobDumper, sort_keys=False, allow_unicode=True, width=110)
    return text.removesuffix("\n").split("\n")
