"""Write files that others may read at the same time, and read scripts without running them."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import tempfile
import tokenize
from pathlib import Path

from ddpjob import own_files

SCRIPT_MIB_MAX = 4
NOTEBOOK_MIB_MAX = 64  # notebooks embed the output images of their cells
_SLOW_ENCODINGS = ("idna", "punycode")  # decoding 1 MB takes minutes

_STREAMS = {"/dev/stdout": "/dev/fd/1", "/dev/stderr": "/dev/fd/2"}
_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/(\d+)")


def read_script(path: str | Path) -> bytes:
    """Return the content of a script or a notebook. Raise OSError; if the file is too large, with errno EFBIG."""
    mib = NOTEBOOK_MIB_MAX if str(path).endswith(".ipynb") else SCRIPT_MIB_MAX
    with open(own_files.open_named(path), "rb") as file:
        data = file.read((mib << 20) + 1) or b""  # read() returns None if a file has no data at the moment, as in /proc
    if len(data) > mib << 20:
        raise OSError(errno.EFBIG, f"larger than {mib} MiB, so it is not a script", str(path))
    return data


def text_of_script(data: bytes) -> str:
    """Decode a script as Python does, by its line `# coding:`. Raise ValueError, SyntaxError, LookupError."""
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    if encoding in _SLOW_ENCODINGS:
        raise LookupError(f"coding: {encoding} is for host names")
    return data.decode(encoding)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file so that a reader sees either the old or the new content. If the path is a link, replace its
    target. Write to /dev/stdout and pipes directly. Raise OSError."""
    # Check for a pipe before links are resolved: /dev/stdout may be a link to a pipe, whose path does not exist.
    if path.exists() and not path.is_file():
        with open(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY), "wb", buffering=0) as there:
            there.write(data)  # O_NONBLOCK: a pipe without a reader must not block the job
        return
    if (named := _DESCRIPTOR.fullmatch(_STREAMS.get(str(path), str(path)))) is not None:
        # With `> file` in a shell, replacing the file would lose all other output.
        with open(os.dup(int(named[1])), "wb", buffering=0) as there:
            there.write(data)
        return
    _replace(Path(os.path.realpath(path)), data, 0o644)  # readable by others, because node-exporter reads the metrics


def write_privately(path: Path, data: bytes) -> None:
    """Replace a file by one that only its user can read. An existing link is replaced, not followed. Raise OSError."""
    _replace(path, data, 0o600)


def _replace(path: Path, data: bytes, mode: int) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
