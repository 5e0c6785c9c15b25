"""Limit the size of a YAML text, before objects are made from its parse events. 280 bytes of aliases can stand for a
million entries, and 10 MB of brackets take PyYAML most of a minute. Objects that an API server accepts are far smaller.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml

BYTES_MAX = 4 << 20  # an API server accepts 3 MiB in a request
NODES_MAX = 20_000  # keys, values and items of all documents of a file; a large job has a few hundred
DEPTH_MAX = 100
NUMBER_CHARACTERS_MAX = 100  # Python takes a second for 100,000 digits; 3.11 and later refuse 4,300


class OutOfBoundsError(Exception):
    """A limit was exceeded. line: from 1."""

    def __init__(self, line: int, what: str) -> None:
        super().__init__(what)
        self.line = line


@dataclass
class _Open:
    anchor: str | None
    nodes: int = 1


@dataclass
class _BoundedReader:
    """Counts the nodes of a document; an alias counts as all nodes that it stands for."""

    nodes: int = 0
    above: list[_Open] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)

    def read(self, event: Any) -> None:
        if isinstance(event, yaml.DocumentStartEvent):
            self.sizes = {}
            self._add(1, event)
        elif isinstance(event, yaml.AliasEvent):
            if any(opened.anchor == event.anchor for opened in self.above):
                raise OutOfBoundsError(_line(event), "an alias that contains itself")
            self._add(self.sizes.get(str(event.anchor), 1), event)  # PyYAML's composer reports unknown aliases later
        elif isinstance(event, yaml.ScalarEvent):
            self._end(event.anchor, 1)
            self._add(1, event)
        elif isinstance(event, yaml.CollectionStartEvent):
            self.nodes += 1
            self.above.append(_Open(event.anchor))
            if len(self.above) > DEPTH_MAX:
                raise OutOfBoundsError(_line(event), f"more than {DEPTH_MAX} levels of lists and mappings")
        elif isinstance(event, yaml.CollectionEndEvent):
            ended = self.above.pop()
            self._end(ended.anchor, ended.nodes)
            if self.above:
                self.above[-1].nodes += ended.nodes

    def _end(self, anchor: str | None, nodes: int) -> None:
        if anchor is not None:
            self.sizes[anchor] = nodes

    def _add(self, nodes: int, event: Any) -> None:
        self.nodes += nodes
        if self.above:
            self.above[-1].nodes += nodes
        if self.nodes > NODES_MAX:
            what = f"more than {NODES_MAX:,} keys, values and items, with aliases expanded"
            raise OutOfBoundsError(_line(event), what)


def check(text: str, loader: Any) -> None:
    """Raise OutOfBoundsError, or yaml.YAMLError for text that is not YAML."""
    reader = _BoundedReader()
    for event in yaml.parse(text, Loader=loader):
        reader.read(event)


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1
