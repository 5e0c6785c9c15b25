"""For Lightning: report the job's progress; all ranks stop after one agreed step when the job is told to stop.

    from ddpjob.lightning import JobCallback

    trainer = Trainer(max_epochs=5, strategy="ddp", num_nodes=nodes, callbacks=[JobCallback("/snapshots/last.ckpt")])
    trainer.fit(module, loader, ckpt_path=path if os.path.exists(path) else None)

Needs lightning (or pytorch_lightning), which this package does not install.
"""

import contextlib
import signal
from typing import Any

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

from ddpjob import process
from ddpjob.errors import Stopped
from ddpjob.group.stop import should_stop
from ddpjob.reporting.progress import pause, progress


class JobCallback(Callback):  # type: ignore[misc]  # lightning is not there where types are checked
    """Report each optimizer step with its loss. When told to stop, save to `checkpoint` and end with exit code 75.

    checkpoint  path on a volume that outlives the pod; None to write no checkpoint before the end.
    """

    def __init__(self, checkpoint: str | None = None) -> None:
        self._checkpoint = checkpoint
        self._validation = contextlib.ExitStack()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002 - Lightning's names
        """Replace Lightning's SIGTERM handler, which broadcasts even if this rank is within another collective. The
        handler of `should_stop` waits for the end of the step."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        should_stop(trainer.global_step)
        if process.current.sigterm is not None:
            process.current.sigterm.handle()  # set it again, because the end of each fit() restores the default

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Declare a pause, because no step is made during the validation."""
        self._validation.enter_context(pause("evaluate"))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """End the pause that `on_validation_start` has declared."""
        self._validation.close()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """Report the step. After the agreed step, write the checkpoint and raise Stopped."""
        step, total = trainer.global_step, trainer.estimated_stepping_batches
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        progress(step=step, total=int(total) if 0 < total < float("inf") else None, loss=loss)
        if should_stop(step):
            if self._checkpoint:
                trainer.save_checkpoint(self._checkpoint)
            raise Stopped(step)
