"""Ranks look for rank 0's store when it is there, and not half a second later.

torch's client that finds nobody at the port looks again after 0.25 to 0.75 s, then after longer and longer. Ranks of
one generation begin within milliseconds of each other, and whoever is faster than rank 0 had all wait for it: a client
100 ms ahead of the store met it after 0.34 to 0.56 s, and after 0.10 to 0.12 with this. A connection that says nothing
and is closed again is no matter to the store, with libuv and without.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 - every name of a host is encoded so, and each rank would import it: 4 ms
import functools
import os
import socket
import sys
import time
from typing import Any

PAUSE_SECONDS, PAUSE_SECONDS_MAX = 0.002, 0.25  # a thousand ranks may wait for a rank 0 whose node is being made
PAUSE_PART = 0.1  # of the time that has passed, so that nobody waits for more than a tenth longer
CONNECT_SECONDS = 2.0  # to an address that does not answer at all
WAIT_PART, WAIT_SECONDS_MAX = 0.1, 30.0  # of the time limit; torch's own search follows, and its error


def wait_until_served(host: str, port: int, timeout_seconds: float) -> None:
    """Until a connection is accepted there, or for a part of the time limit."""
    began = time.monotonic()
    ends = began + min(WAIT_PART * timeout_seconds, WAIT_SECONDS_MAX)
    while (now := time.monotonic()) < ends:
        try:
            return socket.create_connection((host, port), min(CONNECT_SECONDS, ends - now)).close()
        except socket.gaierror:  # no such name yet: a DNS server would hear from all ranks
            pause = PAUSE_SECONDS_MAX
        except OSError:  # refused, no route yet
            pause = min(max(PAUSE_SECONDS, PAUSE_PART * (time.monotonic() - began)), PAUSE_SECONDS_MAX)
        except (OverflowError, ValueError):  # no port, no name: torch says so
            return None
        time.sleep(pause)
    return None


def have_torch_wait_for_rank_0() -> None:
    """From now on torch's env:// and tcp:// wait so in this process; not where torch's function has another name."""
    rendezvous: Any = sys.modules.get("torch.distributed.rendezvous")
    create = getattr(rendezvous, "_create_c10d_store", None)
    if create is None or hasattr(create, "waits_for_rank_0"):
        return

    @functools.wraps(create)
    def wait_and_create(hostname: str, port: int, rank: int, world_size: int, timeout: Any, *more: Any) -> Any:
        # Where it is True the launcher serves the store, and did so before it started us.
        if rank > 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            wait_until_served(hostname, port, timeout.total_seconds())
        return create(hostname, port, rank, world_size, timeout, *more)

    wait_and_create.waits_for_rank_0 = True  # type: ignore[attr-defined]
    rendezvous._create_c10d_store = wait_and_create
