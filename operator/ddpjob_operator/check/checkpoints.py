"""Checkpoints: which rank saves, what is saved, and onto which device it is loaded."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ddpjob_operator.check.groups import backends
from ddpjob_operator.check.nodes import has_hidden_arguments, name_of
from ddpjob_operator.check.ranks import at
from ddpjob_operator.check.rule import Found, Job, rule
from ddpjob_operator.check.script import DDP, Script

_WRAPPERS = {DDP, "torch.nn.SyncBatchNorm.convert_sync_batchnorm", "torch.compile", "torch.nn.DataParallel"}
_DEVICE_WORDS = ("cuda", "gpu", "device", "cpu")


@rule(
    "warning",
    wrong='torch.save(model.module.state_dict(), "model.pt")',
    right='if rank == 0:\n    torch.save(model.module.state_dict(), "model.pt")',
)
def save_on_every_rank(script: Script, job: Job) -> Iterator[Found]:
    """All ranks hold the same parameters. If all write them into one file at once, the file may be damaged."""
    if not script.is_distributed or job.has_one_rank:
        return
    for call in script.calls_to("torch.save"):
        path = script.argument(call, "f", 1)
        if path is None or script.depends_on_rank(path, by_arguments=True) or _is_buffer(script, path):
            continue
        if script.on_every_rank(call):
            yield at(
                call,
                f"torch.save(…, {script.text_of(path)}): every rank writes the same file at the same time; save on "
                "rank 0 only",
            )


@rule("warning", wrong='torch.save(model, "model.pt")', right='torch.save(model.module.state_dict(), "model.pt")')
def save_whole_module(script: Script, job: Job) -> Iterator[Found]:
    """A pickled module names the classes of your files and holds the DDP wrapper: it loads only with
    weights_only=False, and not after a rename."""
    if not script.is_distributed:
        return
    for call in script.calls_to("torch.save"):
        what = script.argument(call, "obj", 0)
        if what is not None and is_module(script, what):
            yield at(
                call,
                f"torch.save({script.text_of(what)}, …) saves the whole module: loading it needs weights_only=False "
                "and the same source files; save its state_dict() (of .module under DDP)",
            )


def is_module(script: Script, value: ast.expr) -> bool:
    """Whether a value is certainly an nn.Module: made by a class of torch or of this file, then perhaps moved."""
    todo, seen = [value], set[object]()
    while todo:
        for origin in script.origins(todo.pop()):
            if origin in seen:
                continue
            seen.add(origin)
            if isinstance(origin, ast.Call) and isinstance(origin.func, ast.Attribute) and origin.func.attr in _MOVES:
                todo.append(origin.func.value)
            elif not _makes_a_module(script, origin):
                return False
    return True


def _makes_a_module(script: Script, origin: object) -> bool:
    if isinstance(origin, ast.Attribute):
        return origin.attr == "module" and any(script.called(o) == DDP for o in script.origins(origin.value))
    if not isinstance(origin, ast.Call):
        return False
    defined = script.definition(origin.func)
    if isinstance(defined, ast.ClassDef):
        return any(script.full_name(b) == "torch.nn.Module" for b in defined.bases)
    name = script.called(origin)
    return (
        name in _WRAPPERS
        or name.startswith("torchvision.models.")
        or (name.startswith("torch.nn.") and name.count(".") == 2 and name[9:10].isupper())
    )


_MOVES = {"to", "cuda", "cpu", "train", "eval", "half", "float", "double"}


@rule("warning", wrong='state = torch.load("model.pt")', right='state = torch.load("model.pt", map_location="cpu")')
def load_without_map_location(script: Script, job: Job) -> Iterator[Found]:
    """torch.load puts tensors on the device that they were saved from: all ranks of a node load onto GPU 0, whose
    memory may not suffice."""
    uses_gpus = "nccl" in backends(script, job) or script.mentions("cuda", "device_ids") or job.gpus
    if not script.is_distributed or job.gpus == 0 or job.has_one_rank or not uses_gpus:
        return
    for call in script.calls_to("torch.load"):
        path = script.argument(call, "f", 0)
        if path is None or script.argument(call, "map_location", 1) is not None or has_hidden_arguments(call):
            continue
        if _is_buffer(script, path) or any(_speaks_of_device(test) for test in script.enclosing_tests(call)):
            continue
        if script.on_every_rank(call):
            yield at(
                call,
                f"torch.load({script.text_of(path)}) without map_location puts the tensors of all ranks on the GPU "
                'that saved them, mostly GPU 0; pass map_location="cpu", or this rank\'s device',
            )


def _speaks_of_device(test: ast.expr) -> bool:
    """`if args.gpu is None: load(path)`: another branch loads the same with a device."""
    return any(word in name_of(n).lower() for n in ast.walk(test) for word in _DEVICE_WORDS)


def _is_buffer(script: Script, path: ast.expr) -> bool:
    """Memory, or a file of this process alone."""
    own = {"io.BytesIO", "tempfile.NamedTemporaryFile", "tempfile.TemporaryFile", "tempfile.mkstemp"}
    return any(script.called(o) in own for o in script.origins(path))
