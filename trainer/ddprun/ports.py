"""Reserve ports: one for the agents' rendezvous, and a new one for the ranks of each generation or local attempt."""

from __future__ import annotations

import socket


def listen(port: int) -> socket.socket:
    """Listen on all addresses of this node for the other agents. Raise OSError if the port is in use."""
    server = _bound(port)
    server.listen(128)
    server.setblocking(False)
    return server


def hold() -> socket.socket:
    """Reserve a port for rank 0's store: bound, not listening. Close the socket to release it.

    Ranks import for seconds before torch binds the port. Until then the bound socket keeps outgoing connections and
    other searches for a free port from taking it. torch can still bind and listen, because both set SO_REUSEADDR.
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
