"""What a name that is not there may have meant."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable


def suggestion(name: str, known: Iterable[str]) -> str:
    """`; did you mean torchrun?` or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def file(path: str, folder: str = ".") -> str:
    """The same for a file, by those in its folder that end as it does."""
    head, name = os.path.split(path)
    try:
        there = os.listdir(os.path.join(folder, head))
    except (OSError, ValueError):
        return ""
    ending = os.path.splitext(name)[1]
    close = suggestion(name, (other for other in there if other.endswith(ending)))
    return close.replace("did you mean ", f"did you mean {os.path.join(head, '')}") if head else close
