"""Detects failures that the container's exit code hides: `torchrun train.py | tee log` ends with tee's 0.

The termination message proves them: ddprun, or the library in a rank, wrote it. A later launcher in the same container
removes its predecessor's message, so the last message decides.
"""

from __future__ import annotations

import functools

import msgspec

from ddpjob_core.failures import Failure
from ddpjob_operator.job.bounds import NOT_READABLE

_BEGINS = '{"ddpjob"'
_INTERRUPTED = "SIGINT"


@functools.lru_cache(maxsize=512)
def is_recorded(message: str) -> bool:
    """True if a termination message proves that the training failed, even if the exit code is 0.

    A rank that saved and ended after a request to stop has not failed: `timeout 1h torchrun train.py || true`.
    """
    if not message.startswith(_BEGINS):
        return False
    try:
        written = msgspec.json.decode(message.partition("\n")[0].encode())
        failure = Failure.from_dict(written)
    except (*NOT_READABLE, ValueError):
        return False
    if written.get("ddpjob") != 1 or failure.exit_code in (None, 0):
        return False
    if isinstance(written.get("failed"), bool):  # written by an agent, which knows whether a signal ended it
        return bool(written["failed"])
    return bool(failure.bad_nodes) or not (failure.resumable or failure.signal == _INTERRUPTED)
