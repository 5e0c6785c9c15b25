"""`ddpjob`: the command line. Answers go to stdout, everything else to stderr; wrong input ends with exit code 2.

Commands import what they need inside their functions, so that `ddpjob --help` is fast.
"""

from __future__ import annotations

import functools
import io
import itertools
import os
import sys
from typing import TYPE_CHECKING

import click

from ddpjob_cli.commands import cluster, convert, dev, runs, script_words, sections, shell, submit
from ddpjob_cli.commands.output import answer, say

if TYPE_CHECKING:
    from pathlib import Path

    from ddpjob_cli.manifest.yamlfile import Document
    from ddpjob_operator.job import api

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(cls=sections.Sections, context_settings=CONTEXT, epilog="Example: ddpjob run examples/digits.yaml")
@click.version_option(package_name="ddpjob", message="ddpjob %(version)s")
def cli() -> None:
    """PyTorch DDP jobs: one YAML, on Kubernetes or as processes on this machine."""


_rare = functools.partial(click.option, cls=sections.RareOption)


@cli.command(
    cls=sections.Brief,
    context_settings=script_words.SETTINGS,
    short_help="Run a script or a DDPJob on this machine.",
    epilog="Example: ddpjob run --nproc-per-node 2 train.py --epochs 5",
)
@click.argument("file", required=False, type=click.Path(dir_okay=False, allow_dash=True))
@click.argument("arguments", metavar="[ARGS...]", nargs=-1, type=click.UNPROCESSED)
@click.option("--nodes", metavar="N", help="Nodes; MIN:MAX: an elastic job.  [1, or spec.nodes]")
@click.option("--nproc-per-node", "nproc", metavar="N", help="Processes on each node.  [1, or the file's]")
@click.option("--max-restarts", metavar="N", help="Restarts after a failure.  [3, or the file's]")
@sections.launcher("ddprun, torchrun")
@click.option("--set", "settings", metavar="PATH=VALUE", multiple=True, help="Set a field: spec.backoffLimit=5.")
@click.option("--env", "variables", metavar="NAME[=VALUE]", multiple=True, help="Set a variable of the trainer.")
@click.option("--cpu", is_flag=True, help="Train on the CPU with gloo, not on GPUs.")
@click.option(
    "--fail", "failures", metavar="FAULT", multiple=True, help="Inject a fault: rank=1,step=200,exit=3; every=10s."
)
@_rare("--resize", "resizes", metavar="N,at=S", multiple=True, help="nodes")
@_rare("--pdb", metavar="RANK", type=int, help="debug")
@_rare("--dry-run", is_flag=True, help="pods")
@_rare("-f", "--filename", metavar="FILE", type=click.Path(dir_okay=False, allow_dash=True), help="as FILE")
@_rare("-m", "--module", metavar="NAME", help="not FILE")
@_rare("--no-check", is_flag=True, help="anyway")
@_rare("--job", metavar="NAME", help="which")
@_rare("--report", type=sections.AsPath(dir_okay=False), help="HTML")
@_rare("--status", type=sections.AsPath(dir_okay=False), help="JSON")
@_rare("--metrics-file", "metrics", type=sections.AsPath(dir_okay=False), help="metrics")
@_rare("--logs", type=sections.AsPath(file_okay=False), help="of runs", metavar="DIR")
@_rare("--plain", is_flag=True, help="no table")
@_rare("--allow-unsupported", is_flag=True, help="ignore fields")
@_rare("--yes", is_flag=True, help="64+ ranks")
def run(
    file: str | None,
    arguments: tuple[str, ...],
    filename: str | None,
    module: str | None,
    job: str | None,
    nodes: str | None,
    nproc: str | None,
    max_restarts: str | None,
    launcher: str | None,
    settings: tuple[str, ...],
    variables: tuple[str, ...],
    status: Path | None,
    metrics: Path | None,
    report: Path | None,
    logs: Path | None,
    failures: tuple[str, ...],
    resizes: tuple[str, ...],
    cpu: bool,
    allow_unsupported: bool,
    no_check: bool,
    yes: bool,
    plain: bool,
    pdb: int | None,
    dry_run: bool,
) -> int:
    """Run FILE here: a DDPJob, a script or a notebook, or - for stdin.
    Options may also follow a script; from the first other word on, all goes to it.
    Exit codes: 0 succeeded, 1 failed, 2 wrong input, 130 interrupted.
    """
    from ddpjob_cli.commands import check_files, launchers, sources
    from ddpjob_cli.commands.options import Source
    from ddpjob_cli.commands.start import start
    from ddpjob_cli.local.preparation import faults, gpus
    from ddpjob_cli.local.run import RunOptions

    if filename is not None or module is not None:  # with -m or --filename the first word is an ARG
        file, arguments = filename, (*([] if file is None else [file]), *arguments)
    if (file is None) == (module is None):
        raise click.UsageError("name what to run: a YAML, a script, - for stdin, or -m MODULE")
    broken = tuple(faults.parse(text) for text in failures)
    if broken:
        variables = (*variables, f"{faults.VARIABLE}={faults.variable(broken)}")
    devices = len(gpus.visible())
    nproc = sources.processes(nproc, devices)
    if pdb is not None and not any(setting.startswith("spec.backoffLimit") for setting in settings):
        max_restarts = max_restarts or "0"  # leaving the debugger ends the rank; a restart would debug again
    source = Source(
        file, module, job, nodes, nproc, settings, variables, arguments, bool(devices), max_restarts=max_restarts
    )
    with sources.as_file(source) as source:
        source, why = sources.with_launcher(source, launcher, lambda: launchers.missing_here(os.environ))
        if why:
            say(f"torchrun starts the ranks: {why}")
        document, parsed = sources.load(source)
        broken += tuple(faults.parse_resize(text) for text in resizes)
        faults.check(broken, parsed)
        if dry_run:
            for line in check_files.for_a_cluster(document, parsed):
                say(line)
            return print_objects(parsed, cpu, every=yes)
        if warning := sources.warn_of_size(parsed, allowed=yes):
            say(warning)
        options = RunOptions(
            status,
            cpu,
            allow_unsupported,
            plain,
            logs,
            broken,
            metrics=metrics,
            report=report,
            process_group=os.getpgrp(),
            names=sources.names_of(file),
            pdb=pdb,
            defaults=sources.defaults(source, parsed, 0 if cpu else devices),
        )
        cells = file if sources.is_notebook(file) else None
        return start(document, parsed, options, checked=not no_check, notebook=cells)


@cli.command(
    cls=script_words.ScriptCommand,
    context_settings=script_words.SETTINGS,
    short_help="Print a DDPJob for a training script.",
    epilog="Example: ddpjob init --nodes 2 train.py --epochs 5 > job.yaml",
)
@click.argument("script", required=False, type=click.Path(dir_okay=False))
@click.argument("arguments", metavar="[ARGS...]", nargs=-1, type=click.UNPROCESSED)
@click.option("-m", "--module", metavar="MODULE", help="Use a module, not a file.")
@click.option("--nodes", metavar="N", help="Number of nodes; MIN:MAX: an elastic job.  [1]")
@click.option("--nproc-per-node", "nproc", metavar="N", help="Processes on each node.  [1]")
@click.option("--max-restarts", metavar="N", help="Restarts after a failure.  [3]")
@sections.launcher("ddprun or torchrun; the image must have it.  [torchrun]", rare=False)
def init(
    script: str | None,
    arguments: tuple[str, ...],
    module: str | None,
    nodes: str | None,
    nproc: str | None,
    max_restarts: str | None,
    launcher: str | None,
) -> int:
    """Print a DDPJob for a training script; comments tell what was found in the script.

    Options come before the script or directly after it; from the first other word on, all goes to the script.
    """
    from dataclasses import replace

    from ddpjob_cli.commands import launchers, sources
    from ddpjob_cli.commands.options import Source

    if module is not None:
        script, arguments = None, (*([] if script is None else [script]), *arguments)
    if (script is None) == (module is None):
        raise click.UsageError("name a script, or -m MODULE")
    source = Source(script, module, None, nodes, nproc, (), (), arguments, max_restarts=max_restarts)
    source, why = sources.with_launcher(source, launcher, lambda: launchers.HINT)
    source = replace(source, note=why if why in ("", launchers.HINT) else f"torchrun starts the ranks: {why}")
    sources.load(source)
    return answer(sources.to_yaml(source))


@cli.command(
    short_help="Find DDP mistakes without running anything.", epilog="Example: ddpjob check train.py --nodes 2"
)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=click.Path())
@click.option("--nodes", metavar="N", help="Number of nodes to check for; MIN:MAX: elastic.")
@click.option("--nproc", metavar="N", type=click.IntRange(min=1), help="Processes on each node to check for.")
@click.option("--job", metavar="NAME", help="Which DDPJob, if a file has several.")
@click.option(
    "--parameters", metavar="N", help="Check if a model of this size (350M, 7B) fits into a pod's memory limit."
)
@click.option(
    "--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Output format."
)
def check(
    paths: tuple[str, ...], nodes: str | None, nproc: int | None, job: str | None, parameters: str | None, form: str
) -> int:
    """Find common DDP mistakes in scripts, notebooks, a DDPJob's YAML with its script, or a whole folder.

    \b
    Nothing is run or imported.
    To suppress a finding: `# ddpjob: ignore[rule]` on its line or on the line above.
    Exit codes: 0 nothing or warnings, 1 errors, 2 wrong input.
    """
    from ddpjob_cli.commands import check_files, check_folder, sources
    from ddpjob_cli.commands.options import Source

    alone = check_files.context(nodes, nproc)
    settings = (f"spec.nprocPerNode={nproc}",) if nproc else ()

    def load(path: str, name: str | None, read: Document | None = None) -> tuple[Document, api.DDPJob]:
        return sources.load(Source(path, job=name, nodes=nodes, settings=settings), read)

    found = check_folder.targets(paths, job, load)
    size = check_files.parameters(parameters)
    result = check_files.check_all(found.scripts, found.jobs, alone, apart=found.apart, parameters=size)
    code = answer(result.to_json() if form == "json" else result.to_text())
    for line in (*found.wrong, *found.left_out, *result.unread, result.summary()):
        say(line)
    return code or (2 if found.wrong else result.exit_code)


@cli.command(epilog="Example: ddpjob crd | kubectl apply -f -")
def crd() -> int:
    """Print the CustomResourceDefinition of DDPJob."""
    from ddpjob_operator.job.crd import to_yaml

    return answer(to_yaml())


for command in (dev.dev, submit.submit, *cluster.COMMANDS, *runs.COMMANDS, *shell.COMMANDS, convert.convert):
    cli.add_command(command)


def print_objects(job: api.DDPJob, cpu: bool, *, every: bool) -> int:
    from ddpjob_cli.commands.sources import PROCESSES_MAX
    from ddpjob_cli.local.run import dry_run
    from ddpjob_cli.manifest import yamlfile

    most = None if every else PROCESSES_MAX
    for i, body in enumerate(itertools.islice(dry_run(job, cpu), None if most is None else most + 1)):
        if code := answer("---\n" * (i > 0) + yamlfile.text_of(body)):
            return code
    if most is not None and job.spec.nodes > most:
        say(f"{most} of {job.spec.nodes:,} pods are printed: they differ only in their number; --yes prints all")
    return 0


def kubectl_plugin() -> None:
    """The program `kubectl-ddp`, which kubectl starts for `kubectl ddp …`."""
    main("kubectl ddp")


def main(name: str = "ddpjob") -> None:
    """The program `ddpjob`."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # With "strict" a character that the locale cannot encode would raise UnicodeEncodeError and end the run.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = cli.main(prog_name=name, standalone_mode=False)
    except click.ClickException as error:
        script_words.keep_close(error)
        error.show()
        code = 2
    except (click.Abort, KeyboardInterrupt):
        code = 130
    except Exception as error:
        from ddpjob_cli.client.errors import ClusterError
        from ddpjob_cli.manifest.yamlfile import InputError

        if not isinstance(error, InputError | ClusterError):
            raise
        say(str(error))
        code = 2 if isinstance(error, InputError) else 1
    sys.exit(code)


if __name__ == "__main__":
    main()
