"""A port that stays reserved for a test."""

from __future__ import annotations

import socket

from ddprun import ports

_HELD: list[socket.socket] = []


def free_port() -> int:
    """Return a port that stays bound and does not listen, so nobody else gets it before a server of the test uses
    it."""
    _HELD.append(ports.hold())
    return ports.number(_HELD[-1])
