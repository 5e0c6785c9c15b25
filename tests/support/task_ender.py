"""Ends single tasks of an operator in its own process, when the test's process requests it.

In the pytest process `installed` replaces uvloop.run. An operator forked from this process then listens on a socket."""

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

SOCKET = "DDPJOB_TEST_TASKS"
_run = uvloop.run


def _named() -> dict[str, asyncio.Task[Any]]:
    """Return all tasks by name and code, which are the same in each run. Tasks of this file are left out."""
    named: dict[str, asyncio.Task[Any]] = {}
    for task in asyncio.all_tasks():
        code = getattr(task.get_coro(), "cr_code", None)
        if code is None or (code.co_filename == __file__ and code.co_name != "_with_orders"):
            continue
        label = task.get_name() if not task.get_name().startswith("Task-") else ""
        label = label.partition(" of <")[0]  # without the address of an object
        named.setdefault(f"{label} {code.co_qualname}".strip(), task)
    return named


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    name = (await reader.readline()).decode().strip()
    tasks = _named()
    if name in tasks:
        tasks[name].cancel()
    writer.write(json.dumps(sorted(tasks)).encode())
    await writer.drain()
    writer.close()


async def _with_orders(main: Coroutine[Any, Any, int]) -> int:
    async with await asyncio.start_unix_server(_answer, os.environ[SOCKET]):
        return await main


def _run_with_orders(main: Coroutine[Any, Any, int]) -> int:
    return _run(_with_orders(main)) if SOCKET in os.environ else _run(main)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Within this `with` block, operators that start with the variable SOCKET listen on that socket."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvloop, "run", _run_with_orders)
        yield


def tasks(path: Path, end: str = "") -> list[str]:
    """Return the names of all tasks. If `end` is one of them, this task is cancelled."""
    with socket.socket(socket.AF_UNIX) as talk:
        talk.settimeout(10)
        talk.connect(str(path))
        talk.sendall(f"{end}\n".encode())
        with talk.makefile("rb") as answer:
            return list(json.loads(answer.read()))
