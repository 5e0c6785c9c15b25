"""Data loading whose result depends on the seed alone, not on the number of processes.

`GlobalBatchSampler` shuffles the data set the same way on every rank, cuts it into global batches, and yields this
rank's share of each. `accumulate` runs the backward passes of a share. After DDP's all-reduce the gradient is the mean
over the global batch, for any number of ranks and any micro-batch. `DataPartitioner` cuts a data set into lasting parts
(train and validation, or one for each worker).
"""

import contextlib
import hashlib
import math
import numbers
import operator
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpjob import process
from ddpjob.errors import ConfigurationError, StateError
from ddpjob.group.join import rank_in_group

EPOCH_BEGINS_MAX = 2
"""A script may begin an epoch twice, for example to look at a batch first. A third time is a mistake."""


class Batch(list[int]):
    """One rank's share of a global batch: indices into the data set, to be run `micro_batch` at a time.

    global_size  samples in the whole global batch, over all ranks.
    stand_in     index of a sample to run with weight zero if the share is empty. Every rank must take part in the
                 all-reduce, and many models reject an empty batch.
    """

    def __init__(self, indices: Sequence[int], global_size: int, stand_in: int, micro_batch: int | None) -> None:
        super().__init__(indices)
        self.global_size = global_size
        self.stand_in = stand_in
        self.micro_batch = micro_batch


class GlobalBatchSampler:
    """Yield the same global batches for any number of ranks: the same samples in the same order, from the seed alone.

        sampler = ddpjob.GlobalBatchSampler(len(x), global_batch=64, seed=7)
        for epoch in range(sampler.current_epoch, epochs):
            for batch in sampler.epoch(epoch):        # this rank's share of one global batch
                optimizer.zero_grad()
                loss = ddpjob.accumulate(model, batch, sampler.global_batch, loss_of)
                optimizer.step()

    n             samples in the data set.
    global_batch  samples of one optimizer step over all ranks. Ranks get contiguous shares whose sizes differ by at
                  most one, the larger ones first; a share may be empty if global_batch < world_size.
    seed          decides the order of every epoch.
    rank, world_size  both or neither; by default those of the process group, or 0 and 1 without one.
    micro_batch   at most so many samples in one forward pass of `accumulate`; None = the whole share.
    drop_last     skip the last n % global_batch samples of each epoch; otherwise they make a smaller global batch.

    As `batch_sampler` of a DataLoader it yields the same shares, one epoch per iteration. A DataLoader with workers
    reads ahead of training, as a prefetcher does, so save how many batches have been trained, counted from 1 after a
    resume as well:

        for epoch in range(sampler.current_epoch, epochs):
            sampler.set_epoch(epoch)
            for batches, batch in enumerate(loader, start=1):
                ...
                snapshot.save(step, model=model, sampler=sampler.state_dict(epoch=epoch, batches=batches))
    """

    def __init__(
        self,
        n: int,
        global_batch: int,
        seed: int,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        micro_batch: int | None = None,
        drop_last: bool = True,
    ) -> None:
        self.n = _at_least(1, "n", n)
        self.global_batch = _at_least(1, "global_batch", global_batch)
        self.seed = _integer("seed", seed)
        self.rank, self.world_size = _rank_of(rank, world_size)
        self.micro_batch = None if micro_batch is None else _at_least(1, "micro_batch", micro_batch)
        self.drop_last = drop_last
        self._epoch = 0
        self._consumed = 0
        self._began = (0, 0)  # (epoch, sample) at which the loaded state continued
        self._begins = (0, 0)  # (epoch, number of times that a DataLoader has begun it)
        self._has_warned_of_workers = False
        self._has_loader = self._has_workers = False  # _has_workers: this DataLoader may have workers
        self._taken = _Taken()
        self.is_placed = False
        """True if the script saves the sampler's position as a value, with `state_dict`."""
        self.is_saved = False
        """True if the script has passed the sampler itself to `save` or `keep`."""
        self._placed_in = 0  # epoch of the last position that `state_dict` has returned as a value
        self._has_told_of_move = False
        self._has_drawn_for_all = False  # True if the DataLoader's workers persist: it draws one seed for all epochs
        if drop_last and self.global_batch > self.n:
            raise ConfigurationError(
                f"global_batch: {global_batch} is more than n: {n}, so no epoch has a full batch. "
                f"Lower global_batch, or use drop_last=False."
            )

    @property
    def is_ahead(self) -> bool:
        """True if batches are taken before they are trained, by workers of a DataLoader or by the script."""
        return self._has_workers or self._taken.is_ahead()

    @property
    def reads_ahead(self) -> bool:
        """True if batches may be taken before they are trained, because of any DataLoader or the script."""
        return self._has_loader or self._taken.is_ahead()

    @property
    def is_trained(self) -> bool:
        """True if gradients have arrived after batches of this epoch. False in an evaluation."""
        return self._taken.is_trained

    @property
    def may_be_trained(self) -> bool:
        """True if gradients have arrived after batches of this epoch, also after an evaluation."""
        return self._taken.may_be_trained

    @property
    def current_epoch(self) -> int:
        """Epoch to continue with: 0 at first, the interrupted epoch after `load_state_dict`."""
        return self._epoch

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """Yield this rank's shares of the epoch's global batches; for the interrupted epoch only the remaining ones.

        A batch counts as consumed once it is yielded, so save inside the loop, after the optimizer's step.
        """
        epoch = _at_least(0, "epoch", epoch)
        self.set_epoch(epoch)
        self._continue_random_numbers()
        order = _shuffled(self.n, self.seed, epoch)
        self._taken.begin()
        while self._samples_left(self._consumed) > 0:
            self._tell_of_request()
            self._taken.one_more()
            start, stop = self._consumed, min(self._consumed + self.global_batch, self.n)
            self._consumed = stop
            process.current.sampler = weakref.ref(self)
            yield self._share(order, start, stop)
            if (self._epoch, self._consumed) != (epoch, stop):
                raise StateError(
                    f"epoch {epoch} was being iterated when the sampler was moved to epoch {self._epoch}, "
                    f"sample {self._consumed}. Load the state before the loop."
                )
        self._epoch, self._consumed = epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch. In an epoch that a restart has interrupted, stay at that batch."""
        epoch = _at_least(0, "epoch", epoch)
        if epoch != self._epoch:
            self._note_move(epoch)
            self._epoch, self._consumed = epoch, 0
            if epoch == self._began[0]:
                self._began = (epoch, 0)

    def __iter__(self) -> Iterator[Batch]:
        """Yield one epoch, as DataLoader expects from its `batch_sampler`. The next iteration is the next epoch.

        If an iteration was left early, the next one repeats the epoch from the same place, so `next(iter(loader))`
        takes no batch from the training. `set_epoch` goes to the next epoch.
        """
        self._refuse_another_share(sys._getframe(1).f_locals)
        self._tell_of_request()  # before the loader draws its seed
        self._consumed = self._first_of(self._epoch)
        # Count from where this epoch continues: the global batch size may have changed at the resume.
        last = (self.n - self._consumed) % self.global_batch
        smallest = self.global_batch if self.drop_last or not last else last
        if smallest < self.world_size:
            raise ConfigurationError(
                f"a global batch of {smallest} leaves some of {self.world_size} ranks without a sample, and a "
                f"DataLoader cannot collate an empty batch. Use global_batch >= {self.world_size} with drop_last=True, "
                f"or `epoch()`."
            )
        loader = sys._getframe(1).f_locals.get("loader")
        self._has_loader, self._has_workers = True, _may_have_workers(loader)
        self._has_drawn_for_all = getattr(loader, "persistent_workers", False)
        if getattr(loader, "num_workers", 0) and self.rank == 0 and not self._has_warned_of_workers:
            self._has_warned_of_workers = True
            if _may_draw(getattr(loader, "dataset", None)):
                process.log(
                    "a DataLoader with workers iterates this sampler: a restart does not continue random numbers that "
                    "the dataset draws in its workers (augmentation). To repeat them, seed each sample by its index."
                )
        return self._one_epoch(self._epoch)

    def _one_epoch(self, epoch: int) -> Iterator[Batch]:
        self._note_begin()  # not in __iter__, which a DataLoader with workers calls twice but iterates once
        yield from self.epoch(epoch)

    def __len__(self) -> int:
        """Return the number of global batches in a whole epoch."""
        return self.n // self.global_batch if self.drop_last else math.ceil(self.n / self.global_batch)

    def state_dict(self, *, epoch: int | None = None, batches: int | None = None) -> dict[str, int]:
        """Return what a snapshot needs to continue with any number of ranks.

        epoch, batches  both or neither: what has been trained, if the sampler has yielded more. Batches are counted
                        from the place where this process began the epoch: its first sample, or the loaded state.
                        Pass epoch + 1 and 0 after the script's work at the end of an epoch; otherwise a resume
                        repeats that work.
        """
        if (epoch is None) != (batches is None):
            raise ConfigurationError(f"epoch: {epoch}, batches: {batches}. Give both or neither.")
        if epoch is None or batches is None:
            return {"n": self.n, "seed": self.seed, "epoch": self._epoch, "consumed": self._consumed}
        epoch, batches, self.is_placed = _at_least(0, "epoch", epoch), _at_least(0, "batches", batches), True
        self._placed_in = epoch
        consumed = min(self._first_of(epoch) + batches * self.global_batch, self.n)
        if not self._samples_left(consumed):
            consumed = self.n  # also with drop_last, because Snapshot recognizes the end of an epoch by n
        return {"n": self.n, "seed": self.seed, "epoch": epoch, "consumed": consumed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue where the state was taken. Raise StateError if it belongs to other data or another seed."""
        for name, own in (("n", self.n), ("seed", self.seed)):
            if state.get(name) != own:
                raise StateError(
                    f"{name}: the saved state has {state.get(name)}, this sampler {own}, so the order of samples would "
                    f"differ. Start with {name}={state.get(name)}, or from an empty snapshot folder."
                )
        epoch, consumed = (_whole(state, name) for name in ("epoch", "consumed"))
        if consumed > self.n:
            raise StateError(f"consumed: the saved state has {consumed}, an epoch has n: {self.n}. It is damaged.")
        self._epoch, self._consumed = self._began = (epoch, consumed)

    def _tell_of_request(self) -> None:
        """Report that the script takes a batch. A restart from here repeats everything that follows."""
        if process.current.keeper is not None:
            process.current.keeper.step_begins(self)

    def _note_begin(self) -> None:
        """Log once if an epoch begins three times, because that is a mistake. Beginning it twice is allowed: a script
        may call `next(iter(loader))` to look at a batch."""
        epoch, times = self._begins
        times = times + 1 if epoch == self._epoch else 1
        self._begins = (self._epoch, times)
        if times == EPOCH_BEGINS_MAX + 1 and self.rank == 0:
            process.log(
                f"epoch {self._epoch} of the data begins for the third time, with the same samples, because its "
                f"loops ended early. Call sampler.set_epoch(epoch) before each loop to go on to the next epoch."
            )

    def _note_move(self, epoch: int) -> None:
        """Log once if a restart repeats epochs, or would continue an epoch that the script has left early."""
        if self.rank or self._has_told_of_move:
            return
        marks = {process.current.saved_at, process.current.marked and process.current.marked[1]}
        is_marked = process.current.optimizer_steps in marks  # the last step is saved or marked already
        is_kept_here = self._placed_in == self._epoch if self.is_placed else self.is_saved
        if epoch < self._epoch == self._began[0]:
            self._has_told_of_move = True
            process.log(
                f"epoch {epoch} of the data begins, but epoch {self._epoch} was loaded: its samples are trained again. "
                f"Begin with sampler.current_epoch, unless this is an evaluation."
            )
        elif is_marked and is_kept_here and self._consumed and self._samples_left(self._consumed):
            self._has_told_of_move = True
            process.log(
                f"epoch {self._epoch} of the data is left early, and a restart from its last step continues it. After "
                f"the last optimizer.step() of an epoch, call sampler.set_epoch(epoch + 1) before should_stop() and "
                f"save(), or save sampler.state_dict(epoch=epoch + 1, batches=0)."
            )

    def _refuse_another_share(self, caller: Mapping[str, Any]) -> None:
        """Raise ConfigurationError if accelerate distributes these shares among the ranks again, or lets only rank 0
        read them. Part of the data would silently not be trained. caller: variables of the calling frame."""
        shard, loader = caller.get("self"), caller.get("loader")
        is_shard = getattr(shard, "batch_sampler", None) is self and getattr(shard, "num_processes", 1) > 1
        wrapper = shard if is_shard else loader
        if self.world_size > 1 and (is_shard or type(loader).__name__ == "DataLoaderDispatcher"):
            raise ConfigurationError(
                f"sampler: {type(wrapper).__name__} distributes batches among the ranks, but a GlobalBatchSampler "
                f"yields only this rank's share already, so part of the data would not be trained. Do not pass this "
                f"DataLoader to accelerator.prepare(), and move its batches to accelerator.device."
            )

    def _continue_random_numbers(self) -> None:
        """Restore the random numbers in an interrupted epoch, because iter(DataLoader) has drawn a seed again.

        Does nothing for a state from the beginning of an epoch, because it was saved before that draw. With persistent
        workers a loader draws in the first epoch only, so that state was saved after the draw.
        """
        again = process.current.continue_random
        is_drawn = self._began[1] > 0 or self._has_drawn_for_all
        if again is not None and self._epoch == self._began[0] and is_drawn:
            again()

    def _first_of(self, epoch: int) -> int:
        """Return the sample at which this process begins the epoch."""
        return self._began[1] if epoch == self._began[0] else 0

    def _samples_left(self, consumed: int) -> int:
        """Return the number of samples of this epoch that are left to train. The global batch size may have changed."""
        left = self.n - consumed
        return left - left % self.global_batch if self.drop_last else left

    def _share(self, order: torch.Tensor, start: int, stop: int) -> Batch:
        small, larger = divmod(stop - start, self.world_size)
        begin = start + self.rank * small + min(self.rank, larger)
        end = begin + small + (self.rank < larger)
        return Batch(order[begin:end].tolist(), stop - start, int(order[start]), self.micro_batch)


class _Taken:
    """Counts the batches that an iteration has taken, to find a script that reads ahead, such as a prefetcher: it takes
    several batches before the first gradient arrives, and later fewer for each step."""

    latest: "_Taken | None" = None
    """The iteration that has taken the last batch. If it is another one, this one may have been an evaluation."""

    def __init__(self) -> None:
        self._is_found = False
        self.begin()

    @property
    def is_trained(self) -> bool:
        """True if gradients have arrived between two of the batches."""
        return self._trained > 0

    @property
    def may_be_trained(self) -> bool:
        """True if gradients have arrived after one of the batches, perhaps those of another sampler's batch."""
        return self.is_trained or process.current.gradients != self._gradients

    def begin(self) -> None:
        """Count from 0 for the next iteration."""
        self._first = self._all = self._trained = 0  # _trained: groups of batches after which gradients have arrived
        self._gradients, self._steps = process.current.gradients, process.current.steps_of.copy()

    def one_more(self) -> None:
        """Count a batch."""
        self._find()
        if self._all and process.current.gradients != self._gradients:
            self._trained += 1
        self._gradients = process.current.gradients
        self._all += 1
        self._first += not self._trained
        _Taken.latest = self

    def is_ahead(self) -> bool:
        """True if batches of this iteration, or of an earlier one, were taken before they were trained."""
        if _Taken.latest is self:
            self._find()
        return self._is_found

    def _find(self) -> None:
        if not self._is_found and self._first > 1 and self._gradients is not None:
            trained = self._trained + (process.current.gradients != self._gradients)
            steps = max((process.current.steps_of - self._steps).values(), default=0)
            self._is_found = self._all < self._first * max(trained, steps)


def accumulate(
    model: torch.nn.Module,
    batch: Any,
    global_batch: int,
    loss_fn: Callable[[Any], torch.Tensor],
    micro_batch: int | None = None,
    *,
    backward: Callable[[torch.Tensor], object] | None = None,
) -> torch.Tensor:
    """Run forward and backward of this rank's share. Every gradient is then the mean over the global batch.

    model         the DDP model, compiled or not, or a module with DDP models in it; outside a group any module. Its
                  all-reduce runs once, in the last micro-batch.
    batch         a batch of `GlobalBatchSampler`; or a tensor, a list of samples, or a tuple or dict of these, cut
                  along axis 0. A number, a text or None in a tuple or dict is the same in each micro-batch. The list
                  that a DataLoader makes of a sample's fields looks like a list of samples: pass tuple(batch).
    global_batch  samples of this step over all ranks. Ignored for a batch of the sampler itself, which knows its size:
                  with drop_last=False the last batch of an epoch is smaller. A DataLoader's batch does not know it.
    loss_fn       takes a piece of the batch and returns the loss **summed** over its samples (reduction="sum"), a
                  scalar tensor. On a rank without samples it gets one stand-in sample, whose loss has weight zero.
    micro_batch   at most so many samples in one forward pass; default: the sampler's, else the whole share.
    backward      the backward pass, e.g. lambda loss: scaler.scale(loss).backward(); by default loss.backward().

    Return this rank's estimate of the mean loss (scalar tensor, detached), good enough for display; its average over
    all ranks is the mean over the global batch. Gradients are accumulated, so call optimizer.zero_grad() first.

    DDP divides the summed gradients by the number of ranks, so the sum is scaled by world_size / global_batch
    (torch/nn/parallel/distributed.py, "averaged across processes"). Raise ConfigurationError for a model without DDP
    in a group of several ranks, and for a batch that cannot be cut, with its field.
    """
    size = batch.global_size if isinstance(batch, Batch) else _at_least(1, "global_batch", global_batch)
    samples = _samples_of(batch)
    if samples > size:
        raise ConfigurationError(
            f"batch: it has {samples} samples, and global_batch is {size}. Give the samples of this rank as batch, and "
            f"those of all ranks together as global_batch."
        )
    pieces, weight = _pieces(batch, samples, micro_batch)
    wrapped = _data_parallel(model)
    ranks = dist.get_world_size(wrapped[0].process_group) if wrapped else 1
    total: torch.Tensor | None = None
    for number, piece in enumerate(pieces, start=1):
        with contextlib.ExitStack() as without_sync:
            for inner in wrapped if number < len(pieces) else ():
                without_sync.enter_context(inner.no_sync())
            loss = _sum_of(loss_fn(piece)) * (weight * ranks / size)
            loss.backward() if backward is None else backward(loss)  # type: ignore[no-untyped-call]
        total = loss.detach() if total is None else total + loss.detach()
    assert total is not None, "a share has at least one piece"
    process.step_made()
    return total


def _data_parallel(model: torch.nn.Module) -> list[DistributedDataParallel]:
    """Return the DDP models in a module, also a compiled one. Raise ConfigurationError if several ranks have none."""
    inner = getattr(model, "_orig_mod", model)
    if isinstance(inner, DistributedDataParallel):
        return [inner]
    found = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    ranks = 1 if (group := process.torch_group()) is None else group[1]
    if not found and ranks > 1:
        # Without DDP each rank would train its own model. FSDP would divide each gradient by the number of ranks again.
        raise ConfigurationError(
            f"model: a {type(inner).__name__} is not a DistributedDataParallel, so the gradients of {ranks} ranks "
            f"would not be averaged. Use world.wrap(model), and call the wrapped model in the loss."
        )
    return found


def _sum_of(loss: Any) -> torch.Tensor:
    """Return the loss. Raise ConfigurationError if it is not a scalar tensor."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss
    what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"{loss!r:.40}"
    raise ConfigurationError(
        f'loss_fn: it returned {what}. Return the loss summed over the samples (reduction="sum"), a scalar tensor.'
    )


def _pieces(batch: Any, samples: int, micro_batch: int | None) -> tuple[list[Any], float]:
    """Return the micro-batches of a share, and their weight; for an empty share one stand-in sample of weight zero."""
    if isinstance(batch, Batch):
        micro_batch = micro_batch or batch.micro_batch
    if samples == 0:
        return ([[batch.stand_in]], 0.0) if isinstance(batch, Batch) else ([batch], 0.0)
    if micro_batch is None or micro_batch >= samples:
        return [batch], 1.0
    _at_least(1, "micro_batch", micro_batch)
    cuts = [slice(i, i + micro_batch) for i in range(0, samples, micro_batch)]
    if not isinstance(batch, tuple | Mapping):
        return [batch[cut] for cut in cuts], 1.0
    fields = _fields(batch)
    _check_lengths(fields)
    pieces = [{name: v if _is_of_all(v) else v[cut] for name, v in fields.items()} for cut in cuts]
    return [tuple(piece.values()) for piece in pieces] if isinstance(batch, tuple) else pieces, 1.0


def _may_have_workers(loader: Any) -> bool:
    """True if a DataLoader may read ahead. loader: found in the calling frame; None if a new torch names it
    differently. A subclass such as accelerate's may read ahead without workers."""
    is_torchs = type(loader).__module__ == "torch.utils.data.dataloader"
    return not is_torchs or getattr(loader, "num_workers", 1) != 0


def _may_draw(dataset: Any) -> bool:
    """True if a dataset may draw random numbers for a sample. Lists, tensors and torch's datasets do not, unless a
    dataset inside them does."""
    module = type(dataset).__module__
    if module in ("builtins", "numpy", "torch"):
        return False
    if not module.startswith("torch.utils.data."):
        return True
    inner = [getattr(dataset, "dataset", None), *getattr(dataset, "datasets", ())]
    return any(_may_draw(one) for one in inner if one is not None)


def _samples_of(batch: Any) -> int:
    """Return the number of samples in the longest field: a share is not empty if only one of its fields is."""
    fields = _fields(batch) if isinstance(batch, tuple | Mapping) else {0: batch}
    found = [len(v) for v in fields.values() if not _is_of_all(v) and hasattr(v, "__len__")]
    if not found:
        raise ConfigurationError(
            f"batch: this {type(batch).__name__} has no tensor and no list of samples in it. Give the samples of this "
            "rank's share: a tensor, a list, or a tuple or dict with one in it."
        )
    return max(found)


def _fields(batch: tuple[Any, ...] | Mapping[Any, Any]) -> dict[Any, Any]:
    return dict(enumerate(batch)) if isinstance(batch, tuple) else dict(batch.items())


def _is_of_all(value: Any) -> bool:
    """True if a field is one value for the whole batch, not one per sample."""
    return value is None or isinstance(value, numbers.Number | str | bytes) or getattr(value, "ndim", None) == 0


def _check_lengths(fields: Mapping[Any, Any]) -> None:
    """Raise ConfigurationError for fields that cannot be cut into micro-batches, or that have different lengths."""
    cut = {name: value for name, value in fields.items() if not _is_of_all(value)}
    fix = "Give a tensor or a list with an entry for each sample, or no micro_batch."
    for name, value in cut.items():
        if isinstance(value, Mapping) or not (hasattr(value, "__len__") and hasattr(value, "__getitem__")):
            raise ConfigurationError(
                f"batch[{name!r}]: a {type(value).__name__} cannot be cut into micro-batches. {fix}"
            )
    (first, samples), *others = cut.items()
    for name, value in others:
        if len(value) != len(samples):
            raise ConfigurationError(
                f"batch[{name!r}]: has {len(value)} entries, and batch[{first!r}] {len(samples)}, so they cannot be "
                f"cut at the same samples. {fix}"
            )


class Partition(Sequence[Any]):
    """One part of a data set. Item i is the i-th sample of this part, or its index if only a length was given."""

    def __init__(self, dataset: Any, members: torch.Tensor, seed: int, number: int) -> None:
        self._dataset, self._members, self._order = dataset, members, members
        self._seed, self._number = seed, number

    def set_epoch(self, epoch: int) -> None:
        """Reorder the same samples by the seed and the epoch."""
        self._order = self._members[_shuffled(len(self._members), self._seed, epoch, self._number)]

    @property
    def indices(self) -> list[int]:
        """Indices into the whole data set, in this epoch's order."""
        return [int(index) for index in self._order.tolist()]

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self._sample(index) for index in self._order[i].tolist()]
        return self._sample(int(self._order[i]))

    def _sample(self, index: int) -> Any:
        return index if self._dataset is None else self._dataset[index]


class DataPartitioner:
    """Cut a data set into lasting parts by fractions. Every sample is in exactly one part, which the seed decides.

        parts = ddpjob.DataPartitioner(dataset, [0.8, 0.2], seed=7)
        train, validation = parts.use(0), parts.use(1)

    dataset    anything with len() and [index], or the number of samples (items are then indices).
    fractions  positive or zero, sum 1 (to 1e-6). Sizes are the fractions of n rounded by largest remainder, so that
               they add up to n.
    seed       decides which sample is in which part, and the order in each epoch. No epoch moves a sample to another
               part.
    """

    def __init__(self, dataset: Any, fractions: Sequence[float], seed: int) -> None:
        source = dataset if hasattr(dataset, "__len__") else None
        if source is None and hasattr(dataset, "__iter__"):
            raise ConfigurationError(
                f"dataset: a {type(dataset).__name__} has no length, so it cannot be cut into parts."
            )
        n = _at_least(0, "dataset", dataset if source is None else len(source))
        seed = _integer("seed", seed)
        parts = torch.split(_shuffled(n, seed), part_sizes(n, _numbers("fractions", fractions)))
        self._partitions = [Partition(source, members, seed, number) for number, members in enumerate(parts)]

    def __len__(self) -> int:
        return len(self._partitions)

    def use(self, i: int) -> Partition:
        """Return the part of fraction i."""
        if not 0 <= i < len(self):
            raise ConfigurationError(f"i: {i}: there are {len(self)} parts, 0 to {len(self) - 1}.")
        return self._partitions[i]

    def set_epoch(self, epoch: int) -> None:
        """Reshuffle the samples within each part."""
        for partition in self._partitions:
            partition.set_epoch(epoch)


def _whole(state: Mapping[str, Any], name: str) -> int:
    value = state.get(name)
    if type(value) is not int or value < 0:
        raise StateError(f"{name}: the saved state has {value!r}, must be a whole number from 0 on. It is damaged.")
    return value


def part_sizes(n: int, fractions: Sequence[float]) -> list[int]:
    """Return integer sizes that add up to n, nearest to the fractions of n: the largest remainders are rounded up."""
    if not fractions:
        raise ConfigurationError("fractions: [] has no part. Give at least one, e.g. [1.0].")
    for i, fraction in enumerate(fractions):
        if not (math.isfinite(fraction) and fraction >= 0):
            raise ConfigurationError(f"fractions[{i}]: {fraction} must be a number from 0 to 1.")
    if abs(math.fsum(fractions) - 1) > 1e-6:
        raise ConfigurationError(f"fractions: {list(fractions)} add up to {math.fsum(fractions):g}, must be 1.")
    # Divide by the exact sum: [0.3333333] * 3 of 50,000,000 would be 49,999,995, and rounding cannot add the other 5.
    whole = sum(map(Fraction, fractions))
    exact = [Fraction(fraction) * n / whole for fraction in fractions]
    sizes = [math.floor(size) for size in exact]
    by_remainder = sorted(range(len(fractions)), key=lambda i: sizes[i] - exact[i])
    for i in by_remainder[: n - sum(sizes)]:
        sizes[i] += 1
    return sizes


def _shuffled(n: int, *seeds: int) -> torch.Tensor:
    """Return a permutation of 0..n-1 (int64). Seeds are hashed, so that (7, epoch 1) and (8, epoch 0) are unrelated."""
    digest = hashlib.sha256(",".join(map(str, seeds)).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randperm(n, generator=generator, device="cpu")


def _rank_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise ConfigurationError(f"rank: {rank}, world_size: {world_size}. Give both or neither.")
    if rank is None or world_size is None:
        return rank_in_group("pass rank= and world_size=")
    if not 0 <= rank < world_size:
        raise ConfigurationError(f"rank: {rank} must be at least 0 and less than world_size: {world_size}.")
    return rank, world_size


def _at_least(least: int, name: str, value: int) -> int:
    whole = _integer(name, value)
    if whole < least:
        raise ConfigurationError(f"{name}: {value} must be at least {least}.")
    return whole


def _integer(name: str, value: Any) -> int:
    """Return a whole number, also from numpy or a tensor. Raise ConfigurationError for 2.5, which int() would cut."""
    try:
        return operator.index(value)
    except TypeError:
        if hasattr(value, "__getitem__") and not isinstance(value, str):
            raise ConfigurationError(f"{name}: a {type(value).__name__} has a length: give len(...).") from None
        raise ConfigurationError(f"{name}: {value!r} is not a whole number. Use // for /, or int().") from None


def _numbers(name: str, values: Any) -> list[float]:
    """Return the numbers in a list, tuple, array or tensor. Raise ConfigurationError otherwise."""
    try:
        return [float(value) for value in values]
    except (TypeError, ValueError):
        raise ConfigurationError(f"{name}: {values!r} must be a list of numbers, e.g. [0.8, 0.2].") from None
