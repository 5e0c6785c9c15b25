"""The GPUs of this machine. Tests see none unless they ask for them.

Where a process sees one, `init` chooses nccl, which takes one rank for each GPU; tests have as many ranks as they need.
"""

from __future__ import annotations

import os

import pytest

_SEEN = "TESTS_CUDA_VISIBLE_DEVICES"  # what the caller has set, for the processes among which tests are shared out
_ALL = "all"


def hide() -> None:
    """From this process and all that it starts."""
    os.environ.setdefault(_SEEN, os.environ.get("CUDA_VISIBLE_DEVICES", _ALL))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _seen() -> str:
    return os.environ.get(_SEEN, _ALL)


def count() -> int:
    """How many there are for tests, as NVML says: this process can still fork."""
    import torch

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if _seen() != _ALL:
            patch.setenv("CUDA_VISIBLE_DEVICES", _seen())
        return torch.cuda.device_count() if torch.cuda.is_available() else 0


def shown() -> dict[str, str]:
    """The environment of a process that sees them."""
    seen = _seen()
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(count()))) if seen == _ALL else seen}
