"""`progress()`: reports how far training is. The training loop calls it at every step, so it only stores its arguments.

A daemon thread posts the latest values to the job's status receiver (DDPJOB_STATUS_URL; nothing happens without it). It
posts after `init`, after the first step, and every DDPJOB_STATUS_INTERVAL seconds. Nothing here imports torch, raises
in the training loop, makes it wait for the network, or prints twice.

Body of a post (JSON, at most 8 KiB; unknown fields are absent):
    {"attempt": 1, "rank": 0, "nodeRank": 0, "worldSize": 2, "step": 312, "totalSteps": 1125, "etaSeconds": 24,
     "samplesPerSecond": 5210.4, "metrics": {"loss": "0.412"}, "phase": "save", "savedStep": 300,
     "resumedStep": 100, "resumedFrom": "/ckpt/snapshots", "generation": 1, "replacement": 1, "notKept": "…",
     "limitNeeded": 734003200, "saveFailed": "…", "alone": true, "final": true}
Rank 0's post is the job's progress; the first rank of each other node posts too, which shows that its node is running.
An unchanged step is posted again, to show that the process is still alive.
phase: "start" before the first step (step is then the one that was loaded, or 0), "save" or "evaluate" in a `pause`;
absent while training.
savedStep: step of the newest checkpoint that `Snapshot` has saved or loaded; posted at once, at most every two seconds.
resumedStep, resumedFrom: step and origin of the loaded state: a folder, or the memory of certain nodes.
generation: how often ddprun had restarted the ranks when this one was started.
replacement: number of the node's pod within the attempt; absent for the first pod.
notKept: why the state is not kept in memory; limitNeeded: memory limit in bytes that the container would need for it.
saveFailed: why the last save of `Snapshot` failed; absent after a later one has succeeded.
alone: in the final post of one of several ranks that has run a backward pass and was in no process group.
"""

import collections
import contextlib
import json
import math
import os
import threading
from collections.abc import Iterator, Mapping
from time import monotonic
from typing import Any, Literal

from ddpjob import process
from ddpjob.errors import ConfigurationError
from ddpjob.reporting import event_files, injected_faults, termination, watchdog
from ddpjob.reporting.event_files import EventFiles
from ddpjob.reporting.sender import ReportSender
from ddpjob_core import heartbeat

METRICS_MAX = 16
SENTENCE_CHARACTERS_MAX = 300
TEXT_CHARACTERS_MAX = 64
BODY_BYTES_MAX = 8192
BACKOFF_SECONDS_MAX = 60.0
FINAL_FLUSH_SECONDS = 1.0
SAVED_POST_SECONDS = 2.0  # scripts may save more often; a receiver accepts one request a second from rank and agent
PHASES_DECLARED = ("save", "evaluate")
_STEP = heartbeat.STEP
RATE_WINDOW_POSTS = 12  # a minute at the default interval: enough for a stable ETA, and a slow-down shows soon


def progress(step: int, total: int | None = None, samples: int | None = None, **metrics: Any) -> None:
    """Report the training progress; cheap enough for every step (below 1 µs, bench/trainer_overhead.py).

    step     steps made so far, counted over restarts.
    total    steps that the whole training makes; gives percent and ETA.
    samples  samples that all ranks together train per step (the global batch); gives samples/s.
    metrics  at most 16; numbers, or strings of at most 64 characters. A tensor of one element is read when it is
             posted, in another thread.

    Never raises for its arguments, and never blocks. A value that cannot be sent is left out and named once on stderr.
    """
    state = process.current
    state.latest = (step, total, samples, metrics, monotonic())
    try:
        state.cells[_STEP] = step
    except (TypeError, ValueError):
        _write_step(step)
    if state.checks_each_step:
        _check_step(step)


@contextlib.contextmanager
def pause(phase: Literal["save", "evaluate"]) -> Iterator[None]:
    """Declare that no step is made for a while. A pause has its own, longer time limit before it counts as a stall.

        with ddpjob.pause("evaluate"):
            loss = held_out_loss(model)

    `Snapshot` declares its own. Raises ConfigurationError for any other phase.
    """
    if phase not in PHASES_DECLARED:
        raise ConfigurationError(f"phase: {phase!r} is none of {', '.join(PHASES_DECLARED)}.")
    state = process.current
    before, state.paused = state.paused, phase
    _write_phase()
    try:
        yield
    finally:
        state.paused = before
        _write_phase()


def report_start(step: int = 0, **metrics: Any) -> None:
    """Report that this rank is running and has made no step. Called by `init`, and by `Snapshot.load` with its step."""
    state = process.current
    if not state.stepping:
        state.latest = (step, None, None, metrics, monotonic())
        _begin_heartbeat(step)
        _post_now()
        with contextlib.suppress(Exception):
            termination.install()


def report_resumed(step: int, origin: str, *, saved: bool = True, **metrics: Any) -> None:
    """Report that the state of this step was loaded, before the first step that follows on it.

    origin: as in the log line `resumed at step 312 from …`. saved: True for a checkpoint, False for state in memory.
    """
    state = process.current
    state.resumed_step, state.resumed_from = step, origin
    if saved:
        _write_saved(step)
    report_start(step, **metrics)


def report_saved(step: int) -> None:
    """Report that this step's checkpoint is on disk, for a restart. Called by the writing thread."""
    _write_saved(step)
    process.current.save_failed = ""
    _post_save()


def report_save_failed(why: str) -> None:
    """Report that a checkpoint could not be written; training continues. Also called by the writing thread."""
    process.current.save_failed = why
    _post_save()


def _post_save() -> None:
    reporter = process.current.reporter
    if reporter is not None:
        reporter.saved()


def flush(timeout_seconds: float = FINAL_FLUSH_SECONDS) -> None:
    """Send the last values as final, within `timeout_seconds`. Send nothing more until `progress` is called."""
    state = process.current
    reporter, state.reporter, state.checks_each_step, state.begun = state.reporter, None, True, False
    if not state.stepping:
        state.cells[_STEP] = 0  # the last step was loaded, not made by this process
    state.cells[heartbeat.PHASE] = 0
    if reporter is not None:
        with contextlib.suppress(Exception):
            reporter.was_alone = not reporter.had_group and _has_trained_alone()
        reporter.finish(timeout_seconds)


def _has_trained_alone() -> bool:
    """True if this process, which is ending, trained alone. False if an exception ends it."""
    from ddpjob.reporting import rank_end

    if termination.ending() is not None or process.has_had_torch_group():
        return False
    return rank_end.has_trained_alone()


def _check_step(step: int) -> None:
    """Check the step in the first call of this process, and in all calls if faults are injected."""
    state = process.current
    if not state.begun:
        state.begun = state.stepping = True
        _begin_heartbeat(step)
        with contextlib.suppress(Exception):
            process.step_made()
            termination.install()
            state.faults = injected_faults.ordered(os.environ, process.place().rank)
        _post_now()
    state.checks_each_step = bool(state.faults)
    if state.faults:
        state.faults = injected_faults.obey(state.faults, step)


def _begin_heartbeat(step: int) -> None:
    watchdog.begin()
    if path := os.environ.get("DDPJOB_END"):
        with contextlib.suppress(Exception):
            from ddpjob.reporting import rank_end

            rank_end.begin_in_new_process(path)
    _write_step(step)
    _write_phase()


def _write_step(step: Any) -> None:
    """Write the step to the heartbeat. Count a call with an invalid step: a script that reports is not stalled."""
    cells = process.current.cells
    try:
        cells[_STEP] = int(step)
    except Exception:
        cells[_STEP] += 1


def _write_saved(step: int) -> None:
    state = process.current
    state.saved_step = state.cells[heartbeat.SAVED] = step


def _write_phase() -> None:
    state = process.current
    phase = state.paused or ("train" if state.stepping else "start" if state.latest else "")
    state.cells[heartbeat.PHASE] = heartbeat.PHASES.index(phase)


def _post_now() -> None:
    """Start the posting thread if this process needs one, or wake it."""
    state = process.current
    with contextlib.suppress(Exception):
        url = os.environ.get("DDPJOB_STATUS_URL")
        if state.reporter is not None:
            state.reporter.news.set()
        elif url and process.place().local_rank == 0:
            state.reporter = Reporter(url, os.environ)
            process.at_exit(flush, 20)
            threading.Thread(target=state.reporter.run, name="ddpjob-progress", daemon=True).start()


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    try:
        value = float(environ[name])
    except (KeyError, ValueError):
        return default
    return value if math.isfinite(value) and value > 0 else default


class Reporter:
    """The posting thread of one process: reads the latest values, and computes rate and back-off."""

    def __init__(self, url: str, environ: Mapping[str, str]) -> None:
        self.url = url
        self.sender = ReportSender(url, environ)
        self.interval = _seconds(environ, "DDPJOB_STATUS_INTERVAL", 5.0)
        self.events = EventFiles(environ.get(event_files.VARIABLE, ""))
        self.failures = 0
        self.complained = False
        self.advised = False
        self.has_saved = False
        self.had_group = False
        self.was_alone = False
        self.marks: collections.deque[tuple[int, float]] = collections.deque(maxlen=RATE_WINDOW_POSTS)
        self.news = threading.Event()
        self.finishing = threading.Event()
        self.finished = threading.Event()

    def finish(self, timeout_seconds: float) -> None:
        self.finishing.set()
        self.news.set()
        self.finished.wait(timeout_seconds)

    def run(self) -> None:
        try:
            while not self.finishing.is_set():
                self._post(final=False)
                self._wait(posted_at=monotonic())
            self._post(final=True)
        except Exception as error:  # training must not notice any error here
            self._complain(f"{type(error).__name__}: {error}")
        finally:
            self.finished.set()
            self.sender.close()

    def saved(self) -> None:
        """Post now, not at the next interval, because the rank may be killed before."""
        if not self.failures:
            self.has_saved = True
            self.news.set()

    def _wait(self, posted_at: float) -> None:
        """Wait until the next post is due."""
        self.news.wait(self.pause_seconds())
        self.news.clear()
        if self.has_saved:
            self.has_saved = False
            gap = min(SAVED_POST_SECONDS, self.interval)
            self.finishing.wait(max(0.0, posted_at + gap - monotonic()))

    def pause_seconds(self) -> float:
        """Return the seconds to the next post: the interval, doubled for every failure in a row."""
        return max(self.interval, min(BACKOFF_SECONDS_MAX, self.interval * 2.0 ** min(self.failures, 16)))

    def _post(self, *, final: bool) -> None:
        try:
            document = self._document(final=final)
            if document is None:
                return
            if document["rank"] == 0 and process.current.stepping:
                self.events.write(document["step"], document["metrics"])
            problem = self.sender.send(encode(document))
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        self.failures = 0 if problem is None else self.failures + 1
        if problem is not None:
            self._complain(problem)

    def _complain(self, problem: str) -> None:
        if self.complained or self.finishing.is_set():
            return
        self.complained = True
        process.log(f"progress is not reported: {self.url}: {problem}; training goes on; trying again, reported once")

    def _document(self, *, final: bool) -> dict[str, Any] | None:
        state, place = process.current, process.place()
        self.had_group = self.had_group or process.has_had_torch_group()
        if state.latest is None:
            return None
        step, total, samples, metrics, when = state.latest
        if not self.advised and (text := misuse(step, metrics)):
            self.advised = True
            process.log(f"progress(): {text}; reported once")
        if not _is_number(step):
            return None
        # Before the first step there is no rate, because imports and loading would count as slow steps.
        rate = self.steps_per_second(int(step), when) if state.stepping else None
        phase = state.paused or (None if state.stepping else "start")
        return {
            "attempt": process.number("DDPJOB_ATTEMPT", 1),
            "rank": place.rank,
            "nodeRank": place.node_rank,
            "worldSize": place.world_size,
            "step": int(step),
            **pace(rate, int(step), total, samples),
            "metrics": as_text(metrics),
            **({"phase": phase} if phase else {}),
            **({} if state.saved_step is None else {"savedStep": state.saved_step}),
            **({} if state.resumed_step is None else {"resumedStep": state.resumed_step}),
            **({"resumedFrom": state.resumed_from[:SENTENCE_CHARACTERS_MAX]} if state.resumed_from else {}),
            **({"generation": generation} if (generation := process.number("DDPJOB_GENERATION", 0)) else {}),
            **({"replacement": number} if (number := process.number("DDPJOB_REPLACEMENT", 0)) else {}),
            **({"notKept": state.not_kept[:SENTENCE_CHARACTERS_MAX]} if state.not_kept else {}),
            **({} if state.limit_needed is None else {"limitNeeded": state.limit_needed}),
            **({"saveFailed": state.save_failed[:SENTENCE_CHARACTERS_MAX]} if state.save_failed else {}),
            **({"alone": True} if final and self.was_alone else {}),
            "final": final,
        }

    def steps_per_second(self, step: int, when: float) -> float | None:
        """Return steps per second over the last posts, from the times of the calls of `progress`, not of the posts."""
        if not self.marks or self.marks[-1][0] != step:
            self.marks.append((step, when))
        (first, began), (last, ended) = self.marks[0], self.marks[-1]
        return (last - first) / (ended - began) if last > first and ended > began else None


def pace(rate: float | None, step: int, total: int | None, samples: int | None) -> dict[str, Any]:
    """Return the figures that a receiver can show next to the step, as far as they are known."""
    fields: dict[str, Any] = {}
    if total is not None:
        fields["totalSteps"] = int(total)
        if rate is not None:
            fields["etaSeconds"] = max(0, round((int(total) - step) / rate))
    if samples is not None and rate is not None:
        fields["samplesPerSecond"] = round(rate * float(samples), 1)
    return fields


def misuse(step: Any, metrics: Mapping[str, Any]) -> str:
    """Return why an argument of `progress` is not shown; "" if all are shown. Never raises."""
    if not _is_number(step):
        return f"step: {step!r:.40} is not a number, so nothing is reported"
    if len(metrics) > METRICS_MAX:
        return f"{len(metrics)} metrics are more than {METRICS_MAX}: the others are not shown"
    shown = as_text(metrics)
    lost = [name for name in metrics if name[:TEXT_CHARACTERS_MAX] not in shown]
    return f"{lost[0]}: {_kind(metrics[lost[0]])} is not one number or text, so it is not shown" if lost else ""


def _is_number(step: Any) -> bool:
    try:
        int(step)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def _kind(value: Any) -> str:
    count = value.numel() if hasattr(value, "numel") else 1
    return f"a {type(value).__name__}" + (f" of {count} elements" if count != 1 else "")


def as_text(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Return the first 16 valid metrics, each as a short string, as in Kubeflow's trainer status."""
    texts: dict[str, str] = {}
    for name, value in metrics.items():
        if len(texts) == METRICS_MAX:
            break
        with contextlib.suppress(Exception):
            texts[name[:TEXT_CHARACTERS_MAX]] = _value_as_text(value)
    return texts


def _value_as_text(value: Any) -> str:
    if isinstance(value, str):
        return value[:TEXT_CHARACTERS_MAX]
    if isinstance(value, int):
        return str(int(value))[:TEXT_CHARACTERS_MAX]
    if hasattr(value, "detach"):
        value = value.detach()  # torch warns when a tensor with a gradient is converted
    return f"{float(value):.6g}"  # accepts tensors and numpy's numbers; nan, inf and -inf become text


def encode(document: dict[str, Any]) -> bytes:
    """Return the document as JSON of at most 8 KiB, dropping metrics from the last on until it fits."""
    while True:
        body = json.dumps(document, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
        if len(body) <= BODY_BYTES_MAX or not document["metrics"]:
            return body
        document = {**document, "metrics": dict(list(document["metrics"].items())[:-1])}
