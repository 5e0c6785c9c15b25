"""Extract from a DDPJob the facts about its script, and find mistakes in the YAML itself."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ddpjob_check import groups, in_command
from ddpjob_check.rule import CheckedJob, Severity, command_line
from ddpjob_check.starting import DEPRECATED
from ddpjob_core import memory
from ddpjob_operator.job import api, launcher, podspec, variables
from ddpjob_operator.job import template as templates
from ddpjob_operator.job.launch import command, shells
from ddpjob_operator.job.podspec import (
    claims_devices,
    gpus,
    limits,
    mappings,
    quantity,
    trainer_container,
    trainer_path,
)

FieldPath = tuple[str | int, ...]
_STATE_BYTES = 12
"""Bytes of state per parameter: float32 and the two moments of Adam."""
_RANK_BYTES = _STATE_BYTES + 4
"""Bytes per parameter in a rank on the CPU, with the gradient."""
_MIB = 1 << 20


@dataclass(frozen=True)
class YamlRule:
    """A rule of the check that needs only a job's YAML, and no script."""

    name: str
    severity: Severity
    why: str


_YAML_RULES = """
warning image-missing: A container without an image. A local run uses none, but a cluster refuses the job. Add `image`.
warning unknown-field: A field of the pod template that the API does not have and that resembles none of its fields. An
  API server refuses it, unless it is newer than the list of fields in this version. Correct or remove it. A field that
  resembles a known one is a typo: an error.
warning memory-limit-too-small: With `--parameters`: the memory limit of the pod is too small for the state that ddprun
  keeps in memory, so a killed rank costs the steps since the last save ([memory.md](memory.md#what-it-costs)). Raise
  the limit.
error script-missing: The command ends after its launcher, so nothing starts: `[torchrun]`, `[sh, -c, torchrun,
  train.py]`. Add the script, or leave the shell out.
error words-in-one: `command: [torchrun train.py]` or `[torchrun, train.py --lr 0.1]`: no shell splits the words, so
  this is one program, or one file, with a space in its name. Write one word per entry: `[torchrun, train.py]`.
error variable-keeps-nodes-apart: With several nodes: the program reads a variable for which `env` gives all nodes the
  same value, but it must differ (`RANK`, `NODE_RANK`, `PET_NODE_RANK`, `MASTER_ADDR: localhost`), or a number that is
  not the job's (`WORLD_SIZE`, `PET_NNODES`). So no common group forms. Remove it, or use a value that differs on each
  node, such as `$(NODE_RANK)`. A local run accepts `localhost`.
error variable-of-ranks: `torchrun --nnodes=$WORLD_SIZE --node-rank=$RANK`, as in a PyTorchJob: with several processes
  per node these are variables of the ranks, which torchrun sets when it starts them. Use `$NNODES` and `$NODE_RANK`.
warning variable-of-ranks-unset: A shell reads `$RANK` with several processes per node, but only the ranks have it, so
  `tee log_$RANK` writes one file for all nodes. Use `$NODE_RANK`, or read it in each rank: `torchrun --no-python sh -c
  '…'`. In an option of the launcher the rule is `variable-of-ranks`.
warning variable-of-other-launcher-unset: A shell reads `$SLURM_JOB_ID` or another variable of Slurm or MPI, which is
  empty, because neither starts the job. Use the job's variables. In an option of a launcher that needs a value, or as a
  rank of the script, the rule is `variable-of-other-launcher`.
warning not-expanded: `$DATA`, `$(date)`, `~/data`, `*.csv`, `>` or `&&` in a command that no shell reads: the program
  gets this text. Write `$(DATA)`, which Kubernetes replaces by a value of `env`, or start a shell: `[sh, -c, …]`.
warning argument-taken-by-launcher: `torchrun train.py --log 5`: argparse before Python 3.12.8 takes `--log` for an
  abbreviation of torchrun's `--log-dir` and `--logs-specs`, and fails with “ambiguous option”. Write `--` before the
  script's arguments: `torchrun train.py -- --log 5`.
warning rendezvous-overridden: `env` sets another variable of the rendezvous, which replaces the job's. The job has an
  Event for it. Remove the variable unless this is intended.
warning exit-code-lost: A shell script ends with 0 although its launcher, or a file such as train.sh, failed, so the job
  counts as done: `torchrun train.py | tee log`, `|| true`, `; echo done`, `&`, `trap 'exit 0' EXIT`. The message has
  the fix ([failures.md](failures.md#when-the-exit-code-is-lost)).
warning pipefail-in-sh: `sh -c 'set -o pipefail; …'`: if sh is dash (Debian, Ubuntu), it does not know this option and
  exits at once. Use bash.
warning shell-keeps-signals: A shell that waits for its launcher does not forward SIGTERM, so a drain or a stop saves
  nothing: `torchrun train.py; echo done`, and `sh -c 'torchrun train.py'` if sh is dash (Debian, Ubuntu). End the
  script with `exec torchrun train.py`. A trap works as well if it then waits until the launcher has ended.
warning launcher-option: The launcher, or one of its options, has a side effect in a DDPJob, or a program in front of it
  withholds the job's variables (`sudo`, `env -i`, `su -`, `ssh`). The message and an Event of the job name it.
"""
YAML_RULES = tuple(
    YamlRule(name, severity, " ".join(why.split()))
    for severity, name, why in re.findall(r"^(\w+) ([\w-]+): (.*(?:\n  .*)*)", _YAML_RULES, re.MULTILINE)
)
_EVERYWHERE = {
    "argument-taken-by-launcher", "not-expanded", "variable-of-ranks-unset", "variable-of-other-launcher-unset",
    "exit-code-lost", "pipefail-in-sh",
}  # fmt: skip
CLUSTER_ONLY = frozenset(rule.name for rule in YAML_RULES if rule.severity == "warning") - _EVERYWHERE
"""Warnings that do not matter to a local run, or that it prints itself as Events."""


def known(job: api.DDPJob) -> CheckedJob:
    """Return the facts about a job that the rules for its script need."""
    template = job.spec.template
    started = job.spec.facts.started
    return CheckedJob(
        nodes=job.spec.nodes,
        min_nodes=job.spec.facts.min_nodes,
        nproc=job.spec.facts.nproc_per_node,
        gpus=_gpus(template),
        backend=job.spec.facts.backend,
        launcher=started.launcher,
        launcher_options=dict(started.options),
        words=started.words,
        script=started.named,
        variables=_variables(template),
        mounts=job.spec.facts.mounts,
        name=job.metadata.name,
        only_leader_has_name=not job.spec.facts.all_have_dns_names,
        known=True,
    )


def _variables(template: dict[str, Any]) -> frozenset[str] | None:
    """Return the names set by env and by the command; None if envFrom or a shell may set more."""
    trainer = trainer_container(template) or {}
    words = podspec.command_of(template)
    if trainer.get("envFrom") or command.is_shell(words):
        return None
    named = {str(entry.get("name")) for entry in mappings(trainer, "env")}
    return frozenset(named | set(re.findall(r"\b(\w+)=", " ".join(words))))


def mistakes(
    job: api.DDPJob, parameters: int = 0, script: str = "", given: Collection[str] = (), *, local: bool = False
) -> Iterator[tuple[FieldPath, str, str]]:
    """Yield (field, rule, message) for each mistake in the YAML of a valid job. parameters: of the model; 0 if unknown.
    script: the text of the job's script; "" if unknown. given: variables that the trainer has from outside. local: all
    nodes are on this machine."""
    template, facts = job.spec.template, job.spec.facts
    by = facts.launcher
    if not facts.trainer.get("image"):
        said = "the trainer has no image, so a cluster refuses the job; add image"
        yield facts.trainer_path, "image-missing", said
    for deviation in templates.deviations(template):
        if deviation.kind == "unknown":
            yield ("spec", "template", *deviation.path), "unknown-field", f"{deviation.path[-1]}: {deviation.message}"
    yield from _of_launch(job, local)
    yield from _of_command(job, script, given)
    if by and by.launcher == "torch.distributed.launch":
        yield facts.command_path, "launch-deprecated", DEPRECATED
    if parameters and (problem := _too_small(job, parameters, _gpus(template))):
        yield (*facts.trainer_path, "resources", "limits", "memory"), "memory-limit-too-small", problem
    if not facts.all_have_dns_names:
        for field, text in _texts(template):
            if name := groups.other_node(text, job.metadata.name):
                yield field, "other-node-named", f"{name}: {groups.NO_NAME}"
    if job.spec.backend == "nccl" and _gpus(template) == 0:
        yield (
            ("spec", "backend"),
            "nccl-without-gpu",
            "nccl needs a GPU in each process, and the trainer's resources.limits have none; add nvidia.com/gpu, or "
            "use gloo",
        )


def _of_launch(job: api.DDPJob, local: bool) -> Iterator[tuple[FieldPath, str, str]]:
    """Yield mistakes in the launch: nodes that cannot meet, missing scripts, lost exit codes."""
    facts, words = job.spec.facts, job.spec.facts.command
    if "command" in facts.trainer and command.starts_nothing(words):
        said = "the command ends after the launcher and its options, so no script is started; add it"
        yield facts.command_path, "script-missing", said
    if text := shells.cut_short(words):
        said = f"the shell runs only `{text}`, and ignores the words after it; leave the shell out"
        yield facts.command_path, "script-missing", said
    if word := command.joined(words):
        said = f"{json.dumps(word)}: no shell reads the command, so this is one word with spaces; write {_apart(word)}"
        yield facts.command_path, "words-in-one", said
    by_python = facts.started.launcher == "python"
    env = (*facts.trainer_path, "env")
    wrong = list(variables.contradictions(job.spec, by_python=by_python, local=local))
    yield from (((*env, number), "variable-keeps-nodes-apart", text) for number, _, text in wrong)
    # With one process per node the operator sets the ranks' variables in the pod, for scripts without a launcher.
    if facts.nproc_per_node > 1 or facts.min_nodes is not None:
        for name, meant in launcher.of_ranks(job.spec):
            said = f"{name} is a variable of the ranks, not set before the launcher has started them; use {meant}"
            yield facts.command_path, "variable-of-ranks", said
    if set(variables.overridden(job.spec.template)) - {name for _, name, _ in wrong}:
        yield env, "rendezvous-overridden", variables.remark(job.spec.template)
    yield from ((facts.command_path, rule, text) for rule, text in _of_shell(words))
    refused = (text for _, text in launcher.contradictions(job.spec))  # options in script files: others are refused
    yield from ((facts.command_path, "launcher-option", text) for text in (*refused, *launcher.warnings(job.spec)))


def _apart(word: str) -> str:
    """Return the command that was probably meant by this single word, as YAML."""
    try:
        words = shlex.split(word)
    except ValueError:  # an open quote
        words = word.split()
    needs_shell = re.search(r"[$`|;&<>*]", word) is not None
    return command_line(["sh", "-c", f"exec {word}"] if needs_shell else words).removeprefix("command: ")


OF_SHELLS = frozenset({"exit-code-lost", "pipefail-in-sh", "shell-keeps-signals"})


def _of_shell(words: list[str]) -> Iterator[tuple[str, str]]:
    """Yield (rule, message) if the shell around the launcher loses its exit code, or does not pass on signals."""
    yield from (("exit-code-lost", text) for text in shells.lost_exit_codes(words))
    if shells.pipefail_in_sh(words):
        yield "pipefail-in-sh", shells.PIPEFAIL_IN_SH
    if text := shells.sigterm_warning(words):
        yield "shell-keeps-signals", text


def _texts(template: Mapping[str, Any]) -> Iterator[tuple[FieldPath, str]]:
    """Yield (field, text) for the trainer's command, arguments and variables."""
    trainer, path = trainer_container(template) or {}, trainer_path(template)
    for field in ("command", "args"):
        for number, word in enumerate(listed if isinstance(listed := trainer.get(field), list) else ()):
            yield (*path, field, number), str(word)
    for number, entry in enumerate(mappings(trainer, "env")):
        yield (*path, "env", number), str(entry.get("value", ""))


def _gpus(template: Mapping[str, Any]) -> int | None:
    """Return the number of GPUs of a pod; None if resource claims may add some."""
    return None if claims_devices(template) else gpus(template)


def _of_command(job: api.DDPJob, script: str, given: Collection[str]) -> Iterator[tuple[FieldPath, str, str]]:
    """Yield mistakes in the words of the command (in_command.py)."""
    path = job.spec.facts.command_path
    yield from ((path, "argument-taken-by-launcher", text) for text in in_command.taken_arguments(job))
    for place, text in in_command.unexpanded(job, script):
        yield path if place == ("command",) else (*job.spec.facts.trainer_path, *place), "not-expanded", text
    yield from ((path, rule, text) for rule, text in in_command.unset_variables(job, given))


def _too_small(job: api.DDPJob, parameters: int, gpus: int | None) -> str:
    """Return why the memory limit of a job under ddprun is too small for the state in memory (docs/memory.md); "" if it
    may suffice. gpus: of a pod; None if unknown."""
    limit, by = limits(job.spec.template).get("memory"), job.spec.facts.launcher
    if limit is None or by is None or by.launcher != "ddprun":
        return ""
    nproc = job.spec.facts.nproc_per_node
    by_cadence = bool(gpus) or job.spec.world_size == 1
    areas = memory.AREAS if by_cadence else 1
    least = memory.needed(areas * memory.area_bytes(_STATE_BYTES * parameters))
    least += nproc * _RANK_BYTES * parameters if gpus == 0 else 0
    if quantity(limit) >= least:
        return ""
    copies = "two copies of its state" if by_cadence else "its state"
    ranks = f" in addition to {nproc} x {_mib(_RANK_BYTES * parameters)} of the training" if gpus == 0 else ""
    return (
        f"{limit} is too small for {copies} in memory: {parameters:,} parameters with Adam in float32 take "
        f"{_mib(_STATE_BYTES * parameters)}{ranks}; set it to {_mib(least)} or more, "
        "otherwise a restart continues from the last save in the folder"
    )


def _mib(size: int) -> str:
    return f"{-(-size // _MIB)}Mi"
