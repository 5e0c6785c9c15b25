"""A rank that starts before rank 0 must connect as soon as rank 0 serves the store, not at torch's next retry."""

import contextlib
import datetime as dt
import socket
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest

from ddpjob.group import wait_for_store
from ddprun import ports

HOST = "127.0.0.1"
TEN_SECONDS = dt.timedelta(seconds=10)


def is_served(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection((HOST, port), 5).close()
        return True
    return False


@pytest.fixture
def late() -> Iterator[int]:
    """Return a port on which rank 0 begins to listen after 0.1 s."""
    with ports.hold() as held:
        opened = threading.Timer(0.1, held.listen)
        opened.start()
        yield ports.number(held)
        opened.cancel()
        opened.join()


@pytest.fixture
def created(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Return the arguments of `_create_c10d_store`. The last element is True if the store was already served."""
    asked: list[tuple[Any, ...]] = []

    def create(host: str, port: int, *more: Any) -> str:
        asked.append((host, port, *more, is_served(port)))
        return "store"

    module = types.SimpleNamespace(_create_c10d_store=create)
    monkeypatch.setitem(sys.modules, "torch.distributed.rendezvous", module)
    wait_for_store.have_torch_wait_for_rank_0()
    wait_for_store.have_torch_wait_for_rank_0()
    return asked


def test_torch_connects_to_rank_0_as_soon_as_its_store_is_served(late: int, created: list[tuple[Any, ...]]) -> None:
    torchs: Any = sys.modules["torch.distributed.rendezvous"]
    assert torchs._create_c10d_store(HOST, late, 1, 2, TEN_SECONDS, True) == "store"
    assert created == [(HOST, late, 1, 2, TEN_SECONDS, True, True)], "torch would have lost half a second"


def test_rank_0_does_not_wait_for_itself(late: int, created: list[tuple[Any, ...]]) -> None:
    torchs: Any = sys.modules["torch.distributed.rendezvous"]
    torchs._create_c10d_store(HOST, late, 0, 2, dt.timedelta(hours=1))
    assert created == [(HOST, late, 0, 2, dt.timedelta(hours=1), False)]


def test_under_torchrun_the_store_exists_before_the_ranks(late, created, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    torchs: Any = sys.modules["torch.distributed.rendezvous"]
    torchs._create_c10d_store(HOST, late, 1, 2, dt.timedelta(hours=1))
    assert created == [(HOST, late, 1, 2, dt.timedelta(hours=1), False)]


@pytest.mark.parametrize(("host", "port"), [(HOST, None), ("no-such-host.invalid", 1), (HOST, 1 << 16), ("a" * 70, 1)])
def test_if_nobody_serves_torch_gives_the_reason_within_its_own_limit(host: str, port: int | None) -> None:
    with ports.hold() as held:
        waiting = threading.Thread(
            target=wait_for_store.wait_until_served, args=(host, port or ports.number(held), 0.5)
        )
        waiting.start()
        waiting.join(60)
        assert not waiting.is_alive(), "the time limit of the rendezvous is not kept"


def test_a_torch_whose_function_has_another_name_is_not_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "torch.distributed.rendezvous", module)
    wait_for_store.have_torch_wait_for_rank_0()
    assert vars(module) == {}
