"""The name of a job that is made from a script or a command."""

from __future__ import annotations

import re
import unicodedata
from pathlib import PurePath

NAME_MAX = 40


def name_of(script: str) -> str:
    """Return a Kubernetes name: train for src/train.py, the module src.train and ./train.sh."""
    stem = re.sub(r"\.(?:py|sh)$", "", script)
    stem = PurePath(stem).name if stem != script or "/" in script else script.rpartition(".")[2]
    ascii_only = unicodedata.normalize("NFKD", stem).encode("ascii", "ignore").decode()
    name = re.sub(r"[^a-z0-9]+", "-", ascii_only.lower()).strip("-")[:NAME_MAX].strip("-")
    return name if name[:1].isalpha() else f"job-{name}".strip("-")
