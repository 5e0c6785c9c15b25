"""Where rank 0 is: other jobs say it by the name of a pod or a Service, a DDPJob by variables.

A name that is kept resolves to nothing in the cluster, and the ranks wait for it until they give up.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ddpjob_convert.result import Converted, Path
from ddpjob_operator.job import launcher
from ddpjob_operator.job.podspec import trainer_path

# The job sets these for each node or rank; a value in the template would go before its own.
VARIABLES = frozenset(
    "MASTER_ADDR MASTER_PORT WORLD_SIZE RANK NNODES NODE_RANK PET_NNODES PET_NODE_RANK PET_MASTER_ADDR PET_MASTER_PORT "
    "PET_RDZV_ID PET_RDZV_BACKEND PET_RDZV_ENDPOINT PET_RDZV_CONF PET_STANDALONE".split()
)
_SUFFIX = r"(?:\.{namespace})?(?:\.svc(?:\.cluster\.local)?)?(?![\w-]|\.\w)"


@dataclass(frozen=True)
class Names:
    """The names of the source's pods: `first` is rank 0, `any_of` a pattern for all of them."""

    first: str
    any_of: str
    namespace: str = ""

    def rank0(self) -> re.Pattern[str]:
        """Where the address of rank 0 stands, and not a folder or a file that is called so."""
        suffix = _SUFFIX.format(namespace=re.escape(self.namespace) if self.namespace else r"[a-z0-9-]+(?=\.svc\b)")
        return re.compile(rf"(?<![\w.-])(?<!(?<!/)/){re.escape(self.first)}{suffix}")

    def anywhere(self) -> re.Pattern[str]:
        """Where any of the names stands."""
        return re.compile(rf"(?<![\w-]){self.any_of}(?![\w-])")


def move(template: dict[str, Any], names: Names, path: Path, result: Converted) -> None:
    """Leaves to the job what it sets in the trainer's `env`, and writes $(MASTER_ADDR) for the address of rank 0.

    A remark says so, and names what else is called as a pod there. path: the template's in the source.
    """
    own = trainer_path(template)[2:]
    trainer = template["spec"]["containers"][own[-1]]
    # Copied, because with an alias of YAML another container may have the same list, and not the job's variables.
    trainer |= {part: copy.deepcopy(trainer[part]) for part in ("command", "args", "env") if part in trainer}
    _move_words(trainer, names.rank0(), (*path, *own), result)
    env = trainer["env"] if isinstance(trainer.get("env"), list) else []
    for i, entry in enumerate(env):
        if isinstance(entry, dict):
            _move_variable(entry, names.rank0(), (*path, *own, "env", i), result)
    for place, text in _texts(template, path):
        for name in dict.fromkeys(names.anywhere().findall(text)):
            job = result.metadata.get("name")
            result.remark(
                place,
                f"{name}: a DDPJob has no such name. In the trainer $(MASTER_ADDR) is node 0; with spec.dns: all the "
                f"nodes are {job}-0.{job}, {job}-1.{job}, ...",
            )
    if env and not (kept := [entry for entry in env if entry]):
        del trainer["env"]
    elif env:
        trainer["env"] = kept


def _move_variable(entry: dict[str, Any], rank0: re.Pattern[str], path: Path, result: Converted) -> None:
    """One of `env`; empty where it is to be left out."""
    name = entry.get("name")
    if isinstance(name, str) and name in VARIABLES:
        told = f"{name}: not needed: the job sets it itself, and this would go before it; removed"
        result.remark(path, told)
        entry.clear()
    elif isinstance(entry.get("value"), str):
        _move(entry, "value", rank0, False, (path, result))


def _move_words(trainer: dict[str, Any], rank0: re.Pattern[str], path: Path, result: Converted) -> None:
    """In the command and its args. A shell may be in the one and its script in the other."""
    before: list[Any] = []
    for part in ("command", "args"):
        words = trainer.get(part)
        for i, word in enumerate(words if isinstance(words, list) else ()):
            if isinstance(word, str):
                _move(words, i, rank0, _is_script(before), ((*path, part, i), result))
            before.append(word)


def _is_script(before: list[Any]) -> bool:
    """Whether what follows these words is the script of `sh -c`."""
    has_shell = any(isinstance(word, str) and word.rsplit("/", 1)[-1] in launcher.SHELLS for word in before)
    return has_shell and bool(re.fullmatch(r"-[a-z]*c", str(before[-1])))


def _move(holder: Any, key: Any, rank0: re.Pattern[str], is_script: bool, told: tuple[Path, Converted]) -> None:
    text, used = holder[key], list[str]()

    def variable(found: re.Match[str]) -> str:
        # Kubernetes replaces $(NAME) before any program reads it, so also where a shell's quotes would keep $NAME.
        is_quoted = text.count("'", 0, found.start()) % 2
        used.append("$MASTER_ADDR" if is_script and not is_quoted else "$(MASTER_ADDR)")
        return used[-1]

    found = rank0.search(text)
    holder[key] = rank0.sub(variable, text)
    if found:
        path, result = told
        variables = " and ".join(dict.fromkeys(used))
        result.remark(path, f"{found[0]} is now {variables}, which the job sets: a DDPJob has no such name")


def _texts(part: Any, path: Path) -> Iterator[tuple[Path, str]]:
    """All texts of a template, with their paths."""
    if isinstance(part, str):
        yield path, part
    elif isinstance(part, dict):
        for name, value in part.items():
            yield from _texts(value, (*path, name))
    elif isinstance(part, list):
        for i, value in enumerate(part):
            yield from _texts(value, (*path, i))
