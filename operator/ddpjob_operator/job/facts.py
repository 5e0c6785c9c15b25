"""Facts that follow from a job's spec: its trainer, its launcher, its ranks."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any, Literal

from ddpjob_operator.job import bounds
from ddpjob_operator.job.launch import command, exit_codes, programs
from ddpjob_operator.job.launch.command import SCRIPT_READ_MAX, Command
from ddpjob_operator.job.podspec import command_of, gpus, mapping, mappings, mounts, trainer_container, trainer_path

_VARIABLE = re.compile(r"[A-Z][A-Z_]{3,24}")


class JobFacts:
    """Facts of a spec for any number of nodes, computed once, because a plan needs them dozens of times."""

    def __init__(
        self,
        template: dict[str, Any],
        *,
        min_nodes: int | None,
        nproc_per_node: int | Literal["auto"],
        backend: str,
        dns: str,
    ) -> None:
        self._template, self._min_nodes = template, min_nodes
        self._nproc_per_node, self._backend, self._dns = nproc_per_node, backend, dns

    @cached_property
    def trainer(self) -> dict[str, Any]:
        """The trainer's container; {} if the template has none."""
        return trainer_container(self._template) or {}

    @cached_property
    def env(self) -> dict[str, Any]:
        """Values of the trainer's own variables; None for a variable that is set by reference (valueFrom)."""
        return {str(entry.get("name")): entry.get("value") for entry in mappings(self.trainer, "env")}

    @cached_property
    def trainer_path(self) -> tuple[str | int, ...]:
        return trainer_path(self._template)

    @cached_property
    def command_path(self) -> tuple[str | int, ...]:
        """The path of the trainer's command, or of its args if it has none."""
        return (*self.trainer_path, "command" if "command" in self.trainer else "args")

    @cached_property
    def mounts(self) -> dict[str, bool]:
        """{mountPath: True if all nodes may see the same files there} for the trainer's mounts."""
        return mounts(self._template)

    @cached_property
    def command(self) -> list[str]:
        return command_of(self._template)

    @cached_property
    def shell_script(self) -> str | None:
        """The text that the command gives to a shell; None for other commands."""
        return command.shell_script(self.command)

    @cached_property
    def text(self) -> str:
        """The command as one text, limited to the length that is searched."""
        return " ".join(self.command)[:SCRIPT_READ_MAX]

    @cached_property
    def started(self) -> Command:
        return command.of_container(self.command)

    @cached_property
    def launcher(self) -> Command | None:
        """The command that torchrun or ddprun starts, with the launcher's options; None for other commands."""
        return self.started if self.started.has_torchrun_options else None

    @cached_property
    def is_launcher_alone(self) -> bool:
        """True if the container's program is torchrun or ddprun, without a shell or an image's ENTRYPOINT before it."""
        words = (self.command if self.trainer.get("command") else []) or [""]
        program, rest = programs.name(words[0]), command.after_python_options(words[1:])
        is_module = rest[:1] == ["-m"] and any(map(command.starts_ranks, rest[1:2]))
        return program in command.LAUNCHERS or (command.PYTHON.match(program) is not None and is_module)

    @cached_property
    def launcher_is_replaced(self) -> bool:
        """True if a launcher that writes no message may run after another failed: `ddprun a.py || torchrun a.py`."""
        return any(found.replaced for found in exit_codes.launcher_exits(self.command))

    @cached_property
    def mentioned(self) -> frozenset[str]:
        """Capitalized words of the trainer's container, such as RANK in `$(RANK)`: the script may read them."""
        return frozenset(_VARIABLE.findall(repr(self.trainer)))

    @cached_property
    def gpus(self) -> int:
        return gpus(self._template)

    @cached_property
    def restarts_in_place(self) -> bool:
        """True if ddprun starts the ranks, so that they can restart without new pods."""
        return self.launcher is not None and self.launcher.launcher == "ddprun"

    @cached_property
    def resizes_in_place(self) -> bool:
        """True if nodes may join and leave while the others train: in an elastic ddprun job."""
        return self.min_nodes is not None and self.restarts_in_place

    @cached_property
    def min_nodes(self) -> int | None:
        """The fewest nodes of an elastic job: minNodes, or MIN of --nnodes=MIN:MAX; None if the job needs all nodes."""
        if self._min_nodes is not None or self.launcher is None:
            return self._min_nodes
        least, most = self.launcher.nodes
        return least if 0 < least < most else None

    @cached_property
    def nproc_per_node(self) -> int:
        """Processes per node: the spec's number; for auto the command's number, else the number of GPUs, else 1."""
        if self._nproc_per_node != "auto":
            return self._nproc_per_node
        return min(bounds.NPROC_MAX, self.nproc_of_command or max(1, self.gpus))

    @cached_property
    def nproc_of_command(self) -> int | None:
        """--nproc-per-node of the command if it is a number."""
        value = self.launcher.options.get("nproc_per_node", "") if self.launcher else ""
        return bounds.count(value) if bounds.count(value) > 0 else None

    @cached_property
    def max_restarts(self) -> int | None:
        """How often torchrun may restart ranks in their pods, if the user's template sets it."""
        given = self.launcher.options.get("max_restarts") if self.launcher else None
        count = bounds.count(given or self.env.get("PET_MAX_RESTARTS") or "")
        return None if count < 0 else count

    @cached_property
    def ranks_follow_nodes(self) -> bool:
        """True if node k has the ranks from k × nproc on, unlike under torchrun's dynamic rendezvous."""
        if self.min_nodes is not None:
            return False
        by = self.launcher
        return by is None or by.launcher == "ddprun" or by.options.get("rdzv_backend", "static") == "static"

    @cached_property
    def all_have_dns_names(self) -> bool:
        """True if every node has a DNS name, not only node 0. With a dynamic rendezvous, torchrun may give all ranks
        the name of any node as MASTER_ADDR (torch 2.13, elastic/rendezvous/api.py)."""
        if self._dns != "auto":
            return self._dns == "all"
        return not (self.ranks_follow_nodes or self.restarts_in_place)

    @cached_property
    def backend(self) -> str:
        if self._backend != "auto":
            return self._backend
        return "nccl" if self.gpus else "gloo"

    @cached_property
    def grace_seconds(self) -> int:
        """terminationGracePeriodSeconds; 30 if unset, as in Kubernetes."""
        value = mapping(self._template, "spec").get("terminationGracePeriodSeconds")
        return value if isinstance(value, int) else 30

    @cached_property
    def shutdown_timeout_seconds(self) -> int:
        """Seconds for which torchrun waits for its workers after SIGTERM: the grace period, minus time to report. A
        negative value crashes torchrun (docs/dev/upstream.md, launchers)."""
        return max(1, self.grace_seconds - 5)

    @cached_property
    def termination_log(self) -> str:
        """The file to which a trainer may write why it ended. The kubelet creates and reads it."""
        path = self.trainer.get("terminationMessagePath")
        return path if isinstance(path, str) and path else "/dev/termination-log"
