"""Report failures of a local run: one line with who, what, where and what is next, and the failed rank's traceback."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable

from ddpjob_cli.local.processes.cluster import LocalPod
from ddpjob_cli.local.shown.output_filter import OutputFilter, without_libraries
from ddpjob_core import rules
from ddpjob_core.failures import root_cause
from ddpjob_operator.failures import termination_message
from ddpjob_operator.job import api, reasons, wording
from ddpjob_operator.observed.cluster import Container
from ddpjob_operator.plan.actions import Event

# Show a failure together with its consequence, but alone if the other nodes take longer than these seconds to stop.
PATIENCE_SECONDS = 3.0
_KILLED = 137
_KILLED_BY_TORCHRUN = "forcefully exiting via "  # torchrun prints this after its --shutdown-timeout, and ends with 1
_SIGNALLED = re.compile(r"(?:SignalException|KeyboardInterrupt)\b")  # caused by the stop, so not its reason
_BREAKS = {r.name for r in (reasons.RANK_FAILED, reasons.NODE_LOST, reasons.DISRUPTED, reasons.STALLED)}
_GOES_ON = {r.name for r in (reasons.RESTARTING, reasons.REPLACING, reasons.RESTARTED_IN_PLACE)}


class Teller:
    """Decides which lines and events are shown. note: shows a sentence. log: shows lines. logs: shell command."""

    def __init__(
        self,
        job: api.DDPJob,
        note: Callable[[str], None],
        log: Callable[[LocalPod, list[str]], None],
        logs: str = "",
    ) -> None:
        found = job.spec.facts.launcher
        self._launcher = "torch" if found is None else found.launcher.rpartition(".")[2]
        self._note, self._log, self._logs = note, log, logs
        self._filters: dict[str, tuple[LocalPod, OutputFilter]] = {}
        self._pending: tuple[float, str] | None = None

    def printed(self, pod: LocalPod, lines: list[str]) -> None:
        """Show the lines that a node printed, except those that `OutputFilter` hides or holds back."""
        _, output = self._filters.setdefault(pod.name, (pod, OutputFilter()))
        if shown := output.take(lines, time.monotonic()):
            self._log(pod, shown)

    def event(self, event: Event, status: api.Status) -> bool:
        """Report an event about a failure. Return False for any other event."""
        failure = status.last_failure
        if failure is None or event.reason not in _BREAKS | _GOES_ON:
            return False
        text = f"✖ {event.message}"
        if event.reason in _BREAKS:
            self._pending = (time.monotonic() + PATIENCE_SECONDS, text)
            return True
        self.explain(failure)
        self._note(text)
        return True

    def due_in(self) -> float | None:
        """Return the seconds until `tick` has something to show; None if it has nothing to show."""
        now = time.monotonic()
        waits = [wait for _, output in self._filters.values() if (wait := output.due_in(now)) is not None]
        return min([*waits, *([max(0.0, self._pending[0] - now)] if self._pending else [])], default=None)

    def tick(self) -> None:
        """Show whatever is due: a failure that has had no consequence so far, and tracebacks."""
        now = time.monotonic()
        if self._pending is not None and now >= self._pending[0]:
            self._note(self._pending[1])
            self._pending = None
        for pod, output in self._filters.values():
            if late := output.overdue(now):
                self._log(pod, late)

    def explain(self, failure: api.JobFailure | None, *, doubtful: bool = False) -> None:
        """Show the traceback of the rank that failed first, and the number of hidden lines. doubtful: the success is
        suspicious, so show the first traceback that was held back."""
        self._pending = None
        held = {name: output.forget() for name, (_, output) in self._filters.items()}
        everyone = [trace for traces in held.values() for trace in traces if trace.exception]
        culprit = everyone[0] if doubtful and everyone else None
        if failure is not None and failure.exception:
            # Show the traceback from the failed pod, else one from another pod with the same exception.
            known = [*held.get(failure.pod, ()), *everyone]
            culprit = next((t for t in known if t.exception.startswith(failure.exception[:80])), None)
        for name, traces in held.items():
            pod, output = self._filters[name]
            for trace in traces:
                if trace is culprit:
                    self._log(pod, without_libraries(trace.lines))
                else:
                    output.hidden += len(trace.lines)
        for pod, output in self._filters.values():
            for rank, lines in output.stacks.items():
                if failure is None or failure.rank in (None, rank):  # without a known culprit, show all ranks
                    self._log(pod, lines)
                else:
                    output.hidden += len(lines)
            output.stacks = {}
        if failure is None and not any(held.values()):
            return  # after a success nobody needs the hidden lines, so their number is not shown
        self._tell_hidden("" if failure is None else failure.pod)

    def _tell_hidden(self, culprit: str) -> None:
        counts = {name: output.hidden for name, (_, output) in self._filters.items() if output.hidden}
        for _, output in self._filters.values():
            output.hidden = 0
        if not counts:
            if culprit in self._filters:
                self._note(f"  log: {self._command(self._filters[culprit][0])}")
            return
        name = culprit if culprit in counts else max(counts, key=lambda name: counts[name])
        others = sum(counts.values()) - counts[name]
        more = f" (and {others} of other nodes)" if others else ""
        own = wording.count(counts[name], "line")
        self._note(f"  … {own} of {self._launcher} hidden{more}; {self._command(self._filters[name][0])}")

    def _command(self, pod: LocalPod) -> str:
        return f"{self._logs} --attempt {pod.attempt} --node {pod.place}"


def stopped(name: str, status: api.Status, took: float, ended: Iterable[Container] = ()) -> str:
    """Return for example `■ digits stopped after 12s, saved at step 281`. ended: trainers that ended after the stop."""
    progress, after = status.progress, f"■ {name} stopped after {wording.duration(took)}"
    if progress is not None and progress.saved_step == progress.step:
        return f"{after}, saved at step {progress.step}"
    why = _why_unsaved(status, ended)
    if progress is None:
        return after + why
    last = f", last saved at step {progress.saved_step}" if progress.saved_step else ""
    return f"{after} at step {progress.step}{last}{why}"


def _why_unsaved(status: api.Status, ended: Iterable[Container]) -> str:
    """Return for example `; nothing was saved: rank 0 raised RuntimeError: …`; "" if the reason is unknown."""
    ended = list(ended)
    failures = [termination_message.read(trainer.message).failure for trainer in ended if trainer.message]
    own = [f for f in failures if f.exception and not (f.symptom or f.resumable or _SIGNALLED.search(f.exception))]
    if own:
        found = root_cause(own)
        who = "a rank" if found.rank is None else f"rank {found.rank}"
        where = f" in {found.where}" if found.where and not rules.is_unsaved(found.exception) else ""
        return f"; nothing was saved: {who} raised {found.exception.rstrip(' .')}{where}"
    if status.save_failed:
        return f"; {status.save_failed}"
    messages = [message for trainer in ended if (message := termination_message.read_message(trainer.message))]
    if by_shell := [found.message for message in messages for found in message.findings]:
        return f"; nothing was saved: {by_shell[0]}"
    if any(trainer.exit_code == _KILLED or _KILLED_BY_TORCHRUN in trainer.message for trainer in ended):
        return "; nothing was saved: it had to be killed by SIGKILL"
    return ""
