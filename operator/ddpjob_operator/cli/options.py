"""Options that change a job, as `run` and `submit` have them."""

from __future__ import annotations

from ddpjob_operator.job import api, validation
from ddpjob_operator.manifest import override
from ddpjob_operator.manifest.yamlfile import Document, InputError


def applied(
    document: Document, nodes: str | None, settings: tuple[str, ...], variables: tuple[str, ...]
) -> tuple[Document, api.DDPJob]:
    """A job with the options applied, and read. nodes: a number, or MIN:MAX as torchrun's. Raises InputError."""
    if nodes is not None:
        least, colon, most = nodes.rpartition(":")
        if not most or (colon and not least):
            raise InputError(f"--nodes {nodes}: must be a number, or MIN:MAX for an elastic job")
        override.set_field(document, f"spec.nodes={most}", "--nodes")
        if least:
            override.set_field(document, f"spec.minNodes={least}", "--nodes")
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
