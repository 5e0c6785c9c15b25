"""Start jobs from Python: `ddpjob.run` and `ddpjob.submit`, which return a `Job`.

In:   a function, a script, a notebook or a DDPJob's YAML, and the words of the command line as arguments.
Out:  a Job; what rank 0 returns; exceptions whose cause is the exception of the failed rank.

Called by: the library `ddpjob`, by name and on first use, because ranks must not need this package.
Must not import: torch. Calls the same code as the commands of the command line.
"""

from ddpjob_cli.client.errors import ClusterError
from ddpjob_cli.manifest.yamlfile import InputError
from ddpjob_cli.sdk.function import UnsentError
from ddpjob_cli.sdk.job import Job, JobFailedError, RankError
from ddpjob_cli.sdk.start import run, submit

__all__ = ["ClusterError", "InputError", "Job", "JobFailedError", "RankError", "UnsentError", "run", "submit"]
