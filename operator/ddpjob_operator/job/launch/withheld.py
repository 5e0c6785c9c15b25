"""Programs that start a launcher without the variables of its pod: `sudo torchrun train.py`, `env -i`, `su -`, `ssh`.

Without them each node of a job trains alone and succeeds, or waits for others in vain.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ddpjob_operator.job.launch import command, programs

# Variables that torchrun and ddprun need to find the other nodes, with the options that replace each variable.
# The rendezvous port is left out, because its default is the same on all nodes.
_OF_NODES = {
    "PET_NNODES": {"nnodes"}, "PET_NODE_RANK": {"node_rank", "rdzv_backend"},
    "PET_MASTER_ADDR": {"master_addr", "rdzv_endpoint"},
}  # fmt: skip
_NPROC = "PET_NPROC_PER_NODE"
ALL = frozenset((*_OF_NODES, _NPROC))
_IN_THE_POD = "start it in the pod itself"
# Programs that start a command outside of the container, each with the options that would pass variables on.
_OUTSIDE = {
    "ssh": re.compile("SendEnv|SetEnv"),
    **dict.fromkeys(("docker", "podman", "nerdctl"), re.compile(r"-e\b|--env")),
    "kubectl": None,
}
# Programs that start a command in a separate session, each with the options by which it exits before the command.
_DETACHES = {
    "screen": re.compile(r"-[A-Za-z]*d"), "tmux": re.compile(r"-[A-Za-z]*d"),
    **dict.fromkeys(("docker", "podman", "nerdctl"), re.compile(r"-[a-z]*d[a-z]*$|--detach$")),
}  # fmt: skip
# Options of sudo and env whose next word is a value.
_VALUE_FOLLOWS = re.compile(r"-[a-zA-Z]*[CDRTUghpu]|--(?:user|group|chdir|unset)")
_CLEAN = {"-e", "--cleanenv", "-C", "--containall"}
CARRIERS = frozenset((*_OUTSIDE, *_DETACHES, "singularity", "apptainer"))
"""Programs that start a command elsewhere, with options that are not known here."""
WORDS_MAX = 60
"""The most words before a launcher that are read: the operator's event loop reads them."""


class Withheld(NamedTuple):
    """Variables of the job that a program does not pass on to its command."""

    names: frozenset[str] = frozenset()
    by: str = ""
    """The program as the command names it: `sudo`."""
    fix: str = ""

    @property
    def is_all(self) -> bool:
        """True if none of the job's variables is passed on."""
        return self.names == ALL

    def but(self, names: Sequence[str]) -> Withheld:
        """Return which variables are still missing after these variables were set."""
        left = self.names.difference(names)
        return self._replace(names=left) if left else NOTHING

    def needed(self, options: Mapping[str, str], *, nodes: bool) -> bool:
        """True if a launcher with these options needs a withheld variable: one that names the other nodes, or, with
        nodes=False, the number of processes."""
        if not nodes:
            return _NPROC in self.names and "nproc_per_node" not in options
        if "standalone" in options:  # --standalone is chosen on purpose, for example to prepare data
            return False
        return any(name in self.names and not given & {*options} for name, given in _OF_NODES.items())


NOTHING = Withheld()


def by_words(words: Sequence[str]) -> Withheld:
    """Return which variables the words before a launcher do not pass on to it."""
    found, before = NOTHING, ""
    words = [*itertools.takewhile(lambda word: not _begins_training(word), words[:WORDS_MAX])]
    for i, word in enumerate(words):
        found = _by_program(programs.name(word), _options(words[i + 1 :])) or found
        if "=" in word:
            found = found.but([word.partition("=")[0]])
        elif word.startswith(("$", "`")) and not _VALUE_FOLLOWS.fullmatch(before) and found.by != "ssh":
            return NOTHING  # the expansion may set any variable
        before = word
    return found


def _begins_training(word: str) -> bool:
    name = programs.name(word)
    return command.starts_ranks(word) or name in command.SHELLS or command.PYTHON.match(name) is not None


def _options(words: Sequence[str]) -> list[str]:
    """Return the words up to the next wrapper. `exec` is no wrapper here, because it may belong to `docker exec`."""
    others = programs.WRAPPERS - {"exec"}
    end = next((i for i, word in enumerate(words) if programs.name(word) in others), len(words))
    return [*words[:end]]


def _by_program(name: str, options: list[str]) -> Withheld | None:
    if name == "env":
        if {"-", "-i", "--ignore-environment"} & {*options}:
            return Withheld(ALL, "env -i", "leave -i out")
        pairs = zip(["", *options], options, strict=False)
        unset = {word if before in ("-u", "--unset") else word.partition("=")[2] for before, word in pairs}
        return unset_by(f"env -u {min(names)}", names) if (names := ALL & unset) else None
    if name == "sudo":
        keeps = any(re.match(r"-[a-zA-Z]*E|--preserve-env", word) for word in options)
        return None if keeps else Withheld(ALL, "sudo", "use `sudo -E`")
    if name in ("su", "runuser"):
        login = {"-", "-l", "--login"} & {*options} and not any(re.match("-w|--whitelist", o) for o in options)
        return Withheld(ALL, f"{name} -", f"use {name} without `-`") if login else None
    if name in ("singularity", "apptainer"):
        clean = next((word for word in options if word in _CLEAN), "")
        return Withheld(ALL, f"{name} {clean}", f"leave {clean} out") if clean else None
    if name in _OUTSIDE:
        passes = _OUTSIDE[name]
        keeps = passes is not None and any(passes.search(word) for word in options)
        return None if keeps else Withheld(ALL, name, _IN_THE_POD)
    return None


def unset_by(by: str, names: Sequence[str] | frozenset[str]) -> Withheld:
    """Return which of the job's variables `unset` removes."""
    return Withheld(ALL.intersection(names), by, "leave it out")


def detaches(words: Sequence[str]) -> bool:
    """True if a program starts its command in the background, and exits at once."""
    option = _DETACHES.get(programs.name(words[0]))
    return option is not None and any(option.match(word) for word in words[1:])
