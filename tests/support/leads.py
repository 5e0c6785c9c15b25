"""Helpers for tests of the decisions of node 0."""

from __future__ import annotations

from typing import Any

from ddpjob_core.failures import RESUMABLE_EXIT_CODE, Failure
from ddprun.core.leader_state import LeaderState, Over, StartOrder


def taken(found: LeaderState) -> list[Any]:
    """Return the orders given after the last call, without those to watchdogs about ended ranks."""
    orders, found.orders[:] = [order for order in found.orders if not isinstance(order, Over)], []
    return orders


def start(found: LeaderState, generation: int, *, preflight: bool = False) -> StartOrder:
    """Return the order to start this generation of all its members."""
    return StartOrder(generation, found.members, preflight)


def failure(rank: int | None = 0, code: int | None = 1, **known: Any) -> Failure:
    """Return a node's report about a failure of one of its ranks."""
    return Failure(rank, exit_code=code, **{"resumable": code == RESUMABLE_EXIT_CODE, **known})
