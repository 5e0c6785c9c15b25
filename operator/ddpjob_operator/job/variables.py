"""Rendezvous variables that the user's template overrides. `ddpjob check` only reports contradictions, because a
variable matters only to programs that read it. Wrong options are refused (launcher.py)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ddpjob_operator.job import api
from ddpjob_operator.job.launch.command import Command, nodes_range
from ddpjob_operator.job.podspec import mappings, trainer_container

BREAKS_RENDEZVOUS = frozenset(
    "MASTER_ADDR MASTER_PORT NNODES NODE_RANK NPROC_PER_NODE RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE "
    "DDPJOB_WORLD_SIZE PET_NNODES PET_NPROC_PER_NODE PET_NODE_RANK PET_MASTER_ADDR PET_MASTER_PORT PET_RDZV_ID "
    "PET_RDZV_BACKEND PET_RDZV_ENDPOINT PET_RDZV_CONF PET_STANDALONE PET_MAX_RESTARTS "
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE".split()
)
# Variables that number machines and ranks.
# Slurm, Volcano (VK_ is its old name), Open MPI, PMI, MVAPICH, LSF, PBS and Flux set these variables.
OF_OTHER_LAUNCHERS = re.compile(r"(?:SLURM|VC|VK|OMPI_COMM|PMI|PMIX|MV2_COMM|LSB|PBS|FLUX)_\w+")
_LOOPBACK = re.compile(r"localhost|127\.\d+\.\d+\.\d+|\[?::1\]?")
_RANKS = ("RANK", "NODE_RANK", "GROUP_RANK", "PET_NODE_RANK")
_ADDRESSES = ("MASTER_ADDR", "PET_MASTER_ADDR")
_COMPARED = (*_RANKS, *_ADDRESSES, "PET_NNODES", "WORLD_SIZE")
# Variables, and the torchrun option that overrides each.
_OPTION_OF = {"PET_NNODES": "nnodes", "PET_NODE_RANK": "node_rank", "PET_MASTER_ADDR": "master_addr"}


def overridden(template: Mapping[str, Any]) -> list[str]:
    names = (entry.get("name") for entry in mappings(trainer_container(template) or {}, "env"))
    return sorted({name for name in names if isinstance(name, str) and name in BREAKS_RENDEZVOUS})


def remark(template: Mapping[str, Any]) -> str:
    """Return a sentence about the overridden variables; "" if there are none."""
    names = ", ".join(overridden(template))
    return (
        f"{names}: your value replaces the job's; the ranks connect only if it is right on every node" if names else ""
    )


def contradictions(spec: api.Spec, *, by_python: bool, local: bool = False) -> Iterator[tuple[int, str, str]]:
    """Yield (index in env, name, sentence) for values with which several nodes cannot meet. by_python: the command
    starts the script without a launcher. An unknown program may read any variable, so nothing is reported for it.
    local: all nodes are on this machine and find rank 0 at localhost."""
    by = spec.facts.launcher
    if spec.nodes == 1 or not (by or by_python):
        return
    text = spec.facts.text
    for number, entry in enumerate(mappings(spec.facts.trainer, "env")):
        name, value = entry.get("name"), entry.get("value")
        if local and name in _ADDRESSES:
            continue
        if name in _COMPARED and isinstance(value, str) and _is_read(name, by, text):
            yield from ((number, name, f"{name}={value}{sentence}") for sentence in _wrong(name, value, spec))


def _is_read(name: str, by: Command | None, command: str) -> bool:
    if re.search(rf"\b{name}=", command):  # the shell sets it
        return False
    if by is None:
        return not name.startswith("PET_")
    if not name.startswith("PET_"):  # torchrun reads PET_ variables as options
        return re.search(rf"\$[({{]?{name}\b", command) is not None
    is_static = by.options.get("rdzv_backend", "static") == "static"
    return _OPTION_OF.get(name) not in by.options and (is_static or name == "PET_NNODES")


def _wrong(name: str, value: str, spec: api.Spec) -> Iterator[str]:
    nodes = spec.nodes
    if name in _RANKS and value.isdecimal():
        yield f" gives all {nodes} nodes the same rank. Remove it: the job sets it; or use $(NODE_RANK)."
    elif name in _ADDRESSES and _LOOPBACK.fullmatch(value):
        yield f" is not an address at which {nodes} nodes can find rank 0. Remove it: the job sets it."
    elif name == "PET_NNODES" and not _is_number_of_nodes(value, spec):
        yield f" contradicts spec.nodes: {nodes}. Remove it: the job sets it."
    elif name == "WORLD_SIZE" and value.isdecimal() and int(value) not in (nodes, spec.world_size):
        yield f" contradicts spec.nodes: {nodes}. Remove it: the job sets it; or use $(DDPJOB_WORLD_SIZE)."


def _is_number_of_nodes(value: str, spec: api.Spec) -> bool:
    """True for the number of nodes, a range that contains it, or a text that is no number, such as $(NNODES)."""
    least, most = nodes_range(value)
    return min(least, most) < 0 or least <= spec.nodes <= most
