"""The agent's end of the fork server: start it, wait for its imports, ask it for ranks, do without it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Mapping
from typing import Any

from ddpjob.agent import environment, processes
from ddpjob.agent.options import Options

PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "forkserver.py")
# Asked of NVML instead of CUDA, `torch.cuda.is_available()` leaves a process able to fork.
HIDDEN = ("PYTORCH_NVML_BASED_CUDA_CHECK",)
FORK_SECONDS = 30.0  # two forks take milliseconds; a machine that swaps may need longer


class ForkServer:
    """One server process, until it refuses or ends: then ranks are started without it."""

    def __init__(self, options: Options, environ: Mapping[str, str]) -> None:
        self.ready = False
        self.refused = ""  # why it cannot be used
        self.failed: dict[str, str] = {}  # modules that the user named, and why they cannot be imported
        self._asked = options.preload_asked
        self._unread = b""
        ours, its = socket.socketpair()
        self._socket = ours
        argv = [environment.python(environ), "-u", PROGRAM, str(its.fileno())]
        self.pid = processes.start(argv, environ, keep=[its.fileno()])
        its.close()
        self._send(
            {
                "modules": list(options.preload),
                "path0": environment.first_folder(options),
                "hidden": {name: environ.get(name) for name in HIDDEN},
            }
        )

    @property
    def settled(self) -> bool:
        """Whether it is known that, or that not, it serves."""
        return self.ready or bool(self.refused)

    def fileno(self) -> int:
        """To wait for its word."""
        return self._socket.fileno()

    def hear(self) -> None:
        """Read what it says when its imports are done."""
        said = self._read()
        if said is None:
            self.refused = self.refused or ("it has ended" if self.ready else "it ended while it imported")
            self.ready = False
            return
        self.ready = bool(said.get("ready"))
        self.refused = str(said.get("refused", ""))
        self.failed = {name: why for name, why in said.get("failed", {}).items() if self._asked}

    def start(self, run: Mapping[str, Any]) -> int:
        """Fork a rank; its pid. Raises OSError where that fails, and then the server is not to be asked again."""
        self._send(run)
        if not processes.readable(self.fileno(), FORK_SECONDS):
            raise OSError(f"it did not fork within {FORK_SECONDS:g} s")
        said = self._read() or {"error": "it has ended"}
        if "pid" not in said:
            raise OSError(str(said["error"]))
        return int(said["pid"])

    def give_up(self, why: str) -> None:
        """It is not asked again, and ends; `hear` is still called, once."""
        self.ready, self.refused = False, why
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """The end of it."""
        self._socket.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _read(self) -> dict[str, Any] | None:
        while b"\n" not in self._unread:
            try:
                data = self._socket.recv(65536)
            except OSError:
                return None
            if not data:
                return None
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        said = json.loads(line)
        return said if isinstance(said, dict) else None
