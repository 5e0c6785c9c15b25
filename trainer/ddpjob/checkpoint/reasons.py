"""Why a file could not be written or read, in words."""

import errno

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def reason(error: BaseException) -> str:
    """disk full: No space left on device (errno 28); the number tells if a restart can help (ddpjob_core/rules.py)"""
    if isinstance(error, OSError) and error.strerror:
        full = "disk full: " if error.errno in _DISK_FULL else ""
        return f"{full}{error.strerror} (errno {error.errno})"
    return f"{type(error).__name__}: {error}"
