"""A port that stays reserved for a test."""

import socket

from ddprun import ports

_HELD: list[socket.socket] = []


def free_port() -> int:
    """Return a port that is bound but does not listen: no other process gets it before the test's server uses it."""
    _HELD.append(ports.hold())
    return ports.number(_HELD[-1])
