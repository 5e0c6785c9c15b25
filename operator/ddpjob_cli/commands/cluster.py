"""The commands for jobs in a cluster. They parse options; client/ does the work."""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from ddpjob_cli.commands.output import answer, say

NO_LIMIT = 86400.0 * 365  # seconds; for --request-timeout 0, which means no limit as in kubectl
COMPLETION_SECONDS = 2.0  # seconds; after a longer wait the shell would seem to hang

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from ddpjob_cli.client.connection import Cluster
    from ddpjob_cli.client.jobs import Stored

    FloatParam = click.ParamType[float]
    NameParam = click.ParamType[str]
else:
    FloatParam = NameParam = click.ParamType  # generic only since click 8.2


CODES = """Exit codes: 0 done, 1 the cluster refused or did not answer,
2 wrong input, 130 interrupted."""


class Seconds(FloatParam):
    """A duration in seconds: 30, 30s, 15m, 2h30m."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, (int, float)):
            return float(value)
        found = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?", value)
        if not value or found is None or len(value) > 12:
            self.fail(f"{value!r} is not a duration such as 30s, 15m or 2h30m", param, ctx)
        return float(sum(int(n or 0) * unit for n, unit in zip(found.groups(), (86400, 3600, 60, 1), strict=True)))


@dataclass(frozen=True)
class Connect:
    """The command line's options that select a cluster. Calling this object connects to the cluster."""

    context: str | None
    namespace: str | None
    seconds: float
    kubeconfig: str | None = None

    @property
    def is_chosen(self) -> bool:
        return any(chosen is not None for chosen in (self.context, self.namespace, self.kubeconfig))

    def __call__(self, namespace: str | None = None) -> Cluster:
        from ddpjob_cli.client.connection import connect

        return connect(self.context, namespace or self.namespace, self.seconds, self.kubeconfig)


def cluster_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --namespace, --context, --kubeconfig and --request-timeout, which the command gets as a Connect."""

    @click.option("-n", "--namespace", metavar="NS", help="The namespace.  [that of the context]")
    @click.option("--context", metavar="NAME", help="The context of the kubeconfig.  [the current one]")
    @click.option("--kubeconfig", metavar="FILE", help="The kubeconfig.  [$KUBECONFIG, or ~/.kube/config]")
    @click.option(
        "--request-timeout", type=Seconds(), metavar="TIME", default="10s", show_default=True,
        help="Time for the API server to answer; 0: no limit.",
    )  # fmt: skip
    @functools.wraps(command)
    def with_cluster(
        *args: Any,
        namespace: str | None,
        context: str | None,
        kubeconfig: str | None,
        request_timeout: float,
        **more: Any,
    ) -> Any:
        seconds = min(request_timeout or NO_LIMIT, NO_LIMIT)
        return command(Connect(context, namespace, seconds, kubeconfig), *args, **more)

    text = inspect.getdoc(command) or ""
    with_cluster.__doc__ = text if "Exit codes" in text else f"{text}\n\n\b\n{CODES}"
    return with_cluster


class JobName(NameParam):
    """The name of a job: digits, or as `get -o name` prints it, ddpjob.training.ddpjob.io/digits."""

    name = "job"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:  # noqa: ARG002
        """Return the name without its kind. A name of another kind is returned unchanged, and refused later."""
        from ddpjob_operator.job import api

        kind, _, name = str(value).rpartition("/")
        known = {api.KIND.lower(), api.PLURAL, api.SHORT}
        return name if kind.lower().removesuffix(f".{api.GROUP}") in known else str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        named = ctx.params.get(param.name or "") or ()
        names = [name for name in _names_there(ctx) if name not in named]
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]


JOB = click.argument("job", type=JobName())
JOBS = click.argument("names", metavar="JOB...", type=JobName(), nargs=-1, required=True)


def _names_there(ctx: click.Context) -> list[str]:
    """Return the names of the namespace's jobs; none without an answer, because shell completion shows no errors."""
    from ddpjob_cli.client import jobs
    from ddpjob_cli.client.errors import ClusterError
    from ddpjob_cli.manifest.yamlfile import InputError

    context, namespace, kubeconfig = (ctx.params.get(name) for name in ("context", "namespace", "kubeconfig"))
    connect = Connect(context, namespace, COMPLETION_SECONDS, kubeconfig)
    try:
        return [raw["metadata"]["name"] for raw in jobs.items(connect())]
    except (ClusterError, InputError):
        return []


BOTH = "JOB and --selector exclude each other."
SELECTOR = click.option("-l", "--selector", metavar="LABELS", help="Jobs with these labels: team=a,!old.")


@click.command(short_help="List the jobs of a cluster, or show some.", epilog="Example: ddpjob get -A -o wide")
@click.argument("names", metavar="[JOB...]", type=JobName(), nargs=-1)
@SELECTOR
@click.option("-o", "--output", type=click.Choice(["text", "wide", "name", "json", "yaml"]), default="text")
@click.option("-A", "--all-namespaces", is_flag=True, help="All namespaces.")
@cluster_options
def get(connect: Connect, names: tuple[str, ...], selector: str | None, output: str, all_namespaces: bool) -> int:
    """List the DDPJobs of a namespace, or show some, in the columns of kubectl."""
    from ddpjob_cli.client import jobs, many_jobs, output_forms

    if names and all_namespaces:
        raise click.UsageError("JOB and --all-namespaces exclude each other.")
    if names and selector:
        raise click.UsageError(BOTH)
    cluster = connect()
    if names:
        found, wrong = many_jobs.of_each(names, lambda name: jobs.find(cluster, name).raw)
        code = answer(output_forms.of_jobs(found, output, one=len(names) == 1, namespaces=False)) if found else 0
        many_jobs.refuse(wrong)
        return code
    found = jobs.items(cluster, all_namespaces=all_namespaces, selector=selector)
    if not found and output in ("text", "wide"):
        where = "the cluster" if all_namespaces else f"namespace {cluster.namespace}"
        said = f" has the labels {selector}" if selector else f" in {where}; start one with ddpjob submit"
        say(f"no DDPJob{said}")
        return 0
    return answer(output_forms.of_jobs(found, output, one=False, namespaces=all_namespaces))


def _chosen(cluster: Cluster, names: tuple[str, ...], selector: str | None) -> tuple[str, ...]:
    from ddpjob_cli.client import jobs

    if names and selector:
        raise click.UsageError(BOTH)
    if names:
        return names
    if not selector:
        raise click.UsageError("Missing argument 'JOB...', or --selector.")
    found = tuple(raw["metadata"]["name"] for raw in jobs.items(cluster, selector=selector))
    if not found:
        say(f"no DDPJob in namespace {cluster.namespace} has the labels {selector}")
    return found


@click.command(short_help="Show jobs in full.", epilog="Example: ddpjob describe digits")
@JOBS
@cluster_options
def describe(connect: Connect, names: tuple[str, ...]) -> int:
    """Show state, progress, restarts, the last failure with the end of its log, pods and Events of each JOB."""
    from ddpjob_cli.client import jobs, many_jobs, output_forms

    cluster = connect()
    texts, wrong = many_jobs.of_each(names, lambda name: output_forms.in_full(cluster, jobs.find(cluster, name), say))
    code = answer("\n\n".join(texts))
    many_jobs.refuse(wrong)
    return code


@click.command(short_help="Show the Events of a job.", epilog="Example: ddpjob events digits --pods")
@JOB
@click.option("--pods", is_flag=True, help="Also those of its pods.")
@cluster_options
def events(connect: Connect, job: str, pods: bool) -> int:
    """Show the Events of JOB, the newest last. A cluster keeps them for an hour."""
    from ddpjob_cli.client import jobs, output_forms

    cluster = connect()
    found = jobs.events(cluster, jobs.find(cluster, job), of_pods=pods)
    if not found:
        why = "a cluster keeps them for an hour, and a short job that just trains has none"
        say(f"{job} has no Events: {why}; ddpjob describe {job} shows how it ended")
        return 0
    return answer(output_forms.of_events(found))


@click.command(
    "wait",
    short_help="Wait until jobs have ended, or are in a state.",
    epilog="Example: ddpjob wait digits --timeout 2h",
)
@click.argument("names", metavar="[JOB...]", type=JobName(), nargs=-1)
@SELECTOR
@click.option("--for", "wanted", metavar="STATE", default="Succeeded", show_default=True,
              help="A state or condition: Running, Succeeded, Complete, Suspended …; ended; deleted.")  # fmt: skip
@click.option("--timeout", type=Seconds(), metavar="TIME", help="How long: 30s, 15m, 2h.  [no limit]")
@cluster_options
def wait_for(connect: Connect, names: tuple[str, ...], selector: str | None, wanted: str, timeout: float | None) -> int:
    """Wait until each JOB is in a state. Exit with 1 after --timeout, or once a JOB can no longer get there.

    \b
    Exit codes: 0 done, 1 a job failed, or the cluster refused or did not answer,
    2 wrong input, 130 interrupted.
    """
    from ddpjob_cli.client import actions

    cluster = connect()
    chosen = _chosen(cluster, names, selector)
    return 0 if chosen and actions.wait(cluster, chosen, wanted, timeout, say) else 1


@click.command(short_help="Stop the pods of jobs, and keep the jobs.", epilog="Example: ddpjob suspend digits")
@JOBS
@cluster_options
def suspend(connect: Connect, names: tuple[str, ...]) -> int:
    """Stop all pods of each JOB; they have their grace period to save. `ddpjob resume` continues."""
    from ddpjob_cli.client import actions, many_jobs

    cluster = connect()
    many_jobs.refuse(many_jobs.of_each(names, lambda name: actions.suspend(cluster, name, say))[1])
    return 0


@click.command(short_help="Resume suspended jobs.", epilog="Example: ddpjob resume digits")
@JOBS
@cluster_options
def resume(connect: Connect, names: tuple[str, ...]) -> int:
    """Start the pods of each suspended JOB again, as a new attempt."""
    from ddpjob_cli.client import actions, many_jobs

    cluster = connect()
    many_jobs.refuse(many_jobs.of_each(names, lambda name: actions.resume(cluster, name, say))[1])
    return 0


STOP_TIMEOUT = click.option(
    "--timeout", type=Seconds(), metavar="TIME", default="10m", show_default=True,
    help="Time for its pods to end.",
)  # fmt: skip


@click.command(short_help="Stop a job's pods, and start new ones.", epilog="Example: ddpjob restart digits")
@JOB
@STOP_TIMEOUT
@cluster_options
def restart(connect: Connect, job: str, timeout: float) -> int:
    """Stop all pods of JOB with their grace period, then start a new attempt; backoffLimit is not charged."""
    from ddpjob_cli.client import actions

    actions.restart(connect(), job, timeout, say)
    return 0


@click.command(short_help="Change the number of nodes.", epilog="Example: ddpjob scale digits --nodes 4")
@JOB
@click.option("--nodes", type=click.IntRange(min=1), metavar="N", required=True, help="The new number of nodes.")
@STOP_TIMEOUT
@cluster_options
def scale(connect: Connect, job: str, nodes: int, timeout: float) -> int:
    """Change the number of nodes of JOB. A running job is stopped, and started again with the new number."""
    from ddpjob_cli.client import actions

    actions.scale(connect(), job, nodes, timeout, say)
    return 0


@click.command(short_help="Delete jobs.", epilog="Example: ddpjob delete digits")
@click.argument("names", metavar="[JOB...]", type=JobName(), nargs=-1)
@SELECTOR
@click.option("--no-wait", is_flag=True, help="Do not wait until it is gone.")
@click.option("--timeout", type=Seconds(), metavar="TIME", default="1m", show_default=True, help="How long to wait.")
@cluster_options
def delete(connect: Connect, names: tuple[str, ...], selector: str | None, no_wait: bool, timeout: float) -> int:
    """Delete each JOB, its pods after their grace period, and the code that submit stored."""
    from ddpjob_cli.client import actions

    cluster = connect()
    actions.delete(cluster, _chosen(cluster, names, selector), wait=not no_wait, seconds=timeout, say=say)
    return 0


@click.command(short_help="Watch the progress of all jobs.", epilog="Example: ddpjob top -A")
@click.option("-A", "--all-namespaces", is_flag=True, help="All namespaces.")
@click.option("--once", is_flag=True, help="Print the table once.")
@cluster_options
def top(connect: Connect, all_namespaces: bool, once: bool) -> int:
    """Show the state and progress of all jobs, refreshed every two seconds, until Ctrl-C.

    If stdout is no terminal, or TERM is dumb, the table is printed once.
    """
    from ddpjob_cli.client import top as live

    cluster = connect()
    if once or not sys.stdout.isatty() or os.environ.get("TERM") in ("dumb", "unknown"):
        return answer("".join(f"{line}\n" for line in live.lines(cluster, all_namespaces=all_namespaces)))
    live.show(cluster, all_namespaces=all_namespaces)
    return 0


def end_of(stored: Stored) -> int:
    from ddpjob_cli.describe import ending

    say(ending.of_job(stored.job))
    return 0 if stored.job.status.state == "Succeeded" else 1


COMMANDS = (get, describe, events, wait_for, suspend, resume, restart, scale, delete, top)
