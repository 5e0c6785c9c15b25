"""Rules about the model and its wrapper: the script uses DDP, calls the model through it, and forms its group."""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator

from ddpjob_check.checkpoints import is_module
from ddpjob_check.gradients import exchanges
from ddpjob_check.nodes import Function, is_main_guard, is_method, name_of, unmoved
from ddpjob_check.ranks import COLLECTIVES, at
from ddpjob_check.rule import CheckedJob, Found, rule
from ddpjob_check.script import DDP, Script

# A script that uses one of these names may need no DDP: they average gradients, or split the model over ranks.
_WRAPPERS = {
    "DDP", "DistributedDataParallel", "DistributedDataParallelCPU", "DistributedOptimizer", "FSDP",
    "FullyShardedDataParallel", "PeriodicModelAverager", "Pipe", "PipelineStage", "PostLocalSGDOptimizer",
    "ZeroRedundancyOptimizer", "distribute_module", "distribute_tensor", "dist_autograd", "fully_shard", "grad_hook",
    "parallelize_module", "register_hook", "register_post_accumulate_grad_hook", "replicate", "rpc", "share_memory",
    "share_memory_",
}  # fmt: skip
_KEEPS = ("torch.", "torchsummary.", "torchinfo.")
_BUILTINS = {"print", "len", "id", "type", "str", "repr", "isinstance", "hasattr", "next", "list", "sum", "super"}


@rule(
    "error",
    wrong="model = Net()\noptimizer = Adam(model.parameters())",
    right="model = DDP(Net())\noptimizer = Adam(model.parameters())",
)
def model_not_wrapped(script: Script, job: CheckedJob) -> Iterator[Found]:
    """Without DistributedDataParallel nothing averages the gradients: every rank trains its own model on its part of
    the data, and no error is raised."""
    if script.uses_a_framework or job.has_one_rank or not any(map(script.on_every_rank, script.inits)):
        return
    if _may_average(script) or not any(map(script.on_every_rank, script.methods_called("backward"))):
        return
    for call in script.calls:
        model = _trained(script, call)
        if model is None or not script.methods_called("step") or not script.on_every_rank(call):
            continue
        outer = script.parent(call)  # a function that gets the optimizer may average the gradients itself
        given_away = isinstance(outer, ast.Call) and not _keeps(script, outer)
        if is_module(script, model) and not given_away and not _varies_or_leaves(script, call, model):
            yield at(
                call,
                f"{script.text_of(call.func)}({script.text_of(model)}.parameters(), …): the model is not wrapped, so "
                f"every rank trains its own; first {script.text_of(model)} = DistributedDataParallel(…)",
            )
            return


def _trained(script: Script, call: ast.Call) -> ast.expr | None:
    """Return the model in `torch.optim.Adam(model.parameters(), …)`."""
    name = script.called(call)
    params = script.argument(call, "params", 0)
    if not name.startswith("torch.optim.") or not name.rpartition(".")[2][:1].isupper() or "lr_scheduler" in name:
        return None
    if not isinstance(params, ast.Call) or not is_method(params, "parameters"):
        return None
    return params.func.value if isinstance(params.func, ast.Attribute) else None


def _may_average(script: Script) -> bool:
    """True if this file uses or imports any name that may average gradients."""
    renamed = {name for name, full in script.imported.items() if full.rpartition(".")[2] in _WRAPPERS}
    if script.mentions(*_WRAPPERS, *renamed) or _has_star_import(script):
        return True
    return any(exchanges(script, call) for call in script.calls)


def _varies_or_leaves(script: Script, call: ast.Call, model: ast.expr) -> bool:
    """True if ranks may train different models on purpose, or if another file's function may wrap this model."""
    makers = set(script.origins(model))
    others = [*call.args[1:], *(k.value for k in call.keywords if k.arg != "params")]
    made_from = [*others, *(m for m in map(unmoved, makers) if isinstance(m, ast.expr))]
    if any(script.depends_on_rank(value, by_arguments=True) for value in made_from):
        return True
    return any(
        not makers.isdisjoint(script.origins(given)) and not _keeps(script, other)
        for other in script.calls
        for given in (*other.args, *(k.value for k in other.keywords))
        if isinstance(given, ast.Name | ast.Attribute)
    )


def _keeps(script: Script, call: ast.Call) -> bool:
    """True if a call certainly does not wrap the model: it calls a function of this file, of torch, or a builtin."""
    name = script.called(call)
    shown = script.definition(call.func) is not None or name_of(call.func) == "__init__"
    of_class = isinstance(call.func, ast.Attribute) and any(script.callers(f) for f in script.methods_named(name))
    return shown or of_class or name.startswith(_KEEPS) or name in _BUILTINS


def _has_star_import(script: Script) -> bool:
    return any(isinstance(n, ast.ImportFrom) and any(a.name == "*" for a in n.names) for n in script.nodes)


# ---------------------------------------------------------------- the step


@rule("error", wrong="loss = model.module(x).mean()\nloss.backward()", right="loss = model(x).mean()\nloss.backward()")
def forward_around_ddp(script: Script, job: CheckedJob) -> Iterator[Found]:
    """DDP averages gradients only after a forward pass through it: with model.module(x) every rank trains its own
    model, and no error is raised."""
    if script.uses_a_framework or job.has_one_rank or script.mentions("no_sync"):
        return
    for call in script.calls:
        inner = call.func.value if is_method(call, "forward") and isinstance(call.func, ast.Attribute) else call.func
        name = _wrapper(script, call, inner)
        if name and not _goes_through_ddp(script, call) and _leads_to_backward(script, call):
            yield at(
                call,
                f"{script.text_of(call)}: the forward pass bypasses DDP, so backward() averages no gradient; call "
                f"{name}(…)",
            )


def _wrapper(script: Script, call: ast.Call, inner: ast.expr) -> str:
    """Return the name of the DDP wrapper that a forward pass certainly bypasses; "" if there is none. A pass bypasses
    DDP if it calls `model.module`, or the network that the same function has passed to DDP earlier."""
    if isinstance(inner, ast.Attribute) and inner.attr == "module" and script.is_wrapped(inner.value):
        return script.text_of(inner.value)
    if not isinstance(inner, ast.Name):
        return ""
    made = script.origins(inner)
    is_known = len(made) == 1 and made[0] is not inner and script.called(made[0]) != DDP
    for ddp in script.calls_to(DDP) if is_known else ():
        kept = script.parent(ddp)
        is_before = script.function(ddp) is script.function(call) and ddp.lineno < call.lineno
        if not is_before or not isinstance(kept, ast.Assign) or any(script.enclosing_tests(ddp)):
            continue
        if script.origins(script.argument(ddp, "module", 0)) == made:
            return script.text_of(kept.targets[0])
    return ""


def _goes_through_ddp(script: Script, call: ast.Call) -> bool:
    """True if the same function calls a wrapped model: this model, or a student whose teacher `call` runs."""
    return any(script.is_wrapped(c.func) for c in script.calls_in(script.function(call)))


def _leads_to_backward(script: Script, call: ast.Call) -> bool:
    """True if this function calls backward() on a value that is certainly computed from the result of `call`."""
    function = script.function(call)
    if any(isinstance(p, ast.With) for _, p in script.above(call)) and script.mentions("no_grad", "inference_mode"):
        return False
    statements = [s for s in script.nodes if isinstance(s, ast.Assign | ast.Expr) and script.function(s) is function]
    made: set[str] = set()
    for statement in sorted(statements, key=lambda s: s.lineno):
        inside = list(ast.walk(statement.value))
        uses = call in inside or any(isinstance(n, ast.Name) and n.id in made for n in inside)
        if isinstance(statement, ast.Assign):
            names = {n.id for t in statement.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
            made = made | names if uses else made - names
        elif uses and any(is_method(n, "backward") for n in inside):
            return True
    return False


# ---------------------------------------------------------------- the group

# Packages that certainly form no process group. Other packages may form one.
NO_GROUP = {
    "PIL", "cv2", "datasets", "ddpjob", "einops", "matplotlib", "mlflow", "numpy", "pandas", "requests", "safetensors",
    "scipy", "sklearn", "tensorboard", "tensorboardX", "tiktoken", "timm", "torch", "torchaudio", "torchmetrics",
    "torchtext", "torchvision", "tqdm", "wandb", "yaml",
}  # fmt: skip
_FORMS_A_GROUP = (
    "init_process_group", "init_device_mesh", "init_rpc", "DeviceMesh", "fully_shard", "is_initialized", "is_available",
    "is_torchelastic_launched", "exec", "runpy", "import_module", "__import__",
)  # fmt: skip
_NEEDS_A_GROUP = {DDP, *COLLECTIVES, "torch.distributed.get_rank", "torch.distributed.get_world_size"}


@rule("error", wrong="model = DDP(net)", right="dist.init_process_group()\nmodel = DDP(net)")
def init_missing(script: Script, job: CheckedJob) -> Iterator[Found]:
    """DDP, the collectives and get_rank() need a process group: without init_process_group() they raise “Default
    process group has not been initialized”."""
    if script.inits or script.uses_a_framework or script.mentions(*_FORMS_A_GROUP):
        return
    if _has_star_import(script) or not imports_only(script, NO_GROUP | sys.stdlib_module_names):
        return
    for call in script.calls:
        if script.called(call) in _NEEDS_A_GROUP and _runs_always(script, call):
            yield at(
                call,
                f"{script.text_of(call.func)}(…): this script never forms a process group; call "
                "torch.distributed.init_process_group(), or ddpjob.init(), first",
            )
            return


def imports_only(script: Script, packages: Collection[str]) -> bool:
    """True if the script imports only from these packages, and no other file of the project."""
    relative = any(isinstance(n, ast.ImportFrom) and n.level for n in script.nodes)
    return not relative and {full.split(".")[0] for full in script.imported.values()} <= set(packages)


def _runs_always(script: Script, node: ast.AST, seen: frozenset[Function] = frozenset()) -> bool:
    """True if starting the file certainly runs this line: the only condition is `if __name__ == "__main__"`."""
    if any(not is_main_guard(test) for test in script.enclosing_tests(node)):
        return False
    if any(isinstance(parent, ast.Try | ast.ClassDef) for _, parent in script.above(node)):
        return False
    function = script.function(node)
    if function is None:
        return True
    callers = () if function in seen else script.callers(function)
    return any(_runs_always(script, c.call, seen | {function}) for c in callers)
