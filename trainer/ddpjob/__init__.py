"""DDPJob's trainer library: what runs inside the training process. It needs torch and nothing else.

Start a group with `init`, share the data with `GlobalBatchSampler` and `accumulate`, keep the state with `Snapshot`,
say how far training is with `progress`, stop in order with `should_stop`, and see with `check_replicas` that all ranks
are equal. All names are loaded on first use:
`import ddpjob` itself imports no torch, because the command line is installed without it.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .data import Batch, DataPartitioner, GlobalBatchSampler, Partition, accumulate
    from .errors import (
        ConfigurationError,
        DDPJobError,
        RendezvousError,
        ReplicasDifferError,
        SnapshotError,
        StateError,
        Superseded,
        UnsupportedError,
    )
    from .init import World, init
    from .progress import pause, progress
    from .replicas import check_replicas
    from .snapshot import Snapshot
    from .stop import Stopped, ignore_sigterm, should_stop

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
    "Batch": "data",
    "DataPartitioner": "data",
    "GlobalBatchSampler": "data",
    "Partition": "data",
    "accumulate": "data",
    "World": "init",
    "init": "init",
    "Snapshot": "snapshot",
    "Stopped": "stop",
    "pause": "progress",
    "progress": "progress",
    "check_replicas": "replicas",
    "ignore_sigterm": "stop",
    "should_stop": "stop",
}
_FUNCTIONS_NAMED_LIKE_THEIR_FILE = ("init", "progress")


class _Package(ModuleType):
    """Keeps `ddpjob.init` and `ddpjob.progress` functions, whoever imports the files of the same name, and when."""

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system binds every submodule to its name in the package, also over an attribute that is there.
        if name in _FUNCTIONS_NAMED_LIKE_THEIR_FILE and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


sys.modules[__name__].__class__ = _Package
