"""Helpers for tests of the decisions of node 0's agent."""

from typing import Any

from ddpjob_core.failures import RESUMABLE_EXIT_CODE, Failure
from ddprun.core.leader_state import LeaderState, Over, StartOrder


def taken(found: LeaderState) -> list[Any]:
    """Return the orders since the last call, except `Over`, which only tells watchdogs that ranks have ended."""
    orders, found.orders[:] = [order for order in found.orders if not isinstance(order, Over)], []
    return orders


def start(found: LeaderState, generation: int, *, preflight: bool = False) -> StartOrder:
    """Return the order to start this generation on all its members."""
    return StartOrder(generation, found.members, preflight)


def failure(rank: int | None = 0, code: int | None = 1, **known: Any) -> Failure:
    """Return the failure that a node reports for one of its ranks."""
    return Failure(rank, exit_code=code, **{"resumable": code == RESUMABLE_EXIT_CODE, **known})
