"""Write the metrics of `progress()` as TensorBoard event files, into the folder that DDPJOB_TENSORBOARD names."""

import contextlib
from collections.abc import Mapping
from typing import Any

from ddpjob import process

VARIABLE = "DDPJOB_TENSORBOARD"


class EventFiles:
    """The event files of rank 0. A viewer drops the steps of the earlier process that a restart repeats."""

    def __init__(self, folder: str) -> None:
        """folder: where the files are written; "": nowhere."""
        self._folder, self._writer, self._last = folder, None, -1

    def write(self, step: int, metrics: Mapping[str, str]) -> None:
        """Write one point for each number, once per step. Without the package tensorboard, report that once."""
        if not self._folder or step <= self._last or not metrics:
            return
        self._last = step
        try:
            writer = self._writer = self._writer or _opened(self._folder, step)
            for name, text in metrics.items():
                with contextlib.suppress(ValueError):  # a text cannot be drawn
                    writer.add_scalar(name, float(text), step)
            writer.flush()  # a rank that is killed does not close its files
        except Exception as error:
            process.log(f"{VARIABLE}={self._folder}: no more event files: {type(error).__name__}: {error}")
            self._folder = ""


def _opened(folder: str, step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(folder, purge_step=step)
