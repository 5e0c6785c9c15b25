"""The common last part of `ddpjob run` and `ddpjob dev`: check the job's script, and run the job on this machine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ddpjob_cli.commands.output import say

if TYPE_CHECKING:
    from ddpjob_cli.local.run import RunOptions
    from ddpjob_cli.manifest.yamlfile import Document
    from ddpjob_operator.job import api


def start(
    document: Document, job: api.DDPJob, options: RunOptions, *, checked: bool, notebook: str | None = None
) -> int:
    """Check the job's script, run the job, and return the exit code. notebook: the notebook that became the script."""
    from ddpjob_cli.commands import check_files
    from ddpjob_cli.local.run import run
    from ddprun import foreign_children

    if checked:
        lines, is_refused = check_files.before_run(
            document, job, cpu=options.cpu, read_instead=notebook, given=os.environ
        )
        for line in lines:
            say(line)
        if is_refused:
            return 2
    foreign_children.stand_apart()
    return run(document, job, options)
