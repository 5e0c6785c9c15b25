"""A time limit that does not lose cancellations.

Before Python 3.12, asyncio.wait_for swallows a cancellation that comes at the same moment as the result (CPython issue
86296). The task then never ends, and its canceller waits forever. Such an operator would keep its Lease and do nothing.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager


def at_most(seconds: float | None) -> AbstractAsyncContextManager[object]:
    """Return a context manager that ends its body with TimeoutError after `seconds`; None: no limit."""
    # The operator needs Python 3.11 (kopf 1.45), which has asyncio.timeout. mypy checks for the trainer's 3.10.
    return asyncio.timeout(seconds)  # type: ignore[attr-defined,no-any-return]
