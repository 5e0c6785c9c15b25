"""Replace texts of another tool that identify a machine: options and variables for one machine, and the name of rank
0's pod. A DDPJob has no pod with this name, so ranks would wait for it in vain."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from ddpjob_convert.fields import walk
from ddpjob_convert.result import Converted, Path
from ddpjob_operator.job.launch.command import shell_script
from ddpjob_operator.job.podspec import mappings, trainer_path

# The job sets these variables for each node or rank. A value in the template would override the job's value.
VARIABLES = frozenset(
    "MASTER_ADDR MASTER_PORT WORLD_SIZE RANK NNODES NODE_RANK PET_NNODES PET_NODE_RANK PET_MASTER_ADDR PET_MASTER_PORT "
    "PET_RDZV_ID PET_RDZV_BACKEND PET_RDZV_ENDPOINT PET_RDZV_CONF PET_STANDALONE".split()
)
# Options of a launcher in a shell script, and the variables with the job's values for them.
_OF_THE_JOB = {
    "nnodes": "$NNODES",
    "node_rank": "$NODE_RANK",
    "master_addr": "$MASTER_ADDR",
    "master_port": "$MASTER_PORT",
    "rdzv_endpoint": "$MASTER_ADDR:$MASTER_PORT",
    "rdzv_id": "$PET_RDZV_ID",
}
_LAUNCHER = re.compile(r"\b(?:torchrun|ddprun|torch\.distributed\.(?:run|launch))\b")
_VALUE = r"(?:\"[^\"]*\"|'[^']*'|\$\(\([^()]*\)\)|\$\([^()]*\)|[^\s\"'\\;&|])+"
_OPTION = re.compile(
    rf"--(?P<name>{'|'.join(_OF_THE_JOB).replace('_', '[-_]')})(?P<is>=|(?:\s|\\\n)+)(?P<value>{_VALUE})"
)
_OWN = re.compile(r"\$[({]?(?:PET_)?(?:NNODES|NODE_RANK|MASTER_ADDR|MASTER_PORT|RDZV_ID|RDZV_ENDPOINT)\b")
_ASSIGNED = re.compile(rf"(?<![-\w$])({'|'.join(sorted(VARIABLES))})=({_VALUE})?")
# Names of scripts' options whose value differs by machine.
_RANKS = {"rank", "node_rank", "machine_rank"}
_COUNTS = {"world_size", "nnodes", "num_nodes", "num_machines"}
_ADDRESSES = {"dist_url", "init_method", "dist_init_method", "master_addr", "master_ip"}
_HERE = re.compile(r"(?:tcp://)?(?:localhost|127\.|0\.0\.0\.0|\[?::1?\]?(?::|/|$))|(?:env|file)://|auto$|\W*$")


def move(template: dict[str, Any], first: str, any_of: str, path: Path, result: Converted) -> None:
    """Remove variables that the job sets from the trainer's `env`, and replace rank 0's address by $(MASTER_ADDR).
    first: the name of rank 0's pod. any_of: a pattern for the names of all pods. path: of the template."""
    own = trainer_path(template)[2:]
    # Copy the container, because a YAML alias may share a list with a container that does not get the job's variables.
    trainer = template["spec"]["containers"][own[-1]] = copy.deepcopy(template["spec"]["containers"][own[-1]])
    path_of_trainer = (*path, *own)
    _by_job(trainer, path_of_trainer, result)
    namespace = re.escape(str(result.metadata.get("namespace", ""))) or r"[a-z0-9-]+(?=\.svc\b)"
    # The pattern does not match folders or files with the pod's name.
    rank0 = re.compile(
        rf"(?<![\w.-])(?<!(?<!/)/){re.escape(first)}(?:\.{namespace})?(?:\.svc(?:\.cluster\.local)?)?(?![\w-]|\.\w)"
    )

    def moved(text: Any, *place: str | int) -> Any:
        # $(NAME) works everywhere, because Kubernetes replaces it before a program reads it, even in a shell's quotes.
        found = rank0.search(text) if isinstance(text, str) else None
        if found is None:
            return text
        told = f"{found[0]} is now $(MASTER_ADDR), which the job sets: a DDPJob has no such name"
        result.remark((*path_of_trainer, *place), told)
        return rank0.sub("$(MASTER_ADDR)", text)

    lists = {part: words for part in ("command", "args") if isinstance(words := trainer.get(part), list)}
    for part, words in lists.items():
        trainer[part] = [moved(word, part, i) for i, word in enumerate(words)]
    for i, entry in enumerate(mappings(trainer, "env")):
        if (name := str(entry.get("name"))) in VARIABLES:
            text = f"{name}: not needed: the job sets it itself, and this would override it; removed"
            result.remark((*path_of_trainer, "env", i), text)
            entry.clear()
        elif "value" in entry:
            entry["value"] = moved(entry["value"], "env", i)
    job = result.metadata.get("name")
    for place, text in walk(template, path):
        found = re.findall(rf"(?<![\w-]){any_of}(?![\w-])", text) if isinstance(text, str) else ()
        for name in dict.fromkeys(found):
            result.remark(
                place,
                f"{name}: a DDPJob has no such name. In the trainer $(MASTER_ADDR) is node 0; with spec.dns: all the "
                f"nodes are {job}-0.{job}, {job}-1.{job}, ...",
            )
    env = trainer.get("env")
    # Remove cleared entries last, because the remarks' paths contain list indexes.
    trainer |= {"env": [entry for entry in env if entry]} if isinstance(env, list) else {}
    if trainer.get("env") == []:
        del trainer["env"]


def _by_job(trainer: dict[str, Any], path: Path, result: Converted) -> None:
    parts = [trainer[part] for part in ("command", "args") if isinstance(trainer.get(part), list)]
    script = shell_script([word for part in parts for word in part if isinstance(word, str)])
    for part in parts if script else ():
        part[:] = [by_job(word, path, result) if word == script else word for word in part]


def by_job(script: str, path: Path, result: Converted) -> str:
    """Return a shell script in which options that identify the machine have the job's values. In a DDPJob
    `$VK_TASK_INDEX` is unset, and $RANDOM would give each node a different rendezvous."""
    changed = []

    def value(found: re.Match[str]) -> str:
        name = found["name"].replace("-", "_")
        if _OWN.search(found["value"]) or (name == "nnodes" and "$" not in found["value"]):
            return found[0]
        changed.append(f"{' '.join(found[0].split())} is now {_OF_THE_JOB[name]}")
        return f"--{found['name']}{found['is']}{_OF_THE_JOB[name]}"

    launched = _LAUNCHER.search(script)
    begin = launched.end() if launched else len(script)
    made = script[:begin] + _OPTION.sub(value, script[begin:])
    if changed:
        result.remark(path, f"{', '.join(changed)}: the job sets the rendezvous of each node")
    for name in dict.fromkeys(name for name, value in _ASSIGNED.findall(script) if name not in value):
        result.remark(path, f"{name}: the job sets it, but the script assigns another value: remove the assignment")
    return made


def of_one_machine(words: Sequence[str]) -> str:
    """Return a sentence about options for one of several machines; "" if there are none. A count alone may mean
    processes of one machine, and a rank alone may be LoRA's, so neither is enough."""
    given = list(_given(words))
    values = {name: value for name, _, value in given}
    is_remote = any(name in _ADDRESSES and not _HERE.match(value) for name, value in values.items())
    is_one_of = bool(_RANKS & values.keys()) and any(name in _COUNTS and value != "1" for name, value in values.items())
    if not is_remote and not is_one_of:
        return ""
    return (
        f"{' '.join(option for _, option, _ in given)}: one machine's values, but all nodes would get them; write "
        "$(NODE_RANK), $(NNODES) and tcp://$(MASTER_ADDR):$(MASTER_PORT), and set spec.nodes to the number of machines"
    )


def _given(words: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (name, option with its value, value) for literal values, except -1, which often means unset."""
    for word, following in pairwise([*words, ""]):
        option, has_value, own = word.partition("=")
        name, value = option.lstrip("-").replace("-", "_"), (own if has_value else following).rstrip(";")
        is_literal = value and "$" not in value and "`" not in value and not value.startswith("-")
        is_number = name in _RANKS | _COUNTS and value.isdecimal()
        if option.startswith("--") and is_literal and (is_number or name in _ADDRESSES):
            yield name, f"{option}{has_value or ' '}{value}", value
