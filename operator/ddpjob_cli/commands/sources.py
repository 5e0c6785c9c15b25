"""Make a DDPJob from the file that the command line names: a YAML, a script, a module, a notebook, or stdin."""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddpjob_check import notebook
from ddpjob_check.parsing import TooLongError, parse
from ddpjob_cli.commands import from_script, kinds, launchers
from ddpjob_cli.commands.cpu_limit import CpuLimit
from ddpjob_cli.commands.options import Source, applied, refuse_other_bytes
from ddpjob_cli.local.preparation import suggestions
from ddpjob_cli.local.run_files.files import read_script
from ddpjob_cli.manifest import override, yamlfile
from ddpjob_cli.manifest.yamlfile import Document, InputError
from ddpjob_operator.job import api, validation, wording
from ddpjob_operator.job.launch import command
from ddpjob_operator.job.podspec import trainer_container

PROCESSES_MAX = 64  # more are started and printed only with --yes; a machine may start one per core
STDIN = "-"
_NAME_LETTERS = "bcdfghjklmnpqrstvwxz2456789"  # as in the API server: no vowels, so that names contain no words


def is_notebook(file: str | None) -> bool:
    return (file or "").endswith(kinds.NOTEBOOK)


def load(source: Source, read: Document | None = None) -> tuple[Document, api.DDPJob]:
    """Return the job's document, and the job parsed from it. read: the document, if already read. Raise
    InputError."""
    _refuse_two_values(source)
    document, is_made = _document(source) if read is None else (read, False)
    metadata = document.data.get("metadata")
    # Make the name here, because it is needed before the API server would make it from metadata.generateName.
    if isinstance(metadata, dict) and not metadata.get("name") and isinstance(metadata.get("generateName"), str):
        metadata["name"] = metadata.pop("generateName") + "".join(random.choices(_NAME_LETTERS, k=5))  # noqa: S311
    made_command = _command(document) if is_made else None
    if source.nproc is not None and not is_made:
        override.set_field(document, f"spec.nprocPerNode={source.nproc}", "--nproc-per-node")
    if source.max_restarts is not None and not is_made:
        override.set_field(document, f"spec.backoffLimit={source.max_restarts}", "--max-restarts")
    document, parsed = applied(document, source.nodes, source.settings, source.variables)
    if source.arguments and made_command != _command(document):  # the command is from a YAML file or --set
        _replace_arguments(document, parsed, source.arguments)
        parsed, _ = validation.parse(document.data)
    return document, parsed


def to_yaml(source: Source) -> str:
    """Return the YAML for a script or a module, as `ddpjob init` prints it. Raise InputError."""
    file = source.file or ""
    if source.module is not None:
        return from_script.job_yaml(source, None)
    if is_notebook(file):
        stem = file.removesuffix(kinds.NOTEBOOK)
        raise InputError(
            f"{file}: a command cannot start a notebook: jupyter nbconvert --to script {file}, "
            f"then ddpjob init {stem}.py"
        )
    return from_script.job_yaml(source, _text(file))


def with_launcher(source: Source, asked: str | None, missing: Callable[[], str]) -> tuple[Source, str]:
    """Return the source with its launcher, and why ddprun was not chosen; "" if it was, if the user chose, or if the
    source has no launcher. asked: --launcher. missing: returns why ddprun is missing, or "". Raise InputError."""
    if asked not in (None, launchers.DDPRUN, launchers.TORCHRUN):
        raise InputError(f"--launcher {asked}: must be {launchers.DDPRUN} or {launchers.TORCHRUN}")
    made = source.module is not None or (source.text is None and kinds.of(source.file or "") != "job")
    found = _found(source) if made else from_script.FoundScript()
    if not made or found.spawns:
        if asked is not None:
            name = source.module or source.file or "stdin"
            why = "starts the processes of its node by itself" if made else "names the launcher in its command"
            raise InputError(f"--launcher {asked}: {name} {why}; leave the option out")
        return source, ""
    why = "" if asked is not None else found.needs_torchrun or missing()
    name = asked or (launchers.TORCHRUN if why else launchers.DDPRUN)
    return replace(source, launcher=name), why


def _found(source: Source) -> from_script.FoundScript:
    """Read what the script needs, without running it. A module is read if its file is on this machine."""
    if source.module is None:
        return from_script.read(source.file or "", _text(source.file or ""))
    path = next((file for file in command.Command(module=source.module).files if os.path.isfile(file)), None)
    if path is None:
        return from_script.FoundScript()
    # A module is always started by a launcher.
    return replace(from_script.read(path, _text(path)), spawns=False)


def processes(nproc: str | None, devices: int) -> str | None:
    """Return --nproc-per-node with torchrun's words gpu, cpu and auto as this machine's number. Raise InputError."""
    cores = len(os.sched_getaffinity(0))
    numbers = {"gpu": devices, "cpu": cores, "auto": devices or cores}
    if nproc == "gpu" and not devices:
        raise InputError("--nproc-per-node gpu: no GPU was found on this machine; give a number, or cpu")
    return str(numbers[nproc]) if nproc in numbers else nproc


def defaults(source: Source, job: api.DDPJob, devices: int) -> str:
    """Return which numbers of a job are defaults, and how to use all GPUs; "" if the user gave all of them."""
    if source.text is not None or (source.module is None and kinds.of(source.file or "") == "job"):
        return ""
    given = {setting.partition("=")[0].strip() for setting in source.settings}
    taken = [f"--nodes {job.spec.nodes}"] if source.nodes is None and "spec.nodes" not in given else []
    nproc = job.spec.facts.nproc_per_node
    if source.nproc is None and "spec.nprocPerNode" not in given and job.spec.facts.launcher:
        more = f" ({devices} GPUs here: --nproc-per-node gpu)" if devices > max(1, nproc * job.spec.nodes) else ""
        taken.append(f"--nproc-per-node {nproc}{more}")
    word = "default" if len(taken) == 1 else "defaults"
    return f"{word}: {', '.join(taken)}" if taken else ""


@contextmanager
def naming(file: str, given: str) -> Iterator[None]:
    """Within this `with` block, make an InputError name the user's file, not the temporary file made from it."""
    try:
        yield
    except InputError as error:
        raise InputError(str(error).replace(file, given)) from None


@contextmanager
def as_file(source: Source) -> Iterator[Source]:
    """Yield the source as a file: a script from stdin or a notebook's code gets a file that is removed at the end."""
    code, name = "", "stdin.py"
    if source.file == STDIN:
        text = _typed()
        if not kinds.is_python(text.encode()):
            yield replace(source, text=text)
            return
        code = text
    elif is_notebook(source.file):
        code, name = _cells(source.file or "").text, f"{Path(source.file or '').stem}.py"
    if not code:
        yield source
        return
    folder = tempfile.mkdtemp(prefix="ddpjob-")
    try:
        path = Path(folder) / name
        path.write_text(code, encoding="utf-8")
        # Imports find files next to the notebook; for a script from stdin, files in the working folder.
        beside = os.path.dirname(os.path.abspath(source.file)) if source.file not in (None, STDIN) else os.getcwd()
        known = os.environ.get("PYTHONPATH")
        variable = f"PYTHONPATH={beside}{os.pathsep + known if known else ''}"
        with naming(str(path), "stdin" if source.file == STDIN else str(source.file)):
            yield replace(source, file=str(path), variables=(variable, *source.variables))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def warn_of_size(job: api.DDPJob, *, allowed: bool) -> str:
    """Return a warning if there are many more processes than cores, else "". Raise InputError for far too many."""
    count, cores = job.spec.world_size, len(os.sched_getaffinity(0))
    nodes, processes = wording.count(job.spec.nodes, "node"), wording.count(count, "process")
    size = f"{nodes} × {job.spec.facts.nproc_per_node} are {processes}"
    if count > (most := max(PROCESSES_MAX, cores)) and not allowed:
        raise InputError(f"{size} on this machine, more than {most}. Lower --nodes, or run with --yes.")
    return f"{size} on {cores} cores: they share the cores" if count > 4 * cores else ""


def _document(source: Source) -> tuple[Document, bool]:
    """Return the document, and True if it was made for a script, with the numbers of the command line."""
    file = source.file or ""
    if source.module is not None:
        return _made(f"-m {source.module}", source), True
    if source.text is not None:
        return yamlfile.read_job("stdin", source.job, source.text.encode()), False
    if kinds.of(file) != "job":
        return _made(file, source), True
    return yamlfile.read_job(file, source.job), False


def _command(document: Document) -> Any:
    spec = document.data.get("spec")
    template = spec.get("template") if isinstance(spec, dict) else None
    return ((trainer_container(template) if isinstance(template, dict) else None) or {}).get("command")


def _made(name: str, source: Source) -> Document:
    """Return a document for a script. The document has no line numbers, because the user has not written its YAML."""
    return replace(yamlfile.read_job(name, None, to_yaml(source).encode()), lines={})


def _refuse_two_values(source: Source) -> None:
    for option, value, field in (
        ("--nodes", source.nodes, "spec.nodes"),
        ("--nodes", source.nodes if ":" in (source.nodes or "") else None, "spec.minNodes"),
        ("--nproc-per-node", source.nproc, "spec.nprocPerNode"),
        ("--max-restarts", source.max_restarts, "spec.backoffLimit"),
    ):
        other = next((s for s in source.settings if s.partition("=")[0].strip() == field), None)
        if value is not None and other is not None:
            raise InputError(f"{option} {value} and --set {other}: two values for {field}. Give only one.")


def _replace_arguments(document: Document, job: api.DDPJob, arguments: tuple[str, ...]) -> None:
    refuse_other_bytes(arguments)
    words = job.spec.facts.command
    given = command.read(words).words
    trainer: dict[str, Any] = trainer_container(document.data["spec"]["template"]) or {}
    head = words[: len(words) - len(given)]
    if not command.read(words).files or tuple(words[len(head) :]) != given:
        place = document.place(job.spec.facts.command_path)
        raise InputError(
            f"{place}: no script was found in the command, so the arguments after -- cannot be passed to one"
        )
    # After `--` in the launcher's options, all words belong to the script, so no second `--` is added.
    has_dashes = head[-1:] == ["--"] or command.options_begin(words) is None
    trainer["command"] = [*head, *(arguments if has_dashes else command.arguments_behind_script(arguments))]
    trainer.pop("args", None)


def _typed() -> str:
    try:
        text = sys.stdin.read()
        text.encode()  # fails if input was not UTF-8: the C locale reads such bytes as surrogates
    except UnicodeError:
        raise InputError("stdin:1: it is not UTF-8") from None
    return text


def _text(path: str) -> str:
    """Return the text of a script or notebook. Raise InputError, also for a program that is not Python."""
    if kinds.of(path) == "program":
        raise InputError(
            f"{path}: neither a Python script nor a DDPJob: give the command in it that starts the training, as "
            "ddpjob convert -- torchrun train.py does, or a YAML whose command starts it"
        )
    try:
        return read_script(path).decode()
    except UnicodeDecodeError:
        raise InputError(f"{path}:1: not valid Python: it is not UTF-8") from None
    except (OSError, ValueError) as error:
        meant = suggestions.file(path) if isinstance(error, FileNotFoundError) else ""
        raise InputError(f"{path}: {getattr(error, 'strerror', None) or error}{meant}") from None


def names_of(file: str | None) -> Callable[[str], str]:
    """Return a function that rewrites places in a text: lines of a notebook's script become cells and their lines."""
    return notebook.by_cell(_cells(file), file) if file is not None and is_notebook(file) else str


def _cells(path: str) -> notebook.NotebookPart:
    """Return the code of a notebook's cells. IPython's own commands become no-ops. Raise InputError."""
    try:
        text = _text(path)
        cells = CpuLimit()(lambda: notebook.parts(text))[0]
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}:1: not a valid notebook: {error}") from None
    except TooLongError:
        raise InputError(f"{path}: takes too long to read") from None
    if not cells.text.strip():
        raise InputError(f"{path}: no cell has Python to run; a file that %%writefile writes is a separate script")
    try:
        parse(cells.text)
    except SyntaxError as error:
        cell, line = cells.place(error.lineno or 1)
        raise InputError(f"{path}:cell {cell}:{line}: not valid Python: {error.msg}") from None
    except ValueError as error:  # a null byte, or a surrogate half
        raise InputError(f"{path}: not valid Python: {error}") from None
    except (RecursionError, MemoryError, TooLongError):
        raise InputError(f"{path}: not valid Python: its cells are nested too deeply to be read") from None
    return cells
