"""The script or module that a command line starts, which names the job, and options of a single machine."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from ddpjob_operator.job import launcher, programs

_PYTHON = re.compile(r"(?:python|pypy)[\d.]*")
# How scripts name what differs on each machine, and what a DDPJob has for it.
_VARIABLE_OF = {
    "rank": "$(NODE_RANK)",
    "node_rank": "$(NODE_RANK)",
    "machine_rank": "$(NODE_RANK)",
    "world_size": "$(NNODES)",
    "nnodes": "$(NNODES)",
    "num_nodes": "$(NNODES)",
    "num_machines": "$(NNODES)",
    "dist_url": "tcp://$(MASTER_ADDR):$(MASTER_PORT)",
    "init_method": "tcp://$(MASTER_ADDR):$(MASTER_PORT)",
    "dist_init_method": "tcp://$(MASTER_ADDR):$(MASTER_PORT)",
    "master_addr": "$(MASTER_ADDR)",
    "master_ip": "$(MASTER_ADDR)",
    "master_port": "$(MASTER_PORT)",
}
_RANKS = {"rank", "node_rank", "machine_rank"}
_COUNTS = {"world_size", "nnodes", "num_nodes", "num_machines"}
_MACHINES = {"nnodes", "num_nodes", "num_machines"}
_ADDRESSES = {"dist_url", "init_method", "dist_init_method", "master_addr", "master_ip"}
_HERE = re.compile(
    r"(?:tcp://)?(?:localhost|127\.\d+\.\d+\.\d+|0\.0\.0\.0|\[?::1?\]?)(?::|/|$)|(?:env|file)://|auto$|\W*$"
)


def name_giver(words: Sequence[str]) -> str:
    """Return the script, or the module after -m; "" if the command does not show it. Never one of its arguments."""
    script = launcher.shell_script(list(words))
    commands = [list(words)] if script is None else list(launcher.shell_commands(script))
    by_launcher = [found for one in commands if (found := _behind_launcher(one))]
    named = by_launcher or [found for one in commands if (found := _behind_python(one))]
    return named[0] if named and "$" not in named[0] and "`" not in named[0] else ""


def _behind_launcher(words: list[str]) -> str:
    begin = launcher.options_begin(words)
    if begin is None:
        return ""
    options, rest = launcher.read_options(words[begin:])
    if "no_python" in options:
        return name_giver(rest) if rest else ""
    return rest[0] if rest else ""


def _behind_python(words: list[str]) -> str:
    for i in programs.places(words):
        if words[i].endswith(".py"):
            return words[i]
        if _PYTHON.fullmatch(programs.name(words[i])):
            rest = launcher.after_python_options(words[i + 1 :])
            if rest[:1] == ["-m"]:
                return rest[1] if len(rest) > 1 else ""
            return "" if rest[:1] == ["-c"] or not rest else rest[0]
    return ""


def of_one_machine(words: Sequence[str]) -> str:
    """Return a sentence about options that identify one of several machines, which all nodes would get; "" if none.

    A count alone may count processes of a single machine, and a rank alone may be LoRA's.
    """
    given = list(_given(words))
    values = {name: value for name, _, value in given}
    is_remote = any(name in _ADDRESSES and not _HERE.match(value) for name, value in values.items())
    is_one_of = bool(_RANKS & values.keys()) and any(name in _COUNTS and value != "1" for name, value in values.items())
    if not is_remote and not is_one_of:
        return ""
    shown = [option for _, option, _ in given]
    instead = [option[: len(option) - len(value)] + _VARIABLE_OF[name] for name, option, value in given]
    machines = next((values[name] for name in sorted(_MACHINES) if name in values), "")
    count = f"spec.nodes: {machines}" if machines else "spec.nodes to the number of machines"
    return (
        f"{' '.join(shown)}: one machine's own, and all nodes would get it; write {' '.join(instead)}, and set {count}"
    )


def _given(words: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (name, option with its value, value) for literal values; -1 means unset in such scripts."""
    for word, following in pairwise([*words, ""]):
        option, has_value, own = word.partition("=")
        name, value = option.lstrip("-").replace("-", "_"), (own if has_value else following).rstrip(";")
        is_literal = value and "$" not in value and "`" not in value and not value.startswith("-")
        if option.startswith("--") and name in _VARIABLE_OF and is_literal:
            if name in _RANKS | _COUNTS | {"master_port"} and not value.isdecimal():
                continue
            yield name, f"{option}{has_value or ' '}{value}", value
