"""Send a request for several jobs. A failed request does not stop the other ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from ddpjob_cli.client.errors import ClusterError
from ddpjob_cli.manifest.yamlfile import InputError

S = TypeVar("S")
T = TypeVar("T")
Wrong = InputError | ClusterError


def of_each(wanted: Iterable[S], act: Callable[[S], T]) -> tuple[list[T], list[Wrong]]:
    """Call `act` once for each distinct item, in order. Return the results, and the errors of failed calls."""
    done: list[T] = []
    wrong: list[Wrong] = []
    for one in dict.fromkeys(wanted):
        try:
            done.append(act(one))
        except (InputError, ClusterError) as error:  # noqa: PERF203 - the next one may be there
            wrong.append(error)
    return done, wrong


def refuse(wrong: Sequence[Wrong]) -> None:
    """Raise all errors as one: as ClusterError if any of them is a ClusterError, else as InputError."""
    if wrong:
        kind = ClusterError if any(isinstance(error, ClusterError) for error in wrong) else InputError
        raise kind("\n".join(dict.fromkeys(map(str, wrong))))
