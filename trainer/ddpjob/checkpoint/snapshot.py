"""`Snapshot`: save the training state to a folder that outlives the processes. Rank 0 writes it; all ranks read it.

Files, all in one folder:
    step-000000000312.writer-000003.9f86d081884c7d65.pt   a state; readable with torch.load(weights_only=True)
    writer-000003.json                                    claim file: shows that writer number 3 is taken, and by which
                                                          job: {"job": uid, "attempt": 2}, "generation" after restarts
    writer-000003.alive                                   shows that this writer's process is running (writers.py)
    .tmp-000003-4711-1                                    a file being written, or left by a crash

A state's file name has the step, the writer number and the first 16 hex digits of the SHA-256 of its bytes. The file
gets this name by rename, after fsync. So a file with such a name was complete once; the digest shows later damage.

Flow: `save` copies the state to the CPU and a thread writes it. The other ranks send their random states, and objects
that differ by rank, through the group's store. `load` compares the folder with the agent's memory (in_memory/door.py)
and takes the newer state.

Fencing: each attempt of a job, and under ddprun each generation of its ranks, takes the next writer number by creating
the claim file exclusively. So does every other process that saves, because a run that starts again at step 0 has lower
steps than the run before it. A process that only loads uses the number of the current run. The newest state has the
highest (writer, step), not the highest step. Names of two writers never collide, so a late write of an old attempt can
neither overwrite nor hide a newer state. A process also checks for a higher number before it writes, publishes or
prunes, and raises Superseded if there is one. The check and the rename are not atomic; losing that race leaves one file
too many.

Failures: a save that fails (disk full, folder removed) is reported, training continues, and the next save tries again.
`wait`, `close`, leaving the group and the end of the script write the last state or raise.

Ownership: a folder belongs to one job. Another job is refused while the last writer is running or has been silent for
less than a minute. After that the other job takes over, logs this, and resumes from the last state.

Drawbacks: rank 0 writes everything, so sharded states are refused; and the whole state is copied to the CPU at each
save.
"""

import contextlib
import errno
import functools
import hashlib
import io
import json
import operator
import os
import re
import stat
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddpjob import own_files, process
from ddpjob.checkpoint import writers
from ddpjob.checkpoint.in_memory.door import InMemory
from ddpjob.checkpoint.in_memory.kept import untrained
from ddpjob.checkpoint.in_memory.recall import Fetched
from ddpjob.checkpoint.reasons import reason
from ddpjob.checkpoint.state import half_done, of_each_rank, random_states
from ddpjob.checkpoint.state.state_dicts import copied, large_of, refuse_sharded, restore, state_of, without_copies
from ddpjob.errors import ConfigurationError, SnapshotError, StateError, Stopped, Superseded
from ddpjob.group import gather, stop
from ddpjob.group.join import World, active, before_leaving, rank_in_group, store_of
from ddpjob.reporting import termination
from ddpjob.reporting.progress import pause, report_resumed, report_save_failed, report_saved
from ddpjob_core.memory import FoundState, Version, is_newer, numbered

FORMAT = 1
STEP_MAX = 10**12 - 1  # the file name has 12 digits for the step
HASHED_BYTES = 1024 * 1024
OFFERS_MAX = 3  # maximum number of states per rank in the store; rank 0 is at most one save behind
RNG_WAIT_SECONDS = 2.0  # the writing thread waits this long for other ranks' random states; training goes on meanwhile

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")  # a single slash is enough, because Path turns "s3://" into "s3:/"
_STATE_NAME = re.compile(r"step-(\d{12})\.writer-(\d{6,})\.([0-9a-f]{16})\.pt")
_WRITER_NAME = re.compile(r"writer-(\d{6,})\.json")
_ALIVE_NAME = re.compile(r"writer-(\d{6,})\.alive")
_TMP_NAME = re.compile(r"\.tmp-(\d{6,})-\d+-\d+")
# Names of files that any Snapshot of this process is writing, because two Snapshots may share a folder.
_being_written: set[str] = set()


class Snapshot:
    """Save and resume the training state.

        snapshot = ddpjob.Snapshot("snapshots", world)
        step = snapshot.load(model=model, optimizer=optimizer, sampler=sampler)    # 0 if there is none
        ...
            snapshot.save(step, model=model, optimizer=optimizer, sampler=sampler)
        snapshot.close()

    folder  on a volume that outlives the pod; created if missing. If nodes do not share it, rank 0's folder counts, and
            its bytes are sent to the ranks that cannot read them. None: the state is in memory only.
    world   defaults to that of `init`, else to the process group that the script created, else to rank 0 of 1. After
            the group is left, each rank loads by itself and only rank 0 saves.
    keep    number of newest states to keep, at least 1.
    memory  under ddprun, also keep the state in the pod's memory, where a restart finds the last step.

    The random states of Python, numpy (if imported), torch and this rank's CUDA device are saved for each rank that
    calls `save`. With the same number of ranks, each rank resumes its own. With another number, each rank is seeded
    from the saved states, the step and its rank: the same resume gives the same numbers, but they differ from those of
    the run that saved.

    Raises ConfigurationError for wrong arguments.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        world: World | None = None,
        keep: int = 3,
        *,
        memory: bool = True,
    ) -> None:
        if not isinstance(keep, int) or keep < 1:  # otherwise keep=2.5 would fail only at the fourth save
            raise ConfigurationError(f"keep: {keep!r} must be a whole number of at least 1.")
        if folder is None and not memory:
            raise ConfigurationError("folder: none, and memory=False: nothing would be saved. Name a folder.")
        if _URL.match(str(folder)):
            raise ConfigurationError(
                f"folder: {folder} is a URL, and would be taken as a local path. Mount the volume, and give the "
                f"path of a folder in it."
            )
        self._folder = None if folder is None else Path(folder)
        self._states_max = keep
        self._world = world or active()
        self._ranks = 0  # world size of the group if this process has left it, else 0
        if self._world is not None:
            self.rank, self.world_size = self._world.rank, self._world.world_size
        elif process.current.left is not None and process.torch_group() is None:
            self.rank, self.world_size = process.current.left.rank, 1  # torch's group is gone
            self._ranks = process.current.left.world_size
        else:
            self.rank, self.world_size = rank_in_group("pass world=")
        attempt = self._world.attempt if self._world is not None else int(os.environ.get("DDPJOB_ATTEMPT") or 1)
        generation = int(os.environ.get("DDPJOB_GENERATION") or 0)
        turn = int(os.environ.get("DDPJOB_TERM") or 0)
        self._own_claim = _Claim(os.environ.get("DDPJOB_UID", ""), attempt, turn, generation)
        self._writer: int | None = None
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None  # the error with which this process must end, raised by `_join`
        self._unwritten: _Unwritten | None = None  # the last state passed to save(), until it is in the folder
        self._whole: dict[str, int] = {}  # ids of the last objects of keep(), checked once: each check takes long
        self._owed: _Owed | None = None  # the loaded state, until the folder has this state or a newer one
        self._late: dict[int, str] = {}  # store keys of ranks that missed the previous save
        # Part of the store's keys. `load` sets it to rank 0's path on all ranks, because paths may differ by node.
        self._name = str(folder)
        # Count of optimizer steps at which all ranks have passed the last save, because they complete steps together.
        # The count is two more than at the save, because LBFGS runs its first backward pass inside step().
        self._others_pass_at = 0
        self._differ: set[str] = set()  # names of objects that differ between ranks
        self._told: set[str] = set()  # keys of messages that are logged only once
        self._offered: list[str] = []
        self._last_step, self._repeats = 0, 0
        self.state: dict[str, Any] = {}
        self._since_step = half_done.SinceLastStep(self.rank)
        present, pending = self._own_claim.version(0), self._since_step.pending
        self._memory = InMemory(self._world, present, pending, wanted=memory, has_folder=folder is not None)
        _count_optimizer_steps()
        before_leaving(self.wait)
        process.at_exit(functools.partial(_write_at_end, weakref.ref(self)), 15)
        process.at_exit_of_child(stop.end_as_it_must, 5)

    @property
    def folder(self) -> Path:
        """Folder of the states. Raises SnapshotError if the states are in memory only."""
        if self._folder is None:
            raise SnapshotError("folder: none: the state is only in memory.")
        return self._folder

    # ---- save ----------------------------------------------------------------------------------------------

    def save(self, step: int, *unnamed: NoReturn, **state: Any) -> None:
        """Save the state under this step. Returns when it is copied to the CPU; a thread writes the file.

        step   number of steps made so far, at least 1.
        state  objects with state_dict() (a DDP model is saved without its wrapper), or tensors, numbers, strings, None,
               and dicts, lists and tuples of them. Types must match exactly: a DTensor, a subclass of Tensor, a
               namedtuple or a set raises StateError, because it would come back as another type.

        Call it on every rank, or on rank 0 only; then only rank 0's random state is kept. It never waits for another
        rank, but it waits for the save before it. If the folder cannot be written to, that is reported, and the next
        save or `close` tries again.

        Raises StateError for values that could not be read back, Superseded if a newer attempt owns the folder, and
        SnapshotError if another process or job is using it.
        """
        _want_names("save(step, ", unnamed)
        step = _checked_step(step)
        # every rank refuses sharded objects: reading one is a collective, in which rank 0 alone would hang
        refuse_sharded(state)
        if self.rank == 0:
            self._since_step.refuse_stale_shards(state)
            self._name_half_done(state, step)
        self._name_places(step, state)
        # A step may be saved twice (in the loop and at the end).
        # The second save needs its own keys in the store, because the first save has already taken the values there.
        self._repeats = self._repeats + 1 if step == self._last_step else 0
        self._last_step = step
        if self._folder is None:
            with pause("save"):  # the first save waits until memory is reserved
                self._memory.saved(step, state)
            return
        self._memory.saved(step, state)
        with pause("save"):
            self._save(step, state)

    def keep(self, step: int, *unnamed: NoReturn, **state: Any) -> None:
        """Keep the state of this step in memory without writing a file. Does nothing without ddprun.

        Call it on every rank after each optimizer step, with the arguments of `save`. It waits for nothing.
        `should_stop(step)` does the same for objects. Plain values need this call, because they are captured when you
        pass them.
        """
        _want_names("keep(step, ", unnamed)
        step = _checked_step(step)
        ids = {name: id(value) for name, value in state.items()}
        refuse_sharded({name: value for name, value in state.items() if self._whole.get(name) != ids[name]})
        self._whole = ids
        self._name_places(step, state)
        self._memory.saved(step, state, kept_alone=True)
        if self._owed is not None:
            self._owed.keep(step, state)

    def _save(
        self, step: int, state: Mapping[str, Any], rng: dict[str, Any] | None = None, *, in_thread: bool = True
    ) -> None:
        """Copy the state, and let a thread write it. rng: random states to save; None for the current ones."""
        self._owed = None
        rng = random_states.current() if rng is None else rng
        if self.rank != 0:
            self._offer(step, state, rng)
            return
        if not self._repeats:  # at a new step all ranks have passed the previous save, which need not wait for them
            self._others_pass_at = 0
        self._join()
        process.current.unsaved.add(self)
        self._unwritten = None  # free the previous copy first, because otherwise three copies would be in memory
        document = {
            "format": FORMAT,
            "step": step,
            "world_size": self.world_size,
            "rng": {0: rng},
            "state": {name: copied(state_of(value), name) for name, value in state.items()},
        }
        unwritten = _Unwritten(document, self._repeats, self.world_size > 1, os.getpid())
        if self.world_size > 1:
            self._others_pass_at = process.current.optimizer_steps + 2
            unwritten.own, unwritten.samples = of_each_rank.own(state), of_each_rank.samples(state)
        try:
            writer = self._claim_to_save()
        except OSError as error:  # the folder was removed or is read-only
            self._note_unwritten(unwritten, error)
            return
        if not in_thread:
            self._write_or_note(writer, unwritten)
            return
        # Not a daemon thread, so that the last state is written if a script ends without close().
        self._thread = threading.Thread(target=self._write_or_note, args=(writer, unwritten), name="ddpjob-snapshot")
        self._thread.start()

    def _name_half_done(self, objects: Mapping[str, Any], step: int = 0) -> None:
        """Log unfinished work, such as accumulated gradients, that a restart would lose. step: the saved step; 0 if the
        objects were loaded."""
        for name, kind in half_done.hooks_with_state(objects).items():
            self._log_once(
                f"hook of {name}",
                f"{name}: its communication hook has a state ({kind}), which is in no state_dict(): a restart does not "
                f"continue it, so the gradients differ after it",
            )
        if step and (name := self._since_step.pending(objects)):
            self._log_once(
                f"gradients of {name}",
                f"{name}: step {step} is saved while gradients wait for optimizer.step(): a restart does not continue "
                f"the accumulation, and these micro-batches are lost. Save right after an optimizer's step.",
            )
        if step and not self._last_step:  # at the first save only, because it takes 50 ms if a scheduler is missing
            name, schedule = half_done.schedule_not_saved(objects)
            if name:
                process.log(
                    f"{name}: its {schedule} is not saved: a restart begins that schedule again, unless the script "
                    f"sets it from the step. Give the scheduler to load() and save(), too."
                )
            name, key = half_done.shared_state(objects)
            if name:
                process.log(
                    f"{name}: its state {key} is the memory of a parameter: a restart separates them, so a change of "
                    f"the parameter outside of the optimizer no longer changes both. Copy it, as by p.detach().clone()."
                )
        if step:
            self._since_step.name_loader()

    def _name_places(self, step: int, state: Mapping[str, Any]) -> None:
        """Log which sampler's batches a restart would skip, and which work at the end of an epoch it would repeat."""
        if self.rank != 0:
            return
        process.current.saved_at = process.current.optimizer_steps
        for sampler in (each for each in state.values() if hasattr(each, "is_saved")):
            sampler.is_saved = True
        if ahead := [name for name, value in state.items() if getattr(value, "is_ahead", False) is True]:
            self._log_once(
                "sampler",
                f"{ahead[0]}: batches are taken before they are trained (by DataLoader workers, or read ahead by the "
                f"script), and a restart skips them. Unless the script itself skips batches, save "
                f"{ahead[0]}.state_dict(epoch=..., batches=...) instead.",
            )
        place, name = half_done.updated_at_end_of_epoch(step, state)
        if place:
            self._log_once(
                f"place in {place}",
                f"{place}: step {step} is saved at the last batch of an epoch for which {name} was updated already: a "
                f"restart goes on at the end of that epoch, and updates it again. Give {place} the next epoch and 0 "
                f"batches, or save before {name} is updated.",
            )

    def _log_once(self, what: str, text: str) -> None:
        if what not in self._told:
            self._told.add(what)
            process.log(text)

    def _claim_to_save(self) -> int:
        """Return the writer number under which this process may write. Raises OSError, SnapshotError."""
        writer = self._claim(to_save=True)
        self._must_be_newest(writer)
        claim = _claim_of(self.folder, writer)
        if claim is None:  # the claim file was deleted, and the next attempt would take the same writer number
            create_exclusively(self.folder, writer, self._own_claim.as_json())
        elif claim != self._own_claim:
            raise self._superseded()
        writers.note_saving(self.folder, writer)
        return writer

    def wait(self) -> None:
        """Wait until the last saved state is in the folder; write the state again if the write failed.

        Raises SnapshotError with the reason and the newest step in the folder if it cannot be written.
        """
        self._join()
        if (owed := self._owed) is not None and owed.pid == os.getpid() and (now := owed.now()) is not None:
            with pause("save"):
                self._save(*now, in_thread=False)
        self._finish()

    def _finish(self) -> None:
        """Wait for the thread of the last `save`, and write the state again if that thread failed."""
        self._join()
        unwritten, self._unwritten = self._unwritten, None
        if self._owed is None:
            process.current.unsaved.discard(self)
        if unwritten is None or unwritten.pid != os.getpid():
            return
        with pause("save"):
            try:
                self._write(self._claim_to_save(), unwritten)
            except SnapshotError:
                raise
            except Exception as error:
                step = unwritten.document["step"]
                raise SnapshotError(f"the state of step {step} was not saved: {self._why_unwritten(error)}.") from error

    def close(self) -> None:
        """Wait as `wait` does, at the end of the script.

        Also raises SnapshotError if training resumed from a state that only memory had, and the script then neither
        saved nor passed a step to `keep` or `should_stop`. That state would be lost.
        """
        self.wait()
        owed = self._owed
        if owed is None or owed.pid != os.getpid() or self.rank != 0 or not owed.is_lost():
            return
        with contextlib.suppress(OSError):
            if any(self._version(entry) == owed.version for entry in _entries(self.folder)):
                return
        raise SnapshotError(
            f"the steps after {owed.version.step} were not saved, and the state of step {owed.version.step}, from "
            f"which they went on, was only in memory, {self._newest()}; save the last step, or call should_stop(step) "
            f"after each step."
        )

    def _join(self) -> None:
        """Wait for the writing thread, and raise its error if this process must end."""
        if self._thread is not None:
            with pause("save"):
                self._thread.join()
            self._thread = None
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    def _write_or_note(self, writer: int, unwritten: "_Unwritten") -> None:
        try:
            self._write(writer, unwritten)
        except SnapshotError as error:
            self._problem = error
        except Exception as error:
            with contextlib.suppress(OSError):
                if _highest_writer(self.folder) > writer:  # the file is gone, because the newer writer has removed it
                    self._problem = self._superseded()
                    return
            self._note_unwritten(unwritten, error)

    def _write(self, writer: int, unwritten: "_Unwritten") -> None:
        document = unwritten.document
        if unwritten.lacks_rng:
            unwritten.lacks_rng = False
            others = self._collected(document["step"], unwritten.repeat)
            document["rng"] |= {rank: its.rng for rank, its in others.items()}
            is_lacking = len(others) < self.world_size - 1
            known = self._differ if is_lacking else set()
            parts = {rank: its.own for rank, its in others.items()}
            document["ranks"] = of_each_rank.differing(unwritten.own, parts, known)
            unwritten.lacks_own = is_lacking and bool(document["ranks"])
            self._differ |= of_each_rank.names_in(document["ranks"])
            for name in of_each_rank.too_large(document["ranks"]):
                self._log_once(
                    f"large {name}",
                    f"{name}: its state differs between the ranks and has more than "
                    f"{of_each_rank.OWN_BYTES_MAX >> 20} MiB: a restart does not give each rank its own",
                )
            for rank, name in of_each_rank.missing(document["state"], others):
                self._log_once(
                    f"missing {name}",
                    f"{name}: rank {rank} saves it and rank 0 does not, so it is in no snapshot, and rank {rank} "
                    f"cannot resume: give save() the same names on every rank",
                )
            for name in of_each_rank.out_of_step(unwritten.samples, (its.samples for its in others.values())):
                self._log_once(
                    f"replicas of {name}",
                    f"{name}: its parameters differ between the ranks: a restart does not give each rank its own, "
                    f"all go on from rank 0's",
                )
        self._remove_left(writer)  # before the write, because temporary files of a killed process may fill the disk
        self._publish(writer, document)
        process.current.unsaved.discard(self)
        report_saved(document["step"])
        try:
            # keep older files if this one lacks a rank's objects: only an older one may be complete for every rank
            if not unwritten.lacks_own:
                self._prune(writer)
        except OSError as error:
            process.log(f"older snapshots in {self.folder} cannot be removed: {reason(error)}")

    def _note_unwritten(self, unwritten: "_Unwritten", error: BaseException) -> None:
        """Report that a save failed. Its copy of the state is kept until the next save or the end."""
        self._unwritten = unwritten
        self._report_failed(f"the state of step {unwritten.document['step']} was not saved", error)

    def _report_failed(self, what: str, error: BaseException) -> None:
        why = f"{what}: {self._why_unwritten(error)}"
        process.log(f"{why}; the training goes on, and the next save tries again")
        report_save_failed(why)

    def _why_unwritten(self, error: BaseException) -> str:
        """Return for example "disk full: No space left on device (errno 28), in /ckpt; the newest snapshot in the
        folder is of step 100".
        """
        return f"{reason(error)}, {self._newest(reason(error))}"

    def _newest(self, known: str = "") -> str:
        """Describe the newest state in the folder. known: a reason that the message already has."""
        try:
            entries = _entries(self.folder)
            newest = (
                f"; the newest snapshot in the folder is of step {entries[0].step}"
                if entries
                else "; there is no snapshot"
            )
        except OSError as problem:
            newest = "" if reason(problem) == known else f", which cannot be read: {reason(problem)}"
        return f"in {self.folder}{newest}"

    def _publish(self, writer: int, document: dict[str, Any]) -> None:
        tmp = writers.tmp_path(self.folder, writer)
        _being_written.add(tmp.name)
        try:
            with _HashingFile(tmp) as file:
                try:
                    torch.save(document, file)
                except RuntimeError as error:  # torch's zip writer hides the OSError of a failed write
                    raise (file.problem or error) from None
                file.flush()
                os.fsync(file.fileno())
            self._must_be_newest(writer)
            name = f"step-{document['step']:012d}.writer-{writer:06d}.{file.sha256.hexdigest():.16}.pt"
            os.rename(tmp, self.folder / name)
            _fsync_folder(self.folder)
        except BaseException:
            with contextlib.suppress(OSError):
                tmp.unlink()
            raise
        finally:
            _being_written.discard(tmp.name)

    def _prune(self, writer: int) -> None:
        """Remove older states and files left by crashes. Keeps everything that a newer attempt may read or write."""
        for entry in _entries(self.folder)[self._states_max :]:
            self._must_be_newest(writer)
            entry.path.unlink(missing_ok=True)
        self._remove_left(writer)

    def _remove_left(self, writer: int) -> None:
        for name in os.listdir(self.folder):
            alive, tmp = _ALIVE_NAME.fullmatch(name), _TMP_NAME.fullmatch(name)
            # Remove temporary files of this writer number and of lower ones, unless this process is writing them.
            is_left = tmp and int(tmp[1]) <= writer and name not in _being_written
            if (alive and int(alive[1]) < writer) or is_left:
                with contextlib.suppress(OSError):
                    (self.folder / name).unlink()

    # ---- who may write -------------------------------------------------------------------------------------

    def _claim(self, *, to_save: bool = False) -> int:
        """Return the writer number of this process: taken once, as the highest number in the folder plus one.

        A process that only loads may share the number of an earlier process of the same attempt and generation. Raises
        OSError, SnapshotError.
        """
        if self._writer is not None and not (to_save and self._writer not in self._taken()):
            return self._writer
        self.folder.mkdir(parents=True, exist_ok=True)
        while True:
            highest = _highest_writer(self.folder)
            claim = _claim_of(self.folder, highest)
            is_shared = claim == self._own_claim and highest not in self._taken()
            # Share the writer number of our attempt, except to save if an earlier process has taken this number.
            if claim == self._own_claim and not (is_shared and to_save):
                break
            if claim is not None:
                self._refuse_folder_of(claim, highest)
            if create_exclusively(self.folder, highest + 1, self._own_claim.as_json()):
                highest += 1
                is_shared = False
                self._taken().add(highest)
                break
        self._writer = highest
        folder = self.folder  # the thread must not have a reference to self, which would keep the Snapshot alive
        if not (is_shared and writers.running_here(folder, highest)):
            writers.begin(self, writers.alive_path(folder, highest), lambda: _highest_writer(folder) <= highest)
        return highest

    def _taken(self) -> set[int]:
        """Return the writer numbers that this process has taken in the folder."""
        return process.current.writers.setdefault(os.path.realpath(self.folder), set())

    def _refuse_folder_of(self, claim: "_Claim", writer: int) -> None:
        """Raise Superseded for a folder of a later attempt, SnapshotError if another running process or job owns it."""
        if claim.job == self._own_claim.job:
            if claim > self._own_claim:
                raise self._superseded()
            number = writers.running_here(self.folder, writer) if claim == self._own_claim else ""
            if number and writers.saves(self.folder, writer):
                raise SnapshotError(
                    f"folder: {self.folder} is in use by process {number}, which is running. Give each run a folder of "
                    f"its own, or end that process first. Otherwise each would remove the other's snapshots."
                )
            return
        who = writers.named(claim.job)
        if writers.is_running(self.folder, writer, who):
            raise SnapshotError(
                f"folder: {self.folder} is in use by {who}, which is running. Give each job a folder of its own, or "
                f"end that job first: two jobs that write into one would go on from each other's states."
            )

    def _must_be_newest(self, writer: int) -> None:
        if _highest_writer(self.folder) > writer:
            raise self._superseded()

    def _superseded(self) -> Superseded:
        claim = _claim_of(self.folder, _highest_writer(self.folder))
        who = "a newer writer" if claim is None else f"{claim} of {writers.named(claim.job)}"
        who = f"another process of {who}" if claim == self._own_claim else who
        return Superseded(
            f"snapshot folder {self.folder} now belongs to {who}: this process, of {self._own_claim}, must end."
        )

    # ---- load ----------------------------------------------------------------------------------------------

    def load(self, *unnamed: NoReturn, **objects: Any) -> int:
        """Restore the newest complete state and return its step; 0 if there is none. Call it on every rank.

        objects  under the names given to `save`: objects with load_state_dict(), dicts (filled in place) or tensors
                 (copied into). Afterwards `self.state` has every saved value, for numbers and strings. For a model or
                 an optimizer it has the object's own state_dict(), because a copy would need the memory twice.

        Rank 0 chooses the state and all ranks read the same bytes. A damaged file is reported on stderr and the file
        before it is used. Raises on all ranks: StateError if a name was not saved, Superseded if a newer attempt owns
        the folder.
        """
        _want_names("load(", unnamed)
        refuse_sharded(objects)
        self._finish()
        self._since_step.watch(objects)
        if self.rank == 0:
            of_each_rank.name_calls_without_ddp(objects)
            self._name_half_done(objects)
        self._memory.begin()
        found = self._memory.find(objects)
        read = self._read(found, objects)
        if read is None and found is not None:
            fetched = self._memory.fetch(found, objects, self._names_in_folder)
            if fetched is not None:
                return self._go_on_from_memory(found, objects, fetched)
            read = self._read(None, objects)
        if read is None:
            self.state = self._memory.loaded(0, objects, {})
            is_restart = self._own_claim[1:] > (1, 0, 0)
            # not logged for a second Snapshot, which may be empty although training resumed from the first
            if self.rank == 0 and is_restart and process.current.loader is self._memory:
                self._log_once("begins", f"begins at step 0: there is no state in {self._folder or 'memory'}")
            return 0
        self._owed = None
        entry, document = read
        claim = _claim_of(self.folder, entry.writer)
        before = claim.job if claim is not None and claim.job != self._own_claim.job else None
        restore(objects, document["state"], str(entry.path))
        self.state = self._memory.loaded(int(document["step"]), objects, without_copies(objects, document["state"]))
        random_states.restore(document, self.rank, self.world_size)
        random_states.continue_from_here()
        if self.rank == 0:
            self._log_origin(document, entry.path, before)
        origin: dict[str, Any] = {} if before is None else {"goesOnFrom": writers.named(before)}
        report_resumed(document["step"], f"{self.folder}{_seeded(self._late_in(document))}", **origin)
        return int(document["step"])

    def _read(self, found: FoundState | None, objects: Mapping[str, Any]) -> "tuple[_Entry, dict[str, Any]] | None":
        """Return the newest complete state in the folder, with this rank's own parts; None if there is none.

        found: the state in memory; older files are not used. Files that lack objects of a rank that did not save in
        time are skipped, because an older file may have them.
        """
        passed: set[Path] = set()
        problem: of_each_rank.LateError | None = None
        while (chosen := self._agreed(found, passed)) is not None:
            entry, file = chosen
            with file:
                document = _decoded(file, entry.path)
            ranks = self._ranks or self.world_size
            try:
                document["state"] = of_each_rank.state_for(document, self.rank, ranks, list(objects))
            except of_each_rank.LateError as error:
                problem = problem or error
                passed.add(entry.path)
                continue
            if problem is not None and self.rank == 0:
                process.log(f"{str(problem).rstrip('.')}; the snapshot of step {document['step']} is used")
            self._differ = of_each_rank.names_in(document.get("ranks", {}))
            return entry, document
        if problem is not None and found is None:
            raise problem
        return None

    def _names_in_folder(self) -> list[str]:
        """Return the names in the newest state that this job has saved; none if it cannot be read. Reads no tensors."""
        with contextlib.suppress(Exception):  # the other ranks wait; and load() skips a damaged file, too
            for entry in _entries(self.folder):
                if self._version(entry) is not None:
                    with open(own_files.open_file(entry.path, os.O_RDONLY), "rb") as file:
                        return [*torch.load(f"/dev/fd/{file.fileno()}", mmap=True, weights_only=True)["state"]]
        return []

    def _go_on_from_memory(self, found: FoundState, objects: Mapping[str, Any], fetched: Fetched) -> int:
        step = found.held.version.step
        restore(objects, fetched.state, "the memory of the pods")
        state = without_copies(objects, fetched.state)
        random_states.continue_from_here()
        self.state = self._memory.resumed(found, objects, fetched._replace(state=state))
        origin = f"the memory on the node{'s'[: len(found.ranks) > 1]} of {_ranks(found.ranks)}"
        # Say "a copy in", because otherwise the message claims that no step was lost; a copy may be some steps old.
        origin = f"{'a copy in ' if found.held.every else ''}{origin}{_seeded(fetched.seeded, resized=fetched.resized)}"
        if self._folder is not None:
            before = {} if self._owed is None else self._owed.objects  # from an earlier load() of other objects
            self._owed = _Owed(found.held.version, {**before, **objects}, self.state, by_value=fetched.by_value)
            process.current.unsaved.add(self)
        if self.rank == 0:
            process.log(f"resumed at step {step} from {origin}")
        report_resumed(step, origin, saved=False)
        return step

    def _log_origin(self, document: Mapping[str, Any], path: Path, before: str | None) -> None:
        """Log the origin of the loaded state. before: UID of the job that saved it, if that is another job."""
        whose = ""
        if before is not None:
            whose = f", saved by {writers.named(before)}; to begin at step 0, give this job a folder of its own"
        process.log(f"resumed at step {document['step']} from {self.folder}{whose}")
        if seeded := self._late_in(document):
            process.log(
                f"{path} has no random state of {_ranks(seeded)}, which did not save in time: seeded from rank 0's, "
                f"the same way at each resume."
            )

    def _late_in(self, document: Mapping[str, Any]) -> list[int]:
        """Return the ranks whose random states are missing in the document, because they did not save in time."""
        ranks = range(self.world_size) if document["world_size"] == self.world_size else range(0)
        return [rank for rank in ranks if rank not in document["rng"]]

    def _choose(self, found: FoundState | None, damaged: Collection[Path]) -> "_Entry | None":
        """Return the newest state in the folder that is not in `damaged`. found: the state in memory; older files are
        not used."""
        try:
            self._claim()
            entries = _entries(self.folder)
        except OSError as error:
            if found is None:
                made = "" if self.folder.is_dir() else " cannot be made"
                raise SnapshotError(f"folder: {self.folder}{made}: {reason(error)}.") from error
            # Warn that only memory has this state: if all nodes are lost now, the state is lost too.
            self._report_failed(f"the state of step {found.held.version.step} is only in memory", error)
            return None
        for entry in entries:
            if found is not None and not is_newer(self._version(entry), found.held):
                return None
            if entry.path not in damaged:
                return entry
        return None

    def _version(self, entry: "_Entry") -> Version | None:
        """Return the version of this state; None if another job wrote it, or the writer's claim file is missing."""
        claim = _claim_of(self.folder, entry.writer)
        if claim is None or claim.job != self._own_claim.job:
            return None
        return claim.version(entry.step)

    def _agreed(self, found: FoundState | None, passed: Collection[Path]) -> "tuple[_Entry, BinaryIO] | None":
        """Return rank 0's choice and the opened file, the same on all ranks; None if there is no state.

        An error on rank 0 is raised on all ranks, which would otherwise wait for it. All ranks hash the file at the
        same time: it takes about a second per gigabyte, and waiting for rank 0 would double that. found: the state in
        memory; only a newer file is chosen. passed: files to skip.
        """
        damaged = set(passed)
        while self._folder is not None:
            entry = self._broadcast_or_raise(lambda: self._choose(found, damaged))
            if entry is None:
                return None
            file = _opened(entry)
            if (everywhere := self._on_all_ranks(file)) is not None:
                return entry, everywhere
            damaged.add(entry.path)
            if file is not None:
                file.close()
            if self.rank == 0:
                process.log(
                    f"snapshot {entry.path} is damaged (its bytes do not match the digest in its name): skipped, the "
                    f"one before it is used"
                )
        return None

    def _broadcast_or_raise(self, choose: Callable[[], Any]) -> Any:
        """Return rank 0's choice, or raise its SnapshotError, on all ranks. Also set the folder's name to rank 0's."""
        answer: Any = None
        if self.rank == 0 or self.world_size == 1:
            try:
                answer = choose()
            except SnapshotError as error:
                answer = error
            except Exception as error:  # any error: the other ranks are waiting for rank 0's answer
                answer = SnapshotError(f"{self.folder}: {reason(error)}.")
        answer, self._name = self._broadcast((answer, self._name))
        if isinstance(answer, SnapshotError):
            raise answer
        return answer

    def _on_all_ranks(self, file: BinaryIO | None) -> BinaryIO | None:
        """Return the file if all ranks can read it, else a copy of rank 0's file; None if rank 0 cannot read it."""
        if self.world_size == 1:
            return file
        missing = gather.numbers(torch.tensor([int(file is None)], device="cpu")).flatten().tolist()
        if missing[0] or not any(missing):
            return None if missing[0] else file
        data = file.read() if file is not None and self.rank == 0 else None
        if file is not None:
            file.close()
        size = self._broadcast(None if data is None else len(data))
        received = bytearray(size if data is None else data)
        gather.broadcast(torch.frombuffer(received, dtype=torch.uint8), 0, is_written=self.rank != 0)
        return io.BytesIO(received)

    def _broadcast(self, value: Any) -> Any:
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=gather.device_for(None))
        return box[0]

    # ---- what the other ranks have ------------------------------------------------------------------

    def _store(self) -> Any:
        """Return the store of the group; None if there is no group, or the group was left."""
        return stop.store_of_group() if self._world is None else store_of(self._world)

    def _offer(self, step: int, state: Mapping[str, Any], rng: dict[str, Any]) -> None:
        """Send this rank's random states and own objects to rank 0. Uses the store, because a collective could hang."""
        store = self._store()
        if store is None:
            return
        handed = of_each_rank.Handed(rng, of_each_rank.own(state), of_each_rank.samples(state))
        value = handed.as_bytes()
        self._offered.append(_offer_key(self._name, step, self._repeats, self.rank))
        # Rank 0 serves the store. If it has died, the next collective reports that.
        with contextlib.suppress(RuntimeError):
            store.set(self._offered[-1], value)
            if len(self._offered) > OFFERS_MAX:  # rank 0 does not need the oldest values any more
                store.delete_key(self._offered.pop(0))

    def _collected(self, step: int, repeat: int) -> dict[int, of_each_rank.Handed]:
        """Return the random states and own objects of the other ranks that have saved this step, by rank.

        Waits at most RNG_WAIT_SECONDS. A rank that missed the previous save is not waited for until its late value has
        arrived, because otherwise every save would wait if only rank 0 saves.
        """
        store = self._store()
        missing = {rank: _offer_key(self._name, step, repeat, rank) for rank in range(1, self.world_size)}
        found: dict[int, of_each_rank.Handed] = {}
        if store is None:
            return found
        deadline = time.monotonic() + RNG_WAIT_SECONDS
        # if the group is being left, write the state without the others' random states
        with contextlib.suppress(RuntimeError):
            silent = {rank for rank, key in self._late.items() if not (store.check([key]) and store.delete_key(key))}
            while missing:
                is_last = time.monotonic() > deadline or process.current.optimizer_steps >= self._others_pass_at
                for rank in [rank for rank, key in missing.items() if store.check([key])]:
                    key = missing.pop(rank)
                    found[rank] = of_each_rank.from_bytes(store.get(key))
                    store.delete_key(key)
                if missing.keys() <= silent or is_last:
                    break
                time.sleep(0.005)
        self._late = missing
        if missing:
            self._log_once(
                "late",
                f"{_ranks(list(missing))} did not save step {step}: from the snapshot a restart does not continue the "
                f"random numbers there (dropout, augmentation), nor what else differs between the ranks. Call save() "
                f"on every rank.",
            )
        return found


@functools.cache
def _count_optimizer_steps() -> None:
    """Count optimizer steps of this process, with a hook that is installed once.

    The hook is never removed: torch iterates the dict of global hooks in step() (torch/optim/optimizer.py:517, torch
    2.13.0), and a removal during that loop raises RuntimeError.
    """

    def count(optimizer: Any, *_: Any) -> None:
        process.current.optimizer_steps += 1
        process.current.steps_of[id(optimizer)] += 1

    register_optimizer_step_pre_hook(count)


@dataclass
class _Unwritten:
    """A state that was passed to `save` and is not in the folder yet."""

    document: dict[str, Any]
    """The value for torch.save."""
    repeat: int
    """Number of earlier saves of the same step."""
    lacks_rng: bool
    """True if the random states of the other ranks must still be collected."""
    pid: int
    """Process that saved it. A fork of that process must not write it."""
    lacks_own: bool = False
    """True if a rank was late and objects differ between ranks."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """Objects that may differ on other ranks."""
    samples: Mapping[str, list[str]] = field(default_factory=dict)
    """Samples of objects that should be the same on all ranks."""


class _Owed:
    """The state that training resumed from, if only memory had it. A script that saves nothing afterwards must not exit
    with 0, because this state would be lost."""

    def __init__(
        self, version: Version, objects: Mapping[str, Any], state: Mapping[str, Any], *, by_value: bool
    ) -> None:
        self.version, self.pid = version, os.getpid()
        # Hold averages of weights weakly: otherwise memory would not notice that the script replaces one.
        self._averages = weakref.WeakValueDictionary({name: objects[name] for name in untrained(objects)})
        self._others = {name: value for name, value in objects.items() if name not in self._averages}
        self._kept: tuple[int, Mapping[str, Any], int] | None = None  # last keep(): step, state, optimizer_steps
        self._state, self._rng = state, random_states.current()
        self._by_value = by_value
        self._began = process.current.optimizer_steps
        process.current.marked = None

    def keep(self, step: int, state: Mapping[str, Any]) -> None:
        """Record the state that the script has passed to `Snapshot.keep`."""
        self._kept = step, state, process.current.optimizer_steps

    @property
    def objects(self) -> dict[str, Any]:
        """The objects that the script has loaded and not dropped, by name."""
        return {**self._others, **self._averages}

    @property
    def _has_stepped(self) -> bool:
        return process.current.optimizer_steps > self._began

    def step_now(self) -> int | None:
        """Return the step number of the current state; None if unknown."""
        now, marked = process.current.optimizer_steps, process.current.marked
        if not self._has_stepped:
            return self.version.step
        if self._kept is not None and self._kept[2] == now:
            return self._kept[0]
        knows_all = not self._by_value and self.objects.keys() == self._state.keys()
        return marked[0] if knows_all and marked is not None and marked[1] == now else None

    def now(self) -> tuple[int, Mapping[str, Any], dict[str, Any] | None] | None:
        """Return the step number, state and random states of the end of the last step; None if the number is unknown.

        Only models and optimizers are the present ones: since then a DataLoader may have taken batches from a sampler,
        and the script may have drawn random numbers. Random states are None for the current ones.
        """
        if (step := self.step_now()) is None:
            return None
        kept, keeper, last = self._kept, process.current.keeper, None
        objects = kept[1] if kept is not None and self._has_stepped and kept[0] == step else self.objects
        if not self._has_stepped:
            last = step, self._state, self._rng
        elif keeper is not None:
            last = keeper.at_boundary()
        if last is None or last[0] != step:
            return step, objects, None
        return step, {**objects, **last[1], **large_of(objects)}, last[2]

    def is_lost(self) -> bool:
        """True if the script made steps without `keep` or `should_stop`, so that the current step is unknown."""
        return self._has_stepped and self._kept is None and process.current.marked is None


def _write_at_end(owner: "weakref.ref[Snapshot]") -> None:
    """Write the last state at the end of a script that did not call close(). Fail the process if that is impossible."""
    snapshot, error = owner(), termination.ending()
    is_failure = error is not None and not isinstance(error, Stopped) and termination.exit_code(error) != 0
    if snapshot is None or is_failure:  # a failure is already reported, and the other ranks should not wait for a disk
        return
    try:
        snapshot.close()
    except SnapshotError as problem:
        stop.fail_at_exit(problem)
    except Exception as problem:  # at exit no caller would get an exception
        process.log(str(problem))


def _offer_key(name: str, step: int, repeat: int, rank: int) -> str:
    return f"own/{name}/{step}/{repeat}/{rank}"


def _ranks(ranks: Sequence[int]) -> str:
    """Return for example "ranks 1, 2, 3"; at most 8 ranks."""
    return f"rank{'s'[: len(ranks) > 1]} {', '.join(map(str, ranks[:8]))}{' …' if len(ranks) > 8 else ''}"


def _seeded(ranks: Sequence[int], *, resized: bool = False) -> str:
    """Return a suffix for the log line about a loaded state: these ranks were seeded, because their random states are
    missing. resized: because the number of ranks has changed."""
    if not ranks:
        return ""
    why = f"random states of {_ranks(ranks)} were lost, and"
    why = "the number of ranks has changed; random states" if resized else why
    return f" ({why} are seeded the same way at each resume)"


def _want_names(call: str, unnamed: Sequence[object]) -> None:
    """Raise TypeError for objects without the name under which they are saved."""
    if unnamed:
        kinds = ", ".join(type(value).__name__ for value in unnamed)
        raise TypeError(
            f"{call}…) needs a name for each object, for example {call}model=model), and was given: {kinds}"
        )


def _checked_step(step: Any) -> int:
    try:
        whole = operator.index(step)  # an int, because torch.load(weights_only=True) cannot read numpy's integers
    except TypeError:
        raise ConfigurationError(f"step: {step!r} is not a whole number.") from None
    if not 1 <= whole <= STEP_MAX:
        raise ConfigurationError(f"step: {whole} must be from 1 to {STEP_MAX}; 0 means that there is no snapshot.")
    return whole


# ---- files -------------------------------------------------------------------------------------------------


class _Entry(NamedTuple):
    """One state in the folder. Ordered by writer, then step, then time."""

    writer: int
    step: int
    modified: int
    digest: str
    path: Path


def _entries(folder: Path) -> list[_Entry]:
    """Return the states in the folder, newest first."""
    entries = []
    for name in os.listdir(folder):
        if match := _STATE_NAME.fullmatch(name):
            with contextlib.suppress(FileNotFoundError):
                status = (folder / name).lstat()
                if stat.S_ISREG(status.st_mode):  # links and pipes are ignored, whatever their names are
                    entries.append(_Entry(int(match[2]), int(match[1]), status.st_mtime_ns, match[3], folder / name))
    return sorted(entries, reverse=True)


def _opened(entry: _Entry) -> BinaryIO | None:
    """Open the file of a state for reading; None if it is missing or its digest does not match.

    Hashes the file in chunks, because otherwise each rank of a node would hold the file in memory next to the tensors.
    """
    with contextlib.suppress(OSError), contextlib.ExitStack() as otherwise:
        file = otherwise.enter_context(open(own_files.open_file(entry.path, os.O_RDONLY), "rb"))
        sha256, piece = hashlib.sha256(), memoryview(bytearray(HASHED_BYTES))
        while count := file.readinto(piece):
            sha256.update(piece[:count])
        if sha256.hexdigest().startswith(entry.digest):
            file.seek(0)
            otherwise.pop_all()
            return file
    return None


class _HashingFile(io.BufferedWriter):
    """A new file that hashes the written bytes. torch.save only appends, so the digest is complete at the end."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "x"))
        self.sha256 = hashlib.sha256()
        self.problem: OSError | None = None

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        try:
            return super().write(data)
        except OSError as error:
            self.problem = self.problem or error
            raise


def _highest_writer(folder: Path) -> int:
    """Return the highest writer number of claim files and states; 0 if there is none. States are included because the
    claim files may have been deleted."""
    matches = [_WRITER_NAME.fullmatch(name) for name in os.listdir(folder)]
    states = [entry.writer for entry in _entries(folder)]
    return max([int(match[1]) for match in matches if match] + states, default=0)


class _Claim(NamedTuple):
    """Owner of a writer number: a job, its attempt, the leader of its ranks and their generation."""

    job: str
    attempt: int
    term: int  # number of ddprun's leader in the attempt; 0 for the first
    generation: int

    def __str__(self) -> str:
        return f"attempt {self.attempt}" + (f", generation {self.generation}" if self.generation else "")

    def version(self, step: int) -> Version:
        """Return the version of a state that this owner has saved at this step."""
        return Version(self.attempt, numbered(self.term, self.generation), step)

    def as_json(self) -> str:
        """Return the claim as JSON, without a generation of 0 and a term of 0, which older versions do not know."""
        usual = {"generation": 0, "term": 0}
        return json.dumps({name: value for name, value in self._asdict().items() if usual.get(name) != value})


def _claim_of(folder: Path, writer: int) -> _Claim | None:
    try:
        claim = json.loads(own_files.read_file(writers.claim_path(folder, writer)))
        job, attempt = claim["job"], int(claim["attempt"])
        term, generation = int(claim.get("term", 0)), int(claim.get("generation", 0))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None  # the file is missing, or is no claim
    return _Claim(job, attempt, term, generation) if isinstance(job, str) else None


def create_exclusively(folder: Path, writer: int, content: str) -> bool:
    """Create the claim file of this writer number. False if another process created it first. Raises OSError."""
    path = writers.claim_path(folder, writer)
    tmp = writers.tmp_path(folder, writer)
    try:
        writers.write_new(tmp, content.encode())
        os.link(tmp, path)  # fails if the path exists; other processes never see a half-written file
    except FileExistsError:
        return False
    except OSError as error:
        # Some network and FUSE file systems have no hard links.
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EACCES):
            raise
        with contextlib.suppress(FileExistsError), open(path, "x") as file:
            return bool(file.write(content))
        return False
    finally:
        tmp.unlink(missing_ok=True)
    _fsync_folder(folder)
    return True


def _fsync_folder(folder: Path) -> None:
    """Make the rename survive a power loss. Errors are ignored: some network file systems refuse fsync on a folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- the document ------------------------------------------------------------------------------------------


def _decoded(file: BinaryIO, path: Path) -> dict[str, Any]:
    try:
        document = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # the bytes are intact, but a different torch version may have written them
        raise SnapshotError(
            f"{path}: this torch {torch.__version__} cannot read it: {reason(error).splitlines()[0]}"
        ) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        version = document.get("format") if isinstance(document, dict) else None
        raise StateError(f"{path}: format {version}, this library reads {FORMAT}.")
    return document
