"""For Hugging Face's Trainer: all ranks save and stop after one agreed step when the job is told to stop.

    from ddpjob.huggingface import StopTogether

    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[StopTogether()])
    trainer.train(resume_from_checkpoint=get_last_checkpoint(arguments.output_dir))

Progress needs no callback, because transformers reports it to the job. Needs transformers, which this package does not
install.
"""

from typing import Any

from transformers import TrainerCallback

from ddpjob.errors import Stopped
from ddpjob.group.stop import should_stop


class StopTogether(TrainerCallback):  # type: ignore[misc]  # transformers is not there where types are checked
    """When a rank gets SIGTERM, save a checkpoint after a step on which all ranks agree, and end with exit code 75.

    `enable_jit_checkpoint` of transformers lets each rank stop at a step of its own, three seconds after its SIGTERM,
    and the script then ends with 0, as if the training were complete. Use one of the two.
    """

    def __init__(self) -> None:
        self._stopped = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:  # noqa: ARG002 - transformers' names
        """After each optimizer step, call `should_stop`, and save and stop if it returns True."""
        if should_stop(state.global_step):
            self._stopped = control.should_save = control.should_training_stop = True
            control.should_evaluate = False  # the evaluation would delay the save and, with `best`, might skip it
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:  # noqa: ARG002
        """Skip the trainer's other work at the end of an epoch and of the training, after the checkpoint.

        The trainer would evaluate for too long, save to the same folder again, load the best model, and with
        save_total_limit=1 remove all other checkpoints.
        """
        if self._stopped:
            control.should_evaluate = control.should_save = False
            state.best_model_checkpoint = None  # do not load the best model; the saved checkpoint has its path
        return control

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Raise Stopped, so that code after `train()` does not run for an unfinished training."""
        if self._stopped:
            raise Stopped(state.global_step)
