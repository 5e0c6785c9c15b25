"""What the pure tests of node 0's decisions share."""

from __future__ import annotations

from typing import Any

from ddpjob.agent.core.leader_state import Lead, Over


def taken(found: Lead) -> list[Any]:
    """The orders that it has given since this was asked last; not that the watchdogs are told who has ended."""
    orders, found.orders[:] = [order for order in found.orders if not isinstance(order, Over)], []
    return orders
