"""DDPJob's trainer library: what runs inside the training process.

In:   the script's calls and objects, the variables that the operator, `ddprun` or torchrun set.
Out:  a process group, snapshots, reports to the operator, heartbeats for the agent.
Called by: scripts. `run`, `submit` and `Job` need the command line (docs/python.md), which a trainer image may lack.
Must not need anything but torch. All names are loaded on first use: `import ddpjob` imports no torch, because the
command line is installed without it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpjob.checkpoint.snapshot import Snapshot
    from ddpjob.checkpoint.state.replicas import check_replicas
    from ddpjob.data import Batch, DataPartitioner, GlobalBatchSampler, Partition, accumulate
    from ddpjob.errors import (
        ConfigurationError,
        DDPJobError,
        RendezvousError,
        ReplicasDifferError,
        SnapshotError,
        StateError,
        Stopped,
        Superseded,
        UnsupportedError,
    )
    from ddpjob.group.join import World, init
    from ddpjob.group.stop import ignore_sigterm, should_stop
    from ddpjob.reporting.progress import pause, progress
    from ddpjob_cli.sdk import ClusterError, InputError, Job, JobFailedError, RankError, UnsentError, run, submit

__all__ = [
    "Batch", "ClusterError", "ConfigurationError", "DDPJobError", "DataPartitioner", "GlobalBatchSampler",
    "InputError", "Job", "JobFailedError", "Partition", "RankError", "RendezvousError", "ReplicasDifferError",
    "Snapshot", "SnapshotError", "StateError", "Stopped", "Superseded", "UnsentError", "UnsupportedError", "World",
    "accumulate", "check_replicas", "ignore_sigterm", "init", "pause", "progress", "run", "should_stop", "submit",
]  # fmt: skip

_HOME = {
    **dict.fromkeys(["Batch", "DataPartitioner", "GlobalBatchSampler", "Partition", "accumulate"], "data"),
    **dict.fromkeys(["World", "init"], "group.join"),
    **dict.fromkeys(["ignore_sigterm", "should_stop"], "group.stop"),
    **dict.fromkeys(["pause", "progress"], "reporting.progress"),
    "Snapshot": "checkpoint.snapshot",
    "check_replicas": "checkpoint.state.replicas",
}
_OF_THE_COMMAND_LINE = "ClusterError InputError Job JobFailedError RankError UnsentError run submit".split()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _OF_THE_COMMAND_LINE:
        try:
            home = importlib.import_module("ddpjob_cli.sdk")
        except ModuleNotFoundError as error:
            raise ImportError(f"ddpjob.{name} needs the command line, but {error.name} is not installed") from error
    else:
        home = importlib.import_module(f"{__name__}.{_HOME.get(name, 'errors')}")
    value = getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
