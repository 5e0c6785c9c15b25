"""A time limit that loses no cancellation.

asyncio.wait_for does, before Python 3.12: cancelled in the very moment in which its result arrives, it returns
that and goes on (CPython issue 86296). A caller that waits for the end of the task then waits for ever: that way an
operator held its Lease and acted no more.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager


def at_most(seconds: float | None) -> AbstractAsyncContextManager[object]:
    """`async with` that ends its body with TimeoutError after so long; None: no limit."""
    # mypy checks for Python 3.10, which the trainer supports and kopf 1.45 does not, so no operator runs on it.
    return asyncio.timeout(seconds)  # type: ignore[attr-defined,no-any-return]
