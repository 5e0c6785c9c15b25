"""A TCP port on loopback that no other local job on this machine is given.

The runner reserves a MASTER_PORT before it starts the nodes; rank 0 binds it seconds later, when torch is imported, so
a port that is only tested for being free would be given to the next job in between.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from types import TracebackType

# Below 30000-32767 (Kubernetes' node ports) and 32768-60999 (where Linux takes the ports of outgoing connections from).
FIRST, LAST = 20000, 29399

# What scripts in the wild hard-code: the tutorials (12355), ImageNet's tcp:// example (23456), torchrun (29400, 29500),
# Jupyter (8888). A user may start such a script at any time, and it cannot step aside.
HARD_CODED = frozenset({8888, 12355, 23456, 29400, 29500})


class NoPortLeftError(Exception):
    """Every port of the range is taken; the message says how to see by whom."""


@dataclass
class Port(AbstractContextManager["Port"]):
    """A reserved port; `release` gives it back, as does the end of the process, however it ends."""

    number: int
    claim: socket.socket

    def release(self) -> None:
        """Let other jobs have the port; a second call does nothing."""
        self.claim.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


def reserve(preferred: int) -> Port:
    """The first port from `preferred` on that is free and that no other job has reserved; raises NoPortLeftError.

    Any number is a good `preferred`, as a hash of the job's name: it is folded into the range 20000-29399.
    """
    for number in candidates(preferred):
        claim = claimed(number)
        if claim is None:
            continue
        if is_free(number):
            return Port(number, claim)
        claim.close()
    raise NoPortLeftError(
        f"all ports from {FIRST} to {LAST} on this machine are in use; `ss -tlnp` shows by which programs"
    )


def candidates(preferred: int) -> Iterator[int]:
    """Every port of the range once, from `preferred` upwards and round."""
    size = LAST - FIRST + 1
    for step in range(size):
        number = FIRST + (preferred - FIRST + step) % size
        if number not in HARD_CODED:
            yield number


def claimed(number: int) -> socket.socket | None:
    """The right to a port among local jobs, None if another has it.

    An abstract Unix socket of that name, not a lock file: it belongs to the network namespace exactly as the port does,
    so containers that share /tmp but no network do not disturb each other, and neither another user nor another TMPDIR
    hides a claim. The kernel drops it with the process, and no file is left to be cleaned. Raises OSError where a
    sandbox forbids such sockets.
    """
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claim.bind(f"\0ddpjob/port/{number}")
    except OSError as error:
        claim.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    return claim


def is_free(number: int) -> bool:
    """Can a server take the port on all addresses, as torch's store does?"""
    return can_bind(socket.AF_INET, "0.0.0.0", number) and can_bind(socket.AF_INET6, "::", number)  # noqa: S104


def can_bind(family: socket.AddressFamily, address: str, number: int) -> bool:
    """Is nothing bound to the port, on any address of the family? Bound for a moment only, never listening.

    Without SO_REUSEADDR, so that a socket that does not listen yet and a former job's connections in TIME_WAIT count
    too: a script that does not set it either could not bind there.
    """
    try:
        tester = socket.socket(family, socket.SOCK_STREAM)
    except OSError:  # a kernel without IPv6: then nobody listens there
        return True
    with closing(tester):
        if family == socket.AF_INET6:
            tester.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            tester.bind((address, number))
        except OSError as error:
            return error.errno == errno.EADDRNOTAVAIL  # IPv6 is switched off
    return True
