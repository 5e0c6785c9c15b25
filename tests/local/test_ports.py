"""A port that is reserved for rank 0's store goes to no other process, and torch can still bind it."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from ddprun import ports

# Script that prints its port, and holds the port until it ends.
JOB = """
import sys
from ddprun import ports
held = ports.hold()
print(ports.number(held), flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def jobs() -> Iterator[list[subprocess.Popen[str]]]:
    with ExitStack() as stack:
        started = []
        for _ in range(8):
            job = subprocess.Popen(
                [sys.executable, "-c", JOB], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            stack.enter_context(job)
            stack.callback(job.kill)
            started.append(job)
        yield started


def server(number: int, address: str, *, reuse: bool) -> socket.socket:
    """Return a server that listens on the port. Raise OSError if the port is in use."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
    try:
        listening.bind((address, number))
        listening.listen()
    except OSError as error:
        listening.close()
        if error.errno == 99:
            pytest.skip(f"this machine has no {address}")
        raise
    return listening


def test_jobs_that_start_together_get_different_ports(jobs: list[subprocess.Popen[str]]) -> None:
    numbers = [int(job.stdout.readline()) for job in jobs if job.stdout is not None]
    assert len(set(numbers)) == len(jobs), f"two jobs would train into one store: {numbers}"


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_a_held_port_can_be_bound_as_by_the_store_of_torch(address: str) -> None:
    with closing(ports.hold()) as held, closing(server(ports.number(held), address, reuse=True)):
        pass


def test_a_held_port_is_refused_to_a_program_that_wants_it_exclusively() -> None:
    with closing(ports.hold()) as held, pytest.raises(OSError, match="in use"):
        server(ports.number(held), "0.0.0.0", reuse=False)


def test_a_released_port_is_free_even_if_a_program_started_meanwhile_is_still_running() -> None:
    held = ports.hold()
    number = ports.number(held)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False) as program:
        held.close()
        with closing(server(number, "0.0.0.0", reuse=False)):
            program.kill()
