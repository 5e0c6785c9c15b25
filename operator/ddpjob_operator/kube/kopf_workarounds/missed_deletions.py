"""Forgets jobs that were deleted while kopf's watch was broken.

kopf 1.45 lists again after such a time, and does not report what the new list lacks (clients/watching.py). The operator
would go on with a job that is gone: it would create its Service and pods again, and log their removal each time.
Can go when kopf reports such deletions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from ddpjob_operator.job import api
from ddpjob_operator.kube.client import ApiError, Client, collection
from ddpjob_operator.kube.listing import Careful, take
from ddpjob_operator.kube.runtime import Runtime
from ddpjob_operator.kube.store import Jobs

SWEEP_SECONDS = 600.0


async def sweep(client: Client, jobs: Jobs, namespaces: Sequence[str], runtime: Runtime) -> None:
    """Until cancelled."""
    careful = Careful(jobs, "DDPJobs", runtime.log)
    while True:
        await asyncio.sleep(SWEEP_SECONDS)
        for namespace in namespaces:
            await _list(client, jobs, namespace, careful, runtime.log)


async def _list(client: Client, jobs: Jobs, namespace: str, careful: Careful, log: logging.Logger) -> None:
    try:
        await take(client.pages(collection(api.PLURAL, namespace)), jobs, careful.put, namespace=namespace)
    except ApiError as error:
        log.warning("the jobs were not listed again: %s", error)
    except Exception:
        log.exception("the jobs were not listed again")  # the end of the sweep would end the operator
