"""One request for several jobs: one that fails does not keep the others from being done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from ddpjob_cli.client.errors import ClusterError
from ddpjob_cli.manifest.yamlfile import InputError

S = TypeVar("S")
T = TypeVar("T")
Wrong = InputError | ClusterError


def of_each(wanted: Iterable[S], act: Callable[[S], T]) -> tuple[list[T], list[Wrong]]:
    """What `act` gives of each of them, in order and once, and the errors of those that fail."""
    done: list[T] = []
    wrong: list[Wrong] = []
    for one in dict.fromkeys(wanted):
        try:
            done.append(act(one))
        except (InputError, ClusterError) as error:  # noqa: PERF203 - the next one may be there
            wrong.append(error)
    return done, wrong


def refuse(wrong: Sequence[Wrong]) -> None:
    """After the last one: raises ClusterError where a request was not carried out, InputError where all that is wrong
    are the names."""
    if wrong:
        kind = ClusterError if any(isinstance(error, ClusterError) for error in wrong) else InputError
        raise kind("\n".join(dict.fromkeys(map(str, wrong))))
