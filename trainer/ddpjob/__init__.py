"""DDPJob's trainer library: what runs inside the training process. It needs torch and nothing else.

Start a group with `init`, share the data with `GlobalBatchSampler` and `accumulate`, keep the state with `Snapshot`,
report how far training is with `progress`, stop in order with `should_stop`, and see with `check_replicas` that all
ranks are equal. All names are loaded on first use: `import ddpjob` itself imports no torch, because the command line is
installed without it.
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

__all__ = [
    "Batch",
    "ConfigurationError",
    "DDPJobError",
    "DataPartitioner",
    "GlobalBatchSampler",
    "Partition",
    "RendezvousError",
    "ReplicasDifferError",
    "Snapshot",
    "SnapshotError",
    "StateError",
    "Stopped",
    "Superseded",
    "UnsupportedError",
    "World",
    "accumulate",
    "check_replicas",
    "ignore_sigterm",
    "init",
    "pause",
    "progress",
    "should_stop",
]

_HOME = {
    **dict.fromkeys(["Batch", "DataPartitioner", "GlobalBatchSampler", "Partition", "accumulate"], "data"),
    **dict.fromkeys(["World", "init"], "group.join"),
    **dict.fromkeys(["ignore_sigterm", "should_stop"], "group.stop"),
    **dict.fromkeys(["pause", "progress"], "reporting.progress"),
    "Snapshot": "checkpoint.snapshot",
    "check_replicas": "checkpoint.state.replicas",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
