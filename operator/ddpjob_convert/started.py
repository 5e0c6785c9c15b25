"""Options of a command line that identify a single machine."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

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
