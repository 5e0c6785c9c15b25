"""The commands for runs on this machine: `ddpjob list` and `report`, and `logs` and `stacks`, also of a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ddpjob_cli.commands import sections
from ddpjob_cli.commands.cluster import Connect, JobName, Seconds, cluster_options
from ddpjob_cli.commands.output import answer, say

if TYPE_CHECKING:
    import datetime as dt
    from pathlib import Path

    from click.shell_completion import CompletionItem

    from ddpjob_cli.commands.logs import LogSource
    from ddpjob_cli.local.run_files.runs import Run

FOLDER = click.option(
    "--dir", "folder", metavar="DIR", type=sections.AsPath(file_okay=False),
    help="Log folder of the runs, as --logs of ddpjob run.  [~/.local/state/ddpjob]",
)  # fmt: skip


class RunName(JobName):
    """A job that has run on this machine, or one of the cluster."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete a job's name from this machine's runs; from the cluster if an option names it, or if none fits."""
        from click.shell_completion import CompletionItem

        from ddpjob_cli.local.run_files import run_folder

        in_cluster = any(ctx.params.get(name) for name in ("in_cluster", "context", "namespace", "kubeconfig"))
        names = set() if in_cluster else {name for name, _ in run_folder.folders(ctx.params.get("folder"))}
        here = [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete)]
        has_cluster = "namespace" in ctx.params  # `report` has no options of a cluster
        return here if here or not has_cluster else super().shell_complete(ctx, param, incomplete)


RUN = click.argument("job", type=RunName(), required=False)


@click.command("list", short_help="List the runs of this machine.", epilog="Example: ddpjob list -o wide")
@click.option("-o", "--output", type=click.Choice(["text", "wide", "json"]), default="text", help="Output format.")
@FOLDER
def list_runs(output: str, folder: Path | None) -> int:
    """List the runs of this machine, the newest first. The last ten runs of each job are kept."""
    import datetime as dt
    import json

    from ddpjob_cli.describe.figures import columns
    from ddpjob_cli.local.run_files import runs

    now = dt.datetime.now(dt.timezone.utc)
    found = [as_json(run, now) for run in runs.find_all(folder)]
    if output == "json":
        return answer(json.dumps(found, indent=2) + "\n")
    if not found:
        say("no run is kept here; start one with ddpjob run")
        return 0
    rows = [row(run, wide=output == "wide") for run in found]
    return answer("".join(f"{line}\n" for line in columns([tuple(rows[0]), *(tuple(r.values()) for r in rows)])))


@click.command(short_help="Print the output of a run's nodes.", epilog="Example: ddpjob logs digits --rank 1 --follow")
@RUN
@click.option("--rank", type=click.IntRange(min=0), metavar="R", help="Only the node of this rank.")
@click.option("--node", type=click.IntRange(min=0), metavar="N", help="Only this node.")
@click.option("--attempt", type=click.IntRange(min=1), metavar="A", help="Only this attempt.  [the last]")
@click.option("-p", "--previous", is_flag=True, help="The attempt before the last.")
@click.option("-f", "--follow", is_flag=True, help="Print new lines until the job ends, also after restarts.")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Only the last N lines; in a cluster.")
@click.option("--since", type=Seconds(), metavar="TIME", help="Only lines of the last 30s, 15m, 2h; in a cluster.")
@click.option("--timestamps", is_flag=True, help="Start each line with its time; in a cluster.")
@click.option("--cluster", "in_cluster", is_flag=True, help="Use a job in a cluster; -n and --context imply it.")
@FOLDER
@cluster_options
def logs(
    connect: Connect,
    job: str | None,
    rank: int | None,
    node: int | None,
    attempt: int | None,
    previous: bool,
    follow: bool,
    folder: Path | None,
    tail: int | None,
    since: float | None,
    timestamps: bool,
    in_cluster: bool,
) -> int:
    """Print the output of the nodes in JOB's last run; without JOB, in the last run of any job.

    With -n, --context or --cluster, or if this machine has no run of JOB, it prints the output of JOB in the cluster.
    The ranks of a node share a log. With several nodes each line begins with [node:rank], as in ddpjob run.
    """
    from ddpjob_cli.commands import logs as shown

    if previous and attempt is not None:
        raise click.UsageError("--previous and --attempt exclude each other.")
    if rank is not None and node is not None:
        raise click.UsageError("--rank and --node exclude each other.")
    in_cluster = in_cluster or connect.is_chosen or tail is not None or since is not None or timestamps or _is_plugin()
    if in_cluster:
        source = _logs_in_cluster(connect, job, tail=tail, since_seconds=since, timestamps=timestamps)
    else:
        source = _logs_here(connect, job, folder)
    return shown.show(source, rank, node, attempt, previous=previous, follow=follow)


@click.command(
    short_help="Print the report of a run, as one HTML page.", epilog="Example: ddpjob report digits > run.html"
)
@RUN
@FOLDER
def report(job: str | None, folder: Path | None) -> int:
    """Print the report of JOB's last run as one HTML page; without JOB, of the last run of any job.

    It shows the metrics over the steps, the attempts over time, how the time was spent, failures, and links to logs.
    """
    import datetime as dt

    from ddpjob_cli.local.run_files import report as reports
    from ddpjob_cli.local.run_files import runs

    run = runs.find(job, folder)
    return answer(reports.page(run, run.history(), dt.datetime.now(dt.timezone.utc)))


@click.command(short_help="Show the stacks of a job's ranks.", epilog="Example: ddpjob stacks digits --rank 1")
@RUN
@click.option("--rank", type=click.IntRange(min=0), metavar="R", help="Only this rank.")
@click.option("--cluster", "in_cluster", is_flag=True, help="Use a job in a cluster; -n and --context imply it.")
@FOLDER
@cluster_options
def stacks(connect: Connect, job: str | None, rank: int | None, folder: Path | None, in_cluster: bool) -> int:
    """Show the stacks of JOB's ranks, the same stack only once; without JOB, of the last run on this machine.

    The ranks keep running. Without ddprun, py-spy reads the stacks, on this machine only; a cluster needs kubectl and
    the right to exec.
    """
    from ddpjob_cli.manifest.yamlfile import InputError
    from ddprun.core import folded_stacks

    if in_cluster or connect.is_chosen or _is_plugin():
        source = _logs_in_cluster(connect, job)
    else:
        source = _logs_here(connect, job, folder)
    node = None if rank is None else source.node_of_rank(rank)
    found = _stacks_of(source, node)
    if rank is not None:
        parts = [part for text in found if (part := folded_stacks.of_rank(text, rank))]
        if not parts:
            raise InputError(f"{source.name}: no stack of rank {rank}; " + "; ".join(t.splitlines()[0] for t in found))
        found = parts
    return answer("".join(f"{text}\n" for text in found))


COMMANDS = (list_runs, logs, stacks, report)


def _stacks_of(source: LogSource, node: int | None) -> list[str]:
    from ddpjob_cli.local.run_files import run_logs

    if isinstance(source, run_logs.LocalLogs):
        from ddpjob_cli.local.processes import stacks as local

        return local.of_run(source.run)
    from ddpjob_cli.client import stacks as client

    return client.of_job(source.cluster, source.stored, node)


def _logs_here(connect: Connect, job: str | None, folder: Path | None) -> LogSource:
    from ddpjob_cli.local.run_files import run_logs, runs

    if job is not None and folder is None and job not in (kept := {run.facts.job for run in runs.find_all(folder)}):
        from ddpjob_cli.client.connection import has_kubeconfig

        if has_kubeconfig():
            here = f" (there are runs of: {', '.join(sorted(kept))})" if kept else ""
            say(f"no run of {job} is kept on this machine{here}: looking in the cluster")
            return _logs_in_cluster(connect, job)
    return run_logs.LocalLogs(runs.find(job, folder))


def _logs_in_cluster(connect: Connect, job: str | None, **part: Any) -> LogSource:
    from ddpjob_cli.client import jobs
    from ddpjob_cli.client.logs import ClusterLogs, LogPart
    from ddpjob_cli.client.watch import StateLines

    if job is None:
        raise click.UsageError("Missing argument 'JOB': which job of the cluster.")
    cluster = connect()
    return ClusterLogs(
        cluster, jobs.find(cluster, job), say, part=LogPart(**part), on_look=StateLines(say, running=False).see
    )


def _is_plugin() -> bool:
    return click.get_current_context().find_root().info_name == "kubectl ddp"


def row(told: dict[str, Any], *, wide: bool) -> dict[str, str]:
    from pathlib import Path

    from ddpjob_operator.job.wording import duration

    total = f"/{told['totalSteps']}" if told["totalSteps"] else ""
    cells = {
        "JOB": told["job"],
        "STATE": told["state"],
        "AGE": duration(told["ageSeconds"]),
        "ATTEMPTS": str(told["attempts"]),
        "RESTARTS": str(told["restarts"]),
        "STEP": "" if told["step"] is None else f"{told['step']}{total}",
    }
    if wide:
        cells["NODES"] = f"{told['nodes']} x {told['nprocPerNode']}"
        cells["TOOK"] = "" if told["tookSeconds"] is None else duration(told["tookSeconds"])
    return {**cells, "FOLDER": short(Path(told["folder"]))}


def as_json(run: Run, now: dt.datetime) -> dict[str, Any]:
    """Return a run in the form of `-o json`, which has only a part of the status."""
    from ddpjob_cli.local.run_files.runs import age, took

    status, progress = run.status, run.status.progress
    took_seconds = took(run, now)
    return {
        "job": run.facts.job,
        "run": run.facts.run,
        "state": run.state,
        "started": run.facts.started.isoformat(),
        "ageSeconds": round(age(run, now)),
        "tookSeconds": None if took_seconds is None else round(took_seconds),
        "attempts": status.attempt,
        "restarts": status.restarts.total if status.restarts else 0,
        "step": progress.step if progress else None,
        "totalSteps": progress.total_steps if progress else None,
        "nodes": run.facts.nodes,
        "nprocPerNode": run.facts.nproc_per_node,
        "message": status.message,
        "folder": str(run.folder),
    }


def short(path: Path) -> str:
    try:
        return f"~/{path.relative_to(path.home())}"
    except (ValueError, RuntimeError):
        return str(path)
