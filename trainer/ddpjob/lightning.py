"""For Lightning: progress of the job, and an end after one agreed step when the job is told to stop.

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
    """Reports each optimizer step with its loss; saves to `checkpoint` and ends with exit code 75 when told to stop.

    checkpoint  path of the checkpoint that is written before the end; None: none. On a volume that outlives the pod.
    """

    def __init__(self, checkpoint: str | None = None) -> None:
        self._checkpoint = checkpoint
        self._validation = contextlib.ExitStack()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002 - Lightning's names
        """Lightning's SIGTERM handler broadcasts, in the middle of whatever collective this rank is in. Ours waits for
        the end of the step."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        should_stop(trainer.global_step)
        if process.current.sigterm is not None:
            process.current.sigterm.handle()  # again: at the end of an earlier fit() Lightning has given SIGTERM back

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """No step is made until its end."""
        self._validation.enter_context(pause("evaluate"))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Steps go on."""
        self._validation.close()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """After each batch; raises Stopped after the agreed step, when the checkpoint is written."""
        step, total = trainer.global_step, trainer.estimated_stepping_batches
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        progress(step=step, total=int(total) if 0 < total < float("inf") else None, loss=loss)
        if should_stop(step):
            if self._checkpoint:
                trainer.save_checkpoint(self._checkpoint)
            raise Stopped(step)
