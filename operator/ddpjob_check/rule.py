"""The types of the rules: a script and what is known of its job go in, findings come out."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar

from ddpjob_check.script import Script

Severity = Literal["error", "warning"]

SYNTAX = "syntax"
LEFT_OUT = "left-out"
"""The name of the finding that says which rules took too long, and so found nothing."""
T = TypeVar("T")


class TooLongError(Exception):
    """The work was given up, because it took too long."""


Limited: TypeAlias = Callable[[Callable[[], Any]], Any]
"""Does some work and returns its result. Raises TooLongError."""


def unlimited(work: Callable[[], T]) -> T:
    """Do the work, however long it takes."""
    return work()


@dataclass(frozen=True, order=True)
class Finding:
    """One mistake: where (line and column from 1), which rule, and a sentence with the fix."""

    file: str
    line: int
    column: int
    rule: str
    severity: Severity
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.severity}[{self.rule}]: {self.message}"


@dataclass(frozen=True)
class Found:
    """What a rule finds in a script. severity: where it differs from the rule's own."""

    line: int
    message: str
    severity: Severity | None = None
    column: int = 1
    node: ast.AST | None = None
    """An error becomes a warning unless this certainly runs; None: it needs no line of the script."""


@dataclass(frozen=True)
class Job:
    """What is known of the job in which a script will run; None, and "" for the launcher: not known."""

    nodes: int | None = None
    min_nodes: int | None = None
    """Of an elastic job: the least nodes with which it trains; `nodes` are the most."""
    nproc: int | None = None
    gpus: int | None = None
    backend: str | None = None
    launcher: str = ""
    """torchrun, torch.distributed.launch, …; "python" where the command starts the script itself."""
    launcher_options: dict[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    """What the command gives to the script: its own options."""
    script: tuple[str, ...] = ()
    """The script as the command names it; -m and a module. Empty: by the name of its file."""
    variables: frozenset[str] | None = None
    """Those that the template and the command set beside the job's own; None: not known."""
    mounts: dict[str, bool] = field(default_factory=dict)
    """mountPath → whether all nodes may see the same files there."""
    name: str = ""
    only_leader_has_name: bool = False
    """Whether its Service gives a DNS name to node 0 alone."""
    known: bool = False
    """Whether there is a YAML: then the operator sets MASTER_ADDR, MASTER_PORT and the other variables."""
    local: bool = False
    """True if all nodes are groups of processes on this machine, as in `ddpjob run`."""

    @property
    def has_one_rank(self) -> bool:
        """Whether the job is certainly a single process."""
        return self.nodes == 1 and self.nproc == 1 and not self.is_elastic

    @property
    def world_size(self) -> int | None:
        """The number of ranks; None if it is not known, or may change."""
        return None if self.is_elastic or self.nodes is None or self.nproc is None else self.nodes * self.nproc

    @property
    def is_elastic(self) -> bool:
        """Whether the number of ranks may change while the job trains."""
        return self.min_nodes is not None

    def several_nodes(self, script: Script) -> tuple[Severity, str] | None:
        """Severity and wording of a mistake that matters on several nodes only; None where there is one node."""
        # Without a job, a script whose rendezvous is on this machine's own address is for one node.
        nodes = 1 if self.nodes is None and script.is_for_one_node else self.nodes
        if nodes is None:
            return "warning", "with more than one node"
        return ("error", f"on {nodes} nodes") if nodes > 1 else None

    @property
    def by_torchrun(self) -> bool:
        """Whether torchrun's agent serves the store of the rendezvous."""
        return self.launcher == "torchrun" or self.launcher.startswith("torch.distributed") or self.launcher in _FILES


# What YAML would not read as the same text in a list.
_QUOTED = re.compile(r"""[\s,\[\]{}#:'"&*!|>%@`]|^[-+.\d]*$""")


def command_line(words: Iterable[str]) -> str:
    """A command as a job has it."""
    listed = (json.dumps(word, ensure_ascii=False) if _QUOTED.search(word) else word for word in words)
    return f"command: [{', '.join(listed)}]"


_FILES = ("run.py", "launch.py")
Find: TypeAlias = Callable[[Script, Job], Iterator[Found]]


@dataclass(frozen=True)
class Rule:
    """One mistake: who finds it, its severity, and the wrong and the right lines for docs/check.md."""

    find: Find
    severity: Severity
    wrong: str
    right: str

    @property
    def name(self) -> str:
        """set-epoch-missing, for the function set_epoch_missing."""
        return self.find.__name__.replace("_", "-")

    @property
    def why(self) -> str:
        """The docstring of the function, as one line."""
        return " ".join((self.find.__doc__ or "").split())


def rule(severity: Severity, *, wrong: str, right: str) -> Callable[[Find], Rule]:
    """Makes a rule of the function that finds a mistake; its docstring says why it is one."""
    return lambda find: Rule(find, severity, wrong, right)
