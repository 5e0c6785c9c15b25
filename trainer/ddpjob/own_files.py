"""Open files safely in folders that other users can write to. Standard library only.

A name in such a folder may be a link to another file, a hard link to it, a pipe that blocks its reader, or a device.
`open_file` refuses all of them before it changes anything. The owner is not compared: volumes such as SMB and object
stores report one user for all files, and the pods of a job may run as different users.

`open_named` opens a file that the user has named. It follows links.
"""

import errno
import os
import stat

READ_BYTES_MAX = 1 << 20
_NAMES = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))


def open_file(path: str | os.PathLike[str], flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
    """Return a descriptor of a regular file, for writing only if the file has one hard link. The arguments are those of
    `os.open`. Raises an OSError that names what was found instead."""
    # O_NONBLOCK, because opening a pipe would wait for the pipe's other end. O_TRUNC is applied after the checks,
    # because opening a hard link with O_TRUNC would empty the other file.
    safe = (flags & ~os.O_TRUNC) | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        descriptor = os.open(path, safe, mode, dir_fd=dir_fd)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "is a link, which is not followed", os.fspath(path)) from None
        raise
    try:
        writes = flags & (os.O_WRONLY | os.O_RDWR)
        if why := _not_ours(os.fstat(descriptor), writes=bool(writes)):
            raise OSError(errno.EPERM, why, os.fspath(path))
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def opener(path: str, flags: int) -> int:
    """Open a file as `open(path, "w", opener=opener)` needs it."""
    return open_file(path, flags)


def read_file(path: str | os.PathLike[str], bytes_max: int = READ_BYTES_MAX) -> bytes:
    """Return the content, cut at `bytes_max`. Raises OSError, also if the path is not a regular file."""
    with open(open_file(path, os.O_RDONLY), "rb") as file:
        return file.read(bytes_max)


def open_named(path: str | os.PathLike[str]) -> int:
    """Return a descriptor to read a file that the user has named. A shell's `<(command)` and /dev/stdin are accepted. A
    named pipe is refused, because there may never be a writer. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode):
            return descriptor  # non-blocking, because reading /proc/kmsg would never end
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not os.path.realpath(path).startswith(("/dev/", "/proc/")):
            raise OSError(errno.EPERM, _not_ours(status, writes=False), os.fspath(path))
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def make_folder(path: str | os.PathLike[str]) -> None:
    """Create a folder that only this user can read, or accept an existing one of that kind. Raises OSError."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        status = os.lstat(path)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise OSError(errno.EPERM, "is not a folder that only this user can write", os.fspath(path)) from None


def _not_ours(status: os.stat_result, *, writes: bool) -> str:
    if not stat.S_ISREG(status.st_mode):
        return f"is {next((name for is_it, name in _NAMES if is_it(status.st_mode)), 'a device')}, not a regular file"
    return "has another hard link, so it is not written" if writes and status.st_nlink > 1 else ""
