"""What the pure tests of node 0's decisions share."""

from __future__ import annotations

from typing import Any

from ddpjob.agent.lead import Lead


def taken(found: Lead) -> list[Any]:
    """The orders that it has given since this was asked last."""
    orders, found.orders[:] = list(found.orders), []
    return orders
