"""How long kopf waits before it asks the API server again: without an end.

kopf 1.45 ends the process once its backoffs are used up (54 s by default), so an API server that is away for a minute
would restart the operator: users would see its pod restart, and their jobs wait until it has listed all again.
Can go when kopf takes an endless backoff from its settings.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator


class ErrorBackoffs:
    """kopf's waits between failing requests, without an end.

    A class, because kopf iterates over it again for each request, and a generator is used up by the first (kopf 1.45,
    clients/api.py).
    """

    def __iter__(self) -> Iterator[float]:
        """1, 2, 4 … 30 s, and 30 s from then on."""
        yield from (1.0, 2.0, 4.0, 8.0, 16.0)
        yield from itertools.repeat(30.0)
