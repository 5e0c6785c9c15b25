"""The output of a node: all of it goes to a file, its lines to the screen, and its end into the status."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from ddpjob import own_files

TAIL_BYTES = 16384  # bytes to find the cause in; a kubelet keeps 2048, which torchrun's table can fill
LINE_MAX = 4096  # characters per line on the screen; the file keeps the complete line


class Log:
    """One node's output. After a write error no more is written, and training continues; `error` has the message.
    names: rewrites places (FILE:LINE) in its text; `str` rewrites nothing."""

    def __init__(self, path: Path, names: Callable[[str], str] = str) -> None:
        self.path = path
        self.error = ""
        self._names = names
        self._held = b""  # an unfinished line: FILE:LINE may arrive in two pieces
        descriptor = own_files.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._file = os.fdopen(descriptor, "ab", buffering=0)
        self._tail = b""
        self._line = b""
        self._cut = 0  # bytes of the current line that are not shown
        self._is_rewritten = False  # True if the current line restarted after a \r

    def feed(self, data: bytes) -> Iterator[str]:
        """Write what the node printed, and yield its complete lines for the screen."""
        if self._names is not str:
            data = self._held + data
            end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
            end = end if len(data) - end < TAIL_BYTES else len(data)
            data, self._held = self._renamed(data[:end]), data[end:]
        yield from self._feed(data)

    def _feed(self, data: bytes) -> Iterator[str]:
        self._write(data)
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        # Not splitlines, which also splits at form feeds and Unicode separators, unlike a terminal.
        *complete, rest = data.split(b"\n")
        for part in complete:
            yield self._finish(part)
        self._extend(rest)

    def close(self) -> Iterator[str]:
        """Yield an unfinished last line, and close the file."""
        yield from self._feed(self._renamed(self._held))
        if self._line or self._cut:
            yield self._finish(b"")
        self._file.close()

    @property
    def tail(self) -> str:
        """Return the end of the output as text; bytes that are not UTF-8 become �."""
        return self._tail.decode(errors="replace")

    @property
    def bar(self) -> str:
        """Return the current line if it is a progress bar, which rewrites its line until it is complete; else ""."""
        return self._line.rstrip(b"\r").decode(errors="replace") if self._is_rewritten and not self._cut else ""

    def _renamed(self, data: bytes) -> bytes:
        return self._names(data.decode(errors="surrogateescape")).encode(errors="surrogateescape")

    def _extend(self, part: bytes) -> None:
        # Keep the part after the last \r, which a terminal would show for a progress bar.
        line = self._line + part
        begin = line.rstrip(b"\r").rfind(b"\r") + 1
        self._is_rewritten |= begin > 0
        self._cut = (0 if begin else self._cut) + max(0, len(line) - begin - LINE_MAX)
        self._line = line[begin : begin + LINE_MAX]

    def _finish(self, part: bytes) -> str:
        self._extend(part)
        text = self._line.rstrip(b"\r").decode(errors="replace")
        if self._cut:
            text += f" … [{self._cut:,} bytes more in {self.path}]"
        self._line, self._cut, self._is_rewritten = b"", 0, False
        return text

    def _write(self, data: bytes) -> None:
        if self.error:
            return
        try:
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) or 0 :]
        except OSError as error:
            self.error = f"{self.path}: {error.strerror}; the rest of this node's log is lost"
