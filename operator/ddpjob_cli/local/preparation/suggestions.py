"""Suggest a file or a program if the named one does not exist."""

from __future__ import annotations

import os
from pathlib import Path

from ddpjob_operator.job.typos import suggestion

_PROGRAMS = ("python", "python3", "torchrun", "ddprun", "accelerate", "deepspeed", "bash", "sh")


def program(name: str) -> str:
    """Return for example `; did you mean torchrun?`; "" if the name is right or resembles no program."""
    return "" if name in _PROGRAMS else suggestion(name, _PROGRAMS)


def file(path: str, folder: str = ".") -> str:
    """Return for example `; did you mean train.py?`, or `; it is in /project: run from there`; else ""."""
    head, name = os.path.split(path)
    for above in Path(os.path.abspath(folder)).parents:
        if not os.path.isabs(path) and os.path.isfile(above / path):
            return f"; it is in {above}: run from there"
    try:
        there = os.listdir(os.path.join(folder, head))
    except (OSError, ValueError):
        return ""
    ending = os.path.splitext(name)[1]
    close = suggestion(name, (other for other in there if other.endswith(ending)))
    return close.replace("did you mean ", f"did you mean {os.path.join(head, '')}") if head else close
