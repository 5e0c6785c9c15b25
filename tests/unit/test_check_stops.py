"""`check` on what a training does when it is stopped."""

import pytest

from ddpjob_check import CheckedJob, check

STOPS = "if ddpjob.should_stop(step):\n    raise ddpjob.Stopped(step)\n"
HANDLER = "signal.signal(signal.SIGTERM, lambda *_: save())\n"
HEAD = "import os, signal, ddpjob\nfrom torch.utils.data import DataLoader\ndata = range(9)\n"
SEEDS = "def seeded(worker):\n    torch.manual_seed(worker)\n"
IGNORES = "def ignoring(worker):\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
LATER = "def ignoring(worker):\n    seed(worker)\n    ddpjob.ignore_sigterm(worker)\n"


def is_found(lines: str, launcher: str = "torchrun") -> bool:
    found = check("train.py", HEAD + lines, CheckedJob(nodes=2, nproc=1, launcher=launcher, known=True))
    return any(f.rule == "workers-get-sigterm" for f in found)


@pytest.mark.parametrize("launcher", ["torchrun", "torch.distributed.run", "torch.distributed.launch"])
@pytest.mark.parametrize(
    "lines",
    [
        STOPS + "DataLoader(data, num_workers=2)",
        STOPS + "DataLoader(data, 4, False, None, None, 2)",
        STOPS + "workers = 4\nDataLoader(data, num_workers=workers, persistent_workers=True)",
        STOPS + "DataLoader(data, num_workers=os.cpu_count())",
        STOPS + "DataLoader(data, num_workers=2, worker_init_fn=None)",
        STOPS + SEEDS + "DataLoader(data, num_workers=2, worker_init_fn=seeded)",
        HANDLER + "DataLoader(data, num_workers=2)",
        "from ddpjob.lightning import JobCallback\nJobCallback('last.ckpt')\nDataLoader(data, num_workers=2)",
        "from ddpjob.huggingface import StopTogether\nfrom transformers import TrainingArguments\n"
        "StopTogether()\nTrainingArguments('out', dataloader_num_workers=2)",
    ],
)
def test_data_loader_workers_that_end_before_their_rank_are_named(lines: str, launcher: str) -> None:
    """Workers that end before their rank must be named: they break the save at a drain, and the log shows no reason."""
    assert is_found(lines, launcher)


@pytest.mark.parametrize(
    "lines",
    [
        STOPS + "DataLoader(data)",
        STOPS + "DataLoader(data, num_workers=0)",
        STOPS + "DataLoader(data, num_workers=args.workers)",
        STOPS + "DataLoader(data, num_workers=2, **options)",
        STOPS + "DataLoader(data, num_workers=2, worker_init_fn=ddpjob.ignore_sigterm)",
        STOPS + "from other import start\nDataLoader(data, num_workers=2, worker_init_fn=start)",
        STOPS + IGNORES + "DataLoader(data, num_workers=2, worker_init_fn=ignoring)",
        STOPS + LATER + "DataLoader(data, num_workers=2, worker_init_fn=ignoring)",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nDataLoader(data, num_workers=2)",
        "signal.signal(signal.SIGINT, lambda *_: save())\nDataLoader(data, num_workers=2)",
        "DataLoader(data, num_workers=2)",
    ],
)
def test_a_script_without_forked_workers_or_a_save_at_a_stop_is_sound(lines: str) -> None:
    assert not is_found(lines)


@pytest.mark.parametrize("launcher", ["ddprun", "python", ""])
def test_other_launchers_send_the_signal_only_to_the_rank(launcher: str) -> None:
    assert not is_found(STOPS + "DataLoader(data, num_workers=2)", launcher)
