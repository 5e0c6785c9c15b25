"""Rules about the samples of a rank: samplers, batch sizes, partitions, downloads, and the workers that load them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpjob_check.nodes import (
    Function,
    Marker,
    before,
    has_hidden_arguments,
    is_method,
    is_true,
    name_of,
    words_in,
    words_of,
)
from ddpjob_check.ranks import at
from ddpjob_check.rule import CheckedJob, Found, rule
from ddpjob_check.script import DDP, Kind, Script

LOADER = "torch.utils.data.DataLoader"
SAMPLER = "torch.utils.data.DistributedSampler"


@rule(
    "warning",
    wrong="loader = DataLoader(dataset, batch_size=64, shuffle=True)",
    right="loader = DataLoader(dataset, batch_size=64, sampler=DistributedSampler(dataset))",
)
def sampler_missing(script: Script, job: CheckedJob) -> Iterator[Found]:
    """Without a sampler each rank trains on all samples: four GPUs do four times the work of one in an epoch."""
    if not script.is_distributed or not script.calls_to(DDP) or job.has_one_rank or any(_unused(script)):
        return
    for call in script.calls_to(LOADER):
        if _samples_itself(script, call) or not _is_for_training(script, call) or _is_chosen(script, call):
            continue
        dataset = script.argument(call, "dataset", 0)
        if dataset is not None and _is_whole(script, dataset) and script.on_every_rank(call):
            yield at(
                call,
                f"DataLoader({script.text_of(dataset)}, …) without a sampler: every rank trains on all samples, so an "
                "epoch does the same work on each rank; pass sampler=DistributedSampler(…)",
            )


def _samples_itself(script: Script, call: ast.Call) -> bool:
    names = (("sampler", 3), ("batch_sampler", 4))
    given = [v for name, position in names if (v := script.argument(call, name, position)) is not None]
    return has_hidden_arguments(call) or any(not _is_none(v) for v in given)


def _is_for_training(script: Script, call: ast.Call) -> bool:
    """True if the loader shuffles, or backward() follows in its loop."""
    if is_true(script.argument(call, "shuffle", 2)):
        return True
    loops = [n for n in script.nodes if isinstance(n, ast.For) and call in script.origins(_iterated(script, n))]
    return any(is_method(n, "backward") for loop in loops for statement in loop.body for n in ast.walk(statement))


def _iterated(script: Script, loop: ast.For) -> ast.expr:
    """Return what a loop iterates over, for example the loader in `enumerate(loader)` and `tqdm(loader)`."""
    inner = loop.iter
    while isinstance(inner, ast.Call) and inner.args and name_of(inner.func) in ("enumerate", "tqdm"):
        inner = inner.args[0]
    return inner


def _is_chosen(script: Script, call: ast.Call) -> bool:
    """True if a condition such as `if distributed:` chooses between this loader and one with a sampler."""
    hints = {"distributed", "ddp", "world", "parallel", "sampler", "initialized", "single", "multi", "nproc"}
    return any(words_in(test) & hints for test in script.enclosing_tests(call))


def _is_whole(script: Script, dataset: ast.expr) -> bool:
    """True if a data set is certainly equal on every rank: an instance of a class, made without a rank."""
    if script.depends_on_rank(dataset, by_arguments=True):
        return False
    origins = script.origins(dataset)
    return all(isinstance(o, ast.Call) and _makes_whole(script, o) for o in origins)


def _makes_whole(script: Script, call: ast.Call) -> bool:
    if script.depends_on_rank(call, by_arguments=True):
        return False
    full = script.called(call)
    defined = script.definition(call.func)
    if isinstance(defined, ast.ClassDef):
        bases = {script.full_name(b).rsplit(".", 1)[-1] for b in defined.bases}
        return not any("Iterable" in b or "Partition" in b for b in bases)
    if isinstance(defined, Function) or not full:
        return False
    return full.startswith("torchvision.datasets.") or full in ("torch.utils.data.TensorDataset",)


@rule(
    "warning",
    wrong="for epoch in range(epochs):\n    for batch in loader: …",
    right="for epoch in range(epochs):\n    sampler.set_epoch(epoch)\n    for batch in loader: …",
)
def set_epoch_missing(script: Script, job: CheckedJob) -> Iterator[Found]:
    """A DistributedSampler shuffles by seed and epoch. Without set_epoch all epochs have the same order."""
    if script.uses_a_framework or script.mentions("set_epoch") or job.has_one_rank or any(_unused(script)):
        return
    if not any(_is_loop_of_epochs(n) for n in script.nodes):
        return
    for call in script.calls_to(SAMPLER):
        shuffle = script.argument(call, "shuffle", 3)
        if (shuffle is None or is_true(shuffle)) and not has_hidden_arguments(call):
            yield at(
                call,
                "DistributedSampler without set_epoch: every epoch has the same order; call "
                "sampler.set_epoch(epoch) at the start of each",
            )
            return


def _is_loop_of_epochs(node: ast.AST) -> bool:
    if isinstance(node, ast.While):
        return any(isinstance(n, ast.Name) and "epoch" in words_of(n.id) for n in ast.walk(node.test))
    return (
        isinstance(node, ast.For)
        and isinstance(node.target, ast.Name)
        and "epoch" in words_of(node.target.id)
        and not (isinstance(node.iter, ast.Tuple | ast.List) and len(node.iter.elts) == 1)
    )


@rule(
    "warning",
    wrong="sampler = DistributedSampler(dataset)\nloader = DataLoader(dataset, shuffle=True)",
    right="sampler = DistributedSampler(dataset)\nloader = DataLoader(dataset, sampler=sampler)",
)
def sampler_unused(script: Script, job: CheckedJob) -> Iterator[Found]:
    """A DistributedSampler does nothing by itself: a loader that does not get it gives every rank all samples."""
    if script.uses_a_framework or job.has_one_rank or not script.calls_to(LOADER):
        return
    for call in _unused(script):
        yield at(
            call,
            "DistributedSampler(…) is passed to no DataLoader, so every rank trains on all samples; pass sampler=… to "
            "the loader, and remove shuffle",
        )


def _unused(script: Script) -> Iterator[ast.Call]:
    """Yield samplers that are assigned to a name, and then certainly used for set_epoch() at most."""
    for call in script.calls_to(SAMPLER):
        place = script.parent(call)
        if isinstance(place, ast.Assign) and len(place.targets) == 1 and isinstance(place.targets[0], ast.Name):
            name = place.targets[0].id
            uses = [n for n in script.nodes if isinstance(n, ast.Name) and n.id == name and n is not place.targets[0]]
            parents = [script.parent(use) for use in uses]
            if all(isinstance(p, ast.Attribute) and p.attr == "set_epoch" for p in parents):
                yield call


@rule("error", wrong="DataLoader(dataset, shuffle=True, sampler=sampler)", right="DataLoader(dataset, sampler=sampler)")
def shuffle_with_sampler(script: Script, job: CheckedJob) -> Iterator[Found]:
    """A DataLoader takes its order from the sampler or shuffles itself: both together raise a ValueError."""
    for call in script.calls_to(LOADER):
        shuffle = script.argument(call, "shuffle", 2)
        if not is_true(shuffle):
            continue
        for name, position in (("sampler", 3), ("batch_sampler", 4)):
            given = script.argument(call, name, position)
            samples = [script.called(o).endswith("Sampler") for o in script.origins(given)]
            if given is not None and any(samples):
                yield at(
                    shuffle,
                    f"DataLoader(shuffle=True, {name}=…) makes torch raise a ValueError; remove shuffle: the "
                    "DistributedSampler shuffles",
                    "error" if all(samples) else "warning",
                )


@rule(
    "error",
    wrong="DataLoader(dataset, batch_size=128 / world_size)",
    right="DataLoader(dataset, batch_size=128 // world_size)",
)
def batch_size_is_float(script: Script, job: CheckedJob) -> Iterator[Found]:
    """`/` gives a float, which DataLoader rejects with a ValueError, after the job has got its GPUs."""
    for call in script.calls_to(LOADER, "torch.utils.data.BatchSampler"):
        size = script.argument(call, "batch_size", 1)
        origins = script.origins(size) if size is not None else []
        floats = [o for o in origins if _is_float(script, o)]
        others = [o for o in origins if o not in floats and o is not Marker.BROUGHT]
        if size is not None and floats and all(isinstance(o, ast.Constant | ast.Attribute) for o in others):
            wrong = floats[0]
            yield at(
                size,
                f"batch_size={script.text_of(wrong) if isinstance(wrong, ast.expr) else '…'} is a float, and "
                "DataLoader needs a whole number; use // instead of /",
                "error" if len(floats) == len(origins) else "warning",
            )


def _is_float(script: Script, origin: object) -> bool:
    if isinstance(origin, ast.BinOp):
        return isinstance(origin.op, ast.Div)
    if isinstance(origin, ast.Constant):
        return isinstance(origin.value, float)
    return script.called(origin) == "float"


@rule(
    "warning",
    wrong="DataLoader(dataset, batch_size=args.global_batch_size, sampler=sampler)",
    right="DataLoader(dataset, batch_size=args.global_batch_size // dist.get_world_size(), sampler=sampler)",
)
def batch_size_not_divided(script: Script, job: CheckedJob) -> Iterator[Found]:
    """DataLoader's batch size is per rank. If a total is not divided, the global batch grows with the number of ranks,
    and the learning rate no longer fits."""
    if not script.is_distributed or job.has_one_rank:
        return
    for call in script.calls_to(LOADER):
        size = script.argument(call, "batch_size", 1)
        name = _total_name(script, size) if size is not None and script.on_every_rank(call) else ""
        if size is not None and name:
            yield at(
                size,
                f"batch_size={script.text_of(size)}: {name} sounds like the total of all ranks, but each rank uses "
                "all of it; divide it: // dist.get_world_size()",
            )


def _total_name(script: Script, size: ast.expr) -> str:
    """Return the variable of a total batch size that the script does not divide by the number of ranks; else ""."""
    for node in (size, *script.origins(size)):
        if isinstance(node, ast.Name | ast.Attribute):
            words = words_of(name_of(node))
            undivided = not any(isinstance(o, ast.BinOp | ast.Call) for o in script.origins(node))
            if words & {"global", "total", "effective"} and words & {"batch", "batchsize", "bs", "bsz"} and undivided:
                return name_of(node)
    return ""


@rule(
    "error",
    wrong="indices = list(range(len(data)))\nRandom().shuffle(indices)\npart = indices[rank::world_size]",
    right="parts = ddpjob.DataPartitioner(data, fractions, seed=7)\npart = parts.use(rank)",
)
def partitioner_unseeded(script: Script, job: CheckedJob) -> Iterator[Found]:
    """Each rank divides the data by itself. Without a common seed each divides it differently: some samples are in two
    parts, others in none, and no error is raised."""
    for call in script.calls if script.uses_torch and not job.has_one_rank else ():
        if _draws_unseeded(script, call) and _is_in_partitioner(script, call) and not _is_the_same(script, call):
            yield at(
                call,
                f"{script.text_of(call)}: without a seed every rank draws a different order, and the parts overlap; "
                "give all ranks the same seed, or use ddpjob.DataPartitioner(data, fractions, seed)",
                "error" if _is_picked_by_rank(script, call) else "warning",
            )
            return


def _is_in_partitioner(script: Script, call: ast.Call) -> bool:
    """True if the class or function is named like a partitioner, or if a rank picks its part by its number."""
    function = script.function(call)
    scopes = [function, script.scope(function)] if function else []
    if any(isinstance(s, Function | ast.ClassDef) and "partition" in s.name.lower() for s in scopes):
        return True
    return _is_picked_by_rank(script, call)


def _is_picked_by_rank(script: Script, call: ast.Call) -> bool:
    """True if a rank indexes the shuffled values: indices[rank::size]."""
    function = script.function(call)
    picked = [n for n in script.nodes if isinstance(n, ast.Subscript) and _has_rank(script, n.slice)]
    if name_of(call.func) == "shuffle" and call.args:  # shuffle() works in place on its argument
        shuffled = name_of(call.args[0])
        return any(shuffled and name_of(n.value) == shuffled and script.function(n) is function for n in picked)
    return any(call in script.origins(n.value) for n in picked)


def _has_rank(script: Script, index: ast.expr) -> bool:
    return any(
        "rank" in words_of(name_of(n)) or (isinstance(n, ast.expr) and Kind.UNKNOWN not in script.kinds(n))
        for n in ast.walk(index)
    )


_MODULES = {"random": "random", "numpy.random": "numpy", "torch": "torch", "torch.utils.data": "torch"}
_DRAWS = {"shuffle", "sample", "permutation", "randperm", "random_split"}
_SEEDS = {
    "random": ("random.seed",),
    "numpy": ("numpy.random.seed",),
    "torch": ("torch.manual_seed", "torch.random.manual_seed"),
}
_GENERATORS = {"random.Random", "numpy.random.default_rng", "numpy.random.RandomState", "torch.Generator"}


def _draws_unseeded(script: Script, call: ast.Call) -> bool:
    module, _, name = script.called(call).rpartition(".")
    if name in _DRAWS and module in _MODULES:
        if script.argument(call, "generator") is not None or has_hidden_arguments(call):
            return False
        seeds = script.calls_to(*_SEEDS[_MODULES[module]])
        return not any(map(_gives_a_seed, seeds)) and not any(_may_seed(script, c) for c in script.calls)
    if isinstance(call.func, ast.Attribute) and call.func.attr in _DRAWS:
        makers = script.origins(call.func.value)
        return all(_is_unseeded_generator(script, m) for m in makers)
    return False


def _may_seed(script: Script, call: ast.Call) -> bool:
    """True if a call may seed all generators: set_seed(1), utils.fix_random_seeds(1), `with numpy_seed(1):`."""
    words = words_of(name_of(call.func))
    own = is_method(call, "seed") or "manual" in words or "get" in words or "initial" in words
    return bool(words & {"seed", "seeds"}) and not own


def _is_the_same(script: Script, call: ast.Call) -> bool:
    """True if one rank may broadcast its random values to all ranks."""
    function = script.function(call)
    sent = script.calls_to(*(f"torch.distributed.{name}" for name in ("broadcast", "broadcast_object_list")))
    return any(script.function(c) is function for c in sent)


def _is_unseeded_generator(script: Script, maker: object) -> bool:
    if not isinstance(maker, ast.Call) or script.called(maker) not in _GENERATORS or maker.keywords:
        return False
    if maker.args and not _is_none(maker.args[0]) and script.called(maker) != "torch.Generator":
        return False
    seeds = [*script.methods_called("seed"), *script.methods_called("manual_seed")]
    return not any(
        isinstance(s.func, ast.Attribute) and maker in script.origins(s.func.value) and _gives_a_seed(s) for s in seeds
    )


def _gives_a_seed(call: ast.Call) -> bool:
    return bool(call.args or call.keywords) and not (call.args and _is_none(call.args[0]))


_DOWNLOADS = {
    "urllib.request.urlretrieve", "wget.download", "gdown.download", "torchvision.datasets.utils.download_url",
    "torchvision.datasets.utils.download_and_extract_archive",
}  # fmt: skip


@rule(
    "warning",
    wrong="dataset = datasets.MNIST(root, download=True)",
    right="if local_rank == 0:\n    datasets.MNIST(root, download=True)\n"
    "dist.barrier()\ndataset = datasets.MNIST(root)",
)
def download_on_every_rank(script: Script, job: CheckedJob) -> Iterator[Found]:
    """All processes of a node download into one folder at once, and one may unpack what another is still writing."""
    if not script.is_distributed or job.nproc == 1:
        return
    for call in script.calls:
        wanted = script.argument(call, "download")
        asks = is_true(wanted)
        downloads = asks or script.called(call) in _DOWNLOADS
        if downloads and script.on_every_rank(call) and not _comes_first_on_one(script, call):
            yield at(
                wanted if asks and wanted else call,
                f"{script.text_of(call.func)}: every rank downloads to the same place at the same time, and may read "
                "what another is still writing; download on local rank 0, then barrier(), then load",
            )


def _comes_first_on_one(script: Script, call: ast.Call) -> bool:
    """True after `if local_rank != 0: barrier()`, which lets local rank 0 download first."""
    waiting = (
        sibling
        for child, parent in script.above(call)
        for sibling in before(parent, child)
        if isinstance(sibling, ast.If) and script.depends_on_rank(sibling.test)
    )
    return any(script.called(n) == "torch.distributed.barrier" for w in waiting for s in w.body for n in ast.walk(s))


def _is_none(node: object) -> bool:
    return node is Marker.UNKNOWN or (isinstance(node, ast.Constant) and node.value is None)


# ---------------------------------------------------------------- DataLoader workers when the training is stopped

_SAVES_AT_A_STOP = (
    "ddpjob.should_stop",
    "ddpjob.group.stop.should_stop",
    "ddpjob.huggingface.StopTogether",
    "ddpjob.lightning.JobCallback",
)


@rule(
    "warning",
    wrong="command: [torchrun, train.py]    # DataLoader(dataset, num_workers=4), ddpjob.should_stop(step)",
    right="DataLoader(dataset, num_workers=4, worker_init_fn=ddpjob.ignore_sigterm)\n# or: command: [ddprun, train.py]",
)
def workers_get_sigterm(script: Script, job: CheckedJob) -> Iterator[Found]:
    """torchrun sends SIGTERM to the workers of a DataLoader as well. The loader raises when one of them ends, so a
    training that would save at a stop (a drain, a suspend, Ctrl-C) saves nothing."""
    if not job.by_torchrun or not _saves_at_a_stop(script):
        return
    for call in script.calls_to(LOADER):
        workers = script.argument(call, "num_workers", 5)
        if workers is not None and _is_some(script, workers) and _lets_workers_end(script, call):
            yield at(
                call,
                f"DataLoader(…, num_workers={script.text_of(workers)}) under torchrun: at a stop torchrun "
                "signals the workers as well, the loader raises, and nothing is saved; pass "
                "worker_init_fn=ddpjob.ignore_sigterm, or start the script with ddprun",
            )
    for call in script.calls:
        workers = script.argument(call, "dataloader_num_workers")
        if workers is not None and _is_some(script, workers):
            yield at(
                call,
                f"dataloader_num_workers={script.text_of(workers)} under torchrun: at a stop torchrun sends SIGTERM to "
                "the workers as well, the loader raises, and nothing is saved; ddpjob.ignore_sigterm cannot be given "
                "to the Trainer's own loader, so start the script with ddprun",
            )


def _saves_at_a_stop(script: Script) -> bool:
    """True if the script saves when it is stopped, by the library or in its own SIGTERM handler."""
    for call in script.calls_to("signal.signal"):
        number, handler = script.argument(call, "signalnum", 0), script.argument(call, "handler", 1)
        is_sigterm = number is not None and name_of(number) == "SIGTERM"
        if is_sigterm and handler is not None and name_of(handler) not in ("SIG_IGN", "SIG_DFL"):
            return True
    return bool(script.calls_to(*_SAVES_AT_A_STOP))


def _is_some(script: Script, workers: ast.expr) -> bool:
    """True if the number of workers is certainly above 0."""
    origins = script.origins(workers)
    numbers = [o.value for o in origins if isinstance(o, ast.Constant) and isinstance(o.value, int)]
    counts = [o for o in origins if script.called(o) in ("os.cpu_count", "multiprocessing.cpu_count")]
    return len(numbers) + len(counts) == len(origins) and all(number > 0 for number in numbers)


def _lets_workers_end(script: Script, call: ast.Call) -> bool:
    """True if the loader's workers certainly do not ignore SIGTERM: worker_init_fn is missing or does other things."""
    if has_hidden_arguments(call):
        return False
    given = script.argument(call, "worker_init_fn", 10)
    if given is None or (isinstance(given, ast.Constant) and given.value is None):
        return True
    defined = script.definition(given)
    names = {name_of(node) for node in ast.walk(defined)} if defined is not None else None
    return names is not None and names.isdisjoint({"signal", "ignore_sigterm"})
