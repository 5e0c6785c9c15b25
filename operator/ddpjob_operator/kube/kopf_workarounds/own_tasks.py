"""Finds the tasks of kopf that must run as long as the operator does. The operator ends when the first of them ends.

kopf 1.45 (seen with 1.45.2) does not replace some of its tasks when they end:

- A watcher that was cancelled starts again only when kinds or namespaces change (kopf/_core/reactor/orchestration.py,
  lines 146 to 156), which never happens here (handlers.py).
- Without the spawner and the cleaner of a watcher's scheduler, no event reaches a handler and a shutdown never ends
  (kopf/_cogs/aiokits/aiotasks.py, lines 294 and 295).

Users would see an operator that is running and does nothing. Remove this when kopf supervises its own tasks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import kopf

_KOPF = str(Path(kopf.__file__).parent)


def of_kopf() -> Iterator[asyncio.Task[object]]:
    """Yield the running tasks of kopf, except those that end in normal operation.

    Workers end when their job has been quiet for some seconds. Waiters end with the wait, and kopf notices that.
    """
    for task in asyncio.all_tasks():
        code = getattr(task.get_coro(), "cr_code", None)
        is_kopfs = code is not None and code.co_filename.startswith(_KOPF)
        if is_kopfs and not task.get_name().startswith("worker for ") and "waiter" not in task.get_name():
            yield task
