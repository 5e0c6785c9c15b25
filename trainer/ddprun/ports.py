"""Ports: one where agents meet, and for ranks another one in each generation, and in each attempt of a local run."""

from __future__ import annotations

import socket


def listen(port: int) -> socket.socket:
    """Listen for the other agents on all addresses of node 0. Raise OSError if the port is in use."""
    server = _bound(port)
    server.listen(128)
    server.setblocking(False)
    return server


def hold() -> socket.socket:
    """Reserve a port for rank 0's store: bound, not listening. Close the socket to release it.

    Seconds of imports pass between choosing a free port and torch's bind. The bound socket keeps it from outgoing
    connections and from other searches for a free port; torch sets SO_REUSEADDR too, and may still bind it and listen.
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
