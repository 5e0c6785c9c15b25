"""Reads a mapping field by field, so that what was not read can be named.

The converters take the fields that they understand; `rest` remarks on all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ddpjob_convert.result import Converted, Path
from ddpjob_operator.job.wording import say


class ConvertError(Exception):
    """Something that cannot be converted; `path` is its field in the source, or, after `runtime`, in that document."""

    def __init__(self, path: Path, text: str, runtime: Mapping[str, Any] | None = None) -> None:
        super().__init__(text)
        self.path, self.runtime = path, runtime


class Fields:
    """A mapping of the source at `path`, with the fields that were taken from it."""

    def __init__(self, value: Any, path: Path) -> None:
        if not isinstance(value, Mapping):
            raise ConvertError(path, f"must be a mapping, is {say(value)}")
        self.given, self.path = value, path
        self._taken: set[str] = set()

    def take(self, name: str) -> Any:
        """The value as it is; None where unset."""
        self._taken.add(name)
        return self.given.get(name)

    def fields(self, name: str) -> Fields:
        """The mapping below a field, empty where unset."""
        value = self.take(name)
        return Fields({} if value is None else value, (*self.path, name))

    def number(self, name: str, least: int = 0) -> int | None:
        """A whole number of at least `least`; None where unset."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConvertError((*self.path, name), f"must be a whole number of at least {least}, is {say(value)}")
        return value

    def text(self, name: str) -> str:
        """A text, empty where unset."""
        value = self.take(name)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise ConvertError((*self.path, name), f"must be a text, is {say(value)}")
        return value

    def mappings(self, name: str) -> Iterator[Fields]:
        """The mappings of a list."""
        value = self.take(name)
        if value is None:
            return
        if not isinstance(value, list):
            raise ConvertError((*self.path, name), f"must be a list, is {say(value)}")
        yield from (Fields(item, (*self.path, name, i)) for i, item in enumerate(value))

    def rest(self, result: Converted, reasons: Mapping[str, str] | None = None) -> None:
        """Remark on each field that was not taken, by its reason where there is one."""
        for name, value in self.given.items():
            if name not in self._taken and value not in (None, {}, [], ""):
                reason = (reasons or {}).get(name, "a DDPJob has no such field")
                result.remark((*self.path, name), reason)
