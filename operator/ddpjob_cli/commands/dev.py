"""`ddpjob dev`: a script whose ranks start again at each save, on this machine or in a cluster."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from ddpjob_cli.commands import script_words
from ddpjob_cli.commands.cluster import Connect, Seconds, cluster_options
from ddpjob_cli.commands.output import say

if TYPE_CHECKING:
    from ddpjob_cli.local.session import DevSession
    from ddpjob_operator.job import api

IDLE_SECONDS = 1800.0


@click.command(
    cls=script_words.ScriptCommand,
    context_settings=script_words.SETTINGS,
    short_help="Run a script again at each save.",
    epilog="Example: ddpjob dev --nodes 2 train.py --epochs 5",
)
@click.argument("file", required=False, type=click.Path(dir_okay=False))
@click.argument("arguments", metavar="[ARGS...]", nargs=-1, type=click.UNPROCESSED)
@click.option("-m", "--module", metavar="NAME", help="Use a module, not a file.")
@click.option("--nodes", metavar="N", help="Nodes.  [1]")
@click.option("--nproc-per-node", "nproc", metavar="N", help="Processes on each node.  [1]")
@click.option("--set", "settings", metavar="PATH=VALUE", multiple=True, help="Set a field, as in ddpjob run.")
@click.option("--env", "variables", metavar="NAME[=VALUE]", multiple=True, help="Set a variable of the trainer.")
@click.option("--cpu", is_flag=True, help="Train on the CPU with gloo, not on GPUs.")
@click.option("--pdb", metavar="RANK", type=int, help="Stop at breakpoint() in this rank only.  [in each]")
@click.option(
    "--idle", type=Seconds(), metavar="TIME", default=IDLE_SECONDS,
    help="End after this time without a save or output; 0: never.  [30m]",
)  # fmt: skip
@click.option("--no-check", is_flag=True, help="Start even if `ddpjob check` finds errors.")
@click.option("--cluster", is_flag=True, help="In a cluster: as a DDPJob that is deleted at the end.")
@click.option("--image", metavar="IMAGE", help="With --cluster: an image with ddprun.  [ddpjob-trainer]")
@click.option("--gpus", type=click.IntRange(min=1), metavar="G", help="With --cluster: GPUs of each node.")
@click.option("--name", metavar="NAME", help="With --cluster: the job's name.  [the script's]")
@cluster_options
def dev(
    connect: Connect,
    file: str | None,
    arguments: tuple[str, ...],
    module: str | None,
    nodes: str | None,
    nproc: str | None,
    settings: tuple[str, ...],
    variables: tuple[str, ...],
    cpu: bool,
    pdb: int | None,
    idle: float,
    no_check: bool,
    cluster: bool,
    **of_cluster: Any,
) -> int:
    """Run a script, and restart all its ranks at each save, without importing torch again.

    \b
    After a failure, a syntax error or the end of the script the nodes wait for the next save.
    Enter starts the ranks again, Ctrl-C ends. What counts as a save: docs/debugging.md.
    With --cluster the saved files go to the pods by kubectl exec, and the end deletes the job.
    Exit codes: 130 ended by Ctrl-C or --idle, 1 the nodes failed, 2 wrong input.
    """
    from msgspec import structs

    from ddpjob_cli.commands import kinds, launchers, sources
    from ddpjob_cli.commands.options import Source
    from ddpjob_cli.commands.start import start
    from ddpjob_cli.local.preparation import debugging, gpus
    from ddpjob_cli.local.run import RunOptions
    from ddpjob_cli.local.session import variables as of_session
    from ddpjob_cli.manifest.yamlfile import InputError
    from ddpjob_operator.job import api, bounds

    if module is not None:
        file, arguments = None, (*([] if file is None else [file]), *arguments)
    if (file is None) == (module is None):
        raise click.UsageError("name a script, or -m MODULE")
    if file is not None and kinds.of(file) != "script":
        raise InputError(f"{file}: not a Python script; ddpjob dev takes a script, or -m MODULE")
    variables = (*variables, *of_session(pdb))
    if cluster:
        here = {"-m": module, "--cpu": cpu or None}
        if wrong := [option for option, value in here.items() if value is not None]:
            raise InputError(f"{wrong[0]}: only on this machine, without --cluster")
        if not (nproc or "1").isdigit():
            raise InputError(f"--nproc-per-node {nproc}: with --cluster it is a number")
        from ddpjob_cli.commands import dev_in_cluster

        return dev_in_cluster.run(
            connect, str(file), arguments, idle, pdb, check=not no_check, nodes=nodes, nproc=nproc and int(nproc),
            settings=settings, variables=variables, **of_cluster,
        )  # fmt: skip
    if connect.is_chosen or any(of_cluster.values()):
        raise InputError("--image, --gpus, --name, --namespace, --context and --kubeconfig are for --cluster")
    devices = len(gpus.visible())
    source = Source(
        file,
        module,
        nodes=nodes,
        nproc=sources.processes(nproc, devices),
        settings=settings,
        variables=variables,
        arguments=arguments,
        gpus=bool(devices),
    )
    source, why = sources.with_launcher(source, None, lambda: launchers.missing_here(os.environ))
    if source.launcher != launchers.DDPRUN:
        own = "the script starts the processes of its node by itself"
        raise InputError(f"{file or module}: ddpjob dev needs ddprun, but {why or own}; use ddpjob run")
    document, job = sources.load(source)
    options = RunOptions(
        cpu=cpu,
        plain=True,
        process_group=os.getpgrp(),
        defaults=sources.defaults(source, job, 0 if cpu else devices),
        session=_session(document.source, job, arguments, idle),
    )
    debugging.check(pdb, job, {os.getpgrp()})
    if warning := sources.warn_of_size(job, allowed=False):
        say(warning)
    # Disable the stall limit: ended ranks make no step until the next save. Deadlocks are still reported.
    patient = structs.replace(job.spec, stall=api.Stall(timeout_seconds=bounds.SECONDS_MAX))
    return start(document, structs.replace(job, spec=patient), options, checked=not no_check)


def _session(source: str, job: api.DDPJob, arguments: tuple[str, ...], idle: float) -> DevSession:
    from ddpjob_cli.local import script, session
    from ddpjob_cli.local.processes.saves import SavedFiles

    found = script.find(source, job)
    folders = [os.getcwd(), *([] if found is None else [str(found.parent)])]
    values = [word.partition("=")[2] if word.startswith("-") else word for word in arguments]
    files = SavedFiles(folders, [*values, *([] if found is None else [str(found)])])
    return session.DevSession(files, idle)
