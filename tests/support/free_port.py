"""A port for a test, that stays its own."""

from __future__ import annotations

import socket

from ddprun import ports

_HELD: list[socket.socket] = []


def free_port() -> int:
    """Bound and not listening, so nobody else is given it, however late a server of the test takes it."""
    _HELD.append(ports.hold())
    return ports.number(_HELD[-1])
