"""Make a DDPJob for a training script, which is read as in `ddpjob check`; findings become comments. No I/O."""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ddpjob_check import local_rank
from ddpjob_check.nodes import text_in
from ddpjob_check.parsing import TooLongError
from ddpjob_check.script import INIT, Script
from ddpjob_check.values import STARTERS
from ddpjob_cli.commands import launchers
from ddpjob_cli.commands.cpu_limit import CpuLimit
from ddpjob_cli.commands.options import Source, range_of, refuse_other_bytes
from ddpjob_cli.manifest.yamlfile import InputError
from ddpjob_operator.failures.redaction import clean
from ddpjob_operator.job import api, yamlvalues
from ddpjob_operator.job.launch.command import arguments_behind_script
from ddpjob_operator.job.wording import name_of

NODES = 1  # the default number of nodes, as in torchrun
FOUND_MAX = 8
_PROCESSES = ("torch.multiprocessing.Process", "multiprocessing.Process")
_SIMPLE = re.compile(r"[A-Za-z0-9_./=-]*[A-Za-z_./=-][A-Za-z0-9_./=-]*")
_DATA = re.compile(r"(?:^|_)(?:data|dataset|root|folder|dir|path)(?:$|_)")


@dataclass(frozen=True)
class FoundScript:
    spawns: bool = False
    """True if the script starts the processes of its node itself."""
    nccl: int = 0
    """The line in which the script selects nccl alone; 0: none."""
    cuda: bool = False
    local_rank: ast.Call | None = None
    """A rank option that torchrun does not pass, and without which the ranks do not train as one job."""
    notes: tuple[str, ...] = ()
    """Sentences for comments, valid if torchrun starts the processes."""
    needs_torchrun: str = ""
    """The part of the script that works only under torchrun; "" if there is none."""


def job_yaml(start: Source, text: str | None) -> str:
    """Return the YAML. text: the script; None for a module, which is not read. Raise InputError."""
    script = start.module or start.file or ""
    _refuse_unprintable(start, script)
    found = FoundScript() if text is None else read(script, text)
    sentences = [note.replace(" torchrun ", f" {start.launcher} ") for note in found.notes[:FOUND_MAX]]
    least, nodes = range_of(start.nodes) if start.nodes is not None else ("", str(NODES))
    nproc = start.nproc or "1"
    words = _command(start, script, found)
    gpus = (
        f"\n        resources: {{limits: {{nvidia.com/gpu: {nproc}}}}}"
        if found.nccl or (found.cuda and start.gpus)
        else ""
    )
    hint = (
        "" if gpus or not found.cuda else (f"\n        # With GPUs: resources: {{limits: {{nvidia.com/gpu: {nproc}}}}}")
    )
    file = f"{name_of(script)}.yaml"
    # Replace newlines by spaces: notes quote the script's option names, and a newline there would add a line to YAML.
    sentences += [start.note] if start.note else []
    notes = "".join(f"# {' '.join(clean(note).split())}\n" for note in sentences)
    restarts = start.max_restarts
    limit = f"\n  backoffLimit: {_scalar(restarts)}     # restarts after a failure" if restarts is not None else ""
    elastic = f"\n  minNodes: {_scalar(least)}         # starts with this many nodes; more may join" if least else ""
    return f"""# From {script}. Here: ddpjob run {file}; in a cluster: kubectl apply -f {file}
{notes}apiVersion: {api.API_VERSION}
kind: {api.KIND}
metadata:
  name: {_scalar(name_of(script), text=True)}
spec:
  nodes: {_scalar(nodes)}            # pods; on this machine, groups of processes{elastic}
  nprocPerNode: {_scalar(nproc)}     # processes on each{limit}
  template:
    spec:
      containers:
      - name: trainer
        image: my-image   # yours, with PyTorch and the script; not used by `ddpjob run`
        command: [{", ".join(_scalar(word, text=True) for word in words)}]{gpus}{hint}
"""


def _command(start: Source, script: str, found: FoundScript) -> list[str]:
    script = f"./{script}" if script.startswith("-") else script
    arguments: Sequence[str] = start.arguments
    if found.local_rank is not None and not found.spawns:
        if start.launcher != launchers.DDPRUN:
            return local_rank.command_that_passes([script], found.local_rank, arguments)
        arguments = [local_rank.word_that_passes(found.local_rank), *arguments]
    module = ["-m"] if start.module else []
    if found.spawns:
        return ["python", *module, script, *arguments]
    return [start.launcher, *module, script, *arguments_behind_script(arguments)]


@functools.lru_cache(maxsize=4)
def read(name: str, text: str) -> FoundScript:
    """Read what a script needs, without running it. Raise InputError if it is not valid Python."""
    try:
        return CpuLimit()(lambda: _read(Script(text)))
    except SyntaxError as error:
        raise InputError(f"{name}:{error.lineno or 1}: not valid Python: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{name}:1: not valid Python: {error}") from None
    except TooLongError:
        return FoundScript(notes=("The script takes too long to follow, so it is unknown how it must be started.",))


def _read(script: Script) -> FoundScript:
    spawned = script.calls_to(*STARTERS) or script.calls_to(*_PROCESSES)
    nccl = next((call.lineno for call in script.calls_to(INIT) if _is_nccl(call)), 0)
    cuda = bool(nccl) or any(isinstance(n, ast.Attribute) and n.attr == "cuda" for n in ast.walk(script.tree))
    passed = local_rank.must_be_passed(script)
    gpus = (f"Line {nccl} uses nccl, which needs a GPU for each process.",) if nccl else ()
    notes = (*_of_launch(script, spawned, passed), *gpus, *_of_arguments(script.tree), *_of_files(script))
    why_torchrun = "" if spawned else next(launchers.why_torchrun(script), "")
    return FoundScript(bool(spawned), nccl, cuda, passed, notes, why_torchrun)


def _refuse_unprintable(start: Source, script: str) -> None:
    if not script.isprintable():
        kind = "a module" if start.module else "a file"
        raise InputError(f"{script!r}: {kind} whose name has control characters or is not UTF-8: rename it")
    refuse_other_bytes(start.arguments)


def _of_launch(script: Script, spawned: list[ast.Call], passed: ast.Call | None) -> Iterator[str]:
    if spawned:
        yield (
            f"Line {spawned[0].lineno} starts the processes of its node by itself, so no launcher starts it; "
            "on several nodes it must read NODE_RANK and NNODES."
        )
    elif script.uses_a_framework:
        yield "A framework forms the group: torchrun starts its processes."
    elif script.inits:
        yield f"Line {script.inits[0].lineno} forms the group: torchrun starts its processes."
    else:
        yield "No init_process_group() was found: without one each process trains alone."
    if passed is not None and not spawned:
        yield (
            f"Line {passed.lineno} needs the local rank as an option. torchrun does not pass this option, so the "
            "command below does."
        )


def _of_arguments(tree: ast.AST) -> Iterator[str]:
    required: list[str] = []
    optional: list[str] = []
    for call in ast.walk(tree):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
            continue
        names = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        if call.func.attr != "add_argument" or not names:
            continue
        given = {k.arg: k.value.value for k in call.keywords if isinstance(k.value, ast.Constant)}
        name = max(names, key=len)
        nargs = next((k.value for k in call.keywords if k.arg == "nargs"), ast.Constant(None))
        may_be_absent = text_in(nargs) in ("?", "*", "...") or getattr(nargs, "attr", "") == "REMAINDER"
        is_required = given.get("required") is True or not (name.startswith("-") or may_be_absent)
        default = f" ({given['default']!r})" if given.get("default") is not None else ""
        (required if is_required else optional).append(name if is_required else f"{name}{default}")
    if required:
        yield f"Required arguments: {', '.join(required)}"
    if optional:
        yield f"Optional arguments: {', '.join(optional[:12])}{', …' if len(optional) > 12 else ''}"


def _of_files(script: Script) -> Iterator[str]:
    """Yield remarks about files that the script reads or saves: a pod without a volume lacks or loses them."""
    paths = dict.fromkeys(path for call in ast.walk(script.tree) if isinstance(call, ast.Call) for path in _paths(call))
    if paths:
        yield f"The script uses {', '.join(list(paths)[:4])}: in a cluster they must be in the image or on a volume."
    yield from _lost(script)


def _lost(script: Script) -> Iterator[str]:
    if saves := script.calls_to("torch.save", "ddpjob.Snapshot"):
        yield f"Line {saves[0].lineno} saves files, which are lost when the pod ends: mount a volume that keeps them."


def files_lost(text: str) -> tuple[str, ...]:
    """Return a sentence about files that the script saves and that are lost with its pod; () if there are none."""
    try:
        return CpuLimit()(lambda: tuple(_lost(Script(text))))
    except (SyntaxError, ValueError, RecursionError, MemoryError, TooLongError):
        return ()


def _paths(call: ast.Call) -> Iterator[str]:
    """Yield paths of data: values of keywords such as root= and data_dir=, and argparse's defaults for --data."""
    texts = {k.arg or "": k.value.value for k in call.keywords if isinstance(k.value, ast.Constant)}
    for name, value in texts.items():
        if name == "default" and call.args and isinstance(call.args[0], ast.Constant):
            name = str(call.args[0].value).lstrip("-").replace("-", "_")
        if isinstance(value, str) and "/" in value and _DATA.search(name):
            yield value


def _is_nccl(call: ast.Call) -> bool:
    given = [*call.args[:1], *(k.value for k in call.keywords if k.arg == "backend")]
    return any(isinstance(node, ast.Constant) and node.value == "nccl" for node in given)


def _scalar(word: str, *, text: bool = False) -> str:
    """Return a word as it is written in a YAML list. text: quote numbers too, because a command's words are strings."""
    if not text:
        return word if re.fullmatch(r"[\w.+-]+", word) else json.dumps(word, ensure_ascii=False)
    is_text = yamlvalues.tag_of(word) == f"{yamlvalues.TAG}str" and word != "="
    plain = _SIMPLE.fullmatch(word) and is_text and not re.match(r"[-+.\d]", word)
    return word if plain else json.dumps(word, ensure_ascii=False)
