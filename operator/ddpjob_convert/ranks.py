"""RANK and WORLD_SIZE in a command of another tool, where they count pods: NODE_RANK and NNODES in a DDPJob.

In a DDPJob they count ranks. With several processes a node they are not set before the launcher has started the ranks,
so a log_$RANK.txt would be one file for all nodes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from ddpjob_convert.result import Converted, Path
from ddpjob_operator.job import shell_text
from ddpjob_operator.job.podspec import mappings

_BY_KUBERNETES = re.compile(r"(?<!\$)((?:\$\$)*\$\()(RANK|WORLD_SIZE)(?=\))")
_OF_NNODES = re.compile(r"(?:--nnodes[=\s]+|\bNNODES=)[\"']?\$(?:\(\([^)]*|\S*)$")
_BEFORE_MAX = 200  # characters that are looked at for the option or the variable that gets a value
_UNSET = "not set before the launcher has started them"


def move(trainer: dict[str, Any], path: Path, result: Converted, world_size: str = "NNODES") -> None:
    """Write the variables of the nodes into a container's command, args and env, with a remark.

    world_size: the variable that has the value of the source's WORLD_SIZE. A name that stays gets a remark as well: the
    script sets it itself, or hands the text to another program.
    """
    moved = _Moved({"RANK": "NODE_RANK", "WORLD_SIZE": world_size})
    parts = {part: trainer.get(part) or [] for part in ("command", "args")}
    words = [*parts["command"], *parts["args"]]
    scripts = {place for place, is_read_by_pod in shell_text.scripts(words) if is_read_by_pod}
    made = [moved.script(word) if i in scripts else moved.word(word) for i, word in enumerate(words)]
    if made != words:
        begin = len(parts["command"])
        trainer |= {part: new for part, new in (("command", made[:begin]), ("args", made[begin:])) if new}
    for entry in mappings(trainer, "env"):
        if isinstance(value := entry.get("value"), str):
            entry["value"] = moved.word(value)
    if moved.changed:
        told = ", ".join(f"{name} is now {new}" for name, new in moved.changed.items())
        result.remark(path, f"{told}: the old names count ranks, and are {_UNSET}")
    for name, meant in moved.left.items():
        result.remark(path, f"{name}: left as it is, although it counts ranks, and is {_UNSET}; {meant} is meant")


@dataclass
class _Moved:
    """The variable that is meant by each name, and what became of it."""

    meant: dict[str, str]
    changed: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def word(self, text: str) -> str:
        """Return a text with $(RANK) replaced, as Kubernetes reads it."""
        return _BY_KUBERNETES.sub(lambda found: found[1] + self._change(found[2], self.meant[found[2]]), text)

    def script(self, text: str) -> str:
        """Return the script of a shell with all references replaced."""
        text = self.word(text)
        made, position = "", 0
        first_set = {name: shell_text.set_at(text, name) for name in self.meant}
        for reference in shell_text.references(text):
            name, before = reference.name, text[max(0, reference.begin - _BEFORE_MAX) : reference.begin]
            if name not in self.meant:
                continue
            set_at = first_set[name]
            is_own_default = re.search(rf"(?<![\w$-]){name}=(?:[^\s;&|]*|\"?\$\(\([^)\n]*)$", before) is not None
            if reference.by_shell and (set_at is None or is_own_default):
                meant = "NNODES" if _OF_NNODES.search(before) else self.meant[name]
                made += text[position : reference.begin] + self._change(name, meant)
                position = reference.end
            elif set_at is None or reference.begin < set_at or reference.operator.endswith("="):
                self.left[name] = self.meant[name]
        return made + text[position:]

    def _change(self, name: str, meant: str) -> str:
        self.changed[name] = meant
        return meant
