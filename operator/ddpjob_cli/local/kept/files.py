"""Files that others read while a run writes them, and scripts that are read without being run."""

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
_SLOW_ENCODINGS = ("idna", "punycode")  # decoding takes minutes for a megabyte

_STREAMS = {"/dev/stdout": "/dev/fd/1", "/dev/stderr": "/dev/fd/2"}
_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/(\d+)")


def read_script(path: str | Path) -> bytes:
    """A script or a notebook. Raises OSError, also for a file that is too large to be one: it takes minutes to read."""
    mib = NOTEBOOK_MIB_MAX if str(path).endswith(".ipynb") else SCRIPT_MIB_MAX
    with open(own_files.open_named(path), "rb") as file:
        data = file.read((mib << 20) + 1) or b""  # None: a file of /proc that has nothing now
    if len(data) > mib << 20:
        raise OSError(errno.EFBIG, f"larger than {mib} MiB, so it is no script", str(path))
    return data


def text_of_script(data: bytes) -> str:
    """Decode a script as Python does, by its `# coding:`. Raises ValueError, SyntaxError, LookupError."""
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    if encoding in _SLOW_ENCODINGS:
        raise LookupError(f"coding: {encoding} is for host names")
    return data.decode(encoding)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file so that a reader sees the old content or the new, never half of it. Raises OSError.

    A link stays a link, and what is no regular file (/dev/stdout, a pipe) is written to and never replaced.
    """
    # Before the links are resolved: that of /dev/stdout names a pipe by a path that is not there.
    if path.exists() and not path.is_file():
        with open(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY), "wb", buffering=0) as there:
            there.write(data)  # a pipe that nobody reads must not hold the job
        return
    if (named := _DESCRIPTOR.fullmatch(_STREAMS.get(str(path), str(path)))) is not None:
        # A shell's `> file`: whoever replaced the file would take away what else is printed there.
        with open(os.dup(int(named[1])), "wb", buffering=0) as there:
            there.write(data)
        return
    _replace(Path(os.path.realpath(path)), data, 0o644)  # for others too: a node exporter reads the metrics


def write_privately(path: Path, data: bytes) -> None:
    """Replace a file of a run, which only its user can read. What is there, such as a link, is not written to. Raises
    OSError."""
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
