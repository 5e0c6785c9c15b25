"""Ports: one where the agents meet; for the ranks a new one in each generation, and in each attempt of a local run."""

from __future__ import annotations

import socket


def listen(port: int) -> socket.socket:
    """Where node 0 waits for the other agents, on all its addresses. Raises OSError where the port is taken."""
    server = _bound(port)
    server.listen(128)
    server.setblocking(False)
    return server


def hold() -> socket.socket:
    """A port for rank 0's store that nobody else is given meanwhile: bound, not listening. Closing it gives it back.

    Between choosing a free port and torch's binding it lie seconds of imports. A bound socket keeps it from outgoing
    connections and from who asks for any port; torch, which sets SO_REUSEADDR as well, may still bind it and listen.
    """
    return _bound(0)


def number(held: socket.socket) -> int:
    return int(held.getsockname()[1])


def _bound(port: int) -> socket.socket:
    dual = socket.has_dualstack_ipv6()
    server = socket.socket(socket.AF_INET6 if dual else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if dual:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("", port))
    except OSError:
        server.close()
        raise
    return server
