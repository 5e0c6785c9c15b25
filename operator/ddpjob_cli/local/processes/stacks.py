"""Stacks of the ranks of a run on this machine: a signal makes the run's agents print stacks into its logs, and py-spy
reads the stacks of ranks of another launcher."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ddpjob_cli.local.processes import ranks
from ddpjob_cli.local.run_files import run_folder, runs
from ddpjob_cli.manifest.yamlfile import InputError
from ddpjob_core.heartbeat import STACKS_SIGNAL
from ddpjob_operator.job import bounds
from ddpjob_operator.job.wording import count
from ddprun import processes, py_spy
from ddprun.core import folded_stacks
from ddprun.core.folded_stacks import RankStack

ANSWER_SECONDS = 40.0  # seconds; py-spy takes up to 5 s for each rank that does not answer
PY_SPY_TOGETHER, PY_SPY_RANKS_MAX = 8, 64
POLL_SECONDS = 0.1
_PIDS_MAX = 8


@dataclass(frozen=True)
class Asked:
    """The processes of a run that got the signal to show their stacks."""

    agents: list[int]
    handlers: list[int]
    """Ranks of another launcher that handle SIGQUIT."""
    silent: dict[int, int]
    """Ranks of the run that got no signal, by process: SIGQUIT would end them."""

    def seen_by_py_spy(self) -> str:
        """Return the stacks of ranks that handle no signal; "" without such ranks, or if py-spy is not installed."""
        program, pids = py_spy.program(), list(self.silent)[:PY_SPY_RANKS_MAX]
        if not pids or program is None:
            return ""
        with ThreadPoolExecutor(PY_SPY_TOGETHER) as threads:
            found = list(threads.map(lambda pid: py_spy.stack(program, pid), pids))
        return folded_stacks.text(
            [RankStack(self.silent[pid], pid, stack=stack) for pid, stack in zip(pids, found, strict=True)]
        )

    def text(self) -> str:
        """Return py-spy's stacks, or why the stacks of some ranks cannot be shown; "" if agents print all stacks."""
        return self.seen_by_py_spy() or self._sentence()

    def _sentence(self) -> str:
        if self.handlers and not self.silent:
            return f"SIGQUIT was sent to {count(len(self.handlers), 'rank')}, which the script handles"
        if self.silent:
            pids = ", ".join(map(str, [*self.silent][:_PIDS_MAX])) + (", …" if len(self.silent) > _PIDS_MAX else "")
            which = f"process{'es' * (len(self.silent) > 1)} {pids}"
            return f"no stacks of {which}: not started by ddprun; py-spy shows them (pip install py-spy)"
        return "" if self.agents else "no stacks: no rank runs now"


def ask(uid: str) -> Asked:
    """Signal a run's agents, and the ranks that handle the signal, because the signal ends any other process."""
    environs = {pid: ranks.environ(pid) for pid in processes.parents()}
    own = {pid for pid, environ in environs.items() if environ.get("DDPJOB_UID") == uid}
    agents = _topmost({pid for pid in own if processes.catches(pid, STACKS_SIGNAL)})
    below = set().union(*(processes.descendants(agent) for agent in agents), agents)
    others = {pid for pid in own - below if "LOCAL_RANK" in environs[pid] and processes.is_python(pid)}
    # Leave out torchrun, because SIGQUIT makes it end the job: on a node with one rank torchrun has LOCAL_RANK too.
    of_torchrun = {pid for pid in others if "TORCHELASTIC_RUN_ID" in environs[pid]}
    found = _topmost(of_torchrun or others)
    handlers = [pid for pid in found if pid in of_torchrun and processes.catches(pid, signal.SIGQUIT)]
    processes.send(agents, STACKS_SIGNAL)
    processes.send(handlers, signal.SIGQUIT)
    texts = {pid: environs[pid].get("RANK") for pid in found if pid not in handlers}
    return Asked(agents, handlers, {pid: max(0, bounds.number(rank, bounds.COUNT_MAX)) for pid, rank in texts.items()})


def of_run(run: runs.Run) -> list[str]:
    """Return the stacks of a run's ranks, as its agents print them. Raise InputError if there are none."""
    name = f"{run.facts.job}, run {run.facts.run[:8]}"
    if not run.running:
        raise InputError(
            f"{name}: is not running ({run.state}), so it has no stacks; ddpjob logs shows what it printed"
        )
    begun = {path: path.stat().st_size for path in _logs(run)}
    asked = ask(run.facts.run)
    if not asked.agents:
        if stacks := asked.seen_by_py_spy():
            return [stacks]
        raise InputError(f"{name}: {asked.text()}")
    end = time.monotonic() + ANSWER_SECONDS
    while True:
        logs = (b"".join(runs.chunks(path, begun.get(path, 0))).decode(errors="replace") for path in _logs(run))
        found = [text for log in logs for text in folded_stacks.printed(log)]
        if len(found) >= len(asked.agents):
            return found
        if time.monotonic() > end or not run_folder.is_running(run.folder):
            late = count(len(asked.agents) - len(found), "ddprun")
            raise InputError("\n".join([*found, f"{name}: {late} did not answer; is it stopped (Ctrl-Z)?"]))
        time.sleep(POLL_SECONDS)


def _logs(run: runs.Run) -> list[Path]:
    logs = run.logs()
    return [path for paths in logs.get(max(logs, default=0), {}).values() for path in paths]


def _topmost(pids: set[int]) -> list[int]:
    parent_of = processes.parents()
    below: set[int] = set().union(*(processes.descendants(pid, parent_of) for pid in pids))
    return sorted(pids - below)
