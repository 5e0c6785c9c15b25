"""`ddpjob.run` and `ddpjob.submit`, with the command line's options as arguments."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpjob_cli.client.connection import REQUEST_SECONDS
from ddpjob_cli.commands import sources
from ddpjob_cli.commands import submit as command
from ddpjob_cli.commands.cluster import Connect
from ddpjob_cli.commands.output import say
from ddpjob_cli.manifest.yamlfile import InputError
from ddpjob_cli.sdk import function
from ddpjob_cli.sdk.job import ClusterJob, Job, LocalJob
from ddpjob_operator.gangs.kueue import QUEUE_LABEL

What = str | os.PathLike[str] | Callable[..., Any]


def run(
    what: What,
    *,
    args: Sequence[Any] = (),
    nodes: int | str | None = None,
    nproc_per_node: int | str | None = None,
    max_restarts: int | None = None,
    name: str | None = None,
    env: Mapping[str, str] | None = None,
    launcher: str | None = None,
    cpu: bool = False,
) -> Job:
    """Run a function, a script, a notebook or a DDPJob's YAML on this machine, as `ddpjob run`. Return when it has
    begun. args: of the function, or words for the script. nodes: groups of processes, or "MIN:MAX". nproc_per_node:
    a number, "gpu", "cpu" or "auto". max_restarts: after failures; default 3. env: variables of the ranks. launcher:
    "ddprun" or "torchrun". cpu: train with gloo even if there are GPUs. Numbers default to the YAML's, or 1. Raises
    InputError if it cannot run, ImportError if a function is given and cloudpickle is not installed."""
    _refuse_text(args)
    given = {"nodes": nodes, "nproc-per-node": nproc_per_node, "max-restarts": max_restarts, "launcher": launcher}
    words = [word for option, value in given.items() if value is not None for word in (f"--{option}", str(value))]
    words += [word for key, value in (env or {}).items() for word in ("--env", f"{key}={value}")]
    words += ["--cpu"] * cpu
    if not callable(what):
        words += ["--set", f"metadata.name={name}"] if name else []
        file = os.fspath(what)
        file = os.path.join(os.curdir, file) if file.startswith("-") else file
        return LocalJob([*words, file, "--", *map(str, args)] if args else [*words, file])
    sent = function.sent(what, args)
    words += ["--set", f"metadata.name={name or sent.name}", "--no-check"]
    return LocalJob(words, sent)


def submit(
    what: What,
    *,
    args: Sequence[Any] = (),
    nodes: int | str | None = None,
    nproc_per_node: int | None = None,
    max_restarts: int | None = None,
    name: str | None = None,
    env: Mapping[str, str] | None = None,
    launcher: str | None = None,
    image: str | None = None,
    gpus: int | None = None,
    resources: Mapping[str, str | int] | None = None,
    labels: Mapping[str, str] | None = None,
    queue: str | None = None,
    code: str | os.PathLike[str] | None = None,
    namespace: str | None = None,
    context: str | None = None,
    kubeconfig: str | None = None,
) -> Job:
    """Run a function, a script, a notebook or a DDPJob's YAML in a cluster, as `ddpjob submit`. Return when the job is
    created. args to launcher: as in `run`; nodes are pods. image: the trainer's; for a function it must have the Python
    version used here. gpus: per node. resources: limits per node, such as {"memory": "32Gi"}. labels: of the job.
    queue: a LocalQueue of Kueue. code: folder to send; by default a script's own, and none for a function. namespace,
    context, kubeconfig: as for kubectl. Raises InputError if it cannot run or its name is taken, ClusterError, and
    ImportError as `run` does."""
    _refuse_text(args)
    sent = function.sent(what, args) if callable(what) else None
    wishes = command.Wishes(
        name=name or (sent.name if sent else None), namespace=namespace, image=image, launcher=launcher, gpus=gpus,
        nodes=None if nodes is None else str(nodes), nproc=nproc_per_node,
        max_restarts=None if max_restarts is None else str(max_restarts),
        variables=tuple(f"{key}={value}" for key, value in (env or {}).items()),
        code=None if code is None else Path(code), limits=dict(resources or {}), made=sent.files if sent else {},
        labels={**(labels or {}), **({QUEUE_LABEL: queue} if queue else {})},
    )  # fmt: skip
    connect = Connect(context, namespace, REQUEST_SECONDS, kubeconfig)
    with tempfile.TemporaryDirectory(prefix="ddpjob-") as folder:
        file = os.path.join(folder, function.SCRIPT) if sent else os.fspath(what)  # type: ignore[arg-type]
        if sent:
            Path(file).write_text(sent.files[function.SCRIPT], encoding="utf-8")
        words = () if sent else tuple(map(str, args))
        with sources.naming(file, sent.name if sent else file):
            document, archive = command.prepare(file, words, wishes, checked=sent is None)
        if sent is None:
            for remark in command.remarks(file, document, archive):
                say(remark)
    cluster, made = command.create(connect, document, archive)
    return ClusterJob(cluster, made, sent)


def _refuse_text(args: Sequence[Any]) -> None:
    if isinstance(args, (str, bytes)):
        raise InputError(f"args={args!r}: must be a list, such as ['--epochs', 5]; each character would be an argument")
