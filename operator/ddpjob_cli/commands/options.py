"""The options of `run` and `submit` that choose what to run, or change the job."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ddpjob_cli.manifest import override
from ddpjob_cli.manifest.yamlfile import Document, InputError
from ddpjob_operator.job import api, validation

NODES_WANTED = "must be a number of nodes, or MIN:MAX as 1:3 for an elastic job"


@dataclass(frozen=True)
class Source:
    """The file or module to run, and the options that change it."""

    file: str | None
    module: str | None = None
    job: str | None = None
    nodes: str | None = None
    nproc: str | None = None
    settings: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    gpus: bool = False
    """True if a script that uses GPUs gets one per process."""
    text: str | None = None
    """The YAML from stdin."""
    max_restarts: str | None = None
    launcher: str = "torchrun"
    note: str = ""
    """A sentence about the launcher, for a comment in the YAML."""


def range_of(nodes: str) -> tuple[str, str]:
    """Split `--nodes MIN:MAX`; MIN is "" for a single number. Numbers are not checked here. Raise InputError."""
    least, colon, most = nodes.partition(":")
    if not nodes or (colon and (not least or not most or ":" in most)):
        raise InputError(f'--nodes: {NODES_WANTED}, is "{nodes}"')
    return (least, most) if colon else ("", nodes)


def refuse_other_bytes(words: Iterable[str]) -> None:
    """Refuse words that are not UTF-8, because neither an API server nor YAML accepts them. Raise InputError."""
    for word in words:
        if any("\ud800" <= character <= "\udfff" for character in word):
            raise InputError(f"{word!r}: not UTF-8, so it cannot be part of a job")


def applied(
    document: Document,
    nodes: str | None,
    settings: tuple[str, ...],
    variables: tuple[str, ...],
) -> tuple[Document, api.DDPJob]:
    """Apply the options. Return the document, and the job parsed from it. nodes: N or MIN:MAX. Raise InputError."""
    if nodes is not None:
        least, most = range_of(nodes)
        override.set_field(document, f"spec.nodes={most}", "--nodes")
        if least:
            override.set_field(document, f"spec.minNodes={least}", "--nodes")
    refuse_other_bytes([*settings, *variables])
    for setting in settings:
        override.set_field(document, setting, f"--set {setting}")
    for variable in variables:
        override.set_variable(document, variable)
    parsed, problems = validation.parse(document.data)
    named = {p.path for p in problems}
    problems += [p for p in validation.strict(parsed.spec) if p.path not in named]
    if problems:
        raise document.error(problems)
    return document, parsed
