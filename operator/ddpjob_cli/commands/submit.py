"""`ddpjob submit`: create a job in a cluster, from a script with its folder or from a DDPJob's YAML."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import click

from ddpjob_cli.commands import script_words, sections
from ddpjob_cli.commands.cluster import Connect, cluster_options, end_of
from ddpjob_cli.commands.output import answer, closed, say, write_printed

if TYPE_CHECKING:
    from pathlib import Path

    from ddpjob_cli.client.connection import Cluster
    from ddpjob_cli.client.jobs import Stored
    from ddpjob_cli.client.pack import Archive
    from ddpjob_cli.manifest.yamlfile import Document

IMAGE = "ddpjob-trainer"
# Volumes in which saved files are lost: they are deleted with the pod, or are read-only.
_EPHEMERAL = frozenset(["emptyDir", "configMap", "secret", "downwardAPI", "projected"])


@dataclass(frozen=True, kw_only=True)
class Wishes:
    job: str | None = None
    name: str | None
    namespace: str | None
    image: str | None
    nodes: str | None
    nproc: int | None
    max_restarts: str | None = None
    launcher: str | None = None
    gpus: int | None
    settings: tuple[str, ...] = ()
    variables: tuple[str, ...]
    code: Path | None = None
    no_code: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, str | int] = field(default_factory=dict)
    made: Mapping[str, str] = field(default_factory=dict)
    """By path: texts of the files made from a function. Besides them only the folder `code` is packed."""


@click.command(
    cls=script_words.ScriptCommand,
    context_settings=script_words.SETTINGS,
    short_help="Run a script or a DDPJob in a cluster.",
    epilog="Example: ddpjob submit --nodes 2 --nproc-per-node 4 --follow train.py --epochs 5",
)
@click.argument("file", type=click.Path(dir_okay=False, allow_dash=True))
@click.argument("words", metavar="[ARGS...]", nargs=-1, type=click.UNPROCESSED)
@click.option("--nodes", metavar="N", help="How many nodes (pods); MIN:MAX for an elastic job.  [1, or the file's]")
@click.option("--nproc-per-node", "nproc", type=click.IntRange(min=1), metavar="P", help="Processes on each node.")
@click.option("--max-restarts", metavar="N", help="Restarts after a failure.  [3, or the file's]")
@sections.launcher("ddprun or torchrun.  [ddprun if the image is ours]", rare=False)
@click.option("--gpus", type=click.IntRange(min=1), metavar="G", help="GPUs of each node (nvidia.com/gpu).")
@click.option("--image", metavar="IMAGE", help=f"The trainer's image.  [{IMAGE}, or the file's]")
@click.option("--name", metavar="NAME", help="The job's name.  [the script's, or the file's]")
@click.option("--job", metavar="NAME", help="Which DDPJob, if the file has several.")
@click.option("--set", "settings", metavar="PATH=VALUE", multiple=True, help="Set a field, as in ddpjob run.")
@click.option("--env", "variables", metavar="NAME=VALUE", multiple=True, help="Set a variable of the trainer.")
@click.option(
    "--code", type=sections.AsPath(file_okay=False), metavar="DIR",
    help="The folder that goes with the job.  [the script's; none for YAML]",
)  # fmt: skip
@click.option("--no-code", is_flag=True, help="The image has the script already.")
@click.option("--no-check", is_flag=True, help="Submit even if `ddpjob check` finds errors.")
@click.option("-f", "--follow", is_flag=True, help="Show the logs until the job ends.")
@click.option("--dry-run", is_flag=True, help="Print the objects, and create nothing.")
@cluster_options
def submit(
    connect: Connect,
    file: str,
    words: tuple[str, ...],
    no_check: bool,
    follow: bool,
    dry_run: bool,
    **options: Any,
) -> int:
    """Run FILE in a cluster: a script or a notebook, with the folder it is in, or a DDPJob's YAML.

    Options come before a script or directly after it; from the first other word on, all goes to the script.

    \b
    The folder (900 kB packed at most; .gitignore applies) is stored as a ConfigMap that is
    deleted with the job. For more: docs/your-code.md.
    Exit codes: 0 done, 1 the job failed, or the cluster refused or did not answer,
    2 wrong input, 130 interrupted (the job goes on).
    """
    from ddpjob_cli.client import output_forms
    from ddpjob_cli.client.submit import objects

    document, archive = prepare(file, words, Wishes(namespace=connect.namespace, **options), checked=not no_check)
    for remark in remarks(file, document, archive):
        say(remark)
    if dry_run:
        return answer(output_forms.documents(objects(document.data, archive)))
    cluster, made = create(connect, document, archive)
    if follow:
        return show_until_end(cluster, made)
    say(f"ddpjob logs -f {made.job.metadata.name} shows its output, ddpjob describe {made.job.metadata.name} its state")
    return 0


def create(connect: Connect, document: Document, archive: Archive | None) -> tuple[Cluster, Stored]:
    """Create a prepared job, and report it. Raise InputError, ClusterError."""
    from ddpjob_cli.client.submit import submit as create_both

    cluster = connect(document.data["metadata"].get("namespace"))
    made = create_both(cluster, document.data, archive)
    packed = f", with {archive}" if archive else ""
    say(f"{made.job.metadata.name} is submitted to namespace {cluster.namespace}{packed}")
    return cluster, made


def remarks(file: str, document: Document, archive: Archive | None) -> tuple[str, ...]:
    """Return sentences about files that are not sent, and files that are lost with the pods."""
    from ddpjob_cli.commands import from_script, kinds
    from ddpjob_cli.local.run_files.files import read_script

    said = archive.remarks if archive else ()
    pod = document.data["spec"]["template"]["spec"]
    if kinds.of(file) != "script" or any(_EPHEMERAL.isdisjoint(volume) for volume in pod.get("volumes") or ()):
        return said
    return (*said, *from_script.files_lost(read_script(file).decode(errors="replace")))


def prepare(
    file: str, words: tuple[str, ...], wishes: Wishes, *, checked: bool = False
) -> tuple[Document, Archive | None]:
    """Return the job with all options applied, and its code. Raise InputError, also for an error of `ddpjob check`."""
    from ddpjob_cli.client import code, pack
    from ddpjob_cli.client.submit import as_new
    from ddpjob_cli.commands import kinds, launchers, sources
    from ddpjob_cli.commands.options import Source
    from ddpjob_cli.manifest.yamlfile import InputError

    if wishes.code and wishes.no_code:
        raise InputError("--code and --no-code exclude each other")
    nproc = wishes.nproc or wishes.gpus
    source = Source(
        file, None, wishes.job, wishes.nodes, None if nproc is None else str(nproc),
        wishes.settings, wishes.variables, words, bool(wishes.gpus), max_restarts=wishes.max_restarts,
    )  # fmt: skip
    with sources.as_file(source) as given:
        # Leave out the variable set by `as_file`, because it names a folder of this machine.
        here = replace(given, variables=wishes.variables)
        here, why = sources.with_launcher(here, wishes.launcher, lambda: launchers.missing_in(_image(wishes)))
        if why:
            say(f"torchrun starts the ranks: {why}")
        document, _ = sources.load(here)
        as_new(document.data)
        _apply(document, wishes)
        if checked:
            _check(document, file if sources.is_notebook(file) else None)
        if here.text is not None or kinds.of(here.file or "") == "job":
            return document, pack.pack(wishes.code) if wishes.code else None
        name, archive = _code(file, here.file or "", wishes)
        code.for_cluster(document.data, here.file or "", name)
        return document, archive


def _image(wishes: Wishes) -> str:
    """Return the image that a job for a script will have."""
    given = (
        value for path, _, value in (s.partition("=") for s in reversed(wishes.settings)) if path.endswith(".image")
    )
    return wishes.image or next(given, IMAGE)


def show_until_end(cluster: Cluster, made: Stored) -> int:
    """Write the logs of all nodes to stdout and changes of state to stderr until the job ends; return the exit code."""
    from ddpjob_cli.client import log_findings
    from ddpjob_cli.client.logs import ClusterLogs
    from ddpjob_cli.client.watch import StateLines

    source = ClusterLogs(cluster, made, say, on_look=StateLines(say).see)
    name = made.job.metadata.name
    try:
        for node, piece in source.follow(1, None, later=True):
            write_printed(source.prefix(node).encode() + piece)
    except OSError as error:
        code = closed(error)
        say(f"{name} goes on in the cluster")
        return code
    except KeyboardInterrupt:
        say(
            f"{name} goes on in the cluster: ddpjob logs -f {name} follows it, ddpjob suspend or delete {name} stops it"
        )
        return 130
    return end_of(log_findings.with_findings(cluster, source.stored))


def _code(file: str, path: str, wishes: Wishes) -> tuple[str, Archive | None]:
    """Return the script's path in its folder, and the packed folder. file: as given. path: the file with its Python."""
    from pathlib import Path

    from ddpjob_cli.client import pack
    from ddpjob_cli.commands import sources
    from ddpjob_cli.manifest.yamlfile import InputError

    is_made = file == sources.STDIN or sources.is_notebook(file)
    if wishes.no_code:
        if is_made:
            raise InputError(f"{file}: no image contains this script; omit --no-code")
        return file, None
    if wishes.made or file == sources.STDIN:
        made = wishes.made or {Path(path).name: Path(path).read_text(encoding="utf-8")}
        return Path(path).name, pack.pack(wishes.code, made) if wishes.code else pack.pack_texts(made)
    root = folder_of(file, wishes)
    if not root.is_dir():
        raise InputError(f"--code {root}: no such folder")
    try:
        below = Path(file).resolve().relative_to(root.resolve())
    except ValueError:
        raise InputError(f"{file}: is not in the folder --code {root}") from None
    if not is_made:
        return below.as_posix(), pack.pack(root)
    taken = os.path.lexists(Path(file).with_suffix(".py"))
    name = below.with_name(f"{below.stem}_notebook.py" if taken else f"{below.stem}.py").as_posix()
    text = {name: Path(path).read_text(encoding="utf-8")}
    return name, pack.pack(root, text, without=below.as_posix())


def folder_of(file: str, wishes: Wishes) -> Path:
    """Return the folder that is sent with a script."""
    from pathlib import Path

    return wishes.code or Path(file).parent


def _apply(document: Document, wishes: Wishes) -> None:
    """Apply options that set fields of a valid job. Raise InputError if they make it invalid."""
    from ddpjob_cli.manifest.yamlfile import InputError
    from ddpjob_operator.job import validation
    from ddpjob_operator.job.podspec import trainer_container

    job = document.data
    own, wanted = job["metadata"].get("namespace"), wishes.namespace
    if own and wanted and own != wanted:
        place = document.place(("metadata", "namespace"))
        raise InputError(f"{place}: metadata.namespace is {own}, --namespace is {wanted}: remove one")
    trainer = trainer_container(job["spec"]["template"])
    assert trainer is not None, "the job is valid"
    if wishes.name:
        job["metadata"]["name"] = wishes.name
    if wishes.image:
        trainer["image"] = wishes.image
    if wishes.labels:
        job["metadata"]["labels"] = {**(job["metadata"].get("labels") or {}), **wishes.labels}
    if limits := {**({"nvidia.com/gpu": wishes.gpus} if wishes.gpus else {}), **wishes.limits}:
        resources = trainer["resources"] = trainer.get("resources") or {}
        resources["limits"] = {**(resources.get("limits") or {}), **limits}
    if problems := validation.parse(job)[1]:
        raise document.error(problems)


def _check(document: Document, notebook: str | None) -> None:
    """Show the findings of `ddpjob check`. A script that is missing here is skipped. Raise InputError for errors."""
    from ddpjob_cli.commands import check_files
    from ddpjob_cli.manifest.yamlfile import InputError
    from ddpjob_operator.job import validation

    parsed, _ = validation.parse(document.data)
    lines, is_refused = check_files.before_run(document, parsed, local=False, read_instead=notebook)
    if is_refused:
        raise InputError("\n".join(lines))
    for line in lines:
        say(line)
