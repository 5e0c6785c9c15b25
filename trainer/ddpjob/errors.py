"""The errors, with one base class so that a caller can catch all of them; and `Stopped`, which is not an error."""

from collections.abc import Sequence

from ddpjob import process
from ddpjob_core import rules


class DDPJobError(Exception):
    """Base of all errors that this library raises on purpose."""


class ConfigurationError(DDPJobError, ValueError):
    """An argument or environment variable is invalid; the message names it, its value and the fix."""


class UnsupportedError(ConfigurationError):
    """This PyTorch or this machine lacks a requested feature."""


class RendezvousError(DDPJobError, RuntimeError):
    """The ranks did not find each other in time."""


class ReplicasDifferError(DDPJobError, RuntimeError):
    """Ranks do not hold the same bits. `tensor` names the first tensor that differs, `ranks` the ranks that differ."""

    def __init__(self, message: str, tensor: str = "", ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.tensor, self.ranks = tensor, list(ranks)


class StateError(DDPJobError, ValueError):
    """A state cannot be saved or kept in memory, or a saved state does not fit the script's objects."""


class SnapshotError(StateError):
    """A snapshot could not be written or read."""


class Superseded(SnapshotError):  # noqa: N818 - the field's word for it, not an error of this process
    """A newer attempt of the job owns the folder. This process must end; it has changed nothing there."""


class Stopped(SystemExit):
    """Ends a training that was requested to stop and has saved `step`: exit code 75, resumable, not a failure."""

    def __init__(self, step: int) -> None:
        super().__init__(rules.RESUMABLE_EXIT_CODE)
        self.step = step
        process.current.stopped_raised = True
