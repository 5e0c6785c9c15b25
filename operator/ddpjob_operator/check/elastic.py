"""What does not survive a changing number of ranks: rules for elastic jobs, silent for all others."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ddpjob_operator.check import data
from ddpjob_operator.check.data import LOADER, SAMPLER
from ddpjob_operator.check.groups import fixed_texts
from ddpjob_operator.check.nodes import (
    Function,
    Marker,
    has_hidden_arguments,
    is_main_guard,
    is_method,
    leaves,
    name_of,
    words_of,
)
from ddpjob_operator.check.ranks import at
from ddpjob_operator.check.rule import Found, Job, rule
from ddpjob_operator.check.script import INIT, Script

_BATCH_NORM = re.compile(r"torch\.nn\.(modules\.batchnorm\.)?(Lazy)?BatchNorm[123]d")
# Families of torchvision.models whose layers are BatchNorm unless norm_layer says otherwise.
_MODELS_WITH_BATCH_NORM = re.compile(
    r"torchvision\.models\.(\w+\.)?"
    r"(resnet|resnext|wide_resnet|densenet|mobilenet|efficientnet|mnasnet|regnet|shufflenet|googlenet|inception|vgg\d+_bn)"
)
# SyncBatchNorm, convert_syncbn_model, SyncBN; FrozenBatchNorm2d, freeze_bn.
_NORM_OF_ALL_RANKS = re.compile(r"sync_?(batch_?norm|bn)|(frozen|freeze|fix)_?(batch_?norm|bn)", re.IGNORECASE)


@rule(
    "warning",
    wrong="model = DDP(resnet50())",
    right="model = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(resnet50()))",
)
def elastic_batch_norm(script: Script, job: Job) -> Iterator[Found]:
    """Only in an elastic job. BatchNorm normalizes over the samples of one rank. Where the ranks share a global batch,
    their number changes with the nodes, and so does what the layer computes."""
    if not job.is_elastic or not script.is_distributed or any(map(_NORM_OF_ALL_RANKS.search, script.identifiers)):
        return
    for call in script.calls:
        name = script.called(call)
        has_norm = _BATCH_NORM.fullmatch(name) or (
            _MODELS_WITH_BATCH_NORM.match(name) and script.argument(call, "norm_layer") is None
        )
        if has_norm and not has_hidden_arguments(call):
            yield at(
                call,
                f"{script.text_of(call.func)}: BatchNorm normalizes over the samples of one rank, and their number "
                "changes with the nodes of an elastic job; use nn.SyncBatchNorm.convert_sync_batchnorm(model), or a "
                "GroupNorm",
            )
            return


@rule(
    "warning",
    wrong="loader = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset))",
    right="sampler = ddpjob.GlobalBatchSampler(len(dataset), global_batch=256)",
)
def elastic_batch_size(script: Script, job: Job) -> Iterator[Found]:
    """Only in an elastic job. A batch size of each rank makes a step of more samples with more nodes, and the learning
    rate no longer fits. A global batch that is divided by the number of ranks stays the same."""
    if not job.is_elastic or script.uses_a_framework or script.mentions("GlobalBatchSampler") or _shares_out(script):
        return
    told = {found.line for found in data.batch_size_not_divided.find(script, job)}
    for call in script.calls_to(LOADER, "torch.utils.data.BatchSampler"):
        is_loader = script.called(call) == LOADER
        sampler = script.argument(call, "sampler", 3 if is_loader else 0)
        size = script.argument(call, "batch_size", 1)
        if has_hidden_arguments(call) or sampler is None or script.argument(call, "batch_sampler", 4) is not None:
            continue
        if (size or call).lineno in told or not _trains_with(script, sampler):
            continue
        if size is None or _is_of_one_rank(script, size):
            yield at(
                size or call,
                f"batch_size={script.text_of(size) if size else 1} is that of each rank, so a step of an elastic job "
                "has more samples with more nodes; divide a global batch, GLOBAL_BATCH // dist.get_world_size(), or "
                "use ddpjob.GlobalBatchSampler",
            )
            return


def _trains_with(script: Script, sampler: ast.expr) -> bool:
    """Whether a sampler is certainly a DistributedSampler that shuffles, as one for training does."""
    for origin in script.origins(sampler):
        if not isinstance(origin, ast.Call):
            return False
        shuffle = script.argument(origin, "shuffle", 3)
        shuffles = shuffle is None or (isinstance(shuffle, ast.Constant) and shuffle.value is True)
        if script.called(origin) != SAMPLER or not shuffles or has_hidden_arguments(origin):
            return False
    return True


def _is_of_one_rank(script: Script, size: ast.expr) -> bool:
    """A number, or an option of the command line that nothing in this file divides."""
    return all(_is_count(o) or _is_option(script, o) for o in script.origins(size) if o is not Marker.BROUGHT)


def _is_option(script: Script, origin: object) -> bool:
    """args.batch_size, where args is what argparse has read."""
    if not isinstance(origin, ast.Attribute):
        return False
    sources = [o.value if isinstance(o, ast.Subscript) else o for o in script.origins(origin.value)]
    return all(
        is_method(s, "parse_args") or is_method(s, "parse_known_args") for s in sources if isinstance(s, ast.AST)
    )


_OF_A_STEP = {
    "accum",
    "accumulation",
    "accumulate",
    "micro",
    "microbatch",
    "batch",
    "batches",
    "batchsize",
    "bs",
    "bsz",
}


def _shares_out(script: Script) -> bool:
    """Whether anything may divide a batch, or the steps of an accumulation, by the number of ranks: `accum //= size`,
    `accum = total // (batch * world_size)`."""
    for node in script.nodes:
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div | ast.FloorDiv | ast.Mod):
            divisor = node.value if isinstance(node, ast.AugAssign) else node.right
            divided = node.target if isinstance(node, ast.AugAssign) else node.left
            names = [name_of(n) for n in ast.walk(divided)] + list(_names_of_result(script, node))
            words = {word for name in names for word in words_of(name)}
            if words & _OF_A_STEP and any(_counts_processes(script, n) for n in _parts(script, divisor)):
                return True
    return False


def _names_of_result(script: Script, node: ast.AST) -> Iterator[str]:
    """How what is computed is called: `accum = …`, `Trainer(accum=…)`, `def accum(): return …`."""
    function = script.function(node)
    if function is not None:
        yield function.name
    for _, parent in script.above(node):
        if isinstance(parent, ast.keyword):
            yield parent.arg or ""
        targets = parent.targets if isinstance(parent, ast.Assign) else [getattr(parent, "target", None)]
        yield from (name_of(t) for t in targets if isinstance(t, ast.AST))


# ---------------------------------------------------------------- the learning rate


@rule(
    "warning",
    wrong="optimizer = SGD(model.parameters(), lr=0.1 * dist.get_world_size())",
    right="optimizer = SGD(model.parameters(), lr=0.1)  # and the same global batch for any number of ranks",
)
def elastic_learning_rate(script: Script, job: Job) -> Iterator[Found]:
    """Only in an elastic job. A learning rate that is multiplied by the number of ranks changes in the middle of the
    training, each time that a node joins or is lost."""
    if not job.is_elastic or script.uses_a_framework:
        return
    for place, rate in _rates(script):
        product = _product_with_ranks(script, rate)
        if product is not None:
            line = getattr(product, "lineno", 0)
            where = f" (line {line})" if line != getattr(place, "lineno", 0) else ""
            yield at(
                place,
                f"lr={script.text_of(rate)} is multiplied by the number of ranks{where}, which changes while an "
                "elastic job trains; keep the global batch constant, and leave the rate as it is",
            )
            return


def _product_with_ranks(script: Script, rate: ast.expr) -> ast.BinOp | None:
    """The product with the number of ranks that the rate certainly is computed from."""
    sums = [n for n in _parts(script, rate) if isinstance(n, ast.BinOp)]
    divisors = [n.right for n in sums if isinstance(n.op, ast.Div | ast.FloorDiv)]
    if any(_counts_ranks(script, n) for divisor in divisors for n in _parts(script, divisor)):
        return None  # a batch that is divided by the ranks, and multiplied again
    products = [
        product
        for product in sums
        if isinstance(product.op, ast.Mult)
        and not _may_be_left_out(script, product)
        and any(_counts_ranks(script, n) for side in (product.left, product.right) for n in _parts(script, side))
    ]
    return products[-1] if products else None  # the last is the innermost


def _may_be_left_out(script: Script, node: ast.AST) -> bool:
    """Whether this is done under a condition other than that there are several ranks: `if args.scale_lr`."""
    about_ranks = {"distributed", "ddp", "world", "multi"}
    return any(
        not is_main_guard(test) and words_of(" ".join(map(name_of, ast.walk(test)))).isdisjoint(about_ranks)
        for test in script.enclosing_tests(node)
    )


def _rates(script: Script) -> Iterator[tuple[ast.AST, ast.expr]]:
    for call in script.calls:
        name = script.called(call)
        if name.startswith("torch.optim.") and "lr_scheduler" not in name:
            rate = script.argument(call, "lr", 1)
            if rate is not None:
                yield rate, rate
    for node in script.nodes:  # for group in optimizer.param_groups: group["lr"] = …
        if isinstance(node, ast.Assign) and any(_is_rate_of_group(t) for t in node.targets):
            yield node, node.value


def _is_rate_of_group(target: ast.expr) -> bool:
    return isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant) and target.slice.value == "lr"


_KEEP = {"abs", "ceil", "float", "floor", "int", "max", "min", "pow", "round", "sqrt"}


def _parts(script: Script, expression: ast.AST) -> Iterator[ast.AST]:
    """All that a value is computed from, followed through names and functions of this file; of what other functions are
    given, nothing is known to be part of their result."""
    todo, seen = [expression], set[ast.AST]()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        if isinstance(node, ast.Name | ast.Attribute):
            todo += [o for o in script.origins(node) if isinstance(o, ast.expr)]
        elif isinstance(node, ast.Call):
            todo += node.args if name_of(node.func) in _KEEP else script.results(node)
        elif isinstance(node, ast.BinOp | ast.UnaryOp | ast.IfExp | ast.BoolOp):
            todo += ast.iter_child_nodes(node)


def _counts_ranks(script: Script, node: ast.AST) -> bool:
    """Whether a value certainly is the number of all ranks, not of those of a group."""
    if isinstance(node, ast.Call) and name_of(node.func) == "get_world_size":
        return not node.args and not node.keywords
    if isinstance(node, ast.Name | ast.Attribute) and name_of(node).lower() in ("world_size", "worldsize"):
        calls = [o for o in script.origins(node) if isinstance(o, ast.Call) and name_of(o.func) == "get_world_size"]
        return all(_counts_ranks(script, call) for call in calls)
    return script.variable_read(node) == "WORLD_SIZE"


_PROCESSES = {
    "world",
    "gpus",
    "ngpus",
    "ranks",
    "nranks",
    "replicas",
    "processes",
    "nproc",
    "nodes",
    "nnodes",
    "devices",
}


def _counts_processes(script: Script, node: ast.AST) -> bool:
    """Whether a value may be the number of all ranks."""
    return _counts_ranks(script, node) or not words_of(name_of(node)).isdisjoint(_PROCESSES)


# ---------------------------------------------------------------- a fixed number of ranks


@rule(
    "warning",
    wrong='dist.init_process_group("nccl", rank=rank, world_size=4)',
    right='dist.init_process_group("nccl")',
)
def elastic_fixed_world(script: Script, job: Job) -> Iterator[Found]:
    """Only in an elastic job. A number of ranks that stands in the script holds for one number of nodes: with another,
    the group does not form, or samples are left out."""
    if not job.is_elastic:
        return
    for place, text, fix in _fixed_worlds(script):
        yield at(place, f"{text}: the number of ranks of an elastic job changes; {fix}")


def _fixed_worlds(script: Script) -> Iterator[tuple[ast.AST, str, str]]:
    """(where, what is fixed, the fix)"""
    for call in script.inits:
        size = script.argument(call, "world_size", 3 if script.called(call) == INIT else None)
        if size is not None and all(map(_is_fixed, script.origins(size))):
            yield size, f"world_size={script.text_of(size)}", "leave rank and world_size out: torchrun sets both"
    for call in script.calls_to(SAMPLER):
        size = script.argument(call, "num_replicas", 1)
        if size is not None and all(map(_is_fixed, script.origins(size))):
            yield (
                size,
                f"num_replicas={script.text_of(size)}",
                "leave num_replicas and rank out: the sampler asks the group",
            )
    for name, value, node in script.variables_set:
        texts = fixed_texts(script, value, node) if name == "WORLD_SIZE" else []
        if texts:
            yield node, f'os.environ["WORLD_SIZE"] = "{texts[0]}"', "remove it: torchrun sets WORLD_SIZE"
    for node in script.nodes:
        test = _test_of_all(node)
        if test is not None and _compares_ranks(script, test):
            yield node, script.text_of(test), "compute what depends on it from dist.get_world_size()"


def _test_of_all(node: ast.AST) -> ast.Compare | None:
    """`world_size == 4` of an assert, `world_size != 4` of an if that raises."""
    if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare) and isinstance(node.test.ops[0], ast.Eq):
        return node.test
    if isinstance(node, ast.If) and isinstance(node.test, ast.Compare) and isinstance(node.test.ops[0], ast.NotEq):
        ends = leaves(node.body) and not isinstance(node.body[-1], ast.Return | ast.Continue | ast.Break)
        return node.test if ends else None
    return None


def _compares_ranks(script: Script, test: ast.Compare) -> bool:
    """Whether one side is the number of ranks, and the other a number."""
    if len(test.ops) != 1:
        return False
    for counted, number in ((test.left, test.comparators[0]), (test.comparators[0], test.left)):
        is_size = any(_counts_ranks(script, n) for n in (counted, *script.origins(counted)) if isinstance(n, ast.AST))
        if is_size and all(map(_is_fixed, script.origins(number))):
            return True
    return False


def _is_count(origin: object) -> bool:
    return isinstance(origin, ast.Constant) and type(origin.value) is int


def _is_fixed(origin: object) -> bool:
    """A number of several ranks; 1 is for a script without a group."""
    return isinstance(origin, ast.Constant) and type(origin.value) is int and origin.value > 1


# ---------------------------------------------------------------- checkpoints

_KEEPS = {
    "checkpoint",
    "checkpoints",
    "checkpointer",
    "checkpointing",
    "checkpointed",
    "ckpt",
    "ckpts",
    "snapshot",
    "snapshots",
}
_SAVES = _KEEPS | {"save", "saves", "saver", "saving", "dump"}
_LOADS = _KEEPS | {
    "load",
    "loads",
    "recover",
    "recovered",
    "recovery",
    "reload",
    "restore",
    "restored",
    "resume",
    "resumed",
}
# What is loaded once, and is no state of a training.
_LOADS_DATA = {
    "cancer", "cfg", "config", "data", "dataset", "datasets", "diabetes", "digits", "dotenv", "image", "images", "iris",
    "json", "labels", "text", "tokenizer", "wine", "yaml",
}  # fmt: skip
_NO_STATE = (
    "yaml.load",
    "json.load",
    "json.loads",
    "json.dump",
    "json.dumps",
    "numpy.load",
    "tomllib.load",
    "yaml.dump",
)


@rule(
    "warning",
    wrong="for epoch in range(epochs):\n    train(epoch)",
    right="snapshot = ddpjob.Snapshot(folder, world)\nstep = snapshot.load(model=model, optimizer=optimizer)",
)
def elastic_no_checkpoint(script: Script, job: Job) -> Iterator[Found]:
    """Only in an elastic job. All ranks start again each time that a node joins or is lost: without a checkpoint that
    the script saves and loads, they start from step 0."""
    if not job.is_elastic or not script.is_distributed or not script.methods_called("step"):
        return
    steps = [c for c in script.methods_called("backward") if script.on_every_rank(c)]
    loops = [loop for call in steps if (loop := _loop_around(script, call)) is not None]
    if (
        not loops
        or _gives_the_model_away(script)
        or any(isinstance(n, ast.ImportFrom) and _is_star(n) for n in script.nodes)
    ):
        return
    does_save, does_load = _does(script, _SAVES), _does(script, _LOADS)
    if does_save and does_load:
        return
    what = "nothing is saved" if not does_save else "what is saved is never loaded"
    yield at(
        loops[0],
        f"{what}, so the training starts from step 0 each time that a node joins or is lost; save and load model, "
        "optimizer and step with ddpjob.Snapshot",
    )


def _loop_around(script: Script, call: ast.Call) -> ast.AST | None:
    """The outermost loop of the function that calls backward()."""
    loops = [parent for _, parent in script.above(call) if isinstance(parent, ast.For | ast.While)]
    return loops[-1] if loops else None


def _does(script: Script, verbs: set[str]) -> bool:
    """Whether anything is named like what saves, or loads, a state."""
    for node in script.nodes:
        name = node.arg or "" if isinstance(node, ast.keyword) else name_of(node)
        if isinstance(node, Function | ast.ClassDef):
            name = node.name
        words = words_of(name)
        if words & verbs and not words & _LOADS_DATA and script.full_name(node) not in _NO_STATE:
            return True
    return False


_OF_NO_MODEL = {"ddpjob", "logging", "math", "numpy", "os", "sys", "time", "torch", "torchvision", "tqdm"}


def _gives_the_model_away(script: Script) -> bool:
    """Whether a function of another file gets the model or its optimizer, and may load it."""
    modules = {full.split(".")[0] for full in script.imported.values()} - _OF_NO_MODEL
    for call in script.calls:
        if script.called(call).split(".")[0] in modules:
            given = [*call.args, *(k.value for k in call.keywords)]
            words = {w for value in given for n in ast.walk(value) for w in words_of(name_of(n))}
            if words & {"model", "net", "network", "optimizer", "optim", "opt", "state", "self"}:
                return True
    return False


def _is_star(node: ast.ImportFrom) -> bool:
    return any(alias.name == "*" for alias in node.names)
