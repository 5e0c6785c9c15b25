"""Variables that a script sets before its `import torch` work as under python; a message names those that do not."""

import json
import os
from typing import Any

import pytest
from agents import Launcher, finish

from ddprun import late_environment

# Settings of two ranks; only two, because each rank without preload takes seconds to import torch.
SETTINGS = [
    {
        "OMP_NUM_THREADS": "2,1",
        "MKL_NUM_THREADS": "1",
        "TORCH_LOGS": "+dynamo,-inductor",
        "TORCH_LOGS_FORMAT": "%(message)s",
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
        "TMPDIR": "/var/tmp",
        "CUDA_VISIBLE_DEVICES": "",
        "NCCL_DEBUG": "INFO",
        "MY_OWN": "1",
    },
    {"OMP_NUM_THREADS": "1"},
]
SCRIPT = """
import json, os, sys
rank = int(os.environ["RANK"])
assert "torch" not in sys.modules and "torch.nn" not in sys.modules
os.environ.update({settings}[rank])
from torch.utils.data import DataLoader
import ddpjob
ddpjob.Snapshot
import torch, logging, tempfile, torch.distributed as dist
assert torch is sys.modules["torch"] and torch.__spec__.origin.endswith("__init__.py")
seen = {{"threads": torch.get_num_threads(), "log": logging.getLogger("torch._dynamo").getEffectiveLevel(),
        "debug": str(dist.get_debug_level()), "folder": tempfile.gettempdir(),
        "hidden": [type(f).__name__ for f in sys.meta_path if "idden" in type(f).__name__]}}
with open(f"seen-{{rank}}", "w") as file: json.dump(seen, file)
"""


def seen(launcher: Launcher, *start: str) -> tuple[list[Any], str]:
    """Return torch's values of each rank's settings, and stderr."""
    script = launcher.script(SCRIPT.format(settings=SETTINGS))
    done = finish(launcher.ddprun(*start, "--nproc", 2, "--max-restarts", 0, script), 150)
    assert done.returncode == 0, done.stderr
    return [json.loads((launcher.folder / f"seen-{rank}").read_text()) for rank in range(2)], done.stderr


def test_late_settings_for_threads_logs_and_debugging_are_applied(launcher: Launcher) -> None:
    """Late settings must be applied: the number of threads changes results, and logs would be missing."""
    forked, err = seen(launcher)
    fresh, _ = seen(launcher, "--no-preload")
    assert forked == fresh
    assert "ddprun:" not in err, "what holds needs no words"


def test_late_settings_without_effect_are_reported_in_one_line(launcher: Launcher) -> None:
    """A line must name each setting without effect, so that users do not spend a day measuring it."""
    script = launcher.script(
        """
        import os
        os.environ |= {"TORCHINDUCTOR_MAX_AUTOTUNE": "1", "OMP_PROC_BIND": "true", "PYTORCH_CUDA_ALLOC_CONF": "x:1"}
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "MY_OWN": "1"}
        import torch
        os.environ["TORCHDYNAMO_VERBOSE"] = "1"  # too late under python as well
        import torch.distributed
        """
    )
    done = finish(launcher.ddprun("--nproc", 2, script), 100)
    assert done.returncode == 0
    assert done.stderr == (
        "ddprun: the fork server had imported torch before the script set OMP_PROC_BIND, PYTORCH_CUDA_ALLOC_CONF, "
        "TORCHINDUCTOR_MAX_AUTOTUNE: that has no effect. Set it in the job's env, or start with --no-preload.\n"
    )


def test_a_library_that_only_checks_for_torch_does_not_make_it_load_twice(launcher: Launcher) -> None:
    """A library that only checks for torch must not make torch load twice, as transformers, datasets and lightning
    do."""
    script = launcher.script(
        """
        import importlib.util, os, sys
        from threading import Thread
        for _ in range(2):
            spec = importlib.util.find_spec("torch")
            assert "torch" not in sys.modules and spec.origin.endswith("/torch/__init__.py")
            assert spec.submodule_search_locations == [os.path.dirname(spec.origin)]
        threads = [Thread(target=__import__, args=["torch.nn"]) for _ in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        import torch
        assert torch.__spec__ is sys.modules["torch"].__spec__ is importlib.util.find_spec("torch") is not spec
        assert torch.ones(2).sum() == 2
        """
    )
    done = finish(launcher.warm("--max-restarts", 0, script), 100)
    assert (done.returncode, done.stderr) == (0, "")


def test_at_most_five_names_are_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "0")
    late_environment.apply_late({f"KMP_{i}" for i in range(9)} | {"OTHER", "HOME"}, {"HOME"})
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "KMP_0, KMP_1, KMP_2, KMP_3, KMP_4 and 4 more:" in err
    assert "OTHER" not in err


def test_only_rank_0_prints_the_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Only rank 0 may print the message: a thousand ranks would log a thousand lines."""
    monkeypatch.setenv("RANK", "3")
    late_environment.apply_late({"KMP_BLOCKTIME"}, set())
    assert capsys.readouterr().err == ""


def test_a_removed_variable_counts_as_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(os.environ) | {"KMP_GONE": "1", "KMP_OTHER": "1"}
    monkeypatch.setenv("KMP_OTHER", "2")
    monkeypatch.setenv("KMP_NEW", "1")
    assert late_environment.changes(before) == {"KMP_GONE", "KMP_OTHER", "KMP_NEW"}
