"""An overloaded API server is not made worse, and nothing is lost after it recovers. In virtual time."""

from __future__ import annotations

import asyncio
import collections
from itertools import pairwise

from slow_server import SlowServer, Town, play

from ddpjob_operator.kube.api.client import ApiError

JOBS, NODES = 20, 8
AFTER_SECONDS = 5.0


def test_while_every_write_is_turned_away_each_job_asks_as_seldom_as_the_server_wants_and_starts_after_it() -> None:
    """Twenty jobs that retry at once could keep an API server down that sheds load for a minute."""

    async def story() -> None:
        turned_away: dict[str, list[float]] = collections.defaultdict(list)
        at_recovery = 0.0

        def delay(verb: str, path: str) -> float:
            now = asyncio.get_running_loop().time()
            if now < at_recovery and verb in ("create", "replace", "delete"):
                turned_away[path.rpartition("/namespaces/")[2]].append(now)
                raise ApiError(429, "TooManyRequests", "slow down", AFTER_SECONDS)
            return 0.01

        server = SlowServer(delay)
        town = Town(server)
        at_recovery = asyncio.get_running_loop().time() + 60
        for number in range(JOBS):
            town.apply("team", f"job-{number}", NODES)
        await asyncio.sleep(60)
        assert town.pods("team") == 0
        assert len(turned_away) == JOBS, "only the first write of each job is tried"
        waits = [later - earlier for times in turned_away.values() for earlier, later in pairwise(times)]
        assert len(waits) >= JOBS
        assert min(waits) >= AFTER_SECONDS
        began = len(server.done)
        await town.until(lambda: town.pods("team") == JOBS * NODES, 60)
        await asyncio.sleep(10)
        writes = collections.Counter(verb for _, verb, path in server.done[began:] if "/events/" not in path)
        assert writes["create"] == JOBS * (NODES + 1), "8 pods and a Service for each job, and no second try"
        assert writes["replace"] <= 3 * JOBS

    play(story)
