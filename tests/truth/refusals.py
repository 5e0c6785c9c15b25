"""Refusals: what the library reports that a restart cannot restore, and the differences that this allows.

A refusal allows differences in the parts of the final state that its sentence names, and in all that depends on them in
the script. It must be in the log before the failure, or before a restart reads the file if it is about a file. Any
other difference is an error, because a restart could use the folder, which has everything."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from grammar import Recipe

SAMPLES, LOSS = "samples", "loss"
EXTRAS = ("extra", "extra_0", "extra_1")
READERS = ("reader_of_each_rank", "stateful_loader", "begun_by_state")
GENERATORS = ("torch", "python", "numpy")
OF_TRAINING = ("criterion", "adaptive", "hard_examples", "tensor", "clip_history", "normalizer", "best_restored")
DROPOUT = ("dropout", "checkpointed", "reentrant")
OF_EACH_RANK = (
    *(*OF_TRAINING, "history_of_each_rank", "metric", "best_copy"),
    *("of_rank_0", "value_of_rank_0", "unequal_number"),
)
"""Options of `extra` that may differ between ranks. The training uses those in OF_TRAINING."""
ERROR = re.compile(r"^.*\b(?:StateError|ConfigurationError|SnapshotError): (?P<sentence>.*)", re.MULTILINE)
_RESUMED = re.compile(r"^ddpjob: (?:resumed at step \d+ from (?P<where>.*)|begins at step 0)", re.MULTILINE)


class Part(NamedTuple):
    """One object in a rank's final state. SAMPLES and LOSS stand for the samples and the losses of all its steps."""

    rank: int
    name: str


class _Sentence(NamedTuple):
    says: str
    excuses: Callable[[re.Match[str], Recipe], Iterator[Part]]
    of_folder: bool = False
    """True if the refusal is about the folder only."""
    at_restart: bool = False
    """True if the refusal is logged at the restart, because only then is it known which rank was late for a save."""


def _gradients(_: re.Match[str], recipe: Recipe) -> Iterator[Part]:
    yield from _model(recipe)


def _stepped_again(_: re.Match[str], recipe: Recipe) -> Iterator[Part]:
    yield from (Part(rank, "scheduler") for rank in (0, 1))
    yield from _model(recipe)


def _generators(found: re.Match[str], recipe: Recipe) -> Iterator[Part]:
    """Yield the random generators of the lost ranks. Some loaders draw the order of the next epoch from them."""
    names = (*GENERATORS, SAMPLES) if recipe["data"] in ("shuffled", "begun_by_state") else GENERATORS
    yield from (Part(int(rank), name) for rank in re.findall(r"\d+", found["ranks"]) for name in names)


def _of_ranks(found: re.Match[str], recipe: Recipe) -> Iterator[Part]:
    """Yield the parts that differ between ranks, for each rank that did not save."""
    yield from _generators(found, recipe)
    for rank in map(int, re.findall(r"\d+", found["ranks"])):
        yield from (Part(rank, name) for name in _differ_by_rank(recipe))
        if recipe["optimizer"] == "post_local":  # ranks step alone, so rank 0 may save a step that others have not made
            yield Part(rank, SAMPLES)


def _large(found: re.Match[str], _: Recipe) -> Iterator[Part]:
    yield from (Part(rank, name) for name in found["names"].split(", ") for rank in (0, 1))


def _augmented(_: re.Match[str], recipe: Recipe) -> Iterator[Part]:
    if recipe["augmented"] != "no":
        yield from _model(recipe)


def _seeds_of_loaders(recipe: Recipe) -> Iterator[Part]:
    """Yield the generator of a DataLoader's seed, which a restart draws again. If training draws from the generator,
    too, yield nothing."""
    if recipe["data"] == "plain_loader" and "torch" not in _drawn_from(recipe):
        yield from (Part(rank, "torch") for rank in (0, 1))


def _skipped(_: re.Match[str], recipe: Recipe) -> Iterator[Part]:
    """Yield the samples, and what the script does and draws in each epoch: fewer batches end an epoch earlier."""
    names = (SAMPLES, "sampler", "scheduler", "average", "extra", *GENERATORS)
    yield from (Part(rank, name) for rank in (0, 1) for name in names if recipe["ahead"] in ("one", "all"))


def _torch(_: re.Match[str], __: Recipe) -> Iterator[Part]:
    yield from (Part(rank, "torch") for rank in (0, 1))


def _evaluation(_: re.Match[str], recipe: Recipe) -> Iterator[Part]:
    if recipe["evaluation_at"] == "marked" and recipe["evaluation_by"] != "computed":
        yield from _torch(_, recipe)


def _all_generators(_: re.Match[str], __: Recipe) -> Iterator[Part]:
    yield from (Part(rank, name) for rank in (0, 1) for name in GENERATORS)


_SENTENCES = (
    _Sentence(r"a DataLoader draws its seed from torch's global generator: a restart within an epoch does not", _torch),
    _Sentence(r"a DataLoader with workers iterates this sampler: a restart does not continue random num", _augmented),
    _Sentence(r"\w+: batches are taken before they are trained .* a restart skips them", _skipped),
    _Sentence(r"\w+: batches are taken before they are trained .* a restart skips them", _skipped, of_folder=True),
    _Sentence(r"(?P<model>\w+): called without its DistributedDataParallel .* a restart gives all ranks", _gradients),
    _Sentence(r"(?P<model>\w+): its communication hook has a state \(.*a restart does not continue it", _gradients),
    _Sentence(
        r"(?P<model>\w+): step \d+ is saved while gradients wait .*a restart does not continue",
        _gradients,
        of_folder=True,
    ),
    _Sentence(r".*: a rank that is killed between its backward pass and .* loses its random nu", _all_generators),
    _Sentence(r".*: a rank that is killed between its backward pass and .* loses its .*buffers", _gradients),
    _Sentence(r"random numbers: changed between should_stop\(\) or keep\(\) and each .* as in an eval", _evaluation),
    _Sentence(r"\w+: its state \w+ is the memory of a parameter: a restart separates them", _gradients),
    _Sentence(r"\w+: step \d+ is saved at the last batch .* a restart goes on at the end", _stepped_again),
    _Sentence(
        r"(?P<model>\w+): its parameters differ between the ranks: a restart does not give each",
        _gradients,
        of_folder=True,
    ),
    _Sentence(
        r"ranks? (?P<ranks>[\d, ]+) did not save step \d+: from the snapshot a restart does not continue the random "
        r"numbers there .*, nor what else differs between the ranks",
        _of_ranks,
        of_folder=True,
    ),
    _Sentence(
        r"\S+ has no random state of ranks? (?P<ranks>[\d, ]+), which did not save in time: seeded",
        _generators,
        at_restart=True,
    ),
    _Sentence(
        r"(?P<names>.*): its state differs between the ranks .*a restart does not give each rank its own", _large
    ),
)


def excused(log: str, recipe: Recipe, *, at_restart: bool = False, late: bool = False) -> tuple[set[Part], list[str]]:
    """Return the parts that may differ, and the log's sentences that allow it. at_restart: include sentences that are
    logged only at the restart. late: sentences before the last kill count, not only those before the first."""
    before, _, after = log.rpartition("STRUCK ") if late else log.partition("STRUCK ")
    resumed = list(_RESUMED.finditer(log if late else after))
    is_from_folder = any("the memory on" not in (one["where"] or "") for one in resumed)
    first = resumed[-1 if late else 0] if resumed else None
    before_it_is_read = before if first is None else log[: first.start()] if late else before + after[: first.start()]
    parts = set(_seeds_of_loaders(recipe))
    sentences = []
    for one in _SENTENCES:
        where = (log if late else after) if one.at_restart else before_it_is_read if one.of_folder else before
        found = re.search(rf"^ddpjob: (?:rank \d+: )?{one.says}.*", where, re.MULTILINE)
        if found and (is_from_folder or not one.of_folder) and one.at_restart <= at_restart:
            parts |= set(one.excuses(found, recipe))
            sentences.append(found[0])
    return _with_what_follows(parts, recipe), sentences


def is_named_in(sentence: str, names: Iterable[str]) -> bool:
    """True if an error names an object of this script."""
    return not set(re.findall(r"\w+", sentence)).isdisjoint(names)


def _with_what_follows(parts: set[Part], recipe: Recipe) -> set[Part]:
    found, left = set(parts), list(parts)
    while left:
        for follows in _depends_on(left.pop(), recipe):
            if follows not in found:
                found.add(follows)
                left.append(follows)
    return found


def _depends_on(part: Part, recipe: Recipe) -> Iterator[Part]:
    """Yield the parts of the final state that depend on this part."""
    if part.name in GENERATORS and part.name in _drawn_from(recipe):
        yield from _model(recipe)
    if part.name == "extra" and recipe["extra"] in OF_TRAINING:
        yield from _model(recipe)
    if part.name == "extra" and recipe["extra"] == "hard_examples":
        yield Part(part.rank, SAMPLES)
    if part.name == "reader":
        yield Part(part.rank, SAMPLES)
    if part.name in (SAMPLES, LOSS, "model", "optimizer"):
        yield from _model(recipe)
    if part.name == LOSS and recipe["backward"] == "noise_of_each_rank":  # the script draws at some losses only
        yield Part(part.rank, "python")


def _model(recipe: Recipe) -> Iterator[Part]:
    """Yield all parts that depend on gradients, on both ranks, because gradients are averaged."""
    names = {LOSS, "model", "optimizer", "critic", "critic_optimizer", "head", "average", "scaler"}
    names |= {"scheduler"} if recipe["scheduler"].startswith("plateau") else set()
    names |= {"held"} if recipe["evaluation_by"] == "deciding" else set()
    names |= {*EXTRAS} if recipe["extra"] in (*OF_EACH_RANK, "early_stop") else set()
    yield from (Part(rank, name) for rank in (0, 1) for name in sorted(names))


def _drawn_from(recipe: Recipe) -> set[str]:
    """Return the random generators that the training draws from."""
    drawn = {recipe["draws"], recipe["augmented"]}
    drawn |= {"torch"} if recipe["model"] in DROPOUT or recipe["draws"] in ("mixup", "unequal") else set()
    drawn |= {"python"} if recipe["model"] == "stochastic_depth" or recipe["backward"].startswith("noise") else set()
    return drawn | ({"numpy"} if recipe["draws"] == "mixup" else set())


def _differ_by_rank(recipe: Recipe) -> Iterator[str]:
    if recipe["data"] in READERS:
        yield "reader"
    if recipe["extra"] in OF_EACH_RANK:
        yield from EXTRAS
    has_statistics = recipe["model"] in (
        "batchnorm",
        "cumulative",
        "spectral",
        "own_norm",
        "plain_norm",
        "momentum_encoder",
        "checkpointed",
        "reentrant",
    )
    sends_those_of_last = recipe["join"] == "yes" and has_statistics  # not those of rank 0
    if recipe["buffers"] == "of_each_rank" or recipe["parameters"] == "ignored_by_ddp" or sends_those_of_last:
        yield "model"
    has_buffers = has_statistics or recipe["buffers"] != "none"
    is_trained = recipe["average"].startswith("target") and has_buffers  # its forward pass changes its buffers
    if is_trained or (recipe["buffers"] == "of_each_rank" and recipe["average"] != "none"):
        yield "average"
