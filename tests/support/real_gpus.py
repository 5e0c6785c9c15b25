"""The GPUs of this machine, which tests see only on request. With a visible GPU `init` would choose nccl, which needs a
GPU per rank, but tests have more ranks than the machine has GPUs."""

import os

import pytest

_SEEN = "TESTS_CUDA_VISIBLE_DEVICES"  # the value from before pytest, for pytest's worker processes
_ALL = "all"


def hide() -> None:
    """Hide the GPUs from this process and its children."""
    os.environ.setdefault(_SEEN, os.environ.get("CUDA_VISIBLE_DEVICES", _ALL))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _seen() -> str:
    return os.environ.get(_SEEN, _ALL)


def count() -> int:
    """Return how many GPUs tests may use. NVML counts them, so that this process can still fork."""
    import torch

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if _seen() != _ALL:
            patch.setenv("CUDA_VISIBLE_DEVICES", _seen())
        return torch.cuda.device_count() if torch.cuda.is_available() else 0


def shown() -> dict[str, str]:
    """Return the environment of a process that sees the GPUs."""
    seen = _seen()
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(count()))) if seen == _ALL else seen}
