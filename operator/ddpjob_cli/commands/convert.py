"""`ddpjob convert`: reads documents of other tools, prints DDPJobs, and reports on stderr what has no counterpart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from ddpjob_cli.commands.output import answer, say

if TYPE_CHECKING:
    from ddpjob_cli.manifest.yamlfile import Document
    from ddpjob_convert.result import Converted, Path

EPILOG = """\b
Examples:
  ddpjob convert pytorchjob.yaml > job.yaml
  ddpjob convert trainjob.yaml runtime.yaml > job.yaml
  ddpjob convert --image IMAGE -- torchrun --nnodes 2 --nproc-per-node 8 train.py"""


_NAMED_MAX = 20  # names of other kinds in a message, if none can be converted
_IS_COMMAND = "ddpjob_cli.commands.convert.is_command"


class _WithDashes(click.Command):
    """Remembers if `--` was given, because click removes it, and the words after it are always a command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does, and note `--` in the context."""
        given = list(args)
        rest = super().parse_args(ctx, args)
        source = ctx.params.get("source") or ()
        ctx.meta[_IS_COMMAND] = given[: len(given) - len(source)][-1:] == ["--"]
        return rest


@click.command(
    cls=_WithDashes,
    short_help="Make a DDPJob from a PyTorchJob, a TrainJob or a command.",
    epilog=EPILOG,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("--image", help="The image, if a command is converted.")
@click.option("--name", help="The job's name, if a command is converted.")
@click.argument("source", metavar="FILE... | - | COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
def convert(source: tuple[str, ...], image: str | None, name: str | None) -> int:
    """Make DDPJobs from Kubeflow's PyTorchJob or TrainJob, or from a command line of torchrun or accelerate.

    A TrainJob needs its TrainingRuntime or ClusterTrainingRuntime among the files. The DDPJobs go to stdout. Each field
    without a counterpart is named on stderr, with its line and the reason.
    """
    from ddpjob_cli.commands.options import refuse_other_bytes
    from ddpjob_cli.manifest.yamlfile import InputError
    from ddpjob_convert import command
    from ddpjob_convert.fields import ConvertError

    if not (click.get_current_context().meta.get(_IS_COMMAND) or command.is_command(source[0])):
        for option in (w for w in (("--image", image), ("--name", name)) if w[1]):
            raise InputError(f"{option[0]}: only for a command; the file has its own")
        return answer("---\n".join(_from_files(source)))
    refuse_other_bytes([*source, name or "", image or ""])
    try:
        converted = command.convert(source, name, image)
    except ConvertError as error:
        raise InputError(f"command: {error}") from None
    for remark in converted.remarks:
        say(f"command: {remark.text}")
    return answer(_checked(converted, "command"))


def _from_files(paths: tuple[str, ...]) -> list[str]:
    from ddpjob_cli.manifest import yamlfile
    from ddpjob_convert import KINDS, advice, left_out

    everything = [d for path in paths for d in yamlfile.read(path) if d.data is not None]
    documents = [d for d in everything if isinstance(d.data, Mapping)]
    jobs = [d for d in documents if d.data.get("kind") in KINDS]
    if not jobs:
        there = ", ".join(f"{d.data.get('kind')} (line {d.line(())})" for d in documents) or "nothing else"
        lines = [f"{paths[0]}: contains no PyTorchJob and no TrainJob, but {there}"]
        lines += [f"{d.place(())}: {left_out(d.data)}" for d in documents[:_NAMED_MAX] if advice(d.data)]
        raise yamlfile.InputError("\n".join(lines))
    used = {id(job.data) for job in jobs}
    texts = [_converted(job, documents, used) for job in jobs]
    for document in everything:
        if id(document.data) not in used:  # name each document that is not converted: a user may pipe a folder
            say(f"{document.place(())}: {left_out(document.data)}")
    return texts


def _converted(job: Document, documents: list[Document], used: set[int]) -> str:
    from ddpjob_cli.manifest.yamlfile import InputError
    from ddpjob_convert import convert as to_job
    from ddpjob_convert.fields import ConvertError
    from ddpjob_operator.job.validation import dotted

    try:
        result = to_job(job.data, [d.data for d in documents])
    except ConvertError as error:
        document, path = _home(error.path, job, error.runtime, documents)
        raise InputError(f"{document.place(path)}: {dotted(path)}: {error}") from None
    used.add(id(result.runtime))
    told = [(*_home(remark.path, job, result.runtime, documents), remark.text) for remark in result.remarks]
    for document, path, text in sorted(told, key=lambda one: (one[0] is not job, one[0].line(one[1]))):
        say(f"{document.place(path)}: {dotted(path)}: {text}")
    return _checked(result, job.place(()))


def _home(path: Path, job: Document, runtime: object, documents: list[Document]) -> tuple[Document, Path]:
    """Return the document and the path in it. A path that begins with `runtime` refers to the runtime."""
    if path[:1] != ("runtime",):
        return job, path
    return next(d for d in documents if d.data is runtime), path[1:]


def _checked(result: Converted, place: str) -> str:
    """Return the YAML. Warn about variables that its command reads but that a DDPJob does not set. Raise InputError."""
    from ddpjob_check.job import mistakes
    from ddpjob_check.parsing import TooLongError
    from ddpjob_cli.commands.cpu_limit import CpuLimit
    from ddpjob_cli.manifest.yamlfile import InputError
    from ddpjob_operator.job import validation

    job, problems = validation.parse(result.data)
    if problems:
        raise InputError("\n".join(f"{place}: the DDPJob would not be valid: {problem}" for problem in problems))
    try:
        found = [text for _, rule, text in CpuLimit()(lambda: list(mistakes(job))) if rule.startswith("variable-of-")]
    except TooLongError:
        found = ["the command takes too long to follow, so its variables are not checked"]
    for text in found:
        say(f"{place}: {text}")
    return result.to_yaml()
