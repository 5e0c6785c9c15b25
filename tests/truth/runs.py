"""Runs a drawn script under ddprun, undisturbed and with its kills, and judges if the results are the same."""

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import refusals
import warm
from free_port import free_port
from grammar import Draw, Kill, names_of, script
from refusals import LOSS, SAMPLES, Part

from ddprun.core.charges import REPEATS

SECONDS_MAX = 60  # for each start and end, enough for a busy machine
STARTED_AGAIN = (75, 143)  # exit codes after a stop; 143: the rank had left the group, or got no CPU for 5 s
FOREIGN = ("PET_", "DDPJOB_", "TORCHELASTIC_", "MASTER_", "RANK", "LOCAL_", "WORLD_SIZE", "OMP_NUM_THREADS")


class Outcome(NamedTuple):
    """The result of a run: exit codes, final objects, samples and losses of each step, and the log."""

    codes: tuple[int, ...]
    results: Mapping[int, Any]
    """A digest of each object, by rank."""
    seen: Mapping[int, Mapping[tuple[str, int], list[Any]]]
    """What each generation recorded for a step, by rank, kind (samples or loss) and step."""
    log: str

    @property
    def has_ended_well(self) -> bool:
        return bool(self.codes) and self.codes[-1] == 0 and len(self.results) == 2


class Verdict(NamedTuple):
    """The result of a comparison. SAME and REFUSED are correct. SEEDED is too: ranks that were late for a save got new
    random numbers, and the log says so. UNSTRUCK (no kill hit) and INVALID (fails without a kill) prove nothing."""

    kind: str
    why: str
    log: str = ""
    kills: int = 1
    """The number of kills that struck."""

    @property
    def is_wrong(self) -> bool:
        return self.kind in ("DIFFERENT", "FAILED")

    @property
    def counts(self) -> bool:
        """True if the verdict proves something: a kill has hit, and the script works without a kill."""
        return self.kind not in ("UNSTRUCK", "INVALID")


def undisturbed(draw: Draw) -> Outcome:
    """Run the script without a kill."""
    return ran(draw._replace(kills=()))


def ran(draw: Draw) -> Outcome:
    """Run the script under ddprun, and start it again after each stop by SIGTERM."""
    folder = Path(tempfile.mkdtemp(prefix="ddpjob-truth-"))
    try:
        (folder / "train.py").write_text(script(draw.recipe))
        (folder / "tmp").mkdir()
        codes: list[int] = []
        logs: list[str] = []
        while not codes or (codes[-1] in STARTED_AGAIN and len(codes) <= len(draw.kills)):
            code, log = _agents(folder, draw, len(codes))
            codes.append(code)
            logs.append(log)
        return Outcome(tuple(codes), _results(folder), _seen(folder), "".join(logs))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _agents(folder: Path, draw: Draw, life: int) -> tuple[int, str]:
    """Run the agents of all nodes. Return the highest exit code, and the log: one file, which shows the order."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    kills = [_as_json(kill, draw.kills) for kill in draw.kills]
    settle = draw.kills[0].step if draw.kills and draw.settled and life == 0 else -1
    env |= {
        "OMP_NUM_THREADS": "1",
        "KILLS": json.dumps(kills),
        "SETTLE": str(settle),
        "LIFE": str(life),
        "SNAPSHOTS": str(folder / "snapshots"),
        "TMPDIR": str(folder / "tmp"),
        "DDPJOB_ATTEMPT": str(life + 1),
        "DDPJOB_UID": "truth",
    }
    words = ["--max-restarts", str(len(draw.kills) + 1), "train.py"]
    nodes = [["--nproc-per-node", "2"]]
    if draw.recipe["nodes"] == "two":
        group = ["--nnodes", "2", "--nproc-per-node", "1", "--master-port", str(free_port()), "--rdzv-id", folder.name]
        nodes = [[*group, "--node-rank", str(node)] for node in range(2)]
    end = time.monotonic() + SECONDS_MAX * (len(draw.kills) + 2)
    with (folder / f"log-{life}").open("w+b") as log:
        options: dict[str, Any] = {"cwd": folder, "env": env, "ends_early": True, "log": log}
        agents = [warm.start("ddprun", [*node, *words], **options) for node in nodes]
        try:
            codes = [agent.wait(max(0.1, end - time.monotonic())) for agent in agents]
        except subprocess.TimeoutExpired as error:
            log.write(f"\nit did not end within {error.timeout:.0f} s\n".encode())
            codes = [-signal.SIGKILL]
        finally:
            for agent in agents:
                agent.kill()
                agent.wait()
        return max(codes), (folder / f"log-{life}").read_text(errors="replace")


def _as_json(kill: Kill, kills: tuple[Kill, ...]) -> list[Any]:
    """Return the kill as JSON, with `agent.generation` as its generation: a SIGTERM ends the agent, so later kills are
    in generations of the next agent."""
    stops = sum(1 for other in kills if other.how == "TERM" and other.generation < kill.generation)
    generation = kill.generation - stops
    return [kill.place, kill.step, kill.rank, kill.how, f"{stops}.{generation}"]


def _results(folder: Path) -> dict[int, Any]:
    return {rank: json.loads(path.read_text()) for rank in (0, 1) if (path := folder / f"result-{rank}").is_file()}


def _seen(folder: Path) -> dict[int, dict[tuple[str, int], list[Any]]]:
    found: dict[int, dict[tuple[str, int], list[Any]]] = {}
    for rank in (0, 1):
        records = found[rank] = {}
        path = folder / f"seen-{rank}"
        for line in path.read_text().splitlines() if path.is_file() else []:
            kind, step, value = json.loads(line)
            records.setdefault((kind, step), []).append(value)
    return found


# ---- the judge -----------------------------------------------------------------------------------------------


def verdicts(draw: Draw, whole: Outcome | None = None) -> Iterator[tuple[Draw, Verdict]]:
    """Yield the verdict on all kills together. If it is wrong, yield the verdict on each kill alone."""
    whole = undisturbed(draw) if whole is None else whole
    if not whole.has_ended_well:
        yield draw, _without_a_kill(draw, whole)
        return
    killed = ran(draw)
    verdict = compared(draw, whole, killed)
    if len(draw.kills) == 1 or verdict.kind in ("SAME", "REFUSED", "UNSTRUCK"):
        yield draw, verdict
        return
    alone = [draw._replace(kills=(kill._replace(generation=0),)) for kill in draw.kills]
    found = [(one, compared(one, whole, ran(one))) for one in alone]
    yield from found
    # If each kill alone is correct, a refusal between two kills may explain the result of both.
    if not any(its.is_wrong for _, its in found) and (last := compared(draw, whole, killed, late=True)).is_wrong:
        yield draw, last


def _without_a_kill(draw: Draw, whole: Outcome) -> Verdict:
    error = refusals.ERROR.search(whole.log)
    if error and refusals.is_named_in(error["sentence"], names_of(draw.recipe)):
        return Verdict("REFUSED", error[0], whole.log)
    return Verdict("INVALID", _last_error(whole.log), whole.log)


def compared(draw: Draw, whole: Outcome, killed: Outcome, *, late: bool = False) -> Verdict:
    """Judge if the killed run ends like the undisturbed one, apart from what the library refused before the first kill.
    late: before the last kill."""
    log, kills = killed.log, killed.log.count("STRUCK ")
    if REPEATS in log:  # the agent takes the error of a `raise` kill before the first step for a mistake
        return Verdict("UNSTRUCK", REPEATS, log)
    if not killed.has_ended_well:
        return Verdict("FAILED", f"it ended with {killed.codes}: {_last_error(log)}", log)
    if not kills:
        return Verdict("UNSTRUCK", "no kill has struck", log)
    differ = difference(whole, killed)
    if not differ:
        return Verdict("SAME", "", log, kills)
    for kind, at_restart in (("REFUSED", False), ("SEEDED", True)):
        excused, sentences = refusals.excused(log, draw.recipe, at_restart=at_restart, late=late)
        if not differ - excused:
            return Verdict(kind, " | ".join(sentences), log, kills)
    return Verdict("DIFFERENT", _in_words(differ - excused, whole, killed), log)


def difference(whole: Outcome, killed: Outcome) -> set[Part]:
    """Return the parts that differ from the undisturbed run. Each time that a step was made, even if a restart undid
    it, samples and loss must be the same."""
    found = {
        Part(rank, name)
        for rank, result in whole.results.items()
        for name in result.keys() | killed.results[rank].keys()
        if killed.results[rank].get(name) != result.get(name)
    }
    return found | {Part(rank, kind) for rank in whole.seen for kind, _ in _others(rank, whole, killed)}


def _others(rank: int, whole: Outcome, killed: Outcome) -> list[tuple[str, int]]:
    """Return (kind, step) of records that differ on a rank. A rank that dies within a step records no loss."""
    its, others = whole.seen[rank], killed.seen[rank]
    missing = [key for key in its.keys() - others.keys() if key[0] == SAMPLES]
    return missing + [key for key, values in others.items() if any([value] != its.get(key) for value in values)]


def _in_words(parts: set[Part], whole: Outcome, killed: Outcome) -> str:
    found = []
    for rank in sorted({part.rank for part in parts}):
        found.append(f"rank {rank}: {', '.join(sorted(part.name for part in parts if part.rank == rank))}")
        for kind in (SAMPLES, LOSS):
            steps = sorted(step for its, step in _others(rank, whole, killed) if its == kind)
            if Part(rank, kind) in parts:
                found[-1] += f"; {kind} of {len(steps)} steps from {steps[0]} on"
    return "; ".join(found)


def _last_error(log: str) -> str:
    errors = [line for line in log.splitlines() if re.search(r"\b\w*Error\b|Signal|SIG[A-Z]+|did not end", line)]
    return errors[-1][:300] if errors else "no error was said"
