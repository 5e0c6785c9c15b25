"""Finds the known name that a typo resembles. Comparisons are limited, because each takes up to a millisecond."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

COMPARISONS_MAX = 1_000
LENGTH_MAX = 64  # characters of a name; comparing takes time quadratic in the length
_LONGER = 3  # characters; a name longer by this is no typo: "restartPolicyRules" is not a mistyped "restartPolicy"
# The corresponding fields in other kinds of jobs: PyTorchJob, batch/v1 Job, torchrun.
_OTHER_NAMES = {"replicas": "nodes", "numnodes": "nodes", "parallelism": "nodes", "completions": "nodes"}
_OTHER_NAMES |= {"nnodes": "nodes", "numprocpernode": "nprocPerNode", "slots": "nprocPerNode", "gpus": "nprocPerNode"}


class Typos:
    """Finds the known name that a typo resembles, with a limited number of comparisons for one document."""

    def __init__(self, comparisons: int = COMPARISONS_MAX) -> None:
        self.left = comparisons

    def meant(self, name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
        """Return the most similar known name; "" if no name is similar or no comparison is left."""
        if len(name) > LENGTH_MAX or not self.left:
            return ""
        compared = []
        for other in known:
            if not self.left:
                break
            self.left -= 1
            if len(other) <= LENGTH_MAX:
                compared.append(other)
        same = [other for other in compared if other.lower() == name.lower()]
        close = same or difflib.get_close_matches(name, compared, n=1, cutoff=cutoff)
        extends = any(name.startswith(other) and len(name) >= len(other) + _LONGER for other in close)
        return close[0] if close and not extends else ""


def suggestion(name: str, known: Iterable[str], typos: Typos | None = None) -> str:
    """Return for example `; did you mean nodes?`; "" if no known name is similar."""
    known = list(known)
    if name.lower() in _OTHER_NAMES and _OTHER_NAMES[name.lower()] in known:
        return f"; did you mean {_OTHER_NAMES[name.lower()]}?"
    begins = [other for other in known if 2 < len(name) < len(other) and other.lower().startswith(name.lower())]
    meant = begins[0] if len(begins) == 1 else (typos or Typos()).meant(name, known)
    return f"; did you mean {meant}?" if meant else ""
