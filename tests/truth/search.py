"""Draws training scripts and kills, and searches for one that a restart makes wrong: `make truth N=500`.

    python tests/truth/search.py --draws 500 --seed 7000 --out found
    python tests/truth/search.py --one 7141             # one seed, with its script and log

Each script runs undisturbed once, and `--runs` times with kills in up to six generations. All agents are forked from
this process, which has imported torch. A failure is reduced as long as it still fails, and written to `--out` as a
script.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]

from grammar import CHOICES, Draw, drawn, normal, parts_of, script  # noqa: E402
from runs import Verdict, undisturbed, verdicts  # noqa: E402

WORKERS = 4  # a run mostly waits for its processes, so two per core


class Found(NamedTuple):
    """A draw with a wrong result, reduced to the smallest recipe that is still wrong."""

    seed: int
    draw: Draw
    verdict: Verdict

    @property
    def title(self) -> str:
        parts = " ".join(f"{name}={option}" for name, option in sorted(parts_of(self.draw.recipe).items()))
        return parts or "plain"

    def text(self) -> str:
        kills = "; ".join(f"{k.how} of rank {k.rank} at {k.place} {k.step}" for k in self.draw.kills)
        settled = ", when all that was saved is in the folder" if self.draw.settled else ""
        return f"{self.title}\n  seed {self.seed}: {kills}{settled}\n  {self.verdict.kind}: {self.verdict.why}"


def shrunk(draw: Draw, is_wrong: Callable[[Draw], bool]) -> Draw:
    """Remove parts of a wrong draw while the result stays wrong. Return the smallest draw."""
    best, changed = draw, True
    while changed:
        changed = False
        for candidate in _smaller(best):
            if is_wrong(candidate):
                best, changed = candidate, True
                break
    return best


def _smaller(draw: Draw) -> Iterator[Draw]:
    """Yield draws with one kill or one part less, the largest change first."""
    for number in range(len(draw.kills) - 1, -1, -1):
        if len(draw.kills) > 1 and all(kill.how != "TERM" for kill in draw.kills):
            kills = [kill for place, kill in enumerate(draw.kills) if place != number]
            yield draw._replace(kills=tuple(kill._replace(generation=at) for at, kill in enumerate(kills)))
    size = len(parts_of(draw.recipe))
    seen = []
    for name in parts_of(draw.recipe):
        smaller = normal({**draw.recipe, name: CHOICES[name][0]})
        if len(parts_of(smaller)) < size and smaller not in seen:
            seen.append(smaller)
            yield draw._replace(recipe=smaller)


def searched(seeds: Iterable[int], runs: int) -> Iterator[tuple[int, Draw, Verdict]]:
    """Yield the verdicts on the draws of these seeds; `runs` is the number of runs for each draw."""
    for seed in seeds:
        whole = undisturbed(drawn(seed))
        for number in range(runs if whole.has_ended_well else 1):
            yield from ((seed, draw, verdict) for draw, verdict in verdicts(drawn(seed, number), whole))


def is_wrong(draw: Draw) -> bool:
    return any(verdict.is_wrong for _, verdict in verdicts(draw))


def known_as(draw: Draw, known: list[Draw]) -> Draw | None:
    """Return the known failure whose parts all are in this draw; None if there is none."""
    for other in known:
        if parts_of(other.recipe).items() <= parts_of(draw.recipe).items():
            return other
    return None


def smallest(seed: int, draw: Draw, verdict: Verdict) -> Found | None:
    """Return the failure with the smallest recipe; None if it does not occur again."""
    if not is_wrong(draw):
        return None
    small = shrunk(draw, is_wrong)
    again = [found for _, found in verdicts(small) if found.is_wrong]
    return Found(seed, small, again[0] if again else verdict)


def _work(place: int, options: argparse.Namespace, out: multiprocessing.SimpleQueue[object]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setpgid(0, 0)  # so that killing the group also kills the worker's agents
    for found in searched(itertools.count(options.seed + place, options.workers), options.runs):
        out.put(found)


def main() -> int:
    """Run the search; return 1 if a result was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=500)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 1_000_000 * 1000)
    parser.add_argument("--runs", type=int, default=2, help="of each script, each with kills")
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--out", type=Path, default=Path("truth-found"))
    parser.add_argument("--one", type=int, help="one seed, with its log")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no draw after so long")
    parser.add_argument("--as-found", action="store_true", help="leave wrong draws as they are, which saves their time")
    options = parser.parse_args()
    if sys.flags.hash_randomization:  # ranks that are forked must order sets as those that ddprun starts anew
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"})
    import torch._dynamo
    import torch.distributed.optim

    import ddpjob
    import ddprun.leader
    import ddprun.run  # noqa: F401 - what an agent and its ranks import is in each copy of this process

    for name in ("Snapshot", "GlobalBatchSampler", "accumulate", "should_stop"):
        getattr(ddpjob, name)
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the first call reads source lines for tracebacks: 15 ms
    if options.one is not None:
        return _one(options.one, options.runs)
    return _search(options)


def _one(seed: int, runs: int) -> int:
    for _, draw, verdict in searched([seed], runs):
        print(script(draw.recipe), verdict.log, draw.kills, f"{verdict.kind}: {verdict.why}", sep="\n")
    return 0


class _Tally:
    """Counts of kills and seeds, by kind of verdict."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.seeds: dict[str, list[int]] = {}
        self.kills = Counter[str]()
        self.known = Counter[str]()
        self._refused = Counter[str]()

    def add(self, seed: int, verdict: Verdict) -> None:
        self.seeds.setdefault(verdict.kind, []).append(seed)
        self.kills[verdict.kind] += verdict.kills * verdict.counts
        if verdict.kind in ("REFUSED", "SEEDED"):
            self._refused[re.sub(r"\d+", "N", verdict.why)[:150]] += verdict.kills
        elif not verdict.counts:
            print(f"seed {seed} is {verdict.kind}: {verdict.why}", flush=True)

    @property
    def drawn(self) -> int:
        return self.kills.total()

    def text(self) -> str:
        seconds = time.monotonic() - self._began
        cpu = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])  # CPU seconds of all workers that have ended
        scripts = len({seed for seeds in self.seeds.values() for seed in seeds})
        counts = ", ".join(f"{kills} {kind}" for kind, kills in sorted(self.kills.items()) if kills)
        drawn = max(self.drawn, 1)
        hour = f"{drawn / seconds * 3600:.0f} an hour" + (f", {cpu / drawn:.2f} s of CPU each" if cpu else "")
        return f"{counts}: {self.drawn} kills of {scripts} scripts in {seconds:.0f} s, {hour}"

    def report(self) -> str:
        """Return the counts as text, with the seeds and reasons of all verdicts but SAME."""
        lines = [self.text()]
        lines += [f"  {kind}: seeds {seeds}" for kind, seeds in sorted(self.seeds.items()) if kind != "SAME"]
        lines += [f"  {count} × refused: {why}" for why, count in self._refused.most_common()]
        lines += [f"  {count} × of a known kind: {kind}" for kind, count in self.known.most_common()]
        return "\n".join(lines)


def _search(options: argparse.Namespace) -> int:
    tally, found = _Tally(), list[Found]()
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="ddpjob-search-")
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.SimpleQueue[object] = context.SimpleQueue()
    workers = [context.Process(target=_work, args=(place, options, queue)) for place in range(options.workers)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    until, printed = time.monotonic() + options.seconds, 0
    try:
        for worker in workers:
            worker.start()
        while tally.drawn < options.draws and time.monotonic() < until:
            if queue.empty():
                time.sleep(0.1)
                continue
            seed, draw, verdict = queue.get()  # type: ignore[misc]
            tally.add(seed, verdict)
            if verdict.is_wrong:
                _record(options, seed, draw, verdict, tally, found)
            if tally.drawn // 50 > printed:
                printed = tally.drawn // 50
                print(tally.text(), flush=True)
    finally:
        _end(workers)
        print(tally.report())
    print(f"{len(found)} kinds of wrong results" + (f", in {options.out}" if found else ""))
    return int(bool(found) or "INVALID" in tally.seeds)


def _end(workers: Sequence[Any]) -> None:
    """Kill the workers and the agents of their runs, and remove their files."""
    for worker in (worker for worker in workers if worker.is_alive()):
        with contextlib.suppress(ProcessLookupError):  # the worker has not started yet
            os.killpg(worker.pid, signal.SIGKILL)
        worker.kill()
        worker.join()
    shutil.rmtree(tempfile.gettempdir(), ignore_errors=True)


def _record(
    options: argparse.Namespace, seed: int, draw: Draw, verdict: Verdict, tally: _Tally, found: list[Found]
) -> None:
    """Reduce and record a draw with a wrong result, unless its kind is known already."""
    if (known := known_as(draw, [one.draw for one in found])) is not None:
        tally.known[" ".join(parts_of(known.recipe))] += 1
        return
    small = Found(seed, draw, verdict) if options.as_found else smallest(seed, draw, verdict)
    if small is None:
        print(f"seed {seed} is not wrong again: {verdict.why}\n{verdict.log}", flush=True)
        return
    found.append(small)
    _written(options.out, small)


def _written(folder: Path, found: Found) -> None:
    """Write the script to a file, with its kills and its log as comments."""
    folder.mkdir(parents=True, exist_ok=True)
    name = "-".join(parts_of(found.draw.recipe).values())[:80] or "plain"
    lines = [f"# {line}" for line in found.text().splitlines()]
    log = [
        f"# {line}" for line in found.verdict.log.splitlines() if "ddp" in line or "Error" in line or "STRUCK" in line
    ]
    (folder / f"{name}.py").write_text("\n".join([*lines, *log, script(found.draw.recipe)]))
    print(found.text(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
