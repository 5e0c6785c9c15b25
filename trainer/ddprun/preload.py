"""The agent's side of the fork server: start it, wait for its imports, request ranks from it; cope if it fails."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Mapping
from typing import Any

from ddprun import environment, processes
from ddprun.options import Options

PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "forkserver.py")
# Makes `torch.cuda.is_available()` ask NVML instead of CUDA, so that the process can still fork.
HIDDEN = ("PYTORCH_NVML_BASED_CUDA_CHECK",)
FORK_SECONDS = 30.0  # limit for two forks, which take milliseconds; a machine that swaps needs longer


class ForkServer:
    """One server process. After it refuses or ends, ranks are started without it."""

    def __init__(self, options: Options, environ: Mapping[str, str]) -> None:
        self.ready = False
        self.refused = ""  # reason why the fork server cannot be used
        self.failed: dict[str, str] = {}  # modules that the user named, and why they cannot be imported
        self.spares: set[int] = set()  # pids of spares: forked ranks that wait for a script to run
        self._spares_left = 0  # spares that are still to be forked
        self._forks_spare = False  # True if the server has not answered a request for a spare
        self._asked = options.script.preload_asked
        self._socket, its = socket.socketpair()
        self.later, its_later = socket.socketpair()  # for the child that learns imports and becomes the next server
        self.learning = ""  # "": imports are not learned yet; "now": they are being learned; "done"
        self.imports: list[str] = []  # packages that were learned
        self.left: dict[str, str] = {}  # modules that were left out, and why
        self.bytes_learned = 0
        self._has_told = False  # True if the learned imports were announced
        # Without a buffer, because `poll` does not see data in it.
        self._lines = self._socket.makefile("rb", buffering=0)
        ends = [its.fileno(), its_later.fileno()]
        argv = [environment.python(environ), "-u", PROGRAM, *map(str, ends)]
        self.pid = processes.start(argv, environ, keep=ends)
        its.close()
        its_later.close()
        hidden = {name: environ.get(name) for name in HIDDEN}
        self._send(
            {"modules": options.script.preload, "path0": environment.first_folder(options.script), "hidden": hidden}
        )

    @property
    def settled(self) -> bool:
        """True if the fork server is ready or has refused; False while it is importing."""
        return self.ready or bool(self.refused)

    def fileno(self) -> int:
        return self._socket.fileno()

    def hear(self) -> None:
        """Read what the server sends: the result of its imports, the pid of a spare, or its end."""
        if not processes.readable(self.fileno(), 0):  # `start` has already read the message
            return
        message = self._read()
        if message is None:
            self.refused = self.refused or ("it has ended" if self.ready else "it ended while it imported")
            self.ready = False
        elif self.refused:
            pass  # the server was given up before
        elif self._forks_spare:
            self._add_spare(message)
            self._fork_spare()
        else:
            self.ready = bool(message.get("ready"))
            self.refused = str(message.get("refused", ""))
            self.failed = {name: why for name, why in message.get("failed", {}).items() if self._asked}

    def learn(self, note: str) -> None:
        """Request that a child imports a rank's list of imports; `hear_later` reads the answer."""
        self.learning = "now"
        with contextlib.suppress(OSError):  # the server has ended, which `hear` will notice
            self._send({"learn": note})

    def hear_later(self) -> bool:
        """Read the child's answer. True if the child serves from now on; the descriptor has then changed."""
        self.learning = "done"
        message: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError), self.later.makefile("rb", buffering=0) as lines:
            message = json.loads(lines.readline())
        if not message.get("ready") or not self.ready:
            self.left = {"": str(message["unlearned"])} if "unlearned" in message else {}
            self.later.close()
            return False
        self.close()
        self._socket, self._lines = self.later, self.later.makefile("rb", buffering=0)
        self.pid, self._forks_spare, self._spares_left = int(message["pid"]), False, 0
        self.spares.clear()
        self.imports, self.left = list(message["imports"]), dict(message["left"])
        self.bytes_learned = int(message["bytes"])
        return True

    def tell_learned(self) -> str:
        """Describe the learned imports once, when they are first used; "" if there are none."""
        if self._has_told or not (self.imports or self.left):
            return ""
        self._has_told = True
        left = ", ".join(f"{name or 'all'} ({why})" for name, why in sorted(self.left.items()))
        size = f"; the fork server grew by {self.bytes_learned >> 20} MiB" if self.imports else ""
        unnamed = {*sys.stdlib_module_names, "ddpjob", "ddpjob_core", "ddprun"}
        named = [name for name in self.imports if name not in unnamed and not name.startswith("_")]
        packages = ", ".join(named[:4]) + (", …" if len(named) > 4 else "")
        begins = f"imported before the ranks start: {packages or 'torch'}{size}"
        return begins + (f"; left out: {left}" if left else "")

    def start(self, run: Mapping[str, Any]) -> int:
        """Fork a rank or use a spare. Return its pid. Raise OSError; the caller then calls `give_up`."""
        self._spares_left = 0
        self._send(run)
        if self._forks_spare:
            self._add_spare(self._answer())
        answer = self._answer()
        if "pid" not in answer:
            raise OSError(str(answer["error"]))
        self.spares.discard(int(answer["pid"]))
        return int(answer["pid"])

    def look_for_changes(self) -> str:
        """Give up if the file of an imported module has changed, and return why: ranks would run the old code."""
        if not self.ready:
            return ""
        try:
            self._send({"changed": True})
            if self._forks_spare:
                self._add_spare(self._answer())
            changed = self._answer().get("changed")
        except OSError:  # `start` will report it
            return ""
        if not changed:
            return ""
        why = f"{', '.join(changed)} changed after the import"
        self.give_up(why)
        return why

    def fork_spares(self, number: int) -> None:
        """Fork this many spares for the next generation, one by one; 0: stop forking. `hear` reads their pids."""
        self._spares_left = number - len(self.spares)
        self._fork_spare()

    def _fork_spare(self) -> None:
        # Count the requests, not the living spares: otherwise forking would never end if something kills spares.
        if self.ready and not self._forks_spare and self._spares_left > 0:
            self._spares_left -= 1
            self._forks_spare = True
            with contextlib.suppress(OSError):  # the server has ended, which `hear` will notice
                self._send({"spare": True})

    def _add_spare(self, message: Mapping[str, Any]) -> None:
        self._forks_spare = False
        try:
            pid = int(message["pid"])
            os.kill(pid, 0)
        except (KeyError, OSError):  # the spare could not be forked, or has already been killed and reaped
            self._spares_left = 0  # a restart works without spares
        else:
            self.spares.add(pid)

    def _answer(self) -> Mapping[str, Any]:
        if not processes.readable(self.fileno(), FORK_SECONDS):
            raise OSError(f"it did not fork within {FORK_SECONDS:g} s")
        return self._read() or {"error": "it has ended"}

    def give_up(self, why: str) -> None:
        """Stop forking ranks and end the server. `hear` is called once more after this."""
        self.ready, self.refused = False, why
        self.spares.clear()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._lines.close()
        self._socket.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _read(self) -> dict[str, Any] | None:
        with contextlib.suppress(OSError):
            line = self._lines.readline()
            message = json.loads(line) if line.endswith(b"\n") else None
            return message if isinstance(message, dict) else None
        return None
