"""`Snapshot`: the training state in a folder that survives the processes. Written by rank 0, read by all.

Files, all in one folder:
    step-000000000312.writer-000003.9f86d081884c7d65.pt   a state; readable with torch.load(weights_only=True)
    writer-000003.json                                    who the third writer is: {"job": uid, "attempt": 2}, and
                                                          "generation" where ranks were started again in their pods
    writer-000003.alive                                   its process runs (writers.py)
    .tmp-000003-4711-1                                    a file being written, or left by a crash
A state's name carries its step, its writer and the first 16 hexadecimal digits of its bytes' SHA-256. The name appears
by rename, after fsync: a file under such a name is complete, or was damaged later, which the digest shows.

Fencing. Every attempt of a job that touches the folder, and under ddprun every generation of its ranks, takes the next
writer number, once, by an exclusive create. So does every further process that saves, because a run that begins again
at step 0 has lower steps than the run before it; one that only loads goes on with the number of that run. The
newest state is that of the highest (writer, step), never of the highest step alone, and names of two writers never
meet: what a process of an old attempt writes late can neither overwrite nor hide a newer attempt's state. Besides, it
checks for a higher number before it writes, publishes and prunes, and ends with Superseded. A race between that check
and the rename costs a file too many in the folder, nothing more.

A save that fails (a full disk, a folder that is gone) does not end the training: it is reported, and the next save
tries again. `wait`, `close`, leaving the group and the end of the script write the last state, or fail.

A folder is one job's. Another job takes it over only once the process of the last claim has ended or is silent for a
minute, says so, and goes on from that state; until then it is refused.
"""

import contextlib
import errno
import functools
import hashlib
import io
import json
import math
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
from typing import Any, BinaryIO, NamedTuple

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddpjob import own_files, process
from ddpjob.checkpoint import writers
from ddpjob.checkpoint.in_memory.door import InMemory
from ddpjob.checkpoint.in_memory.recall import Fetched
from ddpjob.checkpoint.reasons import reason
from ddpjob.checkpoint.state import half_done, of_each_rank, random_states
from ddpjob.checkpoint.state.state_dicts import copied, refuse_sharded, restore, state_of, without_copies
from ddpjob.errors import ConfigurationError, SnapshotError, StateError, Stopped, Superseded
from ddpjob.group import gather, stop
from ddpjob.group.join import World, active, before_leaving, rank_in_group, store_of
from ddpjob.reporting import termination
from ddpjob.reporting.progress import pause, report_resumed, report_save_failed, report_saved
from ddpjob_core.memory import Found, Version, is_newer

FORMAT = 1
STEP_MAX = 10**12 - 1  # of the digits in a state's name
BROADCAST_CHUNK_BYTES = 64 * 1024 * 1024
HASHED_BYTES = 1024 * 1024
OFFERS_MAX = 3  # states of one rank that wait in the store; rank 0 is at most one save behind
RNG_WAIT_SECONDS = 2.0  # how long the writing thread waits for the other ranks' random states; training does not wait

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")  # a Path has made one slash of two
_STATE_NAME = re.compile(r"step-(\d{12})\.writer-(\d{6,})\.([0-9a-f]{16})\.pt")
_WRITER_NAME = re.compile(r"writer-(\d{6,})\.json")
_ALIVE_NAME = re.compile(r"writer-(\d{6,})\.alive")
_TMP_NAME = re.compile(r"\.tmp-(\d{6,})-\d+-\d+")
# Of this process, and not of a Snapshot: two of them may write into one folder at once.
_being_written: set[str] = set()


class Snapshot:
    """Saves and resumes the training state.

        snapshot = ddpjob.Snapshot("snapshots", world)
        step = snapshot.load(model=model, optimizer=optimizer, sampler=sampler)    # 0 where there is none
        ...
            snapshot.save(step, model=model, optimizer=optimizer, sampler=sampler)
        snapshot.close()

    folder  on a volume that outlives the pod; made if absent. Where the nodes do not share it, rank 0's counts and its
            bytes are sent to the ranks that cannot read them. None: the state is in memory alone.
    world   by default the one of `init`; else the group that the script has made is used, else rank 0 of 1. Once the
            group is left, each rank reads by itself, and rank 0 alone saves.
    keep    newest states that stay; at least 1.
    memory  under ddprun, keep the state in the pod's memory as well, where a restart finds it at the last step.

    The random states of Python, numpy (if imported), torch and this rank's CUDA device are saved for each rank that
    calls `save`. A resume at the same number of ranks restores each rank's own; at another number every rank is seeded
    from the saved states, the step and its rank, so that it repeats itself, but not the old order.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        world: World | None = None,
        keep: int = 3,
        *,
        memory: bool = True,
    ) -> None:
        if not isinstance(keep, int) or keep < 1:  # 2.5 would fail only at the fourth save
            raise ConfigurationError(f"keep: {keep!r} must be a whole number of at least 1.")
        if folder is None and not memory:
            raise ConfigurationError("folder: none, and memory=False: nothing would be saved. Name a folder.")
        if _URL.match(str(folder)):
            raise ConfigurationError(
                f"folder: {folder} is a URL, and would be a folder beside the script. Mount the volume, and give the "
                f"path of a folder in it."
            )
        self._folder = None if folder is None else Path(folder)
        self._states_max = keep
        self._world = world or active()
        self._ranks = 0  # of a group that is left
        if self._world is not None:
            self.rank, self.world_size = self._world.rank, self._world.world_size
        elif process.current.left is not None and process.torch_group() is None:
            self.rank, self.world_size = process.current.left.rank, 1  # there is nobody to ask
            self._ranks = process.current.left.world_size
        else:
            self.rank, self.world_size = rank_in_group("pass world=")
        attempt = self._world.attempt if self._world is not None else int(os.environ.get("DDPJOB_ATTEMPT") or 1)
        generation = int(os.environ.get("DDPJOB_GENERATION") or 0)
        self._own_claim = _Claim(os.environ.get("DDPJOB_UID", ""), attempt, generation)
        self._writer: int | None = None
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None  # for which the process must end
        self._unwritten: _Unwritten | None = None  # the last state that was saved, where it is not in the folder
        self._owed: _Owed | None = None  # the state that memory alone had, until the folder has it or a newer one
        self._late: dict[int, str] = {}  # ranks without a random state in the file before, and where it was expected
        self._name = str(folder)  # among the ranks; `load` makes it rank 0's, because each node may have its own path
        self._others: _OthersSaved | None = None  # of the last save
        self._differ: set[str] = set()  # objects of which ranks were seen to have their own
        self._named_large: set[str] = set()  # objects of which the log has said that they are too large
        self._named_late = False  # whether the log has named ranks that do not save
        self._offered: list[str] = []
        self._last_step, self._repeats = 0, 0
        self._reads_ahead: str | None = None  # the sampler of which that was said
        self._has_begun = False  # at step 0, and said so
        self.state: dict[str, Any] = {}
        self._memory = InMemory(self._world, attempt, generation, wanted=memory, has_folder=folder is not None)
        self._since_step = half_done.SinceLastStep()
        self._named_half: set[str] = set()  # what the log has said of models that a restart does not give back
        _count_optimizer_steps()
        before_leaving(self.wait)
        process.at_exit(_Ending(weakref.ref(self)), 15)
        process.at_exit_of_child(stop.end_as_it_must, 5)

    @property
    def folder(self) -> Path:
        """Where the states are. Raises SnapshotError where there is none."""
        if self._folder is None:
            raise SnapshotError("folder: none: the state is in memory alone.")
        return self._folder

    # ---- save ----------------------------------------------------------------------------------------------

    def save(self, step: int, **state: Any) -> None:
        """Save the state under this step; returns when it is copied to the CPU, a thread writes it.

        step   steps made so far, at least 1.
        state  each an object with state_dict() (a DDP model is saved without its wrapper), or tensors, numbers,
               strings, None, and dicts, lists and tuples of them. By exact type: what would come back as something
               else (a DTensor, a subclass of Tensor, a namedtuple, a set, …) is a StateError that names it.

        Call it on every rank, or on rank 0 alone (then only rank 0's random state is kept); nothing here waits for
        another rank. Waits for the save before it. A folder that cannot be written to is reported, and tried again by
        the next save or `close`. Raises StateError for what could not be read back, Superseded once a newer attempt
        owns the folder, SnapshotError if another process or job is using it.
        """
        step = _checked_step(step)
        refuse_sharded(state)  # on every rank: rank 0 alone would find out in a call that waits for the others
        if self.rank == 0:
            self._since_step.refuse_stale_shards(state)
            self._name_half_done(step, state)
        # A step that is saved again (in the loop, and at the end) must not wait for what the first save has taken.
        self._repeats = self._repeats + 1 if step == self._last_step else 0
        self._last_step = step
        if self._folder is None:
            with pause("save"):  # the first one waits for memory
                self._memory.saved(step, state)
            return
        self._memory.saved(step, state)
        with pause("save"):
            self._save(step, state)

    def keep(self, step: int, **state: Any) -> None:
        """Keep the state of this step in memory under ddprun, without writing it; elsewhere it does nothing.

        Call it on every rank after each optimizer step, with what `save` is given. `should_stop(step)` does the same
        for objects; values need this call, because they are what they are when they are named. Nothing is waited for.
        """
        step = _checked_step(step)
        refuse_sharded(state)
        self._memory.saved(step, state, kept_alone=True)
        if self._owed is not None:
            self._owed.kept = (step, state)

    def _save(self, step: int, state: Mapping[str, Any], *, in_thread: bool = True) -> None:
        self._owe(None)
        if self.rank != 0:
            self._offer(step, state)
            return
        if self._others is not None and step > self._others.step:
            self._others.note()
        self._join()
        process.current.unsaved.add(self)
        self._log_reading_ahead(state)
        self._unwritten = None  # or there would be three of this state in memory
        document = {
            "format": FORMAT,
            "step": step,
            "world_size": self.world_size,
            "rng": {0: random_states.current()},
            "state": {name: copied(state_of(value), name) for name, value in state.items()},
        }
        unwritten = _Unwritten(document, self._repeats, self.world_size > 1, os.getpid())
        if self.world_size > 1:
            self._others = _OthersSaved(step)
            unwritten.own, unwritten.samples = of_each_rank.own(state), of_each_rank.samples(state)
        try:
            writer = self._claim_to_save()
        except OSError as error:  # the folder is gone, or must not be written
            self._note_unwritten(unwritten, error)
            return
        if not in_thread:
            self._write_or_note(writer, unwritten)
            return
        # Not a daemon: a script that ends without close() still gets its last state.
        self._thread = threading.Thread(target=self._write_or_note, args=(writer, unwritten), name="ddpjob-snapshot")
        self._thread.start()

    def _name_hooks(self, objects: Mapping[str, Any]) -> None:
        for name, kind in half_done.hooks_with_state(objects).items():
            self._name_half(
                f"hook of {name}",
                f"{name}: its communication hook has a state ({kind}), which is in no state_dict(): a restart does not "
                f"continue it, and the gradients are others from there on",
            )

    def _name_half_done(self, step: int, state: Mapping[str, Any]) -> None:
        self._name_hooks(state)
        if name := self._since_step.pending(state):
            self._name_half(
                f"gradients of {name}",
                f"{name}: step {step} is saved while gradients wait for optimizer.step(): a restart does not continue "
                f"the accumulation, and these micro-batches are lost. Save right after an optimizer's step.",
            )

    def _name_half(self, what: str, why: str) -> None:
        """Once."""
        if what not in self._named_half:
            self._named_half.add(what)
            process.log(why)

    def _claim_to_save(self) -> int:
        """The number under which this process may write. Raises OSError, SnapshotError."""
        writer = self._claim(to_save=True)
        self._must_be_newest(writer)
        claim = _claim_of(self.folder, writer)
        if claim is None:  # somebody has tidied it away, and the next attempt would take the same number
            create_exclusively(self.folder, writer, self._own_claim.as_json())
        elif claim != self._own_claim:
            raise self._superseded()
        writers.note_saving(writers.alive_path(self.folder, writer))
        return writer

    def _owe(self, owed: "_Owed | None") -> None:
        if self._owed is not None:
            self._owed.close()
        self._owed = owed
        if owed is not None:
            process.current.unsaved.add(self)

    def _log_reading_ahead(self, state: Mapping[str, Any]) -> None:
        """Once, of a sampler that says of itself where the workers of a DataLoader are, and not the training."""
        for name, value in state.items():
            if self._reads_ahead is None and getattr(value, "has_workers", False) is True:
                self._reads_ahead = name
                process.log(
                    f"{name}: a DataLoader iterates this sampler. One with workers takes batches before they are "
                    f"trained, and a resume leaves these out: save {name}.state_dict(epoch=..., batches=...) instead."
                )

    def wait(self) -> None:
        """Wait until what was saved is in the folder, and write it again if that has failed.

        Raises SnapshotError if it cannot be written: with the reason, and the newest step in the folder.
        """
        self._join()
        if (owed := self._owed) is not None and owed.pid == os.getpid() and (step := owed.step_now()) is not None:
            with pause("save"):
                self._save(step, owed.state(), in_thread=False)
        self._finish()

    def _finish(self) -> None:
        """Wait for what `save` was given, and write it again if that has failed."""
        self._join()
        unwritten, self._unwritten = self._unwritten, None
        if self._owed is None:
            process.current.unsaved.discard(self)
        if unwritten is not None and unwritten.pid == os.getpid():
            with pause("save"):
                self._write_again(unwritten)

    def close(self) -> None:
        """Wait as `wait` does, at the end of the script.

        Raises SnapshotError also if the ranks went on from a state that memory alone had, and neither it nor a later
        one is in the folder: the script has saved nothing since then, and has not named its steps.
        """
        self.wait()
        self._refuse_lost_state()

    def _refuse_lost_state(self) -> None:
        owed = self._owed
        if owed is None or owed.pid != os.getpid() or self.rank != 0 or not owed.is_lost():
            return
        with contextlib.suppress(OSError):
            if any(self._version(entry) == owed.version for entry in _entries(self.folder)):
                return
        raise SnapshotError(
            f"the steps after {owed.version.step} were not saved, and the state of step {owed.version.step}, from "
            f"which they went on, was in memory alone, {self._newest()}; save the last step, or call should_stop(step) "
            f"after each step."
        )

    def _join(self) -> None:
        """Wait for the thread. Raises that this process must end; what could not be written is in `_unwritten`."""
        if self._thread is not None:
            with pause("save"):
                self._thread.join()
            self._thread = None
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    def _write_again(self, unwritten: "_Unwritten") -> None:
        try:
            writer = self._claim_to_save()
            self._write(writer, unwritten)
        except SnapshotError:
            raise
        except Exception as error:
            raise SnapshotError(f"{self._unwritten_sentence(unwritten, error)}.") from error

    def _write_or_note(self, writer: int, unwritten: "_Unwritten") -> None:
        try:
            self._write(writer, unwritten)
        except SnapshotError as error:
            self._problem = error
        except Exception as error:
            with contextlib.suppress(OSError):
                if _highest_writer(self.folder) > writer:  # which removed the file that was being written
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
            self._name_large(of_each_rank.too_large(document["ranks"]))
            for name in of_each_rank.out_of_step(unwritten.samples, (its.samples for its in others.values())):
                self._name_half(
                    f"replicas of {name}",
                    f"{name}: the ranks have different parameters of it: a restart does not give each rank its own, "
                    f"all go on from rank 0's",
                )
        self._remove_left(writer)  # first: a process that was killed may have left what fills the disk
        self._publish(writer, document)
        process.current.unsaved.discard(self)
        report_saved(document["step"])
        try:
            if not unwritten.lacks_own:  # an older one may be the last that each rank can load
                self._prune(writer)
        except OSError as error:
            process.log(f"older snapshots in {self.folder} cannot be removed: {reason(error)}")

    def _note_unwritten(self, unwritten: "_Unwritten", error: BaseException) -> None:
        """Report that a save has failed; its copy is kept until the next one, or the end."""
        self._unwritten = unwritten
        self._report_failed(self._unwritten_sentence(unwritten, error))

    def _report_failed(self, why: str) -> None:
        process.log(f"{why}; the training goes on, and the next save tries again")
        report_save_failed(why)

    def _unwritten_sentence(self, unwritten: "_Unwritten", error: BaseException) -> str:
        return f"the state of step {unwritten.document['step']} was not saved: {self._why_unwritten(error)}"

    def _why_unwritten(self, error: BaseException) -> str:
        """disk full: No space left on device (errno 28), in /ckpt; the newest snapshot there is of step 100"""
        return f"{reason(error)}, {self._newest(reason(error))}"

    def _newest(self, known: str = "") -> str:
        """Return what is in the folder. known: a reason that was named already."""
        try:
            entries = _entries(self.folder)
            newest = (
                f"; the newest snapshot there is of step {entries[0].step}" if entries else "; there is no snapshot"
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
                except RuntimeError as error:  # of torch's place in the file, where a write has failed
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
        """Remove older states, and what crashes left behind; never what a newer attempt may read or write."""
        for entry in _entries(self.folder)[self._states_max :]:
            self._must_be_newest(writer)
            entry.path.unlink(missing_ok=True)
        self._remove_left(writer)

    def _remove_left(self, writer: int) -> None:
        for name in os.listdir(self.folder):
            alive, tmp = _ALIVE_NAME.fullmatch(name), _TMP_NAME.fullmatch(name)
            # Any other .tmp file of this writer or an older one is of an ended process.
            is_left = tmp and int(tmp[1]) <= writer and name not in _being_written
            if (alive and int(alive[1]) < writer) or is_left:
                with contextlib.suppress(OSError):
                    (self.folder / name).unlink()

    # ---- who may write -------------------------------------------------------------------------------------

    def _claim(self, *, to_save: bool = False) -> int:
        """The writer number of this process: taken once, the next after the highest in the folder. Who has only loaded
        may have that of an earlier process of the same attempt and generation. Raises OSError, SnapshotError."""
        if self._writer is not None and not (to_save and self._writer not in self._taken()):
            return self._writer
        self.folder.mkdir(parents=True, exist_ok=True)
        while True:
            highest = _highest_writer(self.folder)
            claim = _claim_of(self.folder, highest)
            is_shared = claim == self._own_claim and highest not in self._taken()
            if claim == self._own_claim and not (is_shared and to_save):  # or a second Snapshot of this process
                break
            if claim is not None:
                self._refuse_folder_of(claim, highest)
            if create_exclusively(self.folder, highest + 1, self._own_claim.as_json()):
                highest += 1
                is_shared = False
                self._taken().add(highest)
                break
        self._writer = highest
        folder = self.folder  # not self, which the thread would keep
        if not (is_shared and self._process_of(highest)):
            writers.begin(self, writers.alive_path(folder, highest), lambda: _highest_writer(folder) <= highest)
        return highest

    def _taken(self) -> set[int]:
        """The numbers that this process has taken in the folder."""
        return process.current.writers.setdefault(os.path.realpath(self.folder), set())

    def _process_of(self, writer: int) -> str:
        """The number of the process that is known to run as this writer, on this machine; "" where there is none."""
        return writers.running_here(_claim_path(self.folder, writer), writers.alive_path(self.folder, writer))

    def _refuse_folder_of(self, claim: "_Claim", writer: int) -> None:
        """Raise where a later attempt of this job, or another process or job that is still running, owns the folder."""
        if claim.job == self._own_claim.job:
            if claim > self._own_claim:
                raise self._superseded()
            number = self._process_of(writer) if claim == self._own_claim else ""
            if number and writers.saves(writers.alive_path(self.folder, writer)):
                raise SnapshotError(
                    f"folder: {self.folder} is in use by process {number}, which is running. Give each run a folder of "
                    f"its own, or end that process first: one would remove what the other one saves."
                )
            return
        who = writers.named(claim.job)
        if writers.is_running(_claim_path(self.folder, writer), writers.alive_path(self.folder, writer), who):
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
            f"snapshot folder {self.folder} belongs to {who} now: this process, of {self._own_claim}, must end."
        )

    # ---- load ----------------------------------------------------------------------------------------------

    def load(self, **objects: Any) -> int:
        """Restore the newest state that is whole, and return its step; 0 where there is none. Call it on every rank.

        objects  under the names of `save`: objects with load_state_dict(), dicts (filled) or tensors (copied into).
                 Every saved value is also in `self.state` afterwards, for numbers and strings; for a model or an
                 optimizer that is its own state_dict(), not a copy that would take as much memory again.

        Rank 0 chooses and all ranks read the same bytes. A damaged file is named on stderr and the one before it is
        taken. Raises StateError where a name was not saved, Superseded where a newer attempt owns the folder: on all
        ranks.
        """
        refuse_sharded(objects)
        self._finish()
        if self.rank == 0:
            self._name_hooks(objects)
        self._memory.begin()
        found = self._memory.find(objects)
        read = self._read(found, objects)
        if read is None and found is not None:
            fetched = self._memory.fetch(found, objects)
            if fetched is not None:
                return self._go_on_from_memory(found, objects, fetched)
            read = self._read(None, objects)
        if read is None:
            self.state = self._memory.loaded(0, objects, {})
            self._log_beginning()
            return 0
        self._owe(None)
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

    def _read(self, found: Found | None, objects: Mapping[str, Any]) -> "tuple[_Entry, dict[str, Any]] | None":
        """The newest state in the folder that is whole, with this rank's own parts. found: what is in memory; only what
        is newer than that counts. A file for which a rank was too late is passed over: an older one has its part."""
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

    def _go_on_from_memory(self, found: Found, objects: Mapping[str, Any], fetched: Fetched) -> int:
        step = found.held.version.step
        restore(objects, fetched.state, "the memory of the pods")
        state = without_copies(objects, fetched.state)
        random_states.continue_from_here()
        self.state = self._memory.resumed(found, objects, fetched._replace(state=state))
        ranks = f"{', '.join(map(str, found.ranks[:8]))}{' …' if len(found.ranks) > 8 else ''}"
        origin = f"the memory on {'the node of rank' if len(found.ranks) == 1 else 'the nodes of ranks'} {ranks}"
        # Of a copy nobody knows how many steps followed: the words "the memory" at the beginning claim that none did.
        origin = f"{'a copy in ' if found.held.every else ''}{origin}{_seeded(fetched.seeded)}"
        if self._folder is not None:
            before = {} if self._owed is None else self._owed.objects  # of a load() that has named another part
            self._owe(_Owed(found.held.version, {**before, **objects}, self.state, by_value=fetched.by_value))
        if self.rank == 0:
            process.log(f"resumed at step {step} from {origin}")
        report_resumed(step, origin, saved=False)
        return step

    def _log_beginning(self) -> None:
        """Once, and not where the job begins: nothing else would say that its steps are made again. A second Snapshot
        may have nothing yet where the training goes on from the first one."""
        is_restart = self._own_claim.attempt > 1 or self._own_claim.generation > 0
        is_first = process.current.loader is self._memory
        if self.rank == 0 and is_restart and is_first and not self._has_begun:
            self._has_begun = True
            process.log(f"begins at step 0: there is no state in {self._folder or 'memory'}")

    def _log_origin(self, document: Mapping[str, Any], path: Path, before: str | None) -> None:
        """before: the job whose state this is, where it is another one."""
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
        """Ranks whose random states are not in the document, because they did not save in time."""
        ranks = range(self.world_size) if document["world_size"] == self.world_size else range(0)
        return [rank for rank in ranks if rank not in document["rng"]]

    def _choose(self, found: Found | None, damaged: Collection[Path]) -> "_Entry | None":
        """The newest that is not known to be damaged. found: what is in memory; only what is newer than that counts."""
        try:
            self._claim()
            entries = _entries(self.folder)
        except OSError as error:
            if found is None:
                made = "" if self.folder.is_dir() else " cannot be made"
                raise SnapshotError(f"folder: {self.folder}{made}: {reason(error)}.") from error
            self._note_unused(found, error)
            return None
        for entry in entries:
            if found is not None and not is_newer(self._version(entry), found.held):
                return None
            if entry.path not in damaged:
                return entry
        return None

    def _note_unused(self, found: Found, error: OSError) -> None:
        """What is in memory is whole, and the folder takes no claim or cannot be read: a failure here would lose it."""
        step = found.held.version.step
        self._report_failed(f"the state of step {step} is in memory alone: {self._why_unwritten(error)}")

    def _version(self, entry: "_Entry") -> Version | None:
        """None: it is another job's, or nobody knows whose."""
        claim = _claim_of(self.folder, entry.writer)
        if claim is None or claim.job != self._own_claim.job:
            return None
        return Version(claim.attempt, claim.generation, entry.step)

    def _agreed(self, found: Found | None, passed: Collection[Path]) -> "tuple[_Entry, BinaryIO] | None":
        """Rank 0's choice, or its error, on all ranks, otherwise they would wait for it; and the file, opened.

        All look at its bytes at once: a gigabyte takes a second, and ranks that waited for rank 0 would begin after it.
        found: what is in memory; only what is newer than that is chosen. passed: what is not to be chosen.
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
        """What rank 0 chooses; raises its SnapshotError on all ranks. All of them learn rank 0's name of the folder."""
        answer: Any = None
        if self.rank == 0 or self.world_size == 1:
            try:
                answer = choose()
            except SnapshotError as error:
                answer = error
            except Exception as error:  # whatever lies in the folder: the other ranks are waiting for an answer
                answer = SnapshotError(f"{self.folder}: {reason(error)}.")
        answer, self._name = self._broadcast((answer, self._name))
        if isinstance(answer, SnapshotError):
            raise answer
        return answer

    def _on_all_ranks(self, file: BinaryIO | None) -> BinaryIO | None:
        """The file, or a copy of rank 0's in memory on all ranks, where one of them does not see it; None where rank 0
        does not."""
        if self.world_size == 1:
            return file
        missing = gather.numbers(torch.tensor([int(file is None)], device="cpu")).flatten().tolist()
        if missing[0] or not any(missing):
            return None if missing[0] else file
        data = file.read() if file is not None and self.rank == 0 else None
        if file is not None:
            file.close()
        return io.BytesIO(self._broadcast_bytes(data))

    def _broadcast(self, value: Any) -> Any:
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=gather.device_for(None))
        return box[0]

    def _broadcast_bytes(self, data: bytes | None) -> bytes:
        """Rank 0's bytes to all, in pieces, so that a large state needs no second copy on the device."""
        size = self._broadcast(None if data is None else len(data))
        received = bytearray(size if data is None else data)
        for piece in torch.split(torch.frombuffer(received, dtype=torch.uint8), BROADCAST_CHUNK_BYTES):
            on_device = piece.to(gather.device_for(None))
            dist.broadcast(on_device, src=0)
            piece.copy_(on_device)
        return bytes(received)

    # ---- what the other ranks have ------------------------------------------------------------------

    def _store(self) -> Any:
        """That of the group; None where there is none, or where it is left."""
        return stop.store_of_group() if self._world is None else store_of(self._world)

    def _offer(self, step: int, state: Mapping[str, Any]) -> None:
        """Through the store, not by a collective: `save` on rank 0 alone must not wait for the others."""
        store = self._store()
        if store is None:
            return
        handed = of_each_rank.Handed(random_states.current(), of_each_rank.own(state), of_each_rank.samples(state))
        value = handed.as_bytes()
        self._offered.append(_offer_key(self._name, step, self._repeats, self.rank))
        with contextlib.suppress(RuntimeError):  # rank 0 serves the store and is gone: the next collective says so
            store.set(self._offered[-1], value)
            if len(self._offered) > OFFERS_MAX:  # where rank 0 has not taken it by now, it never will
                store.delete_key(self._offered.pop(0))

    def _collected(self, step: int, repeat: int) -> dict[int, of_each_rank.Handed]:
        """The random states, and what is their own, of the ranks that save too. One that came too late for the save
        before is waited for again once its state is there; one that never saves, because rank 0 saves alone, is waited
        for once."""
        store, others = self._store(), self._others
        missing = {rank: _offer_key(self._name, step, repeat, rank) for rank in range(1, self.world_size)}
        found: dict[int, of_each_rank.Handed] = {}
        if store is None:
            return found
        deadline = time.monotonic() + RNG_WAIT_SECONDS
        with contextlib.suppress(RuntimeError):  # the group is being left: the state is worth more than others' dice
            silent = {rank for rank, key in self._late.items() if not (store.check([key]) and store.delete_key(key))}
            while missing:
                is_last = time.monotonic() > deadline or (others is not None and others.have)
                for rank in [rank for rank, key in missing.items() if store.check([key])]:
                    key = missing.pop(rank)
                    found[rank] = of_each_rank.from_bytes(store.get(key))
                    store.delete_key(key)
                if missing.keys() <= silent or is_last:
                    break
                time.sleep(0.005)
        self._late = missing
        self._name_late(step)
        return found

    def _name_large(self, names: list[str]) -> None:
        """Once of each."""
        if new := [name for name in names if name not in self._named_large]:
            self._named_large.update(new)
            process.log(
                f"{', '.join(new)}: the ranks have different states of it, of more than "
                f"{of_each_rank.OWN_BYTES_MAX >> 20} MiB: a restart does not give each rank its own"
            )

    def _name_late(self, step: int) -> None:
        """Once: a resume from the folder will be another training where these ranks draw random numbers."""
        if self._late and not self._named_late:
            self._named_late = True
            process.log(
                f"{_ranks(list(self._late))} did not save step {step}: from the snapshot a restart does not continue "
                f"the random numbers there (dropout, augmentation), nor what else differs between the ranks. Call "
                f"save() on every rank."
            )


class _OthersSaved:
    """Whether the other ranks have come past this save: two optimizer steps after it, or at the save of a later step.

    Gradients are summed over the ranks in between. An optimizer with a closure runs backward within its step, so one
    step is not enough.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self._at: float = process.current.optimizer_steps

    @property
    def have(self) -> bool:
        """Whether they have."""
        return process.current.optimizer_steps >= self._at + 2

    def note(self) -> None:
        """They have."""
        self._at = -math.inf


@functools.cache
def _count_optimizer_steps() -> None:
    """Once, and for good: a hook must not be removed while torch calls the others."""

    def count(*_: Any) -> None:
        process.current.optimizer_steps += 1

    register_optimizer_step_pre_hook(count)


@dataclass
class _Unwritten:
    """A state that is to be written, until it is."""

    document: dict[str, Any]
    """For torch.save."""
    repeat: int
    """How often the same step was saved before."""
    lacks_rng: bool
    """Whether the random states of the other ranks are still to be collected."""
    pid: int
    """The process that saves it: a fork of that one does not."""
    lacks_own: bool = False
    """Whether a rank was late that has objects of its own."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """What may differ on other ranks."""
    samples: Mapping[str, list[str]] = field(default_factory=dict)
    """Of what should be the same on all ranks."""


class _Owed:
    """The state that memory alone had when the ranks went on from it: a script that saves nothing after it must not end
    well without it."""

    def __init__(
        self, version: Version, objects: Mapping[str, Any], state: Mapping[str, Any], *, by_value: bool
    ) -> None:
        self.version, self.objects, self.pid = version, objects, os.getpid()
        self.kept: tuple[int, Mapping[str, Any]] | None = None  # what keep() was given after the last step
        self._state = state
        self._knows_all = not by_value and objects.keys() == state.keys()
        self._has_stepped, self._names_steps = False, False
        process.current.marked = None
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def close(self) -> None:
        """It is no longer owed."""
        self._hook.remove()

    def _before_step(self, *_: Any) -> None:
        self._names_steps |= self._is_named()
        self._has_stepped, process.current.marked, self.kept = True, None, None

    def _is_named(self) -> bool:
        return process.current.marked is not None or self.kept is not None

    def step_now(self) -> int | None:
        """The step of the state as it is now; None if it is not known."""
        if not self._has_stepped:
            return self.version.step
        if self.kept is not None:
            return self.kept[0]
        return process.current.marked if self._knows_all else None

    def state(self) -> Mapping[str, Any]:
        """The state as it is now, under the names of `save`."""
        if not self._has_stepped:
            return {**self._state, **self.objects}
        return self.objects if self.kept is None else self.kept[1]

    def is_lost(self) -> bool:
        """True if steps followed, and the script names none: then memory had it of a save."""
        return self._has_stepped and not self._names_steps and not self._is_named()


class _Ending:
    """What a Snapshot owes at the end of its process: a script that ends without close() must not lose its last state,
    nor the error that it is not there."""

    def __init__(self, snapshot: "weakref.ref[Snapshot]") -> None:
        self._snapshot = snapshot

    def __call__(self) -> None:
        snapshot, error = self._snapshot(), termination.ending()
        if snapshot is None:
            return
        is_failure = error is not None and not isinstance(error, Stopped) and termination.exit_code(error) != 0
        if is_failure:  # it has been reported already, and nobody is to wait for a disk
            return
        try:
            snapshot.close()
        except SnapshotError as problem:
            stop.fail_at_exit(problem)
        except Exception as problem:  # nobody is left to raise it to
            process.log(str(problem))


def _offer_key(name: str, step: int, repeat: int, rank: int) -> str:
    return f"own/{name}/{step}/{repeat}/{rank}"


def _ranks(ranks: Sequence[int]) -> str:
    """ranks 1, 2, 3"""
    return f"rank{'s'[: len(ranks) > 1]} {', '.join(map(str, ranks[:8]))}{' …' if len(ranks) > 8 else ''}"


def _seeded(ranks: Sequence[int]) -> str:
    """What follows the place of a state in which these ranks' random states are lost."""
    return f" (random states of {_ranks(ranks)} were lost, and are seeded the same way at each resume)" if ranks else ""


def _checked_step(step: Any) -> int:
    try:
        whole = operator.index(step)  # numpy's integers would be written, and not read back
    except TypeError:
        raise ConfigurationError(f"step: {step!r} is no whole number.") from None
    if not 1 <= whole <= STEP_MAX:
        raise ConfigurationError(
            f"step: {whole} must be at least 1, for 0 means that there is no snapshot, and at most {STEP_MAX}."
        )
    return whole


# ---- files -------------------------------------------------------------------------------------------------


class _Entry(NamedTuple):
    """One state in the folder; ordered by who wrote it, then by step, then by time."""

    writer: int
    step: int
    modified: int
    digest: str
    path: Path


def _entries(folder: Path) -> list[_Entry]:
    """The states in the folder, newest first."""
    entries = []
    for name in os.listdir(folder):
        if match := _STATE_NAME.fullmatch(name):
            with contextlib.suppress(FileNotFoundError):
                status = (folder / name).lstat()
                if stat.S_ISREG(status.st_mode):  # a link or a pipe is no state, whatever its name
                    entries.append(_Entry(int(match[2]), int(match[1]), status.st_mtime_ns, match[3], folder / name))
    return sorted(entries, reverse=True)


def _opened(entry: _Entry) -> BinaryIO | None:
    """The file, to be read; None where it is not there or not what was written.

    Its bytes are never all in memory beside what they become: a node has many ranks, and each would have a copy.
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
    """A new file for torch.save, which only appends, so the digest of the file is known when it is written."""

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
    """Of the claims and of the states, in case somebody tidied the claims away; 0 where there is none."""
    matches = [_WRITER_NAME.fullmatch(name) for name in os.listdir(folder)]
    states = [entry.writer for entry in _entries(folder)]
    return max([int(match[1]) for match in matches if match] + states, default=0)


def _claim_path(folder: Path, writer: int) -> Path:
    return folder / f"writer-{writer:06d}.json"


class _Claim(NamedTuple):
    """Whose writer number it is."""

    job: str
    attempt: int
    generation: int

    def __str__(self) -> str:
        return f"attempt {self.attempt}" + (f", generation {self.generation}" if self.generation else "")

    def as_json(self) -> str:
        """Without a generation of 0, because an older version of this library knows none."""
        return json.dumps({name: value for name, value in self._asdict().items() if name != "generation" or value})


def _claim_of(folder: Path, writer: int) -> _Claim | None:
    try:
        claim = json.loads(own_files.read_file(_claim_path(folder, writer)))
        job, attempt, generation = claim["job"], int(claim["attempt"]), int(claim.get("generation", 0))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None  # not there, or another file
    return _Claim(job, attempt, generation) if isinstance(job, str) else None


def create_exclusively(folder: Path, writer: int, content: str) -> bool:
    """Create the claim with its content, or return False where somebody else was first."""
    path = _claim_path(folder, writer)
    tmp = writers.tmp_path(folder, writer)
    writers.write_new(tmp, content.encode())
    try:
        os.link(tmp, path)  # like O_EXCL, but never seen half written
    except FileExistsError:
        return False
    except OSError as error:
        # Some network and user-space file systems have no links.
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EACCES):
            raise
        return create_exclusively_without_links(path, content)
    finally:
        tmp.unlink(missing_ok=True)
    _fsync_folder(folder)
    return True


def create_exclusively_without_links(path: Path, content: str) -> bool:
    with contextlib.suppress(FileExistsError), open(path, "x") as file:
        return bool(file.write(content))
    return False


def _fsync_folder(folder: Path) -> None:
    """The rename itself must survive a power cut; some network file systems refuse the call, and need none."""
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
    except Exception as error:  # its bytes are what was written, perhaps by another version of torch
        raise SnapshotError(
            f"{path}: this torch {torch.__version__} does not read it: {reason(error).splitlines()[0]}"
        ) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        version = document.get("format") if isinstance(document, dict) else None
        raise StateError(f"{path}: format {version}, this library reads {FORMAT}.")
    return document
