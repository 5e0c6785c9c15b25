"""Convert a command line of torchrun, torch.distributed.launch, ddprun or accelerate into a DDPJob."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from ddpjob_convert import address, common
from ddpjob_convert.address import VARIABLES
from ddpjob_convert.fields import SET_BY_THE_JOB, ConvertError
from ddpjob_convert.result import Converted
from ddpjob_operator.job import bounds
from ddpjob_operator.job.launch import programs
from ddpjob_operator.job.launch.command import (
    LAUNCHERS,
    SHELLS,
    arguments_behind_script,
    by_torchrun,
    options_begin,
    read,
    read_options,
    shell_commands,
    shell_script,
    shell_words,
    split_options,
)
from ddpjob_operator.job.podspec import TRAINER
from ddpjob_operator.job.wording import name_of

IMAGE = "your-image"
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_PROGRAMS = re.compile(r"(.*/)?(torchrun|ddprun|accelerate|python[\d.]*)")

_ACCELERATE_FLAGS = {"module", "no_python", "multi_gpu", "cpu", "use_cpu", "quiet", "debug"}
# By option, the variable that accelerate's launcher sets for its ranks. `Accelerator()` reads it under any launcher.
_ACCELERATE_VARIABLES = {
    "mixed_precision": "ACCELERATE_MIXED_PRECISION",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "dynamo_backend": "ACCELERATE_DYNAMO_BACKEND",
    "num_cpu_threads_per_process": "OMP_NUM_THREADS",
    "cpu": "ACCELERATE_USE_CPU",
    "use_cpu": "ACCELERATE_USE_CPU",
}
_ACCELERATE_DROPPED = {
    "num_machines", "num_processes", "multi_gpu", "quiet", "machine_rank", "main_process_ip", "main_process_port",
    "rdzv_backend", "rdzv_conf", "same_network",
}  # fmt: skip
_ACCELERATE_KEPT = {"max_restarts", "tee", "log_dir", "role", "monitor_interval", "module", "no_python"}
_BY_HAND = "--num_machines=$(NNODES) --machine_rank=$(NODE_RANK) --main_process_ip=$(MASTER_ADDR)"
_NOT_DDP = ("deepspeed", "fsdp", "megatron", "zero", "parallelism", "tpu", "tp_")
# Launchers that start the ranks of all nodes from one machine, or whose options we do not know.
_OTHER_LAUNCHERS = set(programs.FRAMEWORKS) - {"accelerate"}
_READ = "`ddpjob convert` reads torchrun, ddprun, accelerate launch and python, also behind env, uv run or bash -c"
_UNKNOWN_NAME = re.compile(r"[$`]")
_MORE_THAN_WORDS = re.compile(r"[;&|<>$`\n(){}*?~#\\]")


def is_command(word: str) -> bool:
    known = programs.WRAPPERS | _OTHER_LAUNCHERS | set(SHELLS)
    return bool(_PROGRAMS.fullmatch(word) or _ASSIGNMENT.fullmatch(word)) or programs.name(word) in known


def convert(words: Sequence[str], name: str | None = None, image: str | None = None) -> Converted:
    """Return a DDPJob that runs this command on all nodes. Remarks have the path ("command",). Raise ConvertError."""
    given = list(itertools.takewhile(_ASSIGNMENT.fullmatch, words))
    variables, command = dict(word.split("=", 1) for word in given), list(words[len(given) :])
    result = Converted("Converted from a command line by `ddpjob convert`.", {"name": "train"})
    if not command:
        raise ConvertError(("command",), "is empty: give a command, as in `ddpjob convert -- torchrun train.py`")
    command = _without_shell(command)
    begin = _program(command)
    inner = command[begin:]
    if inner[1:3] == ["-m", "accelerate.commands.launch"]:
        inner = ["accelerate", "launch", *inner[3:]]
    if shell_script(inner) is not None:
        inner = _of_shell(inner, result)
    elif programs.name(inner[0]) == "accelerate":
        inner, more = _accelerate(inner, result)
        variables |= more
    else:
        inner = _torchrun(inner, result)
    if own := address.of_one_machine(shell_words(shell_script(inner) or "") or inner):
        result.remark(("command",), own)
    command = [*_of_the_job(command[:begin], variables, result), *inner]
    after = options_begin(inner)
    found = read(inner).named[-1:] or (read_options(inner[after:])[1][:1] if after is not None else ())
    named = next((text for text in found if not _UNKNOWN_NAME.search(text)), "train")
    result.metadata["name"] = name or name_of(named)
    container: dict[str, Any] = {"name": TRAINER, "image": image or IMAGE, "command": command}
    if variables:
        container["env"] = [{"name": key, "value": value} for key, value in variables.items()]
    if not image:
        result.remark(("command",), f"image: {IMAGE} is a placeholder for the image with your script; --image sets it")
    result.set("template", {"spec": {"containers": [container]}})
    return result


def _of_the_job(wrapper: list[str], variables: dict[str, str], result: Converted) -> list[str]:
    """Remove variables that the job sets from `variables` and from the words before the program. Return the words."""
    dropped = [f"{name}={variables.pop(name)}" for name in list(variables) if name in VARIABLES]
    own = [word for word in wrapper if (match := _ASSIGNMENT.fullmatch(word)) and match[1] in VARIABLES]
    _say_dropped(iter([*dropped, *own]), result)
    if any(re.fullmatch(r"(?:WORLD_SIZE|(?:PET_)?NNODES)=(?!1$).*", word) for word in (*dropped, *own)):
        result.remark(("command",), "WORLD_SIZE or NNODES of several machines: set spec.nodes to their number")
    return [word for word in wrapper if word not in own]


def _without_shell(words: list[str]) -> list[str]:
    """Return the words of a `bash -c` script if it needs no shell, so options can be removed; else the command."""
    script = shell_script(words)
    if script is None or words[-1] != script or _MORE_THAN_WORDS.search(script):
        return words
    inner = _words_of(script)
    inner = inner[1:] if inner[:1] == ["exec"] else inner
    return inner if inner and not _ASSIGNMENT.fullmatch(inner[0]) else words


def _words_of(script: str) -> list[str]:
    try:
        return shell_words(script)
    except ValueError as error:
        raise ConvertError(("command",), f"{script}: cannot be read as a script of a shell: {error}") from None


def _program(words: list[str]) -> int:
    """Return the index of the program that starts the ranks, after wrappers. Raise ConvertError if there is none."""
    for i in () if _other_launcher(words) else programs.places(words):
        is_python = bool(_PROGRAMS.fullmatch(words[i])) or words[i].endswith(".py")
        if is_python or shell_script(words[i:]) is not None:
            return i
    raise _refusal(words)


def _other_launcher(words: list[str]) -> str:
    """Return the launcher if it starts the ranks of all nodes from one machine; else ""."""
    for i in programs.places(words):
        if programs.name(words[i]) in _OTHER_LAUNCHERS:
            return "" if programs.launch_options(words[i:]) is None else words[i]
        if _PROGRAMS.fullmatch(words[i]):
            break
    return ""


def _refusal(words: list[str]) -> ConvertError:
    if words[0].endswith((".yaml", ".yml", ".json")):
        return ConvertError(("command",), f"{words[0]} is a file: remove the -- before it")
    other = _other_launcher(words) or words[0]
    begin = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    started = shlex.join(words[begin:]) if begin is not None else "train.py"
    file = _shell_file(words)
    within = f", but not the shell script {file}: give the command in it that starts the training" if file else ""
    return ConvertError(
        ("command",),
        f"{programs.name(other) or 'an empty text'} cannot be converted: {_READ}{within}. A DDPJob runs the same "
        "command on each node, and it starts the ranks of that node: ddpjob convert -- torchrun --nnodes NODES "
        f"--nproc-per-node RANKS {started}",
    )


def _shell_file(words: list[str]) -> str:
    """Return the script of `bash run.sh` and `./run.sh`; "" for any other command."""
    if shell_script(words) is not None:
        return ""
    is_shell = programs.name(words[0]) in SHELLS
    first = next((word for word in words[is_shell:] if not word.startswith("-")), "")
    return first if is_shell or first.endswith((".sh", ".bash")) else ""


def _of_shell(words: list[str], result: Converted) -> list[str]:
    """Return the words of a shell command that starts a launcher, and set the launcher's nodes and nprocPerNode."""
    text = shell_script(words) or ""
    inner = _words_of(text)
    if other := next((one for one in shell_commands(text) if _other_launcher(one)), None):
        raise _refusal(other)
    if (found := by_torchrun(words)) is not None:
        _sizes(found.options, words, result)
    elif any(_PROGRAMS.fullmatch(word) for word in inner):
        result.set("nodes", 1, "no launcher says how many")
    else:
        raise _refusal(words)
    script = address.by_job(text, ("command",), result)
    return [script if word == text else word for word in words]


def _torchrun(words: list[str], result: Converted) -> list[str]:
    # Treat `torchrun --help` as a launcher, so that its missing script is reported.
    begin = options_begin(words) or (1 if programs.name(words[0]) in LAUNCHERS else None)
    if begin is None:
        result.set("nodes", 1, "no launcher says how many")
        return words
    groups, rest = split_options(words[begin:])
    options, _ = read_options(words[begin:])
    if not rest:
        raise ConvertError(("command",), f"{words[begin - 1]} has no script: what does it start?")
    nproc = _sizes(options, words, result)
    taken = common.IDENTITY | {"max_restarts"} | (set() if nproc == "cpu" else {"nproc_per_node"})
    kept = [word for name, group in groups if name not in taken for word in group]
    _say_dropped((word for name, group in groups if name in common.IDENTITY - {"nnodes"} for word in group), result)
    if options.get("max_restarts", "").isdecimal():
        result.set("backoffLimit", int(options["max_restarts"]), "--max-restarts: the job restarts all nodes itself")
    return [*words[:begin], *kept, *_started(rest)]


def _started(words: list[str]) -> list[str]:
    return words if words[1:2] == ["--"] else [*words[:1], *arguments_behind_script(words[1:])]


def _sizes(options: dict[str, str], words: list[str], result: Converted) -> str:
    if "nnodes" in options:
        _nodes(options["nnodes"], words, result)
    else:
        result.set("nodes", 1)
    nproc = options.get("nproc_per_node", "")
    if nproc == "gpu":
        result.remark(("command",), f"{nproc}: a rank for each GPU of the pod: set them in resources.limits")
    elif "$" in nproc:
        text = "known only in the pod; set spec.nprocPerNode to the same number, or the GPUs in resources.limits"
        result.remark(("command",), f"--nproc-per-node={nproc}: {text}")
    elif nproc not in ("", "auto", "cpu") and bounds.number(nproc, bounds.COUNT_MAX) < 1:
        raise ConvertError(("command",), f"--nproc-per-node must be auto, cpu, gpu or a number, is {nproc}")
    elif nproc != "cpu" and nproc:
        template = {"spec": {"containers": [{"name": TRAINER, "command": words}]}}
        common.set_processes(nproc, ("command",), template, result)
    return nproc


def _nodes(text: str, words: list[str], result: Converted) -> None:
    if "$" in text:
        raise ConvertError(
            ("command",), f"--nnodes={text}: a variable that has no value here; give the number of nodes"
        )
    least, most = common.range_of(text) or (bounds.number(text, bounds.COUNT_MAX),) * 2
    if not 0 < least <= most:
        raise ConvertError(("command",), f"--nnodes={text}: must be a number of nodes, or MIN:MAX as 1:4")
    result.set("nodes", most, "--nnodes")
    if least < most:
        common.set_range(least, most, ("command",), words, result)


def _accelerate(words: list[str], result: Converted) -> tuple[list[str], dict[str, str]]:
    """Return a torchrun command for `accelerate launch`, and variables for its options: `Accelerator()` reads both."""
    if words[1:2] != ["launch"]:
        raise ConvertError(("command",), "accelerate: only `accelerate launch` starts a training")
    groups, rest = _accelerate_options(words[2:])
    options = {name: group[1] if len(group) > 1 else group[0].partition("=")[2] or "true" for name, group in groups}
    machines = _count("num_machines", options.get("num_machines", "1"))
    result.set("nodes", machines, "--num_machines")
    if "num_processes" in options:
        processes = _count("num_processes", options["num_processes"])
        if processes % machines:
            text = f"--num_processes={processes} is for all machines, but not a multiple of --num_machines={machines}"
            raise ConvertError(("command",), text)
        result.set("nprocPerNode", processes // machines, f"--num_processes={processes} of all machines together")
    for name, group in groups:
        if name not in _ACCELERATE_DROPPED | _ACCELERATE_KEPT and name not in _ACCELERATE_VARIABLES:
            text = f"torchrun has no such option; dropped. Or keep `accelerate launch`, with {_BY_HAND}"
            result.remark(("command",), f"{' '.join(group)}: {text}")
    kept = [word for name, group in groups if name in _ACCELERATE_KEPT for word in group]
    variables = {_ACCELERATE_VARIABLES[name]: value for name, value in options.items() if name in _ACCELERATE_VARIABLES}
    return ["torchrun", *kept, *_started(rest)], variables


def _accelerate_options(words: list[str]) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """Split words into options, each with its words, and the script with its arguments. An unknown option has a value
    if the next word is neither an option nor a Python file."""
    groups: list[tuple[str, list[str]]] = []
    rest = list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        name, has_value, _ = word.lstrip("-").partition("=")
        full = {"m": "module"}.get(name, name.replace("-", "_"))
        if any(part in full for part in _NOT_DDP):
            raise ConvertError(("command",), f"{word} is not DDP: keep `accelerate launch`, with {_BY_HAND}")
        takes = full not in _ACCELERATE_FLAGS and not has_value and rest and not rest[0].startswith("-")
        groups.append((full, [word, *([rest.pop(0)] if takes and not rest[0].endswith(".py") else [])]))
    if not rest:
        raise ConvertError(("command",), "has no script: what does it launch?")
    return groups, rest


def _count(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConvertError(("command",), f"--{name}={text}: must be a number of at least 1")
    return int(text)


def _say_dropped(words: Iterator[str], result: Converted) -> None:
    if dropped := " ".join(words):
        result.remark(("command",), f"{dropped}: {SET_BY_THE_JOB}")
