"""`ddpjob run --fail …`: inject faults. The run itself kills a node, or ranks at an interval. A fault at a step is
injected by the rank in `ddpjob.progress(step=…)`, where the step is known; it reads its faults from DDPJOB_FAULTS."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from ddpjob_cli.manifest.yamlfile import InputError
from ddpjob_operator.job import api

_OPTION_CHARACTERS_MAX = 200
VARIABLE = "DDPJOB_FAULTS"
HAPPENED = "DDPJOB_FAULTS_HAPPENED"  # folder with a file for each fault that happened; its name is the fault's index
FORMS = "every=10s, node=1,at=20s or rank=3,step=50, alone (SIGKILL) or with signal=SEGV, exit=3 or hang"


@dataclass(frozen=True)
class NodeFault:
    """All processes of a node are killed."""

    option: str
    node: int
    at_seconds: float
    wants = "the job had ended before"


@dataclass(frozen=True)
class Resize:
    """A change of the number of nodes that the machine offers: the highest ones save and leave, or come back."""

    option: str
    nodes: int
    at_seconds: float
    wants = "the job had ended before"


@dataclass(frozen=True)
class RepeatedFault:
    """Ranks are killed by SIGKILL repeatedly, one after the other."""

    option: str
    seconds: float
    """Minimum seconds between kills. The ranks make a step in between, if the script reports steps."""
    wants = "no rank of the job trained for so long"


@dataclass(frozen=True)
class RankFault:
    """A rank fails at a step."""

    option: str
    rank: int
    step: int
    attempt: int | None
    """None: the attempt that reaches the step first."""
    how: dict[str, str | int | bool]
    """One of signal: name, exit: code, hang: true, as in DDPJOB_FAULTS."""

    @property
    def wants(self) -> str:
        where = "" if self.attempt is None else f" in attempt {self.attempt}"
        return f"the rank did not call ddpjob.progress() with this step{where}"


Fault = NodeFault | RankFault | RepeatedFault | Resize


def parse(text: str) -> Fault:
    """Return the fault of one --fail value. Raise InputError with the mistake and the right form."""
    option = f"--fail {text[:_OPTION_CHARACTERS_MAX]}"
    given: dict[str, str] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name in given:
            raise InputError(f"{option}: {name} is given twice")
        given[name] = value
    unknown = [
        n for n in given if n not in ("every", "node", "at", "rank", "step", "attempt", "signal", "exit", "hang")
    ]
    if unknown:
        raise InputError(f"{option}: {unknown[0] or 'an empty part'} is unknown; must be {FORMS}")
    if "node" in given and given.keys() == {"node", "at"}:
        return NodeFault(option, _number(option, given, "node"), _seconds(option, given, "at"))
    if given.keys() == {"every"}:
        if seconds := _seconds(option, given, "every"):
            return RepeatedFault(option, seconds)
        raise InputError(f"{option}: every must be more than 0")
    how = [n for n in ("signal", "exit", "hang") if n in given] or ["signal"]
    if {"rank", "step"} <= given.keys() and len(how) == 1 and not given.keys() & {"node", "at"}:
        attempt = _number(option, given, "attempt") if "attempt" in given else None
        numbers = _number(option, given, "rank"), _number(option, given, "step")
        return RankFault(option, *numbers, attempt, {how[0]: _how(option, how[0], given.get(how[0], "KILL"))})
    raise InputError(f"{option}: must be {FORMS}")


def parse_resize(text: str) -> Resize:
    """Return the number of nodes and the time in a --resize value. Raise InputError."""
    option = f"--resize {text[:_OPTION_CHARACTERS_MAX]}"
    match = re.fullmatch(r"([0-9]{1,15}),at=(.*)", text)
    if match is None:
        raise InputError(f"{option}: must be a number of nodes and a time: 2,at=30s")
    return Resize(option, int(match[1]), _seconds(option, {"at": match[2]}, "at"))


def check(faults: Sequence[Fault], job: api.DDPJob) -> None:
    ranks, facts = job.spec.world_size, job.spec.facts
    for fault in faults:
        if isinstance(fault, Resize) and not facts.resizes_in_place:
            raise InputError(f"{fault.option}: needs a job with --nodes MIN:MAX under ddprun")
        if isinstance(fault, Resize) and not (facts.min_nodes or 1) <= fault.nodes <= job.spec.nodes:
            raise InputError(f"{fault.option}: the job trains with {facts.min_nodes} to {job.spec.nodes} nodes")
        if isinstance(fault, Resize) and job.spec.spares:
            raise InputError(f"{fault.option}: a job with spec.spares keeps its number of nodes")
        if isinstance(fault, NodeFault) and fault.node >= job.spec.pods:
            raise InputError(f"{fault.option}: the job's nodes are 0 to {job.spec.pods - 1}")
        if isinstance(fault, RankFault) and fault.rank >= ranks:
            raise InputError(f"{fault.option}: the job's ranks are 0 to {ranks - 1}")


def variable(faults: Sequence[Fault]) -> str:
    return json.dumps(
        [
            {"rank": f.rank, "step": f.step, **({} if f.attempt is None else {"attempt": f.attempt}), **f.how}
            for f in of_ranks(faults)
        ]
    )


def of_ranks(faults: Sequence[Fault]) -> list[RankFault]:
    return [fault for fault in faults if isinstance(fault, RankFault)]


def _number(option: str, given: dict[str, str], name: str) -> int:
    if not re.fullmatch(r"[0-9]{1,15}", given[name]):
        raise InputError(f'{option}: {name} must be a whole number, is "{given[name]}"')
    return int(given[name])


def _seconds(option: str, given: dict[str, str], name: str) -> float:
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(s|m)?", given[name])
    if match is None:
        raise InputError(f'{option}: {name} must be a time such as 20s or 2m, is "{given[name]}"')
    return float(match[1]) * (60 if match[2] == "m" else 1)


def _how(option: str, name: str, text: str) -> str | int | bool:
    if name == "hang":
        if text:
            raise InputError(f"{option}: hang has no value")
        return True
    if name == "exit":
        if not text.isdecimal() or not 0 < int(text) < 256:
            raise InputError(f'{option}: exit must be a code from 1 to 255, is "{text}"')
        return int(text)
    short = text.upper().removeprefix("SIG")
    if f"SIG{short}" not in signal.Signals.__members__:
        raise InputError(f'{option}: signal must be one such as KILL, SEGV or TERM, is "{text}"')
    return short
