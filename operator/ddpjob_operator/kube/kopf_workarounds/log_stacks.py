"""An answer of the API server is logged without the stacks of kopf.

kopf 1.45 logs such an answer with three stacks of its own code. An administrator would look for the one sentence that
says what the API server refuses in a hundred lines. Can go when kopf logs the sentence alone.
"""

from __future__ import annotations

import logging


def without_kopfs_stack(record: logging.LogRecord) -> bool:
    """A filter of a log handler: errors of kopf and aiohttp lose their stack; a bug of ours keeps it."""
    error = record.exc_info[1] if record.exc_info else None
    if type(error).__module__.partition(".")[0] in ("kopf", "aiohttp"):
        record.exc_info = record.exc_text = None
    return True
