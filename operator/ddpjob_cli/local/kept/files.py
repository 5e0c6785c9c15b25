"""Files that others read while a run writes them, and scripts that are read without running them."""

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
    """Return the text of a script or a notebook. Raise OSError, also for a file so large that reading takes minutes."""
    mib = NOTEBOOK_MIB_MAX if str(path).endswith(".ipynb") else SCRIPT_MIB_MAX
    with open(own_files.open_named(path), "rb") as file:
        data = file.read((mib << 20) + 1) or b""  # None: a file of /proc without data at present
    if len(data) > mib << 20:
        raise OSError(errno.EFBIG, f"larger than {mib} MiB, so it is not a script", str(path))
    return data


def text_of_script(data: bytes) -> str:
    """Return a script decoded as Python does, by its `# coding:`. Raise ValueError, SyntaxError, LookupError."""
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    if encoding in _SLOW_ENCODINGS:
        raise LookupError(f"coding: {encoding} is for host names")
    return data.decode(encoding)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file so that a reader sees the old or the new content. Links are kept, and /dev/stdout or a pipe is
    written to and never replaced. Raise OSError."""
    # Before links are resolved: /dev/stdout links to a pipe by a path that does not exist.
    if path.exists() and not path.is_file():
        with open(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY), "wb", buffering=0) as there:
            there.write(data)  # do not block the job on a pipe without a reader
        return
    if (named := _DESCRIPTOR.fullmatch(_STREAMS.get(str(path), str(path)))) is not None:
        # In a shell's `> file`, a replaced file would lose everything else that is printed there.
        with open(os.dup(int(named[1])), "wb", buffering=0) as there:
            there.write(data)
        return
    _replace(Path(os.path.realpath(path)), data, 0o644)  # readable by others: a node exporter reads the metrics


def write_privately(path: Path, data: bytes) -> None:
    """Replace a file that only its user can read. An existing link or file is not written to. Raise OSError."""
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
