"""Connect to rank 0's store as soon as rank 0 listens, instead of up to half a second later.

torch's client retries after 0.25 to 0.75 s, then less and less often. Ranks of a generation start within milliseconds
of each other, so a rank that is faster than rank 0 delays all. A client 100 ms ahead of the store connected after 0.34
to 0.56 s, and with this module after 0.10 to 0.12 s. A connection that is closed without data does not disturb the
store, with or without libuv.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 - every name of a host is encoded so, and each rank would import it: 4 ms
import functools
import os
import socket
import sys
import time
from typing import Any

PAUSE_SECONDS, PAUSE_SECONDS_MAX = 0.002, 0.25  # seconds, growing, because a thousand ranks may wait for rank 0
PAUSE_PART = 0.1  # pause as a part of the elapsed time, so that polling makes no wait more than a tenth longer
CONNECT_SECONDS = 2.0  # per connection attempt
WAIT_PART, WAIT_SECONDS_MAX = 0.1, 30.0  # wait for a tenth of the time limit, at most 30 s; then torch itself retries


def wait_until_served(host: str, port: int, timeout_seconds: float) -> None:
    """Return when a connection is accepted, or after a part of the time limit."""
    began = time.monotonic()
    ends = began + min(WAIT_PART * timeout_seconds, WAIT_SECONDS_MAX)
    while (now := time.monotonic()) < ends:
        try:
            return socket.create_connection((host, port), min(CONNECT_SECONDS, ends - now)).close()
        except socket.gaierror:  # the name does not exist yet; frequent retries of all ranks would flood the DNS server
            pause = PAUSE_SECONDS_MAX
        except OSError:  # refused, or no route yet
            pause = min(max(PAUSE_SECONDS, PAUSE_PART * (time.monotonic() - began)), PAUSE_SECONDS_MAX)
        except (OverflowError, ValueError):  # an invalid port or name, which torch reports
            return None
        time.sleep(pause)
    return None


def have_torch_wait_for_rank_0() -> None:
    """Let torch's env:// and tcp:// call `wait_until_served`; no effect if torch renames `_create_c10d_store`."""
    rendezvous: Any = sys.modules.get("torch.distributed.rendezvous")
    create = getattr(rendezvous, "_create_c10d_store", None)
    if create is None or hasattr(create, "waits_for_rank_0"):
        return

    @functools.wraps(create)
    def wait_and_create(hostname: str, port: int, rank: int, world_size: int, timeout: Any, *more: Any) -> Any:
        # If the variable is True, the launcher serves the store, and did so before it started this process.
        if rank > 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            wait_until_served(hostname, port, timeout.total_seconds())
        return create(hostname, port, rank, world_size, timeout, *more)

    wait_and_create.waits_for_rank_0 = True  # type: ignore[attr-defined]
    rendezvous._create_c10d_store = wait_and_create
