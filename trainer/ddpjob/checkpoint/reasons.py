"""Describe why a file could not be written or read."""

import errno

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def reason(error: BaseException) -> str:
    """Return for example "disk full: No space left on device (errno 28)". `ddpjob_core/rules.py` reads the number to
    decide if a restart can help."""
    if isinstance(error, OSError) and error.strerror:
        full = "disk full: " if error.errno in _DISK_FULL else ""
        return f"{full}{error.strerror} (errno {error.errno})"
    return f"{type(error).__name__}: {error}"
