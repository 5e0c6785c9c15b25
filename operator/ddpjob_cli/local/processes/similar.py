"""Suggests a file for one that does not exist."""

from __future__ import annotations

import os

from ddpjob_operator.job.typos import suggestion


def file(path: str, folder: str = ".") -> str:
    """Return `; did you mean train.py?` or "", from files in its folder with the same suffix."""
    head, name = os.path.split(path)
    try:
        there = os.listdir(os.path.join(folder, head))
    except (OSError, ValueError):
        return ""
    ending = os.path.splitext(name)[1]
    close = suggestion(name, (other for other in there if other.endswith(ending)))
    return close.replace("did you mean ", f"did you mean {os.path.join(head, '')}") if head else close
