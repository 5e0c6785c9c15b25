"""The tasks of kopf that must run for as long as the operator does.

kopf 1.45 does not notice the end of some of them: a watcher that was cancelled is not started again
(reactor/orchestration.py), and without the two tasks of a watcher's scheduler no event reaches a handler any more and a
shutdown never ends (aiokits/aiotasks.py). Users would see an operator that is running and does nothing. So the operator
ends with the first of them. Can go when kopf supervises its own tasks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import kopf

_KOPF = str(Path(kopf.__file__).parent)


def of_kopf() -> Iterator[asyncio.Task[object]]:
    """Those that run now. Not the workers, which end when their job has been quiet for some seconds, nor the waiters:
    kopf starts another one, or ends the task that waits for it."""
    for task in asyncio.all_tasks():
        code = getattr(task.get_coro(), "cr_code", None)
        is_kopfs = code is not None and code.co_filename.startswith(_KOPF)
        if is_kopfs and not task.get_name().startswith("worker for ") and "waiter" not in task.get_name():
            yield task
