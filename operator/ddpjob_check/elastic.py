"""Rules for elastic jobs: what breaks when the number of ranks changes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ddpjob_check.data import SAMPLER
from ddpjob_check.groups import fixed_texts
from ddpjob_check.nodes import ends_the_run, has_hidden_arguments, name_of
from ddpjob_check.ranks import at
from ddpjob_check.rule import CheckedJob, Found, rule
from ddpjob_check.script import INIT, Script

_BATCH_NORM = re.compile(r"torch\.nn\.(modules\.batchnorm\.)?(Lazy)?BatchNorm[123]d")
# Families of torchvision.models with BatchNorm layers, unless norm_layer replaces them.
_MODELS_WITH_BATCH_NORM = re.compile(
    r"torchvision\.models\.(\w+\.)?"
    r"(resnet|resnext|wide_resnet|densenet|mobilenet|efficientnet|mnasnet|regnet|shufflenet|googlenet|inception|vgg\d+_bn)"
)
# Names of synchronized or frozen BatchNorm: SyncBatchNorm, convert_syncbn_model, SyncBN; FrozenBatchNorm2d, freeze_bn.
_NORM_OF_ALL_RANKS = re.compile(r"sync_?(batch_?norm|bn)|(frozen|freeze|fix)_?(batch_?norm|bn)", re.IGNORECASE)


@rule(
    "warning", wrong="model = DDP(resnet50())", right="model = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(resnet50()))"
)
def elastic_batch_norm(script: Script, job: CheckedJob) -> Iterator[Found]:
    """Only in an elastic job. BatchNorm normalizes over the samples of one rank. If the ranks share a
    global batch, the samples per rank change with the nodes, and so does the result of the layer."""
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


def _counts_ranks(script: Script, node: ast.AST) -> bool:
    """True if a value is certainly the number of all ranks, not the size of a subgroup."""
    if isinstance(node, ast.Call) and name_of(node.func) == "get_world_size":
        return not node.args and not node.keywords
    if isinstance(node, ast.Name | ast.Attribute) and name_of(node).lower() in ("world_size", "worldsize"):
        calls = [o for o in script.origins(node) if isinstance(o, ast.Call) and name_of(o.func) == "get_world_size"]
        return all(_counts_ranks(script, call) for call in calls)
    return script.variable_read(node) == "WORLD_SIZE"


@rule(
    "warning", wrong='dist.init_process_group("nccl", rank=rank, world_size=4)', right='dist.init_process_group("nccl")'
)
def elastic_fixed_world(script: Script, job: CheckedJob) -> Iterator[Found]:
    """Only in an elastic job. A number of ranks written into the script is right for one number of nodes only: with
    another, the group does not form, or samples are skipped."""
    if not job.is_elastic:
        return
    for place, text, fix in _fixed_worlds(script):
        yield at(place, f"{text}: the number of ranks of an elastic job changes; {fix}")


def _fixed_worlds(script: Script) -> Iterator[tuple[ast.AST, str, str]]:
    """Yield each number of ranks that is fixed in the script: node, text, and fix."""
    for call in script.inits:
        size = script.argument(call, "world_size", 3 if script.called(call) == INIT else None)
        if size is not None and all(map(_is_fixed, script.origins(size))):
            yield size, f"world_size={script.text_of(size)}", "remove rank and world_size: the launcher sets both"
    for call in script.calls_to(SAMPLER):
        size = script.argument(call, "num_replicas", 1)
        if size is not None and all(map(_is_fixed, script.origins(size))):
            yield (
                size,
                f"num_replicas={script.text_of(size)}",
                "remove num_replicas and rank: the sampler gets them from the group",
            )
    for name, value, node in script.variables_set:
        texts = fixed_texts(script, value, node) if name == "WORLD_SIZE" else []
        if texts:
            yield node, f'os.environ["WORLD_SIZE"] = "{texts[0]}"', "remove it: the launcher sets WORLD_SIZE"
    for node in script.nodes:
        test = _test_of_all(node)
        if test is not None and _compares_ranks(script, test):
            yield node, script.text_of(test), "compute what depends on it from dist.get_world_size()"


def _test_of_all(node: ast.AST) -> ast.Compare | None:
    """Return the test `world_size == 4` of an assert, or `world_size != 4` of an if that raises."""
    if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare) and isinstance(node.test.ops[0], ast.Eq):
        return node.test
    if isinstance(node, ast.If) and isinstance(node.test, ast.Compare) and isinstance(node.test.ops[0], ast.NotEq):
        return node.test if ends_the_run(node.body) else None
    return None


def _compares_ranks(script: Script, test: ast.Compare) -> bool:
    """True if one side is the number of ranks, and the other a number."""
    if len(test.ops) != 1:
        return False
    for counted, number in ((test.left, test.comparators[0]), (test.comparators[0], test.left)):
        is_size = any(_counts_ranks(script, n) for n in (counted, *script.origins(counted)) if isinstance(n, ast.AST))
        if is_size and all(map(_is_fixed, script.origins(number))):
            return True
    return False


def _is_fixed(origin: object) -> bool:
    """True for a literal number above 1. The number 1 does not count: scripts use 1 if they form no group."""
    return isinstance(origin, ast.Constant) and type(origin.value) is int and origin.value > 1
