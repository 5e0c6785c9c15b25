"""The types of rules. A rule is a function of a script and facts about its job, and returns findings."""

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
"""Name of the finding that lists the rules that were stopped because they took too long."""
T = TypeVar("T")


Limited: TypeAlias = Callable[[Callable[[], Any]], Any]
"""Calls a function within a time limit and returns its result. Raises TooLongError."""


def unlimited(work: Callable[[], T]) -> T:
    """Call `work` without a time limit, and return its result."""
    return work()


@dataclass(frozen=True, order=True)
class Finding:
    """One mistake: the place (line and column from 1), the rule, and a sentence with the fix."""

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
    """One result of a rule. severity: None means the rule's own severity."""

    line: int
    message: str
    severity: Severity | None = None
    column: int = 1
    node: ast.AST | None = None
    """An error becomes a warning unless this node certainly runs; None: no line of the script is needed."""


@dataclass(frozen=True)
class CheckedJob:
    """Facts about the job that will run a script. None means unknown; an unknown launcher is ""."""

    nodes: int | None = None
    min_nodes: int | None = None
    """Minimum number of nodes of an elastic job; `nodes` is the maximum."""
    nproc: int | None = None
    gpus: int | None = None
    backend: str | None = None
    launcher: str = ""
    """torchrun, torch.distributed.launch, …; "python" if the command starts the script itself."""
    launcher_options: dict[str, str] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    """The script's arguments in the command."""
    script: tuple[str, ...] = ()
    """The script as the command names it, or -m and a module. If empty, `check` uses the file's name."""
    variables: frozenset[str] | None = None
    """Names of variables set by template and command, besides those that the job sets; None: unknown."""
    mounts: dict[str, bool] = field(default_factory=dict)
    """By mountPath: True if all nodes may see the same files there."""
    name: str = ""
    only_leader_has_name: bool = False
    """True if the Service gives a DNS name only to node 0."""
    known: bool = False
    """True if there is a YAML, so that the operator sets MASTER_ADDR, MASTER_PORT and the other variables."""
    local: bool = False
    """True if all nodes are groups of processes on this machine, as in `ddpjob run`."""
    imported: bool = False
    """True if the command only imports the script: `python -c "import train"`."""
    certain: bool = True
    """False if the job may not run the script, so that nothing in it is an error."""

    @property
    def has_one_rank(self) -> bool:
        """True if the job is certainly a single process."""
        return self.nodes == 1 and self.nproc == 1 and not self.is_elastic

    @property
    def world_size(self) -> int | None:
        """Return the number of ranks; None if it is unknown or may change."""
        return None if self.is_elastic or self.nodes is None or self.nproc is None else self.nodes * self.nproc

    @property
    def is_elastic(self) -> bool:
        """True if the number of ranks may change during training."""
        return self.min_nodes is not None

    def several_nodes(self, script: Script) -> tuple[Severity, str] | None:
        """Return severity and wording for a mistake that matters only on several nodes; None if there is one node."""
        # If the job is unknown, a rendezvous at this machine's own address means that the script is for one node.
        nodes = 1 if self.nodes is None and script.is_for_one_node else self.nodes
        if nodes is None:
            return "warning", "with more than one node"
        return ("error", f"on {nodes} nodes") if nodes > 1 else None

    @property
    def by_torchrun(self) -> bool:
        """True if the launcher is torchrun, whose agent serves the store of the rendezvous."""
        return self.launcher == "torchrun" or self.launcher.startswith("torch.distributed") or self.launcher in _FILES


# Text that needs quotes in a YAML list.
_QUOTED = re.compile(r"""[\s,\[\]{}#:'"&*!|>%@`]|^[-+.\d]*$""")


def command_line(words: Iterable[str]) -> str:
    """Return a command as a line of a DDPJob: command: [torchrun, train.py]."""
    listed = (json.dumps(word, ensure_ascii=False) if _QUOTED.search(word) else word for word in words)
    return f"command: [{', '.join(listed)}]"


_FILES = ("run.py", "launch.py")
Find: TypeAlias = Callable[[Script, CheckedJob], Iterator[Found]]


@dataclass(frozen=True)
class Rule:
    """One kind of mistake: the function that finds it, its severity, and a wrong and a right example for the docs."""

    find: Find
    severity: Severity
    wrong: str
    right: str

    @property
    def name(self) -> str:
        """Return set-epoch-missing for the function set_epoch_missing."""
        return self.find.__name__.replace("_", "-")

    @property
    def why(self) -> str:
        """Return the docstring of the function, as one line, for the docs."""
        return " ".join((self.find.__doc__ or "").split())


def rule(severity: Severity, *, wrong: str, right: str) -> Callable[[Find], Rule]:
    """Return a decorator that turns a function into a rule. The function's docstring explains the mistake."""
    return lambda find: Rule(find, severity, wrong, right)
