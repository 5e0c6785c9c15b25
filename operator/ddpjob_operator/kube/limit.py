"""A time limit that loses no cancellation.

asyncio.wait_for does, before Python 3.12: cancelled in the very moment in which what it waits for has come, it returns
that and goes on (CPython issue 86296). Whoever waits for the end of the task then waits for ever: so an operator held
its Lease and acted no more.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager


def at_most(seconds: float | None) -> AbstractAsyncContextManager[object]:
    """`async with` that ends its body with TimeoutError after so long; None: no limit."""
    # Where there is no kopf for it (3.10) there is no operator.
    return asyncio.timeout(seconds)  # type: ignore[attr-defined,no-any-return]
