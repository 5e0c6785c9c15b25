"""Jobs from Python: `ddpjob.run` and `ddpjob.submit`, which give a `Job`.

In:   a function, a script, a notebook or a DDPJob's YAML, and the words of the command line as arguments.
Out:  a Job; what rank 0 returns; exceptions with that of the failed rank as their cause.

Called by: `ddpjob`, the library, by name and on first use; it must not need this package where a rank runs.
Must not know: torch. All that a command does too is done by what the command calls.
"""

from ddpjob_cli.client.errors import ClusterError
from ddpjob_cli.manifest.yamlfile import InputError
from ddpjob_cli.sdk.function import UnsentError
from ddpjob_cli.sdk.job import Job, JobFailedError, RankError
from ddpjob_cli.sdk.start import run, submit

__all__ = ["ClusterError", "InputError", "Job", "JobFailedError", "RankError", "UnsentError", "run", "submit"]
