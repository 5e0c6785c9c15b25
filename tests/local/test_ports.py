"""Two jobs side by side on one machine are never given the same port, nor one that somebody else uses."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from ddpjob_operator.local import ports
from ddpjob_operator.local.ports import FIRST, HARD_CODED, LAST, NoPortLeftError, candidates, reserve

ENV = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(ports.__file__).parents[2])}

# Says its port when all are ready to race, and keeps it until it dies.
JOB = """
import sys
from ddpjob_operator.local.ports import reserve
print("ready", flush=True)
sys.stdin.readline()
port = reserve(int(sys.argv[1]))
print(port.number, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def start() -> int:
    """A place in the range that differs between the workers of a parallel test run, far from its ends."""
    return FIRST + 100 + os.getpid() % 80 * 100


@pytest.fixture
def jobs(start: int) -> Iterator[list[subprocess.Popen[str]]]:
    with ExitStack() as stack:
        found = []
        for _ in range(8):
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            job = subprocess.Popen([sys.executable, "-S", "-c", JOB, str(start)], env=ENV, text=True, **pipes)  # type: ignore[call-overload]
            stack.enter_context(job)
            stack.callback(job.kill)
            found.append(job)
        for job in found:
            assert job.stdout.readline() == "ready\n"
        yield found


def numbers(jobs: list[subprocess.Popen[str]]) -> list[int]:
    for job in jobs:
        assert job.stdin is not None
        job.stdin.write("go\n")
        job.stdin.flush()
    return [int(job.stdout.readline()) for job in jobs if job.stdout is not None]


def test_jobs_that_start_together_with_one_wish_get_a_port_each(jobs: list[subprocess.Popen[str]], start: int) -> None:
    found = numbers(jobs)
    assert len(set(found)) == len(jobs), f"two jobs would train into one store: {found}"
    assert all(start <= number < start + 60 for number in found), "they stay near their wish"


def test_the_port_of_a_job_that_was_killed_by_kill_9_is_free_for_the_next(
    jobs: list[subprocess.Popen[str]], start: int
) -> None:
    killed, number = jobs[3], numbers(jobs)[3]
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    with reserve(number) as port:
        assert port.number == number


def test_two_reservations_of_one_process_differ_and_a_released_port_comes_back(start: int) -> None:
    with reserve(start) as first:
        with reserve(start) as second:
            assert first.number < second.number
        first.release()
        first.release()
        with reserve(start) as third:
            assert third.number == first.number


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.77", "0.0.0.0", "::1", "::"])
@pytest.mark.parametrize("listens", [True, False], ids=["listening", "only bound"])
def test_a_port_that_any_program_uses_on_any_address_is_stepped_over(address: str, listens: bool, start: int) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with reserve(start) as free:
        taken = free.number
    with closing(socket.socket(family, socket.SOCK_STREAM)) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            other.bind((address, taken))
        except OSError:
            pytest.skip(f"this machine has no {address}")
        if listens:
            other.listen()
        with reserve(taken) as port:
            assert port.number > taken, "torch's store listens on all addresses and would fail"


def test_a_reserved_port_can_be_listened_on_by_a_server_without_special_options(start: int) -> None:
    with reserve(start) as port, closing(socket.socket()) as server:
        server.bind(("0.0.0.0", port.number))
        server.listen()


def test_the_claim_does_not_pass_to_the_programs_that_the_job_starts(start: int) -> None:
    port = reserve(start)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False) as program:
        port.release()
        with reserve(port.number) as again:
            assert again.number == port.number, "a helper that lives on would hold the port of a job that has ended"
        program.kill()


@pytest.mark.parametrize("preferred", [FIRST, LAST, 0, 29500, 23456, -7, 2**40])
def test_any_wish_leads_once_through_the_range_and_never_to_a_port_that_scripts_hard_code(preferred: int) -> None:
    found = list(candidates(preferred))
    assert sorted(found) == sorted(set(range(FIRST, LAST + 1)) - HARD_CODED)
    assert set(found).isdisjoint({12355, 29500, 8888, 29400, 23456})
    assert found[0] == preferred or preferred not in set(found)


def test_when_every_port_is_taken_it_says_how_to_see_by_whom(monkeypatch: pytest.MonkeyPatch, start: int) -> None:
    monkeypatch.setattr(ports, "FIRST", start)
    monkeypatch.setattr(ports, "LAST", start + 1)
    message = rf"all ports from {start} to {start + 1} .* `ss -tlnp`"
    with reserve(start), reserve(start), pytest.raises(NoPortLeftError, match=message):
        reserve(start)


def test_a_sandbox_that_forbids_claims_is_not_told_as_a_lack_of_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> socket.socket:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", forbidden)
    with pytest.raises(PermissionError):
        reserve(FIRST)
