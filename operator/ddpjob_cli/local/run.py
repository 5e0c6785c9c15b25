"""`ddpjob run`: run a job as processes on this machine, with the operator's own `plan`. One thread observes, plans,
writes the status, acts, and then waits for an event or for the next planned time."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import os
import selectors
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from ddpjob_cli.describe import ending
from ddpjob_cli.local import script
from ddpjob_cli.local.preparation import debugging, faults, gpus, pod_process, threads
from ddpjob_cli.local.processes import injector, receive, stacks
from ddpjob_cli.local.processes.cluster import LocalCluster, LocalPod, RefusedError
from ddpjob_cli.local.run_files import files, history, report, run_folder, runs
from ddpjob_cli.local.shown import failure_lines, screen, table
from ddpjob_cli.manifest.yamlfile import Document, InputError
from ddpjob_operator.job import api, podspec, reasons, wording
from ddpjob_operator.job.status import TERMINAL, present_progress, ranks_since
from ddpjob_operator.job.validation import dotted
from ddpjob_operator.observed.cluster import Container
from ddpjob_operator.plan.actions import Settings
from ddpjob_operator.plan.plan import plan
from ddpjob_operator.pods import build
from ddprun import processes, watch_ranks
from ddprun.core import idle

if TYPE_CHECKING:
    from ddpjob_cli.local.run_files.metrics_file import MetricsFile
    from ddpjob_cli.local.session import DevSession

SUCCEEDED, FAILED, INTERRUPTED = 0, 1, 130
WAIT_SECONDS_MAX = 3600.0  # seconds; the kernel accepts at most 24.8 days, but a deadline may be a month
REPORT_SECONDS = 0.5  # seconds; short, because reports on loopback are cheap and the table should be up to date
# The usual resume_hint names spec.suspend, but a local run is suspended only by a signal, which also ends the run.
SETTINGS = Settings(progress_write_seconds=REPORT_SECONDS, resume_hint="run it again to go on", keeps_files=True)
_STOPS = (reasons.SUSPENDING.name, reasons.SUSPENDED.name)
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class RunOptions:
    status: Path | None = None
    cpu: bool = False
    allow_unsupported: bool = False
    plain: bool = False
    folder: Path | None = None
    """The parent of the runs' folders; None is the user's state folder."""
    faults: tuple[faults.Fault, ...] = ()
    metrics: Path | None = None
    report: Path | None = None
    process_group: int | None = None
    """Process group in which the command was started, if the run itself has another one."""
    names: Callable[[str], str] = str
    """Rewrites places in a text: lines of a notebook's script become cells and their lines."""
    pdb: int | None = None
    defaults: str = ""
    """The numbers in the title that the user did not give."""
    session: DevSession | None = None
    spawns: bool = False
    """True if the script starts the ranks of its node itself, so that their number is unknown."""


def run(document: Document, job: api.DDPJob, options: RunOptions) -> int:
    """Run a valid job to its end and return the exit code. Raise InputError before anything has started."""
    if job.spec.suspend:
        text = "spec.suspend: is true, so nothing would start. Run with --set spec.suspend=false."
        raise InputError(f"{document.place(('spec', 'suspend'))}: {text}")
    if job.spec.managed_by:
        text = f'spec.managedBy: "{job.spec.managed_by}" manages this job. Remove the field to run it here.'
        raise InputError(f"{document.place(('spec', 'managedBy'))}: {text}")
    written = (("--status", options.status), ("--report", options.report), ("--metrics-file", options.metrics))
    for option, path in written:
        if path is not None and not Path(os.path.realpath(path)).parent.is_dir():
            raise InputError(f"{option} {path}: there is no such folder")
    chosen = threads.chosen(job, os.environ)
    spawns = job.spec.facts.launcher is None and job.spec.facts.nproc_per_node == 1
    spawns = spawns and script.starts_ranks(script.find(document.source, job))
    texts = filter(None, (options.defaults, chosen))
    options = dataclasses.replace(options, defaults=" · ".join(texts), spawns=spawns)
    job, notes = on_this_machine(job, options)
    slots, more = assign_slots(document, job)
    notes += more + check(document, job, slots, options)
    if options.pdb is not None:
        groups = {os.getpgrp(), options.process_group or os.getpgrp()}
        given = debugging.terminal(options.pdb, job, groups)
        job, slots = debugging.undisturbed(job), [dataclasses.replace(slot, terminal=given) for slot in slots]
    folder = _run_folder(job.metadata.name, options)
    if options.pdb is not None:
        notes.append(f"--pdb: rank {options.pdb} has this terminal; the output of the others is in {folder.path}")
    read = script.with_shell_script(document.source, job).job
    option = document.options.get(("spec", "backoffLimit"), "" if document.lines else "--max-restarts")
    limit = "--max-restarts" if option == "--max-restarts" else SETTINGS.limit_name
    settings = dataclasses.replace(SETTINGS, command=read.spec.facts.command, limit_name=limit)
    try:
        runner = Runner(job, slots, folder, options, settings)
    except OSError as error:
        folder.close()
        raise InputError(f"{folder.path}: {error.strerror}; choose another folder with --logs") from None
    try:
        with runner:
            runner.reports = not script.reports_no_steps(script.find(document.source, job))
            for note in notes:
                runner.screen.note(note)
            return runner.run()
    finally:
        folder.close()


def on_this_machine(job: api.DDPJob, options: RunOptions) -> tuple[api.DDPJob, list[str]]:
    """Remove fields that only a cluster has, and GPUs with --cpu. Return the job, and notes for the user."""
    notes = []
    if options.cpu and (requested := podspec.gpus(job.spec.template)):
        unused, ranks = wording.count(requested, "GPU"), job.spec.world_size
        who = "1 rank trains" if ranks == 1 else f"{ranks} ranks train"
        notes.append(f"--cpu: {unused} on each node {'is' if requested == 1 else 'are'} not used; {who} with gloo")
    if job.spec.gang not in ("auto", "none") or job.spec.topology_key:
        notes.append("without effect on local processes: spec.gang, spec.topologyKey")
        job = replace(job, spec=replace(job.spec, gang="none", topology_key=""))
    return threads.set_threads(on_cpu(job) if options.cpu else job, os.environ), notes


def assign_slots(document: Document, job: api.DDPJob) -> tuple[list[pod_process.Slot], list[str]]:
    """Return a slot for each node with its share of the GPUs, and notes for the user. Raise InputError."""
    notes = []
    requested = podspec.gpus(job.spec.template)
    visible = gpus.visible()
    shares: list[tuple[str, ...] | None] = [None] * job.spec.pods
    if requested:
        try:
            shares = [tuple(share) for share in gpus.share(visible, job.spec.pods, requested)]
        except gpus.TooFewGpusError as error:
            raise InputError(f"{document.place(podspec.trainer_path(job.spec.template))}: {error}") from None
    elif visible:
        # A node whose pod requests no GPU gets none, as in a cluster.
        shares = [()] * job.spec.pods
    if job.spec.facts.backend == "nccl" and not visible:
        text = 'spec.backend: "nccl" needs a GPU, and this machine has none. Run with --cpu.'
        raise InputError(f"{document.place(('spec', 'backend'))}: {text}")
    has_own = job.spec.facts.trainer.get("workingDir")  # workingDir is relative to our working folder
    cwd, environment = Path.cwd() if has_own else script.folder_of(document.source, job), dict(os.environ)
    if cwd != Path.cwd():
        notes.append(f"working folder: {cwd}, where the script is")
    # The run's folder, which will have the volumes, does not exist yet. For `check` any folder is good enough.
    volumes = cwd / "volumes"
    searched = None if has_own else Path(os.path.abspath(document.source)).parent
    return [pod_process.Slot(cwd, volumes, environment, share, searched) for share in shares], notes


def on_cpu(job: api.DDPJob) -> api.DDPJob:
    template = msgspec.to_builtins(job.spec.template)
    trainer = podspec.trainer_container(template) or {}
    for kind in ("limits", "requests"):
        resources = trainer.get("resources") or {}
        if isinstance(resources.get(kind), dict):
            resources[kind] = {k: v for k, v in resources[kind].items() if not podspec.is_gpu(k)}
    nproc = job.spec.facts.nproc_per_node
    return replace(job, spec=replace(job.spec, template=template, nproc_per_node=nproc, backend="gloo"))


def check(document: Document, job: api.DDPJob, slots: Sequence[pod_process.Slot], options: RunOptions) -> list[str]:
    """Refuse fields that a local process cannot have, before anything starts. Return notes for the user. Raise
    InputError."""
    pods = [build.pod(job, 1, place) for place in job.spec.members]
    # Check the user's own template, because fields added by `build.pod` are not the user's mistakes.
    template = {**pods[0], "spec": job.spec.template["spec"]}
    refused = list(pod_process.problems(template))
    if refused and not options.allow_unsupported:
        raise document.error(refused)
    notes = [f"ignored: {dotted(problem.path)}: {problem.message.partition('. ')[0]}" for problem in refused]
    if cannot_start := list(pod_process.start_problems(pods[0], slots[0])):
        raise document.error(cannot_start)
    if ignored := [name for name in pod_process.ignored(template) if name not in ("image", "resources")]:
        notes.append(f"without effect on local processes: {', '.join(ignored)}")
    if lost := pod_process.not_kept(template):
        notes.append(f"not kept after the run: emptyDir {', '.join(lost)}; a hostPath keeps its files")
    if repeated := next((f for f in options.faults if isinstance(f, faults.RepeatedFault)), None):
        most = wording.count(job.spec.backoff_limit, "restart")
        notes.append(f"{repeated.option}: the job fails after {most}; --max-restarts allows more")
    return [*notes, *_of_steps(document, job, options)]


def _of_steps(document: Document, job: api.DDPJob, options: RunOptions) -> list[str]:
    """Refuse or report options that need steps if the script reports no steps. Return notes. Raise InputError."""
    path = script.find(document.source, job)
    if not script.reports_no_steps(path) or path is None:
        return []
    fault = next((f for f in options.faults if isinstance(f, faults.RankFault)), None)
    if fault is not None:
        text = f"{path.name} reports no steps, so no rank can fail at a step. Call ddpjob.progress(), or use every=20s."
        raise InputError(f"{fault.option}: {text}")
    if job.spec.stall is None or not job.spec.stall.timeout_seconds or job.spec.facts.restarts_in_place:
        return []
    return [
        f"A hang of this script will not be detected: {path.name} reports no steps, so stall.timeoutSeconds has no "
        "effect; call ddpjob.progress(), or start it with ddprun"
    ]


class Runner:
    def __init__(
        self,
        job: api.DDPJob,
        slots: list[pod_process.Slot],
        folder: run_folder.RunFolder,
        options: RunOptions,
        settings: Settings,
    ) -> None:
        self.job = replace(job, metadata=replace(job.metadata, uid=folder.uid, generation=1), status=api.Status())
        self.options = options
        self.folder = folder
        self.reports = True  # True if the script may report steps
        self.screen = screen.screen(
            self.job, options.plain, options.process_group, is_quiet=options.pdb is not None, spawns=options.spawns
        )
        self._started_at = self._idle_at = time.monotonic()
        self._idle = idle.IdleClock()
        self.record = history.Record(self.job, folder, dt.datetime.now(dt.timezone.utc), spawns=options.spawns)
        self._stop_reasons: list[str] = []
        self._stopped: dict[str, Container] = {}  # by pod: trainers that ended after the stop was requested
        self._keys: set[int] = set()  # SIGTSTP and SIGQUIT, until they are handled
        self._noted: set[str] = set()
        self._metrics: MetricsFile | None = None
        if options.metrics is not None:
            from ddpjob_cli.local.run_files.metrics_file import MetricsFile  # prometheus-client takes long to import

            self._metrics = MetricsFile(options.metrics, self.job)
        self._settings = settings
        self._inbox = receive.Inbox(job.spec, folder.path / "token", options.names)
        reporting = build.Reporting(self._inbox.receiver.url, str(folder.path / "token"), REPORT_SECONDS)
        self.cluster = LocalCluster(folder.path, slots, reporting, self._show, options.names)
        self.teller = failure_lines.Teller(self.job, self.screen.note, self._print, self._command("logs"))
        self.cluster.selector.register(self._inbox.descriptor, selectors.EVENT_READ, None)
        self._faults = injector.Injector(options.faults, self.cluster, self.screen.note)

    def __enter__(self) -> Runner:
        processes.become_subreaper()
        # Keep SIGHUP ignored under `nohup`, so that the run outlives its terminal.
        is_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        stops = [number for number in STOP_SIGNALS if not (is_nohup and number == signal.SIGHUP)]
        heard = [*stops, signal.SIGQUIT, signal.SIGTSTP]
        self._signals = {number: signal.signal(number, self._on_signal) for number in heard}
        signal.set_wakeup_fd(self._inbox.wake_descriptor, warn_on_full_buffer=False)
        self.screen.note(screen.title(self.job, self.options.defaults, spawns=self.options.spawns))
        if self.options.session is not None:
            for sentence in self.options.session.begin(self._inbox.wake):
                self.screen.note(sentence)
        return self

    def __exit__(self, *_: object) -> None:
        if self.options.session is not None:
            self.options.session.close()
        self.screen.close()
        self.cluster.close()
        signal.set_wakeup_fd(-1)
        self._inbox.close()
        for number, handler in self._signals.items():
            signal.signal(number, handler)

    def run(self) -> int:
        """Run until the job has ended or was stopped; return the exit code."""
        try:
            self._until_done()
        except RefusedError as error:
            self.screen.close()
            self.screen.note(f"✖ {self.job.metadata.name} stopped: {error}")
            return FAILED
        return self._summarize()

    def _until_done(self) -> None:
        while True:
            self._follow_session()
            self._begin_stop()
            progress = present_progress(self.job.status)
            trains = self.job.status.state == "Running" and not (self.reports and progress is None)
            self._faults.inject(self.job, trains=trains)
            wait = self._reconcile()
            # Check before waiting: a node that has just ended may have been the last source of events.
            ended = self.job.status.state in (*TERMINAL, *(("Suspended",) if self._stop_reasons else ()))
            if ended and all(not pod.live and not pod.open for pod in self.cluster.pods.values()):
                return
            self._obey_keys()
            self._look_for_idle()
            self.teller.tick()
            self.screen.draw(self._moment(), list(self.cluster.pods.values()))
            self._wait(wait)

    def _moment(self) -> table.RunMoment:
        facts, now = self.record.facts, dt.datetime.now(dt.timezone.utc)
        since, initialized = ranks_since(self.job.status), self.cluster.initialized()
        is_stale = initialized is not None and since is not None and initialized < since
        return table.RunMoment(
            self.job, self.record.history, facts.started, now, None if is_stale else initialized, self.reports
        )

    def _reconcile(self) -> float | None:
        """Plan and act until there is nothing left to do. Return the seconds until the next planned time."""
        while True:
            now = dt.datetime.now(dt.timezone.utc)
            seen = self.cluster.observe()
            if self._stop_reasons:
                self._stopped |= {pod.name: pod.trainer for pod in seen.pods if pod.trainer.state == "ended"}
            todo = plan(self.job, seen, now, settings=self._settings)
            if todo.status is not None:
                self._record(todo.status)
            self.cluster.execute(self.job, todo.actions)
            # Leave out Events at the job's end, because the summary reports the end.
            for event in todo.events if self.job.status.state not in TERMINAL else ():
                is_said = event.reason == reasons.EXIT_CODE_LOST.name  # the check before the run reported the same
                # `_begin_stop` has reported the stop.
                is_said = is_said or (bool(self._stop_reasons) and event.reason in _STOPS)
                # The summary reports findings.
                is_said = is_said or event.reason in {found.reason for found in self.job.status.findings}
                if not is_said and not self.teller.event(event, self.job.status):
                    self.screen.event(event)
            if todo.status is None and not todo.actions and not self.cluster.ended_pods():
                return None if todo.requeue_at is None else max(0.0, (todo.requeue_at - now).total_seconds())

    def _wait(self, seconds: float | None) -> None:
        """Wait until a node prints, reports or ends, a rank reports progress, or a signal arrives."""
        waits = (
            seconds,
            self.screen.due_in(self.job.status),
            self._faults.due_in(),
            self.teller.due_in(),
            max(0.0, self._idle_at - time.monotonic()) if self._is_watched() else None,
            None if self.options.session is None or self._stop_reasons else self.options.session.due_in(),
        )
        limits = [s for s in waits if s is not None]
        for key, _ in self.cluster.selector.select(min([WAIT_SECONDS_MAX, *limits])):
            if key.data is None:
                for report in self._inbox.take():
                    if report.attempt in (0, self.job.status.attempt):
                        self.cluster.take(report, self.job.spec.members.place(report.node_rank))
            elif key.fd in key.data.open:
                self.cluster.handle(key)

    def _is_watched(self) -> bool:
        """True if this run itself must check for idle ranks. Under ddprun the agents check, with more information."""
        return self.job.status.state == "Running" and not self.job.spec.facts.restarts_in_place

    def _record(self, status: api.Status) -> None:
        reported = self.cluster.agent
        if self._metrics is not None:
            with self._whatever_disk(f"--metrics-file {self.options.metrics}"):
                agent = None if reported is None else reported.agent
                self._metrics.changed(self.job.status, status, dt.datetime.now(dt.timezone.utc), agent)
        is_new_attempt = status.attempt != self.job.status.attempt
        if is_new_attempt or status.in_place != self.job.status.in_place:
            self._settings = dataclasses.replace(self._settings, failed_before=status.last_failure)
        if is_new_attempt:
            self.cluster.agent = None  # the agent's restarts were counted in the old attempt
        self.job = replace(self.job, status=status)
        if status.attempt and self.job.spec.facts.min_nodes is not None:
            self._inbox.receiver.leader = self.cluster.leader(self.job)
        self._note_once(self.record.take(status, dt.datetime.now(dt.timezone.utc)))
        if self.options.status is not None:
            with self._whatever_disk(f"--status {self.options.status}"):
                files.write_atomically(self.options.status, history.document(status))

    @contextlib.contextmanager
    def _whatever_disk(self, name: str, consequence: str = "the job goes on without it") -> Iterator[None]:
        """Within this `with` block, only show an OSError: the job continues without the file."""
        try:
            yield
        except OSError as error:
            self._note_once(f"{name}: {error.strerror}; {consequence}")

    def _note_once(self, text: str) -> None:
        """Show a note unless it was shown before."""
        if text and text not in self._noted:
            self._noted.add(text)
            self.screen.note(text)

    def _show(self, pod: LocalPod, lines: list[str]) -> None:
        self._note_once(pod.log.error)
        if self.options.session is not None:
            lines = self.options.session.printed(pod, lines)
        self.teller.printed(pod, lines)

    def _print(self, pod: LocalPod, lines: list[str]) -> None:
        try:
            with self._whatever_disk("stdout", f"the output of the nodes is only in {self.folder.path}"):
                self.screen.log(pod, lines)
        except screen.OutputClosedError:
            self._stop_reasons.append("a closed output")

    def _follow_session(self) -> None:
        """Restart the ranks after a save, and report how they ended."""
        if self.options.session is None or self._stop_reasons:
            return
        from ddpjob_cli.local.session import restart_ranks

        pods = list(self.cluster.pods.values())
        found = self.options.session.look([pod.step for pod in pods], lambda: restart_ranks(pods))
        self.screen.is_quiet = self.options.session.is_lent
        for pod, line in found.printed:
            self.teller.printed(pod, [line])
        if found.stood:
            with self.screen.nobody_types():
                self.teller.explain(found.failure, doubtful=False)
        for sentence in found.notes:
            self.screen.note(sentence)
        if found.stop:
            self._stop_reasons.append(found.stop)

    def _obey_keys(self) -> None:
        # Agents print the stacks of their ranks. The text has, or explains the lack of, the stacks of other ranks.
        if signal.SIGQUIT in self._keys and (text := stacks.ask(self.folder.uid).text()):
            self.screen.note(text)
        if signal.SIGTSTP in self._keys:
            self.screen.pause()
            # Stop by SIGTSTP: unlike SIGSTOP, the kernel ignores SIGTSTP if no shell could continue the process.
            handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTSTP)
            signal.signal(signal.SIGTSTP, handler)
        self._keys.clear()

    def _look_for_idle(self) -> None:
        now = time.monotonic()
        if now < self._idle_at:
            return
        self._idle_at = now + idle.LOOK_SECONDS
        is_on = self._is_watched() and not self.cluster.is_paused() and self.options.pdb is None
        pods = [pod for pod in self.cluster.pods.values() if pod.live and pod.pid is not None] if is_on else []
        parent_of = processes.parents() if pods else {}
        self.cluster.look_at_ranks(parent_of)
        for sentence in self.cluster.waits_in_vain(self.job, parent_of):
            self._note_once(sentence)
        cpu = {pod.place: watch_ranks.cpu_seconds(pod.pid or 0, parent_of) for pod in pods}
        if found := self._idle.look(now, cpu):
            self.screen.note(idle.sentence(found, self._idle.seconds, "", f"ddpjob stacks {self.job.metadata.name}"))

    def _on_signal(self, number: int, _frame: Any) -> None:
        """Only record the signal, because it may have interrupted a print. A second signal kills the nodes at once."""
        if number not in STOP_SIGNALS:
            self._keys.add(number)
            return
        self._stop_reasons.append(signal.Signals(number).name)
        if len(self._stop_reasons) > 1:
            self.cluster.kill()

    def _begin_stop(self) -> None:
        if self._stop_reasons and not self.job.spec.suspend:
            grace, nodes = self.job.spec.facts.grace_seconds, wording.count(self.job.spec.nodes, "node")
            progress = self.job.status.progress
            at = "" if progress is None else f", at step {progress.step}"
            why = f"Stopping on {self._stop_reasons[0]}: {nodes}, up to {grace} s{at}"
            self.screen.note(f"{why}; a second signal kills them now")
            self.job = replace(self.job, spec=replace(self.job.spec, suspend=True))

    def _summarize(self) -> int:
        """Show where the logs are and how the job ended. Return the exit code."""
        took = time.monotonic() - self._started_at
        self._write_report()
        status, name = self.job.status, self.job.metadata.name
        failed = status.state in ("Failing", "Failed")
        with self.screen.nobody_types():
            self.teller.explain(status.last_failure if failed else None, doubtful=bool(status.findings) and not failed)
        self.screen.close()
        missed = self._faults.missed(self.folder.path / run_folder.FAULTS)
        for fault in missed:
            self.screen.note(f"{fault.option}: did not happen; {fault.wants}")
        self.screen.note(self._where())  # before the line about the job's end, which comes last
        if status.state == "Succeeded":
            self.screen.note(ending.succeeded(name, status, took))
            return FAILED if missed else SUCCEEDED  # a test of a fault has failed if the fault did not happen
        if status.state == "Suspended":
            self.screen.note(
                failure_lines.stopped(name, status, took, () if self.options.session else self._stopped.values())
            )
            return INTERRUPTED
        self.screen.note(ending.failed(name, status, took))
        return FAILED

    def _where(self) -> str:
        """Return a line with the commands that show the logs and the report."""
        written = self.options.report or f"{self._command('report')} > report.html"
        return f"  logs: {self._command('logs')}   report: {written}"

    def _command(self, name: str) -> str:
        """Return for example `ddpjob logs digits`, with --dir if the user has chosen a folder."""
        folder = "" if self.options.folder is None else f" --dir {shlex.quote(str(self.options.folder))}"
        return f"ddpjob {name} {self.job.metadata.name}{folder}"

    def _write_report(self) -> None:
        if self.options.report is None:
            return
        run = runs.Run(self.folder.path, self.record.facts, self.job.status, running=False)
        with self._whatever_disk(f"--report {self.options.report}", "ddpjob report prints it"):
            text = report.page(run, self.record.history, dt.datetime.now(dt.timezone.utc))
            files.write_atomically(self.options.report, text.encode())


def dry_run(job: api.DDPJob, cpu: bool) -> Iterator[build.Body]:
    """Yield the Service and the pods that would be created in a cluster."""
    job = on_cpu(job) if cpu else job
    job = replace(job, metadata=replace(job.metadata, uid=job.metadata.uid or "00000000-0000-0000-0000-000000000000"))
    yield build.service(job)
    yield from (build.pod(job, 1, place) for place in job.spec.members)


def _run_folder(name: str, options: RunOptions) -> run_folder.RunFolder:
    try:
        return run_folder.RunFolder(name, options.folder)
    except OSError as error:
        # An OSError from write() has no file name.
        place = error.filename or (options.folder or run_folder.state_home() / "ddpjob") / name
        text = f"{place}: {error.strerror}: logs cannot be written there; choose a folder with --logs"
        raise InputError(text) from None
